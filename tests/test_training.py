"""Local training: handwritten loops, stacked and single models, and degenerate cases."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from posy.client_app.cwfedavg import regularised
from posy.client_app.feddrm import class_and_client
from posy.client_app.prototypes import towards_prototypes
from posy.client_app.training.batches import Augment, Batch, DropoutNumbers, Samples, Share, plan_passes
from posy.client_app.training.networks import Network, trainable_names
from posy.client_app.training.rules import FisherTrace, MetaGradient, Mixed, MoreauEnvelope, SharpnessAware
from posy.client_app.training.trainer import Trainer
from posy.client_app.training.work import (
    Forward,
    Job,
    Net,
    Objective,
    Pull,
    Rule,
    Train,
    Trained,
    TrainingDivergedError,
    classification,
    cross_entropy,
)
from posy.data.task import Task
from posy.models.architecture import Architecture
from posy.models.catalogue import MODELS
from posy.models.parameters import Layout, layout_of
from posy.models.two_branch import TwoBranch
from posy.strategies.run_settings import TrainSettings

CPU = torch.device("cpu")
CLASSES = 3
N = 11  # not a multiple of the batch size: the last batch is smaller
LR = 0.1


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 5)
        self.head = nn.Linear(5, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(x)))


class TinyNorm(Tiny):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.norm(self.body(x))))


def layout(build: type[nn.Module] = Tiny) -> Layout:
    module = build()
    return layout_of(module, dict(module.named_children()))


def network(build: type[nn.Module] = Tiny) -> Network:
    return Network(build, layout(build), CPU)


def initial(seed: int = 0, build: type[nn.Module] = Tiny) -> Tensor:
    torch.manual_seed(seed)
    module = build()
    return torch.from_numpy(layout(build).flatten({k: v.detach().numpy() for k, v in module.state_dict().items()}))


def samples(n: int = N, seed: int = 5) -> Samples:
    generator = torch.Generator().manual_seed(seed)
    return Samples(torch.randn(n, 4, generator=generator), torch.randint(0, CLASSES, (n,), generator=generator))


def generator(seed: int = 9) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def train(
    work: Train, net: Network | None = None, data: Samples | None = None, lr: float = LR, **settings: Any
) -> Trained:
    train_settings, net = TrainSettings(**{"batch_size": 4, "local_epochs": 2, **settings}), net or network()
    dropout = DropoutNumbers(net.dropout_width, generator(3)) if net.dropout_width else None
    return Trainer(train_settings, CPU).train(Job(work, data or samples(), generator(), lr, dropout=dropout), net)


def change_gradient(
    parameter: nn.Parameter,
    anchor: Tensor | None,
    offset: Tensor | None,
    mask: Tensor | None,
    strength: float,
    decay: float,
) -> None:
    """Add the decay of masked training, the pull to an anchor and the offset to a gradient, and mask it."""
    assert parameter.grad is not None
    if mask is not None:  # masked parameters do not decay either
        parameter.grad += decay * parameter.detach()
    if anchor is not None:
        parameter.grad += strength * (parameter.detach() - anchor)
    if offset is not None:
        parameter.grad += offset
    if mask is not None:
        parameter.grad *= mask


def by_hand(
    start: Tensor,
    *,
    epochs: int = 2,
    steps: int | None = None,
    momentum: float = 0.0,
    decay: float = 0.0,
    pull: Pull | None = None,
    rates: dict[str, float] | None = None,
    mask: Tensor | None = None,
    weight: Tensor | None = None,
    data: Samples | None = None,
    size: int = 4,
    clip: float = math.inf,
    offset: Tensor | None = None,
    bounds: tuple[float, float] = (-math.inf, math.inf),
    optimizer: str = "sgd",
    criterion: Callable[[Tensor, Tensor], Tensor] | None = None,
    **adam: float,
) -> tuple[Tensor, float]:
    """Train with PyTorch's optimiser in double precision, in a plain loop over batches."""
    data, rng, rates = data or samples(), generator(), rates or {}
    module = Tiny().double()
    shape = layout()

    def split(flat: Tensor) -> dict[str, Tensor]:
        return {k: v.double() for k, v in shape.views(flat).items()}

    module.load_state_dict(split(start))
    anchor, masks, offsets = (None if t is None else split(t) for t in (pull.anchor if pull else None, mask, offset))
    strength = pull.strength if pull else 0.0
    groups = [{"params": list(m.parameters()), "lr": LR * rates.get(name, 1.0)} for name, m in module.named_children()]
    options: dict[str, Any] = {"lr": LR, "weight_decay": decay if mask is None else 0.0}
    if optimizer == "sgd":
        options["momentum"] = momentum
    elif adam:
        options |= {"betas": (adam["adam_beta1"], adam["adam_beta2"]), "eps": adam["adam_epsilon"]}
    kind = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[optimizer]
    optimiser = kind(groups, **options)  # type: ignore[arg-type]
    step_count, total, sample_count = 0, 0.0, 0
    for _ in range(10**6 if steps else epochs):
        total, sample_count = 0.0, 0
        order = torch.randperm(len(data.y), generator=rng)
        for begin in range(0, len(order), size):
            if steps is not None and step_count == steps:
                break
            rows = order[begin : begin + size]
            logits, labels = module(data.x[rows].double()), data.y[rows]
            losses = (criterion or partial(F.cross_entropy, reduction="none"))(logits, labels)
            loss = (losses * (1.0 if weight is None else weight[rows].double())).sum() / len(rows)
            optimiser.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_([p for n, p in module.named_parameters() if rates.get(n[:4], 1.0)], clip)
            for name, parameter in module.named_parameters():
                change_gradient(
                    parameter, *(values and values[name] for values in (anchor, offsets, masks)), strength, decay
                )
            optimiser.step()
            for parameter in module.parameters():
                parameter.data.clamp_(*bounds)
            step_count += 1
            total, sample_count = total + loss.item() * len(rows), sample_count + len(rows)
        if step_count == steps:
            break
    named = {k: v.detach().numpy() for k, v in module.state_dict().items()}
    return torch.from_numpy(shape.flatten(named)), total / sample_count


MASK = (torch.arange(layout().size) % 3 != 0).float()
WEIGHT = torch.linspace(0.1, 2.0, N)


PULL = Pull(initial(7), 0.7)
BY_HAND = {
    "weight_decay": "decay",
    "max_grad_norm": "clip",
    "sample_weight": "weight",
    "batch_size": "size",
    "local_steps": "steps",
}
TRAININGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "momentum": ({}, {"momentum": 0.9}),
    "weight decay": ({}, {"weight_decay": 0.3}),
    "momentum, decay": ({}, {"momentum": 0.8, "weight_decay": 0.3}),
    "pull": ({"pull": PULL}, {}),
    "pull, momentum": ({"pull": PULL}, {"momentum": 0.5}),
    "slow layer": ({"rates": {"body": 0.25}}, {"momentum": 0.5}),
    "frozen body": ({"rates": {"body": 0.0}}, {"weight_decay": 0.3}),
    "frozen head": ({"rates": {"head": 0.0}}, {"momentum": 0.9}),
    "frozen, pull, mask": ({"rates": {"head": 0.0}, "pull": PULL, "mask": MASK}, {}),
    "mask": ({"mask": MASK}, {"weight_decay": 0.3, "momentum": 0.9}),
    "clipped, frozen body, pull": (
        {"rates": {"body": 0.0}, "pull": PULL},
        {"max_grad_norm": 0.2, "weight_decay": 0.3, "momentum": 0.5},
    ),
    "clipped": ({}, {"max_grad_norm": 0.4}),
    "sample weights": ({"sample_weight": WEIGHT}, {}),
    "last batch of one": ({}, {"batch_size": 5}),
    "one batch": ({}, {"batch_size": 100}),
    "fewer steps than batches": ({}, {"local_steps": 2}),
    "steps beyond a pass": ({}, {"local_steps": 7}),
    "steps of two passes": ({}, {"local_steps": 6}),
    "epochs of the work": ({"epochs": 3}, {"local_steps": 2}),
    "steps of the work": ({"steps": 4}, {"local_steps": 2}),
    "offset": ({"offset": initial(4)}, {"momentum": 0.5, "max_grad_norm": 0.4}),
    "offset, mask": ({"offset": initial(4), "mask": MASK}, {}),
    "bounds": ({"bounds": (-0.2, 0.3)}, {}),
    "Adam": ({}, {"optimizer": "adam"}),
    "Adam, decay, other moments": (
        {"rates": {"body": 0.25}},
        {"optimizer": "adam", "weight_decay": 0.3, "adam_beta1": 0.5, "adam_beta2": 0.9, "adam_epsilon": 1e-3},
    ),
    "Adam, pull, clipped": ({"pull": PULL}, {"optimizer": "adam", "max_grad_norm": 0.4}),
    "AdamW": ({"rates": {"head": 0.0}}, {"optimizer": "adamw", "weight_decay": 0.3}),
}


@pytest.mark.parametrize("name", TRAININGS)
def test_training_matches_a_handwritten_loop(name: str) -> None:
    work, settings = TRAININGS[name]
    start = initial()
    hand = {BY_HAND.get(key, key): value for key, value in (settings | work).items()}
    if "epochs" in work:
        hand["steps"] = None
    expected, loss = by_hand(start, **hand)
    result = train(Train(start, **work), **settings)
    assert torch.allclose(result.parameters, expected, rtol=0, atol=1e-6)
    assert float(result.loss) == pytest.approx(loss, abs=1e-6)
    assert (result.parameters - start).abs().max() > 1e-3


def test_plain_training_ignores_momentum_decay_and_clipping() -> None:
    for settings in ({"momentum": 0.9}, {"optimizer": "adam"}, {"optimizer": "adamw"}):
        plain = train(Train(initial(), plain=True), weight_decay=0.3, max_grad_norm=0.1, **settings)
        assert torch.equal(plain.parameters, train(Train(initial())).parameters)


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw"])
def test_masked_parameters_neither_move_nor_decay(optimizer: str) -> None:
    start = initial()
    moved = train(Train(start, mask=MASK), optimizer=optimizer, weight_decay=0.3).parameters != start
    assert not moved[MASK == 0].any() and moved[MASK == 1].all()


def focal(logits: Tensor, labels: Tensor) -> Tensor:
    """Return (1 - p)^2 times the cross-entropy (Lin et al., 2017)."""
    loss = F.cross_entropy(logits, labels, reduction="none")
    return (1 - torch.exp(-loss)) ** 2 * loss


@pytest.mark.parametrize("weight", [None, WEIGHT], ids=["uniform", "weighted"])
def test_a_custom_loss_is_minimised(weight: Tensor | None) -> None:
    expected, loss = by_hand(initial(), weight=weight, criterion=focal)
    net = Network(Tiny, layout(), CPU, focal)
    result = train(Train(initial(), sample_weight=weight), net)
    assert torch.allclose(result.parameters, expected, rtol=0, atol=1e-6)
    assert float(result.loss) == pytest.approx(loss, abs=1e-6)
    several = Train(torch.stack([initial(), initial(1)]), sample_weight=weight)
    stacked, looped = (train(several, net, stack=stack) for stack in ("vmap", "loop"))
    assert torch.allclose(stacked.parameters, looped.parameters, rtol=0, atol=1e-6)
    assert torch.equal(looped.parameters[0], result.parameters)


def test_class_weights_multiply_sample_weights() -> None:
    """Two classes of 8 and 3 samples have equal weights, so a sample has weight 11/16 or 11/6."""
    labels = torch.tensor([0] * 8 + [2] * 3)
    data = Samples(samples().x, labels)
    weight = torch.where(labels == 0, 11 / 16, 11 / 6)
    job = Job(Train(initial()), data, generator(), LR, class_weight=weight)
    result = Trainer(TrainSettings(batch_size=4, local_epochs=2), CPU).train(job, network())
    expected, _ = by_hand(initial(), weight=weight, data=data)
    assert torch.allclose(result.parameters, expected, rtol=0, atol=1e-6)
    both = Job(Train(initial(), sample_weight=WEIGHT), data, generator(), LR, class_weight=weight)
    result = Trainer(TrainSettings(batch_size=4, local_epochs=2), CPU).train(both, network())
    expected, _ = by_hand(initial(), weight=weight * WEIGHT, data=data)
    assert torch.allclose(result.parameters, expected, rtol=0, atol=1e-6)


OBJECTIVE_TASK = Task("features", (4,), tuple("abc"))
PLAIN = Architecture("mlp", OBJECTIVE_TASK)

# -- rules --------------------------------------------------------------------------------------------------

RULES: dict[str, Rule] = {
    "SAM": SharpnessAware(0.3),
    "Per-FedAvg (FO)": MetaGradient(0.2),
    "Per-FedAvg (HF)": MetaGradient(0.2, hessian=0.05),
}
ENVELOPE = MoreauEnvelope(2.0, 3, 0.1)


def gradient(w: Tensor, data: Samples) -> tuple[Tensor, Tensor]:
    """Return loss and gradient of Tiny in double precision."""
    leaf = w.clone().requires_grad_()
    outputs = torch.func.functional_call(Tiny(), layout().views(leaf), (data.x.double(),))
    loss = F.cross_entropy(outputs, data.y)
    return loss.detach(), torch.autograd.grad(loss, leaf)[0]


def part_of(data: Samples, first: int, step: int) -> Samples:
    return Samples(data.x[first::step], data.y[first::step])


def one_step_by_hand(name: str, w: Tensor, batch: Samples) -> Tensor:
    """Return the direction of a step by the formulas of the papers."""
    _, g = gradient(w, batch)
    if name == "SAM":
        return gradient(w + 0.3 * g / g.norm(), batch)[1]
    parts = [part_of(batch, i, 3 if "HF" in name else 2) for i in range(3)]
    outer = gradient(w - 0.2 * gradient(w, parts[0])[1], parts[1])[1]
    if "FO" in name:
        return outer
    difference = gradient(w + 0.05 * outer, parts[2])[1] - gradient(w - 0.05 * outer, parts[2])[1]
    return outer - 0.2 * difference / (2 * 0.05)


@pytest.mark.parametrize("name", RULES)
def test_rules_follow_the_formulas_of_their_papers(name: str) -> None:
    w, data, rng = initial().double(), samples(), generator()
    order = torch.randperm(N, generator=rng)
    for begin in (0, 4, 8):
        rows = order[begin : begin + 4]
        w = w - LR * one_step_by_hand(name, w, Samples(data.x[rows], data.y[rows]))
    result = train(Train(initial(), rule=RULES[name], epochs=1))
    assert torch.allclose(result.parameters.double(), w, rtol=0, atol=1e-6)
    assert result.auxiliary is None


def test_pfedmes_personal_model_continues_across_batches() -> None:
    w, data, rng = initial().double(), samples(), generator()
    theta, order = w, torch.randperm(N, generator=rng)
    for begin in (0, 4, 8):
        rows = order[begin : begin + 4]
        batch = Samples(data.x[rows], data.y[rows])
        for _ in range(3):
            theta = theta - 0.1 * (gradient(theta, batch)[1] + 2.0 * (theta - w))
        w = w - LR * 2.0 * (w - theta)
    result = train(Train(initial(), rule=ENVELOPE, epochs=1))
    assert result.auxiliary is not None
    assert torch.allclose(result.parameters.double(), w, rtol=0, atol=1e-6)
    assert torch.allclose(result.auxiliary.double(), theta, rtol=0, atol=1e-6)


def test_a_mixture_is_trained_with_the_shared_model() -> None:
    w, v, data, rng = initial().double(), initial(1).double(), samples(), generator()
    order = torch.randperm(N, generator=rng)
    for begin in (0, 4, 8):
        batch = Samples(data.x[order[begin : begin + 4]], data.y[order[begin : begin + 4]])
        mixed = gradient(0.3 * v + 0.7 * w, batch)[1]
        w, v = w - LR * gradient(w, batch)[1], v - LR * 0.3 * mixed
    result = train(Train(torch.stack([initial(), initial(1)]), rule=Mixed(0.3), epochs=1))
    assert torch.allclose(result.parameters.double(), torch.stack([w, v]), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "rule",
    [
        SharpnessAware(0.0),
        MoreauEnvelope(1 / LR, 1, LR),
        MetaGradient(0.0),
        MetaGradient(0.0, hessian=0.1),
    ],
)
def test_rules_with_neutral_settings_equal_plain_training(rule: Rule) -> None:
    expected = train(Train(initial()), batch_size=1).parameters  # every part of a batch of one is the same sample
    assert torch.allclose(train(Train(initial(), rule=rule), batch_size=1).parameters, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("stack", ["loop", "vmap"])
def test_the_fisher_trace_is_measured_without_changing_parameters(stack: str) -> None:
    start, data, rng = torch.stack([initial(), initial(1)]), samples(), generator()
    order = torch.randperm(N, generator=rng)
    expected = torch.zeros(2, dtype=torch.float64)
    for begin in (0, 4, 8):
        rows = order[begin : begin + 4]
        batch = Samples(data.x[rows], data.y[rows])
        expected += torch.stack([gradient(w.double(), batch)[1].square().sum() for w in start]) * len(rows) / N
    work = Train(start, rule=FisherTrace(), plain=True, epochs=1)
    result = train(work, stack=stack, momentum=0.9, weight_decay=0.3, max_grad_norm=0.1)
    assert torch.allclose(result.loss.double(), expected, rtol=1e-5)
    assert torch.equal(result.parameters, start)


def with_notes(net: Net, batch: Batch, context: Any) -> Tensor:
    assert batch.notes is not None
    features, logits = net.features(batch.x)
    assert features.shape[1] == 64
    squares = (logits - batch.notes).square().mean(dim=1)
    return squares.mean() if batch.weight is None else (squares * batch.weight).mean()


def mixed_with(net: Net, batch: Batch, context: Any) -> Tensor:
    """Return the loss of the network whose tensors are averaged with the context's tensors."""
    names = [entry.name for entry in PLAIN.layout.entries]
    other = PLAIN.layout.views(context["other"])
    return cross_entropy(net.at({name: (net[name] + other[name]) / 2 for name in names})(batch.x), batch)


EXTRA: dict[str, dict[str, Any]] = {
    **{name: {"rule": rule} for name, rule in RULES.items()},
    "pFedMe": {"rule": ENVELOPE},
    "APFL": {"rule": Mixed(0.3)},
    "offset": {"offset": torch.linspace(-0.1, 0.1, PLAIN.layout.size)},
    "bounds": {"bounds": (-0.05, 0.05)},
    "notes": {"objective": with_notes},
    "other tensors": {"objective": mixed_with},
    "Adam": {},
    "AdamW": {},
}


@pytest.mark.parametrize("name", EXTRA)
def test_clients_trained_together_match_clients_trained_alone(name: str) -> None:
    counts, models = (11, 1, 6, 3), 2 if name == "APFL" else 1

    def job(client: int) -> Job:
        start = torch.stack([torch.from_numpy(PLAIN.initial(10 * client + k)) for k in range(models)])
        options = dict(EXTRA[name])
        if name == "notes":
            options["notes"] = torch.randn(counts[client], CLASSES, generator=generator(client))
        if name == "other tensors":
            options["context"] = {"other": torch.from_numpy(PLAIN.initial(99 + client))}
        work = Train(start if models > 1 else start[0], **options)
        return Job(work, samples(counts[client], client), generator(client), LR)

    steps: dict[str, Any] = {"optimizer": name.lower(), "weight_decay": 0.1} if "Adam" in name else {"momentum": 0.5}
    settings = TrainSettings(batch_size=4, local_epochs=2, **steps)
    network = Network(PLAIN.build, PLAIN.layout, CPU)
    together = Trainer(settings, CPU).train_together([job(client) for client in range(len(counts))], network)
    for client in range(len(counts)):
        alone = Trainer(settings, CPU).train(job(client), network)
        result = together[client]
        assert isinstance(result, Trained)
        # Adam divides gradients near zero by their magnitude, which amplifies rounding.
        assert torch.allclose(result.parameters, alone.parameters, rtol=0, atol=1e-4 if "Adam" in name else 1e-6)
        assert torch.allclose(result.loss, alone.loss, rtol=1e-5)
        assert (alone.parameters - job(client).work.start).abs().max() > 1e-3
        if name == "pFedMe":
            assert result.auxiliary is not None and alone.auxiliary is not None
            assert torch.allclose(result.auxiliary, alone.auxiliary, rtol=0, atol=1e-6)
            assert (result.auxiliary - result.parameters).abs().max() > 1e-3


def test_forward_returns_features_and_outputs() -> None:
    start, data = torch.from_numpy(PLAIN.initial(0)), samples()
    network = Network(PLAIN.build, PLAIN.layout, CPU)
    trainer = Trainer(TrainSettings(), CPU)
    features, logits = trainer.forward(Forward(start, features=True), network, data)
    assert torch.equal(logits, trainer.forward(Forward(start), network, data))
    head = PLAIN.layout.views(start)
    assert torch.allclose(features @ head["head.weight"].T + head["head.bias"], logits, atol=1e-6)
    forwards = [Forward(torch.from_numpy(PLAIN.initial(seed)), features=True) for seed in (1, 0)]
    stacked = trainer.forward_together(forwards, network, [samples(5), data])[1]
    assert torch.allclose(stacked[0], features, atol=1e-6) and torch.allclose(stacked[1], logits, atol=1e-6)


def test_frozen_and_masked_parameters_do_not_change() -> None:
    start, shape = initial(), layout()
    frozen = train(Train(start, rates={"body": 0.0}), weight_decay=0.5, momentum=0.9).parameters
    masked = train(Train(start, mask=MASK, pull=Pull(initial(3), 1.0)), weight_decay=0.5, momentum=0.9).parameters
    body, head = shape.part(["body"]), shape.part(["head"])
    assert torch.equal(body.take(frozen), body.take(start))
    assert not torch.equal(head.take(frozen), head.take(start))
    assert torch.equal(masked[MASK == 0], start[MASK == 0])
    assert (masked[MASK == 1] != start[MASK == 1]).all()


def test_sample_weights_of_one_and_zero() -> None:
    start = initial()
    plain = train(Train(start))
    assert torch.equal(train(Train(start, sample_weight=torch.ones(N))).parameters, plain.parameters)
    assert torch.equal(train(Train(start, sample_weight=torch.zeros(N))).parameters, start)


@pytest.mark.parametrize("stack", ["loop", "vmap"])
def test_resampling_draws_only_samples_with_weight(stack: str) -> None:
    start, weight, data = initial(), torch.zeros(N), samples()
    weight[7] = 5.0
    drawn = train(Train(start, sample_weight=weight, resample=True), stack=stack)
    copies = Samples(data.x[7].expand(N, -1), data.y[7].expand(N))
    expected = train(Train(start), data=copies, stack=stack)
    assert torch.allclose(drawn.parameters, expected.parameters, atol=1e-6)
    assert float(drawn.loss) == pytest.approx(float(expected.loss), rel=1e-5)


def test_resampling_draws_in_proportion_to_weights() -> None:
    weight, data, inputs = torch.zeros(N), samples(), []
    weight[4], weight[7], weight[9] = 2.0, 1.0, 1.0

    def record_batch(net: Any, batch: Batch, context: Any) -> Tensor:
        assert batch.weight is None
        inputs.append(batch.x[:, 0])
        return classification(net, batch, context)

    train(Train(initial(), record_batch, sample_weight=weight, resample=True), lr=1e-9, local_epochs=300)
    counts = (torch.cat(inputs)[:, None] == data.x[:, 0]).float().mean(0)
    assert torch.allclose(counts, weight / 4, atol=0.03)
    assert not counts[weight == 0].any()


def test_a_pull_of_strength_zero_has_no_effect() -> None:
    start = initial()
    assert torch.equal(train(Train(start, pull=Pull(initial(1), 0.0))).parameters, train(Train(start)).parameters)


def test_a_strong_pull_ends_at_the_anchor() -> None:
    anchor = initial(1)
    # With lr * strength = 1, every step ends at the anchor, apart from lr times the gradient.
    result = train(Train(initial(), pull=Pull(anchor, 1000.0)), lr=0.001).parameters
    assert torch.allclose(result, anchor, atol=0.005)


# -- K models at once -----------------------------------------------------------------------------------

TWO = Architecture("mlp", OBJECTIVE_TASK).extended(TwoBranch, num_clients=5)
PROTOTYPES = {
    "prototypes": torch.randn(CLASSES, 64, generator=torch.Generator().manual_seed(1)),
    "known": torch.tensor([1.0, 0.0, 1.0]),
}
CONTEXTS: dict[str, tuple[Architecture, Objective, dict[str, Tensor]]] = {
    "plain": (PLAIN, classification, {}),
    "WDR": (PLAIN, regularised, {"distribution": torch.tensor([0.7, 0.3, 0.0]), "lambda": torch.tensor(10.0)}),
    "two branches": (TWO, class_and_client, {"client": torch.tensor(3), "lambda": torch.tensor(0.8)}),
    "prototypes": (PLAIN, towards_prototypes, {**PROTOTYPES, "lambda": torch.tensor(2.0)}),
}


def close(a: Tensor, b: Tensor) -> bool:
    return bool((a - b).norm() <= 1e-5 * b.norm())


@pytest.mark.parametrize("name", CONTEXTS)
@pytest.mark.parametrize("extra", ["nothing", "one anchor", "K anchors", "rates", "mask", "weights", "clipped"])
def test_stacked_models_match_looped_and_single_models(name: str, extra: str) -> None:
    architecture, objective, context = CONTEXTS[name]
    starts = torch.stack([torch.from_numpy(architecture.initial(seed)) for seed in range(3)])
    anchors = starts.roll(1, dims=0)
    size = architecture.layout.size
    norm = 0.1 if extra == "clipped" else 0.0
    choices: dict[str, dict[str, Any]] = {
        "nothing": {},
        "clipped": {},
        "one anchor": {"pull": Pull(anchors[1], 0.5)},
        "K anchors": {"pull": Pull(anchors, 0.5)},
        "rates": {"rates": {"head": 0.2, architecture.layer_names[0]: 0.0}},
        "mask": {"mask": (torch.arange(size) % 2).float()},
        "weights": {"sample_weight": WEIGHT},
    }
    options = choices[extra]
    results = {}
    for stack in ("loop", "vmap"):
        net = Network(architecture.build, architecture.layout, CPU)
        work = Train(starts, objective, context, **options)
        results[stack] = train(work, net, stack=stack, momentum=0.9, weight_decay=0.01, max_grad_norm=norm)
    assert results["loop"].parameters.shape == starts.shape
    assert results["loop"].loss.shape == (3,)
    for k in range(3):
        single_options = {**options, "pull": Pull(anchors[k], 0.5)} if extra == "K anchors" else options
        net = Network(architecture.build, architecture.layout, CPU)
        single = train(
            Train(starts[k], objective, context, **single_options),
            net,
            momentum=0.9,
            weight_decay=0.01,
            max_grad_norm=norm,
        )
        assert single.loss.shape == ()
        moved = single.parameters - starts[k]
        assert moved.abs().max() > 1e-3
        for stacked in results.values():
            assert close(stacked.parameters[k] - starts[k], moved)
            assert float(stacked.loss[k]) == pytest.approx(float(single.loss), rel=1e-5)


SUITED = {
    "linear": OBJECTIVE_TASK,
    "logistic": Task("features", (5,), tuple("ab")),
    "mlp": OBJECTIVE_TASK,
    "cnn": Task("image", (1, 16, 16), tuple("abc")),
    "cnn-3fc": Task("image", (1, 16, 16), tuple("abc")),
    "cnn-3fc-wide": Task("image", (1, 16, 16), tuple("abc")),
    "lenet-gn": Task("image", (1, 16, 16), tuple("abc")),
    "resnet18-gn": Task("image", (1, 8, 8), tuple("abc")),
    "resnet18-bn": Task("image", (1, 8, 8), tuple("abc")),
    "fasttext": Task("text", (9,), tuple("abc"), 20),
    "textcnn": Task("text", (9,), tuple("abc"), 20),
    "lstm": Task("text", (9,), tuple("abc"), 20),
    "gru": Task("series", (9, 4), tuple("abc")),
    "cnn1d": Task("series", (9, 4), tuple("abc")),
}


def draw_samples(task: Task, n: int) -> Samples:
    rng = torch.Generator().manual_seed(1)
    if task.kind == "text":
        x = torch.randint(1, task.vocabulary, (n, *task.input_shape), generator=rng)
    else:
        x = torch.randn(n, *task.input_shape, generator=rng)
    return Samples(x, torch.randint(0, task.num_classes, (n,), generator=rng))


@pytest.mark.parametrize("model", MODELS)
def test_every_network_trains_the_same_when_stacked(model: str) -> None:
    architecture = Architecture(model, SUITED[model])
    starts = torch.stack([torch.from_numpy(architecture.initial(seed)) for seed in range(2)])
    loop, vmap = (
        train(
            Train(starts),
            Network(architecture.build, architecture.layout, CPU),
            draw_samples(SUITED[model], 6),
            stack=stack,
            batch_size=3,
            local_epochs=1,
            lr=0.01,
        )
        for stack in ("loop", "vmap")
    )
    assert close(vmap.parameters - starts, loop.parameters - starts)
    assert close(vmap.loss, loop.loss)


def test_stacked_training_updates_batchnorm_statistics() -> None:
    starts = torch.stack([initial(seed, TinyNorm).contiguous() for seed in range(2)])
    shape = layout(TinyNorm)
    result = train(Train(starts), network(TinyNorm), stack="vmap").parameters
    for k in range(2):
        single = train(Train(starts[k]), network(TinyNorm)).parameters
        assert close(result[k], single)
        mean = shape.views(single)["norm.running_mean"]
        assert (mean - shape.views(starts[k])["norm.running_mean"]).abs().max() > 0.01


# -- dropout ---------------------------------------------------------------------------------------------


WIDE = Architecture("cnn-3fc-wide", SUITED["cnn-3fc-wide"])


def dropping_job(client: int, count: int) -> Job:
    work = Train(torch.from_numpy(WIDE.initial(client)))
    return Job(
        work,
        draw_samples(WIDE.task, count),
        generator(client),
        0.01,
        dropout=DropoutNumbers(128, generator(50 + client)),
    )


def test_a_step_with_dropout_by_hand() -> None:
    """One batch of all samples: the stream's numbers select the features that are zero in the head's gradient."""
    job = dropping_job(1, 4)
    trainer = Trainer(TrainSettings(batch_size=4, local_epochs=1), CPU)
    network_ = Network(WIDE.build, WIDE.layout, CPU)
    trained = WIDE.layout.views(trainer.train(job, network_).parameters)
    model = WIDE.build()
    model.load_state_dict(WIDE.layout.views(job.work.start))
    model.eval()
    order = torch.randperm(4, generator=generator(1))
    mask = torch.rand(4, 128, generator=generator(51)) >= 0.6
    features = model.body(job.samples.x[order]) * mask / 0.4
    torch.nn.functional.cross_entropy(model.head(features), job.samples.y[order]).backward()
    for name, parameter in model.named_parameters():
        assert torch.allclose(trained[name], parameter - 0.01 * parameter.grad, atol=1e-6), name


def test_dropout_is_the_same_for_clients_trained_together() -> None:
    counts = (11, 1, 6, 3)
    trainer = Trainer(TrainSettings(batch_size=4, local_epochs=2, momentum=0.5), CPU)
    network_ = Network(WIDE.build, WIDE.layout, CPU)
    together = trainer.train_together([dropping_job(c, n) for c, n in enumerate(counts)], network_)
    for client, count in enumerate(counts):
        alone = trainer.train(dropping_job(client, count), network_)
        result = together[client]
        assert isinstance(result, Trained)
        start = dropping_job(client, count).work.start
        assert close(result.parameters - start, alone.parameters - start)
        assert torch.allclose(result.loss, alone.loss, rtol=1e-5)
        other = dropping_job(client, count)._replace(dropout=DropoutNumbers(128, generator(99)))
        assert not close(trainer.train(other, network_).parameters - start, alone.parameters - start)


@pytest.mark.parametrize("rule", [None, ENVELOPE, *RULES.values()])
def test_rules_work_with_dropout(rule: Any) -> None:
    def job(client: int) -> Job:
        plain = dropping_job(client, 6)
        return plain._replace(work=Train(plain.work.start, rule=rule))

    trainer = Trainer(TrainSettings(batch_size=3, local_epochs=1), CPU)
    network_ = Network(WIDE.build, WIDE.layout, CPU)
    for client, result in enumerate(trainer.train_together([job(0), job(1)], network_)):
        alone = trainer.train(job(client), network_)
        assert isinstance(result, Trained)
        assert torch.allclose(result.parameters, alone.parameters, rtol=0, atol=1e-5)


@pytest.mark.parametrize("stacked", [False, True])
def test_dropout_needs_random_numbers(stacked: bool) -> None:
    jobs = [dropping_job(client, 4)._replace(dropout=None) for client in range(2 if stacked else 1)]
    with pytest.raises(ValueError, match="no random numbers for it"):
        Trainer(TrainSettings(), CPU).train_together(jobs, Network(WIDE.build, WIDE.layout, CPU))


def test_evaluation_disables_dropout() -> None:
    """This holds right after a training, although the module still has its random numbers."""
    job = dropping_job(0, 5)
    trainer, network_ = Trainer(TrainSettings(batch_size=5), CPU), Network(WIDE.build, WIDE.layout, CPU)
    before = trainer.forward(Forward(job.work.start), network_, job.samples)
    trainer.train(job, network_)
    assert torch.equal(trainer.forward(Forward(job.work.start), network_, job.samples), before)


# -- errors and invariants of training --------------------------------------------------------------------


@pytest.mark.parametrize("lr", [1e3, 1e30])
@pytest.mark.parametrize("stack", ["loop", "vmap"])
def test_divergence_is_an_error(lr: float, stack: str) -> None:
    data = samples()
    far = Samples(data.x * 1e15, data.y)

    def squares(net: Any, batch: Batch, context: Any) -> Tensor:
        return (net(batch.x) ** 2).sum() * 1e10

    with pytest.raises(TrainingDivergedError, match="smaller lr than"):
        train(Train(torch.stack([initial(), initial(1)]), squares), data=far, lr=lr, stack=stack, local_epochs=5)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_non_finite_start_is_an_error(value: float) -> None:
    start = initial()
    start[0] = value
    with pytest.raises(TrainingDivergedError):
        train(Train(start))


def test_one_diverged_model_in_a_stack_is_an_error() -> None:
    starts = torch.stack([initial(), torch.full_like(initial(), torch.nan)])
    with pytest.raises(TrainingDivergedError):
        train(Train(starts))


def test_training_does_not_change_its_inputs() -> None:
    for start in (initial(), torch.stack([initial(), initial(1)])):
        inputs = [start, initial(2), WEIGHT.clone(), MASK.clone()]
        before = [tensor.clone() for tensor in inputs]
        train(Train(start, pull=Pull(inputs[1], 0.3), sample_weight=inputs[2], mask=inputs[3]), momentum=0.9)
        assert all(torch.equal(a, b) for a, b in zip(inputs, before, strict=True))


def test_results_are_not_views_of_the_network() -> None:
    net = network()
    first = train(Train(initial()), net).parameters
    copy = first.clone()
    train(Train(initial(4)), net)
    Trainer(TrainSettings(), CPU).forward(Forward(initial(6)), net, samples())
    assert torch.equal(first, copy)


@pytest.mark.parametrize("build", [Tiny, TinyNorm])
def test_results_do_not_depend_on_previous_training(build: type[nn.Module]) -> None:
    def start(seed: int) -> Tensor:
        return initial(seed, build)

    fresh = train(Train(start(0)), network(build), momentum=0.9)
    net = network(build)
    train(Train(torch.stack([start(k) for k in range(1, 4)]), rates={"body": 0.0}), net, momentum=0.5, stack="loop")
    train(Train(torch.stack([start(k) for k in range(1, 5)])), net, stack="vmap")
    Trainer(TrainSettings(), CPU).forward(Forward(start(8)), net, samples())
    used = train(Train(start(0)), net, momentum=0.9)
    assert torch.equal(used.parameters, fresh.parameters)
    assert torch.equal(used.loss, fresh.loss)


def test_an_error_does_not_affect_later_training() -> None:
    net = network()
    with pytest.raises(TrainingDivergedError):
        train(Train(torch.full_like(initial(), torch.inf)), net)
    assert torch.equal(train(Train(initial()), net).parameters, train(Train(initial())).parameters)


def test_unknown_layers_in_rates_are_an_error() -> None:
    with pytest.raises(KeyError, match="heads"):
        train(Train(initial(), rates={"heads": 0.0}))


# -- BatchNorm and batches -------------------------------------------------------------------------------


def test_batchnorm_skips_a_batch_of_one() -> None:
    """Eleven samples in batches of five: the eleventh is skipped."""
    start, rng = initial(0, TinyNorm), generator()
    result = train(Train(start), network(TinyNorm), batch_size=5, local_epochs=1)
    data = samples()
    order = torch.randperm(N, generator=rng)[:10]
    module, shape = TinyNorm(), layout(TinyNorm)
    module.load_state_dict(shape.views(start), strict=False)
    optimiser = torch.optim.SGD(module.parameters(), lr=LR)
    losses = []
    for rows in order.split(5):
        optimiser.zero_grad()
        loss = F.cross_entropy(module(data.x[rows]), data.y[rows])
        loss.backward()
        optimiser.step()
        losses.append(float(loss.detach()))
    named = {e.name: module.state_dict()[e.name].numpy() for e in shape.entries}
    assert np.allclose(result.parameters.numpy(), shape.flatten(named), atol=1e-6)
    assert float(result.loss) == pytest.approx(np.mean(losses), abs=1e-6)


def test_a_frozen_batchnorm_keeps_its_statistics() -> None:
    start, shape = initial(0, TinyNorm), layout(TinyNorm)
    result = train(Train(start, rates={"body": 0.0, "norm": 0.0}), network(TinyNorm))
    frozen = shape.part(["body", "norm"])
    assert torch.equal(frozen.take(result.parameters), frozen.take(start))
    assert not torch.equal(result.parameters, start)
    moving = next(entry for entry in shape.entries if entry.name == "norm.running_mean")
    unfrozen = train(Train(start), network(TinyNorm)).parameters
    assert not torch.equal(unfrozen[moving.start : moving.stop], start[moving.start : moving.stop])


def test_batchnorm_with_a_single_sample_is_an_error() -> None:
    with pytest.raises(ValueError, match="BatchNorm needs two"):
        train(Train(initial(0, TinyNorm)), network(TinyNorm), samples(1))
    assert torch.isfinite(train(Train(initial()), data=samples(1)).parameters).all()


@pytest.mark.parametrize("image", [False, True])
@pytest.mark.parametrize("size", [1, 4, 11, 50])
def test_the_batches_of_a_pass_are_a_permutation(size: int, image: bool) -> None:
    x = torch.arange(N).float().view(N, 1, 1, 1).expand(N, 3, 2, 2) if image else torch.arange(N).float().view(N, 1)
    y, weight = torch.arange(N), torch.arange(N).float() + 0.5
    drawn_once = list(Share(Samples(x, y), [None], generator(), size, weight=weight).batches(None))
    labels = torch.cat([b.y for b in drawn_once])
    assert sorted(labels.tolist()) == list(range(N))
    assert [len(b.y) for b in drawn_once] == [size] * (N // size) + ([N % size] if N % size else [])
    for batch in drawn_once:
        assert batch.weight is not None
        assert torch.equal(batch.x.flatten(1)[:, 0], batch.y.float())
        assert batch.x.shape[1:] == x.shape[1:]
        assert torch.equal(batch.weight, batch.y + 0.5)
    again, other = (
        torch.cat([b.y for b in Share(Samples(x, y), [None], generator(seed), size).batches(None)]) for seed in (9, 1)
    )
    assert torch.equal(again, labels)
    assert not torch.equal(other, labels)


def test_passes_have_different_orders() -> None:
    share = Share(Samples(torch.zeros(N, 1), torch.arange(N)), [None, None], generator(), 4)
    first, second = torch.cat([batch.y for batch, _ in share]).split(N)
    assert not torch.equal(first, second)
    assert sorted(second.tolist()) == list(range(N))
    assert [counted for _, counted in share] == [None] * 3 + [4, 4, 3]  # only the last pass counts for the loss


def test_a_partial_pass_takes_its_first_batches() -> None:
    def labels(steps: int | None) -> list[list[int]]:
        share = Share(Samples(torch.zeros(N, 1), torch.arange(N)), [steps], generator(), 4)
        return [batch.y.tolist() for batch, _ in share]

    batches = labels(None)
    assert [labels(k) for k in (1, 2, 3)] == [batches[:1], batches[:2], batches]


@pytest.mark.parametrize(
    ("work", "settings", "expected"),
    [
        ({}, {"local_epochs": 3}, [None] * 3),
        ({}, {"local_epochs": 3, "local_steps": 1}, [1]),
        ({}, {"local_steps": 3}, [None]),  # eleven samples in batches of four are three steps
        ({}, {"local_steps": 8}, [None, None, 2]),
        ({"epochs": 2}, {"local_steps": 8}, [None, None]),
        ({"steps": 4}, {"local_epochs": 9, "local_steps": 8}, [None, 1]),
        ({"steps": 0}, {"local_epochs": 2, "local_steps": 8}, [None, None]),
    ],
)
def test_epochs_and_steps_determine_the_passes(
    work: dict[str, Any], settings: dict[str, Any], expected: list[int | None]
) -> None:
    trainer = Trainer(TrainSettings(batch_size=4, **settings), CPU)
    assert trainer.share(Job(Train(initial(), **work), samples(), generator(), LR)).passes == expected


def test_the_loss_is_the_mean_over_the_last_pass() -> None:
    """At a tiny learning rate the loss is the mean over all samples, although the batches are unequal."""
    start, data = initial(), samples()
    result = train(Train(start), lr=1e-12)
    module = Tiny()
    module.load_state_dict(layout().views(start))
    assert float(result.loss) == pytest.approx(float(F.cross_entropy(module(data.x), data.y)), abs=1e-6)


def test_trainable_names_exclude_buffers_and_frozen_layers() -> None:
    shape = layout(TinyNorm)
    assert set(trainable_names(shape, {})) == {
        f"{layer}.{kind}" for layer in ("body", "norm", "head") for kind in ("weight", "bias")
    }
    assert trainable_names(shape, {"norm": 0.0, "body": 0.0}) == ["head.weight", "head.bias"]


# -- inference -------------------------------------------------------------------------------------------


def test_forward_of_one_and_several_models() -> None:
    net, data = network(), samples(1100)  # more than one evaluation batch
    trainer = Trainer(TrainSettings(), CPU)
    models = torch.stack([initial(k) for k in range(3)])
    several = trainer.forward(Forward(models), net, data)
    assert several.shape == (3, 1100, CLASSES)
    for k in range(3):
        module = Tiny()
        module.load_state_dict(layout().views(models[k]))
        assert torch.allclose(several[k], module(data.x), atol=1e-6)
        assert torch.equal(trainer.forward(Forward(models[k]), net, data), several[k])


def test_forward_uses_running_statistics_without_updating_them() -> None:
    net, data = network(TinyNorm), samples()
    flat = initial(0, TinyNorm)
    train(Train(flat), net)  # training mode
    trainer = Trainer(TrainSettings(), CPU)
    outputs = trainer.forward(Forward(flat), net, data)
    module = TinyNorm().eval()
    module.load_state_dict(layout(TinyNorm).views(flat), strict=False)
    assert torch.allclose(outputs, module(data.x), atol=1e-6)
    pairs = zip(data.x.split(1), data.y.split(1), strict=True)
    one_by_one = torch.cat([trainer.forward(Forward(flat), net, Samples(x, y)) for x, y in pairs])
    assert torch.allclose(one_by_one, outputs, atol=1e-6)


def test_forward_of_a_network_with_two_outputs() -> None:
    net = Network(TWO.build, TWO.layout, CPU)
    models = torch.stack([torch.from_numpy(TWO.initial(k)) for k in range(2)])
    classes, clients = Trainer(TrainSettings(), CPU).forward(Forward(models), net, samples())
    assert classes.shape == (2, N, 3)
    assert clients.shape == (2, N, 5)


def test_forward_of_no_samples() -> None:
    empty = Samples(torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64))
    assert Trainer(TrainSettings(), CPU).forward(Forward(initial()), network(), empty).shape == (0, CLASSES)


@pytest.mark.parametrize(
    ("steps", "count", "size", "smallest", "plan"),
    [
        (6, 9, 4, 1, [None, None]),  # batches of 4, 4, 1
        (6, 9, 4, 2, [None, None, None]),  # a batch of one is skipped: batches of 4, 4
        (5, 9, 4, 2, [None, None, 1]),
        (2, 1, 4, 1, [None, None]),
        (3, 8, 4, 2, [None, 1]),
        (0, 9, 4, 2, [None] * 7),
    ],
)
def test_plan_passes_gives_the_requested_steps(
    steps: int, count: int, size: int, smallest: int, plan: list[int | None]
) -> None:
    assert plan_passes(7, steps, count, size, smallest) == plan
    rows = Samples(torch.zeros(count, 2), torch.zeros(count, dtype=torch.int64))
    share = Share(rows, plan, generator(), size, smallest)
    assert len(list(share)) == share.steps == (steps or 7 * (count // size + (count % size >= smallest)))


def test_augmentation_sees_every_batch_and_uses_its_generator() -> None:
    calls: list[tuple[int, float]] = []

    def draw(count: int, rng: torch.Generator) -> Tensor:
        return torch.rand(1, generator=rng).expand(count, 1)

    def shift(x: Tensor, numbers: Tensor) -> Tensor:
        calls.append((len(x), float(numbers[0])))
        assert torch.equal(numbers, numbers[:1].expand(len(x), 1))  # one number for the batch
        return x + numbers

    trainer = Trainer(TrainSettings(batch_size=4, local_epochs=2), CPU)
    first, second = (
        trainer.train(Job(Train(initial()), samples(), generator(), LR, Augment(draw, shift, generator(2))), network())
        for _ in range(2)
    )
    assert [n for n, _ in calls] == [4, 4, 3] * 4
    rng = generator(2)
    assert [number for _, number in calls[:6]] == [float(torch.rand(1, generator=rng)) for _ in range(6)]
    assert calls[:6] == calls[6:]
    assert torch.equal(first.parameters, second.parameters)
    assert not torch.equal(first.parameters, train(Train(initial()), local_epochs=2).parameters)


@pytest.mark.parametrize("stack", ["loop", "vmap"])
def test_bfloat16_rounds_only_products(stack: str) -> None:
    start = torch.stack([initial(0), initial(1)])
    exact = train(Train(start), stack=stack)
    rounded = train(Train(start), stack=stack, precision="bfloat16")
    assert rounded.parameters.dtype == rounded.loss.dtype == torch.float32
    assert not torch.equal(rounded.parameters, exact.parameters)
    moved = exact.parameters - start
    assert float((rounded.parameters - exact.parameters).norm() / moved.norm()) < 0.05
    outputs = Trainer(TrainSettings(precision="bfloat16"), CPU).forward(Forward(start), network(), samples())
    expected = Trainer(TrainSettings(), CPU).forward(Forward(start), network(), samples())
    assert outputs.dtype == torch.float32
    assert 0 < float((outputs - expected).abs().max()) < 0.1


def test_bfloat16_ignores_a_stale_autocast_cache() -> None:
    """A Ctrl-C inside autocast's own entry or exit leaves its cache of casted weights open for the whole process."""
    expected = train(Train(initial()), stack="loop", precision="bfloat16")
    torch.autocast_increment_nesting()
    try:
        result = train(Train(initial()), stack="loop", precision="bfloat16")
    finally:
        torch.autocast_decrement_nesting()
        torch.clear_autocast_cache()
    assert torch.equal(result.parameters, expected.parameters)
