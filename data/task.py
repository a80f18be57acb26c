"""The classification task that the data defines for a model."""

from dataclasses import dataclass

TASK_KINDS = {"image": "image", "image-float": "image", "features": "features", "text": "text", "tokens": "text"}
"""Kind of task for each kind of sample."""


@dataclass(frozen=True)
class Task:
    """Kind, shape and classes of a classification task.

    The kind is ``image`` (float32 pixels, ``(C, H, W)``), ``features`` (float32, ``(F,)``) or ``text`` (int64 tokens,
    ``(L,)``, where 0 is padding).
    """

    kind: str
    input_shape: tuple[int, ...]  # of one sample, as the model receives it
    class_names: tuple[str, ...]  # of the C classes, in the order of the labels 0..C-1
    vocabulary: int = 0  # number of tokens of a text task, including padding

    @property
    def num_classes(self) -> int:
        """Number of classes C."""
        return len(self.class_names)
