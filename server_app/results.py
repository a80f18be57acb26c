"""A run's directory, to which Posy writes the results after each round, so that they survive if the run is killed."""

import csv
import dataclasses
import io
import json
import os
import platform
import re
import secrets
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from logging import WARNING
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt
from flwr.common.logger import log

from posy.flower import versions
from posy.metrics import Evaluation, Spread, best, chosen, over_rounds, spread
from posy.settings import SettingsError, key_of
from posy.storage import is_folder_name, lock, plain, replace, sync
from posy.strategies.pooled import spreads
from posy.strategies.replies import LIMITED, RoundRecord
from posy.yaml12 import dump

Status = Literal["running", "completed", "stopped", "failed", "diverged"]

POINTS = ("served", "local")
"""Evaluation points: a client's served model, and its local model after training."""
MEASURES = ("train_loss", "served_accuracy", "served_loss", "local_accuracy", "local_loss")
"""Columns of a client's row that Posy summarises over the clients in each round."""
VALIDATION, TRAINING = (
    tuple(f"{point}_{split}_{measure}" for point in POINTS for measure in ("accuracy", "loss"))
    for split in ("validation", "training")
)
"""Further columns of a client's row: for validation splits, and, with ``evaluate-training``, for training splits."""
CLIENT_COLUMNS = (
    *("round", "partition", "n_train", "n_test", *MEASURES[1:], *VALIDATION, *TRAINING, "train_loss"),
    *("chosen", "bytes_up", "bytes_down", "site"),
)
GROWING = ("rounds.jsonl", "clients.csv")
"""Files to which Posy appends after each round."""


@dataclass
class Totals:
    """Totals over a run's finished rounds, which a checkpoint stores under keys derived from the field names."""

    trained: bool = False
    """Whether any client's training has been accepted."""
    asked: int = 0
    evaluated: int = 0
    """Numbers of evaluations that the server has requested and accepted."""
    worst_loss: float = 0.0
    """Highest mean training loss in any round."""
    bytes_up: int = 0
    bytes_down: int = 0
    samples: int = 0
    """Number of training samples that the clients have processed, counted once per pass."""
    dropped: Counter[str] = field(default_factory=Counter)
    """Number of dropped replies, keyed by reason."""
    delivery: Counter[str] = field(default_factory=Counter)
    """Numbers of resent messages and of late replies."""
    clipped: Counter[int] = field(default_factory=Counter)
    discarded: Counter[int] = field(default_factory=Counter)
    down_weighted: Counter[int] = field(default_factory=Counter)
    """Number of rounds per client in which its update was scaled down, given no weight, or given less weight."""
    missing: list[int] = field(default_factory=list)
    """Clients missing from the last evaluation."""
    accuracy: list[list[Evaluation]] = field(default_factory=lambda: [[], []])
    loss: list[list[Evaluation]] = field(default_factory=lambda: [[], []])
    """Evaluations at each of :data:`POINTS`, in round order, without rounds that had no evaluation."""
    validation: list[list[Evaluation]] = field(default_factory=lambda: [[], []])
    """Accuracy on the validation splits, in the same format."""
    system: list[tuple[int, float]] = field(default_factory=list)
    """System accuracy, as pairs of round and value, for the rounds in which it was computed."""
    clients: dict[int, dict[str, Any]] = field(default_factory=dict)
    """The last row of each client."""
    last_round: list[int] = field(default_factory=list)
    """Clients that have a row in the last round."""

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> Self:
        """Read the totals from the result of :meth:`as_json`; ``stored`` may also contain other keys."""
        keys = {f.name: key_of(f.name) for f in dataclasses.fields(cls)}
        # Checkpoints from earlier versions lack the system accuracy of individual rounds and the fields in LIMITED.
        optional_names = ("system", *LIMITED)
        totals = cls(**{name: stored[key] for name, key in keys.items() if name not in optional_names or key in stored})
        totals.dropped, totals.delivery = Counter(totals.dropped), Counter(totals.delivery)
        for name in LIMITED:
            setattr(totals, name, Counter({int(client): n for client, n in getattr(totals, name).items()}))
        totals.accuracy, totals.loss, totals.validation = (
            [[Evaluation(*evaluation) for evaluation in evaluations] for evaluations in points]
            for points in (totals.accuracy, totals.loss, totals.validation)
        )
        totals.clients = {int(client): row for client, row in totals.clients.items()}
        return totals

    def as_json(self) -> dict[str, Any]:
        """Return all fields, keyed as in a checkpoint."""
        return {key_of(f.name): getattr(self, f.name) for f in dataclasses.fields(self)}

    def add(self, record: RoundRecord, *, evaluated: bool) -> dict[str, Spread | None]:
        """Add a round, and return the spread of each measure over the clients, from their rows or from masked sums.

        A measure in :data:`MEASURES` that no client reports is None; other measures without reports are absent.
        Set ``evaluated`` if an evaluation was due in the round.
        """
        rows = dict(sorted(record.clients.items()))  # so that the sums do not depend on the order of the replies
        over_clients = {measure: spread_of(rows.values(), measure) for measure in MEASURES}
        over_clients |= {m: values for m in (*VALIDATION, *TRAINING) if (values := spread_of(rows.values(), m))}
        over_clients |= spreads(record.sums)
        for name, points in (
            ("accuracy", self.accuracy),
            ("loss", self.loss),
            ("validation_accuracy", self.validation),
        ):
            for point, evaluations in zip(POINTS, points, strict=True):
                if values := over_clients.get(f"{point}_{name}"):
                    evaluations.append(Evaluation(record.number, values, len(record.missing)))
        if trained := over_clients["train_loss"]:
            self.trained, self.worst_loss = True, max(self.worst_loss, trained["mean"])
        self.trained |= bool(record.trained)
        if evaluated:
            self.missing = record.missing
        self.asked += record.asked
        self.evaluated += record.evaluated
        self.bytes_up += record.bytes_up
        self.bytes_down += record.bytes_down
        self.samples += record.samples
        self.dropped.update(reason for _, reason in record.dropped)
        for name in LIMITED:
            getattr(self, name).update(getattr(record, name))
        self.last_round = list(rows)
        self.clients = dict(sorted({**self.clients, **rows}.items()))
        return over_clients

    def summary(self, average_rounds: int = 0) -> dict[str, Any]:
        """Return the totals for the summary of a run.

        ``best`` is the round with the highest accuracy on the validation splits. ``upper-bound`` is the highest
        accuracy on the test splits, for which the test data itself selects the round. If ``average_rounds`` is not 0,
        ``average`` is the mean over the evaluations in the last ``average_rounds`` rounds.
        """
        accuracy: dict[str, Any] = {
            point: {
                "last": _flat(evaluations[-1] if evaluations else None),
                "best": _flat(chosen(evaluations, validation)),
                "upper-bound": _flat(best(evaluations)),
            }
            for point, evaluations, validation in zip(POINTS, self.accuracy, self.validation, strict=True)
        }
        if average_rounds:
            for point, evaluations in zip(POINTS, self.accuracy, strict=True):
                accuracy[point]["average"] = over_rounds(evaluations, average_rounds)
            last_values = [value for number, value in self.system if number > self.system[-1][0] - average_rounds]
            if last_values:
                mean, deviation = float(np.mean(last_values)), float(np.std(last_values))
                system = {"evaluations": len(last_values), "mean": mean, "deviation": deviation}
                accuracy["system-accuracy-average"] = system
        sums = {"bytes-up": self.bytes_up, "bytes-down": self.bytes_down, "samples": self.samples}
        limited = {key_of(name): _by_client(counts) for name in LIMITED if (counts := getattr(self, name))}
        return {**sums, **accuracy, "dropped": self.dropped, **limited, **self.delivery, "missing": self.missing}


class RunDirectory:
    """The existing directory of one run, which is locked until the run ends, and the run's unique id.

    Raise :class:`SettingsError` if another process is using the directory.
    """

    def __init__(self, path: Path, run_id: str) -> None:
        self.path, self.id = path, run_id
        self.columns: tuple[str, ...] = CLIENT_COLUMNS
        """Columns of ``clients.csv``."""
        self.grown: dict[str, list[tuple[int, int]]] = {name: [] for name in GROWING}
        """Size and checksum of each file in :data:`GROWING` after every round."""
        self.models, self.figures = path / "models", path / "figures"
        self.state, self.checkpoints = path / "state", path / "checkpoints"
        try:
            self._lock = lock(path)
        except BlockingIOError:
            raise SettingsError(
                f"resume = {path.name!r}: a process still uses {path}; wait for this process to exit, or stop it"
            ) from None
        self.models.mkdir(exist_ok=True)
        self.figures.mkdir(exist_ok=True)

    @classmethod
    def create(cls, output_dir: Path, run_name: str) -> Self:
        """Create a new run's directory, and ``output_dir`` if necessary; append -2, -3, … if the name is taken.

        Raise :class:`SettingsError` if the name is not a valid folder name, or the directory cannot be created.
        """
        if not is_folder_name(run_name):
            raise SettingsError(
                f"run-name = {run_name!r}: it must be the name of a folder with at most 200 bytes, "
                "without / or \\, and not . or .."
            )
        try:
            output_dir.mkdir(parents=True, exist_ok=True)
            for number in count(1):
                path = output_dir.absolute() / (run_name if number == 1 else f"{run_name}-{number}")
                with suppress(FileExistsError):
                    path.mkdir()  # if two runs start at once, only one of them creates the directory
                    break
            return cls(path, secrets.token_hex(4))
        except OSError as error:
            raise SettingsError(
                f"output-dir = {str(output_dir)!r}: it must be a writable directory ({error})"
            ) from error

    def release(self) -> None:
        """Release the lock at the end of the run."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def write_config(self, settings: Mapping[str, Any], gpu: str | None = None, **more: Any) -> None:
        """Write ``config.yaml`` with the settings, versions, the machine and its GPU, and the entries in ``more``."""
        content = {
            "settings": settings,
            "seed": settings.get("seed"),
            "id": self.id,
            **{key: value for key, value in more.items() if value},
            "versions": versions(),
            "machine": {"system": platform.platform(), "cpu": cpu_model(), "cpus": os.cpu_count(), "gpu": gpu},
        }
        self._write("config.yaml", dump(plain(content)))

    def write_partition(self, counts: npt.ArrayLike, class_names: Sequence[str]) -> None:
        """Write the numbers of samples per client and class, ``counts`` ``(M, C)``, to ``partition.csv``."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(["client", *class_names])
        writer.writerows([client, *row] for client, row in enumerate(np.asarray(counts).tolist()))
        self._write("partition.csv", text.getvalue())

    def write_summary(self, summary: Mapping[str, Any]) -> dict[str, Any]:
        """Replace ``summary.json`` and return its content."""
        content: dict[str, Any] = plain(summary)
        self._write("summary.json", json.dumps(content, indent=2, allow_nan=False, ensure_ascii=False) + "\n")
        return content

    def _write(self, name: str, text: str) -> None:
        replace(self.path / name, lambda temporary: temporary.write_text(text, encoding="utf-8"))

    def append_round(self, row: Mapping[str, Any]) -> None:
        """Append a round to ``rounds.jsonl`` as a line with a JSON object, in which NaN and infinity become null."""
        self._append("rounds.jsonl", json.dumps(plain(row), allow_nan=False, ensure_ascii=False) + "\n")

    def append_clients(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Append a round's clients to ``clients.csv``; missing values, None and NaN become empty cells."""
        text = io.StringIO()
        writer = csv.DictWriter(text, self.columns, restval="", lineterminator="\n")
        if not any(size for size, _ in self.grown["clients.csv"][-1:]):
            writer.writeheader()
        writer.writerows(plain(row) for row in rows)
        self._append("clients.csv", text.getvalue())

    def _append(self, name: str, text: str) -> None:
        content = text.encode()
        with (self.path / name).open("ab") as file:
            file.write(content)
        size, checksum = self.grown[name][-1] if self.grown[name] else (0, 0)
        self.grown[name].append((size + len(content), zlib.crc32(content, checksum)))

    def sync(self) -> None:
        """Flush the files in :data:`GROWING` to disk."""
        for name in GROWING:
            sync(self.path / name)

    def cut_back(self, grown: Mapping[str, Sequence[Sequence[int]]]) -> None:
        """Truncate the files in :data:`GROWING` to the rounds in ``grown``.

        If a file does not match its checksums, Posy keeps the rounds before the damage and warns about the others.
        """
        for name in GROWING:
            path, rounds = self.path / name, grown[name]
            content = path.read_bytes() if path.is_file() else b""
            intact_ends = [(0, 0)]
            for end, expected in rounds:
                size, checksum = intact_ends[-1]
                if end > len(content) or zlib.crc32(content[size:end], checksum) != expected:
                    lost_rounds = f"rounds {len(intact_ends)} to {len(rounds)}"
                    log(WARNING, "%s is lost or damaged: its rows of %s are lost", path, lost_rounds)
                    break
                intact_ends.append((end, expected))
            path.touch()
            os.truncate(path, intact_ends[-1][0])
            # A round whose rows are lost ends where the last intact round ends.
            self.grown[name] = (intact_ends + [intact_ends[-1]] * len(rounds))[1 : len(rounds) + 1]


def spread_of(rows: Iterable[Mapping[str, Any]], column: str) -> Spread | None:
    """Return the spread of a column over the clients with a value, weighted by their numbers of training samples."""
    rows_with_value = [row for row in rows if column in row]
    return spread([row[column] for row in rows_with_value], [row["n_train"] for row in rows_with_value])


def _by_client(rounds: Mapping[int, int]) -> list[dict[str, int]]:
    """Return each client with its number of rounds, in client order."""
    return [{"client": client, "rounds": number} for client, number in sorted(rounds.items())]


def _flat(evaluation: Evaluation | None) -> dict[str, Any] | None:
    if evaluation is None:
        return None
    return {"round": evaluation.round, **evaluation.over_clients, "missing": evaluation.missing}


def cpu_model() -> str:
    """Return the name of this machine's processor."""
    try:
        match = re.search(r"^model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        match = None
    return match[1].strip() if match else platform.processor() or platform.machine()
