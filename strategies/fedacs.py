"""FedACS: attention between client models, computed from cosine similarity.

"Personalized Federated Learning with Attention-Based Client Selection": the server compares the clients' models. It
sends each client a weighted mean of the models that are most similar to the client's own.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from posy.models.architecture import Architecture
from posy.models.parameters import FloatArray
from posy.settings import Search, setting
from posy.strategies.arrays import Arrays, model, reply
from posy.strategies.attention import AttentionStrategy
from posy.strategies.card import MethodCard, Paper
from posy.strategies.replies import BLOCK, gram
from posy.strategies.settings import MethodSettings, training_clients

if TYPE_CHECKING:
    from posy.strategies.settings import Settings


class FedACSSettings(MethodSettings, robust="its server mixes a model for each client by cosine similarity"):
    """Settings of FedACS."""

    returned = reply(
        model=model(
            noise="it selects collaborators by the cosine similarity of individual models, which noise drives to zero",
            sums="it selects collaborators by the cosine similarity of individual models",
        )
    )

    p: float = setting(
        0.5,
        "quantile of all similarities that two clients' similarity must exceed for them to collaborate",
        minimum=0,
        maximum=1,
        search=Search(0.0, 1.0),
        source="choice: the paper gives no value; 0.5 to 0.75 scored best on digits (docs/benchmarks/choices.md)",
    )
    initialisation: str = setting(
        "same",
        "whether all clients start from the same initial model or each from its own (Algorithm 1, line 1)",
        choices=("same", "own"),
        source="choice: Algorithm 1, line 1, permits both",
    )

    card = MethodCard(
        paper=Paper(
            "Chen, Li and Shen",
            2024,
            "Personalized Federated Learning with Attention-Based Client Selection",
            "ICASSP",
            "https://arxiv.org/abs/2312.15148",
        ),
        equations=(
            "s_ij = ⟨w_i, w_j⟩ / (‖w_i‖ ‖w_j‖) over all parameters (Section 2.2; Algorithm 1, line 4)",
            "δ = p-quantile of all elements of S (Section 2.2; Algorithm 1, line 5)",
            "u_i = Σ_j [s_ij > δ] s_ij w_j / Σ_j [s_ij > δ] s_ij (Eq. 4)",
            "w_i ← u_i − β ∇F_i(u_i), as local steps on mini-batches from u_i without a proximal term (Eq. 5)",
        ),
        sent={"model (d,)": "the client's intermediate model u_i"},
        returned={"model (d,)": "the trained model w_i"},
        reveals="the client's model, which the server stores, and thus which clients are similar",
        server_state={
            "seen": "clients with a trained model, sorted (m,)",
            "models": "their latest models w_i (m, d)",
            "stateless": "1 for each client that has lost its state since its last update (M,)",
            "mixed": "their intermediate models u_i (m, d)",
            "pictures": "attention matrices of some rounds, for the figure (P, M, M)",
            "pictured": "the corresponding round numbers (P,)",
        },
        client_state={"model": "the client's latest model w_i, which later evaluations score"},
        scored="The local model w_i, because Algorithm 1 returns w_1, …, w_n, the models after local training (Eq. 5).",
        deviations=(
            "Client i's mean always includes its own model. In the paper this requires s_ii = 1 > δ. The condition "
            "fails for p = 1 and for equal models, for example in round 1 after a common initialisation.",
            "Similarities s_ij ≤ 0 are omitted, because negative weights extrapolate. The paper sums over all "
            "s_ij > δ, even if δ is negative.",
            "s_ij excludes BatchNorm's running statistics, because they would outweigh the parameters. They are "
            "mixed like all other entries.",
            "A client without a trained model is not part of S. It starts from the common initial model, or, once "
            "other clients have trained, from the uniform mean of their models. With `fedacs-initialisation=own` it "
            "starts from its own initial model. In the paper, S covers the initial models in round 1.",
            "The latest model of an absent client stays in the other clients' means, because W in the paper contains "
            "the models of all clients.",
        ),
        no_program="The authors published no program, and neither PFLlib nor FL-bench implements the method.",
    )

    def refusals(self) -> Mapping[str, str]:
        """Reject ``client-weights``, because the attention determines the weights."""
        reason = "the attention determines the weights of the clients' models"
        return {"client-weights": reason, "max-client-weight": reason}

    def notices(self, settings: "Settings", network: Architecture) -> tuple[str, ...]:
        """Warn if every client is served only its own model."""
        clients = training_clients(settings)
        if mixes_alone(self.p, clients):
            return (
                f"fedacs-p = {self.p:g} with {clients} clients that train: no similarity between two "
                "clients exceeds δ, so each client trains alone, as with method = 'local'; choose a smaller fedacs-p",
            )
        return ()


def mixes_alone(p: float, clients: int) -> bool:
    """Return whether no similarity between two of M clients can exceed the p-quantile of all M² similarities.

    The M similarities of 1 on the diagonal are the largest. The largest similarity between two clients occurs twice, at
    the sorted positions M² − M − 2 and M² − M − 1, and :func:`numpy.quantile` interpolates at position p (M² − 1).
    """
    return p * (clients**2 - 1) >= clients**2 - clients - 2 - 1e-9


class FedACS(AttentionStrategy):
    """Send client i the model u_i = Σ_{S_ij > δ} S_ij w_j / Σ_{S_ij > δ} S_ij (Eq. 4), its starting point (Eq. 5).

    With ``initialisation=own`` a client without a trained model starts from its own initial model.
    """

    method: FedACSSettings

    def serve(self, client: int) -> Arrays:
        """Return u_i; with ``initialisation=own``, a client that has not trained yet receives its own initial model."""
        # Newcomers have no initial models; they receive the mean, as with a common initialisation.
        if self.method.initialisation == "own" and client in self.members and client not in self.seen:
            return {"model": self.initial(client)}
        return super().serve(client)

    def attention(self, models: FloatArray) -> npt.NDArray[np.float64]:
        """Return the normalised attention ``(M, M)``."""
        return attention_weights(cosine_similarity(models), self.method.p)


def cosine_similarity(models: FloatArray, block: int = BLOCK) -> npt.NDArray[np.float64]:
    """Return S_ij = ⟨w_i, w_j⟩ / (‖w_i‖ ‖w_j‖) over all parameters (Section 2.2).

    Parameters
    ----------
    models : numpy.ndarray, float32, (M, d)
        The clients' models.
    block : int
        As for :func:`~posy.strategies.replies.gram`.

    Returns
    -------
    numpy.ndarray, float64, (M, M)
        Symmetric, with 1 on the diagonal. A model whose norm is zero has similarity 0 to all others.
    """
    products = gram(models, block)
    norms = np.sqrt(np.diag(products))
    scale = np.outer(norms, norms)
    similarity = np.divide(products, scale, out=np.zeros_like(products), where=scale > 0)
    similarity = np.clip((similarity + similarity.T) / 2, -1.0, 1.0)
    np.fill_diagonal(similarity, 1.0)
    return similarity


def attention_weights(similarity: npt.NDArray[np.float64], p: float) -> npt.NDArray[np.float64]:
    """Return the weights of Eq. 4; each row sums to 1.

    δ is the p-quantile of all elements of S. Client i's mean always includes its own model, even if rounding or
    identical models make δ ≥ 1. Similarities ≤ 0 have weight 0.

    Parameters
    ----------
    similarity : numpy.ndarray, (M, M)
        S, with 1 on the diagonal.
    p : float
        Level of the quantile δ: with 0, all but the least similar pairs collaborate; with 1, each client trains alone.
    """
    delta = np.quantile(similarity, p)
    weights = np.where((similarity > delta) & (similarity > 0), similarity, 0.0)
    np.fill_diagonal(weights, 1.0)
    return weights / weights.sum(axis=1, keepdims=True)
