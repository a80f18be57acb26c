"""Local differential privacy: clipping, noise, and the methods that support it."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Context, Message, MessageType, RecordDict
from flwr.clientapp.mod import LocalDpMod

from posy.client_app.privacy import check_network, check_privacy, noise_deviation, noised
from posy.data.task import Task
from posy.models.architecture import architecture_for
from posy.server_app.in_process import InProcessGrid
from posy.settings import SettingsError
from posy.strategies.method_settings import ALLOWED
from posy.strategies.methods import METHODS, settings_class
from posy.strategies.registry import read_settings
from posy.strategies.settings import TrainSettings

MakeClient = Callable[..., Any]
QUIET = 1e-30  # a sensitivity for which the noise vanishes in float32
NOISED = [method for method in METHODS if settings_class(method).noise is ALLOWED]


def by_flower(received: list[np.ndarray], sent: list[np.ndarray], sensitivity: float) -> list[np.ndarray]:
    """Return the arrays of a reply after Flower's LocalDpMod, with clip 2, epsilon 0.5 and delta 1e-3."""
    InProcessGrid(1)  # gives this process the identity that messages need

    def record(arrays: list[np.ndarray]) -> RecordDict:
        return RecordDict({"arrays": ArrayRecord({str(i): Array(array) for i, array in enumerate(arrays)})})

    message = Message(record(received), 1, MessageType.TRAIN)
    context = Context(run_id=0, node_id=1, node_config={}, state=RecordDict(), run_config={})
    mod = LocalDpMod(2.0, sensitivity, 0.5, 1e-3)
    reply = mod(message, context, lambda request, _: Message(record(sent), reply_to=request))
    return reply.content.array_records["arrays"].to_numpy_ndarrays()


def test_clipping_by_hand() -> None:
    start = [np.array([1.0, 1.0], np.float32), np.array([0.0], np.float32)]
    sent = [np.array([4.0, 1.0], np.float32), np.array([4.0], np.float32), np.array([9], np.int64)]
    clipped = noised(sent, start, TrainSettings(dp_clip=2.5, dp_sensitivity=QUIET))  # the change's norm is 5
    assert clipped[0].tolist() == [2.5, 1.0]
    assert clipped[1].tolist() == [2.0]
    assert clipped[2] is sent[2]
    assert [array.dtype for array in clipped] == [np.float32, np.float32, np.int64]
    unclipped = noised(sent, start, TrainSettings(dp_clip=6.0, dp_sensitivity=QUIET))
    assert [array.tolist() for array in unclipped] == [[4.0, 1.0], [4.0], [9]]
    still = noised(start, start, TrainSettings(dp_clip=1.0, dp_sensitivity=QUIET))
    assert still[0].tolist() == [1.0, 1.0]
    assert still[1].tolist() == pytest.approx([0.0])


def test_clipping_and_noise_are_those_of_flowers_mod() -> None:
    rng = np.random.default_rng(5)
    start = [rng.normal(size=(30_000,)).astype(np.float32)]
    sent = [start[0] + rng.normal(size=(30_000,)).astype(np.float32)]
    settings = TrainSettings(dp_clip=2.0, dp_epsilon=0.5, dp_delta=1e-3, dp_sensitivity=QUIET)
    np.testing.assert_allclose(noised(sent, start, settings)[0], by_flower(start, sent, 0.0)[0], rtol=1e-5, atol=1e-6)
    settings = TrainSettings(dp_clip=2.0, dp_epsilon=0.5, dp_delta=1e-3, dp_sensitivity=3.0)
    expected = 3.0 * math.sqrt(2 * math.log(1250)) / 0.5
    assert noise_deviation(settings) == pytest.approx(expected)
    for reply in (noised(sent, start, settings)[0], by_flower(start, sent, 3.0)[0]):
        assert (reply - start[0]).std() == pytest.approx(expected, rel=0.02)
    assert noise_deviation(TrainSettings(dp_clip=2.0)) == pytest.approx(4.0 * math.sqrt(2 * math.log(125_000)))


def test_noise_is_not_of_any_seed() -> None:
    start = [np.zeros(8, np.float32)]
    replies = []
    for _ in range(2):
        np.random.seed(1)  # noqa: NPY002 - forked processes share this state
        replies.append(noised(start, start, TrainSettings(dp_clip=1.0))[0])
    assert not np.array_equal(replies[0], replies[1])


@pytest.mark.parametrize("method", NOISED)
def test_a_method_that_can_bear_noise_sends_it(method: str, make_client: MakeClient) -> None:
    """The change of the sent model has the clipping norm, or the standard deviation of the noise."""
    sent = {}
    for name, dp_settings in {
        "plain": {},
        "clipped": {"dp_clip": 0.01, "dp_sensitivity": QUIET},
        "noised": {"dp_clip": 0.01, "dp_sensitivity": 1.0, "dp_epsilon": 1.0, "dp_delta": 0.1},
    }.items():
        client = make_client(method, model="mlp", ppfe_stages=1, **dp_settings)
        models = client.settings.method.models if method == "fedfew" else 0
        start = client.shared.take(client.initial()).numpy().copy()
        received = [np.stack([start] * models)] if models else [start]
        if method == "fedproto":
            received = [
                np.zeros((client.data.num_classes, 64), np.float32),
                np.zeros(client.data.num_classes, np.float32),
            ]
        config = {"server-round": 1, "client": 0, "stage": 1, "first-finished": 1, "rounds-done": 0}
        arrays, _, _ = client.fit(received, config)
        reference = client.method.reference(client.architecture, received, arrays)[0]
        sent[name] = (arrays[0] - reference, arrays[1:])
    norms = {name: float(np.linalg.norm(change)) for name, (change, _) in sent.items()}
    assert norms["plain"] > 0.01
    assert norms["clipped"] == pytest.approx(0.01, rel=1e-3)
    np.testing.assert_allclose(sent["clipped"][0] / norms["clipped"], sent["plain"][0] / norms["plain"], atol=1e-3)
    chance = 5 / math.sqrt(2 * sent["noised"][0].size)  # five standard errors of a standard deviation
    assert sent["noised"][0].std() == pytest.approx(math.sqrt(2 * math.log(12.5)), rel=max(0.1, chance))
    for plain, noisy in zip(sent["plain"][1], sent["noised"][1], strict=True):
        np.testing.assert_array_equal(plain, noisy)  # FedFew's losses


@pytest.mark.parametrize("method", METHODS)
def test_who_may_have_noise(method: str) -> None:
    settings = read_settings({"method": method, "dp-clip": 1.0})
    if method in NOISED:
        check_privacy(settings)
    else:
        with pytest.raises(SettingsError, match=f"dp-clip = 1 with method = '{method}': .*; it must be 0"):
            check_privacy(settings)


def test_running_variances_bear_no_noise() -> None:
    settings = read_settings({"method": "fedavg", "dp-clip": 1.0})
    task = Task("image", (3, 8, 8), ("a", "b"))
    check_network(settings, architecture_for("resnet18-gn", task))
    with pytest.raises(SettingsError, match="'resnet18-bn': noise makes BatchNorm's running variances negative"):
        check_network(settings, architecture_for("resnet18-bn", task))


def test_a_whole_run_with_noise(make_config: Callable[..., Any], federate: Callable[..., Any]) -> None:
    quiet = federate(make_config("fedavg", dp_clip=100.0, dp_sensitivity=1e-9))
    plain, loud = federate(make_config("fedavg")), federate(make_config("fedavg", dp_clip=1.0, dp_epsilon=0.1))
    models = [done.strategy.server_state()["model"] for done in (plain, quiet, loud)]
    np.testing.assert_allclose(models[0], models[1], atol=1e-5)
    assert np.abs(models[0] - models[2]).max() > 1
