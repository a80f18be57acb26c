"""A warm SuperNode: ``python -m posy.commands.deploy.node`` takes the arguments of ``flower-supernode``.

This process is Flower's own node. One of its threads, the :class:`Executor`, takes the node's tasks and hands them
to one worker process that keeps PyTorch, code and data loaded. If the worker dies, its task is answered with an error
at once, and a new worker is started; a worker still busy when a reply would be too late is killed. The worker ends
when the node ends.
"""

import argparse
import base64
import contextlib
import json
import logging
import math
import os
import queue
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from logging import ERROR, INFO, WARNING
from pathlib import Path
from typing import Any

import httpx
from flwr.app import Message
from flwr.common.logger import log

from posy.commands.deploy.internals import (
    Task,
    acquire_task,
    context_for,
    error_reply,
    from_envelope,
    require_version,
    run_node,
    runtime_client,
)
from posy.commands.launch import free_port
from posy.server_app.grids import pause

IDLE_SECONDS = 1.0
"""Shortest sleep by which Flower's node waits for its next message; by shorter ones it waits for a reply."""
BEAT_SECONDS = 15.0
"""Seconds between two signs of life of a task."""
LOOK_SECONDS = 5.0
"""Seconds between two looks at whether an idle worker is alive, or the SuperLink within reach."""
WORKER_START_SECONDS = 300.0
"""Seconds that a worker may take to load PyTorch."""
MAX_FAILED_STARTS = 3
"""Number of workers in a row that may fail to start."""


class Waits:
    """The pauses of the node's main loop: short while there is work, and ended by it."""

    def __init__(self) -> None:
        self.work = threading.Event()
        """Set when the node pauses: the messages it has are complete, and tasks can be taken."""
        self.replied = threading.Event()
        """Set when the worker has handed in its reply."""
        self._busy = time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Wait in place of the node's ``time.sleep``: before it asks for a message, or until the reply is there."""
        self.work.set()  # also where it waits for no reply: one to an older message may have ended its wait
        if seconds >= IDLE_SECONDS:
            time.sleep(pause(time.monotonic() - self._busy))
            return
        self._busy = time.monotonic()
        if self.replied.wait(seconds):
            time.sleep(0.005)  # in case the reply is for another message


@dataclass
class Worker:
    """A running worker process."""

    process: "subprocess.Popen[bytes]"
    connection: socket.socket
    home: Path
    events: "queue.Queue[dict[str, Any] | None]"
    """What it has reported; None: its end of the connection is closed."""

    @classmethod
    def start(cls, address: str) -> "Worker":
        """Start a worker for the node at ``address``."""
        home = Path(tempfile.mkdtemp(prefix="posy-worker-"))
        ours, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "posy.commands.deploy.worker", address, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                # A home of its own: nodes would install over each other in a shared one.
                env={**os.environ, "FLWR_HOME": str(home)},
            )
        worker = cls(process, ours, home, queue.Queue())
        threading.Thread(target=worker._listen, daemon=True).start()
        return worker

    def hand(self, token: str) -> None:
        """Hand over a task."""
        with contextlib.suppress(OSError):  # an event reports its death
            self.connection.sendall(f"{token}\n".encode())

    def end(self) -> str:
        """Kill the process, if it has not ended, and say how it ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(0.5)
        if self.process.poll() is None:
            self.process.kill()
        code = self.process.wait()
        self.connection.close()
        shutil.rmtree(self.home, ignore_errors=True)
        return f"signal {-code}" if code < 0 else f"exit status {code}"

    def _listen(self) -> None:
        with contextlib.suppress(OSError, ValueError), self.connection.makefile("r") as lines:
            for line in lines:
                self.events.put(json.loads(line))
        self.events.put(None)


class Executor(threading.Thread):
    """Takes the node's tasks from its Runtime API at ``host:port``, one at a time; the worker carries them out."""

    def __init__(self, address: str, waits: Waits) -> None:
        super().__init__(name="posy-executor", daemon=True)
        self._address = address
        self._waits = waits
        self._worker: Worker | None = None
        self._failed_starts = 0

    def run(self) -> None:
        """Serve until the process ends; end it if no worker can be started."""
        try:
            node = runtime_client(self._address)
            while True:
                worker = self._warm()
                if worker is not None and self._waits.work.wait(LOOK_SECONDS):
                    self._waits.work.clear()
                    if token := acquire_task(node):
                        self._carry_out(worker, token)
                        self._waits.work.clear()  # a next message is complete only when the node pauses
        except Exception as error:
            log(ERROR, "the node ends, because its tasks cannot be carried out", exc_info=error)
            os.kill(os.getpid(), signal.SIGTERM)

    def _warm(self) -> Worker | None:
        """Return a worker that is ready, a new one if necessary; None if that one died before it was ready."""
        if self._worker is not None:
            if self._worker.process.poll() is None:
                return self._worker
            log(WARNING, "the worker process died with nothing to do (%s); a new one is started", self._worker.end())
        self._worker = worker = Worker.start(self._address)
        with contextlib.suppress(queue.Empty):
            if event := worker.events.get(timeout=WORKER_START_SECONDS):
                self._failed_starts = 0
                log(INFO, "worker process %s is ready", event["process"])
                return worker
        self._worker = None
        self._failed_starts += 1
        log(ERROR, "the worker process did not start (%s)", worker.end())
        if self._failed_starts >= MAX_FAILED_STARTS:
            raise RuntimeError(f"{MAX_FAILED_STARTS} worker processes in a row did not start; the log says why")
        return None

    def _carry_out(self, worker: Worker, token: str) -> None:
        """Have one task carried out; answer it with an error if the worker dies or takes too long."""
        self._waits.replied.clear()
        with contextlib.closing(Task(self._address, token)) as task:
            message, limit, end, reason = None, 0.0, math.inf, ""
            worker.hand(token)
            while True:
                try:
                    event = worker.events.get(timeout=max(0.0, min(BEAT_SECONDS, end - time.monotonic())))
                except queue.Empty:
                    if time.monotonic() >= end:
                        reason = f"the worker process was killed: a reply after more than {limit:g} s would be too late"
                        worker.process.kill()
                        break
                    with contextlib.suppress(httpx.HTTPError):  # the next one may come through
                        task.beat()
                    continue
                if event is None:
                    break
                if event["event"] == "message":
                    message, limit = from_envelope(base64.b64decode(event["envelope"])), event["seconds"]
                    end = time.monotonic() + limit
                elif event["event"] == "pushed":
                    self._waits.replied.set()
                else:
                    return
            ended = worker.end()
            self._worker = None
            self._answer(task, message, reason or f"the worker process died while it worked on this message ({ended})")

    def _answer(self, task: Task, message: Message | None, reason: str) -> None:
        """Answer a task whose worker is gone."""
        log(ERROR, "%s; a new one is started", reason)
        if self._waits.replied.is_set():  # the reply itself was handed in
            return
        try:
            message = message or task.pull()[0]
            task.push(error_reply(message, reason, crashed=True), context_for(message))
            task.finish(None, reason)
        except (httpx.HTTPError, RuntimeError) as error:
            log(WARNING, "Flower will answer for it within a minute: %r", error)
        self._waits.replied.set()


class Watch(threading.Thread):
    """Ends the node when its SuperLink has been out of reach for too long.

    Flower applies ``--max-wait-time`` to each of its requests separately, so a node alone may go on for ever; and a
    node that ends reports this to its SuperLink, for which it waits again.
    """

    def __init__(self, address: str, seconds: float) -> None:
        super().__init__(name="posy-watch", daemon=True)
        host, _, port = address.rpartition(":")
        self._address = host.strip("[]"), int(port)
        self._seconds = seconds

    def run(self) -> None:
        """Try to connect every few seconds until it is time to end."""
        reached = time.monotonic()
        while time.monotonic() - reached <= self._seconds:
            with contextlib.suppress(OSError), socket.create_connection(self._address, LOOK_SECONDS):
                reached = time.monotonic()
            time.sleep(min(LOOK_SECONDS, self._seconds / 2))
        log(WARNING, "the SuperLink has been out of reach for %g s: the node ends", self._seconds)
        os._exit(1)  # the worker ends with it


def main() -> None:
    """Run a warm node; the arguments are those of ``flower-supernode``."""
    require_version()
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", default="")
    parser.add_argument("--isolation", default="process", choices=["process"])
    options, arguments = parser.parse_known_args()
    parser.add_argument("--superlink", default="")
    parser.add_argument("--max-wait-time", type=float)
    limits, _ = parser.parse_known_args(arguments)  # these two are Flower's as well
    if limits.max_wait_time is not None:
        Watch(limits.superlink, limits.max_wait_time).start()
    port = options.port or str(free_port())
    waits = Waits()
    Executor(f"{options.host}:{port}", waits).start()
    try:
        run_node([*arguments, "--isolation", "process", "--host", options.host, "--port", port], waits.sleep)
    except SystemExit as ended:
        # The interpreter was seen to hang at its end, after Flower's guard against that was gone.
        logging.shutdown()
        sys.stdout.flush()
        os._exit(ended.code if isinstance(ended.code, int) else int(bool(ended.code)))


if __name__ == "__main__":
    main()
