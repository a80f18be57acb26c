"""What JPEG costs: ``python -m benchmarks.jpeg --data-dir datasets``, where cifar10.npz holds images stored as JPEG.

The images of the original files are not to be had from them. Instead they are compressed once and twice more, as they
were the first time (quality 75, colours at half the resolution), each time on blocks that begin elsewhere: a block that
is compressed again in its place hardly changes. What the further times cost tells what the first one may have cost.
Clients of PPFE's CIFAR-10 setting (two classes, 150 training samples) train on each, alone, or together and then alone.
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
from posy.data.npz import NpzFile
from posy.listing import print_table

Images = npt.NDArray[np.uint8]

FOLDER = "POSY_JPEG_DATA"
QUALITY, HALF_COLOURS = 75, "4:2:0"
BORDERS = (5, 2)
"""Pixels that are put around an image for each further compression: where its blocks begin, modulo 8."""
METHODS = {"local": {}, "fedavg-ft": {"fedavg_ft_epochs": 5}}
SEEDS = (0, 1, 2)
CLIENTS, ROUNDS = 12, 16
"""In the paper's setting a client takes part in 16 rounds, too."""


def compressed(images: Images, border: int) -> Images:
    """Return images ``(n, H, W, 3)`` as JPEG leaves them, whose blocks begin ``border`` pixels before their corner."""
    around = np.pad(images, ((0, 0), (border, border), (border, border), (0, 0)), mode="reflect")
    found = np.empty_like(around)
    for place, image in enumerate(around):
        file = io.BytesIO()
        Image.fromarray(image).save(file, "JPEG", quality=QUALITY, subsampling=HALF_COLOURS)
        found[place] = np.asarray(Image.open(file))
    return found[:, border:-border, border:-border]


def images(further: int) -> tuple[Images, npt.NDArray[Any]]:
    """Return the training images, compressed so many further times, and their classes."""
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
    report: Annotated[Path, typer.Option(help="Where the figures go.")] = Path("benchmarks/results/jpeg.json"),
) -> None:
    """Train on images that have been compressed once, twice, three times; a run that is there is not made again."""
    os.environ[FOLDER] = str(data_dir.absolute())
    rows: list[dict[str, Any]] = []
    for method, own in METHODS.items():
        accuracy: dict[str, list[float]] = {}
        for seed in SEEDS:
            for stored in STORED:
                name = f"{method}-{stored}-{seed}"
                if not (output / name / "summary.json").is_file():
                    posy.run(
                        experiment="ppfe-cifar10-s2", run_name=name, output_dir=str(output), method=method, seed=seed,
                        dataset=f"benchmarks.jpeg:{stored}", num_clients=CLIENTS, fraction_train=1.0,
                        test_fraction=0.75, num_server_rounds=ROUNDS, evaluate_every=ROUNDS, checkpoint_every=0,
                        save_models=False, **own,
                    )  # fmt: skip
                last = posy.load(output / name).summary["local"]["last"]
                accuracy.setdefault(stored, []).append(last["weighted"])
        rows.append({"method": method, "accuracy": accuracy})
    report.write_text(json.dumps({"rows": rows}, indent=1) + "\n", encoding="utf-8")
    table = [
        (row["method"], *map(percent, row["accuracy"].values()), *(percent(_lost(row["accuracy"], i)) for i in (1, 2)))
        for row in rows
    ]
    print_table("accuracy after local training", ("method", *STORED, "second costs", "third costs"), table)


def _lost(accuracy: dict[str, list[float]], which: int) -> list[float]:
    """Return what a further compression has cost, by seed."""
    before, after = (accuracy[STORED[i]] for i in (which - 1, which))
    return [b - a for b, a in zip(before, after, strict=True)]


if __name__ == "__main__":
    try:
        typer.run(main)
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED) from None
