"""The SuperLink's message queue in memory, and the calls that Posy serves in front of Flower's SuperLink."""

import hashlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.app.message import make_message
from flwr.app.metadata import Metadata
from flwr.cli.build import build_fab_from_files
from flwr.common.constant import SubStatus
from flwr.proto.fleet_pb2_grpc import add_FleetServicer_to_server
from flwr.proto.runtime_pb2 import AcquireTaskRequest, PullTaskInputRequest, PushTaskOutputRequest
from flwr.server.superlink.fleet.grpc_rere.fleet_servicer import FleetServicer
from flwr.server.superlink.fleet.grpc_rere.node_auth_server_interceptor import NodeAuthServerInterceptor
from flwr.server.superlink.linkstate import LinkStateFactory
from flwr.supercore.constant import NOOP_FEDERATION_ID, TaskType
from flwr.supercore.fab import Fab
from flwr.supercore.interceptors import RpcErrorTranslationServerInterceptor
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.superlink import main
from flwr.superlink.federation import NoOpFederationManager
from starlette.testclient import TestClient

from posy.deploy import front, message_queue
from posy.deploy.database import Turns
from posy.deploy.fleet import Fleet, PartError, RunEndedError
from posy.deploy.flower_internals import MEDIA_TYPE, Packed, app_call, pack, packed_error, unpack
from posy.deploy.front import AppCalls, AskAgain, NodeCalls, Quiet, Runs
from posy.deploy.message_queue import SERVER, MessageQueue
from posy.flower import ErrorCode

RUN, NODE = 7, 5


def packed(node: int = NODE, run: int = RUN, ttl: float = 100.0, value: float = 1.0, kind: str = "train") -> Packed:
    """Return a message of a run to a node, with two arrays."""
    metadata = Metadata(run, "", SERVER, node, "", "1", time.time(), ttl, kind)
    arrays = ArrayRecord({"a": Array(np.full(9, value)), "b": Array(np.ones(3))})
    return pack(make_message(metadata, RecordDict({"arrays": arrays, "config": ConfigRecord({"v": value})})))


def reply_to(message: Packed) -> Packed:
    request = unpack(message.tree.object_id, message.objects)
    return pack(Message(RecordDict({"config": ConfigRecord({"answer": 1})}), reply_to=request))


def send(queue: MessageQueue, message: Packed, *, complete: bool = True) -> list[str]:
    """Push a message as a ServerApp does, and return its missing objects."""
    [number], wanted = queue.send(message.envelope.metadata.run_id, [message.envelope], [message.tree])
    assert number == message.tree.object_id
    if complete:
        for part in wanted:
            assert queue.store(message.envelope.metadata.run_id, part, message.objects[part])
    return wanted


def answer(queue: MessageQueue, message: Packed, node: int = NODE) -> Packed:
    reply = reply_to(message)
    for part in queue.answer(node, reply.envelope, reply.tree):
        assert queue.store(RUN, part, reply.objects[part])
    return reply


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> MessageQueue:
    """Return an queue whose requests do not wait."""
    monkeypatch.setattr(message_queue, "HOLD_SECONDS", 0.0)
    monkeypatch.setattr(message_queue, "GATHER_SECONDS", 0.0)
    return MessageQueue(lambda run: run == RUN)


def codes(queue: MessageQueue, *numbers: str) -> list[int]:
    return [reply.envelope.error.code for reply in queue.replies(RUN, numbers)]


def test_the_queue_is_empty_after_delivery(queue: MessageQueue) -> None:
    message = packed()
    number = message.tree.object_id
    send(queue, message)
    delivery = queue.pull(NODE)
    assert delivery is not None and delivery.number == number
    assert {part: queue.find(RUN, part) for part in message.objects} == message.objects
    assert queue.confirm(RUN, number)
    assert queue.find(RUN, number) is None
    assert queue.replies(RUN, [number]) == []
    reply = answer(queue, message)
    [delivery] = queue.replies(RUN, [number])
    received = unpack(delivery.number, {part: queue.find(RUN, part) or b"" for part in reply.objects})
    assert received.content.config_records["config"]["answer"] == 1
    assert queue.confirm(RUN, delivery.number)
    assert not queue.num_objects and not queue.in_transit
    assert not queue.confirm(RUN, delivery.number)


def test_a_message_is_delivered_when_all_its_objects_have_arrived(queue: MessageQueue) -> None:
    first, second = packed(value=1.0), packed(value=2.0)
    wanted = send(queue, first, complete=False)
    last = next(part for part in wanted if part not in second.objects)  # they share objects
    for part in set(wanted) - {last}:
        queue.store(RUN, part, first.objects[part])
    send(queue, second)
    assert queue.pull(NODE).number == second.tree.object_id  # type: ignore[union-attr]
    queue.confirm(RUN, second.tree.object_id)
    assert queue.pull(NODE) is None
    queue.store(RUN, last, first.objects[last])
    assert queue.pull(NODE).number == first.tree.object_id  # type: ignore[union-attr]


def test_an_object_that_does_not_match_its_id_is_refused(queue: MessageQueue) -> None:
    message = packed()
    wanted = send(queue, message, complete=False)
    assert not queue.store(RUN, wanted[0], message.objects[wanted[0]] + b"x")
    assert queue.find(RUN, wanted[0]) == b""
    assert queue.store(RUN, wanted[0], message.objects[wanted[0]])


def test_equal_objects_are_sent_once_and_stored_for_all_receivers(queue: MessageQueue) -> None:
    first, second = packed(node=NODE), packed(node=6)
    shared = first.objects.keys() & second.objects.keys()
    assert shared
    send(queue, first)
    assert not shared & set(send(queue, second))
    queue.confirm(RUN, first.tree.object_id)
    assert all(queue.find(RUN, part) for part in shared)
    queue.confirm(RUN, second.tree.object_id)
    assert queue.num_objects == 0


def test_unconfirmed_messages_are_redelivered_a_limited_number_of_times(queue: MessageQueue) -> None:
    message = packed()
    send(queue, message)
    times = 0
    while queue.pull(NODE) is not None:
        times += 1
    assert times == message_queue.MOST_TIMES
    assert codes(queue, message.tree.object_id) == [ErrorCode.MESSAGE_UNAVAILABLE]
    send(queue, second := packed(value=2.0))
    answer(queue, second)
    for _ in range(3):  # a ServerApp asks until it has the reply
        assert len(queue.replies(RUN, [second.tree.object_id])) == 1


def test_repeated_calls_are_idempotent(queue: MessageQueue) -> None:
    message = packed()
    wanted = send(queue, message, complete=False)
    assert send(queue, message) == wanted
    assert send(queue, message) == []
    assert queue.store(RUN, wanted[0], message.objects[wanted[0]])
    reply = answer(queue, message)
    assert queue.answer(NODE, reply.envelope, reply.tree) == []
    assert len(queue.replies(RUN, [message.tree.object_id])) == 1


def test_errors_explain_missing_replies(queue: MessageQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    messages = [packed(value=float(i), node=i) for i in range(5, 8)]
    late = packed(value=9.0, ttl=0.05)
    for message in (*messages, late):
        send(queue, message)
    queue.nodes.leave(5)
    queue.nodes.alive(6, 10.0)
    assert codes(queue, messages[0].tree.object_id) == [ErrorCode.NODE_UNAVAILABLE]
    assert codes(queue, messages[1].tree.object_id, messages[2].tree.object_id) == []
    assert codes(queue, "unknown") == [ErrorCode.MESSAGE_UNAVAILABLE]
    time.sleep(0.06)
    [error] = queue.replies(RUN, [late.tree.object_id])
    content = {part: queue.find(RUN, part) or b"" for part in error.numbers}
    received = unpack(error.number, content)
    assert (received.error.code, received.metadata.reply_to_message_id) == (3, late.tree.object_id)
    clock = time.monotonic()
    monkeypatch.setattr(message_queue.time, "monotonic", lambda: clock + 21)  # silent for two intervals
    assert codes(queue, messages[1].tree.object_id) == [ErrorCode.NODE_UNAVAILABLE]
    monkeypatch.setattr(message_queue.time, "monotonic", lambda: clock + 61)  # never online since the start
    assert codes(queue, messages[2].tree.object_id) == [ErrorCode.NODE_UNAVAILABLE]


def test_unexpected_replies_are_dropped(queue: MessageQueue) -> None:
    message, unknown = packed(), packed(value=2.0)
    send(queue, message)
    reply = reply_to(message)
    assert queue.answer(6, reply.envelope, reply.tree) == []  # from another node
    other = reply_to(unknown)
    assert queue.answer(NODE, other.envelope, other.tree) == []
    assert queue.replies(RUN, [message.tree.object_id]) == []


def test_invalid_messages_are_refused(queue: MessageQueue) -> None:
    message = packed()
    for change in ({"run_id": 8}, {"src_node_id": 9}, {"dst_node_id": 0}, {"ttl": -1.0}, {"reply_to_message_id": "a"}):
        envelope = type(message.envelope)()
        envelope.CopyFrom(message.envelope)
        for field, value in change.items():
            setattr(envelope.metadata, field, value)
        assert queue.send(RUN, [envelope], [message.tree]) == ([""], [])
    assert not queue.in_transit


def test_messages_of_ended_runs_and_incomplete_messages_are_discarded(
    queue: MessageQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended, incomplete, delivered = packed(run=8), packed(value=2.0), packed(value=3.0, ttl=1e6)
    send(queue, ended)
    assert queue.pull(NODE) is None
    assert queue.num_objects == 0
    send(queue, incomplete, complete=False)
    send(queue, delivered)
    queue.sweep()
    assert len(queue.in_transit) == 2
    clock = time.monotonic()
    monkeypatch.setattr(message_queue.time, "monotonic", lambda: clock + message_queue.ARRIVAL_SECONDS + 1)
    queue.sweep()
    assert queue.in_transit == {delivered.tree.object_id}


def after(seconds: float, act: Callable[[], object]) -> threading.Timer:
    timer = threading.Timer(seconds, act)
    timer.start()
    return timer


def test_requests_wait_for_messages_and_replies(queue: MessageQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(message_queue, "HOLD_SECONDS", 5.0)
    monkeypatch.setattr(message_queue, "GATHER_SECONDS", 20.0)
    messages = [packed(value=1.0), packed(value=2.0)]
    *first_parts, last = send(queue, messages[0], complete=False)
    for part in first_parts:
        queue.store(RUN, part, messages[0].objects[part])
    begun = time.monotonic()
    timer = after(0.3, lambda: queue.store(RUN, last, messages[0].objects[last]))
    assert queue.pull(NODE) is not None
    assert 0.25 < time.monotonic() - begun < 4.5
    timer.join()
    send(queue, messages[1])
    begun = time.monotonic()
    timers = [
        after(0.2 + 0.1 * i, lambda message=message: answer(queue, message)) for i, message in enumerate(messages)
    ]
    assert len(queue.replies(RUN, [message.tree.object_id for message in messages])) == 2
    assert time.monotonic() - begun < 10
    for timer in timers:
        timer.join()


def test_time_and_number_of_waiting_requests_are_limited(queue: MessageQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(message_queue, "HOLD_SECONDS", 0.5)
    begun = time.monotonic()
    assert queue.pull(NODE) is None
    assert 0.45 < time.monotonic() - begun < 10
    monkeypatch.setattr(message_queue, "HOLD_SECONDS", 2.0)
    with futures.ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(queue.pull, NODE)
        time.sleep(0.1)
        begun = time.monotonic()
        assert queue.pull(NODE) is None  # only one request of a node waits
        assert time.monotonic() - begun < 1
        waiting.result()


# -- in front of Flower's SuperLink -----------------------------------------------------------------------


class SuperLink:
    """Flower's SuperLink with its database, over real gRPC for nodes and in this process over HTTP."""

    def __init__(self, path: Path) -> None:
        store = ObjectStoreFactory()
        factory = LinkStateFactory(str(path), NoOpFederationManager(), store)
        self.state = factory.state()
        self.runs = Runs()
        self.queue = MessageQueue(self.runs.is_active)
        servicer = FleetServicer(factory, store, False)
        self.runs.ask = servicer.GetRun
        interceptors = [
            AskAgain(),
            RpcErrorTranslationServerInterceptor(),
            NodeAuthServerInterceptor(factory),
            NodeCalls(self.queue, self.runs),
        ]
        self.server = grpc.server(futures.ThreadPoolExecutor(8), interceptors=interceptors)
        add_FleetServicer_to_server(servicer, self.server)
        port = self.server.add_insecure_port("127.0.0.1:0")
        self.server.start()
        self.app = main.create_app()
        self.app.state.runtime_state_factory = self.app.state.linkstate_factory = factory
        self.calls = AppCalls(self.app, self.queue, self.runs, Turns())
        self.client = TestClient(self.calls, raise_server_exceptions=False)
        self.fleet = Fleet(f"127.0.0.1:{port}", insecure=True)
        self.node = self.fleet.join()
        self.run, self.token = self.start_run()

    def start_run(self) -> tuple[int, str]:
        """Start a run; return its id and the token of its ServerApp."""
        files = {"pyproject.toml": PROJECT, "m.py": b"x = 1\n", "LICENSE": b"free\n"}
        content = build_fab_from_files(files)[0]
        fab = Fab(hashlib.sha256(content).hexdigest(), content, {})
        self.state.store_fab(fab)
        run = self.state.create_run(
            "p/a", "1.0", fab.hash_str, {"lr": 0.5}, NOOP_FEDERATION_ID, None, "account", TaskType.SERVER_APP
        )
        [info] = self.state.get_run_info(run_ids=[run])
        token = self.state.claim_task(info.primary_task_id)
        assert token and self.state.activate_task(info.primary_task_id)
        self.task = info.primary_task_id
        return run, token

    def post(self, name: str, token: str | None = None, **fields: Any) -> tuple[int, Any]:
        """Return the status of a ServerApp's call, and its answer."""
        call = app_call(name)
        headers = {"content-type": MEDIA_TYPE, "flwr-task-token": self.token if token is None else token}
        content = call.request(**fields).SerializeToString()
        response = self.client.post(call.path, content=content, headers=headers)
        return response.status_code, call.response.FromString(response.content) if response.is_success else None

    def send(self, message: Packed, token: str | None = None) -> int:
        """Push a message as a ServerApp does, and return the status."""
        fields = {"messages_list": [message.envelope], "message_object_trees": [message.tree]}
        status, pushed = self.post("PushMessages", token, **fields)
        for part in pushed.objects_to_push if pushed else ():
            fields_of_push = {"run_id": self.run, "session_id": pushed.session_id, "node": {"node_id": SERVER}}
            answered = self.post(
                "PushObject", token, object_id=part, object_content=message.objects[part], **fields_of_push
            )
            assert answered[1].stored
        return status


PROJECT = b"""
[project]
name = "a"
version = "1.0"
description = ""
license = "MIT"
[tool.flwr.app]
publisher = "p"
[tool.flwr.app.components]
serverapp = "m:app"
clientapp = "m:app"
[tool.flwr.app.config]
lr = 0.1
deep = { er = 3 }
"""


@pytest.fixture
def superlink(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SuperLink]:
    monkeypatch.setattr(message_queue, "HOLD_SECONDS", 0.05)
    monkeypatch.setenv("FLWR_HOME", str(tmp_path / "flower"))
    superlink = SuperLink(tmp_path / "state.db")
    yield superlink
    superlink.fleet.leave()
    superlink.server.stop(None)


def test_a_message_and_its_reply_pass_through_the_superlink(superlink: SuperLink) -> None:
    message = packed(superlink.node, superlink.run)
    assert superlink.send(message) == 200
    delivery = superlink.fleet.pull()
    assert delivery is not None
    run, bundle = superlink.fleet.run(superlink.run)
    assert (run.config, run.submitter) == ({"lr": 0.5}, "account")
    assert hashlib.sha256(bundle.content).hexdigest() == bundle.hash
    objects = superlink.fleet.pull_objects(*delivery)
    assert objects == message.objects
    assert superlink.fleet.pull() is None
    reply = reply_to(message)
    superlink.fleet.push(reply, 1.0)
    status, answered = superlink.post("PullMessages", message_ids=[message.tree.object_id])
    assert status == 200
    assert [tree.object_id for tree in answered.message_object_trees] == [reply.tree.object_id]
    for number, content in reply.objects.items():
        status, part = superlink.post("PullObject", object_id=number, run_id=superlink.run)
        assert part.object_content == content
    assert superlink.post("ConfirmMessageReceived", message_object_id=reply.tree.object_id)[0] == 200
    assert not superlink.queue.in_transit
    assert superlink.state.num_message_ins() == superlink.state.num_message_res() == 0, "Flower stores none"


def test_tokens_that_are_unknown_or_of_another_run_are_refused(superlink: SuperLink) -> None:
    message = packed(superlink.node, superlink.run)
    assert superlink.send(message, token="stolen") == 401
    _, other = superlink.start_run()
    assert superlink.send(message, token=other) >= 400
    assert superlink.post("PullMessages", token="stolen", message_ids=["a"])[0] == 401
    assert not superlink.queue.in_transit
    assert superlink.send(message) == 200


def test_an_ended_run_accepts_no_messages_or_replies(superlink: SuperLink) -> None:
    answered, waiting = (packed(superlink.node, superlink.run, value=value) for value in (1.0, 2.0))
    superlink.send(answered)
    delivery = superlink.fleet.pull()
    assert delivery is not None
    superlink.fleet.pull_objects(*delivery)
    superlink.send(waiting)
    path = "/v1/runtime/push-task-output"
    headers = {"content-type": MEDIA_TYPE, "flwr-task-token": superlink.token}
    content = PushTaskOutputRequest(sub_status=SubStatus.COMPLETED).SerializeToString()
    assert superlink.client.post(path, content=content, headers=headers).status_code == 200
    assert superlink.fleet.pull() is None
    with pytest.raises(RunEndedError):
        superlink.fleet.push(reply_to(answered), 1.0)
    with pytest.raises(RunEndedError):
        superlink.fleet.run(superlink.run)
    assert superlink.post("PullMessages", message_ids=[answered.tree.object_id])[0] == 401
    assert not superlink.queue.in_transit


def test_messages_are_reported_lost_after_a_restart(superlink: SuperLink) -> None:
    superlink.calls._tokens.clear()
    status, answered = superlink.post("PullMessages", message_ids=["0" * 64])
    assert status == 200
    [error], [tree] = answered.messages_list, answered.message_object_trees
    assert error.error.code == ErrorCode.MESSAGE_UNAVAILABLE
    assert superlink.send(packed(superlink.node, superlink.run)) == 200
    about = {"node": {"node_id": SERVER}, "run_id": superlink.run}
    assert superlink.post("PullObject", object_id=tree.object_id, **about)[1].object_available  # Flower's own object


def test_pulling_a_missing_object_is_an_error(superlink: SuperLink, monkeypatch: pytest.MonkeyPatch) -> None:
    message = packed(superlink.node, superlink.run)
    superlink.send(message)
    delivery = superlink.fleet.pull()
    assert delivery is not None
    superlink.queue.drop(superlink.run)
    with pytest.raises(PartError, match="did not reach the node"):
        superlink.fleet.pull_objects(*delivery)
    lost = packed_error(message.envelope, ErrorCode.MESSAGE_UNAVAILABLE, "lost", time.time())
    superlink.fleet.push(lost, 0.0)  # the run is dropped
    assert not superlink.queue.in_transit


def test_a_run_continues_after_the_last_caller_is_unregistered(superlink: SuperLink) -> None:
    other = superlink.state.create_node("account", "name", b"other key", 30.0)
    superlink.fleet.pull()
    message = packed(other, superlink.run)
    assert superlink.send(message) == 200
    superlink.runs.node = 12345  # Flower does not know it
    superlink.runs.forget()
    superlink.queue.sweep()
    assert superlink.queue.in_transit == {message.tree.object_id}


def test_heartbeats_keep_a_node_online(superlink: SuperLink) -> None:
    superlink.queue.nodes.leave(superlink.node)
    assert superlink.queue.nodes.is_offline(superlink.node)
    superlink.fleet._call_once("SendNodeHeartbeat", 5.0, node={"node_id": superlink.node}, heartbeat_interval=15.0)
    assert not superlink.queue.nodes.is_offline(superlink.node)
    superlink.fleet._call_once("DeactivateNode", 5.0, node_id=superlink.node)
    assert superlink.queue.nodes.is_offline(superlink.node)


def test_concurrent_server_app_starts_are_limited_to_the_cores(
    superlink: SuperLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(front, "cores", lambda: 1)
    monkeypatch.setattr(front, "ASK_SECONDS", 0.1)
    for _ in range(2):
        superlink.state.create_run("p/a", "1.0", "h", {}, NOOP_FEDERATION_ID, None, "account", TaskType.SERVER_APP)

    def acquire() -> str:
        request = AcquireTaskRequest(supported_task_types=[TaskType.SERVER_APP]).SerializeToString()
        headers = {"content-type": MEDIA_TYPE}
        response = superlink.client.post("/v1/runtime/acquire-task", content=request, headers=headers)
        assert response.status_code == 200
        return front.token_of_task(response.content)

    token = acquire()
    assert token
    assert not acquire()
    headers = {"content-type": MEDIA_TYPE, "flwr-task-token": token}
    superlink.client.post(
        "/v1/runtime/pull-task-input", content=PullTaskInputRequest().SerializeToString(), headers=headers
    )
    assert acquire()


def test_successful_calls_about_messages_are_not_logged() -> None:
    def record(path: str, status: int) -> Any:
        return SimpleNamespace(msg='%s - "%s %s HTTP/%s" %d', args=("127.0.0.1:1", "POST", path, "1.1", status))

    quiet = Quiet()
    assert not quiet.filter(record("/v1/runtime/push-object", 200))
    assert quiet.filter(record("/v1/runtime/push-object", 500))
    assert quiet.filter(record("/v1/control/list-runs", 200))
    refused = "Invalid destination node ID for Message: %s"  # Flower logs this error for Posy's check of a ServerApp
    assert not quiet.filter(logging.LogRecord("flwr", logging.ERROR, "", 0, refused, (2,), None))
