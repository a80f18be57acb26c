"""Convolutions as products of matrices, for many models side by side on a GPU.

Convolutions with weights of each model's own are one grouped convolution, which cuDNN carries out group by group. With
unfolded inputs they are one batched product.
"""

import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

COLUMNS = 2 << 20
"""Numbers of a model's unfolded batch up to which it pays: a larger one takes memory, and keeps a GPU busy as it is."""
FEW = 8
"""How many times more numbers an unfolded batch has than the weights if each sample's gradient is a product of its own.

The gradient of few weights is a small matrix summed over many rows: as one product it leaves most of a GPU idle.
"""


def unfold_convolutions(module: nn.Module) -> nn.Module:
    """Let a module's plain convolutions be products of matrices, and return it."""
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
    """Map ``(B, C_in, H, W)`` to ``(B, C_out, H', W')`` as the layer does."""
    if isinstance(layer.padding, str):
        return layer._conv_forward(x, layer.weight, layer.bias)
    (height, width), (down, right) = layer.padding, layer.kernel_size
    padded = F.pad(x, (width, width, height, height)) if height or width else x
    # Channels last, as the layer before puts out: what a window has of a row is then one piece of memory.
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
