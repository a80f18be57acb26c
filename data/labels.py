"""Read labels from cells and arrays, and determine the names of the classes."""

import re
import unicodedata
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Self

import numpy as np

from posy.data.errors import DataError, Note

_INTEGER = re.compile(r"[+-]?[0-9]{1,4000}")
_NUMBER = re.compile(r"[+-]?(?:[0-9]{1,4000}(?:\.[0-9]{0,4000})?|\.[0-9]{1,4000})")
_INTEGER_OR_FLOAT = re.compile(r"([+-]?[0-9]{1,4000})(?:\.0*)?")
_CANONICAL = re.compile(r"(?:\+|(-))?(0|[1-9][0-9]{0,3999})(?:\.0*)?")
_EXPONENT = re.compile(r"[+-]?[0-9]+(\.[0-9]*)?[eE][+-]?[0-9]+")
_GAP = re.compile(r"[\s_-]+")
_RULE = re.compile(r"(.+?)\s*(>=|<=|==|!=|>|<)\s*([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)")
_COMPARE = {
    ">": np.greater, ">=": np.greater_equal, "<": np.less, "<=": np.less_equal, "==": np.equal, "!=": np.not_equal
}  # fmt: skip
_ABSENT = frozenset({"nan", "na", "n/a", "none", "null", "missing", "?"})


@dataclass(frozen=True)
class LabelRule:
    """A rule that derives two classes from a numeric column: 1 if the comparison is true, else 0."""

    column: str
    sign: str  # >, >=, <, <=, == or !=
    number: float

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """Return the rule in a text such as ``num > 0``, or None if the text is not a comparison."""
        match = _RULE.fullmatch(text)
        return cls(label_name(match[1]), match[2], float(match[3])) if match else None

    def __call__(self, values: np.ndarray) -> np.ndarray:
        """Return the classes ``(N,)`` of the column's numbers, int64."""
        return np.asarray(_COMPARE[self.sign](values, self.number)).astype(np.int64)


def as_labels(y: np.ndarray, where: str, *, role: str = "label") -> np.ndarray:
    """Return labels ``(N,)`` as int64, or as strings if int64 cannot represent all of them.

    Whole numbers of every type, including floats such as 2.0, keep their values. If they exceed int64, they become
    strings of digits. The function strips spaces around strings, normalises them (Unicode NFC), and decodes bytes as
    UTF-8. ``role`` names the content in messages: label, group or patient.

    Raises
    ------
    DataError
        If there is not exactly one label per sample. The error is also raised if a label is empty or NaN, has a
        fractional part, or is a float that its type cannot distinguish from the next whole number.
    """
    y = np.asarray(y)
    if y.ndim > 1 and y.size == len(y):
        y = y.reshape(-1)
    if y.ndim != 1:
        raise DataError(f"{where}: {role}s of shape {y.shape}; expected one {role} for each sample, (N,)")
    kind = y.dtype.kind
    if kind in "SU":
        return _as_names(y, where, role)
    if kind in "ibu":
        return y.astype(str if kind == "u" and len(y) and y.max() > np.iinfo(np.int64).max else np.int64)
    if kind != "f":
        raise DataError(f"{where}: {role}s of type {y.dtype}; whole numbers and strings are allowed")
    invalid = ~np.isfinite(y) | (y != np.floor(y))
    if invalid.any():
        decimals = np.isfinite(y) & invalid
        remedy = "whole numbers and strings are allowed"
        if role == "label" and decimals.any():
            remedy = "whole numbers are allowed; to predict numbers, set task=regression"
            invalid = decimals
        raise DataError(f"{where}: {role} {y[invalid][0]} at index {invalid.argmax()}; {remedy}")
    limit = min(2.0 ** (np.finfo(y.dtype).nmant + 1), 2.0**53)
    large = np.abs(y) >= limit
    if large.any():
        raise DataError(
            f"{where}: {role} {y[large][0]} at index {large.argmax()}; {y.dtype} cannot distinguish whole numbers "
            f"from {limit:.0f} upwards: store {role}s as whole numbers or strings"
        )
    return y.astype(np.int64)


def _as_names(y: np.ndarray, where: str, role: str) -> np.ndarray:
    values, indices = np.unique(y, return_inverse=True)
    names = []
    for value in values.tolist():
        try:
            names.append(label_name(value.decode() if isinstance(value, bytes) else value))
        except UnicodeError as error:
            raise DataError(f"{where}: {role} {value!r:.60} is not UTF-8 ({error})") from error
    if "" in names:
        first = int(np.flatnonzero(indices == names.index(""))[0])
        raise DataError(
            f"{where}: the {role} at index {first} is empty; {role}s must be whole numbers or non-empty strings"
        )
    return np.array(names, str)[indices] if names else y.astype(str)


def joined_labels(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Join label arrays returned by :func:`as_labels`. If some are strings, numbers become strings."""
    if len({part.dtype.kind for part in parts}) > 1:
        parts = [part.astype(str) for part in parts]
    return np.concatenate(parts)


def known_labels(y: np.ndarray, num_classes: int, where: str) -> np.ndarray:
    """Return the labels of data with C known classes as int64, or raise :class:`DataError` unless all are 0..C-1."""
    labels = as_labels(y, where)
    if labels.dtype.kind != "i":
        raise DataError(f"{where}: the label {labels[0]!s:.60} is a string; allowed: 0 to {num_classes - 1}")
    invalid = np.flatnonzero((labels < 0) | (labels >= num_classes))
    if invalid.size:
        raise DataError(f"{where}: label {labels[invalid[0]]} at index {invalid[0]}; allowed: 0 to {num_classes - 1}")
    return labels


def distinct_labels(labels: np.ndarray) -> tuple[np.ndarray, tuple[str, ...]]:
    """Return labels as indices 0..C-1, ``(N,)`` int64, and the C names in the order of :func:`sorted_names`."""
    values, indices = np.unique(labels, return_inverse=True)
    texts = [str(value) for value in values]
    names = tuple(sorted_names(texts))
    return renumbered(indices, texts, names), names


def renumbered(indices: np.ndarray, labels: Sequence[str], names: Sequence[str]) -> np.ndarray:
    """Convert ``(N,)`` indices into ``labels`` to int64 indices into ``names``, which contains all labels."""
    number = {name: index for index, name in enumerate(names)}
    return np.array([number[name] for name in labels], np.int64)[indices]


def sorted_names(names: Collection[str]) -> list[str]:
    """Sort the names of classes or groups: by value if all are numbers, else alphabetically."""
    if all(_NUMBER.fullmatch(name) for name in names):
        return sorted(names, key=lambda name: (Decimal(name), name))
    return sorted(names)


def numbered_groups(values: np.ndarray, kind: str = "group") -> tuple[np.ndarray, tuple[str, ...]]:
    """Return natural groups ``(N,)`` as int64 numbers from 0, and the groups' names in order of :func:`sorted_names`.

    If all names are whole numbers, ``kind`` precedes each, as in ``group 3``, because a plain number denotes a client.
    """
    numbers, names = distinct_labels(values)
    if all(map(_INTEGER.fullmatch, names)):
        names = tuple(f"{kind} {name}" for name in names)
    return numbers, names


def label_name(text: str) -> str:
    """Return a text as a class name: stripped of surrounding spaces, and normalised (Unicode NFC)."""
    return unicodedata.normalize("NFC", text.strip())


def written_label(cell: str) -> str:
    """Return the label in a cell of a table.

    A whole number has one name, even if it is written as a float: ``1``, ``+1``, ``1.0`` and ``1e0`` are all class 1.
    Any other string, without surrounding spaces, is a separate class name: ``01`` is not 1. The result depends only on
    the cell itself, so it is the same at every site.
    """
    name = label_name(cell)
    if integer := _CANONICAL.fullmatch(name):
        return "0" if integer[2] == "0" else (integer[1] or "") + integer[2]
    if _EXPONENT.fullmatch(name):
        value = float(name)
        if value.is_integer() and abs(value) < 2**53:
            return str(int(value))
    return name


def label_notes(y: np.ndarray, names: Sequence[str], is_test: np.ndarray | None = None) -> list[str]:
    """Return warnings about labels ``(N,)`` in 0..C-1 and their names; ``is_test`` is as in ``Content``."""
    notes: list[str] = []
    if all(map(_INTEGER.fullmatch, names)) and (negative := [name for name in names if name.startswith("-")]):
        notes.append(
            Note(f"negative labels are separate classes: {', '.join(negative)}", "negative labels are separate classes")
        )
    if absent := [name for name in names if name.casefold() in _ABSENT]:
        notes.append(
            Note(f"a missing value is a separate class: {', '.join(absent)}", "a missing value is a separate class")
        )
    notes += [
        Note(
            f"{listed(twins)} are separate classes, although their names are nearly equal",
            "the names of some classes are nearly equal",
        )
        for twins in nearly_equal(names)
    ]
    if is_test is not None and (unseen := np.setdiff1d(y[is_test], y[~is_test])).size:
        notes.append(
            Note(
                f"classes that only the test set contains: {', '.join(names[label] for label in unseen)}",
                "some classes occur only in the test set",
            )
        )
    if len(y) >= 20 and 2 * len(names) > len(y):
        notes.append(
            Note(
                f"{len(y)} samples have {len(names)} different labels, which might not be class names",
                "more than half of the labels differ; they might not be class names",
            )
        )
    return notes


def nearly_equal(names: Collection[str]) -> list[list[str]]:
    """Return groups of names that differ only in case, spacing or notation, such as Cat and cat, or 1 and 01."""
    names_by_key = defaultdict(list)
    for name in sorted(set(names)):
        key = "".join(c for c in unicodedata.normalize("NFKC", name) if unicodedata.category(c) != "Cf").casefold()
        number = _INTEGER_OR_FLOAT.fullmatch(key)
        names_by_key[str(int(number[1])) if number else _GAP.sub(" ", key)].append(name)
    return [twins for twins in names_by_key.values() if len(twins) > 1]


def listed(names: Sequence[str]) -> str:
    """Return quoted names for a message, with non-ASCII characters escaped."""
    quoted = [ascii(name) if len(name.encode("ascii", "ignore")) < len(name) else repr(name) for name in names]
    return ", ".join(quoted[:-1]) + (" and " if len(quoted) > 1 else "") + quoted[-1]
