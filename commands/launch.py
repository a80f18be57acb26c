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

from posy.server_app.resume import reached
from posy.settings import RunError, Scalar
from posy.strategies.registry import read_settings
from posy.strategies.run_settings import RunSettings

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
    if not settings.get("resume"):  # check before importing PyTorch; a resumed run uses stored settings
        read_settings(settings, where)
    try:
        record_in_process(settings, where, run_folders.append)
    except (KeyboardInterrupt, Exception) as error:
        if isinstance(error, RunError):
            print(f"posy: {error}", file=sys.stderr)
        stopped = isinstance(error, KeyboardInterrupt)
        if stopped or run_folders:
            _print_how_to_resume("stopped" if stopped else "failed", run_folders[0] if run_folders else None)
        if isinstance(error, RunError):
            return 1
        raise
    return 0


def record_in_process(
    settings: Mapping[str, Any], where: str, begun: Callable[[Path], object] = lambda path: None
) -> "Recorder | CrossValidation | Delivery":
    """Execute a run in this process and return its record; call ``begun`` with the run's directory once it exists."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    from posy.server_app.app import run  # noqa: PLC0415 - imports PyTorch

    logger = logging.getLogger("flwr")
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        return run(None, settings, where, begun)
    finally:
        logger.setLevel(level)


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
        print(f"posy: {outcome}; resume with: {resume_command(run.name, *_output_folder(run))}", file=sys.stderr)
    elif run is None or not finished:
        print(f"posy: {outcome} before the first checkpoint; results so far: {run or 'none'}", file=sys.stderr)
    elif outcome == "stopped" or finished < rounds:
        command = resume_command(run.name, *_output_folder(run))
        print(f"posy: {outcome} after round {finished}; resume with: {command}", file=sys.stderr)


def _output_folder(run: Path) -> list[str]:
    """Return the setting for the folder that contains a run, or an empty list for the default folder."""
    return [] if run.parent == Path(RunSettings.output_dir).absolute() else [f"output-dir={run.parent}"]
