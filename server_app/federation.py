"""Who takes part: which node hosts which client, and how messages reach them."""

import math
import time
from collections import defaultdict
from collections.abc import Iterable
from logging import INFO
from typing import Any

from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from flwr.common.logger import log
from flwr.serverapp import Grid

from posy.settings import SettingsError
from strategies.base import Member

POLL_SECONDS = 0.5
PULL_SECONDS = 0.1
MAX_PULL_SECONDS = 1.0
PULL_PATIENCE = 0.02
"""After t seconds of a phase replies are asked for every 0.02 t seconds, within the two limits above."""


class WaveGrid(Grid):
    """A grid that never has two messages for the same node under way.

    A node may host several clients (``flwr run`` simulates two nodes unless told otherwise). Its state
    is read and written once a message, so messages for one node must not overlap.
    """

    def __init__(self, grid: Grid) -> None:
        self._grid = grid

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Send in as many waves as the busiest node has messages; return all replies.

        The time is that of all waves together; what it does not suffice for is not sent.
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
            replies += self._deliver(wave, None if timeout is None else left)
        return replies

    def _deliver(self, wave: list[Message], timeout: float | None) -> Iterable[Message]:
        return self._grid.send_and_receive(wave, timeout=timeout)

    def get_node_ids(self) -> Iterable[int]:
        """Return the ids of the connected nodes."""
        return self._grid.get_node_ids()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Push messages as they are."""
        return self._grid.push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Pull replies."""
        return self._grid.pull_messages(message_ids)

    def set_run(self, run: Any) -> None:
        """Set the run of the grid underneath."""
        self._grid.set_run(run)

    @property
    def run(self) -> Any:
        """The run of the grid underneath."""
        return self._grid.run

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        """Create a message with the grid underneath."""
        return self._grid.create_message(*args, **kwargs)


class PollingGrid(WaveGrid):
    """The same for a grid of real nodes: it asks for replies up to ten times a second, Flower's own every 3 s.

    The longer a phase has lasted, the longer it waits: phases of minutes need no ten requests a second.
    """

    def _deliver(self, wave: list[Message], timeout: float | None) -> Iterable[Message]:
        started = time.monotonic()
        pending = {number for number in self._grid.push_messages(wave) if number}
        replies: list[Message] = []
        while pending:
            came = list(self._grid.pull_messages(pending))
            replies += came
            pending -= {reply.metadata.reply_to_message_id for reply in came}
            waited = time.monotonic() - started
            if timeout is not None and waited >= timeout:
                break
            if pending:
                time.sleep(min(MAX_PULL_SECONDS, max(PULL_SECONDS, PULL_PATIENCE * waited)))
        return replies


def find_members(grid: Grid, settings_json: str, num_clients: int, timeout: float) -> dict[int, Member]:
    """Ask every node which clients it hosts, until all M are found.

    Raises
    ------
    SettingsError
        If a node cannot serve the run (its error is passed on), or clients are missing in the end.
    """
    started = time.monotonic()
    members: dict[int, Member] = {}
    asked: set[int] = set()
    while True:
        new = sorted(set(grid.get_node_ids()) - asked)
        asked |= set(new)
        config = {"settings": settings_json}
        for reply in grid.send_and_receive([_query(node, config) for node in new], timeout=timeout) if new else []:
            if reply.has_error():
                raise SettingsError(f"a node cannot serve this run: {reply.error.reason}")
            answer: Any = reply.content.config_records["config"]
            node = reply.metadata.src_node_id
            for client, train, test in zip(answer["clients"], answer["num-train"], answer["num-test"], strict=True):
                members[client] = Member(client, node, train, test)
        if len(members) == num_clients:
            break
        if time.monotonic() - started > timeout:
            raise SettingsError(
                f"num-clients = {num_clients}, but the {len(asked)} connected nodes host {len(members)} of them after "
                f"{timeout:g} s"
            )
        time.sleep(POLL_SECONDS)
    if len(asked) < num_clients:
        log(
            INFO,
            "%s clients on %s SuperNodes: each node serves several, one after the other; "
            '--federation-config "num-supernodes=%s client-resources-num-cpus=1" gives each its own',
            num_clients,
            len(asked),
            num_clients,
        )
    return dict(sorted(members.items()))


def _query(node: int, config: dict[str, Any]) -> Message:
    content = RecordDict({"config": ConfigRecord(dict(config))})
    return Message(content, dst_node_id=node, message_type=MessageType.QUERY)
