"""APFL (Deng et al., 2020): each client predicts with a mixture of a personal model and the global one.

``served`` scores the global model, and ``local`` the mixture of both models after the client's training.
"""

from typing import TYPE_CHECKING

from posy.settings import Search, setting
from posy.strategies.arrays import model, reply
from posy.strategies.card import MethodCard, Paper
from posy.strategies.settings import MethodSettings

if TYPE_CHECKING:
    from posy.models.architecture import Architecture
    from posy.strategies.settings import Settings


class APFLSettings(MethodSettings, robust=True):
    """Settings of APFL."""

    returned = reply(model=model(noise=True, sums=True))

    alpha: float = setting(
        0.5,
        "share of the personal model in the mixture; with `apfl-adaptive`, the initial share",
        source="README of the authors' program: -pa 0.5",
        minimum=0,
        maximum=1,
        search=Search(0.05, 0.95),
    )
    adaptive: bool = setting(
        False,
        "let each client adapt its share with one gradient step per round",
        source="README of the authors' program: a fixed share, unless fed_adaptive_alpha is set",
    )

    def notices(self, settings: "Settings", network: "Architecture") -> tuple[str, ...]:
        """Warn about a fixed share of 0 or 1."""
        if self.adaptive or 0 < self.alpha < 1:
            return ()
        other = "local training" if self.alpha else "FedAvg's model after local training"
        return (f"apfl-alpha = {self.alpha:g}: the mixture equals one of its two models, so `local` is {other}",)

    card = MethodCard(
        paper=Paper(
            "Deng, Kamani and Mahdavi",
            2020,
            "Adaptive Personalized Federated Learning",
            "arXiv",
            "https://arxiv.org/abs/2003.13461",
        ),
        equations=(
            "w_i ← w_i − η ∇f_i(w_i; ξ) (Algorithm 1)",
            "v_i ← v_i − η ∇_v f_i(α_i v_i + (1 − α_i) w_i; ξ), at the same w_i and mini-batch (Algorithm 1)",
            "α_i ← α_i − η ⟨v_i − w_i, ∇f_i(α_i v_i + (1 − α_i) w_i; ξ)⟩, once a round, clipped to [0, 1] (adaptive α)",
            "w ← Σ_i (n_i / n) w_i over the clients of the round (Algorithm 1, with `client-weights`)",
        ),
        sent={"model (d,)": "the server's model w"},
        returned={"model (d,)": "the trained global model w_i"},
        reveals="the client's model",
        server_state={"model": "the server's model w (d,)"},
        client_state={
            "own": "the personal model v_i (d,)",
            "model": "the mixture after the last training (d,)",
            "alpha": "the share α_i (), with `apfl-adaptive`",
        },
        scored="The local model, because the paper evaluates the mixture on each client's data after local training.",
        deviations=(
            "Clients are weighted by number of samples, whereas the paper weights them equally "
            "(`client-weights=uniform`).",
            "All v_i start from the common initial model, because the paper does not specify their initial values.",
            "The step for α uses one mini-batch at the start of the round. Unlike the paper, the authors' program also "
            "adds 0.02 α to the gradient.",
            "BatchNorm's running statistics are not interpolated. Instead, the mixture's forward passes update its "
            "statistics.",
        ),
        no_program=(
            "Published programs compute v_i differently. The authors' program (MLOPTPSU/FedTorch), which FL-bench "
            "follows, updates w_i first, and then differentiates a mixture of both models' outputs instead of their "
            "parameters. PFLlib trains v_i alone. A test compares Posy with a NumPy implementation of Algorithm 1."
        ),
    )
