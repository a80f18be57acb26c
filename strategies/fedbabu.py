"""FedBABU (Oh et al., 2022): only the body is trained and averaged, and each client fine-tunes the whole network.

The head stays as it was initialised until then. A newcomer is served and fine-tunes like the others.
"""

from typing import TYPE_CHECKING

from posy.strategies.fedavg_ft import FedAvgFTSettings
from posy.strategies.method_settings import ALLOWED

if TYPE_CHECKING:
    from posy.models.architecture import Architecture


class FedBABUSettings(FedAvgFTSettings, noise=ALLOWED, sums=ALLOWED):
    """Settings of FedBABU: those of the fine-tuning."""

    def personal(self, network: "Architecture") -> tuple[str, ...]:
        """Leave the head out of the messages: it is the same everywhere."""
        return ("head",)
