"""Watch a run on this machine, from the files that it writes after each round."""

import sys
import time
from pathlib import Path

from posy.commands.launch import INTERRUPTED
from posy.report.recorded import Recorded, parsed_rounds
from posy.server_app.progress import Progress, results_table
from posy.server_app.record import Record
from posy.server_app.resume import read_summary
from posy.settings import SettingsError
from posy.storage import is_locked
from posy.strategies.settings import RunSettings

LOOK_SECONDS = 0.5
"""Seconds between two looks at the files."""


def directory_of(word: str) -> Path:
    """Return the directory of a run, which is given or named; without a ``word`` that of the newest in ``runs/``.

    Raises :class:`SettingsError` if there is none.
    """
    runs = Path(RunSettings.output_dir)
    if word:
        return Record.find(word).path
    found = [path.parent for path in runs.glob("*/summary.json")]
    if not found:
        raise SettingsError(f"there is no run in {runs.absolute()}; name the directory of one")
    return max(found, key=lambda path: (path / "summary.json").stat().st_mtime)


def watch_run(word: str) -> int:
    """Show the rounds of a run, those to come as they are finished, until it ends; return the exit status.

    It is the run that :func:`directory_of` finds.
    """
    path = directory_of(word)
    run = Recorded.read(path)
    seconds, read = 0.0, 0
    try:
        with Progress(int(run.settings["num-server-rounds"]), clock=lambda: seconds) as shown:
            while True:
                going_on = is_locked(path)
                text = _grown(path / "rounds.jsonl", read)
                read += len(text)
                for row in parsed_rounds(text.decode()):
                    seconds += sum(row["seconds"].values())
                    shown.add(row, int(run.summary["num-clients"]))
                if not going_on:
                    break
                time.sleep(LOOK_SECONDS)
    except KeyboardInterrupt:
        print("\nposy: the run goes on", file=sys.stderr)
        return INTERRUPTED
    summary = read_summary(path)
    if summary["status"] == "running":
        print(f"posy: the run was killed after round {summary['rounds']}", file=sys.stderr)
        return 1
    print(results_table(summary, path))
    return 0 if summary["status"] == "completed" else 1


def _grown(file: Path, read: int) -> bytes:
    """Return the whole lines of a file after its first bytes, which were ``read`` before."""
    if not file.is_file():
        return b""
    with file.open("rb") as opened:
        opened.seek(read)
        return b"".join(line for line in opened if line.endswith(b"\n"))
