"""The central test set: its samples, the scores of the server's models on it, and its errors.

NumPy, scikit-learn and the stored models compute the expected scores from raw rows.
"""

import csv
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from nodes import POLICY, NodeGrid, class_folders, pfllib, table
from sklearn import metrics as reference
from sklearn.datasets import load_diabetes

import posy
from posy.client_app.stored import ClientModel
from posy.client_app.workspace import Workspace
from posy.commands.cli import main
from posy.data.central import agreed_preprocessing, central_test, check_readable
from posy.data.client import client_data
from posy.data.datasets import load_clients
from posy.data.errors import DataError
from posy.data.inputs import Preprocessing
from posy.data.sites import load_site, read_site
from posy.server_app.app import run
from posy.server_app.central import CentralScores, served_models
from posy.settings import SettingsError
from posy.storage import load_arrays
from posy.strategies.methods import strategy_class
from posy.strategies.registry import read_settings

RNG = np.random.default_rng(11)
X = RNG.normal((10.0, -3.0, 0.5), (4.0, 1.0, 0.1), (240, 3))
Y = ((X - X.mean(0)) / X.std(0) @ (1.0, -2.0, 0.5) + RNG.normal(size=240) > 0).astype(np.int64)
TEST = np.arange(240) >= 180
QUICK = {
    "method": "fedavg", "num-clients": 3, "num-server-rounds": 2, "local-epochs": 1, "model": "linear", "lr": 0.1,
    "device": "cpu", "run-name": "a", "output-dir": "runs",
}  # fmt: skip


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    np.savez("a.npz", x_train=X[~TEST], y_train=Y[~TEST], x_test=X[TEST], y_test=Y[TEST])
    return tmp_path


def summary_of(**settings: Any) -> dict[str, Any]:
    """Run a federation, and return its entry `central` in summary.json."""
    config = QUICK | {key.replace("_", "-"): value for key, value in settings.items()}
    path = run(None, config).directory.path
    central: dict[str, Any] = json.loads((path / "summary.json").read_text())["central"]
    return central


def means(central: Mapping[str, Any], point: str) -> dict[str, float]:
    return {name: spread["mean"] for name, spread in central[point]["metrics"].items()}


def probabilities(model: ClientModel, rows: Any) -> np.ndarray:
    return np.array([list(prediction.probabilities.values()) for prediction in model.predict_all(rows)])


def binary_scores(y: np.ndarray, p: np.ndarray) -> dict[str, float]:
    return {
        "accuracy": reference.accuracy_score(y, p.argmax(axis=1)),
        "auroc": reference.roc_auc_score(y, p[:, 1]),
        "log-loss": reference.log_loss(y, p),
        "sensitivity": reference.recall_score(y, p.argmax(axis=1)),
    }


# -- scores ------------------------------------------------------------------------------------------------


def test_scores_of_fedavg_follow_from_the_server_model() -> None:
    """The weights of a linear model and the statistics of the training rows give the scores by hand."""
    central = summary_of(dataset="a.npz", test_set="central")
    settings = read_settings(QUICK | {"dataset": "a.npz", "test-set": "central"})
    rows = np.concatenate(Workspace(settings).partition.train)
    flat = load_arrays(Path("runs/a/models/server.safetensors"))["model"]
    shapes = {name: array.shape for name, array in load_arrays(Path("runs/a/models/served-0.safetensors")).items()}
    assert sorted(shapes.values()) == [(2,), (2, 3)] and len(flat) == 8
    weight, bias = flat[:6], flat[6:]
    inputs = (X[TEST] - X[rows].mean(0)) / X[rows].std(0)
    logits = inputs @ weight.reshape(2, 3).T.astype(float) + bias
    p = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    expected = binary_scores(Y[TEST], p)
    assert (central["samples"], central["round"], central["served"]["models"]) == (60, 2, 1)
    assert {k: v for k, v in means(central, "served").items() if k in expected} == pytest.approx(expected, rel=1e-5)
    accuracy = central["served"]["metrics"]["accuracy"]
    assert (accuracy["std"], accuracy["min"], accuracy["max"], accuracy["clients"]) == (
        0.0, accuracy["mean"], accuracy["mean"], 3,
    )  # fmt: skip
    low, high = central["served"]["intervals"]["auroc"]
    assert low < expected["auroc"] < high
    rounds = [json.loads(line) for line in Path("runs/a/rounds.jsonl").read_text().splitlines()]
    assert list(rounds[0]["central"]) == ["accuracy"]
    assert rounds[1]["central"] == pytest.approx(means(central, "served"), rel=1e-12)


@pytest.mark.parametrize("method", ["fedrep", "fedamp", "ppfe", "local"])
def test_scores_of_personalised_models_are_spread_over_the_clients(method: str) -> None:
    """Each client's stored model predicts the raw rows. FedAMP's served models come from the server alone."""
    central = summary_of(dataset="a.npz", test_set="central", method=method, model="mlp")
    record = posy.load("a")
    point = record.summary["point"]
    scores = [binary_scores(Y[TEST], probabilities(record.predictor(c, point), X[TEST])) for c in range(3)]
    assert central[point]["models"] == 3 and "intervals" not in central[point]
    for name in scores[0]:
        values = [each[name] for each in scores]
        spread = central[point]["metrics"][name]
        expected = (np.mean(values), np.std(values), min(values), max(values), 3)
        keys = ("mean", "std", "min", "max", "clients")
        assert [spread[key] for key in keys] == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert len({each["log-loss"] for each in scores}) == 3
    assert ("served" in central) == (method != "local")


def test_server_scores_served_models_that_no_client_stores() -> None:
    """With save-models = false, Ditto's global model is scored, and its personal models are not."""
    stored = summary_of(dataset="a.npz", test_set="central", method="ditto")
    assert stored["served"]["models"] == 1 and stored["local"]["models"] == 3
    hidden = summary_of(dataset="a.npz", test_set="central", method="ditto", save_models=False, run_name="b")
    assert hidden["served"] == stored["served"] and "local" not in hidden


@pytest.mark.parametrize("settings", [{"secure-aggregation": True}, {"dp": "local", "dp-clip": 1.0}])
def test_protected_runs_score_the_served_model(settings: dict[str, Any], warnings: pytest.LogCaptureFixture) -> None:
    central = summary_of(dataset="a.npz", test_set="central", **settings)
    assert list(central) == ["samples", "round", "served"]
    assert "accuracy" in central["served"]["metrics"] and "central test set" not in warnings.text


def test_a_missing_score_is_explained_in_one_line(warnings: pytest.LogCaptureFixture) -> None:
    central = summary_of(dataset="a.npz", test_set="central", method="fedrep", model="mlp", save_models=False)
    assert central == {"samples": 60, "round": 2}
    assert "the served models have no scores on the central test set: it needs save-models" in warnings.text


@pytest.mark.parametrize(
    ("settings", "remedy"),
    [
        ({"method": "fedrep", "secure-aggregation": True}, "set secure-aggregation = false, or choose a method"),
        ({"method": "fedrep", "dp": "local", "dp-clip": 1.0}, "set dp-scores = 'exact', or choose a method"),
        ({"method": "ditto", "secure-aggregation": True}, "the server scores the served models instead"),
    ],
)
def test_missing_scores_are_announced_before_round_1(
    settings: dict[str, Any], remedy: str, warnings: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    """The warning precedes the first round and is in the summary and in the printed table."""
    config = QUICK | {"dataset": "a.npz", "test-set": "central", "model": "mlp", **settings}
    started: set[str] = set()
    run(None, config, begun=lambda path: started.update(record.getMessage() for record in warnings.records))
    (notice,) = (text for text in started if "central test set" in text)
    assert remedy in notice
    summary = json.loads(Path("runs/a/summary.json").read_text())
    assert summary["notices"] == [notice] and f"warning: {notice}" in capsys.readouterr().out
    assert {text for record in warnings.records if "central test set" in (text := record.getMessage())} == {notice}
    assert ("served" in summary["central"]) == (settings["method"] == "ditto")


def test_folds_repeat_a_notice_of_all_folds() -> None:
    run(None, QUICK | {"dataset": "a.npz", "test-set": "central", "folds": 2, "method": "fedrep", "model": "mlp",
                       "secure-aggregation": True})  # fmt: skip
    (notice,) = json.loads(Path("runs/a/summary.json").read_text())["notices"]
    assert "set secure-aggregation = false" in notice


def test_regression_and_multi_label() -> None:
    x, y = load_diabetes(return_X_y=True)
    values = np.column_stack([y, x[:, 2] * 1e4])
    np.savez("train.npz", x_train=x[:350], y_train=values[:350])
    np.savez("test.npz", x_train=x[350:], y_train=values[350:])
    central = summary_of(dataset="train.npz", central_test_data="test.npz", task="regression")
    predictions = posy.load("a").predictor(0).predict_all(x[350:])
    predicted = np.array([list(each.values()) for each in predictions])
    expected = {
        "mae": reference.mean_absolute_error(values[350:], predicted),
        "rmse": reference.root_mean_squared_error(values[350:], predicted),
        "r2": reference.r2_score(values[350:], predicted),
    }
    assert means(central, "served")["mae"] == pytest.approx(expected["mae"], rel=1e-5)
    assert means(central, "served")["r2"] == pytest.approx(expected["r2"], rel=1e-4)
    labels = (x[:, :3] > 0).astype(np.int64)
    np.savez("train.npz", x_train=x[:350], y_train=labels[:350])
    np.savez("test.npz", x_train=x[350:], y_train=labels[350:])
    central = summary_of(dataset="train.npz", central_test_data="test.npz", task="multi-label", run_name="b")
    p = probabilities(posy.load("b").predictor(0), x[350:])
    expected = {
        "average-precision": reference.average_precision_score(labels[350:], p),
        "accuracy": reference.accuracy_score(labels[350:], p >= 0.5),
    }
    scores = means(central, "served")
    assert {name: scores[name] for name in expected} == pytest.approx(expected, rel=1e-6)


def write_rows(path: str, rows: list[dict[str, Any]], columns: list[str], sign: str) -> None:
    with Path(path).open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, columns, delimiter=sign)
        writer.writeheader()
        writer.writerows(rows)


def raw_rows(count: int, seed: int) -> list[dict[str, Any]]:
    """Return patients with missing values and categories, in which ill patients are older."""
    rng, rows = np.random.default_rng(seed), []
    for number in range(count):
        ill = bool(rng.random() < 0.5)
        age = "" if number % 7 == 3 else round(52 + 12 * ill + rng.normal(0, 6), 1)
        pain = ["mild", "none", "severe", "?"][rng.integers(4) if not ill else 2 + rng.integers(2)]
        rows.append({"age": age, "pain": pain, "num": rng.integers(1, 4) if ill else 0})
    return rows


FEDREP = {"method": "fedrep", "model": "mlp"}
RAW = {"dataset": "train.csv", "central-test-data": "test.csv", "label-column": "num > 0", "missing": "impute"}
"""Settings of a run on :func:`raw_rows`."""


def test_raw_table_with_other_columns_order_and_an_unseen_category() -> None:
    rows = raw_rows(60, 2)
    rows[5]["pain"], rows[6]["pain"], rows[7]["age"] = "unbearable", "", "?"
    write_rows("train.csv", raw_rows(300, 1), ["age", "pain", "num"], ",")
    write_rows("test.csv", rows, ["num", "pain", "age"], ";")
    central = summary_of(**RAW, partition="iid")
    y = np.array([int(row["num"] > 0) for row in rows])
    p = probabilities(posy.load("a").predictor(0), [{k: row[k] for k in ("age", "pain")} for row in rows])
    expected = binary_scores(y, p)
    scores = means(central, "served")
    assert {name: scores[name] for name in expected} == pytest.approx(expected, rel=1e-5)
    assert scores["auroc"] > 0.7


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
@pytest.mark.parametrize("extra", [(), ("hospital",), ("hospital", "patient")])
def test_central_rows_need_no_group_and_no_patient(suffix: str, extra: tuple[str, ...]) -> None:
    """The cells of these columns may be empty. They change no sample, and are not features."""
    frame = pd.DataFrame(raw_rows(120, 3)).replace({"?": "none", "": 50.0}).astype({"num": int, "age": float})
    rows = frame.assign(hospital=np.arange(120) // 40, patient=np.arange(120) // 2)
    rows.to_csv("train.csv", index=False)
    test = frame[:30].assign(**dict.fromkeys(extra, None))
    test.to_csv("test.csv", index=False)
    test.to_parquet("test.parquet")
    columns = {"group-column": "hospital", "split-column": "patient", "partition": "natural"}
    config = {**RAW, **columns, "central-test-data": f"test.{suffix}", "num-clients": 3}
    settings = read_settings(config).data
    dataset, _ = load_clients(settings, Path(), 1)
    central = central_test(settings, dataset, 1)
    assert central is not None and dataset.encoder is not None
    expected = (dataset.x[:30] - dataset.mean) / dataset.std
    np.testing.assert_allclose(central.x, expected, rtol=1e-5, atol=1e-6)
    assert central.y.tolist() == (frame["num"][:30] > 0).astype(int).tolist()


def test_central_images_and_arrays_need_no_group_and_no_patient(folder: Path) -> None:
    images(folder / "train")
    images(folder / "test")
    rows = [(file.relative_to("train").as_posix(), i) for i, file in enumerate(sorted(Path("train").rglob("*.png")))]
    text = "".join(f"{name},h{number // 6},{number}\n" for name, number in rows)
    Path("train/metadata.csv").write_text("file_name,hospital,patient\n" + text)
    columns = {"group-column": "hospital", "split-column": "patient", "partition": "natural", "num-clients": 2}
    settings = read_settings({**columns, "dataset": "train", "central-test-data": "test"}).data
    assert len(rows) == 12
    central = central_test(settings, load_clients(settings, Path(), 1)[0], 1)
    assert central is not None and len(central.x) == 12
    groups = {"groups_train": np.arange(40) // 20, "mrn_train": np.arange(40) // 2}
    np.savez("train.npz", x_train=X[:40], y_train=Y[:40], **groups)
    columns = {"split-column": "mrn", "partition": "natural", "num-clients": 2}
    settings = read_settings({**columns, "dataset": "train.npz", "central-test-data": "a.npz"}).data
    central = central_test(settings, load_clients(settings, Path(), 1)[0], 1)
    assert central is not None and len(central.x) == 60


# -- samples -----------------------------------------------------------------------------------------------


def test_central_test_set_stays_whole_and_clients_set_their_own_test_samples_aside() -> None:
    settings = read_settings({**QUICK, "dataset": "a.npz", "test-set": "central", "test-fraction": 0.5}).data
    dataset, part = load_clients(settings, Path(), 42)
    assert sorted(np.concatenate([*part.train, *part.test])) == list(range(180))
    for train, test in zip(part.train, part.test, strict=True):
        assert abs(len(train) - len(test)) <= 1
        counts = (np.bincount(Y[rows], minlength=2) for rows in (train, test))
        assert all(abs(a - b) <= 1 for a, b in zip(*counts, strict=True) if min(a, b) > 0)
    test = central_test(settings, dataset, 42)
    rows = np.concatenate(part.train)
    assert test is not None
    np.testing.assert_allclose(test.x, (X[TEST] - X[rows].mean(0)) / X[rows].std(0), rtol=1e-5, atol=1e-6)
    assert test.y.tolist() == Y[TEST].tolist()


def test_patients_of_a_central_test_set_keep_the_groups_of_the_clients() -> None:
    """The groups of the training rows divide the clients' samples."""
    patients = np.arange(40) // 4
    is_test = np.isin(patients, (0, 5))
    lines = ["import numpy as np", "", "", "def data():", "    n = np.arange(40)"]
    lines += ["    x, test = n[:, None] * [1.0, 2.0], np.isin(n // 4, (0, 5))"]
    lines += ["    return {'x': x, 'y': n % 2, 'groups': n // 20, 'patients': n // 4, 'test': test}", ""]
    Path("own.py").write_text("\n".join(lines))
    config = {"dataset": "own.py:data", "test-set": "central", "partition": "natural", "num-clients": 2}
    _, part = load_clients(read_settings(config).data, Path(), 1)
    assert sorted(np.concatenate([*part.train, *part.test])) == np.flatnonzero(~is_test).tolist()
    for train, test in zip(part.train, part.test, strict=True):
        assert not set(patients[train]) & set(patients[test]) and len(test) == 4


def images(path: Path) -> Path:
    return class_folders(path, RNG.integers(0, 256, (12, 6, 5), np.uint8), ["cat", "dog"] * 6)


def arrays(path: Path, x: np.ndarray) -> Path:
    np.savez(path.with_suffix(".npz"), x_train=x, y_train=np.arange(len(x)) % 2)
    return path.with_suffix(".npz")


def texts(path: Path) -> Path:
    rows = "".join(f"word{i % 5} and more{i},{'yes' if i % 2 else 'no'}\n" for i in range(12))
    path.with_suffix(".csv").write_text("text,label\n" + rows)
    return path.with_suffix(".csv")


KINDS: dict[str, Callable[[Path], Path]] = {
    "image files": images,
    "pixels": lambda path: arrays(path, RNG.integers(0, 256, (12, 4, 4, 3), np.uint8)),
    "floating-point pixels": lambda path: arrays(path, RNG.random((12, 4, 4, 3))),
    "features": lambda path: table(path.with_suffix(".csv"), RNG.normal(5, 2, (12, 3)), np.arange(12) % 2),
    "series": lambda path: arrays(path, RNG.normal(5, 2, (12, 7, 2))),
    "text": texts,
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_sample_is_prepared_like_the_same_sample_of_a_client(kind: str, folder: Path) -> None:
    """In a run in process and in a run over sites; the central file is the file of the clients."""
    path = KINDS[kind](folder / "data")
    sample_kind = {"series": "series"}.get(kind, "auto")
    config = {"dataset": str(path), "central-test-data": str(path), "num-clients": 1, "partition": "iid"}
    settings = read_settings({**config, "sample-kind": sample_kind}).data
    dataset, part = load_clients(settings, Path(), 1)
    central = central_test(settings, dataset, 1)
    assert central is not None and len(central.x) == len(dataset)
    client = client_data(dataset, part, 0, settings, torch.device("cpu"))
    assert torch.equal(central.x[part.train[0]], client.x_train)
    assert torch.equal(central.y[part.test[0]], client.y_test)

    task = Preprocessing.of(dataset, 0).task
    numbers = {"features": 3, "series": 2}.get(kind)
    scale = {"feature-mean": "5", "feature-std": "2"} if numbers else {}
    agreed = {
        "dataset": "sites", "sample-kind": dataset.sample_kind, "classes": json.dumps(task.class_names),
        "input-shape": "x".join(map(str, task.input_shape)), "central-test-data": str(path), **scale,
    }  # fmt: skip
    settings = read_settings(agreed).data
    site, part = load_site(read_site(path, settings, POLICY), settings, POLICY)
    central = central_test(settings, None, 1)
    client = client_data(site, part, 0, settings, torch.device("cpu"))
    assert central is not None and torch.equal(central.x[part.train[0]], client.x_train)
    assert torch.equal(central.y[part.train[0]], client.y_train)
    assert agreed_preprocessing(settings).task == site.task


def test_only_the_test_set_of_a_central_file_is_used() -> None:
    config = {"dataset": "a.npz", "central-test-data": "a.npz", "test-set": "pooled"}
    settings = read_settings(config).data
    central = central_test(settings, load_clients(settings, Path(), 1)[0], 1)
    assert central is not None and central.y.tolist() == Y[TEST].tolist()


def test_central_scores_change_no_other_result() -> None:
    """The same rows of all clients, with and without a central test set; a model with dropout and BatchNorm."""
    config = {**QUICK, "dataset": "a.npz", "model": "mlp", "method": "fedrep"}
    run(None, config)
    run(None, config | {"central-test-data": "a.npz", "run-name": "b"})
    first, second = (Path(f"runs/{name}/clients.csv").read_text() for name in "ab")
    assert first == second


def test_folds_report_the_spread_over_the_folds(capsys: pytest.CaptureFixture[str]) -> None:
    run(None, QUICK | {"dataset": "a.npz", "test-set": "central", "folds": 2})
    summary = json.loads(Path("runs/a/summary.json").read_text())
    folds = [json.loads(Path(f"runs/a/fold-{k}/summary.json").read_text())["central"] for k in (1, 2)]
    values = [means(each, "served")["auroc"] for each in folds]
    assert summary["central"]["served"]["metrics"]["auroc"] == pytest.approx(
        {"mean": np.mean(values), "std": np.std(values, ddof=1), "min": min(values), "max": max(values), "folds": 2}
    )
    printed = capsys.readouterr().out.splitlines()
    (header,) = (line for line in printed if "central test set" in line and "mean ± std" in line and "folds" in line)
    assert header.split()[-1] == "folds"
    assert values[0] != values[1] and summary["central"]["samples"] == 60


@pytest.mark.parametrize("metric", ["accuracy", "auroc"])
def test_central_scores_without_all_metrics_are_of_the_metric(metric: str) -> None:
    central = summary_of(dataset="a.npz", test_set="central", all_metrics="none", metric=metric)
    assert list(central["served"]["metrics"]) == list(central["served"]["intervals"]) == [metric]


# -- sites -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{}, {"secure-aggregation": True}, {"method": "fedamp"}, FEDREP])
def test_the_server_of_a_federation_of_sites_scores_the_models_that_it_serves(
    settings: dict[str, Any], folder: Path, warnings: pytest.LogCaptureFixture
) -> None:
    rows = raw_rows(50, 9)
    rows[0]["pain"] = "unbearable"
    write_rows("test.csv", rows, ["pain", "age", "num"], ";")
    nodes = []
    for number in range(3):
        write_rows(f"site-{number}.csv", raw_rows(80, number), ["age", "pain", "num"], ",")
        paths = {"data": str(folder / f"site-{number}.csv"), "state-dir": str(folder / f"state-{number}")}
        policy = folder / "policy.yaml"
        policy.write_text("min-rows: 5\nscores: exact\nmetrics: all\nlabel: num > 0\n")
        nodes.append({"name": f"site-{number}", "policy": str(policy), **paths})
    config = QUICK | RAW | {"dataset": "sites", "batch-size": 16, **settings}
    done = run(NodeGrid(*nodes), config)
    central = json.loads((done.directory.path / "summary.json").read_text())["central"]
    if settings.get("method") == "fedrep":  # a part of each model stays at its site
        assert central == {"samples": 50, "round": 2}
        assert "the served models have no scores on the central test set: the sites keep their models" in warnings.text
        return
    assert "local" not in central
    y = np.array([int(row["num"] > 0) for row in rows])
    inputs = [{key: row[key] for key in ("age", "pain")} for row in rows]
    if settings.get("method") == "fedamp":
        assert central["served"]["models"] == 3 and "intervals" not in central["served"]
        return
    model = posy.load(folder / "state-0").predictor("site-0", "served")
    expected = binary_scores(y, probabilities(model, inputs))
    scores = means(central, "served")
    assert {name: scores[name] for name in expected} == pytest.approx(expected, rel=1e-5)


# -- errors ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"central-test-data": "no.csv"}, SettingsError, "central-test-data = .*no.csv'"),
        ({"central-test-data": "other.csv"}, DataError, "other.csv: columns missing: f2; unknown: weight"),
        ({"central-test-data": "other.csv", "input-columns": "f1,f2"}, DataError, "other.csv: columns missing: f2"),
        ({"central-test-data": "labels.csv"}, DataError, "labels.csv: label 'maybe' of sample 3"),
        ({"central-test-data": "a.npz"}, DataError, "a.npz: samples of shape 5"),
        ({"central-test-data": "text.txt"}, DataError, "text.txt"),
        ({"central-test-data": "pfllib"}, DataError, "pfllib"),
        ({"central-test-data": "train.csv", "scaling": "client"}, SettingsError, "scaling = 'client'"),
        ({"test-set": "central"}, SettingsError, "test-set = 'central'.* without a test set"),
        ({"test-set": "central", "central-test-data": "train.csv"}, SettingsError, "test-set = 'central'"),
        ({"test-set": "central", "dataset": "digits"}, SettingsError, "test-set = 'central'"),
        ({"test-set": "central", "dataset": "pfllib", "num-clients": 1}, SettingsError, "test-set = 'central'"),
    ],
)
def test_a_wrong_central_test_set_is_rejected_before_round_1(
    settings: dict[str, Any], error: type[Exception], words: str, folder: Path
) -> None:
    table(folder / "train.csv", X[:60], Y[:60])
    table(folder / "labels.csv", X[:4], [0, 1, 0, "maybe"])
    text = (folder / "labels.csv").read_text().replace("f2", "weight").replace("maybe", "1")
    (folder / "other.csv").write_text(text)
    (folder / "text.txt").write_text("1")
    np.savez("a.npz", x_train=np.ones((4, 5)), y_train=[0, 1, 0, 1])
    pfllib(folder / "pfllib", X[:20].astype(np.float32), Y[:20], 5)
    with pytest.raises(error, match=words) as raised:
        run(None, QUICK | {"dataset": "train.csv", **settings})
    assert "\n" not in str(raised.value) and not Path("runs").exists()
    if error is DataError:
        assert str(raised.value).startswith("central-test-data: ")


@pytest.mark.parametrize("label", ["label", "outcome"])
def test_the_label_is_the_label_of_the_training_data(label: str) -> None:
    """Without the label column, the last column of the central file is an input with categories."""
    frame = pd.DataFrame(raw_rows(60, 3)).replace({"?": "none", "": 50.0})
    frame[label] = [f"ill {row > 0}" for row in frame.pop("num")]  # the last column
    frame.to_csv("train.csv", index=False)
    frame[[label, "age", "pain"]].to_csv("first.csv", index=False)
    frame[["age", "pain"]].to_csv("none.csv", index=False)
    frame.assign(age=frame[label]).drop(columns=label).to_csv("wrong.csv", index=False)
    config = {"dataset": "train.csv", "categories": "pain", "missing": "impute", "num-clients": 1, "partition": "iid"}
    settings = read_settings({**config, "central-test-data": "first.csv"}).data
    dataset, _ = load_clients(settings, Path(), 1)
    central = central_test(settings, dataset, 1)
    assert central is not None and central.y.tolist() == dataset.y.tolist()
    for name in ("none.csv", "wrong.csv"):
        with pytest.raises(DataError) as raised:
            central_test(replace(settings, central_test_data=name), dataset, 1)
        assert re.match(rf"central-test-data: .*{name} has no column {label}, .*training data", str(raised.value))
        assert raised.value.column == label


def test_the_server_of_sites_finds_that_the_label_is_missing() -> None:
    """The server does not know the label of the sites; it knows the columns of the run after they have agreed."""
    write_rows("none.csv", raw_rows(20, 1), ["num", "age", "pain"], ",")
    config = {
        "dataset": "sites", "sample-kind": "features", "classes": "0,1", "input-shape": "2", "feature-mean": "0",
        "feature-std": "1", "feature-names": "pain,age", "categories": "pain", "central-test-data": "none.csv",
        "missing": "impute",
    }  # fmt: skip
    settings = read_settings(config).data
    check_readable(settings)
    with pytest.raises(DataError, match=r"^central-test-data: .*none.csv: no label column: .*pain.*label-column"):
        central_test(settings, None, 1)


def test_the_server_of_sites_reads_its_file_before_it_asks_them(folder: Path) -> None:
    grid = NodeGrid({"name": "a", "data": "/nowhere"})
    with pytest.raises(SettingsError, match=r"central-test-data = .*no.csv'"):
        run(grid, QUICK | {"dataset": "sites", "central-test-data": "no.csv"})
    assert not grid.sent


def test_a_partition_file_must_not_list_central_samples() -> None:
    for listed, allowed in (([[0, 1, 2], [3, 4, 5]], True), ([[0, 1, 2], [3, 200]], False)):
        Path("parts.json").write_text(json.dumps(listed))
        config = {"dataset": "a.npz", "test-set": "central", "partition": "file", "partition-file": "parts.json"}
        settings = read_settings({**config, "num-clients": 2}).data
        if allowed:
            assert sorted(np.concatenate(load_clients(settings, Path(), 1)[1].train)) != []
        else:
            with pytest.raises(SettingsError, match=r"partition-file = .*client 1 has sample 200"):
                load_clients(settings, Path(), 1)


# -- output ------------------------------------------------------------------------------------------------


def test_tables_and_reports_show_the_central_score(capsys: pytest.CaptureFixture[str]) -> None:
    central = summary_of(dataset="a.npz", test_set="central", metric="auroc")
    score = f"{100 * means(central, 'served')['auroc']:.2f}"
    printed = capsys.readouterr().out
    assert f"central test set  {score} % (served model), 60 samples" in printed
    assert f"central {score} %" in printed
    assert main(["report", "runs/a"]) == 0
    assert "Central test set" in Path("report.html").read_text()
    plan = {
        "title": "t", "output": "table", "seeds": [1], "settings": {**QUICK, "dataset": "a.npz", "test-set": "central"},
        "runs": [{"name": "FedAvg", "settings": {"method": "fedavg"}}],
    }  # fmt: skip
    for key in ("run-name", "output-dir", "method"):
        del plan["settings"][key]  # type: ignore[attr-defined]
    Path("t.yaml").write_text(json.dumps(plan))
    assert main(["table", "t.yaml"]) == 0
    (file,) = Path("table").rglob("*.md")
    assert "| central |" in file.read_text()


def test_served_models_are_grouped_by_identity() -> None:
    """FedAvg serves one model to all clients; FedRep and FedALA serve none that is complete."""
    counts = {}
    for method in ("fedavg", "fedrep", "fedala", "scaffold"):
        settings = read_settings(QUICK | {"dataset": "a.npz", "method": method, "model": "mlp"})
        served = served_models(strategy_class(method)(settings, Workspace(settings).architecture))
        counts[method] = None if served is None else [clients for _, clients in served]
    assert counts == {"fedavg": [3], "fedrep": None, "fedala": None, "scaffold": [3]}


def test_a_model_with_nan_outputs_has_no_scores(warnings: pytest.LogCaptureFixture) -> None:
    settings = read_settings(QUICK | {"dataset": "a.npz", "test-set": "central"})
    workspace = Workspace(settings)
    strategy = strategy_class("fedavg")(settings, workspace.architecture)
    test = central_test(settings.data, workspace.dataset, 1)
    assert test is not None
    scores = CentralScores(test, strategy, workspace, Path("none"))
    assert "accuracy" in scores.of_round(1)
    strategy.model = np.full_like(strategy.model, np.nan)
    assert scores.of_round(1) == {} and "NaN" in warnings.text
