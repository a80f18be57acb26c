"""FedProx with fine-tuning: every client adapts FedProx's model before using it."""

from dataclasses import replace

from posy.strategies.fedavg_ft import CARD, PROGRAM, FedAvgFT, FedAvgFTSettings
from posy.strategies.fedprox import EQUATION, PAPER, FedProxSettings


class FedProxFTSettings(FedProxSettings, FedAvgFTSettings, dp_sgd=True, robust=True):
    """Settings of FedProx and of fine-tuning, which has no proximal term."""

    card = replace(
        CARD,
        paper=PAPER,
        equations=(EQUATION, *CARD.equations[1:]),
        deviations=(
            "The paper does not fine-tune. FedDRM (2025, Section 3.1) adds fine-tuning without the proximal term.",
        ),
        program=replace(
            PROGRAM,
            entry="algorithms/fedproxft.py: FedProxFT.local_train, finetune and aggregate",
        ),
    )


class FedProxFT(FedAvgFT):
    """Average as FedAvg does, except in fine-tuning rounds."""
