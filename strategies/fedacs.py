"""FedACS: attention between client models by cosine similarity.

"Personalized Federated Learning with Attention-Based Client Selection": the server compares the clients' models and
sends each client the average of those that resemble its own.
"""

import numpy as np
import numpy.typing as npt
from flwr.common.typing import NDArrays

from posy.models.parameters import FloatArray
from posy.settings import Search, setting
from posy.strategies.attention import AttentionStrategy
from posy.strategies.method_settings import MethodSettings, Refused
from posy.strategies.replies import BLOCK, gram


class FedACSSettings(
    MethodSettings,
    noise=Refused("it decides who collaborates by the cosine similarity of single models, which noise brings to zero"),
    sums=Refused("it decides who collaborates by the cosine similarity of single models"),
    point="served",
):
    """Settings of FedACS."""

    p: float = setting(
        0.5,
        "quantile of the similarities below which clients do not collaborate",
        minimum=0,
        maximum=1,
        search=Search(0.0, 1.0),
    )
    initialisation: str = setting(
        "same",
        "initial models of the clients: one for all, or each its own (Algorithm 1, line 1)",
        choices=("same", "own"),
    )


class FedACS(AttentionStrategy):
    """Send client i u_i = Σ_{S_ij > δ} S_ij w_j / Σ_{S_ij > δ} S_ij (Eq. 4); clients start from it (Eq. 5).

    Where initial models are the clients' own, a client without a trained model starts from its own.
    """

    def serve(self, client: int) -> NDArrays:
        """Send u_i; to a client that has not trained yet its own initial model, if it has one."""
        # A newcomer has none: as everywhere, it is sent the mean.
        if self.method.initialisation == "own" and client in self.members and client not in self.seen:
            return [self.initial(client)]
        return super().serve(client)

    def attention(self, models: FloatArray) -> npt.NDArray[np.float64]:
        """Return the normalised attention ``(M, M)``."""
        return attention_weights(cosine_similarity(models), self.method.p)


def cosine_similarity(models: FloatArray, block: int = BLOCK) -> npt.NDArray[np.float64]:
    """Return S_ij = <w_i, w_j> / (||w_i|| ||w_j||) over all parameters (Section 2.2).

    Parameters
    ----------
    models : numpy.ndarray, float32, (M, d)
        The clients' models.
    block : int
        As for :func:`~posy.strategies.replies.gram`.

    Returns
    -------
    numpy.ndarray, float64, (M, M)
        Symmetric, the diagonal exactly 1. A model of norm zero resembles no other.
    """
    products = gram(models, block)
    norms = np.sqrt(np.diag(products))
    scale = np.outer(norms, norms)
    similarity = np.divide(products, scale, out=np.zeros_like(products), where=scale > 0)
    similarity = np.clip((similarity + similarity.T) / 2, -1.0, 1.0)
    np.fill_diagonal(similarity, 1.0)
    return similarity


def attention_weights(similarity: npt.NDArray[np.float64], p: float) -> npt.NDArray[np.float64]:
    """Return the weights of Eq. 4, rows summing to 1.

    δ is the p-quantile of all elements of S. Client i always takes part in its own average, also where
    rounding or identical models make δ ≥ 1; similarities ≤ 0 are left out.

    Parameters
    ----------
    similarity : numpy.ndarray, (M, M)
        S, diagonal 1.
    p : float
        0: all but the least similar take part; 1: local training only.
    """
    delta = np.quantile(similarity, p)
    kept = np.where((similarity > delta) & (similarity > 0), similarity, 0.0)
    np.fill_diagonal(kept, 1.0)
    return kept / kept.sum(axis=1, keepdims=True)
