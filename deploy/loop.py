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
"""Seconds between two heartbeats of a node. A node that is silent for twice as long is offline, and its key can
reconnect. With Flower's default of 30 s, both take a minute."""
TASK_SECONDS = 120
"""Half the seconds without a heartbeat after which the node regards a task as dead. The node detects the end of its
worker at once in another way. With Flower's default of 30 s, a node suspended for a minute would lose its reply."""
ACTIVATION_SECONDS = 2 * HEARTBEAT_SECONDS + 5.0
"""Seconds for which the node retries with a refused key, until its earlier connection is offline."""
CALL_SECONDS = 300.0
"""Timeout of a call in seconds, because neither side may notice a dead connection."""
PATIENCE_SECONDS = 60.0
"""Seconds for which the node retries a call after a temporary error."""
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.2, 20
"""Approximate first and longest pause in seconds between retries; each pause doubles the last."""
PART_SECONDS = 30.0
"""Seconds that the worker has to deliver the next part of a reply."""
CONCURRENT = 6
"""Parts of a message in transit at the same time, more than Flower's 2 because of slow networks."""
PASSING = (
    grpc.StatusCode.INTERNAL,  # Flower's code for any unexpected error of its SuperLink
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.ABORTED,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
)


class Unavailable(grpc.RpcError):  # type: ignore[misc]
    """An error after which Flower retries the call."""

    def code(self) -> grpc.StatusCode:
        """Return the code of an unreachable SuperLink."""
        return grpc.StatusCode.UNAVAILABLE

    def details(self) -> str:
        """Return an empty text, because Flower recognises other errors by their words."""
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
        """Return the result of a call, and retry it after temporary errors; only one retry runs at a time.

        A network may cut a connection after a number of bytes. It would then repeatedly cut all parallel retries.
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
        flower_error = FlowerError.from_json(details)
        if flower_error is not None and flower_error.code == ApiErrorCode.FLEET_NODE_ACTIVATION_FAILED:
            if not self._refused:
                self._refused = time.monotonic()
                log(
                    WARNING,
                    "the SuperLink does not accept this node's key: it is not registered (`posy register`), or another "
                    "node with it is online, or was moments ago. The node retries for %g s",
                    ACTIVATION_SECONDS,
                )
            return time.monotonic() - self._refused < ACTIVATION_SECONDS
        if error.code() == grpc.StatusCode.UNAVAILABLE:
            # Flower gives up if a certificate does not match, but a cut connection can cause the same error.
            return self._connected or "CERTIFICATE" not in details.upper()
        # The timeout of a heartbeat is short, because its loop sends the next one.
        return error.code() in PASSING and waited < min(PATIENCE_SECONDS, timeout)


class HeartbeatSender(heartbeat.HeartbeatSender):
    """Continues after an unexpected error, after which Flower's thread would end and the node seem offline."""

    def _heartbeat(self) -> None:
        try:
            super()._heartbeat()
        except heartbeat.HeartbeatFailure:
            raise
        except Exception as error:
            log(WARNING, "a heartbeat did not reach the SuperLink: %s", describe(error))
            raise heartbeat.HeartbeatFailure from error


def make_steadfast(lost: threading.Event, state: NodeState) -> None:
    """Replace the corresponding parts of Flower with the parts of this module.

    ``lost`` is set when the worker ends a task without a reply. ``state`` receives Flower's state of the node.
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
    """Request and store a message, and return its run; None if there is nothing to answer.

    The node answers an incomplete message with an error, and the server may send it again.
    """
    node_state.flower = state
    messages: list[Message] = []

    def receive_and_note() -> Any:
        received = receive()
        messages.extend(received[:1] if received else ())
        return received

    reason = "its parts did not reach the node"
    try:
        run = pull(state=state, receive=receive_and_note, object_store=object_store, **parts)
    except Exception as error:
        log(ERROR, "the node could not ask the SuperLink for a message, and continues: %s", describe(error))
        run, reason = None, describe(error)
    if messages and _is_unverified(messages[0], state):
        record_error(messages[0], parts.get("node_config") or {}, RULE)
    if run is None and messages:
        _answer_lost(messages[0], reason, state, object_store)
        return messages[0].metadata.run_id
    # Flower's node sends replies only after it has received a message. Without this check, a late reply, for example
    # of a stopped run, would wait for the next message, and the reply to this message would also be late.
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
    """Wait for replies and push them; answer with an error for each lost reply."""
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
            vars(start_client_internal)["time"].sleep(0.5)  # the sleep of the node's loop
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
            lost.set()  # the call below answers with an error
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
    """Push a reply, and retry until the SuperLink has all its parts or the reply has expired.

    A retried reply has the same id. The SuperLink answers with the parts that it lacks.
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
            log(WARNING, "the node sends the reply %s again: %s", about.message_id, describe(error))
            time.sleep(pause)
        else:
            log(INFO, "Sent successfully")
            return


def _answer_lost(message: Message, reason: str, state: Any, object_store: Any) -> None:
    """Make the node answer a message with an error, because the message or its reply is lost."""
    for note in (state.record_message_processing_start, state.record_message_processing_end):
        note(message.metadata.message_id)
    reply = Message(Error(ErrorCode.MESSAGE_UNAVAILABLE, reason), reply_to=message)
    start_client_internal._insert_message(reply, state, object_store)


def _content(object_store: Any, part: str) -> bytes:
    """Return a part of a reply; wait until the worker has delivered it."""
    for _ in _until(PART_SECONDS):
        content = object_store.get(part)
        if content != b"":
            return bytes(content)
    raise TimeoutError("the worker has not delivered all its parts")


def _until(seconds: float) -> Iterator[None]:
    """Yield, with short pauses, until the seconds are over."""
    end = time.monotonic() + seconds
    while True:
        yield
        if time.monotonic() >= end:
            return
        time.sleep(0.02)


def describe(error: BaseException) -> str:
    """Return a description of an error: for an error of gRPC its code and details."""
    if isinstance(error, grpc.RpcError) and hasattr(error, "code"):
        return f"{error.code().name}: {error.details()}"
    return f"{type(error).__name__}: {error}"
