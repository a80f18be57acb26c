"""Tuning: an equal budget for every row, validation splits only, and resumption of a stopped search."""

import json
import subprocess
from pathlib import Path

import pytest
from optuna.distributions import FloatDistribution, IntDistribution
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState

from posy.commands import cli, tuning
from posy.commands.table import Cell, locked_output, plan_as_yaml, plan_of, read_plan
from posy.settings import SettingsError
from posy.strategies.methods import METHODS, settings_class
from posy.strategies.registry import declared
from posy.yaml12 import read_yaml

TABLE = """
title: a table
output: {output}
seeds: [3, 4]
settings: {{dataset: digits, max-samples: 200, num-clients: 3, num-server-rounds: 3, model: linear, device: cpu}}
variants:
  - {{name: dir, settings: {{dirichlet-alpha: 0.5}}}}
  - {{name: two, settings: {{partition: classes}}}}
runs:
  - {{name: FedAvg, settings: {{method: fedavg}}}}
  - {{name: FedProx, settings: {{method: fedprox, fedprox-mu: 0.01}}, variants: {{two: {{lr: 0.1}}}}}}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "some.yaml"
    path.write_text(TABLE.format(output=tmp_path / "results"))
    return path


@pytest.mark.parametrize("method", METHODS)
def test_search_spaces_are_within_setting_ranges(method: str) -> None:
    space = tuning.space_of(method, {})
    assert isinstance(space["lr"], FloatDistribution) and space["lr"].log
    assert len(space) <= 4  # lr and the most important settings
    settings = declared([method])
    for key, distribution in space.items():
        assert isinstance(distribution, FloatDistribution | IntDistribution)
        for end in (distribution.low, distribution.high):
            settings[key].checked(key, settings[key].kind(end), "a test")
    assert settings_class(method).point in ("served", "local")


def test_the_first_trial_uses_the_tables_settings(tmp_path: Path) -> None:
    path = tmp_path / "all.yaml"
    path.write_text(TABLE.format(output=tmp_path / "results").partition("runs:")[0] + "runs: all\n")
    storage = JournalStorage(JournalFileBackend(str(tmp_path / "studies.journal")))
    cells = {cell.method: cell for cell in read_plan(path).cells if (cell.seed, cell.variant) == (3, "two")}
    assert cells.keys() == METHODS.keys()
    for method, cell in cells.items():
        search = tuning.opened(cell, tmp_path, storage)
        settings = declared([method])
        first = search.study.ask(dict(search.space)).params
        limits = {"fedfomo-models": 2}  # each of three clients has two peers
        unchanged = {key for key, value in first.items() if value == limits.get(key, settings[key].default)}
        changed = {key: settings[key].default for key in search.space.keys() - unchanged}
        assert not any(changed.values()), method  # 0 means the round's learning rate


def test_tuned_settings_become_a_table(file: Path, tmp_path: Path) -> None:
    plan = read_plan(file)
    assert plan.cells[-1].config["lr"] == 0.1  # set by the row in this variant
    best = {("dir", "FedAvg"): {"lr": 0.02}, ("two", "FedProx"): {"fedprox-mu": 0.5}, ("dir", "FedProx"): {}}
    content = plan_as_yaml(plan, best, {"validation-fraction": 0.2})
    tuned = tmp_path / "tuned.yaml"
    tuned.write_text(json.dumps(content))
    cells = {(cell.variant, cell.row): cell.config for cell in read_plan(tuned).cells}
    assert cells["dir", "FedAvg"]["lr"] == 0.02 and "lr" not in cells["two", "FedAvg"]
    assert cells["two", "FedProx"] | {"lr": 0.1, "fedprox-mu": 0.5} == cells["two", "FedProx"]
    assert cells["dir", "FedProx"]["fedprox-mu"] == 0.01
    assert {config["validation-fraction"] for config in cells.values()} == {0.2}
    assert content["title"] == "a table, tuned"


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ("variants: {three: {lr: 0.1}}", "use the variants three, which"),
        ("variants: {two: 3}", "it must map names of variants to settings"),
    ],
)
def test_invalid_variants_of_a_row_are_rejected(file: Path, wrong: str, words: str) -> None:
    file.write_text(file.read_text().replace("variants: {two: {lr: 0.1}}", wrong))
    with pytest.raises(SettingsError, match=words):
        read_plan(file)


def test_rows_get_equal_trials_and_a_stopped_search_resumes(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = file.read_text()
    file.write_text(
        "\n".join(line for line in text.splitlines() if "name: two" not in line).replace(
            ", variants: {two: {lr: 0.1}}", ""
        )
    )
    plan = read_plan(file)
    tuning.tune(plan, trials=1, jobs=2)
    first = capsys.readouterr().out
    assert first.count("% on validation") == 2
    assert "fedprox-mu=0.01" in first and first.count("lr=0.05") == 2  # the first trial uses the table's settings
    content = tuning.tune(plan, trials=2, jobs=2)
    second = capsys.readouterr().out
    assert second.count(", trial 1 (") == 2 and ", trial 0 (" not in second
    lines = (line for line in (first + second).splitlines() if "FedProx" in line and "validation" in line)
    best = max(lines, key=lambda line: float(line.split("): ")[1].split(" %")[0]))
    tuned = content["runs"][1]["variants"]["dir"]
    assert all(f"{key}={value}" in best for key, value in tuned.items())
    assert set(tuned) == {"lr", "fedprox-mu"}
    assert content["settings"]["validation-fraction"] == 0.2
    assert content["output"] == f"{read_yaml(file)['output']}-tuned"
    assert cli.main(["tune", str(file), "-n", "2"]) == 0
    assert ", trial " not in capsys.readouterr().out  # all trials are finished
    written = file.with_name("some-tuned.yaml")
    assert written.read_text().startswith("# Written by `posy tune")
    assert read_yaml(written) == content
    log = (plan.output / "tuning/dir/FedProx/trial-0.log").read_text()
    assert "served model, best" in log


def test_bad_trials_are_pruned_and_stopped_trials_count_as_failed(file: Path, tmp_path: Path) -> None:
    storage = JournalStorage(JournalFileBackend(str(tmp_path / "journal")))
    (cell, *_) = read_plan(file).cells
    search = tuning.opened(cell, tmp_path / "tuning", storage)
    assert search is not None
    for _ in range(tuning.FIRST_TRIALS):
        trial = search.study.ask(dict(search.space))
        for number in (1, 2, 3):
            trial.report(0.9, number)
        search.study.tell(trial, 0.9)
    trial = search.study.ask(dict(search.space))
    config = {**search.cell.config, "run-name": "trial-x"}
    attempt = tuning.Attempt(search, trial, type(cell)("dir", "FedAvg", 3, config), subprocess.Popen(["true"]))
    attempt.process.wait()
    rounds = attempt.cell.path / "rounds.jsonl"
    rounds.parent.mkdir(parents=True)

    def row(number: int, mean: float) -> str:
        return json.dumps({"round": number, "served_validation_accuracy": {"mean": mean}}) + "\n"

    assert not attempt.look()  # the file does not exist yet
    rounds.write_text(row(1, 0.3))
    assert not attempt.look()  # too early
    rounds.write_text(row(1, 0.3) + row(2, 0.2) + row(3, 0.99)[:20])
    assert attempt.look() and attempt.rounds_read == 2 and attempt.score == 0.2
    resumed = tuning.opened(cell, tmp_path / "tuning", storage)
    assert resumed is not None and [t.state for t in resumed.study.trials][-1] == TrialState.FAIL
    assert resumed.done() == tuning.FIRST_TRIALS + 1
    assert resumed.best().keys() == {"lr"}


def test_rows_with_different_validation_splits_are_rejected(file: Path) -> None:
    file.write_text(file.read_text().replace("fedprox-mu: 0.01", "validation-fraction: 0.1"))
    with pytest.raises(SettingsError, match="has different values"):
        tuning.tune(read_plan(file), trials=1, jobs=1)


def test_two_searches_cannot_share_a_table(file: Path, tmp_path: Path) -> None:
    plan = read_plan(file)
    with locked_output(plan.output / "tuning"), pytest.raises(SettingsError, match=r"another .* is using "):
        tuning.tune(plan, trials=1, jobs=1)
    with locked_output(plan.output / "tuning"):  # the lock was released
        assert plan.output.is_dir()


def test_the_metric_of_the_table_selects_the_trial(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The default metric of a regression is the RMSE, of which the lowest value is best. One fold is searched."""
    settings = {
        "dataset": "diabetes", "num-clients": 2, "num-server-rounds": 2, "model": "linear", "device": "cpu", "folds": 2,
    }  # fmt: skip
    content = {"settings": settings, "seeds": [3], "runs": [{"name": "FedAvg", "settings": {"method": "fedavg"}}]}
    plan = plan_of({**content, "output": str(tmp_path / "out")}, tmp_path / "t.yaml", {})
    tuned = tuning.tune(plan, trials=2, jobs=2)
    lines = [line for line in capsys.readouterr().out.splitlines() if " on validation" in line]
    scores = {line.split("lr=")[1].split(")")[0]: float(line.split("): ")[1].split()[0]) for line in lines}
    assert len(lines) == 2 and min(scores.values()) > 40  # in the unit of the values
    assert str(tuned["runs"][0]["settings"]["lr"]) == min(scores, key=lambda lr: scores[lr])


@pytest.mark.parametrize(
    ("config", "metric", "lower"),
    [
        ({"dataset": "digits"}, "accuracy", False),
        ({"dataset": "digits", "metric": "auroc"}, "auroc", False),
        ({"dataset": "digits", "metric": "log-loss"}, "log-loss", True),
        ({"dataset": "x.csv", "task": "multi-label"}, "average-precision", False),
        ({"dataset": "x.csv", "task": "regression", "metric": "auto"}, "rmse", True),
    ],
)
def test_trials_are_scored_by_the_metric_of_the_run(config: dict[str, str], metric: str, lower: bool) -> None:
    found = tuning.metric_for(Cell("", "row", 0, config))
    assert (found.name, found.lower_is_better) == (metric, lower)
