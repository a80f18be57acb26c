"""Interpret an array of numbers as samples: features, time series or images."""

import numpy as np

from posy.data.errors import DataError, Note
from posy.data.readers.image import as_images
from posy.data.values import as_features, precision_notes


def samples_of(x: np.ndarray, kind: str, where: str) -> tuple[str, np.ndarray, list[str]]:
    """Return the kind of the samples in an array of numbers, the samples as in ``Content``, and notes.

    Parameters
    ----------
    x : numpy.ndarray
        Features ``(N, F)``, time series ``(N, T, F)``, or images that :func:`as_images` accepts.
    kind : str
        The setting ``sample-kind``, which selects time series or images. With ``auto``, an array with three axes
        contains time series if T and F differ and its numbers are not pixels. Whole numbers from 0 to 255, and
        floating-point numbers from 0 to 1, count as pixels.
    where : str
        Source of the data, for messages.

    Raises
    ------
    DataError
        If the array cannot be used.
    """
    if x.dtype.kind not in "biuf" or x.ndim not in (2, 3, 4):
        raise DataError(f"{where}: x of shape {x.shape} and type {x.dtype}; allowed: numbers in 2, 3 or 4 axes")
    notes: list[str] = []
    if kind == "auto" and _is_series(x):
        kind = "series"
        text = f"arrays of shape {x.shape[1]}x{x.shape[2]} count as time series (steps x channels)"
        notes.append(Note(f"{text}; if they are grey images, set sample-kind = image-float"))
    if x.ndim == 2:
        samples, precision = as_features(x, where)
        return "features", samples, precision
    if kind == "series" and x.ndim == 3:
        flat, precision = as_features(x.reshape(len(x), -1), where)
        return kind, flat.reshape(x.shape), [*notes, *precision]
    samples = as_images(x, where)
    image_kind = "image" if samples.dtype == np.uint8 else "image-float"
    if image_kind == "image-float":
        notes += precision_notes(x.reshape(-1, 1), np.float32, ("pixels",))
    return image_kind, samples, notes


def _is_series(x: np.ndarray) -> bool:
    """Return whether numbers ``(N, T, F)`` are time series rather than grey images."""
    if x.ndim != 3 or x.shape[1] == x.shape[2] or not x.size:
        return False
    low, high = x.min(), x.max()
    return bool(low < 0 or high > (255 if x.dtype.kind in "iu" else 1))
