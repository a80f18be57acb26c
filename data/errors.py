"""Errors and notes about data, and the messages that other machines may receive about them."""

from collections.abc import Sequence
from pathlib import Path

from posy.paths import exists

CODES = {
    "unusable-data": "its data cannot be used",
    "no-data": "its data is missing",
    "unreadable-images": "image files cannot be read",
    "missing-value": "a value is missing",
    "not-a-number": "a cell is not a finite number in the range of float32",
    "wrong-label": "a label is missing, or is neither a whole number nor a string",
    "wrong-target": "its labels do not suit the run's task",
    "missing-column": "a column that the run or the policy names does not exist",
    "label-column": "the run uses the site's label column for another purpose",
    "other-columns": "its columns differ from the run's columns",
    "other-kind": "the kind of its samples differs from the run's kind",
    "other-shape": "the shape of its samples differs from the run's shape",
    "other-classes": "it has labels that are not classes of the run",
    "extreme-value": "a feature may exceed the range of float32 after standardisation",
    "long-label": "a label or a category is too long for a masked sum",
    "no-encoder": "its table has categories or missing values, but the run's settings do not contain an encoder",
    "no-folds": "its data comes with a test set, so the run cannot use folds",
    "too-few-rows": "it has too few rows",
    "changed-data": "its data has changed during the run; start a new run",
}
"""The error messages that other machines receive, keyed by code."""


class DataError(ValueError):
    """Data is missing or damaged, or contains values that cannot be used.

    Parameters
    ----------
    message : str
        The message for the machine that stores the data. It may contain paths, labels and cells.
    code : str
        The key in :data:`CODES` of the error that other machines receive.
    column : str
        The name of the column with the error.
    count : int
        Number of rows or files with the error; 0 if it is unknown.
    """

    def __init__(self, message: str, code: str = "unusable-data", column: str = "", count: int = 0) -> None:
        super().__init__(message)
        self.code, self.column, self.count = code, column, count

    def shared(self, min_rows: int) -> str:
        """Return the message for other machines, which does not reveal an exact count below ``min_rows``."""
        column = f", column {self.column}" if self.column else ""
        counted = str(self.count) if self.count >= min_rows else f"below {min_rows}"
        count = f", count {counted}" if self.count else ""
        return f"{CODES[self.code]} ({self.code}{column}{count}); see the node's log for details"


class Note(str):
    """A warning about data. ``shared`` is the text for other machines, which receive nothing if it is empty."""

    __slots__ = ("shared",)
    shared: str

    def __new__(cls, text: str, shared: str | None = None) -> "Note":
        """Return a note. By default, other machines receive its full text."""
        note = super().__new__(cls, text)
        note.shared = text if shared is None else shared
        return note


def shared_notes(notes: Sequence[str]) -> list[str]:
    """Return the texts that other machines may receive."""
    return [note.shared for note in notes if isinstance(note, Note) and note.shared]


def check_data_path(path: Path) -> None:
    """Raise :class:`DataError` if the path of a site's data is relative or does not exist."""
    if not path.is_absolute():
        raise DataError(f"data = {str(path)!r} in the node config: it must be an absolute path", "no-data")
    if not exists(path):
        raise DataError(f"{path}: this file or directory does not exist (data in the node config)", "no-data")
