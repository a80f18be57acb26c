"""Networks during training: copies of a module that are trained one after the other, or stacked models."""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from itertools import accumulate, pairwise

import torch
from torch import Tensor, nn
from torch.func import vmap

from posy.client_app.training.batches import Batch
from posy.client_app.training.perceptron import ClosedForm, linear_layers
from posy.client_app.training.unfolded import unfold_convolutions
from posy.client_app.training.work import Context, Criterion, Net, Train, classification
from posy.models.layers import Dropout
from posy.models.parameters import Layout
from posy.sharing import is_shared


class Network:
    """A module and K copies of it, whose parameters are views of one ``(K, d)`` buffer.

    Loading a model takes one copy into the buffer, so no module is rebuilt between rounds. ``nets`` wraps the copies
    for use in objectives.
    """

    def __init__(
        self,
        build: Callable[[], nn.Module],
        layout: Layout,
        device: torch.device,
        criterion: Criterion | None = None,
    ) -> None:
        self._build = build
        self.criterion = criterion
        self.layout = layout
        self.device = device
        self._flat = torch.empty(0, layout.size, device=device)
        self.modules: list[nn.Module] = []
        self.nets: list[Net] = []

    @cached_property
    def template(self) -> nn.Module:
        """A module that can be called with any model's parameters."""
        module = self._build().to(self.device)
        return unfold_convolutions(module) if self.device.type == "cuda" else module

    @cached_property
    def smallest_batch(self) -> int:
        """Minimum number of samples in a step: two with a trained BatchNorm, because one sample has no variance."""
        trained = {entry.name for entry in self.layout.entries}
        kind = nn.modules.batchnorm._BatchNorm
        norms = [(name, module) for name, module in self.template.named_modules() if isinstance(module, kind)]
        fixed = all(norm.track_running_stats and f"{name}.running_mean" not in trained for name, norm in norms)
        return 1 if fixed else 2

    @cached_property
    def size(self) -> int:
        """Number of floating-point values in the network, including fixed tensors."""
        return sum(tensor.numel() for tensor in self.template.state_dict().values() if tensor.is_floating_point())

    @cached_property
    def linear_layers(self) -> list[str]:
        """Linear layers of a perceptron with cross-entropy and no fixed tensors, or an empty list otherwise."""
        layers = linear_layers(self.template) if self.criterion is None else []
        tensors = {f"{layer}.{kind}" for layer in layers for kind in ("weight", "bias")}
        return layers if tensors <= {entry.name for entry in self.layout.entries} else []

    def closed_form(self, work: Train) -> ClosedForm | None:
        """Return the closed-form gradients for a training request, or None if it needs autograd."""
        names = trainable_names(self.layout, work.rates)
        return ClosedForm(self.linear_layers, names) if self.is_closed(work) and names else None

    def is_closed(self, work: Train) -> bool:
        """Return whether the gradients for a training request have a closed form."""
        return work.objective is classification and bool(self.linear_layers)

    @cached_property
    def has_buffers(self) -> bool:
        """Whether training also changes buffers (such as BatchNorm's running statistics), which vmap would lose."""
        return not all(entry.trainable for entry in self.layout.entries)

    @cached_property
    def dropouts(self) -> dict[str, slice]:
        """Each dropout layer's columns in a batch's random numbers, keyed by the name of the layer's number tensor."""
        layers = {name: module for name, module in self.template.named_modules() if isinstance(module, Dropout)}
        ends = list(accumulate((layer.features for layer in layers.values()), initial=0))
        return {f"{name}.numbers": slice(*columns) for name, columns in zip(layers, pairwise(ends), strict=True)}

    @cached_property
    def dropout_width(self) -> int:
        """Number of random numbers that dropout needs for each sample."""
        return max((columns.stop for columns in self.dropouts.values()), default=0)

    @cached_property
    def convolves(self) -> bool:
        """Whether the network has convolutions."""
        return any(isinstance(m, nn.modules.conv._ConvNd) for m in self.template.modules())

    def stack(self, size: int) -> Tensor:
        """Return the buffer ``(size, d)``, each row of which contains the parameters of one copy of the module."""
        if len(self.nets) < size:
            self._flat = torch.empty(size, self.layout.size, device=self.device)
            self.modules = [self._build().to(self.device) for _ in range(size)]
            self.nets = [
                Net(module, _bound(module, self.layout.views(row)), resident=True, criterion=self.criterion)
                for module, row in zip(self.modules, self._flat, strict=True)
            ]
        return self._flat[:size]


class LoopedModels:
    """K models of one client, loaded into copies of a module and differentiated one after the other on each batch.

    ``count`` is K. ``flat`` ``(P, K, d)``, with P = 1, contains all parameters of the client's models. ``parameters``
    lists their trained tensors, and ``rates`` the learning-rate factors of these tensors.
    """

    def __init__(self, network: Network, work: Train) -> None:
        start = work.start if work.start.dim() == 2 else work.start.unsqueeze(0)
        self.layout = network.layout
        self.flat = network.stack(len(start)).unsqueeze(0)
        with torch.no_grad():
            self.flat.copy_(start)
        self._work = work
        self.count = len(start)
        self._nets = network.nets[: self.count]
        self._names = trainable_names(network.layout, work.rates)
        trained_names = set(self._names)
        layer_of = {entry.name: entry.layer for entry in network.layout.entries}
        for net, resident in zip(self._nets, network.modules, strict=False):
            resident.train(not work.measures)
            for name, module in resident.named_modules():
                if isinstance(module, nn.modules.batchnorm._NormBase):  # a frozen layer keeps its statistics
                    layer = layer_of.get(f"{name}.running_mean")
                    module.train(not work.measures and layer is not None and work.rates.get(layer, 1.0) != 0)
            for name, tensor in net.tensors.items():
                if isinstance(tensor, nn.Parameter):
                    tensor.requires_grad_(name in trained_names)
        self._dropouts = [
            (resident.get_submodule(name.removesuffix(".numbers")), columns)
            for resident in network.modules[: self.count]
            for name, columns in network.dropouts.items()
            if not work.measures
        ]
        self._leaves = [[net[name] for name in self._names] for net in self._nets]
        self._closed = network.closed_form(work)
        self.parameters = [tensor for leaves in self._leaves for tensor in leaves]
        self.auxiliary: list[Tensor] = []
        buffers = [entry.name for entry in network.layout.entries if not entry.trainable]
        self.statistics = [net[name] for net in self._nets for name in buffers]
        self.rates = [work.rates.get(layer_of[name], 1.0) for name in self._names] * len(self._nets)

    def parts(self, values: Sequence[Tensor]) -> list[Tensor]:
        """Split one client's vector ``(d,)`` or ``(K, d)`` into tensors with the shapes of ``parameters``."""
        rows = values[0].expand(len(self._nets), -1)
        views = [self.layout.views(row) for row in rows]
        return [view[name] for view in views for name in self._names]

    def joined(self, tensors: Sequence[Tensor]) -> Tensor:
        """Join tensors with the shapes of ``parameters`` into ``(P, K, d)``. All other entries are 0."""
        rows = torch.zeros_like(self.flat)
        for number, row in enumerate(rows[0]):
            views = self.layout.views(row)
            for name, tensor in zip(self._names, self.of_model(tensors, number), strict=True):
                views[name].copy_(tensor)
        return rows

    def gradients(self, batch: Batch) -> tuple[Tensor, Sequence[Tensor]]:
        """Return a batch's losses ``(P, K)`` and gradients, the latter with the shapes of ``parameters``."""
        if self._closed is not None and not autocasts(batch):
            of_client = Batch(batch.x[None], batch.y[None], None if batch.weight is None else batch.weight[None])
            results = [
                self._closed.gradients(net.tensors, lambda tensor: tensor[None], of_client) for net in self._nets
            ]
            return torch.stack([loss for loss, _ in results], dim=1), [t[0] for _, slopes in results for t in slopes]
        for layer, columns in self._dropouts:
            layer.numbers = _numbers_of(batch)[:, columns]
        losses: list[Tensor] = []
        gradients: list[Tensor] = []
        for net, leaves in zip(self._nets, self._leaves, strict=True):
            loss = self._work.objective(net, batch, self._work.context)
            gradients += torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
            losses.append(loss.detach())
        return torch.stack(losses).unsqueeze(0), gradients

    def norms(self, gradients: Sequence[Tensor]) -> Tensor:
        """Return the L2 norms ``(P, K)`` of the models' gradients."""
        tensor_norms = [torch._foreach_norm(self.of_model(gradients, number)) for number in range(len(self._nets))]
        return torch.stack([torch.linalg.vector_norm(torch.stack(norms)) for norms in tensor_norms]).unsqueeze(0)

    def resized(self, gradients: Sequence[Tensor], norm: float, *, enlarge: bool = False) -> list[Tensor]:
        """Scale each model's gradient down to at most this L2 norm or, with ``enlarge``, to exactly this norm."""
        resized: list[Tensor] = []
        for number, length in enumerate(self.norms(gradients)[0]):
            resized += torch._foreach_mul(self.of_model(gradients, number), _factor(norm, length, enlarge))
        return resized

    def of_model(self, tensors: Sequence[Tensor], number: int) -> list[Tensor]:
        """Return the tensors of one of the K models."""
        size = len(self._names)
        return list(tensors[number * size : (number + 1) * size])


class StackedModels:
    """K models of each of P clients, differentiated as one computation.

    Each tensor ``(P, K, ...)`` stacks the corresponding tensors of all models. The class has the same attributes and
    methods as :class:`LoopedModels`.
    """

    def __init__(self, network: Network, works: Sequence[Train]) -> None:
        first, starts = works[0], rows_of([work.start for work in works])
        self.layout = network.layout
        # Views of the vectors are not contiguous, so each matrix product would copy them again.
        views = self.layout.views(starts)
        self._tensors = {name: view.clone(memory_format=torch.contiguous_format) for name, view in views.items()}
        self._names = trainable_names(self.layout, first.rates)
        layer_of = {entry.name: entry.layer for entry in self.layout.entries}
        self.rates = [first.rates.get(layer_of[name], 1.0) for name in self._names]
        self.parameters = [self._tensors[name] for name in self._names]
        self.auxiliary: list[Tensor] = []
        self.statistics: list[Tensor] = []  # a network with buffers is never stacked
        self._module = network.template.train(not first.measures)
        for module in self._module.modules():  # a stacked network has no running statistics to train
            if isinstance(module, nn.modules.batchnorm._NormBase):
                module.eval()
        self._criterion = network.criterion
        self._objective = first.objective
        self._context = {name: torch.stack([work.context[name] for work in works]) for name in first.context}
        self._dropouts = {} if first.measures else network.dropouts
        fields = (first.notes is None, not self._dropouts)
        batches = Batch(0, 0, 0, *(None if is_absent else 0 for is_absent in fields))  # type: ignore[arg-type]
        self.count = starts.shape[1]
        # A single model has no model axis, because this axis would slow down every operation.
        models = vmap(self._loss, in_dims=(0, None, None), randomness="error") if self.count > 1 else self._loss
        self._losses = vmap(models, in_dims=(0, batches, 0), randomness="error")
        self._closed = network.closed_form(first)

    @property
    def flat(self) -> Tensor:
        """A copy of all parameters ``(P, K, d)``."""
        return torch.cat([self._tensors[entry.name].flatten(2) for entry in self.layout.entries], dim=-1)

    def parts(self, values: Sequence[Tensor]) -> list[Tensor]:
        """Split P vectors ``(d,)`` or ``(K, d)`` into tensors with the shapes of ``parameters``."""
        views = by_tensor(self.layout, rows_of(values, self.count))
        return [views[name] for name in self._names]

    def joined(self, tensors: Sequence[Tensor]) -> Tensor:
        """Join tensors with the shapes of ``parameters`` into ``(P, K, d)``. All other entries are 0."""
        rows = torch.zeros_like(self.flat)
        views = self.layout.views(rows)
        for name, tensor in zip(self._names, tensors, strict=True):
            views[name].copy_(tensor)
        return rows

    def gradients(self, batch: Batch) -> tuple[Tensor, Sequence[Tensor]]:
        """Return the losses ``(A, K)`` and gradients of the first A clients' models on batches ``(A, B, ...)``."""
        active = len(batch.y)
        if self._closed is not None and not autocasts(batch):
            samples = (batch.x, batch.y) if batch.weight is None else (batch.x, batch.y, batch.weight)
            model_batch = Batch(*(tensor.repeat_interleave(self.count, 0) for tensor in samples))
            losses, slopes = self._closed.gradients(
                self._tensors, lambda tensor: tensor[:active].flatten(0, 1), model_batch
            )
            return losses.view(active, -1), [gradient.view(active, -1, *gradient.shape[1:]) for gradient in slopes]
        tensors = {name: tensor[:active].detach() for name, tensor in self._tensors.items()}
        leaves = [tensors[name].requires_grad_() for name in self._names]
        models = tensors if self.count > 1 else {name: tensor[:, 0] for name, tensor in tensors.items()}
        losses = self._losses(models, batch, {name: value[:active] for name, value in self._context.items()})
        # The models share no parameters, so the gradient of the sum contains the gradient of each loss.
        gradients = torch.autograd.grad(losses.sum(), leaves, allow_unused=True, materialize_grads=True)
        return losses.detach().view(active, -1), gradients

    def norms(self, gradients: Sequence[Tensor]) -> Tensor:
        """Return the L2 norms ``(P, K)`` of the models' gradients."""
        return torch.stack([gradient.flatten(2).square().sum(dim=-1) for gradient in gradients]).sum(dim=0).sqrt()

    def resized(self, gradients: Sequence[Tensor], norm: float, *, enlarge: bool = False) -> list[Tensor]:
        """Scale each model's gradient, as :meth:`LoopedModels.resized` does."""
        factor = _factor(norm, self.norms(gradients), enlarge)
        return [gradient * factor.view(*factor.shape, *[1] * (gradient.dim() - 2)) for gradient in gradients]

    def of_model(self, tensors: Sequence[Tensor], number: int) -> list[Tensor]:
        """Return the tensors of model ``number`` (one of K) for every client."""
        return [tensor[:, number] for tensor in tensors]

    def _loss(self, tensors: Mapping[str, Tensor], batch: Batch, context: Context) -> Tensor:
        numbers = {name: _numbers_of(batch)[:, columns] for name, columns in self._dropouts.items()}
        net = Net(self._module, tensors, numbers=numbers, criterion=self._criterion)
        return self._objective(net, batch, context)


Models = LoopedModels | StackedModels


def _numbers_of(batch: Batch) -> Tensor:
    assert batch.numbers is not None  # the trainer has checked this
    return batch.numbers


def _factor(norm: float, lengths: Tensor, enlarge: bool) -> Tensor:
    """Return the factors that scale vectors of the given lengths to a norm. The factor of a zero vector is 1."""
    factor = norm / lengths.clamp_min(torch.finfo(lengths.dtype).tiny)
    return torch.where(lengths > 0, factor, 1.0) if enlarge else factor.clamp(max=1.0)


def autocasts(batch: Batch) -> bool:
    """Return whether autocast changes the precision of operations on a batch."""
    return torch.is_autocast_enabled(batch.y.device.type)


def trainable_names(layout: Layout, rates: Mapping[str, float]) -> list[str]:
    """Return the names of the tensors that training changes."""
    if unknown := set(rates) - set(layout.layers):
        raise KeyError(f"rates names the unknown layers {sorted(unknown)}; the model has {layout.layers}")
    return [e.name for e in layout.entries if e.trainable and rates.get(e.layer, 1.0) != 0.0]


def rows_of(values: Sequence[Tensor], models: int | None = None) -> Tensor:
    """Stack P tensors ``(d,)`` or ``(K, d)``, one per client, into ``(P, K, d)``. A shared tensor is not copied.

    With ``models`` = K, a single vector is repeated for all K models.
    """
    models = models or (1 if values[0].dim() == 1 else len(values[0]))
    if is_shared(values) and len(values) > 1:
        return values[0].expand(models, -1).expand(len(values), -1, -1)
    return torch.stack([value.expand(models, -1) for value in values])


def by_tensor(layout: Layout, rows: Tensor) -> dict[str, Tensor]:
    """Return the tensors ``(P, K, ...)`` of vectors ``(P, K, d)``, keyed by name and contiguous in memory."""
    return {name: view.contiguous() for name, view in layout.views(rows).items()}


def _bound(module: nn.Module, views: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Replace a module's parameters and buffers with views, and return the new tensors, keyed by name."""
    tensors: dict[str, Tensor] = {}
    for name, view in views.items():
        owner, _, attribute = name.rpartition(".")
        holder = module.get_submodule(owner)
        if attribute in holder._parameters:
            tensors[name] = holder._parameters[attribute] = nn.Parameter(view, requires_grad=True)
        else:
            tensors[name] = holder._buffers[attribute] = view
    return tensors
