"""Adapt Posy to the Flower runtime: records, messages and errors.

This module and :mod:`posy.deploy.flower_internals` are the only modules that use private names of Flower.
"""

import importlib.metadata
import logging
import os
import platform
import re
import sys
from collections.abc import Callable, Mapping
from enum import IntEnum
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

import flwr
import flwr.app
import httpx
import numpy as np
import numpy.typing as npt
from flwr.app import Context, Error, Message, RecordDict
from flwr.app.message import make_message
from flwr.common.logger import update_console_handler
from flwr.common.serde import recorddict_from_proto, recorddict_to_proto
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_utils import ObjectPushError
from flwr.supercore.task_identity import TaskIdentity

from posy.paths import START_DIRECTORY
from posy.words import one_line

R = TypeVar("R", flwr.app.ArrayRecord, flwr.app.ConfigRecord, flwr.app.MetricRecord)

FLOWER = "1.39"
"""Version of Flower that Posy's warm nodes and SuperLink require. With other versions, Posy starts Flower's
processes."""
LOWEST, HIGHEST = (1, 39), (1, 42)
"""Oldest and newest Flower releases that Posy supports."""
CLOCK_SECONDS = 60.0
"""Tolerated clock skew between two machines. Messages expire this long after round-timeout."""
MAX_REASON = 300
"""Maximum number of characters of a reason in a message."""
UNANSWERED = 1000
"""Code of the error that Posy reports for a message without a reply."""
PING = "ping"
"""Key in the config of a message that only asks a node for a reply."""
EXIT_CODE = "Exit Code: "
"""Beginning of the message that Flower logs when a process exits with an error."""


class ErrorCode(IntEnum):
    """Codes of the errors in replies, as defined by Flower's network protocol."""

    LOAD_CLIENT_APP_EXCEPTION = 1
    CLIENT_APP_RAISED_EXCEPTION = 2
    MESSAGE_UNAVAILABLE = 3
    REPLY_MESSAGE_UNAVAILABLE = 4
    NODE_UNAVAILABLE = 5
    MOD_FAILED_PRECONDITION = 6
    INVALID_FAB = 7
    CLIENT_APP_CRASHED = 8


FAILURES = {
    UNANSWERED: "{}",
    ErrorCode.LOAD_CLIENT_APP_EXCEPTION: "its app could not be loaded: {}",
    ErrorCode.CLIENT_APP_RAISED_EXCEPTION: "it failed: {}",
    ErrorCode.MESSAGE_UNAVAILABLE: "its message or its reply was lost or arrived too late",
    ErrorCode.REPLY_MESSAGE_UNAVAILABLE: "its reply arrived too late",
    ErrorCode.NODE_UNAVAILABLE: "its node is gone",
    ErrorCode.MOD_FAILED_PRECONDITION: "its app refused the message: {}",
    ErrorCode.INVALID_FAB: "its copy of the app is not valid: {}",
    ErrorCode.CLIENT_APP_CRASHED: "its app crashed: {}",
}
"""Descriptions of a client's error, by code; ``{}`` is replaced by the message in the error."""


class ErrorsOnOneLine(logging.Filter):
    """A log filter that reduces an error to one line, without a traceback or an exit code.

    For each exception that a ServerApp raises, Flower reports an unhandled exception and logs its traceback and an exit
    code. This output buries a message that is meant for the user, for example about a wrong setting.

    Parameters
    ----------
    kinds : tuple of type
        The exception classes whose messages are meant for the user.
    """

    def __init__(self, kinds: tuple[type[Exception], ...]) -> None:
        super().__init__()
        self.kinds = kinds
        self._explained = False

    def filter(self, record: logging.LogRecord) -> bool:
        """Replace the traceback of an exception in ``kinds`` with its message, and drop the exit code that follows."""
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, self.kinds):
            record.msg, record.args = "%s: %s", (record.getMessage(), " ".join(str(error).split()))
            record.exc_info = record.exc_text = None
            self._explained = True
        elif error is not None:
            self._explained = False
        return not (self._explained and record.getMessage().startswith(EXIT_CODE))


PLAIN: dict[type, set[type]] = {
    flwr.app.ArrayRecord: set(),
    flwr.app.ConfigRecord: {bool, int, float, str, bytes},
    flwr.app.MetricRecord: {int, float},
}
"""Types of entries that Posy stores in each kind of Flower record without Flower's checks."""


@cache
def versions() -> dict[str, str | None]:
    """Return the versions of Python and of the packages that affect a run's results, keyed by name."""
    installed: dict[str, str | None] = {"python": platform.python_version()}
    for name in ("posy", "flwr", "torch", "numpy"):
        try:
            installed[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:  # an app bundle runs without being installed
            installed[name] = None
    return installed


def add_times_to_log() -> None:
    """Add the time to each line of Flower's log in this process, and use colours only in a terminal."""
    update_console_handler(timestamps=True, colored=sys.stderr.isatty())


def isolate_simulation() -> None:
    """Make Ray's actors import this code. Call this function before Ray starts, when Flower loads the ClientApp.

    The actors' import path begins with the working directory of the process that starts Ray. In a simulation, this is
    the directory of the first ``flwr run``. A ``client_app/`` in this directory would run in place of the submitted
    app. An environment variable stores the original directory, against which relative paths are resolved.
    """
    if in_simulation():
        os.environ.setdefault(START_DIRECTORY, str(Path.cwd()))
        os.chdir(Path(__file__).resolve().parent.parent)


def in_simulation() -> bool:
    """Return whether this process simulates a federation, in which server and clients share a file system."""
    return Path(sys.argv[0]).name.startswith("flwr-simulation")


def of_simulation() -> bool:
    """Return whether this process is part of a simulation, such as a Ray worker, and thus shares the server's files."""
    return in_simulation() or Path(sys.argv[0]).name == "default_worker.py"


def raised(reason: str) -> str:
    """Extract the message of a client's exception from the reason in Flower's error.

    A node packs the exception as ``<class 'name'>:<'message'>``. With Ray, the message is the end of a traceback.
    """
    packed = re.fullmatch(r"<class '[\w.()]+'>:<'(.*)'>", reason, re.DOTALL)
    return (packed[1] if packed else reason).rpartition("Exception ClientAppException occurred. Message: ")[2]


def failure(error: Error) -> str:
    """Return the reason why a message has no valid reply, without ids, so that equal failures have equal reasons."""
    template = FAILURES.get(error.code, f"error {error.code}: {{}}")
    return template.format(one_line(raised(str(error.reason or "no reason given")), MAX_REASON))


def retries_of(grid: Grid) -> Any:
    """Return the object that retries a grid's failed calls, or None for a grid in this process."""
    return getattr(grid, "_retry_invoker", None)


class Outages:
    """A counter of failed connections from a grid to its SuperLink; the grid retries each of them.

    A slow or refused reply is not an outage, because the SuperLink still has its state. A grid in this process has no
    outages.
    """

    def __init__(self, grid: Grid) -> None:
        self.count = 0
        invoker = retries_of(grid)
        if invoker is not None:
            self._previous_callback = invoker.on_backoff
            invoker.on_backoff = self._note

    def _note(self, state: Any) -> None:
        self.count += isinstance(state.exception, httpx.ConnectError)
        if self._previous_callback is not None:
            self._previous_callback(state)


PushError = ObjectPushError
"""Exception that a grid raises if the SuperLink rejects part of a message."""


def identity() -> int:
    """Return the id of this process's run, which new messages carry; 0 if Flower did not start this process."""
    try:
        return TaskIdentity.run_id
    except RuntimeError:
        TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 0
        return 0


def with_id(message: Message, message_id: str) -> Message:
    """Set the id of a message, and return the message."""
    message.metadata.__dict__["_message_id"] = message_id
    return message


def unanswered(message: Message, reason: str) -> Message:
    """Return an error in place of the missing reply to a message; Flower may not even have sent the message."""
    if not message.metadata.message_id:
        with_id(message, str(uuid4()))
    return Message(Error(UNANSWERED, reason), reply_to=message)


def answer_to(message: Message, reply: Message) -> Message:
    """Return the reply to a copy of a message as a reply to the message itself."""
    if reply.metadata.reply_to_message_id == message.metadata.message_id:
        return reply
    return Message(reply.error if reply.has_error() else reply.content, reply_to=message)


def with_content(message: Message, content: RecordDict) -> Message:
    """Return a message with the same metadata and different content."""
    return make_message(message.metadata, content)


def with_error(message: Message, error: Error) -> Message:
    """Return a message with the same metadata and an error in place of its content."""
    return make_message(message.metadata, error=error)


def encoded(content: RecordDict) -> bytes:
    """Serialise records to bytes."""
    data: bytes = recorddict_to_proto(content).SerializeToString(deterministic=True)
    return data


def decoded(data: bytes) -> RecordDict:
    """Deserialise records from the output of :func:`encoded`."""
    return recorddict_from_proto(_RecordDictProto.FromString(data))


_RecordDictProto = type(recorddict_to_proto(RecordDict()))

ClientAppCallable = Callable[[Message, Context], Message]


class Array(flwr.app.Array):
    """A Flower array that is serialised only when a transport asks for its bytes, and only once.

    A strategy and the clients in one process share the array without copying it, so they must not modify it. On the
    wire it is an ordinary ``Array``, so the class must have the same name. A scalar keeps its shape ``()``.
    """

    def __init__(self, ndarray: npt.NDArray[Any]) -> None:
        self.__dict__.update(
            dtype=_name_of(ndarray.dtype), shape=tuple(ndarray.shape), stype="numpy.ndarray", _ndarray=ndarray
        )

    @property
    def data(self) -> bytes:  # type: ignore[override]
        """The bytes of the array as ``numpy.save`` writes them."""
        if "_data" not in self.__dict__:
            buffer = BytesIO()
            np.save(buffer, np.asarray(self.__dict__["_ndarray"], order="C"), allow_pickle=False)
            self.__dict__["_data"] = buffer.getvalue()
        data: bytes = self.__dict__["_data"]
        return data

    def forget_bytes(self) -> None:
        """Free the serialised bytes; the array creates them again when a transport asks for them."""
        self.__dict__.pop("_data", None)

    def numpy(self) -> npt.NDArray[Any]:
        """Return the array itself."""
        ndarray: npt.NDArray[Any] = self.__dict__["_ndarray"]
        return ndarray


_name_of = cache(str)  # the name of a data type, which NumPy would rebuild on every call


def record_in(content: flwr.app.RecordDict, name: str, kind: type[R]) -> R:
    """Return a record in a message, or raise :class:`KeyError` if no record has this name and kind.

    Flower's ``array_records`` and similar properties first check all records, which takes longer than a training step.
    """
    record = content[name]
    if not isinstance(record, kind):
        raise KeyError(name)
    return record


def record_of(arrays: Mapping[str, npt.NDArray[Any] | Array]) -> flwr.app.ArrayRecord:
    """Return a Flower record that holds arrays by reference; Flower's constructor would copy their bytes."""
    record = flwr.app.ArrayRecord()
    entries_of(record).update({name: a if isinstance(a, Array) else Array(a) for name, a in arrays.items()})
    return record


def with_entries(record: R, values: Mapping[str, Any]) -> R:
    """Return a copy of a Flower record with additional entries.

    Flower checks each new entry, which takes longer than a small training step. This function adds numbers, strings and
    bytes without this check. For other values, Flower raises :class:`TypeError` if they are invalid.
    """
    record = record.copy()
    entries, plain_types = entries_of(record), PLAIN[type(record)]
    for name, value in values.items():
        (entries if type(value) in plain_types else record)[name] = value
    return record


def content_of(**records: flwr.app.ArrayRecord | flwr.app.ConfigRecord | flwr.app.MetricRecord) -> flwr.app.RecordDict:
    """Build the content of a message from records, keyed by name."""
    content = flwr.app.RecordDict()
    entries_of(content).update(records)
    return content


def entries_of(record: Any) -> dict[str, Any]:
    """Return the mutable entries of a Flower record. New entries bypass Flower's checks; see :func:`with_entries`."""
    entries: dict[str, Any] = record.__dict__["_data"]
    return entries
