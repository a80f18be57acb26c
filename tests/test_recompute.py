"""Every number that a run records, recomputed from the files of the run.

These tests use Posy only for the runs. They generate the data and the partition, read the models from safetensors
files, and compute forward passes, ensembles, routing and statistics in plain NumPy and double precision. The server's
step is computed again only for FedACS and PPFE, and for numbers that a run records. The numbers of published programs
test it for other methods (tests/programs).
"""

import csv
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.lib.stride_tricks import sliding_window_view
from safetensors import safe_open

from posy.server_app.app import run
from posy.strategies.methods import METHODS

Arrays = dict[str, np.ndarray]
Members = list[tuple[Arrays, float]]
"""Models with their coefficients. A single model has coefficient 1."""

CLASSES = 3
TRAIN = (20, 13, 7, 1, 5)
TEST = (15, 10, 8, 3, 0)
HELD_CLASSES = ((0, 1, 2), (0, 1), (2,), (1,), (0, 2))
CLIENTS = range(len(TRAIN))
LR = 0.4


# -- data ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Task:
    """Samples as input to the networks, and the indices of each client."""

    x: np.ndarray
    y: np.ndarray
    train: list[list[int]]
    test: list[list[int]]


def assign_samples() -> tuple[np.ndarray, list[list[int]], list[list[int]]]:
    """Return the labels, and the training and test indices of five clients.

    They have all classes, two classes, one class, one training sample, and no test sample.
    """
    y: list[int] = []
    train, test = [], []
    for classes, n_train, n_test in zip(HELD_CLASSES, TRAIN, TEST, strict=True):
        start = len(y)
        y += [classes[i % len(classes)] for i in range(n_train + n_test)]
        train.append(list(range(start, start + n_train)))
        test.append(list(range(start + n_train, len(y))))
    return np.array(y), train, test


def features(folder: Path) -> tuple[Path, Task]:
    y, train, test = assign_samples()
    rng = np.random.default_rng(11)
    x = rng.normal(0, 1.5, (CLASSES, 5))[y] + rng.normal(0, 1.2, (len(y), 5)) * [1, 10, 0.1, 1, 1] + [0, 5, 0, -3, 0]
    x = x.astype(np.float32)
    np.savez(folder / "features.npz", x_train=x, y_train=y)
    wide = x.astype(np.float64)
    fit = wide[[index for part in train for index in part]]
    return folder / "features.npz", Task((wide - fit.mean(0)) / fit.std(0), y, train, test)


def images(folder: Path) -> tuple[Path, Task]:
    y, train, test = assign_samples()
    rng = np.random.default_rng(12)
    pixels = np.clip(rng.normal(128, 14, (CLASSES, 16, 16))[y] + rng.normal(0, 60, (len(y), 16, 16)), 0, 255)
    pixels = pixels.astype(np.uint8)
    np.savez(folder / "images.npz", x_train=pixels, y_train=y)
    return folder / "images.npz", Task(pixels[:, None] / 127.5 - 1.0, y, train, test)


def texts(folder: Path) -> tuple[Path, Task]:
    """Write texts of the words w00..w29; 2, 3, ... number them from the most frequent of the training texts on."""
    y, train, test = assign_samples()
    rng = np.random.default_rng(13)
    words = [f"w{i:02d}" for i in range(30)]
    lines = [[words[i] for i in rng.integers(5 * label, 5 * label + 16, 4) % 30] for label in y]
    counts = {word: sum(lines[index].count(word) for part in train for index in part) for word in words}
    ranked = sorted((word for word in words if counts[word]), key=lambda word: (-counts[word], word))
    with (folder / "texts.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("text", "label"), *zip(map(" ".join, lines), y.tolist(), strict=True)])
    numbers = {word: 2 + place for place, word in enumerate(ranked)}  # 1: a word of test texts only
    return folder / "texts.csv", Task(np.array([[numbers.get(w, 1) for w in line] for line in lines]), y, train, test)


# -- networks --------------------------------------------------------------------------------------------


def tensor_order(name: str) -> tuple[Any, ...]:
    """Return the order of a tensor in a flat vector: branches last, the head after the blocks, weight before bias."""
    branches = ("client_blocks", "client_head", "policy", "global_head")
    branch = next((number for number, start in enumerate(branches, start=1) if name.startswith(start)), 0)
    stem, _, kind = name.rpartition(".")
    return branch, ".head" in "." + stem, stem, kind != "weight"


def unflattened(flat: np.ndarray, names: Sequence[str], like: Mapping[str, np.ndarray]) -> Arrays:
    """Return the tensors of a flat vector with some tensors of a model."""
    arrays, start = {}, 0
    for name in sorted(names, key=tensor_order):
        stop = start + like[name].size
        arrays[name] = flat[start:stop].reshape(like[name].shape)
        start = stop
    assert start == flat.size
    return arrays


def flattened(arrays: Mapping[str, np.ndarray], names: Sequence[str]) -> np.ndarray:
    return np.concatenate([arrays[name].ravel() for name in sorted(names, key=tensor_order)])


def affine(x: np.ndarray, arrays: Mapping[str, np.ndarray], stem: str) -> np.ndarray:
    """Apply a fully connected layer, dense, in its two factors, or FedNH's head: 30 times the cosines."""
    if stem == "head" and "head.bias" not in arrays and "head.up.bias" not in arrays:
        return 30 * unit(x) @ unit(arrays["head.weight"]).T
    if f"{stem}.weight" in arrays:
        return x @ arrays[f"{stem}.weight"].T + arrays[f"{stem}.bias"]
    return (x @ arrays[f"{stem}.down.weight"].T) @ arrays[f"{stem}.up.weight"].T + arrays[f"{stem}.up.bias"]


def unit(rows: np.ndarray) -> np.ndarray:
    """Scale rows to length 1, except rows of zeros."""
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    return rows / np.where(lengths > 0, lengths, 1)


def block(x: np.ndarray, arrays: Mapping[str, np.ndarray], stem: str) -> np.ndarray:
    if f"{stem}.tokens.weight" in arrays:  # the mean of the words' embeddings
        return arrays[f"{stem}.tokens.weight"][x].mean(axis=1)
    if f"{stem}.conv.weight" in arrays:
        weight, bias = arrays[f"{stem}.conv.weight"], arrays[f"{stem}.conv.bias"]
        windows = sliding_window_view(x, weight.shape[2:], axis=(2, 3))
        y = np.tensordot(windows, weight, axes=([1, 4, 5], [1, 2, 3])).transpose(0, 3, 1, 2)
        height, width = (size // 2 * 2 for size in y.shape[2:])
        y = y[:, :, :height, :width].reshape(*y.shape[:2], height // 2, 2, width // 2, 2).max(axis=(3, 5))
        return np.maximum(y + bias[None, :, None, None], 0)
    return np.maximum(affine(x.reshape(len(x), -1), arrays, f"{stem}.linear"), 0)


def logits(arrays: Mapping[str, np.ndarray], x: np.ndarray, branch: str = "") -> np.ndarray:
    """Return the logits of a stored model, or of FedDRM's client branch if ``branch`` is ``client_``."""
    wide = {name.removeprefix("model."): array.astype(np.float64) for name, array in arrays.items()}
    embedding = embedded(wide, x, branch)
    return conditional(embedding, wide) if "policy.linear.weight" in wide else affine(embedding, wide, f"{branch}head")


def embedded(wide: Mapping[str, np.ndarray], x: np.ndarray, branch: str = "") -> np.ndarray:
    """Return the input of the head."""
    names = {name.split(".")[1] for name in wide if name.startswith("blocks.")}
    client_blocks = {name.split(".")[1] for name in wide if name.startswith("client_blocks.")}
    for name in sorted(names):  # conv1, conv2, embedding, fc1, fc2
        x = block(x, wide, f"client_blocks.{name}" if branch and name in client_blocks else f"blocks.{name}")
    return x.reshape(len(x), -1)


def conditional(x: np.ndarray, arrays: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return the logits of FedCP's two heads for features."""
    v = arrays["head.weight"].sum(axis=0)
    a = affine(x * v / np.linalg.norm(v), arrays, "policy.linear")
    a = (a - a.mean(axis=1, keepdims=True)) / np.sqrt(a.var(axis=1, keepdims=True) + 1e-5)
    a = np.maximum(a * arrays["policy.norm.weight"] + arrays["policy.norm.bias"], 0).reshape(len(x), 2, -1)
    personal, shared = np.moveaxis(softmax(np.moveaxis(a, 1, -1)), -1, 0)
    return affine(x * personal, arrays, "head") + affine(x * shared, arrays, "global_head")


def softmax(z: np.ndarray) -> np.ndarray:
    e = np.exp(z - z.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def probabilities(members: Members, x: np.ndarray) -> np.ndarray:
    """Return Σ_t β_t softmax(model_t) as probabilities, or the mean if every β is 0.

    If a β is negative, the classes share the deficit to 1 equally, and each has at least 1e-12.
    """
    beta = np.array([coefficient for _, coefficient in members])
    beta = beta / np.abs(beta).sum() if beta.any() else np.full(len(beta), 1 / len(beta))
    mixed = np.einsum("t,tnc->nc", beta, [softmax(logits(arrays, x)) for arrays, _ in members])
    mixed += (1 - mixed.sum(axis=1, keepdims=True)) / mixed.shape[1]
    return mixed if len(members) == 1 else np.maximum(mixed, 1e-12)


def cross_entropy(p: np.ndarray, y: np.ndarray) -> float:
    return float(-np.log(p[np.arange(len(y)), y]).mean())


# -- runs ------------------------------------------------------------------------------------------------


def arrays_of(path: Path) -> tuple[Arrays, dict[str, str]]:
    with safe_open(path, "numpy") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118


@dataclass
class Ran:
    """A finished run: its settings, the data it ran on, and its files."""

    method: str
    settings: dict[str, Any]
    task: Task
    path: Path

    @cached_property
    def rows(self) -> list[dict[str, str]]:
        with (self.path / "clients.csv").open(newline="") as file:
            return list(csv.DictReader(file))

    @cached_property
    def rounds(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.path / "rounds.jsonl").read_text().splitlines()]

    @cached_property
    def summary(self) -> dict[str, Any]:
        summary: dict[str, Any] = json.loads((self.path / "summary.json").read_text())
        return summary

    @cached_property
    def server(self) -> Arrays:
        return arrays_of(self.path / "models" / "server.safetensors")[0]

    @cached_property
    def stored(self) -> list[Arrays]:
        """The arrays in each client's file."""
        return [arrays_of(self.path / "models" / f"client-{c}.safetensors")[0] for c in CLIENTS]

    @cached_property
    def chosen(self) -> list[str]:
        return [arrays_of(self.path / "models" / f"client-{c}.safetensors")[1]["chosen"] for c in CLIENTS]

    @cached_property
    def before(self) -> Arrays:
        """The server's state before the last round."""
        return arrays_of(self.path / "checkpoints" / f"round-{len(self.rounds) - 1}" / "server.safetensors")[0]

    @property
    def model(self) -> Arrays:
        """The tensors of the plain model, for their shapes."""
        return {name.removeprefix("stage1."): a for name, a in self.stored[0].items() if "coefficient" not in name}

    def setting(self, key: str, default: Any) -> Any:
        return self.settings.get(f"{self.method.replace('-', '_')}_{key}", default)

    def split(self, client: int, which: str) -> tuple[np.ndarray, np.ndarray]:
        indices = (self.task.train if which == "train" else self.task.test)[client]
        return self.task.x[indices], self.task.y[indices]

    def column(self, number: int, name: str) -> dict[int, float]:
        rows = (row for row in self.rows if int(row["round"]) == number)
        return {int(row["partition"]): float(row[name]) for row in rows if row[name] != ""}

    def trained(self, number: int = 0) -> set[int]:
        return set(self.column(number or len(self.rounds), "train_loss"))


class Case(NamedTuple):
    """A method, the function that writes its data, and its settings."""

    name: str
    method: str
    source: Callable[[Path], tuple[Path, Task]]
    settings: dict[str, Any]


def case(name: str, method: str, source: Callable[[Path], tuple[Path, Task]] = features, **settings: Any) -> Case:
    return Case(name, method, source, settings)


PARTIAL = {"fraction_train": 0.5, "num_server_rounds": 3}
OWN = {
    "fedbabu": {"fedbabu_lr": 1e-30},  # fine-tuning has no effect, so the head is the initial one
    "fedfomo": {"fedfomo_validation": 0.0},  # models are compared on the training samples, all of which train
    "lg-fedavg": {"lg_fedavg_layers": 1},  # the network has two layers
}
COHORT = {"pfedme": {"pfedme_clients": "cohort"}}  # by default all its clients train
EVERY = [case(method, method, **OWN.get(method, {})) for method in METHODS]
SOME = [
    case(f"{method}, partial", method, **PARTIAL, **OWN.get(method, {}), **COHORT.get(method, {}))
    for method in METHODS
    if method not in ("local", "fedprox")
]
FURTHER = [
    case("linear", "fedavg", model="linear"),
    case("cnn", "fedavg", images),
    case("text", "fedrep", texts),
    case("fedfew K=1", "fedfew", fedfew_models=1),
    case("fedfew, the paper's step", "fedfew", fedfew_full_steps=False),
    case("fedfew, losses as they are", "fedfew", fedfew_weigh_losses=False, fedfew_mu=0.3, fedfew_server_lr=2.0),
    case("cfl, split", "cfl", cfl_eps1=1.5, cfl_eps2=0.5),
    case("fedfomo, two models", "fedfomo", fedfomo_models=2, fedfomo_validation=0.0),
    case("cwfedavg all", "cwfedavg", cwfedavg_layers="all", cwfedavg_wdr=False),
    case("cwfedavg fc, empirical", "cwfedavg", cwfedavg_layers="fc-output", cwfedavg_distribution="empirical"),
    case("feddrm, cnn", "feddrm", images, feddrm_class_weight=0.1, local_epochs=8),
    case(
        "feddrm, posterior, nothing shared",
        "feddrm",
        feddrm_routing="posterior",
        feddrm_sharing="none",
        feddrm_class_weight=0.1,
        local_epochs=12,
    ),
    case("fedacs p=0", "fedacs", fedacs_p=0.0),
    case("fedmtl, learnt", "fedmtl", fedmtl_relations="learnt", fedmtl_strength=0.5),
    case("ppfe, cnn", "ppfe", images, ppfe_ranks="8,2;4,1", num_server_rounds=6),
    case("ppfe, text", "ppfe", texts),
    case("ppfe, adaboost", "ppfe", ppfe_beta="adaboost", ppfe_ranks="9,2;3,1"),
    case("ppfe, sparse, probability", "ppfe", ppfe_reduction="sparse", ppfe_loss="probability"),
    case(
        "ppfe, of stage 1's model",
        "ppfe",
        images,
        ppfe_reduction="svd-fedavg",
        ppfe_loss="cross-entropy",
        ppfe_ranks="8,2;4,1",
    ),
    case("ppfe, not reweighted", "ppfe", ppfe_reduction="none", ppfe_reweighting=False),
    case("ppfe, no ensemble", "ppfe", ppfe_ensemble=False, ppfe_fixed_head=1),
]
CASES = [*EVERY, *SOME, *FURTHER]


@pytest.fixture
def run_case(tmp_path: Path) -> Callable[[Case], Ran]:
    """Return a function that runs a case."""

    def ran(case: Case) -> Ran:
        data, task = case.source(tmp_path)
        (tmp_path / "parts.json").write_text(json.dumps({"train": task.train, "test": task.test}))
        run_settings = {"num_server_rounds": 4, "system_accuracy": "on", "checkpoint_every": 1, **case.settings}
        common = {
            "device": "cpu",
            "dataset": str(data),
            "partition": "file",
            "partition-file": str(tmp_path / "parts.json"),
            "num-clients": len(TRAIN),
            "batch-size": 64,  # all of a client's samples: one step an epoch
            "local-epochs": 1,
            "lr": LR,
            "output-dir": str(tmp_path / "runs"),
        }
        given = {key.replace("_", "-"): value for key, value in run_settings.items()}
        recorder = run(None, {"method": case.method, **common, **given})
        return Ran(case.method, run_settings, task, recorder.directory.path)

    return ran


Check = Callable[[Ran], None]
CHECKS: list[tuple[Check, frozenset[str]]] = []
"""Each check with the names of the cases that it applies to."""


def for_runs(cases: Sequence[Case]) -> Callable[[Check], Check]:
    """Return a decorator that adds a check of some cases to :data:`CHECKS`."""

    def add(check: Check) -> Check:
        CHECKS.append((check, frozenset(case.name for case in cases)))
        return check

    return add


def methods(*names: str) -> list[Case]:
    return [case for case in CASES if case.method in names]


# -- served and local models -----------------------------------------------------------------------------


def is_head(name: str) -> bool:
    return name.removeprefix("model.").startswith("head.")


WITHOUT_HEAD = ("fedrep", "feddrm", "fedper", "fedbabu", "confree", "fedas", "fedcp", "fedpac")
"""Methods that share everything except the head."""
OTHER_HEAD = ("fednh", "pfedfda")
"""Methods whose server does not average the heads."""


def is_shared(ran: Ran, name: str) -> bool:
    return (
        is_head(name) if ran.method == "lg-fedavg" else not is_head(name) or ran.method not in WITHOUT_HEAD + OTHER_HEAD
    )


def with_shared(ran: Ran, client: int, shared: np.ndarray) -> Arrays:
    """Return a client's stored model with its shared layers replaced by the server's."""
    arrays = ran.stored[client]
    return {**arrays, **unflattened(shared, [name for name in arrays if is_shared(ran, name)], arrays)}


def classwise_names(ran: Ran) -> list[str]:
    wanted = {"output": ("head.",), "fc-output": ("head.", "blocks.fc"), "all": ("",)}[ran.setting("layers", "output")]
    return [name for name in ran.model if name.startswith(wanted)]


def cwfedavg_served(ran: Ran, state: Arrays, client: int) -> Arrays:
    model, names = ran.model, classwise_names(ran)
    mixed = state["distributions"][client] @ state["class_models"].astype(np.float64)
    shared_names = [name for name in model if name not in names]
    return {**unflattened(state["model"], shared_names, model), **unflattened(mixed, names, model)}


def fedproto_served(ran: Ran, state: Arrays, client: int) -> Arrays:
    """Return a client's network with a head that selects the nearest prototype."""
    prototypes = state["prototypes"].astype(np.float64)
    bias = np.where(state["known"] > 0, -(prototypes**2).sum(axis=1), -1e9)
    return {**ran.stored[client], "head.weight": 2 * prototypes, "head.bias": bias}


def stage_models(arrays: Arrays) -> Members:
    """Return the models and coefficients in a PPFE client's file."""
    numbers = sorted({name.split(".")[0] for name in arrays if name.startswith("stage")})
    if not numbers:
        return [(arrays, 1.0)]
    members = []
    for number in numbers:
        stage_arrays = {n.removeprefix(f"{number}."): a for n, a in arrays.items() if n.startswith(f"{number}.")}
        members.append((stage_arrays, float(stage_arrays.pop("coefficient")[0])))
    return members


def ppfe_shared(ran: Ran, stage: int, arrays: Arrays) -> list[str]:
    """Return the names of the shared tensors of a stage's model: all except the last t − 1 layers."""
    layers = sorted({name.split(".")[1] for name in arrays if name.startswith("blocks.")})
    depth = ran.setting("fixed_head", 0) if stage > 1 and ran.setting("fixed_head", 0) else stage - 1
    personal = [*(f"blocks.{layer}." for layer in layers), "head."][len(layers) + 1 - depth :]
    return [name for name in arrays if not name.startswith(tuple(personal))]


def num_stages(ran: Ran) -> int:
    return sum(name.removeprefix("finished-").isdigit() for name in ran.server)


def ppfe_coefficients(ran: Ran, client: int) -> list[float]:
    """Return the coefficients of the served ensemble after the last stage."""
    arrays, _ = arrays_of(ran.path / "models" / f"served-{client}.safetensors")
    return [coefficient for _, coefficient in stage_models(arrays)]


def ppfe_served(ran: Ran, client: int) -> Members:
    """Return the ensemble after the last stage: the server's shared layers with the client's personal layers."""
    members, total = stage_models(ran.stored[client]), num_stages(ran)
    coefficients = ppfe_coefficients(ran, client)
    served = []
    for stage, (arrays, _) in enumerate(members, start=total - len(members) + 1):
        shared = unflattened(ran.server[f"finished-{stage}"], ppfe_shared(ran, stage, arrays), arrays)
        served.append({**arrays, **shared})
    return [*zip(served, coefficients, strict=True)]


def attended(ran: Ran, state: Arrays, client: int) -> np.ndarray:
    participants = state["seen"].tolist()
    return state["mixed"][participants.index(client)] if client in participants else state["models"].mean(axis=0)


def candidates(ran: Ran, state: Arrays) -> list[Arrays]:
    return [unflattened(model, list(ran.model), ran.model) for model in state["models"]]


def served_by(ran: Ran, state: Arrays, client: int) -> Arrays:
    """Return the model that the server sends to a client, or of K models the one with the least training loss."""
    if ran.method in (*WITHOUT_HEAD, "lg-fedavg") and ran.method != "fedpac":
        return with_shared(ran, client, state["model"])
    if ran.method == "fedmtl":  # the stored model
        return ran.stored[client]
    if ran.method == "fedpac":
        arrays = with_shared(ran, client, state["model"])
        return {**arrays, **unflattened(state["heads"][client], [n for n in arrays if is_head(n)], arrays)}
    if ran.method == "fedproto":
        return fedproto_served(ran, state, client)
    if ran.method == "cwfedavg":
        return cwfedavg_served(ran, state, client)
    if ran.method in ("fedacs", "fedamp"):
        return unflattened(attended(ran, state, client), list(ran.model), ran.model)
    if ran.method in ("fedfew", "ifca"):
        x, y = ran.split(client, "train")
        return min(candidates(ran, state), key=lambda model: cross_entropy(softmax(logits(model, x)), y))
    if ran.method == "cfl":
        cluster = [state["model"], *state["split_off"]][state["cluster"][client]]
        return unflattened(cluster, list(ran.model), ran.model)
    return unflattened(state["model"], list(ran.model), ran.model)


FITTED = ("fedala", "fedfomo", "pfedfda")
"""Methods whose clients fit the served model to their training data. Published programs test these models."""


def served(ran: Ran, client: int) -> Members | None:
    if ran.method in ("local", *FITTED):
        return None
    return ppfe_served(ran, client) if ran.method == "ppfe" else [(served_by(ran, ran.server, client), 1.0)]


def has_local(ran: Ran, client: int) -> bool:
    """Return whether a client has a local model.

    Some methods keep a model, or make one in each evaluation. In the others, only the last round's cohort has one.
    """
    stateful = (
        "local", "ditto", "fedacs", "fedamp", "apfl", "pfedme", "fedfomo", "fedala", "fedmtl", "moon", "fedproto",
    )  # fmt: skip
    if ran.method in stateful:
        return any(client in ran.trained(row["round"]) for row in ran.rounds)
    tuned = ("fedavg-ft", "fedprox-ft", "fedsam-ft", "fedbabu", "per-fedavg")
    return ran.method in tuned or client in ran.trained()


@for_runs(CASES)
def check_accuracies_and_losses_are_those_of_the_stored_models(ran: Ran) -> None:
    last = len(ran.rounds)
    recorded = {
        (point, measure): ran.column(last, f"{point}_{measure}")
        for point in ("served", "local")
        for measure in ("accuracy", "loss")
    }
    expected: dict[tuple[str, str], dict[int, float]] = {key: {} for key in recorded}
    for client in CLIENTS:
        x, y = ran.split(client, "test")
        local = stage_models(ran.stored[client]) if has_local(ran, client) else None
        for point, members in (("served", served(ran, client)), ("local", local)):
            if members is None or not len(y):
                continue
            p = probabilities(members, x)
            expected[point, "accuracy"][client] = int((p.argmax(axis=1) == y).sum())
            expected[point, "loss"][client] = cross_entropy(p, y)
    for point in ("served", "local"):
        if point == "served" and ran.method in FITTED:
            continue
        right = {c: a * TEST[c] for c, a in recorded[point, "accuracy"].items()}
        assert right == pytest.approx(expected[point, "accuracy"], abs=1e-4)
        assert recorded[point, "loss"] == pytest.approx(expected[point, "loss"], rel=1e-4, abs=1e-6)
    answers = [sum(values.values()) for (_, measure), values in expected.items() if measure == "accuracy" and values]
    assert all(0 < right < sum(TEST) for right in answers)  # otherwise the comparison would show little


@for_runs(CASES)
def check_sample_counts(ran: Ran) -> None:
    for row in ran.rows:
        client = int(row["partition"])
        assert (int(row["n_train"]), int(row["n_test"])) == (TRAIN[client], TEST[client])


# -- statistics over clients -----------------------------------------------------------------------------


def spread_of(values: Mapping[int, float], *, lower_is_better: bool) -> dict[str, Any] | None:
    if not values:
        return None
    a, n = list(values.values()), [TRAIN[c] for c in values]
    mean = math.fsum(a) / len(a)
    squares = math.fsum(v * v for v in a)
    return {
        "mean": mean,
        "std": math.sqrt(math.fsum((v - mean) ** 2 for v in a) / len(a)),
        "min": min(a),
        "max": max(a),
        "weighted": math.fsum(v * w for v, w in zip(a, n, strict=True)) / sum(n),
        "tenth": math.fsum(sorted(a, reverse=lower_is_better)[: math.ceil(len(a) / 10)]) / math.ceil(len(a) / 10),
        "jain": math.fsum(a) ** 2 / (len(a) * squares) if squares else None,
        "clients": len(a),
    }


@for_runs(CASES)
def check_rounds_and_summary_follow_from_the_clients_rows(ran: Ran) -> None:
    points: dict[str, list[dict[str, Any]]] = {"served": [], "local": []}
    for number, row in enumerate(ran.rounds, start=1):
        assert row["round"] == number
        for measure in ("train_loss", "served_accuracy", "served_loss", "local_accuracy", "local_loss"):
            expected = spread_of(ran.column(number, measure), lower_is_better=measure.endswith("loss"))
            if expected is None:
                assert row[measure] is None
                continue
            assert row[measure] == pytest.approx(expected, rel=1e-9, abs=1e-12)
            if measure.endswith("accuracy"):
                points[measure.split("_")[0]].append({"round": number, **expected})
        assert row["cohort"] == len(ran.trained(number))
        for way in ("up", "down"):
            assert row[f"bytes_{way}"] == sum(ran.column(number, f"bytes_{way}").values())
    for way in ("up", "down"):
        assert ran.summary[f"bytes-{way}"] == sum(int(row[f"bytes_{way}"]) for row in ran.rows)
    for point, evaluations in points.items():
        if not evaluations:
            assert ran.summary[point] == {"last": None, "best": None, "upper-bound": None}
            continue
        most = max(e["clients"] for e in evaluations)
        best = max((e for e in evaluations if e["clients"] >= 0.9 * most), key=lambda e: e["mean"])
        assert ran.summary[point]["last"] == pytest.approx({**evaluations[-1], "missing": 0}, rel=1e-9, abs=1e-12)
        assert ran.summary[point]["upper-bound"] == pytest.approx({**best, "missing": 0}, rel=1e-9, abs=1e-12)
    assert (ran.summary["rounds"], ran.summary["dropped"]) == (len(ran.rounds), {})


# -- bytes -----------------------------------------------------------------------------------------------


def elements(arrays: Mapping[str, np.ndarray], names: Sequence[str]) -> int:
    return sum(arrays[name].size for name in names)


def ppfe_bytes(ran: Ran) -> list[tuple[int, int, int]]:
    """Return bytes (up, down before, down after) per round: shared layers of its stage and of a finished stage."""
    sizes = [ran.server[f"finished-{i + 1}"].nbytes for i in range(num_stages(ran))]
    stages = [row["stage"] for row in ran.rounds]
    result = []
    for index, stage in enumerate(stages):
        following = stages[index + 1] if index + 1 < len(stages) else None
        ends = following != stage
        after = sizes[stage - 1 if following is None else following - 1] + (sizes[stage - 1] if ends else 0)
        result.append((sizes[stage - 1], sizes[stage - 1], after))
    return result


@for_runs(CASES)
def check_bytes_are_those_of_the_arrays_sent(ran: Ran) -> None:
    model_size = elements(ran.model, list(ran.model))
    body = elements(ran.model, [name for name in ran.model if not is_head(name)])
    several = len(ran.server.get("models", ()))
    size = ran.model["head.weight"].shape[1] if ran.method == "pfedfda" else 0
    gaussians = (CLASSES + size) * size
    empirical = CLASSES * (ran.setting("distribution", "approx") == "empirical")
    head = model_size - body
    prototypes = ran.server["prototypes"].size if "prototypes" in ran.server else 0
    served, reply = {
        "local": (0, 0),
        "fedfew": (4 * several * model_size, 4 * several * model_size + 4 * several),
        "ifca": (4 * several * model_size, 4 * model_size + 8),  # the cluster is an int64
        "cwfedavg": (4 * model_size, 4 * (model_size + empirical)),
        "lg-fedavg": (4 * head, 4 * head),
        **dict.fromkeys(WITHOUT_HEAD, (4 * body, 4 * body)),
        "pfedfda": (4 * (body + gaussians), 4 * (body + gaussians)),
        "scaffold": (8 * model_size, 8 * model_size),
        "fednh": (4 * model_size, 4 * (model_size + head)),  # with the directions of the classes
        "fedcp": (4 * body, 4 * body),
        "fedas": (4 * body, 4 * body + 4),
        "fedpac": (4 * (model_size + prototypes + CLASSES), 4 * (model_size + 2 * prototypes + CLASSES + 1)),
        "fedproto": (4 * prototypes + 4 * CLASSES, 4 * prototypes + 4 * CLASSES),
    }.get(ran.method, (4 * model_size, 4 * model_size))
    sent = ppfe_bytes(ran) if ran.method == "ppfe" else [(reply, served, served)] * len(ran.rounds)
    trainers = set[int]()
    for number, (up, down, down_after) in enumerate(sent, start=1):
        trained = ran.trained(number)
        ups, downs, downs_after = (dict.fromkeys(CLIENTS, way) for way in (up, down, down_after))
        if ran.method == "fedfomo":  # models of other clients that have trained, and a weight of each
            before = {c: min(ran.setting("models", 4), len(trainers - {c})) for c in CLIENTS}
            trainers |= trained
            after = {c: min(ran.setting("models", 4), len(trainers - {c})) for c in CLIENTS}
            ups = {c: 4 * (model_size + 1 + before[c]) for c in CLIENTS}
            downs, downs_after = ({c: 4 * model_size * count[c] for c in CLIENTS} for count in (before, after))
        assert ran.column(number, "bytes_up") == {c: ups[c] * (c in trained) for c in CLIENTS}
        if ran.method == "ppfe" and "fraction_train" in ran.settings:
            continue  # a client that missed the end of a stage lacks several stages
        assert ran.column(number, "bytes_down") == {c: downs[c] * (c in trained) + downs_after[c] for c in CLIENTS}


# -- the server's step -----------------------------------------------------------------------------------


def local_flat(ran: Ran, client: int, names: Sequence[str] | None = None) -> np.ndarray:
    arrays = ran.stored[client]
    return flattened(arrays, list(arrays) if names is None else names).astype(np.float64)


def weighted(rows: Sequence[np.ndarray], clients: Sequence[int]) -> np.ndarray:
    return np.average(rows, axis=0, weights=[TRAIN[c] for c in clients])


MEANS = ("fedavg", "fedprox", "feduv", "scaffold", "fedbn", "moon")  # of networks without normalisation
MEANS += ("fedrep", "feddrm", "fedper", "lg-fedavg", "fedala", "fednh", "pfedfda", "fedpac")


@for_runs(methods(*MEANS))
def check_the_mean_model_is_that_of_the_clients_models(ran: Ran) -> None:
    clients = sorted(ran.trained())
    names = [n for n in ran.model if is_shared(ran, n)]
    expected = weighted([local_flat(ran, c, names) for c in clients], clients)
    mean_model = ran.server["model"]
    if ran.method in OTHER_HEAD:  # the other entries are not a mean of stored models
        mean_model = mean_model[: len(expected)]
    np.testing.assert_allclose(mean_model, expected, rtol=1e-4, atol=1e-6)


@for_runs(methods("fedacs"))
def check_attention_and_mixed_models(ran: Ran) -> None:
    server, participants, last = ran.server, ran.server["seen"].tolist(), len(ran.rounds)
    assert participants == sorted(set().union(*(ran.trained(row["round"]) for row in ran.rounds)))
    models = server["models"].astype(np.float64)
    for client in participants:  # a client that skipped the last round has its latest model
        if client in ran.trained():
            np.testing.assert_array_equal(server["models"][participants.index(client)], local_flat(ran, client))
    cosine = np.array([[a @ b / np.sqrt((a @ a) * (b @ b)) for b in models] for a in models])
    np.fill_diagonal(cosine, 1.0)
    threshold = np.quantile(cosine, ran.setting("p", 0.5))
    weights = np.where((cosine > threshold) & (cosine > 0), cosine, 0.0)
    np.fill_diagonal(weights, 1.0)
    weights /= weights.sum(axis=1, keepdims=True)
    assert server["pictured"][-1] == last
    drawn = server["pictures"][-1]
    np.testing.assert_allclose(drawn[np.ix_(participants, participants)], weights, rtol=2e-3, atol=1e-6)
    absent = [c for c in CLIENTS if c not in participants]
    assert not drawn[absent].any() and not drawn[:, absent].any()
    np.testing.assert_allclose(server["mixed"], weights @ models, rtol=1e-3, atol=1e-5)
    off_diagonal = weights - np.diag(np.diag(weights))
    assert ran.rounds[-1]["attention_to_self"] == pytest.approx(np.diag(weights).mean(), rel=1e-3)
    assert ran.rounds[-1]["collaborators"] == pytest.approx((off_diagonal > 0).sum(axis=1).mean())


@for_runs(methods("fedfew"))
def check_fedfews_weights_objective_and_counts(ran: Ran) -> None:
    clients = sorted(ran.trained())
    mu, n = ran.setting("mu", 0.01), np.array([TRAIN[c] for c in clients], np.float64)
    losses = ran.server["losses"][clients]
    scale = n / n.sum() if ran.setting("weigh_losses", True) else np.ones(len(n))
    z = -losses * scale[:, None] / mu
    inner = softmax(z)
    log_s = z.max(axis=1) + np.log(np.exp(z - z.max(axis=1, keepdims=True)).sum(axis=1))
    outer = softmax(-log_s)
    row = ran.rounds[-1]
    np.testing.assert_allclose(ran.server["weights"][clients], inner, rtol=1e-6, atol=1e-12)
    entropies = [-sum(w * math.log(w) for w in row_ if w > 0) for row_ in inner]
    top = (-log_s).max()
    objective = mu * (top + math.log(np.exp(-log_s - top).sum()))
    assert row["objective"] == pytest.approx(objective, rel=1e-6, abs=1e-9)
    assert ran.server["objectives"][-1].tolist() == [len(ran.rounds), row["objective"]]
    assert row["inner_entropy"] == pytest.approx(np.mean(entropies), rel=1e-5, abs=1e-9)
    assert row["inner_max"] == pytest.approx(inner.max(axis=1).mean())
    assert row["outer_cv"] == pytest.approx(outer.std() / outer.mean(), rel=1e-6)
    best = losses.argmin(axis=1)
    assert row["clients_of_model"] == [int((best == k).sum()) for k in range(losses.shape[1])]
    assert [ran.chosen[c] for c in clients] == [str(k) for k in best]


@for_runs(methods("fedfew", "ifca"))
def check_the_chosen_model_is_the_best_on_the_clients_training_data(ran: Ran) -> None:
    for client, chosen in ran.column(len(ran.rounds), "chosen").items():
        x, y = ran.split(client, "train")
        losses = [cross_entropy(softmax(logits(m, x)), y) for m in candidates(ran, ran.server)]
        assert losses[int(chosen)] == pytest.approx(min(losses), rel=1e-5)


@for_runs(methods("ppfe"))
def check_ppfes_stages_and_the_mean_of_the_last(ran: Ran) -> None:
    total = num_stages(ran)
    assert ran.rounds[-1]["stage"] == total > 1
    assert all(row["shared_parameters"] == ran.server[f"finished-{row['stage']}"].size for row in ran.rounds)
    assert ran.trained() == set(CLIENTS)
    last = [stage_models(ran.stored[c])[-1][0] for c in CLIENTS]
    shared = [flattened(arrays, ppfe_shared(ran, total, arrays)) for arrays in last]
    np.testing.assert_allclose(ran.server[f"finished-{total}"], np.mean(shared, axis=0), rtol=1e-4, atol=1e-6)


def boosted(ran: Ran, client: int, models: Sequence[Arrays]) -> list[float]:
    """Return the coefficients β_1..β_T that AdaBoost gives to models (Algorithm 1, Reweight)."""
    x, y = ran.split(client, "train")
    weights, betas = np.ones(len(y)), list[float]()

    def losses(members: Members) -> np.ndarray:
        p = probabilities(members, x)
        if ran.setting("loss", "zero-one") == "zero-one":
            return (p.argmax(axis=1) != y).astype(np.float64)
        if ran.setting("loss", "zero-one") == "cross-entropy":
            surprise = -np.log(p[np.arange(len(y)), y])
            return surprise / surprise.max()
        return 1 - p[np.arange(len(y)), y]

    def beta_of(loss: np.ndarray) -> float:
        error = min(max(float(weights @ loss / weights.sum()), 1e-6), 1 - 1e-6)
        beta = 0.5 * math.log((1 - error) / error)
        return beta if ran.setting("beta", "samme") == "adaboost" else max(0.0, beta + 0.5 * math.log(CLASSES - 1))

    for number, model in enumerate(models):
        loss = losses([(model, 1.0)])
        beta = beta_of(loss)
        if number:
            loss = losses([*zip(models[:number], betas, strict=True), (model, beta)])
            beta = beta_of(loss)
        betas.append(beta)
        if ran.setting("reweighting", True):
            weights = weights * np.exp(beta * loss)
            weights *= len(weights) / weights.sum()
    return betas


@for_runs([c for c in methods("ppfe") if c.settings.get("ppfe_ensemble", True)])
def check_ppfes_coefficients(ran: Ran) -> None:
    """Compare the coefficients of the served ensemble, and of the ensemble after the last local training."""
    for client in CLIENTS:
        finished = boosted(ran, client, [arrays for arrays, _ in ppfe_served(ran, client)])
        np.testing.assert_allclose(ppfe_coefficients(ran, client), finished, rtol=1e-3, atol=1e-5)
        stored = stage_models(ran.stored[client])
        assert len(stored) == num_stages(ran)
        expected = boosted(ran, client, [arrays for arrays, _ in stored])
        np.testing.assert_allclose([coefficient for _, coefficient in stored], expected, rtol=1e-3, atol=1e-5)


STARTS = ("fedavg", "fedavg-ft", "fedprox", "fedacs", "ifca", "fedamp", "fedfew", "cwfedavg")


@for_runs(methods(*STARTS, "fedprox-ft", "fedsam-ft", "fedbabu", "cfl", "fedmgda", "fednh", "scaffold", "fedbn"))
def check_the_training_loss_is_that_of_what_the_clients_started_from(ran: Ran) -> None:
    """All of a client's samples form one batch, so the loss of the only epoch precedes its only step."""
    for client, recorded in ran.column(len(ran.rounds), "train_loss").items():
        x, y = ran.split(client, "train")
        if ran.method == "fedamp":
            participants = ran.before["seen"].tolist()
            if client not in participants:
                continue
            start = unflattened(ran.before["models"][participants.index(client)], list(ran.model), ran.model)
        elif ran.method == "fedfew":
            start = candidates(ran, ran.before)[int(ran.chosen[client])]
        else:
            start = served_by(ran, ran.before, client)
        expected = cross_entropy(softmax(logits(start, x)), y)
        if ran.method == "cwfedavg" and ran.setting("wdr", True):
            norms = np.linalg.norm(start["head.weight"].astype(np.float64), axis=1)
            distance = np.bincount(y, minlength=CLASSES) / len(y) - norms / norms.sum()
            expected += 10.0 * float(np.linalg.norm(distance))
        assert recorded == pytest.approx(expected, rel=1e-4, abs=1e-6)


# -- system and routing accuracy -------------------------------------------------------------------------


def pooled(ran: Ran) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    indices = np.concatenate([np.array(part, np.int64) for part in ran.task.test])
    return ran.task.x[indices], ran.task.y[indices], np.repeat(list(CLIENTS), TEST)


@for_runs([c for c in CASES if c.method != "feddrm"])
def check_system_accuracy_is_a_majority_vote(ran: Ran) -> None:
    x, y, _ = pooled(ran)
    votes = [probabilities(stage_models(arrays), x).argmax(axis=1) for arrays in ran.stored]
    counts = np.array([[sum(int(v[i] == label) for v in votes) for label in range(CLASSES)] for i in range(len(y))])
    right = (counts.argmax(axis=1) == y).sum()  # ties go to the lowest class
    assert ran.summary["system-accuracy"] * len(y) == pytest.approx(right, abs=1e-4)


@for_runs(methods("feddrm"))
def check_feddrms_system_and_routing_accuracy(ran: Ran) -> None:
    x, y, owner = pooled(ran)
    models = [with_shared(ran, c, ran.server["model"]) for c in CLIENTS]
    match = logits(models[0], x, "client_")
    if ran.setting("routing", "density") == "density":
        match = match - np.log(np.array(TRAIN) / sum(TRAIN))
    chosen = match.argmax(axis=1)
    answers = np.stack([logits(model, x).argmax(axis=1) for model in models])[chosen, np.arange(len(y))]
    assert len(set(chosen.tolist())) > 1 or "local_epochs" not in ran.settings  # few steps send all to one client
    assert ran.summary["system-accuracy"] * len(y) == pytest.approx((answers == y).sum(), abs=1e-4)
    assert ran.summary["routing-accuracy"] == pytest.approx((chosen == owner).mean())


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_numbers_of_a_run_follow_from_its_files(case: Case, run_case: Callable[[Case], Ran]) -> None:
    """Run each case once, and make all checks of its method."""
    ran = run_case(case)
    for check, names in CHECKS:
        if case.name in names:
            check(ran)
