"""Compute metrics from sums over samples, which secure aggregation can mask and add over clients.

Each probability is replaced by the lower edge of its bin. Each binned metric therefore equals the metric of
predictions that are rounded down to a hundredth.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from posy.histograms import auroc, average_precision, f1_scores, specificity_at
from posy.metrics import CALIBRATION_BINS, CLASSES, LABELS
from posy.scores import Floats, Ints, Predictions, brier_scores, confidence_bins, log_losses, recalls

BINS = 100
"""Number of equal-width bins for a probability."""
STEPS = 2**20
"""Number of fixed-point steps between 0 and 1, for real numbers in sums of integers."""
RANKING = ("auroc", "average-precision", "specificity-at-sensitivity")
OF_COUNTS = ("balanced-accuracy", "macro-f1", "weighted-f1", "micro-f1")
"""Metrics that need the histograms, and metrics that need the counts of each class or label."""


@dataclass(frozen=True, eq=False)
class BinnedScores:
    """Sums over the samples of one or more clients, for C classes or labels.

    Parameters
    ----------
    totals : numpy.ndarray, (3,)
        The number of samples, and the sums of their negative log-likelihoods and Brier scores in 1 / :data:`STEPS`.
    confusion : numpy.ndarray, (C, C)
        Number of samples per true class (row) and predicted class (column); 0 for labels.
    decided : numpy.ndarray, (C, 2, 2)
        For each class or label, a confusion matrix: true absence and presence (rows), and predicted absence and
        presence (columns). With two classes, the threshold decides whether the positive class is predicted.
    histograms : numpy.ndarray, (C, 2, BINS)
        For each class or label and each bin of its probability, the number of samples without it and with it.
    calibration : numpy.ndarray, (3, CALIBRATION_BINS)
        Number of samples, number of correct predictions, and sum of confidences in 1 / :data:`STEPS`, for each bin of
        confidence.
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
        """Return the number of values in the sums."""
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
        """Restore the sums from the flat list :attr:`numbers`."""
        shapes = cls.shapes(size)
        cuts = np.cumsum([math.prod(shape) for shape in shapes])[:-1]
        parts = np.split(np.array(numbers, np.int64), cuts)
        return cls(*(part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)))

    def only(self, target: str, names: Collection[str]) -> "BinnedScores":
        """Return the sums with zeros in each part that none of the metrics ``names`` needs."""
        needs = set(names)
        counts = bool(needs & {*OF_COUNTS, *(("accuracy",) if target == CLASSES else ())})
        return BinnedScores(
            self.totals * np.array([1, "log-loss" in needs, "brier" in needs], np.int64),
            self.confusion * counts,
            self.decided * bool(needs & {"sensitivity", "specificity"} or (counts and target == LABELS)),
            self.histograms * bool(needs & {*RANKING}),
            self.calibration * ("calibration-error" in needs),
        )

    def is_consistent(self, target: str, samples: int) -> bool:
        """Return whether the sums are possible for this number of samples. Parts of zeros are allowed."""
        parts = [self.totals[:1], self.histograms.sum(axis=(1, 2)), self.decided.sum(axis=(1, 2))]
        parts += [self.confusion.sum(keepdims=True), self.calibration[:1].sum(keepdims=True)] * (target == CLASSES)
        return bool(self.totals[0] == samples) and all((part == samples).all() or not part.any() for part in parts)

    @property
    def numbers(self) -> list[int]:
        """All sums as a flat list."""
        parts = (self.totals, self.confusion, self.decided, self.histograms, self.calibration)
        return [int(number) for part in parts for number in part.ravel()]

    def values(self, target: str, positive: int = 1, sensitivity: float = 0.9) -> dict[str, float]:
        """Return the metrics that are defined for the samples, keyed by name; see ``Predictions`` for the arguments."""
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
        if counts is not None and counts.any():
            present = [recall for recall in recalls(counts) if recall is not None]
            values["accuracy"] = float(np.trace(counts) / samples)
            values["balanced-accuracy"] = float(np.mean(present))
        if self.calibration.any():
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

        This is half the fraction of pairs of a positive and a negative sample that fall into the same bin.
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


def _counts(decided: Ints, confusion: Ints | None) -> tuple[Floats, Floats, Floats]:
    """Return the counts of correctly predicted, predicted and actual samples per class or label, each ``(C,)``."""
    if confusion is not None:
        parts = np.diag(confusion), confusion.sum(axis=0), confusion.sum(axis=1)
    else:
        parts = decided[:, 1, 1], decided[:, :, 1].sum(axis=1), decided[:, 1].sum(axis=1)
    hits, predicted, actual = (part.astype(np.float64) for part in parts)
    return hits, predicted, actual
