"""The policy of a site: each rule, and the attacks on a site's data that it refuses."""

import json
import struct
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from nodes import NodeGrid

from posy.client_app.base import PersonalClient
from posy.client_app.policy import (
    PolicyError,
    admit,
    guarded,
    limited_scores,
    pin_state,
    policy_of,
    shared_text,
    violations,
)
from posy.client_app.registry import client_class
from posy.client_app.state import State
from posy.client_app.training.batches import full_batches
from posy.client_app.training.work import Train
from posy.client_app.workspace import Workspace
from posy.commands.cli import main
from posy.commands.deploy.policy import default_text
from posy.data.errors import DataError
from posy.data.policy import Policy, read_policy
from posy.flower import record_of
from posy.mistakes import MethodError
from posy.settings import NodeConfigError
from posy.strategies.registry import from_json, read_settings
from posy.strategies.replies import SCORES

ROWS, FEATURES = 60, 3
Config = dict[str, Any]


def values(**changes: Any) -> Config:
    """Return the settings of a run over sites, with changes that `posy run` may refuse itself."""
    task = {
        "sample-kind": "features",
        "input-shape": "3",
        "classes": "0,1",
        "feature-mean": "0",
        "feature-std": "1",
    }
    config = read_settings({"dataset": "sites", "method": "fedavg", "num-clients": 2, "device": "cpu", **task})
    return {**config.as_config(), **{key.replace("_", "-"): value for key, value in changes.items()}}


OPEN = {"sample_kind": "auto", "input_shape": "", "classes": "", "feature_mean": "", "feature_std": ""}


@pytest.fixture
def cells() -> np.ndarray:
    """Return the features of the patients of a site: no cell has the value of another."""
    return np.random.default_rng(7).normal(50, 20, (ROWS, FEATURES)).round(6)


@pytest.fixture
def site(tmp_path: Path, cells: np.ndarray) -> Config:
    """Return the node config of a site with a table: name, three features, label. Its policy is the default."""
    lines = [f"Patient A{i},{','.join(map(repr, row))},{i % 2}" for i, row in enumerate(cells.tolist())]
    (tmp_path / "site.csv").write_text("\n".join(["name,f0,f1,f2,label", *lines]) + "\n")
    return {"data": str(tmp_path / "site.csv"), "name": "a", "policy": ""}


def ask(site: Config, config: Config, grid: NodeGrid | None = None, **entries: Any) -> Message:
    """Return the node's answer to a query with the settings of a run."""
    grid = grid or NodeGrid(site)
    record = ConfigRecord({"settings": json.dumps(config), **entries})
    message = Message(RecordDict({"config": record}), dst_node_id=1, message_type="query")
    grid.push_messages([message])
    (reply,) = grid.pull_messages([message.metadata.message_id])
    return reply


def send(
    grid: NodeGrid,
    config: Config,
    model: np.ndarray,
    server_round: int = 1,
    kind: str = "evaluate",
    start: str = "",
    **more: Any,
) -> Message:
    """Return the node's answer to a request to score or train a model."""
    entries = {
        **more,
        "client": 0,
        "server-round": server_round,
        "run": "one-0000",
        "state-from": start,
        "state-keep": [],
    }
    record = ConfigRecord({"settings": json.dumps(config), "state-to": f"0-{server_round}-1", **entries})
    arrays: ArrayRecord = record_of({"model": model})
    message = Message(RecordDict({"config": record, "arrays": arrays}), dst_node_id=1, message_type=kind)
    grid.push_messages([message])
    (reply,) = grid.pull_messages([message.metadata.message_id])
    return reply


# -- rules -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "changes", "rule"),
    [
        ({}, {"dataset": "/other/payroll.csv"}, "data"),
        ({}, {"dataset": "hf:owner/name"}, "data"),
        ({}, {"dataset": "digits"}, "data"),
        ({}, {"method": "/any/x.py:Mine"}, "code"),
        ({}, {"model": "own/nets.py:f"}, "code"),
        ({}, {"loss": "os:system"}, "code"),
        ({"code": "signed"}, {"model": "/any/nets.py:f"}, "code"),
        ({"code": "signed"}, {"model": "own/../../nets.py:f"}, "code"),
        ({}, {"method": "unknown"}, "methods"),
        ({"methods": "fedrep, fedper"}, {}, "methods"),
        ({}, {"weights": "/etc/shadow"}, "weights"),
        ({}, {"weights": "torchvision"}, "weights"),
        ({"columns": "f0,f1"}, {"input_columns": "f0,f2"}, "columns"),
        ({"columns": "f0,f1"}, {"group_column": "f2"}, "columns"),
        ({"label": "label"}, {"label_column": "name"}, "label"),
        ({}, {"label_column": "name"}, "label"),
        ({}, {"test_set": "pooled"}, "test-fraction"),
        ({}, {"test_fraction": 0.9}, "test-fraction"),
        ({"test_fraction": 0.4}, {"test_fraction": 0.3}, "test-fraction"),
        ({}, {"validation_fraction": 0.21}, "validation-fraction"),
        ({}, {"train_samples": 1}, "min-rows"),
        ({}, {"batch_size": 9}, "min-rows"),
        ({"max_local_epochs": 5}, {"local_epochs": 6}, "max-local-epochs"),
        ({"max_rounds": 5}, {}, "max-rounds"),
        ({}, {"num_clients": 1}, "min-clients"),
        ({"secure_aggregation": "required"}, {}, "secure-aggregation"),
        ({"scores": "withheld"}, {}, "scores"),
        ({}, {"metric": "auroc"}, "metrics"),
        ({}, {"all_metrics": "last"}, "metrics"),
        ({"metrics": "auroc"}, {}, "metrics"),
        ({"metrics": "accuracy,auroc"}, {"metric": "sensitivity"}, "metrics"),
        ({"metrics": "accuracy,auroc"}, {"metric": "auroc", "all_metrics": "every"}, "metrics"),
        ({"epsilon": 1.0}, {}, "epsilon"),
        ({"epsilon": 1.0}, {"dp": "central", "dp_clip": 1.0}, "epsilon"),
        ({"epsilon": 1.0}, {"dp": "local", "dp_clip": 1.0, "dp_scores": "exact"}, "epsilon"),
    ],
)
def test_refusals_name_the_violated_rule(policy: Config, changes: Config, rule: str) -> None:
    violated = violations(Policy(**policy), values(**changes))
    assert [violation.rule for violation in violated] == [rule]
    assert f", rule {rule}: " in str(PolicyError(violated[0]))


def test_allowed_runs_pass(tmp_path: Path) -> None:
    assert violations(Policy(), values()) == []
    assert violations(Policy(code="any"), values(model="/any/nets.py:f")) == []
    assert violations(Policy(code="signed"), values(model="own/nets.py:f")) == []
    assert violations(Policy(), values(model="torchvision:resnet18")) == []
    assert violations(Policy(test_fraction=0.4), values()) == []  # the run leaves the fraction to the site
    assert violations(Policy(metrics="accuracy, auroc"), values(metric="auroc")) == []
    assert violations(Policy(metrics="accuracy, auroc"), values()) == []
    assert violations(Policy(metrics="all"), values(metric="auroc", all_metrics="every")) == []
    assert violations(Policy(), values(task="regression", metric="mae")) == []
    (tmp_path / "w.safetensors").write_bytes(b"weights")
    weights = Policy(weights=str(tmp_path))
    assert violations(weights, values(weights="w.safetensors")) == []
    assert violations(weights, values(weights=str(tmp_path / "w.safetensors"))) == []
    assert [v.rule for v in violations(weights, values(weights="../w.safetensors"))] == ["weights"]


def test_a_policy_file_is_reloaded_when_it_changes(tmp_path: Path) -> None:
    assert policy_of({}) is None and policy_of({"data": "x"}) == Policy()
    path = tmp_path / "policy.yaml"
    path.write_text("min-rows: 20\n")
    assert policy_of({"policy": str(path)}) == Policy(min_rows=20)
    path.write_text("min-rows: 200\n")
    assert policy_of({"policy": str(path)}) == Policy(min_rows=200)
    for text, reason in (
        ("min-rows: 1\n", "min-rows = 1"),
        ("minrows: 3\n", "minrows"),
        ("- a\n", "key: value"),
        ("metrics: auc\n", "'auc' is not a metric; set all, or a list of these: accuracy, "),
        ("metrics: all,auroc\n", "'all' is not a metric"),
        ("metrics: ''\n", "is not a metric"),
    ):
        path.write_text(text)
        with pytest.raises(NodeConfigError, match=reason):
            read_policy(path)


def test_the_default_policy_file_loads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "policy.yaml"
    assert main(["policy", "new", str(path)]) == 0
    assert path.read_text() == default_text() and read_policy(path) == Policy()
    assert main(["policy", "new", str(path)]) == 2  # it is not overwritten
    capsys.readouterr()
    assert main(["policy", "check", str(path)]) == 0
    assert "minimum number of rows" in capsys.readouterr().out
    assert main(["policy", "check", str(path), "method=fedavg"]) == 0
    assert "accepted" in capsys.readouterr().out
    assert main(["policy", "check", str(path), "method=fedavg", "batch-size=1", "num-clients=1"]) == 1
    output = capsys.readouterr().out
    assert "min-rows" in output and "min-clients" in output
    path.write_text("metrics: accuracy,auroc\n")
    assert main(["policy", "check", str(path), "metric=auroc"]) == 0
    assert main(["policy", "check", str(path), "metric=brier"]) == 1
    assert "the site sends only accuracy, auroc, loss" in " ".join(capsys.readouterr().out.split())


def test_scores_are_rounded_unless_the_policy_says_otherwise() -> None:
    metrics = {"served-accuracy": 0.123456, "train-loss": 1.98765, "num-test": 12, "chosen": "3"}
    assert limited_scores(Policy(), metrics) == metrics | {"served-accuracy": 0.12, "train-loss": 1.99}
    assert limited_scores(Policy(scores="exact"), metrics) == metrics


@pytest.mark.parametrize("scores", ["exact", "rounded"])
def test_only_the_listed_metrics_leave_the_node(scores: str) -> None:
    metrics = {"served-auroc": 0.5, "local-validation-brier": 0.25, "local-accuracy": 1.0, "served-loss": 1.5}
    for listed, sent in {
        "auroc": {"served-auroc"}, "accuracy,brier": {"local-validation-brier", "local-accuracy"}, "all": {*metrics}
    }.items():  # fmt: skip
        assert limited_scores(Policy(metrics=listed, scores=scores), metrics).keys() == sent | {"served-loss"}


@pytest.mark.parametrize("kind", ["evaluate", "train"])
def test_a_server_that_requests_all_metrics_in_a_message_is_refused(kind: str, site: Config, tmp_path: Path) -> None:
    """The settings of the run satisfy the policy, but the message asks for more."""
    flags: Config = {"all-metrics": True, "evaluate-local": True}
    model, config = np.zeros(FEATURES * 2 + 2, np.float32), {"input_columns": "f0,f1,f2", "model": "linear"}
    sent: dict[str, set[str]] = {}
    for listed in ("accuracy", "accuracy,auroc", "all"):
        (tmp_path / "policy.yaml").write_text(f"metrics: {listed}\n")
        node = site | {"policy": str(tmp_path / "policy.yaml")}
        reply = send(NodeGrid(node), values(**config), model, kind=kind, **flags)
        if listed == "all":
            assert any(key.endswith("-sensitivity") for key in reply.content.metric_records["metrics"])
            continue
        assert "rule metrics: the message requests all metrics" in reply.error.reason
        metric = listed.rpartition(",")[2]
        reply = send(NodeGrid(node), values(**config, metric=metric), model, kind=kind, **{"evaluate-local": True})
        scored = {key.partition("-")[2] for key in reply.content.metric_records["metrics"] if key in SCORES}
        sent[listed] = scored - {"loss"}
    assert sent == {"accuracy": {"accuracy"}, "accuracy,auroc": {"auroc"}}


def test_the_number_of_runs_a_day_is_limited(tmp_path: Path) -> None:
    policy, node = Policy(max_runs_per_day=2), {"state-dir": str(tmp_path), "data": "x"}
    grid, config = NodeGrid({}), json.dumps(values())
    context = grid.nodes[1]
    context.node_config = node
    for run in (1, 2, 1):  # a run counts once
        admit(policy, config, context, run, pin=False)
    with pytest.raises(PolicyError, match="rule max-runs-per-day: 2 runs"):
        admit(policy, config, context, 3, pin=False)


def test_a_run_counts_only_on_its_first_day(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that continues after midnight is not refused because other runs have begun on the new day."""
    policy, config = Policy(max_runs_per_day=1), json.dumps(values())
    contexts = [NodeGrid({}).nodes[1] for _ in range(2)]
    for context in contexts:
        context.node_config = {"state-dir": str(tmp_path), "data": "x"}
    monkeypatch.setattr("posy.client_app.policy.time.strftime", lambda *_: "2026-01-01")
    admit(policy, config, contexts[0], 1, pin=False)
    monkeypatch.setattr("posy.client_app.policy.time.strftime", lambda *_: "2026-01-02")
    admit(policy, config, contexts[1], 2, pin=False)
    admit(policy, config, contexts[0], 1, pin=False)
    with pytest.raises(PolicyError, match="rule max-runs-per-day"):
        admit(policy, config, contexts[1], 3, pin=False)


def test_a_state_folder_is_bound_to_the_settings_of_its_run(tmp_path: Path) -> None:
    folder = tmp_path / "run-1"
    pin_state(folder, values())
    pin_state(folder, values(num_server_rounds=99))  # may change when a run resumes
    assert (folder.stat().st_mode & 0o777) == 0o700
    for attack in ({"method": "fedamp"}, {"lr": 1e-30}):
        with pytest.raises(PolicyError, match=r"rule state: .*different settings"):
            pin_state(folder, values(**attack))


def test_a_run_cannot_read_or_remove_the_state_of_another_run(site: Config, tmp_path: Path) -> None:
    """H4: with the name of another run, `method=fedamp lr=1e-30` returned its personal model and removed its state."""
    node = site | {"state-dir": str(tmp_path / "state")}
    columns, model = {"input_columns": "f0,f1,f2", "model": "linear"}, np.zeros(FEATURES * 2 + 2, np.float32)
    assert not send(NodeGrid(node), values(**columns, method="apfl"), model, kind="train").has_error()
    (state,) = (tmp_path / "state").rglob("*.safetensors")
    stored = state.read_bytes()
    attack = values(**columns, method="fedamp", lr=1e-30)
    for server_round, start in ((2, state.stem), (9, "")):
        reply = send(NodeGrid(node), attack, model, server_round, "train", start)
        assert "rule state: " in reply.error.reason
    assert state.read_bytes() == stored


def test_a_site_refuses_sums_over_too_few_clients(site: Config, tmp_path: Path) -> None:
    """M3: a site that trusted twelve keys joined a sum over two clients. The settings of the run may be false."""
    (tmp_path / "policy.yaml").write_text("min-clients: 4\n")
    grid = NodeGrid(*[site | {"policy": str(tmp_path / "policy.yaml")}] * 3)

    def stage(client: int, name: str, **entries: Any) -> Message:
        record = ConfigRecord({"client": client, "secure-round": "0-1", "secure-stage": name, **entries})
        message = Message(RecordDict({"config": record}), dst_node_id=client + 1, message_type="query")
        return next(iter(grid.send_and_receive([message])))

    answers: list[Any] = [stage(client, "keys").content.config_records["config"]["answer"] for client in range(3)]
    keys = [text for answer in answers for text in answer]
    view = {"roster": [0, 1, 2], "cohort": [0, 1, 2], "reach": 0, "cohort-threshold": 2, "threshold": 2}
    reason = stage(0, "shares", **view, **{"public-keys": keys}).error.reason
    assert "cohort has 3 clients" in reason and "at least 4" in reason


def test_settings_are_fixed_once_the_site_has_joined(site: Config) -> None:
    grid = NodeGrid(site)
    assert not ask(site, values(**OPEN, input_columns="f0,f1,f2"), grid, describe=True).has_error()
    assert not ask(site, values(input_columns="f0,f1,f2"), grid).has_error()
    reply = ask(site, values(input_columns="f0,f1,f2", lr=0.5), grid)
    assert "rule settings: the settings have changed" in reply.error.reason


def test_a_site_scores_one_model_a_round(site: Config) -> None:
    grid, config = NodeGrid(site), values(input_columns="f0,f1,f2", model="linear")
    models = [np.full(FEATURES * 2 + 2, number, np.float32) for number in (0.1, 0.2)]
    first = send(grid, config, models[0])
    assert not first.has_error()
    accuracy = first.content.metric_records["metrics"]["served-accuracy"]
    assert accuracy == round(float(accuracy), 2)
    assert not send(grid, config, models[0]).has_error()  # a repeated message
    assert "rule scores: a second model in round 1" in send(grid, config, models[1]).error.reason
    assert not send(grid, config, models[1], 2).has_error()
    assert "rule scores: a second model in round 2" in send(grid, config, models[0], 1).error.reason


def test_data_fingerprints_depend_on_a_secret_of_the_node(site: Config, tmp_path: Path) -> None:
    def fingerprint(node: Config) -> Any:
        return ask(node, values(input_columns="f0,f1,f2")).content.config_records["config"]["fingerprint"]

    folders = [site | {"state-dir": str(tmp_path / name)} for name in "ab"]
    first, second = map(fingerprint, folders)
    assert first == fingerprint(folders[0]) and len({first, second, fingerprint(site)}) == 3
    assert ((tmp_path / "a" / "site-secret").stat().st_mode & 0o777) == 0o600


def test_the_privacy_budget_of_a_site_covers_all_runs(site: Config, tmp_path: Path) -> None:
    """M1: 2,500 answers to the message of one round reduced the error of the noise from 6.3 to 0.17."""
    (tmp_path / "policy.yaml").write_text("epsilon: 2.0\n")
    node = site | {"policy": str(tmp_path / "policy.yaml")}
    noise = {"dp": "local", "dp_clip": 1.0, "dp_epsilon": 1.5, "num_server_rounds": 2}
    config = values(input_columns="f0,f1,f2", model="linear", **noise)
    assert "rule epsilon: the node needs state-dir" in ask(node, config).error.reason
    node |= {"state-dir": str(tmp_path / "state")}
    assert not ask(node, config).has_error()
    greedy = config | {"dp-epsilon": 2.5}
    reason = ask(node, greedy).error.reason
    assert "rule epsilon: " in reason and "more than epsilon = 2" in reason
    grid, model = NodeGrid(node), np.zeros(FEATURES * 2 + 2, np.float32)
    answers = [send(grid, config, model, kind="train").has_error() for _ in range(6)]  # one message, again and again
    # Two answers spend ε = 1.5. Gaussian noise composes, so three spend less than 2, and four spend more.
    assert answers == [False, False, False, True, True, True]
    assert len((tmp_path / "state" / "privacy-ledger.jsonl").read_text().splitlines()) == 3
    assert "earlier runs have spent 1.8" in send(NodeGrid(node), config, model, kind="train").error.reason


def test_only_the_writer_of_the_ledger_removes_an_incomplete_line(site: Config, tmp_path: Path) -> None:
    """A reader could otherwise remove a line that another process is writing."""
    (tmp_path / "policy.yaml").write_text("epsilon: 2.0\n")
    node = site | {"policy": str(tmp_path / "policy.yaml"), "state-dir": str(tmp_path / "state")}
    config = values(
        input_columns="f0,f1,f2", model="linear", dp="local", dp_clip=1.0, dp_epsilon=1.5, num_server_rounds=2
    )
    model, ledger = np.zeros(FEATURES * 2 + 2, np.float32), tmp_path / "state" / "privacy-ledger.jsonl"
    assert not send(NodeGrid(node), config, model, kind="train").has_error()
    line = ledger.read_text()
    ledger.write_text(line + line[:20])
    assert not ask(node, config).has_error()
    assert ledger.read_text() == line + line[:20]
    assert not send(NodeGrid(node), config, model, kind="train").has_error()
    assert ledger.read_text() == line + line


# -- attacks ---------------------------------------------------------------------------------------------


def statistics(reply: Message) -> tuple[int, list[float]]:
    answer = reply.content.config_records["config"]
    return answer["count"], answer["mean"]  # type: ignore[return-value]


def test_settings_cannot_select_the_rows_behind_the_statistics(site: Config, cells: np.ndarray) -> None:
    """C1: `train-samples=1 seed=5` returned one patient's row, and 200 seeds returned 57 of 60 rows."""
    columns = {**OPEN, "input_columns": "f0,f1,f2"}
    described = {
        str(statistics(ask(site, values(**columns, seed=seed, **more), describe=True)))
        for seed in range(5)
        for more in ({}, {"validation_fraction": 0.2}, {"local_steps": 1})
    }
    assert len(described) == 1
    count, mean = statistics(ask(site, values(**columns), describe=True))
    assert count == 45
    assert not any(np.allclose(mean, row) for row in cells)
    reply = ask(site, values(**columns, train_samples=1, seed=5), describe=True)
    assert "rule min-rows: train-samples = 1" in reply.error.reason


def test_rare_labels_do_not_leave_the_site(site: Config, tmp_path: Path) -> None:
    """C1: `label-column=name` returned all names as classes."""
    columns = {**OPEN, "label_column": "name", "input_columns": "f0,f1,f2"}
    assert "rule label: label-column = 'name'" in ask(site, values(**columns), describe=True).error.reason
    (tmp_path / "policy.yaml").write_text("label: name\n")  # even a site that offers the column keeps rare labels
    reply = ask(site | {"policy": str(tmp_path / "policy.yaml")}, values(**columns), describe=True)
    answer = reply.content.config_records["config"]
    assert answer["classes"] == []
    assert "Patient" not in str(dict(answer))
    assert any("60 labels with fewer than" in text for text in answer["warnings"])  # type: ignore[union-attr]


def test_errors_do_not_depend_on_extreme_values(tmp_path: Path, cells: np.ndarray) -> None:
    """A search over feature-std found the largest value of a column, because it decided whether the site failed."""
    answers = []
    for value in (cells[3, 0], 2 * cells[3, 0]):
        cells[3, 0] = value
        lines = [f"{','.join(map(repr, row))},{i % 2}" for i, row in enumerate(cells.tolist())]
        (tmp_path / "site.csv").write_text("\n".join(["f0,f1,f2,label", *lines]) + "\n")
        spread = cells[:, 0].std() * np.sqrt(ROWS) + abs(cells[:, 0].mean())
        limit = float(spread / np.finfo(np.float32).max)
        node = {"data": str(tmp_path / "site.csv"), "name": "a", "policy": ""}
        for factor in (0.99, 1.01):
            std = f"{limit * factor!r},1,1"
            answers.append(ask(node, values(feature_mean="0,0,0", feature_std=std)).has_error())
    assert answers == [True, False, True, False]  # the bound from mean and variance decides


def test_batches_of_a_site_are_full_and_secret(site: Config) -> None:
    config = values(input_columns="f0,f1,f2", model="linear", local_epochs=1, lr=0.5)
    model = np.zeros(FEATURES * 2 + 2, np.float32)
    updates = []
    for _ in range(2):
        reply = send(NodeGrid(site), config, model, kind="train")
        updates.append(reply.content.array_records["arrays"]["model"].numpy())
    assert np.array_equal(*updates)  # repeatable for the same data
    clients = [client_of_site(site, config, secret=secret) for secret in (True, False)]
    job = clients[0].jobs.job(Train(clients[0].initial()))
    sizes = [len(batch.y) for batch, _ in clients[0].workspace.trainer.share(job)]
    assert sum(sizes) == 45 and min(sizes) >= 10  # batches of 10 would leave one of 5 rows
    orders = [client.jobs.job(Train(client.initial())).generator.get_state() for client in clients]
    assert not torch.equal(*orders)  # the seed of the run does not give the order


def client_of_site(site: Config, config: Config, *, secret: bool) -> PersonalClient:
    """Return the client of a site in round 1, with or without the secret order of its batches."""
    workspace = Workspace(from_json(json.dumps(config)), site["data"], policy=Policy())
    if not secret:
        workspace.__dict__["order_key"] = ()
    client = client_class("fedavg")(0, workspace, State())
    client.round = 1
    return client


@pytest.mark.parametrize(
    ("count", "size", "least", "expected"),
    [(45, 10, 10, 15), (45, 10, 5, 10), (12, 10, 10, 12), (40, 10, 10, 10), (35, 10, 10, 12), (10, 32, 10, 32)],
)
def test_every_batch_of_a_pass_has_enough_samples(count: int, size: int, least: int, expected: int) -> None:
    larger = full_batches(size, count, least)
    assert larger == expected
    assert all(min(larger, count - start) >= least for start in range(0, count, larger))


@pytest.mark.parametrize(
    "changes",
    [
        {"input_columns": "name,f0"},  # names are not numbers: the message contained row and cell
        {"input_columns": "f0,f1,f2", "classes": "x,y"},  # the message named a label
        {"input_columns": "f0,f1,f2", "feature_std": "1e-38"},  # the message named an extreme value
        {"input_columns": "gone,f0"},
        {"input_columns": "f0,f1,f2", "classes": "0,1", "input_shape": "7"},
    ],
)
def test_errors_contain_no_cells_labels_or_paths(changes: Config, site: Config, cells: np.ndarray) -> None:
    reason = ask(site, values(**changes)).error.reason
    assert "see the node's log" in reason
    for secret in (site["data"], "Patient", "row", *map(repr, cells.ravel().tolist())):
        assert secret not in reason


def test_a_description_contains_no_names_of_patients(site: Config) -> None:
    """Each patient's name is in one row. A column of strings without a frequent value is not used."""
    reply = ask(site, values(**OPEN), describe=True)
    assert not reply.has_error() and "Patient" not in str(reply.content) and site["data"] not in str(reply.content)


def test_settings_cannot_name_files_folders_or_hosts(site: Config, tmp_path: Path) -> None:
    """H4: another file was trained on, a hash of /etc/shadow was sent, and folders were created anywhere."""
    other = tmp_path / "payroll.csv"
    other.write_text("a,label\n1,0\n2,1\n")
    folder = tmp_path / "made"
    for changes, rule in (
        ({"dataset": str(other)}, "data"),
        ({"dataset": "hf:owner/name"}, "data"),
        ({"dataset": "mnist", "data_dir": str(folder)}, "data"),
        ({"weights": str(other)}, "weights"),
    ):
        reply = ask(site, values(input_columns="f0,f1,f2", **changes))
        assert f"rule {rule}:" in reply.error.reason
    reply = ask(site, values(input_columns="f0,f1,f2", data_dir=str(folder), output_dir=str(folder)))
    assert not reply.has_error()
    assert not folder.exists()


def test_custom_code_in_settings_does_not_run(site: Config, tmp_path: Path) -> None:
    """C2: a file that exists on the node was run without any code in the bundle."""
    marker = tmp_path / "ran"
    code = tmp_path / "x.py"
    code.write_text(f"open({str(marker)!r}, 'w')\n")
    for key in ("dataset", "model", "loss", "method"):
        reply = ask(site, values(input_columns="f0,f1,f2", **{key: f"{code}:f"}))
        assert "rule code:" in reply.error.reason or "rule data:" in reply.error.reason
    assert not marker.exists()


def test_a_method_that_sends_class_means_needs_enough_rows_of_each_class(tmp_path: Path) -> None:
    lines = [f"{i}.5,{i},{int(i == 0 or i == 1 or i > 40)}" for i in range(60)]
    (tmp_path / "rare.csv").write_text("\n".join(["a,b,label", *lines]) + "\n")
    site = {"data": str(tmp_path / "rare.csv"), "name": "a", "policy": ""}
    lines = [line.rpartition(",")[0] + f",{int(i < 5)}" for i, line in enumerate(lines)]
    (tmp_path / "rare.csv").write_text("\n".join(["a,b,label", *lines]) + "\n")
    assert not ask(site, values(input_shape="2")).has_error()
    config = read_settings({key: value for key, value in values(input_shape="2").items() if value is not None})
    prototypes = {**config.as_config(), "method": "fedproto"}
    reason = ask(site, prototypes).error.reason
    assert "a class of this site" in reason and "fewer than 10 rows" in reason


def test_errors_of_a_node_with_data_give_only_their_location() -> None:
    def fails(message: Message, context: Any) -> Message:
        raise ValueError("Patient A0")

    context = NodeGrid({"data": "x"}).nodes[1]
    with pytest.raises(RuntimeError, match=r"ValueError at tests/test_policy.py, line \d+; see the node's log"):
        guarded(fails)(None, context)  # type: ignore[arg-type]
    context.node_config = {}
    with pytest.raises(MethodError, match=r"ValueError at tests/test_policy.py, line \d+: Patient A0"):
        guarded(fails)(None, context)  # type: ignore[arg-type]
    error = DataError("/srv/x.csv: row 2", "missing-value", "age", 13)
    text = shared_text(error)
    assert "(missing-value, column age, count 13)" in text and "see the node's log" in text
    assert "x.csv" not in text and "row" not in text
    assert "count below 20" in shared_text(error, min_rows=20)
    assert shared_text(NodeConfigError("/srv/key")).startswith("NodeConfigError at")


# -- random settings -------------------------------------------------------------------------------------


def random_settings(rng: np.random.Generator) -> Config:
    """Return random changes to the settings of a run, most of them hostile."""
    paths = ["/srv/other.csv", "/etc/passwd", "../x", "hf:a/b", "http://h/x", "own/.py:f", "/x.py:f", "os:system"]
    choices: dict[str, list[Any]] = {
        "dataset": ["sites", "sites", "sites", *paths],
        "method": ["fedavg", "fedrep", "fedproto", "fednh", "local", "fedfew", "scaffold", *paths],
        "model": ["linear", "mlp", "auto", *paths],
        "loss": ["cross-entropy", "cross-entropy", *paths],
        "weights": ["", "", *paths],
        "data-dir": paths,
        "seed": list(range(1000)),
        "train-samples": [0, 0, 0, 1, 2, 9],
        "test-fraction": [0.25, 0.25, 0.25, 0.01, 0.9],
        "validation-fraction": [0.0, 0.0, 0.2, 0.5, 0.9],
        "test-set": ["supplied", "supplied", "pooled"],
        "batch-size": [10, 10, 32, 1, 2],
        "local-steps": [0, 1, 100, 100_000],
        "local-epochs": [1, 2, 1000],
        "input-columns": [*["f0,f1,f2"] * 3, "f2,f0,f1", "name", "f0", "name,f0", "label,f0", "f9", ""],
        "label-column": ["", "", "label", "name", "f0", "gone"],
        "group-column": ["", "", "name"],
        "classes": ["", "0,1", "0,1", "x,y", "1,2,3"],
        "feature-mean": ["", "0", "1e30"],
        "feature-std": ["", "1", "1e-38"],
        "sample-kind": ["auto", "features", "text", "image"],
        "input-shape": ["", "3", "3", "1x1x3", "1"],
        "share-class-counts": [False, True],
        "num-clients": [2, 2, 1],
        "precision": ["float32", "tf32"],
    }
    drawn = {key: options[rng.integers(len(options))] for key, options in choices.items()}
    hostile = rng.choice(sorted(drawn), rng.integers(1, 5), replace=False)
    return {key: drawn[key] for key in hostile}


def secrets_of(cells: np.ndarray, folder: Path) -> Iterator[bytes]:
    """Yield the bytes that a message may not contain: each cell as text and as numbers, each name, and the path."""
    for value in cells.ravel().tolist():
        yield repr(value).encode()
        yield from (struct.pack(form, value) for form in ("<d", "<f"))
    yield from (f"Patient A{i}".encode() for i in range(ROWS))
    yield str(folder).encode()


def test_random_settings_release_aggregates_only(site: Config, cells: np.ndarray, tmp_path: Path) -> None:
    rng = np.random.default_rng(2026)
    secrets, outcomes, base = (
        list(secrets_of(cells, tmp_path)),
        {"answered": 0, "refused": 0},
        values(input_columns="f0,f1,f2", model="linear"),
    )
    for number in range(150):
        config = base | random_settings(rng)
        grid = NodeGrid(site | {"state-dir": str(tmp_path / f"state-{number}")})
        replies = [ask(site, config, grid, describe=True), ask(site, config, grid)]
        if not replies[1].has_error() and config["method"] == "fedavg" and config["model"] == "linear":
            model = rng.normal(size=FEATURES * 2 + 2).astype(np.float32)
            replies += [send(grid, config, model), send(grid, config, model, kind="train")]
        for reply in replies:
            outcomes["refused" if reply.has_error() else "answered"] += 1
            sent = reply.error.reason.encode() if reply.has_error() else content_bytes(reply.content)
            assert not [secret for secret in secrets if secret in sent], config
            if reply.has_content() and "mean" in (answer := reply.content.config_records.get("config", {})):
                assert answer["mean"] == [] or answer["count"] >= Policy().min_rows
    assert min(outcomes.values()) > 30, outcomes


def content_bytes(content: RecordDict) -> bytes:
    """Return the numbers and texts of a message as bytes: arrays as they are sent, and numbers also as binary."""
    parts = [array.data for record in content.array_records.values() for array in record.values()]
    for records in (content.metric_records, content.config_records):
        for record in records.values():
            for key, value in record.items():
                items = value if isinstance(value, list) else [value]
                parts += [key.encode(), str(value).encode()]
                parts += [struct.pack("<d", item) for item in items if isinstance(item, float)]
    return b"\0".join(parts)


def test_the_leak_check_detects_a_leaked_record(site: Config, cells: np.ndarray, tmp_path: Path) -> None:
    """The check above fails for a node that sends a row, so that it can fail."""
    leak = RecordDict({"config": ConfigRecord({"mean": cells[3].tolist(), "count": 1})})
    assert any(secret in content_bytes(leak) for secret in secrets_of(cells, tmp_path))


def test_policy_lists_are_parsed() -> None:
    assert replace(Policy(), columns='["a,b", "c"]').allowed_columns == ("a,b", "c")
    assert Policy().allowed_columns == () and Policy().allowed_methods == ()
