"""LG-FedAvg (Liang et al., 2020): local representations, and a shared model on top of them.

A client trains local and shared layers together.
"""

from typing import TYPE_CHECKING

from posy.settings import Search, setting
from posy.strategies.card import MethodCard, Paper, Program
from posy.strategies.settings import MethodSettings

if TYPE_CHECKING:
    from posy.models.architecture import Architecture
    from posy.strategies.settings import Settings


class LGFedAvgSettings(MethodSettings, dp_sgd=True, robust=True, point="served"):
    """Settings of LG-FedAvg."""

    card = MethodCard(
        paper=Paper(
            "Liang et al.",
            2020,
            "Think Locally, Act Globally: Federated Learning with Local and Global Representations",
            "arXiv (NeurIPS 2019 Workshop on Federated Learning)",
            "https://arxiv.org/abs/2001.01523",
        ),
        equations=(
            "(θ_ℓ, θ_g) ← SGD on the client's loss, local and global layers together (Algorithm 1, ClientUpdate)",
            "θ_g ← mean of the clients' θ_g over the round (Algorithm 1, server)",
        ),
        sent={"model (s,)": "the shared top layers θ_g"},
        returned={"model (s,)": "the client's top layers after training"},
        reveals="the shared layers; the other layers stay on the client",
        server_state={"model": "the shared top layers θ_g (s,)"},
        client_state={"personal": "the client's lower layers θ_ℓ, flat"},
        scored=(
            "The served model, because the authors' program copies the averaged layers to every client before it tests "
            "(main_lg.py). The program keeps each client's best model by test accuracy. Posy does not select models on "
            "test data."
        ),
        deviations=(
            "Clients are weighted by number of samples, whereas the paper's program weights them equally "
            "(`client-weights=uniform`).",
            "The authors start from a model that FedAvg trained for hundreds of rounds. In Posy all clients start from "
            "the run's initial model. The setting `weights` can load a trained model instead.",
            "The shared layers are the last layers, as in the paper. The authors' network for CIFAR lists its layers "
            "in a different order, so their program shares the two convolutional layers.",
        ),
        program=Program(
            "pliang279/LG-FedAvg",
            "7af0568b2cae88922ebeacc021b1679815092f4e",
            "main_lg.py, with LocalUpdate.train in models/Update.py",
            1e-6,
        ),
    )

    layers: int = setting(
        2,
        "number of shared layers, counted from the output",
        minimum=1,
        search=Search(1, 2),
        source="authors' README: num_layers_keep 2 on CIFAR-10, 3 on MNIST",
    )

    def personal(self, network: "Architecture") -> tuple[str, ...]:
        """Keep all but the last ``layers`` layers on the client."""
        return network.layer_names[: -self.layers]

    def notices(self, settings: "Settings", network: "Architecture") -> tuple[str, ...]:
        """Warn if no layer is local."""
        depth = len(network.layer_names)
        if self.layers < depth:
            return ()
        return (
            f"lg-fedavg-layers = {self.layers} shares all {depth} layers of model = {network.model!r}, so the run is "
            "equivalent to FedAvg; "
            + (f"set lg-fedavg-layers to at most {depth - 1}" if depth > 1 else "choose a network with more layers"),
        )
