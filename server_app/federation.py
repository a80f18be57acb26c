"""A run's federation: the clients that take part, and the task that their sites have agreed on."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from logging import INFO, WARNING
from typing import Any

import numpy as np
import numpy.typing as npt
from flwr.common.logger import log

from posy.data.agreement import Description, agreed, task_of
from posy.data.pooled import Pooled
from posy.data.settings import SITES, DataSettings
from posy.server_app.grids import WaveGrid
from posy.server_app.membership import Membership
from posy.server_app.nodes import NodeRegistry
from posy.server_app.presence import Presence
from posy.server_app.progress import task_table
from posy.server_app.query import NodeQuery
from posy.server_app.run_status import RunStatus
from posy.server_app.statistics import pooled_statistics
from posy.strategies.replies import ClientInfo
from posy.strategies.settings import Settings
from posy.words import describe_clients, one_line

MAX_NAMED = 20
"""Maximum number of present clients that the log names when a run begins without some of its clients."""
FEW_CLASSES, MAX_CLASSES = 4, 60
"""Maximum number of class names per site in the task table, and maximum length of a list of them in characters."""


class Federation:
    """A run's clients, which agree on a task, join before the first round, and may leave and return.

    * :class:`~posy.server_app.nodes.NodeRegistry` asks the nodes for their clients.
    * :class:`~posy.server_app.membership.Membership` assigns a name and a node to each client.
    * :class:`~posy.server_app.presence.Presence` waits until enough clients are present.

    Parameters
    ----------
    grid : WaveGrid
        The grid.
    settings : Settings
        The settings of the run.
    status : RunStatus, optional
        Publishes why the run is waiting, and the nodes' replies.
    """

    def __init__(self, grid: WaveGrid, settings: Settings, status: RunStatus | None = None) -> None:
        self.grid = grid
        self.settings = settings
        status = status or RunStatus()
        self._query = NodeQuery(settings)
        self.nodes = NodeRegistry(grid, self._query, status)
        self._members = Membership(self.nodes, settings.data)
        self._presence = Presence(settings, self.nodes, self._members, status)
        self._num_clients = settings.data.num_clients
        self._of_sites = settings.data.dataset == SITES
        self._descriptions: dict[str, Description] = {}  # keyed by the site's title

    @property
    def clients(self) -> dict[int, ClientInfo]:
        """The reachable clients, keyed by index. :meth:`refresh` changes the dictionary in place."""
        return self._members.hosted

    @property
    def owners(self) -> dict[int, str]:
        """The name that owns each client, except for clients of unnamed nodes."""
        return self._members.owners

    @property
    def excluded(self) -> Counter[tuple[str, str]]:
        """Number of exclusions, keyed by the node's name (which may be empty) and the reason."""
        return self.nodes.excluded

    def agree(self) -> Settings:
        """Let sites with local data agree on a task, and return the settings with this task.

        Settings for benchmark data, and settings with a complete task, remain unchanged.

        Raises
        ------
        SettingsError
            If too few sites can describe their data, or the sites cannot agree.
        """
        if not self._query.is_open:
            return self.settings
        self._presence.wait_for_claims(describe=True)
        for client, claims in sorted(self._members.claims().items()):  # sorted, because replies arrive in any order
            description = self.nodes[claims[0].node_id].description
            if client < self._num_clients and description is not None:
                self._descriptions[_site_of(client, claims[0].name)] = description
        pool = self._pooled if self.settings.run.secure_aggregation else None
        data, warnings = agreed(self.settings.data, list(self._descriptions.values()), list(self._descriptions), pool)
        for warning in warnings:
            log(WARNING, "%s", warning)
        task = f"{data.sample_kind} samples of shape {data.input_shape}; classes {data.classes}"
        log(INFO, "%s sites: %s", len(self._descriptions), task)
        self.settings = self._query.settings = replace(self.settings, data=data)
        self.nodes.ask_again()  # the new query concerns the agreed task, but replies in transit describe data
        return self.settings

    def join(self, fixed_tensors: Sequence[float] = (), wanted: Iterable[int] = ()) -> dict[int, ClientInfo]:
        """Query the nodes until enough clients have joined or the time is up, and return :attr:`clients`.

        Parameters
        ----------
        fixed_tensors : sequence of float
            Fingerprint of the network's fixed tensors. Nodes with a different fingerprint are excluded.
        wanted : iterable of int
            The only clients that the server needs, or none if it needs as many clients as ``min-clients`` requires.

        Raises
        ------
        SettingsError
            If too few clients join in time, or nodes with different names claim the same client. The message lists the
            reasons for excluding nodes.
        """
        self._query.fixed_tensors, self._presence.wanted = fixed_tensors, frozenset(wanted)
        self._presence.wait_for_claims()
        self._members.assign()
        self._members.begun = True
        clients = self._num_clients
        if wanted:
            return self.clients
        if missing_count := clients - len(self.clients):
            present = describe_clients(self.clients, self.owners, clients, most=MAX_NAMED)
            log(WARNING, "The run begins without %s of its %s clients: %s present", missing_count, clients, present)
        if not self._of_sites and len(self.nodes) < clients:
            option = f'--federation-config "num-supernodes={clients} client-resources-num-cpus=1"'
            advice = f"{option} gives each client a node"
            explanation = "each node serves several clients, one after the other"
            log(INFO, "%s clients on %s SuperNodes: %s; %s", clients, len(self.nodes), explanation, advice)
        return self.clients

    def refresh(self) -> list[int]:
        """Look up the connected nodes before a round, and return the clients that have returned or moved.

        The states of these clients may be lost. New nodes have ``REFRESH_SECONDS`` to answer. If there are fewer
        clients than ``min-clients``, or none, the round waits for up to ``join-timeout``.
        """
        earlier_nodes = {client: self.nodes[info.node_id] for client, info in self.clients.items()}
        earlier_clients = set(self._members.records)
        self._presence.wait_for_round()
        # A node that returns has a new Node object, even if it has kept its id.
        moved = [
            client for client, info in self.clients.items() if earlier_nodes.get(client) is not self.nodes[info.node_id]
        ]
        returned = [client for client in moved if client in earlier_clients]
        new_clients = [client for client in moved if client not in earlier_clients]
        for clients, state in ((new_clients, "new"), (returned, "back")):
            if clients:
                arrived = describe_clients(clients, self.owners, self._num_clients)
                print(f"{arrived} {state}; {self._presence.describe()}", flush=True)
        return returned

    def look(self) -> None:
        """Look up the connected nodes, and assign each client to its node, without waiting."""
        self._members.begun = True  # two nodes that claim one client are then not an error
        self.nodes.poll()
        self._members.assign()

    def task(self, model: str) -> str:
        """Return a table that describes the agreed task and the network, with a row for each site."""
        data = self.settings.data
        classes = task_of(data).class_names
        facts = {
            "samples": f"{data.sample_kind}, shape {data.input_shape}",
            "classes": f"{len(classes)}: {', '.join(classes)}",
            "model": model,
            "clients": f"{len(self.clients)} of {data.num_clients}",
        }
        owners = self.owners
        rows = [
            _site_row(client, self.clients.get(client), owners.get(client, ""), self._descriptions)
            for client in range(data.num_clients)
        ]
        return task_table(rows, facts)

    def summary(self) -> dict[str, Any]:
        """Return each client's site, and the excluded nodes with the reasons, if there are any."""
        owners = self.owners
        sites = [owners.get(client) for client in range(self._num_clients)] if owners else []
        excluded = [{"site": n or None, "reason": r, "times": times} for (n, r), times in self.excluded.items()]
        return {key: entries for key, entries in (("sites", sites), ("left-out", excluded)) if entries}

    def as_json(self) -> dict[str, Any]:
        """Return the facts about the sites that a resumed run needs, as JSON."""
        return self._members.as_json()

    def restore(self, stored: Mapping[str, Any]) -> None:
        """Load the result of :meth:`as_json` from an earlier part of the same run, before :meth:`join` is called.

        Raise :class:`SettingsError` if the format is wrong.
        """
        self._members.restore(stored)

    def class_counts(self) -> npt.NDArray[np.int64] | None:
        """Return the number of samples per client and class ``(M, C)``, or None if a site has not sent its counts."""
        return self._members.class_counts()

    def _pooled(self, data: DataSettings, names: list[str]) -> Pooled:
        """Return the sites' labels and statistics from secure aggregation, and reserve the clients of these sites."""
        hosts = {client: claims[0] for client, claims in sorted(self._members.claims().items())}
        titles = {client: _site_of(client, info.name) for client, info in hosts.items()}
        hosts = {client: info for client, info in hosts.items() if titles[client] in names}
        self._members.reserve(hosts.values())  # in a run, a site signs its keys for only one client
        settings = replace(self.settings, data=data)
        return pooled_statistics(self.grid, settings, {c: info.node_id for c, info in hosts.items()}, titles)


def _site_row(
    client: int, info: ClientInfo | None, owner: str, descriptions: Mapping[str, Description]
) -> dict[str, Any]:
    """Return a client's row for the task table, from its site's replies; ``info`` is None for an absent client."""
    if info is None:
        return {"site": owner, "client": client}
    row = {"site": info.name, "client": client, "training": info.num_train, "test": info.num_test}
    if description := descriptions.get(_site_of(client, info.name)):
        names = description.classes
        row["samples"] = f"{description.kind}, shape {'x'.join(map(str, description.shape))}"
        is_short = 0 < len(names) <= FEW_CLASSES
        row["classes"] = one_line(f"{len(names)}: {', '.join(names)}", MAX_CLASSES) if is_short else len(names)
    row["classes"] = row.get("classes") or sum(samples > 0 for samples in info.class_counts) or ""
    row |= {"skipped": info.skipped or "", "node settings": info.node_settings}
    return row


def _site_of(client: int, name: str) -> str:
    """Return the name of a client's site, or a title such as ``client 2`` if it has none."""
    return name or f"client {client}"
