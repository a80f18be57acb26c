"""Add Gaussian noise from a cryptographic generator, on a grid, for differential privacy.

The sampler avoids two weaknesses of floating-point noise. A seeded generator such as PCG64 can be predicted from its
outputs. The last bits of floating-point sums reveal which noise was added to which value (Mironov, 2012).

The AES-256-CTR keystream, under a key from the operating system, supplies all random bits. :func:`perturb` rounds the
values to multiples of σ/2²⁴, towards zero, so that no norm grows. It adds ⌊N⌋, where N is Gaussian and ⌊·⌋ rounds down
to the same grid. For x on the grid, x + ⌊N⌋ = ⌊x + N⌋. The result is therefore a function of x + N for a real Gaussian
N, and the analysis of the continuous mechanism holds unchanged in any dimension (post-processing).

⌊N⌋ has two parts. A table of 128-bit integers gives the probability of each interval [m/256, (m + 1)/256) of |N|/σ,
and a 128-bit uniform number selects an interval. Rejection sampling selects one of 2¹⁶ cells in this interval. Up to
13 σ, the probability of each multiple differs from its exact value by a factor within 1 ± 2⁻⁴⁵. The table ends at 13 σ,
which changes the distribution by less than 2⁻¹²⁵. For 10⁷ parameters and 100 rounds, both effects change ε by less than
10⁻⁸.
"""

import math
import os
from functools import lru_cache

import numpy as np
import numpy.typing as npt
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

Steps = npt.NDArray[np.int64]
"""Multiples of the grid."""
INTERVALS, CELLS = 256, 2**16
"""Number of intervals per standard deviation, and of cells per interval."""
GRID = INTERVALS * CELLS
"""Number of grid steps per standard deviation: 2²⁴."""
LAST = 13 * INTERVALS
"""Number of intervals in the table."""
BLOCK = 2**20
"""Number of values drawn at a time."""


class SecureGenerator:
    """A generator of random bits from the AES-256-CTR keystream.

    Parameters
    ----------
    key : bytes, optional
        32 bytes; by default from the operating system. Only tests pass a key.
    """

    def __init__(self, key: bytes | None = None) -> None:
        self._encryptor = Cipher(algorithms.AES(key or os.urandom(32)), modes.CTR(bytes(16))).encryptor()

    def words(self, count: int) -> npt.NDArray[np.uint64]:
        """Return uniform 64-bit words ``(count,)``."""
        return np.frombuffer(self._encryptor.update(bytes(8 * count)), "<u8").astype(np.uint64, copy=False)

    def chosen(self, count: int, probability: float) -> npt.NDArray[np.int64]:
        """Return a Poisson sample of the indices below ``count``, which includes each index with ``probability``."""
        if probability >= 1:
            return np.arange(count)
        return np.flatnonzero(self.words(count) < np.uint64(int(probability * 2**64)))

    def gaussian(self, count: int) -> Steps:
        """Return ⌊N⌋ ``(count,)`` for standard normal N, in multiples of 2⁻²⁴."""
        pieces = [self._gaussian(min(BLOCK, count - start)) for start in range(0, count, BLOCK)]
        return np.concatenate(pieces) if pieces else np.zeros(0, np.int64)

    def _gaussian(self, count: int) -> Steps:
        interval = self._intervals(count)
        magnitude, negative = np.empty(count, np.int64), np.empty(count, np.bool_)
        pending = np.arange(count)
        while len(pending):
            words, bounds = self.words(len(pending)), interval[pending]
            cell = (words & np.uint64(CELLS - 1)).astype(np.int64)
            # The density of the cell, divided by the density at the left end of its interval, where it is largest.
            position = (cell + 0.5) / CELLS
            density = np.exp(position * (position + 2 * bounds) / (-2 * INTERVALS**2))
            accepted = (words >> np.uint64(17)).astype(np.float64) < density * 2**47
            indices = pending[accepted]
            magnitude[indices] = bounds[accepted] * CELLS + cell[accepted]
            negative[indices] = (words[accepted] & np.uint64(CELLS)) != 0
            pending = pending[~accepted]
        return np.where(negative, -magnitude - 1, magnitude)

    def _intervals(self, count: int) -> Steps:
        """Return the interval of each |N| ``(count,)``: the number of tails that exceed a random 128-bit number."""
        tails = tail_table()
        high = _high_words()
        words = self.words(count)
        at_most = np.searchsorted(high, words, side="right")
        interval = len(high) - at_most
        for index in np.flatnonzero(high[np.maximum(at_most, 1) - 1] == words):  # once in 10¹⁶ numbers
            number = (int(words[index]) << 64) | int(self.words(1)[0])
            interval[index] = sum(tail > number for tail in tails)
        return interval.astype(np.int64)


@lru_cache(maxsize=1)
def tail_table() -> tuple[int, ...]:
    """Return ⌊2¹²⁸ P(|N| ≥ m/256)⌋ for standard normal N and m = 1 to 3328."""
    import mpmath  # noqa: PLC0415 - needed once in a process; a dependency of PyTorch

    with mpmath.workprec(192):
        root = mpmath.sqrt(2) * INTERVALS
        return tuple(int(mpmath.floor(mpmath.erfc(m / root) * 2**128)) for m in range(1, LAST + 1))


@lru_cache(maxsize=1)
def _high_words() -> npt.NDArray[np.uint64]:
    """Return the upper 64 bits of the table's entries in ascending order."""
    return np.array([tail >> 64 for tail in reversed(tail_table())], np.uint64)


def perturb(
    values: npt.NDArray[np.float64], deviation: float, generator: SecureGenerator | None = None
) -> npt.NDArray[np.float64]:
    """Add Gaussian noise to the values ``(n,)``; the results are odd multiples of half a grid step.

    Parameters
    ----------
    values : numpy.ndarray, float64, (n,)
        Finite values. They are first rounded towards zero to multiples of ``deviation`` / 2²⁴.
    deviation : float
        Standard deviation of the noise, above 0.
    generator : SecureGenerator, optional
        Source of the noise; by default a new generator.
    """
    if not 0 < deviation < math.inf:
        raise ValueError(f"the standard deviation of the noise must be positive and finite, not {deviation}")
    generator = generator or SecureGenerator()
    return from_steps(to_steps(values, deviation) + generator.gaussian(len(values)), deviation)


def to_steps(values: npt.NDArray[np.float64], deviation: float) -> Steps:
    """Return the values, rounded towards zero, as multiples of ``deviation`` / 2²⁴.

    Raises
    ------
    OverflowError
        If a value is larger in magnitude than 2³⁸ standard deviations.
    """
    steps = np.trunc(values / (deviation / GRID))
    if steps.size and not np.abs(steps).max() < 2.0**62:
        raise OverflowError("a value is too large for the grid of the noise")
    return steps.astype(np.int64)


def from_steps(steps: Steps, deviation: float) -> npt.NDArray[np.float64]:
    """Return the centres of the cells that begin at the multiples ``steps`` of ``deviation`` / 2²⁴."""
    return np.multiply(steps + 0.5, deviation / GRID, dtype=np.float64)
