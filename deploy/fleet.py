"""A node's gRPC calls to its SuperLink, with retries after temporary errors.

Flower's own node retries a call only if the SuperLink has not answered. After any other error, it silently drops the
message or the reply, or it terminates.
"""

import concurrent.futures
import contextlib
import json
import random
import threading
import time
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime, timedelta
from logging import ERROR, INFO, WARNING
from typing import Any

import flwr
import grpc
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from flwr.common.logger import log

from posy.deploy.flower_internals import (
    KEY_REFUSED,
    PUBLIC_KEY_HEADER,
    SIGNATURE_HEADER,
    TIMESTAMP_HEADER,
    Packed,
    config_of,
    fleet_call,
    numbers_in,
)
from posy.deploy.tasks import Bundle, Run

HEARTBEAT_SECONDS = 15
"""Heartbeat interval in seconds. A node that is silent for twice this time counts as offline, so its key can be used
for a new connection. With Flower's default of 30 s, this would take a minute."""
HEARTBEAT_TIMEOUT = 5.0
ACTIVATION_SECONDS = 2 * HEARTBEAT_SECONDS + 5.0
"""Seconds for which the node retries with a refused key. After this time, the node's earlier connection counts as
offline."""
CALL_SECONDS = 300.0
"""Timeout of a call in seconds. Without a timeout, a dead connection could go unnoticed by both sides."""
PATIENCE_SECONDS = 60.0
"""Seconds for which the node retries a call after a temporary error."""
PART_SECONDS = 30.0
"""Seconds for which the node waits for a part of a message that the SuperLink does not have yet."""
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.2, 20.0
"""Approximate first and longest pauses between retries, in seconds. Each pause is twice as long as the previous one."""
CONCURRENT = 6
"""Maximum number of parts of a message that are in transit at the same time."""
LARGEST_MESSAGE = 2**31 - 1
"""Maximum size of a gRPC message in bytes."""
VERSION_HEADERS = (
    ("flwr-package-name", "flwr"),
    ("flwr-package-version", flwr.__version__),
    ("flwr-component-name", "SuperNode"),
)
PASSING = (
    grpc.StatusCode.INTERNAL,  # Flower's code for any unexpected error of the SuperLink
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.ABORTED,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
)


class RunEndedError(Exception):
    """The run that a call refers to has ended, so the SuperLink refuses the call."""


class PartError(Exception):
    """A part of a message is missing or was refused."""


class Fleet:
    """A node's connection to its SuperLink.

    Parameters
    ----------
    address : str
        Address of the SuperLink, HOST:PORT.
    key : ec.EllipticCurvePrivateKey or None
        The node's registered private key, or None to register a new key.
    root_certificates : bytes or None
        Certificates (PEM) of the authorities that the node trusts, or None for the defaults of gRPC.
    insecure : bool
        Whether to connect without TLS.
    """

    def __init__(
        self,
        address: str,
        key: ec.EllipticCurvePrivateKey | None = None,
        root_certificates: bytes | None = None,
        *,
        insecure: bool = False,
    ) -> None:
        self._registers = key is None
        self._key = key or ec.generate_private_key(ec.SECP384R1())
        self._public = public_pem_of(self._key)
        options = [(f"grpc.max_{way}_message_length", LARGEST_MESSAGE) for way in ("send", "receive")]
        if insecure:
            self._channel = grpc.insecure_channel(address, options)
        else:
            self._channel = grpc.secure_channel(address, grpc.ssl_channel_credentials(root_certificates), options)
        self._alone = threading.Lock()
        self._refused = 0.0
        self._connected = False
        self._ended = threading.Event()
        self.node_id = 0

    # -- the node itself -----------------------------------------------------------------------------------

    def join(self) -> int:
        """Report that the node is online, start its heartbeats, and return its id."""
        if self._registers:
            self.call("RegisterNode", public_key=self._public)
        self.node_id = self.call("ActivateNode", public_key=self._public, heartbeat_interval=HEARTBEAT_SECONDS).node_id
        threading.Thread(target=self._beat, name="posy-heartbeat", daemon=True).start()
        return self.node_id

    def leave(self) -> None:
        """Report that the node is going offline; if the SuperLink does not answer, do not retry."""
        self._ended.set()
        if self.node_id:
            with contextlib.suppress(grpc.RpcError):
                self._call_once("DeactivateNode", HEARTBEAT_TIMEOUT, node_id=self.node_id)
                if self._registers:
                    self._call_once("UnregisterNode", HEARTBEAT_TIMEOUT, node_id=self.node_id)
        self._channel.close()

    def _beat(self) -> None:
        """Send heartbeats until the node leaves, and retry failed heartbeats with increasing delays."""
        pauses = pauses_between_tries()
        while not self._ended.wait((HEARTBEAT_SECONDS - HEARTBEAT_TIMEOUT) * random.uniform(0.7, 0.9)):
            while not self._ended.is_set():
                try:
                    answer = self._call_once(
                        "SendNodeHeartbeat", HEARTBEAT_TIMEOUT, node=self._node(), heartbeat_interval=HEARTBEAT_SECONDS
                    )
                    if answer.success:
                        pauses = pauses_between_tries()
                        break
                    log(WARNING, "the SuperLink does not recognise this node")
                except grpc.RpcError as error:
                    log(WARNING, "a heartbeat did not reach the SuperLink: %s", describe(error))
                self._ended.wait(next(pauses))

    # -- messages ------------------------------------------------------------------------------------------

    def pull(self) -> tuple[Any, Any] | None:
        """Return the envelope and the object tree of the next message, or None if no message is waiting."""
        answer = self.call("PullMessages", node=self._node())
        if not answer.messages_list:
            return None
        return answer.messages_list[0], answer.message_object_trees[0]

    def pull_objects(self, envelope: Any, tree: Any) -> dict[str, bytes]:
        """Return the objects of a message, and confirm that the node has received it.

        Raises
        ------
        PartError
            If an object is missing.
        RunEndedError
            If the run has ended.
        """
        run_id = envelope.metadata.run_id
        end = time.monotonic() + PART_SECONDS

        def pull_object(number: str) -> bytes:
            for pause in pauses_between_tries():
                answer = self.call("PullObject", node=self._node(), run_id=run_id, object_id=number)
                if answer.object_available:
                    return bytes(answer.object_content)
                if not answer.object_found or time.monotonic() >= end:
                    break
                time.sleep(pause)
            raise PartError("some of its parts did not reach the node")

        numbers = list(dict.fromkeys(numbers_in(tree)))
        objects = dict(zip(numbers, _side_by_side(pull_object, numbers), strict=True))
        self.call(
            "ConfirmMessageReceived", node=self._node(), run_id=run_id, message_object_id=envelope.metadata.message_id
        )
        return objects

    def push(self, reply: Packed, seconds: float) -> None:
        """Push a reply once, and then push the objects that the SuperLink reports as missing.

        ``seconds`` is the app's running time. Raise :class:`PartError`, :class:`RunEndedError` or a gRPC error.
        """
        answer = self.call(
            "PushMessages",
            node=self._node(),
            messages_list=[reply.envelope],
            message_object_trees=[reply.tree],
            clientapp_runtime_list=[seconds],
        )
        missing_ids = set(answer.objects_to_push)

        def push_object(number: str) -> None:
            object_answer = self.call(
                "PushObject",
                node=self._node(),
                run_id=reply.envelope.metadata.run_id,
                session_id=answer.session_id,
                object_id=number,
                object_content=reply.objects[number],
            )
            if not object_answer.stored:
                raise PartError("the SuperLink refused a part of the reply")

        _side_by_side(push_object, [number for number in reply.objects if number in missing_ids])

    def run(self, run_id: int) -> tuple[Run, Bundle]:
        """Return a run and its code, or raise :class:`RunEndedError` if the run has ended."""
        run = self.call("GetRun", node=self._node(), run_id=run_id).run
        fab = self.call("GetFab", node=self._node(), run_id=run_id, hash_str=run.fab_hash).fab
        submitter = run.account_name or run.flwr_aid
        return (
            Run(run_id, submitter, config_of(run.override_config), run.series_id),
            Bundle(fab.hash_str, fab.content, dict(fab.verifications)),
        )

    # -- calls ---------------------------------------------------------------------------------------------

    def call(self, name: str, /, timeout: float = CALL_SECONDS, **fields: Any) -> Any:
        """Make a call, retry it after temporary errors, and return the response; only one retry runs at a time.

        Some networks cut a connection after a certain number of bytes, which would cut off all parallel retries.

        Raises
        ------
        RunEndedError
            If the call refers to a run that has ended.
        grpc.RpcError
            If the SuperLink refuses the call, or the call has failed for too long.
        """
        started = time.monotonic()
        for tries, pause in enumerate(pauses_between_tries()):
            try:
                with self._alone if tries else contextlib.nullcontext():
                    answer = self._call_once(name, timeout, **fields)
            except grpc.RpcError as error:
                if error.code() == grpc.StatusCode.PERMISSION_DENIED:
                    raise RunEndedError(error.details()) from error
                if not self._may_pass(error, time.monotonic() - started, timeout):
                    raise
                log(WARNING, "a call to the SuperLink failed, and the node retries it: %s", describe(error))
                time.sleep(pause)
            else:
                self._connected = True
                return answer
        raise AssertionError("the sequence of pauses is infinite")

    def _call_once(self, name: str, timeout: float, /, **fields: Any) -> Any:
        path, request, response = fleet_call(name)
        headers = (*signature_headers(self._key), *VERSION_HEADERS)
        call = self._channel.unary_unary(path, request.SerializeToString, response.FromString)
        return call(request(**fields), timeout=timeout, metadata=headers)

    def _node(self) -> dict[str, int]:
        return {"node_id": self.node_id}

    def _may_pass(self, error: grpc.RpcError, waited: float, timeout: float) -> bool:
        """Return whether a failed call may succeed if the node retries it."""
        details = str(error.details() or "")
        if code_in(details) == KEY_REFUSED:
            if not self._refused:
                self._refused = time.monotonic()
                log(
                    WARNING,
                    "the SuperLink does not accept this node's key: the key is not registered (`posy register`), or "
                    "another node with this key is online or was online moments ago. The node retries for %g s",
                    ACTIVATION_SECONDS,
                )
            return time.monotonic() - self._refused < ACTIVATION_SECONDS
        if error.code() == grpc.StatusCode.UNAVAILABLE:
            # A broken connection can cause the same error as a certificate mismatch.
            return self._connected or "CERTIFICATE" not in details.upper()
        return error.code() in PASSING and waited < min(PATIENCE_SECONDS, timeout)


def signature_headers(
    key: ec.EllipticCurvePrivateKey, offset: timedelta = timedelta()
) -> tuple[tuple[str, str | bytes], ...]:
    """Return headers that prove possession of a node's key: its public key, and a signed time (now + ``offset``)."""
    stamp = (current_time() + offset).isoformat()
    signature = key.sign(stamp.encode(), ec.ECDSA(hashes.SHA256()))
    return (PUBLIC_KEY_HEADER, public_pem_of(key)), (TIMESTAMP_HEADER, stamp), (SIGNATURE_HEADER, signature)


def current_time() -> datetime:
    """Return the time according to this machine's clock."""
    return datetime.now(UTC)


def public_pem_of(key: ec.EllipticCurvePrivateKey) -> bytes:
    """Return the public key for a private key, in the format that nodes send (PEM)."""
    return key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


def code_in(details: str) -> int:
    """Return the code in the details of a Flower error, or 0 if the details contain no code."""
    try:
        code = json.loads(details)["code"]
    except (ValueError, LookupError, TypeError):
        return 0
    return code if type(code) is int else 0


def pauses_between_tries() -> Iterator[float]:
    """Yield pauses in seconds, each about twice as long as the previous one, up to a maximum."""
    pause = FIRST_PAUSE_SECONDS
    while True:
        yield pause * random.uniform(0.8, 1.2)
        pause = min(2 * pause, LONGEST_PAUSE_SECONDS)


def _side_by_side(call: Any, numbers: Iterable[str]) -> list[Any]:
    """Return the results of parallel calls, one per object; after an error, no further call starts."""
    pool = concurrent.futures.ThreadPoolExecutor(CONCURRENT)
    try:
        return [each.result() for each in [pool.submit(call, number) for number in numbers]]
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def push_until_expired(fleet: Fleet, reply: Packed, seconds: float) -> None:
    """Push a reply, and retry until the SuperLink has all its parts or the reply has expired.

    Every attempt uses the same reply id. The node drops the reply if its run has ended, and logs the outcome.
    """
    metadata = reply.envelope.metadata
    log(INFO, "Sending: %s message (ID: %s) of run %s", metadata.message_type, metadata.message_id, metadata.run_id)
    end = time.monotonic() + metadata.created_at + metadata.ttl - time.time()
    for pause in pauses_between_tries():
        try:
            fleet.push(reply, seconds)
        except RunEndedError:
            log(INFO, "the reply %s is dropped: run %s is not running", metadata.message_id, metadata.run_id)
            return
        except (grpc.RpcError, PartError) as error:
            if getattr(error, "code", lambda: None)() == grpc.StatusCode.UNAUTHENTICATED:
                raise
            if time.monotonic() + pause >= end:
                log(ERROR, "the reply %s was lost: %s", metadata.message_id, describe(error))
                return
            log(WARNING, "the node resends the reply %s after an error: %s", metadata.message_id, describe(error))
            time.sleep(pause)
        else:
            log(INFO, "Sent successfully")
            return


def describe(error: BaseException) -> str:
    """Return a description of an error; for a gRPC error, its code and details."""
    if isinstance(error, grpc.RpcError) and hasattr(error, "code"):
        return f"{error.code().name}: {error.details()}"
    return f"{type(error).__name__}: {error}"
