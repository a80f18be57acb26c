"""What a run shows while it lasts, and the table at its end."""

import io
import logging
import math
import sys
import textwrap
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

from rich import box
from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Bar
from rich.table import Table

_MAX_LINES = 200
_MAX_NAMED = 10
_MAX_ROWS = 50
_WIDTH = 100
_NUMBERS = ("client", "training", "test", "skipped")


class Progress:
    """Show the rounds of a run: a live bar in a terminal, plain lines in a log.

    Flower copies what the server process writes to ``flwr log``; there, and wherever the stream is
    no terminal, one line is printed a round, or every n-th so that about 200 come out.

    Parameters
    ----------
    rounds : int
        Number of rounds R of the run.
    done : int
        Rounds that were finished before this process took up the run.
    enabled : bool
        False shows nothing.
    stream : text stream, optional
        Where to write; standard output if not given.
    """

    def __init__(self, rounds: int, *, done: int = 0, enabled: bool = True, stream: TextIO | None = None) -> None:
        self._rounds = rounds
        self._done = done
        self._stream = stream or sys.stdout
        self._every = max(1, math.ceil(rounds / _MAX_LINES))
        self._enabled = enabled
        self._bar = _bar(self._stream) if enabled and _is_live(self._stream) else None
        self._redirected: list[tuple[logging.StreamHandler[TextIO], TextIO]] = []
        self._known: dict[str, tuple[int, str]] = {}
        # Start and end times of the last rounds: the first one also loads data and starts processes.
        self._times: deque[tuple[int, float]] = deque([(done, time.monotonic())], maxlen=20)

    def __enter__(self) -> Self:
        self._times = deque([(self._done, time.monotonic())], maxlen=20)
        if self._bar is not None:
            self._bar.start()
            self._task = self._bar.add_task("", total=self._rounds, completed=self._done, figures="")
            self._redirect_logs()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            for handler, stream in self._redirected:
                handler.setStream(stream)
            self._redirected.clear()
            self._bar.stop()

    def update(
        self,
        server_round: int,
        served: float | None,
        local: float | None,
        loss: float | None = None,
        present: str = "",
    ) -> None:
        """Show that a round is finished.

        Parameters
        ----------
        server_round : int
            The round, from 1 on.
        served, local : float or None
            Mean accuracy (0..1) of the served and of the local models; None if the round had no
            evaluation, in which case the latest is shown with its round.
        loss : float or None
            Mean training loss.
        present : str
            How many clients took part, where some were missing.
        """
        self._times.append((server_round, time.monotonic()))
        for name, value, text in (
            ("served", served, f"{100 * (served or 0):.2f} %"),
            ("local", local, f"{100 * (local or 0):.2f} %"),
            ("loss", loss, f"{loss or 0:.4f}"),
        ):
            if value is not None:
                self._known[name] = server_round, text
        shown = self._figures(server_round) + ([present] if present else []) + self._pace(server_round)
        if self._bar is not None:
            figures = "  ".join(shown)
            self._bar.update(self._task, completed=server_round, figures=figures, refresh=True)
        elif self._enabled and (server_round in (self._done + 1, self._rounds) or server_round % self._every == 0):
            parts = [f"round {server_round:{len(str(self._rounds))}d}/{self._rounds}"]
            line = "  ".join(parts + shown)
            self._stream.write(line + "\n")  # in one piece: the log is shared with other writers
            self._stream.flush()

    def _figures(self, server_round: int) -> list[str]:
        return [
            f"{name} {text}" + ("" if at == server_round else f" (round {at})")
            for name, (at, text) in self._known.items()
        ]

    def _pace(self, server_round: int) -> list[str]:
        (first, start), (last, end) = self._times[0], self._times[-1]
        pace = (end - start) / max(1, last - first)
        left = self._rounds - server_round
        return [f"{pace:.2f} s/round"] + ([f"{duration(pace * left)} left"] if left > 0 else [])

    def _redirect_logs(self) -> None:
        """Send log lines through the bar's console, which keeps them above the bar."""
        for logger in (logging.getLogger(), logging.getLogger("flwr")):
            for handler in logger.handlers:
                if isinstance(handler, logging.StreamHandler) and handler.stream in (sys.__stdout__, sys.__stderr__):
                    self._redirected.append((handler, handler.stream))
                    handler.setStream(sys.stdout)  # by now the bar's own


def announce(text: str) -> None:
    """Print a line of news that is no warning: a client joins, or is back."""
    print(text, flush=True)


def task_table(columns: Sequence[str], rows: Sequence[Mapping[str, Any]], facts: Mapping[str, str]) -> str:
    """Return what the sites of a run have, and the task that they have agreed on, as text of at most 100 columns.

    Parameters
    ----------
    columns : sequence of str
        Names of the columns; those that no row has are left out.
    rows : sequence of Mapping
        What there is of each site, by column.
    facts : Mapping of str to str
        What they have agreed on, a line each.
    """
    used = [name for name in columns if any(row.get(name) not in (None, "") for row in rows)]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in used:
        table.add_column(name, justify="right" if name in _NUMBERS else "left", overflow="fold")
    for row in rows[:_MAX_ROWS]:
        table.add_row(*(str(row.get(name, "")) for name in used))
    width = max(map(len, facts))
    lines = [f"… and {len(rows) - _MAX_ROWS} more"] if len(rows) > _MAX_ROWS else []
    for key, text in facts.items():
        line, indent = f"{key:<{width}}  {text:.1000}", " " * (width + 2)
        lines += textwrap.wrap(line, _WIDTH, subsequent_indent=indent, max_lines=4, placeholder=" …")
    return "\n".join(["the task of this run", *_drawn(table), *lines])


def results_table(summary: Mapping[str, Any], path: Path) -> str:
    """Return the end of a run as text of at most 100 columns.

    Parameters
    ----------
    summary : Mapping
        What :meth:`posy.server_app.results.RunDirectory.write_summary` returned.
    path : Path
        Directory of the run.
    """
    title = (
        f"{summary['method']} on {summary['dataset']}: {summary['status']} after {_count(summary['rounds'], 'round')}"
    )
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("accuracy")
    for name in ("round", "mean ± std", "min", "max", "weighted", "Jain"):
        table.add_column(name, justify="right", no_wrap=True)
    for point in ("served", "local"):
        for which in ("last", "best"):
            row = summary[point][which]
            missing = f" ({row['missing']} missing)" if row and row.get("missing") else ""
            cells = _cells(row) if row else ("not evaluated", *[""] * 5)
            table.add_row(f"{point} model, {which}{missing}", *cells)
    notes = {
        "system accuracy": _percent(summary["system-accuracy"]),
        "clients": _clients(summary),
        "seed": str(summary["seed"]),
        "time": duration(summary["seconds"]),
        "bytes": f"{size(summary['bytes-up'])} up, {size(summary['bytes-down'])} down",
        "dropped replies": ", ".join(f"{count} x {reason}" for reason, count in summary["dropped"].items()),
        "results": str(path),
    }
    width = max(map(len, notes))
    return "\n".join([title, *_drawn(table), *(f"{key:<{width}}  {text}" for key, text in notes.items() if text)])


def _drawn(table: Table) -> list[str]:
    """Return a table as lines of plain text; what its cells hold is taken as it is."""
    file = io.StringIO()
    Console(file=file, width=_WIDTH, color_system=None, force_terminal=False, markup=False, emoji=False).print(table)
    return [line.rstrip() for line in file.getvalue().splitlines()]


def duration(seconds: float) -> str:
    """Return a time in words: ``46 s``, ``1 min 46 s``, ``2 h 5 min``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def size(count: int) -> str:
    """Return a number of bytes in words, in powers of 1000: ``1.23 MB``."""
    value = float(count)
    for unit in ("bytes", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "bytes" else f"{value:.2f} {unit}"
        value /= 1000
    return f"{value:.2f} TB"


def _is_live(stream: TextIO) -> bool:
    # Flower mirrors a stream by replacing its `write`: a bar drawn there would fill `flwr log` with escape codes.
    return stream.isatty() and "write" not in vars(stream)


def _bar(stream: TextIO) -> Bar:
    return Bar(
        TextColumn("round {task.completed:.0f}/{task.total:.0f}"),
        BarColumn(bar_width=24),
        TextColumn("{task.fields[figures]}", markup=False),
        console=Console(file=stream),
        refresh_per_second=2,
    )


def _clients(summary: Mapping[str, Any]) -> str:
    """Return how many clients there are, and which of them the last evaluation was without."""
    clients, missing = summary["num-clients"], summary.get("missing", [])
    if not missing:
        return str(clients)
    names = summary.get("sites", [None] * clients)
    first = ", ".join(names[client] or f"client {client}" for client in missing[:_MAX_NAMED])
    more = ", …" if len(missing) > _MAX_NAMED else ""
    return f"{clients - len(missing)} of {clients} (missing in the last evaluation: {first}{more})"


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    mean, std = 100 * row["mean"], 100 * row["std"]
    jain = "" if row["jain"] is None else f"{row['jain']:.4f}"
    shares = (_percent(row[key]) for key in ("min", "max", "weighted"))
    return (str(row["round"]), f"{mean:.2f} ± {std:.2f} %", *shares, jain)


def _percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.2f} %"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")
