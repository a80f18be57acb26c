"""Custom data from a function: ``dataset="file:function"``."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from posy.data.columns import Columns
from posy.data.dataset import Content
from posy.data.errors import DataError
from posy.data.labels import as_labels, numbered_groups
from posy.data.readers.samples import samples_of
from posy.data.targets import as_targets
from posy.data.values import check_lengths, check_shape
from posy.extensions import format_error, load
from posy.metrics import CLASSES

PATIENTS = "patients"
PARTS = ("x", "y", "groups", PATIENTS, "test")
"""Keys of the mapping that a function may return."""


def read_function(name: str, columns: Columns = Columns()) -> Content:  # noqa: B008 - immutable
    """Call a user's function without arguments, and return its data.

    The function must return ``(x, y)``, or a mapping with keys from :data:`PARTS`. ``x`` contains images,
    ``(N, H, W)``, ``(N, H, W, C)`` or ``(N, C, H, W)``, as whole numbers from 0 to 255 or as floats; features
    ``(N, F)``; time series ``(N, T, F)``; or N texts. ``y`` contains class numbers or names ``(N,)``, or labels or
    values ``(N, K)``. ``groups`` contains the natural groups ``(N,)``. The rows of a client with the same value in
    ``patients`` ``(N,)`` are in the same split. ``test`` ``(N,)`` is true for samples in the supplied test set. Tensors
    are converted to arrays.

    Raises
    ------
    SettingsError
        If the function does not exist.
    DataError
        If the function raises an exception, or its result cannot be used.
    """
    source, function = f"dataset = {name!r}", load(name, "dataset")
    if not callable(function):
        raise DataError(f"{source}: it is not a function, but {type(function).__name__}")
    try:
        content = function()
    except Exception as error:  # custom code may raise any exception
        raise DataError(f"{source}: the function raised {format_error(error)}") from error
    if isinstance(content, tuple) and len(content) == 2:
        content = dict(zip(("x", "y"), content, strict=True))
    if not isinstance(content, Mapping) or not {"x", "y"} <= content.keys() <= set(PARTS):
        returned = (
            f"a mapping of {', '.join(map(str, content))}" if isinstance(content, Mapping) else type(content).__name__
        )
        raise DataError(f"{source}: it returns {returned}; it must return (x, y), or a mapping of {', '.join(PARTS)}")
    parts = {key: _array(value, f"{source}: {key}") for key, value in content.items() if value is not None}
    return content_of(parts, source, Path(name), columns)


def content_of(
    parts: Mapping[str, np.ndarray],
    source: str,
    path: Path,
    columns: Columns = Columns(),  # noqa: B008 - immutable
    names: Sequence[str] = (),
) -> Content:
    """Build the content from arrays keyed by :data:`PARTS`; ``source`` names their origin in error messages.

    ``columns`` determines the target and the kind of the samples, and ``names`` are the names of the labels or values.

    Raises
    ------
    DataError
        If the arrays cannot be used.
    """
    check_lengths(source, **{key: len(value) for key, value in parts.items()})
    x, test = parts["x"], parts.get("test")
    if test is not None and (test.dtype != bool or test.ndim != 1):
        raise DataError(f"{source}: test must be true or false for each sample, not {test.dtype} of shape {test.shape}")
    groups, group_names = None, tuple[str, ...]()
    if "groups" in parts:
        groups, group_names = numbered_groups(as_labels(parts["groups"], f"{source}: groups", role="group"))
    patients = None
    if "patients" in parts:
        patients, _ = numbered_groups(as_labels(parts["patients"], f"{source}: patients", role="patient"))
    y, class_names = targets_of(parts["y"], columns, f"{source}: y", names)
    notes: list[str] = []
    if x.ndim == 1 and x.dtype.kind == "U":
        kind, samples = "text", x.tolist()
    elif x.dtype.kind not in "biuf" or x.ndim not in (2, 3, 4):
        raise DataError(
            f"{source}: x of shape {x.shape} and type {x.dtype}; allowed: texts, and numbers in 2 to 4 axes"
        )
    else:
        check_shape(x.shape, source)
        kind, samples, notes = samples_of(x, columns.kind, f"{source}: x")
    attributes: dict[str, Any] = {"class_names": class_names, "target": columns.target, "split_groups": patients}
    attributes |= {"group_names": group_names, "read_notes": tuple(notes)}
    return Content(path, kind, samples, y, groups, test, **attributes)


def targets_of(
    y: np.ndarray, columns: Columns, where: str, names: Sequence[str] = ()
) -> tuple[np.ndarray, tuple[str, ...]]:
    """Return the classes ``(N,)`` of an array, or its labels or values ``(N, K)`` and their names."""
    if columns.target == CLASSES:
        return as_labels(y, where), ()
    return as_targets(y, columns.target, where, names)


def _array(value: Any, name: str) -> np.ndarray:
    try:
        return np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:
        shapes = list(dict.fromkeys(tuple(part.shape) for part in value if hasattr(part, "shape")))
        if len(shapes) > 1:
            raise DataError(
                f"{name}: arrays of shape {shapes[0]} and {shapes[1]}; all must have the same shape"
            ) from error
        raise DataError(f"{name} is not an array ({format_error(error)})") from error
