"""Measure how much accuracy JPEG compression costs: ``python -m benchmarks.jpeg --data-dir datasets``.

cifar10.npz in the data folder holds images stored as JPEG, from which the originals cannot be recovered. The benchmark
compresses the images once or twice more with the same options (quality 75, colours at half the resolution). Each
compression shifts the block grid, because another compression of the same block hardly changes it. The cost of the
additional compressions indicates the cost of the first. Clients of PPFE's CIFAR-10 setting (two classes, 150 training
samples) train on each version, either alone, or first together and then alone.
"""

import io
import json
import os
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import typer
from PIL import Image

import posy
from benchmarks.measure import percent
from posy.commands.launch import INTERRUPTED
from posy.data.readers.npz import NpzFile
from posy.listing import print_table

Images = npt.NDArray[np.uint8]

FOLDER = "POSY_JPEG_DATA"
QUALITY, HALF_COLOURS = 75, "4:2:0"
BORDERS = (5, 2)
"""Pixels of padding around an image in each additional compression, which shift the block grid (modulo 8)."""
METHODS = {"local": {}, "fedavg-ft": {"fedavg_ft_epochs": 5}}
SEEDS = (0, 1, 2)
CLIENTS, ROUNDS = 12, 16
"""In the paper's setting, a client also participates in 16 rounds."""


def compressed(images: Images, border: int) -> Images:
    """Return images ``(n, H, W, 3)`` after JPEG compression; the blocks start ``border`` pixels outside the image."""
    padded = np.pad(images, ((0, 0), (border, border), (border, border), (0, 0)), mode="reflect")
    decoded = np.empty_like(padded)
    for index, image in enumerate(padded):
        file = io.BytesIO()
        Image.fromarray(image).save(file, "JPEG", quality=QUALITY, subsampling=HALF_COLOURS)
        decoded[index] = np.asarray(Image.open(file))
    return decoded[:, border:-border, border:-border]


def images(further: int) -> tuple[Images, npt.NDArray[Any]]:
    """Return the training images after ``further`` additional compressions, and their classes."""
    archive = NpzFile(Path(os.environ[FOLDER]) / "cifar10.npz")
    x = archive.read("x_train")[:10_000]
    for border in BORDERS[:further]:
        x = compressed(x, border)
    return x, archive.read("y_train")[:10_000]


once, twice, thrice = partial(images, 0), partial(images, 1), partial(images, 2)
STORED = ("once", "twice", "thrice")


def main(
    data_dir: Annotated[Path, typer.Option(help="Folder that holds cifar10.npz.")] = Path("datasets"),
    output: Annotated[Path, typer.Option(help="Folder of the runs.")] = Path("results/jpeg"),
    report: Annotated[Path, typer.Option(help="Output file.")] = Path("benchmarks/results/jpeg.json"),
) -> None:
    """Train on images compressed once, twice and three times. Skip runs that already exist."""
    os.environ[FOLDER] = str(data_dir.absolute())
    rows: list[dict[str, Any]] = []
    for method, hparams in METHODS.items():
        accuracy: dict[str, list[float]] = {}
        for seed in SEEDS:
            for stored in STORED:
                name = f"{method}-{stored}-{seed}"
                if not (output / name / "summary.json").is_file():
                    posy.run(
                        experiment="ppfe-cifar10-s2", run_name=name, output_dir=str(output), method=method, seed=seed,
                        dataset=f"benchmarks.jpeg:{stored}", num_clients=CLIENTS, fraction_train=1.0,
                        test_fraction=0.75, num_server_rounds=ROUNDS, evaluate_every=ROUNDS, checkpoint_every=0,
                        save_models=False, **hparams,
                    )  # fmt: skip
                last = posy.load(output / name).summary["local"]["last"]
                accuracy.setdefault(stored, []).append(last["weighted"])
        rows.append({"method": method, "accuracy": accuracy})
    report.write_text(json.dumps({"rows": rows}, indent=1) + "\n", encoding="utf-8")
    table = [
        (row["method"], *map(percent, row["accuracy"].values()), *(percent(_loss(row["accuracy"], i)) for i in (1, 2)))
        for row in rows
    ]
    print_table("accuracy after local training", ("method", *STORED, "second costs", "third costs"), table)


def _loss(accuracy: dict[str, list[float]], additional: int) -> list[float]:
    """Return the accuracy that an additional compression costs, by seed."""
    before, after = (accuracy[STORED[i]] for i in (additional - 1, additional))
    return [b - a for b, a in zip(before, after, strict=True)]


if __name__ == "__main__":
    try:
        typer.run(main)
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED) from None
