"""The secrets of secure aggregation, which stay in the memory of a worker and never reach the node's process.

A node stores the context of a run only after it has sent the reply. If the node lost the context in between, the client
would forget that it has revealed shares, and could reveal others. A worker therefore takes the sessions out of the
context before it sends a reply. If the worker ends, its sessions end too, and the client refuses the rest of the round.
"""

from collections import OrderedDict
from typing import Any

from flwr.app import Context

PREFIX = "secure-aggregation-"
"""Prefix of the records' names; a run's code and this worker may have different versions of Posy."""
MOST_RUNS = 1000
"""Largest number of runs whose sessions a worker stores."""


class Sessions:
    """The sessions of the clients of a node, by run."""

    def __init__(self) -> None:
        self._by_run: OrderedDict[tuple[int, int], dict[str, Any]] = OrderedDict()

    def restore(self, context: Context) -> None:
        """Move the sessions of a run into its context; remove sessions that another process has stored there."""
        for name in _names(context):
            del context.state[name]
        for name, record in self._by_run.get((context.run_id, context.node_id), {}).items():
            context.state[name] = record

    def take(self, context: Context) -> None:
        """Move the sessions of a run from its context into memory."""
        if sessions := {name: context.state.pop(name) for name in _names(context)}:
            key = context.run_id, context.node_id
            self._by_run[key] = sessions
            self._by_run.move_to_end(key)
            while len(self._by_run) > MOST_RUNS:
                self._by_run.popitem(last=False)


def _names(context: Context) -> list[str]:
    return [name for name in context.state if name.startswith(PREFIX)]
