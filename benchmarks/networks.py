"""A network for DP-SGD, whose noise grows with the square root of the number of parameters."""

from torch import nn

from posy.data.task import Task


def small_cnn(task: Task) -> nn.Module:
    """Return a network with 22,058 parameters for images of 3×32×32: layers of 16 and 32 channels, and a head."""
    return nn.Sequential(
        nn.Conv2d(task.input_shape[0], 16, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 5 * 5, task.num_classes),
    )
