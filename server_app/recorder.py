"""Record a run: write its rounds to files, print its progress, and draw its figures."""

import shutil
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from logging import INFO, WARNING
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from flwr.app import ArrayRecord, MetricRecord
from flwr.common.logger import log

from posy.client_app.workspace import Workspace
from posy.data.central import CentralTest
from posy.data.partitions import small_clients
from posy.extensions import key_prefix
from posy.metrics import column_of
from posy.server_app.central import CentralScores
from posy.server_app.checkpoints import ARRAYS, Checkpoint, Checkpoints, Resumption, data_digests
from posy.server_app.federation import Federation
from posy.server_app.masked_sums import write_sums
from posy.server_app.memory import Memory
from posy.server_app.pictures import Pictures
from posy.server_app.pooled_scores import class_counts, majority_notice, pooled_scores, read_clients
from posy.server_app.privacy import PrivacyLedger
from posy.server_app.progress import Progress, results_table
from posy.server_app.record import Record
from posy.server_app.results import RunDirectory, Status
from posy.server_app.resume import WITHOUT_MODEL
from posy.server_app.router_calibration import calibrate_run
from posy.server_app.run_status import RunStatus
from posy.server_app.system import SystemAccuracy, system_accuracy
from posy.server_app.totals import Totals
from posy.server_app.trackers.tracker import TrackedRun
from posy.server_app.trackers.tracking import Tracking
from posy.settings import DivergedError, RunError
from posy.signals import deferred_signals
from posy.storage import plain, write_arrays
from posy.strategies import schedule
from posy.strategies.base import PersonalisedStrategy
from posy.strategies.columns import POINTS, Columns, newcomer_scores
from posy.strategies.privacy import event_of
from posy.strategies.replies import LIMITED, RoundRecord
from posy.strategies.server_state import state_of
from posy.strategies.settings import Settings, folder_name

NOT_AVAILABLE = "not available: with secure-aggregation, the server knows only sums over the clients"
"""The entry ``client-scores`` in a summary under secure aggregation."""
HELD_BYTES = 1 << 30
"""Maximum size, in bytes, of a server state that is copied after each round in case the next round is interrupted."""
MEMORY_SECONDS = 5.0
"""Maximum age, in seconds, of the peak memory in the summary of a run in progress."""


def new_directory(settings: Settings, suffix: str) -> RunDirectory:
    """Create the directory of a run, named by ``run-name`` or by method, data set, ``suffix`` and time.

    The run of a fold with ``part-of`` uses the folder ``fold-K`` of its cross-validation.
    """
    if settings.run.part_of:
        folder = Path(settings.run.output_dir) / settings.run.part_of
        return RunDirectory.create(folder, f"fold-{settings.data.fold}", exact=True)
    return RunDirectory.create(Path(settings.run.output_dir), folder_name(settings, suffix))


class Recorder:
    """Writes the files of a new or a resumed run, and shows its progress.

    The files are in ``directory``; ``summary`` is the content of ``summary.json``, and ``rounds`` is the number of
    finished rounds.
    """

    def __init__(
        self,
        settings: Settings,
        strategy: PersonalisedStrategy,
        workspace: Workspace,
        federation: Federation,
        resumption: Resumption | None = None,
        status: RunStatus | None = None,
        central: CentralTest | None = None,
    ) -> None:
        self.status = status or RunStatus()
        self.settings, self.strategy = settings, strategy
        self.workspace, self.federation = workspace, federation
        run = settings.run
        if resumption is None:
            self.directory = new_directory(settings, f"seed{run.seed}")
            self.checkpoints = Checkpoints(self.directory, run.checkpoint_every, run.num_server_rounds)
            self._resumed: list[dict[str, Any]] = []
            self._data = data_digests(workspace) if self.checkpoints.every else {}
        else:  # the resumption has already compared the data
            self.directory, self.checkpoints = resumption.directory, resumption.checkpoints
            checkpoint, self._resumed = resumption.checkpoint, resumption.history
            self._data = checkpoint.progress["data"]
            self.checkpoints.note(settings.as_config(), self._resumed)  # the clients have accepted the settings
        self.columns = Columns.of(settings, workspace.task)
        self.directory.columns = self.columns.of_clients(
            summed=run.secure_aggregation, chosen_settings=bool(settings.train.client_bounds)
        )
        gpu = torch.cuda.get_device_name(workspace.device) if workspace.device.type == "cuda" else None
        resolved = {"model": strategy.architecture.model, "device": str(workspace.device)}
        self.directory.write_config(settings.as_config(), gpu, resolved=resolved, resumed=self._resumed)
        if run.save_models:
            strategy.exchange.models_folder = self.directory.models
        self._tracking = Tracking(run.track)
        self._pictures = Pictures(self.directory, strategy, workspace, federation)
        self.totals = Totals()
        self.privacy = PrivacyLedger(
            settings,
            self.directory.path,
            lambda client: event_of(strategy.exchange.settings_of(client), strategy.clients[client].num_train),
        )
        strategy.rounds.before_training = self.privacy.note
        self.rounds = 0
        # The server's state after the last finished round; None while a round is being recorded, or if it is large.
        self._server_state: dict[str, npt.NDArray[np.generic]] | None = None
        self._versions: dict[int, str] = {}
        self.system: SystemAccuracy | None = None
        self._central_scores = CentralScores(central, strategy, workspace, self.directory.models) if central else None
        self.none_fits: dict[str, Any] = {}
        """The calibration of the router's distance (:func:`calibrate_run`); empty if the method does not route."""
        self.central: dict[str, Any] = {}
        """The scores on the central test set after the last round; empty without a central test set."""
        self.pooled: dict[str, Any] = {}
        """The scores over all test samples (:func:`pooled_scores`); empty if the predictions stay on the nodes."""
        self.notices: list[str] = []
        """Warnings about the scores, for the summary."""
        self.summary: dict[str, Any] = {}
        self._started = time.perf_counter()
        self._memory = Memory(workspace.device)
        if resumption is not None:
            self._continue_from(resumption.checkpoint)
        if self._central_scores and (notice := self._central_scores.notice):
            log(WARNING, "%s", notice)
            self.notices.append(notice)
        self.status.note(
            results=self.directory.path,
            rounds=self.strategy.settings.run.num_server_rounds,
            method=key_prefix(run.method),
        )
        self._note_round()
        self.progress = Progress(run.num_server_rounds, self.columns.metric, done=self.rounds)

    def __enter__(self) -> Self:
        if self.workspace.of_sites:
            print(self.federation.task(self.strategy.architecture.model), flush=True)
        with self._writing():
            self._pictures.draw_partition()
            self._write_summary("running")
        path = self.directory.path
        self._tracking.start(TrackedRun(path.name, self.directory.id, path, self.settings.as_config(), self.rounds))
        self.progress.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, *raised: object) -> None:
        self.progress.__exit__()
        if kind is None:
            with self._writing():
                self._write_end("completed")
        else:
            outcome: Status = "failed" if issubclass(kind, Exception) else "stopped"
            try:
                self._write_last_checkpoint()
                self._write_end("diverged" if issubclass(kind, DivergedError) else outcome)
            except OSError as error:  # a full disk may have ended the run
                log(WARNING, "some files of the run could not be written: %s", error)
        if self.summary:
            self._tracking.run_finished(self.summary)
            print(results_table(self.summary, self.directory.path), flush=True)

    def _write_end(self, status: Status) -> None:
        self._write_summary(status)  # in case a later step fails or is interrupted
        if self.settings.run.save_models:
            write_arrays(self.directory.models / ARRAYS, self._server_state or state_of(self.strategy))
        if status == "completed" and not self.settings.train.withholds_scores:
            self.system = system_accuracy(self.settings, self.strategy, self.workspace, self.directory)
        if status == "completed":
            if self.settings.method.routes:
                self.none_fits = calibrate_run(self.workspace, self.record())
            self._score_all_samples()
            if self.settings.data.fold and self.settings.run.secure_aggregation:
                write_sums(self.directory.path, self.totals.sums, self.workspace.task)
            self.central = self._central_scores.of_last_round(self.rounds) if self._central_scores else {}
        self._pictures.draw(self.totals, self.system, final=True)
        self._write_summary(status)

    def _score_all_samples(self) -> None:
        """Score all test samples together, and delete the predictions unless ``save-predictions`` is true."""
        folder, run, task = self.directory.predictions, self.settings.run, self.workspace.task
        if not folder.is_dir():  # the predictions stay on the nodes
            return
        point = self.settings.method.point
        rows = {client: self.totals.clients[client] for client in self.totals.last_round}
        name = self.columns.metric.name
        clients = {p: [c for c, row in rows.items() if column_of(p, name) in row] for p in POINTS}
        try:
            predictions = {at: read_clients([folder], clients[at], task, run, at) for at in POINTS}
            self.pooled = pooled_scores(predictions, task, run, point, self.columns)
            if notice := majority_notice(class_counts(predictions[point]), task.class_names, self.columns.metric):
                self.notices.append(notice)
                log(WARNING, "%s", notice)
        except (ValueError, LookupError) as error:
            log(WARNING, "the predictions in %s cannot be read: %s", folder, error)
        if not run.save_predictions:
            shutil.rmtree(folder)

    def record(self) -> Record:
        """Return the record of the finished run."""
        return Record(self.directory.path, self.strategy)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Convert an error in writing the run's files to :class:`RunError`, which Posy reports in one line."""
        try:
            yield
        except OSError as error:
            raise RunError(f"the files of the run in {self.directory.path} cannot be written: {error}") from error

    def finish_round(self, server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
        """Record a finished round. Flower's strategy calls this method at the end of every round."""
        if server_round > 0 and self.strategy.record.number == server_round:
            with deferred_signals(), self._writing():
                self._finish_round(server_round, self.strategy.record)
        return None

    def _finish_round(self, server_round: int, record: RoundRecord) -> None:
        self._server_state = None
        self.rounds = server_round
        self._versions = dict(self.strategy.exchange.states.versions)
        evaluated = schedule.evaluates(self.strategy.settings.run, server_round)
        over_clients = self.totals.add(record, self.columns, evaluated=evaluated)
        run, metric = self.settings.run, self.columns.metric
        if self.totals.runs_out_of_patience(server_round, run, self.settings.method.point, metric):
            self._end_after(server_round + 1)
        notice = self.totals.patience_notice(run, self.settings.method.point, metric) if evaluated else ""
        if notice and notice not in self.notices:
            log(WARNING, notice)
            self.notices.append(notice)
        system = self._system_accuracy_of(server_round)
        central = self._central_scores.of_round(server_round) if evaluated and self._central_scores else {}
        counts, self.federation.grid.counts = self.federation.grid.counts, Counter()
        self.totals.delivery += counts
        rows = {client: self.totals.clients[client] for client in self.totals.last_round}
        self.directory.append_clients({"round": server_round, "partition": c, **row} for c, row in rows.items())
        row: dict[str, Any] = plain(
            {
                "round": server_round,
                "cohort": len(record.cohort),
                **over_clients,
                "bytes_up": record.bytes_up,
                "bytes_down": record.bytes_down,
                "seconds": record.seconds,
                "missing": record.missing,
                "dropped": [{"client": client, "reason": reason} for client, reason in record.dropped],
                **{name: clients for name in LIMITED if (clients := getattr(record, name))},
                **({} if system is None else {"system_accuracy": system}),
                **({"central": central} if central else {}),
                **{name.replace("-", "_"): count for name, count in counts.items()},
                **self.privacy.round_row(),
                **record.quantities,
            }
        )
        self.directory.append_round(row)
        self._write_summary("running")
        self._note_round()
        self._tracking.round_finished(row)
        self.progress.add(row, len(self.strategy.members))
        state = state_of(self.strategy)
        if self.strategy.exchange.saving:
            write_arrays(self.directory.models / ARRAYS, state)
        if self.checkpoints.due(server_round):
            self.checkpoints.write(Checkpoint(server_round, state, self._so_far()))
        self._note_versions()
        if self.checkpoints.every and sum(array.nbytes for array in state.values()) <= HELD_BYTES:
            # Copy the arrays, because the next round may change them before it is interrupted.
            self._server_state = {name: array.copy() for name, array in state.items()}
        if self._pictures.due:
            self._pictures.draw(self.totals)

    def _end_after(self, server_round: int) -> None:
        """Make a round the last one."""
        self.strategy.end_after(server_round)
        self.checkpoints.last_round = server_round
        self.status.note(rounds=server_round)
        log(INFO, "patience has run out: round %s is the last one", server_round)

    def _system_accuracy_of(self, server_round: int) -> float | None:
        """Return the system accuracy after a round, or None if it is unavailable or outside the final average."""
        run = self.strategy.settings.run
        is_due = schedule.in_average(run, server_round) and schedule.evaluates(run, server_round)
        if not is_due or self.settings.train.withholds_scores:
            return None
        system = system_accuracy(self.settings, self.strategy, self.workspace, self.directory)
        if system is None:
            return None
        self.totals.system.append((server_round, system.accuracy))
        return system.accuracy

    def _system_summary(self) -> dict[str, float | None]:
        """Return the summary's entries for the accuracy of the federation as a whole."""
        summary = {"system-accuracy": self.system.accuracy if self.system else None}
        if self.settings.method.routes:
            summary["routing-accuracy"] = self.system.routing_accuracy if self.system else None
        return summary

    def _note_round(self) -> None:
        self.status.note(round=self.rounds, dropped=sum(self.totals.dropped.values()))

    def prepare_messages(self, *, shares_files: bool, one_file_system: bool) -> None:
        """Extend the strategy's messages with the folders for the clients' files and the versions to keep.

        With ``shares_files``, the clients can write into the run's directory. With ``one_file_system``, this directory
        also contains their states.
        """
        states = self.strategy.exchange.states
        states.attempt = len(self._resumed)
        path = self.directory.path
        name = f"{path.parent.name}-{path.name}" if self.settings.run.part_of else path.name
        states.folders["run"] = f"{name}-{self.directory.id}"
        run = self.settings.run
        if run.save_predictions or (shares_files and not run.secure_aggregation):
            self.strategy.exchange.predictions_folder = self.directory.predictions
        if one_file_system and (self.checkpoints.every or self._resumed):
            states.folders["state-directory"] = str(self.directory.state)
        self._note_versions()

    def _note_versions(self) -> None:
        """Record the versions that checkpoints need, including a checkpoint of this round that may still be written."""
        self.strategy.exchange.states.needed = [*self.checkpoints.versions.values()]
        if self.checkpoints.every:
            self.strategy.exchange.states.needed.append(self._versions)

    def _write_last_checkpoint(self) -> None:
        """Write a checkpoint of the last finished round, from which an interrupted or failed run can resume."""
        if self._server_state is not None and self.rounds not in self.checkpoints.versions:
            self.checkpoints.write(Checkpoint(self.rounds, self._server_state, self._so_far()))

    def _so_far(self) -> dict[str, Any]:
        """Return the facts about the finished rounds that a resumed run needs, as JSON."""
        return plain(
            {
                **self.totals.as_json(),
                "settings": self.settings.as_config(),
                "resumed": self._resumed,
                "data": self._data,
                "versions": self._versions,
                "sites": self.federation.as_json(),
                "files": self.directory.grown,
                "seconds": time.perf_counter() - self._started,
            }
        )

    def _continue_from(self, checkpoint: Checkpoint) -> None:
        """Restore the state in a checkpoint, and remove later rounds from the files."""
        so_far = checkpoint.progress
        self.directory.cut_back(so_far["files"])
        self.rounds = checkpoint.server_round
        self._versions = checkpoint.versions
        self.strategy.exchange.states.versions = dict(self._versions)
        self._started -= so_far["seconds"]
        self.totals = Totals.from_json(so_far)
        if self.totals.patience_ended:
            self._end_after(self.totals.patience_ended + 1)
        rows = {client: self.totals.clients[client] for client in self.totals.last_round}
        self.strategy.record = RoundRecord(checkpoint.server_round, clients=rows)
        self.strategy.resumed_after = checkpoint.server_round

    def _write_summary(self, status: Status) -> None:
        settings = self.settings
        self.summary = self.directory.write_summary(
            {
                "status": status,
                "method": key_prefix(settings.run.method),
                "point": settings.method.point,
                "dataset": settings.data.dataset,
                "num-clients": settings.data.num_clients,
                "rounds": self.rounds,
                "seed": settings.run.seed,
                **({"folds": settings.data.folds, "fold": settings.data.fold} if settings.data.fold else {}),
                "seconds": time.perf_counter() - self._started,
                **self._memory.peak(at_most_old=MEMORY_SECONDS if status == "running" else 0.0),
                **self.totals.summary(self.columns.metric, settings.run.average_rounds),
                **self._system_summary(),
                **self.totals.early_stop(settings.run.patience, settings.method.point, self.columns.metric),
                **({"none-fits": self.none_fits} if self.none_fits else {}),
                **({"pooled": self.pooled} if self.pooled else {}),
                **({"central": self.central} if self.central else {}),
                **({"notices": self.notices} if self.notices else {}),
                **({"client-scores": NOT_AVAILABLE} if settings.run.secure_aggregation else {}),
                **self.privacy.summary(),
                **newcomer_scores(self.strategy.newcomer_rows, self.columns),
                **self.federation.summary(),
                **self._client_facts(status),
            }
        )

    def _client_facts(self, status: Status) -> dict[str, Any]:
        """Return the clients' names, the clients without a final model, and the clients with few samples or classes.

        The latter have one training sample, one class in the training split, or no test sample.

        Names exist only if the data contains them. The server does not know the data of sites.
        """
        names, workspace = self.strategy.exchange.client_names, self.workspace
        facts: dict[str, Any] = {}
        if status == "completed" and self.totals.unreached and self.settings.run.save_models and self.checkpoints.every:
            facts[WITHOUT_MODEL] = self.totals.unreached
        if names:
            facts["sites"] = [names.get(client) for client in range(self.settings.data.num_clients)]
        if not workspace.of_sites and (clients := small_clients(workspace.partition, workspace.dataset)):
            facts["small-clients"] = clients
        return facts
