"""Time and memory of one server step over M stacked models.

``python -m benchmarks.server_step`` prints JSON: seconds (median), and the peak of memory over that of the stacked
updates alone, each in a process of its own. Targets for M = 100, d = 0.6 M: FedACS under 1 s, cwFedAvg (output) and
FedFew under 0.5 s, memory at most 2.5 times the stacked updates.
"""

import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Annotated, Any

import numpy as np
import typer

from benchmarks.machine import machine
from posy.strategies.cwfedavg import class_models, weight_distribution
from posy.strategies.fedacs import attention_weights, cosine_similarity
from posy.strategies.fedamp import message_weights
from posy.strategies.fedfew import server_step, stch_weights, weighted_losses
from posy.strategies.replies import weighted_mean

CLASSES, EMBEDDING, MODELS = 10, 512, 3


def fedavg(rows: np.ndarray, n: np.ndarray) -> Any:
    """Take FedAvg's one weighted mean."""
    return weighted_mean(rows, n)


def fedacs(rows: np.ndarray, n: np.ndarray) -> Any:
    """Compute FedACS's similarities, attention, mixed models."""
    return attention_weights(cosine_similarity(rows), 0.5).astype(np.float32) @ rows


def fedamp(rows: np.ndarray, n: np.ndarray) -> Any:
    """Compute FedAMP's distances, attention, mixed models."""
    return message_weights(rows, 1000.0, 0.1).astype(np.float32) @ rows


def cwfedavg(rows: np.ndarray, n: np.ndarray) -> Any:
    """Average the output layer class-wise and the rest as FedAvg does; mix a head for each client (cwFedAvg)."""
    width = CLASSES * EMBEDDING
    heads = rows[:, -width:]
    distributions = weight_distribution(heads.reshape(len(rows), CLASSES, EMBEDDING))
    models = class_models(heads, distributions, n, np.zeros((CLASSES, width), np.float32))
    return weighted_mean(rows[:, :-width], n), distributions.astype(np.float32) @ models


def fedfew(rows: np.ndarray, n: np.ndarray) -> Any:
    """Apply FedFew's K = 3 updates of every client; here the same rows stand for all three."""
    losses = np.random.default_rng(1).random((len(rows), MODELS))
    weights = stch_weights(weighted_losses(losses, n), 0.01)
    deltas = [np.broadcast_to(row, (MODELS, len(row))) for row in rows]
    return server_step(np.zeros((MODELS, rows.shape[1]), np.float32), deltas, weights, 1.0)


STEPS: dict[str, Callable[[np.ndarray, np.ndarray], Any]] = {
    step.__name__: step for step in (fedavg, cwfedavg, fedfew, fedacs, fedamp)
}


def measure(name: str, clients: int, parameters: int, repeats: int) -> dict[str, Any]:
    """Measure one step in this process."""
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((clients, parameters), dtype=np.float32)
    n = rng.integers(10, 1000, clients).astype(np.float64)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        STEPS[name](rows, n)
        seconds.append(time.perf_counter() - start)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    stacked = rows.nbytes / 1024
    return {
        "step": name,
        "seconds": round(statistics.median(seconds), 4),
        "memory_over_stacked_updates": round(1 + (peak - before) / stacked, 3),
    }


def main(
    clients: int = 100,
    parameters: int = 600_000,
    repeats: int = 5,
    step: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    """Measure every step in a fresh process and print the results as JSON."""
    if step:
        print(json.dumps(measure(step, clients, parameters, repeats)))
        return
    size = {"clients": clients, "parameters": parameters}
    words = [word for name, value in {**size, "repeats": repeats}.items() for word in (f"--{name}", str(value))]
    command = [sys.executable, "-m", "benchmarks.server_step", *words, "--step"]
    answers = [subprocess.run([*command, name], check=True, capture_output=True, text=True).stdout for name in STEPS]
    print(json.dumps({**size, "machine": machine(), "steps": [json.loads(answer) for answer in answers]}, indent=2))


if __name__ == "__main__":
    typer.run(main)
