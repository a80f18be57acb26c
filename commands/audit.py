"""`posy audit`: check the hash chain of a node's audit log, and print the events."""

import json
import sys
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from posy.client_app.audit import NODE_SETTINGS, AuditLog, Checked, Head, contains
from posy.client_app.node_config import AUDIT_NAME
from posy.listing import print_table
from posy.server_app.progress import size
from posy.settings import SettingsError

CHOSEN = "node settings"
COLUMNS = (
    "event", "time", "node", "run", "submitter", CHOSEN, "message", "round", "client", "sent", "bytes", "decision"
)  # fmt: skip
"""The columns of the table. A log of a node without settings has no column for them."""
BROKEN = 1
"""Exit status if the chain is broken, or if the log does not contain the events of an anchor."""


def show(path: Path, run: str, since: str, anchor: str, *, as_json: bool) -> int:
    """Check a log, print its events and the result of the check, and return the exit status.

    Parameters
    ----------
    path : Path
        The log, or the directory that contains it.
    run : str
        Print only the events of the run with this id or name; empty: all runs.
    since : str
        Print only the events since this UTC time; empty: all events.
    anchor : str
        An anchor from an earlier check, whose events the log must still contain; empty: none.
    as_json : bool
        Whether to print each event as JSON.

    Raises
    ------
    SettingsError
        If the log cannot be read, or an argument is malformed.
    """
    log, anchor_head = _log_at(path), _anchor(anchor)
    first = _moment(since)
    checked = _check(log)
    events = [event for event in checked.events if _is_wanted(event, run, first)]
    if as_json:
        for event in events:
            print(json.dumps(event))
    elif events:
        cells = [_cells(event) for event in events]
        columns = [name for name in COLUMNS if name != CHOSEN or any(row[CHOSEN] for row in cells)]
        print_table(f"audit log {log.path}", columns, [[_printable(row[name]) for name in columns] for row in cells])
    return _report(log, checked, anchor_head, stream=sys.stderr if as_json else sys.stdout)


def print_anchor(path: Path) -> int:
    """Print the anchor of an unbroken log: the number of events and the hash of the last event."""
    log = _log_at(path)
    checked = _check(log)
    if not checked.line:
        print(checked.head)
        return 0
    return _report(log, checked, None, stream=sys.stderr)


def _report(log: AuditLog, checked: Checked, anchor_head: Head | None, stream: Any) -> int:
    if checked.line:
        print(f"posy: {log.path}, line {checked.line}: {checked.problem}", file=sys.stderr)
        print(f"posy: the {checked.head.count} events before this line are intact", file=sys.stderr)
        return BROKEN
    if anchor_head is not None and not contains(checked, anchor_head):
        print(f"posy: {log.path} does not contain the {anchor_head.count} events of the anchor", file=sys.stderr)
        return BROKEN
    if checked.unfinished:
        print("the last line is incomplete, because the process stopped before it sent this reply", file=stream)
    print(f"the chain of {checked.head.count} events is unbroken; its anchor is {checked.head}", file=stream)
    return 0


def _log_at(path: Path) -> AuditLog:
    return AuditLog(path / AUDIT_NAME if path.is_dir() else path)


def _check(log: AuditLog) -> Checked:
    try:
        return log.check()
    except OSError as error:
        hint = "pass the path of the log, or the state-dir of its node"
        raise SettingsError(f"the audit log {log.path} cannot be read ({error.strerror}); {hint}") from error


def _anchor(text: str) -> Head | None:
    if text and (head := Head.parse(text)) is None:
        raise SettingsError(f"--contains {text!r} is not an anchor; use the output of `posy audit --anchor`")
    return head if text else None


def _moment(text: str) -> datetime | None:
    try:
        moment = datetime.fromisoformat(text) if text else None
    except ValueError:
        raise SettingsError(
            f"--since {text!r} is not a time; use a format such as 2026-01-31 or 2026-01-31T18:00"
        ) from None
    return moment.replace(tzinfo=UTC) if moment is not None and moment.tzinfo is None else moment


def _is_wanted(event: Mapping[str, Any], run: str, first: datetime | None) -> bool:
    if run and run not in (event.get("run"), event.get("name")):
        return False
    return first is None or datetime.fromisoformat(event["time"]) >= first


def _cells(event: Mapping[str, Any]) -> dict[str, str]:
    """Return an event's table cells, keyed by column. Some of their strings come from the server."""
    sent_records = event.get("sent", {})
    total = sum(record["bytes"] for record in sent_records.values())
    decision = event.get("decision", event["event"]) + (f" ({event['error']})" if "error" in event else "")
    return {
        "event": str(event["number"]),
        "time": event["time"][:19].replace("T", " "),
        "node": event.get("node", ""),
        "run": event.get("name") or event.get("run", ""),
        "submitter": event.get("submitter", ""),
        CHOSEN: " ".join(f"{key}={value}" for key, value in event.get(NODE_SETTINGS, {}).items()),
        "message": event.get("type", event["event"]),
        "round": _text(event.get("round")),
        "client": _text(event.get("client")),
        "sent": ", ".join(_describe(sent_records)),
        "bytes": size(total) if sent_records else "",
        "decision": decision,
    }


def _describe(sent_records: Mapping[str, Any]) -> Iterator[str]:
    for name, record in sent_records.items():
        count = record.get("arrays")
        names = record.get("names", ())
        content = f"{count} arrays" if count is not None else " ".join(names)
        yield f"{name} ({content})" if content else name


def _text(value: object) -> str:
    return "" if value is None else str(value)


def _printable(text: object) -> str:
    return "".join(c if c.isprintable() else "?" for c in str(text))
