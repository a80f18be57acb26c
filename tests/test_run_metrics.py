"""A run reports all metrics, selects by the chosen one, and stores its predictions."""

import csv
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from sklearn import metrics as reference

from posy.commands.cli import main
from posy.metrics import METRICS
from posy.report.comparison import Run, over_clients, scores_by_block
from posy.server_app.app import run
from posy.settings import SettingsError
from posy.strategies.methods import METHODS

MakeConfig = Callable[..., dict[str, Any]]


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def summary_of(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((path / "summary.json").read_text(encoding="utf-8"))
    return content


def stored(path: Path, point: str, client: int) -> tuple[np.ndarray, np.ndarray, list[int]]:
    """Return the classes, the probabilities and the sample numbers in a file of predictions."""
    rows = rows_of(path / "predictions" / f"{point}-{client}.csv")
    names = [column.removeprefix("p(").removesuffix(")") for column in rows[0] if column.startswith("p(")]
    y = np.array([names.index(row["label"]) for row in rows])
    return y, np.array([[float(row[f"p({name})"]) for name in names] for row in rows]), [int(r["sample"]) for r in rows]


def expected(y: np.ndarray, p: np.ndarray) -> dict[str, float]:
    """Compute some metrics with scikit-learn, with AUROC over the classes that it can rank."""
    predicted = p.argmax(axis=1)
    ranked = [c for c in range(p.shape[1]) if 0 < (y == c).sum() < len(y)]
    values = {
        "accuracy": reference.accuracy_score(y, predicted),
        "macro_f1": reference.f1_score(y, predicted, average="macro"),
        "log_loss": reference.log_loss(y, p, labels=range(p.shape[1])),
    }
    if ranked:
        values["auroc"] = float(np.mean([reference.roc_auc_score(y == c, p[:, c]) for c in ranked]))
    return values


@pytest.mark.parametrize("method", METHODS)
def test_metrics_follow_from_the_stored_predictions(method: str, make_config: MakeConfig) -> None:
    config = make_config(method, model="mlp", num_server_rounds=2, save_predictions=True, all_metrics="last")
    path = run(None, config).directory.path
    last = {int(row["partition"]): row for row in rows_of(path / "clients.csv") if row["round"] == "2"}
    summary = summary_of(path)
    test = [9, 6, 4, 0]
    checked = 0
    for point in ("served", "local"):
        pooled = []
        for client, row in last.items():
            if not row[f"{point}_accuracy"]:
                continue
            y, p, samples = stored(path, point, client)
            assert len(y) == test[client] == len(set(samples))
            pooled.append((y, p))
            for name, value in expected(y, p).items():
                assert float(row[f"{point}_{name}"]) == pytest.approx(value, rel=1e-5, abs=1e-6), (point, client, name)
                checked += 1
            assert (row[f"{point}_auroc"] == "") == (len(set(y.tolist())) < 2)
        if pooled:
            y, p = (np.concatenate(parts) for parts in zip(*pooled, strict=True))
            entry = summary["pooled"][point]
            assert entry["samples"] == len(y)
            for name, value in expected(y, p).items():
                assert entry["metrics"][name.replace("_", "-")] == pytest.approx(value, rel=1e-5, abs=1e-6)
            assert np.trace(entry["confusion"]) == (p.argmax(axis=1) == y).sum()
    assert checked > 10
    point = summary["point"]
    assert set(summary["pooled"][point]["intervals"]) == set(summary["pooled"][point]["metrics"])
    low, high = summary["pooled"][point]["intervals"]["accuracy"]
    assert low <= summary["pooled"][point]["metrics"]["accuracy"] <= high


def test_predictions_are_deleted_unless_the_user_wants_them(make_config: MakeConfig) -> None:
    path = run(None, make_config("fedavg", num_server_rounds=1, all_metrics="last")).directory.path
    assert summary_of(path)["pooled"]["served"]["samples"] == 19
    assert not (path / "predictions").exists()


@pytest.mark.parametrize(("metric", "best"), [("log-loss", min), ("auroc", max)])
def test_the_metric_selects_the_best_round(
    metric: str, best: Callable[[list[float]], float], make_config: MakeConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    config = make_config(
        "fedavg", num_server_rounds=4, lr=0.5, metric=metric, validation_fraction=0.3, all_metrics="last"
    )
    path = run(None, config).directory.path
    rounds = [json.loads(line) for line in (path / "rounds.jsonl").read_text().splitlines()]
    column = f"served_validation_{metric.replace('-', '_')}"
    means = [row[column]["mean"] for row in rounds]
    summary = summary_of(path)
    assert summary["metric"] == metric
    assert summary["served"]["best"]["round"] == 1 + means.index(best(means))
    tested = [row[f"served_{metric.replace('-', '_')}"]["mean"] for row in rounds]
    assert summary["served"]["upper-bound"]["mean"] == best(tested)
    assert "served_accuracy" not in rounds[0]
    assert "served_accuracy" in rounds[-1]  # the last evaluation reports all metrics
    assert METRICS[metric].title in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"metric": "sensitivity"},
            "metric = 'sensitivity' .*does not apply to a task with 3 classes; choose one of acc",
        ),
        ({"metric": "rmse"}, "metric = 'rmse' .*does not apply"),
        ({"metric": "auc"}, "metric = 'auc'"),
        ({"positive_class": "0"}, "positive-class = '0' .*: the task has 3 classes; name one of two classes"),
    ],
)
def test_a_metric_that_does_not_apply_is_refused(
    changes: dict[str, Any], message: str, make_config: MakeConfig
) -> None:
    with pytest.raises(SettingsError, match=message):
        run(None, make_config("fedavg", **changes))


def test_all_metrics_can_be_reported_in_each_evaluation(make_config: MakeConfig) -> None:
    path = run(None, make_config("ditto", num_server_rounds=2, all_metrics="every")).directory.path
    rows = rows_of(path / "clients.csv")
    assert all(row["served_macro_f1"] and row["local_brier"] for row in rows if row["n_test"] != "0")


# -- five per cent of positives --------------------------------------------------------------------------


@pytest.fixture
def rare(tmp_path: Path) -> Path:
    """Return a table of 800 patients, 5 % of whom are ill; two features separate the classes partly."""
    rng = np.random.default_rng(1)
    ill = np.arange(800) % 20 == 0
    x = rng.normal(size=(800, 2)) + 1.2 * ill[:, None]
    file = tmp_path / "rare.csv"
    lines = [f"{a:.6f},{b:.6f},{'ill' if i else 'well'}" for (a, b), i in zip(x, ill, strict=True)]
    file.write_text("\n".join(["a,b,label", *lines]))
    return file


def run_rare(rare: Path, name: str, **settings: Any) -> Path:
    config = {
        "dataset": str(rare), "partition": "iid", "num-clients": 4, "num-server-rounds": 3, "model": "linear",
        "device": "cpu", "output-dir": str(rare.parent / "runs"), "run-name": name, "method": "fedavg",
        **{key.replace("_", "-"): value for key, value in settings.items()},
    }  # fmt: skip
    return run(None, config).directory.path


@pytest.mark.parametrize(("metric", "column"), [("auto", "accuracy"), ("macro-f1", "macro_f1")])
@pytest.mark.parametrize(
    "changes", [{}, {"secure_aggregation": True}, {"folds": 2}, {"holdout_clients": 0.25}], ids=str
)
def test_a_run_without_all_metrics_reports_only_its_metric(
    metric: str, column: str, changes: dict[str, Any], rare: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = run_rare(rare, "a", all_metrics="none", metric=metric, validation_fraction=0.2, **changes)
    others = [name for name in METRICS if name != column.replace("_", "-")]
    printed = capsys.readouterr().out
    assert METRICS[column.replace("_", "-")].title in printed
    assert not any(METRICS[name].title in printed for name in others)
    names = {form for name in others for form in (name, name.replace("-", "_"))} | {"recall", "confusion"}
    for path in (directory, *directory.glob("fold-*")):
        summary = summary_of(path)
        words = set(re.findall(r'"(?:served_|local_|validation_)*([\w-]+)":', json.dumps(summary)))
        assert summary["served"]["last"]["mean"] >= 0
        assert not words & (names - {"accuracy"} | {"served_accuracy"} - {f"served_{column}"})
        if "pooled" in summary:
            assert list(summary["pooled"]["served"]["metrics"]) == [column.replace("_", "-")]
        header = (path / "clients.csv").read_text(encoding="utf-8").splitlines()[0].split(",")
        if "secure_aggregation" not in changes:
            assert f"served_{column}" in header
        assert not any(name.endswith(tuple(f"_{form}" for form in names)) for name in header)


def test_the_summary_warns_if_accuracy_hides_a_small_class(
    rare: Path, warnings: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "% of the test samples are of class well"
    path = run_rare(rare, "useless", lr=1e-9)
    assert text in summary_of(path)["notices"][0]
    assert text in warnings.text and f"{text}, so a model" in capsys.readouterr().out
    assert "notices" not in summary_of(run_rare(rare, "auroc", metric="auroc"))


def test_the_ranking_of_a_table_follows_the_metric(rare: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A model without informative features has 95 % accuracy and no AUROC; both metrics are those of scikit-learn."""
    noise = np.random.default_rng(2).normal(size=800)
    header, *lines = rare.read_text().splitlines()
    rare.write_text("\n".join([f"noise,{header}", *(f"{n:.6f},{line}" for n, line in zip(noise, lines, strict=True))]))
    common = {
        "dataset": str(rare), "partition": "iid", "num-clients": 4, "num-server-rounds": 4, "model": "linear",
        "lr": 0.1, "save-predictions": True, "device": "cpu", "method": "fedavg",
    }  # fmt: skip
    rows = {"useless": {"input-columns": "noise"}, "useful": {"input-columns": "a,b", "class-weights": "balanced"}}
    file = rare.with_name("rare.yaml")
    runs = [{"name": name, "settings": settings} for name, settings in rows.items()]
    file.write_text(json.dumps({"seeds": [1], "settings": common, "runs": runs}))
    means: dict[str, dict[str, float]] = {}
    for metric, function in (("accuracy", reference.accuracy_score), ("auroc", reference.roc_auc_score)):
        output = rare.with_name(metric)
        assert main(["table", str(file), f"metric={metric}", "--output", str(output), "--jobs", "1"]) == 0
        table = pd.read_csv(output / "clients.csv").set_index("method")
        means[metric] = table["mean"].to_dict()
        for name in rows:
            path = output / name / "seed-1"
            summary = summary_of(path)
            assert ("% of the test samples are of class well" in str(summary.get("notices"))) == (metric == "accuracy")
            clients = [stored(path, "served", client)[:2] for client in range(4)]
            scores = [function(y == 0, p[:, 0] >= 0.5 if metric == "accuracy" else p[:, 0]) for y, p in clients]
            assert summary["served"]["last"]["mean"] == pytest.approx(np.mean(scores), abs=1e-6)
            assert table.loc[name, "mean"] == pytest.approx(np.mean(scores), abs=1e-6)
    assert means["accuracy"]["useless"] == 0.95 > means["accuracy"]["useful"]
    assert means["auroc"]["useful"] > 0.7 > means["auroc"]["useless"]
    assert "AUROC" in capsys.readouterr().out


def test_lower_values_of_a_loss_rank_first(rare: Path) -> None:
    rows = {"good": {"lr": 0.1}, "bad": {"lr": 1e-9}}
    runs = []
    for name, settings in rows.items():
        path = run_rare(rare, name, metric="log-loss", **settings)
        runs.append(Run("", name, "local" if name == "bad" else "fedavg", 42, summary_of(path), path))
    lines = {line["method"]: line for line in over_clients(runs).to_dict("records")}
    assert lines["good"]["mean"] < lines["bad"]["mean"]
    assert lines["good"]["worst"] >= lines["good"]["mean"]
    goodness = scores_by_block(runs).iloc[0]
    assert goodness["good"] > goodness["bad"]


def test_runs_with_different_metrics_are_not_compared(rare: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [run_rare(rare, metric, metric=metric, seed=seed) for seed, metric in enumerate(("accuracy", "auroc"))]
    report = rare.parent / "r.html"
    assert main(["report", *map(str, paths), "-o", str(report)]) == 0
    text = report.read_text(encoding="utf-8")
    assert "is scored by accuracy, but" in text
    assert "AUROC, served model" in text and "Accuracy, served model" in text


# -- secure aggregation ----------------------------------------------------------------------------------


def test_masked_sums_give_the_metrics_of_all_samples(rare: Path) -> None:
    """Confusion counts are exact, and the AUROC is within the binning error."""
    plain = summary_of(run_rare(rare, "plain"))["pooled"]["served"]["metrics"]
    masked = summary_of(run_rare(rare, "masked", secure_aggregation=True))["metrics"]
    for name in ("accuracy", "balanced-accuracy", "macro-f1", "sensitivity", "specificity"):
        assert masked[f"served_{name.replace('-', '_')}"]["mean"] == pytest.approx(plain[name], abs=0.006)
    assert masked["served_auroc"]["mean"] == pytest.approx(plain["auroc"], abs=0.01)
    assert masked["served_log_loss"]["mean"] == pytest.approx(plain["log-loss"], abs=0.01)
    assert masked["served_auroc"]["samples"] == 200
