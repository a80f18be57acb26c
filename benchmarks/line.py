"""A slow and unreliable line between nodes and the Fleet API of a SuperLink on this machine.

The proxy decrypts what it carries, with the SuperLink's own certificate, so that it can tell calls apart: one is a
stream of HTTP/2. Each frame takes its time; of the calls a share fails, half of them by a cut of their connection (with
all calls that are under way on it), half by a reset of their stream once the SuperLink has answered, so that work is
done and nobody hears of it. gRPC calls the first UNAVAILABLE and the second INTERNAL.
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
"""Bytes of a frame before its content: three of its length, type, flags, and four of its stream."""
UNDER_WAY = 16
"""Frames of a direction that are under way at the most, of 16 KiB."""


@dataclass(frozen=True)
class Quality:
    """What a line is like."""

    delay: float = 0.0
    """Seconds in each direction."""
    bytes_per_second: float = float("inf")
    """Of each direction of each connection."""
    failing: float = 0.0
    """Share of the calls that fail."""
    cut_after: float = float("inf")
    """Bytes after which a connection is cut."""


@dataclass
class Counts:
    """What has happened on a line."""

    connections: int = 0
    calls: int = 0
    failed: int = 0
    """Calls that were reset, or under way when their connection was cut."""
    cuts: int = 0
    up: int = 0
    """Bytes from nodes to the SuperLink."""
    down: int = 0


@dataclass
class Connection:
    """One connection of a node."""

    client: asyncio.StreamWriter
    server: asyncio.StreamWriter
    calls: set[int] = field(default_factory=set)
    """Streams that are open."""
    to_cut: set[int] = field(default_factory=set)
    to_reset: set[int] = field(default_factory=set)
    nbytes: int = 0


class Line(threading.Thread):
    """A proxy to ``target``, HOST:PORT, with the certificate in a folder of `posy certificates`."""

    def __init__(self, target: str, certificates: Path, quality: Quality, seed: int = 1) -> None:
        super().__init__(daemon=True)
        self.quality, self.counts = quality, Counts()
        self._host, _, port = target.rpartition(":")
        self._port = int(port)
        self._random = random.Random(seed)
        self._towards_nodes = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self._towards_nodes.load_cert_chain(certificates / "server.pem", certificates / "server.key")
        self._onwards = ssl.create_default_context(cafile=str(certificates / "ca.pem"))
        for context in (self._towards_nodes, self._onwards):
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
        """Serve until the end."""
        server = self._loop.run_until_complete(
            asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=self._towards_nodes)
        )
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
        """Return what has happened so far."""
        return asdict(self.counts)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.counts.connections += 1
        try:
            onwards = await asyncio.open_connection(self._host, self._port, ssl=self._onwards)
        except OSError:  # the SuperLink is away
            writer.transport.abort()
            return
        connection = Connection(writer, onwards[1])
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):  # the last: at the end
            onwards[1].write(await reader.readexactly(PREFACE))
            await asyncio.gather(
                self._carry(connection, reader, onwards[1], up=True),
                self._carry(connection, onwards[0], writer, up=False),
            )
        for end in (writer, onwards[1]):
            end.transport.abort()

    async def _carry(
        self, connection: Connection, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, up: bool
    ) -> None:
        """Carry the frames of one direction, each of which arrives when its bytes have passed and the delay is over."""
        under_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(UNDER_WAY)

        async def deliver() -> None:
            while True:
                due, frame = await under_way.get()
                await asyncio.sleep(due - time.monotonic())
                writer.write(frame)
                await writer.drain()

        delivery = asyncio.create_task(deliver())
        free = 0.0
        try:
            while True:
                frame = await reader.readexactly(HEAD)
                frame += await reader.readexactly(int.from_bytes(frame[:3]))
                self._look_at(connection, frame, up=up)
                connection.nbytes += len(frame)
                if connection.nbytes > self.quality.cut_after:
                    self._cut(connection)
                free = max(free, time.monotonic()) + len(frame) / self.quality.bytes_per_second
                stream = int.from_bytes(frame[5:HEAD])
                if not up and stream in connection.to_reset:
                    connection.to_reset.remove(stream)
                    self.counts.failed += 1
                    # What else comes of this stream is carried too: its headers change the state of the decompression.
                    frame += (4).to_bytes(3) + bytes([RESET, 0]) + frame[5:HEAD] + INTERNAL_ERROR
                await under_way.put((free + self.quality.delay, frame))
                if delivery.done():
                    await delivery
        finally:
            delivery.cancel()
            self._abort(connection)

    def _look_at(self, connection: Connection, frame: bytes, *, up: bool) -> None:
        """Count calls and bytes, and choose which calls fail."""
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
