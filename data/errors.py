"""What is raised when the data on disk is not what it should be."""

from collections.abc import Iterable
from pathlib import Path


class DataError(ValueError):
    """Data is missing, damaged, or holds values that cannot be used."""


def missing(name: str, looked_for: Iterable[Path], what: str) -> DataError:
    """Return the error for data that was not found: the paths looked for, and what belongs there."""
    paths = "\n".join(f"  {path.absolute()}" for path in looked_for)
    return DataError(f"the data of {name} was not found; looked for\n{paths}\n{what}")
