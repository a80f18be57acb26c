"""Bad data in every format gives the result of an independent computation or a one-line error."""

import json
import math
import os
import pickle
import statistics
import struct
import time
import unicodedata
import zipfile
from collections import Counter
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st
from nodes import POLICY
from PIL import Image

from posy.commands.cli import main
from posy.data.client import client_data
from posy.data.dataset import fitted
from posy.data.datasets import load_dataset
from posy.data.errors import DataError
from posy.data.labels import as_labels, nearly_equal, written_label
from posy.data.partitions import Partition, partition
from posy.data.readers.npz import NpzFile
from posy.data.readers.own import as_dataset, read_own
from posy.data.settings import DataSettings
from posy.data.sites import load_site, read_site
from posy.settings import SettingsError

CPU = torch.device("cpu")
OPEN = DataSettings(dataset="sites")
quick = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def save(path, **arrays):
    np.savez(path, **arrays)
    return path


def write(path, text):
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def load_own(path, name):
    dataset = as_dataset(read_own(path), name)
    return fitted(dataset, [np.arange(len(dataset))], 20_000)


def own_site(path, settings, skip=False):
    return load_site(read_site(path, settings, POLICY, skip), settings, POLICY)


def tensors(dataset, n=None):
    everything = Partition((np.arange(n or len(dataset)),), (np.array([], np.int64),))
    return client_data(dataset, everything, 0, DataSettings(), CPU)


def expect_error(call, *arguments, match=None, seconds=2.0):
    """Check that a call raises a one-line error within ``seconds`` of CPU time, and return the message."""
    started = time.process_time()
    with pytest.raises((DataError, SettingsError), match=match) as caught:
        call(*arguments)
    assert time.process_time() - started < seconds
    assert "\n" not in str(caught.value)
    return str(caught.value)


def standardised(columns):
    """Return (x - mean) / std of each column, computed with fractions."""
    result = []
    for column in columns:
        exact = [Fraction(value) for value in column]
        mean = sum(exact) / len(exact)
        variance = sum((value - mean) ** 2 for value in exact) / len(exact)
        std = float(Decimal(variance.numerator) / Decimal(variance.denominator)) ** 0.5 or 1.0
        result.append([float(value - mean) / std for value in exact])
    return np.array(result).T


# -- standardisation without a loss of digits -----------------------------------------------------------


@pytest.mark.parametrize("form", ["csv", "npz", "site"])
@pytest.mark.parametrize("offset", [0, 1_700_000_000, -(10**12)])
def test_standardisation_keeps_the_precision_of_timestamps(form, offset, tmp_path):
    seconds = [offset + value for value in (0, 3, 10, 11, 40, 86_399)]
    if form == "csv":
        rows = "".join(f"{value},{i % 2}\n" for i, value in enumerate(seconds))
        dataset = load_own(write(tmp_path / "a.csv", "time,label\n" + rows), "a")
    elif form == "npz":
        x = np.array(seconds, np.int64)[:, None]
        dataset = load_own(save(tmp_path / "a.npz", x_train=x, y_train=[0, 1] * 3), "a")
    else:
        x = np.array(seconds, np.float64)[:, None]
        path = save(tmp_path / "a.npz", x_train=x, y_train=[0, 1] * 3)
        mean, std = np.mean(x), np.std(x)
        task_of_run = DataSettings(
            dataset="sites",
            sample_kind="features",
            input_shape="1",
            classes="0,1",
            feature_mean=repr(mean.item()),
            feature_std=repr(std.item()),
        )
        dataset, _ = own_site(path, task_of_run)
    np.testing.assert_allclose(tensors(dataset).x_train.numpy(), standardised([seconds]), rtol=3e-7, atol=1e-9)


@quick
@example(values=[0.0, 0.03125], offset=-3e12)
@given(
    values=st.lists(st.floats(-1e15, 1e15) | st.integers(-(2**53), 2**53), min_size=2, max_size=8),
    offset=st.sampled_from([0, 1.7e9, -3e12]),
)
def test_standardisation_equals_exact_arithmetic(values, offset, tmp_path):
    column = [float(value) + offset for value in values]
    expected, mean, std = standardised([column]), abs(math.fsum(column)) / len(column), statistics.pstdev(column)
    # The mean is a float64, so values that differ from it only in the last bits equal it.
    blur = np.finfo(np.float64).eps * mean / std if std else 0.0
    assume(blur < 1 / 64)
    rows = "".join(f"{value!r},{'ab'[i % 2]}\n" for i, value in enumerate(column))
    table = load_own(write(tmp_path / "a.csv", "x,label\n" + rows), "a")
    array = load_own(
        save(tmp_path / "a.npz", x_train=np.array(column)[:, None], y_train=["ab"[i % 2] for i in range(len(column))]),
        "a",
    )
    for dataset in (table, array):
        np.testing.assert_allclose(tensors(dataset).x_train.numpy(), expected, rtol=1e-5, atol=1e-5 + 2 * blur)


@pytest.mark.parametrize("kind", ["b1", "u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8", "f2", "f4", "f8", ">f8", ">i4"])
def test_features_of_every_numeric_type(kind, tmp_path):
    x = np.array([[0, 1], [1, 1], [1, 0], [0, 0], [1, 1]]).astype(kind)
    dataset = load_own(save(tmp_path / "a.npz", x_train=x, y_train=[0, 1, 0, 1, 0]), "a")
    np.testing.assert_allclose(tensors(dataset).x_train.numpy(), standardised(x.astype(int).T.tolist()), rtol=1e-6)
    assert dataset.x.dtype == np.float32  # float32 holds all values, so a larger type would waste memory


def test_a_feature_of_tiny_scale_is_not_constant(tmp_path):
    x = np.array([[1e-14, 5.0], [3e-14, 5.0]])
    arrays = tensors(load_own(save(tmp_path / "a.npz", x_train=x, y_train=[0, 1]), "a"))
    np.testing.assert_allclose(arrays.x_train.numpy(), [[-1, 0], [1, 0]], rtol=1e-6)


@pytest.mark.parametrize(
    ("name", "x", "notice"),
    [
        ("a.npz", np.array([[2**60], [2**60 + 1]]), "float64 cannot distinguish some values of these features: 0"),
        ("a.npz", np.array([[2**60], [2**61]]), None),
        ("a.csv", [str(2**60), str(2**60 + 1)], "float64 cannot distinguish some values of these columns: x"),
        ("a.csv", ["1700000000", "1700000001"], None),
    ],
)
def test_indistinguishable_feature_values_log_a_warning(name, x, notice, tmp_path, warnings):
    if name == "a.csv":
        dataset = load_own(write(tmp_path / name, f"x,label\n{x[0]},0\n{x[1]},1\n"), "a")
    else:
        dataset = load_own(save(tmp_path / name, x_train=x, y_train=[0, 1]), "a")
    assert (notice or "") in " ".join(dataset.notes)
    assert bool(notice) == ("cannot distinguish" in warnings.text)


def pfllib(root, *clients, config=None):
    """Write a PFLlib directory. Each client (x, y) has the same samples for training and test."""
    for split in ("train", "test"):
        (root / split).mkdir(parents=True)
        for number, (x, y) in enumerate(clients):
            np.savez(root / split / f"{number}.npz", data=np.array({"x": x, "y": y}, dtype=object))
    if config is not None:
        (root / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return root


def test_pfllib_features_are_standardised_in_float64(tmp_path):
    x = np.array([[1.7e9], [1.7e9 + 1], [1.7e9 + 3]])
    root = pfllib(tmp_path / "p", (x, np.array([0, 1, 0])))
    dataset = load_own(root, "p")
    np.testing.assert_allclose(tensors(dataset, 3).x_train.numpy(), standardised([x[:, 0].tolist()]), rtol=3e-7)
    task = DataSettings(
        dataset="sites",
        sample_kind="features",
        input_shape="1",
        classes="0,1",
        feature_mean="1700000001.0",
        feature_std="2",
    )
    site, _ = own_site(root, task)
    assert tensors(site, 3).x_train.flatten().tolist() == [-0.5, 0.0, 1.0]


def test_standard_deviation_that_overflows_is_rejected(tmp_path):
    path = save(tmp_path / "a.npz", x_train=np.array([[1e30], [2.0], [3.0]]), y_train=[0, 1, 0])
    task = DataSettings(
        dataset="sites", sample_kind="features", input_shape="1", classes="0,1", feature_mean="0", feature_std="1e-30"
    )
    expect_error(own_site, path, task, match=r"feature 0 .* range of float32 .* 1e-30")


# -- samples of different kinds --------------------------------------------------------------------------

PIXELS = np.array([[[0, 255], [128, 3]], [[7, 9], [200, 100]]], np.uint8)


@pytest.mark.parametrize(
    ("train", "test", "message"),
    [
        (PIXELS, PIXELS / 255, r"x_train .*\(uint8\) from 0 to 255, x_test .*floating"),
        (PIXELS / 255, PIXELS, r"x_train .*\(float64\) from 0 to 1"),
        (PIXELS.astype(np.float32), (PIXELS / 255).astype(np.float32), "from 0 to 255, x_test.* from 0 to 1"),
        (PIXELS, (PIXELS > 99).astype(np.uint8), "from 0 to 255, x_test.* from 0 to 1"),
        (PIXELS, PIXELS > 99, "x_test holds whole numbers .bool"),
        (PIXELS.reshape(2, 4), PIXELS.reshape(2, 4) / 255, "the same kind and scale"),
        (PIXELS.reshape(2, 4), (PIXELS.reshape(2, 4) > 99).astype(float), "the same kind and scale"),
        (PIXELS, PIXELS.astype(np.int64), None),
        (PIXELS / 255, (PIXELS / 255).astype(np.float32), None),
        (PIXELS / 127.5 - 1, (PIXELS / 127.5 - 1).astype(np.float16), None),
        (PIXELS, np.zeros_like(PIXELS), None),
        (np.eye(2), 3 * np.eye(2, dtype=int), None),
        (np.array([[1.5, 1e6], [2, 3]]), np.array([[0.1, 0.2], [0.3, 0]]), None),
    ],
)
def test_train_and_test_of_different_kinds_are_rejected(train, test, message, tmp_path):
    path = save(tmp_path / "a.npz", x_train=train, y_train=[0, 1], x_test=test, y_test=[0, 1])
    if message is None:
        dataset = load_own(path, "a")
        np.testing.assert_allclose(dataset.x.reshape(4, -1), np.concatenate([train, test]).reshape(4, -1), rtol=1e-3)
    else:
        assert str(path) in expect_error(load_own, path, "a", match=message)


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (np.array([[1, 2], [3, 4]]), r"train/0\.npz holds floating.*, train/1\.npz holds whole numbers"),
        (np.array([[0.5, 100], [1, 2]]), None),
        (np.full((2, 3), 0.5), "unequal shape"),
    ],
)
def test_pfllib_clients_of_different_kinds_are_rejected(second, message, tmp_path):
    y = np.array([0, 1])
    root = pfllib(tmp_path / "p", (np.array([[0.25, 0.5], [1, 0]]), y), (second, y))
    if message is None:
        assert load_own(root, "p").task.kind == "features"
    else:
        expect_error(load_own, root, "p", match=message)


def test_pfllib_images_of_different_scales_are_rejected(tmp_path):
    y, x = np.array([0, 1]), PIXELS[:, None].astype(np.float32)
    root = pfllib(tmp_path / "p", (x, y), (x / 255, y))
    expect_error(load_own, root, "p", match=r"train/0\.npz .* from 0 to 255, train/1\.npz .* from 0 to 1")


# -- identity of labels ----------------------------------------------------------------------------------

INTEGERS = st.integers(-(10**25), 10**25) | st.sampled_from(
    [0, 2**53, 2**53 + 1, 2**63 - 1, 2**63, 2**64, -(2**63) - 1]
)


@quick
@given(labels=st.lists(INTEGERS, min_size=2, max_size=12).filter(lambda labels: len(set(labels)) > 1))
def test_integer_labels_of_any_size_stay_distinct(labels, tmp_path):
    rows = "".join(f"1,{label}\n" for label in labels)
    x = [[1.0]] * len(labels)
    datasets = [load_own(write(tmp_path / "a.csv", "x,label\n" + rows), "a")]
    datasets += [load_own(save(tmp_path / "t.npz", x_train=x, y_train=[str(label) for label in labels]), "t")]
    for kind in (np.int64, np.uint64, np.int8, np.float64):
        # Floating-point labels are read as whole numbers only if each such number has one representation.
        low, high = (1 - 2**53, 2**53 - 1) if kind is np.float64 else (np.iinfo(kind).min, np.iinfo(kind).max)
        if all(low <= label <= high for label in labels):
            datasets.append(load_own(save(tmp_path / "n.npz", x_train=x, y_train=np.array(labels, kind)), "n"))
    if max(map(abs, labels)) >= 2**63:
        datasets.append(load_own(pfllib_with_labels(tmp_path, x, labels), "p"))
    expected = Counter(map(str, labels))
    for dataset in datasets:
        names = dataset.task.class_names
        assert list(names) == [str(label) for label in sorted(set(labels))]  # in numeric order
        assert Counter(names[number] for number in dataset.y) == expected
        assert [names[number] for number in dataset.y][: len(labels)] == [str(label) for label in labels]


def pfllib_with_labels(folder, x, labels):
    root = folder / f"p-{time.monotonic_ns()}"
    path = pfllib(root, (np.array(x), labels))
    np.savez(path / "test" / "0.npz", data=np.array({"x": np.zeros((0, 1)), "y": []}, dtype=object))
    return path


@pytest.mark.parametrize(
    ("cells", "classes"),
    [
        (["1", "90000000000000000001", "90000000000000000002"], None),
        (["9007199254740992", "9007199254740993"], None),
        (["1", "1.0", "+1", "1e0", "2"], ["1", "2"]),
        (["1.000000000000000000e+00", "2.000000000000000000e+00"], ["1", "2"]),  # as numpy.savetxt writes them
        (["01", "1", "2"], ["01", "1", "2"]),
        (["-0", "0", "1"], ["0", "1"]),
        (["2", "10", "-3"], ["-3", "2", "10"]),
        (["2", "10", "x"], ["10", "2", "x"]),
        ([" cat", "cat ", "dog"], ["cat", "dog"]),
        (["caf\u00e9", "cafe\u0301", "tea"], ["caf\u00e9", "tea"]),
        (["True", "False"], ["False", "True"]),
        (["1_000", "1000"], ["1000", "1_000"]),
        (["1e400", "2"], "whole numbers or strings"),
        (["0.5", "1"], "row 2.*'0.5'"),
        (["inf", "1"], "'inf'"),
        ([" ", "1"], "row 2.*the label is missing"),
    ],
)
def test_table_labels_are_normalised_or_rejected(cells, classes, tmp_path):
    path = write(tmp_path / "a.csv", "x,label\n" + "".join(f"1,{cell}\n" for cell in cells))
    if isinstance(classes, str):
        expect_error(load_own, path, "a", match=classes)
    else:
        assert list(load_own(path, "a").task.class_names) == (classes or sorted(cells, key=int))


@given(st.text(max_size=30))
@settings(max_examples=200, deadline=None)
def test_label_normalisation_is_idempotent(cell):
    name = written_label(cell)
    assert written_label(name) == name
    assert name == unicodedata.normalize("NFC", name).strip() or name.isascii()
    try:
        value = Fraction(cell.strip())
    except (ValueError, ZeroDivisionError):
        return
    if name.lstrip("-").isascii() and name.lstrip("-").isdigit():
        assert Fraction(name) == value


@pytest.mark.parametrize(
    ("y", "expected"),
    [
        (np.array([0, 2**64 - 1], np.uint64), ["0", str(2**64 - 1)]),
        (np.array([2**53, 2**53 + 1]), [str(2**53), str(2**53 + 1)]),
        (np.array([True, False]), ["0", "1"]),
        (np.array([b"x", "caf\u00e9".encode()]), ["caf\u00e9", "x"]),
        (np.array(["10", "9"]), ["9", "10"]),
        (np.array([[3.0], [4.0]]), ["3", "4"]),
        (np.array([2.0**53, 1]), "float64 cannot distinguish .*9007199254740992"),
        (np.array([3000, 1], np.float16), "float16 cannot distinguish"),
        (np.array([b"\xff", b"a"]), "not UTF-8"),
        (np.array(["", "a"]), "label at index 0 is empty"),
        (np.array([1 + 2j, 1]), "labels of type complex128"),
        (np.array(["2020", "2021"], "M8[Y]"), "labels of type datetime64"),
        (np.array([{}, 1], object), "Python objects"),
        (np.array([0, np.inf]), "label inf at index 1"),
    ],
)
def test_labels_of_every_array_type(y, expected, tmp_path):
    path = save(tmp_path / "a.npz", x_train=np.eye(2), y_train=y)
    if isinstance(expected, str):
        expect_error(load_own, path, "a", match=expected)
    else:
        assert list(load_own(path, "a").task.class_names) == expected


def test_train_and_test_labels_are_matched_by_name(tmp_path):
    path = tmp_path / "a.npz"
    big = np.array([2**63, 5], np.uint64)
    for y_train, y_test, names in (
        (np.array([1, 2]), np.array([1.0, 3.0]), ["1", "2", "3"]),
        (np.array([1.0, 2.0]), np.array(["1", "x"]), ["1", "2", "x"]),
        (np.array([5, 2**53 + 1]), big, ["5", str(2**53 + 1), str(2**63)]),
    ):
        save(path, x_train=np.eye(2), y_train=y_train, x_test=np.eye(2), y_test=y_test)
        assert list(load_own(path, "a").task.class_names) == names


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ("x,label,label", "columns named 'label' and 'label'"),
        ("x,label,Label", "columns named 'label' and 'Label'"),
        ("x,label, label ", "columns named 'label' and 'label'"),
        ("x,text,TEXT,label", "columns named 'text' and 'TEXT'"),
        ("group,x,Group,label", "columns named 'group' and 'Group'"),
        ("x,x,label", "columns named 'x' and 'x'"),
        (",,label", "columns named '' and ''"),
    ],
)
def test_duplicate_column_names_are_rejected(header, message, tmp_path):
    row = ",".join("1" * len(header.split(",")))
    expect_error(load_own, write(tmp_path / "a.csv", f"{header}\n{row}\n"), "a", match=message)


def test_groups_with_large_numbers_stay_distinct(tmp_path):
    rows = "1,90000000000000000001,0\n2, 90000000000000000002,1\n3,90000000000000000001 ,1\n"
    dataset = load_own(write(tmp_path / "a.csv", "x,group,label\n" + rows), "a")
    assert dataset.groups.tolist() == [0, 1, 0]
    expect_error(
        load_own, write(tmp_path / "b.csv", "x,group,label\n1,,0\n2,a,1\n"), "b", match="row 2, column group: the"
    )


def test_suspicious_tables_get_notes(tmp_path, warnings):
    dataset = load_own(write(tmp_path / "a.csv", ",X,x,kind\n1,2,3,Cat\n1,2,3,cat\n1,2,3,nan\n"), "a")
    expected = (
        "no column is named label",
        "column 1 has no name",
        "nearly equal names: X, x",
        "columns with the same value in all rows: , X, x",
        "missing value is a separate class: nan",
        "'Cat' and 'cat' are separate classes",
    )
    for note, words in zip(dataset.notes, expected, strict=True):
        assert words in note
    assert all(f"a.csv: {note}" in warnings.text for note in dataset.notes)


def test_nearly_equal_names():
    assert nearly_equal(["Cat", "cat", "dog", "1", "01", "1.0", "-1", "A-", "A", "no-polyp", "No Polyp"]) == [
        ["01", "1", "1.0"],
        ["Cat", "cat"],
        ["No Polyp", "no-polyp"],
    ]
    assert nearly_equal(["ﬁn", "fin", "cat\u200b", "cat"]) == [["cat", "cat\u200b"], ["fin", "ﬁn"]]


# -- bounded time and memory -----------------------------------------------------------------------------


def make_special(folder, kind):
    """Create a path that is not a regular file: a fifo, a directory, a link loop or a device."""
    if kind == "fifo":
        os.mkfifo(folder)
    elif kind == "directory":
        folder.mkdir()
    elif kind == "loop":
        folder.symlink_to(folder)
    else:
        folder.symlink_to("/dev/zero")
    return folder


@pytest.mark.parametrize("kind", ["fifo", "directory", "loop", "device"])
@pytest.mark.parametrize("name", ["a.csv", "a.npz", "mnist.npz", "img/a/1.png", "p/config.json", "p/train/0.npz"])
def test_special_files_are_rejected_at_once(name, kind, tmp_path):
    x, y = np.eye(2), np.array([0, 1])
    pfllib(tmp_path / "p", (x, y))
    (tmp_path / "img" / "a").mkdir(parents=True)
    path = tmp_path / name
    path.unlink(missing_ok=True)
    make_special(path, kind)
    root = tmp_path / name.split("/")[0]
    dataset = "mnist" if name == "mnist.npz" else str(root)
    if (name, kind) == ("a.csv", "directory") or (name, kind) == ("a.npz", "directory"):
        message = "0 class folders"
    elif kind == "loop" and name not in ("img/a/1.png", "p/config.json"):
        message = "neither a name nor a path|not found|0 class folders|no images|cannot be opened"
    else:
        message = "not a regular file|cannot be opened|0 class folders|no images|no class folder"
    started = time.process_time()
    with pytest.raises((DataError, SettingsError), match=message):
        load_dataset(DataSettings(dataset=dataset, download=False), tmp_path, 1)
    assert time.process_time() - started < 2


@pytest.mark.parametrize("kind", ["fifo", "device", "loop"])
def test_partition_and_catalogue_files_must_be_regular(kind, tmp_path):
    path = make_special(tmp_path / "parts.json", kind)
    digits = load_dataset(DataSettings(), tmp_path, 1)
    chosen = DataSettings(partition="file", partition_file=str(path), num_clients=2)
    expect_error(partition, digits, chosen, 1, match="not a regular file|cannot be opened|looked for")
    for split in ("train", "test"):
        (tmp_path / "femnist" / split).mkdir(parents=True)
        make_special(tmp_path / "femnist" / split / "a.json", kind)
    expect_error(
        load_dataset, DataSettings(dataset="femnist"), tmp_path, 1, match="not a regular file|cannot be opened"
    )
    (tmp_path / "agnews.csv").symlink_to(path)
    with pytest.raises(DataError, match=r"not found|not a regular file"):
        load_dataset(DataSettings(dataset="agnews"), tmp_path, 1)


def test_symbolic_link_to_a_file_is_read(tmp_path):
    write(tmp_path / "real.csv", "x,label\n1,a\n2,b\n")
    (tmp_path / "a.csv").symlink_to(tmp_path / "real.csv")
    assert len(load_own(tmp_path / "a.csv", "a")) == 2


@pytest.mark.parametrize("name", ["", "a\0b", "x" * 5000, "~nobody-of-that-name/a.csv"])
def test_invalid_dataset_path_is_a_one_line_error(name, tmp_path):
    expected = "neither a name nor a path|user .* does not exist"
    expect_error(load_dataset, DataSettings(dataset=name), tmp_path, 1, match=expected)


@pytest.mark.parametrize("name", ["mnist", "femnist", "kvasir", "agnews"])
def test_invalid_data_dir_is_an_error(name, tmp_path):
    with pytest.raises(DataError, match=r"cannot be read|not found"):
        load_dataset(DataSettings(dataset=name, download=False), tmp_path / ("x" * 5000), 1)


@pytest.mark.parametrize("name", ["", "/{}loop", "~nobody-of-that-name/a", "x" * 5000])
def test_command_line_rejects_invalid_dataset_names(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(write_images(tmp_path))  # the working directory is a valid data set
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    words = ["data-dir=.", f"output-dir={tmp_path}/runs", "device=cpu"]
    assert main(["run", f"dataset={name.format(str(tmp_path)[1:] + '/')}", *words]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("posy:")]
    assert "neither a name nor a path" in line or "user nobody-of-that-name" in line


def write_zip_bomb(path, gigabytes):
    """Write an .npz whose x_train claims ``gigabytes`` GB, but is compressed to 0.1 % of it."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        with archive.open("x_train.npy", "w", force_zip64=True) as stream:
            header = {"descr": "|u1", "fortran_order": False, "shape": (gigabytes * 1000, 10**6)}
            np.lib.format.write_array_header_1_0(stream, header)
            stream.write(bytes(1000))
        with archive.open("y_train.npy", "w") as stream:
            np.lib.format.write_array(stream, np.arange(gigabytes * 1000))
    content = bytearray(path.read_bytes())
    claim = gigabytes * 10**9 + 128
    offset = content.index(b"PK\x01\x02")  # the central directory, which holds the size
    content[offset + 24 : offset + 28] = struct.pack("<I", claim)
    path.write_bytes(bytes(content))
    return path


def test_zip_bomb_is_rejected_at_once(tmp_path):
    expect_error(load_own, write_zip_bomb(tmp_path / "a.npz", 3), "a", match=r"x_train has 3 GB.* implausible")


def test_arrays_larger_than_their_file_are_rejected(tmp_path):
    path = tmp_path / "a.npz"
    for shape, message in (((10**14, 5), "does not fit into memory"), ((1000, 10**6), "bytes are missing")):
        with zipfile.ZipFile(path, "w") as archive:
            for name in ("x_train", "y_train"):
                with archive.open(f"{name}.npy", "w") as stream:
                    header = {"descr": "|u1", "fortran_order": False, "shape": shape if name[0] == "x" else shape[:1]}
                    np.lib.format.write_array_header_1_0(stream, header)
        expect_error(load_own, path, "a", match=message)


@pytest.mark.parametrize(
    "header",
    [
        b"{'descr': '<f8', 'fortran_order': False, 'shape': (-3, 2)}",
        b"{'descr': '<f8', 'fortran_order': False, 'shape': (True, 2)}",
        b"{'descr': '|O', 'fortran_order': False, 'shape': (2,)}",
        b"{'descr': [('a', '<f8')], 'fortran_order': False, 'shape': (2,)}",
        b"{'descr': '<c16', 'fortran_order': False, 'shape': (0, 2)}",
        b"(" * 9000,
        b"[" * 150 + b"]" * 150,
        b"__import__('os')",
        b"",
    ],
)
def test_malformed_headers_are_rejected(header, tmp_path):
    path = tmp_path / "a.npz"
    with zipfile.ZipFile(path, "w") as archive:
        for name in ("x_train", "y_train"):
            archive.writestr(f"{name}.npy", b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + bytes(32))
    expect_error(load_own, path, "a", match=r"a\.npz")


@quick
@given(data=st.data())
def test_damaged_npz_is_read_correctly_or_rejected(data, tmp_path):
    x, y = np.arange(12.0).reshape(6, 2), np.array(list("ababab"))
    path = tmp_path / "a.npz"
    (np.savez if data.draw(st.booleans()) else np.savez_compressed)(path, x_train=x, y_train=y)
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(bytes(content[: data.draw(st.integers(len(content) // 2, len(content)))]))
    try:
        dataset = load_own(path, "a")
    except DataError as error:
        assert str(path) in str(error)
    else:
        assert dataset.x.tolist() == x.tolist()
        assert dataset.y.tolist() == [0, 1] * 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"x,label\n1,a\n2,b\0\n", "line 3 contains a NUL byte"),
        (bytes(100_000), "line 1 contains a NUL byte"),
        (b'x,label\n"' + b"a" * 200_000, "field larger than field limit"),
        (b"x,label\n" + b"1," * 200_000, "row 2 has 200001 columns"),
        (b"\xff\xfex\0,\0l\0", "utf-8"),
        (b"x,y;label\n1,2;a\n", "several separators .*: comma, semicolon; set separator"),
        (b"x,y,label\n1_000,1,a\n2,1,b\n", "column x: '1_000'"),
        ("x,y,label\n١,1,a\n2,1,b\n".encode(), "column x"),
        (b"x,label\n1,a\n2,b\n,\n", "row 4"),
    ],
)
def test_malformed_tables_are_rejected(text, message, tmp_path):
    expect_error(load_own, write(tmp_path / "a.csv", text), "a", match=message)


def test_overlong_line_is_rejected(tmp_path, monkeypatch):
    monkeypatch.setattr("posy.data.readers.tables._MAX_LINE", 1000)
    path = write(tmp_path / "a.csv", "x,label\n" + "1" * 5000)
    expect_error(load_own, path, "a", match=r"line 2 .*1,000 characters")


def test_files_larger_than_memory_are_rejected(tmp_path):
    for name in ("a.csv", "a.json"):
        with (tmp_path / name).open("wb") as file:
            file.truncate(1 << 42)  # a sparse file of 4 TiB, which takes no space
    expect_error(load_own, tmp_path / "a.csv", "a", match="does not fit into memory")
    digits = load_dataset(DataSettings(), tmp_path, 1)
    chosen = DataSettings(partition="file", partition_file=str(tmp_path / "a.json"), num_clients=2)
    expect_error(partition, digits, chosen, 1, match="does not fit into memory")


@quick
@given(content=st.binary(max_size=200) | st.text("x,label\n\"'0123456789ab. ;-\r", max_size=200).map(str.encode))
def test_any_bytes_give_a_table_or_an_error(content, tmp_path):
    path = write(tmp_path / "a.csv", content)
    try:
        dataset = load_own(path, "a")
    except DataError as error:
        assert str(path) in str(error)
    else:
        assert len(dataset) > 0
        assert dataset.task.num_classes > 1


@pytest.mark.parametrize("content", [b"[" * 100_000, b"{", b"[1e999]", b"9" * 5000, b'{"users": 3}', b"\xff", b"null"])
def test_malformed_json_is_rejected(content, tmp_path):
    for split in ("train", "test"):
        (tmp_path / "femnist" / split).mkdir(parents=True)
        write(tmp_path / "femnist" / split / "a.json", content)
    expect_error(load_dataset, DataSettings(dataset="femnist"), tmp_path, 1, match=r"a\.json")
    digits = load_dataset(DataSettings(), tmp_path, 1)
    path = write(tmp_path / "parts.json", content)
    chosen = DataSettings(partition="file", partition_file=str(path), num_clients=2)
    expect_error(partition, digits, chosen, 1)
    pfllib(tmp_path / "p", (np.eye(2), np.array([0, 1])), config=content.decode("latin-1"))
    expect_error(load_own, tmp_path / "p", "p", match=r"config\.json")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"num_clients": 1, "num_classes": 10**9}, "num_classes is 1000000000.* 4 samples"),
        ({"num_clients": 1, "num_classes": 2.5}, "not a config of PFLlib"),
        ({"num_clients": True}, "not a config of PFLlib"),
        ({"num_clients": 10**30}, "the client counts differ"),
        ({"num_clients": 1, "num_classes": 10**30}, "num_classes is 1000"),
    ],
)
def test_inconsistent_pfllib_counts_are_rejected(config, message, tmp_path):
    root = pfllib(tmp_path / "p", (np.eye(2), np.array([0, 1])), config=config)
    expect_error(load_own, root, "p", match=message)


def nested_list(depth, width):
    lists = [0.5]
    for _ in range(depth):
        lists = [lists] * width
    return lists


CYCLE = [0.5]
CYCLE.append(CYCLE)


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (nested_list(40, 2), "more than 8 deep"),
        (nested_list(5, 100), "hold .* numbers in total"),
        (CYCLE, "more than 8 deep"),
        ([{"a": nested_list(40, 2)}], "more than 8 deep"),
    ],
    ids=["deep", "wide", "cyclic", "in a dict"],
)
def test_small_pickle_with_huge_content_is_rejected_at_once(x, message, tmp_path):
    root = pfllib(tmp_path / "p", (np.eye(2), np.array([0, 1])))
    array = np.array({"x": x, "y": [0, 1]}, dtype=object)
    with zipfile.ZipFile(root / "train" / "0.npz", "w") as archive, archive.open("data.npy", "w") as stream:
        np.lib.format.write_array_header_1_0(stream, {"descr": "|O", "fortran_order": False, "shape": ()})
        pickle.dump(array, stream, protocol=4)
    expect_error(load_own, root, "p", match=message)


def test_pickle_with_a_shared_row_is_read(tmp_path):
    row = [0.5] * 1000
    root = pfllib(tmp_path / "p", ([row] * 500, [0, 1] * 250))
    assert load_own(root, "p").x.shape == (1000, 1000)


def test_too_large_tokens_are_rejected(tmp_path):
    root = pfllib(tmp_path / "p", (np.array([[1, 2**40], [1, 2]]), np.array([0, 1])))
    expect_error(load_own, root, "p", match="token 1099511627776; allowed: whole numbers from 0 .padding. to")


# -- folders of images -----------------------------------------------------------------------------------


def write_images(root, n=3):
    rng = np.random.default_rng(0)
    for number in range(n):
        for name in ("a", "b"):
            (root / name).mkdir(parents=True, exist_ok=True)
            random_image(rng, (4, 4)).save(root / name / f"{number}.png")
    return root


def random_image(rng, shape):
    return Image.fromarray(rng.integers(0, 256, shape, np.uint8))


def add_damaged_images(root):
    write(root / "a" / "torn.png", (root / "a" / "0.png").read_bytes()[:50])
    write(root / "a" / "empty.png", b"")
    write(root / "b" / "text.jpg", b"hello")
    os.mkfifo(root / "b" / "pipe.png")
    random_image(np.random.default_rng(1), (40, 40, 3)).save(root / "b" / "cut.png")
    write(root / "b" / "cut.png", (root / "b" / "cut.png").read_bytes()[:2000])  # its header is intact


def test_unreadable_images_are_counted_in_the_error(tmp_path):
    add_damaged_images(write_images(tmp_path))
    message = expect_error(load_own, tmp_path, "a", match="5 of 11 images cannot be read")
    assert "skip-unreadable" not in message  # skip-unreadable is a setting of a site
    message = expect_error(own_site, tmp_path, image_site_settings(), match="5 of 11 images cannot be read")
    assert "skip-unreadable=true in its node config" in message


def image_site_settings():
    return DataSettings(dataset="sites", sample_kind="image", input_shape="1x4x4", classes="a,b")


def test_a_site_skips_unreadable_images_on_request(tmp_path):
    intact, _ = own_site(write_images(tmp_path / "intact"), image_site_settings())
    add_damaged_images(write_images(tmp_path / "torn"))
    dataset, part = own_site(tmp_path / "torn", image_site_settings(), skip=True)
    assert (dataset.x.tolist(), dataset.y.tolist(), dataset.skipped) == (intact.x.tolist(), intact.y.tolist(), 5)
    assert dataset.notes[0].startswith("5 of 11 image files ") and "a/empty.png, a/torn.png" in dataset.notes[0]
    assert len(part.train[0]) + len(part.test[0]) == 6


def test_skipped_files_affect_neither_size_nor_channels(tmp_path):
    add_damaged_images(write_images(tmp_path))
    assert read_own(tmp_path, skip_unreadable=True).x.shape == (6, 4, 4, 1)


def test_site_without_readable_images_is_rejected(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        write(tmp_path / name / "1.png", b"no image")
    with pytest.raises(DataError, match="2 of 2 images cannot be read"):
        own_site(tmp_path, image_site_settings(), skip=True)


def test_images_larger_than_memory_are_rejected(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        Image.new("L", (8, 8)).save(tmp_path / name / "1.png")
    settings = DataSettings(dataset="sites", sample_kind="image", input_shape="3x400000x400000", classes="a,b")
    expect_error(own_site, tmp_path, settings, match="input-shape|does not fit into memory")


def test_numeric_folder_names_are_ordered_as_numbers(tmp_path):
    for name in ("10", "9", "1"):
        (tmp_path / name).mkdir()
        Image.new("L", (2, 2), int(name)).save(tmp_path / name / "1.png")
    dataset = load_own(tmp_path, "a")
    assert dataset.task.class_names == ("1", "9", "10")
    assert [int(dataset.task.class_names[y]) for y in dataset.y] == dataset.x[:, 0, 0, 0].tolist()


def test_unreadable_folder_is_a_one_line_error(tmp_path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a").chmod(0)
    try:
        if os.access(tmp_path / "a", os.R_OK):
            pytest.skip("this user can read all files")
        expect_error(load_own, tmp_path / "a", "a", match="cannot be read|0 class folders")
    finally:
        (tmp_path / "a").chmod(0o755)


def test_npz_file_reads_arrays_and_labels(tmp_path):
    archive = NpzFile(save(tmp_path / "a.npz", x=np.eye(3), y=np.arange(3)))
    assert archive.shape("x") == ((3, 3), np.dtype(float))
    assert math.isclose(archive.read("x").sum(), 3)
    assert as_labels(archive.read("y"), "y").tolist() == [0, 1, 2]
