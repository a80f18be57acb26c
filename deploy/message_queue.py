"""The messages between ServerApps and nodes, kept in the SuperLink's memory.

Flower's SuperLink writes to its database about two hundred times for each message in a round, which accounts for most
of the time of a short round. :class:`MessageQueue` keeps the messages and their objects in memory instead. They are
lost when the SuperLink terminates, and the ServerApp then sends them again. Runs, nodes and code stay in the database.

The queue delivers a message or reply only when all its objects have arrived. Otherwise, the receiver would wait for the
missing objects, and a waiting ServerApp would not request other replies. A receiver confirms a message once it has all
objects of the message. If it requests messages again before it has confirmed a message, the queue redelivers that
message.
"""

import hashlib
import secrets
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from logging import WARNING
from typing import Any

from flwr.common.logger import log

from posy.deploy.flower_internals import fleet_call, numbers_in, packed_error
from posy.flower import ErrorCode

SERVER = 1
"""Node id of the SuperLink, which is the sender of a ServerApp's messages."""
HOLD_SECONDS = 1.0
"""Maximum number of seconds that a request for messages waits."""
GATHER_SECONDS = 0.05
"""Maximum number of seconds that a ServerApp's request waits for further replies, to reduce the number of requests."""
HELD_NODES, HELD_SERVERS = 500, 16
"""Maximum number of waiting requests from nodes, and from ServerApps. Flower serves nodes with 1,000 threads, and
ServerApps with 40."""
ARRIVAL_SECONDS = 180.0
"""Seconds without a new object after which an incomplete message is dropped."""
MOST_TIMES = 4
"""Maximum number of times that a message is delivered to a node that does not confirm it."""
REASONS = {
    ErrorCode.MESSAGE_UNAVAILABLE: "the SuperLink has lost the message, or the message has expired",
    ErrorCode.NODE_UNAVAILABLE: "the node is offline",
}
PATIENCE = 2
"""Number of heartbeat intervals after which a silent node counts as offline."""
DEFAULT_INTERVAL = 30.0
"""Heartbeat interval in seconds of a node that has not reported its interval since the SuperLink started."""


@dataclass
class Parcel:
    """A message or a reply, and the state of its delivery."""

    envelope: Any
    tree: Any
    numbers: frozenset[str]
    expires: float
    """Monotonic time at which the message or reply expires."""
    missing: set[str] = field(default_factory=set)
    arrived: float = field(default_factory=time.monotonic)
    """Monotonic time at which the last object arrived."""
    delivered: int = 0
    """Number of deliveries to the receiver."""
    received: bool = False
    """Whether the receiver has confirmed receipt."""
    reply: "Parcel | None" = None

    @property
    def number(self) -> str:
        """Id of the message or reply."""
        return str(self.envelope.metadata.message_id)

    @property
    def run_id(self) -> int:
        """Id of the run."""
        return int(self.envelope.metadata.run_id)

    @property
    def node(self) -> int:
        """Id of the receiving node."""
        return int(self.envelope.metadata.dst_node_id)


class Presence:
    """Tracks which nodes are online. It uses the monotonic clock, so a clock change cannot make a node seem offline."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._seen: dict[int, tuple[float, float]] = {}
        """Time at which each node was last known to be alive, and the node's heartbeat interval."""

    def alive(self, node: int, interval: float | None = None) -> None:
        """Record that a node is alive and, if known, the node's heartbeat interval."""
        self._seen[node] = time.monotonic(), interval or self._seen.get(node, (0.0, DEFAULT_INTERVAL))[1]

    def leave(self, node: int) -> None:
        """Record that a node has left."""
        self._seen[node] = float("-inf"), DEFAULT_INTERVAL

    def is_offline(self, node: int) -> bool:
        """Return whether a node has left or has been silent for too long."""
        last, interval = self._seen.get(node, (self._started, DEFAULT_INTERVAL))
        return time.monotonic() - last > PATIENCE * interval


class Depot:
    """The objects of parcels; parcels with identical objects share them."""

    def __init__(self) -> None:
        self._objects: dict[tuple[int, str], bytes] = {}
        self._uses: Counter[tuple[int, str]] = Counter()
        """Number of parcels that each object belongs to."""
        self._lacking: dict[tuple[int, str], list[Parcel]] = defaultdict(list)
        """For each missing object, the parcels that lack it."""

    def __len__(self) -> int:
        return len(self._objects)

    def add(self, parcel: Parcel) -> None:
        """Record a parcel and which of its objects are missing."""
        for number in parcel.numbers:
            key = parcel.run_id, number
            self._uses[key] += 1
            if key not in self._objects:
                parcel.missing.add(number)
                self._lacking[key].append(parcel)

    def remove(self, parcel: Parcel) -> None:
        """Delete the objects that only this parcel needs."""
        for number in parcel.numbers:
            key = parcel.run_id, number
            self._uses[key] -= 1
            if number in parcel.missing:
                self._lacking[key].remove(parcel)
            if not self._uses[key]:
                del self._uses[key]
                self._objects.pop(key, None)
                self._lacking.pop(key, None)
        parcel.missing.clear()

    def put(self, run_id: int, number: str, content: bytes) -> list[Parcel] | None:
        """Store an object, and return the parcels that it completes, or None if no parcel needs the object."""
        key = run_id, number
        if key not in self._uses:
            return None
        self._objects[key] = content
        parcels = self._lacking.pop(key, [])
        for parcel in parcels:
            parcel.missing.discard(number)
            parcel.arrived = time.monotonic()
        return [parcel for parcel in parcels if not parcel.missing]

    def get(self, run_id: int, number: str) -> bytes | None:
        """Return an object (empty bytes if it has not arrived), or None if no parcel needs it."""
        key = run_id, number
        return self._objects.get(key, b"") if key in self._uses else None


class Places:
    """The slots for waiting requests: at most one per node, and a limited number in total."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._nodes: set[int] = set()
        self._free = {True: HELD_SERVERS, False: HELD_NODES}

    def enter(self, replies: bool, node: int) -> bool:
        """Reserve a slot for a request, and return whether the request may wait; for a ServerApp, ``node`` is 0."""
        with self._lock:
            if node in self._nodes or not self._free[replies]:
                return False
            self._free[replies] -= 1
            self._nodes |= {node} if node else set()
            return True

    def leave(self, replies: bool, node: int) -> None:
        """Free the slot of a request that is no longer waiting."""
        with self._lock:
            self._free[replies] += 1
            self._nodes.discard(node)


class MessageQueue:
    """The messages in transit.

    Parameters
    ----------
    is_active : callable
        Returns whether the run with a given id is running.
    """

    def __init__(self, is_active: Callable[[int], bool]) -> None:
        self.nodes = Presence()
        self._is_active = is_active
        self._changed = threading.Condition()
        self._arrivals = {True: 0, False: 0}
        """Numbers of complete replies (True) and complete messages (False) so far."""
        self._depot = Depot()
        self._parcels: dict[str, Parcel] = {}
        self._answered: dict[str, Parcel] = {}
        """The message to which each reply belongs, keyed by the reply's id."""
        self._waiting: dict[int, dict[str, Parcel]] = defaultdict(dict)
        """The messages that each node has not confirmed, in order of arrival."""
        self._places = Places()

    @property
    def in_transit(self) -> frozenset[str]:
        """The ids of the messages whose replies the ServerApp has not yet received."""
        return frozenset(self._parcels)

    @property
    def num_objects(self) -> int:
        """Number of stored objects that belong to messages and replies."""
        return len(self._depot)

    # -- from a ServerApp to the nodes ---------------------------------------------------------------------

    def send(self, run_id: int, envelopes: Sequence[Any], trees: Sequence[Any]) -> tuple[list[str], list[str]]:
        """Accept a run's messages, and return their ids (empty for invalid messages) and the ids of missing objects."""
        numbers, missing_ids = [], dict[str, None]()
        with self._changed:
            for envelope, tree in zip(envelopes, trees, strict=True):
                metadata, parcel = envelope.metadata, _parcel(envelope, tree)
                valid = (
                    metadata.run_id == run_id and metadata.src_node_id == SERVER and not metadata.reply_to_message_id
                )
                if not valid or parcel.expires <= time.monotonic() or not metadata.dst_node_id:
                    numbers.append("")
                    continue
                if metadata.message_id not in self._parcels:
                    self._parcels[metadata.message_id] = self._waiting[parcel.node][metadata.message_id] = parcel
                    self._depot.add(parcel)
                missing_ids |= dict.fromkeys(self._parcels[metadata.message_id].missing)
                numbers.append(metadata.message_id)
            self._announce(replies=False)
        return numbers, list(missing_ids)

    def pull(self, node: int) -> Parcel | None:
        """Return the next message for a node, or None if no message arrives within :data:`HOLD_SECONDS`."""
        self.nodes.alive(node)
        parcel: Parcel | None = self._hold(False, node, lambda: self._next(node))
        return parcel

    def _next(self, node: int) -> Parcel | None:
        for parcel in self._ready(node):
            if not self._is_active(parcel.run_id):  # outside the lock, because it queries the database
                self.drop(parcel.run_id)
                continue
            with self._changed:
                if parcel.number not in self._waiting[node]:
                    continue
                if parcel.delivered:
                    log(
                        WARNING,
                        "posy: node %s has not confirmed the message %s, so the SuperLink delivers it again",
                        node,
                        parcel.number,
                    )
                parcel.delivered += 1
                return parcel
        return None

    def _ready(self, node: int) -> list[Parcel]:
        """Return a node's complete messages, and drop messages that have expired or were delivered too often."""
        with self._changed:
            ready = []
            for parcel in list(self._waiting[node].values()):
                if parcel.expires <= time.monotonic() or parcel.delivered >= MOST_TIMES:
                    self._forget(parcel)
                elif not parcel.missing:
                    ready.append(parcel)
            return ready

    # -- from a node to a ServerApp ------------------------------------------------------------------------

    def answer(self, node: int, envelope: Any, tree: Any) -> list[str]:
        """Accept a node's reply, and return the ids of its missing objects; ignore a reply to an unknown message."""
        self.nodes.alive(node)
        metadata = envelope.metadata
        with self._changed:
            request, parcel = self._parcels.get(metadata.reply_to_message_id), _parcel(envelope, tree)
            if (
                request is None
                or (request.run_id, request.node) != (metadata.run_id, node)
                or metadata.src_node_id != node
            ):
                return []
            if request.reply is not None and request.reply.number != parcel.number and request.reply.missing:
                self._drop_reply(request)
            if request.reply is None:
                self._confirm(request)
                self._set_reply(request, parcel)
                self._announce(replies=True)
            return list(request.reply.missing) if request.reply and request.reply.number == parcel.number else []

    def replies(self, run_id: int, numbers: Iterable[str]) -> list[Parcel]:
        """Return the replies to a run's messages; if none has arrived, wait for up to :data:`HOLD_SECONDS`.

        If a message can no longer receive a reply, the method returns an error as its reply.
        """
        request = list(numbers)

        def gather() -> list[Parcel]:
            with self._changed:
                return [reply for number in request if (reply := self._reply_to(run_id, number)) is not None]

        parcels: list[Parcel] = self._hold(True, 0, gather)
        if parcels and len(parcels) < len(request):
            with self._changed:
                missing, before = len(request) - len(parcels), self._arrivals[True]
                self._changed.wait_for(lambda: self._arrivals[True] - before >= missing, GATHER_SECONDS)
            parcels = gather()
        return parcels

    def _reply_to(self, run_id: int, number: str) -> Parcel | None:
        """Return the reply to a message, an error if no reply can arrive, or None if one may still arrive."""
        parcel = self._parcels.get(number)
        if parcel is None or parcel.run_id != run_id:
            self._parcels[number] = parcel = _unknown(run_id, number)
            return self._fail(parcel, ErrorCode.MESSAGE_UNAVAILABLE)
        reply = parcel.reply
        if reply is not None and not reply.missing:
            return reply
        if parcel.expires <= time.monotonic():
            return self._fail(parcel, ErrorCode.MESSAGE_UNAVAILABLE)
        if reply is None and self.nodes.is_offline(parcel.node):
            return self._fail(parcel, ErrorCode.NODE_UNAVAILABLE)
        return None

    def _fail(self, parcel: Parcel, code: ErrorCode) -> Parcel:
        """Store an error reply to a message, and return the reply."""
        packed = packed_error(parcel.envelope, code, REASONS[code], time.time())
        reply = _parcel(packed.envelope, packed.tree)
        self._confirm(parcel)
        self._drop_reply(parcel)
        self._set_reply(parcel, reply)
        for number, content in packed.objects.items():
            self._depot.put(parcel.run_id, number, content)
        return reply

    # -- objects -------------------------------------------------------------------------------------------

    def store(self, run_id: int, number: str, content: bytes) -> bool:
        """Store an object whose id is the SHA-256 of its content, and return whether a message needs it."""
        if hashlib.sha256(content).hexdigest() != number:
            return False
        with self._changed:
            complete = self._depot.put(run_id, number, content)
            for parcel in complete or ():
                self._announce(replies=bool(parcel.envelope.metadata.reply_to_message_id))
        return complete is not None

    def find(self, run_id: int, number: str) -> bytes | None:
        """Return an object (empty bytes if it has not arrived), or None if no message needs it."""
        with self._changed:
            return self._depot.get(run_id, number)

    def confirm(self, run_id: int, number: str) -> bool:
        """Record that a receiver has all objects of a message or reply; return whether it was in transit."""
        with self._changed:
            if (parcel := self._parcels.get(number)) is not None and parcel.run_id == run_id:
                self._confirm(parcel)
            elif (request := self._answered.get(number)) is not None and request.run_id == run_id:
                self._forget(request)
            else:
                return False
        return True

    def drop(self, run_id: int) -> None:
        """Drop the messages of a run that has ended."""
        with self._changed:
            for parcel in [parcel for parcel in self._parcels.values() if parcel.run_id == run_id]:
                self._forget(parcel)

    def sweep(self) -> None:
        """Drop messages that expired long ago, that have stayed incomplete for too long, or whose run has ended."""
        late = time.monotonic() - ARRIVAL_SECONDS
        with self._changed:
            for parcel in list(self._parcels.values()):
                if parcel.expires < late or (parcel.missing and parcel.arrived < late):
                    self._forget(parcel)
                elif parcel.reply is not None and parcel.reply.missing and parcel.reply.arrived < late:
                    self._drop_reply(parcel)
            runs = {parcel.run_id for parcel in self._parcels.values()}
        for run_id in runs:
            if not self._is_active(run_id):
                self.drop(run_id)

    # -- helpers, called with the lock held ----------------------------------------------------------------

    def _set_reply(self, request: Parcel, reply: Parcel) -> None:
        request.reply = reply
        self._answered[reply.number] = request
        self._depot.add(reply)

    def _drop_reply(self, request: Parcel) -> None:
        if request.reply is not None:
            self._depot.remove(request.reply)
            self._answered.pop(request.reply.number, None)
            request.reply = None

    def _confirm(self, parcel: Parcel) -> None:
        if not parcel.received:
            parcel.received = True
            self._waiting[parcel.node].pop(parcel.number, None)
            self._depot.remove(parcel)

    def _forget(self, parcel: Parcel) -> None:
        self._confirm(parcel)
        self._drop_reply(parcel)
        self._parcels.pop(parcel.number, None)

    def _announce(self, *, replies: bool) -> None:
        self._arrivals[replies] += 1
        self._changed.notify_all()

    def _hold(self, replies: bool, node: int, look: Callable[[], Any]) -> Any:
        """Call ``look`` until it returns a result, for up to :data:`HOLD_SECONDS`; one request per node may wait."""
        waits = self._places.enter(replies, node)
        end = time.monotonic() + HOLD_SECONDS
        try:
            while True:
                before = self._arrivals[replies]
                if (answer := look()) or not waits or time.monotonic() >= end:
                    return answer
                with self._changed:
                    self._changed.wait_for(lambda: self._arrivals[replies] > before, end - time.monotonic())  # noqa: B023
        finally:
            if waits:
                self._places.leave(replies, node)


def new_session() -> str:
    """Return an id for the transfer of a message's objects. Flower requires this id, and the queue ignores it."""
    return secrets.token_hex(16)


def _unknown(run_id: int, number: str) -> Parcel:
    """Return an expired parcel for a message that the queue does not know."""
    ids = {"run_id": run_id, "message_id": number, "src_node_id": SERVER, "dst_node_id": SERVER}
    response = fleet_call("PullMessages").response(messages_list=[{"metadata": {**ids, "message_type": "system"}}])
    parcel = _parcel(response.messages_list[0], None)
    parcel.expires = time.monotonic()
    return parcel


def _parcel(envelope: Any, tree: Any) -> Parcel:
    # The lifetime begins on arrival, so that no clock change on any machine makes a message expire.
    expires = time.monotonic() + envelope.metadata.ttl
    return Parcel(envelope, tree, frozenset(numbers_in(tree)) if tree is not None else frozenset(), expires)
