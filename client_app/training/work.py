"""A method's requests: local training, and network outputs."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from posy.client_app.training.batches import Augment, Batch, DropoutNumbers, Samples
from posy.strategies.privacy import Sampling
from posy.strategies.run_settings import OFF, TrainSettings

Split = Literal["train", "test", "validation"]
V = TypeVar("V", Tensor, Tensor | None)
Criterion = Callable[[Tensor, Tensor], Tensor]
"""A function of outputs ``(B, C)`` and targets that returns each sample's loss ``(B,)``.

The targets are classes ``(B,)``, or labels or standardised values ``(B, C)``."""


class TrainingDivergedError(ArithmeticError):
    """Local training produced NaN or infinite values."""

    shareable = True


def advice_on_divergence(train: TrainSettings, lr: float = 0.0) -> str:
    """Return a clause with advice on the settings that may have made training diverge.

    Parameters
    ----------
    train : TrainSettings
        The settings of the run.
    lr : float
        The round's learning rate, or 0 for the setting ``lr``.
    """
    rate = f"a smaller lr than {lr or train.lr:g}"
    if train.dp == OFF:
        return f"{rate} may help"
    noise = f"dp-clip = {train.dp_clip:g} and dp-epsilon = {train.dp_epsilon:g}"
    return f"the noise of {noise} may be the cause; a larger dp-epsilon, a smaller dp-clip or {rate} may help"


class TooFewSamplesError(ValueError):
    """A client has too few samples for one batch."""


class TrainingInterruptedError(Exception):
    """Local training was interrupted from another thread."""


@dataclass(frozen=True)
class Net:
    """A model, as seen by an objective: ``net(x)`` returns its outputs for a batch, and ``net[name]`` one tensor."""

    module: nn.Module
    tensors: Mapping[str, Tensor]
    resident: bool = False
    """Whether ``tensors`` are the parameters and buffers of the module itself."""
    numbers: Mapping[str, Tensor] = field(default_factory=dict)
    """The batch's random numbers for dropout, keyed by name, unless they are buffers of the module."""
    criterion: Criterion | None = None
    """The per-sample loss, or None for cross-entropy."""

    def __call__(self, x: Tensor, *options: Any) -> Any:
        """Return the outputs for a batch. ``options`` are additional arguments to the module's ``forward``."""
        if self.resident:
            return self.module(x, *options)
        return functional_call(self.module, {**self.tensors, **self.numbers}, (x, *options))

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    def features(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the head's inputs ``(B, D)`` for a batch, and the logits ``(B, C)``."""
        embedded, logits = self(x, True)
        return embedded, logits

    def loss(self, logits: Tensor, batch: Batch) -> Tensor:
        """Return the (weighted) mean of the run's loss over a batch."""
        if self.criterion is None:
            return cross_entropy(logits, batch)
        return mean_over(self.criterion(logits, batch.y), batch)

    def at(self, tensors: Mapping[str, Tensor]) -> "Net":
        """Return the same network with other tensors, which may be computed from this network's tensors."""
        return Net(self.module, tensors, numbers=self.numbers, criterion=self.criterion)


Context = Mapping[str, Tensor]
Objective = Callable[[Net, Batch, Context], Tensor]


def cross_entropy(logits: Tensor, batch: Batch) -> Tensor:
    """Return the (weighted) mean cross-entropy of a batch."""
    if batch.weight is None:
        return F.cross_entropy(logits, batch.y)
    return mean_over(F.cross_entropy(logits, batch.y, reduction="none"), batch)


def mean_over(values: Tensor, batch: Batch) -> Tensor:
    """Return the (weighted) mean of the per-sample values ``(B,)`` of a batch."""
    return (values if batch.weight is None else values * batch.weight).mean()


def classification(net: Net, batch: Batch, context: Context) -> Tensor:
    """Return the value of the default objective: the mean of the run's loss, by default cross-entropy."""
    return net.loss(net(batch.x), batch)


class Models(Protocol):
    """The models in training, as seen by a :class:`Rule`: K models for each of P clients."""

    parameters: list[Tensor]
    auxiliary: list[Tensor]
    """Tensors that a rule updates from batch to batch, shaped like ``parameters``. The list is initially empty."""
    statistics: list[Tensor]
    """BatchNorm's running statistics, which a forward pass changes in place. The list is empty without BatchNorm."""

    def gradients(self, batch: Batch) -> tuple[Tensor, Sequence[Tensor]]:
        """Return a batch's losses ``(P, K)`` and gradients, the latter with the shapes of ``parameters``."""

    def norms(self, gradients: Sequence[Tensor]) -> Tensor:
        """Return the L2 norms ``(P, K)`` of the models' gradients."""

    def resized(self, gradients: Sequence[Tensor], norm: float, *, enlarge: bool = False) -> list[Tensor]:
        """Scale each model's gradient to an L2 norm of at most ``norm`` or, with ``enlarge``, of exactly ``norm``."""

    def of_model(self, tensors: Sequence[Tensor], number: int) -> list[Tensor]:
        """Return the tensors of model ``number`` (one of K) for every client."""


class Rule(Protocol):
    """A step direction other than the gradient at the parameters. Rules are hashable."""

    regularises: ClassVar[bool]
    """Whether the rule, rather than the optimiser, applies ``weight-decay`` and ``max-grad-norm``."""

    def gradients(self, models: Models, batch: Batch) -> tuple[Tensor, Sequence[Tensor]]:
        """Return losses and directions shaped as in :meth:`Models.gradients`, without changing the parameters."""


class Pull(NamedTuple):
    """A proximal term ``strength / 2 * ||w - anchor||^2``, whose gradient is added in closed form."""

    anchor: Tensor
    strength: float


@dataclass
class Train:
    """A request for local SGD on one model ``(d,)`` or on K models ``(K, d)``.

    ``objective(net, batch, context)`` is differentiated with respect to the parameters of ``net``. The context is held
    constant. With ``resample``, samples are drawn with replacement, in proportion to their weights, and their losses
    are not weighted. The expected objective is the same, but a large weight does not make a step larger.

    Parameters
    ----------
    start : Tensor, (d,) or (K, d)
        The parameters at which training starts. Training does not change this tensor.
    objective : callable
        The objective of a batch; by default the run's loss.
    context : dict
        Tensors for the objective that differ between clients or rounds.
    sample_weight : Tensor, (n,), optional
        The weights of the client's training samples.
    resample : bool
        Whether samples are drawn in proportion to their weights.
    pull : tuple of Tensor and float, optional
        An anchor w_0 and a strength s, for the additional term s / 2 * ||w - w_0||^2.
    rule : Rule, optional
        Another step direction than the gradient, from ``posy.client_app.training.rules``.
    offset : Tensor, (d,), optional
        A vector that is added to each gradient.
    notes : Tensor, (n, ...), optional
        Constants of the samples, which the objective reads as ``batch.notes``.
    bounds : tuple of float, optional
        Lower and upper bound of the parameters.
    plain : bool
        Whether to ignore the settings ``momentum``, ``weight-decay`` and ``max-grad-norm``.
    measures : bool
        Whether to use the network's evaluation mode, without augmentation, dropout and class weights. The samples then
        do not count as training samples.
    rates : dict
        Factors of the learning rate, keyed by layer, such as ``{"head": 0.0}``; 0 freezes a layer.
    mask : Tensor, (d,), optional
        1 for each parameter that training changes, and 0 for each other parameter.
    epochs, steps, lr : int, int and float, optional
        Values to use instead of ``local-epochs``, ``local-steps`` and the round's learning rate.
    network : Architecture, optional
        The network to train, if it is not the client's network.
    stream : int
        The number of the request in the round, which determines the order of the batches.
    own_batches : bool
        Whether each of K models draws its batches separately.
    """

    start: Tensor
    objective: Objective = classification
    context: Context = field(default_factory=dict)
    sample_weight: Tensor | None = None
    resample: bool = False
    pull: Pull | None = None
    rule: Rule | None = None
    offset: Tensor | None = None
    notes: Tensor | None = None
    bounds: tuple[float, float] | None = None
    plain: bool = False
    measures: bool = False
    rates: Mapping[str, float] = field(default_factory=dict)
    mask: Tensor | None = None
    epochs: int | None = None
    steps: int | None = None
    lr: float | None = None
    network: Any = None
    stream: int = 0
    own_batches: bool = False

    def __post_init__(self) -> None:
        """Convert a pair of anchor and strength to a :class:`Pull`."""
        if self.pull is not None:
            self.pull = Pull(*self.pull)

    @property
    def kind(self) -> Hashable:
        """Key that is equal for requests that can be stacked, provided that network and learning rate also match."""
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
        """Return the request for one of the K models."""

        def row(values: V) -> V:
            return values[number] if isinstance(values, Tensor) and values.dim() > 1 else values

        pull = self.pull and Pull(row(self.pull.anchor), self.pull.strength)
        start, offset, mask = row(self.start), row(self.offset), row(self.mask)
        return replace(self, start=start, pull=pull, offset=offset, mask=mask, own_batches=False)


class Trained(NamedTuple):
    """Result of :class:`Train`: parameters shaped like ``start``, and the last epoch's mean loss ``()`` or ``(K,)``.

    ``auxiliary`` is the second set of parameters that some rules update, or None. ``steps`` is the number of steps.
    """

    parameters: Tensor
    loss: Tensor
    auxiliary: Tensor | None = None
    steps: int = 0


@dataclass
class Forward:
    """A request for the outputs of one model ``(d,)`` or K models ``(K, d)`` on a split: ``(n, C)`` or ``(K, n, C)``.

    With ``features``, the head's inputs, ``(n, D)`` or ``(K, n, D)``, precede the outputs.
    """

    parameters: Tensor
    split: Split = "test"
    network: Any = None
    features: bool = False


@dataclass
class Moments:
    """State of an optimiser between rounds: number of steps, mean of the gradients and mean of their squares.

    Both means have the shape of the trained parameters, ``(d,)`` or ``(K, d)``, and are None before the first step. SGD
    has no mean of squares. Training replaces the state only if the result is finite.
    """

    steps: int = 0
    means: Tensor | None = None
    squares: Tensor | None = None

    def follow(self, steps: int, means: Tensor | None, squares: Tensor | None) -> None:
        """Add the steps of a job, and replace the means."""
        self.steps, self.means, self.squares = self.steps + steps, means, squares


class Job(NamedTuple):
    """One client's local training job.

    The generator draws the order of the samples on the CPU, so that every device uses the same batches. Augmentation
    and dropout have separate generators. If ``work`` sets ``own_batches``, ``models`` contains a job for each of the K
    models.
    """

    work: Train
    samples: Samples
    generator: torch.Generator
    lr: float
    augment: Augment | None = None
    dropout: DropoutNumbers | None = None
    class_weight: Tensor | None = None  # (n,), the class weight of each sample
    models: tuple["Job", ...] = ()
    moments: Moments | None = None  # None for a fresh optimiser whose state is not stored
    sampling: Sampling | None = None  # the steps of DP-SGD, or None without DP-SGD
    settings: TrainSettings | None = None  # the client's own settings; None: the settings of the run
