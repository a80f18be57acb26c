"""Who takes part: which node hosts which client, and how messages reach them."""

import math
import re
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from logging import INFO, WARNING
from typing import Any

import numpy as np
import numpy.typing as npt
from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from flwr.common.constant import ErrorCode
from flwr.common.logger import log
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_utils import ObjectPushError

from data.errors import DataError
from data.sites import Description, agreed, is_complete, task_of
from posy.config import Settings
from posy.flower import Outages, answer_to, raised
from posy.settings import SITES, SettingsError
from strategies.base import UNREADABLE, BadReplyError, Member, check_count

ASK_SECONDS = 60.0
"""For so long a node may be silent before it is asked again whom it hosts."""
POLL_SECONDS = 0.5
PULL_SECONDS = 0.1
MAX_PULL_SECONDS = 1.0
PULL_PATIENCE = 0.02
"""After t seconds of a phase replies are asked for every 0.02 t seconds, within the two limits above."""
PUSHES = 5
"""So often messages are sent whose content does not get through."""
RETURN_SECONDS = 90.0
"""So long after an outage a node that seems to be gone may take to be seen again; it tells twice a minute."""
LOST = (ErrorCode.NODE_UNAVAILABLE, ErrorCode.MESSAGE_UNAVAILABLE, ErrorCode.REPLY_MESSAGE_UNAVAILABLE)
REFRESH_SECONDS = 2.0
"""How long a round waits for the answers of nodes that have just come; later ones join in the next round."""

MAX_NAME = 100

Take = Callable[[int, Mapping[str, Any]], None]


class WaveGrid(Grid):
    """A grid that never has two messages for the same node under way.

    A node may host several clients (``flwr run`` simulates two nodes unless told otherwise). Its state
    is read and written once a message, so messages for one node must not overlap.

    Attributes
    ----------
    outages : Outages
        How often the SuperLink was out of reach.
    """

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        self.outages = Outages(grid)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Send in as many waves as the busiest node has messages; return all replies.

        The time is that of all waves together; what it does not suffice for is not sent.
        """
        end = math.inf if timeout is None else time.monotonic() + timeout
        waves: dict[int, list[Message]] = defaultdict(list)
        seen: dict[int, int] = defaultdict(int)
        for message in messages:
            node = message.metadata.dst_node_id
            waves[seen[node]].append(message)
            seen[node] += 1
        replies: list[Message] = []
        for wave in waves.values():
            left = end - time.monotonic()
            if left <= 0:
                break
            replies += self._deliver(wave, None if timeout is None else left)
        return replies

    def _deliver(self, wave: list[Message], timeout: float | None) -> Iterable[Message]:
        return self._grid.send_and_receive(wave, timeout=timeout)

    def get_node_ids(self) -> Iterable[int]:
        """Return the ids of the connected nodes."""
        return self._grid.get_node_ids()

    def get_nodes(self) -> Iterable[NodeInfo]:
        """Return the connected nodes, with the names that their keys were registered under."""
        return self._grid.get_nodes()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Push messages as they are."""
        return self._grid.push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Pull replies."""
        return self._grid.pull_messages(message_ids)

    def set_run(self, run: Any) -> None:
        """Set the run of the grid underneath."""
        self._grid.set_run(run)

    @property
    def run(self) -> Any:
        """The run of the grid underneath."""
        return self._grid.run

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        """Create a message with the grid underneath."""
        return self._grid.create_message(*args, **kwargs)


class PollingGrid(WaveGrid):
    """The same for a grid of real nodes: it asks for replies up to ten times a second, Flower's own every 3 s.

    The longer a phase has lasted, the longer it waits: phases of minutes need no ten requests a second.

    A SuperLink hands out each message once, also where it dies before the other side has got it. So what is
    unanswered after an outage, or answered as lost, is sent again as soon as its node is there. A node that has
    got both answers both; one answer is taken.
    """

    def _deliver(self, wave: list[Message], timeout: float | None) -> Iterable[Message]:
        started, outages = time.monotonic(), self.outages.count
        asked = self._push(wave)
        replies: dict[str, Message] = {}
        again: dict[str, Message] = {}
        patience = 0.0
        while True:
            for reply in list(self._grid.pull_messages(set(asked))):
                told = reply.metadata.reply_to_message_id
                number = asked.pop(told).metadata.message_id if told in asked else told
                if number not in replies or replies[number].has_error():
                    replies[number] = answer_to(number, reply)
            answered = {number for number, reply in replies.items() if not reply.has_error()}
            asked = {copy: message for copy, message in asked.items() if message.metadata.message_id not in answered}
            now = time.monotonic()
            if outages != self.outages.count:
                outages, patience = self.outages.count, now + RETURN_SECONDS
                again = {m.metadata.message_id: m for m in wave if _may_be_lost(replies.get(m.metadata.message_id))}
            again = {number: message for number, message in again.items() if number not in answered and now < patience}
            if again:
                pushed = self._push_again(again.values(), now - started)
                asked |= pushed
                for message in pushed.values():
                    del again[message.metadata.message_id]
            if not (asked or again) or (timeout is not None and now - started >= timeout):
                return replies.values()
            time.sleep(min(MAX_PULL_SECONDS, max(PULL_SECONDS, PULL_PATIENCE * (now - started))))

    def _push(self, wave: list[Message]) -> dict[str, Message]:
        """Push messages and return them by id; a SuperLink that was started again half-way gets them anew."""
        for _ in range(PUSHES - 1):
            try:
                return self._pushed(wave)
            except ObjectPushError as error:
                log(WARNING, "the SuperLink has lost messages on their way, they are sent again: %s", error)
                for message in wave:  # as others: those before are known to it, without their content
                    message.metadata.created_at = time.time()
        return self._pushed(wave)

    def _push_again(self, messages: Iterable[Message], waited: float) -> dict[str, Message]:
        """Push copies of messages whose nodes are there; return the messages by the ids of their copies."""
        present = set(self.get_node_ids())
        there = [message for message in messages if message.metadata.dst_node_id in present]
        if not there:
            return {}
        log(WARNING, "the SuperLink was out of reach: %s messages that it may have lost are sent again", len(there))
        copies = [
            Message(
                message.content,
                message.metadata.dst_node_id,
                message.metadata.message_type,
                ttl=message.metadata.ttl - waited,
                group_id=message.metadata.group_id,
            )
            for message in there
        ]
        pushed = {id(copy): number for number, copy in self._push(copies).items()}
        return {pushed[id(copy)]: message for copy, message in zip(copies, there, strict=True) if id(copy) in pushed}

    def _pushed(self, wave: list[Message]) -> dict[str, Message]:
        numbers = self._grid.push_messages(wave)
        return {number: message for number, message in zip(numbers, wave, strict=False) if number}


def _may_be_lost(reply: Message | None) -> bool:
    """Tell whether a message has no reply, or only one that says that it or its node was not to be found."""
    return reply is None or (reply.has_error() and reply.error.code in LOST)


@dataclass(frozen=True)
class _Claim:
    """What a node has answered: the clients it hosts, with their samples, or the name of its site."""

    members: tuple[Member, ...]
    name: str = ""


class Federation:
    """Who takes part: which node hosts which client, over reconnections and from round to round.

    A client is known by the partition-id of its node's config, or by the name of its site (the name that the
    node's key was registered under, else ``name`` of the node config), never by the id of its node, which
    may change with every start of a node.

    Parameters
    ----------
    grid : WaveGrid
        The way to the nodes.
    settings : Settings
        All settings of the run.
    names : Mapping of str to int, optional
        Clients of named sites, from an earlier part of the same run.

    Attributes
    ----------
    members : dict of int to Member
        The clients that can be reached now, by index; :meth:`refresh` changes it in place.
    names : dict of str to int
        The client of each named site.
    left_out : Counter of str
        Nodes that cannot take part, by reason.
    """

    def __init__(self, grid: WaveGrid, settings: Settings, names: Mapping[str, int] | None = None) -> None:
        self.grid = grid
        self.settings = settings
        self.members: dict[int, Member] = {}
        self.names: dict[str, int] = dict(names or {})
        self.left_out: Counter[str] = Counter()
        self._of_sites = settings.data.dataset == SITES
        self._started = time.monotonic()
        self._hosts: dict[int, Member] = {}  # of clients that are away, too
        self._claims: dict[int, _Claim] = {}
        self._asked: set[int] = set()
        self._refused: set[int] = set()
        self._doubles: set[tuple[int, int]] = set()
        self._pending: dict[str, int] = {}
        self._outages = grid.outages.count
        self._registered: dict[int, str] = {}

    def agree(self) -> Settings:
        """Let sites with their own data agree on a task; return the settings with it.

        Settings that leave nothing open, and those of benchmark data, are returned as they are.

        Raises
        ------
        SettingsError
            If too few sites can describe their data, or they cannot agree.
        """
        if not self._of_sites or is_complete(self.settings.data):
            return self.settings
        told: dict[int, tuple[str, Description]] = {}

        def take(node: int, answer: Mapping[str, Any]) -> None:
            told[node] = (str(answer["name"]), Description.from_answer(answer))

        self._gather({"describe": True}, take, lambda: len(told))
        # In the order of names, so that it does not depend on who answers first.
        order = sorted(told, key=lambda node: (told[node][0], node))
        titles = [told[node][0] or f"node {node}" for node in order]
        data, warnings = agreed(self.settings.data, [told[node][1] for node in order], titles)
        for warning in warnings:
            log(WARNING, "%s", warning)
        log(
            INFO,
            "%s sites: %s samples of shape %s; classes %s",
            len(told),
            data.sample_kind,
            data.input_shape,
            data.classes,
        )
        self.settings = replace(self.settings, data=data)
        self._asked -= told.keys()  # they are asked again, with the task
        return self.settings

    def join(self) -> dict[int, Member]:
        """Ask every node which clients it hosts, until all M are found or the time is up.

        Returns
        -------
        dict
            :attr:`members`.

        Raises
        ------
        SettingsError
            If fewer than ``min-clients`` are there in the end; it tells why nodes were left out.
        """
        self._gather({}, self._take, self._found)
        self._settle(set(self._claims))
        clients = self.settings.data.num_clients
        if not self._of_sites and len(self._asked) < clients:
            log(
                INFO,
                "%s clients on %s SuperNodes: each node serves several, one after the other; "
                '--federation-config "num-supernodes=%s client-resources-num-cpus=1" gives each its own',
                clients,
                len(self._asked),
                clients,
            )
        return self.members

    def refresh(self) -> list[int]:
        """Take note of the nodes that have come or gone since the last round.

        It waits for the answers of new nodes only for a moment. Where fewer clients than ``min-clients``
        are left (or none), it waits for them for up to ``join-timeout``.

        Returns
        -------
        list of int
            Clients that have come back or have moved to another node: what they kept there may be lost.
        """
        before, known = dict(self.members), set(self._hosts)
        needed = min(max(self.settings.run.min_clients, 1), self.settings.data.num_clients)
        started = time.monotonic()
        while True:
            self._look()
            waited = time.monotonic() - started
            if len(self.members) >= needed or waited > self.settings.run.join_timeout:
                break
            if waited < POLL_SECONDS:
                log(WARNING, "%s clients are there; waiting for %s", len(self.members), needed)
            time.sleep(POLL_SECONDS)
        moved = []
        for client, member in self.members.items():
            if client not in known:
                log(INFO, "%s joins", _title(member))
            elif client not in before or before[client].node_id != member.node_id:
                log(INFO, "%s is back", _title(member))
                moved.append(client)
        for client in before.keys() - self.members.keys():
            log(WARNING, "%s: its node is gone", _title(before[client]))
        return moved

    def summary(self) -> dict[str, Any]:
        """Return the sites by client, and the nodes left out by reason, as far as there are any."""
        named = {client: name for name, client in self.names.items()}
        found: dict[str, Any] = {}
        if named:
            found["sites"] = [named.get(client) for client in range(self.settings.data.num_clients)]
        if self.left_out:
            found["left-out"] = dict(self.left_out)
        return found

    def class_counts(self) -> npt.NDArray[np.int64] | None:
        """Return the samples of each class on each client ``(M, C)``, if all sites have told them."""
        rows = [self._hosts[client].class_counts for client in sorted(self._hosts)]
        if len(rows) != self.settings.data.num_clients or not all(rows):
            return None
        return np.array(rows, np.int64)

    # -- asking ----------------------------------------------------------------------------------------

    def _gather(self, ask: Mapping[str, Any], take: Take, found: Callable[[], int]) -> None:
        """Ask nodes as they connect, until M clients have been found, no more are to come, or the time is up."""
        clients, run = self.settings.data.num_clients, self.settings.run
        while found() < clients:
            left = max(run.join_timeout - (time.monotonic() - self._started), POLL_SECONDS)
            self._ask(ask, take, left)
            if found() >= clients:
                break
            waited = time.monotonic() - self._started
            # Benchmark clients are all needed, and their data is the same everywhere: one that fails is enough.
            hopeless = bool(self._refused) and not self._of_sites and not run.min_clients
            if hopeless or len(self._refused) + found() >= clients or waited > run.join_timeout:
                if run.min_clients and found() >= min(run.min_clients, clients):
                    log(WARNING, "The run begins with %s of %s clients", found(), clients)
                    break
                raise SettingsError(self._too_few(found(), waited))
            time.sleep(POLL_SECONDS)

    def _ask(self, ask: Mapping[str, Any], take: Take, timeout: float) -> None:
        """Ask the nodes that have not been asked yet, and read their answers.

        Those that are silent are asked again, after ever longer times: a node that ends takes a question with it,
        and has the same id when it is back.
        """
        silent = sorted(self._connected() - self._asked)
        self._asked |= set(silent)
        end, patience = time.monotonic() + timeout, ASK_SECONDS
        while silent and (left := end - time.monotonic()) > 0:
            queries = [self._query(node, ask) for node in silent]
            answers = self.grid.send_and_receive(queries, timeout=min(patience, left))
            replies = {reply.metadata.reply_to_message_id: reply for reply in answers}
            silent = []
            for query in queries:
                reply, node = replies.get(query.metadata.message_id), query.metadata.dst_node_id
                if reply is None:
                    silent.append(node)
                else:
                    self._read(node, reply, take)
            patience *= 2
        for node in silent:
            self._leave_out(node, "no answer in time")

    def _look(self) -> None:
        """Ask new nodes without waiting for slow ones, and see who is there."""
        living = self._connected()
        # A node that was away is asked again: it may have been restarted, with other data.
        self._asked &= living
        self._refused &= living
        self._claims = {node: claim for node, claim in self._claims.items() if node in living}
        self._pending = {number: node for number, node in self._pending.items() if node in living}
        if self._outages != self.grid.outages.count:  # what was under way may be lost
            self._outages = self.grid.outages.count
            self._asked -= set(self._pending.values())
            self._pending.clear()
        new = sorted(living - self._asked)
        self._asked |= set(new)
        if new:
            numbers = self.grid.push_messages([self._query(node, {}) for node in new])
            self._pending |= {number: node for number, node in zip(numbers, new, strict=False) if number}
        end = time.monotonic() + (REFRESH_SECONDS if new else 0.0)
        while self._pending:
            for reply in self.grid.pull_messages(list(self._pending)):
                self._read(self._pending.pop(reply.metadata.reply_to_message_id), reply, self._take)
            if not self._pending or time.monotonic() >= end:
                break
            time.sleep(POLL_SECONDS)
        self._settle(living)

    def _connected(self) -> set[int]:
        """Return the ids of the connected nodes, and note the names that their keys were registered under."""
        self._registered = {info.node_id: info.name for info in self.grid.get_nodes()}
        return set(self._registered)

    def _query(self, node: int, ask: Mapping[str, Any]) -> Message:
        config = ConfigRecord({"settings": self.settings.to_json(), **ask})
        return Message(RecordDict({"config": config}), dst_node_id=node, message_type=MessageType.QUERY)

    def _read(self, node: int, reply: Message, take: Take) -> None:
        """Read the answer of a node; one that cannot take part is left out."""
        if reply.has_error() and reply.error.code == ErrorCode.NODE_UNAVAILABLE:
            log(INFO, "node %s was gone before it could answer; it is asked again if it comes back", node)
            self._asked.discard(node)
            return
        if reply.has_error():
            # A warm node says DataError: the message.
            self._leave_out(node, re.sub(r"^\w+: ", "", raised(str(reply.error.reason))))
            return
        try:
            take(node, reply.content.config_records["config"])
        except UNREADABLE as error:
            understood = isinstance(error, DataError | BadReplyError)
            self._leave_out(node, str(error) if understood else f"malformed answer: {error!r}")

    def _leave_out(self, node: int, reason: str) -> None:
        self._refused.add(node)
        self.left_out[reason] += 1
        log(WARNING, "node %s is left out: %s", node, reason)

    def _too_few(self, found: int, waited: float) -> str:
        clients, least = self.settings.data.num_clients, self.settings.run.min_clients
        reasons = "; ".join(self.left_out)
        if reasons and not self._of_sites:
            return f"a node cannot serve this run: {reasons}"
        waited = round(min(waited, self.settings.run.join_timeout), 2)
        return (
            f"num-clients = {clients}{f', min-clients = {least}' if least else ''}, but the {len(self._asked)} "
            f"connected nodes host {found} of them after {waited:g} s" + (f"; left out: {reasons}" if reasons else "")
        )

    # -- who is who --------------------------------------------------------------------------------------

    def _take(self, node: int, answer: Mapping[str, Any]) -> None:
        """Note what a node claims to host; :meth:`_settle` decides."""
        clients = self.settings.data.num_clients
        if self._of_sites:
            name = self._name(node, str(answer["name"]))
            if not name and "client" not in answer:
                raise BadReplyError("its node config gives neither name nor partition-id")
            counts = tuple(int(count) for count in answer.get("class-counts", ()))
            classes = task_of(self.settings.data).num_classes
            if counts and (len(counts) != classes or min(counts) < 0 or not sum(counts)):
                raise BadReplyError(f"class-counts of {len(counts)} classes, {sum(counts)} samples in all")
            members: tuple[Member, ...] = (
                Member(int(answer.get("client", -1)), node, answer["num-train"], answer["num-test"], name, counts),
            )
        else:
            name = ""
            columns = (answer[key] for key in ("clients", "num-train", "num-test"))
            members = tuple(Member(int(c), node, train, test) for c, train, test in zip(*columns, strict=True))
        for member in members:
            numbered = not self._of_sites or "client" in answer
            if numbered and not 0 <= member.client < clients:
                raise BadReplyError(f"partition-id {member.client}: the run has the clients 0 to {clients - 1}")
            check_count("num-train", member.num_train, 1)
            check_count("num-test", member.num_test, 0)
        self._claims[node] = _Claim(members, name)

    def _name(self, node: int, told: str) -> str:
        """Return the name of a node's site: the one its key was registered under, else the one it tells."""
        registered = self._registered.get(node, "")
        if registered and told and told != registered:
            raise BadReplyError(f"its node config names it {told!r}, its key is registered as {registered!r}")
        name = registered or told
        if len(name) > MAX_NAME or not name.isprintable():
            raise BadReplyError(f"its name is not a line of at most {MAX_NAME} characters")
        return name

    def _found(self) -> int:
        """Return how many clients are claimed."""
        return len({claim.name or member.client for claim in self._claims.values() for member in claim.members})

    def _settle(self, living: set[int]) -> None:
        """Give each client to one living node that claims it; the node it is on keeps it while it lives."""
        claims = sorted(self._claims.items(), key=lambda item: (item[1].name, item[0]))
        for node, claim in claims:
            for claimed in claim.members:
                member = self._numbered(claimed)
                if member is None:
                    del self._claims[node]
                    self._leave_out(node, f"all {self.settings.data.num_clients} clients of the run are others")
                    continue
                host = self._hosts.get(member.client)
                if host is None or host.node_id == node or host.node_id not in living:
                    self._hosts[member.client] = member
                elif (node, host.node_id) not in self._doubles:
                    self._doubles.add((node, host.node_id))
                    self._leave_out(node, f"{_title(member)} is already there on another node")
        self.members.clear()
        self.members.update({c: m for c, m in sorted(self._hosts.items()) if m.node_id in living & self._claims.keys()})

    def _numbered(self, member: Member) -> Member | None:
        """Return a member with the index of its client; None if there is none left for its site."""
        if not member.name:
            return member
        if member.name not in self.names:
            taken = set(self.names.values()) | self._hosts.keys()
            free = [c for c in range(self.settings.data.num_clients) if c not in taken]
            wanted = [member.client] if member.client >= 0 else free[:1]
            if not wanted:
                return None
            self.names[member.name] = wanted[0]
        return replace(member, client=self.names[member.name])


def _title(member: Member) -> str:
    return f"client {member.client}" + (f" ({member.name})" if member.name else "")
