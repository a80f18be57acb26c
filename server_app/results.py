"""Write a run's results to its directory after each round, so that they survive if the run is killed."""

import csv
import io
import json
import os
import platform
import re
import secrets
import zlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import count
from logging import WARNING
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt
from flwr.common.logger import log

from posy.flower import versions
from posy.settings import SettingsError
from posy.storage import is_folder_name, lock, plain, replace, sync
from posy.strategies.registry import code_digests
from posy.yaml12 import dump

Status = Literal["running", "completed", "stopped", "failed", "diverged"]

GROWING = ("rounds.jsonl", "clients.csv")
"""Files to which Posy appends after each round."""


class RunDirectory:
    """The existing directory of one run, which is locked until the run ends, and the run's unique id.

    Raise :class:`SettingsError` if another process is using the directory.
    """

    def __init__(self, path: Path, run_id: str) -> None:
        self.path, self.id = path, run_id
        self.columns: tuple[str, ...] = ()
        """Columns of ``clients.csv``."""
        self.grown: dict[str, list[tuple[int, int]]] = {name: [] for name in GROWING}
        """Size and checksum of each file in :data:`GROWING` after every round."""
        self.models, self.figures, self.predictions = path / "models", path / "figures", path / "predictions"
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
    def create(cls, output_dir: Path, run_name: str, *, exact: bool = False) -> Self:
        """Create a new run's directory, and ``output_dir`` if necessary; append -2, -3, … if the name is taken.

        Raise :class:`SettingsError` if the name is not a valid folder name, or the directory cannot be created. With
        ``exact``, a taken name is also an error.
        """
        if not is_folder_name(run_name):
            raise SettingsError(
                f"run-name = {run_name!r}: it must be a folder name of at most 200 bytes, "
                "without / or \\, and not . or .."
            )
        try:
            output_dir.mkdir(parents=True, exist_ok=True)
            for number in count(1):
                path = output_dir.absolute() / (run_name if number == 1 else f"{run_name}-{number}")
                with suppress(*([] if exact else [FileExistsError])):
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
        """Write ``config.yaml``: the settings, the entries in ``more``, and facts about the code and the machine."""
        content = {
            "settings": settings,
            "seed": settings.get("seed"),
            "id": self.id,
            **{key: value for key, value in ({"code": code_digests(settings)} | more).items() if value},
            "versions": versions(),
            "machine": {"system": platform.platform(), "cpu": cpu_model(), "cpus": os.cpu_count(), "gpu": gpu},
        }
        self._write("config.yaml", dump(plain(content)))

    def write_partition(self, counts: npt.ArrayLike, class_names: Sequence[str]) -> None:
        """Write the number of samples per client and class, ``counts`` ``(M, C)``, to ``partition.csv``."""
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
        """Append a round to ``rounds.jsonl`` as one line of JSON, with null for NaN and infinity."""
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
            # If a round's rows are lost, the end of the last intact round replaces its end.
            self.grown[name] = (intact_ends + [intact_ends[-1]] * len(rounds))[1 : len(rounds) + 1]
        with (self.path / "clients.csv").open(encoding="utf-8", newline="") as file:
            # An earlier version of Posy may have written more columns.
            self.columns = tuple(next(csv.reader(file), self.columns))


def cpu_model() -> str:
    """Return the name of this machine's processor."""
    try:
        match = re.search(r"^model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        match = None
    return match[1].strip() if match else platform.processor() or platform.machine()
