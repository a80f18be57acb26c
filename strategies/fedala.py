"""FedALA (Zhang et al., 2023): each client learns, entry by entry, how much of the global model to take over.

Only the upper layers are mixed; the lower ones are the global model's. ``served`` reports the model after that.
"""

from typing import TYPE_CHECKING

from posy.settings import Search, setting
from posy.strategies.method_settings import ALLOWED, MethodSettings

if TYPE_CHECKING:
    from posy.models.architecture import Architecture


class FedALASettings(MethodSettings, noise=ALLOWED, sums=ALLOWED, point="served"):
    """Settings of FedALA."""

    layers: int = setting(1, "p: number of layers that are mixed, counted from the output", minimum=1)
    eta: float = setting(
        1.0,
        "learning rate of the weights; 0: they stay 1, which is FedAvg",
        minimum=0,
        search=Search(0.1, 2.0, log=True),
    )
    sample: float = setting(
        0.8, "share of the training samples, in whole batches, that a pass over the weights sees", above=0, maximum=1
    )

    def mixed(self, network: "Architecture") -> tuple[str, ...]:
        """Return the layers that are mixed."""
        return network.layer_names[-self.layers :]
