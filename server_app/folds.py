"""Run a cross-validation: one training run for each fold, and one summary over all test samples."""

import csv
import shutil
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from logging import INFO
from pathlib import Path
from typing import Any

from flwr.common.logger import log

from posy.data.task import Task
from posy.extensions import key_prefix
from posy.metrics import column_of
from posy.paths import absolute
from posy.scores import Predictions, values_of
from posy.server_app.masked_sums import add_sums, confusion_in, pooled_entry
from posy.server_app.pooled_scores import class_counts, joined, majority_notice, pooled_scores, read_clients
from posy.server_app.progress import results_table
from posy.server_app.record import Record
from posy.server_app.recorder import NOT_AVAILABLE, Recorder, new_directory
from posy.server_app.results import RunDirectory, Status
from posy.server_app.resume import CONFIG, checkpoint_rounds, read_summary
from posy.settings import SettingsError
from posy.spread import spread
from posy.strategies.columns import POINTS, Columns
from posy.strategies.registry import with_experiment
from posy.strategies.run_settings import RunSettings
from posy.strategies.settings import Settings

UNKNOWN: dict[str, None] = {"last": None, "best": None, "upper-bound": None}
AT_NODES = "means over the folds; scores over all samples are not available, because the predictions stay on the nodes"
"""The entry ``fold-scores`` in a summary without predictions."""
OF_SUMS = (
    "means over the folds; the sums of the folds cannot be added, because they contain different classes or metrics"
)
"""The entry ``fold-scores`` in a summary under secure aggregation if scores over all samples are not available."""
Train = Callable[[Mapping[str, Any]], Recorder]
"""Type of a function that executes a run with some settings changed."""


@dataclass
class CrossValidation:
    """The runs of all folds, in the folders ``fold-1``, ``fold-2``, … of one directory."""

    settings: Settings
    directory: RunDirectory
    summary: dict[str, Any] = field(default_factory=dict)
    _task: Task | None = None
    """The task, which is known once a fold has been trained."""

    def run(self, train: Train) -> None:
        """Train the folds that have not finished, and write the summary of all folds.

        A fold that was interrupted after a checkpoint resumes from it.
        """
        status: Status = "failed"
        try:
            for fold in range(1, self.settings.data.folds + 1):
                self._train(fold, train)
            status = "completed"
        except KeyboardInterrupt:
            status = "stopped"
            raise
        finally:
            self.summarise(status, self._task)
            self.directory.release()
        print(results_table(self.summary, self.directory.path), flush=True)

    def record(self) -> Record:
        """Return the record of the cross-validation. The folders of the folds contain the models."""
        return Record(self.directory.path)

    def _folder(self, fold: int) -> Path:
        return fold_directory(self.directory.path, fold)

    def _train(self, fold: int, train: Train) -> None:
        path = self._folder(fold)
        changes: dict[str, Any] = {"output-dir": str(self.directory.path)}
        if read_summary(path).get("status") == "completed":
            return
        log(INFO, "Fold %s of %s", fold, self.settings.data.folds)
        if checkpoint_rounds(path):
            changes["resume"] = path.name
        else:
            shutil.rmtree(path, ignore_errors=True)
            keeps_predictions = not self.settings.run.secure_aggregation
            changes |= {"fold": fold, "run-name": path.name, "save-predictions": keeps_predictions}
        self._task = train(changes).workspace.task

    def summarise(self, status: Status, task: Task | None) -> None:
        """Write ``summary.json`` and ``clients.csv``, whose scores cover the test samples of all finished folds.

        Without a ``task``, the summary has no scores.
        """
        settings, run = self.settings, self.settings.run
        folds = range(1, settings.data.folds + 1)
        finished = {fold: s for fold in folds if (s := read_summary(self._folder(fold))).get("status") == "completed"}
        summary: dict[str, Any] = {
            "status": status,
            "method": key_prefix(run.method),
            "point": settings.method.point,
            "dataset": settings.data.dataset,
            "num-clients": settings.data.num_clients,
            "rounds": max((each["rounds"] for each in finished.values()), default=0),
            "seed": run.seed,
            "seconds": sum(each["seconds"] for each in finished.values()),
            **{key: sum(each[key] for each in finished.values()) for key in ("bytes-up", "bytes-down", "samples")},
            "dropped": sum((Counter(each["dropped"]) for each in finished.values()), Counter()),
            "missing": [],
            "system-accuracy": None,
            "folds": settings.data.folds,
            "runs": [_fold_entry(fold, each) for fold, each in finished.items()],
            **_central_over_folds([each["central"] for each in finished.values() if "central" in each]),
            **{point: dict(UNKNOWN) for point in POINTS},
        }
        for each in finished.values():
            summary |= {key: each[key] for key in ("metric", "sites") if key in each}
        notices = _shared_notices([*finished.values()])
        if task is not None and "metric" in summary:
            summary |= self._scores(task, finished, summary)
        if notices := [*dict.fromkeys([*notices, *summary.get("notices", ())])]:
            summary["notices"] = notices
        self.summary = self.directory.write_summary(summary)

    def _scores(self, task: Task, finished: Mapping[int, dict[str, Any]], summary: Mapping[str, Any]) -> dict[str, Any]:
        """Return the scores over the finished folds, given the summary of each fold.

        They are the scores over each client's out-of-fold predictions, and over the predictions of all clients. If the
        predictions stay on the nodes, the scores are means over the folds.
        """
        run, columns, rounds = self.settings.run, Columns.of(self.settings, task), summary["rounds"]
        if run.secure_aggregation:
            return self._of_sums(task, finished, columns, rounds)
        folders = [self._folder(fold) / "predictions" for fold in finished]
        has_predictions = any(folder.is_dir() for folder in folders)
        names = columns.metrics
        scores: dict[str, Any] = {}
        if has_predictions:
            rows, scores = self._out_of_fold(task, folders, columns)
        else:
            last = {self._folder(fold): each["rounds"] for fold, each in finished.items()}
            rows = _client_means(last, [column_of(at, name) for at in POINTS for name in names])
            scores["fold-scores"] = AT_NODES
        over_clients = {
            column: spread(
                [row[column] for row in rows.values() if column in row],
                [row["n_test"] for row in rows.values() if column in row],
                lower_is_better=columns.lower_is_better(column),
            )
            for column in (column_of(at, name) for at in POINTS for name in names)
        }
        self.directory.columns = columns.of_clients(chosen_settings=bool(self.settings.train.client_bounds))
        self.directory.grown["clients.csv"] = []
        (self.directory.path / "clients.csv").unlink(missing_ok=True)
        self.directory.append_clients({"round": rounds, "partition": c, **row} for c, row in rows.items())
        if has_predictions and not run.save_predictions and len(folders) == self.settings.data.folds:
            for folder in folders:
                shutil.rmtree(folder)
        for at in POINTS:
            over = over_clients[column_of(at, columns.metric.name)]
            scores[at] = {**UNKNOWN, "last": {"round": rounds, **over, "missing": 0} if over else None}
        reported = {column: over for column, over in over_clients.items() if over}
        return {**scores, "metrics": {"round": rounds, **reported}}

    def _of_sums(
        self, task: Task, finished: Mapping[int, dict[str, Any]], columns: Columns, rounds: int
    ) -> dict[str, Any]:
        """Return the scores over all test samples of the finished folds, from the masked sums of each fold.

        If the sums cannot be added, the scores are means over the folds.
        """
        metric, point_of_method = columns.metric, self.settings.method.point
        tallies = add_sums(map(self._folder, finished), task, self.settings.run, columns.metrics)
        scores = _means_of_sums(finished.values())
        has_means = any(point in scores and point not in tallies for point in POINTS)
        for point, tally in tallies.items():
            scores = {key: entry for key, entry in scores.items() if key.partition("_")[0] != point}
            scores |= {column_of(point, name): tally.spread(name) for name in tally.metrics}
            scores[point] = tally.spread(metric.name)
        matrices = {point: confusion_in(tally, task) for point, tally in tallies.items()}
        has_matrix = bool(columns.other_metrics)
        pooled = {
            point: pooled_entry(tally, task, matrices[point] if has_matrix else None)
            for point, tally in tallies.items()
        }
        matrix = matrices.get(point_of_method)
        notice = "" if matrix is None else majority_notice(matrix.sum(axis=1), task.class_names, metric)
        last = {point: scores.pop(point, None) for point in POINTS}
        return {
            **{
                p: {**UNKNOWN, "last": {"round": rounds, **over, "missing": 0} if over else None}
                for p, over in last.items()
            },
            "metrics": {"round": rounds, **scores},
            "client-scores": NOT_AVAILABLE,
            **({"pooled": pooled} if pooled else {}),
            **({"fold-scores": OF_SUMS} if has_means else {}),
            **({"notices": [notice]} if notice else {}),
        }

    def _out_of_fold(
        self, task: Task, folders: Sequence[Path], columns: Columns
    ) -> tuple[dict[int, dict[str, Any]], dict[str, Any]]:
        """Return the row of each client with its metrics, and the entries for the summary about all samples."""
        run, point = self.settings.run, self.settings.method.point
        rows: dict[int, dict[str, Any]] = {}
        parts: dict[str, list[Predictions]] = {at: [] for at in POINTS}
        for client in range(self.settings.data.num_clients):
            for at in POINTS:
                predictions = read_clients(folders, [client], task, run, at)
                if not len(predictions.y):
                    continue
                parts[at].append(predictions)
                values = values_of(predictions, columns.metrics)
                row = rows.setdefault(client, {"n_test": len(predictions.y)})
                row |= {column_of(at, name): value for name, value in values.items()}
        predictions_at = {at: joined(parts[at], task, run) for at in POINTS}
        pooled = pooled_scores(predictions_at, task, run, point, columns)
        notice = majority_notice(class_counts(predictions_at[point]), task.class_names, columns.metric)
        return rows, {"pooled": pooled, **({"notices": [notice]} if notice else {})}


def _fold_entry(fold: int, summary: Mapping[str, Any]) -> dict[str, Any]:
    """Return a fold's entry in the summary, with the mean score of its last round at each evaluation point."""
    means = {point: (summary[point]["last"] or {}).get("mean") for point in POINTS}
    return {"fold": fold, "rounds": summary["rounds"], **means}


def _shared_notices(summaries: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the notices in the summaries of all folds. They concern the settings rather than the samples of a fold."""
    lists = [each.get("notices", ()) for each in summaries]
    return [notice for notice in lists[0] if all(notice in other for other in lists)] if lists else []


def _central_over_folds(entries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the summary's entry for the central test set, with the spread of each metric over the folds' means.

    ``std`` is the sample standard deviation over the folds, as over the seeds in a table, and None for a single fold.
    """
    if not entries:
        return {}
    central: dict[str, Any] = {"samples": entries[0]["samples"], "round": max(each["round"] for each in entries)}
    for point in POINTS:
        scores = [each[point] for each in entries if point in each]
        names = dict.fromkeys(name for each in scores for name in each["metrics"])
        metrics = {}
        for name in names:
            means = [each["metrics"][name]["mean"] for each in scores if name in each["metrics"]]
            metrics[name] = _over_folds(means)
        if scores:
            central[point] = {"models": sum(each["models"] for each in scores), "metrics": metrics}
    return {"central": central}


def _over_folds(means: Sequence[float]) -> dict[str, Any]:
    """Return the mean, the sample standard deviation, the minimum, the maximum and the number of the folds' means."""
    std = statistics.stdev(means) if len(means) > 1 else None
    return {"mean": statistics.fmean(means), "std": std, "min": min(means), "max": max(means), "folds": len(means)}


def _client_means(rounds: Mapping[Path, int], columns: Sequence[str]) -> dict[int, dict[str, Any]]:
    """Return the mean of each client's scores over the folds, weighted by its test samples.

    Parameters
    ----------
    rounds : mapping of Path to int
        The last round of each fold, keyed by the fold's folder.
    columns : sequence of str
        The columns of ``clients.csv`` that contain the scores. A fold without a score is skipped.
    """
    folds: dict[int, list[dict[str, str]]] = {}
    for folder, last in rounds.items():
        with (folder / "clients.csv").open(encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file):
                if int(row["round"]) == last and row["n_test"]:
                    folds.setdefault(int(row["partition"]), []).append(row)
    means: dict[int, dict[str, Any]] = {}
    for client, rows in sorted(folds.items()):
        means[client] = {"n_test": sum(int(row["n_test"]) for row in rows)}
        for column in columns:
            if scored := [row for row in rows if row.get(column)]:
                weights = [int(row["n_test"]) for row in scored]
                means[client][column] = statistics.fmean((float(row[column]) for row in scored), weights)
    return {client: row for client, row in means.items() if len(row) > 1}


def _means_of_sums(folds: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return each score's mean over the folds, weighted by their test samples, for a server that knows only sums.

    The scores are keyed by column, and the run's metric also by evaluation point.
    """
    entries: dict[str, list[Mapping[str, Any]]] = {}
    for each in folds:
        metrics = {column: e for column, e in (each.get("metrics") or {}).items() if column != "round"}
        for key, entry in {**{point: each[point]["last"] for point in POINTS}, **metrics}.items():
            if entry and entry.get("samples"):
                entries.setdefault(key, []).append(entry)
    means: dict[str, Any] = {}
    for key, parts in entries.items():
        mean = statistics.fmean((part["mean"] for part in parts), [part["samples"] for part in parts])
        counts = {"clients": max(part["clients"] for part in parts), "samples": sum(part["samples"] for part in parts)}
        means[key] = {"mean": mean, **dict.fromkeys(("std", "min", "max", "tenth", "weighted", "jain")), **counts}
    return means


def interrupted(user_settings: Mapping[str, Any], where: str) -> Path | None:
    """Return the directory of the cross-validation that the settings resume, or None."""
    name = user_settings.get("resume")
    if not name:
        return None
    values = with_experiment(user_settings, where)
    path = absolute(str(values.get("output-dir", RunSettings.output_dir))) / str(name)
    return path if (path / CONFIG).is_file() and "runs" in read_summary(path) else None


def cross_validation(settings: Settings, resumed: Path | None) -> CrossValidation:
    """Return the cross-validation for some settings, in a new directory or in ``resumed``."""
    if resumed is None:
        directory = new_directory(settings, f"folds{settings.data.folds}")
        directory.write_config(settings.as_config())
    else:
        if read_summary(resumed).get("status") == "completed":
            raise SettingsError(f"resume = {resumed.name!r}: all folds are complete")
        directory = RunDirectory(resumed, "")
    without_folders(directory)
    return CrossValidation(settings, directory)


def fold_directory(directory: Path, fold: int) -> Path:
    """Return the folder of a fold in the directory of a cross-validation."""
    return directory / f"fold-{fold}"


def without_folders(directory: RunDirectory) -> None:
    """Remove the empty folders for models and figures, because each fold has its own models and figures."""
    for folder in (directory.models, directory.figures):
        with suppress(OSError):
            folder.rmdir()
