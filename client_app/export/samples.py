"""Random samples for comparing an exported model with the stored model."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from posy.client_app.export.graph import NUMBERS, codes_of, columns_by_input
from posy.client_app.schema import input_specs
from posy.client_app.stored import ClientModel
from posy.data.encoding import EncodedColumn, Encoder
from posy.data.inputs import Preprocessing

COUNT = 8
"""Number of samples."""
UNSEEN = "a category that does not occur in training"


class Check(NamedTuple):
    """Samples that Posy accepts, and the same samples as inputs of an exported model, keyed by name."""

    samples: list[Any]
    inputs: dict[str, np.ndarray]

    def part(self, rows: slice) -> "Check":
        """Return some of the samples."""
        return Check(self.samples[rows], {name: array[rows] for name, array in self.inputs.items()})


def random_check(model: ClientModel, seed: int = 0) -> Check:
    """Return random samples on the scale of the training data; they do not depend on any site's samples."""
    preprocessing, rng = model.preprocessing, np.random.default_rng(seed)
    shape = preprocessing.task.input_shape
    specs = input_specs(preprocessing)
    if preprocessing.encoder:
        rows = _rows(preprocessing, preprocessing.encoder, rng)
        columns = dict(zip(preprocessing.columns, zip(*rows, strict=True), strict=True))
        arrays = {
            spec.name: np.array(columns[spec.name], np.float64)
            if spec.datatype == "FP64"
            else np.array([value or "" for value in columns[spec.name]], object)
            for spec in specs
        }
        return Check(rows, arrays)
    samples: list[Any]
    if preprocessing.task.kind == "image":
        pixels = rng.integers(0, 256, (COUNT, *shape[1:], shape[0])).astype(np.uint8)
        if preprocessing.sample_kind == "image-float":
            pixels = (preprocessing.mean + preprocessing.std * rng.normal(size=pixels.shape)).astype(np.float32)
        return Check(list(pixels), {"image": np.ascontiguousarray(pixels.transpose(0, 3, 1, 2))})
    if preprocessing.sample_kind == "text":
        words = [*preprocessing.words[:1000], "unseen", "Wörter", "don't"]
        samples = [" ".join(rng.choice(words, rng.integers(0, shape[0] + 2))) for _ in range(COUNT)]
        return Check(samples, {"tokens": model.prepare(samples).numpy()})
    if preprocessing.task.kind == "text":
        samples = [rng.integers(0, preprocessing.task.vocabulary, rng.integers(1, shape[0] + 1)) for _ in range(COUNT)]
        return Check(samples, {"tokens": model.prepare(samples).numpy()})
    x = preprocessing.mean + preprocessing.std * rng.normal(size=(COUNT, *shape))
    return Check(list(x), {specs[0].name: x})


def network_inputs(preprocessing: Preprocessing, inputs: Mapping[str, np.ndarray]) -> tuple[Tensor, ...]:
    """Convert the inputs of an exported model to the inputs of :class:`posy.client_app.export.graph.RawModel`."""
    if not preprocessing.encoder:
        return tuple(map(torch.from_numpy, inputs.values()))
    tensors = []
    for name, columns in columns_by_input(preprocessing.encoder).items():
        arrays = [inputs[column.name] for column in columns]
        if name != NUMBERS:
            tables = [(codes_of(column), len(column.categories)) for column in columns]
            arrays = [
                np.array([codes.get(cell, other) for cell in array])
                for array, (codes, other) in zip(arrays, tables, strict=True)
            ]
        tensors.append(torch.from_numpy(np.stack(arrays, axis=1)))
    return tuple(tensors)


def _rows(preprocessing: Preprocessing, encoder: Encoder, rng: np.random.Generator) -> list[list[Any]]:
    """Return raw rows of a table with known and unseen categories, and with missing values where the run imputes."""
    stds = dict(zip(encoder.names, preprocessing.std.tolist(), strict=True))
    columns = [_cells(column, stds.get(column.name, 1.0), rng) for column in encoder.columns]
    return [list(row) for row in zip(*columns, strict=True)]


def _cells(column: EncodedColumn, std: float, rng: np.random.Generator) -> list[Any]:
    """Return the cells of one column; None denotes a missing value."""
    cells: list[Any]
    if column.mean is not None:
        cells = (column.mean + std * rng.normal(size=COUNT)).tolist()
    else:
        cells = rng.choice([*column.categories, UNSEEN], COUNT).tolist()
        cells[0] = UNSEEN
    if column.imputes or not column.is_used:
        cells = [None if gap else cell for cell, gap in zip(cells, rng.random(COUNT) < 0.3, strict=True)]
        cells[-1] = None
    return cells
