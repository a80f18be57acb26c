"""Base class of FedACS, FedAMP and FedMTL, which use an attention matrix to mix a model for each client."""

from abc import abstractmethod
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from posy.models.parameters import FloatArray
from posy.strategies.arrays import Arrays
from posy.strategies.latest import LatestModels
from posy.strategies.replies import Update

PICTURED_ROUNDS = 4
"""Number of rounds for which the figure shows the attention matrix."""


class AttentionStrategy(LatestModels):
    """Store the latest model w_i of every client that has trained; send client i the mixture u_i = Σ_j a_ij w_j.

    A client without a model receives the mean of all models, or the initial model if there are none. The state also
    holds the mixtures ``(m, d)``, the figure's attention matrices ``(P, M, M)`` and their round numbers ``(P,)``.
    """

    state: ClassVar[tuple[str, ...]] = (*LatestModels.state, "mixed", "pictures", "pictured")

    @abstractmethod
    def attention(self, models: FloatArray) -> npt.NDArray[np.float64]:
        """Return the weights a ``(m, m)`` of models with parameters ``(m, p)``; in most methods, rows sum to 1."""

    def initialise(self) -> None:
        """Start without client models."""
        super().initialise()
        self.mixed: FloatArray = self.models
        self._unseen: tuple[FloatArray, FloatArray] | None = None
        # BatchNorm's running statistics are excluded, because they would dominate any comparison.
        self.parameters = self.architecture.layout.trainable
        self.pictures = np.empty((0, self.num_clients, self.num_clients))
        self.pictured: npt.NDArray[np.int64] = np.empty(0, np.int64)

    def serve(self, client: int) -> Arrays:
        """Return u_i, or the starting model for a client that has not trained yet."""
        if client in self.seen:
            return {"model": self.mixed[np.searchsorted(self.seen, client)]}
        return {"model": self._start_of_unseen()}

    def aggregate(self, server_round: int, updates: list[Update]) -> dict[str, Any]:
        """Store the new models, and recompute all mixtures."""
        self.store(updates)
        weights = self.attention(self.parameters.take(self.models))
        self.mixed = weights.astype(np.float32) @ self.models
        self._remember(server_round, weights)
        exchange = weights - np.diag(np.diag(weights))
        return {
            "attention_to_self": float(np.diag(weights).mean()),
            "collaborators": float((exchange > 0).sum(axis=1).mean()),
        }

    def _start_of_unseen(self) -> FloatArray:
        """Return the model for a client that has not trained yet: the mean of all models, or the initial model."""
        if self._unseen is None or self._unseen[0] is not self.mixed:  # `mixed` is a new array after each round
            self._unseen = self.mixed, self.models.mean(axis=0) if len(self.seen) else self.initial()
        return self._unseen[1]

    def _remember(self, server_round: int, weights: npt.NDArray[np.float64]) -> None:
        """Store the attention matrix for the figure in the first, the last and some intermediate rounds."""
        rounds = self.settings.run.num_server_rounds
        if server_round in {round(x) for x in np.linspace(1, rounds, PICTURED_ROUNDS)}:
            full = np.zeros((1, self.num_clients, self.num_clients))
            full[0][np.ix_(self.seen, self.seen)] = weights
            self.pictures = np.concatenate([self.pictures, full])
            self.pictured = np.append(self.pictured, server_round)
