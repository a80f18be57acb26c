"""Compute scores over all test samples of a run, as if they belonged to one client."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from posy.bootstrap import intervals
from posy.data.task import Task
from posy.metrics import CLASSES, Metric
from posy.predictions import read_predictions
from posy.randomness import numpy_generator
from posy.scores import Ints, Predictions, confusion_matrix, recalls, values_of
from posy.strategies.columns import Columns, predictions_with
from posy.strategies.run_settings import RunSettings

MAJORITY = 0.8
"""Minimum share of samples in one class at which a summary warns that accuracy hides mistakes in other classes."""


def pooled_scores(
    predictions_at: Mapping[str, Predictions], task: Task, run: RunSettings, point: str, columns: Columns
) -> dict[str, Any]:
    """Return the metrics over the test samples of all clients, keyed by evaluation point.

    Each entry contains the number of samples and the value of each metric in ``columns``. For classification, it also
    contains the recall of each class and the confusion matrix, unless ``all-metrics = none``. The entry of the method's
    point also contains a confidence interval for each metric.

    Parameters
    ----------
    predictions_at : mapping of str to Predictions
        The predictions for the test samples of all clients, keyed by evaluation point.
    task : Task
        The task of the run.
    run : RunSettings
        The settings of the run.
    point : str
        The point at which the method is scored.
    columns : Columns
        The scores that the run reports.
    """
    scores: dict[str, Any] = {}
    for at, predictions in predictions_at.items():
        if not len(predictions.y):
            continue
        values = values_of(predictions, columns.metrics)
        entry: dict[str, Any] = {"samples": len(predictions.y), "metrics": values}
        if at == point:
            rng = numpy_generator(run.seed, "bootstrap")
            entry["intervals"] = intervals(predictions, list(values), rng)
        if task.target == CLASSES and columns.other_metrics:
            matrix = confusion_matrix(predictions)
            entry["recall"] = dict(zip(task.class_names, recalls(matrix), strict=True))
            entry["confusion"] = matrix.tolist()
        scores[at] = entry
    return scores


def read_clients(
    folders: Sequence[Path], clients: Sequence[int], task: Task, run: RunSettings, point: str
) -> Predictions:
    """Return the predictions for the test samples of several clients at an evaluation point.

    Each folder contains a file for each point and client. A client without a file is skipped.
    """
    empty = _none(task, run)
    paths = [folder / f"{point}-{client}.csv" for folder in folders for client in clients]
    return joined([read_predictions(path, empty, task.class_names) for path in paths if path.is_file()], task, run)


def joined(parts: Sequence[Predictions], task: Task, run: RunSettings) -> Predictions:
    """Return the predictions of several clients or folds, one after the other."""
    empty = _none(task, run)
    parts = [empty, *parts]
    y, outputs = (np.concatenate([getattr(part, name) for part in parts]) for name in ("y", "outputs"))
    return replace(empty, y=y, outputs=outputs)


def _none(task: Task, run: RunSettings) -> Predictions:
    """Return an empty set of predictions."""
    count = len(task.class_names)
    shape, kind = ((0,), np.int64) if task.target == CLASSES else ((0, count), np.float64)
    return predictions_with(task, run, np.empty(shape, kind), np.empty((0, count)))


def class_counts(predictions: Predictions) -> Ints:
    """Return the number of samples of each class ``(C,)``; empty for labels and values."""
    if predictions.target != CLASSES:
        return np.zeros(0, np.int64)
    return np.bincount(predictions.y, minlength=predictions.size)


def majority_notice(counts: Ints, names: Sequence[str], metric: Metric) -> str:
    """Return a warning if always predicting the largest class gives a high accuracy, or an empty string.

    ``counts`` contains the number of test samples of each class ``(C,)``.
    """
    if metric.name != "accuracy" or not counts.sum():
        return ""
    share = counts.max() / counts.sum()
    if share < MAJORITY:
        return ""
    return (
        f"{100 * share:.1f} % of the test samples are of class {names[int(counts.argmax())]}, so a model that always "
        f"predicts this class has an accuracy of {100 * share:.1f} %; set metric = balanced-accuracy or auroc"
    )
