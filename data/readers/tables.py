"""Read the rows of .csv files, and custom tables of features or texts."""

import csv
import itertools
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from logging import getLogger
from pathlib import Path

import numpy as np

from posy.data.columns import Columns, name_notes, roles
from posy.data.dataset import Content
from posy.data.errors import DataError, Note
from posy.data.files import check_fits, check_regular
from posy.data.labels import as_labels, label_name, numbered_groups, written_label
from posy.data.values import FLOAT32_MAX, LOST, as_features

_GROWTH = 4  # minimum factor by which a table grows when it is loaded as Python strings
_MAX_LINE = 1 << 25  # characters
_SPECIAL = ("label", "group", "text")
_OTHER_SEPARATORS = {";": "semicolons", "\t": "tabs", "|": "vertical bars"}
_MISSING = ("", "?", "-", "na", "n/a", "nan", "null", "none")
"""Cells that denote a missing value, in lower case."""
_LOG = getLogger("flwr")  # Flower's logger, so that messages appear in the log of the run


def rows_of(path: Path, encoding: str = "utf-8-sig", delimiter: str = ",") -> Iterator[tuple[int, list[str]]]:
    """Yield the number (from 1) and the fields of each row in a .csv file, skipping empty lines."""
    number = 0
    try:
        for number, row in enumerate(csv.reader(_lines(path, encoding), delimiter=delimiter), 1):
            if row:
                yield number, row
    except csv.Error as error:
        raise DataError(f"{path}: row {number + 1}: not a readable .csv file ({error})") from error


def read_csv(path: Path, columns: Columns = Columns()) -> Content:  # noqa: B008 - immutable
    """Read a table whose header contains distinct names.

    :func:`posy.data.columns.roles` assigns roles to the columns, and :func:`posy.data.labels.written_label` reads the
    labels. The text is the column ``text``, or the only input column if some of its cells are not numbers. Notes list
    unused columns.

    Raises
    ------
    DataError
        If the file cannot be read, or a cell cannot be used; the message names its row and column.
    """
    header = _header(path)
    assigned = roles(header, columns, str(path))
    label, notes = assigned.label, list(assigned.notes)
    features = [] if assigned.is_text else assigned.inputs
    cells = _cells(path, header, features)
    if cells is None and len(assigned.inputs) == 1:
        features, cells = [], _cells(path, header, [])
    if cells is None:
        raise _problem(path, header, features, {})
    labels, name_errors = _names(cells, label, "label")
    groups = None
    if assigned.group is not None:
        groups, group_errors = _names(cells, assigned.group, "group")
        name_errors |= group_errors
    if name_errors or not all((np.abs(cells[str(index)]) <= FLOAT32_MAX).all() for index in features):
        raise _problem(path, header, features, name_errors)
    y = as_labels(np.array(labels), str(path))
    numbers, group_names = (None, ()) if groups is None else numbered_groups(np.array(groups))
    if not features:
        text = assigned.inputs[0]
        _LOG.info("%s: column %s is the text, %s the label", path.name, header[text], header[label])
        samples = cells[str(text)].tolist()
        return Content(path, "text", samples, y, numbers, group_names=group_names, read_notes=tuple(notes))
    _LOG.info("%s: %s columns are features, %s the label", path.name, len(features), header[label])
    names = tuple(header[index] for index in features)
    notes += name_notes(names, header)
    notes += _lost_digits(path, header, cells, features)
    x, precision = as_features(np.column_stack([cells[str(index)] for index in features]), str(path))
    return Content(
        path, "features", x, y, numbers, columns=names, group_names=group_names, read_notes=(*notes, *precision)
    )


def _lines(path: Path, encoding: str) -> Iterator[str]:
    """Yield the lines of a text file, or raise :class:`DataError` if a line is too long for a table."""
    check_fits(_GROWTH * check_regular(path), str(path))
    try:
        with path.open(encoding=encoding, newline="") as file:
            for number in itertools.count(1):
                line = file.readline(_MAX_LINE)
                if "\0" in line:
                    raise DataError(f"{path}: line {number} holds a NUL byte; it is not a text file")
                if len(line) == _MAX_LINE:
                    raise DataError(f"{path}: line {number} is longer than {_MAX_LINE:,} characters; it is not a table")
                if not line:
                    return
                yield line
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: not a text file in {encoding} ({error})") from error


def _header(path: Path) -> list[str]:
    rows = rows_of(path)
    header = [label_name(title) for title in next(rows, (0, []))[1]]
    if len(header) < 2:
        other = next((name for sign, name in _OTHER_SEPARATORS.items() if sign in "".join(header)), "")
        hint = f"; the header has {other}: separate the columns by commas" if other else ""
        raise DataError(f"{path}: header {header}; a table needs a header row with two columns or more{hint}")
    if all(_number(title) is not None for title in header):
        raise DataError(
            f"{path}: the first row contains only numbers; a table needs a header row with the names of the columns"
        )
    titles: dict[str, str] = {}
    for title in header:
        key = title.lower() if title.lower() in _SPECIAL else title
        if key in titles:
            raise DataError(f"{path}: columns named {titles[key]!r} and {title!r}; each name may occur once")
        titles[key] = title
    if next(rows, None) is None:
        raise DataError(f"{path}: no rows below the header; at least one is needed")
    return header


def _cells(path: Path, header: Sequence[str], features: Sequence[int]) -> np.ndarray | None:
    """Return columns "0", "1", …, with features as float64 and others as strings, or ``None`` if a cell is invalid.

    NumPy reads a table several times faster than the csv module does, and returns the same cells. It rejects rows that
    are too short or too long, whereas pandas pads short rows.
    """
    numeric = set(features)
    kinds = np.dtype([(str(index), float if index in numeric else object) for index in range(len(header))])
    lines = _lines(path, "utf-8-sig")
    next(row for row in csv.reader(lines) if row)
    try:
        return np.loadtxt(lines, kinds, comments=None, delimiter=",", quotechar='"', ndmin=1)
    except DataError:
        raise
    except ValueError:
        return None


def _names(cells: np.ndarray, column: int, role: str) -> tuple[list[str], dict[tuple[int, str], str]]:
    """Return the names in a column, and any errors, keyed by column and cell."""
    name_by_cell = {cell: written_label(cell) for cell in set(cells[str(column)])}
    errors = {(column, cell): f"the {role} is missing" for cell, name in name_by_cell.items() if not name}
    values = {cell: _number(cell) for cell in name_by_cell}
    if role == "label" and None not in values.values():
        errors |= {
            (column, cell): f"{cell.strip()!r}; labels are whole numbers or strings"
            for cell, value in values.items()
            if value is not None and not value.is_integer()
        }
    return [name_by_cell[cell] for cell in cells[str(column)]], errors


def _problem(
    path: Path, header: Sequence[str], features: Sequence[int], name_errors: Mapping[tuple[int, str], str]
) -> DataError:
    """Return the error for the first row or cell that cannot be used, given the errors in labels and groups."""
    for number, row in itertools.islice(rows_of(path), 1, None):
        if len(row) != len(header):
            return DataError(f"{path}: row {number} has {len(row)} columns; the header has {len(header)}")
        for index, cell in enumerate(row):
            where = f"{path}: row {number}, column {header[index]}"
            if (index, cell) in name_errors:
                return DataError(f"{where}: {name_errors[index, cell]}", "wrong-label", header[index])
            value = _number(cell)
            if index in features and cell.strip().lower() in _MISSING:
                return DataError(
                    f"{where}: {cell!r} is a missing value; fill it in, remove the row, or remove the column "
                    "from input-columns",
                    "missing-value",
                    header[index],
                )
            if index in features and (value is None or not abs(value) <= FLOAT32_MAX):
                return DataError(
                    f"{where}: {cell!r}; finite numbers are allowed, in the range of float32 (a column of texts must "
                    "be named text, or be the only column in input-columns)",
                    "not-a-number",
                    header[index],
                )
    return DataError(f"{path}: not a readable .csv file")


def _lost_digits(path: Path, header: Sequence[str], cells: np.ndarray, features: Sequence[int]) -> list[str]:
    """Return a warning if cells differ only in digits that float64 cannot represent."""
    spread = {index: np.ptp(cells[str(index)]) for index in features}
    coarse = {
        index: set[str]() for index in features if np.spacing(np.abs(cells[str(index)]).max()) > LOST * spread[index]
    }
    if not coarse:
        return []
    for _, row in itertools.islice(rows_of(path), 1, None):
        for index, texts in coarse.items():
            texts.add(row[index].strip())
    lossy_columns = [
        header[index]
        for index, texts in coarse.items()
        if max(abs(Fraction(cell) - Fraction(float(cell))) for cell in texts) > LOST * spread[index]
    ]
    if not lossy_columns:
        return []
    return [
        Note(
            f"float64 cannot distinguish values of these columns: {', '.join(lossy_columns)}; subtract a common offset"
        )
    ]


def _number(cell: str) -> float | None:
    try:
        return float(cell) if cell.isascii() and "_" not in cell else None
    except ValueError:
        return None
