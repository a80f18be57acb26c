"""The networks that are trained: resident modules, one after the other, or stacked."""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from posy.client_app.training.batches import Batch
from posy.client_app.training.work import Context, Train
from posy.models.parameters import Entry, Layout


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


def trainable_names(layout: Layout, rates: Mapping[str, float]) -> list[str]:
    """Return the names of the tensors that a training moves."""
    if unknown := set(rates) - set(layout.layers):
        raise KeyError(f"rates name layers {sorted(unknown)}; the model has {layout.layers}")
    return [e.name for e in layout.entries if e.trainable and rates.get(e.layer, 1.0) != 0.0]


def _rows(values: Sequence[Tensor], models: int) -> Tensor:
    """Return one ``(d,)`` or ``(K, d)`` a client as ``(P, K, d)``; what all share is not copied."""
    rows = [value.expand(models, -1) for value in values[: 1 if all(v is values[0] for v in values) else None]]
    return torch.stack(rows) if len(rows) == len(values) else rows[0].expand(len(values), -1, -1)
