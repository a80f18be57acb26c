"""The part that FedACS and FedAMP share: a model for each client, mixed by an attention matrix."""

from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from posy import figures
from posy.models.parameters import FloatArray
from posy.strategies.base import PersonalisedStrategy
from posy.strategies.replies import Arrays, Update

PICTURED_ROUNDS = 4


class AttentionStrategy(PersonalisedStrategy):
    """Keep the latest model w_i of every client seen; send client i the mix u_i = Σ_j a_ij w_j.

    A client without a model yet is sent the plain mean of those seen, or the initial model.
    """

    @abstractmethod
    def attention(self, models: FloatArray) -> npt.NDArray[np.float64]:
        """Return the weights a ``(M, M)``, rows summing to 1, for the parameters ``(M, d)`` of those seen."""

    def initialise(self) -> None:
        """Start without any client's model."""
        self.seen: list[int] = []
        self.models: FloatArray = np.empty((0, self.size), np.float32)
        self.mixed: FloatArray = self.models
        self.unseen_start = self.initial()
        # BatchNorm's running statistics are no parameters: they would outweigh these in any comparison.
        self.parameters = self.architecture.layout.select(lambda entry: entry.trainable)
        self.pictures: dict[int, npt.NDArray[np.float64]] = {}

    def serve(self, client: int) -> Arrays:
        """Send u_i."""
        if client in self.seen:
            return [self.mixed[self.seen.index(client)]]
        return [self.unseen_start]

    def expected_shapes(self, client: int) -> list[tuple[int, ...]]:
        """Expect the local model ``(d,)``."""
        return [(self.size,)]

    def aggregate(self, server_round: int, updates: list[Update]) -> dict[str, Any]:
        """Take up the new models and mix anew."""
        self._take_up(updates)
        weights = self.attention(self.parameters.take(self.models))
        self.mixed = weights.astype(np.float32) @ self.models
        self._remember(server_round, weights)
        others = weights - np.diag(np.diag(weights))
        return {
            "attention_to_self": float(np.diag(weights).mean()),
            "collaborators": float((others > 0).sum(axis=1).mean()),
        }

    def server_state(self) -> dict[str, npt.NDArray[np.generic]]:
        """Return the models of the clients seen, what they are sent, and the attention of some rounds."""
        pictures = {f"attention-{number}": matrix for number, matrix in self.pictures.items()}
        return {"clients": np.array(self.seen, np.int64), "models": self.models, "mixed": self.mixed, **pictures}

    def load_server_state(self, arrays: Mapping[str, npt.NDArray[np.generic]]) -> None:
        """Take up the clients' models."""
        self.seen = arrays["clients"].tolist()
        self.models = np.asarray(arrays["models"], np.float32)
        self.mixed = np.asarray(arrays["mixed"], np.float32)
        if self.seen:
            self.unseen_start = self.models.mean(axis=0)
        names = [name for name in arrays if name.startswith("attention-")]
        rounds = sorted(int(name.removeprefix("attention-")) for name in names)
        self.pictures = {number: np.asarray(arrays[f"attention-{number}"], np.float64) for number in rounds}

    def draw(self, folder: Path) -> None:
        """Draw the attention matrix over the rounds, clients in the order of their data's similarity."""
        if not self.pictures:
            return
        order = np.arange(self.num_clients)
        if self.class_counts is not None:
            order = figures.similarity_order(self.class_counts)
        panels = [
            figures.Panel(
                matrix[np.ix_(order, order)],
                title=f"round {number}",
                xlabel="client j",
                ylabel="client i",
                label="attention",
            )
            for number, matrix in self.pictures.items()
        ]
        figures.heatmaps(panels, folder / "attention.png", title="Attention between clients, similar data side by side")

    def _take_up(self, updates: list[Update]) -> None:
        new = [update.client for update in updates if update.client not in self.seen]
        if new:
            seen = sorted(self.seen + new)
            models = np.empty((len(seen), self.size), np.float32)
            if self.seen:
                models[[seen.index(client) for client in self.seen]] = self.models
            self.seen, self.models = seen, models
        for update in updates:
            self.models[self.seen.index(update.client)] = update.arrays[0]
        if len(self.seen) < self.num_clients:
            self.unseen_start = self.models.mean(axis=0)

    def _remember(self, server_round: int, weights: npt.NDArray[np.float64]) -> None:
        """Keep the matrices of the first, the last and some rounds between."""
        rounds = self.settings.run.num_server_rounds
        wanted = {round(x) for x in np.linspace(1, rounds, PICTURED_ROUNDS)}
        if server_round in wanted:
            full = np.zeros((self.num_clients, self.num_clients))
            full[np.ix_(self.seen, self.seen)] = weights
            self.pictures[server_round] = full
