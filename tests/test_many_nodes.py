"""Many nodes of one command, and faults of the nodes and their connections, with real processes."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_real_processes import words

import posy
from benchmarks.line import Line, Quality
from benchmarks.local_federation import Deployment
from posy.storage import load_arrays

pytestmark = [pytest.mark.federation, pytest.mark.xdist_group("many")]

NODES = 6
NAMES = [f"node-{i}" for i in range(NODES)]
LONGEST_WAIT = 600.0
"""Longest wait in seconds, even on a busy machine."""
SUSPENDED_SECONDS = 60.0
ROUND_TIMEOUT = 15
SETTINGS = {"method": "fedavg", "dataset": "digits", "model": "linear", "device": "cpu", "stack": "loop", "seed": 3}


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    deployment = Deployment(tmp_path_factory.mktemp("many"), [*NAMES, "far-0", "far-1"])
    try:
        deployment.nodes("nodes", NAMES, "state-dir=state/{name}")
        wait(deployment, lambda: deployment.ready("nodes", NODES), "nodes")
        yield deployment
    finally:
        deployment.stop()


def wait(federation: Deployment, condition: Callable[[], Any], process: str) -> None:
    """Wait until a condition holds. Fail if the process ends earlier."""

    def holds() -> bool:
        ended = federation.processes[process].poll() is not None
        result = bool(condition())
        assert result or not ended, federation.log(process)[-5000:]
        return result

    federation.until(holds, process, LONGEST_WAIT)


def test_nodes_of_one_command_match_a_single_process(federation: Deployment, tmp_path: Path) -> None:
    settings = {**SETTINGS, "num-clients": NODES, "num-server-rounds": 3}
    summary = federation.run("same", *words(settings))
    reference = posy.run(**{k.replace("-", "_"): v for k, v in settings.items()}, output_dir=str(tmp_path))
    assert summary["dropped"] == {}
    assert summary["served"] == reference.summary["served"]
    ours, expected = (
        load_arrays(folder / "models/server.safetensors") for folder in (federation.results("same"), reference.path)
    )
    assert ours.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(ours[name], array, err_msg=name)
    # Each node has its own state directory.
    assert {path.name for path in (federation.folder / "state").iterdir()} == set(NAMES)


# -- faults during one long run ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def long_run(federation: Deployment) -> Deployment:
    settings = {
        **SETTINGS, "num-clients": NODES, "min-clients": 2, "num-server-rounds": 10_000, "round-timeout": ROUND_TIMEOUT,
    }  # fmt: skip
    federation.submit("long", *words(settings))
    wait(federation, lambda: len(federation.rounds("long")) > 2, "run-long")
    return federation


def wait_for_complete_round(federation: Deployment, nodes: int) -> None:
    """Wait for a new round in which ``nodes`` clients train and none is dropped."""
    previous = len(federation.rounds("long"))
    wait(
        federation,
        lambda: any(row["cohort"] == nodes and not row["dropped"] for row in federation.rounds("long")[previous + 1 :]),
        "run-long",
    )


def test_second_node_with_a_used_key_is_rejected(long_run: Deployment) -> None:
    before = len(long_run.rounds("long"))
    long_run.start(
        "second", "supernode", "--superlink", long_run.fleet, "--root-certificates", str(long_run.ca),
        "--key", "certificates/node-0.key", "partition-id=0", f"num-partitions={NODES}",
    )  # fmt: skip
    assert long_run.ended("second", LONGEST_WAIT) != 0
    assert "does not accept this node's key" in long_run.log("second")
    assert "SuperNode ID" not in long_run.log("second")
    wait_for_complete_round(long_run, NODES)
    assert not [row["dropped"] for row in long_run.rounds("long")[before:] if row["dropped"]]


def test_suspended_node_resumes(long_run: Deployment) -> None:
    processes = [long_run.forked(part)["node-1"] for part in ("node", "worker")]
    wait_for_complete_round(long_run, NODES)
    for process in processes:
        os.kill(process, signal.SIGSTOP)
    time.sleep(SUSPENDED_SECONDS)
    for process in processes:
        os.kill(process, signal.SIGCONT)
    wait_for_complete_round(long_run, NODES)
    assert [long_run.forked(part)["node-1"] for part in ("node", "worker")] == processes
    dropped = [drop for row in long_run.rounds("long") for drop in row["dropped"]]
    assert {drop["client"] for drop in dropped} <= {1}, dropped


def test_the_parent_reports_a_killed_node_and_keeps_the_others_running(long_run: Deployment) -> None:
    os.kill(long_run.forked("node")["node-3"], signal.SIGKILL)
    wait(long_run, lambda: "node-3 was killed by signal 9; 5 of 6" in long_run.log("nodes"), "nodes")
    wait(long_run, lambda: "node-3" not in long_run.forked("worker"), "nodes")
    wait_for_complete_round(long_run, NODES - 1)
    long_run.posy("stop", "long", *long_run.where)
    assert long_run.ended("run-long", LONGEST_WAIT) == 1


# -- an unreliable connection -----------------------------------------------------------------------------


def test_run_completes_over_a_connection_cut_every_2_megabytes(federation: Deployment) -> None:
    """An array of 3.3 MB is sent in both directions."""
    random = np.random.default_rng(1)
    x = random.standard_normal((200, 3, 32, 32), dtype=np.float32)
    np.savez(federation.folder / "images.npz", x_train=x, y_train=random.integers(0, 10, 200))
    quality = Quality(delay=0.005, cut_after=2e6, failing=0.02)
    with Line(federation.fleet, federation.folder / "certificates", quality) as line:
        federation.nodes("far", ["far-0", "far-1"], fleet=line.address)
        wait(federation, lambda: federation.ready("far", 2), "far")
        federation.processes["nodes"].terminate()  # only the nodes of this test host clients
        federation.ended("nodes", LONGEST_WAIT)
        settings = {
            **SETTINGS, "dataset": federation.folder / "images.npz", "model": "cnn", "num-clients": 2,
            "num-server-rounds": 3,
        }  # fmt: skip
        summary = federation.run("cut", *words(settings), timeout=LONGEST_WAIT)
    counts = line.facts()
    assert (summary["status"], summary["rounds"], summary["dropped"]) == ("completed", 3, {})
    assert counts["cuts"] > (counts["up"] + counts["down"]) / 2e6 / 2
    assert counts["failed"] > counts["cuts"]
