"""Scores with secure aggregation: the record of a run shows sums, and no number of a single client."""

import csv
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from posy import figures
from posy.binned import BinnedScores
from posy.commands.cli import main
from posy.data.task import Task
from posy.metrics import CLASSES
from posy.report.page import page
from posy.scores import Predictions
from posy.server_app.app import run
from posy.server_app.progress import results_table
from posy.server_app.trackers.tracker import numbers
from posy.settings import SettingsError
from posy.spread import Evaluation, best, over_rounds
from posy.strategies.masking import decoded_numbers, encoded_numbers
from posy.strategies.registry import read_settings
from posy.strategies.score_sums import ScoreSums, Tally, spreads

TASK = Task("features", (3,), ("no", "yes"))
SECURE = {"secure-aggregation": True}
SCORED = {"validation-fraction": 0.2, "evaluate-training": True}


def test_encoded_numbers_of_many_clients_are_summed_exactly() -> None:
    """Four words of 16 bits hold a number below 2^64. The sum of 65,536 largest numbers does not overflow."""
    assert encoded_numbers([2**16 + 3, 0]).tolist() == [3, 1, 0, 0, 0, 0, 0, 0]
    rng = np.random.default_rng(3)
    columns = [[int(n) for n in rng.integers(0, 2**63, 3)] for _ in range(50)]
    total = np.add.reduce([encoded_numbers(column) for column in columns], dtype=np.uint32)
    assert decoded_numbers(total) == [sum(column) for column in zip(*columns, strict=True)]
    most = encoded_numbers([2**64 - 1]).astype(np.uint64) * 65_536
    assert most.max() < 2**32 and decoded_numbers(most) == [65_536 * (2**64 - 1)]
    assert decoded_numbers(encoded_numbers([])) == []
    for wrong in (-1, 2**64):
        with pytest.raises(ArithmeticError, match="the model has diverged"):
            encoded_numbers([wrong])


def test_numbers_by_hand() -> None:
    """Two clients, one of which has no test samples and no local model."""
    settings = read_settings({"method": "fedavg", **SECURE, "validation-fraction": 0.2})
    layout = ScoreSums(settings, TASK, training=True)
    assert layout.keys == ("train", "local", "local-validation")
    evaluation = ScoreSums(settings, TASK, training=False)
    assert evaluation.keys == ("served", "local", "served-validation", "local-validation")
    first = layout.numbers(
        {"train-loss": 0.5, "samples": 30, "local-accuracy": 0.75, "local-loss": 0.25},
        {"train": 10, "test": 4, "validation": 0},
        {},
    )
    unit = 2**20
    assert first == [1, 10, 5 * unit, 1, 4, unit, 3, 0, 0, 0, 0, 30]
    second = layout.numbers({"train-loss": 2.0, "samples": 6}, {"train": 2, "test": 0, "validation": 0}, {})
    assert len(first) == len(second) == layout.count
    sums, samples = layout.tallies([a + b for a, b in zip(first, second, strict=True)])
    assert sums == {
        "train": Tally(2, 12, 9 * unit), "local": Tally(1, 4, unit, {"accuracy": 0.75}, (3,)),
        "local-validation": Tally(numbers=(0,))
    } and samples == 36  # fmt: skip
    columns = spreads(sums)
    assert columns.keys() == {"train_loss", "local_accuracy", "local_loss"}
    assert columns["train_loss"]["mean"] == 0.75
    assert columns["local_accuracy"] == {
        "mean": 0.75, "std": None, "min": None, "max": None, "tenth": None, "weighted": None, "jain": None,
        "clients": 1, "samples": 4,
    }  # fmt: skip
    for loss in (math.inf, math.nan, 1e300):
        with pytest.raises((ArithmeticError, ValueError)):
            encoded_numbers(layout.numbers({"train-loss": loss}, {"train": 1, "test": 0, "validation": 0}, {}))


@pytest.mark.parametrize("key", ["local", "local-validation"])
@pytest.mark.parametrize(
    ("metric", "all_metrics"), [("auto", False), ("auto", True), ("auroc", False), ("auroc", True)]
)
def test_binned_scores_are_sent_if_metrics_need_them(key: str, metric: str, all_metrics: bool) -> None:
    settings = read_settings({"method": "fedavg", **SECURE, "validation-fraction": 0.2, "metric": metric})
    layout = ScoreSums(settings, TASK, training=True, all_metrics=all_metrics)
    outputs = np.array([[0.9, 0.1], [0.4, 0.6], [0.3, 0.7], [0.2, 0.8]])
    p = Predictions(CLASSES, np.array([0, 1, 0, 1]), outputs)
    sizes, binned = {"train": 9, "test": 4, "validation": 4}, {key: BinnedScores.of(p).numbers}
    numbers = layout.numbers({f"{key}-loss": 0.25, f"{key}-accuracy": 0.75}, sizes, binned)
    sums, _ = layout.tallies([2 * number for number in numbers])
    sent = layout.sums_of(key, p) or []
    assert BinnedScores.from_numbers(sent, 2).confusion.any() == (layout.reported(key) != ("auroc",))
    values = BinnedScores.of(p).values(CLASSES)
    assert values["auroc"] == 0.75 and len(values) > 5
    run_metric = "accuracy" if metric == "auto" else metric
    expected = values if all_metrics and key == "local" else {run_metric: 0.75}
    assert dict(sums[key].metrics) == pytest.approx(expected)
    assert (sums[key].clients, sums[key].samples) == (2, 8)


def test_best_and_mean_rounds_use_the_sums() -> None:
    rounds = []
    for number, correct in ((1, 10), (2, 30), (3, 20)):
        values = Tally(5, 40, 0, {"accuracy": correct / 40}).spread("accuracy")
        assert values is not None
        rounds.append(Evaluation(number, values))
    chosen = best(rounds)
    assert chosen is not None and chosen.round == 2
    mean = over_rounds(rounds, 2)
    assert mean is not None and mean["mean"] == 0.625 and mean["std"] is None and mean["weighted"] is None
    assert mean["deviation"] == {"mean": 0.125}


@pytest.fixture
def secure_run(make_config: Callable[..., dict[str, Any]]) -> Callable[..., Path]:
    """Return a function that runs FedRep with secure aggregation, and returns the directory of the run."""

    def make(**settings: Any) -> Path:
        config = make_config("fedrep", model="mlp", **settings) | SECURE | SCORED | {"average-rounds": 2}
        return run(None, config).directory.path

    return make


@pytest.mark.usefixtures("pictures")
def test_the_record_has_sums_and_marks_the_rest_as_not_available(
    secure_run: Callable[..., Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[list[list[Evaluation]]] = []
    draw = figures.over_rounds
    monkeypatch.setattr(figures, "over_rounds", lambda points, *a, **k: (drawn.append(points), draw(points, *a, **k)))
    path = secure_run()
    printed = capsys.readouterr().out
    summary = json.loads((path / "summary.json").read_text(encoding="utf-8"))
    rows = [json.loads(line) for line in (path / "rounds.jsonl").read_text(encoding="utf-8").splitlines()]
    with (path / "clients.csv").open(encoding="utf-8", newline="") as file:
        header, *clients = csv.reader(file)
    # Tiny data: four clients, of which three have test samples, 9 + 6 + 4.
    served = rows[-1]["served_accuracy"]
    assert served["samples"] == 19 and served["clients"] == 3 and served["std"] is None and served["jain"] is None
    assert (19 * served["mean"]) == pytest.approx(round(19 * served["mean"]))
    for column in ("train_loss", "served_loss", "local_accuracy", "served_validation_accuracy", "served_training_loss"):
        assert rows[-1][column]["mean"] >= 0 and rows[-1][column]["min"] is None
    assert summary["served"]["last"]["mean"] == served["mean"]
    validation = [row["served_validation_accuracy"]["mean"] for row in rows]
    assert summary["served"]["best"]["round"] == 1 + validation.index(max(validation))
    assert summary["served"]["average"]["mean"] == pytest.approx(
        np.mean([row["served_accuracy"]["mean"] for row in rows[-2:]])
    )
    assert summary["client-scores"].startswith("not available: with secure-aggregation")
    assert summary["samples"] > 0 and "NaN" not in json.dumps(summary)
    assert header == ["round", "partition", "n_train", "bytes_up", "bytes_down", "site"]
    assert len(clients) == 12 and all(row[2] for row in clients)
    # Output, figures, tracker and report.
    table = results_table(summary, path)
    assert f"{100 * served['mean']:.2f} %" in table and "nan" not in table.lower()
    assert "scores           pooled over the clients; each client's score is in its node's log" in table
    assert (
        "served model, last" in table and "mean ± std" not in table.partition("served model   ")[0] and table in printed
    )
    assert table.splitlines()[2].split() == ["accuracy", "round", "all", "samples", "clients"]
    (last_line,) = (line for line in printed.splitlines() if line.startswith("round 3/3"))
    assert f"served {100 * served['mean']:.2f} % (all samples, 3 of 4)  local " in last_line
    assert (path / "figures/accuracy.png").stat().st_size and not (path / "figures/clients.png").exists()
    assert drawn and all("samples" in e.over_clients for points in drawn for point in points for e in point)
    tracked = numbers(rows[-1])
    assert tracked["served_accuracy/mean"] == served["mean"] and "served_accuracy/std" not in tracked
    text = page([path])
    assert "contains the score over the test samples of all clients" in text
    assert f"<td>{100 * served['mean']:.2f} %</td><td>n/a</td><td>n/a</td>" in text.replace(' class="n"', "")
    assert "mean over the clients" not in text and "<span>all samples</span>" in text
    assert "nan" not in text.lower().replace("tenant", "")


def test_table_shows_no_client_spread_with_secure_aggregation(
    tmp_path: Path, make_config: Callable[..., dict[str, Any]]
) -> None:
    """A row with secure aggregation has no standard deviation over the clients, and is not compared with others."""
    config = make_config("fedavg", model="linear", num_server_rounds=1)
    config = {key: value for key, value in config.items() if key not in ("run-name", "output-dir", "method")}
    rows: list[dict[str, Any]] = [
        {"name": "plain", "settings": {"method": "fedavg"}},
        {"name": "masked", "settings": {"method": "fedavg", **SECURE}},
    ]
    table = {"output": str(tmp_path / "table"), "settings": config, "seeds": [1], "runs": rows}
    (tmp_path / "table.yaml").write_text(json.dumps(table), encoding="utf-8")
    assert main(["table", str(tmp_path / "table.yaml"), "-j", "1"]) == 0
    text = next((tmp_path / "table").glob("*.md")).read_text(encoding="utf-8")
    masked = next(line for line in text.splitlines() if line.startswith("| masked |"))
    assert "nan" not in text.lower() and "(" not in masked.split("|")[3]
    assert masked.split("|")[3].endswith(", all samples ") and "`all samples`: with secure aggregation" in text
    assert "all samples" not in next(line for line in text.splitlines() if line.startswith("| plain |"))


@pytest.mark.parametrize("mode", ["on", "auto"])
def test_system_accuracy_is_unavailable_with_secure_aggregation(
    make_config: Callable[..., dict[str, Any]], warnings: pytest.LogCaptureFixture, mode: str
) -> None:
    config = make_config("feddrm", model="mlp", num_server_rounds=1, system_accuracy=mode) | SECURE
    if mode == "on":
        with pytest.raises(SettingsError, match=r"system-accuracy = 'on'.*secure-aggregation = true"):
            read_settings(config)
        return
    summary = run(None, config).summary
    assert summary["system-accuracy"] is None
    assert "with secure-aggregation, the clients keep their models and test samples" in warnings.text


def test_partial_cohort_has_local_scores_of_the_cohort_only(
    make_config: Callable[..., dict[str, Any]], federate: Callable[..., Any]
) -> None:
    """Otherwise the local score of the only client outside the cohort would be revealed."""
    config = make_config("fedrep", model="mlp", num_server_rounds=3, fraction_train=0.75, save_models=False)
    done = federate(config | SECURE)
    for record in done.records:
        tested = [client for client in record.cohort if done.strategy.clients[client].num_test]
        assert record.sums["local"].clients == len(tested) and record.sums["served"].clients == 3
