"""Compute metrics from the weights of samples, summed per probability bin, or per class or label."""

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float64]


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
    return ratio(area, negative.sum(axis=-1) * positive.sum(axis=-1))


def average_precision(histogram: Array) -> Floats:
    """Return the average precision; the histogram and the result are as in :func:`auroc`."""
    negative, positive = np.moveaxis(np.asarray(histogram, np.float64)[..., ::-1], -2, 0)
    true = np.cumsum(positive, axis=-1)
    precision = ratio(true, np.cumsum(positive + negative, axis=-1), absent=0.0)
    result = ratio((positive * precision).sum(axis=-1), positive.sum(axis=-1))
    return np.where(negative.any(axis=-1), result, np.nan)


def specificity_at(histogram: Array, sensitivity: float) -> Floats:
    """Return the highest specificity at this sensitivity or more; for the histogram and result, see :func:`auroc`."""
    negative, positive = np.moveaxis(np.asarray(histogram, np.float64)[..., ::-1], -2, 0)
    reached = ratio(np.cumsum(positive, axis=-1), positive.sum(axis=-1, keepdims=True)) >= sensitivity - 1e-12
    false_positives = ratio(np.cumsum(negative, axis=-1), negative.sum(axis=-1, keepdims=True))
    lowest = np.where(reached, false_positives, np.inf).min(axis=-1)
    return np.where(np.isfinite(lowest), 1 - lowest, np.nan)


def f1_scores(hits: Array, predicted: Array, actual: Array, *, micro: bool) -> dict[str, Floats]:
    """Return averages of the F1 scores 2 TP / (predicted + actual), as scikit-learn computes them.

    Parameters
    ----------
    hits, predicted, actual : numpy.ndarray, (..., C)
        Number of correctly predicted, predicted and actual samples of each class or label.
    micro : bool
        Whether the scores are for labels. For labels, the result also contains a micro average, and a label with
        neither samples nor predictions has a score of 0.
    """
    sums = np.asarray(predicted + actual, np.float64)
    scores = ratio(2.0 * hits, sums, absent=0.0)
    occurring = np.ones(sums.shape, bool) if micro else sums > 0
    values = {
        "macro-f1": ratio((scores * occurring).sum(axis=-1), occurring.sum(axis=-1)),
        "weighted-f1": ratio((scores * actual).sum(axis=-1), np.asarray(actual, np.float64).sum(axis=-1), absent=0.0),
    }
    if micro:
        values["micro-f1"] = ratio(2.0 * hits.sum(axis=-1), sums.sum(axis=-1), absent=0.0)
    return values


def ratio(a: Array, b: Array, absent: float = np.nan) -> Floats:
    """Return a / b, or ``absent`` where b is 0."""
    a, b = np.broadcast_arrays(np.asarray(a, np.float64), np.asarray(b, np.float64))
    result: Floats = np.divide(a, b, out=np.full(a.shape, absent), where=b != 0)
    return result
