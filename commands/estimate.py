"""Estimate how long the runs of a table take, from their finished rounds and from runs that have ended."""

import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from posy.report.recorded import parsed_rounds

LOOK_SECONDS = 1.0
"""Minimum number of seconds between reads of the runs' files before the first estimate."""


@dataclass(frozen=True)
class _Run:
    """A run in progress."""

    began: float
    rounds_file: Path
    rounds: int
    """Number of rounds of the whole run."""
    done_before: int
    """Number of rounds that had finished before this process began."""
    row: str
    """Row of the table to which the run belongs."""


class Estimate:
    """The time that the missing runs of a table take.

    Parameters
    ----------
    jobs : int
        Number of parallel runs.
    ended : mapping
        Durations in seconds of runs that ended earlier, keyed by row.
    clock : callable
        Returns the time in seconds.
    """

    def __init__(
        self,
        jobs: int,
        ended: Mapping[str, Sequence[float]] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._jobs, self._clock = jobs, clock
        self._running: dict[Path, _Run] = {}
        self._durations = {row: list(durations) for row, durations in (ended or {}).items()}
        self._looked = 0.0
        self._given = False

    def begin(self, path: Path, rounds: int, row: str = "") -> None:
        """Note that the run in a directory begins."""
        file = path / "rounds.jsonl"
        self._running[path] = _Run(self._clock(), file, rounds, len(_seconds_of_rounds(file)), row)

    def end(self, path: Path) -> None:
        """Note that the run in a directory has ended."""
        run = self._running.pop(path)
        self._durations.setdefault(run.row, []).append(self._clock() - run.began)
        self._given = True

    def first(self, waiting: Sequence[str]) -> float | None:
        """Return :meth:`remaining_time` once, when every running run has finished a round, and None otherwise."""
        if self._given or self._clock() - self._looked < LOOK_SECONDS:
            return None
        self._looked = self._clock()
        if not self._running or not all(map(self._expected, self._running.values())):
            return None
        self._given = True
        return self.remaining_time(waiting)

    def remaining_time(self, waiting: Sequence[str]) -> float | None:
        """Return the number of seconds until all runs have ended, or None if it is unknown.

        ``waiting`` contains the row of each run that has not begun. Rows with known durations determine the estimate
        for their own runs, and the mean over all runs determines it for the other rows.
        """
        expected = {path: self._expected(run) for path, run in self._running.items()}
        by_row = {row: list(durations) for row, durations in self._durations.items()}
        for path, run in self._running.items():
            if expected[path]:
                by_row.setdefault(run.row, []).append(expected[path])
        durations = list(itertools.chain(*by_row.values()))
        if not durations:
            return None
        of_row = {row: statistics.fmean(values) for row, values in by_row.items()}
        mean = statistics.fmean(durations)
        remaining = [
            max(0.0, (expected[path] or of_row.get(run.row, mean)) - (self._clock() - run.began))
            for path, run in self._running.items()
        ]
        remaining += [of_row.get(row, mean) for row in waiting]
        return max(max(remaining, default=0.0), sum(remaining) / min(self._jobs, max(1, len(remaining))))

    def _expected(self, run: _Run) -> float:
        """Return the expected duration of a run in seconds, or 0 before its first round in this process has ended."""
        seconds = _seconds_of_rounds(run.rounds_file)[run.done_before :]
        if not seconds:
            return 0.0
        waiting = self._clock() - run.began - sum(seconds)  # mainly for imports and data
        return waiting + statistics.mean(seconds) * (run.rounds - run.done_before)


def _seconds_of_rounds(file: Path) -> list[float]:
    """Return the duration of each finished round in a run's ``rounds.jsonl``, which may be missing."""
    rows = parsed_rounds(file.read_text(encoding="utf-8")) if file.is_file() else []
    return [sum(row["seconds"].values()) for row in rows]
