"""Read custom data: .npz, .csv, .parquet, folders of images or arrays, saved Hugging Face data, and PFLlib folders."""

from collections.abc import Sequence
from dataclasses import replace
from logging import getLogger
from pathlib import Path
from typing import Any

import numpy as np

from posy.data.columns import Columns
from posy.data.dataset import Content, Dataset, make_dataset
from posy.data.errors import DataError
from posy.data.files import check_regular, is_pfllib
from posy.data.labels import as_labels, joined_labels, known_labels, label_name, numbered_groups, written_label
from posy.data.readers.arrow import is_saved, read_parquet, read_saved
from posy.data.readers.functions import PARTS, PATIENTS, content_of
from posy.data.readers.image import image_content, labelled_images
from posy.data.readers.npz import NpzFile
from posy.data.readers.pfllib import read_pfllib
from posy.data.readers.samples import samples_of
from posy.data.readers.tables import read_csv, rows_of
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
    keys = ("groups", "group_names", "split_groups", "is_test", "given", "columns", "label_columns", "categories")
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
            return (
                read_arrays(path, columns)
                if _has_arrays(path)
                else _read_folder(path, size, mode, skip_unreadable, columns)
            )
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

    The function reads ``x_train, y_train`` and, if they exist, ``x_test, y_test``, ``groups_train, groups_test`` and
    ``patients_train, patients_test`` (numbers or strings). If set, ``columns.split`` replaces ``patients``.
    :func:`posy.data.readers.samples.samples_of` determines the kind of the samples.

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
    unit = columns.split or PATIENTS
    for split in splits:
        names = [f"{kind}_{split}" for kind in ("x", "y", "groups", unit) if f"{kind}_{split}" in archive.names]
        check_lengths(str(path), **{name: (archive.shape(name)[0] or (0,))[0] for name in names})
        check_shape(archive.shape(f"x_{split}")[0], str(path))

    def labels(kind: str, role: str = "label") -> np.ndarray:
        names = [f"{kind}_{split}" for split in splits]
        return joined_labels([as_labels(archive.read(name), f"{path}: {name}", role=role) for name in names])

    has_groups = {f"groups_{split}" for split in splits} <= set(archive.names)
    groups, group_names = numbered_groups(labels("groups", "group")) if has_groups else (None, ())
    units = [f"{unit}_{split}" for split in splits]
    has_units = bool(columns.split) or not set(units).isdisjoint(archive.names)
    if has_units and (missing := [name for name in units if name not in archive.names]):
        raise DataError(f"{path}: no array {missing[0]}, which identifies the {unit} of each sample; add it")
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
    attributes: dict[str, Any] = {"class_names": class_names, "target": columns.target, "group_names": group_names}
    attributes["split_groups"] = numbered_groups(labels(unit, "patient"))[0] if has_units else None
    return Content(path, kind, samples, y, groups, is_test, read_notes=tuple(notes), **attributes)


def named_columns(path: Path) -> tuple[str, ...]:
    """Return the settings that may name columns or arrays of the data at a path."""
    if path.suffix.lower() in (".csv", ".parquet") or is_saved(path):
        return ("label-column", "input-columns", "group-column", "split-column")
    if path.suffix.lower() == ".npz":
        return ("split-column",)
    if not path.is_dir() or is_pfllib(path):
        return ()
    return ("split-column",) if _has_arrays(path) else ("group-column", "split-column")


def _has_arrays(path: Path) -> bool:
    return exists(path / "x.npy") and exists(path / "y.npy")


def read_arrays(path: Path, columns: Columns = Columns()) -> Content:  # noqa: B008 - immutable
    """Read a directory that contains x.npy and y.npy, and optionally .npy files for the other names in :data:`PARTS`.

    Samples stay on disk unless their type must be converted.
    """
    parts = {}
    for key in PARTS:
        unit = columns.split if key == PATIENTS else ""
        file = path / f"{unit or key}.npy"
        if key not in ("x", "y") and not unit and not exists(file):
            continue
        check_regular(file)
        try:
            mapped = np.lib.format.open_memmap(file, mode="r")
        except (ValueError, EOFError, OSError, OverflowError) as error:
            raise DataError(f"{file}: not a complete .npy file of numbers or strings ({error})") from error
        parts[key] = mapped if key == "x" else np.array(mapped)
    return content_of(parts, str(path), path, columns)


def _read_folder(
    path: Path, size: tuple[int, int] | None, mode: str | None, skip_unreadable: bool | None, columns: Columns
) -> Content:
    """Read a folder of class folders, as :func:`posy.data.readers.image.labelled_images` describes.

    The named columns of its ``metadata.csv`` contain the groups and the patients.
    """
    files, names, is_test = labelled_images(path)
    attributes, group_names = {"is_test": is_test}, tuple[str, ...]()
    named = [("groups", "group-column", columns.group), ("split_groups", "split-column", columns.split)]
    for attribute, key, column in named:
        if column:
            attributes[attribute], labels = numbered_groups(_metadata(path, files, key, column))
            group_names = labels if attribute == "groups" else group_names
    content = image_content(path, files, names, size, mode, skip_unreadable, **attributes)
    return replace(content, group_names=group_names)


def _metadata(path: Path, files: Sequence[Path], key: str, column: str) -> np.ndarray:
    """Return the values in a column of ``metadata.csv``, one for each image file, ``(N,)``.

    As in ImageFolder of `datasets`, the column ``file_name`` contains the paths of the images in the folder.
    """
    table = path / "metadata.csv"
    if not exists(table):
        raise DataError(f"{path}: {key} = {column!r} needs a file metadata.csv with the columns file_name and {column}")
    (_, header), *rows = [*rows_of(table)] or [(0, [])]
    titles = [label_name(title) for title in header]
    if missing := [name for name in ("file_name", column) if titles.count(name) != 1]:
        raise DataError(f"{table}: the columns are {', '.join(titles)}; it needs one column {missing[0]} ({key})")
    if short := [number for number, row in rows if len(row) != len(header)]:
        raise DataError(f"{table}: row {short[0]} does not have {len(header)} cells, unlike the header")
    name_of = {row[titles.index("file_name")]: written_label(row[titles.index(column)]) for _, row in rows}
    relative = [file.relative_to(path).as_posix() for file in files]
    if unknown := [name for name in relative if not name_of.get(name)]:
        raise DataError(f"{table}: {unknown[0]} has no value in the column {column}; each image needs one")
    return as_labels(np.array([name_of[name] for name in relative]), str(table))
