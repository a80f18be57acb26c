"""A worker answers a message that is sent again with what it has, and works on no other twice."""

from flwr.app import ConfigRecord, Error, Message, MessageType, RecordDict

from posy.deploy.worker import LastAnswer
from posy.server_app.in_process import InProcessGrid


def message(kind: str = MessageType.TRAIN, run: int = 7, **config: str | int) -> Message:
    InProcessGrid(1)  # gives this process the identity that messages need
    made = Message(RecordDict({"config": ConfigRecord({"client": 1, "state-to": "0-1-0", **config})}), 1, kind)
    made.metadata.__dict__["_run_id"] = run
    return made


def reply(to: Message) -> Message:
    return Message(RecordDict({"config": ConfigRecord({"answer": 42})}), reply_to=to)


def test_a_duplicate_message_gets_the_stored_answer() -> None:
    last, first, copy = LastAnswer(), message(), message()
    copy.metadata.__dict__["_message_id"] = "of the copy"
    assert last.find(first) is None
    last.keep(first, reply(first))
    found = last.find(copy)
    assert found is not None
    assert found.content == reply(first).content
    assert found.metadata.reply_to_message_id == "of the copy"


def test_other_messages_have_no_stored_answer() -> None:
    last, first = LastAnswer(), message()
    last.keep(first, reply(first))
    others = [message(MessageType.EVALUATE), message(run=8), message(client=2), message(**{"state-to": "0-2-0"})]
    assert [last.find(other) for other in others] == [None] * 4
    last.keep(others[2], reply(others[2]))
    assert last.find(first) is None


def test_errors_and_query_answers_are_not_stored() -> None:
    last, first, question = LastAnswer(), message(), message(MessageType.QUERY)
    last.keep(first, Message(Error(2, "no"), reply_to=first))
    last.keep(question, reply(question))
    assert last.find(first) is None
    assert last.find(question) is None
