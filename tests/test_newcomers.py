"""Validation splits, and clients that are held out until the end."""

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from posy.client_app.workspace import Workspace
from posy.commands.papers.record import collect, recorded_numbers
from posy.server_app.app import run
from posy.settings import SettingsError
from posy.strategies.methods import METHODS
from posy.strategies.registry import read_settings

every_method = pytest.mark.parametrize("method", METHODS)


# -- validation -------------------------------------------------------------------------------------------


def test_validation_samples_come_from_the_training_split(make_config: Any) -> None:
    without = Workspace(read_settings(make_config("fedavg"))).partition
    part = Workspace(read_settings(make_config("fedavg", validation_fraction=0.25))).partition
    for client, (n, num_validation) in enumerate(((21, 5), (12, 3), (8, 2), (1, 0))):
        assert len(part.validation[client]) == num_validation and len(without.validation[client]) == 0
        assert len(part.train[client]) == n - num_validation
        both = np.sort(np.concatenate([part.train[client], part.validation[client]]))
        np.testing.assert_array_equal(both, without.train[client])
        np.testing.assert_array_equal(part.test[client], without.test[client])


@pytest.mark.parametrize("method", [name for name in METHODS if name != "fedfomo"])
def test_validation_samples_do_not_affect_training(make_config: Any, federate: Any, tiny: Any, method: str) -> None:
    """Permuting the validation samples does not change training, because the statistics of the inputs stay the same.

    Only FedFomo uses the split in training: it weights the other clients' models by their loss on it.
    """
    x, y, train, test = tiny
    settings = {"validation_fraction": 0.25}
    config = make_config(method, **settings)
    validation = np.concatenate(Workspace(read_settings(config)).partition.validation)
    assert len(validation) == 10
    permuted = x.copy()
    permuted[validation] = x[validation[::-1]]
    first, second = federate(config), federate(make_config(method, data=(permuted, y, train, test), **settings))
    for column in ("train_loss", "served_loss", "local_loss"):
        for before, after in zip(first.column(column), second.column(column), strict=True):
            assert before == pytest.approx(after, rel=1e-4)
    validated = [
        loss for name in ("served", "local") for losses in first.column(f"{name}_validation_loss") for loss in losses
    ]
    assert validated and set(validated) == {0, 1, 2}
    assert first.column("local_validation_loss") != second.column("local_validation_loss")


def test_validation_accuracy_selects_the_best_round(make_config: Any) -> None:
    recorder = run(None, make_config("fedavg", validation_fraction=0.3, num_server_rounds=6, save_models=False))
    rounds = [json.loads(line) for line in (recorder.directory.path / "rounds.jsonl").read_text().splitlines()]
    validated = [row["served_validation_accuracy"]["mean"] for row in rounds]
    best = recorder.summary["served"]["best"]
    assert best["round"] == int(np.argmax(validated)) + 1
    assert best["mean"] == rounds[best["round"] - 1]["served_accuracy"]["mean"]
    assert "served_validation_accuracy" in (recorder.directory.path / "clients.csv").read_text().splitlines()[0]


def test_evaluate_training_records_and_collects_training_losses(make_config: Any) -> None:
    config = make_config("fedavg", evaluate_training=True, num_server_rounds=2, save_models=False)
    path = run(None, config).directory.path
    with (path / "clients.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    served = [(row["partition"], int(row["round"]), float(row["served_training_loss"])) for row in rows]
    assert len(served) == 8  # four clients, two rounds
    assert all(0 <= float(row[f"{point}_training_accuracy"]) <= 1 for row in rows for point in ("served", "local"))
    collect(path)
    curves = recorded_numbers(path)["clients"]
    assert sorted((c, n, loss) for c, points in curves.items() for n, loss in points) == [
        (c, n, pytest.approx(loss, rel=1e-5)) for c, n, loss in sorted(served)
    ]
    means = recorded_numbers(path)["rounds"]["served_training_loss"]
    expected = [np.mean([loss for _, n, loss in served if n == number]) for number in (1, 2)]
    assert means == pytest.approx(expected, rel=1e-5)


# -- newcomers --------------------------------------------------------------------------------------------


@every_method
def test_newcomers_are_served_at_the_end_and_train_once(make_config: Any, federate: Any, method: str) -> None:
    finished = federate(make_config(method, holdout_clients=0.5, seed=3))
    strategy = finished.strategy
    new = set(strategy.newcomers)
    assert len(new) == 2
    for record in finished.records:
        assert not new & set(record.cohort) and not new & set(record.clients)
        assert record.dropped == []
    assert set(strategy.newcomer_rows) == new
    for client, row in strategy.newcomer_rows.items():
        tested = client != 3  # which has no test samples
        assert ("local_accuracy" in row) == tested
        assert ("served_accuracy" in row) == (tested and method != "local")


def test_newcomers_do_not_affect_the_model(make_config: Any, federate: Any, tiny: Any) -> None:
    """FedAvg's model equals the model of a federation without newcomers."""
    _, _, train, _ = tiny
    finished = federate(make_config("fedavg", holdout_clients=0.25, seed=3, num_server_rounds=1, batch_size=100))
    (new,) = finished.strategy.newcomers
    members = [c for c in range(4) if c != new]
    assert finished.records[0].cohort == tuple(members)
    served = finished.strategy.newcomer_rows[new]
    trained = federate(make_config("fedavg", seed=3, num_server_rounds=1, batch_size=100))
    assert trained.records[0].clients[members[0]]["train_loss"] == finished.records[0].clients[members[0]]["train_loss"]
    assert served["n_train"] == len(train[new])


def test_newcomers_are_in_the_summary(make_config: Any, tmp_path: Path) -> None:
    recorder = run(None, make_config("fedrep", holdout_clients=0.5, seed=3, system_accuracy="on"))
    newcomers = recorder.summary["newcomers"]
    assert set(newcomers) == {"served", "local", "clients"}
    for point in ("served", "local"):
        values = [row[f"{point}_accuracy"] for row in newcomers["clients"].values() if f"{point}_accuracy" in row]
        assert newcomers[point]["mean"] == pytest.approx(np.mean(values))
    assert 0 <= recorder.summary["system-accuracy"] <= 1
    for client in map(int, newcomers["clients"]):
        assert (recorder.directory.models / f"client-{client}.safetensors").is_file()


def test_holdout_clients_conflict_with_secure_aggregation(make_config: Any) -> None:
    with pytest.raises(SettingsError, match=r"holdout-clients = 0\.5 .*secure-aggregation = true"):
        read_settings(make_config("fedavg", holdout_clients=0.5, secure_aggregation=True))
