"""The rules of CFL, FedFomo, FedAMP, IFCA, FedMTL, FedMGDA+ and ConFREE match their papers."""

from typing import Any

import numpy as np
import pytest
import torch

from posy.client_app.workspace import Workspace
from posy.randomness import model_seed
from posy.strategies import fedfomo, schedule
from posy.strategies.cfl import nearest_side, split
from posy.strategies.confree import guidance, sequential_guidance
from posy.strategies.fedamp import farthest, message_weights
from posy.strategies.fedfomo import mixed
from posy.strategies.fedmgda import step_size
from posy.strategies.methods import settings_class
from posy.strategies.registry import read_settings
from posy.strategies.replies import gram

METHODS = ("cfl", "fedfomo", "fedacs", "fedamp", "ifca", "fedmtl", "fedmgda", "confree")
ALWAYS_SPLIT = {"cfl_eps1": 1e9, "cfl_eps2": 0.0}
"""Settings with which each cluster of CFL splits as soon as all its members reply."""


def notices(config: dict[str, Any]) -> tuple[str, ...]:
    settings = read_settings(config)
    return settings.method.notices(settings, Workspace(settings).architecture)


# -- CFL -----------------------------------------------------------------------------------------------


def test_cfl_splits_ignore_holdout_clients(make_config: Any, federate: Any) -> None:
    """Hold-out clients are not members, so the other two split and no count includes a newcomer."""
    finished = federate(make_config("cfl", holdout_clients=0.5, seed=3, num_server_rounds=2, **ALWAYS_SPLIT))
    strategy = finished.strategy
    first, second = strategy.members
    assert strategy.cluster[[first, second]].tolist() == [0, 1]
    assert [record.quantities["cluster_sizes"] for record in finished.records] == [[1, 1], [1, 1]]


def test_newcomers_join_the_side_of_the_most_similar_update() -> None:
    updates = np.float32([[1, 0], [0.6, 0.8], [-1, 0], [0, -1]])
    sides = np.array([0, 0, 1, 1])
    assert nearest_side(np.float32([-3, 0.1]), updates, sides)
    assert not nearest_side(np.float32([0.1, 0.2]), updates, sides)
    assert not nearest_side(np.float32([0, 0]), updates, sides)  # without a similarity: the first side


def test_newcomers_descend_the_split_tree(make_config: Any, federate: Any, make_client: Any) -> None:
    """The updates of a newcomer from the stored models determine its cluster."""
    settings = {"model": "linear", "num_server_rounds": 3, "seed": 3, "batch_size": 100, **ALWAYS_SPLIT}
    finished = federate(make_config("cfl", holdout_clients=0.25, **settings))
    strategy, (new,) = finished.strategy, finished.strategy.newcomers
    assert len(strategy.parents) == 2 and strategy.split_models.shape == (2, strategy.size)
    assert strategy.split_sides[:, 0].tolist() == [0, 0, 0, 1, 1]
    client = make_client("cfl", new, holdout_clients=0.25, **settings)
    expected = 0
    for index, parent in enumerate(strategy.parents):
        if parent != expected:
            continue
        start = strategy.split_models[index]
        (trained,), _, _ = client.fit([start], {"server-round": 3, "lr": schedule.learning_rate(strategy.settings, 3)})
        rows = strategy.split_sides[:, 0] == index
        updates, sides = strategy.split_updates[rows].astype(np.float64), strategy.split_sides[rows, 1]
        change = (trained - start).astype(np.float64)
        cosines = updates @ change / np.linalg.norm(updates, axis=1) / np.linalg.norm(change)
        expected = index + 1 if sides[cosines.argmax()] else expected
    assert strategy.cluster[new] == expected
    np.testing.assert_array_equal(strategy.serve(new)["model"], [strategy.model, *strategy.split_off][expected])
    assert "served_accuracy" in strategy.newcomer_rows[new] or new == 3


def test_cfl_stores_no_split_tree_without_newcomers(make_config: Any, federate: Any) -> None:
    strategy = federate(make_config("cfl", num_server_rounds=2, **ALWAYS_SPLIT)).strategy
    assert len(strategy.parents) >= 2
    assert len(strategy.split_models) == len(strategy.split_updates) == len(strategy.split_sides) == 0


def test_cfl_splits_only_below_gamma_max() -> None:
    """The largest similarity between the parts is -0.6: sqrt((1 + 0.6) / 2) = 0.894."""
    changes, n = np.float32([[1, 0], [1, 0], [-0.6, 0.8]]), np.ones(3)
    assert split(changes, n, 9.0, 0.0, 0.89).tolist() == [False, False, True]
    assert not split(changes, n, 9.0, 0.0, 0.9).any()


def test_cfl_logs_an_absent_client_that_blocks_a_split(
    make_config: Any, federate: Any, failing: Any, warnings: Any
) -> None:
    grid = failing(("train", 1, 2), ("train", 2, 2))
    finished = federate(make_config("cfl", num_server_rounds=3, **ALWAYS_SPLIT), grid=grid)
    assert [len(record.quantities["cluster_sizes"]) for record in finished.records] == [1, 1, 2]
    logged = {r.getMessage() for r in warnings.records if "meets the criterion" in r.getMessage()}
    assert {(text[:7], "cluster 0" in text, "clients [2]" in text) for text in logged} == {
        ("round 1", True, True),
        ("round 2", True, True),
    }
    assert len(logged) == 2


@pytest.mark.parametrize(("fraction", "holdout", "count"), [(1.0, 0.0, 0), (0.9, 0.0, 0), (0.5, 0.0, 1), (0.6, 0.5, 0)])
def test_cfl_warns_if_no_cluster_can_split(make_config: Any, fraction: float, holdout: float, count: int) -> None:
    """A fraction of 0.9 selects all of four clients, and 0.6 selects both of two members."""
    assert len(notices(make_config("cfl", fraction_train=fraction, holdout_clients=holdout))) == count


@pytest.mark.parametrize(
    ("settings", "bound"), [({"cfl_eps1": 0.0}, "cfl-eps1"), ({"cfl_gamma_max": 1.0}, "gamma-max")]
)
def test_cfl_warns_if_its_bounds_exclude_a_split(make_config: Any, settings: dict[str, float], bound: str) -> None:
    (text,) = notices(make_config("cfl", **settings))
    assert bound in text and "equivalent to FedAvg" in text


# -- FedFomo -------------------------------------------------------------------------------------------


def test_fedfomo_warns_if_fewer_clients_train_than_models_are_requested(make_config: Any) -> None:
    """One of four clients is a newcomer, so each client has two others."""
    settings = {"validation_fraction": 0.2, "holdout_clients": 0.25}
    (text,) = notices(make_config("fedfomo", **settings, fedfomo_models=3))
    assert text.startswith("fedfomo-models = 3: 2 other clients train") and text.endswith("set fedfomo-models = 2")
    assert notices(make_config("fedfomo", **settings, fedfomo_models=2)) == ()
    assert notices(make_config("fedfomo", **settings)) == ()


def test_fedfomo_mix_by_hand() -> None:
    start, candidates = np.float32([1, 1]), np.float32([[3, 1], [1, 5], [9, 9]])
    np.testing.assert_allclose(mixed(start, candidates, np.float32([1, 3, -2])), [1.5, 4])
    np.testing.assert_array_equal(mixed(start, candidates, np.float32([0, -1, -2])), start)


def test_fedfomo_reverts_a_training_that_raised_the_loss(make_client: Any) -> None:
    client = make_client("fedfomo", model="linear", batch_size=100)
    start = client.initial()
    client.stored["start"] = start
    client.stored["model"] = start + 100 * torch.randn(len(start), generator=torch.Generator().manual_seed(0))
    none = np.empty((0, len(start)), np.float32)
    (sent, _), _, _ = client.fit([none], {"server-round": 2, "lr": 0.0})
    np.testing.assert_array_equal(sent, start.numpy())


def test_fedfomo_does_not_train_on_validation_samples(make_config: Any, federate: Any) -> None:
    """A fifth of 21, 12 and 8 training samples is set aside. A single sample serves both purposes."""
    finished = federate(make_config("fedfomo", num_server_rounds=1, local_epochs=1))
    rows = finished.records[0].clients
    assert finished.records[0].samples == 17 + 10 + 6 + 1
    assert not any("validation" in column for row in rows.values() for column in row)


def test_fedfomo_epsilon_decays(make_strategy: Any, update: Any) -> None:
    """In round 6, 0.3 - 6 * 0.05 is 0 and the largest affinity decides. Earlier any client may come first."""
    firsts: dict[int, set[int]] = {1: set(), 6: set()}
    for seed in range(25):
        strategy = make_strategy("fedfomo", model="linear", fedfomo_models=1, seed=seed)
        strategy.affinity[0] = [9, 1, 5, 2]
        for server_round, first in firsts.items():
            updates = [
                update(
                    client, {name: np.zeros(shape) for name, shape in strategy.exchange.expected_shapes(client).items()}
                )
                for client in range(4)
            ]
            strategy.aggregate(server_round, updates)
            first.add(int(strategy.sent[0, 0]))
    assert firsts == {1: {1, 2, 3}, 6: {2}}


@pytest.mark.parametrize(("server_round", "epsilon"), [(2, 0.7), (3, 0.4), (5, 0.0)])
def test_fedfomo_draws_the_models_of_a_round_with_the_epsilon_of_the_program(
    server_round: int, epsilon: float, make_strategy: Any, update: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program counts epochs from 0: epsilon - epoch * decay. No client receives models in epoch 0, here round 1."""
    drawn: list[float] = []
    monkeypatch.setattr(fedfomo, "chosen", lambda _a, _c, epsilon, _g: drawn.append(epsilon) or [])
    strategy = make_strategy("fedfomo", model="linear", fedfomo_epsilon=1.0, fedfomo_epsilon_decay=0.3)
    shapes = strategy.exchange.expected_shapes(0)
    strategy.aggregate(server_round - 1, [update(0, {name: np.zeros(shape) for name, shape in shapes.items()})])
    assert drawn == pytest.approx([epsilon] * 4)


def test_fedfomo_update_norm_is_relative_to_the_training_start(make_config: Any, federate: Any) -> None:
    """The server recomputes each start, so it measures only the norm of the client's training."""
    measured: dict[tuple[int, int], float] = {}

    def record_norms(strategy: Any) -> None:
        original = strategy.reference

        def reference(client: int, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
            before = original(client, arrays)
            measured[strategy.record.number, client] = float(np.linalg.norm(arrays["model"] - before["model"]))
            return before

        strategy.reference = reference

    finished = federate(make_config("fedfomo", max_update_norm=1e6, num_server_rounds=4), prepare=record_norms)
    for client in range(4):
        stored = finished.kept(client)
        assert measured[4, client] == pytest.approx(np.linalg.norm(stored["model"] - stored["start"]), rel=1e-4)


def test_fedfomo_logs_its_validation_data(make_config: Any) -> None:
    assert notices(make_config("fedfomo", validation_fraction=0.2)) == ()
    (texts,) = notices(make_config("fedfomo"))
    assert "20 % of its training samples" in texts
    (texts,) = notices(make_config("fedfomo", fedfomo_validation=0.0))
    assert "close to local training" in texts
    assert "local training" in notices(make_config("fedfomo", fedfomo_models=0, validation_fraction=0.2))[0]


# -- FedAMP and FedMTL ---------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["fedamp", "fedmtl"])
def test_fedamp_and_fedmtl_updates_are_relative_to_the_client_model(
    method: str, make_strategy: Any, update: Any, make_client: Any
) -> None:
    near = {"fedamp_sigma": 100.0, "fedamp_alpha": 100.0}  # messages mix all models
    strategy = make_strategy(method, model="linear", **near)
    rows = np.random.default_rng(0).normal(size=(4, strategy.size)).astype(np.float32)
    first_start = strategy.serve(0)["model"] if method == "fedamp" else strategy.initial()
    np.testing.assert_array_equal(strategy.reference(0, {"model": rows[0]})["model"], first_start)
    strategy.aggregate(1, [update(c, {"model": rows[c]}) for c in (0, 2)])
    np.testing.assert_array_equal(strategy.reference(0, {"model": rows[1]})["model"], rows[0])
    strategy.lost([0])  # the client restarts from the message, or from the initial model
    start = strategy.serve(0)["model"] if method == "fedamp" else strategy.initial()
    np.testing.assert_array_equal(strategy.reference(0, {"model": rows[1]})["model"], start)
    client = make_client(method, model="linear", batch_size=100, **near)
    config = {"server-round": 2, "lr": 0.0, **strategy.train_config(2, 0)}
    (sent,), _, _ = client.fit([*strategy.serve(0).values()], config)
    np.testing.assert_array_equal(sent, start)  # without a step, the update is the start
    strategy.aggregate(2, [update(0, {"model": rows[3]})])
    np.testing.assert_array_equal(strategy.reference(0, {"model": rows[1]})["model"], rows[3])


@pytest.mark.parametrize("method", ["fedamp", "fedmtl", "fedfomo"])
def test_max_update_norm_covers_only_the_training(method: str, make_config: Any, federate: Any, failing: Any) -> None:
    """From round 3, lr is almost 0, so updates have norm 0 although the clients' models differ.

    Client 1 is absent in round 3, and loses its state before round 4.
    """
    norms: dict[tuple[int, int], float] = {}

    def record_norms(strategy: Any) -> None:
        original = strategy.reference

        def reference(client: int, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
            before = original(client, arrays)
            norms[strategy.record.number, client] = float(np.linalg.norm(arrays["model"] - before["model"]))
            return before

        strategy.reference = reference

    near = {"fedamp_sigma": 100.0, "fedamp_alpha": 100.0}
    schedule = {"lr": 0.5, "lr_schedule": "step", "lr_step": 2, "lr_decay": 1e-20, "num_server_rounds": 6}
    grid = failing(("train", 3, 1), forget=[("train", 4, 1)])
    config = make_config(method, max_update_norm=1e6, **near, **schedule)
    strategy = federate(config, grid=grid, prepare=record_norms).strategy
    assert max(np.linalg.norm(strategy.models[0] - strategy.models[c]) for c in (1, 2, 3)) > 0.1
    assert min(norms[1, client] for client in range(4)) > 0.1
    assert {key for key in norms if key[0] > 2} == {(n, c) for n in range(3, 7) for c in range(4)} - {(3, 1), (4, 1)}
    assert max(norm for (number, _), norm in norms.items() if number > 2) < 1e-5


def test_fedamp_cutoff_distance_by_hand() -> None:
    """With alpha = 2 and sigma = 4, 2 / 4 exp(-d² / 4) = 0.001 at d² = 4 ln 500."""
    assert farthest(2.0, 4.0) == pytest.approx(np.sqrt(4 * np.log(500)))
    models = np.zeros((2, 3), np.float32)
    models[1, 0] = farthest(2.0, 4.0)
    assert message_weights(models, 2.0, 4.0)[0, 1] == pytest.approx(0.001, rel=1e-4)
    assert farthest(1e-6, 4.0) == 0


def test_fedamp_and_fedmtl_warn_if_they_reduce_to_local_training(make_config: Any) -> None:
    (texts,) = notices(make_config("fedamp"))
    assert "above 1.27 do not attend" in texts  # sqrt(0.1 ln 1e7)
    assert notices(make_config("fedmtl")) == ()
    assert "local training" in notices(make_config("fedmtl", fedmtl_strength=0.0))[0]


# -- IFCA ----------------------------------------------------------------------------------------------


def test_ifca_warns_if_all_clusters_start_equal(make_config: Any, tmp_path: Any) -> None:
    from safetensors.numpy import save_file

    config = make_config("ifca", model="linear")
    assert notices(config) == ()
    network = Workspace(read_settings(config)).architecture
    arrays = network.layout.views(network.initial(model_seed(9, 0)))
    save_file({name: np.ascontiguousarray(array) for name, array in arrays.items()}, tmp_path / "w.safetensors")
    assert "equivalent to FedAvg" in notices({**config, "weights": str(tmp_path / "w.safetensors")})[0]
    assert "equivalent to FedAvg" in notices(make_config("ifca", ifca_clusters=1))[0]


@pytest.mark.parametrize("method", ["ifca", "fedfomo"])
def test_class_weights_apply_to_the_losses_that_choose_models(method: str, make_client: Any) -> None:
    """The loss of each model is the mean over classes of the mean loss of a class."""
    x, y = np.random.default_rng(0).normal(size=(24, 3)).astype(np.float32), np.repeat([0, 1, 2], (12, 7, 5))
    data = (x, y, [range(23)], [range(23, 24)])
    client = make_client(method, data=data, model="linear", class_weights="balanced", batch_size=100)
    models = torch.stack([client.initial(number) for number in range(3)])
    split = "train" if method == "ifca" else "validation"
    samples = client.jobs.samples(split)
    losses = client.jobs.drive(client.losses(models, split))
    counts = torch.bincount(client.data.y_train, minlength=client.data.num_classes).clamp_min(1).double()
    for model, loss in zip(models, losses, strict=True):
        tensors = client.layout.views(model)
        logits = samples.x @ tensors["head.weight"].T + tensors["head.bias"]
        each = torch.nn.functional.cross_entropy(logits, samples.y, reduction="none").double()
        weight = 1 / counts[samples.y]
        assert float(loss) == pytest.approx(float((each * weight).sum() / weight.sum()), rel=1e-5)


# -- FedMGDA+ ------------------------------------------------------------------------------------------


def test_fedmgda_step_decays_every_100_rounds() -> None:
    """Over 200 rounds a decay of 0.25 halves the step in rounds 100 to 199, and quarters it in round 200."""
    assert [step_size(2.0, 0.25, t, 200) for t in (1, 99, 100, 199, 200)] == pytest.approx([2, 2, 1, 1, 0.5])
    assert step_size(2.0, 1.0, 700, 1000) == 2
    assert settings_class("fedmgda")(decay=0.5).follows_number_of_rounds
    assert not settings_class("fedmgda")().follows_number_of_rounds


# -- ConFREE -------------------------------------------------------------------------------------------


def test_confree_guidance_projects_on_the_original_updates() -> None:
    """Eq. 3 with vectors: every projection uses the original updates."""
    rows = np.random.default_rng(4).normal(size=(5, 6)).astype(np.float32)
    expected = np.zeros(6)
    for i, row in enumerate(rows.astype(np.float64)):
        expected += row / 5
        for j, other in enumerate(rows.astype(np.float64)):
            if j != i and row @ other < 0:
                expected -= row @ other / (other @ other) * other / 5
    np.testing.assert_allclose(guidance(gram(rows)) @ rows, expected, atol=1e-6)


def test_confree_sequential_guidance_by_hand() -> None:
    """For (2, 0) and (-1, 1), the product -2 adds twice the other update: (0, 2) and (3, 1)."""
    rows = np.float32([[2, 0], [-1, 1]])
    np.testing.assert_allclose(sequential_guidance(gram(rows), np.random.default_rng(0)) @ rows, [1.5, 1.5])


def test_confree_treats_the_body_as_one_vector_by_default(make_strategy: Any, update: Any) -> None:
    """One tensor conflicts and the whole bodies do not, so only the step per tensor differs from the mean."""
    steps = {}
    for parts in ("body", "tensors"):
        strategy = make_strategy("confree", model="mlp", confree_alpha=0.0, confree_parts=parts)
        before, changes = strategy.model.copy(), np.zeros((2, strategy.model.size), np.float32)
        first, second = strategy._parts()[0][0], slice(strategy.model.size - 2, strategy.model.size)
        changes[:, first.start : first.start + 2] = (1, 0), (-1, 1)
        changes[:, second] = (3, 0), (3, 0)
        strategy.aggregate(1, [update(c, {"model": before + row}) for c, row in enumerate(changes)])
        steps[parts] = (strategy.model - before)[first.start : first.start + 2]
    np.testing.assert_allclose(steps["body"], [0, 0.5], atol=1e-6)
    np.testing.assert_allclose(steps["tensors"], [0.25, 0.75], atol=1e-6)


# -- all methods ----------------------------------------------------------------------------------------


NETWORK = """
from torch import nn

def normalised(task):
    body = nn.Linear(task.input_shape[0], 5), nn.BatchNorm1d(5), nn.ReLU()
    return nn.Sequential(*body, nn.Linear(5, task.num_classes))
"""


@pytest.mark.parametrize("method", METHODS)
def test_running_statistics_do_not_affect_parameters(
    method: str, make_strategy: Any, update: Any, tmp_path: Any
) -> None:
    """Different statistics in the replies change only the statistics in the state."""
    (tmp_path / "network.py").write_text(NETWORK)
    served, quantities = [], []
    for scale in (0.0, 50.0):
        strategy = make_strategy(method, model=f"{tmp_path / 'network.py'}:normalised", **ALWAYS_SPLIT)
        layout = strategy.architecture.layout
        indices = np.arange(strategy.size)
        statistics = np.setdiff1d(indices, layout.trainable.take(indices))
        assert len(statistics) == 10
        rows = np.stack([strategy.initial()] * 4)
        noise = np.random.default_rng(1).normal(0, 0.1, (4, layout.trainable.size))
        layout.trainable.put(rows, layout.trainable.take(rows) + noise.astype(np.float32))
        rows[:, statistics] += scale * np.arange(4, dtype=np.float32)[:, None]
        sent = strategy.shared.take(rows)
        zeros = {name: np.zeros(shape) for name, shape in strategy.exchange.expected_shapes(0).items()}
        quantities.append(strategy.aggregate(1, [update(c, zeros | {"model": sent[c]}, c + 1) for c in range(4)]))
        parameters = ~np.isin(strategy.shared.take(indices), statistics)
        arrays = [array for client in range(4) for array in strategy.serve(client).values()]
        if scale and method == "cfl":
            for client, array in enumerate(arrays):
                members = np.flatnonzero(strategy.cluster == strategy.cluster[client])
                mean = np.average(sent[members], axis=0, weights=members + 1)
                np.testing.assert_allclose(array[~parameters], mean[~parameters], rtol=1e-5)
        served.append([array[..., parameters] for array in arrays])
    assert quantities[0] == quantities[1]
    for before, after in zip(*served, strict=True):
        np.testing.assert_array_equal(before, after)
