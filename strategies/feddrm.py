"""FedDRM: a density ratio model whose routing head guides each query to the best client.

"Beyond Aggregation: Guiding Clients in Heterogeneous Federated Learning": a shared body feeds two branches. The class
branch ends in a personal classifier. The client branch predicts which client a sample comes from, and its logits
estimate the log density ratios of the clients' inputs.
"""

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from posy.models.architecture import Architecture
from posy.models.catalogue import SHARING
from posy.settings import Search, SettingsError, setting
from posy.strategies.base import PersonalisedStrategy
from posy.strategies.card import MethodCard, Paper, Program
from posy.strategies.settings import MethodSettings

if TYPE_CHECKING:
    from torch import Tensor, nn

    from posy.strategies.settings import Settings


class FedDRMSettings(MethodSettings, robust=True, point="served"):
    """Settings of FedDRM."""

    needs_classes = "its density ratio model describes how the clients' samples differ within classes"

    class_weight: float = setting(
        0.8,
        "lambda: weight of the class loss; the client loss has weight 1 - lambda",
        minimum=0,
        maximum=1,
        search=Search(0.3, 0.98),
        source="Figure 4, where 0.8 is best; the authors' configs/feddrm.yaml uses 0.9",
    )
    routing: str = setting(
        "density",
        "route queries by density ratio (Eq. 3) or by posterior (Remark 2.4)",
        choices=("density", "posterior"),
        source="Eq. 3; the authors' algorithms/feddrm.py subtracts log(n_i / N) too",
    )
    sharing: str = setting(
        "deep",
        "blocks that the two branches share (Fig. 6)",
        choices=SHARING,
        source="Section 3.1 (Architecture) and Figure 6",
    )

    routes = True
    card = MethodCard(
        paper=Paper(
            "Wang, Zhang, Zhang, Liu and Zhang",
            2026,
            "Beyond Aggregation: Guiding Clients in Heterogeneous Federated Learning",
            "ICLR",
            "https://arxiv.org/abs/2509.23049",
        ),
        equations=(
            "minimise λ CE(class) + (1 − λ) CE(client = i) over the body θ, the client's class classifier (α_i, β_i) "
            "and the client branch (τ, γ, ξ) (Section 2.4; Algorithm 1, lines 7–11)",
            "θ, τ, γ, ξ ← Σ_i (n_i / N) θ_i, τ_i, γ_i, ξ_i; each client keeps (α_i, β_i) (Algorithm 1, line 17)",
            "`density`: r(x) = argmax_i of logit_i(x) − log(n_i / N), the largest density ratio (Eq. 3)",
            "`posterior`: r(x) = argmax_i of logit_i(x) (Remark 2.4)",
        ),
        sent={"model (d_s,)": "body, both branches and the client classifier"},
        returned={"model (d_s,)": "the same layers after local training"},
        reveals="the shared layers and the client branch, which predicts a sample's client; the classifier stays on "
        "the client",
        server_state={"model": "shared layers (d_s,)"},
        client_state={"personal": "class classifier (α_i, β_i)"},
        scored="The served model, because the authors score the averaged layers with each client's classifier before "
        "the next local training, and weight the clients' scores by n_i. For system accuracy, each pooled test sample "
        "is classified by the client to which it is routed.",
        deviations=(
            "A client that `holdout-clients` sets aside never trains, so no query is routed to it.",
            "The mean covers the clients of the round. In the paper all clients take part in every round.",
            "The density rule subtracts the log of the client's weight in the mean: log(n_i / N), or a constant with "
            "`client-weights=uniform`.",
            "`class-weights=balanced` also weights the client loss. The client branch then estimates density ratios of "
            "the class-balanced data. The paper has no class weights.",
            "Linear layers start from PyTorch's default initialisation. The paper's Kaiming-normal initialisation "
            "is `linear-init=kaiming`, which the settings of the paper's experiments select.",
            "BatchNorm's running statistics are averaged with the other shared entries. The paper's networks use "
            "only GroupNorm and LayerNorm.",
        ),
        program=Program(
            "zijianwang0510/FedDRM",
            "3479abf07c8c4eb50e9aa47c5719b4b6cfa0a00e",
            "algorithms/feddrm.py, FedDRM.train",
            1e-7,
        ),
    )

    def notices(self, settings: "Settings", network: Architecture) -> tuple[str, ...]:
        """Warn if one of the two losses has weight 0, or if no layer that predicts classes is shared."""
        if network.layer_names == ("head",):
            return (
                f"model = {settings.train.model!r} has no layer below its class classifier, so the clients share only "
                "the client branch and predict as method = 'local' does; choose a network with more layers",
            )
        if self.class_weight == 1:
            return (
                "feddrm-class-weight = 1 leaves the client branch untrained: the clients predict as "
                "method = 'fedper' with one personal layer does, and routing is random; choose a value below 1",
            )
        if not self.class_weight:
            return ("feddrm-class-weight = 0 leaves the class classifiers untrained; choose a value above 0",)
        return ()

    def network(self, plain: Architecture, num_clients: int) -> Architecture:
        """Add the client branch; raise :class:`SettingsError` for fewer than two clients."""
        if num_clients < 2:
            raise SettingsError(f"num-clients = {num_clients}: feddrm needs at least 2 clients to distinguish")
        from posy.models.two_branch import TwoBranch  # noqa: PLC0415 - the settings do not need PyTorch

        return plain.extended(TwoBranch, num_clients=num_clients, sharing=self.sharing)

    def personal(self, network: Architecture) -> tuple[str, ...]:
        """Keep the class classifier on the client."""
        return ("head",)

    def client_scores(self, outputs: "Tensor", weights: npt.NDArray[np.float64]) -> "Tensor":
        """Return the client branch's logits, adjusted for routing."""
        return routing_logits(outputs, weights, self.routing)

    def query_embeddings(self, network: "nn.Module", x: "Tensor") -> "tuple[Tensor, Tensor]":
        """Return the input of the class classifier, and the client branch's logits."""
        embeddings, logits = network.shared_part(x)  # type: ignore[operator]
        return embeddings, logits

    def query_logits(self, network: "nn.Module", embeddings: "Tensor") -> "Tensor":
        """Return the outputs of the client's class classifier."""
        logits: Tensor = network.class_head(embeddings)  # type: ignore[operator]
        return logits

    def client_embeddings(self, network: "nn.Module", x: "Tensor") -> "tuple[Tensor, ...]":
        """Return the input of the client classifier, and for images statistics of the first blocks."""
        embeddings: tuple[Tensor, ...] = network.client_embeddings(x)  # type: ignore[operator]
        return embeddings


class FedDRM(PersonalisedStrategy):
    """Average all layers but the class classifiers with weights n_i / N (Algorithm 1, line 17), and route queries."""


def route_queries(client_logits: "Tensor", n: npt.NDArray[np.float64], routing: str = "density") -> "Tensor":
    """Return the client to which each query is sent.

    Parameters
    ----------
    client_logits : Tensor, (n, M)
        Outputs of the client branch.
    n : numpy.ndarray, (M,)
        Number of training samples of each client.
    routing : str
        ``density``: argmax of the logits − log(n_i / N) (Eq. 3), where the subtraction removes the advantage of large
        clients. ``posterior``: argmax of the logits (Remark 2.4).
    """
    return routing_logits(client_logits, n, routing).argmax(dim=-1)


def routing_logits(client_logits: "Tensor", n: npt.NDArray[np.float64], routing: str) -> "Tensor":
    """Return the logits ``(n, M)`` whose argmax :func:`route_queries` returns; the arguments are the same."""
    if routing != "density":
        return client_logits
    log_prior = np.log(n / n.sum())
    return client_logits - client_logits.new_tensor(log_prior)
