"""FedBN (Li et al., 2021): all is averaged but normalisation, which stays with the clients.

That is each tensor of a BatchNorm, GroupNorm or LayerNorm, running statistics included. In a network without any it is
FedAvg.
"""

from typing import TYPE_CHECKING

from posy.strategies.method_settings import ALLOWED, MethodSettings

if TYPE_CHECKING:
    from posy.models.architecture import Architecture


class FedBNSettings(MethodSettings, noise=ALLOWED, sums=ALLOWED):
    """FedBN has no settings of its own."""

    def personal(self, network: "Architecture") -> tuple[str, ...]:
        """Keep the tensors of normalisation."""
        return network.normalisation
