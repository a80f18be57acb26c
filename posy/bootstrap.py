"""Compute bootstrap confidence intervals of metrics over the samples."""

from collections.abc import Collection

import numpy as np

from posy.metrics import METRICS, VALUES
from posy.scores import Floats, Predictions, weighted

DRAWS, LEVEL = 1000, 0.95
"""Number of bootstrap resamples, and the confidence level."""
MOST_CLASSES = 20
"""Maximum number of classes or labels for which Posy computes confidence intervals of per-class metrics."""
_OF_SAMPLES = {"accuracy", "log-loss", "brier", "calibration-error"}
"""Metrics whose cost per resample does not depend on the number of classes."""
_BLOCK = 4_000_000  # number of weights to process at a time


def intervals(predictions: Predictions, names: Collection[str], rng: np.random.Generator) -> dict[str, list[float]]:
    """Return percentile bootstrap intervals ``[low, high]`` of metrics over the samples, keyed by name.

    All metrics are computed from the same resamples. A metric's interval ignores resamples in which it is not defined.

    References
    ----------
    B. Efron, R. J. Tibshirani: An Introduction to the Bootstrap, 1993, section 13.3.
    """
    count = len(predictions.y)
    if predictions.target != VALUES and predictions.size > MOST_CLASSES:
        names = [name for name in names if name in _OF_SAMPLES]
    drawn: dict[str, list[Floats]] = {name: [] for name in names}
    size = max(1, _BLOCK // count)
    for start in range(0, DRAWS, size):
        draws = min(size, DRAWS - start)
        weights = rng.multinomial(count, np.full(count, 1 / count), size=draws).astype(np.float64)
        for name, values in weighted(predictions, weights, names).items():
            drawn[name].append(values)
    ends = [(1 - LEVEL) / 2, (1 + LEVEL) / 2]
    result = {}
    for name, parts in drawn.items():
        values = np.concatenate(parts) if parts else np.empty(0)
        if (values := values[np.isfinite(values)]).size:
            low, high = np.quantile(values, ends).tolist()
            result[name] = [max(low, 0.0), min(high, 1.0)] if METRICS[name].in_percent else [low, high]
    return result
