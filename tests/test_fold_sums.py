"""Scores over all folds under secure aggregation: the masked sums of each fold are added."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import posy
from posy.binned import BinnedScores
from posy.data.task import Task
from posy.metrics import CLASSES, LABELS, METRICS, VALUES
from posy.scores import Predictions, confusion_matrix, values_of
from posy.server_app.masked_sums import FILE, add_sums, confusion_in, pooled_entry, write_sums
from posy.server_app.recorder import Recorder
from posy.strategies.registry import read_settings
from posy.strategies.score_sums import ScoreSums

SETTINGS = read_settings({"method": "fedavg"})
RUN = SETTINGS.run
FOLDS = (slice(0, 10), slice(10, 26), slice(26, 30))


def folders(tmp_path: Path, parts: list[Predictions], tasks: list[Task]) -> list[Path]:
    """Write the sums of each fold's predictions."""
    written = []
    for number, (p, task) in enumerate(zip(parts, tasks, strict=True), start=1):
        written.append(folder := tmp_path / f"fold-{number}")
        folder.mkdir()
        sums = ScoreSums(SETTINGS, task, training=False, all_metrics=True).sums_of("served", p)
        write_sums(folder, {"served": {"clients": 2, "samples": len(p.y), "numbers": sums}}, task)
    return written


def predictions(target: str, size: int) -> Predictions:
    """Return predictions for 30 samples. The samples of the last class are rows 0 to 4, so two folds have none."""
    rng = np.random.default_rng(5)
    y: Any = np.where(np.arange(30) < 5, size - 1, rng.integers(0, size - 1, 30))
    outputs = rng.dirichlet(np.ones(size), 30)
    if target == LABELS:
        y, outputs = (np.arange(size) == y[:, None]).astype(np.int64), rng.random((30, size))
    if target == VALUES:
        y = rng.normal([40.0, -2.0], [9.0, 0.1], (30, 2))
        outputs = y + rng.normal(0, [3.0, 0.05], (30, 2))
    return Predictions(target, y, outputs)


@pytest.mark.parametrize(("target", "size"), [(CLASSES, 2), (CLASSES, 4), (LABELS, 3)])
def test_added_sums_equal_the_sums_of_all_predictions(target: str, size: int, tmp_path: Path) -> None:
    p, task = predictions(target, size), Task("features", (3,), tuple("abcd"[:size]), target=target)
    parts = [p.rows(np.arange(30)[rows]) for rows in FOLDS]
    assert "auroc" not in BinnedScores.of(parts[2]).values(target) or target == LABELS or size > 2
    tally = add_sums(folders(tmp_path, parts, [task] * 3), task, RUN, METRICS)["served"]
    expected = BinnedScores.of(p)
    assert (tally.clients, tally.samples) == (2, 30)
    for name, value in expected.values(target).items():
        assert tally.metrics[name] == pytest.approx(value, abs=1e-6), name
    entry = pooled_entry(tally, task, confusion_in(tally, task))
    if target == CLASSES:
        matrix = confusion_matrix(p)
        assert entry["confusion"] == matrix.tolist()
        assert entry["recall"]["abcd"[size - 1]] == matrix[-1, -1] / 5
    else:
        assert entry.keys() == {"samples", "metrics"}
    exact = values_of(p, [*tally.metrics])
    assert exact["macro-f1"] == pytest.approx(tally.metrics["macro-f1"])
    assert exact["accuracy"] == pytest.approx(tally.metrics["accuracy"])
    assert tally.metrics["auroc"] == pytest.approx(exact["auroc"], abs=expected.auroc_error(target) + 1e-9)


def test_sums_of_values_are_added_in_one_unit(tmp_path: Path) -> None:
    """Each fold standardises the values by the mean and standard deviation of the fold's training rows."""
    p = predictions(VALUES, 2)
    task = Task("features", (3,), ("days", "cost"), target=VALUES, value_mean=(40.0, -2.0), value_std=(9.0, 0.1))
    scales: list[Any] = [((38.0, -1.9), (8.0, 0.12)), ((43.0, -2.1), (10.0, 0.09)), ((40.0, -2.0), (9.0, 0.1))]
    tasks = [replace(task, value_mean=mean, value_std=std) for mean, std in scales]
    written = folders(tmp_path, [p.rows(np.arange(30)[rows]) for rows in FOLDS], tasks)
    metrics = add_sums(written, task, RUN, METRICS)["served"].metrics
    for name, value in values_of(p, ["mae", "rmse", "r2"]).items():
        assert metrics[name] == pytest.approx(value, rel=1e-5), name


def test_sums_that_differ_are_not_added(tmp_path: Path) -> None:
    p, task = predictions(CLASSES, 2), Task("features", (3,), ("no", "yes"))
    written = folders(tmp_path, [p.rows(np.arange(30)[rows]) for rows in FOLDS], [task] * 3)
    assert add_sums(written, task, RUN, METRICS) and not add_sums(
        written, replace(task, class_names=("no", "sick")), RUN, METRICS
    )
    write_sums(written[1], {}, task)  # a fold without test samples
    assert add_sums(written, task, RUN, METRICS)["served"].samples == 14
    write_sums(written[1], {"served": {"clients": 2, "samples": 4, "numbers": [3]}}, task)  # the accuracy alone
    assert not add_sums(written, task, RUN, METRICS)
    (written[1] / FILE).unlink()
    assert not add_sums(written, task, RUN, METRICS)


# -- runs ----------------------------------------------------------------------------------------------------


@pytest.fixture
def heart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return the settings of a short run on two hospitals, whose two ill patients are in two of the three folds."""
    monkeypatch.chdir(tmp_path)
    rng, lines = np.random.default_rng(0), ["hospital,age,days,label"]
    for row in range(60):
        ill, age = row % 30 < 2, rng.integers(30, 60) + 25 * (row % 30 < 2)
        lines.append(f"h{row // 30},{age},{2 * age + rng.normal(0, 5) + row:.3f},{'ill' if ill else 'well'}")
    (tmp_path / "a.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    common = {"dataset": "a.csv", "partition": "natural", "group_column": "hospital", "input_columns": "age"}
    short = {"method": "fedavg", "model": "linear", "num_server_rounds": 2, "local_epochs": 1, "device": "cpu"}
    return {**common, **short, "num_clients": 2, "folds": 3, "run_name": "cv", "secure_aggregation": True}


def test_folds_with_masks_give_the_metrics_of_all_samples(
    heart: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The sums that each client masks are recorded on their way, and added by hand."""
    sent: dict[str, list[list[int]]] = {"served": [], "local": []}
    numbers = ScoreSums.numbers

    def record(self: ScoreSums, metrics: Any, sizes: Any, sums: Any) -> list[int]:
        for key, values in sums.items():
            sent[key].append(values)
        return numbers(self, metrics, sizes, sums)

    monkeypatch.setattr(ScoreSums, "numbers", record)
    summary = posy.run(**heart).summary
    undefined = [json.loads((tmp_path / f"runs/cv/fold-{k}/summary.json").read_text())["metrics"] for k in (1, 2, 3)]
    assert sum("served_auroc" in metrics for metrics in undefined) == 2  # one fold has no ill patient
    for point in ("served", "local"):
        assert len(sent[point]) == 6  # two clients in the last round of three folds
        totals = np.sum([np.array(values, object) for values in sent[point]], axis=0).tolist()
        scores = BinnedScores.from_numbers(totals, 2)
        assert scores.totals[0] == 60 and scores.confusion[0].sum() == 4
        pooled = summary["pooled"][point]
        assert pooled["metrics"] == pytest.approx(scores.values(CLASSES))
        assert pooled["confusion"] == scores.confusion.tolist() and pooled["recall"].keys() == {"ill", "well"}
        assert summary["metrics"][f"{point}_auroc"]["mean"] == pooled["metrics"]["auroc"]
        last = summary[point]["last"]
        assert (last["mean"], last["samples"], last["clients"]) == (pooled["metrics"]["accuracy"], 60, 2)
    assert "fold-scores" not in summary and summary["client-scores"].startswith("not available")
    assert any("93.3 % of the test samples are of class well" in notice for notice in summary["notices"])
    assert "scores over the test samples of all folds" in capsys.readouterr().out


def test_sums_survive_a_stop(heart: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fold that stops after its last evaluation resumes from its checkpoint, which contains the sums."""
    uninterrupted = posy.run(**{**heart, "run_name": "other"}).summary
    finish, stops = Recorder.finish_round, 0

    def stop(self: Recorder, server_round: int, *arguments: object) -> None:
        nonlocal stops
        finish(self, server_round, *arguments)  # type: ignore[arg-type]
        if server_round == 2:
            stops += 1
            if stops == 2:
                raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Recorder, "finish_round", stop)
        with pytest.raises(KeyboardInterrupt):
            posy.run(**heart)
    resumed = posy.run(resume="cv").summary
    for key in ("served", "local", "pooled", "metrics"):
        assert resumed[key] == uninterrupted[key]


def test_a_fold_without_sums_gives_means(heart: dict[str, Any], tmp_path: Path) -> None:
    """An earlier version did not store the sums."""
    summary = posy.run(**heart).summary
    (tmp_path / "runs/cv/fold-1" / FILE).unlink()
    path = tmp_path / "runs/cv/summary.json"
    path.write_text(json.dumps({**summary, "status": "failed"}))
    shutil.rmtree(tmp_path / "runs/cv/fold-2")
    resumed = posy.run(resume="cv").summary
    assert "means over the folds" in resumed["fold-scores"] and "pooled" not in resumed
    folds = [json.loads((tmp_path / f"runs/cv/fold-{k}/summary.json").read_text()) for k in (1, 2, 3)]
    lasts = [fold["served"]["last"] for fold in folds]
    mean = np.average([last["mean"] for last in lasts], weights=[last["samples"] for last in lasts])
    assert resumed["served"]["last"]["mean"] == pytest.approx(mean)
    assert resumed["served"]["last"]["mean"] == pytest.approx(summary["served"]["last"]["mean"])


def test_masked_regression_equals_the_pooled_predictions(heart: dict[str, Any]) -> None:
    settings = {**heart, "task": "regression", "label_column": "days"}
    exact = posy.run(**{**settings, "run_name": "other", "secure_aggregation": False}).summary["pooled"]["served"]
    masked = posy.run(**settings).summary
    assert masked["pooled"]["served"]["samples"] == exact["samples"] == 60
    for name in ("rmse", "mae", "r2"):
        assert masked["metrics"][f"served_{name}"]["mean"] == pytest.approx(exact["metrics"][name], rel=1e-3)
