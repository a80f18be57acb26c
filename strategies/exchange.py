"""Send the messages of a round, decode the replies, and drop clients whose replies are missing or unusable."""

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from logging import WARNING
from pathlib import Path
from typing import Any, TypeVar

from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from flwr.common.logger import log
from flwr.serverapp import Grid

from posy.flower import CLOCK_SECONDS, MAX_REASON, Array, content_of, failure, record_of, with_entries
from posy.mistakes import raise_mistake
from posy.sharing import IdentityCache
from posy.strategies import schedule
from posy.strategies.arrays import RETURNS, UNIFORM_WEIGHTS, Arrays, check_names, dimensions, shape_of
from posy.strategies.client_settings import settings_in, train_settings
from posy.strategies.columns import NODE_SETTINGS
from posy.strategies.hooks import ServerHooks
from posy.strategies.replies import BadReplyError, RoundRecord, client_of
from posy.strategies.run_settings import LAST_ROUND, UNIFORM
from posy.strategies.server_state import arrays_once
from posy.strategies.settings import Settings
from posy.strategies.states import ClientStates, LostStateError, decoded_reply
from posy.words import describe_clients, one_line

SAVE_SECONDS = 120.0
"""Seconds after which clients store their models again, so that an interrupted run keeps recent models."""
MAX_LIFE_SECONDS = 7 * 86_400.0
"""Maximum lifetime of a message."""
MAX_REASONS = 10
"""Maximum number of reasons for dropped replies to log per phase."""
Decoder = Callable[[int], Callable[[RecordDict], Any]]
T = TypeVar("T")
R = TypeVar("R")


class Exchange:
    """The messages between a strategy and its clients, and the record of the round.

    Parameters
    ----------
    strategy : ServerHooks
        The strategy, whose hooks return a message's arrays and config.
    """

    def __init__(self, strategy: ServerHooks) -> None:
        self.strategy = strategy
        self.settings = strategy.settings
        self.refresh: Callable[[], list[int]] | None = None
        """Function that updates the strategy's clients before each round."""
        self.client_names: Mapping[int, str] = {}
        """Client names taken from the data, such as the groups of a natural partition; other clients are named
        after their nodes."""
        self.models_folder: Path | None = None
        self.states = ClientStates()
        self.saving = False
        """Whether clients store their models in this round (see :data:`SAVE_SECONDS`)."""
        self.predictions_folder: Path | None = None
        """The folder for the clients' predictions in evaluations that report all metrics; None to store none."""
        self.phase: list[Message] = []
        """The training or evaluation messages of this phase."""
        self.sent: list[Message] = []
        self._dimensions = dimensions(strategy.architecture, strategy.shared.size)
        self._lost: list[int] = []
        self._saved = -math.inf
        self._settings_json = self.settings.to_json()
        self._clock = time.perf_counter()

    def begin_round(self, server_round: int) -> None:
        """Start the record of a round, and decide whether clients store their models in this round."""
        strategy = self.strategy
        if self.refresh:
            self.refresh()
        away = tuple(client for client in range(strategy.num_clients) if client not in strategy.clients)
        strategy.record = RoundRecord(server_round, away=away)
        self._clock = time.perf_counter()
        run = self.settings.run
        # Posy computes the system accuracy of these rounds from the stored models.
        averaged = server_round == run.num_server_rounds or schedule.in_average(run, server_round)
        due = averaged or self._clock - self._saved > SAVE_SECONDS
        self.saving = self.models_folder is not None and schedule.evaluates(run, server_round) and due
        if self.saving:
            self._saved = self._clock

    def messages(
        self, kind: str, server_round: int, config: ConfigRecord, flags: Mapping[int, Mapping[str, Any]]
    ) -> list[Message]:
        """Return a message for each client in ``flags``, which maps clients to their config entries for the phase."""
        strategy, run = self.strategy, self.settings.run
        common = ConfigRecord({**config, "settings": self._settings_json, "server-round": server_round})
        common["lr"] = schedule.learning_rate(self.settings, server_round)
        if self.saving:
            common["save-models-to"] = str(self.models_folder)
            common[LAST_ROUND] = server_round == run.num_server_rounds
        if self.predictions_folder is not None and server_round == run.num_server_rounds:
            common["save-predictions-to"] = str(self.predictions_folder)
        pack = IdentityCache(Array)  # serialises an array once for all clients
        self.sent = []
        for client, flag_entries in flags.items():
            served, row = self.served(client), strategy.record.row(client)
            arrays = record_of({name: pack(array) for name, array in served.items()})
            state = self.states.config(kind, server_round, client)
            expected = strategy.returns(server_round, client)
            if kind == MessageType.TRAIN and expected != tuple(strategy.method.returned):
                state[RETURNS] = ",".join(expected)
            entries = {"client": client, **state, **flag_entries, **strategy.train_config(server_round, client)}
            self.count_bytes(client, down=sum(array.nbytes for array in served.values()))
            if name := self.client_names.get(client, strategy.clients[client].name):
                row["site"] = name
                if self.saving or self.settings.train.client_settings:  # a site looks up its entry by site name
                    entries["site"] = name
            if node_settings := strategy.clients[client].node_settings:
                row[NODE_SETTINGS] = node_settings
            content = content_of(arrays=arrays, config=with_entries(common, entries))
            self.sent.append(self.message(content, client, kind))
        self.phase = self.sent
        return self.sent

    def settings_of(self, client: int) -> Settings:
        """Return the run's settings for one client, including the client's own settings for local training, if any."""
        info = self.strategy.clients[client]
        name, chosen = self.client_names.get(client, info.name), settings_in(info.node_settings)
        return replace(self.settings, train=train_settings(self.settings.train, client, name, chosen))

    def message(self, content: RecordDict, client: int, kind: str) -> Message:
        """Return a message to a client in this round; it expires soon after ``round-timeout``."""
        lifetime = min(self.settings.run.timeout, MAX_LIFE_SECONDS) + CLOCK_SECONDS
        node, group = self.strategy.clients[client].node_id, str(self.strategy.record.number)
        return Message(content, node, kind, ttl=lifetime, group_id=group)

    def served(self, client: int) -> Arrays:
        """Return the served arrays, and the completed ``sent_once`` arrays that the client does not store yet."""
        return self._named(client) | arrays_once(self.strategy, self._stored_by(client))

    def _named(self, client: int) -> Arrays:
        """Return the served arrays in their declared order; raise :class:`TypeError` if their names differ."""
        served, sent = self.strategy.serve(client), self.strategy.method.sent
        check_names("serve returns", served, sent, f"{type(self.strategy.method).__name__}.sent")
        return {name: served[name] for name in sent}

    def common(self) -> Arrays:
        """Return the arrays that all clients of a round receive; secure aggregation binds the masks to them."""
        return self._named(self.strategy.members[0]) | arrays_once(self.strategy)

    def note_finished(self, server_round: int) -> None:
        """Record ``server_round`` as the round that completed each new array of ``sent_once``."""
        if name := self.strategy.method.sent_once:
            finished, rounds = getattr(self.strategy, name), self.strategy.finished_in
            rounds += [server_round] * (len(finished) - len(rounds))

    def _stored_by(self, client: int) -> int:
        """Return how many arrays of ``sent_once`` a client's state contains, according to the state's version."""
        if not (version := self.states.versions.get(client, "")):
            return 0
        number, evaluation = (int(word) for word in version.split("-")[1:])
        return sum((number, evaluation) >= (finished, 1) for finished in self.strategy.finished_in)

    def expected_shapes(self, client: int) -> dict[str, tuple[int, ...]]:
        """Return the expected shapes of the arrays in a client's update, keyed by name."""
        strategy, method = self.strategy, self.strategy.method
        sent = strategy.serve(client)
        names = strategy.returns(strategy.record.number, client)
        return {name: shape_of(method.returned[name], sent, self._dimensions, method) for name in names}

    def weight(self, client: int) -> int:
        """Return a client's weight in the server's means; with secure aggregation, the client itself applies it."""
        strategy = self.strategy
        uniform = strategy.train_config(strategy.record.number, client).get(UNIFORM_WEIGHTS, False)
        return 1 if uniform or self.settings.run.client_weights == UNIFORM else strategy.clients[client].num_train

    def query(self, grid: Grid, contents: Mapping[int, RecordDict], decoder: Decoder) -> dict[int, Any]:
        """Send queries to some clients, and return the accepted replies, keyed by client."""
        self.sent = [self.message(content, client, MessageType.QUERY) for client, content in contents.items()]
        replies = grid.send_and_receive(self.sent, timeout=self.settings.run.timeout)
        return dict(self.collect(replies, decoder, lambda client, answer: (client, answer), stateful=False))

    def collect(
        self,
        replies: Iterable[Message],
        decoder: Callable[[int], Callable[[RecordDict], T]],
        accept: Callable[[int, T], R],
        versions: dict[int, str] | None = None,
        *,
        stateful: bool = True,
    ) -> list[R]:
        """Return the results of ``accept``; drop and record errors and unusable replies.

        The function catches the decoder's exceptions, and :class:`BadReplyError` from ``accept``. Any other exception
        from a hook is a bug in the method and ends the run.

        Parameters
        ----------
        replies : iterable of Message
            Replies to the messages in ``sent``.
        decoder : callable
            Returns the function that decodes a client's reply. The decoding function may raise any exception in
            :data:`~posy.strategies.replies.UNREADABLE`.
        accept : callable
            Checks and records a client's decoded reply. It raises :class:`BadReplyError` for unusable values.
        versions : dict, optional
            Mapping that stores the version of each client's state; by default ``states.versions``.
        stateful : bool
            Whether replies contain the version of the client's state.

        Raises
        ------
        MethodError
            In a simulation, if the method's code has raised an exception on a client.
        """
        versions = self.states.versions if versions is None else versions
        accepted, dropped = [], []
        # If a node is lost, the SuperLink replies with an error, and only the message's id identifies the client.
        # A message that was not sent before the timeout has no id.
        unsent = [client_of(m) for m in self.sent if not m.metadata.message_id]
        waiting = {m.metadata.message_id: m for m in self.sent if m.metadata.message_id}
        for reply in replies:
            message = waiting.pop(reply.metadata.reply_to_message_id, None)
            client = -1 if message is None else client_of(message)
            try:
                version, content = _decoded(message, reply, client, decoder, stateful=stateful)
                accepted.append(accept(client, content))
                if version is not None:
                    versions[client] = version
            except BadReplyError as error:
                if isinstance(error, LostStateError):
                    self.states.versions.pop(client, None)
                    self._lost.append(client)
                dropped.append((client, one_line(str(error), MAX_REASON)))
        timeout = self.settings.run.timeout
        no_reply = "no reply" + (f" within round-timeout = {timeout:g} s" if timeout < math.inf else "")
        dropped += [(client, no_reply) for client in (*map(client_of, waiting.values()), *unsent)]
        self.drop(dropped)
        return accepted

    def report_lost(self) -> None:
        """Notify the strategy of the clients that have lost their states in this phase."""
        clients, self._lost = sorted(set(self._lost)), []
        if clients:
            self.strategy.lost(clients)

    def drop(self, dropped: list[tuple[int, str]]) -> None:
        """Record and log the clients dropped from the round, with the reasons."""
        record = self.strategy.record
        self._log_dropped(set(dropped) - set(record.dropped))  # an earlier phase may have logged the same reason
        record.dropped += dropped

    def _log_dropped(self, dropped: set[tuple[int, str]]) -> None:
        """Log the clients dropped from the round, with one line per reason."""
        reasons: dict[str, list[int]] = defaultdict(list)
        for client, reason in sorted(dropped):
            reasons[reason].append(client)
        strategy, number = self.strategy, self.strategy.record.number
        names = {client: info.name for client, info in strategy.clients.items() if info.name}
        for reason, clients in list(reasons.items())[:MAX_REASONS]:
            senders = [client for client in clients if client >= 0]
            subject = f"{describe_clients(senders, names, strategy.num_clients)} dropped" if senders else "dropped"
            log(WARNING, "round %s: %s: %s", number, subject, reason)
        if (more := len(reasons) - MAX_REASONS) > 0:
            log(WARNING, "round %s: dropped replies for %s further reasons", number, more)

    def count_bytes(self, client: int, up: int = 0, down: int = 0) -> None:
        """Add transferred bytes to the records of the round and of a client."""
        record, row = self.strategy.record, self.strategy.record.row(client)
        record.bytes_up += up
        record.bytes_down += down
        row["bytes_up"] += up
        row["bytes_down"] += down

    def lap(self, phase: str) -> None:
        """Add the seconds since the previous lap to the recorded time of a phase."""
        clock = time.perf_counter()
        seconds = self.strategy.record.seconds
        seconds[phase] = seconds.get(phase, 0.0) + clock - self._clock
        self._clock = clock


def _decoded(
    message: Message | None,
    reply: Message,
    client: int,
    decoder: Callable[[int], Callable[[RecordDict], T]],
    *,
    stateful: bool,
) -> tuple[str | None, T]:
    """Return the version of a client's state and its decoded reply; raise :class:`BadReplyError` for an error reply."""
    if message is None:
        raise BadReplyError("a reply that matches no message of this phase, or a duplicate reply")
    if reply.has_error():
        raise_mistake(client, reply.error)
        raise BadReplyError(failure(reply.error))
    return decoded_reply(message, reply, decoder(client), stateful=stateful)
