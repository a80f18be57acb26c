"""The central test set: samples at the server that belong to no client."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from logging import WARNING
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from flwr.common.logger import log
from torch import Tensor

from posy.data.agreement import MODES, columns_in, difference, statistics_in, task_of
from posy.data.client import cropped_once
from posy.data.columns import Columns
from posy.data.dataset import Content, Dataset, fixed_scale
from posy.data.encoding import encoder_in
from posy.data.errors import DataError
from posy.data.inputs import Preprocessing, normalised
from posy.data.readers.own import named_columns, read_own
from posy.data.settings import CENTRAL_SET, SITES, DataSettings
from posy.data.sites import check_content, check_sample_shape, encoded, numbers_in_run, targets_in_run
from posy.data.task import STANDARDISED
from posy.data.text import all_tokens_of, hashed
from posy.data.values import check_scaled
from posy.metrics import CLASSES
from posy.paths import exists
from posy.randomness import torch_generator
from posy.settings import SettingsError


class CentralTest(NamedTuple):
    """The samples of a central test set, on the CPU.

    ``x`` ``(n, *input_shape)`` contains a network's inputs. ``y`` contains classes ``(n,)``, labels ``(n, C)``, or
    values ``(n, C)`` in their original unit.
    """

    x: Tensor
    y: Tensor


def central_test(settings: DataSettings, dataset: Dataset | None, seed: int) -> CentralTest | None:
    """Return the central test set that the settings name, or None if they name none.

    The samples are preprocessed like the clients' samples, with the classes, the encoder and the scale of the run. A
    covariate shift (``shift``) does not apply to them.

    Parameters
    ----------
    settings : DataSettings
        The settings of the run; with ``dataset = sites``, they contain the agreed task.
    dataset : Dataset or None
        The clients' data set, or None with ``dataset = sites``.
    seed : int
        The seed of the run, for the crops of ``augment = resized-crop``.

    Raises
    ------
    SettingsError
        If the file or folder does not exist.
    DataError
        If the test set cannot be read, or does not suit the run, for example because of other columns or an unknown
        label.
    """
    if settings.central_test_data:
        preprocessing = agreed_preprocessing(settings) if dataset is None else Preprocessing.of(dataset, 0)
        with _naming_the_setting():
            content = read_central(settings, preprocessing, () if dataset is None else dataset.label_columns)
            x, y = _prepared(content, preprocessing)
    elif settings.test_set == CENTRAL_SET and dataset is not None and dataset.is_test is not None:
        preprocessing = Preprocessing.of(dataset, 0)
        x, y = dataset.x[dataset.is_test], dataset.y[dataset.is_test]
    else:
        return None
    kind, mean, std = preprocessing.task.kind, preprocessing.mean, preprocessing.std
    inputs = normalised(torch.from_numpy(np.array(x)), kind, mean, std)
    return CentralTest(cropped_once(inputs, settings, torch_generator(seed, "crop-central")), torch.from_numpy(y))


def agreed_preprocessing(settings: DataSettings) -> Preprocessing:
    """Return the preprocessing of a run over sites, derived from settings that contain the agreed task."""
    task, kind = task_of(settings), settings.sample_kind
    if task.kind in STANDARDISED:
        mean, std = statistics_in(settings, task.input_shape[-1])
    elif task.kind == "image":
        mean, std = fixed_scale(task.input_shape[0], 0.5 if kind == "image" else 0.0)
    else:
        mean, std = fixed_scale(1)
    columns = columns_in(settings, task.input_shape[0]) if kind == "features" else ()
    return Preprocessing(task, kind, mean, std, (), columns, encoder_in(settings.encoder))


@contextmanager
def _naming_the_setting() -> Iterator[None]:
    """Prefix the message of a :class:`DataError` with the key ``central-test-data``."""
    try:
        yield
    except DataError as error:
        raise DataError(f"central-test-data: {error}", error.code, error.column, error.count) from error


def read_central(
    settings: DataSettings, preprocessing: Preprocessing | None = None, labels: Sequence[str] = ()
) -> Content:
    """Read the file or folder in ``central-test-data``; if it comes with a test set, return only that test set.

    A table needs neither the group column nor the split column of the run. Images keep their original size if
    ``preprocessing`` is None, before the sites of a run have agreed on a task. ``labels`` contains the names of the
    label columns in the training data, if they are known; they apply if ``label-column`` is not set.

    Raises
    ------
    SettingsError, DataError
        As in :func:`central_test`.
    """
    path = Path(settings.central_test_data)
    if not exists(path):
        raise SettingsError(f"central-test-data = {str(path)!r}: this file or folder does not exist on the server")
    size, mode, columns = None, None, replace(Columns.of(settings), of_no_client=True)
    if "input-columns" not in named_columns(path):
        columns = replace(columns, group="", split="")  # also the names of arrays and of columns in metadata.csv
    if labels and not settings.label_column:
        columns = replace(columns, label=labels[0], more_labels=tuple(labels[1:]))
    if preprocessing is not None:
        columns = replace(columns, kind=preprocessing.sample_kind)
        if preprocessing.encoder:
            columns = replace(columns, categories=preprocessing.encoder.categorical)
        if preprocessing.sample_kind == "image":
            channels, height, width = preprocessing.task.input_shape
            size, mode = (width, height), MODES.get(channels)
    content = read_own(path, size, mode, columns=columns)
    if content.given is not None:
        raise DataError(
            f"{path}: a PFLlib directory contains the samples of several clients; name a file or folder of one test set"
        )
    if content.is_test is None or not content.is_test.any():
        return content
    x = np.array(content.x, object) if content.kind == "text" else content.x
    return replace(content, x=x[content.is_test], labels=content.labels[content.is_test], is_test=None)


def _prepared(content: Content, preprocessing: Preprocessing) -> tuple[np.ndarray, np.ndarray]:
    """Return the samples in the format of :class:`Dataset`, with a table's rows encoded, and the targets of the run.

    Raise :class:`DataError` if the data does not suit the run.
    """
    task, kind, encoder = preprocessing.task, preprocessing.sample_kind, preprocessing.encoder
    check_content(content, kind, task.target, ())
    _check_columns(content, preprocessing.columns)
    x = content.x
    if kind == "text":
        length, words = task.input_shape[0], preprocessing.words
        x = all_tokens_of(x, length, words) if words else hashed(x, length, task.vocabulary)
    else:
        check_sample_shape(content, (len(encoder.inputs),) if encoder else task.input_shape)
    if kind == "tokens" and x.max() >= task.vocabulary:
        raise DataError(f"{content.path}: token {x.max()}; the run's vocabulary allows 0 to {task.vocabulary - 1}")
    if task.kind in STANDARDISED:
        names = preprocessing.columns if kind == "features" else ()
        if names and not content.columns:
            listed = ", ".join(names[:5]) + " …" * (len(names) > 5)
            log(WARNING, "%s: no column names; Posy assumes the columns %s in this order", content.path, listed)
        x = encoded(content, names, encoder)
        check_scaled(x, preprocessing.mean, preprocessing.std, str(content.path), preprocessing.features)
    if task.target == CLASSES:
        return x, numbers_in_run(content, task.class_names)
    return x, targets_in_run(content, task.class_names)


def _check_columns(content: Content, names: tuple[str, ...]) -> None:
    """Raise :class:`DataError` if the columns of the file differ from the columns ``names`` of the run."""
    if label_inputs := [name for name in content.label_columns if name in names]:
        raise DataError(
            f"{content.path}: no label column: the run uses {label_inputs[0]} as an input; set label-column, or add "
            "the column of the labels",
            "label-column",
            label_inputs[0],
        )
    if content.columns and names and (mismatch := difference(content.columns, names)):
        raise DataError(f"{content.path}: columns {mismatch}", "other-columns")


def check_readable(settings: DataSettings) -> None:
    """Read ``central-test-data`` before the sites of a run answer, so that a wrong path or format fails at once.

    Raises
    ------
    SettingsError, DataError
        As in :func:`central_test`.
    """
    if settings.dataset == SITES and settings.central_test_data:
        with _naming_the_setting():
            read_central(settings)
