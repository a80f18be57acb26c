"""Read images from arrays of pixels, and from folders of image files."""

import io
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps

from posy.data.dataset import Content
from posy.data.errors import DataError, Note
from posy.data.files import check_fits, check_regular
from posy.data.labels import as_labels
from posy.data.values import as_float32

DEFAULT_SIDE = 64
"""Default height and width for images of unequal sizes."""
_SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".ppm", ".pgm"})
_SPLITS = frozenset({"train", "test", "val", "valid", "validation"})


@dataclass(frozen=True)
class Encoded:
    """An image file that is embedded in another file."""

    where: str
    content: Any  # a buffer, which may be memory-mapped

    def __str__(self) -> str:
        """Return the location of the file, for messages."""
        return self.where


def as_images(x: np.ndarray, where: str) -> np.ndarray:
    """Return images as ``(N, H, W, C)``: integers 0..255 as uint8, floats as float32.

    Arrays ``(N, H, W)`` contain grey images. Otherwise, the channel axis is the last axis or the axis after N. An axis
    with 1 or 3 entries takes precedence over an axis with 2 or 4 entries. If both axes fit equally well, the channel
    axis is the last axis. Integers must be in 0..255, and floats must be finite.
    """
    if x.ndim == 3:
        x = x[..., None]
    axis = next((axis for counts in ((1, 3), (2, 4)) for axis in (3, 1) if x.shape[axis] in counts), None)
    if axis is None:
        raise DataError(
            f"{where}: images of shape {x.shape[1:]}; allowed: (height, width), and 1 to 4 channels before or after"
        )
    if axis == 1:
        x = x.transpose(0, 2, 3, 1)
        if not isinstance(x, np.memmap):  # a memmap stays on disk
            x = np.ascontiguousarray(x)
    if x.dtype == np.uint8:
        return x
    if x.dtype.kind in "iu":
        invalid = np.argwhere((x < 0) | (x > 255))
        if len(invalid):
            index = tuple(invalid[0].tolist())
            raise DataError(f"{where}: pixel {x[index]} at index {index}; whole numbers from 0 to 255 are allowed")
        return x.astype(np.uint8)
    if x.dtype.kind != "f":
        raise DataError(f"{where}: pixels of type {x.dtype}; allowed: uint8 or floating-point numbers")
    return as_float32(x, where)


def labelled_images(root: Path) -> tuple[list[Path], np.ndarray, np.ndarray | None]:
    """Return the images in class folders, or in train and test folders that contain class folders.

    The function skips hidden folders, and files that are not images. It returns the N files, the names of their class
    folders ``(N,)``, and whether each file is in the test folder, ``(N,)`` bool. If there is no test folder, a
    validation folder is used instead. Without either folder, the last value is ``None``.
    """
    folders, tests = _folders(root), frozenset[str]()
    if folders and (splits := {folder.name.lower() for folder in folders}) <= _SPLITS:
        tests = frozenset({"test"}) if "test" in splits else _SPLITS - {"train"}
        folders = [inner for split in folders for inner in _folders(split)]
    if not folders:
        raise DataError(f"{root}: 0 class folders; it needs two or more, each with the images of a class")
    pairs = [(folder, path) for folder in folders for path in image_files(folder)]
    names = as_labels(np.array([folder.name for folder, _ in pairs]), str(root))
    is_test = np.array([folder.parent.name.lower() in tests for folder, _ in pairs])
    return [path for _, path in pairs], names, is_test if is_test.any() and not is_test.all() else None


def image_files(folder: Path) -> list[Path]:
    """Return the image files in a folder, sorted by name, or raise :class:`DataError` if there are none."""
    paths = folder.iterdir() if folder.is_dir() else ()
    files = sorted(p for p in paths if p.suffix.lower() in _SUFFIXES and not p.name.startswith("."))
    if not files:
        raise DataError(f"{folder}: no images; allowed: {', '.join(sorted(_SUFFIXES))}")
    return files


def read_images(files: Sequence[Path], size: tuple[int, int] | None = None, mode: str | None = None) -> np.ndarray:
    """Decode images as :func:`readable_images` does, or raise :class:`DataError` if a file cannot be read."""
    x, problems = readable_images(files, size, mode)
    if problems:
        raise unreadable(problems, len(files))
    return x


def readable_images(
    files: Sequence[Path | Encoded], size: tuple[int, int] | None = None, mode: str | None = None
) -> tuple[np.ndarray, dict[int, DataError]]:
    """Decode the readable image files into one uint8 array.

    Parameters
    ----------
    files : sequence of Path or Encoded
        N files.
    size : tuple of int, optional
        (width, height). Images of any other size are centre-cropped to its aspect ratio, then resized. ``None``: the
        common size of all files, or 64 x 64 if their sizes differ.
    mode : str, optional
        ``L`` (one channel) or ``RGB``; ``None``: ``L`` if all files are grey.

    Returns
    -------
    tuple
        Images ``(n, H, W, C)``, and the errors for the unreadable files, keyed by file index.
    """
    problems: dict[int, DataError] = {}
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        common_size, common_mode = size, mode
        if size is None or mode is None:
            headers = list(pool.map(_kind, files))
            problems = {number: header for number, header in enumerate(headers) if isinstance(header, DataError)}
            readable = {header for header in headers if not isinstance(header, DataError)}
            sizes = {header[0] for header in readable}
            common_size = size or (sizes.pop() if len(sizes) == 1 else (DEFAULT_SIDE, DEFAULT_SIDE))
            common_mode = mode or ("L" if all(header[1] in ("L", "1") for header in readable) else "RGB")
        assert common_size is not None and common_mode is not None
        shape = (common_size[1], common_size[0], 1 if common_mode == "L" else 3)
        usable = [number for number in range(len(files)) if number not in problems]
        check_fits(len(usable) * math.prod(shape), f"{len(usable)} images of {common_size[0]}x{common_size[1]} pixels")
        out = np.empty((len(usable), *shape), np.uint8)

        def decode(row: int) -> DataError | None:
            try:
                with _opened(files[usable[row]]) as image:
                    out[row] = pixels_of(image, common_size, common_mode)
            except DataError as error:
                return error
            return None

        errors = zip(usable, pool.map(decode, range(len(usable))), strict=True)
        decode_errors = {number: error for number, error in errors if error is not None}
    if not decode_errors:
        return out, problems
    remaining = [files[number] for number in usable if number not in decode_errors]
    # Retry without the damaged files, because their size and colours affected the size and mode of all images.
    return readable_images(remaining, size, mode)[0], dict(sorted((problems | decode_errors).items()))


def image_content(
    path: Path,
    files: Sequence[Path | Encoded],
    labels: np.ndarray,
    size: tuple[int, int] | None,
    mode: str | None,
    skip_unreadable: bool | None,
    **attributes: np.ndarray | None,
) -> Content:
    """Build the content from N image files and their ``(N,)`` labels.

    ``attributes`` contains the groups and the test mask of the content. The other parameters are as in
    :func:`posy.data.readers.own.read_own`.
    """
    x, problems = readable_images(files, size, mode)
    if not problems:
        return Content(path, "image", x, labels, resized=True, **attributes)  # type: ignore[arg-type]
    if not skip_unreadable or len(problems) == len(files):
        hint = "; with skip-unreadable=true in its node config, a site skips such files"
        raise unreadable(problems, len(files), hint if skip_unreadable is False else "")
    usable = np.setdiff1d(np.arange(len(files)), list(problems))
    first = ", ".join(str(files[number]).removeprefix(f"{path}{os.sep}") for number in list(problems)[:3])
    first += ", …" * (len(problems) > 3)
    count = f"{len(problems)} of {len(files)} image files cannot be read and are skipped"
    notes = [Note(f"{count}: {first}", count)]
    if lost_classes := np.setdiff1d(labels, labels[usable]).tolist():
        notes.append(
            Note(
                f"classes without a readable image: {', '.join(map(str, lost_classes))}",
                "some classes have no readable image",
            )
        )
    attributes = {key: None if value is None else value[usable] for key, value in attributes.items()}
    errors = tuple(map(str, problems.values()))
    return Content(
        path,
        "image",
        x,
        labels[usable],
        read_notes=tuple(notes),
        unreadable=errors,
        resized=True,
        **attributes,  # type: ignore[arg-type]
    )


def pixels_of(image: Image.Image, size: tuple[int, int], mode: str) -> np.ndarray:
    """Return the uint8 pixels ``(H, W, C)`` of an image, converted to ``size`` (width, height) and ``mode``."""
    check_mode(image, "the image")
    converted = image.convert(mode)
    if converted.size != size:
        converted = ImageOps.fit(converted, size, Image.Resampling.BILINEAR)
    return np.asarray(converted).reshape(size[1], size[0], -1)


def check_mode(image: Image.Image, where: str) -> None:
    """Raise :class:`DataError` for an image with more than 8 bits per channel."""
    if image.mode.startswith(("I", "F")):
        raise DataError(f"{where}: pixels of mode {image.mode}; images with 8 bits per channel are allowed")


def unreadable(problems: Mapping[int, DataError], count: int, hint: str = "") -> DataError:
    """Return the error for unreadable image files, with the first three errors and the number of files."""
    first = "; ".join(str(error) for error in list(problems.values())[:3])
    if len(problems) == 1:
        return DataError(f"{first}{hint}", "unreadable-images", count=1)
    return DataError(
        f"{len(problems)} of {count} images cannot be read: {first}{'; …' * (len(problems) > 3)}{hint}",
        "unreadable-images",
        count=len(problems),
    )


def _kind(path: Path | Encoded) -> tuple[tuple[int, int], str] | DataError:
    try:
        with _opened(path) as image:
            return image.size, image.mode
    except DataError as error:
        return error


@contextmanager
def _opened(path: Path | Encoded) -> Iterator[Image.Image]:
    """Open an image file, turning every error into :class:`DataError`."""
    if isinstance(path, Path):
        check_regular(path)
    try:
        with Image.open(path if isinstance(path, Path) else io.BytesIO(path.content)) as image:
            check_mode(image, str(path))
            yield image
    except DataError:
        raise
    except Exception as error:  # a damaged file can make Pillow raise any error
        raise DataError(f"{path}: not an image that can be read ({error})") from error


def _folders(root: Path) -> list[Path]:
    return sorted(path for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))
