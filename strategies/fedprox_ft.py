"""FedProx with fine-tuning: FedProx's model, adapted by every client before it is used."""

from dataclasses import replace

from posy.strategies.fedavg_ft import CARD, PROGRAM, FedAvgFT, FedAvgFTSettings
from posy.strategies.fedprox import EQUATION, PAPER, FedProxSettings


class FedProxFTSettings(FedProxSettings, FedAvgFTSettings, dp_sgd=True, robust=True):
    """Settings of FedProx and of the fine-tuning, which has no proximal term."""

    card = replace(
        CARD,
        paper=PAPER,
        equations=(EQUATION, *CARD.equations[1:]),
        deviations=("The paper does not fine-tune. FedDRM (2025, Section 3.1) adds it, without the proximal term.",),
        program=replace(
            PROGRAM,
            entry="algorithms/fedproxft.py: FedProxFT.local_train, finetune and aggregate",
        ),
    )


class FedProxFT(FedAvgFT):
    """Average as FedAvg does, except in the rounds of fine-tuning."""
