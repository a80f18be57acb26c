"""Many nodes by one command, and what can happen to them and to their lines, with real processes."""

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
MOST = 600.0
"""Seconds that nothing here takes, however busy the machine is."""
SUSPENDED_SECONDS = 60.0
ROUND_TIMEOUT = 15
SETTINGS = {"method": "fedavg", "dataset": "digits", "model": "linear", "device": "cpu", "stack": "loop", "seed": 3}


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    made = Deployment(tmp_path_factory.mktemp("many"), [*NAMES, "far-0", "far-1"])
    try:
        made.nodes("nodes", NAMES, "state-dir=state/{name}")
        wait(made, lambda: made.ready("nodes", NODES), "nodes")
        yield made
    finally:
        made.stop()


def wait(federation: Deployment, true: Callable[[], Any], what: str) -> None:
    """Wait until something is true; the process that makes it so must not end before."""

    def seen() -> bool:
        over = federation.processes[what].poll() is not None
        found = bool(true())
        assert found or not over, federation.log(what)[-5000:]
        return found

    federation.until(seen, what, MOST)


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
    # Each has a directory of its own for the states.
    assert {path.name for path in (federation.folder / "state").iterdir()} == set(NAMES)


# -- one long run in which much goes wrong ----------------------------------------------------------------


@pytest.fixture(scope="module")
def long(federation: Deployment) -> Deployment:
    settings = {
        **SETTINGS, "num-clients": NODES, "min-clients": 2, "num-server-rounds": 10_000, "round-timeout": ROUND_TIMEOUT,
    }  # fmt: skip
    federation.submit("long", *words(settings))
    wait(federation, lambda: len(federation.rounds("long")) > 2, "run-long")
    return federation


def wait_for_whole_round(federation: Deployment, nodes: int) -> None:
    """Wait for a new round in which so many clients take part and none is left out."""
    seen = len(federation.rounds("long"))
    wait(
        federation,
        lambda: any(row["cohort"] == nodes and not row["dropped"] for row in federation.rounds("long")[seen + 1 :]),
        "run-long",
    )


def test_second_node_with_a_used_key_is_rejected(long: Deployment) -> None:
    before = len(long.rounds("long"))
    long.start(
        "second", "supernode", "--superlink", long.fleet, "--root-certificates", str(long.ca),
        "--key", "certificates/node-0.key", "partition-id=0", f"num-partitions={NODES}",
    )  # fmt: skip
    assert long.ended("second", MOST) != 0
    assert "the SuperLink does not accept this node's key" in long.log("second")
    assert "SuperNode ID" not in long.log("second")
    wait_for_whole_round(long, NODES)
    assert not [row["dropped"] for row in long.rounds("long")[before:] if row["dropped"]]


def test_suspended_node_resumes(long: Deployment) -> None:
    processes = [long.forked(part)["node-1"] for part in ("node", "worker")]
    wait_for_whole_round(long, NODES)
    for process in processes:
        os.kill(process, signal.SIGSTOP)
    time.sleep(SUSPENDED_SECONDS)
    for process in processes:
        os.kill(process, signal.SIGCONT)
    wait_for_whole_round(long, NODES)
    assert [long.forked(part)["node-1"] for part in ("node", "worker")] == processes
    left_out = [drop for row in long.rounds("long") for drop in row["dropped"]]
    assert {drop["client"] for drop in left_out} <= {1}, left_out


def test_the_parent_reports_a_killed_node_and_keeps_the_others_running(long: Deployment) -> None:
    os.kill(long.forked("node")["node-3"], signal.SIGKILL)
    wait(long, lambda: "node node-3 was killed by signal 9; 5 of 6 still run" in long.log("nodes"), "nodes")
    wait(long, lambda: "node-3" not in long.forked("worker"), "nodes")
    wait_for_whole_round(long, NODES - 1)
    long.posy("stop", "long", *long.where)
    assert long.ended("run-long", MOST) == 1


# -- a line that is cut again and again -------------------------------------------------------------------


def test_run_completes_over_a_connection_cut_every_2_megabytes(federation: Deployment) -> None:
    """An array of 3.3 MB goes both ways."""
    random = np.random.default_rng(1)
    x = random.standard_normal((200, 3, 32, 32), dtype=np.float32)
    np.savez(federation.folder / "images.npz", x_train=x, y_train=random.integers(0, 10, 200))
    quality = Quality(delay=0.005, cut_after=2e6, failing=0.02)
    with Line(federation.fleet, federation.folder / "certificates", quality) as line:
        federation.nodes("far", ["far-0", "far-1"], fleet=line.address)
        wait(federation, lambda: federation.ready("far", 2), "far")
        federation.processes["nodes"].terminate()  # the clients are those of the other nodes
        federation.ended("nodes", MOST)
        settings = {
            **SETTINGS, "dataset": federation.folder / "images.npz", "model": "cnn", "num-clients": 2,
            "num-server-rounds": 3,
        }  # fmt: skip
        summary = federation.run("cut", *words(settings), timeout=MOST)
    counts = line.facts()
    assert (summary["status"], summary["rounds"], summary["dropped"]) == ("completed", 3, {})
    assert counts["cuts"] > (counts["up"] + counts["down"]) / 2e6 / 2
    assert counts["failed"] > counts["cuts"]
