"""FedMTL (Smith et al., 2017): a model for each client, tied to the others' by how their tasks are related.

Of MOCHA this is the objective, min Σ_i F_i(w_i) + λ/2 tr(W Ω Wᵀ) over the clients' models W = (w_1 … w_M) (Eq. 1, with
mean losses F_i and λ1 = λ/2; λ2 is the setting ``weight-decay``), and its alternation between W and Ω. The dual solver
needs convex losses: for networks clients take SGD steps on w_i while the other models stand still. ``served`` and
``local`` both report the client's own model: there is no other.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from posy.models.parameters import FloatArray
from posy.settings import Search, setting
from posy.strategies.attention import AttentionStrategy
from posy.strategies.method_settings import MethodSettings, Refused
from posy.strategies.replies import gram

Float64 = npt.NDArray[np.float64]


class FedMTLSettings(
    MethodSettings,
    noise=Refused("it relates the clients by their single models, which noise makes all alike"),
    sums=Refused("its server keeps every client's model, and sends each what belongs to its own"),
):
    """Settings of FedMTL."""

    strength: float = setting(
        0.1, "lambda: strength of the ties between the clients' models", minimum=0, search=Search(0.001, 1.0, log=True)
    )
    relations: str = setting(
        "mean",
        "Omega: `mean` ties every model to the mean of all, `learnt` reads the relations off the models",
        choices=("mean", "learnt"),
    )


class FedMTL(AttentionStrategy):
    """Send client i what the gradient λ Σ_j Ω_ij w_j of its tie needs: −Σ_{j≠i} Ω_ij w_j / Ω_ii, and λ Ω_ii.

    Besides what the base keeps, the state holds Ω_ii of the clients seen ``(m,)``.
    """

    state = (*AttentionStrategy.state, "own")

    def initialise(self) -> None:
        """Start without any client's model."""
        super().initialise()
        self.own: Float64 = np.empty(0)

    def attention(self, models: FloatArray) -> Float64:
        """Return −Ω_ij / Ω_ii, on the diagonal 0."""
        count = len(models)
        omega = learnt_relations(gram(models)) if self.method.relations == "learnt" else np.eye(count) - 1 / count
        self.own = np.diag(omega).copy()
        weights = -omega / np.maximum(self.own, np.finfo(np.float64).tiny)[:, None]
        np.fill_diagonal(weights, 0.0)
        return weights

    def train_config(self, server_round: int, client: int) -> dict[str, Any]:
        """Tell the strength λ Ω_ii; a client that has no model yet counts as one more in the mean."""
        place, count = np.searchsorted(self.seen, client), len(self.seen)
        own = self.own[place] if client in self.seen else 1 - 1 / (count + 1)
        return {"tie": self.method.strength * float(own)}


def learnt_relations(products: Float64) -> Float64:
    """Return Ω = (M Σ + I)⁻¹ with Σ = (WᵀW)^{1/2} / tr (WᵀW)^{1/2} (after Zhang and Yeung, 2010).

    MOCHA's Ω is Σ⁻¹, which models that are alike make infinite: 1/M is added to the diagonal first, and the inverse
    divided by M, so that λ means the same for any number of clients. Equal models give I − 11ᵀ / (M + 1), nearly the
    ties to their mean; those at right angles and of one length I / 2, no ties at all.

    Parameters
    ----------
    products : numpy.ndarray, (M, M)
        WᵀW, the inner products of the clients' models.
    """
    values, vectors = np.linalg.eigh(products)
    roots = np.sqrt(np.maximum(values, 0.0))
    shares = roots / max(roots.sum(), np.finfo(np.float64).tiny)
    return (vectors / (1 + len(roots) * shares)) @ vectors.T
