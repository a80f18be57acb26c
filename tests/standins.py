"""Tiny synthetic versions of the published data sets, in their published layouts."""

import csv
import hashlib
import json
import pickle
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from torchvision import datasets

from posy.data.published import CIFAR100_NAMES, DATASETS, KVASIR


def save_image(path: Path, value: Any, size: tuple[int, int] = (4, 4), mode: str = "RGB") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, value).save(path)


def idx(array: np.ndarray) -> bytes:
    return struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes()


def write_idx(folder: Path, prefix: str, images: np.ndarray, labels: np.ndarray) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{prefix}-images-idx3-ubyte").write_bytes(idx(images))
    (folder / f"{prefix}-labels-idx1-ubyte").write_bytes(idx(labels))


def leaf_file(path: Path, users: Mapping[str, tuple[Sequence[float], Sequence[int]]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    data = {user: {"x": [[value] * 784 for value in xs], "y": ys} for user, (xs, ys) in users.items()}
    path.write_text(json.dumps({"users": list(users), "num_samples": [], "user_data": data}), encoding="utf-8")


def spread(classes: int, of_each: int) -> np.ndarray:
    """Return labels that cycle through the classes, with ``of_each`` labels of each class."""
    return np.tile(np.arange(classes), of_each)


def colour(label: int) -> tuple[int, int, int]:
    """Return the distinct colour of a class."""
    return (37 * label % 256, 91 * label % 256, 151 * label % 256)


def mnist(folder: Path, name: str, of_each: int) -> None:
    """Write MNIST or FashionMNIST: ``<name>/raw`` with train-* and t10k-*, which has a seventh of the samples."""
    _write_raw(folder / name / "raw", spread(10, of_each), ("train", "t10k"))


def emnist_letters(folder: Path, of_each: int) -> None:
    """Write EMNIST: ``EMNIST/raw`` with the split of the letters, whose labels start at 1."""
    _write_raw(folder / "EMNIST/raw", 1 + spread(26, of_each), ("emnist-letters-train", "emnist-letters-test"))


def _write_raw(folder: Path, labels: np.ndarray, prefixes: tuple[str, str]) -> None:
    images = np.random.default_rng(0).integers(0, 256, (len(labels), 28, 28), dtype=np.uint8)
    for prefix, part in zip(prefixes, np.split(np.arange(len(labels)), [6 * len(labels) // 7]), strict=True):
        write_idx(folder, prefix, images[part], labels[part].astype(np.uint8))


def cifar(folder: Path, name: str, of_each: int, patch: pytest.MonkeyPatch) -> None:
    """Write CIFAR-10 or CIFAR-100 as pickles of RGB rows, and make torchvision expect their checksums."""
    source = getattr(datasets, name)
    is_cifar10 = name == "CIFAR10"
    labels = spread(10 if is_cifar10 else 100, of_each)
    rows = np.random.default_rng(0).integers(0, 256, (len(labels), 3072), dtype=np.uint8)
    root = folder / source.base_folder
    root.mkdir(parents=True)

    def write_pickle(file: str, content: Mapping[str, Any]) -> str:
        (root / file).write_bytes(pickle.dumps(content))
        return hashlib.md5((root / file).read_bytes(), usedforsecurity=False).hexdigest()

    files = [file for file, _ in (*source.train_list, *source.test_list)]
    key = "labels" if is_cifar10 else "fine_labels"
    parts = np.array_split(np.arange(len(labels)), len(files))
    checksums = [
        [file, write_pickle(file, {"data": rows[part], key: labels[part].tolist()})]
        for file, part in zip(files, parts, strict=True)
    ]
    names = DATASETS["cifar10"].classes if is_cifar10 else CIFAR100_NAMES
    meta = {**source.meta, "md5": write_pickle(source.meta["filename"], {source.meta["key"]: list(names)})}
    patch.setattr(source, "train_list", checksums[:-1])
    patch.setattr(source, "test_list", checksums[-1:])
    patch.setattr(source, "meta", meta)


def tiny_imagenet(folder: Path, classes: int, of_each: int) -> None:
    """Write Tiny ImageNet: a folder of training images per class, and a folder of validation images with a table."""
    root, rows = folder / "tiny-imagenet-200", []
    for label in range(classes):
        wnid = f"n{label:08}"
        for number in range(of_each - 1):
            save_image(root / "train" / wnid / "images" / f"{wnid}_{number}.JPEG", colour(label), (64, 64))
        save_image(root / "val/images" / f"val_{label}.JPEG", colour(label), (64, 64))
        rows.append(f"val_{label}.JPEG\t{wnid}\t0\t0\t62\t62\n")
    (root / "val/val_annotations.txt").write_text("".join(rows), encoding="utf-8")


def femnist(folder: Path, writers: int, of_each: int) -> None:
    """Write FEMNIST in the format of LEAF: training and test samples by writer, with pixels from 0 to 1."""
    samples = [(index / of_each, index % 62) for index in range(of_each)]
    parts = {"train": samples[: 9 * of_each // 10], "test": samples[9 * of_each // 10 :]}
    for part, of_part in parts.items():
        xs, ys = [x for x, _ in of_part], [y for _, y in of_part]
        users = {f"f{number:04}_00": (xs, ys) for number in range(writers)}
        leaf_file(folder / f"femnist/{part}/all_data_0_niid_0_keep_0_{part}_9.json", users)


def kvasir(folder: Path, of_each: int) -> None:
    """Write Kvasir: a folder of images per class, which are not square."""
    for label, name in enumerate(KVASIR):
        for number in range(of_each):
            save_image(folder / "kvasir" / name / f"{number}.jpg", colour(label), (72, 57))


def fedisic(folder: Path, of_each: int) -> None:
    """Write Fed-ISIC2019 in the format of FLamby: images, and a table of their labels and centres."""
    root, rows = folder / "fedisic", ["image,MEL,target,center,fold,fold2"]
    for number in range(6 * of_each):
        save_image(root / f"ISIC_2019_Training_Input_preprocessed/i{number}.jpg", colour(number % 8), (70, 90))
        rows.append(f"i{number},0.0,{number % 8},{number % 6},train,train_{number % 6}")
    (root / "train_test_split").write_text("\n".join(rows) + "\n", encoding="utf-8")


def agnews(folder: Path, of_each: int) -> None:
    """Write AG News: quoted rows of class (from 1), title and description, without a header."""
    words = ("election", "match", "shares", "software")
    rows = [
        (label + 1, f"{words[label]} today", f"Of {words[label]}, no. {n}")
        for n in range(of_each)
        for label in range(4)
    ]
    (folder / "agnews").mkdir(parents=True)
    for part, of_part in (("train", rows[4:]), ("test", rows[:4])):
        with (folder / f"agnews/{part}.csv").open("w", newline="", encoding="utf-8") as file:
            csv.writer(file, quoting=csv.QUOTE_ALL).writerows(of_part)
