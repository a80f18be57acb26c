"""The SuperLink's use of its database: serialised writers, deadlines, and errors that callers retry."""

import contextlib
import hashlib
import io
import shutil
import sqlite3
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from concurrent import futures
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from flwr.cli.build import build_fab_from_files
from flwr.cli.install import install_from_fab
from flwr.common.config import get_project_dir
from flwr.common.constant import Status
from flwr.server.superlink.linkstate import SqlLinkState
from flwr.supercore.constant import NOOP_FEDERATION_ID, TaskType
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.superlink.federation import NoOpFederationManager
from sqlalchemy import Engine, create_engine, event, text
from sqlalchemy.exc import OperationalError

from posy.deploy import database, link
from posy.deploy.database import TryAgainError, Turns, can_be_retried
from posy.deploy.flower_internals import MEDIA_TYPE
from posy.deploy.front import AskAgain
from posy.deploy.install import BundleError, client_app_of, default_config, install_whole

MakeEngine = Callable[[], Engine]


@pytest.fixture
def engines(tmp_path: Path) -> Iterator[MakeEngine]:
    """Return a function that creates engines for one database. Their connections wait 50 ms for its lock."""
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


def write_during_another_transaction(engine: Engine, statement: str = "INSERT INTO t VALUES (2)") -> None:
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
def test_writers_wait_for_their_turn(engines: MakeEngine, statement: str) -> None:
    engine = engines()
    with pytest.raises(OperationalError, match="database is locked") as error:
        write_during_another_transaction(engine, statement)
    assert can_be_retried(error.value)
    assert numbers(engine) == [1]
    Turns().install(engine)
    write_during_another_transaction(engine, statement)
    assert numbers(engine) == [1, 1, 2]


def test_a_reader_does_not_wait_for_a_writer(engines: MakeEngine) -> None:
    engine = engines()
    Turns().install(engine)
    with engine.begin() as writer:
        writer.execute(text("INSERT INTO t VALUES (1)"))
        assert numbers(engine) == []


def test_errors_and_invalidated_connections_release_the_turn(
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


def test_a_writer_without_a_turn_raises_try_again(engines: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "TURN_SECONDS", 0.2)
    engine = engines()
    Turns().install(engine)
    with engine.begin() as holder:
        holder.execute(text("INSERT INTO t VALUES (1)"))
        with pytest.raises(TryAgainError, match=r"no turn to write within 0\.2 s"), engine.begin() as connection:
            connection.execute(text("INSERT INTO t VALUES (2)"))


def test_a_write_with_a_subquery_is_rolled_back_after_an_error(engines: MakeEngine) -> None:
    """Python's sqlite3 begins no transaction for such a statement."""
    engine = engines()
    claim = text("WITH a AS (SELECT 1 AS x) INSERT INTO t SELECT x FROM a RETURNING x")
    for committed in ([1], [1]):
        with pytest.raises(ZeroDivisionError), engine.begin() as connection:
            connection.execute(claim).all()
            raise ZeroDivisionError
        assert numbers(engine) == committed
        Turns().install(engine)


def test_permanent_errors_are_not_retried(engines: MakeEngine) -> None:
    with pytest.raises(OperationalError) as mistake, engines().begin() as connection:
        connection.execute(text("SELECT nothing FROM t"))
    assert not can_be_retried(mistake.value)
    assert not can_be_retried(ValueError("database is locked"))


def test_a_full_disk_can_be_retried(engines: MakeEngine) -> None:
    with pytest.raises(OperationalError, match="full") as full, engines().begin() as connection:
        connection.execute(text("PRAGMA max_page_count = 1"))
        connection.execute(text("INSERT INTO t VALUES (zeroblob(100000))"))
    assert can_be_retried(full.value)


# -- deadlines --------------------------------------------------------------------------------------------


class SuperLinkState:
    """A SuperLink's state with a run and a node, and turns for the writers of its database."""

    def __init__(self, path: Path) -> None:
        self.turns = Turns()
        self.state = SqlLinkState(str(path), NoOpFederationManager(), ObjectStoreFactory().store())
        self.state.initialize()
        self.turns.install(self.state._engine)
        self.turns._gap = False
        self.run = self.state.create_run(
            "posy", "1", "hash", {}, NOOP_FEDERATION_ID, None, "account", TaskType.SERVER_APP
        )
        [info] = self.state.get_run_info(run_ids=[self.run])
        self.task = info.primary_task_id
        self.token = self.state.claim_task(self.task)
        self.node = self.state.create_node("account", "name", b"key", 30.0)
        self.state.activate_node(self.node, 30.0)

    def expire(self) -> None:
        """Let all deadlines pass."""
        path = self.state.database_url.removeprefix("sqlite:///")
        with contextlib.closing(sqlite3.connect(path)) as connection, connection:
            connection.execute("UPDATE node SET online_until = 1")
            connection.execute("UPDATE task SET active_until = '2020-01-01 00:00:00+00:00'")


@pytest.fixture
def superlink(tmp_path: Path) -> Iterator[SuperLinkState]:
    superlink = SuperLinkState(tmp_path / "state.db")
    assert superlink.state.activate_task(superlink.task)
    yield superlink
    superlink.state._engine.dispose()


def restart(superlink: SuperLinkState) -> None:
    superlink.turns._gap = True


def set_clock_back(superlink: SuperLinkState) -> None:
    superlink.turns._clocks -= 3600


def fail_to_write_for_seconds(superlink: SuperLinkState) -> None:
    superlink.turns._failing = time.monotonic() - 5
    with superlink.state._engine.begin() as connection:
        connection.execute(text("UPDATE run SET bytes_sent = 0"))  # the first write that succeeds


@pytest.mark.parametrize("fault", [restart, set_clock_back, fail_to_write_for_seconds])
@pytest.mark.parametrize("first", ["token", "heartbeat", "status", "nodes"])
def test_a_fault_of_the_superlink_extends_deadlines(
    superlink: SuperLinkState, fault: Callable[[SuperLinkState], None], first: str
) -> None:
    calls: dict[str, Callable[[], Any]] = {
        "token": lambda: superlink.state.get_task_by_token(superlink.token),
        "heartbeat": lambda: superlink.state.acknowledge_task_heartbeat(superlink.task),
        "status": lambda: superlink.state.get_run_status({superlink.run})[superlink.run].status == Status.RUNNING,
        "nodes": lambda: [info.status for info in superlink.state.get_node_info()] == ["online"],
    }
    superlink.expire()
    fault(superlink)
    for name in sorted(calls, key=lambda name: name != first):
        assert calls[name](), name


def test_deadlines_hold_without_a_fault(superlink: SuperLinkState) -> None:
    superlink.expire()
    assert superlink.state.get_task_by_token(superlink.token) is None
    assert superlink.state.get_run_status({superlink.run})[superlink.run].status == Status.FINISHED
    assert [info.status for info in superlink.state.get_node_info()] == ["offline"]


def test_an_offline_node_stays_offline_after_a_restart(superlink: SuperLinkState) -> None:
    superlink.expire()
    assert [info.status for info in superlink.state.get_node_info()] == ["offline"]
    restart(superlink)
    assert [info.status for info in superlink.state.get_node_info()] == ["offline"]


def test_a_failed_deadline_extension_can_be_retried(superlink: SuperLinkState) -> None:
    superlink.expire()
    restart(superlink)
    with contextlib.closing(sqlite3.connect(superlink.state.database_url.removeprefix("sqlite:///"))) as holder:
        event.listen(
            superlink.state._engine,
            "connect",
            lambda connection, _: connection.execute("PRAGMA busy_timeout = 50") and None,
        )
        superlink.state._engine.dispose()
        holder.execute("BEGIN IMMEDIATE")
        with pytest.raises((sqlite3.OperationalError, OperationalError)) as failed:
            superlink.state.get_task_by_token(superlink.token)
        assert can_be_retried(failed.value)
    assert superlink.state.get_task_by_token(superlink.token) is not None


def test_a_server_app_gets_start_seconds_to_start(tmp_path: Path) -> None:
    superlink = SuperLinkState(tmp_path / "state.db")
    superlink.turns.give_time_to_start(superlink.token)
    connection = sqlite3.connect(tmp_path / "state.db")
    [(until,)] = connection.execute("SELECT active_until FROM task")
    connection.close()
    remaining = (datetime.fromisoformat(until) - datetime.now(UTC)).total_seconds()
    assert database.START_SECONDS - 20 < remaining <= database.START_SECONDS
    assert superlink.state.activate_task(superlink.task)
    superlink.state._engine.dispose()


# -- answers to callers -----------------------------------------------------------------------------------


def locked_error() -> OperationalError:
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
        ("PullMessages", fail(locked_error()), grpc.StatusCode.UNAVAILABLE),
        ("PullMessages", fail(ValueError("a mistake")), grpc.StatusCode.INTERNAL),
        ("PullMessages", abort_as_flower_does, grpc.StatusCode.UNAVAILABLE),
        ("ActivateNode", abort_as_flower_does, grpc.StatusCode.UNAUTHENTICATED),
    ],
)
def test_nodes_retry_only_transient_errors(method: str, act: Callable[[Any], Any], code: grpc.StatusCode) -> None:
    """Flower's error interceptor handles the calls of nodes first, as in a SuperLink."""
    from flwr.supercore.interceptors import RpcErrorTranslationServerInterceptor

    def answer(request: bytes, context: grpc.ServicerContext) -> bytes:
        act(context)
        return b""

    handlers = {method: grpc.unary_unary_rpc_method_handler(answer)}
    interceptors = [RpcErrorTranslationServerInterceptor(), AskAgain()]
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


def test_server_apps_retry_only_transient_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    from fastapi.testclient import TestClient
    from flwr.proto.runtime_pb2 import GetNodesRequest
    from flwr.superlink import main

    app = main.create_app()
    for kind in link.RETRIED:
        app.add_exception_handler(kind, link.ask_again)
    error: list[Exception] = [locked_error(), TryAgainError(), ValueError("a mistake")]

    def failing(*_: Any) -> None:
        raise error.pop(0)

    app.state.runtime_state_factory = SimpleNamespace(state=failing)
    client = TestClient(app, raise_server_exceptions=False)
    headers = {"content-type": MEDIA_TYPE, "flwr-task-token": "token"}
    content = GetNodesRequest().SerializeToString()
    answers = [client.post("/v1/runtime/get-nodes", content=content, headers=headers) for _ in range(3)]
    assert [answer.status_code for answer in answers] == [503, 503, 500], answers[0].text


# -- installed code of runs -------------------------------------------------------------------------------


@pytest.fixture
def bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[bytes, str]:
    """Return the code of an app and its hash, and make Flower install it in the folder of the test."""
    monkeypatch.setenv("FLWR_HOME", str(tmp_path / "flower"))
    config = '[project]\nname = "a"\nversion = "1.0"\ndescription = ""\nlicense = "MIT"\n[tool.flwr.app]\n'
    config += 'publisher = "p"\n[tool.flwr.app.components]\nserverapp = "s:app"\nclientapp = "c:app"\n'
    config += "[tool.flwr.app.config]\nlr = 0.1\n[tool.flwr.app.config.deep]\ner = true\n"
    files = {"pyproject.toml": config, **{f"m{i}.py": "x = 1\n" for i in range(50)}, "LICENSE": "free\n"}
    content = build_fab_from_files({name: text.encode() for name, text in files.items()})[0]
    return content, hashlib.sha256(content).hexdigest()


def test_concurrent_installation_is_atomic(bundle: tuple[bytes, str], tmp_path: Path) -> None:
    apps = tmp_path / "flower" / "apps"
    sizes: list[int] = []

    def look() -> None:
        while not any(sizes):
            sizes.extend(len(list(folder.iterdir())) for folder in apps.glob("p.a.*"))

    with futures.ThreadPoolExecutor(9) as threads:
        watching = threads.submit(look)
        for done in [threads.submit(install_whole, *bundle) for _ in range(8)]:
            done.result()
        watching.result()
    [code] = apps.iterdir()  # the only folder
    assert code == get_project_dir("p/a", "1.0", bundle[1])
    assert set(sizes) == {52}
    before = code.stat().st_mtime_ns
    assert install_whole(*bundle) == code
    assert code.stat().st_mtime_ns == before
    assert client_app_of(code) == ("c", "app")


def test_installed_code_equals_flowers_installation(bundle: tuple[bytes, str]) -> None:
    installed = install_whole(*bundle)
    files = {path.relative_to(installed): path.read_bytes() for path in installed.rglob("*") if path.is_file()}
    shutil.rmtree(installed)
    flower_folder = install_from_fab(bundle[0], skip_prompt=True)
    assert flower_folder == installed
    assert {
        path.relative_to(flower_folder): path.read_bytes() for path in flower_folder.rglob("*") if path.is_file()
    } == files


def test_changed_or_invalid_bundles_are_not_installed(bundle: tuple[bytes, str], tmp_path: Path) -> None:
    changed = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(bundle[0])) as old, zipfile.ZipFile(changed, "w") as new:
        for entry in old.infolist():
            new.writestr(entry, b"x = 2\n" if entry.filename == "m7.py" else old.read(entry))
    for content, reason in (
        (changed.getvalue(), r"m7\.py .*does not match"),
        (b"no bundle", "not a Flower bundle"),
    ):
        with pytest.raises(BundleError, match=reason):
            install_whole(content, bundle[1])
    assert not list((tmp_path / "flower").glob("apps/*"))


def test_bundle_settings_are_read_without_installation(bundle: tuple[bytes, str]) -> None:
    assert default_config(bundle[0]) == {"lr": 0.1, "deep.er": True}
    assert default_config(b"no bundle") == {}
