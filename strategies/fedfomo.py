"""FedFomo (Zhang et al., 2021): each client takes over from other clients' models what helps it.

The paper weighs models by their loss on a validation split of the client. Here that is where a run has one
(``validation-fraction``); else it is the training split.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
from flwr.common.typing import NDArrays

from posy.randomness import numpy_generator
from posy.settings import Search, setting
from posy.strategies.latest import LatestModels
from posy.strategies.method_settings import MethodSettings, Refused
from posy.strategies.replies import Update

NONE = -1
"""Stands for no client."""


class FedFomoSettings(
    MethodSettings,
    noise=Refused("its clients weigh each other's single models, and the weights they send cannot be noised"),
    sums=Refused("its clients are sent each other's models"),
):
    """Settings of FedFomo."""

    models: int = setting(
        5,
        "number of other clients' models that a client is sent, at most",
        minimum=0,
        maximum=1000,
        search=Search(1, 10),
    )
    epsilon: float = setting(0.3, "how often one of them is drawn at random, not by affinity", minimum=0, maximum=1)


class FedFomo(LatestModels):
    """Send client i the models that have helped it most (Section 3.3).

    The state holds besides the affinity P ``(M, M)``, and whose models each client is sent next ``(M, k)``.
    """

    state = (*LatestModels.state, "affinity", "sent")

    def initialise(self) -> None:
        """Start without models; P is the identity."""
        super().initialise()
        self.affinity = np.eye(self.num_clients)
        width = min(self.method.models, self.num_clients - 1)
        self.sent: npt.NDArray[np.int64] = np.full((self.num_clients, width), NONE)

    def serve(self, client: int) -> NDArrays:
        """Send others' models ``(k, d)``: none before there are any."""
        return [self.latest(self._sent_to(client))]

    def expected_shapes(self, client: int) -> list[tuple[int, ...]]:
        """Expect the client's model ``(d,)``, and how much those that it was sent help it ``(k,)``."""
        return [(self.size,), (len(self._sent_to(client)),)]

    def reference(self, client: int, arrays: NDArrays) -> NDArrays:
        """Return the client's latest model, which it was not sent: it has it."""
        return [self.latest(np.array([client]))[0] if client in self.seen else self.initial()]

    def aggregate(self, server_round: int, updates: list[Update]) -> dict[str, Any]:
        """Take up models and weights, P_ij ← P_ij + w_ij, and choose whose models each client is sent next."""
        self.affinity = self.affinity.copy()
        for update in updates:
            self.affinity[update.client, self._sent_to(update.client)] += update.arrays[1]
        self.take_up(updates)
        self.sent = np.full_like(self.sent, NONE)
        for client in range(self.num_clients):
            generator = numpy_generator(self.settings.run.seed, "fedfomo", server_round, client)
            others = self.seen[self.seen != client]
            own = chosen(self.affinity[client, others], self.sent.shape[1], self.method.epsilon, generator)
            self.sent[client, : len(own)] = others[own]
        helpful = [float((update.arrays[1] > 0).mean()) for update in updates if len(update.arrays[1])]
        return {"helpful_models": float(np.mean(helpful))} if helpful else {}

    def _sent_to(self, client: int) -> npt.NDArray[np.int64]:
        """Return whose models a client is sent ``(k,)``."""
        row = self.sent[client]
        return row[row != NONE]


def chosen(affinity: npt.NDArray[np.float64], count: int, epsilon: float, generator: np.random.Generator) -> list[int]:
    """Return the places of the largest affinities ``(m,)``, each with probability ε any of the others instead.

    Of equals any may come first.
    """
    shuffled = generator.permutation(len(affinity))
    order = shuffled[np.argsort(-affinity[shuffled], kind="stable")].tolist()
    found: list[int] = []
    while order and len(found) < count:
        any_of_them = generator.random() < epsilon
        found.append(order.pop(int(generator.integers(len(order))) if any_of_them else 0))
    return found
