"""Pooled training on heart-disease with FLamby's two scales.

FLamby standardises its pooled training rows with their common mean and standard deviation. Its pooled test set has the
same scale, and a hospital's test rows have the hospital's own scale. In Posy, the samples of a run have one scale, so
this program scores each model of a run with ``scaling=federation`` on the test rows of both scales.

``python -m benchmarks.flamby_pooled`` prints the accuracy in %, as the mean ± the standard deviation over the seeds.
"""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import posy
from posy.client_app.workspace import Workspace
from posy.storage import load_arrays
from posy.strategies.registry import read_settings

SETTINGS: dict[str, Any] = {
    "method": "pooled", "dataset": "heart-disease", "protocol": "flamby", "model": "logistic", "batch-size": 4,
    "num-server-rounds": 1, "local-epochs": 50, "lr": 0.001, "optimizer": "adam", "device": "cpu",
}  # fmt: skip
"""The setting of the row Pooled in benchmarks/tables/flamby-heart.yaml."""
SEEDS = (42, 43, 44, 45, 46)
HOSPITALS = ("Cleveland", "Hungary", "Switzerland", "Long Beach")


def hits(arrays: dict[str, npt.NDArray[np.float32]], scaling: str) -> list[npt.NDArray[np.bool_]]:
    """Return for each hospital whether the logistic regression classifies each of its test rows correctly."""
    workspace = Workspace(read_settings(SETTINGS | {"scaling": scaling}))
    weight, bias = (next(array for array in arrays.values() if array.ndim == ndim) for ndim in (2, 1))
    data = [workspace.client_data(client) for client in range(len(HOSPITALS))]
    return [(d.x_test.numpy() @ weight[0] + bias > 0) == d.y_test.numpy() for d in data]


def main() -> None:
    """Train one model per seed and print the accuracy of the models."""
    rows = []
    for seed in SEEDS:
        with tempfile.TemporaryDirectory() as folder:
            posy.run(**SETTINGS | {"scaling": "federation", "seed": seed, "output-dir": folder, "run-name": "pooled"})
            arrays = load_arrays(Path(folder) / "pooled" / "models" / "served-0.safetensors")
        own_scale = [part.mean() for part in hits(arrays, "client")]
        rows.append([*own_scale, np.concatenate(hits(arrays, "federation")).mean()])
    for name, scores in zip((*HOSPITALS, "pooled test set"), 100 * np.array(rows).T, strict=True):
        print(f"{name:16} {scores.mean():.1f} ± {scores.std(ddof=1):.1f}")


if __name__ == "__main__":
    main()
