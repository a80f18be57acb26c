"""Test samples: nothing is fitted on them, and a supplied test set stays a test set."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import datasets
import numpy as np
import pyarrow.parquet
import pytest
import standins
from nodes import POLICY, class_folders, pfllib, table

import posy
from posy.client_app.workspace import Workspace
from posy.commands.cli import main
from posy.data.datasets import load_dataset
from posy.data.errors import DataError
from posy.data.partitions import Partition, share_test_set
from posy.data.published import DATASETS
from posy.data.settings import DataSettings
from posy.data.sites import load_site, read_site
from posy.settings import SettingsError
from posy.strategies.registry import declared, read_settings

QUICK = {"method": "fedavg", "num_server_rounds": 1, "local_epochs": 1, "model": "linear", "device": "cpu"}


def workspace(**settings: object) -> Workspace:
    return Workspace(read_settings({key.replace("_", "-"): value for key, value in settings.items()}))


def training_rows(part: Partition) -> np.ndarray:
    return np.concatenate(part.train)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_test_fraction_without_effect_gives_a_warning(tmp_path: Path, warnings: pytest.LogCaptureFixture) -> None:
    labels = np.arange(40) % 2
    pixels = np.zeros((40, 4, 4), np.uint8)
    np.savez(tmp_path / "a.npz", x_train=pixels, y_train=labels, x_test=pixels[:8], y_test=labels[:8])
    settings = {"dataset": "a.npz", "method": "fedavg", "partition": "iid", "num_clients": 2}

    def warned(**changes: object) -> bool:
        warnings.clear()
        sizes = [len(part) for part in workspace(**settings, **changes).partition.test]
        assert sum(sizes) == (24 if changes.get("test_set") == "pooled" else 8)
        return "a.npz comes with a test set; test-set=pooled" in warnings.text

    assert warned(test_fraction=0.5)
    assert not warned()
    assert not warned(test_fraction=0.5, test_set="pooled")


def test_pooling_an_absent_test_set_gives_a_warning(tmp_path: Path, warnings: pytest.LogCaptureFixture) -> None:
    labels = np.arange(40) % 2
    np.savez(tmp_path / "a.npz", x_train=np.zeros((40, 4, 4), np.uint8), y_train=labels)
    settings = {"dataset": "a.npz", "method": "fedavg", "partition": "iid", "num_clients": 2}
    pooled = workspace(**settings, test_set="pooled").partition
    assert "test-set = 'pooled' has no effect: " in warnings.text
    assert "a.npz comes without a test set; remove test-set" in warnings.text
    warnings.clear()
    supplied = workspace(**settings).partition
    assert [part.tolist() for part in pooled.test] == [part.tolist() for part in supplied.test]
    assert warnings.text == ""


def test_a_test_fraction_without_effect_on_a_partition_file_gives_a_warning(
    tmp_path: Path, warnings: pytest.LogCaptureFixture
) -> None:
    np.savez(tmp_path / "a.npz", x_train=np.zeros((8, 4, 4), np.uint8), y_train=np.arange(8) % 2)
    settings = {"dataset": "a.npz", "method": "fedavg", "partition": "file", "num_clients": 1, "test_fraction": 0.5}
    (tmp_path / "both.json").write_text(json.dumps({"train": [[0, 1, 2, 3, 4]], "test": [[5]]}))
    assert len(workspace(**settings, partition_file="both.json").partition.test[0]) == 1
    assert "test-fraction = 0.5 has no effect: " in warnings.text
    assert "both.json lists the test samples; remove test-fraction" in warnings.text
    warnings.clear()
    (tmp_path / "all.json").write_text(json.dumps([[0, 1, 2, 3, 4, 5]]))
    assert len(workspace(**settings, partition_file="all.json").partition.test[0]) == 3
    assert warnings.text == ""


# -- statistics and vocabulary come from training samples --------------------------------------------------


def test_features_are_standardised_by_training_samples_only(tmp_path: Path) -> None:
    ages = np.arange(40.0) ** 2
    path = table(tmp_path / "patients.csv", np.column_stack([ages, np.full(40, 5.0)]), np.arange(40) % 2)
    settings = {"dataset": str(path), "partition": "iid", "num_clients": 2, "validation_fraction": 0.25}
    record = posy.run(**QUICK, **settings)
    part = workspace(**settings, method="fedavg").partition
    sizes = [sum(map(len, split)) for split in (part.train, part.test, part.validation)]
    assert sizes == [22, 10, 8]
    ages_in_training = [ages[row] for row in training_rows(part)]
    mean = sum(ages_in_training) / 22
    variance = sum((age - mean) ** 2 for age in ages_in_training) / 22
    for client in (0, 1):
        preprocessing = record.predictor(client).preprocessing
        assert preprocessing.mean.tolist() == pytest.approx([mean, 5.0])
        assert preprocessing.std.tolist() == pytest.approx([variance**0.5, 1.0])  # the constant column is only centred
    assert mean != pytest.approx(ages.mean())


def test_words_of_test_texts_are_not_in_the_vocabulary(tmp_path: Path) -> None:
    rows = "".join(f"common word{number},{number % 2}\n" for number in range(20))
    (tmp_path / "notes.csv").write_text(f"text,label\n{rows}", encoding="utf-8")
    space = workspace(dataset="notes.csv", method="fedavg", partition="iid", num_clients=2, vocabulary=50)
    in_training = {f"word{row}" for row in training_rows(space.partition)}
    assert len(in_training) == 16
    assert space.dataset.words[0] == "common" and set(space.dataset.words[1:]) == in_training
    assert space.task.vocabulary == 2 + 1 + 16
    for row in np.concatenate(space.partition.test).tolist():
        assert space.dataset.x[row, :3].tolist() == [2, 1, 0]  # common, an unknown word, padding


def test_features_of_a_pfllib_folder_are_standardised(tmp_path: Path) -> None:
    x = np.array([[1.0, 10.0], [3.0, 30.0], [5.0, 50.0], [7.0, 70.0], [1000.0, 0.0]])
    path = pfllib(tmp_path / "folder", x, np.array([0, 1, 0, 1, 0]), 1)  # the last row is for the test
    record = posy.run(**QUICK, dataset=str(path), num_clients=1)
    preprocessing = record.predictor(0).preprocessing
    assert preprocessing.mean.tolist() == [4.0, 40.0]
    assert preprocessing.std.tolist() == pytest.approx([5**0.5, 500**0.5])
    data = workspace(dataset=str(path), num_clients=1, method="fedavg").client_data(0)
    assert data.x_train[:, 0].tolist() == pytest.approx([-3 / 5**0.5, -1 / 5**0.5, 1 / 5**0.5, 3 / 5**0.5])


def test_standardised_values_beyond_float32_are_rejected(tmp_path: Path) -> None:
    x = np.array([[1.0], [1.0 + 1e-12], [1.0], [1e30]])
    path = pfllib(tmp_path / "folder", x, np.array([0, 1, 0, 1]), 1)
    with pytest.raises(DataError, match="feature 0 exceeds the range of float32"):
        posy.run(**QUICK, dataset=str(path), num_clients=1)


# -- a supplied test set stays a test set -------------------------------------------------------------------

TRAIN, TEST = 60, 20
LABELS = np.arange(TRAIN + TEST) % 4


def write_npz(root: Path) -> Path:
    x, y = np.arange(TRAIN + TEST, dtype=np.float64)[:, None], LABELS
    np.savez(root / "mine.npz", x_train=x[:TRAIN], y_train=y[:TRAIN], x_test=x[TRAIN:], y_test=y[TRAIN:])
    return root / "mine.npz"


def write_arrays(root: Path) -> Path:
    (root / "arrays").mkdir()
    parts = {"x": np.arange(TRAIN + TEST, dtype=np.float64)[:, None], "y": LABELS}
    for key, array in {**parts, "test": np.arange(TRAIN + TEST) >= TRAIN}.items():
        np.save(root / "arrays" / f"{key}.npy", array)
    return root / "arrays"


def write_folders(root: Path) -> Path:
    pixels = np.arange(TRAIN + TEST, dtype=np.uint8)[:, None, None].repeat(4, 1).repeat(4, 2)
    class_folders(root / "images" / "train", pixels[:TRAIN], LABELS[:TRAIN])
    class_folders(root / "images" / "test", pixels[TRAIN:], LABELS[TRAIN:])
    return root / "images"


def write_saved(root: Path) -> Path:
    splits = {"train": range(TRAIN), "test": range(TRAIN, TRAIN + TEST)}
    parts = {
        name: datasets.Dataset.from_dict({"value": [float(row) for row in rows], "label": LABELS[rows].tolist()})
        for name, rows in splits.items()
    }
    datasets.DatasetDict(parts).save_to_disk(str(root / "saved"))
    return root / "saved"


def write_function(root: Path) -> Path:
    (root / "mine.py").write_text(
        "import numpy as np\n"
        "def data():\n"
        f"    n = np.arange({TRAIN + TEST})\n"
        f"    return {{'x': n[:, None] * 1.0, 'y': n % 4, 'test': n >= {TRAIN}}}\n",
        encoding="utf-8",
    )
    return Path("mine.py:data")


READERS = [write_npz, write_arrays, write_folders, write_saved, write_function]


def values(space: Workspace, rows: np.ndarray) -> list[int]:
    """Return the sorted values of samples in the files: 0 to 59 for training, 60 to 79 for the test."""
    return sorted(int(sample.flat[0]) for sample in space.dataset.x[rows])


@pytest.mark.parametrize("partition", ["dirichlet", "iid", "classes", "pathological", "shards"])
@pytest.mark.parametrize("write", READERS)
def test_no_client_trains_on_a_supplied_test_sample(write: Callable[[Path], Path], partition: str) -> None:
    settings = {"dataset": str(write(Path.cwd())), "partition": partition, "num_clients": 4, "method": "fedavg"}
    space = workspace(**settings)
    used = values(space, training_rows(space.partition))
    assert used == list(range(TRAIN)) if partition != "shards" else (max(used) < TRAIN and len(used) == 56)
    assert values(space, np.concatenate(space.partition.test)) == list(range(TRAIN, TRAIN + TEST))
    again = workspace(**settings).partition
    assert [part.tolist() for part in again.test] == [part.tolist() for part in space.partition.test]
    pooled = workspace(**settings, test_set="pooled")
    assert max(values(pooled, training_rows(pooled.partition))) >= TRAIN


def test_clients_are_tested_on_their_training_classes(tmp_path: Path) -> None:
    settings = {"dataset": str(write_npz(tmp_path)), "partition": "classes", "num_clients": 4, "method": "fedavg"}
    space = workspace(**settings)
    part, y = space.partition, space.dataset.y
    for train, test in zip(part.train, part.test, strict=True):
        assert set(y[test]) == set(y[train]) and len(set(y[train])) == 2
        for label in set(y[train]):  # 5 of 15 samples of each class
            assert abs(np.sum(y[test] == label) - np.sum(y[train] == label) / 3) < 1


def test_test_samples_are_divided_in_proportion_to_training_samples() -> None:
    counts = np.array([[6, 0, 1], [3, 5, 0], [1, 5, 0]])
    # Class 0: 20 samples, 12 to 6 to 2. Class 1: 5 samples, 2.5 and 2.5: one of the two gets the fifth. Class 2: all.
    # In the next call no client trains on class 1.
    shares = share_test_set(counts, np.array([20, 5, 4]), np.random.default_rng(0))
    assert shares[:, 0].tolist() == [12, 6, 2] and shares[:, 2].tolist() == [4, 0, 0]
    assert shares[:, 1].tolist() in ([0, 3, 2], [0, 2, 3])
    unused = share_test_set(np.array([[2, 0], [2, 0]]), np.array([2, 7]), np.random.default_rng(0))
    assert unused.tolist() == [[1, 0], [1, 0]]
    # 7 of 8 samples make 4.375 of 5, 1 of 8 makes 0.625. Then the small client's only sample is of a scarce class.
    assert share_test_set(np.array([[7], [1]]), np.array([5]), np.random.default_rng(0)).tolist() == [[4], [1]]
    starved = share_test_set(np.array([[90, 9], [0, 1]]), np.array([9, 2]), np.random.default_rng(0))
    assert starved.tolist() == [[9, 1], [0, 1]]  # 1.8 and 0.2 round to 2 and 0; the client takes one


def test_natural_groups_keep_their_test_samples(tmp_path: Path) -> None:
    group = np.array(["north", "south"])[(np.arange(TRAIN + TEST) // 3) % 2]
    x = np.arange(TRAIN + TEST, dtype=np.float64)[:, None]
    parts = {"x_train": x[:TRAIN], "y_train": LABELS[:TRAIN], "groups_train": group[:TRAIN]}
    parts |= {"x_test": x[TRAIN:], "y_test": LABELS[TRAIN:], "groups_test": group[TRAIN:]}
    np.savez(tmp_path / "mine.npz", **parts)
    part = workspace(dataset="mine.npz", partition="natural", num_clients=2, method="fedavg").partition
    for client, name in enumerate(["north", "south"]):
        assert part.train[client].tolist() == np.flatnonzero(group[:TRAIN] == name).tolist()
        assert part.test[client].tolist() == (TRAIN + np.flatnonzero(group[TRAIN:] == name)).tolist()


def test_a_partition_file_cannot_train_on_the_test_set(tmp_path: Path) -> None:
    write_npz(tmp_path)
    lists = [list(range(0, 65)), list(range(65, 70)) + list(range(40, 60))]
    Path("parts.json").write_text(json.dumps(lists), encoding="utf-8")
    settings = {"dataset": "mine.npz", "partition": "file", "partition_file": "parts.json", "num_clients": 2}
    part = workspace(**settings, method="fedavg").partition
    assert part.train[0].tolist() == list(range(60)) and part.test[0].tolist() == [60, 61, 62, 63, 64]
    assert part.train[1].tolist() == list(range(40, 60)) and part.test[1].tolist() == [65, 66, 67, 68, 69]
    Path("parts.json").write_text(json.dumps([list(range(30)), list(range(30, 60))]), encoding="utf-8")
    shared = workspace(**settings, method="fedavg").partition.test
    assert sorted(np.concatenate(shared).tolist()) == list(range(TRAIN, TRAIN + TEST))
    parts = {"train": [[0, 61], [1, 2]], "test": [[62], [63]]}
    Path("parts.json").write_text(json.dumps(parts), encoding="utf-8")
    with pytest.raises(SettingsError, match=r"client 0 trains on sample 61.*test-set to 'pooled'"):
        _ = workspace(**settings, method="fedavg").partition
    assert workspace(**settings, method="fedavg", test_set="pooled").partition.train[0].tolist() == [0, 61]


def test_samples_per_client_uses_only_training_samples(tmp_path: Path) -> None:
    settings = {"dataset": str(write_npz(tmp_path)), "partition": "classes", "num_clients": 4, "method": "fedavg"}
    space = workspace(**settings, samples_per_client=10)
    assert [len(part) for part in space.partition.train] == [10] * 4
    assert max(values(space, training_rows(space.partition))) < TRAIN
    assert min(values(space, np.concatenate(space.partition.test))) >= TRAIN
    with pytest.raises(SettingsError, match="num-clients = 4"):
        _ = workspace(**settings, samples_per_client=40).partition


def test_max_samples_keeps_training_and_test_samples_apart(tmp_path: Path) -> None:
    settings = {"dataset": str(write_npz(tmp_path)), "partition": "iid", "num_clients": 2, "method": "fedavg"}
    space = workspace(**settings, max_samples=40)
    assert max(values(space, training_rows(space.partition))) < TRAIN
    assert min(values(space, np.concatenate(space.partition.test))) >= TRAIN


def test_a_site_keeps_its_supplied_test_set(tmp_path: Path) -> None:
    settings = DataSettings(dataset="sites", sample_kind="features", input_shape="1", classes="0,1,2,3")
    content = read_site(write_npz(tmp_path), settings, POLICY)
    complete = replace(settings, feature_mean="0", feature_std="1")
    for changed in (complete, replace(complete, test_set="pooled", test_fraction=0.9)):
        assert load_site(content, changed, POLICY)[1].test[0].tolist() == list(range(TRAIN, TRAIN + TEST))
    with pytest.raises(SettingsError, match="test-set = 'pooled'"):
        read_settings({"dataset": "sites", "test-set": "pooled"}, "a")


def test_a_pfllib_folder_keeps_each_clients_test_set(tmp_path: Path) -> None:
    path = pfllib(tmp_path / "folder", np.arange(6.0)[:, None], np.arange(6) % 2, 2)
    part = workspace(dataset=str(path), num_clients=1, method="fedavg").partition
    assert (part.train[0].tolist(), part.test[0].tolist()) == ([0, 1, 2, 3], [4, 5])
    with pytest.raises(SettingsError, match="test-set = 'pooled'"):
        _ = workspace(dataset=str(path), num_clients=1, method="fedavg", test_set="pooled").partition


def test_published_data_sets_keep_their_test_sets(tmp_path: Path) -> None:
    standins.mnist(tmp_path, "MNIST", 7)
    standins.femnist(tmp_path, 2, 10)
    standins.tiny_imagenet(tmp_path, 3, 4)
    standins.agnews(tmp_path, 5)
    standins.fedisic(tmp_path, 3)
    split_table = tmp_path / "fedisic/train_test_split"
    split_table.write_text(split_table.read_text().replace(",train,train_5", ",test,test_5"), encoding="utf-8")
    for name, test_samples in (("mnist", 10), ("femnist", 2), ("tiny-imagenet", 3), ("agnews", 4), ("fedisic", 3)):
        dataset = load_dataset(DataSettings(dataset=name, download=False), tmp_path, 0)
        assert dataset.is_test is not None and int(dataset.is_test.sum()) == test_samples, name
    assert load_dataset(DataSettings(), tmp_path, 0).is_test is None  # digits


def test_paper_tables_and_experiments_pool_explicitly() -> None:
    """Their recorded numbers come from pooled data. A run older than the setting counts as pooled."""
    root = Path(posy.__file__).parent.parent
    files = [*root.glob("papers/*/*.yaml"), *root.glob("papers/*/settings/*.yaml"), *root.glob("benchmarks/*/*.yaml")]
    assert len(files) > 80
    for file in files:
        lines = file.read_text(encoding="utf-8").splitlines()
        for line, following in zip(lines, [*lines[1:], ""], strict=True):
            key, _, name = line.strip().partition(": ")
            if key == "dataset" and DATASETS[name].has_test_set:
                assert following.strip() == "test-set: pooled", file
    assert declared()["test-set"].before == "pooled"


# -- natural groups keep their names ------------------------------------------------------------------------

HOSPITALS = ("cleveland", "hungary", "va")


def write_hospitals(root: Path, names: Sequence[object] = HOSPITALS) -> Path:
    rows = [f"{row % 7},{row % 5},{row % 2},{names[row % 3]}" for row in range(60)]
    (root / "all.csv").write_text("\n".join(["age,chol,label,hospital", *rows]) + "\n", encoding="utf-8")
    return root / "all.csv"


def test_a_natural_partition_keeps_group_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_hospitals(tmp_path)
    settings = {"dataset": str(path), "group_column": "hospital", "partition": "natural", "num_clients": 3}
    record = posy.run(**QUICK, **settings, run_name="one")
    assert record.summary["sites"] == list(HOSPITALS)
    assert record.clients["site"].tolist() == list(HOSPITALS)
    assert record.predictor("va").client == 2
    (tmp_path / "new.csv").write_text("age,chol\n3,2\n", encoding="utf-8")
    capsys.readouterr()
    assert main(["predict", str(record.path), "va", "new.csv"]) == 0
    assert "va (client 2), served model" in capsys.readouterr().out
    assert main(["predict", str(record.path), "hungarian", "new.csv"]) == 2
    assert "has the models of cleveland, hungary, va" in capsys.readouterr().err
    page = tmp_path / "report.html"
    assert main(["report", str(record.path), "--output", str(page)]) == 0
    text = page.read_text(encoding="utf-8")
    assert "Accuracy of hungary" in text and "Accuracy of client 1" not in text


def test_numeric_group_names_differ_from_client_numbers(tmp_path: Path) -> None:
    path = write_hospitals(tmp_path, [2, 0, 1])
    settings = {"dataset": str(path), "group_column": "hospital", "partition": "natural", "num_clients": 2}
    part = workspace(**settings, method="fedavg").partition
    assert part.names == ("group 0", "group 1")  # the first two of three equal groups
    assert workspace(**settings | {"partition": "iid"}, method="fedavg").partition.names == ()


@pytest.mark.parametrize("form", ["npz", "arrays", "parquet", "function"])
def test_all_readers_keep_group_names(form: str, tmp_path: Path) -> None:
    x, y, groups = np.arange(12.0)[:, None], np.arange(12) % 2, np.array(["north", "south", "east"] * 4)
    name = str(tmp_path / f"data.{form}")
    if form == "npz":
        np.savez(name, x_train=x, y_train=y, groups_train=groups)
    elif form == "arrays":
        Path(name).mkdir()
        for key, array in {"x": x, "y": y, "groups": groups}.items():
            np.save(Path(name) / f"{key}.npy", array)
    elif form == "parquet":
        frame = pyarrow.table({"value": x[:, 0], "label": y, "group": groups})
        pyarrow.parquet.write_table(frame, name)
    else:
        text = "def data():\n    return {'x': [[i] for i in range(12)], 'y': [0, 1] * 6, 'groups': "
        Path("mine.py").write_text(text + f"{groups.tolist()!r}}}\n", encoding="utf-8")
        name = "mine.py:data"
    space = workspace(dataset=name, partition="natural", num_clients=3, method="fedavg")
    assert space.partition.names == ("east", "north", "south")
    rows = np.concatenate([space.partition.train[1], space.partition.test[1]])
    assert set(groups[rows]) == {"north"}
