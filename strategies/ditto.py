"""Ditto (Li et al., 2021): a global model, and a personal one pulled towards it.

``served`` reports the global model, ``local`` the personal one.
"""

from posy.settings import Search, setting
from posy.strategies.method_settings import ALLOWED, MethodSettings


class DittoSettings(MethodSettings, noise=ALLOWED, sums=ALLOWED):
    """Settings of Ditto."""

    strength: float = setting(
        0.1, "lambda: strength of the pull of the personal model", minimum=0, search=Search(0.01, 10.0, log=True)
    )
    epochs: int = setting(0, "epochs on the personal model; 0: as many as on the global one", minimum=0)
