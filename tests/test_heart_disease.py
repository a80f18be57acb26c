"""The data set `heart-disease`, prepared as in FLamby's Fed-Heart-Disease, and pooled training as a reference."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from posy.client_app.workspace import Workspace
from posy.data.datasets import load_clients
from posy.data.readers.published import HOSPITALS
from posy.data.settings import DataSettings, located
from posy.server_app.app import run
from posy.settings import SettingsError
from posy.strategies.registry import read_settings

ROWS = {"Cleveland": (199, 104), "Hungary": (172, 89), "Switzerland": (30, 16), "Long Beach": (85, 45)}
"""FLamby's numbers of training and test samples."""


def settings(**changes: Any) -> DataSettings:
    return located(DataSettings(dataset="heart-disease", protocol="flamby", **changes))


def test_the_hospitals_are_the_clients() -> None:
    data, part = load_clients(settings(), Path("nowhere"), 0)
    assert part.names == tuple(ROWS)
    assert [(len(train), len(test)) for train, test in zip(part.train, part.test, strict=True)] == [*ROWS.values()]
    assert data.task.class_names == ("no disease", "disease")
    assert data.task.input_shape == (13,)
    assert sum(map(len, part.train)) == 486
    # Switzerland has 15 patients with disease among its 16 test samples, and it is not stratified.
    assert data.y[part.test[2]].sum() == 15


def test_the_first_patient_of_each_hospital_is_encoded() -> None:
    """An independent reading of the first complete row of each table."""
    data, _ = load_clients(settings(), Path("nowhere"), 0)
    folder = Path(__file__).resolve().parent.parent / "data/heart_disease"
    start = 0
    for file, hospital in HOSPITALS.items():
        header, *lines = (json.loads(line) for line in (folder / f"{file}.jsonl").read_text().splitlines())
        rows = [dict(zip(header, line, strict=True)) for line in lines if "?" not in line[:10]]
        first = rows[0]
        values = dict(zip(data.columns, data.x[start].tolist(), strict=True))
        assert values["age"] == pytest.approx(float(first["age"]))
        assert values["oldpeak"] == pytest.approx(float(first["oldpeak"]))
        for code in (2, 3, 4):
            assert values[f"cp={code}"] == (float(first["cp"]) == code)
        for code in (1, 2):
            assert values[f"restecg={code}"] == (float(first["restecg"]) == code)
        assert data.y[start] == (first["num"] != "0")
        assert data.group_names[int(data.groups[start])] == hospital if data.groups is not None else False
        start += len(rows)
    assert start == len(data) == 740


def test_each_hospital_standardises_with_its_training_rows() -> None:
    config = {"method": "fedavg", "dataset": "heart-disease", "protocol": "flamby", "device": "cpu"}
    workspace = Workspace(read_settings(config))
    for client in range(4):
        data = workspace.client_data(client)
        rows = workspace.dataset.x[workspace.partition.train[client]].astype(np.float64)
        std = rows.std(axis=0, ddof=1) + 1e-9
        expected = (workspace.dataset.x[workspace.partition.test[client]] - rows.mean(axis=0)) / std
        np.testing.assert_allclose(data.x_test, expected, rtol=1e-5, atol=1e-6)
        assert data.x_train.mean(0).abs().max() < 1e-5


def test_a_model_stores_the_scale_of_its_client(tmp_path: Path) -> None:
    config = {
        "method": "fedavg", "dataset": "heart-disease", "protocol": "flamby", "model": "logistic",
        "num-server-rounds": 1, "device": "cpu", "output-dir": str(tmp_path), "run-name": "a",
    }  # fmt: skip
    record = run(None, config).record()
    workspace = Workspace(read_settings(config))
    for client, hospital in enumerate(ROWS):
        model = record.predictor(hospital)
        sample = workspace.partition.test[client][0]
        raw = dict(zip(workspace.dataset.columns, workspace.dataset.x[sample].tolist(), strict=True))
        torch.testing.assert_close(model.preprocessing(raw)[0], workspace.client_data(client).x_test[0])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num-clients": 3}, "num-clients = 3.* heart-disease comes with 4 clients"),
        ({"partition": "iid", "num-clients": 5}, "heart-disease is already partitioned"),
    ],
)
def test_other_clients_are_an_error(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    data = {"dataset": "heart-disease", "protocol": "flamby"}
    config = {"method": "fedavg", **data, "output-dir": str(tmp_path), **changes}
    with pytest.raises(SettingsError, match=message):
        run(None, config)


# -- pooled training -------------------------------------------------------------------------------------


def test_pooled_training_equals_training_on_all_samples(make_config: Any, tiny: Any) -> None:
    """Three full-batch steps from the initial model, computed with a PyTorch loop."""
    config = make_config("pooled", model="linear", local_steps=1, batch_size=42, num_server_rounds=3)
    done = run(None, config)
    x, y, train, _ = tiny
    rows = np.concatenate([np.asarray(part) for part in train])
    mean, std = x[rows].astype(np.float64).mean(0), x[rows].astype(np.float64).std(0)
    inputs = torch.from_numpy(((x[rows] - mean) / std).astype(np.float32))
    labels = torch.from_numpy(y[rows])
    architecture = done.strategy.architecture
    layer = torch.nn.Linear(6, 3)
    start = architecture.layout.views(done.strategy.initial())
    with torch.no_grad():
        layer.weight.copy_(torch.from_numpy(start["head.weight"].copy()))
        layer.bias.copy_(torch.from_numpy(start["head.bias"].copy()))
    for _ in range(3):
        loss = torch.nn.functional.cross_entropy(layer(inputs), labels)
        gradients = torch.autograd.grad(loss, [layer.weight, layer.bias])
        with torch.no_grad():
            layer.weight.sub_(0.05 * gradients[0])
            layer.bias.sub_(0.05 * gradients[1])
    final = architecture.layout.views(done.strategy.model)
    np.testing.assert_allclose(final["head.weight"], layer.weight.detach(), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(final["head.bias"], layer.bias.detach(), rtol=1e-4, atol=1e-6)
    summary = done.summary
    assert (summary["served"]["last"]["clients"], summary["local"]["last"]) == (3, None)
    assert summary["samples"] == 3 * 42


@pytest.mark.parametrize(
    "changes",
    [{"fraction-train": 0.5}, {"secure-aggregation": True}, {"dp": "local", "dp-clip": 1.0}, {"holdout-clients": 0.3}],
)
def test_pooled_training_refuses_settings_of_federations(changes: dict[str, Any]) -> None:
    with pytest.raises(SettingsError, match=f"^{next(iter(changes))} = .* with method = 'pooled'"):
        read_settings({"method": "pooled", **changes})
