"""The processes that `posy superlink` starts end with it, even if it is killed."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from posy.commands.deploy.backup import locked_state
from posy.commands.launch import APP
from posy.settings import SettingsError
from posy.storage import is_locked

KEEPER = """
import sys
from pathlib import Path

from posy.commands.deploy.backup import locked_state
from posy.deploy.superlink import keep

ignoring = "import signal, subprocess, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
started = "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); "
sleeper = [sys.executable, "-c", ignoring + started + "time.sleep(600)"]
with locked_state(Path("state")) as lock:
    keep({"flower-superlink": sleeper}, {}, lock)
"""


def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def children(process: int) -> list[int]:
    text = Path(f"/proc/{process}/task/{process}/children").read_text()
    return [int(number) for number in text.split()]


def command(process: int) -> str:
    """Return the command line of a process, empty if the process has ended."""
    try:
        return Path(f"/proc/{process}/cmdline").read_text()
    except OSError:
        return ""


@pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc")
def test_killed_superlink_leaves_no_lock_on_its_state(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(APP)}
    keeper = subprocess.Popen([sys.executable, "-c", KEEPER], cwd=tmp_path, env=environment)
    try:
        until(lambda: len(children(keeper.pid)) == 2)
        [child] = [number for number in children(keeper.pid) if "reaper" not in command(number)]
        until(lambda: bool(children(child)))
        [grandchild] = children(child)
        with (
            pytest.raises(SettingsError, match=r"\(process [0-9]+, [0-9]+\); end it with `kill") as raised,
            locked_state(tmp_path / "state"),
        ):
            pass
        assert f"(process {keeper.pid}, {child})" in str(raised.value)
    finally:
        keeper.send_signal(signal.SIGKILL)
        keeper.wait()
    until(lambda: not is_locked(tmp_path / "state"), 10.0)
    until(lambda: not command(child) and not command(grandchild), 10.0)
    with locked_state(tmp_path / "state"):
        pass
