"""What a model needs to know of the data."""

from dataclasses import dataclass

TASK_KINDS = {"image": "image", "image-float": "image", "features": "features", "text": "text", "tokens": "text"}
"""Kind of the task for each kind of samples."""


@dataclass(frozen=True)
class Task:
    """Kind, shape and classes of a classification task.

    Attributes
    ----------
    kind : str
        ``image`` (float32 pixels, ``(C, H, W)``), ``features`` (float32, ``(F,)``) or ``text``
        (int64 token numbers, ``(L,)``, 0 is padding).
    input_shape : tuple of int
        Shape of one sample as the model sees it.
    class_names : tuple of str
        Names of the C classes, in the order of the labels 0..C-1.
    vocabulary : int
        Number of tokens of a text task, padding included; 0 otherwise.
    """

    kind: str
    input_shape: tuple[int, ...]
    class_names: tuple[str, ...]
    vocabulary: int = 0

    @property
    def num_classes(self) -> int:
        """Number of classes C."""
        return len(self.class_names)
