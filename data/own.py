"""People's own data: .npz, .csv, a folder of class folders, a PFLlib directory."""

import dataclasses
from logging import INFO, WARNING
from pathlib import Path

import numpy as np
from flwr.common.logger import log

from data.dataset import (
    Content,
    Dataset,
    as_float32,
    feature_dataset,
    image_dataset,
    mapped_labels,
    numbered,
    text_dataset,
)
from data.errors import DataError
from data.image import as_images, labelled_images, read_images, read_npz
from data.pfllib import is_pfllib, read_pfllib
from data.text import rows_of, tokenise


def load_own(path: Path, name: str) -> Dataset:
    """Read a file or directory of one of the four formats as a data set of its own.

    Features are standardised, but for PFLlib's, which are taken as they are.

    Raises
    ------
    DataError
        If it is none of them, or holds what cannot be used.
    """
    content = read_own(path)
    if content.num_classes:
        labels, names = content.labels, tuple(str(label) for label in range(content.num_classes))
    else:
        labels, names = mapped_labels(content.labels, str(path), content.is_test)
    if content.kind == "text":
        tokens, vocabulary = tokenise(content.x)
        return text_dataset(name, tokens, labels, names, content.groups, vocabulary=vocabulary)
    if content.kind == "tokens":
        dataset = text_dataset(name, content.x, labels, names, vocabulary=int(content.x.max()) + 1)
    elif content.kind == "features":
        own = content.given is None
        dataset = feature_dataset(name, content.x, labels, names, content.groups, standardise=own)
    else:
        dataset = image_dataset(name, content.x, labels, names, content.groups)
    return dataclasses.replace(dataset, given=content.given)


def read_own(path: Path, size: tuple[int, int] | None = None, mode: str | None = None) -> Content:
    """Read a file or directory of one of the four formats.

    Parameters
    ----------
    path : Path
        An .npz or .csv file, a folder of class folders, or a PFLlib directory.
    size, mode
        Of the images of class folders, as for :func:`data.image.read_images`.

    Raises
    ------
    DataError
        If it is none of them, or holds what cannot be used.
    """
    if path.is_dir():
        if is_pfllib(path):
            return read_pfllib(path)
        files, names, is_test = labelled_images(path)
        return Content("image", read_images(files, size, mode), names, is_test=is_test)
    readers = {".npz": _read_npz, ".csv": _read_csv}
    if path.suffix.lower() not in readers:
        raise DataError(f"{path}: allowed are .npz, .csv, a folder of class folders and a PFLlib directory")
    return readers[path.suffix.lower()](path)


def _read_npz(path: Path) -> Content:
    """Read what :func:`data.image.read_npz` does.

    Three and four axes are images, as :func:`data.image.as_images` takes them; ``(N, F)`` are features.
    """
    x, y, groups, tested = read_npz(path)
    is_test = np.arange(len(y)) >= len(y) - tested if tested else None
    if x.ndim in (3, 4):
        x = as_images(x, str(path))
        return Content("image" if x.dtype == np.uint8 else "image-float", x, y, groups, is_test)
    if x.ndim != 2 or x.dtype.kind not in "fiub":
        raise DataError(f"{path}: x of shape {x.shape} and type {x.dtype}; allowed are numbers in 2, 3 or 4 axes")
    return Content("features", as_float32(x, str(path)), y, groups, is_test)


def _read_csv(path: Path) -> Content:
    """Read a table with a header.

    The labels are the column ``label``, else the last, with a warning; a column ``group`` gives natural
    groups. A column ``text``, or the only other column if it does not hold numbers, becomes tokens, and
    a warning names the columns that are not used then; otherwise all other columns are features.
    """
    rows = rows_of(path)
    _, header = next(rows, (0, []))
    header = [title.strip() for title in header]
    lower = [title.lower() for title in header]
    if len(header) < 2:
        raise DataError(f"{path}: header {header}; needed is a header row with two columns or more")
    if all(_number(title) is not None for title in header):
        raise DataError(f"{path}: the first row holds only numbers; needed is a header row with the columns' names")
    numbers, table = [], []
    for number, row in rows:
        if len(row) != len(header):
            raise DataError(f"{path}: row {number} has {len(row)} columns; the header has {len(header)}")
        numbers.append(number)
        table.append(row)
    if not table:
        raise DataError(f"{path}: no rows below the header; at least one is needed")
    columns = list(zip(*table, strict=True))
    label = lower.index("label") if "label" in lower else len(header) - 1
    if "label" not in lower:
        log(WARNING, "%s: no column is named label; the last one, %s, is taken for it", path, header[label])
    labels = _labels(columns[label], path, header[label], numbers)
    groups = None
    if "group" in lower and lower.index("group") != label:
        groups = numbered(np.array(columns[lower.index("group")]))
    inputs = [i for i in range(len(header)) if i != label and lower[i] != "group"]
    if "text" in lower:
        text = lower.index("text")
    else:
        text = inputs[0] if len(inputs) == 1 and any(_number(cell) is None for cell in columns[inputs[0]]) else -1
    if text in inputs:
        if len(inputs) > 1:
            unused = ", ".join(header[i] for i in inputs if i != text)
            log(WARNING, "%s: columns beside the text are not used: %s", path, unused)
        log(INFO, "%s: column %s is the text, %s the label", path.name, header[text], header[label])
        return Content("text", columns[text], labels, groups)
    log(INFO, "%s: %s columns are features, %s the label", path.name, len(inputs), header[label])
    x = _features([(header[i], columns[i]) for i in inputs], path, numbers)
    return Content("features", x, labels, groups)


def _features(columns: list[tuple[str, tuple[str, ...]]], path: Path, numbers: list[int]) -> np.ndarray:
    """Return the columns as ``(N, F)`` float32; every cell must be a finite number."""
    if not columns:
        raise DataError(f"{path}: no column beside the label; at least one is needed")
    features = np.empty((len(numbers), len(columns)), np.float32)
    for target, (title, cells) in zip(features.T, columns, strict=True):
        found = (_number(cell) for cell in cells)
        values = np.array([np.nan if value is None else value for value in found])
        bad = np.flatnonzero(~(np.abs(values) <= np.finfo(np.float32).max))
        if bad.size:
            raise DataError(
                f"{path}: row {numbers[bad[0]]}, column {title}: {cells[bad[0]]!r}; finite numbers are allowed, in the "
                "range of float32 (a column of texts must be named text)"
            )
        target[:] = values
    return features


def _labels(cells: tuple[str, ...], path: Path, title: str, numbers: list[int]) -> np.ndarray:
    """Return the label column: numbers, if all are, which must be whole, else texts."""
    cells = tuple(cell.strip() for cell in cells)
    if "" in cells:
        raise DataError(f"{path}: row {numbers[cells.index('')]}, column {title}: the label is missing")
    values = [_number(cell) for cell in cells]
    if None in values:
        return np.array(cells)
    fractions = [i for i, value in enumerate(values) if value is not None and not value.is_integer()]
    if fractions:
        raise DataError(
            f"{path}: row {numbers[fractions[0]]}, column {title}: {cells[fractions[0]]!r}; "
            "labels are whole numbers or texts"
        )
    return np.array(values)


def _number(cell: str) -> float | None:
    try:
        return float(cell)
    except ValueError:
        return None
