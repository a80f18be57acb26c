"""MLflow tracker: rounds, settings and figures, by default in ``mlflow.db`` and ``mlruns/``."""

import os
import time
from collections.abc import Mapping
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Metric, Param, RunTag

from posy.paths import absolute
from posy.server_app.trackers.tracker import TrackedRun, numbers

EXPERIMENT, ID = "posy", "posy.id"
"""Name of the experiment that contains all runs, and the tag that identifies a run when it resumes."""
STATES = {"completed": "FINISHED", "stopped": "KILLED"}


class MLflow:
    """Writes to ``MLFLOW_TRACKING_URI``, by default to files that `mlflow ui` shows if it runs in the same folder."""

    def __init__(self, run: TrackedRun) -> None:
        self._run = run
        self._client = MlflowClient(os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{absolute('mlflow.db')}")
        experiment = self._client.get_experiment_by_name(EXPERIMENT)
        artifacts = None if os.environ.get("MLFLOW_TRACKING_URI") else absolute("mlruns").as_uri()
        number = experiment.experiment_id if experiment else self._client.create_experiment(EXPERIMENT, artifacts)
        earlier_runs = self._client.search_runs([number], f"tags.`{ID}` = '{run.id}'") if run.finished else []
        if earlier_runs:
            self._number = earlier_runs[0].info.run_id
            self._client.update_run(self._number, "RUNNING")
            return
        self._number = self._client.create_run(number, run_name=run.name).info.run_id
        settings = [Param(key, str(value)) for key, value in run.settings.items()]
        self._client.log_batch(self._number, params=settings, tags=[RunTag(ID, run.id)])

    def round_finished(self, record: Mapping[str, Any]) -> None:
        """Log a round's metrics."""
        values, time_ms = numbers(record), round(1000 * time.time())
        step = int(values.pop("round"))
        self._client.log_batch(self._number, [Metric(name, value, time_ms, step) for name, value in values.items()])

    def run_finished(self, summary: Mapping[str, Any]) -> None:
        """Log the results and the figures."""
        time_ms = round(1000 * time.time())
        results = numbers(summary, "result/").items()
        self._client.log_batch(
            self._number, [Metric(name, value, time_ms, summary["rounds"]) for name, value in results]
        )
        for artifact in ("figures", "summary.json", "config.yaml"):
            self._client.log_artifact(self._number, str(self._run.directory / artifact))
        self._client.set_terminated(self._number, STATES.get(summary["status"], "FAILED"))
