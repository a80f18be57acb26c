"""Networks of people's own: any module with a linear head, found out about and wrapped as methods need it."""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from posy.data.task import Task
from posy.extensions import load, said
from posy.models.chain import ChainModel
from posy.models.layers import Dropout, LowRankLinear, linear
from posy.models.parameters import fixed_tensors
from posy.settings import SettingsError, nearest

TORCHVISION = "torchvision:"
"""What the names of torchvision's networks begin with."""
_PROBES = 2
"""Samples that a new network is tried on."""


class Described(NamedTuple):
    """A network whose author says which modules are its layers, in order, and which one is its head."""

    module: nn.Module
    layers: tuple[str, ...] = ()
    head: str = ""


class OwnModel(ChainModel):
    """A module whose last linear layer is taken out as the head: one block to run, with layers to choose from."""

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
        """Names of the layers that are plain linear layers, the head included; an adapter's subclass is not plain."""
        kinds = (nn.Linear, LowRankLinear)
        linears = [name for name, path in self._paths.items() if path and type(self.layer(name)) in kinds]
        return (*linears, "head")

    def layer(self, name: str) -> nn.Module:
        """Return a layer by its name; what the network holds outside of its modules is a list of parameters."""
        if name == "head":
            return self.head
        path = self._paths[name]
        if path:
            return self.blocks["body"].get_submodule(path)
        return nn.ParameterList(self.blocks["body"]._parameters.values())

    def given_names(self, names: Iterable[str]) -> dict[str, str]:
        """Return what tensors are called in the module that somebody has given, by their names here."""
        body, head = "blocks.body.", "head."
        return {
            name: name.removeprefix(body) if name.startswith(body) else f"{self._head_path}.{name.removeprefix(head)}"
            for name in names
        }

    def stem(self, name: str) -> str:
        """Return what the names of a fully connected layer's tensors begin with."""
        return "head." if name == "head" else f"blocks.body.{self._paths[name]}."


class OwnDropout(Dropout):
    """Dropout of any shape: ``numbers`` ``(B, features)`` are laid out as the mask ``(B, *shape)``."""

    def __init__(self, shape: tuple[int, ...], probability: float) -> None:
        super().__init__(int(torch.Size(shape).numel()), probability)
        self.shape = shape

    def forward(self, x: Tensor) -> Tensor:
        """Zero what the numbers say."""
        if not self.training or self.numbers is None:
            return x
        kept = (self.numbers >= self.probability).view(len(x), *self.shape)
        return x * kept / (1 - self.probability)


def build_own(name: str, task: Task, ranks: Mapping[str, int]) -> OwnModel:
    """Build a network that ``model`` names as ``file:function`` or ``torchvision:name``, from the global generator.

    Raises
    ------
    SettingsError
        If it cannot be had or does not suit the task, with the reason.
    """
    what = f"model = {name!r}"
    generator = torch.get_rng_state()
    module, layers, head = _given(name, task, what)
    _check_parameters(module, what)
    tried = (name, task) in _SOUND
    if not tried and (fixed := fixed_tensors(module)):
        _check_constant(module, fixed, lambda: _given(name, task, what).module, generator, what)
    probe = _probe(task)
    _replace_dropout(module, probe, what)
    before = None if tried else _logits(module, probe, task, what)
    head = head or next((path for path, part in reversed(list(module.named_modules())) if type(part) is nn.Linear), "")
    parts = dict(module.named_modules())
    if not head or type(parts.get(head)) is not nn.Linear:
        found = f"{head!r} is {type(parts[head]).__name__ if head in parts else 'none of its modules'}"
        raise SettingsError(f"{what}: its head must be an nn.Linear; " + (found if head else "it has none"))
    last = parts[head]
    assert isinstance(last, nn.Linear)
    if last.out_features != task.num_classes:
        raise SettingsError(
            f"{what}: its head {head} has {last.out_features} outputs; there are {task.num_classes} classes"
        )
    _put(module, head, nn.Identity())
    named = _layers(module, layers, what)
    for layer, path in named.items():
        rank = ranks.get(layer)
        part = module.get_submodule(path) if path else None
        if rank is not None and type(part) is nn.Linear:
            _put(module, path, linear(part.in_features, part.out_features, rank))
    own = OwnModel(module, _head(last, ranks), named, head)
    if before is not None and not ranks:
        _check_repeats(own, probe, what)
        after = _logits(own, probe, task, what)
        if not torch.allclose(before, after, atol=1e-5):
            raise SettingsError(f"{what}: its output is not that of its head {head}; the head must come last")
        _SOUND.add((name, task))
    return own


def _head(head: nn.Linear, ranks: Mapping[str, int]) -> nn.Linear | LowRankLinear:
    """Return the head, of the rank that is asked for."""
    return linear(head.in_features, head.out_features, ranks["head"]) if "head" in ranks else head


def _given(name: str, task: Task, what: str) -> Described:
    """Return what the function returns that is named."""
    if name.startswith(TORCHVISION):
        from torchvision import models  # noqa: PLC0415 - takes a second

        title = name.removeprefix(TORCHVISION)
        if title not in (known := models.list_models(module=models)):  # those for images of one class each
            near = nearest(title, known)
            hint = f"did you mean {TORCHVISION}{near}?" if near else f"it has {', '.join(known)}"
            raise SettingsError(f"{what}: torchvision has no such network for classification; {hint}")
        return Described(_called(lambda: models.get_model(title, weights=None, num_classes=task.num_classes), what))
    build = load(name, "model")
    if not callable(build):
        raise SettingsError(f"{what}: it is no function, but {type(build).__name__}")
    found = _called(lambda: build(task), what)
    described = found if isinstance(found, Described) else Described(found)
    if not isinstance(described.module, nn.Module):
        raise SettingsError(f"{what}: it must return a torch.nn.Module, not {type(described.module).__name__}")
    return described


def _called(build: Callable[[], Any], what: str) -> Any:
    try:
        return build()
    except SettingsError:
        raise
    except Exception as error:  # whatever the code of somebody else may raise
        raise SettingsError(f"{what}: it has raised {said(error)}") from error


def _check_parameters(module: nn.Module, what: str) -> None:
    """Refuse parameters that do not fit into one vector of float32."""
    lazy = [name for name, tensor in module.named_parameters() if is_lazy(tensor)]
    if lazy:
        raise SettingsError(
            f"{what}: {lazy[0]} has no shape yet; lazy modules must be run once before they are returned"
        )
    owners: dict[int, str] = {}
    for name, tensor in module.named_parameters(remove_duplicate=False):
        if (other := owners.setdefault(id(tensor), name)) != name and tensor.requires_grad:
            raise SettingsError(
                f"{what}: {other} and {name} are one tensor, and methods choose what they share by layer; give each "
                "layer a tensor of its own, or freeze the tensor with requires_grad_(False)"
            )
        if tensor.dtype != torch.float32:
            raise SettingsError(f"{what}: {name} is of {tensor.dtype}; parameters must be float32")


def _check_constant(
    module: nn.Module, fixed: set[str], build: Callable[[], nn.Module], generator: Tensor, what: str
) -> None:
    """Refuse fixed tensors that differ when the network is built again: every process builds them for itself."""
    with torch.random.fork_rng(devices=[]):
        torch.set_rng_state(generator)
        again = build().state_dict()
    for name, tensor in module.state_dict().items():
        if name in fixed and not torch.equal(tensor, again[name]):
            raise SettingsError(
                f"{what}: {name} has no gradient, and its values differ when the network is built again; Posy does "
                "not send this tensor, so load it from a file or draw it from PyTorch's own generator"
            )


def _probe(task: Task) -> Tensor:
    """Return samples to try a network on; they take no numbers of the global generator."""
    generator = torch.Generator().manual_seed(0)
    if task.kind == "text":
        return torch.randint(1, max(2, task.vocabulary), (_PROBES, *task.input_shape), generator=generator)
    return torch.rand(_PROBES, *task.input_shape, generator=generator)


def _logits(module: nn.Module, probe: Tensor, task: Task, what: str) -> Tensor:
    """Return the outputs for the probe in evaluation mode, or say why there are none of the right shape."""
    module.eval()
    try:
        with torch.no_grad():
            found = module(probe)
    except Exception as error:  # whatever the code of somebody else may raise
        shape = "x".join(map(str, probe.shape))
        raise SettingsError(f"{what}: samples of shape {shape} raise {said(error)}") from error
    finally:
        module.train()
    wanted = (len(probe), task.num_classes)
    if not isinstance(found, Tensor) or tuple(found.shape) != wanted:
        returned = str(tuple(found.shape)) if isinstance(found, Tensor) else type(found).__name__
        raise SettingsError(f"{what}: for {len(probe)} samples it returns {returned}; it must return logits {wanted}")
    return found


def _replace_dropout(module: nn.Module, probe: Tensor, what: str) -> None:
    """Let dropout take its random numbers from the trainer, so that they depend on the client and its round alone."""
    kinds = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
    found = {name: part for name, part in module.named_modules() if isinstance(part, kinds) and part.p > 0}
    shapes: dict[str, list[tuple[int, ...]]] = {name: [] for name in found}

    def note(name: str, part: nn.Module) -> Callable[..., None]:
        def hook(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            shape = tuple(inputs[0].shape[1:])
            whole = type(part) is nn.Dropout
            shapes[name].append(shape if whole else (shape[0], *[1] * (len(shape) - 1)))

        return hook

    hooks = [part.register_forward_pre_hook(note(name, part)) for name, part in found.items()]
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
    for name, part in found.items():
        if len(shapes[name]) != 1:
            raise SettingsError(
                f"{what}: {name} is used {len(shapes[name])} times for a batch; a dropout layer is used once"
            )
        _put(module, name, OwnDropout(shapes[name][0], part.p))


def _check_repeats(own: OwnModel, probe: Tensor, what: str) -> None:
    """Refuse a network that draws random numbers which Posy cannot repeat."""
    first, again = (_trained_on(copy.deepcopy(own), probe, seed) for seed in (0, 1))
    if not torch.equal(first, again):
        raise SettingsError(
            f"{what}: in training, two passes over the same samples differ; random numbers must come from "
            "nn.Dropout layers, so that a run can be repeated"
        )


_SOUND: set[tuple[str, Task]] = set()
"""Networks that have been tried on a task, and need not be when they are built again."""


def _trained_on(model: nn.Module, probe: Tensor, seed: int) -> Tensor:
    """Return the outputs in training mode, with the global generator seeded."""
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        outputs: Tensor = model.train()(probe)
    return outputs


def _layers(module: nn.Module, named: Sequence[str], what: str) -> dict[str, str]:
    """Return the path of each layer by its name: those that are named, or the children in order, without the head."""
    parts = dict(module.named_modules())
    if unknown := [path for path in named if path not in parts]:
        known = ", ".join(filter(None, parts))
        raise SettingsError(f"{what}: it has no module {unknown[0]!r} to be a layer; it has {known}")
    paths = list(named) or [path for path, part in _children(module) if next(part.parameters(), None) is not None]
    layers = {path if path != "head" else "head-body": path for path in paths}
    if module._parameters:
        layers = {"own": "", **layers}
    held = {id(t) for path in layers.values() for t in _tensors(parts[path], alone=not path)}
    lost = [name for name, t in (*module.named_parameters(), *module.named_buffers()) if id(t) not in held]
    if lost:
        raise SettingsError(f"{what}: {lost[0]} belongs to none of the layers {', '.join(layers)}")
    return layers


def _children(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Return the children of a module; of one that only wraps another, those of the other."""
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
    """Put a module in the place of another one."""
    owner, _, name = path.rpartition(".")
    setattr(module.get_submodule(owner), name, part)
