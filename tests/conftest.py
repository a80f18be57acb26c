"""Fixtures that all tests share: a tiny data set, settings and a federation in this process."""

import os
import signal

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("OMP_NUM_THREADS", "1")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell that starts the tests in the background makes them, and their runs, ignore Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)

import json
import logging
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Message, MetricRecord

from posy.client_app.app import Call
from posy.client_app.base import PersonalClient
from posy.client_app.registry import client_class
from posy.client_app.state import State
from posy.client_app.workspace import Workspace
from posy.commands import table
from posy.commands.warm import WarmProcess
from posy.server_app.federation import Federation
from posy.server_app.grids import WaveGrid
from posy.server_app.in_process import InProcessGrid
from posy.server_app.pictures import Pictures
from posy.strategies.base import PersonalisedStrategy
from posy.strategies.methods import METHODS, strategy_class
from posy.strategies.registry import read_settings, relevant_settings, without_effect
from posy.strategies.replies import ClientInfo, RoundRecord, Update

Parts = Sequence[Sequence[int]]
Config = dict[str, Any]
Key = tuple[str, int, int]

# The four clients of the tiny data set have three classes, two classes, one class and a single training sample.
TINY_CLASSES = ((0, 1, 2), (0, 1), (2,), (1,))
TINY_TRAIN = (21, 12, 8, 1)
TINY_TEST = (9, 6, 4, 0)


DRAWING = {name: getattr(Pictures, name) for name in ("draw", "draw_partition")}


@dataclass
class Finished:
    """A finished federation: its strategy, the record of each round, and the grid, which stores the clients' state."""

    strategy: PersonalisedStrategy
    records: list[RoundRecord]
    grid: InProcessGrid

    def column(self, name: str) -> list[dict[int, Any]]:
        """Return one column of the clients' results: per round, the value of each client that has one."""
        return [{c: row[name] for c, row in sorted(r.clients.items()) if name in row} for r in self.records]

    def kept(self, client: int) -> dict[str, np.ndarray]:
        """Return the arrays that a client stores on its node. Each node hosts one client."""
        version = self.strategy.exchange.states.versions.get(client)
        record = self.grid.contexts[client + 1].state.array_records.get(f"client-{client}/{version}")
        return {} if record is None else {name: array.numpy() for name, array in record.items()}


class FailingGrid(InProcessGrid):
    """A grid on which the nodes of some messages fail, and some nodes lose their state.

    A message is identified by (type, round, client).
    """

    def __init__(self, num_clients: int, fail: Collection[Key], forget: Collection[Key]) -> None:
        super().__init__(num_clients)
        self.fail, self.forget = fail, forget

    def _receive(self, message: Message) -> Message | Call:
        config = message.content.config_records["config"]
        key = (message.metadata.message_type, config.get("server-round"), config.get("client"))
        if key in self.fail:
            raise ConnectionError("the node has failed")
        if key in self.forget:
            self.contexts[message.metadata.dst_node_id].state.clear()
        return super()._receive(message)


REPRESENTATIVE = {
    *("fedfew", "cwfedavg", "fedacs", "feddrm", "ppfe", "local", "fedavg", "fedrep", "ditto", "ifca", "apfl"),
    *("cfl", "scaffold", "fedproto", "pfedfda", "fedbn"),
}
"""Methods that differ in the parts of Posy that they use."""
GENERAL = {
    f"test_{name}"
    for name in (
        *("client_weights", "engine", "fixed_tensors", "hostile_methods", "hostile_settings", "kept_optimiser"),
        *("method_settings", "methods", "newcomers", "own_loss", "poisoning", "predict", "private_training"),
        *("properties", "recompute", "resume", "run_metrics", "secure_aggregation", "weights"),
    )
}
"""Modules that test a general part of Posy with every method."""
EVERY_METHOD = {"test_training_lowers_the_loss"}
"""Tests in these modules that CI runs with every method."""
FEW = {"fedfew", "cwfedavg", "fedacs", "feddrm", "ppfe", "fedrep", "ditto", "scaffold"}
LONG = {
    f"test_{name}"
    for name in ("engine", "fixed_tensors", "kept_optimiser", "own_loss", "properties", "resume", "weights")
}
"""Modules whose tests take a second or more for each method, so CI runs them only with the methods in ``FEW``."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of a general part with further methods as slow."""
    for item in items:
        if isinstance(item, pytest.Function) and item.module.__name__ in GENERAL and hasattr(item, "callspec"):
            parameters = item.callspec.params
            method = parameters.get("method", getattr(parameters.get("case"), "method", None))
            chosen = FEW if item.module.__name__ in LONG else REPRESENTATIVE
            if method in METHODS and method not in chosen and item.originalname not in EVERY_METHOD:
                item.add_marker(pytest.mark.slow)


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Return two workers for all federation tests, else one more than the number of cores.

    A worker takes a gigabyte. Tests of real processes mostly wait, so one worker more than cores is efficient.
    """
    if config.option.markexpr == "federation":
        return 2
    return min(len(os.sched_getaffinity(0)) + 1, 8)


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def one_process() -> Iterator[None]:
    """Train in one process: to fork takes longer than the training of a tiny client."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Workspace, "workers", 1)
        yield


class RunHere:
    """A run of a table, tuning or paper in this process, with the interface of a ``WarmProcess``."""

    def __init__(self, target: Callable[..., int], *arguments: Any, log: Path, cores: int) -> None:
        with log.open("w", encoding="utf-8") as file, redirect_stdout(file), redirect_stderr(file):
            try:
                self._status = target(*arguments)
            except Exception:
                traceback.print_exc()
                self._status = 1

    def poll(self) -> int:
        return self._status

    def terminate(self) -> None:
        """Do nothing, because the run has ended."""

    def wait(self) -> int:
        return self._status


@pytest.fixture(scope="session", autouse=True)
def runs_here() -> Iterator[None]:
    """Run the cells of tables in this process, which takes a fraction of the time of a new process."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(table, "WarmProcess", RunHere)
        yield


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the cells of tables in separate processes, as users do."""
    monkeypatch.setattr(table, "WarmProcess", WarmProcess)


@pytest.fixture(scope="session", autouse=True)
def no_pictures() -> Iterator[None]:
    """Draw no figures, because drawing takes longer than the runs."""
    with pytest.MonkeyPatch.context() as patched:
        for name in DRAWING:
            patched.setattr(Pictures, name, lambda self, *_, **__: None)
        yield


@pytest.fixture
def pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw the figures of the runs in this test."""
    for name, draw in DRAWING.items():
        monkeypatch.setattr(Pictures, name, draw)


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """Return the log records of Flower's logger, which pytest does not capture by default."""
    logger = logging.getLogger("flwr")
    logger.addHandler(caplog.handler)
    yield caplog
    logger.removeHandler(caplog.handler)


@pytest.fixture(scope="session")
def tiny() -> tuple[np.ndarray, np.ndarray, Parts, Parts]:
    """Return x, y, train and test indices of four clients of unequal size, with six features and three classes."""
    rng = np.random.default_rng(7)
    centres = rng.normal(0, 2, (3, 6))
    y, train, test = [], [], []
    for classes, n_train, n_test in zip(TINY_CLASSES, TINY_TRAIN, TINY_TEST, strict=True):
        start = len(y)
        y += [classes[i % len(classes)] for i in range(n_train + n_test)]
        train.append(list(range(start, start + n_train)))
        test.append(list(range(start + n_train, len(y))))
    labels = np.array(y)
    x = (centres[labels] + rng.normal(0, 1, (len(labels), 6))).astype(np.float32)
    return x, labels, train, test


@pytest.fixture
def make_config(tiny: tuple[np.ndarray, np.ndarray, Parts, Parts], tmp_path: Path) -> Callable[..., Config]:
    """Return a function that builds a run config from settings (keywords with underscores) and data.

    The data is x, y, and the train and test indices of each client."""
    number = 0

    def make(method: str, *, data: tuple[np.ndarray, np.ndarray, Parts, Parts] = tiny, **settings: Any) -> Config:
        nonlocal number
        number += 1
        x, y, train, test = data
        arrays, parts = tmp_path / f"data-{number}.npz", tmp_path / f"parts-{number}.json"
        np.savez(arrays, x_train=x, y_train=y)
        parts.write_text(json.dumps({"train": [list(p) for p in train], "test": [list(p) for p in test]}))
        defaults = {
            "method": method,
            "dataset": str(arrays),
            "partition": "file",
            "partition-file": str(parts),
            "num-clients": len(train),
            "num-server-rounds": 3,
            "batch-size": 8,
            "device": "cpu",
            "stack": "loop",
            "local-epochs": 1,
            "local-steps": 0,
            "lr": 0.05,
            "momentum": 0.0,
            "weight-decay": 0.0,
            "all-metrics": "none",
            "output-dir": str(tmp_path / "runs"),
            "run-name": f"run-{number}",
        }
        overrides = {key.replace("_", "-"): value for key, value in settings.items()}
        overrides = relevant_settings(overrides, method)  # a test of all methods may pass settings of several methods
        idle = without_effect(defaults | overrides).keys() - overrides.keys()
        return {key: value for key, value in defaults.items() if key not in idle} | overrides

    return make


@pytest.fixture
def federate() -> Callable[..., Finished]:
    """Return a function that runs a federation through Flower's messages, without the files of a run."""

    def run(
        config: Config,
        grid: Callable[[int], InProcessGrid] = InProcessGrid,
        prepare: Callable[[PersonalisedStrategy], None] = lambda strategy: None,
        models_folder: Path | None = None,
    ) -> Finished:
        settings = read_settings(config)
        strategy = strategy_class(settings.run.method)(settings, Workspace(settings).architecture)
        clients = grid(settings.data.num_clients)
        waves = WaveGrid(clients)
        federation = Federation(waves, settings)
        strategy.clients, strategy.exchange.refresh = federation.join(), federation.refresh
        strategy.exchange.models_folder = models_folder
        prepare(strategy)
        records: list[RoundRecord] = []

        def record_round(server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
            if server_round:
                records.append(strategy.record)
            return None

        try:
            strategy.start(
                grid=waves,
                initial_arrays=ArrayRecord(),
                num_rounds=settings.run.num_server_rounds,
                timeout=60.0,
                evaluate_fn=record_round,
            )
        finally:
            clients.end()
        return Finished(strategy, records, clients)

    return run


@pytest.fixture
def failing() -> Callable[..., Callable[[int], FailingGrid]]:
    """Return a function that builds a grid on which some nodes fail or lose their state."""

    def build(*fail: Key, forget: Collection[Key] = ()) -> Callable[[int], FailingGrid]:
        return lambda num_clients: FailingGrid(num_clients, fail, forget)

    return build


@pytest.fixture
def make_strategy(make_config: Callable[..., Config]) -> Callable[..., Any]:
    """Return a function that builds a strategy with its clients, before the first round."""

    def make(method: str, **settings: Any) -> Any:
        resolved = read_settings(make_config(method, **settings))
        workspace = Workspace(resolved)
        strategy = strategy_class(method)(resolved, workspace.architecture)
        parts = zip(workspace.partition.train, workspace.partition.test, strict=True)
        strategy.clients = {c: ClientInfo(c, c + 1, len(train), len(test)) for c, (train, test) in enumerate(parts)}
        return strategy

    return make


@pytest.fixture
def make_client(make_config: Callable[..., Config]) -> Callable[..., Any]:
    """Return a function that builds a client with an empty state."""

    def make(method: str, client: int = 0, **settings: Any) -> PersonalClient:
        workspace = Workspace(read_settings(make_config(method, **settings)))
        personal_client: PersonalClient = client_class(method)(client, workspace, State())
        return personal_client

    return make


@pytest.fixture
def update() -> Callable[..., Update]:
    """Return a function that builds a client's update as a strategy receives it."""

    def make(client: int, arrays: Mapping[str, Any], num_examples: int = 1, loss: float = 1.0) -> Update:
        received = {name: np.asarray(array, np.float32) for name, array in arrays.items()}
        return Update(received, loss, client=client, num_examples=num_examples)

    return make


@pytest.fixture
def gradient_of(softmax_regression: Callable[..., tuple[float, np.ndarray]]) -> Callable[..., np.ndarray]:
    """Return a function that computes the gradient of a client's training loss for the linear model."""

    def compute(client: PersonalClient, flat: np.ndarray) -> np.ndarray:
        return softmax_regression(flat, client.data.x_train.numpy(), client.data.y_train.numpy())[1]

    return compute


@pytest.fixture
def softmax_regression() -> Callable[..., tuple[float, np.ndarray]]:
    """Return a function that computes the loss and gradient of the model ``linear``.

    The gradient has the order of the flat vector: weights, then biases."""

    def evaluate(
        flat: np.ndarray, x: np.ndarray, y: np.ndarray, weight: np.ndarray | None = None
    ) -> tuple[float, np.ndarray]:
        n, features = x.shape
        classes = len(flat) // (features + 1)
        flat, x = flat.astype(np.float64), x.astype(np.float64)
        logits = x @ flat[: classes * features].reshape(classes, features).T + flat[classes * features :]
        p = np.exp(logits - logits.max(axis=1, keepdims=True))
        p /= p.sum(axis=1, keepdims=True)
        w = np.ones(n) if weight is None else weight.astype(np.float64)
        error = (p - np.eye(classes)[y]) * w[:, None] / n
        loss = float(-(w * np.log(p[np.arange(n), y])).mean())
        return loss, np.concatenate([(error.T @ x).ravel(), error.sum(axis=0)])

    return evaluate
