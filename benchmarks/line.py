"""Simulate a slow and unreliable line between nodes and the Fleet API of a SuperLink on this machine.

The proxy decrypts the traffic with the SuperLink's certificate to identify calls, each of which is an HTTP/2 stream. It
delays every frame. A share of the calls fails in one of two ways, with equal probability:

- The proxy cuts the connection, with all its active calls. gRPC reports UNAVAILABLE.
- The proxy resets the stream after the SuperLink replies, so the SuperLink has done the work but the reply is lost.
  gRPC reports INTERNAL.
"""

import asyncio
import contextlib
import random
import ssl
import threading
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Self

DATA, HEADERS, RESET = 0x0, 0x1, 0x3
END_STREAM = 0x1
INTERNAL_ERROR = (2).to_bytes(4)
PREFACE = 24
"""Bytes that a client sends before its first frame."""
HEAD = 9
"""Bytes of a frame header: three for the length, one for the type, one for the flags, and four for the stream."""
MAX_IN_TRANSIT = 16
"""Maximum number of frames in transit in each direction; a frame has at most 16 KiB."""


@dataclass(frozen=True)
class Quality:
    """Delay, bandwidth and failure rate of a line."""

    delay: float = 0.0
    """Seconds, in each direction."""
    bytes_per_second: float = float("inf")
    """Bandwidth of each connection, in each direction."""
    failing: float = 0.0
    """Share of the calls that fail."""
    cut_after: float = float("inf")
    """Bytes after which the proxy cuts a connection."""


@dataclass
class Counts:
    """Counts of the events on a line."""

    connections: int = 0
    calls: int = 0
    failed: int = 0
    """Calls that the proxy reset, or that were active when it cut their connection."""
    cuts: int = 0
    up: int = 0
    """Bytes from nodes to the SuperLink."""
    down: int = 0


@dataclass
class Connection:
    """A connection of a node."""

    client: asyncio.StreamWriter
    server: asyncio.StreamWriter
    calls: set[int] = field(default_factory=set)
    """Open streams."""
    to_cut: set[int] = field(default_factory=set)
    to_reset: set[int] = field(default_factory=set)
    nbytes: int = 0


class Line(threading.Thread):
    """A proxy to ``target``, HOST:PORT, with the certificate in a folder that `posy certificates` wrote."""

    def __init__(self, target: str, certificates: Path, quality: Quality, seed: int = 1) -> None:
        super().__init__(daemon=True)
        self.quality, self.counts = quality, Counts()
        self._host, _, port = target.rpartition(":")
        self._port = int(port)
        self._random = random.Random(seed)
        self._node_tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self._node_tls.load_cert_chain(certificates / "server.pem", certificates / "server.key")
        self._superlink_tls = ssl.create_default_context(cafile=str(certificates / "ca.pem"))
        for context in (self._node_tls, self._superlink_tls):
            context.set_alpn_protocols(["h2"])
        self._loop = asyncio.new_event_loop()
        self._listening = threading.Event()

    def __enter__(self) -> Self:
        self.start()
        self._listening.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self.join()

    def run(self) -> None:
        """Serve until :meth:`__exit__` stops the loop."""
        server = self._loop.run_until_complete(asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=self._node_tls))
        self.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self._listening.set()
        self._loop.run_forever()
        server.close()
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self._loop.close()

    def facts(self) -> dict[str, int]:
        """Return the counts so far."""
        return asdict(self.counts)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.counts.connections += 1
        try:
            upstream = await asyncio.open_connection(self._host, self._port, ssl=self._superlink_tls)
        except OSError:  # the SuperLink is unreachable
            writer.transport.abort()
            return
        connection = Connection(writer, upstream[1])
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):  # cancelled: shutdown
            upstream[1].write(await reader.readexactly(PREFACE))
            await asyncio.gather(
                self._forward(connection, reader, upstream[1], up=True),
                self._forward(connection, upstream[0], writer, up=False),
            )
        for end in (writer, upstream[1]):
            end.transport.abort()

    async def _forward(
        self, connection: Connection, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, up: bool
    ) -> None:
        """Forward the frames of one direction, each after its transmission time and the delay."""
        in_transit: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(MAX_IN_TRANSIT)

        async def deliver() -> None:
            while True:
                due, frame = await in_transit.get()
                await asyncio.sleep(due - time.monotonic())
                writer.write(frame)
                await writer.drain()

        delivery = asyncio.create_task(deliver())
        free = 0.0
        try:
            while True:
                frame = await reader.readexactly(HEAD)
                frame += await reader.readexactly(int.from_bytes(frame[:3]))
                self._inspect(connection, frame, up=up)
                connection.nbytes += len(frame)
                if connection.nbytes > self.quality.cut_after:
                    self._cut(connection)
                free = max(free, time.monotonic()) + len(frame) / self.quality.bytes_per_second
                stream = int.from_bytes(frame[5:HEAD])
                if not up and stream in connection.to_reset:
                    connection.to_reset.remove(stream)
                    self.counts.failed += 1
                    # Still forward this frame, because its headers update the state of the header compression.
                    frame += (4).to_bytes(3) + bytes([RESET, 0]) + frame[5:HEAD] + INTERNAL_ERROR
                await in_transit.put((free + self.quality.delay, frame))
                if delivery.done():
                    await delivery
        finally:
            delivery.cancel()
            self._abort(connection)

    def _inspect(self, connection: Connection, frame: bytes, *, up: bool) -> None:
        """Count calls and bytes, and select the calls that fail."""
        kind, flags, stream = frame[3], frame[4], int.from_bytes(frame[5:HEAD])
        if up:
            self.counts.up += len(frame)
        else:
            self.counts.down += len(frame)
        if up and kind == HEADERS and stream not in connection.calls:
            self.counts.calls += 1
            connection.calls.add(stream)
            if self._random.random() < self.quality.failing:
                self._random.choice((connection.to_cut, connection.to_reset)).add(stream)
        if not up and stream in connection.to_cut:
            self._cut(connection)
        if kind == RESET or (not up and kind in (DATA, HEADERS) and flags & END_STREAM):
            connection.calls.discard(stream)

    def _cut(self, connection: Connection) -> None:
        self.counts.cuts += 1
        self.counts.failed += len(connection.calls)
        self._abort(connection)
        raise ConnectionAbortedError

    def _abort(self, connection: Connection) -> None:
        for end in (connection.client, connection.server):
            end.transport.abort()
