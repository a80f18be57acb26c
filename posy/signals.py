"""Handle signals that stop a command: treat them like Ctrl-C, and defer them during operations that must be atomic."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import current_thread, main_thread
from typing import Any

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_interrupted: list[int] = []
"""Signals that have raised KeyboardInterrupt; Python drops this exception in finalisers and weak-reference callbacks.

This is a list, because an Event can deadlock: a second signal may arrive while the first one holds the Event's lock.
"""


@contextmanager
def interruptible() -> Iterator[None]:
    """Stop a command on Ctrl-C, `kill` or a closed terminal, together with all processes that it started.

    Ignored signals remain ignored, as `nohup` requires.
    """

    def interrupt(number: int, frame: Any) -> None:
        _interrupted.append(number)
        raise KeyboardInterrupt

    active = [ending for ending in ENDING if signal.getsignal(ending) is not signal.SIG_IGN]
    handlers = {ending: signal.signal(ending, interrupt) for ending in active}
    try:
        yield
    finally:
        _interrupted.clear()
        for ending, handler in handlers.items():
            signal.signal(ending, handler)


@contextmanager
def deferred_signals() -> Iterator[None]:
    """Defer Ctrl-C, `kill` and a closed terminal until the end of a block. A second signal ends the block at once.

    At the end of the block, re-raise any interrupt that Python has dropped.
    """
    if current_thread() is not main_thread():  # only the main thread receives signals
        yield
        return
    handlers: dict[signal.Signals, Callable[[int, Any], Any]] = {}
    received: list[int] = []

    def note(number: int, frame: Any) -> None:
        received.append(number)
        if len(received) > 1:
            handlers[signal.Signals(number)](number, frame)

    for ending in ENDING:
        handler = signal.getsignal(ending)
        if callable(handler):  # the signal is not ignored, and has no default action
            handlers[ending] = handler
            signal.signal(ending, note)
    try:
        yield
    finally:
        for ending, handler in handlers.items():
            signal.signal(ending, handler)
    if received:
        signal.raise_signal(received[0])
    if _interrupted:
        raise KeyboardInterrupt
