"""Parse the cells of a table's columns: numbers, categories and missing values."""

import re
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from posy.data.encoding import Categories
from posy.data.errors import DataError, Note
from posy.data.labels import written_label
from posy.data.values import FLOAT32_MAX

MISSING = ("", "?", "-", "na", "n/a", "nan", "null", "none")
"""Cells that denote a missing value, in lower case."""
SEPARATORS = {"comma": ",", "semicolon": ";", "tab": "\t", "bar": "|"}
"""The separators of columns, by the value of the setting `separator`."""
_DECIMAL_COMMA = re.compile(r"[+-]?(\d+,\d*|,?\d+)([eE][+-]?\d+)?")
_THOUSANDS = re.compile(r"[+-]?[1-9]\d{0,2}(,\d{3})+")
_MIN_IDENTIFIERS, _MIN_NAMES, _IDENTIFIER_SHARE = 50, 10, 0.99
"""Minimum number of values in a column of identifiers (whole numbers, strings), and minimum share of distinct
values."""
_SHOWN = 20  # maximum number of columns that a note lists


def is_missing(cell: str) -> bool:
    """Return whether a cell denotes a missing value."""
    return cell.strip().lower() in MISSING


def number_in(cell: str, *, comma: bool = False) -> float | None:
    """Return the number in a cell, or None. With ``comma``, the decimal mark is a comma instead of a point."""
    if comma:
        if "." in cell:
            return None
        cell = cell.replace(",", ".", 1)
    try:
        return float(cell) if cell.isascii() and "_" not in cell else None
    except ValueError:
        return None


def decimals_in(cells: Collection[str], *, comma: bool = False) -> set[str]:
    """Return the cells with decimal numbers if all cells except missing values contain numbers, else no cell."""
    numbers = {cell: number_in(cell, comma=comma) for cell in cells if not is_missing(cell)}
    if None in numbers.values():
        return set()
    return {cell for cell, number in numbers.items() if number is not None and not number.is_integer()}


def has_decimal_commas(cells: Mapping[str, Sequence[str]], separator: str, decimal: str, where: str) -> bool:
    """Return whether the columns' numbers have decimal commas.

    Parameters
    ----------
    cells : mapping
        The cells of each column, keyed by the name of the column.
    separator, decimal : str
        The separator of the columns, and the setting `decimal`.
    where : str
        The name of the data, for messages.

    Raises
    ------
    DataError
        If it is unclear whether commas are decimal commas or thousands separators, or if other columns have decimal
        points.
    """
    if decimal != "auto" or separator == ",":
        return decimal == "comma"
    commas, points = [], []
    for name, column in cells.items():
        texts = {cell.strip() for cell in column if not is_missing(cell)}
        with_comma = [text for text in texts if "," in text]
        if with_comma and all(map(_DECIMAL_COMMA.fullmatch, texts)):
            if all(map(_THOUSANDS.fullmatch, with_comma)):
                raise DataError(
                    f"{where}: column {name}: {min(with_comma)!r} is ambiguous: the comma may be a decimal comma or a "
                    "thousands separator; set decimal=comma, or remove the commas",
                    "not-a-number",
                    name,
                )
            commas.append(name)
        elif any("." in text for text in texts) and all(number_in(text) is not None for text in texts):
            points.append(name)
    if commas and points:
        raise DataError(
            f"{where}: column {commas[0]} has decimal commas, and column {points[0]} has decimal points; use one "
            "of them, or set decimal",
            "not-a-number",
            points[0],
        )
    return bool(commas)


def parse_columns(
    cells: Mapping[str, Sequence[str]], as_categories: Sequence[str], *, comma: bool
) -> tuple[np.ndarray, Categories] | None:
    """Return the columns of a table, or None if a cell cannot be used.

    The result contains float64 ``(N, K)``, in which NaN denotes a missing value, and the names of the categories in
    each column, whose values are indices of these names. A column is numeric if all of its values are numbers. It is
    categorical if none of them is a number, or if ``as_categories`` names it.
    """
    columns: list[np.ndarray] = []
    categories: list[tuple[str, ...] | None] = []
    for name, column in cells.items():
        texts = {cell for cell in column if not is_missing(cell)}
        numbers = {text: number_in(text, comma=comma) for text in texts}
        is_number = [number is not None for number in numbers.values()]
        values: dict[str, float] = {}
        names: tuple[str, ...] | None = None
        if name in as_categories or (texts and not any(is_number)):
            names = tuple(sorted({category_in(text) for text in texts}))
            codes = {category: float(code) for code, category in enumerate(names)}
            values = {text: codes[category_in(text)] for text in texts}
        elif not all(is_number) or not all(abs(number or 0.0) <= FLOAT32_MAX for number in numbers.values()):
            return None
        else:
            values = {text: number for text, number in numbers.items() if number is not None}
        columns.append(np.array([values.get(cell, np.nan) for cell in column], np.float64))
        categories.append(names)
    return np.column_stack(columns), tuple(categories) if any(c is not None for c in categories) else ()


def category_in(cell: str) -> str:
    """Return the name of the category in a cell. A whole number has the same name in every notation."""
    return written_label(cell)


def column_notes(x: np.ndarray, categories: Categories, names: Sequence[str]) -> list[str]:
    """Return notes on missing values, and on columns that are constant or look like identifiers."""
    notes: list[str] = []
    gaps, constant, identifiers = [], [], []
    for number, name in enumerate(names):
        values = x[:, number]
        observed = values[~np.isnan(values)]
        if count := len(values) - len(observed):
            gaps.append(f"{name} {count}")
        if len(values) > 1 and (not len(observed) or observed.min() == observed.max()):
            constant.append(name)
        is_category = bool(categories and categories[number] is not None)
        if (
            len(observed) >= (_MIN_NAMES if is_category else _MIN_IDENTIFIERS)
            and bool((observed == np.floor(observed)).all())
            and all(len(np.unique(part)) >= _IDENTIFIER_SHARE * len(part) for part in (observed[:1000], observed))
        ):
            identifiers.append(name)
    if gaps:
        notes.append(Note(f"missing values per column, which are imputed: {_listed(gaps)}", ""))
    if constant:
        notes.append(Note(f"columns with the same value in all rows: {_listed(constant)}", ""))
    if identifiers:
        notes.append(
            Note(f"columns that may be identifiers, because few of their values repeat: {_listed(identifiers)}")
        )
    return notes


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + " …" * (len(names) > _SHOWN)
