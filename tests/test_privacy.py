"""Differential privacy of a run: clipping, noise, the methods that support it, and the account."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_strategy_base import change_model, send, take

import posy
from posy.accounting import MODES, Event, epsilon_of, noise_multiplier_for, read_ledger, spent
from posy.client_app.privacy import check_network, check_privacy, noised
from posy.data.task import Task
from posy.models.architecture import architecture_for
from posy.report.page import page
from posy.server_app.privacy import LEDGER, PrivacyLedger
from posy.settings import RunError, SettingsError
from posy.strategies.arrays import ALLOWED
from posy.strategies.cohorts import cohort_of, most_trainings
from posy.strategies.methods import METHODS, settings_class
from posy.strategies.privacy import (
    BELOW,
    adapted_clip,
    clipped,
    event_of,
    noise_multiplier,
    noisy_fraction,
    noisy_sum,
    planned_events,
    reply_deviation,
    sampling_of,
    split_noise,
)
from posy.strategies.registry import from_json, read_settings
from posy.strategies.server_state import state_of
from posy.strategies.settings import Settings

MakeClient = Callable[..., Any]
MakeConfig = Callable[..., dict[str, Any]]
Federate = Callable[..., Any]
NOISED = [method for method in METHODS if settings_class(method).noise is ALLOWED]
KEYS = {"dp": "central", "client-weights": "uniform"}
CENTRAL = {"dp": "central", "client_weights": "uniform"}


def settings_with(**values: Any) -> Settings:
    return read_settings({"method": "fedavg", **{key.replace("_", "-"): value for key, value in values.items()}})


# -- clipping and noise of one reply ---------------------------------------------------------------------------


def test_clipping_by_hand() -> None:
    start = [np.array([1.0, 1.0], np.float32), np.array([0.0], np.float32)]
    sent = [np.array([4.0, 1.0], np.float32), np.array([4.0], np.float32)]  # the change's norm is 5
    changed, norm = clipped(sent, start, 2.5)
    assert norm == 5 and [change.tolist() for change in changed] == [[1.5, 0.0], [2.0]]
    assert [change.tolist() for change in clipped(sent, start, 6.0)[0]] == [[3.0, 0.0], [4.0]]
    assert [change.tolist() for change in clipped(start, start, 1.0)[0]] == [[0.0, 0.0], [0.0]]
    for wrong in (math.nan, math.inf):  # an error would reveal that the training has diverged
        changed, norm = clipped([np.array([wrong, 1.0]), sent[1]], start, 1.0)
        assert norm == math.inf and [change.tolist() for change in changed] == [[0.0, 0.0], [0.0]]


def test_local_noise_is_calibrated_to_all_rounds() -> None:
    """Two updates are at most 2C apart, and T rounds need √T times the noise of one."""
    start = [np.zeros(40_000, np.float32)]
    settings = settings_with(dp="local", dp_clip=0.5, dp_epsilon=2.0, dp_delta=1e-6, num_server_rounds=9)
    expected = 3 * 2 * 0.5 * noise_multiplier_for(2.0, 1e-6)
    assert reply_deviation(settings) == pytest.approx(expected)
    reply, norm = noised(start, start, settings)
    assert norm == 0 and reply[0].dtype == np.float32
    assert reply[0].std() == pytest.approx(expected, rel=0.02)
    assert spent(planned_events(settings, 100), 1e-6, "client") == pytest.approx(2.0)


def test_sensitivity_is_not_a_setting() -> None:
    """``dp-sensitivity=1e-9`` was accepted at ε = 1, with noise of 5e-9."""
    with pytest.raises(SettingsError, match=r"dp-sensitivity .*is not a setting"):
        settings_with(dp="local", dp_clip=1.0, dp_sensitivity=1e-9)
    assert reply_deviation(settings_with(dp="local", dp_clip=1.0, num_server_rounds=1)) == pytest.approx(2 * 3.73063163)


def test_noise_does_not_depend_on_seeds() -> None:
    start, replies = [np.zeros(8, np.float32)], []
    for _ in range(2):
        np.random.seed(1)  # noqa: NPY002 - forked processes share this state
        torch.manual_seed(1)
        replies.append(noised(start, start, settings_with(dp="local", dp_clip=1.0))[0][0])
    assert not np.array_equal(replies[0], replies[1])


@pytest.mark.parametrize("method", NOISED)
def test_methods_that_support_noise_add_it_to_every_array(method: str, make_client: MakeClient) -> None:
    """The change of all sent arrays has the clipping norm, or the standard deviation of the noise."""
    changed, metrics = {}, {}
    for name, values in {
        "plain": {},
        "clipped": {"dp": "local", "dp_clip": 0.01, "dp_epsilon": 1e6, "num_server_rounds": 1},
        "noised": {"dp": "local", "dp_clip": 0.01, "dp_epsilon": 1e-3, "dp_delta": 0.1, "num_server_rounds": 1},
    }.items():
        client = make_client(method, model="mlp", **values)
        received = [client.shared.take(client.initial()).numpy().copy()]
        config = {"server-round": 1, "client": 0, "evaluate-local": True}
        replied, _, metrics[name] = client.fit(received, config)
        arrays = dict(zip(client.method.returned, replied, strict=True))
        sent = dict(zip(client.method.sent, received, strict=True))
        references = client.method.reference(client.architecture, sent, arrays)
        changed[name] = np.concatenate([(array - references[key]).ravel() for key, array in arrays.items()])
    norms = {name: float(np.linalg.norm(change)) for name, change in changed.items()}
    assert norms["plain"] > 0.01
    quiet = 2 * 0.01 * noise_multiplier_for(1e6, 1e-5) * math.sqrt(changed["clipped"].size)
    assert norms["clipped"] == pytest.approx(0.01, abs=2 * quiet)
    cosine = changed["clipped"] @ changed["plain"] / norms["clipped"] / norms["plain"]
    assert cosine > 1 - 2 * (quiet / 0.01) ** 2
    chance = 5 / math.sqrt(2 * changed["noised"].size)  # five standard errors of a standard deviation
    expected = 0.02 * noise_multiplier_for(1e-3, 0.1)
    assert changed["noised"].std() == pytest.approx(expected, rel=max(0.1, chance))
    assert {"train-loss", "num-test", "samples"} <= metrics["plain"].keys()
    assert metrics["noised"].keys() == {"num-test", "samples"}


# -- losses and scores -----------------------------------------------------------------------------------------


def test_losses_scores_and_choices_are_withheld(make_config: MakeConfig, federate: Federate) -> None:
    """Losses and scores without noise would leave a run without (ε, δ)."""
    done = federate(make_config("fedavg-ft", dp="local", dp_clip=1.0, evaluate_training=True))
    rows = [row for record in done.records for row in record.clients.values()]
    assert rows and {key for row in rows for key in row} <= {"bytes_up", "bytes_down", "n_train", "n_test", "site"}
    assert [record.trained for record in done.records] == [{0, 1, 2, 3}] * 3
    assert [record.dropped for record in done.records] == [[]] * 3
    exact = federate(make_config("fedavg-ft", dp="local", dp_clip=1.0, dp_scores="exact"))
    assert all("train_loss" in row for record in exact.records for row in record.clients.values())
    assert any("local_accuracy" in row for row in exact.records[-1].clients.values())


def test_a_divergence_is_not_revealed(make_config: MakeConfig, federate: Federate) -> None:
    config = make_config("fedavg", lr=1e38, num_server_rounds=1)
    assert len(federate(config).records[0].dropped) == 4
    hidden = federate(config | {"dp": "local", "dp-clip": 1e-3})
    assert hidden.records[0].dropped == [] and hidden.records[0].trained == {0, 1, 2, 3}


# -- methods, networks and settings ----------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_each_method_supports_or_refuses_each_mode(mode: str) -> None:
    if mode == "sample":
        pytest.importorskip("dp_accounting")
    for method in METHODS:
        refused = settings_class(method).refused_privacy(mode)
        weights = {"client-weights": "uniform"} if mode == "central" and refused is ALLOWED else {}
        settings = read_settings({"method": method, "dp": mode, "dp-clip": 1.0, **weights})
        if refused is ALLOWED:
            check_privacy(settings)
        else:
            with pytest.raises(SettingsError, match=f"dp = '{mode}' with method = '{method}'"):
                check_privacy(settings)
        if mode == "central":
            assert (refused is ALLOWED) == (settings_class(method).noise is settings_class(method).sums is ALLOWED)


def test_which_methods_support_dp_sgd() -> None:
    expected = {"fedavg", "fedavg-ft", "fedprox", "fedprox-ft", "fedper", "fedbabu", "lg-fedavg", "fedbn"}
    assert {method for method in METHODS if settings_class(method).dp_sgd is ALLOWED} == expected


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"dp": "local"}, "dp-clip = 0: .*norm"),
        ({"dp": "local", "dp-clip": 1.0, "share-class-counts": True}, "share-class-counts = true"),
        ({"dp": "central", "dp-clip": 1.0}, "client-weights = 'samples'"),
        ({**KEYS, "dp-clip": 1.0, "max-update-norm": 3.0}, "max-update-norm = 3"),
        ({**KEYS, "dp-clip": 1.0, "secure-aggregation": True, "secure-neighbours": 4}, "secure-neighbours = 4"),
        ({**KEYS, "dp-clip": 1e-8, "secure-aggregation": True}, "dp-clip = 1e-08.* too small"),
        ({"dp": "sample", "dp-clip": 1.0, "class-weights": "balanced"}, "class-weights = 'balanced'"),
        ({"dp": "sample", "dp-clip": 1.0, "precision": "bfloat16"}, "precision = 'bfloat16'"),
    ],
)
def test_settings_that_would_invalidate_epsilon_are_refused(changes: dict[str, Any], why: str) -> None:
    if changes["dp"] == "sample":
        pytest.importorskip("dp_accounting")
    with pytest.raises(SettingsError, match=why):
        check_privacy(read_settings({"method": "fedavg"} | changes))


def test_networks_with_batchnorm_refuse_noise() -> None:
    task = Task("image", (3, 8, 8), ("a", "b"))
    for mode in MODES:
        settings = settings_with(dp=mode, dp_clip=1.0)
        check_network(settings, architecture_for("resnet18-gn", task))
        with pytest.raises(SettingsError, match=r"'resnet18-bn'.* BatchNorm"):
            check_network(settings, architecture_for("resnet18-bn", task))


def test_a_missing_accountant_is_an_error_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "dp_accounting", None)
    with pytest.raises(SettingsError, match="dp = 'sample'"):
        check_privacy(settings_with(dp="sample", dp_clip=1.0))


# -- the plan ----------------------------------------------------------------------------------------------------


def test_the_plan_counts_the_rounds_of_the_busiest_client(make_strategy: Callable[..., Any]) -> None:
    settings = settings_with(num_clients=20, fraction_train=0.2, num_server_rounds=30, dp="local", dp_clip=1.0)
    cohorts = [cohort_of(settings, number) for number in range(1, 31)]
    assert {len(cohort) for cohort in cohorts} == {4}
    assert most_trainings(settings) == max(sum(client in cohort for cohort in cohorts) for client in range(20)) < 30
    assert noise_multiplier(settings) == pytest.approx(math.sqrt(most_trainings(settings)) * 3.730631634816)
    assert most_trainings(from_json(settings.to_json())) == most_trainings(settings)  # a client computes the same
    strategy = make_strategy("fedavg", fraction_train=0.5)
    assert [strategy.rounds.cohort(n) for n in (1, 2, 3)] == [cohort_of(strategy.settings, n) for n in (1, 2, 3)]


def test_the_plan_of_dp_sgd() -> None:
    pytest.importorskip("dp_accounting")
    settings = settings_with(dp="sample", dp_clip=1.0, dp_epsilon=4.0, batch_size=10, local_epochs=2)
    sampling = sampling_of(settings, 297)
    assert sampling.probability == 0.034 and sampling.batch_size == pytest.approx(0.034 * 297)  # 10/297, rounded up
    assert sampling.steps == 2 * 30
    assert 3.95 < spent(planned_events(settings, 297), 1e-5) <= 4.0
    assert sampling_of(settings, 5).probability == 1.0
    assert planned_events(settings_with(), 297) == []


# -- central noise -----------------------------------------------------------------------------------------------


def test_the_noise_of_a_sum_is_added_once() -> None:
    each = [[np.full(40_000, 0.25)], [np.full(40_000, -1.0)], [np.full(40_000, 1.5)]]
    (total,) = noisy_sum(each, 0.125)
    assert total.std() == pytest.approx(0.125, rel=0.02) and total.mean() == pytest.approx(0.75, abs=0.004)


def central_change(federate: Federate, config: dict[str, Any]) -> np.ndarray:
    """Return the change of the server's model in one round."""
    done = federate(config)
    return np.asarray(done.strategy.model - done.strategy.initial(), np.float64)


@pytest.mark.parametrize("masks", [False, True], ids=["plain", "masks"])
def test_central_noise_has_at_least_the_planned_deviation(
    make_config: MakeConfig, federate: Federate, masks: bool
) -> None:
    """The masked sum has the shares of all four clients, sized for the three that the threshold needs."""
    config = make_config(
        "fedavg", model="mlp", num_server_rounds=1, dp_clip=0.5, dp_epsilon=1.0, secure_aggregation=masks, **CENTRAL
    )
    change = central_change(federate, config)
    deviation = 0.5 * 3.730631634816 / 4
    expected = deviation * (math.sqrt(4 / 3) if masks else 1)
    assert change.std() == pytest.approx(expected, rel=4 / math.sqrt(2 * change.size))
    assert np.abs(change).max() < 0.5 + 6 * expected


@pytest.mark.parametrize("masks", [False, True], ids=["plain", "masks"])
def test_central_clipping_bounds_each_client(make_config: MakeConfig, federate: Federate, masks: bool) -> None:
    """Almost without noise, the server's change is the mean of unit vectors times C, and equal with masks."""
    plain = make_config("fedavg", num_server_rounds=1, client_weights="uniform")
    updates: list[np.ndarray] = []

    def spy(strategy: Any) -> None:
        aggregate = strategy.aggregate

        def note(server_round: int, replies: list[Any]) -> Any:
            updates.extend(reply.arrays["model"] - strategy.initial() for reply in replies)
            return aggregate(server_round, replies)

        strategy.aggregate = note

    federate(plain, prepare=spy)
    expected = np.mean([0.05 * update / np.linalg.norm(update) for update in updates], axis=0)
    assert len(updates) == 4 and min(map(np.linalg.norm, updates)) > 0.05
    quiet = {"dp": "central", "dp-clip": 0.05, "dp-epsilon": 1e6, "secure-aggregation": masks}
    if masks:
        quiet["secure-range"] = 0.5
    np.testing.assert_allclose(central_change(federate, plain | quiet), expected, atol=1e-4)


def test_a_lost_client_does_not_change_the_denominator(
    make_config: MakeConfig, federate: Federate, failing: Callable[..., Any]
) -> None:
    config = make_config("fedavg", num_server_rounds=1, dp_clip=0.05, dp_epsilon=1e6, **CENTRAL)
    complete = central_change(federate, config)
    done = federate(config, grid=failing(("train", 1, 2)))
    partial = done.strategy.model - done.strategy.initial()
    assert done.records[0].trained == {0, 1, 3}
    assert np.linalg.norm(4 * (complete - partial)) == pytest.approx(0.05, rel=0.02)  # the update of client 2, clipped


def test_the_server_clips_updates_that_exceed_the_norm(make_strategy: Callable[..., Any]) -> None:
    strategy = make_strategy("fedavg", dp_clip=1.0, dp_epsilon=1e6, num_server_rounds=1, **CENTRAL)
    start = strategy.model.copy()
    _, replies = send(strategy)
    change_model(lambda model: model + np.float32(1e6))(replies[0].content)
    take(strategy, replies[:1])
    assert np.linalg.norm(strategy.model - start) == pytest.approx(1 / 4, rel=0.05)


# -- adaptive clipping -------------------------------------------------------------------------------------------


def test_adaptive_clipping_by_hand() -> None:
    assert adapted_clip(1.0, 0.5, 0.5) == 1.0
    assert adapted_clip(2.0, 1.0, 0.5) == pytest.approx(2 * math.exp(-0.1))
    assert adapted_clip(2.0, -7.0, 0.5) == pytest.approx(2 * math.exp(0.1))
    assert noisy_fraction([1.0, 1.0, 0.0, 1.0], 4, 1e-9) == pytest.approx(0.75)
    assert noisy_fraction([1.0, 1.0], 4, 1e-9) == pytest.approx(0.75)  # two lost clients count as one half each


@pytest.mark.parametrize(("multiplier", "cohort"), [(1.0, 4), (1.0, 1000), (3.0, 100)])
def test_adaptive_clipping_spends_part_of_the_budget(multiplier: float, cohort: int) -> None:
    of_sum, of_count = split_noise(multiplier, cohort)
    assert multiplier < of_sum < 1.16 * multiplier and of_count == max(cohort / 20, multiplier)
    both = [Event("central", of_sum), Event("central", 2 * of_count)]  # b − 1/2 has the sensitivity 1/2
    assert spent(both, 1e-5, "client") == pytest.approx(epsilon_of(multiplier, 1e-5))


def test_the_clipping_norm_adapts_over_the_rounds(make_config: MakeConfig, federate: Federate) -> None:
    config = make_config("fedavg", num_server_rounds=6, dp_clip=100.0, dp_clip_quantile=0.5, dp_epsilon=1e4, **CENTRAL)
    done = federate(config)
    norms = [record.quantities["dp_clip"] for record in done.records]
    assert norms[-1] == done.strategy.dp_clip[0] and norms[-1] < norms[0] < 100.0
    assert state_of(done.strategy)["dp_clip"].tolist() == [norms[-1]]
    assert "dp_clip" not in state_of(federate(make_config("fedavg")).strategy)


def test_the_server_cannot_choose_the_clipping_norm_of_local_noise(make_client: MakeClient) -> None:
    client = make_client("fedavg", dp="local", dp_clip=1e-3, dp_epsilon=1e6, num_server_rounds=1)
    received = [client.initial().numpy().copy()]
    arrays, _, metrics = client.fit(received, {"server-round": 1, "client": 0, "dp-clip": 1e9})
    assert np.linalg.norm(arrays[0] - received[0]) < 1.1e-3 and BELOW not in metrics


def test_a_client_sends_one_bit_for_adaptive_clipping(make_client: MakeClient) -> None:
    client = make_client("fedavg", dp_clip=1e-9, dp_clip_quantile=0.5, **CENTRAL)
    received = [client.initial().numpy().copy()]
    _, _, above = client.fit(received, {"server-round": 1, "client": 0, "dp-clip": 1e-9})
    _, _, below = client.fit(received, {"server-round": 1, "client": 0, "dp-clip": 1e9})
    assert (above[BELOW], below[BELOW]) == (0.0, 1.0)


# -- the account of a run ----------------------------------------------------------------------------------------


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.chdir(tmp_path)
    return {
        "method": "fedavg",
        "dataset": "digits",
        "model": "linear",
        "num_clients": 4,
        "max_samples": 200,
        "num_server_rounds": 3,
        "checkpoint_every": 1,
        "dp": "local",
        "dp_clip": 0.1,
        "dp_epsilon": 2.0,
        "device": "cpu",
    }


def test_a_run_reports_its_epsilon_after_each_round(small: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    record = posy.run(run_name="a", **small)
    rounds = [json.loads(line) for line in (record.path / "rounds.jsonl").read_text().splitlines()]
    multiplier = math.sqrt(3) * noise_multiplier_for(2.0, 1e-5)
    expected = [epsilon_of(multiplier / math.sqrt(number), 1e-5) for number in (1, 2, 3)]
    assert [row["dp_epsilon"] for row in rounds] == pytest.approx(expected) and expected[-1] == pytest.approx(2.0)
    assert {row["dp_delta"] for row in rounds} == {1e-5}
    privacy = record.summary["privacy"]
    assert privacy["epsilon"] == pytest.approx(2.0) and privacy["planned-trainings"] == 3
    assert privacy["not-covered"] == ["numbers of training and test samples"]
    assert "ε = 2, δ = 1e-05: dp = local" in capsys.readouterr().out
    events = read_ledger((record.path / LEDGER).read_text())
    assert [facts["clients"] for _, facts in events] == [[0, 1, 2, 3]] * 3
    html = page([record.path])
    assert "<h2>Privacy</h2>" in html and "planned ε" in html and "hides" in html
    assert record.summary["served"]["last"] is None and record.summary["status"] == "completed"


def test_exact_scores_are_listed_as_not_covered(small: dict[str, Any]) -> None:
    record = posy.run(run_name="a", **{**small, "dp_scores": "exact"})
    assert record.summary["privacy"]["not-covered"][-1] == "training losses and scores"
    assert record.summary["served"]["last"]["clients"] == 4
    plain = posy.run(run_name="b", **{key: value for key, value in small.items() if not key.startswith("dp")})
    assert "privacy" not in plain.summary and not (plain.path / LEDGER).exists()
    assert "dp_epsilon" not in json.loads((plain.path / "rounds.jsonl").read_text().splitlines()[0])
    assert "<h2>Privacy</h2>" not in page([plain.path])


def test_a_repeated_round_spends_the_budget_twice(small: dict[str, Any], tmp_path: Path) -> None:
    settings = read_settings({key.replace("_", "-"): value for key, value in small.items()})
    first = PrivacyLedger(settings, tmp_path, lambda client: event_of(settings, 50))
    for number in (1, 2, 3):
        first.note(number, [0, 1])
    assert first.epsilon() == pytest.approx(2.0)
    # The run was interrupted in round 3 and resumed.
    again = PrivacyLedger(settings, tmp_path, lambda client: event_of(settings, 50))
    again.note(3, [1])
    multiplier = math.sqrt(3) * noise_multiplier_for(2.0, 1e-5)
    assert again.epsilon() == pytest.approx(epsilon_of(multiplier / 2, 1e-5)) and again.epsilon() > 2.0
    (tmp_path / LEDGER).write_text("{}\n" + (tmp_path / LEDGER).read_text())
    with pytest.raises(RunError, match=r"ledger .*damaged"):
        PrivacyLedger(settings, tmp_path, lambda client: event_of(settings, 50))


def test_the_noise_fixes_the_number_of_rounds(small: dict[str, Any]) -> None:
    posy.run(run_name="a", **small)
    with pytest.raises(SettingsError, match="num-server-rounds = 5"):
        posy.run(resume="a", num_server_rounds=5)


def test_a_client_spends_its_budget_only_in_its_rounds(tmp_path: Path) -> None:
    settings = settings_with(num_clients=10, fraction_train=0.2, num_server_rounds=20, dp_clip=1.0, **CENTRAL)
    ledger = PrivacyLedger(settings, tmp_path, lambda client: event_of(settings, 50))
    for number in range(1, 21):
        ledger.note(number, cohort_of(settings, number))
    assert ledger.epsilon() == pytest.approx(1.0)  # the busiest client has spent exactly the planned budget
    assert most_trainings(settings) < 12
