"""Local only: every client trains alone; the server sends and receives no model.

There is no served model, so only ``local`` is reported.
"""

from typing import Any

from flwr.common.typing import NDArrays

from posy.strategies.base import PersonalisedStrategy
from posy.strategies.method_settings import MethodSettings, Refused
from posy.strategies.replies import Update


class LocalSettings(
    MethodSettings, noise=Refused("its clients send no model"), sums=Refused("its clients send no model")
):
    """Local training has no settings of its own."""


class Local(PersonalisedStrategy):
    """Tell the clients when to train."""

    state = ()

    def initialise(self) -> None:
        """Hold no model."""

    def serve(self, client: int) -> NDArrays:
        """Send nothing."""
        return []

    def aggregate(self, server_round: int, updates: list[Update]) -> dict[str, Any]:
        """Change nothing."""
        return {}
