"""The SuperLink and the process that runs ServerApps, kept separate so that a run survives a SuperLink crash.

``flower-superlink --isolation process`` stores its state in a database, and ``flower-superexec`` starts the ServerApp
in another process. If the SuperLink dies, Posy restarts it with its state. The ServerApp and the nodes retry until the
SuperLink answers, and the run continues.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from logging import WARNING
from pathlib import Path

from flwr.common.logger import log

from posy.flower import add_times_to_log
from posy.settings import LaunchError

LOOK_SECONDS = 0.2
"""Seconds between checks that the processes are alive."""
HEALTHY_SECONDS = 30.0
"""Seconds after which a start counts as successful."""
MAX_STARTS = 5
"""Number of consecutive failed starts after which Posy gives up."""
STOP_SECONDS = 10.0
"""Seconds within which a process must terminate before Posy kills it."""


@dataclass
class _Kept:
    """A process that Posy restarts when it dies."""

    name: str
    command: Sequence[str]
    environment: Mapping[str, str]
    lock: int
    reaper: "_Reaper"
    starts: int = 0

    def __post_init__(self) -> None:
        self.start()

    def start(self) -> None:
        self.started = time.monotonic()
        self.starts += 1
        # Use a separate session, so that Ctrl-C reaches only this process, which stops the others in the right order.
        self.process = subprocess.Popen(
            self.command, env=dict(self.environment), start_new_session=True, pass_fds=[self.lock]
        )
        self.reaper.add(self.process.pid)

    def restart_if_dead(self) -> None:
        """Restart the process if it has died, or raise :class:`LaunchError` if it has died too often."""
        if self.process.poll() is None:
            return
        self.reaper.remove(self.process.pid)
        if time.monotonic() - self.started > HEALTHY_SECONDS:
            self.starts = 0
        if self.starts >= MAX_STARTS or (self.starts == 1 and self.process.returncode > 0):  # e.g. the port is taken
            raise LaunchError(f"{self.name} exited with status {self.process.returncode}; see its messages above")
        status = self.process.returncode
        log(WARNING, "%s died (exit status %s); Posy restarts it", self.name, status)
        time.sleep(LOOK_SECONDS * 2 ** (self.starts - 1))
        self.start()

    def stop(self) -> None:
        """Stop the process and its children; otherwise a ServerApp among them would retry forever."""
        with contextlib.suppress(ProcessLookupError):  # the group has exited
            os.killpg(self.process.pid, signal.SIGTERM)
            end = time.monotonic() + STOP_SECONDS
            while time.monotonic() < end:
                self.process.poll()
                os.killpg(self.process.pid, 0)
                time.sleep(LOOK_SECONDS / 4)
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.reaper.remove(self.process.pid)


class _Reaper:
    """A process that kills Posy's processes and their children if the process that runs :func:`keep` is killed.

    Otherwise, the processes would keep the state locked, and a ServerApp would retry forever.
    """

    def __init__(self) -> None:
        program = [sys.executable, "-I", str(Path(__file__).with_name("reaper.py"))]
        self._process = subprocess.Popen(program, stdin=subprocess.PIPE, start_new_session=True, text=True)

    def add(self, group: int) -> None:
        """Have the reaper kill a process group when this process has exited."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # the reaper was killed
            print(group, file=self._process.stdin, flush=True)

    def remove(self, group: int) -> None:
        """Forget a group that has exited, because its id may be reused."""
        self.add(-group)

    def close(self) -> None:
        """Close the reaper's input, and wait for the reaper to exit."""
        self._process.communicate()


def keep(
    commands: Mapping[str, Sequence[str]],
    environment: Mapping[str, str],
    lock: int,
    certificate: Path | None = None,
) -> None:
    """Start named processes in the given order, and restart processes that die, until this process is interrupted.

    The processes inherit the descriptor ``lock``. The first process reads the ``certificate`` when it starts, and Posy
    restarts it when the file changes. Raise :class:`LaunchError` if a process fails at once or dies repeatedly.
    """
    add_times_to_log()
    processes: list[_Kept] = []
    reaper = _Reaper()
    try:
        version = _version(certificate)
        for name, command in commands.items():
            processes.append(_Kept(name, command, environment, lock, reaper))
        while True:
            if (current := _version(certificate)) != version:
                version = current
                log(WARNING, "%s has changed; Posy restarts the SuperLink", certificate)
                processes[0].stop()
                processes[0].start()
            for process in processes:
                process.restart_if_dead()
            time.sleep(LOOK_SECONDS)
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        for process in reversed(processes):
            process.stop()
        reaper.close()


def _version(file: Path | None) -> tuple[int, int] | None:
    """Return an identifier that changes when a file changes, or None for a missing file."""
    if file is None:
        return None
    try:
        status = file.stat()
    except FileNotFoundError:
        return None
    return status.st_ino, status.st_mtime_ns
