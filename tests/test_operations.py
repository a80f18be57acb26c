"""Run the commands of docs/deploy/operations.md, with a SuperLink and two nodes."""

import csv
import re
import shutil
import signal
import ssl
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from cryptography import x509
from sklearn.datasets import load_digits

from benchmarks.local_federation import Deployment, children
from posy.commands.deploy.certificates import Files, read_certificates
from posy.settings import LaunchError

pytestmark = [pytest.mark.federation, pytest.mark.xdist_group("operations")]

PAGE = (Path(__file__).resolve().parent.parent / "docs/deploy/operations.md").read_text(encoding="utf-8")
WAIT_SECONDS = 600.0
NAMES = ("site-a", "site-b")


class Sites(Deployment):
    """A SuperLink and two nodes with partitions of one data set."""

    def __init__(self, folder: Path) -> None:
        x, y = load_digits(return_X_y=True)
        np.savez(folder / "data.npz", x_train=x[:400].astype(np.float32), y_train=y[:400])
        super().__init__(folder, list(NAMES))
        for i in range(len(NAMES)):
            self.start_node(i)
        for name in NAMES:
            self.until(lambda name=name: self.ready(name), name, WAIT_SECONDS)

    def start_node(self, number: int) -> None:
        self.node(NAMES[number], f"partition-id={number}", "num-partitions=2", f"state-dir=state-{number}")

    def settings(self, rounds: int) -> list[str]:
        settings = {
            "dataset": self.folder / "data.npz", "model": "mlp", "device": "cpu", "num-clients": 2, "method": "fedrep",
            "num-server-rounds": rounds, "local-epochs": 1, "checkpoint-every": 1, "round-timeout": 60,
        }  # fmt: skip
        return [f"{key}={value}" for key, value in settings.items()]

    def documented(self, text: str) -> str:
        """Run a command from the page with the ports of this federation, and return its output."""
        assert f"posy {text}" in PAGE, text
        words = text.replace("localhost:8000", self.control).split()
        words += self.where if words[0] in ("register", "unregister", "status") else []
        done = self.posy(*words)
        return done.stdout + done.stderr

    def presents(self, address: str, certificate: x509.Certificate) -> bool:
        """Return whether a port presents a certificate."""
        host, _, port = address.partition(":")
        try:
            presented = ssl.get_server_certificate((host, int(port)), timeout=5.0)
        except OSError:
            return False
        return x509.load_pem_x509_certificate(presented.encode()) == certificate

    def resume_run(self, run: str, *settings: str) -> None:
        """Resume a run and wait for its end."""
        self.submit("again", f"resume={run}", *settings)
        assert self.ended("run-again", WAIT_SECONDS) == 0, self.log("run-again")[-5000:]

    def doctor(self, *words: str) -> str:
        done = self.posy("doctor", "--superlink", self.control, "--fleet", self.fleet, *words)
        return done.stdout

    def complete_after(self, run: str, count: int) -> bool:
        """Return whether both clients took part in a round after the first ``count`` rounds."""
        return any(row["cohort"] == 2 and not row["dropped"] for row in self.rounds(run)[count:])


@pytest.fixture(scope="module")
def sites(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sites]:
    folder = tmp_path_factory.mktemp("operations")
    deployment = Sites.__new__(Sites)
    deployment.processes = {}
    try:
        deployment.__init__(folder)  # type: ignore[misc]
        yield deployment
    finally:
        deployment.stop()


@pytest.fixture(scope="module")
def active(sites: Sites) -> Sites:
    """Start a run that continues while certificates and keys are renewed."""
    sites.submit("long", *sites.settings(100_000))
    sites.until(lambda: len(sites.rounds("long")) >= 2, "run-long", WAIT_SECONDS)
    return sites


def test_status_shows_the_run_and_the_nodes(active: Sites) -> None:
    output = active.posy("status", *active.where).stdout
    assert re.search(r"long +fedrep +running .* \d+/100000\b", output)
    for name in NAMES:
        line = next(line for line in output.splitlines() if line.split()[:2] == [name, "online"])
        assert re.search(r"(trains in round \d+ of long|evaluates in round \d+ of long|waits)", line), line
        assert " right " in line
        assert "1.39." in line
    assert "free disk for the state" in output
    assert str(active.folder / "runs") in output
    elsewhere = active.posy("status", *active.where, "--state", "nowhere").stdout
    assert "--state nowhere contains no state" in elsewhere
    assert " 1.39." not in elsewhere


def test_doctor_reports_no_errors_on_server_and_site(active: Sites) -> None:
    output = active.doctor()
    assert "error" not in output
    assert "stranger.pub is not registered" in output
    assert "2 of 2 registered nodes are online" in output
    assert "clocks of 2 of 2 nodes" in output
    where = ["--superlink", active.fleet, "--root-certificates", str(active.ca)]
    before = len(active.rounds("long"))
    site = active.posy(
        "doctor", *where, "--key", "certificates/site-a.key", f"data={active.folder / 'data.npz'}"
    ).stdout
    assert "site-a.key is registered" in site
    assert "this machine's clock agrees" in site
    with pytest.raises(LaunchError, match=r"error +\S+/stranger\.key is not registered"):
        active.posy("doctor", *where, "--key", "certificates/stranger.key")
    active.until(lambda: active.complete_after("long", before + 1), "run-long", WAIT_SECONDS)


def test_a_renewed_certificate_is_loaded_during_a_run(active: Sites) -> None:
    files = Files(active.folder / "certificates")
    [before] = read_certificates(files.server)
    count = len(active.rounds("long"))
    active.documented("certificates certificates --renew")
    [after] = read_certificates(files.server)
    assert after != before
    for address in (active.control, active.fleet):
        active.until(lambda address=address: active.presents(address, after), "superlink", WAIT_SECONDS)
    assert "has changed; Posy restarts the SuperLink" in active.log("superlink")
    active.until(lambda: active.complete_after("long", count + 1), "run-long", WAIT_SECONDS)
    assert read_certificates(next(files.folder.glob("server.pem.*"))) == [before]
    assert "error" not in active.doctor()


def test_a_renewed_key_keeps_the_name_and_the_client(active: Sites) -> None:
    renewed = active.documented("certificates certificates site-a --renew")
    assert renewed.split() == ["certificates/site-a.key", "certificates/site-a.pub"]
    register = "register --renew certificates/site-a.pub"
    assert "both keys are valid" in active.documented(register)
    with pytest.raises(LaunchError, match="site-a keeps its old key"):
        active.documented(register)
    count = len(active.rounds("long"))
    active.until(lambda: active.complete_after("long", count), "run-long", WAIT_SECONDS)  # with the old key
    node = active.processes["site-a"]
    node.send_signal(signal.SIGINT)
    node.wait(WAIT_SECONDS)
    active.start_node(0)
    active.until(lambda: active.ready("site-a"), "site-a", WAIT_SECONDS)
    count = len(active.rounds("long"))
    active.until(lambda: active.complete_after("long", count + 1), "run-long", WAIT_SECONDS)
    # The run's log arrives after its records: the SuperLink passes it on in intervals.
    active.until(lambda: "site-a (client 0) is back" in active.log("run-long"), "run-long", WAIT_SECONDS)
    assert "has only its new key" in active.documented(register)
    [old] = (active.folder / "certificates").glob("site-a.key.*")
    where = ["--superlink", active.fleet, "--root-certificates", str(active.ca)]
    with pytest.raises(LaunchError, match=rf"{old.name} is not registered"):
        active.posy("doctor", *where, "--key", str(old))
    count = len(active.rounds("long"))
    active.until(lambda: active.complete_after("long", count), "run-long", WAIT_SECONDS)
    with (active.results("long") / "clients.csv").open() as file:
        sites = {row["partition"]: row["site"] for row in csv.DictReader(file)}
    assert sites == {"0": "site-a", "1": "site-b"}


def test_a_lost_state_is_restored_and_the_run_resumed(active: Sites) -> None:
    active.documented("backup state.backup")
    with pytest.raises(LaunchError, match=r"in use by a running SuperLink .*process [0-9, ]+"):
        active.documented("restore state.backup")
    superlink = active.processes["superlink"]
    processes = children(superlink.pid)
    superlink.kill()
    superlink.wait()
    active.until(lambda: not any(Path(f"/proc/{number}").exists() for number in processes), "superlink")
    active.processes["run-long"].kill()
    active.processes["run-long"].wait()
    shutil.rmtree(active.folder / "superlink")
    active.documented("restore state.backup")
    words = ["--certificates", "certificates", "--control", active.control, "--fleet", active.fleet]
    active.start("superlink", "superlink", *words)

    def online() -> bool:
        if "Starting Fleet API" not in active.log_since_start("superlink"):
            return False
        words = [line.split()[:2] for line in active.documented("status").splitlines()]
        return all([name, "online"] in words for name in NAMES)

    active.until(online, "superlink", WAIT_SECONDS)
    count = len(active.rounds("long"))
    assert "posy run --superlink localhost:8000 resume=long" in PAGE
    active.resume_run("long", f"num-server-rounds={count + 3}")
    rounds = active.rounds("long")
    assert [row["round"] for row in rounds] == list(range(1, count + 4))
    assert rounds[-1]["cohort"] == 2
    assert active.summary("long")["status"] == "completed"
