"""Reading .npz files: straight into place, and without NumPy's own unpickling."""

import lzma
import math
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np

from posy.data.errors import DataError
from posy.data.files import check_fits, check_regular

_CHUNK = 1 << 22
_MAX_RATIO, _MAX_SQUEEZED = 100, 1 << 30
"""An array of more bytes than the second that compression has made smaller by more than the first is refused."""
_DAMAGE = (
    zipfile.BadZipFile,
    zlib.error,
    lzma.LZMAError,
    struct.error,
    EOFError,
    OSError,
    ValueError,
    KeyError,
    RuntimeError,  # encrypted, or (RecursionError) a header without end
    OverflowError,
    NotImplementedError,
)


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
        If it is no regular file or is damaged, if it holds Python objects and ``unpickle`` is ``None``, or if an
        array claims more than the file holds, more than fits into memory, or a compression that no data has.
    """

    def __init__(self, path: Path, unpickle: Callable[[IO[bytes]], Any] | None = None) -> None:
        self.path = path
        self._unpickle = unpickle
        check_regular(path)
        with self._damage(), zipfile.ZipFile(path) as archive:
            self._members = {member.filename: member for member in archive.infolist()}
        self.names = tuple(name.removesuffix(".npy") for name in self._members)

    def shape(self, name: str) -> tuple[tuple[int, ...], np.dtype[Any]]:
        """Return shape and dtype of an array without reading it."""
        with self._open(name) as stream:
            shape, _, dtype = self._header(stream, name)
        return shape, dtype

    def read(self, name: str) -> Any:
        """Return one array (or what ``unpickle`` makes of an array of objects)."""
        with self._open(name) as stream:
            shape, fortran, dtype = self._header(stream, name)
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
        check_fits(sum(math.prod(shape) for shape, _ in kinds.values()) * dtype.itemsize, str(self.path))
        with self._damage():
            whole = np.empty((sum(shape[0] for shape, _ in kinds.values()), *inner), dtype)
        start = 0
        for name, (shape, _) in kinds.items():
            with self._open(name) as stream:
                _, fortran, _ = self._header(stream, name)
                part = whole[start : start + shape[0]]
                if fortran or dtype.hasobject:
                    part[:] = self.read(name)
                else:
                    _fill(stream, part)
            start += shape[0]
        return whole

    def _header(self, stream: IO[bytes], name: str) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
        """Read the header of an array, and check what it claims."""
        version = np.lib.format.read_magic(stream)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        try:
            shape, fortran, dtype = read(stream)
        except Exception as error:  # it is parsed as Python, and a crooked one can fail in any way
            raise ValueError(f"array {name}: {error!s:.200}") from error
        if any(type(length) is not int or length < 0 for length in shape):
            raise ValueError(f"array {name}: of the shape {shape}")
        member = self._members[f"{name}.npy"]
        size = member.file_size if dtype.hasobject else math.prod(shape) * dtype.itemsize
        check_fits(size, str(self.path))
        if size > member.file_size:
            raise EOFError(f"array {name}: {size - member.file_size} bytes are missing, or more")
        if member.file_size > max(_MAX_SQUEEZED, _MAX_RATIO * member.compress_size):
            raise DataError(
                f"{self.path}: array {name} has {member.file_size / 1e9:.3g} GB, compressed to "
                f"{member.compress_size / 1e6:.3g} MB, as no data can be; if it is data, store it with numpy.savez"
            )
        return shape, fortran, dtype

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
        except _DAMAGE as error:
            raise DataError(f"{self.path}: not a whole .npz file ({error}); write it again with numpy.savez") from error


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
