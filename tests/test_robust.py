"""Robust rules and bounds on single clients: numbers worked by hand, degenerate cases, and comparisons with Flower."""

import math

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, RecordDict
from flwr.serverapp.strategy.fedtrimmedavg import trim_mean
from flwr.serverapp.strategy.multikrum import select_multikrum

from posy.strategies.bounds import clipping_factors, share_factors, site_share
from posy.strategies.replies import distances_from_gram, gram
from posy.strategies.robust import (
    Rule,
    geometric_median_shares,
    krum_scores,
    median,
    selected_count,
    trimmed_count,
    trimmed_mean,
)

RULES = ("median", "trimmed-mean", "krum", "multi-krum", "geometric-median")


def rows_of(*rows: list[float]) -> np.ndarray:
    return np.array(rows, np.float32)


def origin_of(rows: np.ndarray) -> np.ndarray:
    return np.zeros(rows.shape[1], np.float32)


# -- the rules by hand -----------------------------------------------------------------------------------


def test_the_median_by_hand() -> None:
    assert median(rows_of([1, 9], [5, -2], [3, 4])).tolist() == [3, 4]
    assert median(rows_of([1, 0], [2, 8], [9, 2], [4, 6])).tolist() == [3, 4]  # even: mean of the middle two
    assert median(rows_of([7, 8])).tolist() == [7, 8]
    assert median(rows_of([2, 2], [2, 2], [2, 2])).tolist() == [2, 2]
    assert median(rows_of([1, 9])).dtype == np.float32
    rows = np.random.default_rng(0).normal(size=(5, 23)).astype(np.float32)
    assert np.array_equal(median(rows, block=4), median(rows))
    assert np.array_equal(median(rows), np.median(rows, axis=0))  # FedMedian of Flower


def test_the_median_of_huge_numbers_is_finite() -> None:
    largest = float(np.finfo(np.float32).max)
    assert median(rows_of([largest], [largest])).tolist() == [largest]
    assert trimmed_mean(rows_of([largest], [largest]), 0.0).model.tolist() == [largest]


def test_the_trimmed_mean_by_hand() -> None:
    rows = rows_of([1, 50], [2, 40], [3, 30], [6, 20], [100, 10])
    model, shares = trimmed_mean(rows, 0.2)
    assert model.tolist() == pytest.approx([11 / 3, 30])
    # Clients 1, 2 and 3 keep both values, and clients 0 and 4 lose both.
    assert shares is not None and shares.tolist() == pytest.approx([0, 1 / 3, 1 / 3, 1 / 3, 0])
    assert trimmed_mean(rows, 0.4).model.tolist() == [3, 30]  # of five values, only the median remains
    assert trimmed_mean(rows, 0.19).model.tolist() == pytest.approx(rows.mean(axis=0))  # ⌊0.95⌋ = 0
    assert trimmed_mean(rows_of([4, 5]), 0.49).model.tolist() == [4, 5]
    blocked = trimmed_mean(rows, 0.2, block=1)
    assert np.array_equal(blocked.model, model) and np.array_equal(blocked.shares, shares)


def test_a_trimmed_mean_without_trimming_is_the_unweighted_mean() -> None:
    rows = np.random.default_rng(1).normal(size=(7, 40)).astype(np.float32)
    model, shares = Rule("trimmed-mean", trim=0.0).combine(rows, origin_of(rows), np.arange(1, 8))
    assert np.allclose(model, rows.mean(axis=0, dtype=np.float64), atol=1e-7)
    assert shares is not None and shares.tolist() == pytest.approx([1 / 7] * 7)


@pytest.mark.parametrize(("count", "fraction", "cut"), [(10, 0.2, 2), (100, 0.29, 29), (10, 0.3, 3), (9, 0.49, 4)])
def test_the_number_of_trimmed_values(count: int, fraction: float, cut: int) -> None:
    assert trimmed_count(count, fraction) == cut
    assert 2 * cut < count


def test_krum_scores_by_hand() -> None:
    rows = rows_of([0], [1], [3], [10], [100])  # f = 1: two closest others of four
    squares = distances_from_gram(gram(rows, origin=origin_of(rows)))
    assert krum_scores(squares, 1).tolist() == [1 + 9, 1 + 4, 4 + 9, 49 + 81, 90**2 + 97**2]
    assert krum_scores(squares, 0).tolist()[:2] == [1 + 9 + 100, 1 + 4 + 81]
    model, shares = Rule("krum", attackers=1).combine(rows, origin_of(rows), np.ones(5))
    assert model.tolist() == [1] and shares is not None and shares.tolist() == [0, 1, 0, 0, 0]


def test_krum_breaks_ties_in_favour_of_the_first_client() -> None:
    rows = rows_of([2, 1], [2, 1], [2, 1], [5, 5], [2, 1])
    model, shares = Rule("krum", attackers=1).combine(rows, origin_of(rows), np.ones(5))
    assert model.tolist() == [2, 1] and shares is not None and shares[0] == 1


def test_krum_refuses_too_few_clients() -> None:
    for attackers, least in ((0, 3), (1, 5), (2, 7)):
        assert Rule("krum", attackers=attackers).least == Rule("multi-krum", attackers=attackers).least == least
        with pytest.raises(ValueError, match=f"needs {least} vectors, got {least - 1}"):
            krum_scores(np.zeros((least - 1, least - 1)), attackers)
        assert krum_scores(np.zeros((least, least)), attackers).tolist() == [0] * least
    assert all(Rule(name).least == 1 for name in ("median", "trimmed-mean", "geometric-median"))


def test_multi_krum_by_hand() -> None:
    rows = rows_of([0], [1], [3], [10], [100])
    rule = Rule("multi-krum", attackers=1, selected=2)  # the scores are 10, 5, 13, 130 and more
    assert rule.combine(rows, origin_of(rows), np.ones(5)).model.tolist() == [0.5]
    model, shares = rule.combine(rows, origin_of(rows), [1, 3, 5, 7, 9])
    assert model.tolist() == [0.75] and shares is not None and shares.tolist() == [0.25, 0.75, 0, 0, 0]
    assert Rule("multi-krum", attackers=1).combine(rows, origin_of(rows), np.ones(5)).model.tolist() == [3.5]
    assert [selected_count(5, 1, chosen) for chosen in (0, 1, 4, 5, 99)] == [4, 1, 4, 4, 4]


def test_the_geometric_median_by_hand() -> None:
    # In one dimension it is the median, also of weighted points.
    line = rows_of([0], [1], [10])
    model, shares = Rule("geometric-median").combine(line, origin_of(line), np.ones(3))
    assert model.tolist() == pytest.approx([1], abs=1e-4)
    assert shares is not None and shares.sum() == pytest.approx(1)
    heavy = Rule("geometric-median").combine(line, origin_of(line), [1, 1, 5]).model
    assert heavy.tolist() == pytest.approx([10], abs=1e-3)
    # The minimum is the centre of an equilateral triangle, and the intersection of the diagonals of a square.
    triangle = rows_of([0, 0], [2, 0], [1, math.sqrt(3)])
    assert Rule("geometric-median").combine(triangle, origin_of(triangle), np.ones(3)).model.tolist() == pytest.approx(
        [1, 1 / math.sqrt(3)], abs=1e-5
    )
    square = rows_of([0, 0], [4, 0], [0, 4], [4, 4])
    assert Rule("geometric-median").combine(square, origin_of(square), np.ones(4)).model.tolist() == pytest.approx(
        [2, 2]
    )


def test_the_geometric_median_minimises_the_distances() -> None:
    generator = np.random.default_rng(3)
    rows, weights = generator.normal(size=(6, 4)).astype(np.float32), generator.uniform(1, 5, 6)
    best = Rule("geometric-median").combine(rows, origin_of(rows), weights).model

    def cost(point: np.ndarray) -> float:
        return float(weights @ np.linalg.norm(rows - point, axis=1))

    assert all(cost(best) <= cost(best + generator.normal(0, 0.01, 4)) + 1e-9 for _ in range(200))


@pytest.mark.parametrize("name", RULES)
def test_equal_models_are_unchanged(name: str) -> None:
    rows = np.tile(np.array([0.1, -3, 7], np.float32), (7, 1))
    model, shares = Rule(name, attackers=2).combine(rows, origin_of(rows), np.arange(1.0, 8.0))
    assert model == pytest.approx(rows[0], rel=1e-6)
    assert shares is None or shares.sum() == pytest.approx(1)


@pytest.mark.parametrize("name", ["median", "trimmed-mean", "geometric-median"])
def test_the_model_of_a_single_client_is_unchanged(name: str) -> None:
    rows = rows_of([0.25, -3, 7])
    assert Rule(name).combine(rows, origin_of(rows), [5]).model.tolist() == rows[0].tolist()


def test_distances_resolve_small_differences_between_large_models() -> None:
    """float32 loses these differences in ||x||² + ||y||² − 2 <x, y>. Subtracting the clients' start preserves them."""
    generator = np.random.default_rng(5)
    start = generator.normal(0, 100, 5000).astype(np.float32)
    steps = np.array([[1.0], [1.1], [0.9], [1.05], [3.0]]) * 1e-3 * generator.normal(size=5000)
    rows = (start + steps).astype(np.float32)
    exact = np.array([[np.square(a.astype(np.float64) - b).sum() for b in rows] for a in rows])
    squares = distances_from_gram(gram(rows, origin=start))
    assert squares == pytest.approx(exact, rel=1e-6, abs=1e-12)


# -- the rules against attackers -------------------------------------------------------------------------

ATTACKS = {
    "sign flip": lambda honest, generator: -10 * honest.mean(axis=0),
    "scaled": lambda honest, generator: 1e4 * honest.mean(axis=0),
    "largest number": lambda honest, generator: np.full(honest.shape[1], np.finfo(np.float32).max),
    "noise": lambda honest, generator: generator.normal(0, 1e3, honest.shape[1]),
    "zero": lambda honest, generator: np.zeros(honest.shape[1]),
    "a bit more": lambda honest, generator: honest.mean(axis=0) + 1.5 * honest.std(axis=0),
}


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("attack", ATTACKS)
def test_up_to_f_arbitrary_models_move_the_result_by_a_bounded_distance(name: str, attack: str) -> None:
    """The bound is a few standard deviations of the honest models, whatever two of ten clients send."""
    for seed in range(3):
        generator = np.random.default_rng(seed)
        honest = (1 + generator.normal(0, 0.5, (8, 30))).astype(np.float32)
        poisoned = np.tile(ATTACKS[attack](honest, generator), (2, 1)).astype(np.float32)
        rows = np.concatenate([poisoned[:1], honest, poisoned[1:]])
        weights = np.full(10, 100.0)
        rule = Rule(name, trim=0.2, attackers=2)
        model, shares = rule.combine(rows, np.zeros(30, np.float32), weights)
        spread = float(np.linalg.norm(honest - honest.mean(axis=0), axis=1).max())
        assert np.isfinite(model).all()
        assert np.linalg.norm(model - honest.mean(axis=0)) <= 2 * spread
        if attack in ("scaled", "largest number", "noise") and name in ("krum", "multi-krum", "geometric-median"):
            assert shares is not None and shares[[0, 9]].sum() < 1e-2


@pytest.mark.parametrize("name", ["median", "trimmed-mean"])
def test_coordinates_stay_in_the_honest_range(name: str) -> None:
    """With f attackers at most, each coordinate of median and trimmed mean is in the range of the honest values."""
    generator = np.random.default_rng(11)
    for _ in range(50):
        honest = generator.normal(size=(8, 20)).astype(np.float32)
        poisoned = generator.normal(0, 10.0 ** generator.integers(-3, 30), (2, 20)).astype(np.float32)
        rows = np.concatenate([honest, poisoned])
        model = Rule(name, trim=0.2).combine(rows, origin_of(rows), np.ones(10)).model
        assert (model >= honest.min(axis=0) - 1e-6).all() and (model <= honest.max(axis=0) + 1e-6).all()


def test_the_plain_mean_follows_one_attacker() -> None:
    """The attacks above move the mean arbitrarily far."""
    honest = np.ones((9, 4), np.float32)
    rows = np.concatenate([honest, np.full((1, 4), 1e20, np.float32)])
    assert np.abs(rows.mean(axis=0) - 1).min() > 1e18


# -- comparison with Flower ------------------------------------------------------------------------------


@pytest.mark.parametrize("fraction", [0.0, 0.1, 0.2, 0.3])
def test_the_trimmed_mean_equals_flowers(fraction: float) -> None:
    rows = np.random.default_rng(7).normal(size=(10, 50)).astype(np.float32)
    assert np.allclose(trimmed_mean(rows, fraction).model, trim_mean(rows, fraction), atol=1e-6)


def test_flower_trims_one_value_too_few_if_the_product_is_rounded() -> None:
    rows = np.arange(100, dtype=np.float32)[:, None] ** 2
    assert trimmed_mean(rows, 0.29).model == pytest.approx(rows[29:71].mean())
    assert trim_mean(rows, 0.29) == pytest.approx(rows[28:72].mean())


@pytest.mark.parametrize(("attackers", "selected"), [(0, 1), (1, 1), (2, 1), (1, 4), (2, 8)])
def test_krum_selects_the_same_models_as_flower(attackers: int, selected: int) -> None:
    rows = np.random.default_rng(attackers + selected).normal(size=(10, 50)).astype(np.float32)
    contents = [RecordDict({"arrays": ArrayRecord({"model": Array(row)})}) for row in rows]
    selected_by_flower = select_multikrum(contents, attackers, selected)
    expected = np.mean([content.array_records["arrays"]["model"].numpy() for content in selected_by_flower], axis=0)
    rule = Rule("multi-krum", attackers=attackers, selected=selected)
    assert np.allclose(rule.combine(rows, origin_of(rows), np.ones(10)).model, expected, atol=1e-6)


# -- bounds ----------------------------------------------------------------------------------------------


def test_clipping_factors_by_hand() -> None:
    assert clipping_factors([1, 2, 3, 4, 100], 2).tolist() == pytest.approx([1, 1, 1, 1, 6 / 100])
    assert clipping_factors([1, 1, 1, 1], 1).tolist() == [1, 1, 1, 1]
    assert clipping_factors([5], 2).tolist() == [1]
    assert clipping_factors([1, 9], 3).tolist() == pytest.approx([1, 1 / 3])  # the smaller of the two in the middle
    assert clipping_factors([1, 1e300], 2).tolist() == pytest.approx([1, 2e-300])
    assert clipping_factors([0, 0, 0, 7], 2).tolist() == [1, 1, 1, 0]
    assert clipping_factors([0, 0], 2).tolist() == [1, 1]


def test_a_minority_cannot_raise_the_norm_bound() -> None:
    generator = np.random.default_rng(2)
    for count in range(3, 30):
        honest = generator.uniform(0.1, 5, count)
        attackers = np.full((count - 1) // 2, 1e30)
        factors = clipping_factors(np.concatenate([honest, attackers]), 2.0)
        assert (factors[count:] * 1e30 <= 2 * honest.max() * (1 + 1e-9)).all()


def test_share_factors_by_hand() -> None:
    assert share_factors([8, 1, 1], 0.5).tolist() == [0.25, 1, 1]  # 2 of 4
    assert share_factors([8, 1, 1], 0.8).tolist() == [1, 1, 1]
    assert share_factors([8, 1, 1], 1 / 3).tolist() == pytest.approx([1 / 8, 1, 1])
    assert share_factors([8, 2, 1], 0.1).tolist() == pytest.approx([1 / 8, 1 / 2, 1])  # below 1/M: equal weights
    assert share_factors([8, 8, 2, 2], 0.4).tolist() == [1, 1, 1, 1]
    assert share_factors([80, 60, 10, 10], 0.4).tolist() == pytest.approx([40 / 80, 40 / 60, 1, 1])
    assert share_factors([5], 0.5).tolist() == [1]
    assert share_factors([0, 3, 1], 0.5).tolist() == pytest.approx([1, 1 / 3, 1])
    assert share_factors([0, 0], 0.5).tolist() == share_factors([7, 1], 1).tolist() == [1, 1]


def test_share_factors_lower_only_shares_above_the_limit() -> None:
    generator = np.random.default_rng(4)
    for _ in range(300):
        weights = generator.lognormal(0, 3, generator.integers(1, 30))
        largest = generator.uniform(0.01, 1)
        factors = share_factors(weights, largest)
        shares = factors * weights / (factors * weights).sum()
        assert shares.max() <= max(largest, 1 / len(weights)) * (1 + 1e-9)
        if largest * len(weights) > 1 and (factors < 1).any():
            assert shares[factors < 1] == pytest.approx(largest)
        assert ((factors == 1) | (shares >= shares.max() * (1 - 1e-9))).all()


def test_the_largest_share_of_a_site_by_cohort_size() -> None:
    assert [site_share(count) for count in (1, 2, 3, 6, 10, 100)] == [0.5, 0.5, 0.5, 0.5, 0.3, 0.03]


def test_geometric_median_shares_need_only_inner_products() -> None:
    products = np.array([[4.0, 0.0], [0.0, 4.0]])
    assert geometric_median_shares(products, np.array([1.0, 1.0])).tolist() == pytest.approx([0.5, 0.5])
