"""Plain PyTorch programs of published methods, for :mod:`benchmarks.curves`.

The programs use neither Posy nor Flower. Each follows the pseudocode of its paper, on flat vectors of parameters. If
the paper omits a detail, a comment names the source of the choice. The source is usually PFLlib, which also
defines the format of the splits. As in PFLlib, all means over clients are weighted by their samples.

A program is a generator. After each round, it yields the models to evaluate: the models that the clients receive next,
or their trained models. Local variables hold the state of server and clients.
"""

import random
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from scipy.cluster.hierarchy import fcluster, linkage
from scipy.optimize import minimize
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.utils.data import DataLoader, TensorDataset

EPOCHS, BATCH, LR = 1, 10, 0.005
WDR_LAMBDA = 10.0
MODELS, MU = 3, 0.01
PROX_MU = 1.0  # the largest value in the paper: with 0.001 the reported results equal FedAvg's
DITTO_LAMBDA = 1.0
APFL_ALPHA, APFL_ADAPTIVE = 0.5, True
# FedAMP: squared distances between models are 0.1 to 0.4 after a round, so a client's own model keeps some weight.
AMP_ALPHA, AMP_LAMBDA, AMP_SIGMA = 0.02, 0.1, 0.3
# pFedMe: PFLlib's learning rate for the personal steps. With the paper's 0.09, this network diverges in round 2.
PFEDME_LAMBDA, PFEDME_STEPS, PFEDME_LR, PFEDME_BETA = 15.0, 5, 0.01, 1.0
PER_ALPHA = 0.01
FOMO_MODELS, FOMO_EPSILON, FOMO_DECAY = 4, 0.3, 0.05
ALA_ETA, ALA_SAMPLE = 1.0, 0.8
SCAFFOLD_LR = 1.0
PROTO_LAMBDA = 1.0
# CFL: the updates of the first round have norms of 0.04 to 0.5. The published bounds (0.4, 1.6) would split no cluster.
CFL_EPS1, CFL_EPS2 = 0.4, 0.3
PAC_LAMBDA, PAC_HEAD_LR = 1.0, 0.1


class Client(NamedTuple):
    """The tensors of a client, and whether it skips an incomplete last batch."""

    x_train: Tensor
    y_train: Tensor
    x_test: Tensor
    y_test: Tensor
    drop_last: bool = True


class Nearest(NamedTuple):
    """A model that predicts the class of the nearest prototype."""

    parameters: Tensor
    prototypes: Tensor
    """Prototypes of the classes ``(C, D)``, infinite for classes without one."""


Scored = Tensor | Nearest
Program = Callable[[nn.Sequential, list[Tensor], list[Client], Tensor], Iterator[list[Scored]]]
"""Maps a network, initial parameters, clients and their shares n_i / N to the models to evaluate, a list per round."""
Penalty = Callable[[nn.Sequential, Tensor, Tensor], Tensor]
"""A term that is added to the loss of a model on a batch."""


# -- common functions ------------------------------------------------------------------------------------


def network(example: Tensor, classes: int) -> nn.Sequential:
    """Return the 4-layer CNN of FedAvg, cwFedAvg and FedFew."""
    features = nn.Sequential(
        nn.Conv2d(example.shape[0], 32, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
    )  # fmt: skip
    width = features(example[None]).shape[1]
    return nn.Sequential(*features, nn.Linear(width, 512), nn.ReLU(), nn.Linear(512, classes))


def head_size(model: nn.Sequential) -> int:
    """Return the number of parameters of the output layer, which are the last in the vector."""
    return sum(p.numel() for p in model[-1].parameters())


def shares_of(clients: list[Client]) -> Tensor:
    """Return each client's share n_i / N of the training samples, ``(M,)``."""
    sizes = torch.tensor([float(len(client.y_train)) for client in clients])
    return sizes / sizes.sum()


def batches(client: Client, size: int | None = None) -> list[list[Tensor]]:
    """Return a client's shuffled mini-batches for one round."""
    size = size or BATCH
    drop_last = client.drop_last and len(client.y_train) >= size
    loader = DataLoader(TensorDataset(client.x_train, client.y_train), size, shuffle=True, drop_last=drop_last)
    return [batch for _ in range(EPOCHS) for batch in loader]


def train(
    model: nn.Sequential,
    start: Tensor,
    client: Client,
    penalty: Penalty | None = None,
    layers: nn.Module | None = None,
    lr: float | None = None,
) -> tuple[Tensor, float]:
    """Train all or some layers for a round, and return the new parameters and the mean loss of the last epoch."""
    vector_to_parameters(start.clone(), model.parameters())  # the parameters are views of the copy, changed in place
    optimiser = torch.optim.SGD((layers or model).parameters(), lr=lr or LR)
    losses = []
    for x, y in batches(client):
        loss = F.cross_entropy(model(x), y)
        losses.append((loss.item() * len(y), len(y)))
        if penalty is not None:
            loss = loss + penalty(model, x, y)
        optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
    total, samples = np.sum(losses[-len(losses) // EPOCHS :], axis=0)
    return parameters_to_vector(model.parameters()).detach().clone(), total / samples


def pull(strength: float, centre: Tensor) -> Penalty:
    """Return a penalty: strength / 2 times the squared distance to a model."""
    return lambda model, *_: strength / 2 * (parameters_to_vector(model.parameters()) - centre).square().sum()


def gradient(model: nn.Sequential, parameters: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Return the gradient of the cross-entropy at some parameters."""
    vector_to_parameters(parameters, model.parameters())
    loss = F.cross_entropy(model(x), y)
    return parameters_to_vector(torch.autograd.grad(loss, list(model.parameters())))


@torch.no_grad()
def outputs(model: nn.Sequential, scored: Scored, x: Tensor) -> Tensor:
    """Return the logits of a model, or the negative distances to its prototypes, ``(N, C)``."""
    if isinstance(scored, Nearest):
        return -torch.cdist(features(model, scored.parameters, x), scored.prototypes)
    vector_to_parameters(scored, model.parameters())
    return torch.cat([model(part) for part in torch.split(x, 500)])


@torch.no_grad()
def features(model: nn.Sequential, parameters: Tensor, x: Tensor) -> Tensor:
    """Return the inputs of the output layer ``(N, D)``."""
    vector_to_parameters(parameters, model.parameters())
    return torch.cat([model[:-1](part) for part in torch.split(x, 500)])


def training_loss(model: nn.Sequential, parameters: Tensor, client: Client) -> float:
    """Return a model's mean loss on a client's training samples."""
    return float(F.cross_entropy(outputs(model, parameters, client.x_train), client.y_train))


# -- one model for all -----------------------------------------------------------------------------------


def fedavg(
    model: nn.Sequential, starts: list[Tensor], clients: list[Client], shares: Tensor, mu: float = 0.0
) -> Iterator[list[Scored]]:
    """Yield the served average model; FedProx (Li et al., 2020, Algorithm 2) pulls the clients towards it."""
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
    controls = torch.zeros(len(clients), len(control))
    while True:
        trained, changed = [], []
        for client, client_control in zip(clients, controls, strict=True):
            correction = control - client_control
            # the gradient of this product with respect to the parameters is the correction
            penalty: Penalty = lambda net, *_, c=correction: c @ parameters_to_vector(net.parameters())  # noqa: E731
            trained.append(train(model, average, client, penalty)[0])
            changed.append((average - trained[-1]) / (len(batches(client)) * LR) - control)
        # PFLlib weights only the models, so c would not remain the mean of the c_i
        controls = controls + torch.stack(changed)
        control = control + shares @ torch.stack(changed)
        average = average + SCAFFOLD_LR * (shares @ (torch.stack(trained) - average))
        yield [average] * len(clients)


def cfl(model: nn.Sequential, starts: list[Tensor], clients: list[Client], shares: Tensor) -> Iterator[list[Scored]]:
    """Yield the served models of CFL (Sattler et al., 2020): one per cluster; clusters split if updates diverge."""
    clusters = [(list(range(len(clients))), starts[0])]
    while True:
        next_clusters: list[tuple[list[int], Tensor]] = []
        for members, start in clusters:
            changes = torch.stack([train(model, start, clients[i])[0] - start for i in members])
            weights = shares[members] / shares[members].sum()
            parts = [list(range(len(members)))]
            close = float((weights @ changes).norm()) < CFL_EPS1
            if len(members) > 1 and close and float(changes.norm(dim=1).max()) > CFL_EPS2:
                unit = F.normalize(changes.double())
                # joining the most similar clients first minimises the largest similarity between the two parts
                distances = (1 - unit @ unit.T)[tuple(np.triu_indices(len(members), 1))].numpy()
                labels = fcluster(linkage(distances, "single"), 2, "maxclust")
                parts = [np.flatnonzero(labels == label).tolist() for label in (1, 2)]
            for part in parts:
                share = weights[part] / weights[part].sum()
                next_clusters.append(([members[i] for i in part], start + share @ changes[part]))
        clusters = next_clusters
        served = {i: average for members, average in clusters for i in members}
        yield [served[i] for i in range(len(clients))]


# -- methods with personal layers ------------------------------------------------------------------------


def personal_layers(
    model: nn.Sequential,
    starts: list[Tensor],
    clients: list[Client],
    shares: Tensor,
    personal_head: bool = True,
    in_turn: bool = False,
) -> Iterator[list[Scored]]:
    """Yield the trained models of methods that keep the output layer, or all other layers, on the client.

    FedPer (Arivazhagan et al., 2019, Algorithms 1 and 2) and LG-FedAvg (Liang et al., 2020, Algorithm 1) train all
    layers together. FedPer keeps the output layer, and LG-FedAvg keeps the other layers. FedRep (Collins et al., 2021,
    Algorithm 1) first trains the personal output layer, then the other layers.
    """
    head = head_size(model)
    models = starts[:1] * len(clients)
    while True:
        if in_turn:
            models = [
                train(model, start, client, layers=model[-1])[0] for client, start in zip(clients, models, strict=True)
            ]
        layers = model[:-1] if in_turn else None
        models = [train(model, start, client, layers=layers)[0] for client, start in zip(clients, models, strict=True)]
        yield list(models)
        average = shares @ torch.stack(models)
        if personal_head:
            models = [torch.cat([average[:-head], each[-head:]]) for each in models]
        else:
            models = [torch.cat([each[:-head], average[-head:]]) for each in models]


def fedbabu(
    model: nn.Sequential, starts: list[Tensor], clients: list[Client], shares: Tensor
) -> Iterator[list[Scored]]:
    """Yield the fine-tuned models of FedBABU (Oh et al., 2022, Algorithm 1); rounds train only the body."""
    average = starts[0]
    while True:
        average = shares @ torch.stack([train(model, average, client, layers=model[:-1])[0] for client in clients])
        yield [train(model, average, client)[0] for client in clients]


def fedpac(model: nn.Sequential, starts: list[Tensor], clients: list[Client], shares: Tensor) -> Iterator[list[Scored]]:
    """Yield the trained models of FedPAC (Xu et al., 2023, Algorithm 1)."""
    size = head_size(model)
    body, heads = starts[0][:-size], [starts[0][-size:]] * len(clients)
    classes = len(list(model.parameters())[-1])
    members = [F.one_hot(client.y_train, classes).float() for client in clients]
    centres = torch.empty(0)

    def distance(net: nn.Sequential, x: Tensor, y: Tensor) -> Tensor:
        return PAC_LAMBDA * F.mse_loss(net[:-1](x), centres[y])

    for number in count():
        means, spreads, models = [], [], []
        for client, member, head in zip(clients, members, heads, strict=True):
            start, n = torch.cat([body, head]), len(client.y_train)
            inputs = features(model, start, client.x_train).double()
            means.append((member.double().T @ inputs / n).flatten())
            spreads.append((inputs.square().sum(1).mean() - means[-1].square().sum()) / n)
            start, _ = train(model, start, client, layers=model[-1], lr=PAC_HEAD_LR)
            models.append(train(model, start, client, distance if number else None, layers=model[:-1])[0])
        yield list(models)
        client_features = [features(model, each, client.x_train) for client, each in zip(clients, models, strict=True)]
        centres = torch.cat(members).T @ torch.cat(client_features) / torch.cat(members).sum(0)[:, None]
        body = shares @ torch.stack(models)[:, :-size]
        weights = [head_weights(i, torch.stack(means), torch.stack(spreads)) for i in range(len(clients))]
        heads = list(torch.stack(weights).float() @ torch.stack(models)[:, -size:])


def head_weights(client: int, means: Tensor, spreads: Tensor) -> Tensor:
    """Return the weights ``(M,)`` of all heads in a client's head. They minimise the error that FedPAC estimates."""
    differences = means[client] - means
    matrix = (differences @ differences.T + spreads.diag()).numpy()
    matrix = matrix / np.abs(matrix).max()
    m = len(matrix)
    result = minimize(
        lambda a: a @ matrix @ a,
        np.full(m, 1 / m),
        jac=lambda a: 2 * matrix @ a,
        bounds=[(0, 1)] * m,
        constraints={"type": "eq", "fun": lambda a: a.sum() - 1, "jac": lambda a: np.ones(m)},
        method="SLSQP",
        options={"ftol": 1e-14, "maxiter": 1000},
    )
    return torch.from_numpy(result.x)


# -- a personal model and a global model -----------------------------------------------------------------


def ditto(model: nn.Sequential, starts: list[Tensor], clients: list[Client], shares: Tensor) -> Iterator[list[Scored]]:
    """Yield the personal models of Ditto (Li et al., 2021, Algorithm 1), each pulled towards the received model."""
    average, personal = starts[0], starts[:1] * len(clients)
    while True:
        trained = torch.stack([train(model, average, client)[0] for client in clients])
        penalty = pull(DITTO_LAMBDA, average)
        personal = [train(model, start, client, penalty)[0] for client, start in zip(clients, personal, strict=True)]
        average = shares @ trained
        yield list(personal)


def apfl(model: nn.Sequential, starts: list[Tensor], clients: list[Client], shares: Tensor) -> Iterator[list[Scored]]:
    """Yield the mixtures of APFL (Deng et al., 2020, Algorithm 1)."""
    average, personal = starts[0], starts[:1] * len(clients)
    alphas = [APFL_ALPHA] * len(clients)
    while True:
        trained, mixed = [], []
        for i, client in enumerate(clients):
            w, v = average, personal[i]
            for number, (x, y) in enumerate(batches(client)):
                # once per round, before its first step (Eq. 11 and the text below it)
                if APFL_ADAPTIVE and number == 0:
                    slope = (v - w) @ gradient(model, alphas[i] * v + (1 - alphas[i]) * w, x, y)
                    alphas[i] = min(max(alphas[i] - LR * float(slope), 0.0), 1.0)
                alpha = alphas[i]
                v_step = alpha * gradient(model, alpha * v + (1 - alpha) * w, x, y)
                w = w - LR * gradient(model, w, x, y)
                v = v - LR * v_step
            personal[i] = v
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
            for x, y in batches(client):  # PFLlib: the search starts where the search of the previous batch ended
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
            for x, y in batches(client, 2 * BATCH):  # PFLlib: both batches of a step come from the same epoch
                half = (len(y) + 1) // 2
                adapted = w - PER_ALPHA * gradient(model, w, x[:half], y[:half])
                w = w - LR * gradient(model, adapted, x[-half:], y[-half:])
            trained.append(w)
        average = shares @ torch.stack(trained)
        # PFLlib adapts on one batch; adapting on both batches gives more accurate models
        adapting = [batches(client, 2 * BATCH)[0] for client in clients]
        yield [average - PER_ALPHA * gradient(model, average, x, y) for x, y in adapting]


# -- clients learn from each other -----------------------------------------------------------------------


def fedamp(model: nn.Sequential, starts: list[Tensor], clients: list[Client], shares: Tensor) -> Iterator[list[Scored]]:
    """Yield the trained models of FedAMP (Huang et al., 2021, Algorithm 1)."""
    models = starts[:1] * len(clients)
    clouds = torch.stack(models)
    while True:
        # PFLlib: training continues from the client's last model
        models = [
            train(model, start, client, pull(AMP_LAMBDA / AMP_ALPHA, cloud))[0]
            for client, start, cloud in zip(clients, models, clouds, strict=True)
        ]
        yield list(models)
        stacked = torch.stack(models)
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
        models = [train(model, start, client)[0] for client, start in zip(clients, served, strict=True)]
        epsilon = FOMO_EPSILON - number * FOMO_DECAY
        for i, client in enumerate(clients):
            peers = [n for n in range(len(clients)) if n != i]
            random.shuffle(peers)
            ranked = sorted(peers, key=lambda n: -float(affinity[i, n]))
            partners: list[int] = []
            while len(partners) < min(FOMO_MODELS, len(peers)):
                pool = peers if random.random() < epsilon else ranked
                partners.append(next(n for n in pool if n not in partners))
            served_loss, candidates = training_loss(model, served[i], client), [i, *partners]
            moves = torch.stack([models[n] - served[i] for n in candidates])
            losses = torch.tensor([training_loss(model, models[n], client) for n in candidates])
            gains = (served_loss - losses) / moves.norm(dim=1)
            affinity[i, candidates] += gains
            weights = gains.clamp(min=0)
            served[i] = served[i] + (weights / weights.sum() @ moves if weights.sum() > 0 else 0)
        yield list(served)


def fedala(model: nn.Sequential, starts: list[Tensor], clients: list[Client], shares: Tensor) -> Iterator[list[Scored]]:
    """Yield FedALA's served mixtures of the average model and the local models (Zhang et al., 2023, Algorithm 1)."""
    head = head_size(model)
    served = starts[:1] * len(clients)
    weights = torch.ones(len(clients), head)
    for number in count():
        models = [train(model, start, client)[0] for client, start in zip(clients, served, strict=True)]
        average = shares @ torch.stack(models)
        for i, client in enumerate(clients):
            served[i] = mix(model, models[i], average, client, weights[i], until_settled=number == 0)
        yield list(served)


def mix(
    model: nn.Sequential, local: Tensor, average: Tensor, client: Client, weights: Tensor, until_settled: bool
) -> Tensor:
    """Learn the weights of the global head in place, and return the mixture (FedALA, Eqs. 4 and 5)."""
    head = len(weights)
    num_used = int(ALA_SAMPLE * len(client.y_train))
    begin = random.randint(0, len(client.y_train) - num_used)  # PFLlib: consecutive samples in their original order
    size = min(BATCH, num_used)
    starts = range(begin, begin + num_used - size + 1, size)
    difference = (average - local)[-head:]

    def mixture() -> Tensor:
        return torch.cat([average[:-head], local[-head:] + weights * difference])

    losses: list[float] = []
    while True:
        for start in starts:
            x, y = (samples[start : start + size] for samples in (client.x_train, client.y_train))
            slope = gradient(model, mixture(), x, y)[-head:]
            weights.copy_((weights - ALA_ETA * slope * difference).clamp(0, 1))
        losses.append(float(F.cross_entropy(model(x).detach(), y)))  # loss of the last batch, before its step
        # PFLlib: in the first round, repeat until the losses of ten passes hardly differ
        if not until_settled or (len(losses) > 10 and np.std(losses[-10:]) < 0.1):
            return mixture()


def fedproto(
    model: nn.Sequential, starts: list[Tensor], clients: list[Client], shares: Tensor
) -> Iterator[list[Scored]]:
    """Yield the trained models of FedProto (Tan et al., 2022, Algorithm 1), with their prototypes."""
    models = starts[:1] * len(clients)
    classes = len(list(model.parameters())[-1])
    prototypes = torch.empty(0)

    def distance(net: nn.Sequential, x: Tensor, y: Tensor) -> Tensor:
        # PFLlib: the mean over samples and features of the squared distances
        return PROTO_LAMBDA * F.mse_loss(net[:-1](x), prototypes[y])

    for number in count():
        penalty = distance if number else None
        models = [train(model, start, client, penalty)[0] for client, start in zip(clients, models, strict=True)]
        members = [F.one_hot(client.y_train, classes).float() for client in clients]
        client_features = [features(model, each, client.x_train) for client, each in zip(clients, models, strict=True)]
        # as Eq. 6 intends: the mean over all samples of a class on all clients
        prototypes = torch.cat(members).T @ torch.cat(client_features) / torch.cat(members).sum(0)[:, None]
        yield [Nearest(each, prototypes.nan_to_num(torch.inf)) for each in models]


# -- cwFedAvg and FedFew ---------------------------------------------------------------------------------


def row_share(weight: Tensor) -> Tensor:
    """Return the norms of the output layer's rows, divided by their sum, ``(C,)``."""
    norms = weight.norm(dim=1)
    return norms / norms.sum()


def cwfedavg(
    model: nn.Sequential, starts: list[Tensor], clients: list[Client], shares: Tensor
) -> Iterator[list[Scored]]:
    """Yield the served models of cwFedAvg: the average model with a personal mixture of output layers."""
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
        served = [torch.cat([average[:-head], row @ heads]) for row in mixture]
        yield list(served)


def fedfew(model: nn.Sequential, starts: list[Tensor], clients: list[Client], shares: Tensor) -> Iterator[list[Scored]]:
    """Yield the served models of FedFew (Algorithm 1): for each client, the best of K models on its training data."""
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
    "cfl": cfl,
    "fedpac": fedpac,
    "fedproto": fedproto,
}
