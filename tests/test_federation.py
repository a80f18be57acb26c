"""Which node hosts which client, and messages that reach each node one after the other."""

import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest
from flwr.app import ConfigRecord, Error, Message, MessageType, RecordDict

from posy.config import Settings, resolve
from posy.settings import SettingsError
from server_app import federation
from server_app.federation import Federation, WaveGrid
from server_app.in_process import InProcessGrid

MakeConfig = Callable[..., dict[str, Any]]


class Noting(InProcessGrid):
    """A grid that writes down the waves it is sent and takes its time over each."""

    def __init__(self, num_clients: int, seconds: float = 0.0) -> None:
        super().__init__(num_clients)
        self.waves: list[list[int]] = []
        self.timeouts: list[float | None] = []
        self.seconds = seconds

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        messages = list(messages)
        self.waves.append([m.metadata.dst_node_id for m in messages])
        self.timeouts.append(timeout)
        time.sleep(self.seconds)
        return super().send_and_receive(messages)


def queries(settings_json: str, *nodes: int) -> list[Message]:
    content = (RecordDict({"config": ConfigRecord({"settings": settings_json})}) for _ in nodes)
    return [Message(c, node, MessageType.QUERY) for c, node in zip(content, nodes, strict=True)]


@pytest.fixture
def settings(make_config: MakeConfig) -> Settings:
    return resolve(make_config("fedavg"))


@pytest.fixture
def settings_json(settings: Settings) -> str:
    return settings.to_json()


# -- waves -----------------------------------------------------------------------------------------------


def test_a_node_has_one_message_at_a_time(settings_json: str) -> None:
    grid = Noting(3)
    sent = queries(settings_json, 1, 2, 1, 3, 1, 2)
    replies = list(WaveGrid(grid).send_and_receive(sent))
    assert grid.waves == [[1, 2, 3], [1, 2], [1]]
    assert sorted(r.metadata.reply_to_message_id for r in replies) == sorted(m.metadata.message_id for m in sent)
    assert not any(r.has_error() for r in replies)


def test_no_messages_no_waves(settings_json: str) -> None:
    grid = Noting(3)
    assert list(WaveGrid(grid).send_and_receive([])) == []
    assert grid.waves == []


def test_all_waves_share_the_time_and_what_is_left_over_is_not_sent(settings_json: str) -> None:
    grid = Noting(2, seconds=0.2)
    sent = queries(settings_json, 1, 1, 1, 2)
    replies = list(WaveGrid(grid).send_and_receive(sent, timeout=0.3))
    assert grid.waves == [[1, 2], [1]]
    assert len(replies) == 3
    assert grid.timeouts[0] == pytest.approx(0.3, abs=0.02)
    assert grid.timeouts[1] is not None
    assert 0 < grid.timeouts[1] < 0.11
    assert not sent[2].metadata.message_id  # by which the strategy knows it


def test_without_a_limit_every_wave_has_none(settings_json: str) -> None:
    grid = Noting(1)
    assert len(list(WaveGrid(grid).send_and_receive(queries(settings_json, 1, 1)))) == 2
    assert grid.timeouts == [None, None]


def test_the_rest_of_a_grid_is_passed_on(settings_json: str) -> None:
    waves = WaveGrid(InProcessGrid(2))
    assert list(waves.get_node_ids()) == [1, 2]
    ids = list(waves.push_messages(queries(settings_json, 1)))
    assert [r.metadata.reply_to_message_id for r in waves.pull_messages(ids)] == ids
    assert list(waves.pull_messages(ids)) == []


# -- the grid inside the process -------------------------------------------------------------------------


def test_what_a_client_raises_is_its_reply(settings_json: str) -> None:
    grid = InProcessGrid(1)
    broken = queries("{", 1)
    unknown = queries(settings_json, 9)
    for messages, reason in ((broken, "JSONDecodeError"), (unknown, "KeyError")):
        reply = next(iter(grid.send_and_receive(messages)))
        assert reply.has_error()
        assert reason in str(reply.error.reason)
        assert reply.metadata.reply_to_message_id == messages[0].metadata.message_id


def test_after_the_time_no_further_client_is_asked(settings_json: str) -> None:
    assert list(InProcessGrid(3).send_and_receive(queries(settings_json, 1, 2, 3), timeout=0.0)) == []
    assert len(list(InProcessGrid(3).send_and_receive(queries(settings_json, 1, 2, 3), timeout=60.0))) == 3


def test_an_interrupt_is_no_reply(settings_json: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> Message:
        raise KeyboardInterrupt

    monkeypatch.setattr("server_app.in_process.client_app", interrupted)
    with pytest.raises(KeyboardInterrupt):
        InProcessGrid(1).send_and_receive(queries(settings_json, 1))


# -- members ---------------------------------------------------------------------------------------------


class Nodes(InProcessGrid):
    """Fewer nodes than clients, some of which connect late."""

    def __init__(self, nodes: int, *later: Iterable[int]) -> None:
        super().__init__(nodes)
        self.seen = [list(ids) for ids in later]

    def get_node_ids(self) -> Iterable[int]:
        return self.seen.pop(0) if self.seen else super().get_node_ids()


@pytest.mark.parametrize(
    ("nodes", "hosts"), [(1, [1, 1, 1, 1]), (2, [1, 2, 1, 2]), (3, [1, 2, 3, 1]), (4, [1, 2, 3, 4]), (6, [1, 2, 3, 4])]
)
def test_clients_are_spread_over_the_nodes(nodes: int, hosts: list[int], settings: Settings) -> None:
    members = Federation(WaveGrid(InProcessGrid(nodes)), settings).join()
    assert list(members) == [0, 1, 2, 3]
    assert [m.node_id for m in members.values()] == hosts
    assert [m.client for m in members.values()] == [0, 1, 2, 3]
    assert [(m.num_train, m.num_test) for m in members.values()] == [(21, 9), (12, 6), (8, 4), (1, 0)]


def test_nodes_that_connect_late_are_waited_for(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(federation, "POLL_SECONDS", 0.01)
    members = Federation(WaveGrid(Nodes(3, [], [2], [2], [2, 3])), settings).join()
    assert [m.node_id for m in members.values()] == [1, 2, 3, 1]


def test_clients_that_never_appear_are_an_error(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(federation, "POLL_SECONDS", 0.01)
    grid = Nodes(3, *[[1, 2]] * 100)
    with pytest.raises(SettingsError, match=r"num-clients = 4, but the 2 connected nodes host 3 of them after 0\.05 s"):
        Federation(WaveGrid(grid), replace(settings, run=replace(settings.run, join_timeout=0.05))).join()


def test_a_node_that_cannot_serve_the_run_says_why(settings: Settings) -> None:
    class Broken(InProcessGrid):
        def _answer(self, message: Message) -> Message:
            if message.metadata.dst_node_id != 2:
                return super()._answer(message)
            return Message(Error(3, "no data set there"), reply_to=message)

    with pytest.raises(SettingsError, match="a node cannot serve this run: no data set there"):
        Federation(WaveGrid(Broken(4)), settings).join()
