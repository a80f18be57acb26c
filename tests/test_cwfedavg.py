"""cwFedAvg: Eqs. 4-9 by hand, which layers are averaged class-wise, and the regulariser's value and gradient."""

import math

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from torch import Tensor

from posy.client_app.cwfedavg import regularised
from posy.client_app.training.batches import Batch
from posy.client_app.training.work import classification, cross_entropy
from posy.strategies.cwfedavg import class_models, class_weights, weight_distribution

# A linear model of two features and three classes: weights (3, 2), then biases (3,).
# Row norms 5, 10, 5 and 3, 0, 1: p̃ = (1/4, 1/2, 1/4) and (3/4, 0, 1/4).
FIRST = np.array([3, 4, 0, 10, 5, 0, 1, 2, 3], np.float32)
SECOND = np.array([0, 3, 0, 0, 1, 0, -1, 0, 1], np.float32)
DATA = (
    np.array([[-1, 0], [1, 0], [0, 1], [0, -1], [2, 1], [1, 2]], np.float32),
    np.array([0, 1, 2, 0, 1, 2]),
    [[0, 1], [2, 3], [4]],
    [[5], [], []],
)


CONFIG = {"server-round": 1, "returns": "model"}


class LinearNet:
    """A linear network with the interface that the objective uses."""

    loss = staticmethod(cross_entropy)

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    def __call__(self, x: Tensor) -> Tensor:
        return x @ self.weight.T

    def __getitem__(self, name: str) -> Tensor:
        assert name == "head.weight"
        return self.weight


def served_model(strategy, client):
    """Return the complete model, which the server sends in two parts."""
    reply = {"model": np.zeros(strategy.size, np.float32)}
    return strategy.method.reference(strategy.architecture, strategy.serve(client), reply)["model"]


# -- Eqs. 4-7 ------------------------------------------------------------------------------------------


def test_weight_distribution_by_hand():
    rows = np.stack([FIRST[:6].reshape(3, 2), SECOND[:6].reshape(3, 2)])
    np.testing.assert_allclose(weight_distribution(rows), [[0.25, 0.5, 0.25], [0.75, 0, 0.25]], rtol=1e-12)


def test_weight_distribution_of_zeros_is_uniform():
    np.testing.assert_allclose(weight_distribution(np.zeros((1, 4, 3), np.float32)), [[0.25] * 4])


def test_regulariser_of_a_zero_head_is_finite():
    """The loss is ln 2 + 3 * ||(1, 0) − (1/2, 1/2)||, and the gradient is finite."""
    weight = torch.zeros(2, 3, requires_grad=True)
    context = {"distribution": torch.tensor([1.0, 0.0]), "lambda": torch.tensor(3.0)}
    loss = regularised(LinearNet(weight), Batch(torch.ones(1, 3), torch.tensor([0])), context)
    assert float(loss) == pytest.approx(math.log(2) + 3 * math.sqrt(0.5))
    loss.backward()
    assert torch.isfinite(weight.grad).all()


def test_class_weights_by_hand():
    """p = (1/4, 3/4); p_i p̃_ij = (1/16, 1/8, 1/16) and (9/16, 0, 3/16)."""
    q = class_weights(np.array([[0.25, 0.5, 0.25], [0.75, 0, 0.25]]), np.array([10.0, 30.0]))
    np.testing.assert_allclose(q, [[0.1, 0.9], [1, 0], [0.25, 0.75]], rtol=1e-12)


def test_class_models_by_hand():
    rows = np.array([[1.0, 2.0], [3.0, 6.0]], np.float32)
    models = class_models(rows, np.array([[1.0, 0.0], [0.5, 0.5]]), np.array([1.0, 2.0]), np.zeros((2, 2), np.float32))
    np.testing.assert_allclose(models, [[2, 4], [3, 6]], rtol=1e-6)  # class 0: weights 1 and 2 * 1/2


def test_a_class_without_clients_keeps_its_model():
    before = np.array([[7.0], [8.0], [9.0]], np.float32)
    rows = np.array([[1.0], [2.0]], np.float32)
    models = class_models(rows, np.array([[1.0, 0, 0], [0, 0, 1.0]]), np.ones(2), before)
    np.testing.assert_array_equal(models, [[1], [8], [2]])


def test_all_clients_start_from_the_initial_model(make_strategy):
    strategy = make_strategy("cwfedavg", cwfedavg_layers="all")
    for client in range(4):
        np.testing.assert_allclose(served_model(strategy, client), strategy.initial(), rtol=1e-6)


def test_a_client_without_a_reply_keeps_its_distribution_and_norms(make_strategy, update):
    strategy = make_strategy("cwfedavg", data=DATA, model="linear")
    strategy.aggregate(1, [update(0, {"model": FIRST}, 10)])
    strategy.aggregate(2, [update(1, {"model": SECOND}, 30)])
    np.testing.assert_allclose(strategy.distributions, [[0.25, 0.5, 0.25], [0.75, 0, 0.25], [1 / 3] * 3], rtol=1e-6)
    np.testing.assert_allclose(strategy.local_norms, [[5, 10, 5], [3, 0, 1], [math.nan] * 3], rtol=1e-6)


# -- degenerate cases ----------------------------------------------------------------------------------


@pytest.mark.parametrize("layers", ["output", "fc-output", "all"])
def test_equal_distributions_make_every_class_model_fedavg(make_strategy, update, layers):
    """The same p̃ on all clients: q_ij = n_i / N for every class."""
    strategy = make_strategy("cwfedavg", cwfedavg_layers=layers)
    average = make_strategy("fedavg")
    rng = np.random.default_rng(0)
    models = rng.normal(size=(3, strategy.size)).astype(np.float32)
    output = strategy.output
    for factor, model in zip((1.0, 2.0, 0.5), models, strict=True):  # the heads differ by a factor
        model[output.start : output.stop] = factor * models[0][output.start : output.stop]
    sizes = (5, 20, 7)
    average.aggregate(1, [update(i, {"model": m}, n) for i, (m, n) in enumerate(zip(models, sizes, strict=True))])
    strategy.aggregate(1, [update(i, {"model": m}, n) for i, (m, n) in enumerate(zip(models, sizes, strict=True))])
    for model in strategy.class_models:
        np.testing.assert_allclose(model, strategy.classwise.take(average.model), atol=1e-5)
    for client in range(4):
        np.testing.assert_allclose(served_model(strategy, client), average.model, atol=1e-5)


def test_one_class_per_client_is_fedavg_within_each_class(make_strategy, update):
    """Eq. 9: w_j^G = Σ_{i of class j} n_i w_i / Σ n_i; a client is served its own class's model."""
    strategy = make_strategy("cwfedavg", model="linear", cwfedavg_distribution="empirical")
    models = np.random.default_rng(0).normal(size=(4, strategy.size)).astype(np.float32)
    classes, sizes = (0, 1, 0, 2), (10, 5, 30, 8)
    one_hot = np.eye(3, dtype=np.float32)
    replies = [{"model": models[i], "distribution": one_hot[classes[i]]} for i in range(4)]
    strategy.aggregate(1, [update(i, replies[i], sizes[i]) for i in range(4)])
    first = 0.25 * models[0] + 0.75 * models[2]
    np.testing.assert_allclose(strategy.class_models, [first, models[1], models[3]], atol=1e-6)
    for client, expected in enumerate((first, models[1], first, models[3])):
        np.testing.assert_allclose(served_model(strategy, client), expected, atol=1e-6)


# -- selective application (Table 3) -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layers", "classwise"),
    [
        ("output", {"head"}),
        ("fc-output", {"fc1", "head"}),
        ("conv2-fc-output", {"conv2", "fc1", "head"}),
        ("all", {"conv1", "conv2", "fc1", "head"}),
    ],
)
def test_only_selected_layers_are_averaged_class_wise(make_strategy, update, layers, classwise):
    """The other layers get the weighted mean; biases follow their layer."""
    rng = np.random.default_rng(0)
    data = (rng.normal(size=(6, 16, 16)).astype(np.float32), np.arange(6) % 3, [[0, 1], [2, 3]], [[4], [5]])
    strategy = make_strategy("cwfedavg", data=data, model="cnn", cwfedavg_layers=layers)
    models = rng.normal(size=(2, strategy.size)).astype(np.float32)
    models[1, strategy.output.start : strategy.output.start + 512] *= 5  # class 0 stands out on client 1
    strategy.aggregate(1, [update(i, {"model": m}, n) for i, (m, n) in enumerate(zip(models, (1, 3), strict=True))])
    weights = models[:, strategy.output.start : strategy.output.stop].reshape(2, *strategy.output.shape)
    p = weight_distribution(weights)
    mixed = p @ class_weights(p, np.array([1.0, 3.0])) @ models
    plain = 0.25 * models[0] + 0.75 * models[1]
    for client in range(2):
        served = served_model(strategy, client)
        for entry in strategy.architecture.layout.entries:
            part = slice(entry.start, entry.stop)
            expected, other = (mixed[client], plain) if entry.layer in classwise else (plain, mixed[client])
            np.testing.assert_allclose(served[part], expected[part], atol=1e-5)
            assert np.abs(served[part] - other[part]).max() > 1e-3
    assert strategy.class_models.shape == (3, strategy.architecture.layout.part(classwise).size)


# -- the client ----------------------------------------------------------------------------------------


def sent(client):
    """Return the common initialisation as the server sends it: averaged layers, and class-wise ones."""
    return [part.take(client.initial().numpy()) for part in client.method.parts(client.architecture)]


def test_regulariser_by_hand():
    """Rows of norm 5, 10, 5 against p = (1/2, 1/2, 0): the distance is sqrt(1/16 + 0 + 1/16)."""
    weight = torch.tensor(FIRST[:6]).view(3, 2).double()
    batch = Batch(torch.zeros(4, 2, dtype=torch.double), torch.tensor([0, 1, 2, 2]))
    context = {"distribution": torch.tensor([0.5, 0.5, 0.0]).double(), "lambda": torch.tensor(3.0)}
    loss = regularised(LinearNet(weight), batch, context)
    assert float(loss) == pytest.approx(math.log(3) + 3 * math.sqrt(1 / 8), rel=1e-6)


def test_regulariser_gradient_against_finite_differences():
    weight = torch.tensor(FIRST[:6]).view(3, 2).double().requires_grad_()
    batch = Batch(torch.tensor([[1.0, -1.0], [0.5, 2.0]]).double(), torch.tensor([0, 2]))
    context = {"distribution": torch.tensor([0.7, 0.1, 0.2]).double(), "lambda": torch.tensor(10.0)}
    (gradient,) = torch.autograd.grad(regularised(LinearNet(weight), batch, context), weight)
    step = 1e-6
    for row, column in np.ndindex(3, 2):
        losses = []
        for sign in (1, -1):
            other = weight.detach().clone()
            other[row, column] += sign * step
            losses.append(float(regularised(LinearNet(other), batch, context)))
        assert float(gradient[row, column]) == pytest.approx((losses[0] - losses[1]) / (2 * step), abs=1e-6)


def test_regulariser_gradient_by_hand():
    """On zero inputs cross-entropy has no gradient; two rows of length a, b in one dimension: p̃ = a / (a + b).

    R = ||(p1 - p̃, p2 - (1 - p̃))|| = √2 |p1 - p̃|, so dR/da = -√2 sign(p1 - p̃) b / (a + b)².
    """
    weight = torch.tensor([[1.0], [3.0]]).double().requires_grad_()
    batch = Batch(torch.zeros(1, 1, dtype=torch.double), torch.tensor([0]))
    context = {"distribution": torch.tensor([0.5, 0.5]).double(), "lambda": torch.tensor(2.0)}
    (gradient,) = torch.autograd.grad(regularised(LinearNet(weight), batch, context), weight)
    root = 2 * math.sqrt(2)
    np.testing.assert_allclose(gradient.numpy(), [[-root * 3 / 16], [root * 1 / 16]], rtol=1e-6)


def test_matching_distribution_has_no_gradient():
    weight = torch.tensor([[1.0], [3.0]]).requires_grad_()
    batch = Batch(torch.zeros(1, 1), torch.tensor([0]))
    context = {"distribution": torch.tensor([0.25, 0.75]), "lambda": torch.tensor(10.0)}
    (gradient,) = torch.autograd.grad(regularised(LinearNet(weight), batch, context), weight)
    np.testing.assert_array_equal(gradient.numpy(), np.zeros((2, 1)))


@pytest.mark.parametrize("strength", [2.0, 1000.0])
def test_lambda_scales_the_step_of_the_output_rows(make_client, strength):
    """On zero inputs the regulariser alone moves the rows 1 and 3, by λ√2·3/16 and -λ√2/16 (as above)."""
    data = (np.zeros((4, 1), np.float32), np.array([0, 1, 0, 1]), [[0, 1]], [[2, 3]])
    client = make_client("cwfedavg", data=data, model="linear", cwfedavg_wdr_lambda=strength)
    served = [np.zeros(0, np.float32), np.array([1, 3, 0, 0], np.float32)]
    (trained,), _, _ = client.fit(served, {**CONFIG, "lr": 1e-3})
    step = 1e-3 * strength * math.sqrt(2) / 16
    np.testing.assert_allclose(trained, [1 + 3 * step, 3 - step, 0, 0], rtol=1e-5)


def test_training_moves_the_weight_distribution_towards_the_data(make_client):
    """Client 1 of the tiny data has classes 0 and 1, half and half."""
    distances = {}
    for wdr in (True, False):
        client = make_client("cwfedavg", client=1, local_epochs=30, lr=0.01, cwfedavg_wdr=wdr)
        np.testing.assert_allclose(client.data.class_distribution(), [0.5, 0.5, 0])
        (trained,), _, _ = client.fit(sent(client), CONFIG)
        entry = client.architecture.weight("head")
        rows = trained[entry.start : entry.stop].reshape(1, *entry.shape)
        distances[wdr] = np.linalg.norm(weight_distribution(rows)[0] - [0.5, 0.5, 0])
    assert distances[True] < 0.05 < distances[False]


@pytest.mark.parametrize("off", [{"cwfedavg_wdr": False}, {"cwfedavg_wdr_lambda": 0.0}])
def test_without_regulariser_the_client_trains_as_fedavg(make_client, off):
    client = make_client("cwfedavg", **off)
    assert client.work(client.initial()).objective is classification
    (trained,), _, _ = client.fit(sent(client), CONFIG)
    (plain,), _, _ = make_client("fedavg").fit([client.initial().numpy()], {"server-round": 1})
    np.testing.assert_array_equal(trained, plain)


def test_clients_send_label_distributions_only_in_the_ablation(make_client, make_strategy):
    for distribution, names in (("approx", ["model"]), ("empirical", ["model", "distribution"])):
        client = make_client("cwfedavg", client=1, cwfedavg_distribution=distribution)
        arrays, _, metrics = client.fit(sent(client), CONFIG | {"returns": ",".join(names)})
        shapes = make_strategy("cwfedavg", cwfedavg_distribution=distribution).exchange.expected_shapes(1)
        assert dict(zip(names, [array.shape for array in arrays], strict=True)) == shapes
        assert set(metrics) <= {"train-loss", "num-test", "samples"}
    np.testing.assert_allclose(arrays[1], [0.5, 0.5, 0])


def test_server_uses_the_empirical_distribution_in_the_ablation(make_strategy, update):
    strategy = make_strategy("cwfedavg", data=DATA, model="linear", cwfedavg_distribution="empirical")
    first, second = {"model": FIRST, "distribution": [0.2, 0.3, 0.5]}, {"model": SECOND, "distribution": [1, 0, 0]}
    strategy.aggregate(1, [update(0, first, 10), update(1, second, 10)])
    np.testing.assert_allclose(strategy.distributions[:2], [[0.2, 0.3, 0.5], [1, 0, 0]], rtol=1e-6)
    np.testing.assert_allclose(strategy.class_models, [FIRST / 6 + SECOND * 5 / 6, FIRST, FIRST], rtol=1e-5)


def test_recorded_norms_come_from_the_last_local_models(make_config, federate, tmp_path):
    finished = federate(make_config("cwfedavg", num_server_rounds=2), models_folder=tmp_path)
    norms, distributions = finished.strategy.local_norms, finished.strategy.distributions
    heads = [load_file(tmp_path / f"client-{client}.safetensors")["head.weight"] for client in range(4)]
    np.testing.assert_allclose(norms, [np.linalg.norm(head, axis=1) for head in heads], rtol=1e-5)
    np.testing.assert_allclose(distributions, norms / norms.sum(axis=1, keepdims=True), rtol=1e-5)
    shares = [r.quantities["largest_class_share"] for r in finished.records]
    assert shares[1] == pytest.approx(distributions.max(axis=1).mean()) and shares[0] != shares[1]


def test_distance_of_the_approximated_distribution_by_hand(make_strategy, update):
    strategy = make_strategy("cwfedavg", data=DATA, model="linear")
    updates = [update(0, {"model": FIRST}, 10), update(1, {"model": SECOND}, 30)]
    assert "distribution_distance" not in strategy.aggregate(1, updates)  # the class counts are unknown
    strategy.class_counts = np.array([[1, 2, 1], [1, 0, 0], [5, 5, 5]])
    # Client 0 has p̃ = p = (1/4, 1/2, 1/4); client 1 has p̃ = (3/4, 0, 1/4) and p = (1, 0, 0).
    distance = strategy.aggregate(2, updates)["distribution_distance"]
    assert distance == pytest.approx(math.sqrt(2) / 4 / 2, rel=1e-6)
