"""Measure the overhead of a round over gRPC, and the growth of memory over many rounds, and print JSON.

The benchmark starts real processes on this machine: a SuperLink with TLS, node authentication and a database, and
SuperNodes. FedAvg trains the 4-layer CNN (0.6 M parameters) on CIFAR-10. The overhead of a round is the time of the
round minus its training time. The training time is the time of the same round in one process, divided by the number of
cores (at most one per node). For comparison, the benchmark sends the same bytes once through a local socket. It reports
the CPU seconds of each kind of process, which hardly depend on other programs on the machine.

``--volatile`` starts a SuperLink that keeps its state in memory, and ``--stock`` starts Flower's SuperLink. With
``--memory``, the nodes train a linear model on digits. The benchmark compares the memory after round 5 with the memory
after the last round. It measures the SuperLink, and the nodes with their workers. It uses PSS, which counts shared
memory only once. ``--nodes`` sets the number of nodes.

With ``--secure``, the benchmark compares a plain run with a run under secure aggregation, in which all sites sign their
keys. It reports the additional seconds of a round, for training and evaluation together. In the additional stages, the
sites sign the list of survivors and reveal the shares of masks. ``--neighbours`` is the setting ``secure-neighbours``.

Targets:

- The overhead of a round is less than 3 s for 5 nodes on 2 cores.
- The SuperLink with a database takes at most 2.2 times the CPU seconds of a SuperLink with its state in memory.
- Memory grows by at most 10 %.
- With 5 nodes, masks take less than 1 s per round.
"""

import contextlib
import io
import json
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
from benchmarks.measure import cpu_of_process, machine
from posy.commands.launch import run_in_process
from posy.forked import cores

WARM_ROUNDS = 2
"""Number of initial rounds that the medians exclude, because these rounds load code and data."""
SETTLED_ROUND = 5
CHUNK = 1 << 20


def main(
    data_dir: Path = Path("datasets"),
    nodes: int = 0,
    rounds: int = 0,
    volatile: bool = typer.Option(False, help="start a SuperLink without a database"),
    stock: bool = typer.Option(False, help="start Flower's own SuperLink"),
    memory: bool = typer.Option(False, help="measure the growth of memory instead of time"),
    secure: bool = typer.Option(False, help="measure the cost of secure aggregation instead of delivery"),
    neighbours: int = typer.Option(0, help="with --secure: neighbours of each client; 0: all"),
) -> None:
    """Start a federation, measure it, and print JSON."""
    nodes, rounds = nodes or (20 if memory else 5), rounds or (30 if memory else 8)
    with tempfile.TemporaryDirectory(prefix="posy-benchmark-", ignore_cleanup_errors=True) as folder:
        options = [option for option, on in (("--volatile", volatile), ("--stock", stock)) if on]
        deployment = Deployment(Path(folder), [f"node-{i}" for i in range(nodes)], *options)
        try:
            if secure:
                print(json.dumps({**masks(deployment, nodes, rounds, data_dir, neighbours), "machine": machine()}))
                return
            started = time.monotonic()
            deployment.nodes("nodes", [f"node-{i}" for i in range(nodes)])
            deployment.until(partial(deployment.ready, "nodes", nodes), "nodes", 600.0)
            start = round(time.monotonic() - started, 1)
            results = growth(deployment, nodes, rounds) if memory else speed(deployment, nodes, rounds, data_dir)
        finally:
            deployment.stop()
    kind = ("Flower's own, " if stock else "") + ("in memory" if volatile else "database")
    kinds = {"nodes": "warm", "superlink": kind}
    print(json.dumps({**results, "start-seconds": start, **kinds, "machine": machine()}, indent=2))


def speed(deployment: Deployment, nodes: int, rounds: int, data_dir: Path) -> dict[str, Any]:
    """Return the seconds of a round over gRPC, its training, its overhead, and one transfer of its bytes."""
    config = run_settings(nodes, rounds, data_dir)
    words = [f"{key}={value}" for key, value in config.items()]
    cpu = {}
    # Run one round more than measured, because the benchmark reads the CPU times during the run.
    words = [word if not word.startswith("num-server-rounds") else f"num-server-rounds={rounds + 1}" for word in words]
    process = deployment.submit("speed", *words, "save-models=false")
    for number in (WARM_ROUNDS, rounds):
        wait_for_round(deployment, process, "speed", number)
        cpu[number] = cpu_seconds(deployment)
    process.wait()
    output = {"save-models": False, "output-dir": str(deployment.folder / "runs"), "run-name": "plain"}
    with contextlib.redirect_stdout(io.StringIO()):
        run_in_process(config | output, "this benchmark")
    over_grpc, one_process = (
        [sum(row["seconds"].values()) for row in deployment.rounds(name)[WARM_ROUNDS:rounds]]
        for name in ("speed", "plain")
    )
    last = deployment.rounds("speed")[rounds - 1]
    cpu_spent = {name: (cpu[rounds][name] - cpu[WARM_ROUNDS][name]) / (rounds - WARM_ROUNDS) for name in cpu[rounds]}
    round_seconds, training_seconds = statistics.median(over_grpc), statistics.median(one_process) / min(nodes, cores())
    messages = 2 * nodes  # one to train and one to evaluate each client
    return {
        "round-seconds": round(round_seconds, 3),
        "round-seconds-range": [round(min(over_grpc), 3), round(max(over_grpc), 3)],
        "training-seconds": round(training_seconds, 3),
        "overhead-seconds": round(round_seconds - training_seconds, 3),
        "overhead-seconds-per-message": round((round_seconds - training_seconds) / messages, 3),
        "cpu-seconds-per-round": {name: round(seconds, 3) for name, seconds in cpu_spent.items()},
        "bytes": last["bytes_up"] + last["bytes_down"],
        "moving-the-bytes-once-seconds": round(moving(last["bytes_up"] + last["bytes_down"]), 3),
        "dropped": deployment.summary("speed")["dropped"],
    }


def run_settings(nodes: int, rounds: int, data_dir: Path) -> dict[str, Any]:
    """Return the settings of the run: the 4-layer CNN on CIFAR-10."""
    return {
        "method": "fedavg", "dataset": "cifar10", "data-dir": str(data_dir.absolute()), "max-samples": 2000,
        "model": "cnn", "batch-size": 50, "local-epochs": 1, "num-clients": nodes, "num-server-rounds": rounds,
        "lr": 0.01, "device": "cpu", "test-set": "pooled",
    }  # fmt: skip


def masks(deployment: Deployment, nodes: int, rounds: int, data_dir: Path, neighbours: int) -> dict[str, Any]:
    """Return the seconds and bytes of a round with and without secure aggregation, and the additional seconds."""
    names = [f"node-{i}" for i in range(nodes)]
    words = [f"{key}={value}" for key, value in run_settings(nodes, rounds, data_dir).items()]
    keys = ["signing-key=certificates/{name}.key", "trusted-keys=certificates"]
    masked = ["secure-aggregation=true", f"secure-neighbours={neighbours}"]
    seconds, moved, dropped = {}, {}, {}
    for name, config, settings in (("plain", [], []), ("secure", keys, masked)):
        process = deployment.nodes(f"nodes-{name}", names, *config)
        deployment.until(partial(deployment.ready, f"nodes-{name}", nodes), f"nodes-{name}", 600.0)
        dropped[name] = deployment.run(name, *words, *settings, "save-models=false")["dropped"]
        rows = deployment.rounds(name)[WARM_ROUNDS:]
        seconds[name] = [sum(row["seconds"].values()) for row in rows]
        moved[name] = rows[-1]["bytes_up"] + rows[-1]["bytes_down"]
        process.terminate()
        process.wait()
    medians = {name: round(statistics.median(values), 3) for name, values in seconds.items()}
    return {
        "nodes": nodes,
        "neighbours": neighbours or nodes - 1,
        "round-seconds": medians,
        "round-seconds-range": {name: [round(min(v), 3), round(max(v), 3)] for name, v in seconds.items()},
        "more-seconds-a-round": round(medians["secure"] - medians["plain"], 3),
        "bytes-a-round": moved,
        "dropped": dropped,
    }


def moving(size: int) -> float:
    """Return the seconds that it takes to send ``size`` bytes through a local socket."""
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
    """Return the memory of the SuperLink and the nodes after round 5 and after the last round, and its growth."""
    words = ["method=fedavg", "dataset=digits", "model=linear", "device=cpu", f"num-clients={nodes}"]
    # Run one round more than measured, because the benchmark reads the memory during the run.
    process = deployment.submit("memory", *words, f"num-server-rounds={rounds + 1}", "save-models=false")
    memory, cpu_spent = {}, {}
    for number in (SETTLED_ROUND, rounds):
        wait_for_round(deployment, process, "memory", number)
        memory[number], cpu_spent[number] = resident(deployment), cpu_of_process(deployment.superlink())
    process.wait()
    first, last = memory[SETTLED_ROUND], memory[rounds]
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
        "all-nodes-MiB": [round(sum(size for name, size in memory[r].items() if name != "superlink")) for r in memory],
        "node-MiB": [
            round(statistics.mean(m for n, m in memory[r].items() if n.startswith("node-")), 1) for r in memory
        ],
        "nodes-growth-percent-mean": round(statistics.mean(of_nodes), 2),
        "nodes-growth-percent-max": max(of_nodes),
        "messages": messages,
        "superlink-cpu-seconds-per-message": round((cpu_spent[rounds] - cpu_spent[SETTLED_ROUND]) / messages, 4),
        "dropped": deployment.summary("memory")["dropped"],
    }


def wait_for_round(deployment: Deployment, process: "subprocess.Popen[bytes]", run: str, number: int) -> None:
    """Wait until ``number`` rounds of a run are finished, or exit if the run ends earlier."""
    while len(deployment.rounds(run)) < number:
        if process.poll() is not None:
            raise SystemExit(f"the run ended early: {deployment.log(f'run-{run}')}")
        time.sleep(0.05)


def cpu_seconds(deployment: Deployment) -> dict[str, float]:
    """Return the CPU seconds used so far by the SuperLink, the ServerApp, the nodes (without workers) and workers."""
    return {
        "superlink": cpu_of_process(deployment.superlink()),
        "server-app": cpu_of_process(deployment.server()),
        "nodes": sum(map(cpu_of_process, deployment.forked("node").values())),
        "workers": sum(map(cpu_of_process, deployment.forked("worker").values())),
    }


def resident(deployment: Deployment) -> dict[str, float]:
    """Return the memory in MiB of the SuperLink, of the nodes' parent, and of each node together with its worker."""
    nodes, workers = deployment.forked("node"), deployment.forked("worker")
    memory = {"superlink": pss(deployment.superlink()), "parent": pss(deployment.processes["nodes"].pid)}
    memory |= {name: pss(number) + pss(workers[name]) for name, number in nodes.items()}
    return {name: round(size, 1) for name, size in memory.items()}


def pss(process: int) -> float:
    """Return the memory (PSS) of a process in MiB, including its share of the shared memory."""
    lines = Path(f"/proc/{process}/smaps_rollup").read_text(encoding="utf-8")
    return int(next(line for line in lines.splitlines() if line.startswith("Pss:")).split()[1]) / 1024


if __name__ == "__main__":
    typer.run(main)
