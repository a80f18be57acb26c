"""Grids, which deliver messages to the nodes and replies to the server."""

import math
import time
from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any

from flwr.app import Message
from flwr.serverapp import Grid

from posy.flower import ErrorCode, Outages

POLL_SECONDS, MAX_POLL_SECONDS = 0.1, 1.0
"""Shortest and longest pause in seconds between requests for replies."""
POLL_SHARE = 0.02
"""Pause as a fraction of the time waited so far, clamped to the two limits above."""
LOST = (ErrorCode.NODE_UNAVAILABLE, ErrorCode.MESSAGE_UNAVAILABLE, ErrorCode.REPLY_MESSAGE_UNAVAILABLE)
"""Error codes for a message, a reply or a node that is not available."""


def pause(waited: float) -> float:
    """Return the pause before the next request, in seconds, after a wait of ``waited`` seconds."""
    return min(MAX_POLL_SECONDS, max(POLL_SECONDS, POLL_SHARE * waited))


class PosyGrid(Grid):
    """A grid that omits the parts of Flower's interface that Posy does not use."""

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


class WaveGrid(PosyGrid):
    """A grid with at most one message in transit to each node.

    A node may host several clients (``flwr run`` simulates two nodes by default). Each message reads and writes the
    node's state, so a node receives one message at a time.
    """

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        self.outages = Outages(grid)
        self.gone: set[int] = set()
        """Nodes that left before they answered. The :class:`~posy.server_app.nodes.NodeRegistry` clears the set."""
        self.counts: Counter[str] = Counter()
        """Numbers of resent messages (``sent-again``) and of ``late-replies``. The recorder resets both counts."""

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Send the messages in waves of at most one message per node, and return all replies.

        All waves share the timeout, after which no further wave is sent.
        """
        end = math.inf if timeout is None else time.monotonic() + timeout
        waves: dict[int, list[Message]] = defaultdict(list)
        positions: dict[int, int] = defaultdict(int)
        for message in messages:
            node = message.metadata.dst_node_id
            waves[positions[node]].append(message)
            positions[node] += 1
        replies: list[Message] = []
        for wave in waves.values():
            remaining = end - time.monotonic()
            if remaining <= 0:
                break
            answers = list(self._grid.send_and_receive(wave, timeout=None if timeout is None else remaining))
            self._note_gone(wave, answers)
            replies += answers
        return replies

    def _note_gone(self, messages: Iterable[Message], replies: Iterable[Message]) -> None:
        """Record the nodes that left before they answered."""
        receivers = {message.metadata.message_id: message.metadata.dst_node_id for message in messages}
        unavailable = [r for r in replies if r.has_error() and r.error.code == ErrorCode.NODE_UNAVAILABLE]
        self.gone |= {receivers.get(reply.metadata.reply_to_message_id, 0) for reply in unavailable}

    def get_node_ids(self) -> Iterable[int]:
        """Return the ids of the connected nodes."""
        return self._grid.get_node_ids()

    def get_nodes(self) -> Iterable[Any]:
        """Return the connected nodes, with the registered names of their keys."""
        return self._grid.get_nodes()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Push messages, and return their ids."""
        return self._grid.push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return the replies that have arrived."""
        return self._grid.pull_messages(message_ids)
