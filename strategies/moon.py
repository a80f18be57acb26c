"""MOON (Li et al., 2021): a contrastive term pulls a client's features towards the global model's features.

The term also pushes the features away from the features of the client's previous model. Features are the head's inputs,
rather than the outputs of the paper's projection head, so that all methods train the same network. In a client's first
round, the previous model is the global model, and the term is constant.
"""

from typing import TYPE_CHECKING

from posy.settings import Search, setting
from posy.strategies.arrays import model, reply
from posy.strategies.card import MethodCard, Paper, Program
from posy.strategies.settings import MethodSettings

if TYPE_CHECKING:
    from posy.models.architecture import Architecture
    from posy.strategies.settings import Settings


class MOONSettings(MethodSettings, robust=True, point="served"):
    """Settings of MOON."""

    returned = reply(model=model(noise=True, sums=True))

    mu: float = setting(
        1.0,
        "weight of the contrastive term",
        source="main.py of the authors' program: --mu 1 (its README uses 5 for CIFAR-10)",
        minimum=0,
        search=Search(0.1, 10.0, log=True),
    )
    temperature: float = setting(
        0.5,
        "tau: temperature of the similarities",
        source="main.py of the authors' program: --temperature 0.5",
        needs="moon-mu > 0",
        above=0,
        search=Search(0.1, 1.0, log=True),
    )

    card = MethodCard(
        paper=Paper(
            "Li et al.",
            2021,
            "Model-Contrastive Federated Learning",
            "CVPR",
            "https://arxiv.org/abs/2103.16257",
        ),
        equations=(
            "ℓ_con = −log(exp(cos(z, z_glob) / τ) / (exp(cos(z, z_glob) / τ) + exp(cos(z, z_prev) / τ))) (Eq. 3)",
            "client: w_i ← w_i − η ∇(ℓ + μ ℓ_con);  server: w ← Σ_i (n_i / n) w_i (Algorithm 1)",
        ),
        sent={"model (d,)": "the server's model w"},
        returned={"model (d,)": "the trained model w_i"},
        reveals="the client's model",
        server_state={"model": "the server's model w (d,)"},
        client_state={"model": "the client's model after its last training (d,)"},
        scored="The served model, because the authors' program tests the averaged model.",
        deviations=(
            "z is the head's input, as with the program's option --use_project_head 0. The paper adds a projection "
            "head of two layers.",
            "The features of the global and the previous model are computed once per round, from samples without "
            "augmentation. The program computes them for each augmented batch.",
            "Until a client has trained, its previous model is the global model. From round 2 onwards, the program "
            "uses a randomly initialised network instead.",
            "The program fixes SGD's momentum at 0.9. In Posy, the momentum is a setting.",
        ),
        program=Program(
            "QinbinLi/MOON",
            "8fcba3c4efc9a47eb24687a91ba94cfb2005103f",
            "main.py: train_net_fedcon, and its weighted mean for alg = moon",
            1e-6,
        ),
    )

    def notices(self, settings: "Settings", network: "Architecture") -> tuple[str, ...]:
        """Warn if the contrastive term has no gradient."""
        if not self.mu:
            return ("moon-mu = 0: the run is equivalent to FedAvg",)
        if not network.layer_names[:-1]:
            return (f"model = {settings.train.model}: its head is its only layer, so the run is equivalent to FedAvg",)
        return ()
