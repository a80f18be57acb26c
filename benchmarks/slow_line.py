"""Measure runs over a slow line: whether they complete, the lost replies, and the time of a round.

Five nodes with a CNN of 0.6 M parameters reach their SuperLink through :mod:`benchmarks.line`. The round trip takes 100
ms, each node has 5 Mbit/s in each direction, and 1 % of the calls fail. ``--cut-after 2e6`` also cuts every connection
after 2 MB. The benchmark prints JSON, which also contains the transmission time of a round.
"""

import json
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import typer

from benchmarks.line import Line, Quality
from benchmarks.local_federation import Deployment
from benchmarks.measure import machine

SAMPLES = 500
WARM_ROUNDS = 1


def main(
    nodes: int = 5,
    rounds: int = 6,
    delay: float = typer.Option(0.05, help="seconds in each direction"),
    megabits: float = typer.Option(5.0, help="Mbit/s of each connection and direction"),
    failing: float = typer.Option(0.01, help="share of the calls that fail"),
    cut_after: float = typer.Option(float("inf"), help="bytes after which a connection is cut"),
) -> None:
    """Start a federation over a slow line, run it, and print JSON."""
    quality = Quality(delay, megabits * 1e6 / 8, failing, cut_after)
    with tempfile.TemporaryDirectory(prefix="posy-benchmark-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        random = np.random.default_rng(1)
        x = random.standard_normal((SAMPLES, 3, 32, 32), dtype=np.float32)
        np.savez(folder / "data.npz", x_train=x, y_train=random.integers(0, 10, SAMPLES))
        names = [f"node-{i}" for i in range(nodes)]
        deployment = Deployment(folder, names)
        try:
            with Line(deployment.fleet, folder / "certificates", quality) as line:
                deployment.nodes("nodes", names, fleet=line.address)
                deployment.until(lambda: deployment.ready("nodes", nodes), "nodes", 300.0)
                results = run_over(deployment, line, nodes, rounds)
        finally:
            deployment.stop()
    options = {"delay": delay, "megabits": megabits, "failing": failing, "cut-after": f"{cut_after:g}"}
    print(json.dumps({**options, **results, "machine": machine()}, indent=2))


def run_over(deployment: Deployment, line: Line, nodes: int, rounds: int) -> dict[str, Any]:
    """Return the duration and the lost replies of a run over the line."""
    config = {
        "method": "fedavg", "dataset": deployment.folder / "data.npz", "model": "cnn", "device": "cpu",
        "batch-size": 50, "num-clients": nodes, "num-server-rounds": rounds, "save-models": "false",
    }  # fmt: skip
    counts_before = line.facts()
    summary = deployment.run("slow", *(f"{key}={value}" for key, value in config.items()), timeout=1800.0)
    counts = {key: count - counts_before[key] for key, count in line.facts().items()}
    seconds = [sum(row["seconds"].values()) for row in deployment.rounds("slow")]
    transmission_seconds = (counts["up"] + counts["down"]) / nodes / rounds / line.quality.bytes_per_second
    return {
        "nodes": nodes,
        "rounds": summary["rounds"],
        "round-seconds": [round(value, 1) for value in seconds],
        "round-seconds-median": round(median(seconds[WARM_ROUNDS:]), 2),
        "seconds-that-the-bytes-need": round(transmission_seconds, 2),
        "dropped": summary["dropped"],
        "missing": summary["missing"],
        "line": counts,
        "failed-share": round(counts["failed"] / counts["calls"], 4),
    }


if __name__ == "__main__":
    typer.run(main)
