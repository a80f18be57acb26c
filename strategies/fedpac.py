"""FedPAC (Xu et al., 2023): a shared body, features drawn to global class means, and heads combined for each client.

Each round a client trains the head that it is sent, then the body towards the class means. Of the heads of the round
the server combines one for each of these clients, with the weights that minimise an estimate of its error. The
statistics that it takes are those of the served body, which is the same for all clients. Unlike in the authors'
program, the head is trained at the rate of the body, and no small weight is set to zero.

A client that has not taken part yet is sent the mean of the heads; one that was left out of a round keeps the head that
it was sent last.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
from flwr.common.typing import NDArrays

from posy.models.architecture import Architecture
from posy.models.parameters import FloatArray
from posy.settings import Search, setting
from posy.strategies.base import PersonalisedStrategy
from posy.strategies.method_settings import MethodSettings, Refused
from posy.strategies.prototypes import check_counts, mean_prototypes
from posy.strategies.replies import BadReplyError, Update, mean_of, num_examples, stacked, weighted_mean
from posy.strategies.simplex import minimise_on_simplex


class FedPACSettings(
    MethodSettings,
    noise=Refused("it decides whose heads are combined by class means, which noise makes all alike"),
    sums=Refused("it decides whose heads are combined by the class means of single clients"),
):
    """Settings of FedPAC."""

    strength: float = setting(
        1.0, "lambda: weight of the distance to the global class means", minimum=0, search=Search(0.1, 10.0, log=True)
    )
    head_epochs: int = setting(
        1,
        "epochs on the head, before `local-epochs` on the body; with `local-steps` both take as many steps",
        minimum=1,
    )

    def personal(self, network: Architecture) -> tuple[str, ...]:
        """Give every client a head of its own."""
        return ("head",)


class FedPAC(PersonalisedStrategy):
    """Average bodies and class means; combine heads for each client (Algorithm 1).

    The state holds the body, the class means ``(C, D)`` and which classes have one ``(C,)``, and the clients' heads
    with whether they have taken part ``(M,)``.
    """

    state = ("model", "prototypes", "known", "heads", "seen")

    def initialise(self) -> None:
        """Start from the initial body and head, without any class mean."""
        super().initialise()
        self.own = self.architecture.layout.part(("head",))
        classes = self.architecture.task.num_classes
        self.prototypes: FloatArray = np.zeros((classes, self.architecture.embedding_dim), np.float32)
        self.known: FloatArray = np.zeros(classes, np.float32)
        self.heads: FloatArray = np.tile(self.own.take(self.initial()), (self.num_clients, 1))
        self.seen = np.zeros(self.num_clients, np.int64)

    def serve(self, client: int) -> NDArrays:
        """Send the body, the client's head, and the class means with 1 for each class that has one."""
        return [self.model, self.heads[client], self.prototypes, self.known]

    def expected_shapes(self, client: int) -> list[tuple[int, ...]]:
        """Expect body, head, class means and samples by class, and the statistics V_i ``()`` and h_i ``(C, D)``."""
        return [*super().expected_shapes(client), (), self.prototypes.shape]

    def check(self, arrays: NDArrays) -> None:
        """Refuse numbers of samples or a variance that cannot be."""
        check_counts(arrays[3])
        if arrays[4] < 0:
            raise BadReplyError(f"variance {float(arrays[4])}")

    def aggregate(self, server_round: int, updates: list[Update]) -> dict[str, Any]:
        """Average bodies and class means, and combine the heads of the round."""
        self.model = mean_of(updates)
        heads, means, counts, variances, products = (stacked(updates, position) for position in range(1, 6))
        self.prototypes = mean_prototypes(means, counts, self.prototypes)
        self.known = np.maximum(self.known, counts.any(axis=0)).astype(np.float32)
        weights = combination(products, variances)
        clients = [update.client for update in updates]
        self.seen[clients] = 1
        self.heads = self.heads.copy()
        self.heads[self.seen == 0] = weighted_mean(heads, num_examples(updates))
        self.heads[clients] = weights.astype(np.float32) @ heads
        return {"weight_of_own_head": float(np.diag(weights).mean())}


def combination(products: npt.ArrayLike, variances: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """Return α ``(M, M)``, whose row i weighs the heads for client i.

    It minimises Σ_j α_j² V_j + Σ_{j,k} α_j α_k tr((h_i − h_j)ᵀ (h_i − h_k)) over α ≥ 0, Σ_j α_j = 1.

    Parameters
    ----------
    products : array_like, (M, C, D)
        h_i: a client's class means times its shares of the classes.
    variances : array_like, (M,)
        V_i: the variance of the mean of (one-hot label) × feature over its samples.
    """
    h = np.asarray(products, np.float64).reshape(len(np.asarray(products)), -1)
    h = h - h.mean(axis=0)  # only differences count, and those of large numbers would lose their digits
    gram, spread = h @ h.T, np.diag(np.asarray(variances, np.float64))
    rows = []
    for i in range(len(h)):
        bias = gram[i, i] - gram[i][:, None] - gram[i][None, :] + gram
        rows.append(minimise_on_simplex(bias + spread))
    return np.array(rows)
