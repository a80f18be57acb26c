"""How messages travel to the nodes and back."""

import math
import time
from collections import defaultdict
from collections.abc import Collection, Iterable
from logging import WARNING
from typing import Any

from flwr.app import Message
from flwr.common.constant import ErrorCode
from flwr.common.logger import log
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_utils import ObjectPushError

from posy.flower import Outages, answer_to

POLL_SECONDS, MAX_POLL_SECONDS = 0.1, 1.0
"""Shortest and longest pause before messages are asked for again, in between a share of the time waited so far."""
POLL_SHARE = 0.02
PUSHES = 5
"""Attempts to push messages whose content does not get through."""
RETURN_SECONDS = 90.0
"""Seconds after an outage in which a node that seems to be gone may be seen again; nodes report twice a minute."""
LOST = (ErrorCode.NODE_UNAVAILABLE, ErrorCode.MESSAGE_UNAVAILABLE, ErrorCode.REPLY_MESSAGE_UNAVAILABLE)
"""Errors that say that a message, its reply or its node was not to be found."""


def pause(waited: float) -> float:
    """Return the seconds to pause after ``waited`` seconds: waits of minutes need no ten requests a second."""
    return min(MAX_POLL_SECONDS, max(POLL_SECONDS, POLL_SHARE * waited))


class OwnGrid(Grid):
    """A grid of ours, without the parts of Flower's interface that nothing here uses."""

    def set_run(self, run: Any) -> None:
        """Not supported."""
        raise NotImplementedError

    @property
    def run(self) -> Any:
        """Not supported."""
        raise NotImplementedError

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        """Not supported."""
        raise NotImplementedError


class WaveGrid(OwnGrid):
    """A grid that never has two messages for the same node under way.

    A node may host several clients (``flwr run`` simulates two nodes unless told otherwise). Its state
    is read and written once a message, so messages for one node must not overlap.

    """

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        self.outages = Outages(grid)
        self.gone: set[int] = set()
        """Nodes that were gone when they should have answered; whoever reads it clears it."""

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Send in as many waves as the busiest node has messages; return all replies.

        All waves share the timeout; messages of waves for which no time is left are not sent.
        """
        end = math.inf if timeout is None else time.monotonic() + timeout
        waves: dict[int, list[Message]] = defaultdict(list)
        seen: dict[int, int] = defaultdict(int)
        for message in messages:
            node = message.metadata.dst_node_id
            waves[seen[node]].append(message)
            seen[node] += 1
        replies: list[Message] = []
        for wave in waves.values():
            left = end - time.monotonic()
            if left <= 0:
                break
            answers = list(self._deliver(wave, None if timeout is None else left))
            asked = {message.metadata.message_id: message.metadata.dst_node_id for message in wave}
            unavailable = [r for r in answers if r.has_error() and r.error.code == ErrorCode.NODE_UNAVAILABLE]
            self.gone |= {asked.get(reply.metadata.reply_to_message_id, 0) for reply in unavailable}
            replies += answers
        return replies

    def _deliver(self, wave: list[Message], timeout: float | None) -> Iterable[Message]:
        return self._grid.send_and_receive(wave, timeout=timeout)

    def get_node_ids(self) -> Iterable[int]:
        """Return the ids of the connected nodes."""
        return self._grid.get_node_ids()

    def get_nodes(self) -> Iterable[NodeInfo]:
        """Return the connected nodes, with the names that their keys were registered under."""
        return self._grid.get_nodes()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Push messages as they are."""
        return self._grid.push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Pull replies."""
        return self._grid.pull_messages(message_ids)


class PollingGrid(WaveGrid):
    """The same for a grid of real nodes: it asks for replies up to ten times a second, Flower's own every 3 s.

    A SuperLink hands out each message once, even if it dies before the other side has received it. So messages that
    are unanswered after an outage, or answered as lost, are sent again as soon as their nodes are there. A node that
    has received both answers both; one answer is used.
    """

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Push messages, again if the SuperLink was restarted half-way; return their ids, empty for those refused."""
        wave, attempts = list(messages), PUSHES
        while True:
            try:
                return list(self._grid.push_messages(wave))
            except ObjectPushError as error:
                if not (attempts := attempts - 1):
                    raise
                log(WARNING, "the SuperLink has lost messages on their way, they are sent again: %s", error)
                for message in wave:  # under new ids: the SuperLink knows the old ones, without their content
                    message.metadata.created_at = time.time()

    def _deliver(self, wave: list[Message], timeout: float | None) -> Iterable[Message]:
        started, outages, patience = time.monotonic(), self.outages.count, 0.0
        numbers = self.push_messages(wave)
        asked = {number: message for number, message in zip(numbers, wave, strict=False) if number}  # and its copies
        lost: dict[str, Message] = {}
        replies: dict[str, Message] = {}
        while True:
            for reply in list(self._grid.pull_messages(set(asked))):
                number = asked.pop(reply.metadata.reply_to_message_id).metadata.message_id
                if number not in replies or replies[number].has_error():
                    replies[number] = answer_to(number, reply)
            now = time.monotonic()
            if outages != self.outages.count:
                outages, patience = self.outages.count, now + RETURN_SECONDS
                lost = {m.metadata.message_id: m for m in wave if _may_be_lost(replies.get(m.metadata.message_id))}
            answered = {number for number, reply in replies.items() if not reply.has_error()}
            asked = {copy: m for copy, m in asked.items() if m.metadata.message_id not in answered}
            lost = {number: m for number, m in lost.items() if number not in answered and now < patience}
            for copy, message in self._push_again(lost.values(), now - started).items():
                asked[copy] = lost.pop(message.metadata.message_id)
            if not (asked or lost) or (timeout is not None and now - started >= timeout):
                return replies.values()
            time.sleep(pause(now - started))

    def _push_again(self, messages: Collection[Message], waited: float) -> dict[str, Message]:
        """Push copies of messages whose nodes are there; return the messages by the ids of their copies."""
        present = set(self.get_node_ids()) if messages else set()
        there = [message for message in messages if message.metadata.dst_node_id in present]
        if not there:
            return {}
        log(WARNING, "the SuperLink was out of reach: %s messages that it may have lost are sent again", len(there))
        copies = [
            Message(
                message.content,
                message.metadata.dst_node_id,
                message.metadata.message_type,
                ttl=message.metadata.ttl - waited,
                group_id=message.metadata.group_id,
            )
            for message in there
        ]
        numbers = self.push_messages(copies)
        return {number: message for number, message in zip(numbers, there, strict=False) if number}


def _may_be_lost(reply: Message | None) -> bool:
    """Tell whether a message has no reply, or only one that says that it or its node was not to be found."""
    return reply is None or (reply.has_error() and reply.error.code in LOST)
