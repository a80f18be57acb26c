"""Measure the time and memory of one server step over M stacked models.

``python -m benchmarks.server_step`` prints JSON. For each M it contains the median time in seconds, and the ratio of
peak memory to the memory of the stacked updates. It also contains the exponent k for which the time grows as M^k. Each
measurement runs in a separate process. Targets for M = 100 and d = 600,000: FedACS takes less than 1 s, and cwFedAvg
(output) and FedFew take less than 0.5 s. The memory is at most 2.5 times the memory of the stacked updates.
"""

import json
import math
import resource
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import numpy as np
import typer

from benchmarks.measure import machine
from posy.strategies.cwfedavg import class_models, weight_distribution
from posy.strategies.fedacs import attention_weights, cosine_similarity
from posy.strategies.fedamp import message_weights
from posy.strategies.fedfew import server_step, stch_weights, weighted_losses
from posy.strategies.replies import weighted_mean

CLASSES, EMBEDDING, MODELS = 10, 512, 3


def cwfedavg(rows: np.ndarray, n: np.ndarray) -> Any:
    """Average the output layer class-wise and the other layers as FedAvg does, and mix a head for each client."""
    width = CLASSES * EMBEDDING
    heads = rows[:, -width:]
    distributions = weight_distribution(heads.reshape(len(rows), CLASSES, EMBEDDING))
    models = class_models(heads, distributions, n, np.zeros((CLASSES, width), np.float32))
    return weighted_mean(rows[:, :-width], n), distributions.astype(np.float32) @ models


def fedfew(rows: np.ndarray, n: np.ndarray) -> Any:
    """Apply the K = 3 updates of every client; in this benchmark, the three updates are equal."""
    losses = np.random.default_rng(1).random((len(rows), MODELS))
    weights = stch_weights(weighted_losses(losses, n), 0.01)
    deltas = [np.broadcast_to(row, (MODELS, len(row))) for row in rows]
    return server_step(np.zeros((MODELS, rows.shape[1]), np.float32), deltas, weights, 1.0)


STEPS: dict[str, Callable[[np.ndarray, np.ndarray], Any]] = {
    "fedavg": weighted_mean,
    "cwfedavg": cwfedavg,
    "fedfew": fedfew,
    "fedacs": lambda rows, n: attention_weights(cosine_similarity(rows), 0.5).astype(np.float32) @ rows,
    "fedamp": lambda rows, n: message_weights(rows, 1000.0, 0.1).astype(np.float32) @ rows,
}


def measure(name: str, clients: int, parameters: int, repeats: int) -> dict[str, float]:
    """Measure one step in this process."""
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((clients, parameters), dtype=np.float32)
    n = rng.integers(10, 1000, clients).astype(np.float64)
    memory_before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        STEPS[name](rows, n)
        seconds.append(time.perf_counter() - start)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        f"seconds_M={clients}": round(statistics.median(seconds), 4),
        f"memory_over_stacked_updates_M={clients}": round(1 + (peak - memory_before) / (rows.nbytes / 1024), 3),
    }


def main(
    clients: list[int] = typer.Option([20, 100, 1000], help="values of M"),  # noqa: B008 - typer's form
    parameters: int = 600_000,
    repeats: int = 5,
) -> None:
    """Measure every step in a fresh process and print the results as JSON."""
    steps: list[dict[str, Any]] = []
    with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as pool:
        for name in STEPS:
            row: dict[str, Any] = {}
            for m in clients:
                row |= pool.submit(measure, name, m, parameters, repeats).result()
            if len(clients) > 1:
                ratio = max(row[f"seconds_M={clients[-1]}"], 1e-4) / max(row[f"seconds_M={clients[0]}"], 1e-4)
                row["growth_exponent"] = round(math.log(ratio) / math.log(clients[-1] / clients[0]), 2)
            steps.append({"step": name, **row})
    print(json.dumps({"parameters": parameters, "machine": machine(), "steps": steps}, indent=2))


if __name__ == "__main__":
    typer.run(main)
