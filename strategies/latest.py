"""The part that methods share whose server knows each client's model."""

from typing import ClassVar

import numpy as np
import numpy.typing as npt

from posy.models.parameters import FloatArray
from posy.strategies.base import PersonalisedStrategy
from posy.strategies.replies import Update


class LatestModels(PersonalisedStrategy):
    """Keep the latest model of every client seen: the clients ``(m,)``, sorted, and their models ``(m, d)``."""

    state: ClassVar[tuple[str, ...]] = ("seen", "models")

    def initialise(self) -> None:
        """Start without any client's model."""
        self.seen: npt.NDArray[np.int64] = np.empty(0, np.int64)
        self.models: FloatArray = np.empty((0, self.size), np.float32)

    def take_up(self, updates: list[Update]) -> None:
        """Take up the models that clients have sent."""
        clients = [update.client for update in updates]
        seen = np.union1d(self.seen, clients)
        if len(seen) > len(self.seen):
            models = np.empty((len(seen), self.size), np.float32)
            models[np.searchsorted(seen, self.seen)] = self.models
            self.seen, self.models = seen, models
        for place, update in zip(np.searchsorted(self.seen, clients), updates, strict=True):
            self.models[place] = update.arrays[0]

    def latest(self, clients: npt.NDArray[np.int64]) -> FloatArray:
        """Return the models of some clients seen ``(k, d)``."""
        return self.models[np.searchsorted(self.seen, clients)]
