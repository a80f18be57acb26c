"""Aggregation rules that tolerate a minority of arbitrary client models (setting ``robust``).

- ``median``, ``trimmed-mean``: Yin et al. (2018), separately for each parameter; all clients have the same weight.
- ``krum``, ``multi-krum``: Blanchard et al. (2017), the models with the closest neighbours.
- ``geometric-median``: Pillutla et al. (2022), the smoothed Weiszfeld algorithm; clients keep their weights.

The tests compare these rules with Flower's, which Posy does not call. ``select_multikrum`` computes distances in
float32 from squared norms, which loses all precision for similar models, and it accepts too few clients. ``trim_mean``
cuts one value too few if floating-point rounding puts the fraction times the number of clients just below an integer.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from posy.models.parameters import FloatArray
from posy.strategies.replies import BLOCK, distances_from_gram, gram, weighted_mean
from posy.strategies.run_settings import RunSettings

Float64 = npt.NDArray[np.float64]

SMOOTHING = 1e-6
"""Lower bound ν on the distances in the geometric median's weights (Pillutla et al., Algorithm 2)."""
ITERATIONS, TOLERANCE = 1000, 1e-8
"""Maximum number of iterations for the geometric median, and the relative change in the shares at which they stop."""


class Combined(NamedTuple):
    """The result of a rule: the model ``(d,)``, and each client's share in it ``(M,)``.

    Shares sum to 1; ``shares`` is None for the median.
    """

    model: FloatArray
    shares: Float64 | None


@dataclass(frozen=True)
class Rule:
    """A rule and its parameters.

    Parameters
    ----------
    name : str
        A value of the setting ``robust`` other than ``mean``.
    trim : float
        Fraction of the clients' values that the trimmed mean removes at each end.
    attackers : int
        Number f of arbitrary models that Krum and Multi-Krum tolerate.
    selected : int
        Number of models that Multi-Krum averages; 0: the number of models minus f.
    """

    name: str
    trim: float = 0.2
    attackers: int = 1
    selected: int = 0

    @classmethod
    def of(cls, run: RunSettings) -> "Rule | None":
        """Return the rule of a run; None for the weighted mean."""
        if run.robust == "mean":
            return None
        return cls(run.robust, run.trim_fraction, run.max_attackers, run.krum_clients)

    @property
    def least(self) -> int:
        """The minimum number of clients for which the rule is defined."""
        return 2 * self.attackers + 3 if self.name in ("krum", "multi-krum") else 1

    @property
    def weighs(self) -> bool:
        """Whether the rule uses the clients' weights."""
        return self.name in ("multi-krum", "geometric-median")

    def combine(self, models: FloatArray, start: FloatArray, weights: npt.ArrayLike) -> Combined:
        """Combine the clients' models, without BatchNorm's running statistics.

        Parameters
        ----------
        models : numpy.ndarray, float32, (M, d)
            The clients' models.
        start : numpy.ndarray, float32, (d,)
            The model that all clients started from.
        weights : array_like, (M,)
            The clients' weights, for Multi-Krum and the geometric median.

        Raises
        ------
        ValueError
            If M is smaller than :attr:`least`.
        """
        w = np.asarray(weights, np.float64)
        if self.name == "median":
            return Combined(median(models), None)
        if self.name == "trimmed-mean":
            return trimmed_mean(models, self.trim)
        products = gram(models, origin=start)
        if self.name == "geometric-median":
            shares = geometric_median_shares(products, w)
            return Combined(shares.astype(np.float32) @ models, shares)
        scores = krum_scores(distances_from_gram(products), self.attackers)
        count = 1 if self.name == "krum" else selected_count(len(models), self.attackers, self.selected)
        best = np.sort(np.argsort(scores, kind="stable")[:count])
        shares = np.zeros(len(models))
        shares[best] = w[best] / w[best].sum()
        return Combined(weighted_mean(models[best], w[best]), shares)


def median(rows: FloatArray, block: int = BLOCK) -> FloatArray:
    """Return the median of each column ``(d,)``; for an even number of values, the mean of the two middle values.

    Parameters
    ----------
    rows : numpy.ndarray, float32, (M, d)
        Stacked vectors.
    block : int
        Number of columns to process at a time, in double precision.
    """
    result = np.empty(rows.shape[1], np.float32)
    for start in range(0, rows.shape[1], block):
        result[start : start + block] = np.median(rows[:, start : start + block].astype(np.float64), axis=0)
    return result


def trimmed_mean(rows: FloatArray, fraction: float, block: int = BLOCK) -> Combined:
    """Return the mean of each column without its ⌊fraction M⌋ smallest and ⌊fraction M⌋ largest values.

    All clients have the same weight, so a fraction of 0 gives the unweighted mean. A client's share is the fraction of
    the remaining values that come from the client.

    Parameters
    ----------
    rows : numpy.ndarray, float32, (M, d)
        Stacked vectors.
    fraction : float
        At least 0 and less than 1/2.
    block : int
        Number of columns to process at a time, in double precision.
    """
    count, size = rows.shape
    trimmed = trimmed_count(count, fraction)
    result, retained = np.empty(size, np.float32), np.zeros(count)
    for start in range(0, size, block):
        part = rows[:, start : start + block].astype(np.float64)
        order = np.argsort(part, axis=0, kind="stable")[trimmed : count - trimmed]
        result[start : start + block] = np.take_along_axis(part, order, axis=0).mean(axis=0)
        retained += np.bincount(order.ravel(), minlength=count)
    total = retained.sum()
    return Combined(result, retained / total if total else np.full(count, 1 / count))


def trimmed_count(count: int, fraction: float) -> int:
    """Return ⌊fraction · count⌋, the number of values to cut at each end; despite rounding, ⌊0.29 · 100⌋ is 29."""
    return math.floor(fraction * count + 1e-9)


def selected_count(count: int, attackers: int, selected: int) -> int:
    """Return the number of models that Multi-Krum averages: at least 1, and at most ``count - attackers``."""
    return max(1, min(selected or count, count - attackers))


def krum_scores(squares: Float64, attackers: int) -> Float64:
    """Return each vector's sum of squared distances to its M − f − 2 closest vectors ``(M,)``.

    Parameters
    ----------
    squares : numpy.ndarray, (M, M)
        Squared distances.
    attackers : int
        f.

    Raises
    ------
    ValueError
        If M < 2 f + 3, for which Krum has no guarantee.
    """
    count = len(squares)
    if count < 2 * attackers + 3:
        raise ValueError(f"Krum with f = {attackers} needs {2 * attackers + 3} vectors, got {count}")
    distances = squares[~np.eye(count, dtype=bool)].reshape(count, count - 1)
    closest = np.sort(distances, axis=1)[:, : count - attackers - 2]
    return np.asarray(closest.sum(axis=1))


def geometric_median_shares(products: Float64, weights: Float64) -> Float64:
    """Return the shares λ ``(M,)`` for which Σ_i λ_i x_i minimises Σ_i α_i ||v − x_i|| over v.

    The smoothed Weiszfeld algorithm, λ_i ∝ α_i / max(ν, ||v − x_i||), starts from the weighted mean. It needs only the
    inner products, because v is a mixture of the vectors.

    Parameters
    ----------
    products : numpy.ndarray, (M, M)
        Inner products of the vectors x.
    weights : numpy.ndarray, (M,)
        α, non-negative, with a positive sum.
    """
    alpha = weights / weights.sum()
    shares = alpha
    for _ in range(ITERATIONS):
        towards = products @ shares
        squares = shares @ towards - 2 * towards + np.diag(products)
        unnormalised = alpha / np.maximum(np.sqrt(np.maximum(squares, 0.0)), SMOOTHING)
        before, shares = shares, unnormalised / unnormalised.sum()
        if (np.abs(shares - before) <= TOLERANCE * shares).all():
            break
    return shares
