"""FedProx (Li et al., 2020): FedAvg with a proximal term in the clients' losses."""

from typing import TYPE_CHECKING

from posy.settings import Search, setting
from posy.strategies.card import MethodCard, Paper, Program
from posy.strategies.settings import MethodSettings

if TYPE_CHECKING:
    from posy.models.architecture import Architecture
    from posy.strategies.settings import Settings

PAPER = Paper(
    "Li, Sahu, Zaheer, Sanjabi, Talwalkar and Smith",
    2020,
    "Federated Optimization in Heterogeneous Networks",
    "MLSys",
    "https://arxiv.org/abs/1812.06127",
)
EQUATION = "h_k(w; w^t) = F_k(w) + μ/2 ||w − w^t||² (Eq. 2): w ← w − η (∇F_k(w) + μ (w − w^t))"


class FedProxSettings(MethodSettings, dp_sgd=True, robust=True, point="served"):
    """Settings of FedProx."""

    mu: float = setting(
        0.001,
        "strength of the pull towards the server's model",
        source="the smallest of the paper's values 0.001, 0.01, 0.1 and 1; cwFedAvg's appendix uses 0.001",
        minimum=0,
        search=Search(0.0001, 1.0, log=True),
    )

    def notices(self, settings: "Settings", network: "Architecture") -> tuple[str, ...]:
        """Warn if mu is 0."""
        return () if self.mu else ("mu = 0 removes the proximal term, so the run is equivalent to FedAvg",)

    card = MethodCard(
        paper=PAPER,
        equations=(EQUATION, "w^{t+1} ← Σ_k (n_k / n) w_k over the clients of the round (Algorithm 2)"),
        sent={"model (d,)": "the server's model w^t"},
        returned={"model (d,)": "the trained model w_k"},
        reveals="the client's model",
        server_state={"model": "the server's model w (d,)"},
        client_state={},
        scored="The served model, because the paper and its program score the averaged model.",
        deviations=(
            "As in the authors' program, clients are drawn uniformly and weighted by number of samples. Algorithm 2 "
            "draws them with probability proportional to their number of samples, and weights them equally "
            "(`client-weights=uniform`).",
            "All clients complete their local training. The paper also studies clients that stop early.",
        ),
        program=Program(
            "TsingZ0/PFLlib",
            "d832e76f6a23b833038949ec1e4fdefe63a4d350",
            "system/flcore: clientProx.train, Server.send_models and aggregate_parameters",
            1e-6,
            by_authors=False,
        ),
    )
