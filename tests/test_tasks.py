"""Multi-label tasks, regression and time series: every method runs on them, or refuses them with a reason."""

import csv
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from nodes import LENIENT, POLICY, NodeGrid
from sklearn.metrics import average_precision_score, f1_score, mean_absolute_error, r2_score, root_mean_squared_error

import posy
from posy.client_app.base import PersonalClient
from posy.client_app.policy import _scores, limited_scores
from posy.client_app.ppfe import boosting_losses, reweight
from posy.client_app.predictors import combined
from posy.client_app.training.losses import criterion_of
from posy.data.datasets import load_clients
from posy.data.policy import Policy, read_policy
from posy.data.readers.samples import samples_of
from posy.data.settings import DataSettings, located
from posy.data.sites import read_site, site_split
from posy.metrics import DEFAULTS, LABELS, VALUES
from posy.models.architecture import architecture_for
from posy.models.series import GRU
from posy.randomness import model_seed, torch_generator
from posy.scores import Predictions
from posy.server_app.app import run
from posy.settings import SettingsError
from posy.strategies.methods import METHODS, settings_class
from posy.strategies.registry import read_settings
from posy.strategies.score_sums import ScoreSums
from posy.value_sums import metrics_of, value_sums

MakeConfig = Callable[..., dict[str, Any]]
NEEDS_CLASSES = {"cwfedavg", "feddrm", "fedproto", "fedpac", "fednh", "fedas", "pfedfda", "feduv"}
LEARNERS = ("fedavg", "ditto", "fedrep", "fedfew", "fedacs", "ppfe", "local")
"""Methods that must learn each task; `local` is their baseline."""
LEARNING = {"local_epochs": 3, "lr": 0.1, "ppfe_stages": 2, "fedrep_head_epochs": 2}
CLIENTS, TRAIN, TEST = 3, 40, 20
Data = tuple[np.ndarray, np.ndarray, list[list[int]], list[list[int]]]


def clients_of(x: np.ndarray, y: np.ndarray) -> Data:
    """Return data for ``make_config``, divided evenly among the clients."""
    starts = [client * (TRAIN + TEST) for client in range(CLIENTS)]
    train = [list(range(start, start + TRAIN)) for start in starts]
    return x, y, train, [list(range(start + TRAIN, start + TRAIN + TEST)) for start in starts]


def features() -> tuple[np.ndarray, np.ndarray]:
    """Return features ``(N, 5)`` and two noisy linear functions of them ``(N, 2)``."""
    rng = np.random.default_rng(3)
    x = rng.normal(50, 10, (CLIENTS * (TRAIN + TEST), 5))
    noise = rng.normal(0, 0.3, (len(x), 2))
    return x, (x - 50) / 10 @ rng.normal(0, 1, (5, 2)) + noise


def regression() -> Data:
    """Return a regression of two values whose scales differ by a factor of 1000."""
    x, y = features()
    return clients_of(x, y * [1000, 1] + [5000, 0])


def multi_label() -> Data:
    """Return features and two labels, of which the second is rare."""
    x, y = features()
    return clients_of(x, (y > [0, 1.5]).astype(np.int64))


def series() -> Data:
    """Return time series of 12 steps and 3 channels, and the slope of the first channel."""
    rng = np.random.default_rng(4)
    slope = rng.normal(0, 1, CLIENTS * (TRAIN + TEST))
    x = rng.normal(0, 0.3, (len(slope), 12, 3))
    x[:, :, 0] += slope[:, None] * np.linspace(-1, 1, 12)
    return clients_of(x.astype(np.float32), slope)


TASKS: dict[str, tuple[Callable[[], Data], dict[str, Any]]] = {
    "regression": (regression, {"task": "regression", "model": "mlp"}),
    "multi-label": (multi_label, {"task": "multi-label", "model": "mlp"}),
    "series": (series, {"task": "regression", "model": "cnn1d"}),
}
every_task = pytest.mark.parametrize("task", TASKS)


@pytest.mark.parametrize("method", METHODS)
@every_task
def test_every_method_runs_on_every_task_or_refuses_it(
    make_config: MakeConfig, federate: Callable[..., Any], task: str, method: str
) -> None:
    build, settings = TASKS[task]
    config = make_config(
        method, data=build(), num_server_rounds=2, ppfe_stages=2, cfl_eps1=1e9, cfl_eps2=0.0, **settings
    )
    if settings_class(method).needs_classes:
        with pytest.raises(SettingsError, match=rf"method = '{method}' .*task = '{settings['task']}'"):
            read_settings(config)
        return
    finished = federate(config)
    metric = DEFAULTS[VALUES] if settings["task"] == "regression" else "average-precision"
    scores = {key: value for row in finished.records[-1].clients.values() for key, value in row.items()}
    assert math.isfinite(scores[f"{settings_class(method).point}_{metric.replace('-', '_')}"])
    assert not any("accuracy" in key for key in scores)


def test_methods_that_need_classes_say_why() -> None:
    assert {method for method in METHODS if settings_class(method).needs_classes} == NEEDS_CLASSES


@pytest.mark.parametrize("method", LEARNERS)
@every_task
def test_methods_learn_each_task(make_config: MakeConfig, federate: Callable[..., Any], task: str, method: str) -> None:
    """The loss falls below 85 % of the loss of a constant: 1 for standardised values, the entropy of the labels."""
    build, settings = TASKS[task]
    data = build()
    finished = federate(make_config(method, data=data, num_server_rounds=5, **LEARNING, **settings))
    losses = finished.column(f"{settings_class(method).point}_loss")[-1]
    shares = data[1].mean(axis=0)
    entropy = -(shares * np.log(shares) + (1 - shares) * np.log(1 - shares)).mean() if task == "multi-label" else 1.0
    assert np.mean(list(losses.values())) < 0.85 * entropy


# -- values ----------------------------------------------------------------------------------------------


def sklearn_values(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return the targets and the outputs in a file of stored predictions."""
    with path.open(encoding="utf-8", newline="") as file:
        header, *rows = csv.reader(file)
    table, size = np.array(rows, float), (len(header) - 1) // 2
    return table[:, 1 : 1 + size], table[:, 1 + size :]


def test_local_training_equals_a_plain_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client's first round on diabetes has the same parameters, bit for bit, as a loop of PyTorch's own modules."""
    monkeypatch.chdir(tmp_path)
    words = {"dataset": "diabetes", "num-clients": 3, "model": "mlp", "lr": 0.05, "batch-size": 16, "stack": "loop"}
    record = posy.run(
        method="local", num_server_rounds=1, run_name="a", **{k.replace("-", "_"): v for k, v in words.items()}
    )
    settings = located(DataSettings(dataset="diabetes", num_clients=3))
    dataset, part = load_clients(settings, Path(), seed=42)
    rows, all_rows = part.train[1], np.concatenate(part.train)
    x, y = dataset.x.astype(np.float64), dataset.y
    x, y = ((a - a[all_rows].mean(0)) / a[all_rows].std(0) for a in (x, y))
    inputs, targets = (torch.from_numpy(a[rows]).float() for a in (x, y))
    architecture = architecture_for("mlp", dataset.task)
    initial = torch.from_numpy(architecture.initial(model_seed(42, 0)))
    network = torch.nn.Sequential(
        torch.nn.Linear(10, 128), torch.nn.ReLU(), torch.nn.Linear(128, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1)
    )
    torch.nn.utils.vector_to_parameters(initial, network.parameters())
    optimiser = torch.optim.SGD(network.parameters(), lr=0.05)
    order = torch_generator(42, "batches", 1, 1, 0)
    for _ in range(2):
        for batch in torch.randperm(len(rows), generator=order).split(16):
            optimiser.zero_grad()
            F.mse_loss(network(inputs[batch]), targets[batch]).backward()
            optimiser.step()
    stored = record.predictor(1, "local").members[0]
    trained = torch.cat([parameter.detach().flatten() for parameter in stored.parameters()])
    expected = torch.cat([parameter.detach().flatten() for parameter in network.parameters()])
    torch.testing.assert_close(trained, expected, rtol=1e-6, atol=1e-7)


def test_metrics_of_a_regression_equal_scikit_learn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On stored predictions of diabetes, in the original unit; FedAvg beats the mean."""
    monkeypatch.chdir(tmp_path)
    record = posy.run(
        method="fedavg",
        dataset="diabetes",
        num_clients=3,
        lr=0.01,
        num_server_rounds=8,
        run_name="a",
        save_predictions=True,
    )
    clients = record.clients[record.clients["round"] == 8].set_index("partition")
    parts = [sklearn_values(record.path / "predictions" / f"served-{client}.csv") for client in range(3)]
    for client, (y, outputs) in enumerate(parts):
        assert set(np.unique(y)) <= set(range(400))  # values keep their exact numbers
        row = clients.loc[client]
        assert row["served_rmse"] == pytest.approx(root_mean_squared_error(y, outputs), rel=1e-12)
        assert row["served_mae"] == pytest.approx(mean_absolute_error(y, outputs), rel=1e-12)
        assert row["served_r2"] == pytest.approx(r2_score(y, outputs), rel=1e-12)
    pooled = record.summary["pooled"]["served"]["metrics"]
    y, outputs = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    assert pooled["r2"] == pytest.approx(r2_score(y, outputs), rel=1e-12) and pooled["r2"] > 0.3
    assert record.summary["metric"] == "rmse" and not any("accuracy" in column for column in record.clients)
    prediction = record.predictor(0).predict(load_clients(located(DataSettings(dataset="diabetes")), Path(), 1)[0].x[0])
    assert 50 < prediction["progression"] < 350


def test_metrics_of_labels_equal_scikit_learn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A table with two label columns; each site's stored predictions give the recorded scores."""
    monkeypatch.chdir(tmp_path)
    x, y, _, _ = multi_label()
    rows = [
        ",".join(map(str, (*a, *b, number % 2)))
        for number, (a, b) in enumerate(zip(x.tolist(), y.tolist(), strict=True))
    ]
    Path("t.csv").write_text("\n".join(["a,b,c,d,e,stroke,infarction,group", *rows]), encoding="utf-8")
    settings = {"task": "multi-label", "label_column": "stroke,infarction", "partition": "natural", "num_clients": 2}
    record = posy.run(
        method="ditto", dataset="t.csv", num_server_rounds=3, lr=0.1, save_predictions=True, run_name="a", **settings
    )
    row = record.clients[(record.clients["round"] == 3) & (record.clients["partition"] == 0)].iloc[0]
    y_true, p = sklearn_values(record.path / "predictions" / "local-0.csv")
    assert row["local_average_precision"] == pytest.approx(average_precision_score(y_true, p, average="macro"))
    assert row["local_micro_f1"] == pytest.approx(f1_score(y_true, p >= 0.5, average="micro", zero_division=0))
    assert record.summary["metric"] == "average-precision"
    model = record.predictor(0)
    prediction = model.predict(dict(zip("abcde", x[0], strict=True)))
    assert set(prediction.probabilities) == {"stroke", "infarction"}
    assert prediction.label == ", ".join(name for name, share in prediction.probabilities.items() if share >= 0.5)


@pytest.mark.parametrize("loss", ["mse", "mae", "huber", "bce"])
def test_stacked_training_equals_training_in_turn(
    make_config: MakeConfig, federate: Callable[..., Any], loss: str
) -> None:
    build, settings = TASKS["multi-label" if loss == "bce" else "regression"]
    settings = {"data": build(), "loss": loss, "num_server_rounds": 2, **settings}
    settings |= {"huber_delta": 0.3} if loss == "huber" else {}
    first, second = (federate(make_config("fedfew", stack=stack, **settings)) for stack in ("loop", "vmap"))
    for a, b in zip(first.column("local_loss"), second.column("local_loss"), strict=True):
        assert a == pytest.approx(b, rel=1e-4)


def test_errors_name_the_setting(make_config: MakeConfig) -> None:
    data = regression()
    for settings, text in (
        ({"partition": "dirichlet", "partition_file": ""}, "partition"),
        ({"loss": "cross-entropy"}, "loss"),
        ({"class_weights": "balanced"}, "class-weights"),
        ({"system_accuracy": "on"}, "system-accuracy"),
    ):
        with pytest.raises(SettingsError, match=text):
            read_settings(make_config("fedavg", data=data, task="regression", **settings))


@pytest.mark.parametrize("delta", [0.5, 2.0])
def test_losses_equal_those_of_pytorch(delta: float) -> None:
    generator = torch.Generator().manual_seed(1)
    outputs, values = torch.randn(2, 50, 3, generator=generator)
    for loss, expected in (
        ("mse", F.mse_loss(outputs, values)),
        ("mae", F.l1_loss(outputs, values)),
        ("huber", F.huber_loss(outputs, values, delta=delta)),
    ):
        torch.testing.assert_close(criterion_of(loss, VALUES, delta)(outputs, values).mean(), expected)
    labels = (values > 0).long()
    expected = F.binary_cross_entropy_with_logits(outputs, labels.float())
    torch.testing.assert_close(criterion_of("auto", LABELS)(outputs, labels).mean(), expected)


# -- boosting --------------------------------------------------------------------------------------------


def test_ppfe_boosts_values_as_adaboost_r2_with_half_of_its_exponent() -> None:
    """By hand: errors 1, 3 and 4 give losses 1/4, 3/4 and 1, so ε = 2/3; R2 has weights w β_R^(1 - ℓ)."""
    outputs, y = torch.tensor([[1.0], [3.0], [0.0]]), torch.tensor([[0.0], [0.0], [4.0]])
    losses = boosting_losses(outputs, y, "zero-one", VALUES)
    assert losses.tolist() == [0.25, 0.75, 1.0]
    weights = torch.tensor([2.0, 0.5, 0.5])
    beta, new = reweight(losses, weights, 2, "adaboost")
    error = (2 * 0.25 + 0.5 * 0.75 + 0.5) / 3
    assert beta == pytest.approx(0.5 * math.log((1 - error) / error))
    drucker = weights * (error / (1 - error)) ** (1 - losses)
    torch.testing.assert_close(new / new.sum(), weights**0.5 * drucker**0.5 / (weights**0.5 * drucker**0.5).sum())


def test_ensembles_average_values_and_probabilities_of_labels() -> None:
    outputs, weights = torch.tensor([[[2.0]], [[-1.0]], [[9.0]]]), torch.tensor([1.0, 3.0, -2.0])
    assert combined(outputs, weights, target=VALUES).item() == pytest.approx((2 - 3) / 4)
    first, second = (1 / (1 + math.exp(-z)) for z in (2.0, -1.0))
    p = combined(outputs[:2], weights[:2], target=LABELS).sigmoid().item()
    assert p == pytest.approx((first + 3 * second) / 4)
    assert combined(outputs[:2], weights[:2], True, LABELS).item() == pytest.approx((2 - 3) / 4)


def test_boosting_losses_of_labels_are_means_over_binary_classes() -> None:
    outputs, y = torch.tensor([[2.0, -1.0], [0.5, 0.5]]), torch.tensor([[1, 1], [1, 1]])
    assert boosting_losses(outputs, y, "zero-one", LABELS).tolist() == [0.5, 0.0]
    p = outputs.sigmoid().mean(dim=1)
    torch.testing.assert_close(boosting_losses(outputs, y, "probability", LABELS), 1 - p)


# -- masked sums -----------------------------------------------------------------------------------------


def test_masked_sums_give_the_metrics_of_a_regression() -> None:
    """Two clients' sums add up to scikit-learn's metrics of all samples, also of a constant and of a huge value."""
    rng = np.random.default_rng(0)
    y = np.column_stack([rng.normal(5e6, 1e6, 40), rng.normal(0, 1e-3, 40), np.full(40, 7.0)])
    outputs = y + rng.normal(0, 1, y.shape) * [1e5, 1e-4, 0.5]
    mean, std = y[:20].mean(0), np.array([1e6, 1e-3, 1.0])
    parts = [Predictions(VALUES, y[rows], outputs[rows]) for rows in (slice(15), slice(15, None))]
    sums = [sum(pair) for pair in zip(*(value_sums(part, mean, std) for part in parts), strict=True)]
    values = metrics_of(sums, 40, std)
    assert values["mae"] == pytest.approx(mean_absolute_error(y, outputs), rel=1e-5)
    assert values["rmse"] == pytest.approx(root_mean_squared_error(y.ravel(), outputs.ravel()), rel=1e-5)
    assert values["r2"] == pytest.approx(r2_score(y[:, :2], outputs[:, :2]), rel=1e-4)
    assert value_sums(Predictions(VALUES, y * 1e30, outputs), mean, std) is None
    assert metrics_of([100, *sums[1:]], 1, std) == {}  # no sample has such sums


@pytest.mark.parametrize("task", ["regression", "multi-label"])
def test_secure_aggregation_reports_the_plain_metrics(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, task: str
) -> None:
    build, settings = TASKS[task]
    monkeypatch.chdir(tmp_path)
    config = make_config("fedavg", data=build(), num_server_rounds=2, all_metrics="last", **settings)
    config.pop("run-name")
    plain, masked = (
        posy.run(
            **{key.replace("-", "_"): value for key, value in config.items()}, run_name=name, secure_aggregation=on
        )
        for name, on in (("plain", False), ("masked", True))
    )
    pooled = plain.summary["pooled"]["served"]["metrics"]
    tolerance = {"auroc": 0.02, "average-precision": 0.05}  # of binned probabilities
    names = ("mae", "rmse", "r2") if task == "regression" else ("micro-f1", "log-loss", "auroc", "average-precision")
    last = masked.rounds.iloc[-1]
    for name in names:
        value = last[f"served_{name.replace('-', '_')}_mean"]
        assert value == pytest.approx(pooled[name], rel=tolerance.get(name, 2e-3)), name


@pytest.mark.parametrize(("metric", "sums"), [("rmse", 2), ("mae", 2), ("r2", 5)])
def test_masked_sums_of_a_regression_without_all_metrics_give_one(
    make_config: MakeConfig, metric: str, sums: int
) -> None:
    config = make_config(
        "fedavg", data=regression(), num_server_rounds=2, validation_fraction=0.2, metric=metric, task="regression"
    ) | {"save-predictions": False}
    plain, masked = (run(None, config | {"secure-aggregation": on, "run-name": str(on)}) for on in (False, True))
    last = json.loads((masked.directory.path / "rounds.jsonl").read_text(encoding="utf-8").splitlines()[-1])
    for split in ("", "validation_"):
        reported = {
            name for name in ("mae", "rmse", "r2") for at in ("served", "local") if last.get(f"{at}_{split}{name}")
        }
        assert reported == {metric}
    assert last[f"served_{metric}"]["mean"] == pytest.approx(plain.summary["pooled"]["served"]["metrics"][metric], 2e-3)
    task = masked.workspace.task
    counts = [ScoreSums(masked.settings, task, training=False, all_metrics=every).count for every in (False, True)]
    values = len(task.value_mean)
    assert counts == [4 * (3 + sums * values) + 1, 2 * (3 + sums * values) + 2 * (3 + 5 * values) + 1]


def test_dp_sgd_trains_a_regression_of_time_series(make_config: MakeConfig, federate: Callable[..., Any]) -> None:
    privacy = {"dp": "sample", "dp_clip": 1.0, "dp_epsilon": 50.0, "dp_delta": 0.01, "dp_scores": "exact"}
    settings = {"data": series(), "task": "regression", "num_server_rounds": 6, "lr": 0.3, "model": "gru"}
    finished = federate(make_config("fedavg", **settings, **privacy))
    assert np.mean(list(finished.column("served_loss")[-1].values())) < 0.9


# -- time series -----------------------------------------------------------------------------------------


def test_the_gru_equals_that_of_pytorch() -> None:
    torch.manual_seed(0)
    ours, theirs = GRU(3, 5), torch.nn.GRU(3, 5, batch_first=True)
    pairs = {
        "input": "weight_ih_l0",
        "recurrent": "weight_hh_l0",
        "input_bias": "bias_ih_l0",
        "recurrent_bias": "bias_hh_l0",
    }
    for name, other in pairs.items():
        getattr(ours, name).data.copy_(getattr(theirs, other))
    x = torch.randn(4, 7, 3)
    torch.testing.assert_close(ours(x), theirs(x)[0][:, -1])


@pytest.mark.parametrize(
    ("x", "kind"),
    [
        (np.linspace(-1, 1, 240).reshape(4, 10, 6), "series"),
        (np.linspace(0, 1, 240).reshape(4, 10, 6), "image-float"),
        (np.linspace(-1, 1, 144).reshape(4, 6, 6), "image-float"),
        (np.arange(240).reshape(4, 10, 6), "image"),
        (np.arange(240).reshape(4, 10, 6) * 2, "series"),
    ],
)
def test_arrays_of_three_axes_are_series_or_images(x: np.ndarray, kind: str) -> None:
    found, samples, notes = samples_of(x, "auto", "x")
    assert found == kind and len(samples) == 4 and bool(notes) == (kind == "series")
    assert samples_of(x, "series", "x")[0] == "series"


def test_channels_of_series_are_standardised_over_all_steps(make_client: Callable[..., PersonalClient]) -> None:
    x, y, train, test = series()
    clients = [
        make_client("local", client, data=(x * [1, 50, 1] + [0, 9, 0], y, train, test), task="regression")
        for client in range(3)
    ]
    joined = torch.cat([client.data.x_train for client in clients]).flatten(0, 1)
    torch.testing.assert_close(joined.mean(0), torch.zeros(3), atol=1e-5, rtol=0)
    torch.testing.assert_close(joined.std(0, correction=0), torch.ones(3), atol=1e-5, rtol=0)
    assert joined.shape[1] == 3 and clients[0].architecture.model == "gru"


# -- sites -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("secure", [False, True])
def test_sites_agree_on_the_values_and_series_of_a_run(tmp_path: Path, secure: bool) -> None:
    """The statistics are those of all sites' training rows; a site with columns in another order takes part."""
    rng = np.random.default_rng(1)
    sites, tables = [], []
    rules = tmp_path / "policy.yaml"
    rules.write_text(LENIENT.read_text(encoding="utf-8") + "\nlabel: days,glucose\n", encoding="utf-8")
    policy = read_policy(rules)
    for number in range(3):
        x = rng.normal(0, 1, (60, 2))
        y = x @ [[3.0, -200.0], [1.0, 100.0]] + [0, 1000 * number]
        names = ["age", "bmi", *(("glucose", "days") if number else ("days", "glucose"))]
        rows = np.column_stack([x, *(y.T[::-1] if number else y.T)])
        path = tmp_path / f"site{number}.csv"
        path.write_text("\n".join([",".join(names), *(",".join(map(repr, row)) for row in rows.tolist())]))
        sites.append({"name": f"site{number}", "data": str(path), "policy": str(rules)})
        tables.append((path, y))
    config = {
        **{"method": "fedavg", "dataset": "sites", "task": "regression", "label-column": "days,glucose"},
        **{"num-clients": 3, "num-server-rounds": 3, "lr": 0.05, "batch-size": 8, "model": "mlp"},
        **{"output-dir": str(tmp_path / "runs"), "run-name": "a", "device": "cpu"},
    }
    if secure:
        config |= {"secure-aggregation": True, "classes": "days,glucose"}
    done = run(NodeGrid(*sites), config)
    data = done.settings.data
    assert data.classes == "days,glucose" and done.summary["metric"] == "rmse"
    training = []
    for path, y in tables:
        content = read_site(path, data, policy)
        assert content.target == VALUES
        training.append(y[site_split(content, data, policy)[0]])
    joined = np.concatenate(training)
    np.testing.assert_allclose([float(word) for word in data.target_mean.split(",")], joined.mean(0), rtol=1e-9)
    np.testing.assert_allclose([float(word) for word in data.target_std.split(",")], joined.std(0), rtol=1e-9)
    assert done.rounds == 3


@pytest.mark.parametrize("secure", [False, True])
def test_sites_standardise_each_channel_of_their_time_series(tmp_path: Path, secure: bool) -> None:
    """The statistics of a channel are those of all steps in all sites' training samples."""
    rng = np.random.default_rng(3)
    sites = []
    for number in range(3):
        trend = rng.normal(0, 1, 60)
        x = rng.normal(0, 0.3, (60, 8, 3)) * [1, 40, 1] + [number, 900, 0]
        x[:, :, 0] += trend[:, None] * np.linspace(-1, 1, 8)
        path = tmp_path / f"site{number}.npz"
        np.savez(path, x_train=x, y_train=np.where(trend > 0, "rises", "falls"))
        sites.append({"name": f"site{number}", "data": str(path)})
    config = {
        **{
            "method": "fedavg",
            "dataset": "sites",
            "num-clients": 3,
            "num-server-rounds": 3,
            "optimizer": "adam",
            "lr": 0.01,
        },
        **{"batch-size": 8, "output-dir": str(tmp_path / "runs"), "run-name": "a", "device": "cpu"},
    }
    if secure:
        config |= {"secure-aggregation": True}
    done = run(NodeGrid(*sites), config)
    data = done.settings.data
    training = []
    for site in sites:
        content = read_site(Path(site["data"]), data, POLICY)
        assert content.kind == "series"
        training.append(content.x[site_split(content, data, POLICY)[0]])
    steps = np.concatenate(training).reshape(-1, 3).astype(np.float64)
    np.testing.assert_allclose([float(word) for word in data.feature_mean.split(",")], steps.mean(0), rtol=1e-6)
    np.testing.assert_allclose([float(word) for word in data.feature_std.split(",")], steps.std(0), rtol=1e-6)
    assert (data.input_shape, data.sample_kind, done.strategy.architecture.model) == ("8x3", "series", "gru")
    assert done.summary["local"]["last"]["mean"] > 0.7


def test_a_policy_limits_the_metrics_of_a_task() -> None:
    """With `metrics = accuracy`, a run may request errors of a regression, but no ranking metrics of labels."""
    allowed = {
        "regression": ("auto", "rmse", "mae"),
        "multi-label": ("accuracy",),
        "classification": ("auto", "accuracy"),
    }
    for task, metrics in allowed.items():
        for metric in ("auto", "accuracy", "rmse", "mae", "r2", "average-precision"):
            values = {"task": task, "metric": metric, "all-metrics": "none", "secure-aggregation": True}
            assert (not list(_scores(Policy(), values))) == (metric in metrics)
    rounded = limited_scores(Policy(), {"served-rmse": 12345.678, "served-loss": 0.98765})
    assert rounded == {"served-rmse": 12300.0, "served-loss": 0.99}
