"""Paths as people write them: an impossible path counts as one that does not exist, and is never a traceback."""

import hashlib
import os
from pathlib import Path

from posy.settings import SettingsError, shown

START_DIRECTORY = "POSY_START_DIRECTORY"
"""Environment variable with the directory that a run was started in, where its process has left that."""


def expanded(text: str) -> Path:
    """Return a path with ``~`` replaced by the home it means; raise :class:`SettingsError` if there is no such user."""
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise SettingsError(f"the path {shown(text)}: there is no user {Path(text).parts[0][1:]}") from None


def absolute(text: str) -> Path:
    """Return a path from the settings, without links in it; a relative one starts where the run was started."""
    path = Path(os.environ.get(START_DIRECTORY, Path.cwd())) / expanded(text)
    try:
        return path.resolve()
    except (OSError, RuntimeError, ValueError):  # it is circular or impossible
        return path.absolute()


def exists(path: Path) -> bool:
    """Tell whether a path exists; one with a name that is too long does not, where pathlib raises."""
    try:
        return path.exists()
    except OSError:
        return False


def is_file(path: Path) -> bool:
    """Tell whether a path is a file; one with a name that is too long is not, where pathlib raises."""
    return exists(path) and path.is_file()


def found_at(named: str, folder: str) -> Path | None:
    """Return the file that a path names, or one of its name in a folder; None if there is neither."""
    path = Path(named)
    return next((place for place in (path, Path(folder, path.name)) if is_file(place)), None)


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal; raise :class:`SettingsError` if it cannot be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise SettingsError(f"the file {shown(str(path))} cannot be read: {error.strerror}") from error
