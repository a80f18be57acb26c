"""Samples trained per second inside a round, beside a bare PyTorch loop over the same batches.

CIFAR-10, 4-layer CNN, 20 clients with Dir(0.1), batch 10, one epoch. The bare loop runs in as many
processes as there are cores, one thread each, every process on its share of the clients, before and
after the federated runs; the better of the two is the limit. Prints JSON. Targets: FedAvg at least 0.7 of
the bare loop, FedFew with K = 3 at most 3.2 times the time of one model, the regulariser of cwFedAvg at
most 1.1 times that of FedAvg. FedDRM's network has a second branch; a bare loop that trains it too is its
limit. Start-up and evaluation are reported apart.
"""

import json
from pathlib import Path
from typing import Any

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


def main(
    data_dir: Path = Path("datasets"),
    samples: int = 12_000,
    rounds: int = 4,
    ray: bool = typer.Option(False, help="in Flower's simulation instead of one process"),
) -> None:
    """Measure and print JSON."""
    config: dict[str, Any] = {
        "dataset": "cifar10", "data-dir": str(data_dir.absolute()), "max-samples": samples, "num-clients": 20,
        "dirichlet-alpha": 0.1, "model": "cnn", "batch-size": 10, "local-epochs": 1, "lr": 0.005, "seed": 1,
    }  # fmt: skip
    trained = sum(map(len, Workspace(read_settings(config)).partition.train))
    before = bare_speed(config)
    results = {name: federated(config | RUNS[name], rounds, ray=ray) for name in RUNS}
    bare = max(before, bare_speed(config))
    table: dict[str, dict[str, Any]] = {
        name: {
            "samples_per_second": round(trained / result["seconds"]),
            "of_bare_loop": round(trained / result["seconds"] / bare, 3),
            **{f"{phase}_seconds": round(result[phase], 2) for phase in ("evaluation", "start_up")},
        }
        for name, result in results.items()
    }
    own_loop = bare_speed(config | RUNS["feddrm"])
    table["feddrm"]["of_bare_loop_with_client_branch"] = round(trained / results["feddrm"]["seconds"] / own_loop, 3)

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


if __name__ == "__main__":
    typer.run(main)
