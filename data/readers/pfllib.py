"""Read data sets written by PFLlib's generate scripts, and keep their partition.

PFLlib stores a pickled dict in each .npz file. Posy's unpickler builds only dicts, lists, tuples, numbers, strings and
plain NumPy arrays. It replaces the few NumPy functions that such a pickle calls, and rejects every other name.
"""

import os
import pickle
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from posy.data.dataset import Content
from posy.data.errors import DataError
from posy.data.files import read_json
from posy.data.labels import as_labels, joined_labels, known_labels
from posy.data.readers.npz import NpzFile
from posy.data.values import as_features, as_float32, check_alike, check_shape, precision_notes
from posy.extensions import format_error

_MANY_CLASSES = 10_000  # up to this number of classes, config.json may specify more classes than samples
_MAX_TOKEN = 10**7  # a network has a row of weights for each token
_MAX_DEPTH = 8  # maximum nesting depth of lists
_MAX_SHARED = 10**7  # maximum count of numbers in lists, over all references, or the file size if larger


def read_pfllib(path: Path) -> Content:
    """Read a PFLlib directory.

    ``num_classes`` in ``config.json`` sets the number of classes. Without it, the classes are the labels in the data.
    Images, ``(C, H, W)`` or ``(H, W)``, become floats with the same values. Float vectors are features. Vectors of
    integers, or (tokens, length) pairs, are text.
    """
    num_clients, num_classes = _counts(path)
    files = [path / split / f"{client}.npz" for client in range(num_clients) for split in ("train", "test")]
    read = [_read(file, num_classes) for file in files]
    counts = [len(y) for _, y in read]
    indices = np.split(np.arange(sum(counts)), np.cumsum(counts)[:-1])
    xs = {f"{file.parent.name}/{file.name}": x for file, (x, y) in zip(files, read, strict=True) if len(y)}
    if not xs:
        raise DataError(f"{path}: no samples; at least one is needed")
    if all(x.dtype.kind in "iu" and x.ndim == 2 for x in xs.values()):
        length = max(x.shape[1] for x in xs.values())  # PFLlib may have padded clients to unequal lengths
        xs = {name: np.pad(x, ((0, 0), (0, length - x.shape[1]))) for name, x in xs.items()}
    if len(shapes := {x.shape[1:] for x in xs.values()}) > 1:
        raise DataError(f"{path}: samples of unequal shape: {sorted(shapes)}")
    numeric = {name: (x.dtype, x) for name, x in xs.items() if x.dtype.kind in "biuf"}
    check_alike(str(path), numeric, pixels=len(shapes.pop()) > 1, strict=True)
    kind, x, notes = _inputs(np.concatenate(list(xs.values())), str(path))
    if num_classes > max(_MANY_CLASSES, len(x)):
        raise DataError(
            f"{path / 'config.json'}: num_classes is {num_classes}, but there are {len(x)} samples; the limit "
            f"is the number of samples, or {_MANY_CLASSES} if that is larger"
        )
    return Content(
        path,
        kind,
        x,
        joined_labels([y for _, y in read if len(y)]),
        is_test=np.repeat([file.parent.name == "test" for file in files], counts),
        given=tuple(zip(indices[::2], indices[1::2], strict=True)),
        class_names=tuple(map(str, range(num_classes))),
        read_notes=tuple(notes),
    )


def _inputs(x: np.ndarray, where: str) -> tuple[str, np.ndarray, Sequence[str]]:
    """Return the samples' kind, the samples as :class:`Content` stores them, and notes."""
    if x.dtype.kind in "iu" and x.ndim == 2:
        for token in (x.min(), x.max()):
            if not 0 <= token <= _MAX_TOKEN:
                raise DataError(f"{where}: token {token}; allowed: whole numbers from 0 (padding) to {_MAX_TOKEN}")
        return "tokens", x.astype(np.int64), ()
    if x.ndim not in (2, 3, 4) or x.dtype.kind not in "fiu":
        raise DataError(f"{where}: samples of shape {x.shape[1:]} and type {x.dtype}; allowed: numbers in 1 to 3 axes")
    if x.ndim == 2:
        return "features", *as_features(x, where)
    images = as_float32(x, where)
    notes = precision_notes(x.reshape(-1, 1), np.float32, ("pixels",)) if x.dtype.kind == "f" else ()
    return "image-float", np.ascontiguousarray(np.moveaxis(images, 1, -1) if x.ndim == 4 else images[..., None]), notes


def _counts(path: Path) -> tuple[int, int]:
    """Return the number of clients, and the number of classes or 0 if config.json does not specify it.

    Raises
    ------
    DataError
        If there are gaps in the numbering of the client files, or their number differs from config.json.
    """
    counts, config, file = {}, {}, path / "config.json"
    for split in ("train", "test"):
        numbers = sorted(int(file.stem) for file in (path / split).glob("*.npz") if file.stem.isdigit())
        if numbers != list(range(len(numbers))):
            absent = min(set(range(len(numbers))) - set(numbers))
            raise DataError(f"{path / split}: {absent}.npz is missing; clients are numbered from 0 without gaps")
        counts[f"files in {split}"] = len(numbers)
    if os.path.lexists(file):
        content = read_json(file)
        if isinstance(content, dict):
            config = {key: content[key] for key in ("num_clients", "num_classes") if key in content}
        if any(type(value) is not int for value in config.values()):
            raise DataError(f"{file}: not a config of PFLlib: {config!r:.200}; expected whole numbers")
        if "num_clients" not in config or config.get("num_classes", 2) < 2:
            raise DataError(f"{file}: holds {config}; it needs num_clients, and num_classes must be 2 or more if set")
        counts["num_clients in config.json"] = config["num_clients"]
    if len(set(counts.values())) > 1:
        text = ", ".join(f"{source}: {count}" for source, count in counts.items())
        raise DataError(f"{path}: the client counts differ ({text})")
    return counts["files in train"], config.get("num_classes", 0)


def _read(path: Path, num_classes: int) -> tuple[np.ndarray, np.ndarray]:
    """Return x and y from a client's file, with labels checked against the number of classes; 0: unchecked."""

    def unpickle(stream: IO[bytes], size: int) -> Any:
        try:
            # A number needs at least one byte, so unshared lists contain fewer numbers than the file has bytes.
            return _plain(_ArrayUnpickler(stream, path).load(), max(_MAX_SHARED, size))
        except DataError:
            raise
        except Exception as error:  # a hostile or damaged pickle can raise any error
            raise DataError(f"{path}: the pickled dict cannot be read ({format_error(error)})") from error

    archive = NpzFile(path, unpickle)
    content = archive.read("data") if "data" in archive.names else None
    if isinstance(content, np.ndarray) and content.shape == ():
        content = content.item()
    if not isinstance(content, dict) or not {"x", "y"} <= set(content):
        raise DataError(f"{path}: the array data is missing or is not a dict with x and y")
    try:
        x, y = _samples(content["x"]), _labels(content["y"])
    except (TypeError, ValueError, IndexError, KeyError) as error:
        raise DataError(
            f"{path}: x must be an array of numbers, or a list of tokens or of (tokens, length) pairs ({error})"
        ) from error
    if len(x) != len(y):
        raise DataError(f"{path}: arrays of unequal length (x: {len(x)}, y: {len(y)})")
    if len(x):
        check_shape(x.shape, str(path))
    if x.dtype.kind == "f":
        as_float32(x, str(path))  # reports the first value that is not finite
    return x, known_labels(y, num_classes, str(path)) if num_classes else as_labels(y, str(path))


def _labels(y: Any) -> np.ndarray:
    """Return labels as an array. If a whole number in a list exceeds int64, all labels become strings."""
    if isinstance(y, list | tuple) and any(type(label) is int and abs(label) >= 2**63 for label in y):
        y = [str(label) for label in y]
    return np.asarray(y).reshape(-1)


def _samples(x: Any) -> np.ndarray:
    """Return samples as an array of numbers; (tokens, length) pairs become padded tokens."""
    if isinstance(x, np.ndarray) and x.dtype != object:
        return x
    samples = list(x)
    if samples and all(len(s) == 2 and np.ndim(s[0]) == 1 and np.ndim(s[1]) == 0 for s in samples):
        samples = [tokens[:length] for tokens, length in samples]
    rows = [np.asarray(sample) for sample in samples]
    if rows and all(row.ndim == 1 and row.dtype.kind in "iu" for row in rows):
        padded = np.zeros((len(rows), max(map(len, rows))), np.int64)
        for target, row in zip(padded, rows, strict=True):
            target[: len(row)] = row
        return padded
    if any(row.dtype.kind not in "fiu" for row in rows):
        raise ValueError(f"a sample is of type {next(row.dtype for row in rows if row.dtype.kind not in 'fiu')}")
    return np.stack(rows) if rows else np.zeros((0, 0))


class _ArrayUnpickler(pickle.Unpickler):
    """An unpickler that accepts only plain NumPy arrays."""

    def __init__(self, stream: IO[bytes], path: Path) -> None:
        super().__init__(stream)
        self._path = path

    def find_class(self, module: str, name: str) -> Any:
        """Return the safe replacement for a NumPy name, or raise :class:`DataError` for any other name."""
        module = re.sub(r"^numpy\.core\.", "numpy._core.", module)
        if (module, name) not in _REPLACEMENTS:
            raise DataError(
                f"{self._path}: the pickle refers to {module}.{name}, which is rejected; allowed: plain NumPy arrays"
            )
        return _Replacement(_REPLACEMENTS[module, name])


class _Replacement:
    """The replacement for a name in a pickle. It can only be called."""

    __slots__ = ("_call",)

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __call__(self, *arguments: Any) -> Any:
        return self._call(*arguments)

    def __setstate__(self, state: Any) -> None:
        raise ValueError("it sets the state of a function, which is rejected")


class _DType:
    """A dtype in a pickle. Its code comes from the arguments, and its byte order from the state."""

    def __init__(self, code: str, *_: Any) -> None:
        self.code, self.order = code, "="

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.order = state[1]

    def dtype(self) -> np.dtype[Any]:
        """Return the dtype of a plain number, string or boolean."""
        if not isinstance(self.code, str) or not re.fullmatch(r"b1|[iu][1248]|f[248]|U\d{1,6}", self.code):
            raise ValueError(f"it holds an array of type {self.code!r}; allowed: numbers and strings")
        return np.dtype({">": ">", "<": "<"}.get(self.order, "=") + self.code)


class _Array:
    """An array in a pickle; its state sets its content. An object array is a list until :func:`_plain` converts it."""

    content: Any = None

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, self.shape, dtype, fortran, self.content = state
        self.order: Any = "F" if fortran else "C"
        if not isinstance(self.content, list):
            self.content = _from_bytes(self.content, dtype, self.shape, self.order)


def _plain(root: Any, limit: int) -> Any:
    """Return the unpickled object with each :class:`_Array` converted to a NumPy array.

    Each list is built once, even if the pickle refers to it several times. However, every reference adds the list's
    numbers to the total, which may not exceed ``limit``.
    """
    results: dict[int, tuple[Any, int]] = {}

    def converted(item: Any, depth: int) -> tuple[Any, int]:
        """Return the converted item and the count of numbers in it."""
        array = item if isinstance(item, _Array) else None
        item = item if array is None else array.content
        if isinstance(item, np.ndarray):
            return item, item.size
        if not isinstance(item, dict | list | tuple):
            return item, 1
        if depth > _MAX_DEPTH:
            raise ValueError(f"its lists are nested more than {_MAX_DEPTH} deep")
        if id(item) not in results:
            if _CONTAINERS.isdisjoint(map(type, item)) and not isinstance(item, dict):  # fast path for innermost lists
                results[id(item)] = item, len(item)
            else:
                pairs = [converted(value, depth + 1) for value in (item.values() if isinstance(item, dict) else item)]
                values = [value for value, _ in pairs]
                plain: Any = dict(zip(item, values, strict=True)) if isinstance(item, dict) else type(item)(values)
                results[id(item)] = plain, sum(size for _, size in pairs)
        plain, size = results[id(item)]
        if array is not None:
            plain = np.fromiter(plain, object, len(plain)).reshape(array.shape, order=array.order)
        return plain, size

    plain, size = converted(root, 0)
    if size > limit:
        raise ValueError(f"its lists, some of them shared, hold {size} numbers in total")
    return plain


_CONTAINERS = frozenset({_Array, np.ndarray, dict, list, tuple})


def _from_bytes(data: bytes, dtype: _DType, shape: tuple[int, ...], order: Any) -> np.ndarray:
    return np.frombuffer(data, dtype.dtype()).reshape(shape, order=order)


def _encode(text: str, encoding: str) -> bytes:
    if encoding != "latin1":  # protocol 2 stores bytes as Latin-1 text
        raise ValueError(f"it encodes a string as {encoding!r}; only latin1 is allowed")
    return text.encode("latin-1")


_REPLACEMENTS: dict[tuple[str, str], Callable[..., Any]] = {
    ("numpy", "ndarray"): lambda *_: None,
    ("numpy", "dtype"): _DType,
    ("numpy._core.multiarray", "_reconstruct"): lambda *_: _Array(),
    ("numpy._core.multiarray", "scalar"): lambda dtype, data: _from_bytes(data, dtype, (), "C")[()],
    ("numpy._core.numeric", "_frombuffer"): _from_bytes,
    ("_codecs", "encode"): _encode,
}
