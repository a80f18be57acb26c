"""Metrics of predictions on labelled samples, for classification, multi-label classification and regression.

A metric that the samples do not define, such as the AUROC of samples from a single class, has no value (None). Means
over classes skip the classes for which the metric is not defined.
"""

import math
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from posy.metrics import CALIBRATION_BINS, CLASSES, LABELS, METRICS

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Predictions:
    """The labels of n samples, and a model's predictions for them.

    Parameters
    ----------
    target : str
        A target in :mod:`posy.metrics`.
    y : numpy.ndarray
        Classes ``(n,)``, int64 in 0..C-1; labels ``(n, C)``, 0 or 1; or values ``(n, C)``.
    outputs : numpy.ndarray, float64, (n, C)
        Probabilities of the classes, which sum to 1; probabilities of the labels; or predicted values.
    positive : int
        Class that counts as positive, for two classes.
    threshold : float
        Minimum probability with which the positive class, or a label, is predicted.
    sensitivity : float
        Minimum sensitivity for ``specificity-at-sensitivity``.
    """

    target: str
    y: npt.NDArray[Any]
    outputs: Floats
    positive: int = 1
    threshold: float = 0.5
    sensitivity: float = 0.9

    @property
    def size(self) -> int:
        """Number of classes, labels or values C."""
        return int(self.outputs.shape[1])

    @property
    def is_binary(self) -> bool:
        """Whether there are two classes."""
        return self.target == CLASSES and self.size == 2

    @cached_property
    def predicted(self) -> Ints:
        """The most probable class of each sample ``(n,)``, or its predicted labels ``(n, C)``."""
        if self.target == LABELS:
            return (self.outputs >= self.threshold).astype(np.int64)
        return self.outputs.argmax(axis=1)

    @cached_property
    def indicators(self) -> Ints:
        """Whether each sample has each class or label ``(n, C)``, 0 or 1."""
        if self.target == LABELS:
            return self.y.astype(np.int64)
        return (self.y[:, None] == np.arange(self.size)).astype(np.int64)

    @cached_property
    def ranked(self) -> list[int]:
        """The classes or labels over which ranking metrics are averaged: of two classes, only the positive one."""
        return [self.positive] if self.is_binary else list(range(self.size))

    def rows(self, indices: npt.NDArray[np.integer]) -> "Predictions":
        """Return the predictions for some of the samples, which may repeat."""
        return replace(self, y=self.y[indices], outputs=self.outputs[indices])


Function = Callable[[Predictions], float | None]


# -- classification --------------------------------------------------------------------------------------


def _accuracy(p: Predictions) -> float:
    correct = p.predicted == p.y
    return float((correct.all(axis=1) if p.target == LABELS else correct).mean())


def _balanced_accuracy(p: Predictions) -> float:
    return float(np.mean([recall for recall in recalls(confusion_matrix(p)) if recall is not None]))


def _f1(average: str) -> Function:
    def f1(p: Predictions) -> float:
        from sklearn.metrics import f1_score  # noqa: PLC0415 - takes a second to import

        return float(f1_score(p.y, p.predicted, average=average, zero_division=0))

    return f1


def _auroc(p: Predictions) -> float | None:
    from sklearn.metrics import roc_auc_score  # noqa: PLC0415 - takes a second to import

    return _mean_over_classes(p, roc_auc_score)


def _average_precision(p: Predictions) -> float | None:
    from sklearn.metrics import average_precision_score  # noqa: PLC0415 - takes a second to import

    return _mean_over_classes(p, average_precision_score)


def _mean_over_classes(p: Predictions, function: Callable[[Ints, Floats], float]) -> float | None:
    """Return the mean of a ranking metric over the classes that have positive and negative samples."""
    defined = [c for c in p.ranked if 0 < p.indicators[:, c].sum() < len(p.y)]
    return float(np.mean([function(p.indicators[:, c], p.outputs[:, c]) for c in defined])) if defined else None


def _sensitivity(p: Predictions) -> float | None:
    return _rate(p, p.y == p.positive, positive=True)


def _specificity(p: Predictions) -> float | None:
    return _rate(p, p.y != p.positive, positive=False)


def _rate(p: Predictions, samples: npt.NDArray[np.bool_], *, positive: bool) -> float | None:
    """Return the fraction of the samples that are predicted as positive or as negative."""
    if not samples.any():
        return None
    return float(((p.outputs[samples, p.positive] >= p.threshold) == positive).mean())


def _specificity_at_sensitivity(p: Predictions) -> float | None:
    from sklearn.metrics import roc_curve  # noqa: PLC0415 - takes a second to import

    positive = p.y == p.positive
    if positive.all() or not positive.any():
        return None
    false_positives, sensitivities, _ = roc_curve(positive, p.outputs[:, p.positive], drop_intermediate=False)
    return float(1 - false_positives[sensitivities >= p.sensitivity - 1e-12].min())


def _log_loss(p: Predictions) -> float:
    return float(log_losses(p).mean())


def log_losses(p: Predictions) -> Floats:
    """Return the negative log-likelihood of each sample ``(n,)``; of labels, their mean over the labels."""
    if p.target == CLASSES:
        likelihoods = p.outputs[np.arange(len(p.y)), p.y][:, None]
    else:
        likelihoods = np.where(p.indicators == 1, p.outputs, 1 - p.outputs)
    losses: Floats = -np.log(np.maximum(likelihoods, np.finfo(np.float64).tiny)).mean(axis=1)
    return losses


def _brier(p: Predictions) -> float:
    return float(brier_scores(p).mean())


def brier_scores(p: Predictions) -> Floats:
    """Return the squared error of the probabilities of each sample ``(n,)``.

    For two classes it is the error of one of them (Brier, 1950, halved), for more classes the sum, for labels the mean.
    """
    squares = np.square(p.outputs - p.indicators)
    scores: Floats = squares.mean(axis=1) if p.target == LABELS or p.is_binary else squares.sum(axis=1)
    return scores


def _calibration_error(p: Predictions) -> float:
    bins, confidences, correct = confidence_bins(p)
    gaps = np.bincount(bins, confidences - correct, minlength=CALIBRATION_BINS)
    return float(np.abs(gaps).sum() / len(bins))


def confidence_bins(p: Predictions) -> tuple[Ints, Floats, npt.NDArray[np.bool_]]:
    """Return each sample's bin of the calibration error, its confidence, and whether its prediction is correct."""
    confidences = p.outputs.max(axis=1)
    bins = np.clip(np.ceil(confidences * CALIBRATION_BINS).astype(np.int64) - 1, 0, CALIBRATION_BINS - 1)
    return bins, confidences, p.predicted == p.y


# -- regression ------------------------------------------------------------------------------------------


def _mae(p: Predictions) -> float:
    return float(np.abs(p.outputs - p.y).mean())


def _rmse(p: Predictions) -> float:
    return float(np.sqrt(np.square(p.outputs - p.y).mean()))


def _r2(p: Predictions) -> float | None:
    from sklearn.metrics import r2_score  # noqa: PLC0415 - takes a second to import

    varied = np.ptp(p.y, axis=0) > 0
    return float(r2_score(p.y[:, varied], p.outputs[:, varied])) if varied.any() else None


FUNCTIONS: dict[str, Function] = {
    "accuracy": _accuracy,
    "balanced-accuracy": _balanced_accuracy,
    "macro-f1": _f1("macro"),
    "weighted-f1": _f1("weighted"),
    "micro-f1": _f1("micro"),
    "auroc": _auroc,
    "average-precision": _average_precision,
    "sensitivity": _sensitivity,
    "specificity": _specificity,
    "specificity-at-sensitivity": _specificity_at_sensitivity,
    "log-loss": _log_loss,
    "brier": _brier,
    "calibration-error": _calibration_error,
    "mae": _mae,
    "rmse": _rmse,
    "r2": _r2,
}
"""The functions of :data:`posy.metrics.METRICS`, keyed by the names of the metrics."""
_FROM_SKLEARN = {
    "macro-f1", "weighted-f1", "micro-f1", "auroc", "average-precision", "specificity-at-sensitivity", "r2"
}  # fmt: skip


def value_of(metric: str, predictions: Predictions) -> float | None:
    """Return a metric's value for predictions, or None if the samples do not define it."""
    value = FUNCTIONS[metric](predictions) if len(predictions.y) else None
    if value is None or not math.isfinite(value):
        return None
    return min(max(float(value), 0.0), 1.0) if METRICS[metric].in_percent else float(value)  # rounding may exceed 1


def values_of(predictions: Predictions, names: Collection[str]) -> dict[str, float]:
    """Return the named metrics that the samples define, keyed by name."""
    with _unchecked(names):
        values = {name: value_of(name, predictions) for name in names}
    return {name: value for name, value in values.items() if value is not None}


def _unchecked(names: Collection[str]) -> AbstractContextManager[None]:
    """Let scikit-learn skip its checks, which take longer than most metrics of a small client."""
    if not _FROM_SKLEARN.intersection(names):
        return nullcontext()
    import sklearn  # noqa: PLC0415 - takes a second to import

    context: AbstractContextManager[None] = sklearn.config_context(assume_finite=True, skip_parameter_validation=True)
    return context


def confusion_matrix(predictions: Predictions) -> Ints:
    """Return the number of samples per true class (row) and predicted class (column) ``(C, C)``."""
    matrix = np.zeros((predictions.size, predictions.size), np.int64)
    np.add.at(matrix, (predictions.y, predictions.predicted), 1)
    return matrix


def recalls(matrix: Ints) -> list[float | None]:
    """Return the recall of each class in a confusion matrix, or None for a class without samples."""
    return [int(row[label]) / int(row.sum()) if row.any() else None for label, row in enumerate(matrix)]
