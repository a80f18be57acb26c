"""A node that misbehaves when files in its working directory say so; this folder stands first on its path.

``slow``: it keeps its replies back for a moment. ``lie``: what it sends after a training is spoilt, in the rounds 1,
2, … in another way each. ``die``, ``hang``: its worker process ends, or stands still, when it has trained next.
All nodes with this folder on their path tell their SuperLink more often that they are there.
"""

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

LIES = ("nan", "inf", "shape", "keys", "none", "minus", "many")
"""Of rounds 1, 2, …; in later ones even a liar is honest."""
CLIENT = 1
"""Whose node obeys; other nodes with this folder on their path see the same files."""
PAUSE_SECONDS = 0.4
HEARTBEAT_SECONDS = 10
"""The shortest time between two signs of life that Flower allows."""


def spoil(content: Any, lie: str) -> None:
    """Spoil the content of a reply to a training message."""
    import numpy as np
    from flwr.app import Array, MetricRecord

    arrays, metrics = content.array_records["arrays"], content.metric_records["metrics"]
    name = next(iter(arrays))
    model = arrays[name].numpy().copy()
    if lie == "keys":
        content["metrics"] = MetricRecord({"num-examples": metrics["num-examples"]})
    elif lie == "shape":
        arrays[name] = Array(model[:-1])
    elif lie in ("nan", "inf"):
        model[7] = np.float32(lie)
        arrays[name] = Array(model)
    else:
        metrics["num-examples"] = {"none": 0, "minus": -1, "many": 10**12}[lie]


def told(word: str) -> bool:
    """Tell whether a file gives an order, and take the file away."""
    try:
        Path(word).unlink()
    except FileNotFoundError:
        return False
    return True


def misbehaving(push: Callable[..., Any]) -> Callable[..., Any]:
    """Return what hands in replies, in its own way."""

    def pushed(task: Any, message: Any) -> Any:
        from posy.folding import fold, unfold

        trained = message.metadata.message_type == "train" and message.has_content()
        content = unfold(message.content) if trained else None
        if content is not None and content.config_records["config"]["client"] == CLIENT:
            number = int(message.metadata.group_id or 0)
            if Path("slow").exists():
                time.sleep(PAUSE_SECONDS)
            if Path("lie").exists() and 1 <= number <= len(LIES):
                spoil(content, LIES[number - 1])
                message.content = fold(content)
            for word, number in (("die", signal.SIGKILL), ("hang", signal.SIGSTOP)):
                if told(word):
                    os.kill(os.getpid(), number)
        return push(task, message)

    return pushed


if "posy.deploy.node" in sys.orig_argv:
    from posy.deploy import fleet
    from posy.deploy.tasks import Task

    Task.push = misbehaving(Task.push)
    fleet.HEARTBEAT_SECONDS = HEARTBEAT_SECONDS
