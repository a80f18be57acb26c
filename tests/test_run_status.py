"""The status that a run records for `posy status`, with the real ClientApp behind every node."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import httpx
import pytest
from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from flwr.proto.node_pb2 import NodeInfo
from flwr.supercore.retry import RetryState, make_simple_http_retry_invoker
from nodes import NodeGrid

from posy.commands.deploy.control import Run
from posy.commands.deploy.status import show
from posy.flower import CLOCK_SECONDS, versions
from posy.server_app.app import run
from posy.server_app.delivery import PollingGrid
from posy.server_app.run_status import RunStatus, WatchedGrid, read_statuses

NODES = tuple({"partition-id": i, "num-partitions": 4} for i in range(4))


class Watched(NodeGrid):
    """Grid that reads the status file after messages are sent and before they are answered."""

    def __init__(self, path: Path, lose: tuple[str, int] = ("", 0)) -> None:
        super().__init__(*NODES)
        self.path, self.lose = path, lose
        self.snapshots: list[dict[str, Any]] = []

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        if self.path.exists():
            self.snapshots.append(json.loads(self.path.read_text()))
        return super().pull_messages(message_ids)


@pytest.fixture
def write_immediately(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("posy.server_app.run_status.WRITE_SECONDS", -1.0)


@pytest.mark.usefixtures("write_immediately")
def test_the_status_shows_what_a_run_waits_for_and_what_its_nodes_do(
    make_config: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    path = tmp_path / "flower/posy-runs/7.json"
    grid = Watched(path)
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("FLWR_HOME", str(tmp_path / "flower"))
        status = RunStatus.of_run(7)
    recorder = run(grid, make_config("fedavg", num_server_rounds=2, round_timeout=100), status=status)
    waited = [snapshot["waits"] for snapshot in grid.snapshots if snapshot["waits"]]
    phases = list(dict.fromkeys(waits["for"] for waits in waited))
    assert phases[-4:] == [
        "4 of 4 clients to train in round 1",
        "4 of 4 clients to evaluate in round 1",
        "4 of 4 clients to train in round 2",
        "4 of 4 clients to evaluate in round 2",
    ]
    assert all(90 < waits["until"] - waits["since"] <= 101 for waits in waited if "clients to" in waits["for"])
    training = next(
        snapshot
        for snapshot in grid.snapshots
        if snapshot["waits"] and "to train in round 2" in snapshot["waits"]["for"]
    )
    assert (training["round"], training["rounds"], training["dropped"]) == (1, 2, 0)
    assert training["nodes"]["1"]["does"] == "trains in round 2"
    assert training["nodes"]["1"]["versions"] == {name: str(version) for name, version in versions().items()}
    assert training["nodes"]["1"]["clients"] == [0]
    assert abs(training["nodes"]["1"]["clock"]) < 5
    status.close()
    [(number, last)] = read_statuses(tmp_path / "flower").items()
    assert (number, last["round"], last["waits"]) == ("7", 2, None)
    assert not any("does" in node for node in last["nodes"].values())
    assert last["results"] == str(recorder.directory.path)
    assert last["method"] == "fedavg"  # `posy status` shows it for a resumed run, whose submission need not name it


@pytest.mark.usefixtures("write_immediately")
def test_the_status_shows_a_wait_for_nodes(make_config: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    class Late(Watched):
        looks = 0

        def get_nodes(self) -> Iterable[NodeInfo]:
            self.looks += 1
            if self.looks == 5:
                self.connect(4, NODES[3])
            return super().get_nodes()

    path = tmp_path / "7.json"
    grid = Late(path)
    grid.leave(4)
    run(grid, make_config("fedavg", num_server_rounds=1, join_timeout=100), status=RunStatus(path))
    [waits] = {
        json.dumps(snapshot["waits"]): snapshot["waits"]
        for snapshot in grid.snapshots
        if "nodes" in str(snapshot["waits"])
    }.values()
    assert waits["for"] == "nodes: 3 of 4 clients are present"
    assert waits["until"] - waits["since"] == pytest.approx(100)


def ask(node: int, server_round: int, client: int = 0, kind: str = MessageType.TRAIN) -> Message:
    config = ConfigRecord({"client": client})
    lifetime = 50 + CLOCK_SECONDS
    return Message(RecordDict({"config": config}), node, kind, ttl=lifetime, group_id=str(server_round))


def test_repeated_messages_are_counted_and_either_answer_is_accepted() -> None:
    NodeGrid()
    status = RunStatus()
    messages = [ask(1, 3), ask(2, 3), ask(2, 3, client=1)]
    status.sent(messages, ["a", "b", ""])  # the SuperLink refused the third message
    status.sent([ask(1, 3)], ["copy"])
    facts = status.as_json()
    assert (facts["sent-again"], facts["waits"]["for"]) == (1, "2 of 2 clients to train in round 3")
    answer = Message(RecordDict(), reply_to=messages[0])
    answer.metadata.__dict__["_reply_to_message_id"] = "a"
    status.answered([answer])
    facts = status.as_json()
    assert (facts["waits"]["for"], set(facts["nodes"])) == ("1 of 2 clients to train in round 3", {"2"})
    status.sent([ask(1, 4), ask(3, 4)], ["d", "e"])  # the next round begins without an answer from node 2
    facts = status.as_json()
    assert (facts["sent-again"], facts["waits"]["for"]) == (1, "2 of 2 clients to train in round 4")
    assert facts["nodes"]["2"]["does"] == "trains in round 3"


@pytest.mark.parametrize(("written", "clock_error"), [(1000.0, 0.0), (1030.0, 0.0), (1130.0, 100.0), (900.0, -100.0)])
def test_an_answer_reveals_the_clock_error_of_its_node(
    written: float, clock_error: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The question leaves at 1000 and the answer arrives at 1030. An answer from that interval shows no clock error."""
    NodeGrid()
    status = RunStatus()
    question = ask(1, 0, kind=MessageType.QUERY)
    answer = Message(RecordDict(), reply_to=question)
    answer.metadata.__dict__["_reply_to_message_id"] = "q"
    answer.metadata.created_at = written
    clock = iter([1000.0, *[1030.0] * 9])
    monkeypatch.setattr("posy.server_app.run_status.time.time", lambda: next(clock))
    status.sent([question], ["q"])
    status.answered([answer])
    assert status.as_json()["nodes"]["1"]["clock"] == clock_error
    assert status.as_json()["sent-again"] == 0


def test_the_versions_of_a_node_are_limited_in_length() -> None:
    status = RunStatus()
    status.node(1, [0], {"versions": ["flwr " + "9" * 10_000, *(f"x{i} 1" for i in range(1000))]})
    status.node(2, [1], {"versions": 5})
    nodes = status.as_json()["nodes"]
    assert len(json.dumps(nodes)) < 500
    assert nodes["2"]["versions"] == {}


def test_an_unwritable_status_file_does_not_end_the_run(tmp_path: Path, warnings: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    status = RunStatus(tmp_path / "file/7.json")
    status.close()
    assert "`posy status` does not show it" in warnings.text
    warnings.clear()
    status.close()
    assert not warnings.text  # Posy warns once


def test_a_watched_grid_still_counts_outages() -> None:
    grid = NodeGrid()
    vars(grid)["_retry_invoker"] = invoker = make_simple_http_retry_invoker()
    outages = PollingGrid(WatchedGrid(grid, RunStatus())).outages
    assert invoker.on_backoff is not None
    invoker.on_backoff(RetryState(print, (), {}, 1, 0.0, httpx.ConnectError("gone"), 0.1))
    assert outages.count == 1


def test_the_table_shows_the_method_of_a_resumed_run(capsys: pytest.CaptureFixture[str]) -> None:
    resumed = Run("7", {"resume": "one"}, "running", "2026-01-01 00:00:00", 1.0, "")
    show([resumed], [], {"7": {"round": 3, "rounds": 9, "method": "fedrep"}})
    line = next(line for line in capsys.readouterr().out.splitlines() if line.split()[:1] == ["7"])
    assert line.split()[:4] == ["7", "one", "fedrep", "running"]
