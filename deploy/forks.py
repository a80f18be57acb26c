"""Nodes and workers that are forked from a parent process, which has loaded Flower and PyTorch for all of them.

All nodes on a machine share the memory of the loaded modules, and a new worker needs no time to load them. The parent
has only one thread, no gRPC channel and no CUDA context, because further threads, channels and contexts do not survive
a fork. All nodes and workers are its children. A node requests its worker over a socket, and terminates when this
socket closes. A worker terminates when its node does.
"""

import contextlib
import gc
import json
import math
import os
import queue
import selectors
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from logging import INFO, WARNING
from pathlib import Path
from typing import NoReturn

from flwr.common.logger import log

STOP_SECONDS = 10.0
"""Seconds within which nodes must terminate before the parent kills them."""
READ = 1 << 16
SIGNALS = (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM)


class Parent(threading.Thread):
    """A node's connection to its parent, which forks and kills the node's workers.

    A node has only one worker at a time. The node terminates when the parent does.
    """

    def __init__(self, connection: socket.socket) -> None:
        super().__init__(name="posy-parent", daemon=True)
        self._connection = connection
        self.ended: queue.Queue[int] = queue.Queue()
        """The exit codes of workers that have exited."""

    def run(self) -> None:
        """Listen to the parent until it terminates."""
        with contextlib.suppress(OSError), self._connection.makefile("r") as lines:
            for line in lines:
                self.ended.put(int(line))
        os.kill(os.getpid(), signal.SIGTERM)

    def fork_worker(self, connection: socket.socket, home: Path) -> None:
        """Request a worker that serves this node over a connection and uses ``home`` as its Flower home."""
        order = json.dumps({"home": str(home)}).encode()
        socket.send_fds(self._connection, [order], [connection.fileno()])

    def kill_worker(self) -> None:
        """Kill the worker, if there is one."""
        self._connection.sendall(b"kill")


@dataclass
class Node:
    """A node's process and worker, as managed by the parent."""

    name: str
    arguments: Sequence[str]
    process: int = 0
    worker: int = 0
    connection: socket.socket | None = None
    output: tuple[int, int] | None = None
    """Both ends of the pipe that the node and its worker write to, or None if they write to the parent's output."""
    unfinished: bytes = b""
    """The incomplete last line of the output."""
    code: int = 0
    ended_at: float = math.inf
    """Monotonic time at which the node exited."""


@dataclass
class Family:
    """One parent's nodes, with their processes and sockets."""

    nodes: Sequence[Node]
    serve_node: Callable[[Sequence[str], Parent], None]
    serve_worker: Callable[[socket.socket], None]
    selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)
    stopped: float = 0.0
    """Monotonic time at which the nodes were first asked to stop; 0 if they have not been asked."""

    def keep(self) -> int:
        """Fork the nodes, serve them until all have exited, and return the exit status."""
        self._wakeup, wakeup = socket.socketpair()
        for end in (self._wakeup, wakeup):
            end.setblocking(False)
        signal.set_wakeup_fd(wakeup.fileno())
        for number in SIGNALS:
            signal.signal(number, lambda *_: None)  # the signals are read from the socket
        self.selector.register(self._wakeup, selectors.EVENT_READ)
        gc.collect()
        gc.freeze()  # otherwise garbage collection would copy all loaded modules into every child
        for node in self.nodes:
            self._fork_node(node)
        while any(node.process or node.worker for node in self.nodes):
            ending = self.stopped or any(not node.process for node in self.nodes)
            for key, _ in self.selector.select(1.0 if ending else None):
                if key.data is None:
                    self._heed(self._wakeup.recv(READ))
                elif isinstance(key.fileobj, socket.socket):
                    self._obey(key.data)
                else:
                    self._show(key.data)
            for node in self.nodes:
                if self.stopped and node.process and time.monotonic() - self.stopped > STOP_SECONDS:
                    os.kill(node.process, signal.SIGKILL)
                if node.worker and time.monotonic() - node.ended_at > STOP_SECONDS:  # the worker hangs
                    os.kill(node.worker, signal.SIGKILL)
        codes = [node.code for node in self.nodes]
        return next((code if code > 0 else 128 - code for code in codes if code), 0)

    def _fork_node(self, node: Node) -> None:
        node.connection, node_end = socket.socketpair()
        if len(self.nodes) > 1:
            node.output = os.pipe()
            os.set_blocking(node.output[0], False)
            self.selector.register(node.output[0], selectors.EVENT_READ, node)

        def serve() -> None:
            os.setsid()  # Ctrl-C reaches the node only through its parent
            self.serve_node(node.arguments, Parent(node_end))

        node.process = self._fork(node, f"node {node.name}", serve)
        node_end.close()
        self.selector.register(node.connection, selectors.EVENT_READ, node)
        if len(self.nodes) > 1:
            log(INFO, "node %s is process %s", node.name, node.process)

    def _obey(self, node: Node) -> None:
        """Fork or kill a node's worker, as the node requests."""
        assert node.connection is not None
        try:
            order, files, _, _ = socket.recv_fds(node.connection, READ, 1)
        except ConnectionError:
            order, files = b"", []
        if not order:  # the node has exited
            self.selector.unregister(node.connection)
            node.connection.close()
            node.connection = None
        elif order.startswith(b"kill"):
            if node.worker:
                os.kill(node.worker, signal.SIGKILL)
        else:
            fields = json.loads(order)
            with socket.socket(fileno=files[0]) as connection:

                def serve() -> None:
                    os.environ["FLWR_HOME"] = fields["home"]
                    self.serve_worker(connection)

                node.worker = self._fork(node, f"worker {node.name}", serve)

    def _fork(self, node: Node, title: str, serve: Callable[[], None]) -> int:
        """Fork a process that runs ``serve``, and return its process id."""
        sys.stdout.flush()
        sys.stderr.flush()
        process = os.fork()
        if process:
            return process
        try:
            self._leave(node, title)
            serve()
            leave(0)
        except SystemExit as ended:
            leave(ended.code if isinstance(ended.code, int) else int(bool(ended.code)))
        except BaseException:  # no error may return to the parent's loop
            traceback.print_exc()
            leave(1)

    def _leave(self, node: Node, title: str) -> None:
        """Release the parent's resources in a child."""
        signal.set_wakeup_fd(-1)
        for number in SIGNALS:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        if node.output:
            for standard in (1, 2):
                os.dup2(node.output[1], standard)
        self.selector.close()
        self._wakeup.close()
        for other in self.nodes:
            if other.connection is not None:
                other.connection.close()
            for end in other.output or ():
                os.close(end)
        with contextlib.suppress(OSError):  # on Linux, set the name that `ps` and `top` show
            Path("/proc/self/comm").write_text(title[:15])

    def _heed(self, signals: bytes) -> None:
        """Handle the signals that have arrived."""
        if signal.SIGCHLD in signals:
            with contextlib.suppress(ChildProcessError):
                while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                    self._note_end(ended[0], os.waitstatus_to_exitcode(ended[1]))
        if signal.SIGINT in signals or signal.SIGTERM in signals:
            self._signal(signal.SIGKILL if self.stopped else signal.SIGTERM)
            self.stopped = self.stopped or time.monotonic()

    def _note_end(self, process: int, code: int) -> None:
        for node in self.nodes:
            if node.worker == process:
                node.worker = 0
                if node.connection is not None:
                    with contextlib.suppress(OSError):  # the node has exited
                        node.connection.sendall(f"{code}\n".encode())
            elif node.process == process:
                node.process, node.code, node.ended_at = 0, code, time.monotonic()
                if len(self.nodes) > 1:
                    self._show(node)
                    remaining = sum(bool(other.process) for other in self.nodes)
                    how = f"was killed by signal {-code}" if code < 0 else f"exited with status {code}"
                    log(WARNING, "node %s %s; %s of %s are still running", node.name, how, remaining, len(self.nodes))

    def _signal(self, number: int) -> None:
        for node in self.nodes:
            if node.process:
                os.kill(node.process, number)

    def _show(self, node: Node) -> None:
        """Print a node's output, with the node's name before each line."""
        assert node.output is not None
        with contextlib.suppress(BlockingIOError):
            while data := os.read(node.output[0], READ):
                *lines, node.unfinished = (node.unfinished + data).split(b"\n")
                name = node.name.encode()
                sys.stderr.buffer.write(b"".join(name + b" | " + line + b"\n" for line in lines))
        sys.stderr.flush()


def leave(code: int) -> NoReturn:
    """Exit at once, without cleaning up the loaded modules: cleanup is slow and sometimes hangs."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
