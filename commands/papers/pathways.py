"""cwFedAvg's Figure 1: the largest weights of small networks, with and without the weight distribution regulariser.

The paper states these parameters (Section 3.2): 3400 samples of class 0 and 2600 of class 1 around two centres in three
dimensions, their distribution over three clients, and a network with four ReLU neurons. The figure shows the 8 largest
of the network's 20 weights. The learning rate, batch size and lambda are taken from the paper's experiments with ten
classes (Section 5.1).

Posy chooses the other parameters. The centres are drawn from N(0, I), and the samples from N(centre, I). The layers
have biases, which are trained and averaged, but not shown in the figure. All clients start from the same weights, drawn
by PyTorch's default initialisation. Each client takes the same number of steps, on batches sampled with replacement.
There is only one round, which averages all layers class-wise, with class shares derived from the output weights.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.func import vmap

from posy.client_app.cwfedavg import regularised
from posy.client_app.training.batches import Batch
from posy.client_app.training.work import Net
from posy.models.parameters import FloatArray
from posy.randomness import seeded
from posy.strategies.cwfedavg import class_models, weight_distribution
from posy.strategies.replies import weighted_mean

BoolArray = npt.NDArray[np.bool_]
A = TypeVar("A", FloatArray, BoolArray)

COUNTS = np.array([(2700, 300), (200, 1800), (500, 500)])
"""Number of samples per client and class."""
INPUTS, NEURONS, CLASSES = 3, 4, 2
LARGEST = 8
"""Number of weights in the critical pathways of a network."""
RATE, BATCH, STRENGTH = 0.005, 10, 10.0
STEPS = 1000
"""Number of local steps of each client. On the three clients, an epoch has 300, 200 and 100 steps, respectively."""
SEEDS = tuple(range(10))
"""Seeds for the counts in the text below the figure. The figure itself shows only the first seed."""
PANELS = {
    **{"a": "client 1", "b": "client 2", "c": "client 3", "d": "FedAvg"},
    **{"e": "client 1, WDR", "f": "client 2, WDR", "g": "client 3, WDR", "h": "class 0"},
    **{"i": "class 1", "j": "client 1, updated", "k": "client 2, updated", "l": "client 3, updated"},
}
"""Content of each panel; class models and updated clients use the regulariser (WDR)."""


class Layers(NamedTuple, Generic[A]):
    """An array for each layer of a network, with one value per weight and one row per target node."""

    hidden: A
    """``(4, 3)``, from the inputs to the neurons."""
    output: A
    """``(2, 4)``, from the neurons to the outputs."""


class Samples(NamedTuple):
    """A client's samples: inputs ``(n, 3)`` and labels ``(n,)``."""

    x: FloatArray
    y: npt.NDArray[np.int64]


def simulate(seeds: Sequence[int] = SEEDS, steps: int = STEPS) -> list[dict[str, FloatArray]]:
    """Train all clients and return, for each seed, the network that each panel shows.

    Returns
    -------
    list of dict
        Flat networks ``(26,)``, keyed by panel letter. a, b, c: local models; d: FedAvg's model; e, f, g: local models
        with the regulariser; h, i: the class models of e, f, g; j, k, l: the clients' mixes of h and i.
    """
    starts, batches = [], []
    for seed in seeds:
        rng = np.random.default_rng(seed)
        with seeded(seed):
            starts.append([tensor.detach() for tensor in _network().parameters()])
        batches.append([_batches(samples, steps, rng) for samples in clients_samples(rng)])
    # Train all networks in parallel. Axes: seeds, regulariser (without, with), clients.
    stack = (len(seeds), 2, len(COUNTS))
    start = [torch.stack(t)[:, None, None].expand(*stack, *t[0].shape) for t in zip(*starts, strict=True)]
    x, y = (torch.from_numpy(np.stack([[drawn[part] for drawn in of_seed] for of_seed in batches])) for part in (0, 1))
    shares = torch.from_numpy(COUNTS / COUNTS.sum(axis=1, keepdims=True)).float()
    with _one_thread():
        trained = _trained(
            [tensor.flatten(0, 2) for tensor in start],
            Batch(*(part[:, None].expand(*stack, *part.shape[2:]).flatten(0, 2) for part in (x, y))),
            shares.expand(*stack, CLASSES).flatten(0, 2),
            torch.tensor([0.0, STRENGTH])[:, None].expand(stack).flatten(),
        )
    return [dict(zip(PANELS, networks(*models), strict=True)) for models in trained.reshape(*stack, -1)]


def clients_samples(rng: np.random.Generator) -> list[Samples]:
    """Draw the samples of all clients around two centres, class 0 first."""
    centres = rng.normal(size=(CLASSES, INPUTS))
    samples = []
    for counts in COUNTS:
        y = np.repeat(np.arange(CLASSES), counts)
        samples.append(Samples((centres[y] + rng.normal(size=(len(y), INPUTS))).astype(np.float32), y))
    return samples


def networks(plain: FloatArray, personal: FloatArray) -> list[FloatArray]:
    """Return the panels' networks, from the local models ``(3, 26)`` trained without and with the regulariser."""
    n = COUNTS.sum(axis=1).astype(np.float64)
    shares = weight_distribution(np.stack([weights_of(model).output for model in personal]))
    by_class = class_models(personal, shares, n, np.zeros((CLASSES, personal.shape[1]), np.float32))
    mixed = shares.astype(np.float32) @ by_class  # Eq. 7
    return [*plain, weighted_mean(plain, n), *personal, *by_class, *mixed]


def weights_of(model: FloatArray) -> Layers[FloatArray]:
    """Return the weights of a flat network ``(26,)``, in which each layer's weights precede its biases."""
    hidden, _, output, _ = np.split(model, np.cumsum([NEURONS * INPUTS, NEURONS, CLASSES * NEURONS]))
    return Layers(hidden.reshape(NEURONS, INPUTS), output.reshape(CLASSES, NEURONS))


def critical(weights: Layers[FloatArray], number: int = LARGEST) -> Layers[BoolArray]:
    """Return masks of the ``number`` weights that are largest in magnitude; ties go to the earlier weight."""
    sizes = np.abs(np.concatenate([weights.hidden.ravel(), weights.output.ravel()]))
    mask = np.zeros(len(sizes), bool)
    mask[np.argsort(-sizes, kind="stable")[:number]] = True
    hidden, output = np.split(mask, [weights.hidden.size])
    return Layers(hidden.reshape(weights.hidden.shape), output.reshape(weights.output.shape))


def leading(model: FloatArray) -> list[int]:
    """Return how many of a flat network's largest weights lead to each output."""
    return [int(count) for count in critical(weights_of(model)).output.sum(axis=1)]


def shared(first: FloatArray, second: FloatArray) -> int:
    """Return the number of positions at which both flat networks have one of their largest weights."""
    pairs = zip(critical(weights_of(first)), critical(weights_of(second)), strict=True)
    return sum(int((a & b).sum()) for a, b in pairs)


def _network() -> nn.Sequential:
    """Return the network with the layer names that the regulariser expects: the output layer is named ``head``."""
    layers = {"hidden": nn.Linear(INPUTS, NEURONS), "relu": nn.ReLU(), "head": nn.Linear(NEURONS, CLASSES)}
    return nn.Sequential(OrderedDict(layers))


def _batches(samples: Samples, steps: int, rng: np.random.Generator) -> Samples:
    """Draw the batches of a client: inputs ``(steps, B, 3)`` and labels ``(steps, B)``."""
    indices = rng.integers(len(samples.y), size=(steps, BATCH))
    return Samples(samples.x[indices], samples.y[indices])


@contextmanager
def _one_thread() -> Iterator[None]:
    """Use one thread within a context, because on small arrays several threads mostly wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _trained(start: list[Tensor], batches: Batch, shares: Tensor, strengths: Tensor) -> FloatArray:
    """Train N networks in parallel by SGD, and return their flat parameters ``(N, 26)``.

    Parameters
    ----------
    start : list of torch.Tensor, (N, ...)
        Initial tensors, in the order of the network's parameters.
    batches : Batch
        Inputs ``(N, steps, B, 3)`` and labels ``(N, steps, B)``.
    shares : torch.Tensor, (N, 2)
        Class distributions of the networks' clients.
    strengths : torch.Tensor, (N,)
        lambda of the regulariser; 0 disables it.
    """
    with seeded(0):  # the weights of this network are never used
        network = _network()
    names = [name for name, _ in network.named_parameters()]

    def loss(tensors: list[Tensor], x: Tensor, y: Tensor, share: Tensor, strength: Tensor) -> Tensor:
        net = Net(network, dict(zip(names, tensors, strict=True)))
        return regularised(net, Batch(x, y), {"distribution": share, "lambda": strength})

    losses = vmap(loss)
    tensors = [tensor.clone().requires_grad_() for tensor in start]
    for step in range(batches.x.shape[1]):
        total = losses(tensors, batches.x[:, step], batches.y[:, step], shares, strengths).sum()
        gradients = torch.autograd.grad(total, tensors)
        updated = [tensor - RATE * gradient for tensor, gradient in zip(tensors, gradients, strict=True)]
        tensors = [tensor.detach().requires_grad_() for tensor in updated]
    return torch.cat([tensor.detach().flatten(1) for tensor in tensors], dim=1).numpy()
