"""Reading .npz files: straight into place, and without NumPy's own unpickling."""

import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np

from data.errors import DataError

_CHUNK = 1 << 22


class NpzFile:
    """The arrays of an .npz file.

    Parameters
    ----------
    path : Path
        The file.
    unpickle : callable or None
        What reads an array of objects from its pickle stream; ``None`` refuses such arrays.

    Raises
    ------
    DataError
        If the file is damaged, or if it holds Python objects and ``unpickle`` is ``None``.
    """

    def __init__(self, path: Path, unpickle: Callable[[IO[bytes]], Any] | None = None) -> None:
        self.path = path
        self._unpickle = unpickle
        with self._damage(), zipfile.ZipFile(path) as archive:
            self.names = tuple(name.removesuffix(".npy") for name in archive.namelist())

    def shape(self, name: str) -> tuple[tuple[int, ...], np.dtype[Any]]:
        """Return shape and dtype of an array without reading it."""
        with self._open(name) as stream:
            shape, _, dtype = _header(stream)
        return shape, dtype

    def read(self, name: str) -> Any:
        """Return one array (or what ``unpickle`` makes of an array of objects)."""
        with self._open(name) as stream:
            shape, fortran, dtype = _header(stream)
            if dtype.hasobject:
                if self._unpickle is None:
                    raise DataError(f"{self.path}: array {name} holds Python objects; only plain numbers are read")
                return self._unpickle(stream)
            array = np.empty(shape[::-1] if fortran else shape, dtype)
            _fill(stream, array)
            return array.T if fortran else array

    def pooled(self, names: tuple[str, ...]) -> np.ndarray:
        """Return arrays joined along their first axis, read into one block of memory."""
        kinds = {name: self.shape(name) for name in names}
        shapes = {(shape[1:], dtype) for shape, dtype in kinds.values() if shape}
        if len(shapes) != 1 or len(names) == 1:
            parts = [self.read(name) for name in names]
            if any(part.ndim == 0 or part.shape[1:] != parts[0].shape[1:] for part in parts):
                listed = ", ".join(f"{name} {part.shape}" for name, part in zip(names, parts, strict=True))
                raise DataError(f"{self.path}: samples of unequal shape: {listed}")
            return np.concatenate(parts)
        inner, dtype = shapes.pop()
        with self._damage():
            whole = np.empty((sum(shape[0] for shape, _ in kinds.values()), *inner), dtype)
        start = 0
        for name, (shape, _) in kinds.items():
            with self._open(name) as stream:
                _, fortran, _ = _header(stream)
                part = whole[start : start + shape[0]]
                if fortran or dtype.hasobject:
                    part[:] = self.read(name)
                else:
                    _fill(stream, part)
            start += shape[0]
        return whole

    @contextmanager
    def _open(self, name: str) -> Iterator[IO[bytes]]:
        with self._damage(), zipfile.ZipFile(self.path) as archive, archive.open(f"{name}.npy") as stream:
            yield stream

    @contextmanager
    def _damage(self) -> Iterator[None]:
        """Turn what a damaged file makes of zipfile and NumPy into one error."""
        try:
            yield
        except DataError:
            raise
        except MemoryError as error:  # perhaps of a header that claims what is not there
            raise DataError(f"{self.path}: more than fits into memory ({error})") from error
        except (zipfile.BadZipFile, zlib.error, EOFError, OSError, ValueError, KeyError, NotImplementedError) as error:
            raise DataError(f"{self.path}: not a whole .npz file ({error}); write it again with numpy.savez") from error


def _header(stream: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    version = np.lib.format.read_magic(stream)
    if version == (1, 0):
        return np.lib.format.read_array_header_1_0(stream)
    return np.lib.format.read_array_header_2_0(stream)


def _fill(stream: IO[bytes], array: np.ndarray) -> None:
    """Read the bytes of a C-contiguous array into it."""
    target = array.reshape(-1).view(np.uint8).data
    done = 0
    while done < len(target):
        count = stream.readinto(target[done : done + _CHUNK])  # type: ignore[attr-defined]
        if not count:
            raise EOFError(f"{len(target) - done} bytes are missing")
        done += count
    stream.read(1)  # reaching the end makes zipfile check the checksum
