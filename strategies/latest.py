"""Base class of methods whose server stores each client's latest model."""

from typing import ClassVar

import numpy as np
import numpy.typing as npt

from posy.models.parameters import FloatArray
from posy.strategies.base import PersonalisedStrategy
from posy.strategies.replies import Update


class LatestModels(PersonalisedStrategy):
    """Store the latest model of every client that has trained.

    The state consists of three arrays. ``seen`` ``(m,)`` lists these clients in sorted order, and ``models`` ``(m, d)``
    holds their models. ``stateless`` ``(M,)`` is 1 for each client that has lost its state since its last update.
    """

    state: ClassVar[tuple[str, ...]] = ("seen", "models", "stateless")

    def initialise(self) -> None:
        """Start without client models."""
        self.seen: npt.NDArray[np.int64] = np.empty(0, np.int64)
        self.models: FloatArray = np.empty((0, self.size), np.float32)
        self.stateless: npt.NDArray[np.int64] = np.zeros(self.num_clients, np.int64)

    def lost(self, clients: list[int]) -> None:
        """Record that clients have lost their models, which the server still has."""
        self.stateless[clients] = 1

    def store(self, updates: list[Update]) -> None:
        """Store the models from the updates."""
        clients = [update.client for update in updates]
        trained = np.union1d(self.seen, clients)
        if len(trained) > len(self.seen):
            models = np.empty((len(trained), self.size), np.float32)
            models[np.searchsorted(trained, self.seen)] = self.models
            self.seen, self.models = trained, models
        for row, update in zip(np.searchsorted(self.seen, clients), updates, strict=True):
            self.models[row] = update.arrays["model"]
        self.stateless[clients] = 0

    def latest(self, clients: npt.NDArray[np.int64]) -> FloatArray:
        """Return the models ``(k, d)`` of some clients that have trained."""
        return self.models[np.searchsorted(self.seen, clients)]

    def client_model(self, client: int, default: FloatArray) -> FloatArray:
        """Return the model ``(d,)`` that the client stores, or a default if it stores none."""
        if client not in self.seen or self.stateless[client]:
            return default
        return self.models[np.searchsorted(self.seen, client)]
