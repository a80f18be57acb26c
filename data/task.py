"""The task that the data defines for a model."""

from dataclasses import dataclass

from posy.metrics import CLASSES

TASK_KINDS = {"image": "image", "image-float": "image", "features": "features", "text": "text", "tokens": "text"}
"""Kind of task for each kind of sample."""


@dataclass(frozen=True)
class Task:
    """Kind and shape of the samples, and the target of the predictions.

    The kind is ``image`` (float32 pixels, ``(C, H, W)``), ``features`` (float32, ``(F,)``) or ``text`` (int64 tokens,
    ``(L,)``, where 0 is padding).
    """

    kind: str
    input_shape: tuple[int, ...]  # of one sample, as the model receives it
    class_names: tuple[str, ...]  # of the C classes in the order of the labels 0..C-1, or of the C labels or values
    vocabulary: int = 0  # number of tokens of a text task, including padding
    target: str = CLASSES  # a target in posy.metrics

    @property
    def num_classes(self) -> int:
        """Number of classes, labels or values C."""
        return len(self.class_names)
