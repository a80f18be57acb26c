"""Runs that are stopped in various ways and resume as if they had not been stopped."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import yaml
from flwr.app import Context, RecordDict
from flwr.supercore.run import Run
from nodes import LENIENT, NodeGrid
from recorded import assert_same_results, clients_of, models_of, rounds_of, summary_of
from sklearn.datasets import load_digits

from posy.client_app.local_run import LocalRun
from posy.client_app.workspace import workspace_for
from posy.commands import cli
from posy.server_app import checkpoints as checkpoints_module
from posy.server_app.app import app, run
from posy.server_app.checkpoints import Checkpoints
from posy.server_app.grids import WaveGrid
from posy.server_app.in_process import InProcessGrid
from posy.server_app.recorder import Recorder
from posy.server_app.results import RunDirectory
from posy.server_app.resume import StoredRun, reached
from posy.settings import NothingTrainedError, RunError, SettingsError
from posy.storage import load_arrays, write_json
from posy.strategies.base import PersonalisedStrategy
from posy.strategies.methods import METHODS, strategy_class
from posy.strategies.registry import defaults
from posy.strategies.server_state import load_state

Config = dict[str, Any]
ROOT = Path(__file__).resolve().parent.parent

TINY = {"num_clients": 2, "max_samples": 60, "num_server_rounds": 4, "checkpoint_every": 1, "fraction_train": 1.0}
CHANGES: dict[str, Config] = {
    "fedfew": {"fedfew-personal-head": True},
    "cwfedavg": {},
    "ppfe": {"ppfe-stages": 3},
    "fedacs": {"fedacs-p": 0.3},
}


def settings(folder: Path, method: str, name: str, **more: Any) -> Config:
    """Return a small run on digits with checkpoints after rounds 2, 4 and 6."""
    small = {
        "method": method,
        "num-clients": 4,
        "num-server-rounds": 6,
        "checkpoint-every": 2,
        "max-samples": 240,
        "all-metrics": "none",
        "fraction-train": 0.6,
        "model": "mlp",
        "local-epochs": 1,
        "device": "cpu",
        "output-dir": str(folder / "runs"),
        "run-name": name,
    }
    return {**small, **CHANGES.get(method, {}), **{k.replace("_", "-"): v for k, v in more.items()}}


def resume_config(config: Config, name: str, **more: Any) -> Config:
    """Return the settings that resume a run: its name, its directory and ``more``."""
    changes = {k.replace("_", "-"): v for k, v in more.items()}
    return {"output-dir": config["output-dir"], "resume": name, **changes}


def grid_of(config: Config) -> InProcessGrid:
    return InProcessGrid(int(config["num-clients"]))


class KilledError(BaseException):
    """Represents the end of the process. Posy does not handle it."""


def die_in(monkeypatch: pytest.MonkeyPatch, server_round: int, phase: str = "train", client: int | None = None) -> None:
    """End the process when a client starts to train or evaluate, as kill -9 does: no summary, no last model."""
    original = getattr(LocalRun, phase)

    def killed(self: LocalRun) -> Any:
        if self.config["server-round"] == server_round and client in (None, self.config["client"]):
            raise KilledError
        return original(self)

    monkeypatch.setattr(LocalRun, phase, killed)
    monkeypatch.setattr(Recorder, "__exit__", lambda *_: None)


@pytest.fixture(autouse=True)
def checkpoints_by_number_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints_module, "WRITING_SHARE", 0.0)


# -- a stopped and resumed run equals an uninterrupted run --------------------------------------------------


@pytest.mark.parametrize(
    ("method", "more"),
    [*((method, {}) for method in METHODS), ("ppfe", {"ppfe-reduction": "svd-fedavg", "full-last-round": True})],
)
def test_a_killed_and_resumed_run_equals_an_uninterrupted_run(
    method: str, more: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kill the run in the training of round 6, and again in the evaluation of round 5: it resumes from 4 both times."""
    config = settings(tmp_path, method, "whole", **more)
    uninterrupted = run(grid_of(config), config).directory.path
    config = settings(tmp_path, method, "cut", **more)
    with monkeypatch.context() as patched:
        die_in(patched, 6)
        with pytest.raises(KilledError):
            run(grid_of(config), config)
    path = uninterrupted.parent / "cut"
    assert len(rounds_of(path)) == 5
    with monkeypatch.context() as patched:
        die_in(patched, 5, "evaluate", client=2)
        with pytest.raises(KilledError):
            run(grid_of(config), resume_config(config, "cut"))
    strategy = run(grid_of(config), resume_config(config, "cut")).strategy
    assert_same_results(path, uninterrupted)
    written = yaml.safe_load((path / "config.yaml").read_text())
    assert [entry["round"] for entry in written["resumed"]] == [4, 4]
    assert sorted(p.name for p in (path / "checkpoints").iterdir()) == ["round-4", "round-6"]
    # The data of the pictures covers all rounds too.
    other = strategy_class(method)(strategy.settings, strategy.architecture)
    load_state(other, load_arrays(uninterrupted / "checkpoints" / "round-6" / "server.safetensors"))
    for name in ("losses", "weights", "objectives", "local_norms", "pictures"):
        if hasattr(other, name):
            np.testing.assert_equal(getattr(strategy, name), getattr(other, name))


INTERRUPTS: dict[str, tuple[type, str, Callable[..., int]]] = {
    "training": (LocalRun, "train", lambda local_run: local_run.config["server-round"]),
    "aggregation": (PersonalisedStrategy, "aggregate_train", lambda strategy, server_round, replies: server_round),
    "evaluation": (LocalRun, "evaluate", lambda local_run: local_run.config["server-round"]),
    "record": (RunDirectory, "append_round", lambda directory, row: row["round"]),
}
"""The point of an interrupt: a method, and a function that reads the round from its arguments."""


@pytest.mark.parametrize(
    ("method", "moment"),
    [
        (m, w)
        for m in ("fedrep", "ppfe", "fedacs")
        for w in INTERRUPTS
        if m == "fedrep" or w in ("training", "aggregation")
    ],
)
def test_an_interrupted_run_resumes_after_its_last_finished_round(
    method: str, moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C in round 4, after one client or all clients have trained, and before the first checkpoint is due."""
    more = {"num_server_rounds": 5, "checkpoint_every": 10, "stack": "loop"}
    uninterrupted = run(InProcessGrid(4), settings(tmp_path, method, "whole", **more)).directory.path
    config = settings(tmp_path, method, "cut", **more)
    where, name, round_of = INTERRUPTS[moment]
    original, calls = getattr(where, name), []

    def interrupted(self: Any, *arguments: Any) -> Any:
        if round_of(self, *arguments) != 4:
            return original(self, *arguments)
        calls.append(name)
        if len(calls) == 2:  # the first client has finished
            raise KeyboardInterrupt
        result = original(self, *arguments)
        if moment == "record":
            signal.raise_signal(signal.SIGINT)  # takes effect at the end of the record
        elif moment == "aggregation":
            raise KeyboardInterrupt
        return result

    with monkeypatch.context() as patched:
        patched.setattr(where, name, interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(InProcessGrid(4), config)
    path = uninterrupted.parent / "cut"
    assert summary_of(path)["status"] == "stopped"
    run(InProcessGrid(4), resume_config(config, "cut"))
    finished = 4 if moment == "record" else 3
    assert yaml.safe_load((path / "config.yaml").read_text())["resumed"][0]["round"] == finished
    assert_same_results(path, uninterrupted)


def test_cheap_checkpoints_follow_additional_rounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint always follows the first round, so that a killed run can be resumed."""
    written: list[int] = []
    original_write = Checkpoints.write

    def write(self: Checkpoints, checkpoint: Any) -> None:
        written.append(checkpoint.server_round)
        original_write(self, checkpoint)

    monkeypatch.setattr(Checkpoints, "write", write)
    for share, every, expected in ((1e-9, 5, [1, 5, 6]), (1e9, 5, [1, 2, 3, 4, 5, 6]), (1e9, 0, [])):
        written.clear()
        monkeypatch.setattr(checkpoints_module, "WRITING_SHARE", share)
        config = settings(tmp_path, "fedavg", f"{share}-{every}", **{**TINY, "num_server_rounds": 6}, model="linear")
        run(InProcessGrid(2), {**config, "checkpoint-every": every})
        assert written == expected


class Nodes(WaveGrid):
    """Nodes of a federation. A new set of nodes shares only the directories of the previous set."""

    def __init__(self, count: int, state_dir: Path | None) -> None:
        nodes = InProcessGrid(count)
        nodes.trusting = state_dir is None
        for node, context in nodes.contexts.items():
            if state_dir is not None:
                node_config = {**context.node_config, "state-dir": str(state_dir / f"node-{node}")}
                nodes.contexts[node] = Context(context.run_id, node, node_config, context.state, {})
        super().__init__(nodes)


@pytest.mark.parametrize("method", ["fedrep", "ppfe", "fedamp"])
def test_a_run_resumes_with_states_stored_on_nodes(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Clients train one after the other, because the number of clients in a batch changes the last bits.
    uninterrupted = run(Nodes(4, None), settings(tmp_path, method, "whole", stack="loop")).directory.path
    config = settings(tmp_path, method, "cut", stack="loop")
    with monkeypatch.context() as patched:
        die_in(patched, 4, "evaluate", client=3)
        with pytest.raises(KilledError):
            run(Nodes(2, tmp_path / "nodes"), config)
    run(Nodes(2, tmp_path / "nodes"), resume_config(config, "cut"))
    (run_folder,) = {path.name for path in (tmp_path / "nodes").glob("node-*/*")}
    cut = uninterrupted.parent / "cut"
    assert [path.name for path in (cut / "models").iterdir()] == ["server.safetensors"]
    for file in (tmp_path / "nodes").glob(f"node-*/{run_folder}/models/*"):
        shutil.copy(file, cut / "models")
    assert_same_results(cut, uninterrupted)
    assert not (cut / "state").exists()  # a client's state stays on its node
    assert {p.name for p in (tmp_path / "nodes").glob("*/*/client-*")} == {f"client-{c}" for c in range(4)}


def test_clients_on_nodes_without_state_dir_start_from_scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for method, dropped in (("fedrep", True), ("fedavg", False)):
        config = settings(tmp_path, method, method)
        with monkeypatch.context() as patched:
            die_in(patched, 5)
            with pytest.raises(KilledError):
                run(Nodes(4, None), config)
        summary = summary_of(run(Nodes(4, None), resume_config(config, method)).directory.path)
        assert all("state-dir" in reason and "starts from scratch" in reason for reason in summary["dropped"])
        counts = {int(re.findall(r"state of round (\d)", reason)[0]): n for reason, n in summary["dropped"].items()}
        assert counts == ({4: 3, 3: 1} if dropped else {})  # each client has reported it once


def test_a_client_with_a_damaged_state_is_dropped_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = settings(tmp_path, "fedrep", "cut", fraction_train=1.0)
    with monkeypatch.context() as patched:
        die_in(patched, 6)
        with pytest.raises(KilledError):
            run(grid_of(config), config)
    path = tmp_path / "runs" / "cut"
    file = path / "state" / "client-1" / "0-4-0.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    summary = summary_of(run(grid_of(config), resume_config(config, "cut")).directory.path)
    ((reason, count),) = summary["dropped"].items()
    assert "the state of client 1 cannot be read" in reason and "0-4-0.safetensors" in reason
    assert count == 4  # trainings and evaluations of rounds 5 and 6
    assert {c for row in rounds_of(path)[4:] for c in (entry["client"] for entry in row["dropped"])} == {1}


def test_elapsed_seconds_and_dropped_replies_accumulate_over_a_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = settings(tmp_path, "fedavg", "cut", max_update_norm=1e-6, fraction_train=1.0)
    with monkeypatch.context() as patched:
        die_in(patched, 5)
        with pytest.raises(KilledError):
            run(grid_of(config), config)
    first = json.loads((tmp_path / "runs/cut/checkpoints/round-4/progress.json").read_text())["content"]
    assert sum(first["dropped"].values()) == 16
    with pytest.raises(NothingTrainedError):
        run(grid_of(config), resume_config(config, "cut"))
    summary = json.loads((tmp_path / "runs/cut/summary.json").read_text())
    assert sum(summary["dropped"].values()) == 24
    assert summary["seconds"] > first["seconds"] > 0


# -- extended runs and changed settings -------------------------------------------------------------------


def test_a_complete_run_can_be_extended(tmp_path: Path) -> None:
    longer = settings(tmp_path, "fedrep", "longer", num_server_rounds=8)
    run(grid_of(longer), longer)
    config = settings(tmp_path, "fedrep", "mine")
    path = run(grid_of(config), config).directory.path
    with pytest.raises(SettingsError, match=r"6 rounds are complete; .*num-server-rounds"):
        run(grid_of(config), resume_config(config, "mine"))
    run(grid_of(config), resume_config(config, "mine", num_server_rounds=8, round_timeout=99.5))
    assert_same_results(path, path.parent / "longer")
    written = yaml.safe_load((path / "config.yaml").read_text())
    assert written["settings"]["num-server-rounds"] == 8
    assert written["resumed"][0]["changed"] == {"num-server-rounds": 8, "round-timeout": 99.5}
    with pytest.raises(SettingsError, match="num-server-rounds = 7"):
        run(grid_of(config), resume_config(config, "mine", num_server_rounds=7))


@pytest.mark.parametrize(
    ("method", "before", "changes", "parts"),
    [
        ("fedavg", {}, {"lr": 0.2, "batch-size": 10, "seed": 7}, ("lr = 0.2, but the run has 0.05", "seed = 7")),
        ("fedavg", {}, {"method": "fedprox"}, ("method = 'fedprox', but the run has 'fedavg'",)),
        ("ppfe", {}, {"num-server-rounds": 9}, ("num-server-rounds = 9, but the run has 6", "depends on it")),
        ("fedavg", {"lr-schedule": "cosine"}, {"num-server-rounds": 9}, ("num-server-rounds = 9",)),
        ("fedavg", {"full-last-round": True}, {"num-server-rounds": 9}, ("num-server-rounds = 9", "full-last-round")),
        ("fedavg", {"lr": 0.1}, {"lr": 0.05}, ("lr = 0.05, but the run has 0.1",)),
    ],
)
def test_changes_of_fixed_settings_are_refused_by_name(
    method: str, before: Config, changes: Config, parts: tuple[str, ...], tmp_path: Path
) -> None:
    config = {**settings(tmp_path, method, "mine"), **before}
    path = run(grid_of(config), config).directory.path
    files = {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}
    with pytest.raises(SettingsError) as raised:
        run(grid_of(config), {**resume_config(config, "mine"), **changes})
    assert all(part in str(raised.value) for part in parts)
    assert "batch-size" not in str(raised.value)  # its value does not change
    assert {file: file.read_bytes() for file in path.rglob("*") if file.is_file()} == files


def sites_of(folder: Path, policy: str) -> NodeGrid:
    """Return two nodes with digits, whose policy has one more rule."""
    x, y = load_digits(return_X_y=True)
    (folder / "policy.yaml").write_text(f"{LENIENT.read_text()}\n{policy}\n")
    for site in range(2):
        np.savez(folder / f"{site}.npz", x_train=x[site::20].astype(np.float32), y_train=y[site::20])
    more = {"policy": str(folder / "policy.yaml")}
    return NodeGrid(*({"data": str(folder / f"{site}.npz"), "name": f"site-{site}", **more} for site in range(2)))


def test_a_resume_that_the_sites_refuse_changes_no_file(tmp_path: Path) -> None:
    config = settings(tmp_path, "fedrep", "mine", dataset="sites", num_clients=2, num_server_rounds=2, join_timeout=0.1)
    del config["max-samples"]
    path = run(sites_of(tmp_path, "max-rounds: 3"), config).directory.path
    files = {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}
    with pytest.raises(SettingsError, match="max-rounds: num-server-rounds = 4"):
        run(sites_of(tmp_path, "max-rounds: 3"), resume_config(config, "mine", num_server_rounds=4))
    assert {file: file.read_bytes() for file in path.rglob("*") if file.is_file()} == files
    resumed = run(sites_of(tmp_path, "max-rounds: 3"), resume_config(config, "mine", num_server_rounds=3))
    assert resumed.summary["rounds"] == 3


@pytest.mark.parametrize("step", ["checkpoints", "config.yaml"])
def test_an_interruption_while_a_resume_writes_the_settings_leaves_a_run_that_resumes(
    step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = settings(tmp_path, "fedavg", "mine", num_server_rounds=2)
    path = run(grid_of(config), config).directory.path

    def killed(*_: Any, **__: Any) -> None:
        raise KilledError

    with monkeypatch.context() as patch, pytest.raises(KilledError):
        owner, name = (checkpoints_module, "write_json") if step == "checkpoints" else (RunDirectory, "write_config")
        patch.setattr(owner, name, killed)
        run(grid_of(config), resume_config(config, "mine", num_server_rounds=4))
    run(grid_of(config), resume_config(config, "mine", num_server_rounds=3))
    assert yaml.safe_load((path / "config.yaml").read_text())["settings"]["num-server-rounds"] == 3


class Submitted(InProcessGrid):
    """A grid with the settings of the submitted run, as in Flower."""

    overrides: ClassVar[Config] = {}

    @property
    def run(self) -> Run:
        return replace(Run.create_empty(0), override_config=self.overrides)


def test_typed_settings_are_checked_even_at_their_defaults(tmp_path: Path) -> None:
    """Flower passes all keys, but its run has the typed ones. An edited table differs from the declared defaults."""
    config = {**settings(tmp_path, "fedavg", "mine"), "lr": 0.1}
    run(grid_of(config), config)
    table = {**defaults(), "output-dir": config["output-dir"], "num-server-rounds": 8}  # edited in pyproject.toml
    grid = Submitted(4)
    for typed, difference in (
        ({"lr": 0.05}, "lr = 0.05, but the run has 0.1"),
        ({"num-clients": 10}, "num-clients = 10"),
    ):
        grid.overrides = {"resume": "mine", **typed}
        with pytest.raises(SettingsError) as raised:
            app(grid, Context(0, 0, {}, RecordDict(), {**table, **grid.overrides}))
        assert difference in str(raised.value) and str(raised.value).count("the run has") == 1
    grid.overrides = {"resume": "mine"}
    app(grid, Context(0, 0, {}, RecordDict(), {**table, **grid.overrides}))
    assert len(rounds_of(tmp_path / "runs" / "mine")) == 8


def test_changed_data_is_refused(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(60, 4)).astype(np.float32), np.arange(60) % 3
    np.savez(tmp_path / "own.npz", x_train=x, y_train=y)
    config = settings(tmp_path, "fedavg", "mine", dataset=str(tmp_path / "own.npz"), max_samples=0, num_server_rounds=2)
    run(grid_of(config), config)
    np.savez(tmp_path / "own.npz", x_train=x, y_train=np.roll(y, 1))
    with pytest.raises(SettingsError, match="labels and the clients' shares have changed"):
        run(grid_of(config), resume_config(config, "mine", num_server_rounds=4))
    workspace_for.cache_clear()
    np.savez(tmp_path / "own.npz", x_train=x + np.float32(1e-3), y_train=y)
    match = r"'mine' in .*samples have changed.*own\.npz"
    with pytest.raises(SettingsError, match=match):
        run(grid_of(config), resume_config(config, "mine", num_server_rounds=4))


@pytest.mark.parametrize("name", ["..", "a/b", "unknown"])
def test_resuming_an_unknown_run_is_an_error(name: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="resume = "):
        run(InProcessGrid(4), {"output-dir": str(tmp_path), "resume": name})


def test_a_run_in_use_cannot_be_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = settings(tmp_path, "fedavg", "mine")
    original = Recorder.finish_round
    refused = []

    def finish_round(self: Recorder, server_round: int, arrays: Any) -> Any:
        if server_round == 3:
            monkeypatch.setattr(Recorder, "finish_round", original)
            with pytest.raises(SettingsError, match="a process still uses"):
                run(grid_of(config), resume_config(config, "mine"))
            refused.append(server_round)
        return original(self, server_round, arrays)

    monkeypatch.setattr(Recorder, "finish_round", finish_round)
    assert summary_of(run(grid_of(config), config).directory.path)["status"] == "completed"
    assert refused == [3]


# -- damaged checkpoints ---------------------------------------------------------------------------------


def cut_arrays(path: Path) -> None:
    file = path / "checkpoints/round-4/server.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def flip_arrays(path: Path) -> None:
    file = path / "checkpoints/round-4/server.safetensors"
    content = bytearray(file.read_bytes())
    content[-50] ^= 1
    file.write_bytes(content)


def cut_progress(path: Path) -> None:
    file = path / "checkpoints/round-4/progress.json"
    file.write_text(file.read_text()[:-20])


def change_progress(path: Path) -> None:
    file = path / "checkpoints/round-4/progress.json"
    file.write_text(file.read_text().replace('"bytes-up": ', '"bytes-up": 1'))


def lose_progress(path: Path) -> None:
    (path / "checkpoints/round-4/progress.json").unlink()


def of_another_round(path: Path) -> None:
    shutil.copytree(path / "checkpoints/round-2", path / "checkpoints/round-4", dirs_exist_ok=True)


def of_another_run(path: Path) -> None:
    file = path / "checkpoints/round-4/progress.json"
    write_json(file, {**json.loads(file.read_text())["content"], "run": "deadbeef"})


DAMAGES = (cut_arrays, flip_arrays, cut_progress, change_progress, lose_progress, of_another_round, of_another_run)


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with an uninterrupted run, ``whole``, and a run killed in round 6, ``cut``."""
    folder = tmp_path_factory.mktemp("killed")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(checkpoints_module, "WRITING_SHARE", 0.0)
        run(InProcessGrid(4), settings(folder, "fedrep", "whole"))
        die_in(patched, 6)
        config = settings(folder, "fedrep", "cut")
        with pytest.raises(KilledError):
            run(grid_of(config), config)
    return folder / "runs"


@pytest.mark.parametrize("damage", DAMAGES)
def test_the_previous_checkpoint_replaces_a_damaged_one(
    damage: Callable[[Path], None], killed: Path, tmp_path: Path, warnings: pytest.LogCaptureFixture
) -> None:
    config = settings(tmp_path, "fedrep", "cut")
    path = Path(str(config["output-dir"])) / "cut"
    shutil.copytree(killed / "cut", path)
    damage(path)
    warnings.clear()
    run(grid_of(config), resume_config(config, "cut"))
    assert len({id(r) for r in warnings.records if "the checkpoint of round 4 is not used" in r.message}) == 1
    assert_same_results(path, killed / "whole")
    assert yaml.safe_load((path / "config.yaml").read_text())["resumed"][0]["round"] == 2


def test_the_error_lists_why_no_checkpoint_is_usable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = settings(tmp_path, "fedavg", "cut")
    with monkeypatch.context() as patched:
        die_in(patched, 6)
        with pytest.raises(KilledError):
            run(grid_of(config), config)
    path = tmp_path / "runs" / "cut"
    cut_arrays(path)
    (path / "checkpoints/round-2/server.safetensors").write_bytes(b"")
    with pytest.raises(SettingsError, match=r"no checkpoint .*round-4.*round-2"):
        run(grid_of(config), resume_config(config, "cut"))
    config = settings(tmp_path, "fedavg", "none", checkpoint_every=0)
    run(grid_of(config), config)
    with pytest.raises(SettingsError, match="has no checkpoint"):
        run(grid_of(config), resume_config(config, "none", num_server_rounds=9))
    assert not (tmp_path / "runs/none/state").exists() and not list((tmp_path / "runs/none").glob("state*"))


@pytest.mark.parametrize("function", ["write_arrays", "write_json", "sync"])
def test_a_run_resumes_after_a_crash_while_writing_a_checkpoint(
    function: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half a file, half a folder, or a renamed folder with older checkpoints that still exist."""
    uninterrupted = run(InProcessGrid(4), settings(tmp_path, "ditto", "whole")).directory.path
    config = settings(tmp_path, "ditto", "cut")
    original = getattr(checkpoints_module, function)
    writing: list[int] = []
    original_write = Checkpoints.write

    def write(self: Checkpoints, checkpoint: Any) -> None:
        writing.append(checkpoint.server_round)
        original_write(self, checkpoint)

    def die(path: Path, *args: Any, **kwargs: Any) -> None:
        if writing[-1] != 6:
            return original(path, *args, **kwargs)
        if function != "sync":
            path.write_bytes(b"half of it")
        raise KilledError

    with monkeypatch.context() as patched:
        patched.setattr(Checkpoints, "write", write)
        patched.setattr(checkpoints_module, function, die)
        patched.setattr(Recorder, "__exit__", lambda *_: None)
        with pytest.raises(KilledError):
            run(grid_of(config), config)
    path = uninterrupted.parent / "cut"
    run(grid_of(config), resume_config(config, "cut"))
    assert_same_results(path, uninterrupted)
    # If the folder of round 6 was complete, the run only had to end.
    expected = 6 if function == "sync" else 4
    assert yaml.safe_load((path / "config.yaml").read_text())["resumed"][0]["round"] == expected
    assert sorted(p.name for p in (path / "checkpoints").iterdir()) == ["round-4", "round-6"]


def test_states_spilled_to_disk_give_the_same_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit of 60 kB holds the model of one of four clients, 40 kB each. The disk stores the others."""
    from posy.server_app import app

    in_memory = run(InProcessGrid(4), settings(tmp_path, "local", "whole")).directory.path
    config = settings(tmp_path, "local", "small", state_memory=1, checkpoint_every=0)
    stores = []
    original = app.MemoryStore

    def tiny(path: Path, limit: int) -> Any:
        assert limit == 1 << 20
        stores.append(original(path, 60_000))
        return stores[0]

    monkeypatch.setattr(app, "MemoryStore", tiny)
    spilled: set[str] = set()
    original_finish = Recorder.finish_round

    def finish_round(self: Recorder, server_round: int, arrays: Any) -> Any:
        spilled.update(p.parent.name for p in self.directory.path.glob("state-*/*/*.safetensors"))
        return original_finish(self, server_round, arrays)

    monkeypatch.setattr(Recorder, "finish_round", finish_round)
    path = run(InProcessGrid(4), config).directory.path
    assert spilled == {f"client-{c}" for c in range(4)}
    assert not list(path.glob("state*"))
    assert_same_results(path, in_memory)


# -- damaged runs: every file, every damage -----------------------------------------------------------------

FILES = {
    "config.yaml": "config.yaml is rewritten",
    "summary.json": "",
    "rounds.jsonl": "is lost or damaged",
    "clients.csv": "is lost or damaged",
    "models/server.safetensors": "",
    "checkpoints/round-2/progress.json": "the checkpoint of round 2 is not used",
    "checkpoints/round-2/server.safetensors": "the checkpoint of round 2 is not used",
    "state/client-1/0-2-0.safetensors": "the state of client 1 cannot be read",
}
"""The files of a run, and the warning about a damaged file (none if Posy rewrites the file or it is only a copy)."""
DAMAGED: dict[str, Callable[[Path, Path], object]] = {
    "missing": lambda file, other: file.unlink(),
    "truncated": lambda file, other: file.write_bytes(file.read_bytes()[:-7]),
    "nested": lambda file, other: file.write_text("[" * 100_000),
    "of another run": lambda file, other: shutil.copy(other, file),
}


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a complete run, a run interrupted in round 3, and such a run with other settings."""
    folder = tmp_path_factory.mktemp("stopped")
    with pytest.MonkeyPatch.context() as patched:
        run(InProcessGrid(2), settings(folder, "fedrep", "whole", **TINY))
        original = LocalRun.train

        def interrupted(self: LocalRun) -> Any:
            if self.config["server-round"] == 3:
                raise KeyboardInterrupt
            return original(self)

        patched.setattr(LocalRun, "train", interrupted)
        for name, more in (("cut", {}), ("other", {"seed": 7, "lr": 0.3})):
            with pytest.raises(KeyboardInterrupt):
                run(InProcessGrid(2), settings(folder, "fedrep", name, **TINY, **more))
    return folder / "runs"


# The server cannot detect a missing state or a state of another run.
CASES = [(f, d) for f in FILES for d in DAMAGED if not f.startswith("state") or d in ("truncated", "nested")]


@pytest.mark.parametrize(("file", "damage"), CASES)
def test_a_damaged_file_does_not_prevent_a_resume(
    file: str,
    damage: str,
    stopped: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    warnings: pytest.LogCaptureFixture,
) -> None:
    path = tmp_path / "cut"
    shutil.copytree(stopped / "cut", path)
    DAMAGED[damage](path / file, stopped / "other" / file)
    run(InProcessGrid(2), {"output-dir": str(tmp_path), "resume": "cut"})
    messages = {record.getMessage() for record in warnings.records if record.levelname in ("WARNING", "ERROR")}
    expected = FILES[file]
    assert expected == "" or sum(expected in line for line in messages) >= 1
    assert not [line for line in messages if "\n" in line.strip()]
    complete = stopped / "whole"
    if file.startswith("state"):
        assert "cannot be read" in " ".join(summary_of(path)["dropped"])
        return
    assert summary_of(path) == summary_of(complete)
    for name in ("rounds.jsonl", "clients.csv"):
        rows, all_rows = (rounds_of(run) if name == "rounds.jsonl" else clients_of(run) for run in (path, complete))
        lost = [row for row in all_rows if row not in rows]
        assert rows == [row for row in all_rows if row not in lost]
        assert bool(lost) == (name == file) and all(row["round"] in (1, 2, "1", "2") for row in lost)
    for name, arrays in models_of(complete).items():
        for key, array in arrays.items():
            np.testing.assert_array_equal(array, models_of(path)[name][key])
    refused = {p.name for p in (path / "checkpoints").glob("*refused")}
    assert refused == ({"round-2-refused"} if file.startswith("checkpoints/round-2") else set())


def test_an_edited_config_is_refused_with_the_keys_and_both_values(stopped: Path, tmp_path: Path) -> None:
    shutil.copytree(stopped / "cut", tmp_path / "cut")
    file = tmp_path / "cut" / "config.yaml"
    text = file.read_text()
    resumed = {"output-dir": str(tmp_path), "resume": "cut"}
    for before, after, difference in (
        ("  lr: 0.05\n", "  lr: 0.5\n", "lr = 0.5, but the run has 0.05"),
        ("method: fedrep", "method: fedavg", "method = 'fedavg', but the run has 'fedrep'"),
        ("num-server-rounds: 4", "num-server-rounds: 9", "num-server-rounds = 9, but the run has 4"),
    ):
        assert before in text
        file.write_text(text.replace(before, after))
        with pytest.raises(SettingsError) as raised:
            run(InProcessGrid(2), resumed)
        assert difference in str(raised.value) and "delete the file" in str(raised.value)
    file.write_text(text)
    assert StoredRun.find(resumed, "a test") is not None


# -- a full disk -----------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Return a file system of 2 MiB, which only root can mount."""
    path = tmp_path / "disk"
    path.mkdir()
    if os.geteuid() or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", path], check=False).returncode:
        pytest.skip("only root can mount a file system")
    yield path
    subprocess.run(["umount", "-l", path], check=True)


@pytest.mark.parametrize("method", ["fedrep", "fedavg"])
def test_a_full_disk_gives_a_one_line_error_and_the_run_can_resume(
    method: str, small_disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    more = {**TINY, "save_models": False}
    run(InProcessGrid(2), settings(tmp_path, method, "whole", **more))
    config = {**settings(small_disk, method, "cut", **more)}
    original_finish, filler = Recorder.finish_round, small_disk / "filler"

    def finish_round(self: Recorder, server_round: int, arrays: Any) -> Any:
        if server_round == 3:
            with pytest.raises(OSError), filler.open("wb", buffering=0) as file:
                while True:
                    file.write(bytes(512))
        return original_finish(self, server_round, arrays)

    with monkeypatch.context() as patched:
        patched.setattr(Recorder, "finish_round", finish_round)
        with pytest.raises(RunError, match=r"cut cannot be written: .*No space") as raised:
            run(InProcessGrid(2), config)
    assert "\n" not in str(raised.value)
    filler.unlink()
    path = run(InProcessGrid(2), resume_config(config, "cut")).directory.path
    assert_same_results(path, tmp_path / "runs" / "whole")
    assert yaml.safe_load((path / "config.yaml").read_text())["resumed"][0]["round"] == 2


# -- a real process ---------------------------------------------------------------------------------------

PROGRAM = """
import os, sys
from posy.commands import cli
from posy.server_app.pictures import Pictures
from posy.server_app.recorder import Recorder

usual = Recorder.finish_round
Pictures.draw = Pictures.draw_partition = lambda self, *_, **__: None

def finish_round(self, server_round, arrays):
    result = usual(self, server_round, arrays)
    if server_round == int(sys.argv[1]):
        os.kill(os.getpid(), int(sys.argv[2]))
    return result

Recorder.finish_round = finish_round
sys.exit(cli.main(sys.argv[3:]))
"""
"""`posy` in a process that receives a signal at the end of a round."""


def test_killed_and_interrupted_processes_can_be_resumed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def posy(server_round: int, number: signal.Signals, *words: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [sys.executable, "-P", "-c", PROGRAM, str(server_round), str(int(number)), "run", "output-dir=.", *words],
            cwd=cut.parent,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )

    more = {"num_clients": 3, "num_server_rounds": 12, "checkpoint_every": 4}
    uninterrupted = run(InProcessGrid(3), settings(tmp_path, "fedrep", "whole", **more)).directory.path
    config, cut = settings(tmp_path, "fedrep", "cut", **more), tmp_path / "runs" / "cut"
    words = [f"{key}={value}" for key, value in config.items() if key != "output-dir"]
    assert posy(6, signal.SIGKILL, *words).returncode == -signal.SIGKILL
    assert summary_of(cut)["status"] == "running"
    done = posy(9, signal.SIGINT, "resume=cut")
    assert done.returncode == 130, done.stderr
    assert summary_of(cut)["status"] == "stopped"
    assert f"results          {cut}" in done.stdout
    assert "round  8/12" in done.stdout
    assert "INFO" not in done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    hint = done.stderr.splitlines()[-1]
    assert hint.startswith("posy: stopped after round 9")
    assert hint.endswith(f": posy run resume=cut output-dir={cut.parent}")
    assert reached(cut) == (9, 12)
    assert cli.main(["run", *hint.split()[-2:]]) == 0
    assert_same_results(cut, uninterrupted)
    assert [entry["round"] for entry in yaml.safe_load((cut / "config.yaml").read_text())["resumed"]] == [4, 9]
