"""Tiny stand-ins for the published data sets, written in the layouts in which these are published."""

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
    """Return labels, as many of each class, one class after the other and then again."""
    return np.tile(np.arange(classes), of_each)


def colour(label: int) -> tuple[int, int, int]:
    """Return a colour of a class of its own."""
    return (37 * label % 256, 91 * label % 256, 151 * label % 256)


def mnist(folder: Path, name: str, of_each: int) -> None:
    """MNIST, FashionMNIST: ``<name>/raw`` with train-* and t10k-*; a seventh of the samples are for the test."""
    _write_raw(folder / name / "raw", spread(10, of_each), ("train", "t10k"))


def emnist_letters(folder: Path, of_each: int) -> None:
    """EMNIST: ``EMNIST/raw`` with the split of the letters, which are counted from 1."""
    _write_raw(folder / "EMNIST/raw", 1 + spread(26, of_each), ("emnist-letters-train", "emnist-letters-test"))


def _write_raw(folder: Path, labels: np.ndarray, prefixes: tuple[str, str]) -> None:
    images = np.random.default_rng(0).integers(0, 256, (len(labels), 28, 28), dtype=np.uint8)
    for prefix, part in zip(prefixes, np.split(np.arange(len(labels)), [6 * len(labels) // 7]), strict=True):
        write_idx(folder, prefix, images[part], labels[part].astype(np.uint8))


def cifar(folder: Path, name: str, of_each: int, patch: pytest.MonkeyPatch) -> None:
    """CIFAR-10 or CIFAR-100 as pickles of rows of red, green and blue, whose checksums torchvision then expects."""
    source = getattr(datasets, name)
    ten = name == "CIFAR10"
    labels = spread(10 if ten else 100, of_each)
    rows = np.random.default_rng(0).integers(0, 256, (len(labels), 3072), dtype=np.uint8)
    root = folder / source.base_folder
    root.mkdir(parents=True)

    def written(file: str, content: Mapping[str, Any]) -> str:
        (root / file).write_bytes(pickle.dumps(content))
        return hashlib.md5((root / file).read_bytes(), usedforsecurity=False).hexdigest()

    files = [file for file, _ in (*source.train_list, *source.test_list)]
    key = "labels" if ten else "fine_labels"
    parts = np.array_split(np.arange(len(labels)), len(files))
    sums = [
        [file, written(file, {"data": rows[part], key: labels[part].tolist()})]
        for file, part in zip(files, parts, strict=True)
    ]
    names = DATASETS["cifar10"].classes if ten else CIFAR100_NAMES
    meta = {**source.meta, "md5": written(source.meta["filename"], {source.meta["key"]: list(names)})}
    patch.setattr(source, "train_list", sums[:-1])
    patch.setattr(source, "test_list", sums[-1:])
    patch.setattr(source, "meta", meta)


def tiny_imagenet(folder: Path, classes: int, of_each: int) -> None:
    """Tiny ImageNet: a folder of images for each class, and those for validation in one, with a table of theirs."""
    root, rows = folder / "tiny-imagenet-200", []
    for label in range(classes):
        wnid = f"n{label:08}"
        for number in range(of_each - 1):
            save_image(root / "train" / wnid / "images" / f"{wnid}_{number}.JPEG", colour(label), (64, 64))
        save_image(root / "val/images" / f"val_{label}.JPEG", colour(label), (64, 64))
        rows.append(f"val_{label}.JPEG\t{wnid}\t0\t0\t62\t62\n")
    (root / "val/val_annotations.txt").write_text("".join(rows), encoding="utf-8")


def femnist(folder: Path, writers: int, of_each: int) -> None:
    """FEMNIST as LEAF writes it: files of training and of test samples, with pixels from 0 to 1, by writer."""
    samples = [(place / of_each, place % 62) for place in range(of_each)]
    parts = {"train": samples[: 9 * of_each // 10], "test": samples[9 * of_each // 10 :]}
    for part, of_part in parts.items():
        xs, ys = [x for x, _ in of_part], [y for _, y in of_part]
        users = {f"f{number:04}_00": (xs, ys) for number in range(writers)}
        leaf_file(folder / f"femnist/{part}/all_data_0_niid_0_keep_0_{part}_9.json", users)


def kvasir(folder: Path, of_each: int) -> None:
    """Kvasir: a folder of images, which are no squares, for each class."""
    for label, name in enumerate(KVASIR):
        for number in range(of_each):
            save_image(folder / "kvasir" / name / f"{number}.jpg", colour(label), (72, 57))


def fedisic(folder: Path, of_each: int) -> None:
    """Fed-ISIC2019 as FLamby prepares it: images, and a table with label and centre of each."""
    root, rows = folder / "fedisic", ["image,MEL,target,center,fold,fold2"]
    for number in range(6 * of_each):
        save_image(root / f"ISIC_2019_Training_Input_preprocessed/i{number}.jpg", colour(number % 8), (70, 90))
        rows.append(f"i{number},0.0,{number % 8},{number % 6},train,train_{number % 6}")
    (root / "train_test_split").write_text("\n".join(rows) + "\n", encoding="utf-8")


def agnews(folder: Path, of_each: int) -> None:
    """AG News: rows of class from 1, title and description, all in quotes, without a header."""
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
