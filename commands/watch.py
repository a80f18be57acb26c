"""Watch a run on this machine by reading the files that the run writes after each round."""

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
from posy.strategies.run_settings import RunSettings

LOOK_SECONDS = 0.5
"""Seconds between reads of the files."""


def directory_of(word: str) -> Path:
    """Return the directory of the run with this path or name, or of the newest run in ``runs/`` if ``word`` is empty.

    Raises :class:`SettingsError` if the run does not exist.
    """
    runs = Path(RunSettings.output_dir)
    if word:
        return Record.find(word).path
    paths = [path.parent for path in runs.glob("*/summary.json")]
    if not paths:
        raise SettingsError(f"{runs.absolute()} contains no run; pass the directory of a run")
    return max(paths, key=lambda path: (path / "summary.json").stat().st_mtime)


def watch_run(word: str) -> int:
    """Show the finished rounds of a run, and each new round until the run ends; return the exit status.

    :func:`directory_of` finds the run for ``word``.
    """
    path = directory_of(word)
    run = Recorded.read(path)
    seconds, offset = 0.0, 0
    try:
        with Progress(int(run.settings["num-server-rounds"]), run.metric, clock=lambda: seconds) as progress:
            while True:
                is_running = is_locked(path)
                text = _grown(path / "rounds.jsonl", offset)
                offset += len(text)
                for row in parsed_rounds(text.decode()):
                    seconds += sum(row["seconds"].values())
                    progress.add(row, int(run.summary["num-clients"]))
                if not is_running:
                    break
                time.sleep(LOOK_SECONDS)
    except KeyboardInterrupt:
        print("\nposy: the run continues", file=sys.stderr)
        return INTERRUPTED
    summary = read_summary(path)
    if summary["status"] == "running":
        print(f"posy: the run was killed after round {summary['rounds']}", file=sys.stderr)
        return 1
    print(results_table(summary, path))
    return 0 if summary["status"] == "completed" else 1


def _grown(file: Path, offset: int) -> bytes:
    """Return the complete lines of a file after its first ``offset`` bytes; empty if the file is missing."""
    if not file.is_file():
        return b""
    with file.open("rb") as stream:
        stream.seek(offset)
        return b"".join(line for line in stream if line.endswith(b"\n"))
