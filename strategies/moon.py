"""MOON (Li et al., 2021): features are drawn to the global model's, away from the client's previous ones.

Where the paper compares the outputs of a projection head, this takes what the classifier sees, so that the network is
that of the other methods. In a client's first round the previous model is the global one: the term is then constant.
"""

from posy.settings import Search, setting
from posy.strategies.method_settings import ALLOWED, MethodSettings


class MOONSettings(MethodSettings, noise=ALLOWED, sums=ALLOWED, point="served"):
    """Settings of MOON."""

    mu: float = setting(1.0, "weight of the contrastive term", minimum=0, search=Search(0.1, 10.0, log=True))
    temperature: float = setting(
        0.5, "tau: temperature of the similarities", above=0, search=Search(0.1, 1.0, log=True)
    )
