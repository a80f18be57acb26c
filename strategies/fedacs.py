"""FedACS: attention between client models by cosine similarity.

"Personalized Federated Learning with Attention-Based Client Selection": the server compares the clients' models and
sends each client the average of those that resemble its own.
"""

import numpy as np
import numpy.typing as npt

from posy.models.parameters import FloatArray
from posy.settings import setting
from posy.strategies.attention import AttentionStrategy
from posy.strategies.method_settings import MethodSettings, Refused

BLOCK = 16_384
"""Parameters that are taken at a time in double precision."""


class FedACSSettings(
    MethodSettings,
    noise=Refused("it decides who collaborates by the cosine similarity of single models, which noise brings to zero"),
    sums=Refused("it decides who collaborates by the cosine similarity of single models"),
):
    """Settings of FedACS."""

    p: float = setting(0.5, "quantile of the similarities below which clients do not collaborate", minimum=0, maximum=1)


class FedACS(AttentionStrategy):
    """Send client i u_i = Σ_{S_ij > δ} S_ij w_j / Σ_{S_ij > δ} S_ij (Eq. 4); clients start from it (Eq. 5)."""

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
        Parameters taken at a time in double precision, so that besides the models only O(M block + M²)
        memory is needed.

    Returns
    -------
    numpy.ndarray, float64, (M, M)
        Symmetric, the diagonal exactly 1. A model of norm zero resembles no other.
    """
    gram = np.zeros((len(models), len(models)))
    for start in range(0, models.shape[1], block):
        # Models that have hardly parted differ in digits that a product of float32 does not have.
        part = models[:, start : start + block].astype(np.float64)
        gram += part @ part.T
    norms = np.sqrt(np.diag(gram))
    scale = np.outer(norms, norms)
    similarity = np.divide(gram, scale, out=np.zeros_like(gram), where=scale > 0)
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
