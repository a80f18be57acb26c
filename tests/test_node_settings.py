"""Settings of local training that nodes choose in their node config, and the run's bounds for them."""

import csv
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from nodes import POLICY, NodeGrid, table

from posy.accounting import read_ledger
from posy.client_app.node_config import node_settings
from posy.client_app.policy import violations
from posy.client_app.workspace import Workspace
from posy.commands.cli import main
from posy.data.policy import Policy
from posy.randomness import model_seed
from posy.server_app.app import run
from posy.server_app.query import NodeQuery
from posy.server_app.recorder import Recorder
from posy.settings import COMMAND_LINE, NodeConfigError, SettingsError
from posy.strategies.client_settings import (
    NOT_SHARED,
    bounds_of,
    check_allowed,
    layered,
    read_report,
    report_of,
    train_settings,
)
from posy.strategies.registry import read_settings
from posy.strategies.replies import BadReplyError
from posy.strategies.run_settings import TrainSettings

Config = dict[str, Any]
BOUNDS = "local-epochs: 1..5, batch-size: 8..500, lr: 1e-3..0.5"
CHOSEN = {"local-epochs": 3, "batch-size": 20, "lr": 0.2}
SITES = {"site-a": 60, "site-b": 92}
"""Number of rows of each site; a quarter of them are for the test."""


@pytest.fixture
def sites(tmp_path: Path) -> dict[str, Config]:
    """Node configs of two sites with three features and two classes, by name."""
    rng, configs = np.random.default_rng(0), {}
    for name, rows in SITES.items():
        x = rng.normal(size=(rows, 3))
        data = table(tmp_path / f"{name}.csv", x, (x[:, 0] + 0.3 * rng.normal(size=rows) > 0).astype(int))
        configs[name] = {"data": str(data)}
    return configs


@pytest.fixture
def train(tmp_path: Path) -> Callable[..., Recorder]:
    """Return a function that runs FedAvg over sites, whose keys are registered under their names."""

    def run_sites(configs: dict[str, Config], **settings: Any) -> Recorder:
        grid = NodeGrid()
        for number, (name, config) in enumerate(configs.items(), start=1):
            grid.connect(number, config, registered=name)
        of_run = {"method": "fedavg", "dataset": "sites", "num-clients": 2, "num-server-rounds": 2, "model": "linear"}
        of_run |= {"device": "cpu", "output-dir": str(tmp_path / "runs"), "join-timeout": 2.0}
        done = run(grid, of_run | {key.replace("_", "-"): value for key, value in settings.items()})
        assert isinstance(done, Recorder)
        return done

    return run_sites


def chosen_in(recorder: Recorder) -> dict[str, str]:
    """Return the settings that each site has chosen, according to its last row in clients.csv."""
    with (recorder.directory.path / "clients.csv").open(newline="") as file:
        return {row["site"]: row["node_settings"] for row in csv.DictReader(file)}


# -- bounds and precedence ---------------------------------------------------------------------------------


def test_bounds_are_numbers_of_their_settings() -> None:
    assert bounds_of(BOUNDS) == {"local-epochs": (1, 5), "batch-size": (8, 500), "lr": (0.001, 0.5)}
    assert bounds_of("") == bounds_of(" ") == {}
    assert bounds_of("lr:1..1") == {"lr": (1.0, 1.0)}


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("local-epochs", "'local-epochs'"),
        ("local-epochs: 5", "'local-epochs: 5'"),
        ("local-epochs: 1..5,", "''"),
        ("momentum: 0..1", "'momentum'"),
        ("lr: 0.1..0.2, lr: 0.1..0.3", "'lr'"),
        ("local-epochs: 0..5", "local-epochs = 0"),
        ("batch-size: 1.5..8", "batch-size = 1.5"),
        ("batch-size: 8..", "batch-size = "),
        ("lr: .nan..1", "lr = nan"),
        ("lr: [1]..2", "lr = [1]"),
        ("local-epochs: 5..1", "5..1"),
    ],
)
def test_malformed_bounds_are_refused(text: str, part: str) -> None:
    with pytest.raises(SettingsError) as raised:
        read_settings({"client-bounds": text}, COMMAND_LINE)
    for expected in ("client-bounds", part):
        assert expected in str(raised.value)


def test_the_node_overrides_the_name_which_overrides_the_number() -> None:
    entries = {"1": {"local-steps": 4, "batch-size": 2, "lr": 0.1}, "b": {"local-epochs": 3, "lr": 0.2}}
    train = TrainSettings(client_settings=json.dumps(entries), batch_size=7, momentum=0.5)

    def values(*arguments: Any) -> tuple[Any, ...]:
        merged = train_settings(train, *arguments)
        assert merged.momentum == 0.5
        return merged.local_epochs, merged.local_steps, merged.batch_size, merged.lr

    assert values(0) == (2, 0, 7, 0.05)
    assert values(1) == (2, 4, 2, 0.1)
    assert values(1, "b") == (3, 0, 2, 0.2)  # the epochs of the name replace the steps of the number
    assert values(0, "b", (("batch-size", 9),)) == (3, 0, 9, 0.2)
    assert values(1, "", (("local-epochs", 5),)) == (5, 0, 2, 0.1)
    assert values(1, "b", (("local-steps", 6), ("lr", 0.3))) == (3, 6, 2, 0.3)
    assert layered({"local-epochs": 2, "local-steps": 8}) == {"local-epochs": 2, "local-steps": 8}


def test_a_node_config_has_the_types_of_flower_and_of_the_command_line() -> None:
    assert node_settings({"data": "/x", "lr": "1e-2", "batch-size": 16}) == (("batch-size", 16), ("lr", 0.01))
    assert node_settings({"lr": 1}) == (("lr", 1.0),)
    for config, part in (
        ({"local-epochs": "0"}, "local-epochs = 0"),
        ({"batch-size": True}, "batch-size = "),
        ({"lr": "fast"}, "lr = 'fast'"),
        ({"local-epochs": 2, "local-steps": 3}, "local-epochs = 2"),
    ):
        with pytest.raises(NodeConfigError, match=part):
            node_settings(config)
    assert node_settings({"local-epochs": 2, "local-steps": 0}) == (("local-epochs", 2), ("local-steps", 0))


@pytest.mark.parametrize(
    ("chosen", "bounds", "parts"),
    [
        (("local-epochs", 6), BOUNDS, ("local-epochs = 6", "1 to 5")),
        (("lr", 0.0009), BOUNDS, ("lr = 0.0009", "0.001 to 0.5")),
        (("local-steps", 3), BOUNDS, ("local-steps = 3", "local-epochs, batch-size, lr")),
        (("lr", 0.1), "", ("lr = 0.1", "client-bounds = ''")),
    ],
)
def test_a_value_that_the_run_does_not_allow_is_refused(
    chosen: tuple[str, float], bounds: str, parts: tuple[str, ...]
) -> None:
    for shares_values in (True, False):
        with pytest.raises(SettingsError) as raised:
            check_allowed((chosen,), bounds, shares_values=shares_values)
        message = str(raised.value)
        assert raised.value.shareable
        assert (parts[0] in message) == shares_values
        for part in (chosen[0], "node config", "client-bounds", "remove", *parts[1:]):
            assert part in message
    check_allowed((("local-epochs", 1), ("lr", 0.5)), BOUNDS)


# -- runs --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("secure", [False, True])
def test_a_node_trains_with_its_own_settings(
    secure: bool, sites: dict[str, Config], train: Callable[..., Recorder]
) -> None:
    """The same values in `client-settings`, by the site's name or by its number, give the same model bit for bit."""
    common = {"secure_aggregation": secure, "lr_schedule": "exponential", "client_bounds": BOUNDS}
    with_chosen = {**sites, "site-b": sites["site-b"] | CHOSEN}
    chosen = train(with_chosen, **common)
    by_name = train(sites, **common, client_settings=json.dumps({"site-b": CHOSEN}))
    assert chosen.strategy.model.tobytes() == by_name.strategy.model.tobytes()
    assert chosen_in(chosen) == {"site-a": "", "site-b": "batch-size=20 local-epochs=3 lr=0.2"}
    assert chosen_in(by_name) == {"site-a": "", "site-b": ""}
    if secure:
        return
    assert chosen.strategy.record.samples == 2 * 45 + 3 * 69
    by_number = train(sites, **common, client_settings=json.dumps({"1": CHOSEN}))
    overridden = train(with_chosen, **common, client_settings=json.dumps({"site-b": {"lr": 0.4}}))
    for other in (by_number, overridden):
        assert chosen.strategy.model.tobytes() == other.strategy.model.tobytes()
    assert chosen.strategy.model.tobytes() != train(sites, **common).strategy.model.tobytes()


def test_the_update_of_a_site_is_gradient_descent_with_its_own_settings(
    sites: dict[str, Config],
    train: Callable[..., Recorder],
    softmax_regression: Callable[..., tuple[float, np.ndarray]],
) -> None:
    """With full batches, each epoch is one gradient step, and the server averages: w = Σ n_i / n w_i."""
    chosen = {"site-a": {}, "site-b": {"local-epochs": 4, "lr": 0.3}}
    configs = {name: config | chosen[name] for name, config in sites.items()}
    settings = {"batch_size": 500, "local_epochs": 2, "lr": 0.1, "num_server_rounds": 1, "feature_mean": "0"}
    unlimited = {"feature_std": "1", "max_client_weight": 1.0, "max_norm_ratio": 0.0}
    done = train(configs, **settings, **unlimited, client_bounds=BOUNDS)
    models, weights = [], []
    for name, epochs, lr in (("site-a", 2, 0.1), ("site-b", 4, 0.3)):
        site = Workspace(done.settings, sites[name]["data"], False, POLICY)
        rows = site.partition.train[0]
        flat = site.architecture.initial(model_seed(done.settings.run.seed, 0)).astype(np.float64)
        for _ in range(epochs):
            flat = flat - lr * softmax_regression(flat, site.dataset.x[rows], site.dataset.y[rows])[1]
        models.append(flat)
        weights.append(len(rows))
    np.testing.assert_allclose(done.strategy.model, np.average(models, axis=0, weights=weights), atol=1e-6)


def test_nodes_with_benchmark_data_choose_settings_too(
    make_config: Callable[..., Config], federate: Callable[..., Any], tmp_path: Path
) -> None:
    """Nodes 0 and 1 host clients 0, 2 and 1, 3; the result equals an in-process run with `client-settings`."""
    config = make_config("scaffold", num_server_rounds=2, model="linear", output_dir=str(tmp_path / "runs"))
    chosen = {"local-epochs": 3, "batch-size": 4, "lr": 0.02}
    nodes = [{"partition-id": i, "num-partitions": 2, "name": name} for i, name in enumerate("ab")]
    done = run(NodeGrid(nodes[0], nodes[1] | chosen), config | {"client-bounds": BOUNDS.replace("8..", "1..")})
    assert chosen_in(done) == {"a": "", "b": "batch-size=4 local-epochs=3 lr=0.02"}
    in_process = federate(config | {"client-settings": json.dumps({"1": chosen, "3": chosen})})
    for name in ("model", "control"):
        assert np.array_equal(getattr(done.strategy, name), getattr(in_process.strategy, name))


# -- refusals ----------------------------------------------------------------------------------------------


def test_a_run_refuses_a_site_out_of_bounds(sites: dict[str, Config], train: Callable[..., Recorder]) -> None:
    configs = {**sites, "site-b": sites["site-b"] | {"local-epochs": 9}}
    done = train(configs, client_bounds=BOUNDS, min_clients=1)
    ((name, reason),) = done.federation.excluded
    assert name == "site-b"
    for part in ("local-epochs = 9", "1 to 5", "client-bounds"):
        assert part in reason
    assert done.summary["sites"] == ["site-a", None]


def test_the_policy_can_withhold_the_values(
    sites: dict[str, Config], train: Callable[..., Recorder], tmp_path: Path
) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text("min-rows: 10\nshare-settings: false\n")
    private = sites["site-b"] | {"policy": str(policy)}
    done = train({**sites, "site-b": private | {"batch-size": 23}}, client_bounds=BOUNDS)
    assert chosen_in(done) == {"site-a": "", "site-b": NOT_SHARED}
    for key, value, part in (("lr", 0.77, "client-bounds"), ("batch-size", 9, "rule min-rows")):
        done = train({**sites, "site-b": private | {key: value}}, client_bounds=BOUNDS, min_clients=1)
        ((_, reason),) = done.federation.excluded
        assert key in reason
        assert part in reason
        assert str(value) not in reason


@pytest.mark.parametrize("shared", [True, False])
def test_the_server_needs_the_settings_of_a_node_for_dp_sgd(
    shared: bool, sites: dict[str, Config], train: Callable[..., Recorder], tmp_path: Path
) -> None:
    pytest.importorskip("dp_accounting")
    policy = tmp_path / "policy.yaml"
    policy.write_text(f"share-settings: {str(shared).lower()}\n")
    sites["site-b"] |= {"batch-size": 23, "policy": str(policy)}
    privacy = {"dp": "sample", "dp_clip": 1.0, "dp_epsilon": 8.0, "client_bounds": BOUNDS, "min_clients": 1}
    done = train(sites, **privacy)
    if not shared:
        ((_, reason),) = done.federation.excluded
        assert "share-settings: false; with dp = 'sample', the server needs these settings" in reason
        return
    ledger = (done.directory.path / "privacy.jsonl").read_text(encoding="utf-8")
    sampling = {client: event.sampling for event, facts in read_ledger(ledger) for client in facts["clients"]}
    assert sampling == {0: pytest.approx(10 / 45, rel=0.05), 1: pytest.approx(23 / 69, rel=0.05)}
    assert done.summary["privacy"]["epsilon"] == pytest.approx(8.0, rel=0.02)


@pytest.mark.parametrize("shared", [True, False])
def test_a_method_warns_about_the_settings_of_a_node(
    shared: bool, sites: dict[str, Config], train: Callable[..., Recorder], tmp_path: Path,
    warnings: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """The node knows its settings; the server knows them only if the policy lets the site share them."""
    policy = tmp_path / "policy.yaml"
    policy.write_text(f"share-settings: {str(shared).lower()}\nmin-rows: 2\n")
    sites["site-b"] |= {"batch-size": 2, "policy": str(policy)}
    train(sites, method="per-fedavg", per_fedavg_hessian="hf", batch_size=8, client_bounds="batch-size: 1..8")
    text = "batch-size = 2: a mini-batch has fewer samples"
    assert f"per-fedavg: the node config: {text}" in warnings.text
    assert (f"per-fedavg: node config of site-b (client 1): {text}" in warnings.text) == shared


def test_the_policy_applies_to_the_resulting_values() -> None:
    policy = Policy(min_rows=10, max_local_epochs=5)
    values = {"dataset": "sites", "batch-size": 4, "client-settings": '{"0": {"batch-size": 3}}'}
    assert {violation.rule for violation in violations(policy, values)} == {"min-rows"}
    assert violations(policy, values, (("batch-size", 16),)) == []
    assert [v.rule for v in violations(policy, values, (("batch-size", 16), ("local-epochs", 6)))] == [
        "max-local-epochs"
    ]
    malformed = violations(policy, {"dataset": "sites", "client-bounds": "lr: x..y"})
    assert [violation.rule for violation in malformed] == ["settings"]


@pytest.mark.parametrize(
    "report", ["{", "[]", '{"lr": 9}', '{"momentum": 0.5}', '{"lr": "x"}', 5, '{"local-epochs": 2.5}']
)
def test_the_server_checks_what_a_node_reports(report: Any) -> None:
    settings = read_settings({"dataset": "sites", "num-clients": 2, "client-bounds": BOUNDS})
    settings = replace(settings, data=replace(settings.data, sample_kind="features", input_shape="2", classes="a,b"))
    settings = replace(settings, data=replace(settings.data, feature_mean="0", feature_std="1"))
    answer = {"num-train": 5, "num-test": 2, "fingerprint": "", "client": 0}
    query = NodeQuery(settings)
    for valid, text in ((report_of(()), ""), (report_of((("lr", 0.1),)), "lr=0.1"), (NOT_SHARED, NOT_SHARED)):
        (info,) = query.clients({**answer, "node-settings": valid}, 1, "a").clients
        assert info.node_settings == text
    with pytest.raises(BadReplyError):
        query.clients({**answer, "node-settings": report}, 1, "a")
    for unexpected in (NOT_SHARED, '{"lr": 0.1}'):
        with pytest.raises(SettingsError):
            read_report(unexpected, "")


def test_unknown_names_of_sites_are_refused_once_all_have_joined(
    sites: dict[str, Config], train: Callable[..., Recorder], warnings: pytest.LogCaptureFixture
) -> None:
    of_other = json.dumps({"site-c": {"lr": 0.2}})
    with pytest.raises(SettingsError, match=r"client-settings: client site-c .* site-a, site-b"):
        train(sites, client_settings=of_other)
    with pytest.raises(SettingsError, match="client-settings: client 2 "):
        train(sites, client_settings=json.dumps({"2": {"lr": 0.2}}))
    train({"site-a": sites["site-a"]}, client_settings=of_other, min_clients=1, num_server_rounds=1)
    assert "client site-c" in warnings.text


def test_check_site_shows_and_checks_the_chosen_values(
    sites: dict[str, Config], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["check-site", f"data={sites['site-a']['data']}", "batch-size=16", "lr=0.2"]
    assert main([*words, f"client-bounds={BOUNDS}"]) == 0
    assert "local-epochs = 2, batch-size = 16, lr = 0.2" in capsys.readouterr().out
    assert main(words) == 0
    assert "client-bounds" in capsys.readouterr().out
    for more, parts in (
        (["client-bounds=batch-size: 20..30, lr: 0.1..0.3"], ("batch-size = 16", "20 to 30")),
        (["local-epochs=101"], ("local-epochs = 101", "max-local-epochs")),
    ):
        assert main([*words, *more]) == 2
        error = capsys.readouterr().err
        assert all(part in error for part in parts)
