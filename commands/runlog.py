"""The log of a run on a SuperLink as people see it: what Posy prints, warnings and errors; not Flower's own news."""

import re
import shutil
import sys
from collections.abc import Callable

_COLOUR = re.compile(r"\x1b\[[\d;]*m")
_RESULTS = re.compile(r"Results of this run: (.+)")
_ROUND = re.compile(r"round +(\d+)/(\d+) ")
_BEGUN = re.compile(r"\[ROUND (\d+)/")
_LEVEL = re.compile(r"(DEBUG|INFO|WARNING|ERROR|CRITICAL)\s*: ?")
_TRACEBACK = "Traceback (most recent call last):"
_OF_ERROR = re.compile(
    r"\s|$|Traceback \(|The above exception|During handling|[\w.]*(Error|Exception|Exit|Interrupt)(\(\w+\))?(:|$)"
)
"""Lines that belong to an error that has begun: those of its traceback, and the names of exceptions."""
_KNOWN = re.compile(r"^[\w.]+\.(SettingsError|DataError|NothingTrainedError|TrainingDivergedError): ", re.MULTILINE)
"""An error whose message is shown elsewhere too: at the end of the run, or beside the replies that were dropped."""
_NOISE = re.compile(
    r"Successfully installed |ERROR\s*: +Exit Code: 201$|An unhandled exception occurred in the ServerApp"
    r"|For more information, visit:|\S+/flwr/\S+\.py:\d+: \w*Warning: ",
    re.MULTILINE,
)


class RunLog:
    """Takes the lines of a run's log, and shows those that matter to its user.

    Flower's INFO lines are hidden, and a few of its warnings that say nothing about the run. Warnings, errors, and
    everything that is no line of a log (what Posy prints, above all) are shown. Lines that belong to another, as those
    of a traceback, are shown or hidden with it; of equal tracebacks the first is shown. If it is ``verbose``,
    everything is shown as it comes. With ``beside`` the line of a finished round is followed by what that returns, and
    in a terminal by the next one in its place.
    """

    def __init__(self, verbose: bool, beside: Callable[[], str] | None = None) -> None:
        self._beside = beside
        self._in_place = False
        self.results = ""
        """Directory of the results; empty as long as the log has not named it."""
        self.rounds = 0
        """The last finished round that the log has named; 0 if there is none, or nothing more to do."""
        self._verbose = verbose
        self._shown = True
        self._error: list[str] = []
        """The error that is being written, which is shown as a whole or not at all."""
        self._hidden: list[str] = []
        """What was hidden before the run had begun."""
        self._explained = False
        self._ends: set[str] = set()

    def add(self, line: str) -> None:
        """Show a line, hide it, or wait for those that belong to it."""
        plain = _COLOUR.sub("", line)
        if found := _ROUND.match(plain):
            self.rounds = int(found[1]) if found[1] != found[2] else 0
        elif found := _BEGUN.search(plain):  # of many rounds only some are told when they are finished
            self.rounds = int(found[1]) - 1
        if not self.results and (found := _RESULTS.search(plain)):
            self.results = found[1].strip()
            self._hidden.clear()
            if not self._verbose:
                self._print(found[0] + "\n")
        if self._verbose:
            self._print(line)
            return
        level = _LEVEL.match(plain)
        if level is None and self._error and _OF_ERROR.match(plain):
            self._error.append(line)
            return
        self._show_error()
        noise = _NOISE.match(plain) is not None
        if not noise and ((level and level[1] in ("ERROR", "CRITICAL")) or plain.startswith(_TRACEBACK)):
            self._error = [line]
            return
        if level is not None or not plain[:1].isspace():
            self._shown = not noise and (level is None or level[1] == "WARNING")
        if self._shown:
            self._print(line)
        elif not self.results:
            self._hidden.append(line)

    def end(self, *, failed: bool = False) -> None:
        """Show what is still held back; of a run that failed before it began, also what was hidden.

        That is left out where one line says what is wrong: where in the code a setting was refused helps nobody.
        """
        self._show_error()
        if failed and not self._explained:
            for line in self._hidden:
                self._print(line)
        self._hidden.clear()
        if self._in_place and sys.stdout.isatty():
            self._print("\n")

    def _show_error(self) -> None:
        """Show the error that has been written, if it says what has not been said."""
        error, self._error = self._error, []
        if not error:
            return
        text = _COLOUR.sub("", "".join(error))
        if _KNOWN.search(text):
            self._explained = True
            return
        traceback, _, end = text.rstrip().rpartition("\n")
        if traceback and end in self._ends:
            return
        self._ends.add(end)
        for line in error:
            self._print(line)

    def _print(self, line: str) -> None:
        terminal = sys.stdout.isatty()
        line = line if terminal else _COLOUR.sub("", line)
        if self._beside is not None:
            of_round = _ROUND.match(line) is not None
            line = f"{line.rstrip()}  {self._beside()}\n" if of_round else line
            if terminal and self._in_place:
                line = ("\r\x1b[K" if of_round else "\n") + line
            if terminal and of_round:
                line = line.rstrip("\n")[: shutil.get_terminal_size().columns + 3]
            self._in_place = of_round
        print(line, end="", flush=True)
