"""The log of a run as it is shown: warnings, errors and what Posy prints, without Flower's and Ray's own news."""

import re
import sys
from collections import Counter
from dataclasses import dataclass, field

_COLOUR = re.compile(r"\x1b\[[\d;]*m")
_RESULTS = re.compile(r"Results of this run: (.+)")
_ACTOR = re.compile(r"\(((?:\w+ )?pid=\w+)[^)]*\) ?")
_LEVEL = re.compile(r"(DEBUG|INFO|WARNING|ERROR|CRITICAL)\s*: ?")
_TRACEBACK = "Traceback (most recent call last):"
# What belongs to an error that has begun: a traceback as Python and Ray write it, down to the exceptions' names.
_OF_ERROR = re.compile(
    r"\s|$|ray::|Traceback \(|The above exception|During handling|Exception ClientAppException occurred\."
    r"|[\w.]*(Error|Exception|Exit|Interrupt)(\(\w+\))?(:|$)"
)
_TOLD = re.compile(r"^[\w.]+\.(SettingsError|DataError|NothingTrainedError|TrainingDivergedError): ", re.MULTILINE)
"""An error whose message stands elsewhere too: at the end of the run, or beside the replies that were dropped."""
_NOISE = re.compile(
    r"Using SuperLink: |Successfully installed |WARNING\s*: +Since flwr 1\.32, default simulated SuperNodes"
    # These stand beside what has happened.
    r"|ERROR\s*: +(An exception was raised when processing a message by RayBackend|Exit Code: 201$)"
    r"|An unhandled exception occurred in the ServerApp|For more information, visit:"
    r"|\(autoscaler |\d{4}-\d\d-\d\d [\d:,]+\s+(INFO|WARNING)\b"  # what Ray says of itself
    r"|\S+/(ray|flwr)/\S+\.py:\d+: \w*Warning: ",
    re.MULTILINE,
)
_REPEATED = re.compile(r" \[repeated (\d+)x across cluster\].*")


@dataclass
class _Source:
    """One of the processes that write into the log: the server's, or one of Ray's."""

    shown: bool
    error: list[str] = field(default_factory=list)
    """The error that it is writing, which is shown as a whole or not at all."""


class RunLog:
    """Takes the lines of a run's log, and shows those that tell its user something.

    Flower's and Ray's INFO lines are hidden, and a few of their warnings that say nothing about the run. Warnings,
    errors, and all that is no line of a log (what Posy prints, above all) are shown, whenever they come. Lines that
    belong to another, as those of a traceback, share its fate; of equal tracebacks the first is shown.

    Parameters
    ----------
    verbose : bool
        Show everything as it comes.

    Attributes
    ----------
    results : str
        Directory of the results; empty as long as the log has not named it.
    lines : Counter
        How often each line has come.
    """

    def __init__(self, verbose: bool) -> None:
        self.results = ""
        self.lines: Counter[str] = Counter()
        self._verbose = verbose
        self._sources = {"": _Source(shown=True)}
        self._start: list[str] = []
        self._told = False
        self._ends: set[str] = set()

    def add(self, line: str) -> None:
        """Show a line, hide it, or wait for what belongs to it."""
        self.lines[line] += 1
        plain = _COLOUR.sub("", line)
        if not self.results and (found := _RESULTS.search(plain)):
            self.results = found[1].strip()
            self._start.clear()
            if not self._verbose:
                self._print(found[0] + "\n")
        if self._verbose:
            self._print(line)
            return
        actor = _ACTOR.match(plain)
        name = actor[1] if actor else ""
        # What Ray's actors print, and is no line of a log, is theirs.
        source = self._sources.setdefault(name, _Source(shown=False))
        if actor:
            plain = line = _REPEATED.sub(r" [\1 times more]", plain[actor.end() :])
        level = _LEVEL.match(plain)
        if level is None and source.error and _OF_ERROR.match(plain):
            source.error.append(line)
            return
        self._finish(source)
        noise = _NOISE.match(plain) is not None
        if not noise and ((level and level[1] in ("ERROR", "CRITICAL")) or plain.startswith(_TRACEBACK)):
            source.error = [line]
            return
        if level is not None or not plain[:1].isspace():
            source.shown = not noise and (level[1] == "WARNING" if level else not name)
        if source.shown:
            self._print(line)
        else:
            self._hide(line)

    def end(self, *, failed: bool = False) -> None:
        """Show what is still waited with; of a run that failed before it began, also what was hidden.

        That is left out where an error is told in one line: where in the code a setting was found wrong helps nobody.
        """
        for source in self._sources.values():
            self._finish(source)
        if failed and not self._told:
            for line in self._start:
                self._print(line)
        self._start.clear()

    def _finish(self, source: _Source) -> None:
        """Show the error that a process has written, if it says what has not been said."""
        error, source.error = source.error, []
        if not error:
            return
        text = _COLOUR.sub("", "".join(error))
        if _TOLD.search(text):
            self._told = True
            return
        traceback, _, end = text.rstrip().rpartition("\n")
        if traceback and end in self._ends:
            return
        self._ends.add(end)
        for line in error:
            self._print(line)

    def _hide(self, line: str) -> None:
        if not self.results:
            self._start.append(line)

    def _print(self, line: str) -> None:
        print(line if sys.stdout.isatty() else _COLOUR.sub("", line), end="", flush=True)
