"""The tensors of one client, ready for training."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from posy.data.augment import crop, draw_resized_boxes
from posy.data.dataset import Dataset
from posy.data.inputs import normalised
from posy.data.partitions import Partition
from posy.data.settings import DataSettings
from posy.data.shifts import SHIFTS, apply_shift
from posy.randomness import torch_generator


@dataclass(frozen=True, eq=False)
class ClientData:
    """Training, test and validation data of one client, on its device.

    Inputs are images, float32 ``(n, C, H, W)``, normalised, channels_last; features, float32 ``(n, F)``; time series,
    float32 ``(n, T, F)``; or text, int64 ``(n, L)``. Targets are classes, int64 ``(n,)``; labels, int64 ``(n, C)``; or
    values in their original unit, float64 ``(n, C)``. A client with a single sample has no test data.
    """

    x_train: Tensor
    y_train: Tensor
    x_test: Tensor
    y_test: Tensor
    x_validation: Tensor
    y_validation: Tensor
    num_classes: int

    def class_distribution(self) -> Tensor:
        """Return the empirical class distribution p_i ``(C,)`` of the training samples."""
        counts = torch.bincount(self.y_train, minlength=self.num_classes)
        return counts / counts.sum()

    @property
    def nbytes(self) -> int:
        """Size of the tensors in memory, in bytes."""
        return sum(value.nbytes for value in vars(self).values() if isinstance(value, Tensor))


def client_data(
    dataset: Dataset, part: Partition, client: int, settings: DataSettings, device: torch.device, *, seed: int = 0
) -> ClientData:
    """Gather, shift and normalise a client's samples, or raise :class:`IndexError` if the client does not exist.

    With `resized-crop`, the function crops each test and validation image once. The seed determines the crops. Training
    draws a new crop of each training image in every epoch.
    """
    if not 0 <= client < len(part.train):
        raise IndexError(f"client {client}: the partition has {len(part.train)} clients, numbered from 0")

    def tensors(indices: np.ndarray) -> tuple[Tensor, Tensor]:
        return _inputs(dataset, indices, client, settings, device), torch.from_numpy(dataset.y[indices]).to(device)

    def cropped(split: str, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return cropped_once(x, settings, torch_generator(seed, f"crop-{split}", client)), y

    train, test, validation = (tensors(split[client]) for split in (part.train, part.test, part.validation))
    evaluated = (*cropped("test", *test), *cropped("validation", *validation))
    return ClientData(*train, *evaluated, dataset.task.num_classes)


def cropped_once(x: Tensor, settings: DataSettings, generator: torch.Generator) -> Tensor:
    """Return images for evaluation: with `resized-crop`, each image is cropped once; otherwise, none changes."""
    if settings.augment != "resized-crop" or not len(x):
        return x
    return crop(x, draw_resized_boxes(len(x), generator).to(x.device))


def _inputs(dataset: Dataset, indices: np.ndarray, client: int, settings: DataSettings, device: torch.device) -> Tensor:
    x = torch.from_numpy(np.ascontiguousarray(dataset.x[indices]))
    if dataset.task.kind == "image" and settings.shift != "none":
        # Shift on the CPU, so that the pixels do not depend on the device.
        shifted = apply_shift(x.permute(0, 3, 1, 2), SHIFTS[settings.shift][client])
        x = shifted.permute(0, 2, 3, 1).contiguous()
    return normalised(x.to(device), dataset.task.kind, *dataset.scale_of(client))
