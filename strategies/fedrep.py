"""FedRep (Collins et al., 2021): clients share a body and have personal heads.

In each round, a client first trains its head on the fixed served body, and then the body with the new head fixed.
"""

from typing import TYPE_CHECKING

from posy.settings import Search, setting
from posy.strategies.arrays import model, reply
from posy.strategies.card import MethodCard, Paper, Program
from posy.strategies.settings import MethodSettings

if TYPE_CHECKING:
    from posy.models.architecture import Architecture


class FedRepSettings(MethodSettings, robust=True, point="served"):
    """Settings of FedRep."""

    returned = reply(model=model(noise=True, sums=True))

    card = MethodCard(
        paper=Paper(
            "Collins et al.",
            2021,
            "Exploiting Shared Representations for Personalized Federated Learning",
            "ICML",
            "https://proceedings.mlr.press/v139/collins21a.html",
        ),
        equations=(
            "h_i ← GRD(f_i(h_i, φ), h_i, α), repeated with the body φ fixed (Algorithm 1, client update of the head)",
            "φ_i ← GRD(f_i(h_i, φ), φ, α) on the fixed new head (Algorithm 1, client update of the representation)",
            "φ ← mean of φ_i over the clients of the round (Algorithm 1, server update)",
        ),
        sent={"model (s,)": "the shared body φ: all layers but the head"},
        returned={"model (s,)": "the client's body φ_i after training"},
        reveals="the body; the head stays on the client",
        server_state={"model": "the shared body φ (s,)"},
        client_state={"personal": "the client's head h_i, flat"},
        scored=(
            "The served model, because the authors' program tests the averaged body with each client's head, without "
            "further training (main_fedrep.py, test_img_local_all)."
        ),
        deviations=(
            "Clients are weighted by number of samples, whereas the paper weights them equally "
            "(`client-weights=uniform`).",
            "Momentum is reset before the head trains, and again before the body trains. The authors' program "
            "uses the same optimiser, which skips frozen layers, for both phases.",
            "While the head trains, BatchNorm layers of the body use their running statistics without updating them. "
            "The authors' networks have no BatchNorm.",
            "After the last round, the authors' program also trains every client's head for ten more epochs and "
            "reports the resulting accuracy. `full-last-round` lets all clients take part in the last round instead.",
        ),
        program=Program(
            "lgcollins/FedRep",
            "d82e62982e107bb3322541604f059c0ff28bd289",
            "main_fedrep.py --alg fedrep, with LocalUpdate.train in models/Update.py",
            5e-6,
        ),
    )

    head_epochs: int = setting(
        10,
        "epochs for the head, which trains before the body; with `local-steps`, both train for `local-steps` steps",
        minimum=1,
        search=Search(1, 10),
        source="authors' program, scripts/FedRep_cifar10_2shards.sh: local_ep 11 minus local_rep_ep 1",
        needs="local-steps = 0",
    )

    def personal(self, network: "Architecture") -> tuple[str, ...]:
        """Keep the head on the client."""
        return ("head",)
