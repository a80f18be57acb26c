"""Clients' states: generations in a directory, a memory with a limit, and what a node does without either."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Context, RecordDict

from posy.client_app.app import own_places
from posy.client_app.state import ContextStore, DirectoryStore, MemoryStore, Moment, State, StateError
from posy.settings import SettingsError
from posy.storage import DamagedFileError, read_arrays, read_json, write_arrays, write_json

TRAIN, EVALUATE = 0, 1


def value(store: Any, moment: Moment, client: int = 0) -> int | None:
    state = store.load(client, moment)
    return int(state["n"]) if len(state) else None


def put(store: Any, moment: Moment, number: int, client: int = 0) -> None:
    state = store.load(client, moment)
    state["n"] = np.array(number)
    store.save(client, moment, state)


def files(store: DirectoryStore, client: int = 0) -> list[str]:
    return sorted(p.name for p in (store.path / f"client-{client}").iterdir())


# -- generations -----------------------------------------------------------------------------------------


def test_a_message_sees_what_the_one_before_it_left(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    assert value(store, Moment(1, TRAIN)) is None
    put(store, Moment(1, TRAIN), 10)
    assert value(store, Moment(1, TRAIN)) is None  # the same message again starts from the same state
    assert value(store, Moment(1, EVALUATE)) == 10
    put(store, Moment(1, EVALUATE), 11)
    assert value(store, Moment(4, TRAIN)) == 11  # not asked in rounds 2 and 3
    assert files(store) == ["round-1-evaluate-0.safetensors"]
    assert value(store, Moment(4, TRAIN), client=1) is None


def test_a_message_that_comes_twice_starts_from_the_same_state(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path, repeats=True)
    for server_round in (1, 2, 3):
        put(store, Moment(server_round, TRAIN), server_round)
    assert files(store) == ["round-2-train-0.safetensors", "round-3-train-0.safetensors"]
    for _ in range(2):
        assert value(store, Moment(3, TRAIN)) == 2
        put(store, Moment(3, TRAIN), 3)
    assert value(store, Moment(3, EVALUATE)) == 3
    with pytest.raises(StateError, match="comes too late"):
        store.load(0, Moment(2, TRAIN))


def test_a_context_knows_what_it_has_answered() -> None:
    context = Context(1, 1, {}, RecordDict(), {})
    put(ContextStore(context), Moment(1, TRAIN), 1)
    put(ContextStore(context), Moment(1, EVALUATE), 2)
    put(ContextStore(context), Moment(1, TRAIN), 5, client=1)  # a node may host several
    for again in (Moment(1, TRAIN), Moment(1, EVALUATE)):
        with pytest.raises(StateError, match=r"client 0: .* round 1 came twice .* state-dir"):
            ContextStore(context).load(0, again)
    assert value(ContextStore(context), Moment(2, TRAIN)) == 2


def test_generations_that_a_checkpoint_needs_are_kept(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    checkpoints: dict[int, tuple[int, ...]] = {1: (), 2: (), 3: (2,), 4: (2,), 5: (2, 4), 6: (2, 4), 7: (4, 6)}
    for server_round, kept in checkpoints.items():
        for phase in (TRAIN, EVALUATE):
            put(store, Moment(server_round, phase, kept), 10 * server_round + phase)
    assert files(store) == [f"round-{r}-evaluate-0.safetensors" for r in (4, 6, 7)]


def test_a_resumed_run_sees_the_state_of_its_checkpoint(tmp_path: Path) -> None:
    """Killed in round 6 after the checkpoints of 2 and 4, resumed from 4; client 1 is not asked before round 8."""
    store = DirectoryStore(tmp_path)
    for client in (0, 1):
        for server_round, kept in ((2, ()), (3, (2,)), (5, (2, 4)), (6, (2, 4))):
            put(store, Moment(server_round, TRAIN, kept), server_round, client)
    again = {"checkpoints": (2, 4), "resumed_from": (4,)}
    assert value(store, Moment(5, TRAIN, **again)) == 3
    assert files(store) == ["round-2-train-0.safetensors", "round-3-train-0.safetensors"]
    put(store, Moment(5, TRAIN, **again), 50)
    assert value(store, Moment(6, TRAIN, **again)) == 50
    assert value(store, Moment(8, TRAIN, **again), client=1) == 3  # not the 6 of the part that was taken back


def test_what_one_resumption_took_back_stays_so_in_the_next(tmp_path: Path) -> None:
    """Attempt 0 reached round 7; attempt 1 went on from 4 to 9 without this client; attempt 2 goes on from 8."""
    store = DirectoryStore(tmp_path)
    put(store, Moment(3, TRAIN), 3)
    put(store, Moment(7, TRAIN, (4,)), 7)
    assert value(store, Moment(9, TRAIN, (4, 8), (4, 8))) == 3


def test_a_message_that_comes_too_late_changes_nothing(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    put(store, Moment(3, TRAIN), 3)
    put(store, Moment(5, TRAIN), 5)
    with pytest.raises(StateError, match="message of round 4 comes too late, one of round 5"):
        store.load(0, Moment(4, TRAIN))
    put(store, Moment(6, TRAIN, (5,), (5,)), 6)
    with pytest.raises(StateError, match="resumed since"):  # by the server that was given up
        store.load(0, Moment(7, TRAIN))
    assert value(store, Moment(6, EVALUATE, (5,), (5,))) == 6


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "header", "gone dark"])
def test_a_damaged_state_is_refused_not_replaced_by_an_older_one(damage: str, tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    put(store, Moment(1, TRAIN), 1)
    put(store, Moment(2, TRAIN, (1,)), 2)
    file = tmp_path / "client-0" / "round-2-train-0.safetensors"
    content = bytearray(file.read_bytes())
    if damage == "gone dark":
        file.unlink()
        file.mkdir()
    else:
        content[-3] ^= 1 if damage == "flipped" else 0
        content[3] ^= 64 if damage == "header" else 0
        file.write_bytes(content[: {"cut": -4, "empty": 0}.get(damage, len(content))])
    with pytest.raises(StateError, match=r"client 0 cannot be read.*round-2-train-0"):
        store.load(0, Moment(3, TRAIN, (1,)))
    assert (tmp_path / "client-0" / "round-1-train-0.safetensors").exists()


def test_a_process_that_died_while_writing_leaves_the_generation_before(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    put(store, Moment(1, TRAIN), 1)
    (tmp_path / "client-0" / ".round-2-train-0.safetensors.part").write_bytes(b"half")
    assert value(store, Moment(2, TRAIN)) == 1
    assert files(store) == ["round-1-train-0.safetensors"]


# -- files -----------------------------------------------------------------------------------------------


def test_arrays_of_a_file_can_be_written_into_without_changing_it(tmp_path: Path) -> None:
    arrays = {"f": np.arange(6.0).reshape(2, 3).T, "none": np.zeros((0, 4), np.float32), "n": np.array(7)}
    write_arrays(tmp_path / "a", arrays, {"round": "3"}, durable=True)
    again, metadata = read_arrays(tmp_path / "a")
    assert metadata == {"round": "3"}
    for name, array in arrays.items():
        assert again[name].dtype == array.dtype
        assert np.array_equal(again[name], array)
    again["f"][0, 0] = 9.0
    assert read_arrays(tmp_path / "a")[0]["f"][0, 0] == 0.0
    write_arrays(tmp_path / "nothing", {})
    assert read_arrays(tmp_path / "nothing") == ({}, {})


def test_every_cut_of_a_file_is_noticed(tmp_path: Path) -> None:
    write_arrays(tmp_path / "a", {"x": np.arange(3, dtype=np.float32)})
    write_json(tmp_path / "j", {"a": [1.5, None, "ü"]})
    assert read_json(tmp_path / "j") == {"a": [1.5, None, "ü"]}
    for name, read in (("a", read_arrays), ("j", read_json)):
        whole = (tmp_path / name).read_bytes()
        for length in range(len(whole) - (name == "j")):  # the last newline means nothing
            (tmp_path / "cut").write_bytes(whole[:length])
            with pytest.raises(DamagedFileError):
                read(tmp_path / "cut")


# -- in memory -------------------------------------------------------------------------------------------


def big(number: int) -> np.ndarray:
    return np.full(1000, number, np.float32)


def keep(store: MemoryStore, client: int, moment: Moment, number: int) -> None:
    state = store.load(client, moment)
    state["model"] = big(number)
    store.save(client, moment, state)


def test_memory_keeps_references_and_what_was_not_saved_is_not_kept(tmp_path: Path) -> None:
    store, array = MemoryStore(DirectoryStore(tmp_path)), big(1)
    state = store.load(0, Moment(1, TRAIN))
    state["model"] = array
    store.save(0, Moment(1, TRAIN), state)
    again = store.load(0, Moment(1, EVALUATE))
    assert again["model"] is array
    again["model"] = big(2)  # a client that fails after this does not save
    assert store.load(0, Moment(2, TRAIN))["model"] is array
    assert not list(tmp_path.iterdir())


def test_least_recently_used_states_go_to_files_and_come_back(tmp_path: Path) -> None:
    store = MemoryStore(DirectoryStore(tmp_path), limit=3 * 4000)
    for client in range(5):
        keep(store, client, Moment(1, TRAIN), client)
    assert store.nbytes == 12_000
    assert sorted(p.name for p in tmp_path.iterdir()) == ["client-0", "client-1"]
    keep(store, 2, Moment(2, TRAIN), 22)  # used again: now 3 is the next to go
    assert store.load(0, Moment(2, TRAIN))["model"].tolist() == [0.0] * 1000
    assert sorted(p.name for p in tmp_path.iterdir()) == ["client-0", "client-1", "client-3"]
    for server_round in (3, 4):
        for client in range(5):
            expected = 22 if client == 2 else client
            assert store.load(client, Moment(server_round, TRAIN))["model"][0] == expected
            assert store.nbytes <= 12_000
    keep(store, 1, Moment(5, TRAIN), 51)
    for client in (2, 3, 4, 0, 1):
        assert store.load(client, Moment(6, TRAIN))["model"][0] == {2: 22, 1: 51}.get(client, client)


def test_a_state_larger_than_the_limit_still_works(tmp_path: Path) -> None:
    store = MemoryStore(DirectoryStore(tmp_path), limit=100)
    keep(store, 0, Moment(1, TRAIN), 5)
    assert store.load(0, Moment(2, TRAIN))["model"][0] == 5
    assert store.nbytes == 0


def test_a_state_that_cannot_be_written_stays_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk: nobody's state is lost, and the client whose turn it is has done nothing wrong."""
    store = MemoryStore(DirectoryStore(tmp_path), limit=2 * 4000)
    keep(store, 0, Moment(1, TRAIN), 10)

    def full(*args: Any, **options: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("posy.client_app.state.write_arrays", full)
        for client in range(1, 4):
            keep(store, client, Moment(1, TRAIN), 10 + client)
        assert store.nbytes == 16_000
        assert [store.load(c, Moment(2, TRAIN))["model"][0] for c in range(4)] == [10, 11, 12, 13]
        with pytest.raises(OSError, match="No space"):
            store.flush(9)  # a checkpoint cannot be made
    keep(store, 3, Moment(2, TRAIN), 23)
    assert store.nbytes == 8_000
    assert [store.load(c, Moment(3, TRAIN))["model"][0] for c in range(4)] == [10, 11, 12, 23]


def test_spilled_files_are_on_the_disk_from_the_checkpoint_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    for module in ("posy.client_app.state", "posy.storage"):
        monkeypatch.setattr(f"{module}.sync", lambda path: synced.append(path.name))
    store = MemoryStore(DirectoryStore(tmp_path), limit=1)
    for client in range(2):
        keep(store, client, Moment(1, TRAIN), client)
    assert synced == []
    store.flush(9)
    assert sorted(synced) == ["client-0", "client-1", *["round-1-train-0.safetensors"] * 2]
    store.flush(9)
    assert len(synced) == 4
    volatile = MemoryStore(DirectoryStore(tmp_path / "other", durable=False), limit=1)
    keep(volatile, 0, Moment(1, TRAIN), 1)
    volatile.flush(9)
    assert len(synced) == 4


def test_memory_is_written_for_a_checkpoint_and_read_by_the_next_process(tmp_path: Path) -> None:
    store = MemoryStore(DirectoryStore(tmp_path), limit=2 * 4000)
    for server_round in (1, 2):
        for client in range(3):
            keep(store, client, Moment(server_round, TRAIN), 10 * server_round + client)
    store.flush(9)
    kept_files = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*.safetensors")}
    store.flush(9)  # nothing has changed
    assert {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*.safetensors")} == kept_files
    for client in range(3):  # round 3 is lost with the process, also what was spilled of it
        keep(store, client, Moment(3, TRAIN, (2,)), 30 + client)
    assert len(list(tmp_path.rglob("round-3-*"))) == 1
    after = MemoryStore(DirectoryStore(tmp_path))
    for client in range(3):
        assert after.load(client, Moment(3, TRAIN, (2,), (2,)))["model"][0] == 20 + client


# -- which store a node takes ----------------------------------------------------------------------------


def places(told: dict[str, Any], **node: Any) -> dict[str, Any]:
    own_places(told, Context(1, 1, {"partition-id": 0, "num-partitions": 1, **node}, RecordDict(), {}))
    return told


def test_a_node_says_itself_where_it_writes(tmp_path: Path) -> None:
    told = {"run": "mine-1a2b", "state-directory": "/srv/run/state", "save-models-to": "/srv/run/models"}
    state, models = tmp_path / "state", tmp_path / "models"
    own = {"state-directory": str(state / "mine-1a2b"), "save-models-to": str(state / "mine-1a2b" / "models")}
    assert places(dict(told)) == {"run": "mine-1a2b"}
    assert places(dict(told), **{"state-dir": str(state)}) == {"run": "mine-1a2b", **own}
    apart = {**own, "save-models-to": str(models / "mine-1a2b")}
    assert places(dict(told), **{"state-dir": str(state), "models": str(models)}) == {"run": "mine-1a2b", **apart}
    # The server need not ask for either.
    del own["save-models-to"]
    assert places({"run": "mine-1a2b"}, **{"state-dir": str(state)}) == {"run": "mine-1a2b", **own}


@pytest.mark.parametrize("name", ["..", ".", "", "/etc", "../other", "a/b", "a\\b", "a\n", "x" * 300])
def test_a_server_cannot_leave_a_nodes_directory(name: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="must be the name of a folder"):
        places({"run": name}, **{"state-dir": str(tmp_path)})
    with pytest.raises(SettingsError, match="must be the name of a folder"):
        places({"run": name, "save-models-to": "x"}, models=str(tmp_path))


def test_a_node_that_has_lost_its_state_says_so_when_it_is_needed() -> None:
    store = ContextStore(Context(1, 1, {}, RecordDict(), {}))
    lost = store.load(3, Moment(6, TRAIN, (5,), (5,)))
    with pytest.raises(StateError, match=r"client 3 .* state-dir"):
        lost.get("model")
    assert len(lost) == 0  # a method without state does not notice
    assert isinstance(store.load(3, Moment(6, TRAIN)), State)
    assert store.load(3, Moment(6, TRAIN)).get("model") is None
