"""A worker answers a repeated message with its stored answer and handles every other message."""

import json
from logging import ERROR
from pathlib import Path
from typing import Any

import pytest
from flwr.app import ConfigRecord, Context, Error, Message, MessageType, RecordDict

from posy.client_app.app import app
from posy.deploy.sessions import Sessions
from posy.deploy.tasks import Bundle, Run, Task
from posy.deploy.worker import LastAnswer, serve
from posy.server_app.in_process import InProcessGrid


def message(kind: str = MessageType.TRAIN, run: int = 7, **config: str | int) -> Message:
    InProcessGrid(1)  # gives this process the identity that messages need
    request = Message(RecordDict({"config": ConfigRecord({"client": 1, "state-to": "0-1-0", **config})}), 1, kind)
    request.metadata.__dict__["_run_id"] = run
    return request


def reply(to: Message) -> Message:
    return Message(RecordDict({"config": ConfigRecord({"answer": 42})}), reply_to=to)


def test_a_duplicate_message_gets_the_stored_answer() -> None:
    last, first, copy = LastAnswer(), message(), message()
    copy.metadata.__dict__["_message_id"] = "of the copy"
    assert last.find(first) is None
    last.keep(first, reply(first))
    stored = last.find(copy)
    assert stored is not None
    assert stored.content == reply(first).content
    assert stored.metadata.reply_to_message_id == "of the copy"


def test_other_messages_have_no_stored_answer() -> None:
    last, first = LastAnswer(), message()
    last.keep(first, reply(first))
    other_messages = [
        message(MessageType.EVALUATE),
        message(run=8),
        message(client=2),
        message(**{"state-to": "0-2-0"}),
    ]
    assert [last.find(other) for other in other_messages] == [None] * 4
    last.keep(other_messages[2], reply(other_messages[2]))
    assert last.find(first) is None


def test_errors_and_query_answers_are_not_stored() -> None:
    last, first, question = LastAnswer(), message(), message(MessageType.QUERY)
    last.keep(first, Message(Error(2, "no"), reply_to=first))
    last.keep(question, reply(question))
    assert last.find(first) is None
    assert last.find(question) is None


class Answered(Task):
    """A task whose reply stays in this process."""

    def __init__(self, message: Message, node_config: dict[str, Any]) -> None:
        context = Context(run_id=7, node_id=1, node_config=node_config, state=RecordDict(), run_config={})
        self._input = message, context, Run(7), Bundle("", b"")

    def push(self, reply: Message) -> None:
        self.reply = reply

    def finish(self, context: Context) -> None:
        self.state = context.state


class OneApp:
    """The apps of a worker, which are all Posy's own ClientApp."""

    signers = ()

    def load(self, bundle: Bundle, rule: str) -> Any:
        return app


def test_a_refused_message_is_logged_once(tmp_path: Path, warnings: pytest.LogCaptureFixture) -> None:
    (tmp_path / "site.csv").write_text("f0,label\n1,0\n2,1\n")
    refused = message(MessageType.QUERY, settings=json.dumps({"dataset": "digits"}))
    task = Answered(refused, {"data": str(tmp_path / "site.csv")})
    serve(task, OneApp(), LastAnswer(), Sessions())  # type: ignore[arg-type]
    assert "rule data: " in task.reply.error.reason
    (text,) = {record.getMessage() for record in warnings.records if record.levelno == ERROR}
    assert "rule data: " in text
