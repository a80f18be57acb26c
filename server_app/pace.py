"""Measure the nodes' response times, and derive time limits from them."""

import math
import statistics
from collections import defaultdict

FLOOR_SECONDS = 60.0
"""Minimum time limit for a node, in seconds."""
FIRST_SECONDS = 3600.0
"""Minimum time limit, in seconds, for a node that has not yet answered in a phase in which other nodes have."""
MARGIN, FIRST_MARGIN = 3.0, 10.0
"""Time limits as multiples of the slowest response so far, for nodes that have answered before and for other nodes."""
SILENT_SECONDS = 15.0
"""Minimum of :meth:`Pace.silence`, in seconds."""


class Pace:
    """Records the nodes' response times in each phase, and derives time limits from them.

    With ``automatic`` limits (``round-timeout=auto``), a node may take three times as long as the slowest response of
    any node in the phase so far, and always at least a minute. A node that has not answered yet may take ten times as
    long as the slowest response, and always at least an hour. Before the first response, no node has a limit.
    """

    def __init__(self, *, automatic: bool = False) -> None:
        self.automatic = automatic
        self._slowest: dict[str, dict[int, float]] = defaultdict(dict)

    def note(self, phase: str, node: int, seconds: float) -> None:
        """Record a node's response time in a phase, in seconds."""
        slowest = self._slowest[phase]
        slowest[node] = max(seconds, slowest.get(node, 0.0))

    def silence(self, phase: str) -> float:
        """Return the number of seconds after which silence in a phase is unusual.

        This is twice the median of the nodes' slowest responses, but at least :data:`SILENT_SECONDS`.
        """
        slowest = self._slowest[phase]
        return max(SILENT_SECONDS, 2 * statistics.median(slowest.values())) if slowest else SILENT_SECONDS

    def limit(self, phase: str, node: int) -> float:
        """Return how many seconds a node may take to answer a message in a phase, or infinity for no limit."""
        slowest = self._slowest[phase]
        if not self.automatic or not slowest:
            return math.inf
        floor, margin = (FLOOR_SECONDS, MARGIN) if node in slowest else (FIRST_SECONDS, FIRST_MARGIN)
        return max(floor, margin * max(slowest.values()))
