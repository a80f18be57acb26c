"""FedAS (Yang et al., 2024): received bodies are aligned with the client's own, and weighted by Fisher information.

A client first trains the body that it receives towards the class prototypes of its own model of its last round, then
the whole network. The server weighs bodies by the trace of the Fisher information. As in the authors' program it is
taken over mini-batches, so that it depends on `batch-size`: the squared norm of the gradient of each one's mean
log-likelihood. The program adds these up. Here the client sends their mean, and the server multiplies it by n_i.
"""

from typing import TYPE_CHECKING, Any

import numpy as np
from flwr.common.typing import NDArrays

from posy.settings import Search, setting
from posy.strategies.base import PersonalisedStrategy
from posy.strategies.method_settings import ALLOWED, MethodSettings, Refused
from posy.strategies.replies import BadReplyError, Update, num_examples, stacked, weighted_mean

if TYPE_CHECKING:
    from posy.models.architecture import Architecture


class FedASSettings(
    MethodSettings, noise=ALLOWED, sums=Refused("it weighs bodies by what each client tells of its own training")
):
    """Settings of FedAS."""

    align_epochs: int = setting(1, "epochs of alignment before local training; 0: none", minimum=0, search=Search(0, 3))

    def personal(self, network: "Architecture") -> tuple[str, ...]:
        """Keep the head."""
        return ("head",)


class FedAS(PersonalisedStrategy):
    """Average bodies with weights n_i F_i (client synchronisation)."""

    def expected_shapes(self, client: int) -> list[tuple[int, ...]]:
        """Expect the body, and the trace F_i of the Fisher information ``()``."""
        return [*super().expected_shapes(client), ()]

    def check(self, arrays: NDArrays) -> None:
        """Refuse a trace that cannot be."""
        if arrays[1] < 0:
            raise BadReplyError(f"trace of the Fisher information {float(arrays[1])}")

    def aggregate(self, server_round: int, updates: list[Update]) -> dict[str, Any]:
        """Average the bodies; if no client has any Fisher information, by samples alone."""
        n = num_examples(updates)
        weights = n * stacked(updates, 1)
        weights = weights if weights.any() else n
        self.model = weighted_mean(stacked(updates), weights)
        return {"largest_weight": float(np.max(weights) / np.sum(weights))}
