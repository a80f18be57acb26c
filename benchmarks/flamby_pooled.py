"""Pooled training on heart-disease with FLamby's two scales.

FLamby standardises its pooled training rows with their common mean and standard deviation. Its pooled test set has the
same scale, and a hospital's test rows have the hospital's own scale. In Posy, the samples of a run have one scale, so
this program scores each model of a run with ``scaling=federation`` on the test rows of both scales.

``python -m benchmarks.flamby_pooled`` prints the accuracy in %, as the mean ± the standard deviation over the seeds.
"""

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import posy
from posy.client_app.workspace import Workspace
from posy.commands.table import read_plan
from posy.storage import load_arrays
from posy.strategies.registry import read_settings

TABLE, ROW = Path(__file__).parent / "tables" / "flamby-heart.yaml", "Pooled"
"""The table and its row of pooled training, whose settings and seeds this program uses."""


def workspace_of(config: Mapping[str, Any], scaling: str) -> Workspace:
    """Return the data of a run, with one scale for all hospitals (``federation``) or one for each (``client``)."""
    return Workspace(read_settings({**config, "scaling": scaling}))


def hits(arrays: Mapping[str, npt.NDArray[np.float32]], workspace: Workspace) -> list[npt.NDArray[np.bool_]]:
    """Return for each hospital whether the logistic regression classifies each of its test rows correctly."""
    weight, bias = (next(array for array in arrays.values() if array.ndim == ndim) for ndim in (2, 1))
    data = [workspace.client_data(client) for client in range(workspace.settings.data.num_clients)]
    return [(d.x_test.numpy() @ weight[0] + bias > 0) == d.y_test.numpy() for d in data]


def main() -> None:
    """Train one model per seed and print the accuracy of the models."""
    configs = [cell.config for cell in read_plan(TABLE).cells if cell.row == ROW]
    by_scale = {scaling: workspace_of(configs[0], scaling) for scaling in ("client", "federation")}
    rows = []
    for config in configs:
        with tempfile.TemporaryDirectory() as folder:
            paths = {"output-dir": folder, "run-name": "pooled", "scaling": "federation"}
            posy.run(**{key.replace("-", "_"): value for key, value in {**config, **paths}.items()})
            arrays = load_arrays(Path(folder) / "pooled" / "models" / "served-0.safetensors")
        of_hospitals = [part.mean() for part in hits(arrays, by_scale["client"])]
        rows.append([*of_hospitals, np.concatenate(hits(arrays, by_scale["federation"])).mean()])
    names = (*by_scale["client"].partition.names, "pooled test set")
    for name, scores in zip(names, 100 * np.array(rows).T, strict=True):
        print(f"{name:16} {scores.mean():.1f} ± {scores.std(ddof=1):.1f}")


if __name__ == "__main__":
    main()
