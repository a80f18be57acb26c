"""Trackers receive every round and the end of a run, and a failing tracker does not stop the run."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from posy.server_app.app import run
from posy.server_app.trackers.tracker import numbers
from posy.server_app.trackers.tracking import TRACKERS, find
from posy.settings import SettingsError

CUSTOM_TRACKERS = """
import json


class Mine:
    def __init__(self, run):
        self.records, self.file = [[run.name, run.finished, run.settings["method"]]], run.directory / "mine.json"

    def round_finished(self, record):
        self.records.append(record)

    def run_finished(self, summary):
        self.file.write_text(json.dumps([*self.records, summary]))


class Failing(Mine):
    def round_finished(self, record):
        raise ConnectionError("connection refused")

    def run_finished(self, summary):
        raise AssertionError("called again after a failure")


def broken(run):
    raise PermissionError("access denied")


not_callable = None
"""


@pytest.fixture
def trackers_file(tmp_path: Path) -> Path:
    file = tmp_path / "mine.py"
    file.write_text(CUSTOM_TRACKERS)
    return file


def rounds_in(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (path / "rounds.jsonl").read_text().splitlines()]


def test_a_custom_tracker_receives_every_record(
    make_config: Callable[..., dict[str, Any]], trackers_file: Path
) -> None:
    config = make_config("fedfew", num_server_rounds=2, track=f"{trackers_file}:Mine")
    path = run(None, config).directory.path
    first, *rounds, summary = json.loads((path / "mine.json").read_text())
    assert first == [path.name, 0, "fedfew"]
    assert rounds == rounds_in(path)
    assert summary == json.loads((path / "summary.json").read_text())
    again = {"resume": path.name, "output-dir": str(path.parent), "num-server-rounds": 3}
    run(None, again)  # the tracker is one of the run's settings
    first, *rounds, _ = json.loads((path / "mine.json").read_text())
    assert (first[1], [record["round"] for record in rounds]) == (2, [3])


@pytest.mark.parametrize(("name", "reason"), [("Failing", "connection refused"), ("broken", "access denied")])
def test_a_failing_tracker_warns_once_and_the_run_continues(
    make_config: Callable[..., dict[str, Any]],
    trackers_file: Path,
    warnings: pytest.LogCaptureFixture,
    name: str,
    reason: str,
) -> None:
    recorder = run(None, make_config("fedavg", num_server_rounds=3, track=f"{trackers_file}:{name}"))
    records = {id(record): record.getMessage() for record in warnings.records}  # each handler captures every record
    messages = [text for text in records.values() if text.startswith("track =")]
    assert len(messages) == 1 and reason in messages[0]
    assert recorder.summary["status"] == "completed" and len(rounds_in(recorder.directory.path)) == 3


@pytest.mark.parametrize(
    ("track", "reason"), [("{}:missing", "not define missing"), ("{}:not_callable", "takes the run")]
)
def test_a_missing_tracker_is_rejected_before_the_run(
    make_config: Callable[..., dict[str, Any]], trackers_file: Path, tmp_path: Path, track: str, reason: str
) -> None:
    with pytest.raises(SettingsError, match=reason):
        run(None, make_config("fedavg", track=track.format(trackers_file)))
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("track", "module"), [("tensorboard", "torch.utils.tensorboard"), ("mlflow", "mlflow"), ("wandb", "wandb")]
)
def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, track: str, module: str) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.delitem(sys.modules, f"posy.server_app.trackers.{track}", raising=False)
    with pytest.raises(SettingsError, match=rf"track = '{track}' needs .*pip install 'posy\[{track}\]'"):
        find(track)


def test_every_tracker_choice_exists() -> None:
    from posy.strategies.registry import declared

    assert set(declared([])["track"].choices) == {"off", *TRACKERS}
    assert find("off") is None


def test_numbers_of_a_record() -> None:
    record = {
        "round": 3,
        "served_accuracy": {"mean": 0.5, "jain": None},
        "local_accuracy": None,
        "missing": [4, 7],
        "dropped": [{"client": 1, "reason": "late"}],
        "clients_of_model": [3, 1],
        "status": "running",
    }
    assert numbers(record) == {
        "round": 3,
        "served_accuracy/mean": 0.5,
        "missing": 2,
        "dropped": 1,
        "clients_of_model/0": 3,
        "clients_of_model/1": 1,
    }
    summary = {"dropped": {"late": 2, "lost": 1}, "served": {"last": {"missing": 2}}}
    assert numbers(summary, "result/") == {"result/dropped": 3, "result/served/last/missing": 2}


@pytest.mark.usefixtures("pictures")
def test_tensorboard_has_curves_pictures_and_settings(make_config: Callable[..., dict[str, Any]]) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams import plugin_data_pb2

    path = run(None, make_config("fedavg", num_server_rounds=3, track="tensorboard", lr=0.125)).directory.path
    run(None, {"resume": path.name, "output-dir": str(path.parent), "num-server-rounds": 4})
    events = EventAccumulator(str(path / "tensorboard"))
    events.Reload()
    rows = rounds_in(path)
    for name in ("served_accuracy", "train_loss"):
        points = [(event.step, event.value) for event in events.Scalars(f"{name}/min")]
        assert [step for step, _ in points] == [1, 2, 3, 4]
        assert [value for _, value in points] == pytest.approx([row[name]["min"] for row in rows])
    assert {"accuracy", "clients", "partition"} <= set(events.Tags()["images"])
    summary = json.loads((path / "summary.json").read_text())
    assert events.Scalars("result/served/last/mean")[-1].value == pytest.approx(summary["served"]["last"]["mean"])
    content = events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    settings = plugin_data_pb2.HParamsPluginData.FromString(content).session_start_info.hparams
    assert (settings["lr"].number_value, settings["method"].string_value) == (0.125, "fedavg")


def test_mlflow_has_rounds_settings_and_results(
    make_config: Callable[..., dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.chdir(tmp_path)
    path = run(None, make_config("fedavg", num_server_rounds=2, track="mlflow")).directory.path
    run(None, {"resume": path.name, "output-dir": str(path.parent), "num-server-rounds": 3})
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("posy")
    (tracked_run,) = client.search_runs([experiment.experiment_id])
    assert (tracked_run.info.status, tracked_run.info.run_name, tracked_run.data.params["method"]) == (
        "FINISHED",
        path.name,
        "fedavg",
    )
    history = client.get_metric_history(tracked_run.info.run_id, "served_accuracy/mean")
    assert [(point.step, point.value) for point in sorted(history, key=lambda point: point.step)] == [
        (row["round"], row["served_accuracy"]["mean"]) for row in rounds_in(path)
    ]
    assert {file.path for file in client.list_artifacts(tracked_run.info.run_id)} >= {"summary.json", "config.yaml"}


def test_weights_and_biases_stays_offline(
    make_config: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    path = run(None, make_config("fedavg", num_server_rounds=2, track="wandb")).directory.path
    (folder,) = (path / "wandb").glob("offline-run-*")
    assert next(folder.glob("*.wandb")).stat().st_size > 1000
