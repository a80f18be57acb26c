"""Compare a paper's numbers with the runs' numbers, and test the paper's claims."""

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from scipy import stats

LEVEL = 0.05
"""Significance level of all tests."""
MIN_SEEDS = 3
"""Minimum number of independent runs of each row in a test. Runs are independent if they have different seeds."""
MIN_SPREAD_SEEDS = 5
"""Minimum number of independent runs of each row in a test of two standard deviations. With three runs, the p-value of
the paired t-test on absolute deviations cannot fall below 0.05."""
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
    """Return each seed's absolute deviation from the mean over the seeds, or an empty mapping for a single seed.

    A paired t-test on these deviations compares two spreads. Unlike Levene's test, it uses pairs of runs.
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


class Pair(NamedTuple):
    """The two rows of a comparison, and the column (variant) in which they are compared."""

    higher: str
    lower: str
    column: str = ""

    def __str__(self) -> str:
        return f"{self.higher} − {self.lower}"


@dataclass(frozen=True)
class PairTest:
    """The outcome of one comparison.

    ``p_value`` is None if there are too few pairs of runs. ``adjusted`` states whether Holm's correction applies to it.
    ``summary`` summarises the differences over the seeds. ``deviations`` are the standard deviations of the two rows if
    the claim compares spreads.
    """

    pair: Pair
    word: str
    p_value: float | None
    summary: Number
    adjusted: bool = False
    deviations: tuple[float, float] | None = None


@dataclass(frozen=True)
class Verdict:
    """The outcome of a claim; ``word`` is one of ``OUTCOMES``.

    ``tests`` has a test for each pair of rows and column, in runs at the scale ``scale``. ``deciding`` is one of these
    tests, or None without runs. ``excepted`` are the comparisons that the claim allows to be opposite. ``not_run`` are
    the pairs of rows of the claim that have no runs at this scale yet. ``reduced`` is the outcome in reduced runs if
    the runs have the paper's size.
    """

    word: str
    tests: tuple[PairTest, ...] = ()
    deciding: PairTest | None = None
    excepted: tuple[PairTest, ...] = ()
    scale: str = ""
    not_run: tuple[Pair, ...] = ()
    reduced: "Verdict | None" = None

    @property
    def counts(self) -> Counter[str]:
        """Number of comparisons with each outcome."""
        return Counter(test.word for test in self.tests)

    @property
    def columns(self) -> list[str]:
        """Columns in which the rows are compared."""
        return list(dict.fromkeys(test.pair.column for test in (*self.tests, *self.excepted)))

    @property
    def against(self) -> int:
        """Number of comparisons with a significant opposite outcome before Holm's correction."""
        return sum(test.adjusted or test.word == FAILS for test in self.tests)

    @property
    def is_spread(self) -> bool:
        """Whether the claim compares spreads."""
        return any(test.deviations for test in self.tests)

    @property
    def too_few(self) -> int:
        """Number of comparisons with too few independent runs for a test."""
        return sum(test.p_value is None for test in self.tests)


def verdict(
    differences: Mapping[Pair, Sequence[float]],
    by: float = 0.0,
    within: float | None = None,
    but: int = 0,
    deviations: Mapping[Pair, tuple[float, float]] | None = None,
) -> Verdict:
    """Judge a claim by the differences between its rows, in the claimed direction.

    Each comparison is a pair of rows in one column, with one difference per seed. The claim holds if it holds for every
    comparison. It holds for a comparison if the mean difference is significantly above ``by`` (two-sided t-test, 5 %).
    The claim does not hold if the mean difference of any comparison is significantly below ``by``, with Holm's
    correction for the number of tests. Otherwise it is undecided. A comparison with too few seeds is undecided without
    a test.

    With ``within``, the claim holds for a comparison if the absolute mean difference is significantly below ``within``
    (two one-sided t-tests, 5 % each: Schuirmann, 1987). The claim does not hold if this difference is significantly
    above ``within``.

    The deciding comparison of a claim that holds is the comparison with the largest p-value. Otherwise it is the
    comparison with the lowest mean difference (with ``within``, the largest absolute one) among the comparisons with
    the claim's outcome, tested ones first.

    Parameters
    ----------
    differences : mapping of Pair to sequence of float
        Differences of each comparison. Each difference is between two runs with the same seed.
    but : int
        Number of lower rows that may be above the higher row in each column. The verdict ignores this many rows per
        column, starting with the smallest mean difference. With 1, the claim is that the row is first or second.
    deviations : mapping of Pair to tuple of float, optional
        Standard deviations of the two rows of each comparison, for a claim about spreads. ``differences`` are then the
        differences of the absolute deviations, and a test needs ``MIN_SPREAD_SEEDS`` seeds.
    """
    fewest = MIN_SEEDS if deviations is None else MIN_SPREAD_SEEDS
    tests = [
        replace(_compared(pair, values, by, within, fewest), deviations=(deviations or {}).get(pair))
        for pair, values in differences.items()
        if values
    ]
    excepted = _lowest(tests, but)
    tests = _corrected([test for test in tests if test not in excepted])
    if not tests:
        return Verdict(NOT_TESTED)
    words = {test.word for test in tests}
    overall = next((word for word in (FAILS, UNDECIDED) if word in words), HOLDS)

    def adversity(test: PairTest) -> tuple[bool, float]:
        if overall == HOLDS:
            return True, test.p_value or 0.0
        mean = test.summary.mean
        return test.p_value is not None, -mean if within is None else abs(mean)

    deciding = max((test for test in tests if test.word == overall), key=adversity)
    return Verdict(overall, tuple(tests), deciding, tuple(excepted))


def _lowest(tests: Sequence[PairTest], number: int) -> list[PairTest]:
    """Return the tests with the lowest mean difference, ``number`` in each column."""
    by_column: dict[str, list[PairTest]] = {}
    for test in tests:
        by_column.setdefault(test.pair.column, []).append(test)
    return [test for group in by_column.values() for test in sorted(group, key=lambda test: test.summary.mean)[:number]]


def _compared(pair: Pair, differences: Sequence[float], by: float, within: float | None, fewest: int) -> PairTest:
    """Test the differences between two rows if there are at least ``fewest`` of them."""
    summary = number(differences)
    assert summary is not None
    if summary.seeds < fewest:
        return PairTest(pair, UNDECIDED, None, summary)
    if within is None:
        as_claimed, otherwise = 2 * _greater(differences, by), 2 * _less(differences, by)
    else:
        as_claimed = max(_greater(differences, -within), _less(differences, within))
        otherwise = 2 * min(_less(differences, -within), _greater(differences, within))
    if as_claimed < LEVEL:
        return PairTest(pair, HOLDS, as_claimed, summary)
    if otherwise < LEVEL:
        return PairTest(pair, FAILS, otherwise, summary)
    p_value = min(as_claimed, otherwise, 1.0) if within is None else min(as_claimed, 1.0)
    return PairTest(pair, UNDECIDED, p_value, summary)


def _corrected(tests: Sequence[PairTest]) -> list[PairTest]:
    """Apply Holm's correction to the p-values of the comparisons for which a claim does not hold."""
    number_of_tests = sum(test.p_value is not None for test in tests)
    failing = sorted((test for test in tests if test.word == FAILS), key=lambda test: (test.p_value or 0.0, test.pair))
    corrected: dict[Pair, PairTest] = {}
    largest = 0.0
    for rank, test in enumerate(failing):
        largest = max(largest, min((test.p_value or 0.0) * (number_of_tests - rank), 1.0))
        word = FAILS if largest < LEVEL else UNDECIDED
        corrected[test.pair] = replace(test, word=word, p_value=largest, adjusted=number_of_tests > 1)
    return [corrected.get(test.pair, test) for test in tests]


def _less(differences: Sequence[float], than: float) -> float:
    """Return the p-value of a one-sided t-test of whether the mean is less than ``than``."""
    mean = statistics.fmean(differences)
    if statistics.stdev(differences) <= ROUNDING * abs(mean):  # a t-test needs a variance
        return float(mean >= than)
    return float(stats.ttest_1samp(differences, than, alternative="less").pvalue)


def _greater(differences: Sequence[float], than: float) -> float:
    """Return the p-value of a one-sided t-test of whether the mean is greater than ``than``."""
    return _less([-difference for difference in differences], -than)
