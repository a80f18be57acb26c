"""Three real nodes over gRPC: the server knows their names, and one node chooses its settings."""

import csv
import json
from collections.abc import Iterator

import numpy as np
import pytest
from nodes import LENIENT, NodeGrid, table

from benchmarks.local_federation import Deployment
from posy.server_app.app import run
from posy.storage import load_arrays

pytestmark = [pytest.mark.federation, pytest.mark.slow, pytest.mark.xdist_group("node-settings")]

NAMES = ["site-a", "site-b", "site-c"]
CHOSEN = ["local-epochs=3", "batch-size=16"]
SETTINGS = {
    "method": "scaffold",
    "dataset": "sites",
    "num-clients": 3,
    "num-server-rounds": 2,
    "model": "linear",
    "device": "cpu",
}
IN_PROCESS = {"site-a": {"lr": 0.1}, "site-b": {"local-epochs": 3, "batch-size": 16, "lr": 0.02}}
"""The same settings as a mapping of names: the run sets the rates of two sites, and site-b chooses the rest."""


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """Start a SuperLink and three sites. The node configs contain no names, because the keys are registered."""
    folder = tmp_path_factory.mktemp("node-settings")
    rng, federation = np.random.default_rng(1), Deployment(folder, NAMES)
    try:
        for name in NAMES:
            x = rng.normal(size=(70, 4))
            data = table(folder / f"{name}.csv", x, (x.sum(axis=1) > 0).astype(int))
            words = [f"data={data}", f"policy={LENIENT}", *(CHOSEN if name == "site-b" else [])]
            federation.node(name, *words)
        for name in NAMES:
            federation.until(lambda name=name: federation.ready(name), name)
        yield federation
    finally:
        federation.stop()


def words(**more: str) -> list[str]:
    return [f"{key.replace('_', '-')}={value}" for key, value in {**SETTINGS, **more}.items()]


def test_a_site_with_its_own_settings_trains_as_in_process(deployment: Deployment) -> None:
    by_name = json.dumps({"site-a": {"lr": 0.1}, "site-b": {"lr": 0.02, "local-epochs": 1}})
    deployment.run("own", *words(client_bounds="local-epochs: 1..5, batch-size: 4..64", client_settings=by_name))
    with (deployment.results("own") / "clients.csv").open(newline="") as file:
        chosen = {row["site"]: row["node_settings"] for row in csv.DictReader(file)}
    assert chosen == {"site-a": "", "site-b": "batch-size=16 local-epochs=3", "site-c": ""}
    nodes = NodeGrid(*({"data": str(deployment.folder / f"{name}.csv"), "name": name} for name in NAMES))
    changes = {"output-dir": str(deployment.folder / "in-process"), "client-settings": json.dumps(IN_PROCESS)}
    run(nodes, SETTINGS | changes | {"run-name": "same"})
    real, same = (
        load_arrays(folder / "models/server.safetensors")
        for folder in (deployment.results("own"), deployment.folder / "in-process/same")
    )
    assert real.keys() == same.keys() >= {"model", "control"}
    for name, array in real.items():
        assert np.array_equal(array, same[name]), name


def test_a_site_refuses_a_run_that_does_not_allow_its_settings(deployment: Deployment) -> None:
    deployment.submit("refused", *words(client_bounds="local-epochs: 1..2", join_timeout="60"))
    assert deployment.ended("run-refused") != 0
    server = " ".join(deployment.log("run-refused").split())
    assert "site-b is excluded: batch-size = 16 in the node config" in server
    (line, *_) = [line for line in deployment.log("site-b").splitlines() if "has refused a message" in line]
    assert "batch-size = 16 in the node config" in line
    assert "Traceback" not in deployment.log("site-b")
