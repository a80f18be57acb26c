"""Print the clients that a run is waiting for if a wait is longer than usual."""

import math
import time
from collections.abc import Mapping

from flwr.app import MessageType

from posy.server_app.delivery import Wait
from posy.server_app.federation import Federation
from posy.server_app.progress import duration
from posy.server_app.run_status import RunStatus
from posy.strategies.replies import client_of
from posy.words import describe_clients

WORK = {MessageType.TRAIN: "training", MessageType.EVALUATE: "evaluation"}


class WaitLog:
    """Prints the clients that a phase is waiting for when the wait becomes unusual, and whenever it has doubled.

    It also records the deadline of the wait in the run's ``status``.
    """

    def __init__(self, federation: Federation, status: RunStatus | None = None) -> None:
        self._federation = federation
        self._status = status or RunStatus()
        self._next, self._seconds = 0.0, math.inf

    def __call__(self, wait: Wait) -> None:
        """Record a phase's wait and, if a line is due, print the clients that the phase is waiting for."""
        self._status.waits_until(time.time() + wait.remaining if wait.remaining < math.inf else None)
        if wait.seconds < self._seconds:  # a new phase has begun
            self._next = wait.silence
        self._seconds = wait.seconds
        if wait.seconds >= self._next:
            self._next = 2 * wait.seconds
            print(describe_wait(wait, self._federation.owners, self._federation.settings.data.num_clients), flush=True)


def describe_wait(wait: Wait, owners: Mapping[int, str], num_clients: int) -> str:
    """Return a line with the clients that a phase is waiting for, the time waited, and the remaining time."""
    [first, *_] = wait.messages
    work = WORK.get(first.metadata.message_type, first.metadata.message_type)
    clients = describe_clients(sorted(map(client_of, wait.messages)), owners, num_clients)
    limit = f"at most {duration(wait.remaining)} more" if wait.remaining < math.inf else "no limit so far"
    return f"{clients} still busy ({work}, round {first.metadata.group_id}) after {duration(wait.seconds)}; {limit}"
