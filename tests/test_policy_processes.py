"""The default policy on a real node: it refuses a run by its rule, and code that differs from the installed Posy."""

from pathlib import Path

import numpy as np
import pytest
from sklearn.datasets import load_digits

from benchmarks.local_federation import Deployment

pytestmark = [pytest.mark.federation, pytest.mark.xdist_group("processes")]
SETTINGS = {"method": "fedavg", "dataset": "sites", "num-clients": 2, "num-server-rounds": 1, "device": "cpu"}


def words(**changes: object) -> list[str]:
    settings = SETTINGS | {key.replace("_", "-"): value for key, value in changes.items()}
    return [f"{key}={value}" for key, value in settings.items()]


def test_a_node_refuses_runs_and_code_by_its_policy(tmp_path: Path) -> None:
    x, y = load_digits(return_X_y=True)
    deployment = Deployment(tmp_path, ["site-0", "site-1"])
    (tmp_path / "nets.py").write_text(
        "from torch import nn\n\n\ndef small(task):\n    return nn.Sequential(nn.Linear(64, 8), nn.ReLU(), "
        "nn.Linear(8, task.num_classes))\n"
    )
    try:
        for number in range(2):
            np.savez(tmp_path / f"{number}.npz", x_train=x[number::2].astype(np.float32), y_train=y[number::2])
            deployment.node(f"site-{number}", f"data={tmp_path / f'{number}.npz'}", f"state-dir=state-{number}")
        for number in range(2):
            deployment.until(lambda name=f"site-{number}": deployment.ready(name), f"site-{number}")
        for name, run in (
            ("small-batch", words(batch_size=1)),
            ("own-code", words(model="nets:small")),
            ("allowed", words()),
        ):
            deployment.submit(name, *run)
            deployment.ended(f"run-{name}")
    finally:
        deployment.stop()
    log = deployment.log("run-small-batch")
    rule = (
        "the policy of the site refuses this run, rule min-rows: batch-size = 1; each gradient needs at least 10 rows"
    )
    assert f"site-0: {rule}" in " ".join(log.split()) and rule in deployment.log("site-0")
    for text in (deployment.log("run-own-code"), deployment.log("site-1")):
        assert "this node runs only the Posy that is installed on it; the run brings own/nets.py" in " ".join(
            text.split()
        )
    assert deployment.summary("allowed")["status"] == "completed"
    assert deployment.summary("allowed")["sites"] == ["site-0", "site-1"]
