"""Two real nodes with the default policy: refused runs read no records, and an allowed run does not wait."""

import csv
import re
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from benchmarks.local_federation import Deployment

pytestmark = [pytest.mark.federation, pytest.mark.xdist_group("policy")]

NAMES = [f"site-{number}" for number in range(4)]
"""The registered sites. Only the first two are connected."""
CONNECTED = NAMES[:2]
SETTINGS = {"method": "fedavg", "dataset": "sites", "num-clients": 2, "num-server-rounds": 1, "device": "cpu"}
COLUMNS = {"input_columns": "age,systolic,crp"}
PATIENTS = 60
TIMEOUT = 90
"""Seconds of join-timeout, far more than two sites need to join."""


def words(**changes: object) -> list[str]:
    settings = SETTINGS | {key.replace("_", "-"): value for key, value in changes.items()}
    return [f"{key}={value}" for key, value in settings.items()]


def write_patients(path: Path, seed: int) -> list[str]:
    """Write a table of patients: name, three measurements, label. Return all cells of names and measurements."""
    rng = np.random.default_rng(seed)
    rows = [
        [f"Patient A{i}", *map(repr, rng.normal((50, 140, 2), (9, 20, 0.5)).round(5).tolist()), ("well", "ill")[i % 2]]
        for i in range(PATIENTS)
    ]
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([["name", "age", "systolic", "crp", "label"], *rows])
    return [cell for row in rows for cell in row[:-1]]


@pytest.fixture(scope="module")
def sites(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Deployment, list[str]]]:
    """Start a SuperLink and two sites. Return them with all cells of their tables."""
    folder = tmp_path_factory.mktemp("policy")
    deployment = Deployment(folder, NAMES)
    try:
        cells = [cell for number in range(2) for cell in write_patients(folder / f"{number}.csv", number)]
        for number, name in enumerate(CONNECTED):
            deployment.node(name, f"data={folder / f'{number}.csv'}", f"state-dir=state-{number}")
        for name in CONNECTED:
            deployment.until(lambda name=name: deployment.ready(name), name)
        yield deployment, cells
    finally:
        deployment.stop()


def run_log(deployment: Deployment, name: str) -> str:
    """Return the log of a run with single spaces."""
    return " ".join(deployment.log(f"run-{name}").split())


REFUSED: dict[str, tuple[dict[str, object], str]] = {
    "small-batch": (COLUMNS | {"batch_size": 1}, "site-0: .*, rule min-rows: batch-size = 1; .* 10 rows"),
    "own-code": (COLUMNS | {"model": "nets:f"}, r"the run contains own/nets\.py"),
    "label": (COLUMNS | {"classes": "x,y"}, r"\(other-classes"),
    "row": (COLUMNS | {"train_samples": 1, "seed": 5}, "train-samples = 1 .*has no effect"),
    "names": (COLUMNS | {"label_column": "name"}, "rule label: label-column = 'name'"),
    "extreme": (COLUMNS | {"feature_mean": 0, "feature_std": "1e-38"}, r"\(extreme-value"),
    "file": ({"dataset": "payroll.csv"}, "rule data: dataset = "),
    "dot-file": (COLUMNS | {"model": ".py:f"}, r"the run contains own/\.py"),
}
"""Settings that a site refuses, by name, with the pattern of the error."""
TOGETHER = ("small-batch", "own-code", "label")
"""Refused runs that .ci/run includes."""


@pytest.mark.parametrize(
    "together", [pytest.param(TOGETHER, marks=pytest.mark.core), tuple(REFUSED)[3:6], tuple(REFUSED)[6:]], ids=",".join
)
def test_refused_runs_read_no_records_and_run_no_code(
    together: tuple[str, ...], sites: tuple[Deployment, list[str]]
) -> None:
    """Each run once succeeded in reading cells, names, labels or other files, or in running code."""
    deployment, cells = sites
    folder = deployment.folder
    (folder / "payroll.csv").write_text("salary,label\n" + "".join(f"{1000 + i},{i % 2}\n" for i in range(40)))
    network = "from torch import nn\n\n\ndef f(task):\n    return nn.Linear(3, task.num_classes)\n"
    (folder / "nets.py").write_text(network)
    (folder / ".py").write_text(
        f"from pathlib import Path\n\nname = Path('/proc/self/comm').read_text().split()[0]\n"
        f"Path({str(folder)!r}, 'ran-' + name).touch()\n{network}"
    )
    for name in together:
        settings, _ = REFUSED[name]
        if "dataset" in settings:
            settings = settings | {"dataset": folder / settings["dataset"]}
        deployment.submit(name, *words(**settings))
    for name in together:
        assert deployment.ended(f"run-{name}") != 0
        assert re.search(REFUSED[name][1], run_log(deployment, name))
        assert not [cell for cell in [*cells, "'ill'", "0.csv", "1.csv"] if cell in run_log(deployment, name)]
    if together == TOGETHER:
        assert "rule min-rows: batch-size = 1" in deployment.log("site-0")
        assert "the run contains own/nets.py" in " ".join(deployment.log("site-1").split())
    assert not [path.name for path in folder.glob("ran-*") if path.name in ("ran-node", "ran-worker")]


def test_an_allowed_run_starts_with_two_of_four_sites(sites: tuple[Deployment, list[str]]) -> None:
    deployment, _ = sites
    begun = time.monotonic()
    settings = {"num_clients": 4, "min_clients": 2, "join_timeout": TIMEOUT, "num_server_rounds": 2}
    summary = deployment.run("two", *words(**COLUMNS, **settings))
    assert (summary["status"], summary["dropped"], summary.get("left-out")) == ("completed", {}, None)
    assert summary["sites"] == [*CONNECTED, None, None]
    assert "no answer in time" not in deployment.log("run-two")
    assert time.monotonic() - begun < TIMEOUT, deployment.log("run-two")
