"""The Flower strategy that all methods share: FedAvg, with hooks that a method overrides.

A method's strategy stores the server's state as arrays. It returns the arrays for a client (``serve``) and changes the
state with the replies (``aggregate``). This module draws cohorts, sends messages, checks replies, handles failures and
records rounds for all methods.
"""

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from logging import INFO, WARNING
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np
import numpy.typing as npt
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.common.logger import log
from flwr.common.typing import NDArrays
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from posy.data.settings import SITES
from posy.extensions import word_of
from posy.flower import CLOCK_SECONDS, MAX_REASON, Array, content_of, failure, record_in, record_of, with_entries
from posy.mistakes import raise_mistake
from posy.models.architecture import Architecture
from posy.models.parameters import FloatArray, Layout, Part
from posy.randomness import model_seed
from posy.settings import SettingsError
from posy.sharing import Once
from posy.strategies.bounds import NORM_RATIO, clipping_factors, share_factors, site_share
from posy.strategies.cohorts import cohort_of, members_of, newcomers_of, takes_all
from posy.strategies.masking import Words
from posy.strategies.pooled import TRAIN, count_of, tallies
from posy.strategies.privacy import (
    BELOW,
    adapted_clip,
    clipped,
    noise_multiplier,
    noisy_fraction,
    noisy_sum,
    split_noise,
)
from posy.strategies.replies import (
    BadReplyError,
    ClientInfo,
    Evaluation,
    RoundRecord,
    Update,
    changes,
    check_enrolled,
    client_of,
    norm_of,
    num_examples,
    read_evaluation,
    read_metrics,
    read_update,
    sample_counts,
    samples_of,
    scores_of,
    stacked,
    unlimited_weights,
    weighted_mean,
)
from posy.strategies.robust import Rule, median, trimmed_mean
from posy.strategies.secure_aggregation import (
    EVALUATION,
    Answer,
    Masked,
    SecureRound,
    common_digest,
    masked_shape,
    read_masked,
)
from posy.strategies.settings import AUTO, CENTRAL, Settings
from posy.strategies.states import ClientStates, LostStateError, decoded_reply
from posy.words import are, one_line

SAVE_SECONDS = 120.0
"""Seconds between two rounds that store the models, so that a stopped run has recent ones."""
MAX_LIFE_SECONDS = 7 * 86_400.0
"""Longest lifetime of a message."""
MAX_REASONS = 10
"""Number of reasons for dropped replies that the log of a phase lists."""
T = TypeVar("T")
R = TypeVar("R")


class PersonalisedStrategy(Strategy):
    """Base of all strategies.

    Parameters
    ----------
    settings : Settings
        The settings of the run.
    plain : Architecture
        The network of the run, before the method changes it.
    """

    state: ClassVar[tuple[str, ...]] = ("model",)
    """Names of the attributes, all arrays, that later rounds and the pictures need.

    :meth:`initialise` fixes their shapes. Only an array without rows may grow rows.
    """
    sums_samples: ClassVar[bool] = False
    """Whether :meth:`aggregate` sums over samples, regardless of ``client-weights``."""

    def __init__(self, settings: Settings, plain: Architecture) -> None:
        self.settings = settings
        self.method: Any = settings.method
        self.num_clients = settings.data.num_clients
        self.rule = Rule.of(settings.run)
        """The rule instead of the weighted mean; None: the weighted mean."""
        self.architecture: Architecture = self.method.network(plain, self.num_clients)
        self.shared = self.architecture.divided(self.method.personal(self.architecture))[0]
        """The part of the network's parameters that clients send and the server aggregates."""
        if not self.shared.size:
            method = word_of(settings.run.method)
            lower = f", or lower {method}-layers = {self.method.layers}" if hasattr(self.method, "layers") else ""
            raise SettingsError(
                f"model = {plain.model!r}: {method} keeps all its layers on the clients, so nothing is left to share; "
                f"choose a network with more layers{lower}"
            )
        self.clients: dict[int, ClientInfo] = {}
        """The clients that have a node, by index."""
        self.client_names: Mapping[int, str] = {}
        """Names of clients in the data, such as the groups of a natural partition; others have their node's name."""
        self.refresh: Callable[[], list[int]] | None = None
        """Updates :attr:`clients` before a round."""
        self.before_training: Callable[[int, list[int]], None] = lambda server_round, clients: None
        """Receives the round and the clients before the server asks them to train, for the privacy ledger."""
        self.dp_clip = np.array([settings.train.dp_clip])
        """The norm to which clients clip their updates in the next round; adaptive clipping changes it."""
        self.newcomers = newcomers_of(settings)
        """The clients that join only after the last round."""
        self.members = list(members_of(settings))
        """The other clients, from which the cohorts are drawn."""
        self.newcomer_rows: dict[int, dict[str, Any]] = {}
        """Scores of the newcomers, by client."""
        self.record = RoundRecord(0)
        self.models_folder: Path | None = None
        self.resumed_after = 0
        """Rounds that were finished before this process resumed the run."""
        self.states = ClientStates()
        self.secure: SecureRound | None = None
        """The server's side of secure aggregation in this round, if the run uses it."""
        self.saving = False
        """Whether clients store their models in this round; see :data:`SAVE_SECONDS` for rounds before the last."""
        self.class_counts: npt.NDArray[np.int64] | None = None
        """Training samples by client and class ``(M, C)``, for the pictures. None if the server has no partition."""
        self._saved = -math.inf
        self._settings_json = settings.to_json()
        self._sent: list[Message] = []
        self._phase: list[Message] = []
        """The messages for training or evaluation in this phase."""
        self._clock = time.perf_counter()
        self.initialise()

    # -- hooks of a method: by default FedAvg over the shared layers -----------------------------------

    def initialise(self) -> None:
        """Set up the server's state."""
        self.model: FloatArray = np.ascontiguousarray(self.shared.take(self.initial()))

    def serve(self, client: int) -> NDArrays:
        """Return the arrays for a client; nothing may write to them afterwards."""
        return [self.model]

    def common(self) -> NDArrays:
        """Return the arrays that all clients of a round have in common; with secure aggregation they bind the masks."""
        return self.serve(self.members[0])

    def expected_shapes(self, client: int) -> list[tuple[int, ...]]:
        """Return the shapes of the arrays in a client's update; by default the shapes in :meth:`serve`."""
        return [array.shape for array in self.serve(client)]

    def check(self, arrays: NDArrays) -> None:
        """Raise :class:`BadReplyError` for arrays of the right shapes with values that the method cannot use."""

    def check_samples(self, client: int, arrays: NDArrays) -> None:
        """Raise :class:`BadReplyError` for arrays with other numbers of samples than the client has joined with."""

    def enrolled(self, client: int) -> int:
        """Return the number of training samples that a client's replies must name."""
        return self.clients[client].num_train

    def check_metrics(self, metrics: Mapping[str, Any]) -> None:
        """Raise :class:`BadReplyError` for metrics that the method cannot use, after training or evaluation."""

    def reference(self, client: int, arrays: NDArrays) -> NDArrays:
        """Return the arrays that the client started from, for ``max-update-norm``.

        The default calls the settings' ``reference``, so that server and client agree.
        """
        return self.method.reference(self.architecture, self.serve(client), arrays)

    def aggregate(self, server_round: int, updates: list[Update]) -> dict[str, Any]:
        """Change the server's state and return the method's quantities for the record.

        ``updates`` is never empty. It is sorted by client, so that sums do not depend on the order of arrival.
        """
        self.model = self.mean(updates)
        return {}

    def mean_weights(self, updates: list[Update]) -> npt.NDArray[np.float64]:
        """Return the clients' weights in the server's mean ``(M,)``, before ``max-client-weight`` limits them."""
        return unlimited_weights(updates)

    def weight(self, client: int) -> int:
        """Return the weight of a client in the server's means; with secure aggregation the client applies it."""
        return 1 if self.settings.run.client_weights == "uniform" else self.clients[client].num_train

    def cohort(self, server_round: int) -> list[int]:
        """Return the sorted clients that train in a round, drawn from the seed and the round."""
        return list(self.members) if self.takes_all(server_round) else cohort_of(self.settings, server_round)

    def takes_all(self, server_round: int) -> bool:
        """Return whether all clients train in a round, regardless of ``fraction-train``."""
        return takes_all(self.settings.run, server_round)

    def train_config(self, server_round: int, client: int) -> dict[str, Any]:
        """Return further config entries of a message to a client."""
        return {}

    def acknowledged(self, client: int, metrics: Mapping[str, Any]) -> None:
        """Update the server's state of a client after an accepted reply to training or evaluation."""

    def lost(self, client: int) -> None:
        """Update the server's state of a client that has lost its state and starts again without it."""

    def server_state(self) -> dict[str, npt.NDArray[np.generic]]:
        """Return the server's state by name."""
        return {name: getattr(self, name) for name in self._state_names}

    def load_server_state(self, arrays: Mapping[str, npt.NDArray[np.generic]]) -> None:
        """Load the state that :meth:`server_state` of a strategy with the same settings returned.

        Raises
        ------
        KeyError, ValueError
            If an array is missing, or has another type or shape than this strategy's array. The strategy then keeps its
            state.
        """
        for name in self._state_names:
            array, fresh = arrays[name], getattr(self, name)
            rows = int(fresh.shape[:1] == (0,))  # an array without rows may grow rows
            if array.dtype != fresh.dtype or array.ndim != fresh.ndim or array.shape[rows:] != fresh.shape[rows:]:
                raise ValueError(f"{name}: {array.dtype} {array.shape} instead of {fresh.dtype} {fresh.shape}")
        for name in self._state_names:
            setattr(self, name, np.require(arrays[name], requirements=("C", "W")))

    @property
    def _state_names(self) -> tuple[str, ...]:
        """Names of the arrays of the server's state; with adaptive clipping also the clipping norm."""
        return (*self.state, "dp_clip") if self.settings.train.dp_clip_quantile else self.state

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
        """Run the rounds from ``resumed_after`` + 1 to ``num_rounds``.

        Flower's ``Strategy.start`` has the same phases and arguments, but always begins with round 1.
        """
        log(INFO, "Starting %s: rounds %s to %s", word_of(self.settings.run.method), self.resumed_after + 1, num_rounds)
        self.summary()
        for notice in self.method.notices(self.settings, self.architecture):
            log(WARNING, "%s: %s", word_of(self.settings.run.method), notice)
        for notice in self.shared_notices(num_rounds):
            log(WARNING, "%s", notice)
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
        """Return one message for each client of the round's cohort."""
        self._begin_round(server_round, grid)
        clients = [c for c in self.cohort(server_round) if c in self.clients]
        self.record.cohort = tuple(clients)
        log(INFO, "configure_train: Sampled %s clients (out of %s)", len(clients), len(self.clients))
        flags: dict[int, dict[str, Any]] = {c: {"evaluate-local": self.evaluates(server_round)} for c in clients}
        if self.settings.run.secure_aggregation:
            weights = {client: self.weight(client) for client in clients}
            same = self.evaluates(server_round) and clients == self._present()
            following = self._evaluation_name(server_round) if same else ""
            self.secure = self._secure_round(self._training_name(server_round), weights, grid, following)
            flags = self._opened(self.secure, flags)
        if self.settings.train.dp_clip_quantile:
            for entries in flags.values():
                entries["dp-clip"] = float(self.dp_clip[0])
        self.before_training(server_round, list(flags))
        return self._messages(MessageType.TRAIN, server_round, config, flags)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Check the replies, aggregate the accepted updates, and record the round.

        A round fails if it has fewer than ``min-train-replies`` accepted updates or if secure aggregation fails. A
        failed round changes no state, and the next message to a client names the version before the round.
        """
        self._lap("train")
        versions: dict[int, str] = {}
        if self.secure:
            updates = self._collect(replies, self._masked_decoder, self._accept_masked_update, versions)
        else:
            updates = self._collect(replies, self._decoder, self._accept_update, versions)
        updates.sort(key=lambda update: update.client)
        accepted = updates
        why = self.secure.refusal if self.secure else ""
        if not why and len(updates) < self.least_replies:
            why = self.too_few(len(updates))
        if not why and self.secure:
            updates, why = self._summed(self.secure, updates)
        if why:
            log(WARNING, "aggregate_train: %s; the round fails, and server and clients keep their states", why)
            for row in self.record.clients.values():  # the clients discard these models
                for column in [name for name in row if name == "train_loss" or name.startswith("local_")]:
                    del row[column]
            return None, None
        self.states.versions |= versions
        self.record.trained = {update.client for update in accepted}
        if self.settings.train.dp == CENTRAL and updates[0].arrays:
            updates = [self._with_noise(server_round, updates)]
        for update in accepted:
            self.acknowledged(update.client, update.metrics)
        if not self.secure and self.settings.train.dp != CENTRAL:
            self._limit(updates)
        self.record.quantities = self.aggregate(server_round, updates)
        if self.settings.train.dp_clip_quantile:
            self.record.quantities = {**self.record.quantities, "dp_clip": float(self.dp_clip[0])}
        self._lap("aggregate")
        return None, MetricRecord({"train-loss": float(np.mean([float(update.loss) for update in updates]))})

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Return a message to every member with the arrays that it is served now, if the round is evaluated."""
        self._sent = []
        if not self.evaluates(server_round):
            return []
        trained = self.record.trained
        present = self._present()
        flags: dict[int, dict[str, Any]] = {client: {"evaluate-personal": client not in trained} for client in present}
        if self.settings.run.secure_aggregation:
            same = server_round < self.settings.run.num_server_rounds and set(self.cohort(server_round + 1)) == {
                *present
            }
            following = self._training_name(server_round + 1) if same else ""
            name, weights = self._evaluation_name(server_round), dict.fromkeys(present, 1)
            self.secure = self._secure_round(name, weights, grid, following)
            flags = self._opened(self.secure, flags)
        return self._messages(MessageType.EVALUATE, server_round, config, flags)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Record each client's scores."""
        if self.settings.run.secure_aggregation:
            return self._sum_evaluations(replies) if self.evaluates(server_round) else None
        results = self._collect(replies, lambda client: read_evaluation, self._accept_evaluation)
        self.record.evaluated = sum(self.record.clients[client]["n_test"] > 0 for client in results)
        self.record.asked = len(self._sent) - len(results) + self.record.evaluated
        self._lap("evaluate")
        served = [row["served_accuracy"] for row in self.record.clients.values() if "served_accuracy" in row]
        return MetricRecord({"served-accuracy": float(np.mean(served))}) if results and served else None

    # -- newcomers: clients that never trained -----------------------------------------------------------

    def _try_newcomers(
        self, server_round: int, train_config: ConfigRecord, evaluate_config: ConfigRecord, grid: Grid, timeout: float
    ) -> None:
        """Evaluate the served model of each newcomer, and let it train once; its update is not aggregated."""
        last = self.record
        self._begin_round(server_round, grid)
        present = [client for client in self.newcomers if client in self.clients]

        def accept(client: int, metrics: Mapping[str, Any]) -> None:
            row = self.newcomer_rows.setdefault(client, {"n_train": self.clients[client].num_train})
            row |= scores_of(metrics)
            self.check_metrics(metrics)
            self.acknowledged(client, metrics)

        for kind, config, flag in (
            (MessageType.EVALUATE, evaluate_config, "evaluate-personal"),
            (MessageType.TRAIN, train_config, "evaluate-local"),
        ):
            if kind == MessageType.TRAIN:
                self.before_training(server_round, present)
            messages = self._messages(kind, server_round, config, {client: {flag: True} for client in present})
            self._collect(grid.send_and_receive(messages, timeout=timeout), lambda client: read_metrics, accept)
        self.record = last

    # -- limits on the influence of single clients -------------------------------------------------------

    def mean(self, updates: list[Update], weights: npt.ArrayLike | None = None) -> FloatArray:
        """Return the combination of the updates' first arrays by the rule of the setting ``robust``.

        Distances between models do not include BatchNorm's running statistics. These are combined by the trimmed mean
        with ``trimmed-mean``, and by the median with the other rules.

        Parameters
        ----------
        updates : list of Update
            Updates of clients that started from the same model.
        weights : array_like, (M,), optional
            The clients' weights; by default the weights of the setting ``client-weights``.
        """
        models, w = stacked(updates), np.asarray(num_examples(updates) if weights is None else weights)
        if self.rule is None:
            return weighted_mean(models, w)
        start = self.serve(updates[0].client)[0]
        is_parameter = self._is_parameter(start)
        combined = self.rule.combine(models[:, is_parameter], start[is_parameter], w)
        model = np.empty_like(models[0])
        model[is_parameter] = combined.model
        statistics = models[:, ~is_parameter]
        trims = self.rule.name == "trimmed-mean"
        model[~is_parameter] = trimmed_mean(statistics, self.rule.trim).model if trims else median(statistics)
        if combined.shares is not None:
            plain = np.full(len(w), 1 / len(w)) if trims else w / w.sum()
            clients = [update.client for update in updates]
            self.note_limited("discarded", clients, combined.shares == 0)
            self.note_limited("down_weighted", clients, (combined.shares > 0) & (combined.shares < plain / 2))
        return model

    @property
    def least_replies(self) -> int:
        """The smallest number of updates with which a round succeeds."""
        return max(self.settings.run.min_train_replies, self.rule.least if self.rule else 1)

    def too_few(self, replies: int) -> str:
        """Return why a round with too few accepted replies fails."""
        run = self.settings.run
        if self.rule and replies < self.rule.least:
            return (
                f"{replies} accepted replies, robust = {run.robust} with max-attackers = {run.max_attackers} needs "
                f"{self.rule.least}"
            )
        return f"{replies} accepted replies, min-train-replies is {run.min_train_replies}"

    @property
    def norm_ratio(self) -> float:
        """The largest norm of an update as a multiple of the round's median norm; 0: no limit."""
        run = self.settings.run
        if run.secure_aggregation or "max-norm-ratio" in self.method.refusals():
            return 0.0
        if run.max_norm_ratio == AUTO:
            return NORM_RATIO if self.settings.data.dataset == SITES else 0.0
        return float(run.max_norm_ratio)

    def largest_share(self, clients: int) -> float:
        """Return the largest share in a mean of one of some clients; 1: no limit."""
        run = self.settings.run
        unweighted = self.rule is not None and not self.rule.weighs
        if run.secure_aggregation or unweighted or "max-client-weight" in self.method.refusals():
            return 1.0
        if run.max_client_weight == AUTO:
            return site_share(clients) if self.settings.data.dataset == SITES else 1.0
        return float(run.max_client_weight)

    def note_limited(self, kind: str, clients: list[int], limited: npt.NDArray[np.bool_]) -> None:
        """Record and log the clients whose updates are ``clipped``, ``discarded`` or ``down_weighted``.

        Parameters
        ----------
        kind : str
            The name of a list of :class:`RoundRecord`.
        clients : list of int
            Some clients, sorted.
        limited : numpy.ndarray, bool, (M,)
            Which of these clients are limited.
        """
        recorded: list[int] = getattr(self.record, kind)
        fresh = [client for client in np.asarray(clients)[limited].tolist() if client not in recorded]
        if not fresh:
            return
        recorded += fresh
        names = {client: info.name for client, info in self.clients.items() if info.name}
        log(INFO, "round %s: %s %s", self.record.number, are(fresh, names, self.num_clients), kind.replace("_", "-"))

    def _limit(self, updates: list[Update]) -> None:
        """Clip the updates of a round, and limit the clients' weights."""
        sent = [update for update in updates if update.arrays]
        if len(sent) < 2:
            return
        if ratio := self.norm_ratio:
            self._clip(sent, ratio)
        largest = self.largest_share(len(sent))
        if largest < 1:
            of_weights = share_factors(self.mean_weights(sent), largest)
            of_samples = share_factors(sample_counts(sent), largest) if self.sums_samples else np.ones(len(sent))
            for update, weight_factor, samples_factor in zip(sent, of_weights, of_samples, strict=True):
                update.weight_factor, update.samples_factor = float(weight_factor), float(samples_factor)
            limited: npt.NDArray[np.bool_] = np.less(np.minimum(of_weights, of_samples), 1)
            self.note_limited("down_weighted", [update.client for update in sent], limited)

    def _clip(self, updates: list[Update], ratio: float) -> None:
        """Scale down the updates with a norm above ``ratio`` times the median norm.

        BatchNorm's running statistics have a separate norm and median, so that a client cannot hide a change in them.
        """
        references = [self.reference(update.client, update.arrays) for update in updates]
        norms = np.zeros((2, len(updates)))  # of the parameters and of the statistics
        for number, (update, reference) in enumerate(zip(updates, references, strict=True)):
            moved = changes(update.arrays, reference)
            masks = [self._is_parameter(array) for array in moved]
            for row, of in enumerate((masks, [~mask for mask in masks])):
                norms[row, number] = norm_of([array[..., mask] for array, mask in zip(moved, of, strict=True)])
        factors = np.stack([clipping_factors(row, ratio) for row in norms])
        clipped: npt.NDArray[np.bool_] = np.less(factors.min(axis=0), 1)
        for number in np.flatnonzero(clipped).tolist():
            update, reference = updates[number], references[number]
            moved = changes(update.arrays, reference)
            scaled = [np.where(self._is_parameter(array), *factors[:, number]) * array for array in moved]
            limited = [(before + change).astype(np.float32) for before, change in zip(reference, scaled, strict=False)]
            update.arrays = [*limited, *update.arrays[len(limited) :]]
        self.note_limited("clipped", [update.client for update in updates], clipped)

    # -- helpers for methods ---------------------------------------------------------------------------

    def learning_rate(self, server_round: int) -> float:
        """Return the learning rate of a round; rounds count from 1, and the cosine schedule ends near 0."""
        train, done = self.settings.train, server_round - 1
        if train.lr_schedule == "cosine":
            return train.lr * 0.5 * (1 + math.cos(math.pi * done / self.settings.run.num_server_rounds))
        steps = {"constant": 0, "exponential": done, "step": done // train.lr_step}[train.lr_schedule]
        return train.lr * float(train.lr_decay**steps)

    def shared_notices(self, num_rounds: int) -> tuple[str, ...]:
        """Return warnings to log before round 1 about shared settings that have no effect in the run's rounds."""
        train, run, notices = self.settings.train, self.settings.run, []
        rates = {self.learning_rate(number) for number in range(1, num_rounds + 1)}
        if train.lr_schedule != "constant" and rates == {train.lr}:
            remedy = "choose more rounds"
            if num_rounds > 1:
                remedy = "set lr-decay below 1" if train.lr_decay == 1 else f"set lr-step below {num_rounds}"
            notices.append(
                f"lr-schedule = {train.lr_schedule!r} has no effect: lr is {train.lr:g} in all rounds from 1 to "
                f"{num_rounds}; {remedy}"
            )
        neighbours = max(len(self.cohort(number)) for number in (1, num_rounds)) - 1
        if run.secure_aggregation and run.secure_neighbours > neighbours:
            notices.append(
                f"secure-neighbours = {run.secure_neighbours}: a round has at most {neighbours} other clients, with "
                f"all of which each client shares secrets; set it to at most {neighbours}"
            )
        return tuple(notices)

    def evaluates(self, server_round: int) -> bool:
        """Return whether a round is evaluated."""
        run = self.settings.run
        return server_round % run.evaluate_every == 0 or server_round == run.num_server_rounds

    def in_average(self, server_round: int) -> bool:
        """Return whether a round is one of the last ``average-rounds`` rounds."""
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
        # The system accuracy of these rounds is computed from the stored models.
        due = last or self.in_average(server_round) or self._clock - self._saved > SAVE_SECONDS
        self.saving = self.models_folder is not None and self.evaluates(server_round) and due
        if self.saving:
            self._saved = self._clock

    def _messages(
        self, kind: str, server_round: int, config: ConfigRecord, flags: Mapping[int, Mapping[str, Any]]
    ) -> list[Message]:
        """Return a message for each client in ``flags``, with the client's config entries of the phase."""
        common = ConfigRecord({**config, "settings": self._settings_json, "server-round": server_round})
        common["lr"] = self.learning_rate(server_round)
        if self.saving:
            common["save-models-to"] = str(self.models_folder)
        pack = Once(Array)  # serialises an array for several clients once
        self._sent = []
        for client, entries in flags.items():
            served, info, row = self.serve(client), self.clients[client], self.record.row(client)
            arrays = record_of({str(i): pack(array) for i, array in enumerate(served)})
            state = self.states.config(kind, server_round, client)
            config_entries = {"client": client, **state, **entries, **self.train_config(server_round, client)}
            size = sum(array.nbytes for array in served)
            self.record.bytes_down += size
            row["bytes_down"] += size
            if name := self.client_names.get(client, info.name):
                row["site"] = name
                if self.saving:
                    config_entries["site"] = name
            content = content_of(arrays=arrays, config=with_entries(common, config_entries))
            self._sent.append(self._message(content, client, kind))
        self._phase = self._sent
        return self._sent

    def _message(self, content: RecordDict, client: int, kind: str) -> Message:
        """Return a message of this round for a client; it expires soon after ``round-timeout``."""
        lifetime = min(self.settings.run.timeout, MAX_LIFE_SECONDS) + CLOCK_SECONDS
        return Message(content, self.clients[client].node_id, kind, ttl=lifetime, group_id=str(self.record.number))

    def _collect(
        self,
        replies: Iterable[Message],
        decoder: Callable[[int], Callable[[RecordDict], T]],
        accept: Callable[[int, T], R],
        versions: dict[int, str] | None = None,
        *,
        stateful: bool = True,
    ) -> list[R]:
        """Return the results of the accepted replies; drop and record errors and unusable replies.

        Only the decoding of a reply is guarded. An exception of a hook is a mistake in the method and ends the run.

        Parameters
        ----------
        replies : iterable of Message
            Replies to the messages in ``_sent``.
        decoder : callable
            Returns, for a client, a function that decodes its reply. This function may raise any of
            :data:`UNREADABLE`.
        accept : callable
            Checks and records a client's decoded reply. It raises :class:`BadReplyError` for unusable values.
        versions : dict, optional
            Receives the version of each client's state; by default the strategy's ``states.versions``.
        stateful : bool
            Whether replies name the version of the client's state.

        Raises
        ------
        MethodError
            In a simulation, if the method's code has raised an exception on a client.
        """
        versions = self.states.versions if versions is None else versions
        accepted, dropped = [], []
        # The SuperLink reports the error of a lost node. Only the id of the message identifies the client.
        # A message that was not sent before the timeout has no id.
        unsent = [client_of(m) for m in self._sent if not m.metadata.message_id]
        waiting = {m.metadata.message_id: m for m in self._sent if m.metadata.message_id}
        for reply in replies:
            message = waiting.pop(reply.metadata.reply_to_message_id, None)
            client = -1 if message is None else client_of(message)
            try:
                if message is None:
                    raise BadReplyError("a reply to no message of this phase, or a second reply")
                if reply.has_error():
                    raise_mistake(client, reply.error)
                    raise BadReplyError(failure(reply.error))
                version, content = decoded_reply(message, reply, decoder(client), stateful=stateful)
                accepted.append(accept(client, content))
                if version is not None:
                    versions[client] = version
            except BadReplyError as error:
                if isinstance(error, LostStateError):
                    self.states.versions.pop(client, None)
                    self.lost(client)
                dropped.append((client, one_line(str(error), MAX_REASON)))
        timeout = self.settings.run.timeout
        late = "no reply" + (f" within round-timeout = {timeout:g} s" if timeout < math.inf else "")
        dropped += [(client, late) for client in (*map(client_of, waiting.values()), *unsent)]
        self._log_dropped(set(dropped) - set(self.record.dropped))  # an earlier phase may have logged the same reason
        self.record.dropped += dropped
        return accepted

    def _log_dropped(self, dropped: set[tuple[int, str]]) -> None:
        """Log the clients that are dropped from the round, one line for each reason."""
        reasons: dict[str, list[int]] = defaultdict(list)
        for client, reason in sorted(dropped):
            reasons[reason].append(client)
        names = {client: info.name for client, info in self.clients.items() if info.name}
        for reason, clients in list(reasons.items())[:MAX_REASONS]:
            senders = [client for client in clients if client >= 0]
            who = f"{are(senders, names, self.num_clients)} dropped" if senders else "dropped"
            log(WARNING, "round %s: %s: %s", self.record.number, who, reason)
        if (more := len(reasons) - MAX_REASONS) > 0:
            log(WARNING, "round %s: replies are dropped for %s further reasons", self.record.number, more)

    def _decoder(self, client: int) -> Callable[[RecordDict], Update]:
        """Return the function that decodes a client's update."""
        shapes, with_loss = self.expected_shapes(client), not self.settings.train.withholds_scores
        return lambda content: read_update(content, shapes, with_loss=with_loss)

    def _accept_update(self, client: int, update: Update) -> Update:
        """Check an update, and record it in the row of its client."""
        update.client, update.weight = client, self.weight(client)
        check_enrolled("num-examples", update.num_examples, self.enrolled(client))
        check_enrolled("num-test", update.metrics["num-test"], self.clients[client].num_test)
        self.check(update.arrays)
        self.check_samples(client, update.arrays)
        if limit := self.settings.run.max_update_norm:  # a larger update is dropped: clipping would hide it
            moved = changes(update.arrays, self.reference(client, update.arrays))
            if not (norm := norm_of([self._parameters_of(array) for array in moved])) <= limit:
                log(WARNING, "round %s, client %s: an update of norm %.6g", self.record.number, client, norm)
                raise BadReplyError(f"the norm of the update exceeds max-update-norm = {limit:g}")
        scores, samples = scores_of(update.metrics), samples_of(update.metrics)
        self.check_metrics(update.metrics)
        if self.settings.train.dp_clip_quantile and update.metrics.get(BELOW) not in (0.0, 1.0):
            raise BadReplyError(f"{BELOW} = {update.metrics.get(BELOW)}")
        # All checks have passed. A dropped reply writes nothing into the client's row.
        size = sum(array.nbytes for array in update.arrays)
        self.record.bytes_up += size
        row = self.record.row(client)
        row["bytes_up"] += size
        tested = int(update.metrics["num-test"])
        row |= {"n_train": update.num_examples, "n_test": tested, **scores}
        if not self.settings.train.withholds_scores:
            row["train_loss"] = float(update.loss)
        self.record.samples += samples
        return update

    def exchanged(self) -> tuple[Layout, Part]:
        """Return the layout of the network that clients train in this round, and the part that they send."""
        return self.architecture.layout, self.shared

    def _parameters_of(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return a model, or its shared part, without BatchNorm's running statistics; other arrays unchanged."""
        mask = self._is_parameter(array)
        return array if mask.all() else array[..., mask]

    def _is_parameter(self, array: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
        """Return which entries of an array's last axis are no running statistics of BatchNorm.

        All entries of an array other than a model or its shared part are parameters.
        """
        layout, shared = self.exchanged()
        parameters = layout.trainable
        is_parameter = parameters.put(np.zeros(layout.size, np.bool_), np.ones(parameters.size, np.bool_))
        for mask in (is_parameter, shared.take(is_parameter)):
            if array.shape[-1:] == mask.shape:
                return mask
        return np.ones(array.shape[-1:], np.bool_)

    # -- central differential privacy ------------------------------------------------------------------

    def _with_noise(self, server_round: int, updates: list[Update]) -> Update:
        """Return the mean of the clipped updates with noise on their sum, as a single update.

        The sum is divided by the size of the drawn cohort, which does not depend on the clients' data or replies. With
        secure aggregation ``updates`` is one mean, which already contains the noise of the clients.
        """
        cohort, clip = len(self.cohort(server_round)), float(self.dp_clip[0])
        references = self.reference(
            updates[0].client if not self.secure else min(self.record.trained), updates[0].arrays
        )
        if len(references) < len(updates[0].arrays):
            raise SettingsError(
                f"dp = 'central' with method = {self.settings.run.method!r}: its clients send arrays without a "
                "reference; the method must refuse this mode"
            )
        if self.secure:
            count = len(self.record.trained)
            total = [count * change for change in changes(updates[0].arrays, references)]
        else:
            multiplier = noise_multiplier(self.settings)
            if quantile := self.settings.train.dp_clip_quantile:
                multiplier, of_count = split_noise(multiplier, cohort)
                below = noisy_fraction([float(update.metrics[BELOW]) for update in updates], cohort, of_count)
                self.dp_clip = np.array([adapted_clip(clip, below, quantile)])
            # A client could send an update with a larger norm than it should.
            each = [clipped(update.arrays, references, clip)[0] for update in updates]
            total = noisy_sum(each, multiplier * clip)
        arrays = [
            (reference + change / cohort).astype(np.float32)
            for reference, change in zip(references, total, strict=False)
        ]
        loss = float(np.mean([float(update.loss) for update in updates]))
        count = sum(update.num_examples for update in updates)
        return Update(arrays, loss, client=updates[0].client, num_examples=count, weight=1)

    # -- secure aggregation ----------------------------------------------------------------------------

    def _present(self) -> list[int]:
        """Return the members that have joined."""
        return [client for client in self.members if client in self.clients]

    def _training_name(self, server_round: int) -> str:
        """Return the name of the secure aggregation of a round's updates."""
        return f"{self.states.attempt}-{server_round}"

    def _evaluation_name(self, server_round: int) -> str:
        """Return the name of the secure aggregation of a round's scores."""
        return f"{self._training_name(server_round)}-{EVALUATION}"

    def _secure_round(self, name: str, weights: Mapping[int, int], grid: Grid, following: str) -> SecureRound:
        """Return the server's side of a round of secure aggregation over some clients with their weights.

        ``following`` is the name of the next one if the same clients are expected to take part in it, or empty.
        """

        def ask(
            stage: str, requests: Mapping[int, Mapping[str, Any]], check: Callable[[int, Answer], None]
        ) -> dict[int, Answer]:
            def decoder(client: int) -> Callable[[RecordDict], Answer]:
                def decode(content: RecordDict) -> Answer:
                    answer: Any = record_in(content, "config", ConfigRecord)["answer"]
                    check(client, answer)
                    return [bytes(text) for text in answer]

                return decode

            def accept(client: int, answer: Answer) -> tuple[int, Answer]:
                self._count_bytes(client, up=sum(map(len, answer)))
                return client, answer

            self._sent = []
            for client, entries in requests.items():
                config = ConfigRecord({"client": client, "secure-round": name, "secure-stage": stage, **entries})
                self._count_bytes(client, down=config.count_bytes())
                self._sent.append(self._message(RecordDict({"config": config}), client, MessageType.QUERY))
            replies = grid.send_and_receive(self._sent, timeout=self.settings.run.timeout)
            return dict(self._collect(replies, decoder, accept, stateful=False))

        def drop(client: int, reason: str) -> None:
            dropped = client, one_line(reason, MAX_REASON)
            self._log_dropped({dropped} - set(self.record.dropped))
            self.record.dropped.append(dropped)

        prepared = self.secure.prepared if self.secure else None
        return SecureRound(name, self.settings.run, weights, ask, drop, following=following, prepared=prepared)

    def _opened(self, secure: SecureRound, flags: Mapping[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
        """Return the config entries of the clients that take part in a round of secure aggregation."""
        joined = {client: flags[client] | entries for client, entries in secure.opened().items()}
        for client, entries in joined.items():
            self._count_bytes(client, down=sum(map(len, entries["shares"])))
        return joined

    def _masked_decoder(self, client: int) -> Callable[[RecordDict], Masked]:
        """Return the function that decodes a client's masked update."""
        [size] = masked_shape(self.expected_shapes(client), count_of(self.settings, training=True))
        count = self.clients[client].num_train
        return lambda content: read_masked(content, size, count)

    def _accept_masked_update(self, client: int, masked: Masked) -> Update:
        """Return a masked update; the row of its client receives no scores."""
        words, metrics = masked
        self.check_metrics(metrics)
        self._count_bytes(client, up=words.nbytes)
        count = self.clients[client].num_train
        self.record.row(client)["n_train"] = count
        return Update([words], math.nan, metrics, client, count, self.weight(client))

    def _common_digest(self) -> bytes:
        """Return the digest of all that the clients of this phase have received in common."""
        config: Mapping[str, Any] = record_in(self._phase[0].content, "config", ConfigRecord)
        return common_digest(config, self.method.per_client, self.common())

    def _summed(self, secure: SecureRound, updates: list[Update]) -> tuple[list[Update], str]:
        """Return the mean of masked updates as a single update, or no update and the reason."""
        client = updates[0].client  # all clients are expected to return the same shapes
        shapes = self.expected_shapes(client)
        unknown = [np.broadcast_to(np.float32(0), shape) for shape in shapes]
        sent = self.serve(client)
        references = self.method.reference(self.architecture, sent, unknown)[: len(shapes)]
        references += sent[len(references) : len(shapes)]  # statistics are compared with the statistics in the message
        masked = {update.client: update.arrays[0] for update in updates}
        opened = secure.unmasked(masked, self._common_digest(), count_of(self.settings, training=True))
        if opened is None:
            return [], secure.refusal
        mean, numbers = opened
        ends = np.cumsum([reference.size for reference in references])[:-1]
        arrays = [
            (reference + change.reshape(reference.shape)).astype(np.float32)
            for reference, change in zip(references, np.split(mean, ends), strict=True)
        ]
        self._add_sums(numbers, training=True)
        silent = len(masked) - self.record.sums[TRAIN].clients
        if silent and not self.settings.train.withholds_scores:
            log(
                WARNING,
                "round %s: %s of %s clients sent no change: their training diverged, or a parameter changed by more "
                "than secure-range; masks hide which clients",
                self.record.number,
                silent,
                len(masked),
            )
        loss = self.record.sums[TRAIN].spread("loss")
        examples = sum(update.num_examples for update in updates)
        mean_loss = loss["mean"] if loss else math.nan
        return [Update(arrays, mean_loss, num_examples=examples, weight=secure.weight(masked))], ""

    def _sum_evaluations(self, replies: Iterable[Message]) -> MetricRecord | None:
        """Record the sums of the clients' scores, if they can be unmasked."""
        assert self.secure is not None
        size = count_of(self.settings, training=False)

        def decode(content: RecordDict) -> Masked:
            return read_masked(content, masked_shape([], size)[0])

        def accept(client: int, received: Masked) -> tuple[int, Words]:
            words, metrics = received
            self.check_metrics(metrics)
            self.acknowledged(client, metrics)
            self._count_bytes(client, up=words.nbytes)
            self.record.row(client)["n_train"] = self.clients[client].num_train
            return client, words

        masked = dict(sorted(self._collect(replies, lambda client: decode, accept)))
        tested = {client for client in self.members if client in self.clients and self.clients[client].num_test}
        self.record.asked = len(tested)
        opened = None
        if masked and not self.secure.refusal:
            opened = self.secure.unmasked(masked, self._common_digest(), size)
        if opened is None:
            why = self.secure.refusal or "no client has sent its scores"
            log(WARNING, "aggregate_evaluate: %s; this evaluation has no scores", why)
        else:
            self._add_sums(opened[1], training=False)
            self.record.evaluated = len(tested & masked.keys())
        self._lap("evaluate")
        served = self.record.sums["served"].spread("accuracy") if opened else None
        return MetricRecord({"served-accuracy": served["mean"]}) if served else None

    def _add_sums(self, numbers: list[int], *, training: bool) -> None:
        """Record the sums of the scores; scores after the training take precedence over scores of the evaluation."""
        summed, samples = tallies(self.settings, numbers, training=training)
        before = {key: tally for key, tally in self.record.sums.items() if tally.samples}
        self.record.sums = summed | before
        self.record.samples += samples

    def _count_bytes(self, client: int, up: int = 0, down: int = 0) -> None:
        row = self.record.row(client)
        self.record.bytes_up += up
        self.record.bytes_down += down
        row["bytes_up"] += up
        row["bytes_down"] += down

    def _accept_evaluation(self, client: int, evaluation: Evaluation) -> int:
        """Check the result of an evaluation, and record it in the row of its client."""
        check_enrolled("num-train", evaluation.num_train, self.enrolled(client))
        check_enrolled("num-examples", evaluation.num_test, self.clients[client].num_test)
        self.check_metrics(evaluation.metrics)
        self.acknowledged(client, evaluation.metrics)
        row = self.record.row(client)
        row |= {"n_train": evaluation.num_train, "n_test": evaluation.num_test}
        self.record.samples += evaluation.samples
        for column, value in evaluation.scores.items():
            row.setdefault(column, value)  # the scores of the training round take precedence
        if evaluation.chosen:
            row["chosen"] = evaluation.chosen
        return client

    def _lap(self, phase: str) -> None:
        clock = time.perf_counter()
        self.record.seconds[phase] = self.record.seconds.get(phase, 0.0) + clock - self._clock
        self._clock = clock
