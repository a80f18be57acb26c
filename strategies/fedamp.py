"""FedAMP (Huang et al., 2021): attentive message passing between similar clients."""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from posy.models.parameters import FloatArray
from posy.settings import Search, setting
from posy.strategies.arrays import Arrays, model, reply
from posy.strategies.attention import AttentionStrategy
from posy.strategies.card import MethodCard, Paper, Program
from posy.strategies.replies import distances_from_gram
from posy.strategies.settings import MethodSettings

if TYPE_CHECKING:
    from posy.models.architecture import Architecture
    from posy.strategies.settings import Settings

SMALLEST = 1e-30
"""Lower bound on sigma, at which only identical models attend to each other; below it, quotients might overflow."""
NEGLIGIBLE = 1e-3
"""Attention below which Posy reports that models do not attend to each other."""


class FedAMPSettings(MethodSettings, robust="its server mixes a model for each client by the distances between models"):
    """Settings of FedAMP."""

    returned = reply(
        model=model(
            noise="it selects collaborators by the distances between individual models, and noise makes these "
            "distances similar",
            sums="it selects collaborators by the distances between individual models",
        )
    )

    card = MethodCard(
        paper=Paper(
            "Huang et al.",
            2021,
            "Personalized Cross-Silo Federated Learning on Non-IID Data",
            "AAAI",
            "https://doi.org/10.1609/aaai.v35i9.16960",
        ),
        equations=(
            "A(x) = 1 − exp(−x / σ), the attention-inducing function",
            "ξ_ij = α A'(||w_i − w_j||²) for j ≠ i, and ξ_ii = 1 − Σ_j ξ_ij (Eq. 6)",
            "u_i = Σ_j ξ_ij w_j (Eq. 6)",
            "w_i minimises F_i(w) + λ / (2α) ||w − u_i||² (Eq. 4)",
        ),
        sent={"model (d,)": "u_i; for a client without a model, the mean of all models or the initial model"},
        returned={"model (d,)": "the trained model w_i"},
        reveals="the client's model, which the server stores, and thus which clients are similar",
        server_state={
            "seen": "the clients that have trained (m,)",
            "models": "their latest models (m, d)",
            "stateless": "1 for each client that has lost its state since its last update (M,)",
            "mixed": "the messages u_i (m, d)",
            "pictures": "the attention ξ in the rounds that the figure shows (P, M, M)",
            "pictured": "the corresponding round numbers (P,)",
        },
        client_state={"model": "the trained model w_i (d,)"},
        scored="The local model, because the paper's personalised models are the w_i that the clients train.",
        deviations=(
            "If the ξ_ij with j ≠ i in a row sum to more than 1, Posy rescales them so that they sum to 1. u_i "
            "therefore remains a convex combination. The paper instead requires a small enough α.",
            "Training starts from the client's own model. It starts from u_i only in the client's first round, and "
            "after the client has lost its state.",
            "Distances exclude BatchNorm's running statistics, but u_i mixes the statistics with the same weights.",
            "PFLlib computes the proximal term from detached tensors. The term therefore has no gradient, so PFLlib's "
            "clients train alone. `fedamp-strength = 0` has the same effect.",
        ),
        program=Program(
            "TsingZ0/PFLlib",
            "d832e76f6a23b833038949ec1e4fdefe63a4d350",
            "system/flcore/servers/serveramp.py: FedAMP.send_models; "
            "system/flcore/clients/clientamp.py: clientAMP.train",
            1e-6,
            by_authors=False,
        ),
    )
    alpha: float = setting(
        1000.0, "step size alpha of the server's gradient step", source="cwFedAvg's Table 5", above=0
    )
    strength: float = setting(
        1.0,
        "lambda: weight of the clients' proximal term",
        source="cwFedAvg's Table 5",
        minimum=0,
        search=Search(0.01, 100.0, log=True),
    )
    distance: str = setting(
        "squared",
        "distance in the proximal term: squared, as in Eq. 4, or the norm, as in PFLlib's formula",
        source="Eq. 4",
        needs="fedamp-strength > 0",
        choices=("squared", "norm"),
    )
    sigma: float = setting(
        0.1,
        "sigma of the attention-inducing function 1 - exp(-x / sigma)",
        source="cwFedAvg's Table 5",
        above=0,
        search=Search(0.01, 100.0, log=True),
    )

    def refusals(self) -> Mapping[str, str]:
        """Reject ``client-weights``, because the attention determines the weights."""
        reason = "the attention determines the weights of the clients' models"
        return {"client-weights": reason, "max-client-weight": reason}

    def notices(self, settings: "Settings", network: "Architecture") -> tuple[str, ...]:
        """Report the distance beyond which models do not attend to each other."""
        limit = farthest(self.alpha, self.sigma)
        return (
            f"models at an L2 distance above {limit:.3g} do not attend to each other (set by fedamp-sigma); if all "
            "models are farther apart, each client trains alone, and attention_to_self in the record is 1",
        )


class FedAMP(AttentionStrategy):
    """Send client i the model u_i = Σ_j ξ_ij w_j (Eq. 6), towards which the client pulls its model (Eq. 4)."""

    method: FedAMPSettings

    def attention(self, models: FloatArray) -> npt.NDArray[np.float64]:
        """Return ξ ``(M, M)``."""
        return message_weights(models, self.method.alpha, self.method.sigma)

    def reference(self, client: int, arrays: Arrays) -> Arrays:
        """Return the model from which the client's training starts: the client's model, or u_i if there is none."""
        return {"model": self.client_model(client, self.serve(client)["model"])}


def farthest(alpha: float, sigma: float) -> float:
    """Return the distance between two models at which α A'(distance²) is 1/1000, or 0 if there is none."""
    sigma = max(sigma, SMALLEST)
    return math.sqrt(max(sigma * math.log(alpha / sigma / NEGLIGIBLE), 0.0)) if alpha / sigma < math.inf else math.inf


def message_weights(models: FloatArray, alpha: float, sigma: float) -> npt.NDArray[np.float64]:
    """Return ξ_ij = α A'(||w_i − w_j||²) for j ≠ i and ξ_ii = 1 − Σ_j ξ_ij, with A(x) = 1 − exp(−x/σ).

    The paper chooses α small enough that ξ_ii ≥ 0. If the ξ_ij with j ≠ i in a row sum to more than 1, the function
    rescales them so that they sum to 1. u_i therefore remains a convex combination.

    Parameters
    ----------
    models : numpy.ndarray, float32, (M, d)
        The clients' models.
    alpha : float
        Step size α.
    sigma : float
        σ.

    Returns
    -------
    numpy.ndarray, float64, (M, M)
    """
    squared, sigma = squared_distances(models), max(sigma, SMALLEST)
    weights = alpha * np.exp(-squared / sigma) / sigma
    np.fill_diagonal(weights, 0.0)
    totals = weights.sum(axis=1, keepdims=True)
    weights /= np.maximum(totals, 1.0)
    np.fill_diagonal(weights, 1.0 - weights.sum(axis=1))
    return weights


def squared_distances(models: FloatArray) -> npt.NDArray[np.float64]:
    """Return ||w_i − w_j||² ``(M, M)``, never negative.

    The function subtracts the mean before it computes inner products. Otherwise, cancellation in ||w_i||² + ||w_j||² −
    2 <w_i, w_j> would destroy all significant digits of the distance between similar models.

    Parameters
    ----------
    models : numpy.ndarray, float32, (M, d)
        The clients' models.
    """
    centred = models - models.mean(axis=0)
    return distances_from_gram((centred @ centred.T).astype(np.float64))
