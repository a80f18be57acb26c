"""Metrics equal scikit-learn's, and are marked as missing where the samples do not define them."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn import metrics as reference

from posy.binned import BINS, BinnedScores
from posy.bootstrap import intervals
from posy.metrics import CALIBRATION_BINS, CLASSES, LABELS, METRICS, VALUES, metrics_for
from posy.scores import Predictions, confusion_matrix, recalls, value_of, values_of, weighted

RNG = np.random.default_rng(0)


def random_classes(samples: int, classes: int, seed: int = 0, *, absent: int = 0) -> Predictions:
    """Return predictions of which the last ``absent`` classes have no samples."""
    rng = np.random.default_rng(seed)
    outputs = rng.dirichlet(np.ones(classes), samples)
    y = rng.integers(0, classes - absent, samples)
    return Predictions(CLASSES, y, outputs)


def random_labels(samples: int, labels: int) -> Predictions:
    return Predictions(LABELS, RNG.integers(0, 2, (samples, labels)), RNG.uniform(size=(samples, labels)))


def random_values(samples: int, values: int) -> Predictions:
    return Predictions(VALUES, RNG.normal(size=(samples, values)), RNG.normal(size=(samples, values)))


BINARY = random_classes(80, 2)
TIED = Predictions(CLASSES, BINARY.y, (9 * BINARY.outputs).round() / 9)
MULTI = random_classes(200, 5)
MULTI_LABEL = random_labels(60, 4)
REGRESSION = random_values(50, 2)


def of_binary(p: Predictions) -> dict[str, float]:
    y, score = p.y, p.outputs[:, 1]
    decided = score >= p.threshold
    false_positives, sensitivities, _ = reference.roc_curve(y, score)
    return {
        "accuracy": reference.accuracy_score(y, score >= 0.5),
        "balanced-accuracy": reference.balanced_accuracy_score(y, score >= 0.5),
        "macro-f1": reference.f1_score(y, score >= 0.5, average="macro"),
        "weighted-f1": reference.f1_score(y, score >= 0.5, average="weighted"),
        "auroc": reference.roc_auc_score(y, score),
        "average-precision": reference.average_precision_score(y, score),
        "sensitivity": reference.recall_score(y, decided),
        "specificity": reference.recall_score(y, decided, pos_label=0),
        "specificity-at-sensitivity": 1 - false_positives[sensitivities >= p.sensitivity].min(),
        "log-loss": reference.log_loss(y, p.outputs),
        "brier": reference.brier_score_loss(y, score),
        "calibration-error": calibration_error(p),
    }


def of_classes(p: Predictions) -> dict[str, float]:
    y, predicted = p.y, p.outputs.argmax(axis=1)
    return {
        "accuracy": reference.accuracy_score(y, predicted),
        "balanced-accuracy": reference.balanced_accuracy_score(y, predicted),
        "macro-f1": reference.f1_score(y, predicted, average="macro"),
        "weighted-f1": reference.f1_score(y, predicted, average="weighted"),
        "auroc": reference.roc_auc_score(y, p.outputs, multi_class="ovr"),
        "average-precision": reference.average_precision_score(y, p.outputs),
        "log-loss": reference.log_loss(y, p.outputs),
        "brier": reference.brier_score_loss(y, p.outputs, scale_by_half=False),
        "calibration-error": calibration_error(p),
    }


def of_labels(p: Predictions) -> dict[str, float]:
    y, decided = p.y, p.outputs >= p.threshold
    return {
        "accuracy": reference.accuracy_score(y, decided),
        "macro-f1": reference.f1_score(y, decided, average="macro"),
        "weighted-f1": reference.f1_score(y, decided, average="weighted"),
        "micro-f1": reference.f1_score(y, decided, average="micro"),
        "auroc": reference.roc_auc_score(y, p.outputs),
        "average-precision": reference.average_precision_score(y, p.outputs),
        "log-loss": float(np.mean([reference.log_loss(y[:, c], p.outputs[:, c]) for c in range(p.size)])),
        "brier": reference.mean_squared_error(y, p.outputs),
    }


def of_values(p: Predictions) -> dict[str, float]:
    return {
        "mae": reference.mean_absolute_error(p.y, p.outputs),
        "rmse": math.sqrt(reference.mean_squared_error(p.y, p.outputs)),
        "r2": reference.r2_score(p.y, p.outputs),
    }


def calibration_error(p: Predictions) -> float:
    """Compute the error bin by bin, as Guo et al. (2017, Eq. 3) define it."""
    confidence, correct = p.outputs.max(axis=1), p.outputs.argmax(axis=1) == p.y
    total = 0.0
    for number in range(CALIBRATION_BINS):
        low, high = number / CALIBRATION_BINS, (number + 1) / CALIBRATION_BINS
        in_bin = (confidence > low) & (confidence <= high)
        if in_bin.any():
            total += in_bin.mean() * abs(correct[in_bin].mean() - confidence[in_bin].mean())
    return total


@pytest.mark.parametrize(
    ("predictions", "expected"),
    [
        (BINARY, of_binary),
        (Predictions(CLASSES, BINARY.y, BINARY.outputs, threshold=0.3, sensitivity=0.75), of_binary),
        (TIED, of_binary),
        (MULTI, of_classes),
        (MULTI_LABEL, of_labels),
        (REGRESSION, of_values),
    ],
    ids=["two classes", "threshold 0.3", "ties", "five classes", "labels", "values"],
)
def test_all_metrics_equal_scikit_learn(predictions: Predictions, expected: Any) -> None:
    names = [metric.name for metric in metrics_for(predictions.target, predictions.size)]
    wanted = expected(predictions)
    assert values_of(predictions, names) == pytest.approx(wanted, rel=1e-12)
    assert list(wanted) == names


def test_each_metric_belongs_to_a_task() -> None:
    tasks = [(CLASSES, 2), (CLASSES, 5), (LABELS, 4), (VALUES, 1)]
    assert {metric.name for task in tasks for metric in metrics_for(*task)} == set(METRICS)


def test_a_positive_class_can_be_the_first_one() -> None:
    turned = Predictions(CLASSES, BINARY.y, BINARY.outputs, positive=0)
    assert value_of("sensitivity", turned) == value_of("specificity", BINARY)
    assert value_of("auroc", turned) == pytest.approx(value_of("auroc", BINARY))


def test_metrics_of_one_class_are_missing() -> None:
    p = Predictions(CLASSES, np.ones(4, np.int64), np.array([[0.2, 0.8]] * 3 + [[0.6, 0.4]]))
    values = values_of(p, [metric.name for metric in metrics_for(CLASSES, 2)])
    missing = {"auroc", "average-precision", "specificity", "specificity-at-sensitivity"}
    assert {metric.name for metric in metrics_for(CLASSES, 2)} - values.keys() == missing
    assert (values["accuracy"], values["sensitivity"], values["balanced-accuracy"]) == (0.75, 0.75, 0.75)


def test_absent_classes_do_not_count() -> None:
    """Class 2 does not occur, and its probability takes part only in the ranking of the other classes."""
    p = random_classes(100, 3, absent=1)
    per_class = [reference.roc_auc_score(p.y == c, p.outputs[:, c]) for c in (0, 1)]
    assert value_of("auroc", p) == pytest.approx(np.mean(per_class))
    assert recalls(confusion_matrix(p))[2] is None


def test_metrics_without_samples_are_missing() -> None:
    p = Predictions(CLASSES, np.empty(0, np.int64), np.empty((0, 2)))
    assert values_of(p, METRICS) == {}


def test_a_constant_target_has_no_r2() -> None:
    p = Predictions(VALUES, np.array([[1.0, 2.0], [1.0, 4.0]]), np.array([[0.0, 2.5], [3.0, 3.5]]))
    assert value_of("r2", p) == pytest.approx(1 - 0.5 / 2)
    assert value_of("r2", p.rows(np.array([0]))) is None


@pytest.mark.parametrize(
    "predictions", [BINARY, MULTI, MULTI_LABEL, REGRESSION], ids=["two classes", "five classes", "labels", "values"]
)
def test_weighted_metrics_equal_the_metrics_of_repeated_samples(predictions: Predictions) -> None:
    """A draw contains some samples several times, and others not at all."""
    names = [metric.name for metric in metrics_for(predictions.target, predictions.size)]
    count = len(predictions.y)
    weights = np.random.default_rng(3).multinomial(count, np.full(count, 1 / count), size=5).astype(float)
    results = weighted(predictions, weights, names)
    for draw, row in enumerate(weights):
        rows = np.repeat(np.arange(count), row.astype(int))
        expected = values_of(predictions.rows(rows), names)
        assert {name: values[draw] for name, values in results.items()} == pytest.approx(expected, rel=1e-9)


def test_intervals_shrink_with_the_samples() -> None:
    p = random_classes(400, 2)
    few = intervals(p.rows(np.arange(40)), ["accuracy", "auroc"], np.random.default_rng(1))
    many = intervals(p, ["accuracy", "auroc"], np.random.default_rng(1))
    for name, (low, high) in many.items():
        value = value_of(name, p)
        assert value is not None and low < value < high
        assert high - low < 0.5 * (few[name][1] - few[name][0])
    accuracy = value_of("accuracy", p) or 0.0
    normal = 2 * 1.96 * math.sqrt(accuracy * (1 - accuracy) / 400)
    assert many["accuracy"][1] - many["accuracy"][0] == pytest.approx(normal, rel=0.1)


def test_an_interval_without_a_value_is_missing() -> None:
    p = Predictions(CLASSES, np.ones(5, np.int64), np.tile([0.4, 0.6], (5, 1)))
    assert intervals(p, ["auroc", "accuracy"], np.random.default_rng(0)) == {"accuracy": [1.0, 1.0]}


# -- binned scores ---------------------------------------------------------------------------------------


def rounded_down(p: Predictions) -> Predictions:
    """Return predictions whose probabilities are the lower edges of their bins; class sums no longer equal 1."""
    return Predictions(p.target, p.y, np.floor(np.clip(p.outputs, 0, 1 - 1e-9) * BINS) / BINS, p.positive)


@pytest.mark.parametrize("predictions", [BINARY, MULTI, MULTI_LABEL], ids=["two classes", "five classes", "labels"])
def test_binned_scores_of_several_clients_equal_the_metrics_of_all_samples(predictions: Predictions) -> None:
    parts = np.array_split(np.arange(len(predictions.y)), 7)
    sums = [BinnedScores.of(predictions.rows(part)).numbers for part in parts]
    total = BinnedScores.from_numbers(np.sum(sums, axis=0).tolist(), predictions.size)
    names = [metric.name for metric in metrics_for(predictions.target, predictions.size)]
    values = total.values(predictions.target)
    exact, of_bins = values_of(predictions, names), values_of(rounded_down(predictions), names)
    ranking = {"auroc", "average-precision", "specificity-at-sensitivity"}
    for name, value in values.items():
        assert value == pytest.approx(of_bins[name] if name in ranking else exact[name], abs=2e-6), name
    assert exact.keys() - values.keys() <= ({"accuracy"} if predictions.target == LABELS else set())
    assert abs(values["auroc"] - exact["auroc"]) <= total.auroc_error(predictions.target) < 0.02


@given(st.integers(0, 1000), st.integers(1, 60), st.integers(2, 4))
def test_the_binned_auroc_is_within_its_stated_error(seed: int, samples: int, classes: int) -> None:
    p = random_classes(samples, classes, seed)
    binned, exact = BinnedScores.of(p), value_of("auroc", p)
    value = binned.values(CLASSES).get("auroc")
    assert (value is None) == (exact is None)
    if value is not None and exact is not None:
        assert abs(value - exact) <= binned.auroc_error(CLASSES) + 1e-12


@pytest.mark.parametrize("predictions", [BINARY, MULTI, MULTI_LABEL], ids=["two classes", "five classes", "labels"])
def test_sums_for_a_metric_reveal_no_metric_that_needs_other_sums(predictions: Predictions) -> None:
    """The site's policy allows AUROC alone, so its sums must not contain its confusion matrix or its log loss."""
    whole, target, samples = BinnedScores.of(predictions), predictions.target, len(predictions.y)
    values = whole.values(target)
    for name, value in values.items():
        part = whole.only(target, [name])
        assert part.is_consistent(target, samples) and part.values(target)[name] == value
    ranking = whole.only(target, ["auroc"])
    assert ranking.histograms.tolist() == whole.histograms.tolist() and ranking.totals.tolist() == [samples, 0, 0]
    assert not any(part.any() for part in (ranking.confusion, ranking.decided, ranking.calibration))
    assert not whole.only(target, ["accuracy"]).histograms.any()
    assert whole.only(target, values.keys() | {"accuracy"}).values(target) == values


def test_binned_scores_without_samples_have_no_values() -> None:
    empty = BinnedScores.from_numbers([0] * BinnedScores.count(3), 3)
    assert empty.values(CLASSES) == {} and empty.auroc_error(CLASSES) == 0
