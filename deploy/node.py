"""Warm SuperNodes: ``python -m posy.deploy.node`` takes the arguments of ``flower-supernode``.

For several nodes, pass ``--auth-supernode-private-key`` and ``--node-config`` once per node. This process loads the
modules for all nodes and forks the nodes (:mod:`posy.deploy.forks`). Each node asks its SuperLink for one message at a
time over gRPC (:mod:`posy.deploy.fleet`), and passes it to a worker process that keeps code and data loaded. If the
worker dies, the node answers the message with an error and starts a new worker. It kills a worker that is still busy
when the deadline for the reply has passed. The worker terminates when the node does.

Flower's node would start an interpreter for every message, and sleep for up to three seconds between requests. It also
offers tasks on a port of its machine, whereas this node does not listen on any port.
"""

import argparse
import contextlib
import os
import queue
import re
import shutil
import signal
import socket
import struct
import sys
import tempfile
import threading
import time
import tomllib
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from logging import ERROR, INFO, WARNING
from pathlib import Path
from typing import Any, NoReturn

import flwr
import grpc
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_pem_private_key, load_ssh_private_key
from flwr.common.logger import log

from posy.deploy.entries import EntrySocket, read_entry
from posy.deploy.fleet import Fleet, PartError, RunEndedError, describe, push_until_expired
from posy.deploy.flower_internals import Packed, envelope_from, message_of, packed_error, tree_from, unpack
from posy.deploy.forks import Family, Node, Parent, leave
from posy.deploy.refusals import record_error
from posy.deploy.tasks import Bundle, Run, hand_over
from posy.deploy.trusted import OPTION as TRUSTED_ENTITIES
from posy.deploy.trusted import RULE, UntrustedAppError, check_signatures, read_entities
from posy.deploy.worker import main as serve_worker
from posy.deploy.worker import preload
from posy.flower import CLOCK_SECONDS, FLOWER, ErrorCode, add_times_to_log
from posy.settings import SettingsError

KEY, CONFIG = "--auth-supernode-private-key", "--node-config"
POLL_SECONDS, MAX_POLL_SECONDS = 0.1, 3.0
"""Shortest and longest pause, in seconds, before a node asks for a message again; many nodes may share a SuperLink."""
POLL_SHARE, EARLY_SHARE = 0.1, 0.5
"""Pauses as fractions of the time between messages, and of the expected time until the next message."""
GAPS = 4
"""Number of recent waits from which the node predicts the next wait. Each round has two waits."""
LOOK_SECONDS = 5.0
"""Seconds between checks of the connection to the SuperLink."""
WORKER_START_SECONDS = 300.0
"""Seconds that a worker may take to load PyTorch."""
SEND_SECONDS = 60
"""Seconds that a worker may take to read part of an entry."""
MAX_FAILED_STARTS = 3
"""Number of consecutive failed starts after which the node terminates."""


class Waits:
    """The pauses between a node's requests, which are short while the node has work."""

    def __init__(self) -> None:
        self._busy = self._asked = time.monotonic()
        self._idle = False
        self._gaps: deque[float] = deque(maxlen=GAPS)

    def pause(self) -> None:
        """Wait after a request that returned no message."""
        self._idle = True
        clock = time.monotonic()
        request_seconds = clock - self._asked  # Posy's SuperLink holds a request until a message arrives
        time.sleep(max(0.0, pause(clock - self._busy, min(self._gaps, default=0.0)) - request_seconds))
        self._asked = time.monotonic()

    def begin(self) -> None:
        """Record that a message has arrived."""
        if self._idle:
            self._gaps.append(time.monotonic() - self._busy)
        self._idle = False

    def end(self) -> None:
        """Record that the node has answered the message."""
        self._busy = self._asked = time.monotonic()


def pause(waited: float, expected: float) -> float:
    """Return the pause in seconds before a node's next request, ``waited`` seconds after the node's last message.

    ``expected`` is the expected number of seconds between messages.
    """
    share = POLL_SHARE * max(waited, expected)
    return min(MAX_POLL_SECONDS, max(POLL_SECONDS, share, EARLY_SHARE * (expected - waited)))


Event = tuple[dict[str, Any], list[bytes]]


@dataclass
class Worker:
    """A running worker process."""

    parent: Parent
    connection: socket.socket
    home: Path
    events: "queue.Queue[Event | None]"
    """Events that the worker has reported. None means that the worker's end of the connection is closed."""
    code: str = ""
    """Hash of the code that the worker received last."""

    @classmethod
    def start(cls, parent: Parent) -> "Worker":
        """Start a worker."""
        # Each worker has its own Flower home, because nodes would overwrite each other's apps in a shared home.
        home = Path(tempfile.mkdtemp(prefix="posy-worker-"))
        node_end, worker_end = socket.socketpair()
        node_end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", SEND_SECONDS, 0))
        with worker_end:
            parent.fork_worker(worker_end, home)
        worker = cls(parent, node_end, home, queue.Queue())
        threading.Thread(target=worker.listen, daemon=True).start()
        return worker

    def hand(
        self, number: str, objects: Mapping[str, bytes], run: Run, bundle: Bundle, node: tuple[int, Any], state: bytes
    ) -> None:
        """Pass a message to the worker; close the connection if the worker stops reading for :data:`SEND_SECONDS`."""
        with_code = bundle.hash != self.code
        try:
            hand_over(EntrySocket(self.connection), number, objects, run, bundle, node, state, with_code=with_code)
        except OSError:  # this includes a timeout in the middle of an entry
            with contextlib.suppress(OSError):
                self.connection.shutdown(socket.SHUT_RDWR)
        self.code = bundle.hash

    @property
    def alive(self) -> bool:
        """Whether the process is still running."""
        return self.parent.ended.empty()

    def end(self) -> str:
        """Kill the process if it is still running, and return its exit status or signal as text."""
        try:
            code = self.parent.ended.get(timeout=0.5)
        except queue.Empty:
            self.parent.kill_worker()
            code = self.parent.ended.get()
        self.connection.close()
        shutil.rmtree(self.home, ignore_errors=True)
        return f"signal {-code}" if code < 0 else f"exit status {code}"

    def listen(self) -> None:
        """Queue the worker's events until the worker closes its end of the connection."""
        try:
            with self.connection.makefile("rb") as stream:
                while entry := read_entry(stream):
                    if entry[0].get("event") not in EVENTS:
                        raise ValueError(f"{entry[0].get('event')!r} is not an event")
                    self.events.put(entry)
        except OSError:
            log(INFO, "the connection to the worker process was closed")
        except Exception as error:  # a run's code may have written to the socket
            log(ERROR, "the worker process has sent a malformed entry: %r", error)
        finally:
            self.events.put(None)


EVENTS = ("ready", "reply", "done")


class WorkerLostError(RuntimeError):
    """The worker process has died, or the node has killed it because it took too long."""


class WarmNode:
    """A node that answers the messages of its SuperLink, one at a time.

    Parameters
    ----------
    fleet : Fleet
        The connection to the SuperLink.
    parent : Parent
        The parent process, which forks the worker.
    node_config : mapping
        The node config.
    entities : mapping or None
        The public keys of trusted entities, keyed by id. If it is None, the code needs no signature.
    """

    def __init__(
        self, fleet: Fleet, parent: Parent, node_config: Mapping[str, Any], entities: Mapping[str, str] | None = None
    ) -> None:
        self._fleet, self._parent, self._node_config, self._entities = fleet, parent, node_config, entities
        self._worker: Worker | None = None
        self._failed_starts = 0
        self._run: tuple[Run, Bundle] | None = None
        self._states: dict[int, bytes] = {}
        """This node's state for each series of runs, as serialised by the worker."""
        self._waits = Waits()

    def serve(self) -> None:
        """Serve messages; raise an error if the SuperLink refuses the node, or if no worker starts."""
        log(INFO, "SuperNode ID: %s", self._fleet.join())
        while True:
            worker = self._warm()
            if worker is None:
                continue
            if (received := self._pull()) is None:
                self._waits.pause()
                continue
            self._waits.begin()
            if reply := self._answer(worker, *received):
                push_until_expired(self._fleet, *reply)
            self._waits.end()

    # -- a message -----------------------------------------------------------------------------------------

    def _pull(self) -> tuple[Any, Any] | None:
        """Return the envelope and object tree of the next message, or None if there is no message."""
        try:
            return self._fleet.pull()
        except RunEndedError:
            return None
        except grpc.RpcError as error:
            if error.code() == grpc.StatusCode.UNAUTHENTICATED:
                raise
            log(ERROR, "a request for a message failed, and the node continues: %s", describe(error))
            return None

    def _answer(self, worker: Worker, envelope: Any, tree: Any) -> tuple[Packed, float] | None:
        """Return the reply to a message and the app's running time in seconds, or None if the run has ended.

        The node answers an incomplete message with an error, and the server may send it again.
        """
        metadata = envelope.metadata
        log(
            INFO,
            "Receiving: %s message (ID: %s) of run %s",
            metadata.message_type,
            metadata.message_id,
            metadata.run_id,
        )
        try:
            run, bundle = self._run_of(metadata.run_id)
            objects = self._fleet.pull_objects(envelope, tree)
        except RunEndedError:
            log(INFO, "the message %s is dropped: run %s is not running", metadata.message_id, metadata.run_id)
            return None
        except (grpc.RpcError, PartError) as error:
            reason = str(error) if isinstance(error, PartError) else describe(error)
            log(ERROR, "the message %s is incomplete: %s", metadata.message_id, reason)
            return packed_error(envelope, ErrorCode.MESSAGE_UNAVAILABLE, reason, time.time()), 0.0
        log(INFO, "Received successfully")
        if self._entities is not None and (refusal := self._refusal(envelope, objects, bundle)):
            return refusal, 0.0
        started = time.monotonic()
        reply = self._let_work(worker, envelope, objects, run, bundle)
        return reply, time.monotonic() - started

    def _run_of(self, run_id: int) -> tuple[Run, Bundle]:
        """Return a run and its code, which the node keeps until it receives a message from another run."""
        if self._run is None or self._run[0].run_id != run_id:
            self._run = self._fleet.run(run_id)
        return self._run

    def _refusal(self, envelope: Any, objects: Mapping[str, bytes], bundle: Bundle) -> Packed | None:
        """Return an error reply to a message if no trusted entity has signed the run's code."""
        try:
            check_signatures(bundle, self._entities or {})
        except UntrustedAppError as error:
            log(ERROR, "The FAB could not be verified: %s", error)
            self._run = None  # the code may be signed when the next message arrives
            record_error(_message_from(envelope, objects), self._node_config, RULE)
            return packed_error(envelope, ErrorCode.INVALID_FAB, "The FAB could not be verified.", time.time())
        return None

    def _let_work(
        self, worker: Worker, envelope: Any, objects: Mapping[str, bytes], run: Run, bundle: Bundle
    ) -> Packed:
        """Have the worker answer a message; return an error reply if the worker dies or times out."""
        metadata = envelope.metadata
        limit = max(0.0, metadata.ttl - CLOCK_SECONDS)
        end = time.monotonic() + limit
        series = run.series or run.run_id
        node = self._fleet.node_id, self._node_config
        worker.hand(metadata.message_id, objects, run, bundle, node, self._states.get(series, b""))
        reply, reason = None, ""
        while True:
            try:
                event = worker.events.get(timeout=max(0.0, end - time.monotonic()))
                if event is None:
                    break
                head, parts = event
                if head["event"] == "reply":
                    reply = Packed(
                        envelope_from(parts[0]), tree_from(parts[1]), dict(zip(head["objects"], parts[2:], strict=True))
                    )
                elif head["event"] == "done":
                    if reply is not None:
                        self._states[series] = parts[0]
                        return reply
                    break
            except queue.Empty:
                reason = f"the worker process was killed, because a reply after {limit:g} s would be too late"
                self._parent.kill_worker()
                break
            except Exception as error:  # a run's code may have written to the socket
                log(ERROR, "the worker process has sent a malformed reply: %r", error)
                self._parent.kill_worker()
                break
        ended = worker.end()
        self._worker = None
        reason = reason or f"the worker process died while it worked on this message ({ended})"
        log(ERROR, "%s; the node starts a new worker", reason)
        if reply is not None:  # the worker died only after sending a complete reply
            return reply
        record_error(_message_from(envelope, objects), self._node_config, WorkerLostError(reason))
        return packed_error(envelope, ErrorCode.CLIENT_APP_CRASHED, reason, time.time())

    def _warm(self) -> Worker | None:
        """Return a ready worker, starting one if necessary, or None if the new worker did not become ready."""
        if self._worker is not None:
            if self._worker.alive:
                return self._worker
            log(WARNING, "the idle worker process died (%s); the node starts a new worker", self._worker.end())
        self._worker = worker = Worker.start(self._parent)
        with contextlib.suppress(queue.Empty):
            if event := worker.events.get(timeout=WORKER_START_SECONDS):
                self._failed_starts = 0
                log(INFO, "worker process %s is ready", event[0].get("process"))
                return worker
        self._worker = None
        self._failed_starts += 1
        log(ERROR, "the worker process did not start (%s)", worker.end())
        if self._failed_starts >= MAX_FAILED_STARTS:
            raise RuntimeError(f"{MAX_FAILED_STARTS} worker processes in a row did not start; see the log")
        return None


def _message_from(envelope: Any, objects: Mapping[str, bytes]) -> Any:
    """Return a message restored from its objects, or without content if the objects are malformed."""
    try:
        return unpack(envelope.metadata.message_id, objects)
    except Exception as error:  # the sender controls the objects
        log(ERROR, "the message %s is malformed: %r", envelope.metadata.message_id, error)
        return message_of(envelope)


class Watch(threading.Thread):
    """Terminates the node when its SuperLink has been unreachable for too long.

    Flower applies ``--max-wait-time`` to each request separately, so its node may run forever. This class ends the
    process at once. A normal exit would first report to the SuperLink, and would therefore wait for it again.
    """

    def __init__(self, address: str, seconds: float) -> None:
        super().__init__(name="posy-watch", daemon=True)
        host, _, port = address.rpartition(":")
        self._address = host.strip("[]"), int(port)
        self._seconds = seconds

    def run(self) -> None:
        """Try to connect every few seconds until it is time to terminate."""
        reached = time.monotonic()
        while time.monotonic() - reached <= self._seconds:
            with contextlib.suppress(OSError), socket.create_connection(self._address, LOOK_SECONDS):
                reached = time.monotonic()
            time.sleep(min(LOOK_SECONDS, self._seconds / 2))
        log(WARNING, "the SuperLink has been unreachable for %g s, so the node exits", self._seconds)
        os._exit(1)  # this also terminates the worker


def require_version() -> None:
    """Exit unless version 1.39 of Flower is installed."""
    if not flwr.__version__.startswith(f"{FLOWER}."):
        sys.exit(
            f"posy: warm SuperNodes need Flower {FLOWER}, which uses gRPC, but {flwr.__version__} is installed; "
            f"install 'flwr>={FLOWER},<1.40', or add --stock"
        )


def main() -> None:
    """Run warm nodes with the arguments of ``flower-supernode``, some of which are repeated for each node."""
    require_version()
    add_times_to_log()
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument(KEY, dest="keys", action="append", default=[])
    parser.add_argument(CONFIG, dest="configs", action="append", default=[])
    options, shared = parser.parse_known_args()
    keys, configs = options.keys or [""], options.configs or [""] * max(1, len(options.keys))
    if len(configs) != len(keys):
        sys.exit(
            f"posy: there are {len(configs)} {CONFIG} options, but {len(keys)} {KEY} options; pass one of each per node"
        )
    nodes = []
    for key, config in zip(keys, configs, strict=True):
        secret = [KEY, key] if key and "--insecure" not in shared else []
        words = [*secret, *([CONFIG, config] if config else [])]
        nodes.append(Node(Path(key).stem, [*shared, *words]))
    preload(len(nodes))
    leave(Family(nodes, serve, partial(serve_worker, entities=trusted_by(shared))).keep())


def trusted_by(arguments: Sequence[str]) -> dict[str, str] | None:
    """Return the keys of trusted entities from ``flower-supernode`` arguments, or None if no file is specified."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument(TRUSTED_ENTITIES, dest="file", type=Path)
    file = parser.parse_known_args(arguments)[0].file
    try:
        return None if file is None else read_entities(file)
    except SettingsError as error:
        sys.exit(f"posy: {error}")


def serve(arguments: Sequence[str], parent: Parent) -> None:
    """Run one node with the arguments of ``flower-supernode`` until a signal stops it."""
    parent.start()
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--superlink", default="127.0.0.1:9092")
    parser.add_argument("--insecure", action="store_true")
    parser.add_argument("--root-certificates", type=Path)
    parser.add_argument("--max-wait-time", type=float)
    parser.add_argument(KEY, dest="key", type=Path)
    parser.add_argument(CONFIG, dest="node_config", default="")
    parser.add_argument(TRUSTED_ENTITIES, dest="entities")
    options = parser.parse_args(arguments)
    if options.max_wait_time is not None:
        Watch(options.superlink, options.max_wait_time).start()
    fleet = Fleet(
        options.superlink,
        private_key(options.key) if options.key else None,
        options.root_certificates.read_bytes() if options.root_certificates else None,
        insecure=options.insecure,
    )
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _end)
    try:
        WarmNode(fleet, parent, config_in(options.node_config), trusted_by(arguments)).serve()
    except grpc.RpcError as error:
        log(ERROR, "the node exits, because the SuperLink at %s refuses it: %s", options.superlink, describe(error))
        sys.exit(1)
    finally:
        fleet.leave()


def private_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """Return the private key in a file in OpenSSH or PEM format."""
    content = path.read_bytes()
    key = (load_ssh_private_key if b"OPENSSH" in content else load_pem_private_key)(content, None)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        sys.exit(f"posy: {path} ({KEY}) is not a private key in the format of `posy certificates`")
    return key


def config_in(text: str) -> dict[str, Any]:
    """Parse the value of ``--node-config``: ``key=value`` pairs with TOML values, separated by spaces."""
    pairs = re.findall(r"""(\S+?)=('[^']*'|"[^"]*"|\S+)""", text)
    return tomllib.loads("\n".join(f"{key} = {value}" for key, value in pairs))


def _end(number: int, _: object) -> NoReturn:
    log(INFO, "SuperNode terminated gracefully")
    raise SystemExit(0)


if __name__ == "__main__":
    main()
