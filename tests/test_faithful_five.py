"""FedFew, cwFedAvg, FedACS, FedDRM and PPFE: weights, hold-out, lost state, statistics and degenerate settings."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

import posy
from posy.client_app.workspace import Workspace
from posy.server_app.app import run
from posy.server_app.system import chosen_clients
from posy.settings import SettingsError
from posy.strategies.fedacs import attention_weights, cosine_similarity, mixes_alone
from posy.strategies.methods import settings_class
from posy.strategies.registry import read_settings

Make = Callable[..., Any]

LABELS = np.array([0, 0, 0, 1, 0, 1])
"""Four training samples, three of class 0, and two test samples."""
PARTS = ([[0, 1, 2, 3]], [[4, 5]])
BALANCED = np.array([2 / 3, 2 / 3, 2 / 3, 2])
"""Class weights of the training samples: inversely proportional to 3, 3, 3 and 1, with mean 1."""


def train_config(**values: Any) -> dict[str, Any]:
    return {"server-round": 1, "lr": 0.1, **values}


# -- class weights and custom losses -----------------------------------------------------------------------


@pytest.fixture
def two_models() -> np.ndarray:
    """Return two models ``(2, 4)`` that ignore the input: logits (2, 0), and (0, 0).

    Cross-entropy of class 0 and 1: log(1 + e⁻²) = 0.127 and 2.127 for the first, log 2 = 0.693 for the second. The mean
    over three samples of class 0 and one of class 1 is 0.627 and 0.693; with balanced weights it is 1.127 and 0.693.
    """
    return np.array([[0, 0, 2, 0], [0, 0, 0, 0]], np.float32)


@pytest.mark.parametrize("method", ["fedfew", "ifca"])
@pytest.mark.parametrize(("weights", "chosen"), [("none", "0"), ("balanced", "1")])
def test_class_weights_affect_the_model_choice(
    make_client: Make, two_models: np.ndarray, method: str, weights: str, chosen: str
) -> None:
    data = (np.arange(6, dtype=np.float32)[:, None], LABELS, *PARTS)
    client = make_client(method, model="linear", data=data, fedfew_models=2, ifca_clusters=2, class_weights=weights)
    _, _, metrics = client.evaluate([two_models], {"server-round": 1})
    assert metrics["chosen"] == chosen


def test_custom_loss_affects_the_model_choice(make_client: Make, two_models: np.ndarray, tmp_path: Path) -> None:
    """Ten times the cross-entropy on class 1: the means are (3 · 0.127 + 21.27) / 4 and (3 + 10) · 0.693 / 4."""
    (tmp_path / "losses.py").write_text(
        "import torch.nn.functional as F\n\n\n"
        "def rare(logits, labels):\n"
        "    return F.cross_entropy(logits, labels, reduction='none') * (1 + 9 * labels)\n",
        encoding="utf-8",
    )
    data = (np.arange(6, dtype=np.float32)[:, None], LABELS, *PARTS)
    settings = {"model": "linear", "data": data, "fedfew_models": 2, "loss": f"{tmp_path / 'losses.py'}:rare"}
    client = make_client("fedfew", **settings)
    losses = client.jobs.drive(client.losses(torch.from_numpy(two_models)))
    np.testing.assert_allclose(losses, [(3 * 0.126928 + 10 * 2.126928) / 4, 13 * 0.693147 / 4], rtol=1e-5)
    assert client.evaluate([two_models], {"server-round": 1})[2]["chosen"] == "1"


def test_ppfe_initialises_sample_weights_with_class_weights(make_client: Make) -> None:
    """One sample of class 0 is wrong: ε = (2/3) / 4 = 1/6 instead of 1/4, and β = ½ log 5.

    The new weights are (2√5/3, 2/3, 2/3, 2), rescaled to the sum 4.
    """
    x = np.array([-1, 1, 1, -1, 1, -1], np.float32)[:, None]
    settings = {"model": "linear", "data": (x, LABELS, *PARTS), "ppfe_beta": "adaboost"}
    client = make_client("ppfe", class_weights="balanced", **settings)
    model = torch.tensor([9.0, -9.0, 0.0, 0.0])  # class 0 for positive inputs
    beta, weights = client.jobs.drive(client.reweighted(client.stages[0], model))
    assert beta == pytest.approx(np.log(5) / 2, rel=1e-5)
    expected = np.array([2 * np.sqrt(5) / 3, 2 / 3, 2 / 3, 2])
    np.testing.assert_allclose(weights, 4 * expected / expected.sum(), rtol=1e-5)
    plain = make_client("ppfe", **settings)
    assert plain.jobs.drive(plain.reweighted(plain.stages[0], model))[0] == pytest.approx(np.log(3) / 2, rel=1e-5)


def test_ppfe_applies_class_weights_once(make_client: Make) -> None:
    """Weights in the loss are ω, which contain the class weights: their mean over the client's samples stays 1."""
    x = np.array([-1, 1, 1, -1, 1, -1], np.float32)[:, None]
    client = make_client("ppfe", model="mlp", data=(x, LABELS, *PARTS), class_weights="balanced", ppfe_reduction="none")
    first, second = client.stages[:2]
    client.jobs.drive(client.close_stage(first, client.initial()))
    omega = client.state["weights"]
    assert omega.mean() == pytest.approx(1, rel=1e-5)
    shared = second.shared_part.take(client.initial())
    work = next(client.local_round({"model": shared}, {"stage": 2, "stage-ends": False, "rounds-done": 0}))
    np.testing.assert_allclose(client.jobs.share(client.jobs.job(work)).weight, omega, rtol=1e-5)


# -- clients that never train, are absent, or lose their state ------------------------------------------------


@pytest.mark.parametrize("method", ["fedfew", "cwfedavg", "fedacs", "feddrm"])
def test_newcomers_do_not_affect_the_server_state(make_config: Make, federate: Make, method: str) -> None:
    """Rows of newcomers stay empty, and FedDRM routes no query to them."""
    config = make_config(method, holdout_clients=0.5, seed=3, fedfew_models=2, batch_size=100, feddrm_sharing="deep")
    finished = federate(config)
    strategy = finished.strategy
    assert len(strategy.newcomers) == 2
    rows = {"fedfew": strategy.__dict__.get("losses"), "cwfedavg": strategy.__dict__.get("local_norms")}
    if method in rows:
        assert np.isnan(rows[method][list(strategy.newcomers)]).all()
        assert not np.isnan(rows[method][strategy.members]).any()
    if method == "fedacs":
        assert strategy.seen.tolist() == strategy.members
    if method == "cwfedavg":
        assert (strategy.distributions[list(strategy.newcomers)] == 1 / 3).all()
    if method == "feddrm":
        logits = torch.zeros(5, 4).index_fill(1, torch.tensor(strategy.newcomers), 50.0)
        assert set(chosen_clients(strategy, logits).tolist()) <= set(strategy.members)


def test_feddrm_routes_without_a_disconnected_newcomer(make_strategy: Make) -> None:
    """Clients 0 to 3 have 21, 12, 8 and 1 samples, so equal logits select the smallest client that trains."""
    strategy = make_strategy("feddrm", holdout_clients=0.25, seed=3)
    (new,) = strategy.newcomers
    del strategy.clients[new]
    smallest = max(set(range(4)) - {new})
    assert chosen_clients(strategy, torch.zeros(2, 4)).tolist() == [smallest, smallest]


def test_feddrm_uses_the_averaging_weights_as_prior(make_strategy: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """With equal weights in the mean the client branch learns a uniform prior, so that only the logits decide."""
    strategy = make_strategy("feddrm")
    logits = torch.tensor([[0.2, 0.1, 0.0, 0.0]])
    assert chosen_clients(strategy, logits).tolist() == [3]
    monkeypatch.setattr(strategy.exchange, "weight", lambda client: 1)
    assert chosen_clients(strategy, logits).tolist() == [0]


@pytest.mark.parametrize("weights", ["samples", "uniform"])
def test_saved_feddrm_models_route_like_the_server(make_config: Make, weights: str) -> None:
    config = make_config("feddrm", model="mlp", system_accuracy="on", client_weights=weights)
    done = run(None, config)
    workspace = Workspace(read_settings(config))
    x = workspace.dataset.x[np.concatenate(workspace.partition.test)]
    chosen = [next(iter(answer.clients)) for answer in posy.load(done.directory.path).route(x)]
    assert np.bincount(chosen, minlength=4).tolist() == done.system.routed.sum(axis=0).tolist()


def test_fedacs_scores_local_models_of_clients_outside_the_cohort(make_config: Make, federate: Make) -> None:
    config = make_config("fedacs", fraction_train=0.5, num_server_rounds=4)
    finished = federate(config)
    trained = {c for record in finished.records for c in record.cohort}
    scored = finished.column("local_accuracy")[-1]
    assert set(scored) == trained - {3}  # client 3 has no test samples
    strategy = finished.strategy
    for client in trained:
        np.testing.assert_array_equal(finished.kept(client)["model"], strategy.latest(np.array([client]))[0])


@pytest.mark.parametrize("beta", ["samme", "adaboost"])
def test_ppfe_newcomer_training_replaces_its_last_stage(
    make_config: Make, federate: Make, tmp_path: Path, beta: str
) -> None:
    """The stored ensemble has the coefficients of Algorithm 1, including the coefficient of the trained model."""
    config = make_config("ppfe", holdout_clients=0.25, seed=3, ppfe_reduction="none", ppfe_beta=beta, lr=0.3)
    finished = federate(config, models_folder=tmp_path)
    (new,) = finished.strategy.newcomers
    data = Workspace(read_settings(config)).client_data(new)
    stored = load_file(tmp_path / f"client-{new}.safetensors")
    layout, build = finished.strategy.architecture.layout, finished.strategy.architecture.build
    y, n, weights = data.y_train.numpy(), len(data.y_train), np.ones(len(data.y_train))
    members, betas = [], []

    def reweighted(mixture: np.ndarray, weights: np.ndarray) -> tuple[float, np.ndarray]:
        wrong = mixture.argmax(axis=1) != y
        error = np.clip((weights * wrong).sum() / weights.sum(), 1e-6, 1 - 1e-6)
        coefficient = np.log((1 - error) / error) / 2
        if beta == "samme":
            coefficient = max(0.0, coefficient + np.log(2) / 2)
        raised = weights * np.exp(coefficient * wrong)
        return coefficient, raised * n / raised.sum()

    for number in (1, 2, 3):
        model = build()
        model.load_state_dict({e.name: torch.from_numpy(stored[f"stage{number}.{e.name}"]) for e in layout.entries})
        with torch.no_grad():
            members.append(model.eval()(data.x_train).softmax(dim=1).numpy())
        coefficient, raised = reweighted(members[-1], weights)
        if betas:
            coefficients = np.array([*betas, coefficient])
            coefficients = coefficients if coefficients.any() else np.ones_like(coefficients)
            mixture = np.einsum("t,tnc->nc", coefficients, np.stack(members))
            coefficient, raised = reweighted(mixture, weights)
        betas.append(coefficient)
        weights = raised
    coefficients_on_disk = [stored[f"stage{number}.coefficient"].item() for number in (1, 2, 3)]
    np.testing.assert_allclose(coefficients_on_disk, betas, rtol=1e-4, atol=1e-5)
    finished_last = finished.strategy.finished[-1]
    shared = finished.strategy.stages[-1].shared_part
    trained = layout.flatten({e.name: stored[f"stage3.{e.name}"] for e in layout.entries})
    assert np.abs(shared.take(trained) - finished_last).max() > 1e-5


# -- BatchNorm's running statistics ----------------------------------------------------------------------------


def test_a_large_server_step_keeps_variances_positive(make_strategy: Make, update: Make) -> None:
    """η_s = 5 and two clients whose running variance fell from 1 to 0.1: the statistics move with factor 1 to 0.1."""
    strategy = make_strategy("fedfew", **BATCHNORM, fedfew_server_lr=5.0, fedfew_models=1)
    size, statistics = strategy.models.shape[1], strategy.statistics
    assert 0 < statistics.sum() < size
    delta = np.where(statistics, -0.9 * strategy.models[0], 0.1)[None].astype(np.float32)
    before = strategy.models.copy()
    strategy.aggregate(1, [update(client, {"models": delta, "losses": [1.0]}) for client in (0, 1)])
    np.testing.assert_allclose(strategy.models[0][statistics], 0.1 * before[0][statistics], atol=1e-6)
    np.testing.assert_allclose(strategy.models[0][~statistics], before[0][~statistics] + 0.5, atol=1e-5)


BATCHNORM = {
    "model": "resnet18-bn",
    "data": (
        np.random.default_rng(0).normal(size=(8, 16, 16)).astype(np.float32),
        np.arange(8) % 2,
        [[0, 1], [2, 3]],
        [[4, 5], [6, 7]],
    ),
}


# -- degenerate settings ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "settings", "words"),
    [
        ("fedfew", {"fedfew_initialisation": "same"}, "all models stay equal"),
        ("fedacs", {"fedacs_p": 1.0}, "as with method = 'local'"),
        ("fedacs", {"fedacs_p": 0.8}, "with 4 clients"),
        ("fedacs", {"holdout_clients": 0.5, "fedacs_p": 0.4}, "with 2 clients"),
        ("feddrm", {"model": "linear"}, "predict as method = 'local'"),
        ("feddrm", {"feddrm_class_weight": 1.0}, "method = 'fedper'"),
        ("feddrm", {"feddrm_class_weight": 0.0}, "class classifiers untrained"),
        ("ppfe", {"model": "linear"}, "equivalent to FedAvg"),
        ("ppfe", {"ppfe_stages": 1}, "ppfe-stages = 1"),
        ("ppfe", {"model": "mlp"}, "num-server-rounds = 1"),
    ],
)
def test_a_degenerate_setting_is_logged_before_round_1(
    make_config: Make,
    federate: Make,
    warnings: pytest.LogCaptureFixture,
    method: str,
    settings: dict[str, Any],
    words: str,
) -> None:
    federate(make_config(method, num_server_rounds=1, **settings))
    messages = [record.getMessage() for record in warnings.records]
    index = next(i for i, message in enumerate(messages) if message.startswith(f"{method}: ") and words in message)
    assert index < messages.index("[ROUND 1/1]")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"ppfe_stages": 6},
            "ppfe-stages = 6: model = 'mlp' has 3 layers, so the run has 3 stages; set ppfe-stages to at most 3",
        ),
        ({"ppfe_body_lr_stage": 4}, "ppfe-body-lr-stage = 4: there are 3 stages"),
        ({"fraction_train": 0.5, "full_last_round": True}, "full-last-round = true"),
    ],
)
def test_ppfe_warns_about_values_that_no_stage_reaches(
    make_strategy: Make, settings: dict[str, Any], words: str
) -> None:
    strategy = make_strategy("ppfe", model="mlp", num_server_rounds=6, **settings)
    (notice,) = strategy.method.notices(strategy.settings, strategy.architecture)
    assert notice.startswith(words)


@pytest.mark.parametrize("rounds", [1, 2, 3, 6])
def test_default_number_of_stages_fits_any_number_of_rounds(make_strategy: Make, rounds: int) -> None:
    strategy = make_strategy("ppfe", model="mlp", num_server_rounds=rounds)
    assert len(strategy.stages) == min(rounds, 3)
    assert sum(stage.rounds for stage in strategy.stages) == rounds
    if rounds == 2:
        with pytest.raises(SettingsError, match="num-server-rounds = 2"):
            make_strategy("ppfe", model="mlp", num_server_rounds=rounds, ppfe_stages=3)


@pytest.mark.parametrize("method", ["fedfew", "cwfedavg", "fedacs", "feddrm", "ppfe"])
def test_default_settings_are_not_degenerate(make_strategy: Make, method: str) -> None:
    strategy = make_strategy(method)
    assert strategy.method.notices(strategy.settings, strategy.architecture) == ()


@pytest.mark.parametrize("clients", [2, 3, 4, 7, 10])
def test_fedacs_warning_matches_its_attention_weights(clients: int) -> None:
    """Posy warns exactly for those p with which all weights off the diagonal are 0."""
    models = np.abs(np.random.default_rng(clients).normal(size=(clients, 30))).astype(np.float32)
    similarity = cosine_similarity(models)
    for p in np.linspace(0, 1, 41):
        alone = np.array_equal(attention_weights(similarity, p), np.eye(clients))
        assert mixes_alone(p, clients) == alone, p


@pytest.mark.parametrize("method", ["fedfew", "cwfedavg", "fedacs", "feddrm", "ppfe"])
def test_scored_points_match_the_method_cards(method: str) -> None:
    settings = settings_class(method)
    assert settings.card.scored.startswith(f"The {settings.point} ")
