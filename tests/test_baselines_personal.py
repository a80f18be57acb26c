"""Personalised baselines: steps by hand, and degenerate settings."""

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from posy.client_app.fedala import settled
from posy.client_app.fedfomo import first_order_weights, normalised
from posy.strategies.cfl import bipartition, split
from posy.strategies.fedfomo import chosen
from posy.strategies.pfedme import relaxed

Make = Callable[..., Any]
Flat = np.ndarray
LR = 0.1
CONFIG = {"server-round": 1, "lr": LR}
SECOND = {"server-round": 2, "lr": LR}
EVALUATE = {"server-round": 1, "lr": LR, "evaluate-personal": True}
FULL_BATCH = {"batch_size": 100}  # a batch holds all samples of a client


def start_of(client: Any, seed: int = 0) -> Flat:
    return np.random.default_rng(seed).normal(0, 0.5, size=client.layout.size).astype(np.float32)


def loss_and_gradient(client: Any, flat: Flat, which: Any = slice(None), split: str = "train") -> tuple[float, Flat]:
    """Return loss and gradient over some of a client's samples, from a PyTorch network in double precision."""
    module = client.architecture.build().double()
    leaves = {
        name: torch.tensor(np.asarray(view), dtype=torch.float64, requires_grad=True)
        for name, view in client.layout.views(flat).items()
    }
    x, y = client.jobs.samples(split)
    loss = F.cross_entropy(torch.func.functional_call(module, leaves, (x[which].double(),)), y[which])
    gradients = torch.autograd.grad(loss, list(leaves.values()))
    return float(loss.detach()), torch.cat([g.flatten() for g in gradients]).numpy()


def gradient(client: Any, flat: Flat, which: Any = slice(None)) -> Flat:
    return loss_and_gradient(client, flat, which)[1]


def loss_on_test_data(client: Any, flat: Flat) -> float:
    return loss_and_gradient(client, flat, split="test")[0]


def assert_same_runs(first: Any, second: Any, *columns: str) -> None:
    np.testing.assert_array_equal(first.strategy.model, second.strategy.model)
    for column in columns:
        assert first.column(column) == second.column(column)


# -- FedPer and LG-FedAvg ------------------------------------------------------------------------------


@pytest.mark.parametrize(("method", "layers"), [("fedper", 1), ("fedper", 2), ("lg-fedavg", 1), ("lg-fedavg", 2)])
def test_shared_and_personal_layers_are_trained_together(method: str, layers: int, make_client: Make) -> None:
    client = make_client(method, **FULL_BATCH, model="mlp", **{f"{method.replace('-', '_')}_layers": layers})
    names = client.architecture.layer_names
    assert len(names) == 3
    last = client.layout.part(names[-layers:])
    lower = client.layout.without(names[-layers:])
    shared, personal = (lower, last) if method == "fedper" else (last, lower)
    assert (client.shared, client.personal) == (shared, personal)
    flat = client.initial().numpy().copy()
    received = shared.take(start_of(client)).copy()
    shared.put(flat, received)
    (sent,), _, _ = client.fit([received], CONFIG)
    flat = flat - LR * gradient(client, flat)
    np.testing.assert_allclose(sent, shared.take(flat), atol=1e-6)
    np.testing.assert_allclose(client.state["personal"], personal.take(flat), atol=1e-6)
    shared.put(flat, received := shared.take(start_of(client, 1)))
    _, _, metrics = client.evaluate([received], EVALUATE)
    assert metrics["served-loss"] == pytest.approx(loss_on_test_data(client, flat), rel=1e-5)


@pytest.mark.parametrize("settings", [{"model": "linear"}, {"model": "mlp", "lg_fedavg_layers": 3}])
def test_lg_fedavg_that_shares_all_layers_is_fedavg(
    settings: dict[str, Any], make_config: Make, federate: Make
) -> None:
    lg = federate(make_config("lg-fedavg", **settings, fraction_train=0.6))
    plain = federate(make_config("fedavg", model=settings["model"], fraction_train=0.6))
    assert_same_runs(lg, plain, "served_loss", "local_loss")


# -- fine-tuning ---------------------------------------------------------------------------------------


def test_fedbabu_trains_the_body_and_fine_tunes_all_layers(make_client: Make) -> None:
    client = make_client("fedbabu", **FULL_BATCH, model="mlp", fedbabu_lr=0.3, fedbabu_epochs=2)
    body = client.layout.without(["head"])
    flat = client.initial().numpy().copy()
    received = body.take(start_of(client)).copy()
    body.put(flat, received)
    (sent,), _, metrics = client.fit([received], {**CONFIG, "evaluate-local": True})
    np.testing.assert_allclose(sent, received - LR * body.take(gradient(client, flat)), atol=1e-6)
    assert not client.state and "local-loss" not in metrics  # fine-tuning is part of evaluations only
    _, _, metrics = client.evaluate([received], EVALUATE)
    assert metrics["served-loss"] == pytest.approx(loss_on_test_data(client, flat), rel=1e-5)
    for _ in range(2):
        flat = flat - 0.3 * gradient(client, flat)
    assert metrics["local-loss"] == pytest.approx(loss_on_test_data(client, flat), rel=1e-4)


def test_fedbabu_can_fine_tune_only_the_head(make_client: Make) -> None:
    client = make_client("fedbabu", **FULL_BATCH, model="mlp", fedbabu_lr=0.3, fedbabu_epochs=2, fedbabu_tuned="head")
    body, head = client.layout.without(["head"]), client.layout.part(["head"])
    flat = client.initial().numpy().copy()
    received = body.take(start_of(client)).copy()
    body.put(flat, received)
    _, _, metrics = client.evaluate([received], EVALUATE)
    for _ in range(2):
        head.put(flat, head.take(flat) - 0.3 * head.take(gradient(client, flat)))
    assert metrics["local-loss"] == pytest.approx(loss_on_test_data(client, flat), rel=1e-4)


def test_fedbabu_server_stores_no_head(make_config: Make, federate: Make) -> None:
    finished = federate(make_config("fedbabu", model="mlp"))
    assert finished.strategy.model.size == finished.strategy.architecture.layout.without(["head"]).size
    assert all(finished.kept(client) == {} for client in range(4))


def test_fedsam_by_hand(make_client: Make) -> None:
    """The step uses the gradient at the worst point within 0.4, w + 0.4 g / ||g||."""
    client = make_client("fedsam-ft", **FULL_BATCH, model="mlp", fedsam_ft_rho=0.4)
    start = start_of(client)
    uphill = gradient(client, start)
    (sent,), _, _ = client.fit([start], CONFIG)
    expected = start - LR * gradient(client, start + 0.4 * uphill / np.linalg.norm(uphill))
    np.testing.assert_allclose(sent, expected, atol=1e-6)
    assert np.abs(expected - (start - LR * uphill)).max() > 1e-3


@pytest.mark.parametrize(("method", "settings"), [("fedprox-ft", {"mu": 2.0}), ("fedsam-ft", {"rho": 0.5})])
def test_fine_tuning_has_no_extra_term(method: str, settings: dict[str, float], make_client: Make) -> None:
    options = {
        f"{method.replace('-', '_')}_{key}": value for key, value in (settings | {"epochs": 2, "lr": 0.2}).items()
    }
    client = make_client(method, model="mlp", **options)
    plain = make_client("fedavg-ft", model="mlp", fedavg_ft_epochs=2, fedavg_ft_lr=0.2)
    start = start_of(client)
    assert client.evaluate([start], EVALUATE)[2] == plain.evaluate([start], EVALUATE)[2]
    assert not np.array_equal(client.fit([start], CONFIG)[0][0], plain.fit([start], CONFIG)[0][0])


def test_fedprox_ft_serves_the_fedprox_model(make_config: Make, federate: Make) -> None:
    tuned = federate(make_config("fedprox-ft", fedprox_ft_mu=0.5))
    assert_same_runs(tuned, federate(make_config("fedprox", fedprox_mu=0.5)), "served_loss")


@pytest.mark.parametrize("settings", [{"fedprox_ft_mu": 0.0}, {"fedsam_ft_rho": 0.0}])
def test_fedprox_ft_and_fedsam_ft_without_their_terms_are_fedavg_ft(
    settings: dict[str, float], make_config: Make, federate: Make
) -> None:
    method = next(iter(settings)).rpartition("_")[0].replace("_", "-")
    assert_same_runs(
        federate(make_config(method, **settings)), federate(make_config("fedavg-ft")), "served_loss", "local_loss"
    )


# -- APFL ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("adaptive", [False, True])
def test_two_rounds_of_apfl_by_hand(adaptive: bool, make_client: Make) -> None:
    client = make_client("apfl", **FULL_BATCH, model="mlp", apfl_alpha=0.25, apfl_adaptive=adaptive)
    v, alpha = client.initial().numpy().astype(np.float64), 0.25
    for number in (1, 2):
        w = client.initial().numpy() + 0.1 * start_of(client, number)
        (sent,), _, _ = client.fit([w], {"server-round": number, "lr": LR})
        if adaptive:
            alpha -= LR * (v - w) @ gradient(client, alpha * v + (1 - alpha) * w)
            assert 0 < alpha < 1
            assert float(client.state["alpha"]) == pytest.approx(alpha, rel=1e-3)
        mixed = gradient(client, alpha * v + (1 - alpha) * w)
        w, v = w - LR * gradient(client, w), v - LR * alpha * mixed
        np.testing.assert_allclose(sent, w, atol=1e-6)
        np.testing.assert_allclose(client.state["own"], v, atol=1e-5)
        np.testing.assert_allclose(client.state["model"], alpha * v + (1 - alpha) * w, atol=1e-5)
    assert ("alpha" in client.state) is adaptive


def test_apfl_with_alpha_1_is_local_training(make_config: Make, federate: Make) -> None:
    settings = {"model": "mlp", "fraction_train": 0.6}
    mixed, local = (federate(make_config(method, apfl_alpha=1.0, **settings)) for method in ("apfl", "local"))
    for client in range(4):
        actual, expected = (finished.kept(client).get("model") for finished in (mixed, local))
        assert (actual is None) == (expected is None)
        if actual is not None:
            np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-6)


def test_apfl_with_alpha_0_is_fedavg(make_config: Make, federate: Make) -> None:
    settings = {"model": "mlp"}
    mixed, plain = (federate(make_config(method, apfl_alpha=0.0, **settings)) for method in ("apfl", "fedavg"))
    assert_same_runs(mixed, plain, "served_loss", "local_loss")


def test_apfl_alpha_stays_between_0_and_1(make_client: Make) -> None:
    client = make_client("apfl", **FULL_BATCH, model="mlp", apfl_alpha=0.5, apfl_adaptive=True, lr=1.0)
    ends = set()
    for sign in (-1, 1):
        client.state.clear()
        v = client.initial().numpy()
        client.stored["own"] = torch.from_numpy(v.copy())
        w = v + sign * 3 * gradient(client, v).astype(np.float32)
        client.fit([w], {**CONFIG, "lr": 1.0})
        ends.add(float(client.state["alpha"]))
        assert 0 <= float(client.state["alpha"]) <= 1
    assert len(ends) == 2


# -- Per-FedAvg ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("hessian", ["fo", "hf"])
def test_per_fedavg_adapts_and_learns_on_different_samples(hessian: str, make_client: Make) -> None:
    """A batch has one sample per part. Exactly one order of the samples gives the update."""
    parts = 2 if hessian == "fo" else 3
    x = np.random.default_rng(1).normal(size=(parts, 5)).astype(np.float32)
    data = (x, np.arange(parts), [list(range(parts))], [[]])
    settings = {"per_fedavg_alpha": 0.4, "per_fedavg_hessian": hessian}
    if hessian == "hf":
        settings["per_fedavg_hessian_delta"] = 0.05
    client = make_client("per-fedavg", data=data, model="mlp", **settings)
    start = start_of(client)
    (sent,), _, _ = client.fit([start], CONFIG)
    fits = []
    for order in itertools.permutations(range(parts)):
        first, second, third = ([order[i % parts]] for i in range(3))
        step = gradient(client, start - 0.4 * gradient(client, start, first), second)
        if hessian == "hf":
            ends = [gradient(client, start + sign * 0.05 * step, third) for sign in (1, -1)]
            step = step - 0.4 * (ends[0] - ends[1]) / (2 * 0.05)
        fits.append(np.allclose(sent, start - LR * step, rtol=0, atol=2e-6))
    assert sum(fits) == 1


def test_per_fedavg_adapts_its_local_model_to_training_data(make_client: Make) -> None:
    optimiser = {"momentum": 0.9, "weight_decay": 0.1}  # training uses these settings, adaptation does not
    client = make_client("per-fedavg", **FULL_BATCH, **optimiser, model="mlp", per_fedavg_alpha=0.3, per_fedavg_steps=2)
    start = start_of(client)
    _, _, metrics = client.evaluate([start], EVALUATE)
    adapted = start
    for _ in range(2):
        adapted = adapted - 0.3 * gradient(client, adapted)
    assert metrics["served-loss"] == pytest.approx(loss_on_test_data(client, start), rel=1e-5)
    assert metrics["local-loss"] == pytest.approx(loss_on_test_data(client, adapted), rel=1e-4)
    assert not client.state


@pytest.mark.parametrize("hessian", ["fo", "hf"])
def test_per_fedavg_without_adaptation_on_single_samples_is_fedavg(
    hessian: str, make_config: Make, federate: Make
) -> None:
    settings = {"model": "mlp", "batch_size": 1}
    extra = {"per_fedavg_alpha": 0.0, "per_fedavg_hessian": hessian}
    meta, plain = federate(make_config("per-fedavg", **settings, **extra)), federate(make_config("fedavg", **settings))
    assert_same_runs(meta, plain, "served_loss")
    assert meta.column("local_loss") == meta.column("served_loss")


# -- pFedMe --------------------------------------------------------------------------------------------


def test_pfedme_server_by_hand(make_strategy: Make, update: Make) -> None:
    assert relaxed(np.float32([1, 2]), np.float32([3, 0]), 1.5).tolist() == [4, -1]
    strategy = make_strategy("pfedme", model="linear", pfedme_beta=0.5)
    before = strategy.model
    rows = np.random.default_rng(0).normal(size=(2, strategy.size)).astype(np.float32)
    strategy.aggregate(1, [update(0, {"model": rows[0]}, 1), update(3, {"model": rows[1]}, 3)])
    np.testing.assert_allclose(strategy.model, 0.5 * before + 0.5 * (0.25 * rows[0] + 0.75 * rows[1]), atol=1e-6)


def test_pfedme_with_a_single_full_step_is_fedavg(make_config: Make, federate: Make) -> None:
    settings = {"pfedme_strength": 16.0, "pfedme_personal_lr": 1 / 16, "pfedme_steps": 1, "lr": 1 / 16}
    proximal, plain = (
        federate(make_config("pfedme", model="mlp", **settings)),
        federate(make_config("fedavg", model="mlp", lr=1 / 16)),
    )
    np.testing.assert_allclose(proximal.strategy.model, plain.strategy.model, rtol=0, atol=1e-6)


# -- FedFomo -------------------------------------------------------------------------------------------


def test_first_order_weights_by_hand() -> None:
    losses = torch.tensor([2.0, 1.0, 3.0, 2.0, torch.inf, 0.5])
    weights = first_order_weights(losses, torch.tensor([4.0, 2.0, 0.0, 1.0, 3.0]))
    assert weights.tolist() == [0.25, -0.5, 0, 0, 0.5]
    assert normalised(weights).tolist() == pytest.approx([1 / 3, 0, 0, 0, 2 / 3])
    assert normalised(torch.tensor([-1.0, 0.0])).tolist() == [0, 0]
    diverged = torch.tensor([torch.inf, 1.0, torch.inf])  # the client's model has diverged
    assert first_order_weights(diverged, torch.ones(2)).tolist() == [0, 0]


@pytest.mark.parametrize("run_validation", [True, False])
def test_fedfomo_weighs_models_on_validation_samples(make_client: Make, run_validation: bool) -> None:
    """The client uses the run's validation samples, or part of its training samples. It does not train on them."""
    settings = {"validation_fraction": 0.4} if run_validation else {"fedfomo_validation": 0.4}
    client = make_client("fedfomo", **FULL_BATCH, model="linear", **settings)
    start, candidates = client.initial().numpy(), np.stack([start_of(client, 2), start_of(client, 3)])
    candidates[0] = start - 0.2 * gradient(client, start)
    (_, reported), count, metrics = client.fit([candidates], CONFIG)
    x, y = client.data.x_validation, client.data.y_validation
    assert len(y) == 8 and count == (13 if run_validation else 21) and metrics["samples"] == 13

    def loss(model: np.ndarray) -> float:
        tensors = client.layout.views(torch.from_numpy(model))
        return float(torch.nn.functional.cross_entropy(x @ tensors["head.weight"].T + tensors["head.bias"], y))

    expected = [(loss(start) - loss(other)) / np.linalg.norm(other - start) for other in candidates]
    np.testing.assert_allclose(reported, [0, *expected], rtol=1e-4)  # the client's model is the model before training


def test_fedfomo_chooses_models_by_affinity_or_at_random() -> None:
    affinity = np.array([0.5, 3.0, -1.0, 2.0])

    def draw(count: int, epsilon: float, scores: np.ndarray = affinity) -> list[tuple[int, ...]]:
        return [tuple(chosen(scores, count, epsilon, np.random.default_rng(seed))) for seed in range(400)]

    assert set(draw(3, 0.0)) == {(1, 3, 0)}
    assert set(draw(9, 0.0)) == {(1, 3, 0, 2)}
    assert set(draw(2, 1.0)) == set(itertools.permutations(range(4), 2))
    assert set(draw(1, 0.0, np.zeros(3))) == {(0,), (1,), (2,)}  # equal scores give any model
    share = np.mean([choice == (1,) for choice in draw(1, 0.4)])
    assert share == pytest.approx(0.6 + 0.4 / 4, abs=0.07)
    assert chosen(np.zeros(0), 5, 0.5, np.random.default_rng(0)) == []


def test_fedfomo_server_by_hand(make_strategy: Make, update: Make) -> None:
    strategy = make_strategy("fedfomo", model="linear", fedfomo_models=2, fedfomo_epsilon=0.0)
    rows = np.random.default_rng(0).normal(size=(4, strategy.size)).astype(np.float32)
    assert strategy.serve(1)["models"].shape == (0, strategy.size)
    assert strategy.exchange.expected_shapes(1) == {"model": (strategy.size,), "weights": (1,)}
    replies = [{"model": row, "weights": np.zeros(1)} for row in rows]
    np.testing.assert_array_equal(strategy.reference(1, replies[1])["model"], strategy.initial())
    strategy.aggregate(1, [update(c, replies[c]) for c in (0, 1, 3)])
    assert [set(row) for row in strategy.sent.tolist()] == [{1, 3}, {0, 3}, {0, 1, 3} & set(strategy.sent[2]), {0, 1}]
    for client in range(4):
        np.testing.assert_array_equal(strategy.serve(client)["models"], rows[strategy.sent[client]])
    candidates, before = strategy.sent[0].tolist(), strategy.sent[2].tolist()
    reported = [0.125, *(-0.5 if other == 3 else 0.25 for other in candidates)]
    quantities = strategy.aggregate(2, [update(0, {"model": -rows[0], "weights": reported})])
    assert quantities == {"helpful_models": 0.5}
    gained = 0.125 * EYE[0, 0] + 0.25 * (EYE[0, 1] - 2 * EYE[0, 3])
    np.testing.assert_array_equal(strategy.affinity, np.eye(4) + gained)
    assert strategy.sent[0].tolist() == [1, 3]
    assert 2 not in strategy.sent and len(before) == 2


EYE = np.eye(16).reshape(4, 4, 4, 4)
"""EYE[i, j] is the matrix whose only entry is 1, at (i, j)."""


def test_fedfomo_sends_only_models_of_other_participants(make_config: Make, federate: Make) -> None:
    settings = {"fraction_train": 0.5, "num_server_rounds": 4, "fedfomo_epsilon": 1.0, "fedfomo_models": 2}
    finished = federate(make_config("fedfomo", **settings))
    strategy = finished.strategy
    for client, row in enumerate(strategy.sent.tolist()):
        peers = [c for c in strategy.seen.tolist() if c != client]
        assert client not in row and set(row) - {-1} <= set(peers)
        assert len(set(row) - {-1}) == min(2, len(peers))
    again = federate(make_config("fedfomo", **settings)).strategy
    np.testing.assert_array_equal(strategy.sent, again.sent)


# -- CFL -----------------------------------------------------------------------------------------------


def test_bipartition_by_hand() -> None:
    """A chain of similarities joins 0, 3 and 4. Clients 1 and 2 are similar."""
    similarity = np.full((5, 5), -0.5)
    for i, j, value in ((0, 3, 0.9), (3, 4, 0.6), (1, 2, 0.8), (0, 4, -0.9), (2, 4, 0.1)):
        similarity[i, j] = similarity[j, i] = value
    assert bipartition(similarity).tolist() == [False, True, True, False, False]
    assert bipartition(np.eye(2)).tolist() == [False, True]


@pytest.mark.parametrize("seed", range(5))
def test_bipartition_minimises_the_largest_cross_similarity(seed: int) -> None:
    half = np.triu(np.random.default_rng(seed).uniform(-1, 1, (6, 6)), 1)
    similarity = half + half.T + np.eye(6)

    def cross(part: np.ndarray) -> float:
        return float(similarity[np.ix_(part, ~part)].max())

    partitions = (np.array([False, *bits]) for bits in itertools.product((False, True), repeat=5) if any(bits))
    assert cross(bipartition(similarity)) == min(cross(part) for part in partitions)


def test_cfl_split_conditions() -> None:
    updates, n = np.float32([[3, 0.1], [-3, 0.1], [3, 0]]), np.array([1.0, 2.0, 1.0])  # the mean is (0, 0.075)
    assert split(updates, n, 0.08, 2.9).tolist() == [False, True, False]
    assert not split(updates, n, 0.07, 2.9).any()  # the mean still moves
    assert not split(updates, n, 0.08, 3.1).any()  # every client is near the optimum
    assert not split(updates, np.ones(3), 0.08, 2.9).any()
    assert not split(updates[:1], n[:1], 9.0, 0.0).any()


def test_cfl_that_never_splits_is_fedavg(make_config: Make, federate: Make) -> None:
    never, plain = (federate(make_config(m, fraction_train=0.6, cfl_eps1=0.0)) for m in ("cfl", "fedavg"))
    assert_same_runs(never, plain, "served_loss", "local_loss")
    assert not never.strategy.cluster.any()


def test_cfl_splits_until_each_client_is_alone(make_config: Make, federate: Make) -> None:
    settings = {"cfl_eps1": 1e9, "cfl_eps2": 0.0, "num_server_rounds": 3}
    finished = federate(make_config("cfl", **settings))
    assert sorted(finished.strategy.cluster.tolist()) == [0, 1, 2, 3]
    assert finished.records[-1].quantities == {"cluster_sizes": [1, 1, 1, 1]}
    for served, local in zip(finished.column("served_loss")[-1:], finished.column("local_loss")[-1:], strict=True):
        assert served == pytest.approx(local, rel=1e-5)


# -- FedALA --------------------------------------------------------------------------------------------


def test_fedala_weights_settle_when_losses_stop_changing() -> None:
    def losses(*values: float) -> list[torch.Tensor]:
        return [torch.tensor(value) for value in values]

    assert not settled([], 0.1)
    assert not settled(losses(*[1.0] * 10), 0.1)
    assert settled(losses(*[1.0] * 11), 0.1)
    assert settled(losses(9.0, *[1.0] * 10), 0.1)
    assert not settled(losses(*[1.0] * 10, 1.4), 0.1)  # the standard deviation is 0.12
    assert settled(losses(*[1.0] * 10, 1.3), 0.1)
    assert not settled(losses(*[1.0] * 10, 1.3), 0.08)  # the standard deviation is 0.09


def test_fedala_passes_use_the_same_batches(make_client: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """80 % of 21 samples are four batches of 4, and every pass uses the same four."""
    client = make_client("fedala", batch_size=4, model="mlp")
    client.fit([start_of(client)], CONFIG)
    requests = []
    original = client.jobs.answer
    monkeypatch.setattr(client.jobs, "answer", lambda work: (requests.append(work), original(work))[1])
    client.fit([start_of(client, 1)], SECOND)
    passes = [work for work in requests if work.bounds]
    assert len(passes) >= 10 and {work.steps for work in passes} == {4}
    assert {work.stream for work in passes} == {1} and {work.stream for work in requests if not work.bounds} == {0}


def test_fedala_with_eta_0_is_fedavg(make_config: Make, federate: Make) -> None:
    settings = {"model": "mlp", "fraction_train": 0.6}
    mixed = federate(make_config("fedala", fedala_eta=0.0, **settings))
    plain = federate(make_config("fedavg", **settings))
    np.testing.assert_array_equal(mixed.strategy.model, plain.strategy.model)
    assert mixed.column("served_loss") == plain.column("served_loss")
