"""ResNet-18 with GroupNorm or BatchNorm (He et al., 2016; FedDRM, Section 3.1)."""

from collections.abc import Callable, Mapping

import torch.nn.functional as F
from torch import Tensor, nn

from posy.data.task import Task
from posy.models.chain import ChainModel
from posy.models.layers import FullyConnected, linear

Norm = Callable[[int], nn.GroupNorm | nn.BatchNorm2d]

SMALL = 64  # largest side, in pixels, of the images that use the 3×3 stem


def resnet18_gn(task: Task, ranks: Mapping[str, int]) -> ChainModel:
    """Return a ResNet-18 with GroupNorm in 16 groups."""
    return _resnet18(task, ranks, lambda channels: nn.GroupNorm(16, channels))


def resnet18_bn(task: Task, ranks: Mapping[str, int]) -> ChainModel:
    """Return a ResNet-18 with BatchNorm, whose running statistics are buffers of the model."""
    return _resnet18(task, ranks, nn.BatchNorm2d)


class Stem(nn.Module):
    """First convolution, norm, ReLU: 3×3 for small images, else 7×7 with stride 2 and max-pooling."""

    def __init__(self, in_channels: int, small: bool, norm: Norm) -> None:
        super().__init__()
        self.small = small
        self.conv = _conv(in_channels, 64, 3, 1) if small else _conv(in_channels, 64, 7, 2)
        self.norm = norm(64)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Apply Kaiming initialisation to the convolution."""
        _kaiming(self.conv)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(B, C, H, W)`` to ``(B, 64, H, W)``, or for large images to a quarter of the height and width."""
        x = F.relu(self.norm(self.conv(x)))
        return x if self.small else F.max_pool2d(x, 3, 2, 1)


class ResidualBlock(nn.Module):
    """Two 3×3 convolutions and a shortcut.

    The last norm starts at scale zero, so that the block starts as ``relu(shortcut(x))``.
    """

    def __init__(self, in_channels: int, out_channels: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.conv1 = _conv(in_channels, out_channels, 3, stride)
        self.norm1 = norm(out_channels)
        self.conv2 = _conv(out_channels, out_channels, 3, 1)
        self.norm2 = norm(out_channels)
        self.shortcut: nn.Module | None = None
        if stride != 1 or in_channels != out_channels:
            self.shortcut = nn.Sequential(_conv(in_channels, out_channels, 1, stride), norm(out_channels))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Apply Kaiming initialisation to the convolutions, and set the scale of the last norm to zero."""
        for part in self.modules():
            if isinstance(part, nn.Conv2d):
                _kaiming(part)
        nn.init.zeros_(self.norm2.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(B, C_in, H, W)`` to ``(B, C_out, H/stride, W/stride)``."""
        shortcut = x if self.shortcut is None else self.shortcut(x)
        x = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(x)) + shortcut)


def _resnet18(task: Task, ranks: Mapping[str, int], norm: Norm) -> ChainModel:
    """Return a network with a stem, four stages of two residual blocks, a 512 -> 256 neck and a head."""
    channels, *size = task.input_shape

    def stage(in_channels: int, out_channels: int, stride: int) -> list[nn.Module]:
        first = ResidualBlock(in_channels, out_channels, stride, norm)
        return [first, ResidualBlock(out_channels, out_channels, 1, norm)]

    blocks = {
        "stem": Stem(channels, max(size) <= SMALL, norm),
        "layer1": nn.Sequential(*stage(64, 64, 1)),
        "layer2": nn.Sequential(*stage(64, 128, 2)),
        "layer3": nn.Sequential(*stage(128, 256, 2)),
        "layer4": nn.Sequential(*stage(256, 512, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
        "neck": FullyConnected(512, 256, ranks.get("neck"), norm=True),
    }
    return ChainModel(blocks, linear(256, task.num_classes, ranks.get("head")))


def _conv(in_channels: int, out_channels: int, kernel: int, stride: int) -> nn.Conv2d:
    return nn.Conv2d(in_channels, out_channels, kernel, stride, padding=kernel // 2, bias=False)


def _kaiming(conv: nn.Conv2d) -> None:
    nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
