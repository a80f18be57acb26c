"""Compute how many parameters a server stores for a network, without a run (Table 7 of cwFedAvg)."""

from functools import cache

import torch

WITHOUT = "none"
"""Name of the case without class-wise layers, as in FedAvg."""
LAYERS = (WITHOUT, "output", "all")


def stored_parameters(size: int, classwise: int, num_classes: int) -> int:
    """Return the number of parameters in the shared layers and all copies of the class-wise layers.

    Parameters
    ----------
    size : int
        Number of parameters in the whole network.
    classwise : int
        Number of parameters in the layers that have a copy for each class.
    num_classes : int
    """
    return size - classwise + num_classes * classwise


def millions(layers: str, num_classes: int) -> float:
    """Return the number of ResNet-18 parameters on cwFedAvg's server, in millions, with class-wise ``layers``."""
    size, head = _resnet18(num_classes)
    return stored_parameters(size, {WITHOUT: 0, "output": head, "all": size}[layers], num_classes) / 1e6


@cache
def _resnet18(num_classes: int) -> tuple[int, int]:
    """Return the number of parameters in a ResNet-18 (He et al., 2016), and in its output layer with 512 inputs."""
    # The import takes a second, and only one table needs it.
    from torchvision.models import resnet18  # noqa: PLC0415

    with torch.device("meta"):  # only sizes, without allocating memory
        network = resnet18(num_classes=num_classes)
    return tuple(sum(p.numel() for p in part.parameters()) for part in (network, network.fc))
