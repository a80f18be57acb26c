"""The part of a Flower strategy that all methods share.

A method's strategy holds the server's state as arrays, says what a client is sent
(:meth:`PersonalisedStrategy.serve`) and how replies change the state
(:meth:`PersonalisedStrategy.aggregate`). Cohorts, messages, checks of the replies, failures, evaluation
and the record of a round are here, once.
"""

import math
import time
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from logging import INFO, WARNING
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.common.logger import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from posy.flower import CLOCK_SECONDS, MAX_REASON, Array, failure, record_of_arrays
from posy.models.architecture import Architecture
from posy.models.parameters import FloatArray, Part
from posy.randomness import model_seed, numpy_generator
from posy.settings import SettingsError
from posy.strategies.replies import (
    UNREADABLE,
    Arrays,
    BadReplyError,
    ClientInfo,
    RoundRecord,
    Update,
    _check_size,
    _client_of,
    _scores_of,
    check_count,
    num_examples,
    stacked,
    weighted_mean,
)
from posy.strategies.settings import Settings
from posy.words import are, one_line

SAVE_SECONDS = 120.0
"""Models are stored at most so often, so that a run that is stopped leaves some that are not too old."""
MAX_REASONS = 10
"""So many reasons for which replies of a phase were dropped are told."""


class PersonalisedStrategy(Strategy):
    """Base of all strategies.

    Parameters
    ----------
    settings : Settings
        All settings of the run.
    plain : Architecture
        The plain network of the run; see :meth:`network_for`.
    """

    follows_number_of_rounds = False
    """Whether the method's schedule depends on ``num-server-rounds``, which then cannot change half-way."""

    def __init__(self, settings: Settings, plain: Architecture) -> None:
        self.settings = settings
        self.method: Any = settings.method
        self.architecture = self.network_for(plain)
        self.num_clients = settings.data.num_clients
        self.members: dict[int, ClientInfo] = {}
        self.refresh: Callable[[], list[int]] | None = None
        """Brings :attr:`members` up to date before a round; returns the clients whose own state may be lost."""
        self.record = RoundRecord(0)
        self.models_folder: Path | None = None
        self.resumed_after = 0
        """Rounds that were finished before this process took up the run."""
        self.state_config: dict[str, Any] = {}
        """What every message tells of the clients' states: where they are kept, and which of them counts."""
        self.saving = False
        """Whether the models of this round are stored: the last round's, and now and then before."""
        self._saved = -math.inf
        self._packed: list[tuple[Any, Array]] = []
        self.class_counts: npt.NDArray[np.int64] | None = None
        """Training samples by client and class, for the pictures, where the server knows the partition."""
        self._settings_json = settings.to_json()
        self._sent: list[Message] = []
        self._clock = time.perf_counter()
        self.initialise()

    # -- what a method contributes -----------------------------------------------------------------

    def network_for(self, plain: Architecture) -> Architecture:
        """Return the network that the method trains; by default the plain one."""
        return plain

    @abstractmethod
    def initialise(self) -> None:
        """Set up the server's state."""

    @abstractmethod
    def serve(self, client: int) -> Arrays:
        """Return the arrays that a client is sent."""

    @abstractmethod
    def expected_shapes(self, client: int) -> list[tuple[int, ...]]:
        """Return the shapes of the arrays that a client sends after training."""

    @abstractmethod
    def aggregate(self, server_round: int, updates: list[Update]) -> dict[str, Any]:
        """Change the server's state; return the method's own quantities for the record.

        ``updates`` is never empty and comes in the order of the clients' indices, so that sums do not
        depend on which reply came first.
        """

    @abstractmethod
    def server_state(self) -> dict[str, npt.NDArray[np.generic]]:
        """Return the server's state by name: all that the next rounds and the pictures need."""

    @abstractmethod
    def load_server_state(self, arrays: Mapping[str, npt.NDArray[np.generic]]) -> None:
        """Take up a state that :meth:`server_state` returned."""

    def cohort(self, server_round: int) -> list[int]:
        """Return the clients that train in a round, drawn from (seed, round) alone."""
        if self.settings.run.fraction_train >= 1:
            return list(range(self.num_clients))
        size = max(1, math.ceil(self.settings.run.fraction_train * self.num_clients - 1e-9))
        generator = numpy_generator(self.settings.run.seed, "cohort", server_round)
        return sorted(generator.choice(self.num_clients, size, replace=False).tolist())

    def train_config(self, server_round: int, client: int) -> dict[str, Any]:
        """Return what a method tells a client besides the arrays."""
        return {}

    def check(self, arrays: Arrays) -> None:
        """Raise :class:`BadReplyError` for arrays of the right shapes that mean nothing to the method."""

    def update_of(self, client: int, arrays: Arrays) -> FloatArray | None:
        """Return the update Δ in a checked reply, whose norm ``max-update-norm`` limits; None where there is none.

        By default its first array less the first that the client was sent.
        """
        if not arrays:
            return None
        return np.asarray(arrays[0], np.float32) - np.asarray(self.serve(client)[0], np.float32)

    def acknowledged(self, client: int, metrics: Mapping[str, Any]) -> None:
        """Take note of a good reply, after training or evaluation."""

    def lost(self, client: int) -> None:
        """Take note of a reply that failed or did not come."""

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
        log(
            INFO,
            "\t├──> Local training: %s, batch %s, lr %g",
            f"{train.local_steps} steps" if train.local_steps else f"{train.local_epochs} epoch(s)",
            train.batch_size,
            train.lr,
        )
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
        log(INFO, "Starting %s strategy: rounds %s to %s", type(self).__name__, self.resumed_after + 1, num_rounds)
        self.summary()
        train_config, evaluate_config = train_config or ConfigRecord(), evaluate_config or ConfigRecord()
        result, arrays = Result(), initial_arrays
        if evaluate_fn and not self.resumed_after and (central := evaluate_fn(0, arrays)) is not None:
            result.evaluate_metrics_serverapp[0] = central
        for server_round in range(self.resumed_after + 1, num_rounds + 1):
            log(INFO, "")
            log(INFO, "[ROUND %s/%s]", server_round, num_rounds)
            messages = self.configure_train(server_round, arrays, train_config, grid)
            new, metrics = self.aggregate_train(server_round, grid.send_and_receive(messages, timeout=timeout))
            if new is not None:
                result.arrays = arrays = new
            if metrics is not None:
                log(INFO, "\t└──> Aggregated MetricRecord: %s", metrics)
                result.train_metrics_clientapp[server_round] = metrics
            messages = self.configure_evaluate(server_round, arrays, evaluate_config, grid)
            scores = self.aggregate_evaluate(server_round, grid.send_and_receive(messages, timeout=timeout))
            if scores is not None:
                log(INFO, "\t└──> Aggregated MetricRecord: %s", scores)
                result.evaluate_metrics_clientapp[server_round] = scores
            central = evaluate_fn(server_round, arrays) if evaluate_fn else None
            if central is not None:
                result.evaluate_metrics_serverapp[server_round] = central
        return result

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Make one message for each client of the round's cohort."""
        self._begin_round(server_round, grid)
        clients = [c for c in self.cohort(server_round) if c in self.members]
        self.record.cohort = tuple(clients)
        log(INFO, "configure_train: Sampled %s clients (out of %s)", len(clients), len(self.members))
        messages = []
        self._packed = []
        for client in clients:
            extra = {
                "lr": self.learning_rate(server_round),
                "evaluate-local": self.evaluates(server_round),
                **self._where_to_save(),
                **self.train_config(server_round, client),
            }
            messages.append(self._message(MessageType.TRAIN, server_round, client, config, extra))
        self._sent = messages
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Check the replies, change the server's state with the good ones, and record the round."""
        self._lap("train")
        updates = self._collect(replies, self._read_update)
        if len(updates) < self.settings.run.min_train_replies:
            log(
                WARNING,
                "aggregate_train: %s good replies, min-train-replies is %s: the state stays as it is",
                len(updates),
                self.settings.run.min_train_replies,
            )
            return None, None
        updates.sort(key=lambda update: update.client)
        self.record.quantities = self.aggregate(server_round, updates)
        self._lap("aggregate")
        return None, MetricRecord({"train-loss": float(np.mean([update.loss for update in updates]))})

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Send every client what it is served now, in the rounds that are evaluated."""
        self._sent = []
        if not self.evaluates(server_round):
            return []
        trained = {c for c, row in self.record.clients.items() if "train_loss" in row}
        messages = []
        self._packed = []
        for client in sorted(self.members):
            extra = {
                "lr": self.learning_rate(server_round),
                "evaluate-personal": client not in trained,
                **self._where_to_save(),
                **self.train_config(server_round, client),
            }
            messages.append(self._message(MessageType.EVALUATE, server_round, client, config, extra))
        self._sent = messages
        return messages

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Record each client's scores."""
        results = self._collect(replies, self._read_evaluation)
        self.record.evaluated = sum(self.record.clients[client]["n_test"] > 0 for client in results)
        self.record.asked = len(self._sent) - len(results) + self.record.evaluated
        self._lap("evaluate")
        served = [row["served_accuracy"] for row in self.record.clients.values() if "served_accuracy" in row]
        return MetricRecord({"served-accuracy": float(np.mean(served))}) if results and served else None

    # -- helpers for methods ---------------------------------------------------------------------------

    def learning_rate(self, server_round: int) -> float:
        """Return the learning rate of a round: constant, or cosine from ``lr`` towards 0."""
        train = self.settings.train
        if train.lr_schedule == "constant":
            return train.lr
        done = (server_round - 1) / self.settings.run.num_server_rounds
        return train.lr * 0.5 * (1 + math.cos(math.pi * done))

    def evaluates(self, server_round: int) -> bool:
        """Tell whether a round is evaluated."""
        run = self.settings.run
        return server_round % run.evaluate_every == 0 or server_round == run.num_server_rounds

    @property
    def size(self) -> int:
        """Number of parameters d."""
        return self.architecture.layout.size

    def initial(self, number: int = 0) -> FloatArray:
        """Return freshly initialised parameters ``(d,)`` of one of several models."""
        return self.architecture.initial(model_seed(self.settings.run.seed, number))

    def shared_part(self, layers: Iterable[str]) -> Part:
        """Return the part of the flat vector that some layers take.

        Raises
        ------
        SettingsError
            If there are none: the network has nothing but personal layers.
        """
        part = self.architecture.layout.part(layers)
        if not part.size:
            raise SettingsError(
                f"model = {self.architecture.model!r}: {self.settings.run.method} keeps its only layer on the clients, "
                "so nothing is left to share; it must be a network with more layers"
            )
        return part

    # -- messages --------------------------------------------------------------------------------------

    def _begin_round(self, server_round: int, grid: Grid) -> None:
        for client in self.refresh() if self.refresh else ():
            self.lost(client)
        away = tuple(client for client in range(self.num_clients) if client not in self.members)
        self.record = RoundRecord(server_round, away=away)
        self._clock = time.perf_counter()
        last = server_round == self.settings.run.num_server_rounds
        due = last or self._clock - self._saved > SAVE_SECONDS
        self.saving = self.models_folder is not None and self.evaluates(server_round) and due
        if self.saving:
            self._saved = self._clock

    def _message(
        self, kind: str, server_round: int, client: int, config: ConfigRecord, extra: Mapping[str, Any]
    ) -> Message:
        served = self.serve(client)
        arrays = record_of_arrays({str(i): array for i, array in enumerate(self._pack(served))})
        told = ConfigRecord(
            {
                **config,
                "settings": self._settings_json,
                "server-round": server_round,
                "client": client,
                **self.state_config,
                **extra,
            }
        )
        size = sum(array.nbytes for array in served)
        self.record.bytes_down += size
        row, member = self.record.row(client), self.members[client]
        row["bytes_down"] += size
        if member.name:
            row["site"] = member.name
        content = RecordDict({"arrays": arrays, "config": told})
        node = member.node_id
        lives = self.settings.run.round_timeout + CLOCK_SECONDS  # then a node that hangs need not answer it any more
        return Message(content, dst_node_id=node, message_type=kind, ttl=lives, group_id=str(server_round))

    def _pack(self, arrays: Arrays) -> list[Array]:
        """Wrap arrays for Flower; what the client before was sent too is not serialised again."""
        known = {id(source): array for source, array in self._packed}
        self._packed = [(a, known.get(id(a)) or Array(a)) for a in arrays]
        return [array for _, array in self._packed]

    def _where_to_save(self) -> dict[str, str]:
        return {"save-models-to": str(self.models_folder)} if self.saving else {}

    def _collect(self, replies: Iterable[Message], read: Any) -> list[Any]:
        """Read the replies; drop and record those that are errors or must not be used."""
        good, dropped = [], []
        # A lost node's error comes from the SuperLink: only the message it answers tells whose it is.
        # A message that was never sent, for lack of time, has no id.
        unsent = [_client_of(m) for m in self._sent if not m.metadata.message_id]
        waiting = {m.metadata.message_id: _client_of(m) for m in self._sent if m.metadata.message_id}
        for reply in replies:
            client = waiting.pop(reply.metadata.reply_to_message_id, -1)
            try:
                if client < 0:
                    raise BadReplyError("a reply to no message of this phase, or a second one")
                if reply.has_error():
                    raise BadReplyError(failure(reply.error))
                good.append(read(client, reply.content))
            except UNREADABLE as error:
                reason = str(error) if isinstance(error, BadReplyError) else f"malformed reply: {error!r}"
                dropped.append((client, one_line(reason, MAX_REASON)))
        late = f"no reply within round-timeout = {self.settings.run.round_timeout:g} s"
        dropped += [(client, late) for client in (*waiting.values(), *unsent)]
        self._tell_dropped(set(dropped) - set(self.record.dropped))  # not again what the training has told already
        self.record.dropped += dropped
        for client, _ in dropped:
            if client >= 0:
                self.lost(client)
        return good

    def _tell_dropped(self, dropped: set[tuple[int, str]]) -> None:
        """Say who is left out of the round and why, those with the same reason together."""
        reasons: dict[str, list[int]] = defaultdict(list)
        for client, reason in sorted(dropped):
            reasons[reason].append(client)
        names = {client: member.name for client, member in self.members.items() if member.name}
        for reason, clients in list(reasons.items())[:MAX_REASONS]:
            known = [client for client in clients if client >= 0]
            who = f"{are(known, names, self.num_clients)} left out" if known else "dropped"
            log(WARNING, "round %s: %s: %s", self.record.number, who, reason)
        if (more := len(reasons) - MAX_REASONS) > 0:
            log(WARNING, "round %s: replies are dropped for %s other reasons", self.record.number, more)

    def _read_update(self, client: int, content: RecordDict) -> Update:
        record = content.array_records["arrays"]
        metrics: dict[str, Any] = dict(content.metric_records["metrics"])
        shapes = self.expected_shapes(client)
        _check_size(record, shapes)
        arrays = [array.numpy() for array in record.values()]
        count, loss = metrics.pop("num-examples"), metrics.pop("train-loss")
        tested = metrics.pop("num-test")
        check_count("num-examples", count, 1)
        check_count("num-test", tested, 0)
        if [a.shape for a in arrays] != shapes:
            raise BadReplyError(f"arrays of shapes {[a.shape for a in arrays]} instead of {shapes}")
        if any(a.dtype.kind not in "iuf" for a in arrays):
            raise BadReplyError(f"arrays of types {[str(a.dtype) for a in arrays]} instead of numbers")
        # As float32, in which the server reckons: a float64 may be finite and yet too large for it.
        with np.errstate(over="ignore"):
            finite = all(np.isfinite(np.asarray(a, np.float32)).all() for a in arrays)
        if not math.isfinite(loss) or not finite:
            raise BadReplyError("NaN or Inf in the reply")
        self.check(arrays)
        self._check_norm(client, arrays)
        scores = _scores_of(metrics)
        self.acknowledged(client, metrics)
        # From here on the reply is good: one that is dropped leaves nothing in the client's row.
        size = sum(array.nbytes for array in arrays)
        self.record.bytes_up += size
        row = self.record.row(client)
        row["bytes_up"] += size
        row |= {"n_train": int(count), "n_test": int(tested), "train_loss": loss, **scores}
        return Update(client, arrays, int(count), float(loss), metrics)

    def _check_norm(self, client: int, arrays: Arrays) -> None:
        """Refuse an update beyond ``max-update-norm``; it is not clipped, which would hide what happened."""
        limit = self.settings.run.max_update_norm
        update = self.update_of(client, arrays) if limit else None
        if update is not None and not (norm := float(np.linalg.norm(update.astype(np.float64)))) <= limit:
            log(WARNING, "round %s, client %s: an update of norm %.6g", self.record.number, client, norm)
            raise BadReplyError(f"an update beyond max-update-norm = {limit:g}")

    def _read_evaluation(self, client: int, content: RecordDict) -> int:
        metrics: Mapping[str, Any] = content.metric_records["metrics"]
        count, tested = metrics["num-train"], metrics["num-examples"]
        check_count("num-train", count, 1)
        check_count("num-examples", tested, 0)
        scores = _scores_of(metrics)
        chosen = content.config_records["config"].get("chosen", "")
        self.acknowledged(client, metrics)
        row = self.record.row(client)
        row |= {"n_train": int(count), "n_test": int(tested)}
        for column, value in scores.items():
            row.setdefault(column, value)  # those of its training round stand before those of an evaluation
        if chosen:
            row["chosen"] = str(chosen)
        return client

    def _lap(self, phase: str) -> None:
        now = time.perf_counter()
        self.record.seconds[phase] = self.record.seconds.get(phase, 0.0) + now - self._clock
        self._clock = now


class SingleModelStrategy(PersonalisedStrategy):
    """Base of the strategies whose server keeps one vector that all clients are sent.

    The vector holds the layers that :meth:`shared_layers` names; replies are averaged with weights
    n_i / Σ n_j, as FedAvg does (McMahan et al., 2017).
    """

    def shared_layers(self) -> tuple[str, ...]:
        """Return the layers that are shared; by default all."""
        return self.architecture.layout.layers

    def initialise(self) -> None:
        """Start from the common initialisation."""
        self.shared = self.shared_part(self.shared_layers())
        self.model: FloatArray = np.ascontiguousarray(self.shared.take(self.initial()))

    def serve(self, client: int) -> Arrays:
        """Send the shared vector."""
        return [self.model]

    def expected_shapes(self, client: int) -> list[tuple[int, ...]]:
        """Expect the shared vector back."""
        return [self.model.shape]

    def aggregate(self, server_round: int, updates: list[Update]) -> dict[str, Any]:
        """Average the replies."""
        self.model = weighted_mean(stacked(updates), num_examples(updates))
        return {}

    def server_state(self) -> dict[str, npt.NDArray[np.generic]]:
        """Return the shared vector."""
        return {"model": self.model}

    def load_server_state(self, arrays: Mapping[str, npt.NDArray[np.generic]]) -> None:
        """Take up a shared vector."""
        self.model = np.asarray(arrays["model"], np.float32)
