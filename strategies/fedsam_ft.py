"""FedSAM with fine-tuning (Qu et al., 2022): clients seek flat minima, and adapt the mean model before it is used."""

from posy.settings import Search, setting
from posy.strategies.fedavg_ft import FedAvgFT, FedAvgFTSettings
from posy.strategies.method_settings import ALLOWED


class FedSAMFTSettings(FedAvgFTSettings, noise=ALLOWED, sums=ALLOWED):
    """Settings of FedSAM and of the fine-tuning, which is plain SGD."""

    rho: float = setting(
        0.05,
        "how far SAM climbs before it takes the gradient; 0: plain SGD",
        minimum=0,
        search=Search(0.01, 0.5, log=True),
    )


class FedSAMFT(FedAvgFT):
    """FedAvg's server, which leaves the last rounds to the clients on demand."""
