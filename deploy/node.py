"""Warm SuperNodes: ``python -m posy.deploy.node`` takes the arguments of ``flower-supernode``.

For more than one node, ``--auth-supernode-private-key`` and ``--node-config`` are given once for each. This process
loads all that they need and forks them (:mod:`posy.deploy.forks`). Each is Flower's own node. One of its
threads, the :class:`Executor`, takes the node's tasks and passes them to one worker process that keeps code and data
loaded. If the worker dies, the node answers its task with an error and starts a new worker. It kills a worker that is
still busy when a reply would be too late. The worker ends when the node ends.
"""

import argparse
import base64
import contextlib
import json
import math
import os
import queue
import shutil
import signal
import socket
import struct
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from logging import ERROR, INFO, WARNING
from pathlib import Path
from typing import Any

import httpx
from flwr.app import Message
from flwr.common.config import parse_config_args
from flwr.common.logger import log

from posy.deploy.addresses import free_port
from posy.deploy.forks import Family, Node, Parent, leave
from posy.deploy.internals import (
    MessageGoneError,
    Task,
    acquire_task,
    context_for,
    error_reply,
    from_envelope,
    load_node,
    require_version,
    run_node,
)
from posy.deploy.refusals import record_error
from posy.deploy.runtime import Calls, NodeState, answer, entry, size_of
from posy.deploy.secret import new_secret
from posy.deploy.trusted import OPTION as TRUSTED_ENTITIES
from posy.deploy.trusted import read_entities
from posy.deploy.worker import main as serve_worker
from posy.deploy.worker import preload
from posy.settings import SettingsError

KEY, CONFIG = "--auth-supernode-private-key", "--node-config"
IDLE_SECONDS = 1.0
"""Shortest sleep in which Flower's node waits for its next message; in shorter sleeps it waits for a reply."""
POLL_SECONDS, MAX_POLL_SECONDS = 0.1, 3.0
"""Shortest and longest pause of a node before it asks for a message again: many nodes may ask one SuperLink."""
POLL_SHARE, EARLY_SHARE = 0.1, 0.5
"""The pause as a share of the time between messages, and of the expected time until the next message."""
GAPS = 4
"""Number of recent waits from which the node predicts the next wait; a round has two."""
BEAT_SECONDS = 15.0
"""Seconds between two heartbeats of a task."""
LOOK_SECONDS = 5.0
"""Seconds between two checks of an idle worker, or of the connection to the SuperLink."""
WORKER_START_SECONDS = 300.0
"""Seconds that a worker may take to load PyTorch."""
SEND_SECONDS = 60
"""Seconds that a worker may take to read a part of an entry."""
MAX_FAILED_STARTS = 3
"""Number of workers in a row that may fail to start."""


class Waits:
    """The pauses of the node's main loop, which are short while the node has work."""

    def __init__(self) -> None:
        self.work = threading.Event()
        """Set when the node pauses: its messages are complete, and the executor can take tasks."""
        self.replied = threading.Event()
        """Set when the worker has delivered its reply."""
        self.lost = threading.Event()
        """Set when the worker has ended a task without a reply."""
        self._busy = self._woken = time.monotonic()
        self._idle = False
        self._gaps: deque[float] = deque(maxlen=GAPS)

    def sleep(self, seconds: float) -> None:
        """Replace the node's ``time.sleep``: wait before the next request, or until the reply has arrived."""
        self.work.set()  # always: the reply to an older message may have ended the wait
        clock = time.monotonic()
        if seconds >= IDLE_SECONDS:
            self._idle = True
            requested = clock - self._woken  # Posy's SuperLink holds a request until a message has arrived
            time.sleep(max(0.0, pause(clock - self._busy, min(self._gaps, default=0.0)) - requested))
            self._woken = time.monotonic()
            return
        if self._idle:  # a message has arrived
            self._idle = False
            self._gaps.append(clock - self._busy)
        self._busy = clock
        if self.replied.wait(seconds):
            time.sleep(0.005)  # in case the reply is for another message


def pause(waited: float, expected: float) -> float:
    """Return the seconds until a node asks again, ``waited`` seconds after its last message.

    ``expected`` is the number of seconds between messages.
    """
    share = POLL_SHARE * max(waited, expected)
    return min(MAX_POLL_SECONDS, max(POLL_SECONDS, share, EARLY_SHARE * (expected - waited)))


@dataclass
class Worker:
    """A running worker process."""

    parent: Parent
    connection: socket.socket
    home: Path
    events: "queue.Queue[dict[str, Any] | None]"
    """The events that it has reported; None: its end of the connection is closed."""

    node: NodeState
    writing: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    def start(cls, parent: Parent, node: NodeState) -> "Worker":
        """Start a worker for a node."""
        # Each worker has a separate home: in a shared home, nodes would overwrite each other's apps.
        home = Path(tempfile.mkdtemp(prefix="posy-worker-"))
        node_end, worker_end = socket.socketpair()
        node_end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", SEND_SECONDS, 0))
        with worker_end:
            parent.fork_worker(worker_end, home)
        worker = cls(parent, node_end, home, queue.Queue(), node)
        threading.Thread(target=worker._listen, daemon=True).start()
        return worker

    def hand(self, token: str) -> None:
        """Pass a task to the worker."""
        self._send(entry(token=token))

    @property
    def alive(self) -> bool:
        """Whether the process has not ended yet."""
        return self.parent.ended.empty()

    def end(self) -> str:
        """Kill the process, if it has not ended, and return how it ended."""
        try:
            code = self.parent.ended.get(timeout=0.5)
        except queue.Empty:
            self.parent.kill_worker()
            code = self.parent.ended.get()
        self.connection.close()
        shutil.rmtree(self.home, ignore_errors=True)
        return f"signal {-code}" if code < 0 else f"exit status {code}"

    def _listen(self) -> None:
        try:
            with self.connection.makefile("rb") as stream:
                for line in stream:
                    head = json.loads(line)
                    if "call" in head:
                        self._send(answer(self.node, head, stream.read(size_of(head))))
                    elif "event" in head:
                        self.events.put(head)
                    else:
                        raise ValueError("an entry is neither a call nor an event")
        except OSError:
            log(INFO, "the connection to the worker process has ended")
        except Exception as error:  # a run's code has written to the socket
            log(ERROR, "the worker process has sent a malformed entry: %r", error)
        finally:
            self.events.put(None)

    def _send(self, content: bytes) -> None:
        """Send an entry; the executor replaces a worker that does not read for :data:`SEND_SECONDS`."""
        try:
            with self.writing:
                self.connection.sendall(content)
        except OSError:  # also after the time limit, in the middle of an entry
            with contextlib.suppress(OSError):
                self.connection.shutdown(socket.SHUT_RDWR)


class WorkerLostError(RuntimeError):
    """The worker process has died, or was killed because it took too long."""


class Executor(threading.Thread):
    """Takes the node's tasks, one at a time, and lets the worker run them."""

    def __init__(self, state: NodeState, waits: Waits, parent: Parent, node_config: Mapping[str, Any]) -> None:
        super().__init__(name="posy-executor", daemon=True)
        self._state = state
        self._node_config = node_config
        self._parent = parent
        self._waits = waits
        self._worker: Worker | None = None
        self._failed_starts = 0
        self._next = False  # whether a further task can be taken at once

    def run(self) -> None:
        """Serve until the process ends; end it if no worker can be started."""
        try:
            node = Calls(self._state.call)
            while True:
                worker = self._warm()
                if worker is not None and self._waits.work.wait(LOOK_SECONDS):
                    self._waits.work.clear()
                    if token := acquire_task(node):
                        self._next = False
                        self._carry_out(worker, token)
                        self._waits.work.clear()  # a next message is complete only when the node pauses
                        if self._next:
                            self._waits.work.set()
        except Exception as error:
            log(ERROR, "the node ends, because it cannot run its tasks", exc_info=error)
            os.kill(os.getpid(), signal.SIGTERM)

    def _warm(self) -> Worker | None:
        """Return a worker that is ready, a new one if necessary; None if that one died before it was ready."""
        if self._worker is not None:
            if self._worker.alive:
                return self._worker
            log(WARNING, "the worker process died with nothing to do (%s); a new one is started", self._worker.end())
        self._worker = worker = Worker.start(self._parent, self._state)
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
        """Let the worker run one task; answer the task with an error if the worker dies or takes too long."""
        self._waits.replied.clear()
        task = Task(Calls(self._state.call, token))
        message, limit, end, reason = None, 0.0, math.inf, ""
        worker.hand(token)
        while True:
            try:
                event = worker.events.get(timeout=max(0.0, min(BEAT_SECONDS, end - time.monotonic())))
            except queue.Empty:
                if time.monotonic() >= end:
                    reason = f"the worker process was killed: a reply after more than {limit:g} s would be too late"
                    self._parent.kill_worker()
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
            elif event["event"] == "gone":  # the task of the message that the node has now may be the next
                self._next = True
                return
            else:
                if not self._waits.replied.is_set():
                    self._waits.lost.set()
                self._waits.replied.set()
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
            record_error(message, self._node_config, WorkerLostError(reason))
            task.push(error_reply(message, reason, crashed=True), context_for(message))
            task.finish(None, reason)
        except MessageGoneError:
            self._next = True
            return
        except (httpx.HTTPError, RuntimeError) as error:
            log(WARNING, "its node answers for it: %r", error)
            self._waits.lost.set()
        self._waits.replied.set()


class Watch(threading.Thread):
    """Ends the node when its SuperLink has been out of reach for too long.

    Flower applies ``--max-wait-time`` to each of its requests separately, so a node alone may continue for ever. A
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
    """Run warm nodes with the arguments of ``flower-supernode``, some of them once for each node."""
    require_version()
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument(KEY, dest="keys", action="append", default=[])
    parser.add_argument(CONFIG, dest="configs", action="append", default=[])
    options, shared = parser.parse_known_args()
    keys, configs = options.keys or [""], options.configs or [""] * max(1, len(options.keys))
    if len(configs) != len(keys):
        sys.exit(f"posy: {CONFIG} is given {len(configs)} times and {KEY} {len(keys)} times: once for each node")
    nodes = []
    for key, config in zip(keys, configs, strict=True):
        secret = [KEY, key] if key and "--insecure" not in shared else []
        words = [*secret, *([CONFIG, config] if config else [])]
        nodes.append(Node(Path(key).stem, [*shared, *words]))
    load_node()
    preload(len(nodes))
    leave(Family(nodes, serve, partial(serve_worker, entities=trusted_by(shared))).keep())


def trusted_by(arguments: Sequence[str]) -> dict[str, str] | None:
    """Return the keys of the trusted entities that the arguments of ``flower-supernode`` name; None: no option."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument(TRUSTED_ENTITIES, dest="file", type=Path)
    file = parser.parse_known_args(arguments)[0].file
    try:
        return None if file is None else read_entities(file)
    except SettingsError as error:
        sys.exit(f"posy: {error}")


def serve(arguments: Sequence[str], parent: Parent) -> None:
    """Run one node with the arguments of ``flower-supernode``."""
    parent.start()
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", default="")
    parser.add_argument("--isolation", default="process", choices=["process"])
    options, node_arguments = parser.parse_known_args(arguments)
    parser.add_argument("--superlink", default="")
    parser.add_argument("--max-wait-time", type=float)
    parser.add_argument(CONFIG, dest="node_config")
    limits, _ = parser.parse_known_args(node_arguments)  # these three are Flower's as well
    if limits.max_wait_time is not None:
        Watch(limits.superlink, limits.max_wait_time).start()
    port = options.port or str(free_port())
    waits, state = Waits(), NodeState()
    node_config = parse_config_args([limits.node_config] if limits.node_config else None)
    Executor(state, waits, parent, node_config).start()
    words = [*node_arguments, "--isolation", "process", "--host", options.host, "--port", port]
    run_node(words, waits.sleep, waits.lost, new_secret(), state)


if __name__ == "__main__":
    main()
