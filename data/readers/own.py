"""Read custom data: .npz, .csv, .parquet, folders of images or .npy files, saved `datasets`, and PFLlib directories."""

from logging import getLogger
from pathlib import Path
from typing import Any

import numpy as np

from posy.data.columns import Columns
from posy.data.dataset import Content, Dataset, make_dataset
from posy.data.errors import DataError
from posy.data.files import check_regular
from posy.data.labels import as_labels, joined_labels, known_labels, numbered_groups
from posy.data.readers.arrow import is_saved, read_parquet, read_saved
from posy.data.readers.functions import PARTS, content_of
from posy.data.readers.image import image_content, labelled_images
from posy.data.readers.npz import NpzFile
from posy.data.readers.pfllib import is_pfllib, read_pfllib
from posy.data.readers.samples import samples_of
from posy.data.readers.tables import read_csv
from posy.data.targets import as_targets
from posy.data.text import MAX_LENGTH
from posy.data.values import check_alike, check_lengths, check_shape
from posy.metrics import CLASSES
from posy.paths import exists

_LOG = getLogger("flwr")  # Flower's logger, so that warnings appear in the run's log


def as_dataset(content: Content, name: str, length: int = MAX_LENGTH) -> Dataset:
    """Build a data set from a reader's content; ``length`` is the number of tokens per text.

    Features and texts still need :func:`posy.data.dataset.fitted`. The function logs any warnings about the data.

    Raises
    ------
    DataError
        If there are fewer than two classes.
    """
    target: tuple[Any, ...] = ()
    if content.target != CLASSES:
        y, names, notes, target = content.labels, content.class_names, content.notes, (content.target,)
    elif content.class_names:
        names, notes = content.class_names, content.read_notes
        y = known_labels(content.labels, len(names), str(content.path))
    else:
        (y, names), notes = content.distinct, content.notes
        if len(names) < 2:
            raise DataError(f"{content.path}: the only label is {names[0]!r:.60}; at least 2 classes are needed")
    x = np.array(content.x, object) if content.kind == "text" else content.x
    vocabulary = int(x.max()) + 1 if content.kind == "tokens" else 0
    for note in notes:
        _LOG.warning("%s: %s", content.path, note)
    keys = ("groups", "group_names", "split_groups", "is_test", "given", "columns", "categories")
    attributes: dict[str, Any] = {key: getattr(content, key) for key in keys}
    attributes |= {"text_length": length, "target": target, "notes": notes}
    return make_dataset(name, content.kind, x, y, names, vocabulary, **attributes)


def read_own(
    path: Path,
    size: tuple[int, int] | None = None,
    mode: str | None = None,
    skip_unreadable: bool | None = None,
    columns: Columns = Columns(),  # noqa: B008 - immutable
) -> Content:
    """Read an .npz, .csv or .parquet file, or a directory in one of the supported layouts.

    For image files, ``size`` and ``mode`` are as in :func:`posy.data.readers.image.readable_images`, and
    ``skip_unreadable`` skips unreadable files. With ``False``, the error for an unreadable file suggests
    ``skip-unreadable=true``. With ``None``, it does not. The column names in ``columns`` apply to tables.

    Raises
    ------
    DataError
        If the path has an unsupported format, or its content cannot be used.
    """
    try:
        if is_saved(path):
            return read_saved(path, columns, size, mode, skip_unreadable)
        if path.is_dir():
            if is_pfllib(path):
                return read_pfllib(path)
            arrays = exists(path / "x.npy") and exists(path / "y.npy")
            return read_arrays(path, columns) if arrays else _read_folder(path, size, mode, skip_unreadable)
        kind = path.suffix.lower()
        if kind == ".parquet":
            return read_parquet(path, columns, size, mode, skip_unreadable)
        if kind not in (".npz", ".csv"):
            raise DataError(
                f"{path}: allowed: .npz, .csv, .parquet, a folder that contains class folders or x.npy and y.npy, a "
                "folder written by datasets.save_to_disk, or a PFLlib directory"
            )
        return read_npz(path, columns) if kind == ".npz" else read_csv(path, columns)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error})") from error
    except MemoryError as error:
        raise DataError(f"{path}: does not fit into memory ({error})") from error


def read_npz(path: Path, columns: Columns = Columns()) -> Content:  # noqa: B008 - immutable
    """Read an .npz file, and return its training and test samples in one array, with a mask of the test samples.

    The function reads ``x_train, y_train`` and, if they exist, ``x_test, y_test`` and ``groups_train, groups_test``
    (numbers or strings). :func:`posy.data.readers.samples.samples_of` determines the kind of the samples.

    Raises
    ------
    DataError
        If an array is missing or cannot be used.
    """
    archive = NpzFile(path)
    splits = [split for split in ("train", "test") if {f"x_{split}", f"y_{split}"} & set(archive.names)]
    if "train" not in splits or not {f"{kind}_{split}" for kind in "xy" for split in splits} <= set(archive.names):
        raise DataError(
            f"{path}: contains {list(archive.names)}; it must have x_train, y_train and optionally x_test, y_test"
        )
    for split in splits:
        names = [f"{kind}_{split}" for kind in ("x", "y", "groups") if f"{kind}_{split}" in archive.names]
        check_lengths(str(path), **{name: (archive.shape(name)[0] or (0,))[0] for name in names})
        check_shape(archive.shape(f"x_{split}")[0], str(path))

    def labels(kind: str) -> np.ndarray:
        names = [f"{kind}_{split}" for split in splits]
        return joined_labels([as_labels(archive.read(name), f"{path}: {name}") for name in names])

    has_groups = {f"groups_{split}" for split in splits} <= set(archive.names)
    groups, group_names = numbered_groups(labels("groups")) if has_groups else (None, ())
    names = [f"y_{split}" for split in splits]
    if columns.target == CLASSES:
        y, class_names = labels("y"), tuple[str, ...]()
    else:
        y, class_names = as_targets(archive.pooled(names), columns.target, f"{path}: y")
    names = [f"x_{split}" for split in splits]
    x = archive.pooled(names)
    num_test = archive.shape("y_test")[0][0] if "test" in splits else 0
    is_test = np.arange(len(x)) >= len(x) - num_test if num_test else None
    if num_test and x.dtype.kind in "biuf":
        halves = np.split(x, [len(x) - num_test])
        parts = {name: (archive.shape(name)[1], half) for name, half in zip(names, halves, strict=True)}
        check_alike(str(path), parts, pixels=x.ndim > 2)
    kind, samples, notes = samples_of(x, columns.kind, str(path))
    attributes = {"class_names": class_names, "target": columns.target, "group_names": group_names}
    return Content(path, kind, samples, y, groups, is_test, read_notes=tuple(notes), **attributes)  # type: ignore[arg-type]


def has_columns(path: Path) -> bool:
    """Return whether the data at a path is a table, so that settings may name its columns."""
    return path.suffix.lower() in (".csv", ".parquet") or is_saved(path)


def read_arrays(path: Path, columns: Columns = Columns()) -> Content:  # noqa: B008 - immutable
    """Read a directory that contains x.npy and y.npy, and optionally .npy files for the other names in :data:`PARTS`.

    Samples stay on disk unless their type must be converted.
    """
    parts = {}
    for key in PARTS:
        file = path / f"{key}.npy"
        if key not in ("x", "y") and not exists(file):
            continue
        check_regular(file)
        try:
            mapped = np.lib.format.open_memmap(file, mode="r")
        except (ValueError, EOFError, OSError, OverflowError) as error:
            raise DataError(f"{file}: not a complete .npy file of numbers or strings ({error})") from error
        parts[key] = mapped if key == "x" else np.array(mapped)
    return content_of(parts, str(path), path, columns)


def _read_folder(path: Path, size: tuple[int, int] | None, mode: str | None, skip_unreadable: bool | None) -> Content:
    """Read a folder of class folders, as :func:`posy.data.readers.image.labelled_images` describes."""
    files, names, is_test = labelled_images(path)
    return image_content(path, files, names, size, mode, skip_unreadable, is_test=is_test)
