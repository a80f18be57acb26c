"""Load published data sets and users' files, and refuse invalid files."""

import json
import pickle
import struct
import urllib.request
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from standins import leaf_file, save_image, write_idx

from posy.client_app.workspace import Workspace
from posy.data.augment import crop, crop_and_flip, draw_boxes, draw_places, draw_resized_boxes
from posy.data.client import client_data
from posy.data.dataset import fitted, make_dataset
from posy.data.datasets import load_dataset
from posy.data.errors import DataError
from posy.data.partitions import Partition, partition
from posy.data.published import CIFAR20, CIFAR100_NAMES, DATASETS, KVASIR, describe
from posy.data.readers.published import TO_SUPERCLASS
from posy.data.settings import DataSettings
from posy.data.text import tokenise
from posy.settings import SettingsError
from posy.strategies.registry import read_settings

CPU = torch.device("cpu")


def load(dataset, data_dir=Path("nowhere"), **settings):
    """Return a data set with statistics over all its samples."""
    values = DataSettings(dataset=str(dataset), download=False, **settings)
    raw = load_dataset(values, data_dir, seed=3)
    return fitted(raw, [np.arange(len(raw))], values.vocabulary)


def save_npz(path, **arrays):
    np.savez(path, **arrays)
    return path


# The table


def test_the_table_describes_every_published_data_set():
    assert [row[0] for row in describe()] == list(DATASETS)
    assert all(len(row) == 4 and all(row) for row in describe())


def test_error_for_an_unknown_name_suggests_the_nearest():
    with pytest.raises(SettingsError, match=r"cifar11.*did you mean cifar10"):
        load("cifar11")


@pytest.mark.parametrize("name", [name for name in DATASETS if name not in ("digits", "heart-disease", "diabetes")])
def test_error_for_missing_data_names_the_expected_file(name, tmp_path):
    with pytest.raises(DataError, match="not found") as error:
        load(name, tmp_path)
    assert str(tmp_path.absolute() / f"{name}.") in str(error.value)


@pytest.mark.parametrize("name", ["fmnist", "cifar100", "emnist-letters"])
def test_a_failed_download_raises_the_same_error(name, tmp_path, monkeypatch):
    for variable in ("http_proxy", "https_proxy"):
        monkeypatch.setenv(variable, "http://127.0.0.1:9")  # a port without a listener
    monkeypatch.setenv("no_proxy", "")
    monkeypatch.setattr(urllib.request, "_opener", None)  # it keeps the proxies of the first download in the process
    with pytest.raises(DataError, match="not found") as error:
        load_dataset(DataSettings(dataset=name, download=True), tmp_path / "new", seed=0)
    assert "refused" in str(error.value)


# Published sets


def test_digits_need_no_download():
    digits = load("digits")
    assert digits.x.shape == (1797, 8, 8, 1)
    assert digits.x.dtype == np.uint8
    assert digits.x.max() == 255  # the largest value, 16, becomes 255
    assert digits.task.input_shape == (1, 8, 8)
    assert digits.task.num_classes == 10
    assert np.bincount(digits.y).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]


def test_max_samples_is_a_seeded_subset():
    settings = DataSettings(max_samples=100)
    digits = load("digits")
    first, again, other = (load_dataset(settings, Path("nowhere"), seed) for seed in (1, 1, 2))
    assert len(first) == 100
    assert np.array_equal(first.x, again.x)
    assert not np.array_equal(first.y, other.y)
    rows = {row.tobytes() for row in digits.x}
    assert all(row.tobytes() in rows for row in first.x)
    with pytest.raises(SettingsError, match=r"max-samples = 1798.*1797"):
        load("digits", max_samples=1798)


def test_npz_of_a_published_set_pools_train_and_test(tmp_path):
    x = np.arange(3 * 28 * 28, dtype=np.uint64).reshape(3, 28, 28) % 256
    save_npz(
        tmp_path / "mnist.npz",
        x_train=x[:2].astype(np.uint8),
        y_train=np.uint8([3, 9]),
        x_test=x[2:].astype(np.uint8),
        y_test=np.uint8([0]),
    )
    mnist = load("mnist", tmp_path)
    assert mnist.x.shape == (3, 28, 28, 1)
    assert np.array_equal(mnist.x[..., 0], x)
    assert mnist.y.tolist() == [3, 9, 0]
    assert mnist.y.dtype == np.int64


def test_npz_of_a_published_set_refuses_wrong_labels_and_shapes(tmp_path):
    x = np.zeros((2, 28, 28), np.uint8)
    path = save_npz(tmp_path / "mnist.npz", x_train=x, y_train=np.array([0, 10]))
    with pytest.raises(DataError, match=r"label 10 at index 1; .*0 to 9"):
        load("mnist", tmp_path)
    save_npz(path, x_train=x[:, :27], y_train=np.array([0, 1]))
    with pytest.raises(DataError, match=r"\(27, 28, 1\)"):
        load("mnist", tmp_path)


def test_torchvision_layout_of_mnist_and_emnist(tmp_path):
    rng = np.random.default_rng(0)
    raw = {}
    for folder, prefixes in {
        "MNIST": ("train", "t10k"),
        "EMNIST": ("emnist-letters-train", "emnist-letters-test"),
    }.items():
        for count, prefix in zip((4, 2), prefixes, strict=True):
            images = rng.integers(0, 256, (count, 28, 28), dtype=np.uint8)
            labels = np.arange(1, count + 1, dtype=np.uint8)
            raw.setdefault(folder, []).append(images)
            write_idx(tmp_path / folder / "raw", prefix, images, labels)
    mnist, letters = load("mnist", tmp_path), load("emnist-letters", tmp_path)
    assert np.array_equal(mnist.x[..., 0], np.concatenate(raw["MNIST"]))
    assert mnist.y.tolist() == [1, 2, 3, 4, 1, 2]
    assert np.array_equal(letters.x[..., 0], np.concatenate(raw["EMNIST"]).transpose(0, 2, 1))  # upright
    assert letters.y.tolist() == [0, 1, 2, 3, 0, 1]  # the published labels start at 1
    assert letters.task.class_names[:2] == ("a", "b")


def test_a_damaged_file_is_not_reported_as_missing(tmp_path):
    for prefix in ("train", "t10k"):
        write_idx(tmp_path / "MNIST/raw", prefix, np.zeros((4, 28, 28), np.uint8), np.zeros(4, np.uint8))
    path = tmp_path / "MNIST/raw/train-images-idx3-ubyte"
    for damaged in (path.read_bytes()[:900], b"", b"\0\0\x0a\3" + bytes(40)):
        path.write_bytes(damaged)
        with pytest.raises(DataError, match="MNIST/raw: cannot be read"):
            load("mnist", tmp_path)


def test_unequal_images_and_labels_in_one_part_are_refused(tmp_path):
    for prefix, labels in (("train", 3), ("t10k", 5)):
        write_idx(tmp_path / "MNIST/raw", prefix, np.zeros((4, 28, 28), np.uint8), np.zeros(labels, np.uint8))
    with pytest.raises(DataError, match=r"MNIST/raw: train: .*\(images: 4, labels: 3\)"):
        load("mnist", tmp_path)


def test_an_unknown_cifar_archive_is_not_unpickled(tmp_path):
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    marker = tmp_path / "ran"
    for name in ["test_batch", "batches.meta", *(f"data_batch_{i}" for i in range(1, 6))]:
        (folder / name).write_bytes(pickle.dumps(Touch(marker)))
    with pytest.raises(DataError, match="corrupted"):
        load("cifar10", tmp_path)
    assert not marker.exists()


def test_superclasses_of_cifar100():
    assert len(CIFAR100_NAMES) == len(set(CIFAR100_NAMES)) == 100
    assert np.bincount(TO_SUPERCLASS).tolist() == [5] * 20
    assert list(CIFAR20) == sorted(CIFAR20)
    # Check the first and last fine labels of the published archive: apple is a fruit, worm an invertebrate.
    assert TO_SUPERCLASS[:10].tolist() == [4, 1, 14, 8, 0, 6, 7, 7, 18, 3]
    assert TO_SUPERCLASS[-10:].tolist() == [18, 1, 2, 15, 6, 0, 17, 8, 14, 13]


def test_cifar20_is_made_of_cifar100(tmp_path):
    save_npz(tmp_path / "cifar100.npz", x_train=np.zeros((3, 32, 32, 3), np.uint8), y_train=np.array([0, 1, 99]))
    cifar20 = load("cifar20", tmp_path)
    assert [cifar20.task.class_names[label] for label in cifar20.y] == [
        "fruit_and_vegetables",
        "fish",
        "non-insect_invertebrates",
    ]


def test_femnist_pools_train_and_test_of_a_writer(tmp_path):
    leaf_file(tmp_path / "femnist/train/a.json", {"w2": ([0.0, 1.0], [0, 61]), "w1": ([0.5], [10])})
    leaf_file(tmp_path / "femnist/test/a.json", {"w2": ([0.2], [1])})
    femnist = load("femnist", tmp_path)
    assert femnist.x[:, 0, 0, 0].tolist() == [0, 255, 128, 51]
    assert femnist.y.tolist() == [0, 61, 10, 1]
    assert femnist.groups.tolist() == [1, 1, 0, 1]
    assert femnist.task.class_names[10] == "A"
    (tmp_path / "femnist/test/a.json").unlink()
    with pytest.raises(DataError, match=r"femnist/test/\*\.json"):
        load("femnist", tmp_path)


@pytest.mark.parametrize(
    ("xs", "ys", "message"),
    [
        ([float("nan")], [0], "nan"),
        ([1.5], [0], "allowed: 0 to 1"),
        ([0.0], [62], "label 62 at index 0"),
        ([0.0, 0.0], [1], "unequal length"),
    ],
)
def test_femnist_refuses_invalid_values(tmp_path, xs, ys, message):
    leaf_file(tmp_path / "femnist/train/a.json", {"v": ([0.0], [0])})
    leaf_file(tmp_path / "femnist/test/a.json", {"w": (xs, ys)})
    with pytest.raises(DataError, match=message) as error:
        load("femnist", tmp_path)
    assert "user w" in str(error.value)


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        ([[0.0] * 784], None, "y is of type NoneType"),
        (5, 3, "x is of type int, y is of type int"),
        ([[0.0] * 784] * 2, [[1, 2], [3, 4]], r"y of shape \(2, 2\)"),
        ([[0.0] * 784] * 2, [[1, 2], [3]], "one label per sample"),
        ([[1e300] * 784], [1], r"1e\+300 at index .* float32"),
    ],
)
def test_femnist_refuses_malformed_users(tmp_path, x, y, message):
    for split in ("train", "test"):
        leaf_file(tmp_path / f"femnist/{split}/a.json", {})
    content = {"users": ["w"], "user_data": {"w": {"x": x, "y": y}}}
    (tmp_path / "femnist/test/a.json").write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(DataError, match=rf"test/a\.json: user w: .*{message}"):
        load("femnist", tmp_path)


def test_tiny_imagenet_loads_from_the_published_files(tmp_path):
    root = tmp_path / "tiny-imagenet-200"
    for wnid, value in (("n02", (200, 0, 0)), ("n01", (0, 0, 0))):
        save_image(root / "train" / wnid / "images" / f"{wnid}_0.JPEG", value, (64, 64))
    save_image(root / "val/images/val_0.JPEG", 90, (64, 64), "L")
    (root / "val/val_annotations.txt").write_text("val_0.JPEG\tn02\t0\t0\t62\t62\n", encoding="utf-8")
    tiny = load("tiny-imagenet", tmp_path)
    assert tiny.x.shape == (3, 64, 64, 3)
    assert tiny.y.tolist() == [0, 1, 1]
    assert tiny.x[2, 0, 0].tolist() == [90, 90, 90]  # some images of Tiny ImageNet are grey
    (root / "val/val_annotations.txt").write_text("val_0.JPEG\tn99\n", encoding="utf-8")
    with pytest.raises(DataError, match=r"val_annotations\.txt: row 1"):
        load("tiny-imagenet", tmp_path)
    (root / "val/val_annotations.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(DataError, match=r"val_annotations\.txt: not a text"):
        load("tiny-imagenet", tmp_path)


def test_kvasir_and_fedisic_load_from_image_folders(tmp_path):
    for name in KVASIR:
        save_image(tmp_path / "kvasir" / name / "a.jpg", (10, 20, 30), (100, 80))
    kvasir = load("kvasir", tmp_path)
    assert kvasir.x.shape == (8, 64, 64, 3)
    assert kvasir.task.class_names == KVASIR
    assert load("kvasir", tmp_path, image_size=20).x.shape == (8, 20, 20, 3)
    (tmp_path / "kvasir/polyps").rename(tmp_path / "kvasir/.polyps")
    with pytest.raises(DataError, match="kvasir/polyps\n"):
        load("kvasir", tmp_path)
    root = tmp_path / "fedisic"
    for name in ("i0", "i1"):
        save_image(root / "ISIC_2019_Training_Input_preprocessed" / f"{name}.jpg", (1, 2, 3), (70, 90))
    table = "image,MEL,target,center,fold,fold2\ni1,0.0,7,5,train,train_5\ni0,1.0,0,2,test,test_2\n"
    (root / "train_test_split").write_text(table, encoding="utf-8")
    isic = load("fedisic", tmp_path)
    assert isic.y.tolist() == [7, 0]
    assert [isic.group_names[group] for group in isic.groups] == ["centre 5", "centre 2"]
    assert isic.x.shape == (2, 64, 64, 3)
    assert load("fedisic", tmp_path, image_size=24).task.input_shape == (3, 24, 24)
    (root / "train_test_split").write_text(table.replace(",7,", ",x,"), encoding="utf-8")
    with pytest.raises(DataError, match="row 2"):
        load("fedisic", tmp_path)
    (root / "train_test_split").write_bytes(b"\xff\xfe" + table.encode())
    with pytest.raises(DataError, match="train_test_split: not a text"):
        load("fedisic", tmp_path)


# Text


def test_tokens_are_numbered_by_word_frequency():
    tokens, words = tokenise(["The cat, the CAT the", "a dog isn't", "!!"], length=4, max_words=4)
    # the: 3, cat: 2, and a, dog, isn't: 1 each, in alphabetical order. The vocabulary holds four words.
    assert words == ("the", "cat", "a", "dog")
    assert tokens.tolist() == [[2, 3, 2, 3], [4, 5, 1, 0], [1, 0, 0, 0]]


def test_agnews_loads_from_csv_files(tmp_path):
    (tmp_path / "agnews.csv").write_text('"3","Oil ""up""","Prices, oil"\n"1","War","peace"\n', encoding="utf-8")
    news = load("agnews", tmp_path)
    assert news.y.tolist() == [2, 0]
    assert news.task.input_shape == (100,)
    assert news.x[0, :5].tolist() == [2, 5, 4, 2, 0]  # oil is the most frequent word, then peace, prices, up, war
    assert load("agnews", tmp_path, text_length=3).x.tolist() == [[2, 5, 4], [6, 3, 0]]
    few = load("agnews", tmp_path, vocabulary=3)
    assert (few.x[1, :2].tolist(), few.task.vocabulary) == ([1, 3], 5)  # oil, peace, prices, the unknown, padding
    (tmp_path / "agnews").mkdir()
    (tmp_path / "agnews/train.csv").write_text("class,title,description\n4,a,b\n", encoding="utf-8")
    with pytest.raises(DataError, match=r"agnews/test\.csv"):
        load("agnews", tmp_path)
    (tmp_path / "agnews/test.csv").write_text("Class Index,Title,Description\n2,a,b\n", encoding="utf-8")
    assert load("agnews", tmp_path).y.tolist() == [3, 1]
    (tmp_path / "agnews/test.csv").write_text("4,a,b\n5,a,b\n", encoding="utf-8")
    with pytest.raises(DataError, match=r"test\.csv: row 2.*class 1 to 4"):
        load("agnews", tmp_path)


def test_sent140_keeps_users_with_enough_test_samples(tmp_path):
    rows = [f'"{4 * (i % 2)}","{i}","date","q","{"many" if i < 32 else "few"}","word caf\xe9"' for i in range(63)]
    (tmp_path / "sent140.csv").write_text("\n".join(rows), encoding="latin-1")
    tweets = load("sent140", tmp_path)  # a quarter of 32 is 8, and of 31 is 7.75, rounded to 8
    assert len(tweets) == 63
    assert np.bincount(tweets.groups).tolist() == [31, 32]
    assert len(load("sent140", tmp_path, test_fraction=0.24)) == 32  # 7.44 rounds to 7, 7.68 to 8
    with pytest.raises(DataError, match="no user has 8"):
        load("sent140", tmp_path, test_fraction=0.1)
    (tmp_path / "sent140.csv").write_text('"2","1","d","q","u","neutral"\n', encoding="latin-1")
    with pytest.raises(DataError, match=r"row 1.*polarity"):
        load("sent140", tmp_path)


# Custom .npz


def test_custom_npz_is_found_in_the_data_dir_or_by_its_path(tmp_path):
    path = save_npz(tmp_path / "mine.npz", x_train=np.eye(4), y_train=[5, 5, 7, 9])
    for dataset in (load("mine.npz", tmp_path), load(path)):
        assert dataset.task.kind == "features"
        assert dataset.task.class_names == ("5", "7", "9")
        assert dataset.y.tolist() == [0, 0, 1, 2]


def test_features_are_standardised_and_constant_features_centred(tmp_path):
    x = np.array([[1.0, 7.0], [3.0, 7.0]])
    path = save_npz(tmp_path / "mine.npz", x_train=x, y_train=["b", "a"], groups_train=["s1", "s0"])
    dataset = load(path)
    assert dataset.task.class_names == ("a", "b")
    assert dataset.groups.tolist() == [1, 0]
    both = Partition((np.array([0, 1]),), (np.array([], np.int64),))
    tensors = client_data(dataset, both, 0, DataSettings(), CPU)
    assert tensors.x_train.tolist() == [[-1.0, 0.0], [1.0, 0.0]]
    assert tensors.x_test.shape == (0, 2)
    assert dataset.x.tolist() == x.tolist()  # the data set is unchanged


@pytest.mark.parametrize(
    ("shape", "stored"),
    [
        ((2, 5, 6), (5, 6, 1)),
        ((2, 5, 6, 3), (5, 6, 3)),
        ((2, 3, 5, 6), (5, 6, 3)),
        ((2, 6, 5, 2), (6, 5, 2)),
        ((2, 4, 5, 6), (5, 6, 4)),
        ((2, 2, 6, 5), (6, 5, 2)),
        ((2, 1, 4, 4), (4, 4, 1)),
        ((2, 4, 4, 4), (4, 4, 4)),
        ((2, 3, 3, 3), (3, 3, 3)),
    ],
)
def test_image_layouts_of_custom_npz(tmp_path, shape, stored):
    x = np.random.default_rng(0).integers(0, 256, shape)
    dataset = load(save_npz(tmp_path / "mine.npz", x_train=x, y_train=[0, 1]))
    assert dataset.x.shape[1:] == stored
    assert dataset.x.dtype == np.uint8
    assert np.sort(dataset.x[0].ravel()).tolist() == np.sort(x[0].ravel()).tolist()


def test_float_images_are_not_rescaled(tmp_path):
    x = np.linspace(-1, 1, 24, dtype=np.float32).reshape(2, 2, 2, 3)
    dataset = load(save_npz(tmp_path / "mine.npz", x_train=x, y_train=[0, 1]))
    tensors = client_data(dataset, Partition((np.array([0, 1]),), (np.array([0]),)), 0, DataSettings(), CPU)
    assert np.array_equal(tensors.x_train.permute(0, 2, 3, 1).numpy(), x)


def test_fortran_order_and_unequal_dtypes_are_pooled(tmp_path):
    a, b = np.asfortranarray(np.arange(6.0).reshape(2, 3)), np.full((1, 3), 9, np.int32)
    both = load(save_npz(tmp_path / "m.npz", x_train=a, y_train=[0, 1], x_test=b, y_test=[1]))
    assert both.x.tolist() == [[0, 1, 2], [3, 4, 5], [9, 9, 9]]
    same = load(save_npz(tmp_path / "n.npz", x_train=a, y_train=[0, 1], x_test=np.asfortranarray(-a), y_test=[1, 1]))
    assert same.x.tolist() == [[0, 1, 2], [3, 4, 5], [0, -1, -2], [-3, -4, -5]]


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x_train": [[1.0], [np.nan]], "y_train": [0, 1]}, r"nan at index \(1, 0\)"),
        (
            {"x_train": [[1e300], [-1e300]], "y_train": [0, 1]},
            r"1e\+300 at index \(0, 0\).* only finite float32 numbers",
        ),
        ({"x_train": np.zeros((2, 0)), "y_train": [0, 1]}, r"samples of shape \(0,\)"),
        ({"x_train": np.zeros((2, 0, 3), np.uint8), "y_train": [0, 1]}, r"samples of shape \(0, 3\)"),
        ({"x_train": np.full((2, 2, 2), np.inf), "y_train": [0, 1]}, r"inf at index \(0, 0, 0"),
        ({"x_train": np.full((2, 2, 2), 256), "y_train": [0, 1]}, "pixel 256.*0 to 255"),
        ({"x_train": np.zeros((2, 5, 6, 7)), "y_train": [0, 1]}, r"shape \(5, 6, 7\).* 1 to 4 channels"),
        ({"x_train": np.eye(3), "y_train": [0, 1]}, "x_train: 3, y_train: 2"),
        ({"x_train": np.eye(2), "y_train": [0.0, 0.5]}, "label 0.5 at index 1"),
        ({"x_train": np.eye(2), "y_train": [0.0, np.nan]}, "label nan at index 1"),
        ({"x_train": np.eye(2), "y_train": [1, 1]}, "at least 2 classes"),
        ({"x_train": np.eye(2), "y_train": np.eye(2)}, r"labels of shape \(2, 2\)"),
        ({"x_train": np.zeros((0, 2)), "y_train": []}, "no samples"),
        ({"x_train": np.eye(2)}, "it must have x_train, y_train"),
        ({"x_train": np.eye(2), "y_train": [0, 1], "x_test": np.eye(2)}, "it must have x_train, y_train"),
        ({"x_train": np.eye(2), "y_train": [0, 1], "x_test": np.eye(3)[:2], "y_test": [0, 1]}, "unequal shape"),
        ({"x_train": [0, 1], "y_train": [0, 1]}, "2, 3 or 4 axes"),
        ({"x_train": np.float64(3), "y_train": [0, 1]}, "x_train: 0"),
        ({"x_train": np.array([{}, {}]), "y_train": [0, 1]}, "Python objects"),
    ],
)
@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_invalid_custom_npz_is_refused(tmp_path, arrays, message):
    path = save_npz(tmp_path / "mine.npz", **arrays)
    with pytest.raises(DataError, match=message) as error:
        load(path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize("length", [0, 10, 100, 0.5, 0.9])
def test_a_truncated_npz_is_refused(tmp_path, length):
    path = save_npz(tmp_path / "mine.npz", x_train=np.random.default_rng(0).random((50, 20)), y_train=np.arange(50))
    content = path.read_bytes()
    path.write_bytes(content[: int(length * len(content)) if isinstance(length, float) else length])
    with pytest.raises(DataError, match=r"mine\.npz"):
        load(path)


@pytest.mark.parametrize("with_test_set", [False, True])
def test_an_npz_larger_than_memory_is_refused(tmp_path, with_test_set):
    with zipfile.ZipFile(tmp_path / "mine.npz", "w") as archive:
        for name in ("x_train", "y_train", *(("x_test", "y_test") if with_test_set else ())):
            with archive.open(f"{name}.npy", "w") as stream:
                shape = (10**14, 5) if name[0] == "x" else (10**14,)
                header = {"descr": "<f8", "fortran_order": False, "shape": shape}
                np.lib.format.write_array_header_1_0(stream, header)
    with pytest.raises(DataError, match=r"mine\.npz: does not fit into memory"):
        load(tmp_path / "mine.npz")


def test_a_flipped_byte_is_detected(tmp_path):
    path = save_npz(tmp_path / "mine.npz", x_train=np.zeros((500, 20)), y_train=np.arange(500))
    content = bytearray(path.read_bytes())
    content[40_000] ^= 1
    path.write_bytes(bytes(content))
    with pytest.raises(DataError, match="CRC"):
        load(path)


def test_suspicious_labels_cause_warnings(tmp_path, warnings):
    arrays = {"x_train": np.eye(4), "y_train": [-1, 0, 1, 1], "x_test": np.eye(4)[:2], "y_test": [0, 7]}
    assert load(save_npz(tmp_path / "mine.npz", **arrays)).task.class_names == ("-1", "0", "1", "7")
    assert "mine.npz: negative labels" in warnings.text and ": -1" in warnings.text
    assert "mine.npz: classes that only the test set contains" in warnings.text and ": 7" in warnings.text


# Image folders


def test_image_folders_load_with_and_without_splits(tmp_path):
    for split in ("train", "test"):
        for value, name in enumerate(("cat", "dog")):
            save_image(tmp_path / "split" / split / name / "a.png", (value, value, value))
            save_image(tmp_path / "flat" / name / f"{split}.png", (value, value, value))
    (tmp_path / "flat/cat/notes.txt").write_text("not an image", encoding="utf-8")
    for root, labels in ((tmp_path / "split", [0, 1, 0, 1]), (tmp_path / "flat", [0, 0, 1, 1])):
        dataset = load(root)
        assert dataset.task.class_names == ("cat", "dog")
        assert dataset.task.input_shape == (3, 4, 4)
        assert sorted(dataset.y.tolist()) == [0, 0, 1, 1]
        assert dataset.x[:, 0, 0, 0].tolist() == dataset.y.tolist()
        assert sorted(labels) == sorted(dataset.y.tolist())
        assert load(root, image_size=9).task.input_shape == (3, 9, 9)


def test_images_of_unequal_size_become_64_by_64(tmp_path):
    save_image(tmp_path / "a/1.png", 7, (5, 9), "L")
    save_image(tmp_path / "b/1.png", 9, (8, 8), "L")
    assert load(tmp_path).x.shape == (2, 64, 64, 1)
    save_image(tmp_path / "b/2.png", (1, 2, 3), (8, 8))
    assert load(tmp_path).x.shape == (3, 64, 64, 3)


def test_invalid_image_folders_are_refused(tmp_path):
    save_image(tmp_path / "a/1.png", 7, mode="L")
    with pytest.raises(DataError, match="at least 2 classes"):
        load(tmp_path)
    (tmp_path / "b").mkdir()
    with pytest.raises(DataError, match=r"b: no images"):
        load(tmp_path)
    (tmp_path / "b/1.png").write_bytes((tmp_path / "a/1.png").read_bytes()[:40])
    with pytest.raises(DataError, match=r"1\.png: not an image"):
        load(tmp_path)
    (tmp_path / "b/1.png").write_bytes(b"")
    with pytest.raises(DataError, match=r"1\.png: not an image"):
        load(tmp_path)
    save_image(tmp_path / "b/1.png", 7, mode="I;16")
    with pytest.raises(DataError, match="8 bits"):
        load(tmp_path)


# Custom .csv


def csv(tmp_path, text):
    path = tmp_path / "mine.csv"
    path.write_text(text, encoding="utf-8")
    return path


def test_csv_of_features_loads(tmp_path, warnings):
    dataset = load(csv(tmp_path, "label,height,group,width\n10,1,b,2\n9,3,a,4\n"))
    assert dataset.x.tolist() == [[1, 2], [3, 4]]
    assert dataset.task.class_names == ("9", "10")
    assert dataset.y.tolist() == [1, 0]  # as numbers: 9 before 10
    assert dataset.groups.tolist() == [1, 0]
    assert not [record for record in warnings.records if record.levelname == "WARNING"]
    last = load(csv(tmp_path, "height,kind\n1,x\n2,y\n"))
    assert last.task.class_names == ("x", "y")
    assert "mine.csv: no column is named label" in warnings.text and ", kind" in warnings.text


def test_csv_of_texts_loads(tmp_path, warnings):
    dataset = load(csv(tmp_path, "text,label\nhello world,a\nhello,b\n"))
    assert dataset.task.kind == "text"
    assert dataset.task.input_shape == (200,)
    assert dataset.x[:, :3].tolist() == [[2, 3, 0], [2, 0, 0]]
    assert dataset.task.vocabulary == 4
    assert load(tmp_path / "mine.csv", text_length=1).x.tolist() == [[2], [2]]
    assert "not used" not in warnings.text
    assert np.array_equal(load(csv(tmp_path, "id,text,label,stars\n1,hello world,a,5\n2,hello,b,3\n")).x, dataset.x)
    assert "not use these columns: id, stars" in warnings.text
    assert load(csv(tmp_path, "review,stars\ngood,1\nbad,0\n")).task.kind == "text"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "header row"),
        ("a\n1\n", "at least two columns$"),
        ("1,2\n3,4\n", "first row contains only numbers"),
        ("a,label\n", "no rows"),
        ("a;b;label\n", "no rows"),
        ("age (years, rounded)|label|b\n", "no rows"),
        ("a;b;label\n1;2\n", "row 2 has 2 columns; the header has 3"),
        ("a,label\n1,0\n2\n", "row 3 has 1 columns"),
        ("a,b,label\n1,2,0\n1,,1\n", "row 3, column b: '' is a missing value"),
        ("a,b,label\n1,2,0\n1,?,1\n", "row 3, column b: '\\?' is a missing value"),
        ("a,b,label\n1,2,0\n1,nan,1\n", "row 3, column b: 'nan'"),
        ("a,b,label\n1,2,0\n1,1e999,1\n", "row 3, column b: '1e999'"),
        ("a,b,label\n1,2,0\n1,1e60,1\n", "row 3, column b: '1e60'.* range of float32"),
        ("a,label\n1,0.5\n2,1\n", "row 2, column label: '0.5'"),
        ("a,label\n1,\n2,1\n", "row 2, column label: the label is missing"),
        ("a,label\n1,0\n2,0\n", "at least 2 classes"),
        ("group,label\n1,0\n2,1\n", "no column other than the label"),
    ],
)
@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_invalid_csv_is_refused(tmp_path, text, message):
    path = csv(tmp_path, text)
    with pytest.raises(DataError, match=message) as error:
        load(path)
    assert str(path) in str(error.value)


def test_a_binary_csv_is_refused(tmp_path):
    path = tmp_path / "mine.csv"
    path.write_bytes(b"a,label\n\xff\xfe,1\n")
    with pytest.raises(DataError, match="not a text file in utf-8"):
        load(path)


def test_other_file_types_are_refused(tmp_path):
    (tmp_path / "mine.pkl").write_bytes(b"")
    with pytest.raises(DataError, match=r"allowed: \.npz, \.csv"):
        load(tmp_path / "mine.pkl")


# PFLlib


class Touch:
    """Create a file on unpickling."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def pfllib(root, clients, protocol=4, config=None):
    """Write a directory as PFLlib's save_file does, with the given pickle protocol."""
    for split in ("train", "test"):
        (root / split).mkdir(parents=True)
        for number, client in enumerate(clients):
            array = np.empty((), object)
            array[()] = client[split]
            header = b"\x93NUMPY\x01\x00" + struct.pack("<H", 118)
            text = str({"descr": "|O", "fortran_order": False, "shape": ()}).encode()
            content = header + text.ljust(117) + b"\n" + pickle.dumps(array, protocol=protocol)
            with zipfile.ZipFile(root / split / f"{number}.npz", "w", zipfile.ZIP_DEFLATED) as archive:
                archive.writestr("data.npy", content)
    (root / "config.json").write_text(json.dumps(config or {"num_clients": len(clients)}), encoding="utf-8")
    return root


def images(rng, n):
    return {"x": rng.standard_normal((n, 3, 4, 5)).astype(np.float32), "y": rng.integers(0, 2, n)}


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_pfllib_loads_with_its_partition(tmp_path, protocol):
    rng = np.random.default_rng(0)
    clients = [{"train": images(rng, 4), "test": images(rng, 2)}, {"train": images(rng, 3), "test": images(rng, 1)}]
    clients[0]["train"]["y"][:2] = [0, 1]
    clients[1]["train"]["x"] = np.asfortranarray(clients[1]["train"]["x"])
    clients[1]["test"]["x"] = clients[1]["test"]["x"].astype(">f4")
    dataset = load(pfllib(tmp_path / "p", clients, protocol))
    assert dataset.task.input_shape == (3, 4, 5)
    part = partition(dataset, DataSettings(num_clients=2), seed=0)
    for number, client in enumerate(clients):
        tensors = client_data(dataset, part, number, DataSettings(), CPU)
        assert np.array_equal(tensors.x_train.numpy(), client["train"]["x"])
        assert np.array_equal(tensors.x_test.numpy(), client["test"]["x"])
        assert np.array_equal(tensors.y_train.numpy(), client["train"]["y"])
        assert tensors.x_train.is_contiguous(memory_format=torch.channels_last)
    with pytest.raises(SettingsError, match="num-clients = 3"):
        partition(dataset, DataSettings(num_clients=3), seed=0)
    with pytest.raises(SettingsError, match="max-samples"):
        load(tmp_path / "p", max_samples=3)


def test_pfllib_files_of_numpy_1_and_2_load(tmp_path):
    rng = np.random.default_rng(0)
    client = {"train": {"x": rng.random((2, 5)), "y": np.array([0, 1])}, "test": {"x": rng.random((1, 5)), "y": [1]}}
    root = pfllib(tmp_path / "p", [client])
    for split in ("train", "test"):
        with (root / split / "0.npz").open("wb") as file:
            np.savez_compressed(file, data=client[split])
    dataset = load(root)
    assert dataset.task.kind == "features"
    assert np.array_equal(dataset.x[:2], client["train"]["x"])
    with zipfile.ZipFile(root / "train/0.npz") as archive:
        content = archive.read("data.npy")
    start = content.index(b"\n") + 1
    array = pickle.loads(content[start:])
    old = pickle.dumps(array, protocol=2).replace(b"numpy._core", b"numpy.core")
    assert b"numpy.core" in old
    with zipfile.ZipFile(root / "train/0.npz", "w") as archive:
        archive.writestr("data.npy", content[:start] + old)
    assert np.array_equal(load(root).x, dataset.x)


def test_pfllib_text_as_tokens_and_lengths(tmp_path):
    pairs = np.array([([3, 4, 9], 2), ([5, 6, 7], 3)], dtype=object)
    client = {"train": {"x": pairs, "y": [0, 1]}, "test": {"x": [[8, 1, 2, 2]], "y": [1]}}
    dataset = load(pfllib(tmp_path / "p", [client]))
    assert dataset.task.kind == "text"
    assert dataset.x.tolist() == [[3, 4, 0, 0], [5, 6, 7, 0], [8, 1, 2, 2]]
    assert dataset.task.vocabulary == 9


def test_pfllib_config_sets_the_number_of_classes(tmp_path, warnings):
    train, test = ({"x": np.eye(2), "y": np.array(y)} for y in ([0, 1], [0, 3]))
    config = {"num_clients": 1, "num_classes": 5}
    dataset = load(pfllib(tmp_path / "p", [{"train": train, "test": test}], config=config))
    assert dataset.task.class_names == ("0", "1", "2", "3", "4")
    assert dataset.y.tolist() == [0, 1, 0, 3]
    assert not warnings.records
    for config, message in (
        ({"num_classes": 3}, r"test/0\.npz: label 3 at index 1; allowed: 0 to 2"),
        ({"num_classes": 1}, r"config\.json: holds .*num_classes must be 2 or more"),
        ({"num_classes": "five"}, r"config\.json: not a config of PFLlib"),
    ):
        (tmp_path / "p/config.json").write_text(json.dumps({"num_clients": 1} | config), encoding="utf-8")
        with pytest.raises(DataError, match=message):
            load(tmp_path / "p")


def test_pfllib_client_without_test_samples(tmp_path):
    empty = {"x": np.zeros((0, 5), np.float32), "y": np.zeros(0, np.int64)}
    client = {"train": {"x": np.eye(2, 5, dtype=np.float32), "y": np.array([0, 1])}, "test": empty}
    data = load(pfllib(tmp_path / "p", [client]))
    assert len(client_data(data, partition(data, DataSettings(num_clients=1), 0), 0, DataSettings(), CPU).y_test) == 0
    client["train"], client["test"] = client["test"], client["train"]
    swapped = load(pfllib(tmp_path / "q", [client]))
    with pytest.raises(DataError, match="client 0 has no training sample"):
        partition(swapped, DataSettings(num_clients=1), 0)


def directory_with_pickle(tmp_path, content):
    """Return a PFLlib directory whose only training file holds a given pickle."""
    split = {"x": np.eye(2), "y": np.array([0, 1])}
    root = pfllib(tmp_path / "p", [{"train": split, "test": split}])
    with zipfile.ZipFile(root / "train/0.npz") as archive:
        head = archive.read("data.npy")
    with zipfile.ZipFile(root / "train/0.npz", "w") as archive:
        archive.writestr("data.npy", head[: head.index(b"\n") + 1] + content)
    return root


def test_a_pickle_that_runs_code_is_refused(tmp_path):
    marker = tmp_path / "ran"
    root = directory_with_pickle(tmp_path, pickle.dumps({"x": Touch(marker), "y": [0]}))
    with pytest.raises(DataError, match=r"pathlib.*rejected") as error:
        load(root)
    assert "0.npz" in str(error.value)
    assert not marker.exists()


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("os", "system"),
        ("builtins", "eval"),
        ("builtins", "getattr"),
        ("numpy", "load"),
        ("numpy", "fromfile"),
        ("numpy._core.multiarray", "fromfile"),
        ("numpy.core.multiarray", "_reconstruct.__class__"),
        ("numpy", "dtype.__class__"),
        ("_codecs", "decode"),
        ("_codecs", "register"),
    ],
)
def test_unknown_pickle_globals_are_refused(tmp_path, module, name):
    stack_global = b"\x80\x04\x8c" + bytes([len(module)]) + module.encode() + b"\x8c" + bytes([len(name)])
    for content in (f"c{module}\n{name}\n.".encode(), stack_global + name.encode() + b"\x93."):
        root = directory_with_pickle(tmp_path / str(content[0]), content)
        with pytest.raises(DataError, match="which is rejected"):
            load(root)


def numpy_global(name):
    return f"cnumpy\n{name}\n".encode()


@pytest.mark.parametrize(
    "content",
    [
        numpy_global("dtype") + b"(dS'call'\nS'x'\nsb.",  # sets an attribute of the global object
        numpy_global("dtype") + b"(S'O8'\ntR(I3\nS'|'\nNNNI-1\nI-1\nI63\ntb.",  # only a dtype
        b"cnumpy.core.multiarray\nscalar\n(" + numpy_global("dtype") + b"(S'O8'\ntRS'12345678'\ntR.",  # raw pointers
        b"cnumpy.core.multiarray\nscalar\n(" + numpy_global("dtype") + b"(S'V8'\ntRS'12345678'\ntR.",
        b"c_codecs\nencode\n(Vabc\nVrot13\ntR.",
        b"cnumpy.core.numeric\n_frombuffer\n(S'1234'\n" + numpy_global("dtype") + b"(S'f4'\ntR(I9\nI9\ntS'C'\ntR.",
        b"I1\n.",
        b"",
        b"\x80\x04\x95",
        b"(" * 100 + b".",
    ],
)
def test_malformed_pickles_are_refused(tmp_path, content):
    with pytest.raises(DataError, match=r"0\.npz"):
        load(directory_with_pickle(tmp_path, content))


def test_inconsistent_pfllib_directories_are_refused(tmp_path):
    split = {"x": np.eye(2), "y": np.array([0, 1])}
    clients = [{"train": split, "test": split}] * 3
    root = pfllib(tmp_path / "a", clients, config={"num_clients": 4})
    with pytest.raises(DataError, match=r"num_clients in config\.json: 4"):
        load(root)
    (root / "config.json").unlink()
    (root / "train/1.npz").unlink()
    with pytest.raises(DataError, match=r"1\.npz is missing"):
        load(root)
    uneven = pfllib(tmp_path / "b", [{"train": {"x": np.eye(2), "y": [0]}, "test": split}])
    with pytest.raises(DataError, match=r"unequal length \(x: 2, y: 1\)"):
        load(uneven)
    for name, x, y, message in (
        ("nan", [[0, 1], [np.nan, 2]], [0, 1], r"nan at index \(1, 0\)"),
        ("label", np.eye(2), [0, 0.5], "label 0.5 at index 1"),
        ("nothing", np.zeros((2, 0)), [0, 1], r"samples of shape \(0,\)"),
    ):
        broken = pfllib(tmp_path / name, [*clients, {"train": {"x": np.array(x), "y": y}, "test": split}])
        with pytest.raises(DataError, match=rf"{name}/train/3\.npz: {message}"):
            load(broken)
    ragged = pfllib(tmp_path / "d", [{"train": {"x": [np.eye(2), np.eye(3)], "y": [0, 1]}, "test": split}])
    with pytest.raises(DataError, match="x must be an array of numbers"):
        load(ragged)


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        (5, [0, 1], "x must be"),
        (["ab", "cd"], [0, 1], "x must be"),
        ([[1, "a"], [2, "b"]], [0, 1], "x must be"),
        ([{"a": 1}, {}], [0, 1], "x must be"),
        ([[[1, 2], "x"]] * 2, [0, 1], "x must be"),
        (np.array(["a", "b"]), [0, 1], "type <U1"),
        (np.array([[-1, 2], [1, 2]]), [0, 1], "token -1"),
        (np.eye(2), [{}, {}], "labels of type object"),
        (np.eye(2), None, "unequal length"),
    ],
)
def test_invalid_pfllib_values_are_refused(tmp_path, x, y, message):
    samples = {"x": x, "y": y}
    with pytest.raises(DataError, match=message):
        load(pfllib(tmp_path / "p", [{"train": samples, "test": samples}]))


# The tensors of a client


def test_client_pixels_are_scaled_and_channels_last():
    digits = load("digits")
    part = partition(digits, DataSettings(), seed=0)
    tensors = client_data(digits, part, 4, DataSettings(), CPU)
    expected = digits.x[part.train[4]].transpose(0, 3, 1, 2) / 127.5 - 1
    assert np.allclose(tensors.x_train.numpy(), expected, atol=1e-6)
    assert tensors.x_train.dtype == torch.float32
    assert tensors.x_train.permute(0, 2, 3, 1).is_contiguous()
    assert tensors.y_test.tolist() == digits.y[part.test[4]].tolist()
    assert tensors.num_classes == 10
    with pytest.raises(IndexError, match="client 10"):
        client_data(digits, part, 10, DataSettings(), CPU)


# Augmentation


def test_random_crops_keep_the_range_of_pixels():
    x = torch.full((8, 3, 6, 6), 0.25)
    cropped = crop(x, draw_boxes(len(x), torch.Generator().manual_seed(0)))
    assert torch.allclose(cropped, x)
    assert cropped.is_contiguous(memory_format=torch.channels_last)
    noise = torch.rand(8, 3, 6, 6)
    cropped = crop(noise, draw_boxes(len(noise), torch.Generator().manual_seed(0)))
    assert cropped.min() >= noise.min()
    assert cropped.max() <= noise.max()
    assert not torch.equal(cropped, noise)
    again = crop(noise, draw_boxes(len(noise), torch.Generator().manual_seed(0)))
    assert torch.equal(cropped, again)


def test_random_crops_keep_90_to_100_percent_of_the_area():
    size = 100
    ramp = torch.linspace(0, 1, size).expand(64, 1, size, size)  # the value of a pixel is its column
    image = torch.cat([ramp, ramp.transpose(2, 3)], 1)
    cropped = crop(image, draw_boxes(len(image), torch.Generator().manual_seed(1)))
    width = (cropped[:, 0, 50, 90] - cropped[:, 0, 50, 10]) / 0.8 * (size - 1) / size
    height = (cropped[:, 1, 90, 50] - cropped[:, 1, 10, 50]) / 0.8 * (size - 1) / size
    area = width * height
    assert torch.allclose(width, height, atol=1e-3)
    assert area.min() > 0.899
    assert area.max() < 1.001
    assert area.std() > 0.01  # each image has its own box
    shift = cropped[:, 0, 50, 50] - image[:, 0, 50, 50]
    assert shift.abs().max() < (1 - 0.9**0.5) / 2 + 0.01
    assert shift.min() < -0.005
    assert shift.max() > 0.005


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        ((0.5, 0.5, 0.9), [[1, 2, 3], [4, 5, 6]]),  # the middle of nine positions is the image itself
        ((0.5, 0.5, 0.1), [[3, 2, 1], [6, 5, 4]]),
        ((0.6, 0.5, 0.9), [[4, 5, 6], [-1, -1, -1]]),  # one row down, with a black row below
        ((0.4, 0.4, 0.9), [[-1, -1, -1], [-1, 1, 2]]),
        ((0.5, 0.6, 0.1), [[-1, 3, 2], [-1, 6, 5]]),  # cropped first, then mirrored
        ((0.0, 0.5, 0.9), [[-1, -1, -1], [-1, -1, -1]]),  # four rows up
        ((0.999, 0.999, 0.9), [[-1, -1, -1], [-1, -1, -1]]),
    ],
)
def test_a_padded_crop_by_hand(numbers, expected):
    image = torch.tensor([[1.0, 2, 3], [4, 5, 6]])
    x = torch.stack([image, 10 * image])[None]
    cropped = crop_and_flip(x, torch.tensor([numbers]), torch.tensor([-1.0, -10.0]))
    assert cropped[0, 0].tolist() == expected
    assert torch.equal(cropped[0, 1], 10 * cropped[0, 0])


def test_padded_crops_reach_all_positions_and_mirror_half():
    x = torch.full((4000, 1, 9, 9), -1.0)
    x[:, 0, 4, 4] = 1  # the padding is four pixels, so every crop contains this pixel
    x[:, 0, 4, 5] = 0.5
    cropped = crop_and_flip(x, draw_places(len(x), torch.Generator().manual_seed(0)), torch.tensor([-1.0]))
    assert cropped.is_contiguous(memory_format=torch.channels_last)
    positions = (cropped[:, 0] == 1).flatten(1)
    assert bool((positions.sum(dim=1) == 1).all())
    assert positions.int().argmax(dim=1).unique().tolist() == list(range(81))
    visible = (cropped == 0.5).flatten(1).any(dim=1)
    neighbour = (cropped[visible, 0] == 0.5).flatten(1).int().argmax(dim=1) - positions[visible].int().argmax(dim=1)
    assert set(neighbour.tolist()) == {-1, 1}
    assert abs(float((neighbour == 1).float().mean()) - 0.5) < 0.03


@pytest.mark.parametrize("kind", [np.uint8, np.float32])
def test_padding_of_a_crop_is_black(kind, tmp_path):
    """A pixel of value 0 becomes -1 in images of bytes, and stays 0 in images of floating-point numbers."""
    white = np.full((20, 8, 8, 3), 255 if kind is np.uint8 else 1, kind)
    path = save_npz(tmp_path / "white.npz", x_train=white, y_train=[0, 1] * 10)
    config = {"method": "fedavg", "dataset": str(path), "num-clients": 2, "partition": "iid", "device": "cpu"}
    workspace = Workspace(read_settings({**config, "augment": "crop-flip"}))
    augment = workspace.augment(lambda: torch.Generator().manual_seed(0))
    x = workspace.client_data(0).x_train
    augmented = augment.change(x, augment.numbers([len(x)]))
    assert augmented.unique().tolist() == [-1 if kind is np.uint8 else 0, 1]


def test_a_crop_by_hand():
    """Crop the right half of the bottom three quarters of an image whose pixels hold their coordinates."""
    size = 8
    coordinates = (torch.arange(size) + 0.5) / size
    image = torch.stack([coordinates.expand(size, size), coordinates[:, None].expand(size, size)])[None]
    cropped = crop(image, torch.tensor([[0.5, 0.75, 1.0, 1.0]]))
    inner = slice(1, -1)  # pixels at the rim have no outer neighbour
    assert torch.allclose(cropped[0, 0, 0, inner], 0.5 + 0.5 * coordinates[inner])
    assert torch.allclose(cropped[0, 1, inner, 0], 0.25 + 0.75 * coordinates[inner])


def test_resized_crops_vary_in_aspect_ratio():
    boxes = draw_resized_boxes(4000, torch.Generator().manual_seed(2))
    width, height = boxes[:, 0], boxes[:, 1]
    assert bool((boxes >= 0).all()) and bool((boxes <= 1).all())
    full = (width == 1) & (height == 1)
    area, ratio = (width * height)[~full], (width / height)[~full]
    assert area.min() >= 0.9 - 1e-6
    assert ratio.log().std() > 0.02 and abs(float(ratio.log().mean())) < 0.005
    # A box of area a fits if |log ratio| <= -log a, with probability (-log a) / log(4/3): 0.0518 / 0.2877 on average.
    assert float(full.float().mean()) == pytest.approx((1 - 0.18) ** 10, abs=0.02)


def test_resized_crops_of_test_images_depend_only_on_the_seed():
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 256, (60, 8, 8, 3)).astype(np.uint8), np.arange(60) % 2
    data = make_dataset("images", "image", x, y, ("a", "b"))
    part = Partition((np.arange(20),), (np.arange(20, 40),), (np.arange(40, 60),))
    plain, crops = DataSettings(), DataSettings(augment="resized-crop")
    uncropped = client_data(data, part, 0, plain, CPU)
    first, again, other = (client_data(data, part, 0, crops, CPU, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first.x_train, uncropped.x_train)  # the training loop crops training samples
    for split in ("x_test", "x_validation"):
        images = getattr(first, split)
        assert images.shape == getattr(uncropped, split).shape
        assert not torch.equal(images, getattr(uncropped, split))
        assert torch.equal(images, getattr(again, split))
        assert not torch.equal(images, getattr(other, split))
    assert torch.equal(client_data(data, part, 0, DataSettings(augment="crop"), CPU).x_test, uncropped.x_test)
