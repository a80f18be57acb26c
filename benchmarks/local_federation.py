"""Start a federation of real processes on this machine, with TLS and node authentication, for tests and benchmarks."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from posy.commands.launch import APP
from posy.deploy.addresses import free_port
from posy.settings import LaunchError

POSY = (sys.executable, "-P", "-m", "posy.commands.cli")
START_SECONDS = 600.0
"""Timeout in seconds for the start of a process, long enough for a busy machine."""
MOST_SECONDS = 1200.0
"""Timeout in seconds for a command, long enough for a dozen concurrent commands."""


class ProcessGroup:
    """Runs `posy` commands in a folder, with one log per command. The commands write only into this folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._log_starts: dict[str, int] = {}  # length of each log at the start of its process

    def environment(self) -> dict[str, str]:
        """Return the environment for processes that run this code and keep their files in the folder."""
        temporary, home = self.folder / "tmp", self.folder / "home"
        temporary.mkdir(exist_ok=True)
        changes = {"PYTHONPATH": str(APP), "OMP_NUM_THREADS": "1", "TMPDIR": str(temporary), "FLWR_HOME": str(home)}
        return {**os.environ, **changes}

    def start(self, name: str, *words: str, python_path: Path | None = None) -> "subprocess.Popen[bytes]":
        """Start a `posy` command without waiting for it to finish.

        Its log is ``name.log``. ``python_path`` precedes Posy's code on the import path.
        """
        environment = self.environment()
        if python_path is not None:
            environment["PYTHONPATH"] = os.pathsep.join((str(python_path), environment["PYTHONPATH"]))
        self._log_starts[name] = len(self.log(name))
        with (self.folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                [*POSY, *words],
                cwd=self.folder,
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.processes[name] = process
        return process

    def posy(self, *words: str) -> "subprocess.CompletedProcess[str]":
        """Run a `posy` command until it exits, or raise :class:`LaunchError` if it fails."""
        result = subprocess.run(
            [*POSY, *words], cwd=self.folder, env=self.environment(), capture_output=True, text=True, check=False,
            timeout=MOST_SECONDS,
        )  # fmt: skip
        if result.returncode:
            raise LaunchError(
                f"`posy {words[0]}` exited with status {result.returncode}: {result.stdout}{result.stderr}"
            )
        return result

    def ended(self, name: str, seconds: float = MOST_SECONDS) -> int:
        """Wait for a process to exit, and return its status; raise :class:`LaunchError` with logs on a timeout."""
        try:
            return self.processes[name].wait(seconds)
        except subprocess.TimeoutExpired:
            logs = "\n".join(f"{log}:\n{self.log(log)[-3000:]}" for log in (name, "superlink"))
            raise LaunchError(f"{name} has not exited after {seconds:g} s; {logs}") from None

    def log(self, name: str) -> str:
        """Return the log of a process."""
        path = self.folder / f"{name}.log"
        return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""

    def log_since_start(self, name: str) -> str:
        """Return the log of a process since its last start."""
        return self.log(name)[self._log_starts.get(name, 0) :]

    def until(self, true: Callable[[], Any], name: str, seconds: float = START_SECONDS) -> None:
        """Wait until ``true`` returns a true value, or raise :class:`LaunchError` with a log on a timeout."""
        end = time.monotonic() + seconds
        while not true():
            if time.monotonic() > end:
                raise LaunchError(f"{name}: not ready after {seconds:g} s; its log:\n{self.log(name)[-3000:]}")
            time.sleep(0.1)

    def forked(self, part: str) -> dict[str, int]:
        """Return the process ids of all nodes (``part`` is ``node``) or of their workers (``worker``) by node name."""
        numbers: dict[str, int] = {}
        for number in [number for process in self.processes.values() for number in children(process.pid)]:
            with contextlib.suppress(OSError):  # the process has just exited
                kind, _, name = Path(f"/proc/{number}/comm").read_text().strip().partition(" ")
                numbers |= {name: number} if kind == part else {}
        return numbers

    def stop(self) -> None:
        """Terminate all processes."""
        for process in self.processes.values():
            process.terminate()
        for process in self.processes.values():
            try:
                process.wait(20.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


class Deployment(ProcessGroup):
    """A running SuperLink, with methods that start and stop nodes and runs.

    ``folder`` contains keys, states, logs and results. The SuperLink knows the keys of the nodes ``names``, but not the
    key ``stranger``. ``options`` are options of `posy superlink`.
    """

    def __init__(self, folder: Path, names: list[str], *options: str) -> None:
        super().__init__(folder)
        self.control, self.fleet = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
        self.ca = folder / "certificates/ca.pem"
        self.where = ["--superlink", self.control, "--root-certificates", str(self.ca)]
        self.posy("certificates", "certificates", *names, "stranger", "--host", "localhost")
        words = ["--certificates", "certificates", "--control", self.control, "--fleet", self.fleet, *options]
        self.start("superlink", "superlink", *words)
        self.until(self._listens, "superlink")
        self.posy("register", *(f"certificates/{name}.pub" for name in names), *self.where)

    def _listens(self) -> bool:
        """Return whether the SuperLink accepts nodes, or raise :class:`LaunchError` if it has exited."""
        if (status := self.processes["superlink"].poll()) is not None:
            raise LaunchError(f"the SuperLink exited with status {status}; its log:\n{self.log('superlink')[-3000:]}")
        return "Starting Fleet API" in self.log("superlink")

    def node(self, name: str, *config: str, python_path: Path | None = None) -> "subprocess.Popen[bytes]":
        """Start a node. :meth:`ready` returns whether it is ready for work."""
        words = ["--superlink", self.fleet, "--root-certificates", str(self.ca), "--key", f"certificates/{name}.key"]
        return self.start(name, "supernode", *words, *config, python_path=python_path)

    def nodes(self, name: str, nodes: list[str], *words: str, fleet: str = "") -> "subprocess.Popen[bytes]":
        """Start several nodes with one command, called ``name``.

        ``words`` are options of the command and the nodes' config. The nodes connect to ``fleet``, by default to the
        SuperLink.
        """
        where = ["--superlink", fleet or self.fleet, "--root-certificates", str(self.ca)]
        keys = [word for node in nodes for word in ("--key", f"certificates/{node}.key")]
        return self.start(name, "supernode", *where, *keys, *words)

    def ready(self, name: str, count: int = 1) -> bool:
        """Return whether ``count`` nodes have connected and have warm workers since the last start of a command."""
        log = self.log_since_start(name)
        return log.count("SuperNode ID") >= count and log.count("is ready") >= count

    def submit(self, name: str, *settings: str) -> "subprocess.Popen[bytes]":
        """Submit a run without waiting for it to finish.

        :meth:`results` returns its directory, for ``name`` or for the name of the resumed run.
        """
        resumed = any(setting.startswith("resume=") for setting in settings)
        words = ["--verbose", "output-dir=runs", *([] if resumed else [f"run-name={name}"]), *settings]
        return self.start(f"run-{name}", "run", *self.where, *words)

    def run(self, name: str, *settings: str, timeout: float = MOST_SECONDS) -> dict[str, Any]:
        """Run an experiment and return its summary, or raise :class:`LaunchError` if it fails."""
        self.submit(name, *settings)
        if status := self.ended(f"run-{name}", timeout):
            raise LaunchError(f"the run exited with status {status}: {self.log(f'run-{name}')}")
        return self.summary(name)

    def results(self, name: str) -> Path:
        """Return the directory of a run."""
        return self.folder / "runs" / name

    def summary(self, name: str) -> dict[str, Any]:
        """Return the summary of a run."""
        summary: dict[str, Any] = json.loads((self.results(name) / "summary.json").read_text(encoding="utf-8"))
        return summary

    def rounds(self, name: str) -> list[dict[str, Any]]:
        """Return the finished rounds of a run."""
        path = self.results(name) / "rounds.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def kill(self, name: str) -> None:
        """Kill a node with SIGKILL. Its child processes exit by themselves."""
        os.kill(self.forked("node")[name], signal.SIGKILL)
        self.processes[name].wait()

    def worker(self, node: str) -> int:
        """Return the process id of a node's worker."""
        return self.forked("worker")[node]

    def superlink(self) -> int:
        """Return the process id of the SuperLink, a child process of `posy superlink`."""
        return child(self.processes["superlink"].pid, "posy.deploy.link", "flower-superlink")

    def server(self) -> int:
        """Return the process id of the only ServerApp; raise :class:`LookupError` if there is not exactly one."""
        return child(child(self.processes["superlink"].pid, "posy.deploy.superexec"), "flwr-serverapp")


def child(process: int, *words: str) -> int:
    """Return the only child process with one of the words in its command; raise :class:`LookupError` otherwise."""
    matching = [number for number, command in children(process).items() if any(word in command for word in words)]
    if len(matching) != 1:
        raise LookupError(f"{len(matching)} processes {' or '.join(words)}")
    return matching[0]


def children(process: int) -> dict[int, str]:
    """Return the command lines of the child processes of a process, by process id."""
    commands = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(path.read_text().rpartition(")")[2].split()[1])
            command = (path.parent / "cmdline").read_text().replace("\0", " ")
        except (OSError, IndexError):  # the process has just exited
            continue
        if parent == process:
            commands[int(path.parent.name)] = command
    return commands
