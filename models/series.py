"""Networks for time series ``(B, T, F)`` of T steps and F channels: ``gru`` and ``cnn1d``."""

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from posy.data.task import Task
from posy.models.chain import ChainModel
from posy.models.layers import FullyConnected, linear

UNITS = (64, 32)  # units of the GRU, and of the fully connected layer after it
CHANNELS = (32, 64)  # output channels of the two convolutions
KERNEL = 5  # width of the convolutions, in steps
HIDDEN = 64  # units of the fully connected layer after the convolutions


def gru(task: Task, ranks: Mapping[str, int]) -> ChainModel:
    """Return a GRU of 64 units, whose last output feeds a fully connected layer of 32 units."""
    blocks = {
        "gru": GRU(task.input_shape[1], UNITS[0]),
        "fc1": FullyConnected(*UNITS, ranks.get("fc1")),
    }
    return ChainModel(blocks, linear(UNITS[1], task.num_classes, ranks.get("head")))


def cnn1d(task: Task, ranks: Mapping[str, int]) -> ChainModel:
    """Return two convolutions over time (32 and 64 channels), a mean over time, and a layer of 64 units."""
    blocks = {
        "conv1": TimeConvolution(task.input_shape[1], CHANNELS[0], KERNEL),
        "conv2": TimeConvolution(*CHANNELS, KERNEL, last=True),
        "fc1": FullyConnected(CHANNELS[1], HIDDEN, ranks.get("fc1")),
    }
    return ChainModel(blocks, linear(HIDDEN, task.num_classes, ranks.get("head")))


class GRU(nn.Module):
    """Gated recurrent unit that returns its output after the last step (Cho et al., 2014).

    The weights have the layout of ``nn.GRU``: the rows of r, z and n are stacked. ``nn.GRU`` itself does not support
    ``vmap``.

        r, z = sigmoid(W x + b + U h + c),  n = tanh(W_n x + b_n + r (U_n h + c_n));  h = (1 - z) n + z h
    """

    def __init__(self, inputs: int, units: int) -> None:
        super().__init__()
        self.units = units
        self.input = nn.Parameter(torch.empty(3 * units, inputs))
        self.recurrent = nn.Parameter(torch.empty(3 * units, units))
        self.input_bias = nn.Parameter(torch.empty(3 * units))
        self.recurrent_bias = nn.Parameter(torch.empty(3 * units))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights uniformly from ±1 / sqrt(units), as PyTorch does."""
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -1 / math.sqrt(self.units), 1 / math.sqrt(self.units))

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(B, T, inputs)`` to ``(B, units)``."""
        inputs = F.linear(x, self.input, self.input_bias)  # one product for all steps
        h = inputs[:, 0, : self.units] * 0
        for step in range(x.shape[1]):
            input_r, input_z, input_n = inputs[:, step].chunk(3, dim=-1)
            r, z, n = F.linear(h, self.recurrent, self.recurrent_bias).chunk(3, dim=-1)
            update = (input_z + z).sigmoid()
            h = (1 - update) * (input_n + (input_r + r).sigmoid() * n).tanh() + update * h
        return h


class TimeConvolution(nn.Module):
    """Convolution over time, padded to keep T, with ReLU and max-pooling by 2 (in the last block, a mean over time)."""

    def __init__(self, in_channels: int, out_channels: int, kernel: int, last: bool = False) -> None:
        super().__init__()
        self.conv = nn.Conv1d(in_channels, out_channels, kernel, padding=kernel // 2)
        self.last = last

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(B, T, in_channels)`` to ``(B, ceil(T / 2), out_channels)`` or, if last, ``(B, out_channels)``."""
        x = F.relu(self.conv(x.transpose(1, 2)))
        return x.mean(dim=2) if self.last else F.max_pool1d(x, 2, ceil_mode=True).transpose(1, 2)
