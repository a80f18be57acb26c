"""Track a run's connected nodes, their replies to the server's query, and the reasons for excluding nodes."""

import math
import re
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from logging import INFO, WARNING

from flwr.app import ConfigRecord, Message
from flwr.common.logger import log

from posy.data.agreement import Description
from posy.data.errors import DataError
from posy.flower import ErrorCode, failure, raised, record_in
from posy.server_app.grids import LOST, WaveGrid
from posy.server_app.query import MAX_NAME, NodeQuery, name_in
from posy.server_app.run_status import RunStatus
from posy.strategies.replies import UNREADABLE, BadReplyError, ClientInfo
from posy.words import one_line

ASK_SECONDS = 60.0
"""Seconds until the server repeats an unanswered query to a node. The interval doubles with each repetition."""
MAX_REASON = 500
"""Maximum number of characters in the reason for a node's exclusion."""
MAX_EXCLUDED = 200
"""Maximum number of (name, reason) pairs whose exclusions are counted separately; all other pairs share one count."""


@dataclass
class Node:
    """A connected node, its pending query, and its latest reply."""

    number: int
    """Flower's id of the node, which may change when the node restarts."""
    registered: str = ""
    """Registered name of the node's key, or an empty string."""
    claimed_name: str = ""
    """The registered name, or else the name in the node config; empty until the node answers."""
    question: str = ""
    """Id of the pending query, or an empty string."""
    asked_at: float = 0.0
    """Time at which the pending query was first sent, on the monotonic clock."""
    ask_at: float = 0.0
    """Time at which the next query is due, on the monotonic clock."""
    patience: float = field(default_factory=lambda: ASK_SECONDS)
    """Seconds that the server waits for a reply to the next query before it repeats the query."""
    clients: tuple[ClientInfo, ...] = ()
    """Clients that the node claims to host. A site's client may have no index yet (-1)."""
    description: Description | None = None
    """The site's description of its data."""
    reasons: set[str] = field(default_factory=set)
    """Reasons for excluding the node or some of its clients."""

    @property
    def name(self) -> str:
        """The registered or claimed name, or an empty string."""
        return one_line(self.registered or self.claimed_name, MAX_NAME)

    @property
    def title(self) -> str:
        """The node's display name."""
        return self.name or f"node {self.number}"


class NodeRegistry:
    """The connected nodes, keyed by Flower's id, and all exclusions during the run.

    Parameters
    ----------
    grid : WaveGrid
        The grid.
    query : NodeQuery
        The query that every node receives.
    status : RunStatus
        Publishes the nodes' replies.
    """

    def __init__(self, grid: WaveGrid, query: NodeQuery, status: RunStatus) -> None:
        self.excluded: Counter[tuple[str, str]] = Counter()
        """Number of exclusions, keyed by the node's name (which may be empty) and the reason."""
        self._grid = grid
        self._query = query
        self._status = status
        self._nodes: dict[int, Node] = {}
        self._outages = grid.outages.count

    def __iter__(self) -> Iterator[Node]:
        """Iterate over the connected nodes."""
        return iter(self._nodes.values())

    def __len__(self) -> int:
        """Return the number of connected nodes."""
        return len(self._nodes)

    def __getitem__(self, number: int) -> Node:
        """Return the connected node with the given id."""
        return self._nodes[number]

    @property
    def silent(self) -> list[Node]:
        """The nodes that have not answered their pending query."""
        return [node for node in self if node.question]

    def poll(self) -> list[Node]:
        """Look up the connected nodes, send due queries, read replies, and return the queried nodes.

        A node that reconnects receives the query again, because it may have restarted with different data. A silent
        node also receives it again, because a node that restarts loses the query, and may keep its id.
        """
        self._look_up()
        time_now = time.monotonic()
        if due_nodes := [node for node in self if node.ask_at <= time_now]:
            questions = self._grid.push_messages([self._query.message(node.number) for node in due_nodes])
            for node, question in zip(due_nodes, questions, strict=False):
                node.asked_at = node.asked_at if node.question else time_now
                node.question, node.ask_at, node.patience = question, time_now + node.patience, 2 * node.patience
        if nodes_by_question := {node.question: node for node in self.silent}:
            for reply in self._grid.pull_messages(list(nodes_by_question)):
                self._read(nodes_by_question[reply.metadata.reply_to_message_id], reply)
        return due_nodes

    def ask_again(self) -> None:
        """Have :meth:`poll` query all nodes again except the excluded ones, even if their replies are in transit."""
        self._nodes = {number: node for number, node in self._nodes.items() if node.reasons}

    def exclude(self, node: Node, reason: str) -> None:
        """Record and log a reason for excluding a node, or some of its clients, once per connection."""
        name, reason = node.name, one_line(reason, MAX_REASON)
        if reason in node.reasons:
            return
        node.reasons.add(reason)
        if (name, reason) not in self.excluded and len(self.excluded) >= MAX_EXCLUDED:
            name, reason = "", "others"
        self.excluded[name, reason] += 1
        log(WARNING, "%s is excluded: %s", node.title, reason)

    def _look_up(self) -> None:
        """Add new nodes, and remove nodes that have left or whose queries may have been lost in an outage."""
        connected = {info.node_id: info.name for info in self._grid.get_nodes()}
        had_outage = self._outages != self._grid.outages.count
        self._outages = self._grid.outages.count
        self._nodes = {
            number: node
            for number, node in self._nodes.items()
            if number in connected and number not in self._grid.gone and not (had_outage and node.question)
        }
        self._grid.gone.clear()
        for number, name in sorted(connected.items()):
            self._nodes.setdefault(number, Node(number)).registered = name

    def _read(self, node: Node, reply: Message) -> None:
        """Read a node's reply, and exclude the node if it cannot take part."""
        node.question, node.ask_at = "", math.inf
        if reply.has_error() and reply.error.code in LOST:
            log(
                INFO, "%s disconnected before it could answer; the server will query it again if it returns", node.title
            )
            del self._nodes[node.number]
        elif reply.has_error():
            # A node with a warm worker puts the error's type before the message, as in "DataError: message".
            raised_by_app = reply.error.code == ErrorCode.CLIENT_APP_RAISED_EXCEPTION
            message = re.sub(r"^\w*(Error|Exception): ", "", raised(str(reply.error.reason)))
            self.exclude(node, message if raised_by_app else failure(reply.error))
        else:
            try:
                answer = record_in(reply.content, "config", ConfigRecord)
                node.claimed_name = name_in(answer, node.registered)
                claims = self._query.clients(answer, node.number, node.claimed_name)
                node.clients, node.description = claims.clients, claims.description or node.description
                self._status.node(node.number, [info.client for info in node.clients], answer)
            except UNREADABLE as error:
                is_known_error = isinstance(error, DataError | BadReplyError)
                self.exclude(node, str(error) if is_known_error else f"malformed reply: {error!r}")
