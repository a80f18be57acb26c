"""A node that lies: with this folder on its path, what its ClientApp sends is spoilt, in each round in another way."""

import os
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

LIES = ("nan", "inf", "shape", "keys", "none", "minus", "many")
"""Of rounds 1, 2, …; later ones are honest."""


def spoil(content: Any, lie: str) -> None:
    """Spoil the content of a reply to a training message."""
    from flwr.app import Array, MetricRecord

    arrays, metrics = content.array_records["arrays"], content.metric_records["metrics"]
    model = arrays["0"].numpy().copy()
    if lie == "keys":
        content["metrics"] = MetricRecord({"num-examples": metrics["num-examples"]})
    elif lie == "shape":
        arrays["0"] = Array(model[:-1])
    elif lie in ("nan", "inf"):
        model[7] = np.float32(lie)
        arrays["0"] = Array(model)
    else:
        metrics["num-examples"] = {"none": 0, "minus": -1, "many": 10**12}[lie]


def lying(push: Callable[..., Any]) -> Callable[..., Any]:
    """Return what hands in replies, spoilt before."""

    def pushed(client: Any, message: Any, context: Any) -> Any:
        number = int(message.metadata.group_id or 0)
        if message.metadata.message_type == "train" and 1 <= number <= len(LIES):
            spoil(message.content, LIES[number - 1])
        return push(client, message, context)

    return pushed


if "posy.commands.deploy.worker" in sys.orig_argv:
    from flwr.supernode.runtime import run_clientapp

    run_clientapp.push_message = lying(run_clientapp.push_message)
    print("a liar", os.getpid(), flush=True)
