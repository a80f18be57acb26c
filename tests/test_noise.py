"""Gaussian noise from a cryptographic generator, on a grid."""

import math
from fractions import Fraction

import mpmath
import numpy as np
import pytest
from scipy import stats

from posy.noise import (
    CELLS,
    GRID,
    INTERVALS,
    LAST,
    SecureGenerator,
    from_steps,
    perturb,
    tail_table,
    to_steps,
)

KEY = bytes(range(32))
COUNT = 400_000


@pytest.fixture(scope="module")
def steps() -> np.ndarray:
    return SecureGenerator(KEY).gaussian(COUNT)


def test_the_noise_is_standard_normal(steps: np.ndarray) -> None:
    normal = (steps + 0.5) / GRID
    assert stats.kstest(normal, "norm").pvalue > 1e-3
    assert abs(normal.mean()) < 4 / math.sqrt(COUNT)
    assert abs(normal.var() - 1) < 4 * math.sqrt(2 / COUNT)
    assert abs(stats.kurtosis(normal)) < 4 * math.sqrt(24 / COUNT)
    assert abs(np.corrcoef(normal[:-1], normal[1:])[0, 1]) < 4 / math.sqrt(COUNT)


def test_the_low_bits_of_the_noise_are_uniform(steps: np.ndarray) -> None:
    """Floating-point noise fails here: its last bits depend on its magnitude."""
    counts = np.bincount(steps & 255, minlength=256)
    assert stats.chisquare(counts).pvalue > 1e-3


def test_cells_within_an_interval_have_the_density_of_the_normal_distribution() -> None:
    """The rejection step matters in the tail only, where the density falls by 1.2 % in an interval."""
    generator = SecureGenerator(KEY)
    interval = 3 * INTERVALS
    generator._intervals = lambda count: np.full(count, interval)  # type: ignore[method-assign]
    magnitude = np.where((steps := generator.gaussian(COUNT)) < 0, -steps - 1, steps)
    cell = magnitude - interval * CELLS
    assert cell.min() >= 0 and cell.max() < CELLS
    bounds = interval / INTERVALS, (interval + 0.5) / INTERVALS, (interval + 1) / INTERVALS
    tails = stats.norm.sf(bounds)
    lower = (tails[0] - tails[1]) / (tails[0] - tails[2])
    assert lower - 0.5 > 0.0014
    assert abs((cell < CELLS // 2).mean() - lower) < 4 * math.sqrt(0.25 / COUNT)


def test_the_tail_table_is_exact_to_128_bits() -> None:
    table = tail_table()
    assert len(table) == LAST and list(table) == sorted(table, reverse=True) and table[-1] < 2**8
    with mpmath.workdps(60):
        for m in (1, 256, 777, 2560):
            exact = 2 * mpmath.ncdf(-mpmath.mpf(m) / INTERVALS) * 2**128
            assert 0 <= exact - table[m - 1] < 1


def test_the_lower_word_breaks_ties_in_the_upper_word(monkeypatch: pytest.MonkeyPatch) -> None:
    upper, lower = divmod(tail_table()[9], 2**64)
    for second, interval in ((lower - 1, 10), (lower, 9)):
        words = iter([np.array([upper], np.uint64), np.array([second], np.uint64)])
        generator = SecureGenerator(KEY)
        monkeypatch.setattr(generator, "words", lambda count, words=words: next(words))
        assert generator._intervals(1).tolist() == [interval]


def test_rounding_never_enlarges_a_norm_and_the_sum_is_exact() -> None:
    values = np.random.default_rng(1).normal(size=10_000)
    grid = to_steps(values, 0.3)
    assert all(
        abs(Fraction(int(k)) * Fraction(0.3 / GRID)) <= abs(Fraction(v))
        for k, v in zip(grid[:500], values[:500], strict=True)
    )
    assert np.abs(from_steps(grid, 0.3) - values).max() <= 1.5 * 0.3 / GRID
    noise = SecureGenerator(KEY).gaussian(10_000)
    np.testing.assert_array_equal(perturb(values, 0.3, SecureGenerator(KEY)), from_steps(grid + noise, 0.3))


def test_all_results_are_on_one_grid() -> None:
    """Mironov (2012) distinguishes 0 and 1/3 from the last bits of floating-point noise."""
    for value in (0.0, 1 / 3, -7.1):
        multiples = perturb(np.full(1000, value), 1.0) * GRID - 0.5
        np.testing.assert_array_equal(multiples, np.rint(multiples))


def test_each_generator_has_a_new_key() -> None:
    first, second = (perturb(np.zeros(8), 1.0) for _ in range(2))
    assert not np.array_equal(first, second)
    np.testing.assert_array_equal(SecureGenerator(KEY).words(9), SecureGenerator(KEY).words(9))


def test_poisson_sampling_has_the_given_rate() -> None:
    generator = SecureGenerator(KEY)
    assert abs(len(generator.chosen(COUNT, 0.1)) / COUNT - 0.1) < 4 * math.sqrt(0.09 / COUNT)
    assert generator.chosen(5, 1.0).tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("deviation", [0.0, -1.0, math.inf, math.nan])
def test_a_deviation_out_of_range_is_refused(deviation: float) -> None:
    with pytest.raises(ValueError, match="standard deviation"):
        perturb(np.zeros(1), deviation)


def test_a_value_beyond_the_grid_is_refused() -> None:
    with pytest.raises(OverflowError):
        perturb(np.array([1e30]), 1e-9)
