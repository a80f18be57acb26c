"""The privacy accountant: Gaussian mechanisms, their composition, and a site's ledger."""

import math
from itertools import pairwise

import mpmath
import pytest
from scipy.stats import norm

from posy.accounting import (
    BudgetError,
    Event,
    composed,
    epsilon_of,
    fits,
    ledger_line,
    log_delta,
    noise_multiplier_for,
    read_ledger,
    sampled_noise_multiplier,
    spent,
)

DELTA = 1e-5


def classic(epsilon: float, delta: float = DELTA) -> float:
    """Return the classic noise multiplier, which is proven for ε below 1 only."""
    return math.sqrt(2 * math.log(1.25 / delta)) / epsilon


def delta_by_integration(noise_multiplier: float, epsilon: float) -> float:
    """Return δ = ∫ max(0, p(x) − e^ε q(x)) dx for p = N(1, z²) and q = N(0, z²), without the formula under test."""
    with mpmath.workdps(30):
        z = mpmath.mpf(noise_multiplier)
        start = mpmath.mpf("0.5") + epsilon * z**2  # where both densities are equal

        def excess(x: mpmath.mpf) -> mpmath.mpf:
            return mpmath.npdf(x, 1, z) - mpmath.exp(epsilon) * mpmath.npdf(x, 0, z)

        points = [start + step * z for step in (0, 1, 2, 4, 8, 16, 32)]
        return float(mpmath.quad(excess, points))


# -- one mechanism ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("epsilon", "delta"), [(10, 2.3e-5), (20, 1.5e-3), (50, 0.59)])
def test_classic_noise_misses_delta_and_analytic_noise_meets_it(epsilon: float, delta: float) -> None:
    """The classic noise exceeds its target δ = 1e-5 for these ε."""
    assert math.exp(log_delta(classic(epsilon), epsilon)) == pytest.approx(delta, rel=0.03)
    multiplier = noise_multiplier_for(epsilon, DELTA)
    assert multiplier > classic(epsilon)
    assert log_delta(multiplier, epsilon) <= math.log(DELTA)
    assert delta_by_integration(multiplier, epsilon) == pytest.approx(DELTA, rel=1e-6)


@pytest.mark.parametrize("epsilon", [0.01, 0.1, 0.5, 1.0])
def test_classic_noise_is_too_large_for_small_epsilon(epsilon: float) -> None:
    assert noise_multiplier_for(epsilon, DELTA) < classic(epsilon)


@pytest.mark.parametrize("epsilon", [1e-6, 0.03, 1.0, 4.0, 8.0, 30.0, 200.0])
@pytest.mark.parametrize("delta", [1e-2, 1e-5, 1e-12])
def test_noise_is_the_smallest_that_meets_delta(epsilon: float, delta: float) -> None:
    """Balle & Wang, 2018, Theorem 8: Φ(1/2z − εz) − e^ε Φ(−1/2z − εz) ≤ δ, with 60 digits."""

    def exact(z: float) -> mpmath.mpf:
        with mpmath.workdps(60):
            e, m = mpmath.mpf(epsilon), mpmath.mpf(z)
            return mpmath.ncdf(1 / (2 * m) - e * m) - mpmath.exp(e) * mpmath.ncdf(-1 / (2 * m) - e * m)

    multiplier = noise_multiplier_for(epsilon, delta)
    assert exact(multiplier * (1 + 1e-9)) < delta < exact(multiplier * (1 - 1e-9))
    assert epsilon_of(multiplier, delta) == pytest.approx(epsilon, rel=1e-7)


def test_epsilon_and_noise_at_extreme_values() -> None:
    assert epsilon_of(math.inf, DELTA) == 0
    # ε = 0: δ is the total variation distance 2Φ(1/2z) − 1 of the two normal distributions.
    assert math.exp(log_delta(2.0, 0.0)) == pytest.approx(2 * norm.cdf(0.25) - 1, rel=1e-12)
    assert noise_multiplier_for(1e-30, DELTA) == pytest.approx(1 / (2 * norm.ppf(0.5 + DELTA / 2)), rel=1e-9)
    # At this δ, the difference of two floating-point numbers would be 0.
    assert log_delta(noise_multiplier_for(1e-3, 1e-40), 1e-3) == pytest.approx(math.log(1e-40), rel=1e-9)


# -- composition -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rounds", [1, 2, 100, 10_000])
def test_repeated_gaussian_mechanisms_equal_one_with_less_noise(rounds: int) -> None:
    events = [Event("local", 40.0)] * min(rounds, 100) if rounds <= 100 else [Event("local", 40.0, rounds)]
    assert spent(events, DELTA) == pytest.approx(epsilon_of(40.0 / math.sqrt(rounds), DELTA), rel=1e-12)


def test_composition_costs_less_than_the_sum_of_epsilons() -> None:
    """T rounds at (ε, δ) cost more than one round, and less than T·ε and T·δ."""
    multiplier = noise_multiplier_for(1.0, DELTA)
    assert 1.0 < spent([Event("local", multiplier, 10)], DELTA) < 10.0
    delta_at_ten = math.exp(log_delta(multiplier / math.sqrt(10), 10.0))
    assert delta_at_ten < 10 * DELTA
    assert math.exp(log_delta(multiplier / math.sqrt(10), 1.0)) > DELTA


def test_noise_multipliers_compose_by_the_sum_of_precisions() -> None:
    assert composed([Event("local", 3.0), Event("local", 4.0)]) == pytest.approx(12 / 5)
    assert composed([]) == math.inf and spent([], DELTA) == 0


def test_epsilon_depends_on_the_unit_of_privacy() -> None:
    central, local, sample = Event("central", 4.0), Event("local", 2.0), Event("sample", 2.0)
    assert spent([central], DELTA, "client") == epsilon_of(4.0, DELTA)
    assert spent([central], DELTA, "sample") == spent([local], DELTA, "sample") == epsilon_of(2.0, DELTA)
    assert spent([sample], DELTA, "sample") == epsilon_of(2.0, DELTA)
    assert spent([sample], DELTA, "client") == math.inf
    assert spent([Event("sample", 2.0, 0)], DELTA, "client") == 0


# -- subsampling: dp-accounting ----------------------------------------------------------------------------------

FIGURES = [(0.01, 4.0, 10_000, 1.26), (256 / 60_000, 1.1, 14_063, 3.0)]
"""Sampling, noise, steps and published ε at δ = 1e-5: Abadi et al., 2016, Figure 2 (moments accountant); the MNIST
tutorial of TensorFlow Privacy, 60 epochs in batches of 256 (ε = 3.01)."""


@pytest.mark.parametrize(("sampling", "multiplier", "steps", "published"), FIGURES)
def test_dp_sgd_epsilon_matches_published_figures(
    sampling: float, multiplier: float, steps: int, published: float
) -> None:
    """The ε is at most the published value, because RDP conversion has improved (Canonne et al., 2020)."""
    pytest.importorskip("dp_accounting")
    epsilon = spent([Event("sample", multiplier, steps, sampling)], DELTA)
    assert 0.75 * published < epsilon <= 1.01 * published


@pytest.mark.slow
def test_rdp_epsilon_is_an_upper_bound_on_pld_epsilon() -> None:
    dp_accounting = pytest.importorskip("dp_accounting")
    from dp_accounting import pld

    for sampling, multiplier, steps in ((0.01, 1.0, 1000), (0.1, 2.0, 300), (0.5, 4.0, 40)):
        event = dp_accounting.PoissonSampledDpEvent(sampling, dp_accounting.GaussianDpEvent(multiplier))
        exact = pld.PLDAccountant().compose(event, steps).get_epsilon(DELTA)
        assert exact <= spent([Event("sample", multiplier, steps, sampling)], DELTA) < 1.35 * exact


def test_gaussian_composition_matches_dp_accounting() -> None:
    dp_accounting = pytest.importorskip("dp_accounting")
    from dp_accounting import gaussian_mechanism, pld

    for epsilon in (0.1, 1.0, 8.0, 20.0):
        assert gaussian_mechanism.get_sigma_gaussian(epsilon, DELTA) == pytest.approx(
            noise_multiplier_for(epsilon, DELTA), rel=1e-6
        )
    accountant = pld.PLDAccountant().compose(dp_accounting.GaussianDpEvent(20.0), 100)
    assert accountant.get_epsilon(DELTA) == pytest.approx(spent([Event("local", 20.0, 100)], DELTA), rel=1e-3)


@pytest.mark.slow
def test_dp_sgd_noise_just_meets_the_budget() -> None:
    pytest.importorskip("dp_accounting")
    for epsilon in (1.0, 8.0):
        multiplier = sampled_noise_multiplier(epsilon, DELTA, 0.05, 400)
        assert 0.99 * epsilon < spent([Event("sample", multiplier, 400, 0.05)], DELTA) <= epsilon
    full_batch_multiplier = sampled_noise_multiplier(1.0, DELTA, 1.0, 25)  # without subsampling: the closed form
    assert full_batch_multiplier == pytest.approx(5 * noise_multiplier_for(1.0, DELTA))


# -- the ledger --------------------------------------------------------------------------------------------------


def test_ledger_round_trip() -> None:
    events = [Event("local", 3.25), Event("sample", 0.1, 40, 0.05)]
    text = "".join(ledger_line(event, run="a", round=number) for number, event in enumerate(events))
    assert read_ledger(text) == [(events[0], {"run": "a", "round": 0}), (events[1], {"run": "a", "round": 1})]
    assert text.count("\n") == 2


def test_an_incomplete_last_line_is_ignored_and_other_damage_is_an_error() -> None:
    line = ledger_line(Event("local", 3.0))
    assert len(read_ledger(line + line[:-5])) == 1
    for damaged in ("{}\n", "nonsense\n", "[]\n", line.replace("3.0", "-3.0"), line.replace("local", "none")):
        with pytest.raises(BudgetError, match="line 1 of the ledger"):
            read_ledger(damaged + line)


def test_a_run_fits_only_within_the_remaining_budget() -> None:
    run = [Event("local", math.sqrt(10) * noise_multiplier_for(1.0, DELTA), 10)]
    assert fits([], run, 1.0, DELTA)
    assert not fits(run, run, 1.0, DELTA)
    assert not fits([], run, 0.999, DELTA)
    assert fits(run, run, 1.5, DELTA) and not fits(run * 2, run, 1.5, DELTA)  # about √2 and √3 times the privacy loss
    assert fits(run * 3, [], 10.0, DELTA)


def test_epsilon_grows_with_the_number_of_events() -> None:
    epsilons = [spent([Event("central", 9.0, count)], DELTA) for count in (1, 2, 10, 100)]
    assert all(first < second for first, second in pairwise(epsilons))
