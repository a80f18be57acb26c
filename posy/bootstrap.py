"""Bootstrap confidence intervals of metrics over the samples."""

from collections.abc import Collection, Iterable

import numpy as np

from posy.binned import auroc, average_precision, f1_scores, specificity_at
from posy.metrics import CALIBRATION_BINS, CLASSES, LABELS, METRICS
from posy.scores import Floats, Predictions, brier_scores, confidence_bins, log_losses

DRAWS, LEVEL = 1000, 0.95
"""Number of draws, and confidence level."""
MOST_CLASSES = 20
"""Maximum number of classes or labels for which metrics that rank samples or need a confusion matrix get intervals."""
_BLOCK = 4_000_000  # weights that are processed at once


def intervals(predictions: Predictions, names: Collection[str], rng: np.random.Generator) -> dict[str, list[float]]:
    """Return percentile bootstrap intervals ``[low, high]`` of metrics over the samples, keyed by name.

    All metrics are computed from the same draws. A draw in which a metric is not defined does not count for it.

    References
    ----------
    B. Efron, R. J. Tibshirani: An Introduction to the Bootstrap, 1993, section 13.3.
    """
    count = len(predictions.y)
    drawn: dict[str, list[Floats]] = {name: [] for name in names}
    size = max(1, _BLOCK // count)
    for start in range(0, DRAWS, size):
        draws = min(size, DRAWS - start)
        weights = rng.multinomial(count, np.full(count, 1 / count), size=draws).astype(np.float64)
        for name, values in weighted(predictions, weights).items():
            if name in drawn:
                drawn[name].append(values)
    ends = [(1 - LEVEL) / 2, (1 + LEVEL) / 2]
    result = {}
    for name, parts in drawn.items():
        values = np.concatenate(parts) if parts else np.empty(0)
        if (values := values[np.isfinite(values)]).size:
            low, high = np.quantile(values, ends).tolist()
            result[name] = [max(low, 0.0), min(high, 1.0)] if METRICS[name].in_percent else [low, high]
    return result


def weighted(p: Predictions, weights: Floats) -> dict[str, Floats]:
    """Return the metrics of weighted samples, keyed by name; NaN where the samples do not define one.

    Parameters
    ----------
    p : Predictions
        The predictions for n samples.
    weights : numpy.ndarray, float64, (B, n)
        Weights of the samples in each of B draws: how often a draw contains the sample.

    Returns
    -------
    dict of str to numpy.ndarray, (B,)
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        if p.target == CLASSES:
            return _classification(p, weights)
        return _labels(p, weights) if p.target == LABELS else _regression(p, weights)


def _classification(p: Predictions, weights: Floats) -> dict[str, Floats]:
    total, correct = weights.sum(axis=1), p.predicted == p.y
    bins, confidences, _ = confidence_bins(p)
    in_bin = (bins[:, None] == np.arange(CALIBRATION_BINS)) * (confidences - correct)[:, None]
    values = {
        "accuracy": weights @ correct / total,
        "log-loss": weights @ log_losses(p) / total,
        "brier": weights @ brier_scores(p) / total,
        "calibration-error": np.abs(weights @ in_bin).sum(axis=1) / total,
    }
    if p.size > MOST_CLASSES:
        return values
    hits = weights @ (p.indicators * correct[:, None])
    actual, predicted = weights @ p.indicators, weights @ (p.predicted[:, None] == np.arange(p.size))
    values["balanced-accuracy"] = np.nanmean(hits / actual, axis=1)
    values |= f1_scores(hits, predicted, actual, micro=False) | _ranking(p, weights)
    if p.is_binary:
        is_positive, predicted_positive = p.y == p.positive, p.outputs[:, p.positive] >= p.threshold
        values["sensitivity"] = weights @ (is_positive & predicted_positive) / (weights @ is_positive)
        values["specificity"] = weights @ (~is_positive & ~predicted_positive) / (weights @ ~is_positive)
        values["specificity-at-sensitivity"] = specificity_at(_histogram(p, p.positive, weights), p.sensitivity)
    return values


def _labels(p: Predictions, weights: Floats) -> dict[str, Floats]:
    total = weights.sum(axis=1)
    values = {
        "accuracy": weights @ (p.predicted == p.y).all(axis=1) / total,
        "log-loss": weights @ log_losses(p) / total,
        "brier": weights @ brier_scores(p) / total,
    }
    if p.size > MOST_CLASSES:
        return values
    sums = (weights @ part for part in (p.predicted * p.indicators, p.predicted, p.indicators))
    return values | f1_scores(*sums, micro=True) | _ranking(p, weights)


def _regression(p: Predictions, weights: Floats) -> dict[str, Floats]:
    total = weights.sum(axis=1, keepdims=True)
    errors = p.outputs - p.y
    squares = weights @ np.square(errors) / total
    centred = p.y - p.y.mean(axis=0)  # so that the variance does not cancel
    variances = weights @ np.square(centred) / total - np.square(weights @ centred / total)
    return {
        "mae": (weights @ np.abs(errors) / total).mean(axis=1),
        "rmse": np.sqrt(squares.mean(axis=1)),
        "r2": np.nanmean(np.where(variances > 0, 1 - squares / variances, np.nan), axis=1),
    }


def _ranking(p: Predictions, weights: Floats) -> dict[str, Floats]:
    """Return AUROC and average precision, averaged over the classes or labels that a draw defines."""
    histograms = [_histogram(p, label, weights) for label in p.ranked]
    return {
        name: _mean(function(histogram) for histogram in histograms)
        for name, function in (("auroc", auroc), ("average-precision", average_precision))
    }


def _mean(values: Iterable[Floats]) -> Floats:
    """Return the mean of the values other than NaN, NaN if there are none."""
    stacked = np.stack(list(values))
    is_defined = np.isfinite(stacked)
    mean: Floats = np.where(is_defined, stacked, 0.0).sum(axis=0) / is_defined.sum(axis=0)
    return mean


def _histogram(p: Predictions, label: int, weights: Floats) -> Floats:
    """Return the weights of the samples without and with a label for each distinct probability ``(B, 2, U)``."""
    order = np.argsort(p.outputs[:, label], kind="stable")
    scores, has_label = p.outputs[order, label], p.indicators[order, label] == 1
    starts = np.flatnonzero(np.r_[True, scores[1:] != scores[:-1]])
    ordered = weights[:, order]
    parts = [np.add.reduceat(np.where(mask, ordered, 0.0), starts, axis=1) for mask in (~has_label, has_label)]
    return np.stack(parts, axis=1)
