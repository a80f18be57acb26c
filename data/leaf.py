"""FEMNIST in LEAF's layout."""

import string
from pathlib import Path

import numpy as np

from posy.data.dataset import Dataset, as_float32, check_lengths, image_dataset, known_labels, numbered
from posy.data.errors import DataError, missing
from posy.data.files import read_json
from posy.data.image import from_npz


def load_femnist(data_dir: Path) -> Dataset:
    """Read FEMNIST from LEAF's JSON files; the writer is the group.

    Raises
    ------
    DataError
        If there are no files, or one is not as LEAF writes it.
    """
    names = tuple(string.digits + string.ascii_uppercase + string.ascii_lowercase)
    found = from_npz("femnist", data_dir, names)
    if found is not None:
        return found
    folders = [data_dir / place / split for place in ("femnist", "femnist/data") for split in ("train", "test")]
    found_in = {folder: sorted(folder.glob("*.json")) for folder in folders}
    files = [path for paths in found_in.values() for path in paths]
    if len({folder.name for folder, paths in found_in.items() if paths}) < 2:
        absent = [folder / "*.json" for folder, paths in found_in.items() if not paths]
        raise missing(
            "femnist",
            [data_dir / "femnist.npz", *absent],
            "put there the .json files that LEAF's preprocessing writes, of train and of test",
        )
    images, labels, writers = [], [], []
    for path in files:
        for user, x, y in _users(path):
            where = f"{path}: user {user}"
            check_lengths(where, x=len(x), y=len(y))
            try:
                pixels, classes = np.array(x, np.float64), np.array(y)
            except (TypeError, ValueError) as error:
                raise DataError(f"{where}: not 784 numbers and one label a sample ({error})") from error
            if pixels.shape != (len(y), 784) or classes.shape != (len(y),):
                raise DataError(
                    f"{where}: x of shape {pixels.shape}, y of shape {classes.shape}; needed are 784 pixels and one "
                    "label a sample"
                )
            pixels = as_float32(pixels, where)
            if pixels.min() < 0 or pixels.max() > 1:
                raise DataError(f"{where}: pixels from {pixels.min()} to {pixels.max()}; allowed are 0 to 1")
            images.append(np.rint(pixels * 255).astype(np.uint8).reshape(-1, 28, 28, 1))
            labels.append(known_labels(classes, len(names), where))
            writers += [user] * len(y)
    check_lengths(str(files[0].parent.parent), samples=len(writers))
    groups = numbered(np.array(writers))
    return image_dataset("femnist", np.concatenate(images), np.concatenate(labels), names, groups)


def _users(path: Path) -> list[tuple[str, list[list[float]], list[int]]]:
    content = read_json(path)
    try:
        found = [(user, content["user_data"][user]["x"], content["user_data"][user]["y"]) for user in content["users"]]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f'{path}: not a LEAF file with "users" and "user_data" ({error!r})') from error
    for user, x, y in found:
        if not isinstance(x, list) or not isinstance(y, list):
            kinds = ", ".join(f"{name} is of type {type(part).__name__}" for name, part in (("x", x), ("y", y)))
            raise DataError(f"{path}: user {user}: {kinds}; needed are two lists")
    return [entry for entry in found if entry[1] or entry[2]]
