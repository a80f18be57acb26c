"""The clients' updates, checks of their replies, and means over clients."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, SupportsFloat
from zipfile import BadZipFile

import numpy as np
import numpy.typing as npt
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

from posy.flower import record_in
from posy.metrics import METRICS
from posy.models.parameters import FloatArray

MAX_EXAMPLES = 1_000_000_000
"""Smallest number of samples that the server rejects as impossible."""
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
"""Errors that malformed bytes and records may raise (SyntaxError: a bad array header; AttributeError and BadZipFile: an
.npz instead of an array; MemoryError: a header with too large a shape)."""
ITEM_BYTES, HEADER_BYTES = 8, 4096
"""Maximum size in bytes of an array element in a reply, and of the array's header."""
LOSS = "loss"
"""Key of the loss on a split, which clients report together with the metrics in :mod:`posy.metrics`."""
SCORES = {
    f"{point}{split}-{measure}": measure
    for split in ("", "-validation", "-training")
    for point in ("served", "local")
    for measure in (LOSS, *METRICS)
}
"""Keys of a client's scores, mapped to their measures: one key for each split, evaluation point and measure."""
BLOCK = 16_384
"""Number of parameters that are processed at a time in double precision."""


@dataclass
class Update:
    """A client's update after training."""

    arrays: dict[str, Any]
    """The arrays by name, in the order of the method's declaration. On the client, they are NumPy arrays or tensors. On
    the server, they are NumPy arrays with checked shapes and finite values."""
    loss: SupportsFloat
    """Mean training loss of the last local epoch; on the client, it may be a one-element tensor."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Additional numbers for the server."""
    client: int = -1
    """Index of the client; the server sets it."""
    num_examples: int = 0
    """The client's number of training samples n_i; the server sets it."""
    weight: int | None = None
    """Weight of the client in the server's means; the server sets it. None: ``num_examples``."""
    weight_factor: float = 1.0
    """Factor by which ``max-client-weight`` scales the client's weight; the server sets it."""
    samples_factor: float = 1.0
    """Factor by which ``max-client-weight`` scales the sample count in sums over samples; the server sets it."""


@dataclass
class ClientInfo:
    """The server's information about one client: its node, its sample counts, and the report of its site."""

    client: int
    node_id: int
    num_train: int
    num_test: int
    name: str = ""
    class_counts: tuple[int, ...] = ()
    fingerprint: str = ""
    skipped: int = 0
    node_settings: str = ""
    """The settings that the client's node has chosen, for the record; empty if there are none."""


LIMITED = ("clipped", "discarded", "down_weighted")
"""Attributes of :class:`RoundRecord` that list the clients whose influence the server has limited."""


@dataclass
class RoundRecord:
    """The record of one round, which is written to the run's files."""

    number: int
    cohort: tuple[int, ...] = ()
    clients: dict[int, dict[str, Any]] = field(default_factory=dict)
    quantities: dict[str, Any] = field(default_factory=dict)
    dropped: list[tuple[int, str]] = field(default_factory=list)
    away: tuple[int, ...] = ()
    """Clients that had no node at the start of the round."""
    unreached: list[int] = field(default_factory=list)
    """Members whose evaluation the server has not accepted, so that they may lack the model of this round."""
    clipped: list[int] = field(default_factory=list)
    """Clients whose updates the server scaled down."""
    discarded: list[int] = field(default_factory=list)
    down_weighted: list[int] = field(default_factory=list)
    """Clients whose accepted updates had no weight, and clients whose weight the server lowered."""
    asked: int = 0
    trained: set[int] = field(default_factory=set)
    """Clients whose updates the server has accepted; empty if the round has failed."""
    evaluated: int = 0
    """Numbers of clients with test samples: those sent an evaluation message (``asked``), and those that replied."""
    sums: dict[str, Any] = field(default_factory=dict)
    """With secure aggregation, the scores summed over clients (:class:`~posy.strategies.score_sums.Tally`), by key."""
    bytes_up: int = 0
    bytes_down: int = 0
    samples: int = 0
    """Number of samples that clients have trained on, counting every pass."""
    seconds: dict[str, float] = field(default_factory=dict)

    def row(self, client: int) -> dict[str, Any]:
        """Return the client's row, creating it on the first call."""
        return self.clients.setdefault(client, {"bytes_up": 0, "bytes_down": 0})

    @property
    def missing(self) -> list[int]:
        """Clients that had no node or whose reply was dropped; a client outside the cohort is not missing."""
        return sorted({*self.away, *(client for client, _ in self.dropped if client >= 0)})


class BadReplyError(ValueError):
    """A reply that the server cannot use."""


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
        If a weight is negative, or the weights sum to zero.
    """
    w = np.asarray(weights, np.float64)
    if (w < 0).any() or not w.sum() > 0:
        raise ValueError(f"weights must be non-negative with a positive sum, got {w.tolist()}")
    return (w / w.sum()).astype(np.float32) @ rows


def mean_of(updates: list[Update], name: str = "model") -> FloatArray:
    """Return the mean of one array over the updates, weighted according to ``client-weights``."""
    rows = stacked(updates, name)
    return weighted_mean(rows.reshape(len(rows), -1), num_examples(updates)).reshape(rows.shape[1:])


def gram(rows: FloatArray, block: int = BLOCK, origin: FloatArray | None = None) -> npt.NDArray[np.float64]:
    """Return the inner products <row_i, row_j> in double precision.

    The inner products of nearly equal models differ only in digits beyond float32 precision. With the clients' starting
    model as the origin, the differences appear in the leading digits.

    Parameters
    ----------
    rows : numpy.ndarray, float32, (M, d)
        Stacked vectors.
    block : int
        Number of parameters in a block; the function allocates O(M block + M²) memory.
    origin : numpy.ndarray, float32, (d,), optional
        Vector to subtract from each row.

    Returns
    -------
    numpy.ndarray, float64, (M, M)
    """
    products = np.zeros((len(rows), len(rows)))
    for start in range(0, rows.shape[1], block):
        part = rows[:, start : start + block].astype(np.float64)
        if origin is not None:
            part -= origin[start : start + block]
        products += part @ part.T
    return products


def distances_from_gram(products: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return ||x_i − x_j||² ``(M, M)``, never negative, from the inner products of the vectors x."""
    lengths = np.diag(products)
    squares = np.maximum(lengths[:, None] + lengths[None, :] - 2 * products, 0.0)
    np.fill_diagonal(squares, 0.0)
    return squares


def stacked(updates: list[Update], name: str = "model") -> FloatArray:
    """Stack one array of every update into ``(M, ...)``."""
    return np.stack([np.asarray(update.arrays[name], np.float32) for update in updates])


def num_examples(updates: list[Update]) -> npt.NDArray[np.float64]:
    """Return the clients' weights in means ``(M,)``: training samples n_i, or 1 with ``client-weights=uniform``.

    No client's share exceeds ``max-client-weight``.
    """
    return unlimited_weights(updates) * [update.weight_factor for update in updates]


def unlimited_weights(updates: list[Update]) -> npt.NDArray[np.float64]:
    """Return the clients' weights ``(M,)`` before ``max-client-weight`` limits them."""
    return np.array([u.num_examples if u.weight is None else u.weight for u in updates], np.float64)


def sample_counts(updates: list[Update]) -> npt.NDArray[np.float64]:
    """Return each client's number of training samples n_i ``(M,)``, regardless of ``client-weights``.

    If the strategy sums over samples, no client's share of the samples exceeds ``max-client-weight``.
    """
    return np.array([update.num_examples * update.samples_factor for update in updates], np.float64)


def changes(
    arrays: Sequence[npt.NDArray[Any]], references: Sequence[npt.NDArray[Any]]
) -> list[npt.NDArray[np.float64]]:
    """Return the differences between arrays and their references, in double precision."""
    pairs = zip(arrays, references, strict=True)
    return [np.asarray(array, np.float64) - np.asarray(before, np.float64) for array, before in pairs]


def norm_of(arrays: Iterable[npt.NDArray[np.float64]]) -> float:
    """Return the L2 norm over the elements of all arrays."""
    return math.sqrt(sum(float(np.square(array).sum()) for array in arrays))


def check_count(key: str, count: Any, least: int) -> None:
    """Raise :class:`BadReplyError` for an impossible number of samples."""
    if not least <= count < MAX_EXAMPLES or count != int(count):
        raise BadReplyError(f"{key} = {count}")


def check_enrolled(key: str, count: Any, enrolled: int) -> None:
    """Raise :class:`BadReplyError` if a client's number of samples has changed since it joined."""
    if count != enrolled:
        raise BadReplyError(f"{key} = {count:.0f}, but the client joined with {enrolled}")


def read_update(content: RecordDict, shapes: Mapping[str, tuple[int, ...]], *, with_loss: bool = True) -> Update:
    """Return the update in a reply to a training message, leaving the client's index unset.

    Parameters
    ----------
    content : RecordDict
        The reply.
    shapes : mapping of str to tuple of int
        The expected names and shapes of its arrays.
    with_loss : bool
        Whether the reply contains the training loss; otherwise the update's loss is NaN.

    Raises
    ------
    BadReplyError
        If its arrays have other names or shapes, or contain NaN or infinite numbers, or if a count is impossible. A
        malformed reply may raise any of :data:`UNREADABLE`.
    """
    record, metrics = record_in(content, "arrays", ArrayRecord), read_metrics(content)
    check_size(record, shapes)
    arrays = {name: record[name].numpy() for name in shapes}
    count, loss = metrics["num-examples"], metrics["train-loss"] if with_loss else math.nan
    check_count("num-examples", count, 1)
    check_count("num-test", metrics["num-test"], 0)
    for name, array in arrays.items():
        if array.shape != shapes[name]:
            raise BadReplyError(f"{name} has the shape {array.shape} instead of {shapes[name]}")
        if array.dtype.kind not in "iuf":
            raise BadReplyError(f"{name} has the type {array.dtype} instead of numbers")
    # The server computes in float32, for which a finite float64 may be too large.
    with np.errstate(over="ignore"):
        finite = all(np.isfinite(np.asarray(a, np.float32)).all() for a in arrays.values())
    if (with_loss and not math.isfinite(loss)) or not finite:
        raise BadReplyError("NaN or Inf in the reply")
    return Update(arrays, float(loss), metrics, num_examples=int(count))


def read_metrics(content: RecordDict) -> Mapping[str, Any]:
    """Return the metrics in a reply; raise :class:`BadReplyError` unless all of them are finite numbers."""
    metrics: Mapping[str, Any] = record_in(content, "metrics", MetricRecord)
    for key, value in metrics.items():
        if isinstance(value, list):
            raise BadReplyError(f"malformed reply: {key} is a list")
        if not math.isfinite(value):
            raise BadReplyError(f"{key} = {value}")
    return metrics


def number_in(metrics: Mapping[str, Any], key: str) -> Any:
    """Return a number in the metrics of a reply; raise :class:`BadReplyError` if it is missing."""
    if key not in metrics:
        raise BadReplyError(f"the reply lacks the metric {key}")
    return metrics[key]


class Evaluation(NamedTuple):
    """The result of an evaluation in a client's reply."""

    metrics: Mapping[str, Any]
    num_train: int
    num_test: int
    scores: dict[str, float]
    samples: int
    chosen: str


def read_evaluation(content: RecordDict) -> Evaluation:
    """Return the evaluation result in a client's reply.

    Raises
    ------
    BadReplyError
        If a number is impossible. A malformed reply may raise any of :data:`UNREADABLE`.
    """
    metrics = read_metrics(content)
    count, tested = metrics["num-train"], metrics["num-examples"]
    check_count("num-train", count, 1)
    check_count("num-examples", tested, 0)
    chosen = record_in(content, "config", ConfigRecord).get("chosen", "")
    return Evaluation(
        metrics, int(count), int(tested), scores_of(metrics), samples_of(metrics), str(chosen) if chosen else ""
    )


def check_size(record: ArrayRecord, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise :class:`BadReplyError` for unexpected arrays or too many bytes, before decoding the arrays."""
    for name in shapes:
        if name not in record:
            raise BadReplyError(f"the reply lacks the array {name}")
    if len(record) > len(shapes):  # the client chose the extra names, so the reason does not quote them
        raise BadReplyError(f"the reply has {len(record)} arrays instead of {len(shapes)}")
    for name, shape in shapes.items():
        size = len(vars(record[name]).get("data", b""))  # an array that is passed by reference has no bytes
        if size > (most := ITEM_BYTES * math.prod(shape) + HEADER_BYTES):
            raise BadReplyError(f"{name} has {size} bytes; with the shape {shape} it may have at most {most}")


def scores_of(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the scores in a reply, keyed by column.

    Raises :class:`BadReplyError` unless all losses are finite and non-negative, and each metric is in its range.
    """
    scores = {key: metrics[key] for key in SCORES if key in metrics}
    for key, value in scores.items():
        name = SCORES[key]
        is_possible = value >= 0 if name == LOSS else METRICS[name].is_possible(value)
        if not (math.isfinite(value) and is_possible):
            raise BadReplyError(f"{key} = {value}")
    return {key.replace("-", "_"): value for key, value in scores.items()}


def samples_of(metrics: Mapping[str, Any]) -> int:
    """Return the number of samples that a client trained on for a reply, counting every pass."""
    count = metrics.get("samples", 0)
    check_count("samples", count, 0)
    return int(count)


def client_of(message: Message) -> int:
    """Return the client to which a message is addressed."""
    number: Any = record_in(message.content, "config", ConfigRecord)["client"]
    return int(number)
