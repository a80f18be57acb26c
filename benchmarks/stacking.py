"""How far models that train side by side part from those that train one after the other.

``python -m benchmarks.stacking`` runs every method on digits with ``stack=loop`` and ``stack=vmap``, for three seeds,
and prints the largest difference between stored models, the server's and the clients': ||a - b|| / ||a||.
"""

import contextlib
import io
import tempfile
from pathlib import Path

import numpy as np

import posy
from benchmarks.measure import machine
from posy.storage import load_arrays
from posy.strategies.methods import METHODS

SEEDS, ROUNDS = (0, 1, 2), 5


def vector(file: Path) -> np.ndarray:
    """Return the numbers of a stored model as one vector, NaN as 0."""
    arrays = [array for _, array in sorted(load_arrays(file).items()) if array.dtype.kind == "f"]
    return np.nan_to_num(np.concatenate([np.ravel(array).astype(np.float64) for array in arrays] or [np.zeros(0)]))


def difference(first: Path, other: Path) -> float:
    """Return the largest difference between two folders of stored models, relative to the norm of the first."""
    pairs = [(vector(path), vector(other / path.name)) for path in first.glob("*.safetensors")]
    return max((float(np.linalg.norm(a - b) / np.linalg.norm(a)) for a, b in pairs if a.any()), default=0.0)


def main() -> None:
    """Print a row for each method."""
    print(f"{machine()}, {ROUNDS} rounds", flush=True)
    for method in METHODS:
        found = []
        for seed in SEEDS:
            with tempfile.TemporaryDirectory(prefix="posy-") as folder, contextlib.redirect_stdout(io.StringIO()):
                pair = [
                    posy.run(
                        method=method, seed=seed, num_server_rounds=ROUNDS, stack=stack, device="cpu", max_samples=600,
                        output_dir=folder,
                    ).models
                    for stack in ("loop", "vmap")
                ]  # fmt: skip
                found.append(difference(*pair))
        print(f"{method:10} " + "  ".join(f"{value:.1e}" for value in found), flush=True)


if __name__ == "__main__":
    main()
