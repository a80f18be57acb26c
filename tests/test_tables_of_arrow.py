"""Data of the `datasets` library, .parquet files, folders of .npy files, and columns that the settings name."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas as pd
import pytest
from nodes import POLICY
from PIL import Image

import posy
from posy.data.dataset import Dataset
from posy.data.datasets import load_dataset
from posy.data.errors import DataError
from posy.data.settings import DataSettings
from posy.data.sites import describe_site, load_site, read_site
from posy.settings import SettingsError

RNG = np.random.default_rng(0)
PIXELS = RNG.integers(0, 256, (40, 6, 5, 3), np.uint8)
FEATURES = np.round(RNG.normal(size=(40, 3)), 3) * [1, 10, 1e6]
WORDS = [f"word{i % 5} and {i}, or not" for i in range(40)]
NAMES = np.array(["cat", "dog", "eel", "fox"])[np.arange(40) % 4]
GROUPS = np.arange(40) // 10


def load(path: Path | str, **settings: Any) -> Dataset:
    return load_dataset(DataSettings(dataset=str(path), **settings), Path("datasets"), 0)


def assert_same(dataset: Dataset, expected: Dataset) -> None:
    """Check that two data sets have the same samples in the same order."""
    assert dataset.task == expected.task and dataset.sample_kind == expected.sample_kind
    assert dataset.x.dtype == expected.x.dtype and np.array_equal(dataset.x, expected.x)
    assert np.array_equal(dataset.y, expected.y)
    assert np.array_equal(dataset.mean, expected.mean) and np.array_equal(dataset.std, expected.std)
    assert (dataset.groups is None) == (expected.groups is None)
    assert dataset.groups is None or np.array_equal(dataset.groups, expected.groups)


def load_npz(path: Path, x: Any, **more: Any) -> Dataset:
    np.savez(path, x_train=x, y_train=NAMES, **more)
    return load(path)


def image_data(rows: slice = slice(None), label: str = "label") -> datasets.Dataset:
    kinds = datasets.Features(
        {"image": datasets.Image(), label: datasets.ClassLabel(names=["fox", "eel", "dog", "cat"])}
    )
    content = {"image": [Image.fromarray(x) for x in PIXELS[rows]], label: NAMES[rows].tolist()}
    return datasets.Dataset.from_dict(content, features=kinds)


def table() -> pd.DataFrame:
    return pd.DataFrame(
        {"a": FEATURES[:, 0], "b": FEATURES[:, 1], "c": FEATURES[:, 2], "group": GROUPS, "label": NAMES}
    )


def write_forms(tmp_path: Path, frame: pd.DataFrame) -> dict[str, Path]:
    """Write a table in every supported form and return the paths by form."""
    paths = {"csv": tmp_path / "t.csv", "parquet": tmp_path / "t.parquet", "saved": tmp_path / "saved"}
    frame.to_csv(paths["csv"], index=False)
    frame.to_parquet(paths["parquet"])
    datasets.Dataset.from_pandas(frame, preserve_index=False).save_to_disk(paths["saved"])
    return paths


FORMS = ["csv", "parquet", "saved"]


@pytest.mark.parametrize("form", FORMS)
def test_feature_tables_match_the_npz(form: str, tmp_path: Path) -> None:
    expected = load_npz(tmp_path / "a.npz", FEATURES, groups_train=GROUPS)
    dataset = load(write_forms(tmp_path, table())[form])
    assert_same(dataset, expected)
    assert dataset.columns == ("a", "b", "c") and dataset.notes == ()


@pytest.mark.parametrize("form", FORMS)
def test_text_tables_match_the_csv(form: str, tmp_path: Path) -> None:
    paths = write_forms(tmp_path, pd.DataFrame({"text": WORDS, "number": GROUPS, "label": NAMES}))
    dataset = load(paths[form], text_length=6)
    assert_same(dataset, load(paths["csv"], text_length=6))
    assert dataset.words == load(paths["csv"], text_length=6).words
    [note] = dataset.notes
    assert note.endswith("columns: number")


@pytest.mark.parametrize("form", FORMS)
def test_settings_select_columns(form: str, tmp_path: Path) -> None:
    frame = table().rename(columns={"label": "kind", "group": "ward"})
    frame.insert(0, "review", WORDS)
    path = write_forms(tmp_path, frame)[form]
    columns = {"label_column": "kind", "group_column": "ward"}
    expected = load_npz(tmp_path / "a.npz", FEATURES[:, [2, 0]], groups_train=GROUPS)
    assert_same(load(path, input_columns="c,a", **columns), expected)
    text = load(path, input_columns='["review"]', **columns)
    assert text.task.kind == "text" and text.groups is not None and text.groups.tolist() == GROUPS.tolist()
    notes = load(path, **columns).notes
    assert any("may be identifiers" in note and "review" in note for note in notes)
    for settings, message in (
        ({"label_column": "sort"}, "label-column = 'sort': this column does not exist"),
        ({"label_column": "sort"}, "review, a, b, c, ward, kind"),
        ({"input_columns": "a,d"}, "input-columns = 'd': this column does not exist"),
        ({"group_column": "Ward"}, "group-column = 'Ward': this column does not exist"),
        ({"label_column": "a", "input_columns": "a,b"}, "'a' is named by label-column and by input-columns"),
        (
            {"group_column": "a", "input_columns": "review,a,b,c,ward,kind"},
            "'a' is named by group-column and by input-columns",
        ),
        ({"input_columns": "review,a,b,c,ward,kind"}, "no column is left for the label"),
        ({"label_column": "kind", "categories": "ward", "input_columns": "a"}, "categories = 'ward'"),
    ):
        with pytest.raises(DataError) as raised:
            load(path, **settings)
        assert message in str(raised.value) and str(path) in str(raised.value)
    for columns_text in ("a,a", "[a", "[1]"):
        with pytest.raises(SettingsError, match="input-columns"):
            load(path, input_columns=columns_text)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("task", ["regression", "multi-label"])
def test_several_columns_of_targets(form: str, task: str, tmp_path: Path) -> None:
    targets = FEATURES[:, :2] if task == "regression" else (FEATURES[:, :2] > [0, 5]).astype(int)
    kind = pd.Series(NAMES, dtype="category").astype(str)
    frame = pd.DataFrame({"days": targets[:, 0], "kind": kind, "c": FEATURES[:, 2], "dose": targets[:, 1]})
    path = write_forms(tmp_path, frame)[form]
    dataset = load(path, task=task, label_column="dose,days")
    assert dataset.task.class_names == ("dose", "days") and dataset.columns == ("kind", "c")
    np.testing.assert_array_equal(dataset.y, targets[:, ::-1])
    np.testing.assert_allclose(dataset.x[:, 1], FEATURES[:, 2])
    assert [dataset.categories[0][int(number)] for number in dataset.x[:, 0]] == NAMES.tolist()  # type: ignore[index]


@pytest.mark.parametrize(
    ("task", "column", "code"),
    [
        ("regression", [1.0, None, 3.0], "missing-value"),
        ("regression", ["1", "2", "3"], "wrong-target"),
        ("multi-label", [0.0, 1.0, 2.0], "wrong-target"),
    ],
)
def test_unusable_targets_name_the_column(task: str, column: list[Any], code: str, tmp_path: Path) -> None:
    frame = pd.DataFrame({"a": [1.0, 2.0, 3.0], "first": [0.0, 1.0, 1.0], "second": column})
    frame.to_parquet(tmp_path / "t.parquet")
    with pytest.raises(DataError) as raised:
        load(tmp_path / "t.parquet", task=task, label_column="first,second")
    assert raised.value.code == code and "second" in str(raised.value)


def test_column_settings_need_a_table(tmp_path: Path) -> None:
    load_npz(tmp_path / "a.npz", FEATURES)
    (tmp_path / "mine.py").write_text("def data():\n    return [[1.0], [2.0]] * 4, [0, 1] * 4\n")
    for name in (str(tmp_path / "a.npz"), "digits", f"{tmp_path}/mine.py:data"):
        with pytest.raises(SettingsError, match="group-column = 'a'"):
            load(name, group_column="a")


@pytest.mark.parametrize("form", ["saved", "parquet"])
def test_images_match_the_npz(form: str, tmp_path: Path) -> None:
    expected = load_npz(tmp_path / "a.npz", PIXELS)
    path = tmp_path / "data.parquet" if form == "parquet" else tmp_path / "data"
    pixels = image_data()
    pixels.to_parquet(path) if form == "parquet" else pixels.save_to_disk(path)
    assert_same(load(path), expected)
    small = load(path, image_size=4)
    assert small.x.shape == (40, 4, 4, 3)


def test_images_of_different_sizes_are_resized(tmp_path: Path) -> None:
    kinds = datasets.Features({"img": datasets.Image(), "fine": datasets.ClassLabel(names=["a", "b"])})
    images = [Image.fromarray(PIXELS[i][: 3 + i % 3, :, 0]) for i in range(8)]
    datasets.Dataset.from_dict({"img": images, "fine": [0, 1] * 4}, features=kinds).save_to_disk(tmp_path / "s")
    dataset = load(tmp_path / "s")
    assert dataset.x.shape == (8, 64, 64, 1) and dataset.task.class_names == ("a", "b") and dataset.notes == ()
    assert load(tmp_path / "s", image_size=5).x.shape == (8, 5, 5, 1)


def test_saved_splits_become_training_and_test_sets(tmp_path: Path) -> None:
    parts = datasets.DatasetDict(train=image_data(slice(25)), test=image_data(slice(25, 40)))
    parts["unsupervised"] = image_data(slice(3))
    parts.save_to_disk(tmp_path / "s")
    dataset = load(tmp_path / "s")
    np.savez(tmp_path / "a.npz", x_train=PIXELS[:25], y_train=NAMES[:25], x_test=PIXELS[25:], y_test=NAMES[25:])
    assert_same(dataset, load(tmp_path / "a.npz"))
    [note] = dataset.notes
    assert note.endswith("not used: unsupervised")
    sites = DataSettings(dataset="sites", sample_kind="image", input_shape="3x4x4", classes="cat,dog,eel,fox")
    dataset, part = load_site(read_site(tmp_path / "s", sites, POLICY), sites, POLICY)
    assert part.test[0].tolist() == list(range(25, 40)) and dataset.x.shape == (40, 4, 4, 3)
    described = describe_site(
        read_site(tmp_path / "s", DataSettings(dataset="sites"), POLICY), DataSettings(dataset="sites"), POLICY
    )
    assert not described.fixed and described.classes == ("cat", "dog", "eel", "fox")
    datasets.DatasetDict(train=image_data(slice(25)), validation=image_data(slice(25, 40))).save_to_disk(tmp_path / "v")
    assert load_site(read_site(tmp_path / "v", sites, POLICY), sites, POLICY)[1].test[0].tolist() == list(range(25, 40))


def test_a_site_reads_the_runs_columns(tmp_path: Path) -> None:
    path = write_forms(tmp_path, table().rename(columns={"label": "kind"})[["kind", "a", "b", "c"]])["parquet"]
    sites = DataSettings(dataset="sites", label_column="kind", input_columns="a,c")
    content = read_site(path, sites, POLICY)
    assert content.columns == ("a", "c") and content.labels.tolist() == NAMES.tolist()


def test_unreadable_images_are_reported_or_skipped(tmp_path: Path) -> None:
    encoded = image_data().cast_column("image", datasets.Image(decode=False))
    kinds = encoded.features
    rows = encoded.to_dict()
    rows["image"][3] = {"bytes": b"no image", "path": None}
    datasets.Dataset.from_dict(rows, features=kinds).cast_column("image", datasets.Image()).save_to_disk(tmp_path / "s")
    with pytest.raises(DataError, match="row 4, column image: not an image"):
        load(tmp_path / "s")
    content = read_site(tmp_path / "s", DataSettings(dataset="sites"), POLICY, skip_unreadable=True)
    assert np.array_equal(content.x, np.delete(PIXELS, 3, 0)) and len(content.unreadable) == 1
    assert content.read_notes[0].endswith("row 4, column image")


def test_lists_of_numbers_are_features_or_images(tmp_path: Path) -> None:
    rows = {"x": FEATURES.tolist(), "label": NAMES.tolist()}
    datasets.Dataset.from_dict(rows).save_to_disk(tmp_path / "f")
    assert_same(load(tmp_path / "f"), load_npz(tmp_path / "a.npz", FEATURES))
    kinds = datasets.Features({"x": datasets.Array3D((6, 5, 3), "uint8"), "label": datasets.Value("string")})
    rows = {"x": PIXELS.tolist(), "label": NAMES.tolist()}
    datasets.Dataset.from_dict(rows, features=kinds).save_to_disk(tmp_path / "i")
    assert_same(load(tmp_path / "i"), load_npz(tmp_path / "b.npz", PIXELS))


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "empty": ({"x": [1.0, None], "label": [0, 1]}, "row 2, column x: it is empty"),
    # pandas writes NaN as an empty value.
    "nan": ({"x": [1.0, 2.0], "z": [1.0, float("nan")], "label": [0, 1]}, "row 2, column z: it is empty"),
    "infinite": ({"x": [1.0, float("inf")], "label": [0, 1]}, "row 2, column x: inf"),
    "label": ({"x": [1.0, 2.0], "label": [0.5, 1]}, "row 1, column label: '0.5'; labels are whole numbers"),
    "ragged": ({"x": [[1], [1, 2]], "label": [0, 1]}, "row 2, column x: a list of 2 entries, but the first list has 1"),
    "hole": ({"x": [[1, 2], [1, None]], "label": [0, 1]}, "row 2, column x: a value is missing"),
    "list and number": ({"x": [[1], [2]], "z": [1, 2], "label": [0, 1]}, "column x of type list"),
    "words": ({"x": ["a", "1"], "z": [1, 2], "label": [0, 1]}, "row 1, column x: 'a' in a column with numbers"),
    "times": ({"x": pd.to_datetime(["2020", "2021"]), "label": [0, 1]}, "column x: values of type timestamp"),
    "lists": ({"x": [1, 2], "label": [[0], [1]]}, "column label: labels of type list"),
    "single": ({"label": [0, 1]}, "columns label; a table needs two"),
    "none": ({"x": np.empty(0), "label": np.empty(0, int)}, "no rows"),
}


@pytest.mark.parametrize("case", WRONG)
def test_invalid_tables_are_rejected(case: str, tmp_path: Path) -> None:
    content, message = WRONG[case]
    pd.DataFrame(content).to_parquet(path := tmp_path / "a.parquet")
    with pytest.raises(DataError) as raised:
        load(path)
    assert message in str(raised.value) and str(path) in str(raised.value)


def test_invalid_saved_data_sets_are_rejected(tmp_path: Path) -> None:
    kinds = datasets.Features({"x": datasets.Value("float32"), "label": datasets.ClassLabel(names=["a", "b"])})
    datasets.Dataset.from_dict({"x": [1, 2], "label": [0, -1]}, features=kinds).save_to_disk(tmp_path / "unlabelled")
    both = {"one": datasets.Image(), "two": datasets.Image(), "label": datasets.Value("int64")}
    image = Image.fromarray(PIXELS[0])
    rows = {"one": [image], "two": [image], "label": [1]}
    datasets.Dataset.from_dict(rows, features=datasets.Features(both)).save_to_disk(tmp_path / "both")
    rows = {"one": [image, None], "label": [1, 2]}
    kinds = datasets.Features({"one": datasets.Image(), "label": datasets.Value("int64")})
    datasets.Dataset.from_dict(rows, features=kinds).save_to_disk(tmp_path / "none")
    other = image_data().rename_column("label", "kind")
    datasets.DatasetDict(train=image_data(), test=other).save_to_disk(tmp_path / "unlike")
    image_data().save_to_disk(tmp_path / "cut")
    next((tmp_path / "cut").glob("*.arrow")).write_bytes(b"short")
    (tmp_path / "a.parquet").write_bytes(b"PAR1, and the end")
    for name, message in (
        ("unlabelled", "row 2, column label: label -1; allowed: 0 to 1, the numbers of its classes"),
        ("both", "columns of images: one, two; name one in input-columns"),
        ("none", "row 2, column one: it is empty"),
        ("unlike", "split test has the columns"),
        ("cut", "not a complete folder of datasets.save_to_disk"),
        ("a.parquet", "not a complete .parquet file"),
    ):
        with pytest.raises(DataError) as raised:
            load(tmp_path / name)
        assert message in str(raised.value) and str(tmp_path / name) in str(raised.value)


@pytest.mark.parametrize("form", ["saved", "parquet", "arrays"])
def test_runs_give_the_same_result_for_each_form(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_arrays(tmp_path / "arrays")
    image_data(label="kind").save_to_disk("saved")
    image_data(label="kind").to_parquet("data.parquet")
    name = {"saved": "saved", "parquet": "data.parquet", "arrays": "arrays"}[form]
    columns = {} if form == "arrays" else {"label_column": "kind"}
    shared = {"method": "fedavg", "num_clients": 2, "num_server_rounds": 2, "partition": "iid"}
    record = posy.run(dataset=name, run_name="a", **shared, **columns)
    np.savez("a.npz", x_train=PIXELS, y_train=NAMES)
    other = posy.run(dataset="a.npz", run_name="b", **shared)
    assert record.rounds["train_loss_mean"].tolist() == other.rounds["train_loss_mean"].tolist()
    assert record.predictor(0).predict(PIXELS[0]).label in NAMES


# -- the Hub ---------------------------------------------------------------------------------------------


def test_a_cached_hub_data_set_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prepare a cache with the library's layout from a local folder."""
    monkeypatch.chdir(tmp_path)
    image_data().to_parquet(tmp_path / "src.parquet")
    cache = tmp_path / "cache"
    datasets.load_dataset("parquet", data_files={"train": "src.parquet"}, cache_dir=str(cache))
    prepared = next(cache.glob("parquet/*/*/*/dataset_info.json")).parent
    target = cache / "someone___things" / "small" / "0.0.0" / prepared.name
    target.parent.mkdir(parents=True)
    prepared.rename(target)
    info = json.loads((target / "dataset_info.json").read_text())
    info |= {"dataset_name": "things", "config_name": "small", "builder_name": "parquet"}
    (target / "dataset_info.json").write_text(json.dumps(info))
    for file in target.glob("parquet-*.arrow"):
        file.rename(target / file.name.replace("parquet-", "things-"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(cache))
    expected = load_npz(tmp_path / "a.npz", PIXELS)
    for name in ("hf:someone/things", "hf:someone/things:small"):
        assert_same(load(name, download=False), expected)
    with pytest.raises(DataError, match=r"hf:someone/things:large.*library's cache"):
        load("hf:someone/things:large", download=False)


def test_invalid_hub_names_are_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    for name in ("hf:things", "hf:a/b/c", "hf:../b", "hf:a/b:"):
        with pytest.raises(DataError, match="must be hf:owner/name"):
            load(name)
    (tmp_path / "someone/things").mkdir(parents=True)
    with pytest.raises(DataError, match="a folder someone/things"):
        load("hf:someone/things")
    with pytest.raises(DataError, match="library's cache"):
        load("hf:nobody/things", download=False)


@pytest.mark.slow
def test_offline_errors_take_one_line(tmp_path: Path) -> None:
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    root = str(Path(__file__).resolve().parent.parent)
    done = subprocess.run(
        [sys.executable, "-P", "-m", "posy.commands.cli", "run", "dataset=hf:someone/things"],
        cwd=tmp_path, env={**os.environ, **offline, "PYTHONPATH": root}, capture_output=True, text=True, timeout=120,
        check=False,
    )  # fmt: skip
    message = " ".join((done.stdout + done.stderr).split())
    assert done.returncode != 0 and "Traceback" not in message
    assert "dataset = 'hf:someone/things': it cannot be fetched" in message


# -- data on the disk ------------------------------------------------------------------------------------


def write_arrays(folder: Path, **parts: Any) -> Path:
    folder.mkdir()
    for name, array in {"x": PIXELS, "y": NAMES, **parts}.items():
        np.save(folder / f"{name}.npy", np.asarray(array))
    return folder


@pytest.mark.parametrize("channels_first", [False, True])
def test_array_folders_match_the_npz(channels_first: bool, tmp_path: Path) -> None:
    x = PIXELS.transpose(0, 3, 1, 2) if channels_first else PIXELS
    path = write_arrays(tmp_path / "a", x=np.ascontiguousarray(x), groups=GROUPS, test=np.arange(40) >= 30)
    dataset = load(path)
    assert_same(dataset, load_npz(tmp_path / "a.npz", x, groups_train=GROUPS))
    assert isinstance(dataset.x, np.memmap)
    assert_same(load(write_arrays(tmp_path / "f", x=FEATURES)), load_npz(tmp_path / "f.npz", FEATURES))
    sites = DataSettings(dataset="sites", sample_kind="image", input_shape="3x6x5", classes="cat,dog,eel,fox")
    assert load_site(read_site(path, sites, POLICY), sites, POLICY)[1].test[0].tolist() == list(range(30, 40))


def test_invalid_array_folders_are_rejected(tmp_path: Path) -> None:
    wrong = np.array([{}, 1], dtype=object)
    np.save(write_arrays(tmp_path / "o") / "x.npy", wrong, allow_pickle=True)
    (write_arrays(tmp_path / "s") / "x.npy").write_bytes((tmp_path / "s/x.npy").read_bytes()[:-1])
    (write_arrays(tmp_path / "d") / "x.npy").unlink()
    (tmp_path / "d/x.npy").mkdir()
    for path, message in (
        (tmp_path / "o", "x.npy: not a complete .npy file"),
        (tmp_path / "s", "x.npy: not a complete .npy file"),
        (tmp_path / "d", "x.npy: not a regular file"),
        (write_arrays(tmp_path / "t", test=np.arange(40)), "test must be true or false for each sample"),
        (write_arrays(tmp_path / "l", y=NAMES[:3]), "arrays of unequal length (x: 40, y: 3)"),
    ):
        with pytest.raises(DataError) as raised:
            load(path)
        assert message in str(raised.value) and str(path) in str(raised.value)


MEASURED = """
import sys
from dataclasses import replace
from pathlib import Path

import torch

from posy.client_app.workspace import Workspace
from posy.strategies.registry import read_settings


def memory_mb(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key)) // 1024


settings = read_settings({"method": "fedavg", "dataset": sys.argv[1], "num-clients": 50, "partition": "iid"})
other = Workspace(read_settings({"method": "fedavg", "num-clients": 50, "partition": "iid"}))
other.client_data(3)  # warm up, so that imports do not count
before = memory_mb("RssAnon:")
workspace = Workspace(settings)
data = workspace.client_data(3)
print(memory_mb("RssAnon:") - before, data.nbytes >> 20)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
def test_a_client_loads_only_its_own_samples(tmp_path: Path) -> None:
    folder = write_arrays(tmp_path / "a", y=np.arange(40_000) % 10)
    (folder / "x.npy").unlink()
    np.lib.format.open_memmap(folder / "x.npy", "w+", np.uint8, (40_000, 32, 32, 3)).flush()  # a sparse file of 123 MB
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parent.parent), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-P", "-c", MEASURED, str(folder)], env=environment, capture_output=True, text=True, check=True
    )
    increase, mebibytes = map(int, done.stdout.split()[-2:])
    assert mebibytes == 9  # 800 samples as float32
    assert increase < 60  # MB; loading the complete file would add 117
