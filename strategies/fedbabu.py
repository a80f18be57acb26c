"""FedBABU (Oh et al., 2022): only the body is trained and averaged, and each client fine-tunes the whole network.

The head stays as it was initialised until then. A newcomer is served and fine-tunes like the others.
"""

from typing import TYPE_CHECKING

from posy.settings import setting
from posy.strategies.fedavg_ft import FedAvgFT, FedAvgFTSettings
from posy.strategies.method_settings import ALLOWED

if TYPE_CHECKING:
    from posy.models.architecture import Architecture


class FedBABUSettings(FedAvgFTSettings, noise=ALLOWED, sums=ALLOWED):
    """Settings of FedBABU: those of the fine-tuning."""

    tuned: str = setting(
        "network", "what is fine-tuned: the whole network, or the head (FedDRM)", choices=("network", "head")
    )

    def personal(self, network: "Architecture") -> tuple[str, ...]:
        """Leave the head out of the messages: it is the same everywhere."""
        return ("head",)


class FedBABU(FedAvgFT):
    """Average the bodies."""
