"""How a node handles failed calls to its SuperLink. A gRPC server in this process fails as the tests configure it."""

import json
import logging
import re
import threading
import time
from collections.abc import Iterator
from concurrent import futures
from typing import Any

import grpc
import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Message, RecordDict

from posy.deploy import fleet as calling
from posy.deploy.fleet import Fleet, PartError, RunEndedError, push_until_expired
from posy.deploy.flower_internals import KEY_REFUSED, Packed, fleet_call, numbers_in, pack, unpack
from posy.server_app.in_process import InProcessGrid

Status = grpc.StatusCode
CALLS = {
    re.sub(r"(?:^|_)([a-z])", lambda match: match[1].upper(), name): name
    for name in (
        *("register_node", "activate_node", "deactivate_node", "unregister_node", "send_node_heartbeat"),
        *("pull_messages", "pull_object", "confirm_message_received", "push_messages", "push_object"),
    )
}
"""The methods of the server by the names of the calls."""


class SuperLink:
    """A server that answers a node after configured failures, and lists the missing parts of a reply."""

    def __init__(self) -> None:
        self.failures: dict[str, list[tuple[Status, str]]] = {}
        """The errors of the next calls with a name."""
        self.calls: list[str] = []
        self.message: Packed | None = None
        self.unready = 0
        """Number of requests for an object that has not arrived yet."""
        self.parts: dict[str, bytes] = {}
        self.replies: list[Any] = []
        self.refuses_parts = 0
        self.loses_answers = 0
        self.lock = threading.Lock()
        handlers = {name: self.handler(name) for name in CALLS}
        self.server = grpc.server(futures.ThreadPoolExecutor(8))
        self.server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("flwr.proto.Fleet", handlers),))
        self.address = f"127.0.0.1:{self.server.add_insecure_port('127.0.0.1:0')}"
        self.server.start()

    def handler(self, name: str) -> Any:
        call = fleet_call(name)

        def answer(request: Any, context: grpc.ServicerContext) -> Any:
            with self.lock:
                self.calls.append(name)
                if self.failures.get(name):
                    context.abort(*self.failures[name].pop(0))
                fields = getattr(self, CALLS[name])(request, context)
                return call.response(**fields)

        return grpc.unary_unary_rpc_method_handler(answer, call.request.FromString, call.response.SerializeToString)

    def register_node(self, request: Any, _: Any) -> dict[str, Any]:
        return {"node_id": 5}

    def activate_node(self, request: Any, _: Any) -> dict[str, Any]:
        return {"node_id": 5}

    def deactivate_node(self, request: Any, _: Any) -> dict[str, Any]:
        return {}

    def unregister_node(self, request: Any, _: Any) -> dict[str, Any]:
        return {}

    def send_node_heartbeat(self, request: Any, _: Any) -> dict[str, Any]:
        return {"success": True}

    def pull_messages(self, request: Any, _: Any) -> dict[str, Any]:
        if self.message is None:
            return {}
        return {"messages_list": [self.message.envelope], "message_object_trees": [self.message.tree]}

    def pull_object(self, request: Any, _: Any) -> dict[str, Any]:
        assert self.message is not None
        if self.unready:
            self.unready -= 1
            return {"object_found": True}
        content = self.message.objects.get(request.object_id)
        return {
            "object_found": content is not None,
            "object_available": bool(content),
            "object_content": content or b"",
        }

    def confirm_message_received(self, request: Any, _: Any) -> dict[str, Any]:
        return {}

    def push_messages(self, request: Any, _: Any) -> dict[str, Any]:
        self.replies.append(request.messages_list[0])
        missing = set(numbers_in(request.message_object_trees[0])) - self.parts.keys()
        return {"objects_to_push": sorted(missing), "session_id": str(len(self.replies))}

    def push_object(self, request: Any, context: Any) -> dict[str, Any]:
        if self.refuses_parts:
            self.refuses_parts -= 1
            return {"stored": False}
        self.parts[request.object_id] = request.object_content
        if self.loses_answers:
            self.loses_answers -= 1
            context.abort(Status.UNAVAILABLE, "Socket closed")
        return {"stored": True}


@pytest.fixture
def superlink() -> Iterator[SuperLink]:
    server = SuperLink()
    yield server
    server.server.stop(None)


@pytest.fixture
def fleet(superlink: SuperLink, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fleet]:
    """Return the connection of a node that retries after milliseconds."""
    monkeypatch.setattr(calling, "FIRST_PAUSE_SECONDS", 0.001)
    connection = Fleet(superlink.address, insecure=True)
    connection.join()
    superlink.calls.clear()
    yield connection
    connection.leave()


def message(ttl: float = 600.0) -> Packed:
    InProcessGrid(1)  # gives this process the identity that messages need
    arrays = ArrayRecord({name: Array(np.full(9, float(i))) for i, name in enumerate("ab")})
    return pack(Message(RecordDict({"arrays": arrays}), dst_node_id=5, message_type="train", ttl=ttl))


def reply(request: Packed) -> Packed:
    received = unpack(request.tree.object_id, request.objects)
    return pack(Message(received.content, reply_to=received))


def test_a_node_joins_and_leaves(superlink: SuperLink) -> None:
    node = Fleet(superlink.address, insecure=True)
    assert node.join() == 5
    node.leave()
    assert superlink.calls[:2] == ["RegisterNode", "ActivateNode"]
    assert superlink.calls[-2:] == ["DeactivateNode", "UnregisterNode"]


def test_transient_errors_are_retried(fleet: Fleet, superlink: SuperLink) -> None:
    codes = [Status.INTERNAL, Status.UNAVAILABLE, Status.UNKNOWN, Status.INTERNAL]
    superlink.failures["PullMessages"] = [(code, "failed") for code in codes]
    assert fleet.pull() is None
    assert superlink.calls.count("PullMessages") == 5


def test_a_call_that_keeps_failing_raises_its_error(
    fleet: Fleet, superlink: SuperLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calling, "PATIENCE_SECONDS", 0.05)
    superlink.failures["PullMessages"] = [(Status.INTERNAL, "")] * 10_000
    with pytest.raises(grpc.RpcError) as raised:
        fleet.pull()
    assert raised.value.code() == Status.INTERNAL
    superlink.failures["PullMessages"] = [(Status.INTERNAL, "")]
    assert fleet.pull() is None  # the next call has a new time limit
    superlink.failures["PullMessages"] = [(Status.PERMISSION_DENIED, "not running")]
    with pytest.raises(RunEndedError):
        fleet.pull()


def test_calls_have_a_timeout(fleet: Fleet, superlink: SuperLink, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(superlink, "pull_messages", lambda request, context: time.sleep(0.5) or {})
    with pytest.raises(grpc.RpcError) as raised:
        fleet.call("PullMessages", timeout=0.1, node={"node_id": 5})
    assert raised.value.code() == Status.DEADLINE_EXCEEDED


def test_a_refused_key_is_retried_until_the_activation_timeout(
    superlink: SuperLink, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(calling, "FIRST_PAUSE_SECONDS", 0.001)
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)
    refused = (Status.FAILED_PRECONDITION, json.dumps({"code": KEY_REFUSED, "public_message": "Failed"}))
    superlink.failures["ActivateNode"] = [refused, refused]
    node = Fleet(superlink.address, insecure=True)
    assert node.join() == 5
    node.leave()
    assert caplog.text.count("does not accept this node's key") == 1
    monkeypatch.setattr(calling, "ACTIVATION_SECONDS", 0.0)
    for error in (refused, (Status.FAILED_PRECONDITION, "")):  # any other refusal is final
        superlink.failures["ActivateNode"] = [error]
        with pytest.raises(grpc.RpcError):
            Fleet(superlink.address, insecure=True).join()


def test_untrusted_certificates_stop_a_node_only_before_its_first_connection(
    superlink: SuperLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calling, "FIRST_PAUSE_SECONDS", 0.001)
    untrusted = (Status.UNAVAILABLE, "Ssl handshake failed: CERTIFICATE_VERIFY_FAILED")
    superlink.failures["RegisterNode"] = [untrusted]
    with pytest.raises(grpc.RpcError):
        Fleet(superlink.address, insecure=True).join()
    superlink.failures["RegisterNode"] = [(Status.UNAVAILABLE, "Ssl handshake failed: connection reset")]
    node = Fleet(superlink.address, insecure=True)
    node.join()
    superlink.failures["PullMessages"] = [untrusted]
    assert node.pull() is None
    node.leave()


def test_a_message_with_all_parts_is_confirmed(fleet: Fleet, superlink: SuperLink) -> None:
    superlink.message, superlink.unready = message(), 3
    pulled = fleet.pull()
    assert pulled is not None
    assert fleet.pull_objects(*pulled) == superlink.message.objects
    assert superlink.calls[-1] == "ConfirmMessageReceived"


def test_a_message_with_missing_parts_is_not_confirmed(
    fleet: Fleet, superlink: SuperLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    superlink.message = message()
    pulled = fleet.pull()
    assert pulled is not None
    superlink.message.objects.popitem()
    with pytest.raises(PartError):
        fleet.pull_objects(*pulled)
    superlink.unready = 10_000
    monkeypatch.setattr(calling, "PART_SECONDS", 0.05)
    with pytest.raises(PartError):
        fleet.pull_objects(*pulled)
    assert "ConfirmMessageReceived" not in superlink.calls


def test_a_reply_arrives_complete_despite_errors(fleet: Fleet, superlink: SuperLink) -> None:
    # The announcement fails, the answer to a part is lost, and the server refuses a part.
    superlink.failures["PushMessages"] = [(Status.INTERNAL, "")]
    superlink.loses_answers, superlink.refuses_parts = 1, 1
    answer = reply(message())
    push_until_expired(fleet, answer, 1.0)
    assert superlink.parts == answer.objects
    assert len(superlink.replies) == 2
    assert {each.metadata.message_id for each in superlink.replies} == {answer.tree.object_id}


def test_an_expired_reply_is_dropped(
    fleet: Fleet, superlink: SuperLink, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)
    monkeypatch.setattr(calling, "PATIENCE_SECONDS", 0.0)
    superlink.failures["PushMessages"] = [(Status.INTERNAL, "")] * 10_000
    push_until_expired(fleet, reply(message(ttl=0.3)), 1.0)
    assert "was lost: INTERNAL" in caplog.text


def test_a_reply_to_a_finished_run_is_dropped_at_once(fleet: Fleet, superlink: SuperLink) -> None:
    superlink.failures["PushMessages"] = [(Status.PERMISSION_DENIED, "not running")]
    push_until_expired(fleet, reply(message()), 1.0)
    assert superlink.calls.count("PushMessages") == 1


def test_heartbeats_continue_after_errors(superlink: SuperLink, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calling, "FIRST_PAUSE_SECONDS", 0.001)
    monkeypatch.setattr(calling, "HEARTBEAT_SECONDS", 5.02)
    answers = iter([{"success": False}])
    monkeypatch.setattr(superlink, "send_node_heartbeat", lambda request, context: next(answers, {"success": True}))
    superlink.failures["SendNodeHeartbeat"] = [(Status.INTERNAL, ""), (Status.UNAUTHENTICATED, "")]
    node = Fleet(superlink.address, insecure=True)
    node.join()
    end = time.monotonic() + 10
    while superlink.calls.count("SendNodeHeartbeat") < 6:
        assert time.monotonic() < end
        time.sleep(0.01)
    node.leave()
