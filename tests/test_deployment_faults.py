"""What goes wrong in a federation of real processes never ends a run or turns into a wrong number."""

import csv
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from benchmarks.local_federation import Deployment, children
from posy.storage import load_arrays

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("faults")]
NODES = 4
LIAR = Path(__file__).resolve().parent / "liar"


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    made = Deployment(tmp_path_factory.mktemp("faults"), [f"node-{i}" for i in range(NODES)])
    try:
        for i in range(NODES - 1):
            node(made, i)
        for i in range(NODES - 1):
            made.until(lambda name=f"node-{i}": made.ready(name), f"node-{i}")
        yield made
    finally:
        made.stop()


def node(deployment: Deployment, number: int, python_path: Path | None = None) -> None:
    words = [f"partition-id={number}", f"num-partitions={NODES}", f"state-dir=state-{number}"]
    deployment.node(f"node-{number}", *words, python_path=python_path)


def settings(rounds: int, *more: str, epochs: int = 1) -> list[str]:
    words = ["dataset=digits", "model=mlp", "device=cpu", "max-samples=600", "method=fedavg", "lr=0.01"]
    words += [f"num-clients={NODES}", f"num-server-rounds={rounds}", f"local-epochs={epochs}", *more]
    return list({word.partition("=")[0]: word for word in words}.values())


def trained(deployment: Deployment, run: str) -> list[int]:
    """Return how many clients each round's training reached (a dropped reply counts once for each phase)."""
    return [row["cohort"] - len({d["client"] for d in row["dropped"]}) for row in deployment.rounds(run)]


def test_a_run_begins_with_some_and_takes_up_a_node_that_joins(deployment: Deployment) -> None:
    process = deployment.submit("join", *settings(12, f"min-clients={NODES - 1}", "join-timeout=30"))
    deployment.until(lambda: len(deployment.rounds("join")) >= 2, "run-join", 120)
    node(deployment, NODES - 1)
    assert process.wait(240) == 0, deployment.log("run-join")
    cohorts = [row["cohort"] for row in deployment.rounds("join")]
    assert cohorts[:2] == [NODES - 1] * 2
    assert cohorts[-1] == NODES
    assert deployment.summary("join")["dropped"] == {}
    assert "node-3 (client 3) is new; 4 of 4 clients are there" in deployment.log("run-join")


def test_a_killed_worker_is_answered_for_and_replaced(deployment: Deployment) -> None:
    ready(deployment)
    process = deployment.submit("worker", *settings(5, epochs=40))
    deployment.until(lambda: len(deployment.rounds("worker")) >= 1, "run-worker", 120)
    before = len(deployment.rounds("worker"))
    os.kill(deployment.worker("node-1"), signal.SIGKILL)
    assert process.wait(240) == 0, deployment.log("run-worker")
    dropped = [(row["round"], drop) for row in deployment.rounds("worker") for drop in row["dropped"]]
    assert len(dropped) <= 1
    for number, drop in dropped:  # a worker with nothing to do at that moment is replaced without a loss
        assert number == before + 1
        assert drop["client"] == 1
        assert "the worker process died while it worked on this message (signal 9)" in drop["reason"]
    assert trained(deployment, "worker")[-1] == NODES


def test_a_worker_that_hangs_is_left_out_by_the_timeout(deployment: Deployment) -> None:
    ready(deployment)
    process = deployment.submit("hang", *settings(3, "round-timeout=8"))
    deployment.until(lambda: len(deployment.rounds("hang")) >= 1, "run-hang", 120)
    worker = deployment.worker("node-2")
    os.kill(worker, signal.SIGSTOP)
    assert process.wait(240) == 0, deployment.log("run-hang")
    summary = deployment.summary("hang")
    assert set(summary["dropped"]) == {"no reply within round-timeout = 8 s"}
    assert trained(deployment, "hang")[-1] == NODES - 1
    assert "node-2 (client 2) is left out: no reply within round-timeout = 8 s" in deployment.log("run-hang")
    os.kill(worker, signal.SIGCONT)


def test_a_node_killed_while_it_trains_is_left_out(deployment: Deployment) -> None:
    ready(deployment)
    process = deployment.submit("killed", *settings(4, "round-timeout=60", epochs=60))
    deployment.until(lambda: len(deployment.rounds("killed")) >= 1, "run-killed", 120)
    deployment.kill("node-3")
    assert process.wait(300) == 0, deployment.log("run-killed")
    summary = deployment.summary("killed")
    assert (summary["status"], summary["rounds"]) == ("completed", 4)
    rounds = deployment.rounds("killed")
    assert {drop["client"] for row in rounds for drop in row["dropped"]} == {3}
    assert sum(summary["dropped"].values()) == sum(len(row["dropped"]) for row in rounds) >= 1
    assert "node-3 (client 3) is left out: " in deployment.log("run-killed")
    assert f"{NODES - 1} of {NODES} clients" in deployment.log("run-killed")


def test_a_node_comes_back_after_a_restart_with_its_personal_state(deployment: Deployment) -> None:
    ready(deployment)
    words = [f"min-clients={NODES - 1}", "join-timeout=30", "round-timeout=20", "method=fedrep", "lr=0.1"]
    process = deployment.submit("back", *settings(300, *words, epochs=3))
    deployment.until(lambda: len(deployment.rounds("back")) >= 8, "run-back", 180)
    deployment.kill("node-3")
    deployment.until(lambda: short(deployment), "run-back", 120)

    def returned() -> bool:
        """Start the node until its key is accepted: the SuperLink must first see that it was gone."""
        if deployment.processes["node-3"].poll() is not None:
            node(deployment, 3)
        return "node-3 (client 3) is back; 4 of 4 clients are there" in deployment.log("run-back")

    deployment.until(returned, "run-back", 120)
    seen = len(deployment.rounds("back"))
    deployment.until(lambda: len(deployment.rounds("back")) > seen + 2, "run-back", 60)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130
    assert deployment.rounds("back")[-1]["cohort"] == NODES
    with (deployment.results("back") / "clients.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["partition"] == "3"]
    first = next(row for row in rows if int(row["round"]) > short(deployment)[-1] and row["served_accuracy"])
    # The shared body with a new head would answer like a coin with ten sides.
    assert float(first["served_accuracy"]) > 0.5


def test_a_killed_server_process_is_resumed(deployment: Deployment) -> None:
    ready(deployment)
    words = settings(8, "method=fedrep", "checkpoint-every=2", "stack=loop")
    assert deployment.run("whole", *words)["dropped"] == {}
    process = deployment.submit("cut", *words)
    deployment.until(lambda: len(deployment.rounds("cut")) >= 3, "run-cut", 120)
    kept = children(deployment.processes["superlink"].pid)
    [executor] = [number for number, command in kept.items() if "flower-superexec" in command]
    [server] = [number for number, command in children(executor).items() if "flwr-serverapp" in command]
    os.kill(server, signal.SIGKILL)
    process.send_signal(signal.SIGINT)
    process.wait(60)
    assert deployment.summary("cut")["status"] == "running"
    # What the run that was stopped has left on the nodes does not hold up the next one.
    again = deployment.submit("again", "resume=cut")
    assert again.wait(400) == 0, deployment.log("run-again")
    summary, whole = deployment.summary("cut"), deployment.summary("whole")
    assert (summary["status"], summary["rounds"], summary["dropped"]) == ("completed", 8, {})
    assert summary["served"] == whole["served"]
    one, other = (load_arrays(deployment.results(name) / "models/server.safetensors") for name in ("cut", "whole"))
    for key, array in other.items():
        np.testing.assert_array_equal(one[key], array)


def test_lies_of_a_node_are_dropped(deployment: Deployment) -> None:
    ready(deployment)
    deployment.kill("node-1")

    def lying() -> bool:
        """Start the liar until its key is accepted: the SuperLink must first see that the other is gone."""
        if deployment.processes["node-1"].poll() is not None:
            node(deployment, 1, python_path=LIAR)
        return deployment.ready("node-1")

    deployment.until(lying, "node-1", 120)
    summary = deployment.run("lies", *settings(8))
    assert (summary["status"], summary["rounds"]) == ("completed", 8)
    dropped = [row["dropped"] for row in deployment.rounds("lies")]
    assert [[drop["client"] for drop in drops] for drops in dropped] == [[1]] * 7 + [[]]
    reasons = ["NaN or Inf", "NaN or Inf", "arrays of shapes [(17225,)]", "malformed reply: KeyError('train-loss')"]
    reasons += ["num-examples = 0", "num-examples = -1", "num-examples = 1000000000000"]
    for [drop], reason in zip(dropped[:-1], reasons, strict=True):
        assert reason in drop["reason"]
    assert sum(summary["dropped"].values()) == len(reasons)
    assert deployment.log("run-lies").count("node-1 (client 1) is left out: ") == len(reasons)
    assert np.isfinite(load_arrays(deployment.results("lies") / "models/server.safetensors")["model"]).all()
    deployment.kill("node-1")


def test_a_run_outlives_its_superlink(deployment: Deployment) -> None:
    ready(deployment)
    process = deployment.submit("outage", *settings(8))
    deployment.until(lambda: len(deployment.rounds("outage")) >= 3, "run-outage", 120)
    found = children(deployment.processes["superlink"].pid)
    [superlink] = [pid for pid, command in found.items() if "flower-superlink" in command]
    os.kill(superlink, signal.SIGKILL)
    assert process.wait(400) == 0, deployment.log("run-outage") + deployment.log("superlink")[-5000:]
    summary = deployment.summary("outage")
    assert (summary["status"], summary["rounds"]) == ("completed", 8)
    assert [row["round"] for row in deployment.rounds("outage")] == list(range(1, 9))
    assert trained(deployment, "outage")[-1] == NODES
    assert "flower-superlink died (-9) and is started again" in deployment.log("superlink")


def test_a_superlink_that_is_ended_leaves_no_run_behind(deployment: Deployment) -> None:
    ready(deployment)
    process = deployment.submit("ended", *settings(3000))
    deployment.until(lambda: len(deployment.rounds("ended")) >= 3, "run-ended", 120)
    superlink = deployment.processes["superlink"]
    [executor] = [number for number, command in children(superlink.pid).items() if "flower-superexec" in command]
    [server] = [number for number, command in children(executor).items() if "flwr-serverapp" in command]
    superlink.terminate()
    assert superlink.wait(60) == 130
    assert not Path(f"/proc/{server}").exists()
    assert deployment.summary("ended")["status"] == "stopped"
    assert deployment.summary("ended")["rounds"] == len(deployment.rounds("ended"))
    process.kill()
    process.wait()


def short(deployment: Deployment) -> list[int]:
    """Return the rounds that node 3 did not take part in."""
    return [row["round"] for row in deployment.rounds("back") if row["cohort"] < NODES or row["dropped"]]


def ready(deployment: Deployment) -> None:
    """Bring all nodes up, whatever the test before has done to them."""

    def alive() -> bool:
        for number in range(NODES):
            process = deployment.processes.get(f"node-{number}")
            if process is None or process.poll() is not None:
                node(deployment, number)
        return all(deployment.ready(f"node-{i}") for i in range(NODES))

    deployment.until(alive, "node-3", 120)
