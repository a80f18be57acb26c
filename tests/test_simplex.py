"""Minimum of a quadratic over weights that sum to 1: by hand, by optimality conditions and by brute force."""

import numpy as np
import pytest

from posy.strategies.simplex import minimise_on_simplex, projected


def gram(count, rank, seed=0, spread=0.0):
    rng = np.random.default_rng(seed)
    rows = rng.normal(size=(count, rank)) * np.exp(spread * rng.normal(size=(count, 1)))
    return rows @ rows.T


def assert_optimal(matrix, weights, lower, upper):
    """Check that no weights are better by the linearised objective, whose minimum fills the cheapest entries first."""
    assert weights.sum() == pytest.approx(1, abs=1e-12)
    assert (weights >= lower - 1e-15).all() and (weights <= upper + 1e-15).all()
    gradient, best = matrix @ weights, lower.copy()
    for index in np.argsort(gradient):
        best[index] += min(upper[index] - lower[index], max(0.0, 1 - best.sum()))
    terms = weights**2 @ np.diag(matrix)
    assert gradient @ (weights - best) <= 1e-9 * (weights @ gradient) + 1e-11 * terms


def assert_equal_gradients(matrix, weights, lower, upper):
    """Check that gradients are equal between the bounds, higher at lower bounds and lower at upper bounds."""
    gradient = matrix @ weights / np.linalg.eigvalsh(matrix)[-1]
    raisable, lowerable = gradient[weights < upper - 1e-9], gradient[weights > lower + 1e-9]
    if len(raisable) and len(lowerable):
        assert lowerable.max() <= raisable.min() + 1e-8


# -- by hand ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("matrix", "expected"),
    [
        ([[1.0]], [1]),
        ([[1, 0], [0, 3]], [3 / 4, 1 / 4]),  # in inverse proportion
        ([[1, 2], [2, 5]], [1, 0]),  # at (1, 0) the derivatives are 1 and 2, so the second adds nothing
        ([[2, -1], [-1, 2]], [1 / 2, 1 / 2]),
        ([[1, -1], [-1, 1]], [1 / 2, 1 / 2]),  # singular, zero at the middle
        (np.diag([1.0, 2.0, 4.0]), [4 / 7, 2 / 7, 1 / 7]),
        ([[1, 0, 5], [0, 1, 5], [5, 5, 40]], [1 / 2, 1 / 2, 0]),
        (np.ones((3, 3)), [1 / 3, 1 / 3, 1 / 3]),  # constant: the start is returned
        (np.zeros((3, 3)), [1 / 3, 1 / 3, 1 / 3]),
    ],
)
def test_minimum_by_hand(matrix, expected):
    np.testing.assert_allclose(minimise_on_simplex(matrix), expected, atol=1e-9)


@pytest.mark.parametrize(
    ("matrix", "centre", "radius", "expected"),
    [
        (np.diag([1.0, 3.0]), [0.5, 0.5], 0.1, [0.6, 0.4]),  # 3/4 is out of reach
        (np.diag([1.0, 3.0]), [0.5, 0.5], 0.3, [0.75, 0.25]),
        (np.diag([1.0, 3.0]), [0.9, 0.1], 0.05, [0.85, 0.15]),
        (np.diag([1.0, 3.0]), [0.2, 0.8], 0.0, [0.2, 0.8]),
        (np.diag([1.0, 3.0]), [0.2, 0.8], 1.0, [0.75, 0.25]),
        # The first is at most 0.4. The others share the rest in inverse proportion: two thirds and one third.
        (np.diag([1.0, 2.0, 4.0]), [0.3, 0.4, 0.3], 0.1, [0.4, 0.4, 0.2]),
        (np.diag([1.0, 2.0, 4.0]), None, 0.05, [1 / 3 + 0.05, 1 / 3, 1 / 3 - 0.05]),
    ],
)
def test_minimum_in_a_box_by_hand(matrix, centre, radius, expected):
    np.testing.assert_allclose(minimise_on_simplex(matrix, centre, radius), expected, atol=1e-9)


def test_only_the_symmetric_part_of_a_matrix_matters():
    matrix = np.array([[1.0, 4.0], [-4.0, 3.0]])
    np.testing.assert_allclose(minimise_on_simplex(matrix), [3 / 4, 1 / 4], atol=1e-9)


def test_a_box_outside_the_simplex_is_rejected():
    with pytest.raises(ValueError, match="sum to 1"):
        minimise_on_simplex(np.eye(2), [0.2, 0.2], 0.1)


# -- by optimality conditions ------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [2, 3, 10, 60, 300])
@pytest.mark.parametrize("kind", ["full", "flat", "spread", "diagonal"])
def test_optimality_conditions(count, kind):
    matrix = {
        "full": lambda: gram(count, 2 * count),
        "flat": lambda: gram(count, max(1, count // 3)),  # low rank: the minimum is not unique
        "spread": lambda: gram(count, 2 * count, spread=3.0),
        "diagonal": lambda: np.diag(np.exp(3 * np.random.default_rng(count).normal(size=count))) + gram(count, 3),
    }[kind]()
    weights = minimise_on_simplex(matrix)
    assert_optimal(matrix, weights, np.zeros(count), np.ones(count))
    assert_equal_gradients(matrix, weights, np.zeros(count), np.ones(count))
    centre = np.random.default_rng(1).dirichlet(np.ones(count))
    boxed = minimise_on_simplex(matrix, centre, 0.5 / count)
    lower, upper = np.maximum(centre - 0.5 / count, 0), np.minimum(centre + 0.5 / count, 1)
    assert_optimal(matrix, boxed, lower, upper)
    assert_equal_gradients(matrix, boxed, lower, upper)
    assert boxed @ matrix @ boxed >= weights @ matrix @ weights - 1e-9 * np.linalg.eigvalsh(matrix)[-1]


def test_the_minimum_beats_a_fine_grid():
    for seed in range(20):
        matrix = gram(3, 2, seed, spread=1.0)
        grid = np.array([(i, j, 60 - i - j) for i in range(61) for j in range(61 - i)]) / 60
        weights = minimise_on_simplex(matrix)
        assert weights @ matrix @ weights <= np.einsum("ni,ij,nj->n", grid, matrix, grid).min() + 1e-12


def test_scale_of_the_matrix_does_not_matter():
    matrix = gram(20, 30)
    for scale in (1e-12, 1e12):
        np.testing.assert_allclose(minimise_on_simplex(scale * matrix), minimise_on_simplex(matrix), atol=1e-9)


# -- the projection ----------------------------------------------------------------------------------------


def test_projection_by_hand():
    zeros, unit = np.zeros(3), np.ones(3)
    np.testing.assert_allclose(projected(np.array([0.5, 0.3, 0.2]), unit, zeros, unit), [0.5, 0.3, 0.2])
    np.testing.assert_allclose(projected(np.array([2.0, 0.0, 0.0]), unit, zeros, unit), [1, 0, 0])
    np.testing.assert_allclose(projected(np.array([1.0, 0.8, -3.0]), unit, zeros, unit), [0.6, 0.4, 0], atol=1e-15)
    upper = np.array([0.5, 1.0, 1.0])
    np.testing.assert_allclose(projected(np.array([2.0, 0.0, -0.2]), unit, zeros, upper), [0.5, 0.35, 0.15], atol=1e-15)
    # On x + 2y = 1 from (1, 1): subtract 0.4 times (1, 2).
    nearest = projected(np.ones(2), np.array([1.0, 2.0]), np.zeros(2), np.full(2, 9.0))
    np.testing.assert_allclose(nearest, [0.6, 0.2], atol=1e-15)


def test_projection_is_the_nearest_point():
    rng = np.random.default_rng(0)
    for _ in range(50):
        count = int(rng.integers(2, 9))
        w, centre = rng.uniform(0.1, 3, count), rng.dirichlet(np.ones(count))
        lower, upper = np.maximum(centre - 0.2, 0) / w, np.minimum(centre + 0.2, 1) / w
        vector = 3 * rng.normal(size=count)
        nearest = projected(vector, w, lower, upper)
        assert w @ nearest == pytest.approx(1, abs=1e-12)
        assert (nearest >= lower).all() and (nearest <= upper).all()
        for _ in range(50):
            other = projected(rng.normal(size=count), w, lower, upper)
            assert (vector - nearest) @ (other - nearest) <= 1e-12
