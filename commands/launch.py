"""Run experiments in this process, and provide helpers for the commands that start runs or other processes."""

import json
import logging
import os
import shlex
import sys
import sysconfig
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posy.commands import guide
from posy.paths import absolute, exists
from posy.server_app.resume import reached
from posy.settings import RunError, Scalar
from posy.strategies.registry import read_settings
from posy.strategies.run_settings import RunSettings
from posy.strategies.settings import Settings

if TYPE_CHECKING:
    from posy.server_app.final_models import Delivery
    from posy.server_app.folds import CrossValidation
    from posy.server_app.recorder import Recorder

APP = Path(__file__).resolve().parent.parent
"""Directory of the Flower app. It contains pyproject.toml."""
ENVIRONMENT = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
}
"""Environment variables that keep all Flower processes from contacting servers on the internet."""
INTERRUPTED = 130
"""Exit status after Ctrl-C."""


@dataclass(frozen=True)
class Connection:
    """Address of a SuperLink, and the CA certificate for verifying the SuperLink."""

    address: str
    root_certificates: Path | None = None
    """Certificate of the authority that signed the SuperLink's certificate; None: no TLS."""

    def words(self) -> list[str]:
        """Return the command-line options that select this SuperLink."""
        ca = self.root_certificates
        return ["--superlink", self.address, *(["--insecure"] if ca is None else ["--root-certificates", str(ca)])]


def run_in_process(settings: Mapping[str, Any], where: str) -> int:
    """Run all clients and the server in this process, show the progress, and return the exit status.

    ``where`` names the source of the settings in messages.

    Raises
    ------
    SettingsError, DataError
        If a setting or the data is invalid.
    """
    run_folders: list[Path] = []

    def begun(run: Path) -> None:
        run_folders.append(run)
        print(guide.beginning(run), flush=True)

    print_start(settings, where)  # before importing PyTorch, which takes seconds
    try:
        record = record_in_process(settings, where, begun)
    except (KeyboardInterrupt, Exception) as error:
        if isinstance(error, RunError):
            print(f"posy: {error}", file=sys.stderr)
        stopped = isinstance(error, KeyboardInterrupt)
        if stopped or run_folders:
            _print_how_to_resume("stopped" if stopped else "failed", run_folders[0] if run_folders else None)
        if isinstance(error, RunError):
            return 1
        raise
    if run_folders:
        guide.show_next(guide.next_commands(run_folders[0], record.settings))
    return 0


def print_start(settings: Mapping[str, Any], where: str) -> Settings | None:
    """Check the settings of a run, and print one line about the run; return None for a resumed run.

    A resumed run also uses stored settings, which are checked later.
    """
    if not settings.get("resume"):
        checked = read_settings(settings, where)
        print(guide.description(checked), flush=True)
        return checked
    run = absolute(str(settings.get("output-dir", RunSettings.output_dir))) / str(settings["resume"])
    if exists(run):
        print(guide.resumption(run, settings.get("num-server-rounds")), flush=True)
    return None


def record_in_process(
    settings: Mapping[str, Any], where: str, begun: Callable[[Path], object] = lambda path: None
) -> "Recorder | CrossValidation | Delivery":
    """Execute a run in this process and return its record; call ``begun`` with the run's directory once it exists."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    from flwr.common.logger import update_console_handler  # noqa: PLC0415 - imports Flower

    from posy.server_app.app import run  # noqa: PLC0415 - imports PyTorch

    if not sys.stderr.isatty():  # Flower writes escape codes for colours into pipes
        update_console_handler(colored=False)
    logger = logging.getLogger("flwr")
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        return run(None, settings, where, begun)
    finally:
        logger.setLevel(level)


def without_colours(record: logging.LogRecord) -> bool:
    """Remove the colours of Flower's log unless it goes to a terminal. This filter accepts every record.

    Flower creates its handler when it is imported, which is often later than the start of a command.
    """
    for handler in logging.getLogger("flwr").handlers:
        stream = getattr(handler, "stream", None)
        if stream is not None and (stream.closed or not stream.isatty()):
            vars(handler)["colored"] = False
    return True


def script(name: str) -> str:
    """Return the path of a command in this Python environment, which need not be activated."""
    return str(Path(sysconfig.get_path("scripts")) / name)


def without_proxy() -> dict[str, str]:
    """Return environment variables that disable proxies for this machine's own addresses."""
    excluded = os.environ.get("no_proxy") or os.environ.get("NO_PROXY", "")
    return dict.fromkeys(("no_proxy", "NO_PROXY"), ",".join(filter(None, ("127.0.0.1,localhost", excluded))))


def toml(value: Scalar) -> str:
    """Return a value in TOML syntax."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return str(value).lower() if isinstance(value, bool) else repr(value)


def resume_command(run: str, *words: str) -> str:
    """Return the command line that resumes a run."""
    return shlex.join(["posy", "run", f"resume={run}", *words])


def _print_how_to_resume(outcome: str, run: Path | None) -> None:
    """Print how a run ended and, unless it is complete, the command that resumes it."""
    finished, rounds = reached(run) if run else (0, 0)
    if run is not None and (run / "fold-1").is_dir():
        print(f"posy: {outcome}; resume with: {resume_command(run.name, *guide.output_folder(run))}", file=sys.stderr)
    elif run is None or not finished:
        print(f"posy: {outcome} before the first checkpoint; results so far: {run or 'none'}", file=sys.stderr)
    elif outcome == "stopped" or finished < rounds:
        command = resume_command(run.name, *guide.output_folder(run))
        print(f"posy: {outcome} after round {finished}; resume with: {command}", file=sys.stderr)
