"""Mistakes in the code of a method: Posy reports their location and excludes no client for them."""

from collections.abc import Callable
from pathlib import Path
from textwrap import dedent
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Error, MetricRecord, RecordDict

from posy import mistakes
from posy.client_app.base import PersonalClient
from posy.client_app.training.work import TrainingDivergedError
from posy.client_app.workspace import Workspace
from posy.commands.cli import main
from posy.data.errors import DataError
from posy.extensions import load
from posy.forked import _portable
from posy.mistakes import MethodError, is_failure, method_error, place_of, raise_mistake, with_traceback
from posy.settings import SettingsError
from posy.strategies.base import PersonalisedStrategy
from posy.strategies.replies import BadReplyError, number_in, read_metrics

METHOD = '''
    """A method whose hooks fail."""

    from posy.client_app.base import PersonalClient
    from posy.strategies.base import PersonalisedStrategy
    from posy.strategies.settings import MethodSettings


    class MineSettings(MethodSettings):
        """Settings of the method."""


    class MineClient(PersonalClient):
        """The client."""

        def work(self, start):
            """Return the training."""
            {client}
            return super().work(start)


    class Mine(PersonalisedStrategy):
        """The strategy."""

        def check(self, client, arrays):
            """Check a reply."""
            {check}
'''
HOOKS = ("serve", "returns", "trains_all", "train_config", "check", "aggregate")


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("error", [AttributeError, KeyError, TypeError, ValueError, ZeroDivisionError])
def test_server_hook_exceptions_end_the_run(
    hook: str, error: type[Exception], make_config: Any, federate: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raise_error(*_: Any, **__: Any) -> None:
        raise error("a mistake")

    monkeypatch.setattr(PersonalisedStrategy, hook, raise_error)
    with pytest.raises(error, match="a mistake"):
        federate(make_config("fedavg", model="linear"))


@pytest.mark.parametrize("workers", [1, 2])
def test_client_hook_exceptions_end_the_run_with_a_traceback(
    workers: int, make_config: Any, federate: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raise_error(self: PersonalClient, start: torch.Tensor) -> Any:
        raise KeyError("a mistake")

    monkeypatch.setattr(Workspace, "workers", workers)
    monkeypatch.setattr(PersonalClient, "work", raise_error)
    with pytest.raises(KeyError) as raised:
        federate(make_config("fedavg", model="linear", stack="loop"))
    trace = "".join(mistakes.traceback.format_exception(raised.value))
    assert "test_mistakes.py" in trace
    assert "in raise_error" in trace
    assert raised.value.__notes__[-1].startswith("Client ")
    assert raised.value.__notes__[-1].endswith(" in round 1.")


@pytest.mark.parametrize("error", [TrainingDivergedError, SettingsError, OSError, MemoryError])
def test_client_failures_drop_the_reply(
    error: type[Exception], make_config: Any, federate: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = PersonalClient.work

    def work(self: PersonalClient, start: torch.Tensor) -> Any:
        if self.client == 1:
            raise error("no luck")
        return plain(self, start)

    monkeypatch.setattr(PersonalClient, "work", work)
    finished = federate(make_config("fedavg", model="linear"))
    assert all([client for client, _ in record.dropped] == [1] for record in finished.records)
    assert all("no luck" in reason for record in finished.records for _, reason in record.dropped)


def test_is_failure_excludes_mistakes() -> None:
    failures = (TrainingDivergedError(), DataError("x", "missing-value"), OSError(), MemoryError(), BadReplyError())
    assert all(map(is_failure, (*failures, torch.OutOfMemoryError())))
    assert not any(map(is_failure, (ValueError(), KeyError(), ArithmeticError(), RuntimeError(), MethodError())))


@pytest.mark.parametrize(("where", "line"), [("client", "work"), ("check", "check")])
def test_traceback_shows_the_line_of_a_custom_method(
    where: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    lines = {"client": "pass", "check": "pass"} | {where: "self.method.strenght"}
    (tmp_path / f"mine_{where}.py").write_text(dedent(METHOD).format(**lines))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(AttributeError, match="'MineSettings' object has no attribute 'strenght'") as raised:
        main(["run", f"method=mine_{where}.py:Mine", "num-clients=2", "num-server-rounds=1", "max-samples=100"])
    assert f"mine_{where}.py" in "".join(mistakes.traceback.format_exception(raised.value))
    assert "is excluded" not in capfd.readouterr().err
    assert place_of(raised.value).startswith(f"mine_{where}.py, line ") or raised.value.__notes__


def test_place_of_skips_library_code() -> None:
    def raised_by(function: Callable[[], Any]) -> Exception:
        try:
            function()
        except Exception as error:
            return error
        raise AssertionError("no exception")

    assert place_of(raised_by(lambda: np.linalg.inv(np.zeros((2, 2))))).startswith("tests/test_mistakes.py, line ")
    assert place_of(raised_by(lambda: number_in({}, "x"))).startswith("posy/strategies/replies.py, line ")
    assert place_of(ValueError()) == "an unknown place"


def test_place_of_hides_files_outside_the_bundle_on_request(tmp_path: Path) -> None:
    (tmp_path / "site_reader.py").write_text("def read():\n    raise ValueError\n")
    with pytest.raises(ValueError, match="") as raised:
        load(f"{tmp_path / 'site_reader.py'}:read", "dataset")()
    assert place_of(raised.value) == "site_reader.py, line 2"
    assert place_of(raised.value, outside=False).startswith("tests/test_mistakes.py, line ")


def test_unpicklable_exception_keeps_its_traceback() -> None:
    class LocalError(Exception):
        """An exception of a class that another process cannot import."""

    try:
        raise LocalError("a mistake")
    except LocalError as error:
        portable = _portable(error)
    assert repr(portable) == "RuntimeError(\"LocalError('a mistake')\")"
    assert "test_mistakes.py" in portable.__notes__[0]


def test_nodes_report_the_place_and_simulations_the_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        _ = {}["a mistake"]
    except KeyError as error:
        location = str(method_error(error))
        monkeypatch.setattr(mistakes, "of_simulation", lambda: True)
        trace = str(method_error(error))
        noted = with_traceback(error)
    assert location.startswith("KeyError at tests/test_mistakes.py, line ")
    assert "Traceback" not in location
    assert trace.startswith("Traceback")
    assert trace.endswith("KeyError: 'a mistake'\n")
    assert noted.__notes__[0].startswith("Traceback")


def test_client_tracebacks_end_only_simulated_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    reason = "<class 'posy.mistakes.MethodError'>:<'Traceback (most recent call last):\n  File x\nKeyError: 1\n'>"
    raise_mistake(3, Error(1, reason))  # a real node cannot end a run
    monkeypatch.setattr(mistakes, "in_simulation", lambda: True)
    raise_mistake(3, Error(1, "the training diverged"))
    with pytest.raises(MethodError, match=r"(?s)client 3\n.*KeyError: 1"):
        raise_mistake(3, Error(1, reason))


def test_metrics_must_be_finite_numbers() -> None:
    def content(**values: Any) -> RecordDict:
        return RecordDict({"metrics": MetricRecord(values)})

    assert read_metrics(content(a=1, b=0.5)) == {"a": 1, "b": 0.5}
    for value in (float("nan"), float("inf"), [1.0]):
        with pytest.raises(BadReplyError, match=r"a (=|is a list)"):
            read_metrics(content(a=value))
    with pytest.raises(BadReplyError, match="lacks the metric a"):
        number_in({}, "a")
