"""FedAvg with fine-tuning: FedAvg's model, adapted by every client before it is used."""

from dataclasses import dataclass

from posy.settings import setting
from posy.strategies.base import SingleModelStrategy


@dataclass(frozen=True)
class FedAvgFTSettings:
    """Settings of FedAvg with fine-tuning."""

    epochs: int = setting(1, "passes of fine-tuning over the client's training data", minimum=1)
    steps: int = setting(0, "SGD steps of fine-tuning instead of epochs; 0: use the epochs", minimum=0)
    lr: float = setting(0.0, "learning rate of fine-tuning; 0: that of the round", minimum=0)


class FedAvgFT(SingleModelStrategy):
    """FedAvg; in the rounds that are evaluated each client fine-tunes the served model."""
