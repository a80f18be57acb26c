"""Signals that end a command, including signals that Python or the shell would drop."""

import os
import signal
import subprocess
import sys
import weakref

import pytest

from posy.signals import ENDING, deferred_signals, interruptible


class Referent:
    """Target of a weak reference."""


@pytest.mark.parametrize("number", ENDING)
def test_signals_are_deferred_to_the_end_of_a_critical_section(number: int) -> None:
    steps = []
    original = signal.signal(number, signal.SIG_DFL)  # nohup ignores SIGHUP
    try:
        with interruptible(), pytest.raises(KeyboardInterrupt):
            with deferred_signals():
                os.kill(os.getpid(), number)
                steps.append(1)
            steps.append(2)
    finally:
        signal.signal(number, original)
    assert steps == [1]


def test_a_second_signal_interrupts_at_once() -> None:
    steps = []
    with interruptible(), pytest.raises(KeyboardInterrupt), deferred_signals():
        os.kill(os.getpid(), signal.SIGTERM)
        steps.append(1)
        os.kill(os.getpid(), signal.SIGTERM)
        steps.append(2)
    assert steps == [1]


@pytest.mark.parametrize("at", range(1, 13))
def test_a_second_signal_may_arrive_during_the_handler(at: int) -> None:
    """Ctrl-C reaches every process of a terminal, and a table also terminates its runs."""
    script = f"""
import signal, sys
from posy.signals import interruptible

steps = []

def trace(frame, event, argument):
    steps.append(event)
    if len(steps) == {at}:  # a step of the handler or of a function that it calls
        sys.settrace(None)
        signal.raise_signal(signal.SIGTERM)
    return trace

try:
    with interruptible():
        sys.settrace(trace)
        signal.raise_signal(signal.SIGINT)
except KeyboardInterrupt:
    print("ended")
"""
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert process.stdout == "ended\n", process.stderr


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_dropped_by_python_is_raised_later() -> None:
    steps = []
    with interruptible(), pytest.raises(KeyboardInterrupt):
        referent = Referent()
        reference = weakref.ref(referent, lambda _: signal.raise_signal(signal.SIGTERM))
        del referent  # Python drops an exception of the callback
        steps.append(1)
        with deferred_signals():
            steps.append(2)
        steps.append(3)
    assert reference() is None
    assert steps == [1, 2]
    with deferred_signals():  # the next command has not been interrupted
        pass


def test_ignored_signals_stay_ignored() -> None:
    original = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with interruptible():
            os.kill(os.getpid(), signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, original)
