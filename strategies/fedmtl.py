"""FedMTL (Smith et al., 2017): each client has its own model, and relations between the tasks tie the models together.

The method minimises MOCHA's objective, Σ_i F_i(w_i) + λ/2 tr(W Ω Wᵀ), over the clients' models W = (w_1 … w_M) and
over Ω (Eq. 1, with mean losses F_i and λ1 = λ/2; λ2 is the setting ``weight-decay``). In each round, the clients first
take SGD steps on w_i, and the server then updates Ω. ``served`` and ``local`` both score the client's own model.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from posy.models.parameters import FloatArray
from posy.settings import Search, setting
from posy.strategies.arrays import Arrays, model, reply
from posy.strategies.attention import AttentionStrategy
from posy.strategies.card import MethodCard, Paper
from posy.strategies.replies import gram
from posy.strategies.settings import MethodSettings

if TYPE_CHECKING:
    from posy.models.architecture import Architecture
    from posy.strategies.settings import Settings

Float64 = npt.NDArray[np.float64]


class FedMTLSettings(
    MethodSettings, robust="its server stores every client's model and relates the models to each other"
):
    """Settings of FedMTL."""

    returned = reply(
        model=model(
            noise="it derives the relations from individual models, and noise makes these models equally similar",
            sums="its server stores every client's model, and sends each client the anchor for its own model",
        )
    )

    card = MethodCard(
        paper=Paper(
            "Smith et al.",
            2017,
            "Federated Multi-Task Learning",
            "NeurIPS",
            "https://papers.nips.cc/paper/7029-federated-multi-task-learning",
        ),
        equations=(
            "min over W and Ω of Σ_i F_i(w_i) + λ/2 tr(W Ω Wᵀ), W = (w_1 … w_M) (Eq. 1 with λ1 = λ/2)",
            "`relations=mean`: Ω = I − 11ᵀ / M, which ties each model to the mean of all models",
            "`relations=learnt`: Ω = (M Σ + I)⁻¹, Σ = (WᵀW)^{1/2} / tr (WᵀW)^{1/2} (the trace-norm relation of MOCHA)",
        ),
        sent={"model (d,)": "the anchor −Σ_{j≠i} Ω_ij w_j / Ω_ii; λ Ω_ii is in the message's config"},
        returned={"model (d,)": "the trained model w_i"},
        reveals="the client's model, which the server stores, and thus which clients are similar",
        server_state={
            "seen": "the clients that have trained (m,)",
            "models": "their latest models (m, d)",
            "stateless": "1 for each client that has lost its state since its last update (M,)",
            "mixed": "the anchors sent to them (m, d)",
            "pictures": "the attention −Ω_ij / Ω_ii in the rounds that the figure shows (P, M, M)",
            "pictured": "the corresponding round numbers (P,)",
            "own": "Ω_ii of the clients that have trained (m,)",
        },
        client_state={"model": "the trained model w_i (d,)"},
        scored="The local model, because each task has one model, which its client trains.",
        deviations=(
            "The clients take SGD steps on w_i, because MOCHA's dual solver needs convex losses.",
            "F_i is a mean loss, and all clients have the same weight. The paper sums the losses of all samples.",
            "The server updates Ω in each round, whereas the paper alternates between W and Ω.",
            "Σ has 1/M added to its diagonal before the inversion, because equal models make it singular.",
            "λ2 of Eq. 1 is the setting `weight-decay`.",
            "Ties and relations exclude BatchNorm's running statistics.",
        ),
        no_program=(
            "The authors' program (gingsmith/fmtl) is MATLAB code for linear support vector machines. PFLlib computes "
            "its regulariser from detached tensors. This regulariser has no gradient, so PFLlib's clients train alone."
        ),
    )
    strength: float = setting(
        0.1,
        "lambda: strength of the ties between the clients' models",
        source="choice: the paper tunes it by cross-validation",
        minimum=0,
        search=Search(0.001, 1.0, log=True),
    )
    relations: str = setting(
        "mean",
        "Omega: `mean` ties every model to the mean of all models; `learnt` derives the relations from the models",
        source="choice: PFLlib's relations are fixed too",
        needs="fedmtl-strength > 0",
        choices=("mean", "learnt"),
    )

    def refusals(self) -> Mapping[str, str]:
        """Reject ``client-weights``, because the relations determine the weights."""
        reason = "the relations between the clients determine the weights of their models"
        return {"client-weights": reason, "max-client-weight": reason}

    def notices(self, settings: "Settings", network: "Architecture") -> tuple[str, ...]:
        """Warn if there are no ties, because clients then train alone."""
        return (
            ()
            if self.strength
            else ("with fedmtl-strength = 0, the models have no ties, so the run is equivalent to local training",)
        )


class FedMTL(AttentionStrategy):
    """Send client i the anchor of its regulariser, −Σ_{j≠i} Ω_ij w_j / Ω_ii, and the strength λ Ω_ii.

    The gradient of the tie, λ Σ_j Ω_ij w_j, is λ Ω_ii (w_i − anchor). The state also holds Ω_ii of the clients that
    have trained ``(m,)``.
    """

    state = (*AttentionStrategy.state, "own")
    method: FedMTLSettings

    def initialise(self) -> None:
        """Start without client models."""
        super().initialise()
        self.own: Float64 = np.empty(0)

    def attention(self, models: FloatArray) -> Float64:
        """Return −Ω_ij / Ω_ii ``(m, m)``, with zeros on the diagonal."""
        count = len(models)
        omega = learnt_relations(gram(models)) if self.method.relations == "learnt" else np.eye(count) - 1 / count
        self.own = np.diag(omega).copy()
        weights = -omega / np.maximum(self.own, np.finfo(np.float64).tiny)[:, None]
        np.fill_diagonal(weights, 0.0)
        return weights

    def reference(self, client: int, arrays: Arrays) -> Arrays:
        """Return the model from which the client's training starts: the client's model, or else the initial model."""
        return {"model": self.client_model(client, self.initial())}

    def train_config(self, server_round: int, client: int) -> dict[str, Any]:
        """Return the strength λ Ω_ii; a client without a model is tied to the mean like an additional client."""
        row, count = np.searchsorted(self.seen, client), len(self.seen)
        omega = self.own[row] if client in self.seen else 1 - 1 / (count + 1)
        return {"tie": self.method.strength * float(omega)}


def learnt_relations(products: Float64) -> Float64:
    """Return Ω = (M Σ + I)⁻¹ with Σ = (WᵀW)^{1/2} / tr (WᵀW)^{1/2} (after Zhang and Yeung, 2010).

    MOCHA's Ω is Σ⁻¹, but equal models make Σ singular. The function therefore adds 1/M to Σ's diagonal. It divides the
    inverse by M, so that λ has the same meaning for any number of clients. Equal models give I − 11ᵀ / (M + 1), which
    is close to tying each model to the mean. Orthogonal models of equal length give I / 2, so no models are tied.

    Parameters
    ----------
    products : numpy.ndarray, (M, M)
        WᵀW, the inner products of the clients' models.

    Returns
    -------
    numpy.ndarray, float64, (M, M)
    """
    values, vectors = np.linalg.eigh(products)
    roots = np.sqrt(np.maximum(values, 0.0))
    shares = roots / max(roots.sum(), np.finfo(np.float64).tiny)
    return (vectors / (1 + len(roots) * shares)) @ vectors.T
