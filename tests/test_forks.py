"""Nodes and workers as forks of one process, with a short program in place of Flower."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")

PROGRAM = """
import os, signal, socket, sys, time
from pathlib import Path
from posy.deploy.forks import Family, Node, leave

def serve_node(arguments, parent):
    parent.start()
    name, = arguments
    while True:
        ours, theirs = socket.socketpair()
        parent.fork_worker(theirs, Path(name))
        theirs.close()
        print("worker", ours.makefile().readline().strip(), os.environ.get("FLWR_HOME", "-"), flush=True)
        if Path(f"{name}-end").exists():
            parent.kill_worker()
            sys.exit(7)
        print("ended", parent.ended.get(), flush=True)

def serve_worker(connection):
    home = os.environ["FLWR_HOME"]
    connection.sendall(f"{home} {os.getpid()} {home}\\n".encode())
    connection.recv(1)  # until the node ends

leave(Family([Node(name, [name]) for name in sys.argv[1:]], serve_node, serve_worker).keep())
"""


@contextmanager
def family(folder: Path, *names: str) -> Iterator["subprocess.Popen[bytes]"]:
    with (folder / "log").open("wb") as log:
        command = [sys.executable, "-P", "-c", PROGRAM, *names]
        process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log, start_new_session=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def wait_for(condition: Callable[[], object], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def lines(folder: Path, word: str) -> list[list[str]]:
    return [line.split() for line in (folder / "log").read_text().splitlines() if word in line.split()]


def processes(folder: Path) -> set[int]:
    nodes = {int(words[-1]) for words in lines(folder, "process")}
    return nodes | {int(words[4]) for words in lines(folder, "worker")}


def all_ended(numbers: set[int]) -> bool:
    return not any(Path(f"/proc/{number}/cmdline").exists() for number in numbers)


def test_dead_worker_is_reported_only_to_its_node_and_replaced(tmp_path: Path) -> None:
    with family(tmp_path, "a", "b") as process:
        wait_for(lambda: len(lines(tmp_path, "worker")) == 2)
        # Each line has the node's name, each worker its own home, and the node's environment is unchanged.
        assert {(w[0], w[3], w[5], w[6]) for w in lines(tmp_path, "worker")} == {
            (name, name, name, os.environ.get("FLWR_HOME", "-")) for name in "ab"
        }
        os.kill(next(int(w[4]) for w in lines(tmp_path, "worker") if w[0] == "a"), signal.SIGKILL)
        wait_for(lambda: len(lines(tmp_path, "worker")) == 3)
        assert lines(tmp_path, "ended") == [["a", "|", "ended", str(-signal.SIGKILL)]]
        assert process.poll() is None


def test_parent_reports_an_ended_node_and_keeps_the_others_running(tmp_path: Path) -> None:
    with family(tmp_path, "a", "b", "c") as process:
        wait_for(lambda: len(lines(tmp_path, "worker")) == 3)
        nodes = {words[-4]: int(words[-1]) for words in lines(tmp_path, "process")}
        workers = {words[0]: int(words[4]) for words in lines(tmp_path, "worker")}
        os.kill(nodes["a"], signal.SIGKILL)
        wait_for(lambda: "2 of 3 are still running" in (tmp_path / "log").read_text())
        (tmp_path / "b-end").touch()
        os.kill(workers["b"], signal.SIGKILL)
        wait_for(lambda: "1 of 3 are still running" in (tmp_path / "log").read_text())
        assert "node a was killed by signal 9; 2 of 3" in (tmp_path / "log").read_text()
        assert "node b exited with status 7; 1 of 3" in (tmp_path / "log").read_text()
        wait_for(lambda: all_ended({workers["a"], *(int(w[4]) for w in lines(tmp_path, "worker") if w[0] == "b")}))
        assert not all_ended({nodes["c"]})
        assert process.poll() is None
        process.terminate()
        assert process.wait(20.0) == 128 + signal.SIGKILL  # the first status that is an error


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nodes_and_workers_end_with_the_parent(number: signal.Signals, tmp_path: Path) -> None:
    with family(tmp_path, "a", "b") as process:
        wait_for(lambda: len(lines(tmp_path, "worker")) == 2)
        pids = processes(tmp_path)
        assert len(pids) == 4
        process.send_signal(number)
        process.wait(20.0)
        wait_for(lambda: all_ended(pids))


def test_single_node_logs_without_prefix_and_returns_its_status(tmp_path: Path) -> None:
    (tmp_path / "a-end").touch()
    with family(tmp_path, "a") as process:
        assert process.wait(20.0) == 7
        assert [words[:2] for words in lines(tmp_path, "worker")] == [["worker", "a"]]
        assert "is process" not in (tmp_path / "log").read_text()


@pytest.mark.slow
def test_preload_starts_neither_threads_nor_cuda() -> None:
    program = """
import threading, torch
import posy.deploy.node
from posy.deploy.worker import preload
preload(2)
assert threading.enumerate() == [threading.main_thread()]
assert not torch.cuda.is_initialized()
from posy.deploy.forks import leave
leave(5)
"""
    assert subprocess.run([sys.executable, "-P", "-c", program], check=False).returncode == 5
