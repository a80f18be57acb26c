"""Clients that send wrong counts, large updates or wrong models: checks and limits of the server, and its record."""

import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, Message, MessageType, RecordDict
from test_strategy_base import metrics, send, state_bytes, take

from posy.client_app.workspace import Workspace
from posy.report.page import page
from posy.server_app.app import make_strategy as build_strategy
from posy.server_app.app import run
from posy.server_app.in_process import InProcessGrid
from posy.settings import SettingsError
from posy.strategies.bounds import NORM_RATIO
from posy.strategies.methods import METHODS, settings_class
from posy.strategies.registry import read_settings
from posy.strategies.replies import Update
from posy.strategies.server_state import state_of

MakeStrategy = Callable[..., Any]
Config = dict[str, Any]
GOOD, BAD = (0, 2, 3), 1
CLAIM = 999_999_999
NORMALISED = f"{Path(__file__).parent / 'networks.py'}:normalised"
ROBUST = [method for method in METHODS if settings_class(method).robust is None]


class PoisoningGrid(InProcessGrid):
    """Changes the training replies of some clients: each array becomes ``attack(sent, reply)``."""

    def __init__(self, num_clients: int, attackers: tuple[int, ...], attack: Callable[[Any, Any], Any]) -> None:
        super().__init__(num_clients)
        self.attackers, self.attack = attackers, attack

    def _answers(self, messages: Any, end: float) -> list[Message]:
        replies = super()._answers(messages, end)
        messages_by_id = {message.metadata.message_id: message for message in messages}
        for reply in replies:
            message = messages_by_id[reply.metadata.reply_to_message_id]
            if message.metadata.message_type != MessageType.TRAIN or reply.has_error():
                continue
            if message.content.config_records["config"]["client"] in self.attackers:
                poison(message.content, reply.content, self.attack)
        return replies


def poison(sent: RecordDict, reply: RecordDict, attack: Callable[[Any, Any], Any]) -> None:
    arrays = reply.array_records["arrays"]
    start, trained = (content.array_records["arrays"]["model"].numpy() for content in (sent, reply))
    arrays["model"] = Array(attack(start, trained).astype(np.float32))


def strategy_of_clients(make_strategy: MakeStrategy, method: str = "fedavg", clients: int = 10, **settings: Any) -> Any:
    """Return a strategy of ten clients with two to eleven training samples and two test samples each."""
    generator = np.random.default_rng(0)
    y, train, test = [], [], []
    for client in range(clients):
        start = len(y)
        y += [(client + i) % 3 for i in range(client + 4)]
        train.append(list(range(start, len(y) - 2)))
        test.append(list(range(len(y) - 2, len(y))))
    x = generator.normal(size=(len(y), 6)).astype(np.float32)
    return make_strategy(method, data=(x, np.array(y), train, test), **settings)


def as_sites(strategy: Any) -> Any:
    """Let a strategy apply the defaults of sites."""
    strategy.settings = replace(strategy.settings, data=replace(strategy.settings.data, dataset="sites"))
    return strategy


def update_of(client: int, n: int = 1, **arrays: Any) -> Update:
    named = {name: np.asarray(array, np.float32) for name, array in arrays.items()}
    return Update(named, 1.0, client=client, num_examples=n, weight=n)


# -- numbers of samples ----------------------------------------------------------------------------------


def test_a_false_sample_count_cannot_dominate_the_mean(make_strategy: MakeStrategy) -> None:
    """M2 of the security review: a client replied num-examples=999999999 and dominated FedAvg without a warning."""
    strategy, without_attacker = strategy_of_clients(make_strategy), strategy_of_clients(make_strategy)
    _, replies = send(strategy)
    poison(replies[4].content, replies[4].content, lambda start, trained: np.full_like(trained, 7))
    metrics(num_examples=CLAIM)(replies[4].content)
    take(strategy, replies)
    _, honest = send(without_attacker)
    take(without_attacker, [reply for client, reply in enumerate(honest) if client != 4])
    assert state_bytes(strategy) == state_bytes(without_attacker)
    ((client, reason),) = strategy.record.dropped
    assert client == 4 and re.fullmatch(f"num-examples = {CLAIM}, but .* 6", reason)
    assert "train_loss" not in strategy.record.row(4)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_drops_replies_with_wrong_sample_counts(method: str, make_strategy: MakeStrategy) -> None:
    for key, value in (("num_examples", CLAIM), ("num_examples", 1), ("num_test", 5)):
        strategy = make_strategy(method, model="mlp", num_server_rounds=8)
        _, replies = send(strategy)
        metrics(**{key: value})(replies[BAD].content)
        take(strategy, replies)
        joined = 12 if key == "num_examples" else 6
        ((client, reason),) = strategy.record.dropped
        assert client == BAD and re.fullmatch(f"{key.replace('_', '-')} = {value}, but .* {joined}", reason)
        assert all("train_loss" in strategy.record.row(client) for client in GOOD)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_drops_evaluations_with_wrong_sample_counts(method: str, make_strategy: MakeStrategy) -> None:
    for key, value in (("num_train", CLAIM), ("num_examples", 5)):
        strategy, grid = make_strategy(method, model="mlp", num_server_rounds=8), InProcessGrid(4)
        _, replies = send(strategy, grid=grid)
        take(strategy, replies)
        _, replies = send(strategy, phase="evaluate", grid=grid)
        metrics(**{key: value})(replies[BAD].content)
        take(strategy, replies, phase="evaluate")
        ((client, reason),) = strategy.record.dropped
        assert client == BAD and re.fullmatch(rf"{key.replace('_', '-')} = {value}, but .* \d+", reason)


@pytest.mark.parametrize(("validation", "aside"), [(0.0, 0.2), (0.0, 0.0), (0.2, 0.2)])
def test_fedfomos_clients_report_all_their_training_samples(
    validation: float, aside: float, make_strategy: MakeStrategy
) -> None:
    settings = {"validation_fraction": validation} if validation else {"fedfomo_validation": aside}
    strategy, grid = make_strategy("fedfomo", **settings), InProcessGrid(4)
    _, replies = send(strategy, grid=grid)
    take(strategy, replies)
    _, replies = send(strategy, phase="evaluate", grid=grid)
    take(strategy, replies, phase="evaluate")
    assert not strategy.record.dropped


@pytest.mark.parametrize("method", ["fedproto", "fedpac"])
@pytest.mark.parametrize("claim", [CLAIM, 1.0])
def test_class_counts_must_sum_to_the_enrolled_count(method: str, claim: float, make_strategy: MakeStrategy) -> None:
    strategy = make_strategy(method, model="mlp")
    _, replies = send(strategy)
    arrays = replies[BAD].content.array_records["arrays"]
    counts = arrays["counts"].numpy().copy()
    assert counts.sum() == 12
    arrays["counts"] = Array(counts + np.array([0, claim, 0], np.float32))
    take(strategy, replies)
    ((client, reason),) = strategy.record.dropped
    total, _, words = reason.partition(" ")
    assert client == BAD and re.fullmatch("samples by class, but .* 12", words)
    assert float(total) == pytest.approx(12 + claim, rel=1e-7)


def test_fednhs_class_shares_must_sum_to_one(make_strategy: MakeStrategy) -> None:
    strategy = make_strategy("fednh", model="mlp")
    _, replies = send(strategy)
    arrays = replies[BAD].content.array_records["arrays"]
    directions = arrays["directions"].numpy()
    assert np.linalg.norm(directions, axis=1) == pytest.approx([0.5, 0.5, 0], abs=1e-6)
    arrays["directions"] = Array(np.float32(1.1) * directions)
    take(strategy, replies)
    ((client, reason),) = strategy.record.dropped
    assert client == BAD and reason.startswith("the class shares")


# -- the largest weight ----------------------------------------------------------------------------------


def test_a_site_with_a_huge_sample_count_has_a_limited_weight(make_strategy: MakeStrategy) -> None:
    strategy = as_sites(strategy_of_clients(make_strategy, max_norm_ratio=0.0))
    strategy.clients[4].num_train = CLAIM
    _, replies = send(strategy)
    metrics(num_examples=CLAIM)(replies[4].content)
    models = [reply.content.array_records["arrays"]["model"].numpy().astype(np.float64) for reply in replies]
    take(strategy, replies)
    n = np.array([client + 2.0 for client in range(10)])
    n[4] = 0.3 / 0.7 * (n.sum() - n[4])  # 3 / 10 of the sum
    assert strategy.model == pytest.approx(n @ models / n.sum(), rel=1e-5, abs=1e-6)
    assert strategy.record.down_weighted == [4]


@pytest.mark.parametrize(
    ("sites", "settings", "share"),
    [
        (False, {}, 1.0),
        (True, {}, 0.3),
        (True, {"max_client_weight": 1.0}, 1.0),
        (False, {"max_client_weight": 0.4}, 0.4),
        (True, {"robust": "median"}, 1.0),
        (True, {"robust": "geometric-median"}, 0.3),
        (True, {"secure_aggregation": True}, 1.0),
    ],
)
def test_the_largest_share_depends_on_settings_and_sites(
    sites: bool, settings: Config, share: float, make_strategy: MakeStrategy
) -> None:
    strategy = strategy_of_clients(make_strategy, **settings)
    assert (as_sites(strategy) if sites else strategy).influence.largest_share(10) == share


def test_uniform_weights_are_never_lowered(make_strategy: MakeStrategy) -> None:
    strategy = as_sites(strategy_of_clients(make_strategy, client_weights="uniform"))
    _, replies = send(strategy)
    take(strategy, replies)
    assert strategy.record.down_weighted == []


def test_fedas_limits_weights_by_fisher_information(make_strategy: MakeStrategy) -> None:
    strategy = make_strategy("fedas", model="mlp", max_client_weight=0.5)
    size = strategy.model.size
    updates = [update_of(c, model=np.full(size, c), fisher=trace) for c, trace in ((0, 1.0), (1, 1e9), (2, 3.0))]
    strategy.influence.limit(updates)
    quantities = strategy.aggregate(1, updates)
    assert quantities["largest_weight"] == pytest.approx(0.5)
    assert strategy.model[0] == pytest.approx((1 * 0 + 4 * 1 + 3 * 2) / 8)
    assert strategy.record.down_weighted == [1]


def test_fedfew_limits_weights_by_loss(make_strategy: MakeStrategy) -> None:
    strategy = make_strategy("fedfew", model="mlp", fedfew_full_steps=False, max_client_weight=0.5)
    shape, k = strategy.models.shape, len(strategy.models)
    before = strategy.models.copy()
    updates = [
        update_of(c, models=np.full(shape, c), losses=np.full(k, loss)) for c, loss in ((0, 0.1), (1, 1e5), (2, 0.1))
    ]
    strategy.influence.limit(updates)
    strategy.aggregate(1, updates)
    # α = (0, 1, 0) becomes (0, 1/2, 0), and all K models share it: Σ α_i Δ_i / K = 1/2 / K
    assert strategy.models - before == pytest.approx(np.full(shape, 0.5 / k), abs=1e-6)
    assert strategy.record.down_weighted == [1]


def test_weight_limits_apply_to_sums_over_samples(make_strategy: MakeStrategy) -> None:
    strategy = make_strategy("fedproto", model="mlp", max_client_weight=0.5)
    shape = strategy.prototypes.shape
    updates = [
        update_of(0, 2, prototypes=np.full(shape, 0.0), counts=[1, 1, 0]),
        update_of(1, 10**9, prototypes=np.full(shape, 6.0), counts=[1e9, 0, 0]),
        update_of(2, 2, prototypes=np.full(shape, 3.0), counts=[2, 0, 0]),
    ]
    strategy.influence.limit(updates)
    strategy.aggregate(1, updates)
    assert strategy.prototypes[0, 0] == pytest.approx((1 * 0 + 4 * 6 + 2 * 3) / 7, rel=1e-5)
    assert strategy.record.down_weighted == [1]


# -- the norm bound --------------------------------------------------------------------------------------


def test_a_large_update_is_scaled_to_a_multiple_of_the_median(make_strategy: MakeStrategy) -> None:
    strategy = make_strategy("fedavg", max_norm_ratio=2.0)
    start = strategy.model.copy()
    step = np.zeros((4, strategy.size), np.float32)
    step[0, 0], step[1, 0], step[2, 1], step[3, 2] = 1, 2, 3, -100
    updates = [update_of(client, model=start + row) for client, row in enumerate(step)]
    strategy.influence.limit(updates)
    moved = np.stack([update.arrays["model"] - start for update in updates])
    expected = step.copy()
    expected[3, 2] = -4  # 2 times the median, here the smaller of the two in the middle
    assert moved == pytest.approx(expected, abs=1e-6)
    assert [update.arrays["model"].dtype for update in updates] == [np.float32] * 4
    assert all(np.array_equal(updates[client].arrays["model"], start + step[client]) for client in range(3))
    assert strategy.record.clipped == [3]


def test_running_statistics_have_a_separate_bound(make_strategy: MakeStrategy) -> None:
    x = np.random.default_rng(0).integers(0, 256, (40, 4, 4, 1), dtype=np.uint8)
    parts = [list(range(i, i + 8)) for i in (0, 10, 20, 30)], [[8], [18], [28], [38]]
    strategy = make_strategy("fedavg", data=(x, np.arange(40) % 2, *parts), model=NORMALISED, max_norm_ratio=2.0)
    is_parameter = strategy.influence.is_parameter(strategy.model)
    assert 0 < (~is_parameter).sum() < strategy.size
    start = strategy.model.copy()
    updates = [update_of(client, model=start + np.float32(0.01)) for client in range(4)]
    updates[3].arrays["model"][~is_parameter] += 1e6
    strategy.influence.limit(updates)
    assert updates[3].arrays["model"][is_parameter] == pytest.approx(start[is_parameter] + 0.01, abs=1e-6)
    assert updates[3].arrays["model"][~is_parameter] == pytest.approx(start[~is_parameter] + 0.02, rel=1e-3)
    assert strategy.record.clipped == [3]


@pytest.mark.parametrize("method", METHODS)
def test_sites_bound_norms_and_benchmarks_do_not(method: str, make_strategy: MakeStrategy) -> None:
    refuses = "max-norm-ratio" in settings_class(method)().refusals()
    assert refuses == (method in ("local", "scaffold"))
    strategy = make_strategy(method, model="mlp", num_server_rounds=8)
    assert (strategy.influence.norm_ratio, strategy.influence.largest_share(10)) == (0, 1)
    assert as_sites(strategy).influence.norm_ratio == (0 if refuses else NORM_RATIO)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_clips_the_update_of_a_site(method: str, make_strategy: MakeStrategy) -> None:
    """A client scales its update by 1000. The server's state changes as with an update of three medians."""
    strategy = as_sites(make_strategy(method, model="mlp", num_server_rounds=8))
    if not strategy.influence.norm_ratio:
        return
    if method == "fedfomo":
        strategy.initialise()  # sites need the starts of the clients
    _, replies = send(strategy)
    content = replies[BAD].content.array_records["arrays"]
    name = next(name for name, declared in strategy.method.returned.items() if declared.limited)
    content[name] = Array((content[name].numpy() * 1000).astype(np.float32))
    if method == "ifca":
        content["cluster"] = Array(np.array(0))
    take(strategy, replies)
    assert BAD in strategy.record.clipped
    assert not strategy.record.dropped
    arrays = [array for array in state_of(strategy).values() if array.dtype == np.float32]
    assert max(float(np.abs(array).max()) for array in arrays if array.size) < 100


def test_loose_bounds_do_not_change_a_run(make_config: Callable[..., Config], federate: Any) -> None:
    plain = federate(make_config("fedrep", model="mlp"))
    bounded = federate(make_config("fedrep", model="mlp", max_norm_ratio=1e6, max_client_weight=0.99))
    assert state_bytes(bounded.strategy) == state_bytes(plain.strategy)
    assert all(not record.clipped and not record.down_weighted for record in bounded.records)


# -- robust rules in methods -----------------------------------------------------------------------------


@pytest.mark.parametrize("method", ROBUST)
def test_a_trimmed_mean_without_trimming_is_the_uniform_mean(
    method: str, make_config: Callable[..., Config], federate: Any
) -> None:
    settings = {"model": "mlp", "num_server_rounds": 4, "fedavg_ft_rounds": 0}
    settings |= {"ppfe_stages": 2} if method == "ppfe" else {}
    uniform = federate(make_config(method, client_weights="uniform", **settings))
    trimmed = federate(make_config(method, robust="trimmed-mean", trim_fraction=0.0, **settings))
    states = [state_of(ran.strategy) for ran in (uniform, trimmed)]
    for name, array in states[0].items():
        if array.dtype == np.float32:
            assert states[1][name] == pytest.approx(array, rel=1e-4, abs=1e-5), name


@pytest.mark.parametrize("rule", ["median", "trimmed-mean", "krum", "multi-krum", "geometric-median"])
@pytest.mark.parametrize("method", ["fedavg", "fedrep", "ditto", "pfedme", "ppfe", "feddrm"])
def test_every_rule_resists_two_attackers_of_ten(
    method: str, rule: str, tiny: Any, make_config: Callable[..., Config], federate: Any
) -> None:
    """Two attackers send models of 10^6 in every round. The models of the server stay small."""
    generator = np.random.default_rng(3)
    y = np.arange(80) % 3
    x = (np.eye(3)[y] @ generator.normal(0, 2, (3, 6)) + generator.normal(size=(80, 6))).astype(np.float32)
    parts = [list(range(8 * i, 8 * i + 6)) for i in range(10)], [[8 * i + 6, 8 * i + 7] for i in range(10)]
    settings: Config = {"data": (x, y, *parts), "model": "mlp", "robust": rule}
    settings |= {"max_attackers": 2} if "krum" in rule else {}
    settings |= {"ppfe_stages": 1} if method == "ppfe" else {}
    attacked = federate(
        make_config(method, **settings),
        grid=lambda count: PoisoningGrid(count, (2, 7), lambda start, trained: np.full_like(trained, 1e6)),
    )
    assert not [entry for record in attacked.records for entry in record.dropped]
    model = attacked.strategy.finished[0] if method == "ppfe" else attacked.strategy.model
    assert np.abs(model).max() < 10
    named = [{*record.discarded, *record.down_weighted} for record in attacked.records]
    assert all({2, 7} <= clients for clients in named) or rule == "median"


@pytest.mark.parametrize("method", [method for method in METHODS if method not in ROBUST])
def test_other_methods_refuse_robust_rules_with_a_reason(method: str, make_strategy: MakeStrategy) -> None:
    reason = settings_class(method).robust.why
    with pytest.raises(SettingsError, match=rf"robust = 'median' .*method = '{re.escape(method)}'"):
        make_strategy(method, robust="median")
    assert len(reason) > 20


def test_robust_rules_conflict_with_secure_aggregation(make_strategy: MakeStrategy) -> None:
    with pytest.raises(SettingsError, match=r"robust = 'median' .*secure-aggregation = true"):
        make_strategy("fedavg", robust="median", secure_aggregation=True)
    for key, value in (("max_norm_ratio", 2.0), ("max_client_weight", 0.5)):
        with pytest.raises(SettingsError, match=f"{key.replace('_', '-')} = {value} .* has no effect"):
            make_strategy("fedavg", secure_aggregation=True, **{key: value})


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"trim_fraction": 0.1}, "trim-fraction"),
        ({"robust": "median", "max_attackers": 2}, "max-attackers"),
        ({"robust": "krum", "krum_clients": 2}, "krum-clients"),
        ({"robust": "median", "client_weights": "uniform"}, "client-weights"),
        ({"robust": "krum", "max_client_weight": 0.5}, "max-client-weight"),
    ],
)
def test_rule_parameters_need_their_rule(settings: Config, key: str, make_strategy: MakeStrategy) -> None:
    with pytest.raises(SettingsError, match=f"{key} = .* has no effect"):
        make_strategy("fedavg", **settings)


def test_feddrm_weights_its_routing_under_any_rule(make_strategy: MakeStrategy) -> None:
    assert make_strategy("feddrm", robust="median", client_weights="uniform").exchange.weight(0) == 1


def test_too_few_clients_for_krum_are_refused_before_the_run(make_config: Callable[..., Config]) -> None:
    settings = read_settings(make_config("fedavg", robust="krum", max_attackers=1))
    with pytest.raises(SettingsError, match="needs 5 replies, but only 4 clients"):
        build_strategy(settings, Workspace(settings))


def test_a_round_with_too_few_replies_for_krum_changes_nothing(
    make_strategy: MakeStrategy, warnings: pytest.LogCaptureFixture
) -> None:
    strategy = strategy_of_clients(make_strategy, clients=5, robust="krum", max_attackers=1)
    before = state_bytes(strategy)
    _, replies = send(strategy)
    assert take(strategy, replies[:4]) == (None, None)
    assert state_bytes(strategy) == before
    assert "4 accepted replies, but robust = krum with max-attackers = 1 needs 5" in warnings.text
    _, replies = send(strategy, 2)
    take(strategy, replies, 2)
    assert state_bytes(strategy) != before
    assert len(strategy.record.discarded) == 4


def test_krum_takes_the_median_of_running_statistics(make_strategy: MakeStrategy) -> None:
    """Krum's distances ignore BatchNorm's statistics, so Krum does not take them from the chosen model."""
    x = np.random.default_rng(0).integers(0, 256, (50, 4, 4, 1), dtype=np.uint8)
    parts = [list(range(i, i + 8)) for i in range(0, 50, 10)], [[i + 8] for i in range(0, 50, 10)]
    strategy = make_strategy("fedavg", data=(x, np.arange(50) % 2, *parts), model=NORMALISED, robust="krum")
    statistics = ~strategy.influence.is_parameter(strategy.model)
    updates = [
        update_of(c, model=strategy.model + np.float32(step)) for c, step in enumerate((0, 0.15, 0.2, 0.25, 0.4))
    ]
    updates[2].arrays["model"][statistics] = 1e9  # the model in the middle, which Krum chooses
    start = strategy.model.copy()
    model = strategy.mean(updates)
    assert model[~statistics] == pytest.approx((start + np.float32(0.2))[~statistics])
    assert model[statistics] == pytest.approx((start + np.float32(0.25))[statistics])  # the median
    assert strategy.record.discarded == [0, 1, 3, 4]


# -- the record of a run ----------------------------------------------------------------------------------


def test_summary_screen_and_report_name_the_limited_clients(
    make_config: Callable[..., Config], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = make_config("fedavg", max_norm_ratio=2.0, max_client_weight=0.4, run_name="attacked", checkpoint_every=1)
    grid = PoisoningGrid(4, (2,), lambda start, trained: start + 100 * (trained - start))
    run(grid, config)
    folder = tmp_path / "runs" / "attacked"
    summary = json.loads((folder / "summary.json").read_text())
    assert {"client": 2, "rounds": 3} in summary["clipped"]
    assert summary["down-weighted"] == [{"client": 0, "rounds": 3}]  # 21 of 42 samples
    assert "discarded" not in summary
    rounds = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    assert all(2 in row["clipped"] and row["down_weighted"] == [0] for row in rounds)
    screen = capsys.readouterr().out
    assert re.search(r"updates scaled down +client 2 in 3 rounds", screen)
    assert re.search(r"weights lowered +client 0 in 3 rounds", screen)
    html = page([folder])
    assert "updates scaled down" in html and "weights lowered" in html


def test_a_resumed_run_continues_the_counts_of_clipped_rounds(
    make_config: Callable[..., Config], tmp_path: Path
) -> None:
    settings = {"max_norm_ratio": 2.0, "run_name": "attacked", "checkpoint_every": 1}
    config = make_config("fedavg", **settings, num_server_rounds=2)
    run(PoisoningGrid(4, (2,), lambda start, trained: start + 100 * (trained - start)), config)
    resumed = {"resume": "attacked", "num-server-rounds": 4, "output-dir": config["output-dir"]}
    run(PoisoningGrid(4, (2,), lambda start, trained: start + 100 * (trained - start)), resumed)
    summary = json.loads((tmp_path / "runs" / "attacked" / "summary.json").read_text())
    assert {"client": 2, "rounds": 4} in summary["clipped"]


def test_a_plain_run_records_no_limits(make_config: Callable[..., Config], tmp_path: Path) -> None:
    run(None, make_config("fedavg", run_name="plain"))
    summary = json.loads((tmp_path / "runs" / "plain" / "summary.json").read_text())
    assert not {"clipped", "discarded", "down-weighted"} & summary.keys()


def test_an_attack_succeeds_without_a_defence(make_config: Callable[..., Config], federate: Any) -> None:
    """Without a defence, the attack of this file changes the model."""
    attacked = federate(
        make_config("fedavg"), grid=lambda count: PoisoningGrid(count, (2,), lambda start, trained: 0 * trained + 1e6)
    )
    assert np.abs(attacked.strategy.model).max() > 1e5
    assert math.isfinite(float(attacked.strategy.model.sum()))
