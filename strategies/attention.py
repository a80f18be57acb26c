"""The part that FedACS, FedAMP and FedMTL share: a model for each client, mixed by an attention matrix."""

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
from flwr.common.typing import NDArrays

from posy.models.parameters import FloatArray
from posy.strategies.latest import LatestModels
from posy.strategies.replies import Update

PICTURED_ROUNDS = 4
"""The number of rounds whose attention matrices are drawn."""


class AttentionStrategy(LatestModels):
    """Store the latest model w_i of every client that has trained; send client i the mixture u_i = Σ_j a_ij w_j.

    A client without a model receives the mean of all models, or the initial model. The state also holds the mixtures
    ``(m, d)``, and the attention ``(P, M, M)`` in the rounds of the picture ``(P,)``.
    """

    state: ClassVar[tuple[str, ...]] = (*LatestModels.state, "mixed", "pictures", "pictured")

    @abstractmethod
    def attention(self, models: FloatArray) -> npt.NDArray[np.float64]:
        """Return the weights a ``(m, m)`` of m models with parameters ``(m, p)``; in most methods rows sum to 1."""

    def initialise(self) -> None:
        """Start without any client's model."""
        super().initialise()
        self.mixed: FloatArray = self.models
        self.unseen_start = self.initial()
        # BatchNorm's running statistics are no parameters: they would dominate any comparison.
        self.parameters = self.architecture.layout.trainable
        self.pictures = np.empty((0, self.num_clients, self.num_clients))
        self.pictured: npt.NDArray[np.int64] = np.empty(0, np.int64)

    def serve(self, client: int) -> NDArrays:
        """Send u_i."""
        return [self.mixed[np.searchsorted(self.seen, client)] if client in self.seen else self.unseen_start]

    def aggregate(self, server_round: int, updates: list[Update]) -> dict[str, Any]:
        """Store the new models, and mix all models again."""
        self.take_up(updates)
        self._prepare_unseen()
        weights = self.attention(self.parameters.take(self.models))
        self.mixed = weights.astype(np.float32) @ self.models
        self._remember(server_round, weights)
        exchange = weights - np.diag(np.diag(weights))
        return {
            "attention_to_self": float(np.diag(weights).mean()),
            "collaborators": float((exchange > 0).sum(axis=1).mean()),
        }

    def load_server_state(self, arrays: Mapping[str, npt.NDArray[np.generic]]) -> None:
        """Load a state, and prepare the model for clients without one."""
        super().load_server_state(arrays)
        self._prepare_unseen()

    def _prepare_unseen(self) -> None:
        if 0 < len(self.seen) < self.num_clients:
            self.unseen_start = self.models.mean(axis=0)

    def _remember(self, server_round: int, weights: npt.NDArray[np.float64]) -> None:
        """Store the matrices of the first, the last and some intermediate rounds."""
        rounds = self.settings.run.num_server_rounds
        if server_round in {round(x) for x in np.linspace(1, rounds, PICTURED_ROUNDS)}:
            full = np.zeros((1, self.num_clients, self.num_clients))
            full[0][np.ix_(self.seen, self.seen)] = weights
            self.pictures = np.concatenate([self.pictures, full])
            self.pictured = np.append(self.pictured, server_round)
