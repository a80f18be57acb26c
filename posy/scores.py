"""Compute metrics of predictions on labelled samples, for classification, multi-label classification and regression.

A metric that is not defined for the samples, such as the AUROC of samples from a single class, has no value (None).
Means over classes skip the classes for which the metric is not defined.
"""

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from posy.histograms import auroc, average_precision, f1_scores, ratio, specificity_at
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
        The class that counts as positive if there are two classes.
    threshold : float
        Minimum probability at which the positive class, or a label, is predicted.
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
        """The classes or labels over which ranking metrics are averaged; for two classes, only the positive class."""
        return [self.positive] if self.is_binary else list(range(self.size))

    def rows(self, indices: npt.NDArray[np.integer]) -> "Predictions":
        """Return the predictions for the samples with these indices, which may repeat."""
        return replace(self, y=self.y[indices], outputs=self.outputs[indices])


# -- per-sample quantities ---------------------------------------------------------------------------


def log_losses(p: Predictions) -> Floats:
    """Return the negative log-likelihood of each sample ``(n,)``; with labels, the mean over its labels.

    Like scikit-learn, the function replaces probabilities below float64's epsilon with this epsilon.
    """
    if p.target == CLASSES:
        likelihoods = p.outputs[np.arange(len(p.y)), p.y][:, None]
    else:
        likelihoods = np.where(p.indicators == 1, p.outputs, 1 - p.outputs)
    losses: Floats = -np.log(np.maximum(likelihoods, np.finfo(np.float64).eps)).mean(axis=1)
    return losses


def brier_scores(p: Predictions) -> Floats:
    """Return the squared error of the probabilities of each sample ``(n,)``.

    For two classes, it is the error of one class: half of the original score (Brier, 1950). For more classes, it is the
    sum over the classes. For labels, it is the mean over the labels.
    """
    squares = np.square(p.outputs - p.indicators)
    scores: Floats = squares.mean(axis=1) if p.target == LABELS or p.is_binary else squares.sum(axis=1)
    return scores


def confidence_bins(p: Predictions) -> tuple[Ints, Floats, npt.NDArray[np.bool_]]:
    """Return each sample's bin of the calibration error, its confidence, and whether its prediction is correct."""
    confidences = p.outputs.max(axis=1)
    bins = np.clip(np.ceil(confidences * CALIBRATION_BINS).astype(np.int64) - 1, 0, CALIBRATION_BINS - 1)
    return bins, confidences, p.predicted == p.y


# -- metrics of weighted samples -------------------------------------------------------------------------


class _Weighted:
    """Predictions for n samples, B sets of weights ``(B, n)``, and quantities that several metrics share."""

    def __init__(self, p: Predictions, weights: Floats) -> None:
        self.p, self.weights = p, weights

    def mean(self, values: npt.NDArray[Any]) -> Floats:
        """Return the weighted means ``(B, ...)`` of the samples' values ``(n, ...)``."""
        sums = self.weights @ values
        means: Floats = sums / self.weights.sum(axis=1).reshape(-1, *[1] * (sums.ndim - 1))
        return means

    def rate(self, samples: npt.NDArray[np.bool_], *, positive: bool) -> Floats:
        """Return the weighted fraction of the given samples that are predicted as positive, or as negative."""
        predicted = (self.p.outputs[:, self.p.positive] >= self.p.threshold) == positive
        return ratio(self.weights @ (samples & predicted), self.weights @ samples)

    @cached_property
    def counts(self) -> tuple[Floats, Floats, Floats]:
        """Weights of the correctly predicted, predicted and actual samples of each class or label ``(B, C)``."""
        predicted, actual = self.p.predicted, self.p.indicators
        if self.p.target == CLASSES:
            predicted = (predicted[:, None] == np.arange(self.p.size)).astype(np.int64)
        return self.weights @ (predicted * actual), self.weights @ predicted, self.weights @ actual

    @cached_property
    def f1(self) -> dict[str, Floats]:
        """Averages of the F1 scores, keyed by metric."""
        hits, predicted, actual = self.counts
        return f1_scores(hits, predicted, actual, micro=self.p.target == LABELS)

    def histogram(self, label: int) -> Floats:
        """Return, for each distinct probability, the weight of the samples without and with a label ``(B, 2, U)``."""
        order = np.argsort(self.p.outputs[:, label], kind="stable")
        scores, has_label = self.p.outputs[order, label], self.p.indicators[order, label] == 1
        starts = np.flatnonzero(np.r_[True, scores[1:] != scores[:-1]])
        ordered = self.weights[:, order]
        parts = [np.add.reduceat(np.where(mask, ordered, 0.0), starts, axis=1) for mask in (~has_label, has_label)]
        return np.stack(parts, axis=1)

    @cached_property
    def ranking(self) -> dict[str, Floats]:
        """Ranking metrics, keyed by name, averaged over the classes or labels for which they are defined."""
        histograms = [self.histogram(label) for label in self.p.ranked]
        functions = {"auroc": auroc, "average-precision": average_precision}
        return {
            name: _mean([function(histogram) for histogram in histograms], 0) for name, function in functions.items()
        }


def _mean(values: npt.ArrayLike, axis: int) -> Floats:
    """Return the mean of the values other than NaN, or NaN if there are no such values."""
    array = np.asarray(values)
    is_defined = np.isfinite(array)
    return ratio(np.where(is_defined, array, 0.0).sum(axis), is_defined.sum(axis))


def _accuracy(w: _Weighted) -> Floats:
    correct = w.p.predicted == w.p.y
    return w.mean(correct.all(axis=1) if w.p.target == LABELS else correct)


def _balanced_accuracy(w: _Weighted) -> Floats:
    hits, _, actual = w.counts
    return _mean(ratio(hits, actual), -1)


def _specificity_at_sensitivity(w: _Weighted) -> Floats:
    return specificity_at(w.histogram(w.p.positive), w.p.sensitivity)


def _calibration_error(w: _Weighted) -> Floats:
    bins, confidences, correct = confidence_bins(w.p)
    gaps = w.mean((bins[:, None] == np.arange(CALIBRATION_BINS)) * (confidences - correct)[:, None])
    return np.asarray(np.abs(gaps).sum(axis=1), np.float64)


def _rmse(w: _Weighted) -> Floats:
    return np.asarray(np.sqrt(w.mean(np.square(w.p.outputs - w.p.y)).mean(axis=1)), np.float64)


def _r2(w: _Weighted) -> Floats:
    centred = w.p.y - w.p.y.mean(axis=0)  # to avoid cancellation in the variance
    variances = w.mean(np.square(centred)) - np.square(w.mean(centred))
    # Rounding makes the variance of a constant value slightly positive.
    varied = variances > 1e-12 * np.square(centred).max(axis=0)
    errors = w.mean(np.square(w.p.outputs - w.p.y))
    return _mean(1 - ratio(errors, np.where(varied, variances, 0.0)), -1)


FUNCTIONS: dict[str, Callable[[_Weighted], Floats]] = {
    "accuracy": _accuracy,
    "balanced-accuracy": _balanced_accuracy,
    "macro-f1": lambda w: w.f1["macro-f1"],
    "weighted-f1": lambda w: w.f1["weighted-f1"],
    "micro-f1": lambda w: w.f1["micro-f1"],
    "auroc": lambda w: w.ranking["auroc"],
    "average-precision": lambda w: w.ranking["average-precision"],
    "sensitivity": lambda w: w.rate(w.p.y == w.p.positive, positive=True),
    "specificity": lambda w: w.rate(w.p.y != w.p.positive, positive=False),
    "specificity-at-sensitivity": _specificity_at_sensitivity,
    "log-loss": lambda w: w.mean(log_losses(w.p)),
    "brier": lambda w: w.mean(brier_scores(w.p)),
    "calibration-error": _calibration_error,
    "mae": lambda w: w.mean(np.abs(w.p.outputs - w.p.y).mean(axis=1)),
    "rmse": _rmse,
    "r2": _r2,
}
"""The functions for the metrics in :data:`posy.metrics.METRICS`, keyed by name.

They return the same values as scikit-learn's functions, whose checks would dominate the cost for a small client.
"""


def weighted(p: Predictions, weights: Floats, names: Collection[str]) -> dict[str, Floats]:
    """Return the named metrics of weighted samples ``(B,)``, keyed by name; NaN where a metric is undefined.

    Parameters
    ----------
    p : Predictions
        The predictions for n ≥ 1 samples.
    weights : numpy.ndarray, float64, (B, n)
        B sets of weights of the samples. A sample with weight k counts k times.
    names : collection of str
        Names of metrics that are defined for the target.
    """
    samples = _Weighted(p, weights)
    return {name: FUNCTIONS[name](samples) for name in names}


def values_of(predictions: Predictions, names: Collection[str]) -> dict[str, float]:
    """Return the named metrics that are defined for the samples, keyed by name."""
    if not (count := len(predictions.y)):
        return {}
    values = {name: float(v[0]) for name, v in weighted(predictions, np.ones((1, count)), names).items()}
    return {
        # Rounding may exceed 1.
        name: min(max(value, 0.0), 1.0) if METRICS[name].in_percent else value
        for name, value in values.items()
        if math.isfinite(value)
    }


def value_of(metric: str, predictions: Predictions) -> float | None:
    """Return a metric's value for predictions, or None if the metric is not defined for the samples."""
    return values_of(predictions, [metric]).get(metric)


def confusion_matrix(predictions: Predictions) -> Ints:
    """Return the number of samples per true class (row) and predicted class (column) ``(C, C)``."""
    matrix = np.zeros((predictions.size, predictions.size), np.int64)
    np.add.at(matrix, (predictions.y, predictions.predicted), 1)
    return matrix


def recalls(matrix: Ints) -> list[float | None]:
    """Return the recall of each class in a confusion matrix, or None for a class without samples."""
    return [int(row[label]) / int(row.sum()) if row.any() else None for label, row in enumerate(matrix)]
