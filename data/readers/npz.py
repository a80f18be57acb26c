"""Read the arrays in .npz files directly into preallocated memory, without a copy.

NumPy's reader would trust the sizes in a file's headers, and joining its arrays would require a copy.
"""

import lzma
import math
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np

from posy.data.errors import DataError
from posy.data.files import check_fits, check_regular

_CHUNK = 1 << 22
_MAX_RATIO = 100  # maximum compression ratio for arrays of more than _MAX_COMPRESSED bytes; real data compresses less
_MAX_COMPRESSED = 1 << 30
_DAMAGE = (
    zipfile.BadZipFile,
    zlib.error,
    lzma.LZMAError,
    struct.error,
    EOFError,
    OSError,
    ValueError,
    KeyError,
    RuntimeError,  # encryption, a deeply nested header (RecursionError), or rare compression (NotImplementedError)
    OverflowError,
)


class NpzFile:
    """The arrays in an .npz file.

    ``unpickle`` receives an object array's pickle stream and the length of this stream, and returns the content.

    Raises
    ------
    DataError
        If the file is damaged or not a regular file, or contains Python objects although ``unpickle`` is ``None``. Posy
        also raises the error if an array's header claims more bytes than the file contains or than fit into memory, or
        if the array's compression ratio is implausible.
    """

    def __init__(self, path: Path, unpickle: Callable[[IO[bytes], int], Any] | None = None) -> None:
        self.path = path
        self._unpickle = unpickle
        check_regular(path)
        with self._damage(), zipfile.ZipFile(path) as archive:
            self._members = {member.filename: member for member in archive.infolist()}
        self.names = tuple(name.removesuffix(".npy") for name in self._members)

    def shape(self, name: str) -> tuple[tuple[int, ...], np.dtype[Any]]:
        """Return an array's shape and dtype without reading the array."""
        with self._open(name) as stream:
            shape, _, dtype = self._header(stream, name)
        return shape, dtype

    def read(self, name: str, out: np.ndarray | None = None) -> Any:
        """Return an array, reading it into ``out`` if set. For an object array, return the result of ``unpickle``."""
        with self._open(name) as stream:
            shape, fortran, dtype = self._header(stream, name)
            if dtype.hasobject:
                if self._unpickle is None:
                    raise DataError(f"{self.path}: array {name} holds Python objects; only plain numbers are read")
                return self._unpickle(stream, self._members[f"{name}.npy"].file_size)
            array = np.empty(shape[::-1] if fortran else shape, dtype) if out is None or fortran else out
            _fill(stream, array)
        if not fortran:
            return array
        if out is None:
            return array.T
        out[:] = array.T
        return out

    def pooled(self, names: Sequence[str]) -> np.ndarray:
        """Return arrays joined along their first axis. If their types agree, read them into one block of memory."""
        shapes, dtypes = zip(*map(self.shape, names), strict=True)
        if len({shape[1:] for shape in shapes}) > 1:
            text = ", ".join(f"{name} {shape}" for name, shape in zip(names, shapes, strict=True))
            raise DataError(f"{self.path}: samples of unequal shape: {text}")
        if len(set(dtypes)) > 1:
            return np.concatenate([self.read(name) for name in names])
        lengths = [shape[0] for shape in shapes]
        check_fits(sum(map(math.prod, shapes)) * dtypes[0].itemsize, str(self.path))
        pool = np.empty((sum(lengths), *shapes[0][1:]), dtypes[0])
        for name, part in zip(names, np.split(pool, np.cumsum(lengths)[:-1]), strict=True):
            self.read(name, part)
        return pool

    def _header(self, stream: IO[bytes], name: str) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
        """Return an array's shape, order and dtype after checking its size against the file and the free memory."""
        version = np.lib.format.read_magic(stream)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        try:
            shape, fortran, dtype = read(stream)
        except Exception as error:  # NumPy parses the header as Python code, so a malformed one can raise any error
            raise ValueError(f"array {name}: {error!s:.200}") from error
        if any(type(length) is not int or length < 0 for length in shape):
            raise ValueError(f"array {name}: invalid shape {shape}")
        member = self._members[f"{name}.npy"]
        size = member.file_size if dtype.hasobject else math.prod(shape) * dtype.itemsize
        check_fits(size, str(self.path))
        if size > member.file_size:
            raise EOFError(f"array {name}: at least {size - member.file_size} bytes are missing")
        if member.file_size > max(_MAX_COMPRESSED, _MAX_RATIO * member.compress_size):
            raise DataError(
                f"{self.path}: array {name} has {member.file_size / 1e9:.3g} GB, compressed to "
                f"{member.compress_size / 1e6:.3g} MB, which is implausible for real data; "
                "if the array is correct, store it with numpy.savez"
            )
        return shape, fortran, dtype

    @contextmanager
    def _open(self, name: str) -> Iterator[IO[bytes]]:
        with self._damage(), zipfile.ZipFile(self.path) as archive, archive.open(f"{name}.npy") as stream:
            yield stream

    @contextmanager
    def _damage(self) -> Iterator[None]:
        """Turn the errors that zipfile and NumPy raise for a damaged file into :class:`DataError`."""
        try:
            yield
        except DataError:
            raise
        except MemoryError as error:  # for example, if a header claims more than the file contains
            raise DataError(f"{self.path}: does not fit into memory ({error})") from error
        except _DAMAGE as error:
            raise DataError(f"{self.path}: not a complete .npz file ({error}); rewrite it with numpy.savez") from error


def _fill(stream: IO[bytes], array: np.ndarray) -> None:
    """Fill a C-contiguous array with bytes from a stream."""
    target = array.reshape(-1).view(np.uint8).data
    done = 0
    while done < len(target):
        count = stream.readinto(target[done : done + _CHUNK])  # type: ignore[attr-defined]
        if not count:
            raise EOFError(f"{len(target) - done} bytes are missing")
        done += count
    stream.read(1)  # zipfile verifies the checksum at the end of the stream
