"""FedUV (Son et al., 2024): two regularisers let clients train as if their data were IID.

The first makes the classifier's probabilities vary over a mini-batch as they would with evenly mixed classes. The
second spreads the features evenly. The server averages as in FedAvg.
"""

from typing import TYPE_CHECKING

from posy.settings import Search, setting
from posy.strategies.card import MethodCard, Paper, Program
from posy.strategies.settings import MethodSettings

if TYPE_CHECKING:
    from posy.models.architecture import Architecture
    from posy.strategies.settings import Settings


class FedUVSettings(MethodSettings, robust=True, point="served"):
    """Settings of FedUV."""

    needs_classes = "its variance term needs class probabilities"

    variance: float = setting(
        2.5,
        "weight of the classifier's variance term (lambda in the authors' program, mu in cwFedAvg's Table 5)",
        source="train_fl.py of the authors' program: --std_coeff 2.5",
        minimum=0,
        search=Search(0.05, 5.0, log=True),
    )
    uniformity: float = setting(
        0.5,
        "weight of the features' uniformity term (mu in the authors' program, lambda in cwFedAvg's Table 5)",
        source="train_fl.py of the authors' program: --unif_coeff 0.5",
        minimum=0,
        search=Search(0.01, 5.0, log=True),
    )

    card = MethodCard(
        paper=Paper(
            "Son et al.",
            2024,
            "FedUV: Uniformity and Variance for Heterogeneous Federated Learning",
            "CVPR",
            "https://arxiv.org/abs/2402.18372",
        ),
        equations=(
            "L_V = mean_c max(0, γ − std_b p_c), with γ = 1/√C, the standard deviation over the C one-hot vectors "
            "(feduv.py, UVReg)",
            "L_U = mean over pairs of exp(−‖z_i − z_j‖² / σ), with σ the median of the distances other than 0 "
            "(feduv.py, UVReg)",
            "client: θ_i ← θ_i − η ∇(ℓ + 2.5 L_V + 0.5 L_U);  server: θ ← Σ_i (n_i / n) θ_i (train_fl.py)",
        ),
        sent={"model (d,)": "the server's model θ"},
        returned={"model (d,)": "the trained model θ_i"},
        reveals="the client's model",
        server_state={"model": "the server's model θ (d,)"},
        client_state={},
        scored="The served model, because the authors' program tests the averaged model.",
        deviations=(
            "Class weights affect only the cross-entropy: both regularisers treat the samples of a batch equally.",
            "A batch of one sample, or of equal features, has no uniformity term. The program returns NaN for such a "
            "batch.",
            "The program fixes SGD's momentum at 0.9. In Posy, the momentum is a setting.",
        ),
        program=Program(
            "sonhamin/FedUV",
            "dd2e3c59fba20662a4234810f93061f4a4edc1b7",
            "algs/feduv.py: train_net_feduv, and train_fl.py's weighted mean",
            1e-6,
        ),
    )

    def notices(self, settings: "Settings", network: "Architecture") -> tuple[str, ...]:
        """Warn if neither regulariser has an effect."""
        if not self.variance and (not self.uniformity or not network.layer_names[:-1]):
            return ("no regulariser has an effect on the network, so the run is equivalent to FedAvg",)
        return ()
