"""Augmentation of images, batched on their device."""

import math

import torch
from torch import Tensor
from torch.nn import functional

from posy.settings import SettingsError

_SMALLEST = 0.9  # least fraction of the image's area that a crop keeps (FedDRM)
_PAD = 4  # pixels around an image from which a crop of the image's size is cut (FedRep)
_WIDEST = 4 / 3  # largest aspect ratio of a box in units of the image's, the inverse is the least
_TRIES = 10  # boxes that are drawn until one fits into the image


def check_augment(augment: str, kind: str) -> None:
    """Raise :class:`SettingsError` for an augmentation of samples that are not images."""
    if augment != "none" and kind != "image":
        raise SettingsError(f"augment = {augment!r} needs images; the samples of this data set are of kind {kind!r}")


def draw_boxes(count: int, generator: torch.Generator) -> Tensor:
    """Draw boxes of 90 to 100 % of the images' area and of their aspect ratio, for :func:`crop`: ``(count, 4)``."""
    size, *place = torch.rand(3, count, generator=generator)
    side = _side(size)
    return torch.stack([side, side, *place], dim=1)


def draw_resized_boxes(count: int, generator: torch.Generator) -> Tensor:
    """Draw boxes ``(count, 4)`` as torchvision's RandomResizedCrop does, which FedDRM's program uses.

    Area and logarithm of the aspect ratio are uniform, the latter between those of 3:4 and 4:3. Of ten boxes the first
    that fits into the image is taken; where none does, the whole image.
    """
    size, ratio = torch.rand(2, count, _TRIES, generator=generator)
    stretch = torch.exp((ratio - 0.5) * math.log(_WIDEST))  # the square root of the aspect ratio
    sides = torch.stack([_side(size) * stretch, _side(size) / stretch], dim=2)
    fits = (sides <= 1).all(dim=2)
    chosen = sides[torch.arange(count), fits.int().argmax(dim=1)]
    chosen[~fits.any(dim=1)] = 1.0
    return torch.cat([chosen, torch.rand(count, 2, generator=generator)], dim=1)


def draw_places(count: int, generator: torch.Generator) -> Tensor:
    """Draw the numbers in [0, 1) that :func:`crop_and_flip` takes: ``(count, 3)``."""
    return torch.rand(3, count, generator=generator).T


DRAWS = {"crop": draw_boxes, "resized-crop": draw_resized_boxes, "crop-flip": draw_places}
"""What draws the random numbers of each augmentation."""


def crop(x: Tensor, boxes: Tensor) -> Tensor:
    """Cut a box from each image and resize it to the full size.

    Parameters
    ----------
    x : Tensor, (B, C, H, W)
        Images, floats.
    boxes : Tensor, (B, 4)
        Width and height in units of the image's; then where the box lies, 0 left and at the top, 1 right and at the
        bottom. It lies inside the image.

    Returns
    -------
    Tensor, (B, C, H, W)
        In channels_last; resampled bilinearly.
    """
    side, place = boxes[:, :2].to(x.dtype), boxes[:, 2:].to(x.dtype)
    theta = torch.zeros(len(x), 2, 3, dtype=x.dtype, device=x.device)
    theta[:, 0, 0], theta[:, 1, 1] = side[:, 0], side[:, 1]
    theta[:, :, 2] = (2 * place - 1) * (1 - side)
    grid = functional.affine_grid(theta, list(x.shape), align_corners=False)
    cropped = functional.grid_sample(x, grid, mode="bilinear", padding_mode="border", align_corners=False)
    return cropped.contiguous(memory_format=torch.channels_last)


def crop_and_flip(x: Tensor, numbers: Tensor, black: Tensor) -> Tensor:
    """Cut from each image, with 4 black pixels around it, a random box of its own size, and mirror half of them.

    Black is what a pixel of value 0 is after normalisation, ``(C,)``. Images are as for :func:`crop`;
    numbers ``(B, 3)`` tell where the box lies from the top and from the left, and, below one half, that it is mirrored.
    """
    height, width = x.shape[2:]
    padded = black.view(1, 1, 1, -1).expand(len(x), height + 2 * _PAD, width + 2 * _PAD, -1).clone()
    padded[:, _PAD:-_PAD, _PAD:-_PAD] = x.permute(0, 2, 3, 1)
    top, left, side = numbers.T
    rows = (top * (2 * _PAD + 1)).long()[:, None] + torch.arange(height, device=x.device)
    columns = torch.arange(width, device=x.device).expand(len(x), -1)
    columns = torch.where(side[:, None] < 0.5, columns.flip(1), columns) + (left * (2 * _PAD + 1)).long()[:, None]
    image = torch.arange(len(x), device=x.device)[:, None, None]
    return padded[image, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


def _side(size: Tensor) -> Tensor:
    """Return the square root of an area of 90 to 100 %, of numbers in [0, 1)."""
    return (_SMALLEST + (1 - _SMALLEST) * size).sqrt()
