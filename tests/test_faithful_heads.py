"""Methods with layers or heads on the clients: rules of the papers by hand, limits, notices and defaults."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from posy.client_app.pfedfda import best_shares
from posy.settings import SettingsError
from posy.strategies.methods import settings_class
from posy.strategies.registry import read_settings
from posy.strategies.replies import BadReplyError

Make = Callable[..., Any]
LR = 0.1
CONFIG = {"server-round": 1, "lr": LR}
SECOND = {"server-round": 2, "lr": LR}
ONE_BATCH = {"batch_size": 100}

NORMALISED = """
from torch import nn

def perceptron(task):
    lower = [nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU()]
    return nn.Sequential(*lower, nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
"""


@pytest.fixture
def normalised(tmp_path: Path) -> str:
    """Return the name of a network with BatchNorm after both hidden layers, for six features and three classes."""
    file = tmp_path / "normalised.py"
    file.write_text(NORMALISED)
    return f"{file}:perceptron"


# -- defaults and scored models --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("fedrep-head-epochs", 10),  # the authors' scripts: 11 local epochs, one of them on the body
        ("fedbabu-epochs", 5),  # the authors' notebook
        ("lg-fedavg-layers", 2),  # the authors' README, CIFAR-10
        ("fedala-threshold", 0.01),  # the authors' README
    ],
)
def test_defaults_match_the_papers(key: str, value: float, make_config: Make) -> None:
    method = key.removesuffix("-head-epochs").removesuffix("-epochs").removesuffix("-layers").removesuffix("-threshold")
    assert read_settings(make_config(method)).as_config()[key] == value


@pytest.mark.parametrize("method", ["fedrep", "fedper", "lg-fedavg", "fedala", "fedbn", "pfedfda", "fedcp"])
def test_methods_score_the_served_model(method: str) -> None:
    """The authors' programs test the averaged layers together with the client's layers, before training."""
    assert settings_class(method).point == "served"
    assert settings_class("fedbabu").point == "local"  # after fine-tuning


# -- degenerate settings ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "settings", "notice"),
    [
        ("fedbn", {"model": "mlp"}, "has no normalisation layer"),
        ("lg-fedavg", {"model": "mlp", "lg_fedavg_layers": 3}, "shares all 3 layers"),
        ("lg-fedavg", {"model": "mlp", "lg_fedavg_layers": 4}, "shares all 3 layers"),
        ("lg-fedavg", {"model": "linear"}, "choose a network with more layers"),
        ("fedala", {"model": "mlp", "fedala_eta": 0.0}, "equivalent to FedAvg"),
        ("fedala", {"model": "mlp", "fedala_layers": 4}, "set fedala-layers to at most 3"),
    ],
)
def test_degenerate_runs_log_a_warning(
    method: str, settings: dict[str, Any], notice: str, make_config: Make, federate: Make, warnings: Any
) -> None:
    federate(make_config(method, num_server_rounds=1, **settings))
    logged = [record.getMessage() for record in warnings.records if record.levelname == "WARNING"]
    assert [line for line in logged if line.startswith(f"{method}: ") and notice in line]


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("fedbn", {"model": "normalised"}),
        ("lg-fedavg", {"model": "mlp"}),
        ("fedala", {"model": "mlp", "fedala_layers": 3}),
    ],
)
def test_regular_runs_have_no_notices(
    method: str, settings: dict[str, Any], normalised: str, make_strategy: Make
) -> None:
    if settings["model"] == "normalised":
        settings = {**settings, "model": normalised}
    strategy = make_strategy(method, **settings)
    assert strategy.method.notices(strategy.settings, strategy.architecture) == ()


@pytest.mark.parametrize("layers", [3, 4])
def test_fedper_rejects_a_run_without_shared_layers(layers: int, make_strategy: Make) -> None:
    with pytest.raises(SettingsError, match=rf"fedper-layers = {layers} .*3 layers.*at most 2"):
        make_strategy("fedper", model="mlp", fedper_layers=layers)
    assert make_strategy("fedper", model="mlp", fedper_layers=2).model.size


# -- pFedFDA ---------------------------------------------------------------------------------------------


def test_pfedfda_update_norm_excludes_means_and_covariance(make_config: Make, federate: Make) -> None:
    """Means and covariance change more than any body, but a limit above the bodies' changes drops no client."""
    config = make_config("pfedfda", model="mlp", num_server_rounds=1)
    changes: list[list[float]] = []

    def shift_means(strategy: Any) -> None:
        strategy.means = strategy.means + 3

    def record_changes(strategy: Any) -> None:
        shift_means(strategy)
        sent, original = strategy.serve(0), strategy.aggregate

        def aggregate(server_round: int, updates: list[Any]) -> dict[str, Any]:
            for update in updates:
                changes.append([float(np.linalg.norm(update.arrays[name] - sent[name])) for name in sent])
            return dict(original(server_round, updates))

        strategy.aggregate = aggregate

    federate(config, prepare=record_changes)
    limit = 1.01 * max(body for body, _, _ in changes)
    assert len(changes) == 4 and max(math.hypot(*statistics) for _, *statistics in changes) > 2 * limit
    limited = federate({**config, "max-update-norm": limit, "run-name": "limited"}, prepare=shift_means)
    assert limited.records[0].dropped == []
    strict = federate({**config, "max-update-norm": 0.98 * limit, "run-name": "strict"}, prepare=shift_means)
    assert len(strict.records[0].dropped) == 1


def test_pfedfda_masked_sums_equal_plain_means(make_config: Make, federate: Make) -> None:
    """Secure aggregation also masks means and covariance, which the norm excludes."""
    settings = {"model": "mlp", "num_server_rounds": 2}
    plain = federate(make_config("pfedfda", **settings)).strategy
    masked = federate(make_config("pfedfda", **settings, secure_aggregation=True, secure_range=64.0)).strategy
    for name in ("model", "means", "covariance"):
        np.testing.assert_allclose(getattr(masked, name), getattr(plain, name), atol=1e-4)


def test_pfedfda_uses_the_global_mean_for_classes_smaller_than_the_folds(make_client: Make) -> None:
    """Client 1 has six samples of classes 0 and 1 each: enough for five folds, too few for six."""
    for folds, local in ((5, True), (6, False)):
        client = make_client("pfedfda", client=1, model="mlp", pfedfda_folds=folds, pfedfda_beta=1.0, **ONE_BATCH)
        assert torch.bincount(client.data.y_train, minlength=3).tolist() == [6, 6, 0]
        features = torch.randn(12, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        overall = torch.ones(3, 64, dtype=torch.float64), torch.eye(64, dtype=torch.float64)
        means, _ = client.fitted(features, client.data.y_train, overall)
        expected = features[client.data.y_train == 0].mean(dim=0) if local else overall[0][0]
        torch.testing.assert_close(means[0], expected)
        torch.testing.assert_close(means[2], overall[0][2])


def test_pfedfda_beta_interpolates_both_gaussians(make_client: Make) -> None:
    ends = []
    for beta in (0.0, 0.25, 1.0):
        client = make_client("pfedfda", model="mlp", pfedfda_beta=beta, **ONE_BATCH)
        features = torch.randn(21, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        overall = torch.ones(3, 64, dtype=torch.float64), 2 * torch.eye(64, dtype=torch.float64)
        ends.append(client.fitted(features, client.data.y_train, overall))
    for global_end, quarter, local_end in zip(*ends, strict=True):
        torch.testing.assert_close(quarter, 0.75 * global_end + 0.25 * local_end)
    torch.testing.assert_close(ends[0][1], 2 * torch.eye(64, dtype=torch.float64))


def test_pfedfda_fits_separate_shares_for_means_and_covariance() -> None:
    """The local means fit and the local covariance does not. The test tries all pairs of shares."""
    rng = np.random.default_rng(0)
    labels = np.arange(60) % 2
    local_means, overall_means = np.array([[2.0, 0.0], [-2.0, 0.0]]), np.array([[0.0, 1.0], [0.5, -1.0]])
    local_covariance, overall_covariance = np.diag([9.0, 1.0]), np.eye(2)
    features, prior = local_means[labels] + rng.normal(size=(60, 2)), np.log([0.3, 0.7])
    losses = {}
    for mean_share in np.linspace(0, 1, 11):
        for covariance_share in np.linspace(0, 1, 11):
            means = mean_share * local_means + (1 - mean_share) * overall_means
            inverse = np.linalg.inv(covariance_share * local_covariance + (1 - covariance_share) * overall_covariance)
            scores = features @ inverse @ means.T - np.diag(means @ inverse @ means.T) / 2 + prior
            chosen = scores[np.arange(60), labels]
            losses[round(mean_share, 1), round(covariance_share, 1)] = (
                np.log(np.exp(scores).sum(axis=1)) - chosen
            ).sum()
    overall = torch.from_numpy(overall_means), torch.from_numpy(overall_covariance)
    local = torch.from_numpy(local_means), torch.from_numpy(local_covariance)
    parts = [(local, torch.from_numpy(features), torch.from_numpy(labels))]
    pair = min(losses, key=lambda shares: losses[shares])
    common = min(((share, share) for share in np.linspace(0, 1, 11).round(1)), key=lambda shares: losses[shares])
    assert pair[0] != pair[1]
    assert best_shares(parts, overall, torch.from_numpy(prior), two=True) == pytest.approx(pair)
    assert best_shares(parts, overall, torch.from_numpy(prior)) == pytest.approx(common)


def test_pfedfda_training_features_precede_each_step(make_client: Make) -> None:
    """Two epochs on one mini-batch: the Gaussians describe the received body and the body after one step."""
    client = make_client(
        "pfedfda", model="mlp", local_epochs=2, pfedfda_features="training", pfedfda_beta=1.0, **ONE_BATCH
    )
    strategy_body = client.shared.take(client.initial()).clone()
    means, covariance = torch.rand(3, 64, generator=torch.Generator().manual_seed(0)), torch.eye(64)
    sent, _, _ = client.fit([strategy_body.numpy(), means.numpy(), covariance.numpy()], CONFIG)
    model = client.with_head(strategy_body, (means.double(), covariance.double()))
    x, y = client.data.x_train, client.data.y_train
    module = client.architecture.build()
    collected = []
    for _ in range(2):
        module.load_state_dict(client.layout.views(model.clone()))
        features, logits = module(x, True)
        collected.append(features.detach())
        body = list(module.blocks.parameters())
        gradients = torch.autograd.grad(F.cross_entropy(logits, y), body)
        with torch.no_grad():
            for parameter, gradient in zip(body, gradients, strict=True):
                parameter.sub_(LR * gradient)
        model = torch.cat([p.detach().flatten() for p in module.parameters()])
    features, labels = torch.cat(collected), torch.cat([y, y])
    expected = torch.stack([features[labels == c].mean(dim=0) for c in range(3)])
    centred = (features - expected[labels]).double()
    np.testing.assert_allclose(sent[0], client.shared.take(model), atol=1e-6)
    np.testing.assert_allclose(sent[1], expected, atol=1e-5)
    np.testing.assert_allclose(sent[2], centred.T @ centred / 41 + torch.eye(64), atol=1e-4)


def test_pfedfda_rejects_an_invalid_covariance(make_strategy: Make) -> None:
    strategy = make_strategy("pfedfda", model="mlp")
    served = strategy.serve(0)
    with pytest.raises(BadReplyError, match="symmetric"):
        strategy.check(0, served | {"covariance": -served["covariance"]})


# -- FedALA ----------------------------------------------------------------------------------------------


def test_fedala_does_not_mix_running_statistics(normalised: str, make_client: Make) -> None:
    """The mixed layers include a BatchNorm, whose statistics are global and have no weights."""
    client = make_client("fedala", model=normalised, fedala_layers=2, **ONE_BATCH)
    client.fit([client.initial().numpy()], CONFIG)
    client_model = client.state["model"]
    shared = client.initial().numpy() + 0.5
    start, weights = client.jobs.drive(client.aggregated(torch.from_numpy(shared)))
    upper = client.method.mixed(client.architecture)
    entries = [entry for entry in client.layout.entries if entry.layer in upper]
    assert [entry.name for entry in entries if not entry.trainable] == [
        "blocks.body.4.running_mean",
        "blocks.body.4.running_var",
    ]
    assert (
        len(weights)
        == sum(entry.stop - entry.start for entry in entries if entry.trainable)
        < sum(entry.stop - entry.start for entry in entries)
    )
    views, global_views = client.layout.views(start), client.layout.views(torch.from_numpy(shared))
    for entry in client.layout.entries:
        if not entry.trainable or entry.layer not in upper:
            assert torch.equal(views[entry.name], global_views[entry.name])
    assert float((weights - 1).abs().max()) > 1e-3 and not np.array_equal(client_model, shared)


@pytest.mark.parametrize(
    "optimiser", [{"momentum": 0.9, "weight_decay": 0.1, "max_grad_norm": 0.01}, {"optimizer": "adam"}]
)
def test_fedala_learns_its_weights_with_plain_sgd(optimiser: dict[str, Any], make_client: Make) -> None:
    """Momentum, decay, clipping and Adam apply only to the model, not to W ← clip(W − η ∇L) (Eq. 5)."""
    results = []
    for settings in ({}, optimiser):
        client = make_client("fedala", model="mlp", **ONE_BATCH, **settings)
        client.state["model"] = client.initial().numpy()
        client.round = 2
        generator = torch.Generator().manual_seed(0)
        shared = client.initial() + 0.3 * torch.randn(client.layout.size, generator=generator)
        results.append(client.jobs.drive(client.aggregated(shared))[1])
    assert torch.equal(*results) and float((results[0] - 1).abs().max()) > 1e-3


def test_fedala_threshold_sets_the_number_of_passes(make_client: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = []
    for threshold in (1e-12, 1e6):
        client = make_client("fedala", batch_size=4, model="mlp", fedala_threshold=threshold)
        client.fit([client.initial().numpy()], CONFIG)
        passes = []
        original = client.jobs.answer
        monkeypatch.setattr(
            client.jobs,
            "answer",
            lambda work, original=original, passes=passes: (passes.append(work), original(work))[1],
        )
        client.fit([client.initial().numpy() + 0.1], SECOND)
        counts.append(sum(work.bounds is not None for work in passes))
    assert counts == [50, 11]


# -- FedCP -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strength", [0.0, 3.0])
def test_sgd_does_not_rotate_the_fedcp_vector(strength: float, make_client: Make) -> None:
    """The gradient of the cross-entropy sums to 0 over the classes, so training keeps v."""
    client = make_client("fedcp", local_epochs=3, weight_decay=0.01, fedcp_strength=strength, **ONE_BATCH)
    before = client.layout.views(client.initial())["model.head.weight"]
    client.fit([client.shared.take(client.initial()).numpy()], {"server-round": 1, "lr": 1.0})
    after = torch.from_numpy(client.state["personal"][: before.numel()]).reshape(before.shape)
    assert float((after - before).abs().max()) > 0.01
    directions = [F.normalize(weight.sum(dim=0), dim=0) for weight in (before, after)]
    torch.testing.assert_close(*directions, rtol=1e-4, atol=1e-6)


# -- absence and lost state ------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["fedrep", "fedper", "lg-fedavg", "fedala", "pfedfda", "fedcp", "fedbabu"])
def test_lost_client_state_does_not_distort_the_mean(
    method: str, make_config: Make, federate: Make, failing: Make
) -> None:
    """The mean of a round covers only its accepted replies, and the server stores nothing from the dropped client."""
    config = make_config(method, model="mlp", num_server_rounds=2)
    before = {}

    def record_mean(strategy: Any) -> None:
        original = strategy.aggregate

        def aggregate(server_round: int, updates: list[Any]) -> dict[str, Any]:
            weights = np.array([update.num_examples for update in updates], np.float64)
            rows = np.stack([np.asarray(update.arrays["model"], np.float64) for update in updates])
            before[server_round] = ([update.client for update in updates], weights @ rows / weights.sum())
            return dict(original(server_round, updates))

        strategy.aggregate = aggregate

    finished = federate(config, grid=failing(forget=[("train", 2, 0)]), prepare=record_mean)
    clients, mean = before[2]
    assert clients == ([0, 1, 2, 3] if method in ("pfedfda", "fedbabu") else [1, 2, 3])
    np.testing.assert_allclose(finished.strategy.model, mean, atol=1e-6)


@pytest.mark.parametrize("method", ["fedrep", "fedper", "lg-fedavg", "fedbn", "fedala", "pfedfda", "fedcp", "fedbabu"])
def test_newcomers_are_excluded_from_the_mean(method: str, make_config: Make, federate: Make) -> None:
    settings = {"model": "mlp", "num_server_rounds": 2, "holdout_clients": 0.25}
    trained: list[int] = []

    def record_clients(strategy: Any) -> None:
        original = strategy.aggregate
        strategy.aggregate = lambda number, updates: (
            trained.extend(u.client for u in updates),
            original(number, updates),
        )[1]

    strategy = federate(make_config(method, **settings), prepare=record_clients).strategy
    assert len(strategy.newcomers) == 1 and not set(trained) & set(strategy.newcomers)


# -- class weights ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["fedrep", "fedper", "lg-fedavg", "fedbn", "fedala", "pfedfda", "fedcp", "fedbabu"])
def test_class_weights_change_the_training(method: str, make_config: Make, federate: Make) -> None:
    """Client 0 of the skewed data has nine samples of class 0 for each of class 1."""
    rng = np.random.default_rng(0)
    y = np.array([0] * 18 + [1] * 2 + [0] * 10 + [1] * 10)
    x = (rng.normal(size=(40, 6)) + y[:, None]).astype(np.float32)
    data = (x, y, [range(20), range(20, 36)], [[36, 37], [38, 39]])
    models = []
    for weights in ("none", "balanced"):
        settings = {"data": data, "model": "mlp", "num_server_rounds": 1, "class_weights": weights, "batch_size": 20}
        models.append(federate(make_config(method, **settings)).strategy.model)
    assert np.abs(models[0] - models[1]).max() > 1e-4
