"""Assign samples to clients, and split them into training, test and validation samples."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from logging import INFO, WARNING
from pathlib import Path
from typing import Any

import numpy as np
from flwr.common.logger import log

from posy.data.augment import check_augment
from posy.data.dataset import Dataset, Indices
from posy.data.errors import DataError
from posy.data.files import read_json
from posy.data.settings import BY_CLASS, CENTRAL_SET, DataSettings
from posy.data.shifts import check_shift
from posy.data.splits import RANDOM, Strata, split, split_folds
from posy.metrics import CLASSES
from posy.paths import exists, expanded
from posy.randomness import numpy_generator
from posy.settings import SettingsError


@dataclass(frozen=True, eq=False)
class Partition:
    """Indices into the data set for each of the M clients, ``(n_i,)`` int64, in ascending order.

    A test split is empty only if the client has a single sample, or if it is empty in a given partition. A validation
    split is empty only if the client has a single training sample, or if ``validation_fraction`` is 0.
    """

    train: tuple[np.ndarray, ...]
    test: tuple[np.ndarray, ...]
    validation: tuple[np.ndarray, ...] = ()
    names: tuple[str, ...] = ()
    """Names of the clients' groups, if the partition is ``natural`` and the data names its groups."""

    def __post_init__(self) -> None:
        """Give each client an empty validation split if there are no validation splits."""
        if not self.validation:
            object.__setattr__(self, "validation", tuple(train[:0] for train in self.train))

    def counts(self, y: np.ndarray, num_classes: int) -> np.ndarray:
        """Return the number of samples per client and class over all splits, ``(M, C)`` int64."""
        evaluated = (_class_counts(split, y, num_classes) for split in (self.test, self.validation))
        return sum(evaluated, self.train_counts(y, num_classes))

    def label_counts(self, y: np.ndarray) -> np.ndarray:
        """Return the number of samples with each label ``(N, C)``, per client over all splits, ``(M, C)`` int64."""
        return np.stack([y[np.concatenate(parts)].sum(axis=0) for parts in self._splits()])

    def sizes(self) -> np.ndarray:
        """Return the number of samples per client over all splits, ``(M, 1)`` int64."""
        return np.array([[sum(map(len, parts))] for parts in self._splits()], np.int64)

    def _splits(self) -> list[tuple[np.ndarray, ...]]:
        return list(zip(self.train, self.test, self.validation, strict=True))

    def train_counts(self, y: np.ndarray, num_classes: int) -> np.ndarray:
        """Return the number of training samples per client and class, ``(M, C)`` int64."""
        return _class_counts(self.train, y, num_classes)


def small_clients(part: Partition, dataset: Dataset) -> dict[str, list[int]]:
    """Return the clients that have one training sample, one training class, or no test samples, keyed by the reason."""
    one_sample = [client for client, rows in enumerate(part.train) if len(rows) == 1]
    one_class: list[int] = []
    if dataset.task.target == CLASSES:
        present = part.train_counts(dataset.y, dataset.task.num_classes) > 0
        one_class = np.flatnonzero(present.sum(axis=1) == 1).tolist()
    untested = [client for client, rows in enumerate(part.test) if not len(rows)]
    lists = {"one-training-sample": one_sample, "one-training-class": one_class, "no-test-samples": untested}
    return {reason: clients for reason, clients in lists.items() if clients}


def _class_counts(parts: Sequence[np.ndarray], y: np.ndarray, num_classes: int) -> np.ndarray:
    return np.stack([np.bincount(y[part], minlength=num_classes) for part in parts])


def partition(dataset: Dataset, settings: DataSettings, seed: int) -> Partition:
    """Assign the samples of a data set to clients, and split each client's samples.

    The same data, settings and seed give the same partition in every process. Data that is already partitioned keeps
    its partition.

    If the data comes with a test set that ``test_set`` does not pool, Posy assigns only the training samples. Each
    client then receives its share of the test set (see :func:`share_test_set`), or, with ``natural``, its group's test
    samples. Otherwise, ``test_fraction`` of each client's samples are set aside for tests. A ``central`` test set
    belongs to no client.

    Raises
    ------
    SettingsError
        If the settings do not suit the data or each other.
    DataError
        If a client has no training sample.
    """
    kind = "given" if dataset.given is not None else settings.partition
    rng = numpy_generator(seed, "partition")
    is_test = dataset.is_test if settings.test_set == "supplied" and kind != "given" else None
    if settings.folds:
        _check_folds(kind, dataset, settings, is_test)
    if settings.test_set == "pooled" and kind != "given" and (dataset.is_test is None or not dataset.is_test.any()):
        log(WARNING, "test-set = 'pooled' has no effect: %s comes without a test set; remove test-set", dataset.name)
    if settings.test_set == CENTRAL_SET:
        pairs = _without_central(kind, dataset, settings, rng)
    elif is_test is None or not is_test.any():
        _check(kind, dataset, settings)
        pairs = _assigned(kind, dataset, settings, rng)
    else:
        if settings.test_fraction != DataSettings.test_fraction:
            log(
                WARNING,
                "test-fraction = %g has no effect: %s comes with a test set; test-set=pooled splits all samples",
                settings.test_fraction,
                dataset.name,
            )
        training = _training_samples(dataset, is_test)
        _check(kind, training, settings)
        pairs = _with_test_set(kind, dataset, is_test, training, settings, rng)
    if kind == "iid" and dataset.task.target != CLASSES:
        log(INFO, "%s has no classes: Posy assigns samples to clients at random (partition = iid)", dataset.name)
    if kind == "given" and settings.partition != "given":
        log(INFO, "%s is already partitioned across %s clients: Posy uses this partition", dataset.name, len(pairs))
    for client, (train, _) in enumerate(pairs):
        if not len(train):
            raise DataError(f"partition {kind!r} of {dataset.name}: client {client} has no training sample")
    result = finished(pairs, settings, rng, strata_of(dataset, settings))
    if kind not in ("natural", "given") or dataset.groups is None or not dataset.group_names:
        return result
    return replace(result, names=tuple(dataset.group_names[dataset.groups[train[0]]] for train in result.train))


def strata_of(dataset: Dataset, settings: DataSettings) -> Strata:
    """Return the classes and the groups according to which the samples of a data set are split."""
    is_stratified = settings.stratify and dataset.task.target == CLASSES
    return Strata(dataset.y if is_stratified else None, dataset.split_groups)


def finished(pairs: Indices, settings: DataSettings, rng: np.random.Generator, strata: Strata = RANDOM) -> Partition:
    """Convert clients' (train, test) indices to a partition with at most ``train_samples`` training samples per client.

    A fraction ``validation_fraction`` of these training samples is held out for validation.
    """
    if settings.train_samples:
        pairs = tuple((rng.permutation(train)[: settings.train_samples], test) for train, test in pairs)
    parts = [(train, test, train[:0]) for train, test in pairs]
    if settings.validation_fraction:
        divided = split([train for train, _ in pairs], settings.validation_fraction, rng, strata)
        parts = [(train, test, validation) for (train, validation), (_, test) in zip(divided, pairs, strict=True)]
    train, test, validation = (
        tuple(np.sort(part).astype(np.int64) for part in split_parts) for split_parts in zip(*parts, strict=True)
    )
    return Partition(train, test, validation)


def _training_samples(dataset: Dataset, is_test: np.ndarray) -> Dataset:
    """Return the data set with the labels and groups of its training samples only."""
    rows = np.flatnonzero(~is_test)
    arrays = {name: getattr(dataset, name) for name in ("groups", "split_groups")}
    groups: dict[str, Any] = {name: None if a is None else a[rows] for name, a in arrays.items()}
    # Keep all of x, because the partition rules use only labels and groups.
    return replace(dataset, y=dataset.y[rows], is_test=None, **groups)


def _without_central(kind: str, dataset: Dataset, settings: DataSettings, rng: np.random.Generator) -> Indices:
    """Return each client's (train, test) indices, which exclude the supplied test set: it stays at the server."""
    if dataset.given is not None:
        raise SettingsError(
            f"test-set = {CENTRAL_SET!r} cannot be combined with {dataset.name}, which comes with a test set for each "
            "client; set test-set = 'supplied'"
        )
    if dataset.is_test is None or not dataset.is_test.any():
        raise SettingsError(
            f"test-set = {CENTRAL_SET!r}: {dataset.name} comes without a test set; name a test set with "
            "central-test-data, or remove test-set"
        )
    training = _training_samples(dataset, dataset.is_test)
    _check(kind, training, settings)
    if kind != "file":
        rows = np.flatnonzero(~dataset.is_test)
        return tuple((rows[train], rows[test]) for train, test in _assigned(kind, training, settings, rng))
    pairs = _from_file(dataset, settings, rng)
    for client, pair in enumerate(pairs):
        indices = np.concatenate(pair)
        if (central := indices[dataset.is_test[indices]]).size:
            raise SettingsError(
                f"partition-file = {settings.partition_file!r}: client {client} has sample {central[0]}, which belongs "
                f"to the test set of {dataset.name}; remove it from the file, or set test-set to 'supplied'"
            )
    return pairs


def _check(kind: str, dataset: Dataset, settings: DataSettings) -> None:
    """Check the settings against the data before assigning samples."""
    clients = settings.num_clients
    if kind == "given":
        if settings.test_set == "pooled" and dataset.given is not None:
            raise SettingsError(
                f"test-set = 'pooled' cannot be combined with {dataset.name}, which comes with a test set for each "
                "client; set test-set = 'supplied'"
            )
        if dataset.given is None:
            raise SettingsError(
                f"partition = 'given' needs partitioned data (a PFLlib directory); {dataset.name} is not partitioned"
            )
        if settings.partition not in ("given", "natural", DataSettings.partition):
            raise SettingsError(
                f"partition = {settings.partition!r}: {dataset.name} is already partitioned; remove partition, or set "
                "it to 'given'"
            )
        if len(dataset.given) != clients:
            raise SettingsError(f"num-clients = {clients}: {dataset.name} comes with {len(dataset.given)} clients")
    elif kind != "file" and clients > len(dataset):
        raise SettingsError(
            f"num-clients = {clients}: {dataset.name} has {len(dataset)} samples, and each client needs at least one"
        )
    _check_classes(kind, dataset, settings)
    if settings.samples_per_client and kind not in ("classes", "iid"):
        raise SettingsError(
            f"samples-per-client = {settings.samples_per_client} needs partition = 'classes' or 'iid', not {kind!r}; "
            "set samples-per-client = 0"
        )
    if kind == "natural":
        if dataset.groups is None:
            raise SettingsError(
                "partition = 'natural' needs data with groups (femnist, sent140, fedisic, a table with a column group, "
                f"an .npz with groups_train); {dataset.name} has none; if a column contains the groups, name it in "
                "group-column"
            )
        if clients > (groups := len(np.unique(dataset.groups))):
            raise SettingsError(f"num-clients = {clients}: {dataset.name} has {groups} groups; allowed: 1 to {groups}")
    is_pixels = dataset.task.kind == "image" and dataset.x.dtype == np.uint8
    check_shift(settings.shift, clients, dataset.x.shape[-1] if is_pixels else 0)
    check_augment(settings.augment, settings.transforms, dataset.task.kind, dataset.task.input_shape, dataset.name)


def _check_classes(kind: str, dataset: Dataset, settings: DataSettings) -> None:
    """Check that the data has the classes that a partition needs."""
    if kind in BY_CLASS and dataset.task.target != CLASSES:
        raise SettingsError(
            f"partition = {kind!r} assigns samples by class, but {dataset.name} has {dataset.task.target}; set "
            "partition = 'iid', 'natural' or 'file'"
        )
    if kind in ("classes", "pathological") and settings.classes_per_client > dataset.task.num_classes:
        raise SettingsError(
            f"classes-per-client = {settings.classes_per_client}: {dataset.name} has {dataset.task.num_classes} "
            f"classes; allowed: 1 to {dataset.task.num_classes}"
        )


def _check_folds(kind: str, dataset: Dataset, settings: DataSettings, is_test: np.ndarray | None) -> None:
    """Raise :class:`SettingsError` unless the clients' samples can be divided into folds."""
    reason = ""
    if kind == "given":
        reason = f"{dataset.name} comes with a test set for each client"
    elif is_test is not None and is_test.any():
        reason = f"{dataset.name} comes with a test set; test-set = 'pooled' divides all samples into folds"
    elif settings.samples_per_client:
        reason = f"samples-per-client = {settings.samples_per_client} draws the test samples separately"
    elif not settings.fold:
        reason = "this command trains on one fold; set fold"
    if reason:
        raise SettingsError(f"folds = {settings.folds}: {reason}")


def _assigned(kind: str, dataset: Dataset, settings: DataSettings, rng: np.random.Generator) -> Indices:
    """Return the (train, test) indices of each client."""
    if kind == "given":
        return dataset.given or ()
    if kind == "file":
        return _from_file(dataset, settings, rng)
    if settings.samples_per_client:
        return _equal(dataset, settings, rng)
    from posy.data.assign import ASSIGN  # noqa: PLC0415 - flwr_datasets takes seconds to import

    return _tested(ASSIGN[kind](dataset, settings, rng), dataset, settings, rng)


def _tested(parts: Sequence[np.ndarray], dataset: Dataset, settings: DataSettings, rng: np.random.Generator) -> Indices:
    """Set each client's test samples aside: a fraction of its samples, or one fold."""
    strata = strata_of(dataset, settings)
    if settings.folds:
        return split_folds(parts, settings.folds, settings.fold, rng, strata)
    return split(parts, settings.test_fraction, rng, strata)


def _with_test_set(
    kind: str,
    dataset: Dataset,
    is_test: np.ndarray,
    training: Dataset,
    settings: DataSettings,
    rng: np.random.Generator,
) -> Indices:
    """Return each client's (train, test) indices; ``training`` contains the training samples' labels and groups."""
    rows, test = np.flatnonzero(~is_test), np.flatnonzero(is_test)
    if kind == "file":
        pairs = _from_file(dataset, settings, rng, is_test)
        if any(len(part) for _, part in pairs):
            return pairs
        parts = [part for part, _ in pairs]
    elif settings.samples_per_client:
        parts = [rows[part] for part, _ in _equal(training, settings, rng, tested=False)]
    else:
        from posy.data.assign import ASSIGN  # noqa: PLC0415 - flwr_datasets takes seconds to import

        parts = [rows[part] for part in ASSIGN[kind](training, settings, rng)]
    if kind == "natural" and dataset.groups is not None:
        groups = [dataset.groups[part[0]] for part in parts]
        tests = [test[dataset.groups[test] == group] for group in groups]
        if any(map(len, tests)):
            return tuple(zip(parts, tests, strict=True))
    return tuple(zip(parts, _divided(dataset, test, parts, rng), strict=True))


def share_test_set(counts: np.ndarray, available: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return the number of test samples that each client receives per class, ``(M, C)`` int64.

    Each class is divided in proportion to the clients' training samples of that class, so that each client is tested on
    the class proportions that it trains on. Each sample is assigned to one client. Samples left over after rounding
    down go to the clients with the largest remainders, with ties broken at random. A client that would receive no test
    sample takes a sample of its most frequent class from the client with the most test samples of this class.

    Parameters
    ----------
    counts : numpy.ndarray
        Number of training samples per client and class, ``(M, C)``.
    available : numpy.ndarray
        Number of samples per class in the test set, ``(C,)``. Classes without a training sample are not used.
    rng : numpy.random.Generator
        Breaks ties between equal remainders.
    """
    totals = np.maximum(counts.sum(0), 1)
    shares, remainders = np.divmod(counts * available, totals)
    leftover = np.where(counts.any(0), available, 0) - shares.sum(0)
    for label in np.flatnonzero(leftover):
        order = np.lexsort((rng.random(len(counts)), -remainders[:, label]))
        shares[order[: leftover[label]], label] += 1
    for client in np.flatnonzero(~shares.any(1)):
        for label in np.argsort(-counts[client], kind="stable")[: np.count_nonzero(counts[client])]:
            giver = int(np.where(shares.sum(1) > 1, shares[:, label], 0).argmax())
            if shares[giver, label] and shares[giver].sum() > 1:
                shares[giver, label] -= 1
                shares[client, label] += 1
                break
    return shares


def _divided(
    dataset: Dataset, test: np.ndarray, train: Sequence[np.ndarray], rng: np.random.Generator
) -> list[np.ndarray]:
    """Divide the indices of a test set among clients, using the counts that :func:`share_test_set` returns."""
    num_classes, y = dataset.task.num_classes, dataset.y
    if dataset.task.target != CLASSES:  # all samples count as one class
        num_classes, y = 1, np.zeros(len(dataset), np.int64)
    available = np.bincount(y[test], minlength=num_classes)
    shares = share_test_set(_class_counts(train, y, num_classes), available, rng)
    if unused := int(available.sum() - shares.sum()):
        log(WARNING, "%s: %s test samples are not used: no client trains on their classes", dataset.name, unused)
    parts: list[list[np.ndarray]] = [[test[:0]] for _ in train]
    for label in np.flatnonzero(shares.any(0)):
        pool = rng.permutation(test[y[test] == label])
        for part, share in zip(parts, np.split(pool, np.cumsum(shares[:, label])[:-1]), strict=True):
            part.append(share)
    return [np.concatenate(part) for part in parts]


def _equal(dataset: Dataset, settings: DataSettings, rng: np.random.Generator, *, tested: bool = True) -> Indices:
    """Give each client the same number of samples, divided evenly among its S classes (PPFE, appendix A.2).

    Each client receives ``samples_per_client`` training samples. If ``tested``, it also receives test samples from the
    same pool and classes, which make up ``test_fraction`` of all its samples. Each client takes the S classes that the
    fewest clients have so far, with ties broken at random. With ``partition = "iid"``, all samples count as one class.
    """
    by_class = settings.partition == "classes"
    y, num_classes = (dataset.y, dataset.task.num_classes) if by_class else (np.zeros(len(dataset)), 1)
    per_client = settings.classes_per_client if by_class else 1
    train = settings.samples_per_client
    test = max(1, round(train * settings.test_fraction / (1 - settings.test_fraction))) if tested else 0
    if train < per_client:
        raise SettingsError(
            f"samples-per-client = {train} is too small for classes-per-client = {per_client}; set {per_client} or more"
        )
    # The remainders of the two divisions go to different classes if there are enough classes.
    class_numbers = np.arange(per_client)
    take_train = train // per_client + (class_numbers < train % per_client)
    take_test = test // per_client + (class_numbers[::-1] < test % per_client)
    pools = [rng.permutation(np.flatnonzero(y == label)) for label in range(num_classes)]
    clients_per_class = np.zeros(num_classes, np.int64)
    num_used = np.zeros(num_classes, np.int64)
    pairs = []
    for _ in range(settings.num_clients):
        labels = np.lexsort((rng.random(num_classes), clients_per_class))[:per_client]
        clients_per_class[labels] += 1
        parts: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])
        for label, *counts in zip(rng.permutation(labels), take_train, take_test, strict=True):
            for part, count in zip(parts, counts, strict=True):
                part.append(pools[label][num_used[label] : num_used[label] + count])
                num_used[label] += count
        pairs.append((np.concatenate(parts[0]), np.concatenate(parts[1])))
    for label, pool in enumerate(pools):
        if num_used[label] > len(pool):
            of_class = f" of class {dataset.task.class_names[label]}" if by_class else ""
            tests = f" and test-fraction = {settings.test_fraction:g}" if tested else ""
            raise SettingsError(
                f"samples-per-client = {train} with num-clients = {settings.num_clients}{tests} needs "
                f"{num_used[label]} samples ({'train and test' if tested else 'train'}){of_class}, {dataset.name} has "
                f"{len(pool)}; lower one of these settings"
            )
    return tuple(pairs)


def _from_file(
    dataset: Dataset, settings: DataSettings, rng: np.random.Generator, is_test: np.ndarray | None = None
) -> Indices:
    """Return the (train, test) indices of each client from the partition file.

    The file contains a list of index lists, or two such lists as {"train": [...], "test": [...]}. With
    ``is_test``, a client may not train on samples of the supplied test set.
    """
    path = expanded(settings.partition_file)
    if not settings.partition_file or not exists(path):
        raise SettingsError(
            f"partition-file = {settings.partition_file!r}: partition = 'file' needs a JSON file; looked for "
            f"{path.absolute()}"
        )
    clients, has_test_lists = _listed_clients(path, len(dataset), settings)
    if has_test_lists and settings.folds:
        raise SettingsError(f"folds = {settings.folds}: {path} lists the test samples; remove folds")
    pairs: Indices = tuple(clients)
    if has_test_lists and is_test is None and settings.test_fraction != DataSettings.test_fraction:
        log(
            WARNING,
            "test-fraction = %g has no effect: %s lists the test samples; remove test-fraction",
            settings.test_fraction,
            path,
        )
    if not has_test_lists and is_test is not None:
        pairs = tuple((part[~is_test[part]], part[is_test[part]]) for (part,) in clients)
    elif not has_test_lists:
        pairs = _tested([part for (part,) in clients], dataset, settings, rng)
    for client, (train, _) in enumerate(pairs):
        if is_test is not None and (test_samples := train[is_test[train]]).size:
            raise SettingsError(
                f"partition-file = {settings.partition_file!r}: client {client} trains on sample {test_samples[0]}, "
                f"which belongs to the test set of {dataset.name}; list it under test, or set test-set to 'pooled'"
            )
    train, test = (np.concatenate(parts) for parts in zip(*pairs, strict=True))
    if overlap := len(np.intersect1d(train, test)):
        log(WARNING, "%s: %s samples are training samples of one client and test samples of another", path, overlap)
    return pairs


def _listed_clients(path: Path, size: int, settings: DataSettings) -> tuple[list[Any], bool]:
    """Return each client's index lists from a partition file, and whether the file lists test samples separately."""
    content = read_json(path)
    splits: dict[str, Any] = content if isinstance(content, dict) else {"all": content}
    if set(splits) not in ({"all"}, {"train", "test"}) or not all(isinstance(s, list) for s in splits.values()):
        raise DataError(f'{path}: allowed: a list of index lists, or {{"train": [...], "test": [...]}} of such lists')
    names = ("all",) if "all" in splits else ("train", "test")
    for name in names:
        if len(splits[name]) != settings.num_clients:
            raise SettingsError(f"num-clients = {settings.num_clients}: {path} lists {len(splits[name])} clients")
    clients: list[Any] = []
    for client, lists in enumerate(zip(*(splits[name] for name in names), strict=True)):
        parts = tuple(_indices(values, size, f"{path}: client {client}") for values in lists)
        indices, times = np.unique(np.concatenate(parts), return_counts=True)
        if (times > 1).any():
            raise DataError(f"{path}: client {client} lists sample {indices[times > 1][0]} twice; list it only once")
        clients.append(parts)
    return clients, "all" not in splits


def _indices(values: Any, size: int, where: str) -> np.ndarray:
    if not isinstance(values, list):
        raise DataError(f"{where}: {values!r:.40} is not a list of sample indices")
    for position, index in enumerate(values):
        if type(index) is not int or not 0 <= index < size:
            raise DataError(f"{where}: {index!r} at position {position}; allowed: whole numbers from 0 to {size - 1}")
    return np.array(values, np.int64)
