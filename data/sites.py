"""Sites that hold their own data: what one tells of it, the task they agree on, and what one trains on.

The server has no samples. It asks each site to describe its own (:func:`describe_site`), writes what they
agree on into the run's settings (:func:`agreed`), and from then on the settings alone tell the task
(:func:`task_of`): every site reads its data against them (:func:`load_site`) and refuses what does not fit.
"""

import json
import math
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from data.augment import check_augment
from data.dataset import Content, Dataset, distinct_labels
from data.errors import DataError
from data.own import read_own
from data.partitions import Partition, split
from data.task import Task
from data.text import MAX_LENGTH, PADDING, UNKNOWN, words_of
from posy.randomness import numpy_generator
from posy.settings import SITES, DataSettings, SettingsError, key_of

_TASK_KINDS = {"image": "image", "image-float": "image", "features": "features", "text": "text", "tokens": "text"}
_AXES = {"image": 3, "image-float": 3, "features": 1, "text": 1, "tokens": 1}
_MAX_SIZE = 1 << 28  # numbers in one sample
_MODES = {1: "L", 3: "RGB"}
_BENCHMARK_ONLY = ("shift", "max_samples", "samples_per_client")
_SITES_ONLY = (
    "sample_kind",
    "input_shape",
    "classes",
    "vocabulary",
    "feature_mean",
    "feature_std",
    "share_class_counts",
)


@dataclass(frozen=True)
class Description:
    """What a site tells of its data, so that the sites can agree on a task.

    Attributes
    ----------
    kind : str
        As in :class:`data.dataset.Content`.
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
    """

    kind: str
    shape: tuple[int, ...]
    fixed: bool
    classes: tuple[str, ...]
    count: int
    mean: np.ndarray
    squares: np.ndarray

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
        count, classes = int(answer["count"]), tuple(str(name) for name in answer["classes"])
        sensible = (
            answer["kind"] in _AXES
            and len(shape) == _AXES[answer["kind"]]
            and all(size > 0 for size in shape)
            and math.prod(shape) <= _MAX_SIZE
            and count > 0
            and mean.shape == squares.shape
            and mean.shape in ((0,), shape)
            and bool(np.isfinite(mean).all() and np.isfinite(squares).all() and (squares >= 0).all())
        )
        if not sensible:
            raise DataError("its description of its data makes no sense")
        return cls(answer["kind"], shape, bool(answer["fixed"]), classes, count, mean, squares)


def describe_site(path: Path, settings: DataSettings, seed: int) -> Description:
    """Describe the data of a site, as far as the settings leave the task open.

    Raises
    ------
    DataError
        If the data cannot be used.
    """
    content = _read(path, settings)
    fixed = not (path.is_dir() and content.kind == "image") and content.kind != "text"
    _, names = distinct_labels(content.labels, str(path))
    x = np.empty((0, 0))
    if content.kind == "features" and not (settings.feature_mean and settings.feature_std):
        x = np.asarray(content.x[_partition(content, settings, seed).train[0]], np.float64)
    mean = x.mean(0) if x.size else np.empty(0)
    return Description(
        kind=content.kind,
        shape=_shape(content, settings),
        fixed=fixed,
        classes=() if settings.classes else names,
        count=max(len(x), 1),
        mean=mean,
        squares=((x - mean) ** 2).sum(0) if x.size else np.empty(0),
    )


def is_complete(settings: DataSettings) -> bool:
    """Tell whether the settings alone give the task, so that no site has to describe its data."""
    if settings.sample_kind == "auto" or not settings.input_shape or not settings.classes:
        return False
    return settings.sample_kind != "features" or bool(settings.feature_mean and settings.feature_std)


def agreed(settings: DataSettings, descriptions: Sequence[Description]) -> DataSettings:
    """Return the settings with the task that the sites agree on.

    What the settings give stands. Else the kind and shape that most sites have are taken (of equally many
    the one first in order), the classes of all sites of that kind and shape, sorted, and mean and standard
    deviation of each feature over their training samples.

    Raises
    ------
    SettingsError
        If there is no site of the kind and shape that the settings ask for, or only one class.
    """
    kind = settings.sample_kind
    if kind == "auto":
        kind = _most_common([d.kind for d in descriptions])
    same = [d for d in descriptions if d.kind == kind]
    shape = settings.input_shape
    if not shape:
        shape = _most_common([_as_text(d.shape) for d in same if d.fixed] or [_as_text(d.shape) for d in same])
    same = [d for d in same if not d.fixed or _as_text(d.shape) == shape]
    if not same:
        raise SettingsError(f"sample-kind = {kind!r} with input-shape = {shape!r}: no site has such samples")
    classes = settings.classes or _listed(_sorted_names({name for d in same for name in d.classes}))
    result = replace(settings, sample_kind=kind, input_shape=shape, classes=classes)
    if kind == "features":
        mean, std = pooled_statistics([d for d in same if d.mean.size])
        mean_text, std_text = (",".join(map(repr, values.tolist())) for values in (mean, std))
        result = replace(
            result, feature_mean=settings.feature_mean or mean_text, feature_std=settings.feature_std or std_text
        )
    task_of(result)
    return result


def pooled_statistics(descriptions: Sequence[Description]) -> tuple[np.ndarray, np.ndarray]:
    """Return mean and standard deviation of each feature over all samples, float64 ``(F,)``.

    A constant feature has the standard deviation 1.
    """
    if not descriptions:
        return np.empty(0), np.empty(0)
    counts = np.array([d.count for d in descriptions], np.float64)[:, None]
    means = np.stack([d.mean for d in descriptions])
    mean = (counts * means).sum(0) / counts.sum()
    squares = np.stack([d.squares for d in descriptions]).sum(0) + (counts * (means - mean) ** 2).sum(0)
    std = np.sqrt(squares / counts.sum())
    return mean, np.where(std < 1e-12, 1.0, std)


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
    check_augment(settings.augment, _TASK_KINDS[kind])
    return Task(_TASK_KINDS[kind], shape, classes, settings.vocabulary if _TASK_KINDS[kind] == "text" else 0)


def class_names(text: str) -> tuple[str, ...]:
    """Return the names that the setting ``classes`` lists.

    Raises
    ------
    SettingsError
        If there are fewer than two, one is empty or stands there twice, or the JSON is none.
    """
    names: Any = [name.strip() for name in text.split(",")]
    if text.lstrip().startswith("["):
        try:
            names = json.loads(text)
        except ValueError as error:
            raise SettingsError(f"classes = {text!r}: not a JSON list ({error})") from error
    if not all(isinstance(name, str) and name for name in names) or len(names) < 2 or len(set(names)) < len(names):
        raise SettingsError(f"classes = {text!r}: needed are two or more names, each once")
    return tuple(names)


def load_site(path: Path, settings: DataSettings, seed: int) -> tuple[Dataset, Partition]:
    """Read the data of a site for the task of the run; the partition has this one client.

    The data's own test set is used where it has one, else ``test_fraction`` of the samples, drawn by the seed.

    Raises
    ------
    DataError
        If the data cannot be used, or does not fit the task: it says which file and why.
    SettingsError
        If the settings do not give a task.
    """
    task, kind = task_of(settings), settings.sample_kind
    content = _read(path, settings)
    if content.kind != kind:
        raise DataError(f"{path}: holds samples of the kind {content.kind}; the run's sample-kind is {kind}")
    if (shape := _shape(content, settings)) != task.input_shape:
        raise DataError(
            f"{path}: samples of shape {_as_text(shape)}; the run's input-shape is {_as_text(task.input_shape)}"
        )
    x = hashed(content.x, task.input_shape[0], task.vocabulary) if kind == "text" else content.x
    if kind == "tokens" and x.max() >= task.vocabulary:
        raise DataError(f"{path}: token {x.max()}; the run's vocabulary allows 0 to {task.vocabulary - 1}")
    mean, std = np.zeros(1, np.float32), np.ones(1, np.float32)
    if task.kind == "image":
        mean, std = mean.repeat(task.input_shape[0]), std.repeat(task.input_shape[0])
        if kind == "image":  # as data.dataset.image_dataset does
            mean, std = mean + np.float32(0.5), std * np.float32(0.5)
    elif kind == "features":
        mean, std = _statistics(settings, task.input_shape[0])
    y = _known(content.labels, task.class_names, path)
    return Dataset(SITES, task, x, y, mean, std), _partition(content, settings, seed)


def check_site_settings(settings: DataSettings) -> None:
    """Raise :class:`SettingsError` for settings of a benchmark's partition with sites, or of sites without them."""
    for name in _BENCHMARK_ONLY if settings.dataset == SITES else _SITES_ONLY:
        value, neutral = getattr(settings, name), getattr(DataSettings, name)
        if value != neutral:
            raise SettingsError(
                f"{key_of(name)} = {value!r} does not go with dataset = {settings.dataset!r}; it must be {neutral!r}"
            )


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


def _read(path: Path, settings: DataSettings) -> Content:
    if not path.is_absolute():
        raise DataError(f"data = {str(path)!r} in the node config: it must be an absolute path")
    if not path.exists():
        raise DataError(f"{path}: there is no such file or directory (data in the node config)")
    if settings.input_shape and settings.sample_kind == "image":
        channels, height, width = _wanted_shape(settings, "image")
        return read_own(path, (width, height), _MODES[channels])
    return read_own(path)


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


def _known(labels: np.ndarray, names: tuple[str, ...], path: Path) -> np.ndarray:
    """Return the labels as numbers of the run's classes."""
    own, own_names = distinct_labels(labels, str(path))
    number = {name: place for place, name in enumerate(names)}
    for place, name in enumerate(own_names):
        if name not in number:
            raise DataError(
                f"{path}: label {name!r} of sample {int(np.flatnonzero(own == place)[0])} is not a class of the run; "
                f"allowed are {', '.join(names)}"
            )
    return np.array([number[name] for name in own_names], np.int64)[own]


def _statistics(settings: DataSettings, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Return mean and standard deviation of the features as the settings give them, float32 ``(F,)``."""
    pair = []
    for key, text in (("feature-mean", settings.feature_mean), ("feature-std", settings.feature_std)):
        try:
            values = np.array([float(word) for word in text.split(",")], np.float32)
        except ValueError:
            values = np.empty(0, np.float32)
        usable = np.isfinite(values).all() and (key == "feature-mean" or (values > 0).all())
        if len(values) not in (1, width) or not usable:
            bound = " above 0" if key == "feature-std" else ""
            raise SettingsError(f"{key} = {text!r:.60}: it must be one number{bound}, or {width} with commas between")
        pair.append(np.broadcast_to(values, (width,)).copy())
    return pair[0], pair[1]


def _listed(names: Sequence[str]) -> str:
    plain = all("," not in name and name == name.strip() and not name.startswith("[") for name in names)
    return ",".join(names) if plain else json.dumps(list(names), ensure_ascii=False)


def _sorted_names(names: set[str]) -> list[str]:
    """Sort names; numbers, if all are, by their value."""
    try:
        return sorted(names, key=int)
    except ValueError:
        return sorted(names)


def _most_common(values: Sequence[str]) -> str:
    counts = Counter(values)
    return min(counts, key=lambda value: (-counts[value], value), default="")


def _as_text(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))
