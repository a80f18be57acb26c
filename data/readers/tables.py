"""Read the rows of .csv files, and custom tables of features or texts."""

import csv
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from logging import getLogger
from pathlib import Path
from typing import Any

import numpy as np

from posy.data.columns import Columns, Roles, name_notes, roles
from posy.data.dataset import Content
from posy.data.encoding import Categories, missing_value
from posy.data.errors import DataError, Note
from posy.data.files import check_fits, check_regular
from posy.data.labels import as_labels, label_name, numbered_groups, written_label
from posy.data.readers.cells import (
    SEPARATORS,
    column_notes,
    decimals_in,
    has_decimal_commas,
    is_missing,
    number_in,
    parse_columns,
)
from posy.data.targets import as_targets
from posy.data.values import FLOAT32_MAX, LOST, as_features
from posy.metrics import CLASSES

_Cells = np.ndarray | Mapping[str, np.ndarray]
_GROWTH = 4  # minimum factor by which a table grows when it is loaded as Python strings
_MAX_LINE = 1 << 25  # characters
_SPECIAL = ("label", "group", "text")
_LOG = getLogger("flwr")  # Flower's logger, so that messages appear in the run's log


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
    labels. The text is the column ``text``, or the only input column if some of its cells are not numbers. All other
    columns contain either numbers or categories. Notes list unused columns.

    Raises
    ------
    DataError
        If the file cannot be read, or a cell cannot be used; the message names its row and column.
    """
    separator = separator_of(path, columns.separator)
    header = _header(path, separator)
    assigned = roles(header, columns, str(path))
    features = () if assigned.is_text else assigned.inputs
    table = _Csv(path, header, separator, columns, assigned)
    numeric = [*features, *table.targets]
    needs_cells = (features and columns.categories) or (numeric and columns.decimal == "comma")
    numbers = None if needs_cells else table.numbers(numeric)
    if numbers is not None and all((np.abs(numbers[str(index)]) <= FLOAT32_MAX).all() for index in numeric):
        return _content(table, numbers, features, None)
    cells = table.strings()
    samples = table.samples(cells) if cells is not None else None
    is_text = samples is None and len(assigned.inputs) == 1 and not columns.categories
    if cells is None or (samples is None and not is_text):
        raise table.problem({})
    return _content(table, cells, () if is_text else features, samples)


@dataclass(frozen=True)
class _Csv:
    """A .csv file, and the roles of its columns."""

    path: Path
    header: Sequence[str]
    separator: str
    columns: Columns
    assigned: Roles

    @property
    def names(self) -> list[str]:
        """The names of the input columns."""
        return [self.header[index] for index in self.assigned.inputs]

    @property
    def targets(self) -> tuple[int, ...]:
        """The label or value columns, which contain numbers; empty for classes."""
        return () if self.columns.target == CLASSES else self.assigned.labels

    @property
    def _lacks_groups(self) -> bool:
        """Whether the partition needs groups, but no column contains them."""
        return self.columns.lacks_groups and self.assigned.group is None

    def numbers(self, numeric: Sequence[int]) -> np.ndarray | None:
        """Return columns "0", "1", …, some as float64 and others as strings, or None if a cell is invalid.

        NumPy reads a table several times faster than the csv module does, and returns the same cells. It rejects rows
        that are too short or too long, whereas pandas pads short rows.
        """
        kinds = np.dtype([(str(index), float if index in numeric else object) for index in range(len(self.header))])
        lines = _lines(self.path, "utf-8-sig")
        next(row for row in csv.reader(lines, delimiter=self.separator) if row)
        try:
            return np.loadtxt(lines, kinds, comments=None, delimiter=self.separator, quotechar='"', ndmin=1)
        except DataError:
            raise
        except ValueError:
            return None

    def strings(self) -> dict[str, np.ndarray] | None:
        """Return columns "0", "1", … of strings, or None if a row has the wrong number of columns."""
        rows = [row for _, row in itertools.islice(rows_of(self.path, delimiter=self.separator), 1, None)]
        if any(len(row) != len(self.header) for row in rows):
            return None
        return {str(index): np.array(column, object) for index, column in enumerate(zip(*rows, strict=True))}

    def samples(self, cells: Mapping[str, np.ndarray]) -> tuple[np.ndarray, Categories] | None:
        """Return the input columns as :func:`posy.data.readers.cells.parse_columns` does, or None."""
        inputs = {self.header[index]: cells[str(index)].tolist() for index in self.assigned.inputs}
        comma = self.has_commas(cells)
        samples = parse_columns(inputs, self.columns.categories, comma=comma)
        if samples is None or (np.isnan(samples[0]).any() and not self.columns.imputes):
            return None
        is_text = len(inputs) == 1 and bool(samples[1]) and not self.columns.categories
        return None if is_text else samples

    def values(self, cells: _Cells) -> tuple[np.ndarray, dict[tuple[int, str], str]]:
        """Return the labels or values ``(N, K)``, and any errors, keyed by column and cell."""
        if isinstance(cells, np.ndarray):
            return np.column_stack([cells[str(index)] for index in self.targets]), {}
        errors, columns, comma = dict[tuple[int, str], str](), [], self.has_commas(cells)
        for index in self.targets:
            numbers = {cell: number_in(cell, comma=comma) for cell in set(cells[str(index)])}
            for cell, number in numbers.items():
                if is_missing(cell):
                    errors[index, cell] = f"{cell!r} is a missing value; each row needs a label"
                elif number is None or not abs(number) <= FLOAT32_MAX:
                    errors[index, cell] = f"{cell!r}; only finite numbers in the range of float32 are allowed"
            columns.append(np.array([numbers[cell] for cell in cells[str(index)]], np.float64))
        return np.column_stack(columns), errors

    def has_commas(self, cells: Mapping[str, np.ndarray]) -> bool:
        """Return whether the numbers in the columns ``cells`` have decimal commas."""
        indices = (*self.assigned.inputs, *self.assigned.labels)
        columns = {self.header[index]: cells[str(index)].tolist() for index in indices if str(index) in cells}
        numbers = {name: column for name, column in columns.items() if name not in self.columns.categories}
        return has_decimal_commas(numbers, self.separator, self.columns.decimal, str(self.path))

    def labels_have_commas(self, cells: _Cells) -> bool:
        """Return whether the table has decimal commas, given that the label column contains classes."""
        if not isinstance(cells, np.ndarray):
            return self.has_commas(cells)
        key = str(self.assigned.label)
        if not self.has_commas({key: cells[key]}):  # NumPy has parsed the inputs, so they have no decimal commas
            return False
        strings = self.strings()  # which show whether the inputs have decimal points
        return strings is not None and self.has_commas(strings)

    def problem(self, name_errors: Mapping[tuple[int, str], str]) -> DataError:
        """Return the error for the first row or cell that cannot be used, given the errors in labels and groups."""
        cells = self.strings()
        comma = cells is not None and self.has_commas(cells)
        for number, row in itertools.islice(rows_of(self.path, delimiter=self.separator), 1, None):
            if len(row) != len(self.header):
                return DataError(f"{self.path}: row {number} has {len(row)} columns; the header has {len(self.header)}")
            for index, cell in enumerate(row):
                where = f"{self.path}: row {number}, column {self.header[index]}"
                if (index, cell) in name_errors:
                    code = "wrong-target" if index in self.targets else "wrong-label"
                    return DataError(f"{where}: {name_errors[index, cell]}", code, self.header[index])
                if index in self.assigned.inputs and cells is not None:
                    column = cells[str(index)].tolist()
                    if error := self._problem_of(where, self.header[index], cell, column, comma=comma):
                        return error
        return DataError(f"{self.path}: not a readable .csv file")

    def _problem_of(self, where: str, name: str, cell: str, column: Sequence[str], *, comma: bool) -> DataError | None:
        """Return the error for a cell in a column, or None if the cell can be used."""
        if is_missing(cell):
            count = sum(map(is_missing, column))
            return None if self.columns.imputes else missing_value(f"{where}: {cell!r} is a missing value", name, count)
        value = number_in(cell, comma=comma)
        if value is not None and abs(value) <= FLOAT32_MAX:
            return None
        is_category = name in self.columns.categories or (
            len(self.names) > 1 and all(number_in(c, comma=comma) is None for c in column if not is_missing(c))
        )
        if is_category:
            return None
        few = value is None and 2 * len(set(column)) <= len(column)
        remedy = "name a column of groups in group-column; " if self._lacks_groups and few else ""
        return DataError(
            f"{where}: {cell!r}; only finite numbers in the range of float32 are allowed ({remedy}list "
            "categorical columns in categories; name a text column `text`, or list it as the only column in "
            "input-columns)",
            "not-a-number",
            name,
        )


def _content(
    table: _Csv,
    cells: _Cells,
    features: Sequence[int],
    samples: tuple[np.ndarray, Categories] | None,
) -> Content:
    """Return the content of a table; ``samples`` are its parsed inputs, or None if ``cells`` contains numbers."""
    path, header, assigned = table.path, table.header, table.assigned
    labels, name_errors = table.values(cells) if table.targets else _labels(table, cells)
    groups = None
    if assigned.group is not None:
        groups, group_errors = _names(cells, assigned.group, "group")
        name_errors |= group_errors
    patients = None
    if assigned.split is not None:
        patients, patient_errors = _names(cells, assigned.split, "patient")
        name_errors |= patient_errors
    if name_errors:
        raise table.problem(name_errors)
    attributes: dict[str, Any] = {"target": table.columns.target}
    label_names = [header[index] for index in assigned.labels]
    attributes["label_columns"] = tuple(label_names)
    if table.targets:
        y, attributes["class_names"] = as_targets(np.array(labels), table.columns.target, str(path), label_names)
    else:
        y = as_labels(np.array(labels), str(path))
    numbers, group_names = (None, ()) if groups is None else numbered_groups(np.array(groups))
    attributes |= {"groups": numbers, "group_names": group_names}
    attributes["split_groups"] = None if patients is None else numbered_groups(np.array(patients))[0]
    notes, shown = list(assigned.notes), ", ".join(label_names)
    if not features:
        text = assigned.inputs[0]
        _LOG.info("%s: column %s is the text, %s the label", path.name, header[text], shown)
        texts = cells[str(text)].tolist()
        return Content(path, "text", texts, y, read_notes=tuple(notes), **attributes)
    _LOG.info("%s: %s columns are features, %s the label", path.name, len(features), shown)
    names = tuple(table.names)
    notes += name_notes(names, header)
    if samples is None:
        notes += _lost_digits(path, header, cells, features, table.separator)
        x, categories = np.column_stack([cells[str(index)] for index in features]), Categories(())
    else:
        x, categories = samples
    notes += column_notes(x, categories, names)
    if not (categories or np.isnan(x).any()):
        x, precision = as_features(x, str(path))
        notes += precision
    return Content(path, "features", x, y, columns=names, read_notes=tuple(notes), categories=categories, **attributes)


def _lines(path: Path, encoding: str) -> Iterator[str]:
    """Yield the lines of a text file, or raise :class:`DataError` if a line is too long for a table."""
    check_fits(_GROWTH * check_regular(path), str(path))
    try:
        with path.open(encoding=encoding, newline="") as file:
            for number in itertools.count(1):
                line = file.readline(_MAX_LINE)
                if "\0" in line:
                    raise DataError(f"{path}: line {number} contains a NUL byte; it is not a text file")
                if len(line) == _MAX_LINE:
                    raise DataError(f"{path}: line {number} is longer than {_MAX_LINE:,} characters; it is not a table")
                if not line:
                    return
                yield line
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: not a text file in {encoding} ({error})") from error


def separator_of(path: Path, setting: str) -> str:
    """Return the separator in the setting, or the separator that fits a file.

    A separator fits if it splits the first two rows into the same number of columns, at least two. If none fits, the
    function returns the separator that splits the header into the most columns, so that the caller can report the
    error. Raise :class:`DataError` if several separators fit.
    """
    if setting != "auto":
        return SEPARATORS[setting]
    fitting, columns = [], {",": 1}
    for name, separator in SEPARATORS.items():
        try:
            lengths = [len(row) for _, row in itertools.islice(rows_of(path, delimiter=separator), 2)]
        except DataError:  # with the wrong separator, a line may be too long for a cell
            continue
        columns[separator] = max([1, *lengths[:1]])
        if len(lengths) == 2 and lengths[0] == lengths[1] > 1:
            fitting.append(name)
    if len(fitting) > 1:
        raise DataError(
            f"{path}: several separators fit the header and the first row: {', '.join(fitting)}; set separator"
        )
    return SEPARATORS[fitting[0]] if fitting else max(columns, key=columns.__getitem__)


def _header(path: Path, separator: str) -> list[str]:
    rows = rows_of(path, delimiter=separator)
    header = [label_name(title) for title in next(rows, (0, []))[1]]
    if len(header) < 2:
        raise DataError(f"{path}: the header is {header}; a table needs a header row with at least two columns")
    if all(number_in(title) is not None for title in header):
        raise DataError(
            f"{path}: the first row contains only numbers; a table needs a header row with the names of the columns"
        )
    titles: dict[str, str] = {}
    for title in header:
        key = title.lower() if title.lower() in _SPECIAL else title
        if key in titles:
            raise DataError(f"{path}: columns named {titles[key]!r} and {title!r}; column names must be unique")
        titles[key] = title
    if next(rows, None) is None:
        raise DataError(f"{path}: no rows below the header; at least one is needed")
    return header


def _labels(table: _Csv, cells: _Cells) -> tuple[list[Any] | np.ndarray, dict[tuple[int, str], str]]:
    """Return the labels of the rows, and any errors, keyed by column and cell."""
    label, rule, comma = table.assigned.label, table.assigned.rule, table.labels_have_commas(cells)
    values = {cell: number_in(cell, comma=comma) for cell in set(cells[str(label)])}
    if rule is None:
        labels, errors = _names(cells, label, "label")
        if decimals := {
            (label, cell): f"{cell.strip()!r}; labels are whole numbers or strings; to predict numbers, set "
            "task=regression"
            for cell in decimals_in(values, comma=comma)
        }:
            return labels, decimals  # rather than the missing labels, because the task is probably another one
        return labels, errors
    errors = {
        (label, cell): "the label is missing"
        if is_missing(cell)
        else f"{cell.strip()!r}; the rule in label-column needs numbers"
        for cell, value in values.items()
        if value is None or not np.isfinite(value)
    }
    return rule(np.array([values[cell] for cell in cells[str(label)]], np.float64)), errors


def _names(cells: _Cells, column: int, role: str) -> tuple[list[str], dict[tuple[int, str], str]]:
    """Return the names in a column, and any errors, keyed by column and cell."""
    name_by_cell = {cell: written_label(cell) for cell in set(cells[str(column)])}
    errors = {(column, cell): f"the {role} is missing" for cell, name in name_by_cell.items() if not name}
    return [name_by_cell[cell] for cell in cells[str(column)]], errors


def _lost_digits(
    path: Path,
    header: Sequence[str],
    cells: _Cells,
    features: Sequence[int],
    separator: str,
) -> list[str]:
    """Return a warning if cells differ only in digits that float64 cannot represent."""
    spread = {index: np.ptp(cells[str(index)]) for index in features}
    coarse = {
        index: set[str]() for index in features if np.spacing(np.abs(cells[str(index)]).max()) > LOST * spread[index]
    }
    if not coarse:
        return []
    for _, row in itertools.islice(rows_of(path, delimiter=separator), 1, None):
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
            f"float64 cannot distinguish some values of these columns: {', '.join(lossy_columns)}; subtract a common "
            f"offset"
        )
    ]
