"""Training augmentation, batched on the device of the images."""

import torch
from torch import Tensor
from torch.nn import functional

from posy.settings import SettingsError

_SMALLEST = 0.9  # least fraction of the image's area that a crop keeps (FedDRM)
_PAD = 4  # pixels around an image from which a crop of the image's size is cut (FedRep)


def check_augment(augment: str, kind: str) -> None:
    """Raise :class:`SettingsError` for an augmentation of samples that are not images."""
    if augment != "none" and kind != "image":
        raise SettingsError(f"augment = {augment!r} needs images; the samples of this data set are of kind {kind!r}")


def draw_boxes(count: int, generator: torch.Generator) -> Tensor:
    """Draw the boxes of a number of images for :func:`crop`: ``(count, 3)`` numbers in [0, 1)."""
    return torch.rand(3, count, generator=generator).T


def crop(x: Tensor, boxes: Tensor) -> Tensor:
    """Cut from each image a random box of 90 to 100 % of its area, resized to the full size.

    The box keeps the image's aspect ratio and lies inside the image; resampling is bilinear. Images are floats
    ``(B, C, H, W)``, those returned in channels_last; boxes ``(B, 3)``, as :func:`draw_boxes` draws them.
    """
    size, place = boxes[:, :1].to(x.dtype), boxes[:, 1:].to(x.dtype)
    side = (_SMALLEST + (1 - _SMALLEST) * size).sqrt()
    theta = torch.zeros(len(x), 2, 3, dtype=x.dtype, device=x.device)
    theta[:, 0, 0] = theta[:, 1, 1] = side[:, 0]
    theta[:, :, 2] = (2 * place - 1) * (1 - side)
    grid = functional.affine_grid(theta, list(x.shape), align_corners=False)
    cropped = functional.grid_sample(x, grid, mode="bilinear", padding_mode="border", align_corners=False)
    return cropped.contiguous(memory_format=torch.channels_last)


def crop_and_flip(x: Tensor, numbers: Tensor, black: Tensor) -> Tensor:
    """Cut from each image, with 4 black pixels around it, a random box of its own size, and mirror half of them.

    Black is what a pixel of value 0 is after normalisation, ``(C,)``. Images and numbers are as for :func:`crop`.
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
