"""The SuperLink and the process that runs ServerApps, kept apart so that a run outlives a SuperLink.

``flower-superlink --isolation process`` keeps its state in a database; ``flower-superexec`` starts the
ServerApp beside it. If the SuperLink dies it is started again with its state, the ServerApp goes on asking
until it answers, and so do the nodes: the run goes on.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from posy.commands.launch import LaunchError

LOOK_SECONDS = 0.2
HEALTHY_SECONDS = 30.0
MAX_STARTS = 5
"""So many times in a row a process is started again that lives for less than HEALTHY_SECONDS."""
STOP_SECONDS = 10.0


@dataclass
class _Kept:
    """A process that is started again when it dies."""

    command: Sequence[str]
    environment: Mapping[str, str]
    process: "subprocess.Popen[bytes] | None" = None
    started: float = 0.0
    starts: int = 0

    @property
    def name(self) -> str:
        return os.path.basename(self.command[0])  # noqa: PTH119 - a name, not a path

    def start(self) -> None:
        self.started = time.monotonic()
        self.starts += 1
        # In a session of its own, so that a Ctrl-C reaches it only through this process, in the right order.
        self.process = subprocess.Popen(self.command, env=dict(self.environment), start_new_session=True)

    def look(self) -> None:
        """Start the process again if it has died.

        Raises
        ------
        LaunchError
            If it died too often.
        """
        if self.process is None or self.process.poll() is None:
            return
        if time.monotonic() - self.started > HEALTHY_SECONDS:
            self.starts = 0
        if self.starts >= MAX_STARTS or (self.starts == 1 and self.process.returncode > 0):  # e.g. the port is taken
            raise LaunchError(f"{self.name} ended with status {self.process.returncode}; its messages stand above")
        print(f"posy: {self.name} died ({self.process.returncode}) and is started again", file=sys.stderr, flush=True)
        time.sleep(LOOK_SECONDS * 2 ** (self.starts - 1))
        self.start()

    def stop(self) -> None:
        """End the process and all that it has started, a ServerApp among them, which would go on asking for ever."""
        if self.process is None:
            return
        with contextlib.suppress(ProcessLookupError):  # the group is no more
            os.killpg(self.process.pid, signal.SIGTERM)
            end = time.monotonic() + STOP_SECONDS
            while time.monotonic() < end:
                self.process.poll()
                os.killpg(self.process.pid, 0)
                time.sleep(LOOK_SECONDS / 4)
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def keep(commands: Sequence[Sequence[str]], environment: Mapping[str, str]) -> None:
    """Run processes until this one is interrupted, and start again those that die.

    Parameters
    ----------
    commands : sequence of sequence of str
        What to run, in this order; it is ended in the reverse order.
    environment : Mapping
        Their environment.

    Raises
    ------
    LaunchError
        If a process ends with an error at once, or dies again and again.
    """
    kept = [_Kept(command, environment) for command in commands]
    try:
        for one in kept:
            one.start()
        while True:
            for one in kept:
                one.look()
            time.sleep(LOOK_SECONDS)
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        for one in reversed(kept):
            one.stop()
