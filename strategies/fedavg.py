"""FedAvg (McMahan et al., 2017): one model, averaged with weights n_i / N.

It has no strategy and no client of its own: :class:`~posy.strategies.base.PersonalisedStrategy` and
:class:`~posy.client_app.base.PersonalClient` are FedAvg wherever a method does not change them.
"""

from posy.strategies.method_settings import ALLOWED, MethodSettings


class FedAvgSettings(MethodSettings, noise=ALLOWED, sums=ALLOWED, point="served"):
    """FedAvg has no settings of its own."""
