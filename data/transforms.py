"""Transforms of torchvision by name, which change training images one by one."""

import ast
from collections.abc import Callable, Mapping
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

from posy.extensions import said
from posy.randomness import own_generator, seeded
from posy.settings import SettingsError, nearest

SEED_NUMBERS = 2
"""Random numbers in [0, 1) that an image's transforms are seeded with."""
Transform = Callable[[Any], Any]
_STEPS = 2**24  # float32 numbers in [0, 1) that PyTorch draws


class Transforms:
    """The transforms of a setting, on images that are normalised by ``mean`` and ``std`` ``(C,)``.

    They see what the images were before: numbers from 0 to 1, where those were bytes. What they draw comes from
    PyTorch's own generator, seeded for each image by its own numbers ``(B, 2)``.
    """

    def __init__(self, text: str, mean: Tensor, std: Tensor) -> None:
        self._chain = transforms_in(text)
        self._mean, self._std = mean.view(-1, 1, 1), std.view(-1, 1, 1)

    def __call__(self, x: Tensor, numbers: Tensor) -> Tensor:
        """Return the changed images ``(B, C, H, W)``."""
        plain = x * self._std + self._mean
        high, low = (numbers.double() * _STEPS).long().T.tolist()
        with own_generator(x.device) as seed:
            for row, (first, second) in enumerate(zip(high, low, strict=True)):
                seed(first * _STEPS + second)
                plain[row] = _changed(self._chain, plain[row])
        return (plain - self._mean) / self._std


def check_transforms(text: str, shape: tuple[int, ...]) -> None:
    """Raise :class:`SettingsError` if a setting names no transforms, or they do not suit images ``(C, H, W)``."""
    what = f"transforms = {text!r}"
    chain = transforms_in(text)
    image = torch.linspace(0, 1, torch.Size(shape).numel()).view(shape)
    with seeded(0):
        try:
            found = _changed(chain, image.clone())
        except Exception as error:  # whatever torchvision says of an image or an argument
            raise SettingsError(f"{what}: an image of shape {shape} cannot be changed ({said(error)})") from error
    if not isinstance(found, Tensor) or found.shape != image.shape or not found.is_floating_point():
        told = f"{tuple(found.shape)}, {found.dtype}" if isinstance(found, Tensor) else type(found).__name__
        raise SettingsError(f"{what}: of an image {shape}, torch.float32 it makes {told}; it must keep both")


@lru_cache(maxsize=8)
def transforms_in(text: str) -> tuple[Transform, ...]:
    """Return the transforms that a setting names, as ``RandomRotation(15), ColorJitter(brightness=0.2)``.

    Raises
    ------
    SettingsError
        If they are not written so, or torchvision.transforms.v2 has none of a name, or it does not take the arguments.
    """
    what = f"transforms = {text!r}"
    example = (
        "needed are names of torchvision.transforms.v2 with plain arguments, as in 'RandomRotation(15), RandAugment'"
    )
    try:
        listed = ast.parse(f"[{text}]", mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise SettingsError(f"{what}: {example}") from error
    if not isinstance(listed, ast.List) or not listed.elts:
        raise SettingsError(f"{what}: {example}")
    return tuple(_transform(node, what, example) for node in listed.elts)


def _transform(node: ast.expr, what: str, example: str) -> Transform:
    name = node.func if isinstance(node, ast.Call) else node
    if not isinstance(name, ast.Name):
        raise SettingsError(f"{what}: {example}")
    kind = kinds().get(name.id)
    if kind is None:
        near = nearest(name.id, kinds())
        hint = f"; did you mean {near}?" if near else ""
        raise SettingsError(f"{what}: torchvision.transforms.v2 has no transform {name.id}{hint}")
    places, words = (node.args, node.keywords) if isinstance(node, ast.Call) else ([], [])
    try:
        arguments = [ast.literal_eval(value) for value in places]
        named = {word.arg or "": ast.literal_eval(word.value) for word in words}
    except (ValueError, TypeError) as error:
        raise SettingsError(f"{what}: {example}; the arguments of {name.id} are not plain") from error
    try:
        return kind(*arguments, **named)
    except Exception as error:  # torchvision checks its arguments in ways of its own
        raise SettingsError(f"{what}: {name.id} does not take these arguments ({said(error)})") from error


@cache
def kinds() -> Mapping[str, Callable[..., Transform]]:
    """Return torchvision's transforms by name."""
    from torchvision.transforms import v2  # noqa: PLC0415 - takes seconds to import

    return {k: kind for k, kind in vars(v2).items() if isinstance(kind, type) and issubclass(kind, v2.Transform)}


def _changed(chain: tuple[Transform, ...], image: Any) -> Any:
    for transform in chain:
        image = transform(image)
    return image
