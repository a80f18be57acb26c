"""Filter the log of a run on a SuperLink: show Posy's output, warnings and errors, and hide Flower's INFO lines."""

import re
import shutil
import sys
from collections.abc import Callable

from posy.server_app.progress import WITHOUT_MODEL_TITLE

COLOUR = re.compile(r"\x1b\[[\d;]*m")
"""The codes that switch a terminal's colours."""
_RESULTS = re.compile(r"Results of this run: (.+)")
_ROUND = re.compile(r"round +(\d+)/(\d+) ")
_BEGUN = re.compile(r"\[ROUND (\d+)/")
_LEVEL = re.compile(r"(DEBUG|INFO|WARNING|ERROR|CRITICAL)\s*: ?")
_TRACEBACK = "Traceback (most recent call last):"
_OF_ERROR = re.compile(
    r"\s|$|Traceback \(|The above exception|During handling|[\w.]*(Error|Exception|Exit|Interrupt)(\(\w+\))?(:|$)"
)
"""Pattern for the continuation lines of an error, such as tracebacks and the names of exceptions."""
_KNOWN = re.compile(r"^[\w.]+\.(SettingsError|DataError|NothingTrainedError|TrainingDivergedError): ", re.MULTILINE)
"""Pattern for errors whose messages Posy also shows at the end of the run or with the dropped replies."""
_NOISE = re.compile(
    r"Successfully installed |ERROR\s*: +Exit Code: 201$|An unhandled exception occurred in the ServerApp"
    r"|For more information, visit:|\S+/flwr/\S+\.py:\d+: \w*Warning: ",
    re.MULTILINE,
)


_REASON = re.compile(r"ERROR\s*: +ServerApp raised an exception: (.+)")
"""Pattern for a ServerApp error with a message for the user, as ``posy.flower.ErrorsOnOneLine`` logs it."""


class RunLog:
    """A filter that receives the lines of a run's log and prints the relevant lines.

    The filter hides Flower's INFO lines, and a few of Flower's warnings that do not concern the run. It prints errors,
    all other warnings, and all lines without a log level, such as Posy's output. It prints or hides the lines of a
    traceback together, and prints identical tracebacks only once. If ``verbose`` is true, it prints every line
    immediately. If ``suffix`` is set, the filter appends the result of ``suffix()`` to the line of each finished round.
    In a terminal, each of these lines then replaces the line of the previous round.
    """

    def __init__(self, verbose: bool, suffix: Callable[[], str] | None = None) -> None:
        self._suffix = suffix
        self._in_place = False
        self.results = ""
        """Directory of the results; empty until the log names it."""
        self.rounds = 0
        """Number of the last finished round in the log; 0 before the first round ends and after the last round ends."""
        self.reason = ""
        """Reason for the run's failure, if the log contains an error message for the user; otherwise empty."""
        self.undelivered = False
        """Whether the log lists clients to which the final model was not delivered."""
        self._verbose = verbose
        self._printing = True
        self._error: list[str] = []
        """Lines of the current error, which are printed together or not at all."""
        self._hidden: list[str] = []
        """Hidden lines, which the filter discards once the log names the directory of the results."""
        self._explained = False
        self._ends: set[str] = set()

    def add(self, line: str) -> None:
        """Print a line, hide it, or store it until the error to which it belongs is complete."""
        plain = COLOUR.sub("", line)
        explains = self._note(plain)
        if self._verbose:
            self._print(line)
            return
        if explains:  # the command prints the reason when it exits
            self._show_error()
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
            self._printing = not noise and (level is None or level[1] == "WARNING")
        if self._printing:
            self._print(line)
        elif not self.results:
            self._hidden.append(line)

    def _note(self, plain: str) -> bool:
        """Extract the round, the results directory or a failure's reason from a log line.

        Return whether the line explains a failure.
        """
        if match := _ROUND.match(plain):
            self.rounds = int(match[1]) if match[1] != match[2] else 0
        elif match := _BEGUN.search(plain):  # in a long run, only some rounds have a line in the log
            self.rounds = int(match[1]) - 1
        if not self.results and (match := _RESULTS.search(plain)):
            self.results = match[1].strip()
            self._hidden.clear()
            if not self._verbose:
                self._print(match[0] + "\n")
        self.undelivered |= plain.startswith(WITHOUT_MODEL_TITLE)
        if match := _REASON.match(plain):
            self.reason, self._explained = match[1].strip(), True
        return match is not None

    def end(self, *, failed: bool = False) -> None:
        """Print the current error; if the run failed without an explanation, also print the hidden lines.

        The filter discards hidden lines once the log names the directory of the results.
        """
        self._show_error()
        if failed and not self._explained:
            for line in self._hidden:
                self._print(line)
        self._hidden.clear()
        if self._in_place and sys.stdout.isatty():
            self._print("\n")

    def _show_error(self) -> None:
        """Print the current error, unless an identical error was printed or another line explains it."""
        error, self._error = self._error, []
        if not error:
            return
        text = COLOUR.sub("", "".join(error))
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
        line = line if terminal else COLOUR.sub("", line)
        if self._suffix is not None:
            of_round = _ROUND.match(line) is not None
            line = f"{line.rstrip()}  {self._suffix()}\n" if of_round else line
            if terminal and self._in_place:
                line = ("\r\x1b[K" if of_round else "\n") + line
            if terminal and of_round:
                line = line.rstrip("\n")[: shutil.get_terminal_size().columns + 3]
            self._in_place = of_round
        print(line, end="", flush=True)
