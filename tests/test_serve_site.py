"""`posy serve --site`: the current model of a site, which changes with newer runs and with `posy models --use`."""
# ruff: noqa: F811 - the fixtures

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from test_library import folder_of, posy_command, runs, state  # noqa: F401 - fixtures
from test_serve import Running
from test_serve_reload import LOOK, wait_for

import posy
from posy.commands.launch import Connection
from posy.commands.serve import serving
from posy.serve.server import Options
from posy.settings import SettingsError

OPTIONS = Options(http_port=0, grpc_port=0, reload_seconds=LOOK)


@pytest.fixture
def service(state: Path) -> Iterator[Running]:
    """Serve the sites' current models."""
    running = Running(state, OPTIONS, site=True)
    yield running
    running.stop()


def probabilities(service: Running, model: str, x: np.ndarray) -> np.ndarray:
    """Return the answer of a model to rows of a table."""
    tensor = {"name": "features", "datatype": "FP64", "shape": list(x.shape), "data": x.ravel().tolist()}
    answer = service.get(f"v2/models/{model}/infer", {"inputs": [tensor], "outputs": [{"name": "probabilities"}]})
    return np.reshape(answer["outputs"][0]["data"], answer["outputs"][0]["shape"])


def run_of(service: Running, model: str) -> str:
    return str(service.get(f"v2/models/{model}/card")["run"])


def expected(folder: Path, site: str, x: np.ndarray) -> list[list[float]]:
    """Return the answer of the model that a run has stored for a site."""
    return [list(each.probabilities.values()) for each in posy.load(folder).predictor(site).predict_all(x)]


def test_each_site_has_its_current_model(service: Running, state: Path, runs: Path) -> None:
    x = np.load(runs / "rows.npy").astype(float)
    states = service.http.get_model_repository_index()
    assert [each["name"] for each in states] == ["site-0", "site-1", "site-2"]  # and no combination
    for site, name in (("site-0", "cut"), ("site-1", "cut"), ("site-2", "complete")):
        folder = folder_of(state, name)
        assert run_of(service, site) == folder.name
        np.testing.assert_allclose(probabilities(service, site, x), expected(folder, site, x), atol=1e-6)
    card = service.get("v2/models/site-0/card")
    table = posy.load(runs / "runs" / "cut").clients.set_index(["round", "site"])
    assert card["scores"]["accuracy"] == pytest.approx(table.loc[(2, "site-0"), "served_accuracy"])


def test_the_service_changes_to_the_pinned_run(
    service: Running,
    state: Path,
    runs: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    x, complete = np.load(runs / "rows.npy").astype(float), folder_of(state, "complete")
    posy_command(capsys, "models", state, "--use", "complete")
    wait_for(lambda: run_of(service, "site-0") == complete.name)
    np.testing.assert_allclose(probabilities(service, "site-0", x), expected(complete, "site-0", x), atol=1e-6)
    posy_command(capsys, "models", state, "--use-newest")
    wait_for(lambda: run_of(service, "site-0") == folder_of(state, "cut").name)


def test_the_service_changes_to_the_final_model_of_a_newer_run(
    state: Path,
    runs: Path,
    tmp_path: Path,
) -> None:
    """The newer run stores the models of one site after the other; no request fails meanwhile."""
    x, newer = np.load(runs / "rows.npy").astype(float), folder_of(state, "cut")
    complete = folder_of(state, "complete").name
    moved = newer.rename(tmp_path / newer.name)
    service = Running(state, OPTIONS, site=True)
    answers: list[np.ndarray] = []

    def answered_by(run: str) -> bool:
        answers.append(probabilities(service, "site-0", x))
        return run_of(service, "site-0") == run

    try:
        assert {run_of(service, f"site-{site}") for site in range(3)} == {complete}
        (newer / "models").mkdir(parents=True)
        for file in sorted((moved / "models").glob("*-2.safetensors")):  # not final, so site-2 keeps its model
            shutil.copy2(file, newer / "models")
        answered = len(answers) + 20
        wait_for(lambda: answered_by(newer.name) or len(answers) >= answered)
        assert run_of(service, "site-0") == run_of(service, "site-2") == complete
        for file in sorted((moved / "models").glob("*-0.safetensors")):
            shutil.copy2(file, newer / "models")
        wait_for(lambda: answered_by(newer.name))
        assert run_of(service, "site-1") == run_of(service, "site-2") == complete
        np.testing.assert_allclose(answers[0], expected(state / complete, "site-0", x), atol=1e-6)
        np.testing.assert_allclose(probabilities(service, "site-0", x), expected(newer, "site-0", x), atol=1e-6)
    finally:
        service.stop()


def test_a_model_that_is_not_final_causes_a_warning(state: Path, caplog: pytest.LogCaptureFixture) -> None:
    shutil.rmtree(folder_of(state, "complete"))
    service = Running(state, OPTIONS, site=True)
    service.stop()
    assert "site-2: this model is of round 1 of 2" in caplog.text and "site-0: " not in caplog.text


def test_only_the_folder_of_a_node_is_a_site(
    runs: Path,
    state: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    _, error = posy_command(capsys, "serve", "--site", runs / "runs" / "complete", status=2)
    assert "is a run's folder on the server; name the state-dir or models folder of a node" in error
    _, error = posy_command(capsys, "serve", "--site", tmp_path / "empty", status=2)
    assert "no run in" in error
    where = Connection("localhost:8000")
    with pytest.raises(SettingsError, match="--superlink has no effect"):
        serving(str(state), OPTIONS, where, site=True)
