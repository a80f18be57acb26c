"""Middleware of Flower's HTTP APIs without three tasks for each request.

Flower's SuperLink and nodes serve their Runtime API through up to six middlewares that derive from Starlette's
``BaseHTTPMiddleware``. For each request, each of them starts tasks and streams the response through a queue, so that a
response can have any length. The Runtime API has short responses only. :func:`simplify` lets these middlewares read the
request and the response as a whole, which takes a third of the time of a request.
"""

from collections.abc import Awaitable, Callable
from typing import Any

from starlette.middleware.base import BaseHTTPMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

RUNTIME_API, STREAMS = "/v1/runtime/", "/v1/runtime/responses"
"""Start of the paths whose requests have one response, and of the paths among them that may have a stream."""

Call = Callable[[BaseHTTPMiddleware, Scope, Receive, Send], Awaitable[None]]


def simplify() -> None:
    """Change all middlewares of this process that derive from ``BaseHTTPMiddleware``."""
    middleware: Any = BaseHTTPMiddleware
    middleware.__call__ = simplified(BaseHTTPMiddleware.__call__)


def simplified(streamed: Call) -> Call:
    """Return a method ``__call__`` that handles whole requests to the Runtime API, and others with ``streamed``."""

    async def call(self: BaseHTTPMiddleware, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"] if scope["type"] == "http" else ""
        if not path.startswith(RUNTIME_API) or path.startswith(STREAMS):
            await streamed(self, scope, receive, send)
            return
        body = await _body_of(receive)

        async def replay() -> Message:
            return {"type": "http.request", "body": body, "more_body": False}

        async def call_next(_: Request) -> Response:
            messages: list[Message] = []

            async def collect(message: Message) -> None:
                messages.append(message)

            await self.app(scope, replay, collect)
            start, *parts = messages
            response = Response(b"".join(part.get("body", b"") for part in parts), start["status"])
            response.raw_headers = start["headers"]
            return response

        response = await self.dispatch_func(Request(scope, replay), call_next)
        await response(scope, replay, send)

    return call


async def _body_of(receive: Receive) -> bytes:
    """Return the whole body of a request; raise ``ClientDisconnect`` if the caller has closed the connection."""
    parts = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)
