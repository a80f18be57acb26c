"""The SuperLink's use of its database: serialised writers, errors that callers retry, and fewer writes."""

import hashlib
import importlib
import sqlite3
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from flwr.app import ConfigRecord, Message, Metadata, RecordDict
from flwr.app.message import make_message
from flwr.cli.build import build_fab_from_files
from flwr.common.config import get_project_dir
from flwr.common.constant import SUPERLINK_NODE_ID, ErrorCode, Status, SubStatus
from flwr.proto.fleet_pb2 import PullMessagesRequest
from flwr.proto.node_pb2 import Node
from flwr.proto.runtime_pb2 import PullAppMessagesRequest
from flwr.proto.task_pb2 import Task
from flwr.server.superlink.fleet.message_handler import message_handler
from flwr.server.superlink.linkstate import SqlLinkState, linkstate_factory
from flwr.supercore.constant import NOOP_FEDERATION_ID, TaskType
from flwr.supercore.corestate import in_memory_corestate
from flwr.supercore.fab import Fab
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.superlink.federation import NoOpFederationManager
from flwr.superlink.servicer.runtime import runtime_handlers
from sqlalchemy import Engine, create_engine, event, text
from sqlalchemy.exc import OperationalError

from posy.deploy import database
from posy.deploy.database import PATCHES, Patch, TryAgainError, Turns, can_be_retried, missing_name, patched_state
from posy.deploy.install import install_whole

MakeEngine = Callable[[], Engine]


@pytest.fixture
def engines(tmp_path: Path) -> Iterator[MakeEngine]:
    """Return a function that makes engines for one database, whose connections wait 50 ms for its lock."""
    created: list[Engine] = []

    def make() -> Engine:
        created.append(create_engine(f"sqlite:///{tmp_path / 'a.db'}", connect_args={"check_same_thread": False}))
        engine = created[-1]
        event.listen(engine, "connect", lambda connection, _: connection.execute("PRAGMA busy_timeout = 50") and None)
        return engine

    with make().begin() as connection:
        connection.execute(text("PRAGMA journal_mode = WAL"))
        connection.execute(text("CREATE TABLE t (x INTEGER)"))
    yield make
    for engine in created:
        engine.dispose()


def write_while_another_holds_on(engine: Engine, statement: str = "INSERT INTO t VALUES (2)") -> None:
    """Write while a transaction in another thread stays open for 0.3 s."""
    begun = threading.Event()

    def hold() -> None:
        with engine.begin() as connection:
            connection.execute(text("INSERT INTO t VALUES (1)"))
            begun.set()
            time.sleep(0.3)

    with futures.ThreadPoolExecutor(1) as pool:
        holder = pool.submit(hold)
        begun.wait()
        with engine.begin() as connection:
            connection.execute(text(statement))
        holder.result()


def numbers(engine: Engine) -> list[int]:
    with engine.connect() as connection:
        return list(connection.scalars(text("SELECT x FROM t ORDER BY x")))


@pytest.mark.parametrize(
    "statement", ["INSERT INTO t VALUES (2)", "WITH a AS (SELECT 2 AS x) INSERT INTO t SELECT x FROM a"]
)
def test_writers_wait_for_their_turn_however_long_sqlite_would(engines: MakeEngine, statement: str) -> None:
    engine = engines()
    with pytest.raises(OperationalError, match="database is locked") as locked:
        write_while_another_holds_on(engine, statement)
    assert can_be_retried(locked.value)
    assert numbers(engine) == [1]
    Turns().install(engine)
    write_while_another_holds_on(engine, statement)
    assert numbers(engine) == [1, 1, 2]


def test_a_reader_does_not_wait_for_a_writer(engines: MakeEngine) -> None:
    engine = engines()
    Turns().install(engine)
    with engine.begin() as writer:
        writer.execute(text("INSERT INTO t VALUES (1)"))
        assert numbers(engine) == []


def test_the_turn_is_given_back_after_an_error_and_by_a_connection_that_is_thrown_away(
    engines: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "TURN_SECONDS", 0.2)
    engine = engines()
    Turns().install(engine)
    with pytest.raises(OperationalError, match="no such table"), engine.begin() as connection:
        connection.execute(text("INSERT INTO missing VALUES (1)"))
    with engine.connect() as connection:
        connection.execute(text("INSERT INTO t VALUES (1)"))
        connection.invalidate()
        with engine.begin() as other:
            other.execute(text("INSERT INTO t VALUES (2)"))
    assert numbers(engine) == [2]


def test_a_writer_whose_turn_never_comes_is_to_try_again(engines: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "TURN_SECONDS", 0.2)
    engine = engines()
    Turns().install(engine)
    with engine.begin() as holder:
        holder.execute(text("INSERT INTO t VALUES (1)"))
        with pytest.raises(TryAgainError, match=r"no turn to write within 0\.2 s"), engine.begin() as connection:
            connection.execute(text("INSERT INTO t VALUES (2)"))


def test_what_a_statement_with_a_subquery_has_written_does_not_outlive_an_error(engines: MakeEngine) -> None:
    """Python's sqlite3 begins no transaction for such a statement."""
    engine = engines()
    claim = text("WITH a AS (SELECT 1 AS x) INSERT INTO t SELECT x FROM a RETURNING x")
    for committed in ([1], [1]):
        with pytest.raises(ZeroDivisionError), engine.begin() as connection:
            connection.execute(claim).all()
            raise ZeroDivisionError
        assert numbers(engine) == committed
        Turns().install(engine)


def test_errors_that_are_mistakes_are_not_retried(engines: MakeEngine) -> None:
    with pytest.raises(OperationalError) as mistake, engines().begin() as connection:
        connection.execute(text("SELECT nothing FROM t"))
    assert not can_be_retried(mistake.value)
    assert not can_be_retried(ValueError("database is locked"))


def test_a_full_disk_can_be_retried(engines: MakeEngine) -> None:
    with pytest.raises(OperationalError, match="full") as full, engines().begin() as connection:
        connection.execute(text("PRAGMA max_page_count = 1"))
        connection.execute(text("INSERT INTO t VALUES (zeroblob(100000))"))
    assert can_be_retried(full.value)


# -- the names of Flower ----------------------------------------------------------------------------------


@pytest.mark.parametrize("saving", PATCHES, ids=lambda saving: saving.name)
def test_flower_has_every_name_that_is_used(saving: Patch) -> None:
    assert missing_name(saving.needs) == ""


def test_what_flower_lacks_or_has_in_another_form_is_named() -> None:
    module = "flwr.server.superlink.linkstate.sql_linkstate"
    assert missing_name({f"{module}:SqlLinkState.no_such": None}) == f"{module}:SqlLinkState.no_such is missing"
    assert missing_name({"flwr.nothing:x": None}) == "flwr.nothing:x is missing"
    path = f"{module}:SqlLinkState.get_run_status"
    assert missing_name({path: "self runs"}) == f"{path} takes (self run_ids), not (self runs)"


def test_a_saving_that_flower_no_longer_admits_is_left_out_and_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    savings = (Patch("the moon", {"flwr.nothing:x": None}, database._Keys), Patch("the sun", {}, database._Tasks))
    monkeypatch.setattr(database, "PATCHES", savings)
    monkeypatch.setattr(database.TURNS, "install", lambda: None)
    monkeypatch.setattr(linkstate_factory, "SqlLinkState", linkstate_factory.SqlLinkState)
    database.apply_patches()
    assert "flwr.nothing:x is missing: the SuperLink runs without the moon" in caplog.text
    assert "the sun" not in caplog.text
    kind = linkstate_factory.SqlLinkState
    assert issubclass(kind, database._Tasks) and not issubclass(kind, database._Keys)


# -- the state of a SuperLink -----------------------------------------------------------------------------


class Ours:
    """A SuperLink's state with a run and a node."""

    def __init__(self, path: Path, kind: type[SqlLinkState]) -> None:
        self.store = ObjectStoreFactory().store()
        self.state = kind(str(path), NoOpFederationManager(), self.store)
        self.state.initialize()
        self.engine = self.state._engine
        self.run, self.task = self.create_run()
        self.token = self.state.claim_task(self.task)
        self.state.activate_task(self.task)
        self.node = self.state.create_node("account", "name", b"key", 30.0)
        self.state.activate_node(self.node, 30.0)

    def create_run(self) -> tuple[int, int]:
        """Create a run and return its number and the number of its task."""
        kind = TaskType.SERVER_APP
        number = self.state.create_run("posy", "1", "hash", {}, NOOP_FEDERATION_ID, None, "account", kind)
        [info] = self.state.get_run_info(run_ids=[number])
        return number, info.primary_task_id

    def push(self, ttl: float = 100.0) -> str:
        """Push a message to the node and return its id."""
        message = self.message(ttl)
        self.store_with_objects(message)
        return message.object_id

    def message(self, ttl: float = 100.0) -> Message:
        """Return a message to the node."""
        metadata = Metadata(self.run, "", SUPERLINK_NODE_ID, self.node, "", "1", time.time(), ttl, "train")
        return make_message(metadata, RecordDict({"config": ConfigRecord({"round": 1})}))

    def store_with_objects(self, message: Message) -> None:
        for store in self.store_without_objects(message):
            assert store()

    def store_without_objects(self, message: Message) -> list[Callable[[], bool]]:
        """Store a message; return a function for each of its objects that stores the object."""
        message.metadata.__dict__["_message_id"] = message.object_id
        session = self.state.start_session(self.run)
        stored, missing = self.state.store_message_and_object_tree(message, get_object_tree(message), session)
        assert stored
        self.objects = {name: thing.deflate() for name, thing in get_all_nested_objects(message).items()}
        store = partial(self.state.store_object, self.run, session)
        return [partial(store, name, self.objects[name]) for name in missing]

    def pull(self, *, confirm: bool = True) -> list[str]:
        """Pull messages for the node as it does, and return their ids."""
        request = PullMessagesRequest(node=Node(node_id=self.node))
        response = message_handler.pull_messages(request=request, state=self.state, store=self.store)
        numbers = [message.metadata.message_id for message in response.messages_list]
        if confirm:
            for number in numbers:
                self.store.delete(number)
        return numbers

    def receive(self) -> list[Message]:
        """Pull a message for the node, and confirm it."""
        messages = self.state.get_message_ins(self.node, 1)
        for message in messages:
            self.store.delete(message.metadata.message_id)
        return messages

    def replies(self, message_ids: list[str]) -> list[str]:
        """Pull the replies to messages as a ServerApp does, and return their ids."""
        request = PullAppMessagesRequest(message_ids=message_ids)
        response = runtime_handlers.pull_messages(request, self.state, Task(run_id=self.run))
        return [message.metadata.message_id for message in response.messages_list]

    def upkeep(self) -> None:
        """Run the upkeep that the SuperLink runs once a second."""
        for job in self.state._jobs():
            job()


@pytest.fixture
def ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ours]:
    """Return a state whose upkeep only the tests run."""
    monkeypatch.setattr(database._EachSecond, "_go_on", lambda state: None)
    superlink = Ours(tmp_path / "state.db", patched_state(*(saving.state for saving in PATCHES if saving.state)))
    database.TURNS.install(superlink.engine)
    superlink.state._look_at_deadlines()
    yield superlink
    superlink.engine.dispose()


def written(ours: Ours, statement: str) -> Any:
    """Return the first value of a query, read directly from the database file."""
    with sqlite3.connect(ours.state.database_url.removeprefix("sqlite:///")) as connection:
        return connection.execute(statement).fetchone()[0]


def count_writes(ours: Ours) -> list[str]:
    """Return a list that collects the writing statements."""
    writes: list[str] = []

    def note(connection: Any, cursor: Any, statement: str, *_: Any) -> None:
        if database._WRITES.match(statement):
            writes.append(statement)

    event.listen(ours.engine, "before_cursor_execute", note)
    return writes


# -- requests that wait for messages ----------------------------------------------------------------------


@pytest.fixture
def holding(ours: Ours, monkeypatch: pytest.MonkeyPatch) -> Ours:
    """Return a state whose requests for messages wait for up to 5 s."""
    arrivals = database.Arrivals()
    monkeypatch.setattr(database, "ARRIVALS", arrivals)
    monkeypatch.setattr(database, "HOLD_SECONDS", 5.0)
    for module, asking in ((message_handler, database.NODES), (runtime_handlers, database.SERVERS)):
        monkeypatch.setattr(module, "pull_messages", arrivals.hold(asking, module.pull_messages))
    return ours


def after(seconds: float, act: Callable[[], object]) -> threading.Timer:
    timer = threading.Timer(seconds, act)
    timer.start()
    return timer


def test_a_request_of_a_node_waits_until_all_objects_of_a_message_have_arrived(holding: Ours) -> None:
    message = holding.message()
    *first, last = holding.store_without_objects(message)
    for store in first:
        store()
    begun = time.monotonic()
    timer = after(0.3, last)
    assert holding.pull() == [message.object_id]
    assert 0.25 < time.monotonic() - begun < 3
    timer.join()


def test_a_request_of_a_server_app_waits_for_replies_and_gathers_them(holding: Ours) -> None:
    numbers = [holding.push(), holding.push()]
    messages = [holding.receive()[0] for _ in numbers]
    replies = [Message(RecordDict(), reply_to=message) for message in messages]
    timers = [after(0.2 + i / 50, partial(holding.store_with_objects, reply)) for i, reply in enumerate(replies)]
    assert sorted(holding.replies(numbers)) == sorted(reply.object_id for reply in replies)
    for timer in timers:
        timer.join()


def test_a_request_waits_for_a_limited_time_and_server_apps_in_limited_number(
    holding: Ours, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "HOLD_SECONDS", 0.2)
    pushed = holding.push()
    holding.receive()
    for wait in (holding.pull, lambda: holding.replies([pushed])):
        begun = time.monotonic()
        assert wait() == []
        assert 0.15 < time.monotonic() - begun < 3
    semaphore = database.ARRIVALS._places[database.SERVERS]
    acquired = [semaphore.acquire(blocking=False) for _ in range(database.HELD_SERVERS)]
    assert all(acquired), "a request that has ended has returned its place"
    begun = time.monotonic()
    assert holding.replies([pushed]) == []
    assert time.monotonic() - begun < 0.15


def test_one_request_of_a_node_waits_at_a_time(holding: Ours, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "HOLD_SECONDS", 0.6)
    with futures.ThreadPoolExecutor(2) as pool:
        first = pool.submit(holding.pull)
        time.sleep(0.2)
        begun = time.monotonic()
        assert holding.pull() == []
        assert time.monotonic() - begun < 0.2
        assert first.result() == []
    assert database.ARRIVALS._held == set()


def test_messages_without_objects_to_send_and_ended_sessions_are_noted() -> None:
    arrivals = database.Arrivals()
    answers = [SimpleNamespace(objects_to_push=parts, session_id=name) for parts, name in (([], "a"), (["x"], "b"))]
    announce = arrivals.announce(database.SERVERS, lambda request, state: answers[request])
    announce(0, None)
    assert arrivals._counts == {database.NODES: 0, database.SERVERS: 1}
    announce(1, None)
    arrivals.arrived(arrivals.receivers_of("b"))
    assert arrivals._counts == {database.NODES: 0, database.SERVERS: 2}
    arrivals.ended("b")
    assert arrivals._receivers == {}
    arrivals.arrived(arrivals.receivers_of("unknown"))
    assert arrivals._counts == {database.NODES: 1, database.SERVERS: 3}


# -- messages ---------------------------------------------------------------------------------------------


def test_a_message_is_handed_out_once_and_only_while_it_lives(ours: Ours) -> None:
    assert ours.pull() == []
    ours.push(ttl=0.05)
    time.sleep(0.1)
    pushed = [ours.push(), ours.push()]
    assert [ours.pull(), ours.pull(), ours.pull()] == [pushed[:1], pushed[1:], []]


def test_a_message_that_its_node_has_not_received_is_handed_out_again_but_not_for_ever(ours: Ours) -> None:
    first = ours.push(), ours.push()
    assert [ours.pull(confirm=False) for _ in range(database.MOST_TIMES + 1)] == [[first[0]]] * 4
    assert ours.pull() == [first[1]]
    assert ours.pull() == []


def test_a_message_whose_claim_was_taken_back_is_handed_out_once(ours: Ours) -> None:
    pushed = ours.push()
    with pytest.raises(ZeroDivisionError), ours.state.session():
        assert ours.pull(confirm=False) == [pushed]
        raise ZeroDivisionError
    assert [ours.pull(), ours.pull()] == [[pushed], []]


def test_a_reply_that_the_server_app_has_not_received_is_handed_out_again(ours: Ours) -> None:
    first, second = ours.push(), ours.push()
    [message] = ours.state.get_message_ins(ours.node, 1)
    reply = Message(RecordDict(), reply_to=message)
    ours.store_with_objects(reply)
    for _ in range(2):
        assert ours.replies([first, second]) == [reply.object_id]
    ours.store.delete(reply.object_id)  # as the confirmation does
    assert ours.replies([second]) == []
    assert ours.state._answers == {}


def test_a_message_that_lacks_an_object_is_handed_out_when_it_is_whole_and_holds_up_no_other(ours: Ours) -> None:
    message = ours.message()
    *first, last = ours.store_without_objects(message)
    assert all(store() for store in first), "there are several"
    assert ours.pull() == []
    second = ours.push()
    assert ours.pull() == [second]
    assert last()
    assert [ours.pull(), ours.pull()] == [[message.object_id], []]


def test_a_reply_that_lacks_an_object_holds_up_no_other(ours: Ours) -> None:
    pushed = [ours.push(), ours.push()]
    [first], [second] = (ours.receive() for _ in pushed)
    slow = Message(RecordDict({"config": ConfigRecord({"round": 1})}), reply_to=first)
    quick = Message(RecordDict(), reply_to=second)
    *objects, last = ours.store_without_objects(slow)
    assert all(store() for store in objects), "there are several"
    ours.store_with_objects(quick)
    assert ours.replies(pushed) == [quick.object_id]
    ours.store.delete(quick.object_id)
    assert ours.replies(pushed[:1]) == []
    assert last()
    assert ours.replies(pushed[:1]) == [slow.object_id]


def test_what_lacks_an_object_for_too_long_is_given_up_and_can_be_sent_again(
    ours: Ours, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(in_memory_corestate, "OBJECT_PUSH_SESSION_TTL_SECONDS", 0.05)
    message = ours.message()
    ours.store_without_objects(message)
    assert ours.pull() == []
    time.sleep(0.1)
    ours.upkeep()
    assert message.object_id not in ours.store
    assert ours.pull() == []
    pushed = ours.push()
    [message] = ours.receive()
    reply = Message(RecordDict({"config": ConfigRecord({"round": 1})}), reply_to=message)
    ours.store_without_objects(reply)
    assert ours.replies([pushed]) == []
    time.sleep(0.1)
    ours.upkeep()
    assert ours.replies([pushed]) == []
    monkeypatch.undo()
    ours.store_with_objects(reply)
    assert ours.replies([pushed]) == [reply.object_id]


def test_a_kept_message_whose_claim_was_taken_back_is_handed_out_once(ours: Ours) -> None:
    message = ours.message()
    *first, last = ours.store_without_objects(message)
    with pytest.raises(ZeroDivisionError), ours.state.session():
        assert ours.pull() == []
        raise ZeroDivisionError
    assert all(store() for store in (*first, last))
    assert [ours.pull(), ours.pull()] == [[message.object_id], []]


def test_an_object_may_be_sent_twice(ours: Ours) -> None:
    """A caller that misses the answer to its first call repeats it, even for the last object."""
    ours.push()
    name = min(ours.objects)
    assert ours.state.store_object(ours.run, "", name, ours.objects[name])
    assert not ours.state.store_object(ours.run, "", "0" * 64, b"")


def test_a_message_for_another_run_is_not_claimed(ours: Ours) -> None:
    pushed = ours.push()
    assert ours.state.get_message_ins(ours.node, None, run_id=ours.run + 1) == []
    [message] = ours.state.get_message_ins(ours.node, None, run_id=ours.run)
    assert message.metadata.message_id == pushed


def test_a_message_whose_call_has_failed_is_handed_out_again(ours: Ours, monkeypatch: pytest.MonkeyPatch) -> None:
    pushed = ours.push()
    monkeypatch.setattr(message_handler, "pull_messages", message_handler.pull_messages)
    database._whole_calls()
    tree = ours.store.get_object_tree

    def broken(object_id: str) -> Any:
        monkeypatch.setattr(ours.store, "get_object_tree", tree)
        raise TryAgainError

    monkeypatch.setattr(ours.store, "get_object_tree", broken)
    with pytest.raises(TryAgainError):
        ours.pull()
    assert ours.pull() == [pushed]


def test_polls_and_objects_write_nothing(ours: Ours) -> None:
    pushed = ours.push()
    assert ours.pull(confirm=False) == [pushed]
    assert ours.state.get_object(ours.run, pushed)
    ours.store.delete(pushed)
    writes = count_writes(ours)
    assert ours.pull() == []
    assert ours.state.get_message_res({pushed}, ours.run) == []
    ours.state.store_traffic(ours.run, bytes_sent=1, bytes_recv=0)
    ours.state.get_run_status({ours.run})
    assert writes == []


def test_a_reply_and_a_node_that_is_gone_are_seen(ours: Ours) -> None:
    first, second = ours.push(), ours.push()
    [message] = ours.state.get_message_ins(ours.node, 1)
    reply = Message(RecordDict(), reply_to=message)
    reply.metadata.__dict__["_message_id"] = reply.object_id
    assert ours.state.store_message_res(reply) == reply.object_id
    [answer] = ours.state.get_message_res({first, second}, ours.run)
    assert answer.metadata.reply_to_message_id == first
    assert ours.state.get_message_res({second}, ours.run) == []
    ours.state.deactivate_node(ours.node)
    [answer] = ours.state.get_message_res({second}, ours.run)
    assert answer.error.code == ErrorCode.NODE_UNAVAILABLE


def test_a_node_that_is_unregistered_is_not_known_from_then_on(ours: Ours) -> None:
    assert ours.state.get_node_id_by_public_key(b"key") == ours.node
    reads: list[str] = []
    event.listen(ours.engine, "before_cursor_execute", lambda *call: reads.append(call[2]))
    assert ours.state.get_node_id_by_public_key(b"key") == ours.node
    assert reads == []
    ours.state.delete_node("account", ours.node)
    assert ours.state.get_node_id_by_public_key(b"key") is None


def test_a_run_waits_while_as_many_start_as_there_are_cores(ours: Ours, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POSY_CORES", "2")
    tasks = [ours.create_run()[1] for _ in range(4)]
    tokens = [ours.state.claim_task(task) for task in tasks]
    assert [token is not None for token in tokens] == [True, True, False, False]
    assert ours.state.activate_task(tasks[0])
    assert ours.state.claim_task(tasks[0]) is None  # it runs
    assert written(ours, "SELECT COUNT(*) FROM task WHERE token IS NULL AND active_until IS NOT NULL") == 0
    assert ours.state.claim_task(tasks[2]) and not ours.state.claim_task(tasks[3])
    assert ours.state.finish_task(tasks[1], SubStatus.STOPPED, "")
    assert ours.state.claim_task(tasks[3])


def test_a_server_app_has_minutes_to_start(ours: Ours) -> None:
    assert ours.state.claim_task(ours.create_run()[1])
    allowed = "strftime('%s', active_until) - strftime('%s', starting_at)"
    seconds = written(ours, f"SELECT {allowed} FROM task WHERE running_at IS NULL")
    assert seconds == pytest.approx(database.START_SECONDS, abs=1)


def test_the_end_of_a_run_is_seen_at_once(ours: Ours) -> None:
    assert ours.state.get_run_status({ours.run})[ours.run].status == Status.RUNNING
    assert ours.state.get_task_by_token(ours.token) is not None
    ours.state.finish_task(ours.task, SubStatus.COMPLETED, "")
    assert ours.state.get_run_status({ours.run})[ours.run].status == Status.FINISHED
    assert ours.state.get_task_by_token(ours.token) is None


def test_traffic_is_told_at_once_and_written_once(ours: Ours) -> None:
    ours.state._write_sums()
    for _ in range(3):
        ours.state.store_traffic(ours.run, bytes_sent=5, bytes_recv=2)
    ours.state.add_clientapp_runtime(ours.run, 1.5)
    for _ in range(2):
        [run] = ours.state.get_run_info(run_ids=[ours.run])
        assert (run.bytes_sent, run.bytes_recv, run.clientapp_runtime) == (15, 6, 1.5)
        ours.state._write_sums()
        assert written(ours, "SELECT bytes_sent FROM run") == 15
    for wrong in ({"bytes_sent": -1, "bytes_recv": 1}, {"bytes_sent": 0, "bytes_recv": 0}):
        with pytest.raises(ValueError, match="bytes"):
            ours.state.store_traffic(ours.run, **wrong)


def test_upkeep_is_done_by_itself_and_goes_on_after_an_error(ours: Ours, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(database, "CACHE_SECONDS", 0.05)
    errors: list[Exception] = [ValueError(), TryAgainError()]
    write = ours.state._write_sums

    def failing() -> None:
        if errors:
            raise errors.pop()
        write()

    monkeypatch.setattr(ours.state, "_write_sums", failing)
    ours.state.store_traffic(ours.run, bytes_sent=5, bytes_recv=2)
    upkeep = threading.Thread(target=ours.state._go_on, daemon=True)
    upkeep.start()
    end = time.monotonic() + 20.0
    while written(ours, "SELECT bytes_sent FROM run") != 5:
        assert time.monotonic() < end
        time.sleep(0.02)
    monkeypatch.setattr(ours.state, "_jobs", sys.exit)  # otherwise it would reset the flags of other tests' states
    upkeep.join()


def the_clock_was_set(ours: Ours) -> None:
    ours.state._clocks -= 3600


def writes_failed_for_seconds(ours: Ours) -> None:
    database.TURNS._failing = time.monotonic() - 5
    with ours.engine.begin() as connection:
        connection.execute(text("UPDATE run SET bytes_sent = 0"))  # the first write that succeeds


@pytest.mark.parametrize("fault", [the_clock_was_set, writes_failed_for_seconds])
def test_what_kept_signs_of_life_away_ends_no_run_and_loses_no_node(ours: Ours, fault: Callable[[Ours], None]) -> None:
    pushed = ours.push()
    past(ours)
    fault(ours)
    calls = [
        lambda: ours.state.get_task_by_token(ours.token),
        lambda: ours.state.acknowledge_task_heartbeat(ours.task),
        lambda: ours.state.get_message_res({pushed}, ours.run),
    ]
    for call in calls:
        with pytest.raises(TryAgainError):
            call()
    assert [info.status for info in ours.state.get_node_info()] == ["online"]
    ours.state._look_at_deadlines()
    assert ours.state.get_task_by_token(ours.token) is not None
    assert ours.state.acknowledge_task_heartbeat(ours.task)
    assert ours.state.get_message_res({pushed}, ours.run) == []


def test_without_such_a_reason_deadlines_hold(ours: Ours) -> None:
    past(ours)
    ours.state._look_at_deadlines()
    assert ours.state.get_run_status({ours.run})[ours.run].status == Status.FINISHED
    assert [info.status for info in ours.state.get_node_info()] == ["offline"]


def past(ours: Ours) -> None:
    """Make all deadlines expire."""
    with ours.engine.begin() as connection:
        connection.execute(text("UPDATE node SET online_until = 1"))
        connection.execute(text("UPDATE task SET active_until = '2020-01-01 00:00:00.000000'"))


# -- answers to callers -----------------------------------------------------------------------------------


def locked() -> OperationalError:
    error = sqlite3.OperationalError("database is locked")
    error.sqlite_errorcode = sqlite3.SQLITE_BUSY
    return OperationalError("UPDATE", {}, error)


def abort_as_flower_does(context: grpc.ServicerContext) -> None:
    context.abort(grpc.StatusCode.UNAUTHENTICATED, "Invalid timestamp")


def fail(error: Exception) -> Callable[[Any], Any]:
    def failing(context: Any) -> None:
        raise error

    return failing


@pytest.mark.parametrize(
    ("method", "act", "code"),
    [
        ("PullMessages", fail(locked()), grpc.StatusCode.UNAVAILABLE),
        ("PullMessages", fail(ValueError("a mistake")), grpc.StatusCode.INTERNAL),
        ("PullMessages", abort_as_flower_does, grpc.StatusCode.UNAVAILABLE),
        ("ActivateNode", abort_as_flower_does, grpc.StatusCode.UNAUTHENTICATED),
    ],
)
def test_a_node_is_told_to_call_again_only_when_that_helps(
    method: str, act: Callable[[Any], Any], code: grpc.StatusCode
) -> None:
    """Flower's translator of errors handles the calls of nodes first, as in a SuperLink."""
    from flwr.supercore.interceptors import RpcErrorTranslationServerInterceptor

    def answer(request: bytes, context: grpc.ServicerContext) -> bytes:
        act(context)
        return b""

    handlers = {method: grpc.unary_unary_rpc_method_handler(answer)}
    interceptors = [RpcErrorTranslationServerInterceptor(), database.AskAgain()]
    server = grpc.server(futures.ThreadPoolExecutor(1), interceptors=interceptors)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("flwr.proto.Fleet", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel, pytest.raises(grpc.RpcError) as failed:
            channel.unary_unary(f"/flwr.proto.Fleet/{method}")(b"", timeout=10.0)
        assert failed.value.code() is code
    finally:
        server.stop(None)


def test_a_server_app_is_told_to_call_again_only_when_that_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    from fastapi.testclient import TestClient
    from flwr.proto.runtime_pb2 import AcquireTaskRequest
    from flwr.supercore.protobuf.constants import PROTOBUF_MEDIA_TYPE
    from flwr.superlink import extensions, main

    superlink = importlib.import_module("flwr.superlink.cli.flower_superlink")
    for module, name in ((extensions, "configure_app"), (superlink, "_run_fleet_api_grpc_rere")):
        monkeypatch.setattr(module, name, getattr(module, name))
    database._retry_errors()
    app = main.create_app()
    error: list[Exception] = [locked(), TryAgainError(), ValueError("a mistake")]

    def failing(*_: Any) -> None:
        raise error.pop(0)

    app.state.runtime_handlers = SimpleNamespace(acquire_task=failing)
    client = TestClient(app, raise_server_exceptions=False)
    request = AcquireTaskRequest(supported_task_types=["x"]).SerializeToString()
    headers = {"content-type": PROTOBUF_MEDIA_TYPE}
    answers = [client.post("/v1/runtime/acquire-task", content=request, headers=headers) for _ in range(3)]
    assert [answer.status_code for answer in answers] == [503, 503, 500], answers[0].text


# -- the code of runs -------------------------------------------------------------------------------------


@pytest.fixture
def bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fab:
    """Return the code of an app, and make Flower install it in the folder of the test."""
    monkeypatch.setenv("FLWR_HOME", str(tmp_path / "flower"))
    config = '[project]\nname = "a"\nversion = "1.0"\ndescription = ""\nlicense = "MIT"\n[tool.flwr.app]\n'
    config += 'publisher = "p"\n[tool.flwr.app.components]\nserverapp = "s:app"\nclientapp = "c:app"\n'
    files = {"pyproject.toml": config, **{f"m{i}.py": "x = 1\n" for i in range(50)}, "LICENSE": "free\n"}
    content = build_fab_from_files({name: text.encode() for name, text in files.items()})[0]
    return Fab(hashlib.sha256(content).hexdigest(), content, {})


def test_code_that_many_install_at_once_is_whole_as_soon_as_it_is_there(bundle: Fab, tmp_path: Path) -> None:
    apps = tmp_path / "flower" / "apps"
    sizes: list[int] = []

    def look() -> None:
        while not any(sizes):
            sizes.extend(len(list(folder.iterdir())) for folder in apps.glob("p.a.*"))

    with futures.ThreadPoolExecutor(9) as threads:
        watching = threads.submit(look)
        for done in [threads.submit(install_whole, bundle) for _ in range(8)]:
            done.result()
        watching.result()
    [code] = apps.iterdir()  # the only folder
    assert code == get_project_dir("p/a", "1.0", bundle.hash_str)
    assert set(sizes) == {52}
    before = code.stat().st_mtime_ns
    install_whole(bundle)
    assert code.stat().st_mtime_ns == before


def test_the_superlink_has_installed_the_code_that_it_hands_out(
    ours: Ours, bundle: Fab, caplog: pytest.LogCaptureFixture
) -> None:
    ours.state.store_fab(bundle)
    assert ours.state.get_fab("none") is None
    assert ours.state.get_fab(bundle.hash_str) == bundle
    assert (get_project_dir("p/a", "1.0", bundle.hash_str) / "pyproject.toml").is_file()
    other = Fab(hashlib.sha256(b"no bundle").hexdigest(), b"no bundle", {})
    ours.state.store_fab(other)
    assert ours.state.get_fab(other.hash_str) == other
    assert f"Flower must install the code {other.hash_str} itself: File is not a zip file" in caplog.text
