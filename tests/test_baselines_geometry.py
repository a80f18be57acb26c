"""Baselines that compare models, updates or features as vectors, by hand, and degenerate cases."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.linalg import sqrtm
from scipy.stats import multivariate_normal

from posy.client_app.fednh import mean_directions
from posy.client_app.feduv import closeness, too_little_variance
from posy.client_app.pfedfda import best_shares, discriminant, folds_of, gaussians
from posy.models.layers import spread_directions
from posy.settings import SettingsError
from posy.strategies.confree import best_for_the_worst, guidance
from posy.strategies.fedmgda import common_descent
from posy.strategies.fedmtl import learnt_relations
from posy.strategies.fednh import drawn
from posy.strategies.replies import BadReplyError, gram

LR = 0.1
CONFIG = {"server-round": 1, "lr": LR}
FULL_BATCH = {"model": "linear", "batch_size": 100}


def start_of(client, seed=0):
    return np.random.default_rng(seed).normal(size=client.layout.size).astype(np.float32)


def test_inner_products_by_hand():
    rows = np.array([[1, 2, 0], [0, 1, -1]], np.float32)
    for block in (1, 2, 16_384):
        assert gram(rows, block).tolist() == [[5, 2], [2, 2]]


# -- FedMTL --------------------------------------------------------------------------------------------


def test_fedmtl_ties_each_client_to_the_mean_model(make_strategy, update):
    """λ Σ_j Ω_ij w_j with Ω = I − 11ᵀ/3 is λ (w_i − w̄), a pull of 2λ/3 towards the mean of the other clients."""
    strategy = make_strategy("fedmtl", model="linear", fedmtl_strength=0.6)
    models = np.random.default_rng(0).normal(size=(3, strategy.size)).astype(np.float32)
    strategy.aggregate(
        1, [update(c, {"model": row}, n) for c, row, n in zip((0, 1, 3), models, (5, 1, 9), strict=True)]
    )
    for client, row, peers in ((0, 0, (1, 2)), (1, 1, (0, 2)), (3, 2, (0, 1))):
        served = strategy.serve(client)["model"]
        tie = strategy.train_config(2, client)["tie"]
        np.testing.assert_allclose(served, models[list(peers)].mean(axis=0), atol=1e-6)
        assert tie == pytest.approx(0.4)
        np.testing.assert_allclose(tie * (models[row] - served), 0.6 * (models[row] - models.mean(axis=0)), atol=1e-6)


def test_fedmtl_ties_a_new_client_to_the_mean_model(make_strategy, update):
    strategy = make_strategy("fedmtl", model="linear", fedmtl_strength=0.6)
    assert strategy.train_config(1, 2) == {"tie": 0.0}  # the server has no client's model yet
    models = np.random.default_rng(0).normal(size=(2, strategy.size)).astype(np.float32)
    strategy.aggregate(1, [update(c, {"model": row}) for c, row in enumerate(models)])
    np.testing.assert_allclose(strategy.serve(2)["model"], models.mean(axis=0), atol=1e-6)
    assert strategy.train_config(2, 2)["tie"] == pytest.approx(0.6 * 2 / 3)


def test_fedmtl_learns_relations_from_the_models():
    orthogonal = np.eye(3) * 4.0
    np.testing.assert_allclose(learnt_relations(orthogonal), np.eye(3) / 2, atol=1e-12)
    equal = np.full((3, 3), 7.0)
    np.testing.assert_allclose(learnt_relations(equal), np.eye(3) - np.full((3, 3), 1 / 4), atol=1e-12)
    np.testing.assert_allclose(learnt_relations(np.zeros((2, 2))), np.eye(2))
    w = np.random.default_rng(1).normal(size=(6, 4))
    root = np.real(sqrtm(w.T @ w))
    expected = np.linalg.inv(4 * root / np.trace(root) + np.eye(4))
    np.testing.assert_allclose(learnt_relations(w.T @ w), expected, atol=1e-10)


def test_fedmtl_ties_equal_the_gradient_of_the_regulariser(make_strategy, update):
    strategy = make_strategy("fedmtl", model="linear", fedmtl_strength=0.6, fedmtl_relations="learnt")
    models = np.random.default_rng(0).normal(size=(3, strategy.size)).astype(np.float32)
    models[2] = models[0] + 0.1 * models[2]
    strategy.aggregate(1, [update(c, {"model": row}) for c, row in enumerate(models)])
    w = models.T.astype(np.float64)
    gradient = 0.6 * w @ learnt_relations(w.T @ w)
    for client in range(3):
        tie = strategy.train_config(2, client)["tie"]
        pull = tie * (models[client] - strategy.serve(client)["model"])
        np.testing.assert_allclose(pull, gradient[:, client], atol=1e-5)


def test_fedmtl_client_by_hand(make_client, gradient_of):
    """The client starts from the common initialisation, not from the served array, and continues with its model."""
    client = make_client("fedmtl", **FULL_BATCH)
    model = client.initial().numpy()
    for number, tie in ((1, 0.5), (2, 2.0)):
        mean = start_of(client, number)
        (sent,), _, _ = client.fit([mean], {**CONFIG, "server-round": number, "tie": tie})
        model = model - LR * (gradient_of(client, model) + tie * (model - mean))
        np.testing.assert_allclose(sent, model, atol=1e-5)
        np.testing.assert_array_equal(client.state["model"], sent)
    predictor = client.served_model([torch.from_numpy(mean)], CONFIG)
    np.testing.assert_array_equal(predictor.members[0].parameters.numpy(), sent)


def test_fedmtl_without_ties_is_local_training(make_config, federate):
    settings = {"num_server_rounds": 4, "fraction_train": 0.6}
    untied = federate(make_config("fedmtl", fedmtl_strength=0.0, **settings))
    local = federate(make_config("local", **settings))
    for client in range(4):
        np.testing.assert_array_equal(untied.kept(client)["model"], local.kept(client)["model"])
    assert untied.column("local_loss") == local.column("local_loss")


# -- FedMGDA+ ------------------------------------------------------------------------------------------


def test_common_descent_by_hand():
    """For g = (1, 0) and (0, 2), λ² + 4 (1 − λ)² is least at 0.8. At length 1 both have equal weight."""
    changes, centre = np.array([[1, 0], [0, 2]], np.float32), np.array([0.5, 0.5])
    weights, scale = common_descent(changes, centre, 1.0, normalise=False)
    np.testing.assert_allclose(weights, [0.8, 0.2], atol=1e-9)
    np.testing.assert_array_equal(scale, [1, 1])
    np.testing.assert_allclose(common_descent(changes, centre, 0.1, normalise=False)[0], [0.6, 0.4], atol=1e-9)
    weights, scale = common_descent(changes, np.array([0.75, 0.25]), 1.0, normalise=True)
    np.testing.assert_allclose(weights, [0.5, 0.5], atol=1e-9)
    np.testing.assert_array_equal(scale, [1, 2])
    weights, _ = common_descent(changes, np.array([0.75, 0.25]), 0.1, normalise=True)
    np.testing.assert_allclose(weights, [0.65, 0.35], atol=1e-9)


def test_opposed_updates_do_not_move_the_model(make_strategy, update):
    strategy = make_strategy("fedmgda", model="linear", fedmgda_epsilon=1.0)
    before = strategy.model.copy()
    step = np.random.default_rng(0).normal(size=strategy.size).astype(np.float32)
    strategy.aggregate(1, [update(0, {"model": before + step}, 1), update(1, {"model": before - 3 * step}, 9)])
    np.testing.assert_allclose(strategy.model, before, atol=1e-5)


def test_zero_updates_do_not_move_the_model(make_strategy, update):
    strategy = make_strategy("fedmgda", model="linear")
    before = strategy.model.copy()
    strategy.aggregate(1, [update(0, {"model": before}), update(1, {"model": before})])
    np.testing.assert_array_equal(strategy.model, before)


MOVING = [
    ("fedmgda", {}),
    ("confree", {}),
    ("scaffold", {"scaffold_server_lr": 0.5}),
    ("pfedme", {"pfedme_beta": 4.0}),
    ("pfedme", {"pfedme_beta": 4.0, "robust": "median"}),
]
"""Methods whose servers set the parameters to other values than the mean."""


@pytest.mark.parametrize(("method", "settings"), MOVING)
def test_running_statistics_are_averaged(make_config, federate, method, settings):
    """The server neither extrapolates BatchNorm's running statistics nor includes them in its mixture."""
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 255, (18, 4, 4, 1)).astype(np.uint8), np.arange(18) % 3
    data = (x, y, [range(3), range(3, 12)], [range(12, 15), range(15, 18)])
    network = f"{Path(__file__).with_name('networks.py')}:normalised"
    replies = []

    def record_replies(strategy):
        original = strategy.aggregate

        def aggregate(server_round, updates):
            replies.append([update.arrays["model"] for update in updates])
            return original(server_round, updates)

        strategy.aggregate = aggregate

    finished = federate(
        make_config(method, data=data, model=network, num_server_rounds=2, **settings), prepare=record_replies
    )
    strategy = finished.strategy
    layout = strategy.architecture.layout
    trainable = layout.trainable.put(np.zeros(layout.size), np.ones(layout.trainable.size))
    statistics = strategy.shared.take(trainable) == 0
    first, second = replies[-1]
    expected = 0.25 * first + 0.75 * second if "robust" not in settings else (first + second) / 2
    assert statistics.sum() == 16 and (first[statistics] != second[statistics]).all()
    np.testing.assert_allclose(strategy.model[statistics], expected[statistics], rtol=1e-5)
    assert np.abs(strategy.model - expected)[~statistics].max() > 1e-3


def test_fedmgda_with_epsilon_0_is_fedavg(make_config, federate):
    settings = {"fedmgda_epsilon": 0.0, "fedmgda_normalise": False, "fraction_train": 0.6}
    free, plain = federate(make_config("fedmgda", **settings)), federate(make_config("fedavg", fraction_train=0.6))
    np.testing.assert_allclose(free.strategy.model, plain.strategy.model, atol=1e-6)


# -- FedUV ---------------------------------------------------------------------------------------------


def variance_by_hand(logits):
    p = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    gamma = np.eye(p.shape[1]).std(axis=0, ddof=1)
    return float(np.maximum(gamma - p.std(axis=0, ddof=1), 0).mean())


def closeness_by_hand(z):
    squared = [((z[i] - z[j]) ** 2).sum() for i in range(len(z)) for j in range(i + 1, len(z))]
    positive = sorted(d for d in squared if d > 0)
    return float(np.mean([math.exp(-d / positive[(len(positive) - 1) // 2]) for d in squared]))


@pytest.fixture
def features_and_logits():
    rng = np.random.default_rng(3)
    features, logits = rng.normal(size=(7, 5)), rng.normal(size=(7, 3))
    features[4] = features[1]  # a distance of 0
    return features, logits


def test_feduv_regularisers_by_hand(features_and_logits):
    features, logits = (torch.tensor(a) for a in features_and_logits)
    mask = torch.ones(7, dtype=torch.float64)
    assert float(too_little_variance(logits, mask)) == pytest.approx(variance_by_hand(logits.numpy()), rel=1e-6)
    assert float(closeness(features, mask)) == pytest.approx(closeness_by_hand(features.numpy()), rel=1e-9)
    even = 100 * torch.eye(3, dtype=torch.float64)
    assert float(too_little_variance(even, mask[:3])) == pytest.approx(0, abs=1e-6)
    equal = torch.ones(4, 3, dtype=torch.float64)
    assert float(too_little_variance(equal, mask[:4])) == pytest.approx(1 / math.sqrt(3), abs=1e-5)


def test_padding_of_a_batch_has_no_effect(features_and_logits):
    features, logits = (torch.tensor(a) for a in features_and_logits)
    mask = torch.tensor([1, 1, 1, 1, 1, 0, 0], dtype=torch.float64)
    full_mask = torch.ones(5, dtype=torch.float64)
    torch.testing.assert_close(too_little_variance(logits, mask), too_little_variance(logits[:5], full_mask))
    torch.testing.assert_close(closeness(features, mask), closeness(features[:5], full_mask))
    stacked = torch.func.vmap(closeness)(torch.stack([features, 2 * features]), torch.stack([mask, mask]))
    torch.testing.assert_close(stacked, closeness(features[:5], full_mask).expand(2))  # its scale does not matter


@pytest.mark.parametrize("count", [1, 2, 4])
def test_degenerate_batches_have_no_gradient(count):
    """Test a single sample, and equal samples."""
    features = torch.ones(4, 5, requires_grad=True)
    logits = torch.ones(4, 3, requires_grad=True)
    mask = (torch.arange(4) < count).float()
    (closeness(features, mask) + too_little_variance(logits, mask)).backward()
    assert not features.grad.any() and not logits.grad.any()


def test_feduv_without_regularisers_is_fedavg(make_config, federate):
    free = federate(make_config("feduv", feduv_variance=0.0, feduv_uniformity=0.0))
    np.testing.assert_array_equal(free.strategy.model, federate(make_config("fedavg")).strategy.model)


# -- FedNH ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "size", "largest"), [(3, 2, -0.5), (10, 64, -1 / 9), (2, 1, -1), (6, 3, 0), (12, 3, 5**-0.5)]
)
def test_prototypes_are_maximally_separated(count, size, largest):
    """Check a simplex, an octahedron and an icosahedron."""
    directions = spread_directions(count, size).double()
    torch.testing.assert_close(directions.norm(dim=1), torch.ones(count, dtype=torch.float64))
    cosines = (directions @ directions.T).fill_diagonal_(-1)
    assert float(cosines.max()) == pytest.approx(largest, abs=0.01)


def test_prototypes_depend_on_the_seed(make_strategy):
    first, again, other = (make_strategy("fednh", seed=seed).model for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert np.abs(first - other).max() > 0.1


def test_fednh_prototype_update_by_hand():
    prototypes = np.array([[1, 0], [0, 1], [0.6, 0.8]], np.float32)
    means = np.array([[0, 0.2], [0, 0], [-3, -4]], np.float32)
    moved = drawn(prototypes, means, 0.75)
    expected = [[3 / math.sqrt(10), 1 / math.sqrt(10)], [0, 1], [0.6, 0.8]]  # 0.75 - 0.25 is half of the third
    np.testing.assert_allclose(moved, expected, atol=1e-6)
    np.testing.assert_allclose(drawn(prototypes, means, 0.0), [[0, 1], [0, 1], [-0.6, -0.8]], atol=1e-6)


def test_a_class_without_samples_has_a_zero_direction():
    means = mean_directions(torch.tensor([[3.0, 4.0], [6.0, 8.0]]), torch.tensor([2, 2]), 3)
    torch.testing.assert_close(means, torch.tensor([[0, 0], [0, 0], [0.6, 0.8]]))


def test_fednh_with_rho_1_keeps_its_prototypes(make_config, federate):
    finished = federate(make_config("fednh", fednh_rho=1.0, fraction_train=0.6))
    head = finished.strategy.architecture.layout.part(["head"])
    np.testing.assert_allclose(head.take(finished.strategy.model), head.take(finished.strategy.initial()), atol=1e-6)


def test_fednh_needs_a_body(make_strategy):
    with pytest.raises(SettingsError, match="model = 'linear'"):
        make_strategy("fednh", model="linear")


# -- pFedFDA -------------------------------------------------------------------------------------------


@pytest.fixture
def clouds():
    """Return features and labels of three classes (with five, two and no samples), and the global means."""
    rng = np.random.default_rng(5)
    labels = np.array([0, 1, 0, 0, 1, 0, 0])
    return rng.normal(size=(7, 4)) + 3 * labels[:, None], labels, rng.normal(size=(3, 4))


def test_gaussians_by_hand(clouds):
    features, labels, overall = clouds
    means, covariance = gaussians(*(torch.tensor(a) for a in clouds), ridge=0.5, few=2)
    expected = np.stack([features[labels == 0].mean(axis=0), overall[1], overall[2]])
    centred = features - expected[labels]
    np.testing.assert_allclose(means, expected, atol=1e-12)
    np.testing.assert_allclose(covariance, centred.T @ centred / 6 + 0.5 * np.eye(4), atol=1e-12)


def test_discriminant_matches_the_log_densities():
    rng = np.random.default_rng(0)
    means, root, x = rng.normal(size=(3, 4)), rng.normal(size=(4, 4)), rng.normal(size=(5, 4))
    covariance, prior = root @ root.T + np.eye(4), np.array([0.2, 0.5, 0.3])
    weight, bias = discriminant(torch.tensor(means), torch.tensor(covariance), torch.tensor(prior).log())
    logits = x @ weight.numpy().T + bias.numpy()
    densities = np.stack([multivariate_normal(m, covariance).logpdf(x) for m in means], axis=1) + np.log(prior)
    np.testing.assert_allclose(logits - logits[:, :1], densities - densities[:, :1], atol=1e-9)


def test_folds_balance_the_classes():
    labels = torch.tensor([2, 0, 2, 0, 2, 1, 0])
    assert folds_of(labels, 2).tolist() == [0, 0, 1, 1, 0, -1, 0]
    assert folds_of(labels, 3).tolist() == [0, 0, 1, 1, 2, -1, 2]


def test_best_shares_minimise_the_hold_out_loss():
    local = torch.tensor([[2.0, 0.0], [-2.0, 0.0]]).double(), torch.eye(2).double()
    labels = torch.tensor([0, 1, 0, 1])
    prior = torch.tensor([0.5, 0.5]).double().log()
    parts = [(local, local[0][labels], labels)]
    assert best_shares(parts, (-local[0], local[1]), prior) == (1.0, 1.0)  # the global means are swapped
    assert best_shares([((-local[0], local[1]), *parts[0][1:])], local, prior) == (0.0, 0.0)
    empty = [(local, local[0][:0], labels[:0])]
    assert best_shares(empty, (-local[0], local[1]), prior) == (0.0, 0.0)


@pytest.mark.parametrize("column", [-1, -2])
def test_an_invalid_covariance_is_refused(make_strategy, column):
    """Test a negative variance, and a matrix that is not symmetric."""
    strategy = make_strategy("pfedfda", model="mlp")
    arrays = {name: array.copy() for name, array in strategy.serve(0).items()}
    strategy.check(0, arrays)
    arrays["covariance"][-1, column] = -0.5
    with pytest.raises(BadReplyError, match="an invalid covariance"):
        strategy.check(0, arrays)


# -- ConFREE -------------------------------------------------------------------------------------------


def test_confree_guidance_by_hand():
    """(1, 0) and (-1, 1) become (1/2, 1/2) and (0, 1). Half their sum is 1 times the first plus 3/4 of the second."""
    products = gram(np.array([[1, 0], [-1, 1]], np.float32))
    np.testing.assert_allclose(guidance(products), [1, 0.75], atol=1e-12)
    agreeing = gram(np.array([[1, 0], [0, 1], [1, 1]], np.float32))
    np.testing.assert_allclose(guidance(agreeing), [1 / 3] * 3)
    np.testing.assert_array_equal(guidance(np.zeros((2, 2))), [0.5, 0.5])


@pytest.mark.parametrize("alpha", [0.2, 0.9])
def test_direction_maximises_the_smallest_inner_product(alpha):
    """Compare with a fine search over the edge of the ball."""
    rows = np.array([[1, 0.2], [-0.3, 1], [2, 0.1]], np.float32)
    guide = np.array([0.5, 0.3, 0.2])
    direction = best_for_the_worst(gram(rows), guide, alpha) @ rows
    centre = guide @ rows
    angles = np.linspace(0, 2 * math.pi, 100_001)
    edge = centre + alpha * np.linalg.norm(centre) * np.stack([np.cos(angles), np.sin(angles)], axis=1)
    assert np.linalg.norm(direction - centre) == pytest.approx(alpha * np.linalg.norm(centre), rel=1e-4)
    assert (rows @ direction).min() == pytest.approx((edge @ rows.T).min(axis=1).max(), rel=1e-4)


def test_a_zero_radius_returns_the_guide():
    products, guide = gram(np.array([[1, 0.2], [-0.3, 1]], np.float32)), np.array([0.7, 0.4])
    np.testing.assert_array_equal(best_for_the_worst(products, guide, 0.0), guide)
    np.testing.assert_array_equal(best_for_the_worst(np.zeros((2, 2)), guide, 0.5), guide)


def test_confree_resolves_conflicts_per_tensor(make_strategy, update):
    """The updates of the first bias conflict, and the updates of the second agree. All clients have equal weight."""
    strategy = make_strategy("confree", model="mlp", confree_alpha=0.0, confree_parts="tensors")
    before, changes = strategy.model.copy(), np.zeros((2, strategy.model.size), np.float32)
    views = [strategy.architecture.layout.views(np.append(row, np.zeros(195, np.float32))) for row in changes]
    first, second = "blocks.fc1.linear.bias", "blocks.fc2.linear.bias"
    views[0][first][:2], views[1][first][:2] = (1, 0), (-1, 1)
    views[0][second][:2], views[1][second][:2] = (1, 0), (1, 1)
    changes = np.stack([strategy.architecture.layout.flatten(v)[: strategy.model.size] for v in views])
    quantities = strategy.aggregate(
        1, [update(c, {"model": before + row}, n) for c, row, n in zip((0, 2), changes, (9, 1), strict=True)]
    )
    after = strategy.architecture.layout.views(np.append(strategy.model - before, np.zeros(195, np.float32)))
    np.testing.assert_allclose(after[first][:2], [0.25, 0.75], atol=1e-6)
    np.testing.assert_allclose(after[second][:2], [1, 0.5], atol=1e-6)
    assert quantities == {"conflicts": pytest.approx(0.5 / 4)}  # half of the products of one tensor are negative


def test_confree_with_one_client_and_zero_radius_is_fedrep(make_config, federate):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(20, 4)).astype(np.float32), np.arange(20) % 2
    data = (x, y, [range(12)], [range(12, 20)])
    free = federate(make_config("confree", data=data, confree_alpha=0.0, confree_head_epochs=1))
    plain = federate(make_config("fedrep", data=data, fedrep_head_epochs=1))
    np.testing.assert_allclose(free.strategy.model, plain.strategy.model, atol=1e-6)
