"""What a tracker is, the run that it is made for, and the numbers that it is told."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from posy.settings import Scalar, key_of
from posy.strategies.replies import LIMITED

COUNTED = ("missing", "dropped", "left-out", *LIMITED, *map(key_of, LIMITED))
"""Lists of a round or a summary of which their length is a number of the run."""


@dataclass(frozen=True)
class TrackedRun:
    """The run that a tracker is made for."""

    name: str
    id: str
    """No other run has it; a run that is resumed keeps it."""
    directory: Path
    """Its results; the pictures in ``figures/`` are complete when the run has finished."""
    settings: Mapping[str, Scalar]
    finished: int
    """Rounds that were finished before: 0 unless the run is resumed."""


class Tracker(Protocol):
    """Is told of a run; ``track="file:name"`` names what makes one of a :class:`TrackedRun`."""

    def round_finished(self, record: Mapping[str, Any]) -> None:
        """Take a round, as ``rounds.jsonl`` has it."""

    def run_finished(self, summary: Mapping[str, Any]) -> None:
        """Take the end of the run, as ``summary.json`` has it, however the run has ended."""


def numbers(record: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """Return the numbers in a round or a summary by the path to each: ``served_accuracy/mean``, ``seconds/train``.

    Of clients that are missing and replies that were dropped it is how many.
    """
    found: dict[str, float] = {}
    for key, value in record.items():
        if key in COUNTED and isinstance(value, Mapping | list):
            found[prefix + key] = sum(value.values()) if isinstance(value, Mapping) else len(value)
        elif isinstance(value, Mapping):
            found |= numbers(value, f"{prefix}{key}/")
        elif isinstance(value, list):
            found |= numbers({str(index): item for index, item in enumerate(value)}, f"{prefix}{key}/")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            found[prefix + key] = value
    return found
