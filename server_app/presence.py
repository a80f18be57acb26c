"""Wait for clients before a run begins, and before a round if clients have left."""

import math
import time
from collections.abc import Sequence
from logging import WARNING

from flwr.common.logger import log

from posy.data.settings import SITES
from posy.server_app import nodes
from posy.server_app.grids import pause
from posy.server_app.membership import Membership
from posy.server_app.nodes import Node, NodeRegistry
from posy.server_app.run_status import RunStatus
from posy.settings import SettingsError
from posy.strategies.settings import Settings
from posy.words import describe_clients, title

SILENT_SECONDS = 10.0
"""Seconds that a new run, once it has enough clients, waits for connected nodes that have not replied."""
REFRESH_SECONDS = 2.0
"""Seconds that a round waits for replies from newly connected nodes. Later replies take effect in the next round."""


class Presence:
    """Waits until enough of a run's clients are present.

    Parameters
    ----------
    settings : Settings
        The settings of the run, which include ``num-clients``, ``min-clients`` and ``join-timeout``.
    registry : NodeRegistry
        The connected nodes.
    members : Membership
        The clients that these nodes claim.
    status : RunStatus
        Publishes why the run is waiting.
    """

    def __init__(self, settings: Settings, registry: NodeRegistry, members: Membership, status: RunStatus) -> None:
        self._run = settings.run
        self._num_clients = settings.data.num_clients
        self._of_sites = settings.data.dataset == SITES
        self._nodes = registry
        self._members = members
        self._status = status
        self._started = time.monotonic()
        self.wanted: frozenset[int] = frozenset()
        """The clients for which the server waits until one of them is present; empty: any clients, as ``min-clients``
        requires."""

    def wait_for_claims(self, *, describe: bool = False) -> None:
        """Wait until nodes claim enough clients: ``min-clients``, or all M clients if ``min-clients`` is 0.

        Once there are enough clients, the server waits only for connected nodes that have not answered. It waits for
        :data:`SILENT_SECONDS`, or :data:`~posy.server_app.nodes.ASK_SECONDS` if nodes must ``describe`` their data.
        ``join-timeout`` counts from the start of the run, but a connected node has at least ``ASK_SECONDS`` to answer.

        Raises
        ------
        SettingsError
            If too few clients join in time.
        """
        begun = time.monotonic()
        required = 1 if self.wanted else self._run.min_clients or self._num_clients
        patience = nodes.ASK_SECONDS if describe else SILENT_SECONDS
        enough_since = math.inf  # time at which nodes claimed enough clients; infinity until then
        while True:
            self._nodes.poll()
            time_now = time.monotonic()
            waited, silent = time_now - self._started, self._nodes.silent
            clients = [client for client in self._members.claims() if client < self._num_clients]
            claimed = sum(not self.wanted or client in self.wanted for client in clients)
            is_overdue = all(time_now - node.asked_at > nodes.ASK_SECONDS for node in silent)
            is_late = waited > self._run.join_timeout and is_overdue
            enough_since = min(enough_since, time_now) if claimed >= required else math.inf
            if claimed >= required and (not silent or is_late or time_now - enough_since > patience):
                return
            if is_late or not silent:
                self._exclude_silent(silent)
                if is_late or self._is_hopeless(claimed):
                    self._members.assign()  # excludes duplicates, which the error message then lists
                    raise SettingsError(self._too_few(claimed, waited))
            self._publish_wait(claimed, self._num_clients, self._started)
            time.sleep(pause(time_now - begun))

    def wait_for_round(self) -> None:
        """Assign a round's clients to nodes, log the clients that have left, and wait if too few remain.

        New nodes have :data:`REFRESH_SECONDS` to answer. The round waits for up to ``join-timeout``.
        """
        present, required = set(self._members.hosted), max(self._run.min_clients, 1)
        started, has_warned = time.monotonic(), False
        asked_nodes: list[Node] = []
        while True:
            asked_nodes += self._nodes.poll()
            waited = time.monotonic() - started
            if waited > REFRESH_SECONDS or not any(node.question for node in asked_nodes):
                self._members.assign()
                hosted = self._members.hosted
                if gone_clients := sorted(present - hosted.keys()):
                    log(
                        WARNING,
                        "%s gone; %s",
                        describe_clients(gone_clients, self._members.owners, self._num_clients),
                        self.describe(),
                    )
                    present -= set(gone_clients)
                if len(hosted) >= required or waited > self._run.join_timeout:
                    return
                self._publish_wait(len(hosted), required, started)
                if not has_warned:
                    log(WARNING, "%s; the round waits until %s are present", self.describe(), required)
                    has_warned = True
            time.sleep(pause(waited))

    def describe(self) -> str:
        """Return a clause that says how many clients are present."""
        return f"{len(self._members.hosted)} of {self._num_clients} clients are present"

    def _exclude_silent(self, silent: Sequence[Node]) -> None:
        for node in silent:
            self._nodes.exclude(node, "no answer in time")

    def _is_hopeless(self, claimed: int) -> bool:
        """Return whether excluded nodes make further waiting pointless."""
        excluded = sum(bool(node.reasons) for node in self._nodes)
        # Without min-clients, a run on benchmark data needs all clients, so it cannot begin if a node is excluded.
        needs_all = not self._of_sites and not self._run.min_clients
        return bool(excluded and needs_all) or excluded + claimed >= self._num_clients

    def _publish_wait(self, present: int, clients: int, since: float) -> None:
        """Publish that the run is waiting for nodes; ``since`` is a time on the monotonic clock."""
        since += time.time() - time.monotonic()
        until = since + self._run.join_timeout
        self._status.waits(f"nodes: {present} of {clients} clients are present", since, until)

    def _too_few(self, hosted: int, waited: float) -> str:
        """Return the error message for a run whose clients have not joined in time."""
        min_clients, timeout = self._run.min_clients, self._run.join_timeout
        reasons = "; ".join(f"{name}: {reason}" if name else reason for name, reason in self._nodes.excluded)
        if self.wanted:
            titles = ", ".join(title(client, self._members.owners.get(client, "")) for client in sorted(self.wanted))
            return (
                f"the run is complete; the final model is missing only at {titles}, and after "
                f"{round(min(waited, timeout), 2):g} s none of these clients is present"
                + (f"; excluded: {reasons}" if reasons else "; start the node, and repeat the command")
            )
        if reasons and not self._of_sites:
            return f"a node cannot serve this run: {reasons}"
        return (
            f"num-clients = {self._num_clients}{f', min-clients = {min_clients}' if min_clients else ''}, but the "
            f"{len(self._nodes)} connected nodes host {hosted} of these clients after "
            f"{round(min(waited, timeout), 2):g} s" + (f"; excluded: {reasons}" if reasons else "")
        )
