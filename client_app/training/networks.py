"""The networks that are trained: resident modules, one after the other, or stacked."""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.func import vmap

from posy.client_app.training.batches import Batch
from posy.client_app.training.work import Context, Net, Train
from posy.models.parameters import Entry, Layout
from posy.sharing import is_shared


class Network:
    """A module and K resident copies of it whose parameters are views of one ``(K, d)`` buffer.

    Loading a model is one copy into the buffer; nothing is built again between rounds. ``nets`` are the copies as
    objectives see them.
    """

    def __init__(self, build: Callable[[], nn.Module], layout: Layout, device: torch.device) -> None:
        self._build = build
        self.layout = layout
        self.device = device
        self._flat = torch.empty(0, layout.size, device=device)
        self.modules: list[nn.Module] = []
        self.nets: list[Net] = []

    @cached_property
    def template(self) -> nn.Module:
        """A module to be evaluated with parameters from outside."""
        return self._build().to(self.device)

    @cached_property
    def smallest_batch(self) -> int:
        """Samples that a training step needs: BatchNorm has no variance for one."""
        return 2 if any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in self.template.modules()) else 1

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
            self._flat = torch.empty(size, self.layout.size, device=self.device)
            self.modules = [self._build().to(self.device) for _ in range(size)]
            self.nets = [
                Net(module, _bound(module, self.layout.views(row)), resident=True)
                for module, row in zip(self.modules, self._flat, strict=True)
            ]
        return self._flat[:size]


class LoopedModels:
    """K models of one client as resident modules, differentiated one after the other on each batch.

    ``flat`` holds all parameters ``(P, K, d)`` of the models of P clients, here one; ``parameters`` are views of what
    moves in it, ``rates`` the factors on their learning rates.
    """

    def __init__(self, network: Network, work: Train) -> None:
        start = work.start if work.start.dim() == 2 else work.start.unsqueeze(0)
        self.layout = network.layout
        self.flat = network.stack(len(start)).unsqueeze(0)
        with torch.no_grad():
            self.flat.copy_(start)
        self._work = work
        self._nets = network.nets[: len(start)]
        self._names = trainable_names(network.layout, work.rates)
        moving = set(self._names)
        layer_of = {entry.name: entry.layer for entry in network.layout.entries}
        for net, resident in zip(self._nets, network.modules, strict=False):
            resident.train()
            for name, module in resident.named_modules():
                if isinstance(module, nn.modules.batchnorm._BatchNorm):  # a frozen one keeps its statistics
                    module.train(work.rates.get(layer_of[f"{name}.running_mean"], 1.0) != 0)
            for name, tensor in net.tensors.items():
                if isinstance(tensor, nn.Parameter):
                    tensor.requires_grad_(name in moving)
        self._leaves = [[net[name] for name in self._names] for net in self._nets]
        self.parameters = [tensor for leaves in self._leaves for tensor in leaves]
        self.rates = [work.rates.get(layer_of[name], 1.0) for name in self._names] * len(self._nets)

    def parts(self, values: Sequence[Tensor]) -> list[Tensor]:
        """Cut one vector ``(d,)`` or ``(K, d)`` a client into the shapes of ``parameters``."""
        rows = values[0].expand(len(self._nets), -1)
        views = [self.layout.views(row) for row in rows]
        return [view[name] for view in views for name in self._names]

    def gradients(self, batch: Batch) -> tuple[Tensor, Sequence[Tensor]]:
        """Return the losses ``(P, K)`` of a batch and the gradients, in the shapes of ``parameters``."""
        losses: list[Tensor] = []
        gradients: list[Tensor] = []
        for net, leaves in zip(self._nets, self._leaves, strict=True):
            loss = self._work.objective(net, batch, self._work.context)
            gradients += torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
            losses.append(loss.detach())
        return torch.stack(losses).unsqueeze(0), gradients

    def norms(self, gradients: Sequence[Tensor]) -> Tensor:
        """Return the L2 norms ``(P, K)`` of the models' gradients."""
        each = [torch._foreach_norm(self.of_model(gradients, number)) for number in range(len(self._nets))]
        return torch.stack([torch.linalg.vector_norm(torch.stack(norms)) for norms in each]).unsqueeze(0)

    def resized(self, gradients: Sequence[Tensor], norm: float, *, enlarge: bool = False) -> list[Tensor]:
        """Return the gradients, those of each model scaled down to an L2 norm that they exceed, or up to it too."""
        resized: list[Tensor] = []
        for number, found in enumerate(self.norms(gradients)[0]):
            resized += torch._foreach_mul(self.of_model(gradients, number), _factor(norm, found, enlarge))
        return resized

    def of_model(self, tensors: Sequence[Tensor], number: int) -> list[Tensor]:
        """Return what belongs to one of the K models."""
        size = len(self._names)
        return list(tensors[number * size : (number + 1) * size])


class StackedModels:
    """K models of each of P clients as one ``(P, K, d)`` buffer, differentiated as one computation.

    It has the attributes and methods of :class:`LoopedModels`.
    """

    def __init__(self, network: Network, works: Sequence[Train]) -> None:
        first = works[0]
        self.flat = rows_of([work.start for work in works]).clone()
        self._module = network.template.train()
        self._objective = first.objective
        self._context = {name: torch.stack([work.context[name] for work in works]) for name in first.context}
        moving = set(trainable_names(network.layout, first.rates))
        # Neighbours in the flat vector that move at one rate are one tensor to the optimiser.
        self._segments: list[list[Entry]] = []
        self.rates: list[float] = []
        for entry in network.layout.entries:
            if entry.name not in moving:
                continue
            rate = first.rates.get(entry.layer, 1.0)
            if self._segments and self._segments[-1][-1].stop == entry.start and self.rates[-1] == rate:
                self._segments[-1].append(entry)
            else:
                self._segments.append([entry])
                self.rates.append(rate)
        self._fixed = [entry for entry in network.layout.entries if entry.name not in moving]
        self.parameters = self._cut(self.flat)
        models = vmap(self._loss, in_dims=(0, 0, None, None), randomness="error")
        batches = Batch(0, 0, 0, None if first.notes is None else 0)  # type: ignore[arg-type]
        self._losses = vmap(models, in_dims=(0, 0, batches, 0), randomness="error")

    def parts(self, values: Sequence[Tensor]) -> list[Tensor]:
        """Cut P vectors ``(d,)`` or ``(K, d)`` into segments ``(P, K, s)``."""
        return self._cut(rows_of(values, self.flat.shape[1]))

    def gradients(self, batch: Batch) -> tuple[Tensor, Sequence[Tensor]]:
        """Differentiate the models of the first A clients, to which the batch ``(A, B, ...)`` belongs."""
        active = len(batch.y)
        moving = [tensor[:active].detach().requires_grad_() for tensor in self.parameters]
        fixed = {e.name: self.flat[:active, :, e.start : e.stop] for e in self._fixed}
        context = {name: value[:active] for name, value in self._context.items()}
        losses = self._losses(moving, fixed, batch, context)
        # The models have nothing in common, so the gradient of the sum holds that of each.
        return losses.detach(), torch.autograd.grad(losses.sum(), moving)

    def norms(self, gradients: Sequence[Tensor]) -> Tensor:
        """Return the L2 norms ``(P, K)`` of the models' gradients."""
        return torch.stack([gradient.square().sum(dim=-1) for gradient in gradients]).sum(dim=0).sqrt()

    def resized(self, gradients: Sequence[Tensor], norm: float, *, enlarge: bool = False) -> list[Tensor]:
        """Scale the gradients of all models at once."""
        factor = _factor(norm, self.norms(gradients), enlarge).unsqueeze(-1)
        return [gradient * factor for gradient in gradients]

    def of_model(self, tensors: Sequence[Tensor], number: int) -> list[Tensor]:
        """Return what belongs to one of the K models of each client."""
        return [tensor[:, number] for tensor in tensors]

    def _cut(self, rows: Tensor) -> list[Tensor]:
        return [rows[..., entries[0].start : entries[-1].stop] for entries in self._segments]

    def _loss(self, moving: Sequence[Tensor], fixed: Mapping[str, Tensor], batch: Batch, context: Context) -> Tensor:
        tensors = {e.name: fixed[e.name].view(e.shape) for e in self._fixed}
        for segment, entries in zip(moving, self._segments, strict=True):
            pieces = torch.split(segment, [e.stop - e.start for e in entries])
            tensors |= {e.name: piece.view(e.shape) for e, piece in zip(entries, pieces, strict=True)}
        return self._objective(Net(self._module, tensors), batch, context)


Models = LoopedModels | StackedModels


def _factor(norm: float, found: Tensor, enlarge: bool) -> Tensor:
    """Return what scales vectors of some norms to another one; one of zeros stays as it is."""
    factor = norm / found.clamp_min(torch.finfo(found.dtype).tiny)
    return torch.where(found > 0, factor, 1.0) if enlarge else factor.clamp(max=1.0)


def trainable_names(layout: Layout, rates: Mapping[str, float]) -> list[str]:
    """Return the names of the tensors that a training moves."""
    if unknown := set(rates) - set(layout.layers):
        raise KeyError(f"rates name layers {sorted(unknown)}; the model has {layout.layers}")
    return [e.name for e in layout.entries if e.trainable and rates.get(e.layer, 1.0) != 0.0]


def rows_of(values: Sequence[Tensor], models: int | None = None) -> Tensor:
    """Return one ``(d,)`` or ``(K, d)`` a client as ``(P, K, d)``; what all share is not copied.

    Where K is given, a single vector stands for all K models.
    """
    models = models or (1 if values[0].dim() == 1 else len(values[0]))
    if is_shared(values) and len(values) > 1:
        return values[0].expand(models, -1).expand(len(values), -1, -1)
    return torch.stack([value.expand(models, -1) for value in values])


def _bound(module: nn.Module, views: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Let a module's parameters and buffers be some views, and return them by name."""
    tensors: dict[str, Tensor] = {}
    for name, view in views.items():
        owner, _, attribute = name.rpartition(".")
        holder = module.get_submodule(owner)
        if attribute in holder._parameters:
            tensors[name] = holder._parameters[attribute] = nn.Parameter(view, requires_grad=True)
        else:
            tensors[name] = holder._buffers[attribute] = view
    return tensors
