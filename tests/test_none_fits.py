"""The router's flag for queries that are far from every client's data."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.covariance import ledoit_wolf

import posy
from posy.client_app.none_fits import FILE, Calibration, NotCalibratedError, calibrate
from posy.client_app.workspace import Workspace
from posy.commands import cli
from posy.data.task import Task
from posy.models.architecture import architecture_for
from posy.models.two_branch import TwoBranch
from posy.outliers import Reference, conformal_threshold, distances, fit_reference, shrunk
from posy.serve.router import RouterEndpoint
from posy.serve.run_models import load_endpoints
from posy.server_app.app import run
from posy.server_app.record import Record
from posy.storage import DamagedFileError, read_arrays, write_arrays
from posy.strategies.feddrm import FedDRMSettings
from posy.strategies.registry import read_settings

MakeConfig = Callable[..., dict[str, Any]]

# -- the distance ----------------------------------------------------------------------------------------


def test_distances_by_hand() -> None:
    """The whitening halves the first axis, and the means are already whitened."""
    reference = Reference(np.diag([0.5, 1.0]), np.array([[0.5, 0.0], [0.0, 1.0]]))
    # After whitening, (1, 0) is the first mean (0.5, 0), and (-1, 0) is (-0.5, 0).
    results = distances(reference, np.array([[1.0, 0.0], [-1.0, 0.0], [0.0, 0.0], [np.nan, 0.0], [np.inf, 0.0]]))
    assert results.tolist() == pytest.approx([0, 1, 0.5, math.inf, math.inf])


def test_covariance_of_two_groups_by_hand() -> None:
    """Each group has two samples of equal distance to its mean, along the first or along the second axis."""
    x = np.array([[0.6, 0.8, 0], [-0.6, 0.8, 0], [0.6, 0, 0.8], [-0.6, 0, 0.8]])
    reference = fit_reference([(x[:2], np.zeros(2, int)), (x[2:], np.zeros(2, int))])
    # All residuals are (±0.6, 0, 0). The error of the covariance is 0, so only the minimum of 1e-4 shrinks it.
    variances = np.array([0.9999 * 0.36 + 1e-4 * 0.12, 1e-4 * 0.12, 1e-4 * 0.12])
    whitening = reference.whitening
    # The mean square of the training samples' distances is 0.36 / variances[0], by which squares are divided.
    expected = np.diag(1 / variances) / (0.36 / variances[0])
    np.testing.assert_allclose(whitening @ whitening.T, expected, rtol=1e-9, atol=1e-6)
    np.testing.assert_allclose(distances(reference, x), np.ones(4))


@pytest.mark.parametrize("shape", [(5, 9), (40, 6), (300, 4)])
def test_shrinkage_equals_scikit_learns(shape: tuple[int, int]) -> None:
    x = np.random.default_rng(0).normal(size=shape) * np.arange(1, shape[1] + 1)
    expected, weight = ledoit_wolf(x, assume_centered=True)
    assert weight > 1e-4
    results = shrunk(x.T @ x / len(x), float(((x**2).sum(axis=1) ** 2).mean()), len(x))
    np.testing.assert_allclose(results, expected)


def test_groups_of_one_sample_give_euclidean_distances() -> None:
    x = np.array([[1.0, 0.0], [0.0, 1.0]])
    reference = fit_reference([(x, np.array([3, 7]))])
    assert distances(reference, np.array([[1.0, 0.0], [0.0, 3.0]])).tolist() == [0, 2]


def test_a_single_constant_sample_is_at_distance_0() -> None:
    reference = fit_reference([(np.zeros((4, 3)), np.zeros(4, int))])
    assert distances(reference, np.array([[0.0, 0.0, 0.0], [0.0, 2.0, 0.0]])).tolist() == [0, 2]


def test_constant_features_and_few_samples_have_finite_distances() -> None:
    """A feature that never varies in training has a small variance, so a sample that changes it is far away."""
    rng = np.random.default_rng(1)
    x = np.hstack([rng.normal(size=(6, 20)), np.zeros((6, 20))])
    reference = fit_reference([(x, np.zeros(6, int))])
    changed = x.copy()
    changed[:, 20:] = rng.normal(size=(6, 20))
    inside, outside = distances(reference, x), distances(reference, changed)
    assert np.isfinite(outside).all() and outside.min() > inside.max()


def test_parts_are_separate_groups_and_empty_parts_are_skipped() -> None:
    x = np.random.default_rng(2).normal(size=(12, 3))
    groups = np.array([0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3])
    undivided = fit_reference([(x, groups)])
    divided = fit_reference([(x[:6], groups[:6]), (x[:0], groups[:0]), (x[6:], groups[6:] - 2)])
    np.testing.assert_allclose(distances(divided, x), distances(undivided, x))


@pytest.mark.parametrize(("x", "message"), [(np.zeros((0, 2)), "no training samples"), ([[np.inf, 1]], "not finite")])
def test_unusable_training_samples_are_errors(x: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fit_reference([(np.array(x), np.zeros(len(x), int))])


def test_embeddings_of_images_are_unit_rows_and_statistics_of_channels() -> None:
    task = Task("image", (1, 28, 28), ("a", "b"))
    network = FedDRMSettings().network(architecture_for("cnn", task), num_clients=3).build(seed=1)
    assert isinstance(network, TwoBranch)
    x = torch.randn(5, 1, 28, 28)
    rows, statistics = FedDRMSettings().client_embeddings(network, x)
    inputs: list[torch.Tensor] = []
    network.client_head.register_forward_pre_hook(lambda _, arguments: inputs.append(arguments[0]))
    network(x)
    np.testing.assert_allclose(
        *(each.numpy(force=True) for each in (rows, inputs[0] / inputs[0].norm(dim=1, keepdim=True))), rtol=1e-5
    )
    first, second = list(network.model.blocks.values())[:2]
    channels = [block.flatten(2).numpy(force=True) for block in (first(x), second(first(x)))]
    expected = [each for block in channels for each in (block.mean(axis=2), block.std(axis=2))]
    np.testing.assert_allclose(statistics.numpy(force=True), np.hstack(expected), atol=1e-5)


# -- the threshold ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "alpha", "expected"),
    [(18, 0.05, None), (19, 0.05, 19), (38, 0.05, 38), (39, 0.05, 38), (99, 0.29, 71), (3, 0.5, 2), (0, 0.05, None)],
)
def test_threshold_by_hand(count: int, alpha: float, expected: float | None) -> None:
    """With 39 scores, two of the 40 ranks of a further score are above the 38th: 5 %."""
    scores = np.random.default_rng(0).permutation(np.arange(1, count + 1)).astype(float)
    assert conformal_threshold(scores, alpha) == expected


def test_further_scores_exceed_the_threshold_as_often_as_stated() -> None:
    rng = np.random.default_rng(0)
    exceeding = [rng.normal() > (conformal_threshold(rng.normal(size=39), 0.05) or 0) for _ in range(20_000)]
    assert np.mean(exceeding) == pytest.approx(0.05, abs=4 * math.sqrt(0.05 * 0.95 / 20_000))


# -- a run -----------------------------------------------------------------------------------------------

RUN = {
    "method": "feddrm", "dataset": "digits", "num_clients": 4, "num_server_rounds": 12, "lr": 0.1, "model": "mlp",
    "validation_fraction": 0.2, "device": "cpu",
}  # fmt: skip


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> Record:
    """Return the record of a run with a calibration."""
    return posy.run(**RUN, output_dir=str(tmp_path_factory.mktemp("runs")), run_name="calibrated")


def noise(count: int) -> np.ndarray:
    """Return images of uniform noise in the size of the digits."""
    return np.random.default_rng(0).integers(0, 256, (count, 8, 8)).astype(np.uint8)


def test_the_rates_in_the_summary_are_those_of_the_answers(record: Record) -> None:
    entry = record.summary["none-fits"]
    workspace = Workspace(record.predictor(0).settings)
    partition, x = workspace.partition, workspace.dataset.x
    assert entry["alpha"] == 0.05
    assert entry["validation-samples"] == sum(map(len, partition.validation))
    assert entry["test-samples"] == sum(map(len, partition.test))
    flags = [[answer.none_fits for answer in record.route(x[test])] for test in partition.test]
    assert entry["false-alarm-rate"] == pytest.approx(np.mean(np.concatenate(flags)))
    rates = {str(client): float(np.mean(each)) for client, each in enumerate(flags)}
    assert entry["client-false-alarm-rates"] == pytest.approx(rates)
    assert 0 < entry["false-alarm-rate"] < 0.12
    validation = [answer.distance for split in partition.validation for answer in record.route(x[split])]
    exceeding = sum(distance is not None and distance > 1 for distance in validation)
    assert exceeding == math.floor(0.05 * (len(validation) + 1)) - 1  # the threshold itself does not exceed it


def test_noise_fits_no_client(record: Record) -> None:
    assert np.mean([answer.none_fits for answer in record.route(noise(100))]) > 0.95


def test_the_router_of_the_service_answers_as_the_record_does(record: Record) -> None:
    endpoints = load_endpoints(record)
    router = endpoints["router"]
    assert isinstance(router, RouterEndpoint)
    workspace = Workspace(record.predictor(0).settings)
    digits = workspace.dataset.x[workspace.partition.test[0]][:10].reshape(-1, 8, 8)
    x = np.concatenate([noise(10), digits])
    outputs = router.predict([{"image": x[:5, None]}, {"image": x[5:, None]}, {"image": x[:0, None]}])
    assert not any(isinstance(each, Exception) for each in outputs)
    results = {name: np.concatenate([each[name] for each in outputs]) for name in ("none_fits", "distance")}  # type: ignore[index]
    assert [(name, array.dtype) for name, array in results.items()] == [("none_fits", bool), ("distance", np.float32)]
    answers = record.route(x)
    np.testing.assert_allclose(results["distance"], [answer.distance for answer in answers], rtol=1e-4)
    assert results["none_fits"].tolist() == [answer.none_fits for answer in answers]
    assert router.card["none_fits"] == record.summary["none-fits"]
    assert [spec["name"] for spec in router.card["outputs"]][-2:] == ["none_fits", "distance"]
    json.dumps(router.card)


def test_route_shows_the_flag(record: Record, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.save(tmp_path / "x.npy", noise(1))
    assert cli.main(["route", str(record.path), str(tmp_path / "x.npy")]) == 0
    (answer,) = record.route(noise(1))
    assert f"none fits ({answer.distance:.2f})" in capsys.readouterr().out
    assert cli.main(["route", str(record.path), str(tmp_path / "x.npy"), "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["none_fits"] is True and row["distance"] == pytest.approx(answer.distance)


def test_a_calibration_of_another_round_or_format_is_not_used(record: Record, tmp_path: Path) -> None:
    current = Calibration.read(record.models, 12)
    assert current is not None and Calibration.read(record.models, 11) is None
    arrays, about = read_arrays(record.models / FILE)
    write_arrays(tmp_path / FILE, arrays, about | {"format": "2"})
    with pytest.raises(DamagedFileError, match="format 2"):
        Calibration.read(tmp_path, 12)


# -- without a calibration -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({}, "at least 19 validation samples, not 0; repeat the run with validation-fraction = 0.1"),
        ({"validation_fraction": 0.1}, "at least 19 validation samples, not 4; increase validation-fraction"),
        ({"validation_fraction": 0.4, "save_models": False}, "save-models"),
        ({"validation_fraction": 0.4, "scaling": "client"}, "scaling = client"),
        ({"validation_fraction": 0.4, "dp": "local", "dp_epsilon": 8.0, "dp_clip": 1.0}, "dp = local"),
        ({"validation_fraction": 0.4, "secure_aggregation": True}, "secure-aggregation"),
    ],
)
def test_a_run_without_a_calibration_states_the_reason(
    settings: dict[str, Any], reason: str, make_config: MakeConfig
) -> None:
    done = run(None, make_config("feddrm", model="mlp", **settings))
    assert reason in done.summary["none-fits"]["reason"]
    assert not (done.directory.models / FILE).exists()
    if settings.get("scaling") == "client" or not settings.get("save_models", True) or "secure_aggregation" in settings:
        return
    record = done.record()
    assert record.route([[0.0] * 6])[0].none_fits is None
    router = load_endpoints(record)["router"]
    assert reason in router.card["none_fits"]["reason"]
    assert not {"none_fits", "distance"} & {spec.name for spec in router.outputs}


def test_a_method_that_does_not_route_has_no_entry(make_config: MakeConfig) -> None:
    assert "none-fits" not in run(None, make_config("fedavg", validation_fraction=0.4)).summary


def test_a_client_without_training_or_test_samples_is_no_error(record: Record) -> None:
    """A newcomer's group may be empty; the rates then cover the other clients."""
    model = record.predictor(0)
    workspace = Workspace(read_settings(record.settings))
    data = {client: workspace.client_data(client) for client in range(2)}
    empty = {name: getattr(data[1], name)[:0] for name in ("x_train", "y_train", "x_test", "y_test")}
    data[1] = type(data[1])(**{**vars(data[1]), **empty})
    facts = calibrate(model, [0, 1], data.__getitem__).facts
    assert list(facts["client-false-alarm-rates"]) == ["0"]
    broken = {
        client: type(each)(**{**vars(each), "x_train": each.x_train * torch.nan}) for client, each in data.items()
    }
    with pytest.raises(NotCalibratedError, match="not finite"):
        calibrate(model, [0, 1], broken.__getitem__)
