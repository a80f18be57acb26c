"""The phases of a round: the cohort trains, the server aggregates, and the clients evaluate."""

from collections.abc import Callable, Collection, Iterable, Mapping
from logging import INFO, WARNING
from typing import Any

import numpy as np
import numpy.typing as npt
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.common.logger import log
from flwr.serverapp import Grid

from posy.metrics import column_of
from posy.strategies import schedule
from posy.strategies.cohorts import cohort_of
from posy.strategies.columns import Columns
from posy.strategies.exchange import Exchange
from posy.strategies.hooks import ServerHooks
from posy.strategies.influence import Influence
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
    Evaluation,
    Update,
    changes,
    check_enrolled,
    read_evaluation,
    read_update,
    samples_of,
    scores_of,
    stacked,
    weighted_mean,
)
from posy.strategies.run_settings import ALL_METRICS, CENTRAL
from posy.strategies.secure_rounds import SecureRounds


class Rounds:
    """The phases of a run's rounds.

    Parameters
    ----------
    strategy : ServerHooks
        The strategy, whose hooks the phases call.
    exchange : Exchange
        The object that sends the messages.
    influence : Influence
        The limits on updates.
    """

    def __init__(self, strategy: ServerHooks, exchange: Exchange, influence: Influence) -> None:
        self.strategy = strategy
        self.settings = strategy.settings
        self.exchange = exchange
        self.influence = influence
        task = strategy.architecture.task
        self.columns = Columns.of(self.settings, task)
        """The scores that the run records."""
        self.metric = self.columns.metric
        """The metric by which the run compares rounds."""
        self.secure = SecureRounds(strategy, exchange) if self.settings.run.secure_aggregation else None
        self.before_training: Callable[[int, list[int]], None] = lambda server_round, clients: None
        """Hook for the privacy ledger, called with the round and its clients before training messages are sent."""

    # -- training --------------------------------------------------------------------------------------

    def cohort(self, server_round: int) -> list[int]:
        """Return, in sorted order, the clients that train in a round; the seed and the round determine the draw."""
        trains_all = self.strategy.trains_all(server_round) and not self.strategy.method.pools_data
        return list(self.strategy.members) if trains_all else cohort_of(self.settings, server_round)

    def configure_train(self, server_round: int, config: ConfigRecord, grid: Grid) -> list[Message]:
        """Return a training message for each client in the round's cohort."""
        strategy = self.strategy
        self.exchange.begin_round(server_round)
        clients = [c for c in self.cohort(server_round) if c in strategy.clients]
        strategy.record.cohort = tuple(clients)
        log(INFO, "configure_train: Sampled %s clients (out of %s)", len(clients), len(strategy.clients))
        evaluates = schedule.evaluates(self.settings.run, server_round)
        all_metrics = schedule.reports_all_metrics(self.settings, server_round)
        flags: dict[int, dict[str, Any]] = {c: {"evaluate-local": evaluates, ALL_METRICS: all_metrics} for c in clients}
        if self.secure:
            weights = {client: self.exchange.weight(client) for client in clients}
            same_clients = evaluates and clients == self._present()
            following = self.secure.evaluation_name(server_round) if same_clients else ""
            flags = self.secure.open(self.secure.training_name(server_round), weights, grid, following, flags)
        if self.settings.train.dp_clip_quantile:
            for entries in flags.values():
                entries["dp-clip"] = float(strategy.dp_clip[0])
        self.before_training(server_round, list(flags))
        return self.exchange.messages(MessageType.TRAIN, server_round, config, flags)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Check the replies, aggregate the accepted updates, and record the round.

        A round fails if it has fewer than ``min-train-replies`` accepted updates or if secure aggregation fails. A
        failed round changes no state: the next message to a client names the client's state from before the round.
        """
        strategy, exchange = self.strategy, self.exchange
        exchange.lap("train")
        versions: dict[int, str] = {}
        if self.secure:
            updates = exchange.collect(replies, self.secure.decoder, self.secure.accept, versions)
        else:
            updates = exchange.collect(replies, self.decoder, self.accept_update, versions)
        updates.sort(key=lambda update: update.client)
        accepted = updates
        failure = self.secure.current.refusal if self.secure else ""
        if not failure and len(updates) < self.influence.least_replies:
            failure = self.influence.too_few(len(updates))
        if not failure and self.secure:
            updates, failure = self.secure.summed(updates)
        if failure:
            log(WARNING, "aggregate_train: %s; the round fails, and server and clients keep their states", failure)
            for row in strategy.record.clients.values():  # the clients discard the scored models
                for column in [name for name in row if name == "train_loss" or name.startswith("local_")]:
                    del row[column]
            exchange.report_lost()
            return None, None
        exchange.states.versions |= versions
        strategy.record.trained = {update.client for update in accepted}
        self._aggregate(server_round, updates)
        exchange.report_lost()
        exchange.lap("aggregate")
        return None, MetricRecord({"train-loss": float(np.mean([float(update.loss) for update in updates]))})

    def _aggregate(self, server_round: int, updates: list[Update]) -> None:
        """Add central noise to the updates or limit them, and aggregate them."""
        strategy, train = self.strategy, self.settings.train
        if train.dp == CENTRAL and updates[0].arrays:
            updates = [self._with_noise(server_round, updates)]
        elif not self.secure and train.dp != CENTRAL:
            self.influence.limit(updates)
        served = getattr(strategy, "model", None)
        strategy.record.quantities = strategy.aggregate(server_round, updates)
        self._average_statistics(served, updates)
        self.exchange.note_finished(server_round)
        if train.dp_clip_quantile:
            strategy.record.quantities = {**strategy.record.quantities, "dp_clip": float(strategy.dp_clip[0])}

    def _average_statistics(self, served: npt.NDArray[Any] | None, updates: list[Update]) -> None:
        """Replace a global model's BatchNorm running statistics with the clients' mean or the ``robust`` rule's result.

        A server that takes steps along the update would otherwise extrapolate the statistics, and a variance could
        become negative. Only the attribute ``model`` changes, and only if the strategy has replaced it in this round.
        It must also have the shape of the clients' models, and all clients that sent a model must receive it.
        """
        strategy, influence = self.strategy, self.influence
        if not influence.has_statistics:
            return
        model, sent = getattr(strategy, "model", None), [update for update in updates if "model" in update.arrays]
        if model is None or served is None or model is served or not sent:
            return
        if model.shape != served.shape or model.shape != sent[0].arrays["model"].shape:
            return
        if any(strategy.serve(update.client).get("model") is not model for update in sent):
            return
        statistics = ~influence.is_parameter(model)
        strategy.model = model.copy()
        if influence.rule:
            strategy.model[statistics] = influence.combine_statistics(stacked(sent)[:, statistics])
        else:  # average all columns, because rounding depends on their number and must match FedAvg
            strategy.model[statistics] = weighted_mean(stacked(sent), strategy.limited_weights(sent))[statistics]

    def decoder(self, client: int) -> Callable[[RecordDict], Update]:
        """Return the function that decodes a client's update."""
        shapes, with_loss = self.exchange.expected_shapes(client), not self.settings.train.withholds_scores
        return lambda content: read_update(content, shapes, with_loss=with_loss)

    def accept_update(self, client: int, update: Update) -> Update:
        """Check an update, and record it in its client's row."""
        strategy, record = self.strategy, self.strategy.record
        update.client, update.weight = client, self.exchange.weight(client)
        check_enrolled("num-examples", update.num_examples, strategy.clients[client].num_train)
        check_enrolled("num-test", update.metrics["num-test"], strategy.clients[client].num_test)
        strategy.check(client, update.arrays)
        self.influence.check_norm(client, update.arrays)
        scores, samples = scores_of(update.metrics), samples_of(update.metrics)
        if self.settings.train.dp_clip_quantile and update.metrics.get(BELOW) not in (0.0, 1.0):
            raise BadReplyError(f"{BELOW} = {update.metrics.get(BELOW)}")
        # All checks come first, so that a dropped reply does not change the client's row.
        self.exchange.count_bytes(client, up=sum(array.nbytes for array in update.arrays.values()))
        row = record.row(client)
        row |= {"n_train": update.num_examples, "n_test": int(update.metrics["num-test"]), **self.recorded(scores)}
        if not self.settings.train.withholds_scores:
            row["train_loss"] = float(update.loss)
        record.samples += samples
        return update

    def _with_noise(self, server_round: int, updates: list[Update]) -> Update:
        """Return the mean of the clipped updates, with noise added to their sum, as a single update.

        The sum is divided by the size of the drawn cohort, which does not depend on the clients' data or replies. With
        secure aggregation, ``updates`` holds a single mean, which already contains the clients' noise.
        """
        strategy, train = self.strategy, self.settings.train
        cohort, clip = len(self.cohort(server_round)), float(strategy.dp_clip[0])
        names = list(updates[0].arrays)
        client = min(strategy.record.trained) if self.secure else updates[0].client
        starts = strategy.reference(client, updates[0].arrays)
        references = [starts[name] for name in names]
        client_arrays = [[update.arrays[name] for name in names] for update in updates]
        if self.secure:
            count = len(strategy.record.trained)
            total = [count * change for change in changes(client_arrays[0], references)]
        else:
            multiplier = noise_multiplier(self.settings)
            if quantile := train.dp_clip_quantile:
                multiplier, count_deviation = split_noise(multiplier, cohort)
                below = noisy_fraction([float(update.metrics[BELOW]) for update in updates], cohort, count_deviation)
                strategy.dp_clip = np.array([adapted_clip(clip, below, quantile)])
            # Clip again, because a client could send an update with a larger norm.
            total = noisy_sum([clipped(arrays, references, clip)[0] for arrays in client_arrays], multiplier * clip)
        noisy = [(start + change / cohort).astype(np.float32) for start, change in zip(references, total, strict=True)]
        loss = float(np.mean([float(update.loss) for update in updates]))
        examples = sum(update.num_examples for update in updates)
        arrays = dict(zip(names, noisy, strict=True))
        return Update(arrays, loss, client=updates[0].client, num_examples=examples, weight=1)

    # -- evaluation ------------------------------------------------------------------------------------

    def configure_evaluate(self, server_round: int, config: ConfigRecord, grid: Grid) -> list[Message]:
        """Return an evaluation message for every member that has joined, if the round is evaluated."""
        self.exchange.sent = []
        run = self.settings.run
        if not schedule.evaluates(run, server_round):
            return []
        trained, present = self.strategy.record.trained, self._present()
        all_metrics = schedule.reports_all_metrics(self.settings, server_round)
        flags: dict[int, dict[str, Any]] = {
            client: {"evaluate-personal": client not in trained, ALL_METRICS: all_metrics} for client in present
        }
        if self.secure:
            same_clients = server_round < run.num_server_rounds and set(self.cohort(server_round + 1)) == {*present}
            following = self.secure.training_name(server_round + 1) if same_clients else ""
            name, weights = self.secure.evaluation_name(server_round), dict.fromkeys(present, 1)
            flags = self.secure.open(name, weights, grid, following, flags)
        return self.exchange.messages(MessageType.EVALUATE, server_round, config, flags)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Record the clients' scores, and return the mean of the run's metric over the served models."""
        record, exchange = self.strategy.record, self.exchange
        results: Collection[int] = ()
        if self.secure:
            scores = None
            if schedule.evaluates(self.settings.run, server_round):
                results, scores = self.secure.sum_evaluations(replies)
        else:
            results = exchange.collect(replies, lambda client: read_evaluation, self._accept_evaluation)
            record.evaluated = sum(record.clients[client]["n_test"] > 0 for client in results)
            record.asked = len(exchange.sent) - len(results) + record.evaluated
            exchange.lap("evaluate")
            name = self.metric.name
            served = [row[column] for row in record.clients.values() if (column := column_of("served", name)) in row]
            mean = float(np.mean(served)) if results and served else None
            scores = None if mean is None else MetricRecord({f"served-{name}": mean})
        record.unreached = [client for client in self.strategy.members if client not in results]
        exchange.report_lost()
        return scores

    def _accept_evaluation(self, client: int, evaluation: Evaluation) -> int:
        """Check an evaluation result, and record it in its client's row."""
        strategy, record = self.strategy, self.strategy.record
        check_enrolled("num-train", evaluation.num_train, strategy.clients[client].num_train)
        check_enrolled("num-examples", evaluation.num_test, strategy.clients[client].num_test)
        row = record.row(client)
        row |= {"n_train": evaluation.num_train, "n_test": evaluation.num_test}
        record.samples += evaluation.samples
        for column, value in self.recorded(evaluation.scores).items():
            row.setdefault(column, value)  # the scores of the training round take precedence
        if evaluation.chosen:
            row["chosen"] = evaluation.chosen
        return client

    def recorded(self, scores: Mapping[str, float]) -> dict[str, float]:
        """Return the scores that the run records; a client may also send others."""
        return {column: value for column, value in scores.items() if column in self.columns.all}

    def _present(self) -> list[int]:
        """Return the members that have joined."""
        return [client for client in self.strategy.members if client in self.strategy.clients]
