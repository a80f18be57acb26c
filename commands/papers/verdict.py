"""What is said of a paper's number, and of a paper's claim, after the runs."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from scipy import stats

LEVEL = 0.05
"""Level of significance of a claim."""
SPREADS = 2.0
"""How many standard deviations a number may lie from the paper's and still be the same."""


@dataclass(frozen=True)
class Number:
    """A number over the seeds: mean and sample standard deviation, None of one seed."""

    mean: float
    std: float | None
    seeds: int


def number(values: Sequence[float]) -> Number | None:
    """Sum up a number over the seeds; None where there is none."""
    if not values:
        return None
    return Number(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None, len(values))


def distances(values: Mapping[int, float]) -> dict[int, float]:
    """Return how far a number lies from its mean over the seeds, by seed: none of a single seed.

    The mean of these over the seeds is what Levene's test compares spreads by.
    """
    mean = statistics.fmean(values.values()) if values else 0.0
    return {seed: abs(value - mean) for seed, value in values.items()} if len(values) > 1 else {}


def agrees(ours: Number, printed: float, spread: float | None, unit: float) -> bool:
    """Tell whether a number is the paper's: two standard deviations apart at most, or one unit.

    ``spread`` is the paper's standard deviation over its runs, None where it prints none. The two add in squares.
    """
    both = math.hypot(ours.std or 0.0, spread or 0.0)
    return abs(ours.mean - printed) <= max(SPREADS * both, unit)


@dataclass(frozen=True)
class Verdict:
    """What the runs say of a claim: ``confirmed``, ``refuted``, ``within the noise``, ``one pair``, ``not run``."""

    word: str
    difference: float | None = None
    std: float | None = None
    pairs: int = 0


def verdict(differences: Sequence[float], by: float = 0.0, within: float | None = None) -> Verdict:
    """Judge a claim by the differences between two rows, one for each seed and variant, in the claimed direction.

    It is confirmed if their mean is above ``by`` and that is no chance (t-test, 5 %, both sides), refuted if it is
    below and that is none. With ``within``, it is confirmed if the mean is no larger than that on either side.

    Parameters
    ----------
    differences : sequence of float
        Paired: of the same seed and variant.
    """
    if not differences:
        return Verdict("not run")
    mean = statistics.fmean(differences)
    std = statistics.stdev(differences) if len(differences) > 1 else None
    if within is not None:
        return Verdict("confirmed" if abs(mean) <= within else "refuted", mean, std, len(differences))
    if len(differences) == 1:
        return Verdict("one pair", mean, None, 1)
    if std == 0:  # no t-test of numbers that are all alike
        word = "confirmed" if mean > by else "refuted" if mean < by else "within the noise"
    elif float(stats.ttest_1samp(differences, by).pvalue) >= LEVEL:
        word = "within the noise"
    else:
        word = "confirmed" if mean > by else "refuted"
    return Verdict(word, mean, std, len(differences))
