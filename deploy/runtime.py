"""A node's Runtime API without HTTP, for the node itself and for its worker.

Flower's node serves its Runtime API over HTTP, and a message takes about ten requests of several milliseconds. A warm
node and its worker share a socket. The node calls Flower's handlers directly (:class:`NodeState`), and the worker sends
the same calls through the socket (:class:`WorkerSocket`). :class:`Calls` has the methods of Flower's client.

On the socket, each entry is a JSON object in a line. A call of the worker, ``{"call", "number", "token", "size"}``, is
followed by the bytes of the request, and its answer, ``{"number", "size"}`` or ``{"number", "error"}``, by the bytes of
the response.
"""

import contextlib
import json
import queue
import socket
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import httpx
from flwr.proto import message_pb2, runtime_pb2
from flwr.supercore.error import FlowerError
from flwr.supercore.servicer.runtime import runtime_handlers as core_handlers
from flwr.supernode.servicer.runtime import runtime_handlers as handlers


class Call(NamedTuple):
    """A call of the Runtime API."""

    handler: Callable[..., Any]
    request: type[Any]
    response: type[Any]


CALLS = {
    "AcquireTask": Call(handlers.acquire_task, runtime_pb2.AcquireTaskRequest, runtime_pb2.AcquireTaskResponse),
    "SendTaskHeartbeat": Call(
        core_handlers.send_task_heartbeat,
        runtime_pb2.SendTaskHeartbeatRequest,
        runtime_pb2.SendTaskHeartbeatResponse,
    ),
    "PullTaskInput": Call(
        handlers.pull_task_input, runtime_pb2.PullTaskInputRequest, runtime_pb2.PullTaskInputResponse
    ),
    "PullMessages": Call(
        handlers.pull_messages, runtime_pb2.PullAppMessagesRequest, runtime_pb2.PullAppMessagesResponse
    ),
    "PullObject": Call(handlers.pull_object, message_pb2.PullObjectRequest, message_pb2.PullObjectResponse),
    "ConfirmMessageReceived": Call(
        handlers.confirm_message_received,
        message_pb2.ConfirmMessageReceivedRequest,
        message_pb2.ConfirmMessageReceivedResponse,
    ),
    "PushMessages": Call(
        handlers.push_messages, runtime_pb2.PushAppMessagesRequest, runtime_pb2.PushAppMessagesResponse
    ),
    "PushObject": Call(handlers.push_object, message_pb2.PushObjectRequest, message_pb2.PushObjectResponse),
    "PushTaskOutput": Call(
        handlers.push_task_output, runtime_pb2.PushTaskOutputRequest, runtime_pb2.PushTaskOutputResponse
    ),
}
WITHOUT_TASK = "AcquireTask"
"""The call that needs no token. Only the node itself makes it."""


class CallError(httpx.HTTPError):
    """A call of the Runtime API failed; Flower's client raises errors of this kind."""


class NodeState:
    """The state of the node in this process, which Flower creates when the node starts."""

    def __init__(self) -> None:
        self.flower: Any = None
        """Flower's state of the node; None before its first request for a message."""

    def call(self, name: str, token: str, request: Any) -> Any:
        """Return the response of a handler of Flower; raise :class:`CallError` if it fails."""
        if self.flower is None:
            raise CallError("the node has not started yet")
        if name == WITHOUT_TASK:
            return CALLS[name].handler(request, self.flower)
        task = self.flower.get_task_by_token(token)
        if task is None:
            raise CallError(f"{name}: the token of the task is not valid any more")
        try:
            return CALLS[name].handler(request, self.flower, task)
        except FlowerError as error:
            raise CallError(f"{name}: {error}") from error


class Calls:
    """The calls of the Runtime API with the token of a task, as methods with the names of Flower's client.

    Parameters
    ----------
    call : callable
        Makes a call from its name, the token and the request: :meth:`NodeState.call` or :meth:`WorkerSocket.call`.
    token : str
        The token; empty for the call that needs none.
    """

    def __init__(self, call: Callable[[str, str, Any], Any], token: str = "") -> None:
        self._call, self._token = call, token

    def __getattr__(self, name: str) -> Callable[[Any], Any]:
        if name not in CALLS:
            raise AttributeError(name)
        return partial(self._call, name, self._token)


def answer(state: NodeState, call: dict[str, Any], request: bytes) -> bytes:
    """Return the entry that answers a call of the worker."""
    try:
        kind = CALLS[call["call"]]
        if call["call"] == WITHOUT_TASK:
            raise CallError("the node gives out the tasks")
        response = state.call(call["call"], call["token"], kind.request.FromString(request)).SerializeToString()
    except Exception as error:
        return entry(number=call["number"], error=f"{type(error).__name__}: {error}")
    return entry(response, number=call["number"], size=len(response))


def size_of(call: dict[str, Any]) -> int:
    """Return the number of bytes of a request; raise ``ValueError`` for a malformed call."""
    size, number = call.get("size"), call.get("number")
    if type(size) is not int or size < 0 or type(number) is not int:
        raise ValueError(f"a call of the worker with size = {size!r} and number = {number!r}")
    return size


def entry(content: bytes = b"", **fields: Any) -> bytes:
    """Return an entry of the socket: a line with a JSON object, and bytes."""
    return json.dumps(fields).encode() + b"\n" + content


class WorkerSocket:
    """The worker's end of the socket to its node.

    Parameters
    ----------
    connection : socket.socket
        The connection.
    on_end : callable
        Called when the node has gone.
    """

    def __init__(self, connection: socket.socket, on_end: Callable[[], object]) -> None:
        self.tokens: queue.Queue[str] = queue.Queue()
        """The tokens of the tasks that the node passes to the worker."""
        self._connection, self._on_end = connection, on_end
        self._answers: queue.Queue[tuple[dict[str, Any], bytes]] = queue.Queue()
        self._calling, self._writing = threading.Lock(), threading.Lock()
        self._number = 0
        threading.Thread(target=self._listen, daemon=True).start()

    def report(self, **event: Any) -> None:
        """Report an event to the node; nothing happens if the node has gone, because this process ends too."""
        with self._writing:
            _send(self._connection, entry(**event))

    def call(self, name: str, token: str, request: Any) -> Any:
        """Return the response to a call of the Runtime API; raise :class:`CallError` if it fails."""
        content = request.SerializeToString()
        with self._calling:
            self._number += 1
            with self._writing:
                _send(
                    self._connection,
                    entry(content, call=name, number=self._number, token=token, size=len(content)),
                )
            head, response = self._answers.get()
            while head["number"] != self._number:  # the answer to a call that an exception has interrupted
                head, response = self._answers.get()
        if "error" in head:
            raise CallError(head["error"])
        return CALLS[name].response.FromString(response)

    def _listen(self) -> None:
        try:
            with contextlib.suppress(OSError), self._connection.makefile("rb") as stream:
                for line in stream:
                    head = json.loads(line)
                    if "token" in head:
                        self.tokens.put(head["token"])
                    else:
                        self._answers.put((head, stream.read(head.get("size", 0))))
        finally:
            self._on_end()


def _send(connection: socket.socket, content: bytes) -> None:
    with contextlib.suppress(OSError):  # the listening thread notices that the node has gone
        connection.sendall(content)
