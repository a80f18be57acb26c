"""A run's clients: the name that owns each client, and the node that hosts it."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import count
from typing import Any

import numpy as np
import numpy.typing as npt

from posy.data.settings import SITES, DataSettings
from posy.server_app.nodes import Node, NodeRegistry
from posy.server_app.query import check_index
from posy.settings import SettingsError
from posy.storage import plain
from posy.strategies.replies import ClientInfo
from posy.words import joined, title


class Membership:
    """A run's clients, the names of the sites to which they belong, and their nodes.

    A client is identified by the partition-id in the node config, or else by the name of its site: the registered name
    of the node's key, or ``name`` in the node config. A node's id never identifies a client. Once a named node has
    hosted a client, this name owns the client for the rest of the run.

    Parameters
    ----------
    nodes : NodeRegistry
        The connected nodes, with the clients that they claim.
    data : DataSettings
        The number of clients, and whether each is a site with local data.
    """

    def __init__(self, nodes: NodeRegistry, data: DataSettings) -> None:
        self.hosted: dict[int, ClientInfo] = {}
        """The reachable clients, keyed by index. :meth:`assign` changes the dictionary in place."""
        self.records: dict[int, ClientInfo] = {}
        """Every client that has taken part, with its latest reply."""
        self.begun = False
        """Whether the run has begun. Until then, it is an error if two names claim the same client."""
        self._nodes = nodes
        self._num_clients = data.num_clients
        self._of_sites = data.dataset == SITES

    @property
    def owners(self) -> dict[int, str]:
        """The name that owns each client, except for clients of unnamed nodes."""
        return {client: info.name for client, info in sorted(self.records.items()) if info.name}

    def claims(self) -> dict[int, list[ClientInfo]]:
        """Return the claims to each client in name order, and exclude nodes that claim another name's client.

        Sites without a partition-id get the indices that are still free, in name order. Surplus sites get indices of at
        least M. A site has only one client, even if nodes with its name claim several.

        Raises
        ------
        SettingsError
            Before the run begins, if nodes with different names claim the same client.
        """
        claims: dict[int, list[ClientInfo]] = defaultdict(list)
        unnumbered: dict[str, list[ClientInfo]] = defaultdict(list)
        numbers = {name: client for client, name in self.owners.items()} if self._of_sites else {}
        for node in sorted(self._nodes, key=_by_name):
            assigned = numbers.get(node.claimed_name, -1)
            infos = [replace(info, client=assigned) if info.client < 0 else info for info in node.clients]
            if reason := next(filter(None, (self._objection(info, assigned) for info in infos)), ""):
                self._nodes.exclude(node, reason)
                continue
            for info in infos:
                (unnumbered[info.name] if info.client < 0 else claims[info.client]).append(info)
                if self._of_sites and info.name and info.client >= 0:
                    numbers[info.name] = info.client
        used_indices = claims.keys() | self.records.keys()
        free_indices = (client for client in count() if client not in used_indices)
        for infos, client in zip(unnumbered.values(), free_indices, strict=False):
            claims[client] = [replace(info, client=client) for info in infos]
        if not self.begun:
            for client, infos in sorted(claims.items()):
                self._check_unique(client, infos)
        return claims

    def assign(self) -> None:
        """Assign each client to one node that claims it; a node keeps its clients as long as it claims them."""
        self.hosted.clear()
        for client, claims in sorted(self.claims().items()):
            if client >= self._num_clients:
                for info in claims:
                    reason = f"all {self._num_clients} clients of the run belong to other sites"
                    self._nodes.exclude(self._nodes[info.node_id], reason)
                continue
            last_info = self.records.get(client, claims[0])
            host = next((info for info in claims if info.node_id == last_info.node_id), claims[0])
            self.hosted[client] = self.records[client] = host
            for other in claims:
                if other.node_id != host.node_id:
                    duplicate = f"{title(client, host.name)} is already present on another node"
                    self._nodes.exclude(self._nodes[other.node_id], self._objection(other, -1) or duplicate)

    def reserve(self, clients: Iterable[ClientInfo]) -> None:
        """Reserve each client for its site before the clients join."""
        self.records |= {info.client: ClientInfo(info.client, 0, 0, 0, info.name) for info in clients if info.name}

    def class_counts(self) -> npt.NDArray[np.int64] | None:
        """Return the number of samples per client and class ``(M, C)``, or None if a site has not sent its counts."""
        rows = [info.class_counts for _, info in sorted(self.records.items())]
        return np.array(rows, np.int64) if len(rows) == self._num_clients and all(rows) else None

    def as_json(self) -> dict[str, Any]:
        """Return the facts about the sites that a resumed run needs, as JSON."""
        fingerprints = {client: info.fingerprint for client, info in sorted(self.records.items()) if info.fingerprint}
        return plain({"owners": self.owners, "fingerprints": fingerprints})

    def restore(self, stored: Mapping[str, Any]) -> None:
        """Load the result of :meth:`as_json` from an earlier part of the same run, before the first assignment.

        Raise :class:`SettingsError` if the format is wrong.
        """
        try:
            for key, attribute in (("owners", "name"), ("fingerprints", "fingerprint")):
                for client, text in stored[key].items():
                    if not isinstance(text, str):
                        raise TypeError(f"{key} contains {text!r}")
                    info = ClientInfo(check_index(int(client), self._num_clients), 0, 0, 0)
                    setattr(self.records.setdefault(info.client, info), attribute, text)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise SettingsError(f"the checkpoint does not name the sites of the clients: {error!r}") from error

    def _objection(self, info: ClientInfo, assigned: int) -> str:
        """Return why a node may not host a client that it claims, or an empty string if it may.

        ``assigned`` is the client that belongs to the node's name, or -1 if there is none.
        """
        last_info = self.records.get(info.client, info)
        if last_info.name not in ("", info.name):
            return f"client {info.client} belongs to {last_info.name}: give each node its own partition-id"
        if assigned >= 0 and info.client != assigned:
            return f"it is client {assigned} of this run, but its partition-id is {info.client}"
        if last_info.fingerprint not in ("", info.fingerprint):
            return f"its data has changed since client {info.client} joined this run; start a new run"
        return ""

    def _check_unique(self, client: int, claims: Iterable[ClientInfo]) -> None:
        """Raise :class:`SettingsError` if nodes with different names claim the same client."""
        names = sorted({info.name for info in claims if info.name})
        if len(names) > 1:
            raise SettingsError(
                f"client {client} is claimed by {'two' if len(names) == 2 else len(names)} "
                f"{'sites' if self._of_sites else 'nodes'}, {joined(names)}: give each its own partition-id"
            )


def _by_name(node: Node) -> tuple[bool, str, bool, int]:
    """Return a sort key that orders nodes by name, with unnamed nodes last.

    Nodes with the same name that send their client's index come first.
    """
    return not node.claimed_name, node.claimed_name, any(info.client < 0 for info in node.clients), node.number
