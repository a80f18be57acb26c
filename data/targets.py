"""Read the labels of multi-label data and the values of regression data."""

from collections.abc import Sequence

import numpy as np

from posy.data.errors import DataError
from posy.data.task import TITLES
from posy.data.values import FLOAT32_MAX, deviation, moments
from posy.metrics import LABELS


def as_targets(y: np.ndarray, target: str, where: str, names: Sequence[str] = ()) -> tuple[np.ndarray, tuple[str, ...]]:
    """Return the targets of N samples, ``(N, K)``, and the names of the K labels or values.

    Parameters
    ----------
    y : numpy.ndarray
        Numbers ``(N, K)``, or ``(N,)`` for K = 1. Labels are 0 or 1, or false or true.
    target : str
        ``LABELS`` or ``VALUES`` in :mod:`posy.metrics`.
    where : str
        Source of the data, for messages.
    names : sequence of str
        Names of the K labels or values; by default, they are numbered from 0.

    Returns
    -------
    numpy.ndarray
        int64 labels, or float64 values.

    Raises
    ------
    DataError
        If the array has another shape or type, a number is not finite or exceeds the range of float32, or a label is
        neither 0 nor 1.
    """
    y, kind = np.asarray(y), "label" if target == LABELS else "value"
    y = y[:, None] if y.ndim == 1 else y
    if y.ndim != 2 or not y.shape[1] or y.dtype.kind not in "biuf":
        raise DataError(
            f"{where}: targets of shape {y.shape[:1] if y.ndim == 1 else y.shape} and type {y.dtype}; task = "
            f"{TITLES[target]} needs numbers (N, K), or (N,) for one {kind}",
            "wrong-target",
        )
    columns = tuple(names) or ((kind,) if y.shape[1] == 1 else tuple(f"{kind} {k}" for k in range(y.shape[1])))
    with np.errstate(invalid="ignore"):
        allowed = (y == 0) | (y == 1) if target == LABELS else np.abs(y.astype(np.float64)) <= FLOAT32_MAX
    if not allowed.all():
        row, column = np.argwhere(~allowed)[0].tolist()
        rule = "a label must be 0 or 1" if target == LABELS else "a value must be a finite float32 number"
        raise DataError(
            f"{where}: the {kind} of sample {row}, {columns[column]}, is {y[row, column]}; {rule}",
            "wrong-target",
            columns[column],
        )
    return y.astype(np.int64 if target == LABELS else np.float64), columns


def value_scale(y: np.ndarray, rows: np.ndarray) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the mean and the standard deviation of each value ``(N, K)`` over some rows, with 1 for a constant."""
    mean, squares = moments(y, rows)
    return tuple(mean.tolist()), tuple(deviation(mean, squares / len(rows)).tolist())


def target_notes(y: np.ndarray, names: Sequence[str]) -> list[str]:
    """Return a note for each label or value ``(N, K)`` that is the same for all samples."""
    return [
        f"{name} is the same for all samples"
        for name, spread in zip(names, np.ptp(y, axis=0), strict=True)
        if not spread
    ]
