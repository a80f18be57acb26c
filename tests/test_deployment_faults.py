"""What goes wrong in a federation of real processes never ends a run or turns into a wrong number."""

import os
import signal
from collections.abc import Iterator

import pytest

from posy.config import defaults
from posy.deploy.local import Deployment, children

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("flower")]
NODES = 4
joins = pytest.mark.skipif("min-clients" not in defaults(), reason="nodes are found before the first round only")


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


def node(deployment: Deployment, number: int) -> None:
    deployment.node(f"node-{number}", f"partition-id={number}", f"num-partitions={NODES}")


def settings(rounds: int, *more: str, epochs: int = 1) -> list[str]:
    words = ["dataset=digits", "model=mlp", "device=cpu", "max-samples=600", "method=fedavg", "lr=0.01"]
    return [*words, f"num-clients={NODES}", f"num-server-rounds={rounds}", f"local-epochs={epochs}", *more]


def trained(deployment: Deployment, run: str) -> list[int]:
    """Return how many clients each round's training reached (a dropped reply counts once for each phase)."""
    return [row["cohort"] - len({d["client"] for d in row["dropped"]}) for row in deployment.rounds(run)]


@joins
def test_a_run_begins_with_some_and_takes_up_a_node_that_joins(deployment: Deployment) -> None:
    process = deployment.submit("join", *settings(12, f"min-clients={NODES - 1}", "join-timeout=10"))
    deployment.until(lambda: len(deployment.rounds("join")) >= 2, "run-join", 120)
    node(deployment, NODES - 1)
    assert process.wait(240) == 0, deployment.log("run-join")
    cohorts = [row["cohort"] for row in deployment.rounds("join")]
    assert cohorts[:2] == [NODES - 1] * 2
    assert cohorts[-1] == NODES
    assert deployment.summary("join")["dropped"] == {}
    assert f"client {NODES - 1} joins" in deployment.log("run-join")


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
    assert set(summary["dropped"]) == {"no reply before round-timeout"}
    assert trained(deployment, "hang")[-1] == NODES - 1
    assert "no reply before round-timeout" in deployment.log("run-hang")
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
    assert deployment.log("run-killed").count("dropped 1 x") >= 1


@joins
def test_a_node_comes_back_after_a_restart(deployment: Deployment) -> None:
    if deployment.processes["node-3"].poll() is None:
        deployment.kill("node-3")
    process = deployment.submit(
        "back", *settings(200, f"min-clients={NODES - 1}", "join-timeout=10", "round-timeout=20")
    )
    deployment.until(lambda: len(deployment.rounds("back")) >= 2, "run-back", 180)

    def returned() -> bool:
        """Start the node until its key is accepted: the SuperLink must first see that it was gone."""
        if deployment.processes["node-3"].poll() is not None:
            node(deployment, 3)
        return deployment.log("run-back").count("client 3 ") > 0

    deployment.until(returned, "run-back", 120)
    seen = len(deployment.rounds("back"))
    deployment.until(lambda: len(deployment.rounds("back")) > seen + 2, "run-back", 60)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130
    assert deployment.rounds("back")[-1]["cohort"] == NODES


def test_a_run_outlives_its_superlink(deployment: Deployment) -> None:
    ready(deployment)
    process = deployment.submit("outage", *settings(12))
    deployment.until(lambda: len(deployment.rounds("outage")) >= 3, "run-outage", 120)
    found = children(deployment.processes["superlink"].pid)
    [superlink] = [pid for pid, command in found.items() if "flower-superlink" in command]
    os.kill(superlink, signal.SIGKILL)
    assert process.wait(300) == 0, deployment.log("run-outage") + deployment.log("superlink")[-5000:]
    summary = deployment.summary("outage")
    assert (summary["status"], summary["rounds"]) == ("completed", 12)
    assert [row["round"] for row in deployment.rounds("outage")] == list(range(1, 13))
    assert trained(deployment, "outage")[-1] == NODES
    assert "flower-superlink died (-9) and is started again" in deployment.log("superlink")


def ready(deployment: Deployment) -> None:
    """Bring all nodes up, whatever the test before has done to them."""

    def alive() -> bool:
        for number in range(NODES):
            process = deployment.processes.get(f"node-{number}")
            if process is None or process.poll() is not None:
                node(deployment, number)
        return all(deployment.ready(f"node-{i}") for i in range(NODES))

    deployment.until(alive, "node-3", 120)
