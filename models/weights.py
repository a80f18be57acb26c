"""Weights that a network starts from, in place of random ones."""

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from posy.extensions import said
from posy.models.catalogue import PRETRAINED
from posy.models.chain import ChainModel
from posy.models.own import TORCHVISION
from posy.paths import is_file, sha256_of
from posy.settings import SettingsError
from posy.storage import load_arrays

_SHOWN = 16
"""Characters of a SHA-256 that a message names."""


class Weights(NamedTuple):
    """Which weights: the value of the setting, the SHA-256 of the file, and the network that torchvision's are for."""

    where: str
    digest: str
    model: str


def weights_for(where: str, model: str, digest: str = "") -> Weights | None:
    """Return which weights a network starts from, as settings name them; None for random ones.

    Raises
    ------
    SettingsError
        If there is no such file, it has not the SHA-256 ``digest``, or torchvision has no such network.
    """
    if not where:
        return None
    if where == PRETRAINED:
        if not model.startswith(TORCHVISION):
            raise SettingsError(f"weights = {where!r} are those of torchvision's networks, not of model = {model!r}")
        return Weights(where, "", model)
    if not is_file(Path(where)):
        raise SettingsError(f"weights = {where!r}: there is no such file; on real nodes it must lie on each of them")
    found = sha256_of(Path(where))
    if digest not in ("", found):
        raise SettingsError(
            f"weights = {where!r}: its SHA-256 is {found[:_SHOWN]}…, weights-sha256 = {digest[:_SHOWN]}…: it is "
            "another file than the run has begun with"
        )
    return Weights(where, found, "")


def load_weights(network: ChainModel, weights: Weights, fresh: tuple[str, ...]) -> None:
    """Let a network's tensors be those of a file; its names are those of the network's own module, or of Posy's files.

    The layers ``fresh`` keep their random weights, and the head does if it has other outputs.

    Raises
    ------
    SettingsError
        If the file cannot be read, lacks a tensor, or has one of another shape.
    """
    what, found = f"weights = {weights.where!r}", _read(weights)
    tensors = network.state_dict()
    aliases = network.given_names(tensors)
    kept = {id(t) for layer in fresh for t in _tensors(network, layer)}
    head = {id(t) for t in _tensors(network, "head")}
    own = dict(network.state_dict(keep_vars=True))
    chosen: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if id(own[name]) in kept or not tensor.is_floating_point():
            continue
        there = found.get(name, found.get(aliases[name]))
        if there is not None and there.shape == tensor.shape:
            chosen[name] = there.to(tensor.dtype)
        elif id(own[name]) not in head:
            told = "is not in it" if there is None else f"has the shape {tuple(there.shape)} there"
            held = ", ".join(list(found)[:8])
            raise SettingsError(f"{what}: {aliases[name]} of shape {tuple(tensor.shape)} {told}; it holds {held}, …")
    if not all(torch.isfinite(tensor).all() for tensor in chosen.values()):
        raise SettingsError(f"{what}: it holds numbers that are not finite")
    if head & {id(own[name]) for name in chosen} != head:  # a bias goes with its weight
        chosen = {name: tensor for name, tensor in chosen.items() if id(own[name]) not in head}
    network.load_state_dict(chosen, strict=False)


def _tensors(network: ChainModel, layer: str) -> list[Tensor]:
    module = network.layer(layer)
    return [*module.parameters(), *module.buffers()]


@lru_cache(maxsize=2)
def _read(weights: Weights) -> Mapping[str, Tensor]:
    """Return the tensors of a file, or those that torchvision has for a network, by name."""
    try:
        if weights.model:
            from torchvision import models  # noqa: PLC0415 - takes a second

            named: Any = models.get_model_weights(weights.model.removeprefix(TORCHVISION)).DEFAULT
            return dict(named.get_state_dict(progress=False, check_hash=True))
        return {name: torch.from_numpy(array) for name, array in load_arrays(weights.where).items()}
    except Exception as error:  # whatever a file holds, or the network does
        raise SettingsError(f"weights = {weights.where!r}: cannot be read ({said(error)})") from error
