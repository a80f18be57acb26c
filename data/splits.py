"""Set samples aside for tests and validation: a stratified fraction, or one of several folds."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from posy.data.dataset import Indices


@dataclass(frozen=True, eq=False)
class Strata:
    """The classes whose proportions each split should preserve, and the groups of samples that stay together."""

    labels: np.ndarray | None = None
    """``(N,)`` int64 class of each sample of the data set; None: random splits."""
    groups: np.ndarray | None = None
    """``(N,)`` int64 group of each sample, such as its patient; None: each sample is a group."""


RANDOM = Strata()
"""Random splits of individual samples."""


@dataclass(frozen=True, eq=False)
class _Groups:
    """A client's n samples and its G groups, both in random order."""

    samples: np.ndarray  # (n,) indices
    number: np.ndarray  # (n,) group of each sample, 0..G-1
    sizes: np.ndarray  # (G,) number of samples
    strata: np.ndarray  # (G,) most frequent class of each group

    @classmethod
    def of(cls, part: np.ndarray, strata: Strata, rng: np.random.Generator) -> "_Groups":
        samples = rng.permutation(part)
        number = np.arange(len(samples))
        if strata.groups is not None:
            groups, number = np.unique(strata.groups[samples], return_inverse=True)
            number = rng.permutation(len(groups))[number]
        sizes = np.bincount(number)
        if strata.labels is None:
            return cls(samples, number, sizes, np.zeros(len(sizes), np.int64))
        _, labels = np.unique(strata.labels[samples], return_inverse=True)
        if strata.groups is None:
            return cls(samples, number, sizes, labels)
        counts = np.zeros((len(sizes), int(labels.max(initial=0)) + 1), np.int64)
        np.add.at(counts, (number, labels), 1)
        return cls(samples, number, sizes, counts.argmax(axis=1))

    def halves(self, aside: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the samples that remain, and the samples of the groups in the mask ``aside``, ``(G,)`` bool."""
        is_aside = aside[self.number]
        return self.samples[~is_aside], self.samples[is_aside]


def count_aside(count: int, fraction: float) -> int:
    """Return the number of a client's samples that :func:`split` sets aside if each sample is a group."""
    return min(max(round(count * fraction), 1), count - 1) if count > 1 else 0


def split(parts: Sequence[np.ndarray], fraction: float, rng: np.random.Generator, strata: Strata = RANDOM) -> Indices:
    """Return the (remaining, set-aside) indices of each client, with a random ``fraction`` of its samples set aside.

    Given labels, the function sets aside groups of each class in proportion to the size of the class (Sainte-Laguë's
    method). It sets aside at least one group per class if the fraction is large enough. If a class has a single
    group, the function sets it aside only if the other classes have too few groups. Given groups, the share of samples
    that is set aside only approximates ``fraction``.

    If a client has two or more groups, neither part is empty.
    """
    return tuple(_halves(_Groups.of(part, strata, rng), count_aside(len(part), fraction)) for part in parts)


def split_folds(
    parts: Sequence[np.ndarray], folds: int, fold: int, rng: np.random.Generator, strata: Strata = RANDOM
) -> Indices:
    """Return the (remaining, set-aside) indices of each client for one of ``folds`` folds, numbered from 1.

    For the same state of ``rng``, all values of ``fold`` refer to the same division into folds. Each sample of a client
    with two or more groups is therefore set aside in exactly one fold. Given labels, the samples of each class are
    divided evenly among the folds. If a client has fewer groups than folds, some folds set aside none of its samples.
    The samples of a client with a single group are never set aside.
    """
    pairs = []
    for part in parts:
        groups = _Groups.of(part, strata, rng)
        numbers = _fold_numbers(groups, rng.permutation(folds))
        pairs.append(groups.halves((numbers == fold - 1) & (len(numbers) > 1)))
    return tuple(pairs)


def _halves(groups: _Groups, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Set aside about ``count`` samples, as described in :func:`split`."""
    order = _order(groups.strata)
    aside = np.zeros(len(order), bool)
    total = 0
    for group in order[: len(order) - 1]:
        if 2 * total + groups.sizes[group] <= 2 * count:  # with this group, the total is closer to the count
            aside[group] = True
            total += groups.sizes[group]
    if count and not total and len(order) > 1:
        aside[order[groups.sizes[order].argmin()]] = True
    return groups.halves(aside)


def _order(strata: np.ndarray) -> np.ndarray:
    """Return the indices of the groups in the order in which they are set aside, ``(G,)`` int64.

    The r-th of n groups in a stratum has the sort key (r - 1/2) / n, as in Sainte-Laguë's apportionment. The first
    group of each stratum comes before all other groups, and the last group of each stratum comes after them. The only
    group of a stratum counts as its last group.
    """
    _, stratum, counts = np.unique(strata, return_inverse=True, return_counts=True)
    by_stratum = np.argsort(stratum, kind="stable")
    rank = np.empty(len(strata), np.int64)
    rank[by_stratum] = np.arange(len(strata)) - np.repeat(np.cumsum(counts) - counts, counts)
    count = counts[stratum]
    is_last = rank == count - 1
    keys = (rank + 0.5) / count + is_last - ((rank == 0) & ~is_last)
    return np.argsort(keys, kind="stable")


def _fold_numbers(groups: _Groups, order: np.ndarray) -> np.ndarray:
    """Return the fold of each group, ``(G,)`` int64 from 0. Ties go to the fold that comes first in ``order``.

    The groups of a stratum are assigned in order of decreasing size. Each group goes to the fold with the fewest
    samples of the stratum or, in case of a tie, to the fold with the fewest samples overall.
    """
    numbers = np.empty(len(groups.sizes), np.int64)
    totals = np.zeros(len(order), np.int64)
    for stratum in np.unique(groups.strata):
        of_stratum = np.zeros(len(order), np.int64)
        members = np.flatnonzero(groups.strata == stratum)
        for group in members[np.argsort(-groups.sizes[members], kind="stable")]:
            fold = min(order, key=lambda number: (of_stratum[number], totals[number]))
            numbers[group] = fold
            of_stratum[fold] += groups.sizes[group]
            totals[fold] += groups.sizes[group]
    return numbers
