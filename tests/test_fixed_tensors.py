"""Tensors without gradient are stored with every method. They are not trained, sent or noised."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from nodes import NodeGrid

import posy
from posy.client_app.training.networks import Network
from posy.client_app.workspace import workspace_for
from posy.data.task import Task
from posy.models.architecture import Architecture, architecture_for
from posy.server_app.federation import Federation
from posy.server_app.grids import WaveGrid
from posy.settings import SettingsError
from posy.storage import load_arrays
from posy.strategies.methods import METHODS
from posy.strategies.registry import read_settings

DIGITS = Task("image", (1, 8, 8), tuple("0123456789"))
FILE = '''
import torch
from torch import nn


class Adapted(nn.Module):
    """LoRA: y = W x + b + B A x with W and b fixed. ``hidden`` keeps W and b out of the module's tensors."""

    def __init__(self, inputs, outputs, hidden):
        super().__init__()
        base = nn.Linear(inputs, outputs).requires_grad_(False)
        self.constants = [base] if hidden else []
        if not hidden:
            self.base = base
        self.a = nn.Parameter(torch.randn(3, inputs) / 8)
        self.b = nn.Parameter(torch.zeros(outputs, 3))

    def forward(self, x):
        base = self.constants[0] if self.constants else self.base
        return base(x) + x @ self.a.T @ self.b.T


class Constant(nn.Module):
    """A fixed module. ``hidden`` keeps its tensors out of the module, and the module in evaluation mode."""

    def __init__(self, module, hidden):
        super().__init__()
        module.requires_grad_(False)
        self.constants = [module.eval()] if hidden else []
        if not hidden:
            self.module = module

    def forward(self, x):
        return (self.constants[0] if self.constants else self.module)(x)


def layers(task, hidden):
    return nn.Sequential(
        nn.Flatten(), Constant(nn.Linear(64, 24), hidden), nn.ReLU(), Adapted(24, 16, hidden), nn.ReLU(),
        nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, task.num_classes),
    )


def fixed(task):
    return layers(task, hidden=False)


def hidden(task):
    return layers(task, hidden=True)


def normalised(task, hidden):
    norm = nn.BatchNorm2d(4)
    norm.running_mean += torch.linspace(-0.3, 0.3, 4)
    stem = Constant(nn.Sequential(nn.Conv2d(1, 4, 3), norm), hidden)
    tail = nn.Sequential(nn.Conv2d(4, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten())
    return nn.Sequential(stem, nn.ReLU(), tail, nn.Linear(16, task.num_classes))


def norm_fixed(task):
    return normalised(task, hidden=False)


def norm_hidden(task):
    return normalised(task, hidden=True)


def bias_only(task):
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, task.num_classes))
    net[1].weight.requires_grad_(False)
    return net


def head_fixed(task):
    net = nn.Sequential(
        nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, task.num_classes)
    )
    net[5].requires_grad_(False)
    return net


def head_hidden(task):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, task.num_classes))


def nothing(task):
    return fixed(task).requires_grad_(False)


class Shifted(nn.Module):
    """A parameter and a buffer outside of its modules."""

    def __init__(self, task):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.register_buffer("shift", torch.full((1,), 0.5))
        self.last = nn.Linear(64, task.num_classes)

    def forward(self, x):
        return self.last((x * self.scale - self.shift).flatten(1))


def buffered(task):
    return Shifted(task)


def buffered_fixed(task):
    net = Shifted(task)
    net.scale.requires_grad_(False)
    return net


def tied_fixed(task):
    first, second = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)
    second.weight = first.weight.requires_grad_(False)
    return nn.Sequential(nn.Flatten(), first, second, nn.Linear(64, task.num_classes))


def random(task):
    net = fixed(task)
    with torch.no_grad():
        net[1].module.weight.copy_(torch.rand(24, 64, generator=torch.Generator().manual_seed(random.calls)))
    random.calls += 1
    return net


random.calls = 0
'''
SMALL: dict[str, Any] = {
    "max_samples": 240, "num_clients": 3, "num_server_rounds": 3, "local_epochs": 1, "lr": 0.1, "partition": "iid",
}  # fmt: skip


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Change into a folder with the file of the networks."""
    monkeypatch.chdir(tmp_path)
    Path("nets.py").write_text(FILE, encoding="utf-8")
    return tmp_path


def options(method: str) -> dict[str, Any]:
    return {"ppfe_ranks": "6,4", "ppfe_stages": 3} if method == "ppfe" else {}


def network(name: str, **arguments: Any) -> Architecture:
    return architecture_for(f"nets:{name}", DIGITS, **arguments)


def bits(record: Any, name: str) -> list[bytes]:
    """Return the bytes of a tensor in each member of client 0's stored model."""
    arrays = load_arrays(record.models / "client-0.safetensors")
    return [array.tobytes() for key, array in sorted(arrays.items()) if key.endswith(name)]


def test_the_flat_vector_holds_only_trained_tensors() -> None:
    plain = network("fixed")
    assert [entry.name for entry in plain.layout.entries] == [
        "blocks.body.3.a", "blocks.body.3.b",
        "blocks.body.5.weight", "blocks.body.5.bias", "head.weight", "head.bias",
    ]  # fmt: skip
    assert plain.layout.size == 3 * 24 + 16 * 3 + 12 * 16 + 12 + 10 * 12 + 10
    assert plain.layer_names == ("3", "5", "head")
    assert plain.fully_connected == ("5", "head")
    assert {name: array.shape for name, array in plain.fixed.items()} == {
        "blocks.body.1.module.weight": (24, 64), "blocks.body.1.module.bias": (24,),
        "blocks.body.3.base.weight": (16, 24), "blocks.body.3.base.bias": (16,),
    }  # fmt: skip
    single = network("bias_only")
    assert [entry.name for entry in single.layout.entries] == ["blocks.body.1.bias", "head.weight", "head.bias"]
    assert single.fully_connected == ("head",)


@pytest.mark.parametrize("method", METHODS)
def test_fixed_tensors_are_constant_in_every_method(method: str) -> None:
    """A network that hides its constants from Posy gives the same bits."""
    runs = [
        posy.run(method=method, model=f"nets:{name}", run_name=name, stack="loop", **SMALL, **options(method))
        for name in ("fixed", "hidden")
    ]
    visible, hidden = runs
    assert (visible.summary["status"], visible.summary["dropped"]) == ("completed", {})
    columns = [c for c in ("served_loss", "local_loss", "bytes_up", "bytes_down") if c in visible.clients]
    assert {"served_loss", "local_loss"} & set(columns)
    for column in columns:
        np.testing.assert_array_equal(visible.clients[column], hidden.clients[column])
    assert (visible.summary["bytes-up"], visible.summary["bytes-down"]) == tuple(
        hidden.summary[key] for key in ("bytes-up", "bytes-down")
    )
    fixed = network("fixed").fixed
    for name, array in fixed.items():
        assert set(bits(visible, name)) == {array.tobytes()}
    stored = load_arrays(hidden.models / "client-0.safetensors")
    for name, array in stored.items():
        np.testing.assert_array_equal(load_arrays(visible.models / "client-0.safetensors")[name], array)


@pytest.mark.parametrize("method", ["fedavg", "fedrep", "fedfew", "ditto", "scaffold", "feddrm"])
def test_stacked_training_equals_looped_training(method: str) -> None:
    models = []
    for stack in ("loop", "vmap"):
        record = posy.run(method=method, model="nets:fixed", run_name=stack, stack=stack, **SMALL)
        models.append(load_arrays(record.models / "client-1.safetensors"))
    for name, array in models[0].items():
        np.testing.assert_allclose(models[1][name], array, atol=1e-5)


def trained_in_pytorch(personal: tuple[str, ...]) -> list[dict[str, torch.Tensor]]:
    """Return the clients' local models, computed in PyTorch: FedAvg of all tensors except the personal layers."""
    settings = read_settings({k.replace("_", "-"): v for k, v in SMALL.items()} | {"model": "nets:fixed"})
    workspace = workspace_for(settings, "")
    data = [workspace.client_data(client) for client in range(3)]
    start = workspace.architecture.build(seed=settings.run.seed)
    net = workspace.architecture.build(seed=0)  # fixed tensors do not depend on the run's seed
    names = [name for name, parameter in net.named_parameters() if parameter.requires_grad]
    initial = {name: tensor.detach().clone() for name, tensor in start.named_parameters() if name in names}
    local = [dict(initial) for _ in range(3)]
    shared = dict(initial)
    for _ in range(3):
        for client in range(3):
            begin = {name: local[client][name] if name.startswith(personal) else shared[name] for name in names}
            net.load_state_dict(begin, strict=False)
            trained = [parameter for parameter in net.parameters() if parameter.requires_grad]
            optimiser = torch.optim.SGD(trained, lr=0.1)
            for _ in range(4):
                optimiser.zero_grad()
                F.cross_entropy(net(data[client].x_train), data[client].y_train).backward()
                optimiser.step()
            local[client] = {name: net.state_dict()[name].clone() for name in names}
        sizes = torch.tensor([float(len(each.y_train)) for each in data])
        shares = sizes / sizes.sum()
        shared = {name: sum(share * each[name] for share, each in zip(shares, local, strict=True)) for name in names}
    return [{**dict(net.state_dict()), **each} for each in local]


@pytest.mark.parametrize("stack", ["loop", "vmap"])
@pytest.mark.parametrize(
    ("method", "personal", "extra"),
    [
        ("fedavg", (), {}),
        ("fedper", ("head",), {}),
        ("fedper", ("head", "blocks.body.5"), {"fedper_layers": 2}),
    ],
)
def test_adapter_training_matches_pytorch(
    method: str, personal: tuple[str, ...], extra: dict[str, Any], stack: str
) -> None:
    """A batch holds all samples of a client, so the order of the samples has no effect."""
    settings = {**SMALL, "local_epochs": 4, "batch_size": 1000, "model": "nets:fixed", "stack": stack, **extra}
    record = posy.run(method=method, run_name="a", **settings)
    for client, expected in enumerate(trained_in_pytorch(personal or ("none",))):
        stored = load_arrays(record.models / f"client-{client}.safetensors")
        assert set(stored) == set(expected)
        for name, tensor in expected.items():
            np.testing.assert_allclose(stored[name], tensor.numpy(), atol=2e-6)
    assert record.summary["bytes-up"] > 0


@pytest.mark.parametrize("method", ["fedavg", "fedbn", "fedfew", "feddrm", "ppfe"])
@pytest.mark.parametrize("stack", ["loop", "vmap"])
def test_frozen_batchnorm_keeps_its_statistics(method: str, stack: str) -> None:
    runs = [
        posy.run(method=method, model=f"nets:{name}", run_name=name, stack=stack, **SMALL, **options(method))
        for name in ("norm_fixed", "norm_hidden")
    ]
    for column in ("served_loss", "local_loss"):
        np.testing.assert_allclose(runs[0].clients[column], runs[1].clients[column], rtol=1e-6)
    (statistics,) = set(bits(runs[0], "0.module.1.running_mean"))
    assert np.frombuffer(statistics, np.float32) == pytest.approx([-0.3, -0.1, 0.1, 0.3])


def test_frozen_batchnorm_accepts_batches_of_one() -> None:
    architecture = network("norm_fixed")
    assert Network(architecture.build, architecture.layout, torch.device("cpu")).smallest_batch == 1


@pytest.mark.parametrize("method", ["fedavg", "fedrep", "ppfe", "feddrm"])
def test_saved_model_predicts_with_its_fixed_tensors(method: str) -> None:
    record = posy.run(method=method, model="nets:fixed", run_name="a", checkpoint_every=1, **SMALL, **options(method))
    client = posy.load(record.path).predictor(0)
    settings = read_settings({}, "the run", dict(record.settings))
    data = workspace_for(settings, "").client_data(0)
    with torch.no_grad():
        probabilities = client(data.x_test)
    traced = torch.jit.trace(client, data.x_test)
    torch.testing.assert_close(traced(data.x_test), probabilities)
    last = record.clients[record.clients["partition"] == 0].iloc[-1]
    accuracy = last["served_accuracy" if client.point == "served" else "local_accuracy"]
    assert float((probabilities.argmax(1) == data.y_test).float().mean()) == pytest.approx(accuracy)


def test_resumed_run_with_fixed_tensors_is_bit_identical() -> None:
    settings = {**SMALL, "model": "nets:fixed", "checkpoint_every": 1}
    uninterrupted = posy.run(method="fedrep", run_name="uninterrupted", **settings)
    posy.run(method="fedrep", run_name="parts", **{**settings, "num_server_rounds": 2})
    parts = posy.run(resume="parts", num_server_rounds=3)
    for client in range(3):
        first, second = (load_arrays(r.models / f"client-{client}.safetensors") for r in (uninterrupted, parts))
        for name, array in first.items():
            np.testing.assert_array_equal(second[name], array)


def test_noise_does_not_change_fixed_tensors() -> None:
    settings = {**SMALL, "model": "nets:fixed", "dp": "local", "dp_clip": 0.001, "dp_epsilon": 1.0, "dp_delta": 1e-5}
    record = posy.run(method="fedavg", run_name="noise", **settings)
    for name, array in network("fixed").fixed.items():
        assert set(bits(record, name)) == {array.tobytes()}
    assert posy.run(method="fedavg", run_name="batchnorm", **{**settings, "model": "nets:norm_fixed"}).summary["status"]


def test_weights_file_sets_fixed_tensors_but_not_adapters() -> None:
    torch.manual_seed(9)
    namespace: dict[str, Any] = {}
    exec(compile(FILE, "nets.py", "exec"), namespace)  # the module without Posy
    base = {k: v for k, v in namespace["fixed"](DIGITS).state_dict().items() if k not in ("3.a", "3.b")}
    safetensors.torch.save_file(base, "base.safetensors")
    loaded = network("fixed", weights=str(Path("base.safetensors").absolute()))
    assert np.array_equal(loaded.fixed["blocks.body.3.base.weight"], base["3.base.weight"].numpy())
    plain = network("fixed")
    np.testing.assert_array_equal(loaded.layout.views(loaded.initial(1))["blocks.body.3.a"],
                                  plain.layout.views(plain.initial(1))["blocks.body.3.a"])  # fmt: skip
    incomplete = {k: v for k, v in base.items() if k != "1.module.bias"}
    safetensors.torch.save_file(incomplete, "incomplete.safetensors")
    with pytest.raises(SettingsError, match=r"1\.module\.bias of shape"):
        network("fixed", weights=str(Path("incomplete.safetensors").absolute())).build()
    record = posy.run(method="fedrep", model="nets:fixed", weights="base.safetensors", run_name="a", **SMALL)
    assert set(bits(record, "3.base.weight")) == {base["3.base.weight"].numpy().tobytes()}


def test_low_rank_layers_do_not_change_fixed_layers() -> None:
    """A low-rank layer before the frozen layer draws other random numbers than a dense layer."""
    dense, reduced = (Architecture("mlp", DIGITS, frozen=("fc2",), ranks=ranks) for ranks in ((), (("fc1", 4),)))
    built = reduced.build(seed=3).state_dict()
    assert built["blocks.fc1.linear.down.weight"].shape == (4, 64)
    for name, array in dense.fixed.items():
        np.testing.assert_array_equal(reduced.fixed[name], array)
        np.testing.assert_array_equal(built[name], array)


FROZEN_HEAD = {"fedavg", "fedbn", "fedfew", "ditto", "scaffold", "fedper", "lg-fedavg", "ppfe", "fedala"}


@pytest.mark.parametrize("method", METHODS)
def test_fixed_head_works_or_is_rejected(method: str) -> None:
    settings = {**SMALL, "model": "nets:head_fixed", "run_name": "a", **options(method)}
    try:
        record = posy.run(method=method, **settings)
    except SettingsError as error:
        assert method not in FROZEN_HEAD
        assert "head" in str(error) and "another method" in str(error)
        assert not Path("runs").exists()
        return
    assert (record.summary["status"], record.summary["dropped"]) == ("completed", {})
    assert set(bits(record, "head.weight")) == {network("head_fixed").fixed["head.weight"].tobytes()}


def test_invalid_fixed_tensors_are_rejected() -> None:
    with pytest.raises(SettingsError, match="none of its parameters"):
        posy.run(method="fedavg", model="nets:nothing", **SMALL)
    with pytest.raises(SettingsError, match=r"1\.module\.weight .* values differ"):
        posy.run(method="fedavg", model="nets:random", **SMALL)
    assert not Path("runs").exists()


def test_fixed_tensors_may_be_tied() -> None:
    record = posy.run(method="fedavg", model="nets:tied_fixed", run_name="a", **SMALL)
    assert (record.summary["status"], record.summary["dropped"]) == ("completed", {})
    assert bits(record, "1.weight") == bits(record, "2.weight")
    assert posy.load(record.path).predictor(0).members[0].state_dict()["blocks.body.1.weight"].shape == (64, 64)


def test_the_documented_adapter_runs() -> None:
    page = (Path(__file__).parents[1] / "docs/how-to/custom-code.md").read_text(encoding="utf-8")
    (code,) = (block for block in page.split("```python\n") if block.startswith("# mylora.py"))
    Path("mylora.py").write_text(code.partition("```")[0], encoding="utf-8")
    record = posy.run(method="fedrep", model="mylora:lora", run_name="a", **SMALL)
    assert (record.summary["status"], record.summary["dropped"]) == ("completed", {})
    (tensor,) = set(bits(record, "1.base.weight"))
    assert tensor == architecture_for("mylora:lora", DIGITS).fixed["blocks.body.1.base.weight"].tobytes()


def test_node_with_different_fixed_tensors_is_rejected() -> None:
    settings = read_settings({"model": "nets:fixed", "num-clients": 2, "max-samples": 240, "join-timeout": 5})
    federation = Federation(WaveGrid(NodeGrid(*({"partition-id": i, "num-partitions": 2} for i in (0, 1)))), settings)
    rounded = [number * (1 + 1e-6) for number in network("fixed").fingerprint]  # as on another processor
    assert len(federation.join(rounded)) == 2
    other = Federation(WaveGrid(NodeGrid({"partition-id": 0, "num-partitions": 1})), settings)
    with pytest.raises(SettingsError, match="fixed tensors differ"):
        other.join([-number for number in network("fixed").fingerprint])


def test_the_fingerprint_of_fixed_tensors_by_hand() -> None:
    plain = network("bias_only")
    (weight,) = plain.fixed.values()
    norm = float(np.sqrt(np.square(weight.astype(np.float64)).sum()))
    projection = sum(float(value) * np.cos(index) for index, value in enumerate(weight.ravel())) / norm
    assert plain.fingerprint == pytest.approx([norm, projection])
    assert network("head_hidden").fingerprint == []


def test_buffers_outside_the_layers_belong_to_the_network() -> None:
    names = [entry.name for entry in network("buffered").layout.entries]
    assert names == ["blocks.body.scale", "blocks.body.shift", "head.weight", "head.bias"]
    record = posy.run(method="fedavg", model="nets:buffered_fixed", run_name="a", **SMALL)
    assert (record.summary["status"], record.summary["dropped"]) == ("completed", {})
    assert load_arrays(record.models / "client-0.safetensors")["blocks.body.shift"].tolist() == [0.5]
