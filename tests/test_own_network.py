"""Custom networks: every method trains them, and Posy refuses a wrong network before anything runs."""

from pathlib import Path

import numpy as np
import pytest
import torch

import posy
import posy.extensions
import posy.models.layers
import posy.storage
from posy.data.task import Task
from posy.models.architecture import Architecture, architecture_for
from posy.models.own import CustomModel, build_custom
from posy.settings import SettingsError
from posy.strategies.registry import read_settings

DIGITS = Task("image", (1, 8, 8), tuple("0123456789"))
FILE = '''
import torch
from torch import nn

import posy


def mlp(task):
    """Three linear layers with dropout between them."""
    size = torch.Size(task.input_shape).numel()
    return nn.Sequential(
        nn.Flatten(), nn.Linear(size, 24), nn.ReLU(), nn.Dropout(0.25), nn.Linear(24, 16), nn.ReLU(),
        nn.Linear(16, task.num_classes),
    )


def unbiased(task):
    """Three linear layers without bias."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 24, bias=False), nn.ReLU(), nn.Linear(24, 16, bias=False), nn.ReLU(),
        nn.Linear(16, task.num_classes, bias=False),
    )


class Net(nn.Module):
    """A parameter outside all modules, BatchNorm, channel dropout, and a head inside a nested module."""

    def __init__(self, task):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.features = nn.Sequential(nn.Conv2d(task.input_shape[0], 4, 3), nn.BatchNorm2d(4), nn.ReLU())
        self.drop = nn.Dropout2d(0.2)
        self.classifier = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, task.num_classes))

    def forward(self, x):
        x = nn.functional.adaptive_avg_pool2d(self.drop(self.features(x * self.scale)), 2)
        return self.classifier(x.flatten(1))


def convolutional(task):
    return Net(task)


def wrapped(task):
    net = nn.Module()
    net.inner = mlp(task)
    net.forward = net.inner.forward
    return net


def described(task):
    return posy.network(mlp(task), layers=["1", "4"], head="6")


def half_described(task):
    return posy.network(mlp(task), layers=["1"])


def wrong_layer(task):
    return posy.network(mlp(task), layers=["1", "five"])


def wrong_head(task):
    return posy.network(mlp(task), head="0")


def no_module(task):
    return "a network"


def no_head(task):
    return nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64))


def head_is_not_last(task):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, task.num_classes), nn.Softmax(dim=1))


def few_classes(task):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 7))


def wrong_shape(task):
    return nn.Sequential(nn.Flatten(), nn.Linear(100, task.num_classes))


def lazy(task):
    return nn.Sequential(nn.Flatten(), nn.LazyLinear(task.num_classes))


def tied(task):
    first, second = nn.Linear(64, 64), nn.Linear(64, 64)
    second.weight = first.weight
    return nn.Sequential(nn.Flatten(), first, second, nn.Linear(64, task.num_classes))


def double(task):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, task.num_classes)).double()


class Random(nn.Module):
    def __init__(self, task):
        super().__init__()
        self.head = nn.Linear(64, task.num_classes)

    def forward(self, x):
        return self.head(nn.functional.dropout(x.flatten(1), 0.5, self.training))


def random(task):
    return Random(task)


def raises(task):
    raise RuntimeError("bad luck,\\nand more")


number = 3
'''


@pytest.fixture
def network_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a working directory with a file of networks."""
    (tmp_path / "nets.py").write_text(FILE, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def load_network(name: str) -> Architecture:
    return architecture_for(f"nets:{name}", DIGITS)


def test_layers_are_the_children_in_order_and_the_last_linear_layer_is_the_head(network_folder: Path) -> None:
    network = load_network("mlp")
    assert network.layer_names == ("1", "4", "head")
    assert network.fully_connected == ("1", "4", "head")
    sizes = {layer: network.layout.part([layer]).size for layer in network.layer_names}
    assert sizes == {"1": 64 * 24 + 24, "4": 24 * 16 + 16, "head": 16 * 10 + 10}
    assert network.embedding_dim == 16
    assert load_network("described").layout == network.layout


def test_a_wrapper_module_is_not_a_layer(network_folder: Path) -> None:
    network = load_network("wrapped")
    assert network.layer_names == ("inner.1", "inner.4", "head")


def test_parameters_outside_modules_form_a_layer(network_folder: Path) -> None:
    network = load_network("convolutional")
    assert network.layer_names == ("own", "features", "classifier", "head")
    assert network.layout.part(["own"]).size == 1
    assert {e.name for e in network.layout.entries if not e.trainable} == {
        "blocks.body.features.1.running_mean",
        "blocks.body.features.1.running_var",
    }


def test_a_custom_model_has_the_outputs_of_its_module(network_folder: Path) -> None:
    x = torch.rand(5, 1, 8, 8)
    for name in ("mlp", "convolutional"):
        with torch.random.fork_rng():
            torch.manual_seed(3)
            plain = posy.extensions.load(f"nets:{name}", "model")(DIGITS)
        model = load_network(name).build(seed=3)
        assert isinstance(model, CustomModel)
        features, logits = model.eval()(x, features=True)
        assert torch.equal(logits, plain.eval()(x))
        assert torch.equal(model.head(features), logits)


def test_dropout_uses_the_random_numbers_of_the_batch(network_folder: Path) -> None:
    model = load_network("convolutional").build(seed=0).train()
    (layer,) = [part for part in model.modules() if isinstance(part, posy.models.layers.Dropout)]
    assert layer.features == 4  # it drops channels
    layer.numbers = torch.tensor([[0.1, 0.3, 0.1, 0.9]])
    x = torch.ones(1, 4, 2, 2)
    assert layer(x)[0, :, 0, 0].tolist() == [0, 1.25, 0, 1.25]
    assert torch.equal(layer.eval()(x), x)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_module", "must return a torch.nn.Module, not str"),
        ("no_head", r"for 2 samples it returns \(2, 64\)"),
        ("head_is_not_last", "head must come last"),
        ("few_classes", r"returns \(2, 7\); it must return logits \(2, 10\)"),
        ("wrong_shape", "2x1x8x8 raise RuntimeError"),
        ("lazy", "1.weight has no shape yet"),
        ("tied", "1.weight and 2.weight are the same tensor"),
        ("double", "1.weight is of torch.float64"),
        ("random", "must come from nn.Dropout layers"),
        ("raises", r"RuntimeError: bad luck, and more \(nets.py, line \d+\)$"),
        ("wrong_layer", "the layer 'five' is not one of its modules, which are 0, 1"),
        ("half_described", r"4\.weight belongs to none of the layers 1"),
        ("wrong_head", "nn.Linear; '0' is Flatten"),
        ("number", "not a function, but int"),
        ("nothing", "does not define nothing"),
    ],
)
def test_invalid_networks_are_refused_with_the_reason(network_folder: Path, name: str, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        build_custom(f"nets:{name}", DIGITS, {})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("elsewhere:mlp", r"file elsewhere\.py"),
        ("broken:mlp", r"cannot be imported \(SyntaxError"),
        ("torchvision:resnet19", "did you mean torchvision:resnet1"),
        ("torchvision:fcn_resnet50", "fcn_resnet50.* not have this network"),
    ],
)
def test_unknown_networks_are_refused(network_folder: Path, text: str, message: str) -> None:
    (network_folder / "broken.py").write_text("def mlp(:\n", encoding="utf-8")
    with pytest.raises(SettingsError, match=message):
        build_custom(text, DIGITS, {})


def test_network_files_are_resolved_where_the_run_starts(network_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = read_settings({"model": "nets:mlp"})
    assert settings.train.model == f"{network_folder / 'nets.py'}:mlp"
    received = read_settings({}, "a stored model", {"model": "own/nets.py:mlp"})
    assert received.train.model == settings.train.model
    monkeypatch.chdir("/")
    assert architecture_for(settings.train.model, DIGITS).layer_names == ("1", "4", "head")


@pytest.mark.parametrize("method", ["fedavg", "fedfew", "ditto", "feddrm"])
def test_stacked_training_equals_sequential_training(network_folder: Path, method: str) -> None:
    """This includes dropout: its random numbers depend only on the client and the round."""
    models = []
    for stack in ("loop", "vmap"):
        record = posy.run(
            method=method, model="nets:mlp", num_clients=3, num_server_rounds=2, max_samples=200, partition="iid",
            output_dir=str(network_folder / "runs"), run_name=f"{method}-{stack}", stack=stack,
        )  # fmt: skip
        arrays = posy.storage.load_arrays(record.path / "models/client-1.safetensors")
        models.append(np.concatenate([array.ravel() for array in arrays.values()]))
    assert np.abs(models[0] - models[1]).max() < 1e-5
    assert np.abs(models[0]).max() > 0.01


def test_a_run_trains_batchnorm_and_a_deep_head(network_folder: Path) -> None:
    record = posy.run(
        method="fedrep", model="nets:convolutional", num_clients=3, num_server_rounds=2, max_samples=300,
        partition="iid", output_dir=str(network_folder / "runs"),
    )  # fmt: skip
    arrays = posy.storage.load_arrays(record.path / "models/client-0.safetensors")
    assert arrays["head.weight"].shape == (10, 8)
    assert np.abs(arrays["blocks.body.features.1.running_mean"]).max() > 0


def test_a_torchvision_network_has_its_layers(tmp_path: Path) -> None:
    task = Task("image", (3, 32, 32), tuple("0123456789"))
    network = architecture_for("torchvision:resnet18", task)
    assert network.layer_names == ("conv1", "bn1", "layer1", "layer2", "layer3", "layer4", "head")
    assert network.layout.part(["head"]).size == 512 * 10 + 10
    with pytest.raises(SettingsError, match="2x1x8x8 raise"):
        build_custom("torchvision:resnet18", DIGITS, {})


def test_custom_networks_support_low_rank_layers(network_folder: Path) -> None:
    network = Architecture("nets:mlp", DIGITS, ranks=(("1", 5), ("head", 3)))
    assert network.layout.part(["1"]).size == 5 * 64 + 24 * 5 + 24
    assert network.layout.part(["head"]).size == 3 * 16 + 10 * 3 + 10
    assert network.build()(torch.rand(2, 1, 8, 8)).shape == (2, 10)


def test_a_low_rank_layer_has_a_bias_only_if_the_dense_layer_has_one(network_folder: Path) -> None:
    network = Architecture("nets:unbiased", DIGITS, ranks=(("1", 5), ("head", 3)))
    names = {entry.name: entry.shape for entry in network.layout.entries}
    assert names == {
        "blocks.body.1.down.weight": (5, 64), "blocks.body.1.up.weight": (24, 5), "blocks.body.3.weight": (16, 24),
        "head.down.weight": (3, 16), "head.up.weight": (10, 3),
    }  # fmt: skip


@pytest.mark.parametrize("reduction", ["svd", "svd-fedavg", "sparse", "none"])
def test_ppfe_reduces_a_network_without_biases(network_folder: Path, reduction: str) -> None:
    """With a factorisation the last two layers have the ranks 6 and 4 in stage 3, and still no bias."""
    ranks = {"svd": {"ppfe_ranks": "4;6,3"}, "svd-fedavg": {"ppfe_ranks": "6,4"}}.get(reduction, {})
    record = posy.run(
        method="ppfe", model="nets:unbiased", num_clients=2, num_server_rounds=3, max_samples=200, partition="iid",
        output_dir=str(network_folder / "runs"), local_epochs=1, ppfe_stages=3, ppfe_stage_rounds="1,1,1",
        ppfe_reduction=reduction, **ranks,
    )  # fmt: skip
    assert (record.summary["status"], record.summary["dropped"]) == ("completed", {})
    arrays = posy.storage.load_arrays(record.models / "client-0.safetensors")
    stage3 = {name: array.shape for name, array in arrays.items() if name.startswith("stage3.")}
    assert not [name for name in stage3 if name.endswith("bias")]
    factors = {name.removeprefix("stage3."): shape for name, shape in stage3.items() if "up" in name or "down" in name}
    expected = {
        "blocks.body.3.down.weight": (6, 24), "blocks.body.3.up.weight": (16, 6),
        "head.down.weight": (4, 16), "head.up.weight": (10, 4),
    }  # fmt: skip
    assert factors == (expected if reduction.startswith("svd") else {})


IMAGES = """
import numpy as np


def load():
    y = np.arange(40) % 2
    noise = np.random.default_rng(0).integers(0, 120, (40, 32, 32, 3))
    return (noise + 100 * y[:, None, None, None]).astype(np.uint8), y
"""


@pytest.mark.parametrize(
    "method", ["fedavg", *(pytest.param(name, marks=pytest.mark.slow) for name in ("fedfew", "fedrep", "ppfe"))]
)
def test_a_torchvision_resnet_trains_on_cifar_sized_images(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("images.py").write_text(IMAGES, encoding="utf-8")
    method_settings = {"ppfe_stages": 2, "ppfe_stage_rounds": "1,1"} if method == "ppfe" else {}
    record = posy.run(
        method=method, model="torchvision:resnet18", dataset="images:load", partition="iid", num_clients=2,
        run_name="a", num_server_rounds=2, local_steps=1, batch_size=8, lr=0.01, save_models=False,
        checkpoint_every=0, **method_settings,
    )  # fmt: skip
    assert (record.summary["status"], record.summary["dropped"]) == ("completed", {})
