"""A node's loop that survives failed calls, with the internals of Flower 1.39 that it needs beyond :mod:`internals`.

Stock Flower retries a call only if the SuperLink has not answered. After any other error it silently drops the message
or the reply, or it ends. This loop retries such calls for a while. If a message still does not arrive, the node answers
it with an error. The node keeps a reply until the SuperLink has it or no longer wants it.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from logging import ERROR, INFO, WARNING
from typing import Any

import flwr.supercore.inflatable.inflatable_utils as transfer
import grpc
from flwr.app import Error, Message
from flwr.client.grpc_rere_client import connection
from flwr.common.constant import ErrorCode
from flwr.common.logger import log
from flwr.supercore import heartbeat
from flwr.supercore.corestate import in_memory_corestate
from flwr.supercore.error import ApiErrorCode, FlowerError
from flwr.supercore.inflatable.inflatable_object import iterate_object_tree
from flwr.supercore.retry import RetryInvoker, exponential
from flwr.supercore.run import RunNotRunningException
from flwr.supernode import start_client_internal

from posy.deploy.refusals import record_error
from posy.deploy.runtime import NodeState
from posy.deploy.trusted import RULE

HEARTBEAT_SECONDS = 15
"""Seconds between two heartbeats of a node. One that is silent for twice as long counts as gone, and its key can come
back; with Flower's own 30 s both take a minute."""
TASK_SECONDS = 120
"""Half the seconds without a sign of life after which the node takes a task for dead. Its worker's end is seen at once
in another way; Flower's own 30 would cost a node that was suspended for a minute its reply."""
ACTIVATION_SECONDS = 2 * HEARTBEAT_SECONDS + 5.0
"""Seconds in which a refused key may still be accepted: those after which its last node counts as gone, and a few."""
CALL_SECONDS = 300.0
"""Seconds after which a call that is not answered has failed: a connection may be dead without either side knowing."""
PATIENCE_SECONDS = 60.0
"""Seconds for which a call is tried again after an error that may pass."""
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.2, 20
"""About how long to wait after the first failure of a call; twice as long after each further one."""
PART_SECONDS = 30.0
"""Seconds in which the worker hands in the next part of a reply."""
CONCURRENT = 6
"""Parts of a message that are under way at the same time; more than Flower's 2, as each may wait for a slow line."""
PASSING = (
    grpc.StatusCode.INTERNAL,  # Flower's word for all that its SuperLink did not expect
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.ABORTED,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
)


class Unavailable(grpc.RpcError):  # type: ignore[misc]
    """An error that Flower takes for one after which a call is to be tried again."""

    def code(self) -> grpc.StatusCode:
        """Return the code of a SuperLink that is out of reach."""
        return grpc.StatusCode.UNAVAILABLE

    def details(self) -> str:
        """Return nothing: by some words Flower would take it for another error."""
        return ""


class Invoker(RetryInvoker):
    """Flower's invoker retries calls without an answer; this one also retries after any temporary error."""

    def __init__(self, flower: RetryInvoker) -> None:
        self.__dict__.update(vars(flower))
        self.wait_gen_factory = lambda: exponential(FIRST_PAUSE_SECONDS, max_delay=LONGEST_PAUSE_SECONDS)
        self._alone = threading.Lock()
        self._refused = 0.0
        self._connected = False

    def invoke(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call, again and again if need be; one call after the other once they have failed.

        A connection that is cut after a number of bytes would cut all of them repeatedly if they ran at the same time.
        """
        kwargs.setdefault("timeout", CALL_SECONDS)
        started, tries = time.monotonic(), 0

        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal tries
            tries += 1
            try:
                with self._alone if tries > 1 else contextlib.nullcontext():
                    answer = target(*args, **kwargs)
            except grpc.RpcError as error:
                waited = time.monotonic() - started
                if self.max_tries == 1 or not self._may_pass(error, waited, kwargs["timeout"]):
                    raise
                log(WARNING, "a call to the SuperLink failed: %s", describe(error))
                raise Unavailable(describe(error)) from error
            self._connected = True
            return answer

        return super().invoke(call, *args, **kwargs)

    def _may_pass(self, error: grpc.RpcError, waited: float, timeout: float) -> bool:
        details = str(error.details() or "")
        told = FlowerError.from_json(details)
        if told is not None and told.code == ApiErrorCode.FLEET_NODE_ACTIVATION_FAILED:
            if not self._refused:
                self._refused = time.monotonic()
                log(
                    WARNING,
                    "the SuperLink does not accept this node's key: it is not registered (`posy register`), or another "
                    "node with it is online, or was moments ago. It is tried again for %g s",
                    ACTIVATION_SECONDS,
                )
            return time.monotonic() - self._refused < ACTIVATION_SECONDS
        if error.code() == grpc.StatusCode.UNAVAILABLE:
            # Flower gives up where certificates do not fit, but a cut connection can look like that too.
            return self._connected or "CERTIFICATE" not in details.upper()
        # A heartbeat is one among many; its own loop continues.
        return error.code() in PASSING and waited < min(PATIENCE_SECONDS, timeout)


class HeartbeatSender(heartbeat.HeartbeatSender):
    """Flower's, whose thread ends with the first unexpected answer, after which the node would seem to be gone."""

    def _heartbeat(self) -> None:
        try:
            super()._heartbeat()
        except heartbeat.HeartbeatFailure:
            raise
        except Exception as error:
            log(WARNING, "a sign of life did not reach the SuperLink: %s", describe(error))
            raise heartbeat.HeartbeatFailure from error


def make_steadfast(lost: threading.Event, state: NodeState) -> None:
    """Put all this into the place of what Flower has.

    ``lost`` is set when the worker has done without a reply. ``state`` receives Flower's state of the node.
    """
    make_invoker = start_client_internal._make_fleet_connection_retry_invoker
    pull = start_client_internal._pull_and_store_message
    put(start_client_internal, "_make_fleet_connection_retry_invoker", lambda **limits: Invoker(make_invoker(**limits)))
    put(start_client_internal, "_pull_and_store_message", partial(pull_or_push, pull, node_state=state))
    put(start_client_internal, "_push_messages", partial(push_replies, lost))
    put(connection, "HeartbeatSender", HeartbeatSender)
    for module in (connection, heartbeat):
        put(module, "HEARTBEAT_DEFAULT_INTERVAL", HEARTBEAT_SECONDS)
    put(in_memory_corestate, "HEARTBEAT_DEFAULT_INTERVAL", TASK_SECONDS)
    put(transfer, "get_num_workers", lambda _: CONCURRENT)


def put(module: Any, name: str, value: Any) -> None:
    """Replace the value of a name in a module; raise ``AttributeError`` if the module lacks the name."""
    getattr(module, name)
    setattr(module, name, value)


def pull_or_push(
    pull: Callable[..., int | None],
    *,
    node_state: NodeState,
    state: Any,
    receive: Callable[[], Any],
    object_store: Any,
    **parts: Any,
) -> int | None:
    """Ask for a message and take it in; return None if there is nothing to answer.

    A message that came without all its parts is answered with an error, after which it may be sent again.
    """
    node_state.flower = state
    came: list[Message] = []

    def noted() -> Any:
        received = receive()
        came.extend(received[:1] if received else ())
        return received

    reason = "its parts did not reach the node"
    try:
        run = pull(state=state, receive=noted, object_store=object_store, **parts)
    except Exception as error:
        log(ERROR, "the node could not ask the SuperLink for a message, and continues: %s", describe(error))
        run, reason = None, describe(error)
    if came and _is_unverified(came[0], state):
        record_error(came[0], parts.get("node_config") or {}, RULE)
    if run is None and came:
        _answer_lost(came[0], reason, state, object_store)
        return came[0].metadata.run_id
    # The node sends what replies there are after a message has come. One that comes later than it was waited for,
    # as after a run that was stopped, would otherwise be sent with the next message's, and so on ever after.
    with state.lock_msg_store:
        waiting = any(
            entry.message.metadata.reply_to_message_id and not entry.is_retrieved for entry in state.msg_store.values()
        )
    return 0 if run is None and waiting else run


def _is_unverified(message: Message, state: Any) -> bool:
    """Return whether Flower's node has refused a message because no trusted entity has signed the app."""
    with state.lock_msg_store:
        replies = [entry.message for entry in state.msg_store.values() if entry.message.has_error()]
    about = message.metadata.message_id
    refused = [reply for reply in replies if reply.metadata.reply_to_message_id == about]
    return any(reply.error.code == ErrorCode.INVALID_FAB for reply in refused)


def push_replies(
    lost: threading.Event,
    state: Any,
    object_store: Any,
    send: Callable[..., tuple[set[str], str]],
    push_object: Callable[..., None],
) -> None:
    """Wait for replies and hand them in; say so if there will be none."""
    while not (replies := state.get_messages(is_reply=True)):
        if lost.is_set():
            lost.clear()
            with state.lock_msg_store:
                messages = [entry.message for entry in state.msg_store.values()]
            replied = {message.metadata.reply_to_message_id for message in messages}
            for message in messages:
                if not message.metadata.reply_to_message_id and message.metadata.message_id not in replied:
                    _answer_lost(message, "its reply did not reach the node", state, object_store)
        else:
            vars(start_client_internal)["time"].sleep(0.5)  # the node's own
    for reply in replies:
        about = reply.metadata
        over = [about.message_id, about.reply_to_message_id]
        try:
            push_reply(reply, state, object_store, send, push_object)
        except RunNotRunningException:
            log(INFO, "the reply %s is dropped: run %s is not running", about.message_id, about.run_id)
        except TimeoutError as error:
            log(ERROR, "the reply %s is lost: %s", about.message_id, error)
            over = [about.message_id]
            lost.set()  # the next look answers for it
        except Exception as error:
            log(ERROR, "the reply %s is lost: %s", about.message_id, describe(error))
        finally:
            state.delete_messages(message_ids=over)
            object_store.delete(about.message_id)
    if lost.is_set():
        push_replies(lost, state, object_store, send, push_object)


def push_reply(
    reply: Message, state: Any, object_store: Any, send: Callable[..., tuple[set[str], str]], push: Callable[..., None]
) -> None:
    """Hand in one reply, again and again until the SuperLink has all of it or the reply has no time left.

    A repeated reply has the same id. The SuperLink answers with the parts that it lacks.
    """
    about = reply.metadata
    log(INFO, "Sending: %s message (ID: %s) of run %s", about.message_type, about.message_id, about.run_id)
    tree = object_store.get_object_tree(about.message_id)
    parts = dict.fromkeys(part.object_id for part in iterate_object_tree(tree))
    contents = {part: _content(object_store, part) for part in parts}
    runtime = state.get_message_processing_duration(message_id=about.reply_to_message_id)
    end = time.monotonic() + about.created_at + about.ttl - time.time()
    for pause in exponential(FIRST_PAUSE_SECONDS, max_delay=LONGEST_PAUSE_SECONDS):
        try:
            wanted, session = send(reply, tree, runtime)
            transfer.push_object_contents_from_iterable(
                ((part, content) for part, content in contents.items() if part in wanted),
                partial(push, about.run_id, session),
            )
        except (grpc.RpcError, transfer.ObjectPushError) as error:
            if time.monotonic() + pause >= end:
                raise
            log(WARNING, "the reply %s is sent again: %s", about.message_id, describe(error))
            time.sleep(pause)
        else:
            log(INFO, "Sent successfully")
            return


def _answer_lost(message: Message, reason: str, state: Any, object_store: Any) -> None:
    """Make the node answer a message with an error that says that it, or its reply, is lost."""
    for note in (state.record_message_processing_start, state.record_message_processing_end):
        note(message.metadata.message_id)
    reply = Message(Error(ErrorCode.MESSAGE_UNAVAILABLE, reason), reply_to=message)
    start_client_internal._insert_message(reply, state, object_store)


def _content(object_store: Any, part: str) -> bytes:
    """Return a part of a reply, for which the worker may need a moment."""
    for _ in _until(PART_SECONDS):
        content = object_store.get(part)
        if content != b"":
            return bytes(content)
    raise TimeoutError("the worker has not handed in all of it")


def _until(seconds: float) -> Iterator[None]:
    """Yield, with short pauses, until the seconds are over."""
    end = time.monotonic() + seconds
    while True:
        yield
        if time.monotonic() >= end:
            return
        time.sleep(0.02)


def describe(error: BaseException) -> str:
    """Return an error in one line; of one of gRPC's, its code and details."""
    if isinstance(error, grpc.RpcError) and hasattr(error, "code"):
        return f"{error.code().name}: {error.details()}"
    return f"{type(error).__name__}: {error}"
