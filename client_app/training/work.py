"""What a method may ask for: trainings and outputs."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from posy.client_app.training.batches import Augment, Batch, DropoutNumbers, Samples

Split = Literal["train", "test", "validation"]
V = TypeVar("V", Tensor, Tensor | None)
Criterion = Callable[[Tensor, Tensor], Tensor]
"""From logits ``(B, C)`` and labels ``(B,)`` to the loss of each sample ``(B,)``."""


class TrainingDivergedError(ArithmeticError):
    """Local training left the range of finite numbers."""


class TrainingInterruptedError(Exception):
    """Local training was told to stop."""


@dataclass(frozen=True)
class Net:
    """What an objective sees of a model: its outputs for a batch, ``net(x)``, and its tensors, ``net[name]``."""

    module: nn.Module
    tensors: Mapping[str, Tensor]
    resident: bool = False
    """Whether the tensors are the module's own."""
    numbers: Mapping[str, Tensor] = field(default_factory=dict)
    """The batch's numbers for dropout, by name, where they are not the module's own."""
    criterion: Criterion | None = None
    """What is minimised for each sample, in place of the cross-entropy."""

    def __call__(self, x: Tensor, *options: Any) -> Any:
        """Return the outputs for a batch of inputs; the options are those of the module's ``forward``."""
        if self.resident:
            return self.module(x, *options)
        return functional_call(self.module, {**self.tensors, **self.numbers}, (x, *options))

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    def features(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return what the head sees of a batch ``(B, D)``, and the logits ``(B, C)``."""
        seen, logits = self(x, True)
        return seen, logits

    def loss(self, logits: Tensor, batch: Batch) -> Tensor:
        """Return the (weighted) mean over a batch of what the run minimises for each sample."""
        if self.criterion is None:
            return cross_entropy(logits, batch)
        return mean_over(self.criterion(logits, batch.y), batch)

    def at(self, tensors: Mapping[str, Tensor]) -> "Net":
        """Return the same network with other tensors, which may be functions of this one's."""
        return Net(self.module, tensors, numbers=self.numbers, criterion=self.criterion)


Context = Mapping[str, Tensor]
Objective = Callable[[Net, Batch, Context], Tensor]


def cross_entropy(logits: Tensor, batch: Batch) -> Tensor:
    """Return the (weighted) mean cross-entropy of a batch."""
    if batch.weight is None:
        return F.cross_entropy(logits, batch.y)
    return mean_over(F.cross_entropy(logits, batch.y, reduction="none"), batch)


def mean_over(values: Tensor, batch: Batch) -> Tensor:
    """Return the (weighted) mean of what the samples of a batch have come to ``(B,)``."""
    return (values if batch.weight is None else values * batch.weight).mean()


def classification(net: Net, batch: Batch, context: Context) -> Tensor:
    """Return the plain objective: the loss of the labels, which is the cross-entropy unless the run says otherwise."""
    return net.loss(net(batch.x), batch)


class Models(Protocol):
    """The models that are trained, as a rule sees them: K of each of P clients."""

    parameters: list[Tensor]
    beside: list[Tensor]
    """What a rule keeps from batch to batch, in the shapes of ``parameters``; empty at first."""
    statistics: list[Tensor]
    """BatchNorm's running statistics, which a forward pass changes in place; empty where there are none."""

    def gradients(self, batch: Batch) -> tuple[Tensor, Sequence[Tensor]]:
        """Return the losses ``(P, K)`` of a batch and the gradients, in the shapes of ``parameters``."""

    def norms(self, gradients: Sequence[Tensor]) -> Tensor:
        """Return the L2 norms ``(P, K)`` of the models' gradients."""

    def resized(self, gradients: Sequence[Tensor], norm: float, *, enlarge: bool = False) -> list[Tensor]:
        """Return the gradients, each model's scaled down to an L2 norm, or up too."""

    def of_model(self, tensors: Sequence[Tensor], number: int) -> list[Tensor]:
        """Return what belongs to one of the K models of each client."""


class Rule(Protocol):
    """What a step descends along, where it is not the gradient at the parameters; hashable."""

    regularises: ClassVar[bool]
    """Whether the rule itself applies ``weight-decay`` and ``max-grad-norm``, in place of the optimiser."""

    def gradients(self, models: Models, batch: Batch) -> tuple[Tensor, Sequence[Tensor]]:
        """Return what :meth:`Models.gradients` returns; the parameters are as they were."""


class Pull(NamedTuple):
    """A proximal term ``strength / 2 * ||w - anchor||^2``; its gradient is added in closed form."""

    anchor: Tensor
    strength: float


@dataclass
class Train:
    """Local SGD from a start, one model ``(d,)`` or K models ``(K, d)``, over the same batches or each over its own.

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
    rule: Rule | None = None  # of posy.client_app.training.rules; None: the gradient
    offset: Tensor | None = None  # (d,), added to each gradient
    notes: Tensor | None = None  # (n, ...), constants that go with the samples: the objective's ``batch.notes``
    bounds: tuple[float, float] | None = None  # between which the parameters are kept
    plain: bool = False  # without the settings momentum, weight-decay and max-grad-norm
    measures: bool = False  # in evaluation mode, without augmentation, dropout and class weights; no sample is counted
    rates: Mapping[str, float] = field(default_factory=dict)  # factors on the learning rate by layer, else 1; 0 freezes
    mask: Tensor | None = None  # (d,) 0/1; parameters whose entry is 0 do not move
    epochs: int | None = None  # instead of the setting local-epochs
    steps: int | None = None  # instead of the setting local-steps
    lr: float | None = None  # instead of the round's
    network: Any = None  # which of the client's networks to train
    stream: int = 0  # distinguishes several trainings of one round, which then see different batches
    own_batches: bool = False  # each of K models sees batches in an order of its own

    @property
    def kind(self) -> Hashable:
        """What must be equal in trainings that are one computation, besides network and learning rate."""
        return (
            self.objective,
            self.start.shape,
            tuple(sorted((name, value.shape, value.dtype) for name, value in self.context.items())),
            None if self.pull is None else (self.pull.strength, self.pull.anchor.dim()),
            (self.rule, self.offset is None, self.bounds, self.plain, self.measures, self.lr, self.own_batches),
            None if self.notes is None else self.notes.shape[1:],
            tuple(sorted(self.rates.items())),
            self.mask is None,
        )

    def of_model(self, number: int) -> "Train":
        """Return the training of one of K models by itself."""

        def own(values: V) -> V:
            return values[number] if isinstance(values, Tensor) and values.dim() > 1 else values

        pull = self.pull and Pull(own(self.pull.anchor), self.pull.strength)
        start, offset, mask = own(self.start), own(self.offset), own(self.mask)
        return replace(self, start=start, pull=pull, offset=offset, mask=mask, own_batches=False)


class Trained(NamedTuple):
    """Result of :class:`Train`: parameters like ``start``, mean loss of the last epoch ``()`` or ``(K,)``.

    ``beside`` are the parameters that a rule has kept beside them, else None.
    """

    parameters: Tensor
    loss: Tensor
    beside: Tensor | None = None


@dataclass
class Forward:
    """Outputs of one model ``(d,)`` or K models ``(K, d)`` on a split: ``(n, C)`` or ``(K, n, C)``.

    With ``features`` what the head sees, ``(n, D)`` or ``(K, n, D)``, comes before them.
    """

    parameters: Tensor
    split: Split = "test"
    network: Any = None
    features: bool = False


@dataclass
class Moments:
    """What an optimiser goes on with in the next round: steps taken, and means of gradients and of their squares.

    Both are like the parameters that were trained, ``(d,)`` or ``(K, d)``, or None before the first step; SGD has no
    mean of squares. A training that ends well puts its own in their place.
    """

    steps: int = 0
    means: Tensor | None = None
    squares: Tensor | None = None

    def follow(self, steps: int, means: Tensor | None, squares: Tensor | None) -> None:
        """Take over what a training of some steps has left."""
        self.steps, self.means, self.squares = self.steps + steps, means, squares


class Job(NamedTuple):
    """One client's local training.

    The generator draws the order of the samples, on the CPU, so that every device sees the same batches; the
    augmentation and the dropout have their own. Where each of K models has batches of its own, ``models`` holds a job
    for each.
    """

    work: Train
    samples: Samples
    generator: torch.Generator
    lr: float
    augment: Augment | None = None
    dropout: DropoutNumbers | None = None
    class_weight: Tensor | None = None  # (n,), of each sample by its class
    models: tuple["Job", ...] = ()
    moments: Moments | None = None  # None: the optimiser begins afresh
