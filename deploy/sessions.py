"""The secrets of secure aggregation in a worker: they stay in its memory, and never go to the node's process.

A node stores the context of a run only after the reply has left. If the node lost the context in between, the client
would forget that it has revealed shares, and could reveal others. A worker therefore takes the sessions out of the
context before it sends a reply. If the worker ends, its sessions end too, and the client refuses the rest of the round.
"""

from collections import OrderedDict
from typing import Any

from flwr.app import Context

PREFIX = "secure-aggregation-"
"""Start of the names of the records; the code of a run may have another version of Posy than this worker."""
MOST_RUNS = 1000
"""Runs whose sessions a worker stores."""


class Sessions:
    """The sessions of the clients of a node, by run."""

    def __init__(self) -> None:
        self._by_run: OrderedDict[tuple[int, int], dict[str, Any]] = OrderedDict()

    def restore(self, context: Context) -> None:
        """Put the sessions of a run into its context; sessions that another process has stored there are removed."""
        for name in _names(context):
            del context.state[name]
        for name, record in self._by_run.get((context.run_id, context.node_id), {}).items():
            context.state[name] = record

    def take(self, context: Context) -> None:
        """Take the sessions of a run out of its context."""
        if sessions := {name: context.state.pop(name) for name in _names(context)}:
            key = context.run_id, context.node_id
            self._by_run[key] = sessions
            self._by_run.move_to_end(key)
            while len(self._by_run) > MOST_RUNS:
                self._by_run.popitem(last=False)


def _names(context: Context) -> list[str]:
    return [name for name in context.state if name.startswith(PREFIX)]
