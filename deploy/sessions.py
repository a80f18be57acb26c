"""The secrets of secure aggregation, which stay in a worker's memory and never reach the node's process.

A node stores a run's context only after the worker has sent the reply. If the node lost the context in the meantime,
the client would forget that it had revealed shares, and could reveal other shares. Before a worker sends a reply, it
therefore removes the sessions, which contain the secrets, from the context. If the worker terminates, its sessions are
lost, and the client refuses the rest of the round.
"""

from collections import OrderedDict
from typing import Any

from flwr.app import Context

PREFIX = "secure-aggregation-"
"""Prefix of the records' names. It is defined here, because the run's code may use a different version of Posy."""
MOST_RUNS = 1000
"""Maximum number of runs whose sessions a worker stores."""


class Sessions:
    """The sessions of a node's clients, keyed by run and node."""

    def __init__(self) -> None:
        self._by_run: OrderedDict[tuple[int, int], dict[str, Any]] = OrderedDict()

    def restore(self, context: Context) -> None:
        """Put a run's sessions into its context, and remove sessions that another process has stored there."""
        for name in _names(context):
            del context.state[name]
        for name, record in self._by_run.get((context.run_id, context.node_id), {}).items():
            context.state[name] = record

    def take(self, context: Context) -> None:
        """Move a run's sessions from its context into memory."""
        if sessions := {name: context.state.pop(name) for name in _names(context)}:
            key = context.run_id, context.node_id
            self._by_run[key] = sessions
            self._by_run.move_to_end(key)
            while len(self._by_run) > MOST_RUNS:
                self._by_run.popitem(last=False)


def _names(context: Context) -> list[str]:
    return [name for name in context.state if name.startswith(PREFIX)]
