"""The SuperLink and the process that runs ServerApps, kept apart so that a run outlives a SuperLink.

``flower-superlink --isolation process`` keeps its state in a database; ``flower-superexec`` starts the ServerApp
beside it. A SuperLink that dies is started again with its state. The ServerApp and the nodes ask again until it
answers, and the run goes on.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from posy.settings import LaunchError

LOOK_SECONDS = 0.2
"""Seconds between two looks at whether the processes are alive."""
HEALTHY_SECONDS = 30.0
"""Seconds after which a process counts as well started."""
MAX_STARTS = 5
"""Number of starts in a row after which a process that never gets that far is given up."""
PR_SET_PDEATHSIG = 1
"""Linux's prctl operation: the signal that a process gets when its parent dies."""
STOP_SECONDS = 10.0
"""Seconds that a process has to end by itself."""


@dataclass
class _Kept:
    """A process that is started again when it dies."""

    name: str
    command: Sequence[str]
    environment: Mapping[str, str]
    lock: int
    starts: int = 0

    def __post_init__(self) -> None:
        self.start()

    def start(self) -> None:
        self.started = time.monotonic()
        self.starts += 1
        # In a session of its own, so that a Ctrl-C reaches it only through this process, in the right order.
        self.process = subprocess.Popen(
            self.command,
            env=dict(self.environment),
            start_new_session=True,
            pass_fds=[self.lock],
            preexec_fn=end_with_parent(os.getpid()),  # noqa: PLW1509 - this process has one thread
        )

    def restart_if_dead(self) -> None:
        """Start the process again if it has died; raise :class:`LaunchError` if it died too often."""
        if self.process.poll() is None:
            return
        if time.monotonic() - self.started > HEALTHY_SECONDS:
            self.starts = 0
        if self.starts >= MAX_STARTS or (self.starts == 1 and self.process.returncode > 0):  # e.g. the port is taken
            raise LaunchError(f"{self.name} ended with status {self.process.returncode}; see its messages above")
        print(f"posy: {self.name} died ({self.process.returncode}) and is started again", file=sys.stderr, flush=True)
        time.sleep(LOOK_SECONDS * 2 ** (self.starts - 1))
        self.start()

    def stop(self) -> None:
        """End the process and all that it has started; a ServerApp among them would ask for ever."""
        with contextlib.suppress(ProcessLookupError):  # the group is no more
            os.killpg(self.process.pid, signal.SIGTERM)
            end = time.monotonic() + STOP_SECONDS
            while time.monotonic() < end:
                self.process.poll()
                os.killpg(self.process.pid, 0)
                time.sleep(LOOK_SECONDS / 4)
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def keep(
    commands: Mapping[str, Sequence[str]],
    environment: Mapping[str, str],
    lock: int,
    certificate: Path | None = None,
) -> None:
    """Run processes, each under a name, in this order, until this one is interrupted, and start again those that die.

    They inherit the descriptor ``lock``. The first one reads the ``certificate`` when it starts: it is started again
    when that has changed. One that ends with an error at once, or dies again and again, raises :class:`LaunchError`.
    """
    kept: list[_Kept] = []
    try:
        known = _version(certificate)
        for name, command in commands.items():
            kept.append(_Kept(name, command, environment, lock))
        while True:
            if (now := _version(certificate)) != known:
                known = now
                print(
                    f"posy: {certificate} has changed: the SuperLink starts again with it", file=sys.stderr, flush=True
                )
                kept[0].stop()
                kept[0].start()
            for one in kept:
                one.restart_if_dead()
            time.sleep(LOOK_SECONDS)
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        for one in reversed(kept):
            one.stop()


def end_with_parent(parent: int) -> Callable[[], None] | None:
    """Return what a child calls before its program, so that the kernel kills it when its parent dies.

    A parent that is killed cannot end its children, which would keep the state locked. Only Linux can do it; elsewhere
    the result is None.
    """
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None).prctl

    def call() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before this call
            os._exit(1)

    return call


def _version(file: Path | None) -> tuple[int, int] | None:
    """Return what tells a file from the one before it of that name; None without one."""
    if file is None:
        return None
    try:
        found = file.stat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_mtime_ns
