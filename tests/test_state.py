"""Versions of the clients' states in a directory, in memory with a limit, and in a node's context."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict

from posy.client_app.places import own_places
from posy.client_app.state import (
    ContextStore,
    DirectoryStore,
    MemoryStore,
    MissingStateError,
    StateError,
    StateStore,
    Versions,
)
from posy.server_app.in_process import InProcessGrid
from posy.settings import SettingsError
from posy.storage import DamagedFileError, read_arrays, read_json, write_arrays, write_json
from posy.strategies.replies import BadReplyError
from posy.strategies.server_state import state_of
from posy.strategies.states import ClientStates, version_after

STORES: dict[str, Callable[[Path], StateStore]] = {
    "context": lambda path: ContextStore(Context(1, 1, {}, RecordDict(), {})),
    "directory": DirectoryStore,
    "memory": MemoryStore,
    "full memory": lambda path: MemoryStore(path, 1),
}
every_store = pytest.mark.parametrize("kind", STORES)


def value(store: StateStore, start: str, to: str = "9-9-9", keep: tuple[str, ...] = (), client: int = 0) -> int | None:
    state = store.load(client, Versions(start, to, keep))
    return int(state["n"]) if len(state) else None


def put(store: StateStore, start: str, to: str, number: int, keep: tuple[str, ...] = (), client: int = 0) -> np.ndarray:
    """Load a version and save a state of 4000 bytes, as the handler of a message does."""
    versions = Versions(start, to, keep)
    state = store.load(client, versions)
    array = np.array(number)
    state["n"], state["model"] = array, np.full(998, number, np.float32)
    assert store.save(client, versions, state) == to
    return array


def files(path: Path, client: int = 0) -> list[str]:
    return sorted(p.name for p in (path / f"client-{client}").iterdir())


# -- versions --------------------------------------------------------------------------------------------


@every_store
def test_a_message_loads_the_version_it_names(kind: str, tmp_path: Path) -> None:
    store = STORES[kind](tmp_path)
    assert value(store, "", "0-1-0") is None
    put(store, "", "0-1-0", 10)
    put(store, "", "0-1-0", 5, client=1)
    assert value(store, "", "0-1-0") is None  # a client without a state is not an error
    put(store, "0-1-0", "0-1-1", 11)
    assert value(store, "0-1-1", "0-4-0") == 11  # no message in rounds 2 and 3
    assert store.versions(0) == {"0-1-1"}
    assert value(store, "0-1-0", "0-4-0", client=1) == 5


@every_store
def test_a_duplicate_message_starts_from_the_same_state(kind: str, tmp_path: Path) -> None:
    store = STORES[kind](tmp_path)
    for previous, current in ((0, 1), (1, 2), (2, 3)):
        put(store, f"0-{previous}-0" if previous else "", f"0-{current}-0", current)
    for _ in range(2):
        assert value(store, "0-2-0", "0-3-0") == 2
        put(store, "0-2-0", "0-3-0", 3)
    assert store.versions(0) == {"0-2-0", "0-3-0"}
    assert value(store, "0-3-0", "0-3-1") == 3
    with pytest.raises(MissingStateError):
        store.load(0, Versions("0-2-0", "0-3-0"))  # a late message, whose answer the server ignores
    assert value(store, "0-3-0", "0-3-1") == 3


@every_store
def test_a_late_message_does_not_affect_later_versions(kind: str, tmp_path: Path) -> None:
    """An abandoned server's message of round 7 arrives after the run has been resumed from round 4."""
    store = STORES[kind](tmp_path)
    put(store, "", "0-4-0", 4)
    put(store, "0-4-0", "1-5-0", 15, keep=("0-4-0",))
    put(store, "0-4-0", "0-7-0", 7, keep=("0-4-0",))
    assert value(store, "1-5-0", "1-5-1") == 15
    assert store.versions(0) == {"1-5-0"}


@every_store
def test_a_dropped_reply_leaves_the_previous_version(kind: str, tmp_path: Path) -> None:
    store = STORES[kind](tmp_path)
    put(store, "", "0-1-0", 1)
    put(store, "0-1-0", "0-2-0", 2)  # the server does not accept it
    assert value(store, "0-1-0", "0-2-1") == 1
    put(store, "0-1-0", "0-2-1", 21)
    assert value(store, "0-2-1", "0-3-0") == 21
    assert store.versions(0) == {"0-2-1"}


@every_store
def test_a_missing_version_is_an_error(kind: str, tmp_path: Path) -> None:
    store = STORES[kind](tmp_path)
    put(store, "", "0-1-0", 1)
    for client, start in ((0, "0-2-0"), (3, "0-1-0")):
        with pytest.raises(MissingStateError, match=f"the state {start} of client {client} is not on this node"):
            store.load(client, Versions(start, "0-3-0"))


@every_store
def test_unchanged_state_is_not_saved(kind: str, tmp_path: Path) -> None:
    store = STORES[kind](tmp_path)
    state = store.load(0, Versions("", "0-1-0"))
    assert store.save(0, Versions("", "0-1-0"), state) == ""
    assert not list(tmp_path.iterdir())
    put(store, "", "0-1-0", 1)
    versions = Versions("0-1-0", "0-2-0")
    assert store.save(0, versions, store.load(0, versions)) == "0-1-0"
    state = store.load(0, versions)
    state["n"] = np.array(2)  # a client that fails after this does not save
    assert value(store, "0-1-0") == 1


@pytest.mark.parametrize("kind", ["directory", "memory", "full memory"])
def test_versions_that_checkpoints_need_are_kept(kind: str, tmp_path: Path) -> None:
    """The run is killed in round 6 and resumed from round 4. Client 1 gets its next message in round 8."""
    store = STORES[kind](tmp_path)
    for client in (0, 1):
        put(store, "", "0-2-0", 2, client=client)
        put(store, "0-2-0", "0-4-0", 4, ("0-2-0",), client)
        put(store, "0-4-0", "0-5-0", 5, ("0-2-0", "0-4-0"), client)
        put(store, "0-5-0", "0-6-0", 6, ("0-2-0", "0-4-0", "0-5-0"), client)
    checkpoints = ("0-2-0", "0-4-0")
    assert value(store, "0-4-0", "1-5-0", checkpoints) == 4
    assert store.versions(0) == {*checkpoints}
    put(store, "0-4-0", "1-5-0", 15, checkpoints)
    assert value(store, "1-5-0", "1-6-0", ("0-4-0", "1-5-0")) == 15
    assert store.versions(0) == {"0-4-0", "1-5-0"}
    assert value(store, "0-4-0", "1-8-0", ("0-4-0",), client=1) == 4


@pytest.mark.parametrize("name", ["..", "/etc/0-1-0", "0-1-0/../../x", "0-1-0\n", "a", "-1", "0" * 10, "0--1", "٣-1-0"])
def test_invalid_version_names_are_rejected(name: str) -> None:
    valid = {"state-from": "0-1-0", "state-to": "0-1-1", "state-keep": ["0-1-0"]}
    assert Versions.take({**valid, "state-from": "", "state-keep": []}) == Versions("", "0-1-1")
    for changes in ({"state-from": name}, {"state-to": name}, {"state-to": ""}, {"state-keep": ["0-1-0", name]}):
        with pytest.raises(SettingsError, match="message names the state"):
            Versions.take({**valid, **changes})


# -- versions on the server --------------------------------------------------------------------------------


def test_config_names_a_new_version_and_the_versions_to_keep() -> None:
    states = ClientStates(folders={"run": "mine"})
    config = states.config("train", 1, 3)
    assert config == {"run": "mine", "state-from": "", "state-to": "0-1-0", "state-keep": []}
    states.versions = {3: "0-1-0", 4: ""}
    states.attempt, states.needed = 1, [{3: "0-1-0", 4: "0-2-0"}, {3: "0-1-0"}, {3: ""}, {}]
    assert states.config("evaluate", 12, 3) == {
        "run": "mine", "state-from": "0-1-0", "state-to": "1-12-1", "state-keep": ["0-1-0"],
    }  # fmt: skip


def test_a_reply_must_name_the_clients_version() -> None:
    def accepted_version(start: str, **fields: Any) -> str:
        request, reply = (
            SimpleNamespace(content=RecordDict({"config": ConfigRecord(config)}))
            for config in ({"state-from": start, "state-to": "0-5-0"}, fields)
        )
        return version_after(request, reply)  # type: ignore[arg-type]

    assert accepted_version("0-4-1", state="0-4-1") == "0-4-1"
    assert accepted_version("0-4-1", state="0-5-0") == "0-5-0"
    assert accepted_version("", state="") == ""
    for wrong_version in ("0-6-0", "", ["0-5-0"], 0):
        with pytest.raises(BadReplyError, match="state = "):
            accepted_version("0-4-1", state=wrong_version)
    with pytest.raises(BadReplyError, match=r"state of round 4 is not on its node .* from scratch"):
        accepted_version("0-4-1", **{"state-missing": "0-4-1"})
    with pytest.raises(BadReplyError, match="state is not on its node"):  # a false claim
        accepted_version("", **{"state-missing": ""})


@pytest.mark.parametrize("method", ["fedrep", "ppfe"])
def test_a_client_without_its_state_is_reported_once_and_restarts(
    method: str, make_config: Callable[..., Any], federate: Any, failing: Any, warnings: pytest.LogCaptureFixture
) -> None:
    config = make_config(method, num_server_rounds=5, model="mlp", **({"ppfe_stages": 3} if method == "ppfe" else {}))
    finished = federate(config, grid=failing(forget=[("train", 4, 1)]))
    [(number, client, reason)] = [(record.number, *drop) for record in finished.records for drop in record.dropped]
    assert (number, client) == (4, 1)
    assert all(part in reason for part in ("state of round 3 is not on its node", "state-dir", "from scratch"))
    [message] = {id(r): r.getMessage() for r in warnings.records if "from scratch" in r.getMessage()}.values()
    assert message == f"round 4: client 1 is dropped: {reason}"
    assert finished.kept(1).keys() == finished.kept(0).keys()
    assert "served_accuracy" in finished.records[4].clients[1]


def test_a_dropped_reply_does_not_advance_the_clients_state(
    make_config: Callable[..., Any], federate: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server drops client 2's update of round 2, so client 2 starts round 3 from its state of round 1."""

    class SpoilingGrid(InProcessGrid):
        def send_and_receive(self, messages: Any, *, timeout: float | None = None) -> Any:
            for reply in super().send_and_receive(messages, timeout=timeout):
                fields = reply.content.config_records["config"] if reply.has_content() else {}
                if fields.get("client") == 2 and fields.get("state") == "0-2-0":
                    reply.content["arrays"] = ArrayRecord()
                yield reply

    config = make_config("fedrep", num_server_rounds=3, model="mlp", evaluate_every=9)
    starts: list[str] = []
    original = ClientStates.config

    def record_start(self: ClientStates, phase: str, server_round: int, client: int) -> dict[str, Any]:
        fields = original(self, phase, server_round, client)
        if client == 2 and phase == "train":
            starts.append(fields["state-from"])
        return fields

    monkeypatch.setattr(ClientStates, "config", record_start)
    finished = federate(config, grid=SpoilingGrid)
    assert starts == ["", "0-1-0", "0-1-0"]
    assert finished.strategy.exchange.states.versions == {0: "0-3-0", 1: "0-3-0", 2: "0-3-0", 3: "0-3-0"}
    assert [[client for client, _ in record.dropped] for record in finished.records] == [[], [2], []]


def test_stateless_methods_have_no_versions(make_config: Callable[..., Any], federate: Any) -> None:
    finished = federate(make_config("fedavg"))
    assert finished.strategy.exchange.states.versions == dict.fromkeys(range(4), "")
    assert not any(context.state.array_records for context in finished.grid.contexts.values())


def test_duplicate_messages_get_identical_replies(make_config: Callable[..., Any], federate: Any) -> None:
    """Every message of a run arrives twice, and the server uses the second reply."""

    class DuplicatingGrid(InProcessGrid):
        def _answers(self, messages: list[Message], end: float) -> list[Message]:
            replies = super()._answers(messages, end)
            repeated_replies = super()._answers(messages, end)
            for reply, repeated in zip(replies, repeated_replies, strict=True):
                for name, record in reply.content.array_records.items():
                    for key, array in record.items():
                        np.testing.assert_array_equal(array.numpy(), repeated.content.array_records[name][key].numpy())
                assert reply.content.config_records == repeated.content.config_records
            return repeated_replies

    for method in ("fedrep", "ppfe"):
        config = make_config(method, model="mlp", **({"ppfe_stages": 2} if method == "ppfe" else {}))
        single, duplicated = federate(config), federate(config, grid=DuplicatingGrid)
        for name, array in state_of(single.strategy).items():
            np.testing.assert_array_equal(state_of(duplicated.strategy)[name], array)
        for client in range(4):
            for name, array in single.kept(client).items():
                np.testing.assert_array_equal(duplicated.kept(client)[name], array)


# -- files -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "header", "unreadable"])
@pytest.mark.parametrize("kind", ["directory", "memory"])
def test_a_damaged_state_is_not_replaced_by_an_older_version(kind: str, damage: str, tmp_path: Path) -> None:
    put(DirectoryStore(tmp_path), "", "0-1-0", 1)
    put(DirectoryStore(tmp_path), "0-1-0", "0-2-0", 2, ("0-1-0",))
    file = tmp_path / "client-0" / "0-2-0.safetensors"
    content = bytearray(file.read_bytes())
    if damage == "unreadable":
        file.unlink()
        file.mkdir()
    else:
        content[-3] ^= 1 if damage == "flipped" else 0
        content[3] ^= 64 if damage == "header" else 0
        file.write_bytes(content[: {"cut": -4, "empty": 0}.get(damage, len(content))])
    store = STORES[kind](tmp_path)
    for _ in range(2):
        with pytest.raises(StateError, match=r"the state of client 0 cannot be read.*0-2-0\.safetensors"):
            store.load(0, Versions("0-2-0", "0-3-0", ("0-1-0",)))
    assert (tmp_path / "client-0" / "0-1-0.safetensors").exists()


def test_a_crash_during_a_write_keeps_the_previous_version(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    put(store, "", "0-1-0", 1)
    (tmp_path / "client-0" / ".0-2-0.safetensors.part").write_bytes(b"half")
    assert value(store, "0-1-0", "0-2-1") == 1
    put(store, "0-1-0", "0-2-1", 2)
    assert files(tmp_path) == ["0-1-0.safetensors", "0-2-1.safetensors"]


def test_changing_loaded_arrays_does_not_change_the_file(tmp_path: Path) -> None:
    arrays = {"f": np.arange(6.0).reshape(2, 3).T, "none": np.zeros((0, 4), np.float32), "n": np.array(7)}
    write_arrays(tmp_path / "a", arrays, {"round": "3"}, durable=True)
    loaded, metadata = read_arrays(tmp_path / "a")
    assert metadata == {"round": "3"}
    for name, array in arrays.items():
        assert loaded[name].dtype == array.dtype
        assert np.array_equal(loaded[name], array)
    loaded["f"][0, 0] = 9.0
    assert read_arrays(tmp_path / "a")[0]["f"][0, 0] == 0.0
    write_arrays(tmp_path / "nothing", {})
    assert read_arrays(tmp_path / "nothing") == ({}, {})


def test_truncated_files_are_detected(tmp_path: Path) -> None:
    write_arrays(tmp_path / "a", {"x": np.arange(3, dtype=np.float32)})
    write_json(tmp_path / "j", {"a": [1.5, None, "ü"]})
    assert read_json(tmp_path / "j") == {"a": [1.5, None, "ü"]}
    for name, read in (("a", read_arrays), ("j", read_json)):
        content = (tmp_path / name).read_bytes()
        for length in range(len(content) - (name == "j")):  # a file without its last newline is complete
            (tmp_path / "cut").write_bytes(content[:length])
            with pytest.raises(DamagedFileError):
                read(tmp_path / "cut")


# -- in memory -------------------------------------------------------------------------------------------


def test_memory_store_keeps_references(tmp_path: Path) -> None:
    store = MemoryStore(tmp_path)
    array = put(store, "", "0-1-0", 1)
    assert store.load(0, Versions("0-1-0", "0-1-1"))["n"] is array
    assert not list(tmp_path.iterdir())


def test_least_recently_used_states_are_spilled_and_reloaded(tmp_path: Path) -> None:
    store = MemoryStore(tmp_path, limit=3 * 4000)
    for client in range(5):
        put(store, "", "0-1-0", client, client=client)
    assert store.nbytes == 12_000
    assert sorted(p.name for p in tmp_path.iterdir()) == ["client-0", "client-1"]
    assert value(store, "0-1-0", "0-2-0", client=2) == 2  # client 3 is now the least recently used
    assert value(store, "0-1-0", "0-2-0", client=0) == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["client-0", "client-1", "client-3"]
    put(store, "0-1-0", "0-2-0", 22, client=2)
    for server_round in (3, 4):
        for client in range(5):
            start = "0-2-0" if client == 2 else "0-1-0"
            assert value(store, start, f"0-{server_round}-0", client=client) == (22 if client == 2 else client)
            assert store.nbytes <= 12_000
    assert files(tmp_path, 2) == ["0-2-0.safetensors"]


def test_a_state_larger_than_the_limit_is_spilled(tmp_path: Path) -> None:
    store = MemoryStore(tmp_path, limit=100)
    put(store, "", "0-1-0", 5)
    assert value(store, "0-1-0") == 5
    assert store.nbytes == 0


def test_a_state_that_cannot_be_written_stays_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warnings: pytest.LogCaptureFixture
) -> None:
    """On a full disk no client loses its state, and the current client does not fail."""
    store = MemoryStore(tmp_path, limit=2 * 4000)
    put(store, "", "0-1-0", 10)

    def full(*args: Any, **options: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("posy.client_app.state.write_arrays", full)
        for client in range(1, 4):
            put(store, "", "0-1-0", 10 + client, client=client)
        assert store.nbytes == 16_000
        assert [value(store, "0-1-0", client=c) for c in range(4)] == [10, 11, 12, 13]
        with pytest.raises(OSError, match="No space"):
            store.flush(dict.fromkeys(range(4), "0-1-0"))  # a checkpoint cannot be written
    assert len({id(record) for record in warnings.records if "beyond state-memory" in record.getMessage()}) == 1
    put(store, "0-1-0", "0-2-0", 23, client=3)
    assert store.nbytes == 8_000
    assert [value(store, "0-1-0", client=c) for c in range(3)] == [10, 11, 12]
    assert value(store, "0-2-0", client=3) == 23


def test_spilled_files_are_synced_at_the_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    for module in ("posy.client_app.state", "posy.storage"):
        monkeypatch.setattr(f"{module}.sync", lambda path: synced.append(path.name))
    store = MemoryStore(tmp_path, limit=1)
    for client in range(2):
        put(store, "", "0-1-0", client, client=client)
    assert synced == []
    versions = {0: "0-1-0", 1: "0-1-0"}
    store.flush(versions)
    assert sorted(synced) == [*["0-1-0.safetensors"] * 2, "client-0", "client-1"]
    store.flush(versions)
    assert len(synced) == 4
    put(DirectoryStore(tmp_path / "node"), "", "0-1-0", 1)  # a node does not wait for a checkpoint
    assert len(synced) == 6


def test_a_checkpoint_writes_memory_for_the_next_process(tmp_path: Path) -> None:
    store = MemoryStore(tmp_path, limit=2 * 4000)
    for client in range(3):
        put(store, "", "0-1-0", 10 + client, client=client)
        put(store, "0-1-0", "0-2-0", 20 + client, client=client)
    versions = dict.fromkeys(range(3), "0-2-0")
    store.flush(versions)
    modified = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*.safetensors")}
    store.flush(versions)  # nothing has changed
    assert {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*.safetensors")} == modified
    for client in range(2):  # round 3 is interrupted, and lost with the process
        put(store, "0-2-0", "0-3-0", 30 + client, ("0-2-0",), client)
    store.flush(versions)
    next_store = MemoryStore(tmp_path)
    for client in range(3):
        assert value(next_store, "0-2-0", "1-3-0", ("0-2-0",), client) == 20 + client
        assert files(tmp_path, client) == ["0-2-0.safetensors"]


# -- directories of a node -------------------------------------------------------------------------------


def directories(config: dict[str, Any], **node: Any) -> dict[str, Any]:
    own_places(config, Context(1, 1, {"partition-id": 0, "num-partitions": 1, **node}, RecordDict(), {}))
    return config


def test_the_node_config_sets_where_a_node_writes(tmp_path: Path) -> None:
    config: dict[str, Any] = {
        "run": "mine-1a2b",
        "state-directory": "/srv/run/state",
        "save-models-to": "/srv/run/models",
    }
    config |= {"calibrates": True}
    state, models = tmp_path / "state", tmp_path / "models"
    expected: dict[str, Any] = {"state-directory": str(state / "mine-1a2b"), "calibrates": True}
    expected["save-models-to"] = str(state / "mine-1a2b" / "models")
    assert directories(dict(config)) == {"run": "mine-1a2b"}
    assert directories(dict(config), **{"state-dir": str(state)}) == {"run": "mine-1a2b", **expected}
    separate = {**expected, "save-models-to": str(models / "mine-1a2b")}
    assert directories(dict(config), **{"state-dir": str(state), "models": str(models)}) == {
        "run": "mine-1a2b",
        **separate,
    }
    # The server's message may name neither directory.
    del expected["save-models-to"], expected["calibrates"]
    assert directories({"run": "mine-1a2b"}, **{"state-dir": str(state)}) == {"run": "mine-1a2b", **expected}


@pytest.mark.parametrize("name", ["..", ".", "", "/etc", "../other", "a/b", "a\\b", "a\n", "x" * 300])
def test_a_server_cannot_escape_a_nodes_directory(name: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="not a valid folder name"):
        directories({"run": name}, **{"state-dir": str(tmp_path)})
    with pytest.raises(SettingsError, match="not a valid folder name"):
        directories({"run": name, "save-models-to": "x"}, models=str(tmp_path))
