"""Pass the queries of a service to the nodes of a run, and the nodes' answers to the service.

The service listens on a socket on the SuperLink's machine. A query contains embeddings, which the service computes with
the shared layers. The node of a client returns class probabilities, which it computes with the client's own layers.
Only a ServerApp can send messages to nodes, so a run passes the queries on.
"""

import queue
import socket
import struct
import threading
import time
from collections import defaultdict, deque
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from logging import INFO, WARNING

import numpy as np
import numpy.typing as npt
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, RecordDict
from flwr.common.logger import log

from posy.flower import (
    CLOCK_SECONDS,
    content_of,
    decoded,
    encoded,
    entries_of,
    failure,
    record_in,
    record_of,
    with_entries,
)
from posy.server_app.delivery import Delivery, PollingGrid
from posy.server_app.federation import Federation
from posy.settings import SettingsError
from posy.strategies.replies import UNREADABLE, BadReplyError
from posy.strategies.run_settings import DISTANCES, EMBEDDINGS, MODEL_ROUND, PROBABILITIES, SIZES

PRESENT = "present"
"""Key of the message that lists the clients whose nodes are connected."""
PREFIX = struct.Struct("!I")
"""The number of bytes of a frame, which precedes it."""
MOST_BYTES = 1 << 28
"""Maximum size of a frame in bytes."""
LOOK_SECONDS = 1.0
"""Seconds between two looks at the connected nodes."""
PAUSE_SECONDS = 0.02
"""Pause in seconds between two requests for replies."""
SUM_TOLERANCE = 1e-3
"""Maximum difference between 1 and the sum of the probabilities in an answer."""


@dataclass(frozen=True)
class Query:
    """Queries of the service for one client: their number, the client, the model's round, and the embeddings."""

    number: int
    client: int
    round: int
    ends: float
    """Time on the monotonic clock after which the service no longer waits."""
    embeddings: npt.NDArray[np.float32]
    sizes: tuple[int, ...]

    @classmethod
    def read(cls, frame: bytes) -> "Query":
        """Return the queries in a frame."""
        content = decoded(frame)
        config = entries_of(record_in(content, "config", ConfigRecord))
        embeddings = entries_of(record_in(content, "arrays", ArrayRecord))[EMBEDDINGS].numpy()
        ends, sizes = time.monotonic() + float(config["seconds"]), tuple(config[SIZES])
        return cls(int(config["number"]), int(config["client"]), int(config[MODEL_ROUND]), ends, embeddings, sizes)


class Relay:
    """The connection between a service and the nodes of a run.

    Parameters
    ----------
    grid : PollingGrid
        The grid of the nodes.
    federation : Federation
        The clients of the run and their nodes.
    run : str
        The name of the run's folder on the nodes.
    service : socket.socket
        The connection to the service.
    """

    def __init__(self, grid: PollingGrid, federation: Federation, run: str, service: socket.socket) -> None:
        self._grid, self._federation, self._run, self._service = grid, federation, run, service
        self._received: queue.SimpleQueue[Query | None] = queue.SimpleQueue()
        self._waiting: dict[int, deque[Query]] = defaultdict(deque)  # keyed by node
        self._under_way: dict[int, tuple[Query, Delivery]] = {}  # keyed by node
        self._looked = -LOOK_SECONDS

    def run(self) -> None:
        """Pass queries and answers on until the service closes the connection."""
        threading.Thread(target=self._receive, name="queries", daemon=True).start()
        present: list[int] = []
        while self._take():
            if time.monotonic() - self._looked > LOOK_SECONDS:
                self._federation.look()
                self._looked = time.monotonic()
                if (clients := sorted(self._federation.clients)) != present:
                    present = clients
                    num_clients = self._federation.settings.data.num_clients
                    log(INFO, "%s of %s clients can answer queries", len(present), num_clients)
                    self._send_to_service(RecordDict({"config": ConfigRecord({PRESENT: present})}))
            self._send()
            self._read()
        log(INFO, "the service has ended")

    def _receive(self) -> None:
        """Read queries from the service until it closes the connection."""
        try:
            while (frame := read_frame(self._service)) is not None:
                self._received.put(Query.read(frame))
        except (OSError, *UNREADABLE) as error:
            log(WARNING, "the connection to the service has failed: %s", error)
        self._received.put(None)

    def _take(self) -> bool:
        """Sort new queries by their node, and return whether the service is still connected."""
        busy = bool(self._under_way or self._grid.late)
        try:
            while True:
                query = self._received.get(timeout=PAUSE_SECONDS if busy else LOOK_SECONDS)
                if query is None:
                    return False
                busy = True
                host = self._federation.clients.get(query.client)
                if host is None:
                    self._answer(query, "its node is not connected")
                elif host.node_id in self._grid.late:
                    self._answer(query, "its node has not answered an earlier query")
                else:
                    self._waiting[host.node_id].append(query)
                if self._received.empty():
                    return True
        except queue.Empty:
            return True

    def _send(self) -> None:
        """Send each idle node its next queries."""
        clock, wave = time.monotonic(), []
        for node, waiting in self._waiting.items():
            while waiting and waiting[0].ends <= clock:
                self._answer(waiting.popleft(), "its node is busy")
            if waiting and node not in self._under_way:
                wave.append((waiting.popleft(), node))
        if not wave:
            return
        deliveries = self._grid.send([self._message(query, node) for query, node in wave])
        self._under_way |= {node: (q, delivery) for (q, node), delivery in zip(wave, deliveries, strict=True)}

    def _message(self, query: Query, node: int) -> Message:
        """Return the message that asks a node to answer queries."""
        facts = {"client": query.client, "run": self._run, MODEL_ROUND: query.round, SIZES: list(query.sizes)}
        config = with_entries(ConfigRecord(), facts)
        content = content_of(arrays=record_of({EMBEDDINGS: query.embeddings}), config=config)
        seconds = max(query.ends - time.monotonic(), 0.0) + CLOCK_SECONDS
        return Message(content, node, MessageType.QUERY, ttl=seconds, group_id="answers")

    def _read(self) -> None:
        """Read replies of nodes, and pass them on."""
        if not self._under_way and not self._grid.late:
            return
        self._grid.look([delivery for _, delivery in self._under_way.values()])
        clock = time.monotonic()
        for node, (query, delivery) in list(self._under_way.items()):
            if delivery.open and clock < query.ends:
                continue
            del self._under_way[node]
            if delivery.open:
                self._grid.late[node] = delivery
                self._answer(query, "its node has not answered in time")
                self._refuse(node)
            else:
                self._pass_on(query, delivery.reply)

    def _refuse(self, node: int) -> None:
        """Refuse the waiting queries of a node that does not answer."""
        for query in self._waiting.pop(node, ()):
            self._answer(query, "its node has not answered an earlier query")

    def _pass_on(self, query: Query, reply: Message | None) -> None:
        """Pass a node's reply on, or the reason why it is not usable."""
        if reply is None:
            self._answer(query, "the SuperLink has refused the message")
        elif reply.has_error():
            self._answer(query, failure(reply.error))
        else:
            try:
                self._answer(query, "", _answers_in(reply.content, len(query.embeddings)))
            except UNREADABLE as error:
                reason = str(error) if isinstance(error, BadReplyError) else f"malformed reply: {error!r}"
                self._answer(query, reason)

    def _answer(self, query: Query, error: str, arrays: Mapping[str, npt.NDArray[np.float32]] | None = None) -> None:
        """Send the service the arrays of a reply, or the reason why there are none."""
        content = RecordDict({"config": ConfigRecord({"number": query.number, "error": error})})
        if arrays:
            content["arrays"] = record_of(arrays)
        self._send_to_service(content)

    def _send_to_service(self, content: RecordDict) -> None:
        try:
            self._service.sendall(framed(content))
        except OSError as error:
            log(WARNING, "the service does not accept a message: %s", error)


def _answers_in(content: RecordDict, count: int) -> dict[str, npt.NDArray[np.float32]]:
    """Return the arrays in a node's reply to ``count`` queries, or raise :class:`BadReplyError` if they are wrong."""
    received = entries_of(record_in(content, "arrays", ArrayRecord))
    arrays = {name: received[name].numpy() for name in (PROBABILITIES, DISTANCES) if name in received}
    probabilities, distances = arrays[PROBABILITIES], arrays.get(DISTANCES, np.zeros(count, np.float32))
    for array, axes in ((probabilities, 2), (distances, 1)):
        if array.ndim != axes or array.dtype != np.float32 or len(array) != count:
            raise BadReplyError(f"its answer has the shape {array.shape} and the type {array.dtype}")
    sums = probabilities.sum(axis=1)
    if not ((probabilities >= 0).all() and np.allclose(sums, 1, atol=SUM_TOLERANCE)):  # neither holds for NaN
        raise BadReplyError("its answer does not contain probabilities")
    if not (distances >= 0).all():
        raise BadReplyError("its answer contains a distance that is negative or not a number")
    return arrays


def relay(path: str, grid: PollingGrid, federation: Federation, run: str) -> None:
    """Connect to the service at a socket, and pass queries on until the service ends.

    Raises
    ------
    SettingsError
        If no service listens on this socket.
    """
    service = socket.socket(socket.AF_UNIX)
    with closing(service):
        try:
            service.connect(path)
        except OSError as error:
            raise SettingsError(f"queries-from = {path!r}: no service accepts the connection ({error})") from error
        Relay(grid, federation, run, service).run()


def framed(content: RecordDict) -> bytes:
    """Return records as a frame, with its size."""
    frame = encoded(content)
    return PREFIX.pack(len(frame)) + frame


def size_in(prefix: bytes) -> int:
    """Return the size of the frame that follows a prefix, or raise :class:`ValueError` if it is too large."""
    size: int = PREFIX.unpack(prefix)[0]
    if size > MOST_BYTES:
        raise ValueError(f"a frame of {size} bytes is larger than {MOST_BYTES} bytes")
    return size


def read_frame(connection: socket.socket) -> bytes | None:
    """Return the next frame, or None if the connection has been closed."""
    prefix = _read(connection, PREFIX.size)
    return None if prefix is None else _read(connection, size_in(prefix))


def _read(connection: socket.socket, size: int) -> bytes | None:
    """Return the next bytes of a connection, or None if the connection has been closed."""
    parts: list[bytes] = []
    while size:
        part = connection.recv(min(size, 1 << 20))
        if not part:
            return None
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
