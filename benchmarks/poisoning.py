"""Measure the accuracy of honest clients when two of ten clients attack, for each attack and each defence.

``python -m benchmarks.poisoning digits`` trains FedAvg on ten clients in this process. The attackers flip the labels of
their training samples (label flip), reverse and triple their updates (sign flip), or flip the labels and scale the
resulting updates by ten (scaled update).
Each finished run is one line of a file (``.jsonl``). A restart skips finished runs with the same number of rounds, and
draws the figure. A run whose training diverges has no accuracy. In the figure, the cell for its attack and
defence is grey, and the table shows how many seeds diverged.
"""

import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import typer
from flwr.app import Array, Message, MessageType

from benchmarks.measure import machine
from posy import figures
from posy.client_app.workspace import Workspace
from posy.commands.launch import INTERRUPTED
from posy.listing import print_table
from posy.server_app.app import run
from posy.server_app.in_process import InProcessGrid
from posy.server_app.recorder import Recorder
from posy.settings import RunError
from posy.storage import append
from posy.strategies.registry import read_settings

CLIENTS, ATTACKERS, SEEDS = 10, (3, 7), (0, 1, 2)
Change = Callable[[npt.NDArray[Any], npt.NDArray[Any]], npt.NDArray[Any]]
"""Returns the model that an attacker sends, given the model that it received and the model that it trained."""


def reversed_update(received: npt.NDArray[Any], trained: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return the received model minus three times the honest update."""
    return received - 3 * (trained - received)


def scaled_update(received: npt.NDArray[Any], trained: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return the received model plus ten times the update, which results from training on flipped labels."""
    return received + 10 * (trained - received)


ATTACKS: dict[str, tuple[bool, Change | None]] = {
    "none": (False, None),
    "label flip": (True, None),
    "sign flip": (False, reversed_update),
    "scaled update": (True, scaled_update),
}
"""For each attack: whether the attackers flip their labels, and how they change their updates."""
DEFENCES: dict[str, dict[str, Any]] = {
    "none": {},
    "norm bound": {"max-norm-ratio": 3.0},
    "median": {"robust": "median"},
    "trimmed mean": {"robust": "trimmed-mean", "trim-fraction": 0.2},
    "Krum": {"robust": "krum", "max-attackers": 2},
    "Multi-Krum": {"robust": "multi-krum", "max-attackers": 2},
    "geometric median": {"robust": "geometric-median"},
    "median and norm bound": {"robust": "median", "max-norm-ratio": 3.0},
}
DATASETS: dict[str, dict[str, Any]] = {
    "digits": {"dataset": "digits", "num-server-rounds": 30, "lr": 0.05, "model": "mlp"},
    "cifar10": {
        **{"dataset": "cifar10", "num-server-rounds": 30, "lr": 0.05, "model": "cnn-3fc"},
        **{"batch-size": 50, "train-samples": 500},
    },
}
SHARED: dict[str, Any] = {
    "method": "fedavg",
    "num-clients": CLIENTS,
    "partition": "dirichlet",
    "stratify": False,
    "dirichlet-alpha": 1.0,
    "local-epochs": 2,
    "batch-size": 10,
    "checkpoint-every": 0,
    "save-models": False,
}


class PoisoningGrid(InProcessGrid):
    """Runs the clients in this process, and changes the trained models of the attackers."""

    def __init__(self, change: Change | None) -> None:
        super().__init__(CLIENTS)
        self.change = change

    def _answers(self, messages: Sequence[Message], end: float) -> list[Message]:
        replies = super()._answers(messages, end)
        if self.change is None:
            return replies
        message_by_id = {message.metadata.message_id: message for message in messages}
        for reply in replies:
            message = message_by_id[reply.metadata.reply_to_message_id]
            if reply.has_error() or message.metadata.message_type != MessageType.TRAIN:
                continue
            if message.content.config_records["config"]["client"] in ATTACKERS:
                received, trained = (m.content.array_records["arrays"]["model"].numpy() for m in (message, reply))
                changed = self.change(received, trained).astype(np.float32)
                reply.content.array_records["arrays"]["model"] = Array(changed)
        return replies


def write_data(folder: Path, settings: dict[str, Any], flips: bool) -> dict[str, Any]:
    """Write the samples and the partition of a run to files, and return the settings of a run on these files.

    With ``flips``, label y of an attacker's training sample becomes C − 1 − y. Test samples keep their labels.
    """
    workspace = Workspace(read_settings(settings))
    dataset, partition = workspace.dataset, workspace.partition
    labels = np.array(dataset.y)
    if flips:
        for client in ATTACKERS:
            rows = partition.train[client]
            labels[rows] = dataset.task.num_classes - 1 - labels[rows]
    np.savez(folder / "data.npz", x_train=dataset.x, y_train=labels)
    parts = {"train": [rows.tolist() for rows in partition.train], "test": [rows.tolist() for rows in partition.test]}
    (folder / "parts.json").write_text(json.dumps(parts), encoding="utf-8")
    unchanged = {
        key: value for key, value in settings.items() if key not in ("dirichlet-alpha", "train-samples", "data-dir")
    }
    files = {"dataset": str(folder / "data.npz"), "partition": "file", "partition-file": str(folder / "parts.json")}
    return unchanged | files


def accuracy(settings: dict[str, Any], attack: str, defence: str) -> dict[str, Any]:
    """Run one cell, and return the honest clients' mean served accuracy, and the clients whose updates were limited.

    The accuracy is None if the training diverged.
    """
    flips, change = ATTACKS[attack]
    with TemporaryDirectory(prefix="posy-poisoning-") as name:
        folder = Path(name)
        directories = {"output-dir": str(folder / "runs"), "run-name": "run"}
        config = write_data(folder, settings | directories, flips) | DEFENCES[defence]
        try:
            recorder = run(PoisoningGrid(change), config | {"evaluate-every": config["num-server-rounds"]})
        except RunError as error:
            if "training diverged" not in str(error):
                raise
            return {"accuracy": None}
    assert isinstance(recorder, Recorder)
    rows = {c: row for c, row in recorder.totals.clients.items() if c not in ATTACKERS and "served_accuracy" in row}
    summary = recorder.summary
    limited: dict[str, Any] = {key: summary[key] for key in ("clipped", "discarded", "down-weighted") if key in summary}
    return {"accuracy": float(np.mean([row["served_accuracy"] for row in rows.values()])), **limited}


def cells(seeds: Sequence[int]) -> Iterator[tuple[str, str, int]]:
    """Yield every combination of attack, defence and seed."""
    for seed in seeds:
        for attack in ATTACKS:
            for defence in DEFENCES:
                yield attack, defence, seed


def draw(lines: Sequence[dict[str, Any]], path: Path, title: str) -> None:
    """Draw the mean accuracy over the seeds, a row for each defence and a column for each attack."""
    means = mean_accuracies(lines)
    matrix = [[100 * means.get((attack, defence), np.nan) for attack in ATTACKS] for defence in DEFENCES]
    panel = figures.Panel(
        matrix, "", "attack of two of ten clients", "defence", "accuracy of honest clients, %", [*ATTACKS], [*DEFENCES]
    )
    figures.heatmaps([panel], path, title=title)


def mean_accuracies(lines: Sequence[dict[str, Any]]) -> dict[tuple[str, str], float]:
    """Return the mean accuracy over the seeds by attack and defence; NaN if a run diverged."""
    return {cell: float(np.mean(values)) for cell, values in accuracies(lines).items()}


def accuracies(lines: Sequence[dict[str, Any]]) -> dict[tuple[str, str], list[float]]:
    """Return the accuracies of the seeds by attack and defence; NaN for a run that diverged."""
    by_cell: dict[tuple[str, str], list[float]] = defaultdict(list)
    for line in lines:
        accuracy = line["accuracy"]
        by_cell[line["attack"], line["defence"]].append(math.nan if accuracy is None else accuracy)
    return by_cell


def cell_text(values: Sequence[float]) -> str:
    """Return mean and standard deviation in percent, or the number of diverged runs."""
    if diverged := sum(map(math.isnan, values)):
        return f"{diverged} of {len(values)} diverged"
    return f"{100 * np.mean(values):.1f} ± {100 * np.std(values):.1f}" if values else ""


def main(
    dataset: Annotated[str, typer.Argument(help=f"One of {', '.join(DATASETS)}.")] = "digits",
    data_dir: Annotated[Path, typer.Option(help="Folder with the data sets.")] = Path("datasets"),
    seeds: Annotated[int, typer.Option(help="Number of seeds, starting at 0.")] = len(SEEDS),
    rounds: Annotated[int, typer.Option(help="Rounds of a run; 0: the rounds of the benchmark.")] = 0,
    output: Annotated[Path, typer.Option(help="Folder of the results.")] = Path("benchmarks/results"),
    figure: Annotated[
        Path | None, typer.Option(help="File of the figure; default: docs/poisoning-DATASET.png.")
    ] = None,
) -> None:
    """Run the missing cells, print the accuracies, and draw the figure."""
    report = output / f"poisoning-{dataset}.jsonl"
    lines = [json.loads(text) for text in report.read_text().splitlines()] if report.is_file() else []
    settings = SHARED | DATASETS[dataset] | {"data-dir": str(data_dir.absolute())}
    settings |= {"num-server-rounds": rounds} if rounds else {}
    lines = [line for line in lines if line["rounds"] == settings["num-server-rounds"]]
    finished = {(line["attack"], line["defence"], line["seed"]) for line in lines}
    output.mkdir(parents=True, exist_ok=True)
    for attack, defence, seed in cells(range(seeds)):
        if (attack, defence, seed) in finished:
            continue
        cell = {"attack": attack, "defence": defence, "seed": seed, "rounds": settings["num-server-rounds"]}
        line = {**cell, **accuracy(settings | {"seed": seed}, attack, defence), "machine": machine()}
        append(report, json.dumps(line) + "\n")
        lines.append(line)
    by_cell = accuracies(lines)
    rows = [(defence, *(cell_text(by_cell[attack, defence]) for attack in ATTACKS)) for defence in DEFENCES]
    print_table("accuracy of honest clients, %", ("defence", *ATTACKS), rows)
    draw(lines, figure or Path(f"docs/poisoning-{dataset}.png"), f"FedAvg on {dataset}, mean over {seeds} seeds")


if __name__ == "__main__":
    try:
        typer.run(main)
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED) from None
