"""LG-FedAvg (Liang et al., 2020): local representations, and a shared model on top of them.

Local and shared layers are trained together. The paper begins with a model of FedAvg's; here all begin alike.
"""

from typing import TYPE_CHECKING

from posy.settings import Search, setting
from posy.strategies.method_settings import ALLOWED, MethodSettings

if TYPE_CHECKING:
    from posy.models.architecture import Architecture


class LGFedAvgSettings(MethodSettings, noise=ALLOWED, sums=ALLOWED):
    """Settings of LG-FedAvg."""

    layers: int = setting(1, "number of shared layers, counted from the output", minimum=1, search=Search(1, 2))

    def personal(self, network: "Architecture") -> tuple[str, ...]:
        """Keep all but the last layers."""
        return network.layer_names[: -self.layers]
