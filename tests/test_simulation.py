"""Flower's own simulation on Ray and the in-process engine give the same models, for every method."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from posy.server_app.app import run
from posy.server_app.in_process import InProcessGrid
from posy.storage import load_arrays
from posy.strategies.methods import METHODS

SAME = 1e-5  # relative, in norm
CLIENTS = 4
ROOT = Path(__file__).resolve().parent.parent

# All methods in one simulation: Ray takes longer to start than they take together. It bears the name of Flower's
# simulation, by which each run keeps its clients' states apart, in its own directory.
SIMULATION = """
import json, sys
sys.argv[0] = "flwr-simulation"
from flwr.serverapp import ServerApp
from flwr.simulation import run_simulation
from posy.client_app.app import app as clients
from posy.server_app.app import run

configs = json.loads(sys.stdin.read())
server = ServerApp()

@server.main()
def main(grid, context):
    for config in configs:
        run(grid, config)

if __name__ == "__main__":
    run_simulation(server, clients, int(sys.argv[1]), backend_config={"client_resources": {"num_cpus": 1}})
"""


def settings(folder: Path, method: str, name: str, **more: Any) -> dict[str, Any]:
    own = {
        "method": method,
        "num-clients": CLIENTS,
        "num-server-rounds": 2,
        "max-samples": 240,
        "fraction-train": 0.75,
        "model": "mlp",
        "local-epochs": 1,
        "device": "cpu",
        "output-dir": str(folder),
        "run-name": f"{method}-{name}",
    }
    if method == "ppfe":  # its factors turn where singular values are close, so its comparison is without them
        own |= {"ppfe-reduction": "none", "ppfe-stages": 2}
    return {**own, **more}


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run every method in one simulation; the directory of their results."""
    folder = tmp_path_factory.mktemp("simulation")
    done = subprocess.run(
        [sys.executable, "-P", "-c", SIMULATION, str(CLIENTS)],
        input=json.dumps([settings(folder, method, "ray") for method in METHODS]),
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    return folder


@pytest.mark.slow
@pytest.mark.xdist_group("flower")
@pytest.mark.parametrize("stack", ["loop", "vmap"])
@pytest.mark.parametrize("method", METHODS)
def test_ray_and_one_process_give_the_same_models(method: str, stack: str, simulated: Path, tmp_path: Path) -> None:
    here = run(InProcessGrid(CLIENTS), settings(tmp_path, method, stack, stack=stack)).directory.path / "models"
    there = simulated / f"{method}-ray" / "models"
    names = sorted(path.name for path in there.iterdir())
    assert names == sorted(path.name for path in here.iterdir())
    assert len(names) == CLIENTS + 1
    for name in names:
        ours, expected = load_arrays(here / name), load_arrays(there / name)
        assert ours.keys() == expected.keys()
        for key, array in expected.items():
            known = np.isfinite(array)
            np.testing.assert_array_equal(np.isfinite(ours[key]), known, err_msg=f"{name}: {key}")
            distance = np.linalg.norm((ours[key] - array)[known])
            assert distance <= SAME * np.linalg.norm(array[known]), f"{name}: {key}"
