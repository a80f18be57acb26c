"""What a tracker is told of a run, which one a run has, and that none of them ends a run."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from logging import WARNING
from pathlib import Path
from typing import Any, Protocol

from flwr.common.logger import log

from posy.extensions import is_own, load
from posy.settings import Scalar, SettingsError, shown
from posy.strategies.settings import OFF

ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "WANDB_MODE": "offline",
    "WANDB_ERROR_REPORTING": "false",
    "WANDB_SILENT": "true",
}
"""What the tools are told where nobody has told them otherwise: they send nothing anywhere."""
COUNTED = ("missing", "dropped", "left-out")
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


class Tracking:
    """Tells a run's tracker what happens; one that fails is told of in a warning, and left alone from then on."""

    def __init__(self, track: str) -> None:
        self._track = track
        self._make = find(track)
        self._tracker: Tracker | None = None

    def start(self, run: TrackedRun) -> None:
        """Make the tracker, if there is to be one."""
        if self._make is not None:
            make = self._make
            self._tracker = self._told(lambda: make(run))

    def round_finished(self, record: Mapping[str, Any]) -> None:
        """Tell of a round."""
        if (tracker := self._tracker) is not None:
            self._told(lambda: tracker.round_finished(record))

    def run_finished(self, summary: Mapping[str, Any]) -> None:
        """Tell of the end."""
        if (tracker := self._tracker) is not None:
            self._told(lambda: tracker.run_finished(summary))

    def _told(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except Exception as error:  # whatever the code of somebody else may raise
            self._tracker = None
            why = f"{type(error).__name__}: {error}"
            log(WARNING, "track = %s fails, and is told nothing more; the run goes on: %s", shown(self._track), why)
            return None


def find(track: str) -> Callable[[TrackedRun], Tracker] | None:
    """Return what makes the tracker that a setting names, None for ``off``.

    Raises
    ------
    SettingsError
        If its package is not installed, or the file or name of one's own is not there.
    """
    if track == OFF:
        return None
    if is_own(track):
        own: Callable[[TrackedRun], Tracker] = load(track, "track")
        if not callable(own):
            raise SettingsError(f"track = {shown(track)}: it must be a class, or a function, that takes the run")
        return own
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        return TRACKERS[track]()
    except ImportError as error:
        raise SettingsError(f"track = {track!r} needs {error.name}: pip install 'posy[{track}]'") from error


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


def _tensorboard() -> Callable[[TrackedRun], Tracker]:
    from posy.server_app.trackers.tensorboard import TensorBoard  # noqa: PLC0415 - an optional package

    return TensorBoard


def _mlflow() -> Callable[[TrackedRun], Tracker]:
    from posy.server_app.trackers.mlflow import MLflow  # noqa: PLC0415 - an optional package

    return MLflow


def _wandb() -> Callable[[TrackedRun], Tracker]:
    from posy.server_app.trackers.wandb import WeightsAndBiases  # noqa: PLC0415 - an optional package

    return WeightsAndBiases


TRACKERS = {"tensorboard": _tensorboard, "mlflow": _mlflow, "wandb": _wandb}
