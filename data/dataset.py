"""A data set in memory, and the checks that every loader shares."""

from collections.abc import Sequence
from dataclasses import dataclass
from logging import WARNING
from typing import Any

import numpy as np
from flwr.common.logger import log

from data.errors import DataError
from data.task import Task

Indices = tuple[tuple[np.ndarray, np.ndarray], ...]


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
        ``(N, H, W, C)`` images, uint8 or, already scaled, float32; ``(N, F)`` float32 features; or
        ``(N, L)`` int64 tokens.
    y : np.ndarray
        ``(N,)`` int64 labels 0..C-1.
    mean, std : np.ndarray
        float32, what is subtracted and divided by: per channel of pixels/255 for uint8 images, per
        feature for features; 0 and 1 for values that are taken as they are.
    groups : np.ndarray or None
        ``(N,)`` int64 natural group of each sample: writer, user, medical centre.
    given : tuple or None
        (train, test) indices of each client, when the data comes already partitioned.
    """

    name: str
    task: Task
    x: np.ndarray
    y: np.ndarray
    mean: np.ndarray
    std: np.ndarray
    groups: np.ndarray | None = None
    given: Indices | None = None

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
        ``(N,)`` or ``(N, 1)`` whole numbers or texts.
    groups : np.ndarray or None
        As in :class:`Dataset`.
    is_test : np.ndarray or None
        ``(N,)`` bool, the samples of the data's own test set, if it has one.
    given : tuple or None
        As in :class:`Dataset`.
    num_classes : int
        Number of classes C where the data tells it, the labels then being 0..C-1; else 0.
    """

    kind: str
    x: Any
    labels: np.ndarray
    groups: np.ndarray | None = None
    is_test: np.ndarray | None = None
    given: Indices | None = None
    num_classes: int = 0


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
    """Build a data set of ``(N, F)`` float32 features; a constant feature is only centred."""
    width = x.shape[1]
    mean, std = np.zeros(width, np.float32), np.ones(width, np.float32)
    if standardise:
        mean, std = x.mean(0, np.float64).astype(np.float32), x.std(0, np.float64).astype(np.float32)
        std[std < 1e-12] = 1.0
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
    whole = checked_labels(np.asarray(y).reshape(-1), where, texts=False)
    bad = np.flatnonzero((whole < 0) | (whole >= num_classes))
    if bad.size:
        raise DataError(f"{where}: label {whole[bad[0]]} at index {bad[0]}; allowed are 0 to {num_classes - 1}")
    return whole


def mapped_labels(y: np.ndarray, where: str, is_test: np.ndarray | None = None) -> tuple[np.ndarray, tuple[str, ...]]:
    """Map the distinct labels of a user's data, sorted, to 0..C-1.

    A warning is logged of what may be a mistake: negative labels, and labels of the test set alone.

    Parameters
    ----------
    y : np.ndarray
        ``(N,)`` or ``(N, 1)`` whole numbers or texts.
    where : str
        File, for the message of an error.
    is_test : np.ndarray or None
        As in :class:`Content`.

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
    if np.asarray(y).dtype.kind != "U" and (below := [name for name in names if int(name) < 0]):
        log(WARNING, "%s: negative labels are classes of their own: %s", where, ", ".join(below))
    if is_test is not None and (unseen := np.setdiff1d(labels[is_test], labels[~is_test])).size:
        log(WARNING, "%s: classes of the test set alone: %s", where, ", ".join(names[label] for label in unseen))
    return labels, names


def distinct_labels(y: np.ndarray, where: str) -> tuple[np.ndarray, tuple[str, ...]]:
    """Do as :func:`mapped_labels`, also where all labels are the same."""
    y = np.asarray(y)
    if y.ndim > 1 and y.size == len(y):
        y = y.reshape(-1)
    if y.ndim != 1:
        raise DataError(f"{where}: labels of shape {y.shape}; one label for each sample is allowed, (N,)")
    values, labels = np.unique(checked_labels(y, where), return_inverse=True)
    return labels.astype(np.int64), tuple(str(value) for value in values)


def checked_labels(y: np.ndarray, where: str, *, texts: bool = True) -> np.ndarray:
    """Return ``(N,)`` labels as int64, or as they are if they are texts; others are a :class:`DataError`."""
    kind = y.dtype.kind
    if kind == "U" and texts:
        return y
    if kind in "iub":
        return y.astype(np.int64)
    if kind != "f":
        raise DataError(f"{where}: labels of type {y.dtype}; whole numbers are allowed")
    bad = np.flatnonzero(~np.isfinite(y) | (y != np.floor(y)))
    if bad.size:
        first: Any = y[bad[0]]
        raise DataError(f"{where}: label {first} at index {bad[0]}; whole numbers are allowed")
    return y.astype(np.int64)


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
        position = tuple(bad[0].tolist())
        raise DataError(
            f"{where}: {x[position]} at index {position}; only finite numbers are allowed, in the range of float32"
        )
    return result
