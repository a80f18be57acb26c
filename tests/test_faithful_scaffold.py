"""SCAFFOLD's variate stays the mean of the clients' variates, and momentum does not make it diverge."""

import numpy as np
import pytest

from posy.client_app.scaffold import gradients_in_distance
from posy.settings import SettingsError
from posy.strategies.registry import read_settings

TRAIN = (21, 12, 8, 1)


def assert_mean(finished, members=range(4)):
    """Compare c with the mean of the variates that the members store, weighted by their samples."""
    stored = {client: finished.kept(client).get("control") for client in members}
    total = sum(TRAIN[client] for client in members)
    mean = sum(TRAIN[client] * variate for client, variate in stored.items() if variate is not None) / total
    np.testing.assert_allclose(finished.strategy.control, mean, atol=2e-6)
    assert np.abs(mean).max() > 1e-3
    return stored


def disconnect(strategy, client, server_round):
    """Disconnect the node of a client before a round."""
    refresh = strategy.exchange.refresh

    def without_client():
        joined = refresh()
        if strategy.record.number + 1 == server_round:
            strategy.clients.pop(client)
        return joined

    strategy.exchange.refresh = without_client


# -- the mean of the members' variates -----------------------------------------------------------------


def test_control_variate_excludes_newcomers(make_config, federate):
    finished = federate(make_config("scaffold", holdout_clients=0.5))
    assert len(finished.strategy.members) == 2
    assert_mean(finished, finished.strategy.members)
    assert not finished.strategy.weights[list(finished.strategy.newcomers)].any()


def test_absent_client_still_counts_in_the_control_variate(make_config, federate):
    finished = federate(make_config("scaffold", num_server_rounds=5), prepare=lambda s: disconnect(s, 0, 3))
    assert [list(record.away) for record in finished.records] == [[], [], [0], [], []]
    assert_mean(finished)


def test_late_client_joins_the_control_variate(make_config, federate):
    """In rounds 1 and 2 the mean covers 21 of 42 samples, and from round 3 it covers all."""

    def prepare(strategy):
        disconnect(strategy, 0, 2)
        disconnect(strategy, 0, 1)

    two = federate(make_config("scaffold", num_server_rounds=2), prepare=prepare)
    assert two.strategy.weights.tolist() == [0, 12, 8, 1]
    assert_mean(two, (1, 2, 3))
    three = federate(make_config("scaffold", num_server_rounds=3), prepare=prepare)
    assert three.strategy.weights.tolist() == [21, 12, 8, 1]
    assert_mean(three)


@pytest.mark.parametrize("server_round", [1, 2])
def test_round_with_too_few_replies_changes_no_variate(server_round, make_config, federate, failing):
    """Two of four replies are too few, so the two clients start from the variates of the previous round."""
    grid = failing(("train", server_round, 0), ("train", server_round, 2))
    finished = federate(make_config("scaffold", num_server_rounds=3, min_train_replies=3), grid=grid)
    assert [len(record.quantities) for record in finished.records].count(0) == 1
    assert_mean(finished)


@pytest.mark.parametrize("message", ["train", "evaluate"])
def test_variates_reset_when_a_client_loses_its_state(message, make_config, federate, failing, warnings):
    """The loss in round 3 resets them after this round. Rounds 4 and 5 rebuild c."""
    grid = failing(forget={(message, 3, 0)})
    three = federate(make_config("scaffold", num_server_rounds=3), grid=grid)
    assert not three.strategy.control.any() and not any(three.strategy.exchange.states.versions.values())
    assert "all variates restart at 0" in warnings.text
    five = federate(make_config("scaffold", num_server_rounds=5), grid=failing(forget={(message, 3, 0)}))
    assert all(variate is not None for variate in assert_mean(five).values())


def test_a_dropped_reply_changes_no_variate(make_config, federate, failing):
    finished = federate(make_config("scaffold", num_server_rounds=4), grid=failing(("train", 3, 1)))
    assert [client for client, _ in finished.records[2].dropped] == [1]
    assert_mean(finished)


def test_control_variate_is_the_mean_with_secure_aggregation(make_config, federate, failing):
    """A client loses its state in round 2, and in round 4 two of four replies are too few."""
    config = make_config("scaffold", num_server_rounds=5, secure_aggregation=True, secure_threshold=0.6)
    grid = failing(("train", 4, 0), ("train", 4, 3), forget={("evaluate", 2, 1)})
    finished = federate(config, grid=grid)
    assert finished.records[3].quantities == {}
    assert_mean(finished)


def test_uniform_client_weights_give_a_uniform_control_variate(make_config, federate):
    finished = federate(make_config("scaffold", client_weights="uniform", num_server_rounds=4, fraction_train=0.5))
    stored = [finished.kept(client).get("control", np.zeros(1)) for client in range(4)]
    np.testing.assert_allclose(finished.strategy.control, sum(stored) / 4, atol=2e-6)


# -- momentum ----------------------------------------------------------------------------------------------


def test_gradients_in_distance_by_hand():
    """With β = 0.5 the steps are g_1, g_2 + g_1/2, g_3 + g_2/2 + g_1/4: 1 + 1.5 + 1.75 gradients."""
    assert gradients_in_distance(3, 0.5) == 4.25
    assert gradients_in_distance(7, 0.0) == 7


def test_variate_is_the_weighted_mean_gradient_with_momentum(make_client, gradient_of):
    """Three steps with β = 0.5 weigh their gradients 1.75 : 1.5 : 1."""
    client = make_client("scaffold", model="linear", batch_size=100, local_epochs=3, momentum=0.5)
    rng = np.random.default_rng(0)
    variate = np.zeros(client.layout.size)
    for number in (1, 2):
        start, common = rng.normal(size=(2, client.layout.size)).astype(np.float32)
        (sent, change), _, _ = client.fit([start, common], {"server-round": number, "lr": 0.1})
        model, velocity, gradients = start.astype(np.float64), 0.0, []
        for _ in range(3):
            gradients.append(gradient_of(client, model))
            velocity = 0.5 * velocity + gradients[-1] + common - variate
            model = model - 0.1 * velocity
        mean = (1.75 * gradients[0] + 1.5 * gradients[1] + gradients[2]) / 4.25
        np.testing.assert_allclose(sent, model, atol=1e-5)
        np.testing.assert_allclose(change, mean - variate, atol=1e-4)
        np.testing.assert_allclose(client.state["control"], mean, atol=1e-4)
        variate = mean


@pytest.mark.parametrize(("momentum", "lr"), [(0.8, 0.01), (0.9, 0.01), (0.9, 0.001)])
def test_training_converges_with_momentum(momentum, lr, make_config, federate):
    """With x − y divided by K lr, these runs reach NaN or parameters of 1e20. FedAvg has accuracies of 0.85 to 0.91."""
    settings = {"model": "mlp", "momentum": momentum, "lr": lr, "local_steps": 40, "num_server_rounds": 12}
    finished = federate(make_config("scaffold", **settings))
    assert not any(record.dropped for record in finished.records)
    assert np.mean(list(finished.column("served_accuracy")[-1].values())) > 0.8
    assert np.abs(finished.strategy.model).max() < 2


def test_stored_momentum_is_rejected():
    with pytest.raises(SettingsError, match=r"optimizer-state = 'kept'.*method = 'scaffold'"):
        read_settings({"method": "scaffold", "momentum": 0.9, "optimizer-state": "kept"})
