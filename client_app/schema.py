"""The inputs and outputs of a stored model, and its model card, for exported files and for inference servers."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from posy.client_app.stored import ClientModel
from posy.data.inputs import Preprocessing
from posy.data.task import TITLES
from posy.data.text import describe_tokens
from posy.flower import versions
from posy.metrics import CLASSES, LABELS, VALUES

SAMPLES = -1
"""The length of the axis of samples in a shape, because the number of samples may vary."""


@dataclass(frozen=True)
class TensorSpec:
    """One input or output of a model. The first axis indexes the samples.

    ``datatype`` is a name of the Open Inference Protocol: ``FP32``, ``FP64``, ``INT64``, ``UINT8`` or ``BYTES``
    (strings).
    """

    name: str
    datatype: str
    shape: tuple[int, ...]
    description: str
    names: tuple[str, ...] = ()  # names along the last axis
    categories: tuple[str, ...] = ()  # the categories with a separate encoding; other strings are rare categories
    missing: bool = False  # whether NaN, or an empty string, denotes a missing value

    def to_dict(self) -> dict[str, Any]:
        """Return the fields that are set, for JSON."""
        fields = asdict(self)
        return {key: value for key, value in fields.items() if value or key in ("name", "datatype", "shape")}


def input_specs(preprocessing: Preprocessing) -> tuple[TensorSpec, ...]:
    """Return a model's inputs, which are raw samples: one input, or with an encoder, one for each column in use."""
    shape = (SAMPLES, *preprocessing.task.input_shape)
    if preprocessing.encoder:
        return tuple(
            TensorSpec(
                column.name,
                "FP64" if column.mean is not None else "BYTES",
                (SAMPLES,),
                "numbers in the unit of the training data" if column.mean is not None else "categories",
                categories=column.categories,
                missing=column.imputes,
            )
            for column in preprocessing.encoder.columns
            if column.is_used
        )
    if preprocessing.sample_kind == "image":
        text = "decoded pixels from 0 to 255, (samples, channels, height, width), cropped and resized to this size"
        return (TensorSpec("image", "UINT8", shape, text),)
    if preprocessing.sample_kind == "image-float":
        text = "pixels on the scale of the training data, (samples, channels, height, width)"
        return (TensorSpec("image", "FP32", shape, text),)
    if preprocessing.task.kind == "text":
        return (TensorSpec("tokens", "INT64", shape, describe_tokens(*_vocabulary(preprocessing))),)
    name = preprocessing.task.kind
    text = "numbers in the unit of the training data, not standardised"
    return (TensorSpec(name, "FP64", shape, text, preprocessing.columns),)


def _vocabulary(preprocessing: Preprocessing) -> tuple[int, int, bool | None]:
    """Return the length of a text, the number of tokens, and whether words have a vocabulary (None: no texts)."""
    task = preprocessing.task
    return (
        task.input_shape[0],
        task.vocabulary,
        bool(preprocessing.words) if preprocessing.sample_kind == "text" else None,
    )


def output_specs(preprocessing: Preprocessing) -> tuple[TensorSpec, ...]:
    """Return a model's outputs: the probabilities or values, then for a classification the most probable class."""
    task, column_names = preprocessing.task, {spec.name for spec in input_specs(preprocessing)}
    shape = (SAMPLES, task.num_classes)
    if task.target == VALUES:
        return (
            TensorSpec(
                _unused("values", column_names), "FP32", shape, "values in their original unit", task.class_names
            ),
        )
    about = "probability of each " + ("label" if task.target == LABELS else "class")
    probabilities = TensorSpec(_unused("probabilities", column_names), "FP32", shape, about, task.class_names)
    if task.target == LABELS:
        return (probabilities,)
    return probabilities, TensorSpec(_unused("class", column_names), "BYTES", (SAMPLES,), "the most probable class")


def _unused(name: str, column_names: set[str]) -> str:
    """Return a name for an output that is not the name of a column."""
    while name in column_names:
        name += "_"
    return name


def model_card(model: ClientModel, run: str, scores: Mapping[str, float]) -> dict[str, Any]:
    """Return the origin, inputs, outputs, preprocessing and scores of a stored model, for JSON.

    The card contains statistics of the federation, the names of columns, categories and classes, and the vocabulary of
    texts, as the stored model does. It contains no samples, and no paths.

    Parameters
    ----------
    model : ClientModel
        The model.
    run : str
        The name of the run.
    scores : mapping
        The model's scores on the client's test samples, keyed by metric; empty if they are not available.
    """
    preprocessing, settings = model.preprocessing, model.settings
    origin = {"run": run, "method": settings.run.method.rpartition("/")[2], "client": model.client, "site": model.site}
    network = settings.train.model.rpartition("/")[2]
    threshold = {"threshold": settings.run.threshold} if preprocessing.task.target == LABELS else {}
    return {
        "posy": versions()["posy"],
        **origin,
        "point": model.point,
        "round": model.round,
        "chosen": model.chosen,
        "network": network,
        "members": len(model.members),
        "samples": preprocessing.sample_kind,
        "task": TITLES[preprocessing.task.target],
        "inputs": [spec.to_dict() for spec in input_specs(preprocessing)],
        "outputs": [spec.to_dict() for spec in output_specs(preprocessing)],
        "classes" if preprocessing.task.target == CLASSES else "names": list(model.class_names),
        **threshold,
        "scores": dict(scores),
        "preprocessing": json.loads(preprocessing.to_json()),
    }
