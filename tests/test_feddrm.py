"""FedDRM: objective and routing by hand, personal layers, and system accuracy with known routing."""

import json
import math

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from torch import Tensor

from posy.client_app.feddrm import class_and_client
from posy.client_app.training.batches import Batch
from posy.client_app.training.work import cross_entropy
from posy.client_app.workspace import Workspace
from posy.server_app.app import run
from posy.server_app.results import RunDirectory
from posy.server_app.system import pooled_test, routing_matrix, system_accuracy
from posy.settings import SettingsError
from posy.strategies.feddrm import route_queries
from posy.strategies.methods import strategy_class
from posy.strategies.registry import read_settings
from posy.strategies.replies import ClientInfo

CONFIG = {"server-round": 1, "lr": 0.1}


class FixedOutputs:
    """A network with two fixed outputs."""

    loss = staticmethod(cross_entropy)

    def __init__(self, classes: Tensor, clients: Tensor) -> None:
        self.outputs = classes, clients

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.outputs

    def __getitem__(self, name: str) -> Tensor:
        raise KeyError(name)


# -- objective -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("weight", [0.8, 0.0, 1.0, 0.3])
def test_objective_by_hand(weight):
    """The labels have class probabilities 1/4 and 1/2, and client 2 has probabilities 1/5 and 3/5."""
    classes = torch.log(torch.tensor([[1.0, 3.0], [2.0, 2.0]]))
    clients = torch.log(torch.tensor([[2.0, 2.0, 1.0], [1.0, 1.0, 3.0]]))
    context = {"client": torch.tensor(2), "lambda": torch.tensor(weight)}
    loss = class_and_client(FixedOutputs(classes, clients), Batch(torch.zeros(2, 1), torch.tensor([0, 1])), context)
    class_loss = (math.log(4) + math.log(2)) / 2
    client_loss = (math.log(5) + math.log(5 / 3)) / 2
    assert float(loss) == pytest.approx(weight * class_loss + (1 - weight) * client_loss, rel=1e-6)


def test_class_weight_one_does_not_train_the_client_branch(make_client):
    client = make_client("feddrm", feddrm_class_weight=1.0)
    branch = client.layout.part(["client-branch"])
    served = client.layout.without(["head"]).take(client.initial().numpy())
    (sent,), _, _ = client.fit([served], CONFIG)
    start = client.initial().numpy()
    flat = client.layout.without(["head"]).put(start.copy(), sent)
    np.testing.assert_array_equal(branch.take(flat), branch.take(start))
    assert not np.array_equal(client.layout.part(["fc1"]).take(flat), client.layout.part(["fc1"]).take(start))


def test_class_weight_below_one_trains_the_client_branch(make_client):
    client = make_client("feddrm", feddrm_class_weight=0.8)
    start = client.initial().numpy()
    (sent,), _, _ = client.fit([client.layout.without(["head"]).take(start)], CONFIG)
    trained = client.layout.without(["head"]).put(start.copy(), sent)
    assert not np.array_equal(*(client.layout.part(["client-branch"]).take(vector) for vector in (trained, start)))


def test_class_weight_zero_does_not_train_the_class_classifier(make_client):
    client = make_client("feddrm", feddrm_class_weight=0.0)
    start = client.initial().numpy()
    client.fit([client.layout.without(["head"]).take(start)], CONFIG)
    np.testing.assert_array_equal(client.state["personal"], client.layout.part(["head"]).take(start))


def test_step_weights_by_hand(make_client, softmax_regression):
    """Two linear branches: the class classifier moves by -lr λ ∇CE(class), the client branch by -lr (1 - λ) ∇CE(2)."""
    client = make_client("feddrm", client=2, model="linear", batch_size=100, feddrm_class_weight=0.3)
    x, y = client.data.x_train.numpy(), client.data.y_train.numpy()
    start = np.random.default_rng(0).normal(size=client.layout.size).astype(np.float32)
    classes, clients = (client.layout.part([name]).take(start) for name in ("head", "client-branch"))
    client.stored["personal"] = torch.from_numpy(classes)
    (sent,), _, _ = client.fit([clients], CONFIG)
    class_gradient = softmax_regression(classes, x, y)[1]
    client_gradient = softmax_regression(clients, x, np.full_like(y, 2))[1]
    np.testing.assert_allclose(client.state["personal"], classes - 0.1 * 0.3 * class_gradient, atol=1e-6)
    np.testing.assert_allclose(sent, clients - 0.1 * 0.7 * client_gradient, atol=1e-6)


def test_client_branch_learns_the_client_index(make_client):
    """The label of the client branch is the client's index, so the branch predicts it for all samples."""
    client = make_client("feddrm", client=2, feddrm_class_weight=0.0, local_epochs=20)
    start = client.initial()
    (sent,), _, _ = client.fit([client.layout.without(["head"]).take(start.numpy())], CONFIG)
    model = client.architecture.build()
    flat = client.layout.without(["head"]).put(start.clone(), torch.from_numpy(sent))
    model.load_state_dict(client.layout.views(flat))
    assert (model(client.data.x_train)[1].argmax(dim=1) == 2).all()


# -- shared and personal layers ------------------------------------------------------------------------


def test_only_the_class_classifier_is_personal(make_strategy, make_client):
    strategy = make_strategy("feddrm")
    client = make_client("feddrm")
    head = client.layout.part(["head"])
    assert head.size == 64 * 3 + 3
    assert strategy.serve(0)["model"].size == client.layout.size - head.size
    assert strategy.shared == client.shared == client.layout.without(["head"])
    (sent,), _, _ = client.fit([*strategy.serve(0).values()], CONFIG)
    assert {"model": sent.shape} == strategy.exchange.expected_shapes(0)
    assert set(client.state) == {"personal"} and client.state["personal"].shape == (head.size,)


def test_stored_classifier_is_reused(make_client):
    client = make_client("feddrm")
    shared = client.layout.without(["head"])
    served = shared.take(client.initial())
    client.fit([served.numpy()], CONFIG)
    classifier = client.state["personal"].copy()
    flat = client.assembled({"model": served})
    np.testing.assert_array_equal(client.layout.part(["head"]).take(flat), classifier)
    np.testing.assert_array_equal(shared.take(flat), served)


def test_client_branch_has_one_output_per_client(make_strategy):
    shapes = {entry.name: entry.shape for entry in make_strategy("feddrm").architecture.layout.entries}
    assert shapes["client_head.bias"] == (4,)


@pytest.mark.parametrize(
    ("sharing", "unshared"),
    [
        ("none", ("conv1", "conv2", "fc1", "fc2", "fc3")),
        ("shallow", ("conv2", "fc1", "fc2", "fc3")),
        ("mid", ("fc1", "fc2", "fc3")),
        ("deep", ("fc3",)),
    ],
)
def test_client_branch_copies_the_unshared_blocks(make_strategy, make_client, sharing, unshared):
    """The branch also has a classifier for 128 features and 2 clients."""
    x = np.random.default_rng(0).normal(size=(4, 16, 16)).astype(np.float32)
    data = (x, np.array([0, 1, 0, 1]), [[0], [1]], [[2], [3]])
    options = {"data": data, "model": "lenet-gn", "feddrm_sharing": sharing}
    for side in (make_strategy("feddrm", **options), make_client("feddrm", **options)):
        layout = side.architecture.layout
        assert layout.part(["client-branch"]).size == layout.part(unshared).size + 128 * 2 + 2


def test_server_and_client_initialise_linear_layers_equally(make_strategy, make_client):
    strategy, client = (make("feddrm", linear_init="kaiming") for make in (make_strategy, make_client))
    start = strategy.initial()
    np.testing.assert_array_equal(start, client.initial().numpy())
    tensors = strategy.architecture.layout.views(start)
    assert not any(tensors[name].any() for name in tensors if name.endswith("bias"))
    assert np.abs(start - make_strategy("feddrm").initial()).max() > 0.1


def test_single_client_is_rejected(make_strategy):
    data = (np.zeros((4, 2), np.float32), np.array([0, 1, 0, 1]), [[0, 1]], [[2, 3]])
    with pytest.raises(SettingsError, match="num-clients = 1"):
        make_strategy("feddrm", data=data)


# -- routing -------------------------------------------------------------------------------------------


def test_density_routing_does_not_favour_large_clients():
    """n = (90, 10): the posteriors (0.6, 0.4) have the ratios (2/3, 4), (0.95, 0.05) the ratios (1.06, 0.5)."""
    logits = torch.log(torch.tensor([[0.6, 0.4], [0.95, 0.05], [0.3, 0.7]]))
    n = np.array([90.0, 10.0])
    assert route_queries(logits, n, "posterior").tolist() == [0, 0, 1]
    assert route_queries(logits, n, "density").tolist() == [1, 0, 1]
    assert route_queries(logits, n).tolist() == [1, 0, 1]


def test_routings_agree_for_clients_of_equal_size():
    logits = torch.randn(50, 5, generator=torch.Generator().manual_seed(0))
    n = np.full(5, 7.0)
    assert route_queries(logits, n, "density").tolist() == route_queries(logits, n, "posterior").tolist()


def test_density_routing_ignores_the_scale_of_the_sizes():
    logits = torch.randn(50, 3, generator=torch.Generator().manual_seed(0))
    n = np.array([1.0, 5.0, 2.0])
    assert route_queries(logits, n).tolist() == route_queries(logits, 100 * n).tolist()


def test_routing_matrix_by_hand():
    matrix = routing_matrix(np.array([0, 0, 1, 2, 2, 2]), np.array([0, 1, 1, 0, 2, 2]), 3)
    np.testing.assert_array_equal(matrix, [[1, 1, 0], [0, 1, 0], [1, 0, 2]])


# -- system accuracy -----------------------------------------------------------------------------------

# Feature 0 identifies the client (-1 or +1) and feature 1 the class. The clients have opposite class names.
X = np.array([[-1, -1], [-1, 1], [1, -1], [1, 1]] * 3 + [[-1, -1], [-1, 1]], np.float32)
Y = np.array([0, 1, 1, 0] * 3 + [0, 1])
TRAIN = [[0, 1, 12, 13], [2, 3]]
TEST = [[4, 5, 8, 9], [6, 7, 10, 11]]


@pytest.fixture
def build_system(make_config, tmp_path):
    """Return a function that builds a linear FedDRM with fixed routing and both correct classifiers on disk."""

    def build(slope: float, bias: float, stored=(0, 1), **extra):
        settings = read_settings(make_config("feddrm", data=(X, Y, TRAIN, TEST), model="linear", **extra))
        workspace = Workspace(settings)
        strategy = strategy_class("feddrm")(settings, workspace.architecture)
        strategy.clients = {c: ClientInfo(c, c + 1, len(TRAIN[c]), len(TEST[c])) for c in (0, 1)}
        strategy.record.clients = {c: {"n_train": len(TRAIN[c])} for c in (0, 1)}
        layout = strategy.architecture.layout
        named = {name: np.zeros(e.shape, np.float32) for e in layout.entries for name in [e.name]}
        named["client_head.weight"][:, 0] = [-slope, slope]
        named["client_head.bias"][0] = bias
        strategy.model = strategy.shared.take(layout.flatten(named))
        directory = RunDirectory.create(tmp_path / "system", "run")
        for client in stored:
            sign = 1 if client == 0 else -1  # feature 1 > 0 is class 1 of client 0, and class 0 of client 1
            arrays = {**named, "model.head.weight": np.array([[0, -sign], [0, sign]], np.float32)}
            save_file(arrays, directory.models / f"client-{client}.safetensors")
        return settings, strategy, workspace, directory

    return build


def test_system_accuracy_with_perfect_routing(build_system):
    settings, strategy, workspace, directory = build_system(5.0, 0.0)
    system = system_accuracy(settings, strategy, workspace, directory)
    assert (system.accuracy, system.routing_accuracy) == (1.0, 1.0)
    np.testing.assert_array_equal(system.routed, [[4, 0], [0, 4]])


def test_system_accuracy_with_reversed_routing(build_system):
    """The wrong client answers every query, and its class names are swapped."""
    settings, strategy, workspace, directory = build_system(-5.0, 0.0)
    system = system_accuracy(settings, strategy, workspace, directory)
    assert system.accuracy == 0.0
    np.testing.assert_array_equal(system.routed, [[0, 4], [4, 0]])


def test_system_accuracy_if_one_client_receives_all_queries(build_system):
    """Posterior logits of 1 and 0 route all samples to client 0, which classifies only its own correctly."""
    settings, strategy, workspace, directory = build_system(0.0, 1.0, feddrm_routing="posterior")
    system = system_accuracy(settings, strategy, workspace, directory)
    assert (system.accuracy, system.routing_accuracy) == (0.5, 0.5)
    np.testing.assert_array_equal(system.routed, [[4, 0], [4, 0]])


def test_client_sizes_affect_density_routing(build_system):
    """With sizes 4 and 2, logits 0.5 and 0 select client 0 by posterior and client 1 by density (log 2 > 0.5)."""
    for routing, chosen in (("posterior", 0), ("density", 1)):
        settings, strategy, workspace, directory = build_system(0.0, 0.5, feddrm_routing=routing)
        system = system_accuracy(settings, strategy, workspace, directory)
        np.testing.assert_array_equal(system.routed[:, chosen], [4, 4])


def test_pooled_test_returns_the_client_of_each_sample(build_system):
    _, _, workspace, _ = build_system(5.0, 0.0)
    _, y, owner = pooled_test(workspace, range(2))
    assert owner.tolist() == [0] * 4 + [1] * 4
    assert y.tolist() == Y[TEST[0] + TEST[1]].tolist()


def test_system_accuracy_requires_all_classifiers(build_system):
    settings, strategy, workspace, directory = build_system(5.0, 0.0, stored=(1,))
    assert system_accuracy(settings, strategy, workspace, directory) is None


def test_federation_learns_to_route(make_config, federate):
    """After some rounds, FedDRM distinguishes clients whose samples differ in one feature."""
    finished = federate(make_config("feddrm", data=(X, Y, TRAIN, TEST), num_server_rounds=25, lr=0.3, momentum=0.5))
    strategy = finished.strategy
    flat = torch.from_numpy(strategy.shared.put(strategy.initial(), strategy.model))
    model = strategy.architecture.build()
    model.load_state_dict(strategy.architecture.layout.views(flat))
    x, _, owner = pooled_test(Workspace(strategy.settings), strategy.members)
    assert route_queries(model(x)[1], np.array([4.0, 2.0])).tolist() == owner.tolist()
    assert finished.column("served_accuracy")[-1] == {0: 1.0, 1: 1.0}


@pytest.mark.parametrize("method", ["feddrm", "fedavg"])
def test_system_accuracy_over_the_last_rounds(make_config, method):
    """The last three of six rounds have two evaluations. The last evaluation equals the final accuracy."""
    settings = {"num_server_rounds": 6, "evaluate_every": 2, "average_rounds": 3, "system_accuracy": "on"}
    recorder = run(None, make_config(method, model="mlp", **settings))
    rows = [json.loads(line) for line in (recorder.directory.path / "rounds.jsonl").read_text().splitlines()]
    accuracies = {row["round"]: row["system_accuracy"] for row in rows if "system_accuracy" in row}
    assert accuracies.keys() == {4, 6}
    assert accuracies[6] == recorder.summary["system-accuracy"]
    average = recorder.summary["system-accuracy-average"]
    assert average["mean"] == pytest.approx((accuracies[4] + accuracies[6]) / 2)
    assert average["evaluations"] == recorder.summary["served"]["average"]["evaluations"] == 2
    served = [row["served_accuracy"]["weighted"] for row in rows if row["round"] in accuracies]
    assert recorder.summary["served"]["average"]["weighted"] == pytest.approx(sum(served) / 2)
