"""Custom data from a function, and the errors that a wrong function raises."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import posy
from posy.data.dataset import Dataset
from posy.data.datasets import load_dataset
from posy.data.errors import DataError
from posy.data.settings import DataSettings
from posy.settings import SettingsError

DATA = """
import numpy as np
import torch

rng = np.random.default_rng(0)
y = np.arange(60) % 3


def images():
    return torch.from_numpy(rng.integers(0, 256, (60, 3, 8, 6), dtype=np.uint8)), torch.from_numpy(y)


def floats():
    return rng.random((60, 8, 6)), [("cat", "dog", "eel")[label] for label in y]


def features():
    return {"x": (np.arange(120).reshape(60, 2) + 10 * y[:, None]).tolist(), "y": y, "groups": ["a", "b"] * 30}


def texts():
    return {"x": [f"word{label} and {i}" for i, label in enumerate(y)], "y": y, "test": np.arange(60) >= 45}


def nothing():
    pass


def broken():
    raise OSError("the disk is gone")


def unequal():
    return np.zeros((60, 2)), y[:59]


def objects():
    return [{"a": 1}] * 60, y


def flat():
    return np.arange(60.0), y


def missing():
    return np.where(np.arange(120).reshape(60, 2) == 7, np.nan, 1.0), y


def fractions():
    return np.zeros((60, 2)), y + 0.5


def other():
    return {"x": np.zeros((60, 2)), "y": y, "names": "abc"}


def sizes():
    return [np.zeros((20 + number, 20, 3), np.uint8) for number in range(4)], [0, 1, 0, 1]


def ragged():
    return [[1], [1, 2]] * 30, y


def numbered_test():
    return {"x": np.zeros((60, 2)), "y": y, "test": y}


NUMBER = 3
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write the functions to a folder and make it the working directory."""
    monkeypatch.chdir(tmp_path)
    Path("mydata.py").write_text(DATA, encoding="utf-8")
    return tmp_path


def loaded(function: str, **settings: Any) -> Dataset:
    return load_dataset(DataSettings(dataset=f"mydata:{function}", **settings), Path("datasets"), 0)


def test_functions_supply_images_features_and_texts() -> None:
    images = loaded("images")
    assert (images.task.kind, images.task.input_shape, images.x.dtype) == ("image", (3, 8, 6), np.uint8)
    assert images.y.tolist() == [0, 1, 2] * 20
    floats = loaded("floats")
    assert floats.task.class_names == ("cat", "dog", "eel") and floats.sample_kind == "image-float"
    features = loaded("features")
    assert features.x[:4].tolist() == [[0, 1], [12, 13], [24, 25], [6, 7]]
    assert features.groups is not None and features.groups.tolist() == [0, 1] * 30
    texts = loaded("texts", text_length=2)
    assert texts.task.kind == "text" and texts.task.input_shape == (2,)


def test_a_run_on_a_function_can_predict() -> None:
    record = posy.run(
        method="fedavg", dataset="mydata:features", num_clients=2, num_server_rounds=2, partition="iid", run_name="a"
    )
    assert record.settings["dataset"] == f"{Path('mydata.py').absolute()}:features"
    assert record.predictor(0).predict([0.0, 1.0]).label in "012"


WRONG = {
    "nowhere": (SettingsError, "does not define nowhere"),
    "NUMBER": (DataError, "not a function, but int"),
    "nothing": (DataError, "returns NoneType"),
    "broken": (DataError, "OSError: the disk is gone"),
    "unequal": (DataError, "arrays of unequal length (x: 60, y: 59)"),
    "objects": (DataError, "x of shape (60,) and type object"),
    "flat": (DataError, "x of shape (60,) and type float64; allowed: texts, and numbers in 2 to 4 axes"),
    "missing": (DataError, "x: nan at index (3, 1)"),
    "fractions": (DataError, "y: label 0.5 at index 0"),
    "other": (DataError, "a mapping of x, y, names"),
    "ragged": (DataError, "x is not an array"),
    "sizes": (DataError, "x: arrays of shape (20, 20, 3) and (21, 20, 3)"),
    "numbered_test": (DataError, "test must be true or false for each sample, not int64"),
}


@pytest.mark.parametrize("function", WRONG)
def test_invalid_functions_are_refused_with_the_reason(function: str) -> None:
    kind, message = WRONG[function]
    with pytest.raises(kind) as raised:
        loaded(function)
    assert message in str(raised.value) and f"dataset = 'mydata:{function}'" in str(raised.value)
