"""Metrics from sums over samples, which masked sums can carry because the sums of several clients add up.

A probability counts as the lower edge of its bin. Each binned metric therefore equals the metric of predictions that
are rounded down to a hundredth.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from posy.metrics import CALIBRATION_BINS, CLASSES, LABELS
from posy.scores import Floats, Ints, Predictions, brier_scores, confidence_bins, log_losses, recalls

Array = npt.NDArray[Any]

BINS = 100
"""Number of equal bins of a probability."""
STEPS = 2**20
"""Number of steps between 0 and 1 for real numbers in sums of whole numbers."""


@dataclass(frozen=True, eq=False)
class BinnedScores:
    """Sums over the samples of one or more clients, for C classes or labels.

    Parameters
    ----------
    totals : numpy.ndarray, (3,)
        The number of samples, and the sums of their negative log-likelihoods and Brier scores in 1 / :data:`STEPS`.
    confusion : numpy.ndarray, (C, C)
        Numbers of samples per true class (row) and predicted class (column); 0 for labels.
    decided : numpy.ndarray, (C, 2, 2)
        For each class or label, numbers of samples without and with it (row) that are predicted without and with it
        (column). Of two classes, the positive class is predicted at the threshold.
    histograms : numpy.ndarray, (C, 2, BINS)
        For each class or label, numbers of samples without and with it in each bin of its probability.
    calibration : numpy.ndarray, (3, CALIBRATION_BINS)
        Numbers of samples and of correct predictions in each bin of confidence, and sums of confidences in 1 /
        :data:`STEPS`.
    """

    totals: Ints
    confusion: Ints
    decided: Ints
    histograms: Ints
    calibration: Ints

    @staticmethod
    def shapes(size: int) -> tuple[tuple[int, ...], ...]:
        """Return the shapes of the sums for C = ``size``, in order."""
        return (3,), (size, size), (size, 2, 2), (size, 2, BINS), (3, CALIBRATION_BINS)

    @classmethod
    def count(cls, size: int) -> int:
        """Return how many numbers the sums contain."""
        return sum(map(math.prod, cls.shapes(size)))

    @classmethod
    def of(cls, p: Predictions) -> "BinnedScores":
        """Return the sums over the samples of predictions."""
        totals = [len(p.y), *(round(STEPS * float(values.sum())) for values in (log_losses(p), brier_scores(p)))]
        sums = [np.zeros(shape, np.int64) for shape in cls.shapes(p.size)]
        sums[0] += totals
        is_positive = p.outputs >= p.threshold
        if p.target == CLASSES:
            np.add.at(sums[1], (p.y, p.predicted), 1)
            bins, confidences, correct = confidence_bins(p)
            for row, weights in enumerate((np.ones(len(bins)), correct, STEPS * confidences)):
                sums[4][row] = np.rint(np.bincount(bins, weights, minlength=CALIBRATION_BINS)).astype(np.int64)
            if not p.is_binary:
                is_positive = p.predicted[:, None] == np.arange(p.size)
        columns = np.arange(p.size)
        np.add.at(sums[2], (columns, p.indicators, is_positive.astype(np.int64)), 1)
        np.add.at(sums[3], (columns, p.indicators, bins_of(p.outputs)), 1)
        return cls(*sums)

    @classmethod
    def from_numbers(cls, numbers: Sequence[int], size: int) -> "BinnedScores":
        """Return the sums in the flat list :attr:`numbers`."""
        shapes = cls.shapes(size)
        cuts = np.cumsum([math.prod(shape) for shape in shapes])[:-1]
        parts = np.split(np.array(numbers, np.int64), cuts)
        return cls(*(part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)))

    def is_consistent(self, target: str, samples: int) -> bool:
        """Return whether the sums can come from this number of samples."""
        parts = [self.totals[0], *self.histograms.sum(axis=(1, 2)), *self.decided.sum(axis=(1, 2))]
        parts += [self.confusion.sum(), self.calibration[0].sum()] if target == CLASSES else []
        return all(part == samples for part in parts)

    @property
    def numbers(self) -> list[int]:
        """All sums as a flat list."""
        parts = (self.totals, self.confusion, self.decided, self.histograms, self.calibration)
        return [int(number) for part in parts for number in part.ravel()]

    def values(self, target: str, positive: int = 1, sensitivity: float = 0.9) -> dict[str, float]:
        """Return the metrics that the samples define, keyed by name; the arguments are as in ``Predictions``."""
        samples = int(self.totals[0])
        if not samples:
            return {}
        size = len(self.confusion)
        is_binary = target == CLASSES and size == 2
        ranked = [positive] if is_binary else list(range(size))
        defined = [c for c in ranked if self.histograms[c].any(axis=1).all()]
        values: dict[str, float | None] = {
            "log-loss": self.totals[1] / STEPS / samples,
            "brier": self.totals[2] / STEPS / samples,
        }
        if defined:
            values["auroc"] = float(np.mean([auroc(self.histograms[c]) for c in defined]))
            values["average-precision"] = float(np.mean([average_precision(self.histograms[c]) for c in defined]))
        counts = self.confusion if target == CLASSES else None
        hits, predicted, actual = _counts(self.decided, counts)
        values |= {n: float(v) for n, v in f1_scores(hits, predicted, actual, micro=target == LABELS).items()}
        if counts is not None:
            present = [recall for recall in recalls(counts) if recall is not None]
            values["accuracy"] = float(np.trace(counts) / samples)
            values["balanced-accuracy"] = float(np.mean(present))
            gaps = self.calibration[2] / STEPS - self.calibration[1]
            values["calibration-error"] = float(np.abs(gaps).sum() / samples)
        if is_binary:
            (negatives, wrong), (missed, positives) = self.decided[positive].tolist()
            values["sensitivity"] = positives / (positives + missed) if positives + missed else None
            values["specificity"] = negatives / (negatives + wrong) if negatives + wrong else None
            values["specificity-at-sensitivity"] = float(specificity_at(self.histograms[positive], sensitivity))
        return {name: float(value) for name, value in values.items() if value is not None and math.isfinite(value)}

    def auroc_error(self, target: str, positive: int = 1) -> float:
        """Return the largest possible difference between the binned AUROC and the AUROC of the exact probabilities.

        It is half the share of pairs of a positive and a negative sample that fall into one bin.
        """
        is_binary = target == CLASSES and len(self.confusion) == 2
        ranked = [positive] if is_binary else range(len(self.confusion))
        errors = []
        for label in ranked:
            negative, of_class = self.histograms[label].astype(np.float64)
            if pairs := negative.sum() * of_class.sum():
                errors.append(float(negative @ of_class) / 2 / pairs)
        return float(np.mean(errors)) if errors else 0.0


def bins_of(probabilities: Floats) -> Ints:
    """Return the bin 0..BINS-1 of each probability."""
    return np.clip((probabilities * BINS).astype(np.int64), 0, BINS - 1)


def auroc(histogram: Array) -> Floats:
    """Return the AUROC from the weights of negative and positive samples per bin; ties count half.

    Parameters
    ----------
    histogram : numpy.ndarray, (..., 2, U)
        Weights of the negative and of the positive samples in U bins, in the order of their probabilities.

    Returns
    -------
    numpy.ndarray, (...)
        NaN without positive or negative samples.
    """
    negative, positive = np.moveaxis(np.asarray(histogram, np.float64), -2, 0)
    below = np.cumsum(negative, axis=-1) - negative
    area = (positive * (below + negative / 2)).sum(axis=-1)
    return _ratio(area, negative.sum(axis=-1) * positive.sum(axis=-1))


def average_precision(histogram: Array) -> Floats:
    """Return the average precision; the histogram and the result are as in :func:`auroc`."""
    negative, positive = np.moveaxis(np.asarray(histogram, np.float64)[..., ::-1], -2, 0)
    true = np.cumsum(positive, axis=-1)
    precision = _ratio(true, np.cumsum(positive + negative, axis=-1), absent=0.0)
    result = _ratio((positive * precision).sum(axis=-1), positive.sum(axis=-1))
    return np.where(negative.any(axis=-1), result, np.nan)


def specificity_at(histogram: Array, sensitivity: float) -> Floats:
    """Return the highest specificity with at least this sensitivity; otherwise as in :func:`auroc`."""
    negative, positive = np.moveaxis(np.asarray(histogram, np.float64)[..., ::-1], -2, 0)
    reached = _ratio(np.cumsum(positive, axis=-1), positive.sum(axis=-1, keepdims=True)) >= sensitivity - 1e-12
    false_positives = _ratio(np.cumsum(negative, axis=-1), negative.sum(axis=-1, keepdims=True))
    lowest = np.where(reached, false_positives, np.inf).min(axis=-1)
    return np.where(np.isfinite(lowest), 1 - lowest, np.nan)


def f1_scores(hits: Array, predicted: Array, actual: Array, *, micro: bool) -> dict[str, Floats]:
    """Return averages of the F1 scores 2 TP / (predicted + actual), as scikit-learn computes them.

    Parameters
    ----------
    hits, predicted, actual : numpy.ndarray, (..., C)
        Numbers of correctly predicted, of predicted and of actual samples of each class or label.
    micro : bool
        Whether these are labels, which also have a micro average, and of which absent ones count.
    """
    sums = np.asarray(predicted + actual, np.float64)
    scores = _ratio(2.0 * hits, sums, absent=0.0)
    occurring = np.ones(sums.shape, bool) if micro else sums > 0
    values = {
        "macro-f1": _ratio((scores * occurring).sum(axis=-1), occurring.sum(axis=-1)),
        "weighted-f1": _ratio((scores * actual).sum(axis=-1), np.asarray(actual, np.float64).sum(axis=-1), absent=0.0),
    }
    if micro:
        values["micro-f1"] = _ratio(2.0 * hits.sum(axis=-1), sums.sum(axis=-1), absent=0.0)
    return values


def _ratio(a: Array, b: Array, absent: float = np.nan) -> Floats:
    """Return a / b, or ``absent`` where b is 0."""
    a, b = np.broadcast_arrays(np.asarray(a, np.float64), np.asarray(b, np.float64))
    result: Floats = np.divide(a, b, out=np.full(a.shape, absent), where=b != 0)
    return result


def _counts(decided: Ints, confusion: Ints | None) -> tuple[Floats, Floats, Floats]:
    """Return numbers of correctly predicted, predicted and actual samples per class or label, ``(C,)`` each."""
    if confusion is not None:
        parts = np.diag(confusion), confusion.sum(axis=0), confusion.sum(axis=1)
    else:
        parts = decided[:, 1, 1], decided[:, :, 1].sum(axis=1), decided[:, 1].sum(axis=1)
    hits, predicted, actual = (part.astype(np.float64) for part in parts)
    return hits, predicted, actual
