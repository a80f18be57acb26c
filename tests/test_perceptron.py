"""Gradients of perceptrons in closed form, against numbers by hand and against autograd."""

import math
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

from posy.client_app.training.batches import Batch
from posy.client_app.training.networks import LoopedModels, Network, StackedModels
from posy.client_app.training.perceptron import gradients, linear_layers
from posy.client_app.training.work import Train, classification, cross_entropy
from posy.data.task import Task
from posy.models.architecture import Architecture
from posy.models.chain import with_cosine_head
from posy.models.conditional import Conditional
from posy.models.two_branch import TwoBranch

TASK = Task("features", (6,), ("a", "b", "c"))


def random_layers(models, sizes=(6, 5, 4, 3)):
    generator = torch.Generator().manual_seed(0)

    def values(*shape):
        return torch.randn(models, *shape, generator=generator, dtype=torch.float64)

    return [(values(out, into), values(out)) for into, out in pairwise(sizes)]


def by_autograd(layers, x, y, weight):
    leaves = [tensor.clone().requires_grad_() for layer in layers for tensor in layer]
    losses = []
    for model in range(len(y)):
        hidden = x[model].flatten(1)
        for number in range(0, len(leaves), 2):
            hidden = F.linear(hidden, leaves[number][model], leaves[number + 1][model])
            hidden = F.relu(hidden) if number + 2 < len(leaves) else hidden
        losses.append(cross_entropy(hidden, Batch(x[model], y[model], None if weight is None else weight[model])))
    return torch.stack(losses).detach(), torch.autograd.grad(sum(losses), leaves)


def test_one_layer_by_hand():
    # Two classes, logits 0 and ln 3: probabilities 1/4 and 3/4. The label is 0, so the slopes are -3/4 and 3/4.
    matrix, bias = torch.zeros(1, 2, 2), torch.tensor([[0.0, math.log(3)]])
    losses, slopes = gradients([(matrix, bias)], torch.tensor([[[2.0, -4.0]]]), torch.tensor([[0]]), None)
    assert losses.tolist() == pytest.approx([math.log(4)])
    assert slopes[0][0].tolist() == [pytest.approx([-1.5, 3.0]), pytest.approx([1.5, -3.0])]
    assert slopes[1][0].tolist() == pytest.approx([-0.75, 0.75])


def test_an_inactive_relu_passes_no_gradient():
    first = torch.tensor([[[1.0], [-1.0]]]), torch.zeros(1, 2)
    second = torch.tensor([[[1.0, 1.0], [0.0, 0.0]]]), torch.zeros(1, 2)
    _, slopes = gradients([first, second], torch.tensor([[[2.0]]]), torch.tensor([[1]]), None)
    probability = 1 / (1 + math.exp(-2))  # of class 0, whose logit is 2
    assert slopes[0][0].tolist() == [pytest.approx([2 * probability]), [0.0]]


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("models", [1, 4])
def test_gradients_match_autograd(models, weighted):
    layers, generator = random_layers(models), torch.Generator().manual_seed(1)
    x = torch.randn(models, 7, 2, 3, generator=generator, dtype=torch.float64)
    y = torch.randint(3, (models, 7), generator=generator)
    weight = torch.rand(models, 7, generator=generator, dtype=torch.float64) if weighted else None
    losses, computed = gradients(layers, x, y, weight)
    expected_losses, expected = by_autograd(layers, x, y, weight)
    torch.testing.assert_close(losses, expected_losses)
    for actual, reference in zip(computed, expected, strict=True):
        torch.testing.assert_close(actual, reference)
    _, last = gradients(layers, x, y, weight, first=2)
    assert all(torch.equal(actual, reference) for actual, reference in zip(last, computed[4:], strict=True))


def with_features(net, batch, context):
    """Compute the plain objective by another function, which has no closed form."""
    return net.loss(net.features(batch.x)[1], batch)


def extended(extend, **arguments):
    architecture = Architecture("mlp", TASK).extended(extend, **arguments)
    return Network(architecture.build, architecture.layout, torch.device("cpu"), None)


def network(model="mlp", criterion=None, **options):
    architecture = Architecture(model, TASK, **options)
    return Network(architecture.build, architecture.layout, torch.device("cpu"), criterion)


def test_only_perceptrons_with_cross_entropy_have_a_closed_form():
    names = ["blocks.fc1.linear", "blocks.fc2.linear", "head"]
    assert network().linear_layers == names
    assert network("linear").linear_layers == ["head"]
    for other in (
        network(ranks=(("fc1", 2),)), extended(with_cosine_head, classes=3, scale=30.0), network(frozen=("fc1",)),
        extended(TwoBranch, num_clients=2), extended(Conditional),
        network(criterion=lambda logits, y: F.cross_entropy(logits, y, reduction="none")),
    ):  # fmt: skip
        assert other.linear_layers == []
    image = Task("image", (3, 32, 32), ("a", "b"))
    for model in ("cnn", "lenet-gn"):
        assert linear_layers(Architecture(model, image).build()) == []
    start = torch.zeros(network().layout.size)
    assert network().closed_form(Train(start)) is not None
    assert network().closed_form(Train(start, with_features)) is None
    assert network().closed_form(Train(start, rates=dict.fromkeys(("fc1", "fc2", "head"), 0.0))) is None


@pytest.mark.parametrize("rates", [{}, {"fc1": 0.0}, {"fc2": 0.0}, {"head": 0.0}, {"fc1": 0.0, "fc2": 0.0}])
@pytest.mark.parametrize("models", [1, 3])
def test_closed_form_models_have_the_gradients_of_autograd(rates, models):
    perceptron = network()
    generator = torch.Generator().manual_seed(2)
    starts = 0.3 * torch.randn(2, models, perceptron.layout.size, generator=generator)
    x = torch.randn(2, 5, 6, generator=generator)
    batch = Batch(x, torch.randint(3, (2, 5), generator=generator), torch.rand(2, 5, generator=generator))

    def computed(objective):
        works = [Train(start if models > 1 else start[0], objective, rates=rates) for start in starts]
        stacked = StackedModels(perceptron, works).gradients(batch)
        alone = LoopedModels(perceptron, works[0]).gradients(Batch(*(t[0] for t in batch[:3])))
        return stacked, (alone[0], list(alone[1]))

    for (losses, actual_gradients), (expected_losses, expected) in zip(
        computed(classification), computed(with_features), strict=True
    ):
        torch.testing.assert_close(losses, expected_losses)
        assert [g.shape for g in actual_gradients] == [g.shape for g in expected]
        for actual, reference in zip(actual_gradients, expected, strict=True):
            torch.testing.assert_close(actual, reference, atol=1e-6, rtol=1e-5)


def test_autocast_uses_autograd():
    perceptron = network()
    models = LoopedModels(
        perceptron, Train(torch.randn(perceptron.layout.size, generator=torch.Generator().manual_seed(3)))
    )
    batch = Batch(torch.rand(4, 6), torch.tensor([0, 1, 2, 0]))
    exact = models.gradients(batch)[0]
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        rough = models.gradients(batch)[0]
    assert exact.item() != rough.item() and exact.item() == pytest.approx(rough.item(), rel=0.05)
