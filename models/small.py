"""Small networks: ``linear``, ``logistic`` and ``mlp``, and small convolutional networks.

The convolutional networks have two 5×5 convolutions without padding, each followed by 2×2 max-pooling. They reduce
images of 28×28 pixels to 4×4, and images of 32×32 to 5×5. They reduce the smallest possible size, 16×16, to one pixel.
"""

import math
from collections.abc import Mapping

from posy.data.task import Task
from posy.models.chain import ChainModel
from posy.models.layers import Convolution, FullyConnected, SingleLogit, linear

KERNEL = 5


def linear_model(task: Task, ranks: Mapping[str, int]) -> ChainModel:
    """Return a linear model of the flattened input, which consists only of a head."""
    return ChainModel({}, linear(math.prod(task.input_shape), task.num_classes, ranks.get("head")))


def logistic_model(task: Task, ranks: Mapping[str, int]) -> ChainModel:
    """Return logistic regression with one logit for two classes, which consists only of a head."""
    return ChainModel({}, SingleLogit(math.prod(task.input_shape)))


def mlp(task: Task, ranks: Mapping[str, int]) -> ChainModel:
    """Return a perceptron with hidden layers of 128 and 64 units."""
    blocks = {
        "fc1": FullyConnected(math.prod(task.input_shape), 128, ranks.get("fc1")),
        "fc2": FullyConnected(128, 64, ranks.get("fc2")),
    }
    return ChainModel(blocks, linear(64, task.num_classes, ranks.get("head")))


def cnn(task: Task, ranks: Mapping[str, int]) -> ChainModel:
    """Return the 4-layer CNN of FedAvg, cwFedAvg (Appendix C.1) and FedFew, with 32 and 64 channels and 512 units."""
    blocks = {
        "conv1": Convolution(task.input_shape[0], 32, KERNEL),
        "conv2": Convolution(32, 64, KERNEL),
        "fc1": FullyConnected(64 * _positions(task), 512, ranks.get("fc1")),
    }
    return ChainModel(blocks, linear(512, task.num_classes, ranks.get("head")))


def cnn_3fc(task: Task, ranks: Mapping[str, int]) -> ChainModel:
    """Return FedRep's network for CIFAR-10, with two layers of 64 channels and layers of 120 and 64 units.

    PPFE's network has two convolutions and three fully connected layers, whose widths are not stated (Appendix A.1).
    With PPFE's ranks (100, 50, 24) and (80, 40, 16), each capped at the layer's full rank, this network saves 5.97 %
    and 17.74 % of its 307,842 parameters: the paper's "6 %" and "18 %". Posy instead caps each rank at the largest rank
    that saves parameters; the network then saves 6.56 % and 17.79 %.
    """
    return _cnn_3fc(task, ranks, (64, 64), (120, 64))


def cnn_3fc_wide(task: Task, ranks: Mapping[str, int]) -> ChainModel:
    """Return FedRep's network for CIFAR-100, with 64 and 128 channels, 256 and 128 units, and dropout before the head.

    PPFE uses this network for CIFAR-100: the fractions in Section 6.3.3 refer to its 1,075,044 parameters.
    """
    return _cnn_3fc(task, ranks, (64, 128), (256, 128), dropout=0.6)


def lenet_gn(task: Task, ranks: Mapping[str, int]) -> ChainModel:
    """Return a LeNet with GroupNorm for FedDRM's sharing levels (Figs. 6 and 12).

    The paper gives no widths, so they are taken from the authors' code. Depending on the level, the two branches share
    nothing, only ``conv1``, both convolutions, or all blocks but ``fc3``.
    """
    blocks = {
        "conv1": Convolution(task.input_shape[0], 32, KERNEL, norm_groups=8),
        "conv2": Convolution(32, 64, KERNEL, norm_groups=16),
        "fc1": FullyConnected(64 * _positions(task), 512, ranks.get("fc1"), norm=True),
        "fc2": FullyConnected(512, 256, ranks.get("fc2"), norm=True),
        "fc3": FullyConnected(256, 128, ranks.get("fc3"), norm=True),
    }
    return ChainModel(blocks, linear(128, task.num_classes, ranks.get("head")))


def _cnn_3fc(
    task: Task, ranks: Mapping[str, int], channels: tuple[int, int], units: tuple[int, int], dropout: float = 0.0
) -> ChainModel:
    """Return two convolutions and three fully connected layers."""
    blocks = {
        "conv1": Convolution(task.input_shape[0], channels[0], KERNEL),
        "conv2": Convolution(*channels, KERNEL),
        "fc1": FullyConnected(channels[1] * _positions(task), units[0], ranks.get("fc1")),
        "fc2": FullyConnected(*units, ranks.get("fc2"), dropout=dropout),
    }
    return ChainModel(blocks, linear(units[1], task.num_classes, ranks.get("head")))


def _positions(task: Task) -> int:
    """Return the number of pixels after both convolutions."""
    height, width = (((size - KERNEL + 1) // 2 - KERNEL + 1) // 2 for size in task.input_shape[1:])
    return height * width
