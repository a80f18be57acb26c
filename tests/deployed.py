"""A federation of real processes for tests: `posy superlink`, `posy supernode`, `posy run --superlink`."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from posy.launch import free_port

ROOT = Path(__file__).resolve().parent.parent
START_SECONDS = 60.0
# Small, and the same in every process, whatever the defaults are.
DIGITS = ("dataset=digits", "model=mlp", "local-epochs=1", "device=cpu", "stack=loop", "max-samples=600")


class Deployment:
    """A SuperLink with TLS and node authentication, and nodes that may be killed.

    Parameters
    ----------
    folder : Path
        Where keys, states, logs and results lie.
    names : sequence of str
        Names of the nodes whose keys are registered.
    """

    def __init__(self, folder: Path, names: list[str]) -> None:
        self.folder = folder
        self.control, self.fleet = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
        self.ca = folder / "certificates/ca.pem"
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.posy("certificates", "certificates", *names, "stranger")
        words = ["--certificates", "certificates", "--control", self.control, "--fleet", self.fleet]
        self.start("superlink", "superlink", *words)
        self.until(lambda: "Starting Fleet API" in self.log("superlink"), "the SuperLink")
        public = [str(folder / f"certificates/{name}.pub") for name in names]
        self.posy("register", *public, "--superlink", self.control, "--root-certificates", str(self.ca))

    def environment(self) -> dict[str, str]:
        """Return what processes need to run this code, apart from other tests."""
        temporary = self.folder / "tmp"
        temporary.mkdir(exist_ok=True)
        return {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "TMPDIR": str(temporary),
            "FLWR_HOME": str(self.folder / "home"),
        }

    def start(self, name: str, *words: str) -> "subprocess.Popen[bytes]":
        """Start a `posy` command that goes on; its log bears the name."""
        with (self.folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "posy.cli", *words],
                cwd=self.folder,
                env=self.environment(),
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.processes[name] = process
        return process

    def posy(self, *words: str, timeout: float = 240.0) -> "subprocess.CompletedProcess[str]":
        """Carry out a `posy` command that ends; it must end well."""
        done = subprocess.run(
            [sys.executable, "-P", "-m", "posy.cli", *words],
            cwd=self.folder,
            env=self.environment(),
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done

    def node(self, name: str, *config: str, key: str | None = None, wait: bool = True) -> "subprocess.Popen[bytes]":
        """Start a node; wait until it is ready to work."""
        seen = self.log(name).count("is ready")
        words = ["--superlink", self.fleet, "--root-certificates", str(self.ca)]
        process = self.start(name, "supernode", *words, "--key", f"certificates/{key or name}.key", *config)
        if wait:
            self.until(lambda: self.log(name).count("is ready") > seen and "SuperNode ID" in self.log(name), name)
        return process

    def submit(self, name: str, *settings: str) -> "subprocess.Popen[bytes]":
        """Submit a run and go on; its results lie in :meth:`results` of the name."""
        words = ["--superlink", self.control, "--root-certificates", str(self.ca), "--verbose"]
        return self.start(f"run-{name}", "run", *words, *DIGITS, "output-dir=runs", f"run-name={name}", *settings)

    def run(self, name: str, *settings: str, timeout: float = 240.0) -> dict[str, Any]:
        """Carry out a run and return its summary."""
        status = self.submit(name, *settings).wait(timeout)
        assert status == 0, self.log(f"run-{name}") + self.log("superlink")[-3000:]
        return self.summary(name)

    def results(self, name: str) -> Path:
        """Return the directory of a run."""
        return self.folder / "runs" / name

    def summary(self, name: str) -> dict[str, Any]:
        """Return the summary of a run."""
        found: dict[str, Any] = json.loads((self.results(name) / "summary.json").read_text(encoding="utf-8"))
        return found

    def rounds(self, name: str) -> list[dict[str, Any]]:
        """Return the finished rounds of a run."""
        path = self.results(name) / "rounds.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def log(self, name: str) -> str:
        """Return what a process has said."""
        path = self.folder / f"{name}.log"
        return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""

    def until(self, true: Callable[[], Any], what: str, seconds: float = START_SECONDS) -> None:
        """Wait until something is true."""
        end = time.monotonic() + seconds
        while not true():
            assert time.monotonic() < end, f"{what}: not after {seconds:g} s; log:\n{self.log(what)[-3000:]}"
            time.sleep(0.1)

    def kill(self, name: str) -> None:
        """Kill a process with -9; what it started must end by itself."""
        os.kill(self.processes[name].pid, signal.SIGKILL)
        self.processes[name].wait()

    def stop(self) -> None:
        """End all processes."""
        for process in self.processes.values():
            process.terminate()
        for process in self.processes.values():
            try:
                process.wait(20.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def children(process: int) -> dict[int, str]:
    """Return the command lines of the processes that a process has started, by number."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(path.read_text().rpartition(")")[2].split()[1])
            command = (path.parent / "cmdline").read_text().replace("\0", " ")
        except (OSError, IndexError):  # it has ended meanwhile
            continue
        if parent == process:
            found[int(path.parent.name)] = command
    return found
