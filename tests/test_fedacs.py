"""FedACS: similarities, threshold and mixing by hand, degenerate cases, and the client's round."""

import math

import numpy as np
import pytest

from posy.strategies.fedacs import attention_weights, cosine_similarity
from posy.strategies.server_state import load_state, state_of

R = math.sqrt(0.5)


def unit(*degrees: float) -> np.ndarray:
    """Return unit vectors in the plane."""
    angles = np.radians(degrees)
    return np.stack([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)


# -- similarities --------------------------------------------------------------------------------------


def test_similarity_by_hand():
    similarity = cosine_similarity(np.array([[2, 0], [3, 3], [-1, 0]], np.float32))
    np.testing.assert_allclose(similarity, [[1, R, -1], [R, 1, -R], [-1, -R, 1]], atol=1e-7)


def test_diagonal_is_exactly_one_and_the_matrix_symmetric():
    models = np.random.default_rng(0).normal(size=(20, 1003)).astype(np.float32)
    similarity = cosine_similarity(models)
    assert (np.diag(similarity) == 1.0).all()
    np.testing.assert_array_equal(similarity, similarity.T)
    assert np.abs(similarity).max() <= 1.0


def test_blockwise_similarity_equals_the_full_computation():
    models = np.random.default_rng(0).normal(1, 1, (7, 1003)).astype(np.float32)
    exact = models.astype(np.float64)
    exact /= np.linalg.norm(exact, axis=1, keepdims=True)
    for block in (1, 100, 1003, 5000):
        np.testing.assert_allclose(cosine_similarity(models, block), exact @ exact.T, atol=1e-6)


def test_zero_model_has_zero_similarity():
    similarity = cosine_similarity(np.array([[0, 0], [1, 2]], np.float32))
    np.testing.assert_array_equal(similarity, np.eye(2))


# -- threshold and weights (Eq. 4) ---------------------------------------------------------------------


def test_weights_by_hand():
    """The elements 0.2 0.2 0.4 0.4 0.8 0.8 1 1 1 have the median 0.8, and only the diagonal is larger."""
    similarity = np.array([[1, 0.8, 0.4], [0.8, 1, 0.2], [0.4, 0.2, 1]])
    np.testing.assert_array_equal(attention_weights(similarity, 0.5), np.eye(3))
    # The 3/8-quantile is 0.4, and equal values are excluded.
    np.testing.assert_allclose(
        attention_weights(similarity, 0.375), [[1 / 1.8, 0.8 / 1.8, 0], [0.8 / 1.8, 1 / 1.8, 0], [0, 0, 1]]
    )
    # The 0.2-quantile is between the second element, 0.2, and the third, 0.4.
    np.testing.assert_allclose(
        attention_weights(similarity, 0.2),
        [[1 / 2.2, 0.8 / 2.2, 0.4 / 2.2], [0.8 / 1.8, 1 / 1.8, 0], [0.4 / 1.4, 0, 1 / 1.4]],
    )


def test_p_zero_excludes_only_the_least_similar():
    similarity = np.array([[1, 0.8, 0.4], [0.8, 1, 0.2], [0.4, 0.2, 1]])
    selected = attention_weights(similarity, 0.0) > 0
    np.testing.assert_array_equal(selected, [[True, True, True], [True, True, False], [True, False, True]])


@pytest.mark.parametrize("models", [unit(0, 10, 25, 70), unit(30, 30, 30), unit(0, 180, 90)])
def test_p_one_gives_identity_weights(models):
    np.testing.assert_array_equal(attention_weights(cosine_similarity(models), 1.0), np.eye(len(models)))


def test_negative_similarities_are_always_dropped():
    """The threshold of -1 at p = 0 would admit -0.5, which Eq. 4 would subtract."""
    similarity = np.array([[1, 0.5, -0.5], [0.5, 1, -1], [-0.5, -1, 1]])
    np.testing.assert_allclose(attention_weights(similarity, 0.0), [[2 / 3, 1 / 3, 0], [1 / 3, 2 / 3, 0], [0, 0, 1]])


@pytest.mark.parametrize("p", [0.0, 0.3, 0.5, 1.0])
def test_mixing_identical_models_changes_nothing(p):
    models = np.tile(np.random.default_rng(0).normal(size=501).astype(np.float32), (5, 1))
    weights = attention_weights(cosine_similarity(models), p)
    np.testing.assert_allclose(weights.sum(axis=1), 1)
    assert (np.diag(weights) > 0).all()
    np.testing.assert_allclose(weights @ models, models, rtol=1e-6)


def test_separated_groups_share_no_weight():
    models = unit(0, 5, 80, 86)
    weights = attention_weights(cosine_similarity(models), 0.5)
    np.testing.assert_array_equal(weights > 0, np.kron(np.eye(2), np.ones((2, 2))) > 0)
    c = math.cos(math.radians(5))
    assert weights[0, 1] == pytest.approx(c / (1 + c), rel=1e-6)


def test_similarity_distinguishes_nearly_equal_models():
    """Cosines that differ in the ninth digit, which float32 does not have."""
    rng = np.random.default_rng(0)
    start = rng.normal(size=40_000)
    models = np.float32(start + 3e-4 * rng.normal(size=(6, 40_000)))
    exact = models.astype(np.float64)
    exact /= np.linalg.norm(exact, axis=1, keepdims=True)
    np.testing.assert_allclose(cosine_similarity(models), exact @ exact.T, atol=1e-14)
    assert len(np.unique(cosine_similarity(models))) == 15 + 1


# -- the strategy --------------------------------------------------------------------------------------


def test_own_initialisation_gives_clients_different_models(make_strategy, update):
    """Only untrained clients receive their initial model. Independent models are nearly orthogonal."""
    strategy = make_strategy("fedacs", model="linear", fedacs_initialisation="own")
    starts = np.stack([strategy.serve(client)["model"] for client in range(4)])
    for client, start in enumerate(starts):
        np.testing.assert_array_equal(start, strategy.initial(client))
    similarity = cosine_similarity(starts)
    assert np.abs(similarity - np.eye(4)).max() < 0.9
    strategy.aggregate(1, [update(1, {"model": starts[1]})])
    np.testing.assert_allclose(strategy.serve(1)["model"], starts[1])
    np.testing.assert_array_equal(strategy.serve(3)["model"], starts[3])


def test_newcomers_receive_the_mean_with_own_initialisation(make_strategy, update):
    strategy = make_strategy("fedacs", model="linear", fedacs_initialisation="own", holdout_clients=0.25)
    (newcomer,) = strategy.newcomers
    first, second, _ = strategy.members
    strategy.aggregate(
        1, [update(first, {"model": np.ones(strategy.size)}), update(second, {"model": np.zeros(strategy.size)})]
    )
    np.testing.assert_allclose(strategy.serve(newcomer)["model"], 0.5)


def test_untrained_clients_share_one_served_array(make_strategy, update):
    strategy = make_strategy("fedacs", model="linear")
    models = np.random.default_rng(0).normal(size=(2, strategy.size)).astype(np.float32)
    strategy.aggregate(1, [update(0, {"model": models[0]}), update(3, {"model": models[1]})])
    assert strategy.serve(1)["model"] is strategy.serve(2)["model"]
    again = make_strategy("fedacs", model="linear")
    load_state(again, state_of(strategy))
    np.testing.assert_array_equal(again.serve(1)["model"], models.mean(axis=0))


def test_clients_receive_the_initial_model_before_round_1(make_strategy):
    strategy = make_strategy("fedacs")
    np.testing.assert_array_equal(strategy.serve(3)["model"], strategy.initial())


def test_server_stores_the_latest_model_of_each_client(make_strategy, update):
    strategy = make_strategy("fedacs", model="linear")
    models = np.random.default_rng(0).normal(size=(4, strategy.size)).astype(np.float32)
    strategy.aggregate(1, [update(0, {"model": models[0]}), update(3, {"model": models[1]})])
    strategy.aggregate(2, [update(1, {"model": models[2]})])
    assert strategy.seen.tolist() == [0, 1, 3]
    np.testing.assert_array_equal(strategy.models, models[[0, 2, 1]])
    strategy.aggregate(3, [update(3, {"model": models[3]})])
    np.testing.assert_array_equal(strategy.models, models[[0, 2, 3]])


def test_plotted_attention_matches_the_rounds(make_config, federate):
    """Half of the clients train in each round. Clients that have not trained have no attention."""
    finished = federate(make_config("fedacs", num_server_rounds=2, fraction_train=0.5, fedacs_p=0.2))
    pictures, trained = finished.strategy.pictures, set()
    assert finished.strategy.pictured.tolist() == [1, 2]
    for record, matrix in zip(finished.records, pictures, strict=True):
        trained |= set(record.cohort)
        assert matrix.shape == (4, 4)
        np.testing.assert_allclose(matrix.sum(axis=1), [client in trained for client in range(4)])
        assert np.trace(matrix) / len(trained) == pytest.approx(record.quantities["attention_to_self"])
        collaborators = np.count_nonzero(matrix) - len(trained)
        assert collaborators / len(trained) == pytest.approx(record.quantities["collaborators"])
    assert collaborators > 0
    for client in trained:
        mixed = pictures[-1][client, sorted(trained)] @ finished.strategy.models
        np.testing.assert_allclose(finished.strategy.serve(client)["model"], mixed, atol=1e-6)


def test_p_one_equals_local_training(make_config, federate):
    """Each client continues from its own model, so the scores equal local training."""
    acs = federate(make_config("fedacs", fedacs_p=1.0))
    alone = federate(make_config("local"))
    for client in range(4):
        np.testing.assert_allclose(acs.strategy.models[client], alone.kept(client)["model"], atol=1e-6)
    assert acs.column("local_accuracy") == alone.column("local_accuracy")


def test_client_trains_from_the_served_model_without_a_proximal_term(make_client, softmax_regression):
    """Two full-batch steps of gradient descent (Eq. 5)."""
    client = make_client("fedacs", model="linear", batch_size=100, local_epochs=2)
    x, y = client.data.x_train.numpy(), client.data.y_train.numpy()
    start = np.random.default_rng(0).normal(size=client.layout.size).astype(np.float32)
    for _ in range(2):  # the second round does not depend on the first
        (trained,), _, _ = client.fit([start], {"server-round": 1, "lr": 0.1})
        middle = start - 0.1 * softmax_regression(start, x, y)[1]
        np.testing.assert_allclose(trained, middle - 0.1 * softmax_regression(middle, x, y)[1], atol=1e-5)
