"""Measure the speed of federated runs from their records, and of a bare PyTorch loop, which is the upper limit."""

import json
import multiprocessing
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pandas as pd
import torch
import torch.nn.functional as F

from posy.client_app.registry import client_class
from posy.client_app.state import State
from posy.client_app.workspace import Workspace
from posy.forked import cores
from posy.server_app.results import cpu_model
from posy.strategies.registry import read_settings

COMMON = """
import json, sys, time
begun = time.perf_counter()
import posy, posy.figures, posy.commands.launch, posy.server_app.app
from posy.client_app.registry import client_class
from posy.strategies.methods import strategy_class
settings = json.loads(sys.argv[1])
client_class(settings["method"]), strategy_class(settings["method"])
imported = time.perf_counter()
"""
IN_PROCESS = """
posy.run(**{key.replace("-", "_"): value for key, value in settings.items()})
"""
RAY = """
sys.argv[0] = "flwr-simulation"
from flwr.serverapp import ServerApp
from flwr.simulation import run_simulation
from posy.client_app.app import app as clients
server = ServerApp()

@server.main()
def main(grid, context):
    posy.server_app.app.run(grid, settings)

resources = {"num_cpus": 1, "num_gpus": float(sys.argv[2])}
run_simulation(server, clients, settings["num-clients"], backend_config={"client_resources": resources})
"""
PRINT_SECONDS = "print(json.dumps([imported - begun, time.perf_counter() - imported]), file=sys.stderr)"
"""The parts of a program: imports, a run in one process or in Flower's simulation, and the output of the durations."""
CLIENTS_PER_GPU = 4
BARE_SECONDS = 1.0
"""Minimum duration of a measurement in seconds. The bare loop repeats passes over the data for at least this long."""


def cpu_of_process(process: int) -> float:
    """Return the CPU seconds of a process and its threads, in user and system mode together."""
    fields = Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def machine() -> dict[str, Any]:
    """Return the processor, cores, accelerator, versions, load and date."""
    return {
        "cpu": cpu_model(),
        "cores": cores(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "load": os.getloadavg()[0],
        "date": time.strftime("%Y-%m-%d"),
    }


def bare_loop(config: dict[str, Any], clients: list[int], barrier: Any, queue: Any) -> None:
    """Train the network on clients' data with plain PyTorch, and put (samples, seconds per pass) into ``queue``."""
    torch.set_num_threads(1)
    workspace = Workspace(read_settings(config))
    size = workspace.settings.train.batch_size
    data = [workspace.client_data(client) for client in clients]
    client = client_class(workspace.settings.run.method)(clients[0], workspace, State())
    module = client.architecture.build().to(workspace.device)
    if data[0].x_train.dim() == 4 and workspace.device.type == "cpu":
        module = module.to(memory_format=torch.channels_last)
    optimiser = torch.optim.SGD(module.parameters(), lr=0.005)

    def epoch(x: torch.Tensor, y: torch.Tensor) -> None:
        for index in torch.split(torch.randperm(len(y), device=y.device), size):
            outputs = module(x[index])
            logits, *branch = outputs if isinstance(outputs, tuple) else (outputs,)
            loss = F.cross_entropy(logits, y[index])
            for other in branch:  # FedDRM's second branch predicts the client
                loss = loss + F.cross_entropy(other, torch.zeros_like(y[index]))
            optimiser.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()

    def settled() -> float:
        if workspace.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    epoch(data[0].x_train[:200], data[0].y_train[:200])
    barrier.wait()
    start, passes = settled(), 0
    while passes == 0 or settled() - start < BARE_SECONDS:
        for client_data in data:
            epoch(client_data.x_train, client_data.y_train)
        passes += 1
    queue.put((sum(len(client_data.y_train) for client_data in data), (settled() - start) / passes))


def bare_speed(config: dict[str, Any]) -> float:
    """Return the samples per second of the bare loop over the clients of one round, with the method's network.

    On a CPU, one single-threaded process runs per core, each with about the same work. On a GPU, there is one process.
    """
    workspace = Workspace(read_settings(config))
    processes = cores() if workspace.device.type == "cpu" else 1
    parts = workspace.partition.train
    cohort = range(max(1, round(workspace.settings.run.fraction_train * len(parts))))
    shares: list[list[int]] = [[] for _ in range(min(processes, len(cohort)))]
    for client in sorted(cohort, key=lambda c: -len(parts[c])):  # largest first, to the process with the least work
        min(shares, key=lambda share: sum(len(parts[c]) for c in share)).append(client)
    context = multiprocessing.get_context("spawn")
    barrier, queue = context.Barrier(len(shares)), context.Queue()
    started = [context.Process(target=bare_loop, args=(config, share, barrier, queue)) for share in shares]
    for process in started:
        process.start()
    results = [queue.get() for _ in started]
    for process in started:
        process.join()
    return sum(samples for samples, _ in results) / max(seconds for _, seconds in results)


def federated(config: dict[str, Any], rounds: int, *, ray: bool = False) -> dict[str, Any]:
    """Run a configuration in a separate process, and return the measurements from its record.

    Returns
    -------
    dict
        ``seconds`` of the training phase, median without the first round; ``messages`` of the phase; ``samples``
        trained in it; ``aggregation`` seconds, and ``bytes`` of the second round; median of the ``evaluation`` seconds;
        seconds of ``imports``, and of ``start_up`` and end outside the rounds; ``cpu`` seconds of the process;
        ``peak_mib`` of the largest process.
    """
    with tempfile.TemporaryDirectory() as folder:
        settings = {
            "save-models": False, "evaluate-every": rounds, **config, "num-server-rounds": rounds,
            "output-dir": folder, "run-name": "run",
        }  # fmt: skip
        gpu = 1 / CLIENTS_PER_GPU if torch.cuda.is_available() else 0
        program = COMMON + (RAY if ray else IN_PROCESS) + PRINT_SECONDS
        command = [sys.executable, "-c", program, json.dumps(settings), str(gpu)]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        assert process.stderr is not None
        errors = process.stderr.read()
        _, status, usage = os.wait4(process.pid, 0)
        if status:
            raise RuntimeError(f"the run exited with status {status}: {errors[-2000:]}")
        imports, wall = json.loads(next(line for line in reversed(errors.splitlines()) if line.startswith("[")))
        path = Path(folder) / "run"
        rows = [json.loads(line) for line in (path / "rounds.jsonl").read_text(encoding="utf-8").splitlines()]
        clients = pd.read_csv(path / "clients.csv")
    trained = clients[clients["round"] == rounds]
    if "train_loss" in trained:  # with secure aggregation, the record contains no losses of individual clients
        trained = trained[trained["train_loss"].notna()]
    evaluation = [row["seconds"]["evaluate"] for row in rows if "evaluate" in row["seconds"]]
    return {
        "seconds": statistics.median(row["seconds"]["train"] for row in rows[1:]),
        "messages": rows[-1]["cohort"],
        "samples": int(trained["n_train"].sum()),
        "aggregation": statistics.median(row["seconds"]["aggregate"] for row in rows[1:]),
        "bytes": rows[1]["bytes_up"] + rows[1]["bytes_down"],
        "evaluation": statistics.median(evaluation) if evaluation else None,
        "imports": imports,
        "start_up": wall - sum(sum(row["seconds"].values()) for row in rows),
        "cpu": usage.ru_utime + usage.ru_stime,
        "peak_mib": round(usage.ru_maxrss / 1024),
    }


def percent(values: list[float]) -> str:
    """Return the mean and the standard deviation of accuracies over the seeds, in percent."""
    return f"{100 * statistics.fmean(values):.1f} ± {100 * statistics.stdev(values):.1f}"
