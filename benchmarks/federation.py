"""What a round over gRPC costs beyond the training, and whether memory grows over many rounds.

Real processes on this machine: a SuperLink with TLS, node authentication and its database, and SuperNodes.
It trains the 4-layer CNN (0.6 M parameters) on CIFAR-10 with FedAvg. The overhead of a round is its
time less that of the same rounds inside one process, spread over as many processes as there are cores; the cost
of moving the same bytes once is measured over a socket of this machine. ``--volatile`` uses a SuperLink that
keeps its state in memory instead of its database. ``--memory`` trains a linear model on digits and compares the
memory (RSS) of the SuperLink and of the nodes with their workers after round 5 and after the last. Prints JSON.
Targets: less than 3 s a round beyond the training for 5 nodes on 2 cores, and memory that grows by at most 10 %.
"""

import contextlib
import io
import json
import socket
import statistics
import tempfile
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import typer

from benchmarks.local_federation import Deployment, children
from benchmarks.measure import machine
from posy.client_app.workspace import cores
from posy.commands.launch import run_in_process

WARM_ROUNDS = 2
"""Rounds left out of the medians: they load code and data."""
SETTLED_ROUND = 5
CHUNK = 1 << 20


def main(
    data_dir: Path = Path("datasets"),
    nodes: int = 0,
    rounds: int = 0,
    volatile: bool = typer.Option(False, help="a SuperLink without a database"),
    memory: bool = typer.Option(False, help="growth of memory instead of time"),
) -> None:
    """Start a federation, measure, and print JSON."""
    nodes, rounds = nodes or (20 if memory else 5), rounds or (30 if memory else 8)
    with tempfile.TemporaryDirectory(prefix="posy-benchmark-", ignore_cleanup_errors=True) as folder:
        options = ["--volatile"] if volatile else []
        deployment = Deployment(Path(folder), [f"node-{i}" for i in range(nodes)], *options)
        try:
            for i in range(nodes):
                deployment.node(f"node-{i}", f"partition-id={i}", f"num-partitions={nodes}")
                if i % 4 == 3 or i == nodes - 1:  # a few start at a time
                    deployment.until(partial(deployment.ready, f"node-{i}"), f"node-{i}", 300.0)
            found = growth(deployment, nodes, rounds) if memory else speed(deployment, nodes, rounds, data_dir)
        finally:
            deployment.stop()
    kinds = {"nodes": "warm", "superlink": "in memory" if volatile else "database"}
    print(json.dumps({**found, **kinds, "machine": machine()}, indent=2))


def speed(deployment: Deployment, nodes: int, rounds: int, data_dir: Path) -> dict[str, Any]:
    """Return seconds of a round over gRPC, of its training, of the bytes alone, and what is left."""
    config: dict[str, Any] = {
        "method": "fedavg", "dataset": "cifar10", "data-dir": str(data_dir.absolute()), "max-samples": 2000,
        "model": "cnn", "batch-size": 50, "local-epochs": 1, "num-clients": nodes, "num-server-rounds": rounds,
        "lr": 0.01, "device": "cpu",
    }  # fmt: skip
    words = [f"{key}={value}" for key, value in config.items()]
    deployment.run("speed", *words, "save-models=false", timeout=1800.0)
    own = {"save-models": False, "output-dir": str(deployment.folder / "runs"), "run-name": "plain"}
    with contextlib.redirect_stdout(io.StringIO()):
        run_in_process(config | own, "this benchmark")
    over_grpc, one_process = (
        [sum(row["seconds"].values()) for row in deployment.rounds(name)[WARM_ROUNDS:]] for name in ("speed", "plain")
    )
    last = deployment.rounds("speed")[-1]
    round_seconds, training = statistics.median(over_grpc), statistics.median(one_process) / min(nodes, cores())
    messages = 2 * nodes  # one for the training of each client, one for its evaluation
    return {
        "round-seconds": round(round_seconds, 3),
        "round-seconds-range": [round(min(over_grpc), 3), round(max(over_grpc), 3)],
        "training-seconds": round(training, 3),
        "overhead-seconds": round(round_seconds - training, 3),
        "overhead-seconds-per-message": round((round_seconds - training) / messages, 3),
        "bytes": last["bytes_up"] + last["bytes_down"],
        "moving-the-bytes-once-seconds": round(moving(last["bytes_up"] + last["bytes_down"]), 3),
        "dropped": deployment.summary("speed")["dropped"],
    }


def moving(size: int) -> float:
    """Return the seconds that so many bytes take through a socket of this machine."""
    data = bytes(CHUNK)
    with socket.create_server(("127.0.0.1", 0)) as server:

        def receive() -> None:
            connection, _ = server.accept()
            with connection:
                while connection.recv(CHUNK):
                    pass

        receiver = threading.Thread(target=receive)
        receiver.start()
        started = time.perf_counter()
        with socket.create_connection(server.getsockname()) as sender:
            for begin in range(0, size, CHUNK):
                sender.sendall(data[: min(CHUNK, size - begin)])
        receiver.join()
        return time.perf_counter() - started


def growth(deployment: Deployment, nodes: int, rounds: int) -> dict[str, Any]:
    """Return the memory of the SuperLink and the nodes after round 5 and after the last, and its growth."""
    words = ["method=fedavg", "dataset=digits", "model=linear", "device=cpu", f"num-clients={nodes}"]
    # One round more than is looked at: the processes are measured while the run goes on.
    process = deployment.submit("memory", *words, f"num-server-rounds={rounds + 1}", "save-models=false")
    seen = {}
    for number in (SETTLED_ROUND, rounds):
        while len(deployment.rounds("memory")) < number:
            if process.poll() is not None:
                raise SystemExit(f"the run ended early: {deployment.log('run-memory')}")
            time.sleep(0.05)
        seen[number] = resident(deployment)
    process.wait()
    first, last = seen[SETTLED_ROUND], seen[rounds]
    percent = {name: round(100 * (last[name] / first[name] - 1), 2) for name in first}
    of_nodes = [value for name, value in percent.items() if name.startswith("node")]
    return {
        "rounds": rounds,
        "superlink-MiB": [first["superlink"], last["superlink"]],
        "superlink-growth-percent": percent["superlink"],
        "nodes-MiB": [round(statistics.mean(m for n, m in seen[r].items() if n != "superlink"), 1) for r in seen],
        "nodes-growth-percent-mean": round(statistics.mean(of_nodes), 2),
        "nodes-growth-percent-max": max(of_nodes),
        "dropped": deployment.summary("memory")["dropped"],
    }


def resident(deployment: Deployment) -> dict[str, float]:
    """Return the resident memory in MiB of the SuperLink, and of each node together with its worker."""
    found = {}
    for name, process in deployment.processes.items():
        parts = children(process.pid)
        if name == "superlink":
            found[name] = sum(rss(number) for number, command in parts.items() if "flower-superlink" in command)
        elif name.startswith("node"):
            found[name] = rss(process.pid) + sum(rss(number) for number in parts)
    return {name: round(size, 1) for name, size in found.items()}


def rss(process: int) -> float:
    """Return the resident memory of a process in MiB."""
    status = Path(f"/proc/{process}/status").read_text(encoding="utf-8")
    return int(next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1]) / 1024


if __name__ == "__main__":
    typer.run(main)
