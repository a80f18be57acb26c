"""How long nodes take to answer, and the time limits derived from this."""

import math
import statistics
from collections import defaultdict

FLOOR_SECONDS = 60.0
"""Minimum time limit for a node, in seconds."""
FIRST_SECONDS = 3600.0
"""Minimum time limit, in seconds, for a node that has never answered in this phase, once other nodes have."""
MARGIN, FIRST_MARGIN = 3.0, 10.0
"""Time limit as a multiple of the slowest answer so far, for a node that has answered before, and for other nodes."""
SILENT_SECONDS = 15.0
"""Minimum number of seconds after which silence is unusual."""


class Pace:
    """The times that answers have taken so far, per phase and node.

    With ``automatic`` limits (``round-timeout=auto``), a node may take three times as long as the slowest answer from
    any node in this phase so far, but at least a minute. A node that has not answered yet may take ten times as long,
    but at least an hour. Before the first answer, no node has a limit.
    """

    def __init__(self, *, automatic: bool = False) -> None:
        self.automatic = automatic
        self._slowest: dict[str, dict[int, float]] = defaultdict(dict)

    def note(self, phase: str, node: int, seconds: float) -> None:
        """Record the seconds that a node has taken to answer a message in a phase."""
        slowest = self._slowest[phase]
        slowest[node] = max(seconds, slowest.get(node, 0.0))

    def silence(self, phase: str) -> float:
        """Return the seconds after which silence is unusual in a phase: twice the median of nodes' slowest answers."""
        slowest = self._slowest[phase]
        return max(SILENT_SECONDS, 2 * statistics.median(slowest.values())) if slowest else SILENT_SECONDS

    def limit(self, phase: str, node: int) -> float:
        """Return the seconds that a node may take to answer a message in a phase, or infinity without a limit."""
        slowest = self._slowest[phase]
        if not self.automatic or not slowest:
            return math.inf
        floor, margin = (FLOOR_SECONDS, MARGIN) if node in slowest else (FIRST_SECONDS, FIRST_MARGIN)
        return max(floor, margin * max(slowest.values()))
