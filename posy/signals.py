"""Signals that end a run: put off where work must not be divided."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import current_thread, main_thread
from typing import Any

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def undivided() -> Iterator[None]:
    """Put off Ctrl-C, `kill` and a closed terminal to the end of a block; a second one ends it at once."""
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
