"""Plain PyTorch programs of published methods, for :mod:`benchmarks.curves`.

They know nothing of Posy or Flower. Each is written from its paper's pseudocode, on flat vectors of parameters; where
the paper leaves something open, a comment says whose reading it follows, as a rule that of PFLlib, the library of
published programs whose splits they train on. As there, all means over clients weigh them by their samples.

A program is a generator of what is scored after each round: the models that the clients are served next, or those that
they have trained. Local variables hold what server and clients keep.
"""

import random
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.utils.data import DataLoader, TensorDataset

EPOCHS, BATCH, LR = 1, 10, 0.005
WDR_LAMBDA = 10.0
MODELS, MU = 3, 0.01
PROX_MU = 1.0  # the largest of the paper's: with 0.001 it is FedAvg to the digits shown
DITTO_LAMBDA = 1.0
APFL_ALPHA, APFL_ADAPTIVE = 0.5, True
# FedAMP: squared distances of models are 0.1 to 0.4 after a round, and a client should not be all others' mean.
AMP_ALPHA, AMP_LAMBDA, AMP_SIGMA = 0.02, 0.1, 0.3
# pFedMe: PFLlib's rate of the personal steps; with the paper's 0.09 this network diverges in the second round.
PFEDME_LAMBDA, PFEDME_STEPS, PFEDME_LR, PFEDME_BETA = 15.0, 5, 0.01, 1.0
PER_ALPHA = 0.01
FOMO_MODELS, FOMO_EPSILON, FOMO_DECAY = 4, 0.3, 0.05
ALA_ETA, ALA_SAMPLE = 1.0, 0.8
SCAFFOLD_LR = 1.0
PROTO_LAMBDA = 1.0


class Client(NamedTuple):
    """One client's tensors, and whether it leaves out an incomplete last batch."""

    x_train: Tensor
    y_train: Tensor
    x_test: Tensor
    y_test: Tensor
    drop_last: bool = True


class Nearest(NamedTuple):
    """A model that answers with the class of the nearest prototype."""

    parameters: Tensor
    prototypes: Tensor
    """Those of the classes ``(C, D)``; infinite where there is none."""


Scored = Tensor | Nearest
Program = Callable[[nn.Sequential, list[Tensor], list[Client], Tensor], Iterator[list[Scored]]]
"""From a network, initial parameters, clients and their shares n_i / N to what is scored, a list a round."""
Penalty = Callable[[nn.Sequential, Tensor, Tensor], Tensor]
"""What is added to the loss of a model on a batch."""


# -- what they share -------------------------------------------------------------------------------------


def network(example: Tensor, classes: int) -> nn.Sequential:
    """Return the 4-layer CNN of FedAvg, cwFedAvg and FedFew."""
    features = nn.Sequential(
        nn.Conv2d(example.shape[0], 32, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
    )  # fmt: skip
    width = features(example[None]).shape[1]
    return nn.Sequential(*features, nn.Linear(width, 512), nn.ReLU(), nn.Linear(512, classes))


def head_size(model: nn.Sequential) -> int:
    """Return how many of the parameters, the last ones, are the output layer's."""
    return sum(p.numel() for p in model[-1].parameters())


def shares_of(clients: list[Client]) -> Tensor:
    """Return n_i / N ``(M,)``."""
    sizes = torch.tensor([float(len(client.y_train)) for client in clients])
    return sizes / sizes.sum()


def batches(client: Client, size: int | None = None) -> list[list[Tensor]]:
    """Return the shuffled mini-batches of a round."""
    size = size or BATCH
    whole = client.drop_last and len(client.y_train) >= size
    loader = DataLoader(TensorDataset(client.x_train, client.y_train), size, shuffle=True, drop_last=whole)
    return [batch for _ in range(EPOCHS) for batch in loader]


def train(
    model: nn.Sequential,
    start: Tensor,
    client: Client,
    penalty: Penalty | None = None,
    layers: nn.Module | None = None,
) -> tuple[Tensor, float]:
    """Train all or some layers for a round; return the new parameters, and the mean loss of the last epoch."""
    vector_to_parameters(start.clone(), model.parameters())  # the parameters are views of it, changed in place
    optimiser = torch.optim.SGD((layers or model).parameters(), lr=LR)
    losses = []
    for x, y in batches(client):
        loss = F.cross_entropy(model(x), y)
        losses.append((loss.item() * len(y), len(y)))
        if penalty is not None:
            loss = loss + penalty(model, x, y)
        optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
    total, seen = np.sum(losses[-len(losses) // EPOCHS :], axis=0)
    return parameters_to_vector(model.parameters()).detach().clone(), total / seen


def pull(strength: float, centre: Tensor) -> Penalty:
    """Return strength / 2 times the squared distance to a model."""
    return lambda model, *_: strength / 2 * (parameters_to_vector(model.parameters()) - centre).square().sum()


def gradient(model: nn.Sequential, parameters: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Return the gradient of the cross-entropy at some parameters."""
    vector_to_parameters(parameters, model.parameters())
    loss = F.cross_entropy(model(x), y)
    return parameters_to_vector(torch.autograd.grad(loss, list(model.parameters())))


@torch.no_grad()
def outputs(model: nn.Sequential, scored: Scored, x: Tensor) -> Tensor:
    """Return the logits of a model, or how near the prototypes are."""
    if isinstance(scored, Nearest):
        return -torch.cdist(features(model, scored.parameters, x), scored.prototypes)
    vector_to_parameters(scored, model.parameters())
    return torch.cat([model(part) for part in torch.split(x, 500)])


@torch.no_grad()
def features(model: nn.Sequential, parameters: Tensor, x: Tensor) -> Tensor:
    """Return what the output layer sees."""
    vector_to_parameters(parameters, model.parameters())
    return torch.cat([model[:-1](part) for part in torch.split(x, 500)])


def training_loss(model: nn.Sequential, parameters: Tensor, client: Client) -> float:
    """Return a model's mean loss on a client's training samples."""
    return float(F.cross_entropy(outputs(model, parameters, client.x_train), client.y_train))


# -- one model for all -----------------------------------------------------------------------------------


def fedavg(
    model: nn.Sequential, starts: list[Tensor], clients: list[Client], shares: Tensor, mu: float = 0.0
) -> Iterator[list[Scored]]:
    """Yield the served models: one average for all; FedProx (Li et al., 2020, Algorithm 2) pulls clients towards it."""
    average = starts[0]
    while True:
        penalty = pull(mu, average) if mu else None
        average = shares @ torch.stack([train(model, average, client, penalty)[0] for client in clients])
        yield [average] * len(clients)


def scaffold(
    model: nn.Sequential, starts: list[Tensor], clients: list[Client], shares: Tensor
) -> Iterator[list[Scored]]:
    """Yield the served models of SCAFFOLD (Karimireddy et al., 2020, Algorithm 1, option II)."""
    average, control = starts[0], torch.zeros_like(starts[0])
    own = torch.zeros(len(clients), len(control))
    while True:
        trained, changed = [], []
        for client, mine in zip(clients, own, strict=True):
            correction = control - mine
            # the gradient of this product with the parameters is the correction
            penalty: Penalty = lambda net, *_, c=correction: c @ parameters_to_vector(net.parameters())  # noqa: E731
            trained.append(train(model, average, client, penalty)[0])
            changed.append((average - trained[-1]) / (len(batches(client)) * LR) - control)
        own = own + torch.stack(changed)  # PFLlib weighs the models alone; so c would not stay the mean of the c_i
        control = control + shares @ torch.stack(changed)
        average = average + SCAFFOLD_LR * (shares @ (torch.stack(trained) - average))
        yield [average] * len(clients)


# -- some layers are personal ----------------------------------------------------------------------------


def personal_layers(
    model: nn.Sequential,
    starts: list[Tensor],
    clients: list[Client],
    shares: Tensor,
    personal_head: bool = True,
    in_turn: bool = False,
) -> Iterator[list[Scored]]:
    """Yield the trained models, whose output layer alone, or all but that, stays with the client.

    FedPer (Arivazhagan et al., 2019, Algorithms 1 and 2) and, with the rest personal, LG-FedAvg (Liang et al., 2020,
    Algorithm 1) train all layers together; FedRep (Collins et al., 2021, Algorithm 1) first the head, then the body.
    """
    head = head_size(model)
    own = starts[:1] * len(clients)
    while True:
        if in_turn:
            own = [train(model, start, client, layers=model[-1])[0] for client, start in zip(clients, own, strict=True)]
        layers = model[:-1] if in_turn else None
        own = [train(model, start, client, layers=layers)[0] for client, start in zip(clients, own, strict=True)]
        yield list(own)
        average = shares @ torch.stack(own)
        if personal_head:
            own = [torch.cat([average[:-head], each[-head:]]) for each in own]
        else:
            own = [torch.cat([each[:-head], average[-head:]]) for each in own]


def fedbabu(
    model: nn.Sequential, starts: list[Tensor], clients: list[Client], shares: Tensor
) -> Iterator[list[Scored]]:
    """Yield the fine-tuned models of FedBABU (Oh et al., 2022, Algorithm 1): rounds train the body alone."""
    average = starts[0]
    while True:
        average = shares @ torch.stack([train(model, average, client, layers=model[:-1])[0] for client in clients])
        yield [train(model, average, client)[0] for client in clients]


# -- a personal model beside the global one --------------------------------------------------------------


def ditto(model: nn.Sequential, starts: list[Tensor], clients: list[Client], shares: Tensor) -> Iterator[list[Scored]]:
    """Yield the personal models of Ditto (Li et al., 2021, Algorithm 1), pulled towards the model that was received."""
    average, own = starts[0], starts[:1] * len(clients)
    while True:
        trained = torch.stack([train(model, average, client)[0] for client in clients])
        penalty = pull(DITTO_LAMBDA, average)
        own = [train(model, start, client, penalty)[0] for client, start in zip(clients, own, strict=True)]
        average = shares @ trained
        yield list(own)


def apfl(model: nn.Sequential, starts: list[Tensor], clients: list[Client], shares: Tensor) -> Iterator[list[Scored]]:
    """Yield the mixtures of APFL (Deng et al., 2020, Algorithm 1)."""
    average, own = starts[0], starts[:1] * len(clients)
    alphas = [APFL_ALPHA] * len(clients)
    while True:
        trained, mixed = [], []
        for i, client in enumerate(clients):
            w, v = average, own[i]
            for number, (x, y) in enumerate(batches(client)):
                if APFL_ADAPTIVE and number == 0:  # once a round, and first (Eq. 11 and the text below it)
                    slope = (v - w) @ gradient(model, alphas[i] * v + (1 - alphas[i]) * w, x, y)
                    alphas[i] = min(max(alphas[i] - LR * float(slope), 0.0), 1.0)
                alpha = alphas[i]
                v_step = alpha * gradient(model, alpha * v + (1 - alpha) * w, x, y)
                w = w - LR * gradient(model, w, x, y)
                v = v - LR * v_step
            own[i] = v
            trained.append(w)
            mixed.append(alpha * v + (1 - alpha) * w)
        average = shares @ torch.stack(trained)
        yield list(mixed)


def pfedme(model: nn.Sequential, starts: list[Tensor], clients: list[Client], shares: Tensor) -> Iterator[list[Scored]]:
    """Yield the personal models of pFedMe (Dinh et al., 2020, Algorithm 1)."""
    average = starts[0]

    def nearby(w: Tensor, theta: Tensor, x: Tensor, y: Tensor) -> Tensor:
        for _ in range(PFEDME_STEPS):
            theta = theta - PFEDME_LR * (gradient(model, theta, x, y) + PFEDME_LAMBDA * (theta - w))
        return theta

    while True:
        trained, personal = [], []
        for client in clients:
            w = theta = average
            for x, y in batches(
                client
            ):  # where the search begins is open: as in PFLlib, where that of the last batch ended
                theta = nearby(w, theta, x, y)
                w = w - LR * PFEDME_LAMBDA * (w - theta)
            trained.append(w)
            personal.append(theta)
        average = (1 - PFEDME_BETA) * average + PFEDME_BETA * (shares @ torch.stack(trained))
        yield list(personal)


def per_fedavg(
    model: nn.Sequential, starts: list[Tensor], clients: list[Client], shares: Tensor
) -> Iterator[list[Scored]]:
    """Yield the adapted models of Per-FedAvg (Fallah et al., 2020, Algorithm 1) without the Hessian (FO)."""
    average = starts[0]
    while True:
        trained = []
        for client in clients:
            w = average
            for x, y in batches(client, 2 * BATCH):  # PFLlib: the two batches of a step come from one epoch
                half = (len(y) + 1) // 2
                ahead = w - PER_ALPHA * gradient(model, w, x[:half], y[:half])
                w = w - LR * gradient(model, ahead, x[-half:], y[-half:])
            trained.append(w)
        average = shares @ torch.stack(trained)
        # PFLlib adapts on one batch, which makes for less accurate models than both do
        adapting = [batches(client, 2 * BATCH)[0] for client in clients]
        yield [average - PER_ALPHA * gradient(model, average, x, y) for x, y in adapting]


# -- clients learn from each other -----------------------------------------------------------------------


def fedamp(model: nn.Sequential, starts: list[Tensor], clients: list[Client], shares: Tensor) -> Iterator[list[Scored]]:
    """Yield the trained models of FedAMP (Huang et al., 2021, Algorithm 1)."""
    own = starts[:1] * len(clients)
    clouds = torch.stack(own)
    while True:
        # PFLlib: training goes on from the client's own model
        own = [
            train(model, start, client, pull(AMP_LAMBDA / AMP_ALPHA, cloud))[0]
            for client, start, cloud in zip(clients, own, clouds, strict=True)
        ]
        yield list(own)
        stacked = torch.stack(own)
        distances = (stacked[:, None] - stacked).square().sum(2)
        attention = AMP_ALPHA * torch.exp(-distances / AMP_SIGMA) / AMP_SIGMA
        attention.fill_diagonal_(0)
        attention += torch.diag(1 - attention.sum(1))
        clouds = attention @ stacked


def fedfomo(
    model: nn.Sequential, starts: list[Tensor], clients: list[Client], shares: Tensor
) -> Iterator[list[Scored]]:
    """Yield the served models of FedFomo (Zhang et al., 2021, Section 3.2 and 3.3)."""
    served = starts[:1] * len(clients)
    affinity = torch.zeros(len(clients), len(clients))
    for number in count(1):
        own = [train(model, start, client)[0] for client, start in zip(clients, served, strict=True)]
        epsilon = FOMO_EPSILON - number * FOMO_DECAY
        for i, client in enumerate(clients):
            others = [n for n in range(len(clients)) if n != i]
            random.shuffle(others)
            ranked = sorted(others, key=lambda n: -float(affinity[i, n]))
            chosen: list[int] = []
            while len(chosen) < min(FOMO_MODELS, len(others)):
                pool = others if random.random() < epsilon else ranked
                chosen.append(next(n for n in pool if n not in chosen))
            before, candidates = training_loss(model, served[i], client), [i, *chosen]
            moves = torch.stack([own[n] - served[i] for n in candidates])
            losses = torch.tensor([training_loss(model, own[n], client) for n in candidates])
            gains = (before - losses) / moves.norm(dim=1)
            affinity[i, candidates] += gains
            weights = gains.clamp(min=0)
            served[i] = served[i] + (weights / weights.sum() @ moves if weights.sum() > 0 else 0)
        yield list(served)


def fedala(model: nn.Sequential, starts: list[Tensor], clients: list[Client], shares: Tensor) -> Iterator[list[Scored]]:
    """Yield the served models of FedALA (Zhang et al., 2023, Algorithm 1): mixed with the client's own, then scored."""
    head = head_size(model)
    served = starts[:1] * len(clients)
    weights = torch.ones(len(clients), head)
    for number in count():
        own = [train(model, start, client)[0] for client, start in zip(clients, served, strict=True)]
        average = shares @ torch.stack(own)
        for i, client in enumerate(clients):
            served[i] = mix(model, own[i], average, client, weights[i], until_settled=number == 0)
        yield list(served)


def mix(
    model: nn.Sequential, own: Tensor, average: Tensor, client: Client, weights: Tensor, until_settled: bool
) -> Tensor:
    """Learn the weights of the global head in place, and return the mixture (FedALA, Eqs. 4 and 5)."""
    head = len(weights)
    seen = int(ALA_SAMPLE * len(client.y_train))
    begin = random.randint(0, len(client.y_train) - seen)  # PFLlib: one stretch of the samples, in their order
    size = min(BATCH, seen)
    starts = range(begin, begin + seen - size + 1, size)
    difference = (average - own)[-head:]

    def mixture() -> Tensor:
        return torch.cat([average[:-head], own[-head:] + weights * difference])

    losses: list[float] = []
    while True:
        for start in starts:
            x, y = (samples[start : start + size] for samples in (client.x_train, client.y_train))
            slope = gradient(model, mixture(), x, y)[-head:]
            weights.copy_((weights - ALA_ETA * slope * difference).clamp(0, 1))
        losses.append(float(F.cross_entropy(model(x).detach(), y)))  # of the last batch, before its step
        # PFLlib: the first time until the losses of ten passes hardly differ
        if not until_settled or (len(losses) > 10 and np.std(losses[-10:]) < 0.1):
            return mixture()


def fedproto(
    model: nn.Sequential, starts: list[Tensor], clients: list[Client], shares: Tensor
) -> Iterator[list[Scored]]:
    """Yield the trained models of FedProto (Tan et al., 2022, Algorithm 1), with the prototypes they are used with."""
    own = starts[:1] * len(clients)
    classes = len(list(model.parameters())[-1])
    prototypes = torch.empty(0)

    def distance(net: nn.Sequential, x: Tensor, y: Tensor) -> Tensor:
        # PFLlib: that of each sample's features, the mean over samples and features
        return PROTO_LAMBDA * F.mse_loss(net[:-1](x), prototypes[y])

    for number in count():
        penalty = distance if number else None
        own = [train(model, start, client, penalty)[0] for client, start in zip(clients, own, strict=True)]
        members = [F.one_hot(client.y_train, classes).float() for client in clients]
        seen = [features(model, each, client.x_train) for client, each in zip(clients, own, strict=True)]
        # Eq. 6 as it is meant: the mean over all samples of a class, wherever they lie
        prototypes = torch.cat(members).T @ torch.cat(seen) / torch.cat(members).sum(0)[:, None]
        yield [Nearest(each, prototypes.nan_to_num(torch.inf)) for each in own]


# -- of the five papers ----------------------------------------------------------------------------------


def row_share(weight: Tensor) -> Tensor:
    """Return the norms of the output rows as shares of their sum."""
    norms = weight.norm(dim=1)
    return norms / norms.sum()


def cwfedavg(
    model: nn.Sequential, starts: list[Tensor], clients: list[Client], shares: Tensor
) -> Iterator[list[Scored]]:
    """Yield the served models: the average, with an output layer mixed for each client."""
    *_, bias = model.parameters()
    classes = len(bias)
    head = head_size(model)
    served = starts[:1] * len(clients)

    def regulariser(counts: Tensor, net: nn.Sequential, *_: Tensor) -> Tensor:
        weight = net[-1].weight
        assert isinstance(weight, Tensor)
        return WDR_LAMBDA * torch.linalg.vector_norm(counts / counts.sum() - row_share(weight))

    while True:
        trained = []
        for client, start in zip(clients, served, strict=True):
            counts = torch.bincount(client.y_train, minlength=classes)
            trained.append(train(model, start, client, partial(regulariser, counts))[0])
        stacked = torch.stack(trained)
        mixture = torch.stack([row_share(each[-head:-classes].view(classes, -1)) for each in stacked])
        joint = shares[:, None] * mixture
        heads = (joint / joint.sum(0)).T @ stacked[:, -head:]
        average = shares @ stacked
        served = [torch.cat([average[:-head], own @ heads]) for own in mixture]
        yield list(served)


def fedfew(model: nn.Sequential, starts: list[Tensor], clients: list[Client], shares: Tensor) -> Iterator[list[Scored]]:
    """Yield the served models: of K, the one of the least training loss (Algorithm 1)."""
    models = starts
    while True:
        results = [[train(model, start, client) for start in models] for client in clients]
        losses = shares[:, None].double() * torch.tensor([[loss for _, loss in row] for row in results]).double()
        inner = torch.softmax(-losses / MU, dim=1)
        outer = torch.softmax(-torch.logsumexp(-losses / MU, dim=1), dim=0)
        weight = (outer[:, None] * inner).float()
        models = [
            start + sum(weight[i, k] * (row[k][0] - start) for i, row in enumerate(results))
            for k, start in enumerate(models)
        ]
        yield [min(models, key=lambda each: training_loss(model, each, client)) for client in clients]


PROGRAMS: dict[str, Program] = {
    "fedavg": fedavg,
    "cwfedavg": cwfedavg,
    "fedfew": fedfew,
    "fedper": personal_layers,
    "fedrep": partial(personal_layers, in_turn=True),
    "fedbabu": fedbabu,
    "ditto": ditto,
    "apfl": apfl,
    "fedamp": fedamp,
    "fedprox": partial(fedavg, mu=PROX_MU),
    "pfedme": pfedme,
    "per-fedavg": per_fedavg,
    "fedfomo": fedfomo,
    "fedala": fedala,
    "lg-fedavg": partial(personal_layers, personal_head=False),
    "scaffold": scaffold,
    "fedproto": fedproto,
}
