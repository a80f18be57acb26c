"""Torchvision transforms, selected by name and applied to each training image individually."""

import ast
from collections.abc import Callable, Mapping, Sequence
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

from posy.extensions import format_error
from posy.randomness import own_generator, seeded
from posy.settings import SettingsError, suggestions

SEED_NUMBERS = 2
"""Number of random numbers in [0, 1) that seed the transforms of an image."""
TRIES = 16
"""Number of random draws for which :func:`check_transforms` tests the transforms."""
Transform = Callable[[Any], Any]
_STEPS = 2**24  # number of different float32 values in [0, 1) that torch.rand returns


class Transforms:
    """The transforms in a setting, for images that are normalised with ``mean`` and ``std`` ``(C,)``.

    The transforms themselves receive unnormalised images, with values from 0 to 1 if the data set stores bytes. Their
    random numbers come from PyTorch's global generator, which is seeded for each image from the numbers ``(B, 2)``.
    """

    def __init__(self, text: str, mean: Tensor, std: Tensor) -> None:
        self._chain = transforms_in(text)
        self._mean, self._std = mean.view(-1, 1, 1), std.view(-1, 1, 1)

    def __call__(self, x: Tensor, numbers: Tensor) -> Tensor:
        """Return the transformed images ``(B, C, H, W)``."""
        plain = x * self._std + self._mean
        high, low = (numbers.double() * _STEPS).long().T.tolist()
        with own_generator(x.device) as seed:
            for row, (first, second) in enumerate(zip(high, low, strict=True)):
                seed(first * _STEPS + second)
                plain[row] = _changed(self._chain, plain[row])
        return (plain - self._mean) / self._std


def check_transforms(text: str, shape: tuple[int, ...], name: str = "the data") -> None:
    """Check that the transforms of a setting work for images of the given shape.

    Parameters
    ----------
    text : str
        The setting.
    shape : tuple of int
        The shape of the images, ``(C, H, W)``.
    name : str
        The name of the data, for error messages.

    Raises
    ------
    SettingsError
        If the setting names no transforms, or a transform fails, or changes the shape or the type of an image. A random
        transform may fail only in some draws, so the function checks :data:`TRIES` draws.
    """
    chain = transforms_in(text)
    image = torch.linspace(0, 1, torch.Size(shape).numel()).view(shape)
    for draw in range(TRIES):
        with seeded(draw):
            problem = _problem(chain, image)
        if problem is None:
            continue
        transform, result, error = problem
        kind = type(transform).__name__
        channels = 4 - shape[0]  # images have 1 or 3 channels
        with seeded(draw):
            needs_channels = _problem((transform,), image[:1].expand(channels, *shape[1:])) is None
        if needs_channels:
            raise SettingsError(
                f"transforms = {text!r}: {kind} suits images of {_channels(channels)}, but the images of {name} have "
                f"{_channels(shape[0])}; remove {kind}, or change its arguments"
            )
        if error is not None:
            raise SettingsError(
                f"transforms = {text!r}: {kind} fails for the images of {name}, which have the shape "
                f"{shape_text(shape)} ({format_error(error)}); remove {kind}, or change its arguments"
            ) from error
        raise SettingsError(
            f"transforms = {text!r}: {kind} returns {_described(result)} for the images of {name}, which have the "
            f"shape {shape_text(shape)} and the type torch.float32; the transforms must keep both: remove {kind}, or "
            "change its arguments"
        )


def _problem(chain: tuple[Transform, ...], image: Tensor) -> tuple[Transform, Any, Exception | None] | None:
    """Return the transform that fails, or the last one that changes the shape or the type of an image.

    The tuple also contains the result and any error. If the chain works for the image, the function returns None.
    """
    current: Any = image.clone()
    changing = None
    for transform in chain:
        try:
            result = transform(current)
        except Exception as error:  # torchvision raises many kinds of errors
            return transform, None, error
        if _described(result) != _described(current):
            changing = transform
        current = result
    return (changing, current, None) if changing and _described(current) != _described(image) else None


def _channels(count: int) -> str:
    return f"{count} channel{'s' * (count > 1)}"


def _described(result: Any) -> str:
    """Describe the shape and the type of a transform's result for a message."""
    if not isinstance(result, Tensor):
        return f"an object of type {type(result).__name__}"
    return f"images of shape {shape_text(result.shape)} and type {result.dtype}"


def shape_text(shape: Sequence[int]) -> str:
    """Return a shape in the format of the setting ``input-shape``, for example ``3x32x32``."""
    return "x".join(map(str, shape))


@lru_cache(maxsize=8)
def transforms_in(text: str) -> tuple[Transform, ...]:
    """Return the transforms named in a setting, such as ``RandomRotation(15), ColorJitter(brightness=0.2)``.

    Raises
    ------
    SettingsError
        If the text has a different format, a name is not a transform, or a transform does not accept its arguments.
    """
    source = f"transforms = {text!r}"
    example = (
        "expected names of torchvision.transforms.v2 with plain arguments, as in 'RandomRotation(15), RandAugment'"
    )
    try:
        expression = ast.parse(f"[{text}]", mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise SettingsError(f"{source}: {example}") from error
    if not isinstance(expression, ast.List) or not expression.elts:
        raise SettingsError(f"{source}: {example}")
    return tuple(_transform(node, source, example) for node in expression.elts)


def _transform(node: ast.expr, source: str, example: str) -> Transform:
    name = node.func if isinstance(node, ast.Call) else node
    if not isinstance(name, ast.Name):
        raise SettingsError(f"{source}: {example}")
    kind = kinds().get(name.id)
    if kind is None:
        near = suggestions(name.id, kinds())
        hint = f"; did you mean {near}?" if near else f"; {example}"
        raise SettingsError(f"{source}: torchvision.transforms.v2 has no transform {name.id}{hint}")
    positional, keywords = (node.args, node.keywords) if isinstance(node, ast.Call) else ([], [])
    try:
        arguments = [ast.literal_eval(value) for value in positional]
        named = {keyword.arg or "": ast.literal_eval(keyword.value) for keyword in keywords}
    except (ValueError, TypeError) as error:
        raise SettingsError(f"{source}: {example}; the arguments of {name.id} are not literals") from error
    try:
        return kind(*arguments, **named)
    except Exception as error:  # torchvision raises many kinds of errors
        raise SettingsError(f"{source}: {name.id} does not take these arguments ({format_error(error)})") from error


@cache
def kinds() -> Mapping[str, Callable[..., Transform]]:
    """Return torchvision's transforms, keyed by name."""
    from torchvision.transforms import v2  # noqa: PLC0415 - takes seconds to import

    return {k: kind for k, kind in vars(v2).items() if isinstance(kind, type) and issubclass(kind, v2.Transform)}


def _changed(chain: tuple[Transform, ...], image: Any) -> Any:
    for transform in chain:
        image = transform(image)
    return image
