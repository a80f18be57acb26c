"""What a run leaves behind: a directory in which everything is on disk after each round, so that it survives a kill."""

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
from posy.strategies.replies import RoundRecord
from posy.yaml12 import dump

Status = Literal["running", "completed", "stopped", "failed", "diverged"]

POINTS = ("served", "local")
"""Evaluation points: the model that a client is served, and the one that it has after its training."""
MEASURES = ("train_loss", "served_accuracy", "served_loss", "local_accuracy", "local_loss")
"""Columns of the clients that a round sums up over them."""
VALIDATION, TRAINING = (
    tuple(f"{point}_{split}_{measure}" for point in POINTS for measure in ("accuracy", "loss"))
    for split in ("validation", "training")
)
"""Further ones, where there are validation splits, and where ``evaluate-training`` asks for them."""
CLIENT_COLUMNS = (
    *("round", "partition", "n_train", "n_test", *MEASURES[1:], *VALIDATION, *TRAINING, "train_loss"),
    *("chosen", "bytes_up", "bytes_down", "site"),
)
GROWING = ("rounds.jsonl", "clients.csv")
"""Files to which each round appends."""


@dataclass
class Totals:
    """What the finished rounds of a run add up to; a checkpoint holds it under the names of the fields."""

    trained: bool = False
    """Whether any client's training has been accepted."""
    asked: int = 0
    evaluated: int = 0
    """Evaluations that were asked for, and those that were accepted."""
    worst_loss: float = 0.0
    """Highest mean training loss of a round."""
    bytes_up: int = 0
    bytes_down: int = 0
    samples: int = 0
    """Samples that clients have trained on, as often as they have."""
    dropped: Counter[str] = field(default_factory=Counter)
    """Reasons of the dropped replies."""
    delivery: Counter[str] = field(default_factory=Counter)
    """Messages sent again, and late replies."""
    missing: list[int] = field(default_factory=list)
    """Clients that were missing in the last evaluation."""
    accuracy: list[list[Evaluation]] = field(default_factory=lambda: [[], []])
    loss: list[list[Evaluation]] = field(default_factory=lambda: [[], []])
    """At each of :data:`POINTS`, in the order of the rounds; rounds without an evaluation are left out."""
    validation: list[list[Evaluation]] = field(default_factory=lambda: [[], []])
    """The accuracy on the validation splits, likewise."""
    system: list[tuple[int, float]] = field(default_factory=list)
    """Rounds with their system accuracy, where it was found before the end."""
    clients: dict[int, dict[str, Any]] = field(default_factory=dict)
    """The last row of each client."""
    last_round: list[int] = field(default_factory=list)
    """Clients that have a row in the last round."""

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> Self:
        """Return what :meth:`as_json` has written, which may stand among other keys."""
        keys = {f.name: key_of(f.name) for f in dataclasses.fields(cls)}
        # Checkpoints of earlier versions have no system accuracy of single rounds.
        found = cls(**{name: stored[key] for name, key in keys.items() if name != "system" or key in stored})
        found.dropped, found.delivery = Counter(found.dropped), Counter(found.delivery)
        found.accuracy, found.loss, found.validation = (
            [[Evaluation(*evaluation) for evaluation in evaluations] for evaluations in points]
            for points in (found.accuracy, found.loss, found.validation)
        )
        found.clients = {int(client): row for client, row in found.clients.items()}
        return found

    def as_json(self) -> dict[str, Any]:
        """Return all of it under the keys of a checkpoint."""
        return {key_of(f.name): getattr(self, f.name) for f in dataclasses.fields(self)}

    def add(self, record: RoundRecord, *, evaluated: bool) -> dict[str, Spread | None]:
        """Add a round that was to be evaluated or not; return the spread of each of :data:`MEASURES` over the clients.

        Where no client has a measure, None stands in its place; those of :data:`VALIDATION` and :data:`TRAINING`
        are left out then.
        """
        rows = dict(sorted(record.clients.items()))  # sums must not depend on who answered first
        over_clients = {measure: spread_of(rows.values(), measure) for measure in MEASURES}
        over_clients |= {m: found for m in (*VALIDATION, *TRAINING) if (found := spread_of(rows.values(), m))}
        for name, points in (
            ("accuracy", self.accuracy),
            ("loss", self.loss),
            ("validation_accuracy", self.validation),
        ):
            for point, evaluations in zip(POINTS, points, strict=True):
                if found := over_clients.get(f"{point}_{name}"):
                    evaluations.append(Evaluation(record.number, found, len(record.missing)))
        if trained := over_clients["train_loss"]:
            self.trained, self.worst_loss = True, max(self.worst_loss, trained["mean"])
        if evaluated:
            self.missing = record.missing
        self.asked += record.asked
        self.evaluated += record.evaluated
        self.bytes_up += record.bytes_up
        self.bytes_down += record.bytes_down
        self.samples += record.samples
        self.dropped.update(reason for _, reason in record.dropped)
        self.last_round = list(rows)
        self.clients = dict(sorted({**self.clients, **rows}.items()))
        return over_clients

    def summary(self, average_rounds: int = 0) -> dict[str, Any]:
        """Return the totals that the summary of a run holds.

        ``best`` is the round that is best on the validation splits; the highest accuracy on the test splits is an
        upper bound, for it was chosen on what it is measured by. With ``average_rounds`` there is the mean over the
        evaluations of so many last rounds as ``average``.
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
            found = [value for number, value in self.system if number > self.system[-1][0] - average_rounds]
            if found:
                mean, deviation = float(np.mean(found)), float(np.std(found))
                system = {"evaluations": len(found), "mean": mean, "deviation": deviation}
                accuracy["system-accuracy-average"] = system
        own = {"bytes-up": self.bytes_up, "bytes-down": self.bytes_down, "samples": self.samples}
        return {**own, **accuracy, "dropped": self.dropped, **self.delivery, "missing": self.missing}


class RunDirectory:
    """The directory of one run, which exists, locked as long as the run goes on. Its id is no other run's.

    Raises :class:`SettingsError` if a process is still at work in it.
    """

    def __init__(self, path: Path, run_id: str) -> None:
        self.path, self.id = path, run_id
        self.columns: tuple[str, ...] = CLIENT_COLUMNS
        """Columns of ``clients.csv``."""
        self.grown: dict[str, list[tuple[int, int]]] = {name: [] for name in GROWING}
        """Size and checksum, after every round, of each file that grows."""
        self.models, self.figures = path / "models", path / "figures"
        self.state, self.checkpoints = path / "state", path / "checkpoints"
        try:
            self._lock = lock(path)
        except BlockingIOError:
            raise SettingsError(f"resume = {path.name!r}: a process is still at work in {path}") from None
        self.models.mkdir(exist_ok=True)
        self.figures.mkdir(exist_ok=True)

    @classmethod
    def create(cls, output_dir: Path, run_name: str) -> Self:
        """Make the directory of a new run, in one that is created if need be; to a name that exists -2, -3, … is added.

        Raises :class:`SettingsError` if the name is not that of a folder, or the directory cannot be created.
        """
        if not is_folder_name(run_name):
            raise SettingsError(
                f"run-name = {run_name!r}: it must be the name of a folder, without / or \\, not . "
                "or .., of at most 200 bytes"
            )
        try:
            output_dir.mkdir(parents=True, exist_ok=True)
            for number in count(1):
                path = output_dir.absolute() / (run_name if number == 1 else f"{run_name}-{number}")
                with suppress(FileExistsError):
                    path.mkdir()  # also settles which of two runs started at once gets the name
                    break
            return cls(path, secrets.token_hex(4))
        except OSError as error:
            raise SettingsError(
                f"output-dir = {str(output_dir)!r}: it must be a directory that can be written to ({error})"
            ) from error

    def release(self) -> None:
        """Give up the lock: the run goes on no longer."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def write_config(self, settings: Mapping[str, Any], gpu: str | None = None, **more: Any) -> None:
        """Write ``config.yaml``: every setting, the versions, the machine with its GPU, and what is ``more``."""
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
        """Write ``partition.csv``: the samples of each class on each client, ``counts`` ``(M, C)``."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(["client", *class_names])
        writer.writerows([client, *row] for client, row in enumerate(np.asarray(counts).tolist()))
        self._write("partition.csv", text.getvalue())

    def write_summary(self, summary: Mapping[str, Any]) -> dict[str, Any]:
        """Write ``summary.json`` in place of the one before, and return what it holds."""
        content: dict[str, Any] = plain(summary)
        self._write("summary.json", json.dumps(content, indent=2, allow_nan=False, ensure_ascii=False) + "\n")
        return content

    def _write(self, name: str, text: str) -> None:
        replace(self.path / name, lambda temporary: temporary.write_text(text, encoding="utf-8"))

    def append_round(self, row: Mapping[str, Any]) -> None:
        """Append one round to ``rounds.jsonl``: a JSON object a line; NaN and infinity become null."""
        self._append("rounds.jsonl", json.dumps(plain(row), allow_nan=False, ensure_ascii=False) + "\n")

    def append_clients(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Append the clients of a round to ``clients.csv``; what is missing, None or NaN stays empty."""
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
        """Wait until the disk has the files that grow by each round."""
        for name in GROWING:
            sync(self.path / name)

    def cut_back(self, grown: Mapping[str, Sequence[Sequence[int]]]) -> None:
        """Cut the files that grow by each round back to the rounds in ``grown``.

        If a file does not hold what was written, the rounds before the damage are kept, and a warning names the others.
        """
        for name in GROWING:
            path, rounds = self.path / name, grown[name]
            content = path.read_bytes() if path.is_file() else b""
            whole = [(0, 0)]
            for end, expected in rounds:
                size, checksum = whole[-1]
                if end > len(content) or zlib.crc32(content[size:end], checksum) != expected:
                    lost = f"rounds {len(whole)} to {len(rounds)}"
                    log(WARNING, "%s is lost or damaged: it has no rows of %s any more", path, lost)
                    break
                whole.append((end, expected))
            path.touch()
            os.truncate(path, whole[-1][0])
            # A round without rows ends where the one before it did.
            self.grown[name] = (whole + [whole[-1]] * len(rounds))[1 : len(rounds) + 1]


def spread_of(rows: Iterable[Mapping[str, Any]], column: str) -> Spread | None:
    """Sum up a column over the clients that have it, weighted by their training samples."""
    having = [row for row in rows if column in row]
    return spread([row[column] for row in having], [row["n_train"] for row in having])


def _flat(evaluation: Evaluation | None) -> dict[str, Any] | None:
    if evaluation is None:
        return None
    return {"round": evaluation.round, **evaluation.over_clients, "missing": evaluation.missing}


def cpu_model() -> str:
    """Return the name of this machine's processor."""
    try:
        found = re.search(r"^model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        found = None
    return found[1].strip() if found else platform.processor() or platform.machine()
