"""The phases of a round with secure aggregation: masked updates and masked scores."""

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from logging import WARNING
from typing import TYPE_CHECKING, Any

import numpy as np
from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict
from flwr.common.logger import log
from flwr.serverapp import Grid

from posy.flower import MAX_REASON, record_in
from posy.strategies import schedule
from posy.strategies.exchange import Exchange
from posy.strategies.hooks import ServerHooks
from posy.strategies.replies import Update
from posy.strategies.score_sums import TRAIN, ScoreSums
from posy.strategies.secure_aggregation import (
    EVALUATION,
    Answer,
    Masked,
    SecureRound,
    common_digest,
    masked_shape,
    read_masked,
)
from posy.words import one_line

if TYPE_CHECKING:
    from posy.strategies.masking import Words


class SecureRounds:
    """The server's side of secure aggregation in a run.

    Parameters
    ----------
    strategy : ServerHooks
        The strategy.
    exchange : Exchange
        The object that sends the messages.
    """

    def __init__(self, strategy: ServerHooks, exchange: Exchange) -> None:
        self.strategy = strategy
        self.exchange = exchange
        self.settings = strategy.settings
        self._current: SecureRound | None = None

    @property
    def current(self) -> SecureRound:
        """The secure aggregation in the current phase."""
        assert self._current is not None
        return self._current

    def score_sums(self, *, training: bool) -> ScoreSums:
        """Return the layout of the scores in the current round's masked sums."""
        all_metrics = schedule.reports_all_metrics(self.settings, self.strategy.record.number)
        task = self.strategy.architecture.task
        return ScoreSums(self.settings, task, training=training, all_metrics=all_metrics)

    def training_name(self, server_round: int) -> str:
        """Return the name of the secure aggregation over a round's updates."""
        return f"{self.exchange.states.attempt}-{server_round}"

    def evaluation_name(self, server_round: int) -> str:
        """Return the name of the secure aggregation over a round's scores."""
        return f"{self.training_name(server_round)}-{EVALUATION}"

    def open(
        self, name: str, weights: Mapping[int, int], grid: Grid, following: str, flags: Mapping[int, dict[str, Any]]
    ) -> dict[int, dict[str, Any]]:
        """Exchange keys and shares with the clients, and return the config entries for the clients that take part.

        Parameters
        ----------
        name : str
            The name of the secure aggregation.
        weights : mapping of int to int
            Each client's weight in the mean.
        grid : Grid
            Flower's grid.
        following : str
            The name of the next secure aggregation if the same clients are expected to take part in it, or an empty
            string.
        flags : mapping
            The config entries of each client.
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

            contents = {}
            for client, entries in requests.items():
                config = ConfigRecord({"client": client, "secure-round": name, "secure-stage": stage, **entries})
                self.exchange.count_bytes(client, down=config.count_bytes())
                contents[client] = RecordDict({"config": config})
            answers: dict[int, Answer] = self.exchange.query(grid, contents, decoder)
            for client, answer in answers.items():
                self.exchange.count_bytes(client, up=sum(map(len, answer)))
            return answers

        def drop(client: int, reason: str) -> None:
            self.exchange.drop([(client, one_line(reason, MAX_REASON))])

        prepared = self._current.prepared if self._current else None
        self._current = SecureRound(name, self.settings.run, weights, ask, drop, following=following, prepared=prepared)
        joined = {client: flags[client] | entries for client, entries in self._current.opened().items()}
        for client, entries in joined.items():
            self.exchange.count_bytes(client, down=sum(map(len, entries["shares"])))
        return joined

    def decoder(self, client: int) -> Callable[[RecordDict], Masked]:
        """Return the function that decodes a client's masked update."""
        shapes = self.exchange.expected_shapes(client).values()
        [size] = masked_shape(shapes, self.score_sums(training=True).count)
        count = self.strategy.clients[client].num_train
        return lambda content: read_masked(content, size, count)

    def accept(self, client: int, masked: Masked) -> Update:
        """Return a client's masked update, without recording scores in its row."""
        words, metrics = masked
        self.exchange.count_bytes(client, up=words.nbytes)
        count = self.strategy.clients[client].num_train
        self.strategy.record.row(client)["n_train"] = count
        return Update({"masked": words}, math.nan, metrics, client, count, self.exchange.weight(client))

    def summed(self, updates: list[Update]) -> tuple[list[Update], str]:
        """Return the mean of masked updates as a single update, or no update and the reason for the failure."""
        strategy, record = self.strategy, self.strategy.record
        client = updates[0].client  # all clients are expected to return the same shapes
        shapes = self.exchange.expected_shapes(client)
        unknown = {name: np.broadcast_to(np.float32(0), shape) for name, shape in shapes.items()}
        references = strategy.method.reference(strategy.architecture, strategy.serve(client), unknown)
        masked = {update.client: update.arrays["masked"] for update in updates}
        opened = self.current.unmasked(masked, self._common_digest(), self.score_sums(training=True).count)
        if opened is None:
            return [], self.current.refusal
        mean, numbers = opened
        ends = np.cumsum([reference.size for reference in references.values()])[:-1]
        arrays = {
            name: (reference + change.reshape(reference.shape)).astype(np.float32)
            for (name, reference), change in zip(references.items(), np.split(mean, ends), strict=True)
        }
        self._add_sums(numbers, training=True)
        num_unchanged = len(masked) - record.sums[TRAIN].clients
        if num_unchanged and not self.settings.train.withholds_scores:
            log(
                WARNING,
                "round %s: %s of %s clients did not send a change: their training diverged, or a parameter changed by "
                "more than secure-range; masks hide which clients",
                record.number,
                num_unchanged,
                len(masked),
            )
        loss = record.sums[TRAIN].spread("loss")
        examples = sum(update.num_examples for update in updates)
        mean_loss = loss["mean"] if loss else math.nan
        return [Update(arrays, mean_loss, num_examples=examples, weight=self.current.weight(masked))], ""

    def sum_evaluations(self, replies: Iterable[Message]) -> tuple[Collection[int], MetricRecord | None]:
        """Record the sums of the clients' scores, and return the clients that replied and the mean served accuracy.

        The accuracy is None if the sums cannot be unmasked.
        """
        strategy, record = self.strategy, self.strategy.record
        size = self.score_sums(training=False).count

        def decode(content: RecordDict) -> Masked:
            return read_masked(content, masked_shape([], size)[0])

        def accept(client: int, received: Masked) -> "tuple[int, Words]":
            words, _ = received
            self.exchange.count_bytes(client, up=words.nbytes)
            record.row(client)["n_train"] = strategy.clients[client].num_train
            return client, words

        masked = dict(sorted(self.exchange.collect(replies, lambda client: decode, accept)))
        tested = {c for c in strategy.members if c in strategy.clients and strategy.clients[c].num_test}
        record.asked = len(tested)
        opened = None
        if masked and not self.current.refusal:
            opened = self.current.unmasked(masked, self._common_digest(), size)
        if opened is None:
            why = self.current.refusal or "no client has sent its scores"
            log(WARNING, "aggregate_evaluate: %s; this evaluation has no scores", why)
        else:
            self._add_sums(opened[1], training=False)
            record.evaluated = len(tested & masked.keys())
        self.exchange.lap("evaluate")
        metric = self.score_sums(training=False).metric
        served = record.sums["served"].spread(metric) if opened else None
        return masked.keys(), MetricRecord({f"served-{metric}": served["mean"]}) if served else None

    def _common_digest(self) -> bytes:
        """Return the digest of the content that all clients in this phase have received."""
        config: Mapping[str, Any] = record_in(self.exchange.phase[0].content, "config", ConfigRecord)
        return common_digest(config, list(self.exchange.common().values()))

    def _add_sums(self, numbers: list[int], *, training: bool) -> None:
        """Record the summed scores; scores from training take precedence over scores from the evaluation."""
        record = self.strategy.record
        summed, samples = self.score_sums(training=training).tallies(numbers)
        before = {key: tally for key, tally in record.sums.items() if tally.samples}
        record.sums = summed | before
        record.samples += samples
