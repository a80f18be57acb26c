"""Networks, built by name for a task."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from posy.data.task import Task
from posy.models import cnn, dense, resnet, text
from posy.models.chain import ChainModel
from posy.models.seeding import seeded
from posy.settings import SettingsError

__all__ = ["ChainModel", "build_model", "resolve"]


@dataclass(frozen=True)
class _Network:
    """What builds a network, and which tasks suit it: kinds, and the least size of each dimension."""

    build: Callable[[Task, Mapping[str, int]], ChainModel]
    kinds: tuple[str, ...]
    minimum_size: int = 1

    def suits(self, task: Task) -> bool:
        sizes = task.input_shape[1:] if task.kind == "image" else task.input_shape
        return task.kind in self.kinds and min(sizes) >= self.minimum_size


_NETWORKS = {
    "linear": _Network(dense.linear_model, ("image", "features")),
    "mlp": _Network(dense.mlp, ("image", "features")),
    "cnn": _Network(cnn.cnn, ("image",), cnn.MINIMUM_SIZE),
    "cnn-3fc": _Network(cnn.cnn_3fc, ("image",), cnn.MINIMUM_SIZE),
    "resnet18-gn": _Network(resnet.resnet18_gn, ("image",)),
    "resnet18-bn": _Network(resnet.resnet18_bn, ("image",)),
    "lenet-gn": _Network(cnn.lenet_gn, ("image",), cnn.MINIMUM_SIZE),
    "fasttext": _Network(text.fasttext, ("text",)),
    "textcnn": _Network(text.textcnn, ("text",), max(text.WIDTHS)),
}


def build_model(name: str, task: Task, *, seed: int, ranks: Mapping[str, int] | None = None) -> ChainModel:
    """Build a network with initial weights that depend on the seed alone.

    Parameters
    ----------
    name : str
        One of ``posy.settings.MODELS``.
    task : Task
        Kind, shape and classes of the data.
    seed : int
        Seed of the initial weights; the global generators are left as they are.
    ranks : Mapping of str to int, optional
        Ranks of fully connected layers by name (PPFE), each capped at what still saves parameters;
        layers not named, and those that no rank makes smaller, are dense.

    Raises
    ------
    SettingsError
        If there is no such network, or it does not suit the task.
    ValueError
        If a rank is below 1 or names a layer that is not fully connected.
    """
    name = resolve(name, task)
    ranks = ranks or {}
    with seeded(seed):
        model = _NETWORKS[name].build(task, ranks)
    if unknown := sorted(set(ranks) - set(model.fully_connected)):
        allowed = ", ".join(model.fully_connected)
        raise ValueError(f"ranks of {', '.join(unknown)}: the fully connected layers of {name} are {allowed}")
    return model


def resolve(name: str, task: Task) -> str:
    """Return the name of the network, with ``auto`` replaced by one that suits the task.

    Raises
    ------
    SettingsError
        If there is no such network, or it does not suit the task.
    """
    if name == "auto":
        if task.kind == "text":
            return "fasttext"
        return "cnn" if task.kind == "image" and min(task.input_shape[1:]) >= 20 else "mlp"
    network = _NETWORKS.get(name)
    if network is None or not network.suits(task):
        suited = ", ".join(["auto", *(other for other, network in _NETWORKS.items() if network.suits(task))])
        shape = "×".join(map(str, task.input_shape))
        raise SettingsError(f"model = {name!r}: for {task.kind} data of shape {shape} it must be one of {suited}")
    return name
