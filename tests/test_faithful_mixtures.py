"""Mixtures, meta-gradients, proximal terms and SAM: the methods' formulas under the shared settings."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from posy.client_app.training.batches import Batch
from posy.client_app.training.networks import LoopedModels, Network
from posy.client_app.training.optimiser import Optimiser
from posy.client_app.training.rules import FisherTrace, MetaGradient, Mixed, SharpnessAware, divided
from posy.client_app.training.work import Job, Moments, Samples, Train
from posy.models.parameters import layout_of
from posy.settings import SettingsError
from posy.strategies.replies import Update
from posy.strategies.run_settings import TrainSettings

LR = 0.1
CONFIG = {"server-round": 1, "lr": LR}
EVALUATE = CONFIG | {"evaluate-personal": True}
ONE_BATCH = {"batch_size": 100}
NORMALISED = """
from torch import nn

def build(task):
    first = nn.Linear(task.input_shape[0], 5)
    return nn.Sequential(first, nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, task.num_classes))
"""
CPU = torch.device("cpu")


@pytest.fixture
def normalised(tmp_path):
    """Return the name of a small network with BatchNorm."""
    (tmp_path / "normalised.py").write_text(NORMALISED, encoding="utf-8")
    return f"{tmp_path / 'normalised.py'}:build"


def start_of(client, seed=0):
    return np.random.default_rng(seed).normal(0, 0.5, size=client.layout.size).astype(np.float32)


def gradient(client, flat, weight=None, indices=slice(None)):
    """Return the gradient ``(d,)`` of the (weighted) mean loss over some training samples, in double precision."""
    module = client.architecture.build().double()
    leaves = {
        name: torch.tensor(np.asarray(view), dtype=torch.float64, requires_grad=True)
        for name, view in client.layout.views(np.asarray(flat)).items()
    }
    x, y = client.jobs.samples("train")
    losses = F.cross_entropy(
        torch.func.functional_call(module, leaves, (x[indices].double(),)), y[indices], reduction="none"
    )
    loss = (losses if weight is None else losses * weight[indices].double()).mean()
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(leaves.values()))]).numpy()


# -- running statistics --------------------------------------------------------------------------------


def normalised_network():
    """Return a network with BatchNorm, its start ``(d,)`` and a mini-batch."""

    def build():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3))

    module = build()
    layout = layout_of(module, dict(module.named_children()))
    start = torch.from_numpy(layout.flatten({name: t.numpy() for name, t in build().state_dict().items()}))
    generator = torch.Generator().manual_seed(1)
    return Network(build, layout, CPU), start, Batch(torch.randn(9, 4, generator=generator), torch.arange(9) % 3)


def statistics_after_passes(start, network, *passes):
    """Return the running mean and variance after forward passes at fixed parameters, computed by PyTorch."""
    module = network._build()
    tensors = {name: torch.tensor(np.asarray(v)) for name, v in network.layout.views(start.numpy()).items()}
    module.load_state_dict(tensors, strict=False)
    module.train()
    for x in passes:
        module(x)
    return module[1].running_mean, module[1].running_var


@pytest.mark.parametrize(
    ("rule", "samples"),
    [
        (SharpnessAware(3.0), slice(None)),
        (MetaGradient(2.0), slice(0, None, 2)),
        (MetaGradient(2.0, 0.1), slice(0, None, 3)),
    ],
)
def test_running_statistics_follow_only_the_pass_at_the_parameters(rule, samples):
    network, start, batch = normalised_network()
    models = LoopedModels(network, Train(start, rule=rule))
    rule.gradients(models, batch)
    mean, variance = statistics_after_passes(start, network, batch.x[samples])
    tensors = network.layout.views(models.flat[0, 0])
    torch.testing.assert_close(tensors["1.running_mean"], mean)
    torch.testing.assert_close(tensors["1.running_var"], variance)


def test_fisher_trace_does_not_update_running_statistics():
    network, start, batch = normalised_network()
    models = LoopedModels(network, Train(start, rule=FisherTrace()))
    losses, _ = FisherTrace().gradients(models, batch)
    assert float(losses) > 0
    torch.testing.assert_close(models.flat[0, 0], start, rtol=0, atol=0)


def test_apfl_second_model_holds_the_mixture_statistics():
    network, start, batch = normalised_network()
    other = start + 0.3 * network.layout.trainable.put(
        torch.zeros_like(start), torch.ones(network.layout.trainable.size)
    )
    models = LoopedModels(network, Train(torch.stack([start, other])))
    Mixed(0.25).gradients(models, batch)
    for row, parameters in ((0, start), (1, 0.25 * other + 0.75 * start)):
        mean, variance = statistics_after_passes(parameters, network, batch.x)
        tensors = network.layout.views(models.flat[0, row])
        torch.testing.assert_close(tensors["1.running_mean"], mean)
        torch.testing.assert_close(tensors["1.running_var"], variance)


def test_apfl_alpha_ignores_running_statistics(make_client, normalised):
    """With equal parameters, the gradient of alpha is 0 even if the statistics differ."""
    client = make_client("apfl", **ONE_BATCH, model=normalised, apfl_alpha=0.25, apfl_adaptive=True)
    start = client.initial()
    statistics = client.layout.select(lambda entry: not entry.trainable)
    other = statistics.put(start.clone(), statistics.take(start) + 5.0)
    client.stored["own"] = other
    client.fit([start.numpy()], CONFIG)
    assert float(client.state["alpha"]) == 0.25


def test_apfl_mixture_has_its_own_running_statistics(make_client, normalised):
    client = make_client("apfl", **ONE_BATCH, model=normalised, apfl_alpha=0.25)
    start = client.initial()
    client.stored["own"] = client.layout.trainable.put(start.clone(), client.layout.trainable.take(start) + 0.5)
    (sent,), _, _ = client.fit([start.numpy()], CONFIG)
    statistics, parameters = client.layout.select(lambda entry: not entry.trainable), client.layout.trainable
    personal, mixture = client.state["own"], client.state["model"]
    np.testing.assert_array_equal(statistics.take(mixture), statistics.take(personal))
    assert np.abs(statistics.take(mixture) - statistics.take(sent)).max() > 1e-3
    mixed = 0.25 * parameters.take(personal) + 0.75 * parameters.take(sent)
    np.testing.assert_allclose(parameters.take(mixture), mixed, atol=1e-6)


# -- Per-FedAvg ----------------------------------------------------------------------------------------


def test_per_fedavg_applies_class_weights(make_client):
    """Batches of two samples, one for each part: the weight of a class scales the gradient of its sample."""
    x = np.random.default_rng(1).normal(size=(4, 5)).astype(np.float32)
    data = (x, np.array([0, 0, 0, 1]), [list(range(4))], [[]])
    settings = {"data": data, "model": "mlp", "batch_size": 2, "local_steps": 1, "class_weights": "balanced"}
    client = make_client("per-fedavg", **settings, per_fedavg_alpha=0.4)
    weight = torch.tensor([2 / 3, 2 / 3, 2 / 3, 2.0])
    torch.testing.assert_close(client.jobs.class_weight, weight)
    start = 0.2 * start_of(client)
    (sent,), _, _ = client.fit([start], CONFIG)
    matches = []
    for first in range(4):
        adapted = start - 0.4 * gradient(client, start, weight, [first])
        for second in {0, 1, 2, 3} - {first}:
            expected = start - LR * gradient(client, adapted, weight, [second])
            matches.append(np.allclose(sent, expected, rtol=0, atol=2e-6))
    assert sum(matches) == 1


def test_batch_parts_rescale_sample_weights():
    """Five places hold three samples, so the weights are 5/3 of the class weights. Parts have 3 and 2 places."""
    weight = torch.tensor([[2.0, 0.5, 1.0, 0.0, 0.0], [2.0, 0.0, 0.0, 0.0, 0.0]]) * torch.tensor([[5 / 3], [5.0]])
    batch = Batch(torch.arange(10.0).view(2, 5, 1), torch.zeros(2, 5, dtype=torch.int64), weight)
    first, second = divided(batch, 2)
    torch.testing.assert_close(first.weight, torch.tensor([[3.0, 1.5, 0.0], [6.0, 0.0, 0.0]]))
    torch.testing.assert_close(second.weight, torch.tensor([[1.0, 0.0], [4.0, 0.0]]))
    assert second.x[1, 0] == batch.x[1, 0]  # a client without a sample in a part repeats the first part


@pytest.mark.parametrize("hessian", ["fo", "hf"])
def test_weighted_meta_gradients_match_between_loop_and_vmap(make_config, federate, hessian):
    settings = {"model": "mlp", "class_weights": "balanced", "per_fedavg_hessian": hessian, "batch_size": 5}
    alone, stacked = (
        federate(make_config("per-fedavg", **settings, stack=stack)).strategy.model for stack in ("loop", "vmap")
    )
    np.testing.assert_allclose(alone, stacked, rtol=0, atol=2e-5)


# -- pFedMe --------------------------------------------------------------------------------------------

ENVELOPE = {"pfedme_strength": 3.0, "pfedme_steps": 2, "pfedme_personal_lr": 0.2}


@pytest.mark.parametrize(("decay", "clip"), [(0.3, 0.0), (0.0, 0.05), (0.3, 0.05)])
def test_pfedme_applies_decay_and_clipping_in_the_inner_steps(make_client, decay, clip):
    settings = {"weight_decay": decay, "max_grad_norm": clip, "momentum": 0.5, "local_epochs": 2}
    client = make_client("pfedme", **ONE_BATCH, model="mlp", **ENVELOPE, **settings)
    w = theta = start_of(client).astype(np.float64)
    velocity = 0.0
    (sent,), _, _ = client.fit([w.astype(np.float32)], CONFIG)
    for _ in range(2):
        for _ in range(2):
            slope = gradient(client, theta)
            slope = slope * min(1.0, clip / np.linalg.norm(slope)) if clip else slope
            theta = theta - 0.2 * (slope + decay * theta + 3.0 * (theta - w))
        velocity = 0.5 * velocity + 3.0 * (w - theta)
        w = w - LR * velocity
    np.testing.assert_allclose(sent, w, atol=2e-6)
    np.testing.assert_allclose(client.state["model"], theta, atol=2e-6)


def test_pfedme_trains_all_clients_and_averages_the_sample(make_config, federate):
    full = federate(make_config("pfedme", model="linear", fraction_train=0.5))
    cohort = federate(make_config("pfedme", model="linear", fraction_train=0.5, pfedme_clients="cohort"))
    np.testing.assert_array_equal(full.strategy.model, cohort.strategy.model)
    assert [record.cohort for record in full.records] == [(0, 1, 2, 3)] * 3
    assert [len(record.cohort) for record in cohort.records] == [2] * 3
    sampled = [record.cohort for record in cohort.records]
    size = 4 * full.strategy.size
    for record, clients in zip(full.records, sampled, strict=True):
        assert {c: row["bytes_up"] for c, row in record.clients.items()} == {c: size * (c in clients) for c in range(4)}
    assert all("model" in full.kept(client) for client in range(4))


def test_pfedme_requires_replies_from_the_sample(make_strategy, update):
    strategy = make_strategy("pfedme", model="linear", fraction_train=0.5, min_train_replies=2)
    before = strategy.model.copy()
    strategy.aggregate(1, [update(0, {"model": before + 1}), update(1, {}), update(2, {})])
    np.testing.assert_array_equal(strategy.model, before)
    strategy.aggregate(1, [update(0, {"model": before + 1}), update(1, {"model": before + 3}), update(2, {})])
    np.testing.assert_allclose(strategy.model, before + 2, atol=1e-6)


def test_pfedme_rejects_sampling_with_secure_aggregation(make_strategy):
    settings = {"model": "linear", "secure_aggregation": True}
    with pytest.raises(SettingsError, match="pfedme-clients = 'all'"):
        make_strategy("pfedme", **settings, fraction_train=0.5)
    make_strategy("pfedme", **settings, fraction_train=0.5, pfedme_clients="cohort")
    make_strategy("pfedme", **settings)


# -- Ditto ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("start", ["initial", "received"])
def test_ditto_start_sets_the_initial_personal_model(make_client, start):
    client = make_client("ditto", **ONE_BATCH, model="mlp", ditto_strength=0.7, ditto_start=start)
    received = start_of(client)
    client.fit([received], CONFIG)
    v = client.initial().numpy() if start == "initial" else received
    expected = v - LR * (gradient(client, v) + 0.7 * (v - received))
    np.testing.assert_allclose(client.state["model"], expected, atol=2e-6)


# -- shared settings -----------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw"])
def test_fedprox_adds_the_proximal_term_after_clipping(make_client, optimizer):
    """Decay and proximal term are added to the clipped gradient, and PyTorch's optimiser takes the sum."""
    settings = {"optimizer": optimizer, "momentum": 0.9 if optimizer == "sgd" else 0.0, "weight_decay": 0.2}
    client = make_client(
        "fedprox", **ONE_BATCH, **settings, model="mlp", local_epochs=3, max_grad_norm=0.05, fedprox_mu=2.0
    )
    start = start_of(client)
    (sent,), _, _ = client.fit([start], CONFIG)
    w = torch.tensor(start, dtype=torch.float64, requires_grad=True)
    shared = {"lr": LR, "weight_decay": 0.2}
    optimiser = {
        "sgd": lambda: torch.optim.SGD([w], momentum=0.9, **shared),
        "adam": lambda: torch.optim.Adam([w], **shared),
        "adamw": lambda: torch.optim.AdamW([w], **shared),
    }[optimizer]()
    for _ in range(3):
        slope = gradient(client, w.detach().numpy())
        slope = slope * min(1.0, 0.05 / np.linalg.norm(slope))
        w.grad = torch.from_numpy(slope + 2.0 * (w.detach().numpy() - start))
        optimiser.step()
    np.testing.assert_allclose(sent, w.detach().numpy(), atol=5e-5)


@pytest.mark.parametrize(
    ("method", "settings"), [("fedsam-ft", {"fedsam_ft_rho": 0.4}), ("per-fedavg", {"batch_size": 1})]
)
def test_clipping_decay_and_momentum_apply_to_the_gradient_of_a_rule(make_client, method, settings):
    """Clipping, decay and momentum act on the gradient of the rule, at the parameters."""
    x = np.random.default_rng(1).normal(size=(2, 5)).astype(np.float32)
    data = (x, np.array([1, 0]), [[0]], [[1]])
    shared = {"momentum": 0.9, "weight_decay": 0.2, "max_grad_norm": 0.3, "local_epochs": 2, "per_fedavg_alpha": 0.5}
    client = make_client(method, data=data, model="mlp", **{**ONE_BATCH, **shared, **settings})
    start = start_of(client)
    (sent,), _, _ = client.fit([start], CONFIG)
    w, velocity = start.astype(np.float64), 0.0
    for _ in range(2):
        slope = gradient(client, w)
        step = 0.4 * slope / np.linalg.norm(slope) if method == "fedsam-ft" else -0.5 * slope
        slope = gradient(client, w + step)
        velocity = 0.9 * velocity + slope * min(1.0, 0.3 / np.linalg.norm(slope)) + 0.2 * w
        w = w - LR * velocity
    np.testing.assert_allclose(sent, w, atol=5e-6)


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_restored_moments_do_not_change_masked_parameters(optimizer):
    network, start, batch = normalised_network()
    mask = torch.ones_like(start)
    mask[:7] = 0
    moments = Moments(3, torch.ones_like(start), torch.ones_like(start))
    job = Job(Train(start, mask=mask), Samples(batch.x, batch.y), torch.Generator(), LR, moments=moments)
    models = LoopedModels(network, job.work)
    settings = TrainSettings(optimizer=optimizer, momentum=0.9 if optimizer == "sgd" else 0.0, optimizer_state="kept")
    optimiser = Optimiser(settings, models, [job])
    optimiser.step([torch.zeros_like(parameter) for parameter in models.parameters])
    moved = (models.flat[0, 0] != start) & (mask == 1)
    torch.testing.assert_close(models.flat[0, 0][:7], start[:7], rtol=0, atol=0)
    assert int(moved.sum()) == network.layout.trainable.size - 7


@pytest.mark.parametrize(
    ("method", "settings", "words"),
    [
        ("apfl", {"apfl_alpha": 0.0}, "apfl-alpha = 0"),
        ("apfl", {"apfl_alpha": 1.0}, "local training"),
        ("per-fedavg", {"per_fedavg_alpha": 0.0}, "per-fedavg-alpha = 0"),
        ("per-fedavg", {"batch_size": 2, "per_fedavg_hessian": "hf"}, "batch-size = 2"),
        ("pfedme", {"pfedme_strength": 30.0, "pfedme_personal_lr": 0.1}, "diverge"),
        ("ditto", {"ditto_strength": 0.0}, "ditto-strength = 0"),
        ("fedprox", {"fedprox_mu": 0.0}, "FedAvg"),
        ("fedprox-ft", {"fedprox_ft_mu": 0.0}, "FedAvg"),
        ("fedsam-ft", {"fedsam_ft_rho": 0.0}, "fedavg-ft"),
    ],
)
def test_degenerate_settings_warn(make_strategy, method, settings, words):
    def notices(**changed):
        strategy = make_strategy(method, **changed)
        return strategy.method.notices(strategy.settings, strategy.architecture)

    assert words in " ".join(notices(**settings))
    assert notices() == ()


def test_newcomers_send_no_update(make_config, federate):
    sent: list[Update] = []

    def capture(strategy):
        aggregate = strategy.aggregate

        def capturing(server_round, updates):
            sent.extend(updates)
            return aggregate(server_round, updates)

        strategy.aggregate = capturing

    config = make_config("pfedme", model="linear", fraction_train=0.5, holdout_clients=0.25)
    finished = federate(config, prepare=capture)
    (newcomer,) = finished.strategy.newcomers
    assert {update.client for update in sent} == set(finished.strategy.members)
    assert "local_accuracy" in finished.strategy.newcomer_rows[newcomer]


def test_update_norm_excludes_running_statistics(make_config, federate, normalised):
    """A limit just above the largest norm of the parameter changes drops no reply, just below it one reply."""
    changes: list[float] = []

    def capture(strategy):
        aggregate, before = strategy.aggregate, strategy.model.copy()
        parameters = strategy.architecture.layout.trainable

        def capturing(server_round, updates):
            moved = [update.arrays["model"].astype(np.float64) - before for update in updates]
            changes.extend(float(np.linalg.norm(parameters.take(change))) for change in moved)
            assert all(np.linalg.norm(change) > 1.1 * np.linalg.norm(parameters.take(change)) for change in moved)
            return aggregate(server_round, updates)

        strategy.aggregate = capturing

    settings = {"model": normalised, "num_server_rounds": 1}
    federate(make_config("fedavg", **settings), prepare=capture)
    for factor, dropped in ((1.001, 0), (0.999, 1)):
        limited = federate(make_config("fedavg", **settings, max_update_norm=max(changes) * factor))
        assert sum("max-update-norm" in reason for _, reason in limited.records[0].dropped) == dropped
