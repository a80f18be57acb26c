"""FedProx (Li et al., 2020): FedAvg with a proximal term on the clients."""

from dataclasses import dataclass

from posy.settings import setting
from posy.strategies.base import SingleModelStrategy


@dataclass(frozen=True)
class FedProxSettings:
    """Settings of FedProx."""

    mu: float = setting(0.001, "strength of the pull towards the server's model", minimum=0)


class FedProx(SingleModelStrategy):
    """Average as FedAvg does; the clients minimise F_i(w) + mu/2 ||w - w_t||^2 (Eq. 2)."""
