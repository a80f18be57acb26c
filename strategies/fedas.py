"""FedAS (Yang et al., 2024): clients align the received body, and the server weights bodies by Fisher information.

A client first pulls the features of the received body towards the class prototypes of its latest model. It then trains
the whole network. The server weights each body by the trace of the trained model's Fisher information.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from posy.settings import Search, setting
from posy.strategies.arrays import Arrays, model, numbers, reply
from posy.strategies.base import PersonalisedStrategy
from posy.strategies.card import MethodCard, Paper, Program
from posy.strategies.replies import BadReplyError, Update, sample_counts, stacked, weighted_mean
from posy.strategies.settings import MethodSettings

if TYPE_CHECKING:
    from posy.models.architecture import Architecture
SINGLE_REPLIES = "it weights bodies by the Fisher information of individual clients"


class FedASSettings(
    MethodSettings, robust="its server weights bodies by the Fisher information that the clients report"
):
    """Settings of FedAS."""

    needs_classes = "its clients align their features to class means"

    returned = reply(
        model=model(noise=True, sums=SINGLE_REPLIES),
        fisher=numbers(
            noise="its clients send the trace of the Fisher information without noise",
            sums=SINGLE_REPLIES,
        ),
    )

    align_epochs: int = setting(
        1,
        "epochs of alignment before local training; 0: none",
        source="clientas.py of the authors' program: 1 epoch",
        minimum=0,
        search=Search(0, 3),
    )
    align_lr: float = setting(
        0.01,
        "learning rate of the alignment, which uses plain SGD",
        source="clientas.py of the authors' program: SGD with lr=0.01",
        needs="fedas-align-epochs > 0",
        above=0,
    )

    card = MethodCard(
        paper=Paper(
            "Yang et al.",
            2024,
            "FedAS: Bridging Inconsistency in Personalized Federated Learning",
            "CVPR",
            "https://openaccess.thecvf.com/content/CVPR2024/html/"
            "Yang_FedAS_Bridging_Inconsistency_in_Personalized_Federated_Learning_CVPR_2024_paper.html",
        ),
        equations=(
            "alignment: θ ← θ − η_a ∇ Σ_c mean_{x of class c} mean_d (f_θ(x) − p_c)²; p_c is the mean feature of class "
            "c under the client's latest body (clientas.py, set_parameters)",
            "F_i = Σ_b ‖∇ mean_{x in b} log p(y | x)‖² over mini-batches b (clientas.py, train)",
            "θ ← Σ_i F_i θ_i / Σ_i F_i (serveras.py, aggregate_wrt_fisher)",
        ),
        sent={"model (b,)": "the shared body θ"},
        returned={
            "model (b,)": "the trained body θ_i",
            "fisher ()": "mean of ‖∇ mean log p‖² over mini-batches, weighted by their sizes",
        },
        reveals="the body, and the trace of its Fisher information, which shows the progress of the client's training",
        server_state={"model": "the shared body θ (b,)"},
        client_state={
            "personal": "the client's head (h,)",
            "prototypes": "class means of the latest trained body's features (C, D)",
        },
        scored="The local model, because the authors' program tests each client's trained model.",
        deviations=(
            "The program adds the squared norms of all mini-batches. In Posy a client sends their mean, and the server "
            "multiplies it by n_i. Both give the same weights if all clients have full batches.",
            "The alignment uses mini-batches of `batch-size` samples. The program uses mini-batches of 16.",
            "The program aligns one shared model for all clients in turn, so a client's alignment starts from the "
            "previous client's result. In Posy every client aligns its own copy.",
        ),
        program=Program(
            "xiyuanyang45/FedAS",
            "1a4f5fdb0111a11e92559f6caaa1392e4c181ac1",
            "system/flcore: clientAS.set_parameters, clientAS.train, FedAS.aggregate_wrt_fisher",
            1e-6,
        ),
    )

    def refusals(self) -> Mapping[str, str]:
        """Reject ``client-weights``, because the Fisher information determines the weights."""
        return {"client-weights": "the trace of the Fisher information determines the weights of the clients' bodies"}

    def personal(self, network: "Architecture") -> tuple[str, ...]:
        """Keep the head on the client."""
        return ("head",)


class FedAS(PersonalisedStrategy):
    """Average bodies with weights n_i F_i (client synchronisation)."""

    def check(self, client: int, arrays: Arrays) -> None:
        """Reject a negative trace."""
        if arrays["fisher"] < 0:
            raise BadReplyError(f"trace of the Fisher information {float(arrays['fisher'])}")

    def mean_weights(self, updates: list[Update]) -> npt.NDArray[np.float64]:
        """Return n_i F_i ``(M,)``, or n_i if every trace is 0."""
        weights = sample_counts(updates) * stacked(updates, "fisher")
        return weights if weights.any() else sample_counts(updates)

    def aggregate(self, server_round: int, updates: list[Update]) -> dict[str, Any]:
        """Average the bodies, weighted by n_i F_i, or by n_i if every trace is 0."""
        weights = self.limited_weights(updates)
        self.model = weighted_mean(stacked(updates), weights)
        return {"largest_weight": float(np.max(weights) / np.sum(weights))}
