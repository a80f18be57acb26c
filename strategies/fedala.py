"""FedALA (Zhang et al., 2023): each client learns, entry by entry, how far to move from its model to the global one.

A client mixes only the upper layers, and takes the lower layers from the global model. ``served`` scores the mixture.
"""

from typing import TYPE_CHECKING

from posy.settings import Search, setting
from posy.strategies.arrays import model, reply
from posy.strategies.card import MethodCard, Paper, Program
from posy.strategies.settings import MethodSettings

if TYPE_CHECKING:
    from posy.models.architecture import Architecture
    from posy.strategies.settings import Settings


class FedALASettings(MethodSettings, robust=True, point="served"):
    """Settings of FedALA."""

    returned = reply(model=model(noise=True, sums=True))

    card = MethodCard(
        paper=Paper(
            "Zhang et al.",
            2023,
            "FedALA: Adaptive Local Aggregation for Personalized Federated Learning",
            "AAAI",
            "https://doi.org/10.1609/aaai.v37i9.26330",
        ),
        equations=(
            "Θ̂_i = Θ_i + (Θ − Θ_i) ⊙ [1^(|Θ_i|−p); W_i] (Eq. 4)",
            "W_i ← clip(W_i − η ∇_{W_i} L(Θ̂_i), 0, 1), repeated until the loss converges (Eq. 5, Algorithm 1)",
            "Θ_i ← SGD from Θ̂_i;  Θ ← Σ_i (n_i / n) Θ_i (Algorithm 1)",
        ),
        sent={"model (d,)": "the global model Θ"},
        returned={"model (d,)": "the client's model Θ_i after training"},
        reveals="the client's model",
        server_state={"model": "the global model Θ (d,)"},
        client_state={
            "model": "the client's model Θ_i after its last training (d,)",
            "weights": "the weights W_i of the parameters in the mixed layers, flat",
        },
        scored="The served model, because the authors' program tests after local aggregation, before training "
        "(serverALA.py).",
        deviations=(
            "Only the clients of a round run adaptive local aggregation (ALA), as in Algorithm 1. In the authors' "
            "program, all clients run ALA in every round, including clients that do not train.",
            "The mean loss of a pass decides whether the weights have converged. The authors' program uses the loss of "
            "the last mini-batch.",
            "A client stops after 50 passes, because a small threshold may never be reached (authors' README).",
            "A pass uses full mini-batches from the sampled part of the data. Their order is random, but the same in "
            "all passes of a round.",
            "In each evaluation, the client learns the weights again, and does not store them. The first evaluation "
            "therefore costs as many passes as the first round.",
            "`max-update-norm` and `dp` measure an update relative to the global model. Training starts from the "
            "mixture, but only the client knows the mixture's weights.",
        ),
        program=Program(
            "TsingZ0/FedALA",
            "a7a9b21342859005f22fc0bffbdb1846975de53b",
            "system/flcore/servers/serverALA.py, FedALA.train, with ALA in system/utils/ALA.py",
            1e-6,
        ),
    )

    layers: int = setting(
        1,
        "p: number of layers to mix, counted from the output",
        minimum=1,
        source="authors' program, run_me.sh: p = 2 tensors, the last layer's weight and bias",
        needs="fedala-eta > 0",
    )
    eta: float = setting(
        1.0,
        "learning rate of the mixing weights; 0: they stay at 1, as in FedAvg",
        minimum=0,
        search=Search(0.1, 2.0, log=True),
        source="authors' program, run_me.sh",
    )
    sample: float = setting(
        0.8,
        "fraction of the training samples that each pass uses to learn the weights, rounded to full batches",
        above=0,
        maximum=1,
        source="authors' program, run_me.sh: s = 80",
        needs="fedala-eta > 0",
    )
    threshold: float = setting(
        0.01,
        "the weights have converged once the standard deviation of the last ten passes' losses is below this "
        "threshold; a client's first adaptive local aggregation takes 11 to 50 passes",
        above=0,
        source="authors' README: 0.01 in the paper",
        needs="fedala-eta > 0",
        earlier=0.1,
    )

    def mixed(self, network: "Architecture") -> tuple[str, ...]:
        """Return the names of the layers to mix."""
        return network.layer_names[-self.layers :]

    def notices(self, settings: "Settings", network: "Architecture") -> tuple[str, ...]:
        """Warn if the weights stay at 1, or if ``fedala-layers`` exceeds the number of layers."""
        notices = []
        depth = len(network.layer_names)
        if self.layers > depth:
            notices.append(
                f"fedala-layers = {self.layers} with model = {network.model!r}: the network has {depth} layers, all of "
                f"which are mixed; set fedala-layers to at most {depth}"
            )
        if not self.eta:
            notices.append(
                "fedala-eta = 0 leaves all weights at 1, so the run is equivalent to FedAvg; set fedala-eta above 0"
            )
        return tuple(notices)
