"""HTTP connections that a slow caller, or an endless header, cannot hold."""

import asyncio
from typing import Any, Protocol

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from posy.serve.limits import RECEIVE_SECONDS, SLOWEST

MAX_HEAD = 64 << 10
"""Maximum size of a request's headers, in bytes."""
SWEEP_SECONDS = 5.0
"""Time between two looks at the connections."""


class _Server(Protocol):
    """An HTTP server with open connections."""

    server_state: Any


class Connection(HttpToolsProtocol):
    """An HTTP connection with limits on the size of headers and on the time to send a request and to read an answer."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the time of the first request."""
        super().connection_made(transport)
        self._in_body, self._received, self._begun = False, 0, self.loop.time()
        self._unsent, self._unsent_since = 0, 0.0

    def data_received(self, data: bytes) -> None:
        """Count the bytes of the request that is being received."""
        if not self._received:
            self._begun = self.loop.time()
        self._received += len(data)
        super().data_received(data)
        if not self._in_body and self._received > MAX_HEAD:
            self.transport.abort()

    def on_headers_complete(self) -> None:
        """Note that the body follows."""
        self._in_body = True
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """Note that the request is complete."""
        self._in_body, self._received = False, 0
        super().on_message_complete()

    def expire(self) -> None:
        """Close the connection if a request arrives too slowly, or if the caller does not read the answer."""
        time_now, unsent = self.loop.time(), self.transport.get_write_buffer_size()
        if unsent != self._unsent:
            self._unsent, self._unsent_since = unsent, time_now
        is_receiving = self._received > 0 or self.cycle is None
        sends_slowly = is_receiving and time_now - self._begun > RECEIVE_SECONDS + self._received / SLOWEST
        reads_slowly = unsent > 0 and time_now - self._unsent_since > RECEIVE_SECONDS
        if sends_slowly or reads_slowly:
            self.transport.abort()


async def close_slow_connections(server: _Server) -> None:
    """Close the connections of a server that are too slow, until the task is cancelled."""
    while True:
        await asyncio.sleep(SWEEP_SECONDS)
        for connection in list(server.server_state.connections):
            connection.expire()
