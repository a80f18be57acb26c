"""Spread over clients and majority vote, compared with numbers by hand."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from posy.spread import Evaluation, majority_vote, over_rounds, spread

accuracies = st.lists(st.floats(0, 1), min_size=1, max_size=50)


def test_spread_of_three_clients_by_hand() -> None:
    over = spread([0.2, 0.4, 0.9], [1, 1, 2])
    assert over is not None
    assert over["mean"] == pytest.approx(0.5)
    # Population: ((-0.3)² + (-0.1)² + 0.4²) / 3 = 0.26 / 3.
    assert over["std"] == pytest.approx(math.sqrt(0.26 / 3))
    assert (over["min"], over["max"]) == (0.2, 0.9)
    assert over["weighted"] == pytest.approx((0.2 + 0.4 + 1.8) / 4)
    # J = 1.5² / (3 · (0.04 + 0.16 + 0.81)).
    assert over["jain"] == pytest.approx(2.25 / 3.03)


def test_jain_of_equal_values_and_of_a_single_nonzero_value() -> None:
    equal, single = spread([0.3] * 7, [1] * 7), spread([0, 0, 0, 0.8], [1] * 4)
    assert equal is not None
    assert single is not None
    assert equal["jain"] == pytest.approx(1)
    assert single["jain"] == pytest.approx(1 / 4)


def test_jain_is_undefined_when_all_are_zero() -> None:
    over = spread([0, 0], [1, 1])
    assert over is not None
    assert over["jain"] is None
    assert over["mean"] == 0


@pytest.mark.parametrize("scale", [1e-200, 1e200])
def test_jain_neither_underflows_nor_overflows(scale: float) -> None:
    over = spread([scale, 3 * scale], [1, 1])
    assert over is not None
    assert over["jain"] == pytest.approx(16 / 20)


def test_one_client() -> None:
    expected = {"mean": 0.5, "std": 0, "min": 0.5, "max": 0.5, "tenth": 0.5, "weighted": 0.5, "jain": 1, "clients": 1}
    assert spread([0.5], [3]) == expected


def test_no_clients() -> None:
    assert spread([], []) is None


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_non_finite_values_raise_with_the_client_index(value: float) -> None:
    with pytest.raises(ValueError, match=r"clients \[1\]"):
        spread([0.5, value], [1, 1])


@pytest.mark.parametrize("weights", [[0, 0], [1, -1], [1, math.nan], [1]])
def test_invalid_weights_raise(weights: list[float]) -> None:
    with pytest.raises(ValueError, match="weights"):
        spread([0.5, 0.6], weights)


@given(accuracies)
def test_bounds(values: list[float]) -> None:
    over = spread(values, [1] * len(values))
    assert over is not None
    assert over["min"] <= over["mean"] <= over["max"]
    assert over["weighted"] == pytest.approx(over["mean"])
    assert over["jain"] is None or 1 / len(values) - 1e-9 <= over["jain"] <= 1


@given(accuracies)
def test_the_order_of_clients_does_not_matter(values: list[float]) -> None:
    weights = list(range(1, len(values) + 1))
    assert spread(values, weights) == pytest.approx(spread(values[::-1], weights[::-1]))


def test_means_over_the_last_rounds_by_hand() -> None:
    """Rounds 6 and 8 are within the last three rounds, and the weights are 1 and 3."""
    each = {number: spread(values, [1, 3]) for number, values in ((5, [0.0, 0.0]), (6, [0.2, 0.4]), (8, [0.6, 0.4]))}
    evaluations = [Evaluation(number, over) for number, over in each.items() if over is not None]
    average = over_rounds(evaluations, 3)
    assert average is not None and average["evaluations"] == 2
    assert average["mean"] == pytest.approx(0.4)
    assert average["weighted"] == pytest.approx((0.35 + 0.45) / 2)
    assert (average["min"], average["max"], average["std"]) == pytest.approx((0.3, 0.5, 0.1))
    assert average["deviation"] == pytest.approx({"mean": 0.1, "weighted": 0.05})
    assert (over_rounds(evaluations, 4) or {})["jain"] is None  # the index of zeros is undefined
    assert (over_rounds(evaluations, 1) or {})["mean"] == pytest.approx(0.5)
    assert over_rounds([], 5) is None


def test_vote_and_ties() -> None:
    predictions = np.array([[2, 0, 1, 3], [2, 1, 1, 2], [0, 2, 0, 1]])
    # Class 2 has two votes for sample 0, and class 1 for sample 2. The lowest of three classes wins for 1 and 3.
    assert majority_vote(predictions, 4).tolist() == [2, 0, 1, 1]


def test_vote_of_one_model_is_its_prediction() -> None:
    assert majority_vote(np.array([[3, 1, 2]]), 4).tolist() == [3, 1, 2]


def test_vote_on_no_samples() -> None:
    assert majority_vote(np.empty((3, 0), dtype=np.int64), 4).shape == (0,)
