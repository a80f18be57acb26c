"""Local only: every client trains alone; the server sends and receives no model."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from posy.strategies.base import PersonalisedStrategy
from posy.strategies.replies import Arrays, Update


@dataclass(frozen=True)
class LocalSettings:
    """Local training has no settings of its own."""


class Local(PersonalisedStrategy):
    """Tell the clients when to train; there is no served model, so only `local` is reported."""

    def initialise(self) -> None:
        """Keep no state."""

    def serve(self, client: int) -> Arrays:
        """Send nothing."""
        return []

    def expected_shapes(self, client: int) -> list[tuple[int, ...]]:
        """Expect nothing."""
        return []

    def aggregate(self, server_round: int, updates: list[Update]) -> dict[str, Any]:
        """Change nothing."""
        return {}

    def server_state(self) -> dict[str, npt.NDArray[np.generic]]:
        """Return no state."""
        return {}

    def load_server_state(self, arrays: Mapping[str, npt.NDArray[np.generic]]) -> None:
        """Take up nothing."""
