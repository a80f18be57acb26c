"""Measure how much models that train in parallel differ from models that train sequentially.

``python -m benchmarks.stacking`` runs every method on digits with ``stack=loop`` and ``stack=vmap``, for three seeds.
It prints the largest difference ||a - b|| / ||a|| between stored models of the server and the clients. With
``--device cuda`` the models train in parallel on the GPU and sequentially on the CPU.
"""

import contextlib
import io
import multiprocessing
import tempfile
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat
from pathlib import Path

import numpy as np
import typer

import posy
from benchmarks.measure import machine
from posy.storage import load_arrays
from posy.strategies.methods import METHODS

SEEDS, ROUNDS = (0, 1, 2), 5


def vector(file: Path) -> np.ndarray:
    """Return the floating-point values of a stored model as one vector, with 0 for NaN."""
    arrays = [array for _, array in sorted(load_arrays(file).items()) if array.dtype.kind == "f"]
    return np.nan_to_num(np.concatenate([np.ravel(array).astype(np.float64) for array in arrays] or [np.zeros(0)]))


def difference(first: Path, other: Path) -> float:
    """Return the largest difference between two folders of stored models, relative to the norm of the first."""
    pairs = [(vector(path), vector(other / path.name)) for path in first.glob("*.safetensors")]
    return max((float(np.linalg.norm(a - b) / np.linalg.norm(a)) for a, b in pairs if a.any()), default=0.0)


def row(method: str, device: str) -> str:
    """Return the table row of a method, with a difference per seed."""
    differences = []
    for seed in SEEDS:
        with tempfile.TemporaryDirectory(prefix="posy-") as folder, contextlib.redirect_stdout(io.StringIO()):
            pair = [
                posy.run(
                    method=method, seed=seed, num_server_rounds=ROUNDS, stack=stack, device=target, max_samples=600,
                    output_dir=folder,
                ).models
                for stack, target in (("loop", "cpu"), ("vmap", device))
            ]  # fmt: skip
            differences.append(difference(*pair))
    return f"{method:10} " + "  ".join(f"{value:.1e}" for value in differences)


def main(
    device: str = typer.Option("cpu", help="device for parallel training: cpu or cuda"),
    jobs: int = typer.Option(1, help="number of methods that run at once"),
) -> None:
    """Print a row for each method."""
    print(f"{machine()}, {ROUNDS} rounds, in parallel on {device}", flush=True)
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        for line in pool.map(row, METHODS, repeat(device)):
            print(line, flush=True)


if __name__ == "__main__":
    typer.run(main)
