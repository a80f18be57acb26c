"""Load any data set by its name or path."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from posy.data.columns import Columns
from posy.data.dataset import Dataset, fitted
from posy.data.errors import DataError
from posy.data.partitions import Partition, partition
from posy.data.published import DATASETS
from posy.data.readers.arrow import HUB, read_hub
from posy.data.readers.functions import read_function
from posy.data.readers.own import as_dataset, named_columns, read_own
from posy.data.readers.published import load_published
from posy.data.settings import DataSettings, check_subset, path_of
from posy.data.task import STANDARDISED, TITLES
from posy.data.text import MAX_LENGTH
from posy.extensions import is_custom
from posy.paths import absolute, exists
from posy.randomness import numpy_generator
from posy.settings import SettingsError


def load_clients(settings: DataSettings, data_dir: Path, seed: int) -> tuple[Dataset, Partition]:
    """Return a data set, ready for training, and its partition among the clients.

    The statistics and the vocabulary are derived only from the training samples. The function raises the same
    errors as :func:`load_dataset` and :func:`posy.data.partitions.partition`.
    """
    dataset = load_dataset(settings, data_dir, seed)
    part = partition(dataset, settings, seed)
    fitted_dataset = fitted(
        dataset,
        part.train,
        settings.vocabulary,
        scaling=settings.scaling,
        protocol=settings.protocol,
        imputes=settings.missing == "impute",
        min_rows=settings.min_category_rows,
    )
    return fitted_dataset, part


def load_dataset(settings: DataSettings, data_dir: Path, seed: int) -> Dataset:
    """Load a data set by name or path. If ``max_samples`` is set, the seed selects the samples.

    Features are not yet standardised, and texts are not yet tokenised: :func:`posy.data.dataset.fitted`, which does
    both, needs the partition.

    Raises
    ------
    SettingsError
        If the name or path does not exist, or ``max_samples``, ``image_size``, ``text_length`` or ``vocabulary`` does
        not fit the data.
    DataError
        If the data is missing or damaged.
    """
    name = settings.dataset
    try:
        if name in DATASETS:
            _check_columns(Columns.of(settings), name, ())
            dataset = load_published(name, data_dir, settings)
        else:
            size = (settings.image_size,) * 2 if settings.image_size else None
            function = is_custom(name) and not exists(absolute(name))
            columns = Columns.of(settings)
            if name.startswith(HUB):
                content = read_hub(name, columns, size, settings.download)
            elif function:
                _check_columns(columns, name, ())
                content = read_function(name, columns)
            else:
                path = path_of(name, data_dir)
                _check_columns(columns, name, named_columns(path))
                content = read_own(path, size, columns=columns)
            dataset = as_dataset(content, name, settings.text_length or MAX_LENGTH)
    except OSError as error:
        raise DataError(f"{name}: cannot be read ({error})") from error
    except MemoryError as error:
        raise DataError(f"{name}: does not fit into memory ({error})") from error
    _check_task(dataset, settings)
    _check_unused(dataset, settings)
    _check_resized(dataset, settings)
    return _subset(dataset, settings, seed)


def _check_columns(columns: Columns, name: str, allowed: Sequence[str]) -> None:
    """Raise :class:`SettingsError` if a setting names a column that the data cannot have."""
    if refused := [(key, column) for key, column in columns.named() if key not in allowed]:
        key, column = refused[0]
        raise SettingsError(
            f"{key} = {column!r} cannot be combined with dataset = {name!r}, which does not have columns: only .csv, "
            f".parquet, hf:owner/name and folders of datasets.save_to_disk have columns; remove {key}"
        )


def _check_task(dataset: Dataset, settings: DataSettings) -> None:
    """Raise :class:`SettingsError` if the data does not have the target or the kind of samples that the run names."""
    if dataset.task.target != settings.target:
        raise SettingsError(
            f"task = {settings.task!r}: {dataset.name} has {dataset.task.target}, so its task is "
            f"{TITLES[dataset.task.target]}; remove task"
        )
    if settings.sample_kind not in ("auto", dataset.sample_kind):
        raise SettingsError(
            f"sample-kind = {settings.sample_kind!r}: {dataset.name} has samples of kind {dataset.sample_kind}; "
            "remove sample-kind"
        )


def _check_unused(dataset: Dataset, settings: DataSettings) -> None:
    """Raise :class:`SettingsError` if a setting for tables or features has no effect on the data."""
    name, columns = dataset.name, Columns.of(settings)
    is_csv = settings.dataset not in DATASETS and Path(settings.dataset).suffix.lower() == ".csv"
    is_table = dataset.sample_kind == "features" and bool(dataset.columns)
    is_scaled = dataset.task.kind in STANDARDISED
    for key, has_effect, reason in (
        ("separator", is_csv, "is not a .csv file"),
        ("decimal", is_csv, "is not a .csv file"),
        ("missing", is_table, "has no named feature columns"),
        ("min-category-rows", is_table, "has no named feature columns"),
        ("categories", is_table, "has no named feature columns"),
        ("scaling", is_scaled, f"has samples of the kind {dataset.sample_kind}, which are not standardised"),
    ):
        field = key.replace("-", "_")
        value = getattr(settings, field)
        if not has_effect and value != getattr(DataSettings, field):
            raise SettingsError(f"{key} = {value!r} has no effect: {name} {reason}; remove {key}")
    parsed = [column for column, names in zip(dataset.columns, dataset.categories, strict=False) if names is not None]
    if unused := [column for column in columns.categories if column not in parsed]:
        raise SettingsError(
            f"categories = {unused[0]!r}: {name} does not have this categorical column; correct categories"
        )


def _check_resized(dataset: Dataset, settings: DataSettings) -> None:
    """Raise :class:`SettingsError` for image sizes, text lengths or vocabularies that do not apply to the data."""
    task = dataset.task
    for key, kind, expected, reason in (
        ("image-size", "image", (settings.image_size,) * 2, "image files are resized"),
        ("text-length", "text", (settings.text_length,), "texts are cut to a number of words"),
    ):
        sizes = task.input_shape[-len(expected) :]
        if expected[0] and (task.kind != kind or sizes != expected):
            shape = "x".join(map(str, sizes if task.kind == kind else task.input_shape))
            raise SettingsError(
                f"{key} = {expected[0]} cannot be combined with {dataset.name}, whose samples are of kind {task.kind} "
                f"and size {shape}: only {reason}; set {key} = 0"
            )
    if settings.vocabulary != DataSettings.vocabulary and dataset.sample_kind != "text":
        raise SettingsError(
            f"vocabulary = {settings.vocabulary} cannot be combined with {dataset.name}, whose samples are of "
            f"kind {dataset.sample_kind}: only texts need a vocabulary; set vocabulary = {DataSettings.vocabulary}"
        )


def _subset(dataset: Dataset, settings: DataSettings, seed: int) -> Dataset:
    size = settings.max_samples
    if size == 0:
        return dataset
    check_subset(settings if dataset.given is None else replace(settings, partition="given"))
    if size > len(dataset):
        raise SettingsError(
            f"max-samples = {size}: {dataset.name} has {len(dataset)} samples; allowed: 0 to this number"
        )
    keep = np.sort(numpy_generator(seed, "subset").choice(len(dataset), size, replace=False))
    arrays = {name: getattr(dataset, name) for name in ("groups", "split_groups", "is_test")}
    selected: dict[str, Any] = {name: None if array is None else array[keep] for name, array in arrays.items()}
    return replace(dataset, x=dataset.x[keep], y=dataset.y[keep], **selected)
