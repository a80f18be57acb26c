"""FedPAC, FedProto, FedNH, FedUV, MOON and FedAS: details of the papers and programs, and limits on updates."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from posy.client_app.fedas import FISHER, alignment
from posy.client_app.training.batches import Batch
from posy.client_app.training.work import Train
from posy.randomness import torch_generator
from posy.strategies.methods import settings_class

LR = 0.1
CONFIG = {"server-round": 1, "lr": LR}


def network_with_dropout(task):
    """Return a perceptron with dropout."""
    return nn.Sequential(nn.Linear(task.input_shape[0], 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, task.num_classes))


def module_of(client, flat):
    """Return the client's network as a module in double precision."""
    model = client.architecture.build().double()
    model.load_state_dict({name: t.double() for name, t in client.layout.views(torch.as_tensor(flat)).items()})
    return model


def flat_of(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()]).numpy()


def descend(loss, parameters, lr=LR):
    gradients = torch.autograd.grad(loss, parameters)
    with torch.no_grad():
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.sub_(lr * gradient)


# -- FedPAC ------------------------------------------------------------------------------------------------


def test_fedpac_update_norm_covers_only_body_and_head(make_config, federate):
    """Class means and 21 samples have norms of about 12, while body and head move by less than 1."""
    finished = federate(make_config("fedpac", max_update_norm=1.0))
    assert not any(record.dropped for record in finished.records)
    strict = federate(make_config("fedpac", max_update_norm=1e-3, num_server_rounds=1))
    assert [client for client, _ in strict.records[0].dropped] == [0, 1, 2, 3]


@pytest.mark.parametrize(("head_lr", "rate"), [(0.3, 0.3), (0.0, LR)])
def test_fedpac_trains_the_head_with_fedpac_head_lr(head_lr, rate, make_client):
    client = make_client("fedpac", batch_size=100, fedpac_head_lr=head_lr, fedpac_strength=0.0)
    x, y = client.data.x_train.double(), client.data.y_train
    start = client.initial()
    body, head = client.layout.without(["head"]), client.layout.part(["head"])
    received = [body.take(start).numpy(), head.take(start).numpy(), np.zeros((3, 64), np.float32), np.zeros(3)]
    sent, _, _ = client.fit(received, CONFIG)
    model = module_of(client, start)
    descend(torch.nn.functional.cross_entropy(model(x), y), list(model.head.parameters()), rate)
    descend(torch.nn.functional.cross_entropy(model(x), y), list(model.blocks.parameters()))
    np.testing.assert_allclose(sent[0], body.take(flat_of(model)), atol=1e-5)
    np.testing.assert_allclose(sent[1], head.take(flat_of(model)), atol=1e-5)


def test_fedpac_warns_if_one_client_trains_per_round(make_config, federate, warnings):
    for settings in ({}, {"holdout_clients": 0.25}, {"holdout_clients": 0.1}):
        federate(make_config("fedpac", fraction_train=0.25, num_server_rounds=1, **settings))
        assert "fedpac: only one client trains in each round" in warnings.text
        warnings.clear()
    for settings in ({"fraction_train": 0.3}, {"fraction_train": 0.5, "holdout_clients": 0.25}):
        done = federate(make_config("fedpac", num_server_rounds=1, **settings))
        assert len(done.records[0].cohort) == 2 and "only one client" not in warnings.text
    federate(make_config("fedpac", fraction_train=0.25, full_last_round=True, num_server_rounds=2))
    assert "only one client" not in warnings.text
    warnings.clear()
    federate(make_config("fedpac", num_server_rounds=1))
    assert "no heads are combined" not in warnings.text


# -- FedProto ----------------------------------------------------------------------------------------------


def test_fedproto_scores_the_served_model():
    assert settings_class("fedproto").point == "served"


@pytest.mark.parametrize(
    ("settings", "notice"),
    [({"fedproto_strength": 0.0}, "clients train alone"), ({"model": "linear"}, "no layer below the head")],
)
def test_fedproto_warns_without_a_prototype_term(settings, notice, make_config, federate, warnings):
    federate(make_config("fedproto", num_server_rounds=1, **settings))
    assert notice in warnings.text


def test_fedproto_applies_class_weights_to_both_loss_terms(make_client):
    """With 18 samples of class 0 and 3 of class 1, balanced weights are 21/36 and 21/6, in both terms of the loss."""
    client = make_client("fedproto", client=0, class_weights="balanced", batch_size=100)
    client.data = replace(client.data, y_train=torch.tensor([0] * 18 + [1] * 3))
    x, y = client.data.x_train.double(), client.data.y_train
    prototypes = np.random.default_rng(0).normal(size=(3, 64)).astype(np.float32)
    client.fit([prototypes, np.ones(3, np.float32)], CONFIG)
    weight = torch.where(y == 0, 21 / 36, 21 / 6).double()
    model, target = module_of(client, client.initial()), torch.from_numpy(prototypes).double()
    losses = torch.nn.functional.cross_entropy(model(x), y, reduction="none")
    losses = losses + (model.body(x) - target[y]).square().mean(dim=1)
    descend((weight * losses).mean(), list(model.parameters()))
    np.testing.assert_allclose(client.state["model"], flat_of(model), atol=1e-5)


# -- FedNH -------------------------------------------------------------------------------------------------


def test_fednh_update_norm_covers_only_the_body(make_config, federate):
    """The mean directions are about 1.5 from the prototypes, and the bodies move by less than 1."""
    finished = federate(make_config("fednh", max_update_norm=1.0, lr=0.001))
    assert not any(record.dropped for record in finished.records)
    strict = federate(make_config("fednh", max_update_norm=1e-4, lr=0.001, num_server_rounds=1))
    assert [client for client, _ in strict.records[0].dropped] == [0, 1, 2, 3]


def test_fednh_measures_mean_directions_from_zero(make_client):
    """Directions have norms of at most 1, and differences to the prototypes may be longer."""
    client = make_client("fednh", model="mlp")
    start = client.initial().numpy().copy()
    (model, directions), _, _ = client.fit([start], CONFIG)
    reply = {"model": model, "directions": directions}
    base = client.method.reference(client.architecture, {"model": start}, reply)
    assert not base["directions"].any() and np.linalg.norm(directions) <= 1
    np.testing.assert_array_equal(base["model"], start)


def test_fednh_warns_if_rho_is_one(make_config, federate, warnings):
    federate(make_config("fednh", fednh_rho=1.0, num_server_rounds=1))
    assert "fednh-rho = 1: " in warnings.text


# -- FedUV and MOON ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("feduv", {"feduv_variance": 0.0, "feduv_uniformity": 0.0}),
        ("feduv", {"feduv_variance": 0.0, "model": "linear"}),
        ("moon", {"moon_mu": 0.0}),
        ("moon", {"model": "linear"}),
    ],
)
def test_feduv_and_moon_without_their_term_warn_and_equal_fedavg(method, settings, make_config, federate, warnings):
    model = {"model": settings.get("model", "mlp")}
    plain = federate(make_config("fedavg", **model)).strategy.model
    warnings.clear()
    finished = federate(make_config(method, **{**model, **settings}))
    assert "the run is equivalent to FedAvg" in warnings.text
    np.testing.assert_allclose(finished.strategy.model, plain, atol=1e-6)


@pytest.mark.parametrize("method", ["feduv", "moon"])
def test_feduv_and_moon_with_their_term_do_not_warn(method, make_config, federate, warnings):
    federate(make_config(method, num_server_rounds=1))
    assert "equivalent to FedAvg" not in warnings.text


# -- FedAS -------------------------------------------------------------------------------------------------


def test_fedas_fisher_trace_ignores_dropout_and_class_weights(make_client):
    """The trace uses the unweighted loss without dropout, over batches of 4. It adds no samples."""
    settings = {
        "model": f"{__file__}:network_with_dropout",
        "class_weights": "balanced",
        "batch_size": 4,
        "local_epochs": 3,
    }
    client = make_client("fedas", client=0, **settings)
    (body, trace), _, metrics = client.fit([client.shared.take(client.initial()).numpy()], CONFIG)
    assert metrics["samples"] == 21 * (1 + 3)
    model = torch.empty(client.layout.size)
    client.personal.put(client.shared.put(model, torch.from_numpy(body)), torch.from_numpy(client.state["personal"]))
    module = module_of(client, model).eval()
    order = torch.randperm(21, generator=torch_generator(client.settings.run.seed, "batches", 1, 0, FISHER))
    squares = 0.0
    for batch in order.split(4):
        x, y = client.data.x_train[batch].double(), client.data.y_train[batch]
        loss = torch.nn.functional.cross_entropy(module(x), y)
        gradients = torch.autograd.grad(loss, list(module.parameters()))
        squares += len(batch) / 21 * sum(float(gradient.square().sum()) for gradient in gradients)
    assert float(trace) == pytest.approx(squares, rel=1e-4)


def test_fedas_stacked_training_equals_looped_training(make_config, federate):
    """Neither dropout nor class weights affect the Fisher information of stacked models."""
    settings = {
        "model": f"{__file__}:network_with_dropout",
        "class_weights": "balanced",
        "batch_size": 4,
        "num_server_rounds": 2,
    }
    alone, together = (federate(make_config("fedas", stack=stack, **settings)) for stack in ("loop", "vmap"))
    np.testing.assert_allclose(together.strategy.model, alone.strategy.model, atol=1e-5)


def test_fedas_alignment_gives_classes_equal_weight(make_client):
    """The loss of a padded batch with two classes is the sum of the means of both classes."""
    client = make_client("fedas")
    net = client.jobs.network(Train(client.initial()))
    net.stack(1)[0].copy_(client.initial())
    x, y = client.data.x_train[:5], torch.tensor([0, 0, 0, 2, 2])
    prototypes = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    features = net.nets[0].features(x)[0]
    squares = (features - prototypes[y]).square().mean(dim=1)
    expected = squares[:3].mean() + squares[3]
    weight = torch.tensor([0.3, 0.3, 0.3, 2.0, 0.0])  # the last sample is padding
    loss = alignment(net.nets[0], Batch(x, y, weight), {"prototypes": prototypes})
    torch.testing.assert_close(loss, expected)
