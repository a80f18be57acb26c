"""Per-FedAvg (Fallah et al., 2020): one model that each client personalises with a few gradient steps.

The learning rate of the run is the paper's β.
"""

from typing import TYPE_CHECKING

from posy.settings import Search, setting
from posy.strategies.arrays import model, reply
from posy.strategies.card import MethodCard, Paper, Program
from posy.strategies.settings import MethodSettings

if TYPE_CHECKING:
    from posy.models.architecture import Architecture
    from posy.strategies.settings import Settings


class PerFedAvgSettings(MethodSettings, robust=True):
    """Settings of Per-FedAvg."""

    returned = reply(model=model(noise=True, sums=True))

    alpha: float = setting(
        0.01,
        "learning rate of the adaptation, in training and in evaluation",
        source="choice: a fifth of the default lr, the paper's β",
        minimum=0,
        search=Search(0.001, 0.2, log=True),
    )
    hessian: str = setting(
        "fo",
        "Hessian-vector product in the meta-gradient: omitted (`fo`, which splits each mini-batch of `batch-size` "
        "samples into 2 parts), or approximated by a difference of gradients (`hf`, 3 parts); other programs load 2 "
        "or 3 whole batches",
        source="Section 5: both approximations; `fo` costs half as much",
        choices=("fo", "hf"),
    )
    hessian_delta: float = setting(
        0.001,
        "`hf`: step size of the finite difference, as a multiple of the gradient",
        source="choice: small, but above float32 rounding errors",
        needs="per-fedavg-hessian = hf",
        above=0,
    )
    steps: int = setting(
        1,
        "number of SGD adaptation steps that produce the local model",
        source="Section 3: one step of gradient descent",
        needs="per-fedavg-alpha > 0",
        minimum=1,
        search=Search(1, 10),
    )

    def notices(self, settings: "Settings", network: "Architecture") -> tuple[str, ...]:
        """Warn about an adaptation rate of 0, and about mini-batches that are too small to split into parts."""
        parts = 3 if self.hessian == "hf" else 2
        warnings = []
        if not self.alpha:
            warnings.append(
                f"per-fedavg-alpha = 0: the run is equivalent to FedAvg on one of {parts} parts of each mini-batch"
            )
        if settings.train.batch_size < parts:
            warnings.append(
                f"batch-size = {settings.train.batch_size}: a mini-batch has fewer samples than the {parts} parts, so "
                "the adaptation and the loss after it share samples"
            )
        return tuple(warnings)

    card = MethodCard(
        paper=Paper(
            "Fallah, Mokhtari and Ozdaglar",
            2020,
            "Personalized Federated Learning with Theoretical Guarantees: A Model-Agnostic Meta-Learning Approach",
            "NeurIPS",
            "https://proceedings.neurips.cc/paper/2020/hash/24389bfe4fe2eba8bf9aa9203a44cdad-Abstract.html",
        ),
        equations=(
            "F_i(w) = f_i(w − α ∇f_i(w)) (Eq. 5)",
            "w̃ = w − α ∇f_i(w; D), then w ← w − β (I − α ∇²f_i(w; D″)) ∇f_i(w̃; D′) (Algorithm 1)",
            "FO omits the Hessian; HF: ∇²f(w) g ≈ (∇f(w + δ g) − ∇f(w − δ g)) / (2 δ) (Section 5)",
            "w ← Σ_i (n_i / n) w_i over the clients of the round (Algorithm 1, with `client-weights`)",
        ),
        sent={"model (d,)": "the server's model w"},
        returned={"model (d,)": "the trained model w_i"},
        reveals="the client's model",
        server_state={"model": "the server's model w (d,)"},
        client_state={},
        scored="The local model, because the paper scores w after one step on the client's data.",
        deviations=(
            "The mean over clients is weighted by number of samples. The paper weights clients equally "
            "(`client-weights=uniform`).",
            "D, D′ and D″ are parts of one mini-batch of `batch-size` samples, not one mini-batch each.",
            "Momentum, weight decay, clipping and Adam act on the meta-gradient, whereas the adaptation is plain SGD.",
            "The adaptation before evaluation uses training data, whereas the program of pFedMe's authors uses test "
            "data.",
            "BatchNorm's running statistics are updated in the forward passes at w, before the adaptation.",
        ),
        program=Program(
            "CharlieDinh/pFedMe",
            "caf24b1f954d4381bd9b4d104ee7eff389e1489b",
            "FLAlgorithms: UserPerAvg.train, Server.send_parameters and aggregate_parameters",
            1e-6,
            by_authors=False,
        ),
    )
