"""cwFedAvg's Figure 1: the largest weights of small networks, with and without the weight distribution regulariser.

The paper tells of the samples, 3400 of class 0 and 2600 of class 1 around two centres in three dimensions, of how many
of them each of three clients has, and of a network with four ReLU neurons, of whose 20 weights the 8 largest are drawn
(Section 3.2). Learning rate, batch size and lambda are those of its experiments with ten classes (Section 5.1). Chosen
here: the centres are drawn from N(0, I) and the samples from N(centre, I); the layers have biases, which are trained
and averaged but not drawn; all clients start from one initialisation, PyTorch's; each takes the same number of steps,
on batches drawn with replacement; there is one round, in which all layers are averaged class-wise, with the shares
that are read off the output weights.
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
"""Samples of each class on each client."""
INPUTS, NEURONS, CLASSES = 3, 4, 2
LARGEST = 8
"""How many of a network's weights make its critical pathways."""
RATE, BATCH, STRENGTH = 0.005, 10, 10.0
STEPS = 1000
"""Of each client; a local epoch is 300, 200 and 100."""
SEEDS = tuple(range(10))
"""What the figure's text counts, it counts over these; the first one is drawn."""
PANELS = {
    **{"a": "client 1", "b": "client 2", "c": "client 3", "d": "FedAvg"},
    **{"e": "client 1, WDR", "f": "client 2, WDR", "g": "client 3, WDR", "h": "class 0"},
    **{"i": "class 1", "j": "client 1, updated", "k": "client 2, updated", "l": "client 3, updated"},
}
"""What each panel shows; the class models and the updated clients are those with the regulariser (WDR)."""


class Layers(NamedTuple, Generic[A]):
    """The weights of a network, or what is told of each of them: a row for each node that they lead to."""

    hidden: A
    """``(4, 3)``, from the inputs to the neurons."""
    output: A
    """``(2, 4)``, from the neurons to the outputs."""


class Samples(NamedTuple):
    """A client's samples: inputs ``(n, 3)`` and labels ``(n,)``."""

    x: FloatArray
    y: npt.NDArray[np.int64]


def simulate(seeds: Sequence[int] = SEEDS, steps: int = STEPS) -> list[dict[str, FloatArray]]:
    """Train all clients and return the networks of the panels for each seed.

    Returns
    -------
    list of dict
        Flat networks ``(26,)`` by the letter of their panel: a, b, c: local models; d: FedAvg's model; e, f, g: local
        models with the regulariser; h, i: the class models of these; j, k, l: the clients' mixes of the class models.
    """
    starts, batches = [], []
    for seed in seeds:
        rng = np.random.default_rng(seed)
        with seeded(seed):
            starts.append([tensor.detach() for tensor in _network().parameters()])
        batches.append([_batches(own, steps, rng) for own in clients_samples(rng)])
    # All are trained side by side: seeds, then without and with the regulariser, then clients.
    stack = (len(seeds), 2, len(COUNTS))
    start = [torch.stack(own)[:, None, None].expand(*stack, *own[0].shape) for own in zip(*starts, strict=True)]
    x, y = (torch.from_numpy(np.stack([[own[part] for own in one] for one in batches])) for part in (0, 1))
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
    """Draw the samples of all clients around two centres, those of class 0 first."""
    centres = rng.normal(size=(CLASSES, INPUTS))
    found = []
    for counts in COUNTS:
        y = np.repeat(np.arange(CLASSES), counts)
        found.append(Samples((centres[y] + rng.normal(size=(len(y), INPUTS))).astype(np.float32), y))
    return found


def networks(plain: FloatArray, personal: FloatArray) -> list[FloatArray]:
    """Return the networks of all panels from the local models ``(3, 26)`` without and with the regulariser."""
    n = COUNTS.sum(axis=1).astype(np.float64)
    shares = weight_distribution(np.stack([weights_of(model).output for model in personal]))
    by_class = class_models(personal, shares, n, np.zeros((CLASSES, personal.shape[1]), np.float32))
    mixed = shares.astype(np.float32) @ by_class  # Eq. 7
    return [*plain, weighted_mean(plain, n), *personal, *by_class, *mixed]


def weights_of(model: FloatArray) -> Layers[FloatArray]:
    """Return the weights of a flat network ``(26,)``, in which each layer's weights stand before its biases."""
    hidden, _, output, _ = np.split(model, np.cumsum([NEURONS * INPUTS, NEURONS, CLASSES * NEURONS]))
    return Layers(hidden.reshape(NEURONS, INPUTS), output.reshape(CLASSES, NEURONS))


def critical(weights: Layers[FloatArray], number: int = LARGEST) -> Layers[BoolArray]:
    """Return which weights are the ``number`` largest ones by magnitude; of those alike the first."""
    sizes = np.abs(np.concatenate([weights.hidden.ravel(), weights.output.ravel()]))
    chosen = np.zeros(len(sizes), bool)
    chosen[np.argsort(-sizes, kind="stable")[:number]] = True
    hidden, output = np.split(chosen, [weights.hidden.size])
    return Layers(hidden.reshape(weights.hidden.shape), output.reshape(weights.output.shape))


def leading(model: FloatArray) -> list[int]:
    """Return how many of a flat network's largest weights lead to each output."""
    return [int(count) for count in critical(weights_of(model)).output.sum(axis=1)]


def shared(one: FloatArray, other: FloatArray) -> int:
    """Return how many of their largest weights two flat networks have in the same places."""
    places = zip(critical(weights_of(one)), critical(weights_of(other)), strict=True)
    return sum(int((a & b).sum()) for a, b in places)


def _network() -> nn.Sequential:
    """Return the network with the names that the regulariser knows: the output layer is its head."""
    layers = {"hidden": nn.Linear(INPUTS, NEURONS), "relu": nn.ReLU(), "head": nn.Linear(NEURONS, CLASSES)}
    return nn.Sequential(OrderedDict(layers))


def _batches(own: Samples, steps: int, rng: np.random.Generator) -> Samples:
    """Draw the batches of a client: inputs ``(steps, B, 3)`` and labels ``(steps, B)``."""
    drawn = rng.integers(len(own.y), size=(steps, BATCH))
    return Samples(own.x[drawn], own.y[drawn])


@contextmanager
def _one_thread() -> Iterator[None]:
    """Compute with one thread: on arrays this small several mostly wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _trained(start: list[Tensor], batches: Batch, shares: Tensor, strengths: Tensor) -> FloatArray:
    """Train N networks side by side by SGD and return them, flat ``(N, 26)``.

    Parameters
    ----------
    start : list of torch.Tensor, (N, ...)
        Their tensors, in the order of the network's.
    batches : Batch
        Inputs ``(N, steps, B, 3)`` and labels ``(N, steps, B)``.
    shares : torch.Tensor, (N, 2)
        Class distributions of their clients.
    strengths : torch.Tensor, (N,)
        lambda of the regulariser; 0 is none.
    """
    with seeded(0):  # its own weights are never used
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
        moved = [tensor - RATE * gradient for tensor, gradient in zip(tensors, gradients, strict=True)]
        tensors = [tensor.detach().requires_grad_() for tensor in moved]
    return torch.cat([tensor.detach().flatten(1) for tensor in tensors], dim=1).numpy()
