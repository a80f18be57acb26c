"""What a node does when calls to its SuperLink fail; the calls are plain functions here."""

import inspect
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from threading import Event
from typing import Any

import grpc
import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Message, RecordDict
from flwr.client.grpc_rere_client import connection
from flwr.common.constant import ErrorCode
from flwr.supercore import heartbeat
from flwr.supercore.corestate import in_memory_corestate
from flwr.supercore.error import ApiErrorCode
from flwr.supercore.inflatable import inflatable_utils as transfer
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supercore.run import RunNotRunningException
from flwr.supercore.task_identity import TaskIdentity
from flwr.supernode import start_client_internal
from flwr.supernode.nodestate import NodeStateFactory

from posy.deploy import loop
from posy.deploy.runtime import NodeState

RUN = 7


class Failure(grpc.RpcError):
    """A call's failure."""

    def __init__(self, code: grpc.StatusCode, details: str = "") -> None:
        self.code, self.details = lambda: code, lambda: details


INTERNAL = Failure(grpc.StatusCode.INTERNAL, "Internal server error.")


def failing(*errors: Exception) -> Callable[..., str]:
    """Return a call that fails with these errors, one after the other, and then answers."""
    left = list(errors)

    def call(*_: object, **__: object) -> str:
        if left:
            raise left.pop(0)
        return "answer"

    return call


@pytest.fixture
def invoker(monkeypatch: pytest.MonkeyPatch) -> loop.Invoker:
    monkeypatch.setattr(loop, "FIRST_PAUSE_SECONDS", 0.001)
    return loop.Invoker(start_client_internal._make_fleet_connection_retry_invoker())


@pytest.fixture(autouse=True)
def _server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process make messages as a ServerApp does."""
    monkeypatch.setattr(TaskIdentity, "_run_id", RUN)
    monkeypatch.setattr(TaskIdentity, "_node_id", 1)
    monkeypatch.setattr(TaskIdentity, "_task_id", 3)


def message() -> Message:
    content = RecordDict({"arrays": ArrayRecord({name: Array(np.full(9, float(i))) for i, name in enumerate("ab")})})
    made = Message(content, dst_node_id=5, message_type="train", ttl=600.0)
    made.metadata.__dict__["_message_id"] = "asked"
    return made


@pytest.fixture
def node() -> Iterator[tuple[Any, Any]]:
    """Return the state and the object store of a node that has one reply to hand in."""
    store = ObjectStoreFactory()
    state = NodeStateFactory(objectstore_factory=store).state()
    asked = message()
    state.store_message(asked)
    start_client_internal._insert_message(Message(asked.content, reply_to=asked), state, store.store())
    return state, store.store()


class SuperLink:
    """Takes replies, after some failures; like the real one it says what it lacks of a message."""

    def __init__(self, *refusals: Exception, lost: Sequence[Exception] = ()) -> None:
        self.refuse, self.lose = failing(*refusals), failing(*lost)
        self.parts: dict[str, bytes] = {}
        self.replies: list[Message] = []
        self.sent = 0

    def send(self, reply: Message, tree: Any, runtime: float) -> tuple[set[str], str]:
        self.refuse()
        self.sent += 1
        self.replies.append(reply)
        parts = {part.object_id for part in loop.iterate_object_tree(tree)}
        return parts - self.parts.keys(), str(self.sent)

    def push(self, run: int, session: str, part: str, content: bytes) -> None:
        if session != str(self.sent) or part in self.parts:
            raise transfer.ObjectPushError(part, run, session)
        if len(self.parts) == 2:
            self.parts[part] = content  # it was taken, but the answer is lost
            self.lose()
        self.parts[part] = content


def kept(state: Any, store: Any) -> int:
    return len(state.msg_store) + len(store)


def test_calls_that_fail_for_a_passing_reason_are_made_again(invoker: loop.Invoker) -> None:
    lost = Failure(grpc.StatusCode.UNAVAILABLE, "Socket closed")
    assert invoker.invoke(failing(INTERNAL, lost, Failure(grpc.StatusCode.UNKNOWN), INTERNAL)) == "answer"


def test_calls_that_go_on_failing_are_given_up(invoker: loop.Invoker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "PATIENCE_SECONDS", 0.05)
    with pytest.raises(Failure) as raised:
        invoker.invoke(failing(*[INTERNAL] * 10_000))
    assert raised.value.code() == grpc.StatusCode.INTERNAL
    assert invoker.invoke(failing(INTERNAL)) == "answer"  # the next call has its own time
    with pytest.raises(RunNotRunningException):
        invoker.invoke(failing(Failure(grpc.StatusCode.PERMISSION_DENIED)))


def test_every_call_has_an_end(invoker: loop.Invoker) -> None:
    assert invoker.invoke(lambda *, timeout: timeout) == loop.CALL_SECONDS
    assert invoker.invoke(lambda *, timeout: timeout, timeout=5) == 5


def test_a_refused_key_is_tried_until_its_last_node_must_be_gone(
    invoker: loop.Invoker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)
    told = f'{{"code": {int(ApiErrorCode.FLEET_NODE_ACTIVATION_FAILED)}, "public_message": "Failed"}}'
    refused = Failure(grpc.StatusCode.FAILED_PRECONDITION, told)
    assert invoker.invoke(failing(refused, refused)) == "answer"
    assert caplog.text.count("the SuperLink does not accept this node's key") == 1
    monkeypatch.setattr(loop, "ACTIVATION_SECONDS", 0.0)
    with pytest.raises(Failure):
        invoker.invoke(failing(refused))
    with pytest.raises(Failure):  # any other refusal stands
        invoker.invoke(failing(Failure(grpc.StatusCode.FAILED_PRECONDITION)))


def test_certificates_that_do_not_fit_end_a_node_only_before_it_was_connected(invoker: loop.Invoker) -> None:
    untrusted = Failure(grpc.StatusCode.UNAVAILABLE, "Ssl handshake failed: CERTIFICATE_VERIFY_FAILED")
    with pytest.raises(Failure):
        invoker.invoke(failing(untrusted))
    cut = Failure(grpc.StatusCode.UNAVAILABLE, "Ssl handshake failed: connection reset")
    assert invoker.invoke(failing(cut)) == "answer"
    assert invoker.invoke(failing(untrusted)) == "answer"


def test_a_reply_is_handed_in_whole_whatever_fails_on_the_way(
    node: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "FIRST_PAUSE_SECONDS", 0.001)
    # Its announcement fails; then the answer to one of its parts is lost, which Flower takes for a refusal of the rest.
    superlink = SuperLink(INTERNAL, lost=[Failure(grpc.StatusCode.UNAVAILABLE, "Socket closed")])
    state, store = node
    (reply,) = [entry.message for entry in state.msg_store.values() if entry.message.metadata.reply_to_message_id]
    parts = {part.object_id for part in loop.iterate_object_tree(store.get_object_tree(reply.metadata.message_id))}
    loop.push_replies(Event(), state, store, superlink.send, superlink.push)
    assert superlink.parts.keys() == parts
    assert superlink.sent == 2
    assert kept(state, store) == 0


def test_a_reply_that_has_no_time_left_is_dropped(node: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "FIRST_PAUSE_SECONDS", 0.001)
    state, store = node
    for entry in state.msg_store.values():
        entry.message.metadata.ttl = time.time() - entry.message.metadata.created_at + 0.05
    loop.push_replies(Event(), state, store, SuperLink(*[INTERNAL] * 10_000).send, lambda *_: None)
    assert kept(state, store) == 0


def test_a_reply_to_a_run_that_is_over_is_dropped_at_once(node: tuple[Any, Any]) -> None:
    state, store = node
    superlink = SuperLink(RunNotRunningException())
    loop.push_replies(Event(), state, store, superlink.send, superlink.push)
    assert superlink.sent == kept(state, store) == 0


def test_a_reply_of_which_the_worker_has_not_handed_in_all_is_never_sent(
    node: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "PART_SECONDS", 0.05)
    state, store = node
    whole = store.get
    (reply,) = [entry.message for entry in state.msg_store.values() if entry.message.metadata.reply_to_message_id]
    parts = {part.object_id for part in loop.iterate_object_tree(store.get_object_tree(reply.metadata.message_id))}
    monkeypatch.setattr(store, "get", lambda part: b"" if part in parts else whole(part))
    superlink = SuperLink()
    loop.push_replies(Event(), state, store, superlink.send, superlink.push)
    # What is sent instead says that the reply is lost.
    assert superlink.sent == 1
    assert not parts & superlink.parts.keys()
    (sent,) = superlink.replies
    assert (sent.error.code, sent.metadata.reply_to_message_id) == (ErrorCode.MESSAGE_UNAVAILABLE, "asked")
    assert kept(state, store) == 0


def test_a_worker_that_has_done_without_a_reply_is_answered_for(node: tuple[Any, Any]) -> None:
    state, store = node
    (reply,) = state.get_messages(is_reply=True)
    state.delete_messages(message_ids=[reply.metadata.message_id])
    store.delete(reply.metadata.message_id)
    superlink, lost = SuperLink(), Event()
    lost.set()
    loop.push_replies(lost, state, store, superlink.send, superlink.push)
    assert [sent.metadata.reply_to_message_id for sent in superlink.replies] == ["asked"]
    assert kept(state, store) == 0
    assert not lost.is_set()


def test_a_message_that_comes_without_its_parts_is_answered(node: tuple[Any, Any]) -> None:
    state, store = node
    state.get_messages(is_reply=True)  # the reply that was there is under way
    came = message()
    came.metadata.__dict__["_message_id"] = "second"

    def pull(*, receive: Callable[[], Any], **_: object) -> None:
        assert receive()[0] is came

    run = loop.pull_or_push(pull, node_state=NodeState(), state=state, receive=lambda: (came, None), object_store=store)
    assert run == RUN
    (reply,) = state.get_messages(is_reply=True)
    assert reply.error.code == ErrorCode.MESSAGE_UNAVAILABLE
    assert reply.metadata.reply_to_message_id == "second"


def test_a_failed_call_for_messages_does_not_end_the_node(node: tuple[Any, Any]) -> None:
    state, store = node
    state.get_messages(is_reply=True)

    def pull(*, receive: Callable[[], Any], **_: object) -> None:
        receive()

    def receive() -> None:
        raise INTERNAL

    assert loop.pull_or_push(pull, node_state=NodeState(), state=state, receive=receive, object_store=store) is None


def test_heartbeats_go_on_after_any_error() -> None:
    errors = [INTERNAL, RuntimeError("Heartbeat failed unexpectedly")]

    def beat() -> bool:
        if errors:
            raise errors.pop()
        return True

    sender = loop.HeartbeatSender(beat)
    for _ in range(2):
        with pytest.raises(heartbeat.HeartbeatFailure):
            sender._heartbeat()
    sender._heartbeat()


def test_the_names_of_flower_that_a_node_replaces_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    replaced = {}
    monkeypatch.setattr(
        loop, "put", lambda module, name, value: replaced.update({(module, name): getattr(module, name)})
    )
    loop.make_steadfast(Event(), NodeState())
    assert replaced.keys() == {
        (start_client_internal, "_make_fleet_connection_retry_invoker"),
        (start_client_internal, "_pull_and_store_message"),
        (start_client_internal, "_push_messages"),
        (connection, "HeartbeatSender"),
        (connection, "HEARTBEAT_DEFAULT_INTERVAL"),
        (heartbeat, "HEARTBEAT_DEFAULT_INTERVAL"),
        (in_memory_corestate, "HEARTBEAT_DEFAULT_INTERVAL"),
        (transfer, "get_num_workers"),
    }
    pull = inspect.signature(start_client_internal._pull_and_store_message).parameters
    assert {"state", "object_store", "receive"} <= pull.keys()
    push = inspect.signature(start_client_internal._push_messages).parameters
    assert list(push) == ["state", "object_store", "send", "push_object"]
    with pytest.raises(AttributeError):
        monkeypatch.undo()
        loop.put(start_client_internal, "no_such_name", None)
