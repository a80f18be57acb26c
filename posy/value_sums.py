"""Compute regression metrics from sums over samples, which secure aggregation can mask.

The sums are fixed-point numbers in units of 1 / :data:`posy.binned.STEPS`. A client rounds each sum once.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from posy.binned import STEPS
from posy.scores import Floats, Predictions

ERROR_ROWS, ROWS = 2, 5
"""Number of sums for each value without and with the sums that R² needs."""
LARGEST = 1 << 60
"""Exclusive upper bound on each of a client's sums."""


def count_of(size: int, *, r2: bool = True) -> int:
    """Return the number of sums for C = ``size`` values."""
    return (ROWS if r2 else ERROR_ROWS) * size


def value_sums(p: Predictions, mean: Sequence[float], std: Sequence[float], *, r2: bool = True) -> list[int] | None:
    """Return the sums over the predicted samples, or None if a sum is too large.

    For each of C standardised values z with the prediction ẑ, the sums are Σ|ẑ − z| and Σ(ẑ − z)². R² also needs
    Σmax(z, 0), Σmax(−z, 0) and Σz².

    Parameters
    ----------
    p : Predictions
        Predictions and values in their original unit.
    mean, std : sequence of float, (C,)
        The mean and standard deviation used to standardise each value.
    r2 : bool
        Whether to include the sums that only R² needs.
    """
    z = (p.y - np.array(mean)) / np.array(std)
    errors = (p.outputs - p.y) / np.array(std)
    rows = [np.abs(errors), np.square(errors)]
    rows += [np.maximum(z, 0), np.maximum(-z, 0), np.square(z)] if r2 else []
    totals = np.stack([row.sum(axis=0) for row in rows]) * STEPS
    if not (totals < LARGEST).all():  # also false for NaN
        return None
    return [round(number) for number in totals.ravel().tolist()]


def metrics_of(numbers: Sequence[int], samples: int, std: Sequence[float]) -> dict[str, float]:
    """Return MAE, RMSE and R² in the original unit, keyed by name, or an empty dictionary if the sums are inconsistent.

    The result has no R² if the sums that it needs are absent.

    Parameters
    ----------
    numbers : sequence of int
        The sums of :func:`value_sums` over several clients.
    samples : int
        Number of samples n.
    std : sequence of float, (C,)
        The standard deviation used to standardise each value.
    """
    sums: Floats = np.array(numbers, np.float64).reshape(-1, len(std)) / STEPS / samples
    absolute, square = sums[:ERROR_ROWS]
    rounding = 1 / STEPS
    if (absolute**2 > square + rounding).any():
        return {}
    scale: npt.NDArray[np.float64] = np.array(std)
    values = {"mae": float((absolute * scale).mean()), "rmse": float(np.sqrt((square * scale**2).mean()))}
    if len(sums) == ERROR_ROWS:
        return values
    above, below, second = sums[ERROR_ROWS:]
    if ((above - below) ** 2 > second + rounding).any():
        return {}
    variance = second - (above - below) ** 2
    varied = variance > rounding
    if varied.any():
        values["r2"] = float((1 - square[varied] / variance[varied]).mean())
    return values


def rescaled(
    numbers: Sequence[int],
    samples: int,
    before: tuple[Sequence[float], Sequence[float]],
    after: tuple[Sequence[float], Sequence[float]],
) -> list[int]:
    """Return the sums of :func:`value_sums` for another mean and standard deviation of each value.

    Each value z becomes a z + b. Σmax(z, 0) and Σmax(−z, 0) become the positive and the negative part of Σz, because
    the metrics depend only on their difference.

    Parameters
    ----------
    numbers, samples : sequence of int, int
        The sums, and the number of samples n.
    before, after : tuple
        The mean and the standard deviation of each value, both ``(C,)``, for the sums and for the result.
    """
    (mean, std), (new_mean, new_std) = (np.array(pair, np.float64) for pair in (before, after))
    sums: Floats = np.array(numbers, np.float64).reshape(-1, len(std)) / STEPS
    a, b = std / new_std, (mean - new_mean) / new_std
    rows = [a * sums[0], a**2 * sums[1]]
    if len(sums) == ERROR_ROWS:
        return [round(number) for number in (np.stack(rows) * STEPS).ravel().tolist()]
    above, below, second = sums[ERROR_ROWS:]
    total = above - below
    new_total = a * total + samples * b
    new_second = a**2 * second + 2 * a * b * total + samples * b**2
    rows += [np.maximum(new_total, 0), np.maximum(-new_total, 0), new_second]
    return [round(number) for number in (np.stack(rows) * STEPS).ravel().tolist()]
