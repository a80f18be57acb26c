"""The content of messages in few parts.

Flower sends each record, each array and each piece of an array as an object of its own. Each costs four calls on its
way from the ServerApp to the client's process. Folded, a content is one record with all that is small, and one for
each piece of what is large.
"""

import math
from collections.abc import Iterator

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, RecordDict
from flwr.app.message import make_message
from flwr.clientapp.typing import ClientAppCallable
from flwr.common.serde import recorddict_from_proto, recorddict_to_proto
from flwr.proto.recorddict_pb2 import RecordDict as RecordDictProto

from posy.flower import UNANSWERED

APART_BYTES = 1 << 16
"""Bytes from which on an array has pieces of its own; clients that are sent the same array share these."""
PIECE_BYTES = 1_800_000
"""Bytes of a piece. A call that fails starts anew: larger ones would never end on a line that is cut every 2 MB."""
REST = "folded"
"""The record that holds all but the large arrays, and its one key."""


def fold(content: RecordDict) -> RecordDict:
    """Return a content in few records; arrays are neither compressed nor changed."""
    rest, pieces = RecordDict(), dict[str, ConfigRecord]()
    for name, record in content.items():
        rest[name] = record
        if not isinstance(record, ArrayRecord):
            continue
        rest[name] = small = ArrayRecord()
        for key, array in record.items():
            small[key] = array
            if math.prod(array.shape) * np.dtype(array.dtype).itemsize >= APART_BYTES:
                small[key] = Array(array.dtype, array.shape, array.stype, b"")
                pieces |= {f"{name}/{key}/{i}": piece for i, piece in enumerate(_pieces(array))}
    told = recorddict_to_proto(rest).SerializeToString(deterministic=True)
    return RecordDict({REST: ConfigRecord({REST: told}), **pieces})


def _pieces(array: Array) -> list[ConfigRecord]:
    """Return the bytes of an array in pieces, made once for all messages that it is in."""
    if "_pieces" not in vars(array):
        data = memoryview(array.data)
        starts = range(0, len(data), PIECE_BYTES)
        vars(array)["_pieces"] = [ConfigRecord({"": bytes(data[i : i + PIECE_BYTES])}) for i in starts]
        vars(array).pop("_data", None)  # what our own arrays keep once they were serialised: the pieces hold it now
    pieces: list[ConfigRecord] = vars(array)["_pieces"]
    return pieces


def is_folded(message: Message) -> bool:
    """Tell whether the content of a message is folded."""
    return message.has_content() and REST in message.content


def unfold(content: RecordDict) -> RecordDict:
    """Return what was folded.

    What :func:`fold` has not made raises errors of many kinds.
    """
    records = content.config_records
    rest = recorddict_from_proto(RecordDictProto.FromString(records[REST][REST]))
    for name, record in rest.array_records.items():
        for key, array in record.items():
            if not array.data:
                data = b"".join(_found(content, f"{name}/{key}"))
                record[key] = Array(array.dtype, array.shape, array.stype, data)
    return rest


def _found(content: RecordDict, name: str) -> Iterator[bytes]:
    number = 0
    while (place := f"{name}/{number}") in content:
        piece = content.config_records[place][""]
        yield bytes(piece) if isinstance(piece, bytes) else b""
        number += 1


def folded(message: Message) -> Message:
    """Return a message, with the same metadata, whose content is folded."""
    return make_message(message.metadata, fold(message.content))


def unfolded(message: Message) -> Message:
    """Return a message as it was before it was folded; one that is malformed as an error, which says so."""
    if not is_folded(message):
        return message
    try:
        return make_message(message.metadata, unfold(message.content))
    except Exception as wrong:  # whatever it is, the sender has made it
        return make_message(message.metadata, error=Error(UNANSWERED, f"malformed reply: {wrong!r}"))


def answer_in_kind(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Unfold a message for the ClientApp, and fold the reply to one that was; a mod, as Flower calls this."""
    if not is_folded(message):
        return call_next(message, context)
    # A message of its own: the worker knows a copy of the one that came by its content.
    reply = call_next(make_message(message.metadata, unfold(message.content)), context)
    return folded(reply) if reply.has_content() else reply
