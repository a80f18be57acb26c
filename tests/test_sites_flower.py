"""Sites with their own data on a real SuperLink and SuperNodes of their own processes, one of them Flower's own."""

from pathlib import Path

import numpy as np
import pytest
from nodes import pfllib, table

from benchmarks.local_federation import Deployment
from posy.data.datasets import load_dataset
from posy.data.settings import DataSettings


@pytest.mark.slow
@pytest.mark.xdist_group("flower")
def test_three_sites_and_a_bad_one_on_their_own_nodes(tmp_path: Path) -> None:
    digits = load_dataset(DataSettings(), Path(), 0)
    x, y = digits.x.reshape(len(digits), -1).astype(np.float32), digits.y
    few = np.flatnonzero(y[200:400] < 7) + 200
    np.savez(tmp_path / "a.npz", x_train=x[:150], y_train=y[:150], x_test=x[150:200], y_test=y[150:200])
    table(tmp_path / "b.csv", x[few], y[few])
    pfllib(tmp_path / "c", x[400:500], y[400:500], 20)
    broken = x[500:520].copy()
    broken[3, 5] = np.nan
    np.savez(tmp_path / "d.npz", x_train=broken, y_train=y[500:520])

    deployment = Deployment(tmp_path, [f"site-{name}" for name in "abcd"])
    try:
        for file, *more in (("c",), ("d.npz",), ("a.npz",), ("b.csv", "--stock")):
            deployment.node(f"site-{file[0]}", *more, f"data={tmp_path / file}", f"state-dir=state-{file[0]}")
        words = ["dataset=sites", "num-clients=4", "min-clients=3", "join-timeout=120", "method=fedavg", "model=mlp"]
        words += ["device=cpu", "num-server-rounds=2", "evaluate-every=2", "local-epochs=10"]
        summary = deployment.run("one", *words)
        log = deployment.log("run-one")
    finally:
        deployment.stop()
    assert (summary["status"], summary["dropped"], summary["system-accuracy"]) == ("completed", {}, None)
    assert summary["sites"] == ["site-a", "site-b", "site-c", None]
    (left_out,) = summary["left-out"]
    assert (left_out["site"], left_out["times"]) == ("site-d", 1)
    assert left_out["reason"].startswith(f"{tmp_path / 'd.npz'}: nan at index (3, 5); only finite numbers are allowed")
    assert log.count("site-d is left out") == 1
    assert summary["served"]["last"]["mean"] > 0.6
    rows = (tmp_path / "runs/one/clients.csv").read_text().splitlines()[1:]
    counts = {tuple(row.split(",")[1:4]) for row in rows}
    assert counts == {
        ("0", "150", "50"),
        ("1", str(len(few) - round(len(few) / 4)), str(round(len(few) / 4))),
        ("2", "80", "20"),
    }
