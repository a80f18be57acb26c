"""Changes to the internals of Flower 1.39's SuperLink, so that it loses no message and writes less to its database.

Flower's SuperLink writes to its database about two hundred times for each message of a round. SQLite has one lock for
writers and no queue. With many nodes a call fails, and its message is lost. :func:`apply_patches` applies a list of
independent changes, the savings. If Flower lacks a name that a saving needs, Posy skips the saving and logs a warning.
"""

import contextlib
import functools
import importlib
import inspect
import math
import re
import sqlite3
import threading
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from logging import ERROR, WARNING
from typing import TYPE_CHECKING, Any, TypeVar

import click
import flwr
import grpc
import sqlalchemy
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from flwr.app import Message
from flwr.common import constant
from flwr.common.logger import log
from flwr.server.superlink.linkstate import linkstate_factory, sql_linkstate
from flwr.supercore import constant as core_constant
from flwr.supercore.corestate import in_memory_corestate
from flwr.supercore.date import now
from flwr.supercore.state.schema import corestate_models, linkstate_models
from flwr.supercore.utils import uint64_to_int64
from sqlalchemy import Connection, Engine, event, func, select, update
from sqlalchemy.pool import Pool

from posy.deploy.install import install_whole
from posy.deploy.middleware import HANDLERS, REQUESTS, KnownCallers
from posy.forked import cores

if TYPE_CHECKING:
    from flwr.proto.message_pb2 import ObjectTree
    from flwr.proto.task_pb2 import Task
    from flwr.supercore.fab import Fab
    from flwr.supercore.run import Run, RunStatus

    Base = sql_linkstate.SqlLinkState
else:
    Base = object

TURN_SECONDS = 60.0
"""Seconds that a writer waits for its turn before its call fails with `try again`."""
STEP_SECONDS = 2.0
"""Seconds by which the wall clock may drift from the monotonic clock between two checks before this is a step."""
TROUBLE_SECONDS = 1.0
"""Seconds of failing writes after which heartbeats may be missing. A node pauses for up to 20 s after failed calls, so
a short failure can use up the 30 s in which the node must send a heartbeat."""
CACHE_SECONDS = 1.0
"""Seconds for which an answer of the database may be reused, and seconds between two runs of the upkeep."""
KEY_SECONDS = 60.0
"""Seconds for which the node of a public key may be reused."""
START_SECONDS = 300.0
"""Seconds that the process of a ServerApp may take until its first report."""
MOST_TIMES = 3
"""Number of times that a message is resent to a node that does not confirm it."""
AGAIN = "The database is busy, locked or full, try again."

T = TypeVar("T")


class TryAgainError(Exception):
    """A call failed for now, and its caller should retry it."""


def can_be_retried(error: BaseException) -> bool:
    """Return whether a call that failed with this error may succeed if it is retried."""
    if isinstance(error, (TryAgainError, sqlalchemy.exc.TimeoutError)):
        return True
    origin = error.orig if isinstance(error, sqlalchemy.exc.OperationalError) else error
    codes = (
        sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN,
    )  # fmt: skip
    return isinstance(origin, sqlite3.Error) and getattr(origin, "sqlite_errorcode", 0) & 0xFF in codes


# -- writers take turns: on public events of SQLAlchemy ---------------------------------------------------

_TURN = "posy: turn"
_TASKS = "posy: tasks"
_WRITES = re.compile(r"\s*(?:WITH\b.*?\b)?(?:(INSERT|UPDATE|DELETE|REPLACE)|CREATE|ALTER|DROP|BEGIN IMMEDIATE)\b", re.S)
_WRITES_TASKS = re.compile(r'\b(?:UPDATE|INTO|FROM)\s+"?task\b')


class Turns:
    """Serialises the writes of this process's connections to each database; readers do not wait.

    A connection has its turn from its first writing statement until it returns to its pool, so that a failed call
    releases the turn too. Every INSERT, UPDATE, DELETE or REPLACE is part of a transaction. Python's sqlite3 begins no
    transaction for a statement that starts with ``WITH``, so this class begins it. An error later in a call then also
    reverts the claim of a message.
    """

    def __init__(self) -> None:
        self._locks: dict[str, threading.Lock] = {}
        self._failing: float | None = None
        self.gap = False
        """Whether writes have resumed after a failure; the state resets it after it has extended all deadlines."""
        self.on_tasks: list[Callable[[], None]] = []
        """Functions to call after a transaction that has changed tasks."""

    def install(self, engine: Engine | type[Engine] = Engine) -> None:
        """Serialise the writes to all databases of this process, or to the database of one engine."""
        event.listen(engine, "before_cursor_execute", self._before)
        event.listen(engine, "commit", self._on_commit)
        event.listen(engine, "handle_error", self._on_error)
        for name in ("checkin", "invalidate"):
            event.listen(engine.pool if isinstance(engine, Engine) else Pool, name, self._after)

    def failing(self) -> bool:
        """Return whether writes have failed for more than :data:`TROUBLE_SECONDS` without a success."""
        return self._failing is not None and time.monotonic() - self._failing > TROUBLE_SECONDS

    def _before(self, connection: Connection, cursor: Any, statement: str, *_: Any) -> None:
        database = connection.engine.url.database
        if connection.dialect.name != "sqlite" or database in (None, "", ":memory:"):
            return
        if (writes := _WRITES.match(statement)) is None:
            return
        info = connection.info  # not `record_info`, which is another dictionary
        if _TURN not in info:
            lock = self._locks.setdefault(str(database), threading.Lock())
            if not lock.acquire(timeout=TURN_SECONDS):
                raise TryAgainError(f"no turn to write within {TURN_SECONDS:g} s")
            info[_TURN] = lock
        if _WRITES_TASKS.search(statement):
            info[_TASKS] = True
        if writes[1] and not cursor.connection.in_transaction:
            cursor.execute("BEGIN")

    def _after(self, _: Any, record: Any, *error: Any) -> None:
        if record.info.pop(_TASKS, None):
            for call in self.on_tasks:
                call()
        if lock := record.info.pop(_TURN, None):
            lock.release()

    def _on_commit(self, connection: Connection) -> None:
        if _TURN in connection.info:
            self.gap |= self.failing()
            self._failing = None

    def _on_error(self, context: sqlalchemy.engine.ExceptionContext) -> None:
        if self._failing is None and can_be_retried(context.original_exception):
            self._failing = time.monotonic()


TURNS = Turns()


# -- callers retry the errors that can be retried ----------------------------------------------------------


class AskAgain(grpc.ServerInterceptor):  # type: ignore[misc]
    """Answers a node's call that may succeed later with UNAVAILABLE, so that Flower's node retries it.

    A call may also fail because a clock was set and the SuperLink rejects its timestamp. Flower's answer would end the
    node, so the interceptor answers UNAVAILABLE, except for the first call of a node.
    """

    def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Any], details: grpc.HandlerCallDetails
    ) -> Any:
        """Wrap the handler of a call."""
        handler = continuation(details)
        first = details.method.endswith("/ActivateNode")

        def answer(request: Any, context: grpc.ServicerContext) -> Any:
            try:
                return handler.unary_unary(request, context if first else _Context(context))
            except Exception as error:
                if not can_be_retried(error):
                    raise
                log(WARNING, "posy: the node must retry %s: %s", details.method.rpartition("/")[2], _first_line(error))
                return context.abort(grpc.StatusCode.UNAVAILABLE, AGAIN)

        if handler is None or handler.unary_unary is None:
            return handler
        return grpc.unary_unary_rpc_method_handler(answer, handler.request_deserializer, handler.response_serializer)


class _Context:
    """The context of a call in which an old timestamp does not end the node."""

    def __init__(self, context: grpc.ServicerContext) -> None:
        self._context = context

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    def abort(self, code: grpc.StatusCode, details: str) -> Any:
        if code is grpc.StatusCode.UNAUTHENTICATED and details == "Invalid timestamp":
            log(WARNING, "posy: a node must retry a call: its clock and the SuperLink's differ too much for Flower")
            code = grpc.StatusCode.UNAVAILABLE
        return self._context.abort(code, details)


def _ask_again(request: Request, error: Exception) -> JSONResponse:
    """Answer a ServerApp or another HTTP caller with 503, so that Flower retries the call."""
    if not can_be_retried(error):
        raise error
    log(WARNING, "posy: the caller must retry %s: %s", request.url.path, _first_line(error))
    return JSONResponse({"detail": AGAIN}, status_code=503)


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def _retry_errors() -> None:
    superlink = importlib.import_module("flwr.superlink.cli.flower_superlink")
    extensions = importlib.import_module("flwr.superlink.extensions")
    run_fleet_api, configure = superlink._run_fleet_api_grpc_rere, extensions.configure_app

    def with_interceptor(*args: Any, interceptors: Sequence[Any] | None = None, **named: Any) -> grpc.Server:
        return run_fleet_api(*args, interceptors=[AskAgain(), *(interceptors or [])], **named)

    def with_handlers(app: FastAPI) -> None:
        configure(app)
        for error in (
            TryAgainError,
            sqlalchemy.exc.OperationalError,
            sqlalchemy.exc.TimeoutError,
            sqlite3.OperationalError,
        ):
            app.add_exception_handler(error, _ask_again)

    superlink._run_fleet_api_grpc_rere, extensions.configure_app = with_interceptor, with_handlers  # type: ignore[attr-defined]


def _short_ways() -> None:
    """Call the handlers of messages without FastAPI for callers that Flower has accepted."""
    extensions = importlib.import_module("flwr.superlink.extensions")
    configure = extensions.configure_app

    def with_short_ways(app: FastAPI) -> None:
        configure(app)
        factory, handlers = app.state.runtime_state_factory, app.state.runtime_handlers
        app.add_middleware(KnownCallers, state=factory.state, handlers=handlers)

    vars(extensions)["configure_app"] = with_short_ways


def _quiet() -> None:
    """Do not log successful calls that each message makes several times."""
    logging = importlib.import_module("flwr.supercore.http_logging")
    vars(logging)["ROUTINE_ACCESS_PATHS"] = logging.ROUTINE_ACCESS_PATHS | HANDLERS.keys()


def _whole_calls() -> None:
    """Make a call that claims messages or ends a run one transaction, so that the caller can retry a failed call."""

    def in_transaction(handler: Callable[..., T]) -> Callable[..., T]:
        @functools.wraps(handler)
        def call(request: Any, state: Any, *args: Any, **named: Any) -> T:
            if not isinstance(state, sql_linkstate.SqlLinkState):
                return handler(request, state, *args, **named)
            with state.session():
                return handler(request, state, *args, **named)

        return call

    for name, handlers in _WHOLE.items():
        module = importlib.import_module(name)
        for handler in handlers:
            setattr(module, handler, in_transaction(getattr(module, handler)))


def _held_requests() -> None:
    """Let a request for messages wait until one has arrived, instead of an empty answer and another request."""
    fleet = importlib.import_module("flwr.server.superlink.fleet.message_handler.message_handler")
    runtime = importlib.import_module("flwr.superlink.servicer.runtime.runtime_handlers")
    for module, asking, sending in ((fleet, NODES, SERVERS), (runtime, SERVERS, NODES)):
        vars(module)["pull_messages"] = ARRIVALS.hold(asking, module.pull_messages)
        vars(module)["push_messages"] = ARRIVALS.announce(sending, module.push_messages)


_WHOLE = {
    "flwr.server.superlink.fleet.message_handler.message_handler": {"pull_messages": "request state store"},
    "flwr.superlink.servicer.runtime.runtime_handlers": {
        "push_messages": "request state task",
        "pull_messages": "request state task",
        "push_task_output": "request state task",
    },
}


# -- requests wait for messages --------------------------------------------------------------------------

NODES, SERVERS = "nodes", "ServerApps"
"""The receivers of messages."""
HOLD_SECONDS = 1.0
"""Longest time that a request for messages waits."""
GATHER_SECONDS = 0.05
"""Longest time that a ServerApp's request waits for further replies after the first: an answer takes ten queries."""
HELD_NODES, HELD_SERVERS = 500, 16
"""Number of nodes and of ServerApps whose requests may wait; Flower has 1,000 and 40 threads for them."""


class Arrivals:
    """Wakes the requests that wait for messages when all objects of a message have arrived."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._counts = {NODES: 0, SERVERS: 0}
        self._receivers: dict[str, str] = {}
        """Receivers of the messages whose objects a session of Flower collects."""
        self._places = {
            NODES: threading.BoundedSemaphore(HELD_NODES),
            SERVERS: threading.BoundedSemaphore(HELD_SERVERS),
        }
        self._held: set[int] = set()
        """Nodes whose requests wait."""

    def hold(self, asking: str, handler: Callable[..., T]) -> Callable[..., T]:
        """Repeat a handler of requests for messages until its answer has messages or the time is over."""

        @functools.wraps(handler)
        def call(request: Any, state: Any, *args: Any, **named: Any) -> T:
            node = request.node.node_id if asking == NODES else 0
            waits = isinstance(state, _Objects) and self._enter(asking, node)
            end = time.monotonic() + HOLD_SECONDS
            try:
                while True:
                    count = self._counts[asking]
                    answer: Any = handler(request, state, *args, **named)
                    if answer.messages_list or not waits or time.monotonic() >= end:
                        return answer
                    self._wait(asking, count + 1, end - time.monotonic())
                    if asking == SERVERS:
                        self._wait(asking, count + len(request.message_ids), GATHER_SECONDS)
            finally:
                if waits:
                    self._leave(asking, node)

        return call

    def announce(self, receivers: str, handler: Callable[..., T]) -> Callable[..., T]:
        """Wrap a handler that stores messages: their receivers are woken when their objects have arrived."""

        @functools.wraps(handler)
        def call(request: Any, state: Any, *args: Any, **named: Any) -> T:
            answer: Any = handler(request, state, *args, **named)
            if answer.objects_to_push:
                with self._condition:
                    self._receivers[answer.session_id] = receivers
            else:
                self._wake(receivers)
            return answer

        return call

    def receivers_of(self, session: str) -> str | None:
        """Return the receivers of the messages whose objects a session collects."""
        return self._receivers.get(session)

    def arrived(self, receivers: str | None) -> None:
        """Wake the receivers of messages that have arrived; None: all."""
        for each in (receivers,) if receivers else (NODES, SERVERS):
            self._wake(each)

    def ended(self, session: str) -> None:
        """Forget a session that has ended."""
        with self._condition:
            self._receivers.pop(session, None)

    def _enter(self, asking: str, node: int) -> bool:
        """Return whether a request may wait: one of each node, and a limited number in all."""
        with self._condition:
            if node in self._held or not self._places[asking].acquire(blocking=False):
                return False
            self._held |= {node} if node else set()
            return True

    def _leave(self, asking: str, node: int) -> None:
        with self._condition:
            self._held.discard(node)
            self._places[asking].release()

    def _wait(self, asking: str, count: int, seconds: float) -> None:
        """Wait until a number of messages have arrived for some receivers since the start, or the time is over."""
        with self._condition:
            self._condition.wait_for(lambda: self._counts[asking] >= count, seconds)

    def _wake(self, receivers: str) -> None:
        with self._condition:
            self._counts[receivers] += 1
            self._condition.notify_all()


ARRIVALS = Arrivals()


# -- the state of the SuperLink ---------------------------------------------------------------------------


class AnswerCache:
    """Answers of the database that may be reused for some seconds, until a change clears them."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._answers: dict[Any, tuple[float, Any]] = {}
        self._changes = 0
        self._lock = threading.Lock()

    def get(self, key: Any, read: Callable[[], T]) -> T:
        """Return the stored answer for a key, or read and store it; an empty answer is not stored."""
        with self._lock:
            at, answer = self._answers.get(key, (-math.inf, None))
            changes = self._changes
        if time.monotonic() - at < self._seconds:
            return answer
        at, answer = time.monotonic(), read()
        if answer:
            with self._lock:
                if changes == self._changes:  # otherwise the answer may be older than the change
                    self._answers[key] = at, answer
        return answer

    def forget(self) -> None:
        """Clear all answers."""
        with self._lock:
            self._changes += 1
            self._answers.clear()


class _EachSecond(Base):
    """Runs deferred upkeep in a thread once a second."""

    def initialize(self, log_queries: bool = False) -> list[str]:
        tables = super().initialize(log_queries)
        threading.Thread(target=self._go_on, name="posy-upkeep", daemon=True).start()
        return tables

    def _go_on(self) -> None:
        while True:
            for job in self._jobs():
                try:
                    job()
                except Exception as error:
                    if not can_be_retried(error):
                        log(ERROR, "posy: the SuperLink's upkeep has failed", exc_info=error)
            time.sleep(CACHE_SECONDS)

    def _jobs(self) -> Iterator[Callable[[], None]]:
        yield from ()


class _Deadlines(_EachSecond):
    """Declares runs and nodes dead only while the clock and the database are reliable.

    Deadlines are in doubt when the SuperLink starts, when the clock was set, and when writes have failed. The upkeep
    then extends the deadlines of all live nodes and runs by one patience, after which a dead one is detected.
    Until the extension is written, callers retry.
    """

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self._begun = False
        self._clocks = _difference()

    def _doubtful(self) -> bool:
        stepped = abs(_difference() - self._clocks) > STEP_SECONDS
        return not self._begun or stepped or TURNS.gap or TURNS.failing()

    def _jobs(self) -> Iterator[Callable[[], None]]:
        yield from super()._jobs()
        yield self._look_at_deadlines

    def _look_at_deadlines(self) -> None:
        clocks = _difference()
        if self._doubtful():
            self._prolong()
            self._begun, TURNS.gap = True, False
        self._clocks = clocks
        task = corestate_models.Task
        with self.session() as session:
            expired = select(task.task_id).where(task.token.is_not(None), task.active_until < now()).limit(1)
            if session.scalar(expired) is None:
                return
        super()._cleanup_expired_task_tokens()

    def _prolong(self) -> None:
        node, task = linkstate_models.Node, corestate_models.Task
        patience = constant.HEARTBEAT_PATIENCE
        until = now().timestamp() + patience * node.heartbeat_interval
        alive = update(node).where(node.status == core_constant.NodeStatus.ONLINE).values(online_until=until)
        end = now() + timedelta(seconds=patience * constant.HEARTBEAT_DEFAULT_INTERVAL)
        running = update(task).where(task.token.is_not(None), task.finished_at.is_(None)).values(active_until=end)
        with self.session() as session:
            session.execute(alive)
            session.execute(running)

    def _cleanup_expired_task_tokens(self) -> None:
        """Do nothing; the upkeep thread cleans up."""

    def _check_and_tag_offline_nodes(self, node_ids: list[int] | None = None) -> None:
        if not self._doubtful():
            super()._check_and_tag_offline_nodes(node_ids)

    def get_task_by_token(self, token: str) -> "Task | None":
        return self._or_again(super().get_task_by_token(token))

    def acknowledge_task_heartbeat(self, task_id: int) -> bool:
        return self._or_again(super().acknowledge_task_heartbeat(task_id))

    def get_message_res(self, message_ids: set[str], run_id: int) -> list[Message]:
        if self._doubtful():
            raise TryAgainError("the deadlines of the nodes are not reliable yet")
        return super().get_message_res(message_ids, run_id)

    def _or_again(self, answer: T) -> T:
        if not answer and self._doubtful():
            raise TryAgainError("the deadline of the run is not reliable yet")
        return answer


def _difference() -> float:
    """Return wall clock minus monotonic clock in seconds; it changes when the clock is set or the machine sleeps."""
    return time.time() - time.monotonic()


class _Traffic(_EachSecond):
    """Sums the bytes and seconds of a run in memory and writes them once a second."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self._sums: dict[int, _Sums] = {}
        self._sums_lock = threading.Lock()

    def store_traffic(self, run_id: int, *, bytes_sent: int, bytes_recv: int) -> None:
        if min(bytes_sent, bytes_recv) < 0 or bytes_sent == bytes_recv == 0:
            super().store_traffic(run_id, bytes_sent=bytes_sent, bytes_recv=bytes_recv)  # raises the error
        self._add(run_id, _Sums(bytes_sent, bytes_recv))

    def add_clientapp_runtime(self, run_id: int, runtime: float) -> None:
        self._add(run_id, _Sums(seconds=runtime))

    def get_run_info(self, **filters: Any) -> "Sequence[Run]":
        runs = super().get_run_info(**filters)
        with self._sums_lock:
            for run in runs:
                if sums := self._sums.get(run.run_id):
                    run.bytes_sent += sums.sent
                    run.bytes_recv += sums.received
                    run.clientapp_runtime += sums.seconds
        return runs

    def _add(self, run_id: int, more: "_Sums") -> None:
        with self._sums_lock:
            self._sums[run_id] = self._sums.get(run_id, _Sums()) + more

    def _jobs(self) -> Iterator[Callable[[], None]]:
        yield from super()._jobs()
        yield self._write_sums

    def _write_sums(self) -> None:
        with self._sums_lock:
            written = dict(self._sums)
        for run_id, sums in written.items():
            with contextlib.suppress(ValueError), self.session():  # the run was deleted
                if sums.sent or sums.received:
                    super().store_traffic(run_id, bytes_sent=sums.sent, bytes_recv=sums.received)
                if sums.seconds:
                    super().add_clientapp_runtime(run_id, sums.seconds)
            with self._sums_lock:
                if (unwritten := self._sums[run_id] - sums) == _Sums():
                    del self._sums[run_id]
                else:
                    self._sums[run_id] = unwritten


@dataclass(frozen=True)
class _Sums:
    sent: int = 0
    received: int = 0
    seconds: float = 0.0

    def __add__(self, other: "_Sums") -> "_Sums":
        return _Sums(self.sent + other.sent, self.received + other.received, self.seconds + other.seconds)

    def __sub__(self, other: "_Sums") -> "_Sums":
        return self + _Sums(-other.sent, -other.received, -other.seconds)


class _Keys(Base):
    """Looks up the node of a key once a minute, not in each call; only :meth:`delete_node` changes the answer."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self._keys = AnswerCache(KEY_SECONDS)

    def get_node_id_by_public_key(self, public_key: bytes) -> int | None:
        return self._keys.get(public_key, functools.partial(super().get_node_id_by_public_key, public_key))

    def delete_node(self, owner_aid: str, node_id: int) -> None:
        super().delete_node(owner_aid, node_id)
        self._keys.forget()


class _Tasks(Base):
    """Reads the state of a run once a second, or after a task has changed, not in each call."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self._tasks = AnswerCache(CACHE_SECONDS)
        TURNS.on_tasks.append(self._tasks.forget)

    def get_run_status(self, run_ids: set[int]) -> "dict[int, RunStatus]":
        key = frozenset(run_ids)
        return dict(self._tasks.get(key, functools.partial(super().get_run_status, run_ids)))

    def get_task_by_token(self, token: str) -> "Task | None":
        return self._tasks.get(token, functools.partial(super().get_task_by_token, token))


class _Claims(Base):
    """Looks for messages before it claims them, because most polls of nodes and ServerApps find none."""

    def get_message_ins(self, node_id: int, limit: int | None, *, run_id: int | None = None) -> list[Message]:
        message = linkstate_models.MessageIns
        waiting = select(message.message_id).where(
            message.dst_node_id == uint64_to_int64(node_id),
            message.delivered_at == "",
            message.created_at + message.ttl > now().timestamp(),
        )
        if run_id is not None:
            waiting = waiting.where(message.run_id == uint64_to_int64(run_id))
        with self.session() as session:
            if session.scalar(waiting.limit(1)) is None:
                return []
            return super().get_message_ins(node_id, limit, run_id=run_id)

    def get_message_res(self, message_ids: set[str], run_id: int) -> list[Message]:
        """Return the replies; claim none if all messages are valid, all nodes are online, and no reply is waiting."""
        message, reply, node = linkstate_models.MessageIns, linkstate_models.MessageRes, linkstate_models.Node
        time_now = now().timestamp()
        well = select(func.count()).select_from(message).join(node, node.node_id == message.dst_node_id)
        well = well.where(
            message.message_id.in_(message_ids),
            message.run_id == uint64_to_int64(run_id),
            message.created_at + message.ttl > time_now,
            node.status != core_constant.NodeStatus.UNREGISTERED,
            node.online_until >= time_now,
        )
        replied = select(reply.message_id).where(reply.reply_to_message_id.in_(message_ids), reply.delivered_at == "")
        with self.session() as session:
            if session.scalar(replied.limit(1)) is None and session.scalar(well) == len(message_ids):
                return []
            return super().get_message_res(message_ids, run_id)


class _Unreceived(Base):
    """Resends messages that have not arrived.

    A node or ServerApp confirms a message when it has all objects of the message. Flower then deletes the objects, and
    the receiver starts to work. A receiver that polls before it has confirmed its message has not received it.
    """

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self._handed: dict[int, dict[str, Message]] = {}
        self._times: dict[str, int] = {}
        self._answers: dict[str, Message] = {}

    def get_message_ins(self, node_id: int, limit: int | None, *, run_id: int | None = None) -> list[Message]:
        if run_id is not None:  # a ServerApp
            return super().get_message_ins(node_id, limit, run_id=run_id)
        handed = self._handed.setdefault(node_id, {})
        for number, message in list(handed.items()):
            if self._is_lacked(number):
                self._times[number] = self._times.get(number, 0) + 1
                log(WARNING, "posy: node %s has not received message %s; the SuperLink sends it again", node_id, number)
                return [message]
            handed.pop(number, None)
            self._times.pop(number, None)
        messages = super().get_message_ins(node_id, limit, run_id=run_id)
        handed |= {message.metadata.message_id: message for message in messages}
        return messages

    def get_message_res(self, message_ids: set[str], run_id: int) -> list[Message]:
        for number, answer in list(self._answers.items()):
            if answer.metadata.message_id not in self.object_store:
                self._answers.pop(number, None)
        again = [answer for number, answer in list(self._answers.items()) if number in message_ids]
        new = super().get_message_res(message_ids - {answer.metadata.reply_to_message_id for answer in again}, run_id)
        self._answers |= {reply.metadata.reply_to_message_id: reply for reply in new}
        return again + new

    def _is_lacked(self, number: str) -> bool:
        if number not in self.object_store or self._times.get(number, 0) >= MOST_TIMES:
            return False
        reply = linkstate_models.MessageRes
        with self.session() as session:
            if session.scalar(select(reply.message_id).where(reply.reply_to_message_id == number)) is not None:
                return False  # an error reply needs no objects
            return _is_claimed(self, number)


def _is_claimed(state: Base, number: str) -> bool:
    """Return whether a message exists and is claimed; the claim is reverted if its call failed."""
    row = state.get_valid_message_ins(number)
    return row is not None and row["delivered_at"] != ""


class _Objects(_EachSecond):
    """Keeps the objects of messages in memory, and the list of objects that are still to arrive.

    The messages in transit are lost when the SuperLink ends, and the ServerApp sends them again. A message or reply is
    delivered when all its objects have arrived. Otherwise its receiver would wait for the missing objects, and a
    ServerApp would not poll the other nodes meanwhile.
    """

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self._object_push_sessions: dict[str, Any] = {}
        self._object_push_session_by_root: dict[str, str] = {}
        self._lock_object_push_sessions = threading.RLock()
        self._overdue: set[str] = set()
        self._kept: dict[int | str, list[Message]] = {}
        """Claimed messages by node, and claimed replies by the id of their message; objects may be missing."""

    def get_message_ins(self, node_id: int, limit: int | None, *, run_id: int | None = None) -> list[Message]:
        complete = self._take_complete(node_id, limit=limit)
        claimed = [message for message in complete if _is_claimed(self, message.metadata.message_id)]
        return claimed or self._take_complete(node_id, super().get_message_ins(node_id, limit, run_id=run_id), limit)

    def get_message_res(self, message_ids: set[str], run_id: int) -> list[Message]:
        complete = [reply for number in message_ids for reply in self._take_complete(number)]
        for reply in super().get_message_res(message_ids - self._kept.keys(), run_id):
            complete += self._take_complete(reply.metadata.reply_to_message_id, [reply])
        return complete

    def _take_complete(self, key: int | str, new: Sequence[Message] = (), limit: int | None = None) -> list[Message]:
        """Return at most ``limit`` complete messages, stored under a key or new, and store the other messages."""
        with self._lock_object_push_sessions:
            stored = [
                message for message in self._kept.pop(key, ()) if message.metadata.message_id in self.object_store
            ]
            complete: list[Message] = []
            waiting: list[Message] = []
            for message in (*stored, *new):
                (waiting if self._lacks_objects(message.metadata.message_id) else complete).append(message)
            if limit is not None:
                waiting, complete = waiting + complete[limit:], complete[:limit]
            if waiting:
                self._kept[key] = waiting
            return complete

    def _lacks_objects(self, number: str) -> bool:
        session = self._object_push_sessions.get(self._object_push_session_by_root.get(number, ""))
        return session is not None and bool(session.pending_object_ids)

    def start_session(self, run_id: int) -> str:
        return _Memory.start_session(self, run_id)

    def delete_sessions_in_run(self, run_id: int) -> None:
        _Memory.delete_sessions_in_run(self, run_id)

    def preregister_object_tree(self, object_tree: "ObjectTree", session_id: str) -> list[str]:
        return _Memory.preregister_object_tree(self, object_tree, session_id)

    def store_object(self, run_id: int, session_id: str, object_id: str, object_content: bytes) -> bool:
        receivers = ARRIVALS.receivers_of(session_id)
        stored = _Memory.store_object(self, run_id, session_id, object_id, object_content)
        with self._lock_object_push_sessions:
            session = self._object_push_sessions.get(session_id)
            complete = session is None or not session.pending_object_ids
        if stored and complete:
            ARRIVALS.arrived(receivers)
        # A sender that has missed the first answer sends the object again.
        return stored or bool(self.object_store.get(object_id))

    def get_object(self, run_id: int, object_id: str) -> bytes | None:
        return _Memory.get_object(self, run_id, object_id)

    def _cleanup_push_session(self, session_id: str, *, cleanup_messages: bool) -> None:
        _Memory._cleanup_push_session(self, session_id, cleanup_messages=cleanup_messages)
        ARRIVALS.ended(session_id)

    def _on_push_session_expired(self, message_object_ids: set[str]) -> None:
        """Delete the messages later, because the holder of the session lock may not wait for a turn to write."""
        self._overdue |= message_object_ids

    def _jobs(self) -> Iterator[Callable[[], None]]:
        yield from super()._jobs()
        yield self._end_sessions
        yield self._delete_overdue

    def _end_sessions(self) -> None:
        """End expired sessions, because Flower ends a session only in a call for one of its objects."""
        with self._lock_object_push_sessions:
            for number, session in list(self._object_push_sessions.items()):
                if session.expires_at <= now():
                    self._cleanup_push_session(number, cleanup_messages=bool(session.pending_object_ids))

    def _delete_overdue(self) -> None:
        if overdue := set(self._overdue):
            super()._on_push_session_expired(overdue)
            with self._lock_object_push_sessions:
                self._overdue -= overdue


class _Apps(Base):
    """Installs the code of a run before a ServerApp receives it, so that two ServerApps do not install it at once."""

    def get_fab(self, fab_hash: str) -> "Fab | None":
        if fab := super().get_fab(fab_hash):
            try:
                install_whole(fab)
            except (OSError, ValueError, click.ClickException, zipfile.BadZipFile) as error:
                log(ERROR, "posy: Flower must install the code %s itself: %s", fab_hash, error)
        return fab


class _Starts(Base):
    """Starts at most as many ServerApps at once as the machine has cores; the next one waits until one of them runs.

    Flower starts all waiting ServerApps at once. It restarts each ServerApp that has not reported after 30 seconds.
    With a dozen runs on a busy machine, the processes soon become too many for any to report in time.
    """

    def claim_task(self, task_id: int) -> str | None:
        task = corestate_models.Task
        starting = (task.starting_at.is_not(None), task.running_at.is_(None), task.finished_at.is_(None))
        with self.session() as session:
            if (session.scalar(select(func.count()).where(*starting)) or 0) >= cores():
                return None
            if token := super().claim_task(task_id):
                until = now() + timedelta(seconds=START_SECONDS)
                session.execute(update(task).where(task.token == token).values(active_until=until))
        return token


class _Nonces(Base):
    """Keeps the numbers of signed requests in memory: the executor of apps signs five a second, each once.

    A SuperLink that is started again accepts a request of the last five minutes a second time. Only this machine's
    administrator can record such a request.
    """

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.nonce_store: dict[tuple[str, str], float] = {}
        self.lock_nonce_store = threading.Lock()

    def reserve_nonce(self, namespace: str, nonce: str, expires_at: float) -> bool:
        return _Memory.reserve_nonce(self, namespace, nonce, expires_at)

    def _cleanup_expired_nonces(self) -> None:
        _Memory._cleanup_expired_nonces(self)


_Memory: Any = in_memory_corestate.InMemoryCoreState


def _objects_in_memory() -> None:
    loader = importlib.import_module("flwr.superlink.config_loader")
    factory = loader.ObjectStoreFactory
    vars(loader)["ObjectStoreFactory"] = lambda database: factory(core_constant.FLWR_IN_MEMORY_DB_NAME)


# -- the savings and the names of Flower that they use -----------------------------------------------------


@dataclass(frozen=True)
class Patch:
    """A change of Flower's SuperLink."""

    name: str
    needs: Mapping[str, str | None]
    """The names of Flower that the saving uses, as ``module:name``, with the parameters of functions."""
    state: type | None = None
    """The mix-in class for the SuperLink's state."""
    use: Callable[[], object] = lambda: None


def apply_patches() -> None:
    """Apply the savings, before the SuperLink of this process starts, so that it writes less and loses no message."""
    TURNS.install()
    kinds = []
    for saving in PATCHES:
        if missing := missing_name(saving.needs):
            log(WARNING, "posy: in Flower %s %s: the SuperLink runs without %s", flwr.__version__, missing, saving.name)
            continue
        saving.use()
        kinds += [saving.state] if saving.state else []
    vars(linkstate_factory)["SqlLinkState"] = patched_state(*kinds)


def patched_state(*kinds: type) -> type[sql_linkstate.SqlLinkState]:
    """Return the class of a SuperLink's state with the mix-in classes ``kinds``."""
    return type("LinkState", (*kinds, sql_linkstate.SqlLinkState), {})


def missing_name(needs: Mapping[str, str | None]) -> str:
    """Describe the first name that Flower lacks or that has other parameters; empty if Flower has all names."""
    for path, parameters in needs.items():
        module, _, name = path.partition(":")
        try:
            value: Any = importlib.import_module(module)
            for part in name.split("."):
                value = getattr(value, part)
        except (ImportError, AttributeError):
            return f"{path} is missing"
        if parameters is not None and (actual := " ".join(inspect.signature(value).parameters)) != parameters:
            return f"{path} takes ({actual}), not ({parameters})"
    return ""


_STATE = "flwr.server.superlink.linkstate.sql_linkstate:SqlLinkState"
_MEMORY = "flwr.supercore.corestate.in_memory_corestate:InMemoryCoreState"
_NODE = "flwr.supercore.state.schema.linkstate_models:Node"
_MESSAGE = "flwr.supercore.state.schema.linkstate_models:MessageIns"
_REPLY = "flwr.supercore.state.schema.linkstate_models:MessageRes"
_TASK = "flwr.supercore.state.schema.corestate_models:Task"
_SECOND = {
    "flwr.server.superlink.linkstate.linkstate_factory:SqlLinkState": "database_path federation_manager object_store",
    f"{_STATE}.initialize": "self log_queries",
    f"{_STATE}.session": "self",
}
_PUSH_SESSIONS = {
    "start_session": "self run_id",
    "delete_sessions_in_run": "self run_id",
    "preregister_object_tree": "self object_tree session_id",
    "store_object": "self run_id session_id object_id object_content",
    "get_object": "self run_id object_id",
    "_cleanup_push_session": "self session_id cleanup_messages",
    "_on_push_session_expired": "self message_object_ids",
}
PATCHES = (
    Patch(
        "errors that the caller retries",
        {
            "flwr.superlink.cli.flower_superlink:_run_fleet_api_grpc_rere": (
                "address state_factory objectstore_factory enable_supernode_auth certificates interceptors"
            ),
            "flwr.superlink.extensions:configure_app": "app",
        },
        use=_retry_errors,
    ),
    Patch(
        "calls of messages without FastAPI",
        {
            "flwr.superlink.extensions:configure_app": "app",
            **{f"flwr.superlink.servicer.runtime.runtime_handlers:{name}": "request state task" for name in REQUESTS},
        },
        use=_short_ways,
    ),
    Patch("a short log", {"flwr.supercore.http_logging:ROUTINE_ACCESS_PATHS": None}, use=_quiet),
    Patch(
        "calls that are one transaction",
        {f"{module}:{name}": words for module, names in _WHOLE.items() for name, words in names.items()},
        use=_whole_calls,
    ),
    Patch(
        "requests that wait for a message",
        {
            "flwr.server.superlink.fleet.message_handler.message_handler:push_messages": "request state",
            **{f"{module}:pull_messages": words["pull_messages"] for module, words in _WHOLE.items()},
            **{
                f"{module}:push_messages": words["push_messages"]
                for module, words in _WHOLE.items()
                if "push_messages" in words
            },
        },
        use=_held_requests,
    ),
    Patch(
        "resending of messages that have not arrived",
        {
            f"{_STATE}.get_message_ins": "self node_id limit run_id",
            f"{_STATE}.get_message_res": "self message_ids run_id",
            f"{_STATE}.get_valid_message_ins": "self message_id",
            f"{_STATE}.object_store": None,
            "flwr.supercore.object_store:ObjectStore.__contains__": "self object_id",
            f"{_REPLY}.message_id": None,
            f"{_REPLY}.reply_to_message_id": None,
        },
        _Unreceived,
    ),
    Patch(
        "the objects of messages in memory",
        {
            **_SECOND,
            **{f"{kind}.{name}": words for kind in (_STATE, _MEMORY) for name, words in _PUSH_SESSIONS.items()},
            "flwr.superlink.config_loader:ObjectStoreFactory": "database",
            "flwr.supercore.constant:FLWR_IN_MEMORY_DB_NAME": None,
            f"{_STATE}.get_message_ins": "self node_id limit run_id",
            f"{_STATE}.get_message_res": "self message_ids run_id",
            f"{_STATE}.get_valid_message_ins": "self message_id",
            "flwr.supercore.object_store:ObjectStore.__contains__": "self object_id",
        },
        _Objects,
        _objects_in_memory,
    ),
    Patch(
        "the numbers of signed requests in memory",
        {
            **{f"{kind}.reserve_nonce": "self namespace nonce expires_at" for kind in (_STATE, _MEMORY)},
            f"{_MEMORY}._cleanup_expired_nonces": "self",
        },
        _Nonces,
    ),
    Patch(
        "code installed in advance",
        {
            f"{_STATE}.get_fab": "self fab_hash",
            "flwr.cli.install:install_from_fab": "fab_file install_dir skip_prompt",
        },
        _Apps,
    ),
    Patch(
        "time for ServerApps to start",
        {
            f"{_STATE}.claim_task": "self task_id",
            f"{_STATE}.session": "self",
            **dict.fromkeys(
                f"{_TASK}.{name}" for name in ("token", "active_until", "starting_at", "running_at", "finished_at")
            ),
        },
        _Starts,
    ),
    Patch(
        "run states kept for a second",
        {f"{_STATE}.get_run_status": "self run_ids", f"{_STATE}.get_task_by_token": "self token"},
        _Tasks,
    ),
    Patch(
        "node keys kept for a minute",
        {
            f"{_STATE}.get_node_id_by_public_key": "self public_key",
            f"{_STATE}.delete_node": "self owner_aid node_id",
        },
        _Keys,
    ),
    Patch(
        "a look before messages are claimed",
        {
            f"{_STATE}.get_message_ins": "self node_id limit run_id",
            f"{_STATE}.get_message_res": "self message_ids run_id",
            f"{_STATE}.session": "self",
            **dict.fromkeys(f"{_NODE}.{name}" for name in ("node_id", "status", "online_until")),
            **dict.fromkeys(
                f"{_MESSAGE}.{name}"
                for name in ("message_id", "run_id", "dst_node_id", "delivered_at", "created_at", "ttl")
            ),
            **dict.fromkeys(f"{_REPLY}.{name}" for name in ("message_id", "reply_to_message_id", "delivered_at")),
            "flwr.supercore.constant:NodeStatus.UNREGISTERED": None,
        },
        _Claims,
    ),
    Patch(
        "traffic written once a second",
        {
            **_SECOND,
            f"{_STATE}.store_traffic": "self run_id bytes_sent bytes_recv",
            f"{_STATE}.add_clientapp_runtime": "self run_id runtime",
            f"{_STATE}.get_run_info": "self run_ids statuses flwr_aids federation_ids order_by ascending limit",
        },
        _Traffic,
    ),
    Patch(
        "deadlines that survive a change of the clock, checked once a second",
        {
            **_SECOND,
            f"{_STATE}._cleanup_expired_task_tokens": "self",
            f"{_STATE}._check_and_tag_offline_nodes": "self node_ids",
            f"{_STATE}.get_task_by_token": "self token",
            f"{_STATE}.acknowledge_task_heartbeat": "self task_id",
            f"{_STATE}.get_message_res": "self message_ids run_id",
            **dict.fromkeys(f"{_NODE}.{name}" for name in ("status", "online_until", "heartbeat_interval")),
            **dict.fromkeys(f"{_TASK}.{name}" for name in ("task_id", "token", "active_until", "finished_at")),
            "flwr.supercore.constant:NodeStatus.ONLINE": None,
            "flwr.common.constant:HEARTBEAT_PATIENCE": None,
            "flwr.common.constant:HEARTBEAT_DEFAULT_INTERVAL": None,
        },
        _Deadlines,
    ),
)
