"""Which tracker a run has, and that none of them ends a run."""

import os
from collections.abc import Callable, Mapping
from logging import WARNING
from typing import Any

from flwr.common.logger import log

from posy.extensions import is_own, load, said
from posy.server_app.trackers.tracker import TrackedRun, Tracker
from posy.settings import SettingsError, shown
from posy.strategies.settings import OFF

ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "WANDB_MODE": "offline",
    "WANDB_ERROR_REPORTING": "false",
    "WANDB_SILENT": "true",
}
"""What the tools are told where nobody has told them otherwise: they send nothing anywhere."""


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
            why = said(error)
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
