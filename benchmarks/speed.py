"""Measure the training samples per second in a round, relative to a bare PyTorch loop over the same batches.

The bare loop runs in one process per core. Each process trains a part of the clients in one thread. All commands print
JSON.

``python -m benchmarks.speed methods`` trains the 4-layer CNN on CIFAR-10 with 20 clients, Dir(0.1), batch 10 and one
epoch. The limit is the faster of two bare loops, one before and one after the federated runs. Targets: FedAvg reaches
at least 0.7 of the limit. FedFew with K = 3 takes at most 3.2 times as long as with one model. The regulariser makes
cwFedAvg at most 1.1 times slower. For FedDRM, whose network has a second branch, the limit is a bare loop that also
trains this branch.

``python -m benchmarks.speed secure`` measures the cost of secure aggregation per round of the CNN, with all clients in
one process.

``python -m benchmarks.speed engines`` also measures the overhead of a message and the peak memory, for each workload,
number of clients and engine. The overhead is the time of a message minus the time of one step on one sample, in runs
that train only this step. For comparison, the report contains the unavoidable time to copy a model in and a result
out. With 1,000 clients, 10 % train in a round. On a CPU, the command skips workloads that would take too long.
"""

import json
import statistics
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from threading import local
from typing import Any

import torch
import typer

from benchmarks.measure import bare_speed, federated, machine
from posy.client_app.workspace import Workspace
from posy.strategies.registry import read_settings

RUNS: dict[str, dict[str, Any]] = {
    "fedavg": {"method": "fedavg"},
    "fedacs": {"method": "fedacs"},
    "feddrm": {"method": "feddrm"},
    "cwfedavg without wdr": {"method": "cwfedavg", "cwfedavg-wdr": False},
    "cwfedavg": {"method": "cwfedavg"},
    "fedfew, K = 1": {"method": "fedfew", "fedfew-models": 1},
    "fedfew, K = 3": {"method": "fedfew", "fedfew-models": 3},
}
CIFAR10, MNIST = ({"dataset": name, "test-set": "pooled"} for name in ("cifar10", "mnist"))
WORKLOADS: dict[str, dict[str, Any]] = {
    "cnn-10": CIFAR10 | {"model": "cnn", "batch-size": 10, "samples-per-client": 100},
    "cnn-50": CIFAR10 | {"model": "cnn", "batch-size": 50, "samples-per-client": 100},
    "mlp-digits": {"dataset": "digits", "model": "mlp", "batch-size": 10},
    "mlp-mnist": MNIST | {"model": "mlp", "batch-size": 10, "samples-per-client": 60},
    "resnet18-128": CIFAR10 | {"model": "resnet18-gn", "batch-size": 128, "samples-per-client": 128},
}
ENGINES: dict[str, tuple[str, bool]] = {
    "ray": ("loop", True),
    "in-process": ("loop", False),
    "in-process, vectorised": ("vmap", False),
}
"""For each engine: the setting ``stack``, and whether Ray transports the messages."""
SHORT = 10
"""Factor for the number of rounds of fast workloads, because new processes are slow in the first few rounds."""
TOO_SLOW_ON_CPU = {("resnet18-128", 100), ("resnet18-128", 1000), ("cnn-10", 1000), ("cnn-50", 1000)}

app = typer.Typer()


@app.command()
def methods(
    data_dir: Path = Path("datasets"),
    samples: int = 12_000,
    rounds: int = 4,
    ray: bool = typer.Option(False, help="use Flower's simulation instead of one process"),
) -> None:
    """Measure the training speed of the methods."""
    config: dict[str, Any] = {
        "dataset": "cifar10", "data-dir": str(data_dir.absolute()), "max-samples": samples, "num-clients": 20,
        "dirichlet-alpha": 0.1, "model": "cnn", "batch-size": 10, "local-epochs": 1, "lr": 0.005, "seed": 1,
        "test-set": "pooled",
    }  # fmt: skip
    trained = sum(map(len, Workspace(read_settings(config)).partition.train))
    bare_before = bare_speed(config)
    results = {name: federated(config | RUNS[name], rounds, ray=ray) for name in RUNS}
    bare = max(bare_before, bare_speed(config))
    table: dict[str, dict[str, Any]] = {
        name: {
            "samples_per_second": round(trained / result["seconds"]),
            "of_bare_loop": round(trained / result["seconds"] / bare, 3),
            **{f"{phase}_seconds": round(result[phase], 2) for phase in ("evaluation", "start_up")},
        }
        for name, result in results.items()
    }
    branch_loop = bare_speed(config | RUNS["feddrm"])
    table["feddrm"]["of_bare_loop_with_client_branch"] = round(trained / results["feddrm"]["seconds"] / branch_loop, 3)

    def ratio(slow: str, fast: str) -> float:
        return round(results[slow]["seconds"] / results[fast]["seconds"], 2)

    report = {
        "where": "Flower's simulation" if ray else "one process",
        "machine": machine(),
        "training_samples": trained,
        "bare_loop_samples_per_second": round(bare),
        "runs": table,
        "fedfew_K3_over_K1": ratio("fedfew, K = 3", "fedfew, K = 1"),
        "wdr_over_none": ratio("cwfedavg", "cwfedavg without wdr"),
    }
    print(json.dumps(report, indent=2))


@app.command()
def secure(
    data_dir: Path = Path("datasets"),
    clients: list[int] = typer.Option([5, 20, 50], help="numbers of clients to measure"),  # noqa: B008 - typer's form
    neighbours: int = typer.Option(0, help="neighbours of each client; 0: all"),
    rounds: int = 20,
) -> None:
    """Measure the cost of secure aggregation per round, with an evaluation in every round."""
    for number in clients:
        num_neighbours = neighbours if neighbours < number else 0
        config: dict[str, Any] = {
            "method": "fedavg", "dataset": "cifar10", "data-dir": str(data_dir.absolute()), "max-samples": 40 * number,
            "num-clients": number, "partition": "iid", "model": "cnn", "local-steps": 1, "stack": "loop",
            "test-set": "pooled", "evaluate-every": 1,
        }  # fmt: skip
        masked = {"secure-aggregation": True, "secure-neighbours": num_neighbours}
        plain, secured = federated(config, rounds), federated(config | masked, rounds)
        extra = {phase: secured[phase] - plain[phase] for phase in ("seconds", "aggregation", "evaluation")}
        report = {
            "machine": machine(),
            "clients": number,
            "neighbours": num_neighbours or number - 1,
            "more_cpu_seconds_a_round": round((secured["cpu"] - plain["cpu"]) / rounds, 3),
            "more_seconds_a_round": round(sum(extra.values()), 3),
            "of_them": {
                "training": round(extra["seconds"] + extra["aggregation"], 3),
                "evaluation": round(extra["evaluation"], 3),
            },
            "bytes_a_round": {"plain": plain["bytes"], "secure": secured["bytes"]},
        }
        print(json.dumps(report, indent=2), flush=True)


@app.command()
def engines(
    data_dir: Path = Path("datasets"),
    rounds: int = 4,
    only: list[str] = typer.Option(list(WORKLOADS), help="workloads to measure"),  # noqa: B008 - typer's form
    engine: list[str] = typer.Option(list(ENGINES), help="engines to measure"),  # noqa: B008
) -> None:
    """Measure the engines; also print each result to stderr as soon as it is available."""
    report: dict[str, Any] = {"machine": machine(), "workloads": {}}
    for workload, clients in product(only, (10, 100, 1000)):
        if (workload, clients) not in TOO_SLOW_ON_CPU or torch.cuda.is_available():
            table = measured(workload, clients, str(data_dir.absolute()), rounds, engine)
            report["workloads"][f"{workload}, {clients} clients"] = table
    print(json.dumps(report, indent=2))


def overhead(config: dict[str, Any], rounds: int, *, ray: bool) -> float:
    """Return the milliseconds of a message minus the time of one step on one sample."""
    config = config | {"local-steps": 1, "batch-size": 1}
    rounds *= 1 if ray else SHORT
    step = 1 / bare_speed(config | {"samples-per-client": 20} if "samples-per-client" in config else config)
    result = federated(config, rounds, ray=ray)
    return 1000 * (result["seconds"] / result["messages"] - step)


def copying(config: dict[str, Any], messages: int = 20, rounds: int = 10) -> float:
    """Return the milliseconds per message to copy a model in and a result out, with one thread per training thread."""
    workspace = Workspace(read_settings(config))
    model = torch.randn(workspace.architecture.layout.size, device=workspace.device)
    thread = local()

    def message(_: int) -> torch.Tensor:
        if not hasattr(thread, "resident"):
            thread.resident = torch.empty_like(model)
        resident: torch.Tensor = thread.resident
        return resident.copy_(model).clone()

    def a_round(pool: ThreadPoolExecutor) -> float:
        start = time.perf_counter()
        replies = list(pool.map(message, range(messages)))
        if workspace.device.type == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - start) / len(replies)

    with ThreadPoolExecutor(workspace.workers) as pool:
        return 1000 * statistics.median(a_round(pool) for _ in range(rounds))


def measured(workload: str, clients: int, data_dir: str, rounds: int, engines: Sequence[str]) -> dict[str, Any]:
    """Measure engines on one workload; each limit is the mean of the bare loops before and after the engine's run."""
    config = {
        "method": "fedavg", "data-dir": data_dir, "partition": "iid", "num-clients": clients, "local-epochs": 1,
        "lr": 0.005, "seed": 1, "test-fraction": 0.1, "fraction-train": 0.1 if clients >= 1000 else 1.0,
        **WORKLOADS[workload],
    }  # fmt: skip
    limits = [bare_speed(config)]
    table: dict[str, Any] = {
        "copies_ms_a_message": round(copying(config), 2),
    }
    print(workload, clients, table, file=sys.stderr, flush=True)
    for name in engines:
        stack, ray = ENGINES[name]
        stacked = config | {"stack": stack}
        run = federated(stacked, rounds * SHORT if config["model"] == "mlp" and not ray else rounds, ray=ray)
        speed = run["samples"] / run["seconds"]
        limits.append(bare_speed(config))
        limit = statistics.mean(limits[-2:])
        table[name] = {
            "samples_per_second": round(speed),
            "of_bare_loop": round(speed / limit, 3),
            "bare_loop_samples_per_second": round(limit),
            "overhead_ms_a_message": round(overhead(stacked, rounds, ray=ray), 2),
            "round_seconds": round(run["seconds"], 3),
            "evaluation_seconds": round(run["evaluation"], 3),
            "start_up_seconds": round(run["start_up"], 1),
            "imports_seconds": round(run["imports"], 1),
            "peak_mib": run["peak_mib"],
        }
        print(workload, clients, name, table[name], file=sys.stderr, flush=True)
    return table


if __name__ == "__main__":
    app()
