"""APFL (Deng et al., 2020): each client predicts with a mixture of a model of its own and the global one.

``served`` reports the global model, ``local`` the mixture of both as they are after the client's training.
"""

from posy.settings import Search, setting
from posy.strategies.method_settings import ALLOWED, MethodSettings


class APFLSettings(MethodSettings, noise=ALLOWED, sums=ALLOWED):
    """Settings of APFL."""

    alpha: float = setting(
        0.5,
        "share of the client's own model in the mixture, or its start",
        minimum=0,
        maximum=1,
        search=Search(0.05, 0.95),
    )
    adaptive: bool = setting(False, "each client adapts its share, by one gradient step a round")
