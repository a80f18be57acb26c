"""Attacks of a malicious server on secure aggregation. A test's docstring describes the attack before the protections.

The attacks change the messages of a server that otherwise follows the protocol, and record the replies. They use only
message entries of all versions, so they also run on code without the protections.
"""

import contextlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MessageType, RecordDict
from flwr.common.serde import context_from_proto, context_to_proto
from scipy.sparse import csr_matrix
from scipy.sparse.csgraph import maximum_flow

from posy.client_app import secure_aggregation
from posy.client_app.app import app as client_app
from posy.client_app.secure_aggregation import Masking
from posy.commands.deploy.certificates import make_certificates
from posy.deploy import worker
from posy.deploy.tasks import Bundle, Run
from posy.server_app.in_process import InProcessGrid
from posy.strategies.masking import combined, pair_mask, private_key, public_key
from posy.strategies.secure_aggregation import KEY_TEXTS, threshold_of

Federate = Callable[..., Any]
Change = Callable[[Message, Mapping[str, Any]], None]
SIZE = 12


class Server(InProcessGrid):
    """A server that changes messages before it sends them, and records all messages and replies."""

    def __init__(self, clients: int, change: Change = lambda message, config: None, configs: Any = ()) -> None:
        super().__init__(clients)
        self.change = change
        self.exchanges: list[tuple[Message, Message]] = []
        for number, config in enumerate(configs, start=1):
            self.contexts[number].node_config.update(config)

    def send_and_receive(self, messages: Any, *, timeout: float | None = None) -> list[Message]:
        sent = list(messages)
        for message in sent:
            self.change(message, message.content.config_records["config"])
        replies = list(super().send_and_receive(sent, timeout=timeout))
        self.exchanges += zip(sent, replies, strict=True)
        return replies

    def ask(self, client: int, kind: str, content: RecordDict) -> Message:
        """Send one client a forged message, and return its reply."""
        [reply] = self.send_and_receive([Message(content, client + 1, kind)])
        return reply

    def in_stage(self, stage: str) -> list[tuple[Mapping[str, Any], Message]]:
        """Return the configs and replies of a stage of training."""
        exchanges = []
        for message, reply in self.exchanges:
            config: Mapping[str, Any] = message.content.config_records["config"]
            if config.get("secure-stage") == stage and "evaluation" not in str(config["secure-round"]):
                exchanges.append((config, reply))
        return exchanges


@pytest.fixture
def sites(tmp_path: Path) -> list[dict[str, Any]]:
    """Return node configs of twelve sites that trust each other's keys."""
    names = [f"site-{i}" for i in range(SIZE)]
    make_certificates(tmp_path, [], names, 1)
    return [{"signing-key": str(tmp_path / f"{name}.key"), "trusted-keys": str(tmp_path)} for name in names]


def parts(clients: int) -> tuple[np.ndarray, np.ndarray, list[list[int]], list[list[int]]]:
    """Return data of equal clients: six training and six test samples each."""
    rng = np.random.default_rng(2)
    y = np.arange(12 * clients) % 3
    x = (rng.normal(0, 2, (3, 6))[y] + rng.normal(0, 1, (len(y), 6))).astype(np.float32)
    starts = range(0, len(y), 12)
    return x, y, [list(range(s, s + 6)) for s in starts], [list(range(s + 6, s + 12)) for s in starts]


# -- poisoned updates --------------------------------------------------------------------------------------


def test_updates_beyond_secure_range_are_rejected(
    make_config: Any, federate: Federate, monkeypatch: pytest.MonkeyPatch, warnings: pytest.LogCaptureFixture
) -> None:
    """One of ten clients moved every parameter by 31 in one round."""
    config = make_config("fedavg", data=parts(10), model="linear", num_server_rounds=1) | {"secure-aggregation": True}
    mask_reply = Masking.mask_reply

    def poisoned(self: Any, arrays: Any, *args: Any, **entries: Any) -> Any:
        words = mask_reply(self, arrays, *args, **entries)
        if arrays and self._secrets.client == 4:
            words[:21] += np.uint32(int(31 / 16 * 2**30))
        return words

    monkeypatch.setattr(Masking, "mask_reply", poisoned)
    done = federate(config)
    assert np.abs(done.strategy.model - done.strategy.initial()).max() == 0
    assert "by more than secure-range = 16" in warnings.text


# -- evaluation scores -------------------------------------------------------------------------------------


def test_replies_contain_no_individual_scores(make_config: Any, federate: Federate) -> None:
    """Replies contained the accuracies, losses, numbers of test samples and the training loss of each client."""
    servers: list[Server] = []

    def grid(clients: int) -> Server:
        servers.append(Server(clients))
        return servers[0]

    config = make_config("fedrep", data=parts(5), model="mlp", num_server_rounds=2, validation_fraction=0.2)
    federate(config | {"secure-aggregation": True, "evaluate-training": True}, grid=grid)
    numbers = {
        key
        for message, reply in servers[0].exchanges
        if message.metadata.message_type in (MessageType.TRAIN, MessageType.EVALUATE)
        for record in reply.content.metric_records.values()
        for key in record
    }
    assert numbers == {"num-examples"}
    evaluations = [r for m, r in servers[0].exchanges if m.metadata.message_type == MessageType.EVALUATE]
    assert {reply.content.metric_records["metrics"]["num-examples"] for reply in evaluations} == {0}


def test_unmasked_scores_of_a_constant_model_are_refused(make_config: Any, federate: Federate) -> None:
    """The accuracy of a model that always predicts class 1 is the share of class 1 among the client's test samples."""
    servers: list[Server] = []

    def constant(message: Message, config: Mapping[str, Any]) -> None:
        if message.metadata.message_type == MessageType.EVALUATE:
            templates.append(message.content)

    def grid(clients: int) -> Server:
        servers.append(Server(clients, constant))
        return servers[0]

    templates: list[RecordDict] = []
    config = make_config("fedavg", data=parts(5), model="linear", num_server_rounds=1)
    federate(config | {"secure-aggregation": True}, grid=grid)
    content = templates[0]
    model = np.zeros_like(content.array_records["arrays"]["model"].numpy())
    model[-2] = 9.0  # the bias of class 1
    content["arrays"] = ArrayRecord({"model": Array(model)})
    refusals = []
    for names in (("secure-round",), ()):
        config_record = ConfigRecord({k: v for k, v in content.config_records["config"].items() if k not in names})
        request = RecordDict({"arrays": content["arrays"], "config": config_record})
        reply = servers[0].ask(0, MessageType.EVALUATE, request)
        assert reply.has_error(), reply.content.metric_records["metrics"]
        refusals.append(str(reply.error.reason))
    assert "scores without masks" in refusals[0]
    assert "round 0-1-evaluation is over" in refusals[1]


def test_a_second_model_in_a_round_is_refused(make_config: Any, federate: Federate) -> None:
    """The server evaluates another model under the same masks, before the client has revealed its shares."""
    refusals: list[str] = []

    def grid(clients: int) -> Server:
        server = Server(clients)

        def again(message: Message, config: Mapping[str, Any]) -> None:
            if config.get("secure-stage") == "survivors" and "evaluation" in config["secure-round"] and not refusals:
                refusals.append("")
                first = next(m for m, _ in server.exchanges if m.metadata.message_type == MessageType.EVALUATE)
                arrays = ArrayRecord({"model": Array(first.content.array_records["arrays"]["model"].numpy() + 1)})
                request = RecordDict({"arrays": arrays, "config": first.content["config"]})
                reply = server.ask(int(first.content.config_records["config"]["client"]), MessageType.EVALUATE, request)
                refusals[0] = str(reply.error.reason)

        server.change = again
        return server

    config = make_config("fedavg", data=parts(5), num_server_rounds=1)
    done = federate(config | {"secure-aggregation": True}, grid=grid)
    assert "sent a different reply in round" in refusals[0]
    assert done.records[0].sums["served"].samples == 30


# -- one client is isolated --------------------------------------------------------------------------------


def revealed_secrets(server: Server) -> tuple[set[int], set[int]]:
    """Return the clients whose self-mask the server can compute, and the clients whose private key it has."""
    rosters, public, thresholds = {}, {}, {}
    for config, _ in server.in_stage("shares"):
        client = int(config["client"])
        rosters[client], thresholds[client] = list(config["roster"]), int(config["threshold"])
        position = rosters[client].index(client)
        public[client] = config["public-keys"][KEY_TEXTS * position]
    shares: dict[int, dict[int, bytes]] = {client: {} for client in rosters}
    for config, reply in server.in_stage("unmask"):
        if not reply.has_error():
            sender = int(config["client"])
            answer: Any = reply.content.config_records["config"]["answer"]
            for client, share in zip(rosters[sender], answer, strict=False):  # shares for the next phase may follow
                shares[client][sender] = share
    configs = [config for stage in ("survivors", "unmask") for config, _ in server.in_stage(stage)]
    lists = {int(config["client"]): list(config["survivors"]) for config in configs if "survivors" in config}
    masks, keys = set(), set()
    for client, received in shares.items():
        key_shares = {rosters[client].index(s): share for s, share in received.items() if client not in lists[s]}
        threshold = thresholds[client]
        if len(key_shares) >= threshold:
            secret = combined(dict(sorted(key_shares.items())[:threshold]), threshold)
            if public_key(private_key(secret)) == public[client]:
                keys.add(client)
        if len(received) - len(key_shares) >= threshold:
            masks.add(client)
    return masks, keys


def isolating(exclusions: Callable[[int, Sequence[int]], Sequence[int]]) -> Change:
    """Return a change that removes some clients from each client's list of survivors."""

    def change(message: Message, config: Mapping[str, Any]) -> None:
        if "survivors" in config and "evaluation" not in str(config["secure-round"]):
            listed = [int(client) for client in config["survivors"]]
            without = exclusions(int(config["client"]), listed)
            config["survivors"] = [client for client in listed if client not in without]  # type: ignore[index]

    return change


def excluded_by_position(reach: int, threshold: int) -> dict[int, list[int]]:
    """Return the neighbours of client 0 to remove from the list of survivors at each position of the ring.

    A client accepts a list with ``threshold`` of its 2 · reach + 1 neighbours, including itself. The private key of a
    neighbour of client 0 follows from the shares of ``threshold`` clients whose lists lack this neighbour.
    """
    targets = [position for position in range(-reach, reach + 1) if position]
    # Client 0 itself signs the full list.
    positions = [position for position in range(-2 * reach, 2 * reach + 1) if position]
    source, sink, first = 0, 1, 2 + len(targets)
    capacities = np.zeros((first + len(positions),) * 2, np.int32)
    capacities[source, 2:first], capacities[first:, sink] = threshold, 2 * reach + 1 - threshold
    for i, target in enumerate(targets):
        for j, position in enumerate(positions):
            capacities[2 + i, first + j] = position != target and abs(position - target) <= reach
    flow = maximum_flow(csr_matrix(capacities), source, sink)
    assert flow.flow_value == len(targets) * threshold
    chosen = flow.flow.toarray()[2:first, first:] > 0
    return {
        position: [target for i, target in enumerate(targets) if chosen[i, j]] for j, position in enumerate(positions)
    }


@pytest.mark.parametrize(
    ("size", "neighbours", "signed"),
    [(SIZE, 4, False), (SIZE, 4, True), pytest.param(50, 20, False, marks=pytest.mark.slow)],
)
def test_a_server_cannot_isolate_a_client_in_a_ring(
    make_config: Any, federate: Federate, sites: list[dict[str, Any]], size: int, neighbours: int, signed: bool
) -> None:
    """With a threshold of 0.6, lists that differ gave the keys of all neighbours of client 0."""
    ring: dict[int, int] = {}
    servers: list[Server] = []
    reach = neighbours // 2
    plan = excluded_by_position(reach, threshold_of(neighbours + 1, 0.6))

    def learn_ring() -> None:
        """Compute each client's position in the ring from the rosters, with client 0 at position 0."""
        rosters = {int(c["client"]): set(map(int, c["roster"])) for c, _ in servers[0].in_stage("shares")}
        ring[0] = 0
        # The next client shares all but one of its neighbours with the client before it.
        previous, position = 0, 0
        while len(ring) < len(rosters):
            near = [c for c in rosters[previous] if c not in ring and len(rosters[c] & rosters[previous]) == 2 * reach]
            previous, position = near[0], position + 1
            ring[previous] = position

    def exclusions(client: int, listed: Sequence[int]) -> list[int]:
        if not ring:
            learn_ring()
        centred = {c: position if position <= size // 2 else position - size for c, position in ring.items()}
        clients = {position: c for c, position in centred.items()}
        return [clients[target] for target in plan.get(centred[client], ())]

    def grid(clients: int) -> Server:
        servers.append(Server(clients, isolating(exclusions), sites if signed else ()))
        return servers[0]

    config = make_config("fedavg", data=parts(size), model="linear", num_server_rounds=1, local_steps=1)
    settings = {"secure-aggregation": True, "secure-neighbours": neighbours, "secure-threshold": 0.6}
    done = federate(config | settings, grid=grid)
    masks, keys = revealed_secrets(servers[0])
    rosters = {int(c["client"]): set(map(int, c["roster"])) for c, _ in servers[0].in_stage("shares")}
    assert not (0 in masks and rosters[0] - {0} <= keys), "the update of client 0 can be isolated"
    reasons = {reason for _, reason in done.records[0].dropped}
    if signed:
        fragments = ("3 of 5 clients is not a safe threshold", "at least 4", "secure-threshold = auto")
        assert any(all(fragment in reason for fragment in fragments) for reason in reasons)
    else:
        needed = threshold_of(size, 0.6)
        fragments = (f"of the {size} clients", "have signed", f"but {needed} are needed")
        assert any(all(fragment in reason for fragment in fragments) for reason in reasons)
    assert not keys and not masks


def test_an_equivalent_public_key_does_not_cancel_masks() -> None:
    """X25519 ignores the highest bit: client 3 sent client 1's key as other bytes, and client 2's masks cancelled."""
    private, other_private = (private_key(bytes([i]) * 16) for i in (1, 2))
    public = public_key(other_private)
    clone = public[:-1] + bytes([public[-1] | 128])
    assert clone != public
    masks = [pair_mask(private, key, 2, other, b"round", 100) for key, other in ((public, 1), (clone, 3))]
    assert (masks[0] + masks[1]).any()
    ends = [
        pair_mask(private, public, 2, 1, b"round", 100),
        pair_mask(other_private, public_key(private), 1, 2, b"round", 100),
    ]
    assert not (ends[0] + ends[1]).any()


def test_a_server_cannot_unmask_two_of_five_clients(make_config: Any, federate: Federate) -> None:
    """All clients are neighbours, with threshold 3: the server learnt the sum over clients 0 and 1."""
    excluded = {0: (2, 3), 1: (2, 4), 2: (3, 4), 3: (2, 4), 4: (2, 3)}
    servers: list[Server] = []

    def grid(clients: int) -> Server:
        servers.append(Server(clients, isolating(lambda client, listed: excluded[client])))
        return servers[0]

    config = make_config("fedavg", data=parts(5), model="linear", num_server_rounds=1, local_steps=1)
    done = federate(config | {"secure-aggregation": True}, grid=grid)
    masks, keys = revealed_secrets(servers[0])
    assert not ({0, 1} <= masks and {2, 3, 4} <= keys), "the sum over clients 0 and 1 can be computed"
    reasons = {reason for _, reason in done.records[0].dropped}
    fragments = ("1 of the 5 clients", "have signed", "but 3 are needed")
    assert any(all(fragment in reason for fragment in fragments) for reason in reasons)
    assert not keys and not masks


@pytest.mark.parametrize(("trusted", "least"), [(12, 7), (6, 4), (5, 3), (4, 3), (3, 2), (2, 2), (1, 2)])
def test_smallest_sum_is_a_majority_of_the_trusted_sites(tmp_path: Path, trusted: int, least: int) -> None:
    """A site that trusted twelve keys joined a sum of two."""
    make_certificates(tmp_path, [], [f"site-{i}" for i in range(trusted)], 1)
    config = {"signing-key": str(tmp_path / "site-0.key"), "trusted-keys": str(tmp_path)}
    assert secure_aggregation.smallest_sum(config) == least
    assert secure_aggregation.smallest_sum({}) == 2
    if trusted > 1:
        (tmp_path / f"site-{trusted - 1}.pub").unlink()
        assert secure_aggregation.smallest_sum(config) == max(2, (trusted - 1) // 2 + 1)


def test_two_of_twelve_sites_cannot_form_a_sum(
    make_config: Any, federate: Federate, sites: list[dict[str, Any]]
) -> None:
    config = make_config("fedavg", data=parts(2), num_server_rounds=1, local_steps=1) | {"secure-aggregation": True}
    done = federate(config, grid=lambda clients: Server(clients, configs=sites[:2]))
    reasons = {reason for _, reason in done.records[0].dropped}
    assert any("cohort has 2 clients" in reason and "sums over at least 7" in reason for reason in reasons)


def test_rounds_below_min_clients_are_refused() -> None:
    """A site may refuse sums over few clients, in the cohort and in the list of survivors."""
    nodes = [Node(client) for client in range(4)]
    shared_round(nodes, min_clients=4)
    reply = nodes[0].ask("survivors", {"survivors": [0, 1, 2]}, min_clients=4)
    assert "list of survivors has 3 clients" in reply and "sums over at least 4" in reply
    few = [Node(client) for client in range(4)]
    with pytest.raises(AssertionError, match=r"cohort has 4 clients.*sums over at least 5"):
        shared_round(few, min_clients=5)


# -- one client receives another control variate -----------------------------------------------------------


def test_a_different_control_variate_prevents_unmasking(
    make_config: Any, federate: Federate, warnings: pytest.LogCaptureFixture
) -> None:
    """The masks did not depend on the control variate. An extreme value for client 2 dominated the sum."""

    def change(message: Message, config: Mapping[str, Any]) -> None:
        if message.metadata.message_type == MessageType.TRAIN and config["client"] == 2:
            arrays = message.content.array_records["arrays"]
            arrays["control"] = Array(arrays["control"].numpy() + np.float32(0.5))

    config = make_config("scaffold", data=parts(5), model="linear", num_server_rounds=1)
    done = federate(config | {"secure-aggregation": True}, grid=lambda clients: Server(clients, change))
    np.testing.assert_array_equal(done.strategy.model, done.strategy.initial())
    assert "the masks do not cancel" in warnings.text


@pytest.mark.parametrize("entry", ["server-round", "state-to"])
def test_a_different_config_entry_prevents_unmasking(
    make_config: Any, federate: Federate, warnings: pytest.LogCaptureFixture, entry: str
) -> None:
    """The masks did not depend on the number of the round, from which a client derives its batches and rates."""

    def change(message: Message, config: Mapping[str, Any]) -> None:
        if message.metadata.message_type == MessageType.TRAIN and config["client"] == 2:
            config[entry] = 5 if entry == "server-round" else "0-1-5"  # type: ignore[index]

    config = make_config("fedavg", data=parts(5), model="linear", num_server_rounds=1)
    config |= {"secure-aggregation": True, "secure-threshold": 1.0}
    done = federate(config, grid=lambda clients: Server(clients, change))
    np.testing.assert_array_equal(done.strategy.model, done.strategy.initial())
    reasons = {reason for _, reason in done.records[0].dropped}
    refused = any("the name 0-1 does not belong to round 5" in reason for reason in reasons)
    assert refused if entry == "server-round" else "the masks do not cancel" in warnings.text


# -- shares after a lost context or a new worker -----------------------------------------------------------


class Node:
    """A node with its worker. The node stores a context only if the worker returns it."""

    def __init__(self, client: int) -> None:
        InProcessGrid(1)  # gives this process the identity that messages need
        self.client = client
        self.stored = context_to_proto(
            Context(run_id=0, node_id=client + 1, node_config={}, state=RecordDict(), run_config={})
        )
        self.loses_contexts = False
        self.reply: Any = None
        self._min_clients = 2
        self.restart_worker()

    def restart_worker(self) -> None:
        """Replace the worker by a new one, as after a crash."""
        self._last = worker.LastAnswer()
        self._sessions = [worker.Sessions()] if hasattr(worker, "Sessions") else []

    def ask(self, stage: str, entries: Mapping[str, Any], min_clients: int = 2) -> Any:
        """Return the node's answer in a stage, or the text of its error."""
        kind = MessageType.TRAIN if stage == "train" else MessageType.QUERY
        config = {"client": self.client, "secure-round": "0-1", "server-round": 1, "settings": "{}", "lr": 0.1}
        config |= entries if stage == "train" else {"secure-stage": stage, **entries}
        self._message, self._min_clients = Message(RecordDict({"config": ConfigRecord(config)}), 1, kind), min_clients
        with contextlib.suppress(RuntimeError):  # the worker ends
            worker.serve(self, self, self._last, *self._sessions)  # type: ignore[arg-type]
        if self.reply.has_error():
            return str(self.reply.error.reason)
        return self.reply.content.config_records["config"]["answer"]

    # The task of the worker.
    def pull(self) -> Any:
        return self._message, context_from_proto(self.stored), Run(1), Bundle("", b"")

    def push(self, reply: Message) -> None:
        self.reply = reply

    def finish(self, context: Context) -> None:
        if self.loses_contexts:
            raise RuntimeError("the connection to the node is lost")
        self.stored = context_to_proto(context)

    # The code of the run.
    signers: tuple[str, ...] = ()

    def load(self, bundle: Any, rule: str) -> Callable[[Message, Context], Message]:
        return self.handle

    def handle(self, message: Message, context: Context) -> Message:
        config: dict[str, Any] = dict(message.content.config_records["config"])
        if message.metadata.message_type == MessageType.QUERY:
            if self._min_clients == 2:
                return client_app(message, context)
            texts = secure_aggregation.answer(message, context, self._min_clients)
            return Message(RecordDict({"config": ConfigRecord({"answer": texts})}), reply_to=message)
        update, start = [np.full(6, 0.5, np.float32)], [np.zeros(6, np.float32)]
        common = [start] if "common" in inspect.signature(Masking.mask_reply).parameters else []
        Masking(config, message, context).mask_reply(update, start, 2, 16.0, *common)
        return Message(RecordDict({"config": ConfigRecord({"answer": [b"masked"]})}), reply_to=message)


def shared_round(nodes: Sequence[Node], min_clients: int = 2) -> None:
    """Run the stages of a round until all clients have sent their updates."""
    clients = list(range(len(nodes)))
    public = [text for node in nodes for text in node.ask("keys", {})]
    view = {"cohort": clients, "reach": 0, "cohort-threshold": 3, "threshold": 3}
    sealed = [node.ask("shares", {"roster": clients, "public-keys": public, **view}, min_clients) for node in nodes]
    for node, answer in zip(nodes, sealed, strict=True):
        assert isinstance(answer, list), answer
        sources = [other for other in clients if other != node.client]
        shares = [sealed[other][node.client - (node.client > other)] for other in sources]
        assert node.ask("train", {"weights": 8, "sources": sources, "shares": shares}) == [b"masked"]


def test_a_lost_context_does_not_reveal_other_shares() -> None:
    """After the node lost the context, the worker sent the shares for a second list of survivors."""
    stage = getattr(secure_aggregation, "SURVIVORS", "unmask")
    nodes = [Node(client) for client in range(4)]
    shared_round(nodes)
    nodes[0].loses_contexts = True
    first = nodes[0].ask(stage, {"survivors": [0, 1, 2]})
    assert isinstance(first, list)
    nodes[0].loses_contexts = False
    assert "signed a different list of survivors" in nodes[0].ask(stage, {"survivors": [0, 1, 3]})
    assert nodes[0].ask(stage, {"survivors": [0, 1, 2]}) == first


def test_a_restarted_worker_refuses_the_unfinished_round() -> None:
    """The secrets exist only in the worker's memory, not in the context that the node stores."""
    nodes = [Node(client) for client in range(4)]
    shared_round(nodes)
    assert not [name for name in context_from_proto(nodes[0].stored).state if "secure" in name]
    nodes[0].restart_worker()
    refusal = nodes[0].ask("survivors", {"survivors": [0, 1, 2, 3]})
    assert "round 0-1 did not begin here" in refusal
