"""FedProx (Li et al., 2020): FedAvg whose clients minimise F_i(w) + mu/2 ||w - w_t||^2 (Eq. 2)."""

from posy.settings import setting
from posy.strategies.method_settings import ALLOWED, MethodSettings


class FedProxSettings(MethodSettings, noise=ALLOWED):
    """Settings of FedProx."""

    mu: float = setting(0.001, "strength of the pull towards the server's model", minimum=0)
