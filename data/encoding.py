"""Encode the rows of a table: impute missing values, and encode categories as one-hot columns.

An :class:`Encoder` contains only statistics of the federation. All clients use the same encoder, so they produce the
same columns. A one-hot column represents a category, the missing values of a column, or all of its rare values. It
exists only if enough training rows have such a value, either at one site or, without sites, among all training samples.
Other rare values, and values that do not occur in training, have zeros in all one-hot columns of their column.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

import numpy as np

from posy.data.errors import DataError
from posy.data.labels import sorted_names, written_label
from posy.data.values import deviation, moments
from posy.settings import SettingsError

MAX_NAME, MAX_CATEGORIES = 300, 1000
"""Maximum number of characters in a category's name, and maximum number of categories in a column."""
NO_ENCODER = "none"
"""The value of the setting `encoder` for a run whose sites have no tables."""
NUMBER, CATEGORY, EMPTY = "number", "category", ""
"""The kinds of columns. A column without values is empty."""
Categories = tuple[tuple[str, ...] | None, ...]
"""The names of the categories in each column, or None for a numeric column. Empty if all columns are numeric."""


@dataclass(frozen=True)
class EncodedColumn:
    """The encoding of one column. A column with neither ``mean`` nor ``categories`` is not used."""

    name: str
    mean: float | None = None  # of a numeric column
    imputes: bool = False  # whether the mean replaces missing values
    categories: tuple[str, ...] = ()
    missing: bool = False  # whether an indicator column marks missing values
    other: bool = False  # whether rare and unseen categories have a column

    @property
    def is_used(self) -> bool:
        """Whether the encoded table contains the column."""
        return self.mean is not None or bool(self.categories)

    @property
    def names(self) -> list[str]:
        """The names of the columns in the encoded table."""
        names = [self.name] if self.mean is not None else [f"{self.name}={category}" for category in self.categories]
        return names + [f"{self.name} missing"] * self.missing + [f"{self.name} other"] * self.other

    def encode(self, values: np.ndarray, categories: Sequence[str] | None, where: str) -> list[np.ndarray]:
        """Return the encoded columns, float64 ``(N,)`` each, of values as in :class:`posy.data.dataset.Content`."""
        gaps = np.isnan(values)
        if (count := int(gaps.sum())) and not self.imputes:
            raise missing_value(f"{where}: column {self.name}: {count} missing values", self.name, count)
        if self.mean is not None:
            if categories is not None:
                raise DataError(f"{where}: column {self.name} contains categories instead of numbers", "not-a-number")
            parts = [np.where(gaps, self.mean, values)]
            rare = np.zeros(len(values), bool)
        else:
            if categories is None:  # categories that are stored as numbers
                distinct, codes_of = np.unique(values[~gaps], return_inverse=True)
                categories = [written_label(repr(value)) for value in distinct.tolist()]
                values = values.copy()
                values[~gaps] = codes_of
            names = list(categories)
            numbers = {category: number for number, category in enumerate(self.categories)}
            codes = np.array([*(numbers.get(name, len(numbers)) for name in names), -1])
            code = codes[np.where(gaps, len(names), values).astype(np.int64)]
            parts = [(code == number).astype(np.float64) for number in range(len(numbers))]
            rare = (code == len(numbers)) | (gaps & (not self.missing))
        if self.missing:
            parts.append(gaps.astype(np.float64))
        if self.other:
            parts.append(rare.astype(np.float64))
        return parts


@dataclass(frozen=True)
class Encoder:
    """The encoding of a table's rows. All clients use the same encoding."""

    columns: tuple[EncodedColumn, ...]

    @property
    def inputs(self) -> tuple[str, ...]:
        """The names of the table's columns, in order."""
        return tuple(column.name for column in self.columns)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the encoded columns, in order."""
        return tuple(name for column in self.columns if column.is_used for name in column.names)

    @property
    def is_number(self) -> np.ndarray:
        """Whether each encoded column contains numbers, bool ``(F,)``; the others are one-hot and are not scaled."""
        return np.array(
            [c.mean is not None and k == 0 for c in self.columns if c.is_used for k in range(len(c.names))], bool
        )

    @property
    def categorical(self) -> tuple[str, ...]:
        """The names of the categorical columns."""
        return tuple(column.name for column in self.columns if column.mean is None and column.is_used)

    def encode(self, x: np.ndarray, categories: Categories, where: str) -> np.ndarray:
        """Return encoded samples, float64 ``(N, F)``.

        Parameters
        ----------
        x : numpy.ndarray
            The columns of a table ``(N, K)`` in the order of :attr:`inputs`: numbers, and indices into ``categories``.
            NaN denotes a missing value.
        categories : tuple
            The names of the categories in each column, or None for numbers.
        where : str
            The name of the data, for messages.

        Raises
        ------
        DataError
            If a numeric column contains categories, or missing values that the run does not impute.
        """
        parts: list[np.ndarray] = []
        for number, column in enumerate(self.columns):
            if column.is_used:
                names = categories[number] if categories else None
                parts += column.encode(x[:, number].astype(np.float64), names, where)
        return np.column_stack(parts)

    def to_json(self) -> str:
        """Return the encoder as JSON; :meth:`from_json` restores each number exactly."""
        default = asdict(EncodedColumn(""))
        columns = [asdict(column) for column in self.columns]
        return json.dumps([{k: v for k, v in c.items() if v != default[k]} for c in columns], ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read the JSON that :meth:`to_json` returns, or raise :class:`SettingsError` for other text."""
        try:
            entries = json.loads(text)
            lists = [entry.get("categories", []) for entry in entries]
            columns = [
                EncodedColumn(**(entry | {"categories": tuple(names)}))
                for entry, names in zip(entries, lists, strict=True)
            ]
            valid = all(type(names) is list for names in lists) and all(map(_is_valid, columns))
            valid = valid and any(column.is_used for column in columns)
            encoder = cls(tuple(columns))
            valid = valid and len(set(encoder.inputs)) == len(columns) and len(set(encoder.names)) == len(encoder.names)
        except (ValueError, TypeError, AttributeError, RecursionError):
            valid = False
        if not valid:
            raise SettingsError(
                f"encoder = {text!r:.100}: not an encoder in the format that Posy stores; remove the setting, so "
                "that the sites agree on an encoder"
            )
        return encoder


def encoder_in(encoder: str) -> Encoder | None:
    """Return the encoder in the setting `encoder`, if any, or raise :class:`SettingsError` for a malformed encoder."""
    return Encoder.from_json(encoder) if encoder not in ("", NO_ENCODER) else None


def missing_value(text: str, column: str, count: int) -> DataError:
    """Return the error for missing values in a column that the run does not impute."""
    return DataError(
        f"{text}; set missing=impute, fill in a value, remove the row, or remove the column from input-columns",
        "missing-value",
        column,
        count,
    )


def _is_valid(column: EncodedColumn) -> bool:
    """Return whether the values of a column from JSON have the right types and sizes."""
    texts = [column.name, *column.categories]
    return (
        all(isinstance(text, str) and len(text) <= MAX_NAME for text in texts)
        and len(set(column.categories)) == len(column.categories) <= MAX_CATEGORIES
        and all(type(flag) is bool for flag in (column.imputes, column.missing, column.other))
        and (column.mean is None or (type(column.mean) in (int, float) and math.isfinite(column.mean)))
        and not (column.mean is not None and (column.categories or column.other))
    )


# -- statistics ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TableFacts:
    """Facts about a site's training rows, or about all training samples, with one entry for each of K columns.

    The facts never include a count below the minimum number of rows. If a column has too few values, its facts are
    those of an empty column. If it has too few missing values, it counts as complete.
    """

    kinds: tuple[str, ...]  # NUMBER, CATEGORY or EMPTY
    present: tuple[int, ...]  # number of rows with a value
    missing: tuple[bool, ...]  # whether enough rows have no value
    other: tuple[bool, ...]  # whether enough rows have rare categories, or rare missing values
    categories: tuple[tuple[str, ...], ...]  # categories with enough rows

    def to_json(self) -> str:
        """Return the facts as JSON."""
        return json.dumps(asdict(self), ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read the JSON that :meth:`to_json` returns, or raise ValueError, KeyError or TypeError."""
        stored: Mapping[str, Any] = json.loads(text)
        facts = cls(
            kinds=tuple(stored["kinds"]),
            present=tuple(stored["present"]),
            missing=tuple(stored["missing"]),
            other=tuple(stored["other"]),
            categories=tuple(tuple(names) for names in stored["categories"]),
        )
        names = [name for part in facts.categories for name in part]
        valid = (
            len({len(part) for part in vars(facts).values()}) == 1
            and set(facts.kinds) <= {NUMBER, CATEGORY, EMPTY}
            and all(type(count) is int and 0 <= count < 1 << 53 for count in facts.present)
            and all(type(flag) is bool for flag in (*facts.missing, *facts.other))
            and all(isinstance(name, str) and len(name) <= MAX_NAME for name in names)
            and all(len(part) <= MAX_CATEGORIES for part in facts.categories)
        )
        if not valid:
            raise ValueError("the facts about the table are implausible")
        return facts

    @classmethod
    def of_numbers(cls, columns: int, rows: int) -> Self:
        """Return the facts about a table of numbers without missing values."""
        flags = (False,) * columns
        return cls((NUMBER,) * columns, (rows,) * columns, flags, flags, ((),) * columns)

    def kinds_only(self) -> "TableFacts":
        """Return the facts with only the kinds of the columns."""
        columns = len(self.kinds)
        return replace(self.of_numbers(columns, 0), kinds=self.kinds)

    def in_order(self, order: Sequence[int]) -> "TableFacts":
        """Return the facts with the columns in another order."""
        return TableFacts(*(tuple(part[index] for index in order) for part in vars(self).values()))


@dataclass(frozen=True)
class Moments:
    """The number of rows, and each column's number of values, mean and sum of squared deviations ``(K,)``."""

    rows: int
    count: np.ndarray
    mean: np.ndarray
    squares: np.ndarray


def table_facts(
    x: np.ndarray, categories: Categories, rows: np.ndarray, min_rows: int
) -> tuple[TableFacts, np.ndarray, np.ndarray]:
    """Return facts about some rows of a table, and the mean and the squared deviations of each column, ``(K,)``."""
    kinds, present, missing, other, frequent = [], [], [], [], []
    mean, squares = np.zeros(x.shape[1]), np.zeros(x.shape[1])
    for number in range(x.shape[1]):
        values = x[rows, number].astype(np.float64)
        observed = values[~np.isnan(values)]
        gaps = len(values) - len(observed)
        names = categories[number] if categories else None
        shown: tuple[str, ...] = ()
        rare = 0
        if names is not None:
            counts = np.bincount(observed.astype(np.int64), minlength=len(names))
            pairs = [
                (name, count) for name, count in zip(names, counts.tolist(), strict=True)
                if count >= min_rows and len(name) <= MAX_NAME
            ]  # fmt: skip
            pairs = sorted(pairs, key=lambda pair: -pair[1])[:MAX_CATEGORIES]
            shown = tuple(sorted(name for name, _ in pairs))
            rare = len(observed) - sum(count for _, count in pairs) + (gaps if gaps < min_rows else 0)
        elif len(observed) >= min_rows:
            (mean[number],), (squares[number],) = moments(observed[:, None])
        enough = len(observed) >= min_rows
        kinds.append((NUMBER if names is None else CATEGORY) if enough else EMPTY)
        present.append((len(observed) if gaps >= min_rows else len(values)) if enough else 0)
        missing.append(gaps >= min_rows)
        other.append(rare >= min_rows)
        frequent.append(shown)
    facts = TableFacts(tuple(kinds), tuple(present), tuple(missing), tuple(other), tuple(frequent))
    return facts, mean, squares


def merged(parts: Sequence[Moments]) -> Moments:
    """Return the moments over the rows of all parts. Equal means stay exactly equal."""
    counts = np.stack([part.count for part in parts]).astype(np.float64)
    means = np.stack([part.mean for part in parts])
    total = counts.sum(0)
    mean = (counts * means).sum(0) / np.maximum(total, 1)
    first = means[(counts > 0).argmax(0), np.arange(means.shape[1])]
    mean = np.where(((means == first) | (counts == 0)).all(0), first, mean)
    squares = np.stack([part.squares for part in parts]).sum(0) + (counts * (means - mean) ** 2).sum(0)
    return Moments(sum(part.rows for part in parts), total, mean, squares)


def make_encoder(columns: Sequence[str], facts: Sequence[TableFacts], total: Moments, *, imputes: bool) -> Encoder:
    """Return the encoder for a table's columns, from facts about the tables of all sites in the order of the columns.

    Raises
    ------
    SettingsError
        If no column can be used.
    """
    encoded = []
    for number, name in enumerate(columns):
        missing = imputes and any(each.missing[number] for each in facts)
        if any(each.kinds[number] == CATEGORY for each in facts):
            categories = {category for each in facts for category in each.categories[number]}
            other = any(each.other[number] for each in facts)
            encoded.append(
                EncodedColumn(name, None, imputes, tuple(sorted_names(categories)), missing, other)
                if categories
                else EncodedColumn(name)
            )
        elif total.count[number]:
            encoded.append(EncodedColumn(name, float(total.mean[number]), imputes, (), missing))
        else:
            encoded.append(EncodedColumn(name))
    if not any(column.is_used for column in encoded):
        raise SettingsError("no column of the tables has enough values for a feature; set input-columns")
    return Encoder(tuple(encoded))


def scale_of(encoder: Encoder, total: Moments) -> tuple[np.ndarray, np.ndarray]:
    """Return the mean and the standard deviation of each encoded column ``(F,)``; 0 and 1 for one-hot columns.

    Imputed values equal the mean, so they add rows, but no squared deviations.
    """
    std = deviation(total.mean, total.squares / max(1, total.rows))
    numbers = [number for number, column in enumerate(encoder.columns) if column.mean is not None]
    mean_of, std_of = np.zeros(len(encoder.names)), np.ones(len(encoder.names))
    mean_of[encoder.is_number], std_of[encoder.is_number] = total.mean[numbers], std[numbers]
    return mean_of, std_of


def encoder_notes(encoder: Encoder) -> list[str]:
    """Return notes on the columns that the encoder does not use."""
    unused = [column.name for column in encoder.columns if not column.is_used]
    return [f"columns without enough values or frequent categories are not used: {', '.join(unused)}"] if unused else []
