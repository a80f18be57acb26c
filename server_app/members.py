"""Which node hosts which client, over reconnections and from round to round."""

import math
import re
import time
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import count
from logging import INFO, WARNING
from typing import Any

import numpy as np
import numpy.typing as npt
from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from flwr.common.constant import ErrorCode
from flwr.common.logger import log

from posy.data.agreement import Description, agreed, is_complete, task_of
from posy.data.errors import DataError
from posy.data.settings import SITES
from posy.flower import failure, raised, record_in
from posy.server_app.grids import LOST, WaveGrid, pause
from posy.server_app.progress import task_table
from posy.server_app.run_status import RunStatus
from posy.settings import SettingsError
from posy.storage import plain
from posy.strategies.replies import UNREADABLE, BadReplyError, ClientInfo, check_count
from posy.strategies.settings import Settings
from posy.words import are, one_line, title

ASK_SECONDS = 60.0
"""Seconds a node may leave a question unanswered before it is asked again; they double each time."""
SILENT_SECONDS = 10.0
"""Seconds that the first round waits for connected nodes that do not answer when enough others have answered."""
REFRESH_SECONDS = 2.0
"""Seconds a round waits for the answers of nodes that have just connected; later ones join in the next round."""

MAX_NAME, MAX_REASON = 100, 500
"""Most characters of a node's name, and of a reason why a node is left out."""
MAX_LEFT_OUT = 200
"""Most reasons that the record lists for nodes left out; the others are counted together."""
ALIKE = 1e-3
"""Largest difference, absolute and relative, between the fingerprints of the same tensors on two machines."""
MAX_NAMED = 20
"""Most clients that are named when a run begins without the others."""
MAX_WARNINGS, MAX_WARNING, MAX_WARNED = 20, 300, 2000
"""Most warnings shown of one answer, most characters of each, and most warnings in the whole run."""
FEW_CLASSES, MAX_CLASSES = 4, 60
"""Most classes of a site whose names the task table shows, and most characters of all of them."""


@dataclass
class Node:
    """A connected node: what it has been asked, and what it has answered."""

    number: int
    """Flower's id of it, which may change with every start."""
    registered: str = ""
    """Name that its key was registered under."""
    told: str = ""
    """Name that it answers under: the registered one, or else that of its node config."""
    question: str = ""
    """Id of the message that it has not answered yet."""
    asked: float = 0.0
    """Time, by the monotonic clock, at which it was first asked the question that it has not answered."""
    ask_at: float = 0.0
    """Time, by the monotonic clock, from which it may be asked."""
    patience: float = field(default_factory=lambda: ASK_SECONDS)
    """Seconds until it is asked again if it leaves the next question unanswered."""
    clients: tuple[ClientInfo, ...] = ()
    """Clients that it claims to host; that of a site may have no index yet (-1)."""
    description: Description | None = None
    """What its site has told of its data."""
    reasons: set[str] = field(default_factory=set)
    """Why it cannot take part, or not with all its clients."""

    @property
    def name(self) -> str:
        """The name it is known by so far, or nothing."""
        return one_line(self.registered or self.told, MAX_NAME)

    @property
    def title(self) -> str:
        """What a person calls it."""
        return self.name or f"node {self.number}"


class Federation:
    """Which node hosts which client.

    A client is known by the partition-id of its node's config, or by the name of its site (the name that the
    node's key was registered under, else ``name`` of the node config), never by the id of its node. A client that
    a node with a name has once hosted belongs to that name for the whole run: no other name takes it over.
    """

    def __init__(self, grid: WaveGrid, settings: Settings, status: RunStatus | None = None) -> None:
        self.grid = grid
        self.settings = settings
        self._status = status or RunStatus()
        self.clients: dict[int, ClientInfo] = {}
        """The clients that can be reached now, by index; :meth:`refresh` changes it in place."""
        self.fixed_tensors: list[float] = []
        """Fingerprint of the network's tensors that are not sent: a node must have built the same tensors."""
        self.left_out: Counter[tuple[str, str]] = Counter()
        """Nodes that cannot take part, by name (empty if they have none) and reason."""
        self._num_clients = settings.data.num_clients
        self._of_sites = settings.data.dataset == SITES
        self._nodes: dict[int, Node] = {}
        self._known: dict[int, ClientInfo] = {}  # every client that has ever taken part, as it was last seen
        self._joined = False
        self._outages = grid.outages.count
        self._descriptions: dict[str, Description] = {}  # by the title of the site
        self._warned: set[tuple[str, str]] = set()
        self._started = time.monotonic()

    @property
    def owners(self) -> dict[int, str]:
        """The name that each client belongs to; a client of nodes without names has none."""
        return {client: info.name for client, info in sorted(self._known.items()) if info.name}

    def agree(self) -> Settings:
        """Let sites with their own data agree on a task; return the settings with it.

        Settings that give the task already, and those of benchmark data, are returned as they are. Too few sites that
        can describe their data, or that cannot agree, are a :class:`SettingsError`.
        """
        if not self._is_open():
            return self.settings
        self._gather()
        for client, claims in sorted(self._claims().items()):  # not in the order of the answers; each client once
            described = self._nodes[claims[0].node_id].description
            if client < self._num_clients and described is not None:
                self._descriptions[claims[0].name or f"client {client}"] = described
        data, warnings = agreed(self.settings.data, list(self._descriptions.values()), list(self._descriptions))
        for warning in warnings:
            log(WARNING, "%s", warning)
        task = f"{data.sample_kind} samples of shape {data.input_shape}; classes {data.classes}"
        log(INFO, "%s sites: %s", len(self._descriptions), task)
        self.settings = replace(self.settings, data=data)
        # Ask all nodes about the agreed task, but those that were refused; an answer that is under way describes data.
        self._nodes = {number: node for number, node in self._nodes.items() if node.reasons}
        return self.settings

    def join(self) -> dict[int, ClientInfo]:
        """Ask every node which clients it hosts, until all M are found or the time is up; return :attr:`clients`.

        If fewer than ``min-clients`` are there in the end, or two nodes of different names claim one client, it raises
        a :class:`SettingsError`, which tells why nodes were left out.
        """
        self._gather()
        self._settle()
        self._joined = True
        clients = self._num_clients
        if missing := clients - len(self.clients):
            there = are(self.clients, self.owners, clients, most=MAX_NAMED)
            log(WARNING, "The run begins without %s of its %s clients: %s there", missing, clients, there)
        if not self._of_sites and len(self._nodes) < clients:
            each = f'--federation-config "num-supernodes={clients} client-resources-num-cpus=1" gives each its own'
            several = "each node serves several, one after the other"
            log(INFO, "%s clients on %s SuperNodes: %s; %s", clients, len(self._nodes), several, each)
        return self.clients

    def refresh(self) -> list[int]:
        """Note which nodes have connected or gone since the last round; return the clients that are back or have moved.

        What these kept may be lost. New nodes have only a moment to answer. If fewer clients than ``min-clients`` are
        left (or none), it waits for more for up to ``join-timeout``.
        """
        before, known = {c: self._nodes[info.node_id] for c, info in self.clients.items()}, set(self._known)
        needed = max(self.settings.run.min_clients, 1)
        started, warned = time.monotonic(), False
        asked: list[Node] = []
        missed: set[int] = set()
        while True:
            asked += self._look()
            waited = time.monotonic() - started
            if waited > REFRESH_SECONDS or not any(node.question for node in asked):
                self._settle()
                there = f"{len(self.clients)} of {self._num_clients} clients are there"
                if lost := sorted(before.keys() - self.clients.keys() - missed):
                    log(WARNING, "%s gone; %s", are(lost, self.owners, self._num_clients), there)
                    missed |= set(lost)
                if len(self.clients) >= needed or waited > self.settings.run.join_timeout:
                    break
                self._wait_for(len(self.clients), needed, started)
                if not warned:
                    log(WARNING, "%s; the round waits until %s are", there, needed)
                    warned = True
            time.sleep(pause(waited))
        # A node that was away has a new record, also where it is back under its old id.
        moved = [c for c, info in self.clients.items() if before.get(c) is not self._nodes[info.node_id]]
        back = [client for client in moved if client in known]
        for clients, state in (([c for c in moved if c not in known], "new"), (back, "back")):
            if clients:
                print(f"{are(clients, self.owners, self._num_clients)} {state}; {there}", flush=True)
        return back

    def task(self, model: str) -> str:
        """Return the task that the sites have agreed on for a network, and what each has of it, as a table."""
        data = self.settings.data
        classes = task_of(data).class_names
        facts = {
            "samples": f"{data.sample_kind}, shape {data.input_shape}",
            "classes": f"{len(classes)}: {', '.join(classes)}",
            "model": model,
            "clients": f"{len(self.clients)} of {data.num_clients}",
        }
        return task_table([self._row(client) for client in range(data.num_clients)], facts)

    def _row(self, client: int) -> dict[str, Any]:
        """Return what a site has told of its data."""
        if client not in self.clients:
            return {"site": self.owners.get(client, ""), "client": client}
        info = self.clients[client]
        row = {"site": info.name, "client": client, "training": info.num_train, "test": info.num_test}
        if described := self._descriptions.get(info.name or f"client {client}"):
            names = described.classes
            row["samples"] = f"{described.kind}, shape {'x'.join(map(str, described.shape))}"
            few = 0 < len(names) <= FEW_CLASSES
            row["classes"] = one_line(f"{len(names)}: {', '.join(names)}", MAX_CLASSES) if few else len(names)
        row["classes"] = row.get("classes") or sum(samples > 0 for samples in info.class_counts) or ""
        row["skipped"] = info.skipped or ""
        return row

    def summary(self) -> dict[str, Any]:
        """Return the sites by client, and the nodes left out with the reason, as far as there are any."""
        owners = self.owners
        sites = [owners.get(client) for client in range(self._num_clients)] if owners else []
        left_out = [{"site": n or None, "reason": r, "times": times} for (n, r), times in self.left_out.items()]
        return {key: found for key, found in (("sites", sites), ("left-out", left_out)) if found}

    def as_json(self) -> dict[str, Any]:
        """Return what the run must know of its sites when it is resumed, as JSON holds it."""
        fingerprints = {client: info.fingerprint for client, info in sorted(self._known.items()) if info.fingerprint}
        return plain({"owners": self.owners, "fingerprints": fingerprints})

    def restore(self, stored: Mapping[str, Any]) -> None:
        """Take up, before any join, what :meth:`as_json` returned in an earlier part of the same run.

        Raises :class:`SettingsError` if it is not of that form.
        """
        try:
            for key, attribute in (("owners", "name"), ("fingerprints", "fingerprint")):
                for client, text in stored[key].items():
                    if not isinstance(text, str):
                        raise TypeError(f"{key} holds {text!r}")
                    info = ClientInfo(self._index(int(client)), 0, 0, 0)
                    setattr(self._known.setdefault(info.client, info), attribute, text)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise SettingsError(f"the checkpoint does not tell whose the clients are: {error!r}") from error

    def class_counts(self) -> npt.NDArray[np.int64] | None:
        """Return the samples of each class on each client ``(M, C)``, if all sites have told them."""
        rows = [info.class_counts for _, info in sorted(self._known.items())]
        return np.array(rows, np.int64) if len(rows) == self._num_clients and all(rows) else None

    # -- asking the nodes ------------------------------------------------------------------------------

    def _is_open(self) -> bool:
        """Tell whether the sites must describe their data before the task of the run is known."""
        return self._of_sites and not is_complete(self.settings.data)

    def _gather(self) -> None:
        """Wait until enough clients are claimed: ``min-clients``, or all M if it is 0.

        Nodes that are not connected are not waited for once there are enough. Connected nodes that have not answered
        get another moment, for a description of their data as long as for an answer. ``join-timeout`` counts from the
        first question of the run; a connected node has at least :data:`ASK_SECONDS` to answer.

        Raises
        ------
        SettingsError
            If too few clients can be had in time.
        """
        clients, run, begun = self._num_clients, self.settings.run, time.monotonic()
        needed = run.min_clients or clients
        patience = ASK_SECONDS if self._is_open() else SILENT_SECONDS
        enough = math.inf  # when enough clients were claimed
        while True:
            self._look()
            now = time.monotonic()
            waited, silent = now - self._started, [node for node in self._nodes.values() if node.question]
            claimed = sum(client < clients for client in self._claims())
            late = waited > run.join_timeout and all(now - node.asked > ASK_SECONDS for node in silent)
            enough = min(enough, now) if claimed >= needed else math.inf
            if claimed >= needed and (not silent or late or now - enough > patience):
                return
            if late or not silent:
                for node in silent:
                    self._leave_out(node, "no answer in time")
                refused = sum(bool(node.reasons) for node in self._nodes.values())
                # Benchmark clients are all needed, and their data is the same everywhere: one that fails is enough.
                hopeless = refused and not self._of_sites and not run.min_clients
                if late or hopeless or refused + claimed >= clients:
                    self._settle()  # which reports nodes that claim the same client
                    raise SettingsError(self._too_few(claimed, waited))
            self._wait_for(claimed, clients, self._started)
            time.sleep(pause(now - begun))

    def _wait_for(self, there: int, clients: int, since: float) -> None:
        """Let people see that the run waits for nodes; ``since`` is a time by the monotonic clock."""
        since += time.time() - time.monotonic()
        until = since + self.settings.run.join_timeout
        self._status.waits(f"nodes: {there} of {clients} clients are there", since, until)

    def _too_few(self, found: int, waited: float) -> str:
        least, timeout = self.settings.run.min_clients, self.settings.run.join_timeout
        reasons = "; ".join(f"{name}: {reason}" if name else reason for name, reason in self.left_out)
        if reasons and not self._of_sites:
            return f"a node cannot serve this run: {reasons}"
        return (
            f"num-clients = {self._num_clients}{f', min-clients = {least}' if least else ''}, but the "
            f"{len(self._nodes)} connected nodes host {found} of them after {round(min(waited, timeout), 2):g} s"
            + (f"; left out: {reasons}" if reasons else "")
        )

    def _look(self) -> list[Node]:
        """See which nodes are connected, ask those that have not answered, and read answers; return the nodes asked.

        A node that was away is asked again: it may have been restarted with other data. So is one that is silent: a
        node that stops loses its question, and has the same id when it is back.
        """
        connected = {info.node_id: info.name for info in self.grid.get_nodes()}
        lost = self._outages != self.grid.outages.count  # what was under way
        self._outages = self.grid.outages.count
        self._nodes = {
            number: node
            for number, node in self._nodes.items()
            if number in connected and number not in self.grid.gone and not (lost and node.question)
        }
        self.grid.gone.clear()
        for number, name in sorted(connected.items()):
            self._nodes.setdefault(number, Node(number)).registered = name
        now = time.monotonic()
        if due := [node for node in self._nodes.values() if node.ask_at <= now]:
            questions = self.grid.push_messages([self._question(node) for node in due])
            for node, question in zip(due, questions, strict=False):
                node.asked = node.asked if node.question else now
                node.question, node.ask_at, node.patience = question, now + node.patience, 2 * node.patience
        if waiting := {node.question: node for node in self._nodes.values() if node.question}:
            for reply in self.grid.pull_messages(list(waiting)):
                self._read(waiting[reply.metadata.reply_to_message_id], reply)
        return due

    def _question(self, node: Node) -> Message:
        describe = {"describe": True} if self._is_open() else {}
        config = ConfigRecord({"settings": self.settings.to_json(), **describe})
        return Message(RecordDict({"config": config}), dst_node_id=node.number, message_type=MessageType.QUERY)

    def _read(self, node: Node, reply: Message) -> None:
        """Read the answer of a node; one that cannot take part is left out."""
        node.question, node.ask_at = "", math.inf
        if reply.has_error() and reply.error.code in LOST:
            log(INFO, "%s was gone before it could answer; it is asked again if it comes back", node.title)
            del self._nodes[node.number]
        elif reply.has_error():
            # A warm node says DataError: the message.
            own = reply.error.code == ErrorCode.CLIENT_APP_RAISED_EXCEPTION
            said = re.sub(r"^\w+: ", "", raised(str(reply.error.reason)))
            self._leave_out(node, said if own else failure(reply.error))
        else:
            try:
                answer = record_in(reply.content, "config", ConfigRecord)
                self._take(node, answer)
                self._status.node(node.number, [info.client for info in node.clients], answer)
            except UNREADABLE as error:
                understood = isinstance(error, DataError | BadReplyError)
                self._leave_out(node, str(error) if understood else f"malformed answer: {error!r}")

    def _leave_out(self, node: Node, reason: str) -> None:
        """Note and log why a node cannot take part, or not with all its clients, once while it is connected."""
        name, reason = node.name, one_line(reason, MAX_REASON)
        if reason in node.reasons:
            return
        node.reasons.add(reason)
        if (name, reason) not in self.left_out and len(self.left_out) >= MAX_LEFT_OUT:
            name, reason = "", "others"
        self.left_out[name, reason] += 1
        log(WARNING, "%s is left out: %s", node.title, reason)

    # -- what a node answers ---------------------------------------------------------------------------

    def _take(self, node: Node, answer: Mapping[str, Any]) -> None:
        """Note what a node claims to host; :meth:`_settle` decides."""
        told = str(answer.get("name", ""))
        if node.registered and told not in ("", node.registered):
            raise BadReplyError(f"its node config names it {told!r:.99}, its key is registered as {node.registered!r}")
        name = node.registered or told
        if len(name) > MAX_NAME or not name.isprintable():
            raise BadReplyError(f"its name is not a line of at most {MAX_NAME} characters")
        fixed = answer.get("fixed-tensors", [])
        same = len(fixed) == len(self.fixed_tensors) and np.allclose(fixed, self.fixed_tensors, ALIKE, ALIKE)
        if self.fixed_tensors and not same:
            raise BadReplyError(
                "its network has other tensors without gradient than the server's; the file that model loads them from "
                "must be the same on every node"
            )
        node.told = name
        if self._of_sites:
            node.clients = (self._site(node, answer),)
            return
        columns = [answer[key] for key in ("clients", "num-train", "num-test")]
        if len(columns[0]) > self._num_clients:
            raise BadReplyError(f"{len(columns[0])} clients on one node")
        claims = zip(*columns, strict=True)
        node.clients = tuple(ClientInfo(self._index(c), node.number, *_counts(*counts), name) for c, *counts in claims)

    def _site(self, node: Node, answer: Mapping[str, Any]) -> ClientInfo:
        """Return what the node of a site tells of its client, with the index -1 if it has no partition-id."""
        if "client" not in answer and not node.told:
            raise BadReplyError("its node config gives neither name nor partition-id")
        client = self._index(answer["client"]) if "client" in answer else -1
        if self._is_open():
            node.description = Description.from_answer(answer)
            self._warn(node, answer)
            return ClientInfo(client, node.number, 0, 0, node.told)
        counts = tuple(int(samples) for samples in answer.get("class-counts", ()))
        if counts and (len(counts) != task_of(self.settings.data).num_classes or min(counts) < 0 or not sum(counts)):
            raise BadReplyError(f"class-counts of {len(counts)} classes, {sum(counts)} samples in all")
        fingerprint = answer.get("fingerprint", "")
        if not isinstance(fingerprint, str) or not re.fullmatch(r"([0-9a-f]{16})?", fingerprint):
            raise BadReplyError("its fingerprint is not one of 16 hexadecimal digits")
        sizes = _counts(answer["num-train"], answer["num-test"])
        return ClientInfo(client, node.number, *sizes, node.told, counts, fingerprint, self._warn(node, answer))

    def _index(self, client: Any) -> int:
        if not isinstance(client, int) or not 0 <= client < self._num_clients:
            raise BadReplyError(f"partition-id {client}: the run has the clients 0 to {self._num_clients - 1}")
        return client

    def _warn(self, node: Node, answer: Mapping[str, Any]) -> int:
        """Log a site's warnings about its data, each once; return the number of files that it has skipped."""
        warnings, skipped = answer.get("warnings", []), answer.get("skipped", 0)
        if not isinstance(warnings, list) or not all(isinstance(text, str) for text in warnings):
            raise BadReplyError("its warnings are not a list of texts")
        check_count("skipped", skipped, 0)
        texts = [one_line(text, MAX_WARNING) for text in warnings[:MAX_WARNINGS]]
        if skipped and not texts:  # Posy's own nodes say it themselves, with the names of the files
            texts.append(f"{int(skipped)} of its files cannot be read and are left out")
        site = node.name or f"client {answer['client']}"
        for text in texts:
            if (site, text) not in self._warned and len(self._warned) < MAX_WARNED:
                self._warned.add((site, text))
                log(WARNING, "%s: %s", site, text)
        return int(skipped)

    # -- which node hosts which client -----------------------------------------------------------------

    def _claims(self) -> dict[int, list[ClientInfo]]:
        """Return the claims to each client, in the order of names; claims to a client of somebody else are refused.

        Sites that have no partition-id are numbered in the order of their names, after those that have one; those
        for which the run has no client left get an index from M on. A site has one client, even if several nodes
        of its name claim others. Before the run begins, nodes of different names that claim one client are an error.
        """
        claims: dict[int, list[ClientInfo]] = defaultdict(list)
        unnumbered: dict[str, list[ClientInfo]] = defaultdict(list)
        numbers = {name: client for client, name in self.owners.items()} if self._of_sites else {}
        for node in sorted(self._nodes.values(), key=_by_name):
            own = numbers.get(node.told, -1)
            infos = [replace(info, client=own) if info.client < 0 else info for info in node.clients]
            if reason := next(filter(None, (self._objection(info, own) for info in infos)), ""):
                self._leave_out(node, reason)
                continue
            for info in infos:
                (unnumbered[info.name] if info.client < 0 else claims[info.client]).append(info)
                if self._of_sites and info.name and info.client >= 0:
                    numbers[info.name] = info.client
        taken = claims.keys() | self._known.keys()
        free = (client for client in count() if client not in taken)
        for infos, client in zip(unnumbered.values(), free, strict=False):
            claims[client] = [replace(info, client=client) for info in infos]
        for client, infos in sorted(claims.items()):
            *others, last = sorted({info.name for info in infos if info.name}) or [""]
            if others and not self._joined:
                raise SettingsError(
                    f"client {client} is claimed by {'two' if len(others) == 1 else len(others) + 1} "
                    f"{'sites' if self._of_sites else 'nodes'}, {', '.join(others)} and {last}: "
                    "give each its own partition-id"
                )
        return claims

    def _objection(self, info: ClientInfo, own: int) -> str:
        """Return why a node must not have the client that it claims, or nothing; ``own``: that of its site, or -1."""
        known = self._known.get(info.client, info)
        if known.name not in ("", info.name):
            return f"client {info.client} belongs to {known.name}: give each its own partition-id"
        if own >= 0 and info.client != own:
            return f"it is client {own} of this run, but its partition-id says {info.client}"
        if known.fingerprint not in ("", info.fingerprint):
            return f"its data is not that with which client {info.client} joined this run; start a new run with it"
        return ""

    def _settle(self) -> None:
        """Give each client to one node that claims it; its present node keeps it as long as it claims it."""
        self.clients.clear()
        for client, claims in sorted(self._claims().items()):
            if client >= self._num_clients:
                for info in claims:
                    reason = f"all {self._num_clients} clients of the run are others"
                    self._leave_out(self._nodes[info.node_id], reason)
                continue
            before = self._known.get(client, claims[0])
            host = next((info for info in claims if info.node_id == before.node_id), claims[0])
            self.clients[client] = self._known[client] = host
            for other in claims:
                if other.node_id != host.node_id:
                    there = f"{title(client, host.name)} is already there on another node"
                    self._leave_out(self._nodes[other.node_id], self._objection(other, -1) or there)


def _by_name(node: Node) -> tuple[bool, str, bool, int]:
    """Put nodes with names first, in their order, and of one name those that tell their client's index."""
    return not node.told, node.told, any(info.client < 0 for info in node.clients), node.number


def _counts(num_train: Any, num_test: Any) -> tuple[int, int]:
    check_count("num-train", num_train, 1)
    check_count("num-test", num_test, 0)
    return num_train, num_test
