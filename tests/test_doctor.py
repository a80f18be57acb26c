"""`posy doctor`, renewed certificates and backups, with Flower's Fleet API and database in this process."""

import datetime
import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import pytest
from flwr.common.constant import NOOP_ACCOUNT_NAME, NOOP_FLWR_AID
from flwr.proto.node_pb2 import NodeInfo
from flwr.server.superlink.fleet.grpc_rere.node_auth_server_interceptor import NodeAuthServerInterceptor
from flwr.server.superlink.linkstate.linkstate_factory import LinkStateFactory
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.superlink.cli.flower_superlink import _run_fleet_api_grpc_rere
from flwr.superlink.federation import NoOpFederationManager

from posy.commands import cli
from posy.commands.deploy import doctor
from posy.commands.deploy.backup import back_up, locked_state, restore
from posy.commands.deploy.certificates import (
    Files,
    check_server,
    hosts_of,
    make_certificates,
    public_half,
    public_pem,
    read_certificates,
    renew,
)
from posy.commands.deploy.control import Run
from posy.commands.deploy.doctor import Finding
from posy.commands.deploy.status import doing, waiting
from posy.commands.launch import Connection
from posy.deploy import fleet as calling
from posy.deploy.addresses import free_port
from posy.flower import versions
from posy.settings import SettingsError


class Usage(NamedTuple):
    total: int
    used: int
    free: int


def make_files(folder: Path, *nodes: str, days: int = 365) -> Files:
    make_certificates(folder, ["10.0.0.1"], nodes, days)
    return Files(folder)


def problems(findings: Any) -> list[Finding]:
    return [finding for finding in findings if finding.level != "ok"]


def is_trusted(port: int, ca: Path) -> bool:
    """Return whether a gRPC client with this CA certificate trusts the server at a port."""
    with grpc.secure_channel(f"localhost:{port}", grpc.ssl_channel_credentials(ca.read_bytes())) as channel:
        try:
            grpc.channel_ready_future(channel).result(timeout=3.0)
        except grpc.FutureTimeoutError:
            return False
    return True


class Fleet(NamedTuple):
    """Flower's Fleet API with node authentication."""

    port: int
    state: Any

    @property
    def address(self) -> str:
        return f"localhost:{self.port}"


def fleet_of(files: Files) -> tuple[Fleet, grpc.Server]:
    objects = ObjectStoreFactory()
    states = LinkStateFactory(":flwr-in-memory:", NoOpFederationManager(), objects)
    content = tuple(path.read_bytes() for path in (files.ca, files.server, files.server_key))
    port = free_port()
    interceptors = [NodeAuthServerInterceptor(states)]
    server = _run_fleet_api_grpc_rere(f"127.0.0.1:{port}", states, objects, True, content, interceptors)  # type: ignore[arg-type]
    return Fleet(port, states.state()), server


def register(fleet: Any, public: Path) -> int:
    number: int = fleet.create_node(NOOP_FLWR_AID, NOOP_ACCOUNT_NAME, public_pem(public), 30, name=public.stem)
    return number


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[tuple[Fleet, Files]]:
    files = make_files(tmp_path / "certificates", "site-a", "site-b")
    started, server = fleet_of(files)
    register(started.state, files.node_public("site-a"))
    yield started, files
    server.stop(None).wait()


# -- renewed certificates and keys -----------------------------------------------------------------------


def test_renewal_preserves_the_hosts_and_the_old_certificate(tmp_path: Path) -> None:
    files = make_files(tmp_path)
    before = {path: path.read_bytes() for path in (files.server, files.server_key, files.ca, files.ca_key)}
    assert renew(tmp_path, ["new.example"], [], 30) == [files.server_key, files.server]
    check_server(files.server, files.server_key)
    [certificate] = read_certificates(files.server)
    assert {str(name.value) for name in hosts_of(certificate)} == {"localhost", "127.0.0.1", "10.0.0.1", "new.example"}
    assert (files.ca.read_bytes(), files.ca_key.read_bytes()) == (before[files.ca], before[files.ca_key])
    for path in (files.server, files.server_key):
        [old] = tmp_path.glob(f"{path.name}.*")
        assert old.read_bytes() == before[path] != path.read_bytes()
    for key in tmp_path.glob("*.key*"):
        assert key.stat().st_mode & 0o077 == 0
    assert not problems(doctor.check_certificates(tmp_path))[1:]  # the new certificate is for 30 days only
    assert not [*tmp_path.glob(".*.part")]


def test_a_node_renews_its_key_without_the_authority(tmp_path: Path) -> None:
    files = make_files(tmp_path, "site-a")
    for path in (files.ca_key, files.server, files.server_key):
        path.unlink()
    before = files.node_key("site-a").read_bytes()
    assert renew(tmp_path, [], ["site-a"], 1) == [files.node_key("site-a"), files.node_public("site-a")]
    assert files.node_key("site-a").read_bytes() != before
    assert public_half(files.node_key("site-a")) == public_pem(files.node_public("site-a"))
    with pytest.raises(SettingsError, match=r"site-z\.key does not exist"):
        renew(tmp_path, [], ["site-z"], 1)
    with pytest.raises(SettingsError, match=r"server\.pem cannot be used"):
        renew(tmp_path, [], [], 1)


def test_a_renewed_authority_trusts_old_and_new_certificates(tmp_path: Path) -> None:
    files = make_files(tmp_path / "server")
    old_ca = tmp_path / "old.pem"
    shutil.copy(files.ca, old_ca)
    old_fleet, old_server = fleet_of(files)
    renew(files.folder, [], [], 30, authority=True)
    assert len(read_certificates(files.ca)) == 2
    assert not [finding for finding in doctor.check_certificates(files.folder) if finding.level == "error"]
    assert is_trusted(old_fleet.port, files.ca)  # the new ca.pem trusts the old certificate
    renew(files.folder, [], [], 30)
    assert not [finding for finding in doctor.check_certificates(files.folder) if finding.level == "error"]
    new_fleet, new_server = fleet_of(files)
    assert is_trusted(new_fleet.port, files.ca)
    assert not is_trusted(new_fleet.port, old_ca)
    for running in (old_server, new_server):
        running.stop(None).wait()


# -- checks ----------------------------------------------------------------------------------------------


def test_expired_and_expiring_certificates_are_reported(tmp_path: Path) -> None:
    expiring = problems(doctor.check_certificates(make_files(tmp_path / "soon", days=10).folder))
    assert [finding.level for finding in expiring] == ["warning", "warning"]
    assert all("expires in 9 days" in finding.text for finding in expiring)
    assert "--renew-authority`" in expiring[0].text and "copy ca.pem" in expiring[0].text
    expired = problems(doctor.check_certificates(make_files(tmp_path / "over", days=0).folder))
    assert [finding.level for finding in expired] == ["error", "error"]
    assert "server.pem expired on" in expired[1].text
    assert "--renew`" in expired[1].text


def test_a_not_yet_valid_certificate_points_to_the_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = make_files(tmp_path)
    past = datetime.datetime.now(datetime.UTC) - datetime.timedelta(hours=1)
    monkeypatch.setattr(doctor, "_now", lambda: past)
    findings = problems(doctor.check_certificates(files.folder))
    assert all("check this machine's clock" in text for _, text in findings)
    assert len(findings) == 2


def test_file_modes_key_pairs_and_authority_are_checked(tmp_path: Path) -> None:
    files = make_files(tmp_path / "a", "site-a", "site-b")
    other = make_files(tmp_path / "b", "site-a")
    assert not problems(doctor.check_certificates(files.folder))
    files.node_key("site-b").chmod(0o644)
    [finding] = problems(doctor.check_certificates(files.folder))
    assert finding.level == "warning"
    assert finding.text.startswith(f"{files.node_key('site-b')} can be read by other users (mode 644)")
    assert finding.text.endswith(f"chmod 600 {files.node_key('site-b')}")
    files.node_key("site-b").chmod(0o600)
    shutil.copy(other.node_public("site-a"), files.node_public("site-a"))
    shutil.copy(other.server, files.server)
    texts = [text for level, text in problems(doctor.check_certificates(files.folder)) if level == "error"]
    mismatches = [
        (files.server_key, f"and {files.server} do not belong together"),
        (files.server, f"not signed by an authority in {files.ca}"),
        (files.node_key("site-a"), f"and {files.node_public('site-a')} do not belong together"),
    ]
    for text, (path, part) in zip(texts, mismatches, strict=True):
        assert text.startswith(str(path)) and part in text
    files.ca.write_text("none")
    files.node_key("site-b").write_text("none")
    texts = [text for level, text in problems(doctor.check_certificates(files.folder)) if level == "error"]
    assert any("ca.pem cannot be used" in text for text in texts)
    assert any("site-b.key is not a private key" in text for text in texts)


def test_check_reach_reports_trust_and_availability(fleet: tuple[Fleet, Files], tmp_path: Path) -> None:
    started, files = fleet
    [trusted] = doctor.check_reach("it", started.address, files.ca, files.server)
    assert trusted.level == "ok"
    assert "is trusted" in trusted.text and "valid until" in trusted.text
    [untrusted] = doctor.check_reach("it", started.address, make_files(tmp_path / "other").ca)
    assert untrusted.level == "error"
    assert "does not verify the certificate of" in untrusted.text
    [unreachable] = doctor.check_reach("it", f"localhost:{free_port()}", files.ca)
    assert unreachable.level == "error"
    assert "check that `posy superlink` runs there" in unreachable.text
    renew(files.folder, [], [], 60)
    *_, stale = doctor.check_reach("it", started.address, files.ca, files.server)
    assert stale.level == "warning"
    assert "does not use" in stale.text


def test_check_admission_reports_registration_without_side_effects(fleet: tuple[Fleet, Files]) -> None:
    started, files = fleet
    before = [str(node) for node in started.state.get_node_info()]
    registered = [*doctor.check_admission(started.address, files.ca, files.node_key("site-a"))]
    assert [finding.level for finding in registered] == ["ok", "ok"]
    unregistered = problems(doctor.check_admission(started.address, files.ca, files.node_key("site-b")))
    assert [finding.level for finding in unregistered] == ["error"]
    assert "site-b.key is not registered: `posy register certificates/site-b.pub`" in unregistered[0].text
    assert [str(node) for node in started.state.get_node_info()] == before


@pytest.mark.parametrize(
    ("seconds", "level", "text"),
    [
        (1, "ok", "agrees with the SuperLink's clock"),
        (3.5, "warning", "ahead of the SuperLink's by more than 2 s"),
        (20, "error", "more than 5 s ahead"),
        (-30, "ok", "agrees with the SuperLink's clock"),
        (-100, "warning", "behind the SuperLink's by more than 60 s"),
        (-400, "error", "more than 305 s behind"),
    ],
)
def test_clock_errors_of_a_site_are_reported(
    seconds: float, level: str, text: str, fleet: tuple[Fleet, Files], monkeypatch: pytest.MonkeyPatch
) -> None:
    started, files = fleet
    original = calling.current_time
    monkeypatch.setattr(calling, "current_time", lambda: original() + datetime.timedelta(seconds=seconds))
    finding = next(iter(doctor.check_admission(started.address, files.ca, files.node_key("site-a"))))
    assert (finding.level, text in finding.text) == (level, True), finding


def test_different_versions_and_clocks_are_reported() -> None:
    nodes = [NodeInfo(node_id=number, name=name, status="online") for number, name in enumerate("abcd", start=1)]
    same = {name: str(version) for name, version in versions().items()}
    reports = {
        "9": {"nodes": {"1": {"told": 1.0, "clock": 300.0, "versions": {**same, "torch": "1.0"}}}},
        "10": {
            "nodes": {
                "1": {"told": 2.0, "clock": -0.5, "versions": same | {"torch": f"{same['torch'].partition('+')[0]}+x"}},
                "2": {"told": 2.0, "clock": 3.0, "versions": {**same, "flwr": "1.39.7"}},
                "3": {"told": 2.0, "clock": -400.0, "versions": {}},
            }
        },
    }
    expected = [
        ("warning", f"b has flwr 1.39.7, but the server has {same['flwr']}"),
        ("warning", "clock of b is 3 s ahead"),
        ("error", "clock of c is 400 s behind"),
    ]
    for finding, (level, part) in zip(problems(doctor.check_node_reports(nodes, reports)), expected, strict=True):
        assert finding.level == level and part in finding.text


def test_unregistered_and_unknown_keys_are_reported(tmp_path: Path) -> None:
    files = make_files(tmp_path, "site-a", "site-b")
    nodes = [
        NodeInfo(name="site-a", public_key=public_pem(files.node_public("site-a")), status="registered"),
        NodeInfo(name="gone", public_key=b"other", status="online", last_activated_at="2026-01-01T00:00:00+00:00"),
    ]
    texts = [text for _, text in problems(doctor.check_nodes(nodes, tmp_path))]
    assert [text.partition(":")[0] for text in texts] == [
        f"{files.node_public('site-b')} is not registered",
        "site-a has never been online",
        f"the key registered as gone is not in {tmp_path}",
    ]


@pytest.mark.parametrize(
    ("total", "free", "level"),
    [(1 << 40, 1 << 39, "ok"), (1 << 40, 1 << 35, "warning"), (1 << 31, 1 << 30, "ok"), (1 << 31, 1 << 29, "warning")],
)
def test_low_disk_space_is_reported(
    total: int, free: int, level: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(total, total - free, free))
    state_disk, temporary_disk = doctor.check_disk([("the state", tmp_path / "not/yet/there")])
    assert state_disk.level == temporary_disk.level == level
    assert f"free disk for the state ({tmp_path / 'not/yet/there'}): " in state_disk.text


def test_unreadable_data_is_reported(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    for name, level in (("empty", "error"), ("none", "error"), ("file", "ok"), ("", "ok")):
        [finding] = doctor.check_data(tmp_path / name)
        assert finding.level == level, finding


def test_a_site_check_fails_on_unreadable_data(
    fleet: tuple[Fleet, Files], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    started, files = fleet
    reached = Connection(started.address, files.ca)
    config = {"state-dir": str(tmp_path), "data": str(tmp_path / "none")}
    assert doctor.show(doctor.of_site(reached, files.node_key("site-a"), config)) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if not line.startswith(("ok ", "warning "))] == [
        line for line in lines if f"data={tmp_path / 'none'} cannot be read" in line
    ]
    assert doctor.show(doctor.of_site(reached, files.node_key("site-a"), {})) == 0


def test_a_stopped_superlink_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_files(tmp_path / "certificates", "site-a")
    words = ["doctor", "--certificates", str(tmp_path / "certificates"), "--state", str(tmp_path / "superlink")]
    assert cli.main([*words, "--superlink", f"127.0.0.1:{free_port()}", "--fleet", f"127.0.0.1:{free_port()}"]) == 1
    errors = [line for line in capsys.readouterr().out.splitlines() if line.startswith("error")]
    assert [error.partition(" at ")[0].split(maxsplit=1)[1] for error in errors] == [
        "the SuperLink's control API",
        "the SuperLink's fleet API",
        "the registered nodes could not be listed: no SuperLink answers",
    ]
    assert cli.main([*words[:2], str(tmp_path / "none"), *words[3:]]) == 1
    [error] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("error")]
    assert "none/ca.pem cannot be used" in error


# -- backups ---------------------------------------------------------------------------------------------


def test_a_backup_of_an_open_database_restores_registered_keys(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state, file = tmp_path / "superlink", tmp_path / "backup"
    files = make_files(tmp_path / "certificates", "site-a", "site-b", "site-c")
    with pytest.raises(SettingsError, match=r"no state\.db; .*--volatile"):
        back_up(state, file)
    state.mkdir()
    link = reopened(state)
    register(link, files.node_public("site-a"))
    file.write_text("an old one")
    back_up(state, file)
    assert file.stat().st_mode & 0o077 == 0
    register(link, files.node_public("site-b"))
    with (
        locked_state(state),
        pytest.raises(SettingsError, match="in use by a running SuperLink"),
    ):
        restore(state, file)
    capsys.readouterr()
    assert cli.main(["restore", str(file), "--state", str(state)]) == 0
    names = {node.name for node in reopened(state).get_node_info()}
    assert names == {"site-a"}
    printed = capsys.readouterr().out
    assert "the previous state is in " in printed
    assert (
        "keys that were revoked after the backup are valid again: repeat each `posy register` and `posy unre" in printed
    )
    shutil.rmtree(state)
    assert restore(state, file) is None
    again = reopened(state)
    assert {node.name for node in again.get_node_info()} == {"site-a"}
    register(again, files.node_public("site-c"))
    assert (state / "state.db").stat().st_mode & 0o077 == 0
    assert state.stat().st_mode & 0o077 == 0


def reopened(state: Path) -> Any:
    return LinkStateFactory(str(state / "state.db"), NoOpFederationManager(), ObjectStoreFactory()).state()


def test_invalid_backups_are_refused(tmp_path: Path) -> None:
    state = tmp_path / "superlink"
    state.mkdir()
    (state / "state.db").write_text("mine")
    for content in (b"", b"no database" * 100):
        (tmp_path / "file").write_bytes(content)
        with pytest.raises(SettingsError, match="file"):
            restore(state, tmp_path / "file")
    with pytest.raises(SettingsError, match="cannot be restored"):
        restore(state, tmp_path / "none")
    sqlite3.connect(tmp_path / "empty").execute("CREATE TABLE other (a)").connection.close()
    with pytest.raises(SettingsError, match="is not a complete database of a SuperLink"):
        restore(state, tmp_path / "empty")
    assert (state / "state.db").read_text() == "mine"
    with pytest.raises(SettingsError, match="cannot be copied"):
        back_up(state, tmp_path / "backup")
    assert not (tmp_path / "backup").exists()


def test_restore_replaces_a_damaged_state(tmp_path: Path) -> None:
    state, file = tmp_path / "superlink", tmp_path / "backup"
    state.mkdir()
    link = reopened(state)
    register(link, make_files(tmp_path / "certificates", "site-a").node_public("site-a"))
    back_up(state, file)
    for end in ("", "-wal", "-shm"):
        (state / f"state.db{end}").write_text("damaged" * 1000)
    old = restore(state, file)
    assert old is not None and Path(f"{old}-wal").read_text().startswith("damaged")
    assert {node.name for node in reopened(state).get_node_info()} == {"site-a"}


# -- status ----------------------------------------------------------------------------------------------


def test_status_describes_node_activity_and_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.time", lambda: 1000.0)
    runs = [Run("1", {"run-name": "mine"}, "running", "", 0.0, ""), Run("2", {}, "completed", "", 0.0, "")]
    statuses = {
        "1": {"nodes": {"5": {"does": "trains in round 3", "since": 940.0}, "6": {}}},
        "2": {"nodes": {"6": {"does": "trains in round 9", "since": 0.0}}},
    }
    assert doing(NodeInfo(node_id=5), runs, statuses) == "trains in round 3 of mine, for 1 min 0 s"
    assert doing(NodeInfo(node_id=6), runs, statuses) == "waits"
    assert doing(NodeInfo(node_id=6), runs, {}) == ""  # no status of the run
    wait = {"for": "1 of 3 clients to train in round 3", "since": 990.0, "until": 1100.0}
    assert waiting(wait).startswith("1 of 3 clients to train in round 3, for 10 s, at most 1 min 40 s more")
    assert waiting(wait | {"until": 995.0}).endswith("passed 5 s ago")
    assert "for 10 s, no limit" in waiting(wait | {"until": None})
