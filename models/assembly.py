"""Construction of the networks that :class:`~posy.models.architecture.Architecture` describes."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from posy.data.task import Task
from posy.models.build import build_model, resolve
from posy.models.chain import ChainModel
from posy.models.layers import kaiming_linear
from posy.models.parameters import FloatArray, Layout, layout_of
from posy.models.weights import Weights, load_weights, weights_for
from posy.randomness import seed_of, seeded


def build(
    model: str,
    task: Task,
    seed: int,
    *,
    ranks: Mapping[str, int],
    fixed: Mapping[str, FloatArray],
    linear_init: str,
    weights: Weights | None,
    frozen: Sequence[str],
    extension: tuple[Callable[..., Any], tuple[tuple[str, Any], ...]] | None,
) -> nn.Module:
    """Return a network; the same seed gives the same weights.

    The arguments are the fields of :class:`~posy.models.architecture.Architecture`. ``fixed`` maps names to the fixed
    tensors of the network without low-rank layers.
    """
    chain = build_model(model, task, seed=seed, ranks=ranks)
    if linear_init == "kaiming":
        with seeded(seed_of(seed, "linear-init")):
            kaiming_linear(chain)
    if weights is not None:
        load_weights(chain, weights, tuple(ranks))
    for layer in frozen:
        chain.layer(layer).requires_grad_(False)
    if ranks:  # a low-rank layer changes the random numbers drawn for later layers
        chain.load_state_dict({name: torch.from_numpy(array) for name, array in fixed.items()}, strict=False)
    if extension is None:
        return chain
    extend, arguments = extension
    module: nn.Module = extend(chain, seed=seed, **dict(arguments))
    initialise: Callable[[], object] | None = getattr(module, "initialise_linear", None)
    if linear_init == "kaiming" and initialise is not None:
        with seeded(seed_of(seed, "linear-init", 1)):  # a different stream from the chain's
            initialise()
    return module


def resolved(
    model: str, task: Task, weights: str, digest: str, words: Sequence[str], folder: str
) -> tuple[str, Weights | None]:
    """Return a network's name, with ``auto`` replaced, and the source of its initial weights.

    Raises
    ------
    SettingsError
        If the network or the weights file does not exist.
    """
    name = resolve(model, task)
    return name, weights_for(weights, name, digest, words, folder)


def layers_of(module: nn.Module) -> Mapping[str, nn.Module]:
    """Return a network's layers by name."""
    chain = chain_of(module)
    further: Any = {} if module is chain else module.layers
    return {**{name: chain.layer(name) for name in chain.layer_names}, **further}


def chain_of(module: nn.Module) -> ChainModel:
    """Return a network's chain of layers, without a method's extra layers."""
    chain = module if isinstance(module, ChainModel) else module.model
    assert isinstance(chain, ChainModel)
    return chain


def layout(module: nn.Module) -> tuple[Layout, tuple[str, ...]]:
    """Return the layout of the flat vector, and the names of the floating-point tensors that are not part of it."""
    trained = layout_of(module, layers_of(module))
    names = {entry.name for entry in trained.entries}
    fixed = [name for name, tensor in module.state_dict().items() if tensor.is_floating_point() and name not in names]
    return trained, tuple(fixed)


def normalisation_layers(chain: ChainModel) -> list[str]:
    """Return the names of the normalisation layers."""
    kinds = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm)
    return [name for name, module in chain.named_modules() if isinstance(module, kinds)]
