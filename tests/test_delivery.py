"""Messages to real nodes: lost messages are resent, slow nodes receive no copies, and waiting ends."""

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


class SuperLink(NodeGrid):
    """A SuperLink and nodes that handle messages in the order of creation, one in each poll.

    A message for which ``loses`` is true never reaches its node. A reply for which ``loses_reply`` is true never
    returns. A node in ``busy`` handles no message.
    """

    def __init__(self, nodes: int) -> None:
        super().__init__(*({"partition-id": i, "num-partitions": nodes} for i in range(nodes)))
        self.queues: dict[int, list[Message]] = {node: [] for node in self.nodes}
        self.loses: Order = lambda message: False
        self.loses_reply: Order = lambda message: False
        self.busy: set[int] = set()
        self.handled: Counter[tuple[int, int]] = Counter()
        self.polls = 0
        self.actions: dict[int, Callable[[], object]] = {}
        self._retry_invoker = make_simple_http_retry_invoker()

    def outage(self) -> None:
        """Report a refused connection to the grid."""
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
        self.polls += 1
        self.actions.get(self.polls, lambda: None)()
        for node, queue in self.queues.items():
            if queue and node not in self.busy and node in self.nodes:
                message = queue.pop(0)
                if not self.loses_reply(message):
                    self.replies[message.metadata.message_id] = self.answer(message)
        return super().pull_messages(message_ids)

    def answer(self, message: Message) -> Message:
        config = message.content.config_records["config"]
        if not config.get(PING):
            self.handled[message.metadata.dst_node_id, int(str(config["client"]))] += 1
        return Message(RecordDict({"config": ConfigRecord(dict(config))}), reply_to=message)

    def copies(self) -> list[int]:
        """Return the nodes that received a copy of a message."""
        keys: set[tuple[int, object]] = set()
        nodes = []
        for message in self.kept:
            config = message.content.config_records["config"]
            key = message.metadata.dst_node_id, (config.get("client"), config.get("round"))
            if not config.get(PING) and key in keys:
                nodes.append(message.metadata.dst_node_id)
            keys.add(key)
        return nodes


def is_ping(message: Message) -> bool:
    return bool(message.content.config_records["config"].get(PING))


def messages_for(*nodes: int, kind: str = MessageType.TRAIN, number: int = 1, ttl: float = 100.0) -> list[Message]:
    """Return a message for each node, for the client with the node's number. A repeated node gets further clients."""
    messages: list[Message] = []
    for node in nodes:
        client = node + 100 * sum(m.metadata.dst_node_id == node for m in messages)
        content = RecordDict({"config": ConfigRecord({"client": client, "round": number})})
        messages.append(Message(content, node, kind, ttl=ttl, group_id=str(number)))
    return messages


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace, "SILENT_SECONDS", 0.25)


def outcome(sent: list[Message], replies: Iterable[Message]) -> list[str]:
    """Return the reason why each message has no reply, or an empty text if it has one."""
    replies_by_id = {reply.metadata.reply_to_message_id: reply for reply in replies}
    assert len(replies_by_id) == len(sent)
    ordered = [replies_by_id[message.metadata.message_id] for message in sent]
    return [failure(reply.error) if reply.has_error() else "" for reply in ordered]


# -- regular delivery ------------------------------------------------------------------------------------


def test_a_node_gets_its_next_message_after_its_reply() -> None:
    superlink = SuperLink(3)
    sent = messages_for(1, 2, 1, 3, 1, 2)
    assert outcome(sent, PollingGrid(superlink).send_and_receive(sent)) == [""] * 6
    assert [node for _, node in superlink.sent] == [1, 2, 3, 1, 2, 1]
    assert set(superlink.handled.values()) == {1}


def test_sending_no_messages_returns_no_replies() -> None:
    assert list(PollingGrid(SuperLink(1)).send_and_receive([])) == []


def test_failed_pushes_are_retried_as_new_messages() -> None:
    class FailingPush(SuperLink):
        failed: ClassVar[list[list[float]]] = []

        def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
            messages = list(messages)
            if messages and len(self.failed) < 2:
                self.failed.append([message.metadata.created_at for message in messages])
                raise ObjectPushError("an object", 1, "a session")
            return super().push_messages(messages)

    grid, sent = FailingPush(2), messages_for(1, 2)
    assert outcome(sent, PollingGrid(grid).send_and_receive(sent)) == ["", ""]
    times = [*grid.failed, [message.metadata.created_at for message in sent]]
    for first, second in pairwise(times):
        assert all(before < after for before, after in zip(first, second, strict=True))


def test_a_message_refused_by_the_superlink_is_an_error() -> None:
    class Refusing(SuperLink):
        def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
            return ["" if m.metadata.dst_node_id == 2 else n for m, n in self.pushed(list(messages))]

        def pushed(self, messages: list[Message]) -> Iterable[tuple[Message, str]]:
            return zip(messages, super().push_messages(messages), strict=True)

    sent = messages_for(1, 2)
    replies = PollingGrid(Refusing(2)).send_and_receive(sent)
    assert outcome(sent, replies) == ["", "the SuperLink refused its message"]


# -- lost messages and slow nodes ------------------------------------------------------------------------


@pytest.mark.parametrize("lost_part", ["message", "reply"])
def test_lost_messages_and_replies_are_resent_and_counted(lost_part: str) -> None:
    superlink, losing_nodes = SuperLink(3), deque([2])

    def loses(message: Message) -> bool:
        if not is_ping(message) and losing_nodes and message.metadata.dst_node_id == losing_nodes[0]:
            losing_nodes.popleft()
            return True
        return False

    setattr(superlink, "loses" if lost_part == "message" else "loses_reply", loses)
    grid, sent, started = PollingGrid(superlink), messages_for(1, 2, 3), time.monotonic()
    assert outcome(sent, grid.send_and_receive(sent)) == ["", "", ""]
    assert time.monotonic() - started < 10.0
    assert superlink.copies() == [2]
    assert grid.counts == {"sent-again": 1}


def test_a_message_lost_every_time_is_abandoned() -> None:
    superlink = SuperLink(2)
    superlink.loses = lambda message: message.metadata.dst_node_id == 2 and not is_ping(message)
    grid = PollingGrid(superlink)
    sent = messages_for(1, 2)
    assert outcome(sent, grid.send_and_receive(sent)) == ["", "its message was lost every time"]
    assert superlink.copies() == [2] * delivery.COPIES


def test_a_slow_node_is_pinged_and_receives_no_copy() -> None:
    superlink, sent = SuperLink(2), messages_for(1, 2)
    superlink.busy = {2}
    superlink.actions = {20: superlink.busy.clear}
    assert outcome(sent, PollingGrid(superlink).send_and_receive(sent)) == ["", ""]
    pings = [node for kind, node in superlink.sent if kind == MessageType.QUERY]
    assert set(pings) == {2}
    assert 2 <= len(pings) <= 4  # a fixed interval would give eight pings
    assert superlink.copies() == []
    assert set(superlink.handled.values()) == {1}


def test_a_lost_ping_is_repeated() -> None:
    superlink, sent, pings = SuperLink(1), messages_for(1), []

    def loses(message: Message) -> bool:
        if is_ping(message):
            pings.append(message)
            return len(pings) == 1
        return superlink.copies() == []

    superlink.loses = loses
    assert outcome(sent, PollingGrid(superlink).send_and_receive(sent)) == [""]
    assert len(pings) == 2


def test_pings_follow_their_message_after_a_clock_change() -> None:
    superlink, sent = SuperLink(1), messages_for(1)
    sent[0].metadata.created_at += 3600  # the clock was then set back by one hour
    superlink.busy = {1}
    superlink.actions = {8: superlink.busy.clear}
    assert outcome(sent, PollingGrid(superlink).send_and_receive(sent)) == [""]
    assert superlink.copies() == []
    assert set(superlink.handled.values()) == {1}


def test_a_message_unavailable_error_triggers_a_copy() -> None:
    superlink, sent = SuperLink(2), messages_for(1, 2)
    superlink.loses = lambda message: message is sent[1]
    error = Error(ErrorCode.MESSAGE_UNAVAILABLE, "not found")
    superlink.actions = {3: lambda: superlink.replies.update({"1": Message(error, reply_to=sent[1])})}
    assert outcome(sent, PollingGrid(superlink).send_and_receive(sent)) == ["", ""]
    assert superlink.copies() == [2]


def test_expired_messages_are_not_resent() -> None:
    superlink, sent = SuperLink(1), messages_for(1, ttl=1e-3)
    superlink.loses = lambda message: not is_ping(message)
    error = Error(ErrorCode.MESSAGE_UNAVAILABLE, "not found")
    superlink.actions = {2: lambda: superlink.replies.update({"0": Message(error, reply_to=sent[0])})}
    [reason] = outcome(sent, PollingGrid(superlink).send_and_receive(sent))
    assert "lost or arrived too late" in reason


def test_simulated_nodes_are_not_pinged() -> None:
    superlink, sent = SuperLink(1), messages_for(1)
    superlink.busy = {1}
    superlink.actions = {12: superlink.busy.clear}
    assert outcome(sent, PollingGrid(superlink, real=False).send_and_receive(sent)) == [""]
    assert len(superlink.sent) == 1


# -- outages of the SuperLink ----------------------------------------------------------------------------


def test_after_an_outage_only_lost_messages_are_resent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pace, "SILENT_SECONDS", 60.0)
    superlink, sent = SuperLink(3), messages_for(1, 2, 3)
    superlink.busy = {2}
    superlink.loses = lambda message: message is sent[0]
    superlink.actions = {2: superlink.outage, 15: superlink.busy.clear}
    grid = PollingGrid(superlink)
    assert outcome(sent, grid.send_and_receive(sent, timeout=20)) == ["", "", ""]
    assert superlink.copies() == [1]
    assert set(superlink.handled.values()) == {1}


def test_a_slow_superlink_is_not_an_outage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace, "SILENT_SECONDS", 60.0)
    superlink, sent = SuperLink(1), messages_for(1)
    superlink.busy = {1}

    def slow() -> None:
        assert superlink._retry_invoker.on_backoff is not None
        superlink._retry_invoker.on_backoff(
            RetryState(superlink.pull_messages, (), {}, 1, 0.5, httpx.ReadTimeout("slow"))
        )

    superlink.actions = {2: slow, 6: superlink.busy.clear}
    assert outcome(sent, PollingGrid(superlink).send_and_receive(sent)) == [""]
    assert len(superlink.sent) == 1


def test_nodes_may_return_after_an_outage(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node may reconnect to the new SuperLink later; otherwise its message fails."""
    monkeypatch.setattr(delivery, "RETURN_SECONDS", 1.0)
    superlink, sent = SuperLink(3), messages_for(1, 2, 3)
    superlink.loses = lambda message: message in sent[1:]
    away = {node: superlink.nodes[node] for node in (2, 3)}

    def restart() -> None:
        superlink.outage()
        for node in away:
            superlink.leave(node)
            error = Message(Error(ErrorCode.NODE_UNAVAILABLE, "gone"), reply_to=sent[node - 1])
            superlink.replies[sent[node - 1].metadata.message_id] = error

    superlink.actions = {2: superlink.outage, 3: restart, 6: lambda: superlink.nodes.update({2: away[2]})}
    grid = PollingGrid(superlink)
    assert outcome(sent, grid.send_and_receive(sent)) == ["", "", "its node is gone"]
    assert superlink.copies() == [2]
    assert grid.gone == {3}


def test_an_unavailable_node_without_an_outage_is_dropped() -> None:
    superlink, sent = SuperLink(2), messages_for(1, 2)
    superlink.busy = {2}
    error = Error(ErrorCode.NODE_UNAVAILABLE, "gone")
    superlink.actions = {3: lambda: superlink.replies.update({"1": Message(error, reply_to=sent[1])})}
    grid = PollingGrid(superlink)
    assert outcome(sent, grid.send_and_receive(sent)) == ["", "its node is gone"]
    assert grid.gone == {2}
    assert not grid.late


# -- limits of waiting -----------------------------------------------------------------------------------


def test_a_late_node_keeps_working_and_its_reply_is_counted() -> None:
    superlink = SuperLink(2)
    superlink.busy = {2}
    grid, late = PollingGrid(superlink), "no reply within round-timeout = 0.4 s"
    sent = messages_for(1, 2)
    assert outcome(sent, grid.send_and_receive(sent, timeout=0.4)) == ["", late]
    for number in (2, 3):
        sent, started = messages_for(1, 2, number=number), time.monotonic()
        first, second = outcome(sent, grid.send_and_receive(sent, timeout=5.0))
        assert first == "" and "still busy with an earlier message" in second
        assert time.monotonic() - started < 2.5  # no wait for the late node
    superlink.busy.clear()
    sent = messages_for(1, number=4)
    assert outcome(sent, grid.send_and_receive(sent)) == [""]
    sent = messages_for(1, 2, number=5)
    assert outcome(sent, grid.send_and_receive(sent)) == ["", ""]
    assert grid.counts == {"late-replies": 1}
    assert superlink.handled == {(1, 1): 5, (2, 2): 2}


def test_the_next_phase_waits_if_all_nodes_are_late() -> None:
    superlink = SuperLink(1)
    superlink.busy = {1}
    grid = PollingGrid(superlink)
    grid.send_and_receive(messages_for(1), timeout=0.2)
    superlink.actions = {superlink.polls + 5: superlink.busy.clear}
    sent = messages_for(1, number=2)
    assert outcome(sent, grid.send_and_receive(sent)) == [""]
    assert grid.counts == {"late-replies": 1}


def test_a_lost_late_message_frees_its_node() -> None:
    superlink, first = SuperLink(2), messages_for(1, 2)
    superlink.loses = lambda message: message is first[1]
    grid = PollingGrid(superlink)
    grid.send_and_receive(first, timeout=0.1)
    assert set(grid.late) == {2}
    time.sleep(0.3)
    sent = messages_for(1, number=2)
    assert outcome(sent, grid.send_and_receive(sent)) == [""]
    grid.send_and_receive([])
    assert not grid.late
    assert not grid.counts
    assert superlink.copies() == []


def test_grace_ends_training_after_enough_replies() -> None:
    superlink = SuperLink(4)
    superlink.busy = {3, 4}
    superlink.actions = {6: lambda: superlink.busy.discard(3)}
    grid = PollingGrid(superlink)
    grid.enough, grid.grace = 2, 1.2
    sent, started = messages_for(1, 2, 3, 4), time.monotonic()
    *first, last = outcome(sent, grid.send_and_receive(sent))
    assert first == ["", "", ""] and "grace = 1.2 s after 2 other" in last
    assert 1.2 <= time.monotonic() - started < 10


@pytest.mark.parametrize(("enough", "kind"), [(3, MessageType.TRAIN), (2, MessageType.EVALUATE)])
def test_grace_requires_enough_training_replies(enough: int, kind: str) -> None:
    superlink = SuperLink(3)
    superlink.busy = {3}
    superlink.actions = {10: superlink.busy.clear}
    grid = PollingGrid(superlink)
    grid.enough, grid.grace = enough, 0.1
    sent = messages_for(1, 2, 3, kind=kind)
    assert outcome(sent, grid.send_and_receive(sent)) == ["", "", ""]


def test_automatic_limits_follow_past_reply_times() -> None:
    reply_times = Pace(automatic=True)
    assert reply_times.limit("train", 1) == math.inf
    reply_times.note("train", 1, 10.0)
    reply_times.note("train", 2, 100.0)
    reply_times.note("train", 2, 1.0)  # the slowest reply decides
    assert reply_times.limit("train", 1) == MARGIN * 100.0
    assert reply_times.limit("train", 3) == FIRST_SECONDS
    assert reply_times.limit("evaluate", 1) == math.inf
    reply_times.note("evaluate", 1, 0.1)
    assert reply_times.limit("evaluate", 1) == FLOOR_SECONDS
    reply_times.note("train", 4, FIRST_SECONDS)
    assert reply_times.limit("train", 3) == FIRST_MARGIN * FIRST_SECONDS
    assert Pace().limit("train", 1) == math.inf


def test_silence_threshold_is_twice_the_median(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace, "SILENT_SECONDS", 15.0)
    reply_times = Pace()
    assert reply_times.silence("train") == 15.0
    for node, seconds in enumerate((1.0, 20.0, 300.0)):
        reply_times.note("train", node, seconds)
    assert reply_times.silence("train") == 40.0


def test_automatic_limits_drop_late_nodes_and_adapt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pace, "FLOOR_SECONDS", 0.5)
    superlink = SuperLink(2)
    grid = PollingGrid(superlink, Pace(automatic=True))
    sent = messages_for(1, 2)
    assert outcome(sent, grid.send_and_receive(sent)) == ["", ""]
    superlink.busy = {2}
    sent = messages_for(1, 2, number=2)
    assert outcome(sent, grid.send_and_receive(sent)) == ["", "no reply within 0.5 s (round-timeout = auto)"]
    time.sleep(0.6)
    superlink.busy.clear()
    sent = messages_for(1, number=3)
    grid.send_and_receive(sent)
    superlink.busy = {2}
    # The node takes longer than the floor, and less than for its slowest reply.
    superlink.actions = {superlink.polls + 8: superlink.busy.clear}
    sent = messages_for(2, number=4)
    assert outcome(sent, grid.send_and_receive(sent)) == [""]
    assert sent[0].metadata.ttl > 60.0 + 0.5


@pytest.mark.parametrize("timeout", [None, 0.6])
def test_blocked_polling_does_not_count_towards_timeouts(
    monkeypatch: pytest.MonkeyPatch, timeout: float | None
) -> None:
    """For example, a missing part of one reply delays all other replies."""
    monkeypatch.setattr(pace, "FLOOR_SECONDS", 0.6)
    monkeypatch.setattr(delivery, "HELD_SECONDS", 0.5)
    superlink = SuperLink(2)
    grid = PollingGrid(superlink, Pace(automatic=True))
    grid.send_and_receive(messages_for(1, 2))
    superlink.busy = {1, 2}
    sent = messages_for(1, 2, number=2)
    lost = Error(ErrorCode.MESSAGE_UNAVAILABLE, "objects are unavailable")

    def block() -> None:
        time.sleep(0.8)
        superlink.busy.clear()
        superlink.queues[1].clear()
        superlink.replies[sent[0].metadata.message_id] = Message(lost, reply_to=sent[0])

    superlink.actions = {superlink.polls + 1: block}
    assert outcome(sent, grid.send_and_receive(sent, timeout=timeout)) == ["", ""]
    assert superlink.copies() == [1]


def test_a_phase_reports_the_nodes_it_waits_for() -> None:
    superlink, sent, waits = SuperLink(2), messages_for(1, 2), list[Wait]()
    superlink.busy = {2}
    superlink.actions = {5: superlink.busy.clear}
    grid = PollingGrid(superlink)
    grid.on_wait = waits.append
    grid.send_and_receive(sent, timeout=30.0)
    assert [message.metadata.dst_node_id for message in waits[-1].messages] == [2]
    assert 29.0 < waits[0].remaining <= 30.0
    assert waits[-1].seconds > 0.3
    wait = Wait([sent[1]], 75.4, 44.9, 15.0)
    description = describe_wait(wait, {2: "site-c"}, 3)
    for part in ("site-c (client 2)", "training, round 1", "after 1 min 15 s", "45 s more"):
        assert part in description
