"""Signals that end a command: each ends it as Ctrl-C does, and is put off where work must not be divided."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import current_thread, main_thread
from typing import Any

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_interrupted: list[int] = []
"""Signals that have raised KeyboardInterrupt: Python drops it in a finaliser, or a weak reference's callback.

A list and no Event: a second signal may come while the first is noted, and would wait for the Event's lock for ever.
"""


@contextmanager
def interruptible() -> Iterator[None]:
    """Let Ctrl-C, `kill` and a closed terminal end a command: nothing that it started stays behind.

    A signal that is ignored stays so, as `nohup` wants it.
    """

    def interrupt(number: int, frame: Any) -> None:
        _interrupted.append(number)
        raise KeyboardInterrupt

    heeded = [ending for ending in ENDING if signal.getsignal(ending) is not signal.SIG_IGN]
    before = {ending: signal.signal(ending, interrupt) for ending in heeded}
    try:
        yield
    finally:
        _interrupted.clear()
        for ending, handler in before.items():
            signal.signal(ending, handler)


@contextmanager
def undivided() -> Iterator[None]:
    """Put off Ctrl-C, `kill` and a closed terminal to the end of a block; a second one ends it at once.

    At its end an interrupt that Python has dropped before is raised again.
    """
    if current_thread() is not main_thread():  # no signal comes here
        yield
        return
    before: dict[signal.Signals, Callable[[int, Any], Any]] = {}
    noted: list[int] = []

    def note(number: int, frame: Any) -> None:
        noted.append(number)
        if len(noted) > 1:
            before[signal.Signals(number)](number, frame)

    for ending in ENDING:
        handler = signal.getsignal(ending)
        if callable(handler):  # not what ends the process by itself, or is ignored
            before[ending] = handler
            signal.signal(ending, note)
    try:
        yield
    finally:
        for ending, handler in before.items():
            signal.signal(ending, handler)
    if noted:
        signal.raise_signal(noted[0])
    if _interrupted:
        raise KeyboardInterrupt
