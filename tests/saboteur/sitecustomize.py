"""A SuperLink that loses things, and clocks that are set, when files say so; this folder stands first on the path.

The files lie in the folder that ``POSY_SABOTAGE`` names. Each order is carried out once, by the SuperLink's process:
``lose-message``, ``lose-reply``, ``lose-object-of-message``, ``lose-object-of-reply``; ``die-while-pulled`` and
``die-while-pushed`` kill it while a node fetches a message or hands in a reply. ``clock`` holds the seconds by which
the clock of all these processes is ahead.
"""

import datetime
import functools
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

FOLDER = Path(os.environ["POSY_SABOTAGE"])
LOOK_SECONDS = 0.1

_seen = {"at": 0.0, "ahead": 0.0}
_time, _monotonic = time.time, time.monotonic


def told(word: str) -> bool:
    """Tell whether a file gives an order, and take the file away."""
    try:
        (FOLDER / word).unlink()
    except FileNotFoundError:
        return False
    return True


def ahead() -> float:
    """Return the seconds by which the clock is ahead."""
    if _monotonic() - _seen["at"] > LOOK_SECONDS:
        try:
            found = float((FOLDER / "clock").read_text() or 0)
        except FileNotFoundError:
            found = 0.0
        _seen.update(at=_monotonic(), ahead=found)
    return _seen["ahead"]


def instead(module: Any, name: str, change: Callable[..., Any]) -> None:
    """Replace a function by one that is called with the function and its arguments."""
    function = getattr(module, name)

    @functools.wraps(function)
    def changed(*args: Any, **named: Any) -> Any:
        return change(function, *args, **named)

    setattr(module, name, changed)


def sabotage() -> None:
    """Let this process, a SuperLink, obey."""
    from posy.deploy import front
    from posy.deploy.flower_internals import fleet_call

    def pull_messages(call: Callable[..., Any], *args: Any, **named: Any) -> Any:
        response = call(*args, **named)
        types = [message.metadata.message_type for message in response.messages_list]
        return type(response)() if types == ["train"] and told("lose-message") else response

    def push_messages(call: Callable[..., Any], calls: Any, request: Any, *args: Any, **named: Any) -> Any:
        types = [message.metadata.message_type for message in request.messages_list]
        if types == ["train"] and told("lose-reply"):
            return fleet_call("PushMessages").response(results={"0": 0})
        return call(calls, request, *args, **named)

    def pull_object(call: Callable[..., Any], *args: Any, **named: Any) -> Any:
        if told("die-while-pulled"):
            os.kill(os.getpid(), signal.SIGKILL)
        if told("lose-object-of-message"):
            return fleet_call("PullObject").response(object_found=False, object_available=False)
        return call(*args, **named)

    def push_object(call: Callable[..., Any], *args: Any, **named: Any) -> Any:
        if told("die-while-pushed"):
            os.kill(os.getpid(), signal.SIGKILL)
        if told("lose-object-of-reply"):
            return fleet_call("PushObject").response(stored=True)
        return call(*args, **named)

    for change in (pull_messages, push_messages, pull_object, push_object):
        instead(front.NodeCalls, "_" + change.__name__.replace("_", ""), change)


time.time = lambda: _time() + ahead()
if any("posy.commands.deploy" in word or "flwr-" in word for word in sys.orig_argv):
    from flwr.supercore import date

    date.now = lambda: datetime.datetime.fromtimestamp(time.time(), datetime.UTC)
if "posy.deploy.link" in sys.orig_argv:
    sabotage()
