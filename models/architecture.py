"""A network described in one hashable value that server and clients build alike."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from torch import nn

from posy.data.task import Task
from posy.models.build import build_model, resolve
from posy.models.chain import ChainModel
from posy.models.conditional import Conditional
from posy.models.layers import CosineLinear, kaiming_linear
from posy.models.parameters import Entry, FloatArray, Layout, Part, layout_of
from posy.models.two_branch import TwoBranch
from posy.models.weights import Weights, load_weights, weights_for
from posy.randomness import seed_of, seeded
from posy.settings import SettingsError


@dataclass(frozen=True)
class Architecture:
    """What network a method trains: one of :data:`posy.models.catalogue.MODELS`, or one's own, for a task."""

    model: str
    task: Task
    ranks: tuple[tuple[str, int], ...] = ()  # of the fully connected layers that are two low-rank factors (PPFE)
    clients: int = 0  # outputs M of FedDRM's client branch; 0: no such branch
    cosine: float = 0.0  # scale of a head that compares directions (FedNH); 0: a linear head
    sharing: str = "deep"  # how many blocks both branches share, of posy.models.two_branch.SHARING
    conditional: bool = False  # with FedCP's policy and global head
    linear_init: str = "default"  # or kaiming: weights of the linear layers
    weights: Weights | None = None  # what it starts from in place of random weights
    frozen: tuple[str, ...] = ()  # layers that are neither trained nor sent: no part of the flat vector

    def build(self, seed: int = 0) -> nn.Module:
        """Build the network; the same seed gives the same weights."""
        chain = build_model(self.model, self.task, seed=seed, ranks=dict(self.ranks))
        if self.linear_init == "kaiming":
            with seeded(seed_of(seed, "linear-init")):
                kaiming_linear(chain)
        if self.weights is not None:
            load_weights(chain, self.weights, tuple(layer for layer, _ in self.ranks))
        for layer in self.frozen:
            chain.layer(layer).requires_grad_(False)
        if self.cosine:
            with seeded(seed_of(seed, "head")):
                chain.head = CosineLinear(chain.embedding_dim, self.task.num_classes, self.cosine)
        if self.conditional:
            return Conditional(chain, seed=seed)
        if not self.clients:
            return chain
        two = TwoBranch(chain, self.clients, self.sharing, seed=seed)
        if self.linear_init == "kaiming":
            with seeded(seed_of(seed, "linear-init", 1)):  # a stream apart from the class branch's
                kaiming_linear(two.client_blocks)
                kaiming_linear(two.client_head)
        return two

    def initial(self, seed: int) -> FloatArray:
        """Return freshly initialised parameters as a flat vector ``(d,)``."""
        tensors = self.build(seed).state_dict()
        return self.layout.flatten({e.name: tensors[e.name].numpy() for e in self.layout.entries})

    @property
    def layout(self) -> Layout:
        """Order of the tensors in the flat vector; FedDRM's branch is the layer ``client-branch``.

        FedCP's further layers are ``policy`` and ``global-head``.
        """
        return _layout(self)

    @property
    def held(self) -> Mapping[str, FloatArray]:
        """The tensors of frozen layers by name, which are no part of the flat vector."""
        return _held(self)

    def divided(self, own: tuple[str, ...]) -> tuple[Part, Part]:
        """Return the parts of the flat vector without, and with nothing but, some layers or single tensors."""
        return _divided(self, own)

    @property
    def layer_names(self) -> tuple[str, ...]:
        """Blocks from input to output, then ``head``."""
        return tuple(name for name in _chain(self).layer_names if name not in self.frozen)

    @property
    def fully_connected(self) -> tuple[str, ...]:
        """Those of the layers that are fully connected."""
        return tuple(name for name in _chain(self).fully_connected if name not in self.frozen)

    @property
    def normalisation(self) -> tuple[str, ...]:
        """Names of the tensors that belong to normalisation."""
        kinds = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm)
        modules = [name for name, module in _chain(self).named_modules() if isinstance(module, kinds)]
        return tuple(entry.name for entry in self.layout.entries if entry.name.rpartition(".")[0] in modules)

    @property
    def embedding_dim(self) -> int:
        """Number D of features that the head sees."""
        return _chain(self).embedding_dim

    def weight(self, layer: str) -> Entry:
        """Return the entry of a dense fully connected layer's weight ``(outputs, inputs)``."""
        for entry in self.layout.entries:
            if entry.layer == layer and entry.name.endswith("weight") and len(entry.shape) == 2:
                return entry
        raise KeyError(f"layer {layer!r} of {self.model} has no dense weight")


def reduced_like(plain: Architecture, arrays: Mapping[str, FloatArray]) -> Architecture:
    """Return the architecture with the ranks that stored tensors of a reduced model show."""
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
    """Return the plain architecture of a model, ``auto`` resolved; the arguments are as the settings have them.

    ``digest`` is the SHA-256 of the file of weights, ``words`` are those of the data in the order of their numbers,
    ``folder`` is where the data lies.

    Raises
    ------
    SettingsError
        If there is no such network, no such file of weights, or no such layer to be frozen.
    """
    name = resolve(model, task)
    start = weights_for(weights, name, digest, words, folder)
    plain = Architecture(name, task, linear_init=linear_init, weights=start)
    names = tuple(filter(None, (layer.strip() for layer in frozen.split(","))))
    allowed = plain.layer_names[:-1]
    if wrong := [layer for layer in names if layer not in allowed]:
        raise SettingsError(
            f"frozen = {frozen!r}: {wrong[0]!r} is not a layer of model = {name!r} that can be frozen; those are "
            f"{', '.join(allowed) or 'none'}"
        )
    return replace(plain, frozen=tuple(layer for layer in allowed if layer in names))


def layers_of(module: nn.Module) -> Mapping[str, nn.Module]:
    """Return a network's layers by name."""
    if isinstance(module, TwoBranch):
        branch = nn.ModuleList([module.client_blocks, module.client_head])
        return {**layers_of(module.model), "client-branch": branch}
    if isinstance(module, Conditional):
        return {**layers_of(module.model), "policy": module.policy, "global-head": module.global_head}
    assert isinstance(module, ChainModel)
    return {name: module.layer(name) for name in module.layer_names}


@lru_cache(maxsize=64)
def _divided(architecture: Architecture, own: tuple[str, ...]) -> tuple[Part, Part]:
    return architecture.layout.without(own), architecture.layout.part(own)


@lru_cache(maxsize=2)
def _held(architecture: Architecture) -> Mapping[str, FloatArray]:
    if not architecture.frozen:
        return {}
    kept = {entry.name for entry in architecture.layout.entries}
    tensors = architecture.build().state_dict().items()
    return {name: t.numpy() for name, t in tensors if t.is_floating_point() and name not in kept}


@lru_cache(maxsize=64)
def _layout(architecture: Architecture) -> Layout:
    module = architecture.build()
    return layout_of(module, layers_of(module), architecture.frozen)


@lru_cache(maxsize=64)
def _chain(architecture: Architecture) -> ChainModel:
    module = architecture.build()
    return module.model if isinstance(module, TwoBranch | Conditional) else module  # type: ignore[return-value]
