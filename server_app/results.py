"""What a run leaves behind: one directory of configuration, rounds, clients, summary, models, figures.

Everything is on disk after each round, so that a run that is killed keeps what it had finished.
"""

import csv
import fcntl
import importlib.metadata
import io
import json
import os
import platform
import secrets
import zlib
from collections.abc import Iterable, Mapping, Sequence
from logging import WARNING
from pathlib import Path
from typing import Any, Literal, Self

import numpy.typing as npt
from flwr.common.logger import log

from posy.metrics import Evaluation, History
from posy.settings import SettingsError
from posy.storage import is_folder_name, plain, replace, sync, write_arrays
from posy.yaml12 import dump

Status = Literal["running", "completed", "stopped", "failed", "diverged"]

CLIENT_COLUMNS = (
    "round",
    "partition",
    "n_train",
    "n_test",
    "served_accuracy",
    "served_loss",
    "local_accuracy",
    "local_loss",
    "train_loss",
    "chosen",
    "bytes_up",
    "bytes_down",
    "site",
)


GROWING = ("rounds.jsonl", "clients.csv")
"""Files to which each round appends."""


class RunDirectory:
    """The directory of one run, locked as long as it goes on; none that exists is written into but to resume it.

    Parameters
    ----------
    output_dir : Path
        Directory that holds the runs; created if need be.
    run_name : str
        Name of the folder. If it exists, ``-2``, ``-3``, … is appended.

    Attributes
    ----------
    path, models, figures, state, checkpoints : Path
        The directory of the run, and those of its models, figures, clients' states and checkpoints in it.
    id : str
        Random, to tell the run from others of its name.
    grown : dict
        Of each file that grows by each round: its size and checksum after every round.

    Raises
    ------
    SettingsError
        If the name is not that of a folder, or the directory cannot be created.
    """

    def __init__(self, output_dir: Path, run_name: str) -> None:
        if not is_folder_name(run_name):
            raise SettingsError(
                f"run-name = {run_name!r} in the run config: it must be the name of a folder, without / or \\, not . "
                "or .., of at most 200 bytes"
            )
        try:
            self._take(_new_folder(Path(output_dir).absolute(), run_name), secrets.token_hex(4))
        except OSError as error:
            raise SettingsError(
                f"output-dir = {str(output_dir)!r} in the run config: it must be a directory that can be written to "
                f"({error})"
            ) from error

    @classmethod
    def existing(cls, path: Path, run_id: str) -> Self:
        """Return the directory of a run that is to go on.

        Raises
        ------
        SettingsError
            If a process is still at work in it.
        """
        directory = cls.__new__(cls)
        try:
            directory._take(path, run_id)
        except BlockingIOError:
            raise SettingsError(f"resume = {path.name!r}: a process is still at work in {path}") from None
        return directory

    def _take(self, path: Path, run_id: str) -> None:
        self.path, self.id = path, run_id
        self.grown: dict[str, list[tuple[int, int]]] = {name: [] for name in GROWING}
        self.models, self.figures = path / "models", path / "figures"
        self.state, self.checkpoints = path / "state", path / "checkpoints"
        self._lock = os.open(path, os.O_RDONLY)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise
        self.models.mkdir(exist_ok=True)
        self.figures.mkdir(exist_ok=True)

    def release(self) -> None:
        """Give up the lock: the run goes on no longer."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def write_config(
        self,
        settings: Mapping[str, Any],
        resolved: Mapping[str, Any] | None = None,
        gpu: str | None = None,
        resumed: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """Write ``config.yaml``: every resolved setting, the versions, the machine.

        Parameters
        ----------
        settings : Mapping
            All settings of the run by key.
        resolved : Mapping, optional
            What stands behind settings that are `auto`.
        gpu : str, optional
            Name of the accelerator the server sees.
        resumed : sequence of Mapping
            When the run was resumed, from which round on, and with which changed settings.
        """
        text = dump(
            {
                "settings": plain(settings),
                **({"resolved": plain(resolved)} if resolved else {}),
                "seed": plain(settings.get("seed")),
                "id": self.id,
                **({"resumed": plain(list(resumed))} if resumed else {}),
                "versions": {"python": platform.python_version()}
                | {name: _version(name) for name in ("posy", "flwr", "torch", "numpy")},
                "machine": {
                    "system": platform.platform(),
                    "cpu": _cpu_model(),
                    "cpus": os.cpu_count(),
                    "gpu": gpu,
                },
            }
        )
        _write_text(self.path / "config.yaml", text)

    def append_round(self, row: Mapping[str, Any]) -> None:
        """Append one round to ``rounds.jsonl``: a JSON object a line; NaN and infinity become null."""
        self._append("rounds.jsonl", json.dumps(plain(row), allow_nan=False, ensure_ascii=False) + "\n")

    def append_clients(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Append the clients of a round to ``clients.csv``; what is missing, None or NaN stays empty.

        Raises
        ------
        ValueError
            If a row has a column that is not one of :data:`CLIENT_COLUMNS`.
        """
        text = io.StringIO()
        writer = csv.DictWriter(text, CLIENT_COLUMNS, restval="", lineterminator="\n")
        if not any(size for size, _ in self.grown["clients.csv"][-1:]):
            writer.writeheader()
        writer.writerows(plain(row) for row in rows)
        self._append("clients.csv", text.getvalue())

    def _append(self, name: str, text: str) -> None:
        content = text.encode()
        with (self.path / name).open("ab") as file:
            file.write(content)
        # Of each round: how long the file is after it, and the checksum of all that it holds by then.
        size, checksum = self.grown[name][-1] if self.grown[name] else (0, 0)
        self.grown[name].append((size + len(content), zlib.crc32(content, checksum)))

    def sync(self) -> None:
        """Wait until the disk has the files that grow by each round."""
        for name in GROWING:
            sync(self.path / name)

    def cut_back(self, grown: Mapping[str, Sequence[Sequence[int]]]) -> None:
        """Take the files that grow by each round back to where ``grown`` was what it is given.

        Of a file that does not hold what was written, the rounds before the damage are kept, and it is said that the
        others are lost.
        """
        for name in GROWING:
            path, rounds = self.path / name, grown[name]
            content = path.read_bytes() if path.is_file() else b""
            size = checksum = whole = 0
            for end, expected in rounds:
                found = zlib.crc32(content[size:end], checksum)
                if end > len(content) or found != expected:
                    break
                size, checksum, whole = end, found, whole + 1
            if whole < len(rounds):
                lost = f"rounds {whole + 1} to {len(rounds)}"
                log(WARNING, "%s is lost or damaged: it has no rows of %s any more", path, lost)
            if path.is_file():
                os.truncate(path, size)
            else:
                path.touch()
            # A round without rows ends where the one before it did.
            self.grown[name] = [(end, found) for end, found in rounds[:whole]] + [(size, checksum)] * (
                len(rounds) - whole
            )

    def write_summary(
        self,
        *,
        status: Status,
        method: str,
        dataset: str,
        num_clients: int,
        rounds: int,
        seed: int,
        seconds: float,
        bytes_up: int,
        bytes_down: int,
        accuracy: History,
        system_accuracy: float | None = None,
        dropped: Mapping[str, int] | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Write ``summary.json`` in place of the one before, and return what it holds.

        Parameters
        ----------
        status : str
            ``running`` after each round, then ``completed``, ``stopped``, ``failed`` or ``diverged``.
        rounds : int
            Rounds finished.
        accuracy : History
            Accuracy over the clients, from which the last and the best round are taken.
        dropped : Mapping, optional
            Number of replies left out, by reason.
        extra : Mapping, optional
            The method's own results.
        """
        summary: dict[str, Any] = plain(
            {
                "status": status,
                "method": method,
                "dataset": dataset,
                "num-clients": num_clients,
                "rounds": rounds,
                "seed": seed,
                "seconds": seconds,
                "bytes-up": bytes_up,
                "bytes-down": bytes_down,
                "served": {"last": _flat(accuracy.last("served")), "best": _flat(accuracy.best("served"))},
                "local": {"last": _flat(accuracy.last("local")), "best": _flat(accuracy.best("local"))},
                "system-accuracy": system_accuracy,
                "dropped": dropped or {},
                **(extra or {}),
            }
        )
        text = json.dumps(summary, indent=2, allow_nan=False, ensure_ascii=False) + "\n"
        _write_text(self.path / "summary.json", text)
        return summary

    def save_arrays(
        self, name: str, arrays: Mapping[str, npt.NDArray[Any]], metadata: Mapping[str, str] | None = None
    ) -> Path:
        """Write arrays to ``models/<name>.safetensors`` and return its path.

        Raises
        ------
        ValueError
            If the name is not that of a file.
        """
        if not is_folder_name(name):
            raise ValueError(f"{name!r} is not a name for a file of arrays")
        path = self.models / f"{name}.safetensors"
        write_arrays(path, arrays, metadata)
        return path


def _flat(evaluation: Evaluation | None) -> dict[str, Any] | None:
    if evaluation is None:
        return None
    return {"round": evaluation.round, **evaluation.over_clients, "missing": evaluation.missing}


def _new_folder(parent: Path, name: str) -> Path:
    parent.mkdir(parents=True, exist_ok=True)
    number = 1
    while True:
        path = parent / (name if number == 1 else f"{name}-{number}")
        try:
            path.mkdir()  # also settles which of two runs started at once gets the name
            return path
        except FileExistsError:
            number += 1


def _write_text(path: Path, text: str) -> None:
    replace(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None  # an app bundle runs without being installed


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
