"""Networks without convolutions: ``linear`` and ``mlp``."""

import math
from collections.abc import Mapping

from posy.data.task import Task
from posy.models.chain import ChainModel
from posy.models.layers import FullyConnected, linear


def linear_model(task: Task, ranks: Mapping[str, int]) -> ChainModel:
    """Return a linear classifier of the flattened input: no blocks, only a head."""
    return ChainModel({}, linear(math.prod(task.input_shape), task.num_classes, ranks.get("head")))


def mlp(task: Task, ranks: Mapping[str, int]) -> ChainModel:
    """Return a perceptron with hidden layers of 128 and 64 units."""
    blocks = {
        "fc1": FullyConnected(math.prod(task.input_shape), 128, ranks.get("fc1")),
        "fc2": FullyConnected(128, 64, ranks.get("fc2")),
    }
    return ChainModel(blocks, linear(64, task.num_classes, ranks.get("head")))
