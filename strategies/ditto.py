"""Ditto (Li et al., 2021): each client has a personal model, which is pulled towards the global one.

``served`` scores the global model, and ``local`` the personal one.
"""

from typing import TYPE_CHECKING

from posy.settings import Search, setting
from posy.strategies.arrays import model, reply
from posy.strategies.card import MethodCard, Paper, Program
from posy.strategies.settings import MethodSettings

if TYPE_CHECKING:
    from posy.models.architecture import Architecture
    from posy.strategies.settings import Settings


class DittoSettings(MethodSettings, robust=True):
    """Settings of Ditto."""

    returned = reply(model=model(noise=True, sums=True))

    strength: float = setting(
        0.1,
        "lambda: strength of the personal model's pull towards the global one",
        source="choice: a weak pull; the README of the authors' program uses 1, and the paper tries 0.05 to 2",
        minimum=0,
        search=Search(0.01, 10.0, log=True),
    )
    epochs: int = setting(
        0,
        "epochs for the personal model; 0: train it for as long as the global model",
        source="trainers_MTL/ditto.py of the authors' program: both models take local_iters steps",
        minimum=0,
    )
    start: str = setting(
        "initial",
        "initial personal model of a client: the common initial model, or the first model received",
        source="Algorithm 1: v_k starts at v_k^0; trainers_MTL/fedbase.py of the authors' program: the initial model",
        choices=("initial", "received"),
        earlier="received",
    )

    def notices(self, settings: "Settings", network: "Architecture") -> tuple[str, ...]:
        """Warn about a strength of 0."""
        if self.strength:
            return ()
        return ("ditto-strength = 0: nothing ties the personal models to the global one, so `local` is local training",)

    card = MethodCard(
        paper=Paper(
            "Li, Hu, Beirami and Smith",
            2021,
            "Ditto: Fair and Robust Federated Learning Through Personalization",
            "ICML",
            "https://proceedings.mlr.press/v139/li21h.html",
        ),
        equations=(
            "v_k ← v_k − η (∇F_k(v_k) + λ (v_k − w^t)) (Algorithm 1, personal model)",
            "w_k ← w_k − η ∇F_k(w_k) from w^t, then w^{t+1} ← Σ_k (n_k / n) w_k (Algorithm 1, with FedAvg as G)",
        ),
        sent={"model (d,)": "the global model w^t"},
        returned={"model (d,)": "the trained global model w_k"},
        reveals="the client's model",
        server_state={"model": "the global model w (d,)"},
        client_state={"model": "the personal model v_k (d,)"},
        scored="The local model, because the paper and its program score v_k.",
        deviations=(
            "Clients are weighted by number of samples, whereas the paper weights them equally "
            "(`client-weights=uniform`).",
            "Clients are drawn uniformly, whereas the authors' program draws them with probability "
            "proportional to their number of samples.",
            "The two models see mini-batches in different orders, whereas in the authors' program they use the same "
            "mini-batches.",
        ),
        program=Program(
            "TsingZ0/PFLlib",
            "d832e76f6a23b833038949ec1e4fdefe63a4d350",
            "system/flcore: clientDitto.ptrain and train, Server.send_models and aggregate_parameters",
            1e-6,
            by_authors=False,
        ),
    )
