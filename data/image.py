"""Images: the published sets through torchvision or .npz, and folders of image files."""

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from logging import INFO
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock
from flwr.common.logger import log
from PIL import Image, ImageOps

from posy.data.dataset import (
    Dataset,
    Part,
    as_float32,
    as_labels,
    check_alike,
    check_lengths,
    check_shape,
    image_dataset,
    joined_labels,
    known_labels,
    mapped_labels,
    numbered,
)
from posy.data.errors import DataError, missing
from posy.data.files import check_fits, check_regular
from posy.data.npz import NpzFile
from posy.data.text import rows_of

Arrays = tuple[np.ndarray, np.ndarray]

SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".ppm", ".pgm"})
SPLITS = frozenset({"train", "test", "val", "valid", "validation"})
DEFAULT_SIDE = 64
_UNREADABLE = (RuntimeError, OSError, ValueError, TypeError, LookupError, AssertionError)  # raised by torchvision


@dataclass(frozen=True)
class Published:
    """A published set of images that torchvision reads.

    Attributes
    ----------
    reader : str
        Class in ``torchvision.datasets``.
    folder : str
        Where torchvision keeps it, below the data directory.
    shape : tuple of int
        ``(H, W, C)`` of one image.
    class_names : tuple of str
        In the order of the labels.
    options : tuple
        Further arguments of the reader.
    convert : callable or None
        From what torchvision holds to upright images and labels from 0.
    """

    reader: str
    folder: str
    shape: tuple[int, int, int]
    class_names: tuple[str, ...]
    options: tuple[tuple[str, Any], ...] = ()
    convert: Callable[[np.ndarray, np.ndarray], Arrays] | None = None


CIFAR20 = {
    "aquatic_mammals": "beaver dolphin otter seal whale",
    "fish": "aquarium_fish flatfish ray shark trout",
    "flowers": "orchid poppy rose sunflower tulip",
    "food_containers": "bottle bowl can cup plate",
    "fruit_and_vegetables": "apple mushroom orange pear sweet_pepper",
    "household_electrical_devices": "clock keyboard lamp telephone television",
    "household_furniture": "bed chair couch table wardrobe",
    "insects": "bee beetle butterfly caterpillar cockroach",
    "large_carnivores": "bear leopard lion tiger wolf",
    "large_man-made_outdoor_things": "bridge castle house road skyscraper",
    "large_natural_outdoor_scenes": "cloud forest mountain plain sea",
    "large_omnivores_and_herbivores": "camel cattle chimpanzee elephant kangaroo",
    "medium_mammals": "fox porcupine possum raccoon skunk",
    "non-insect_invertebrates": "crab lobster snail spider worm",
    "people": "baby boy girl man woman",
    "reptiles": "crocodile dinosaur lizard snake turtle",
    "small_mammals": "hamster mouse rabbit shrew squirrel",
    "trees": "maple_tree oak_tree palm_tree pine_tree willow_tree",
    "vehicles_1": "bicycle bus motorcycle pickup_truck train",
    "vehicles_2": "lawn_mower rocket streetcar tank tractor",
}
CIFAR100_NAMES = tuple(sorted(name for members in CIFAR20.values() for name in members.split()))
_SUPERCLASS = {name: label for label, members in enumerate(CIFAR20.values()) for name in members.split()}
TO_SUPERCLASS = np.array([_SUPERCLASS[name] for name in CIFAR100_NAMES])

KVASIR = (
    "dyed-lifted-polyps",
    "dyed-resection-margins",
    "esophagitis",
    "normal-cecum",
    "normal-pylorus",
    "normal-z-line",
    "polyps",
    "ulcerative-colitis",
)
FEDISIC = ("MEL", "NV", "BCC", "AK", "BKL", "DF", "VASC", "SCC")
PUBLISHED = {
    "mnist": Published("MNIST", "MNIST/raw", (28, 28, 1), tuple("0123456789")),
    "fmnist": Published(
        "FashionMNIST",
        "FashionMNIST/raw",
        (28, 28, 1),
        ("T-shirt/top", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot"),
    ),
    "cifar10": Published(
        "CIFAR10",
        "cifar-10-batches-py",
        (32, 32, 3),
        ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
    ),
    "cifar100": Published("CIFAR100", "cifar-100-python", (32, 32, 3), CIFAR100_NAMES),
    "emnist-letters": Published(
        "EMNIST",
        "EMNIST/raw",
        (28, 28, 1),
        tuple("abcdefghijklmnopqrstuvwxyz"),
        options=(("split", "letters"),),
        # The files hold the images transposed, and count the letters from 1.
        convert=lambda x, y: (np.ascontiguousarray(x.swapaxes(1, 2)), y - 1),
    ),
}


def load_digits() -> Dataset:
    """Return scikit-learn's 1,797 images of 8x8 pixels; grey values 0..16 become 0..255."""
    from sklearn.datasets import load_digits as bundled  # noqa: PLC0415 - needed by this set alone

    bunch = bundled()
    x = np.rint(bunch.images[..., None] * (255 / 16)).astype(np.uint8)
    return image_dataset("digits", x, bunch.target.astype(np.int64), tuple("0123456789"))


def load_published(name: str, data_dir: Path, download: bool, asked: str = "") -> Dataset:
    """Read ``<data-dir>/<name>.npz``, or else torchvision's own layout, downloading it if allowed.

    Parameters
    ----------
    asked : str
        Name of the set that is made of it, for the message of an error, if that is another.

    Raises
    ------
    DataError
        If it is neither there nor to be had, or damaged.
    """
    source = PUBLISHED[name]
    found = from_npz(name, data_dir, source.class_names, source.shape)
    if found is not None:
        return found
    parts = _torchvision(tuple(filter(None, (asked, name))), source, data_dir, download)
    for split, (images, targets) in zip(("train", "test"), parts, strict=True):
        check_lengths(f"{data_dir / source.folder}: {split}", images=len(images), labels=len(targets))
    x, y = map(np.concatenate, zip(*parts, strict=True))
    if source.convert is not None:
        x, y = source.convert(x, y)
    x = x.reshape(len(x), *source.shape)
    return image_dataset(name, x, known_labels(y, len(source.class_names), name), source.class_names)


def load_cifar20(data_dir: Path, download: bool) -> Dataset:
    """Return CIFAR-100 with its 20 superclasses, or ``<data-dir>/cifar20.npz`` as it is."""
    found = from_npz("cifar20", data_dir, tuple(CIFAR20), (32, 32, 3))
    if found is not None:
        return found
    fine = load_published("cifar100", data_dir, download, asked="cifar20")
    return image_dataset("cifar20", fine.x, TO_SUPERCLASS[fine.y], tuple(CIFAR20))


def from_npz(
    name: str, data_dir: Path, class_names: Sequence[str], shape: tuple[int, int, int] | None = None
) -> Dataset | None:
    """Read a published set from ``<data-dir>/<name>.npz``, if that is there (see :func:`read_npz`)."""
    path = data_dir / f"{name}.npz"
    if not os.path.lexists(path):  # also a link that leads nowhere is meant to be read
        return None
    x, y, groups, _ = read_npz(path)
    if x.ndim not in (3, 4):
        raise DataError(f"{path}: x of shape {x.shape}; allowed are images (N, H, W) or (N, H, W, C)")
    x = as_images(x, str(path))
    if shape is not None and x.shape[1:] != shape:
        raise DataError(f"{path}: images of shape {x.shape[1:]}; those of {name} are {shape} (height, width, channels)")
    return image_dataset(name, x, known_labels(y, len(class_names), str(path)), class_names, groups)


def read_npz(path: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray | None, int]:
    """Return x, y and groups of an .npz file, train and test pooled, and how many of them are the test's.

    Read are ``x_train, y_train`` and, if there, ``x_test, y_test`` and ``groups_train, groups_test``
    (numbers or texts, which become 0, 1, ... in order). Labels are as :func:`posy.data.dataset.as_labels` returns them.

    Raises
    ------
    DataError
        If keys are missing, x and y differ in length, samples hold nothing, or those of train and test are of
        different kinds.
    """
    archive = NpzFile(path)
    splits = [split for split in ("train", "test") if {f"x_{split}", f"y_{split}"} & set(archive.names)]
    if "train" not in splits or not {f"{kind}_{split}" for kind in "xy" for split in splits} <= set(archive.names):
        raise DataError(f"{path}: holds {list(archive.names)}; needed are x_train, y_train and perhaps x_test, y_test")
    for split in splits:
        names = [f"{kind}_{split}" for kind in ("x", "y", "groups") if f"{kind}_{split}" in archive.names]
        check_lengths(str(path), **{name: (archive.shape(name)[0] or (0,))[0] for name in names})
        check_shape(archive.shape(f"x_{split}")[0], str(path))
    groups = None
    if {f"groups_{split}" for split in splits} <= set(archive.names):
        groups = numbered(_named(archive, [f"groups_{split}" for split in splits]))
    names = [f"x_{split}" for split in splits]
    x, tested = archive.pooled(tuple(names)), archive.shape("y_test")[0][0] if "test" in splits else 0
    if tested and x.dtype.kind in "biuf":
        halves = (x[: len(x) - tested], x[len(x) - tested :])
        parts = [Part.of(name, archive.shape(name)[1], half) for name, half in zip(names, halves, strict=True)]
        check_alike(str(path), parts, pixels=x.ndim > 2)
    return x, _named(archive, [f"y_{split}" for split in splits]), groups, tested


def _named(archive: NpzFile, names: Sequence[str]) -> np.ndarray:
    """Return labels or groups of an .npz file, joined."""
    return joined_labels([as_labels(archive.read(name), f"{archive.path}: {name}") for name in names])


def as_images(x: np.ndarray, where: str) -> np.ndarray:
    """Bring images to ``(N, H, W, C)``: whole numbers 0..255 as uint8, other numbers as float32.

    ``(N, H, W)`` is taken as grey; of the others the channels are the last axis or the one after N: that
    with 1 or 3 entries, else that with 2 or 4, and the last where both have.

    Raises
    ------
    DataError
        If neither has 1 to 4 entries, or a pixel is no finite number or out of range.
    """
    if x.ndim == 3:
        x = x[..., None]
    axis = next((axis for counts in ((1, 3), (2, 4)) for axis in (3, 1) if x.shape[axis] in counts), None)
    if axis is None:
        raise DataError(
            f"{where}: images of shape {x.shape[1:]}; allowed are (height, width), and 1 to 4 channels before or after"
        )
    if axis == 1:
        x = np.ascontiguousarray(x.transpose(0, 2, 3, 1))
    if x.dtype == np.uint8:
        return x
    if x.dtype.kind in "iu":
        bad = np.argwhere((x < 0) | (x > 255))
        if len(bad):
            position = tuple(bad[0].tolist())
            raise DataError(
                f"{where}: pixel {x[position]} at index {position}; whole numbers are allowed from 0 to 255"
            )
        return x.astype(np.uint8)
    if x.dtype.kind != "f":
        raise DataError(f"{where}: pixels of type {x.dtype}; allowed are uint8 or floating-point numbers")
    return as_float32(x, where)


def load_tiny_imagenet(data_dir: Path) -> Dataset:
    """Read the published folders: ``train/<wnid>/images`` and ``val`` with ``val_annotations.txt``."""
    found = from_npz("tiny-imagenet", data_dir, [str(i) for i in range(200)], (64, 64, 3))
    if found is not None:
        return found
    roots = [data_dir / "tiny-imagenet-200", data_dir / "tiny-imagenet"]
    root = next((root for root in roots if (root / "train").is_dir()), None)
    if root is None:
        looked_for = [data_dir / "tiny-imagenet.npz", *(root / "train" for root in roots)]
        raise missing("tiny-imagenet", looked_for, "unpack tiny-imagenet-200.zip there")
    wnids = sorted(folder.name for folder in (root / "train").iterdir() if folder.is_dir())
    label = {wnid: number for number, wnid in enumerate(wnids)}
    files = [(path, label[wnid]) for wnid in wnids for path in image_files(root / "train" / wnid / "images")]
    annotations = root / "val" / "val_annotations.txt"
    if not annotations.is_file():
        raise missing("tiny-imagenet", [annotations], "the archive's validation images belong there")
    for number, fields in rows_of(annotations, delimiter="\t"):
        if len(fields) < 2 or fields[1] not in label:
            raise DataError(
                f"{annotations}: row {number}: {fields!r:.80}; needed are an image and one of the folders' wnids"
            )
        files.append((root / "val" / "images" / fields[0], label[fields[1]]))
    y = np.array([number for _, number in files], np.int64)
    return image_dataset("tiny-imagenet", read_images([path for path, _ in files], (64, 64), "RGB"), y, wnids)


def load_kvasir(data_dir: Path) -> Dataset:
    """Read Kvasir's class folders; images are cropped to a centred square and resized to 64x64."""
    found = from_npz("kvasir", data_dir, KVASIR)
    if found is not None:
        return found
    roots = [data_dir / "kvasir", data_dir / "kvasir-dataset-v2", data_dir / "kvasir-dataset"]
    root = next((root for root in roots if root.is_dir()), None)
    if root is None:
        looked_for = [data_dir / "kvasir.npz", *roots]
        raise missing("kvasir", looked_for, "unpack the Kvasir data set there: one folder of images a class")
    files, names, _ = labelled_images(root)
    if absent := set(KVASIR) - set(names):
        raise missing("kvasir", [root / name for name in sorted(absent)], "all 8 classes belong there")
    y, class_names = mapped_labels(names, str(root))
    return image_dataset("kvasir", read_images(files, (DEFAULT_SIDE, DEFAULT_SIDE)), y, class_names)


def load_fedisic(data_dir: Path) -> Dataset:
    """Read Fed-ISIC2019 as FLamby prepares it: the images and its ``train_test_split``.

    The centre of each image is its group; images are cropped to a centred square and resized to 64x64.
    """
    found = from_npz("fedisic", data_dir, FEDISIC)
    if found is not None:
        return found
    root = data_dir / "fedisic"
    tables = [root / "train_test_split", root / "train_test_split.csv", root / "train_test_folds.csv"]
    folders = [root / "ISIC_2019_Training_Input_preprocessed", root / "ISIC_2019_Training_Input"]
    table = next((path for path in tables if path.is_file()), None)
    folder = next((path for path in folders if path.is_dir()), None)
    if table is None or folder is None:
        looked_for = [data_dir / "fedisic.npz", *tables, *folders]
        raise missing("fedisic", looked_for, "put FLamby's train_test_split and one of its image folders there")
    rows = rows_of(table)
    _, header = next(rows, (0, []))
    files, labels, centres = [], [], []
    for number, fields in rows:
        row = dict(zip(header, fields, strict=False))
        try:
            labels.append(int(row["target"]))
            centres.append(int(row["center"]))
            files.append(folder / f"{row['image']}.jpg")
        except (KeyError, ValueError) as error:
            raise DataError(f"{table}: row {number}: needed are image, target and center ({error})") from error
    check_lengths(str(table), rows=len(files))
    y = known_labels(np.array(labels), len(FEDISIC), str(table))
    x = read_images(files, (DEFAULT_SIDE, DEFAULT_SIDE), "RGB")
    return image_dataset("fedisic", x, y, FEDISIC, np.array(centres, np.int64))


def labelled_images(root: Path) -> tuple[list[Path], np.ndarray, np.ndarray | None]:
    """Find the images of a folder of class folders, or of train/test folders of class folders.

    Parameters
    ----------
    root : Path
        The folder; hidden folders and files that are no images are passed over.

    Returns
    -------
    tuple
        The N files; ``(N,)`` names of their class folders; and ``(N,)`` bool, which of them lie in the
        folder test (without one: val), or ``None`` if there is neither.

    Raises
    ------
    DataError
        If there is no class folder, or one holds no image.
    """
    folders, kept = _folders(root), None
    if folders and (splits := {folder.name.lower() for folder in folders}) <= SPLITS:
        kept = SPLITS - {"train"} if "test" not in splits else {"test"}
        folders = [inner for split in folders for inner in _folders(split)]
    if not folders:
        raise DataError(f"{root}: 0 class folders; needed are two or more, each with the images of a class")
    found = [(folder, path) for folder in folders for path in image_files(folder)]
    names = as_labels(np.array([folder.name for folder, _ in found]), str(root))
    is_test = np.array([kept is not None and folder.parent.name.lower() in kept for folder, _ in found])
    return [path for _, path in found], names, is_test if is_test.any() and not is_test.all() else None


def image_files(folder: Path) -> list[Path]:
    """Return the image files of a folder in order of name; none is a :class:`DataError`."""
    found = sorted(path for path in folder.iterdir() if _is_image(path)) if folder.is_dir() else []
    if not found:
        raise DataError(f"{folder}: no images; allowed are {', '.join(sorted(SUFFIXES))}")
    return found


def read_images(files: Sequence[Path], size: tuple[int, int] | None = None, mode: str | None = None) -> np.ndarray:
    """Decode image files to one uint8 array ``(N, H, W, C)``.

    Images of another size are cropped to the target's aspect ratio around their centre and resized. If
    all files are grey the result has one channel, else three.

    Raises
    ------
    DataError
        If files cannot be read: it tells how many, and what is wrong with the first.
    """
    x, problems = readable_images(files, size, mode)
    if problems:
        raise unreadable(problems, len(files))
    return x


def readable_images(
    files: Sequence[Path], size: tuple[int, int] | None = None, mode: str | None = None
) -> tuple[np.ndarray, dict[int, DataError]]:
    """Decode the image files that can be read, as :func:`read_images` does; return what is wrong with the others.

    Returns
    -------
    tuple
        The images ``(N, H, W, C)``, and by their number the errors of the files that are not among them.
    """
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        problems: dict[int, DataError] = {}
        target, form = size, mode
        if size is None or mode is None:
            kinds = list(pool.map(_kind, files))
            problems = {number: kind for number, kind in enumerate(kinds) if isinstance(kind, DataError)}
            known = {kind for kind in kinds if not isinstance(kind, DataError)}
            sizes = {kind[0] for kind in known}
            target = size or (sizes.pop() if len(sizes) == 1 else (DEFAULT_SIDE, DEFAULT_SIDE))
            form = mode or ("L" if all(kind[1] in ("L", "1") for kind in known) else "RGB")
        assert target is not None
        shape = (target[1], target[0], 1 if form == "L" else 3)
        good = [number for number in range(len(files)) if number not in problems]
        check_fits(len(good) * math.prod(shape), f"{len(good)} images of {target[0]}x{target[1]} pixels")
        out = np.empty((len(good), *shape), np.uint8)

        def decode(place: int) -> DataError | None:
            try:
                with _opened(files[good[place]]) as image:
                    converted = image.convert(form)
                    if converted.size != target:
                        converted = ImageOps.fit(converted, target, Image.Resampling.BILINEAR)
                    out[place] = np.asarray(converted).reshape(shape)
            except DataError as error:
                return error
            return None

        found = zip(good, pool.map(decode, range(len(good))), strict=True)
        damaged = {number: error for number, error in found if error is not None}
    if not damaged:
        return out, problems
    problems = dict(sorted((problems | damaged).items()))
    left = [number for number in good if number not in damaged]
    # Again, without them: their size and their colours must not decide on those of the others.
    return readable_images([files[number] for number in left], size, mode)[0], problems


def unreadable(problems: Mapping[int, DataError], count: int, hint: str = "") -> DataError:
    """Return the error for image files that cannot be read: the first three of them, and how many."""
    first = "; ".join(str(error) for error in list(problems.values())[:3])
    if len(problems) == 1:
        return DataError(f"{first}{hint}")
    return DataError(f"{len(problems)} of {count} images cannot be read: {first}{'; …' * (len(problems) > 3)}{hint}")


def _kind(path: Path) -> tuple[tuple[int, int], str] | DataError:
    try:
        with _opened(path) as image:
            return image.size, image.mode
    except DataError as error:
        return error


@contextmanager
def _opened(path: Path) -> Iterator[Image.Image]:
    """Open an image file; whatever is wrong with it becomes a DataError."""
    check_regular(path)
    try:
        with Image.open(path) as image:
            if image.mode.startswith(("I", "F")):
                raise DataError(f"{path}: pixels of mode {image.mode}; allowed are images of 8 bits a channel")
            yield image
    except DataError:
        raise
    except Exception as error:  # a damaged file can make Pillow fail in any way
        raise DataError(f"{path}: not an image that can be read ({error})") from error


def _torchvision(names: tuple[str, ...], source: Published, data_dir: Path, download: bool) -> list[Arrays]:
    """Return train and test of torchvision's reader; its CIFAR files are checked by MD5 before unpickling.

    ``names`` are those of the .npz files that would have served as well, for messages: what was asked for is first.
    """
    from torchvision import datasets  # noqa: PLC0415 - takes seconds to import

    reader = getattr(datasets, source.reader)

    def read(fetch: bool) -> list[Arrays]:
        parts = [reader(str(data_dir), train=part, download=fetch, **dict(source.options)) for part in (True, False)]
        return [(np.asarray(part.data), np.asarray(part.targets)) for part in parts]

    folder = data_dir / source.folder
    is_there = folder.is_dir() and any(folder.iterdir())
    try:
        return read(False)
    except _UNREADABLE as error:
        problem: Exception = error
    if download:
        log(INFO, "Downloading %s to %s", names[-1], data_dir.absolute())
        try:
            data_dir.mkdir(parents=True, exist_ok=True)
            with FileLock(data_dir / f".{names[-1]}.lock"):  # clients in other processes may want it as well
                return read(True)
        except _UNREADABLE as error:
            problem = error
    if is_there:
        raise DataError(
            f"{folder.absolute()}: cannot be read ({problem}); needed are the published files in torchvision's layout"
        ) from problem
    raise missing(
        names[0],
        [*(data_dir / f"{name}.npz" for name in names), folder],
        "put there either an .npz with x_train, y_train, x_test, y_test or the published files in torchvision's "
        f"layout{'' if download else ', or set download = true'} ({problem})",
    ) from problem


def _folders(root: Path) -> list[Path]:
    return sorted(path for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))


def _is_image(path: Path) -> bool:
    return path.suffix.lower() in SUFFIXES and not path.name.startswith(".")
