"""The record of a run: what the strategy did, round by round, as files, a progress line and pictures."""

import math
import re
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from logging import WARNING
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from flwr.app import ArrayRecord, MetricRecord
from flwr.common.logger import log

from posy import figures
from posy.client_app.workspace import Workspace
from posy.metrics import Evaluation, History, Spread, spread
from posy.server_app.checkpoints import Checkpoint, Checkpoints, Resumption, data_digests
from posy.server_app.members import Federation
from posy.server_app.progress import Progress, results_table
from posy.server_app.results import RunDirectory, Status
from posy.server_app.system import system_accuracy
from posy.settings import DivergedError, NothingTrainedError, RunError
from posy.signals import undivided
from posy.storage import plain
from posy.strategies.base import PersonalisedStrategy
from posy.strategies.replies import RoundRecord
from posy.strategies.settings import Settings

DRAW_SECONDS = 30.0
_DIVERGED = re.compile(r"NaN or Inf|diverged|loss is -?(nan|inf)")
"""What the reasons of dropped replies say where numbers have left their range."""
HELD_BYTES = 1 << 30
"""A server's state of up to this size is held as the last round has left it; of a larger one the files must do."""


class Recorder:
    """Writes the files of a run and shows its progress.

    Parameters
    ----------
    settings : Settings
        All settings, with absolute paths.
    strategy : PersonalisedStrategy
        The strategy whose rounds are recorded.
    workspace : Workspace
        The server's view of data and partition.
    federation : Federation, optional
        Who takes part, for the summary.
    resumption : Resumption, optional
        What is known of the run where it is one that goes on.
    """

    def __init__(
        self,
        settings: Settings,
        strategy: PersonalisedStrategy,
        workspace: Workspace,
        federation: Federation | None = None,
        resumption: Resumption | None = None,
    ) -> None:
        self.settings = settings
        self.strategy = strategy
        self.workspace = workspace
        self.federation = federation
        run = settings.run
        if resumption is None:
            self.directory = RunDirectory(Path(run.output_dir), run.run_name or default_name(settings))
            self.checkpoints = Checkpoints(self.directory, run.checkpoint_every, run.num_server_rounds)
        else:
            self.directory, self.checkpoints = resumption.directory, resumption.checkpoints
        self._resumed = [] if resumption is None else resumption.history
        self._data = data_digests(workspace) if self.checkpoints.every else {}
        gpu = torch.cuda.get_device_name(workspace.device) if workspace.device.type == "cuda" else None
        resolved = {"model": strategy.architecture.model, "device": str(workspace.device)}
        self.directory.write_config(settings.as_config(), resolved, gpu, self._resumed)
        if run.save_models:
            strategy.models_folder = self.directory.models
        self.accuracy = History()
        self.loss = History()
        self.last_rows: dict[int, dict[str, Any]] = {}
        self._last_clients: list[int] = []
        self._server_state: dict[str, npt.NDArray[np.generic]] | None = None
        """The strategy's state after the last finished round; None while one is being finished, or if it is large."""
        self.dropped: Counter[str] = Counter()
        self.missing: list[int] = []
        """Clients that were missing in the last evaluation."""
        self.bytes_up = self.bytes_down = self.rounds = 0
        self.trained = False
        """Whether any client's training has been accepted."""
        self.asked = self.evaluated = 0
        """Evaluations that were asked for, and those that were accepted."""
        self.worst_loss = 0.0
        """Highest mean training loss of a round."""
        self.system_accuracy: float | None = None
        self.summary: dict[str, Any] = {}
        self._started = time.perf_counter()
        self._drawn = 0.0
        if resumption is not None:
            self._take_up(resumption.checkpoint)
        self._progress = Progress(run.num_server_rounds, done=self.rounds)

    def __enter__(self) -> Self:
        if self.workspace.of_sites and self.federation:
            print(self.federation.task(self.strategy.architecture.model), flush=True)
        with self._writing():
            self._draw_partition()
            self._write_summary("running")
        self._progress.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.__exit__(kind, error, trace)
        if kind is None:
            with self._writing():
                self._write_end("completed")
        else:
            try:
                self._write_last_checkpoint()
                self._write_end(_status(kind))
            except OSError as failed:  # as on a full disk, which may be what has ended the run
                log(WARNING, "not all of the run could be written: %s", failed)
        if self.summary:
            print(results_table(self.summary, self.directory.path), flush=True)

    def _write_end(self, status: Status) -> None:
        self._write_summary(status)  # should what follows fail or be interrupted
        if self.settings.run.save_models:
            self.directory.save_arrays("server", self._server_state or self.strategy.server_state())
        if status == "completed":
            self.system_accuracy = system_accuracy(self.settings, self.strategy, self.workspace, self.directory)
        self._draw(final=True)
        self._write_summary(status)

    def check_outcome(self) -> None:
        """Judge the run by what its rounds have brought.

        Raises
        ------
        NothingTrainedError
            If no client's training was accepted: what was measured is the initial model.
        RunError
            If no evaluation was accepted, although some were asked for.
        DivergedError
            If the training of the last round has left the range of useful numbers.
        """
        reasons = "; ".join(f"{count} x {reason}" for reason, count in self.dropped.most_common(3))
        if not self.trained:
            raise NothingTrainedError(f"no client's training was accepted in any round: {reasons}")
        if self.asked and not self.evaluated:
            raise RunError(f"no client's evaluation was accepted in any round: {reasons}")
        record, task = self.strategy.record, self.workspace.task
        losses = [row["train_loss"] for row in record.clients.values() if "train_loss" in row]
        gone = {c for c, reason in record.dropped if c in record.cohort and _DIVERGED.search(reason)}
        gone -= {client for client, row in record.clients.items() if "train_loss" in row}
        # Guessing costs ln C, and where the method also tells clients apart ln M more.
        guessing = math.log(max(task.num_classes, 2) * max(self.settings.data.num_clients, 2))
        loss = sum(losses) / len(losses) if losses else 0.0
        if 2 * len(gone) >= max(len(record.cohort), 1):
            raise DivergedError(
                f"the training has diverged: of the {len(record.cohort)} clients that trained in the last round, "
                f"{len(gone)} sent no finite numbers; a smaller lr than {self.settings.train.lr:g} may help"
            )
        if self.worst_loss > 100 * guessing and loss > 3 * guessing:
            raise DivergedError(
                f"the training has diverged: its mean loss was {self.worst_loss:.3g} in the worst round and is "
                f"{loss:.3g} in the last; a smaller lr than {self.settings.train.lr:g} may help"
            )

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Have a run whose files cannot be written fail in one line."""
        try:
            yield
        except OSError as error:
            raise RunError(f"the files of the run in {self.directory.path} cannot be written: {error}") from error

    def finish_round(self, server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
        """Write down a finished round; Flower's strategy calls it last in every round."""
        if server_round > 0 and self.strategy.record.number == server_round:
            with undivided(), self._writing():
                self._finish_round(server_round, self.strategy.record)
        return None

    def _finish_round(self, server_round: int, record: RoundRecord) -> None:
        self._server_state = None
        self.rounds = server_round
        self.trained = self.trained or any("train_loss" in row for row in record.clients.values())
        rows = {client: record.clients[client] for client in sorted(record.clients)}
        accuracy = {point: _spread(rows, f"{point}_accuracy") for point in ("served", "local")}
        loss = {point: _spread(rows, f"{point}_loss") for point in ("served", "local")}
        missing, clients = record.missing, self.settings.data.num_clients
        if self.strategy.evaluates(server_round):
            self.missing = missing
        self.accuracy.add(server_round, accuracy["served"], accuracy["local"], len(missing))
        self.loss.add(server_round, loss["served"], loss["local"], len(missing))
        train = _spread(rows, "train_loss")
        self.bytes_up += record.bytes_up
        self.bytes_down += record.bytes_down
        self.dropped.update(reason for _, reason in record.dropped)
        self.asked += record.asked
        self.evaluated += record.evaluated
        self.worst_loss = max(self.worst_loss, _mean(train) or 0.0)
        self.last_rows.update(rows)
        self._last_clients = list(rows)
        self.directory.append_clients({"round": server_round, "partition": c, **row} for c, row in rows.items())
        self.directory.append_round(_round_row(record, accuracy, loss, train))
        self._write_summary("running")
        present = f"{clients - len(missing)} of {clients} clients" if missing else ""
        self._progress.update(server_round, _mean(accuracy["served"]), _mean(accuracy["local"]), _mean(train), present)
        state = self.strategy.server_state()
        if self.strategy.saving:
            self.directory.save_arrays("server", state)
        if self.checkpoints.due(server_round):
            self.checkpoints.write(Checkpoint(server_round, state, self._so_far()))
        self.tell_clients()
        if self.checkpoints.every and sum(array.nbytes for array in state.values()) <= HELD_BYTES:
            # The next round may write into its arrays before it is interrupted.
            self._server_state = {name: array.copy() for name, array in state.items()}
        if time.perf_counter() - self._drawn > DRAW_SECONDS:
            self._draw()

    def tell_clients(self, *, one_file_system: bool | None = None) -> None:
        """Have the strategy's messages say where the clients' states are kept, and which of them count.

        Parameters
        ----------
        one_file_system : bool, optional
            Whether the clients can write into the directory of the run; as before if not given.
        """
        told = self.strategy.state_config
        told["run"] = f"{self.directory.path.name}-{self.directory.id}"
        # An interrupt in the next round is followed by a checkpoint of the last one.
        last = {self.rounds} if self.checkpoints.every and self.rounds else set()
        told["checkpoints"] = sorted({*self.checkpoints.rounds, *last})
        told["resumed-from"] = [entry["round"] for entry in self._resumed]
        if one_file_system and (self.checkpoints.every or self._resumed):
            told["state-directory"] = str(self.directory.state)

    def _write_last_checkpoint(self) -> None:
        """Have a run that was interrupted, or has failed, go on from its last finished round when it is resumed."""
        if self._server_state is None or self.rounds in self.checkpoints.rounds:
            return
        self.checkpoints.write(Checkpoint(self.rounds, self._server_state, self._so_far()))

    def _so_far(self) -> dict[str, Any]:
        """Return all that is to be known of the finished rounds when the run is resumed, as JSON holds it."""
        return plain(
            {
                "trained": self.trained,
                "asked": self.asked,
                "evaluated": self.evaluated,
                "worst-loss": self.worst_loss,
                "settings": self.settings.as_config(),
                "resumed": self._resumed,
                "data": self._data,
                "sites": self.federation.as_json() if self.federation else {},
                "files": self.directory.grown,
                "seconds": time.perf_counter() - self._started,
                "bytes-up": self.bytes_up,
                "bytes-down": self.bytes_down,
                "dropped": self.dropped,
                "missing": self.missing,
                "accuracy": [self.accuracy.served, self.accuracy.local],
                "loss": [self.loss.served, self.loss.local],
                "clients": dict(sorted(self.last_rows.items())),
                "last-round": self._last_clients,
            }
        )

    def _take_up(self, checkpoint: Checkpoint) -> None:
        """Go on where a checkpoint was written; what came after it is taken back."""
        so_far = checkpoint.progress
        self.directory.cut_back(so_far["files"])
        self.rounds = checkpoint.server_round
        self._started -= so_far["seconds"]
        self.bytes_up, self.bytes_down = so_far["bytes-up"], so_far["bytes-down"]
        self.dropped.update(so_far["dropped"])
        self.missing = so_far["missing"]
        self.accuracy, self.loss = (
            History(*([Evaluation(*point) for point in points] for points in so_far[measure]))
            for measure in ("accuracy", "loss")
        )
        self.trained, self.worst_loss = so_far["trained"], so_far["worst-loss"]
        self.asked, self.evaluated = so_far["asked"], so_far["evaluated"]
        self.last_rows = {int(client): row for client, row in so_far["clients"].items()}
        self._last_clients = so_far["last-round"]
        rows = {client: self.last_rows[client] for client in self._last_clients}
        self.strategy.record = RoundRecord(checkpoint.server_round, clients=rows)
        self.strategy.resumed_after = checkpoint.server_round

    def _write_summary(self, status: Any) -> None:
        settings = self.settings
        self.summary = self.directory.write_summary(
            status=status,
            method=settings.run.method,
            dataset=settings.data.dataset,
            num_clients=settings.data.num_clients,
            rounds=self.rounds,
            seed=settings.run.seed,
            seconds=time.perf_counter() - self._started,
            bytes_up=self.bytes_up,
            bytes_down=self.bytes_down,
            accuracy=self.accuracy,
            system_accuracy=self.system_accuracy,
            dropped=self.dropped,
            extra={
                "missing": self.missing,
                **self.strategy.extra_summary(),
                **(self.federation.summary() if self.federation else {}),
            },
        )

    def _draw_partition(self) -> None:
        task = self.workspace.task
        if self.workspace.of_sites:
            counts = self.federation.class_counts() if self.federation else None
            self.strategy.class_counts = counts
        else:
            known = self.workspace.dataset.y, task.num_classes
            counts = self.workspace.partition.counts(*known)
            self.strategy.class_counts = self.workspace.partition.train_counts(*known)
        if counts is not None:
            figures.partition(counts, self.directory.figures / "partition.png", class_names=task.class_names)

    def _draw(self, *, final: bool = False) -> None:
        """Draw the pictures; a run must not end because one could not be drawn."""
        folder = self.directory.figures
        try:
            figures.accuracy_over_rounds(_lines(self.accuracy), folder / "accuracy.png")
            if final:
                figures.loss_over_rounds(_lines(self.loss), folder / "loss.png")
                served, local = (
                    [self.last_rows.get(c, {}).get(column) for c in range(self.settings.data.num_clients)]
                    for column in ("served_accuracy", "local_accuracy")
                )
                figures.client_accuracies(served, local, folder / "clients.png")
                self.strategy.draw(folder)
        except (ValueError, OSError, ArithmeticError) as error:
            log(WARNING, "a picture could not be drawn: %r", error)
        self._drawn = time.perf_counter()


def _status(kind: type[BaseException]) -> Status:
    if issubclass(kind, DivergedError):
        return "diverged"
    return "failed" if issubclass(kind, Exception) else "stopped"


def default_name(settings: Settings) -> str:
    """Return the name of a run that was given none."""
    run = settings.run
    return f"{run.method}-{Path(settings.data.dataset).name}-seed{run.seed}-{time.strftime('%Y%m%d-%H%M%S')}"


def _round_row(
    record: RoundRecord, accuracy: dict[str, Spread | None], loss: dict[str, Spread | None], train: Spread | None
) -> dict[str, Any]:
    return {
        "round": record.number,
        "cohort": len(record.cohort),
        "train_loss": train,
        "served_accuracy": accuracy["served"],
        "served_loss": loss["served"],
        "local_accuracy": accuracy["local"],
        "local_loss": loss["local"],
        "bytes_up": record.bytes_up,
        "bytes_down": record.bytes_down,
        "seconds": record.seconds,
        "missing": record.missing,
        "dropped": [{"client": client, "reason": reason} for client, reason in record.dropped],
        **record.quantities,
    }


def _spread(rows: dict[int, dict[str, Any]], column: str) -> Spread | None:
    having = [row for row in rows.values() if column in row]
    return spread([row[column] for row in having], [row["n_train"] for row in having])


def _lines(history: History) -> dict[str, list[Evaluation]]:
    return {"served model": history.served, "local model": history.local}


def _mean(value: Spread | None) -> float | None:
    return None if value is None else value["mean"]
