"""The shared part of all clients: predictors and ensembles, scores, state between rounds, replies, stored models."""

import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MessageType, MetricRecord, RecordDict
from torch import Tensor

from posy.client_app import app as client_app
from posy.client_app.base import PersonalClient
from posy.client_app.hooks import Config, Received, Result, Steps
from posy.client_app.predictors import Member, Predictor, loss_of, predictions_of
from posy.client_app.state import ContextStore, MissingStateError, State, Versions
from posy.client_app.training.work import Train, TrainingDivergedError
from posy.client_app.workspace import Workspace, choose_device, workspace_for
from posy.data.errors import DataError
from posy.data.task import Task
from posy.server_app.in_process import InProcessGrid
from posy.settings import SettingsError
from posy.storage import load_arrays
from posy.strategies.arrays import RETURNS
from posy.strategies.methods import METHODS
from posy.strategies.registry import read_settings
from posy.strategies.replies import Update
from posy.strategies.run_settings import RunSettings
from posy.strategies.states import ClientStates

MakeClient = Callable[..., Any]
TRAIN = {"server-round": 1, "client": 0, "evaluate-local": True}


def initial(client: PersonalClient, offset: int = 0) -> np.ndarray:
    return client.architecture.initial(client.settings.run.seed + offset)


def drive(client: PersonalClient, steps: Steps[Any]) -> Any:
    return client.jobs.drive(steps)


def logits(client: PersonalClient, flat: Tensor, split: str = "test") -> Tensor:
    """Return the outputs of a new model, not of the resident model."""
    module = client.architecture.build().eval()
    module.load_state_dict(client.layout.views(flat))
    with torch.no_grad():
        return module(client.jobs.samples(split).x)


# -- predictors ------------------------------------------------------------------------------------------


def members(client: PersonalClient, *coefficients: float) -> list[Member]:
    return [
        Member(torch.from_numpy(initial(client, k)) * 3, client.architecture, c) for k, c in enumerate(coefficients)
    ]


def test_a_single_model_predicts_log_probabilities(make_client: MakeClient) -> None:
    client = make_client("fedavg")
    ensemble = members(client, 0.0)  # a single member's coefficient does not matter
    predicted = drive(client, client.predict(Predictor(ensemble), "test"))
    assert torch.allclose(predicted, logits(client, ensemble[0].parameters).log_softmax(1), atol=1e-5)


@pytest.mark.parametrize("split", ["train", "test"])
def test_an_ensemble_averages_probabilities_by_coefficient(make_client: MakeClient, split: str) -> None:
    client = make_client("fedavg")
    ensemble = members(client, 3.0, 0.0, 1.0)
    predicted = drive(client, client.predict(Predictor(ensemble), split)).exp()
    p = [logits(client, m.parameters, split).softmax(1) for m in ensemble]
    assert torch.allclose(predicted, 0.75 * p[0] + 0.25 * p[2], atol=1e-5)
    assert torch.allclose(predicted.sum(1), torch.ones(len(predicted)), atol=1e-5)


@pytest.mark.parametrize("coefficients", [(3.0, 0.0, 1.0), (2.0, -1.0, 0.5), (0.0, 0.0)])
def test_an_ensemble_of_log_probabilities_is_their_geometric_mean(
    make_client: MakeClient, coefficients: tuple[float, ...]
) -> None:
    """Π_t p_t^(β_t / Σ |β|), divided by its sum over the classes."""
    client = make_client("fedavg")
    ensemble = members(client, *coefficients)
    predicted = drive(client, client.predict(Predictor(ensemble, logarithms=True), "test")).exp()
    shares = np.array(coefficients) if any(coefficients) else np.ones(len(ensemble))
    p = [logits(client, m.parameters).softmax(1).numpy() for m in ensemble]
    product = np.prod([q ** (b / np.abs(shares).sum()) for q, b in zip(p, shares, strict=True)], axis=0)
    np.testing.assert_allclose(predicted, product / product.sum(axis=1, keepdims=True), rtol=1e-4)


def test_zero_coefficients_give_equal_weights(make_client: MakeClient) -> None:
    client = make_client("fedavg")
    ensemble = members(client, 0.0, 0.0)
    predicted = drive(client, client.predict(Predictor(ensemble), "test")).exp()
    p = [logits(client, m.parameters).softmax(1) for m in ensemble]
    assert torch.allclose(predicted, (p[0] + p[1]) / 2, atol=1e-5)


@pytest.mark.parametrize("coefficients", [(1.0, -1.0), (-1.0, -2.0), (2.0, -0.5), (-0.3, 0.1), (1.0, -0.4, 0.2)])
def test_negative_coefficients_choose_the_class_with_the_largest_sum(
    make_client: MakeClient, coefficients: tuple[float, ...]
) -> None:
    """The ensemble predicts argmax of sum_t beta_t p_t, also with negative beta_t."""
    client = make_client("fedavg")
    ensemble = members(client, *coefficients)
    predicted = drive(client, client.predict(Predictor(ensemble), "train"))
    total = torch.stack([m.coefficient * logits(client, m.parameters, "train").softmax(1) for m in ensemble]).sum(0)
    assert torch.equal(predicted.argmax(1), total.argmax(1))
    assert torch.isfinite(predicted).all()


def test_conflicting_confident_members_have_a_finite_loss(make_client: MakeClient) -> None:
    client = make_client("fedavg")
    ensemble = [Member(m.parameters * 1e5, m.architecture, 1.0) for m in members(client, 1.0, 1.0)]
    predicted = drive(client, client.predict(Predictor(ensemble), "test"))
    assert math.isfinite(loss_of(predicted, client.data.y_test))


def test_predictions_use_the_class_output(make_client: MakeClient) -> None:
    client = make_client("feddrm", model="mlp")
    flat = torch.from_numpy(initial(client))
    predicted = drive(client, client.predict(client.plain(flat), "test"))
    assert torch.allclose(predicted, logits(client, flat)[0].log_softmax(1), atol=1e-5)


def test_scores_by_hand() -> None:
    p = torch.tensor([[0.5, 0.25, 0.25], [0.125, 0.75, 0.125], [0.2, 0.3, 0.5], [0.25, 0.5, 0.25]])
    y = torch.tensor([0, 1, 0, 0])
    assert loss_of(p.log(), y) == pytest.approx(-(math.log(0.5) + math.log(0.75) + math.log(0.2) + math.log(0.25)) / 4)
    predictions = predictions_of(p.log(), y, Task("features", (1,), ("a", "b", "c")), RunSettings(threshold=0.3))
    np.testing.assert_allclose(predictions.outputs, p, rtol=1e-6)
    assert (predictions.predicted.tolist(), predictions.y.tolist()) == ([0, 1, 2, 1], [0, 1, 0, 0])
    assert (predictions.positive, predictions.threshold, predictions.sensitivity) == (1, 0.3, 0.9)


@pytest.mark.parametrize(("name", "positive"), [("", 1), ("ill", 0), ("well", 1)])
def test_the_positive_class_has_a_name(name: str, positive: int) -> None:
    task = Task("features", (1,), ("ill", "well"))
    p = predictions_of(torch.zeros(2, 2), torch.tensor([0, 1]), task, RunSettings(positive_class=name))
    assert p.positive == positive
    with pytest.raises(SettingsError, match="positive-class = 'sick': the classes are ill and well; name"):
        predictions_of(torch.zeros(2, 2), torch.tensor([0, 1]), task, RunSettings(positive_class="sick"))


def test_nan_outputs_are_an_error(make_client: MakeClient) -> None:
    with pytest.raises(ArithmeticError, match="its outputs contain NaN"):
        loss_of(torch.tensor([[math.nan, 0.0]]), torch.tensor([0]))
    client = make_client("fedavg")
    for value in (math.nan, math.inf):
        with pytest.raises(ArithmeticError, match="its outputs contain NaN"):
            client.evaluate([np.full(client.layout.size, value, np.float32)], {"server-round": 1})


def test_training_losses_of_several_models(make_client: MakeClient) -> None:
    client = make_client("fedfew", fedfew_models=3)
    models = torch.stack([torch.from_numpy(initial(client, k)) for k in range(3)])
    losses = drive(client, client.losses(models))
    y = client.data.y_train
    assert torch.allclose(
        losses, torch.stack([F.cross_entropy(logits(client, m, "train"), y) for m in models]), atol=1e-6
    )


@pytest.mark.parametrize("method", ["fedfew", "ifca"])
def test_clients_do_not_choose_a_diverged_model(make_client: MakeClient, method: str) -> None:
    client = make_client(method)
    models = np.stack([initial(client, k) for k in range(3)])
    models[0] = math.nan
    assert torch.isinf(drive(client, client.losses(torch.from_numpy(models)))).tolist() == [True, False, False]
    _, _, metrics = client.evaluate([models], {"server-round": 1})
    assert metrics["chosen"] in ("1", "2")
    assert 0 <= metrics["served-accuracy"] <= 1


def test_diverged_fine_tuning_keeps_the_served_score(make_client: MakeClient) -> None:
    client = make_client("fedavg-ft")
    scored = [client.evaluate([initial(client)], {"server-round": 1, "lr": lr})[2] for lr in (0.01, 1e38)]
    assert scored[0]["served-accuracy"] == scored[1]["served-accuracy"]
    assert ["local-accuracy" in metrics for metrics in scored] == [True, False]


def test_class_distribution_of_clients(make_client: MakeClient) -> None:
    assert make_client("fedavg", 0).data.class_distribution().tolist() == pytest.approx([1 / 3] * 3)
    assert make_client("fedavg", 1).data.class_distribution().tolist() == [0.5, 0.5, 0]
    assert make_client("fedavg", 3).data.class_distribution().tolist() == [0, 1, 0]


# -- one round -------------------------------------------------------------------------------------------


def test_fit_returns_model_count_and_scores(make_client: MakeClient) -> None:
    client = make_client("fedavg")
    arrays, count, metrics = client.fit([initial(client)], TRAIN)
    trained = torch.from_numpy(arrays[0])
    assert count == len(client.data.y_train) == 21
    assert set(metrics) == {"train-loss", "num-test", "samples", "local-accuracy", "local-loss"}
    assert metrics["num-test"] == 9
    outputs, y = logits(client, trained), client.data.y_test
    assert metrics["local-accuracy"] == pytest.approx(float((outputs.argmax(1) == y).float().mean()))
    assert metrics["local-loss"] == pytest.approx(float(F.cross_entropy(outputs, y)), rel=1e-5)


def test_evaluate_scores_the_received_model(make_client: MakeClient) -> None:
    client = make_client("fedavg")
    flat = initial(client)
    _, count, metrics = client.evaluate([flat], {"server-round": 1})
    outputs, y = logits(client, torch.from_numpy(flat)), client.data.y_test
    assert count == 9
    assert metrics["num-train"] == 21
    assert metrics["served-accuracy"] == pytest.approx(float((outputs.argmax(1) == y).float().mean()))
    assert metrics["served-loss"] == pytest.approx(float(F.cross_entropy(outputs, y)), rel=1e-5)
    assert "local-accuracy" not in metrics


def test_training_samples_are_scored_on_request(make_client: MakeClient) -> None:
    client = make_client("fedavg", evaluate_training=True)
    flat = initial(client)
    (trained,), _, fitted = client.fit([flat], TRAIN)
    _, _, served = client.evaluate([flat], {"server-round": 1})
    y = client.data.y_train
    for point, metrics, model in (("served", served, flat), ("local", fitted, trained)):
        outputs = logits(client, torch.from_numpy(model), "train")
        accuracy = float((outputs.argmax(1) == y).float().mean())
        assert metrics[f"{point}-training-accuracy"] == pytest.approx(accuracy)
        assert metrics[f"{point}-training-loss"] == pytest.approx(float(F.cross_entropy(outputs, y)), rel=1e-5)
    _, _, metrics = make_client("fedavg").evaluate([flat], {"server-round": 1})
    assert not [key for key in metrics if "training" in key]


def test_scores_are_omitted_unless_requested(make_client: MakeClient) -> None:
    client = make_client("fedavg")
    _, _, metrics = client.fit([initial(client)], {**TRAIN, "evaluate-local": False})
    assert not {"local-accuracy", "local-loss"} & set(metrics)


@pytest.mark.parametrize("method", METHODS)
def test_a_client_with_one_sample_trains_and_is_not_scored(
    method: str, make_client: MakeClient, make_strategy: Callable[..., Any]
) -> None:
    """Without test samples, the accuracy would be 0 / 0."""
    settings = {"model": "mlp", "num_server_rounds": 8}
    client, strategy = make_client(method, 3, **settings), make_strategy(method, **settings)
    config = {**TRAIN, **strategy.train_config(1, 3), RETURNS: ",".join(strategy.returns(1, 3))}
    config["evaluate-personal"] = True
    served = list(strategy.serve(3).values())
    arrays, count, metrics = client.fit(served, config)
    _, tested, scored = client.evaluate(served, config)
    assert (count, tested, metrics["num-test"], scored["num-train"]) == (1, 0, 0, 1)
    assert [a.shape for a in arrays] == list(strategy.exchange.expected_shapes(3).values())
    assert all(np.isfinite(a).all() for a in arrays)
    assert not [key for key in {**metrics, **scored} if key.endswith("accuracy")]


def test_the_message_sets_the_learning_rate(make_client: MakeClient) -> None:
    client = make_client("fedavg", lr=0.1)
    start = initial(client)
    changes = [
        np.abs(client.fit([start], {**TRAIN, **lr})[0][0] - start).max() for lr in ({}, {"lr": 0.1}, {"lr": 1e-9})
    ]
    assert changes[0] == changes[1] > 1e-3
    assert changes[2] < 1e-6


def test_received_arrays_are_not_modified(make_client: MakeClient) -> None:
    for method in ("fedavg", "ditto", "fedprox", "fedfew"):
        client = make_client(method)
        sent = np.stack([initial(client, k) for k in range(3)]) if method == "fedfew" else initial(client)
        before = sent.copy()
        client.fit([sent], TRAIN)
        client.evaluate([sent], {"server-round": 1, "evaluate-personal": True})
        assert np.array_equal(sent, before)


def test_batches_depend_only_on_seed_round_and_client(make_client: MakeClient) -> None:
    start = initial(make_client("fedavg"))

    def result(server_round: int = 1, **settings: Any) -> np.ndarray:
        client = make_client("fedavg", batch_size=4, **settings)
        return client.fit([start], {**TRAIN, "server-round": server_round})[0][0]

    again = make_client("fedavg", batch_size=4)
    again.fit([start * 2], {**TRAIN, "server-round": 5})
    assert np.array_equal(result(), again.fit([start], TRAIN)[0][0])
    assert not np.array_equal(result(), result(server_round=2))
    assert not np.array_equal(result(), result(seed=7))


def test_two_clients_with_the_same_data_see_different_batches(make_client: MakeClient) -> None:
    x = np.random.default_rng(0).standard_normal((20, 6)).astype(np.float32)
    data: Any = (np.concatenate([x, x]), np.arange(40) % 2, [list(range(20)), list(range(20, 40))], [[], []])
    first, second = (make_client("fedavg", c, data=data, batch_size=4) for c in (0, 1))
    assert torch.equal(first.data.x_train, second.data.x_train)
    start = initial(first)
    results = [client.fit([start], {**TRAIN, "client": client.client})[0][0] for client in (first, second)]
    assert not np.array_equal(*results)


def test_divergence_is_an_error_and_changes_no_state(make_client: MakeClient) -> None:
    for method in ("fedavg", "ditto", "local", "fedamp"):
        client = make_client(method)
        with pytest.raises(TrainingDivergedError):
            client.fit([initial(client)] if client.method.sent else [], {**TRAIN, "lr": 1e38})
        assert not client.state.changed
        assert not len(client.state)


class NoLoss(PersonalClient):
    """A client whose training loss is NaN."""

    def local_round(self, received: Received, config: Config) -> Steps[Result]:
        yield Train(received["model"])
        return Update({}, math.nan), None


def test_a_nan_loss_is_an_error(make_client: MakeClient) -> None:
    regular = make_client("fedavg")
    client = NoLoss(2, regular.workspace, State())
    with pytest.raises(ArithmeticError, match=r"training loss is nan.*smaller lr than 0\.05"):
        client.fit([initial(client)], TRAIN)


def test_an_unknown_client_is_an_error(make_client: MakeClient) -> None:
    with pytest.raises(IndexError, match="client 4: the partition has 4 clients, numbered from 0"):
        make_client("fedavg", 4)


# -- stored models ---------------------------------------------------------------------------------------


def test_the_local_model_is_stored_after_training(make_client: MakeClient, tmp_path: Path) -> None:
    client = make_client("fedavg", 2)
    arrays, _, _ = client.fit([initial(client)], {**TRAIN, "save-models-to": str(tmp_path / "models")})
    files = list((tmp_path / "models").iterdir())
    assert [path.name for path in files] == ["client-2.safetensors"]
    assert np.array_equal(client.layout.flatten(load_arrays(files[0])), arrays[0])


def test_an_untrained_client_stores_the_served_model(make_client: MakeClient, tmp_path: Path) -> None:
    client = make_client("fedavg", 2)
    config = {"server-round": 1, "save-models-to": str(tmp_path)}
    client.evaluate([initial(client)], {**config, "evaluate-personal": False})
    assert not list(tmp_path.glob("client-*"))  # the client has already stored its local model
    client.evaluate([initial(client)], {**config, "evaluate-personal": True})
    assert np.array_equal(client.layout.flatten(load_arrays(tmp_path / "client-2.safetensors")), initial(client))


def ensemble_round(received: Received, predictor: Predictor) -> Steps[Result]:
    """Train the served model, and return an ensemble as the local model."""
    trained = yield Train(received["model"])
    return Update({"model": trained.parameters}, trained.loss), predictor


def test_an_ensemble_is_stored_with_its_coefficients(make_client: MakeClient, tmp_path: Path) -> None:
    client = make_client("fedavg")
    ensemble = members(client, 0.5, -2.0)
    client.local_round = lambda received, config: ensemble_round(received, Predictor(ensemble, "stage 2"))
    client.fit([initial(client)], {**TRAIN, "save-models-to": str(tmp_path)})
    stored = load_arrays(tmp_path / "client-0.safetensors")
    assert stored["stage1.coefficient"].tolist() == [0.5]
    assert stored["stage2.coefficient"].tolist() == [-2.0]
    for number, member in enumerate(ensemble, start=1):
        prefix = f"stage{number}."
        named = {k.removeprefix(prefix): v for k, v in stored.items() if k.startswith(prefix)}
        assert np.array_equal(client.layout.flatten(named), member.parameters.numpy())


# -- state -----------------------------------------------------------------------------------------------


FIRST, NEXT = Versions("", "0-1-0"), Versions("0-1-0", "0-2-0")


def context(**node: Any) -> Context:
    node_config = {"partition-id": 0, "num-partitions": 1, **node}
    return Context(run_id=1, node_id=1, node_config=node_config, state=RecordDict(), run_config={})


def test_state_round_trips_through_a_node_context() -> None:
    store, state = ContextStore(context()), State()
    state["weights"] = np.array([1e-30, math.pi, -0.0], np.float32)
    state["count"] = np.array(7, np.int64)
    state["strided"] = np.arange(6.0).reshape(2, 3).T
    store.save(3, FIRST, state)
    again = store.load(3, NEXT)
    assert set(again) == {"weights", "count", "strided"}
    assert not again.changed
    for name, array in state.items():
        assert again[name].dtype == array.dtype
        assert np.array_equal(again[name], array)
    with pytest.raises(MissingStateError, match="0-1-0 of client 30"):
        store.load(30, NEXT)


def test_clients_of_one_node_have_separate_states() -> None:
    store = ContextStore(context())
    for client in (1, 11):
        state = store.load(client, FIRST)
        state["own"] = np.array(client)
        assert store.save(client, FIRST, state) == "0-1-0"
    assert [int(store.load(client, NEXT)["own"]) for client in (1, 11)] == [1, 11]


def test_only_changed_state_is_written() -> None:
    node, state = context(), State()
    store = ContextStore(node)
    assert store.save(0, FIRST, state) == ""
    assert not node.state
    state["a"] = np.zeros(1)
    assert state.changed
    assert store.save(0, FIRST, state) == "0-1-0"
    assert not state.changed
    assert store.save(0, NEXT, state) == "0-1-0"
    del state["a"]
    assert store.save(0, NEXT, state) == "0-2-0"
    assert not len(store.load(0, Versions("0-2-0", "0-3-0")))


def test_a_stored_tensor_is_detached(make_client: MakeClient) -> None:
    client = make_client("fedavg")
    assert client.stored.get("model") is None
    client.stored["model"] = torch.arange(3.0, requires_grad=True)
    recalled = client.stored["model"]
    assert recalled.tolist() == [0, 1, 2]
    assert not recalled.requires_grad


def test_a_stored_row_takes_the_memory_of_a_row(make_client: MakeClient) -> None:
    client, all_clients = make_client("fedavg"), torch.arange(12.0).view(4, 3)
    client.stored["model"] = all_clients[1]
    assert client.stored["model"].tolist() == [3, 4, 5]
    assert client.stored["model"].untyped_storage().nbytes() == 12


def test_an_error_does_not_change_the_node_state(make_config: Callable[..., Any]) -> None:
    grid, settings = InProcessGrid(1), read_settings(make_config("local", num_clients=4))

    def ask(server_round: int, lr: float, start: str) -> Message:
        config: Config = {"settings": settings.to_json(), "client": 0, "server-round": server_round, "lr": lr}
        config |= {"state-from": start, "state-to": f"0-{server_round}-0", "state-keep": []}
        content = RecordDict({"arrays": ArrayRecord(), "config": ConfigRecord(dict(config))})
        return next(iter(grid.send_and_receive([Message(content, 1, MessageType.TRAIN)])))

    assert ask(1, 0.1, "").content.config_records["config"]["state"] == "0-1-0"
    before = ContextStore(grid.contexts[1]).load(0, NEXT)["model"]
    failed = ask(2, 1e38, "0-1-0")
    assert failed.has_error()
    assert "diverged" in str(failed.error.reason)
    assert np.array_equal(ContextStore(grid.contexts[1]).load(0, NEXT)["model"], before)


# -- messages --------------------------------------------------------------------------------------------


def test_a_reply_separates_numbers_from_texts() -> None:
    InProcessGrid(1)
    request = Message(RecordDict({"config": ConfigRecord({"client": 5})}), 1, MessageType.TRAIN)
    transposed = np.arange(6, dtype=np.float32).reshape(2, 3).T
    reply = client_app.reply_to(request, {"model": transposed}, 9, {"train-loss": 0.5, "chosen": "2"})
    assert dict(reply.content["metrics"]) == {"train-loss": 0.5, "num-examples": 9}
    assert dict(reply.content["config"]) == {"chosen": "2", "client": 5}
    assert np.array_equal(reply.content.array_records["arrays"]["model"].numpy(), transposed)
    assert isinstance(reply.content["metrics"], MetricRecord)


def test_the_order_of_the_arrays_in_a_message_does_not_matter(make_config: Callable[..., Any]) -> None:
    """SCAFFOLD's control variate has the shape of the model, so that only the names distinguish them."""
    InProcessGrid(1)
    settings = read_settings(make_config("scaffold"))
    model = Workspace(settings).architecture.initial(1)
    sent = {"model": Array(model), "control": Array(model / 100)}
    states = ClientStates().config("train", 1, 0)
    config = {"settings": settings.to_json(), "client": 0, "server-round": 1, **states}
    trained = []
    for names in (["model", "control"], ["control", "model"]):
        arrays = ArrayRecord({name: sent[name] for name in names})
        message = Message(RecordDict({"arrays": arrays, "config": ConfigRecord(config)}), 1, MessageType.TRAIN)
        reply = client_app.Call(message, context()).answer().content.array_records["arrays"]
        assert list(reply) == ["model", "control"]
        trained.append(reply["model"].numpy())
    assert np.array_equal(*trained)
    assert not np.array_equal(trained[0], model)


@pytest.mark.parametrize("nodes", [1, 2, 3, 10, 12])
def test_every_client_has_one_node(nodes: int) -> None:
    workspace = SimpleNamespace(settings=read_settings({"num-clients": 10}))
    hosted = [
        client_app.hosted_clients(context(**{"partition-id": n, "num-partitions": nodes}), workspace)  # type: ignore[arg-type]
        for n in range(nodes)
    ]
    assert sorted(c for clients in hosted for c in clients) == list(range(10))
    assert max(map(len, hosted)) - min(map(len, hosted)) <= 1


@pytest.mark.parametrize(
    "config",
    [{}, {"partition-id": 0}, {"partition-id": -1, "num-partitions": 2}, {"partition-id": "a", "num-partitions": 2}],
)
def test_a_node_without_a_partition_is_refused(config: dict[str, Any]) -> None:
    workspace = SimpleNamespace(settings=read_settings({"num-clients": 10}))
    node = Context(run_id=1, node_id=1, node_config=config, state=RecordDict(), run_config={})
    with pytest.raises(DataError, match="partition-id >= 0 and num-partitions"):
        client_app.hosted_clients(node, workspace)  # type: ignore[arg-type]


# -- the workspace ---------------------------------------------------------------------------------------


def test_the_workspace_is_cached_until_the_settings_change(make_config: Callable[..., Any]) -> None:
    first, second = (read_settings(make_config("fedavg", seed=seed)) for seed in (1, 2))
    workspace = workspace_for(first, "")
    assert workspace_for(first, "") is workspace
    assert workspace_for(second, "") is not workspace
    assert workspace_for(second, "").settings.run.seed == 2


def test_client_data_is_cached_within_its_limit(make_config: Callable[..., Any]) -> None:
    workspace = Workspace(read_settings(make_config("fedavg")))
    first = workspace.client_data(0)
    assert workspace.client_data(0) is first
    workspace.client_cache.room = 0
    second = workspace.client_data(1)
    again = workspace.client_data(1)
    assert again is not second
    assert torch.equal(again.x_train, second.x_train)
    assert workspace.client_data(0) is first  # otherwise clients that alternate would all be rebuilt


def test_initial_models_are_cached(make_config: Callable[..., Any]) -> None:
    workspace = Workspace(read_settings(make_config("fedavg")))
    model = workspace.initial(workspace.architecture, 3)
    assert workspace.initial(workspace.architecture, 3) is model
    assert model.numpy().tolist() == workspace.architecture.initial(3).tolist()
    assert not torch.equal(workspace.initial(workspace.architecture, 4), model)


@pytest.mark.parametrize("name", ["gpu", "cuda:x", "", "meta", "mps"])
def test_an_unknown_device_is_refused(name: str) -> None:
    with pytest.raises(SettingsError, match=f"device = '{name}'"):
        choose_device(name)


def test_a_missing_cuda_device_is_refused() -> None:
    number = torch.cuda.device_count()
    with pytest.raises(SettingsError, match=f"this machine has {number} CUDA"):
        choose_device(f"cuda:{number}")
