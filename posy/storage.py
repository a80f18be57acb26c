"""Write files atomically, by renaming a temporary file, and verify a checksum of the content when reading them."""

import fcntl
import json
import math
import os
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import safetensors.numpy
from safetensors import SafetensorError

Arrays = Mapping[str, npt.NDArray[Any]]
load_arrays = safetensors.numpy.load_file
"""A function that reads the arrays in a ``.safetensors`` file, including a file written by another program."""
CHECKSUMS = "crc32"


class DamagedFileError(ValueError):
    """The content of a file has changed since it was written."""


def replace(path: Path, write: Callable[[Path], object], *, durable: bool = False) -> None:
    """Create a temporary file with ``write``, then rename it to ``path``, so that no process reads an incomplete file.

    If ``durable`` is true, wait until the file is on the disk, so that it survives a power failure.
    """
    temporary = path.with_name(f".{path.name}.part")
    try:
        write(temporary)
        if durable:
            sync(temporary)
        temporary.replace(path)
        if durable:
            sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Wait until the content of a file, or the entries of a directory, have been written to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def append(path: Path, text: str) -> None:
    """Append text to a file, and wait until the text is on the disk."""
    with path.open("a", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on a file, which is created if necessary. Wait until other processes release the lock."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)  # any user who can read the file could lock it
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
    finally:
        os.close(file)


def lock(path: Path) -> int:
    """Lock a directory, and return the descriptor that holds the lock.

    The lock is released once this process and all processes that inherit the descriptor have closed it. Raise
    :class:`BlockingIOError` if another process has locked the directory.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def is_locked(path: Path) -> bool:
    """Return whether a process has locked a directory."""
    try:
        os.close(lock(path))
    except BlockingIOError:
        return True
    return False


def write_arrays(
    path: Path, arrays: Arrays, metadata: Mapping[str, str] | None = None, *, durable: bool = False
) -> None:
    """Write arrays to a ``.safetensors`` file, with the checksum of each array in the file's metadata."""
    # safetensors ignores strides: copy arrays that are not in C order.
    dense = {name: np.asarray(array, order="C") for name, array in arrays.items()}
    sums = json.dumps({name: _checksum(array) for name, array in dense.items()})
    content = {**(metadata or {}), CHECKSUMS: sums}

    def save(temporary: Path) -> None:
        try:
            safetensors.numpy.save_file(dense, temporary, content)
        except SafetensorError as error:  # for example because the disk is full
            raise OSError(f"{path} cannot be written: {error}") from error

    replace(path, save, durable=durable)


def read_arrays(path: Path) -> tuple[dict[str, npt.NDArray[Any]], dict[str, str]]:
    """Return the memory-mapped arrays and the metadata of a file from :func:`write_arrays`.

    Changes to the arrays do not affect the file.

    Raises
    ------
    DamagedFileError
        If the file is truncated or its content has changed.
    FileNotFoundError
        If the file does not exist.
    """
    with _reading(path):
        # Among safetensors' frameworks, only "pt" maps the file into memory. "np" copies every array.
        with safetensors.safe_open(path, "pt") as file:
            arrays = {name: file.get_tensor(name).numpy() for name in file.keys()}  # noqa: SIM118 - not a mapping
            metadata: dict[str, str] = file.metadata()
        sums = json.loads(metadata.pop(CHECKSUMS))
        actual = {name: _checksum(array) for name, array in arrays.items()}
        wrong = sorted(name for name in actual.keys() | sums.keys() if sums.get(name) != actual.get(name))
    if wrong:
        raise DamagedFileError(f"{path} is damaged: the checksum of {', '.join(wrong)} is wrong")
    return arrays, metadata


def read_metadata(path: Path) -> dict[str, str]:
    """Return the metadata of a ``.safetensors`` file. Raise the same errors as :func:`read_arrays`."""
    with _reading(path), safetensors.safe_open(path, "np") as file:
        return dict(file.metadata() or {})


def write_json(path: Path, content: Mapping[str, Any], *, durable: bool = False) -> None:
    """Write a JSON object with its checksum."""
    text = json.dumps({CHECKSUMS: _checksum_of_json(content), "content": content}, ensure_ascii=False) + "\n"
    replace(path, lambda temporary: temporary.write_text(text, encoding="utf-8"), durable=durable)


def read_json(path: Path) -> dict[str, Any]:
    """Return the content of a file from :func:`write_json`. Raise the same errors as :func:`read_arrays`."""
    with _reading(path):
        document = json.loads(path.read_text(encoding="utf-8"))
        content: dict[str, Any] = document["content"]
        undamaged = document[CHECKSUMS] == _checksum_of_json(content)
    if not undamaged:
        raise DamagedFileError(f"{path} is damaged: its checksum is wrong")
    return content


def plain(value: Any) -> Any:
    """Convert a value to types that JSON and YAML support: no NumPy types, no tuples, and None for NaN and infinity."""
    if isinstance(value, (np.ndarray, np.generic)):
        value = value.tolist()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return value


def is_folder_name(name: str) -> bool:
    """Return whether a string is a plain file or folder name that cannot refer to another folder."""
    return (
        name not in ("", ".", "..")
        and name == name.strip()
        and name.isprintable()
        and not set(name) & set("/\\")
        and len(name.encode()) <= 200
    )


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Re-raise errors caused by a damaged file as :class:`DamagedFileError`."""
    try:
        yield
    except FileNotFoundError:
        raise
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError, SafetensorError) as error:
        raise DamagedFileError(f"{path} is damaged: {error!r}") from error


def _checksum(array: npt.NDArray[Any]) -> int:
    kind = zlib.crc32(f"{array.dtype.str} {array.shape}".encode())
    return zlib.crc32(array.reshape(-1).view(np.uint8).data, kind)


def _checksum_of_json(content: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())
