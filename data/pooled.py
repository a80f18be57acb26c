"""Compute task statistics over all sites from a masked sum of integers, to which each site contributes.

With secure aggregation, a site sends neither its labels nor its means. The server learns only the number of sites with
each label, and the mean and the sum of squared deviations of each feature over all sites.
"""

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction

import numpy as np

from posy.data.encoding import CATEGORY, NUMBER, Moments, TableFacts
from posy.data.errors import DataError
from posy.data.labels import label_name
from posy.settings import SettingsError

WORD_BITS = 64
"""Number of bits in each whole number of the masked sum."""
SCALE_BITS = 200
"""Sites send n · mean in units of 2^-200, and sums of squares in units of 2^-400."""
SUM_WORDS, SQUARE_WORDS = 6, 11
"""Number of words for n · mean and for the sum of squares: 368 and 696 bits if n < 2^40 and values fit float32."""
CELLS, CHOICES, NAME_BYTES = 768, 3, 120
"""Number of cells in the label table, number of cells per label, and maximum number of UTF-8 bytes in a label."""
_NAME_WORDS = NAME_BYTES // 8 + 1  # one extra word, so that the sum of the names cannot overflow
_CELL_WORDS = 1 + 2 + _NAME_WORDS
_FACT, _CATEGORICAL, _MISSING, _OTHER = "\x01", "categories", "missing", "other"


@dataclass(frozen=True)
class Pooled:
    """Statistics of the training rows of all sites."""

    sites: int
    classes: dict[str, int]
    """Number of sites that have each label; empty if the settings name the classes."""
    count: int
    """Number of rows; 0 without feature statistics."""
    mean: np.ndarray
    """Mean of each feature, float64 ``(F,)``."""
    squares: np.ndarray
    """Sum of each feature's squared deviations from its mean, float64 ``(F,)``."""
    facts: list[TableFacts] = field(default_factory=list)
    """Combined facts about the sites' tables, if the run needs an encoder."""
    present: np.ndarray = field(default_factory=lambda: np.empty(0))
    """Number of rows with a value in each column, float64 ``(F,)``, if the run needs an encoder."""

    @property
    def total(self) -> Moments:
        """The statistics of the tables' columns."""
        return Moments(self.count, self.present, self.mean, self.squares)

    def divided(self, features: int) -> "tuple[Pooled, Pooled]":
        """Return the statistics of the first ``features`` entries, and of the others (the regression targets)."""
        parts = ((self.mean[part], self.squares[part]) for part in (slice(features), slice(features, None)))
        first, second = (replace(self, mean=mean, squares=squares) for mean, squares in parts)
        return first, second


def numbers_of(
    classes: Sequence[str] | None,
    count: int,
    mean: np.ndarray,
    squares: np.ndarray,
    table: TableFacts | None = None,
) -> list[int]:
    """Return the numbers that a site adds to the masked sum, each below 2^64.

    Parameters
    ----------
    classes : sequence of str or None
        Labels of the site; None if the settings name the classes.
    count : int
        Number of rows.
    mean, squares : numpy.ndarray
        Mean of each feature, and sum of its squared deviations, float64 ``(F,)``; ``F`` may be 0.
    table : TableFacts, optional
        Facts about the site's table, if the run needs an encoder. The mean of each column of the table then covers only
        the rows with a value. The means of regression targets cover all rows.

    Raises
    ------
    DataError
        If a label or a category has more than :data:`NAME_BYTES` bytes.
    """
    numbers = [1, count]
    present = table.present if table else ()
    counts = (*present, *(count,) * (len(mean) - len(present)))
    for n, m, q in zip(counts, map(Fraction, mean.tolist()), map(Fraction, squares.tolist()), strict=True):
        numbers += _words(round(n * m * 2**SCALE_BITS), SUM_WORDS)
        numbers += _words(round((q + n * m * m) * 2 ** (2 * SCALE_BITS)), SQUARE_WORDS)
    numbers += present
    return numbers if classes is None and not table else numbers + _table_of([*(classes or ()), *_fact_names(table)])


def count_of(features: int, values: int = 0, *, classes: bool, table: bool = False) -> int:
    """Return the length of the list that :func:`numbers_of` returns for features and regression targets."""
    numbers = 2 + (features + values) * (SUM_WORDS + SQUARE_WORDS) + features * table
    return numbers + (CELLS * _CELL_WORDS if classes or table else 0)


def pooled(sums: Sequence[int], features: int, values: int = 0, *, classes: bool, table: bool = False) -> Pooled:
    """Return the statistics over all sites from the element-wise sums of the sites' numbers (:func:`numbers_of`).

    The regression targets come after the features. The arithmetic is exact, so no digits are lost to cancellation, even
    if a mean is far larger than the deviation.

    Raises
    ------
    SettingsError
        If the sums cover no rows, or the labels cannot be recovered from them, because there are too many labels or a
        site has sent wrong numbers.
    """
    sites, count = sums[:2]
    if not count:
        raise SettingsError("the statistics of the sites cover no rows: a site has sent wrong numbers")
    mean, squares, start = [], [], 2
    present: Sequence[int] = (count,) * features
    if table:
        end = 2 + (features + values) * (SUM_WORDS + SQUARE_WORDS)
        present = sums[end : end + features]
    for n in (*present, *(count,) * values):
        sum_end, end = start + SUM_WORDS, start + SUM_WORDS + SQUARE_WORDS
        total = Fraction(_signed(sums[start:sum_end]), 2**SCALE_BITS)
        total_squares = Fraction(_signed(sums[sum_end:end]), 2 ** (2 * SCALE_BITS))
        mean.append(float(total / max(1, n)))
        squares.append(float(max(Fraction(0), total_squares - total * total / max(1, n))))
        start = end
    names = _names_in(sums[start + features * table :]) if classes or table else {}
    result = Pooled(sites, names, count if mean else 0, np.array(mean), np.array(squares))
    if not table:
        return result
    classes_only = {name: number for name, number in names.items() if not name.startswith(_FACT)}
    facts = _facts_in(names.keys() - classes_only.keys(), present)
    return replace(result, classes=classes_only, facts=[facts], present=np.array(present, np.float64))


def _words(number: int, words: int) -> list[int]:
    """Return a whole number modulo 2^(64 · ``words``) as words, lowest word first."""
    if abs(number) >> (WORD_BITS * words - 1):
        raise DataError("a feature is too large for a masked sum; set feature-mean and feature-std", "extreme-value")
    return _split(number % (1 << (WORD_BITS * words)), words)


def _split(number: int, words: int) -> list[int]:
    return [number >> (WORD_BITS * word) & (2**WORD_BITS - 1) for word in range(words)]


def _joined(sums: Sequence[int]) -> int:
    return sum(word << (WORD_BITS * index) for index, word in enumerate(sums))


def _signed(sums: Sequence[int]) -> int:
    modulus = 1 << (WORD_BITS * len(sums))
    number = _joined(sums) % modulus
    return number - modulus if number >> (WORD_BITS * len(sums) - 1) else number


# -- facts about tables ----------------------------------------------------------------------------------
#
# The categories of the columns, and the columns with missing or rare values, are encoded in the same way as the labels.


def _fact_names(table: TableFacts | None) -> list[str]:
    """Return all facts about a table except the row counts, encoded as names that cannot be labels."""
    if table is None:
        return []
    names = []
    for number, kind in enumerate(table.kinds):
        facts = [_CATEGORICAL * (kind == CATEGORY), _MISSING * table.missing[number], _OTHER * table.other[number]]
        names += [f"{_FACT}{number}{_FACT}{fact}" for fact in facts if fact]
        names += [f"{_FACT}{number}{_FACT}={category}" for category in table.categories[number]]
    return names


def _facts_in(names: Iterable[str], counts: Sequence[int]) -> TableFacts:
    """Return the facts in the names of all sites, or raise :class:`SettingsError` if a site has sent wrong names."""
    facts: list[set[str]] = [set() for _ in counts]
    try:
        for name in names:
            _, number, fact = name.split(_FACT, 2)
            facts[int(number)].add(fact)
    except (ValueError, IndexError) as error:
        raise SettingsError("a site has sent wrong facts about its table; set encoder") from error
    return TableFacts(
        tuple(CATEGORY if _CATEGORICAL in part else NUMBER for part in facts),
        tuple(counts),
        tuple(_MISSING in part for part in facts),
        tuple(_OTHER in part for part in facts),
        tuple(tuple(sorted(fact[1:] for fact in part if fact.startswith("="))) for part in facts),
    )


# -- labels ------------------------------------------------------------------------------------------------
#
# Invertible Bloom lookup tables (Goodrich and Mitzenmacher, 2011) allow the union of sets to be listed from the sum of
# their tables. A label adds a count of 1, its checksum and its name to each of its three cells. The checksum shows
# whether a cell contains only one label, from any number of sites. The server reads this label and subtracts it from
# all three cells.


def _table_of(names: Iterable[str]) -> list[int]:
    """Return the table for a set of labels: ``CELLS`` cells, each with a count, a checksum and a name."""
    cells = [[0, 0, 0] for _ in range(CELLS)]
    for name in names:
        text = name.encode()
        if len(text) > NAME_BYTES:
            raise DataError(
                f"a label or a category has {len(text)} bytes; with secure-aggregation, at most {NAME_BYTES} are "
                "allowed; shorten it, or set classes for labels",
                "long-label",
            )
        check, label_cells = _hashes(text)
        for index in label_cells:
            cells[index][0] += 1
            cells[index][1] += check
            cells[index][2] += int.from_bytes(text, "big")
    return [word for count, check, name in cells for word in (count, *_split(check, 2), *_split(name, _NAME_WORDS))]


def _names_in(sums: Sequence[int]) -> dict[str, int]:
    """Return each label in a sum of tables, mapped to the number of tables that contain it."""
    cells = []
    for start in range(0, len(sums), _CELL_WORDS):
        row = sums[start : start + _CELL_WORDS]
        cells.append([row[0], _joined(row[1:3]), _joined(row[3:])])
    names: Counter[str] = Counter()
    pending = list(range(len(cells)))
    while pending:
        cell = pending.pop()
        count, check, name = cells[cell]
        if count <= 0 or name % count or check % count:
            continue
        number, times = name // count, count
        text = number.to_bytes(-(-number.bit_length() // 8), "big")
        label_check, label_cells = _hashes(text)
        if label_check != check // times or cell not in label_cells:
            continue
        for index in label_cells:
            cells[index] = [a - times * b for a, b in zip(cells[index], (1, label_check, number), strict=True)]
        names[label_name(text.decode(errors="replace"))] += times
        pending += label_cells
    if any(any(cell) for cell in cells):
        problem = "the sites have too many labels and categories for a masked sum"
        raise SettingsError(f"{problem}: set classes, or name fewer columns in input-columns")
    return dict(names)


def _hashes(text: bytes) -> tuple[int, list[int]]:
    """Return the checksum of a label, and one cell in each third of the table."""
    part = CELLS // CHOICES
    digest = hashlib.sha256(text).digest()
    label_cells = [part * i + int.from_bytes(digest[8 + 4 * i : 12 + 4 * i], "big") % part for i in range(CHOICES)]
    return int.from_bytes(digest[:8], "big"), label_cells
