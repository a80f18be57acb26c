"""The default policy on a real node: it refuses a run by its rule, and code that differs from the installed Posy."""

import csv
from pathlib import Path

import numpy as np
import pytest
from sklearn.datasets import load_digits

from benchmarks.local_federation import Deployment

pytestmark = [pytest.mark.federation, pytest.mark.core, pytest.mark.xdist_group("policy")]
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


PATIENTS = 60
COLUMNS = {"input_columns": "age,systolic,crp"}


def patients(path: Path, seed: int) -> list[str]:
    """Write a table of patients: name, three measurements, label. Return all cells of names and measurements."""
    rng = np.random.default_rng(seed)
    rows = [
        [f"Patient A{i}", *map(repr, rng.normal((50, 140, 2), (9, 20, 0.5)).round(5).tolist()), ("well", "ill")[i % 2]]
        for i in range(PATIENTS)
    ]
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([["name", "age", "systolic", "crp", "label"], *rows])
    return [cell for row in rows for cell in row[:-1]]


def test_settings_alone_read_no_records(tmp_path: Path) -> None:
    """C1, C2 and H4: each run succeeded in reading cells, names, labels or other files, or in running code."""
    names = ["site-0", "site-1"]
    deployment = Deployment(tmp_path, names)
    cells = [cell for number in range(2) for cell in patients(tmp_path / f"{number}.csv", number)]
    (tmp_path / "payroll.csv").write_text("salary,label\n" + "".join(f"{1000 + i},{i % 2}\n" for i in range(40)))
    (tmp_path / ".py").write_text(
        f"from pathlib import Path\nfrom torch import nn\n\nname = Path('/proc/self/comm').read_text().split()[0]\n"
        f"Path({str(tmp_path)!r}, 'ran-' + name).touch()\n\n\ndef f(task):\n    return nn.Linear(3, task.num_classes)\n"
    )
    refusals = {
        "row": (COLUMNS | {"train_samples": 1, "seed": 5}, "train-samples = 1 on the command line has no effect"),
        "names": (COLUMNS | {"label_column": "name"}, "rule label: label-column = 'name'"),
        "cell": ({}, "a cell is not a finite number in the range of float32 (not-a-number, column name)"),
        "label": (COLUMNS | {"classes": "x,y"}, "it has labels that are not classes of the run (other-classes"),
        "extreme": (
            COLUMNS | {"feature_mean": 0, "feature_std": "1e-38"},
            "a feature may exceed the range of float32 after standardisation (extreme-value",
        ),
        "file": ({"dataset": tmp_path / "payroll.csv"}, "rule data: dataset = "),
        "dot-file": (COLUMNS | {"model": ".py:f"}, "the run brings own/.py"),
    }
    logs = {}
    try:
        for number, name in enumerate(names):
            deployment.node(name, f"data={tmp_path / f'{number}.csv'}", f"state-dir=state-{number}")
        for name in names:
            deployment.until(lambda name=name: deployment.ready(name), name)
        for name, (changes, _) in refusals.items():
            deployment.submit(name, *words(**changes))
            assert deployment.ended(f"run-{name}") != 0
            logs[name] = " ".join(deployment.log(f"run-{name}").split())
    finally:
        deployment.stop()
    for name, (_, reason) in refusals.items():
        assert reason in logs[name]
        assert not [cell for cell in [*cells, "'ill'", "0.csv", "1.csv"] if cell in logs[name]]
    assert not [path.name for path in tmp_path.glob("ran-*") if path.name in ("ran-node", "ran-worker")]
