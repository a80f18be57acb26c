"""Assignment of clients to nodes, and waves with one message per node."""

import csv
import json
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from logging import WARNING
from pathlib import Path
from typing import Any, ClassVar

import hypothesis
import numpy as np
import pytest
from flwr.app import ConfigRecord, Error, Message, MessageType, RecordDict
from flwr.common.constant import ErrorCode
from hypothesis import strategies as st
from nodes import NodeGrid

from posy.client_app.app import Call
from posy.server_app import grids, nodes, presence
from posy.server_app.app import run
from posy.server_app.delivery import PollingGrid
from posy.server_app.federation import Federation
from posy.server_app.grids import WaveGrid
from posy.server_app.in_process import InProcessGrid
from posy.server_app.nodes import Node
from posy.settings import SettingsError
from posy.strategies.base import PersonalisedStrategy
from posy.strategies.ppfe import PPFE
from posy.strategies.registry import read_settings
from posy.strategies.settings import Settings

MakeConfig = Callable[..., dict[str, Any]]


class RecordingGrid(InProcessGrid):
    """A grid that records each wave of messages and sleeps before it answers."""

    def __init__(self, num_clients: int, seconds: float = 0.0) -> None:
        super().__init__(num_clients)
        self.waves: list[list[int]] = []
        self.timeouts: list[float | None] = []
        self.seconds = seconds

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        messages = list(messages)
        self.waves.append([m.metadata.dst_node_id for m in messages])
        self.timeouts.append(timeout)
        time.sleep(self.seconds)
        return super().send_and_receive(messages)


def queries(settings_json: str, *nodes: int) -> list[Message]:
    content = (RecordDict({"config": ConfigRecord({"settings": settings_json})}) for _ in nodes)
    return [Message(c, node, MessageType.QUERY) for c, node in zip(content, nodes, strict=True)]


@pytest.fixture
def settings(make_config: MakeConfig) -> Settings:
    return read_settings(make_config("fedavg"))


@pytest.fixture
def settings_json(settings: Settings) -> str:
    return settings.to_json()


# -- waves -----------------------------------------------------------------------------------------------


def test_each_wave_has_one_message_per_node(settings_json: str) -> None:
    grid = RecordingGrid(3)
    sent = queries(settings_json, 1, 2, 1, 3, 1, 2)
    replies = list(WaveGrid(grid).send_and_receive(sent))
    assert grid.waves == [[1, 2, 3], [1, 2], [1]]
    assert sorted(r.metadata.reply_to_message_id for r in replies) == sorted(m.metadata.message_id for m in sent)
    assert not any(r.has_error() for r in replies)


def test_no_messages_send_no_wave(settings_json: str) -> None:
    grid = RecordingGrid(3)
    assert list(WaveGrid(grid).send_and_receive([])) == []
    assert grid.waves == []


def test_waves_share_one_timeout_and_skip_the_rest(settings_json: str) -> None:
    grid = RecordingGrid(2, seconds=0.2)
    sent = queries(settings_json, 1, 1, 1, 2)
    replies = list(WaveGrid(grid).send_and_receive(sent, timeout=0.3))
    assert grid.waves == [[1, 2], [1]]
    assert len(replies) == 3
    assert grid.timeouts[0] == pytest.approx(0.3, abs=0.02)
    assert grid.timeouts[1] is not None
    assert 0 < grid.timeouts[1] < 0.11
    assert not sent[2].metadata.message_id  # so the strategy detects that it was not sent


def test_waves_have_no_timeout_by_default(settings_json: str) -> None:
    grid = RecordingGrid(1)
    assert len(list(WaveGrid(grid).send_and_receive(queries(settings_json, 1, 1)))) == 2
    assert grid.timeouts == [None, None]


def test_wave_grid_forwards_other_calls(settings_json: str) -> None:
    waves = WaveGrid(InProcessGrid(2))
    assert list(waves.get_node_ids()) == [1, 2]
    ids = list(waves.push_messages(queries(settings_json, 1)))
    assert [r.metadata.reply_to_message_id for r in waves.pull_messages(ids)] == ids
    assert list(waves.pull_messages(ids)) == []


def test_join_query_is_repeated_after_an_outage(settings: Settings) -> None:
    grid = NodeGrid(*parts(4))
    waves = PollingGrid(grid)
    members = Federation(waves, replace(settings, run=replace(settings.run, min_clients=3, join_timeout=0.1)))
    grid.leave(2)
    assert list(members.join()) == [0, 2, 3]
    grid.silent = {2}
    grid.connect(2, parts(2)[1])
    members.refresh()
    grid.silent = set()
    members.refresh()
    assert list(members.clients) == [0, 2, 3]
    waves.outages.count += 1
    members.refresh()
    assert list(members.clients) == [0, 1, 2, 3]


# -- in-process grid -------------------------------------------------------------------------------------


def test_invalid_message_raises(settings_json: str) -> None:
    grid = InProcessGrid(1)
    with pytest.raises(json.JSONDecodeError):
        grid.send_and_receive(queries("{", 1))
    with pytest.raises(KeyError):
        grid.send_and_receive(queries(settings_json, 9))


def test_no_client_runs_after_the_timeout(settings_json: str) -> None:
    assert list(InProcessGrid(3).send_and_receive(queries(settings_json, 1, 2, 3), timeout=0.0)) == []
    assert len(list(InProcessGrid(3).send_and_receive(queries(settings_json, 1, 2, 3), timeout=60.0))) == 3


def test_keyboard_interrupt_propagates(settings_json: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> Message:
        raise KeyboardInterrupt

    monkeypatch.setattr("posy.server_app.in_process.client_app", interrupted)
    with pytest.raises(KeyboardInterrupt):
        InProcessGrid(1).send_and_receive(queries(settings_json, 1))


# -- members ---------------------------------------------------------------------------------------------


class Nodes(InProcessGrid):
    """A grid with fewer nodes than clients, where some nodes connect late."""

    def __init__(self, nodes: int, *connected: Iterable[int]) -> None:
        super().__init__(nodes)
        self.snapshots = [list(ids) for ids in connected]

    def get_node_ids(self) -> Iterable[int]:
        return self.snapshots.pop(0) if self.snapshots else super().get_node_ids()


@pytest.mark.parametrize(
    ("nodes", "hosts"), [(1, [1, 1, 1, 1]), (2, [1, 2, 1, 2]), (3, [1, 2, 3, 1]), (4, [1, 2, 3, 4]), (6, [1, 2, 3, 4])]
)
def test_clients_are_spread_over_the_nodes(nodes: int, hosts: list[int], settings: Settings) -> None:
    members = Federation(WaveGrid(InProcessGrid(nodes)), settings).join()
    assert list(members) == [0, 1, 2, 3]
    assert [m.node_id for m in members.values()] == hosts
    assert [m.client for m in members.values()] == [0, 1, 2, 3]
    assert [(m.num_train, m.num_test) for m in members.values()] == [(21, 9), (12, 6), (8, 4), (1, 0)]


def test_join_waits_for_late_nodes(settings: Settings) -> None:
    members = Federation(WaveGrid(Nodes(3, [], [2], [2], [2, 3])), settings).join()
    assert [m.node_id for m in members.values()] == [1, 2, 3, 1]


def test_missing_clients_are_an_error(settings: Settings) -> None:
    grid = Nodes(3, *[[1, 2]] * 100)
    with pytest.raises(SettingsError, match="num-clients = 4"):
        Federation(WaveGrid(grid), replace(settings, run=replace(settings.run, join_timeout=0.05))).join()


def test_join_reports_why_a_node_cannot_serve_the_run(settings: Settings) -> None:
    class Broken(InProcessGrid):
        def _receive(self, message: Message) -> Message | Call:
            if message.metadata.dst_node_id != 2:
                return super()._receive(message)
            return Message(Error(2, "no data set there"), reply_to=message)

    with pytest.raises(SettingsError, match=r"a node cannot serve .*no data set there"):
        Federation(WaveGrid(Broken(4)), settings).join()


# -- clients over reconnections --------------------------------------------------------------------------


class Script(NodeGrid):
    """A grid whose nodes connect and leave during a test, and which records its federation."""

    def __init__(self, *configs: dict[str, Any]) -> None:
        super().__init__(*configs)
        self.script: dict[int, Callable[[], None]] = {}
        self.refreshed = 0

    def join_federation(self, settings: Settings) -> Federation:
        self.federation = Federation(WaveGrid(self), settings)
        self.federation.join()
        return self.federation


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grids, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(presence, "REFRESH_SECONDS", 0.05)


def parts(count: int) -> list[dict[str, Any]]:
    return [{"partition-id": i, "num-partitions": 4} for i in range(count)]


@pytest.fixture
def site(tmp_path: Path) -> Callable[[str], dict[str, Any]]:
    """Return a function that writes a site's data, of a size that depends on its name, and returns its node config."""

    def make(name: str) -> dict[str, Any]:
        count = 16 + ord(name[-1]) - ord("a")
        np.savez(tmp_path / f"{name}.npz", x_train=np.ones((count, 2)), y_train=np.arange(count) % 2)
        return {"data": str(tmp_path / f"{name}.npz"), "name": name}

    return make


@pytest.fixture
def site_settings(make_config: MakeConfig) -> Settings:
    task = {"dataset": "sites", "sample_kind": "features", "input_shape": "2", "classes": "0,1"}
    return read_settings(
        make_config("ppfe", **task, feature_mean="0", feature_std="1", num_clients=4, ppfe_stages=1, join_timeout=0.2)
    )


def hosts(members: Federation) -> dict[int, int]:
    return {client: member.node_id for client, member in members.clients.items()}


def test_a_client_keeps_its_index_under_a_new_node_id(settings: Settings) -> None:
    grid = Script(*parts(4))
    members = grid.join_federation(settings)
    clients = members.clients
    grid.leave(2)
    assert members.refresh() == []
    assert hosts(members) == {0: 1, 2: 3, 3: 4}
    grid.connect(77, parts(4)[1])
    assert members.refresh() == [1]  # node 77 may lack the client's state
    assert hosts(members) == {0: 1, 1: 77, 2: 3, 3: 4}
    assert members.refresh() == []
    assert members.clients is clients
    assert [kind for kind, _ in grid.sent] == ["query"] * 5  # the server asks each node once


def test_returning_node_is_queried_again(settings: Settings) -> None:
    grid = Script(*parts(4))
    members = grid.join_federation(settings)
    away = parts(4)[1]
    grid.leave(2)
    members.refresh()
    grid.connect(2, away)
    assert members.refresh() == [1]
    assert grid.sent.count(("query", 2)) == 2


def test_stock_node_with_an_unknown_config_key_is_excluded(settings: Settings) -> None:
    """A node that `flower-supernode` starts passes any node config to the ClientApp."""
    nodes = parts(4)
    nodes[1] |= {"state_dir": "/x"}
    members = Script(*nodes).join_federation(replace(settings, run=replace(settings.run, min_clients=3)))
    assert hosts(members) == {0: 1, 2: 3, 3: 4}
    ((_, reason),) = members.excluded
    assert "state_dir in the node config" in reason and "did you mean state-dir" in reason


def test_duplicate_node_is_excluded_until_the_first_leaves(
    settings: Settings, warnings: pytest.LogCaptureFixture
) -> None:
    grid = Script(*parts(4))
    members = grid.join_federation(settings)
    grid.connect(50, parts(4)[2])
    for _ in range(3):
        assert members.refresh() == []
    lines = {id(r): r.getMessage() for r in warnings.records}.values()
    (line,) = (line for line in lines if "already" in line)
    assert line.startswith("node 50 is excluded: client 2 ")
    assert hosts(members)[2] == 3
    assert sum(members.excluded.values()) == 1
    grid.leave(3)
    assert members.refresh() == [2]
    assert hosts(members)[2] == 50


def test_sites_are_numbered_by_name_and_later_by_arrival(
    site_settings: Settings, site: Callable[[str], dict[str, Any]]
) -> None:
    settings = replace(site_settings, run=replace(site_settings.run, min_clients=2))
    grid = Script(site("site-d"), site("site-b"))
    members = grid.join_federation(settings)
    assert (members.owners, hosts(members)) == ({0: "site-b", 1: "site-d"}, {0: 2, 1: 1})
    grid.connect(3, site("site-a"))
    assert members.refresh() == []
    assert members.owners == {0: "site-b", 1: "site-d", 2: "site-a"}
    assert [m.num_train for m in members.clients.values()] == [13, 14, 12]
    grid.leave(2)
    grid.connect(9, site("site-b"))
    grid.connect(10, site("site-c"))
    grid.connect(11, site("site-e"))
    assert members.refresh() == [0]
    assert hosts(members) == {0: 9, 1: 1, 2: 3, 3: 10}
    [((name, reason), count)] = members.excluded.items()
    assert (name, count) == ("site-e", 1) and reason == "all 4 clients of the run belong to other sites"
    assert members.summary()["sites"] == ["site-b", "site-d", "site-a", "site-c"]
    again = Federation(WaveGrid(grid), settings)  # the same run, resumed
    again.restore(json.loads(json.dumps(members.as_json())))
    again.join()
    assert hosts(again) == hosts(members)


def test_registered_key_sets_the_site_name(site_settings: Settings, site: Callable[[str], dict[str, Any]]) -> None:
    settings = replace(site_settings, run=replace(site_settings.run, min_clients=2))
    grid = Script()
    unnamed = {"data": site("site-x")["data"]}
    grid.connect(1, unnamed, registered="hospital")
    grid.connect(2, site("site-a"), registered="site-a")
    grid.connect(3, site("site-c"), registered="thief")
    grid.connect(4, unnamed)
    members = grid.join_federation(settings)
    assert members.owners == {0: "hospital", 1: "site-a"}
    reasons = " ".join(reason for _, reason in members.excluded)
    assert "'site-c', but its key is registered as 'thief'" in reasons
    assert "neither name nor partition-id" in reasons


def test_partition_id_sets_the_client_index(site_settings: Settings, site: Callable[[str], dict[str, Any]]) -> None:
    settings = replace(site_settings, run=replace(site_settings.run, min_clients=2))
    grid = Script(site("site-a") | {"partition-id": 2}, site("site-b"), site("site-c") | {"partition-id": 4})
    members = grid.join_federation(settings)
    assert hosts(members) == {0: 2, 2: 1}
    [(name, reason)] = members.excluded
    assert name == "site-c" and reason == "partition-id 4: the run has the clients 0 to 3"


# -- owners of clients -----------------------------------------------------------------------------------


class Registered(Script):
    """Nodes with keys that are registered under the names of the keywords."""

    def __init__(self, **configs: dict[str, Any]) -> None:
        super().__init__()
        for number, (name, config) in enumerate(configs.items(), start=1):
            self.connect(number, config, registered=name)


def with_min_clients(settings: Settings, minimum: int) -> Settings:
    return replace(settings, run=replace(settings.run, min_clients=minimum, join_timeout=0.1))


@pytest.mark.parametrize("minimum", [0, 1])
@pytest.mark.parametrize("registered", [True, False], ids=["registered", "unregistered"])
@pytest.mark.parametrize("sites", [True, False], ids=["sites", "benchmark"])
def test_two_names_that_claim_one_client_stop_the_run(
    sites: bool,
    registered: bool,
    minimum: int,
    make_config: MakeConfig,
    site_settings: Settings,
    site: Callable[[str], dict[str, Any]],
) -> None:
    settings = with_min_clients(site_settings if sites else read_settings(make_config("fedavg")), minimum)
    configs = {name: (site(name) if sites else parts(1)[0]) | {"partition-id": 0} for name in ("site-a", "site-b")}
    grid = Registered(**configs) if registered else Script(*(c | {"name": name} for name, c in configs.items()))
    claimants = "sites" if sites else "nodes"
    with pytest.raises(SettingsError, match=f"^client 0 .* two {claimants}, site-a and site-b.*partition-id"):
        grid.join_federation(settings)
    assert not grid.federation.clients


def test_duplicate_partition_ids_stop_a_run_with_an_open_task(
    make_config: MakeConfig, site: Callable[[str], dict[str, Any]], tmp_path: Path
) -> None:
    grid = Registered(
        a=site("site-a") | {"name": "", "partition-id": 0}, b=site("site-b") | {"name": "", "partition-id": 0}
    )
    config = make_config("fedavg", dataset="sites", num_clients=2, join_timeout=0.1)
    with pytest.raises(SettingsError, match=r"client 0 .* two sites, a and b"):
        run(grid, config)
    assert not (tmp_path / "runs").exists()


def test_unnamed_duplicate_node_is_excluded(settings: Settings, warnings: pytest.LogCaptureFixture) -> None:
    grid = Script(*parts(1), *parts(2))
    members = grid.join_federation(with_min_clients(settings, 1))
    assert hosts(members) == {0: 1, 1: 3}
    [((name, reason), count)] = members.excluded.items()
    assert (name, count) == ("", 1) and "client 0 is already present" in reason
    assert "node 2 is excluded: client 0 is already present" in warnings.text
    assert "without 2 of its 4 clients: client 0 and client 1 " in warnings.text
    with pytest.raises(SettingsError, match="client 0 is already present"):
        grid.join_federation(with_min_clients(settings, 3))


def test_sites_with_a_partition_id_are_numbered_first(
    site_settings: Settings, site: Callable[[str], dict[str, Any]]
) -> None:
    grid = Script(site("site-a"), site("site-b") | {"partition-id": 0}, site("site-c"))
    assert grid.join_federation(with_min_clients(site_settings, 1)).owners == {0: "site-b", 1: "site-a", 2: "site-c"}


@pytest.mark.parametrize("minimum", [1, 2])
def test_a_site_is_one_client_despite_conflicting_partition_ids(
    minimum: int, site_settings: Settings, site: Callable[[str], dict[str, Any]]
) -> None:
    """Several nodes may have the same name if their keys are not registered."""
    grid = Script(*(site("site-a") | words for words in ({"partition-id": 0}, {"partition-id": 1}, {})))
    settings = with_min_clients(replace(site_settings, data=replace(site_settings.data, num_clients=2)), minimum)
    if minimum == 2:
        with pytest.raises(SettingsError, match=r"host 1 of these clients .* excluded: site-a: .*partition-id is 1"):
            grid.join_federation(settings)
        return
    members = grid.join_federation(settings)
    assert (hosts(members), members.owners) == ({0: 1}, {0: "site-a"})
    site_names, reasons = zip(*sorted(members.excluded), strict=True)
    assert site_names == ("site-a", "site-a")
    assert "it is client 0" in reasons[0] and "partition-id is 1" in reasons[0]
    assert "(client 0) is already present" in reasons[1]


@pytest.mark.parametrize("sites", [True, False], ids=["sites", "benchmark"])
def test_no_site_takes_over_the_client_of_another(
    sites: bool,
    site_settings: Settings,
    settings: Settings,
    site: Callable[[str], dict[str, Any]],
    warnings: pytest.LogCaptureFixture,
) -> None:
    def config(name: str) -> dict[str, Any]:
        return (site(name) if sites else parts(1)[0]) | {"name": "", "partition-id": 0}

    grid = Registered(a=config("site-a"), c=config("site-c") | {"partition-id": 1})
    members = grid.join_federation(with_min_clients(site_settings if sites else settings, 1))
    grid.leave(1)
    grid.connect(7, config("site-b"), registered="b")
    assert members.refresh() == []
    assert hosts(members) == {1: 2}
    [((name, reason), count)] = members.excluded.items()
    assert (name, count) == ("b", 1) and reason == "client 0 belongs to a: give each node its own partition-id"
    assert "b is excluded: client 0 belongs to a" in warnings.text
    assert members.summary()["sites"] == ["a", "c", None, None]
    again = Federation(WaveGrid(grid), members.settings)  # the resumed run, with b connected and a absent
    again.restore(json.loads(json.dumps(members.as_json())))
    again.join()
    assert (hosts(again), again.owners) == ({1: 2}, {0: "a", 1: "c"})
    grid.connect(8, config("site-a"), registered="a")
    for federation_ in (members, again):
        assert federation_.refresh() == [0]
        assert hosts(federation_) == {0: 8, 1: 2}
        assert federation_.owners == {0: "a", 1: "c"}


def test_returning_site_with_another_partition_id_is_excluded(
    site_settings: Settings, site: Callable[[str], dict[str, Any]]
) -> None:
    grid = Registered(a=site("site-a") | {"name": ""}, b=site("site-b") | {"name": ""})
    members = grid.join_federation(with_min_clients(site_settings, 1))
    grid.leave(2)
    grid.connect(9, site("site-b") | {"name": "", "partition-id": 3}, registered="b")
    members.refresh()
    assert hosts(members) == {0: 1}
    [(name, reason)] = members.excluded
    assert name == "b" and "it is client 1" in reason and "partition-id is 3" in reason


class Fingerprints(Registered):
    """Sites that report a fingerprint of their data, set per name."""

    by_name: ClassVar[dict[str, Any]] = {}

    def answer(self, message: Message) -> Message:
        reply = super().answer(message)
        if not reply.has_error() and self.names[message.metadata.dst_node_id] in self.by_name:
            answer = reply.content.config_records["config"]
            answer["fingerprint"] = self.by_name[self.names[message.metadata.dst_node_id]]
        return reply


@pytest.mark.parametrize("how", ["away", "gone within a round", "resumed"])
def test_returning_site_with_changed_data_is_excluded(
    how: str, site_settings: Settings, site: Callable[[str], dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Fingerprints, "by_name", {"a": "00112233445566aa", "b": "00112233445566bb"})
    grid = Fingerprints(a=site("site-a") | {"name": ""}, b=site("site-b") | {"name": ""})
    members = grid.join_federation(with_min_clients(site_settings, 1))
    assert members.as_json() == {
        "owners": {"0": "a", "1": "b"},
        "fingerprints": {"0": "00112233445566aa", "1": "00112233445566bb"},
    }

    def rejoin() -> Federation:
        if how == "resumed":
            again = Federation(WaveGrid(grid), members.settings)
            again.restore(members.as_json())
            again.join()
            return again
        if how == "away":
            grid.leave(2)
            members.refresh()
            grid.connect(2, site("site-b") | {"name": ""}, registered="b")
        else:
            members.grid.gone.add(2)
        members.refresh()
        return members

    assert hosts(rejoin()) == {0: 1, 1: 2}
    for changed in ("00112233445566cc", ""):
        Fingerprints.by_name["b"] = changed
        rejoined = rejoin()
        assert hosts(rejoined) == {0: 1}
        assert any(name == "b" and "data has changed since client 1 " in reason for name, reason in rejoined.excluded)
    Fingerprints.by_name["b"] = "00112233445566bb"
    members.grid.gone.add(2)
    assert members.refresh() == [1]


def test_node_that_left_during_a_round_is_queried_again(settings: Settings) -> None:
    grid = Script(*parts(4))
    members = grid.join_federation(settings)
    away = grid.nodes[2]
    grid.leave(2)
    list(members.grid.send_and_receive(queries(settings.to_json(), 1, 2)))
    grid.nodes[2] = away
    assert members.refresh() == [1]  # the node has restarted under the same id
    assert hosts(members) == {0: 1, 1: 2, 2: 3, 3: 4}
    assert members.refresh() == []


@pytest.mark.parametrize(
    "stored",
    [
        {},
        {"site-a": 0},
        {"owners": {"0": "a"}},
        {"owners": {"0": 1}, "fingerprints": {}},
        {"owners": {"9": "a"}, "fingerprints": {}},
        {"owners": {"x": "a"}, "fingerprints": {}},
        {"owners": ["a"], "fingerprints": {}},
    ],
)
def test_checkpoint_without_site_names_is_rejected(stored: dict[str, Any], settings: Settings) -> None:
    with pytest.raises(SettingsError, match="checkpoint does not name the sites"):
        Federation(WaveGrid(Script()), settings).restore(stored)


CLAIMS = st.tuples(st.sampled_from(["", "a", "b", "c"]), st.integers(0, 3), st.sampled_from([1, 2, 4]))
EVENTS = st.lists(st.one_of(CLAIMS, st.integers(0, 5)), max_size=8)


@hypothesis.given(first=st.lists(CLAIMS, min_size=1, max_size=4), events=EVENTS)
@hypothesis.settings(max_examples=40, deadline=None, suppress_health_check=list(hypothesis.HealthCheck))
def test_a_client_keeps_one_owner_during_the_run(
    first: list[tuple[str, int, int]], events: list[Any], settings: Settings
) -> None:
    grid = Script()

    def connect(name: str, index: int, step: int) -> None:
        node = 1 + max(grid.names, default=0)
        grid.connect(node, {"partition-id": index, "num-partitions": step}, registered=name)

    for claim in first:
        connect(*claim)
    claimed = {(c, name) for name, index, step in first for c in range(index, 4, step) if name}
    conflict = any(len({name for at, name in claimed if at == c}) > 1 for c in range(4))
    try:
        members = grid.join_federation(replace(settings, run=replace(settings.run, min_clients=1, join_timeout=0.001)))
    except SettingsError as error:
        assert conflict and "is claimed by" in str(error)
        return
    assert not conflict
    owners: dict[int, str] = {}
    for event in [None, *events]:
        if isinstance(event, tuple):
            connect(*event)
        elif event is not None and event + 1 in grid.nodes and len(grid.nodes) > 1:
            grid.leave(event + 1)
        members.refresh()
        assert owners.items() <= members.owners.items()
        owners = dict(members.owners)
        for client, member in members.clients.items():
            assert (member.client, member.name) == (client, owners.get(client, ""))
            assert grid.names[member.node_id] == member.name
            assert member.node_id in grid.nodes


def test_records_name_the_site_that_trained(make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Client 0 belongs to a. While a is absent, b does not train for it, and the record does not name b."""
    config = make_config("fedacs", num_server_rounds=4, model="mlp", min_clients=2, join_timeout=0.1)
    grid = Registered(a=parts(1)[0], c=parts(2)[1], d=parts(3)[2])
    original = PersonalisedStrategy.configure_train

    def configure(self: PersonalisedStrategy, server_round: int, *more: Any) -> list[Message]:
        if server_round == 2:
            grid.leave(1)
            grid.connect(7, parts(1)[0], registered="b")
        if server_round == 4:
            grid.connect(8, parts(1)[0], registered="a")
        return original(self, server_round, *more)

    monkeypatch.setattr(PersonalisedStrategy, "configure_train", configure)
    path = run(grid, config).directory.path
    with (path / "clients.csv").open(newline="") as file:
        rows = [(int(row["round"]), int(row["partition"]), row["site"]) for row in csv.DictReader(file)]
    cohort = [(0, "a"), (1, "c"), (2, "d")]
    assert rows == [(n, *row) for n in (1, 2, 3, 4) for row in (cohort if n in (1, 4) else cohort[1:])]
    assert [(kind, node) for kind, node in grid.sent if node == 7] == [("query", 7)]
    summary = json.loads((path / "summary.json").read_text())
    assert summary["sites"] == ["a", "c", "d", None]
    [exclusion] = summary["left-out"]
    assert exclusion.pop("reason") == "client 0 belongs to a: give each node its own partition-id"
    assert exclusion == {"site": "b", "times": 1}


# -- messages about sites ---------------------------------------------------------------------------------


def pop_warnings(warnings: pytest.LogCaptureFixture) -> list[str]:
    """Return the messages of all warnings, and clear them."""
    lines = {id(r): r.getMessage() for r in warnings.records if r.levelno == WARNING}.values()
    warnings.clear()
    return list(lines)


def test_lost_and_new_nodes_are_logged_by_name(
    settings: Settings, warnings: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    grid = Registered(a=parts(1)[0], b=parts(2)[1], c=parts(3)[2])
    members = grid.join_federation(with_min_clients(settings, 1))
    (missing,) = pop_warnings(warnings)
    assert "without 1 of its 4 clients: a (client 0), b (client 1) and c (client 2) " in missing
    grid.leave(2)
    members.refresh()
    (lost,) = pop_warnings(warnings)
    assert lost.startswith("b (client 1) is gone; 2 of 4 clients are present")
    members.refresh()
    grid.connect(17, parts(2)[1], registered="b")
    grid.connect(18, parts(4)[3], registered="d")
    assert capsys.readouterr().out == ""
    members.refresh()
    new, returned = capsys.readouterr().out.splitlines()
    assert new.startswith("d (client 3) is new; 4 of 4 clients are present")
    assert returned.startswith("b (client 1) is back; 4 of 4 clients are present")
    for node in (1, 3, 17, 18):
        grid.leave(node)
    members.refresh()
    lost, waiting = pop_warnings(warnings)
    assert lost.startswith("4 of 4 clients (a, b, c, …) are gone; 0 of 4 clients are present")
    assert waiting.startswith("0 of 4 clients ") and "waits until 1 " in waiting
    assert not re.search(r"\d{3}|node 1", capsys.readouterr().out)


class ExtraEntries(Registered):
    """Sites, where b adds entries to its answer."""

    def __init__(self, entries_to_add: dict[str, Any], **configs: dict[str, Any]) -> None:
        super().__init__(**configs)
        self.entries_to_add = entries_to_add

    def answer(self, message: Message) -> Message:
        reply = super().answer(message)
        if not reply.has_error() and self.names[message.metadata.dst_node_id] == "b":
            reply.content["config"] = ConfigRecord({**reply.content.config_records["config"], **self.entries_to_add})
        return reply


def test_site_warnings_are_logged_once_with_its_name(
    make_config: MakeConfig, site: Callable[[str], dict[str, Any]], warnings: pytest.LogCaptureFixture
) -> None:
    notes = ["3 samples are duplicates", "a file is called\nx\x1b[31m", "y" * 1000, *map(str, range(100))]
    configs = {name: site(f"site-{name}") | {"name": ""} for name in "ab"}
    grid = ExtraEntries({"warnings": notes, "skipped": 2}, **configs)
    config = make_config("fedavg", dataset="sites", num_clients=2, model="linear")
    members = Federation(WaveGrid(grid), read_settings(config))
    members.agree()
    members.join()
    lines = pop_warnings(warnings)
    assert lines[:3] == ["b: 3 samples are duplicates", "b: a file is called x [31m", f"b: {'y' * 299}…"]
    assert len(lines) == 20
    table = members.task("linear")
    assert re.search(r"^ *b +1 +13 +4 +features, shape 2 +2: 0, 1 +2$", table, re.MULTILINE), table


@pytest.mark.parametrize(
    "entries_to_add",
    [
        {"warnings": "no list"},
        {"warnings": [1, 2]},
        {"skipped": -1},
        {"skipped": 0.5},
        {"skipped": "two"},
        {"fingerprint": "00112233445566"},
        {"fingerprint": "../../etc/passwd"},
        {"fingerprint": 17},
    ],
)
def test_site_with_malformed_entries_is_excluded(
    entries_to_add: dict[str, Any], site_settings: Settings, site: Callable[[str], dict[str, Any]]
) -> None:
    configs = {name: site(f"site-{name}") | {"name": ""} for name in "ab"}
    members = ExtraEntries(entries_to_add, **configs).join_federation(with_min_clients(site_settings, 1))
    assert hosts(members) == {0: 1}
    assert [name for name, _ in members.excluded] == ["b"]


def test_record_of_excluded_nodes_is_bounded(settings: Settings) -> None:
    members = Federation(WaveGrid(Script()), settings)
    for node in range(1000):
        members.nodes.exclude(Node(node, registered=f"n{node}" * 100), "x\n" * 10_000)
    entries = members.summary()["left-out"]
    assert len(entries) == 201
    assert entries[-1] == {"site": None, "reason": "others", "times": 800}
    assert all(len(entry["site"] or "") <= 100 and len(entry["reason"]) <= 500 for entry in entries)


def test_means_over_some_of_the_clients_are_marked(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = make_config("fedavg", num_server_rounds=3, num_clients=3, min_clients=2, join_timeout=0.1, partition="iid")
    three = {name: {"partition-id": i, "num-partitions": 3} for i, name in enumerate("abc")}
    grid = Registered(**three)
    original = PersonalisedStrategy.configure_train

    def configure(self: PersonalisedStrategy, server_round: int, *more: Any) -> list[Message]:
        if server_round == 2:
            grid.leave(3)
        return original(self, server_round, *more)

    monkeypatch.setattr(PersonalisedStrategy, "configure_train", configure)
    path = run(grid, config).directory.path
    output = capsys.readouterr().out.splitlines()
    rounds = [line for line in output if line.startswith("round")]
    assert ["2 of 3 clients" in line for line in rounds] == [False, True, True]
    scored = [line for line in output if line.strip().startswith(("served model, last", "local model, last"))]
    assert len(scored) == 2 and all("2 of 3" in line for line in scored)
    (clients,) = (line for line in output if line.startswith("clients "))
    assert "  2 of 3 (missing " in clients and clients.endswith(": c)")
    rows = [json.loads(line) for line in (path / "rounds.jsonl").read_text().splitlines()]
    assert [row["missing"] for row in rows] == [[], [2], [2]]
    summary = json.loads((path / "summary.json").read_text())
    assert (summary["missing"], summary["served"]["last"]["missing"]) == ([2], 1)


def test_a_silent_node_does_not_delay_the_run(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(presence, "SILENT_SECONDS", 0.1)
    short = replace(settings, run=replace(settings.run, min_clients=3, join_timeout=0.2))
    grid = Script(*parts(4))
    grid.silent = {2}
    members = grid.join_federation(short)
    assert hosts(members) == {0: 1, 2: 3, 3: 4}
    assert not members.excluded
    grid.connect(9, parts(4)[1])
    grid.silent.add(9)
    started = time.monotonic()
    assert members.refresh() == []
    assert time.monotonic() - started < 5
    grid.silent.clear()
    query = grid.kept[-1]
    grid.replies[query.metadata.message_id] = grid.answer(query)
    assert members.refresh() == []
    assert hosts(members)[1] == 9  # the late answer is accepted


class Slow(Script):
    """A grid whose nodes take ``seconds`` to answer."""

    seconds = 0.25

    def __init__(self, *configs: dict[str, Any]) -> None:
        super().__init__(*configs)
        self.ready: dict[str, float] = {}

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        numbers = list(super().push_messages(messages))
        self.ready |= dict.fromkeys(numbers, time.monotonic() + self.seconds)
        return numbers

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        clock = time.monotonic()
        return super().pull_messages(number for number in message_ids if clock >= self.ready[number])


def open_task(make_config: MakeConfig, minimum: int, timeout: float, clients: int = 4) -> Settings:
    """Return settings of a run whose sites agree on a task. ``minimum`` sites must join within ``timeout`` seconds."""
    config = make_config("fedavg", dataset="sites", num_clients=clients, min_clients=minimum, join_timeout=timeout)
    return read_settings(config)


def test_run_starts_once_enough_sites_have_joined(
    make_config: MakeConfig, site: Callable[[str], dict[str, Any]]
) -> None:
    members = Federation(WaveGrid(Slow(site("a"), site("c"))), open_task(make_config, minimum=2, timeout=60.0))
    started = time.monotonic()
    members.agree()
    assert list(members.join()) == [0, 1]
    assert time.monotonic() - started < 30
    assert not members.excluded


@pytest.mark.parametrize("minimum", [0, 2])
def test_agreement_does_not_use_up_the_join_timeout(
    make_config: MakeConfig, site: Callable[[str], dict[str, Any]], minimum: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two answers of 0.25 s each exceed the join-timeout of 0.3 s, but the sites connected in time."""
    monkeypatch.setattr(presence, "REFRESH_SECONDS", 0.01)
    monkeypatch.setattr(nodes, "ASK_SECONDS", 20.0)
    members = Federation(WaveGrid(Slow(site("a"), site("c"))), open_task(make_config, minimum, timeout=0.3, clients=2))
    members.agree()
    assert list(members.join()) == [0, 1]
    assert not members.excluded


def test_site_that_misses_the_agreement_joins(
    make_config: MakeConfig, site: Callable[[str], dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Site c answers the query for its data after the agreement, and then the query with the task."""
    monkeypatch.setattr(nodes, "ASK_SECONDS", 0.2)
    monkeypatch.setattr(presence, "SILENT_SECONDS", 20.0)
    grid = Slow(site("a"), site("b"), site("c"))
    grid.silent = {3}
    members = Federation(WaveGrid(grid), open_task(make_config, minimum=2, timeout=60.0, clients=3))
    members.agree()
    question = next(message for message in grid.kept if message.metadata.dst_node_id == 3)
    grid.replies[question.metadata.message_id] = grid.answer(question)
    grid.silent.clear()
    assert list(members.join()) == [0, 1, 2]
    assert not members.excluded


def test_silent_duplicate_node_does_not_delay_the_run(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(presence, "SILENT_SECONDS", 0.1)
    grid = Script(*parts(4), parts(4)[0])
    grid.silent = {5}
    members = grid.join_federation(replace(settings, run=replace(settings.run, join_timeout=300.0)))
    assert hosts(members) == {0: 1, 1: 2, 2: 3, 3: 4}
    assert not members.excluded


def test_unanswered_query_is_repeated(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    class Unresponsive(Script):
        requests: ClassVar[list[set[int]]] = []

        def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
            messages = list(messages)
            self.requests.append({m.metadata.dst_node_id for m in messages})
            self.silent = {2} if len(self.requests) < 3 else set()
            return super().push_messages(messages)

    monkeypatch.setattr(nodes, "ASK_SECONDS", 0.05)
    grid = Unresponsive(*parts(4))
    members = grid.join_federation(settings)
    assert grid.requests == [{1, 2, 3, 4}, {2}, {2}]
    assert hosts(members) == {0: 1, 1: 2, 2: 3, 3: 4}
    assert not members.excluded


def test_unavailable_node_is_queried_again(settings: Settings) -> None:
    class Flaky(Script):
        failures = 2

        def answer(self, message: Message) -> Message:
            if message.metadata.dst_node_id == 1 and self.failures:
                self.failures -= 1
                return Message(Error(ErrorCode.NODE_UNAVAILABLE, "node unavailable"), reply_to=message)
            return super().answer(message)

    grid = Flaky(*parts(4))
    members = grid.join_federation(settings)
    assert hosts(members) == {0: 1, 1: 2, 2: 3, 3: 4}
    assert (grid.failures, dict(members.excluded)) == (0, {})


@pytest.mark.parametrize(
    "answer",
    [
        {"clients": [0], "num-train": [5, 5], "num-test": [1]},
        {"clients": [7], "num-train": [5], "num-test": [1]},
        {"clients": [-1], "num-train": [5], "num-test": [1]},
        {"clients": [0.5], "num-train": [5], "num-test": [1]},
        {"clients": [0] * 5, "num-train": [5] * 5, "num-test": [1] * 5},
        {"clients": [0], "num-train": [0], "num-test": [1]},
        {"clients": [0], "num-train": [5], "num-test": [-1]},
        {"num-train": [5], "num-test": [1]},
        {},
    ],
)
def test_malformed_answer_excludes_the_node(answer: dict[str, Any], settings: Settings) -> None:
    class Liar(Script):
        def answer(self, message: Message) -> Message:
            if message.metadata.dst_node_id != 1:
                return super().answer(message)
            return Message(RecordDict({"config": ConfigRecord(answer)}), reply_to=message)

    members = Liar(*parts(4)).join_federation(replace(settings, run=replace(settings.run, min_clients=3)))
    assert hosts(members) == {1: 2, 2: 3, 3: 4}
    assert sum(members.excluded.values()) == 1


def test_round_waits_for_min_clients(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    grid = Script(*parts(4))
    members = grid.join_federation(replace(settings, run=replace(settings.run, min_clients=2, join_timeout=5.0)))
    for node in (1, 2, 3):
        grid.leave(node)
    calls = iter(range(100))

    def sleep(seconds: float) -> None:
        if next(calls) == 3:
            grid.connect(8, parts(4)[0])

    monkeypatch.setattr(presence.time, "sleep", sleep)
    assert members.refresh() == [0]
    assert hosts(members) == {0: 8, 3: 4}


def test_a_run_continues_while_clients_leave_and_return(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PPFE resends all finished stages to a client that returns on a node without its state."""
    config = make_config("ppfe", num_server_rounds=6, ppfe_stages=3, model="mlp", min_clients=3, join_timeout=1.0)
    grid = Script(*parts(3))
    lost: list[int] = []
    original = PPFE.configure_train

    def configure(self: PPFE, server_round: int, *more: Any) -> list[Message]:
        if server_round == 3:
            grid.connect(4, parts(4)[3])
            grid.leave(1)
        if server_round == 4:
            grid.connect(60, parts(4)[0])
        return original(self, server_round, *more)

    monkeypatch.setattr(PPFE, "configure_train", configure)
    lose = PPFE.lost
    monkeypatch.setattr(PPFE, "lost", lambda self, clients: (lost.extend(clients), lose(self, clients))[1])
    done = run(grid, config)
    rows = [json.loads(line) for line in (done.directory.path / "rounds.jsonl").read_text().splitlines()]
    assert [row["cohort"] for row in rows] == [3, 3, 3, 4, 4, 4]
    dropped = [(row["round"], drop["client"], drop["reason"]) for row in rows for drop in row["dropped"]]
    [(number, client, reason)] = dropped
    assert (number, client) == (4, 0) and "its state of round 2 is not on its node" in reason
    assert "state-dir" in reason
    assert lost == [0]
    assert set(done.totals.clients) == {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"class-counts": [1, 2, 3]}, "class-counts have 3 classes"),
        ({"class-counts": [5, -1]}, "class-counts have 2 classes"),
        ({"name": "a\nb"}, "its name is not a single line"),
        ({"name": "a" * 101}, "at most 100 characters"),
        ({"num-train": 2.5}, "num-train = 2.5"),
        ({"num-train": "many"}, "malformed reply: TypeError"),
    ],
)
def test_site_with_an_invalid_description_is_excluded(
    change: dict[str, Any], reason: str, site_settings: Settings, site: Callable[[str], dict[str, Any]]
) -> None:
    class Liar(Script):
        def answer(self, message: Message) -> Message:
            reply = super().answer(message)
            if message.metadata.dst_node_id == 1:
                reply.content["config"] = ConfigRecord({**reply.content.config_records["config"], **change})
            return reply

    grid = Liar(site("site-a"), site("site-b"))
    members = grid.join_federation(replace(site_settings, run=replace(site_settings.run, min_clients=1)))
    assert hosts(members) == {0: 2}
    ((_, refusal),) = members.excluded
    assert reason in refusal
