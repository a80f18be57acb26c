"""The entries that a node and its worker exchange over their socket.

An entry is a line with a JSON object, followed by the bytes of the entry's parts. The object's key ``sizes`` contains
the lengths of the parts.
"""

import json
import socket
import threading
from collections.abc import Sequence
from typing import Any, BinaryIO


class EntrySocket:
    """One end of the socket, on which several threads may send."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._writing = threading.Lock()

    def send(self, parts: Sequence[bytes] = (), **fields: Any) -> None:
        """Send an entry; raise :class:`OSError` if the other end is closed or does not read."""
        head = json.dumps({**fields, "sizes": [len(part) for part in parts]}).encode() + b"\n"
        with self._writing:
            for content in (head, *parts):
                self._connection.sendall(content)


def read_entry(stream: BinaryIO) -> tuple[dict[str, Any], list[bytes]] | None:
    """Return the next entry and its parts, or None at the end of the stream.

    Raises
    ------
    ValueError
        If the entry is malformed. This is possible because a run's code can write to its worker's socket.
    """
    line = stream.readline()
    if not line:
        return None
    head = json.loads(line)
    sizes = head.pop("sizes", None) if isinstance(head, dict) else None
    if not isinstance(sizes, list) or not all(type(size) is int and size >= 0 for size in sizes):
        raise ValueError(f"an entry has the invalid sizes {sizes!r}")
    parts = []
    for size in sizes:
        part = stream.read(size)
        if len(part) < size:
            return None
        parts.append(part)
    return head, parts
