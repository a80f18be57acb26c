"""Test samples: nothing is fitted on them, and a test set that comes with the data stays a test set."""

from pathlib import Path

import numpy as np
import pytest
from nodes import pfllib, table

import posy
from posy.client_app.workspace import Workspace
from posy.data.errors import DataError
from posy.data.partitions import Partition
from posy.strategies.registry import read_settings

QUICK = {"method": "fedavg", "num_server_rounds": 1, "local_epochs": 1, "model": "linear", "device": "cpu"}


def workspace(**settings: object) -> Workspace:
    return Workspace(read_settings({key.replace("_", "-"): value for key, value in settings.items()}))


def training_rows(part: Partition) -> np.ndarray:
    return np.concatenate(part.train)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


# -- statistics and vocabulary come from training samples --------------------------------------------------


def test_features_are_standardised_by_training_samples_alone(tmp_path: Path) -> None:
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
        used = record.predictor(client).preprocessing
        assert used.mean.tolist() == pytest.approx([mean, 5.0])
        assert used.std.tolist() == pytest.approx([variance**0.5, 1.0])  # the constant column is only centred
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
    used = record.predictor(0).preprocessing
    assert used.mean.tolist() == [4.0, 40.0]
    assert used.std.tolist() == pytest.approx([5**0.5, 500**0.5])
    data = workspace(dataset=str(path), num_clients=1, method="fedavg").client_data(0)
    assert data.x_train[:, 0].tolist() == pytest.approx([-3 / 5**0.5, -1 / 5**0.5, 1 / 5**0.5, 3 / 5**0.5])


def test_a_value_that_standardisation_takes_beyond_float32_is_refused(tmp_path: Path) -> None:
    x = np.array([[1.0], [1.0 + 1e-12], [1.0], [1e30]])
    path = pfllib(tmp_path / "folder", x, np.array([0, 1, 0, 1]), 1)
    with pytest.raises(DataError, match="feature 0 exceeds the range of float32"):
        posy.run(**QUICK, dataset=str(path), num_clients=1)
