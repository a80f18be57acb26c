"""FedPer (Arivazhagan et al., 2019): the base layers are shared, the last layers are personal."""

from typing import TYPE_CHECKING

from posy.settings import Search, setting
from posy.strategies.method_settings import ALLOWED, MethodSettings

if TYPE_CHECKING:
    from posy.models.architecture import Architecture


class FedPerSettings(MethodSettings, noise=ALLOWED, sums=ALLOWED):
    """Settings of FedPer."""

    layers: int = setting(1, "number of personal layers, counted from the output", minimum=1, search=Search(1, 2))

    def personal(self, network: "Architecture") -> tuple[str, ...]:
        """Keep the last layers."""
        return network.layer_names[-self.layers :]
