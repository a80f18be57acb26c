"""What is said of a paper's number, and of a paper's claim, after the runs."""

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from scipy import stats

LEVEL = 0.05
"""Level of significance of a claim."""
ROUNDING = 1e-12
"""Numbers are all alike if their standard deviation is at most this part of their mean."""
SPREADS, UNITS = 2.0, 2.0
"""How many standard deviations, and how many units at most, a number may lie from the paper's and still be the same."""
FEW = 3
"""Pairs below which nothing is said of what no test decides: with two, a difference must be 13 times its error."""
OUTCOMES = ("confirmed", "refuted", "within the noise", "too few runs", "not run")
"""What may come of a claim."""


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
    """Tell whether a number is the paper's: one unit apart at most, or two if that is within two standard deviations.

    ``spread`` is the paper's standard deviation over its runs, None where it prints none. The two add in squares.
    """
    both = math.hypot(ours.std or 0.0, spread or 0.0)
    return abs(ours.mean - printed) <= max(min(SPREADS * both, UNITS * unit), unit)


@dataclass(frozen=True)
class Verdict:
    """What the runs say of a claim: a word of ``OUTCOMES``.

    ``difference``, ``std`` and ``pairs`` are those of the two rows that decide, and ``of`` says which these are.
    ``confirmed`` of ``compared`` pairs of rows are as claimed. ``scale`` is that of the runs.
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

    It is confirmed if that is so of every two rows whose differences there are, so that a method which is above all
    others but one is not above all: the mean of the two rows' differences is above ``by``, and that is no chance
    (t-test, 5 %, both sides). It is refuted if it is so of any two rows; as many are looked at, with Holm's correction.
    With ``within``, two rows are as claimed if the mean is smaller than that on either side, and that is no chance (two
    one-sided t-tests, 5 % each: Schuirmann, 1987), and not if it is larger on one.

    Parameters
    ----------
    differences : mapping of str to sequence of float
        By the names of two rows; paired: of the same seed and variant.
    but : int
        Rows that may be above, the ones that are most: with 1 the row is claimed to be the first or the second.
    """
    ran = sorted((statistics.fmean(own), of) for of, own in differences.items() if own)
    found = {of: _compared(differences[of], by, within) for _, of in ran[but:]}
    if not found:
        return Verdict("not run")
    words = {of: word for of, (word, _, _) in found.items()}
    below = sorted((found[of][1], of) for of, word in words.items() if word == "refuted")
    held = itertools.takewhile(lambda each: each[1][0] * (len(found) - each[0]) < LEVEL, enumerate(below))  # Holm
    words |= {of: _undecided(found[of][2].seeds) for _, of in below[len(list(held)) :]}
    overall = next((w for w in ("refuted", "too few runs", "within the noise") if w in words.values()), "confirmed")
    deciding = {of: found[of][2] for of, word in words.items() if word == overall}
    of, own = min(deciding.items(), key=lambda each: each[1].mean if within is None else -abs(each[1].mean))
    confirmed = list(words.values()).count("confirmed")
    return Verdict(overall, own.mean, own.std, own.seeds, of, confirmed, len(words))


def _compared(differences: Sequence[float], by: float, within: float | None) -> tuple[str, float, Number]:
    """Return what the differences between two rows say, its p-value, and their mean."""
    own = number(differences)
    assert own is not None
    if own.std is None:
        return _undecided(1), 1.0, own
    if within is None:
        as_claimed, otherwise = 2 * _greater(differences, by), 2 * _less(differences, by)
    else:
        as_claimed = max(_greater(differences, -within), _less(differences, within))
        otherwise = 2 * min(_less(differences, -within), _greater(differences, within))
    if as_claimed < LEVEL:
        return "confirmed", as_claimed, own
    return "refuted" if otherwise < LEVEL else _undecided(own.seeds), otherwise, own


def _undecided(pairs: int) -> str:
    """Return what is said of a claim that no test of so many pairs decides."""
    return "within the noise" if pairs >= FEW else "too few runs"


def _less(differences: Sequence[float], than: float) -> float:
    """Return the p-value of a mean that is less (one-sided t-test)."""
    mean = statistics.fmean(differences)
    if statistics.stdev(differences) <= ROUNDING * abs(mean):  # no t-test of numbers that are all alike
        return float(mean >= than)
    return float(stats.ttest_1samp(differences, than, alternative="less").pvalue)


def _greater(differences: Sequence[float], than: float) -> float:
    """Return the p-value of a mean that is greater."""
    return _less([-difference for difference in differences], -than)
