"""What Posy knows about the Flower runtime that it runs in, its private parts included."""

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
"""Version of Flower that Posy is made for."""
CLOCK_SECONDS = 60.0
"""Seconds by which the clocks of two machines may differ; a message lives that much longer than round-timeout."""
MAX_REASON = 300
"""Number of characters of a reason that are shown."""
UNANSWERED = 1000
"""Code of Posy's own errors, for messages without a reply."""
PING = "ping"
"""What the config of a message holds that asks a node for nothing but an answer."""
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
"""What Flower's errors mean for a client; Flower's own words follow where they say more."""


class ErrorsOnOneLine(logging.Filter):
    """Log an error with one line, without a traceback.

    Flower logs the traceback of each exception of a ServerApp. Where an exception's message is meant for the user, as
    the message about a wrong setting, the traceback hides it.

    Parameters
    ----------
    kinds : tuple of type
        The classes of exceptions whose message is meant for the user.
    """

    def __init__(self, kinds: tuple[type[Exception], ...]) -> None:
        super().__init__()
        self.kinds = kinds

    def filter(self, record: logging.LogRecord) -> bool:
        """Replace a record with the traceback of such an exception by a record with its message."""
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, self.kinds):
            record.msg, record.args = "%s: %s", (record.getMessage(), error)
            record.exc_info = record.exc_text = None
        return True


PLAIN: dict[type, set[type]] = {
    flwr.app.ArrayRecord: set(),
    flwr.app.ConfigRecord: {bool, int, float, str, bytes},
    flwr.app.MetricRecord: {int, float},
}
"""Types of the entries of Flower's records that need no further look."""


@cache
def versions() -> dict[str, str | None]:
    """Return what is installed on this machine and decides what a run computes, by name."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in ("posy", "flwr", "torch", "numpy"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:  # an app bundle runs without being installed
            found[name] = None
    return found


def isolate_simulation() -> None:
    """Make Ray's actors import this very code; to be called before Ray starts, when the ClientApp is loaded.

    Ray puts the working directory of the process that starts it before everything else on the actors' import path. In
    a simulation that is where the first ``flwr run`` was typed, so a ``client_app/`` lying there would run in place of
    the submitted one. The directory left is kept for relative paths.
    """
    if in_simulation():
        os.environ.setdefault(START_DIRECTORY, str(Path.cwd()))
        os.chdir(Path(__file__).resolve().parent.parent)


def in_simulation() -> bool:
    """Tell whether this process simulates a federation: server and clients then have one file system."""
    return Path(sys.argv[0]).name.startswith("flwr-simulation")


def of_simulation() -> bool:
    """Tell whether this process runs clients of a simulation, as Ray's workers do: its files are the server's."""
    return in_simulation() or Path(sys.argv[0]).name == "default_worker.py"


def raised(reason: str) -> str:
    """Return the message of what a client has raised, out of what Flower's runtimes make of it.

    A node packs the exception as ``<class 'name'>:<'message'>``; in Ray's the message is the end of a traceback.
    """
    packed = re.fullmatch(r"<class '[\w.()]+'>:<'(.*)'>", reason, re.DOTALL)
    return (packed[1] if packed else reason).rpartition("Exception ClientAppException occurred. Message: ")[2]


def failure(error: Error) -> str:
    """Return in plain words why a message has no proper reply, as a text that can be counted: it holds no ids."""
    words = FAILURES.get(error.code, f"error {error.code}: {{}}")
    return words.format(one_line(raised(str(error.reason or "no reason given")), MAX_REASON))


class Outages:
    """Counts how often nobody answered at the address of a grid's SuperLink; the grid asks again until one does.

    An answer that is slow or refused is no outage: what the SuperLink was told it still knows. A grid that reaches no
    other process has no outages.
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
    """Return an error in place of the reply that a message has not got, which may not even have been sent."""
    if not message.metadata.message_id:
        message.metadata.__dict__["_message_id"] = str(uuid4())
    return Message(Error(UNANSWERED, reason), reply_to=message)


def answer_to(message_id: str, reply: Message) -> Message:
    """Let a reply to a copy of a message be one to the message itself."""
    reply.metadata.__dict__["_reply_to_message_id"] = message_id
    return reply


BACKOFF_SECONDS = 0.05
"""Seconds before Flower first looks again for a part of a message that is still on its way; its own value is 1."""


def look_for_parts_sooner(patience: float | None = None) -> None:
    """Let Flower look sooner again for a missing part of a message; without this it works too, only slower.

    After ``patience`` seconds a part that is still missing is given up; Flower's own limit is two hours.
    """
    changes = {"initial_backoff": BACKOFF_SECONDS} | ({} if patience is None else {"max_time": patience})
    for function in (pulling.pull_objects, pulling.pull_and_inflate_object_from_tree):
        defaults = function.__kwdefaults__ or {}
        defaults |= {key: value for key, value in changes.items() if key in defaults}


class Array(flwr.app.Array):
    """A Flower array that is serialised only when a transport asks for its bytes, and then once.

    Between a strategy and clients of one process nothing is copied: whoever reads the array must not
    write to it. On the wire it is an ordinary ``Array``, for which it needs that name. A scalar keeps its shape ``()``.
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


_name_of = cache(str)  # of a type of numbers: NumPy makes it up anew each time


def record_in(content: flwr.app.RecordDict, name: str, kind: type[R]) -> R:
    """Return a record of a message, or raise :class:`KeyError` if it holds none of this name and kind.

    Flower's ``array_records`` and the like look at all records first, which costs more than a small step of training.
    """
    record = content[name]
    if not isinstance(record, kind):
        raise KeyError(name)
    return record


def record_of(arrays: Mapping[str, npt.NDArray[Any] | Array]) -> flwr.app.ArrayRecord:
    """Return a Flower record that holds arrays by reference; its own constructor would copy their bytes."""
    record = flwr.app.ArrayRecord()
    entries_of(record).update({name: a if isinstance(a, Array) else Array(a) for name, a in arrays.items()})
    return record


def with_entries(record: R, values: Mapping[str, Any]) -> R:
    """Return a Flower record of its own with further entries.

    Flower looks at each entry as it is set, which costs more than a small step of training. Here plain numbers and
    texts are told by their types; all else goes Flower's way, and raises :class:`TypeError` if it cannot be an entry.
    """
    record = record.copy()
    entries, known = entries_of(record), PLAIN[type(record)]
    for name, value in values.items():
        (entries if type(value) in known else record)[name] = value
    return record


def content_of(**records: flwr.app.ArrayRecord | flwr.app.ConfigRecord | flwr.app.MetricRecord) -> flwr.app.RecordDict:
    """Return the content of a message."""
    content = flwr.app.RecordDict()
    entries_of(content).update(records)
    return content


def entries_of(record: Any) -> dict[str, Any]:
    """Return what a Flower record holds, itself; :func:`with_entries` is for changes that Flower is to look at."""
    entries: dict[str, Any] = record.__dict__["_data"]
    return entries
