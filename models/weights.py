"""Initial weights of a network from a file, from torchvision or from word vectors."""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from posy.extensions import format_error
from posy.models.catalogue import PRETRAINED
from posy.models.chain import ChainModel
from posy.models.own import TORCHVISION
from posy.models.parameters import fixed_tensors
from posy.paths import found_at, sha256_of
from posy.settings import SettingsError
from posy.storage import load_arrays

_SHOWN = 16
"""Number of characters of a SHA-256 that a message shows."""
VECTORS = ".txt"
"""File name suffix of word vectors."""
FIRST_WORD = 2
"""Token of the first word; 0 is padding, 1 an unknown word."""


class Weights(NamedTuple):
    """The source of initial weights."""

    where: str
    """Path of the file, or :data:`PRETRAINED`."""
    digest: str
    """SHA-256 of the file, or empty."""
    model: str
    """The torchvision network to which the weights belong, or empty."""
    words: str = ""
    """For word vectors, the words of the data in the order of their tokens, one per line; else empty."""


def weights_for(
    where: str, model: str, digest: str = "", words: Sequence[str] = (), folder: str = ""
) -> Weights | None:
    """Return the source of a network's initial weights; None for random weights.

    Parameters
    ----------
    where : str
        The setting ``weights``.
    model : str
        Name of the network.
    digest : str
        The setting ``weights-sha256``; if it is empty, any file is accepted.
    words : sequence of str
        The words of the data in the order of their tokens.
    folder : str
        Data directory, in which Posy searches for a file that is not at its path.

    Raises
    ------
    SettingsError
        If the file is missing or its SHA-256 differs from ``digest``, torchvision's weights are used for a different
        network, or word vectors are used without words.
    """
    if not where:
        return None
    if where == PRETRAINED:
        if not model.startswith(TORCHVISION):
            raise SettingsError(
                f"weights = {where!r} are for torchvision's networks, not for model = {model!r}; choose model = "
                f"{TORCHVISION}NAME, or a file of weights"
            )
        return Weights(where, "", model)
    path = found_at(where, folder)
    if path is None:
        raise SettingsError(
            f"weights = {where!r}: this file does not exist, and data-dir has no file with this name; store it on the "
            "server and on each node"
        )
    if path.suffix == VECTORS and not words:
        raise SettingsError(
            f"weights = {where!r} are word vectors, which need the words of the data; choose a text data set, but not "
            "dataset = sites, because sites do not send their words"
        )
    actual = sha256_of(path)
    if digest not in ("", actual):
        raise SettingsError(
            f"weights = {str(path)!r}: its SHA-256 is {actual[:_SHOWN]}…, but weights-sha256 = {digest[:_SHOWN]}…; use "
            "the file that the run started with"
        )
    return Weights(str(path), actual, "", "\n".join(words) if path.suffix == VECTORS else "")


def load_weights(network: ChainModel, weights: Weights, fresh: tuple[str, ...]) -> None:
    """Load initial weights into a network, matching tensors by their names in Posy's network or in the user's module.

    The layers ``fresh`` keep their random weights, and so does the head if its number of outputs differs from the
    file's. If the network has fixed tensors, trained tensors that are missing from the file, such as adapters, also
    keep their values. Word vectors become the rows of the network's only embedding. The rows for padding and for words
    without a vector are zero.

    Raises
    ------
    SettingsError
        If the file cannot be read, a tensor is missing from it, a tensor has a different shape, or a value is not
        finite. Also if word vectors are given and the network does not have exactly one embedding.
    """
    source = f"weights = {weights.where!r}"
    if weights.words:
        embeddings = [part for part in network.modules() if isinstance(part, nn.Embedding)]
        if len(embeddings) != 1:
            raise SettingsError(
                f"{source} are word vectors; the network must have one embedding, not {len(embeddings)}"
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
            problem = "is not in the file" if value is None else f"has the shape {tuple(value.shape)} in the file"
            names = ", ".join(list(stored)[:8])
            raise SettingsError(
                f"{source}: {aliases[name]} of shape {tuple(tensor.shape)} {problem}; the file has {names}, …"
            )
    if not all(torch.isfinite(tensor).all() for tensor in chosen.values()):
        raise SettingsError(f"{source}: the file contains NaN or infinite numbers; use another file")
    if head & {id(originals[name]) for name in chosen} != head:  # load all tensors of the head or none
        chosen = {name: tensor for name, tensor in chosen.items() if id(originals[name]) not in head}
    network.load_state_dict(chosen, strict=False)


def _tensors(network: ChainModel, layer: str) -> list[Tensor]:
    module = network.layer(layer)
    return [*module.parameters(), *module.buffers()]


@lru_cache(maxsize=2)
def _read(weights: Weights) -> Mapping[str, Tensor]:
    """Return the tensors in a file, or torchvision's tensors for a network, keyed by name."""
    try:
        if weights.model:
            from torchvision import models  # noqa: PLC0415 - takes a second

            pretrained: Any = models.get_model_weights(weights.model.removeprefix(TORCHVISION)).DEFAULT
            return dict(pretrained.get_state_dict(progress=False, check_hash=True))
        return {name: torch.from_numpy(array) for name, array in load_arrays(weights.where).items()}
    except Exception as error:  # a malformed file or a failed download may raise any error
        raise SettingsError(f"weights = {weights.where!r}: cannot be read ({format_error(error)})") from error


@lru_cache(maxsize=2)
def _vectors(weights: Weights, tokens: int, dimension: int) -> Tensor:
    """Return the vectors ``(V, D)`` of all tokens from a file in GloVe's text format: a word and D numbers per line.

    If a word has several lines, the first line is used. A header of two numbers (word2vec) is skipped.
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
        raise SettingsError(f"{source}: the file contains NaN or infinite numbers; use another file")
    if len(tokens_of) == words:
        raise SettingsError(f"{source}: the file has none of the {words} words of the data; use another file")
    return torch.from_numpy(vectors)
