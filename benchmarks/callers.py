"""Send requests over HTTP and gRPC from many callers, with little processor time for each request.

A caller is a plain socket that sends bytes prepared in advance. Callers on other machines would not use the service's
cores, and a client library needs more time for a request than the service.
"""

import select
import socket
import struct
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence

WINDOW = (1 << 31) - 1
"""Number of bytes that a gRPC caller accepts without further notice."""
STREAMS_PER_CONNECTION = 8
"""Number of callers over gRPC that share a connection."""
MAX_FRAME = 1 << 14
"""Maximum size of a frame, in bytes."""
DATA, HEADERS, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 4, 6, 7, 8
"""The types of frames in HTTP/2."""
ACK = END_STREAM = 1
END_HEADERS = 4


class Connection(ABC):
    """A connection with several callers, each of which sends a request as soon as the previous one is answered.

    Parameters
    ----------
    port : int
        The port on this machine.
    callers : int
        Number of callers.
    """

    def __init__(self, port: int, callers: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.callers = callers
        self._received = b""

    @abstractmethod
    def send(self, count: int) -> None:
        """Send a number of requests."""

    @abstractmethod
    def answered(self) -> list[float]:
        """Receive bytes, and return the time of sending of each request that they complete."""

    def _receive(self) -> None:
        if not (data := self.socket.recv(1 << 18)):
            raise SystemExit("the service has closed a connection")
        self._received += data


class HttpConnection(Connection):
    """A connection over HTTP/1.1 with one caller."""

    def __init__(self, port: int, path: str, headers: Sequence[str], body: bytes) -> None:
        super().__init__(port, 1)
        lines = (f"POST {path} HTTP/1.1", "Host: localhost", f"Content-Length: {len(body)}", *headers, "", "")
        self._request = "\r\n".join(lines).encode() + body
        self._sent = 0.0

    def send(self, count: int) -> None:
        """Send the request."""
        self._sent = time.perf_counter()
        self.socket.sendall(self._request)

    def answered(self) -> list[float]:
        """Return the time of sending if the answer is complete."""
        self._receive()
        head, end, body = self._received.partition(b"\r\n\r\n")
        if not end:
            return []
        if b" 200 " not in head[:20]:
            raise SystemExit(f"the service has refused a request: {self._received[:200]!r}")
        if len(body) < int(head.lower().partition(b"\r\ncontent-length:")[2].partition(b"\r\n")[0]):
            return []
        self._received = b""
        return [self._sent]


class GrpcConnection(Connection):
    """A connection over HTTP/2 whose callers have one stream for each request."""

    def __init__(self, port: int, callers: int, method: str, message: bytes) -> None:
        super().__init__(port, callers)
        fields = (
            (":method", "POST"), (":scheme", "http"), (":path", method), (":authority", "localhost"),
            ("te", "trailers"), ("content-type", "application/grpc"),
        )  # fmt: skip
        head = b"".join(b"\0" + _text(name) + _text(value) for name, value in fields)  # names and values without index
        data = struct.pack(">BI", 0, len(message)) + message
        if len(data) > MAX_FRAME:
            raise SystemExit(f"a sample needs {len(data)} bytes; the benchmark sends at most {MAX_FRAME} in a frame")
        self._head = _frame_start(len(head), HEADERS, END_HEADERS), head + _frame_start(len(data), DATA, END_STREAM)
        self._data, self._window, self._stream = data, 65535, 1
        self._sent: dict[int, float] = {}
        self._waiting: deque[float] = deque()
        self._with_message: set[int] = set()
        settings = struct.pack(">HI", 4, WINDOW)  # SETTINGS_INITIAL_WINDOW_SIZE
        self.socket.sendall(
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
            + _frame(SETTINGS, 0, 0, settings)
            + _frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", WINDOW - 65535))
        )

    def send(self, count: int) -> None:
        """Send requests as far as the service's window allows, and the others when it grows."""
        self._waiting.extend([time.perf_counter()] * count)
        parts: list[bytes] = []
        while self._waiting and self._window >= len(self._data):
            number = self._stream.to_bytes(4, "big")
            start, block = self._head
            parts += (start, number, block, number, self._data)
            self._window -= len(self._data)
            self._sent[self._stream] = self._waiting.popleft()
            self._stream += 2
        if parts:
            self.socket.sendall(b"".join(parts))

    def answered(self) -> list[float]:
        """Return the time of sending of each request whose stream has ended with a message."""
        self._receive()
        received, start, times = self._received, 0, list[float]()
        while len(received) - start >= 9:
            length = int.from_bytes(received[start : start + 3], "big")
            end = start + 9 + length
            if len(received) < end:
                break
            kind, flags = received[start + 3 : start + 5]
            stream = int.from_bytes(received[start + 5 : start + 9], "big")
            if kind == DATA:
                self._with_message.add(stream)
            elif kind == HEADERS and flags & END_STREAM:
                if stream not in self._with_message:
                    raise SystemExit(f"the service has refused a request: {received[start:end]!r}")
                self._with_message.remove(stream)
                times.append(self._sent.pop(stream))
            else:
                self._control(kind, flags, stream, received[start + 9 : end])
            start = end
        self._received = received[start:]
        return times

    def _control(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        """Answer a frame that belongs to the connection."""
        if kind == WINDOW_UPDATE and not stream:
            self._window += int.from_bytes(payload, "big")
            self.send(0)
        elif kind in (SETTINGS, PING) and not flags & ACK:
            self.socket.sendall(_frame(kind, ACK, 0, payload if kind == PING else b""))
        elif kind not in (HEADERS, SETTINGS, PING, WINDOW_UPDATE):
            raise SystemExit(f"the service has ended a stream or the connection: {payload!r}")


def measure(connections: Sequence[Connection], seconds: float, warm_up: float) -> list[float]:
    """Return the time of each request in seconds; the requests of the first ``warm_up`` seconds are discarded."""
    poll = select.epoll()
    by_file = {connection.socket.fileno(): connection for connection in connections}
    for number, connection in by_file.items():
        poll.register(number, select.EPOLLIN)
        connection.send(connection.callers)
    begin = time.perf_counter() + warm_up
    times: list[float] = []
    while time.perf_counter() < begin + seconds:
        for number, _ in poll.poll(1):
            answered = by_file[number].answered()
            received_at = time.perf_counter()
            if received_at >= begin:
                times += [received_at - sent for sent in answered]
            if answered:
                by_file[number].send(len(answered))
    for connection in connections:
        connection.socket.close()
    return times


def _text(text: str) -> bytes:
    """Return a text as in a header block of HTTP/2."""
    return bytes([len(text)]) + text.encode()


def _frame_start(length: int, kind: int, flags: int) -> bytes:
    """Return the start of a frame without the number of its stream."""
    return length.to_bytes(3, "big") + bytes([kind, flags])


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return _frame_start(len(payload), kind, flags) + stream.to_bytes(4, "big") + payload
