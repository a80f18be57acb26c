"""Adapt Posy to the Flower runtime, including private parts of Flower."""

import importlib.metadata
import logging
import os
import platform
import re
import sys
from collections.abc import Mapping
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

import flwr
import flwr.app
import flwr.supercore.inflatable.inflatable_utils as pulling
import httpx
import numpy as np
import numpy.typing as npt
from flwr.app import Error, Message
from flwr.common.constant import ErrorCode, SType
from flwr.serverapp import Grid
from flwr.supercore.retry import RetryInvoker, RetryState

from posy.paths import START_DIRECTORY
from posy.words import one_line

R = TypeVar("R", flwr.app.ArrayRecord, flwr.app.ConfigRecord, flwr.app.MetricRecord)

FLOWER = "1.39"
"""Version of Flower that Posy supports."""
CLOCK_SECONDS = 60.0
"""Tolerated clock skew between two machines. Messages live this much longer than round-timeout."""
MAX_REASON = 300
"""Largest number of characters of a shown reason."""
UNANSWERED = 1000
"""Code of Posy's own errors, for messages without a reply."""
PING = "ping"
"""Key in the config of a message that only asks a node for a reply."""
EXIT_CODE = "Exit Code: "
"""Start of the message that Flower logs when a process ends with an error."""
FAILURES = {
    UNANSWERED: "{}",
    ErrorCode.LOAD_CLIENT_APP_EXCEPTION: "its app could not be loaded: {}",
    ErrorCode.CLIENT_APP_RAISED_EXCEPTION: "it failed: {}",
    ErrorCode.MESSAGE_UNAVAILABLE: "its message or its reply was lost or came too late",
    ErrorCode.REPLY_MESSAGE_UNAVAILABLE: "its reply came too late",
    ErrorCode.NODE_UNAVAILABLE: "its node is gone",
    ErrorCode.MOD_FAILED_PRECONDITION: "its app refused the message: {}",
    ErrorCode.INVALID_FAB: "its copy of the app is not valid: {}",
    ErrorCode.CLIENT_APP_CRASHED: "its app crashed: {}",
}
"""Descriptions of Flower's errors for a client; ``{}`` is Flower's message."""


class ErrorsOnOneLine(logging.Filter):
    """Log an error with one line, without a traceback and without an exit code.

    Flower logs the traceback of each exception of a ServerApp. It then logs an exit code and calls the exception
    unhandled. If the message is for the user, for example about a wrong setting, this text hides it.

    Parameters
    ----------
    kinds : tuple of type
        The classes of exceptions whose messages are for the user.
    """

    def __init__(self, kinds: tuple[type[Exception], ...]) -> None:
        super().__init__()
        self.kinds = kinds
        self._explained = False

    def filter(self, record: logging.LogRecord) -> bool:
        """Replace a record with the traceback of such an exception by its message, and drop the exit code after it."""
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
"""Types of entries that Posy puts into Flower's records without Flower's checks."""


@cache
def versions() -> dict[str, str | None]:
    """Return the installed versions that decide the results of a run, by name of the package."""
    installed: dict[str, str | None] = {"python": platform.python_version()}
    for name in ("posy", "flwr", "torch", "numpy"):
        try:
            installed[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:  # an app bundle runs without being installed
            installed[name] = None
    return installed


def isolate_simulation() -> None:
    """Make Ray's actors import this code; call it before Ray starts, when Flower loads the ClientApp.

    Ray puts the working directory of the process that starts it first on the actors' import path. In a simulation,
    this is the directory of the first ``flwr run``. A ``client_app/`` in this directory would run in place of the
    submitted app. An environment variable stores the directory for relative paths.
    """
    if in_simulation():
        os.environ.setdefault(START_DIRECTORY, str(Path.cwd()))
        os.chdir(Path(__file__).resolve().parent.parent)


def in_simulation() -> bool:
    """Return whether this process simulates a federation: server and clients then share a file system."""
    return Path(sys.argv[0]).name.startswith("flwr-simulation")


def of_simulation() -> bool:
    """Return whether this process is part of a simulation, such as a Ray worker: it shares the server's files."""
    return in_simulation() or Path(sys.argv[0]).name == "default_worker.py"


def raised(reason: str) -> str:
    """Return the message of a client's exception from the reason in Flower's error.

    A node packs the exception as ``<class 'name'>:<'message'>``. With Ray, the message is the end of a traceback.
    """
    packed = re.fullmatch(r"<class '[\w.()]+'>:<'(.*)'>", reason, re.DOTALL)
    return (packed[1] if packed else reason).rpartition("Exception ClientAppException occurred. Message: ")[2]


def failure(error: Error) -> str:
    """Return the reason why a message has no proper reply. The text holds no ids, so that equal reasons are equal."""
    words = FAILURES.get(error.code, f"error {error.code}: {{}}")
    return words.format(one_line(raised(str(error.reason or "no reason given")), MAX_REASON))


class Outages:
    """Count the failed connections of a grid to its SuperLink, which the grid retries.

    A slow or refused reply is not an outage, because the SuperLink still has its state. A grid without another process
    has no outages.
    """

    def __init__(self, grid: Grid) -> None:
        self.count = 0
        invoker = getattr(grid, "_retry_invoker", None)
        if isinstance(invoker, RetryInvoker):
            self._noted = invoker.on_backoff
            invoker.on_backoff = self._note

    def _note(self, state: RetryState) -> None:
        self.count += isinstance(state.exception, httpx.ConnectError)
        if self._noted is not None:
            self._noted(state)


def unanswered(message: Message, reason: str) -> Message:
    """Return an error in place of the missing reply to a message, which Flower may not even have sent."""
    if not message.metadata.message_id:
        message.metadata.__dict__["_message_id"] = str(uuid4())
    return Message(Error(UNANSWERED, reason), reply_to=message)


def answer_to(message_id: str, reply: Message) -> Message:
    """Make a reply to a copy of a message a reply to the message itself."""
    reply.metadata.__dict__["_reply_to_message_id"] = message_id
    return reply


BACKOFF_SECONDS = 0.05
"""Seconds before Flower first retries a missing part of a message (Flower's default: 1)."""


def look_for_parts_sooner(patience: float | None = None) -> None:
    """Shorten Flower's first wait for a missing part of a message, which makes messages faster.

    After ``patience`` seconds, Flower gives up a missing part. Its default is two hours.
    """
    changes = {"initial_backoff": BACKOFF_SECONDS} | ({} if patience is None else {"max_time": patience})
    for function in (pulling.pull_objects, pulling.pull_and_inflate_object_from_tree):
        defaults = function.__kwdefaults__ or {}
        defaults |= {key: value for key, value in changes.items() if key in defaults}


class Array(flwr.app.Array):
    """A Flower array that is serialised only when a transport asks for its bytes, and then once.

    A strategy and the clients of one process share the array without a copy, so that readers may not write to it. On
    the wire it is an ordinary ``Array``, which requires this name of the class. A scalar keeps its shape ``()``.
    """

    def __init__(self, ndarray: npt.NDArray[Any]) -> None:
        self.__dict__.update(
            dtype=_name_of(ndarray.dtype), shape=tuple(ndarray.shape), stype=str(SType.NUMPY), _ndarray=ndarray
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

    def numpy(self) -> npt.NDArray[Any]:
        """Return the array itself."""
        ndarray: npt.NDArray[Any] = self.__dict__["_ndarray"]
        return ndarray


_name_of = cache(str)  # of a data type; NumPy rebuilds the text at every call


def record_in(content: flwr.app.RecordDict, name: str, kind: type[R]) -> R:
    """Return a record of a message; raise :class:`KeyError` without a record of this name and kind.

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
    """Return a copy of a Flower record with further entries.

    Flower checks each new entry, which takes longer than a small training step. This function checks numbers and texts
    by their types. Flower checks all other values, and raises :class:`TypeError` for an invalid entry.
    """
    record = record.copy()
    entries, plain_types = entries_of(record), PLAIN[type(record)]
    for name, value in values.items():
        (entries if type(value) in plain_types else record)[name] = value
    return record


def content_of(**records: flwr.app.ArrayRecord | flwr.app.ConfigRecord | flwr.app.MetricRecord) -> flwr.app.RecordDict:
    """Return the content of a message."""
    content = flwr.app.RecordDict()
    entries_of(content).update(records)
    return content


def entries_of(record: Any) -> dict[str, Any]:
    """Return the mutable entries of a Flower record, without checks; :func:`with_entries` checks new entries."""
    entries: dict[str, Any] = record.__dict__["_data"]
    return entries
