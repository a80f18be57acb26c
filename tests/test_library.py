"""The models of several runs at a site: the current one, the list of all, their removal, and queries to routed runs."""

import json
import os
import shutil
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord, Message
from nodes import NodeGrid
from sklearn.datasets import load_digits

import posy
from posy.client_app.library import PIN, Library
from posy.client_app.stored import ClientModel
from posy.commands import cli
from posy.flower import record_in
from posy.serve.run_models import load_endpoints
from posy.server_app.app import run
from posy.server_app.record import Record
from posy.settings import SettingsError
from posy.storage import read_arrays, write_arrays
from posy.strategies import exchange
from posy.strategies.feddrm import route_queries

Config = dict[str, Any]
SITES = 3
CONFIG: Config = {
    "dataset": "sites",
    "num-clients": SITES,
    "num-server-rounds": 2,
    "model": "mlp",
    "device": "cpu",
    "stack": "loop",
    "local-epochs": 2,
    "join-timeout": 5.0,
}


class CutGrid(NodeGrid):
    """A grid whose last node leaves before round 2."""

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        wave = list(messages)
        rounds = [record_in(message.content, "config", ConfigRecord).get("server-round", 0) for message in wave]
        if 2 in rounds and SITES in self.nodes:
            self.leave(SITES)
        return super().push_messages(wave)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run FedAvg twice and FedDRM once. All sites share a state-dir. The last one leaves the second run early."""
    folder = tmp_path_factory.mktemp("sites")
    x, y = load_digits(return_X_y=True)
    for site in range(SITES):
        np.savez(folder / f"{site}.npz", x_train=x[site::6].astype(np.float32), y_train=y[site::6])
    usual = x[(np.abs(x - x.mean(0)) <= 3.5 * x.std(0)).all(1)][:4]  # `posy predict` warns about other rows
    np.save(folder / "rows.npy", usual)
    rows = [",".join(map(str, row)) for row in usual.tolist()]
    (folder / "rows.csv").write_text("\n".join([",".join(f"p{i}" for i in range(64)), *rows]) + "\n")

    def configs(**places: str) -> list[Config]:
        return [{"data": str(folder / f"{i}.npz"), "name": f"site-{i}", **places} for i in range(SITES)]

    common = {**CONFIG, "output-dir": str(folder / "runs")}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(exchange, "SAVE_SECONDS", -1.0)  # clients store their models in every round
        shared = configs(**{"state-dir": str(folder / "state")})
        run(NodeGrid(*shared), {**common, "method": "fedavg", "run-name": "complete"})
        run(CutGrid(*shared), {**common, "method": "fedavg", "run-name": "cut"})
        for site, config in enumerate(configs(models=str(folder / "models"))):
            shared[site] = config | {"models": str(folder / f"models-{site}")}
        run(NodeGrid(*shared), {**common, "method": "feddrm", "run-name": "routed"})
    return folder


@pytest.fixture
def state(runs: Path, tmp_path: Path) -> Path:
    """Return a copy of the sites' state-dir that has not changed for two days."""
    shutil.copytree(runs / "state", tmp_path / "state")
    age(tmp_path / "state", 2 * 86_400)
    return tmp_path / "state"


def age(folder: Path, seconds: float) -> None:
    for path in (folder, *folder.rglob("*")):
        os.utime(path, (time.time() - seconds,) * 2)


def posy_command(capsys: pytest.CaptureFixture[str], *words: object, status: int = 0) -> tuple[str, str]:
    """Run a command, check its exit status, and return its output and its error output."""
    capsys.readouterr()
    assert cli.main([*map(str, words)]) == status
    captured = capsys.readouterr()
    return captured.out, captured.err


def folder_of(state: Path, name: str) -> Path:
    return next(state.glob(f"{name}-*"))


# -- the current model -----------------------------------------------------------------------------------


def test_a_site_predicts_with_its_newest_final_model(
    state: Path, runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The last site has a newer model, but of round 1 of a run that has ended without the site."""
    rows = runs / "rows.csv"
    complete, cut = (folder_of(state, name).name for name in ("complete", "cut"))
    output, error = posy_command(capsys, "predict", state, "site-0", rows)
    assert f"site-0 (client 0), served model of round 2 of {cut}" in output and not error
    output, error = posy_command(capsys, "predict", state, "site-2", rows)
    assert f"site-2 (client 2), served model of round 2 of {complete}" in output
    assert f"the model of {complete} is used, although {cut} is newer (this model is of round 1 of 2" in error
    assert posy.load(state).path.parent.name == cut
    output, error = posy_command(capsys, "predict", folder_of(state, "cut"), 2, rows)
    assert "model of round 1 of" in output and "warning: this model is of round 1 of 2" in error
    _, error = posy_command(capsys, "predict", state, "site-9", rows, status=2)
    assert "client 'site-9'" in error and "has the models of site-0, site-1, site-2" in error


def test_a_site_without_a_final_model_uses_its_newest(
    state: Path, runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(folder_of(state, "complete"))
    output, error = posy_command(capsys, "predict", state, "site-2", runs / "rows.csv")
    assert "model of round 1 of cut-" in output and "warning: this model is of round 1 of 2" in error


def test_a_pinned_run_is_the_current_one(state: Path, runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = runs / "rows.csv"
    assert "is the current run" in posy_command(capsys, "models", state, "--use", "complete")[0]
    for site in ("site-0", "site-2"):
        output, error = posy_command(capsys, "predict", state, site, rows)
        assert "of round 2 of complete-" in output and "is newer (another run is pinned)" in error
    posy_command(capsys, "models", state, "--use", "cut")
    output, _ = posy_command(capsys, "predict", state, "site-2", rows)
    assert "of round 1 of cut-" in output
    posy_command(capsys, "models", state, "--use-newest")
    assert not (state / PIN).exists()
    assert "of round 2 of cut-" in posy_command(capsys, "predict", state, "site-0", rows)[0]
    _, error = posy_command(capsys, "models", state, "--use", "nowhere", status=2)
    assert "'nowhere': no run in" in error and "newest runs: " in error
    _, error = posy_command(capsys, "models", runs / "runs", "--use", "complete", status=2)
    assert "is a server's run" in error


def test_the_service_offers_the_current_models(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    endpoints = load_endpoints(Record.find(state))
    assert endpoints.keys() == {"site-0", "site-1", "site-2"}
    assert endpoints["site-0"].version == "2"
    posy_command(capsys, "models", state, "--use", "complete")
    assert Record.find(state).name == folder_of(state, "complete").name


def test_a_client_without_a_local_model_votes_with_its_served_model(tmp_path: Path) -> None:
    small: dict[str, Any] = {"num_clients": 4, "max_samples": 200, "num_server_rounds": 1, "output_dir": str(tmp_path)}
    record = posy.run(method="fedavg", model="linear", fraction_train=0.5, **small)
    endpoints = load_endpoints(record)
    assert {ClientModel.load(path).point for path in record.files.values()} == {"served", "local"}
    assert list(endpoints["majority-vote"].models) == [0, 1, 2, 3]


def test_models_in_another_folder_are_found(runs: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    output, _ = posy_command(capsys, "predict", runs / "models-1", "site-1", runs / "rows.csv")
    assert "site-1 (client 1), served model of round 2 of routed-" in output
    (tmp_path / "state/one-00/client-0").mkdir(parents=True)
    _, error = posy_command(capsys, "predict", tmp_path / "state", "site-1", runs / "rows.csv", status=2)
    assert "have no models" in error and "If the node config sets models, name this folder" in error


def test_models_of_earlier_versions_have_no_scores(state: Path) -> None:
    """They lack the entries final, time and scores, so the round and the file's time replace the first two."""
    for file in state.rglob("*.safetensors"):
        if file.parent.name == "models":
            arrays, metadata = read_arrays(file)
            old = {key: value for key, value in metadata.items() if key not in ("final", "time", "scores", "num-test")}
            write_arrays(file, {name: array.copy() for name, array in arrays.items()}, old)
            os.utime(file, (1_000_000 + ("complete" in str(file)),) * 2)
    library = Library(state)
    current = library.current("site-0")
    assert current is not None and current.name.startswith("complete-")
    model = current.stored[0]
    assert (model.final, model.scores, model.time) == (True, {}, 1_000_001)
    cut = library.find("cut")
    assert (cut.stored[0].final, cut.stored[2].final) == (True, False)


# -- lists and removal -----------------------------------------------------------------------------------


def test_the_list_shows_rounds_scores_and_the_current_model(
    state: Path, runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output, _ = posy_command(capsys, "models", state)
    lines = {tuple(line.split()[:4:3]): line for line in output.splitlines() if "site-" in line}
    assert len(lines) == 6
    cut, complete = (folder_of(state, name).name for name in ("cut", "complete"))
    assert "may be in progress" not in output  # the fixture makes the files old
    assert lines[cut, "site-0"].endswith("  current") and "2 of 2" in lines[cut, "site-0"]
    assert lines[cut, "site-2"].endswith("  not final") and "1 of 2" in lines[cut, "site-2"]
    assert lines[complete, "site-2"].endswith("  current") and lines[complete, "site-0"].endswith("B")
    rows = json.loads(posy_command(capsys, "models", state, "--json")[0])
    table = posy.load(runs / "runs" / "complete").clients.set_index(["round", "site"])
    for row in (row for row in rows if row["run"] == complete):
        recorded = table.loc[(2, row["site"]), "served_accuracy"]
        assert row["scores"]["accuracy"] == pytest.approx(recorded)
        assert row["num-test"] == table.loc[(2, row["site"]), "n_test"]
        assert f"accuracy {100 * recorded:.2f} %" in lines[complete, row["site"]]
    assert {row["run"] for row in rows if row["current"]} == {cut, complete}
    output, _ = posy_command(capsys, "models", runs / "runs")
    assert "no models, completed" in output
    _, error = posy_command(capsys, "models", runs / "nothing", status=2)
    assert "contains no run" in error


def test_old_runs_are_removed_only_after_confirmation(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    complete, cut = folder_of(state, "complete"), folder_of(state, "cut")
    _, error = posy_command(capsys, "models", state, "--keep", 0)
    assert f"{complete.name} stays: it is the current run" in error  # of site-2
    (cut / "models/client-2.safetensors").unlink()
    (cut / "models/served-2.safetensors").unlink()
    posy_command(capsys, "models", state, "--use", "cut")
    (complete / "models/client-2.safetensors").unlink()
    age(state, 2 * 86_400)
    output, error = posy_command(capsys, "models", state, "--keep", 1, status=1)
    assert f"would remove {complete}" in output and "nothing is removed without --yes" in error and complete.is_dir()
    output, _ = posy_command(capsys, "models", state, "--keep", 1, "--yes")
    assert f"removed {complete}" in output and not complete.exists() and cut.is_dir()
    output, _ = posy_command(capsys, "models", state, "--remove", "cut", "--yes")
    assert "this is the current run" in output and not cut.exists() and not (state / PIN).exists()
    assert posy_command(capsys, "models", state, status=2)[1].count("contains no run") == 1


def test_only_a_run_without_final_models_may_be_in_progress(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    age(state, 0)
    output, _ = posy_command(capsys, "models", state)
    for name, notes in (("cut", True), ("complete", False)):
        lines = [line for line in output.splitlines() if folder_of(state, name).name in line]
        assert len(lines) == 3 and all(("may be in progress" in line) == notes for line in lines)


@pytest.mark.parametrize(("name", "hours", "refused"), [("cut", 20, True), ("cut", 30, False), ("complete", 1, False)])
def test_a_run_that_may_be_in_progress_is_not_removed(
    name: str, hours: float, refused: bool, state: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    age(state, 3600 * hours)
    folder = folder_of(state, name)
    _, error = posy_command(capsys, "models", state, "--remove", name, "--yes", status=2 if refused else 0)
    assert folder.exists() == refused
    assert ("may be in progress" in error) == refused


def test_removal_from_runs_keeps_the_record(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copied = shutil.copytree(runs / "runs" / "complete", tmp_path / "runs" / "complete")
    posy_command(capsys, "models", tmp_path / "runs", "--remove", "complete", "--yes")
    assert not (copied / "models").exists() and (copied / "summary.json").is_file()


# -- queries of unknown origin ---------------------------------------------------------------------------


def test_the_server_ranks_clients_without_their_models(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The server's ranking uses its shared layers and the sites' numbers of samples."""
    x = np.load(runs / "rows.npy")
    record = posy.load(runs / "runs" / "routed")
    answers = record.route(list(x))
    model = posy.load(runs / "models-1").predictor("site-1")
    logits = model.client_logits(model.prepare(list(x)))
    sizes = record.clients[record.clients["round"] == 2].sort_values("partition")["n_train"].to_numpy(float)
    assert [next(iter(answer.clients)) for answer in answers] == route_queries(logits, sizes).tolist()
    assert all(answer.prediction is None for answer in answers)
    assert all(sum(answer.clients.values()) == pytest.approx(1) for answer in answers)
    output, error = posy_command(capsys, "route", record.path, runs / "rows.csv")
    first = next(iter(answers[0].clients))
    assert f"ask site-{first} (client {first})" in output and not error
    rows = json.loads(posy_command(capsys, "route", record.path, runs / "rows.csv", "--json")[0])
    assert (rows[0]["client"], rows[0]["class"], rows[0]["probabilities"]) == (first, None, None)


def test_a_site_ranks_clients_and_predicts_only_for_itself(
    runs: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    record = posy.load(runs / "models-1")
    x = list(load_digits().data[:300])
    answers = record.route(x)
    model = record.predictor("site-1")
    logits = model.client_logits(model.prepare(x))
    chosen = [next(iter(answer.clients)) for answer in answers]
    assert chosen == logits.argmax(-1).tolist() and set(chosen) > {1}
    for sample, client, answer in zip(x, chosen, answers, strict=True):
        assert answer.prediction == (model.predict(sample) if client == 1 else None)
    output, _ = posy_command(capsys, "route", runs / "models-1", runs / "rows.csv")
    assert "client 0 " in output or "client 2 " in output
    assert "site-1 (client 1) " in output
    assert "does not know how many samples the other sites have" in caplog.text


def test_a_single_model_does_not_answer_for_the_federation(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A routed query still ranks all clients, and a vote needs at least two models."""
    for name, method in (("routed", "feddrm"), ("complete", "fedavg")):
        copied = shutil.copytree(runs / "runs" / name, tmp_path / name)
        source = runs / "models-0" if method == "feddrm" else runs / "state"
        for file in source.glob(f"{name}-*/**/*-0.safetensors"):
            shutil.copy(file, copied / "models")
    answers = posy.load(tmp_path / "routed").route(list(load_digits().data[:50]))
    assert all(sorted(answer.clients) == [0, 1, 2] for answer in answers)
    assert {answer.prediction is None for answer in answers} == {True, False}
    _, error = posy_command(capsys, "route", tmp_path / "complete", runs / "rows.csv", status=2)
    assert "lacks the models of site-1 (client 1), site-2 (client 2): with method = 'fedavg'" in error
    _, error = posy_command(capsys, "route", runs / "runs" / "complete", runs / "rows.csv", status=2)
    assert "stay on the clients' nodes" in error


def test_a_vote_of_some_clients_names_the_missing_models(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    state = shutil.copytree(runs / "state", tmp_path / "state")
    models = folder_of(Path(state), "complete") / "models"
    output, error = posy_command(capsys, "route", models, runs / "rows.csv")
    assert "majority vote" in output and not error and "clients vote" not in caplog.text
    (models / "client-1.safetensors").unlink()
    (models / "served-1.safetensors").unlink()
    posy_command(capsys, "route", models, runs / "rows.csv")
    assert "2 of 3 clients vote: the models of client 1 are missing" in caplog.text
    (models / "client-2.safetensors").unlink()
    with pytest.raises(SettingsError, match="lacks the models of client 1, client 2"):
        posy.load(models).route([np.zeros(64)])
