"""What a method may ask for: trainings and outputs."""

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from posy.client_app.training.batches import Augment, Batch, Samples


class TrainingDivergedError(ArithmeticError):
    """Local training left the range of finite numbers."""


class TrainingInterruptedError(Exception):
    """Local training was told to stop."""


@dataclass(frozen=True)
class Net:
    """What an objective sees of a model: its outputs for a batch, ``net(x)``, and its tensors, ``net[name]``."""

    outputs: Callable[[Tensor], Any]
    tensors: Mapping[str, Tensor]

    def __call__(self, x: Tensor) -> Any:
        """Return the outputs for a batch of inputs."""
        return self.outputs(x)

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]


Context = Mapping[str, Tensor]
Objective = Callable[[Net, Batch, Context], Tensor]


def cross_entropy(logits: Tensor, batch: Batch) -> Tensor:
    """Return the (weighted) mean cross-entropy of a batch."""
    if batch.weight is None:
        return F.cross_entropy(logits, batch.y)
    return (F.cross_entropy(logits, batch.y, reduction="none") * batch.weight).mean()


def classification(net: Net, batch: Batch, context: Context) -> Tensor:
    """Return the plain objective: the cross-entropy of the labels."""
    return cross_entropy(net(batch.x), batch)


class Pull(NamedTuple):
    """A proximal term ``strength / 2 * ||w - anchor||^2``; its gradient is added in closed form."""

    anchor: Tensor
    strength: float


@dataclass
class Train:
    """Local SGD from a start, one model ``(d,)`` or K models ``(K, d)`` over the same batches.

    ``objective(net, batch, context)`` is differentiated by the parameters of ``net``; the context is constant. With
    ``resample`` samples are drawn in proportion to their weights, with replacement, instead of weighting their losses:
    the same objective on average, without steps as large as the largest weight.
    """

    start: Tensor  # never changed
    objective: Objective = classification
    context: Context = field(default_factory=dict)
    sample_weight: Tensor | None = None  # (n,)
    resample: bool = False
    pull: Pull | None = None
    rates: Mapping[str, float] = field(default_factory=dict)  # factors on the learning rate by layer, else 1; 0 freezes
    mask: Tensor | None = None  # (d,) 0/1; parameters whose entry is 0 do not move
    epochs: int | None = None  # instead of the setting local-epochs
    steps: int | None = None  # instead of the setting local-steps
    network: Any = None  # which of the client's networks to train
    stream: int = 0  # distinguishes several trainings of one round, which then see different batches

    @property
    def kind(self) -> Hashable:
        """What must be equal in trainings that are one computation, besides network and learning rate."""
        return (
            self.objective,
            self.start.shape,
            tuple(sorted((name, value.shape, value.dtype) for name, value in self.context.items())),
            None if self.pull is None else (self.pull.strength, self.pull.anchor.dim()),
            tuple(sorted(self.rates.items())),
            self.mask is None,
        )


class Trained(NamedTuple):
    """Result of :class:`Train`: parameters like ``start``, mean loss of the last epoch ``()`` or ``(K,)``."""

    parameters: Tensor
    loss: Tensor


@dataclass
class Forward:
    """Outputs of one model ``(d,)`` or K models ``(K, d)`` on a split: ``(n, C)`` or ``(K, n, C)``."""

    parameters: Tensor
    split: Literal["train", "test"] = "test"
    network: Any = None


class Job(NamedTuple):
    """One client's local training.

    The generator draws the order of the samples, on the CPU, so that every device sees the same batches; the
    augmentation has its own.
    """

    work: Train
    samples: Samples
    generator: torch.Generator
    lr: float
    augment: Augment | None = None
