"""Sites that hold their own data: what one tells of it, the task they agree on, and what one trains on.

The server has no samples. It asks each site to describe its own (:func:`describe_site`), writes what they
agree on into the run's settings (:func:`agreed`), and from then on the settings alone tell the task
(:func:`task_of`): every site reads its data against them (:func:`load_site`) and refuses what does not fit.
"""

import hashlib
import json
import math
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from posy.data.augment import check_augment
from posy.data.dataset import (
    FLOAT32,
    Content,
    Dataset,
    deviation,
    distinct_labels,
    label_name,
    label_notes,
    listed,
    moments,
    nearly_equal,
    sorted_names,
)
from posy.data.errors import DataError
from posy.data.own import read_own
from posy.data.partitions import Partition, split
from posy.data.settings import SITES, DataSettings
from posy.data.task import Task
from posy.data.text import MAX_LENGTH, PADDING, UNKNOWN, words_of
from posy.paths import exists
from posy.randomness import numpy_generator
from posy.settings import SettingsError

_TASK_KINDS = {"image": "image", "image-float": "image", "features": "features", "text": "text", "tokens": "text"}
_AXES = {"image": 3, "image-float": 3, "features": 1, "text": 1, "tokens": 1}
_MAX_SIZE = 1 << 28  # numbers in one sample
_MODES = {1: "L", 3: "RGB"}
_MAX_NAME = 300


@dataclass(frozen=True)
class Description:
    """What a site tells of its data, so that the sites can agree on a task.

    Attributes
    ----------
    kind : str
        As in :class:`posy.data.dataset.Content`.
    shape : tuple of int
        Of one sample, as in the setting ``input-shape``.
    fixed : bool
        Whether the shape is that of the data; image files and texts are brought to any.
    classes : tuple of str
        Names of its classes; empty where the settings give those of the run.
    count : int
        Training samples behind the next two.
    mean, squares : np.ndarray
        float64 ``(F,)``: mean of each feature, and sum of its squared deviations from it. Empty where the
        samples are no features, or the settings give mean and standard deviation.
    columns : tuple of str
        Names of the features, where the data gives them.
    warnings : tuple of str
        What a person should know of the data; it is told, and not read from an answer.
    skipped : int
        Files that could not be read and are left out; told alone, too.
    """

    kind: str
    shape: tuple[int, ...]
    fixed: bool
    classes: tuple[str, ...]
    count: int
    mean: np.ndarray
    squares: np.ndarray
    columns: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    skipped: int = 0

    def as_answer(self) -> dict[str, Any]:
        """Return it as the values of a Flower ConfigRecord."""
        return {
            "kind": self.kind,
            "shape": list(self.shape),
            "fixed": self.fixed,
            "classes": list(self.classes),
            "count": self.count,
            "mean": self.mean.tolist(),
            "squares": self.squares.tolist(),
            "columns": list(self.columns),
            **told_of(self.warnings, self.skipped),
        }

    @classmethod
    def from_answer(cls, answer: Mapping[str, Any]) -> "Description":
        """Read what a site has answered.

        Raises
        ------
        DataError
            If it makes no sense.
        KeyError, TypeError, ValueError
            If it is not of the form that :meth:`as_answer` gives.
        """
        shape = tuple(int(size) for size in answer["shape"])
        mean, squares = (np.array(answer[key], np.float64) for key in ("mean", "squares"))
        count, classes = int(answer["count"]), tuple(dict.fromkeys(label_name(str(c)) for c in answer["classes"]))
        columns = tuple(str(name) for name in answer.get("columns", ()))
        sensible = (
            answer["kind"] in _AXES
            and len(shape) == _AXES[answer["kind"]]
            and all(size > 0 for size in shape)
            and math.prod(shape) <= _MAX_SIZE
            and count > 0
            and mean.shape == squares.shape
            and mean.shape in ((0,), shape)
            and all(0 < len(name) <= _MAX_NAME for name in classes)
            and len(columns) in (0, shape[0])
            and len(set(columns)) == len(columns)
            and all(len(name) <= _MAX_NAME for name in columns)
            and bool(np.isfinite(mean).all() and np.isfinite(squares).all() and (squares >= 0).all())
        )
        if not sensible:
            raise DataError("its description of its data makes no sense")
        return cls(answer["kind"], shape, bool(answer["fixed"]), classes, count, mean, squares, columns)


_Told = list[tuple[str, Description]]


def told_of(warnings: Sequence[str], skipped: int) -> dict[str, Any]:
    """Return what a site tells of its data for people: at most 20 warnings of 300 characters each."""
    return {"warnings": [warning[:_MAX_NAME] for warning in warnings[:20]], "skipped": skipped}


def describe_site(path: Path, settings: DataSettings, seed: int, skip_unreadable: bool = False) -> Description:
    """Describe the data of a site, as far as the settings leave the task open.

    Parameters
    ----------
    path : Path
        Of the data, absolute.
    settings : DataSettings
        Those of the run.
    seed : int
        Of the run.
    skip_unreadable : bool
        Whether to go on without image files that cannot be read.

    Raises
    ------
    DataError
        If the data cannot be used.
    """
    return description_of(read_site(path, settings, skip_unreadable), path, settings, seed)


def read_site(path: Path, settings: DataSettings, skip_unreadable: bool = False) -> Content:
    """Read the data of a site; image files are brought to the shape that the settings give.

    Raises
    ------
    DataError
        If the data cannot be used.
    """
    if not path.is_absolute():
        raise DataError(f"data = {str(path)!r} in the node config: it must be an absolute path")
    if not exists(path):
        raise DataError(f"{path}: there is no such file or directory (data in the node config)")
    size, mode = None, None
    if settings.input_shape and settings.sample_kind == "image":
        channels, height, width = _wanted_shape(settings, "image")
        size, mode = (width, height), _MODES[channels]
    return read_own(path, size, mode, skip_unreadable)


def description_of(content: Content, path: Path, settings: DataSettings, seed: int) -> Description:
    """Do as :func:`describe_site` with data that has been read."""
    fixed = not (path.is_dir() and content.kind == "image") and content.kind != "text"
    labels, names = distinct_labels(content.labels, str(path))
    count, mean, squares = 1, np.empty(0), np.empty(0)
    if content.kind == "features" and not (settings.feature_mean and settings.feature_std):
        rows = _partition(content, settings, seed).train[0]
        count, (mean, squares) = len(rows), moments(content.x, rows)
    return Description(
        kind=content.kind,
        shape=_shape(content, settings),
        fixed=fixed,
        classes=() if settings.classes else names,
        count=count,
        mean=mean,
        squares=squares,
        columns=content.columns,
        warnings=(*content.notes, *label_notes(labels, names, content.is_test)),
        skipped=len(content.unreadable),
    )


def is_complete(settings: DataSettings) -> bool:
    """Tell whether the settings alone give the task, so that no site has to describe its data."""
    if settings.sample_kind == "auto" or not settings.input_shape or not settings.classes:
        return False
    return settings.sample_kind != "features" or bool(settings.feature_mean and settings.feature_std)


def agreed(
    settings: DataSettings, descriptions: Sequence[Description], names: Sequence[str]
) -> tuple[DataSettings, list[str]]:
    """Return the settings with the task that the sites agree on, and what a person should know of it.

    What the settings give stands. Else the kind, the shape and the columns that most sites have are taken, the
    classes of all sites that have them, sorted, and mean and standard deviation of each feature over their
    training samples. Where as many sites have another, or the images of one would lose their colours, a person
    has to decide.

    Parameters
    ----------
    settings : DataSettings
        Those of the run.
    descriptions : sequence of Description
        What each site tells.
    names : sequence of str
        Names of the sites, for messages.

    Returns
    -------
    tuple
        The settings, and warnings that name sites, a sentence each.

    Raises
    ------
    SettingsError
        If there is no site of the kind and shape that the settings ask for, equally many sites have another, or
        there is only one class.
    """
    told = list(zip(names, descriptions, strict=True))
    warnings: list[str] = []
    kind = settings.sample_kind
    if kind == "auto":
        kind = _choice("sample-kind", "hold different kinds of samples", [(name, d.kind) for name, d in told])
    same, others = _parted(told, lambda d: d.kind == kind)
    warnings += [
        f"{name}: its samples are of the kind {d.kind}, those of the run {kind}; it cannot take part"
        for name, d in others
    ]
    same, shape = _of_shape(settings, same, warnings)
    if not same:
        raise SettingsError(f"sample-kind = {kind!r} with input-shape = {shape!r}: no site has such samples")
    columns: tuple[str, ...] = ()
    if kind == "features":
        same, columns = _of_columns(settings, same, warnings)
    if not settings.classes:
        warnings += _nearly_agreed(same)
    classes = settings.classes or _listed(sorted_names({name for _, d in same for name in d.classes}))
    result = replace(settings, sample_kind=kind, input_shape=shape, classes=classes, feature_names=_listed(columns))
    if kind == "features":
        mean, std = pooled_statistics([_in_order(d, columns) for _, d in same if d.mean.size])
        mean_text, std_text = (",".join(map(repr, values.tolist())) for values in (mean, std))
        result = replace(
            result, feature_mean=settings.feature_mean or mean_text, feature_std=settings.feature_std or std_text
        )
    task_of(result)
    return result, warnings


def pooled_statistics(descriptions: Sequence[Description]) -> tuple[np.ndarray, np.ndarray]:
    """Return mean and standard deviation of each feature over all samples, float64 ``(F,)``.

    A constant feature has the standard deviation 1.
    """
    if not descriptions:
        return np.empty(0), np.empty(0)
    counts = np.array([d.count for d in descriptions], np.float64)[:, None]
    means = np.stack([d.mean for d in descriptions])
    mean = (counts * means).sum(0) / counts.sum()
    mean = np.where((means == means[0]).all(0), means[0], mean)
    squares = np.stack([d.squares for d in descriptions]).sum(0) + (counts * (means - mean) ** 2).sum(0)
    return mean, deviation(mean, squares / counts.sum())


def task_of(settings: DataSettings) -> Task:
    """Return the task that complete settings give.

    Raises
    ------
    SettingsError
        If a value is malformed, there are fewer than two classes, or the augmentation is not for such samples.
    """
    kind, classes = settings.sample_kind, class_names(settings.classes)
    shape = _wanted_shape(settings, kind)
    if kind == "features":
        _statistics(settings, shape[0])
        _feature_names(settings, shape[0])
    check_augment(settings.augment, _TASK_KINDS[kind])
    return Task(_TASK_KINDS[kind], shape, classes, settings.vocabulary if _TASK_KINDS[kind] == "text" else 0)


def class_names(text: str) -> tuple[str, ...]:
    """Return the names that the setting ``classes`` lists.

    Raises
    ------
    SettingsError
        If there are fewer than two, one is empty or stands there twice, or the JSON is none.
    """
    names = _names_in("classes", text)
    if not all(names) or len(names) < 2 or len(set(names)) < len(names):
        raise SettingsError(f"classes = {text!r}: needed are two or more names, each once")
    return names


def load_site(
    path: Path, settings: DataSettings, seed: int, skip_unreadable: bool = False
) -> tuple[Dataset, Partition]:
    """Read the data of a site for the task of the run; the partition has this one client.

    The data's own test set is used where it has one, else ``test_fraction`` of the samples, drawn by the seed.
    Columns are put into the order of the run.

    Parameters
    ----------
    path, settings, seed, skip_unreadable
        As for :func:`describe_site`; the settings must give the task.

    Raises
    ------
    DataError
        If the data cannot be used, or does not fit the task: it says which file and why.
    SettingsError
        If the settings do not give a task.
    """
    task_of(settings)
    return fitted(read_site(path, settings, skip_unreadable), path, settings, seed)


def fitted(content: Content, path: Path, settings: DataSettings, seed: int) -> tuple[Dataset, Partition]:
    """Do as :func:`load_site` with data that has been read."""
    task, kind = task_of(settings), settings.sample_kind
    check_suits(content, settings, path)
    x = hashed(content.x, task.input_shape[0], task.vocabulary) if kind == "text" else content.x
    if kind == "tokens" and x.max() >= task.vocabulary:
        raise DataError(f"{path}: token {x.max()}; the run's vocabulary allows 0 to {task.vocabulary - 1}")
    mean, std = np.zeros(1, np.float32), np.ones(1, np.float32)
    if task.kind == "image":
        mean, std = mean.repeat(task.input_shape[0]), std.repeat(task.input_shape[0])
        if kind == "image":  # as data.dataset.image_dataset does
            mean, std = mean + np.float32(0.5), std * np.float32(0.5)
    elif kind == "features":
        x = _in_columns(content, settings, path)
        mean, std = _statistics(settings, task.input_shape[0])
        _check_scaled(x, mean, std, path)
    own, own_names = distinct_labels(content.labels, str(path))
    y = _known(own, own_names, task.class_names, path)
    notes = (*content.notes, *label_notes(own, own_names, content.is_test))
    dataset = Dataset(SITES, task, x, y, mean, std, notes=notes, skipped=len(content.unreadable))
    return dataset, _partition(content, settings, seed)


def check_suits(content: Content, settings: DataSettings, path: Path) -> None:
    """Raise :class:`DataError` if data is not of the kind and the shape that the settings give, as far as they do."""
    if settings.sample_kind not in ("auto", content.kind):
        raise DataError(
            f"{path}: holds samples of the kind {content.kind}; the run's sample-kind is {settings.sample_kind}"
        )
    if not settings.input_shape:
        return
    shape, wanted = _shape(content, settings), _wanted_shape(settings, content.kind)
    if shape != wanted:
        raise DataError(f"{path}: samples of shape {_as_text(shape)}; the run's input-shape is {_as_text(wanted)}")


def fingerprint(dataset: Dataset, part: Partition) -> str:
    """Return 16 hexadecimal digits that change with any sample, any label, and the split of a site's data."""
    digest = hashlib.blake2b(digest_size=8)
    for array in (dataset.x, dataset.y, part.train[0], part.test[0]):
        digest.update(f"{array.dtype} {array.shape}".encode())
        for row in range(0, len(array), 1024):
            digest.update(np.ascontiguousarray(array[row : row + 1024]).data)
    return digest.hexdigest()


def hashed(texts: Sequence[str], length: int, vocabulary: int) -> np.ndarray:
    """Turn texts into numbers of lower-case words by a hash that is the same everywhere.

    No vocabulary has to be agreed on, so no site tells its words; different words may share a number.

    Parameters
    ----------
    texts : Sequence of str
        N texts.
    length : int
        L: longer texts are cut, shorter ones padded with 0. A text without words is one unknown word.
    vocabulary : int
        Tokens V: 0 padding, 1 unknown, words 2..V-1.

    Returns
    -------
    np.ndarray
        ``(N, L)`` int64.
    """
    tokens = np.full((len(texts), length), PADDING, np.int64)
    for row, text in zip(tokens, texts, strict=True):
        words = words_of(text)[:length]
        found = [2 + zlib.crc32(word.encode()) % (vocabulary - 2) for word in words] or [UNKNOWN]
        row[: len(found)] = found
    return tokens


def _wanted_shape(settings: DataSettings, kind: str) -> tuple[int, ...]:
    """Return the setting ``input-shape`` as numbers that suit a kind of samples."""
    try:
        shape = tuple(int(size) for size in settings.input_shape.split("x"))
    except ValueError:
        shape = ()
    if len(shape) != _AXES[kind] or min(shape, default=0) < 1 or math.prod(shape) > _MAX_SIZE:
        form = "channels x height x width, as in 3x64x64" if _AXES[kind] == 3 else "one whole number"
        raise SettingsError(f"input-shape = {settings.input_shape!r}: for sample-kind = {kind!r} it must be {form}")
    if kind == "image" and shape[0] not in _MODES:
        raise SettingsError(f"input-shape = {settings.input_shape!r}: images have 1 or 3 channels, which come first")
    return shape


def _shape(content: Content, settings: DataSettings) -> tuple[int, ...]:
    if content.kind == "text":
        return _wanted_shape(settings, "text") if settings.input_shape else (MAX_LENGTH,)
    if _TASK_KINDS[content.kind] == "image":
        height, width, channels = content.x.shape[1:]
        return channels, height, width
    return (content.x.shape[1],)


def _partition(content: Content, settings: DataSettings, seed: int) -> Partition:
    rng = numpy_generator(seed, "site")
    count = len(content.labels)
    if content.is_test is not None:
        train, test = np.flatnonzero(~content.is_test), np.flatnonzero(content.is_test)
    else:
        ((train, test),) = split([np.arange(count)], settings, rng)
    if not len(train):
        raise DataError(f"all {count} samples belong to the test set; at least one is needed for training")
    if settings.train_samples:
        train = rng.permutation(train)[: settings.train_samples]
    return Partition((np.sort(train),), (np.sort(test),))


def _known(own: np.ndarray, own_names: tuple[str, ...], names: tuple[str, ...], path: Path) -> np.ndarray:
    """Return a site's labels, numbers of its own classes, as numbers of the run's classes."""
    number = {name: place for place, name in enumerate(names)}
    for place, name in enumerate(own_names):
        if name not in number:
            raise DataError(
                f"{path}: label {name!r} of sample {int(np.flatnonzero(own == place)[0])} is not a class of the run; "
                f"allowed are {', '.join(names)}"
            )
    return np.array([number[name] for name in own_names], np.int64)[own]


def _statistics(settings: DataSettings, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Return mean and standard deviation of the features as the settings give them, float64 ``(F,)``."""
    pair = []
    for key, text in (("feature-mean", settings.feature_mean), ("feature-std", settings.feature_std)):
        try:
            values = np.array([float(word) for word in text.split(",")])
        except ValueError:
            values = np.empty(0)
        usable = np.isfinite(values).all() and (key == "feature-mean" or (values > 0).all())
        if len(values) not in (1, width) or not usable:
            bound = " above 0" if key == "feature-std" else ""
            raise SettingsError(f"{key} = {text!r:.60}: it must be one number{bound}, or {width} with commas between")
        pair.append(np.broadcast_to(values, (width,)).copy())
    return pair[0], pair[1]


def _check_scaled(x: np.ndarray, mean: np.ndarray, std: np.ndarray, path: Path) -> None:
    """Raise :class:`DataError` if a feature, centred and divided, is beyond float32."""
    for extreme in (x.min(0), x.max(0)):
        with np.errstate(over="ignore"):
            bad = np.flatnonzero(~(np.abs((extreme - mean) / std) <= FLOAT32.max))
        if bad.size:
            place = int(bad[0])
            raise DataError(
                f"{path}: feature {place} reaches {extreme[place]}: less feature-mean ({mean[place]}), divided by "
                f"feature-std ({std[place]}), it is beyond the range of float32"
            )


def _feature_names(settings: DataSettings, width: int) -> tuple[str, ...]:
    """Return the names that the setting ``feature-names`` lists; none where it is empty."""
    names = _names_in("feature-names", settings.feature_names) if settings.feature_names else ()
    if names and (len(names) != width or len(set(names)) < width):
        raise SettingsError(f"feature-names = {settings.feature_names!r:.200}: needed are {width} names, each once")
    return names


def _in_columns(content: Content, settings: DataSettings, path: Path) -> np.ndarray:
    """Return a site's features in the order of the run's columns."""
    names = _feature_names(settings, content.x.shape[1])
    if not names or not content.columns or content.columns == names:
        return np.asarray(content.x)
    if difference := _difference(content.columns, names):
        raise DataError(f"{path}: its columns are not the run's feature-names ({difference})")
    return np.asarray(content.x[:, [content.columns.index(name) for name in names]])


def _difference(own: Sequence[str], names: Sequence[str]) -> str:
    """Tell which columns are missing and which are unknown, if any."""
    found = [
        f"{what}: {', '.join(some[:5])}{' …' if len(some) > 5 else ''}"
        for what, some in (
            ("missing", [name for name in names if name not in set(own)]),
            ("unknown", [name for name in own if name not in set(names)]),
        )
        if some
    ]
    return "; ".join(found)


def _parted(told: _Told, fits: Callable[[Description], bool]) -> tuple[_Told, _Told]:
    """Part the sites into those that fit and the others."""
    return [entry for entry in told if fits(entry[1])], [entry for entry in told if not fits(entry[1])]


def _choice(key: str, what: str, told: Sequence[tuple[str, str]]) -> str:
    """Return what most sites have.

    Raises
    ------
    SettingsError
        If as many sites have another.
    """
    counts = Counter(value for _, value in told).most_common()
    if len(counts) > 1 and counts[0][1] == counts[1][1]:
        found = "; ".join(f"{value} ({_sites([s for s, v in told if v == value])})" for value, _ in sorted(counts))
        raise SettingsError(f"the sites {what}, and none is that of most: {found}; set {key}")
    return counts[0][0] if counts else ""


def _of_shape(settings: DataSettings, told: _Told, warnings: list[str]) -> tuple[_Told, str]:
    """Return the sites whose samples have the shape of the run or are brought to it, and the shape."""
    shape = settings.input_shape
    if not shape:
        deciding, brought = _parted(told, lambda d: d.fixed)
        shapes = [(name, _as_text(d.shape)) for name, d in deciding or brought]
        shape = _choice("input-shape", "have samples of different shapes", shapes)
        coloured = [name for name, d in brought if len(d.shape) == 3 and d.shape[0] > int(shape.split("x")[0])]
        if coloured:
            raise SettingsError(
                f"the images of most sites are grey, {shape}; those of {_sites(coloured)} would lose their colours: "
                f"set input-shape (3x{shape.partition('x')[2]} keeps them)"
            )
    same, others = _parted(told, lambda d: not d.fixed or _as_text(d.shape) == shape)
    warnings += [
        f"{name}: its samples have the shape {_as_text(d.shape)}, those of the run {shape}; it cannot take part"
        for name, d in others
    ]
    for own in sorted({d.shape for _, d in same if _TASK_KINDS[d.kind] == "image" and _as_text(d.shape) != shape}):
        some = [name for name, d in same if d.shape == own]
        warnings.append(f"{_sites(some)}: images of shape {_as_text(own)} are brought to {shape}, that of the run")
    return same, shape


def _of_columns(settings: DataSettings, told: _Told, warnings: list[str]) -> tuple[_Told, tuple[str, ...]]:
    """Return the sites that have the columns of the run, and their names in the order of the run."""
    named = [(name, d) for name, d in told if d.columns]
    columns = _feature_names(settings, told[0][1].shape[0])
    if not columns and named:
        orders = Counter(d.columns for _, d in named)
        sets = Counter(frozenset(d.columns) for _, d in named).most_common()
        if len(sets) > 1 and sets[0][1] == sets[1][1]:
            (first, a), (second, b) = (next((n, d) for n, d in named if set(d.columns) == s) for s, _ in sets[:2])
            raise SettingsError(
                f"the columns of {second} differ from those of {first} ({_difference(b.columns, a.columns)}), and none "
                "are those of most sites: rename them, or set feature-names"
            )
        columns = next(order for order, _ in orders.most_common() if set(order) == sets[0][0])
    same, others = _parted(told, lambda d: not d.columns or set(d.columns) == set(columns))
    warnings += [
        f"{name}: its columns are not those of the run ({_difference(d.columns, columns)}); it cannot take part"
        for name, d in others
    ]
    if swapped := [name for name, d in same if d.columns and d.columns != columns]:
        warnings.append(f"{_sites(swapped)}: columns stand in another order, and are put into that of the run")
    if columns and (nameless := [name for name, d in same if not d.columns]):
        warnings.append(
            f"{_sites(nameless)}: data without names of columns, taken to be {', '.join(columns[:5])}"
            f"{' …' if len(columns) > 5 else ''} in this order"
        )
    return same, columns


def _in_order(description: Description, columns: tuple[str, ...]) -> Description:
    """Return a description with its features in the order of the run."""
    if not description.columns or description.columns == columns:
        return description
    order = [description.columns.index(name) for name in columns]
    return replace(description, mean=description.mean[order], squares=description.squares[order], columns=columns)


def _nearly_agreed(told: _Told) -> list[str]:
    """Return a warning for each group of classes that nearly agree."""
    warnings = []
    for twins in nearly_equal({name for _, d in told for name in d.classes}):
        found = [f"{listed([twin])} ({_sites([s for s, d in told if twin in d.classes])})" for twin in twins]
        warnings.append(
            f"classes that nearly agree are taken for different ones: {', '.join(found)}; if they are one, rename it "
            "at a site"
        )
    return warnings


def _sites(names: Sequence[str]) -> str:
    """Return names of sites for a message, the first five."""
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _names_in(key: str, text: str) -> tuple[str, ...]:
    """Return the names of a setting that lists them with commas between, or as JSON."""
    names: Any = text.split(",")
    if text.lstrip().startswith("["):
        try:
            names = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise SettingsError(f"{key} = {text!r:.200}: not a JSON list ({error})") from error
    if not all(isinstance(name, str) for name in names):
        raise SettingsError(f"{key} = {text!r:.200}: needed is a list of texts")
    return tuple(label_name(name) for name in names)


def _listed(names: Sequence[str]) -> str:
    plain = all(name and "," not in name and name == name.strip() and not name.startswith("[") for name in names)
    return ",".join(names) if plain else json.dumps(list(names), ensure_ascii=False)


def _as_text(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))
