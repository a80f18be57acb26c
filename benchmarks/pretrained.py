"""Measure the benefit of pretrained weights: ``python -m benchmarks.pretrained --data-dir datasets``.

A network trains centrally on a part of CIFAR-10 for a few epochs. Clients with other images then start from its
weights, from its weights with frozen convolutions, or from random weights. The benchmark reports served and local
accuracy for three seeds. All runs of a method and seed differ only in their initial weights and frozen layers.
"""

import json
import os
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

import posy
from benchmarks.measure import percent
from posy.commands.launch import INTERRUPTED
from posy.data.readers.npz import NpzFile
from posy.listing import print_table

CENTRAL, FEDERATED = 20_000, 6_000
"""Number of images for central training, and for the clients."""
FOLDER = "POSY_PRETRAINED_DATA"
METHODS = ("fedavg", "fedrep")
STARTS = {"random": {}, "pretrained": {"weights": "W"}, "pretrained, frozen": {"weights": "W", "frozen": "conv1,conv2"}}
SEEDS = (0, 1, 2)
COMMON = {
    **{"model": "cnn", "batch_size": 10, "lr": 0.005, "evaluate_every": 5, "checkpoint_every": 0},
    "stratify": False,
}


def images(begin: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return ``count`` images of the training set from index ``begin``, in a fixed random order, and their classes."""
    archive = NpzFile(Path(os.environ[FOLDER]) / "cifar10.npz")
    indices = np.random.default_rng(0).permutation(50_000)[begin : begin + count]
    return archive.read("x_train")[indices], archive.read("y_train")[indices]


def central() -> tuple[np.ndarray, np.ndarray]:
    """Return the images and classes for central training."""
    return images(0, CENTRAL)


def federated() -> tuple[np.ndarray, np.ndarray]:
    """Return the clients' images and classes, which do not overlap with the images for central training."""
    return images(CENTRAL, FEDERATED)


def main(
    data_dir: Annotated[Path, typer.Option(help="Folder that holds cifar10.npz.")] = Path("datasets"),
    output: Annotated[Path, typer.Option(help="Folder of the runs.")] = Path("results/pretrained"),
    report: Annotated[Path, typer.Option(help="Output file.")] = Path("benchmarks/results/pretrained.json"),
    epochs: Annotated[int, typer.Option(min=1)] = 5,
    rounds: Annotated[int, typer.Option(min=1)] = 10,
) -> None:
    """Train centrally, then on clients. Skip runs that already exist."""
    os.environ[FOLDER] = str(data_dir.absolute())

    def load_or_run(name: str, **settings: Any) -> Any:
        if not (output / name / "summary.json").is_file():
            posy.run(run_name=name, output_dir=str(output), **{**COMMON, **settings})
        return posy.load(output / name)

    first = load_or_run(
        f"central-{epochs}", method="fedavg", dataset="benchmarks.pretrained:central", num_clients=1, partition="iid",
        num_server_rounds=1, local_epochs=epochs, lr=0.01, test_fraction=0.1,
    )  # fmt: skip
    weights = str((first.models / "client-0.safetensors").absolute())
    rows: list[dict[str, Any]] = []
    for method in METHODS:
        for start, start_settings in STARTS.items():
            accuracy: dict[str, list[float]] = {"served": [], "local": []}
            for seed in SEEDS:
                record = load_or_run(
                    f"{method}-{start.replace(', ', '-')}-{epochs}-{rounds}-{seed}",
                    method=method, dataset="benchmarks.pretrained:federated", num_clients=20, dirichlet_alpha=0.1,
                    num_server_rounds=rounds, local_epochs=1, seed=seed,
                    **(start_settings | {"weights": weights} if start_settings else {}),
                )  # fmt: skip
                for point, values in accuracy.items():
                    values.append(record.summary[point]["last"]["mean"])
            rows.append({"method": method, "start": start, **accuracy, "bytes-up": record.summary["bytes-up"]})
    central_accuracy = first.summary["served"]["last"]["mean"]
    report.write_text(json.dumps({"central": central_accuracy, "rows": rows}, indent=1) + "\n", encoding="utf-8")
    table = [
        (row["method"], row["start"], *(percent(row[point]) for point in ("served", "local")), f"{row['bytes-up']:,}")
        for row in rows
    ]
    print_table(f"central accuracy {central_accuracy:.1%}", ("method", "start", "served", "local", "bytes up"), table)


if __name__ == "__main__":
    try:
        typer.run(main)
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED) from None
