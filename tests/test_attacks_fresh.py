"""Attacks of a submitter or an operator on a site with the default policy. Docstrings describe the attacks."""

import io
import json
import stat
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from nodes import NodeGrid

from posy.client_app.app import app as client_app
from posy.client_app.policy import PolicyError, check_once, limited_scores, violations
from posy.client_app.privacy import check_privacy
from posy.data.errors import DataError
from posy.data.policy import Policy
from posy.data.task import Task
from posy.data.text import hashed
from posy.deploy.apps import Apps
from posy.deploy.foreign import foreign_code
from posy.deploy.sessions import Sessions
from posy.deploy.tasks import Bundle, Run
from posy.deploy.tasks import Task as NodeTask
from posy.deploy.worker import LastAnswer, serve
from posy.flower import record_of
from posy.models.build import build_model, count_parameters
from posy.models.catalogue import MODELS
from posy.settings import SettingsError
from posy.storage import exclusive
from posy.strategies.methods import settings_class
from posy.strategies.registry import from_json, read_settings

ROWS, FEATURES = 60, 3
INPUTS = "f0,f1,f2"
LINEAR = FEATURES * 2 + 2
"""Parameters of the linear model with two classes."""
Config = dict[str, Any]


def values(method: str = "fedavg", **changes: Any) -> Config:
    """Return the settings in an operator's message, without the checks of `posy run`."""
    task = {"sample-kind": "features", "input-shape": "3", "classes": "0,1", "feature-mean": "0", "feature-std": "1"}
    config = read_settings({"dataset": "sites", "method": method, "num-clients": 2, "device": "cpu", **task})
    changed = {"input-columns": INPUTS, "model": "linear", **changes}
    return {**config.as_config(), **{key.replace("_", "-"): value for key, value in changed.items()}}


@pytest.fixture
def cells() -> np.ndarray:
    """Return the features of the patients of a site. All values differ."""
    return np.random.default_rng(7).normal(50, 20, (ROWS, FEATURES)).round(6)


def site(folder: Path, cells: np.ndarray, labels: list[Any] | None = None, **words: Any) -> Config:
    """Write a table of patients, and return the node config of its site with the default policy."""
    labels = labels or [i % 2 for i in range(len(cells))]
    rows = zip(cells.tolist(), labels, strict=True)
    lines = [f"Patient A{i},{','.join(map(repr, row))},{label}" for i, (row, label) in enumerate(rows)]
    (folder / "site.csv").write_text("\n".join(["name,f0,f1,f2,label", *lines]) + "\n")
    return {"data": str(folder / "site.csv"), "name": "a", "policy": "", **words}


def exchange(grid: NodeGrid, message: Message) -> Message:
    """Return the node's answer to a message."""
    grid.push_messages([message])
    (reply,) = grid.pull_messages([message.metadata.message_id])
    return reply


def ask(grid: NodeGrid, config: Config, **entries: Any) -> Message:
    """Return the node's answer to a request to join a run or to describe its data."""
    record = ConfigRecord({"settings": json.dumps(config), **entries})
    return exchange(grid, Message(RecordDict({"config": record}), dst_node_id=1, message_type="query"))


def request(config: Config, *arrays: np.ndarray, kind: str = "evaluate", **entries: Any) -> Message:
    """Return a message that asks a client to train or to score a model."""
    number = entries.get("server-round", 1)
    versions = {"run": "one-0000", "state-from": "", "state-keep": [], "state-to": f"0-{number}-1"}
    record = ConfigRecord({"settings": json.dumps(config), "client": 0, "server-round": 1, **versions, **entries})
    names = settings_class(config["method"]).sent
    named: ArrayRecord = record_of(dict(zip(names, arrays, strict=True)))
    return Message(RecordDict({"config": record, "arrays": named}), dst_node_id=1, message_type=kind)


def send(grid: NodeGrid, config: Config, *arrays: np.ndarray, kind: str = "evaluate", **entries: Any) -> Message:
    """Return the node's answer to :func:`request`."""
    return exchange(grid, request(config, *arrays, kind=kind, **entries))


def model(value: float = 0.1) -> np.ndarray:
    return np.full(LINEAR, value, np.float32)


def arrays_of(reply: Message) -> list[np.ndarray]:
    assert not reply.has_error(), reply.error.reason
    return [array.numpy() for array in reply.content.array_records["arrays"].values()]


# -- records ---------------------------------------------------------------------------------------------


def test_policy_rules_apply_without_a_join(tmp_path: Path, cells: np.ndarray) -> None:
    """The mean of a class with one row was this row, because only a join checked the classes."""
    labels = ["9" if i == 5 else str(i % 2) for i in range(ROWS)]
    config = values("fedproto", classes="0,1,9")
    prototypes = np.zeros((3, FEATURES), np.float32), np.zeros(3, np.float32)
    reply = send(NodeGrid(site(tmp_path, cells, labels)), config, *prototypes, kind="train")
    assert "rule min-rows: method = 'fedproto'" in reply.error.reason
    large = site(tmp_path, cells) | {"policy": str(tmp_path / "policy.yaml")}
    (tmp_path / "policy.yaml").write_text("max-parameters: 7\n")
    assert "rule max-parameters" in send(NodeGrid(large), values(), model(), kind="train").error.reason


def test_class_errors_do_not_reveal_row_counts(tmp_path: Path, cells: np.ndarray) -> None:
    """An error counted the rows with other labels, which revealed whether a patient had a given label."""
    labels = ["rare" if i == 5 else str(i % 2) for i in range(ROWS)]
    node = site(tmp_path, cells, labels)
    answers = [ask(NodeGrid(node), values(classes=names)).error.reason for names in ("rare,x", "other,x")]
    assert answers[0] == answers[1] and "other-classes" in answers[0]


@pytest.mark.parametrize("changes", [{"input_columns": "age,bp"}, {"input_columns": "age", "group_column": "bp"}])
def test_settings_cannot_select_the_label_column(changes: Config, tmp_path: Path, cells: np.ndarray) -> None:
    """Without a column named label, the last unused column was the label: the names of the patients."""
    lines = [f"Patient A{i},{row[0]},{i % 2},{row[1]}" for i, row in enumerate(cells.tolist())]
    (tmp_path / "site.csv").write_text("\n".join(["name,age,ill,bp", *lines]) + "\n")
    node = {"data": str(tmp_path / "site.csv"), "name": "a", "policy": ""}
    open_task = {"sample_kind": "auto", "input_shape": "", "classes": "", "feature_mean": "", "feature_std": ""}
    reply = ask(NodeGrid(node), values(**open_task, **changes), describe=True)
    assert "label-column, column bp" in reply.error.reason
    (tmp_path / "policy.yaml").write_text("label: ill\n")
    named = NodeGrid(node | {"policy": str(tmp_path / "policy.yaml")})
    described = ask(named, values(**open_task, **changes), describe=True).content.config_records["config"]
    assert described["classes"] == ["0", "1"]


def test_validation_fractions_cannot_isolate_a_few_rows(tmp_path: Path, cells: np.ndarray) -> None:
    """The gradients with and without 7 validation rows differed by the gradient of these 7 rows."""
    node = site(tmp_path, cells[:45])
    full_batch = {"batch_size": 1000, "local_epochs": 1}
    updates = [
        arrays_of(send(NodeGrid(node), values(validation_fraction=fraction, **full_batch), model(), kind="train"))[0]
        for fraction in (0.0, 0.2)
    ]
    np.testing.assert_array_equal(*updates)


def test_range_check_ignores_unused_rows(tmp_path: Path) -> None:
    """A run did not use a test set of one row, but a search over feature-std revealed its values."""
    x = np.random.default_rng(7).normal(50, 20, (40, 1))
    limit = float((x.std() * np.sqrt(40) + abs(x.mean())) / np.finfo(np.float32).max)
    for value in (50.0, 5e6):
        y, row = np.arange(40) % 2, np.array([[value]])
        np.savez(tmp_path / "site.npz", x_train=x, y_train=y, x_test=row, y_test=np.array([1]))
        node = {"data": str(tmp_path / "site.npz"), "name": "a", "policy": ""}
        config = values(input_columns="", input_shape="1", feature_std=repr(1.01 * limit))
        assert not ask(NodeGrid(node), config).has_error()


def test_fedfomo_cannot_score_models_on_one_row(tmp_path: Path, cells: np.ndarray) -> None:
    """With fedfomo-validation = 0.03 the weights were the exact losses of several models on one row."""
    rules = [violation.rule for violation in violations(Policy(), values("fedfomo", fedfomo_validation=0.03))]
    assert rules == ["validation-fraction"]
    (tmp_path / "policy.yaml").write_text("validation-fraction: 0.03\n")
    node = site(tmp_path, cells) | {"policy": str(tmp_path / "policy.yaml")}
    none = np.zeros((0, LINEAR), np.float32)
    config = {"batch_size": 1000, "local_epochs": 1}
    first, second = (
        arrays_of(send(NodeGrid(node), values("fedfomo", fedfomo_validation=f, **config), none, kind="train"))[0]
        for f in (0.0, 0.03)
    )
    np.testing.assert_array_equal(first, second)


# -- scores ----------------------------------------------------------------------------------------------


def test_a_site_accepts_one_client_index(tmp_path: Path, cells: np.ndarray) -> None:
    """The site scored another model in the same round for each client index in a message, also for -3."""
    grid = NodeGrid(site(tmp_path, cells))
    assert not send(grid, values(), model()).has_error()
    for client in (1, -3, 10**9):
        reason = send(grid, values(), model(0.2), client=client).error.reason
        assert all(part in reason for part in ("rule scores", f"for client {client},", "is client 0"))
    fixed = NodeGrid(site(tmp_path, cells) | {"partition-id": 1})
    assert "is client 1" in send(fixed, values(), model()).error.reason
    assert not send(fixed, values(), model(), client=1).has_error()
    assert "for client 7" in send(NodeGrid(site(tmp_path, cells)), values(), model(), client=7).error.reason


@pytest.mark.parametrize("kind", ["evaluate.default", "train.default"])
def test_message_type_aliases_are_refused(kind: str, tmp_path: Path, cells: np.ndarray) -> None:
    """Flower calls the same function for train and for train.default, so that a site scored three models a round."""
    reply = send(NodeGrid(site(tmp_path, cells)), values(), model(), kind=kind)
    assert f"message type {kind!r}" in reply.error.reason


def test_rounds_beyond_num_server_rounds_are_refused(tmp_path: Path, cells: np.ndarray) -> None:
    """The policy limited num-server-rounds, and the operator sent more rounds than this setting."""
    grid = NodeGrid(site(tmp_path, cells))
    assert not send(grid, values(num_server_rounds=2), model(), **{"server-round": 2}).has_error()
    for number in (3, 999_999_999):
        reason = send(grid, values(num_server_rounds=2), model(), **{"server-round": number}).error.reason
        assert all(part in reason for part in ("rule max-rounds", f"round {number};", "num-server-rounds = 2"))


def test_a_second_config_in_a_round_is_refused(tmp_path: Path, cells: np.ndarray) -> None:
    """The same model with other learning rates in one round gave as many updates as the operator wanted."""
    grid, config = NodeGrid(site(tmp_path, cells)), values()
    first = send(grid, config, model(), kind="train", lr=1e-3)
    again = send(grid, config, model(), kind="train", lr=1e-3)
    np.testing.assert_array_equal(arrays_of(first)[0], arrays_of(again)[0])
    assert "in round 1, or a different config" in send(grid, config, model(), kind="train", lr=1e-6).error.reason


def test_losses_are_rounded_and_capped(tmp_path: Path, cells: np.ndarray) -> None:
    """A model with large outputs had the loss 1240267.5, whose seven digits two decimals did not limit."""
    losses = {}
    for scale in (1, 1e-2, 1e4, 1e30):
        reply = send(NodeGrid(site(tmp_path, cells)), values(), np.arange(LINEAR, dtype=np.float32) * np.float32(scale))
        losses[scale] = reply.content.metric_records["metrics"]["served-loss"]
    assert losses[1] == 185.0 and losses[1e-2] == round(losses[1e-2], 2) < 10
    assert losses[1e4] == losses[1e30] == 1000.0
    assert limited_scores(Policy(), {"train-loss": float("inf"), "num-test": 1234567}) == {
        "train-loss": 1000.0,
        "num-test": 1234567,
    }


class Recorded(NodeTask):
    """A node's task that records the context that the worker stores on the node."""

    def __init__(self, message: Message, context: Context) -> None:
        self.message, self.context = message, context
        self.reply: Message | None = None

    def pull(self) -> Any:
        return self.message, self.context, Run(7), Bundle("hash", b"")

    def push(self, reply: Message) -> None:
        self.reply = reply

    def finish(self, context: Context) -> None:
        self.context = context


class Installed(Apps):
    """The installed app, for every run."""

    def load(self, bundle: Bundle, rule: str) -> Any:
        return client_app


def test_a_node_remembers_a_run_after_an_error(tmp_path: Path, cells: np.ndarray) -> None:
    """The node deleted its record of the run after each error, so no rule counted replies with errors."""
    node = site(tmp_path, cells)
    grid, wrong = NodeGrid(node), model(np.nan)
    context = grid.nodes[1]

    def answer(message: Message) -> Message:
        nonlocal context
        message.metadata.__dict__["_message_id"] = "0"
        task = Recorded(message, context)
        serve(task, Installed(), LastAnswer(), Sessions())
        context = task.context
        assert task.reply is not None
        return task.reply

    assert "the model has diverged" in answer(request(values(), wrong)).error.reason
    assert "a second model" in answer(request(values(), model())).error.reason
    assert "the settings have changed" in answer(request(values(lr=0.5), wrong)).error.reason


# -- privacy budget --------------------------------------------------------------------------------------


def test_a_privacy_budget_refuses_methods_without_noise(tmp_path: Path, cells: np.ndarray) -> None:
    """With dp = sample and fedproto the site sent class means without noise: only `posy run` refused this pair."""
    (tmp_path / "policy.yaml").write_text("epsilon: 2.0\n")
    words = {"policy": str(tmp_path / "policy.yaml"), "state-dir": str(tmp_path / "state")}
    node = site(tmp_path, cells) | words
    noise = {"dp": "sample", "dp_clip": 1.0, "num_server_rounds": 1}
    prototypes = np.zeros((2, FEATURES), np.float32), np.zeros(2, np.float32)
    for reply in (
        send(NodeGrid(node), values("fedproto", **noise), *prototypes, kind="train"),
        ask(NodeGrid(node), values("fedproto", **noise)),
    ):
        assert "dp = 'sample' with method = 'fedproto'" in reply.error.reason
    assert not (tmp_path / "state" / "privacy-ledger.jsonl").exists()


def test_adaptive_clipping_with_masks_is_refused() -> None:
    """With adaptive clipping under masks, dp-clip = 1e9 in a message made the noise of the clients negligible."""
    noise = {"dp": "central", "dp_clip": 1.0, "dp_clip_quantile": 0.5, "client_weights": "uniform"}
    settings = from_json(json.dumps(values(**noise, secure_aggregation=True)))
    with pytest.raises(SettingsError, match=r"dp-clip-quantile = 0\.5 and secure-aggregation = true"):
        check_privacy(settings)


# -- resources of a node ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "changes"),
    [
        ("fedavg-ft", {"fedavg-ft-epochs": 101}),
        ("fedas", {"fedas-align-epochs": 1_000_000}),
        ("pfedme", {"pfedme-steps": 1_000_000}),
    ],
)
def test_method_epochs_and_steps_obey_max_local_epochs(method: str, changes: Config) -> None:
    assert violations(Policy(), values(method)) == []
    assert [violation.rule for violation in violations(Policy(), values(method) | changes)] == ["max-local-epochs"]


def test_fine_tuning_steps_obey_max_local_epochs(tmp_path: Path, cells: np.ndarray) -> None:
    reply = send(NodeGrid(site(tmp_path, cells)), values("fedavg-ft", fedavg_ft_steps=10_000), model())
    assert "rule max-local-epochs: fedavg-ft-steps = 10000" in reply.error.reason


@pytest.mark.parametrize("run", ["site-secret", ".policy-runs.json.part", "Audit.jsonl.head", "privacy-ledger.lock"])
def test_run_names_cannot_replace_node_files(run: str, tmp_path: Path, cells: np.ndarray) -> None:
    """A run of this name made a folder that the node took for its file, and no later run could join."""
    node = site(tmp_path, cells) | {"state-dir": str(tmp_path / "state")}
    reply = send(NodeGrid(node), values(), model(), run=run)
    assert f"run = {run!r}" in reply.error.reason and "not a valid folder name" in reply.error.reason
    assert not (tmp_path / "state" / run).is_dir()
    assert not ask(NodeGrid(node), values()).has_error()


def test_an_empty_array_with_many_rows_is_refused(tmp_path: Path, cells: np.ndarray) -> None:
    """An array of 400,000 rows of 0 numbers, a message of 200 bytes, made the node allocate 14 GB."""
    grid, config = NodeGrid(site(tmp_path, cells)), values("fedrep", model="mlp")
    reply = send(grid, config, np.zeros((400_000, 0), np.float32))
    assert "shape (400000, 0)" in reply.error.reason and "expects 8768" in reply.error.reason


def test_lock_files_are_private_to_the_node(tmp_path: Path) -> None:
    """A user with read access could lock a file, and the node then waited forever."""
    with exclusive(tmp_path / "state" / "policy-runs.lock"):
        pass
    assert stat.S_IMODE((tmp_path / "state" / "policy-runs.lock").stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "state").stat().st_mode) == 0o700


def test_bundles_are_compared_without_unpacking() -> None:
    """A bundle of 200 KB had a file of 200 MB, which the node unpacked before it refused the run."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as bundle:
        for name in ("posy/settings.py", "large.txt", "pyproject.toml"):
            bundle.writestr(name, bytes(1 << 25))
    tracemalloc.start()
    foreign = foreign_code(packed.getvalue())
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert foreign == ["posy/settings.py", "pyproject.toml"]
    assert peak < 1 << 22


def test_text_length_beyond_memory_is_refused() -> None:
    """With input-shape = 268435456 a site of 60 texts allocated 129 GB."""
    with pytest.raises(DataError, match="does not fit into memory"):
        hashed(["a word"], 1 << 50, 100)


@pytest.mark.parametrize(("kind", "shape"), [("features", (20,)), ("image", (3, 32, 32)), ("text", (50,))])
def test_parameters_are_counted_without_building_the_network(kind: str, shape: tuple[int, ...]) -> None:
    """A vocabulary of ten million words allocated 12 GB before the rule max-parameters refused the run."""
    task = Task(kind, shape, ("a", "b"), 1000 if kind == "text" else 0)
    for name, network in MODELS.items():
        if network.suits(task):
            built = sum(parameter.numel() for parameter in build_model(name, task, seed=0).parameters())
            assert count_parameters(name, task) == built, name


def test_a_masked_round_cannot_restart_under_another_name() -> None:
    """With the names 0-1 and 1-1, the server obtained two sums of one round over different clients."""
    context = NodeGrid({"data": "x"}).nodes[1]
    entries = {"client": 0, "server-round": 1, "secure-round": "0-1", "state-keep": []}
    check_once(context, 0, "train", 1, [model()], entries)
    check_once(context, 0, "train", 1, [model()], entries | {"state-keep": ["0-1-0"]})
    with pytest.raises(PolicyError, match="in round 1, or a different config"):
        check_once(context, 0, "train", 1, [model()], entries | {"secure-round": "1-1"})


def test_a_run_cannot_replace_the_models_of_another_run(tmp_path: Path, cells: np.ndarray) -> None:
    """With `models` and without `state-dir`, a run with the name of an earlier run replaced its models."""
    node = site(tmp_path, cells) | {"models": str(tmp_path / "models")}
    wanted = {"save-models-to": "any"}
    assert not send(NodeGrid(node), values(), model(), **wanted).has_error()
    assert list((tmp_path / "models" / "one-0000").glob("*.safetensors"))
    reply = send(NodeGrid(node), values(lr=0.5), model(), **wanted)
    assert "rule state: the state under this run name" in reply.error.reason


def test_oversized_settings_are_refused(tmp_path: Path, cells: np.ndarray) -> None:
    reply = ask(NodeGrid(site(tmp_path, cells)), values(run_name="x" * (1 << 24)))
    assert "rule settings: the settings have more than 16,777,216" in reply.error.reason
