"""Complete runs through the ServerApp: their results, also after an early end."""

import csv
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from flwr.app import ArrayRecord, Error, Message
from nodes import pfllib

import posy
from posy.client_app.app import Call
from posy.client_app.base import PersonalClient
from posy.client_app.workspace import Workspace
from posy.commands.table import Cell
from posy.data.datasets import load_clients
from posy.data.errors import DataError
from posy.metrics import CLASSES, metrics_for
from posy.server_app import recorder as recorder_module
from posy.server_app.app import run
from posy.server_app.in_process import InProcessGrid
from posy.server_app.recorder import Recorder
from posy.settings import NothingTrainedError, RunError, SettingsError
from posy.storage import load_arrays
from posy.strategies.registry import defaults, read_settings

Config = dict[str, Any]
MakeConfig = Callable[..., Config]
PNG = b"\x89PNG\r\n\x1a\n"

SUMMARY_KEYS = {
    "method",
    "dataset",
    "num-clients",
    "rounds",
    "seed",
    "seconds",
    "bytes-up",
    "bytes-down",
    "served",
    "local",
    "system-accuracy",
    "dropped",
}
SPREAD_KEYS = {"round", "mean", "std", "min", "max", "tenth", "weighted", "jain", "clients", "missing"}


class Failing(InProcessGrid):
    """A grid on which some clients' nodes are lost from some round on."""

    def __init__(self, num_clients: int, *clients: int, since: int = 1) -> None:
        super().__init__(num_clients)
        self.clients, self.since = clients, since

    def _receive(self, message: Message) -> Message | Call:
        config = message.content.config_records["config"]
        if config.get("client") in self.clients and int(str(config["server-round"])) >= self.since:
            return Message(Error(9, "node lost"), reply_to=message)
        return super()._receive(message)


def execute(config: Config, grid: InProcessGrid | None = None) -> Recorder:
    return run(grid, config)


def only_run(config: Config) -> Path:
    (path,) = Path(config["output-dir"]).iterdir()
    return path


def summary_of(path: Path) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads((path / "summary.json").read_text())
    return summary


def rounds_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (path / "rounds.jsonl").read_text().splitlines()]


def clients_of(path: Path) -> list[dict[str, str]]:
    with (path / "clients.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def column(rows: list[dict[str, str]], server_round: int, name: str) -> dict[int, float]:
    return {int(r["partition"]): float(r[name]) for r in rows if int(r["round"]) == server_round and r[name] != ""}


# -- the results of a run --------------------------------------------------------------------------------


def test_a_run_writes_its_files(make_config: MakeConfig, tmp_path: Path, pictures: None) -> None:
    config = make_config("fedfew", system_accuracy="on", num_server_rounds=3, data_dir=str(tmp_path))
    path = execute(config).directory.path
    assert path == Path(config["output-dir"]) / config["run-name"]
    assert {p.name for p in path.iterdir()} == {
        "config.yaml",
        "rounds.jsonl",
        "clients.csv",
        "partition.csv",
        "summary.json",
        "models",
        "figures",
        "checkpoints",
    }
    assert {p.name for p in (path / "models").iterdir()} == {"server.safetensors"} | {
        f"{point}-{c}.safetensors" for point in ("client", "served") for c in range(4)
    }
    drawn = {p.name: p.read_bytes() for p in (path / "figures").iterdir()}
    assert {"partition.png", "accuracy.png", "loss.png", "clients.png", "objective.png", "models.png"} <= set(drawn)
    assert all(content.startswith(PNG) and len(content) > 1000 for content in drawn.values())

    written = yaml.safe_load((path / "config.yaml").read_text())
    assert written["settings"] == read_settings(config).as_config()
    assert set(defaults()) >= set(written["settings"])
    assert written["resolved"] == {"model": read_settings(config).train.model.replace("auto", "mlp"), "device": "cpu"}

    summary = summary_of(path)
    assert set(summary) >= SUMMARY_KEYS
    assert summary["status"] == "completed"
    assert (summary["method"], summary["num-clients"], summary["rounds"], summary["seed"]) == ("fedfew", 4, 3, 42)
    assert summary["dataset"] == config["dataset"]
    assert summary["seconds"] > 0
    assert summary["dropped"] == {}
    assert 0 <= summary["system-accuracy"] <= 1
    for point in ("served", "local"):
        assert set(summary[point]) == {"last", "best", "upper-bound"}
        assert set(summary[point]["last"]) == set(summary[point]["upper-bound"]) == SPREAD_KEYS


def test_the_partition_supplied_with_the_data_is_recorded(make_config: MakeConfig, tmp_path: Path) -> None:
    root = pfllib(tmp_path / "p", np.eye(12, 6, dtype=np.float32), np.arange(12) % 3, 3)
    data = {"dataset": str(root), "partition": "dirichlet", "partition_file": "", "num_clients": 1}
    config = make_config("fedavg", num_server_rounds=1, **data)
    path = execute(config).directory.path
    assert yaml.safe_load((path / "config.yaml").read_text())["settings"]["partition"] == "given"
    assert Cell("", "FedAvg", 0, config).summary() is not None  # a table does not run it again


def test_the_files_of_a_run_are_consistent(make_config: MakeConfig) -> None:
    path = execute(make_config("fedfew", num_server_rounds=4, all_metrics="last")).directory.path
    summary, rounds, rows = summary_of(path), rounds_of(path), clients_of(path)
    assert [r["round"] for r in rounds] == [1, 2, 3, 4]
    others = [metric.name.replace("-", "_") for metric in metrics_for(CLASSES, 10) if metric.name != "accuracy"]
    assert list(rows[0]) == [
        *("round", "partition", "n_train", "n_test", "served_accuracy", "served_loss", "local_accuracy", "local_loss"),
        *(f"{point}_{name}" for point in ("served", "local") for name in others),
        *("train_loss", "chosen", "bytes_up", "bytes_down", "site"),
    ]
    assert [(int(r["round"]), int(r["partition"])) for r in rows] == [(n, c) for n in range(1, 5) for c in range(4)]
    assert {(int(r["n_train"]), int(r["n_test"])) for r in rows} == {(21, 9), (12, 6), (8, 4), (1, 0)}
    assert all(r["chosen"] in {"0", "1", "2"} for r in rows)
    for way in ("up", "down"):
        assert (
            summary[f"bytes-{way}"]
            == sum(r[f"bytes_{way}"] for r in rounds)
            == sum(int(r[f"bytes_{way}"]) for r in rows)
        )
    weights = {0: 21, 1: 12, 2: 8}  # client 3 has no test samples
    for point in ("served", "local"):
        means = []
        for n in range(1, 5):
            accuracies = column(rows, n, f"{point}_accuracy")
            assert set(accuracies) == set(weights)
            spread = rounds[n - 1][f"{point}_accuracy"]
            a = np.array([accuracies[c] for c in weights])
            w = np.array(list(weights.values()))
            assert spread["mean"] == pytest.approx(a.mean())
            assert spread["std"] == pytest.approx(a.std())
            assert (spread["min"], spread["max"]) == (a.min(), a.max())
            assert spread["weighted"] == pytest.approx((a * w).sum() / w.sum())
            assert spread["jain"] == pytest.approx(a.sum() ** 2 / (3 * (a**2).sum()))
            losses = column(rows, n, f"{point}_loss")
            assert rounds[n - 1][f"{point}_loss"]["mean"] == pytest.approx(np.mean(list(losses.values())))
            means.append(spread["mean"])
        assert summary[point]["last"] == {"round": 4, **rounds[3][f"{point}_accuracy"], "missing": 0}
        best = int(np.argmax(means))
        assert summary[point]["upper-bound"] == {"round": best + 1, **rounds[best][f"{point}_accuracy"], "missing": 0}
    for n in range(1, 5):
        trained = list(column(rows, n, "train_loss").values())
        assert rounds[n - 1]["train_loss"]["mean"] == pytest.approx(np.mean(trained))


def test_recorded_accuracies_match_the_stored_models(make_config: MakeConfig) -> None:
    config = make_config("fedavg")
    recorder = execute(config)
    path, workspace = recorder.directory.path, Workspace(read_settings(config))
    server = load_arrays(path / "models" / "server.safetensors")["model"]
    rows = clients_of(path)
    served, local = (column(rows, 3, f"{point}_accuracy") for point in ("served", "local"))
    for client in (0, 1, 2):
        data = workspace.client_data(client)
        stored = workspace.architecture.layout.flatten(load_arrays(path / "models" / f"client-{client}.safetensors"))
        for flat, recorded in ((server, served), (stored, local)):
            module = workspace.architecture.build().eval()
            module.load_state_dict(workspace.architecture.layout.views(torch.from_numpy(flat)))
            right = (module(data.x_test).argmax(1) == data.y_test).float().mean()
            assert recorded[client] == pytest.approx(float(right))


def test_skipped_evaluations_and_trainings_leave_empty_cells(make_config: MakeConfig) -> None:
    config = make_config("fedavg", evaluate_every=2, fraction_train=0.5, num_server_rounds=5)
    path = execute(config).directory.path
    rounds, rows = rounds_of(path), clients_of(path)
    for row in rounds:
        evaluated = row["round"] in (2, 4, 5)
        assert row["cohort"] == 2
        assert (row["served_accuracy"] is not None) is evaluated
        assert len(column(rows, row["round"], "train_loss")) == 2
        assert len(column(rows, row["round"], "served_accuracy")) == (3 if evaluated else 0)
        trained = set(column(rows, row["round"], "train_loss"))
        assert set(column(rows, row["round"], "local_accuracy")) == (trained - {3} if evaluated else set())
    assert summary_of(path)["served"]["last"]["round"] == 5


def test_a_method_without_a_served_model_records_none(make_config: MakeConfig) -> None:
    path = execute(make_config("local")).directory.path
    summary = summary_of(path)
    assert summary["served"] == {"last": None, "best": None, "upper-bound": None}
    assert summary["local"]["last"]["round"] == 3
    assert (summary["bytes-up"], summary["bytes-down"]) == (0, 0)
    assert all(row["served_accuracy"] == row["served_loss"] == "" for row in clients_of(path))


def test_a_run_without_stored_models_has_no_system_accuracy(
    make_config: MakeConfig, warnings: pytest.LogCaptureFixture
) -> None:
    path = execute(make_config("feddrm", save_models=False, num_server_rounds=1)).directory.path
    assert not list((path / "models").iterdir())
    assert summary_of(path)["system-accuracy"] is None
    assert "save-models = true" in warnings.text
    with pytest.raises(SettingsError, match=r"system-accuracy = 'on'.*save-models = true"):
        execute(make_config("fedavg", save_models=False, system_accuracy="on"))


def test_a_run_can_be_repeated_from_its_config(make_config: MakeConfig, tmp_path: Path) -> None:
    """The record also contains the settings from an experiment file."""
    experiment = tmp_path / "mine.yaml"
    experiment.write_text("batch-size: 3\n", encoding="utf-8")
    config = make_config("fedfew", num_server_rounds=2, experiment=str(experiment))
    del config["batch-size"]
    first = execute(config).directory.path
    again = execute({"experiment": str(first / "config.yaml")}).directory.path
    assert again != first
    assert read_settings({"experiment": str(again / "config.yaml")}).train.batch_size == 3
    before, after = (load_arrays(path / "models" / "server.safetensors") for path in (first, again))
    assert np.array_equal(before["models"], after["models"])


def test_a_second_run_of_the_same_name_gets_a_new_folder(make_config: MakeConfig) -> None:
    config = make_config("fedavg", run_name="mine", num_server_rounds=1)
    first = execute(config).directory.path
    before = {p: p.read_bytes() for p in first.rglob("*") if p.is_file()}
    assert [first.name, execute(config).directory.path.name] == ["mine", "mine-2"]
    assert {p: p.read_bytes() for p in first.rglob("*") if p.is_file()} == before


# -- the same run again ----------------------------------------------------------------------------------


def without_times(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if k != "seconds"} for row in rows]


def test_one_process_loads_the_data_once(make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = []

    def counted(*args: Any) -> Any:
        loaded.append(args)
        return load_clients(*args)

    monkeypatch.setattr("posy.client_app.workspace.load_clients", counted)
    execute(make_config("fedavg", num_server_rounds=2))
    assert len(loaded) == 1


@pytest.mark.parametrize("method", ["fedfew", "ppfe", "fedavg-ft"])
def test_the_same_seed_gives_the_same_results(method: str, make_config: MakeConfig) -> None:
    config = make_config(method, fraction_train=0.5, num_server_rounds=4, model="mlp", system_accuracy="on")
    paths = [execute(dict(config)).directory.path for _ in range(2)]
    assert without_times(rounds_of(paths[0])) == without_times(rounds_of(paths[1]))
    assert (paths[0] / "clients.csv").read_bytes() == (paths[1] / "clients.csv").read_bytes()
    models = [{p.name: load_arrays(p) for p in (path / "models").iterdir()} for path in paths]
    assert len(models[0]) == (5 if method == "fedavg-ft" else 9)  # the other methods use the served models too
    assert models[0].keys() == models[1].keys()
    for name, arrays in models[0].items():
        assert arrays.keys() == models[1][name].keys()
        assert all(np.array_equal(array, models[1][name][key]) for key, array in arrays.items())
    other = execute({**config, "seed": 43}).directory.path
    assert (other / "clients.csv").read_bytes() != (paths[0] / "clients.csv").read_bytes()


def test_results_do_not_depend_on_the_number_of_nodes(make_config: MakeConfig) -> None:
    """A node that hosts several clients keeps their states and their randomness apart."""
    config = make_config("ditto", fraction_train=0.75)
    reference = execute(dict(config), InProcessGrid(4)).directory.path
    for nodes in (1, 3):
        path = execute(dict(config), InProcessGrid(nodes)).directory.path
        assert (path / "clients.csv").read_bytes() == (reference / "clients.csv").read_bytes()


# -- runs that end early ---------------------------------------------------------------------------------


def interrupt_client(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    original = PersonalClient.local_round

    def local_round(self: PersonalClient, *args: Any) -> Any:
        if self.round == 3 and self.client == 1:
            raise error
        return (yield from original(self, *args))

    monkeypatch.setattr(PersonalClient, "local_round", local_round)


def interrupt_record(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    original = Recorder.finish_round

    def finish_round(self: Recorder, server_round: int, arrays: ArrayRecord) -> Any:
        if server_round == 3:
            raise error
        return original(self, server_round, arrays)

    monkeypatch.setattr(Recorder, "finish_round", finish_round)


@pytest.mark.parametrize(
    ("interrupt", "error", "status"),
    [
        (interrupt_client, KeyboardInterrupt(), "stopped"),
        (interrupt_record, KeyboardInterrupt(), "stopped"),
        (interrupt_record, SystemExit(1), "stopped"),
        (interrupt_record, RuntimeError("the disk is full"), "failed"),
    ],
    ids=["client, Ctrl-C", "record, Ctrl-C", "record, exit", "record, error"],
)
def test_a_run_that_ends_early_keeps_its_results(
    interrupt: Callable[..., None],
    error: BaseException,
    status: str,
    make_config: MakeConfig,
    monkeypatch: pytest.MonkeyPatch,
    pictures: None,
) -> None:
    config = make_config("fedavg", num_server_rounds=5)
    interrupt(monkeypatch, error)
    with pytest.raises(type(error)):
        execute(config)
    path = only_run(config)
    summary = summary_of(path)
    assert set(summary) >= SUMMARY_KEYS
    assert (summary["status"], summary["rounds"]) == (status, 2)
    assert summary["served"]["last"]["round"] == 2
    assert [r["round"] for r in rounds_of(path)] == [1, 2]
    assert {int(r["round"]) for r in clients_of(path)} == {1, 2}
    assert (path / "config.yaml").exists()
    assert load_arrays(path / "models" / "server.safetensors")["model"].ndim == 1
    drawn = {p.name for p in (path / "figures").iterdir()}
    assert {"partition.png", "accuracy.png", "loss.png", "clients.png"} <= drawn
    assert not [p for p in path.rglob("*") if p.name.startswith(".")]  # no half-written file


def test_an_error_of_a_client_drops_only_its_reply(make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupt_client(monkeypatch, torch.OutOfMemoryError("out of memory"))
    path = execute(make_config("fedavg", num_server_rounds=5)).directory.path
    summary = summary_of(path)
    assert summary["rounds"] == 5
    ((reason, count),) = summary["dropped"].items()
    assert count == 1
    assert "out of memory" in reason
    assert rounds_of(path)[2]["dropped"] == [{"client": 1, "reason": reason}]
    assert set(column(clients_of(path), 3, "train_loss")) == {0, 2, 3}


def test_the_files_are_complete_after_every_round(make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files are complete at any time at which the process may be killed."""
    rounds = []
    original = Recorder.finish_round

    def finish_round(self: Recorder, server_round: int, arrays: ArrayRecord) -> Any:
        original(self, server_round, arrays)
        summary = summary_of(self.directory.path)
        assert summary["status"] == "running"
        if server_round:
            assert summary["served"]["last"]["round"] == summary["rounds"] == server_round
            assert len(rounds_of(self.directory.path)) == server_round
            assert len(clients_of(self.directory.path)) == 4 * server_round
        rounds.append(server_round)

    monkeypatch.setattr(Recorder, "finish_round", finish_round)
    execute(make_config("fedavg"))
    assert rounds == [0, 1, 2, 3]


def test_an_error_in_a_figure_does_not_end_the_run(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, warnings: pytest.LogCaptureFixture, pictures: None
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise ValueError("no such colour")

    monkeypatch.setattr("posy.figures.client_scores", broken)
    path = execute(make_config("fedavg", num_server_rounds=1)).directory.path
    assert summary_of(path)["status"] == "completed"
    assert "no such colour" in warnings.text


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), KeyboardInterrupt()])
def test_an_error_after_the_last_round_leaves_a_summary(
    error: BaseException, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise error

    monkeypatch.setattr(recorder_module, "system_accuracy", broken)
    config = make_config("fedavg", num_server_rounds=2)
    with pytest.raises(type(error)):
        execute(config)
    summary = summary_of(only_run(config))
    assert (summary["status"], summary["rounds"]) == ("completed", 2)


# -- lost clients, divergence ----------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["fedavg", "feddrm", "ppfe"])
def test_lost_clients_are_skipped_and_counted(
    method: str, make_config: MakeConfig, warnings: pytest.LogCaptureFixture
) -> None:
    config = make_config(method, model="mlp", num_server_rounds=4, system_accuracy="on")
    path = execute(config, Failing(4, 1, since=3)).directory.path
    summary = summary_of(path)
    assert (summary["status"], summary["rounds"]) == ("completed", 4)
    assert summary["dropped"] == {"error 9: node lost": 4}  # two rounds, training and evaluation
    rows = clients_of(path)
    assert set(column(rows, 2, "served_accuracy")) == {0, 1, 2}
    assert set(column(rows, 4, "served_accuracy")) == {0, 2}
    # A vote works without client 1, but routing sends client 1 queries that only it could answer.
    assert (summary["system-accuracy"] is None) is (method == "feddrm")
    assert "models of clients [1] from the last round are missing" in warnings.text


def test_if_all_clients_diverge_the_model_is_unchanged_and_no_loss_recorded(make_config: MakeConfig) -> None:
    config = make_config("fedavg", lr=1e38)
    with pytest.raises(NothingTrainedError, match=r"no client.s training was accepted.* diverged"):
        execute(config)
    path = only_run(config)
    summary, rounds = summary_of(path), rounds_of(path)
    assert summary["status"] == "failed"
    assert sum(summary["dropped"].values()) == 12
    assert all("diverged" in reason for reason in summary["dropped"])
    assert summary["local"] == {"last": None, "best": None, "upper-bound": None}
    assert all(r["train_loss"] is None for r in rounds)
    workspace = Workspace(read_settings(config))
    server = load_arrays(path / "models" / "server.safetensors")["model"]
    assert np.array_equal(server, workspace.architecture.initial(42))
    assert len({r["served_accuracy"]["mean"] for r in rounds}) == 1


@pytest.mark.parametrize(
    ("method", "more", "status", "message"),
    [
        ("fedfew", {"fedfew_server_lr": 1e30}, "failed", "no client's evaluation was accepted"),
        (
            "fedavg",
            {"lr": 1e3},
            "diverged",
            "2 of the 4 clients .* did not send finite numbers; .*lr than 1000",
        ),
        ("fedavg", {"lr": 20.0}, "diverged", "mean loss was .* in the worst round"),
        ("fedavg", {"lr": 0.5}, "completed", ""),
    ],
)
def test_runs_without_reliable_results_are_marked(
    make_config: MakeConfig, method: str, more: dict[str, Any], status: str, message: str
) -> None:
    config = make_config(method, **more)
    if message:
        with pytest.raises(RunError, match=message):
            execute(config)
    else:
        execute(config)
    path = only_run(config)
    assert summary_of(path)["status"] == status
    assert len(rounds_of(path)) == 3
    assert (path / "models" / "server.safetensors").exists()


@pytest.mark.parametrize(
    ("settings", "rounds", "cause"),
    [
        (
            {"dp": "local", "dp_clip": 1.0, "dp_epsilon": 1e-30, "dp_delta": 1e-40, "dp_scores": "exact"},
            (2, 3),
            "noise of dp-clip = 1 and dp-epsilon = 1e-30 may be the cause; a larger dp-epsilon, a smaller dp-clip or a "
            "smaller lr than 0.05 may help",
        ),
        ({"lr": 1e38}, (1, 2, 3), "smaller lr than 1e+38"),
    ],
    ids=["noise", "learning rate"],
)
def test_a_divergence_is_reported_once_with_its_cause(
    make_config: MakeConfig,
    warnings: pytest.LogCaptureFixture,
    settings: dict[str, Any],
    rounds: tuple[int, ...],
    cause: str,
) -> None:
    with pytest.raises(RunError, match=re.escape(cause)):
        execute(make_config("fedavg", **settings))
    records = {id(record): record.getMessage() for record in warnings.records}  # the fixture lists a record twice
    assert not [message for message in records.values() if "TrainingDivergedError" in message]
    diverged = [message for message in records.values() if "training diverged" in message]
    assert [re.findall(r"round (\d)", line) for line in diverged] == [[str(number)] for number in rounds]
    assert all(cause in line for line in diverged)


def test_round_timeouts_are_recorded(make_config: MakeConfig) -> None:
    config = make_config("fedavg", round_timeout=1e-9, num_server_rounds=2)
    with pytest.raises(NothingTrainedError, match="no reply within round-timeout = 1e-09 s"):
        execute(config)
    summary = summary_of(only_run(config))
    assert summary["status"] == "failed"
    assert summary["dropped"] == {"no reply within round-timeout = 1e-09 s": 16}
    assert summary["served"]["last"] is None


# -- system accuracy -------------------------------------------------------------------------------------


def pooled(workspace: Workspace, split: str = "test") -> tuple[torch.Tensor, np.ndarray]:
    clients = [workspace.client_data(c) for c in range(4)]
    return torch.cat([c.x_test for c in clients]), torch.cat([c.y_test for c in clients]).numpy()


@pytest.mark.parametrize(
    ("method", "voters"),
    [
        ("local", (0, 1, 2, 3)),
        ("fedavg", (0, 1, 2, 3)),
        ("fedfew", (0, 1, 2, 3)),
        ("ditto", (0, 1, 2, 3)),
        ("local", (2, 3)),
    ],  # lost clients have no vote, although they stored models
)
def test_system_accuracy_is_a_majority_vote_of_the_stored_models(
    method: str, voters: tuple[int, ...], make_config: MakeConfig
) -> None:
    config = make_config(method, system_accuracy="on", lr=0.3)
    path = execute(config, Failing(4, *({0, 1} - set(voters)), since=2)).directory.path
    workspace = Workspace(read_settings(config))
    x, y = pooled(workspace)
    assert len(y) == 19
    votes = []
    for client in voters:
        arrays = load_arrays(path / "models" / f"client-{client}.safetensors")
        module = workspace.architecture.build().eval()
        module.load_state_dict({name: torch.from_numpy(array) for name, array in arrays.items()})
        votes.append(module(x).argmax(1).tolist())
    right = 0
    for sample, label in enumerate(y):
        count = [sum(vote[sample] == c for vote in votes) for c in range(3)]
        right += count.index(max(count)) == label  # ties go to the lowest class
    assert summary_of(path)["system-accuracy"] == pytest.approx(right / len(y))


def test_ensembles_with_zero_coefficients_have_equal_weights(make_config: MakeConfig, tmp_path: Path) -> None:
    """If all coefficients are 0, the members have equal weights and do not all answer class 0."""
    from posy.server_app.system import stored_probabilities

    workspace = Workspace(read_settings(make_config("ppfe", model="linear")))
    architecture = workspace.architecture
    x, y = pooled(workspace)
    flats = [architecture.initial(seed) for seed in (1, 2)]
    arrays: dict[str, np.ndarray] = {}
    for number, flat in enumerate(flats, start=1):
        arrays |= {f"stage{number}.{name}": array for name, array in architecture.layout.views(flat).items()}
        arrays[f"stage{number}.coefficient"] = np.zeros(1, np.float32)
    outputs = []
    for flat in flats:
        module = architecture.build().eval()
        module.load_state_dict(architecture.layout.views(torch.from_numpy(flat)))
        outputs.append(module(x).softmax(1).detach())
    predicted = stored_probabilities(workspace, architecture, arrays, x, torch.from_numpy(y)).argmax(-1).cpu().numpy()
    assert np.array_equal(predicted, (outputs[0] + outputs[1]).argmax(1).numpy())
    assert len(set(predicted.tolist())) > 1
    arrays["stage2.coefficient"] = np.array([3.0], np.float32)
    arrays["stage1.coefficient"] = np.array([-1.0], np.float32)
    weighted = stored_probabilities(workspace, architecture, arrays, x, torch.from_numpy(y))
    assert torch.equal(weighted.argmax(1), (3 * outputs[1] - outputs[0]).argmax(1))


def test_feddrms_system_accuracy_by_hand(make_config: MakeConfig) -> None:
    config = make_config("feddrm", model="mlp", lr=0.3)
    recorder = execute(config)
    path, workspace = recorder.directory.path, Workspace(read_settings(config))
    x, y = pooled(workspace)
    architecture = recorder.strategy.architecture
    sizes = torch.tensor([21.0, 12.0, 8.0, 1.0])
    modules = []
    for client in range(4):
        arrays = load_arrays(path / "models" / f"client-{client}.safetensors")
        shared = load_arrays(path / "models" / "server.safetensors")["model"]
        flat = architecture.layout.flatten(arrays)
        architecture.layout.without(["head"]).put(flat, shared)
        module = architecture.build().eval()
        module.load_state_dict(architecture.layout.views(torch.from_numpy(flat)))
        modules.append(module)
    routed = (modules[0](x)[1] - torch.log(sizes / sizes.sum())).argmax(1).tolist()
    right = [int(modules[client](x[i : i + 1])[0].argmax()) == y[i] for i, client in enumerate(routed)]
    assert summary_of(path)["system-accuracy"] == pytest.approx(np.mean(right))
    owners = [0] * 9 + [1] * 6 + [2] * 4
    correct = [client == owner for client, owner in zip(routed, owners, strict=True)]
    assert summary_of(path)["routing-accuracy"] == pytest.approx(np.mean(correct))


def test_system_accuracy_is_absent_by_default_and_if_off(make_config: MakeConfig) -> None:
    assert summary_of(execute(make_config("fedavg", num_server_rounds=1)).directory.path)["system-accuracy"] is None
    config = make_config("feddrm", model="mlp", num_server_rounds=1, system_accuracy="off")
    assert summary_of(execute(config).directory.path)["system-accuracy"] is None


# -- bad data --------------------------------------------------------------------------------------------


def assert_refused(config: Config, kind: type[Exception], *parts: str) -> None:
    with pytest.raises(kind) as raised:
        execute(config)
    for part in parts:
        assert part in str(raised.value)
    assert not Path(config["output-dir"]).exists()


Tiny = tuple[np.ndarray, np.ndarray, Any, Any]


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_non_finite_value_is_refused(value: float, make_config: MakeConfig, tiny: Tiny) -> None:
    x, y, train, test = tiny
    x = x.copy()
    x[30, 2] = value
    config = make_config("fedavg", data=(x, y, train, test))
    assert_refused(config, DataError, config["dataset"], "(30, 2)", "only finite float32 numbers")


def test_a_truncated_file_is_refused(make_config: MakeConfig) -> None:
    config = make_config("fedavg")
    path = Path(config["dataset"])
    path.write_bytes(path.read_bytes()[:-200])
    assert_refused(config, DataError, str(path), "not a complete .npz file")


def test_labels_that_are_not_whole_numbers_are_refused(make_config: MakeConfig, tiny: Tiny) -> None:
    x, y, train, test = tiny
    for value, text in ((np.nan, "nan"), (1.5, "1.5")):
        labels = y.astype(np.float64)
        labels[4] = value
        assert_refused(make_config("fedavg", data=(x, labels, train, test)), DataError, f"label {text} at index 4")


def test_an_out_of_range_label_of_a_published_data_set_is_refused(make_config: MakeConfig, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    pixels, labels = np.zeros((60, 28, 28), np.uint8), np.arange(60) % 10
    labels[7] = 10
    np.savez(
        tmp_path / "data" / "mnist.npz",
        x_train=pixels[:40],
        y_train=labels[:40],
        x_test=pixels[40:],
        y_test=labels[40:],
    )
    config = make_config("fedavg", dataset="mnist", data_dir=str(tmp_path / "data"), partition="iid", download=False)
    assert_refused(config, DataError, "label 10 at index 7", "0 to 9")


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (lambda parts: parts["train"][2].clear(), ("client 2", "no training sample")),
        (lambda parts: parts["train"][2].append(61), ("61", "0 to 60")),
        (lambda parts: parts["train"][2].append(-1), ("-1",)),
        (lambda parts: parts["train"][1].append(parts["test"][1][0]), ("client 1", "twice")),
        (lambda parts: parts["train"].pop(), ("num-clients = 4", "3 clients")),
    ],
    ids=["empty client", "index too large", "negative index", "test sample in training", "client missing"],
)
def test_an_invalid_partition_file_is_refused(
    change: Callable[[dict[str, Any]], Any], parts: tuple[str, ...], make_config: MakeConfig
) -> None:
    config = make_config("fedavg")
    path = Path(config["partition-file"])
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    with pytest.raises((DataError, SettingsError)) as raised:
        execute(config)
    assert all(part in str(raised.value) for part in parts)
    assert not Path(config["output-dir"]).exists()


def test_clients_with_one_class_or_one_sample_take_part(make_config: MakeConfig) -> None:
    """Client 2 has one class, client 3 a single sample and no test."""
    path = execute(make_config("cwfedavg", num_server_rounds=5, lr=0.1)).directory.path
    rows, summary = clients_of(path), summary_of(path)
    assert summary["dropped"] == {}
    for server_round in range(1, 6):
        assert set(column(rows, server_round, "train_loss")) == {0, 1, 2, 3}
        assert set(column(rows, server_round, "local_accuracy")) == {0, 1, 2}
    assert column(rows, 5, "local_accuracy")[2] == 1.0


def test_the_in_process_engine_needs_no_nodes(make_config: MakeConfig) -> None:
    path = run(None, make_config("fedavg", num_server_rounds=1)).directory.path
    assert summary_of(path)["status"] == "completed"


def test_the_run_config_of_the_caller_is_not_modified(make_config: MakeConfig) -> None:
    config: Mapping[str, Any] = make_config("fedavg", num_server_rounds=1)
    before = dict(config)
    execute(dict(config))
    assert config == before


def test_a_run_from_python(tmp_path: Path) -> None:
    done = posy.run(method="fedprox", fedprox_mu=0.1, model="linear", num_server_rounds=2, output_dir=str(tmp_path))
    assert (done.summary["method"], done.summary["rounds"], done.settings["fedprox-mu"]) == ("fedprox", 2, 0.1)
    assert done.path.parent == tmp_path
    with pytest.raises(SettingsError, match="did you mean num-clients"):
        posy.run(num_client=3)
