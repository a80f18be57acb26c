"""FedBN (Li et al., 2021): the server averages everything except normalisation layers, which stay with the clients.

Normalisation layers are BatchNorm, GroupNorm and LayerNorm, including BatchNorm's running statistics.
"""

from typing import TYPE_CHECKING

from posy.strategies.card import MethodCard, Paper, Program
from posy.strategies.settings import MethodSettings

if TYPE_CHECKING:
    from posy.models.architecture import Architecture
    from posy.strategies.settings import Settings


class FedBNSettings(MethodSettings, dp_sgd=True, robust=True, point="served"):
    """Settings of FedBN, which has only the shared settings."""

    card = MethodCard(
        paper=Paper(
            "Li et al.",
            2021,
            "FedBN: Federated Learning on Non-IID Features via Local Batch Normalization",
            "ICLR",
            "https://openreview.net/forum?id=6YEQUn0QICG",
        ),
        equations=(
            "w_k ← SGD on client k's loss, all layers together (FedBN, client)",
            "w^(l) ← mean over k of w_k^(l) for each layer l that is not BatchNorm (FedBN, server)",
        ),
        sent={"model (s,)": "all tensors outside normalisation layers"},
        returned={"model (s,)": "the same tensors after training"},
        reveals="all tensors outside normalisation layers; the tensors of normalisation layers stay on the client",
        server_state={"model": "the shared tensors (s,)"},
        client_state={"personal": "the client's normalisation tensors, flat"},
        scored=(
            "The served model, because the authors' program tests after aggregation, with averaged layers and the "
            "client's own normalisation (federated/fed_digits.py)."
        ),
        deviations=(
            "Clients are weighted by number of samples, whereas the paper weights them equally "
            "(`client-weights=uniform`).",
            "GroupNorm and LayerNorm layers also stay with the clients. The paper considers only BatchNorm.",
        ),
        program=Program(
            "med-air/FedBN",
            "2fa38adf627a8c8ba71c5fb515b1f2ba00aa8812",
            "federated/fed_digits.py, train and communication",
            1e-6,
        ),
    )

    def personal(self, network: "Architecture") -> tuple[str, ...]:
        """Keep the normalisation tensors on the client."""
        return network.normalisation

    def notices(self, settings: "Settings", network: "Architecture") -> tuple[str, ...]:
        """Warn if the network has no normalisation layer."""
        if network.normalisation:
            return ()
        return (
            f"model = {network.model!r} has no normalisation layer to keep on the clients, so the run is equivalent to "
            "FedAvg; choose a network with BatchNorm, such as resnet18-bn",
        )
