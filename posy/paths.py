"""Handle paths from users. Posy treats an invalid path as missing, so such a path never causes a traceback."""

import hashlib
import os
from pathlib import Path

from posy.settings import SettingsError, quoted

START_DIRECTORY = "POSY_START_DIRECTORY"
"""Environment variable that holds a run's start directory, for processes that change their working directory."""


def expanded(text: str) -> Path:
    """Return a path with ``~`` expanded. Raise :class:`SettingsError` if the user named after ``~`` does not exist."""
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise SettingsError(f"the path {quoted(text)}: the user {Path(text).parts[0][1:]} does not exist") from None


def absolute(text: str) -> Path:
    """Resolve a path from the settings, including links, relative to the directory in which the run was started."""
    path = Path(os.environ.get(START_DIRECTORY, Path.cwd())) / expanded(text)
    try:
        return path.resolve()
    except (OSError, RuntimeError, ValueError):  # the path is circular or invalid
        return path.absolute()


def flwr_home() -> Path:
    """Return the folder in which Flower stores its configuration and installed apps."""
    return Path(os.environ.get("FLWR_HOME") or Path.home() / ".flwr")


def exists(path: Path) -> bool:
    """Return whether a path exists. If a name is too long, return False instead of raising pathlib's error."""
    try:
        return path.exists()
    except OSError:
        return False


def is_file(path: Path) -> bool:
    """Return whether a path is a file. If a name is too long, return False instead of raising pathlib's error."""
    return exists(path) and path.is_file()


def found_at(named: str, folder: str) -> Path | None:
    """Return the file at a path, or the file of the same name in a folder, or None if neither exists."""
    path = Path(named)
    return next((candidate for candidate in (path, Path(folder, path.name)) if is_file(candidate)), None)


def sha256_of(path: Path) -> str:
    """Return the SHA-256 hash of a file in hexadecimal. Raise :class:`SettingsError` if the file cannot be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise SettingsError(f"the file {quoted(str(path))} cannot be read: {error.strerror}") from error
