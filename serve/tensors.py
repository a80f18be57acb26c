"""The tensors of the Open Inference Protocol: their data types, and their formats in messages."""

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from types import NoneType
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

BYTES = "BYTES"
"""The data type of strings and of files. Its arrays contain objects of type ``bytes``."""
DATATYPES: dict[str, np.dtype[Any]] = {
    name: np.dtype(code)
    for name, code in {
        "BOOL": "?", "UINT8": "u1", "UINT16": "<u2", "UINT32": "<u4", "UINT64": "<u8", "INT8": "i1", "INT16": "<i2",
        "INT32": "<i4", "INT64": "<i8", "FP16": "<f2", "FP32": "<f4", "FP64": "<f8", BYTES: "O",
    }.items()
}  # fmt: skip
"""NumPy's data type for each data type of the protocol."""
MAX_AXES = 8
"""Maximum number of axes of a tensor."""
MAX_SIZE = 1 << 31
"""Maximum number of values of a tensor."""
MAX_STRINGS = 100_000
"""Maximum number of strings in a tensor, because a short string can become a large sample."""
_NAMES = {dtype: name for name, dtype in DATATYPES.items()}


class RequestError(Exception):
    """A request that the service refuses because the request is wrong."""


class UnknownModelError(RequestError):
    """A request for a model that does not exist."""


class UnavailableError(Exception):
    """A model that cannot answer now, for example because it is being unloaded."""


class OverloadedError(Exception):
    """A request that the service refuses because it has too many requests."""


@dataclass
class Request:
    """A request for predictions, independent of the transport.

    ``inputs`` maps names to arrays, and ``outputs`` contains the names of the requested outputs (empty: all outputs).
    """

    model: str
    inputs: dict[str, Array]
    version: str = ""
    id: str = ""
    outputs: Sequence[str] = ()
    parameters: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class Response:
    """The predictions for a request; ``outputs`` maps names to arrays."""

    model: str
    version: str
    id: str
    outputs: dict[str, Array]


def datatype_of(array: Array) -> str:
    """Return the protocol's data type of an array."""
    return _NAMES[array.dtype]


def checked_shape(name: str, datatype: str, shape: Iterable[int]) -> tuple[int, ...]:
    """Return a tensor's shape as a tuple; raise :class:`RequestError` if the shape or the data type is not valid."""
    if datatype not in DATATYPES:
        raise RequestError(f"input {name!r:.80}: data type {datatype!r:.80} is not one of {', '.join(DATATYPES)}")
    sizes = tuple(shape)
    if len(sizes) > MAX_AXES:
        raise RequestError(f"input {name!r:.80}: a shape of {len(sizes)} sizes; at most {MAX_AXES} are allowed")
    if not all(type(size) is int and 0 <= size <= MAX_SIZE for size in sizes):
        problem = f"must contain whole numbers of at least 0, and at most {MAX_SIZE}"
        raise RequestError(f"input {name!r:.80}: shape {list(sizes)!r:.80} {problem}")
    if prod(filter(None, sizes)) > MAX_SIZE:  # NumPy multiplies the sizes even if one of them is 0
        raise RequestError(f"input {name!r:.80}: shape {list(sizes)!r:.80} has more than {MAX_SIZE} values")
    if datatype == BYTES and prod(sizes) > MAX_STRINGS:
        raise RequestError(f"input {name!r:.80}: {prod(sizes)} strings; at most {MAX_STRINGS} are allowed")
    return sizes


def from_raw(name: str, datatype: str, shape: tuple[int, ...], raw: bytes | memoryview) -> Array:
    """Return a tensor from its binary format: numbers in little-endian order, or strings with their lengths.

    Raises
    ------
    RequestError
        If the number of bytes does not match the shape.
    """
    if datatype == BYTES:
        return _strings(name, shape, memoryview(raw))
    dtype = DATATYPES[datatype]
    if len(raw) != (expected := prod(shape) * dtype.itemsize):
        raise RequestError(
            f"input {name!r:.80}: {len(raw)} bytes, but {datatype} of shape {list(shape)} has {expected} bytes"
        )
    return np.frombuffer(raw, dtype).reshape(shape)


def _strings(name: str, shape: tuple[int, ...], raw: memoryview) -> Array:
    """Return an array of ``bytes`` from a sequence of strings, each after its length as a 4-byte integer."""
    strings: list[bytes] = []
    start, count = 0, prod(shape)
    while start < len(raw) and len(strings) < count:
        end = start + 4
        length = struct.unpack_from("<I", raw, start)[0] if end <= len(raw) else len(raw)
        if end + length > len(raw):
            break
        strings.append(bytes(raw[end : end + length]))
        start = end + length
    if len(strings) != count or start != len(raw):
        raise RequestError(f"input {name!r:.80}: the bytes do not contain {count} strings with their lengths")
    return as_objects(strings, shape)


def as_objects(values: Sequence[bytes], shape: tuple[int, ...]) -> Array:
    """Return an array of objects, even if all strings are empty."""
    array = np.empty(len(values), object)
    array[:] = values
    return array.reshape(shape)


def to_raw(array: Array) -> bytes:
    """Return the binary format of a tensor (see :func:`from_raw`)."""
    if array.dtype != object:
        return array.tobytes()
    return b"".join(struct.pack("<I", len(value)) + value for value in array.ravel())


def from_values(name: str, datatype: str, shape: tuple[int, ...], values: Any) -> Array:
    """Return a tensor from a list of numbers or strings, which may be nested.

    Raises
    ------
    RequestError
        If the list does not match the shape, or contains values of another type.
    """
    flat = _flattened(values, len(shape))
    if len(flat) != (count := prod(shape)):
        raise RequestError(f"input {name!r:.80}: {len(flat)} values, but shape {list(shape)} has {count}")
    if datatype == BYTES:
        if not all(isinstance(value, str | bytes) for value in flat):
            raise RequestError(f"input {name!r:.80}: the data type is BYTES, so all values must be strings")
        return as_objects([utf8(name, value) if isinstance(value, str) else value for value in flat], shape)
    dtype = DATATYPES[datatype]
    # NumPy would convert numbers to strings if the list contained a string.
    if not set(map(type, flat)) <= {int, float, bool, NoneType}:
        raise RequestError(f"input {name!r:.80}: the values are not numbers of type {datatype}")
    numbers = [np.nan if value is None and dtype.kind == "f" else value for value in flat]
    try:
        array = np.array(numbers)
        if array.dtype.kind not in "biuf" or (dtype.kind in "iu" and array.dtype.kind == "f" and len(array)):
            raise RequestError(f"input {name!r:.80}: the values are not numbers of type {datatype}")
        with np.errstate(over="raise", invalid="ignore"):
            converted = array.astype(dtype)
    except (ValueError, TypeError, OverflowError, FloatingPointError) as error:
        raise RequestError(f"input {name!r:.80}: the values are not numbers of type {datatype}") from error
    if dtype.kind in "iu" and len(array) and not np.array_equal(converted, array):
        raise RequestError(f"input {name!r:.80}: a value is outside the range of {datatype}")
    return converted.reshape(shape)


def to_values(array: Array) -> list[Any]:
    """Return a flat list of numbers or strings, for JSON."""
    if array.dtype == object:
        return [value.decode(errors="replace") for value in array.ravel()]
    flat: list[Any] = array.ravel().tolist()
    return flat


def utf8(name: str, text: str) -> bytes:
    """Return text in UTF-8; raise :class:`RequestError` for half of a surrogate pair, which JSON can contain."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"{name!r:.80}: a string is not valid Unicode") from error


def _flattened(values: Any, axes: int) -> list[Any]:
    """Return the values of nested lists in order, up to the depth that the number of axes allows."""
    flat = values if isinstance(values, list) else [values]
    for _ in range(axes):
        if list not in set(map(type, flat)):
            break
        flat = [leaf for value in flat for leaf in (value if isinstance(value, list) else (value,))]
    return flat
