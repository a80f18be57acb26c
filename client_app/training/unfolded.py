"""Convolutions as matrix products, for many models at once on a GPU.

Normally, the convolutions of several models with different weights form one grouped convolution, which cuDNN runs group
by group. With unfolded inputs, they form one batched matrix product.
"""

import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

COLUMNS = 2 << 20
"""Maximum number of elements in a model's unfolded batch. A larger batch keeps a GPU busy even without unfolding,
and its unfolded form would take too much memory."""
FEW = 8
"""Minimum ratio of an unfolded sample's size to the weights' size at which each sample has its own matrix product.

If a layer has few weights, its gradient is a small matrix, summed over many rows. A single product would leave most of
a GPU idle.
"""


def unfold_convolutions(module: nn.Module) -> nn.Module:
    """Replace the plain convolutions of a module with matrix products, and return the module."""
    for layer in module.modules():
        if (
            type(layer) is nn.Conv2d
            and layer.groups == 1
            and layer.padding_mode == "zeros"
            and layer.dilation == (1, 1)
        ):
            layer.forward = partial(convolved, layer)  # type: ignore[method-assign]
    return module


def convolved(layer: nn.Conv2d, x: Tensor) -> Tensor:
    """Return the layer's outputs ``(B, C_out, H', W')`` for inputs ``(B, C_in, H, W)``."""
    if isinstance(layer.padding, str):
        return layer._conv_forward(x, layer.weight, layer.bias)
    (height, width), (down, right) = layer.padding, layer.kernel_size
    padded = F.pad(x, (width, width, height, height)) if height or width else x
    # Channels last, as in the previous layer's output: each row of a window is then contiguous in memory.
    pixels = padded.permute(0, 2, 3, 1)
    windows = pixels.unfold(1, down, layer.stride[0]).unfold(2, right, layer.stride[1])  # (B, H', W', C_in, k, k)
    if math.prod(windows.shape) > COLUMNS:
        return layer._conv_forward(x, layer.weight, layer.bias)
    batch, rows, columns, channels = windows.shape[:4]
    inputs = windows.permute(0, 1, 2, 4, 5, 3).reshape(batch, rows * columns, down * right * channels)
    weight = layer.weight.permute(2, 3, 1, 0).flatten(0, 2)  # (k k C_in, C_out)
    if batch * weight.numel() <= inputs.numel() // FEW:
        outputs = torch.bmm(inputs, weight.expand(batch, -1, -1))
    else:
        outputs = inputs.flatten(0, 1) @ weight
    if layer.bias is not None:
        outputs = outputs + layer.bias
    return outputs.view(batch, rows, columns, -1).permute(0, 3, 1, 2)
