"""Compare a paper's numbers with the runs' numbers, and test the paper's claims."""

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
HOLDS, FAILS, UNDECIDED, NOT_TESTED = OUTCOMES = ("holds", "does not hold", "undecided", "not tested")
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
    """Return each seed's distance from the mean over the seeds, or an empty mapping for fewer than three seeds.

    Levene's test of two spreads compares the means of these distances. The distances of two seeds are equal, so their
    differences would have no variance.
    """
    mean = statistics.fmean(values.values()) if values else 0.0
    return {seed: abs(value - mean) for seed, value in values.items()} if len(values) > 2 else {}


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

    ``difference``, ``std``, ``pairs`` and ``p_value`` describe the two rows that decide the outcome, and ``of`` names
    these rows. The p-value is None for a single pair of results. The pairs of results come from ``seeds`` seeds and
    ``columns`` variants, in runs at the scale ``scale``. The claim holds for ``holding`` of ``compared`` pairs of rows.
    """

    word: str
    difference: float | None = None
    std: float | None = None
    pairs: int = 0
    p_value: float | None = None
    of: str = ""
    holding: int = 0
    compared: int = 0
    scale: str = ""
    seeds: int = 0
    columns: int = 0


@dataclass(frozen=True)
class _Test:
    """The outcome for two rows, its p-value (None for a single pair of results), and the summary of the differences."""

    word: str
    p_value: float | None
    summary: Number


def verdict(
    differences: Mapping[str, Sequence[float]], by: float = 0.0, within: float | None = None, but: int = 0
) -> Verdict:
    """Judge a claim by the differences between its rows, in the claimed direction.

    The claim holds if it holds for every pair of rows with differences. It holds for a pair if the mean difference is
    significantly above ``by`` (two-sided t-test, 5 %). The claim does not hold if the mean difference of any pair is
    significantly below ``by``, with Holm's correction for the number of pairs. Otherwise it is undecided.

    With ``within``, the claim holds for a pair if the absolute mean difference is significantly below ``within`` (two
    one-sided t-tests, 5 % each: Schuirmann, 1987). The claim does not hold if this difference is significantly above
    ``within``.

    The deciding pair of a claim that holds is the pair with the largest p-value. Otherwise it is the pair with the
    lowest mean difference (with ``within``, the largest absolute one) among the pairs with the claim's outcome.

    Parameters
    ----------
    differences : mapping of str to sequence of float
        Differences, keyed by the names of the two rows. Each is between two runs with the same seed and variant.
    but : int
        Number of lower rows that may be above the higher row. The test ignores this many pairs, starting with the
        smallest mean difference. With 1, the claim is that the row is first or second.
    """
    means = sorted((statistics.fmean(values), pair) for pair, values in differences.items() if values)
    tests = _corrected({pair: _compared(differences[pair], by, within) for _, pair in means[but:]})
    if not tests:
        return Verdict(NOT_TESTED)
    words = [test.word for test in tests.values()]
    overall = next((word for word in (FAILS, UNDECIDED) if word in words), HOLDS)
    deciding = {pair: test for pair, test in tests.items() if test.word == overall}

    def adversity(pair: str) -> float:
        test = deciding[pair]
        if overall == HOLDS:
            return test.p_value or 0.0
        return -test.summary.mean if within is None else abs(test.summary.mean)

    pair = max(deciding, key=adversity)
    test = deciding[pair]
    mean, std, pairs = test.summary.mean, test.summary.std, test.summary.seeds
    return Verdict(overall, mean, std, pairs, test.p_value, pair, words.count(HOLDS), len(words))


def _compared(differences: Sequence[float], by: float, within: float | None) -> _Test:
    """Test the differences between two rows."""
    summary = number(differences)
    assert summary is not None
    if summary.std is None:
        return _Test(UNDECIDED, None, summary)
    if within is None:
        as_claimed, otherwise = 2 * _greater(differences, by), 2 * _less(differences, by)
    else:
        as_claimed = max(_greater(differences, -within), _less(differences, within))
        otherwise = 2 * min(_less(differences, -within), _greater(differences, within))
    if as_claimed < LEVEL:
        return _Test(HOLDS, as_claimed, summary)
    if otherwise < LEVEL:
        return _Test(FAILS, otherwise, summary)
    return _Test(UNDECIDED, min(as_claimed, otherwise, 1.0) if within is None else min(as_claimed, 1.0), summary)


def _corrected(tests: Mapping[str, _Test]) -> dict[str, _Test]:
    """Apply Holm's correction to the p-values of the pairs of rows for which a claim does not hold."""
    corrected, largest = dict(tests), 0.0
    failing = sorted((test.p_value or 0.0, pair) for pair, test in tests.items() if test.word == FAILS)
    for rank, (p_value, pair) in enumerate(failing):
        largest = max(largest, min(p_value * (len(tests) - rank), 1.0))
        corrected[pair] = _Test(FAILS if largest < LEVEL else UNDECIDED, largest, tests[pair].summary)
    return corrected


def _less(differences: Sequence[float], than: float) -> float:
    """Return the p-value of a one-sided t-test of whether the mean is less than ``than``."""
    mean = statistics.fmean(differences)
    if statistics.stdev(differences) <= ROUNDING * abs(mean):  # a t-test needs a variance
        return float(mean >= than)
    return float(stats.ttest_1samp(differences, than, alternative="less").pvalue)


def _greater(differences: Sequence[float], than: float) -> float:
    """Return the p-value of a one-sided t-test of whether the mean is greater than ``than``."""
    return _less([-difference for difference in differences], -than)
