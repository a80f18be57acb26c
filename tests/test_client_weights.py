"""The setting `client-weights`: the means that it changes, and the methods that refuse it."""

import numpy as np
import pytest

from posy.commands import archive
from posy.commands.launch import APP
from posy.commands.papers.item import item
from posy.settings import SettingsError
from posy.strategies.methods import METHODS
from posy.strategies.registry import read_experiment, read_settings
from posy.strategies.replies import Update
from posy.strategies.server_state import state_of
from posy.yaml12 import dump

UNIFORM = {"client_weights": "uniform", "model": "linear", "num_server_rounds": 1}


def record_updates(updates, strategy):
    """Append the updates of every round of a strategy to a list."""
    aggregate = strategy.aggregate

    def capture(server_round, replies):
        updates.extend(replies)
        return aggregate(server_round, replies)

    strategy.aggregate = capture


@pytest.mark.parametrize("weights", ["samples", "uniform"])
def test_models_are_averaged_by_client_weights(make_config, federate, weights):
    updates: list[Update] = []
    config = make_config("fedavg", **UNIFORM | {"client_weights": weights})
    finished = federate(config, prepare=lambda strategy: record_updates(updates, strategy))
    models = np.stack([update.arrays["model"] for update in updates]).astype(np.float64)
    counts = np.array([update.num_examples for update in updates], np.float64)
    assert len(set(counts)) > 1
    expected = models.mean(axis=0) if weights == "uniform" else counts @ models / counts.sum()
    np.testing.assert_allclose(finished.strategy.model, expected, atol=1e-6)


def test_clients_apply_uniform_weights_under_masks(make_config, federate):
    plain, masked = (
        federate(make_config("fedavg", **UNIFORM, secure_aggregation=secure)).strategy.model for secure in (False, True)
    )
    np.testing.assert_allclose(masked, plain, atol=1e-4)
    by_samples = federate(make_config("fedavg", **UNIFORM | {"client_weights": "samples"})).strategy.model
    assert np.abs(plain - by_samples).max() > 1e-2


@pytest.mark.parametrize("method", METHODS)
def test_uniform_weights_change_a_run_or_are_refused(make_config, federate, method):
    """The tiny clients have 21, 12, 8 and 1 training samples."""

    def state(**settings):
        config = make_config(method, model="mlp", num_server_rounds=2, **settings)
        return state_of(federate(config).strategy)

    try:
        uniform = state(client_weights="uniform")
    except SettingsError as error:
        assert str(error).startswith("client-weights = 'uniform'")
        return
    by_samples = state()
    assert any(not np.array_equal(uniform[name], by_samples[name]) for name in by_samples)


def test_clusters_are_averaged_with_uniform_weights(make_config, federate):
    updates: list[Update] = []
    config = make_config("ifca", **UNIFORM, ifca_clusters=2)
    finished = federate(config, prepare=lambda strategy: record_updates(updates, strategy))
    for cluster, model in enumerate(finished.strategy.models):
        models = [update.arrays["model"] for update in updates if int(update.arrays["cluster"]) == cluster]
        if models:
            np.testing.assert_allclose(model, np.mean(models, axis=0, dtype=np.float64), atol=1e-6)


@pytest.mark.parametrize(
    "method", ["confree", "fedacs", "fedamp", "fedas", "fedfew", "fedfomo", "fedmtl", "fedproto", "local"]
)
def test_methods_without_a_mean_of_models_refuse_uniform_weights(make_config, method):
    """Their runs would equal runs with weights by samples."""
    with pytest.raises(
        SettingsError,
        match=f"client-weights = 'uniform' .*method = '{method}'.*set client-weights = 'samples'",
    ):
        read_settings(make_config(method, client_weights="uniform"))


def test_fednh_always_weighs_prototypes_by_samples(make_strategy, make_config):
    heads, bodies = [], []
    for weights in ("samples", "uniform"):
        strategy = make_strategy("fednh", model="mlp", client_weights=weights)
        rng = np.random.default_rng(0)
        shapes = {"model": (strategy.size,), "directions": (3, strategy.architecture.embedding_dim)}
        updates = [
            Update({name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}, 1.0, client=c)
            for c in range(2)
        ]
        for update, count in zip(updates, (1, 3), strict=True):
            update.num_examples, update.weight = count, 1 if weights == "uniform" else count
        strategy.aggregate(1, updates)
        views = strategy.architecture.layout.views(strategy.model)
        heads.append(views["head.weight"].copy())
        bodies.append(next(view for name, view in views.items() if not name.startswith("head")).copy())
    np.testing.assert_allclose(*heads, atol=1e-6)
    assert np.abs(bodies[0] - bodies[1]).max() > 0.1


def test_fednh_refuses_uniform_weights_with_secure_aggregation(make_strategy):
    with pytest.raises(SettingsError, match=r"client-weights = 'uniform' .*with method = 'fednh'"):
        make_strategy("fednh", model="mlp", client_weights="uniform", secure_aggregation=True)


def test_archived_runs_with_ifca_mean_fit_their_tables():
    table = item("cwfedavg", "table1")
    archived = archive.read(APP / "papers/cwfedavg/results/table1-small")
    cells = [c for c in table.plan("small").cells if c.method == "ifca" and c.name in archived]
    assert {cell.config["client-weights"] for cell in cells} == {"uniform"}
    lines = [{**archived[cell.name]["config"]["settings"], "ifca-mean": "uniform"} for cell in cells]
    assert len(lines) == 9
    for stored in lines:
        # An archive that was written again has the setting's current key.
        assert stored.pop("client-weights", "uniform") == "uniform"
    assert all(cell.fits(stored) for cell, stored in zip(cells, lines, strict=True))
    assert read_settings({}, stored=lines[0]).run.client_weights == "uniform"


@pytest.mark.parametrize(("mean", "weights"), [("uniform", "uniform"), ("weighted", "samples")])
def test_a_run_config_with_ifca_mean_is_an_experiment(tmp_path, mean, weights):
    file = tmp_path / "config.yaml"
    file.write_text(dump({"settings": {"method": "ifca", "ifca-mean": mean}, "versions": {}}), encoding="utf-8")
    earlier = {"stratify": False, "test-set": "pooled"}  # the behaviour before these settings existed
    assert read_experiment(file) == {"method": "ifca", "client-weights": weights, **earlier}
