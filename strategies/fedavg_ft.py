"""FedAvg with fine-tuning: FedAvg's model, adapted by every client before it is used."""

from posy.settings import Search, setting
from posy.strategies.method_settings import ALLOWED, MethodSettings


class FedAvgFTSettings(MethodSettings, noise=ALLOWED, sums=ALLOWED):
    """Settings of FedAvg with fine-tuning."""

    epochs: int = setting(1, "passes of fine-tuning over the client's training data", minimum=1, search=Search(1, 10))
    steps: int = setting(0, "SGD steps of fine-tuning instead of epochs; 0: use the epochs", minimum=0)
    lr: float = setting(
        0.0, "learning rate of fine-tuning; 0: that of the round", minimum=0, search=Search(0.0005, 0.2, log=True)
    )
