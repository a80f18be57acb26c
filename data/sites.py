"""Read and describe a site's data, and load it for the run's task.

Every site checks its data against the run's settings and rejects data that does not fit (see
:mod:`posy.data.agreement`). The site's policy decides which rows are test samples, so no run setting can select rows.
"""

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from posy.data.agreement import (
    MAX_UNLIKE,
    MODES,
    UNLIKE_MEAN,
    Description,
    columns_in,
    difference,
    open_encoder,
    open_statistics,
    open_values,
    shape_in,
    statistics_in,
    task_of,
)
from posy.data.columns import Columns, names_in
from posy.data.dataset import Content, Dataset, bytes_of, make_dataset
from posy.data.encoding import Categories, Encoder, encoder_in, table_facts
from posy.data.errors import DataError, Note, check_data_path
from posy.data.labels import label_name, renumbered
from posy.data.partitions import Partition, finished
from posy.data.policy import Policy
from posy.data.pooled import numbers_of
from posy.data.readers.own import named_columns, read_own
from posy.data.settings import SITES, DataSettings
from posy.data.splits import Strata, split, split_folds
from posy.data.task import STANDARDISED, TASK_KINDS
from posy.data.text import MAX_LENGTH, hashed
from posy.data.transforms import shape_text
from posy.data.values import as_features, channel_moments, check_reach, moments
from posy.metrics import CLASSES, VALUES
from posy.words import counted


def read_site(path: Path, settings: DataSettings, policy: Policy, skip_unreadable: bool = False) -> Content:
    """Read the columns of a site's data that its policy allows, and resize image files to the run's shape.

    Raises
    ------
    DataError
        If the path is not absolute, or the data cannot be used.
    """
    check_data_path(path)
    if policy.split_column and "split-column" not in named_columns(path):
        raise DataError(
            f"{path}: data in this format does not identify patients; remove split-column = {policy.split_column!r} "
            "from the policy"
        )
    size, mode = None, None
    if settings.input_shape and settings.sample_kind == "image":
        channels, height, width = shape_in(settings, "image")
        size, mode = (width, height), MODES[channels]
    return read_own(path, size, mode, skip_unreadable, _columns(settings, policy))


def describe_site(content: Content, settings: DataSettings, policy: Policy, *, masked: bool = False) -> Description:
    """Describe a site's data, including any statistics and labels that the settings do not specify.

    The mean and the variance of the features are computed over all rows outside the test split. These rows do not
    depend on the run's settings. The description lists only labels that occur in at least ``policy.min_rows`` of these
    rows. With ``masked``, it contains neither statistics nor labels, because the site adds :func:`site_numbers` to a
    masked sum.

    Raises
    ------
    DataError
        If the site has fewer than ``policy.min_rows`` rows outside the test split.
    """
    rows, _ = site_split(content, settings, policy)
    _check_rows(content, len(rows), policy)
    count, mean, squares = 1, np.empty(0), np.empty(0)
    table = None
    if content.columns and not settings.encoder and (content.categories or open_encoder(settings, content.kind)):
        table, *statistics = table_facts(content.x, content.categories, rows, policy.min_rows)
        if masked:
            table = table.kinds_only()
        else:
            count, (mean, squares) = len(rows), statistics
    elif open_statistics(settings, content.kind) and not masked:
        count, (mean, squares) = len(rows), channel_moments(content.x, rows)
    classes, rare = _frequent_classes(content, rows, policy)
    value_mean, value_squares = np.empty(0), np.empty(0)
    if open_values(settings) and not masked:
        y = targets_in_run(content, names_in("classes", settings.classes)) if settings.classes else content.labels
        count, (value_mean, value_squares) = len(rows), moments(y, rows)
    return Description(
        kind=content.kind,
        shape=_shape(content, settings),
        fixed=content.kind != "text" and not content.resized,
        classes=() if settings.classes or masked else classes,
        count=count,
        mean=mean,
        squares=squares,
        columns=content.columns,
        table=table,
        warnings=(*content.notes, *(() if settings.classes else rare)),
        skipped=len(content.unreadable),
        value_mean=value_mean,
        value_squares=value_squares,
    )


def site_numbers(content: Content, settings: DataSettings, policy: Policy) -> list[int]:
    """Return a site's labels and statistics as numbers for a masked sum, unless the settings specify them.

    The numbers cover the same rows as :func:`describe_site`. The settings already contain the kind, shape and columns.

    Raises
    ------
    DataError
        If the data does not suit the settings, or the site has too few rows.
    """
    check_suits(content, settings)
    rows, _ = site_split(content, settings, policy)
    _check_rows(content, len(rows), policy)
    mean, squares, table = np.empty(0), np.empty(0), None
    if open_encoder(settings, content.kind):
        table, mean, squares = table_facts(*_in_order(content, _run_columns(content, settings)), rows, policy.min_rows)
    elif open_statistics(settings, content.kind):
        mean, squares = channel_moments(_in_order(content, _run_columns(content, settings))[0], rows)
    if open_values(settings):
        values = moments(targets_in_run(content, names_in("classes", settings.classes)), rows)
        mean, squares = (np.concatenate(pair) for pair in zip((mean, squares), values, strict=True))
    classes, _ = _frequent_classes(content, rows, policy)
    return numbers_of(None if settings.classes else classes, len(rows), mean, squares, table)


def load_site(content: Content, settings: DataSettings, policy: Policy) -> tuple[Dataset, Partition]:
    """Return a site's samples for the run, and a partition with the site as its only client.

    :func:`site_split` selects the test samples. The columns of the samples are in the run's order.

    Raises
    ------
    DataError
        If the data does not fit the task. The message names the file and the reason.
    SettingsError
        If the settings do not determine a task.
    """
    task, kind, path = task_of(settings), settings.sample_kind, content.path
    check_suits(content, settings)
    x, scale, encoder = content.x, None, encoder_in(settings.encoder)
    if kind == "text":
        x = hashed(x, task.input_shape[0], task.vocabulary)
    elif kind == "tokens" and x.max() >= task.vocabulary:
        raise DataError(
            f"{path}: token {x.max()}; the run's vocabulary allows 0 to {task.vocabulary - 1}", "other-shape"
        )
    elif task.kind in STANDARDISED:
        x = encoded(content, _run_columns(content, settings), encoder)
        scale = statistics_in(settings, task.input_shape[-1])
    has_classes = task.target == CLASSES
    y = numbers_in_run(content, task.class_names) if has_classes else targets_in_run(content, task.class_names)
    part, split_notes = _partition(content, settings, policy)
    columns, notes = content.columns, (*content.notes, *split_notes)
    if scale is not None:
        named = columns_in(settings, task.input_shape[0]) if kind == "features" else ()
        columns = encoder.names if encoder else named or columns
        rows = np.concatenate([part.train[0], part.test[0], part.validation[0]])
        _check_scale(x, rows, *scale, str(path), columns)
        notes = (*notes, *_far_notes(x, part.train[0], *scale, columns, policy.min_rows))
    if task.target == VALUES:
        rows = np.concatenate([part.train[0], part.test[0], part.validation[0]])
        _check_scale(y, rows, np.array(task.value_mean), np.array(task.value_std), str(path), task.class_names)
    attributes: dict[str, Any] = {"columns": columns, "notes": notes, "skipped": len(content.unreadable)}
    attributes["encoder"] = encoder
    attributes["order_seed"] = _seed(content, "order")
    attributes["target"] = (task.target, task.value_mean, task.value_std)
    return make_dataset(SITES, kind, x, y, task.class_names, task.vocabulary, scale, **attributes), part


def site_split(content: Content, settings: DataSettings, policy: Policy) -> tuple[np.ndarray, np.ndarray]:
    """Return the indices of a site's rows for training (including validation) and for tests, int64.

    The test rows are the supplied test set, or else a random ``policy.test_fraction`` of the rows. The draw is seeded
    with a hash of the data. Each version of the data therefore has exactly one split, which no run setting can change.
    If the policy allows folds, a run's ``fold`` selects one of ``policy.folds`` fixed splits.

    Raises
    ------
    DataError
        If no row is left for training, if a run uses folds although the data comes with a test set, or if a fold has
        too few rows.
    """
    rows = np.arange(len(content.labels))
    if content.is_test is not None:
        if settings.folds:
            raise DataError(f"{content.path}: folds = {settings.folds}, but the data comes with a test set", "no-folds")
        train, test = np.flatnonzero(~content.is_test), np.flatnonzero(content.is_test)
    elif settings.folds:
        rng = np.random.default_rng(_seed(content, "folds"))
        ((train, test),) = split_folds([rows], policy.folds, settings.fold, rng, _strata(content, policy))
        if len(test) < policy.min_rows:
            raise DataError(
                f"{content.path}: fold {settings.fold} of {policy.folds} has {len(test)} rows; the site's policy "
                f"requires min-rows = {policy.min_rows}",
                "too-few-rows",
            )
    else:
        rng = np.random.default_rng(_seed(content, "split"))
        ((train, test),) = split([rows], policy.test_fraction, rng, _strata(content, policy))
    if not len(train):
        raise DataError(f"{content.path}: all samples belong to the test set; at least one is needed for training")
    return np.sort(train), np.sort(test)


def _strata(content: Content, policy: Policy) -> Strata:
    """Return the classes and the groups by which a site's rows are split."""
    is_stratified = policy.stratify and content.target == CLASSES
    return Strata(content.distinct[0] if is_stratified else None, content.split_groups)


def _seed(content: Content, purpose: str) -> int:
    """Derive a seed for one purpose from the hash of a site's data. Other machines cannot compute this hash."""
    return int.from_bytes(hashlib.blake2b(content.digest, digest_size=8, key=purpose.encode()).digest(), "big") >> 1


def _columns(settings: DataSettings, policy: Policy) -> Columns:
    """Return the columns named in the settings, or else the columns named in the policy."""
    columns = Columns.of(settings, policy.label)
    inputs, split_column = columns.inputs or policy.allowed_columns, label_name(policy.split_column)
    return replace(columns, inputs=inputs, split=split_column, offered=policy.allowed_columns)


def _check_scale(
    x: np.ndarray, rows: np.ndarray, mean: np.ndarray, std: np.ndarray, where: str, columns: tuple[str, ...]
) -> None:
    """Raise :class:`DataError` if a feature standardised with the run's statistics may exceed the range of float32.

    The bound |x_i - m| <= |mean(x) - m| + sqrt(N) std(x) uses only statistics over the N rows in the run's splits.
    A run therefore cannot find an extreme value by trying out different statistics.
    """
    centre, squares = moments(x[rows].reshape(-1, x.shape[-1]))
    spread = np.sqrt(squares)
    words = "may exceed", "correct feature-mean or feature-std"
    check_reach(centre - spread, centre + spread, mean, std, where, columns, words)


def _check_rows(content: Content, count: int, policy: Policy) -> None:
    """Raise :class:`DataError` if a site has too few rows for training."""
    if count < policy.min_rows:
        raise DataError(
            f"{content.path}: {count} rows for training; the site's policy requires min-rows = {policy.min_rows}",
            "too-few-rows",
        )


def _frequent_classes(content: Content, rows: np.ndarray, policy: Policy) -> tuple[tuple[str, ...], list[Note]]:
    """Return the labels that occur in at least ``min_rows`` of the rows, and a note if the site has other labels."""
    if content.target != CLASSES:
        return content.class_names, []
    y, names = content.distinct
    counts = np.bincount(y[rows], minlength=len(names))
    frequent = tuple(name for name, count in zip(names, counts, strict=True) if count >= policy.min_rows)
    if rare := len(names) - len(frequent):
        text = (
            f"{counted(rare, 'label')} with fewer than {policy.min_rows} rows (min-rows) did not leave the site; set "
            "classes if the run needs more labels"
        )
        return frequent, [Note(text)]
    return frequent, []


def _far_notes(
    x: np.ndarray, train: np.ndarray, mean: np.ndarray, std: np.ndarray, columns: tuple[str, ...], min_rows: int
) -> list[Note]:
    """Return a note for each feature whose mean at this site is far from the run's mean."""
    distances = np.abs(channel_moments(x, train)[0] - mean) / std
    notes = []
    for feature in np.flatnonzero(distances > UNLIKE_MEAN)[:MAX_UNLIKE]:
        start = f"feature {columns[feature] if columns else feature}: this site's mean is "
        end = " from the run's mean; check the units"
        distance = f"{distances[feature]:.2g} standard deviations" if len(train) >= min_rows else "far"
        notes.append(Note(start + distance + end, f"{start}far{end}"))
    return notes


def check_suits(content: Content, settings: DataSettings) -> None:
    """Raise :class:`DataError` if the kind, columns or shape of the data differ from the settings."""
    kind = content.kind if settings.sample_kind == "auto" else settings.sample_kind
    names = names_in("feature-names", settings.feature_names) if settings.feature_names else ()
    check_content(content, kind, settings.target, names)
    if not settings.input_shape:
        return
    encoder = encoder_in(settings.encoder)
    expected = (len(encoder.inputs),) if encoder else shape_in(settings, content.kind)
    if content.kind != "text":
        check_sample_shape(content, expected)


def check_content(content: Content, kind: str, target: str, names: tuple[str, ...]) -> None:
    """Raise :class:`DataError` if the kind, target or columns of the data differ from the run's.

    Parameters
    ----------
    content : Content
        The data.
    kind, target : str
        The run's kind of samples, as in :class:`Content`, and its target.
    names : tuple of str
        The names of the run's columns, or an empty tuple if they have no names.
    """
    if content.kind != kind:
        raise DataError(f"{content.path}: {content.kind} samples; the run's sample-kind is {kind}", "other-kind")
    if content.target != target:
        raise DataError(
            f"{content.path}: its labels are {content.target}; the run's task needs {target}",
            "wrong-target",
        )
    if content.columns and names and (mismatch := difference(content.columns, names)):
        raise DataError(f"{content.path}: its columns are not the run's feature-names ({mismatch})", "other-columns")


def check_sample_shape(content: Content, expected: tuple[int, ...]) -> None:
    """Raise :class:`DataError` if the shape of the site's samples differs from the run's ``input-shape``."""
    if (shape := _sample_shape(content)) != expected:
        raise DataError(
            f"{content.path}: samples of shape {shape_text(shape)}; the run's input-shape is {shape_text(expected)}",
            "other-shape",
        )


def fingerprint(dataset: Dataset, part: Partition) -> str:
    """Return a fingerprint of a site's samples, labels and split, as 16 hexadecimal digits."""
    digest = hashlib.blake2b(digest_size=8)
    for array in (dataset.x, dataset.y, part.train[0], part.test[0], part.validation[0]):
        digest.update(f"{array.dtype} {array.shape}".encode())
        for block in bytes_of(array):
            digest.update(block)
    return digest.hexdigest()


def _shape(content: Content, settings: DataSettings) -> tuple[int, ...]:
    if content.kind == "text":
        return shape_in(settings, "text") if settings.input_shape else (MAX_LENGTH,)
    return _sample_shape(content)


def _sample_shape(content: Content) -> tuple[int, ...]:
    shape: tuple[int, ...] = content.x.shape[1:]
    return (shape[2], *shape[:2]) if TASK_KINDS[content.kind] == "image" else shape


def _partition(content: Content, settings: DataSettings, policy: Policy) -> tuple[Partition, list[Note]]:
    """Return a site's split, including the run's validation split, and notes on splits that are too small to be scored.

    If a test or validation split would have fewer than ``min_rows`` rows, it is left empty, because its scores could
    reveal a row. The rows of a validation split that is too small stay in the training split. Otherwise, the training
    data of runs with and without validation would differ in only these few rows.
    """
    pair = site_split(content, settings, policy)
    rng = np.random.default_rng(_seed(content, "validation"))
    part, notes = finished((pair,), settings, rng, _strata(content, policy)), []
    if 0 < len(part.validation[0]) < policy.min_rows:
        part = replace(part, train=(np.sort(np.concatenate([part.train[0], part.validation[0]])),))
    _check_rows(content, len(part.train[0]), policy)
    for name in ("test", "validation"):
        rows = getattr(part, name)[0]
        if 0 < len(rows) < policy.min_rows:
            part = replace(part, **{name: (rows[:0],)})
            notes.append(
                Note(f"fewer than {policy.min_rows} {name} rows (min-rows): this site does not send {name} scores")
            )
    return part, notes


def numbers_in_run(content: Content, names: tuple[str, ...]) -> np.ndarray:
    """Return a site's labels as indices of the run's classes, ``(N,)`` int64."""
    (y, site_names), classes = content.distinct, set(names)
    if unknown := [number for number, name in enumerate(site_names) if name not in classes]:
        number = unknown[0]
        raise DataError(
            f"{content.path}: label {site_names[number]!r} of sample {int(np.argmax(y == number))} is not a class of "
            f"the run; allowed: {', '.join(names)}",
            "other-classes",  # no count, because it would reveal how many rows have a label that the run names
        )
    return renumbered(y, site_names, names)


def targets_in_run(content: Content, names: tuple[str, ...]) -> np.ndarray:
    """Return a site's labels or values ``(N, C)`` in the order of the run's names."""
    if mismatch := difference(content.class_names, names):
        raise DataError(
            f"{content.path}: its labels or values differ from the run's names ({mismatch})", "other-classes"
        )
    y: np.ndarray = content.labels[:, [content.class_names.index(name) for name in names]]
    return y


def _run_columns(content: Content, settings: DataSettings) -> tuple[str, ...]:
    """Return the names of the run's columns in order, or an empty tuple if they have no names."""
    if content.x.ndim > 2:
        return ()
    encoder = encoder_in(settings.encoder)
    return encoder.inputs if encoder else columns_in(settings, content.x.shape[1])


def _in_order(content: Content, names: tuple[str, ...]) -> tuple[np.ndarray, Categories]:
    """Return features and their categories in the order of the run's columns ``names``, which may be empty."""
    x: np.ndarray = content.x
    if not names or content.columns in ((), names):
        return x, content.categories
    order = [content.columns.index(name) for name in names]
    return x[:, order], tuple(content.categories[index] for index in order) if content.categories else ()


def encoded(content: Content, names: tuple[str, ...], encoder: Encoder | None) -> np.ndarray:
    """Return features in the order of the run's columns ``names``, encoded if the run has an encoder.

    Raises
    ------
    DataError
        If the data has categories or missing values that the run does not encode.
    """
    x, categories = _in_order(content, names)
    if encoder:
        return as_features(encoder.encode(x, categories, str(content.path)), str(content.path))[0]
    if categories or np.isnan(x).any():
        raise DataError(
            f"{content.path}: it has categories or missing values, but the run has no encoder; set missing=impute, and "
            "remove feature-mean and feature-std from the settings of the run if they are set",
            "no-encoder",
        )
    return x
