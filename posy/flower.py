"""What Posy needs to know of the Flower runtime that it runs in."""

import os
import re
import sys
from pathlib import Path

import httpx
from flwr.app import Message
from flwr.serverapp import Grid
from flwr.supercore.retry import RetryInvoker, RetryState

START_DIRECTORY = "POSY_START_DIRECTORY"
CLOCK_SECONDS = 60.0
"""By how much the clocks of two machines may differ: a message lives for round-timeout and so much more."""


def isolate_simulation() -> None:
    """Make Ray's actors import this very code.

    Ray puts the working directory of the process that starts it before everything else on the actors'
    import path. In a simulation that is where the first ``flwr run`` was typed, so a ``client_app/``
    lying there would run in place of the submitted one. Called when the ClientApp is loaded, which in
    the simulation's process comes before Ray starts; the directory left is kept for relative paths.
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


def absolute(path: str) -> Path:
    """Return a path from the settings, relative ones taken from where the process was started."""
    # Unlike pathlib's, these take a user who is unknown and a loop of links, too: what is not there is told later.
    whole = Path(os.environ.get(START_DIRECTORY, Path.cwd())) / os.path.expanduser(path)  # noqa: PTH111
    return Path(os.path.realpath(whole))


def raised(reason: str) -> str:
    """Return the message of what a client has raised, out of what Flower's runtimes make of it.

    A node packs the exception as ``<class 'name'>:<'message'>``; in Ray's the message is the end of a traceback.
    """
    packed = re.fullmatch(r"<class '[\w.()]+'>:<'(.*)'>", reason, re.DOTALL)
    return (packed[1] if packed else reason).rpartition("Exception ClientAppException occurred. Message: ")[2]


class Outages:
    """Counts how often nobody answered at the address of a grid's SuperLink; the grid asks again until one does.

    An answer that is slow or refused is no outage: what the SuperLink was told it still knows.

    Parameters
    ----------
    grid : Grid
        The grid; one that reaches no other process has no outages.
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


def answer_to(message_id: str, reply: Message) -> Message:
    """Let a reply to a copy of a message be one to the message itself."""
    reply.metadata.__dict__["_reply_to_message_id"] = message_id
    return reply
