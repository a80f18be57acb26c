"""Networks that start from weights in a file, and layers that are neither trained nor sent."""

import hashlib
import json
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from flwr.app import ConfigRecord, Context, Message, RecordDict
from torch import nn

import posy
from posy.client_app.app import app as client_app
from posy.data.task import Task
from posy.models.architecture import architecture_for
from posy.models.weights import Weights
from posy.settings import SettingsError
from posy.storage import read_arrays
from posy.strategies.methods import METHODS
from posy.strategies.registry import read_settings

DIGITS = Task("image", (1, 8, 8), tuple("0123456789"))
THREE = Task("image", (1, 8, 8), ("a", "b", "c"))
SMALL = {"max_samples": 240, "num_clients": 3, "num_server_rounds": 2, "local_epochs": 1, "model": "mlp", "lr": 0.1}
NETS = """
from torch import nn


def net(task):
    features = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten())
    return nn.Sequential(features, nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, task.num_classes))
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write a custom network to a folder and make it the working directory."""
    monkeypatch.chdir(tmp_path)
    Path("nets.py").write_text(NETS, encoding="utf-8")
    return tmp_path


def module(seed: int = 3, classes: int = 10) -> nn.Sequential:
    """Return the network of the file with weights that do not come from Posy."""
    torch.manual_seed(seed)
    features = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten())
    network = nn.Sequential(features, nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, classes))
    features[1].running_mean += 0.5
    return network


def save(network: nn.Module, name: str = "start.safetensors") -> str:
    safetensors.torch.save_file(network.state_dict(), name)
    return str(Path(name).absolute())


def method_settings(method: str) -> dict[str, Any]:
    return {"ppfe_stages": 2, "ppfe_stage_rounds": "1,1"} if method == "ppfe" else {}


def test_a_custom_network_loads_weights_by_parameter_name() -> None:
    original = module()
    started = architecture_for("nets:net", DIGITS, weights=save(original)).build(seed=7)
    x = torch.rand(5, 1, 8, 8)
    assert torch.equal(started.eval()(x), original.eval()(x))
    assert not torch.equal(architecture_for("nets:net", DIGITS).build(seed=7).eval()(x), original(x))


def test_only_a_head_with_other_classes_is_reinitialised() -> None:
    original = module(classes=10)
    architecture = architecture_for("nets:net", THREE, weights=save(original))
    first, second = (architecture.build(seed=seed) for seed in (1, 2))
    assert torch.equal(first.state_dict()["blocks.body.1.weight"], original[1].weight)
    assert torch.equal(first.state_dict()["blocks.body.0.1.running_mean"], original[0][1].running_mean)
    assert first.head.weight.shape == (3, 8) and not torch.equal(first.head.weight, second.head.weight)
    assert not torch.equal(first.head.bias, second.head.bias)


def test_a_saved_model_can_initialise_a_run() -> None:
    record = posy.run(method="fedavg", run_name="first", **SMALL)
    file = record.models / "client-1.safetensors"
    arrays, _ = read_arrays(file)
    again = posy.run(method="fedavg", run_name="again", weights=str(file), **{**SMALL, "lr": 1e-9})
    stored, _ = read_arrays(again.models / "client-0.safetensors")
    for name, array in arrays.items():
        np.testing.assert_allclose(stored[name], array, atol=1e-6)
    assert again.settings["weights"] == str(file)


def test_layers_with_a_reduced_rank_are_reinitialised() -> None:
    from dataclasses import replace

    plain = architecture_for("mlp", DIGITS)
    start = {name: torch.from_numpy(array.copy()) for name, array in plain.layout.views(plain.initial(5)).items()}
    safetensors.torch.save_file(start, "mlp.safetensors")
    loaded = architecture_for("mlp", DIGITS, weights=str(Path("mlp.safetensors").absolute()))
    np.testing.assert_array_equal(loaded.initial(1), plain.initial(5))
    reduced = replace(loaded, ranks=(("fc1", 4),)).build(seed=1).state_dict()
    assert torch.equal(reduced["blocks.fc2.linear.weight"], start["blocks.fc2.linear.weight"])
    assert reduced["blocks.fc1.linear.down.weight"].shape == (4, 64)


@pytest.mark.parametrize("method", METHODS)
def test_a_frozen_layer_is_neither_trained_nor_sent(method: str) -> None:
    plain = architecture_for("mlp", DIGITS)
    start = {name: torch.from_numpy(array.copy()) for name, array in plain.layout.views(plain.initial(5)).items()}
    safetensors.torch.save_file(start, "mlp.safetensors")
    unfrozen, record = (
        posy.run(
            method=method,
            run_name=f"f{frozen}",
            weights="mlp.safetensors",
            frozen=frozen,
            **SMALL,
            **method_settings(method),
        )
        for frozen in ("", "fc1")
    )
    assert (record.summary["status"], record.summary["dropped"]) == ("completed", {})
    first = sum(start[f"blocks.fc1.linear.{kind}"].numel() for kind in ("weight", "bias"))
    if unfrozen.summary["bytes-down"] and method not in ("fedproto", "lg-fedavg"):  # these methods never send it
        assert unfrozen.summary["bytes-down"] - record.summary["bytes-down"] >= 4 * first
    predictor = record.predictor(0)
    for member in predictor.members:
        tensors = member.state_dict()
        (name,) = (name for name in tensors if name.endswith("blocks.fc1.linear.weight") and "client" not in name)
        assert torch.equal(tensors[name], start["blocks.fc1.linear.weight"])
    last = record.clients[record.clients["partition"] == 0].iloc[-1]
    assert 0 <= last["served_accuracy" if predictor.point == "served" else "local_accuracy"] <= 1


@pytest.mark.parametrize("stack", ["loop", "vmap"])
def test_a_frozen_batchnorm_keeps_its_statistics(stack: str) -> None:
    original = module()
    settings = {**SMALL, "model": "nets:net", "weights": save(original), "stack": stack}
    record = posy.run(method="fedavg", run_name="a", frozen="0", **settings)
    x = torch.rand(5, 1, 8, 8)
    predictor = record.predictor(0)
    body = predictor.members[0].blocks["body"]
    assert torch.equal(body.get_submodule("0")(x), original[0].eval()(x))
    assert not torch.equal(body.get_submodule("1").weight, original[1].weight)  # the next layer has been trained


def write_texts() -> None:
    """Write a data set of texts with good and bad words."""
    words = {0: ["bad", "awful", "sad"], 1: ["good", "happy", "nice"]}
    rows = [f"{words[n % 2][n % 3]} day,{n % 2}" for n in range(80)]
    Path("texts.csv").write_text("text,label\n" + "\n".join(rows) + "\n", encoding="utf-8")


def write_vectors(words: dict[str, float], dimension: int = 300) -> str:
    """Write word vectors, each with one repeated number, and return their path."""
    lines = [f"{word} " + " ".join([str(value)] * dimension) for word, value in words.items()]
    Path("glove.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return "glove.txt"


def test_word_vectors_fill_the_embedding() -> None:
    path = Path(write_vectors({"the": 9.0, "good": 0.5, "bad": -0.25}))
    path.write_text("3 300\n" + path.read_text(encoding="utf-8"), encoding="utf-8")  # the header line of word2vec
    task = Task("text", (4,), ("-", "+"), vocabulary=5)
    network = architecture_for("lstm", task, weights=str(path), words=("bad", "3", "good")).build(seed=0)
    table = network.layer("embedding").tokens.weight
    expected = torch.tensor([0.0, 0.0, -0.25, 0.0, 0.5])  # padding, unknown, and the three words
    assert torch.equal(table, expected[:, None].expand(5, 300))
    fresh = architecture_for("lstm", task).build(seed=0).state_dict()
    assert all(torch.equal(t, fresh[name]) for name, t in network.state_dict().items() if "embedding" not in name)


@pytest.mark.parametrize("stack", ["loop", "vmap"])
def test_frozen_word_vectors_from_data_dir_do_not_change(stack: str) -> None:
    write_texts()
    Path("data").mkdir()
    Path(write_vectors({"good": 0.5, "happy": 0.4, "bad": -0.5, "sad": -0.4})).rename("data/glove.txt")
    settings = {
        "dataset": "texts.csv",
        "data_dir": "data",
        "num_clients": 2,
        "partition": "iid",
        "num_server_rounds": 4,
    }
    settings |= {
        "model": "lstm",
        "weights": "glove.txt",
        "frozen": "embedding",
        "lr": 0.5,
        "stack": stack,
        "text_length": 4,
    }
    record = posy.run(method="fedavg", run_name="frozen", **settings)
    assert record.settings["weights-sha256"] == sha256(Path("data/glove.txt").read_bytes()).hexdigest()
    predictor = record.predictor(0)
    words = predictor.preprocessing.words
    table = predictor.members[0].layer("embedding").tokens.weight
    assert torch.equal(table[2 + words.index("happy")], torch.full((300,), 0.4))
    assert not table[2 + words.index("awful")].any()
    assert predictor.predict("good day").label != predictor.predict("bad day").label
    trained = posy.run(method="fedavg", run_name="trained", **{**settings, "frozen": ""}).predictor(0)
    assert not torch.equal(trained.members[0].layer("embedding").tokens.weight, table)


def test_invalid_word_vectors_are_rejected() -> None:
    task = Task("text", (6,), ("-", "+"), vocabulary=4)
    words = ("good", "bad")
    for text, model, message in (
        ("good 1 2 3\n", "lstm", "line 1: cannot be read (3 numbers for 'good'; the network's embedding has 300)"),
        ("the 1\nbad " + "x " * 300, "lstm", "line 2: cannot be read (could not convert string to float: 'x')"),
        ("bad " + "nan " * 300, "lstm", "contains NaN or infinite"),
        ("the " + "1 " * 300, "lstm", "none of the 2 words"),
        ("good " + "1 " * 300, "fasttext", "300 numbers for 'good'; the network's embedding has 64"),
    ):
        Path("glove.txt").write_text(text, encoding="utf-8")
        with pytest.raises(SettingsError) as raised:
            architecture_for(model, task, weights="glove.txt", words=words).build(seed=0)
        assert message in str(raised.value)
    with pytest.raises(SettingsError, match="need the words of the data"):
        posy.run(method="fedavg", weights="glove.txt", **SMALL)
    with pytest.raises(SettingsError, match="this file does not exist, and data-dir"):
        posy.run(method="fedavg", weights="nowhere.txt", **SMALL)


def test_invalid_weights_are_rejected_before_the_run() -> None:
    Path("text.safetensors").write_text("no tensors", encoding="utf-8")
    tensors = module().state_dict()
    safetensors.torch.save_file({k: v for k, v in tensors.items() if k != "1.bias"}, "incomplete.safetensors")
    safetensors.torch.save_file({**tensors, "1.weight": torch.zeros(8, 17)}, "shape.safetensors")
    safetensors.torch.save_file({**tensors, "1.bias": torch.full((8,), torch.nan)}, "nan.safetensors")
    for name, message in (
        ("nowhere.safetensors", "this file does not exist"),
        ("text.safetensors", "cannot be read"),
        ("incomplete.safetensors", "1.bias of shape (8,) is not in the file"),
        ("shape.safetensors", "1.weight of shape (8, 16) has the shape (8, 17) in the file"),
        ("nan.safetensors", "contains NaN or infinite"),
        ("torchvision", "for torchvision's networks, not for model = "),
    ):
        with pytest.raises(SettingsError) as raised:
            posy.run(method="fedavg", weights=name, **{**SMALL, "model": "nets:net"})
        assert message in str(raised.value)
    for frozen, message in (
        ("nothing", "'nothing' is not a layer of model = 'mlp' that can be frozen; allowed: fc1, fc2"),
        ("fc1, head", "'head' is not a layer"),
    ):
        with pytest.raises(SettingsError) as raised:
            posy.run(method="fedavg", frozen=frozen, **SMALL)
        assert message in str(raised.value)
    assert not Path("runs").exists()


@pytest.mark.parametrize("method", ["fedavg", "fedrep", "feddrm", "ppfe"])
def test_a_saved_model_needs_no_weights_file(method: str) -> None:
    file = Path(save(module()))
    settings = {**SMALL, "model": "nets:net", "weights": str(file), "frozen": "0"}
    record = posy.run(method=method, run_name="a", **settings, **method_settings(method))
    image = torch.rand(8, 8).numpy().astype(np.float32) * 255
    before = record.predictor(0).predict(image.astype(np.uint8))
    file.unlink()
    again = posy.load(record.path).predictor(0)
    assert again.predict(image.astype(np.uint8)) == before
    (statistics,) = {
        member.state_dict()[name].sum().item()
        for member in again.members
        for name in member.state_dict()
        if name.endswith("0.1.running_mean") and "client" not in name
    }
    assert statistics == module()[0][1].running_mean.sum().item()


def test_a_run_rejects_a_different_weights_file() -> None:
    file = save(module(1))
    settings = {**SMALL, "method": "fedavg", "model": "nets:net", "weights": file}
    record = posy.run(run_name="a", checkpoint_every=1, **settings)
    assert record.settings["weights-sha256"] == hashlib.sha256(Path(file).read_bytes()).hexdigest()
    save(module(2))
    for again in ({"experiment": str(record.path / "config.yaml")}, {"resume": "a", "num_server_rounds": 3}):
        with pytest.raises(SettingsError, match="file that the run started with"):
            posy.run(**again)
    other = read_settings({"experiment": str(record.path / "config.yaml"), "weights": "torchvision"})
    assert other.train.weights_sha256 == ""
    context = Context(1, 1, {"partition-id": 0, "num-partitions": 1}, RecordDict(), {})
    config = ConfigRecord({"settings": json.dumps(record.settings)})
    question = Message(RecordDict({"config": config}), dst_node_id=1, message_type="query")
    # On a node, before the first round.
    with pytest.raises(SettingsError, match="file that the run started with"):
        client_app(question, context)


def test_weights_override_kaiming_initialisation_and_compare_by_content() -> None:
    file = save(module(1))
    first = architecture_for("nets:net", DIGITS, "kaiming", file)
    np.testing.assert_array_equal(first.initial(1), architecture_for("nets:net", DIGITS, weights=file).initial(2))
    save(module(2))
    second = architecture_for("nets:net", DIGITS, "kaiming", file)
    assert isinstance(first.weights, Weights) and first.weights != second.weights
    assert not np.array_equal(first.initial(1), second.initial(1))
