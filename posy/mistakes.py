"""Distinguish bugs in a method's code from client failures, and report the bugs to the method's author.

A client may fail because its training diverges, its data cannot be read, or its memory is full. The server then drops
the client's reply, and the run continues. Any other exception on a client is a bug in the method's code. If
the whole run is in one process or a simulation, the exception ends the run with a traceback. On a real node, the
traceback goes to the node's log, and the server receives the exception's type with the file and line.
"""

import traceback
from pathlib import Path

from flwr.app import Error

from posy.extensions import is_custom_frame
from posy.flower import in_simulation, of_simulation

TRACEBACK = "Traceback (most recent call last):"
_PACKAGE = Path(__file__).resolve().parent.parent


class MethodError(RuntimeError):
    """A method's code raised an exception on a client. The message contains the file and line, or the traceback."""


def is_failure(error: BaseException) -> bool:
    """Return whether an exception is a client failure; any other exception is a bug in the method's code.

    Failures are Posy's own exceptions, and exceptions about files, connections or memory.
    """
    is_posy_error = type(error).__module__.partition(".")[0] == "posy" and not isinstance(error, MethodError)
    return is_posy_error or isinstance(error, OSError | MemoryError) or type(error).__name__ == "OutOfMemoryError"


def place_of(error: BaseException, *, outside: bool = True) -> str:
    """Return the file and line in Posy or in custom code that raised an exception, without the file's folder.

    With ``outside`` False, files outside Posy and the bundle are skipped, so that a site's file names stay private.
    """
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        path = Path(frame.f_code.co_filename)
        if outside and is_custom_frame(frame):
            return f"{path.name}, line {line}"
        if path.is_relative_to(_PACKAGE) and "site-packages" not in (inner := path.relative_to(_PACKAGE)).parts:
            return f"{inner}, line {line}"
    return "an unknown place"


def method_error(error: Exception) -> MethodError:
    """Return the error that reports a bug to the server: in a simulation with a traceback, else with a location."""
    if of_simulation():
        return MethodError("".join(traceback.format_exception(error)))
    return MethodError(f"{type(error).__name__} at {place_of(error)}: {error}")


def raise_mistake(client: int, error: Error) -> None:
    """Raise :class:`MethodError` if a simulated client reports an exception in the method's code."""
    reason = str(error.reason or "")
    if in_simulation() and MethodError.__name__ in reason and TRACEBACK in reason:
        _, _, text = reason.rpartition(MethodError.__name__)
        text = text.rstrip().removesuffix("'>")
        raise MethodError(f"the method's code raised an exception on client {client}\n{text}")


def with_traceback(error: BaseException) -> BaseException:
    """Add an exception's traceback to it as a note, so that it reaches other processes, and return the exception."""
    error.add_note("".join(traceback.format_exception(error)))
    return error
