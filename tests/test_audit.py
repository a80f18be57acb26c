"""The audit log of a node: its events, the detection of changes, and the absence of data."""

import json
import os
import re
import stat
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Context, Error, Message, MessageType, MetricRecord, RecordDict

from posy.client_app.app import app
from posy.client_app.audit import (
    START,
    AuditError,
    AuditLog,
    Checked,
    Head,
    _warn_once,
    contains,
    event_of,
    line_of,
    log_of,
    note,
    record,
)
from posy.client_app.policy import NodeError
from posy.commands import cli
from posy.commands.launch import APP
from posy.flower import Array
from posy.folding import folded
from posy.server_app.in_process import InProcessGrid
from posy.strategies.registry import read_settings

EVENTS = 6


@pytest.fixture
def audit_log(tmp_path: Path) -> AuditLog:
    return AuditLog(tmp_path / "state" / "audit.jsonl")


def fill(log: AuditLog, count: int = EVENTS) -> list[bytes]:
    """Append events and return the lines of the log."""
    for i in range(count):
        log.append({"event": "reply", "run": str(i), "time": f"2026-01-0{i % 9 + 1}T00:00:00.000Z"})
    return log.path.read_bytes().splitlines(keepends=True)


def rewrite(log: AuditLog, lines: list[bytes]) -> Checked:
    log.path.write_bytes(b"".join(lines))
    return log.check()


# -- the chain ---------------------------------------------------------------------------------------------


def test_each_event_stores_the_hash_of_the_previous_event(audit_log: AuditLog) -> None:
    events = [json.loads(line) for line in fill(audit_log)]
    assert [event["number"] for event in events] == list(range(1, EVENTS + 1))
    assert [event["previous"] for event in events] == [START, *(event["hash"] for event in events[:-1])]
    # The hash is the SHA-256 of the other fields as JSON with sorted keys, which other programs can compute.
    import hashlib

    first = {key: value for key, value in events[0].items() if key != "hash"}
    text = json.dumps(first, sort_keys=True, separators=(",", ":"))
    assert hashlib.sha256(text.encode()).hexdigest() == events[0]["hash"]
    checked = audit_log.check()
    assert (checked.line, checked.problem, checked.unfinished) == (0, "", False)
    assert (checked.head, checked.events) == (Head(EVENTS, events[-1]["hash"]), events)


def test_audit_files_are_readable_by_the_owner_only(audit_log: AuditLog) -> None:
    fill(audit_log, 1)
    for path in audit_log.path.parent.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert sorted(path.name for path in audit_log.path.parent.iterdir()) == ["audit.jsonl", "audit.jsonl.head"]
    assert stat.S_IMODE(audit_log.path.parent.stat().st_mode) == 0o700


def test_the_log_is_append_only(audit_log: AuditLog) -> None:
    """An append-only file (`chattr +a`) cannot be opened in any other mode."""
    fill(audit_log, 2)
    before = audit_log.path.read_bytes()
    inode = audit_log.path.stat().st_ino
    fill(audit_log, 2)
    assert audit_log.path.read_bytes().startswith(before)
    assert audit_log.path.stat().st_ino == inode


@pytest.mark.parametrize(
    ("change", "line", "problem"),
    [
        (lambda lines: [*lines[:2], lines[2].replace(b'"run":"2"', b'"run":"7"'), *lines[3:]], 3, "was changed"),
        (lambda lines: [*lines[:2], *lines[3:]], 3, "changed, deleted or moved"),
        (lambda lines: lines[1:], 1, "changed, deleted or moved"),
        (lambda lines: [*lines[:2], lines[3], lines[2], *lines[4:]], 3, "changed, deleted or moved"),
        (lambda lines: [*lines[:3], lines[2], *lines[3:]], 4, "changed, deleted or moved"),
        (lambda lines: lines[:-1], EVENTS, f"ends after event {EVENTS - 1} of {EVENTS}"),
        (lambda lines: lines[:2], 3, f"ends after event 2 of {EVENTS}"),
        (lambda lines: [], 1, f"ends after event 0 of {EVENTS}"),
        (lambda lines: [*lines[:2], b"nonsense\n", *lines[3:]], 3, "not an event"),
        (lambda lines: [*lines[:2], b"[]\n", b'{"number":3}\n', *lines[2:]], 3, "not an event"),
        (lambda lines: [*lines, b"nonsense\n"], EVENTS + 1, "not an event"),
        (lambda lines: [*lines[:-1], lines[-1][:-20]], EVENTS, "ends after event 5 of 6"),
    ],
)
def test_check_detects_every_change_to_the_log(
    change: Callable[[list[bytes]], list[bytes]], line: int, problem: str, audit_log: AuditLog
) -> None:
    checked = rewrite(audit_log, change(fill(audit_log)))
    assert (checked.line, len(checked.events)) == (line, line - 1)
    assert problem in checked.problem


def test_a_replaced_log_does_not_match_its_head(audit_log: AuditLog, tmp_path: Path) -> None:
    fill(audit_log)
    other = AuditLog(tmp_path / "other.jsonl")
    other.append(*[{"event": "reply", "run": "x"}] * (EVENTS + 2))
    checked = rewrite(audit_log, [other.path.read_bytes()])
    assert f"event {EVENTS} is not the one" in checked.problem and "replaced" in checked.problem


def test_a_missing_head_is_reported(audit_log: AuditLog) -> None:
    fill(audit_log)
    audit_log.path.with_name("audit.jsonl.head").unlink()
    assert "the head of the log is missing" in audit_log.check().problem
    fill(audit_log, 1)  # the next event does not hide it
    checked = audit_log.check()
    assert checked.line == EVENTS + 1
    assert f"the log contained only {EVENTS} of an unknown number" in checked.problem


def test_later_events_do_not_hide_a_truncation(audit_log: AuditLog) -> None:
    lines = fill(audit_log)
    audit_log.path.write_bytes(b"".join(lines[:4]))
    fill(audit_log, 5)
    checked = audit_log.check()
    assert checked.line == 5
    assert f"the log contained only 4 of {EVENTS} events" in checked.problem
    audit_log.path.unlink()
    fill(audit_log, 2)
    assert "the log contained only 0 of 10 events" in audit_log.check().problem


def test_an_anchor_detects_a_rewritten_log_and_head(audit_log: AuditLog) -> None:
    """The chain alone cannot detect this."""
    fill(audit_log)
    anchor = audit_log.check().head
    assert contains(audit_log.check(), anchor)
    fill(audit_log, 3)
    assert contains(audit_log.check(), anchor)
    for path in audit_log.path.parent.iterdir():
        path.unlink()
    audit_log.append(*[{"event": "reply", "run": "forged"}] * 20)
    assert audit_log.check().line == 0
    assert not contains(audit_log.check(), anchor)
    assert contains(audit_log.check(), Head())
    assert Head.parse(str(anchor)) == anchor
    assert Head.parse("7") is None


# -- writers ----------------------------------------------------------------------------------------------


WRITER = """
import sys
from pathlib import Path
from posy.client_app.audit import AuditLog
log = AuditLog(Path(sys.argv[1]))
for i in range(100):
    log.append({"event": "reply", "run": sys.argv[2], "i": i})
"""


def test_concurrent_writers_share_one_chain(audit_log: AuditLog) -> None:
    environment = {**os.environ, "PYTHONPATH": str(APP)}
    command = [sys.executable, "-P", "-c", WRITER, str(audit_log.path)]
    processes = [subprocess.Popen([*command, f"p{i}"], env=environment) for i in range(2)]
    with ThreadPoolExecutor(4) as threads:
        done = [
            threads.submit(audit_log.append, {"event": "reply", "run": f"t{i % 4}", "i": i // 4}) for i in range(200)
        ]
        for future in done:
            future.result()
    assert [process.wait(60.0) for process in processes] == [0, 0]
    checked = audit_log.check()
    assert (checked.line, checked.head.count) == (0, 400)
    for name in ("p0", "p1"):
        assert [event["i"] for event in checked.events if event["run"] == name] == list(range(100))


@pytest.mark.parametrize("cut", [1, 40, -1])
def test_an_incomplete_line_is_preserved_and_recorded(cut: int, audit_log: AuditLog) -> None:
    fill(audit_log)
    partial = line_of({"event": "reply", "run": "6"}, audit_log.check().head)[0][:cut]
    with audit_log.path.open("ab") as file:
        file.write(partial)
    checked = audit_log.check()
    assert (checked.line, checked.unfinished, len(checked.events)) == (0, True, EVENTS)
    fill(audit_log, 1)
    checked = audit_log.check()
    assert (checked.line, checked.unfinished) == (0, False)
    assert partial + b"\n" in audit_log.path.read_bytes()
    kinds = [event["event"] for event in checked.events[EVENTS:]]
    if cut == -1:  # only the end of the line was missing
        assert kinds == ["reply", "reply"]
        return
    assert kinds == ["recovered", "reply"]
    assert checked.events[EVENTS]["bytes"] == len(partial)
    changed = audit_log.path.read_bytes().replace(partial + b"\n{", b"x" + partial + b"\n{")
    assert rewrite(audit_log, [changed]).problem.endswith("not an event")


def test_a_crash_during_recovery_is_recorded(audit_log: AuditLog) -> None:
    fill(audit_log)
    with audit_log.path.open("ab") as file:
        file.write(b'{"event":"re\n{"bytes":12,"eve')
    fill(audit_log, 1)
    checked = audit_log.check()
    assert (checked.line, [event["event"] for event in checked.events[EVENTS:]]) == (0, ["recovered", "reply"])


def test_the_log_continues_after_a_process_dies_while_writing(audit_log: AuditLog) -> None:
    """The process dies after it has written part of the line; the head still records the previous event."""
    fill(audit_log, 2)
    program = f"""
import os
from pathlib import Path
from posy.client_app import audit
write = os.write
def die(file, content):
    write(file, content[:30])
    os._exit(9)
audit.os = type("os", (), {{**vars(os), "write": staticmethod(die)}})
audit.AuditLog(Path({str(audit_log.path)!r})).append({{"event": "reply", "run": "lost"}})
"""
    environment = {**os.environ, "PYTHONPATH": str(APP)}
    assert subprocess.run([sys.executable, "-P", "-c", program], env=environment, check=False).returncode == 9
    assert audit_log.check().unfinished
    fill(audit_log, 1)
    checked = audit_log.check()
    assert [event["event"] for event in checked.events] == ["reply", "reply", "recovered", "reply"]
    assert (checked.line, checked.problem) == (0, "")


def test_the_log_continues_from_an_outdated_head(audit_log: AuditLog) -> None:
    fill(audit_log)
    head = audit_log.path.with_name("audit.jsonl.head")
    before = head.read_bytes()
    fill(audit_log, 1)
    head.write_bytes(before)
    assert audit_log.check().line == 0
    fill(audit_log, 1)
    assert (audit_log.check().line, audit_log.check().head.count) == (0, EVENTS + 2)


def test_a_long_last_line_is_read(audit_log: AuditLog) -> None:
    audit_log.append({"event": "reply", "run": "1", "long": "x" * 100_000})
    fill(audit_log, 1)
    assert (audit_log.check().line, audit_log.check().head.count) == (0, 2)


# -- events ------------------------------------------------------------------------------------------------


def context(**node_config: Any) -> Context:
    config = {name.replace("_", "-"): value for name, value in node_config.items()}
    return Context(run_id=5, node_id=77, node_config=config, state=RecordDict(), run_config={})


def message(kind: str = MessageType.TRAIN, **config: Any) -> Message:
    InProcessGrid(1)  # gives this process the identity that messages need
    entries = {name.replace("_", "-"): value for name, value in config.items()}
    content = RecordDict(
        {"config": ConfigRecord(entries), "arrays": ArrayRecord({"model": Array(np.ones(1000, np.float32))})}
    )
    request = Message(content, 77, kind)
    request.metadata.__dict__["_run_id"] = 5
    return request


SETTINGS = '{"method":"fedavg","run-name":"trial"}'


def reply_to(request_message: Message) -> Message:
    content = RecordDict(
        {
            "arrays": ArrayRecord({str(i): Array(np.ones(500, np.float32)) for i in range(2)}),
            "metrics": MetricRecord({"train-loss": 0.5, "num-examples": 40}),
            "config": ConfigRecord({"client": 2, "state": "0-1-0"}),
        }
    )
    return Message(content, reply_to=request_message)


def test_an_event_records_names_and_sizes_of_sent_records() -> None:
    request_message = message(settings=SETTINGS, client=2, server_round=3)
    node_context = context(name="site-a")
    note(node_context, submitter="ada", signers=["fpk_1"], code="ab12", epsilon=0.25, delta=1e-5)
    event = event_of(request_message, node_context, reply_to(request_message))
    import hashlib

    assert event.pop("time").endswith("Z")
    array_bytes = 500 * 4 + 128  # NumPy's header has 128 bytes
    assert event == {
        "event": "reply",
        "node": "site-a",
        "run": "5",
        "name": "trial",
        "submitter": "ada",
        "signers": ["fpk_1"],
        "code": "ab12",
        "settings": hashlib.sha256(SETTINGS.encode()).hexdigest(),
        "type": "train",
        "round": 3,
        "client": 2,
        "received": {"config": len(SETTINGS) + 16, "arrays": 4128},
        "decision": "accepted",
        "sent": {
            "arrays": {"bytes": 2 * array_bytes, "arrays": 2},
            "metrics": {"bytes": 16, "names": ["num-examples", "train-loss"]},
            "config": {"bytes": 13, "names": ["client", "state"]},
        },
        "masked": False,
        "epsilon": 0.25,
        "delta": 1e-5,
    }


def test_a_folded_message_has_the_same_event() -> None:
    request_message = message(settings=SETTINGS, client=2, server_round=3)
    node_context = context()
    plain, packed = (
        event_of(request_message, node_context, reply_to(request_message)),
        event_of(folded(request_message), node_context, folded(reply_to(request_message))),
    )
    assert {**plain, "time": ""} == {**packed, "time": ""}
    assert plain["node"] == "77"


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        ({"ping": True}, "query:ping"),
        ({"secure_round": "0-1", "secure_stage": "shares"}, "query:shares"),
        ({"settings": SETTINGS, "describe": True}, "query:describe"),
        ({"settings": SETTINGS}, "query:join"),
    ],
)
def test_query_events_name_the_kind_of_query(config: dict[str, Any], kind: str) -> None:
    request_message = message(MessageType.QUERY, **config)
    assert event_of(request_message, context(), Message(RecordDict(), reply_to=request_message))["type"] == kind


class RefusedError(Exception):
    rule = "min-rows"


def test_refusals_and_errors_omit_their_text(audit_log: AuditLog) -> None:
    request_message = message(settings=SETTINGS)
    node_context = context(name="site-a")
    record(
        audit_log,
        request_message,
        node_context,
        RefusedError("row 2, column name: 'Patient A0' in /srv/site-a/patients.csv"),
    )
    record(audit_log, request_message, node_context, ValueError("Patient A0"))
    record(audit_log, request_message, node_context, Message(Error(3, "Patient A0"), reply_to=request_message))
    record(audit_log, request_message, node_context, "trusted-entities")
    begin, *events = audit_log.check().events
    assert begin["event"] == "run-begin"
    summaries = [(event["event"], event["decision"], event.get("error")) for event in events]
    assert summaries == [
        ("refusal", "min-rows", "RefusedError"),
        ("error", "failed", "ValueError"),
        ("error", "failed", "code-3"),
        ("refusal", "trusted-entities", None),
    ]
    assert b"Patient" not in audit_log.path.read_bytes()


def test_events_list_the_settings_that_the_node_has_chosen(
    audit_log: AuditLog, capsys: pytest.CaptureFixture[str]
) -> None:
    """The node config may contain numbers or text, and its values may change when the node restarts."""
    chosen: list[dict[str, Any]] = [{"local-epochs": "2", "lr": "1e-2"}, {"local-epochs": 3}, {"local-epochs": "x"}, {}]
    for config in chosen:
        request_message = message(settings=SETTINGS, client=2, server_round=3)
        record(audit_log, request_message, context(name="site-a", **config), reply_to(request_message))
    events = audit_log.check().events
    first = {"local-epochs": 2, "lr": 0.01}
    assert [event.get("node-settings") for event in events] == [first, first, {"local-epochs": 3}, None, None]
    assert cli.main(["audit", str(audit_log.path)]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "submitter node settings message" in lines[1]
    assert "local-epochs=2 lr=0.01 train 3 2" in lines[3] and "local-epochs=3 train 3 2" in lines[4]


def test_untrusted_names_and_control_characters_are_removed(audit_log: AuditLog) -> None:
    request_message = message(run="evil\x1b[2J\nname")
    content = RecordDict({"Patient A0": MetricRecord({"age=86, sbp=167": 1.0, "x" * 61: 2.0, "fine": 3.0})})
    record(audit_log, request_message, context(), Message(content, reply_to=request_message))
    event = audit_log.check().events[-1]
    assert event["sent"] == {"other": {"bytes": 24, "names": ["fine", "other"]}}
    assert event["name"] == "evil [2J name"


def test_run_begin_is_recorded_once_per_run(audit_log: AuditLog) -> None:
    request_message = message(settings=SETTINGS)
    for log in (audit_log, audit_log, AuditLog(audit_log.path)):
        record(log, request_message, context(), reply_to(request_message))
    assert [event["event"] for event in audit_log.check().events] == ["run-begin", "reply", "reply", "reply"]
    request_message.metadata.__dict__["_run_id"] = 55  # the first digits are the same
    record(AuditLog(audit_log.path), request_message, context(), reply_to(request_message))
    begun = [event["run"] for event in audit_log.check().events if event["event"] == "run-begin"]
    assert begun == ["5", "55"]


def test_node_config_decides_whether_a_log_is_written(tmp_path: Path, warnings: pytest.LogCaptureFixture) -> None:
    _warn_once.cache_clear()  # another test may have caused the warning
    assert log_of({"partition-id": 0, "num-partitions": 2, "state-dir": str(tmp_path)}) is None
    site_log = log_of({"data": "/srv/a", "state-dir": str(tmp_path)})
    named = log_of({"partition-id": 0, "audit": str(tmp_path / "x.jsonl")})
    assert site_log is not None and site_log.path == tmp_path / "audit.jsonl"
    assert named is not None and named.path == tmp_path / "x.jsonl"
    assert log_of({"data": "/srv/a", "state-dir": str(tmp_path)}) is site_log  # the log is cached
    assert log_of({"data": "/srv/a"}) is None
    assert "this node does not keep an audit log" in warnings.text


# -- the ClientApp -----------------------------------------------------------------------------------------


@pytest.fixture
def site(tmp_path: Path) -> dict[str, Any]:
    """Return the node config of a site with a table of patients."""
    rng = np.random.default_rng(3)
    rows = [f"{rng.normal(50, 9):.3f},{rng.normal(120, 9):.3f},{('sick', 'well')[i % 2]}" for i in range(60)]
    (tmp_path / "patients.csv").write_text("\n".join(["age,pressure,label", *rows]) + "\n")
    return {"data": str(tmp_path / "patients.csv"), "name": "site-a", "state-dir": str(tmp_path / "state")}


def settings_json(**settings: Any) -> str:
    config = {"dataset": "sites", "num-clients": 2, "method": "fedavg", "run-name": "trial", **settings}
    return read_settings(config).to_json()


def test_the_client_app_records_replies_and_errors(site: dict[str, Any], tmp_path: Path) -> None:
    node_context = Context(run_id=5, node_id=77, node_config=site, state=RecordDict(), run_config={})
    described = message(MessageType.QUERY, settings=settings_json(), describe=True)
    answer = app(described, node_context).content.config_records["config"]
    assert "sick" in str(answer["classes"])
    with pytest.raises(NodeError, match="KeyError at"):
        app(message(MessageType.QUERY, nothing=1), node_context)
    checked = AuditLog(tmp_path / "state" / "audit.jsonl").check()
    assert checked.line == 0
    summaries = [(event["event"], event.get("type"), event.get("error")) for event in checked.events]
    assert summaries == [
        ("run-begin", None, None),
        ("reply", "query:describe", None),
        ("error", "query:join", "KeyError"),
    ]
    assert checked.events[0]["name"] == "trial"
    # The times may contain the same digits.
    text = re.sub(r'"\d{4}-\d\d-\d\dT[\d:.]+Z"', "", (tmp_path / "state" / "audit.jsonl").read_text())
    for secret in ("sick", "well", "patients", str(tmp_path), "120.", "50."):
        assert secret not in text
    assert {"classes", "name"} <= set(checked.events[1]["sent"]["config"]["names"])


def test_a_node_without_a_writable_log_sends_no_reply(
    site: dict[str, Any], tmp_path: Path, warnings: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "state").write_text("not a directory")
    node_context = Context(run_id=5, node_id=77, node_config=site, state=RecordDict(), run_config={})
    with pytest.raises(AuditError) as raised:
        app(message(MessageType.QUERY, settings=settings_json(), describe=True), node_context)
    assert "cannot write its audit log" in str(raised.value)
    assert "audit.jsonl cannot be written" in warnings.text


def test_simulations_write_no_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, federate: Any, make_config: Any
) -> None:
    monkeypatch.setattr(AuditLog, "append", lambda *_: pytest.fail("a simulation keeps no log"))
    federate(make_config("fedavg", num_server_rounds=1))


# -- the command ------------------------------------------------------------------------------------------


@pytest.fixture
def filled_log(audit_log: AuditLog) -> AuditLog:
    """Return a log with one accepted and one refused message of two runs."""
    node_context = context(name="site-a")
    note(node_context, submitter="ada")
    for number in (5, 6):
        request_message = message(settings=f'{{"run-name":"run-{number}"}}', client=2, server_round=3, run="folder")
        request_message.metadata.__dict__["_run_id"] = number
        record(
            audit_log,
            request_message,
            node_context,
            reply_to(request_message) if number == 5 else RefusedError("Patient A0"),
        )
    return audit_log


def test_posy_audit_prints_and_filters_events(filled_log: AuditLog, capsys: pytest.CaptureFixture[str]) -> None:
    def print_events(*words: str, status: int = 0) -> list[str]:
        assert cli.main(["audit", str(filled_log.path.parent), *words]) == status
        return [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]

    anchor = str(filled_log.check().head)
    lines = print_events()
    assert lines[1] == "event time node run submitter message round client sent bytes decision"
    assert [line.split()[0] for line in lines[2:6]] == ["1", "2", "3", "4"]
    assert "site-a run-5 ada train 3 2 arrays (2 arrays), config (client state), metrics (num" in lines[3]
    assert lines[3].endswith("accepted")
    assert lines[5].endswith("min-rows (RefusedError)")
    assert lines[-1] == f"the chain of 4 events is unbroken; its anchor is {anchor}"
    assert len(print_events("--run", "run-5")) == len(print_events("--run", "5")) == len(lines) - 2
    assert print_events("--since", "2100-01-01") == [lines[-1]]
    assert len(print_events("--since", "2020-01-01T10:00")) == len(lines)
    events = [json.loads(line) for line in print_events("--json")]
    assert [event["event"] for event in events] == ["run-begin", "reply", "run-begin", "refusal"]
    assert print_events("--anchor") == [anchor]
    assert print_events("--contains", anchor) == lines
    print_events("--contains", f"3:{'0' * 64}", status=1)
    assert cli.main(["audit", str(filled_log.path)]) == 0  # the file itself


def test_posy_audit_names_the_first_broken_line(filled_log: AuditLog, capsys: pytest.CaptureFixture[str]) -> None:
    lines = filled_log.path.read_bytes().splitlines(keepends=True)
    filled_log.path.write_bytes(b"".join([lines[0], lines[1].replace(b'"round":3', b'"round":4'), *lines[2:]]))
    assert cli.main(["audit", str(filled_log.path)]) == 1
    output, error = capsys.readouterr()
    assert f"posy: {filled_log.path}, line 2: " in error and "hash is wrong" in error
    assert "the 1 events before this line" in error
    assert "run-begin" in output
    assert cli.main(["audit", str(filled_log.path), "--anchor"]) == 1
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere"], "nowhere cannot be read (No such file or directory); pass the path of the log"),
        (["LOG", "--since", "yesterday"], "--since 'yesterday' is not a time; use a format such as 2026-01-31"),
        (["LOG", "--contains", "7"], "--contains '7' is not an anchor"),
    ],
)
def test_invalid_arguments_are_explained(
    words: list[str], message: str, filled_log: AuditLog, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(filled_log.path) if word == "LOG" else word for word in words]
    assert cli.main(["audit", *words]) == 2
    assert message in capsys.readouterr().err


def test_supernode_adds_an_audit_path_for_nodes_with_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test catches the command before its process starts."""
    commands: list[str] = []
    monkeypatch.setenv("FLWR_HOME", str(tmp_path))
    monkeypatch.setattr("os.execve", lambda program, command, environment: commands.append(" ".join(command)))
    data = f"data={tmp_path}"
    for words, expected in (
        ([data], f'data="{tmp_path}" audit="{tmp_path}/audit.jsonl"'),
        ([data, "state-dir=/s"], f'data="{tmp_path}" state-dir="/s"'),
        ([data, "audit=/s/x.jsonl"], f'data="{tmp_path}" audit="/s/x.jsonl"'),
        (["partition-id=0", "num-partitions=2"], "partition-id=0 num-partitions=2"),
    ):
        cli.main(["supernode", "--insecure", *words])
        assert commands[-1].endswith(f"--node-config {expected}")


def test_errors_outside_the_client_app_are_recorded(tmp_path: Path) -> None:
    from posy.deploy.refusals import record_error

    config = {"partition-id": 0, "num-partitions": 2, "audit": str(tmp_path / "a.jsonl")}
    record_error(message(settings=SETTINGS), config, "trusted-entities")
    record_error(message(settings=SETTINGS), config, RuntimeError("the worker process died"))
    begin, refused, failed = AuditLog(tmp_path / "a.jsonl").check().events
    assert (begin["event"], begin["node"]) == ("run-begin", "77")
    assert (refused["event"], refused["decision"], "sent" in refused) == ("refusal", "trusted-entities", False)
    assert (failed["event"], failed["error"]) == ("error", "RuntimeError")
    record_error(message(), {"partition-id": 0}, "trusted-entities")  # this node keeps no log
    (tmp_path / "file").write_text("")
    # An unwritable log raises no error here.
    record_error(message(), {"audit": str(tmp_path / "file" / "a.jsonl")}, "trusted-entities")
