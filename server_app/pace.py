"""How long nodes take to answer, and so how long it is worth waiting for them."""

import math
import statistics
from collections import defaultdict

FLOOR_SECONDS = 60.0
"""Least seconds that a node has."""
FIRST_SECONDS = 3600.0
"""Least seconds of a node that has not answered in this phase yet, once others have."""
MARGIN, FIRST_MARGIN = 3.0, 10.0
"""How many times the slowest answer so far a node may take, and one that has not answered yet."""
SILENT_SECONDS = 15.0
"""Least seconds of silence that are unusual."""


class Pace:
    """The times that answers have taken so far, by phase and node.

    With ``automatic`` limits (``round-timeout=auto``) a node has three times as long as the slowest answer of any node
    in this phase so far, at least a minute. A node that has not answered yet has ten times as long, at least an hour;
    before the first answer of all there is no limit.
    """

    def __init__(self, *, automatic: bool = False) -> None:
        self.automatic = automatic
        self._slowest: dict[str, dict[int, float]] = defaultdict(dict)

    def note(self, phase: str, node: int, seconds: float) -> None:
        """Note that a node has answered a message of a phase after so many seconds."""
        known = self._slowest[phase]
        known[node] = max(seconds, known.get(node, 0.0))

    def silence(self, phase: str) -> float:
        """Return the seconds after which silence is unusual in a phase: twice the median of the slowest answers."""
        known = self._slowest[phase]
        return max(SILENT_SECONDS, 2 * statistics.median(known.values())) if known else SILENT_SECONDS

    def limit(self, phase: str, node: int) -> float:
        """Return the seconds that a node may take to answer a message of a phase, infinite if there is no limit."""
        known = self._slowest[phase]
        if not self.automatic or not known:
            return math.inf
        least, margin = (FLOOR_SECONDS, MARGIN) if node in known else (FIRST_SECONDS, FIRST_MARGIN)
        return max(least, margin * max(known.values()))
