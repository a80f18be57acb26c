"""What a round over gRPC costs beyond the training, and whether memory grows over many rounds.

Real processes on this machine: a SuperLink with TLS, node authentication and its database, and SuperNodes.
It trains the 4-layer CNN (0.6 M parameters) on CIFAR-10 with FedAvg. The overhead of a round is its
time less that of the same rounds inside one process, spread over as many processes as there are cores; the cost
of moving the same bytes once is measured over a socket of this machine. CPU seconds, which other work on the machine
hardly changes, are told for each kind of process. ``--volatile`` uses a SuperLink that keeps its state in memory
instead of its database, ``--stock`` Flower's own. ``--memory`` trains a linear model on digits and compares the
memory (PSS: what processes share counts once) of the SuperLink and of the nodes with their workers after round 5 and
after the last; ``--memory --nodes 50`` does so for 50. Prints JSON.
Targets: less than 3 s a round beyond the training for 5 nodes on 2 cores, at most 2.2 times the SuperLink's CPU seconds
in memory, and memory that grows by at most 10 %.
"""

import contextlib
import io
import json
import os
import socket
import statistics
import subprocess
import tempfile
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import typer

from benchmarks.local_federation import Deployment
from benchmarks.measure import machine
from posy.commands.launch import run_in_process
from posy.forked import cores

WARM_ROUNDS = 2
"""Rounds left out of the medians: they load code and data."""
SETTLED_ROUND = 5
CHUNK = 1 << 20


def main(
    data_dir: Path = Path("datasets"),
    nodes: int = 0,
    rounds: int = 0,
    volatile: bool = typer.Option(False, help="a SuperLink without a database"),
    stock: bool = typer.Option(False, help="Flower's own SuperLink"),
    memory: bool = typer.Option(False, help="growth of memory instead of time"),
) -> None:
    """Start a federation, measure, and print JSON."""
    nodes, rounds = nodes or (20 if memory else 5), rounds or (30 if memory else 8)
    with tempfile.TemporaryDirectory(prefix="posy-benchmark-", ignore_cleanup_errors=True) as folder:
        options = [option for option, on in (("--volatile", volatile), ("--stock", stock)) if on]
        deployment = Deployment(Path(folder), [f"node-{i}" for i in range(nodes)], *options)
        try:
            started = time.monotonic()
            deployment.nodes("nodes", [f"node-{i}" for i in range(nodes)])
            deployment.until(partial(deployment.ready, "nodes", nodes), "nodes", 600.0)
            start = round(time.monotonic() - started, 1)
            found = growth(deployment, nodes, rounds) if memory else speed(deployment, nodes, rounds, data_dir)
        finally:
            deployment.stop()
    kind = ("Flower's own, " if stock else "") + ("in memory" if volatile else "database")
    kinds = {"nodes": "warm", "superlink": kind}
    print(json.dumps({**found, "start-seconds": start, **kinds, "machine": machine()}, indent=2))


def speed(deployment: Deployment, nodes: int, rounds: int, data_dir: Path) -> dict[str, Any]:
    """Return seconds of a round over gRPC, of its training, of the bytes alone, and what is left."""
    config: dict[str, Any] = {
        "method": "fedavg", "dataset": "cifar10", "data-dir": str(data_dir.absolute()), "max-samples": 2000,
        "model": "cnn", "batch-size": 50, "local-epochs": 1, "num-clients": nodes, "num-server-rounds": rounds,
        "lr": 0.01, "device": "cpu", "test-set": "pooled",
    }  # fmt: skip
    words = [f"{key}={value}" for key, value in config.items()]
    cpu = {}
    # One round more than is looked at: CPU time is read while the run goes on.
    words = [word if not word.startswith("num-server-rounds") else f"num-server-rounds={rounds + 1}" for word in words]
    process = deployment.submit("speed", *words, "save-models=false")
    for number in (WARM_ROUNDS, rounds):
        wait_for_round(deployment, process, "speed", number)
        cpu[number] = cpu_seconds(deployment)
    process.wait()
    own = {"save-models": False, "output-dir": str(deployment.folder / "runs"), "run-name": "plain"}
    with contextlib.redirect_stdout(io.StringIO()):
        run_in_process(config | own, "this benchmark")
    over_grpc, one_process = (
        [sum(row["seconds"].values()) for row in deployment.rounds(name)[WARM_ROUNDS:rounds]]
        for name in ("speed", "plain")
    )
    last = deployment.rounds("speed")[rounds - 1]
    spent = {name: (cpu[rounds][name] - cpu[WARM_ROUNDS][name]) / (rounds - WARM_ROUNDS) for name in cpu[rounds]}
    round_seconds, training = statistics.median(over_grpc), statistics.median(one_process) / min(nodes, cores())
    messages = 2 * nodes  # one for the training of each client, one for its evaluation
    return {
        "round-seconds": round(round_seconds, 3),
        "round-seconds-range": [round(min(over_grpc), 3), round(max(over_grpc), 3)],
        "training-seconds": round(training, 3),
        "overhead-seconds": round(round_seconds - training, 3),
        "overhead-seconds-per-message": round((round_seconds - training) / messages, 3),
        "cpu-seconds-per-round": {name: round(seconds, 3) for name, seconds in spent.items()},
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
    seen, spent = {}, {}
    for number in (SETTLED_ROUND, rounds):
        wait_for_round(deployment, process, "memory", number)
        seen[number], spent[number] = resident(deployment), cpu(deployment.superlink())
    process.wait()
    first, last = seen[SETTLED_ROUND], seen[rounds]
    percent = {name: round(100 * (last[name] / first[name] - 1), 2) for name in first}
    of_nodes = [value for name, value in percent.items() if name.startswith("node-")]
    messages = 2 * nodes * (rounds - SETTLED_ROUND)
    return {
        "nodes-of-one-command": nodes,
        "rounds": rounds,
        "round-seconds": round(
            statistics.median(sum(row["seconds"].values()) for row in deployment.rounds("memory")), 3
        ),
        "superlink-MiB": [first["superlink"], last["superlink"]],
        "superlink-growth-percent": percent["superlink"],
        "all-nodes-MiB": [round(sum(size for name, size in seen[r].items() if name != "superlink")) for r in seen],
        "node-MiB": [round(statistics.mean(m for n, m in seen[r].items() if n.startswith("node-")), 1) for r in seen],
        "nodes-growth-percent-mean": round(statistics.mean(of_nodes), 2),
        "nodes-growth-percent-max": max(of_nodes),
        "messages": messages,
        "superlink-cpu-seconds-per-message": round((spent[rounds] - spent[SETTLED_ROUND]) / messages, 4),
        "dropped": deployment.summary("memory")["dropped"],
    }


def wait_for_round(deployment: Deployment, process: "subprocess.Popen[bytes]", run: str, number: int) -> None:
    """Wait until so many rounds of a run are finished; end this process if the run ends before."""
    while len(deployment.rounds(run)) < number:
        if process.poll() is not None:
            raise SystemExit(f"the run ended early: {deployment.log(f'run-{run}')}")
        time.sleep(0.05)


def cpu_seconds(deployment: Deployment) -> dict[str, float]:
    """Return the CPU seconds so far of the SuperLink, the ServerApp, the nodes without their workers, and these."""
    return {
        "superlink": cpu(deployment.superlink()),
        "server-app": cpu(deployment.server()),
        "nodes": sum(map(cpu, deployment.forked("node").values())),
        "workers": sum(map(cpu, deployment.forked("worker").values())),
    }


def cpu(process: int) -> float:
    """Return the CPU seconds of a process, its own and the system's for it."""
    fields = Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident(deployment: Deployment) -> dict[str, float]:
    """Return the memory in MiB of the SuperLink, of the nodes' parent, and of each node together with its worker."""
    nodes, workers = deployment.forked("node"), deployment.forked("worker")
    found = {"superlink": pss(deployment.superlink()), "parent": pss(deployment.processes["nodes"].pid)}
    found |= {name: pss(number) + pss(workers[name]) for name, number in nodes.items()}
    return {name: round(size, 1) for name, size in found.items()}


def pss(process: int) -> float:
    """Return the memory of a process in MiB; of what it shares with others, its part."""
    told = Path(f"/proc/{process}/smaps_rollup").read_text(encoding="utf-8")
    return int(next(line for line in told.splitlines() if line.startswith("Pss:")).split()[1]) / 1024


if __name__ == "__main__":
    typer.run(main)
