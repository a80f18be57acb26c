"""What a run on a federation does at this moment: a small file that its server keeps up to date, for `posy status`.

It lies among the SuperLink's files, under the number of the run, from before the first node has answered until long
after the run has ended.
"""

import json
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from logging import WARNING
from pathlib import Path
from typing import Any

from flwr.app import ConfigRecord, Message, MessageType
from flwr.common.logger import log
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid

from posy.flower import record_in, versions
from posy.folding import folded, unfolded
from posy.server_app.grids import OwnGrid
from posy.storage import plain, replace
from posy.words import one_line

WRITE_SECONDS = 1.0
"""Shortest time between two writings of the file."""
MAX_VERSION, MAX_VERSIONS = 60, 8
"""Most characters of what a node calls a version, and most versions that one node tells."""
FOLDER = "posy-runs"
"""Folder of these files in Flower's home."""
_WORK = {MessageType.TRAIN: "train", MessageType.EVALUATE: "evaluate"}

_Key = tuple[str, str, int, Any]
"""What a message asks for, whatever its id: its type, round, node and client."""


@dataclass
class _Work:
    """What a node was asked to do and has not answered."""

    key: _Key
    since: float
    numbers: set[str] = field(default_factory=set)
    """Ids of the message and its copies."""


class RunStatus:
    """What a run waits for, what its nodes do, and what went wrong so far; without a ``path`` nothing is written."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._facts: dict[str, Any] = {"round": 0, "dropped": 0, "sent-again": 0}
        self._nodes: dict[int, dict[str, Any]] = {}
        self._works: dict[int, _Work] = {}  # by node
        self._asked: dict[str, tuple[int, float]] = {}  # by the ids of questions: node, and when it was asked
        self._phase: tuple[str, str] = ("", "")
        self._sent: dict[_Key, int] = {}  # messages of the phase, with their copies
        self._phase_since = 0.0
        self._until: float | None = None
        self._waits: dict[str, Any] | None = None
        self._changed = True
        self._written = 0.0

    @classmethod
    def of_run(cls, number: int) -> "RunStatus":
        """Return that of a run under a SuperLink, or one without a file where Flower has no home of its own."""
        home = os.environ.get("FLWR_HOME")
        return cls(Path(home) / FOLDER / f"{number}.json" if home else None)

    # -- what happens ----------------------------------------------------------------------------------

    def note(self, **facts: Any) -> None:
        """Note facts of the run, such as ``round`` and ``dropped``."""
        self._facts |= {key.replace("_", "-"): value for key, value in facts.items()}
        self._change()

    def waits(self, what: str, since: float, until: float) -> None:
        """Note what the run waits for before messages can be sent, since when, and how long at most."""
        self._waits = {"for": what, "since": since, "until": until}
        self._change()

    def waits_until(self, until: float | None) -> None:
        """Note until when the run waits for replies, at most; None: that is not known yet."""
        if until is None or self._until is None or abs(until - self._until) > WRITE_SECONDS:
            changed, self._until = until != self._until, until
            if changed:
                self._change()

    def node(self, number: int, clients: Iterable[int], told: Mapping[str, Any]) -> None:
        """Note what a node has answered: its clients, and the versions of what is installed there."""
        found = told.get("versions", [])
        words = [one_line(str(text), MAX_VERSION) for text in found[:MAX_VERSIONS]] if isinstance(found, list) else []
        known = {name: version for name, _, version in (text.partition(" ") for text in words)}
        self._nodes.setdefault(number, {}).update(clients=list(clients), versions=known, told=time.time())
        self._change()

    def sent(self, messages: Sequence[Message], numbers: Sequence[str]) -> None:
        """Note messages that the SuperLink has taken under these ids: what their nodes do, and which are copies."""
        now = time.time()
        for message, number in zip(messages, numbers, strict=False):
            about = message.metadata
            if not number:  # refused
                continue
            if about.message_type not in _WORK:
                self._asked[number] = about.dst_node_id, now
                continue
            if (phase := (about.message_type, about.group_id)) != self._phase:
                self._phase, self._phase_since, self._until = phase, now, None
                self._sent.clear()
            key = (*phase, about.dst_node_id, record_in(message.content, "config", ConfigRecord).get("client"))
            self._sent[key] = self._sent.get(key, 0) + 1
            self._facts["sent-again"] += self._sent[key] > 1
            work = self._works.get(about.dst_node_id)
            if work is None or work.key != key:
                work = self._works[about.dst_node_id] = _Work(key, now)
            work.numbers.add(number)
            self._waits = None
        self._change()

    def answered(self, replies: Iterable[Message]) -> None:
        """Note replies: their nodes have nothing to do any more, and an answer to a question tells a node's clock.

        What is noted is by how much that is off at least, in seconds: ahead of this one's if above 0.
        """
        for reply in replies:
            number = reply.metadata.reply_to_message_id
            node, asked = self._asked.pop(number, (None, 0.0))
            if node is not None and not reply.has_error():
                # A clock that is right has written the answer after the question was sent and before it was read.
                written = reply.metadata.created_at
                off = max(written - time.time(), 0.0) + min(written - asked, 0.0)
                self._nodes.setdefault(node, {})["clock"] = off
            for host, work in list(self._works.items()):
                if number in work.numbers:
                    del self._works[host]
            self._change()
        self.write()

    # -- the file --------------------------------------------------------------------------------------

    def as_json(self) -> dict[str, Any]:
        """Return all of it, as the file holds it."""
        current = [work for work in self._works.values() if work.key[:2] == self._phase]
        waits = self._waits
        if waits is None and current:
            kind, number = self._phase
            what = f"{len(current)} of {len(self._sent)} clients to {_WORK[kind]} in round {number}"
            waits = {"for": what, "since": self._phase_since, "until": self._until}
        nodes = {node: {**facts} for node, facts in self._nodes.items()}
        for node, work in self._works.items():
            does = f"{_WORK[work.key[0]]}s in round {work.key[1]}"
            nodes.setdefault(node, {}).update(does=does, since=work.since)
        written = {"written": time.time(), "process": os.getpid(), "versions": versions()}
        content: dict[str, Any] = plain({**self._facts, **written, "waits": waits, "nodes": nodes})
        return content

    def write(self, *, now: bool = False) -> None:
        """Write the file if something has changed, at most once a second unless ``now``; a run never ends by it."""
        if self._path is None or not self._changed or not (now or time.monotonic() - self._written > WRITE_SECONDS):
            return
        text = json.dumps(self.as_json(), ensure_ascii=False) + "\n"
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            replace(self._path, lambda temporary: temporary.write_text(text, encoding="utf-8"))
        except OSError as error:
            log(WARNING, "what the run does is not written any more, so `posy status` does not know it: %s", error)
            self._path = None
        self._changed, self._written = False, time.monotonic()

    def close(self) -> None:
        """Note that the run does nothing any more."""
        self._works.clear()
        self._waits = None
        self._changed = True
        self.write(now=True)

    def _change(self) -> None:
        self._changed = True
        self.write()


class WatchedGrid(OwnGrid):
    """A grid of real nodes: it notes what travels over it, in as few parts as can be."""

    def __init__(self, grid: Grid, status: RunStatus) -> None:
        self._grid = grid
        self._status = status
        self._retry_invoker = getattr(grid, "_retry_invoker", None)  # by which outages are seen

    def get_node_ids(self) -> Iterable[int]:
        """Return the ids of the connected nodes."""
        return self._grid.get_node_ids()

    def get_nodes(self) -> Iterable[NodeInfo]:
        """Return the connected nodes, with the names that their keys were registered under."""
        return self._grid.get_nodes()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Push messages, folded, and note them."""
        wave = list(messages)
        numbers = list(self._grid.push_messages([folded(message) for message in wave]))
        self._status.sent(wave, numbers)
        return numbers

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Pull replies, and note them."""
        replies = [unfolded(reply) for reply in self._grid.pull_messages(message_ids)]
        self._status.answered(replies)
        return replies

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Send messages and wait for their replies."""
        return self._grid.send_and_receive(messages, timeout=timeout)


def read_statuses(home: Path) -> dict[str, dict[str, Any]]:
    """Return what the runs of a SuperLink have written, by the number of the run; ``home`` is Flower's home."""
    found = {}
    for path in sorted((home / FOLDER).glob("*.json")):
        try:
            found[path.stem] = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            log(WARNING, "%s cannot be read: %s", path, error)
    return found
