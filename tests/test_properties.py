"""Properties of every method: a run equals another run, or Posy refuses it with a reason.

Batches are full, so no order of samples matters. Pixels are scaled by constants, so no statistic of the data changes
with the number of clients. Each client has six training samples of one class and three of another.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from flwr.app import MessageType
from networks import normalised
from safetensors.numpy import load_file, save_file

from posy.client_app.local_run import LocalRun
from posy.client_app.registry import client_class
from posy.client_app.state import State
from posy.client_app.workspace import Workspace
from posy.data.task import Task
from posy.randomness import numpy_generator
from posy.server_app.in_process import InProcessGrid
from posy.settings import SettingsError
from posy.strategies.methods import METHODS, settings_class
from posy.strategies.registry import read_settings
from posy.strategies.server_state import state_of

PAIRS = ((0, 1), (1, 2), (2, 0), (0, 2), (1, 0))
MAJORITY, MINORITY, TESTED = 6, 3, 4
SCORES = ("served_accuracy", "served_loss", "local_accuracy", "local_loss", "train_loss")
NETWORK = f"{Path(__file__).with_name('networks.py')}:normalised"
BASE = {
    "batch_size": 64,
    "local_epochs": 2,
    "lr": 0.1,
    "num_server_rounds": 4,
    "model": "mlp",
    "ppfe_stages": 2,
    "apfl_adaptive": True,
    "cfl_eps1": 1e9,  # every cluster may split
    "cfl_eps2": 0.0,
    "fedfomo_models": 2,
    "fedbabu_epochs": 1,
}
LOST = 5
"""A client loses its state before it trains in this round. PPFE's clients have a state from the second stage."""

FOR_NEWCOMERS = {"split_models", "split_updates", "split_sides"}
"""Arrays that CFL's server stores only when a run holds out clients."""

every_method = pytest.mark.parametrize("method", METHODS)


def data_of(clients, repeats=1):
    """Return x, y, train and test indices. Training repeats samples of a client's minority class ``repeats`` times."""
    rng = np.random.default_rng(3)
    centres = rng.normal(128, 40, (3, 4, 4))
    x, y, train, test = [], [], [], []
    for major, minor in PAIRS[:clients]:
        labels = np.array([major] * MAJORITY + [minor] * MINORITY + [major, minor] * (TESTED // 2))
        points = np.clip(centres[labels] + rng.normal(0, 30, (len(labels), 4, 4)), 0, 255).astype(np.uint8)
        order = [*range(MAJORITY), *list(range(MAJORITY, MAJORITY + MINORITY)) * repeats]
        rows = [*order, *range(MAJORITY + MINORITY, len(labels))]
        start = sum(map(len, y))
        x.append(points[rows])
        y.append(labels[rows])
        train.append(list(range(start, start + len(order))))
        test.append(list(range(start + len(order), start + len(rows))))
    return np.concatenate(x), np.concatenate(y), train, test


def assert_equal_runs(first, second, clients=4):
    """Compare the server's state, the clients' states and the scores of the first clients."""

    def rows(array, finished):
        everyone = finished.strategy.num_clients
        return array[tuple(slice(clients) if size == everyone else slice(None) for size in array.shape)]

    states = [state_of(finished.strategy) for finished in (first, second)]
    assert states[0].keys() == states[1].keys()
    for name in states[0].keys() - FOR_NEWCOMERS:
        expected, actual = rows(states[0][name], first), rows(states[1][name], second)
        np.testing.assert_allclose(expected, actual, rtol=1e-4, atol=2e-6, err_msg=name)
    for client in range(clients):
        expected, actual = first.kept(client), second.kept(client)
        assert expected.keys() == actual.keys()
        for name in expected:
            np.testing.assert_allclose(expected[name], actual[name], rtol=1e-4, atol=2e-6, err_msg=name)
    for column in SCORES:
        for rows_of in zip(first.column(column), second.column(column), strict=True):
            expected, actual = ({c: value for c, value in row.items() if c < clients} for row in rows_of)
            assert expected == pytest.approx(actual, rel=1e-3, abs=1e-5), column


def without_cohort(number):
    """Return a function that empties the cohort of a round."""

    def prepare(strategy):
        cohort = strategy.rounds.cohort
        strategy.rounds.cohort = lambda current: [] if current == number else cohort(current)

    return prepare


# -- hold-out, absence, refused rounds, lost state ---------------------------------------------------------


@every_method
def test_a_held_out_client_does_not_affect_the_others(make_config, federate, method):
    """The fifth client never trains, so the run of the other clients equals a run of four clients."""
    if method == "feddrm":
        pytest.skip("FedDRM's routing head has one output for each client of the federation, newcomers included")
    seed = next(s for s in range(100) if numpy_generator(s, "holdout").choice(5, 1, replace=False)[0] == 4)
    held_out = federate(make_config(method, data=data_of(5), holdout_clients=0.2, seed=seed, **BASE))
    assert held_out.strategy.newcomers == (4,)
    assert_equal_runs(held_out, federate(make_config(method, data=data_of(4), seed=seed, **BASE)))


@every_method
def test_a_refused_round_equals_a_round_without_clients(make_config, federate, failing, method):
    """Round 2 has fewer replies than ``min-train-replies``. The run equals a run with an empty cohort in round 2."""
    config = make_config(method, data=data_of(4), **BASE)
    refused = federate(config | {"min-train-replies": 4}, grid=failing((MessageType.TRAIN, 2, 1)))
    assert all("train_loss" not in row for row in refused.records[1].clients.values())
    assert_equal_runs(refused, federate(config, prepare=without_cohort(2)))


class RecordingGrid(InProcessGrid):
    """A grid that clears client 1's state, and records the client's message and update of the next round."""

    def send_and_receive(self, messages, *, timeout=None):
        messages = list(messages)
        for message in messages:
            config = message.content.config_records["config"]
            kind, number = message.metadata.message_type, config.get("server-round")
            if (kind, number, config.get("client")) == (MessageType.TRAIN, LOST, 1):
                self.contexts[message.metadata.dst_node_id].state.clear()
            if (kind, number, config.get("client")) == (MessageType.TRAIN, LOST + 1, 1):
                items = message.content.array_records["arrays"].items()
                self.sent = {name: array.numpy().copy() for name, array in items}, dict(config)
        replies = list(super().send_and_receive(messages, timeout=timeout))
        requests = {message.metadata.message_id: message for message in messages}
        for reply in replies:
            config = requests[reply.metadata.reply_to_message_id].content.config_records["config"]
            if (reply.metadata.message_type, config.get("server-round"), config.get("client")) == (
                "train",
                LOST + 1,
                1,
            ):
                items = reply.content.array_records["arrays"].items()
                self.reply = {name: array.numpy() for name, array in items}
        return replies


@every_method
def test_a_client_that_lost_its_state_trains_as_a_new_client(make_config, federate, method):
    """After the loss, the client's update equals the update of a new client for the same message."""
    rounds = {"num_server_rounds": LOST + 1, "evaluate_every": LOST + 1}  # an evaluation may write state too
    config = make_config(method, data=data_of(4), **BASE | rounds)
    finished = federate(config, grid=RecordingGrid)
    grid = finished.grid
    assert bool(finished.records[LOST - 1].dropped) == bool(finished.kept(1))  # a client without state loses nothing
    assert not finished.records[LOST].dropped
    arrays, message = grid.sent
    client = client_class(method)(1, Workspace(read_settings(config)), State())
    update, _, _ = client.jobs.drive(LocalRun(client.jobs, arrays, message).train())
    assert update.keys() == grid.reply.keys()
    for name, expected in update.items():
        np.testing.assert_allclose(expected, grid.reply[name], rtol=1e-5, atol=1e-7)


# -- BatchNorm ---------------------------------------------------------------------------------------------


EVALUATION_MODE = {
    "fedfew": "a client chooses its model by its training loss",
    "ifca": "a client chooses its cluster by its training loss",
    "fedfomo": "a client weighs candidates by their losses",
    "fednh": "prototypes are features of the trained body",
    "pfedfda": "Gaussians describe features of the trained body",
    "moon": "features of the global and the previous model are constants of a round",
    "fedproto": "prototypes are features of the trained body",
    "fedpac": "class means and variances are features of the served and the trained body",
    "fedas": "prototypes and Fisher information are features and gradients of the trained body",
    "fedcp": "features of the served body are constants of a round",
    "ppfe": "sample weights follow the predictions of the ensemble",
    "fedrep": "the head trains on the frozen body, whose BatchNorm uses running statistics",
    "confree": "as FedRep",
    "fedala": "the mixture is learnt on frozen lower layers, whose BatchNorm uses running statistics",
}
"""Methods whose training depends on outputs in evaluation mode, and so on running statistics."""


@pytest.fixture
def start_file(tmp_path):
    """Return a function that writes the network's initial tensors, with its running means moved by ``shift``."""
    torch.manual_seed(1)
    network = normalised(Task("image", (1, 4, 4), ("0", "1", "2")))

    def write(shift):
        tensors = {n: t.numpy().copy() for n, t in network.state_dict().items() if t.is_floating_point()}
        tensors["2.running_mean"] += np.float32(shift)
        save_file(tensors, tmp_path / f"start-{shift:g}.safetensors")
        return str(tmp_path / f"start-{shift:g}.safetensors")

    return write


@every_method
def test_running_statistics_do_not_change_parameters(make_config, federate, start_file, tmp_path, method):
    """In training mode BatchNorm uses the batch, so a shift of the first running means changes no parameter."""
    if method in EVALUATION_MODE:
        pytest.skip(EVALUATION_MODE[method])
    settings = BASE | {"model": NETWORK}
    stored = []
    for shift in (0.0, 50.0):
        config = make_config(method, data=data_of(4), weights=start_file(shift), **settings)
        federate(config, models_folder=tmp_path / str(shift))
        files = sorted((tmp_path / str(shift)).glob("*.safetensors"))
        stored.append({(file.name, name): array for file in files for name, array in load_file(file).items()})
    assert stored[0].keys() == stored[1].keys() and len(stored[0]) >= 4 * 8
    for key, array in stored[0].items():
        if "running" not in key[1]:
            np.testing.assert_allclose(array, stored[1][key], rtol=1e-3, atol=1e-5, err_msg=str(key))


@every_method
def test_update_norms_exclude_running_statistics(make_config, federate, start_file, method):
    """The running means start at 10,000 and move by thousands, and the parameters move by less than 50."""
    if "max-update-norm" in settings_class(method)().refusals():
        pytest.skip("the clients send no model")
    settings = BASE | {"model": NETWORK, "weights": start_file(1e4), "max_update_norm": 50.0}
    finished = federate(make_config(method, data=data_of(4), **settings))
    assert [record.dropped for record in finished.records] == [[]] * 4


@every_method
def test_update_norms_exclude_counts_and_statistics(make_config, federate, method):
    """A small step moves a model by less than 1, so no client of nine samples exceeds this limit."""
    if "max-update-norm" in settings_class(method)().refusals():
        pytest.skip("the clients send no model")
    if method == "fedproto":
        pytest.skip("FedProto's update is the change of its prototypes, which start at 0")
    settings = BASE | {"lr": 1e-3, "max_update_norm": 1.0}
    finished = federate(make_config(method, data=data_of(4), **settings))
    assert [record.dropped for record in finished.records] == [[]] * 4


# -- class weights -----------------------------------------------------------------------------------------

COUNTED = {
    "cwfedavg": "the regulariser compares with the client's class counts",
    "feduv": "the regularisers are taken over the samples of a batch",
    "fednh": "prototypes are means over the samples of a class, weighted by their number",
    "pfedfda": "the prior is the share of each class",
    "fedproto": "prototypes are weighted by samples of a class",
    "fedpac": "head combination uses the share of each class",
    "fedcp": "the discrepancy is taken over pairs of samples",
    "fedas": "the Fisher information is taken over mini-batches",
    "ppfe": "sample weights are a distribution over the samples",
    "per-fedavg": "a batch is divided into parts, sample by sample",
    "fedala": "the weights of the mixture are learnt on a sample of the batches",
    "fedfew": "losses of the models are means over the samples",
    "ifca": "the cluster is chosen by the mean loss over the samples",
    "fedfomo": "candidates are weighted by their mean loss over the samples",
}
"""Methods that use the number of samples for more than the mean of the loss."""


@every_method
def test_balanced_class_weights_equal_repeated_samples(make_config, federate, method):
    """A class of half the size has the same effect as its samples repeated twice. All clients have equal weights."""
    settings = BASE | {"num_server_rounds": 2}
    if "client-weights" not in settings_class(method)().refusals():
        settings["client_weights"] = "uniform"
    weighted, plain = (
        federate(make_config(method, data=data_of(4), class_weights=weights, **settings))
        for weights in ("balanced", "none")
    )
    losses = [finished.column("train_loss")[-1][0] for finished in (weighted, plain)]
    assert abs(losses[0] - losses[1]) > 1e-4  # the weights have an effect
    if method in COUNTED:
        return
    repeated = federate(make_config(method, data=data_of(4, repeats=2), **settings))
    assert_equal_runs(weighted, repeated)


# -- momentum ----------------------------------------------------------------------------------------------


@every_method
def test_momentum_is_reset_in_each_round(make_config, federate, method):
    """The first step of a round has no momentum, so momentum has no effect in rounds of one step, or is refused."""
    settings = BASE | {"local_steps": 1}
    plain = federate(make_config(method, data=data_of(4), **settings))
    try:
        with_momentum = federate(make_config(method, data=data_of(4), momentum=0.9, **settings))
    except SettingsError as error:
        assert method in str(error) and "momentum" in str(error)
        return
    assert_equal_runs(plain, with_momentum)


@every_method
def test_momentum_is_stable_or_refused(make_config, federate, method):
    """Forty steps a round at momentum 0.9 and a small rate end with a lower loss than the first round."""
    settings = BASE | {"local_steps": 40, "lr": 0.01, "momentum": 0.9, "num_server_rounds": 5}
    try:
        finished = federate(make_config(method, data=data_of(4), **settings))
    except SettingsError as error:
        assert method in str(error) and "momentum" in str(error)
        return
    losses = [np.mean(list(column.values())) for column in finished.column("train_loss")]
    assert losses[-1] < losses[0] and np.isfinite(losses).all()
    assert not any(record.dropped for record in finished.records)
