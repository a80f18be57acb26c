"""Certificates, keys and the node config of a federation, without processes."""

import ast
import re
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from posy.client_app.node_config import NODE_WORDS
from posy.commands.cli import main
from posy.commands.deploy.certificates import Files, make_certificates, read_certificates
from posy.commands.deploy.options import node_config, node_configs
from posy.deploy import addresses, node
from posy.deploy.addresses import free_port
from posy.deploy.node import MAX_POLL_SECONDS, Waits, pause
from posy.settings import SettingsError

PAGES = Path(__file__).resolve().parents[1] / "docs/deploy"
OTHER_MESSAGES = {
    "Invalid node ID",
    *("CERTIFICATE_VERIFY_FAILED", "Connection refused", "timed out", "Invalid timestamp", "2 of 3 clients"),
    *("EXPERIMENTAL: SuperExec authentication", "Connection attempt failed, retrying"),
}
"""Messages on the page on faults that come from libraries, and an example of a round's line."""


def test_free_ports_are_below_the_outgoing_ports() -> None:
    assert addresses.LISTENING.stop <= 32_768  # Linux draws outgoing ports from 32768 on
    assert all(free_port() in addresses.LISTENING for _ in range(20))


def test_a_port_in_use_is_not_free(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        monkeypatch.setattr(addresses, "LISTENING", range(port, port + 1))
        with pytest.raises(OSError, match=f"no port from {port} to {port} is free"):
            free_port()


def test_existing_certificates_are_not_replaced(tmp_path: Path) -> None:
    files = Files(tmp_path / "keys")
    written = make_certificates(files.folder, ["superlink"], ["a"], 30)
    assert {path.name for path in written} == {"ca.key", "ca.pem", "server.key", "server.pem", "a.key", "a.pub"}
    for path in (files.ca_key, files.server_key, files.node_key("a")):
        assert path.stat().st_mode & 0o077 == 0
    before = {path.name: path.read_bytes() for path in written}
    assert [path.name for path in make_certificates(files.folder, [], ["a", "b"], 30)] == ["b.key", "b.pub"]
    assert {name: (files.folder / name).read_bytes() for name in before} == before


def test_a_certificate_without_its_key_is_refused(tmp_path: Path) -> None:
    make_certificates(tmp_path, [], ["a"], 30)
    (tmp_path / "server.key").unlink()
    with pytest.raises(SettingsError, match=r"server\.pem exists, but .*server\.key is missing"):
        make_certificates(tmp_path, [], [], 30)
    (tmp_path / "a.key").unlink()  # the machine with the authority may delete the nodes' private keys
    (tmp_path / "server.pem").unlink()
    assert [path.name for path in make_certificates(tmp_path, [], ["a"], 30)] == ["server.key", "server.pem"]
    with pytest.raises(SettingsError, match="cannot be the name of a node"):
        make_certificates(tmp_path, [], ["../a"], 30)


def test_other_hosts_and_invalid_files_are_refused(tmp_path: Path) -> None:
    for host in ("", "a b", "ä.example", "server:9092"):
        with pytest.raises(SettingsError, match=r"--host .*an IP address or a name"):
            make_certificates(tmp_path / "none", [host], [], 1)
    assert not (tmp_path / "none").exists()
    make_certificates(tmp_path, ["one.example", "10.0.0.1"], [], 1)
    assert make_certificates(tmp_path, ["one.example", "10.0.0.1"], [], 1) == []
    with pytest.raises(SettingsError, match=r"server\.pem .*not valid for 10\.0\.0\.2, two\.example;.*--renew"):
        make_certificates(tmp_path, ["two.example", "10.0.0.2", "one.example"], [], 1)
    for name in ("server.pem", "server.key"):
        (tmp_path / name).unlink()
    (tmp_path / "ca.key").write_text("no key")
    with pytest.raises(SettingsError, match="named like a certificate or key"):
        make_certificates(tmp_path, [], [], 1)


def test_a_site_creates_keys_without_an_authority(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    site, server = tmp_path / "site", tmp_path / "server"
    assert main(["certificates", str(site), "va"]) == 0
    assert sorted(path.name for path in site.iterdir()) == ["va.key", "va.pub"]
    assert "ca.pem is missing" in capsys.readouterr().err
    assert main(["certificates", str(server), "--host", "server.example.org"]) == 0
    (site / "ca.pem").write_bytes((server / "ca.pem").read_bytes())
    assert main(["certificates", str(site), "va", "vb"]) == 0
    assert sorted(path.name for path in site.iterdir()) == ["ca.pem", "va.key", "va.pub", "vb.key", "vb.pub"]
    assert "missing" not in capsys.readouterr().err
    assert main(["certificates", str(server), "vc"]) == 0  # it has the authority
    names = ["ca.key", "ca.pem", "server.key", "server.pem", "vc.key", "vc.pub"]
    assert sorted(path.name for path in server.iterdir()) == names
    assert main(["certificates", str(tmp_path / "all")]) == 0
    assert sorted(path.name for path in (tmp_path / "all").iterdir()) == names[:4]


def test_clients_of_the_service_receive_certificates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files, words = Files(tmp_path / "all"), ["certificates", str(tmp_path / "all"), "--client", "app"]
    assert main(words) == 0
    assert {path.name for path in files.folder.iterdir()} == {
        *("ca.key", "ca.pem", "server.key", "server.pem"),
        *("app.key", "app.pem"),
    }
    assert files.client_key("app").stat().st_mode & 0o077 == 0
    [first] = read_certificates(files.client("app"))
    first.verify_directly_issued_by(read_certificates(files.ca)[0])
    server = files.server.read_bytes()
    assert main(words) == 0 and read_certificates(files.client("app")) == [first]
    assert main([*words, "--renew", "--days", "7"]) == 0
    [second] = read_certificates(files.client("app"))
    assert (
        second.serial_number != first.serial_number
        and (second.not_valid_after_utc - second.not_valid_before_utc).days == 7
    )
    assert files.server.read_bytes() == server
    capsys.readouterr()
    for wrong, text in (
        (["--client", "server"], "cannot be the name of a node or client"),
        (["--client", "other", "--renew"], "other.pem does not exist; drop --renew"),
        (["--client", "app", "--renew-authority"], "cannot be combined with NODE, --host, --client or --renew"),
    ):
        assert main([*words[:2], *wrong]) == 2
        assert text in capsys.readouterr().err
    assert main([*words[:2], "node"]) == 0 and main([*words[:2], "--client", "node"]) == 2
    assert "node.key exists, but" in capsys.readouterr().err  # the key of a node is not overwritten


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["partition-id=0", "num-partitions=5"], "partition-id=0 num-partitions=5"),
        (["data=/srv/site a", 'name="site-a"'], 'data="/srv/site a" name="site-a"'),
        (
            ["skip-unreadable=true", "state-dir=1.5", "name=2026-01-01"],
            'skip-unreadable=true state-dir=1.5 name="2026-01-01"',
        ),
    ],
)
def test_node_config_is_passed_to_flower(words: list[str], expected: str) -> None:
    from flwr.common.config import parse_config_args

    assert node_config(words) == expected
    parsed = parse_config_args([node_config(words)])
    assert [str(value) for value in parsed.values()] == [
        str(word.partition("=")[2]).strip('"').replace("true", "True") for word in words
    ]


def test_node_config_must_have_the_form_key_value() -> None:
    with pytest.raises(SettingsError, match=r"'partition-id' .*key=value"):
        node_config(["partition-id"])


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("state_dir=/x", "state_dir in the node config.*did you mean state-dir?"),
        ("partition_id=0", "did you mean partition-id?"),
        ("num-server-rounds=50", "num-server-rounds in the node config.*a setting for"),
        ("local-epochs=0", "local-epochs = 0 in the node config: .* at least 1"),
        ("lr=fast", "lr = 'fast' in the node config: .* above 0"),
        ("batch-size=2.5", r"batch-size = 2\.5 in the node config"),
        ("colour=red", "a node reads data, policy, name, state-dir, models, skip-unreadable, partition-id, "),
        ("partition-id=-1", "partition-id = '-1' .*whole number of at least 0"),
        ("num-partitions=0", "num-partitions = '0' .*whole number of at least 1"),
        ("state-dir=/srv/{name}", r"\{name\} is the name of a node's key"),
    ],
)
def test_invalid_node_config_is_refused(
    word: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SettingsError, match=message):
        node_config(["data=/srv/a", word])
    assert main(["supernode", "--insecure", "data=/srv/a", word]) == 2
    assert re.search(message, " ".join(capsys.readouterr().err.split()))
    if "name}" not in word and "rounds" not in word and "colour" not in word:
        np.savez(tmp_path / "a.npz", x_train=np.ones((8, 2)), y_train=np.arange(8) % 2)
        assert main(["check-site", f"data={tmp_path / 'a.npz'}", word]) == 2


def test_a_single_key_names_its_node(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The test catches the command before its process starts."""
    make_certificates(tmp_path, [], ["site-a"], 1)
    commands: list[list[str]] = []
    monkeypatch.setattr("os.execve", lambda program, command, environment: commands.append(command))
    words = ["--root-certificates", str(tmp_path / "ca.pem"), "--key", str(tmp_path / "site-a.key")]
    (tmp_path / "site-a.csv").touch()
    for more in ([], ["--stock"]):
        main(["supernode", *words, *more, f"data={tmp_path}/{{name}}.csv", "state-dir=/state/{name}"])
        config = commands[-1][commands[-1].index("--node-config") + 1]
        assert config == f'data="{tmp_path}/site-a.csv" state-dir="/state/site-a"'


@pytest.mark.parametrize(
    ("path", "message"), [("/srv/absent.csv", "does not exist"), ("a.csv", "must be an absolute path")]
)
def test_a_node_does_not_start_without_its_data(path: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["supernode", "--insecure", f"data={path}"]) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert path in error
    assert message in error
    assert "in the node config" in error


def test_the_page_of_a_site_lists_every_node_config_key() -> None:
    page = (PAGES / "site.md").read_text(encoding="utf-8")
    rows = [
        line.split("|")[1] for line in page.partition("| node config |")[2].splitlines()[2:] if line.startswith("| `")
    ]
    listed = {word.partition("=")[0] for row in rows for word in re.findall(r"`([^`]+)`", row)}
    assert set(NODE_WORDS) <= listed


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
@pytest.mark.parametrize("page", ["site.md", "operations.md"])
def test_unit_files_are_valid(page: str, tmp_path: Path) -> None:
    """The page on operation lists only the entries in which the SuperLink's unit differs from a node's."""
    [unit] = units = re.findall(r"```ini\n(.*?)```", (PAGES / "site.md").read_text(encoding="utf-8"), flags=re.DOTALL)
    if page == "operations.md":
        units = re.findall(r"```ini\n(.*?)```", (PAGES / page).read_text(encoding="utf-8"), flags=re.DOTALL)
        for line in units[0].splitlines():
            key = line.partition("=")[0]
            unit, count = re.subn(rf"^{key}=(?:.*\\\n)*.*$", line, unit, flags=re.MULTILINE)
            assert count == 1, line
        assert "posy-node" not in unit and "site-a" not in unit
    assert len(units) == 1
    [command] = re.findall(r"^ExecStart=\S+/(posy .*?[^\\])$", unit, flags=re.DOTALL | re.MULTILINE)
    words = shlex.split(command.replace("\\\n", ""))
    assert node_config([word for word in words if "=" in word]) or page == "operations.md"
    # On this machine, neither the user nor the path of the installation needs to exist.
    file = tmp_path / "posy-test.service"
    text = re.sub(r"^(User|Group)=posy", r"\1=root", unit, flags=re.MULTILINE)
    file.write_text(re.sub(r"^ExecStart=\S+", f"ExecStart={sys.executable}", text, flags=re.MULTILINE))
    done = subprocess.run(["systemd-analyze", "verify", str(file)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def texts_of(code: str) -> Iterator[str]:
    """Yield the text constants in Python code; in f-strings, ``\\0`` replaces the values."""
    for each in ast.walk(ast.parse(code)):
        if isinstance(each, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "\0" for part in each.values)
        elif isinstance(each, ast.Constant) and isinstance(each.value, str):
            yield each.value


def test_posy_prints_the_messages_on_the_page_on_faults() -> None:
    """In a message on the page, an ellipsis replaces values."""
    root = PAGES.parents[1]
    folders = ("client_app", "commands", "data", "deploy", "posy", "server_app", "strategies")
    files = [file for folder in folders for file in (root / folder).rglob("*.py")]
    code = "\0".join(text for file in files for text in texts_of(file.read_text(encoding="utf-8")))
    tables, _, _ = (PAGES / "faults.md").read_text(encoding="utf-8").partition("## The design")
    cells = [line.split(" | ")[0] for line in tables.splitlines() if line.startswith("| ")]
    messages = {message for cell in cells for message in re.findall(r"`([^`]+)`", cell)} - OTHER_MESSAGES
    assert len(messages) > 10
    parts = {part.strip() for message in messages for part in message.split("…")}
    assert not {part for part in parts if part not in code}


def test_nodes_of_one_command_divide_the_partitions() -> None:
    names = ["a", "b", "c"]
    shared = ["num-partitions=3", "state-dir=/srv/{name}"]
    assert node_configs(["state-dir=/srv/{name}"], names) == [
        [f"partition-id={i}", f"state-dir=/srv/{name}", "num-partitions=3"] for i, name in enumerate(names)
    ]
    configs = node_configs(["partition-id=25", "num-partitions=50"], names)
    assert configs == [[f"partition-id={i}", "num-partitions=50"] for i in (25, 26, 27)]
    # The names of sites decide their numbers, unless partition-id is set.
    assert node_configs(["data=/srv/{name}"], names) == [[f"data=/srv/{name}"] for name in names]
    assert node_configs(["data=/srv", "partition-id=4", *shared], names)[2][0] == "partition-id=6"
    for words in (["partition-id=25"], ["partition-id=x", "num-partitions=50"]):
        with pytest.raises(SettingsError, match=r"partition-id=.* for 3 nodes: .*number of the first node's partition"):
            node_configs(words, names)


def test_polling_is_rare_until_a_message_is_expected() -> None:
    def polls(gap: float, expected: float) -> tuple[int, float]:
        """Return the number of requests until a message arrives after ``gap`` seconds, and the delay."""
        waited, count = 0.0, 0
        while waited < gap:
            waited, count = waited + pause(waited, expected), count + 1
        return count, waited - gap

    assert polls(10, 0)[0] > 25
    for gap in (3, 10, 30, 300):
        count, delay = polls(gap, gap)
        assert count <= 10 or gap == 300
        assert delay < max(0.1, min(0.1 * gap, 3))
    for gap in (0.5, 2, 6):  # the message arrives earlier than expected
        assert polls(gap, 10)[1] < MAX_POLL_SECONDS
    assert polls(3600, 10)[0] < 3600 / 2.9 + 60


def test_polling_adapts_to_message_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, slept = [0.0], []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        clock[0] += seconds

    monkeypatch.setattr(node.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(node.time, "sleep", sleep)
    waits = Waits()
    for _ in range(2):
        started = clock[0]
        slept.clear()
        while clock[0] < started + 10:
            waits.pause()
        polls = len(slept)
        waits.begin()
        waits.end()
    assert polls < 20
