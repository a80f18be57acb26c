"""Local training and inference, written once for every method.

A method asks for work by yielding :class:`Train` and :class:`Forward` requests from a generator (see
:mod:`posy.client_app.base`); :class:`Trainer` carries them out. An objective is a function of (network,
batch, context), so the same code trains one model, or K models over a stacked axis: one after the
other with resident modules, or as one computation under :func:`torch.func.vmap`. Several clients are
one more axis.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from threading import Event
from typing import Any, Literal, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from posy.batches import Augment, Batch, Samples, Schedule, Share, batches, plan_epochs
from posy.parameters import Entry, Layout
from posy.settings import TrainSettings

EVALUATION_BATCH = 512
STACK_BYTES = 2 << 30
"""Memory of a CPU that stacked models may take."""
SMALL = 30_000
"""Parameters up to which a network without convolutions is stacked on a CPU."""


class TrainingDivergedError(ArithmeticError):
    """Local training left the range of finite numbers."""


class TrainingInterruptedError(Exception):
    """Local training was told to stop."""


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
    resample : bool
        Draw samples in proportion to their weights, with replacement, instead of weighting their losses: the
        same objective on average, without steps as large as the largest weight.
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
    resample: bool = False
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


class Job(NamedTuple):
    """One client's local training: the work, its samples, and where its randomness comes from.

    Attributes
    ----------
    work : Train
        What is trained.
    samples : Samples
        The client's training samples.
    generator : torch.Generator
        Draws the order of the samples; on the CPU, so that every device sees the same batches.
    lr : float
        Learning rate.
    augment : Augment or None
        Changes the inputs of a batch; has its own generator.
    """

    work: Train
    samples: Samples
    generator: torch.Generator
    lr: float
    augment: Augment | None = None


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

    @cached_property
    def template(self) -> nn.Module:
        """A module to be evaluated with parameters from outside."""
        return self._build().to(self.device)

    @cached_property
    def smallest_batch(self) -> int:
        """Samples that a training step needs: BatchNorm has no variance for one."""
        modules = self.template.modules()
        return 2 if any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in modules) else 1

    @property
    def has_buffers(self) -> bool:
        """Whether training writes more than parameters: vmap would lose BatchNorm's running statistics."""
        return not all(entry.trainable for entry in self.layout.entries)

    @cached_property
    def convolves(self) -> bool:
        """Whether the network has convolutions."""
        return any(isinstance(m, nn.modules.conv._ConvNd) for m in self.template.modules())

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


class Models(Protocol):
    """The models that are trained at once: K of one client, or of each of P clients."""

    flat: Tensor
    parameters: list[Tensor]
    rates: list[float]

    def parts(self, values: Sequence[Tensor]) -> list[Tensor]:
        """Cut one vector ``(d,)`` or ``(K, d)`` a client into the shapes of ``parameters``."""

    def gradients(self, batch: Batch) -> tuple[Tensor, Sequence[Tensor]]:
        """Return the losses ``(P, K)`` of a batch and the gradients, in the shapes of ``parameters``."""

    def clipped(self, gradients: Sequence[Tensor], norm: float) -> list[Tensor]:
        """Return the gradients, those of each model scaled down to an L2 norm that they exceed."""


class LoopedModels:
    """K models of one client as resident modules, differentiated one after the other on each batch."""

    def __init__(self, network: Network, work: Train) -> None:
        start = work.start if work.start.dim() == 2 else work.start.unsqueeze(0)
        self.layout = network.layout
        self.flat = network.stack(len(start)).unsqueeze(0)
        with torch.no_grad():
            self.flat.copy_(start)
        self._nets = network.nets[: len(start)]
        self._names = trainable_names(network.layout, work.rates)
        moving = set(self._names)
        layer_of = {entry.name: entry.layer for entry in network.layout.entries}
        for net in self._nets:
            net.module.train()
            for name, module in net.module.named_modules():
                if isinstance(module, nn.modules.batchnorm._BatchNorm):  # a frozen one keeps its statistics
                    module.train(work.rates.get(layer_of[f"{name}.running_mean"], 1.0) != 0)
            for name, tensor in net.tensors.items():
                if isinstance(tensor, nn.Parameter):
                    tensor.requires_grad_(name in moving)
        self._leaves = [[net[name] for name in self._names] for net in self._nets]
        self.parameters = [tensor for leaves in self._leaves for tensor in leaves]
        self.rates = [work.rates.get(layer_of[name], 1.0) for name in self._names] * len(self._nets)
        self._work = work

    def parts(self, values: Sequence[Tensor]) -> list[Tensor]:
        """Cut ``(d,)`` or ``(K, d)`` into tensors, model by model."""
        rows = values[0].expand(len(self._nets), -1)
        views = [self.layout.views(row) for row in rows]
        return [view[name] for view in views for name in self._names]

    def gradients(self, batch: Batch) -> tuple[Tensor, Sequence[Tensor]]:
        """Differentiate the models one after the other."""
        losses: list[Tensor] = []
        gradients: list[Tensor] = []
        for net, leaves in zip(self._nets, self._leaves, strict=True):
            loss = self._work.objective(net, batch, self._work.context)
            gradients += torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
            losses.append(loss.detach())
        return torch.stack(losses).unsqueeze(0), gradients

    def clipped(self, gradients: Sequence[Tensor], norm: float) -> list[Tensor]:
        """Clip model by model."""
        clipped: list[Tensor] = []
        size = len(self._names)
        for begin in range(0, len(gradients), size):
            own = list(gradients[begin : begin + size])
            found = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(own)))
            clipped += torch._foreach_mul(own, (norm / found).clamp(max=1.0))
        return clipped


class StackedModels:
    """K models of each of P clients as one ``(P, K, d)`` buffer, differentiated as one computation."""

    def __init__(self, network: Network, works: Sequence[Train]) -> None:
        first = works[0]
        self.flat = _rows([work.start for work in works], 1 if first.start.dim() == 1 else len(first.start)).clone()
        self._entries = network.layout.entries
        self._module = network.template.train()
        self._objective = first.objective
        self._context = {name: torch.stack([work.context[name] for work in works]) for name in first.context}
        moving = set(trainable_names(network.layout, first.rates))
        # Neighbours in the flat vector that move at one rate are one tensor to the optimiser.
        self._segments: list[tuple[int, int]] = []
        self.rates: list[float] = []
        self._inside: list[list[Entry]] = []
        for entry in self._entries:
            if entry.name not in moving:
                continue
            rate = first.rates.get(entry.layer, 1.0)
            if self._segments and self._segments[-1][1] == entry.start and self.rates[-1] == rate:
                self._segments[-1] = (self._segments[-1][0], entry.stop)
                self._inside[-1].append(entry)
            else:
                self._segments.append((entry.start, entry.stop))
                self.rates.append(rate)
                self._inside.append([entry])
        self._fixed = [entry for entry in self._entries if entry.name not in moving]
        self.parameters = [self.flat[..., start:stop] for start, stop in self._segments]
        models = torch.func.vmap(self._loss, in_dims=(0, 0, None, None), randomness="error")
        self._losses = torch.func.vmap(models, in_dims=(0, 0, 0, 0), randomness="error")

    def parts(self, values: Sequence[Tensor]) -> list[Tensor]:
        """Cut P vectors ``(d,)`` or ``(K, d)`` into segments ``(P, K, s)``."""
        rows = _rows(values, self.flat.shape[1])
        return [rows[..., start:stop] for start, stop in self._segments]

    def gradients(self, batch: Batch) -> tuple[Tensor, Sequence[Tensor]]:
        """Differentiate the models of the first A clients, to whom the batch ``(A, B, ...)`` belongs."""
        active = len(batch.y)
        moving = [tensor[:active].detach().requires_grad_() for tensor in self.parameters]
        fixed = {e.name: self.flat[:active, :, e.start : e.stop] for e in self._fixed}
        context = {name: value[:active] for name, value in self._context.items()}
        losses = self._losses(moving, fixed, (batch.x, batch.y, batch.weight), context)
        # The models have nothing in common, so the gradient of the sum holds that of each.
        return losses.detach(), torch.autograd.grad(losses.sum(), moving)

    def clipped(self, gradients: Sequence[Tensor], norm: float) -> list[Tensor]:
        """Clip the gradients of all models at once."""
        found = torch.stack([gradient.square().sum(dim=-1) for gradient in gradients]).sum(dim=0).sqrt()
        factor = (norm / found).clamp(max=1.0).unsqueeze(-1)
        return [gradient * factor for gradient in gradients]

    def _loss(
        self,
        moving: Sequence[Tensor],
        fixed: Mapping[str, Tensor],
        batch: tuple[Tensor, Tensor, Tensor | None],
        context: Context,
    ) -> Tensor:
        tensors = {e.name: fixed[e.name].view(e.shape) for e in self._fixed}
        for segment, entries in zip(moving, self._inside, strict=True):
            pieces = torch.split(segment, [e.stop - e.start for e in entries])
            tensors |= {e.name: piece.view(e.shape) for e, piece in zip(entries, pieces, strict=True)}
        return self._objective(FunctionalNet(self._module, tensors), Batch(*batch), context)


class Trainer:
    """Carries out :class:`Train` and :class:`Forward` on a device."""

    def __init__(self, settings: TrainSettings, device: torch.device) -> None:
        self.settings = settings
        self.device = device
        if device.type == "cuda":
            torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = settings.precision == "tf32"
        self.interrupted = Event()
        """Set from another thread to end all training at the next step."""

    def stacks(self, network: Network, models: int) -> bool:
        """Tell whether so many models are trained as one stacked computation.

        The setting ``stack`` decides. `auto` stacks on a GPU; on a CPU it stacks small networks without
        convolutions, whose time goes into calls rather than arithmetic.
        """
        if models < 2 or network.has_buffers or self.settings.stack == "loop":
            return False
        if self.settings.stack == "vmap" or self.device.type == "cuda":
            return True
        return not network.convolves and network.layout.size <= SMALL

    def capacity(self, network: Network) -> int:
        """Return how many models of a network may be trained at once, by the memory that there is for them.

        An estimate: parameters, gradients, momentum, anchor and result, and as much again for activations.
        """
        free = STACK_BYTES
        if self.device.type == "cuda":  # what PyTorch holds from earlier rounds, but does not use, is free to it
            held = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
            free = torch.cuda.mem_get_info(self.device)[0] + held
        return max(1, int(0.8 * free) // (10 * 4 * network.layout.size))

    def train(self, job: Job, network: Network) -> Trained:
        """Run one client's local SGD (momentum starts at zero).

        Raises
        ------
        TrainingDivergedError
            If the loss or a parameter is no longer finite.
        """
        (result,) = self.train_together([job], network)
        if isinstance(result, TrainingDivergedError):
            raise result
        return result

    def train_together(self, jobs: Sequence[Job], network: Network) -> list[Trained | TrainingDivergedError]:
        """Run the local SGD of several clients, every one with the steps that it would take alone.

        Parameters
        ----------
        jobs : sequence of Job
            All of one :func:`kind`; more than one are a stacked computation.
        network : Network
            The network that they train.

        Raises
        ------
        ValueError
            If a client has no batch to train on.
        TrainingInterruptedError
            If :attr:`interrupted` is set meanwhile.
        """
        smallest = network.smallest_batch
        for job in jobs:
            if len(job.samples.y) < smallest:
                raise ValueError(
                    f"no mini-batch to train on: {len(job.samples.y)} samples, and BatchNorm needs two in a batch"
                )
        single = jobs[0].work.start.dim() == 1
        if len(jobs) > 1 or self.stacks(network, 1 if single else len(jobs[0].work.start)):
            schedule = Schedule(
                [self._share(job, smallest) for job in jobs], self.settings.batch_size, smallest, self.device
            )
            places = schedule.order
            jobs = [jobs[i] for i in places]
            models: Models = StackedModels(network, [job.work for job in jobs])
            loss = self._run(models, jobs, schedule) / schedule.seen
        else:
            places = [0]
            models = LoopedModels(network, jobs[0].work)
            loss = self._run_alone(models, jobs[0], smallest)
        finite = (torch.isfinite(loss) & torch.isfinite(models.flat.sum(dim=-1))).all(dim=1).tolist()
        results: list[Trained | TrainingDivergedError] = [TrainingDivergedError()] * len(jobs)
        for row, place in enumerate(places):
            if finite[row]:
                parameters = models.flat[row].clone()
                results[place] = Trained(
                    parameters[0] if single else parameters, loss[row, 0] if single else loss[row].clone()
                )
            else:
                results[place] = TrainingDivergedError(
                    f"training diverged: the loss of the last epoch is {loss[row].tolist()}; "
                    f"a smaller lr than {jobs[row].lr:g} may help"
                )
        return results

    def _autocast(self) -> torch.autocast:
        # Without its cache, which a step has no use for: one that is not cleared holds weights of earlier steps.
        enabled = self.settings.precision == "bfloat16"
        return torch.autocast(self.device.type, torch.bfloat16, enabled=enabled, cache_enabled=False)

    def _run(self, models: Models, jobs: Sequence[Job], schedule: Schedule) -> Tensor:
        """Train and return the summed losses ``(P, K)`` of the last epoch."""
        optimiser = SGD(self.settings, models, jobs)
        total = torch.zeros(models.flat.shape[:2], device=self.device)
        for batch, counted in schedule:
            with self._autocast():
                losses, gradients = models.gradients(batch)
            optimiser.step(gradients)
            total[: len(losses)] += losses * counted
            self._check_interrupted()
        return total

    def _run_alone(self, models: Models, job: Job, smallest: int) -> Tensor:
        """Train one client's models and return the mean losses ``(1, K)`` of the last epoch."""
        optimiser = SGD(self.settings, models, [job])
        share = self._share(job, smallest)
        total = torch.zeros(models.flat.shape[:2], device=self.device)
        seen = 0
        for steps in share.epochs:
            total.zero_()
            seen = 0
            for batch in batches(
                job.samples, share.weight, self.settings.batch_size, steps, job.generator, smallest, share.odds,
                job.augment,
            ):  # fmt: skip
                with self._autocast():
                    losses, gradients = models.gradients(batch)
                optimiser.step(gradients)
                total += losses * len(batch.y)
                seen += len(batch.y)
                self._check_interrupted()
        return total / seen

    def _share(self, job: Job, smallest: int) -> Share:
        work, count, size = job.work, len(job.samples.y), self.settings.batch_size
        steps = work.steps if work.steps is not None else (0 if work.epochs is not None else self.settings.local_steps)
        epochs = work.epochs if work.epochs is not None else self.settings.local_epochs
        plan = plan_epochs(epochs, steps, count, size, smallest)
        weight, odds = (None, work.sample_weight) if work.resample else (work.sample_weight, None)
        return Share(job.samples, weight, plan, job.generator, job.augment, odds)

    def _check_interrupted(self) -> None:
        if self.interrupted.is_set():
            raise TrainingInterruptedError("local training was told to stop")

    def forward(self, work: Forward, network: Network, samples: Samples) -> Any:
        """Return the outputs of the model or models in evaluation mode."""
        return self.forward_together([work], network, [samples])[0]

    @torch.no_grad()
    def forward_together(self, works: Sequence[Forward], network: Network, samples: Sequence[Samples]) -> list[Any]:
        """Return the outputs for several clients.

        Where all have the same parameters, their samples are one sequence; else the models, of one shape,
        are one stacked computation.
        """
        first = works[0].parameters
        with self._autocast():
            if all(work.parameters is first for work in works):
                inputs = samples[0].x if len(samples) == 1 else torch.cat([each.x for each in samples])
                outputs = self._forward_alone(works[0], network, inputs)
                results = _cut(outputs, [len(each.y) for each in samples])
            else:
                results = self._forward_stacked(works, network, samples)
        return [_map(torch.Tensor.float, result) for result in results]

    def _forward_alone(self, work: Forward, network: Network, inputs: Tensor) -> Any:
        single = work.parameters.dim() == 1
        parameters = work.parameters.unsqueeze(0) if single else work.parameters
        network.stack(len(parameters)).copy_(parameters)
        outputs = []
        for net in network.nets[: len(parameters)]:
            net.module.eval()
            outputs.append(_join([net(x) for x in torch.split(inputs, EVALUATION_BATCH)], 0))
        return outputs[0] if single else _map(torch.stack, outputs)

    def _forward_stacked(self, works: Sequence[Forward], network: Network, samples: Sequence[Samples]) -> list[Any]:
        single = works[0].parameters.dim() == 1
        order = sorted(range(len(works)), key=lambda i: -len(samples[i].y))
        counts = torch.tensor([len(samples[i].y) for i in order])
        flat = _rows([works[i].parameters for i in order], 1 if single else len(works[0].parameters))
        inputs = torch.cat([samples[i].x for i in order])
        starts = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)[:-1]])
        module = network.template.eval()

        def outputs(row: Tensor, x: Tensor) -> Any:
            return torch.func.functional_call(module, network.layout.views(row), (x,))

        compute = torch.func.vmap(torch.func.vmap(outputs, in_dims=(0, None)), in_dims=(0, 0))
        width = max(1, EVALUATION_BATCH // len(works))
        pieces: list[list[Any]] = [[] for _ in works]
        for begin in range(0, int(counts[0]), width):
            active = int((counts > begin).sum())
            columns = torch.arange(begin, min(begin + width, int(counts[0])))
            index = starts[:active, None] + torch.minimum(columns[None, :], counts[:active, None] - 1)
            result = compute(flat[:active], inputs[index.to(inputs.device)])
            for place in range(active):
                held = min(int(counts[place]) - begin, width)
                pieces[order[place]].append(_map(lambda t, p=place, h=held: t[p, :, :h], result))
        joined = [_join(piece, 1) if piece else None for piece in pieces]
        # A client without samples has outputs of no rows, like those of the others.
        like = next(piece for piece in joined if piece is not None)
        full = [_map(lambda t: t[:, :0], like) if piece is None else piece for piece in joined]
        return [_map(lambda t: t[0], piece) for piece in full] if single else full


class SGD:
    """SGD with clipping, momentum and weight decay over lists of tensors, with a factor on the rate of each.

    One fused call a step and group: the stock optimiser costs more than a small model's backward pass.
    Of stacked models the first A take a step where the gradients are those of A clients.
    """

    def __init__(self, settings: TrainSettings, models: Models, jobs: Sequence[Job]) -> None:
        work = jobs[0].work
        self.momentum = settings.momentum
        self.weight_decay = settings.weight_decay
        self.max_grad_norm = settings.max_grad_norm
        self._clipped = models.clipped
        groups: dict[float, list[int]] = {}
        for index, rate in enumerate(models.rates):
            groups.setdefault(jobs[0].lr * rate, []).append(index)
        self.groups = list(groups.items())
        self.parameters = models.parameters
        self.buffers: list[Tensor] = []
        self.strength = 0.0
        if work.pull is not None and work.pull.strength:
            self.strength = work.pull.strength
            self.anchors = models.parts([job.work.pull.anchor for job in jobs if job.work.pull is not None])
        self.masks: list[Tensor] = []
        if work.mask is not None:
            self.masks = models.parts([job.work.mask for job in jobs if job.work.mask is not None])

    @torch.no_grad()
    def step(self, grads: Sequence[Tensor]) -> None:
        """Update the parameters in place."""
        gradients = self._clipped(grads, self.max_grad_norm) if self.max_grad_norm else list(grads)
        parameters = _first(self.parameters, gradients)
        if self.weight_decay:
            gradients = list(torch._foreach_add(gradients, parameters, alpha=self.weight_decay))
        if self.strength:
            distance = torch._foreach_sub(parameters, _first(self.anchors, gradients))
            gradients = list(torch._foreach_add(gradients, distance, alpha=self.strength))
        if self.masks:
            gradients = list(torch._foreach_mul(gradients, _first(self.masks, gradients)))
        if self.momentum:
            if self.buffers:
                buffers = _first(self.buffers, gradients)
                torch._foreach_mul_(buffers, self.momentum)
                torch._foreach_add_(buffers, gradients)
                gradients = buffers
            else:
                self.buffers = gradients = [g.clone() for g in gradients]
        for rate, members in self.groups:
            if len(self.groups) == 1:
                torch._foreach_add_(parameters, gradients, alpha=-rate)
            else:
                torch._foreach_add_([parameters[i] for i in members], [gradients[i] for i in members], alpha=-rate)


def kind(job: Job, network: Any) -> Hashable:
    """Return what must agree between jobs that are trained together."""
    work = job.work
    return (
        network,
        work.objective,
        tuple(work.start.shape),
        tuple(sorted((name, tuple(value.shape), value.dtype) for name, value in work.context.items())),
        None if work.pull is None else (work.pull.strength, work.pull.anchor.dim()),
        tuple(sorted(work.rates.items())),
        work.mask is None,
        job.lr,
        job.augment is None,
    )


def trainable_names(layout: Layout, rates: Mapping[str, float]) -> list[str]:
    """Return the names of the tensors that a training moves."""
    if unknown := set(rates) - set(layout.layers):
        raise KeyError(f"rates name layers {sorted(unknown)}; the model has {layout.layers}")
    return [e.name for e in layout.entries if e.trainable and rates.get(e.layer, 1.0) != 0.0]


def _rows(values: Sequence[Tensor], models: int) -> Tensor:
    """Return one ``(d,)`` or ``(K, d)`` a client as ``(P, K, d)``; what all share is not copied."""
    rows = [value.expand(models, -1) for value in values[: 1 if all(v is values[0] for v in values) else None]]
    return torch.stack(rows) if len(rows) == len(values) else rows[0].expand(len(values), -1, -1)


def _first(tensors: list[Tensor], like: Sequence[Tensor]) -> list[Tensor]:
    """Return the leading part of tensors, as long as the gradients that they go with."""
    if not tensors or tensors[0].shape == like[0].shape:
        return tensors
    return [tensor[: len(like[0])] for tensor in tensors]


def _map(function: Callable[..., Any], output: Any) -> Any:
    """Apply a function to an output, to each tensor of one that is a tuple, or across a list of them."""
    if isinstance(output, list):
        if isinstance(output[0], tuple):
            return tuple(function(list(column)) for column in zip(*output, strict=True))
        return function(output)
    return tuple(map(function, output)) if isinstance(output, tuple) else function(output)


def _join(pieces: list[Any], dim: int) -> Any:
    """Concatenate the outputs of several batches."""
    return _map(lambda tensors: torch.cat(tensors, dim=dim), pieces)


def _cut(output: Any, lengths: list[int]) -> list[Any]:
    """Cut outputs along the samples, which are the last axis but one."""
    if len(lengths) == 1:
        return [output]
    if isinstance(output, tuple):
        return list(zip(*(tensor.split(lengths, dim=-2) for tensor in output), strict=True))
    return list(output.split(lengths, dim=-2))
