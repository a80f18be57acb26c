"""Networks built by name, with initial weights that depend only on a seed."""

from collections.abc import Mapping

import torch

from posy.data.task import Task
from posy.extensions import is_custom
from posy.models.catalogue import MODELS
from posy.models.chain import ChainModel
from posy.models.own import build_custom
from posy.randomness import seeded
from posy.settings import SettingsError


def build_model(name: str, task: Task, *, seed: int, ranks: Mapping[str, int] | None = None) -> ChainModel:
    """Build a network whose initial weights depend only on the seed; the global generators do not change.

    ``ranks`` maps names of fully connected layers to ranks (PPFE). Each rank is capped at the largest rank that saves
    parameters. Layers without a rank are dense, and so are layers that no rank makes smaller.

    Raises
    ------
    ValueError
        If a rank is below 1 or names a layer that is not fully connected.
    """
    name = resolve(name, task)
    with seeded(seed):
        model = build_custom(name, task, ranks or {}) if is_custom(name) else MODELS[name].build(task, ranks or {})
    if unknown := sorted(set(ranks or {}) - set(model.fully_connected)):
        allowed = ", ".join(model.fully_connected)
        raise ValueError(f"ranks of {', '.join(unknown)}: the fully connected layers of {name} are {allowed}")
    return model


def count_parameters(name: str, task: Task) -> int:
    """Return the number of parameters of one of Posy's networks without allocating them; 0 for a custom network."""
    name = resolve(name, task)
    if is_custom(name):
        return 0
    with seeded(0), torch.device("meta"):
        return sum(parameter.numel() for parameter in MODELS[name].build(task, {}).parameters())


def resolve(name: str, task: Task) -> str:
    """Return a network's name, with ``auto`` replaced by a suitable network.

    Raises :class:`SettingsError` if the network does not suit the task.
    """
    if name == "auto":
        if task.kind == "text":
            return "fasttext"
        if task.kind == "series":
            return "gru"
        return "cnn" if task.kind == "image" and min(task.input_shape[1:]) >= 20 else "mlp"
    if is_custom(name):
        return name
    if name not in MODELS or not MODELS[name].suits(task):
        suitable = ", ".join(["auto", *(other for other, network in MODELS.items() if network.suits(task))])
        shape = "×".join(map(str, task.input_shape))
        raise SettingsError(f"model = {name!r}: for {task.kind} data of shape {shape} it must be one of {suitable}")
    return name
