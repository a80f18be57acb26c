"""FedSAM with fine-tuning (Qu et al., 2022): clients seek flat minima, and adapt the averaged model before using it."""

from dataclasses import replace
from typing import TYPE_CHECKING

from posy.settings import Search, setting
from posy.strategies.card import Paper
from posy.strategies.fedavg_ft import CARD, PROGRAM, FedAvgFT, FedAvgFTSettings

if TYPE_CHECKING:
    from posy.models.architecture import Architecture
    from posy.strategies.settings import Settings


class FedSAMFTSettings(FedAvgFTSettings, robust=True):
    """Settings of FedSAM and of fine-tuning, which takes ordinary gradient steps."""

    rho: float = setting(
        0.05,
        "distance from the parameters to the point at which SAM computes the gradient; 0: the parameters themselves",
        source="configs/fedsamft.yaml of FedDRM's program: fedsam_rho: 0.05",
        minimum=0,
        search=Search(0.01, 0.5, log=True),
    )

    def notices(self, settings: "Settings", network: "Architecture") -> tuple[str, ...]:
        """Warn if rho is 0."""
        return () if self.rho else ("fedsam-ft-rho = 0: the run is equivalent to method = fedavg-ft",)

    card = replace(
        CARD,
        paper=Paper(
            "Qu, Li, Duan, Liu, Tang and Lu",
            2022,
            "Generalized Federated Learning via Sharpness Aware Minimization",
            "ICML",
            "https://proceedings.mlr.press/v162/qu22a.html",
        ),
        equations=(
            "w̃ = w + ρ ∇f_i(w; ξ) / ||∇f_i(w; ξ)||, then w ← w − η ∇f_i(w̃; ξ) (Algorithm 1, FedSAM)",
            *CARD.equations[1:],
        ),
        deviations=(
            "The paper does not fine-tune. FedDRM (2025, Section 3.1) adds fine-tuning.",
            "Clients are weighted by number of samples, as in FedDRM's program. The paper weights them equally "
            "(`client-weights=uniform`). The server's learning rate is 1.",
            "Only the passes at w, not at w̃, update BatchNorm's running statistics, as in published SAM programs.",
        ),
        program=replace(PROGRAM, entry="algorithms/fedsamft.py: FedSAMFT.local_train, finetune and aggregate"),
    )


class FedSAMFT(FedAvgFT):
    """Average as FedAvg does, except in fine-tuning rounds."""
