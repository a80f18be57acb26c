"""Calls a run's tracker. If the tracker fails, the run continues without it."""

import os
from collections.abc import Callable, Mapping
from logging import WARNING
from typing import Any

from flwr.common.logger import log

from posy.extensions import format_error, is_custom, load
from posy.server_app.trackers.tracker import TrackedRun, Tracker
from posy.settings import SettingsError, quoted
from posy.strategies.run_settings import OFF

ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "WANDB_MODE": "offline",
    "WANDB_ERROR_REPORTING": "false",
    "WANDB_SILENT": "true",
}
"""Defaults for the tools' environment variables that keep the tools from sending data. The user may override them."""


class Tracking:
    """Passes a run's rounds to its tracker. If the tracker fails, Posy logs a warning and disables it."""

    def __init__(self, track: str) -> None:
        self._track = track
        self._make = find(track)
        self._tracker: Tracker | None = None

    def start(self, run: TrackedRun) -> None:
        """Create the tracker, if the run has one."""
        if self._make is not None:
            make = self._make
            self._tracker = self._call(lambda: make(run))

    def round_finished(self, record: Mapping[str, Any]) -> None:
        """Pass a round to the tracker."""
        if (tracker := self._tracker) is not None:
            self._call(lambda: tracker.round_finished(record))

    def run_finished(self, summary: Mapping[str, Any]) -> None:
        """Pass the run's summary to the tracker."""
        if (tracker := self._tracker) is not None:
            self._call(lambda: tracker.run_finished(summary))

    def _call(self, call: Callable[[], Any]) -> Any:
        """Return the result of a call; if the tracker raises an error, disable the tracker and return None."""
        try:
            return call()
        except Exception as error:  # a tracker may raise any error
            self._tracker = None
            reason = format_error(error)
            log(WARNING, "track = %s failed and is disabled; the run continues: %s", quoted(self._track), reason)
            return None


def find(track: str) -> Callable[[TrackedRun], Tracker] | None:
    """Return the class or function that creates the tracker named in the setting, or None for ``off``.

    Raises
    ------
    SettingsError
        If the tracker's package is not installed, or the file or name of a custom tracker does not exist.
    """
    if track == OFF:
        return None
    if is_custom(track):
        custom: Callable[[TrackedRun], Tracker] = load(track, "track")
        if not callable(custom):
            raise SettingsError(f"track = {quoted(track)}: it must be a class, or a function, that takes the run")
        return custom
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
