"""Data sets that PFLlib's generate scripts wrote, taken with their partition as it is.

PFLlib stores a pickled dict in each .npz file. It is read by an unpickler that builds nothing but
dicts, lists, tuples, numbers, texts and plain NumPy arrays: the few NumPy names that such a pickle
calls are answered by our own, and every other name is refused.
"""

import os
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import numpy as np

from posy.data.dataset import (
    Content,
    Part,
    as_features,
    as_float32,
    as_labels,
    check_alike,
    check_shape,
    joined_labels,
    known_labels,
    precision_notes,
)
from posy.data.errors import DataError
from posy.data.files import read_json
from posy.data.npz import NpzFile

MANY_CLASSES = 10_000
MAX_TOKEN = 10**7
"""A network has a row of weights for each token."""
MAX_DEPTH = 8
MAX_SHARED = 10**7
"""So many numbers may lists hold that stand in several places of a pickle."""
_CONFIG = ("num_clients", "num_classes")


def is_pfllib(path: Path) -> bool:
    """Tell whether a directory is laid out as PFLlib does: train/0.npz, test/0.npz."""
    # Unlike pathlib's these are False also for what can be no path, or may not be looked at.
    return os.path.isfile(path / "train" / "0.npz") and os.path.isdir(path / "test")  # noqa: PTH112, PTH113


def read_pfllib(path: Path) -> Content:
    """Read a PFLlib directory.

    There are as many classes as ``config.json`` says; without it, or its ``num_classes``, those that occur.
    Float images stay as they are, ``(C, H, W)`` or ``(H, W)``; vectors are features; rows of whole
    numbers, or (tokens, length) pairs, are text.

    Returns
    -------
    Content
        With ``given``: the indices of each client's training and test samples.

    Raises
    ------
    DataError
        If a file is missing or damaged, or would make Python objects, or a label is no class.
    """
    xs: list[np.ndarray] = []
    ys: list[np.ndarray] = []
    parts: list[Part] = []
    given, start = [], 0
    is_test: list[np.ndarray] = []
    config = _config(path)
    num_classes = config.get("num_classes", 0)
    for client in range(_num_clients(path, config)):
        pair = []
        for split in ("train", "test"):
            file = path / split / f"{client}.npz"
            x, y = _read(file, num_classes)
            if len(y):
                xs.append(x)
                ys.append(y)
                if x.dtype.kind in "biuf":
                    parts.append(Part.of(f"{split}/{client}.npz", x.dtype, x))
            is_test.append(np.full(len(y), split == "test"))
            pair.append(np.arange(start, start + len(y)))
            start += len(y)
        given.append((pair[0], pair[1]))
    if not xs:
        raise DataError(f"{path}: no samples; at least one is needed")
    if all(x.dtype.kind in "iu" and x.ndim == 2 for x in xs):
        length = max(x.shape[1] for x in xs)  # clients may be padded to unequal lengths
        xs = [np.pad(x, ((0, 0), (0, length - x.shape[1]))) for x in xs]
    if len({x.shape[1:] for x in xs}) > 1:
        raise DataError(f"{path}: samples of unequal shape: {sorted({x.shape[1:] for x in xs})}")
    check_alike(str(path), parts, pixels=xs[0].ndim > 2, strict=True)
    kind, x, notes = _inputs(np.concatenate(xs), str(path))
    labels = joined_labels(ys)
    if num_classes > max(MANY_CLASSES, len(labels)):
        raise DataError(
            f"{path / 'config.json'}: num_classes is {num_classes}, and there are {len(labels)} samples; allowed are "
            f"as many classes as samples, or {MANY_CLASSES}"
        )
    return Content(
        kind,
        x,
        labels,
        is_test=np.concatenate(is_test),
        given=tuple(given),
        num_classes=num_classes,
        notes=tuple(notes),
    )


def _inputs(x: np.ndarray, where: str) -> tuple[str, np.ndarray, list[str]]:
    """Return the kind of the samples, the samples as :class:`Content` has them, and what to note."""
    if x.dtype.kind in "iu" and x.ndim == 2:
        if x.min() < 0:
            raise DataError(f"{where}: token {x.min()}; allowed are whole numbers from 0 (padding)")
        if x.max() > MAX_TOKEN:
            raise DataError(f"{where}: token {x.max()}; allowed are whole numbers up to {MAX_TOKEN}")
        return "tokens", x.astype(np.int64), []
    if x.ndim not in (2, 3, 4) or x.dtype.kind not in "fiu":
        raise DataError(
            f"{where}: samples of shape {x.shape[1:]} and type {x.dtype}; allowed are numbers in 1 to 3 axes"
        )
    if x.ndim == 2:
        return "features", *as_features(x, where)
    images = as_float32(x, where)
    notes = precision_notes(x.reshape(-1, 1), np.float32, ("pixels",)) if x.dtype.kind == "f" else []
    if x.ndim == 3:
        return "image-float", images[..., None], notes
    return "image-float", np.ascontiguousarray(images.transpose(0, 2, 3, 1)), notes


def _config(path: Path) -> dict[str, int]:
    """Return num_clients and, if it is there, num_classes of config.json; an empty dict without that file."""
    file = path / "config.json"
    if not os.path.lexists(file):
        return {}
    content = read_json(file)
    config = {key: content[key] for key in _CONFIG if key in content} if isinstance(content, dict) else {}
    if any(type(value) is not int for value in config.values()):
        raise DataError(f"{file}: not what PFLlib writes: {config!r:.200}; needed are whole numbers")
    if "num_clients" not in config or config.get("num_classes", 2) < 2:
        raise DataError(f"{file}: holds {config}; needed are num_clients and, if at all, 2 or more num_classes")
    return config


def _num_clients(path: Path, config: dict[str, int]) -> int:
    """Return the number of client files, which must run from 0 and agree with config.json."""
    counts = {}
    for split in ("train", "test"):
        numbers = sorted(int(file.stem) for file in (path / split).glob("*.npz") if file.stem.isdigit())
        if numbers != list(range(len(numbers))):
            absent = min(set(range(len(numbers))) - set(numbers))
            raise DataError(f"{path / split}: {absent}.npz is missing; clients are numbered from 0 without gaps")
        counts[f"files in {split}"] = len(numbers)
    if config:
        counts["num_clients in config.json"] = config["num_clients"]
    if len(set(counts.values())) > 1:
        listed = ", ".join(f"{what}: {count}" for what, count in counts.items())
        raise DataError(f"{path}: unequal numbers of clients ({listed})")
    return next(iter(counts.values()))


def _read(path: Path, num_classes: int) -> tuple[np.ndarray, np.ndarray]:
    """Return x and y of one client's file; the labels are checked against the number of classes, unless it is 0."""

    def unpickle(stream: IO[bytes]) -> Any:
        try:
            return _Plain().of(_ArrayUnpickler(stream, path).load())
        except DataError:
            raise
        except Exception as error:  # a hostile or damaged pickle can fail in any way
            raise DataError(f"{path}: the pickled dict cannot be read ({type(error).__name__}: {error})") from error

    archive = NpzFile(path, unpickle)
    content = archive.read("data") if "data" in archive.names else None
    if isinstance(content, np.ndarray) and content.shape == ():
        content = content.item()
    if not isinstance(content, dict) or not {"x", "y"} <= set(content):
        raise DataError(f"{path}: needed is the array data that holds a dict with x and y")
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
    if x.dtype.kind == "f" and x.size and not np.isfinite(x).all():
        as_float32(x, str(path))  # which tells where
    return x, known_labels(y, num_classes, str(path)) if num_classes else as_labels(y, str(path))


def _labels(y: Any) -> np.ndarray:
    """Return labels as an array; whole numbers of a list, which may be of any size, as texts if one is too large."""
    if isinstance(y, list | tuple) and any(type(label) is int and abs(label) >= 2**63 for label in y):
        y = [str(label) for label in y]
    return np.asarray(y).reshape(-1)


def _samples(x: Any) -> np.ndarray:
    """Return samples as an array of numbers; (tokens, length) pairs as padded tokens."""
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
    """An unpickler that knows plain NumPy arrays and nothing else."""

    def __init__(self, stream: IO[bytes], path: Path) -> None:
        super().__init__(stream)
        self._path = path

    def find_class(self, module: str, name: str) -> Any:
        """Return our own stand-in for a name of NumPy, or refuse it."""
        module = re.sub(r"^numpy\.core\.", "numpy._core.", module)
        if (module, name) not in _STAND_INS:
            raise DataError(
                f"{self._path}: the pickle asks for {module}.{name}, which is refused; allowed are plain NumPy arrays"
            )
        return _StandIn(_STAND_INS[module, name])


class _StandIn:
    """What a name stands for: it can be called, and nothing else."""

    __slots__ = ("_call",)

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __call__(self, *arguments: Any) -> Any:
        return self._call(*arguments)

    def __setstate__(self, state: Any) -> None:
        raise ValueError("it changes a function, which is refused")


class _DType:
    """A dtype as it stands in a pickle: its code, then (in its state) its byte order."""

    def __init__(self, code: str, *_: Any) -> None:
        self.code, self.order = code, "="

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.order = state[1]

    def dtype(self) -> np.dtype[Any]:
        """Return the dtype of a plain number, text or truth value."""
        if not isinstance(self.code, str) or not re.fullmatch(r"b1|[iu][1248]|f[248]|U\d{1,6}", self.code):
            raise ValueError(f"it holds an array of type {self.code!r}; allowed are numbers and texts")
        return np.dtype({">": ">", "<": "<"}.get(self.order, "=") + self.code)


class _Array:
    """An array as it stands in a pickle, filled in by its state."""

    content: Any = None

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, dtype, fortran, data = state
        if isinstance(data, list):  # an array of objects
            flat = np.fromiter(_Plain().of(data), object, len(data))
            self.content = flat.reshape(shape, order="F" if fortran else "C")
        else:
            self.content = _from_bytes(data, dtype, shape, "F" if fortran else "C")


_HOLDERS = frozenset({_Array, np.ndarray, dict, list, tuple})


class _Plain:
    """Replaces the stand-ins for arrays in what was unpickled; each list once, in however many places it stands."""

    def __init__(self) -> None:
        self._done: dict[int, tuple[Any, int]] = {}
        self._distinct = 0

    def of(self, item: Any) -> Any:
        """Return an item without stand-ins.

        Raises
        ------
        ValueError
            If lists are nested too deep, or stand in so many places that they would be far more than the file.
        """
        plain, size = self._of(item, 0)
        if size > max(MAX_SHARED, 2 * self._distinct):
            raise ValueError(f"its lists, which stand in several places, hold {size} numbers in all")
        return plain

    def _of(self, item: Any, depth: int) -> tuple[Any, int]:
        """Return an item without stand-ins, and how many numbers it holds."""
        if type(item) not in _HOLDERS:
            return item, 1
        if depth > MAX_DEPTH:
            raise ValueError(f"it holds lists in lists, more than {MAX_DEPTH} deep")
        if id(item) in self._done:
            return self._done[id(item)]
        if isinstance(item, list) and _HOLDERS.isdisjoint(map(type, item)):  # the innermost lists, which are many
            self._done[id(item)] = item, len(item)
            self._distinct += len(item)
        elif isinstance(item, _Array | np.ndarray):
            array = item.content if isinstance(item, _Array) else item
            self._done[id(item)] = array, getattr(array, "size", 0)
            self._distinct += self._done[id(item)][1]
        else:
            found = [self._of(value, depth + 1) for value in (item.values() if isinstance(item, dict) else item)]
            values = [value for value, _ in found]
            plain: Any = dict(zip(item, values, strict=True)) if isinstance(item, dict) else type(item)(values)
            self._done[id(item)] = plain, sum(size for _, size in found)
            self._distinct += sum(type(value) not in _HOLDERS for value in values)
        return self._done[id(item)]


def _from_bytes(data: bytes, dtype: _DType, shape: tuple[int, ...], order: Any) -> np.ndarray:
    return np.frombuffer(data, dtype.dtype()).reshape(shape, order=order)


def _encode(text: str, encoding: str) -> bytes:
    """Protocol 2 spells bytes as a text in Latin-1."""
    if encoding != "latin1":
        raise ValueError(f"it encodes a text as {encoding!r}; allowed is latin1")
    return text.encode("latin-1")


_STAND_INS: dict[tuple[str, str], Callable[..., Any]] = {
    ("numpy", "ndarray"): lambda *_: None,
    ("numpy", "dtype"): _DType,
    ("numpy._core.multiarray", "_reconstruct"): lambda *_: _Array(),
    ("numpy._core.multiarray", "scalar"): lambda dtype, data: _from_bytes(data, dtype, (), "C")[()],
    ("numpy._core.numeric", "_frombuffer"): _from_bytes,
    ("_codecs", "encode"): _encode,
}
