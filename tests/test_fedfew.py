"""FedFew: STCH-Set weights by hand, their limits, the server's step, and the client's round."""

import math

import numpy as np
import pytest
import torch

from posy.client_app.predictors import array_of
from posy.client_app.training.work import TrainingDivergedError
from posy.randomness import model_seed, torch_generator
from posy.strategies.fedfew import STCHWeights, entropy, server_step, stch_weights, weighted_losses

# exp(-L) is 1/2, 1/4 for client 0 and 1, 1 for client 1: S = 3/4 and 2, 1/S = 4/3 and 1/2.
LOSSES = np.array([[math.log(2), math.log(4)], [0.0, 0.0]])


def train_config(**extra):
    return {"server-round": 1, "lr": 0.1, **extra}


# -- the weights (Eqs. 9, 11, 12) ----------------------------------------------------------------------


def test_weights_by_hand():
    weights = stch_weights(LOSSES, 1.0)
    np.testing.assert_allclose(weights.inner, [[2 / 3, 1 / 3], [1 / 2, 1 / 2]], rtol=1e-12)
    np.testing.assert_allclose(weights.outer, [8 / 11, 3 / 11], rtol=1e-12)
    assert weights.objective == pytest.approx(math.log(4 / 3 + 1 / 2), rel=1e-12)


def test_mu_divides_the_losses_and_multiplies_the_objective():
    weights = stch_weights(LOSSES * 0.25, 0.25)
    np.testing.assert_allclose(weights.inner, [[2 / 3, 1 / 3], [1 / 2, 1 / 2]], rtol=1e-12)
    np.testing.assert_allclose(weights.outer, [8 / 11, 3 / 11], rtol=1e-12)
    assert weights.objective == pytest.approx(0.25 * math.log(11 / 6), rel=1e-12)


def test_weight_products_equal_the_objective_gradient():
    """Eq. 10: ∂g/∂L_ik = α_i w_ik."""
    rng = np.random.default_rng(0)
    losses, step = rng.uniform(0.1, 2, (4, 3)), 1e-6
    weights = stch_weights(losses, 0.3)
    for i, k in np.ndindex(losses.shape):
        above, below = losses.copy(), losses.copy()
        above[i, k] += step
        below[i, k] -= step
        slope = (stch_weights(above, 0.3).objective - stch_weights(below, 0.3).objective) / (2 * step)
        assert slope == pytest.approx(weights.outer[i] * weights.inner[i, k], abs=1e-8)


def test_objective_is_close_to_the_unsmoothed_objective():
    """Theorem 4.1: |g - max_i min_k L_ik| <= μ log M + μ log K."""
    rng = np.random.default_rng(1)
    losses = rng.uniform(0, 3, (6, 4))
    exact = losses.min(axis=1).max()
    for mu in (1e-4, 1e-2, 0.5):
        assert abs(stch_weights(losses, mu).objective - exact) <= mu * (math.log(6) + math.log(4))


def test_mu_towards_zero_gives_one_hot_inner_weights_and_the_worst_client():
    losses = np.array([[0.3, 0.1, 0.2], [1.0, 2.0, 0.9]])
    weights = stch_weights(losses, 1e-5)
    np.testing.assert_allclose(weights.inner, [[0, 1, 0], [0, 0, 1]], atol=1e-12)
    np.testing.assert_allclose(weights.outer, [0, 1], atol=1e-12)
    assert weights.objective == pytest.approx(0.9, abs=1e-9)


def test_mu_towards_infinity_gives_uniform_weights():
    weights = stch_weights(np.array([[0.3, 0.1, 0.2], [5.0, 2.0, 9.0]]), 1e9)
    np.testing.assert_allclose(weights.inner, np.full((2, 3), 1 / 3), atol=1e-7)
    np.testing.assert_allclose(weights.outer, [0.5, 0.5], atol=1e-7)


@pytest.mark.parametrize("scale", [50.0, 1e6])
def test_small_mu_and_large_losses_do_not_overflow_or_underflow(scale):
    """exp(-scale / 1e-4) is 0 and exp(scale / 1e-4) infinite in double precision, but the weights are exact."""
    mu = 1e-4
    losses = scale + mu * np.array([[0.0, 1.0], [3.0, 2.0]])
    weights = stch_weights(losses, mu)
    s = np.array([1 + math.exp(-1), math.exp(-3) + math.exp(-2)])  # S_i, up to the factor exp(-scale / mu)
    inner = np.array([[1.0, math.exp(-1)], [math.exp(-3), math.exp(-2)]]) / s[:, None]
    np.testing.assert_allclose(weights.inner, inner, atol=1e-5)  # the losses have no further digits
    np.testing.assert_allclose(weights.outer, (1 / s) / (1 / s).sum(), atol=1e-5)
    assert weights.objective == pytest.approx(scale + mu * math.log((1 / s).sum()), rel=1e-12)
    assert weights.inner.sum() == pytest.approx(2) and weights.outer.sum() == pytest.approx(1)


def test_weights_of_distant_losses_at_small_mu_are_finite():
    weights = stch_weights(np.array([[0.0, 1e5], [1e5, 1e5 - 1.0]]), 1e-4)
    np.testing.assert_array_equal(weights.inner, [[1, 0], [0, 1]])
    np.testing.assert_array_equal(weights.outer, [0, 1])
    assert weights.objective == pytest.approx(1e5 - 1, rel=1e-12)


def test_losses_are_weighted_by_samples():
    np.testing.assert_array_equal(
        weighted_losses(np.array([[4.0, 8.0], [4.0, 8.0]]), np.array([1.0, 3.0])), [[1, 2], [3, 6]]
    )


def test_entropy_by_hand():
    np.testing.assert_allclose(entropy(np.array([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]])), [math.log(2), 0.0], atol=1e-15)


# -- the server (Eq. 13) -------------------------------------------------------------------------------


def test_server_step_by_hand():
    models = np.array([[1.0, 2.0], [0.0, 0.0]], np.float32)
    deltas = [np.array([[1, 0], [0, 8]], np.float32), np.array([[0, 4], [4, 4]], np.float32)]
    weights = STCHWeights(np.array([[0.25, 0.75], [0.5, 0.5]]), np.array([0.5, 0.5]), 0.0)
    # products α_i w_ik: 1/8 and 3/8 for client 0, 1/4 and 1/4 for client 1
    np.testing.assert_allclose(server_step(models, deltas, weights, 1.0), [[1.125, 3], [1, 4]])
    np.testing.assert_allclose(server_step(models, deltas, weights, 0.5), [[1.0625, 2.5], [0.5, 2]])
    np.testing.assert_array_equal(models, [[1, 2], [0, 0]])


def test_full_steps_by_hand():
    """The products 1/8, 3/8 and 1/4, 1/4 become 1/3, 3/5 and 2/3, 2/5. The sum for a single model is already 1."""
    models = np.array([[1.0, 2.0], [0.0, 0.0]], np.float32)
    deltas = [np.array([[3, 0], [0, 5]], np.float32), np.array([[0, 6], [5, 5]], np.float32)]
    weights = STCHWeights(np.array([[0.25, 0.75], [0.5, 0.5]]), np.array([0.5, 0.5]), 0.0)
    np.testing.assert_allclose(server_step(models, deltas, weights, 1.0, full=True), [[2, 6], [2, 5]], rtol=1e-6)
    np.testing.assert_allclose(server_step(models, deltas, weights, 2.0, full=True), [[3, 10], [4, 10]], rtol=1e-6)
    one_hot = STCHWeights(np.array([[1.0, 0.0], [1.0, 0.0]]), np.array([0.5, 0.5]), 0.0)
    stepped = server_step(models, deltas, one_hot, 1.0, full=True)
    np.testing.assert_allclose(stepped, [[2.5, 5], [0, 0]])  # a model without clients does not move
    single = STCHWeights(np.ones((2, 1)), np.array([0.25, 0.75]), 0.0)
    first = [delta[:1] for delta in deltas]
    steps = [server_step(models[:1], first, single, 1.0, full) for full in (True, False)]
    np.testing.assert_array_equal(*steps)


def test_full_steps_setting_applies_the_whole_step(make_strategy, update):
    """Each of two clients has one model. The paper's step moves it half the way, and a full step all the way."""
    moved = []
    for full in (False, True):
        strategy = make_strategy("fedfew", model="linear", fedfew_models=2, fedfew_mu=1e-4, fedfew_full_steps=full)
        before, delta = strategy.models.copy(), np.ones_like(strategy.models)
        strategy.aggregate(
            1, [update(i, {"models": delta, "losses": losses}) for i, losses in enumerate(([0.1, 0.9], [0.9, 0.1]))]
        )
        moved.append(strategy.models - before)
    np.testing.assert_allclose(moved[0], 0.5, atol=1e-6)
    np.testing.assert_allclose(moved[1], 1.0, atol=1e-6)


def test_one_model_is_averaged_with_the_outer_weights(make_strategy, update):
    strategy = make_strategy("fedfew", model="linear", fedfew_models=1, fedfew_mu=0.5, fedfew_weigh_losses=False)
    before = strategy.models.copy()
    locals_ = np.random.default_rng(0).normal(size=(3, strategy.size)).astype(np.float32)
    losses = np.array([0.2, 0.9, 0.4])
    replies = [{"models": locals_[i] - before, "losses": losses[i : i + 1]} for i in range(3)]
    strategy.aggregate(1, [update(i, replies[i], n) for i, n in enumerate((5, 1, 9))])
    outer = np.exp(losses / 0.5) / np.exp(losses / 0.5).sum()  # S_i = exp(-L_i/μ), so α_i ∝ exp(L_i/μ)
    np.testing.assert_allclose(strategy.models[0], outer @ locals_, atol=1e-6)


@pytest.mark.parametrize(("weigh", "factors"), [(True, (0.25, 0.75)), (False, (1.0, 1.0))])
def test_aggregate_weights_the_losses_on_request(make_strategy, update, weigh, factors):
    settings = {"fedfew_models": 2, "fedfew_mu": 0.4, "fedfew_weigh_losses": weigh, "fedfew_full_steps": False}
    strategy = make_strategy("fedfew", model="linear", **settings)
    before = strategy.models.copy()
    deltas = np.random.default_rng(0).normal(size=(2, *before.shape)).astype(np.float32)
    losses = np.array([[0.5, 0.3], [0.2, 0.8]])
    replies = [{"models": deltas[i], "losses": losses[i]} for i in range(2)]
    quantities = strategy.aggregate(1, [update(i, replies[i], n) for i, n in enumerate((10, 30))])
    e = np.exp(-losses * np.array(factors)[:, None] / 0.4)
    s = e.sum(axis=1)
    inner, outer = e / s[:, None], (1 / s) / (1 / s).sum()
    expected = before + np.einsum("i,ik,ikd->kd", outer, inner, deltas)
    np.testing.assert_allclose(strategy.models, expected, atol=1e-6)
    assert quantities["objective"] == pytest.approx(0.4 * math.log((1 / s).sum()), rel=1e-6)
    assert quantities["outer_cv"] == pytest.approx(outer.std() / outer.mean(), rel=1e-5)
    assert quantities["inner_max"] == pytest.approx(inner.max(axis=1).mean(), rel=1e-6)
    assert quantities["inner_entropy"] == pytest.approx(-(inner * np.log(inner)).sum(axis=1).mean(), rel=1e-6)
    assert quantities["clients_of_model"] == [1, 1] and quantities["models_in_use"] == 2
    assert quantities["effective_clients"] == pytest.approx(1 / (outer**2).sum(), rel=1e-5)
    np.testing.assert_allclose(strategy.losses[:2], losses, rtol=1e-6)


def test_idle_models_are_reported_once(make_strategy, update, warnings):
    """Client 1 has its lowest loss on the third model, then does not train. Only the second model counts as idle."""
    strategy = make_strategy("fedfew", model="linear", fedfew_models=3)
    delta = np.zeros_like(strategy.models)
    first = update(0, {"models": delta, "losses": [0.1, 0.5, 0.6]})
    second = update(1, {"models": delta, "losses": [0.4, 0.5, 0.3]})
    rounds = [strategy.aggregate(1, [first, second])]
    rounds += [strategy.aggregate(server_round, [first]) for server_round in range(2, 31)]
    assert [quantities["models_in_use"] for quantities in rounds] == [2] * 30
    messages = {r.getMessage() for r in warnings.records if "lowest loss on any client" in r.getMessage()}
    assert len(messages) == 1 and "1 of 3 models" in messages.pop()


def test_effective_clients_by_hand(make_strategy, update):
    """With one model α_i ∝ exp(L_i): 2, 1, 1 make 1/2, 1/4, 1/4, and 1 / (1/4 + 1/16 + 1/16) is 8/3."""
    strategy = make_strategy("fedfew", model="linear", fedfew_models=1, fedfew_mu=1.0, fedfew_weigh_losses=False)
    delta = np.zeros_like(strategy.models)
    losses = enumerate((0.69314718, 0.0, 0.0))
    quantities = strategy.aggregate(1, [update(i, {"models": delta, "losses": [loss]}) for i, loss in losses])
    assert quantities["effective_clients"] == pytest.approx(2.6666667, rel=1e-6)


def test_server_lr_scales_the_step(make_strategy, update):
    """K = 1 and a single client: α w = 1, so that θ moves by η_s Δ."""
    strategy = make_strategy("fedfew", model="linear", fedfew_models=1, fedfew_server_lr=0.25)
    before = strategy.models.copy()
    delta = np.random.default_rng(0).normal(size=before.shape).astype(np.float32)
    strategy.aggregate(1, [update(0, {"models": delta, "losses": [0.7]})])
    np.testing.assert_allclose(strategy.models, before + 0.25 * delta, atol=1e-6)


def test_initialisations(make_strategy):
    distinct = make_strategy("fedfew", fedfew_models=3)
    same = make_strategy("fedfew", fedfew_models=3, fedfew_initialisation="same")
    common = make_strategy("fedavg").model
    np.testing.assert_array_equal(same.models, np.stack([common] * 3))
    np.testing.assert_array_equal(distinct.models[0], common)
    for a, b in ((0, 1), (0, 2), (1, 2)):
        assert np.abs(distinct.models[a] - distinct.models[b]).max() > 0.01


# -- the client ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("stack", ["loop", "vmap"])
def test_updates_and_losses_by_hand(make_client, softmax_regression, stack):
    """One full-batch step: Δ_k = -lr ∇L(θ_k) and L_k = L(θ_k)."""
    client = make_client("fedfew", model="linear", batch_size=100, stack=stack)
    x, y = client.data.x_train.numpy(), client.data.y_train.numpy()
    models = np.random.default_rng(0).normal(size=(3, client.layout.size)).astype(np.float32)
    (delta, losses), n, metrics = client.fit([models], train_config())
    expected = [softmax_regression(model, x, y) for model in models]
    np.testing.assert_allclose(losses, [loss for loss, _ in expected], rtol=1e-5)
    np.testing.assert_allclose(delta, [-0.1 * gradient for _, gradient in expected], atol=1e-6)
    assert n == len(y)
    assert metrics["train-loss"] == pytest.approx(min(loss for loss, _ in expected), rel=1e-5)


@pytest.mark.parametrize("stack", ["loop", "vmap"])
def test_each_model_has_a_separate_batch_order(make_client, softmax_regression, stack):
    """Steps by hand, in the order that (seed, round, client) determines for each model."""
    settings = {"model": "linear", "batch_size": 4, "stack": stack, "fedfew_initialisation": "same"}
    client = make_client("fedfew", fedfew_batches="own", **settings)
    x, y, seed = client.data.x_train.numpy(), client.data.y_train.numpy(), client.settings.run.seed
    start = np.random.default_rng(0).normal(size=client.layout.size).astype(np.float32)
    (delta, losses), _, metrics = client.fit([np.stack([start] * 3)], train_config())
    for k, key in enumerate([(1, client.client, 0), (1, client.client, 0, 1), (1, client.client, 0, 2)]):
        order = torch.randperm(len(y), generator=torch_generator(seed, "batches", *key)).numpy()
        model, total = start.copy(), 0.0
        for first in range(0, len(y), 4):
            batch = order[first : first + 4]
            loss, gradient = softmax_regression(model, x[batch], y[batch])
            model, total = model - 0.1 * gradient, total + loss * len(batch)
        np.testing.assert_allclose(delta[k], model - start, atol=2e-6)
        assert losses[k] == pytest.approx(total / len(y), rel=1e-5)
    assert metrics["samples"] == 3 * len(y)
    shared = make_client("fedfew", **settings).fit([np.stack([start] * 3)], train_config())[0][0]
    # Shared batches have the first model's order.
    np.testing.assert_allclose(shared, np.stack([delta[0]] * 3), atol=1e-6)


def test_separate_batches_make_equal_models_differ(make_config, federate):
    settings = {"fedfew_initialisation": "same", "fedfew_models": 2, "batch_size": 4}
    shared = federate(make_config("fedfew", **settings)).strategy.models
    separate = federate(make_config("fedfew", fedfew_batches="own", **settings)).strategy.models
    again = federate(make_config("fedfew", fedfew_batches="own", **settings)).strategy.models
    np.testing.assert_allclose(shared[0], shared[1], atol=1e-6)
    assert np.abs(separate[0] - separate[1]).max() > 1e-3
    np.testing.assert_array_equal(again, separate)


def test_diverged_model_raises_with_shared_and_separate_batches(make_client):
    for batches in ("shared", "own"):
        client = make_client("fedfew", model="linear", fedfew_models=2, fedfew_batches=batches)
        models = np.zeros((2, client.layout.size), np.float32)
        models[1] = np.nan
        with pytest.raises(TrainingDivergedError, match="smaller lr"):
            client.fit([models], train_config())


def test_loss_comes_from_the_last_epoch(make_client, softmax_regression):
    client = make_client("fedfew", model="linear", batch_size=100, local_epochs=2, fedfew_models=1)
    x, y = client.data.x_train.numpy(), client.data.y_train.numpy()
    model = np.zeros((1, client.layout.size), np.float32)
    (delta, losses), _, _ = client.fit([model], train_config())
    first, gradient = softmax_regression(model[0], x, y)
    second, again = softmax_regression(model[0] - 0.1 * gradient, x, y)
    assert first != pytest.approx(second, rel=1e-2)
    assert losses[0] == pytest.approx(second, rel=1e-5)
    np.testing.assert_allclose(delta[0], -0.1 * (gradient + again), atol=1e-6)


def test_client_is_served_the_model_with_the_lowest_training_loss(make_client):
    """Training and test labels contradict each other, and only the training labels decide."""
    x = np.array([[-1.0], [1.0], [-1.0], [1.0]], np.float32)
    data = (x, np.array([0, 1, 1, 0]), [[0, 1]], [[2, 3]])
    client = make_client("fedfew", model="linear", data=data, fedfew_models=3)
    right, wrong = np.array([-2, 2, 0, 0], np.float32), np.array([2, -2, 0, 0], np.float32)
    models = np.stack([wrong, 0 * wrong, right])
    _, n, metrics = client.evaluate([models], {"server-round": 1})
    assert metrics["chosen"] == "2"
    assert metrics["served-accuracy"] == 0.0 and n == 2
    assert metrics["served-loss"] == pytest.approx(math.log(1 + math.exp(4)), rel=1e-5)


def test_local_model_is_the_best_trained_model(make_client):
    x = np.array([[-1.0], [1.0], [-1.0], [1.0]], np.float32)
    data = (x, np.array([0, 1, 0, 1]), [[0, 1]], [[2, 3]])
    client = make_client("fedfew", model="linear", data=data, fedfew_models=2)
    models = np.array([[2, -2, 0, 0], [-2, 2, 0, 0]], np.float32)
    _, _, metrics = client.fit([models], train_config(**{"evaluate-local": True}))
    assert metrics["local-accuracy"] == 1.0


def test_personal_heads_never_leave_the_client(make_client, make_strategy):
    strategy = make_strategy("fedfew", fedfew_personal_head=True)
    client = make_client("fedfew", fedfew_personal_head=True)
    head = client.layout.part(["head"])
    served = strategy.serve(0)["models"]
    assert served.shape == (3, client.layout.size - head.size)
    seeds = [model_seed(client.settings.run.seed, k) for k in range(3)]
    starts = np.stack([client.architecture.initial(seed) for seed in seeds])
    np.testing.assert_array_equal(
        client.assembled({"models": torch.from_numpy(served)}), starts
    )  # each has its own head
    (delta, losses), _, _ = client.fit([served], train_config())
    assert {"models": delta.shape, "losses": losses.shape} == strategy.exchange.expected_shapes(0)
    heads = client.state["personal"]
    assert heads.shape == (3, head.size)
    assert (np.abs(heads - head.take(starts)).max(axis=1) > 1e-4).all()  # each of the K heads was trained
    # The next round starts from the client's own heads.
    combined = array_of(client.assembled({"models": torch.from_numpy(served + delta)}))
    np.testing.assert_array_equal(head.take(combined), heads)
    np.testing.assert_array_equal(client.shared.take(combined), served + delta)


def test_personal_heads_differ_between_clients(make_config, federate):
    finished = federate(make_config("fedfew", fedfew_personal_head=True))
    assert [r.dropped for r in finished.records] == [[]] * 3
    heads = [finished.kept(client)["personal"] for client in range(4)]
    assert np.abs(heads[0] - heads[2]).max() > 1e-3
    assert finished.strategy.models.shape[1] == finished.strategy.size - heads[0].shape[1]


def test_personal_statistics_never_leave_the_client(make_client, make_strategy):
    rng = np.random.default_rng(3)
    y = np.arange(16) % 2
    x = np.clip(rng.normal(100 + 50 * y[:, None, None], 40, (16, 16, 16)), 0, 255).astype(np.uint8)
    data = (x, y, [range(6), range(8, 13)], [range(6, 8), range(13, 16)])
    settings = {"data": data, "model": "resnet18-bn", "batch_size": 6, "fedfew_models": 2}
    settings["fedfew_personal_statistics"] = True
    client, strategy = (make("fedfew", **settings) for make in (make_client, make_strategy))
    statistics = client.layout.select(lambda entry: not entry.trainable)
    assert statistics.size > 0 and strategy.models.shape == (2, client.layout.size - statistics.size)
    served = strategy.serve(0)["models"]
    (delta, losses), _, _ = client.fit([served], train_config())
    assert {"models": delta.shape, "losses": losses.shape} == strategy.exchange.expected_shapes(0)
    # The client combines the served models with the statistics of its training.
    combined = array_of(client.assembled({"models": torch.from_numpy(served)}))
    np.testing.assert_array_equal(client.shared.take(combined), served)
    start = np.stack([client.architecture.initial(model_seed(client.settings.run.seed, k)) for k in range(2)])
    assert (np.abs(statistics.take(combined) - statistics.take(start)).max(axis=1) > 0.01).all()


def test_one_model_with_large_mu_equals_fedavg(make_config, federate):
    """K = 1 and μ→∞: α = 1/M, so that clients of equal size give FedAvg."""
    rng = np.random.default_rng(3)
    x, y = rng.normal(size=(24, 4)).astype(np.float32), np.arange(24) % 2
    data = (x, y, [range(0, 8), range(8, 16)], [range(16, 20), range(20, 24)])
    few = federate(make_config("fedfew", data=data, fedfew_models=1, fedfew_mu=1e9))
    average = federate(make_config("fedavg", data=data))
    np.testing.assert_allclose(few.strategy.models[0], average.strategy.model, atol=1e-6)
    assert few.column("served_accuracy") == average.column("served_accuracy")


def test_plotted_quantities_match_the_rounds(make_config, federate):
    """With n = (21, 12, 8, 1), the weights follow from the losses, and the quantities of the last round from both."""
    finished = federate(make_config("fedfew", num_server_rounds=2, fedfew_mu=0.1))
    strategy, last = finished.strategy, finished.records[-1].quantities
    assert strategy.losses.shape == strategy.weights.shape == (4, 3)
    e = np.exp(-strategy.losses * np.array([[21], [12], [8], [1]]) / 42 / 0.1)
    np.testing.assert_allclose(strategy.weights, e / e.sum(axis=1, keepdims=True), rtol=1e-9)
    assert strategy.weights.max(axis=1).mean() == pytest.approx(last["inner_max"])
    assert np.bincount(strategy.losses.argmin(axis=1), minlength=3).tolist() == last["clients_of_model"]
    assert last["objective"] == pytest.approx(0.1 * math.log((1 / e.sum(axis=1)).sum()))
    assert strategy.objectives.tolist() == [[r.number, r.quantities["objective"]] for r in finished.records]
    assert {client: row.min() for client, row in enumerate(strategy.losses)} == finished.column("train_loss")[-1]


def test_smallest_positive_mu_gives_one_hot_weights():
    weights = stch_weights(np.array([[1.0, 2.0], [4.0, 3.0]]), 5e-324)
    assert weights.inner.tolist() == [[1, 0], [0, 1]]
    assert weights.outer.tolist() == [0, 1]
    assert weights.objective == pytest.approx(3.0)
