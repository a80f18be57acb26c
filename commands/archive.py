"""What a table needs of its finished runs, in one file that can be carried elsewhere: ``cells.jsonl.gz``.

A line for each run holds its settings, machine, summary, and the clients in the last round. A table that finds it does
not run these cells again.
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
from posy.server_app.resume import read_summary
from posy.settings import SettingsError
from posy.storage import replace
from posy.strategies.registry import current_keys, declared_for
from posy.yaml12 import dump, read_yaml

FILE = "cells.jsonl.gz"
KEPT = "kept.json"
"""File in the directory of a run with what else was kept of it."""
ENDED = ("completed", "diverged")
"""Status of a run that is not done again: one that has diverged would do so again."""


class Place(Protocol):
    """A cell of a table."""

    @property
    def name(self) -> str:
        """Name of the cell."""

    @property
    def path(self) -> Path:
        """Directory of its run."""

    def summary(self, *status: str) -> dict[str, Any] | None:
        """Return the summary of its run if that has ended so, with these very settings."""

    def fits(self, ran: Mapping[str, Any]) -> bool:
        """Tell whether a run had these very settings."""


P = TypeVar("P", bound=Place)


def restore(folder: Path, cells: Iterable[P]) -> list[P]:
    """Write the files of the cells that have no run here and stand in the archive of a folder.

    Return the cells that still have none. A run that is under way is left alone, and its cell is not among them.
    """
    lines, lacking = read(folder), []
    for cell in cells:
        if cell.summary(*ENDED) is not None or read_summary(cell.path).get("status") == "running":
            continue
        line = lines.get(cell.name)
        if line is not None and cell.fits(line["config"]["settings"]):
            write(cell.path, line)
        else:
            lacking.append(cell)
    return lacking


def clear(path: Path) -> None:
    """Delete an unfinished run; set a finished one with other settings aside.

    What is no run raises :class:`SettingsError`.
    """
    if not path.exists():
        return
    unknown = {item.name for item in path.iterdir()} - {"config.yaml", "models", "figures"}
    if unknown and not (path / "summary.json").exists():
        raise SettingsError(f"{path} is in the way: {', '.join(sorted(unknown))} in it is no run's")
    if read_summary(path).get("status") == "completed":
        path.rename(path.with_name(f"{path.name}-before-{time.strftime('%Y%m%d-%H%M%S')}"))
    else:
        shutil.rmtree(path)


def write(path: Path, line: Mapping[str, Any]) -> None:
    """Write the files of a run from its line in an archive; see :func:`clear` for one that lies there."""
    clear(path)
    path.mkdir(parents=True)
    text = io.StringIO()
    writer = csv.DictWriter(text, list(line["clients"][0]) if line["clients"] else ["round"], lineterminator="\n")
    writer.writeheader()
    writer.writerows(line["clients"])
    (path / "clients.csv").write_text(text.getvalue(), encoding="utf-8")
    (path / "config.yaml").write_text(dump(line["config"]), encoding="utf-8")
    if "kept" in line:
        (path / KEPT).write_text(json.dumps(line["kept"]), encoding="utf-8")
    (path / "summary.json").write_text(json.dumps(line["summary"], indent=2), encoding="utf-8")
    os.utime(path / "summary.json", (line["ended"], line["ended"]))


def store(folder: Path, cells: Iterable[Place]) -> None:
    """Write the archive of some cells, whose runs have finished, in their order."""
    content = gzip.compress(b"".join(map(_line, cells)), mtime=0)  # the same cells are the same file
    replace(folder / FILE, lambda temporary: temporary.write_bytes(content))


def add(folder: Path, cell: Place) -> None:
    """Append a cell, so that it is kept if the table is interrupted."""
    with (folder / FILE).open("ab") as file:
        file.write(gzip.compress(_line(cell), mtime=0))


def _line(cell: Place) -> bytes:
    summary = read_summary(cell.path)
    rows = client_rows(cell.path, summary["rounds"])
    config = read_yaml(cell.path / "config.yaml")
    config["settings"] = current_keys(config["settings"])
    # Where and how it was carried out is of no use elsewhere.
    matter = {key for key, setting in declared_for(config["settings"]).items() if setting.decides}
    config["settings"] = {key: value for key, value in config["settings"].items() if key in matter}
    for entry in config.get("resumed", []):
        entry["changed"] = {key: value for key, value in entry["changed"].items() if key in matter}
    ended = int((cell.path / "summary.json").stat().st_mtime)
    line = {"name": cell.name, "ended": ended, "config": config, "summary": summary, "clients": rows}
    if (cell.path / KEPT).exists():
        line["kept"] = json.loads((cell.path / KEPT).read_text(encoding="utf-8"))
    return (json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n").encode()


def read(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the lines of an archive by the names of their cells; of several for one the last.

    What a process that was stopped while it wrote has left is passed over.
    """
    found: dict[str, dict[str, Any]] = {}
    with suppress(FileNotFoundError, EOFError, gzip.BadGzipFile, zlib.error), gzip.open(folder / FILE) as file:
        for text in file:
            with suppress(ValueError, LookupError, TypeError):
                line = json.loads(text)
                found[line["name"]] = line
    return found
