"""Local training and inference, written once for every method.

A method asks for work by yielding :class:`Train` and :class:`Forward` requests from a generator (see
:mod:`client_app.base`); :class:`Trainer` carries them out. An objective is a function of (network,
batch, context), so the same code trains one model, or K models over a stacked axis: one after the
other with resident modules, or as one computation under :func:`torch.func.vmap`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from posy.parameters import Layout
from posy.settings import TrainSettings

EVALUATION_BATCH = 512


class TrainingDivergedError(ArithmeticError):
    """Local training left the range of finite numbers."""


class Batch(NamedTuple):
    """A mini-batch: inputs ``(B, ...)``, labels ``(B,)`` and optional sample weights ``(B,)``."""

    x: Tensor
    y: Tensor
    weight: Tensor | None = None


class Net(Protocol):
    """What an objective sees of a model: its output and its parameters by name."""

    def __call__(self, x: Tensor) -> Any:
        """Return the outputs for a batch of inputs."""

    def __getitem__(self, name: str) -> Tensor: ...


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

    Attributes
    ----------
    start : Tensor
        Parameters to start from; never changed.
    objective : callable
        ``objective(net, batch, context)``, differentiated by the parameters of ``net``.
    context : Mapping of str to Tensor
        What the objective needs besides, constant during the round.
    sample_weight : Tensor or None
        ``(n,)`` weight of each training sample.
    pull : Pull or None
        Proximal term.
    rates : Mapping of str to float
        Factor on the learning rate by layer; 0 freezes a layer. Layers not named have 1.
    mask : Tensor or None
        ``(d,)`` 0/1 mask; masked parameters do not move.
    epochs, steps : int or None
        Instead of the settings' ``local-epochs`` and ``local-steps``.
    network : Any
        Which of the client's networks to train.
    stream : int
        Distinguishes several trainings of one round, which then see different batches.
    """

    start: Tensor
    objective: Objective = classification
    context: Context = field(default_factory=dict)
    sample_weight: Tensor | None = None
    pull: Pull | None = None
    rates: Mapping[str, float] = field(default_factory=dict)
    mask: Tensor | None = None
    epochs: int | None = None
    steps: int | None = None
    network: Any = None
    stream: int = 0


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


class Samples(NamedTuple):
    """Samples on the device that trains: inputs ``(n, ...)`` and labels ``(n,)``."""

    x: Tensor
    y: Tensor


class Network:
    """A module and K resident copies of it whose parameters are views of one ``(K, d)`` buffer.

    Loading a model is one copy into the buffer; nothing is built again between rounds.
    """

    def __init__(self, build: Callable[[], nn.Module], layout: Layout, device: torch.device) -> None:
        self._build = build
        self.layout = layout
        self.device = device
        self.flat = torch.empty(0, layout.size, device=device)
        self.nets: list[ResidentNet] = []

    @property
    def smallest_batch(self) -> int:
        """Samples that a training step needs: BatchNorm has no variance for one."""
        modules = self.nets[0].module.modules()
        return 2 if any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in modules) else 1

    @property
    def has_buffers(self) -> bool:
        """Whether training writes more than parameters: vmap would lose BatchNorm's running statistics."""
        return not all(entry.trainable for entry in self.layout.entries)

    def stack(self, size: int) -> Tensor:
        """Return the ``(size, d)`` buffer, with a resident module behind each row."""
        if len(self.nets) < size:
            self.flat = torch.empty(size, self.layout.size, device=self.device)
            self.nets = [ResidentNet(self._build().to(self.device), self.layout, row) for row in self.flat]
        return self.flat[:size]


class ResidentNet:
    """A module bound to one row of a flat buffer."""

    def __init__(self, module: nn.Module, layout: Layout, row: Tensor) -> None:
        self.module = module
        self.tensors: dict[str, Tensor] = {}
        for name, view in layout.views(row).items():
            owner, _, attribute = name.rpartition(".")
            holder = module.get_submodule(owner)
            if attribute in holder._parameters:
                parameter = nn.Parameter(view, requires_grad=True)
                holder._parameters[attribute] = parameter
                self.tensors[name] = parameter
            else:
                holder._buffers[attribute] = view
                self.tensors[name] = view

    def __call__(self, x: Tensor) -> Any:
        """Return the outputs for a batch of inputs."""
        return self.module(x)

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]


class FunctionalNet:
    """A module evaluated with parameters from outside, for :func:`torch.func.vmap`."""

    def __init__(self, module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
        self.module = module
        self.tensors = tensors

    def __call__(self, x: Tensor) -> Any:
        """Return the outputs for a batch of inputs."""
        return torch.func.functional_call(self.module, dict(self.tensors), (x,))

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]


class Trainer:
    """Carries out :class:`Train` and :class:`Forward` on a device."""

    def __init__(self, settings: TrainSettings, device: torch.device) -> None:
        self.settings = settings
        self.device = device
        self.vmap = settings.stack == "vmap" or (settings.stack == "auto" and device.type == "cuda")

    def train(
        self,
        work: Train,
        network: Network,
        samples: Samples,
        generator: torch.Generator,
        lr: float,
        augment: Callable[[Tensor, torch.Generator], Tensor] | None = None,
    ) -> Trained:
        """Run local SGD (momentum starts at zero).

        Raises
        ------
        TrainingDivergedError
            If the loss or a parameter is no longer finite.
        """
        single = work.start.dim() == 1
        start = work.start.unsqueeze(0) if single else work.start
        flat = network.stack(len(start))
        with torch.no_grad():
            flat.copy_(start)
        stacked = self.vmap and len(start) > 1 and not network.has_buffers
        gradients, views = (_vmapped if stacked else _looped)(network, len(start), work)
        optimiser = SGD(self.settings, lr, work, network.layout, views, stacked)
        count = len(samples.y)
        epochs = plan_epochs(work, self.settings, count)
        total = torch.zeros(len(start), device=self.device)
        seen = 0
        smallest = network.smallest_batch
        for net in network.nets[: len(start)]:
            net.module.train()
        for length in epochs:
            total.zero_()
            seen = 0
            for batch in batches(samples, work.sample_weight, self.settings.batch_size, length, generator):
                if len(batch.y) < smallest:
                    continue
                if augment is not None:
                    losses, grads = gradients(batch._replace(x=augment(batch.x, generator)))
                else:
                    losses, grads = gradients(batch)
                optimiser.step(grads)
                total += losses * len(batch.y)
                seen += len(batch.y)
        if not seen:
            raise ValueError(f"no mini-batch to train on: {count} samples, and BatchNorm needs two in a batch")
        loss = total / seen
        if not bool(torch.isfinite(loss).all()) or not bool(torch.isfinite(flat.sum(dim=1)).all()):
            raise TrainingDivergedError(
                f"training diverged: the loss of the last epoch is {loss.tolist()}; a smaller lr than {lr:g} may help"
            )
        result = flat.clone()
        return Trained(result[0] if single else result, loss[0] if single else loss)

    @torch.no_grad()
    def forward(self, work: Forward, network: Network, samples: Samples) -> Any:
        """Return the outputs of the model or models in evaluation mode."""
        single = work.parameters.dim() == 1
        parameters = work.parameters.unsqueeze(0) if single else work.parameters
        flat = network.stack(len(parameters))
        flat.copy_(parameters)
        outputs = []
        for net in network.nets[: len(parameters)]:
            net.module.eval()
            pieces = [net(x) for x in torch.split(samples.x, EVALUATION_BATCH)]
            outputs.append(_join(pieces))
        return outputs[0] if single else _stack(outputs)


class SGD:
    """SGD with momentum and weight decay over lists of tensors, with a factor on the rate by layer.

    One fused call a step and group: the stock optimiser costs more than a small model's backward pass.
    """

    def __init__(
        self,
        settings: TrainSettings,
        lr: float,
        work: Train,
        layout: Layout,
        views: Sequence[Mapping[str, Tensor]],
        stacked: bool,
    ) -> None:
        self.momentum = settings.momentum
        self.weight_decay = settings.weight_decay
        names = trainable_names(layout, work.rates)
        groups: dict[float, list[int]] = {}
        layer_of = {entry.name: entry.layer for entry in layout.entries}
        for index, name in enumerate(names):
            groups.setdefault(lr * work.rates.get(layer_of[name], 1.0), []).append(index)
        count = len(names)
        # The gradients of the K models follow one another in one list, so that one call updates them all.
        self.groups = [
            (rate, [k * count + i for k in range(len(views)) for i in members]) for rate, members in groups.items()
        ]
        self.whole = len(self.groups) == 1
        self.parameters = [view[name] for view in views for name in names]
        self.buffers: list[Tensor] = []
        self.pull = work.pull if work.pull is not None and work.pull.strength else None
        if self.pull is not None:
            anchor = self.pull.anchor
            own = anchor.dim() == 2 and not stacked  # one anchor for each of the K models
            each = [layout.views(anchor[k] if own else anchor) for k in range(len(views))]
            self.anchors = [anchors[name] for anchors in each for name in names]
        self.masks: list[Tensor] = []
        if work.mask is not None:
            masks = layout.views(work.mask)
            self.masks = [masks[name] for _ in views for name in names]

    @torch.no_grad()
    def step(self, grads: Sequence[Tensor]) -> None:
        """Update the parameters in place."""
        gradients = list(grads)
        if self.weight_decay:
            gradients = list(torch._foreach_add(gradients, self.parameters, alpha=self.weight_decay))
        if self.pull is not None:
            distance = torch._foreach_sub(self.parameters, self.anchors)
            gradients = list(torch._foreach_add(gradients, distance, alpha=self.pull.strength))
        if self.masks:
            gradients = list(torch._foreach_mul(gradients, self.masks))
        if self.momentum:
            if self.buffers:
                torch._foreach_mul_(self.buffers, self.momentum)
                torch._foreach_add_(self.buffers, gradients)
            else:
                self.buffers = [g.clone() for g in gradients]
            gradients = self.buffers
        for rate, members in self.groups:
            if self.whole:
                torch._foreach_add_(self.parameters, gradients, alpha=-rate)
            else:
                torch._foreach_add_([self.parameters[i] for i in members], [gradients[i] for i in members], alpha=-rate)


def trainable_names(layout: Layout, rates: Mapping[str, float]) -> list[str]:
    """Return the names of the tensors that a training moves."""
    if unknown := set(rates) - set(layout.layers):
        raise KeyError(f"rates name layers {sorted(unknown)}; the model has {layout.layers}")
    return [e.name for e in layout.entries if e.trainable and rates.get(e.layer, 1.0) != 0.0]


def plan_epochs(work: Train, settings: TrainSettings, count: int) -> list[int | None]:
    """Return the number of steps of each epoch; None means a whole pass."""
    steps = work.steps if work.steps is not None else (0 if work.epochs is not None else settings.local_steps)
    if not steps:
        return [None] * (work.epochs if work.epochs is not None else settings.local_epochs)
    whole = -(-count // settings.batch_size)
    full, rest = divmod(steps, whole)
    return [None] * full + ([rest] if rest else [])


def batches(
    samples: Samples, weight: Tensor | None, size: int, steps: int | None, generator: torch.Generator
) -> Iterator[Batch]:
    """Yield the mini-batches of one pass (or its first ``steps``) in a fresh random order."""
    count = len(samples.y)
    order = torch.randperm(count, generator=generator)
    if steps is not None:
        order = order[: steps * size]
    order = order.to(samples.y.device)
    # Shuffled once a pass: batches are then views, with no gather and no copy on the step.
    x = samples.x.permute(0, 2, 3, 1)[order].permute(0, 3, 1, 2) if samples.x.dim() == 4 else samples.x[order]
    y = samples.y[order]
    w = None if weight is None else weight[order]
    for start in range(0, len(order), size):
        stop = start + size
        yield Batch(x[start:stop], y[start:stop], None if w is None else w[start:stop])


Gradients = Callable[[Batch], tuple[Tensor, Sequence[Tensor]]]


def _looped(network: Network, size: int, work: Train) -> tuple[Gradients, list[Mapping[str, Tensor]]]:
    """Differentiate the K resident models one after the other on each batch."""
    nets = network.nets[:size]
    names = trainable_names(network.layout, work.rates)
    moving = set(names)
    for net in nets:
        for name, tensor in net.tensors.items():
            if isinstance(tensor, nn.Parameter):
                tensor.requires_grad_(name in moving)
    parameters = [[net[name] for name in names] for net in nets]
    objective, context = work.objective, work.context

    def gradients(batch: Batch) -> tuple[Tensor, Sequence[Tensor]]:
        losses: list[Tensor] = []
        grads: list[Tensor] = []
        for net, leaves in zip(nets, parameters, strict=True):
            loss = objective(net, batch, context)
            grads += torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
            losses.append(loss.detach())
        return torch.stack(losses), grads

    return gradients, [net.tensors for net in nets]


def _vmapped(network: Network, size: int, work: Train) -> tuple[Gradients, list[Mapping[str, Tensor]]]:
    """Differentiate the K models as one stacked computation."""
    module = network.nets[0].module
    stacked = network.layout.views(network.flat[:size])
    names = trainable_names(network.layout, work.rates)
    fixed_names = [name for name in stacked if name not in set(names)]
    objective, context = work.objective, work.context

    def loss_of(moving: dict[str, Tensor], fixed: dict[str, Tensor], batch: Batch) -> Tensor:
        return objective(FunctionalNet(module, {**moving, **fixed}), batch, context)

    in_dims = (0, 0, None)
    compute = torch.func.vmap(torch.func.grad_and_value(loss_of), in_dims=in_dims, randomness="error")

    def gradients(batch: Batch) -> tuple[Tensor, Sequence[Tensor]]:
        moving = {name: stacked[name] for name in names}
        fixed = {name: stacked[name] for name in fixed_names}
        grads, losses = compute(moving, fixed, batch)
        return losses.detach(), [grads[name] for name in names]

    return gradients, [stacked]


def _join(pieces: Sequence[Any]) -> Any:
    """Concatenate the outputs of several batches, also when an output is a tuple of tensors."""
    if isinstance(pieces[0], tuple):
        return tuple(torch.cat(column) for column in zip(*pieces, strict=True))
    return torch.cat(list(pieces))


def _stack(outputs: Sequence[Any]) -> Any:
    if isinstance(outputs[0], tuple):
        return tuple(torch.stack(column) for column in zip(*outputs, strict=True))
    return torch.stack(list(outputs))
