"""Samples trained per second inside a round, beside a bare PyTorch loop over the same batches.

usage: python -m benchmarks.round_speed [--data-dir datasets] [--samples 12000] [--rounds 4] [--engine ray]

CIFAR-10, 4-layer CNN, 20 clients with Dir(0.1), batch 10, one epoch. The bare loop runs in as many
processes as there are cores, one thread each, every process on its share of the clients, before and
after the federated runs; the better of the two is the limit. Prints JSON. Targets: FedAvg at least 0.7 of
the bare loop, FedFew with K = 3 at most 3.2 times the time of one model, the regulariser of cwFedAvg at
most 1.1 times that of FedAvg. Start-up and evaluation are reported apart.
"""

import argparse
import contextlib
import io
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.machine import machine
from client_app.workspace import Workspace
from models import build_model
from posy.config import defaults, resolve
from posy.launch import run_in_process, run_simulation

RUNS = {
    "fedavg": {"method": "fedavg"},
    "cwfedavg without wdr": {"method": "cwfedavg", "cwfedavg-wdr": False},
    "cwfedavg": {"method": "cwfedavg"},
    "fedfew, K = 1": {"method": "fedfew", "fedfew-models": 1},
    "fedfew, K = 3": {"method": "fedfew", "fedfew-models": 3},
}


def settings(data_dir: str, samples: int) -> dict[str, Any]:
    """Return the settings that all runs share."""
    return {
        "dataset": "cifar10", "data-dir": data_dir, "max-samples": samples, "num-clients": 20, "dirichlet-alpha": 0.1,
        "model": "cnn", "batch-size": 10, "local-epochs": 1, "lr": 0.005, "save-models": False, "seed": 1,
    }  # fmt: skip


def bare_loop(config: dict[str, Any], clients: list[int], barrier: Any, queue: Any) -> None:
    """Train one model on some clients' batches with nothing but PyTorch."""
    torch.set_num_threads(1)
    workspace = Workspace(resolve(defaults() | config))
    data = [workspace.client_data(client) for client in clients]
    module = build_model("cnn", workspace.dataset.task, seed=0).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimiser = torch.optim.SGD(module.parameters(), lr=0.005)

    def epoch(x: torch.Tensor, y: torch.Tensor) -> None:
        for index in torch.split(torch.randperm(len(y)), 10):
            loss = F.cross_entropy(module(x[index]), y[index])
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()

    epoch(data[0].x_train[:200], data[0].y_train[:200])
    barrier.wait()
    start = time.perf_counter()
    for client in data:
        epoch(client.x_train, client.y_train)
    queue.put((sum(len(client.y_train) for client in data), time.perf_counter() - start))


def bare_speed(config: dict[str, Any]) -> float:
    """Return samples per second of the bare loop over all clients on all cores."""
    cores = len(os.sched_getaffinity(0))
    workspace = Workspace(resolve(defaults() | config))
    by_size = sorted(range(20), key=lambda c: -len(workspace.partition.train[c]))
    shares: list[list[int]] = [[] for _ in range(cores)]
    for client in by_size:  # largest first, to the process with the least work
        min(shares, key=lambda share: sum(len(workspace.partition.train[c]) for c in share)).append(client)
    context = multiprocessing.get_context("spawn")
    barrier, queue = context.Barrier(cores), context.Queue()
    processes = [context.Process(target=bare_loop, args=(config, share, barrier, queue)) for share in shares]
    for process in processes:
        process.start()
    results = [queue.get() for _ in processes]
    for process in processes:
        process.join()
    return sum(samples for samples, _ in results) / max(seconds for _, seconds in results)


def federated(config: dict[str, Any], engine: str, rounds: int) -> dict[str, Any]:
    """Run one method and return its speed inside the training phase, without the first round."""
    with tempfile.TemporaryDirectory() as folder:
        config = config | {
            "num-server-rounds": rounds,
            "evaluate-every": rounds,
            "output-dir": folder,
            "run-name": "run",
            "engine": engine,
        }
        start = time.perf_counter()
        with contextlib.redirect_stdout(io.StringIO()):
            status = run_simulation(config, 20, "cpu") if engine == "ray" else run_in_process(config)
        wall = time.perf_counter() - start
        if status:
            raise RuntimeError(f"the run of {config['method']} ended with status {status}")
        lines = (Path(folder) / "run" / "rounds.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    inside = statistics.median(row["seconds"]["train"] for row in rows[1:])
    phases = sum(sum(row["seconds"].values()) for row in rows)
    return {"seconds": inside, "evaluation": rows[-1]["seconds"]["evaluate"], "start_up": wall - phases}


def main() -> None:
    """Measure and print JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data-dir", default="datasets")
    parser.add_argument("--samples", type=int, default=12_000)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--engine", choices=("ray", "in-process"), default="ray")
    options = parser.parse_args()
    config = settings(str(Path(options.data_dir).absolute()), options.samples)
    workspace = Workspace(resolve(defaults() | config))
    samples = sum(map(len, workspace.partition.train))
    before = bare_speed(config)
    results = {name: federated(config | own, options.engine, options.rounds) for name, own in RUNS.items()}
    bare = max(before, bare_speed(config))
    table = {
        name: {
            "samples_per_second": round(samples / result["seconds"]),
            "of_bare_loop": round(samples / result["seconds"] / bare, 3),
            **{f"{phase}_seconds": round(result[phase], 2) for phase in ("evaluation", "start_up")},
        }
        for name, result in results.items()
    }
    report = {
        "engine": options.engine,
        "machine": machine(),
        "training_samples": samples,
        "bare_loop_samples_per_second": round(bare),
        "runs": table,
        "fedfew_K3_over_K1": round(results["fedfew, K = 3"]["seconds"] / results["fedfew, K = 1"]["seconds"], 2),
        "wdr_over_none": round(results["cwfedavg"]["seconds"] / results["cwfedavg without wdr"]["seconds"], 2),
    }
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
