"""Set samples aside for tests and validation: a stratified fraction, or one of several folds."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from posy.data.dataset import Indices


@dataclass(frozen=True, eq=False)
class Strata:
    """The classes that each split should contain in proportion, and the groups of samples that stay together."""

    labels: np.ndarray | None = None
    """``(N,)`` int64 class of each sample of the data set; None: random splits."""
    groups: np.ndarray | None = None
    """``(N,)`` int64 group of each sample, such as its patient; None: each sample is a group."""


RANDOM = Strata()
"""Random splits of single samples."""


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

    With labels, the classes are set aside in proportion (Sainte-Laguë's method), and at least one group of each class
    if the fraction is large enough. A class with a single group remains, unless the other classes do not suffice. With
    groups, the number of samples is only close to the fraction.

    If a client has two or more groups, neither part is empty.
    """
    return tuple(_halves(_Groups.of(part, strata, rng), count_aside(len(part), fraction)) for part in parts)


def split_folds(
    parts: Sequence[np.ndarray], folds: int, fold: int, rng: np.random.Generator, strata: Strata = RANDOM
) -> Indices:
    """Return the (remaining, set-aside) indices of each client in one of ``folds`` folds, numbered from 1.

    The folds of a generator's state differ only in ``fold``: each sample of a client with two or more groups is set
    aside in exactly one fold. With labels, the folds divide the samples of each class evenly. A client with fewer
    groups than folds has folds in which nothing is set aside. The sample of a client with a single group is never set
    aside.
    """
    pairs = []
    for part in parts:
        groups = _Groups.of(part, strata, rng)
        numbers = _fold_numbers(groups, rng.permutation(folds))
        pairs.append(groups.halves((numbers == fold - 1) & (len(numbers) > 1)))
    return tuple(pairs)


def _halves(groups: _Groups, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Set aside about ``count`` samples; see :func:`split`."""
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
    """Return the order in which groups are set aside, ``(G,)`` int64.

    The r-th of n groups in a stratum has the key (r - 1/2) / n, as in Sainte-Laguë's apportionment. The first group of
    each stratum precedes all other groups, and the last one follows them.
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
    """Return the fold of each group, ``(G,)`` int64 from 0. The folds are filled in the given order in case of ties.

    In a stratum, the largest groups come first. Each group goes to the fold with the fewest samples of the stratum or,
    in case of a tie, with the fewest samples.
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
