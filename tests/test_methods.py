"""Parity tests: behaviour that every method shares.

The four clients of the tiny data set have three classes, two, one, and a single training sample without a test.
"""

import numpy as np
import pytest

from posy.client_app.registry import client_class
from posy.server_app.in_process import InProcessGrid
from posy.settings import SettingsError, settings_of
from posy.storage import read_arrays, write_arrays
from posy.strategies.base import PersonalisedStrategy
from posy.strategies.methods import METHODS, settings_class, strategy_class
from posy.strategies.registry import defaults, read_settings
from posy.strategies.server_state import load_state, state_of

SCORES = ("served_accuracy", "local_accuracy", "served_loss", "local_loss", "train_loss")

FEATURES = {"ppfe_stages": 2, "apfl_adaptive": True, "cfl_eps1": 1e9, "cfl_eps2": 0.0, "fedfomo_models": 2}
"""Settings with which methods use their state in a few rounds: each cluster of CFL may split."""

every_method = pytest.mark.parametrize("method", METHODS)


class BackwardsGrid(InProcessGrid):
    """A grid that delivers the replies in reverse order."""

    def send_and_receive(self, messages, *, timeout=None):
        return list(super().send_and_receive(messages, timeout=timeout))[::-1]


def assert_same_state(first, second):
    assert first.keys() == second.keys()
    for name in first:
        np.testing.assert_array_equal(first[name], second[name])


def assert_same_run(first, second):
    assert_same_state(state_of(first.strategy), state_of(second.strategy))
    for column in SCORES:
        assert first.column(column) == second.column(column)
    for client in range(first.strategy.num_clients):
        assert_same_state(first.kept(client), second.kept(client))


@every_method
def test_class_names_match_the_method(method):
    assert issubclass(strategy_class(method), PersonalisedStrategy)
    assert strategy_class(method).__name__ in (METHODS[method], "PersonalisedStrategy")
    assert client_class(method).__name__ in (METHODS[method] + "Client", "PersonalClient")
    assert strategy_class(method).__doc__ and client_class(method).__doc__ and settings_class(method).__doc__
    assert set(settings_of(settings_class(method), method)) <= set(defaults())


@every_method
def test_same_config_twice_is_the_same_run(make_config, federate, method):
    config = make_config(method, fraction_train=0.6, num_server_rounds=2)
    first = federate(config)
    assert_same_run(first, federate(config))
    other = federate(config | {"seed": 43})
    assert first.column("train_loss") != other.column("train_loss")
    assert [len(r.cohort) for r in first.records] == [len(r.cohort) for r in other.records]


@pytest.mark.parametrize("method", ["fedfew", "cwfedavg", "fedacs", "feddrm", "ppfe", "scaffold", "fedfomo"])
def test_order_of_the_replies_does_not_matter(make_config, federate, method):
    config = make_config(method)
    assert_same_run(federate(config), federate(config, grid=BackwardsGrid))


@every_method
def test_training_lowers_the_loss(make_config, federate, method):
    finished = federate(make_config(method, num_server_rounds=8, lr=0.1))
    losses = [np.mean(list(column.values())) for column in finished.column("train_loss")]
    assert losses[-1] < losses[0]
    last = finished.column("local_accuracy")[-1]
    assert np.mean(list(last.values())) > 0.6  # chance is 1/3 for client 0


@every_method
def test_cohorts_with_partial_participation(make_config, federate, method):
    """A cohort is two of four clients, drawn from seed and round. All methods agree, except PPFE at stage ends."""
    settings = {"num_server_rounds": 5, "fraction_train": 0.3}
    finished = federate(make_config(method, **settings, pfedme_clients="cohort"))
    cohorts = [r.cohort for r in finished.records]
    plain = [r.cohort for r in federate(make_config("fedavg", **settings)).records]
    assert [len(c) for c in plain] == [2] * 5 and len(set(plain)) > 1
    if method == "ppfe":
        ends = set(finished.strategy.ends)
        assert 0 < len(ends) < 5
        plain = [(0, 1, 2, 3) if number in ends else c for number, c in enumerate(plain, start=1)]
    assert cohorts == plain
    for record in finished.records:
        assert {c for c, row in record.clients.items() if "train_loss" in row} == set(record.cohort)
        assert {c for c, row in record.clients.items() if row["bytes_up"]} == (
            set() if method == "local" else set(record.cohort)
        )


@pytest.mark.parametrize("method", ["local", "fedavg", "fedrep", "ditto", "ppfe", "fedas"])
def test_all_clients_take_part_in_a_full_last_round(make_config, federate, method):
    """The last round omits only held-out clients. All other rounds have the usual cohorts."""
    settings = {"num_server_rounds": 4, "fraction_train": 0.3, "holdout_clients": 0.25}
    full, usual = (federate(make_config(method, full_last_round=on, **settings)) for on in (True, False))
    *before, last = full.records
    assert last.cohort == tuple(full.strategy.members)
    assert {c for c, row in last.clients.items() if "train_loss" in row} == set(last.cohort)
    assert [r.cohort for r in before] == [r.cohort for r in usual.records[:-1]]
    assert len(usual.records[-1].cohort) == (3 if method == "ppfe" else 1)  # PPFE's last stage ends there


@every_method
def test_server_state_can_be_stored_and_loaded(make_config, federate, method, tmp_path):
    """A new strategy that loads the state from a safetensors file serves the same arrays to every client."""
    config = make_config(method, num_server_rounds=5, fraction_train=0.3, pfedme_clients="cohort")
    strategy = federate(config).strategy
    state = state_of(strategy)
    if state:
        write_arrays(tmp_path / "state.safetensors", state)
        state, _ = read_arrays(tmp_path / "state.safetensors")
    fresh = strategy_class(method)(read_settings(config), strategy.architecture)
    load_state(fresh, state)
    changed = False
    untouched = strategy_class(method)(read_settings(config), strategy.architecture)
    for client in range(4):
        served = strategy.serve(client)
        again = fresh.serve(client)
        assert_same_state(served, again)
        assert strategy.train_config(6, client) == fresh.train_config(6, client)
        assert strategy.exchange.expected_shapes(client) == fresh.exchange.expected_shapes(client)
        before = untouched.serve(client)
        changed |= any(
            array.shape != before[name].shape or (array != before[name]).any() for name, array in served.items()
        )
    assert changed == (method != "local")
    assert_same_state(state_of(fresh), state_of(strategy))


@every_method
def test_failed_client_counts_as_absent(make_config, federate, failing, method):
    """The client is dropped and recorded. The round continues without it, and the next round includes it."""
    config = make_config(method, num_server_rounds=4, **FEATURES)
    failed = federate(config, grid=failing(("train", 2, 1)))
    assert [[c for c, _ in r.dropped] for r in failed.records] == [[], [1], [], []]
    assert failed.records[1].dropped[0][1].startswith("it failed: ")
    assert "train_loss" not in failed.records[1].clients[1]
    assert "train_loss" in failed.records[2].clients[1]

    def skip_client(strategy):
        usual = strategy.rounds.cohort
        strategy.rounds.cohort = lambda number: [c for c in usual(number) if (number, c) != (2, 1)]

    skipped = federate(config, prepare=skip_client)
    assert_same_run(failed, skipped)
    if method != "local":
        complete = state_of(federate(config).strategy)
        state = state_of(failed.strategy)
        assert any(state[n].shape != complete[n].shape or (state[n] != complete[n]).any() for n in complete)


@every_method
def test_failed_evaluation_affects_only_the_scores(make_config, federate, failing, method):
    config = make_config(method)
    failed = federate(config, grid=failing(("evaluate", 2, 1)))
    complete = federate(config)
    assert [[c for c, _ in r.dropped] for r in failed.records] == [[], [1], []]
    assert_same_state(state_of(failed.strategy), state_of(complete.strategy))
    assert failed.column("served_accuracy")[2] == complete.column("served_accuracy")[2]
    assert 1 not in failed.column("served_accuracy")[1]


@every_method
def test_one_client(make_config, federate, method):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(20, 4)).astype(np.float32), np.arange(20) % 2
    config = make_config(method, data=(x, y, [range(12)], [range(12, 20)]))
    if method == "feddrm":
        with pytest.raises(SettingsError, match="num-clients"):
            federate(config)
        return
    finished = federate(config)
    assert [r.dropped for r in finished.records] == [[]] * 3
    assert [set(column) for column in finished.column("local_accuracy")] == [{0}] * 3


AVERAGING_METHODS = (
    "fedfew",
    "cwfedavg",
    "fedacs",
    "fedavg",
    "fedprox",
    "fedrep",
    "fedamp",
    "ifca",
    "scaffold",
    "fedbn",
    "moon",
)


@pytest.mark.parametrize("method", [*AVERAGING_METHODS, "fedpac", "fedas"])
def test_single_client_is_served_its_trained_model(make_config, federate, method):
    """A mean over one client is the client's model (FedFew with K = 1)."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(20, 4)).astype(np.float32), np.arange(20) % 2
    data = (x, y, [range(12)], [range(12, 20)])
    finished = federate(make_config(method, data=data, lr=0.2, fedfew_models=1))
    for served, local in zip(finished.column("served_loss"), finished.column("local_loss"), strict=True):
        assert served[0] == pytest.approx(local[0], rel=1e-4)
    assert len({column[0] for column in finished.column("local_loss")}) == 3


@every_method
def test_every_client_with_one_class_and_few_samples(make_config, federate, method):
    """With batches of one and clients that lack classes, all arrays stay finite."""
    rng = np.random.default_rng(0)
    y = np.array([0] * 4 + [1] * 4 + [2] * 4)
    x = (rng.normal(size=(12, 3)) + 3 * np.eye(3)[y]).astype(np.float32)
    config = make_config(method, data=(x, y, [[0, 1], [4], [8]], [[2, 3], [5, 6], [9]]), batch_size=1)
    finished = federate(config)
    assert [r.dropped for r in finished.records] == [[]] * 3
    for array in state_of(finished.strategy).values():
        assert np.isfinite(array).all()
