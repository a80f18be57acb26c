"""Write and read the predictions for a client's test samples."""

import csv
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from posy.metrics import CLASSES, VALUES
from posy.scores import Predictions

SAMPLE, LABEL = "sample", "label"
"""Names of the columns for a sample's index (from 0, in the data set or the site's table) and for its class."""


def write_predictions(
    path: Path, predictions: Predictions, samples: npt.NDArray[np.integer], names: Sequence[str]
) -> None:
    """Write predictions to a CSV file with one row per sample.

    The columns contain the sample's index, its true class, labels or values, and the model's outputs for the C classes,
    labels or values, such as ``p(ill)``.

    Parameters
    ----------
    path : Path
        The file. Its folder is created if necessary.
    predictions : Predictions
        The predictions for n samples.
    samples : numpy.ndarray, (n,)
        The indices of the samples.
    names : sequence of str
        The names of the classes, labels or values.
    """
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    if predictions.target == CLASSES:
        truth, columns = [[names[label]] for label in predictions.y], [LABEL]
    else:
        truth, columns = predictions.y.tolist(), list(names)
    kind = "predicted" if predictions.target == VALUES else "p"
    # Only the owner may read the labels of individual samples.
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with open(descriptor, "w", encoding="utf-8", newline="") as file:  # noqa: PTH123
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([SAMPLE, *columns, *(f"{kind}({name})" for name in names)])
        for number, true, row in zip(samples.tolist(), truth, predictions.outputs.tolist(), strict=True):
            writer.writerow([number, *true, *row])


def read_predictions(path: Path, like: Predictions, names: Sequence[str]) -> Predictions:
    """Read predictions that :func:`write_predictions` wrote, using the options of ``like``."""
    with path.open(encoding="utf-8", newline="") as file:
        _, *rows = csv.reader(file)
    outputs = np.array([row[-len(names) :] for row in rows], np.float64).reshape(len(rows), len(names))
    y: npt.NDArray[Any]
    if like.target == CLASSES:
        number = {name: index for index, name in enumerate(names)}
        y = np.array([number[row[1]] for row in rows], np.int64)
    else:
        y = np.array([row[1 : 1 + len(names)] for row in rows], np.float64)
    return replace(like, y=y, outputs=outputs)
