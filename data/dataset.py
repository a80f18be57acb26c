"""Data sets in memory: the content of a file or folder, and the task and samples derived from it."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from logging import getLogger
from pathlib import Path
from typing import Any

import numpy as np

from posy.data.encoding import Categories, Encoder, Moments, encoder_notes, make_encoder, table_facts
from posy.data.errors import Note
from posy.data.labels import distinct_labels, label_notes
from posy.data.published import FLAMBY
from posy.data.targets import target_notes, value_scale
from posy.data.task import STANDARDISED, TASK_KINDS, Task
from posy.data.text import UNKNOWN, tokenise
from posy.data.values import as_features, channel_moments, check_scaled, deviation
from posy.metrics import CLASSES, VALUES

_LOG = getLogger("flwr")  # Flower's logger, so that messages appear in the run's log
Indices = tuple[tuple[np.ndarray, np.ndarray], ...]
"""(train, test) indices of each client."""


@dataclass(frozen=True, eq=False)
class Dataset:
    """All training and test samples of a data set.

    ``x``, which may be memory-mapped, contains ``(N, H, W, C)`` images, uint8 or scaled float32; ``(N, F)`` features
    or ``(N, T, F)`` time series, float32, or float64 if float32 would change a value; ``(N, L)`` int64 tokens; or
    ``(N,)`` texts, which :func:`fitted` turns into tokens. A client subtracts ``mean`` and divides by ``std``. For
    images, both contain one float32 per channel, which applies to pixels/255 if the pixels are uint8. For features and
    time series, both contain one float64 per feature or channel. Before :func:`fitted`, and for values that need no
    normalisation, they are 0 and 1.
    """

    name: str  # name or path of the data
    task: Task
    x: np.ndarray
    y: np.ndarray  # (N,) int64 classes 0..C-1; (N, K) int64 labels, 0 or 1; or (N, K) float64 values
    mean: np.ndarray
    std: np.ndarray
    groups: np.ndarray | None = None  # (N,) int64 natural group of each sample: writer, user, medical centre
    group_names: tuple[str, ...] = ()  # indexed by group number; empty if the groups have no names
    split_groups: np.ndarray | None = (
        None  # (N,) int64 group, such as a patient; a client's samples of one group stay in the same split
    )
    is_test: np.ndarray | None = None  # (N,) bool: whether a sample belongs to the supplied test set, if any
    given: Indices | None = None  # set if the data is already partitioned
    notes: tuple[str, ...] = ()  # one-sentence warnings about the data
    skipped: int = 0  # number of unreadable files
    sample_kind: str = ""  # as in :class:`Content`
    words: tuple[str, ...] = ()  # vocabulary: word i has token i + 2; empty if words are hashed
    columns: tuple[str, ...] = ()  # names of the features, if the data has them
    label_columns: tuple[str, ...] = ()  # names of the columns of the labels or values, if the data is a table
    order_seed: int = 0  # a site's secret seed for the order of its samples in batches; 0: use the run's seed
    client_scales: tuple[tuple[np.ndarray, np.ndarray], ...] = ()  # each client's mean and std, with scaling = client
    categories: Categories = ()  # as in :class:`Content`; empty after :func:`fitted`
    encoder: Encoder | None = None  # the encoder of a table's rows, set by :func:`fitted`

    def __len__(self) -> int:
        """Return the number of samples N."""
        return len(self.y)

    def scale_of(self, client: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the mean and the standard deviation with which a client standardises its samples."""
        return self.client_scales[client] if self.client_scales else (self.mean, self.std)


@dataclass(frozen=True, eq=False)
class Content:
    """The content of a file or folder, before a task is derived from it."""

    path: Path  # for messages
    kind: str  # image (uint8), image-float, features, series, text or tokens (word indices)
    x: Any  # as in Dataset; for text, the N texts
    labels: np.ndarray  # (N,), as posy.data.labels.as_labels returns them, or (N, K), as posy.data.targets.as_targets
    groups: np.ndarray | None = None  # groups, is_test and given are as in Dataset
    is_test: np.ndarray | None = None
    given: Indices | None = None
    class_names: tuple[str, ...] = ()  # if the data has them; the labels are then class indices 0..C-1
    target: str = CLASSES  # a target in posy.metrics; labels and values always have class_names
    columns: tuple[str, ...] = ()  # names of the features, if the data has them
    label_columns: tuple[str, ...] = ()  # as in Dataset
    group_names: tuple[str, ...] = ()  # as in Dataset
    read_notes: tuple[str, ...] = ()  # one-sentence warnings about the data
    split_groups: np.ndarray | None = None  # as in Dataset
    unreadable: tuple[str, ...] = ()  # one error message per unreadable file
    resized: bool = False  # whether the samples come from image files, which can be resized to any size
    categories: Categories = ()
    """Names of the categories in each feature column, whose values are then indices; NaN denotes a missing value."""

    @cached_property
    def distinct(self) -> tuple[np.ndarray, tuple[str, ...]]:
        """Labels as indices of the classes that occur, ``(N,)`` int64, and the names of these classes."""
        return distinct_labels(self.labels)

    @cached_property
    def digest(self) -> bytes:
        """Hash of the samples and labels."""
        digest = hashlib.blake2b()
        if self.kind == "text":
            for text in self.x:
                digest.update(f"{len(text)} {text}".encode(errors="surrogatepass"))
        else:
            digest.update(f"{self.x.dtype} {self.x.shape}".encode())
            for block in bytes_of(self.x):
                digest.update(block)
        if any(names is not None for names in self.categories):
            digest.update(repr(self.categories).encode(errors="surrogatepass"))
        for label in self.labels.tolist():
            digest.update(f"{label}\0".encode(errors="surrogatepass"))
        return digest.digest()

    @property
    def notes(self) -> tuple[str, ...]:
        """Warnings about the data and its labels."""
        if self.target != CLASSES:
            return (*self.read_notes, *target_notes(self.labels, self.class_names))
        return (*self.read_notes, *label_notes(*self.distinct, self.is_test))


def bytes_of(array: np.ndarray) -> Iterator[memoryview]:
    """Yield the bytes of an array in blocks, so that an array on disk is never loaded as a whole."""
    for row in range(0, len(array), 1024):
        yield np.ascontiguousarray(array[row : row + 1024]).data


def make_dataset(
    name: str,
    sample_kind: str,
    x: np.ndarray,
    y: np.ndarray,
    class_names: Sequence[str],
    vocabulary: int = 0,
    scale: tuple[np.ndarray, np.ndarray] | None = None,
    text_length: int = 0,
    target: tuple[Any, ...] = (),
    **attributes: Any,
) -> Dataset:
    """Build a :class:`Dataset` from its samples, its labels and the parts of its :class:`Task`.

    uint8 pixels are scaled to [-1, 1], so that learning curves are comparable with PFLlib's. Other pixels and tokens
    are unchanged. ``scale`` is the mean and the standard deviation of the features; without it, :func:`fitted` computes
    them. ``text_length`` is the number of tokens per text after :func:`fitted`. ``sample_kind`` is as in
    :class:`Content`. ``target`` contains the fields of :class:`Task` from ``target`` onwards. ``attributes`` are passed
    to :class:`Dataset`.
    """
    shape: tuple[int, ...] = x.shape[1:] or (text_length,)
    kind = TASK_KINDS[sample_kind]
    if kind == "image":
        shape = (shape[2], *shape[:2])
        scale = fixed_scale(shape[0], 0.5 if x.dtype == np.uint8 else 0.0)
    elif kind == "text":
        scale = fixed_scale(1)
    elif scale is None:
        scale = np.zeros(shape[-1]), np.ones(shape[-1])
    task = Task(kind, shape, tuple(class_names), vocabulary, *target)
    mean, std = scale
    return Dataset(name, task, x, y, mean, std, sample_kind=sample_kind, **attributes)


def fixed_scale(channels: int, centre: float = 0.0) -> tuple[np.ndarray, np.ndarray]:
    """Return the mean and the standard deviation of images or tokens, float32 ``(channels,)`` each.

    With ``centre = 0.5``, they scale pixels to [-1, 1]; with 0, they change nothing.
    """
    return np.full(channels, centre, np.float32), np.full(channels, centre or 1.0, np.float32)


def fitted(
    dataset: Dataset,
    train: Sequence[np.ndarray],
    max_words: int,
    *,
    scaling: str = "auto",
    protocol: str = "",
    imputes: bool = False,
    min_rows: int = 10,
) -> Dataset:
    """Return the data set with statistics and a vocabulary derived only from training samples.

    The mean and the standard deviation of each feature, and of each value of a regression, are computed over the
    training samples of all clients. A constant feature is only centred. Texts become tokens, with one token for each of
    the ``max_words`` most frequent words in the training texts. Images and tokens need no statistics.

    Parameters
    ----------
    dataset : Dataset
        A data set returned by :func:`posy.data.datasets.load_dataset`.
    train : sequence of numpy.ndarray
        Indices ``(n_i,)`` of each client's training samples, without test and validation samples.
    max_words : int
        Maximum number of words in the vocabulary.
    scaling, protocol : str
        The settings with the same names. With ``scaling = client``, each client's training samples determine the mean
        and the standard deviation of its features.
    imputes : bool
        Whether the rows of tables are encoded even if they have no categories, so that missing values are allowed.
    min_rows : int
        Minimum number of training samples for a one-hot column of a table.

    Raises
    ------
    DataError
        If a standardised sample exceeds the range of float32.
    """
    rows = np.unique(np.concatenate(train))
    if dataset.task.target == VALUES:
        value_mean, value_std = value_scale(dataset.y, rows)
        dataset = replace(dataset, task=replace(dataset.task, value_mean=value_mean, value_std=value_std))
    if dataset.sample_kind == "features" and dataset.columns and (imputes or dataset.categories):
        dataset = _encoded(dataset, rows, imputes=imputes, min_rows=min_rows)
    if dataset.task.kind in STANDARDISED:
        mean, squares = channel_moments(dataset.x, rows)
        mean, std = _without_one_hot(dataset.encoder, mean, deviation(mean, squares / len(rows)))
        check_scaled(dataset.x, mean, std, dataset.name, dataset.columns)
        dataset = replace(dataset, mean=mean, std=std)
        if scaling == "client":
            scales = [_client_scale(dataset, rows, protocol) for rows in train]
            dataset = replace(dataset, client_scales=tuple(scales))
    if dataset.sample_kind != "text":
        return dataset
    tokens, words = tokenise(dataset.x, dataset.task.input_shape[0], max_words, rows)
    task = replace(dataset.task, vocabulary=len(words) + UNKNOWN + 1)
    return replace(dataset, task=task, x=tokens, words=words)


def _client_scale(dataset: Dataset, rows: np.ndarray, protocol: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the mean and the standard deviation of each feature over a client's training samples."""
    mean, squares = channel_moments(dataset.x, rows)
    if protocol == FLAMBY:
        std = np.sqrt(squares / max(1, len(rows) - 1)) + 1e-9
    else:
        std = deviation(mean, squares / len(rows))
    mean, std = _without_one_hot(dataset.encoder, mean, std)
    check_scaled(dataset.x[rows], mean, std, dataset.name, dataset.columns)
    return mean, std


def _encoded(dataset: Dataset, rows: np.ndarray, *, imputes: bool, min_rows: int) -> Dataset:
    """Return the data set, encoded with an encoder derived from some rows of its table."""
    facts, mean, squares = table_facts(dataset.x, dataset.categories, rows, min_rows)
    total = Moments(len(rows), np.array(facts.present), mean, squares)
    encoder = make_encoder(dataset.columns, [facts], total, imputes=imputes)
    x, notes = as_features(encoder.encode(dataset.x, dataset.categories, dataset.name), dataset.name)
    notes = [*encoder_notes(encoder), *notes]
    for note in notes:
        _LOG.warning("%s: %s", dataset.name, note)
    return replace(
        dataset,
        task=replace(dataset.task, input_shape=(x.shape[1],)),
        x=x,
        columns=encoder.names,
        categories=(),
        encoder=encoder,
        notes=(*dataset.notes, *map(Note, notes)),
    )


def _without_one_hot(encoder: Encoder | None, mean: np.ndarray, std: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the mean and the standard deviation, set to 0 and 1 for one-hot columns, which are not scaled."""
    if encoder is None:
        return mean, std
    return np.where(encoder.is_number, mean, 0.0), np.where(encoder.is_number, std, 1.0)
