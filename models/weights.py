"""Weights that a network starts from, in place of random ones."""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from posy.extensions import said
from posy.models.catalogue import PRETRAINED
from posy.models.chain import ChainModel
from posy.models.own import TORCHVISION
from posy.models.parameters import fixed_tensors
from posy.paths import found_at, sha256_of
from posy.settings import SettingsError
from posy.storage import load_arrays

_SHOWN = 16
"""Characters of a SHA-256 that a message names."""
VECTORS = ".txt"
"""Suffix of files of word vectors."""
FIRST_WORD = 2
"""Token of the first word; 0 is padding, 1 a word that has no number."""


class Weights(NamedTuple):
    """Which weights.

    The file, its SHA-256, the network that torchvision's are for, and, for word vectors, the words that have a number,
    in the order of these, a line each.
    """

    where: str
    digest: str
    model: str
    words: str = ""


def weights_for(
    where: str, model: str, digest: str = "", words: Sequence[str] = (), folder: str = ""
) -> Weights | None:
    """Return which weights a network starts from, as settings name them; None for random ones.

    A file that is not at its path is searched for in the ``folder`` of the data. ``words`` are the words of the data,
    in the order of their numbers.

    Raises
    ------
    SettingsError
        If the file is missing or has another SHA-256 than ``digest``, torchvision does not have the network, or word
        vectors come without words.
    """
    if not where:
        return None
    if where == PRETRAINED:
        if not model.startswith(TORCHVISION):
            raise SettingsError(f"weights = {where!r} are for torchvision's networks, not for model = {model!r}")
        return Weights(where, "", model)
    path = found_at(where, folder)
    if path is None:
        raise SettingsError(
            f"weights = {where!r}: there is no such file, nor one of this name in data-dir; on real nodes it must lie "
            "on each of them"
        )
    if path.suffix == VECTORS and not words:
        raise SettingsError(
            f"weights = {where!r} holds word vectors: they need a data set of texts, and not one of sites, which do "
            "not tell their words"
        )
    actual = sha256_of(path)
    if digest not in ("", actual):
        raise SettingsError(
            f"weights = {str(path)!r}: its SHA-256 is {actual[:_SHOWN]}…, weights-sha256 = {digest[:_SHOWN]}…: it is "
            "another file than the run has begun with"
        )
    return Weights(str(path), actual, "", "\n".join(words) if path.suffix == VECTORS else "")


def load_weights(network: ChainModel, weights: Weights, fresh: tuple[str, ...]) -> None:
    """Load a network's tensors from a file, by the names of the user's module or of Posy's files.

    The layers ``fresh`` keep their random weights, and the head does if it has other outputs. In a network with fixed
    tensors, trained tensors that the file lacks (adapters) keep their values too. Word vectors are the rows of the
    network's one embedding; words that they lack, and padding, have zeros.

    Raises
    ------
    SettingsError
        If the file cannot be read, lacks a tensor, or has one of another shape.
    """
    source = f"weights = {weights.where!r}"
    if weights.words:
        embeddings = [part for part in network.modules() if isinstance(part, nn.Embedding)]
        if len(embeddings) != 1:
            raise SettingsError(
                f"{source} holds word vectors; the network must have one embedding, not {len(embeddings)}"
            )
        with torch.no_grad():
            embeddings[0].weight.copy_(_vectors(weights, *embeddings[0].weight.shape))
        return
    stored = _read(weights)
    tensors = network.state_dict()
    aliases = network.given_names(tensors)
    skipped = {id(t) for layer in fresh for t in _tensors(network, layer)}
    head = {id(t) for t in _tensors(network, "head")}
    originals = dict(network.state_dict(keep_vars=True))
    fixed = fixed_tensors(network)
    chosen: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if id(originals[name]) in skipped or not tensor.is_floating_point():
            continue
        value = stored.get(name, stored.get(aliases[name]))
        if value is not None and value.shape == tensor.shape:
            chosen[name] = value.to(tensor.dtype)
        elif id(originals[name]) not in head and not (value is None and fixed and name not in fixed):
            problem = "is not in it" if value is None else f"has the shape {tuple(value.shape)} there"
            names = ", ".join(list(stored)[:8])
            raise SettingsError(
                f"{source}: {aliases[name]} of shape {tuple(tensor.shape)} {problem}; it holds {names}, …"
            )
    if not all(torch.isfinite(tensor).all() for tensor in chosen.values()):
        raise SettingsError(f"{source}: it holds numbers that are not finite")
    if head & {id(originals[name]) for name in chosen} != head:  # a bias goes with its weight
        chosen = {name: tensor for name, tensor in chosen.items() if id(originals[name]) not in head}
    network.load_state_dict(chosen, strict=False)


def _tensors(network: ChainModel, layer: str) -> list[Tensor]:
    module = network.layer(layer)
    return [*module.parameters(), *module.buffers()]


@lru_cache(maxsize=2)
def _read(weights: Weights) -> Mapping[str, Tensor]:
    """Return the tensors of a file, or torchvision's tensors for a network, by name."""
    try:
        if weights.model:
            from torchvision import models  # noqa: PLC0415 - takes a second

            named: Any = models.get_model_weights(weights.model.removeprefix(TORCHVISION)).DEFAULT
            return dict(named.get_state_dict(progress=False, check_hash=True))
        return {name: torch.from_numpy(array) for name, array in load_arrays(weights.where).items()}
    except Exception as error:  # whatever a file holds, or the network does
        raise SettingsError(f"weights = {weights.where!r}: cannot be read ({said(error)})") from error


@lru_cache(maxsize=2)
def _vectors(weights: Weights, tokens: int, dimension: int) -> Tensor:
    """Return the vectors ``(V, D)`` of tokens by a file in GloVe's text format, a line for a word and its D numbers.

    Of two lines for a word the first counts; a first line of two numbers, word2vec's, is passed over.
    """
    source = f"weights = {weights.where!r}"
    tokens_of = {word: token for token, word in enumerate(weights.words.split("\n"), FIRST_WORD)}
    words = len(tokens_of)
    vectors = np.zeros((tokens, dimension), np.float32)
    number = 0
    try:
        with Path(weights.where).open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                word, _, numbers = line.partition(" ")
                if word not in tokens_of or (number == 1 and numbers.strip().isdigit()):
                    continue
                row = [float(value) for value in numbers.split()]
                if len(row) != dimension:
                    raise ValueError(f"{len(row)} numbers for {word!r}; the network's embedding has {dimension}")
                vectors[tokens_of.pop(word)] = row
    except (OSError, ValueError) as error:
        raise SettingsError(f"{source}, line {number or 1}: cannot be read ({error})") from error
    if not np.isfinite(vectors).all():
        raise SettingsError(f"{source}: it holds numbers that are not finite")
    if len(tokens_of) == words:
        raise SettingsError(f"{source}: none of the {words} words of the data is in it")
    return torch.from_numpy(vectors)
