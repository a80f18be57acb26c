"""The assignment of clients to nodes, over reconnections and from round to round."""

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
from posy.data.pooled import Pooled
from posy.data.settings import SITES, DataSettings
from posy.flower import failure, raised, record_in
from posy.server_app.grids import LOST, WaveGrid, pause
from posy.server_app.progress import task_table
from posy.server_app.run_status import RunStatus
from posy.server_app.statistics import pooled_statistics
from posy.settings import SettingsError
from posy.storage import plain
from posy.strategies.replies import UNREADABLE, BadReplyError, ClientInfo, check_count
from posy.strategies.settings import Settings
from posy.words import are, one_line, title

ASK_SECONDS = 60.0
"""Seconds until the server repeats an unanswered question to a node; they double each time."""
SILENT_SECONDS = 10.0
"""Seconds that the first round waits for silent connected nodes when enough others have answered."""
REFRESH_SECONDS = 2.0
"""Seconds that a round waits for answers of newly connected nodes; later answers count in the next round."""

MAX_NAME, MAX_REASON = 100, 500
"""Most characters of a node's name, and of the reason for its exclusion."""
MAX_LEFT_OUT = 200
"""Most exclusions of nodes that the record lists by reason; further ones are counted together."""
ALIKE = 1e-3
"""Largest difference, absolute and relative, between the fingerprints of the same tensors on two machines."""
MAX_NAMED = 20
"""Most clients that the log names when a run begins without some clients."""
MAX_WARNINGS, MAX_WARNING, MAX_WARNED = 20, 300, 2000
"""Most warnings shown of one answer, most characters of each, and most warnings in a run."""
FEW_CLASSES, MAX_CLASSES = 4, 60
"""Most classes of a site whose names the task table shows, and most characters of all of them."""


@dataclass
class Node:
    """A connected node: its open question and its answers."""

    number: int
    """Flower's id of the node, which may change with every start."""
    registered: str = ""
    """Name that its key was registered under."""
    claimed_name: str = ""
    """Name in its answers: the registered name, or else the name in its node config."""
    question: str = ""
    """Id of the open question."""
    asked_at: float = 0.0
    """Time, by the monotonic clock, at which the open question was first sent."""
    ask_at: float = 0.0
    """Time, by the monotonic clock, of the next question."""
    patience: float = field(default_factory=lambda: ASK_SECONDS)
    """Seconds until the next question is repeated without an answer."""
    clients: tuple[ClientInfo, ...] = ()
    """Clients that it claims to host; a site's client may have no index yet (-1)."""
    description: Description | None = None
    """The site's description of its data."""
    reasons: set[str] = field(default_factory=set)
    """Reasons that exclude it, or some of its clients."""

    @property
    def name(self) -> str:
        """The registered or claimed name, or nothing."""
        return one_line(self.registered or self.claimed_name, MAX_NAME)

    @property
    def title(self) -> str:
        """The name of the node for messages."""
        return self.name or f"node {self.number}"


class Federation:
    """The assignment of clients to nodes.

    The partition-id of the node config identifies a client, or the name of its site: the registered name of the node's
    key, else ``name`` of the node config. The id of the node never does. Once a node with a name has hosted a client,
    the client belongs to this name for the rest of the run.
    """

    def __init__(self, grid: WaveGrid, settings: Settings, status: RunStatus | None = None) -> None:
        self.grid = grid
        self.settings = settings
        self._status = status or RunStatus()
        self.clients: dict[int, ClientInfo] = {}
        """The reachable clients by index; :meth:`refresh` changes it in place."""
        self.fixed_tensors: list[float] = []
        """Fingerprint of the network's fixed tensors, which are not sent: every node must build the same tensors."""
        self.left_out: Counter[tuple[str, str]] = Counter()
        """Excluded nodes, by name (empty without a name) and reason."""
        self._num_clients = settings.data.num_clients
        self._of_sites = settings.data.dataset == SITES
        self._nodes: dict[int, Node] = {}
        self._known: dict[int, ClientInfo] = {}  # every client that has ever taken part, with its latest answer
        self._joined = False
        self._outages = grid.outages.count
        self._descriptions: dict[str, Description] = {}  # by the title of the site
        self._warned: set[tuple[str, str]] = set()
        self._started = time.monotonic()

    @property
    def owners(self) -> dict[int, str]:
        """The name that each client belongs to; clients of nodes without names are absent."""
        return {client: info.name for client, info in sorted(self._known.items()) if info.name}

    def agree(self) -> Settings:
        """Let sites with their own data agree on a task; return the settings with it.

        Settings that already give the task, and settings of benchmark data, stay unchanged.

        Raises
        ------
        SettingsError
            If too few sites can describe their data, or the sites cannot agree.
        """
        if not self._is_open():
            return self.settings
        self._gather()
        for client, claims in sorted(self._claims().items()):  # not in the order of the answers; each client once
            described = self._nodes[claims[0].node_id].description
            if client < self._num_clients and described is not None:
                self._descriptions[claims[0].name or f"client {client}"] = described
        pool = self._pooled if self.settings.run.secure_aggregation else None
        data, warnings = agreed(self.settings.data, list(self._descriptions.values()), list(self._descriptions), pool)
        for warning in warnings:
            log(WARNING, "%s", warning)
        task = f"{data.sample_kind} samples of shape {data.input_shape}; classes {data.classes}"
        log(INFO, "%s sites: %s", len(self._descriptions), task)
        self.settings = replace(self.settings, data=data)
        # Ask all nodes that were not refused about the agreed task: an answer under way still describes data.
        self._nodes = {number: node for number, node in self._nodes.items() if node.reasons}
        return self.settings

    def _pooled(self, data: DataSettings, names: list[str]) -> Pooled:
        """Return labels and statistics over some sites under secure aggregation; fix the clients of these sites."""
        titles = {client: claims[0].name or f"client {client}" for client, claims in self._claims().items()}
        hosts = {client: claims[0] for client, claims in sorted(self._claims().items()) if titles[client] in names}
        # A site signs its keys for one client in a run.
        self._known |= {client: ClientInfo(client, 0, 0, 0, info.name) for client, info in hosts.items() if info.name}
        nodes = {client: info.node_id for client, info in hosts.items()}
        return pooled_statistics(self.grid, replace(self.settings, data=data), nodes, titles)

    def join(self) -> dict[int, ClientInfo]:
        """Ask every node for its clients, until there are enough or the time is up; return :attr:`clients`.

        Raises
        ------
        SettingsError
            If fewer than ``min-clients`` are present in time, or two nodes of different names claim one client. The
            message has the reasons of excluded nodes.
        """
        self._gather()
        self._settle()
        self._joined = True
        clients = self._num_clients
        if missing := clients - len(self.clients):
            present = are(self.clients, self.owners, clients, most=MAX_NAMED)
            log(WARNING, "The run begins without %s of its %s clients: %s there", missing, clients, present)
        if not self._of_sites and len(self._nodes) < clients:
            each = f'--federation-config "num-supernodes={clients} client-resources-num-cpus=1" gives each a node'
            several = "each node serves several clients, one after the other"
            log(INFO, "%s clients on %s SuperNodes: %s; %s", clients, len(self._nodes), several, each)
        return self.clients

    def refresh(self) -> list[int]:
        """Update the nodes that have connected or gone since the last round; return the returned or moved clients.

        The states of these clients may be lost. New nodes have :data:`REFRESH_SECONDS` to answer. With fewer clients
        than ``min-clients``, or none, the round waits for more for up to ``join-timeout``.
        """
        before, earlier_clients = {c: self._nodes[info.node_id] for c, info in self.clients.items()}, set(self._known)
        needed = max(self.settings.run.min_clients, 1)
        started, warned = time.monotonic(), False
        asked_nodes: list[Node] = []
        missed: set[int] = set()
        while True:
            asked_nodes += self._look()
            waited = time.monotonic() - started
            if waited > REFRESH_SECONDS or not any(node.question for node in asked_nodes):
                self._settle()
                present = f"{len(self.clients)} of {self._num_clients} clients are there"
                if lost := sorted(before.keys() - self.clients.keys() - missed):
                    log(WARNING, "%s gone; %s", are(lost, self.owners, self._num_clients), present)
                    missed |= set(lost)
                if len(self.clients) >= needed or waited > self.settings.run.join_timeout:
                    break
                self._wait_for(len(self.clients), needed, started)
                if not warned:
                    log(WARNING, "%s; the round waits until %s are", present, needed)
                    warned = True
            time.sleep(pause(waited))
        # A returned node has a new record, even under its old id.
        moved = [c for c, info in self.clients.items() if before.get(c) is not self._nodes[info.node_id]]
        back = [client for client in moved if client in earlier_clients]
        for clients, state in (([c for c in moved if c not in earlier_clients], "new"), (back, "back")):
            if clients:
                print(f"{are(clients, self.owners, self._num_clients)} {state}; {present}", flush=True)
        return back

    def task(self, model: str) -> str:
        """Return the agreed task for a network, with a row for each site, as a table."""
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
        """Return the row of a client in the task table, from its site's answers."""
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
        """Return the sites by client, and the excluded nodes with the reasons, if any."""
        owners = self.owners
        sites = [owners.get(client) for client in range(self._num_clients)] if owners else []
        left_out = [{"site": n or None, "reason": r, "times": times} for (n, r), times in self.left_out.items()]
        return {key: entries for key, entries in (("sites", sites), ("left-out", left_out)) if entries}

    def as_json(self) -> dict[str, Any]:
        """Return the facts on the sites that a resumed run needs, as JSON."""
        fingerprints = {client: info.fingerprint for client, info in sorted(self._known.items()) if info.fingerprint}
        return plain({"owners": self.owners, "fingerprints": fingerprints})

    def restore(self, stored: Mapping[str, Any]) -> None:
        """Load, before :meth:`join`, the result of :meth:`as_json` from an earlier part of the same run.

        Raises :class:`SettingsError` for another form.
        """
        try:
            for key, attribute in (("owners", "name"), ("fingerprints", "fingerprint")):
                for client, text in stored[key].items():
                    if not isinstance(text, str):
                        raise TypeError(f"{key} holds {text!r}")
                    info = ClientInfo(self._index(int(client)), 0, 0, 0)
                    setattr(self._known.setdefault(info.client, info), attribute, text)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise SettingsError(f"the checkpoint does not name the sites of the clients: {error!r}") from error

    def class_counts(self) -> npt.NDArray[np.int64] | None:
        """Return the samples of each class on each client ``(M, C)``, if all sites have sent them."""
        rows = [info.class_counts for _, info in sorted(self._known.items())]
        return np.array(rows, np.int64) if len(rows) == self._num_clients and all(rows) else None

    # -- asking the nodes ------------------------------------------------------------------------------

    def _is_open(self) -> bool:
        """Return whether the sites must describe their data to complete the task."""
        return self._of_sites and not is_complete(self.settings.data)

    def _gather(self) -> None:
        """Wait until enough clients are claimed: ``min-clients``, or all M if it is 0.

        With enough clients it does not wait for absent nodes. Connected nodes that have not answered get
        :data:`SILENT_SECONDS` more, or :data:`ASK_SECONDS` to describe their data. ``join-timeout`` counts from the
        first question of the run. A connected node has at least :data:`ASK_SECONDS` to answer.

        Raises
        ------
        SettingsError
            If too few clients join in time.
        """
        clients, run, begun = self._num_clients, self.settings.run, time.monotonic()
        needed = run.min_clients or clients
        patience = ASK_SECONDS if self._is_open() else SILENT_SECONDS
        enough = math.inf  # when enough clients were claimed
        while True:
            self._look()
            time_now = time.monotonic()
            waited, silent = time_now - self._started, [node for node in self._nodes.values() if node.question]
            claimed = sum(client < clients for client in self._claims())
            late = waited > run.join_timeout and all(time_now - node.asked_at > ASK_SECONDS for node in silent)
            enough = min(enough, time_now) if claimed >= needed else math.inf
            if claimed >= needed and (not silent or late or time_now - enough > patience):
                return
            if late or not silent:
                for node in silent:
                    self._leave_out(node, "no answer in time")
                refused = sum(bool(node.reasons) for node in self._nodes.values())
                # The run needs all benchmark clients, and their data is the same on all nodes: one failure is enough.
                hopeless = refused and not self._of_sites and not run.min_clients
                if late or hopeless or refused + claimed >= clients:
                    self._settle()  # which reports nodes that claim the same client
                    raise SettingsError(self._too_few(claimed, waited))
            self._wait_for(claimed, clients, self._started)
            time.sleep(pause(time_now - begun))

    def _wait_for(self, present: int, clients: int, since: float) -> None:
        """Publish that the run waits for nodes; ``since`` is a time by the monotonic clock."""
        since += time.time() - time.monotonic()
        until = since + self.settings.run.join_timeout
        self._status.waits(f"nodes: {present} of {clients} clients are present", since, until)

    def _too_few(self, hosted: int, waited: float) -> str:
        least, timeout = self.settings.run.min_clients, self.settings.run.join_timeout
        reasons = "; ".join(f"{name}: {reason}" if name else reason for name, reason in self.left_out)
        if reasons and not self._of_sites:
            return f"a node cannot serve this run: {reasons}"
        return (
            f"num-clients = {self._num_clients}{f', min-clients = {least}' if least else ''}, but the "
            f"{len(self._nodes)} connected nodes host {hosted} of them after {round(min(waited, timeout), 2):g} s"
            + (f"; excluded: {reasons}" if reasons else "")
        )

    def _look(self) -> list[Node]:
        """Look up the connected nodes, send due questions, and read answers; return the questioned nodes.

        It repeats the question to a returned node, which may have restarted with other data. It also repeats it to a
        silent node: a node that stops loses its question, and returns with the same id.
        """
        connected = {info.node_id: info.name for info in self.grid.get_nodes()}
        lost = self._outages != self.grid.outages.count  # an outage loses messages under way
        self._outages = self.grid.outages.count
        self._nodes = {
            number: node
            for number, node in self._nodes.items()
            if number in connected and number not in self.grid.gone and not (lost and node.question)
        }
        self.grid.gone.clear()
        for number, name in sorted(connected.items()):
            self._nodes.setdefault(number, Node(number)).registered = name
        time_now = time.monotonic()
        if due := [node for node in self._nodes.values() if node.ask_at <= time_now]:
            questions = self.grid.push_messages([self._question(node) for node in due])
            for node, question in zip(due, questions, strict=False):
                node.asked_at = node.asked_at if node.question else time_now
                node.question, node.ask_at, node.patience = question, time_now + node.patience, 2 * node.patience
        if waiting := {node.question: node for node in self._nodes.values() if node.question}:
            for reply in self.grid.pull_messages(list(waiting)):
                self._read(waiting[reply.metadata.reply_to_message_id], reply)
        return due

    def _question(self, node: Node) -> Message:
        describe = {"describe": True} if self._is_open() else {}
        config = ConfigRecord({"settings": self.settings.to_json(), **describe})
        return Message(RecordDict({"config": config}), dst_node_id=node.number, message_type=MessageType.QUERY)

    def _read(self, node: Node, reply: Message) -> None:
        """Read the answer of a node; exclude the node if it cannot take part."""
        node.question, node.ask_at = "", math.inf
        if reply.has_error() and reply.error.code in LOST:
            log(INFO, "%s was gone before it could answer; it is asked again if it comes back", node.title)
            del self._nodes[node.number]
        elif reply.has_error():
            # A warm node sends the text "DataError: message".
            raised_by_app = reply.error.code == ErrorCode.CLIENT_APP_RAISED_EXCEPTION
            message = re.sub(r"^\w*(Error|Exception): ", "", raised(str(reply.error.reason)))
            self._leave_out(node, message if raised_by_app else failure(reply.error))
        else:
            try:
                answer = record_in(reply.content, "config", ConfigRecord)
                self._take(node, answer)
                self._status.node(node.number, [info.client for info in node.clients], answer)
            except UNREADABLE as error:
                understood = isinstance(error, DataError | BadReplyError)
                self._leave_out(node, str(error) if understood else f"malformed answer: {error!r}")

    def _leave_out(self, node: Node, reason: str) -> None:
        """Record and log the reason that excludes a node, or some of its clients, once for each connection."""
        name, reason = node.name, one_line(reason, MAX_REASON)
        if reason in node.reasons:
            return
        node.reasons.add(reason)
        if (name, reason) not in self.left_out and len(self.left_out) >= MAX_LEFT_OUT:
            name, reason = "", "others"
        self.left_out[name, reason] += 1
        log(WARNING, "%s is excluded: %s", node.title, reason)

    # -- answers of nodes ---------------------------------------------------------------------------

    def _take(self, node: Node, answer: Mapping[str, Any]) -> None:
        """Record the clients that a node claims; :meth:`_settle` decides."""
        claimed = str(answer.get("name", ""))
        if node.registered and claimed not in ("", node.registered):
            raise BadReplyError(
                f"its node config names it {claimed!r:.99}, its key is registered as {node.registered!r}"
            )
        name = node.registered or claimed
        if len(name) > MAX_NAME or not name.isprintable():
            raise BadReplyError(f"its name is not a line of at most {MAX_NAME} characters")
        fixed = answer.get("fixed-tensors", [])
        same = len(fixed) == len(self.fixed_tensors) and np.allclose(fixed, self.fixed_tensors, ALIKE, ALIKE)
        if self.fixed_tensors and not same:
            raise BadReplyError(
                "its network has other fixed tensors than the server's; install the file that model loads them from on "
                "every node"
            )
        node.claimed_name = name
        if self._of_sites:
            node.clients = (self._site(node, answer),)
            return
        columns = [answer[key] for key in ("clients", "num-train", "num-test")]
        if len(columns[0]) > self._num_clients:
            raise BadReplyError(f"{len(columns[0])} clients on one node")
        self._warn("a node", answer)
        claims = zip(*columns, strict=True)
        node.clients = tuple(ClientInfo(self._index(c), node.number, *_counts(*counts), name) for c, *counts in claims)

    def _site(self, node: Node, answer: Mapping[str, Any]) -> ClientInfo:
        """Return the client in the answer of a site's node, with the index -1 without a partition-id."""
        if "client" not in answer and not node.claimed_name:
            raise BadReplyError("its node config gives neither name nor partition-id")
        client = self._index(answer["client"]) if "client" in answer else -1
        if self._is_open():
            node.description = Description.from_answer(answer)
            self._warn(node.name or f"client {answer['client']}", answer)
            return ClientInfo(client, node.number, 0, 0, node.claimed_name)
        counts = tuple(int(samples) for samples in answer.get("class-counts", ()))
        if counts and (len(counts) != task_of(self.settings.data).num_classes or min(counts) < 0 or not sum(counts)):
            raise BadReplyError(f"class-counts of {len(counts)} classes, {sum(counts)} samples in total")
        fingerprint = answer.get("fingerprint", "")
        if not isinstance(fingerprint, str) or not re.fullmatch(r"([0-9a-f]{16})?", fingerprint):
            raise BadReplyError("its fingerprint does not have 16 hexadecimal digits")
        sizes = _counts(answer["num-train"], answer["num-test"])
        skipped = self._warn(node.name or f"client {client}", answer)
        return ClientInfo(client, node.number, *sizes, node.claimed_name, counts, fingerprint, skipped)

    def _index(self, client: Any) -> int:
        if not isinstance(client, int) or not 0 <= client < self._num_clients:
            raise BadReplyError(f"partition-id {client}: the run has the clients 0 to {self._num_clients - 1}")
        return client

    def _warn(self, source: str, answer: Mapping[str, Any]) -> int:
        """Log a node's warnings, each once; return the number of files that it has skipped.

        The warnings of a site start with its name. Equal warnings of nodes with benchmark data appear once.
        """
        warnings, skipped = answer.get("warnings", []), answer.get("skipped", 0)
        if not isinstance(warnings, list) or not all(isinstance(text, str) for text in warnings):
            raise BadReplyError("its warnings are not a list of texts")
        check_count("skipped", skipped, 0)
        texts = [one_line(text, MAX_WARNING) for text in warnings[:MAX_WARNINGS]]
        if skipped and not texts:  # Posy's nodes warn themselves, with the names of the files
            texts.append(f"{int(skipped)} of its files cannot be read and are skipped")
        for text in texts:
            if (source, text) not in self._warned and len(self._warned) < MAX_WARNED:
                self._warned.add((source, text))
                log(WARNING, "%s: %s", source, text)
        return int(skipped)

    # -- assignment of clients to nodes -----------------------------------------------------------------

    def _claims(self) -> dict[int, list[ClientInfo]]:
        """Return the claims to each client, in the order of names; refuse claims to a client of another name.

        Sites without a partition-id are numbered in the order of their names, after the sites with one. Surplus sites
        get an index from M on. A site has one client, even if several nodes of its name claim others. Before the run
        begins, nodes of different names that claim one client are an error.
        """
        claims: dict[int, list[ClientInfo]] = defaultdict(list)
        unnumbered: dict[str, list[ClientInfo]] = defaultdict(list)
        numbers = {name: client for client, name in self.owners.items()} if self._of_sites else {}
        for node in sorted(self._nodes.values(), key=_by_name):
            assigned = numbers.get(node.claimed_name, -1)
            infos = [replace(info, client=assigned) if info.client < 0 else info for info in node.clients]
            if reason := next(filter(None, (self._objection(info, assigned) for info in infos)), ""):
                self._leave_out(node, reason)
                continue
            for info in infos:
                (unnumbered[info.name] if info.client < 0 else claims[info.client]).append(info)
                if self._of_sites and info.name and info.client >= 0:
                    numbers[info.name] = info.client
        used = claims.keys() | self._known.keys()
        free = (client for client in count() if client not in used)
        for infos, client in zip(unnumbered.values(), free, strict=False):
            claims[client] = [replace(info, client=client) for info in infos]
        for client, infos in sorted(claims.items()):
            *other_names, last = sorted({info.name for info in infos if info.name}) or [""]
            if other_names and not self._joined:
                raise SettingsError(
                    f"client {client} is claimed by {'two' if len(other_names) == 1 else len(other_names) + 1} "
                    f"{'sites' if self._of_sites else 'nodes'}, {', '.join(other_names)} and {last}: "
                    "give each its own partition-id"
                )
        return claims

    def _objection(self, info: ClientInfo, assigned: int) -> str:
        """Return why a node may not host the client it claims, or nothing; ``assigned``: its site's client, or -1."""
        last_info = self._known.get(info.client, info)
        if last_info.name not in ("", info.name):
            return f"client {info.client} belongs to {last_info.name}: give each its own partition-id"
        if assigned >= 0 and info.client != assigned:
            return f"it is client {assigned} of this run, but its partition-id says {info.client}"
        if last_info.fingerprint not in ("", info.fingerprint):
            return f"its data has changed since client {info.client} joined this run; start a new run with it"
        return ""

    def _settle(self) -> None:
        """Assign each client to one node that claims it; its present node keeps it while it claims it."""
        self.clients.clear()
        for client, claims in sorted(self._claims().items()):
            if client >= self._num_clients:
                for info in claims:
                    reason = f"all {self._num_clients} clients of the run belong to other sites"
                    self._leave_out(self._nodes[info.node_id], reason)
                continue
            before = self._known.get(client, claims[0])
            host = next((info for info in claims if info.node_id == before.node_id), claims[0])
            self.clients[client] = self._known[client] = host
            for other in claims:
                if other.node_id != host.node_id:
                    present = f"{title(client, host.name)} is already there on another node"
                    self._leave_out(self._nodes[other.node_id], self._objection(other, -1) or present)


def _by_name(node: Node) -> tuple[bool, str, bool, int]:
    """Sort nodes with names first, by name, and within a name nodes that send their client's index."""
    return not node.claimed_name, node.claimed_name, any(info.client < 0 for info in node.clients), node.number


def _counts(num_train: Any, num_test: Any) -> tuple[int, int]:
    check_count("num-train", num_train, 1)
    check_count("num-test", num_test, 0)
    return num_train, num_test
