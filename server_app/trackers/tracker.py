"""The interface of a tracker, the run that it tracks, and the numbers that it receives."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from posy.settings import Scalar, key_of
from posy.strategies.replies import LIMITED

COUNTED = ("missing", "dropped", "left-out", *LIMITED, *map(key_of, LIMITED))
"""Entries of a round or a summary whose clients or replies are only counted."""


@dataclass(frozen=True)
class TrackedRun:
    """The run that a tracker records."""

    name: str
    id: str
    """Unique id of the run, which a resumed run keeps."""
    directory: Path
    """Directory of its results. The pictures in ``figures/`` are complete when the run has finished."""
    settings: Mapping[str, Scalar]
    finished: int
    """Number of rounds that are already finished: 0 unless the run is resumed."""


class Tracker(Protocol):
    """Records a run. ``track="file:name"`` names a class or function that creates it from a :class:`TrackedRun`."""

    def round_finished(self, record: Mapping[str, Any]) -> None:
        """Record a round, in the form of ``rounds.jsonl``."""

    def run_finished(self, summary: Mapping[str, Any]) -> None:
        """Record the end of a completed, stopped or failed run, in the form of ``summary.json``."""


def numbers(record: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """Return the numbers in a round or a summary by their paths, such as ``served_accuracy/mean``.

    Lists of missing clients and dropped replies are replaced by their lengths.
    """
    values: dict[str, float] = {}
    for key, value in record.items():
        if key in COUNTED and isinstance(value, Mapping | list):
            values[prefix + key] = sum(value.values()) if isinstance(value, Mapping) else len(value)
        elif isinstance(value, Mapping):
            values |= numbers(value, f"{prefix}{key}/")
        elif isinstance(value, list):
            values |= numbers({str(index): item for index, item in enumerate(value)}, f"{prefix}{key}/")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            values[prefix + key] = value
    return values
