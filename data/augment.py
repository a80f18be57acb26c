"""Augment batches of images on their device."""

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from posy.data.transforms import SEED_NUMBERS, Transforms, check_transforms
from posy.settings import SettingsError

Draw = Callable[[int, torch.Generator], Tensor]
"""Draws the random numbers ``(B, k)`` for a batch of images."""
Change = Callable[[Tensor, Tensor], Tensor]
"""Changes images according to their random numbers."""

_SMALLEST = 0.9  # minimum fraction of the image's area that a crop covers (FedDRM)
_PAD = 4  # padding around an image, in pixels, before a crop of the image's size (FedRep)
_WIDEST = 4 / 3  # largest aspect ratio of a box relative to the image; the smallest is its inverse
_TRIES = 10  # boxes drawn to find one that fits into the image


def check_augment(augment: str, transforms: str, kind: str, shape: tuple[int, ...], name: str = "the data") -> None:
    """Raise :class:`SettingsError` for augmentation of samples that are not images, or transforms that do not fit them.

    Parameters
    ----------
    augment, transforms : str
        The settings with these names.
    kind : str
        The kind of the samples.
    shape : tuple of int
        The shape of a sample.
    name : str
        The name of the data, for error messages.
    """
    chosen = {"augment": augment if augment != "none" else "", "transforms": transforms}
    for key, value in chosen.items():
        if value and kind != "image":
            raise SettingsError(
                f"{key} = {value!r} needs images, but the samples of {name} are of kind {kind!r}; remove {key}"
            )
    if transforms:
        check_transforms(transforms, shape, name)


def augmentation(augment: str, transforms: str, mean: Tensor, std: Tensor) -> tuple[Draw, Change] | None:
    """Return the functions that draw random numbers and augment training images, or None without augmentation.

    The images are normalised with ``mean`` and ``std`` ``(C,)``.
    """
    custom = Transforms(transforms, mean, std) if transforms else None
    if augment == "none" and custom is None:
        return None
    draw, change = AUGMENTS.get(augment, (_draw_nothing, _identity))
    black = -mean / std

    def draw_numbers(count: int, generator: torch.Generator) -> Tensor:
        numbers = draw(count, generator)
        if custom is None:
            return numbers
        return torch.cat([torch.rand(count, SEED_NUMBERS, generator=generator), numbers], dim=1)

    def change_images(x: Tensor, numbers: Tensor) -> Tensor:
        if custom is None:
            return change(x, numbers, black)
        return custom(change(x, numbers[:, SEED_NUMBERS:], black), numbers[:, :SEED_NUMBERS])

    return draw_numbers, change_images


def draw_boxes(count: int, generator: torch.Generator) -> Tensor:
    """Draw boxes ``(count, 4)`` for :func:`crop` that cover 90 to 100 % of an image and keep its aspect ratio."""
    size, *position = torch.rand(3, count, generator=generator)
    side = _side(size)
    return torch.stack([side, side, *position], dim=1)


def draw_resized_boxes(count: int, generator: torch.Generator) -> Tensor:
    """Draw boxes ``(count, 4)`` like torchvision's RandomResizedCrop, which FedDRM's program uses.

    The area is uniformly distributed, and so is the logarithm of the aspect ratio, which is between 3:4 and 4:3. The
    function draws ten boxes and uses the first that fits into the image. If none fits, it uses the full image.
    """
    size, ratio = torch.rand(2, count, _TRIES, generator=generator)
    stretch = torch.exp((ratio - 0.5) * math.log(_WIDEST))  # the square root of the aspect ratio
    sides = torch.stack([_side(size) * stretch, _side(size) / stretch], dim=2)
    fits = (sides <= 1).all(dim=2)
    chosen = sides[torch.arange(count), fits.int().argmax(dim=1)]
    chosen[~fits.any(dim=1)] = 1.0
    return torch.cat([chosen, torch.rand(count, 2, generator=generator)], dim=1)


def draw_places(count: int, generator: torch.Generator) -> Tensor:
    """Draw numbers in [0, 1) for :func:`crop_and_flip`: ``(count, 3)``."""
    return torch.rand(3, count, generator=generator).T


def draw_sides(count: int, generator: torch.Generator) -> Tensor:
    """Draw numbers in [0, 1) for :func:`flip`: ``(count, 1)``."""
    return torch.rand(count, 1, generator=generator)


def crop(x: Tensor, boxes: Tensor) -> Tensor:
    """Crop a box from each image, and resize the crop to the size of the image.

    Parameters
    ----------
    x : Tensor, (B, C, H, W)
        Images, floats.
    boxes : Tensor, (B, 4)
        Width and height as fractions of the image, then the horizontal and vertical position of the box: 0 is left or
        top, 1 is right or bottom. Every box is inside the image.

    Returns
    -------
    Tensor, (B, C, H, W)
        Bilinearly resampled images in channels_last format.
    """
    side, position = boxes[:, :2].to(x.dtype), boxes[:, 2:].to(x.dtype)
    theta = torch.zeros(len(x), 2, 3, dtype=x.dtype, device=x.device)
    theta[:, 0, 0], theta[:, 1, 1] = side[:, 0], side[:, 1]
    theta[:, :, 2] = (2 * position - 1) * (1 - side)
    grid = functional.affine_grid(theta, list(x.shape), align_corners=False)
    cropped = functional.grid_sample(x, grid, mode="bilinear", padding_mode="border", align_corners=False)
    return cropped.contiguous(memory_format=torch.channels_last)


def crop_and_flip(x: Tensor, numbers: Tensor, black: Tensor) -> Tensor:
    """Pad each image with 4 black pixels, crop a box of the original size, and mirror half of the images.

    Parameters
    ----------
    x : Tensor, (B, C, H, W)
        Images, floats.
    numbers : Tensor, (B, 3)
        Vertical and horizontal position of the box in [0, 1). The image is mirrored if the third number is
        below one half.
    black : Tensor, (C,)
        Normalised value of a black pixel.
    """
    height, width = x.shape[2:]
    padded = black.view(1, 1, 1, -1).expand(len(x), height + 2 * _PAD, width + 2 * _PAD, -1).clone()
    padded[:, _PAD:-_PAD, _PAD:-_PAD] = x.permute(0, 2, 3, 1)
    vertical, horizontal, side = numbers.T
    rows = (vertical * (2 * _PAD + 1)).long()[:, None] + torch.arange(height, device=x.device)
    columns = torch.arange(width, device=x.device).expand(len(x), -1)
    columns = torch.where(side[:, None] < 0.5, columns.flip(1), columns)
    columns = columns + (horizontal * (2 * _PAD + 1)).long()[:, None]
    image = torch.arange(len(x), device=x.device)[:, None, None]
    return padded[image, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


def flip(x: Tensor, numbers: Tensor) -> Tensor:
    """Mirror images ``(B, C, H, W)`` left to right if their number ``(B, 1)`` is below one half."""
    return torch.where(numbers[:, :, None, None] < 0.5, x.flip(3), x)


def _draw_nothing(count: int, generator: torch.Generator) -> Tensor:
    return torch.empty(count, 0)


def _identity(x: Tensor, numbers: Tensor, black: Tensor) -> Tensor:
    return x


def _side(size: Tensor) -> Tensor:
    """Map numbers in [0, 1) to areas of 90 to 100 %, and return the square roots of these areas."""
    return (_SMALLEST + (1 - _SMALLEST) * size).sqrt()


AUGMENTS: dict[str, tuple[Draw, Callable[[Tensor, Tensor, Tensor], Tensor]]] = {
    "crop": (draw_boxes, lambda x, numbers, black: crop(x, numbers)),
    "resized-crop": (draw_resized_boxes, lambda x, numbers, black: crop(x, numbers)),
    "crop-flip": (draw_places, crop_and_flip),
    "flip": (draw_sides, lambda x, numbers, black: flip(x, numbers)),
}
"""Maps each augmentation to the function that draws its numbers and the function that applies them."""
