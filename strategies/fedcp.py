"""FedCP (Zhang et al., 2023): a policy divides each sample's features between a personal and a global head.

The body, the policy and the global head are shared. The personal head stays on the client. A client trains with the
global head fixed, and then sends the mean of both heads in place of the global head. The loss pulls the client's
features towards the served body's features.
"""

from typing import TYPE_CHECKING

from posy.settings import Search, setting
from posy.strategies.arrays import model, reply
from posy.strategies.card import MethodCard, Paper, Program
from posy.strategies.settings import MethodSettings

if TYPE_CHECKING:
    from posy.models.architecture import Architecture


class FedCPSettings(MethodSettings, robust=True, point="served"):
    """Settings of FedCP."""

    returned = reply(model=model(noise=True, sums=True))

    card = MethodCard(
        paper=Paper(
            "Zhang et al.",
            2023,
            "FedCP: Separating Feature Information for Personalized Federated Learning via Conditional Policy",
            "KDD",
            "https://arxiv.org/abs/2307.01217",
        ),
        equations=(
            "v_i = Σ_c row c of the personal head's weight; the policy's input is h ⊙ v_i / ||v_i||",
            "(r, s) = softmax over two outputs of the policy for each feature, r + s = 1",
            "logits = personal head(r ⊙ h) + global head(s ⊙ h)",
            "loss = cross-entropy + λ MMD²(h, features of the served body)",
            "sent in place of the global head: (personal head + global head) / 2; the mean has weights n_i / n",
        ),
        sent={"model (s,)": "body, policy and global head"},
        returned={"model (s,)": "trained body and policy, and the mean of both heads"},
        reveals="the body and the policy, and the client's head, which the server can compute from the mean of both "
        "heads",
        server_state={"model": "body, policy and global head (s,)"},
        client_state={"personal": "the client's personal head, flat"},
        scored="The served model, because the authors' program evaluates before local training (servercp.py, "
        "FedCP.train).",
        deviations=(
            "A plain softmax gives the shares r and s. The authors' program adds Gumbel noise, even at test time.",
            "v_i is always computed from the current head, whereas the authors' program sets v_i once per round, to "
            "random numbers in round 1. SGD on the cross-entropy does not change v_i, because the gradient's rows sum "
            "to 0. Only Adam and custom losses change v_i.",
            "The served body's features are computed once per round, from samples without augmentation, with "
            "BatchNorm's running statistics. The authors' program computes them for every mini-batch in training mode.",
            "All clients of a round receive the policy and the global head. The authors' program sends them only "
            "to the clients of the previous round.",
        ),
        program=Program(
            "TsingZ0/FedCP",
            "7110e973a4069db7b05904cde6e76ca6795d7ab8",
            "system/flcore/servers/servercp.py, FedCP.train, with its Gumbel noise set to 0",
            1e-6,
        ),
    )

    strength: float = setting(
        5.0,
        "lambda: weight of the discrepancy between the client's and the served body's features",
        minimum=0,
        search=Search(0.1, 20.0, log=True),
        source="authors' program, run_me.sh: lam 5",
    )

    def network(self, plain: "Architecture", num_clients: int) -> "Architecture":
        """Add the policy and the global head to the network."""
        from posy.models.conditional import Conditional  # noqa: PLC0415 - the settings do not need PyTorch

        return plain.extended(Conditional)

    def personal(self, network: "Architecture") -> tuple[str, ...]:
        """Keep the personal head on the client."""
        return ("head",)
