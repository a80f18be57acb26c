"""Serves the calls about messages in place of Flower's SuperLink, and lets Flower serve all other calls.

:class:`NodeCalls` handles the nodes' gRPC calls, after Flower has checked the nodes' keys. :class:`AppCalls` handles
the HTTP calls of ServerApps and users. Both depend only on Flower's network protocol.
"""

import asyncio
import itertools
import logging
import math
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from logging import ERROR, WARNING
from typing import Any

import grpc
from flwr.common.logger import log
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from posy.deploy.database import Turns, can_be_retried
from posy.deploy.flower_internals import (
    FLEET,
    MEDIA_TYPE,
    RUN_ENDED,
    TOKEN_HEADER,
    app_call,
    control_call,
    fleet_call,
    http_path,
    token_of_task,
)
from posy.deploy.install import BundleError, install_whole
from posy.deploy.message_queue import SERVER, MessageQueue, Parcel, new_session
from posy.forked import cores

RUN_CACHE_SECONDS = 10.0
"""Seconds for which Posy assumes that a run is still active. After a call that may end a run, Posy checks again."""
ASK_SECONDS = 1.0
"""Maximum number of seconds that a request for a task waits for a run to be submitted."""
SWEEP_SECONDS = 10.0
"""Seconds between sweeps for abandoned messages."""
START_SECONDS = 300.0
"""Seconds after which Posy no longer counts a silent ServerApp as starting."""
MAX_TOKENS = 1000
"""Maximum number of accepted ServerApps in the cache. If a ServerApp is not in the cache, Flower checks it again."""
MESSAGE_CALLS = ("PushMessages", "PullMessages", "PushObject", "PullObject", "ConfirmMessageReceived")
PROBE_REFUSED = "Invalid destination node ID for Message"
"""Beginning of Flower's error when Posy checks a ServerApp (see :class:`AppCalls`)."""
AGAIN = "The database is busy, locked or full; try again."


class Runs:
    """Determines which runs are active from Flower's responses to ``GetRun`` calls."""

    def __init__(self) -> None:
        self.ask: Callable[[Any, None], object] | None = None
        """Flower's handler for ``GetRun``, which raises an exception with an error code if the run is not active."""
        self.node = 0
        """Id of the node that made the last call. Posy calls the handler on behalf of this node."""
        self._seen: dict[int, float] = {}
        self._changes = 0

    def is_active(self, run_id: int) -> bool:
        """Return whether a run is running."""
        is_recent = time.monotonic() - self._seen.get(run_id, -math.inf) < RUN_CACHE_SECONDS
        if is_recent or self.ask is None or not self.node:
            return True
        changes = self._changes
        try:
            self.ask(fleet_call("GetRun").request(node={"node_id": self.node}, run_id=run_id), None)
        except Exception as error:
            if not isinstance(code := getattr(error, "code", None), int):
                raise
            self._seen.pop(run_id, None)
            # Any other code means that the node has been unregistered in the meantime.
            return code != RUN_ENDED
        if changes == self._changes:  # otherwise the response may be older than the change
            self._seen[run_id] = time.monotonic()
        return True

    def forget(self) -> None:
        """Clear the cache, because a run may have ended."""
        self._changes += 1
        self._seen.clear()


class NodeCalls(grpc.ServerInterceptor):  # type: ignore[misc]
    """Serves nodes' calls about messages, after Flower has checked the nodes' keys."""

    def __init__(self, queue: MessageQueue, runs: Runs) -> None:
        self._queue, self._runs = queue, runs

    def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Any], details: grpc.HandlerCallDetails
    ) -> Any:
        """Return the handler for a call."""
        handler = continuation(details)
        service, _, name = details.method.rpartition("/")
        serve = getattr(self, "_" + name.lower(), None) if service == f"/{FLEET.full_name}" else None
        if handler is None or serve is None:
            return handler

        def answer(request: Any, context: grpc.ServicerContext) -> Any:
            if name in MESSAGE_CALLS:
                self._runs.node = request.node.node_id
            answer = serve(request, lambda: handler.unary_unary(request, context))
            return handler.unary_unary(request, context) if answer is None else answer

        return grpc.unary_unary_rpc_method_handler(answer, handler.request_deserializer, handler.response_serializer)

    def _pullmessages(self, request: Any, _: Callable[[], Any]) -> Any:
        parcel = self._queue.pull(request.node.node_id)
        answer = fleet_call("PullMessages").response()
        return answer if parcel is None else _with_parcels(answer, [parcel])

    # These methods return None if Flower has to respond, for example with the error that the run has ended.

    def _pushmessages(self, request: Any, _: Callable[[], Any]) -> Any:
        [envelope], [tree] = request.messages_list, request.message_object_trees
        node, metadata = request.node.node_id, envelope.metadata
        if not self._runs.is_active(metadata.run_id):
            return None
        wanted = self._queue.answer(node, envelope, tree)
        return fleet_call("PushMessages").response(
            results={metadata.message_id: 0}, objects_to_push=wanted, session_id=new_session()
        )

    def _pushobject(self, request: Any, _: Callable[[], Any]) -> Any:
        return push_object(self._queue, request.run_id, request) if self._runs.is_active(request.run_id) else None

    def _pullobject(self, request: Any, _: Callable[[], Any]) -> Any:
        return pull_object(self._queue, request.run_id, request) if self._runs.is_active(request.run_id) else None

    def _confirmmessagereceived(self, request: Any, _: Callable[[], Any]) -> Any:
        return confirm(self._queue, request.run_id, request) if self._runs.is_active(request.run_id) else None

    def _activatenode(self, request: Any, flower: Callable[[], Any]) -> Any:
        answer = flower()
        self._queue.nodes.alive(answer.node_id, request.heartbeat_interval)
        return answer

    def _sendnodeheartbeat(self, request: Any, flower: Callable[[], Any]) -> Any:
        self._queue.nodes.alive(request.node.node_id, request.heartbeat_interval)
        return flower()

    def _deactivatenode(self, request: Any, flower: Callable[[], Any]) -> Any:
        answer = flower()
        self._queue.nodes.leave(request.node_id)
        return answer


class AskAgain(grpc.ServerInterceptor):  # type: ignore[misc]
    """Answers a node's failed call with UNAVAILABLE if it may succeed later, so that the node retries it.

    A call may also fail because the SuperLink rejects its timestamp after a clock change. Flower's response
    would make the node terminate. Except for a node's first call, the interceptor therefore answers UNAVAILABLE.
    """

    def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Any], details: grpc.HandlerCallDetails
    ) -> Any:
        """Wrap the handler for a call."""
        handler = continuation(details)
        first = details.method.endswith("/ActivateNode")

        def answer(request: Any, context: grpc.ServicerContext) -> Any:
            try:
                return handler.unary_unary(request, context if first else _Context(context))
            except Exception as error:
                if not can_be_retried(error):
                    raise
                log(WARNING, "posy: the node must retry %s: %s", details.method.rpartition("/")[2], first_line(error))
                return context.abort(grpc.StatusCode.UNAVAILABLE, AGAIN)

        if handler is None or handler.unary_unary is None:
            return handler
        return grpc.unary_unary_rpc_method_handler(answer, handler.request_deserializer, handler.response_serializer)


class _Context:
    """The context of a call. It reports an invalid timestamp as UNAVAILABLE, so that the node does not terminate."""

    def __init__(self, context: grpc.ServicerContext) -> None:
        self._context = context

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    def abort(self, code: grpc.StatusCode, details: str) -> Any:
        if code is grpc.StatusCode.UNAUTHENTICATED and details == "Invalid timestamp":
            log(WARNING, "posy: a node must retry a call, because its clock differs too much from the SuperLink's")
            code = grpc.StatusCode.UNAVAILABLE
        return self._context.abort(code, details)


class AppCalls:
    """Serves ServerApps' calls about messages, and observes some calls that Flower serves.

    When a ServerApp's first messages arrive, Posy asks Flower to check the ServerApp. To do so, Posy passes Flower a
    message to a nonexistent node, with the ServerApp's headers. Flower accepts this message only with a valid token for
    the run. Before this check, for example after a restart of the SuperLink, Flower serves the ServerApp's other calls.

    Parameters
    ----------
    app : ASGI application
        Flower's application.
    queue, runs : MessageQueue, Runs
        The SuperLink's messages and runs.
    turns : Turns
        The queue of writers to the SuperLink's database.
    """

    def __init__(self, app: ASGIApp, queue: MessageQueue, runs: Runs, turns: Turns) -> None:
        self._app, self._queue, self._runs, self._turns = app, queue, runs, turns
        self._tokens: dict[str, int] = {}
        """Run ids of the ServerApps that Flower has accepted, keyed by token."""
        self._starting: dict[str, float] = {}
        """Start times of the ServerApps that have not reported yet, keyed by token."""
        self._pending = True
        self._submitted = asyncio.Event()
        self._messages = {app_call(name).path: name for name in MESSAGE_CALLS}
        self._others: dict[str, Callable[[Scope, bytes, Send], Awaitable[None]]] = {
            http_path("runtime", "AcquireTask"): self._acquire_task,
            http_path("runtime", "PullTaskInput"): self._pull_task_input,
            http_path("runtime", "PushTaskOutput"): self._end_run,
            http_path("control", "StopRun"): self._end_run,
            http_path("control", "StartRun"): self._start_run,
            http_path("control", "UnregisterNode"): self._unregister_node,
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request."""
        path = scope["path"] if scope["type"] == "http" and scope["method"] == "POST" else ""
        if path in self._messages:
            await self._serve(self._messages[path], scope, await _body_of(receive), send)
        elif path in self._others:
            await self._others[path](scope, await _body_of(receive), send)
        else:
            await self._app(scope, receive, send)

    # -- messages ------------------------------------------------------------------------------------------

    async def _serve(self, name: str, scope: Scope, body: bytes, send: Send) -> None:
        """Serve a call about messages, or pass the call on to Flower."""
        request, token = app_call(name).request.FromString(body), _token_in(scope)
        if token not in self._tokens and name == "PushMessages" and request.messages_list:
            await self._admit(scope, token, request.messages_list[0].metadata.run_id)
        answer = None
        if token in self._tokens:
            try:
                answer = await run_in_threadpool(self._answer, name, self._tokens[token], request)
            except Exception as error:
                if not can_be_retried(error):
                    raise
                log(WARNING, "posy: the caller must retry %s: %s", scope["path"], first_line(error))
                await Response(AGAIN, 503)(scope, _nothing, send)
                return
        if answer is None:
            await _pass_on(await self._flower(scope, body), send)
        else:
            await Response(answer.SerializeToString(), media_type=MEDIA_TYPE)(scope, _nothing, send)

    async def _admit(self, scope: Scope, token: str, run_id: int) -> None:
        """Ask Flower whether a token belongs to a run's ServerApp, and accept the token if so."""
        answer = await self._flower(scope, _probe(run_id), app_call("PushMessages").path)
        if answer[0]["status"] == 200:
            if len(self._tokens) >= MAX_TOKENS:
                del self._tokens[next(iter(self._tokens))]
            self._tokens[token] = run_id

    def _answer(self, name: str, run_id: int, request: Any) -> Any:
        """Return the response to a call about a run's messages, or None if Flower has to respond."""
        if not self._runs.is_active(run_id):
            return None
        if name == "PushMessages":
            numbers, wanted = self._queue.send(run_id, request.messages_list, request.message_object_trees)
            return app_call(name).response(message_ids=numbers, objects_to_push=wanted, session_id=new_session())
        if name == "PullMessages":
            return _with_parcels(app_call(name).response(), self._queue.replies(run_id, request.message_ids))
        serve = {"PushObject": push_object, "PullObject": pull_object, "ConfirmMessageReceived": confirm}[name]
        return serve(self._queue, run_id, request)

    # -- other calls ---------------------------------------------------------------------------------------

    async def _acquire_task(self, scope: Scope, body: bytes, send: Send) -> None:
        """Return a task unless too many ServerApps are starting; if no task is pending, first wait for a submission.

        Flower would start all waiting ServerApps at once, and restart each ServerApp that has not reported after 30 s.
        With a dozen runs on a busy machine, there would soon be too many processes, and none could report in time.
        """
        with suppress(TimeoutError):
            if not self._pending or self._is_full():
                await asyncio.wait_for(self._submitted.wait(), ASK_SECONDS)
        self._submitted.clear()
        if self._is_full():
            await Response(b"", media_type=MEDIA_TYPE)(scope, _nothing, send)
            return
        messages = await self._flower(scope, body)
        if token := token_of_task(_content_of(messages)):
            self._starting[token] = time.monotonic()
            await self._give_time_to_start(token)
        self._pending = bool(token)
        await _pass_on(messages, send)

    async def _give_time_to_start(self, token: str) -> None:
        try:
            await run_in_threadpool(self._turns.give_time_to_start, token)
        except Exception as error:  # the app may still start within Flower's time limit
            log(WARNING, "posy: a ServerApp has only 30 s to start: %s", first_line(error))

    def _is_full(self) -> bool:
        earliest = time.monotonic() - START_SECONDS
        self._starting = {token: start for token, start in self._starting.items() if start > earliest}
        return len(self._starting) >= cores()

    async def _pull_task_input(self, scope: Scope, body: bytes, send: Send) -> None:
        """Record that a ServerApp has started, and give the ServerApp time to load its code on a busy machine."""
        messages, token = await self._flower(scope, body), _token_in(scope)
        if messages[0]["status"] == 200:
            await self._give_time_to_start(token)
        await _pass_on(messages, send)
        self._starting.pop(token, None)
        self._submitted.set()

    async def _start_run(self, scope: Scope, body: bytes, send: Send) -> None:
        """Install a run's code before its ServerApp starts, so that no two ServerApps install it at the same time."""
        messages = await self._flower(scope, body)
        fab = control_call("StartRun").request.FromString(body).fab
        if messages[0]["status"] == 200 and fab.content:
            try:
                await run_in_threadpool(install_whole, fab.content, fab.hash_str)
            except (OSError, BundleError) as error:
                log(ERROR, "posy: could not install the code %s, so Flower installs it: %s", fab.hash_str, error)
        await _pass_on(messages, send)
        self._pending = True
        self._submitted.set()

    async def _end_run(self, scope: Scope, body: bytes, send: Send) -> None:
        """Clear the cache of running runs after a call that may have ended a run."""
        messages = await self._flower(scope, body)
        self._runs.forget()
        await _pass_on(messages, send)

    async def _unregister_node(self, scope: Scope, body: bytes, send: Send) -> None:
        """Record that a node is no longer registered."""
        messages = await self._flower(scope, body)
        if messages[0]["status"] == 200:
            self._queue.nodes.leave(control_call("UnregisterNode").request.FromString(body).node_id)
        await _pass_on(messages, send)

    async def _flower(self, scope: Scope, body: bytes, path: str = "") -> list[Message]:
        """Return Flower's response to a request; if ``path`` is set, send the request to this path instead."""
        messages: list[Message] = []

        async def receive() -> Message:
            return {"type": "http.request", "body": body, "more_body": False}

        async def collect(message: Message) -> None:
            messages.append(message)

        if path:
            headers = [header for header in scope["headers"] if header[0] != b"content-length"]
            headers.append((b"content-length", str(len(body)).encode()))
            scope = {**scope, "path": path, "raw_path": path.encode(), "headers": headers}
        await self._app(scope, receive, collect)
        return messages


class Quiet(logging.Filter):
    """Drops two kinds of log records that do not help the operator.

    These are successful calls about messages, because each message needs several calls, and Flower's error about the
    nonexistent node in Posy's check of a ServerApp.
    """

    def __init__(self) -> None:
        super().__init__()
        self._paths = {app_call(name).path for name in MESSAGE_CALLS}

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether to log a request; the third field of uvicorn's record is the path, the fifth the status."""
        fields = record.args
        if isinstance(fields, tuple) and len(fields) >= 5 and fields[2] in self._paths and fields[4] == 200:
            return False
        return not str(record.msg).startswith(PROBE_REFUSED)


def start_sweeper(queue: MessageQueue) -> threading.Thread:
    """Start a thread that removes abandoned messages."""

    def sweep() -> None:
        for _ in itertools.count():
            time.sleep(SWEEP_SECONDS)
            try:
                queue.sweep()
            except Exception as error:
                if not can_be_retried(error):
                    log(ERROR, "posy: the sweep for abandoned messages failed", exc_info=error)

    thread = threading.Thread(target=sweep, name="posy-upkeep", daemon=True)
    thread.start()
    return thread


def first_line(error: Exception) -> str:
    """Return the first line of an error's message."""
    return str(error).partition("\n")[0]


def push_object(queue: MessageQueue, run_id: int, request: Any) -> Any:
    """Store an object of a message, and return the response."""
    return fleet_call("PushObject").response(stored=queue.store(run_id, request.object_id, request.object_content))


def pull_object(queue: MessageQueue, run_id: int, request: Any) -> Any:
    """Return a response with an object of a message, or None if no message in transit needs the object."""
    content = queue.find(run_id, request.object_id)
    if content is None:
        return None
    return fleet_call("PullObject").response(object_found=True, object_available=bool(content), object_content=content)


def confirm(queue: MessageQueue, run_id: int, request: Any) -> Any:
    """Record that a message was received, and return the response, or None if the message is not in transit."""
    in_transit = queue.confirm(run_id, request.message_object_id)
    return fleet_call("ConfirmMessageReceived").response() if in_transit else None


def _with_parcels(answer: Any, parcels: list[Parcel]) -> Any:
    answer.messages_list.extend(parcel.envelope for parcel in parcels)
    answer.message_object_trees.extend(parcel.tree for parcel in parcels)
    return answer


def _probe(run_id: int) -> bytes:
    """Return a request that has no effect, and that Flower accepts only from the run's ServerApp."""
    number = "0" * 64
    metadata = {
        "run_id": run_id,
        "message_id": number,
        "src_node_id": SERVER,
        "dst_node_id": SERVER + 1,  # nodes have large random ids
        "message_type": "query",
        "created_at": time.time(),
        "ttl": 60.0,
    }
    request = app_call("PushMessages").request(
        messages_list=[{"metadata": metadata, "content": {}}], message_object_trees=[{"object_id": number}]
    )
    content: bytes = request.SerializeToString(deterministic=True)
    return content


def _token_in(scope: Scope) -> str:
    tokens = [value for name, value in scope["headers"] if name == TOKEN_HEADER.encode()]
    return tokens[0].decode("latin-1") if len(tokens) == 1 else ""


def _content_of(messages: list[Message]) -> bytes:
    if messages[0]["status"] != 200:
        return b""
    return b"".join(message.get("body", b"") for message in messages[1:])


async def _pass_on(messages: list[Message], send: Send) -> None:
    for message in messages:
        await send(message)


async def _nothing() -> Message:
    return {"type": "http.disconnect"}


async def _body_of(receive: Receive) -> bytes:
    """Return a request's whole body, or raise ``ClientDisconnect`` if the caller has closed the connection."""
    parts = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)
