"""Data of people's own by a function: ``dataset="file:function"``."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from posy.data.dataset import Content
from posy.data.errors import DataError
from posy.data.image import as_images
from posy.data.labels import as_labels, numbered_groups
from posy.data.values import as_features, check_lengths, check_shape, precision_notes
from posy.extensions import load, said

PARTS = ("x", "y", "groups", "test")
"""What the mapping may hold that a function returns."""


def read_function(name: str) -> Content:
    """Return what a function without arguments returns: ``(x, y)``, or a mapping of :data:`PARTS`.

    ``x`` are images, ``(N, H, W)``, ``(N, H, W, C)`` or ``(N, C, H, W)``, whole numbers from 0 to 255 or floats;
    features ``(N, F)``; or N texts. ``y`` ``(N,)`` are numbers or names of classes, ``groups`` ``(N,)`` natural groups,
    and ``test`` ``(N,)`` is true for the samples of the data's own test set. Tensors are taken as arrays are.

    Raises
    ------
    SettingsError
        If there is no such function.
    DataError
        If it raises an exception, or returns something else.
    """
    what, function = f"dataset = {name!r}", load(name, "dataset")
    if not callable(function):
        raise DataError(f"{what}: it is no function, but {type(function).__name__}")
    try:
        found = function()
    except Exception as error:  # whatever the code of somebody else may raise
        raise DataError(f"{what}: it has raised {said(error)}") from error
    if isinstance(found, tuple) and len(found) == 2:
        found = dict(zip(PARTS, found, strict=False))
    if not isinstance(found, Mapping) or not {"x", "y"} <= found.keys() <= set(PARTS):
        told = f"a mapping of {', '.join(map(str, found))}" if isinstance(found, Mapping) else type(found).__name__
        raise DataError(f"{what}: it returns {told}; it must return (x, y), or a mapping of {', '.join(PARTS)}")
    parts = {key: _array(value, f"{what}: {key}") for key, value in found.items() if value is not None}
    return content_of(parts, what, Path(name))


def content_of(parts: Mapping[str, np.ndarray], what: str, path: Path) -> Content:
    """Return the content that arrays are, by their names in :data:`PARTS`; ``what`` is for messages.

    Raises
    ------
    DataError
        As :func:`read_function` does.
    """
    check_lengths(what, **{key: len(value) for key, value in parts.items()})
    x, test = parts["x"], parts.get("test")
    if test is not None and (test.dtype != bool or test.ndim != 1):
        raise DataError(f"{what}: test must be true or false for each sample, not {test.dtype} of shape {test.shape}")
    groups, group_names = None, tuple[str, ...]()
    if "groups" in parts:
        groups, group_names = numbered_groups(as_labels(parts["groups"], f"{what}: groups"))
    labels = as_labels(parts["y"], f"{what}: y")
    notes: list[str] = []
    if x.ndim == 1 and x.dtype.kind == "U":
        kind, samples = "text", x.tolist()
    elif x.dtype.kind not in "biuf" or x.ndim not in (2, 3, 4):
        raise DataError(
            f"{what}: x of shape {x.shape} and type {x.dtype}; allowed are texts, and numbers in 2 to 4 axes"
        )
    else:
        check_shape(x.shape, what)
        if x.ndim == 2:
            kind, (samples, notes) = "features", as_features(x, f"{what}: x")
        else:
            samples = as_images(x, f"{what}: x")
            kind = "image" if samples.dtype == np.uint8 else "image-float"
            notes = precision_notes(x.reshape(-1, 1), np.float32, ("pixels",)) if kind == "image-float" else []
    return Content(path, kind, samples, labels, groups, test, group_names=group_names, read_notes=tuple(notes))


def _array(value: Any, what: str) -> np.ndarray:
    try:
        return np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:
        shapes = list(dict.fromkeys(tuple(part.shape) for part in value if hasattr(part, "shape")))
        if len(shapes) > 1:
            raise DataError(f"{what}: arrays of shape {shapes[0]} and {shapes[1]}; all must be alike") from error
        raise DataError(f"{what} is not like an array ({said(error)})") from error
