"""A hashable description of a network, from which server and clients build the same network.

This module does not import PyTorch at the top level, so that the settings of a method can be read without it.
:mod:`posy.models.assembly` builds the networks.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from posy.data.task import Task
from posy.models.parameters import Entry, FloatArray, Layout, Part
from posy.settings import SettingsError

if TYPE_CHECKING:
    from torch import nn

    from posy.models.chain import ChainModel
    from posy.models.weights import Weights


Extend = Callable[..., Any]
"""Function that adds layers to a network's chain of layers."""


@dataclass(frozen=True)
class Architecture:
    """The network that a method uses for a task: one of :data:`posy.models.catalogue.MODELS`, or a custom network."""

    model: str
    task: Task
    ranks: tuple[tuple[str, int], ...] = ()  # ranks of the low-rank fully connected layers
    extension: tuple[Extend, tuple[tuple[str, Any], ...]] | None = None  # extra layers of a method; see `extended`
    linear_init: str = "default"  # initial weights of linear layers: default or kaiming
    weights: "Weights | None" = None  # initial weights; None: random
    frozen: tuple[str, ...] = ()  # layers whose parameters are built without gradient

    def build(self, seed: int = 0) -> "nn.Module":
        """Build the network; the same seed gives the same weights."""
        from posy.models import assembly  # noqa: PLC0415 - imports PyTorch

        plain = replace(self, ranks=(), extension=None)
        return assembly.build(
            self.model,
            self.task,
            seed,
            ranks=dict(self.ranks),
            fixed=plain.fixed if self.ranks else {},
            linear_init=self.linear_init,
            weights=self.weights,
            frozen=self.frozen,
            extension=self.extension,
        )

    def extended(self, extend: Extend, **arguments: Any) -> "Architecture":
        """Return the architecture of the network ``extend(chain, seed=seed, **arguments)``.

        Parameters
        ----------
        extend : callable
            Takes the chain of layers, and returns the changed chain, or a module whose attribute ``model`` is the chain
            and whose property ``layers`` maps names to the extra layers. The arguments must be hashable.
        """
        return replace(self, extension=(extend, tuple(sorted(arguments.items()))))

    def initial(self, seed: int) -> FloatArray:
        """Return freshly initialised parameters as a flat vector ``(d,)``."""
        tensors = self.build(seed).state_dict()
        return self.layout.flatten({e.name: tensors[e.name].numpy() for e in self.layout.entries})

    @property
    def layout(self) -> Layout:
        """The layout of the flat vector: its tensors, in order."""
        return _layout(self)[0]

    @property
    def fixed(self) -> Mapping[str, FloatArray]:
        """The fixed floating-point tensors, keyed by name. They are not trained, sent, or part of the flat vector.

        These are the parameters without gradient and the statistics of frozen BatchNorm layers. Their values are the
        initial values for seed 0, regardless of the run's seed.
        """
        return _fixed(self)

    @property
    def fingerprint(self) -> list[float]:
        """Two numbers for each fixed tensor w: ||w|| and Σ_j w_j cos(j) / ||w||.

        Every process builds the fixed tensors itself, and the server compares the clients' numbers with its own. The
        numbers differ between tensors, but hardly depend on the processor's rounding.
        """
        return list(_fingerprint(self))

    def divided(self, personal: tuple[str, ...]) -> tuple[Part, Part]:
        """Return the shared and the personal part of the flat vector; ``personal`` names layers or tensors.

        Raises
        ------
        SettingsError
            If a personal layer has no trained tensor.
        """
        return _divided(self, personal)

    def require(self, tensors: Sequence[str], use: str) -> None:
        """Raise :class:`SettingsError` unless all these tensors are trained; ``use`` says why the method needs them."""
        trained = {entry.name for entry in self.layout.entries if entry.trainable}
        if missing := [name for name in tensors if name not in trained]:
            state = "has no gradient" if missing[0] in self.fixed else "does not exist"
            raise SettingsError(
                f"model = {self.model!r}: the tensor {missing[0]} {state}, but {use}; train this tensor, or choose "
                "another method"
            )
        rows = {entry.shape[0] for entry in self.layout.entries if entry.name == "head.weight"}
        if "head.weight" in tensors and rows - {self.task.num_classes}:
            raise SettingsError(
                f"model = {self.model!r}: its head has no row of weights for each class, but {use}; choose another "
                "network or another method"
            )

    @property
    def layer_names(self) -> tuple[str, ...]:
        """Names of the layers with a trained tensor: blocks from input to output, then ``head``."""
        trained = set(self.layout.layers)
        return tuple(name for name in _chain(self).layer_names if name in trained)

    @property
    def fully_connected(self) -> tuple[str, ...]:
        """Names of the fully connected layers whose parameters are all trained."""
        chain = _chain(self)
        return tuple(
            name for name in chain.fully_connected if all(p.requires_grad for p in chain.layer(name).parameters())
        )

    @property
    def normalisation(self) -> tuple[str, ...]:
        """Names of the tensors of normalisation layers."""
        from posy.models import assembly  # noqa: PLC0415 - imports PyTorch

        modules = assembly.normalisation_layers(_chain(self))
        return tuple(entry.name for entry in self.layout.entries if entry.name.rpartition(".")[0] in modules)

    @property
    def embedding_dim(self) -> int:
        """Number D of the head's inputs."""
        return _chain(self).embedding_dim

    def weight(self, layer: str) -> Entry:
        """Return the layout entry for a dense fully connected layer's weight ``(outputs, inputs)``."""
        for entry in self.layout.entries:
            if entry.layer == layer and entry.name.endswith("weight") and len(entry.shape) == 2:
                return entry
        raise KeyError(f"layer {layer!r} of {self.model} has no dense weight")


def reduced_like(plain: Architecture, arrays: Mapping[str, FloatArray]) -> Architecture:
    """Return the plain architecture, but with the ranks of a stored low-rank model."""
    names = {layer: _chain(plain).stem(layer) for layer in plain.fully_connected}
    down = {layer: arrays.get(stem + "down.weight") for layer, stem in names.items()}
    return replace(plain, ranks=tuple((layer, len(factor)) for layer, factor in down.items() if factor is not None))


def architecture_for(
    model: str,
    task: Task,
    linear_init: str = "default",
    weights: str = "",
    frozen: str = "",
    *,
    digest: str = "",
    words: Sequence[str] = (),
    folder: str = "",
) -> Architecture:
    """Return the plain architecture of a model, with ``auto`` replaced by a suitable network.

    The positional arguments except ``task`` are settings. ``digest`` is the SHA-256 of the weights file, ``words`` are
    the words of the data in the order of their tokens, and ``folder`` is the data directory.

    Raises
    ------
    SettingsError
        If the network, the weights file or a frozen layer does not exist.
    """
    from posy.models import assembly  # noqa: PLC0415 - imports PyTorch

    name, start = assembly.resolved(model, task, weights, digest, words, folder)
    plain = Architecture(name, task, linear_init=linear_init, weights=start)
    names = tuple(filter(None, (layer.strip() for layer in frozen.split(","))))
    if not names:
        return plain
    chain = _chain(plain)
    allowed = tuple(layer for layer in chain.layer_names[:-1] if any(True for _ in chain.layer(layer).parameters()))
    if invalid := [layer for layer in names if layer not in allowed]:
        raise SettingsError(
            f"frozen = {frozen!r}: {invalid[0]!r} is not a layer of model = {name!r} that can be frozen; allowed: "
            f"{', '.join(allowed) or 'none'}"
        )
    return replace(plain, frozen=tuple(layer for layer in allowed if layer in names))


@lru_cache(maxsize=64)
def _divided(architecture: Architecture, personal: tuple[str, ...]) -> tuple[Part, Part]:
    layout = architecture.layout
    if untrained := [name for name in personal if name in set(_chain(architecture).layer_names) - set(layout.layers)]:
        raise SettingsError(
            f"model = {architecture.model!r}: no tensor of its layer {untrained[0]} has a gradient, but the method "
            "trains this layer on each client; train one of its tensors, or choose another method, such as fedavg"
        )
    return layout.without(personal), layout.part(personal)


@lru_cache(maxsize=8)
def _fixed(architecture: Architecture) -> Mapping[str, FloatArray]:
    names = _layout(architecture)[1]
    tensors = architecture.build().state_dict() if names else {}
    return {name: tensors[name].numpy() for name in names}


@lru_cache(maxsize=8)
def _fingerprint(architecture: Architecture) -> tuple[float, ...]:
    numbers: list[float] = []
    for array in architecture.fixed.values():
        values = array.ravel().astype(np.float64)
        norm = float(np.linalg.norm(values))
        numbers += [norm, float(values @ np.cos(np.arange(len(values)))) / (norm or 1.0)]
    return tuple(numbers)


@lru_cache(maxsize=64)
def _layout(architecture: Architecture) -> tuple[Layout, tuple[str, ...]]:
    """Return the layout of the flat vector, and the names of the floating-point tensors that are not part of it."""
    from posy.models import assembly  # noqa: PLC0415 - imports PyTorch

    layout, fixed = assembly.layout(architecture.build())
    if not layout.trainable.size:
        raise SettingsError(
            f"model = {architecture.model!r}: none of its parameters has a gradient; set requires_grad = True for at "
            "least one parameter"
        )
    return layout, fixed


@lru_cache(maxsize=64)
def _chain(architecture: Architecture) -> "ChainModel":
    """Return a network's chain of layers, without a method's extra layers."""
    from posy.models import assembly  # noqa: PLC0415 - imports PyTorch

    return assembly.chain_of(architecture.build())
