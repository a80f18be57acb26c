"""The Runtime API of a node through the socket of its worker, and the SuperLink's calls without FastAPI."""

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
from flwr.proto import message_pb2
from flwr.supercore.constant import TaskType
from flwr.supercore.fab import Fab
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity
from flwr.supernode import start_client_internal
from flwr.supernode.nodestate import NodeStateFactory
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.testclient import TestClient

from posy.deploy import middleware
from posy.deploy.internals import Task, acquire_task
from posy.deploy.middleware import KnownCallers
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


# -- calls of the SuperLink without FastAPI ----------------------------------------------------------------

PATH = "/v1/runtime/pull-object"
REQUEST = message_pb2.PullObjectRequest(object_id="a").SerializeToString()
HEADERS = {"flwr-task-token": "token", "content-type": "application/protobuf", "version": "1"}


class SuperLink:
    """A SuperLink that counts the calls which Flower's own stack handles."""

    def __init__(self) -> None:
        self.tasks: dict[str, str] = {"token": "task"}
        self.error: Exception | None = None
        self.calls: list[tuple[str, str]] = []
        """The object and the task of each call of the handler."""
        self.by_flower = 0
        short = Middleware(KnownCallers, state=lambda: self, handlers=self)
        routes = [Route(path, self.respond, methods=["POST"]) for path in (PATH, "/v1/runtime/get-nodes")]
        self.client = TestClient(Starlette(routes=routes, middleware=[short]))

    def get_task_by_token(self, token: str) -> str | None:
        return self.tasks.get(token)

    def pull_object(self, request: Any, state: Any, task: str) -> Any:
        assert state is self
        if self.error is not None:
            raise self.error
        self.calls.append((request.object_id, task))
        return message_pb2.PullObjectResponse(object_found=True, object_content=b"content")

    async def respond(self, request: Request) -> Response:
        self.by_flower += 1
        token, body = request.headers.get("flwr-task-token", ""), await request.body()
        if token not in self.tasks:
            return JSONResponse({"detail": "no task"}, 401)
        if self.error is not None:
            return JSONResponse({"detail": "failed"}, 409)
        response = self.pull_object(message_pb2.PullObjectRequest.FromString(body), self, self.tasks[token])
        return Response(response.SerializeToString(), media_type="application/protobuf")

    def post(self, path: str = PATH, **headers: str) -> tuple[int, bytes, dict[str, str]]:
        response = self.client.post(path, content=REQUEST, headers=HEADERS | headers)
        return response.status_code, response.content, dict(response.headers)


def test_a_known_caller_receives_the_response_of_flowers_stack() -> None:
    superlink = SuperLink()
    first, second = superlink.post(), superlink.post()
    assert first == second
    assert first[0] == 200
    assert superlink.calls == [("a", "task")] * 2
    assert superlink.by_flower == 1


@pytest.mark.parametrize("header", ["flwr-task-token", "version", "content-type"])
def test_flower_checks_a_caller_whose_headers_differ(header: str) -> None:
    superlink = SuperLink()
    superlink.tasks["other"] = "other task"
    superlink.post()
    superlink.post(**{header: "other"})
    assert superlink.by_flower == 2


def test_flower_refuses_an_unknown_token_each_time() -> None:
    superlink = SuperLink()
    superlink.post()
    codes = [superlink.post(**{"flwr-task-token": "stolen"})[0] for _ in range(3)]
    assert codes == [401] * 3
    assert superlink.by_flower == 4
    assert superlink.calls == [("a", "task")]


def test_flower_answers_a_caller_whose_task_has_ended() -> None:
    superlink = SuperLink()
    superlink.post()
    superlink.tasks.clear()
    assert superlink.post()[0] == 401
    superlink.tasks["token"] = "next task"
    assert superlink.post()[0] == 200
    assert superlink.by_flower == 3, "the refusal has made the caller unknown"


def test_flower_answers_an_error_of_a_handler() -> None:
    superlink = SuperLink()
    superlink.post()
    superlink.error = RuntimeError("secret detail")
    assert superlink.post()[:2] == (409, b'{"detail":"failed"}')
    superlink.error = None
    assert superlink.post()[0] == 200


def test_other_paths_and_two_tokens_have_no_short_way() -> None:
    superlink = SuperLink()
    for _ in range(2):
        superlink.post("/v1/runtime/get-nodes")
    assert superlink.by_flower == 2
    twice = [*HEADERS.items(), ("flwr-task-token", "token")]
    for _ in range(2):
        superlink.client.post(PATH, content=REQUEST, headers=twice)
    assert superlink.by_flower == 4


def test_a_limited_number_of_callers_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(middleware, "MOST_CALLERS", 2)
    superlink = SuperLink()
    for version in ("1", "2", "3", "1"):
        superlink.post(version=version)
    assert superlink.by_flower == 4
    superlink.post(version="1")
    assert superlink.by_flower == 4


def test_a_request_that_is_cut_off_is_not_handled() -> None:
    superlink = SuperLink()
    superlink.post()
    parts = iter([{"type": "http.request", "body": b"half", "more_body": True}, {"type": "http.disconnect"}])

    async def receive() -> Any:
        return next(parts)

    async def refuse(*_: Any) -> None:
        raise AssertionError("handled")

    callers = KnownCallers(refuse, lambda: superlink, superlink)
    with pytest.raises(ClientDisconnect):
        asyncio.run(callers({"type": "http", "method": "POST", "path": PATH, "headers": []}, receive, refuse))
