"""Convert the tensors of a request to a model's samples, with the same preprocessing as in training."""

import io
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from posy.client_app.schema import TensorSpec, input_specs
from posy.data.agreement import MODES
from posy.data.errors import DataError
from posy.data.inputs import Preprocessing, normalised
from posy.data.readers.cells import category_in, is_missing, number_in
from posy.data.readers.image import as_images, pixels_of
from posy.data.text import all_tokens_of, hashed
from posy.data.values import as_features
from posy.serve.tensors import Array, RequestError

MAX_PIXELS = 50_000_000
"""Maximum number of pixels in an image file."""
MAX_PIXELS_OF_REQUEST = 8 * MAX_PIXELS
"""Maximum number of pixels in all image files of a request."""
MAX_NUMBERS = 1 << 26
"""Maximum number of values in the preprocessed samples of a request."""
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
"""The formats of image files, as in training. Pillow's other formats include some that start programs."""


class SampleReader:
    """Reads the samples in a request's tensors.

    Parameters
    ----------
    preprocessing : Preprocessing
        The preprocessing of the model.
    """

    def __init__(self, preprocessing: Preprocessing) -> None:
        self.preprocessing = preprocessing
        self.specs = _specs(preprocessing)
        encoder = preprocessing.encoder
        self._unused = [column.name for column in encoder.columns if not column.is_used] if encoder else []

    def __call__(self, inputs: Mapping[str, Array]) -> Tensor:
        """Return the samples in a network's input format, ``(n, *input_shape)``.

        Parameters
        ----------
        inputs : mapping of str to numpy.ndarray
            The tensors, keyed by name. The first axis of each tensor indexes the samples.

        Raises
        ------
        RequestError
            If a tensor is missing or unknown, or does not contain samples in the expected format.
        """
        by_column = self._by_column(inputs)
        names = [spec.name for spec in (by_column or self.specs)]
        missing = [name for name in names if name not in inputs]
        unknown = [name for name in inputs if name not in {*names, *self._unused}]
        if missing or unknown:
            words = [
                f"{word} {_listed(group)}" for word, group in (("missing", missing), ("unknown", unknown)) if group
            ]
            raise RequestError(f"inputs: {'; '.join(words)}; the model expects {_listed(names)}")
        p = self.preprocessing
        count = max(len(array) if array.ndim else 1 for array in inputs.values())
        if count * max(math.prod(p.task.input_shape), p.task.num_classes) > MAX_NUMBERS:
            raise RequestError(f"inputs: {count} samples are too many for one request; split them")
        try:
            samples = self._table(inputs) if by_column else self._array(inputs[names[0]])
        except DataError as error:
            raise RequestError(str(error)) from error
        x = normalised(torch.from_numpy(np.array(samples)), p.task.kind, p.mean, p.std)
        if x.is_floating_point() and not x.isfinite().all():
            raise RequestError("inputs: a number is beyond the range of float32 after standardisation")
        return x

    def joint_format(self, inputs: Mapping[str, Array]) -> tuple[object, ...]:
        """Return a key that requests share if their tensors can be joined, or an empty tuple for a separate request."""
        arrays = inputs.values()
        if len({array.shape[:1] for array in arrays}) > 1 or any(map(self._is_separate, arrays)):
            return ()
        return tuple((name, array.dtype, array.shape[1:]) for name, array in inputs.items())

    def _is_separate(self, array: Array) -> bool:
        """Return whether a tensor must be read alone.

        A tensor of strings may have several axes, and each string is a sample. The scale of floating-point pixels is
        checked in each request.
        """
        if not array.ndim or (array.dtype == object and array.size > len(array)):
            return True
        return array.dtype.kind == "f" and self.preprocessing.sample_kind == "image"

    def _by_column(self, inputs: Mapping[str, Array]) -> tuple[TensorSpec, ...]:
        """Return the specification of each column if the request contains a table by columns, else an empty tuple."""
        p = self.preprocessing
        if p.encoder:
            return self.specs
        if p.task.kind == "features" and p.columns and not {spec.name for spec in self.specs} & inputs.keys():
            return tuple(TensorSpec(name, "FP64", (-1,), "a column of numbers") for name in p.columns)
        return ()

    def _table(self, inputs: Mapping[str, Array]) -> Array:
        """Return the features of a table, given its columns."""
        encoder, columns = self.preprocessing.encoder, self.preprocessing.columns
        count = len(next(iter(inputs.values())).ravel())
        if any(array.ndim > 2 or array.size != count or array.shape[:1] != (count,) for array in inputs.values()):
            raise RequestError("inputs: all columns must have the shape [n] or [n, 1], with the same number n of rows")
        if encoder is None:
            table = np.column_stack([_numbers(name, inputs[name]) for name in columns])
            return as_features(table, "the row")[0]
        x, categories = np.full((count, len(columns)), np.nan), list[tuple[str, ...] | None]()
        for number, column in enumerate(encoder.columns):
            names = None
            if column.name in inputs and column.mean is None:
                x[:, number], names = _categories(inputs[column.name])
            elif column.name in inputs:
                x[:, number] = _numbers(column.name, inputs[column.name])
            categories.append(names)
        return as_features(encoder.encode(x, tuple(categories), "the row"), "the row")[0]

    def _array(self, array: Array) -> Array:
        """Return the samples in a single tensor."""
        p, (spec,) = self.preprocessing, self.specs
        kind = p.task.kind
        if array.ndim == 0:
            raise RequestError(f"input {spec.name!r}: a single value; the first axis must index the samples")
        if kind == "image":
            return self._images(array)
        if kind == "text":
            return self._texts(array)
        if array.dtype == object or array.shape[1:] != p.task.input_shape:
            raise self._refused(array)
        return as_features(array.astype(np.float64), "the sample")[0]

    def _images(self, array: Array) -> Array:
        """Return images ``(n, H, W, C)`` from files, or from pixels ``(n, C, H, W)`` or ``(n, H, W, C)``."""
        channels, height, width = self.preprocessing.task.input_shape
        if array.dtype == object:
            if self.preprocessing.sample_kind != "image" or channels not in MODES:
                raise self._refused(array)
            files = _images_in(array.ravel(), (width, height), MODES[channels])
            return np.stack(files) if files else np.empty((0, height, width, channels), np.uint8)
        is_float, expects_float = array.dtype.kind == "f", self.preprocessing.sample_kind == "image-float"
        if array.ndim not in (3, 4) or (expects_float and not is_float):
            raise self._refused(array)
        if array.shape[1:] == (channels, height, width):
            array = array.transpose(0, 2, 3, 1)
        images = as_images(array, "the image")
        if images.shape[1:] != (height, width, channels):
            raise self._refused(array)
        return self._as_fractions(images) if is_float and not expects_float else images

    def _as_fractions(self, images: Array) -> Array:
        """Return images with pixels from 0 to 1, given floating-point pixels from 0 to 255.

        Images whose pixels are all at most 1 are refused, because the caller has probably divided them by 255.
        """
        if images.size and not (images.min() >= 0 and 1 < images.max() <= 255):
            scale = f"pixels from {images.min():.4g} to {images.max():.4g}"
            raise RequestError(
                f"input {self.specs[0].name!r}: {scale}; the model expects pixels from 0 to 255; send them on this "
                "scale, or send whole numbers as UINT8"
            )
        return images / np.float32(255)

    def _texts(self, array: Array) -> Array:
        """Return tokens ``(n, L)`` from texts or tokens."""
        task = self.preprocessing.task
        length = task.input_shape[0]
        if array.dtype == object and self.preprocessing.sample_kind == "text":
            texts = [text.decode(errors="replace") for text in array.ravel()]
            words = self.preprocessing.words
            return all_tokens_of(texts, length, words) if words else hashed(texts, length, task.vocabulary)
        if array.dtype.kind not in "iu" or array.ndim != 2 or array.shape[1] > length:
            raise self._refused(array)
        tokens = array.astype(np.int64)
        if tokens.size and not (tokens.min() >= 0 and tokens.max() < task.vocabulary):
            raise RequestError(f"input {self.specs[0].name!r}: tokens must be from 0 to {task.vocabulary - 1}")
        return np.pad(tokens, ((0, 0), (0, length - tokens.shape[1])))

    def _refused(self, array: Array) -> RequestError:
        kind = "strings" if array.dtype == object else array.dtype.name
        name, shape = self.specs[0].name, list(array.shape)
        return RequestError(
            f"input {name!r}: {kind} of shape {shape}; the model expects a batch of {self.preprocessing.describe()}"
        )


def _specs(preprocessing: Preprocessing) -> tuple[TensorSpec, ...]:
    """Return the inputs of a model in the service, where texts need no tokens."""
    if preprocessing.sample_kind == "text":
        return (TensorSpec("text", "BYTES", (-1,), "texts in UTF-8"),)
    return input_specs(preprocessing)


def _numbers(name: str, column: Array) -> Array:
    """Return a column of numbers, float64 ``(n,)``; a missing value is NaN, or a string such as ``?``."""
    flat = column.ravel()
    if flat.dtype != object:
        return flat.astype(np.float64)
    values = np.full(len(flat), np.nan)
    for row, cell in enumerate(value.decode(errors="replace") for value in flat):
        if is_missing(cell):
            continue
        if (number := number_in(cell)) is None or not math.isfinite(number):
            raise RequestError(f"input {name!r}: {cell!r:.40} is not a number")
        values[row] = number
    return values


def _categories(column: Array) -> tuple[Array, tuple[str, ...]]:
    """Return the index of each row's category, float64 ``(n,)`` with NaN for a missing value, and the categories."""
    flat: Sequence[Any] = column.ravel().tolist()
    cells = [value.decode(errors="replace") if isinstance(value, bytes) else _written(value) for value in flat]
    names = tuple(dict.fromkeys(category_in(cell) for cell in cells if not is_missing(cell)))
    index = {name: number for number, name in enumerate(names)}
    rows = [np.nan if is_missing(cell) else index[category_in(cell)] for cell in cells]
    return np.array(rows, np.float64), names


def _written(value: float) -> str:
    """Return a number as a table contains it; a NaN is a missing value."""
    return "" if math.isnan(value) else str(value)


def _images_in(files: Iterable[bytes], size: tuple[int, int], mode: str) -> list[Array]:
    """Return the pixels ``(H, W, C)`` of image files, cropped and resized to a size."""
    images, total = list[Array](), 0
    for file in files:
        try:
            with Image.open(io.BytesIO(file), formats=FORMATS) as image:
                pixels = image.width * image.height
                total += pixels
                if pixels > MAX_PIXELS or total > MAX_PIXELS_OF_REQUEST:
                    raise RequestError(
                        f"an image of {image.width}x{image.height} pixels; at most {MAX_PIXELS} pixels are allowed in "
                        f"an image, and {MAX_PIXELS_OF_REQUEST} in all images of a request"
                    )
                images.append(pixels_of(image, size, mode))
        except RequestError:
            raise
        except Exception as error:  # a damaged file can make Pillow raise any error
            raise RequestError("an image file cannot be decoded") from error
    return images


def _listed(names: Sequence[str]) -> str:
    """Return the first names, separated by commas."""
    return ", ".join(map(repr, names[:10])) + ", …" * (len(names) > 10)
