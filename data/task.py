"""The task that the data defines for a model."""

from dataclasses import dataclass

from posy.metrics import CLASSES, LABELS, VALUES

TASK_KINDS = {
    "image": "image",
    "image-float": "image",
    "features": "features",
    "series": "series",
    "text": "text",
    "tokens": "text",
}
"""Kind of task for each kind of sample."""
STANDARDISED = ("features", "series")
"""Kinds of tasks whose samples are standardised with statistics of the training samples."""
CLASSIFICATION, MULTI_LABEL, REGRESSION = "classification", "multi-label", "regression"
TARGETS = {CLASSIFICATION: CLASSES, MULTI_LABEL: LABELS, REGRESSION: VALUES}
"""Target in :mod:`posy.metrics` for each value of the setting ``task``."""
TITLES = {target: task for task, target in TARGETS.items()}
"""Value of the setting ``task`` for each target."""


@dataclass(frozen=True)
class Task:
    """Kind and shape of the samples, and the target of the predictions.

    The kind is ``image`` (float32 pixels, ``(C, H, W)``), ``features`` (float32, ``(F,)``), ``series`` (float32,
    ``(T, F)``: T time steps of F channels) or ``text`` (int64 tokens, ``(L,)``, where 0 is padding).

    Networks predict standardised values: (value - mean) / std, with ``value_mean`` and ``value_std``.
    """

    kind: str
    input_shape: tuple[int, ...]  # shape of one sample, as the model receives it
    class_names: tuple[str, ...]  # names of the C classes in the order 0..C-1, or of the C labels or values
    vocabulary: int = 0  # number of tokens of a text task, including padding
    target: str = CLASSES  # a target in posy.metrics
    value_mean: tuple[float, ...] = ()  # mean of each of the C values over the training samples; empty: 0
    value_std: tuple[float, ...] = ()  # standard deviation of each value over the same samples; empty: 1

    @property
    def num_classes(self) -> int:
        """Number of classes, labels or values C."""
        return len(self.class_names)
