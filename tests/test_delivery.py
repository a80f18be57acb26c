"""Messages to real nodes: what is lost is sent again, what is slow is left in peace, and waiting ends."""

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import ClassVar

import httpx
import pytest
from flwr.app import ConfigRecord, Error, Message, MessageType, RecordDict
from flwr.common.constant import ErrorCode
from flwr.supercore.inflatable.inflatable_utils import ObjectPushError
from flwr.supercore.retry import RetryState, make_simple_http_retry_invoker
from nodes import NodeGrid

from posy.flower import PING, failure
from posy.server_app import delivery, pace
from posy.server_app.delivery import PollingGrid, Wait
from posy.server_app.pace import FIRST_MARGIN, FIRST_SECONDS, FLOOR_SECONDS, MARGIN, Pace
from posy.server_app.waiting import describe_wait

Order = Callable[[Message], bool]


class Line(NodeGrid):
    """A SuperLink and nodes that handle one message at a time, in the order of their creation, one each look.

    What ``loses`` admits never reaches its node, what ``loses_reply`` admits is answered in vain. A node in ``busy``
    handles the message it has begun only when it is no longer there.
    """

    def __init__(self, nodes: int) -> None:
        super().__init__(*({"partition-id": i, "num-partitions": nodes} for i in range(nodes)))
        self.queues: dict[int, list[Message]] = {node: [] for node in self.nodes}
        self.loses: Order = lambda message: False
        self.loses_reply: Order = lambda message: False
        self.busy: set[int] = set()
        self.worked: Counter[tuple[int, int]] = Counter()
        self.looks = 0
        self.then: dict[int, Callable[[], object]] = {}
        self._retry_invoker = make_simple_http_retry_invoker()

    def outage(self) -> None:
        """Let the grid see that nobody answered."""
        assert self._retry_invoker.on_backoff is not None
        error = httpx.ConnectError("refused")
        self._retry_invoker.on_backoff(RetryState(self.pull_messages, (), {}, 1, 0.5, error))

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        numbers = []
        for message in messages:
            numbers.append(f"{len(self.sent)}")
            message.metadata.__dict__["_message_id"] = numbers[-1]
            self.sent.append((message.metadata.message_type, message.metadata.dst_node_id))
            self.kept.append(message)
            if not self.loses(message):
                queue = self.queues[message.metadata.dst_node_id]
                queue.append(message)
                queue.sort(key=lambda m: m.metadata.created_at)
        return numbers

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        self.looks += 1
        self.then.get(self.looks, lambda: None)()
        for node, queue in self.queues.items():
            if queue and node not in self.busy and node in self.nodes:
                message = queue.pop(0)
                if not self.loses_reply(message):
                    self.replies[message.metadata.message_id] = self.answer(message)
        return super().pull_messages(message_ids)

    def answer(self, message: Message) -> Message:
        config = message.content.config_records["config"]
        if not config.get(PING):
            self.worked[message.metadata.dst_node_id, int(str(config["client"]))] += 1
        return Message(RecordDict({"config": ConfigRecord(dict(config))}), reply_to=message)

    def copies(self) -> list[int]:
        """Return the nodes that were sent a message again."""
        seen: set[tuple[int, object]] = set()
        again = []
        for message in self.kept:
            config = message.content.config_records["config"]
            key = message.metadata.dst_node_id, (config.get("client"), config.get("round"))
            if not config.get(PING) and key in seen:
                again.append(message.metadata.dst_node_id)
            seen.add(key)
        return again


def is_ping(message: Message) -> bool:
    return bool(message.content.config_records["config"].get(PING))


def works(*nodes: int, kind: str = MessageType.TRAIN, number: int = 1, ttl: float = 100.0) -> list[Message]:
    """Return a message for each node, for the client of the same number or, where one stands twice, further ones."""
    made: list[Message] = []
    for node in nodes:
        client = node + 100 * sum(m.metadata.dst_node_id == node for m in made)
        content = RecordDict({"config": ConfigRecord({"client": client, "round": number})})
        made.append(Message(content, node, kind, ttl=ttl, group_id=str(number)))
    return made


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace, "SILENT_SECONDS", 0.25)


def outcome(sent: list[Message], replies: Iterable[Message]) -> list[str]:
    """Return how each message fared: nothing for a reply, else the reason why there is none."""
    found = {reply.metadata.reply_to_message_id: reply for reply in replies}
    assert len(found) == len(sent)
    fared = [found[message.metadata.message_id] for message in sent]
    return [failure(reply.error) if reply.has_error() else "" for reply in fared]


# -- all is well -----------------------------------------------------------------------------------------


def test_a_node_gets_its_next_message_after_its_reply() -> None:
    line = Line(3)
    sent = works(1, 2, 1, 3, 1, 2)
    assert outcome(sent, PollingGrid(line).send_and_receive(sent)) == [""] * 6
    assert [node for _, node in line.sent] == [1, 2, 3, 1, 2, 1]
    assert set(line.worked.values()) == {1}


def test_sending_no_messages_returns_no_replies() -> None:
    assert list(PollingGrid(Line(1)).send_and_receive([])) == []


def test_failed_pushes_are_retried_as_new_messages() -> None:
    class Forgetful(Line):
        lost: ClassVar[list[list[float]]] = []

        def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
            messages = list(messages)
            if messages and len(self.lost) < 2:
                self.lost.append([message.metadata.created_at for message in messages])
                raise ObjectPushError("an object", 1, "a session")
            return super().push_messages(messages)

    grid, sent = Forgetful(2), works(1, 2)
    assert outcome(sent, PollingGrid(grid).send_and_receive(sent)) == ["", ""]
    times = [*grid.lost, [message.metadata.created_at for message in sent]]
    for one, two in pairwise(times):
        assert all(before < after for before, after in zip(one, two, strict=True))


def test_a_message_refused_by_the_superlink_is_an_error() -> None:
    class Refusing(Line):
        def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
            return ["" if m.metadata.dst_node_id == 2 else n for m, n in self.pushed(list(messages))]

        def pushed(self, messages: list[Message]) -> Iterable[tuple[Message, str]]:
            return zip(messages, super().push_messages(messages), strict=True)

    sent = works(1, 2)
    replies = PollingGrid(Refusing(2)).send_and_receive(sent)
    assert outcome(sent, replies) == ["", "the SuperLink refused its message"]


# -- lost or slow ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["the message", "the reply"])
def test_lost_messages_and_replies_are_resent_and_counted(what: str) -> None:
    line, lost = Line(3), deque([2])

    def loses(message: Message) -> bool:
        if not is_ping(message) and lost and message.metadata.dst_node_id == lost[0]:
            lost.popleft()
            return True
        return False

    setattr(line, "loses" if what == "the message" else "loses_reply", loses)
    grid, sent, started = PollingGrid(line), works(1, 2, 3), time.monotonic()
    assert outcome(sent, grid.send_and_receive(sent)) == ["", "", ""]
    assert time.monotonic() - started < 2.0
    assert line.copies() == [2]
    assert grid.counts == {"sent-again": 1}


def test_a_message_lost_every_time_is_abandoned() -> None:
    line = Line(2)
    line.loses = lambda message: message.metadata.dst_node_id == 2 and not is_ping(message)
    grid = PollingGrid(line)
    sent = works(1, 2)
    assert outcome(sent, grid.send_and_receive(sent)) == ["", "its message was lost every time"]
    assert line.copies() == [2] * delivery.COPIES


def test_a_slow_node_is_pinged_and_receives_no_copy() -> None:
    line, sent = Line(2), works(1, 2)
    line.busy = {2}
    line.then = {20: line.busy.clear}
    assert outcome(sent, PollingGrid(line).send_and_receive(sent)) == ["", ""]
    questions = [node for kind, node in line.sent if kind == MessageType.QUERY]
    assert set(questions) == {2}
    assert 2 <= len(questions) <= 4  # in a time in which a fixed interval would have asked eight times
    assert line.copies() == []
    assert set(line.worked.values()) == {1}


def test_a_lost_ping_is_repeated() -> None:
    line, sent, questions = Line(1), works(1), []

    def loses(message: Message) -> bool:
        if is_ping(message):
            questions.append(message)
            return len(questions) == 1
        return line.copies() == []

    line.loses = loses
    assert outcome(sent, PollingGrid(line).send_and_receive(sent)) == [""]
    assert len(questions) == 2


def test_pings_follow_their_message_after_a_clock_change() -> None:
    line, sent = Line(1), works(1)
    sent[0].metadata.created_at += 3600  # by what the clock was set back since
    line.busy = {1}
    line.then = {8: line.busy.clear}
    assert outcome(sent, PollingGrid(line).send_and_receive(sent)) == [""]
    assert line.copies() == []
    assert set(line.worked.values()) == {1}


def test_a_message_unavailable_error_triggers_a_copy() -> None:
    line, sent = Line(2), works(1, 2)
    line.loses = lambda message: message is sent[1]
    error = Error(ErrorCode.MESSAGE_UNAVAILABLE, "not found")
    line.then = {3: lambda: line.replies.update({"1": Message(error, reply_to=sent[1])})}
    assert outcome(sent, PollingGrid(line).send_and_receive(sent)) == ["", ""]
    assert line.copies() == [2]


def test_expired_messages_are_not_resent() -> None:
    line, sent = Line(1), works(1, ttl=1e-3)
    line.loses = lambda message: not is_ping(message)
    error = Error(ErrorCode.MESSAGE_UNAVAILABLE, "not found")
    line.then = {2: lambda: line.replies.update({"0": Message(error, reply_to=sent[0])})}
    lost = "its message or its reply was lost or came too late"
    assert outcome(sent, PollingGrid(line).send_and_receive(sent)) == [lost]


def test_simulated_nodes_are_not_pinged() -> None:
    line, sent = Line(1), works(1)
    line.busy = {1}
    line.then = {12: line.busy.clear}
    assert outcome(sent, PollingGrid(line, real=False).send_and_receive(sent)) == [""]
    assert len(line.sent) == 1


# -- the SuperLink was away ------------------------------------------------------------------------------


def test_after_an_outage_only_lost_messages_are_resent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pace, "SILENT_SECONDS", 60.0)
    line, sent = Line(3), works(1, 2, 3)
    line.busy = {2}
    line.loses = lambda message: message is sent[0]
    line.then = {2: line.outage, 15: line.busy.clear}
    grid = PollingGrid(line)
    assert outcome(sent, grid.send_and_receive(sent, timeout=20)) == ["", "", ""]
    assert line.copies() == [1]
    assert set(line.worked.values()) == {1}


def test_a_slow_superlink_is_not_an_outage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace, "SILENT_SECONDS", 60.0)
    line, sent = Line(1), works(1)
    line.busy = {1}

    def slow() -> None:
        assert line._retry_invoker.on_backoff is not None
        line._retry_invoker.on_backoff(RetryState(line.pull_messages, (), {}, 1, 0.5, httpx.ReadTimeout("slow")))

    line.then = {2: slow, 6: line.busy.clear}
    assert outcome(sent, PollingGrid(line).send_and_receive(sent)) == [""]
    assert len(line.sent) == 1


def test_nodes_may_return_after_an_outage(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has not told the new SuperLink yet that it is there; one that stays away is an error in the end."""
    monkeypatch.setattr(delivery, "RETURN_SECONDS", 1.0)
    line, sent = Line(3), works(1, 2, 3)
    line.loses = lambda message: message in sent[1:]
    away = {node: line.nodes[node] for node in (2, 3)}

    def restart() -> None:
        line.outage()
        for node in away:
            line.leave(node)
            error = Message(Error(ErrorCode.NODE_UNAVAILABLE, "gone"), reply_to=sent[node - 1])
            line.replies[sent[node - 1].metadata.message_id] = error

    line.then = {2: line.outage, 3: restart, 6: lambda: line.nodes.update({2: away[2]})}
    grid = PollingGrid(line)
    assert outcome(sent, grid.send_and_receive(sent)) == ["", "", "its node is gone"]
    assert line.copies() == [2]
    assert grid.gone == {3}


def test_an_unavailable_node_without_an_outage_is_dropped() -> None:
    line, sent = Line(2), works(1, 2)
    line.busy = {2}
    error = Error(ErrorCode.NODE_UNAVAILABLE, "gone")
    line.then = {3: lambda: line.replies.update({"1": Message(error, reply_to=sent[1])})}
    grid = PollingGrid(line)
    assert outcome(sent, grid.send_and_receive(sent)) == ["", "its node is gone"]
    assert grid.gone == {2}
    assert not grid.late


# -- when waiting ends -----------------------------------------------------------------------------------


def test_a_late_node_keeps_working_and_its_reply_is_counted() -> None:
    line = Line(2)
    line.busy = {2}
    grid, late = PollingGrid(line), "no reply within round-timeout = 0.4 s"
    sent = works(1, 2)
    assert outcome(sent, grid.send_and_receive(sent, timeout=0.4)) == ["", late]
    busy = "it was still busy with an earlier message"
    for number in (2, 3):
        sent, started = works(1, 2, number=number), time.monotonic()
        assert outcome(sent, grid.send_and_receive(sent, timeout=5.0)) == ["", busy]
        assert time.monotonic() - started < 0.3  # nothing waits for it
    line.busy.clear()
    sent = works(1, number=4)
    assert outcome(sent, grid.send_and_receive(sent)) == [""]
    sent = works(1, 2, number=5)
    assert outcome(sent, grid.send_and_receive(sent)) == ["", ""]
    assert grid.counts == {"late-replies": 1}
    assert line.worked == {(1, 1): 5, (2, 2): 2}


def test_the_next_phase_waits_if_all_nodes_are_late() -> None:
    line = Line(1)
    line.busy = {1}
    grid = PollingGrid(line)
    grid.send_and_receive(works(1), timeout=0.2)
    line.then = {line.looks + 5: line.busy.clear}
    sent = works(1, number=2)
    assert outcome(sent, grid.send_and_receive(sent)) == [""]
    assert grid.counts == {"late-replies": 1}


def test_a_lost_late_message_frees_its_node() -> None:
    line, first = Line(2), works(1, 2)
    line.loses = lambda message: message is first[1]
    grid = PollingGrid(line)
    grid.send_and_receive(first, timeout=0.1)
    assert set(grid.late) == {2}
    time.sleep(0.3)
    sent = works(1, number=2)
    assert outcome(sent, grid.send_and_receive(sent)) == [""]
    grid.send_and_receive([])
    assert not grid.late
    assert not grid.counts
    assert line.copies() == []


def test_grace_ends_training_after_enough_replies() -> None:
    line = Line(4)
    line.busy = {3, 4}
    line.then = {6: lambda: line.busy.discard(3)}
    grid = PollingGrid(line)
    grid.enough, grid.grace = 2, 1.2
    sent, started = works(1, 2, 3, 4), time.monotonic()
    assert outcome(sent, grid.send_and_receive(sent)) == [
        "",
        "",
        "",
        "no reply within grace = 1.2 s after 2 other clients",
    ]
    assert 1.2 <= time.monotonic() - started < 2.5


@pytest.mark.parametrize(("enough", "kind"), [(3, MessageType.TRAIN), (2, MessageType.EVALUATE)])
def test_grace_requires_enough_training_replies(enough: int, kind: str) -> None:
    line = Line(3)
    line.busy = {3}
    line.then = {10: line.busy.clear}
    grid = PollingGrid(line)
    grid.enough, grid.grace = enough, 0.1
    sent = works(1, 2, 3, kind=kind)
    assert outcome(sent, grid.send_and_receive(sent)) == ["", "", ""]


def test_automatic_limits_follow_past_reply_times() -> None:
    found = Pace(automatic=True)
    assert found.limit("train", 1) == math.inf
    found.note("train", 1, 10.0)
    found.note("train", 2, 100.0)
    found.note("train", 2, 1.0)  # the slowest counts
    assert found.limit("train", 1) == MARGIN * 100.0
    assert found.limit("train", 3) == FIRST_SECONDS
    assert found.limit("evaluate", 1) == math.inf
    found.note("evaluate", 1, 0.1)
    assert found.limit("evaluate", 1) == FLOOR_SECONDS
    found.note("train", 4, FIRST_SECONDS)
    assert found.limit("train", 3) == FIRST_MARGIN * FIRST_SECONDS
    assert Pace().limit("train", 1) == math.inf


def test_silence_threshold_is_twice_the_median(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace, "SILENT_SECONDS", 15.0)
    found = Pace()
    assert found.silence("train") == 15.0
    for node, seconds in enumerate((1.0, 20.0, 300.0)):
        found.note("train", node, seconds)
    assert found.silence("train") == 40.0


def test_automatic_limits_drop_late_nodes_and_adapt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pace, "FLOOR_SECONDS", 0.5)
    line = Line(2)
    grid = PollingGrid(line, Pace(automatic=True))
    sent = works(1, 2)
    assert outcome(sent, grid.send_and_receive(sent)) == ["", ""]
    line.busy = {2}
    sent = works(1, 2, number=2)
    assert outcome(sent, grid.send_and_receive(sent)) == ["", "no reply within 0.5 s (round-timeout = auto)"]
    time.sleep(0.6)
    line.busy.clear()
    sent = works(1, number=3)
    grid.send_and_receive(sent)
    line.busy = {2}
    line.then = {line.looks + 8: line.busy.clear}  # longer than the floor, and no longer than it has taken
    sent = works(2, number=4)
    assert outcome(sent, grid.send_and_receive(sent)) == [""]
    assert sent[0].metadata.ttl > 60.0 + 0.5


@pytest.mark.parametrize("timeout", [None, 0.6])
def test_blocked_polling_does_not_count_towards_timeouts(
    monkeypatch: pytest.MonkeyPatch, timeout: float | None
) -> None:
    """As when a part of one reply is missing: it is waited for before any other reply is looked for."""
    monkeypatch.setattr(pace, "FLOOR_SECONDS", 0.6)
    monkeypatch.setattr(delivery, "HELD_SECONDS", 0.5)
    line = Line(2)
    grid = PollingGrid(line, Pace(automatic=True))
    grid.send_and_receive(works(1, 2))
    line.busy = {1, 2}
    sent = works(1, 2, number=2)
    lost = Error(ErrorCode.MESSAGE_UNAVAILABLE, "objects are unavailable")

    def hold_up() -> None:
        time.sleep(0.8)
        line.busy.clear()
        line.queues[1].clear()
        line.replies[sent[0].metadata.message_id] = Message(lost, reply_to=sent[0])

    line.then = {line.looks + 1: hold_up}
    assert outcome(sent, grid.send_and_receive(sent, timeout=timeout)) == ["", ""]
    assert line.copies() == [1]


def test_a_phase_reports_the_nodes_it_waits_for() -> None:
    line, sent, waits = Line(2), works(1, 2), list[Wait]()
    line.busy = {2}
    line.then = {5: line.busy.clear}
    grid = PollingGrid(line)
    grid.on_wait = waits.append
    grid.send_and_receive(sent, timeout=30.0)
    assert [message.metadata.dst_node_id for message in waits[-1].messages] == [2]
    assert 29.0 < waits[0].remaining <= 30.0
    assert waits[-1].seconds > 0.3
    wait = Wait([sent[1]], 75.4, 44.9, 15.0)
    assert describe_wait(wait, {2: "site-c"}, 3) == (
        "site-c (client 2) is still busy (training, round 1) after 1 min 15 s; at most 45 s more"
    )
