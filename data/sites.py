"""A site's data: read it, describe it, load it for the task of the run.

Every site reads its data against the run's settings and refuses what does not fit (see :mod:`posy.data.agreement`).
"""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np

from posy.data.agreement import (
    MAX_UNLIKE,
    MIN_SHOWN,
    MODES,
    UNLIKE_MEAN,
    Description,
    columns_in,
    difference,
    shape_in,
    statistics_in,
    task_of,
)
from posy.data.columns import Columns, names_in
from posy.data.dataset import Content, Dataset, bytes_of, make_dataset
from posy.data.errors import DataError
from posy.data.labels import renumbered
from posy.data.own import read_own
from posy.data.partitions import Partition, finished, split
from posy.data.settings import SITES, DataSettings
from posy.data.task import TASK_KINDS
from posy.data.text import MAX_LENGTH, hashed
from posy.data.transforms import shape_text
from posy.data.values import check_scaled, moments
from posy.paths import exists
from posy.randomness import numpy_generator


def read_site(path: Path, settings: DataSettings, skip_unreadable: bool = False) -> Content:
    """Read the data of a site; image files are brought to the shape that the settings give.

    Raises
    ------
    DataError
        If the path is not absolute, or the data cannot be used.
    """
    if not path.is_absolute():
        raise DataError(f"data = {str(path)!r} in the node config: it must be an absolute path")
    if not exists(path):
        raise DataError(f"{path}: this file or directory does not exist (data in the node config)")
    size, mode = None, None
    if settings.input_shape and settings.sample_kind == "image":
        channels, height, width = shape_in(settings, "image")
        size, mode = (width, height), MODES[channels]
    return read_own(path, size, mode, skip_unreadable, Columns.of(settings))


def describe_site(content: Content, settings: DataSettings, seed: int) -> Description:
    """Describe the data of a site, as far as the settings leave the task open; features by their training samples."""
    count, mean, squares = 1, np.empty(0), np.empty(0)
    if content.kind == "features" and not (settings.feature_mean and settings.feature_std):
        rows = _partition(content, settings, seed).train[0]
        count, (mean, squares) = len(rows), moments(content.x, rows)
    return Description(
        kind=content.kind,
        shape=_shape(content, settings),
        fixed=content.kind != "text" and not content.resized,
        classes=() if settings.classes else content.distinct[1],
        count=count,
        mean=mean,
        squares=squares,
        columns=content.columns,
        warnings=(*content.notes, *_idle_notes(content, settings)),
        skipped=len(content.unreadable),
    )


def load_site(content: Content, settings: DataSettings, seed: int) -> tuple[Dataset, Partition]:
    """Return the samples that a site trains on in the run, and a partition with this one client.

    The test samples are the supplied test set, unless ``test_set`` pools it; else ``test_fraction`` of the
    samples, drawn by the seed of the run. Columns are put into the order of the run.

    Raises
    ------
    DataError
        If the data does not fit the task: it says which file and why.
    SettingsError
        If the settings do not give a task.
    """
    task, kind, path = task_of(settings), settings.sample_kind, content.path
    check_suits(content, settings)
    x, scale = content.x, None
    if kind == "text":
        x = hashed(x, task.input_shape[0], task.vocabulary)
    elif kind == "tokens" and x.max() >= task.vocabulary:
        raise DataError(f"{path}: token {x.max()}; the run's vocabulary allows 0 to {task.vocabulary - 1}")
    elif kind == "features":
        x = _in_columns(content, settings)
        scale = statistics_in(settings, task.input_shape[0])
    y = _numbers_in_run(content, task.class_names)
    part = _partition(content, settings, seed)
    columns, notes = content.columns, (*content.notes, *_idle_notes(content, settings))
    if scale is not None:
        columns = columns_in(settings, task.input_shape[0]) or columns
        check_scaled(x, *scale, str(path), columns)
        notes = (*notes, *_far_notes(x, part.train[0], *scale, columns))
    about: dict[str, Any] = {"columns": columns, "notes": notes, "skipped": len(content.unreadable)}
    return make_dataset(SITES, kind, x, y, task.class_names, task.vocabulary, scale, **about), part


def _idle_notes(content: Content, settings: DataSettings) -> list[str]:
    """Return a note for each setting about test samples that has no effect at this site."""
    notes = []
    if settings.test_set == "pooled" and content.is_test is None:
        notes.append("test-set = 'pooled' has no effect at this site, whose data comes without a test set")
    tested = settings.test_set == "supplied" and content.is_test is not None
    if tested and settings.test_fraction != DataSettings.test_fraction:
        notes.append(
            f"test-fraction = {settings.test_fraction:g} has no effect at this site, whose data comes with a test set; "
            "test-set=pooled splits all its samples"
        )
    return notes


def _far_notes(
    x: np.ndarray, train: np.ndarray, mean: np.ndarray, std: np.ndarray, columns: tuple[str, ...]
) -> list[str]:
    """Return a note for each feature whose mean at this site is far from the mean of the run, as in other units."""
    far = np.abs(moments(x, train)[0] - mean) / std
    return [
        f"feature {columns[feature] if columns else feature}: the mean of this site is "
        + (f"{far[feature]:.2g} standard deviations" if len(train) >= MIN_SHOWN else "far")
        + " from the mean of the run; other units?"
        for feature in np.flatnonzero(far > UNLIKE_MEAN)[:MAX_UNLIKE]
    ]


def check_suits(content: Content, settings: DataSettings) -> None:
    """Raise :class:`DataError` if data is not of the kind and the shape that the settings give, as far as they do."""
    if settings.sample_kind not in ("auto", content.kind):
        raise DataError(
            f"{content.path}: holds samples of the kind {content.kind}; the run's sample-kind is {settings.sample_kind}"
        )
    if content.columns and settings.feature_names:
        names = names_in("feature-names", settings.feature_names)
        if unlike := difference(content.columns, names):
            raise DataError(f"{content.path}: its columns are not the run's feature-names ({unlike})")
    if not settings.input_shape:
        return
    shape, wanted = _shape(content, settings), shape_in(settings, content.kind)
    if shape != wanted:
        raise DataError(
            f"{content.path}: samples of shape {shape_text(shape)}; the run's input-shape is {shape_text(wanted)}"
        )


def fingerprint(dataset: Dataset, part: Partition) -> str:
    """Return 16 hexadecimal digits that change with any sample, any label, and the split of a site's data."""
    digest = hashlib.blake2b(digest_size=8)
    for array in (dataset.x, dataset.y, part.train[0], part.test[0], part.validation[0]):
        digest.update(f"{array.dtype} {array.shape}".encode())
        for block in bytes_of(array):
            digest.update(block)
    return digest.hexdigest()


def _shape(content: Content, settings: DataSettings) -> tuple[int, ...]:
    if content.kind == "text":
        return shape_in(settings, "text") if settings.input_shape else (MAX_LENGTH,)
    shape = content.x.shape[1:]
    return (shape[2], *shape[:2]) if TASK_KINDS[content.kind] == "image" else shape


def _partition(content: Content, settings: DataSettings, seed: int) -> Partition:
    rng = numpy_generator(seed, "site")
    if content.is_test is None or settings.test_set == "pooled":
        pairs = split([np.arange(len(content.labels))], settings.test_fraction, rng)
    else:
        pairs = ((np.flatnonzero(~content.is_test), np.flatnonzero(content.is_test)),)
    if not len(pairs[0][0]):
        raise DataError(f"{content.path}: all samples belong to the test set; at least one is needed for training")
    return finished(pairs, settings, rng)


def _numbers_in_run(content: Content, names: tuple[str, ...]) -> np.ndarray:
    """Return a site's labels as numbers of the run's classes, ``(N,)`` int64."""
    (y, own_names), classes = content.distinct, set(names)
    for number, name in enumerate(own_names):
        if name not in classes:
            raise DataError(
                f"{content.path}: label {name!r} of sample {int(np.argmax(y == number))} is not a class of the run; "
                f"allowed are {', '.join(names)}"
            )
    return renumbered(y, own_names, names)


def _in_columns(content: Content, settings: DataSettings) -> np.ndarray:
    """Return a site's features in the order of the run's columns."""
    names = columns_in(settings, content.x.shape[1])
    x: np.ndarray = content.x
    if not names or content.columns in ((), names):
        return x
    return x[:, [content.columns.index(name) for name in names]]
