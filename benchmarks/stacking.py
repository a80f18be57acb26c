"""How far models that are trained side by side part from those that are trained one after the other.

``python -m benchmarks.stacking`` runs every method on digits with ``stack=loop`` and ``stack=vmap``, for three seeds,
and prints how far the stored models part, the server's and the clients' own: ||a - b|| / ||a||, the largest of all.
"""

import argparse
import contextlib
import io
import tempfile
from pathlib import Path

import numpy as np

import posy
from benchmarks.machine import machine
from posy.storage import load_arrays
from posy.strategies.methods import METHODS

SEEDS = (0, 1, 2)


def difference(first: Path, other: Path) -> float:
    """Return the largest difference between two stored models, in norm and relative to that of the first."""
    largest = 0.0
    for path in sorted(first.glob("*.safetensors")):
        one, two = (
            {
                name: np.nan_to_num(array, nan=0.0)
                for name, array in load_arrays(file).items()
                if array.dtype.kind == "f"
            }
            for file in (path, other / path.name)
        )
        norm, apart = (
            np.sqrt(sum(float(np.square(array, dtype=np.float64).sum()) for array in arrays))
            for arrays in (one.values(), [array - two[name] for name, array in one.items()])
        )
        largest = max(largest, float(apart / norm) if norm else 0.0)
    return largest


def main() -> None:
    """Print a row for each method."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("methods", nargs="*", default=list(METHODS))
    options = parser.parse_args()
    print(f"{machine()}, {options.rounds} rounds", flush=True)
    for method in options.methods:
        found = []
        for seed in SEEDS:
            with tempfile.TemporaryDirectory(prefix="posy-") as folder:
                common = {"method": method, "seed": seed, "output_dir": folder, "num_server_rounds": options.rounds}
                with contextlib.redirect_stdout(io.StringIO()):  # progress and tables of the runs
                    pair = [
                        posy.run(**common, stack=stack, device="cpu", max_samples=600).directory.models
                        for stack in ("loop", "vmap")
                    ]
                found.append(difference(*pair))
        print(f"{method:10} " + "  ".join(f"{value:.1e}" for value in found), flush=True)


if __name__ == "__main__":
    main()
