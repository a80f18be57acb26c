"""A short way through Flower's HTTP API for the calls that each message makes several times.

Flower's SuperLink handles a call of the Runtime API with six middlewares, four of which concern other paths, and with
FastAPI's injection of dependencies. This takes four times as long as the call itself. :class:`KnownCallers` lets
Flower handle the first call of a caller. If Flower accepts it, further calls with the same headers, which include the
task's token and Flower's version, reach Flower's handlers directly.
"""

from collections.abc import Callable
from typing import Any

from flwr.proto import message_pb2, runtime_pb2
from flwr.supercore.protobuf.constants import PROTOBUF_MEDIA_TYPE
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

REQUESTS: dict[str, Any] = {
    "push_messages": runtime_pb2.PushAppMessagesRequest,
    "pull_messages": runtime_pb2.PullAppMessagesRequest,
    "push_object": message_pb2.PushObjectRequest,
    "pull_object": message_pb2.PullObjectRequest,
    "confirm_message_received": message_pb2.ConfirmMessageReceivedRequest,
}
"""Type of the request of each handler that has a short way."""
HANDLERS = {f"/v1/runtime/{name.replace('_', '-')}": name for name in REQUESTS}
"""Name of the handler of each path."""
TOKEN_HEADER, OTHER_HEADERS = b"flwr-task-token", frozenset({b"content-length"})
"""The header that identifies a task, and the headers that differ between the calls of a caller."""
MOST_CALLERS = 1000
"""Number of callers that are remembered; a caller that is forgotten is accepted again."""

Caller = tuple[tuple[bytes, bytes], ...]


class KnownCallers:
    """Middleware that calls Flower's handlers for callers which Flower has accepted.

    Parameters
    ----------
    app : ASGI application
        Flower's middlewares and routes.
    state : callable
        Returns the state of the SuperLink.
    handlers : object
        Flower's handlers, by name.
    """

    def __init__(self, app: ASGIApp, state: Callable[[], Any], handlers: Any) -> None:
        self._app, self._state, self._handlers = app, state, handlers
        self._accepted: dict[Caller, str] = {}
        """The token of each accepted caller."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request."""
        name = HANDLERS.get(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        if name is None:
            await self._app(scope, receive, send)
            return
        body = await _body_of(receive)

        async def replay() -> Message:
            return {"type": "http.request", "body": body, "more_body": False}

        caller = tuple(header for header in scope["headers"] if header[0] not in OTHER_HEADERS)
        if token := self._accepted.get(caller):
            answer = await run_in_threadpool(self._answer, name, token, body)
            if answer is not None:
                await Response(answer, media_type=PROTOBUF_MEDIA_TYPE)(scope, replay, send)
                return

        async def note(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._note(caller, accepted=message["status"] == 200)
            await send(message)

        await self._app(scope, replay, note)

    def _answer(self, name: str, token: str, body: bytes) -> bytes | None:
        """Return the response of a handler; None if Flower has to handle the call, and to answer its error."""
        try:
            state = self._state()
            task = state.get_task_by_token(token)
            if task is None:
                return None
            response = getattr(self._handlers, name)(REQUESTS[name].FromString(body), state, task)
        except Exception:  # Flower handles the call again: all handlers can be repeated
            return None
        answer: bytes = response.SerializeToString()
        return answer

    def _note(self, caller: Caller, *, accepted: bool) -> None:
        self._accepted.pop(caller, None)
        tokens = [value for name, value in caller if name == TOKEN_HEADER]
        if accepted and len(tokens) == 1:
            if len(self._accepted) >= MOST_CALLERS:
                self._accepted.clear()
            self._accepted[caller] = tokens[0].decode("latin-1")


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
