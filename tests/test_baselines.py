"""Baselines: one or two full-batch steps by hand, and degenerate cases."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord

from posy.server_app.in_process import InProcessGrid
from posy.settings import SettingsError
from posy.strategies.fedamp import message_weights, squared_distances
from posy.strategies.methods import strategy_class
from posy.strategies.replies import BadReplyError

LR = 0.1
CONFIG = {"server-round": 1, "lr": LR}
EVALUATE = {"server-round": 1, "lr": LR, "evaluate-personal": True}
FULL_BATCH = {"model": "linear", "batch_size": 100}


def start_of(client, seed=0):
    return np.random.default_rng(seed).normal(size=client.layout.size).astype(np.float32)


# -- FedAvg with fine-tuning ---------------------------------------------------------------------------


def test_fine_tuning_by_hand(make_client, softmax_regression, gradient_of):
    """Two steps from the served model give the local model, which the client neither sends nor stores."""
    client = make_client("fedavg-ft", **FULL_BATCH, fedavg_ft_epochs=2, fedavg_ft_lr=0.3)
    start = start_of(client)
    _, _, metrics = client.evaluate([start], EVALUATE)
    middle = start - 0.3 * gradient_of(client, start)
    tuned = middle - 0.3 * gradient_of(client, middle)
    test = client.data.x_test.numpy(), client.data.y_test.numpy()
    assert metrics["served-loss"] == pytest.approx(softmax_regression(start, *test)[0], rel=1e-5)
    assert metrics["local-loss"] == pytest.approx(softmax_regression(tuned, *test)[0], rel=1e-4)
    assert not client.state


def test_fine_tuning_steps_use_the_rate_of_the_round(make_client, softmax_regression, gradient_of):
    client = make_client("fedavg-ft", **FULL_BATCH, fedavg_ft_steps=2)
    start = start_of(client)
    _, _, metrics = client.evaluate([start], {**EVALUATE, "lr": 0.02})
    middle = start - 0.02 * gradient_of(client, start)
    tuned = middle - 0.02 * gradient_of(client, middle)
    test = client.data.x_test.numpy(), client.data.y_test.numpy()
    assert metrics["local-loss"] == pytest.approx(softmax_regression(tuned, *test)[0], rel=1e-5)


def test_fine_tuning_follows_the_lr_schedule(make_strategy):
    """Check the cosine over 4 rounds: lr/2 (1 + cos(π/2)) in round 3, in evaluation and in training."""
    strategy = make_strategy("fedavg-ft", lr=0.4, lr_schedule="cosine", num_server_rounds=4, evaluate_every=1)
    grid = InProcessGrid(strategy.num_clients)
    for configure in (strategy.configure_train, strategy.configure_evaluate):
        messages = configure(3, ArrayRecord(), ConfigRecord(), grid)
        assert len(messages) == strategy.num_clients
        assert all(m.content.config_records["config"]["lr"] == pytest.approx(0.2) for m in messages)


def test_fine_tuning_serves_the_fedavg_model(make_config, federate):
    tuned, plain = federate(make_config("fedavg-ft")), federate(make_config("fedavg"))
    np.testing.assert_array_equal(tuned.strategy.model, plain.strategy.model)
    assert tuned.column("served_accuracy") == plain.column("served_accuracy")
    assert set(tuned.column("local_accuracy")[0]) == {0, 1, 2}  # client 3 has no test sample


def test_fine_tuning_rounds_by_hand(make_client, gradient_of, softmax_regression):
    """In the last two of four rounds, the client fine-tunes the served, then its local model. It sends nothing."""
    client = make_client("fedavg-ft", **FULL_BATCH, num_server_rounds=4, fedavg_ft_rounds=2, fedavg_ft_lr=0.3)
    served, other = start_of(client), start_of(client, 1)
    (sent,), _, metrics = client.fit([served], {**CONFIG, "server-round": 2})
    np.testing.assert_allclose(sent, served - LR * gradient_of(client, served), atol=1e-5)
    assert not client.state
    assert "local-loss" not in client.evaluate([served], {**EVALUATE, "server-round": 2})[2]
    local = served - 0.3 * gradient_of(client, served)
    arrays, _, _ = client.fit([served], {**CONFIG, "server-round": 3, "returns": ""})
    assert arrays == []
    np.testing.assert_allclose(client.state["model"], local, atol=1e-5)
    local = local - 0.3 * gradient_of(client, local)
    _, _, metrics = client.fit([other], {**CONFIG, "server-round": 4, "returns": "", "evaluate-local": True})
    np.testing.assert_allclose(client.state["model"], local, atol=1e-5)
    test = client.data.x_test.numpy(), client.data.y_test.numpy()
    assert metrics["local-loss"] == pytest.approx(softmax_regression(local, *test)[0], rel=1e-4)
    _, _, metrics = client.evaluate([other], {**EVALUATE, "server-round": 4})
    assert metrics["local-loss"] == pytest.approx(softmax_regression(local, *test)[0], rel=1e-4)
    assert metrics["served-loss"] == pytest.approx(softmax_regression(other, *test)[0], rel=1e-4)


@pytest.mark.parametrize("method", ["fedavg-ft", "fedprox-ft", "fedsam-ft", "fedbabu"])
def test_fine_tuning_rounds_do_not_change_the_server_model(make_config, federate, method):
    """Five rounds, the last two of them fine-tuning, give the same server's model as three rounds."""
    settings = {f"{method}-rounds".replace("-", "_"): 2}
    tuned = federate(make_config(method, model="mlp", num_server_rounds=5, local_steps=2, **settings))
    plain = federate(make_config(method, model="mlp", num_server_rounds=3, local_steps=2))
    np.testing.assert_array_equal(tuned.strategy.model, plain.strategy.model)
    served = tuned.column("served_loss")
    assert served[2] == served[3] == served[4] == plain.column("served_loss")[2]
    local = tuned.column("local_loss")
    assert not any(local[:3]) and local[3].keys() == served[3].keys()
    assert local[4] != local[3]
    assert [bool(record.bytes_up) for record in tuned.records] == [True, True, True, False, False]
    assert not any(record.dropped for record in tuned.records)


def test_stacked_fine_tuning_rounds_match_sequential_ones(make_config, federate):
    settings = {"model": "mlp", "momentum": 0.5, "num_server_rounds": 4, "fedavg_ft_rounds": 2}
    sequential, stacked = (federate(make_config("fedavg-ft", stack=stack, **settings)) for stack in ("loop", "vmap"))
    for client in range(4):
        np.testing.assert_allclose(
            stacked.kept(client)["model"], sequential.kept(client)["model"], rtol=1e-4, atol=1e-5
        )


def test_fine_tuning_rounds_depend_on_the_number_of_rounds(make_strategy):
    """The last rounds fine-tune, so a resumed run cannot extend the number of rounds."""
    assert make_strategy("fedavg-ft", fedavg_ft_rounds=1).method.follows_number_of_rounds
    assert not make_strategy("fedavg-ft").method.follows_number_of_rounds


def test_invalid_fine_tuning_rounds_are_refused(make_strategy):
    with pytest.raises(SettingsError, match=r"fedavg-ft-rounds = 3.*num-server-rounds = 3"):
        make_strategy("fedavg-ft", fedavg_ft_rounds=3)
    with pytest.raises(SettingsError, match=r"fedbabu-rounds = 1.*secure-aggregation = true"):
        make_strategy("fedbabu", fedbabu_rounds=1, secure_aggregation=True)
    with pytest.raises(SettingsError, match=r"average-rounds = 2.*fedbabu-rounds = 1"):
        make_strategy("fedbabu", fedbabu_rounds=1, average_rounds=2)
    assert make_strategy("fedbabu", fedbabu_rounds=2, average_rounds=2).method.rounds == 2


# -- FedProx -------------------------------------------------------------------------------------------


def test_fedprox_with_mu_0_is_fedavg(make_config, federate):
    prox, plain = federate(make_config("fedprox", fedprox_mu=0.0)), federate(make_config("fedavg"))
    np.testing.assert_array_equal(prox.strategy.model, plain.strategy.model)


# -- FedRep --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lengths", "head_steps", "body_steps"),
    [({"fedrep_head_epochs": 2}, 2, 1), ({"local_steps": 3}, 3, 3)],
)
def test_fedrep_trains_the_head_then_the_body(make_client, lengths, head_steps, body_steps):
    client = make_client("fedrep", batch_size=100, **lengths)
    start = client.initial()
    model = client.architecture.build()
    model.load_state_dict(client.layout.views(start.clone()))
    head = list(model.head.parameters())

    def step(parameters):
        loss = torch.nn.functional.cross_entropy(model(client.data.x_train), client.data.y_train)
        with torch.no_grad():
            for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
                parameter.sub_(LR * gradient)

    for _ in range(head_steps):
        step(head)
    for _ in range(body_steps):
        step(list(model.blocks.parameters()))
    expected = torch.cat([p.detach().flatten() for p in model.parameters()]).numpy()
    body = client.layout.without(["head"])
    (sent,), _, _ = client.fit([body.take(start.numpy())], CONFIG)
    np.testing.assert_allclose(sent, body.take(expected), atol=1e-6)
    np.testing.assert_allclose(client.state["personal"], client.layout.part(["head"]).take(expected), atol=1e-6)


def test_fedrep_combines_the_server_body_with_the_client_head(make_client):
    client = make_client("fedrep")
    body = client.layout.without(["head"])
    client.fit([body.take(client.initial().numpy())], CONFIG)
    other = np.random.default_rng(0).normal(size=body.size).astype(np.float32)
    predictor = client.served_model({"model": torch.from_numpy(other)}, CONFIG)
    flat = predictor.members[0].parameters.numpy()
    np.testing.assert_array_equal(body.take(flat), other)
    np.testing.assert_array_equal(client.layout.part(["head"]).take(flat), client.state["personal"])


# -- Ditto ---------------------------------------------------------------------------------------------


def test_ditto_personal_epochs_by_hand(make_client, gradient_of):
    client = make_client("ditto", **FULL_BATCH, ditto_strength=0.7, ditto_epochs=2, ditto_start="received")
    start = start_of(client)
    (sent,), _, _ = client.fit([start], CONFIG)
    np.testing.assert_allclose(sent, start - LR * gradient_of(client, start), atol=1e-5)
    once = start - LR * gradient_of(client, start)
    twice = once - LR * (gradient_of(client, once) + 0.7 * (once - start))
    np.testing.assert_allclose(client.state["model"], twice, atol=1e-5)


def test_ditto_trains_both_models_for_local_steps(make_client, gradient_of):
    client = make_client("ditto", **FULL_BATCH, local_steps=2, ditto_strength=0.7, ditto_start="received")
    start = start_of(client)
    (sent,), _, metrics = client.fit([start], CONFIG)
    once = start - LR * gradient_of(client, start)
    twice = once - LR * gradient_of(client, once)
    np.testing.assert_allclose(sent, twice, atol=1e-5)
    np.testing.assert_allclose(client.state["model"], twice - LR * 0.7 * (once - start), atol=1e-5)
    assert metrics["samples"] == 4 * 21


def test_ditto_global_model_equals_fedavg(make_config, federate):
    ditto, plain = federate(make_config("ditto")), federate(make_config("fedavg"))
    np.testing.assert_array_equal(ditto.strategy.model, plain.strategy.model)


def test_ditto_scores_its_personal_model_as_local(make_client, softmax_regression):
    client = make_client("ditto", **FULL_BATCH)
    client.stored["model"] = torch.from_numpy(start_of(client))
    _, _, metrics = client.evaluate([start_of(client, 1)], EVALUATE)
    test = client.data.x_test.numpy(), client.data.y_test.numpy()
    assert metrics["local-loss"] == pytest.approx(softmax_regression(start_of(client), *test)[0], rel=1e-5)
    assert metrics["served-loss"] == pytest.approx(softmax_regression(start_of(client, 1), *test)[0], rel=1e-5)


# -- FedAMP --------------------------------------------------------------------------------------------


def test_fedamp_message_weights_by_hand():
    """Check ξ_01 = α/σ exp(-1/σ) with α = 0.5, σ = 2, ||w0 - w1||² = 1 and a far third model (exp(-32))."""
    models = np.array([[0, 0], [1, 0], [0, 8]], np.float32)
    near = 0.25 * math.exp(-0.5)
    expected = [[1 - near, near, 0], [near, 1 - near, 0], [0, 0, 1]]
    np.testing.assert_allclose(message_weights(models, 0.5, 2.0), expected, atol=1e-6)


def test_large_alpha_keeps_the_messages_convex():
    weights = message_weights(np.random.default_rng(0).normal(0, 0.01, (5, 30)).astype(np.float32), 1000.0, 0.1)
    assert (weights >= 0).all()
    np.testing.assert_allclose(weights.sum(axis=1), 1)
    np.testing.assert_allclose(np.diag(weights), 0, atol=1e-9)


def test_small_distances_between_large_models_are_precise():
    """Use squared norms of 1e6, where neighbouring float32 numbers differ by 1/16."""
    models = np.full((3, 100), 100.0, np.float32)
    models[1, 0] += 0.1
    models[2, 1] -= 0.03
    expected = [[0, 0.01, 0.0009], [0.01, 0, 0.0109], [0.0009, 0.0109, 0]]
    np.testing.assert_allclose(squared_distances(models), expected, atol=1e-5)


def test_fedamp_with_norm_distance_by_hand(make_client, gradient_of):
    """The gradient of λ/(2α) ||w - u|| is λ/(2α) times the unit vector from u to w, and zero at w = u."""
    client = make_client("fedamp", **FULL_BATCH, fedamp_alpha=2.0, fedamp_strength=3.0, fedamp_distance="norm")
    first, second = start_of(client), start_of(client, 1)
    (trained,), _, _ = client.fit([first], CONFIG)
    np.testing.assert_allclose(trained, first - LR * gradient_of(client, first), atol=1e-5)
    (sent,), _, _ = client.fit([second], {**CONFIG, "server-round": 2})
    away = (trained - second) / np.linalg.norm(trained - second)
    np.testing.assert_allclose(sent, trained - LR * (gradient_of(client, trained) + 0.75 * away), atol=1e-5)


def test_stacked_fedamp_with_norm_distance_matches_sequential_training(make_config, federate):
    settings = {"model": "mlp", "momentum": 0.5, "fedamp_distance": "norm", "fedamp_alpha": 1.0}
    sequential, stacked = (federate(make_config("fedamp", stack=stack, **settings)) for stack in ("loop", "vmap"))
    np.testing.assert_allclose(stacked.strategy.models, sequential.strategy.models, rtol=1e-4, atol=1e-5)


# -- IFCA ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cluster", [-1, 2])
def test_an_unknown_cluster_is_refused(make_strategy, cluster):
    strategy = make_strategy("ifca", ifca_clusters=2)
    with pytest.raises(BadReplyError, match=f"cluster {cluster} of 2"):
        strategy.check(0, {"model": strategy.models[0], "cluster": np.array(cluster)})


def test_ifca_starts_from_different_models(make_strategy):
    strategy = make_strategy("ifca", ifca_clusters=2)
    np.testing.assert_array_equal(strategy.models[0], make_strategy("fedavg").model)
    assert np.abs(strategy.models[0] - strategy.models[1]).max() > 0.01


def test_ifca_with_one_cluster_is_fedavg(make_config, federate):
    clustered, plain = federate(make_config("ifca", ifca_clusters=1)), federate(make_config("fedavg"))
    np.testing.assert_array_equal(clustered.strategy.models[0], plain.strategy.model)


# -- Local ---------------------------------------------------------------------------------------------


def test_local_continues_from_its_local_model(make_client, gradient_of):
    client = make_client("local", **FULL_BATCH)
    model = client.initial().numpy()
    for number in (1, 2):
        arrays, _, _ = client.fit([], {**CONFIG, "server-round": number})
        assert arrays == []
        model = model - LR * gradient_of(client, model)
        np.testing.assert_allclose(client.state["model"], model, atol=1e-5)


def test_local_sends_and_receives_no_model(make_config, federate):
    finished = federate(make_config("local"))
    assert all(r.bytes_up == r.bytes_down == 0 for r in finished.records)
    assert finished.column("served_accuracy") == [{}, {}, {}]
    assert [set(c) for c in finished.column("local_accuracy")] == [{0, 1, 2}] * 3


def test_local_clients_share_only_the_initial_model(make_config, federate):
    """Client 0 has the same result whether the other clients take part or not."""
    together = federate(make_config("local"))
    alone = federate(make_config("local"), prepare=lambda s: setattr(s.rounds, "cohort", lambda _: [0]))
    np.testing.assert_array_equal(together.kept(0)["model"], alone.kept(0)["model"])
    assert alone.kept(2) == {}


def test_error_for_too_many_personal_layers_names_the_setting(tmp_path, monkeypatch, make_strategy):
    """Use FedMine of docs/how-to/custom-code.md with the mlp, which has three layers."""
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[1] / "docs/how-to/custom-code.md").read_text(encoding="utf-8")
    (tmp_path / "mine.py").write_text(page.split("```python\n")[1].split("```")[0], encoding="utf-8")
    with pytest.raises(SettingsError) as raised:
        make_strategy("mine:FedMine", model="mlp", fedmine_layers=7)
    for part in ("model = 'mlp': fedmine", "more layers", "lower fedmine-layers = 7"):
        assert part in str(raised.value)
    with pytest.raises(SettingsError, match=r"more layers$"):
        make_strategy("fedrep", model="linear")


def test_unknown_method_is_an_error():
    with pytest.raises(SettingsError, match="method = 'fedsgd'"):
        strategy_class("fedsgd")


@pytest.mark.parametrize(("method", "extra"), [("fedrep", {}), ("fedfew", {"fedfew_personal_head": True})])
def test_a_network_with_nothing_to_share_is_an_error(method, extra, make_strategy):
    with pytest.raises(SettingsError, match="model = 'linear'"):
        make_strategy(method, model="linear", **extra)
