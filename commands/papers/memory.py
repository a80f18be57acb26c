"""Numbers of parameters that a server holds, which take a network and no run (Table 7 of cwFedAvg)."""

from functools import cache

import torch

WITHOUT = "none"
"""No layers are class-wise: FedAvg."""
LAYERS = (WITHOUT, "output", "all")


def held(size: int, classwise: int, num_classes: int) -> int:
    """Return the parameters of the layers that all share, and of each class's copy of the class-wise ones.

    Parameters
    ----------
    size : int
        Parameters of the whole network.
    classwise : int
        Those of the layers that each class has a copy of.
    num_classes : int
    """
    return size - classwise + num_classes * classwise


def millions(layers: str, num_classes: int) -> float:
    """Return what cwFedAvg's server holds of a ResNet-18 in millions, with some ``layers`` class-wise."""
    size, head = _resnet18(num_classes)
    return held(size, {WITHOUT: 0, "output": head, "all": size}[layers], num_classes) / 1e6


@cache
def _resnet18(num_classes: int) -> tuple[int, int]:
    """Return the parameters of a ResNet-18 (He et al., 2016), and of its output layer with its 512 inputs."""
    # It takes a second to import, and one table needs it.
    from torchvision.models import resnet18  # noqa: PLC0415

    with torch.device("meta"):  # sizes without memory
        network = resnet18(num_classes=num_classes)
    return tuple(sum(p.numel() for p in part.parameters()) for part in (network, network.fc))
