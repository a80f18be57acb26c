"""The data sets by name: one table to add to, one function that loads."""

import dataclasses
import difflib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from posy.data import image, text
from posy.data.dataset import Dataset
from posy.data.errors import DataError
from posy.data.leaf import load_femnist
from posy.data.own import load_own
from posy.data.settings import DataSettings
from posy.paths import exists, expanded
from posy.randomness import numpy_generator
from posy.settings import SettingsError

__all__ = ["SOURCES", "DataError", "Dataset", "Source", "describe", "load_dataset"]


@dataclass(frozen=True)
class Source:
    """A named data set.

    Attributes
    ----------
    about : str
        What it holds.
    where : str
        What to put where, below the data directory.
    downloads : bool
        Whether torchvision can fetch it.
    load : callable
        From the data directory and the settings to the data set.
    """

    about: str
    where: str
    downloads: bool
    load: Callable[[Path, DataSettings], Dataset]


def _published(name: str, about: str) -> Source:
    folder = image.PUBLISHED[name].folder
    return Source(
        about, f"{name}.npz, or {folder}/", True, lambda path, s: image.load_published(name, path, s.download)
    )


SOURCES = {
    "digits": Source(
        "1,797 grey 8x8 digits", "nothing: comes with scikit-learn", False, lambda path, s: image.load_digits()
    ),
    "mnist": _published("mnist", "70,000 grey 28x28 digits"),
    "fmnist": _published("fmnist", "70,000 grey 28x28 images of clothes, 10 classes"),
    "cifar10": _published("cifar10", "60,000 RGB 32x32 images, 10 classes"),
    "cifar100": _published("cifar100", "60,000 RGB 32x32 images, 100 classes"),
    "cifar20": Source(
        "CIFAR-100 with its 20 superclasses",
        "cifar20.npz, or what cifar100 needs",
        True,
        lambda path, s: image.load_cifar20(path, s.download),
    ),
    "emnist-letters": _published("emnist-letters", "145,600 grey 28x28 letters, 26 classes"),
    "femnist": Source(
        "grey 28x28 digits and letters, 62 classes; groups: writers",
        "LEAF's femnist/train/*.json and femnist/test/*.json, or femnist.npz",
        False,
        lambda path, s: load_femnist(path),
    ),
    "tiny-imagenet": Source(
        "110,000 RGB 64x64 images, 200 classes",
        "tiny-imagenet-200/train/<wnid>/images/ and val/ with val_annotations.txt, or tiny-imagenet.npz",
        False,
        lambda path, s: image.load_tiny_imagenet(path),
    ),
    "agnews": Source(
        "127,600 news texts, 4 classes, 100 words each",
        "agnews/train.csv and agnews/test.csv, or agnews.csv (class 1-4, title, description)",
        False,
        lambda path, s: text.load_agnews(path),
    ),
    "sent140": Source(
        "tweets, 2 classes, 64 words each; groups: users with 8 or more test samples",
        "sent140/training.1600000.processed.noemoticon.csv, or sent140.csv",
        False,
        lambda path, s: text.load_sent140(path, s.test_fraction),
    ),
    "kvasir": Source(
        "RGB endoscopic images, 8 classes, resized to 64x64",
        "kvasir/<class>/*.jpg, or kvasir.npz",
        False,
        lambda path, s: image.load_kvasir(path),
    ),
    "fedisic": Source(
        "23,247 RGB skin lesions, 8 classes, resized to 64x64; groups: 6 centres",
        "FLamby's fedisic/train_test_split and fedisic/ISIC_2019_Training_Input_preprocessed/*.jpg, or fedisic.npz",
        False,
        lambda path, s: image.load_fedisic(path),
    ),
}


def load_dataset(settings: DataSettings, data_dir: Path, seed: int) -> Dataset:
    """Load a data set by name or path, train and test pooled.

    Parameters
    ----------
    settings : DataSettings
        ``dataset``: a name of :data:`SOURCES`, or a path (absolute, or relative to ``data_dir`` or to
        the working directory); ``download``; ``max_samples``.
    data_dir : Path
        Directory that holds the data sets.
    seed : int
        Draws the subset of ``max_samples``.

    Returns
    -------
    Dataset
        All samples, or the subset in their original order.

    Raises
    ------
    SettingsError
        If there is no such name or path, or ``max_samples`` does not suit the data.
    DataError
        If the data is missing or damaged.
    """
    name = settings.dataset
    try:
        found = SOURCES[name].load(data_dir, settings) if name in SOURCES else load_own(_path_of(name, data_dir), name)
    except OSError as error:
        raise DataError(f"{name}: cannot be read ({error})") from error
    except MemoryError as error:
        raise DataError(f"{name}: more than fits into memory ({error})") from error
    return _subset(found, settings, seed)


def describe() -> list[tuple[str, str, str, str]]:
    """Return a row for each named data set: name, what it holds, what to put where, whether it downloads."""
    return [(name, s.about, s.where, "yes" if s.downloads else "no") for name, s in SOURCES.items()]


def _path_of(name: str, data_dir: Path) -> Path:
    places = dict.fromkeys(place.absolute() for place in (data_dir / name, expanded(name)))
    found = next((place for place in places if name and exists(place)), None)
    if found is None:
        near = difflib.get_close_matches(name, SOURCES, n=2)
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        raise SettingsError(
            f"dataset = {name!r} is neither a name nor a path; {hint}names: {', '.join(SOURCES)}; "
            f"paths looked for: {', '.join(map(str, places))}"
        )
    return found


def _subset(dataset: Dataset, settings: DataSettings, seed: int) -> Dataset:
    size = settings.max_samples
    if size == 0:
        return dataset
    if dataset.given is not None or settings.partition == "file":
        raise SettingsError(
            f"max-samples = {size} does not go with a partition that names its samples "
            "(a PFLlib directory, or partition = 'file'); set it to 0"
        )
    if size > len(dataset):
        raise SettingsError(f"max-samples = {size}: {dataset.name} has {len(dataset)} samples; at most so many, or 0")
    keep = np.sort(numpy_generator(seed, "subset").choice(len(dataset), size, replace=False))
    groups = None if dataset.groups is None else dataset.groups[keep]
    return dataclasses.replace(dataset, x=dataset.x[keep], y=dataset.y[keep], groups=groups)
