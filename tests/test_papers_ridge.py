"""PPFE's Figure 3: ridge regression by hand (local, averaged and in stages), and the numbers in its text."""

import math

import numpy as np
import pytest

from posy.commands.papers import ridge as module
from posy.commands.papers.item import item
from posy.commands.papers.ridge import (
    CLIENTS,
    NOISE,
    RATIOS,
    average,
    draw_federation,
    ensemble,
    expected_error,
    moments,
    personalise,
    reweight,
    ridge,
    simulate,
    squares,
)
from posy.commands.papers.verdict import number

# -- a single client -------------------------------------------------------------------------------------


def test_moments_and_ridge_of_one_dimension_by_hand() -> None:
    x, y = np.array([[[1.0], [2.0]]]), np.array([[1.0, 3.0]])
    gram, moment = moments(x, y)
    assert (gram.tolist(), moment.tolist()) == ([[[2.5]]], [[3.5]])  # (1 + 4) / 2 and (1 + 6) / 2
    assert ridge(gram, moment, 0.0).item() == pytest.approx(1.4)  # least squares
    assert ridge(gram, moment, 1.0).item() == pytest.approx(1.0)  # 3.5 / (2.5 + 1)
    weighted = moments(x, y, np.array([[2.0, 0.0]]))
    assert ridge(*weighted, 1.0).item() == pytest.approx(0.5)  # 1 / (1 + 1), of the first sample alone
    assert squares(x, y, np.array([[1.0]])).tolist() == [[0.0, 1.0]]


def test_ridge_of_two_dimensions_by_hand() -> None:
    gram, moment = moments(np.array([[[1.0, 0.0], [0.0, 2.0]]]), np.array([[1.0, 4.0]]))
    assert ridge(gram, moment, 0.0)[0] == pytest.approx([1.0, 2.0])  # G = diag(1/2, 2), b = (1/2, 4)
    assert ridge(gram, moment, 0.5)[0] == pytest.approx([0.5, 1.6])
    assert ridge(gram, moment, 1e12)[0] == pytest.approx([0.0, 0.0], abs=1e-9)


def test_underdetermined_problems_have_the_minimum_norm_solution() -> None:
    gram, moment = moments(np.array([[[1.0, 1.0]]]), np.array([[2.0]]))
    assert ridge(gram, moment, 0.0)[0] == pytest.approx([1.0, 1.0])
    assert ridge(gram, moment, 1.0)[0] == pytest.approx([2 / 3, 2 / 3])
    # Two such clients leave the shared weights underdetermined too, so they have the minimum norm.
    twice = np.repeat(gram, 2, axis=0), np.repeat(moment, 2, axis=0)
    for penalty in (0.0, 1.0):
        assert personalise(*twice, penalty) == pytest.approx(np.ones((2, 2)))


# -- several clients -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("penalty", "weights"),
    [
        # (G + 1)^-1 = 1/2 and 1/4, so the shared weight is (1/2 + 9/4) / (1/2 + 3/4) = 2.2. From there, client 0 moves
        # 1/2 of the way to 1, and client 1 moves 3/4 of the way to 3.
        (1.0, [1.6, 2.8]),
        (0.0, [1.0, 3.0]),  # local training
        (1e9, [2.5, 2.5]),  # one model for all, (1 + 9) / (1 + 3)
    ],
)
def test_a_stage_by_hand(penalty: float, weights: list[float]) -> None:
    gram, moment = np.array([[[1.0]], [[3.0]]]), np.array([[1.0], [9.0]])
    assert personalise(gram, moment, penalty).ravel() == pytest.approx(weights)


def test_a_stage_minimises_equation_6() -> None:
    rng = np.random.default_rng(0)
    x, y, importance = rng.normal(size=(4, 9, 3)), rng.normal(size=(4, 9)), rng.uniform(size=(4, 9))
    gram, moment = moments(x, y, importance)
    weights = personalise(gram, moment, 0.3)
    shared = weights.mean(axis=0)
    slope = np.einsum("kde,ke->kd", gram, weights) - moment + 0.3 * (weights - shared)
    assert slope == pytest.approx(np.zeros((4, 3)))  # for each client's weights and, summed, for the shared weights


def test_one_client_equals_local_training() -> None:
    gram, moment = np.array([[[2.5]]]), np.array([[3.5]])
    assert average(np.array([[1.4]])).tolist() == [[1.4]]
    for penalty in (0.0, 0.1, 10.0):
        assert personalise(gram, moment, penalty).item() == pytest.approx(1.4)
    errors = simulate(0, clients=1)
    assert errors.local == errors.fedavg == errors.local_one_penalty


def test_fedavg_gives_all_clients_one_model() -> None:
    assert average(np.array([[1.0, 0.0], [3.0, 4.0]])).tolist() == [[2.0, 2.0], [2.0, 2.0]]


# -- the ensemble ----------------------------------------------------------------------------------------


def test_reweighting_by_hand() -> None:
    beta, weights = reweight(np.array([[0.0, 0.5]]), np.ones((1, 2)))
    assert beta.item() == pytest.approx(0.5 * math.log(3))  # epsilon is 1/4
    assert weights[0] == pytest.approx(2 / (1 + 3**0.25) * np.array([1, 3**0.25]))
    beta, weights = reweight(np.array([[0.0, 0.0], [1.0, 1.0]]), np.ones((2, 2)))
    assert beta == pytest.approx([0.5 * math.log(1e6), 0.0], abs=1e-5)
    assert weights.tolist() == np.ones((2, 2)).tolist()


def test_an_ensemble_of_two_stages_by_hand() -> None:
    # Two clients with one sample each, y = 1 and 3. FedAvg has their mean. Stage 2 without a penalty fits both exactly.
    x, y, fedavg = np.ones((2, 1, 1)), np.array([[1.0], [3.0]]), np.array([[2.0], [2.0]])
    weights = ensemble(x, y, fedavg, [0.0]).ravel()
    assert weights[0] == pytest.approx(1.0, abs=1e-5)  # FedAvg's error there is the largest y^2: its beta is 0
    first, alone = 0.5 * math.log(8), 0.5 * math.log(1e6 - 1)  # epsilon is 1 / 9, and 0, clipped to 1e-6
    error = (3 - (2 * first + 3 * alone) / (first + alone)) ** 2 / 9  # of both together (line 21)
    second = 0.5 * math.log((1 - error) / error)
    assert weights[1] == pytest.approx((2 * first + 3 * second) / (first + second))


def test_an_ensemble_of_equal_members_equals_a_member() -> None:
    x, y, fedavg = np.ones((1, 2, 1)), np.array([[1.0, 3.0]]), np.array([[2.0]])
    assert ensemble(x, y, fedavg, [1.0, 0.1, 0.01]).item() == pytest.approx(2.0)


# -- the data --------------------------------------------------------------------------------------------


def test_the_ratio_interpolates_shared_and_personal_weights() -> None:
    shared, personal, half, mixed = (draw_federation(0, 5, ratio) for ratio in (0.0, 1.0, 0.5, None))
    assert (shared.truth == shared.truth[0]).all()
    assert len(np.unique(personal.truth[:, 0])) == 5
    assert half.truth == pytest.approx((shared.truth + personal.truth) / 2)
    assert (half.x == shared.x).all()  # the ratio changes only the weights
    ratios = (mixed.truth - shared.truth) / (personal.truth - shared.truth)
    assert ratios == pytest.approx(np.repeat(ratios[:, :1], module.DIMENSION, axis=1))
    assert ((ratios > 0) & (ratios < 1)).all()
    assert len(np.unique(ratios[:, 0].round(6))) == 5


def test_samples_have_their_clients_covariance_and_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SAMPLES", 20_000)
    federation = draw_federation(0, 2, 0.5, noise=0.5)
    gram, _ = moments(federation.x, federation.y)
    assert np.abs(gram - federation.covariances).max() < 0.08  # six standard deviations, sqrt(2 / 20,000) of 1
    assert np.abs(federation.covariances[0] - federation.covariances[1]).max() > 0.3
    assert squares(federation.x, federation.y, federation.truth).mean() == pytest.approx(0.5, rel=0.05)


def test_with_infinite_data_and_one_model_only_noise_remains() -> None:
    federation = draw_federation(0, 3, 0.0)
    gram, moment = federation.covariances, np.einsum("kde,ke->kd", federation.covariances, federation.truth)
    alone = ridge(gram, moment, 0.0)
    for weights in (alone, average(alone), personalise(gram, moment, 0.0), personalise(gram, moment, 10.0)):
        assert expected_error(federation, weights) == pytest.approx(NOISE)


def test_without_noise_local_training_recovers_the_truth() -> None:
    federation = draw_federation(0, 3, 0.7, noise=0.0)
    assert expected_error(federation, ridge(*moments(federation.x, federation.y), 0.0)) == pytest.approx(0.0, abs=1e-12)
    assert expected_error(federation, np.zeros_like(federation.truth)) > 0.1


def test_expected_error_by_hand() -> None:
    federation = draw_federation(0, 2, 0.5)._replace(truth=np.zeros((2, 1)), covariances=np.array([[[1.0]], [[4.0]]]))
    assert expected_error(federation, np.array([[1.0], [2.0]])) == pytest.approx(NOISE + (1 + 16) / 2)


# -- the figure ------------------------------------------------------------------------------------------


def test_the_seed_determines_the_simulation() -> None:
    first = simulate(0, clients=3)
    assert first == simulate(0, clients=3)
    assert first != simulate(1, clients=3)
    assert first != simulate(0, clients=3, ratio=None)


@pytest.mark.slow
def test_the_figures_text_matches_the_simulation() -> None:
    text = " ".join(str(item("ppfe", "figure3").content["here"]).split())

    def errors(**settings: int | float | None) -> dict[str, float]:
        runs = [simulate(seed, **settings)._asdict() for seed in (0, 1, 2)]  # type: ignore[arg-type]
        means = {key: number([run[key] for run in runs]) for key in runs[0]}
        return {key: mean.mean for key, mean in means.items() if mean}

    for clients in CLIENTS:
        by_method = errors(clients=clients)
        assert by_method["ppfe"] == min(by_method.values())
    by = {ratio: errors(ratio=ratio) for ratio in (*RATIOS, None)}
    for ratio in (0.0, 0.2, 0.4):
        assert by[ratio]["ppfe"] == min(by[ratio].values())
    for ratio in (0.6, 0.8, 1.0, None):
        assert by[ratio]["local_one_penalty"] < by[ratio]["ppfe"] < by[ratio]["fedavg"]
    assert max(by[0.6]["ppfe"] - by[0.6]["local"], by[None]["ppfe"] - by[None]["local"]) < 0
    assert f"the same error as PPFE at r_p = 0.8 ({by[0.8]['ppfe']:.2f})" in text
    assert f"{by[0.8]['local']:.2f}" == f"{by[0.8]['ppfe']:.2f}"
    assert f"a lower error at r_p = 1 ({by[1.0]['local']:.3f}, compared with {by[1.0]['ppfe']:.3f})" in text
    for ratio in (0.8, 1.0, None):  # where Local is nearest
        much = simulate(0, ratio=ratio, noise=4 * NOISE)
        assert much.ppfe < much.local
    for ratio in (0.4, 0.6):  # where they cross
        little = simulate(0, ratio=ratio, noise=NOISE / 4)
        assert (little.local < little.ppfe) is (ratio == 0.6)
