"""Using a finished run: its record, its clients' models, and what they predict for new samples."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import posy
from posy.client_app.base import PersonalClient
from posy.client_app.workspace import Workspace
from posy.data.errors import DataError
from posy.server_app.app import run
from posy.server_app.record import Record
from posy.settings import SettingsError
from posy.strategies.methods import METHODS
from posy.strategies.registry import read_settings

MakeConfig = Callable[..., dict[str, Any]]
Noted = dict[tuple[int, str], tuple[int, list[int]]]


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> Noted:
    """Note, by client and evaluation point, the classes behind each recorded accuracy, with the round; the last stay."""
    found: Noted = {}
    original = PersonalClient._scores

    def scores(self: PersonalClient, point: str, predictor: Any) -> Any:
        if len(self.data.y_test):
            outputs = yield from self.predict(predictor, "test")
            found[self.client, point] = (self.round, outputs.argmax(dim=-1).tolist())
        return (yield from original(self, point, predictor))

    monkeypatch.setattr(PersonalClient, "_scores", scores)
    return found


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("data", ["features", "images"])
def test_predictions_are_those_behind_the_recorded_accuracy(
    method: str, data: str, make_config: MakeConfig, noted: Noted, tmp_path: Path
) -> None:
    """Sample by sample, from the raw samples, at the method's point, and after training where that is stored."""
    if data == "features":
        config = make_config(method, num_server_rounds=4, model="mlp", lr=0.1)
    else:
        config = {
            "method": method,
            "num-clients": 3,
            "num-server-rounds": 3,
            "max-samples": 90,
            "model": "mlp",
            "local-epochs": 1,
            "fraction-train": 0.7,
            "output-dir": str(tmp_path),
        }
    record = run(None, config).record()
    workspace = Workspace(read_settings(config))
    last, compared = record.clients[record.clients["round"] == record.summary["rounds"]], 0
    for client, test in enumerate(workspace.partition.test):
        row = last[last["partition"] == client].iloc[0]
        for point in ("", "served", "local"):
            try:
                predictor = record.predictor(client, point)
            except SettingsError:
                assert point != ""
                continue
            assert point in ("", predictor.point) and not predictor.training
            if not len(test):
                continue
            at, classes = noted[client, predictor.point]
            assert predictor.round == at == record.summary["rounds"]
            labels = [p.label for p in predictor.predict_all(workspace.dataset.x[test])]
            assert labels == [predictor.class_names[number] for number in classes]
            y = workspace.dataset.y[test]
            right = np.mean([predictor.class_names[number] == label for number, label in zip(y, labels, strict=True)])
            assert row[f"{predictor.point}_accuracy"] == pytest.approx(right)
            compared += 1
        if method != "local":
            assert record.predictor(client).point == read_settings(config).method.point or client not in trained(last)
    assert compared >= 6


def trained(rows: Any) -> set[int]:
    return set(rows[rows["train_loss"].notna()]["partition"])
