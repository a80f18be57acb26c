"""FedProx with fine-tuning: FedProx's model, adapted by every client before it is used."""

from posy.strategies.fedavg_ft import FedAvgFT, FedAvgFTSettings
from posy.strategies.fedprox import FedProxSettings
from posy.strategies.method_settings import ALLOWED


class FedProxFTSettings(FedProxSettings, FedAvgFTSettings, noise=ALLOWED, sums=ALLOWED):
    """Settings of FedProx and of the fine-tuning, which is without the proximal term."""


class FedProxFT(FedAvgFT):
    """FedAvg's server, which leaves the last rounds to the clients on demand."""
