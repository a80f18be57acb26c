"""Use of a finished run: its record, its clients' models, and their predictions for new samples."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from nodes import pfllib
from PIL import Image

import posy
from posy.client_app.local_run import LocalRun
from posy.client_app.stored import ClientModel
from posy.client_app.workspace import Workspace
from posy.commands import cli
from posy.data.errors import DataError
from posy.serve.endpoints import ClientEndpoint
from posy.server_app.app import run
from posy.server_app.record import Record
from posy.settings import SettingsError
from posy.storage import DamagedFileError, read_arrays, write_arrays
from posy.strategies.feddrm import FedDRM
from posy.strategies.methods import METHODS
from posy.strategies.registry import read_settings

MakeConfig = Callable[..., dict[str, Any]]
Noted = dict[tuple[int, str], tuple[int, list[int]]]


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> Noted:
    """Record the round of the last accuracy and the predicted classes, by client and point."""
    recorded: Noted = {}
    original = LocalRun._scores

    def scores(self: LocalRun, point: str, predictor: Any) -> Any:
        client = self.client
        if len(client.data.y_test):
            outputs = yield from client.predict(predictor, "test")
            recorded[client.client, point] = (client.round, outputs.argmax(dim=-1).tolist())
        return (yield from original(self, point, predictor))

    monkeypatch.setattr(LocalRun, "_scores", scores)
    return recorded


@pytest.mark.parametrize(
    ("method", "data"),
    [
        *((method, "features") for method in METHODS),
        *((method, "images") for method in ("fedfew", "cwfedavg", "fedacs", "feddrm", "ppfe", "fedavg")),
    ],
)
def test_predictions_match_the_recorded_accuracy(
    method: str, data: str, make_config: MakeConfig, noted: Noted, tmp_path: Path
) -> None:
    """Predict raw test samples at the method's point, and at each point that has a stored model."""
    if data == "features":
        config = make_config(method, num_server_rounds=4, model="mlp", lr=0.1)
    else:
        config = {
            "method": method,
            "num-clients": 3,
            "num-server-rounds": 3,
            "max-samples": 90,
            "model": "mlp",
            "local-epochs": 1,
            "fraction-train": 0.7,
            "output-dir": str(tmp_path),
        }
    record = run(None, config).record()
    workspace = Workspace(read_settings(config))
    last, compared = record.clients[record.clients["round"] == record.summary["rounds"]], 0
    for client, test in enumerate(workspace.partition.test):
        row = last[last["partition"] == client].iloc[0]
        for point in ("", "served", "local"):
            try:
                predictor = record.predictor(client, point)
            except SettingsError:
                assert point != ""
                continue
            assert point in ("", predictor.point) and not predictor.training
            if not len(test):
                continue
            at, classes = noted[client, predictor.point]
            assert predictor.round == at == record.summary["rounds"]
            labels = [p.label for p in predictor.predict_all(workspace.dataset.x[test])]
            assert labels == [predictor.class_names[number] for number in classes]
            y = workspace.dataset.y[test]
            right = np.mean([predictor.class_names[number] == label for number, label in zip(y, labels, strict=True)])
            assert row[f"{predictor.point}_accuracy"] == pytest.approx(right)
            compared += 1
        if method != "local":
            assert record.predictor(client).point == read_settings(config).method.point or client not in trained(last)
    assert compared >= 6


def trained(rows: Any) -> set[int]:
    return set(rows[rows["train_loss"].notna()]["partition"])


def raw_images(root: Path, count: int = 24) -> list[Path]:
    """Write grey images of two classes, larger than the input, and return the files by class and name."""
    rng = np.random.default_rng(3)
    files = []
    for number in range(count):
        path = root / ("bright" if number % 2 else "dark") / f"{number:02}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = rng.integers(0, 100, (20, 30)) + 120 * (number % 2)
        Image.fromarray(pixels.astype(np.uint8)).save(path)
        files.append(path)
    return sorted(files)


def run_on(dataset: Path, tmp_path: Path, **settings: Any) -> tuple[Record, Workspace]:
    """Run FedAvg with two clients on a file or folder, and return its record, and a workspace with its data."""
    data = {"dataset": str(dataset), "partition": "iid", "num-clients": 2, "num-server-rounds": 1, "method": "fedavg"}
    config = {**data, "output-dir": str(tmp_path / "runs"), "run-name": "one", **settings}
    return run(None, config).record(), Workspace(read_settings(config))


def assert_prepared_alike(record: Record, workspace: Workspace, raw: list[Any]) -> ClientModel:
    """Compare raw samples that the predictor prepares, in the order of the data, with the clients' test samples."""
    predictor = record.predictor(0)
    prepared = predictor.prepare(raw)
    for client, test in enumerate(workspace.partition.test):
        assert torch.equal(prepared[torch.from_numpy(test)], workspace.client_data(client).x_test)
    return predictor


def test_image_files_are_prepared_as_in_training(tmp_path: Path) -> None:
    files = raw_images(tmp_path / "images")
    record, workspace = run_on(tmp_path / "images", tmp_path, **{"image-size": 8})
    predictor = assert_prepared_alike(record, workspace, list(files))
    opened = Image.open(files[0])
    assert predictor.class_names == ("bright", "dark")
    expected = predictor.predict(str(files[0]))
    assert predictor.predict(opened) == predictor.predict(opened.convert("RGBA")) == expected
    assert sum(expected.probabilities.values()) == pytest.approx(1)
    pixels = workspace.dataset.x[0]
    assert predictor.predict(pixels[..., 0]) == predictor.predict(pixels)
    assert predictor.predict(pixels) == predictor.predict(pixels.transpose(2, 0, 1))
    before = pixels.copy()
    predictor.predict(pixels)
    assert np.array_equal(pixels, before)


def test_float_pixels_are_not_rescaled(tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(20, 6, 5, 3)).astype(np.float32)
    np.savez(tmp_path / "x.npz", x_train=x, y_train=np.arange(20) % 2)
    predictor = assert_prepared_alike(*run_on(tmp_path / "x.npz", tmp_path), raw=list(x))
    with pytest.raises(DataError, match=r"scale of its pixels.* images of 3x6x5"):
        predictor.predict(raw_images(tmp_path / "images", 2)[0])


def test_columns_of_rows_are_matched_by_name(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    rows = [{"size": rng.normal(1e6, 3), "weight": rng.normal(2, 1), "label": "ab"[i % 2]} for i in range(20)]
    table = tmp_path / "x.csv"
    table.write_text("size,weight,label\n" + "".join(f"{r['size']},{r['weight']},{r['label']}\n" for r in rows))
    record, workspace = run_on(table, tmp_path)
    predictor = assert_prepared_alike(record, workspace, [{k: r[k] for k in ("weight", "size")} for r in rows])
    assert torch.equal(predictor.prepare([[r["size"], r["weight"]] for r in rows[:3]]), predictor.prepare(rows[:3]))
    with pytest.raises(DataError, match=r"no size .*2 numbers \(size, weight\)"):
        predictor.predict({"weight": 1})
    with pytest.raises(DataError, match=r"array of shape 3.* rows of 2 numbers"):
        predictor.predict([1, 2, 3])


def test_a_value_far_from_the_training_samples_causes_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chol = [190.0, 290.0] * 20  # any training rows have a standard deviation below 50, and a mean between the two
    table = tmp_path / "x.csv"
    table.write_text("age,chol,label\n" + "".join(f"{50 + i % 9},{c},{i % 2}\n" for i, c in enumerate(chol)))
    record, workspace = run_on(table, tmp_path, partition="iid")
    rows = workspace.partition.train
    trained = np.array(chol)[np.concatenate(rows)]
    capsys.readouterr()
    new = tmp_path / "new.csv"
    new.write_text("age,chol\n54,240\n54,26000\n54,6.2\n1960,250\n")
    assert cli.main(["predict", str(record.path), "0", str(new), "--json"]) == 0
    captured = capsys.readouterr()
    assert len(json.loads(captured.out)) == 4
    first, second = [line for line in captured.err.splitlines() if "warning" in line]
    assert first.startswith(f"posy: warning: {new} row 3: chol is ")
    distance = (26000 - trained.mean()) / trained.std()
    assert f"chol is {distance:.3g} standard deviations" in first
    assert second.startswith(f"posy: warning: {new} row 5: age is ")
    assert cli.main(["route", str(record.path), str(new)]) == 0
    assert "row 3: chol is" in capsys.readouterr().err
    assert record.predictor(0).unusual([[54.0, 240.0]]) == []


def test_the_service_warns_only_if_the_run_has_measured_the_features(tmp_path: Path) -> None:
    chol = [190.0, 290.0] * 20
    table = tmp_path / "x.csv"
    table.write_text("age,chol,label\n" + "".join(f"{50 + i % 9},{c},{i % 2}\n" for i, c in enumerate(chol)))
    model = run_on(table, tmp_path)[0].predictor(0)
    inputs = {"age": np.array([54.0, 54.0]), "chol": np.array([240.0, 26000.0])}
    ((number, name, distance),) = model.unusual([[54.0, 240.0], [54.0, 26000.0]])
    (answer,) = ClientEndpoint({0: model}, "run", {}).predict([inputs])
    assert isinstance(answer, dict) and (number, name) == (1, "chol")
    expected = f"chol: {distance:.3g} standard deviations from the training mean"
    assert answer["warning"].tolist() == [b"", expected.encode()]
    unscaled = replace(model.preprocessing, mean=np.zeros(2), std=np.ones(2))
    model.preprocessing = unscaled
    (answer,) = ClientEndpoint({0: model}, "run", {}).predict([inputs])
    assert isinstance(answer, dict) and answer["warning"].tolist() == [b"", b""]


def test_texts_use_the_vocabulary_of_the_run(tmp_path: Path) -> None:
    texts = [f"{'good fine' if i % 2 else 'bad awful'} day number {i} don't" for i in range(20)]
    table = tmp_path / "x.csv"
    table.write_text("text,label\n" + "".join(f'"{text}",{i % 2}\n' for i, text in enumerate(texts)))
    record, workspace = run_on(table, tmp_path, vocabulary=9, **{"text-length": 5})
    predictor = assert_prepared_alike(record, workspace, texts)
    assert predictor.prepare(["nothing of it known"]).tolist() == [[1, 1, 1, 1, 0]]
    (tmp_path / "one.txt").write_text(texts[0])
    assert predictor.predict(tmp_path / "one.txt") == predictor.predict(texts[0])
    with pytest.raises(DataError, match=r"type int.* expects texts"):
        predictor.predict(3)


def test_token_sequences_are_padded_and_checked(tmp_path: Path) -> None:
    x = np.random.default_rng(0).integers(1, 30, (24, 7))
    data = pfllib(tmp_path / "p", x, np.arange(24) % 2, 2)
    record, workspace = run_on(data, tmp_path, partition="given", **{"num-clients": 1})
    predictor = assert_prepared_alike(record, workspace, list(workspace.dataset.x))
    assert predictor.prepare([[3, 4]]).tolist() == [[3, 4, 0, 0, 0, 0, 0]]
    with pytest.raises(DataError, match="tokens from 1 to 99"):
        predictor.predict([1, 99])


def test_predictions_use_the_running_statistics_of_the_client(tmp_path: Path, noted: Noted) -> None:
    """FedBN keeps the running statistics of BatchNorm on the clients."""
    (tmp_path / "nets.py").write_text(
        "from torch import nn\n\n\ndef small(task):\n"
        "    hidden = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.ReLU())\n"
        "    return nn.Sequential(hidden, nn.Linear(8, task.num_classes))\n"
    )
    options = {"method": "fedbn", "model": f"{tmp_path / 'nets.py'}:small", "max-samples": 120, "num-server-rounds": 3}
    record, workspace = run_on(Path("digits"), tmp_path, **options)
    for client, test in enumerate(workspace.partition.test):
        predictor = record.predictor(client)
        labels = [p.label for p in predictor.predict_all(workspace.dataset.x[test])]
        assert labels == [str(number) for number in noted[client, predictor.point][1]]
    means = [model.state_dict()["members.0.blocks.body.0.2.running_mean"] for model in map(record.predictor, (0, 1))]
    assert not torch.equal(*means)


# -- queries that name no client -------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["feddrm", "fedavg", "ppfe", "fedrep"])
@pytest.mark.parametrize("holdout", [0.0, 0.25])
def test_routed_predictions_match_the_system_accuracy(method: str, holdout: float, make_config: MakeConfig) -> None:
    config = make_config(method, model="mlp", lr=0.2, system_accuracy="on", holdout_clients=holdout)
    done = run(None, config)
    members = done.strategy.members
    workspace = Workspace(read_settings(config))
    test = np.concatenate([workspace.partition.test[client] for client in members])
    answers = posy.load(done.directory.path).route(workspace.dataset.x[test])
    names, y = workspace.task.class_names, workspace.dataset.y[test]
    right = [answer.prediction.label == names[number] for answer, number in zip(answers, y, strict=True)]
    assert np.mean(right) == pytest.approx(done.summary["system-accuracy"])
    if isinstance(done.strategy, FedDRM):
        assert done.system is not None and done.system.routed is not None
        chosen = [next(iter(answer.clients)) for answer in answers]
        assert np.bincount(chosen, minlength=4).tolist() == done.system.routed.sum(axis=0).tolist()
        assert all(sorted(answer.clients) == members for answer in answers)
        assert all(sum(answer.clients.values()) == pytest.approx(1) for answer in answers)
    else:
        assert all(not answer.clients for answer in answers)


# -- the record, and the commands ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Record:
    """A run of FedDRM on digits."""
    folder = tmp_path_factory.mktemp("runs")
    return posy.run(
        method="feddrm", model="mlp", num_clients=3, num_server_rounds=2, max_samples=120, output_dir=str(folder),
        run_name="drm",
    )  # fmt: skip


def test_a_record_has_summary_settings_rounds_and_clients(finished: Record) -> None:
    again = posy.load(finished.path)
    assert finished.strategy is not None and again.strategy is None
    for record in (finished, again):
        assert record.summary["status"] == "completed"
        assert (record.settings["method"], record.settings["feddrm-class-weight"]) == ("feddrm", 0.8)
        assert record.rounds["round"].tolist() == [1, 2]
        assert len(record.clients) == 6
        last = record.clients[record.clients["round"] == 2]
        mean = record.summary["served"]["last"]["mean"]
        assert last["served_accuracy"].mean() == record.rounds["served_accuracy_mean"].iloc[-1] == pytest.approx(mean)


def test_load_finds_a_run_by_its_name(finished: Record, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "runs").symlink_to(finished.path.parent)
    monkeypatch.chdir(tmp_path)
    assert posy.load("drm").summary == finished.summary
    with pytest.raises(SettingsError, match=r"no run in .*/gone or .*/gone"):
        posy.load("gone")


@pytest.mark.parametrize("client", ["3", "-1", "nowhere", ""])
def test_an_unknown_client_is_an_error(client: str, finished: Record) -> None:
    with pytest.raises(SettingsError, match=r"client .* models of 0, 1, 2$"):
        finished.predictor(client)


def test_a_run_with_folds_refers_to_its_folds(make_config: MakeConfig) -> None:
    path = run(None, make_config("fedavg", partition="iid", folds=2, num_server_rounds=1)).record().path
    record = Record.find(path)
    in_folds: list[tuple[str, Callable[[], Any]]] = [
        ("rounds", lambda: record.rounds),
        ("models", lambda: record.models),
        ("models", lambda: record.names),
        ("models", lambda: record.predictor(0)),
        ("models", lambda: record.route([[0.0] * 6])),
    ]
    for content, read in in_folds:
        with pytest.raises(SettingsError, match=f"has its own {content}.*{re.escape(str(path / 'fold-1'))}"):
            read()
    assert record.settings["folds"] == 2 and len(record.summary["runs"]) == 2
    assert len(record.clients) == 4 and record.clients["n_test"].sum() == record.summary["pooled"]["served"]["samples"]
    fold = Record.find(path / "fold-1")
    assert fold.predictor(0).client == 0 and len(fold.rounds) == 1 and len(fold.route([[0.0] * 6])) == 1


@pytest.mark.parametrize(
    ("settings", "attribute", "message"),
    [
        ({"secure_aggregation": True}, "clients", "the server knows only sums"),
        ({"save_models": False}, "names", "the run had save-models = false"),
    ],
)
def test_a_run_with_folds_states_what_it_lacks(
    settings: dict[str, Any], attribute: str, message: str, make_config: MakeConfig
) -> None:
    config = make_config("fedavg", partition="iid", folds=2, num_server_rounds=1, **settings)
    with pytest.raises(SettingsError, match=message):
        getattr(run(None, config).record(), attribute)


def test_an_interrupted_run_states_that_nothing_has_finished(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(LocalRun, "train", interrupt)
    for name, folds, unit in (("single", 0, "round"), ("cv", 2, "fold")):
        config = make_config("fedavg", partition="iid", folds=folds, num_server_rounds=1) | {"run-name": name}
        with pytest.raises(KeyboardInterrupt):
            run(None, config)
        record = Record.find(Path(config["output-dir"]) / name)
        with pytest.raises(SettingsError, match=rf"clients\.csv does not exist: no {unit} of the run has finished"):
            _ = record.clients


def test_a_point_without_a_stored_model_is_an_error(make_config: MakeConfig) -> None:
    record = run(None, make_config("ditto")).record()
    assert record.predictor(0).point == "local"
    with pytest.raises(SettingsError, match="local model of client 0"):
        record.predictor(0, "served")
    with pytest.raises(SettingsError, match=r"point = 'best'.*served or local"):
        record.predictor(0, "best")


def test_a_model_without_settings_is_an_error(make_config: MakeConfig) -> None:
    """Earlier versions stored models without their settings, and a damaged file cannot be read."""
    record = run(None, make_config("fedavg")).record()
    for name in ("served-0", "client-1"):
        arrays, _ = read_arrays(record.models / f"{name}.safetensors")
        write_arrays(record.models / f"{name}.safetensors", arrays, {"client": "0", "chosen": ""})
    with pytest.raises(DamagedFileError, match="lacks 'settings'"):
        record.predictor(0)
    path = record.models / "served-2.safetensors"
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(DamagedFileError):
        record.predictor(2)


def test_predict_prints_classes_and_probabilities(
    finished: Record, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    image = tmp_path / "seven.png"
    Image.fromarray(np.full((20, 20), 200, np.uint8)).save(image)
    expected = posy.load(finished.path).predictor(1).predict(image)
    capsys.readouterr()
    assert cli.main(["predict", str(finished.path), "1", str(image)]) == 0
    output = capsys.readouterr().out
    assert "client 1, served model of round 2" in output
    assert re.search(rf"seven\.png +{expected.label} +{expected.label} [0-9.]+ %, ", output)
    assert cli.main(["predict", str(finished.path), "1", str(image), "--json"]) == 0
    (answer,) = json.loads(capsys.readouterr().out)
    assert (answer["input"], answer["class"], answer["probabilities"]) == (str(image), *expected)
    arrays = tmp_path / "x.npy"
    np.save(arrays, np.zeros((3, 8, 8), np.uint8))
    assert cli.main(["predict", str(finished.path), "1", str(arrays)]) == 0
    assert capsys.readouterr().out.count("x.npy [") == 3


@pytest.mark.parametrize("command", [["predict", "RUN", "0"], ["route", "RUN"]])
def test_a_file_without_samples_causes_a_warning(
    command: list[str], make_config: MakeConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = run(None, make_config("fedavg", num_server_rounds=1)).directory.path
    header, table, array = tmp_path / "header.csv", tmp_path / "rows.csv", tmp_path / "empty.npy"
    header.write_text("a;b;c;d;e;f\n")
    table.write_text("a,b,c,d,e,f\n0,1,2,3,4,5\n")
    np.save(array, np.zeros((0, 6)))
    words = [str(path) if word == "RUN" else word for word in command]
    capsys.readouterr()
    assert cli.main([*words, str(header), str(table), str(array), "--json"]) == 0
    captured = capsys.readouterr()
    assert [entry["input"] for entry in json.loads(captured.out)] == [f"{table} row 2"]
    for empty in (header, array):
        assert f"posy: warning: {empty}: no samples found" in captured.err
    assert f"warning: {table}:" not in captured.err


def test_labels_are_a_list_in_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = tmp_path / "t.csv"
    rows = [f"{a:.3f},{b:.3f},{int(a > 0)},{int(b > 0)}" for a, b in np.random.default_rng(0).normal(size=(60, 2))]
    table.write_text("\n".join(["a,b,pain,fever", *rows]))
    settings = {"dataset": str(table), "task": "multi-label", "label-column": "fever,pain", "partition": "iid"}
    settings |= {"num-clients": 2, "num-server-rounds": 8, "local-epochs": 5, "lr": 0.5, "model": "linear"}
    path = run(None, {**settings, "method": "fedavg", "output-dir": str(tmp_path), "device": "cpu"}).directory.path
    new = tmp_path / "new.csv"
    new.write_text("a,b\n9,9\n-9,9\n-9,-9\n")
    capsys.readouterr()
    assert cli.main(["predict", str(path), "0", str(new), "--json"]) == 0
    assert [entry["labels"] for entry in json.loads(capsys.readouterr().out)] == [["fever", "pain"], ["fever"], []]


@pytest.mark.parametrize("method", ["feddrm", "fedavg"])
def test_route_prints_classes_and_shares(
    method: str, make_config: MakeConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = run(None, make_config(method, model="mlp")).directory.path
    table = tmp_path / "rows.csv"
    table.write_text("a,b,c,d,e,f,label\n" + "0,1,2,3,4,5,x\n" * 2)
    capsys.readouterr()
    picture = tmp_path / "route.png"
    assert cli.main(["route", str(path), str(table), "--picture", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    output = capsys.readouterr().out
    assert "rows.csv row 3" in output
    assert ("each input is routed to the client" in output, "majority vote" in output) == (
        method == "feddrm",
        method == "fedavg",
    )
    assert cli.main(["route", str(path), str(table), "--json"]) == 0
    first, second = json.loads(capsys.readouterr().out)
    assert first["class"] == second["class"]
    key = "clients" if method == "feddrm" else "votes"
    shares = first[key]
    assert shares == pytest.approx(second[key])
    assert set(shares) == (set("0123") if method == "feddrm" else {"0", "1", "2"})


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["gone", "0", "x.png"], "no run in"),
        (["RUN", "0", "x.png"], "x.png: not a .csv or .npy file; the model expects rows of 6 numbers"),
        (["RUN", "0", "x.csv"], "x.csv: cannot be opened"),
        (["RUN", "0", "bad.csv"], "row 2, f: 'x' is not a number"),
        (["RUN", "0", "few.csv"], "row 2 has 1 columns, but the header has 2"),
        (["RUN", "7", "bad.csv"], "client '7': "),
        (["RUN", "0", "header.csv"], "header.csv: no samples found"),
        (["BARE", "0", "bad.csv"], "save-models = false"),
    ],
)
def test_predict_reports_errors(
    words: list[str],
    message: str,
    make_config: MakeConfig,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    stored = run(None, make_config("fedavg", save_models="BARE" not in words, num_server_rounds=1)).directory.path
    Path("bad.csv").write_text("a,b,c,d,e,f\n1,2,3,4,5,x\n")
    Path("few.csv").write_text("a,b\n1\n")
    Path("header.csv").write_text("a;b;c;d;e;f\n")
    capsys.readouterr()
    assert cli.main(["predict", *(str(stored) if word in ("RUN", "BARE") else word for word in words)]) == 2
    assert message in capsys.readouterr().err


# -- samples unlike the training samples -----------------------------------------------------------------


def warned(record: Record, tmp_path: Path, samples: np.ndarray, capsys: pytest.CaptureFixture[str]) -> list[list[str]]:
    """Return the warnings in the JSON of `posy predict`, and check that each appears in the error output too."""
    np.save(tmp_path / "new.npy", samples)
    capsys.readouterr()
    assert cli.main(["predict", str(record.path), "0", str(tmp_path / "new.npy"), "--json"]) == 0
    captured = capsys.readouterr()
    warnings = [row.get("warnings", []) for row in json.loads(captured.out)]
    for number, texts in enumerate(warnings):
        assert all(f"warning: {tmp_path / 'new.npy'} [{number}]: {text}" in captured.err for text in texts)
    return warnings


def test_raw_tables_warn_about_far_values_and_unseen_categories(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [f"{50 + i % 9},{'' if i % 4 == 0 else 200 + i},{'xyz'[i % 3]},{i % 2}" for i in range(120)]
    (tmp_path / "x.csv").write_text("\n".join(["age,chol,kind,label", *rows]) + "\n")
    record, _ = run_on(tmp_path / "x.csv", tmp_path, missing="impute")
    (tmp_path / "new.csv").write_text("age,chol,kind\n52,210,x\n52,,y\n1960,210,x\n52,9999,w\n")
    capsys.readouterr()
    assert cli.main(["predict", str(record.path), "0", str(tmp_path / "new.csv"), "--json"]) == 0
    captured = capsys.readouterr()
    first, second, third, fourth = [row.get("warnings", []) for row in json.loads(captured.out)]
    assert first == second == []
    assert len(third) == 1 and third[0].startswith("age is ")
    assert fourth[0].startswith("chol is ") and fourth[1] == "kind is 'w', which is not a category of the run"
    assert "row 5: kind is 'w'" in captured.err


def test_time_series_warn_about_a_channel(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    x = np.random.default_rng(0).normal(3, 2, size=(40, 7, 2))
    np.savez(tmp_path / "x.npz", x_train=x, y_train=np.arange(40) % 2)
    record, _ = run_on(tmp_path / "x.npz", tmp_path, **{"sample-kind": "series"})
    far = x[:2].copy()
    far[1, 4, 1] = 500.0
    usual, unusual = warned(record, tmp_path, far, capsys)
    assert usual == []
    assert len(unusual) == 1 and unusual[0].startswith("channel 1 is ")


def test_images_warn_about_a_single_colour_and_a_distant_mean(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only published data sets have measured statistics of images; other images have no warning about their mean."""
    x = np.random.default_rng(0).random(size=(40, 6, 5, 1)).astype(np.float32)
    np.savez(tmp_path / "x.npz", x_train=x, y_train=np.arange(40) % 2)
    record, _ = run_on(tmp_path / "x.npz", tmp_path)
    usual, scaled, constant = warned(record, tmp_path, np.stack([x[0], 255 * x[1], 0 * x[2]]), capsys)
    assert usual == scaled == []
    assert constant == ["all pixels are equal, so the prediction may be meaningless"]
    model = record.predictor(0)
    mean, std = np.full(1, 0.5, np.float32), np.full(1, 0.3, np.float32)
    model.preprocessing = replace(model.preprocessing, mean=mean, std=std)
    first, second = model.warnings([x[0], 255 * x[1]])
    assert first == []
    assert len(second) == 1 and second[0].startswith("the mean of channel 0 is ")
