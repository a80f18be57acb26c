"""Write the current status of a run on a federation to a small file, which `posy status` reads.

The file is in the SuperLink's directory, and is named after the run's number. It exists before the first node answers,
and remains after the run has ended.
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
from flwr.serverapp import Grid

from posy.flower import record_in, retries_of, versions
from posy.folding import folded, unfolded
from posy.server_app.grids import PosyGrid
from posy.storage import plain, replace
from posy.words import one_line

WRITE_SECONDS = 1.0
"""Minimum number of seconds between writes of the file."""
MAX_VERSION, MAX_VERSIONS = 60, 8
"""Maximum length of a version string that a node reports, and maximum number of such strings per node."""
FOLDER = "posy-runs"
"""Folder for status files in Flower's home."""
_WORK = {MessageType.TRAIN: "train", MessageType.EVALUATE: "evaluate"}

_Key = tuple[str, str, int, Any]
"""Type, round, node and client of a message. Copies of a message have the same key."""


@dataclass
class _Work:
    """A request that a node has not answered."""

    key: _Key
    since: float
    numbers: set[str] = field(default_factory=set)
    """Ids of the request and its copies."""


class RunStatus:
    """The progress of a run and its nodes, and the problems so far. Without a ``path``, no file is written."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._facts: dict[str, Any] = {"round": 0, "dropped": 0, "sent-again": 0}
        self._nodes: dict[int, dict[str, Any]] = {}
        self._works: dict[int, _Work] = {}  # keyed by node
        self._asked: dict[str, tuple[int, float]] = {}  # node and time of each query, keyed by the query's id
        self._phase: tuple[str, str] = ("", "")
        self._sent: dict[_Key, int] = {}  # number of times that each message of the phase was sent
        self._phase_since = 0.0
        self._until: float | None = None
        self._waits: dict[str, Any] | None = None
        self._changed = True
        self._written = 0.0

    @classmethod
    def of_run(cls, number: int) -> "RunStatus":
        """Return the status of a SuperLink's run, without a file if ``FLWR_HOME`` is not set."""
        home = os.environ.get("FLWR_HOME")
        return cls(Path(home) / FOLDER / f"{number}.json" if home else None)

    # -- events ----------------------------------------------------------------------------------------

    def note(self, **facts: Any) -> None:
        """Record facts about the run, such as ``round`` and ``dropped``."""
        self._facts |= {key.replace("_", "-"): value for key, value in facts.items()}
        self._change()

    def waits(self, reason: str, since: float, until: float) -> None:
        """Record why the run cannot send messages yet, and the start and the deadline of the wait."""
        self._waits = {"for": reason, "since": since, "until": until}
        self._change()

    def waits_until(self, until: float | None) -> None:
        """Record the deadline of the wait for replies, or None if it is unknown."""
        if until is None or self._until is None or abs(until - self._until) > WRITE_SECONDS:
            changed, self._until = until != self._until, until
            if changed:
                self._change()

    def node(self, number: int, clients: Iterable[int], answer: Mapping[str, Any]) -> None:
        """Record the clients and package versions that a node reports."""
        version_texts = answer.get("versions", [])
        lines = (
            [one_line(str(text), MAX_VERSION) for text in version_texts[:MAX_VERSIONS]]
            if isinstance(version_texts, list)
            else []
        )
        packages = {name: version for name, _, version in (text.partition(" ") for text in lines)}
        self._nodes.setdefault(number, {}).update(clients=list(clients), versions=packages, told=time.time())
        self._change()

    def sent(self, messages: Sequence[Message], numbers: Sequence[str]) -> None:
        """Record messages and the ids that the SuperLink assigned to them, and count resent messages."""
        sent_at = time.time()
        for message, number in zip(messages, numbers, strict=False):
            metadata = message.metadata
            if not number:  # refused
                continue
            if metadata.message_type not in _WORK:
                self._asked[number] = metadata.dst_node_id, sent_at
                continue
            if (phase := (metadata.message_type, metadata.group_id)) != self._phase:
                self._phase, self._phase_since, self._until = phase, sent_at, None
                self._sent.clear()
            key = (*phase, metadata.dst_node_id, record_in(message.content, "config", ConfigRecord).get("client"))
            self._sent[key] = self._sent.get(key, 0) + 1
            self._facts["sent-again"] += self._sent[key] > 1
            work = self._works.get(metadata.dst_node_id)
            if work is None or work.key != key:
                work = self._works[metadata.dst_node_id] = _Work(key, sent_at)
            work.numbers.add(number)
            self._waits = None
        self._change()

    def answered(self, replies: Iterable[Message]) -> None:
        """Record replies, mark their nodes as idle, and estimate the clock errors of nodes that answered a query.

        The estimate is the smallest possible error, in seconds. It is positive if the node's clock is ahead.
        """
        for reply in replies:
            number = reply.metadata.reply_to_message_id
            node, asked_at = self._asked.pop(number, (None, 0.0))
            if node is not None and not reply.has_error():
                # If the clock is correct, the answer was created after the query was sent and before now.
                created = reply.metadata.created_at
                error = max(created - time.time(), 0.0) + min(created - asked_at, 0.0)
                self._nodes.setdefault(node, {})["clock"] = error
            for host, work in list(self._works.items()):
                if number in work.numbers:
                    del self._works[host]
            self._change()
        self.write()

    # -- the file --------------------------------------------------------------------------------------

    def as_json(self) -> dict[str, Any]:
        """Return the content of the file."""
        current = [work for work in self._works.values() if work.key[:2] == self._phase]
        waits = self._waits
        if waits is None and current:
            kind, number = self._phase
            reason = f"{len(current)} of {len(self._sent)} clients to {_WORK[kind]} in round {number}"
            waits = {"for": reason, "since": self._phase_since, "until": self._until}
        nodes = {node: {**facts} for node, facts in self._nodes.items()}
        for node, work in self._works.items():
            activity = f"{_WORK[work.key[0]]}s in round {work.key[1]}"
            nodes.setdefault(node, {}).update(does=activity, since=work.since)
        process_facts = {"written": time.time(), "process": os.getpid(), "versions": versions()}
        content: dict[str, Any] = plain({**self._facts, **process_facts, "waits": waits, "nodes": nodes})
        return content

    def write(self, *, force: bool = False) -> None:
        """Write the file after a change, at most once a second unless ``force`` is true. Errors do not end the run."""
        if self._path is None or not self._changed or not (force or time.monotonic() - self._written > WRITE_SECONDS):
            return
        text = json.dumps(self.as_json(), ensure_ascii=False) + "\n"
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            replace(self._path, lambda temporary: temporary.write_text(text, encoding="utf-8"))
        except OSError as error:
            log(WARNING, "the run no longer writes its status, so `posy status` does not show it: %s", error)
            self._path = None
        self._changed, self._written = False, time.monotonic()

    def close(self) -> None:
        """Record the end of the run."""
        self._works.clear()
        self._waits = None
        self._changed = True
        self.write(force=True)

    def _change(self) -> None:
        self._changed = True
        self.write()


class WatchedGrid(PosyGrid):
    """A grid of real nodes that records all messages, and packs each into a few objects (:mod:`posy.folding`)."""

    def __init__(self, grid: Grid, status: RunStatus) -> None:
        self._grid = grid
        self._status = status
        self._retry_invoker = retries_of(grid)  # Outages reads this attribute

    def get_node_ids(self) -> Iterable[int]:
        """Return the ids of the connected nodes."""
        return self._grid.get_node_ids()

    def get_nodes(self) -> Iterable[Any]:
        """Return the connected nodes, with the registered names of their keys."""
        return self._grid.get_nodes()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Fold, push and record messages."""
        wave = list(messages)
        numbers = list(self._grid.push_messages([folded(message) for message in wave]))
        self._status.sent(wave, numbers)
        return numbers

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Pull, record and return replies."""
        replies = [unfolded(reply) for reply in self._grid.pull_messages(message_ids)]
        self._status.answered(replies)
        return replies

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Send messages and wait for their replies."""
        return self._grid.send_and_receive(messages, timeout=timeout)


def read_statuses(home: Path) -> dict[str, dict[str, Any]]:
    """Return the statuses of a SuperLink's runs, keyed by run number; ``home`` is Flower's home."""
    statuses = {}
    for path in sorted((home / FOLDER).glob("*.json")):
        try:
            statuses[path.stem] = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            log(WARNING, "%s cannot be read: %s", path, error)
    return statuses
