"""Measure the accuracy of FedAvg under differential privacy, for several ε and each mode.

Each run has 100 clients and a budget (ε, δ) for the whole run. The script appends each finished run to a file of JSON
lines and skips the runs that the file contains, so you can resume an interrupted measurement and add runs. The figure
has a panel for each data set and a line for each mode. The dashed line is FedAvg without noise.

The settings of each mode are not tuned. ``dp-scores=exact`` publishes the exact accuracy. The budget does not cover
this accuracy, which is acceptable because the data is public.
"""

import json
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Mapping
from contextlib import redirect_stdout, suppress
from pathlib import Path
from typing import Any

import numpy as np
import typer

import posy
from benchmarks.measure import machine
from posy import figure_style as style
from posy import figures
from posy.settings import DivergedError
from posy.storage import append

PLAIN = "off"
SHARED: dict[str, dict[str, Any]] = {
    "digits": {"dataset": "digits", "stratify": False, "model": "linear", "batch_size": 10, "num_server_rounds": 30},
    "cifar10": {
        "dataset": "cifar10",
        "stratify": False,
        "model": "benchmarks.networks:small_cnn",
        "batch_size": 50,
        "num_server_rounds": 10,
        "local_epochs": 1,
    },
}
"""Settings of all runs on a data set."""
MODES: dict[str, dict[str, dict[str, Any]]] = {
    "digits": {
        PLAIN: {"local_epochs": 5, "lr": 0.05},
        "central": {"local_epochs": 5, "lr": 0.05, "dp_clip": 0.5, "client_weights": "uniform"},
        "local": {"local_epochs": 5, "lr": 0.05, "dp_clip": 0.5, "num_server_rounds": 5},
        "sample": {"local_epochs": 2, "lr": 0.5, "dp_clip": 1.0},
    },
    "cifar10": {
        PLAIN: {"lr": 0.1},
        "central": {"lr": 0.1, "dp_clip": 0.5, "client_weights": "uniform"},
        "local": {"lr": 0.1, "dp_clip": 0.5, "num_server_rounds": 5},
        "sample": {"lr": 0.5, "dp_clip": 0.5},
    },
}
"""Settings of each mode on a data set."""
EPSILONS = (1.0, 2.0, 4.0, 8.0)
TITLES = {"digits": "digits", "cifar10": "CIFAR-10 (JPEG)"}

Key = tuple[str, str, float, int]
"""Data set, mode, ε (0 without noise) and seed."""


def settings_of(key: Key, clients: int, delta: float, rounds: int) -> dict[str, Any]:
    """Return the settings of a run. If ``rounds`` is 0, use the rounds in ``SHARED`` and ``MODES``."""
    dataset, mode, epsilon, seed = key
    settings: dict[str, Any] = {
        **{"method": "fedavg", "num_clients": clients, "partition": "iid", "seed": seed},
        **SHARED[dataset],
        **MODES[dataset][mode],
    }
    if mode != PLAIN:
        settings |= {"dp": mode, "dp_epsilon": epsilon, "dp_delta": delta, "dp_scores": "exact"}
    if rounds:
        settings["num_server_rounds"] = rounds
    return settings


def measured(settings: Mapping[str, Any], data_dir: Path) -> dict[str, Any]:
    """Run one federation, and return the accuracy of the served model in the last round, and the spent ε.

    A diverged run also has an accuracy, which is close to the share of the largest class.
    """
    with tempfile.TemporaryDirectory() as output, redirect_stdout(sys.stderr):
        with suppress(DivergedError):
            posy.run(
                data_dir=str(data_dir), output_dir=output, run_name="run", save_models=False, checkpoint_every=0,
                evaluate_every=settings["num_server_rounds"], **settings,
            )  # fmt: skip
        summary = json.loads((Path(output) / "run" / "summary.json").read_text(encoding="utf-8"))
    accuracy = round(summary["served"]["last"]["weighted"], 4)
    spent = summary["privacy"]["epsilon"] if "privacy" in summary else None
    seconds, diverged = round(summary["seconds"], 1), summary["status"] == "diverged"
    return {"accuracy": accuracy, "spent": spent, "seconds": seconds, "diverged": diverged}


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the finished runs in a file, or an empty list if it does not exist."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def runs_of(rows: Iterable[Mapping[str, Any]], clients: int, delta: float, rounds: int) -> dict[Key, Mapping[str, Any]]:
    """Return the rows with the current settings, by key. Ignore other rows of the file."""
    keyed = [((row["dataset"], row["mode"], row["epsilon"], row["seed"]), row) for row in rows]
    added = {"stratify": False}  # the value in rows from before this setting existed
    return {key: row for key, row in keyed if added | row["settings"] == settings_of(key, clients, delta, rounds)}


def panels_of(rows: Iterable[Mapping[str, Any]]) -> tuple[dict[str, Any], dict[str, dict[str, float]]]:
    """Return the panels of the figure: mean and spread over the seeds by mode and ε, and the accuracy without noise."""
    accuracies: dict[tuple[str, str, float], list[float]] = defaultdict(list)
    for row in rows:
        accuracies[row["dataset"], row["mode"], row["epsilon"]].append(row["accuracy"])
    panels: dict[str, dict[str, list[tuple[float, float, float]]]] = defaultdict(lambda: defaultdict(list))
    dashed: dict[str, dict[str, float]] = defaultdict(dict)
    for (dataset, mode, epsilon), values in sorted(accuracies.items()):
        if mode == PLAIN:
            dashed[TITLES[dataset]]["no noise"] = float(np.mean(values))
        else:
            panels[TITLES[dataset]][mode].append((epsilon, float(np.mean(values)), float(np.std(values))))
    return {name: dict(lines) for name, lines in panels.items()}, dict(dashed)


def main(
    output: Path,
    datasets: list[str] = typer.Option(list(SHARED)),  # noqa: B008 - typer's form
    modes: list[str] = typer.Option([PLAIN, "central", "local", "sample"]),  # noqa: B008
    epsilons: list[float] = typer.Option(list(EPSILONS)),  # noqa: B008
    seeds: list[int] = typer.Option([0, 1, 2]),  # noqa: B008
    clients: int = 100,
    delta: float = 1e-5,
    rounds: int = typer.Option(0, help="communication rounds; 0: the rounds that the script sets"),
    data_dir: Path = Path("datasets"),
    picture: Path | None = typer.Option(None, help="file of the figure, for example docs/privacy-accuracy.png"),  # noqa: B008
) -> None:
    """Measure the missing runs, append them to OUTPUT (JSON lines), and draw the runs of these settings."""
    keys: list[Key] = [
        (dataset, mode, epsilon, seed)
        for seed in seeds
        for dataset in datasets
        for mode in modes
        for epsilon in ([0.0] if mode == PLAIN else epsilons)
    ]
    finished = runs_of(read_rows(output), clients, delta, rounds)
    for key in keys:
        if key in finished:
            continue
        settings = settings_of(key, clients, delta, rounds)
        row = dict(zip(("dataset", "mode", "epsilon", "seed"), key, strict=True))
        row |= {"settings": settings, "clients": clients, "delta": delta}
        row |= {**measured(settings, data_dir), "machine": machine()}
        append(output, json.dumps(row) + "\n")
        finished[key] = row
        print(f"{key}: accuracy {row['accuracy']}, {row['seconds']} s", flush=True)
    if picture is not None:
        panels, dashed = panels_of(finished.values())
        figures.small_multiples(
            panels, picture, title=f"Accuracy with differential privacy, {clients} clients, δ = {delta:g}",
            note="band: mean ± standard deviation over the seeds", xlabel="ε of the whole run", ylabel="accuracy",
            percent=True, columns=2, log=True, dashed=dashed, colours={"no noise": style.BASELINE},
        )  # fmt: skip


if __name__ == "__main__":
    typer.run(main)
