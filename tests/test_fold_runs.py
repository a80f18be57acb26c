"""A cross-validation at sites: one Flower run for each fold, and one summary of all folds."""

import csv
import json
import multiprocessing
import os
import shlex
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from nodes import NodeGrid

import posy
from benchmarks.local_federation import MOST_SECONDS, Deployment
from posy.binned import BinnedScores
from posy.client_app.policy import is_run_folder
from posy.commands import cli
from posy.commands.deploy.control import Control, Run
from posy.commands.launch import INTERRUPTED
from posy.metrics import CLASSES
from posy.server_app.app import run
from posy.server_app.fold_runs import FoldRun
from posy.server_app.folds import CrossValidation
from posy.server_app.recorder import Recorder
from posy.settings import LaunchError, SettingsError
from posy.storage import is_locked, lock, read_json
from posy.strategies.registry import read_settings
from posy.strategies.run_settings import name_of
from posy.yaml12 import read_yaml

Submit = Callable[..., Recorder | CrossValidation]


def write_sites(folder: Path, policy: str = "") -> list[dict[str, str]]:
    """Write the tables of two hospitals with 30 and 24 rows, and return the node configs."""
    rules = "min-rows: 2\nfolds: 3\nlabel: label\nscores: exact\nmetrics: all\ncode: any\n"
    (folder / "policy.yaml").write_text(rules + policy, encoding="utf-8")
    rng, configs = np.random.default_rng(1), []
    for name, rows in (("va", 30), ("bern", 24)):
        is_ill = np.arange(rows) < rows // 3
        frame = pd.DataFrame({"age": rng.normal(60 + 12 * is_ill, 8), "label": np.where(is_ill, "ill", "well")})
        frame.to_csv(folder / f"{name}.csv", index=False)
        paths = {
            "data": folder / f"{name}.csv",
            "policy": folder / "policy.yaml",
            "state-dir": folder / f"state-{name}",
        }
        configs.append({"name": name, **{key: str(path) for key, path in paths.items()}})
    return configs


SETTINGS: dict[str, Any] = {
    "method": "fedavg", "model": "linear", "dataset": "sites", "num-clients": 2, "num-server-rounds": 2,
    "local-epochs": 1, "device": "cpu", "folds": 3, "join-timeout": 5.0,
}  # fmt: skip
OF_FOLDS = {**SETTINGS, "part-of": "cv", "checkpoint-every": 1}


@pytest.fixture
def submit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Submit:
    """Return a function that submits the run of a fold to two hospitals. Each run has new messages and states."""
    monkeypatch.chdir(tmp_path)
    configs = write_sites(tmp_path)

    def make(fold: int, **changes: Any) -> Recorder | CrossValidation:
        changed = {key.replace("_", "-"): value for key, value in changes.items()}
        return run(NodeGrid(*configs), {**OF_FOLDS, "fold": fold, **changed})

    return make


def summary_of(tmp_path: Path, folder: str = "cv") -> dict[str, Any]:
    summary: dict[str, Any] = json.loads((tmp_path / "runs" / folder / "summary.json").read_text())
    return summary


# -- the ServerApp of each fold ------------------------------------------------------------------------------


def test_the_runs_of_folds_share_a_summary(submit: Submit, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = set()
    for number, fold in enumerate((2, 1, 3), start=1):  # in any order
        recorder = submit(fold)
        assert isinstance(recorder, Recorder)
        names.add(recorder.strategy.exchange.states.folders["run"])
        summary = summary_of(tmp_path)
        assert summary["status"] == ("completed" if number == 3 else "running") and len(summary["runs"]) == number
        assert ("3 of 3; means over the folds" in capsys.readouterr().out) == (number == 3)
    assert sorted(name[:10] for name in names) == ["cv-fold-1-", "cv-fold-2-", "cv-fold-3-"]
    assert all(map(is_run_folder, names)) and names == {p.name for p in (tmp_path / "state-va").glob("cv-fold-*")}
    assert summary["sites"] == ["va", "bern"] or summary["sites"] == ["bern", "va"]
    rows = pd.read_csv(tmp_path / "runs/cv/clients.csv").set_index("partition")
    assert sorted(rows["n_test"]) == [24, 30]  # every row of a site is in the test split of one fold
    folds = pd.concat([pd.read_csv(tmp_path / f"runs/cv/fold-{k}/clients.csv").query("round == 2") for k in (1, 2, 3)])
    means = folds.groupby("partition").apply(lambda part: np.average(part["served_accuracy"], weights=part["n_test"]))
    np.testing.assert_allclose(rows["served_accuracy"], means)
    assert summary["served"]["last"]["mean"] == pytest.approx(means.mean())
    record = posy.load("cv")
    assert (record.settings["folds"], record.settings["fold"], record.settings["part-of"]) == (3, 0, "")
    assert sorted(path.name for path in record.path.iterdir() if path.is_dir()) == ["fold-1", "fold-2", "fold-3"]


def test_masked_folds_at_sites_add_their_sums(submit: Submit, tmp_path: Path) -> None:
    agreed = {"secure_aggregation": True, "all_metrics": "last", "classes": "ill,well", "feature_names": "age"}
    for fold in (1, 2, 3):
        submit(fold, **agreed)
    sums = [read_json(tmp_path / f"runs/cv/fold-{k}/score-sums.json")["sums"]["served"]["numbers"] for k in (1, 2, 3)]
    total = BinnedScores.from_numbers(np.sum(sums, axis=0).tolist(), 2)
    pooled = summary_of(tmp_path)["pooled"]["served"]
    assert pooled["samples"] == 54 and np.sum(pooled["confusion"], axis=1).tolist() == [18, 36]
    assert pooled["metrics"] == pytest.approx(total.values(CLASSES))


def test_an_interrupted_fold_resumes(submit: Submit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fold that stops after a checkpoint resumes. A fold that fails before its first checkpoint begins again."""
    submit(1)
    finish = Recorder.finish_round

    def stop(after: int, error: type[BaseException]) -> Callable[..., None]:
        def finish_round(self: Recorder, server_round: int, *arguments: Any) -> None:
            if after:
                finish(self, server_round, *arguments)
            if server_round == max(after, 1):
                raise error

        return finish_round

    expected = submit(2, part_of="other")
    for after, error, status in ((0, RuntimeError, "failed"), (1, KeyboardInterrupt, "stopped")):
        with monkeypatch.context() as patched:
            patched.setattr(Recorder, "finish_round", stop(after, error))
            with pytest.raises(error):
                submit(2)
        assert summary_of(tmp_path)["status"] == status and len(summary_of(tmp_path)["runs"]) == 1
        assert summary_of(tmp_path)["served"]["last"] is not None  # the score of the first fold
    resumed = submit(2)
    assert isinstance(resumed, Recorder) and isinstance(expected, Recorder)
    assert resumed.directory.path == tmp_path / "runs/cv/fold-2" and len(resumed._resumed) == 1
    assert resumed.summary["served"] == expected.summary["served"]
    assert [entry["fold"] for entry in summary_of(tmp_path)["runs"]] == [1, 2]


def test_a_fold_that_has_finished_is_not_repeated(
    submit: Submit, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    submit(1)
    (tmp_path / "runs/cv/summary.json").unlink()  # the ServerApp was killed before it wrote the summary
    written = (tmp_path / "runs/cv/fold-1/summary.json").stat().st_mtime_ns
    assert isinstance(submit(1), CrossValidation)
    assert "fold 1 of cv has finished before" in capsys.readouterr().out
    assert (tmp_path / "runs/cv/fold-1/summary.json").stat().st_mtime_ns == written
    assert summary_of(tmp_path)["served"]["last"]["mean"] == summary_of(tmp_path, "cv/fold-1")["served"]["last"]["mean"]


def test_folds_need_the_same_settings_and_a_free_folder(submit: Submit, tmp_path: Path) -> None:
    submit(1)
    with pytest.raises(SettingsError, match=r"part-of = 'cv'.*: lr = 0.5, but the run has 0.05.*choose another name"):
        submit(2, lr=0.5)
    with pytest.raises(SettingsError, match="folds = 2, but the run has 3"):
        submit(2, folds=2)
    assert not (tmp_path / "runs/cv/fold-2").exists()
    (tmp_path / "runs/cv/fold-2").mkdir()
    descriptor = lock(tmp_path / "runs/cv/fold-2")
    with pytest.raises(SettingsError, match="another run of fold 2 still uses"):
        submit(2)
    os.close(descriptor)
    run(None, {**SETTINGS, "dataset": "digits", "folds": 0, "num-server-rounds": 1, "run-name": "digits"})
    with pytest.raises(SettingsError, match="contains another run"):
        submit(2, part_of="digits")
    with pytest.raises(SettingsError, match="must be the name of a folder"):
        submit(2, part_of="a/b")
    with pytest.raises(SettingsError, match=r"run-name = 'x'.*has no effect: it needs part-of"):
        submit(2, run_name="x")
    with pytest.raises(SettingsError, match=r"part-of = 'cv'.*has no effect: it needs fold > 0"):
        run(None, {**SETTINGS, "part-of": "cv", "folds": 0})


def update(folder: Path, fold: int, times: int) -> None:
    for _ in range(times):
        FoldRun(read_settings({**OF_FOLDS, "fold": fold}), folder).update()


def test_folds_that_end_at_the_same_time_write_one_summary(submit: Submit, tmp_path: Path) -> None:
    """Processes that update the summary wait for each other. None of them fails, and no row is lost or doubled."""
    for fold in (1, 2, 3):
        submit(fold)
    folder = tmp_path / "runs/cv"
    expected = (folder / "clients.csv").read_text(), summary_of(tmp_path)
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=update, args=(folder, fold, 10)) for fold in (1, 2, 3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(300)
        assert process.exitcode == 0
    assert ((folder / "clients.csv").read_text(), summary_of(tmp_path)) == expected


def test_a_run_over_all_folds_names_the_remedy() -> None:
    with pytest.raises(SettingsError, match=r"folds = 3: a site accepts only one split.*posy run --superlink.*part-of"):
        run(None, {"dataset": "sites", "folds": 3})


# -- the submission ------------------------------------------------------------------------------------------


class Superlink:
    """Records the submitted runs, which end with the given statuses."""

    def __init__(self, *statuses: str) -> None:
        self.statuses = list(statuses)
        self.submitted: list[dict[str, Any]] = []

    def submit(self, settings: dict[str, Any]) -> str:
        self.submitted.append(dict(settings))
        return str(len(self.submitted))

    def follow(self, number: str, show: Callable[[str], object]) -> Run:
        show("a line of the run\n")
        status = self.statuses[int(number) - 1]
        if status == "interrupt":
            raise KeyboardInterrupt
        if status == "lost":
            raise LaunchError("no SuperLink answers")
        return Run(number, self.submitted[-1], status, "", 1.0, "out of memory" if status == "failed" else "")


@pytest.fixture
def superlink(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Superlink]:
    def make(*statuses: str) -> Superlink:
        recorded = Superlink(*statuses)
        monkeypatch.setattr(Control, "submit", lambda api, *arguments: recorded.submit(*arguments))
        monkeypatch.setattr(Control, "follow", lambda api, *arguments: recorded.follow(*arguments))
        monkeypatch.setattr(Control, "stop", lambda api, number: recorded.submitted.append({"stop": number}))
        return recorded

    return make


COMMAND = ["run", "--superlink", "127.0.0.1:1", "--insecure", "dataset=sites", "num-clients=2", "folds=3", "lr=0.1"]


def test_folds_are_submitted_one_after_the_other(
    superlink: Callable[..., Superlink], capsys: pytest.CaptureFixture[str]
) -> None:
    recorded = superlink("completed", "completed", "completed")
    assert cli.main([*COMMAND, "run-name=cv"]) == 0
    common = {"dataset": "sites", "num-clients": 2, "folds": 3, "lr": 0.1, "part-of": "cv"}
    assert recorded.submitted == [{**common, "fold": fold} for fold in (1, 2, 3)]
    assert [name_of(settings) for settings in recorded.submitted] == ["cv/fold-1", "cv/fold-2", "cv/fold-3"]
    assert "continue" not in capsys.readouterr().err
    recorded = superlink("completed", "completed", "completed")
    assert cli.main(COMMAND) == 0
    (name,) = {settings["part-of"] for settings in recorded.submitted}
    assert name.startswith("fedfew-sites-folds3-2")


@pytest.mark.parametrize(
    ("end", "status", "text"),
    [("failed", 1, "failed in fold 2 of 3"), ("interrupt", 130, "stopped in fold 2"), ("lost", 2, "failed in fold 2")],
)
def test_a_failed_fold_ends_the_command_and_names_how_to_continue(
    end: str, status: int, text: str, superlink: Callable[..., Superlink], capsys: pytest.CaptureFixture[str]
) -> None:
    recorded = superlink("completed", end, "completed")
    assert cli.main(COMMAND) == status
    printed = capsys.readouterr().err
    assert [s.get("fold") for s in recorded.submitted if "stop" not in s] == [1, 2] and text in printed
    assert ({"stop": "2"} in recorded.submitted) == (end == "interrupt")
    command = printed.partition("continue with: posy ")[2].splitlines()[0].split()
    assert command[:-1] == COMMAND
    again = superlink("completed", "completed", "completed")
    assert cli.main(command) == 0
    assert again.submitted[0]["part-of"] == recorded.submitted[0]["part-of"]


def test_other_runs_are_submitted_once(superlink: Callable[..., Superlink]) -> None:
    for words in (["dataset=digits", "folds=3"], ["dataset=sites", "folds=3", "fold=2"], ["resume=cv"]):
        recorded = superlink("completed")
        assert cli.main([*COMMAND[:4], *words]) == 0
        assert len(recorded.submitted) == 1 and "part-of" not in recorded.submitted[0]


# -- real nodes ----------------------------------------------------------------------------------------------


@pytest.mark.federation
@pytest.mark.slow
@pytest.mark.xdist_group("processes")
def test_a_cross_validation_on_real_nodes(tmp_path: Path) -> None:
    """One command runs all folds. Ctrl-C ends it, and the printed command continues with the interrupted fold."""
    configs = write_sites(tmp_path)
    federation = Deployment(tmp_path, ["va", "bern"])
    words = [f"{key}={value}" for key, value in {**SETTINGS, "join-timeout": 60, "checkpoint-every": 1}.items()]
    masks = ["secure-aggregation=true", "all-metrics=last", "classes=ill,well", "feature-names=age"]
    try:
        for config in configs:
            federation.node(config["name"], *(f"{key}={value}" for key, value in config.items()))
        for config in configs:
            federation.until(lambda name=config["name"]: federation.ready(name), config["name"], MOST_SECONDS)
        summary = federation.run("masked", *words, *masks)
        assert summary["status"] == "completed" and summary["pooled"]["served"]["samples"] == 54
        words = [word for word in words if not word.startswith("num-server-rounds=")] + ["num-server-rounds=20"]
        federation.submit("cv", *words)
        federation.until(lambda: len(federation.rounds("cv/fold-2")) >= 3, "run-cv", MOST_SECONDS)
        federation.processes["run-cv"].send_signal(signal.SIGINT)
        assert federation.ended("run-cv") == INTERRUPTED
        command = federation.log("run-cv").partition("stopped in fold 2 of 3; continue with: posy ")[2].splitlines()[0]
        federation.until(lambda: not is_locked(federation.results("cv/fold-2")), "superlink", MOST_SECONDS)
        printed = federation.posy(*shlex.split(command)).stdout
        assert "fold 1 of cv has finished before" in printed and "3 of 3; means over the folds" in printed
        summary = federation.summary("cv")
        assert summary["status"] == "completed" and [entry["rounds"] for entry in summary["runs"]] == [20] * 3
        assert len(read_yaml(federation.results("cv/fold-2") / "config.yaml")["resumed"]) == 1
    finally:
        federation.stop()
    with (tmp_path / "runs/masked/fold-2/clients.csv").open(newline="") as file:
        assert {row["site"] for row in csv.DictReader(file)} == {"va", "bern"}
