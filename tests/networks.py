"""Networks as a user's file declares them, for tests of the tensors in a network."""

from torch import nn


def normalised(task):
    """Return a perceptron with BatchNorm for images of 4 × 4 pixels, with hidden layers of 8 and 5 units."""
    layers = [nn.Flatten(), nn.Linear(16, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 5), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(5, task.num_classes))
