"""A model's parameters as one flat vector, and named parts of it.

Messages, personal state and server mathematics work on flat float32 vectors of length d; a :class:`Layout` records
which entries belong to which tensor and layer of the model.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from torch import nn

FloatArray = npt.NDArray[np.float32]
A = TypeVar("A")  # a NumPy array or a tensor


@dataclass(frozen=True)
class Entry:
    """One tensor of a model inside the flat vector."""

    name: str
    layer: str
    shape: tuple[int, ...]
    start: int
    trainable: bool

    @property
    def stop(self) -> int:
        """Index of the first element after the entry in the flat vector."""
        return self.start + math.prod(self.shape)


@dataclass(frozen=True)
class Part:
    """A part of the flat vector: sorted, disjoint slices."""

    slices: tuple[slice, ...]

    @property
    def size(self) -> int:
        """Number of elements of the part."""
        return sum(s.stop - s.start for s in self.slices)

    def take(self, flat: Any) -> Any:
        """Return this part of ``flat`` ``(..., d)`` as ``(..., size)``, which is a view if the part is one slice."""
        pieces = [flat[..., s] for s in self.slices or (slice(0),)]
        if len(pieces) == 1:
            return pieces[0]
        if isinstance(flat, np.ndarray):
            return np.concatenate(pieces, axis=-1)
        import torch  # noqa: PLC0415 - only clients have tensors

        return torch.cat(pieces, dim=-1)

    def put(self, flat: A, values: Any) -> A:
        """Write values ``(..., size)`` into this part of ``flat`` ``(..., d)`` in place, and return ``flat``."""
        offset = 0
        for s in self.slices:
            width = s.stop - s.start
            flat[..., s] = values[..., offset : offset + width]  # type: ignore[index]
            offset += width
        return flat


@dataclass(frozen=True)
class Layout:
    """Order, shape and layer of the tensors in a flat vector of length ``size``."""

    entries: tuple[Entry, ...]

    @property
    def size(self) -> int:
        """Length d of the flat vector."""
        return self.entries[-1].stop if self.entries else 0

    @property
    def layers(self) -> tuple[str, ...]:
        """Names of the layers, in the order of the flat vector."""
        return tuple(dict.fromkeys(entry.layer for entry in self.entries))

    def part(self, names: Iterable[str]) -> Part:
        """Return the part of the flat vector that consists of the named layers and tensors.

        Raises :class:`KeyError` for an unknown name.
        """
        requested = set(names)
        if unknown := requested - {*self.layers, *(entry.name for entry in self.entries)}:
            raise KeyError(f"no layer {sorted(unknown)}; the model has {self.layers}")
        return self.select(lambda entry: entry.layer in requested or entry.name in requested)

    def without(self, names: Iterable[str]) -> Part:
        """Return the part of the flat vector without the named layers and tensors."""
        excluded = set(names)
        return self.select(lambda entry: entry.layer not in excluded and entry.name not in excluded)

    def select(self, condition: Callable[[Entry], bool]) -> Part:
        """Return the part with the entries for which a condition holds, merging adjacent slices."""
        slices: list[slice] = []
        for entry in filter(condition, self.entries):
            if slices and slices[-1].stop == entry.start:
                slices[-1] = slice(slices[-1].start, entry.stop)
            else:
                slices.append(slice(entry.start, entry.stop))
        return Part(tuple(slices))

    @property
    def trainable(self) -> Part:
        """The parameters, without BatchNorm's running statistics."""
        return self.select(lambda entry: entry.trainable)

    def views(self, flat: Any) -> dict[str, Any]:
        """Return views of the tensors ``(..., *shape)`` in ``flat`` ``(..., d)``, by name."""
        lead = tuple(flat.shape[:-1])
        return {e.name: flat[..., e.start : e.stop].reshape(lead + e.shape) for e in self.entries}

    def flatten(self, named: Mapping[str, npt.ArrayLike]) -> FloatArray:
        """Return named tensors as one flat vector."""
        return np.concatenate([np.asarray(named[e.name], np.float32).ravel() for e in self.entries])


def layout_of(module: "nn.Module", layers: "Mapping[str, nn.Module]") -> Layout:
    """Describe a module's trained parameters and floating-point buffers as a flat vector.

    Each tensor belongs to the layer whose module owns it. The vector contains neither fixed tensors
    (:func:`fixed_tensors`) nor integer buffers (such as BatchNorm's counter).
    """
    owner = {id(tensor): name for name, layer in layers.items() for tensor in (*layer.parameters(), *layer.buffers())}
    parameters = {name for name, _ in module.named_parameters()}
    fixed = fixed_tensors(module)
    entries: list[Entry] = []
    start = 0
    for name, tensor in module.state_dict(keep_vars=True).items():
        if tensor.is_floating_point() and name not in fixed:
            entry = Entry(name, owner[id(tensor)], tuple(tensor.shape), start, name in parameters)
            entries.append(entry)
            start = entry.stop
    return Layout(tuple(entries))


def fixed_tensors(module: "nn.Module") -> set[str]:
    """Return the names of the parameters and buffers that training does not change.

    These are the parameters without gradient (``requires_grad_(False)``), and buffers such as the statistics of a
    frozen BatchNorm layer. A buffer is fixed if no parameter of its module has a gradient. For a module without
    parameters, the nearest enclosing module that has parameters decides.
    """
    modules = dict(module.named_modules())
    fixed = {name for name, p in module.named_parameters(remove_duplicate=False) if not p.requires_grad}
    for name, _ in module.named_buffers():
        holder = name
        parameters: list[nn.Parameter] = []
        while holder and not parameters:
            holder = holder.rpartition(".")[0]
            parameters = list(modules[holder].parameters())
        if parameters and not any(parameter.requires_grad for parameter in parameters):
            fixed.add(name)
    return fixed
