"""Makes writers to the SuperLink's database take turns, and extends deadlines after an outage or a clock change.

The module uses only public SQLAlchemy events, and none of Flower's code. It relies on the tables ``task`` and ``node``
of Flower's database. Flower treats a task (a running app) as dead once ``active_until`` has passed, and marks an online
node as offline once ``online_until`` has passed.
"""

import re
import sqlite3
import threading
import time
from datetime import UTC, datetime
from typing import Any

import sqlalchemy
from sqlalchemy import Connection, Engine, event
from sqlalchemy.pool import Pool

TURN_SECONDS = 60.0
"""Seconds that a writer waits for its turn before its call fails and must be retried."""
STEP_SECONDS = 2.0
"""Posy assumes that the wall clock was set if it drifts from the monotonic clock by more than this many seconds."""
TROUBLE_SECONDS = 1.0
"""If writes fail for more than this many seconds, heartbeats may be missing. A node pauses for up to 20 s after failed
calls, so even a short failure can use up the 30 s within which the node must send a heartbeat."""
RUN_SECONDS, NODE_SECONDS = 60.0, 30.0
"""Seconds until the extended deadlines of runs and nodes expire. They are twice the heartbeat intervals."""
START_SECONDS = 300.0
"""Seconds that the process of a ServerApp may take before its first report."""

_TURN = "posy: turn"
_WRITES = re.compile(r"\s*(?:WITH\b.*?\b)?(?:(INSERT|UPDATE|DELETE|REPLACE)|CREATE|ALTER|DROP|BEGIN IMMEDIATE)\b", re.S)
_DEADLINES = re.compile(r"\b(?:active|online)_until\b")
_TABLES = re.compile(r'\b(?:FROM|JOIN|UPDATE)\s+"?(?:task|node)\b')
_EXTEND_TASKS = "UPDATE task SET active_until = ? WHERE token IS NOT NULL"
_EXTEND_TASK = "UPDATE task SET active_until = ? WHERE token = ?"
_EXTEND_NODES = "UPDATE node SET online_until = ? WHERE online_until IS NOT NULL"


class TryAgainError(Exception):
    """A call failed temporarily, and its caller should retry it."""


def can_be_retried(error: BaseException) -> bool:
    """Return whether a call that failed with this error may succeed when retried."""
    if isinstance(error, (TryAgainError, sqlalchemy.exc.TimeoutError)):
        return True
    origin = error.orig if isinstance(error, sqlalchemy.exc.OperationalError) else error
    codes = (
        sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN,
    )  # fmt: skip
    return isinstance(origin, sqlite3.Error) and getattr(origin, "sqlite_errorcode", 0) & 0xFF in codes


class Turns:
    """Serialises this process's writes to each database; readers do not wait.

    SQLite has a single lock for writers and no queue, so with many nodes, calls would fail and lose their messages. A
    connection keeps its turn from its first write until it returns to the pool, so a failed call also gives up its
    turn. Every INSERT, UPDATE, DELETE or REPLACE is part of a transaction. Python's sqlite3 does not begin a
    transaction for a statement that starts with ``WITH``, so this class does.

    Deadlines are unreliable after the SuperLink starts, after a clock change, and after failed writes. Before the next
    statement that compares deadlines, this class therefore extends the deadlines of all live nodes and live runs.
    Flower detects a dead node or run once its extended deadline has passed. If the extension fails, the call fails, and
    the caller retries it.
    """

    def __init__(self) -> None:
        self._locks: dict[str, threading.Lock] = {}
        self._failing: float | None = None
        self._gap = True  # heartbeats before the start were missed
        self._clocks = _difference()
        self._engine: Engine | None = None

    def install(self, engine: Engine | type[Engine] = Engine) -> None:
        """Serialise the writes to all of this process's databases, or to one engine's database."""
        event.listen(engine, "before_cursor_execute", self._before)
        event.listen(engine, "commit", self._on_commit)
        event.listen(engine, "handle_error", self._on_error)
        for name in ("checkin", "invalidate"):
            event.listen(engine.pool if isinstance(engine, Engine) else Pool, name, self._after)

    def give_time_to_start(self, token: str) -> None:
        """Give a task's process :data:`START_SECONDS` to start; Flower allows only 30 s."""
        if self._engine is not None:
            with self._engine.begin() as connection:
                connection.exec_driver_sql(_EXTEND_TASK, (_text_of(time.time() + START_SECONDS), token))

    def _failed_for_long(self) -> bool:
        """Return whether writes have failed for more than :data:`TROUBLE_SECONDS` without a success."""
        return self._failing is not None and time.monotonic() - self._failing > TROUBLE_SECONDS

    def _doubtful(self) -> bool:
        return self._gap or abs(_difference() - self._clocks) > STEP_SECONDS or self._failed_for_long()

    def _before(self, connection: Connection, cursor: Any, statement: str, *_: Any) -> None:
        database = connection.engine.url.database
        if connection.dialect.name != "sqlite" or database in (None, "", ":memory:"):
            return
        self._engine = connection.engine
        writes = _WRITES.match(statement)
        in_doubt = self._doubtful() and _compares_deadlines(statement)
        if writes is None and not in_doubt:
            return
        info = connection.info  # `record_info` would be a different dictionary
        if _TURN not in info:
            lock = self._locks.setdefault(str(database), threading.Lock())
            if not lock.acquire(timeout=TURN_SECONDS):
                raise TryAgainError(f"no turn to write within {TURN_SECONDS:g} s")
            info[_TURN] = lock
        if in_doubt and self._doubtful():
            self._extend(cursor)
        if writes is not None and writes[1] and not cursor.connection.in_transaction:
            cursor.execute("BEGIN")

    def _extend(self, cursor: Any) -> None:
        clocks = _difference()
        cursor.execute(_EXTEND_TASKS, (_text_of(time.time() + RUN_SECONDS),))
        cursor.execute(_EXTEND_NODES, (time.time() + NODE_SECONDS,))  # a node marked as offline stays offline
        self._clocks, self._gap = clocks, False

    def _after(self, _: Any, record: Any, *error: Any) -> None:
        if lock := record.info.pop(_TURN, None):
            lock.release()

    def _on_commit(self, connection: Connection) -> None:
        if _TURN in connection.info:
            self._gap |= self._failed_for_long()
            self._failing = None

    def _on_error(self, context: sqlalchemy.engine.ExceptionContext) -> None:
        if self._failing is None and can_be_retried(context.original_exception):
            self._failing = time.monotonic()


def _compares_deadlines(statement: str) -> bool:
    return _DEADLINES.search(statement) is not None and _TABLES.search(statement) is not None


def _difference() -> float:
    """Return wall-clock minus monotonic time in seconds; it changes when the clock is set or the machine sleeps."""
    return time.time() - time.monotonic()


def _text_of(seconds: float) -> str:
    """Return a time in the format that Flower's database stores."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(sep=" ")


TURNS = Turns()
