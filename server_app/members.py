"""Who takes part: which node hosts which client, and how messages reach them."""

import re
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
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
from posy.flower import failure, raised
from posy.server_app.grids import WaveGrid
from posy.server_app.progress import announce, task_table
from posy.settings import SettingsError
from posy.strategies.replies import UNREADABLE, BadReplyError, ClientInfo, check_count
from posy.strategies.settings import Settings
from posy.words import are, one_line, title

ASK_SECONDS = 60.0
"""For so long a node may be silent before it is asked again whom it hosts."""
POLL_SECONDS = 0.5
REFRESH_SECONDS = 2.0
"""How long a round waits for the answers of nodes that have just come; later ones join in the next round."""

MAX_NAME, MAX_REASON = 100, 500
MAX_LEFT_OUT = 200
"""Of so many nodes that were left out the record names the reasons."""
MAX_NAMED = 20
"""So many clients are named where a run begins without the others."""
MAX_WARNINGS, MAX_WARNING, MAX_SAID = 20, 300, 2000
"""How many warnings of an answer are shown, how many characters of each, and how many in the whole run."""
FEW_CLASSES, MAX_CLASSES = 4, 60
"""Of so many classes a site's names are shown, with so many characters in all."""

Take = Callable[[int, Mapping[str, Any]], None]


@dataclass(frozen=True)
class _Claim:
    """What a node has answered: its clients, with their samples; that of a site may have no number yet (-1)."""

    members: tuple[ClientInfo, ...]
    name: str = ""
    description: Description | None = None


@dataclass
class _Assignment:
    """Who claims each client, in the order of names, those without one last; and nodes that no number is left for."""

    claimants: dict[int, list[ClientInfo]] = field(default_factory=lambda: defaultdict(list))
    surplus: list[int] = field(default_factory=list)


class Federation:
    """Who takes part: which node hosts which client, over reconnections and from round to round.

    A client is known by the partition-id of its node's config, or by the name of its site (the name that the
    node's key was registered under, else ``name`` of the node config), never by the id of its node, which
    may change with every start of a node. A client that a node with a name has once hosted belongs to that name
    for the whole run: no other name takes it over.

    Parameters
    ----------
    grid : WaveGrid
        The way to the nodes.
    settings : Settings
        All settings of the run.

    Attributes
    ----------
    members : dict of int to ClientInfo
        The clients that can be reached now, by index; :meth:`refresh` changes it in place.
    owners : dict of int to str
        The name that each client belongs to; a client of nodes without names has none.
    fingerprints : dict of int to str
        What each site's data was like when it joined.
    left_out : Counter of (str, str)
        Nodes that cannot take part, by name (empty if they have none) and reason.
    """

    def __init__(self, grid: WaveGrid, settings: Settings) -> None:
        self.grid = grid
        self.settings = settings
        self.members: dict[int, ClientInfo] = {}
        self.owners: dict[int, str] = {}
        self.fingerprints: dict[int, str] = {}
        self.left_out: Counter[tuple[str, str]] = Counter()
        self._of_sites = settings.data.dataset == SITES
        self._started = time.monotonic()
        self._hosts: dict[int, ClientInfo] = {}  # of clients that are away, too
        self._claims: dict[int, _Claim] = {}
        self._asked: set[int] = set()
        self._refused: dict[int, set[str]] = {}
        self._pending: dict[str, int] = {}
        self._outages = grid.outages.count
        self._registered: dict[int, str] = {}
        self._told: dict[int, str] = {}
        self._said: set[tuple[str, str]] = set()
        self._descriptions: dict[tuple[str, int], Description] = {}

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
        self._gather({"describe": True}, self._take_description)
        # In the order of the clients, so that it does not depend on who answers first; each client once.
        told = [members[0] for _, members in sorted(self._assigned().claimants.items())]
        known = ((member, self._claims[member.node_id].description) for member in told)
        self._descriptions = {(member.name, member.client): found for member, found in known if found is not None}
        titles = [name or f"client {client}" for name, client in self._descriptions]
        data, warnings = agreed(self.settings.data, list(self._descriptions.values()), titles)
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
        self._asked -= self._claims.keys()  # they are asked again, with the task
        self._claims.clear()
        return self.settings

    def join(self) -> dict[int, ClientInfo]:
        """Ask every node which clients it hosts, until all M are found or the time is up.

        Returns
        -------
        dict
            :attr:`members`.

        Raises
        ------
        SettingsError
            If fewer than ``min-clients`` are there in the end (it tells why nodes were left out), or if two
            nodes of different names claim one client.
        """
        self._gather({}, self._take)
        self._settle()
        clients = self.settings.data.num_clients
        if missing := clients - len(self.members):
            named = are(self.members, self.owners, clients, most=MAX_NAMED)
            log(WARNING, "The run begins without %s of its %s clients: %s there", missing, clients, named)
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
        gone = set(self.grid.gone)  # if they are there again, they have been restarted
        there, known = dict(self.members), self._hosts.keys() | self.owners.keys()
        clients = self.settings.data.num_clients
        needed = min(max(self.settings.run.min_clients, 1), clients)
        started = time.monotonic()
        missed: set[int] = set()
        while True:
            self._look()
            if lost := sorted(there.keys() - self.members.keys() - missed):
                log(WARNING, "%s gone; %s", are(lost, self.owners, clients), self._present_words())
                missed |= set(lost)
            waited = time.monotonic() - started
            if len(self.members) >= needed or waited > self.settings.run.join_timeout:
                break
            if waited < POLL_SECONDS:
                log(WARNING, "%s; the round waits until %s are", self._present_words(), needed)
            time.sleep(POLL_SECONDS)
        joined = [client for client in self.members if client not in known]
        stayed = {c: m.node_id for c, m in there.items() if c not in missed and m.node_id not in gone}
        back = [c for c, member in self.members.items() if c in known and stayed.get(c) != member.node_id]
        if joined:
            announce(f"{are(joined, self.owners, clients)} new; {self._present_words()}")
        if back:
            announce(f"{are(back, self.owners, clients)} back; {self._present_words()}")
        return back

    def _present_words(self) -> str:
        return f"{len(self.members)} of {self.settings.data.num_clients} clients are there"

    def task(self, model: str) -> str:
        """Return the task that the sites have agreed on, and what each has of it, as a table for people.

        Parameters
        ----------
        model : str
            Name of the network.
        """
        data, columns = self.settings.data, ("site", "client", "training", "test", "samples", "classes", "skipped")
        rows = [
            self._row(client) if client in self.members else {"site": self.owners.get(client, ""), "client": client}
            for client in range(data.num_clients)
        ]
        classes = task_of(data).class_names
        facts = {
            "samples": f"{data.sample_kind}, shape {data.input_shape}",
            "classes": f"{len(classes)}: {', '.join(classes)}",
            "model": model,
            "clients": f"{len(self.members)} of {data.num_clients}",
        }
        return task_table(columns, rows, facts)

    def _row(self, client: int) -> dict[str, Any]:
        """Return what a site has told of its data."""
        member = self.members[client]
        told = self._descriptions.get((member.name, client))
        names = told.classes if told else ()
        row = {"site": member.name, "client": client, "training": member.num_train, "test": member.num_test}
        if told is not None:
            row["samples"] = f"{told.kind}, shape {'x'.join(map(str, told.shape))}"
        if names:
            few = len(names) <= FEW_CLASSES
            row["classes"] = one_line(f"{len(names)}: {', '.join(names)}", MAX_CLASSES) if few else len(names)
        elif member.class_counts:
            row["classes"] = sum(count > 0 for count in member.class_counts)
        if member.skipped:
            row["skipped"] = member.skipped
        return row

    def summary(self) -> dict[str, Any]:
        """Return the sites by client, and the nodes left out with the reason, as far as there are any."""
        found: dict[str, Any] = {}
        if self.owners:
            found["sites"] = [self.owners.get(client) for client in range(self.settings.data.num_clients)]
        if self.left_out:
            found["left-out"] = [
                {"site": name or None, "reason": reason, "times": times}
                for (name, reason), times in self.left_out.items()
            ]
        return found

    def as_json(self) -> dict[str, Any]:
        """Return what the run must know of its sites when it is resumed, as JSON holds it."""
        columns = {"owners": self.owners, "fingerprints": self.fingerprints}
        return {key: {str(client): text for client, text in sorted(found.items())} for key, found in columns.items()}

    def restore(self, known: Mapping[str, Any]) -> None:
        """Take up what :meth:`as_json` returned in an earlier part of the same run; to be called before any join.

        Raises
        ------
        SettingsError
            If it is not of that form.
        """
        clients = self.settings.data.num_clients
        try:
            owners, fingerprints = (
                {int(client): text for client, text in known[key].items()} for key in ("owners", "fingerprints")
            )
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise SettingsError(f"the checkpoint does not tell whose the clients are: {error!r}") from error
        if not all(
            isinstance(text, str) and 0 <= client < clients
            for found in (owners, fingerprints)
            for client, text in found.items()
        ):
            raise SettingsError(f"the checkpoint does not tell whose the clients 0 to {clients - 1} are")
        self.owners, self.fingerprints = owners, fingerprints

    def class_counts(self) -> npt.NDArray[np.int64] | None:
        """Return the samples of each class on each client ``(M, C)``, if all sites have told them."""
        rows = [self._hosts[client].class_counts for client in sorted(self._hosts)]
        if len(rows) != self.settings.data.num_clients or not all(rows):
            return None
        return np.array(rows, np.int64)

    # -- asking ----------------------------------------------------------------------------------------

    def _gather(self, ask: Mapping[str, Any], take: Take) -> None:
        """Ask nodes as they connect, until M clients have been found, no more are to come, or the time is up."""
        clients, run = self.settings.data.num_clients, self.settings.run
        while self._found() < clients:
            left = max(run.join_timeout - (time.monotonic() - self._started), POLL_SECONDS)
            self._ask(ask, take, left)
            found = self._found()
            if found >= clients:
                break
            waited = time.monotonic() - self._started
            # Benchmark clients are all needed, and their data is the same everywhere: one that fails is enough.
            hopeless = bool(self._refused) and not self._of_sites and not run.min_clients
            if hopeless or len(self._refused) + found >= clients or waited > run.join_timeout:
                if run.min_clients and found >= min(run.min_clients, clients):
                    break
                self._settle()  # which tells of nodes that claim the same client
                raise SettingsError(self._too_few(found, waited))
            time.sleep(POLL_SECONDS)

    def _ask(self, ask: Mapping[str, Any], take: Take, timeout: float) -> None:
        """Ask the nodes that have not been asked yet, and read their answers.

        Those that are silent are asked again, after ever longer times: a node that ends takes a question with it,
        and has the same id when it is back.
        """
        silent = sorted(self._present() - self._asked)
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
        living = self._present()
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
        self._settle()

    def _present(self) -> set[int]:
        """Return the ids of the connected nodes, and forget what those have told that are or were away.

        A node that was away is asked again: it may have been restarted, with other data.
        """
        living = self._connected()
        stayed = living - self.grid.gone
        self.grid.gone.clear()
        self._asked &= stayed
        self._refused = {node: reasons for node, reasons in self._refused.items() if node in stayed}
        self._claims = {node: claim for node, claim in self._claims.items() if node in stayed}
        self._pending = {number: node for number, node in self._pending.items() if node in stayed}
        self._told = {node: name for node, name in self._told.items() if node in stayed}
        return living

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
            log(INFO, "%s was gone before it could answer; it is asked again if it comes back", self._called(node))
            self._asked.discard(node)
            return
        if reply.has_error():
            # A warm node says DataError: the message.
            own = reply.error.code == ErrorCode.CLIENT_APP_RAISED_EXCEPTION
            said = re.sub(r"^\w+: ", "", raised(str(reply.error.reason)))
            self._leave_out(node, said if own else failure(reply.error))
            return
        try:
            take(node, reply.content.config_records["config"])
        except UNREADABLE as error:
            understood = isinstance(error, DataError | BadReplyError)
            self._leave_out(node, str(error) if understood else f"malformed answer: {error!r}")

    def _leave_out(self, node: int, reason: str) -> None:
        """Tell, once as long as the node stays, why it cannot take part or not with all its clients."""
        name, reason = self._name_of(node), one_line(reason, MAX_REASON)
        if reason in (told := self._refused.setdefault(node, set())):
            return
        told.add(reason)
        if (name, reason) not in self.left_out and len(self.left_out) >= MAX_LEFT_OUT:
            name, reason = "", "others"
        self.left_out[name, reason] += 1
        log(WARNING, "%s is left out: %s", self._called(node), reason)

    def _too_few(self, found: int, waited: float) -> str:
        clients, least = self.settings.data.num_clients, self.settings.run.min_clients
        reasons = "; ".join(f"{name}: {reason}" if name else reason for name, reason in self.left_out)
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
        name = self._name(node, answer)
        members: tuple[ClientInfo, ...]
        if self._of_sites:
            member = self._site(node, name, answer)
            counts = tuple(int(count) for count in answer.get("class-counts", ()))
            classes = task_of(self.settings.data).num_classes
            if counts and (len(counts) != classes or min(counts) < 0 or not sum(counts)):
                raise BadReplyError(f"class-counts of {len(counts)} classes, {sum(counts)} samples in all")
            known = {"num_train": answer["num-train"], "num_test": answer["num-test"], "class_counts": counts}
            skipped = self._note(node, answer)
            members = (replace(member, **known, fingerprint=_fingerprint(answer), skipped=skipped),)
        else:
            columns = [answer[key] for key in ("clients", "num-train", "num-test")]
            if len(columns[0]) > self.settings.data.num_clients:
                raise BadReplyError(f"{len(columns[0])} clients on one node")
            members = tuple(self._member(c, node, name, *counts) for c, *counts in zip(*columns, strict=True))
        for member in members:
            check_count("num-train", member.num_train, 1)
            check_count("num-test", member.num_test, 0)
        self._claims[node] = _Claim(members, name)

    def _take_description(self, node: int, answer: Mapping[str, Any]) -> None:
        """Note whose site a node claims to be, and what it tells of its data."""
        name = self._name(node, answer)
        claim = _Claim((self._site(node, name, answer),), name, Description.from_answer(answer))
        self._note(node, answer)
        self._claims[node] = claim

    def _note(self, node: int, answer: Mapping[str, Any]) -> int:
        """Log, once, what a site has found in its data that a person should know; return the files it has skipped."""
        warnings, skipped = answer.get("warnings", []), answer.get("skipped", 0)
        if not isinstance(warnings, list) or not all(isinstance(text, str) for text in warnings):
            raise BadReplyError("its warnings are not a list of texts")
        check_count("skipped", skipped, 0)
        texts = [one_line(text, MAX_WARNING) for text in warnings[:MAX_WARNINGS]]
        if skipped and not texts:  # Posy's own nodes say it themselves, with the names of the files
            texts.append(f"{int(skipped)} of its files cannot be read and are left out")
        who = self._name_of(node) or f"client {answer['client']}"
        for text in texts:
            if (who, text) not in self._said and len(self._said) < MAX_SAID:
                self._said.add((who, text))
                log(WARNING, "%s: %s", who, text)
        return int(skipped)

    def _site(self, node: int, name: str, answer: Mapping[str, Any]) -> ClientInfo:
        """Return the member that the node of a site says it is, with the number -1 if it has no partition-id."""
        if "client" in answer:
            return self._member(answer["client"], node, name)
        if not name:
            raise BadReplyError("its node config gives neither name nor partition-id")
        return ClientInfo(-1, node, 0, 0, name)

    def _member(self, client: Any, node: int, name: str, num_train: int = 0, num_test: int = 0) -> ClientInfo:
        clients = self.settings.data.num_clients
        if not isinstance(client, int) or not 0 <= client < clients:
            raise BadReplyError(f"partition-id {client}: the run has the clients 0 to {clients - 1}")
        return ClientInfo(client, node, num_train, num_test, name)

    def _name(self, node: int, answer: Mapping[str, Any]) -> str:
        """Return the name of a node: the one its key was registered under, else the one it tells."""
        registered, told = self._registered.get(node, ""), str(answer.get("name", ""))
        if registered and told and told != registered:
            raise BadReplyError(f"its node config names it {told!r:.99}, its key is registered as {registered!r}")
        name = registered or told
        if len(name) > MAX_NAME or not name.isprintable():
            raise BadReplyError(f"its name is not a line of at most {MAX_NAME} characters")
        self._told[node] = name
        return name

    def _name_of(self, node: int) -> str:
        """Return the name that a node is known under so far, or nothing."""
        return one_line(self._registered.get(node, "") or self._told.get(node, ""), MAX_NAME)

    def _called(self, node: int) -> str:
        return self._name_of(node) or f"node {node}"

    def _found(self) -> int:
        """Return how many clients are claimed, each of them once."""
        return len(self._assigned().claimants)

    def _assigned(self) -> _Assignment:
        """Work out which client each claim is for; claims to what belongs to others are refused.

        Sites that have no partition-id are numbered in the order of their names, after those that have one. A site
        has one client, whatever several nodes of its name say.

        Raises
        ------
        SettingsError
            Before the run begins, if nodes of different names claim one client.
        """
        found = _Assignment()
        unnumbered: dict[str, list[ClientInfo]] = defaultdict(list)
        numbers = {name: client for client, name in self.owners.items()} if self._of_sites else {}
        for node, claim in sorted(self._claims.items(), key=_by_name):
            own = numbers.get(claim.name, -1)
            members = [replace(m, client=own) if m.client < 0 else m for m in claim.members]
            reason = next((reason for member in members if (reason := self._objection(member, own))), "")
            if reason:
                del self._claims[node]
                self._leave_out(node, reason)
                continue
            for member in members:
                (unnumbered[member.name] if member.client < 0 else found.claimants[member.client]).append(member)
                if self._of_sites and member.name and member.client >= 0:
                    numbers[member.name] = member.client
        taken = found.claimants.keys() | self.owners.keys() | self._hosts.keys()
        free = [client for client in range(self.settings.data.num_clients) if client not in taken]
        for number, members in enumerate(unnumbered.values()):
            if number < len(free):
                found.claimants[free[number]] = [replace(member, client=free[number]) for member in members]
            else:
                found.surplus += [member.node_id for member in members]
        if not self._hosts:
            for client, members in sorted(found.claimants.items()):
                self._check_names(client, sorted({member.name for member in members if member.name}))
        return found

    def _check_names(self, client: int, names: list[str]) -> None:
        """Raise :class:`SettingsError` if several names claim one client before anyone has it."""
        if len(names) > 1:
            count = "two" if len(names) == 2 else str(len(names))
            raise SettingsError(
                f"client {client} is claimed by {count} {'sites' if self._of_sites else 'nodes'}, "
                f"{', '.join(names[:-1])} and {names[-1]}: give each its own partition-id"
            )

    def _objection(self, member: ClientInfo, own: int) -> str:
        """Return why a member must not have the client that it claims, or nothing; ``own``: that of its site, or -1."""
        owner = self.owners.get(member.client, member.name)
        if owner != member.name:
            return f"client {member.client} belongs to {owner}: give each its own partition-id"
        if own >= 0 and member.client != own:
            return f"it is client {own} of this run, but its partition-id says {member.client}"
        known = self.fingerprints.get(member.client, member.fingerprint)
        if member.fingerprint != known:
            return f"its data is not that with which client {member.client} joined this run; start a new run with it"
        return ""

    def _settle(self) -> None:
        """Give each client to one node that claims it; the node it is on keeps it as long as it does."""
        found = self._assigned()
        for node in found.surplus:
            del self._claims[node]
            self._leave_out(node, f"all {self.settings.data.num_clients} clients of the run are others")
        self.members.clear()
        for client, members in sorted(found.claimants.items()):
            before = self._hosts.get(client)
            host = next((m for m in members if before is not None and m.node_id == before.node_id), members[0])
            self.members[client] = self._hosts[client] = host
            if host.name:
                self.owners.setdefault(client, host.name)
            if host.fingerprint:
                self.fingerprints.setdefault(client, host.fingerprint)
            for other in members:
                if other.node_id != host.node_id:
                    there = f"{title(client, host.name)} is already there on another node"
                    self._leave_out(other.node_id, self._objection(other, -1) or there)


def _by_name(item: tuple[int, _Claim]) -> tuple[bool, str, bool, int]:
    """Put nodes with names first, in their order, and of one name those that tell their client's index."""
    node, claim = item
    return not claim.name, claim.name, any(member.client < 0 for member in claim.members), node


def _fingerprint(answer: Mapping[str, Any]) -> str:
    """Return the fingerprint of a site's data, if it has told one."""
    found = answer.get("fingerprint", "")
    if not isinstance(found, str) or (found and not re.fullmatch(r"[0-9a-f]{16}", found)):
        raise BadReplyError("its fingerprint is not one of 16 hexadecimal digits")
    return found
