"""The Flower internals that a federation needs: the network protocol, objects and app bundles.

Calls have the same names as in Flower's ``.proto`` files. :func:`fleet_call` and :func:`control_call` take the types of
requests and responses from these files. A message is sent as several objects: the message itself, its records, its
arrays and their chunks. The id of an object is the SHA-256 of its bytes (:class:`Packed`).
"""

import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from flwr.app import Message, RecordDict
from flwr.proto import control_pb2, fleet_pb2, runtime_pb2
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree, no_object_id_recompute
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from google.protobuf.message_factory import GetMessageClass

from posy.flower import with_id

PUBLIC_KEY_HEADER, SIGNATURE_HEADER, TIMESTAMP_HEADER = "flwr-public-key-bin", "flwr-signature-bin", "flwr-timestamp"
"""Headers of a node's calls: its public key (PEM), the signature of the time, and the time."""
TOKEN_HEADER = "flwr-task-token"
"""Header of a ServerApp's calls."""
MEDIA_TYPE, STREAM_MEDIA_TYPE = "application/protobuf", "application/flower-protobuf-stream"
"""Media types of a call and a stream of responses. In a stream, a four-byte length precedes each response."""
KEY_REFUSED, INTERVAL_REFUSED, RUN_ENDED = 2004, 2003, 2007
"""Error codes of a SuperLink that refuses a node's call: the key is unknown or already in use, the heartbeat interval
is invalid, or the run has ended."""


FLEET, CONTROL = fleet_pb2.DESCRIPTOR.services_by_name["Fleet"], control_pb2.DESCRIPTOR.services_by_name["Control"]
"""The service for nodes, and the service for registering nodes and submitting runs."""


class Call(NamedTuple):
    """A call in the protocol."""

    path: str
    """Path of the call."""
    request: type[Any]
    response: type[Any]


@cache
def fleet_call(name: str) -> Call:
    """Return the call ``name`` in the API for nodes."""
    return _call(FLEET, name)


@cache
def control_call(name: str) -> Call:
    """Return the call ``name`` in the API for registering nodes and submitting runs."""
    return _call(CONTROL, name)


def _call(service: Any, name: str) -> Call:
    method = service.methods_by_name[name]
    path = f"/{service.full_name}/{name}"
    return Call(path, GetMessageClass(method.input_type), GetMessageClass(method.output_type))


@cache
def app_call(name: str) -> Call:
    """Return the call ``name`` that a ServerApp makes over HTTP about its messages.

    The requests have the same fields and field numbers as a node's requests. With two
    exceptions, the responses also match a node's responses.
    """
    _, request, response = fleet_call(name)
    answers = {"PushMessages": runtime_pb2.PushAppMessagesResponse, "PullMessages": runtime_pb2.PullAppMessagesResponse}
    return Call(http_path("runtime", name), request, answers.get(name, response))


def token_of_task(answer: bytes) -> str:
    """Return the token in the response to a request for a task; empty if the response does not assign a task."""
    return str(runtime_pb2.AcquireTaskResponse.FromString(answer).token)


def http_path(service: str, name: str) -> str:
    """Return the path of a call over HTTP."""
    return f"/v1/{service}/" + re.sub(r"(?<!^)(?=[A-Z])", "-", name).lower()


# -- messages as objects ----------------------------------------------------------------------------------


@dataclass
class Packed:
    """A message in the format in which it is sent."""

    envelope: Any
    """A protocol message with the metadata (including the message id) and the error, if any."""
    tree: Any
    """The tree of the objects' ids."""
    objects: dict[str, bytes]


def pack(message: Message) -> Packed:
    """Return a message as its objects, their tree, and an envelope that contains the message id."""
    with no_object_id_recompute():
        tree = get_object_tree(message)
        objects = {number: part.deflate() for number, part in get_all_nested_objects(message).items()}
    return Packed(_envelope(tree.object_id, objects[tree.object_id]), tree, objects)


def unpack(number: str, objects: Mapping[str, bytes]) -> Message:
    """Restore the message with id ``number`` from its objects; malformed objects can raise any error."""
    message = inflate_object_from_contents(number, dict(objects))
    if not isinstance(message, Message):
        raise TypeError(f"the object {number} is not a message")
    return with_id(message, number)


def message_of(envelope: Any) -> Message:
    """Return a message with an envelope's metadata and error, or with empty content if there is no error."""
    copy = type(envelope)()
    copy.CopyFrom(envelope)
    copy.metadata.message_id = ""
    copy.ClearField("content")
    body = copy.SerializeToString(deterministic=True)
    objects = {}
    if not copy.HasField("error"):
        empty = RecordDict().deflate()
        objects[hashlib.sha256(empty).hexdigest()] = empty
    objects["message"] = b"Message %s %d\0" % ("".join(objects).encode(), len(body)) + body
    return with_id(unpack("message", objects), envelope.metadata.message_id)


def packed_error(request_envelope: Any, code: int, reason: str, created_at: float) -> Packed:
    """Return an error reply to a message, given the message's envelope."""
    metadata = request_envelope.metadata
    ids = {name: getattr(metadata, name) for name in ("src_task_id", "dst_task_id") if metadata.HasField(name)}
    envelope = type(request_envelope)(
        metadata={
            "run_id": metadata.run_id,
            "src_node_id": metadata.dst_node_id,
            "dst_node_id": metadata.src_node_id,
            "reply_to_message_id": metadata.message_id,
            "group_id": metadata.group_id,
            "message_type": metadata.message_type,
            "created_at": created_at,
            "ttl": max(0.0, metadata.created_at + metadata.ttl - created_at),
            **{"dst_task_id" if name == "src_task_id" else "src_task_id": number for name, number in ids.items()},
        },
        error={"code": code, "reason": reason},
    )
    body = envelope.SerializeToString(deterministic=True)
    content = b"Message  %d\0" % len(body) + body
    number = hashlib.sha256(content).hexdigest()
    tree = _message_type("message_object_trees")(object_id=number)
    return Packed(_envelope(number, content), tree, {number: content})


def numbers_in(tree: Any) -> Iterator[str]:
    """Yield the ids of the objects in a tree, children first; an id may occur more than once."""
    for child in tree.children:
        yield from numbers_in(child)
    yield tree.object_id


def envelope_from(data: bytes) -> Any:
    """Parse a message's envelope from its bytes."""
    return _message_type("messages_list").FromString(data)


def tree_from(data: bytes) -> Any:
    """Parse a tree of object ids from its bytes."""
    return _message_type("message_object_trees").FromString(data)


@cache
def _message_type(field: str) -> Any:
    return GetMessageClass(fleet_call("PushMessages").request.DESCRIPTOR.fields_by_name[field].message_type)


def _envelope(number: str, content: bytes) -> Any:
    """Return a message's envelope from the message's own object, which consists of a head, a zero byte and the body."""
    envelope = envelope_from(content[content.index(b"\0") + 1 :])
    envelope.metadata.message_id = number
    if not envelope.HasField("error"):
        envelope.content.SetInParent()  # a message has either content or an error
    return envelope


# -- settings and bundles ---------------------------------------------------------------------------------


def config_of(proto: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings in a protocol message."""
    return {key: getattr(value, value.WhichOneof("scalar")) for key, value in proto.items()}


def to_config(settings: Mapping[str, bool | int | float | str]) -> dict[str, dict[str, Any]]:
    """Return settings in the format of a protocol message."""
    fields = {bool: "bool", int: "sint64", float: "double", str: "string"}
    return {key: {fields[type(value)]: value} for key, value in settings.items()}


def build_bundle(files: Mapping[str, bytes | Path]) -> bytes:
    """Build an app's bundle from files, keyed by their paths in the bundle."""
    from flwr.cli.build import build_fab_from_files  # noqa: PLC0415

    return build_fab_from_files(files)[0]
