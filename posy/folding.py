"""Pack the content of messages into a small number of objects.

Flower sends each record, each array and each chunk of an array as a separate object. Sending an object from the
ServerApp to the client's process takes four calls. Folded content has one record for all small parts, and one record
for each piece of a large array.
"""

import math
from collections.abc import Iterator

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, RecordDict

from posy.flower import UNANSWERED, ClientAppCallable, decoded, encoded, with_content, with_error
from posy.flower import Array as SharedArray

APART_BYTES = 1 << 16
"""Minimum size in bytes of an array that Posy splits into pieces. Clients that receive the same array share its
pieces."""
PIECE_BYTES = 1_800_000
"""Size of a piece in bytes. A failed call restarts from the beginning, so larger pieces would never get through a
connection that breaks every 2 MB."""
REST = "folded"
"""Name of the record that holds everything except the large arrays, and of the only entry in this record."""


def fold(content: RecordDict) -> RecordDict:
    """Pack content into a small number of records, without compressing or changing its arrays."""
    small_parts, pieces = RecordDict(), dict[str, ConfigRecord]()
    for name, record in content.items():
        small_parts[name] = record
        if not isinstance(record, ArrayRecord):
            continue
        small_parts[name] = small = ArrayRecord()
        for key, array in record.items():
            small[key] = array
            if math.prod(array.shape) * np.dtype(array.dtype).itemsize >= APART_BYTES:
                small[key] = Array(array.dtype, array.shape, array.stype, b"")
                pieces |= {f"{name}/{key}/{i}": piece for i, piece in enumerate(_pieces(array))}
    return RecordDict({REST: ConfigRecord({REST: encoded(small_parts)}), **pieces})


def _pieces(array: Array) -> list[ConfigRecord]:
    """Return an array's bytes in pieces, which are shared by all messages that contain the array."""
    if "_pieces" not in vars(array):
        data = memoryview(array.data)
        starts = range(0, len(data), PIECE_BYTES)
        vars(array)["_pieces"] = [ConfigRecord({"": bytes(data[i : i + PIECE_BYTES])}) for i in starts]
        if isinstance(array, SharedArray):
            array.forget_bytes()  # the pieces now contain the bytes
    pieces: list[ConfigRecord] = vars(array)["_pieces"]
    return pieces


def is_folded(message: Message) -> bool:
    """Return whether the content of a message is folded."""
    return message.has_content() and REST in message.content


def unfold(content: RecordDict) -> RecordDict:
    """Restore the content that :func:`fold` packed. Malformed content may raise almost any exception."""
    records = content.config_records
    unfolded_content = decoded(records[REST][REST])  # type: ignore[arg-type]
    for name, record in unfolded_content.array_records.items():
        for key, array in record.items():
            if not array.data:
                data = b"".join(_piece_bytes(content, f"{name}/{key}"))
                record[key] = Array(array.dtype, array.shape, array.stype, data)
    return unfolded_content


def _piece_bytes(content: RecordDict, name: str) -> Iterator[bytes]:
    """Yield the bytes of each piece of an array."""
    number = 0
    while (key := f"{name}/{number}") in content:
        piece = content.config_records[key][""]
        yield bytes(piece) if isinstance(piece, bytes) else b""
        number += 1


def folded(message: Message) -> Message:
    """Return a message with the same metadata and repacked content."""
    return with_content(message, fold(message.content))


def unfolded(message: Message) -> Message:
    """Return a message with its content unfolded, or an error message if the content is malformed."""
    if not is_folded(message):
        return message
    try:
        return with_content(message, unfold(message.content))
    except Exception as error:  # any exception: the sender controls the content
        return with_error(message, Error(UNANSWERED, f"malformed reply: {error!r}"))


def answer_in_kind(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Unfold a message for the ClientApp, and fold the reply if the message was folded. This is a Flower mod."""
    if not is_folded(message):
        return call_next(message, context)
    # Leave the received message unchanged: the worker recognises copies of it by its content.
    reply = call_next(with_content(message, unfold(message.content)), context)
    return folded(reply) if reply.has_content() else reply
