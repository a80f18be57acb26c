"""What clients have sent: checks of their replies, and means over them."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from zipfile import BadZipFile

import numpy as np
import numpy.typing as npt
from flwr.app import ArrayRecord, Message

from posy.models.parameters import FloatArray

Arrays = list[npt.NDArray[np.generic]]


MAX_EXAMPLES = 1_000_000_000


UNREADABLE = (
    LookupError,
    TypeError,
    ValueError,
    ArithmeticError,
    EOFError,
    OSError,
    SyntaxError,
    AttributeError,
    MemoryError,
    BadZipFile,
)
"""What reading bytes and records that are not as they should be may raise (SyntaxError: an array's header;
AttributeError and BadZipFile: an .npz in its place; MemoryError: a header that claims too much)."""


ITEM_BYTES, HEADER_BYTES = 8, 4096
"""The most that an element and the header of an array in a reply may take."""


SCORES = ("served-accuracy", "served-loss", "local-accuracy", "local-loss")


@dataclass
class Update:
    """One client's good reply after training.

    Attributes
    ----------
    client : int
        Index of the client.
    arrays : list of numpy.ndarray
        What it sent, shapes checked and every value finite.
    num_examples : int
        Its training samples n_i.
    loss : float
        Its mean training loss over the last local epoch.
    metrics : Mapping of str to float
        Further numbers it sent.
    """

    client: int
    arrays: Arrays
    num_examples: int
    loss: float
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass
class ClientInfo:
    """What the server knows of one client: its node, how many samples it has, and what its site has told."""

    client: int
    node_id: int
    num_train: int
    num_test: int
    name: str = ""
    class_counts: tuple[int, ...] = ()
    fingerprint: str = ""
    skipped: int = 0


@dataclass
class RoundRecord:
    """What happened in one round, for the files that a run leaves."""

    number: int
    cohort: tuple[int, ...] = ()
    clients: dict[int, dict[str, Any]] = field(default_factory=dict)
    quantities: dict[str, Any] = field(default_factory=dict)
    dropped: list[tuple[int, str]] = field(default_factory=list)
    away: tuple[int, ...] = ()
    """Clients that had no node when the round began."""
    asked: int = 0
    evaluated: int = 0
    """Clients that were asked to evaluate, those without test samples left out, and of them those who did."""
    bytes_up: int = 0
    bytes_down: int = 0
    seconds: dict[str, float] = field(default_factory=dict)

    def row(self, client: int) -> dict[str, Any]:
        """Return the client's row, made when first asked for."""
        return self.clients.setdefault(client, {"bytes_up": 0, "bytes_down": 0})

    @property
    def missing(self) -> list[int]:
        """Clients that had no node, or of which a reply was dropped; those that were not asked are not missing."""
        return sorted({*self.away, *(client for client, _ in self.dropped if client >= 0)})


class BadReplyError(ValueError):
    """A reply that must not enter the server's state."""


def weighted_mean(rows: FloatArray, weights: npt.ArrayLike) -> FloatArray:
    """Return Σ_i weights_i rows_i / Σ_i weights_i.

    Parameters
    ----------
    rows : numpy.ndarray, float32, (M, d)
        Stacked vectors.
    weights : array_like, (M,)
        Non-negative weights, not all zero.

    Raises
    ------
    ValueError
        If the weights sum to zero or one is negative.
    """
    w = np.asarray(weights, np.float64)
    if (w < 0).any() or not w.sum() > 0:
        raise ValueError(f"weights must be non-negative with a positive sum, got {w.tolist()}")
    return (w / w.sum()).astype(np.float32) @ rows


def stacked(updates: list[Update], position: int = 0) -> FloatArray:
    """Return one array of every update as a matrix ``(M, ...)``."""
    return np.stack([np.asarray(update.arrays[position], np.float32) for update in updates])


def check_count(key: str, count: Any, least: int) -> None:
    """Raise :class:`BadReplyError` for a number of samples that cannot be."""
    if not least <= count < MAX_EXAMPLES or count != int(count):
        raise BadReplyError(f"{key} = {count}")


def _check_size(record: ArrayRecord, shapes: list[tuple[int, ...]]) -> None:
    """Refuse a reply that is too large for what is expected, before its arrays are made from their bytes."""
    if len(record) != len(shapes):
        raise BadReplyError(f"{len(record)} arrays instead of {len(shapes)}")
    for array, shape in zip(record.values(), shapes, strict=True):
        size = len(vars(array).get("data", b""))  # an array that was passed by reference has no bytes
        if size > (most := ITEM_BYTES * math.prod(shape) + HEADER_BYTES):
            raise BadReplyError(f"an array of {size} bytes, for the shape {shape} it may have {most}")


def _scores_of(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the scores in a reply by column; losses must be finite, accuracies lie in 0..1."""
    scores = {key: metrics[key] for key in SCORES if key in metrics}
    for key, value in scores.items():
        if not math.isfinite(value) or value < 0 or (key.endswith("accuracy") and value > 1):
            raise BadReplyError(f"{key} = {value}")
    return {key.replace("-", "_"): value for key, value in scores.items()}


def _client_of(message: Message) -> int:
    return int(message.content.config_records["config"]["client"])  # type: ignore[arg-type]


def num_examples(updates: list[Update]) -> npt.NDArray[np.float64]:
    """Return the numbers of training samples n_i ``(M,)``."""
    return np.array([update.num_examples for update in updates], np.float64)
