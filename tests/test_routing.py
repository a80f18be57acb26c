"""FedDRM's routing through the service, as `benchmarks.routing` measures it."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import posy
from benchmarks.routing import Routed, accuracies, differences, measure, over_runs, pixels_of, shift_differences
from posy.data.inputs import Preprocessing, normalised
from posy.data.shifts import SHIFTS
from posy.data.task import Task
from posy.server_app.record import Record

RUN: dict[str, Any] = {"method": "feddrm", "model": "cnn", "num_clients": 8, "partition": "iid", "device": "cpu"}


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> Record:
    """Return the record of a run on coloured images with the eight shifts, in which test images are cropped."""
    folder = tmp_path_factory.mktemp("routing")
    rng = np.random.default_rng(0)
    y = np.arange(640) % 4
    colours = rng.integers(40, 216, (4, 1, 1, 3))
    x = np.clip(colours[y] + rng.normal(0, 25, (640, 16, 16, 3)), 0, 255).astype(np.uint8)
    np.savez(folder / "colours.npz", x_train=x, y_train=y)
    settings = {"local_steps": 10, "batch_size": 16, "lr": 0.05, "num_server_rounds": 2, "save_predictions": True}
    settings |= {"shift": "high", "augment": "resized-crop", "test_fraction": 0.4, "output_dir": str(folder)}
    return posy.run(dataset=str(folder / "colours.npz"), **RUN, **settings)


def test_the_service_answers_as_the_run(record: Record) -> None:
    result = measure(str(record.path), 20)
    accuracy, summary = result["accuracy"], record.summary
    assert result["samples"] == 256
    assert accuracy["system"] == summary["system-accuracy"]
    assert accuracy["routing"] == summary["routing-accuracy"]
    assert result["equals the record"] is True
    counts = result["different answers"]
    assert {name: count for name, count in counts.items() if "8-bit" not in name} == {
        "client": 0,
        "class": 0,
        "class of the true client": 0,
        "client, one sample per request": 0,
        "class, one sample per request": 0,
    }
    matrix = np.array(result["true x chosen client"])
    assert matrix.sum(axis=1).tolist() == [32] * 8
    assert np.trace(matrix) / 256 == accuracy["routing"]
    assert matrix.any(axis=0).sum() > 2  # several clients are chosen
    assert accuracy["true client"] == pytest.approx(summary["served"]["last"]["mean"])
    assert json.loads(json.dumps(result)) == result


def test_runs_without_a_shift_are_refused(tmp_path: Path) -> None:
    settings = {"max_samples": 200, "num_server_rounds": 1, "output_dir": str(tmp_path)}
    plain = posy.run(method="feddrm", dataset="digits", num_clients=2, **settings)
    with pytest.raises(SystemExit, match="needs a run with method = feddrm, and with a covariate shift"):
        measure(str(plain.path), 1)


def test_pixels_are_those_of_the_images() -> None:
    images = np.random.default_rng(0).integers(0, 256, (3, 5, 4, 3)).astype(np.uint8)
    mean, std = np.array([0.5, 0.4, 0.3], np.float32), np.array([0.5, 0.2, 0.1], np.float32)
    preprocessing = Preprocessing(Task("image", (3, 5, 4), ("a", "b")), "image", mean, std)
    x = normalised(torch.from_numpy(images.copy()), "image", mean, std)
    pixels = pixels_of(x, preprocessing)
    np.testing.assert_allclose(pixels, images.transpose(0, 3, 1, 2), atol=1e-4)
    assert pixels_of(x + 100, preprocessing).max() == 255  # rounding can move a pixel out of the range


def test_accuracies_by_hand() -> None:
    y, owner = np.array([0, 1, 2, 0]), np.array([0, 0, 1, 2])
    votes = np.array([[0, 0, 0, 0], [0, 1, 2, 1], [1, 1, 2, 1]])
    routed = Routed(np.array([0, 1, 1, 0]), np.array([0, 1, 2, 0]))
    assert accuracies(y, owner, routed, votes, 3) == pytest.approx(
        {
            "routing": 2 / 4,
            "system": 1,
            "system, right client": 1,
            "system, wrong client": 1,
            "majority vote": 3 / 4,  # 0, 1, 2, 1
            "true client": 2 / 4,  # 0, 0, 2, 1
            "any client": 1,
            "best single client": 3 / 4,
            "mean single client": (2 + 3 + 2) / 12,
        }
    )
    all_right = accuracies(y, owner, Routed(owner, y), votes, 3)
    assert all_right["routing"] == 1 and "system, wrong client" not in all_right


def test_differences_by_hand() -> None:
    answers, expected = Routed(np.array([1, 2]), np.array([0, 0])), Routed(np.array([2, 0, 1]), np.array([0, 0, 1]))
    assert differences(answers, expected, np.array([2, 0])) == {"client": 0, "class": 1}


def test_shift_differences_by_hand() -> None:
    # Clients 0 and 1 differ in gamma, 0 and 2 in hue, 0 and 4 in saturation, and 0 and 7 in all three.
    matrix = np.zeros((8, 8), np.int64)
    matrix[0, [0, 1, 2, 4, 7]] = 10, 4, 3, 2, 1
    expected = {"none": 0.5, "gamma": 0.2, "hue": 0.15, "saturation": 0.1, "several": 0.05}
    assert shift_differences(matrix, SHIFTS["high"]) == expected
    posterised = [shift._replace(bits=2) for shift in SHIFTS["high"][:1]]
    assert shift_differences(np.array([[0, 1], [1, 2]]), [SHIFTS["high"][0], *posterised]) == {"none": 0.5, "bits": 0.5}


def test_means_over_runs_by_hand() -> None:
    matrices = [[[2, 0], [1, 1]], [[1, 1], [2, 4]]]
    results = [
        {"accuracy": {"system": value}, "different transformation": {"hue": value / 2}, "true x chosen client": matrix}
        for value, matrix in zip((0.2, 0.4), matrices, strict=True)
    ]
    results[0]["accuracy"]["system, wrong client"] = 0.1  # the second run has none
    summary = over_runs(results)
    assert list(summary["accuracy"]) == ["system"]
    assert summary["accuracy"]["system"] == pytest.approx({"mean": 0.3, "std": 0.1414213562})
    assert summary["different transformation"]["hue"]["mean"] == pytest.approx(0.15)
    assert summary["true x chosen client, %"] == [[75.0, 25.0], [37.5, 62.5]]
