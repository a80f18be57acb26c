"""Store the masked sums of a fold's scores, and add them over the folds of a cross-validation.

The server adds only the sums that it has already unmasked, never the numbers of a single client.
"""

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from posy.binned import BinnedScores
from posy.data.task import Task
from posy.metrics import CLASSES, VALUES
from posy.scores import recalls
from posy.storage import read_json, write_json
from posy.strategies.columns import POINTS
from posy.strategies.run_settings import RunSettings
from posy.strategies.score_sums import Tally, metrics_in
from posy.value_sums import rescaled

FILE = "score-sums.json"
"""File in the folder of a fold."""


def write_sums(folder: Path, sums: Mapping[str, Any], task: Task) -> None:
    """Write the sums of a fold's last evaluation (``Totals.sums``), and the facts of the task that define them."""
    write_json(folder / FILE, {**_facts(task), "mean": task.value_mean, "std": task.value_std, "sums": sums})


def add_sums(folders: Iterable[Path], task: Task, run: RunSettings, names: Collection[str]) -> dict[str, Tally]:
    """Return the sums over the folds, with the metrics ``names`` over all their samples, keyed by evaluation point.

    A point is omitted if the folds report different sums there. The result is empty if a fold has no readable sums, or
    if it has other classes, labels or values than the task.
    """
    try:
        stored = [read_json(folder / FILE) for folder in folders]
    except (OSError, ValueError):  # an earlier version did not store sums
        return {}
    if any({key: fold[key] for key in _facts(task)} != _facts(task) for fold in stored):
        return {}
    tallies = {}
    for point in POINTS:
        parts = [_rescaled(fold["sums"][point], fold, task) for fold in stored if point in fold["sums"]]
        if parts and len({len(part["numbers"]) for part in parts}) == 1:
            numbers = [sum(column) for column in zip(*(part["numbers"] for part in parts), strict=True)]
            clients, samples = max(part["clients"] for part in parts), sum(part["samples"] for part in parts)
            metrics = metrics_in(numbers, samples, task, run)
            reported = {name: value for name, value in metrics.items() if name in names}
            tallies[point] = Tally(clients, samples, 0, reported, tuple(numbers))
    return tallies


def confusion_in(tally: Tally, task: Task) -> npt.NDArray[np.int64] | None:
    """Return the confusion matrix ``(C, C)`` in the sums, or None if they contain none."""
    if task.target != CLASSES or len(tally.numbers) <= 1:
        return None
    return BinnedScores.from_numbers(tally.numbers, task.num_classes).confusion


def pooled_entry(tally: Tally, task: Task, matrix: npt.NDArray[np.int64] | None) -> dict[str, Any]:
    """Return the summary's entry ``pooled`` for an evaluation point, with the confusion matrix if there is one."""
    entry: dict[str, Any] = {"samples": tally.samples, "metrics": dict(tally.metrics)}
    if matrix is not None:
        entry["recall"] = dict(zip(task.class_names, recalls(matrix), strict=True))
        entry["confusion"] = matrix.tolist()
    return entry


def _facts(task: Task) -> dict[str, Any]:
    """Return the facts that must be equal in all folds. Only values may have another scale in each fold."""
    return {"target": task.target, "names": list(task.class_names)}


def _rescaled(part: Mapping[str, Any], fold: Mapping[str, Any], task: Task) -> Mapping[str, Any]:
    """Return the sums of a fold in the unit of the task, because each fold standardises values by its training rows."""
    if task.target != VALUES:
        return part
    before, after = (fold["mean"], fold["std"]), (task.value_mean, task.value_std)
    return {**part, "numbers": rescaled(part["numbers"], part["samples"], before, after)}
