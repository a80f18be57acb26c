"""The Runtime API of a node through the socket of its worker, and the middleware of the SuperLink's HTTP API."""

import asyncio
import hashlib
import queue
import socket
import struct
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Context, Message, RecordDict
from flwr.common.constant import SubStatus
from flwr.supercore.constant import TaskType
from flwr.supercore.fab import Fab
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity
from flwr.supernode import start_client_internal
from flwr.supernode.nodestate import NodeStateFactory
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.testclient import TestClient

from posy.deploy.internals import Task, acquire_task
from posy.deploy.middleware import simplified
from posy.deploy.node import Worker
from posy.deploy.runtime import CallError, Calls, NodeState, WorkerSocket

RUN, NODE = 7, 5


@pytest.fixture
def state(monkeypatch: pytest.MonkeyPatch) -> NodeState:
    """Return the state of a node that has one message."""
    for name, value in {"_run_id": RUN, "_node_id": 1, "_task_id": 3}.items():
        monkeypatch.setattr(TaskIdentity, name, value)
    store = ObjectStoreFactory()
    node = NodeState()
    node.flower = NodeStateFactory(objectstore_factory=store).state()
    run = Run.create_empty(RUN)
    run.fab_hash = hashlib.sha256(b"code").hexdigest()
    node.flower.store_run(run)
    node.flower.set_run_series_context(run.series_id, Context(RUN, NODE, {}, RecordDict(), {}))
    node.flower.store_fab(Fab(run.fab_hash, b"code", {}))
    content = RecordDict({"arrays": ArrayRecord({"a": Array(np.arange(300_000.0)), "b": Array(np.ones(2))})})
    message = Message(content, dst_node_id=NODE, message_type="train", ttl=600.0)
    message.metadata.__dict__["_message_id"] = message.object_id
    start_client_internal._insert_message(message, node.flower, store.store())
    node.flower.create_task(TaskType.CLIENT_APP, RUN, run.fab_hash)
    return node


@pytest.fixture
def worker(state: NodeState) -> Iterator[WorkerSocket]:
    """Return the worker's end of a socket that the node answers."""
    node_end, worker_end = socket.socketpair()
    ended = threading.Event()
    node: Any = Worker(None, node_end, None, None, state)  # type: ignore[arg-type]
    node.events = Events()
    threading.Thread(target=node._listen, daemon=True).start()
    connection = WorkerSocket(worker_end, ended.set)
    connection.node, connection.events = node, node.events.found  # type: ignore[attr-defined]
    yield connection
    node_end.shutdown(socket.SHUT_RDWR)
    assert ended.wait(5), "the worker notices that its node has gone"
    node_end.close()
    worker_end.close()


class Events:
    """Collects the events of a worker."""

    def __init__(self) -> None:
        self.found: list[Any] = []
        self.put = self.found.append


def test_a_message_and_its_reply_go_through_the_socket(state: NodeState, worker: Any) -> None:
    token = acquire_task(Calls(state.call))
    assert token and acquire_task(Calls(state.call)) is None
    worker.node.hand(token)
    assert worker.tokens.get(timeout=5) == token
    task = Task(Calls(worker.call, token))
    message, context, run, fab = task.pull()
    np.testing.assert_array_equal(message.content.array_records["arrays"]["a"].numpy(), np.arange(300_000.0))
    assert (context.node_id, run.run_id, fab.content) == (NODE, RUN, b"code")
    worker.report(event="message", seconds=3.0)
    reply = Message(message.content, reply_to=message)
    task.push(reply, context)
    context.state["kept"] = ArrayRecord({"x": Array(np.ones(3))})
    task.finish(context)
    worker.report(event="done")
    (sent,) = state.flower.get_messages(is_reply=True)
    assert sent.metadata.reply_to_message_id == message.metadata.message_id
    assert "kept" in state.flower.get_run_series_context(run.series_id).state
    [finished] = state.flower.get_tasks()
    assert finished.status.sub_status == SubStatus.COMPLETED
    for _ in range(100):
        if len(worker.events) == 2:
            break
        threading.Event().wait(0.01)
    assert [event["event"] for event in worker.events] == ["message", "done"]


def test_a_failed_call_is_an_error_of_one_line(state: NodeState, worker: Any) -> None:
    token = acquire_task(Calls(state.call))
    assert token
    with pytest.raises(CallError, match="the token of the task is not valid"):
        Task(Calls(worker.call, "stolen")).beat()
    with pytest.raises(CallError, match="the node gives out the tasks"):
        acquire_task(Calls(worker.call, token))  # type: ignore[arg-type]
    Task(Calls(worker.call, token)).beat()  # the socket is still in order
    with pytest.raises(CallError, match="Failed to start task"):
        for _ in range(2):  # the input of a task is available once
            Task(Calls(state.call, token)).pull()
    with pytest.raises(AttributeError, match="StartAutomation"):
        Calls(worker.call, token).StartAutomation  # noqa: B018
    with pytest.raises(CallError, match="has not started"):
        acquire_task(Calls(NodeState().call))


def test_calls_of_several_threads_have_their_own_answers(state: NodeState, worker: Any) -> None:
    token = acquire_task(Calls(state.call))
    errors: list[str] = []

    def call(number: int) -> None:
        for _ in range(50):
            try:
                Task(Calls(worker.call, str(token) if number % 2 else "wrong")).beat()
                right = bool(number % 2)
            except CallError:
                right = not number % 2
            if not right:
                errors.append(f"thread {number} has the answer of another one")

    threads = [threading.Thread(target=call, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


@pytest.mark.parametrize(
    "content",
    [b'{"call": "PullObject"}\n', b"5\n", b'{"call": "X", "number": 1, "size": -1}\n', b'{"event2": 1}\n', b"{\n"],
)
def test_a_malformed_entry_ends_the_worker_and_not_its_node(state: NodeState, content: bytes) -> None:
    """Code of a run in the worker process could otherwise let the node wait without end."""
    node_end, worker_end = socket.socketpair()
    node: Any = Worker(None, node_end, None, queue.Queue(), state)  # type: ignore[arg-type]
    listener = threading.Thread(target=node._listen, daemon=True)
    listener.start()
    worker_end.sendall(content)
    assert node.events.get(timeout=5) is None
    listener.join(5)
    assert not listener.is_alive()


def test_a_worker_that_does_not_read_is_given_up(state: NodeState) -> None:
    node_end, worker_end = socket.socketpair()
    node_end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", 0, 200_000))
    node: Any = Worker(None, node_end, None, queue.Queue(), state)  # type: ignore[arg-type]
    threading.Thread(target=node._listen, daemon=True).start()
    begun = time.monotonic()
    node._send(bytes(50_000_000))
    assert time.monotonic() - begun < 5
    assert node.events.get(timeout=5) is None
    worker_end.close()


def test_an_interrupted_call_does_not_shift_the_answers(state: NodeState, worker: Any) -> None:
    token = acquire_task(Calls(state.call))
    worker._answers.put(({"number": 0, "error": "for a call that an exception has interrupted"}, b""))
    Task(Calls(worker.call, str(token))).beat()


# -- middleware --------------------------------------------------------------------------------------------


class RefusedError(Exception):
    """An error that a middleware turns into a response."""


class Translating(BaseHTTPMiddleware):
    """Reads the request before the handler, and changes its response."""

    async def dispatch(self, request: Request, call_next: Any) -> Response:
        request.state.read = await request.body()
        response: Response = await call_next(request)
        response.headers["X-Length"] = str(len(request.state.read))
        return response


class Catching(BaseHTTPMiddleware):
    """Answers an error of the handler."""

    async def dispatch(self, request: Request, call_next: Any) -> Response:
        try:
            response: Response = await call_next(request)
        except RefusedError as error:
            return JSONResponse({"detail": str(error)}, status_code=409)
        return response


async def echo(request: Request) -> Response:
    body = await request.body()
    if body == b"refuse":
        raise RefusedError("no")
    assert request.state.read == body
    return Response(body[::-1], 201, {"X-Own": "1"})


@pytest.mark.parametrize("path", ["/v1/runtime/echo", "/v1/control/echo"])
def test_responses_are_those_of_starlettes_middleware(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    middleware = [Middleware(Catching), Middleware(Translating), Middleware(Translating)]
    app = Starlette(routes=[Route(path, echo, methods=["POST"])], middleware=middleware)
    bodies = (b"", b"abc", bytes(range(256)) * 10_000, b"refuse")
    expected = [facts(TestClient(app).post(path, content=body)) for body in bodies]
    assert [code for code, *_ in expected] == [201, 201, 201, 409]
    streamed: list[str] = []
    original = BaseHTTPMiddleware.__call__

    async def noted(self: Any, scope: Any, receive: Any, send: Any) -> None:
        streamed.append(scope["path"])
        await original(self, scope, receive, send)

    monkeypatch.setattr(BaseHTTPMiddleware, "__call__", simplified(noted))
    assert [facts(TestClient(app).post(path, content=body)) for body in bodies] == expected
    assert bool(streamed) == ("control" in path)


def test_a_request_that_is_cut_off_is_not_handled() -> None:
    handled: list[bytes] = []

    async def handler(scope: Any, receive: Any, send: Any) -> None:
        handled.append((await receive())["body"])

    parts = iter([{"type": "http.request", "body": b"half", "more_body": True}, {"type": "http.disconnect"}])

    async def receive() -> Any:
        return next(parts)

    async def call() -> None:
        await simplified(BaseHTTPMiddleware.__call__)(
            Translating(handler), {"type": "http", "path": "/v1/runtime/push-object"}, receive, receive
        )

    with pytest.raises(ClientDisconnect):
        asyncio.run(call())
    assert handled == []


def facts(response: Any) -> tuple[int, bytes, dict[str, str]]:
    return response.status_code, response.content, dict(response.headers)
