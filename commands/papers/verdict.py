"""Compare a paper's numbers with the runs' numbers, and test the paper's claims."""

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from scipy import stats

LEVEL = 0.05
"""Significance level of all tests."""
ROUNDING = 1e-12
"""Posy treats numbers as equal if their standard deviation is at most this fraction of their mean."""
SPREADS, UNITS = 2.0, 2.0
"""Maximum deviation from the paper's number, in standard deviations and in multiples of the unit of :func:`agrees`.
Both limits apply."""
FEW = 3
"""Minimum number of pairs for ``within the noise``. With two pairs, a mean below 13 standard errors is not
significant."""
OUTCOMES = ("confirmed", "refuted", "within the noise", "too few runs", "not run")
"""Possible outcomes of a claim."""


@dataclass(frozen=True)
class Number:
    """Mean and sample standard deviation of a number over the seeds; ``std`` is None for a single seed."""

    mean: float
    std: float | None
    seeds: int


def number(values: Sequence[float]) -> Number | None:
    """Summarise a number over the seeds, or return None if there are no values."""
    if not values:
        return None
    return Number(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None, len(values))


def distances(values: Mapping[int, float]) -> dict[int, float]:
    """Return each seed's distance from the mean over the seeds, or an empty mapping for a single seed.

    Levene's test of two spreads compares the means of these distances.
    """
    mean = statistics.fmean(values.values()) if values else 0.0
    return {seed: abs(value - mean) for seed, value in values.items()} if len(values) > 1 else {}


def agrees(ours: Number, printed: float, spread: float | None, unit: float) -> bool:
    """Return whether a number agrees with the paper's: within one unit, or within two if the noise is large enough.

    A distance of up to two units is allowed if it is at most two standard deviations. The squared standard deviation is
    the sum of Posy's variance and the paper's variance. ``spread`` is the paper's standard deviation over its runs, or
    None if the paper prints none.
    """
    both = math.hypot(ours.std or 0.0, spread or 0.0)
    return abs(ours.mean - printed) <= max(min(SPREADS * both, UNITS * unit), unit)


@dataclass(frozen=True)
class Verdict:
    """The outcome of a claim; ``word`` is one of ``OUTCOMES``.

    ``difference``, ``std`` and ``pairs`` describe the two rows that decide the outcome, and ``of`` names these rows.
    The claim holds for ``confirmed`` of ``compared`` pairs of rows. ``scale`` is the scale of the runs.
    """

    word: str
    difference: float | None = None
    std: float | None = None
    pairs: int = 0
    of: str = ""
    confirmed: int = 0
    compared: int = 0
    scale: str = ""


def verdict(
    differences: Mapping[str, Sequence[float]], by: float = 0.0, within: float | None = None, but: int = 0
) -> Verdict:
    """Judge a claim by the differences between its rows, in the claimed direction.

    The claim is confirmed if it holds for every pair of rows with differences. The claim holds for a pair if the mean
    difference is significantly above ``by`` (two-sided t-test, 5 %). The claim is refuted if the mean difference of any
    pair is significantly below ``by``, with Holm's correction for the number of pairs.

    With ``within``, the claim holds for a pair if the absolute mean difference is significantly below ``within`` (two
    one-sided t-tests, 5 % each: Schuirmann, 1987). The claim is refuted if this difference is significantly above
    ``within``.

    Parameters
    ----------
    differences : mapping of str to sequence of float
        Differences, keyed by the names of the two rows. Each is between two runs with the same seed and variant.
    but : int
        Number of lower rows that may be above the higher row. The test ignores this many pairs, starting with the
        smallest mean difference. With 1, the claim is that the row is first or second.
    """
    means = sorted((statistics.fmean(values), pair) for pair, values in differences.items() if values)
    results = {pair: _compared(differences[pair], by, within) for _, pair in means[but:]}
    if not results:
        return Verdict("not run")
    words = {pair: word for pair, (word, _, _) in results.items()}
    below = sorted((results[pair][1], pair) for pair, word in words.items() if word == "refuted")
    rejected = itertools.takewhile(lambda each: each[1][0] * (len(results) - each[0]) < LEVEL, enumerate(below))  # Holm
    words |= {pair: _undecided(results[pair][2].seeds) for _, pair in below[len(list(rejected)) :]}
    overall = next((w for w in ("refuted", "too few runs", "within the noise") if w in words.values()), "confirmed")
    deciding = {pair: results[pair][2] for pair, word in words.items() if word == overall}
    pair, decisive = min(deciding.items(), key=lambda each: each[1].mean if within is None else -abs(each[1].mean))
    confirmed = list(words.values()).count("confirmed")
    return Verdict(overall, decisive.mean, decisive.std, decisive.seeds, pair, confirmed, len(words))


def _compared(differences: Sequence[float], by: float, within: float | None) -> tuple[str, float, Number]:
    """Return the outcome for two rows, its p-value, and the summary of their differences."""
    summary = number(differences)
    assert summary is not None
    if summary.std is None:
        return _undecided(1), 1.0, summary
    if within is None:
        as_claimed, otherwise = 2 * _greater(differences, by), 2 * _less(differences, by)
    else:
        as_claimed = max(_greater(differences, -within), _less(differences, within))
        otherwise = 2 * min(_less(differences, -within), _greater(differences, within))
    if as_claimed < LEVEL:
        return "confirmed", as_claimed, summary
    return "refuted" if otherwise < LEVEL else _undecided(summary.seeds), otherwise, summary


def _undecided(pairs: int) -> str:
    """Return the outcome of an undecided claim, which depends on the number of pairs."""
    return "within the noise" if pairs >= FEW else "too few runs"


def _less(differences: Sequence[float], than: float) -> float:
    """Return the p-value of a one-sided t-test of whether the mean is less than ``than``."""
    mean = statistics.fmean(differences)
    if statistics.stdev(differences) <= ROUNDING * abs(mean):  # a t-test needs a variance
        return float(mean >= than)
    return float(stats.ttest_1samp(differences, than, alternative="less").pvalue)


def _greater(differences: Sequence[float], than: float) -> float:
    """Return the p-value of a one-sided t-test of whether the mean is greater than ``than``."""
    return _less([-difference for difference in differences], -than)
