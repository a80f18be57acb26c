"""Convert a user's image, text or row of numbers to a network's input, with the same preprocessing as in training."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from posy.data.agreement import MODES
from posy.data.dataset import Dataset
from posy.data.encoding import Encoder
from posy.data.errors import DataError
from posy.data.readers.cells import category_in, is_missing, number_in
from posy.data.readers.image import as_images, pixels_of, read_images
from posy.data.task import STANDARDISED, TASK_KINDS, Task
from posy.data.text import hashed, tokens_of
from posy.data.transforms import shape_text
from posy.data.values import as_features
from posy.metrics import CLASSES


def normalised(x: Tensor, kind: str, mean: np.ndarray, std: np.ndarray) -> Tensor:
    """Return samples in a network's input format: images ``(n, C, H, W)``, features, time series or tokens.

    Parameters
    ----------
    x : torch.Tensor
        Samples as in :class:`posy.data.dataset.Dataset`, in writable memory.
    kind : str
        Kind of the task.
    mean, std : numpy.ndarray
        Mean and standard deviation of the data set.
    """
    return scaled(x, kind, torch.from_numpy(mean).to(x.device), torch.from_numpy(std).to(x.device))


def scaled(x: Tensor, kind: str, centre: Tensor, width: Tensor) -> Tensor:
    """Do the same as :func:`normalised`, with the mean and the standard deviation as tensors."""
    if kind == "text":
        return x
    if kind in STANDARDISED:  # round to float32 last, because samples may differ only in the last digits
        return x.double().sub_(centre).div_(width).float()
    scale = 255.0 if x.dtype == torch.uint8 else 1.0
    return x.float().sub_(centre * scale).div_(width * scale).permute(0, 3, 1, 2)


@dataclass(frozen=True, eq=False)
class Preprocessing:
    """Preprocessing of samples for a network, with attributes named as in :class:`posy.data.dataset.Dataset`."""

    task: Task
    sample_kind: str
    mean: np.ndarray
    std: np.ndarray
    words: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()  # names of the features, or with an encoder, of the columns of the table
    encoder: Encoder | None = None

    @classmethod
    def of(cls, dataset: Dataset, client: int) -> Self:
        """Return the preprocessing for a client's samples."""
        mean, std = dataset.scale_of(client)
        columns = dataset.encoder.inputs if dataset.encoder else dataset.columns
        return cls(dataset.task, dataset.sample_kind, mean, std, dataset.words, columns, dataset.encoder)

    @property
    def features(self) -> tuple[str, ...]:
        """The names of the network's inputs, if the data has them."""
        return self.encoder.names if self.encoder else self.columns

    @property
    def is_measured(self) -> bool:
        """Whether the mean and the standard deviation describe training samples. 0 and 1 change nothing."""
        fixed = (0.5, 0.5) if self.sample_kind == "image" else (0.0, 1.0)
        return not all((values == value).all() for values, value in zip((self.mean, self.std), fixed, strict=True))

    def unseen(self, sample: Any) -> list[tuple[str, str]]:
        """Return the columns of a raw row whose categories the run has not encoded, with the categories."""
        if not self.encoder or isinstance(sample, str | Path):
            return []
        values = [sample[name] for name in self.columns] if isinstance(sample, Mapping) else list(sample)
        pairs = zip(self.encoder.columns, values, strict=True)
        cells = [(column, "" if value is None else str(value)) for column, value in pairs]
        return [
            (column.name, cell)
            for column, cell in cells
            if column.categories and not is_missing(cell) and category_in(cell) not in column.categories
        ]

    def to_json(self) -> str:
        """Return the preprocessing as JSON; :meth:`from_json` restores each number exactly."""
        task = {"shape": self.task.input_shape, "classes": self.task.class_names, "vocabulary": self.task.vocabulary}
        task |= {"target": self.task.target, "value-mean": self.task.value_mean, "value-std": self.task.value_std}
        scale = {"mean": self.mean.tolist(), "std": self.std.tolist(), "type": str(self.mean.dtype)}
        encoder = {"encoder": self.encoder.to_json()} if self.encoder else {}
        words = {"words": self.words, "columns": self.columns}
        return json.dumps({"kind": self.sample_kind, **task, **scale, **words, **encoder})

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read the JSON that :meth:`to_json` returns, or raise ValueError, KeyError or TypeError for other text."""
        stored = json.loads(text)
        kind, classes = stored["kind"], tuple(stored["classes"])
        target = stored.get("target", CLASSES)  # earlier versions of Posy supported only classification
        values = (tuple(stored.get(key, ())) for key in ("value-mean", "value-std"))
        task = Task(TASK_KINDS[kind], tuple(stored["shape"]), classes, stored["vocabulary"], target, *values)
        mean, std = (np.array(stored[key], stored["type"]) for key in ("mean", "std"))
        encoder = Encoder.from_json(stored["encoder"]) if "encoder" in stored else None
        return cls(task, kind, mean, std, tuple(stored["words"]), tuple(stored["columns"]), encoder)

    def __call__(self, sample: Any) -> Tensor:
        """Return a sample in the network's input format, ``(1, *input_shape)``.

        Parameters
        ----------
        sample
            An image: a path, a PIL image, or pixels ``(H, W)``, ``(H, W, C)`` or ``(C, H, W)``; a text, or the path of
            a text file; features ``(F,)``, or a mapping from their names to values; a time series ``(T, F)``; or tokens
            ``(L,)``.

        Raises
        ------
        DataError
            If the sample is not of the kind that the network was trained on.
        """
        readers = {"image": self._pixels, "features": self._features, "series": self._series, "text": self._tokens}
        read = readers[self.task.kind]
        return normalised(torch.from_numpy(np.array(read(sample)[None])), self.task.kind, self.mean, self.std)

    def describe(self) -> str:
        """Describe valid samples, for messages."""
        shape = self.task.input_shape
        if self.task.kind == "image":
            how = "" if self.sample_kind == "image" else " as arrays of floating-point pixels"
            return f"images of {shape_text(shape)} (channels x height x width){how}"
        if self.task.kind == "features":
            names = f" ({', '.join(self.columns[:5])}{', …' * (len(self.columns) > 5)})" if self.columns else ""
            if self.encoder:
                return f"rows of {len(self.columns)} numbers and categories{names}"
            return f"rows of {shape[0]} numbers{names}"
        if self.task.kind == "series":
            return f"time series of {shape_text(shape)} (steps x channels)"
        return "texts" if self.sample_kind == "text" else f"at most {shape[0]} tokens (word indices)"

    def _refused(self, description: str) -> DataError:
        return DataError(f"{description}; the model expects {self.describe()}")

    def _pixels(self, sample: Any) -> np.ndarray:
        channels, height, width = self.task.input_shape
        if isinstance(sample, str | Path | Image.Image):
            if self.sample_kind != "image":
                raise self._refused("an image does not define the scale of its pixels")
            if channels not in MODES:
                raise self._refused(f"an image file can be converted to 1 or 3 channels, not to {channels}")
            if isinstance(sample, Image.Image):
                return pixels_of(sample, (width, height), MODES[channels])
            pixels: np.ndarray = read_images([Path(sample)], (width, height), MODES[channels])[0]
            return pixels
        array = self._numbers(sample)
        if array.ndim not in (2, 3):
            raise self._refused(_describe_shape(array))
        if (array.dtype.kind == "f") != (self.sample_kind == "image-float"):
            raise self._refused(f"pixels of type {array.dtype}" + self._expected_range())
        image: np.ndarray = as_images(array[None], "the array")[0]
        if image.shape != (height, width, channels):
            raise self._refused(_describe_shape(array))
        return image

    def _expected_range(self) -> str:
        return ", not whole numbers from 0 to 255" if self.sample_kind == "image" else ""

    def _features(self, sample: Any) -> np.ndarray:
        if isinstance(sample, Mapping):
            if not self.columns:
                raise self._refused("features by name, but the run has not recorded their names")
            if missing := [name for name in self.columns if name not in sample]:
                raise self._refused(f"no {', '.join(missing[:5])}{', …' * (len(missing) > 5)} in the row")
            sample = [sample[name] for name in self.columns]
        if self.encoder:
            return self._encoded(self.encoder, sample)
        array = self._numbers(sample)
        if array.shape != self.task.input_shape:
            raise self._refused(_describe_shape(array))
        return as_features(array.astype(np.float64)[None], "the row")[0][0]

    def _encoded(self, encoder: Encoder, sample: Any) -> np.ndarray:
        """Return the encoded values of a raw row: numbers, strings, and None or NaN for missing values."""
        values = list(sample) if isinstance(sample, Sequence | np.ndarray) and not isinstance(sample, str) else []
        if len(values) != len(self.columns):
            raise self._refused(f"a row of {len(values)} values")
        x, categories = np.full((1, len(values)), np.nan), list[tuple[str, ...] | None]()
        for number, (value, column) in enumerate(zip(values, encoder.columns, strict=True)):
            cell = "" if value is None else str(value)
            names = None
            if not is_missing(cell) and column.mean is None:
                x[0, number], names = 0.0, (category_in(cell),)
            elif not is_missing(cell):
                parsed = number_in(cell)
                if parsed is None or not np.isfinite(parsed):
                    raise self._refused(f"{column.name}: {cell!r:.40} is not a number")
                x[0, number] = parsed
            categories.append(names)
        return as_features(encoder.encode(x, tuple(categories), "the row"), "the row")[0][0]

    def _series(self, sample: Any) -> np.ndarray:
        array = self._numbers(sample)
        if array.shape != self.task.input_shape:
            raise self._refused(_describe_shape(array))
        return as_features(array.astype(np.float64), "the time series")[0]

    def _tokens(self, sample: Any) -> np.ndarray:
        length = self.task.input_shape[0]
        if self.sample_kind == "text":
            if isinstance(sample, Path):
                try:
                    sample = sample.read_text(encoding="utf-8")
                except (OSError, UnicodeDecodeError) as error:
                    raise self._refused(f"{sample}: not a readable text file ({error})") from error
            if not isinstance(sample, str):
                raise self._refused(f"a sample of type {type(sample).__name__}")
            if self.words:
                return tokens_of(sample, length, self.words)
            hashes: np.ndarray = hashed([sample], length, self.task.vocabulary)[0]
            return hashes
        array = self._numbers(sample)
        if array.ndim != 1 or array.dtype.kind not in "iu" or len(array) > length:
            raise self._refused(f"{_describe_shape(array)} and type {array.dtype}")
        if len(array) and not (array.min() >= 0 and array.max() < self.task.vocabulary):
            raise self._refused(f"tokens from {array.min()} to {array.max()} of {self.task.vocabulary}")
        return np.pad(array.astype(np.int64), (0, length - len(array)))

    def _numbers(self, sample: Any) -> np.ndarray:
        """Convert an array-like sample to an array of numbers, or raise :class:`DataError` if this is impossible."""
        if isinstance(sample, str | Path | Image.Image):
            raise self._refused("an image" if isinstance(sample, Image.Image) else f"{str(sample)!r:.80}")
        try:
            array = np.asarray(sample)
        except (TypeError, ValueError) as error:
            raise self._refused(f"not an array of numbers ({error})") from error
        if array.dtype.kind not in "biuf":
            raise self._refused(f"a sample of type {type(sample).__name__}")
        return array


def _describe_shape(array: np.ndarray) -> str:
    return f"an array of shape {shape_text(array.shape)}" if array.ndim else "a single number"
