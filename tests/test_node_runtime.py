"""The socket between a node and its worker: tasks, replies, and malformed entries from a run's code."""

import queue
import socket
import struct
import threading
import time
from collections.abc import Iterator
from typing import Any, BinaryIO

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Message, RecordDict

from posy.deploy.entries import EntrySocket, read_entry
from posy.deploy.flower_internals import Packed, envelope_from, message_of, pack, packed_error, tree_from, unpack
from posy.deploy.node import WarmNode, Worker, config_in, private_key
from posy.deploy.tasks import Bundle, Run, take_over
from posy.flower import ErrorCode, decoded, encoded
from posy.server_app.in_process import InProcessGrid

NODE = 5, {"partition-id": 0, "name": "a"}
BUNDLE = Bundle("hash", b"code", {"valid_license": "Valid"})


def message(ttl: float = 600.0) -> Packed:
    InProcessGrid(1)  # gives this process the identity that messages need
    arrays = ArrayRecord({"a": Array(np.arange(300_000.0)), "b": Array(np.ones(2))})
    return pack(Message(RecordDict({"arrays": arrays}), dst_node_id=5, message_type="train", ttl=ttl))


class Parent:
    """The parent of a node whose worker is in this process."""

    def __init__(self) -> None:
        self.ended: queue.Queue[int] = queue.Queue()

    def kill_worker(self) -> None:
        self.ended.put(-9)


@pytest.fixture
def ends(tmp_path: Any) -> Iterator[tuple[Worker, socket.socket, BinaryIO]]:
    """Return the node's end of a socket, and the worker's end with its stream."""
    node_end, worker_end = socket.socketpair()
    worker = Worker(Parent(), node_end, tmp_path / "home", queue.Queue())  # type: ignore[arg-type]
    listener = threading.Thread(target=worker.listen, daemon=True)
    listener.start()
    with worker_end.makefile("rb") as stream:
        yield worker, worker_end, stream
    worker_end.close()
    listener.join(5)
    assert not listener.is_alive()
    node_end.close()


def take(stream: BinaryIO, connection: socket.socket, last: Bundle | None = None) -> tuple[Any, Bundle]:
    entry = read_entry(stream)
    assert entry is not None
    return take_over(EntrySocket(connection), *entry, last)


def test_a_message_and_its_reply_go_through_the_socket(ends: tuple[Worker, socket.socket, BinaryIO]) -> None:
    worker, connection, stream = ends
    sent = message()
    sending = threading.Thread(
        target=worker.hand, args=(sent.tree.object_id, sent.objects, Run(7, "me", {"lr": 0.5}), BUNDLE, NODE, b"")
    )
    sending.start()  # the message is larger than the buffer of the socket
    task, bundle = take(stream, connection)
    sending.join()
    received, context, run, code = task.pull()
    np.testing.assert_array_equal(received.content.array_records["arrays"]["a"].numpy(), np.arange(300_000.0))
    assert received.metadata.message_id == sent.tree.object_id
    assert (context.node_id, context.node_config, context.run_config) == (*NODE, {"lr": 0.5})
    assert (run.run_id, run.submitter, code, bundle) == (7, "me", BUNDLE, BUNDLE)
    context.state["kept"] = ArrayRecord({"x": Array(np.ones(3))})
    reply = Message(received.content, reply_to=received)
    answering = threading.Thread(target=lambda: (task.push(reply), task.finish(context)))
    answering.start()
    events = [worker.events.get(timeout=5) for _ in range(2)]
    answering.join()
    assert [event[0]["event"] for event in events if event] == ["reply", "done"]
    (head, (envelope, tree, *objects)), (_, [state]) = events  # type: ignore[misc]
    answered = unpack(tree_from(tree).object_id, dict(zip(head["objects"], objects, strict=True)))
    assert answered.metadata.reply_to_message_id == sent.tree.object_id
    assert envelope_from(envelope).metadata.message_id == tree_from(tree).object_id
    assert "kept" in decoded(state)


def test_code_is_sent_once_and_state_with_every_message(ends: tuple[Worker, socket.socket, BinaryIO]) -> None:
    worker, connection, stream = ends
    InProcessGrid(1)
    tiny = pack(Message(RecordDict(), dst_node_id=5, message_type="query", ttl=60.0))
    state = encoded(RecordDict({"kept": ArrayRecord({"x": Array(np.ones(3))})}))
    bundle = None
    for expected in (True, False):
        worker.hand(tiny.tree.object_id, tiny.objects, Run(7), BUNDLE, NODE, state)
        entry = read_entry(stream)
        assert entry is not None and entry[0]["code"] is expected
        task, bundle = take_over(EntrySocket(connection), *entry, bundle)
        assert bundle == BUNDLE
        assert "kept" in task.pull()[1].state


@pytest.mark.parametrize(
    "content",
    [
        b'{"event": "reply"}\n',
        b"5\n",
        b'{"event": "done", "sizes": [-1]}\n',
        b'{"event2": 1, "sizes": []}\n',
        b'{"event": "other", "sizes": []}\n',
        b'{"sizes": "many"}\n',
        b"{\n",
    ],
)
def test_a_malformed_entry_ends_the_worker_but_not_the_node(
    ends: tuple[Worker, socket.socket, BinaryIO], content: bytes
) -> None:
    """Otherwise, a run's code in the worker process could block the node forever."""
    worker, connection, _ = ends
    connection.sendall(content)
    assert worker.events.get(timeout=5) is None


def test_a_worker_that_does_not_read_is_abandoned(ends: tuple[Worker, socket.socket, BinaryIO]) -> None:
    worker, _, _ = ends
    worker.connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", 0, 200_000))
    begun = time.monotonic()
    worker.hand("m", {"m": bytes(50_000_000)}, Run(7), BUNDLE, NODE, b"")
    assert time.monotonic() - begun < 30
    assert worker.events.get(timeout=5) is None


class SuperLink:
    """The calls of a node that is not connected."""

    node_id = 5


def let_work(worker: Worker, sent: Packed) -> Packed:
    node = WarmNode(SuperLink(), worker.parent, NODE[1])  # type: ignore[arg-type]
    return node._let_work(worker, sent.envelope, sent.objects, Run(7), BUNDLE)


@pytest.mark.parametrize("fault", ["envelope", "count", "no reply"])
def test_a_malformed_reply_becomes_an_error_reply(ends: tuple[Worker, socket.socket, BinaryIO], fault: str) -> None:
    worker, connection, _ = ends
    sent = pack(Message(RecordDict(), dst_node_id=5, message_type="query", ttl=600.0))
    entry = EntrySocket(connection)
    if fault == "no reply":
        entry.send([b""], event="done")
    else:
        entry.send([b"\xff" if fault == "envelope" else b"", b"", b"x"], event="reply", objects=["a", "b"])
    reply = let_work(worker, sent)
    assert reply.envelope.error.code == ErrorCode.CLIENT_APP_CRASHED
    assert reply.envelope.metadata.reply_to_message_id == sent.tree.object_id


def test_a_slow_worker_is_killed_and_the_node_sends_an_error_reply(
    ends: tuple[Worker, socket.socket, BinaryIO], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("posy.deploy.node.CLOCK_SECONDS", 0.0)
    worker, _, _ = ends
    sent = pack(Message(RecordDict(), dst_node_id=5, message_type="query", ttl=0.2))
    reply = let_work(worker, sent)
    reason = reply.envelope.error.reason
    assert "worker process was killed" in reason and "0.2 s" in reason


def test_error_replies_match_flowers() -> None:
    sent = message()
    error = packed_error(sent.envelope, ErrorCode.INVALID_FAB, "no", time.time())
    received = unpack(error.tree.object_id, error.objects)
    by_flower = Message(received.error, reply_to=unpack(sent.tree.object_id, sent.objects))
    for field in ("run_id", "src_node_id", "dst_node_id", "reply_to_message_id", "group_id", "message_type"):
        assert getattr(received.metadata, field) == getattr(by_flower.metadata, field)
    assert received.metadata.ttl == pytest.approx(by_flower.metadata.ttl, abs=1.0)
    assert (received.error.code, received.error.reason) == (ErrorCode.INVALID_FAB, "no")


def test_an_envelope_restores_the_metadata() -> None:
    sent = message()
    bare = message_of(sent.envelope)
    assert bare.metadata.message_id == sent.tree.object_id
    assert bare.metadata.message_type == "train" and len(bare.content) == 0


def test_node_config_values_are_toml() -> None:
    text = """partition-id=0 name="a b" path='c\\d' on=true rate=0.5 text="x=1" """
    assert config_in(text) == {
        "partition-id": 0, "name": "a b", "path": "c\\d", "on": True, "rate": 0.5, "text": "x=1",
    }  # fmt: skip


def test_a_key_of_another_type_is_refused(tmp_path: Any) -> None:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    path = tmp_path / "a.key"
    path.write_bytes(Ed25519PrivateKey.generate().private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
    with pytest.raises(SystemExit, match=r"a\.key.* not a private key"):
        private_key(path)
