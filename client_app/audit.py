"""A node's audit log: one line for each message that the node answers or refuses, written before the reply is sent.

Each line is a JSON object that contains its own hash and the hash of the previous line, so a changed, deleted or moved
line breaks the chain. A second file, the head, records the number of events and the last hash, so that truncation is
detected. The log contains no samples, labels, file names or paths. It lists the names and sizes of a message's records,
never their values.
"""

import contextlib
import fcntl
import hashlib
import json
import mmap
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from logging import ERROR, WARNING
from pathlib import Path
from typing import Any, Self

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MessageType, RecordDict
from flwr.common.logger import log

from posy.client_app.node_config import AUDIT, AUDIT_NAME, node_settings
from posy.flower import PING, ClientAppCallable, entries_of
from posy.folding import unfolded
from posy.paths import absolute
from posy.settings import NodeConfigError
from posy.strategies.run_settings import MODEL_ROUND, name_of
from posy.words import one_line

HEAD_SUFFIX = ".head"
START = "0" * 64
"""The value of ``previous`` in the first event."""
TAIL_BYTES = 1 << 14
MAX_NAMES, MAX_TEXT = 40, 100
"""Maximum number of names in a list, and of characters in a string."""
SAFE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:+-]{0,59}")
"""Pattern of the names that the log shows. Other names are hidden, because custom code could put data into them."""
RECOVERED, GAP, RUN_BEGIN = "recovered", "gap", "run-begin"
NODE_SETTINGS = "node-settings"
"""The key of the settings of local training that the node config chooses."""
BEGIN = ("time", "node", "run", "name", "submitter", "signers", "code", "settings", NODE_SETTINGS)
"""The facts in the first event of a run."""
NOTES = "_posy_audit"
"""The attribute of Flower's context that holds the notes on a message."""


class AuditError(RuntimeError):
    """The node cannot write its audit log, so it does not reply."""

    shareable = True


# -- the chain ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Head:
    """The end of a chain: the number of events and the hash of the last event. Its string form is called an anchor."""

    count: int = 0
    hash: str = START

    def __str__(self) -> str:
        return f"{self.count}:{self.hash}"

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """Parse an anchor and return its head, or None if the string is not an anchor."""
        parts = re.fullmatch(r"([0-9]{1,19}):([0-9a-f]{64})", text.strip())
        return cls(int(parts[1]), parts[2]) if parts else None


def line_of(event: Mapping[str, Any], head: Head) -> tuple[bytes, Head]:
    """Return the log line for an event that follows a chain's head, and the new head."""
    chained = {**event, "number": head.count + 1, "previous": head.hash}
    chained["hash"] = _hash(chained)
    return _canonical(chained) + b"\n", Head(head.count + 1, chained["hash"])


def _canonical(event: Mapping[str, Any]) -> bytes:
    return json.dumps(event, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode()


def _hash(event: Mapping[str, Any]) -> str:
    return hashlib.sha256(_canonical({key: value for key, value in event.items() if key != "hash"})).hexdigest()


def _event_in(line: bytes) -> dict[str, Any] | None:
    """Return the event in a line without checking its hash, or None if the line contains no event."""
    try:
        event = json.loads(line)
        is_chained = isinstance(event, dict) and isinstance(event["number"], int) and isinstance(event["previous"], str)
        return event if is_chained and isinstance(event["hash"], str) and isinstance(event["event"], str) else None
    except (ValueError, KeyError, RecursionError):
        return None


@dataclass(frozen=True)
class Checked:
    """The result of checking a log: the events in its unbroken part, the head of this part, and the first problem."""

    events: list[dict[str, Any]]
    head: Head
    line: int = 0
    """Number of the first broken line, counting from 1, or 0 if the chain is unbroken."""
    problem: str = ""
    unfinished: bool = False
    """Whether the last line is incomplete, as after a crash. The next call to :meth:`AuditLog.append` records it."""


def check_lines(lines: bytes, recorded: Head | None) -> Checked:
    """Check the chain in a log's bytes, and compare its end with the ``recorded`` head from the second file."""
    events: list[dict[str, Any]] = []
    head = Head()
    unreadable: list[bytes] = []
    *complete, last = lines.split(b"\n")
    for number, line in enumerate(complete, 1):
        if (event := _event_in(line)) is None:
            unreadable.append(line)
            continue
        if unreadable and {**event, **_recovery(unreadable)} != event:
            break
        unreadable = []
        if problem := _problem_of(event, head):
            return Checked(events, head, number, problem)
        events.append(event)
        head = Head(event["number"], event["hash"])
    if unreadable:
        first = complete.index(unreadable[0])
        return Checked(events, head, first + 1, "this line is not an event")
    if problem := _lost(events, head, recorded):
        return Checked(events, head, len(complete) + 1, problem)
    return Checked(events, head, unfinished=bool(last))


def _problem_of(event: Mapping[str, Any], head: Head) -> str:
    """Return why an event does not follow a chain's head, or an empty string if it does."""
    if event["hash"] != _hash(event):
        return "this line was changed: its hash is wrong"
    if (event["number"], event["previous"]) != (head.count + 1, head.hash):
        return "a line before this one was changed, deleted or moved"
    if event["event"] == GAP:
        expected = "an unknown number of" if event["expected"] is None else event["expected"]
        return f"events were removed before this line: the log contained only {event['found']} of {expected} events"
    return ""


def _recovery(unreadable: Iterable[bytes]) -> dict[str, Any]:
    """Return the event fields that describe the incomplete lines before the event."""
    content = b"\n".join(unreadable)
    return {"event": RECOVERED, "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def _lost(events: list[dict[str, Any]], head: Head, recorded: Head | None) -> str:
    if recorded is None:
        return "the head of the log is missing: events at the end may have been removed" if events else ""
    if recorded.count > head.count:
        return f"the log ends after event {head.count} of {recorded.count}: events were removed"
    if recorded.count and events[recorded.count - 1]["hash"] != recorded.hash:
        return f"event {recorded.count} is not the one that the head records: the log was replaced"
    return ""


def contains(checked: Checked, anchor: Head) -> bool:
    """Return whether a log still contains all events up to an anchor."""
    if anchor.count > len(checked.events):
        return False
    return (checked.events[anchor.count - 1]["hash"] if anchor.count else START) == anchor.hash


# -- the file ----------------------------------------------------------------------------------------------


class AuditLog:
    """An audit log in a file. Several threads and processes may append to it, because each append locks the file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._begun: set[str] = set()

    def append(self, *events: Mapping[str, Any]) -> None:
        """Append events, and wait until they are on disk.

        A crash may leave the last line incomplete. This line is kept, and an event records it. If the log does not end
        with the event that the head names, an event records the gap.

        Raises
        ------
        OSError
            If the log cannot be written.
        """
        with self._locked() as file:
            head, unreadable = _end_of(file)
            recorded = self.recorded()
            notes: list[Mapping[str, Any]] = []
            lines = b"\n" if unreadable and not unreadable.endswith(b"\n") else b""
            if (event := _event_in(unreadable)) and not _problem_of(event, head):  # only the newline is missing
                head = Head(event["number"], event["hash"])
            elif unreadable:
                notes.append({"time": _now(), **_recovery(unreadable.removesuffix(b"\n").split(b"\n"))})
            if recorded != head and (recorded is None or recorded.count >= head.count):
                expected = None if recorded is None else recorded.count
                notes.append({"time": _now(), "event": GAP, "expected": expected, "found": head.count})
            for entry in (*notes, *events):
                line, head = line_of(entry, head)
                lines += line
            _write(file, lines)
            getattr(os, "fdatasync", os.fsync)(file)
            self._record(head)

    def check(self) -> Checked:
        """Check the log. Raise :class:`OSError` if it cannot be read."""
        with self.path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH)
            return check_lines(file.read(), self.recorded())

    def has_begun(self, run: str) -> bool:
        """Return whether the log contains a run's first event. A positive result is cached."""
        if run not in self._begun:
            try:
                with self.path.open("rb") as file, contextlib.closing(_mapped(file.fileno())) as content:
                    match = re.search(rb'"event":"run-begin"[^\n]*"run":"%s"' % re.escape(run.encode()), content)
            except (FileNotFoundError, ValueError):  # the log is missing or empty
                match = None
            if match is None:
                return False
            self._begun.add(run)
        return True

    def recorded(self) -> Head | None:
        """Return the head in the second file, or None if it is missing or invalid. A new log has an empty head."""
        try:
            return Head.parse(self._head_path.read_text(encoding="ascii"))
        except FileNotFoundError:
            return None if self.path.exists() and self.path.stat().st_size else Head()
        except ValueError:
            return None

    @property
    def _head_path(self) -> Path:
        return self.path.with_name(self.path.name + HEAD_SUFFIX)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[int]:
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        file = os.open(self.path, flags, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield file
        finally:
            os.close(file)

    def _record(self, head: Head) -> None:
        """Overwrite the head in place. All heads have the same length, so no part of an older head remains."""
        file = os.open(self._head_path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            os.pwrite(file, f"{head.count:019d}:{head.hash}\n".encode(), 0)
        finally:
            os.close(file)


def _mapped(file: int) -> mmap.mmap:
    return mmap.mmap(file, 0, access=mmap.ACCESS_READ)


def _write(file: int, content: bytes) -> None:
    written = 0
    while written < len(content):
        written += os.write(file, content[written:])


def _end_of(file: int) -> tuple[Head, bytes]:
    """Return the head at the last line that contains an event, and all bytes of the log after this line."""
    size = os.fstat(file).st_size
    length = min(size, TAIL_BYTES)
    while True:
        tail = os.pread(file, length, size - length)
        *lines, partial = tail.split(b"\n")
        first = 0 if length == size else 1  # the beginning of the first line may be missing
        after = len(partial)
        for line in reversed(lines[first:]):
            if event := _event_in(line):
                return Head(event["number"], event["hash"]), tail[len(tail) - after :]
            after += len(line) + 1
        if length == size:
            return Head(), tail
        length = min(size, 4 * length)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


# -- the events --------------------------------------------------------------------------------------------


def log_of(node_config: Mapping[str, Any]) -> AuditLog | None:
    """Return a node's audit log, or None if the node has no log.

    By default, only a node with data keeps a log, which is stored in its ``state-dir``. If its config has the key
    ``audit``, any node keeps a log in the file that this key names.
    """
    if path := str(node_config.get(AUDIT, "")):
        return _log_at(absolute(path))
    if not node_config.get("data"):
        return None
    if state_dir := str(node_config.get("state-dir", "")):
        return _log_at(absolute(state_dir) / AUDIT_NAME)
    _warn_once()
    return None


@lru_cache
def _log_at(path: Path) -> AuditLog:
    return AuditLog(path)


@lru_cache
def _warn_once() -> None:
    log(WARNING, "this node does not keep an audit log: its node config has neither state-dir nor %s", AUDIT)


def note(context: Context, **facts: Any) -> None:
    """Add facts to the audit event of the message that the node is processing.

    Parameters
    ----------
    context : Context
        Flower's context of the message.
    **facts
        ``submitter``, ``signers`` and ``code`` describe the run. ``error`` is the type of an error that stays on the
        node. ``rule`` is the policy rule that the message violates. ``epsilon`` and ``delta`` are the privacy budget
        that the site has spent.
    """
    vars(context).setdefault(NOTES, {}).update(facts)


def notes_on(context: Context) -> dict[str, Any]:
    """Return the facts that :func:`note` has added to a message's event."""
    return dict(vars(context).get(NOTES, {}))


def record_reply(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Record the reply to a message in the node's audit log. This function is a Flower mod.

    Raises
    ------
    AuditError
        If the log cannot be written. The reply is then not sent.
    """
    audit_log = log_of(context.node_config)
    if audit_log is None:
        return call_next(message, context)
    try:
        reply = call_next(message, context)
    except Exception as error:
        record(audit_log, message, context, error)
        raise
    record(audit_log, message, context, reply)
    return reply


def record(audit_log: AuditLog, message: Message, context: Context, outcome: Message | Exception | str) -> None:
    """Record the outcome of a message: a reply, an error, or the name of the violated rule.

    Raises :class:`AuditError` if the log cannot be written.
    """
    try:
        event = event_of(message, context, outcome)
        begin = {key: event[key] for key in BEGIN if key in event}
        is_first = not audit_log.has_begun(event["run"])
        audit_log.append(*([{**begin, "event": RUN_BEGIN}] if is_first else []), event)
    except (OSError, ValueError) as error:
        log(ERROR, "the audit log %s cannot be written, so this node does not reply: %s", audit_log.path, error)
        raise AuditError("this node cannot write its audit log, so it does not reply") from None
    note(context, recorded=True)


def event_of(message: Message, context: Context, outcome: Message | Exception | str) -> dict[str, Any]:
    """Return the event for a message and its outcome, without the chain's fields."""
    notes, content = notes_on(context), _content_of(message)
    config = _entries(content, "config")
    digest, run_name = _settings_in(str(config.get("settings", "")))
    event: dict[str, Any] = {
        "time": _now(),
        "event": "reply",
        "node": one_line(str(context.node_config.get("name") or context.node_id), MAX_TEXT),
        "run": str(message.metadata.run_id),
        "name": one_line(str(run_name or config.get("run", "")), MAX_TEXT),
        "submitter": one_line(str(notes.get("submitter", "")), MAX_TEXT),
        "signers": [one_line(str(signer), MAX_TEXT) for signer in notes.get("signers", ())][:MAX_NAMES],
        "code": one_line(str(notes.get("code", "")), MAX_TEXT),
        "settings": digest,
        **_chosen_in(context.node_config),
        "type": _type_of(message, config),
        "round": _number(config.get("server-round", message.metadata.group_id)),
        "client": _number(config.get("client")),
        "received": _sizes(content),
        "decision": "accepted",
    }
    rule = notes.get("rule") or (outcome if isinstance(outcome, str) else getattr(outcome, "rule", ""))
    if rule:
        event |= {"event": "refusal", "decision": _safe(str(rule))}
    if isinstance(outcome, Exception):
        event["error"] = _safe(notes_on(context).get("error") or type(outcome).__name__)
    elif isinstance(outcome, Message) and outcome.has_error():
        event["error"] = f"code-{outcome.error.code}"
    elif isinstance(outcome, Message):
        event["sent"] = _kinds(_content_of(outcome))
        if message.metadata.message_type == MessageType.TRAIN:
            event["masked"] = "secure-round" in config
    if "error" in event and not rule:
        event |= {"event": "error", "decision": "failed"}
    return event | {key: float(notes[key]) for key in ("epsilon", "delta") if key in notes}


def _content_of(message: Message) -> RecordDict:
    """Return the unpacked content of a message, which is empty for an error."""
    unpacked = unfolded(message) if message.has_content() else message
    return unpacked.content if unpacked.has_content() else RecordDict()


def _entries(content: RecordDict, name: str) -> Mapping[str, Any]:
    entry = content.get(name)
    return entries_of(entry) if isinstance(entry, ConfigRecord) else {}


@lru_cache(maxsize=8)
def _settings_in(text: str) -> tuple[str, str]:
    """Return the SHA-256 digest of a run's settings, and the run's name."""
    if not text:
        return "", ""
    try:
        name = name_of(json.loads(text))
    except (ValueError, AttributeError, RecursionError):
        name = ""
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest(), name


def _chosen_in(node_config: Mapping[str, Any]) -> dict[str, dict[str, int | float]]:
    """Return the settings of local training in a node config as an entry of an event; empty without such settings."""
    try:
        chosen = dict(node_settings(node_config))
    except NodeConfigError:  # the node refuses the message
        return {}
    return {NODE_SETTINGS: chosen} if chosen else {}


def _type_of(message: Message, config: Mapping[str, Any]) -> str:
    """Return the type of a message. The type of a query includes its purpose."""
    kind = _safe(message.metadata.message_type)
    if kind != MessageType.QUERY:
        return kind
    if config.get(PING):
        return f"{kind}:{PING}"
    if "secure-round" in config:
        return f"{kind}:{_safe(str(config.get('secure-stage', '')))}"
    if MODEL_ROUND in config:
        return f"{kind}:answer"
    return f"{kind}:{'describe' if config.get('describe') else 'join'}"


def _number(value: Any) -> int | None:
    try:
        return int(value)
    except (TypeError, ValueError, OverflowError):
        return None


def _safe(name: str) -> str:
    return name if SAFE_NAME.fullmatch(name) else "other"


def _bytes_of(value: Any) -> int:
    if isinstance(value, (list, tuple)):
        return sum(map(_bytes_of, value))
    return (
        len(value.encode(errors="surrogatepass"))
        if isinstance(value, str)
        else len(value)
        if isinstance(value, bytes)
        else 8
    )


def _sizes(content: RecordDict) -> dict[str, int]:
    """Return the size in bytes of each record in a message's content, keyed by the record's name."""
    sizes: dict[str, int] = {}
    for name, entry in content.items():
        entries = entries_of(entry).values()
        arrays = isinstance(entry, ArrayRecord)
        size = sum(len(array.data) for array in entries) if arrays else sum(map(_bytes_of, entries))
        sizes[_safe(name)] = sizes.get(_safe(name), 0) + size
    return sizes


def _kinds(content: RecordDict) -> dict[str, Any]:
    """Return a summary of each record in a message's content, keyed by the record's name.

    A summary contains the record's size in bytes, the number of arrays, and the names of at most ``MAX_NAMES`` other
    values.
    """
    kinds: dict[str, Any] = {}
    for name, size in _sizes(content).items():
        records = [entry for key, entry in content.items() if _safe(key) == name]
        kinds[name] = {"bytes": size}
        if arrays := [len(entry) for entry in records if isinstance(entry, ArrayRecord)]:
            kinds[name]["arrays"] = sum(arrays)
        names = sorted({_safe(key) for entry in records if not isinstance(entry, ArrayRecord) for key in entry})
        if names:
            kinds[name]["names"] = names[:MAX_NAMES]
    return kinds
