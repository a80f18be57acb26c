"""The Flower strategy that all methods share: FedAvg, with hooks for what a method does otherwise.

A method's strategy holds the server's state as arrays, says what a client is sent (``serve``) and how replies change
the state (``aggregate``). Cohorts, messages, checks of the replies, failures and the record of a round are here, once.
"""

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from logging import INFO, WARNING
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.common.logger import log
from flwr.common.typing import NDArrays
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from posy.extensions import word_of
from posy.flower import CLOCK_SECONDS, MAX_REASON, Array, content_of, failure, record_in, record_of, with_entries
from posy.models.architecture import Architecture
from posy.models.parameters import FloatArray, Layout, Part
from posy.randomness import model_seed, numpy_generator
from posy.settings import SettingsError
from posy.sharing import Once
from posy.strategies.replies import (
    UNREADABLE,
    BadReplyError,
    ClientInfo,
    RoundRecord,
    Update,
    changes,
    check_count,
    client_of,
    mean_of,
    norm_of,
    read_update,
    samples_of,
    scores_of,
)
from posy.strategies.secure_aggregation import Answer, SecureRound, check_masked, masked_shape
from posy.strategies.settings import Settings
from posy.strategies.states import ClientStates, LostStateError, version_after
from posy.words import are, one_line

SAVE_SECONDS = 120.0
"""Seconds between two rounds that store the models, so that a run that is stopped leaves some that are not too old."""
MAX_LIFE_SECONDS = 7 * 86_400.0
"""Longest life of a message."""
MAX_REASONS = 10
"""The number of reasons for dropped replies that the log of a phase names."""


class PersonalisedStrategy(Strategy):
    """Base of all strategies, made from the settings and the plain network of the run."""

    state: ClassVar[tuple[str, ...]] = ("model",)
    """The attributes, arrays all of them, that hold the server's state: all that later rounds and the pictures need.

    Their shapes stay as :meth:`initialise` makes them, but one without any row may grow rows.
    """

    def __init__(self, settings: Settings, plain: Architecture) -> None:
        self.settings = settings
        self.method: Any = settings.method
        self.num_clients = settings.data.num_clients
        self.architecture: Architecture = self.method.network(plain, self.num_clients)
        self.shared = self.architecture.divided(self.method.personal(self.architecture))[0]
        """The part of the network's parameters that is no client's own."""
        if not self.shared.size:
            method = word_of(settings.run.method)
            lower = f", or lower {method}-layers = {self.method.layers}" if hasattr(self.method, "layers") else ""
            raise SettingsError(
                f"model = {plain.model!r}: {method} keeps all its layers on the clients, so nothing is left to share; "
                f"choose a network with more layers{lower}"
            )
        self.clients: dict[int, ClientInfo] = {}
        """The clients that can be reached, by index."""
        self.client_names: Mapping[int, str] = {}
        """Names of clients that the data gives, as a natural partition does; other clients have their node's name."""
        self.refresh: Callable[[], list[int]] | None = None
        """Brings :attr:`clients` up to date before a round."""
        self.newcomers = self._held_out()
        """The clients that are set aside until the end."""
        self.members = sorted(set(range(self.num_clients)) - set(self.newcomers))
        """The clients that take part in the rounds."""
        self.newcomer_rows: dict[int, dict[str, Any]] = {}
        """What these have scored, by client."""
        self.record = RoundRecord(0)
        self.models_folder: Path | None = None
        self.resumed_after = 0
        """Rounds that were finished before this process took up the run."""
        self.states = ClientStates()
        self.secure: SecureRound | None = None
        """What the server and the clients of this round have agreed on, where it aggregates securely."""
        self.saving = False
        """Whether the models of this round are stored: the last round's, and now and then before."""
        self.class_counts: npt.NDArray[np.int64] | None = None
        """Training samples by client and class, for the pictures, where the server knows the partition."""
        self._saved = -math.inf
        self._settings_json = settings.to_json()
        self._sent: list[Message] = []
        self._clock = time.perf_counter()
        self.initialise()

    # -- what a method contributes: by default FedAvg over the shared layers --------------------------

    def initialise(self) -> None:
        """Set up the server's state."""
        self.model: FloatArray = np.ascontiguousarray(self.shared.take(self.initial()))

    def serve(self, client: int) -> NDArrays:
        """Return the arrays that a client is sent; an array that is sent is never written to again."""
        return [self.model]

    def expected_shapes(self, client: int) -> list[tuple[int, ...]]:
        """Return the shapes of the arrays that a client sends after training; by default those that it is sent."""
        return [array.shape for array in self.serve(client)]

    def check(self, arrays: NDArrays) -> None:
        """Raise :class:`BadReplyError` for arrays of the right shapes that mean nothing to the method."""

    def check_metrics(self, metrics: Mapping[str, Any]) -> None:
        """Raise :class:`BadReplyError` for metrics that the method cannot use, after training or evaluation."""

    def reference(self, client: int, arrays: NDArrays) -> NDArrays:
        """Return what a client's reply is a change of, for ``max-update-norm``; by default as both sides know it."""
        return self.method.reference(self.architecture, self.serve(client), arrays)

    def aggregate(self, server_round: int, updates: list[Update]) -> dict[str, Any]:
        """Change the server's state; return the method's own quantities for the record.

        ``updates`` is never empty, and in the order of the clients: sums do not depend on which reply came first.
        """
        self.model = mean_of(updates)
        return {}

    def weight(self, client: int) -> int:
        """Return the weight of a client in the server's means; with secure aggregation the client applies it."""
        return 1 if self.settings.run.client_weights == "uniform" else self.clients[client].num_train

    def cohort(self, server_round: int) -> list[int]:
        """Return the clients that train in a round, drawn from (seed, round) alone."""
        if self.settings.run.fraction_train >= 1 or self.takes_all(server_round):
            return list(self.members)
        size = max(1, math.ceil(self.settings.run.fraction_train * len(self.members) - 1e-9))
        generator = numpy_generator(self.settings.run.seed, "cohort", server_round)
        return sorted(generator.choice(self.members, size, replace=False).tolist())

    def takes_all(self, server_round: int) -> bool:
        """Tell whether all clients train in a round, whatever ``fraction-train`` is."""
        run = self.settings.run
        return run.full_last_round and server_round == run.num_server_rounds

    def train_config(self, server_round: int, client: int) -> dict[str, Any]:
        """Return what a client is told besides the arrays."""
        return {}

    def acknowledged(self, client: int, metrics: Mapping[str, Any]) -> None:
        """Update the server's notes on a client after an accepted reply to training or evaluation."""

    def lost(self, client: int) -> None:
        """Take note that a client has lost its own state and begins anew."""

    def server_state(self) -> dict[str, npt.NDArray[np.generic]]:
        """Return the server's state by name."""
        return {name: getattr(self, name) for name in self.state}

    def load_server_state(self, arrays: Mapping[str, npt.NDArray[np.generic]]) -> None:
        """Take up a state that :meth:`server_state` of another strategy with these settings returned.

        Raises
        ------
        KeyError, ValueError
            If an array is missing, or of another type or shape than this strategy's; then nothing is taken up.
        """
        for name in self.state:
            array, fresh = arrays[name], getattr(self, name)
            rows = int(fresh.shape[:1] == (0,))  # an array without rows may have grown some
            if array.dtype != fresh.dtype or array.ndim != fresh.ndim or array.shape[rows:] != fresh.shape[rows:]:
                raise ValueError(f"{name}: {array.dtype} {array.shape} instead of {fresh.dtype} {fresh.shape}")
        for name in self.state:
            setattr(self, name, np.require(arrays[name], requirements=("C", "W")))

    def draw(self, folder: Path) -> None:
        """Draw the method's own pictures into a folder."""

    def extra_summary(self) -> dict[str, Any]:
        """Return the method's own results for the summary."""
        return {}

    # -- Flower's Strategy -----------------------------------------------------------------------------

    def summary(self) -> None:
        """Log the configuration of the strategy."""
        run, train = self.settings.run, self.settings.train
        log(INFO, "\t├──> Network: %s, %s parameters", self.architecture.model, f"{self.architecture.layout.size:,}")
        log(INFO, "\t├──> Clients: %s, of which %.0f %% train in a round", self.num_clients, 100 * run.fraction_train)
        length = f"{train.local_steps} steps" if train.local_steps else f"{train.local_epochs} epoch(s)"
        log(INFO, "\t├──> Local training: %s, batch %s, lr %g", length, train.batch_size, train.lr)
        log(INFO, "\t└──> Method: %s", self.method)

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> Result:
        """Carry out the rounds from the one after ``resumed_after`` to ``num_rounds``.

        The phases and arguments are those of Flower's own loop, which however always begins with round 1.
        """
        log(INFO, "Starting %s: rounds %s to %s", word_of(self.settings.run.method), self.resumed_after + 1, num_rounds)
        self.summary()
        for notice in self.method.notices(self.settings, self.architecture):
            log(WARNING, "%s: %s", word_of(self.settings.run.method), notice)
        train_config, evaluate_config = train_config or ConfigRecord(), evaluate_config or ConfigRecord()
        result, arrays = Result(), initial_arrays
        if evaluate_fn and not self.resumed_after and (central := evaluate_fn(0, arrays)) is not None:
            result.evaluate_metrics_serverapp[0] = central
        for server_round in range(self.resumed_after + 1, num_rounds + 1):
            log(INFO, "")
            log(INFO, "[ROUND %s/%s]", server_round, num_rounds)
            messages = self.configure_train(server_round, arrays, train_config, grid)
            _, metrics = self.aggregate_train(server_round, grid.send_and_receive(messages, timeout=timeout))
            messages = self.configure_evaluate(server_round, arrays, evaluate_config, grid)
            scores = self.aggregate_evaluate(server_round, grid.send_and_receive(messages, timeout=timeout))
            central = evaluate_fn(server_round, arrays) if evaluate_fn else None
            for history, values in (
                (result.train_metrics_clientapp, metrics),
                (result.evaluate_metrics_clientapp, scores),
                (result.evaluate_metrics_serverapp, central),
            ):
                if values is not None:
                    history[server_round] = values
        if self.newcomers:
            self._try_newcomers(num_rounds, train_config, evaluate_config, grid, timeout)
        return result

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Make one message for each client of the round's cohort."""
        self._begin_round(server_round, grid)
        clients = [c for c in self.cohort(server_round) if c in self.clients]
        self.record.cohort = tuple(clients)
        log(INFO, "configure_train: Sampled %s clients (out of %s)", len(clients), len(self.clients))
        flags: dict[int, dict[str, Any]] = {c: {"evaluate-local": self.evaluates(server_round)} for c in clients}
        if self.settings.run.secure_aggregation:
            self.secure = self._secure_round(server_round, clients, grid)
            flags = {client: flags[client] | own for client, own in self.secure.opened().items()}
            for client, own in flags.items():
                self._count_bytes(client, down=sum(map(len, own["shares"])))
        return self._messages(MessageType.TRAIN, server_round, config, flags)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Check the replies, change the server's state with the accepted ones, and record the round.

        A round without enough good replies leaves no trace: the server's state stays as it is, and the next message
        names the version that each client had before the round.
        """
        self._lap("train")
        versions: dict[int, str] = {}
        updates = self._collect(replies, self._read_update, versions)
        updates.sort(key=lambda update: update.client)
        accepted = updates
        why = self.secure.refusal if self.secure else ""
        if not why and len(updates) < (least := self.settings.run.min_train_replies):
            why = f"{len(updates)} good replies, min-train-replies is {least}"
        if not why and self.secure:
            updates, why = self._summed(self.secure, updates)
        if why:
            log(WARNING, "aggregate_train: %s: the round is refused, server and clients keep their states", why)
            for row in self.record.clients.values():  # these models are discarded
                for column in [name for name in row if name == "train_loss" or name.startswith("local_")]:
                    del row[column]
            return None, None
        self.states.versions |= versions
        for update in accepted:
            self.acknowledged(update.client, update.metrics)
        self.record.quantities = self.aggregate(server_round, updates)
        self._lap("aggregate")
        return None, MetricRecord({"train-loss": float(np.mean([float(update.loss) for update in updates]))})

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Send every client what it is served now, in the rounds that are evaluated."""
        self._sent = []
        if not self.evaluates(server_round):
            return []
        trained = {c for c, row in self.record.clients.items() if "train_loss" in row}
        present = [client for client in self.members if client in self.clients]
        flags = {client: {"evaluate-personal": client not in trained} for client in present}
        return self._messages(MessageType.EVALUATE, server_round, config, flags)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Record each client's scores."""
        results = self._collect(replies, self._read_evaluation)
        self.record.evaluated = sum(self.record.clients[client]["n_test"] > 0 for client in results)
        self.record.asked = len(self._sent) - len(results) + self.record.evaluated
        self._lap("evaluate")
        served = [row["served_accuracy"] for row in self.record.clients.values() if "served_accuracy" in row]
        return MetricRecord({"served-accuracy": float(np.mean(served))}) if results and served else None

    # -- clients that never trained ----------------------------------------------------------------------

    def _held_out(self) -> tuple[int, ...]:
        """Return the clients that are set aside, drawn from the seed alone."""
        run = self.settings.run
        if not run.holdout_clients:
            return ()
        count = min(max(1, round(run.holdout_clients * self.num_clients)), self.num_clients - 1)
        if not count:
            raise SettingsError(f"holdout-clients = {run.holdout_clients:g}: a single client cannot be set aside")
        drawn = numpy_generator(run.seed, "holdout").choice(self.num_clients, count, replace=False)
        return tuple(sorted(drawn.tolist()))

    def _try_newcomers(
        self, server_round: int, train_config: ConfigRecord, evaluate_config: ConfigRecord, grid: Grid, timeout: float
    ) -> None:
        """Serve each client that has never trained, and let it train once; the server learns nothing of it."""
        last = self.record
        self._begin_round(server_round, grid)
        present = [client for client in self.newcomers if client in self.clients]

        def read(client: int, content: RecordDict) -> None:
            metrics: Mapping[str, Any] = record_in(content, "metrics", MetricRecord)
            row = self.newcomer_rows.setdefault(client, {"n_train": self.clients[client].num_train})
            row |= scores_of(metrics)
            self.check_metrics(metrics)
            self.acknowledged(client, metrics)

        for kind, config, flag in (
            (MessageType.EVALUATE, evaluate_config, "evaluate-personal"),
            (MessageType.TRAIN, train_config, "evaluate-local"),
        ):
            messages = self._messages(kind, server_round, config, {client: {flag: True} for client in present})
            self._collect(grid.send_and_receive(messages, timeout=timeout), read)
        self.record = last

    # -- helpers for methods ---------------------------------------------------------------------------

    def learning_rate(self, server_round: int) -> float:
        """Return the learning rate of a round, from 1 on; the cosine schedule goes from ``lr`` towards 0."""
        train, done = self.settings.train, server_round - 1
        if train.lr_schedule == "cosine":
            return train.lr * 0.5 * (1 + math.cos(math.pi * done / self.settings.run.num_server_rounds))
        steps = {"constant": 0, "exponential": done, "step": done // train.lr_step}[train.lr_schedule]
        return train.lr * float(train.lr_decay**steps)

    def evaluates(self, server_round: int) -> bool:
        """Tell whether a round is evaluated."""
        run = self.settings.run
        return server_round % run.evaluate_every == 0 or server_round == run.num_server_rounds

    def in_average(self, server_round: int) -> bool:
        """Tell whether a round is one of the last ones over which results are averaged."""
        run = self.settings.run
        return server_round > run.num_server_rounds - run.average_rounds

    @property
    def size(self) -> int:
        """Number of parameters d."""
        return self.architecture.layout.size

    def initial(self, number: int = 0) -> FloatArray:
        """Return freshly initialised parameters ``(d,)`` of one of several models."""
        return self.architecture.initial(model_seed(self.settings.run.seed, number))

    # -- messages --------------------------------------------------------------------------------------

    def _begin_round(self, server_round: int, grid: Grid) -> None:
        if self.refresh:
            self.refresh()
        away = tuple(client for client in range(self.num_clients) if client not in self.clients)
        self.record = RoundRecord(server_round, away=away)
        self._clock = time.perf_counter()
        last = server_round == self.settings.run.num_server_rounds
        # System accuracy is that of stored models.
        due = last or self.in_average(server_round) or self._clock - self._saved > SAVE_SECONDS
        self.saving = self.models_folder is not None and self.evaluates(server_round) and due
        if self.saving:
            self._saved = self._clock

    def _messages(
        self, kind: str, server_round: int, config: ConfigRecord, flags: Mapping[int, Mapping[str, Any]]
    ) -> list[Message]:
        """Make a message for each client in ``flags``, with what a phase tells that client."""
        common = ConfigRecord({**config, "settings": self._settings_json, "server-round": server_round})
        common["lr"] = self.learning_rate(server_round)
        if self.saving:
            common["save-models-to"] = str(self.models_folder)
        pack = Once(Array)  # an array that several clients are sent is serialised once
        self._sent = []
        for client, own in flags.items():
            served, info, row = self.serve(client), self.clients[client], self.record.row(client)
            arrays = record_of({str(i): pack(array) for i, array in enumerate(served)})
            state, more = self.states.config(kind, server_round, client), self.train_config(server_round, client)
            told = {"client": client, **state, **own, **more}
            size = sum(array.nbytes for array in served)
            self.record.bytes_down += size
            row["bytes_down"] += size
            if name := self.client_names.get(client, info.name):
                row["site"] = name
                if self.saving:
                    told["site"] = name
            content = content_of(arrays=arrays, config=with_entries(common, told))
            self._sent.append(self._message(content, client, kind))
        return self._sent

    def _message(self, content: RecordDict, client: int, kind: str) -> Message:
        """Return a message of this round for a client; a node that hangs need not answer it after the timeout."""
        lives = min(self.settings.run.timeout, MAX_LIFE_SECONDS) + CLOCK_SECONDS
        return Message(content, self.clients[client].node_id, kind, ttl=lives, group_id=str(self.record.number))

    def _collect(
        self, replies: Iterable[Message], read: Any, versions: dict[int, str] | None = None, *, stateful: bool = True
    ) -> list[Any]:
        """Read the replies; drop and record errors and replies that must not be used.

        ``stateful`` says whether a reply names the version of the client's state. The versions are written to
        ``versions``, by default to the strategy's states.
        """
        versions = self.states.versions if versions is None else versions
        good, dropped = [], []
        # A lost node's error comes from the SuperLink: only the message it answers tells whose it is.
        # A message that was never sent, for lack of time, has no id.
        unsent = [client_of(m) for m in self._sent if not m.metadata.message_id]
        waiting = {m.metadata.message_id: m for m in self._sent if m.metadata.message_id}
        for reply in replies:
            asked = waiting.pop(reply.metadata.reply_to_message_id, None)
            client = -1 if asked is None else client_of(asked)
            try:
                if asked is None:
                    raise BadReplyError("a reply to no message of this phase, or a second one")
                if reply.has_error():
                    raise BadReplyError(failure(reply.error))
                version = version_after(asked, reply) if stateful else None
                good.append(read(client, reply.content))
                if version is not None:
                    versions[client] = version
            except UNREADABLE as error:
                if isinstance(error, LostStateError):
                    self.states.versions.pop(client, None)
                    self.lost(client)
                reason = str(error) if isinstance(error, BadReplyError) else f"malformed reply: {error!r}"
                dropped.append((client, one_line(reason, MAX_REASON)))
        timeout = self.settings.run.timeout
        late = "no reply" + (f" within round-timeout = {timeout:g} s" if timeout < math.inf else "")
        dropped += [(client, late) for client in (*map(client_of, waiting.values()), *unsent)]
        self._tell_dropped(set(dropped) - set(self.record.dropped))  # not again what the training has told already
        self.record.dropped += dropped
        return good

    def _tell_dropped(self, dropped: set[tuple[int, str]]) -> None:
        """Say who is left out of the round and why, those with the same reason together."""
        reasons: dict[str, list[int]] = defaultdict(list)
        for client, reason in sorted(dropped):
            reasons[reason].append(client)
        names = {client: info.name for client, info in self.clients.items() if info.name}
        for reason, clients in list(reasons.items())[:MAX_REASONS]:
            known = [client for client in clients if client >= 0]
            who = f"{are(known, names, self.num_clients)} left out" if known else "dropped"
            log(WARNING, "round %s: %s: %s", self.record.number, who, reason)
        if (more := len(reasons) - MAX_REASONS) > 0:
            log(WARNING, "round %s: replies are dropped for %s other reasons", self.record.number, more)

    def _read_update(self, client: int, content: RecordDict) -> Update:
        shapes = self.expected_shapes(client)
        update = read_update(content, [masked_shape(shapes)] if self.secure else shapes)
        update.client, update.weight = client, self.weight(client)
        if self.secure:
            check_masked(update, self.clients[client].num_train)
        else:
            self.check(update.arrays)
        if limit := self.settings.run.max_update_norm:  # beyond it an update is not clipped, which would hide it
            moved = changes(update.arrays, self.reference(client, update.arrays))
            if not (norm := norm_of([self._parameters_of(array) for array in moved])) <= limit:
                log(WARNING, "round %s, client %s: an update of norm %.6g", self.record.number, client, norm)
                raise BadReplyError(f"an update beyond max-update-norm = {limit:g}")
        scores, samples = scores_of(update.metrics), samples_of(update.metrics)
        self.check_metrics(update.metrics)
        # From here on the reply is good: one that is dropped leaves nothing in the client's row.
        size = sum(array.nbytes for array in update.arrays)
        self.record.bytes_up += size
        row = self.record.row(client)
        row["bytes_up"] += size
        tested = int(update.metrics["num-test"])
        row |= {"n_train": update.num_examples, "n_test": tested, "train_loss": update.loss, **scores}
        self.record.samples += samples
        return update

    def exchanged(self) -> tuple[Layout, Part]:
        """Return the layout of the network that clients train now, and the part of it that they send."""
        return self.architecture.layout, self.shared

    def _parameters_of(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return a model, or its shared part, without BatchNorm's running statistics; another array as it is."""
        layout, shared = self.exchanged()
        parameters = layout.trainable
        is_parameter = parameters.put(np.zeros(layout.size, np.bool_), np.ones(parameters.size, np.bool_))
        for mask in (is_parameter, shared.take(is_parameter)):
            if array.shape[-1:] == mask.shape:
                return array if mask.all() else array[..., mask]
        return array

    # -- secure aggregation ----------------------------------------------------------------------------

    def _secure_round(self, server_round: int, clients: list[int], grid: Grid) -> SecureRound:
        """Return what leads some clients through the stages of a round."""
        name = f"{self.states.attempt}-{server_round}"

        def ask(
            stage: str, told: Mapping[int, Mapping[str, Any]], check: Callable[[int, Answer], None]
        ) -> dict[int, Answer]:
            def read(client: int, content: RecordDict) -> tuple[int, Answer]:
                answer: Any = record_in(content, "config", ConfigRecord)["answer"]
                check(client, answer)
                self._count_bytes(client, up=sum(map(len, answer)))
                return client, answer

            self._sent = []
            for client, own in told.items():
                config = ConfigRecord({"client": client, "secure-round": name, "secure-stage": stage, **own})
                self._count_bytes(client, down=config.count_bytes())
                self._sent.append(self._message(RecordDict({"config": config}), client, MessageType.QUERY))
            replies = grid.send_and_receive(self._sent, timeout=self.settings.run.timeout)
            return dict(self._collect(replies, read, stateful=False))

        def drop(client: int, reason: str) -> None:
            dropped = client, one_line(reason, MAX_REASON)
            self._tell_dropped({dropped} - set(self.record.dropped))
            self.record.dropped.append(dropped)

        weights = {client: self.weight(client) for client in clients}
        return SecureRound(name, self.settings.run, weights, ask, drop)

    def _summed(self, secure: SecureRound, updates: list[Update]) -> tuple[list[Update], str]:
        """Return the mean of masked updates as that of one client, or why there is none."""
        client = updates[0].client  # all are served the same
        shapes = self.expected_shapes(client)
        unknown = [np.broadcast_to(np.float32(0), shape) for shape in shapes]
        sent = self.serve(client)
        references = self.method.reference(self.architecture, sent, unknown)[: len(shapes)]
        references += sent[len(references) : len(shapes)]  # statistics are changes of the statistics that were sent
        rate = self.learning_rate(self.record.number)
        mean = secure.summed(updates, self._settings_json, rate, references)
        return ([], secure.refusal) if mean is None else ([mean], "")

    def _count_bytes(self, client: int, up: int = 0, down: int = 0) -> None:
        row = self.record.row(client)
        self.record.bytes_up += up
        self.record.bytes_down += down
        row["bytes_up"] += up
        row["bytes_down"] += down

    def _read_evaluation(self, client: int, content: RecordDict) -> int:
        metrics: Mapping[str, Any] = record_in(content, "metrics", MetricRecord)
        count, tested = metrics["num-train"], metrics["num-examples"]
        check_count("num-train", count, 1)
        check_count("num-examples", tested, 0)
        scores, samples = scores_of(metrics), samples_of(metrics)
        chosen = record_in(content, "config", ConfigRecord).get("chosen", "")
        self.check_metrics(metrics)
        self.acknowledged(client, metrics)
        row = self.record.row(client)
        row |= {"n_train": int(count), "n_test": int(tested)}
        self.record.samples += samples
        for column, value in scores.items():
            row.setdefault(column, value)  # those of its training round stand before those of an evaluation
        if chosen:
            row["chosen"] = str(chosen)
        return client

    def _lap(self, phase: str) -> None:
        now = time.perf_counter()
        self.record.seconds[phase] = self.record.seconds.get(phase, 0.0) + now - self._clock
        self._clock = now
