"""A run starts with the connected sites when other sites are absent. The federation uses real processes."""

import time
from pathlib import Path

import numpy as np
import pytest
from nodes import LENIENT
from sklearn.datasets import load_digits

from benchmarks.local_federation import Deployment

pytestmark = [pytest.mark.federation, pytest.mark.xdist_group("processes")]

TIMEOUT = 90
"""Seconds of join-timeout, far more than two sites need to join."""


def test_a_run_starts_with_two_of_four_sites(tmp_path: Path) -> None:
    x, y = load_digits(return_X_y=True)
    deployment = Deployment(tmp_path, [f"site-{number}" for number in range(4)])
    try:
        for number in range(2):
            np.savez(tmp_path / f"{number}.npz", x_train=x[number::20].astype(np.float32), y_train=y[number::20])
            words = [f"data={tmp_path / f'{number}.npz'}", f"policy={LENIENT}", f"state-dir=state-{number}"]
            deployment.node(f"site-{number}", *words)
        for number in range(2):
            deployment.until(lambda name=f"site-{number}": deployment.ready(name), f"site-{number}")
        settings = {
            "method": "fedavg", "dataset": "sites", "num-clients": 4, "min-clients": 2, "join-timeout": TIMEOUT,
            "num-server-rounds": 2, "device": "cpu",
        }  # fmt: skip
        begun = time.monotonic()
        deployment.submit("two", *(f"{key}={value}" for key, value in settings.items()))
        deployment.ended("run-two")
        seconds = time.monotonic() - begun
    finally:
        deployment.stop()
    log = deployment.log("run-two")
    assert (tmp_path / "runs/two/summary.json").exists(), log
    summary = deployment.summary("two")
    assert (summary["status"], summary["dropped"], summary.get("left-out")) == ("completed", {}, None)
    assert summary["sites"] == ["site-0", "site-1", None, None]
    assert "no answer in time" not in log
    assert seconds < TIMEOUT, log
