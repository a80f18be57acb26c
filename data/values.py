"""Checks on the numbers in samples: their range, their precision, and whether arrays can be pooled."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from posy.data.errors import DataError, Note

FLOAT32_MAX = float(np.finfo(np.float32).max)
LOST = 1e-3
"""Fraction of a feature's range by which rounding may move a value without a warning."""
_BLOCK = 1 << 22  # numbers copied at once while an array is scanned
_ROUNDING = 4 * float(np.finfo(np.float64).eps)  # a feature counts as constant if std/mean is at most this value


def check_lengths(where: str, **lengths: int) -> None:
    """Raise :class:`DataError` unless all lengths are equal and positive."""
    if len(set(lengths.values())) > 1:
        counts = ", ".join(f"{name}: {length}" for name, length in lengths.items())
        raise DataError(f"{where}: arrays of unequal length ({counts}); each sample needs one entry in each array")
    if not all(lengths.values()):
        raise DataError(f"{where}: no samples; at least one is needed")


def check_shape(shape: tuple[int, ...], where: str) -> None:
    """Raise :class:`DataError` if the samples of an array ``(N, ...)`` are empty."""
    if 0 in shape[1:]:
        raise DataError(f"{where}: samples of shape {shape[1:]}; each sample needs at least one number")


def check_alike(
    where: str, parts: Mapping[str, tuple[np.dtype[Any], np.ndarray]], *, pixels: bool, strict: bool = False
) -> None:
    """Raise :class:`DataError` unless arrays to be pooled have the same kind of numbers and scale of pixels.

    ``parts`` maps names to arrays, each with its stored type. ``pixels`` rejects a mix of the scales 0 to 255 and
    0 to 1, even within one type. ``strict`` rejects a mix of floats and integers, even if all floats are whole numbers.
    """
    texts, integral, scales = [], [], []
    for name, (dtype, x) in parts.items():
        low, high = x.min().item(), x.max().item()
        integral.append(dtype.kind in "biu")
        scales.append(max(abs(low), abs(high)))
        kind = "whole numbers" if integral[-1] else "floating-point numbers"
        texts.append(f"{name} holds {kind} ({dtype}) from {low:.6g} to {high:.6g}")
    mixed = len(set(integral)) > 1
    if mixed and (pixels or strict or any(_has_fractions(x) for dtype, x in parts.values() if dtype.kind == "f")):
        pair = integral.index(True), integral.index(False)
    else:
        small = [index for index, scale in enumerate(scales) if 0 < scale <= 1]
        large = [index for index, scale in enumerate(scales) if scale >= 16]
        if not ((mixed or pixels) and small and large):
            return
        pair = small[0], large[0]
    raise DataError(f"{where}: {texts[min(pair)]}, {texts[max(pair)]}; both must have the same kind and scale")


def as_float32(x: np.ndarray, where: str) -> np.ndarray:
    """Return numbers as float32, or raise :class:`DataError` with the index of a NaN, an infinity or an overflow."""
    with np.errstate(over="ignore", invalid="ignore"):
        result = x.astype(np.float32, copy=False)
        if not np.isfinite(result.sum(dtype=np.float64)):  # a NaN or infinity propagates to the sum
            _check_range(x, np.isfinite(result), where)
    return result


def as_features(x: np.ndarray, where: str) -> tuple[np.ndarray, list[str]]:
    """Return ``(N, F)`` numbers and warnings. The numbers are float32 if this changes no value, else float64.

    A whole number beyond 2**53 is rounded to the nearest float64. A warning names features for which rounding moves a
    value by more than a thousandth of the feature's range.

    Raises
    ------
    DataError
        If a number is NaN, infinite or beyond the range of float32. The message contains its index.
    """
    result = x.astype(np.float32 if np.can_cast(x.dtype, np.float32) else np.float64, copy=False)
    if x.size and not (result.max() <= FLOAT32_MAX and result.min() >= -FLOAT32_MAX):
        _check_range(x, np.abs(result) <= FLOAT32_MAX, where)
    notes = precision_notes(x, np.float64)
    if result.dtype == np.float64 and all((block.astype(np.float32) == block).all() for block in _rows(result)):
        result = result.astype(np.float32)
    return result, notes


def precision_notes(x: np.ndarray, kind: npt.DTypeLike, names: Sequence[str] = ()) -> list[str]:
    """Return a warning if a floating-point type cannot distinguish some values of ``(N, F)`` features."""
    if np.can_cast(x.dtype, kind) and x.dtype.kind not in "iu":
        return []
    coarse = []
    for first, block in _columns(x):
        high, low = block.max(0).astype(np.longdouble), block.min(0).astype(np.longdouble)
        step = np.spacing(np.maximum(np.abs(high), np.abs(low)).astype(kind)).astype(np.longdouble)
        for column in np.flatnonzero(step > LOST * (high - low)):
            values = block[:, column].astype(np.longdouble)
            if np.abs(values - values.astype(kind)).max() > LOST * (high - low)[column]:
                coarse.append(first + int(column))
    if not coarse:
        return []
    shown = ", ".join(str(names[column] if names else column) for column in coarse[:5])
    more = f" and {len(coarse) - 5} more" if len(coarse) > 5 else ""
    text = f"{np.dtype(kind)} cannot distinguish some values of these features: {shown}{more}; subtract a common offset"
    return [Note(text)]


def moments(x: np.ndarray, rows: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Return the mean and the sum of squared deviations of each feature in ``(N, F)``, float64 ``(F,)`` each.

    For a constant feature, they are exactly its value and 0. ``rows`` selects the samples; with ``None``, all are used.
    """
    mean, squares = np.empty(x.shape[1]), np.empty(x.shape[1])
    for first, columns in _columns(x):
        block = (columns if rows is None else columns[rows]).astype(np.float64)
        constant = block.max(0) == block.min(0)
        centre = np.where(constant, block[0], block.mean(0))
        mean[first : first + block.shape[1]] = centre
        squares[first : first + block.shape[1]] = np.where(constant, 0.0, ((block - centre) ** 2).sum(0))
    return mean, squares


def channel_moments(x: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the results of :func:`moments` for some rows of features ``(N, F)`` or of time series ``(N, T, F)``.

    The sum of a channel's squared deviations is divided by T, so that sums over samples have the same meaning for both.
    """
    if x.ndim == 2:
        return moments(x, rows)
    mean, squares = moments(x[rows].reshape(-1, x.shape[2]))
    return mean, squares / x.shape[1]


def deviation(mean: np.ndarray, variance: np.ndarray) -> np.ndarray:
    """Return the standard deviation of each feature, or 1 if the feature is constant up to rounding."""
    std = np.sqrt(variance)
    return np.where(std <= _ROUNDING * np.abs(mean), 1.0, std)


def check_scaled(x: np.ndarray, mean: np.ndarray, std: np.ndarray, where: str, names: Sequence[str] = ()) -> None:
    """Raise :class:`DataError` if standardised ``(N, F)`` or ``(N, T, F)`` samples exceed the range of float32."""
    axes = tuple(range(x.ndim - 1))
    check_reach(x.min(axes), x.max(axes), mean, std, where, names, ("exceeds", "remove its extreme values"))


def check_reach(
    low: np.ndarray,
    high: np.ndarray,
    mean: np.ndarray,
    std: np.ndarray,
    where: str,
    names: Sequence[str],
    words: tuple[str, str],
) -> None:
    """Raise :class:`DataError` if a feature's bounds ``(F,)`` exceed the range of float32 when standardised.

    ``words`` contains the verb and the advice for the message.
    """
    with np.errstate(over="ignore"):
        reach = np.maximum(np.abs((low - mean) / std), np.abs((high - mean) / std))
    columns = np.flatnonzero(~(reach <= FLOAT32_MAX))
    if columns.size:
        column, (verb, advice) = int(columns[0]), words
        name = str(names[column] if names else column)
        raise DataError(
            f"{where}: feature {name} {verb} the range of float32 after standardisation (mean {mean[column]}, standard "
            f"deviation {std[column]}); {advice}",
            "extreme-value",
            name,
        )


def _check_range(x: np.ndarray, allowed: np.ndarray, where: str) -> None:
    """Raise :class:`DataError` for the first number that is not allowed."""
    if not allowed.all():
        position = tuple(np.argwhere(~allowed)[0].tolist())
        raise DataError(
            f"{where}: {x[position]} at index {position}; only finite float32 numbers are allowed",
            "not-a-number",
        )


def _has_fractions(x: np.ndarray) -> bool:
    return any(bool((block % 1 != 0).any()) for block in _rows(x))


def _columns(x: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Yield blocks of columns, each preceded by the index of its first column."""
    width = max(1, _BLOCK // max(1, len(x)))
    for first in range(0, x.shape[1], width):
        yield first, x[:, first : first + width]


def _rows(x: np.ndarray) -> Iterator[np.ndarray]:
    """Yield blocks of rows. The first block is small, because it usually decides the result."""
    yield x[:64]
    height = max(1, _BLOCK // max(1, x[:1].size))
    for first in range(64, len(x), height):
        yield x[first : first + height]
