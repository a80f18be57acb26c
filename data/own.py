"""People's own data: .npz, .csv, a folder of class folders, a PFLlib directory."""

import dataclasses
from collections.abc import Iterable
from fractions import Fraction
from logging import INFO, WARNING
from pathlib import Path

import numpy as np
from flwr.common.logger import log

from posy.data.dataset import (
    FLOAT32,
    LOST,
    Content,
    Dataset,
    as_features,
    as_labels,
    feature_dataset,
    image_dataset,
    label_name,
    label_notes,
    mapped_labels,
    nearly_equal,
    numbered,
    precision_notes,
    text_dataset,
    written_label,
)
from posy.data.errors import DataError
from posy.data.image import as_images, labelled_images, read_npz, readable_images, unreadable
from posy.data.pfllib import is_pfllib, read_pfllib
from posy.data.text import rows_of, tokenise

_SPECIAL = ("label", "group", "text")


def load_own(path: Path, name: str) -> Dataset:
    """Read a file or directory of one of the four formats as a data set of its own.

    Features are standardised, but for PFLlib's, which are taken as they are. What may be a mistake is logged.

    Raises
    ------
    DataError
        If it is none of them, or holds what cannot be used.
    """
    content = read_own(path)
    notes = list(content.notes)
    if content.num_classes:
        labels, names = content.labels, tuple(str(label) for label in range(content.num_classes))
    else:
        labels, names = mapped_labels(content.labels, str(path))
        notes += label_notes(labels, names, content.is_test)
    if content.kind == "text":
        tokens, vocabulary = tokenise(content.x)
        dataset = text_dataset(name, tokens, labels, names, content.groups, vocabulary=vocabulary)
    elif content.kind == "tokens":
        dataset = text_dataset(name, content.x, labels, names, vocabulary=int(content.x.max()) + 1)
    elif content.kind == "features":
        x, own = content.x, content.given is None
        if not own:
            notes += precision_notes(x, np.float32, content.columns)
            x = x.astype(np.float32, copy=False)
        dataset = feature_dataset(name, x, labels, names, content.groups, standardise=own)
    else:
        dataset = image_dataset(name, content.x, labels, names, content.groups)
    for note in notes:
        log(WARNING, "%s: %s", path, note)
    return dataclasses.replace(dataset, given=content.given, notes=tuple(notes))


def read_own(
    path: Path, size: tuple[int, int] | None = None, mode: str | None = None, skip_unreadable: bool | None = None
) -> Content:
    """Read a file or directory of one of the four formats.

    Parameters
    ----------
    path : Path
        An .npz or .csv file, a folder of class folders, or a PFLlib directory.
    size, mode
        Of the images of class folders, as for :func:`posy.data.image.read_images`.
    skip_unreadable : bool or None
        Whether to go on without image files that cannot be read; ``None``: no, and nobody can choose it.

    Raises
    ------
    DataError
        If it is none of them, or holds what cannot be used.
    """
    try:
        if path.is_dir():
            return read_pfllib(path) if is_pfllib(path) else _read_folder(path, size, mode, skip_unreadable)
        readers = {".npz": _read_npz, ".csv": _read_csv}
        if path.suffix.lower() not in readers:
            raise DataError(f"{path}: allowed are .npz, .csv, a folder of class folders and a PFLlib directory")
        return readers[path.suffix.lower()](path)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error})") from error
    except MemoryError as error:
        raise DataError(f"{path}: more than fits into memory ({error})") from error


def _read_folder(path: Path, size: tuple[int, int] | None, mode: str | None, skip_unreadable: bool | None) -> Content:
    """Read a folder of class folders, as :func:`posy.data.image.labelled_images` finds them."""
    files, names, is_test = labelled_images(path)
    x, problems = readable_images(files, size, mode)
    if not problems:
        return Content("image", x, names, is_test=is_test)
    if not skip_unreadable or len(problems) == len(files):
        hint = "" if skip_unreadable is not False else "; with skip-unreadable=true in its node config a site goes on"
        raise unreadable(problems, len(files), f"{hint} without such files" if hint else "")
    good = np.setdiff1d(np.arange(len(files)), list(problems))
    first = ", ".join(str(files[number].relative_to(path)) for number in list(problems)[:3])
    notes = [
        f"{len(problems)} of {len(files)} image files cannot be read and are left out: "
        f"{first}{', …' if len(problems) > 3 else ''}"
    ]
    if gone := np.setdiff1d(names, names[good]).tolist():
        notes.append(f"classes without an image that can be read: {', '.join(gone)}")
    return Content(
        "image",
        x,
        names[good],
        is_test=None if is_test is None else is_test[good],
        notes=tuple(notes),
        unreadable=tuple(map(str, problems.values())),
    )


def _read_npz(path: Path) -> Content:
    """Read what :func:`posy.data.image.read_npz` does.

    Three and four axes are images, as :func:`posy.data.image.as_images` takes them; ``(N, F)`` are features.
    """
    x, y, groups, tested = read_npz(path)
    is_test = np.arange(len(y)) >= len(y) - tested if tested else None
    if x.ndim in (3, 4):
        images = as_images(x, str(path))
        if images.dtype == np.uint8:
            return Content("image", images, y, groups, is_test)
        notes = precision_notes(x.reshape(-1, 1), np.float32, ("pixels",))
        return Content("image-float", images, y, groups, is_test, notes=tuple(notes))
    if x.ndim != 2 or x.dtype.kind not in "fiub":
        raise DataError(f"{path}: x of shape {x.shape} and type {x.dtype}; allowed are numbers in 2, 3 or 4 axes")
    x, notes = as_features(x, str(path))
    return Content("features", x, y, groups, is_test, notes=tuple(notes))


def _read_csv(path: Path) -> Content:
    """Read a table with a header, in which every name stands once.

    The labels are the column ``label``, else the last, which is noted (see :func:`posy.data.dataset.written_label`
    for what a cell means); a column ``group`` gives natural groups. A column ``text``, or the only other column
    if it does not hold numbers, becomes tokens, and the columns that are not used then are noted; otherwise all
    other columns are features.
    """
    header, numbers, table = _table(path)
    lower = [title.lower() for title in header]
    columns = list(zip(*table, strict=True))
    notes = []
    label = lower.index("label") if "label" in lower else len(header) - 1
    if "label" not in lower:
        notes.append(f"no column is named label; the last one, {header[label]}, is taken for it")
    labels = _labels(columns[label], path, header[label], numbers)
    groups = None
    if "group" in lower and lower.index("group") != label:
        group = lower.index("group")
        groups = numbered(_names(columns[group], path, header[group], numbers, "group"))
    inputs = [i for i in range(len(header)) if i != label and lower[i] != "group"]
    if "text" in lower:
        text = lower.index("text")
    else:
        text = inputs[0] if len(inputs) == 1 and any(_number(cell) is None for cell in columns[inputs[0]]) else -1
    if text in inputs:
        if len(inputs) > 1:
            unused = ", ".join(header[i] for i in inputs if i != text)
            notes.append(f"columns beside the text are not used: {unused}")
        log(INFO, "%s: column %s is the text, %s the label", path.name, header[text], header[label])
        return Content("text", columns[text], labels, groups, notes=tuple(notes))
    log(INFO, "%s: %s columns are features, %s the label", path.name, len(inputs), header[label])
    names = [header[i] for i in inputs]
    notes += [f"column {1 + header.index('')} has no name and is a feature"] if "" in names else []
    notes += [f"columns of nearly the same name: {', '.join(twins)}" for twins in nearly_equal(names)]
    x, lost = _features([(header[i], columns[i]) for i in inputs], path, numbers)
    return Content("features", x, labels, groups, columns=tuple(names), notes=(*notes, *lost))


def _table(path: Path) -> tuple[list[str], list[int], list[list[str]]]:
    """Return the header of a table, and the numbers and the cells of its rows, as many in each as in the header."""
    rows = rows_of(path)
    _, header = next(rows, (0, []))
    header = [label_name(title) for title in header]
    if len(header) < 2:
        raise DataError(f"{path}: header {header}; needed is a header row with two columns or more")
    if all(_number(title) is not None for title in header):
        raise DataError(f"{path}: the first row holds only numbers; needed is a header row with the columns' names")
    lower = [title.lower() for title in header]
    for place, title in enumerate(header):
        if title in header[:place] or (lower[place] in _SPECIAL and lower[place] in lower[:place]):
            first = header[lower.index(lower[place])]
            raise DataError(f"{path}: columns named {first!r} and {title!r}; each name must stand there once")
    numbers, table = [], []
    for number, row in rows:
        if len(row) != len(header):
            raise DataError(f"{path}: row {number} has {len(row)} columns; the header has {len(header)}")
        numbers.append(number)
        table.append(row)
    if not table:
        raise DataError(f"{path}: no rows below the header; at least one is needed")
    return header, numbers, table


def _features(
    columns: list[tuple[str, tuple[str, ...]]], path: Path, numbers: list[int]
) -> tuple[np.ndarray, list[str]]:
    """Return the columns as :func:`posy.data.dataset.as_features` does; every cell must be a finite number."""
    if not columns:
        raise DataError(f"{path}: no column beside the label; at least one is needed")
    features = np.empty((len(numbers), len(columns)))
    lost = []
    for target, (title, cells) in zip(features.T, columns, strict=True):
        target[:] = _numbers(cells)
        bad = np.flatnonzero(~(np.abs(target) <= FLOAT32.max))
        if bad.size:
            raise DataError(
                f"{path}: row {numbers[bad[0]]}, column {title}: {cells[bad[0]]!r}; finite numbers are allowed, in the "
                "range of float32 (a column of texts must be named text)"
            )
        spread = target.max() - target.min()
        if np.spacing(np.abs(target).max()) > LOST * spread:
            moved = max(abs(Fraction(cell.strip()) - Fraction(value)) for cell, value in _distinct(cells, target))
            if moved > LOST * spread:
                lost.append(title)
    x, notes = as_features(features, str(path))
    if lost:
        notes.append(f"float64 cannot tell values of these columns apart: {', '.join(lost)}; cut what all share")
    return x, notes


def _distinct(cells: Iterable[str], values: np.ndarray) -> Iterable[tuple[str, float]]:
    return dict(zip(cells, values.tolist(), strict=True)).items()


def _labels(cells: tuple[str, ...], path: Path, title: str, numbers: list[int]) -> np.ndarray:
    """Return the label column; where all cells are numbers, they must be whole."""
    names = _names(cells, path, title, numbers, "label")
    values = [_number(cell) for cell in cells]
    fractions = [i for i, value in enumerate(values) if value is not None and not value.is_integer()]
    if None not in values and fractions:
        raise DataError(
            f"{path}: row {numbers[fractions[0]]}, column {title}: {cells[fractions[0]].strip()!r}; "
            "labels are whole numbers or texts"
        )
    return names


def _names(cells: tuple[str, ...], path: Path, title: str, numbers: list[int], what: str) -> np.ndarray:
    """Return a column of names as :func:`posy.data.dataset.as_labels` does; none may be empty."""
    known = {cell: written_label(cell) for cell in set(cells)}
    names = [known[cell] for cell in cells]
    if "" in names:
        raise DataError(f"{path}: row {numbers[names.index('')]}, column {title}: the {what} is missing")
    return as_labels(np.array(names), str(path))


def _numbers(cells: tuple[str, ...]) -> list[float]:
    """Return the numbers of a column; NaN for a cell that holds none."""
    whole = "".join(cells)
    if whole.isascii() and "_" not in whole:
        try:
            return list(map(float, cells))
        except ValueError:
            pass  # one cell is no number: which, is found below
    found = map(_number, cells)
    return [np.nan if value is None else value for value in found]


def _number(cell: str) -> float | None:
    try:
        return float(cell) if cell.isascii() and "_" not in cell else None
    except ValueError:
        return None
