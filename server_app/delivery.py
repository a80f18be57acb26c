"""Deliver messages to real nodes, distinguish lost messages from slow nodes, and limit waiting times."""

import math
import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from logging import WARNING

from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from flwr.common.logger import log
from flwr.serverapp import Grid

from posy.flower import CLOCK_SECONDS, PING, ErrorCode, PushError, answer_to, unanswered
from posy.server_app.grids import LOST, WaveGrid, pause
from posy.server_app.pace import Pace

LEAST_PAUSE = 0.005
"""Minimum pause in seconds between requests for replies."""
PUSHES = 5
"""Maximum number of attempts to push messages whose content does not arrive."""
HELD_SECONDS = 2.0
"""Seconds after which a request for replies counts as slow. Its delay then extends the nodes' time limits."""
TIMEOUT_SHARE = 1 / 3
"""Maximum fraction of a timeout before silence counts as unusual, so that there is time to resend a lost message."""
COPIES = 3
"""Maximum number of copies of a lost message that the server sends."""
RETURN_SECONDS = 90.0
"""Seconds that the server waits for a missing node after an outage. Nodes report at least twice a minute."""


@dataclass
class Delivery:
    """A message in transit to a node, and the pings sent to the node in the meantime."""

    message: Message
    number: str
    """Id that a reply refers to: the id of the message or of its last copy; empty if no reply can arrive."""
    sent: float
    """Time at which the message was first sent, on the monotonic clock."""
    ask_at: float
    """Time at which the next ping to the node is due."""
    silence: float
    """Seconds after which the node's silence is unusual."""
    patience: float
    """Seconds between the next ping and the one after it. The interval doubles with each ping."""
    questions: set[str] = field(default_factory=set)
    """Ids of the pings sent after the message or its last copy."""
    proven: bool = False
    """Whether the node has answered a ping that was sent after the message."""
    lost: bool = False
    """Whether the message or its reply is lost, so that a copy is due as soon as the node is connected."""
    patience_ends: float = math.inf
    """Time at which the server gives up on a node that has been missing since an outage of the SuperLink."""
    copies: int = 0
    reply: Message | None = None
    """The reply, or the last error."""

    @property
    def node(self) -> int:
        """The receiving node."""
        return self.message.metadata.dst_node_id

    @property
    def phase(self) -> str:
        """The type of the message."""
        return self.message.metadata.message_type

    @property
    def open(self) -> bool:
        """Whether a reply may still arrive."""
        return bool(self.number) or self.lost


@dataclass
class Wait:
    """The messages whose replies a phase is waiting for, and the phase's time limits."""

    messages: Sequence[Message]
    """Messages without a reply, some of which may not have been sent yet."""
    seconds: float
    """Seconds since the phase began."""
    remaining: float
    """Maximum number of seconds that the phase will still wait, or infinity if it has no limit yet."""
    silence: float
    """Number of seconds after which a missing reply is unusual."""


class PollingGrid(WaveGrid):
    """A grid of real nodes that polls for replies up to ten times a second, whereas Flower's grid polls every 3 s.

    A node handles one message at a time, in order of creation. If a node is silent for too long, the grid sends it a
    ping, a query that does not change any state. If the node answers the ping but not the earlier message, the message
    or its reply has been lost, and the grid sends a copy. A busy node answers neither. If a phase ends before a node
    has answered, the node receives no further messages until it does. Its late reply is then dropped and counted.

    In a simulation (``real`` is False), messages cannot be lost, and the grid does not send pings.
    """

    def __init__(self, grid: Grid, pace: Pace | None = None, *, real: bool = True) -> None:
        super().__init__(grid)
        self.pace = pace or Pace()
        self.real = real
        self.enough = 1
        """Number of replies that a training phase needs."""
        self.grace: float | None = None
        """Seconds to wait for the other nodes once ``enough`` replies have arrived, or None for no limit."""
        self.on_wait: Callable[[Wait], object] = lambda wait: None
        """Called before each request for replies."""
        self.late: dict[int, Delivery] = {}
        """Messages of earlier phases that nodes are still working on, keyed by node."""

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Push messages, retry if the SuperLink restarts, and return their ids; a refused message has an empty id."""
        wave, attempts = list(messages), PUSHES
        while True:
            try:
                return list(self._grid.push_messages(wave))
            except PushError as error:
                if not (attempts := attempts - 1):
                    raise
                log(WARNING, "the SuperLink has lost messages in transit; the server sends them again: %s", error)
                for message in wave:  # renew the ids: the SuperLink has stored the old ones without content
                    message.metadata.created_at = time.time()

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Send each node its messages one at a time, and return a reply or an error for each message.

        All messages share the ``timeout``. In addition, the pace may limit the time that each node has.
        """
        all_messages = list(messages)
        phase = _Phase(self, all_messages, math.inf if timeout is None else timeout)
        requested = time.monotonic()
        while not phase.over():
            # Posy's SuperLink may already have held the request until a reply arrived, so pause only for the remaining
            # time.
            time.sleep(max(LEAST_PAUSE, pause(phase.waited) - (time.monotonic() - requested)))
            requested = time.monotonic()
        self._note_gone(all_messages, phase.replies)
        return phase.replies

    def send(self, messages: Collection[Message], timeout: float = math.inf) -> list[Delivery]:
        """Send messages to idle nodes, and return their deliveries."""
        for message in messages if self.pace.automatic else ():
            limit = self.pace.limit(message.metadata.message_type, message.metadata.dst_node_id)
            message.metadata.ttl = min(message.metadata.ttl, limit + CLOCK_SECONDS)
        numbers = self.push_messages(messages)
        sent_at, deliveries = time.monotonic(), []
        for message, number in zip(messages, numbers, strict=False):
            silence = min(self.pace.silence(message.metadata.message_type), TIMEOUT_SHARE * timeout)
            deliveries.append(Delivery(message, number or "", sent_at, sent_at + silence, silence, silence))
        return deliveries

    def look(self, deliveries: Collection[Delivery]) -> float:
        """Request replies to deliveries, send copies of lost messages, and ping silent nodes.

        If the request was slow, return the delay in seconds; the caller extends the time limits by this delay.
        """
        outages, under_way = self.outages.count, [*deliveries, *self.late.values()]
        delay = self._read(under_way)
        clock = time.monotonic()
        if outages != self.outages.count:  # ping before sending copies, because the messages may have arrived
            for delivery in under_way:
                delivery.ask_at, delivery.patience_ends = min(delivery.ask_at, clock), clock + RETURN_SECONDS
        for delivery in under_way:
            delivery.lost |= delivery.proven and bool(delivery.number)
        for node, late in list(self.late.items()):
            if late.lost or not late.open:
                if late.reply is not None and not late.reply.has_error():
                    self.counts["late-replies"] += 1
                del self.late[node]
        self._send_copies([delivery for delivery in deliveries if delivery.lost], clock)
        if self.real:
            self._ask([d for d in (*deliveries, *self.late.values()) if d.number and clock >= d.ask_at], clock)
        return delay

    def _read(self, deliveries: Collection[Delivery]) -> float:
        """Poll once for replies to messages, their copies and pings; record them, and return a slow request's delay."""
        awaited = {delivery.number: delivery for delivery in deliveries if delivery.number}
        questions = {number: delivery for delivery in deliveries for number in delivery.questions}
        if not awaited and not questions:
            return 0.0
        began = time.monotonic()
        replies = list(self._grid.pull_messages({*awaited, *questions}))
        delay = time.monotonic() - began
        delay = delay if delay > HELD_SECONDS else 0.0  # for example, because part of a reply is missing
        for delivery in deliveries:
            delivery.sent += delay
            delivery.ask_at += delay
        for reply in replies:
            number = reply.metadata.reply_to_message_id
            missing = reply.has_error() and reply.error.code in LOST
            if number in questions:
                questions[number].questions.discard(number)
                questions[number].proven |= not missing  # an error for a lost ping proves nothing
            else:
                awaited[number].number = ""
                self._take(awaited[number], reply, missing=missing)
        return delay

    def _take(self, delivery: Delivery, reply: Message, *, missing: bool) -> None:
        """Record the reply to a message or its copy; ``missing`` is set for the errors in :data:`LOST`."""
        clock = time.monotonic()
        delivery.reply = answer_to(delivery.message, reply)
        if not reply.has_error():
            self.pace.note(delivery.phase, delivery.node, clock - delivery.sent)
        elif missing:
            in_time = clock < delivery.sent + delivery.message.metadata.ttl - CLOCK_SECONDS
            # A missing node counts as having left, unless the SuperLink was down shortly before.
            absent = reply.error.code == ErrorCode.NODE_UNAVAILABLE and not clock < delivery.patience_ends < math.inf
            delivery.lost = self.real and in_time and not absent

    def _send_copies(self, lost: Collection[Delivery], clock: float) -> None:
        """Send lost messages to connected nodes again; give up after a few copies, or if the node does not return."""
        for delivery in lost:
            if delivery.copies >= COPIES or clock >= delivery.patience_ends:
                delivery.lost, delivery.number = False, ""
        due = [delivery for delivery in lost if delivery.lost]
        connected = set(self.get_node_ids()) if due else set()
        if not (due := [delivery for delivery in due if delivery.node in connected]):
            return
        log(WARNING, "%s messages were lost in transit; the server sends them again", len(due))
        copies = []
        for delivery in due:
            content, metadata = delivery.message.content, delivery.message.metadata
            ttl = max(CLOCK_SECONDS, metadata.ttl - (clock - delivery.sent))
            copies.append(
                Message(content, metadata.dst_node_id, metadata.message_type, ttl=ttl, group_id=metadata.group_id)
            )
        self.counts["sent-again"] += len(due)
        for delivery, number in zip(due, self.push_messages(copies), strict=False):
            delivery.lost = delivery.proven = False
            delivery.questions, delivery.number = set(), number or ""
            delivery.copies += 1
            delivery.patience, delivery.patience_ends = delivery.silence, math.inf
            delivery.ask_at = clock + delivery.patience

    def _ask(self, silent: Collection[Delivery], clock: float) -> None:
        """Ping nodes. A busy node does not answer a ping."""
        if not silent:
            return
        questions = []
        for delivery in silent:
            content, metadata = RecordDict({"config": ConfigRecord({PING: True})}), delivery.message.metadata
            question = Message(content, delivery.node, MessageType.QUERY, ttl=metadata.ttl)
            # Make the ping newer than the message, even if the clock was set back in the meantime.
            question.metadata.created_at = max(question.metadata.created_at, metadata.created_at + 1e-3)
            questions.append(question)
        for delivery, number in zip(silent, self.push_messages(questions), strict=False):
            delivery.questions |= {number} if number else set()
            delivery.ask_at, delivery.patience = clock + delivery.patience, 2 * delivery.patience


class _Phase:
    """The messages of one phase, until each has a reply or the server stops waiting for one."""

    def __init__(self, grid: PollingGrid, messages: Sequence[Message], timeout: float) -> None:
        self._grid = grid
        self._queues: dict[int, deque[Message]] = defaultdict(deque)
        for message in messages:
            self._queues[message.metadata.dst_node_id].append(message)
        self._under_way: dict[int, Delivery] = {}
        self.replies: list[Message] = []
        """The reply or error for each finished message."""
        self._started = time.monotonic()
        self._timeout, self._ends, self._grace_ends = timeout, self._started + timeout, math.inf
        training = any(message.metadata.message_type == MessageType.TRAIN for message in messages)
        self._needed = grid.enough if training else 1
        self._grace = grid.grace if training else None

    @property
    def waited(self) -> float:
        """Seconds since the phase began."""
        return time.monotonic() - self._started

    def over(self) -> bool:
        """Send messages to free nodes, request replies, and return whether the phase is over."""
        grid, under_way = self._grid, self._under_way
        free_nodes = [node for node, queue in self._queues.items() if queue and node not in {*under_way, *grid.late}]
        wave = [self._queues[node].popleft() for node in free_nodes]
        under_way |= {delivery.node: delivery for delivery in grid.send(wave, self._timeout)}
        self._report()
        delay = grid.look(list(under_way.values()))
        self._ends, self._grace_ends = self._ends + delay, self._grace_ends + delay
        for node, delivery in list(under_way.items()):
            if not delivery.open:
                reason = "its message was lost every time" if delivery.copies else "the SuperLink refused its message"
                self.replies.append(delivery.reply or unanswered(delivery.message, reason))
                del under_way[node]
        success_count = sum(not reply.has_error() for reply in self.replies)
        if self._grace is not None and success_count >= self._needed:
            self._grace_ends = min(self._grace_ends, time.monotonic() + self._grace)
        self._give_up()
        queued = [node for node, queue in self._queues.items() if queue]
        # With enough replies, the phase does not wait for nodes that are busy with an earlier message.
        if (
            not under_way
            and all(node in grid.late for node in queued)
            and (not queued or success_count >= self._needed)
        ):
            self._leave_out("it was still busy with an earlier message")
            return True
        return False

    def _give_up(self) -> None:
        """Stop waiting for clients whose time limits have expired; their nodes still count as busy."""
        clock, phase_reason = time.monotonic(), ""
        if clock >= self._ends:
            phase_reason = f"no reply within round-timeout = {self._timeout:g} s"
        elif clock >= self._grace_ends:
            phase_reason = f"no reply within grace = {self._grace:g} s after {self._needed} other clients replied"
        for node, delivery in list(self._under_way.items()):
            limit = self._grid.pace.limit(delivery.phase, node)
            reason = phase_reason or (
                f"no reply within {limit:.3g} s (round-timeout = auto)" if clock >= delivery.sent + limit else ""
            )
            if reason:
                self.replies.append(unanswered(delivery.message, reason))
                del self._under_way[node]
                if not delivery.lost:
                    self._grid.late[node] = delivery
        if phase_reason:
            self._leave_out(phase_reason)

    def _leave_out(self, reason: str) -> None:
        """Add an error reply for each message that has not been sent."""
        for queue in self._queues.values():
            self.replies += [unanswered(message, reason) for message in queue]
            queue.clear()

    def _report(self) -> None:
        """Report the messages whose replies the phase still needs."""
        clock, pace, under_way = time.monotonic(), self._grid.pace, self._under_way.values()
        waiting = [delivery.message for delivery in under_way] + [m for queue in self._queues.values() for m in queue]
        if waiting:
            longest = max((d.sent + pace.limit(d.phase, d.node) for d in under_way), default=math.inf)
            remaining = min(longest, self._ends, self._grace_ends) - clock
            silence = pace.silence(waiting[0].metadata.message_type)
            self._grid.on_wait(Wait(waiting, clock - self._started, remaining, silence))
