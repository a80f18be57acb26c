"""Limits on the influence of individual clients, and the rule that combines their models."""

from collections.abc import Callable
from logging import INFO, WARNING
from typing import Any

import numpy as np
import numpy.typing as npt
from flwr.common.logger import log

from posy.data.settings import SITES
from posy.models.parameters import FloatArray, Layout, Part
from posy.strategies.arrays import Arrays
from posy.strategies.bounds import NORM_RATIO, clipping_factors, share_factors, site_share
from posy.strategies.hooks import ServerHooks
from posy.strategies.replies import BadReplyError, Update, changes, norm_of, sample_counts
from posy.strategies.robust import Rule, median, trimmed_mean
from posy.strategies.run_settings import AUTO
from posy.words import describe_clients


class Influence:
    """A run's limits on update norms and client weights, and its robust rule.

    Parameters
    ----------
    strategy : ServerHooks
        The strategy whose record lists the limited clients.
    """

    def __init__(self, strategy: ServerHooks) -> None:
        self.strategy = strategy
        self.run, self.method = strategy.settings.run, strategy.method
        self.rule = Rule.of(self.run)
        """The rule that replaces the weighted mean, or None to keep the weighted mean."""
        self.exchanged: Callable[[], tuple[Layout, Part]] = lambda: (strategy.architecture.layout, strategy.shared)
        """Function that returns the layout of the network that clients train in this round, and the part they send."""

    @property
    def norm_ratio(self) -> float:
        """The maximum norm of an update, as a multiple of the round's median norm; 0 means no limit."""
        run = self.run
        if run.secure_aggregation or "max-norm-ratio" in self.method.refusals():
            return 0.0
        if run.max_norm_ratio == AUTO:
            return NORM_RATIO if self.strategy.settings.data.dataset == SITES else 0.0
        return float(run.max_norm_ratio)

    def largest_share(self, clients: int) -> float:
        """Return a client's maximum fraction of the total weight of ``clients`` clients; 1 means no limit."""
        run = self.run
        unweighted = self.rule is not None and not self.rule.weighs
        if run.secure_aggregation or unweighted or "max-client-weight" in self.method.refusals():
            return 1.0
        if run.max_client_weight == AUTO:
            return site_share(clients) if self.strategy.settings.data.dataset == SITES else 1.0
        return float(run.max_client_weight)

    @property
    def least_replies(self) -> int:
        """The minimum number of updates that a round needs to succeed."""
        return max(self.run.min_train_replies, self.rule.least if self.rule else 1)

    def too_few(self, replies: int) -> str:
        """Return the reason why a round fails with this number of accepted replies."""
        run = self.run
        if self.rule and replies < self.rule.least:
            return (
                f"{replies} accepted replies, but robust = {run.robust} with max-attackers = {run.max_attackers} "
                f"needs {self.rule.least}"
            )
        return f"{replies} accepted replies, but min-train-replies = {run.min_train_replies}"

    def note(self, kind: str, clients: list[int], limited: npt.NDArray[np.bool_]) -> None:
        """Record and log the clients whose updates are ``clipped``, ``discarded`` or ``down_weighted``.

        Parameters
        ----------
        kind : str
            The name of a list in :class:`~posy.strategies.replies.RoundRecord`.
        clients : list of int
            The clients to consider, sorted.
        limited : numpy.ndarray, bool, (M,)
            Which of these clients are limited.
        """
        record, strategy = self.strategy.record, self.strategy
        recorded: list[int] = getattr(record, kind)
        fresh = [client for client in np.asarray(clients)[limited].tolist() if client not in recorded]
        if not fresh:
            return
        recorded += fresh
        names = {client: info.name for client, info in strategy.clients.items() if info.name}
        log(
            INFO,
            "round %s: %s %s",
            record.number,
            describe_clients(fresh, names, strategy.num_clients),
            kind.replace("_", "-"),
        )

    def check_norm(self, client: int, arrays: Arrays) -> None:
        """Raise :class:`BadReplyError` if an update's norm exceeds ``max-update-norm`` before clipping."""
        if not (limit := self.run.max_update_norm):
            return
        client_changes = self._changes(client, arrays)
        norm = norm_of([array[..., self.is_parameter(array)] for array in client_changes.values()])
        if not norm <= limit:
            log(WARNING, "round %s, client %s: an update of norm %.6g", self.strategy.record.number, client, norm)
            raise BadReplyError(f"the norm of the update exceeds max-update-norm = {limit:g}")

    def limit(self, updates: list[Update]) -> None:
        """Clip the updates of a round, and limit the clients' weights."""
        sent = [update for update in updates if update.arrays]
        if len(sent) < 2:
            return
        if ratio := self.norm_ratio:
            self._clip(sent, ratio)
        largest = self.largest_share(len(sent))
        if largest < 1:
            weight_factors = share_factors(self.strategy.mean_weights(sent), largest)
            sums_samples = self.strategy.sums_samples
            samples_factors = share_factors(sample_counts(sent), largest) if sums_samples else np.ones(len(sent))
            for update, weight_factor, samples_factor in zip(sent, weight_factors, samples_factors, strict=True):
                update.weight_factor, update.samples_factor = float(weight_factor), float(samples_factor)
            limited: npt.NDArray[np.bool_] = np.less(np.minimum(weight_factors, samples_factors), 1)
            self.note("down_weighted", [update.client for update in sent], limited)

    def _clip(self, updates: list[Update], ratio: float) -> None:
        """Scale down the updates with a norm above ``ratio`` times the median norm.

        BatchNorm's running statistics have a separate norm and median, so that a client cannot hide a change to them.
        """
        norms = np.zeros((2, len(updates)))  # rows: parameters, running statistics
        for number, update in enumerate(updates):
            client_changes = self._changes(update.client, update.arrays)
            masks = {name: self.is_parameter(array) for name, array in client_changes.items()}
            norms[0, number] = norm_of([array[..., masks[name]] for name, array in client_changes.items()])
            norms[1, number] = norm_of([array[..., ~masks[name]] for name, array in client_changes.items()])
        factors = np.stack([clipping_factors(row, ratio) for row in norms])
        clipped: npt.NDArray[np.bool_] = np.less(factors.min(axis=0), 1)
        for number in np.flatnonzero(clipped).tolist():
            update = updates[number]
            references = self.strategy.reference(update.client, update.arrays)
            for name, change in self._changes(update.client, update.arrays).items():
                scaled = np.where(self.is_parameter(change), *factors[:, number]) * change
                update.arrays[name] = (references[name] + scaled).astype(np.float32)
        self.note("clipped", [update.client for update in updates], clipped)

    def _changes(self, client: int, arrays: Arrays) -> dict[str, npt.NDArray[np.float64]]:
        """Return the client's changes to the arrays that the limits cover."""
        references = self.strategy.reference(client, arrays)
        names = [name for name in arrays if self.method.returned[name].limited]
        return dict(zip(names, changes([arrays[n] for n in names], [references[n] for n in names]), strict=True))

    @property
    def has_statistics(self) -> bool:
        """Whether the network has BatchNorm running statistics."""
        layout, _ = self.exchanged()
        return layout.trainable.size < layout.size

    def is_parameter(self, array: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
        """Return a mask of the entries along an array's last axis that are not BatchNorm running statistics.

        If an array is neither a model nor a model's shared part, all its entries count as parameters.
        """
        layout, shared = self.exchanged()
        parameters = layout.trainable
        is_parameter = parameters.put(np.zeros(layout.size, np.bool_), np.ones(parameters.size, np.bool_))
        for mask in (is_parameter, shared.take(is_parameter)):
            if array.shape[-1:] == mask.shape:
                return mask
        return np.ones(array.shape[-1:], np.bool_)

    def combine(self, models: FloatArray, start: FloatArray, weights: npt.NDArray[Any], clients: list[int]) -> Any:
        """Combine models into one ``(d,)`` by the rule that the setting ``robust`` selects.

        Distances between models exclude BatchNorm's running statistics, which :meth:`combine_statistics` combines.

        Parameters
        ----------
        models : numpy.ndarray, float32, (M, d)
            The clients' models.
        start : numpy.ndarray, float32, (d,)
            The model that the clients started from.
        weights : numpy.ndarray, (M,)
            The clients' weights.
        clients : list of int
            The clients' indices, which identify limited clients in the record.
        """
        assert self.rule is not None
        is_parameter = self.is_parameter(start)
        combined = self.rule.combine(models[:, is_parameter], start[is_parameter], weights)
        model = np.empty_like(models[0])
        model[is_parameter] = combined.model
        model[~is_parameter] = self.combine_statistics(models[:, ~is_parameter])
        if combined.shares is not None:
            is_trimmed_mean = self.rule.name == "trimmed-mean"
            plain = np.full(len(weights), 1 / len(weights)) if is_trimmed_mean else weights / weights.sum()
            self.note("discarded", clients, combined.shares == 0)
            self.note("down_weighted", clients, (combined.shares > 0) & (combined.shares < plain / 2))
        return model

    def combine_statistics(self, statistics: FloatArray) -> FloatArray:
        """Combine the clients' BatchNorm running statistics ``(M, s)`` into one vector ``(s,)``.

        The result is the trimmed mean for ``robust = trimmed-mean``, and the median for the other rules.
        """
        assert self.rule is not None
        is_trimmed_mean = self.rule.name == "trimmed-mean"
        return trimmed_mean(statistics, self.rule.trim).model if is_trimmed_mean else median(statistics)
