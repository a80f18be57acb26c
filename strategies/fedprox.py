"""FedProx (Li et al., 2020): FedAvg with a proximal term on the clients."""

from posy.settings import Search, setting
from posy.strategies.method_settings import ALLOWED, MethodSettings


class FedProxSettings(MethodSettings, noise=ALLOWED, sums=ALLOWED, point="served"):
    """Settings of FedProx."""

    mu: float = setting(
        0.001, "strength of the pull towards the server's model", minimum=0, search=Search(0.0001, 1.0, log=True)
    )
