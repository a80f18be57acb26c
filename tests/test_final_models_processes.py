"""A site that leaves a run of real processes receives the final model after the run, and then uses it."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from nodes import LENIENT
from sklearn.datasets import load_digits

from benchmarks.local_federation import MOST_SECONDS, Deployment
from posy.commands import cli

pytestmark = [pytest.mark.federation, pytest.mark.xdist_group("final-models")]

SITES, ROUNDS = 3, 40


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    deployment = Deployment(tmp_path_factory.mktemp("final"), [f"site-{i}" for i in range(SITES)])
    x, y = load_digits(return_X_y=True)
    try:
        for i in range(SITES):
            np.savez(deployment.folder / f"{i}.npz", x_train=x[i::4].astype(np.float32), y_train=y[i::4])
            start(deployment, i)
        yield deployment
    finally:
        deployment.stop()


def start(federation: Deployment, number: int) -> None:
    name, data = f"site-{number}", federation.folder / f"{number}.npz"
    federation.node(name, f"data={data}", f"policy={LENIENT}", f"state-dir={federation.folder / f'state-{number}'}")
    federation.until(lambda: federation.ready(name), name, MOST_SECONDS)


def models_of(federation: Deployment, site: int, capsys: pytest.CaptureFixture[str]) -> list[dict[str, object]]:
    capsys.readouterr()
    assert cli.main(["models", str(federation.folder / f"state-{site}"), "--json"]) == 0
    rows: list[dict[str, object]] = json.loads(capsys.readouterr().out)
    return rows


def test_a_site_that_left_receives_the_final_model(
    federation: Deployment, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = ["dataset=sites", f"num-clients={SITES}", "method=fedrep", "model=mlp", "device=cpu", "local-epochs=3"]
    federation.submit("left", *words, f"num-server-rounds={ROUNDS}")
    federation.until(lambda: len(federation.rounds("left")) >= 2, "run-left", MOST_SECONDS)
    federation.processes["site-2"].terminate()
    assert federation.ended("run-left") == 0, federation.log("run-left")
    assert federation.processes["site-2"].wait(MOST_SECONDS) == 0
    summary = federation.summary("left")
    assert (summary["status"], summary["without-final-model"]) == ("completed", [2])
    log = federation.log("run-left")
    assert "without final model  site-2; " in log
    command = f"posy run resume=left output-dir=runs {' '.join(federation.where)}"
    assert f"deliver the final model to the clients without it: {command}" in log
    (old,) = models_of(federation, 2, capsys)
    assert (old["round"], old["rounds"], old["final"], old["current"]) == (1, ROUNDS, False, True)
    (row,) = models_of(federation, 0, capsys)
    assert (row["round"], row["final"]) == (ROUNDS, True)
    rows = tmp_path / "rows.npy"
    np.save(rows, load_digits().data[1000:1003])
    predict = ["predict", str(federation.folder / "state-2"), "site-2", str(rows)]
    assert cli.main(predict) == 0
    assert f"this model is of round 1 of {ROUNDS}" in capsys.readouterr().err

    start(federation, 2)
    federation.submit("deliver", "resume=left")
    assert federation.ended("run-deliver") == 0, federation.log("run-deliver")
    assert f"final models of round {ROUNDS} delivered to site-2 (client 2)" in federation.log("run-deliver")
    assert federation.summary("left") == {**summary, "without-final-model": []}
    (new,) = models_of(federation, 2, capsys)
    assert (new["round"], new["final"], new["current"]) == (ROUNDS, True, True)
    assert isinstance(new["scores"], dict) and new["scores"]["accuracy"] > 0.8
    assert cli.main(predict) == 0
    captured = capsys.readouterr()
    assert f"model of round {ROUNDS} of left-" in captured.out and "this model is of round" not in captured.err
