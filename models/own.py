"""Custom networks: any module with a linear head, inspected and wrapped for the methods."""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from posy.data.task import Task
from posy.extensions import format_error, load
from posy.models.chain import ChainModel
from posy.models.layers import Dropout, LowRankLinear, linear
from posy.models.parameters import fixed_tensors
from posy.settings import SettingsError, nearest

TORCHVISION = "torchvision:"
"""Prefix of the names of torchvision's networks."""
_PROBES = 2
"""Number of samples that Posy uses to check a new network."""


class Described(NamedTuple):
    """A network, and optionally the names of its head and of the modules that are its layers, in order."""

    module: nn.Module
    layers: tuple[str, ...] = ()
    head: str = ""


class CustomModel(ChainModel):
    """A custom module as a single block and its linear head; methods can still choose from the module's layers."""

    def __init__(
        self, body: nn.Module, head: nn.Linear | LowRankLinear, layers: Mapping[str, str], head_path: str
    ) -> None:
        super().__init__({"body": body}, head)
        self._paths = dict(layers)
        self._head_path = head_path

    @property
    def layer_names(self) -> tuple[str, ...]:
        """Names of the layers from input to output, then ``head``."""
        return (*self._paths, "head")

    @property
    def fully_connected(self) -> tuple[str, ...]:
        """Names of the linear layers, including the head but not subclasses of ``nn.Linear`` such as adapters."""
        kinds = (nn.Linear, LowRankLinear)
        linears = [name for name, path in self._paths.items() if path and type(self.layer(name)) in kinds]
        return (*linears, "head")

    def layer(self, name: str) -> nn.Module:
        """Return a layer by its name; tensors outside all submodules form a separate layer."""
        if name == "head":
            return self.head
        path = self._paths[name]
        if path:
            return self.blocks["body"].get_submodule(path)
        outside = nn.Module()
        outside._parameters.update(self.blocks["body"]._parameters)
        outside._buffers.update(self.blocks["body"]._buffers)
        return outside

    def given_names(self, names: Iterable[str]) -> dict[str, str]:
        """Map the names of tensors in this network to their names in the user's module."""
        body, head = "blocks.body.", "head."
        return {
            name: name.removeprefix(body) if name.startswith(body) else f"{self._head_path}.{name.removeprefix(head)}"
            for name in names
        }

    def stem(self, name: str) -> str:
        """Return the prefix of the names of a fully connected layer's tensors."""
        return "head." if name == "head" else f"blocks.body.{self._paths[name]}."


class CustomDropout(Dropout):
    """Dropout for inputs of any shape: ``numbers`` ``(B, features)`` are reshaped to the mask ``(B, *shape)``."""

    def __init__(self, shape: tuple[int, ...], probability: float) -> None:
        super().__init__(int(torch.Size(shape).numel()), probability)
        self.shape = shape

    def forward(self, x: Tensor) -> Tensor:
        """Zero the entries whose numbers are below the probability."""
        if not self.training or self.numbers is None:
            return x
        mask = (self.numbers >= self.probability).view(len(x), *self.shape)
        return x * mask / (1 - self.probability)


def build_custom(name: str, task: Task, ranks: Mapping[str, int]) -> CustomModel:
    """Build the network that the setting ``model`` names as ``file:function`` or ``torchvision:name``.

    Raises
    ------
    SettingsError
        If the network is not available or does not suit the task.
    """
    source = f"model = {name!r}"
    generator = torch.get_rng_state()
    module, layers, head = _load_network(name, task, source)
    _check_parameters(module, source)
    is_tested = (name, task) in _SOUND
    if not is_tested and (fixed := fixed_tensors(module)):
        _check_constant(module, fixed, lambda: _load_network(name, task, source).module, generator, source)
    probe = _probe(task)
    _replace_dropout(module, probe, source)
    logits_before = None if is_tested else _logits(module, probe, task, source)
    head = head or next((path for path, part in reversed(list(module.named_modules())) if type(part) is nn.Linear), "")
    parts = dict(module.named_modules())
    if not head or type(parts.get(head)) is not nn.Linear:
        problem = f"{head!r} is {type(parts[head]).__name__ if head in parts else 'not one of its modules'}"
        raise SettingsError(f"{source}: its head must be an nn.Linear; " + (problem if head else "it has none"))
    head_layer = parts[head]
    assert isinstance(head_layer, nn.Linear)
    if head_layer.out_features != task.num_classes:
        raise SettingsError(
            f"{source}: its head {head} has {head_layer.out_features} outputs; there are {task.num_classes} classes"
        )
    _put(module, head, nn.Identity())
    layer_paths = _layers(module, layers, source)
    for layer, path in layer_paths.items():
        rank = ranks.get(layer)
        part = module.get_submodule(path) if path else None
        if rank is not None and type(part) is nn.Linear:
            _put(module, path, _reduced(part, rank))
    network = CustomModel(
        module, _reduced(head_layer, ranks["head"]) if "head" in ranks else head_layer, layer_paths, head
    )
    if logits_before is not None and not ranks:
        _check_repeats(network, probe, source)
        logits_after = _logits(network, probe, task, source)
        if not torch.allclose(logits_before, logits_after, atol=1e-5):
            raise SettingsError(f"{source}: its output is not the output of its head {head}; the head must come last")
        _SOUND.add((name, task))
    return network


def _reduced(layer: nn.Linear, rank: int) -> nn.Linear | LowRankLinear:
    """Return a new low-rank layer with the shape of a given layer, and with a bias only if that layer has one."""
    return linear(layer.in_features, layer.out_features, rank, layer.bias is not None)


def _load_network(name: str, task: Task, source: str) -> Described:
    """Return the :class:`Described` network that a name refers to."""
    if name.startswith(TORCHVISION):
        from torchvision import models  # noqa: PLC0415 - importing it takes a second

        title = name.removeprefix(TORCHVISION)
        if title not in (names := models.list_models(module=models)):  # only networks that classify whole images
            near = nearest(title, names)
            hint = f"did you mean {TORCHVISION}{near}?" if near else f"it has {', '.join(names)}"
            raise SettingsError(f"{source}: torchvision does not have this network for classification; {hint}")
        return Described(_called(lambda: models.get_model(title, weights=None, num_classes=task.num_classes), source))
    build = load(name, "model")
    if not callable(build):
        raise SettingsError(f"{source}: it is not a function, but {type(build).__name__}")
    returned = _called(lambda: build(task), source)
    described = returned if isinstance(returned, Described) else Described(returned)
    if not isinstance(described.module, nn.Module):
        raise SettingsError(f"{source}: it must return a torch.nn.Module, not {type(described.module).__name__}")
    return described


def _called(build: Callable[[], Any], source: str) -> Any:
    try:
        return build()
    except SettingsError:
        raise
    except Exception as error:  # the user's code may raise anything
        raise SettingsError(f"{source}: it raised {format_error(error)}") from error


def _check_parameters(module: nn.Module, source: str) -> None:
    """Raise :class:`SettingsError` for parameters that cannot be stored in one float32 vector."""
    lazy = [name for name, tensor in module.named_parameters() if is_lazy(tensor)]
    if lazy:
        raise SettingsError(
            f"{source}: {lazy[0]} has no shape yet; lazy modules must be run once before they are returned"
        )
    owners: dict[int, str] = {}
    for name, tensor in module.named_parameters(remove_duplicate=False):
        if (other := owners.setdefault(id(tensor), name)) != name and tensor.requires_grad:
            raise SettingsError(
                f"{source}: {other} and {name} are the same tensor, but methods share whole layers; give each layer "
                "its own tensor, or freeze the tensor with requires_grad_(False)"
            )
        if tensor.dtype != torch.float32:
            raise SettingsError(f"{source}: {name} is of {tensor.dtype}; parameters must be float32")


def _check_constant(
    module: nn.Module, fixed: set[str], build: Callable[[], nn.Module], generator: Tensor, source: str
) -> None:
    """Raise :class:`SettingsError` if fixed tensors differ between builds, because each process builds its own."""
    with torch.random.fork_rng(devices=[]):
        torch.set_rng_state(generator)
        rebuilt = build().state_dict()
    for name, tensor in module.state_dict().items():
        if name in fixed and not torch.equal(tensor, rebuilt[name]):
            raise SettingsError(
                f"{source}: {name} has no gradient, and its values differ when the network is built again; Posy does "
                "not send this tensor, so load it from a file or draw it from PyTorch's own generator"
            )


def _probe(task: Task) -> Tensor:
    """Return samples for testing a network, without drawing from the global generator."""
    generator = torch.Generator().manual_seed(0)
    if task.kind == "text":
        return torch.randint(1, max(2, task.vocabulary), (_PROBES, *task.input_shape), generator=generator)
    return torch.rand(_PROBES, *task.input_shape, generator=generator)


def _logits(module: nn.Module, probe: Tensor, task: Task, source: str) -> Tensor:
    """Return the outputs for the probe in evaluation mode, or raise an error if their shape is wrong."""
    module.eval()
    try:
        with torch.no_grad():
            outputs = module(probe)
    except Exception as error:  # the user's code may raise anything
        shape = "x".join(map(str, probe.shape))
        raise SettingsError(f"{source}: samples of shape {shape} raise {format_error(error)}") from error
    finally:
        module.train()
    expected_shape = (len(probe), task.num_classes)
    if not isinstance(outputs, Tensor) or tuple(outputs.shape) != expected_shape:
        returned = str(tuple(outputs.shape)) if isinstance(outputs, Tensor) else type(outputs).__name__
        raise SettingsError(
            f"{source}: for {len(probe)} samples it returns {returned}; it must return logits {expected_shape}"
        )
    return outputs


def _replace_dropout(module: nn.Module, probe: Tensor, source: str) -> None:
    """Replace dropout layers with :class:`CustomDropout`, whose masks depend only on the client and its round."""
    kinds = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
    dropouts = {name: part for name, part in module.named_modules() if isinstance(part, kinds) and part.p > 0}
    shapes: dict[str, list[tuple[int, ...]]] = {name: [] for name in dropouts}

    def note(name: str, part: nn.Module) -> Callable[..., None]:
        def hook(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            shape = tuple(inputs[0].shape[1:])
            elementwise = type(part) is nn.Dropout
            shapes[name].append(shape if elementwise else (shape[0], *[1] * (len(shape) - 1)))

        return hook

    hooks = [part.register_forward_pre_hook(note(name, part)) for name, part in dropouts.items()]
    module.eval()
    try:
        with torch.no_grad():
            module(probe)
    except Exception:
        return
    finally:
        module.train()
        for hook in hooks:
            hook.remove()
    for name, part in dropouts.items():
        if len(shapes[name]) != 1:
            raise SettingsError(
                f"{source}: {name} is used {len(shapes[name])} times for a batch; use each dropout layer only once"
            )
        _put(module, name, CustomDropout(shapes[name][0], part.p))


def _check_repeats(network: CustomModel, probe: Tensor, source: str) -> None:
    """Raise :class:`SettingsError` if a network draws random numbers that Posy cannot reproduce."""
    first, second = (_trained_on(copy.deepcopy(network), probe, seed) for seed in (0, 1))
    if not torch.equal(first, second):
        raise SettingsError(
            f"{source}: in training, two passes over the same samples differ; random numbers must come from "
            "nn.Dropout layers, so that a run can be repeated"
        )


_SOUND: set[tuple[str, Task]] = set()
"""Networks that have passed Posy's checks, with their tasks; Posy does not check them again."""


def _trained_on(model: nn.Module, probe: Tensor, seed: int) -> Tensor:
    """Return the outputs in training mode, with the global generator seeded."""
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        outputs: Tensor = model.train()(probe)
    return outputs


def _layers(module: nn.Module, chosen_layers: Sequence[str], source: str) -> dict[str, str]:
    """Map layer names to module paths: the chosen layers, or by default the children in order, without the head."""
    parts = dict(module.named_modules())
    if unknown := [path for path in chosen_layers if path not in parts]:
        modules = ", ".join(filter(None, parts))
        raise SettingsError(f"{source}: the layer {unknown[0]!r} is not one of its modules, which are {modules}")
    paths = list(chosen_layers) or [
        path for path, part in _children(module) if next(part.parameters(), None) is not None
    ]
    layers = {path if path != "head" else "head-body": path for path in paths}
    if module._parameters:
        layers = {"own": "", **layers}
    covered = {id(t) for path in layers.values() for t in _tensors(parts[path], alone=not path)}
    uncovered = [name for name, t in (*module.named_parameters(), *module.named_buffers()) if id(t) not in covered]
    if uncovered:
        raise SettingsError(f"{source}: {uncovered[0]} belongs to none of the layers {', '.join(layers)}")
    return layers


def _children(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield a module's children with their paths; if it only wraps another module, yield that module's children."""
    path, inner = "", module
    while len(children := list(inner.named_children())) == 1 and not inner._parameters and not inner._buffers:
        name, inner = children[0]
        path += f"{name}."
        if not list(inner.named_children()):
            yield path.rstrip("."), inner
            return
    for name, child in children:
        yield path + name, child


def _tensors(part: nn.Module, *, alone: bool) -> list[Tensor]:
    return [*part.parameters(recurse=not alone), *part.buffers(recurse=not alone)]


def _put(module: nn.Module, path: str, part: nn.Module) -> None:
    """Replace the module at a path."""
    owner, _, name = path.rpartition(".")
    setattr(module.get_submodule(owner), name, part)
