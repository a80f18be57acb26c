"""The interface of trackers, the run that a tracker records, and the numbers in a record."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from posy.settings import Scalar, key_of
from posy.strategies.replies import LIMITED

COUNTED = ("missing", "dropped", "left-out", *LIMITED, *map(key_of, LIMITED))
"""Entries of a round or summary that trackers receive only as counts of clients or replies."""


@dataclass(frozen=True)
class TrackedRun:
    """The run that a tracker records."""

    name: str
    id: str
    """Unique id of the run, which does not change when the run is resumed."""
    directory: Path
    """Directory of the results. Its folder ``figures/`` is complete once the run has finished."""
    settings: Mapping[str, Scalar]
    finished: int
    """Number of rounds that are already finished, which is 0 unless the run is resumed."""


class Tracker(Protocol):
    """Records a run. ``track="file:name"`` names a class or function that takes a :class:`TrackedRun`."""

    def round_finished(self, record: Mapping[str, Any]) -> None:
        """Record a round, in the format of ``rounds.jsonl``."""

    def run_finished(self, summary: Mapping[str, Any]) -> None:
        """Record the end of a completed, stopped or failed run, in the format of ``summary.json``."""


def numbers(record: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """Return the numbers in a round or summary, keyed by paths such as ``served_accuracy/mean``.

    Lists of clients and replies, such as missing clients and dropped replies, are replaced by counts. The
    function skips recalls and confusion matrices, which contain many numbers and are keyed by class names.
    """
    values: dict[str, float] = {}
    for key, value in record.items():
        if key in ("recall", "confusion"):
            continue
        if key in COUNTED and isinstance(value, Mapping | list):
            values[prefix + key] = sum(value.values()) if isinstance(value, Mapping) else len(value)
        elif isinstance(value, Mapping):
            values |= numbers(value, f"{prefix}{key}/")
        elif isinstance(value, list):
            values |= numbers({str(index): item for index, item in enumerate(value)}, f"{prefix}{key}/")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            values[prefix + key] = value
    return values
