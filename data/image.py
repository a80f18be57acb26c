"""Images: arrays of pixels, and folders of image files."""

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
"""Height and width to which images of unequal sizes are brought."""
_SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".ppm", ".pgm"})
_SPLITS = frozenset({"train", "test", "val", "valid", "validation"})


@dataclass(frozen=True)
class Encoded:
    """An image file within another file."""

    where: str
    content: Any  # a buffer, which may still be on the disk

    def __str__(self) -> str:
        """Return where it is, for messages."""
        return self.where


def as_images(x: np.ndarray, where: str) -> np.ndarray:
    """Bring images to ``(N, H, W, C)``: whole numbers 0..255 as uint8, other numbers as float32.

    ``(N, H, W)`` is taken as grey; of the others the channels are the last axis or the one after N: that
    with 1 or 3 entries, else that with 2 or 4, and the last where both have. A pixel must be finite and in range.
    """
    if x.ndim == 3:
        x = x[..., None]
    axis = next((axis for counts in ((1, 3), (2, 4)) for axis in (3, 1) if x.shape[axis] in counts), None)
    if axis is None:
        raise DataError(
            f"{where}: images of shape {x.shape[1:]}; allowed are (height, width), and 1 to 4 channels before or after"
        )
    if axis == 1:
        x = x.transpose(0, 2, 3, 1)
        if not isinstance(x, np.memmap):  # which stays on the disk
            x = np.ascontiguousarray(x)
    if x.dtype == np.uint8:
        return x
    if x.dtype.kind in "iu":
        bad = np.argwhere((x < 0) | (x > 255))
        if len(bad):
            place = tuple(bad[0].tolist())
            raise DataError(f"{where}: pixel {x[place]} at index {place}; whole numbers are allowed from 0 to 255")
        return x.astype(np.uint8)
    if x.dtype.kind != "f":
        raise DataError(f"{where}: pixels of type {x.dtype}; allowed are uint8 or floating-point numbers")
    return as_float32(x, where)


def labelled_images(root: Path) -> tuple[list[Path], np.ndarray, np.ndarray | None]:
    """Find the images of a folder of class folders, or of train/test folders of class folders.

    Hidden folders, and files that are not images, are skipped. The function returns the N files, the names of their
    class folders ``(N,)``, and which of them are in the folder test (without it: val), ``(N,)`` bool. Without both
    folders the last value is ``None``.
    """
    folders, tests = _folders(root), frozenset[str]()
    if folders and (splits := {folder.name.lower() for folder in folders}) <= _SPLITS:
        tests = frozenset({"test"}) if "test" in splits else _SPLITS - {"train"}
        folders = [inner for split in folders for inner in _folders(split)]
    if not folders:
        raise DataError(f"{root}: 0 class folders; needed are two or more, each with the images of a class")
    found = [(folder, path) for folder in folders for path in image_files(folder)]
    names = as_labels(np.array([folder.name for folder, _ in found]), str(root))
    is_test = np.array([folder.parent.name.lower() in tests for folder, _ in found])
    return [path for _, path in found], names, is_test if is_test.any() and not is_test.all() else None


def image_files(folder: Path) -> list[Path]:
    """Return the image files of a folder in order of name; none is a :class:`DataError`."""
    paths = folder.iterdir() if folder.is_dir() else ()
    found = sorted(p for p in paths if p.suffix.lower() in _SUFFIXES and not p.name.startswith("."))
    if not found:
        raise DataError(f"{folder}: no images; allowed are {', '.join(sorted(_SUFFIXES))}")
    return found


def read_images(files: Sequence[Path], size: tuple[int, int] | None = None, mode: str | None = None) -> np.ndarray:
    """Do as :func:`readable_images`, with a :class:`DataError` if files cannot be read."""
    x, problems = readable_images(files, size, mode)
    if problems:
        raise unreadable(problems, len(files))
    return x


def readable_images(
    files: Sequence[Path | Encoded], size: tuple[int, int] | None = None, mode: str | None = None
) -> tuple[np.ndarray, dict[int, DataError]]:
    """Decode the image files that can be read to one uint8 array.

    Parameters
    ----------
    files : sequence of Path or Encoded
        N files.
    size : tuple of int, optional
        (width, height): images of another size are cropped to its aspect ratio around their centre, then resized.
        ``None``: the size of all files, or 64 x 64 if they differ.
    mode : str, optional
        ``L`` (one channel) or ``RGB``; ``None``: ``L`` if all files are grey.

    Returns
    -------
    tuple
        Images ``(n, H, W, C)``, and by their number the errors of the files that are not among them.
    """
    problems: dict[int, DataError] = {}
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        target, form = size, mode
        if size is None or mode is None:
            kinds = list(pool.map(_kind, files))
            problems = {number: kind for number, kind in enumerate(kinds) if isinstance(kind, DataError)}
            known = {kind for kind in kinds if not isinstance(kind, DataError)}
            sizes = {kind[0] for kind in known}
            target = size or (sizes.pop() if len(sizes) == 1 else (DEFAULT_SIDE, DEFAULT_SIDE))
            form = mode or ("L" if all(kind[1] in ("L", "1") for kind in known) else "RGB")
        assert target is not None and form is not None
        shape = (target[1], target[0], 1 if form == "L" else 3)
        good = [number for number in range(len(files)) if number not in problems]
        check_fits(len(good) * math.prod(shape), f"{len(good)} images of {target[0]}x{target[1]} pixels")
        out = np.empty((len(good), *shape), np.uint8)

        def decode(place: int) -> DataError | None:
            try:
                with _opened(files[good[place]]) as image:
                    out[place] = pixels_of(image, target, form)
            except DataError as error:
                return error
            return None

        found = zip(good, pool.map(decode, range(len(good))), strict=True)
        damaged = {number: error for number, error in found if error is not None}
    if not damaged:
        return out, problems
    left = [files[number] for number in good if number not in damaged]
    # Again without the damaged files, whose size and colours would otherwise decide for all files.
    return readable_images(left, size, mode)[0], dict(sorted((problems | damaged).items()))


def image_content(
    path: Path,
    files: Sequence[Path | Encoded],
    labels: np.ndarray,
    size: tuple[int, int] | None,
    mode: str | None,
    skip_unreadable: bool | None,
    **others: np.ndarray | None,
) -> Content:
    """Return the content that N image files and their ``(N,)`` labels are; ``others`` are its groups and its test set.

    The rest is as in :func:`posy.data.own.read_own`.
    """
    x, problems = readable_images(files, size, mode)
    if not problems:
        return Content(path, "image", x, labels, resized=True, **others)  # type: ignore[arg-type]
    if not skip_unreadable or len(problems) == len(files):
        hint = "; with skip-unreadable=true in its node config a site goes on without such files"
        raise unreadable(problems, len(files), hint if skip_unreadable is False else "")
    good = np.setdiff1d(np.arange(len(files)), list(problems))
    first = ", ".join(str(files[number]).removeprefix(f"{path}{os.sep}") for number in list(problems)[:3])
    first += ", …" * (len(problems) > 3)
    count = f"{len(problems)} of {len(files)} image files cannot be read and are skipped"
    notes = [Note(f"{count}: {first}", count)]
    if gone := np.setdiff1d(labels, labels[good]).tolist():
        notes.append(
            Note(
                f"classes without an image that can be read: {', '.join(map(str, gone))}",
                "some classes have no image that can be read",
            )
        )
    kept = {key: None if value is None else value[good] for key, value in others.items()}
    told = tuple(map(str, problems.values()))
    return Content(path, "image", x, labels[good], read_notes=tuple(notes), unreadable=told, resized=True, **kept)  # type: ignore[arg-type]


def pixels_of(image: Image.Image, size: tuple[int, int], mode: str) -> np.ndarray:
    """Return the pixels ``(H, W, C)`` of an image, uint8; ``size`` (width, height) and ``mode`` as in a run's data."""
    check_mode(image, "the image")
    converted = image.convert(mode)
    if converted.size != size:
        converted = ImageOps.fit(converted, size, Image.Resampling.BILINEAR)
    return np.asarray(converted).reshape(size[1], size[0], -1)


def check_mode(image: Image.Image, where: str) -> None:
    """Raise :class:`DataError` for an image of more than 8 bits a channel."""
    if image.mode.startswith(("I", "F")):
        raise DataError(f"{where}: pixels of mode {image.mode}; allowed are images of 8 bits a channel")


def unreadable(problems: Mapping[int, DataError], count: int, hint: str = "") -> DataError:
    """Return the error for image files that cannot be read: the first three of them, and how many."""
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
    """Open an image file; whatever is wrong with it becomes a DataError."""
    if isinstance(path, Path):
        check_regular(path)
    try:
        with Image.open(path if isinstance(path, Path) else io.BytesIO(path.content)) as image:
            check_mode(image, str(path))
            yield image
    except DataError:
        raise
    except Exception as error:  # a damaged file can make Pillow fail in any way
        raise DataError(f"{path}: not an image that can be read ({error})") from error


def _folders(root: Path) -> list[Path]:
    return sorted(path for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))
