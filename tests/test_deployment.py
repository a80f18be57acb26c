"""A federation of real processes over gRPC, with TLS and node authentication, gives what a simulation gives."""

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from benchmarks.local_federation import Deployment
from posy.commands.deploy.certificates import Files, make_certificates
from posy.commands.deploy.commands import node_config
from posy.commands.launch import LaunchError
from posy.settings import SettingsError
from posy.storage import load_arrays

NODES = 5
# Small, and the same in both, whatever the defaults are.
DIGITS = ("dataset=digits", "model=mlp", "local-epochs=1", "device=cpu", "stack=loop", "max-samples=600")
METHODS = ("fedfew", "cwfedavg", "fedacs", "feddrm", "ppfe")

processes = pytest.mark.xdist_group("flower")


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    names = [*(f"node-{i}" for i in range(NODES)), "patient"]
    made = Deployment(tmp_path_factory.mktemp("deployment"), names)
    try:
        for i in range(NODES):
            made.node(f"node-{i}", f"partition-id={i}", f"num-partitions={NODES}", f"state-dir=state-{i}")
        for i in range(NODES):
            made.until(lambda name=f"node-{i}": made.ready(name), f"node-{i}")
        yield made
    finally:
        made.stop()


@pytest.mark.slow
@processes
@pytest.mark.parametrize("method", METHODS)
def test_grpc_gives_the_models_of_a_simulation(method: str, deployment: Deployment) -> None:
    words = [f"method={method}", f"num-clients={NODES}", "num-server-rounds=2", "lr=0.05", "seed=7"]
    words += ["ppfe-stages=2", "ppfe-stage-rounds=1,1"] if method == "ppfe" else []
    summary = deployment.run(method, *DIGITS, *words)
    assert (summary["status"], summary["rounds"], summary["dropped"]) == ("completed", 2, {})
    deployment.posy("run", *DIGITS, *words, "output-dir=runs", f"run-name={method}-simulated")
    here, there = deployment.results(method) / "models", deployment.results(f"{method}-simulated") / "models"
    own = {path.name: path for path in deployment.folder.glob(f"state-*/{method}-*/models/*")}
    files = {path.name: path for path in here.iterdir()}
    assert list(files) == ["server.safetensors"]  # personal models stay on their nodes
    assert sorted(own) == [f"client-{i}.safetensors" for i in range(NODES)]
    files |= own
    assert sorted(files) == sorted(path.name for path in there.iterdir())
    for name, file in files.items():
        ours, simulated = load_arrays(file), load_arrays(there / name)
        assert ours.keys() == simulated.keys()
        for key, array in simulated.items():
            np.testing.assert_allclose(ours[key], array, rtol=1e-6, atol=1e-9, err_msg=f"{name}: {key}")
    assert summary["served"] == deployment.summary(f"{method}-simulated")["served"]


@pytest.mark.slow
@processes
def test_keys_are_registered_once_and_no_two_under_one_name(deployment: Deployment, tmp_path: Path) -> None:
    where = ["--superlink", deployment.control, "--root-certificates", str(deployment.ca)]
    done = deployment.posy("register", "certificates/node-0.pub", "certificates/node-1.pub", *where)
    assert done.stdout == "node-0 is registered already\nnode-1 is registered already\n"
    assert "$" not in done.stderr  # what names no SuperLink cannot be typed
    make_certificates(tmp_path, [], ["node-0"], 1)
    (tmp_path / "other.pub").write_bytes((deployment.folder / "certificates/node-0.pub").read_bytes())
    assert "already, as node-0" in deployment.posy("register", str(tmp_path / "other.pub"), *where).stdout
    with pytest.raises(LaunchError, match="status 1: posy: node-0 is not registered: another key has this name"):
        deployment.posy("register", str(tmp_path / "node-0.pub"), *where)


@pytest.mark.slow
@processes
def test_status_log_and_stop(deployment: Deployment) -> None:
    where = ["--superlink", deployment.control, "--root-certificates", str(deployment.ca)]
    words = ["method=fedavg", f"num-clients={NODES}", "num-server-rounds=10000"]
    process = deployment.submit("long", *DIGITS, *words)
    deployment.until(lambda: deployment.rounds("long"), "run-long")

    def status() -> list[str]:
        return deployment.posy("status", *where).stdout.splitlines()

    [line] = [line for line in status() if " long " in line]
    number = line.split()[0]
    assert line.split()[1:4] == ["long", "fedavg", "running"]
    assert len([line for line in status() if line.split()[1:2] == ["online"]]) == NODES
    done = deployment.posy("stop", "long", *where)
    assert "is stopped" in done.stdout
    assert "resume=long output-dir=runs" in done.stdout
    assert process.wait(60) == 1
    assert "has ended as stopped" in deployment.log("run-long")
    assert [line.split()[3] for line in status() if line.split()[:1] == [number]] == ["stopped"]
    for word, named in ((number, "has ended already"), ("nosuch", "'nosuch': no such run at 127.0.0.1")):
        with pytest.raises(LaunchError, match=named):
            deployment.posy("stop", word, *where)
    with pytest.raises(LaunchError, match="has ended as stopped") as error:
        deployment.posy("log", "long", *where)
    assert "Results of this run: " in str(error.value)
    assert "round     1/10000" in str(error.value)
    assert "INFO" not in str(error.value)


@pytest.mark.slow
@processes
def test_nodes_keep_one_worker_for_all_runs(deployment: Deployment) -> None:
    for i in range(NODES):
        assert deployment.log(f"node-{i}").count("is ready") == 1


@pytest.mark.slow
@processes
def test_a_key_that_is_not_registered_does_not_take_part(deployment: Deployment) -> None:
    process = deployment.node("stranger", "partition-id=0", f"num-partitions={NODES}")
    assert process.wait(60) != 0
    assert "SuperNode ID" not in deployment.log("stranger")


@pytest.mark.slow
@processes
def test_another_authority_is_not_trusted(deployment: Deployment, tmp_path: Path) -> None:
    make_certificates(tmp_path, [], ["other"], 1)
    words = ["--superlink", deployment.fleet, "--root-certificates", str(tmp_path / "ca.pem")]
    process = deployment.start("distrust", "supernode", *words, "--key", "certificates/node-0.key")
    assert process.wait(60) != 0
    assert "SuperNode ID" not in deployment.log("distrust")


@pytest.mark.slow
@processes
def test_worker_and_node_end_together(deployment: Deployment) -> None:
    process = deployment.processes["node-0"]
    os.kill(deployment.worker("node-0"), signal.SIGKILL)
    deployment.until(lambda: deployment.log("node-0").count("is ready") == 2, "node-0")
    assert "a new one is started" in deployment.log("node-0")
    assert process.poll() is None
    worker = deployment.worker("node-0")
    deployment.kill("node-0")
    deployment.until(lambda: not Path(f"/proc/{worker}").exists(), "the worker's end", 10.0)


@pytest.mark.slow
@processes
def test_a_node_ends_when_its_superlink_is_gone_for_too_long(deployment: Deployment) -> None:
    """Last of all but one: the SuperLink ends, and one node has been told how long to wait for it."""
    process = deployment.node("patient", "--wait", "4", "partition-id=4", f"num-partitions={NODES}")
    deployment.until(lambda: deployment.ready("patient"), "patient")
    worker = deployment.worker("patient")
    superlink = deployment.processes["superlink"]
    superlink.terminate()
    superlink.wait(30)
    assert process.wait(30) == 1
    assert "the SuperLink has been out of reach for 4 s" in deployment.log("patient")
    deployment.until(lambda: not Path(f"/proc/{worker}").exists(), "the worker's end", 10.0)
    assert deployment.processes["node-2"].poll() is None  # it was not told so


@pytest.mark.slow
@processes
def test_printed_commands_can_be_typed(deployment: Deployment) -> None:
    """Last of all: the SuperLink and a node have ended, and are started by hand with what was printed."""
    printed = [line[2:] for line in deployment.log("superlink").splitlines() if line.startswith("$ ")]
    printed += [line[2:] for line in deployment.log("patient").splitlines() if line.startswith("$ ")]
    superlink, superexec, list_runs, node = printed

    def typed(name: str, line: str) -> "subprocess.Popen[bytes]":
        with (deployment.folder / f"{name}.log").open("wb") as log:
            deployment.processes[name] = subprocess.Popen(
                ["sh", "-c", f"exec env {line}"],
                cwd=deployment.folder,
                env=deployment.environment(),
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return deployment.processes[name]

    typed("typed-superlink", superlink)
    deployment.until(lambda: "Starting Fleet API" in deployment.log("typed-superlink"), "typed-superlink")
    typed("typed-superexec", superexec)
    assert typed("typed-list", list_runs).wait(30) == 0
    assert "Listing all runs" in deployment.log("typed-list")

    def connected() -> bool:
        """Type the node's command until its key is accepted: the SuperLink must first see that it was gone."""
        process = deployment.processes.get("typed-node")
        if process is None or process.poll() is not None:
            typed("typed-node", node)
        return "SuperNode ID" in deployment.log("typed-node")

    deployment.until(connected, "typed-node")
    deployment.until(lambda: "is ready" in deployment.log("typed-node"), "typed-node")


# -- certificates and node config, without processes ---------------------------------------------------------


def test_certificates_are_made_once(tmp_path: Path) -> None:
    files = Files(tmp_path / "keys")
    written = make_certificates(files.folder, ["superlink"], ["a"], 30)
    assert {path.name for path in written} == {"ca.key", "ca.pem", "server.key", "server.pem", "a.key", "a.pub"}
    for path in (files.ca_key, files.server_key, files.node_key("a")):
        assert path.stat().st_mode & 0o077 == 0
    before = {path.name: path.read_bytes() for path in written}
    assert [path.name for path in make_certificates(files.folder, [], ["a", "b"], 30)] == ["b.key", "b.pub"]
    assert {name: (files.folder / name).read_bytes() for name in before} == before


def test_half_a_pair_is_refused(tmp_path: Path) -> None:
    make_certificates(tmp_path, [], ["a"], 30)
    (tmp_path / "server.key").unlink()
    with pytest.raises(SettingsError, match=r"server\.pem is there without its other half"):
        make_certificates(tmp_path, [], [], 30)
    (tmp_path / "a.key").unlink()  # the authority's machine need not keep the nodes' private keys
    (tmp_path / "server.pem").unlink()
    assert [path.name for path in make_certificates(tmp_path, [], ["a"], 30)] == ["server.key", "server.pem"]
    with pytest.raises(SettingsError, match="no name for a node"):
        make_certificates(tmp_path, [], ["../a"], 30)


def test_certificates_of_other_hosts_and_what_is_none_are_refused(tmp_path: Path) -> None:
    for host in ("", "a b", "ä.example", "server:9092"):
        with pytest.raises(SettingsError, match=r"--host .*: it must be a name such as server\.example\.org"):
            make_certificates(tmp_path / "none", [host], [], 1)
    assert not (tmp_path / "none").exists()
    make_certificates(tmp_path, ["one.example", "10.0.0.1"], [], 1)
    assert make_certificates(tmp_path, ["one.example", "10.0.0.1"], [], 1) == []
    with pytest.raises(
        SettingsError, match=r"server\.pem is there and is not for 10\.0\.0\.2, two\.example; delete it"
    ):
        make_certificates(tmp_path, ["two.example", "10.0.0.2", "one.example"], [], 1)
    for name in ("server.pem", "server.key"):
        (tmp_path / name).unlink()
    (tmp_path / "ca.key").write_text("no key")
    with pytest.raises(SettingsError, match="holds what is no certificate or key"):
        make_certificates(tmp_path, [], [], 1)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["partition-id=0", "num-partitions=5"], "partition-id=0 num-partitions=5"),
        (["data=/srv/site a", 'name="site-a"'], 'data="/srv/site a" name="site-a"'),
        (["on=true", "x=1.5", "day=2026-01-01"], 'on=true x=1.5 day="2026-01-01"'),
    ],
)
def test_node_config_is_handed_on(words: list[str], told: str) -> None:
    from flwr.common.config import parse_config_args

    assert node_config(words) == told
    parsed = parse_config_args([node_config(words)])
    assert [str(value) for value in parsed.values()] == [
        str(word.partition("=")[2]).strip('"').replace("true", "True") for word in words
    ]


def test_node_config_must_be_key_and_value() -> None:
    with pytest.raises(SettingsError, match="'partition-id': node config is given as key=value"):
        node_config(["partition-id"])
