"""Comparison of an exported model with the stored model."""

from collections.abc import Callable, Mapping

import numpy as np
import torch

from posy.client_app.export.samples import random_check
from posy.client_app.stored import ClientModel
from posy.metrics import VALUES
from posy.settings import SettingsError

TOLERANCE = 1e-5
"""Maximum difference between the probabilities of an exported and of the stored model. For values, it is relative to
their standard deviation or to the value itself."""
Run = Callable[[Mapping[str, np.ndarray]], np.ndarray]
"""A function that returns the outputs ``(N, C)`` of an exported model for inputs keyed by name."""


class ExportError(SettingsError):
    """A model cannot be exported to a format."""


@torch.no_grad()
def compare(model: ClientModel, run: Run) -> float:
    """Return the largest difference between an exported and the stored model, in probability or standard deviations.

    The samples are random. They are compared in one batch and one by one, so that an exported model with a fixed batch
    size is found.

    Raises
    ------
    ExportError
        If an output differs by more than :data:`TOLERANCE`.
    """
    check = random_check(model)
    expected = model(model.prepare(check.samples)).numpy()
    scale = np.ones(expected.shape[1])
    if model.preprocessing.task.target == VALUES:
        scale = np.maximum(np.array(model.preprocessing.task.value_std or scale), np.abs(expected).max(axis=0))
    largest = 0.0
    for rows in (slice(0, None), slice(1, 4), *(slice(row, row + 1) for row in range(len(expected)))):
        wanted, size = expected[rows], len(expected[rows])
        outputs = run(check.part(rows).inputs)
        if outputs.shape != wanted.shape:
            raise ExportError(f"for {size} samples, its output has the shape {outputs.shape}")
        differences = np.abs(outputs - wanted) / scale
        if not (differences <= TOLERANCE).all():
            row, column = np.unravel_index(np.argmax(np.nan_to_num(differences, nan=np.inf)), differences.shape)
            raise ExportError(
                f"in a batch of {size} random samples, it returns {outputs[row, column]:.6g} for "
                f"{model.class_names[column]} where the stored model returns {wanted[row, column]:.6g}"
            )
        largest = max(largest, float(differences.max()))
    return largest
