"""The archive of a table's finished runs, in one portable file: ``cells.jsonl.gz``.

Each line contains the settings, machine and summary of a run, and the clients' results in its last round. ``posy
table`` does not repeat the runs in the archive.
"""

import csv
import gzip
import io
import json
import os
import shutil
import time
import zlib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol, TypeVar

from posy.report.recorded import client_rows
from posy.server_app.resume import CODE, read_summary
from posy.settings import SettingsError
from posy.storage import replace
from posy.strategies.registry import current_keys, declared_for
from posy.yaml12 import dump, read_yaml

FILE = "cells.jsonl.gz"
RECORD_FILE = "kept.json"
"""File with additional recorded numbers in a run's directory (see :mod:`posy.commands.papers.record`)."""
ENDED = ("completed", "diverged")
"""Statuses of runs that Posy does not repeat. If Posy repeated a diverged run, it would diverge again."""


class Place(Protocol):
    """A cell of a table."""

    @property
    def name(self) -> str:
        """Name of the cell."""

    @property
    def path(self) -> Path:
        """Directory of the cell's run."""

    def summary(self, *status: str) -> dict[str, Any] | None:
        """Return the summary of the cell's run, or None if the settings differ or the status is not in ``status``."""

    def fits(self, ran: Mapping[str, Any], code: Mapping[str, str] | None = None) -> bool:
        """Return whether a run's settings ``ran`` and the digests of its custom code match this cell."""


P = TypeVar("P", bound=Place)


def restore(folder: Path, cells: Iterable[P]) -> list[P]:
    """Restore the missing runs of cells from a folder's archive.

    Return the cells that still have no run. Cells that are running are neither restored nor returned.
    """
    lines, missing_cells = read(folder), []
    for cell in cells:
        if cell.summary(*ENDED) is not None or read_summary(cell.path).get("status") == "running":
            continue
        line = lines.get(cell.name)
        if line is not None and cell.fits(line["config"]["settings"], line["config"].get(CODE)):
            write(cell.path, line)
        else:
            missing_cells.append(cell)
    return missing_cells


def clear(path: Path) -> None:
    """Rename the directory of a completed run, or delete the directory of any other run.

    Raises
    ------
    SettingsError
        If the directory contains files that do not belong to a run.
    """
    if not path.exists():
        return
    unknown = {item.name for item in path.iterdir()} - {"config.yaml", "models", "figures"}
    if unknown and not (path / "summary.json").exists():
        raise SettingsError(f"{path} is not a run: it contains {', '.join(sorted(unknown))}; move it")
    if read_summary(path).get("status") == "completed":
        path.rename(path.with_name(f"{path.name}-before-{time.strftime('%Y%m%d-%H%M%S')}"))
    else:
        shutil.rmtree(path)


def write(path: Path, line: Mapping[str, Any]) -> None:
    """Clear a run's directory, then restore the run's files from its line in an archive."""
    clear(path)
    path.mkdir(parents=True)
    text = io.StringIO()
    writer = csv.DictWriter(text, list(line["clients"][0]) if line["clients"] else ["round"], lineterminator="\n")
    writer.writeheader()
    writer.writerows(line["clients"])
    (path / "clients.csv").write_text(text.getvalue(), encoding="utf-8")
    (path / "config.yaml").write_text(dump(line["config"]), encoding="utf-8")
    if "kept" in line:
        (path / RECORD_FILE).write_text(json.dumps(line["kept"]), encoding="utf-8")
    (path / "summary.json").write_text(json.dumps(line["summary"], indent=2), encoding="utf-8")
    os.utime(path / "summary.json", (line["ended"], line["ended"]))


def store(folder: Path, cells: Iterable[Place]) -> None:
    """Write an archive of cells whose runs have finished, in the order of the cells."""
    content = gzip.compress(b"".join(map(_line, cells)), mtime=0)  # no timestamp: equal cells produce equal bytes
    replace(folder / FILE, lambda temporary: temporary.write_bytes(content))


def add(folder: Path, cell: Place) -> None:
    """Append a cell to the archive, so that the cell survives an interruption of the table."""
    with (folder / FILE).open("ab") as file:
        file.write(gzip.compress(_line(cell), mtime=0))


def _line(cell: Place) -> bytes:
    summary = read_summary(cell.path)
    rows = client_rows(cell.path, summary["rounds"])
    config = read_yaml(cell.path / "config.yaml")
    config["settings"] = current_keys(config["settings"])
    # Omit settings that do not affect the results, for example paths, which are useless on another machine.
    decisive_keys = {key for key, setting in declared_for(config["settings"]).items() if setting.decides}
    config["settings"] = {key: value for key, value in config["settings"].items() if key in decisive_keys}
    for entry in config.get("resumed", []):
        entry["changed"] = {key: value for key, value in entry["changed"].items() if key in decisive_keys}
    ended = int((cell.path / "summary.json").stat().st_mtime)
    line = {"name": cell.name, "ended": ended, "config": config, "summary": summary, "clients": rows}
    if (cell.path / RECORD_FILE).exists():
        line["kept"] = json.loads((cell.path / RECORD_FILE).read_text(encoding="utf-8"))
    return (json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n").encode()


def read(folder: Path) -> dict[str, dict[str, Any]]:
    """Return each cell's last line in an archive, by cell name.

    Skip an incomplete line, which an interrupted process may leave behind.
    """
    last_lines: dict[str, dict[str, Any]] = {}
    with suppress(FileNotFoundError, EOFError, gzip.BadGzipFile, zlib.error), gzip.open(folder / FILE) as file:
        for text in file:
            with suppress(ValueError, LookupError, TypeError):
                line = json.loads(text)
                last_lines[line["name"]] = line
    return last_lines
