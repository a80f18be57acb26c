"""A data set in memory, and the checks that every loader shares."""

import re
import unicodedata
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from posy.data.errors import DataError
from posy.data.task import Task

Indices = tuple[tuple[np.ndarray, np.ndarray], ...]

FLOAT32 = np.finfo(np.float32)
BLOCK = 1 << 22
"""Numbers of which a copy may be made while columns are looked through."""
ROUNDING = 4 * float(np.finfo(np.float64).eps)
"""Standard deviation, as a part of the mean, up to which a feature is taken for constant."""
LOST = 1e-3
"""Part of a feature's range that rounding may move a value by before it is warned of."""
_WHOLE = re.compile(r"[+-]?[0-9]{1,4000}")
_WHOLE_FLOAT = re.compile(r"([+-]?[0-9]{1,4000})\.0*")
_GAP = re.compile(r"[\s_-]+")
_ABSENT = frozenset({"nan", "na", "n/a", "none", "null", "missing", "?"})


@dataclass(frozen=True, eq=False)
class Dataset:
    """All samples of a data set, train and test pooled.

    Attributes
    ----------
    name : str
        Name or path that it was loaded under.
    task : Task
        Kind, shape and classes.
    x : np.ndarray
        ``(N, H, W, C)`` images, uint8 or, already scaled, float32; ``(N, F)`` features, float32 or, where
        that would change one, float64; or ``(N, L)`` int64 tokens.
    y : np.ndarray
        ``(N,)`` int64 labels 0..C-1.
    mean, std : np.ndarray
        What is subtracted and divided by: float32 per channel of pixels/255 for uint8 images, float64 per
        feature for features; 0 and 1 for values that are taken as they are.
    groups : np.ndarray or None
        ``(N,)`` int64 natural group of each sample: writer, user, medical centre.
    given : tuple or None
        (train, test) indices of each client, when the data comes already partitioned.
    notes : tuple of str
        What reading the data has found that a person should know, a sentence each.
    skipped : int
        Files that could not be read and were left out.
    """

    name: str
    task: Task
    x: np.ndarray
    y: np.ndarray
    mean: np.ndarray
    std: np.ndarray
    groups: np.ndarray | None = None
    given: Indices | None = None
    notes: tuple[str, ...] = ()
    skipped: int = 0

    def __len__(self) -> int:
        """Return the number of samples N."""
        return len(self.y)


@dataclass(frozen=True, eq=False)
class Content:
    """What a file or a folder of people's own data holds, before it belongs to a task.

    Attributes
    ----------
    kind : str
        ``image`` (uint8), ``image-float``, ``features``, ``text`` or ``tokens`` (numbers of words).
    x : np.ndarray or Sequence of str
        As in :class:`Dataset`; of ``text`` the N texts.
    labels : np.ndarray
        ``(N,)``, as :func:`as_labels` returns them.
    groups : np.ndarray or None
        As in :class:`Dataset`.
    is_test : np.ndarray or None
        ``(N,)`` bool, the samples of the data's own test set, if it has one.
    given : tuple or None
        As in :class:`Dataset`.
    num_classes : int
        Number of classes C where the data tells it, the labels then being 0..C-1; else 0.
    columns : tuple of str
        Names of the features, where the data gives them.
    notes : tuple of str
        As in :class:`Dataset`.
    unreadable : tuple of str
        What is wrong with each file that was left out, if that was asked for.
    """

    kind: str
    x: Any
    labels: np.ndarray
    groups: np.ndarray | None = None
    is_test: np.ndarray | None = None
    given: Indices | None = None
    num_classes: int = 0
    columns: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    unreadable: tuple[str, ...] = ()


def image_dataset(
    name: str, x: np.ndarray, y: np.ndarray, class_names: Sequence[str], groups: np.ndarray | None = None
) -> Dataset:
    """Build a data set of ``(N, H, W, C)`` images.

    uint8 pixels are brought to [-1, 1], as PFLlib does, so that curves compare; float32 pixels stay.
    """
    height, width, channels = x.shape[1:]
    centre = 0.5 if x.dtype == np.uint8 else 0.0
    mean = np.full(channels, centre, np.float32)
    std = np.full(channels, centre or 1.0, np.float32)
    return Dataset(name, Task("image", (channels, height, width), tuple(class_names)), x, y, mean, std, groups)


def feature_dataset(
    name: str,
    x: np.ndarray,
    y: np.ndarray,
    class_names: Sequence[str],
    groups: np.ndarray | None = None,
    *,
    standardise: bool = True,
) -> Dataset:
    """Build a data set of ``(N, F)`` features; a constant feature is only centred."""
    width = x.shape[1]
    mean, std = np.zeros(width), np.ones(width)
    if standardise:
        mean, squares = moments(x)
        std = deviation(mean, squares / len(x))
    return Dataset(name, Task("features", (width,), tuple(class_names)), x, y, mean, std, groups)


def text_dataset(
    name: str,
    x: np.ndarray,
    y: np.ndarray,
    class_names: Sequence[str],
    groups: np.ndarray | None = None,
    *,
    vocabulary: int,
) -> Dataset:
    """Build a data set of ``(N, L)`` int64 tokens below ``vocabulary``; 0 is padding."""
    task = Task("text", (x.shape[1],), tuple(class_names), vocabulary)
    return Dataset(name, task, x, y, np.zeros(1, np.float32), np.ones(1, np.float32), groups)


def known_labels(y: np.ndarray, num_classes: int, where: str) -> np.ndarray:
    """Return the labels of a published data set as int64.

    Raises
    ------
    DataError
        If a label is not a whole number in 0..C-1, with its index.
    """
    whole = as_labels(np.asarray(y).reshape(-1), where, texts=False)
    bad = np.flatnonzero((whole < 0) | (whole >= num_classes))
    if bad.size:
        raise DataError(f"{where}: label {whole[bad[0]]} at index {bad[0]}; allowed are 0 to {num_classes - 1}")
    return whole


def mapped_labels(y: np.ndarray, where: str) -> tuple[np.ndarray, tuple[str, ...]]:
    """Map the distinct labels of a user's data to 0..C-1: numbers by value if all are, else texts in order.

    Parameters
    ----------
    y : np.ndarray
        ``(N,)`` or ``(N, 1)`` labels, as for :func:`as_labels`.
    where : str
        File, for the message of an error.

    Returns
    -------
    tuple
        ``(N,)`` int64 labels, and the C names.

    Raises
    ------
    DataError
        If a label is not a whole number or a text, or all are the same.
    """
    labels, names = distinct_labels(y, where)
    if len(names) < 2:
        raise DataError(f"{where}: {len(names)} distinct labels {list(names)}; a task needs at least 2 classes")
    return labels, names


def distinct_labels(y: np.ndarray, where: str) -> tuple[np.ndarray, tuple[str, ...]]:
    """Do as :func:`mapped_labels`, also where all labels are the same."""
    values, labels = np.unique(as_labels(y, where), return_inverse=True)
    found = [str(value) for value in values]
    names = sorted_names(found)
    place = {name: number for number, name in enumerate(names)}
    order = np.array([place[name] for name in found], np.int64)
    return order[labels.reshape(-1)] if len(order) else np.zeros(0, np.int64), tuple(names)


def sorted_names(names: Collection[str]) -> list[str]:
    """Sort names of classes: by value if all are whole numbers, else as texts."""
    if all(_WHOLE.fullmatch(name) for name in names):
        return sorted(names, key=lambda name: (int(name), name))
    return sorted(names)


def label_notes(y: np.ndarray, names: Sequence[str], is_test: np.ndarray | None = None) -> list[str]:
    """Return what may be a mistake in the labels of a user's data.

    Parameters
    ----------
    y : np.ndarray
        ``(N,)`` int64 labels 0..C-1.
    names : sequence of str
        The C names.
    is_test : np.ndarray or None
        As in :class:`Content`.
    """
    notes = []
    if all(map(_WHOLE.fullmatch, names)) and (below := [name for name in names if name.startswith("-")]):
        notes.append(f"negative labels are classes of their own: {', '.join(below)}")
    if absent := [name for name in names if name.casefold() in _ABSENT]:
        notes.append(f"a missing value is a class of its own: {', '.join(absent)}")
    notes += [f"{listed(twins)} are classes of their own, though they nearly agree" for twins in nearly_equal(names)]
    if is_test is not None and (unseen := np.setdiff1d(y[is_test], y[~is_test])).size:
        notes.append(f"classes of the test set alone: {', '.join(names[label] for label in unseen)}")
    if len(y) >= 20 and 2 * len(names) > len(y):
        notes.append(f"{len(y)} samples have {len(names)} different labels: they may be no names of classes")
    return notes


def nearly_equal(names: Collection[str]) -> list[list[str]]:
    """Return the groups of names that differ in case, spaces or spelling alone, as Cat and cat, or 1 and 01."""
    alike = defaultdict(list)
    for name in sorted(set(names)):
        key = "".join(c for c in unicodedata.normalize("NFKC", name) if unicodedata.category(c) != "Cf").casefold()
        if number := _WHOLE.fullmatch(key) or _WHOLE_FLOAT.fullmatch(key):
            key = str(int(number[number.lastindex or 0]))
        else:
            key = _GAP.sub(" ", key)
        alike[key].append(name)
    return [twins for twins in alike.values() if len(twins) > 1]


def listed(names: Sequence[str]) -> str:
    """Return names for a message: what one cannot see in them can be seen there."""
    quoted = [ascii(name) if len(name.encode("ascii", "ignore")) < len(name) else repr(name) for name in names]
    return ", ".join(quoted[:-1]) + (" and " if len(quoted) > 1 else "") + quoted[-1]


def label_name(text: str) -> str:
    """Return a text as the name of a class: without spaces around it, accents in one spelling (NFC)."""
    return unicodedata.normalize("NFC", text.strip())


def written_label(cell: str) -> str:
    """Return the label that a cell of a table holds.

    A whole number means itself, also where it is written as a float: ``1``, ``+1``, ``1.0`` and ``1e0`` are
    the class 1. Every other text means itself, spaces around it aside: ``01`` is not 1. What a cell means does
    not depend on the other cells, so that it is the same at every site.
    """
    name = label_name(cell)
    digits = _WHOLE.fullmatch(name) or _WHOLE_FLOAT.fullmatch(name)
    if digits:
        whole = digits[digits.lastindex or 0].removeprefix("+")
        plain = whole.removeprefix("-")
        if plain == "0" or not plain.startswith("0"):
            return "0" if plain == "0" else whole
        return name
    if re.fullmatch(r"[+-]?[0-9]+(\.[0-9]*)?[eE][+-]?[0-9]+", name):
        value = float(name)
        if value.is_integer() and abs(value) < 2**53:
            return str(int(value))
    return name


def as_labels(y: np.ndarray, where: str, *, texts: bool = True) -> np.ndarray:
    """Return ``(N,)`` labels that keep their identity: int64, or texts where int64 cannot hold all of them.

    Whole numbers of every type, also floats that are whole, stay what they are, beyond int64 as their digits.
    Texts lose spaces around them and get accents in one spelling; bytes are read as UTF-8.

    Raises
    ------
    DataError
        If there is not one label for each sample, or one is empty, has a fraction, is no number, or is a float
        so large that its type cannot tell it from the next whole number.
    """
    y = np.asarray(y)
    if y.ndim > 1 and y.size == len(y):
        y = y.reshape(-1)
    if y.ndim != 1:
        raise DataError(f"{where}: labels of shape {y.shape}; one label for each sample is allowed, (N,)")
    kind = y.dtype.kind
    if kind in "SU" and texts:
        return _as_names(y, where)
    if kind in "ib" or (kind == "u" and (not len(y) or y.max() <= np.iinfo(np.int64).max)):
        return y.astype(np.int64)
    if kind == "u" and texts:
        return y.astype(str)
    if kind == "u":
        raise DataError(f"{where}: label {y.max()} at index {int(y.argmax())}; it is too large")
    if kind != "f":
        raise DataError(f"{where}: labels of type {y.dtype}; whole numbers {'and texts ' if texts else ''}are allowed")
    bad = np.flatnonzero(~np.isfinite(y) | (y != np.floor(y)))
    if bad.size:
        first: Any = y[bad[0]]
        raise DataError(f"{where}: label {first} at index {bad[0]}; whole numbers are allowed")
    most = min(2.0 ** (np.finfo(y.dtype).nmant + 1), 2.0**53)
    large = np.flatnonzero(np.abs(y) >= most)
    if large.size:
        raise DataError(
            f"{where}: label {y[large[0]]} at index {large[0]}; {y.dtype} cannot tell whole numbers apart from "
            f"{most:.0f} on: store labels as whole numbers or texts"
        )
    return y.astype(np.int64)


def joined_labels(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Join labels as :func:`as_labels` returns them; numbers beside texts become texts."""
    if len({part.dtype.kind for part in parts}) > 1:
        parts = [part.astype(str) for part in parts]
    return np.concatenate(parts)


def _as_names(y: np.ndarray, where: str) -> np.ndarray:
    values, places = np.unique(y, return_inverse=True)
    names = []
    for value in values.tolist():
        try:
            names.append(label_name(value.decode() if isinstance(value, bytes) else value))
        except UnicodeError as error:
            raise DataError(f"{where}: label {value!r:.60} is not UTF-8 ({error})") from error
    if "" in names:
        first = int(np.flatnonzero(places.reshape(-1) == names.index(""))[0])
        raise DataError(f"{where}: the label at index {first} is empty; numbers and texts are allowed")
    return np.array(names, str)[places.reshape(-1)] if names else y.astype(str)


def numbered(values: np.ndarray) -> np.ndarray:
    """Return for each value the place of it among the distinct values, sorted; int64."""
    return np.unique(values, return_inverse=True)[1].reshape(-1).astype(np.int64)


def check_lengths(where: str, **lengths: int) -> None:
    """Raise :class:`DataError` unless all lengths are one and the same and not 0."""
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{name}: {length}" for name, length in lengths.items())
        raise DataError(f"{where}: arrays of unequal length ({listed}); each sample needs one entry in each")
    if not all(lengths.values()):
        raise DataError(f"{where}: no samples; at least one is needed")


def check_shape(shape: tuple[int, ...], where: str) -> None:
    """Raise :class:`DataError` for an array ``(N, ...)`` whose samples hold nothing."""
    if 0 in shape[1:]:
        raise DataError(f"{where}: samples of shape {shape[1:]}; at least one number in each is needed")


def as_features(x: np.ndarray, where: str, columns: Sequence[str] = ()) -> tuple[np.ndarray, list[str]]:
    """Return ``(N, F)`` numbers of any type as float32 where that changes none, else as float64; and what to note.

    A whole number beyond 2**53 is rounded to the next one that float64 has; it is noted where that moves it
    by more than a thousandth of its feature's range.

    Parameters
    ----------
    x : np.ndarray
        ``(N, F)`` whole or floating-point numbers.
    where : str
        File, for the message of an error.
    columns : sequence of str
        Names of the features, for what is noted.

    Raises
    ------
    DataError
        If one is NaN or infinite, or beyond the range of float32, with its index.
    """
    result = x.astype(np.float32 if np.can_cast(x.dtype, np.float32) else np.float64, copy=False)
    if x.size and not (result.max() <= FLOAT32.max and result.min() >= -FLOAT32.max):
        raise _out_of_range(x, np.argwhere(~(np.abs(result) <= FLOAT32.max)), where)
    notes = precision_notes(x, np.float64, columns)
    if result.dtype == np.float64 and all(_same(result[part], np.float32) for part in _rows(result)):
        result = result.astype(np.float32)
    return result, notes


def precision_notes(x: np.ndarray, kind: npt.DTypeLike, columns: Sequence[str] = ()) -> list[str]:
    """Return a note if a type of floats cannot tell values of ``(N, F)`` features apart."""
    if np.can_cast(x.dtype, kind) and x.dtype.kind not in "iu":
        return []
    coarse = []
    for first, block in _columns(x):
        high, low = block.max(0).astype(np.longdouble), block.min(0).astype(np.longdouble)
        step = np.spacing(np.maximum(np.abs(high), np.abs(low)).astype(kind)).astype(np.longdouble)
        for place in np.flatnonzero(step > LOST * (high - low)):
            values = block[:, place].astype(np.longdouble)
            if np.abs(values - values.astype(kind)).max() > LOST * (high - low)[place]:
                coarse.append(first + int(place))
    if not coarse:
        return []
    names = ", ".join(str(columns[place] if columns else place) for place in coarse[:5])
    more = f" and {len(coarse) - 5} more" if len(coarse) > 5 else ""
    return [
        f"{np.dtype(kind)} cannot tell values of these features apart: {names}{more}; subtract what all of them share"
    ]


def moments(x: np.ndarray, rows: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Return the mean of each feature and the sum of its squared deviations from it, float64 ``(F,)`` each.

    Those of a constant feature are exactly its value and 0.

    Parameters
    ----------
    x : np.ndarray
        ``(N, F)`` features.
    rows : np.ndarray or None
        Indices of the samples that count; ``None``: all.
    """
    mean, squares = np.empty(x.shape[1]), np.empty(x.shape[1])
    for first, columns in _columns(x):
        block = (columns if rows is None else columns[rows]).astype(np.float64)
        constant = block.max(0) == block.min(0)
        centre = np.where(constant, block[0], block.mean(0))
        mean[first : first + block.shape[1]] = centre
        squares[first : first + block.shape[1]] = np.where(constant, 0.0, ((block - centre) ** 2).sum(0))
    return mean, squares


def deviation(mean: np.ndarray, variance: np.ndarray) -> np.ndarray:
    """Return the standard deviation of each feature; 1 for what differs from a constant in the last bits alone."""
    std = np.sqrt(variance)
    return np.where(std <= ROUNDING * np.abs(mean), 1.0, std)


@dataclass(frozen=True)
class Part:
    """What is told of one of several arrays of samples that belong together.

    Attributes
    ----------
    name : str
        Of the array or its file.
    dtype : np.dtype
        Type of its numbers.
    low, high : float
        Smallest and largest of them.
    fractions : bool
        Whether one is no whole number.
    """

    name: str
    dtype: np.dtype[Any]
    low: float
    high: float
    fractions: bool

    @classmethod
    def of(cls, name: str, dtype: np.dtype[Any], x: np.ndarray) -> "Part":
        """Describe an array that holds at least one number; ``dtype`` is the type that it is stored in."""
        fractions = dtype.kind == "f" and any(bool((x[rows] % 1 != 0).any()) for rows in _rows(x))
        return cls(name, dtype, x.min().item(), x.max().item(), fractions)

    @property
    def whole(self) -> bool:
        """Whether it is of a type of whole numbers."""
        return self.dtype.kind in "biu"

    @property
    def scale(self) -> float:
        """The largest magnitude."""
        return max(abs(self.low), abs(self.high))

    def __str__(self) -> str:
        kind = "whole numbers" if self.whole else "floating-point numbers"
        return f"{self.name} holds {kind} ({self.dtype}) from {self.low:.6g} to {self.high:.6g}"


def check_alike(where: str, parts: Sequence[Part], *, pixels: bool, strict: bool = False) -> None:
    """Raise :class:`DataError` unless arrays hold numbers of one kind, and pixels of one scale.

    Parameters
    ----------
    where : str
        File or directory, for the message.
    parts : sequence of Part
        Arrays that are to be pooled.
    pixels : bool
        Whether they are images: 0 to 255 beside 0 to 1 is refused then also where both are of one type.
    strict : bool
        Whether features of a type of floats are refused beside whole numbers even if they are whole.
    """
    by_kind = {part.whole: part for part in reversed(parts)}
    mixed = len(by_kind) > 1
    small = [part for part in parts if 0 < part.scale <= 1]
    large = [part for part in parts if part.scale >= 16]
    if mixed and (pixels or strict or any(part.fractions for part in parts)):
        pair = sorted(by_kind.values(), key=parts.index)
    elif (mixed or pixels) and small and large:
        pair = sorted((small[0], large[0]), key=parts.index)
    else:
        return
    raise DataError(f"{where}: {pair[0]}, {pair[1]}; both must be of one kind and scale")


def as_float32(x: np.ndarray, where: str) -> np.ndarray:
    """Return numbers as float32.

    Raises
    ------
    DataError
        If one is NaN or infinite or too large, with its index.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        result = x.astype(np.float32, copy=False)
        if np.isfinite(result.sum(dtype=np.float64)):
            return result  # one NaN or infinity would make the sum one
    bad = np.argwhere(~np.isfinite(result))
    if len(bad):
        raise _out_of_range(x, bad, where)
    return result


def _out_of_range(x: np.ndarray, bad: np.ndarray, where: str) -> DataError:
    position = tuple(bad[0].tolist())
    return DataError(
        f"{where}: {x[position]} at index {position}; only finite numbers are allowed, in the range of float32"
    )


def _columns(x: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Yield blocks of columns, each with the number of its first."""
    width = max(1, BLOCK // max(1, len(x)))
    for first in range(0, x.shape[1], width):
        yield first, x[:, first : first + width]


def _rows(x: np.ndarray) -> Iterator[slice]:
    """Yield blocks of rows; the first are few, which mostly tells already."""
    yield slice(0, 64)
    height = max(1, BLOCK // max(1, x[:1].size))
    for first in range(64, len(x), height):
        yield slice(first, first + height)


def _same(x: np.ndarray, kind: npt.DTypeLike) -> bool:
    return bool((x.astype(kind) == x).all())
