"""Weights & Biases tracker, which writes offline to ``wandb/`` in the run's directory unless ``WANDB_MODE`` is set."""

from collections.abc import Mapping
from typing import Any

import wandb

from posy.server_app.trackers.tracker import TrackedRun, numbers


class WeightsAndBiases:
    """Writes files that the user can upload with `wandb sync`."""

    def __init__(self, run: TrackedRun) -> None:
        self._directory = run.directory
        self._run = wandb.init(
            project="posy",
            name=run.name,
            id=run.id,
            config=dict(run.settings),
            dir=str(run.directory),
            resume="allow" if run.finished else None,
            settings=wandb.Settings(console="off"),
        )

    def round_finished(self, record: Mapping[str, Any]) -> None:
        """Log a round's metrics."""
        values = numbers(record)
        self._run.log(values, step=int(values.pop("round")))

    def run_finished(self, summary: Mapping[str, Any]) -> None:
        """Log the results and the figures."""
        pictures = sorted((self._directory / "figures").glob("*.png"))
        self._run.log({file.stem: wandb.Image(str(file)) for file in pictures})
        self._run.summary.update(numbers(summary, "result/"))
        self._run.finish(0 if summary["status"] == "completed" else 1)
