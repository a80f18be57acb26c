"""Training augmentation, batched on the device of the images."""

import torch
from torch import Tensor
from torch.nn import functional

_SMALLEST = 0.9  # part of the image's area that a crop keeps at least (FedDRM)


def random_resized_crop(x: Tensor, generator: torch.Generator) -> Tensor:
    """Cut from each image a random box of 90 to 100 % of its area, resized to the full size.

    The box keeps the image's aspect ratio and lies inside the image; resampling is bilinear.

    Parameters
    ----------
    x : Tensor
        ``(B, C, H, W)`` floating-point images.
    generator : torch.Generator
        Draws the boxes; a generator on the CPU draws the same boxes for every device.

    Returns
    -------
    Tensor
        ``(B, C, H, W)``, in channels_last memory format.
    """
    draws = torch.rand(3, len(x), generator=generator, device=generator.device).to(x.device, x.dtype)
    side = (_SMALLEST + (1 - _SMALLEST) * draws[0]).sqrt()
    theta = torch.zeros(len(x), 2, 3, dtype=x.dtype, device=x.device)
    theta[:, 0, 0] = theta[:, 1, 1] = side
    theta[:, :, 2] = ((2 * draws[1:] - 1) * (1 - side)).T
    grid = functional.affine_grid(theta, list(x.shape), align_corners=False)
    cropped = functional.grid_sample(x, grid, mode="bilinear", padding_mode="border", align_corners=False)
    return cropped.contiguous(memory_format=torch.channels_last)
