"""Assign samples to clients, using the partitioners of flwr-datasets for some partitions."""

import contextlib
import io
import math
import warnings
from collections.abc import Callable
from typing import Any

import datasets
import numpy as np
from flwr_datasets.partitioner import DirichletPartitioner, Partitioner, PathologicalPartitioner, ShardPartitioner

from posy.data.dataset import Dataset
from posy.data.settings import DataSettings
from posy.settings import SettingsError

Parts = list[np.ndarray]

_FEW = 10  # minimum number of samples that each client of a Dirichlet partition should have
_DRAWS_FEW, _DRAWS = 4, 1500  # maximum number of partitioners that require _FEW samples, and in total
_TRIES = 11  # number of draws per partitioner
_HOPELESS = 1e-3
"""Posy gives up after the first partitioner if the expected number of successful draws is below this value."""
_SIMULATED = 100_000
"""Total number of clients that :func:`share_below` simulates in all of its draws."""


def dirichlet(dataset: Dataset, settings: DataSettings, rng: np.random.Generator) -> Parts:
    """Divide each class among the clients in Dirichlet proportions.

    The function repeats the draw until each client has at least 10 samples, or fewer if the data set is small. If this
    fails, it repeats the draw until each client has at least 2. ``dirichlet_balanced`` selects the rule of PFLlib and
    FedLab: a client that already has 1/M of all samples receives no samples of later classes.
    """
    clients = settings.num_clients
    least = min(2, len(dataset) // clients)
    few = max(least, min(_FEW, len(dataset) // (4 * clients)))
    for draw in range(_DRAWS):
        options = {
            "alpha": settings.dirichlet_alpha,
            "min_partition_size": few if draw < _DRAWS_FEW else least,
            "self_balancing": settings.dirichlet_balanced,
        }
        with contextlib.suppress(ValueError):  # the partitioner gave up, so the next attempt uses another seed
            return _divide(DirichletPartitioner, options, dataset, clients, rng, shuffled=False)
        if draw == 0:
            _check_hope(dataset, settings, least)
    raise SettingsError(
        f"dirichlet-alpha = {settings.dirichlet_alpha:g} with num-clients = {clients}: no draw gave each client at "
        f"least {least} of the {len(dataset)} samples of {dataset.name}; raise dirichlet-alpha or use fewer clients"
    )


def _check_hope(dataset: Dataset, settings: DataSettings, least: int) -> None:
    """Raise :class:`SettingsError` if no draw is likely to give each client ``least`` samples."""
    clients = settings.num_clients
    share = share_below(np.bincount(dataset.y), settings, least)
    if share == 1 or _DRAWS * _TRIES * math.exp(clients * math.log1p(-share)) < _HOPELESS:
        raise SettingsError(
            f"dirichlet-alpha = {settings.dirichlet_alpha:g} with num-clients = {clients}: a draw leaves about "
            f"{max(1, round(share * clients))} clients with fewer than {least} of the {len(dataset)} samples of "
            f"{dataset.name}; raise dirichlet-alpha or lower num-clients"
        )


def share_below(counts: np.ndarray, settings: DataSettings, least: int) -> float:
    """Estimate the share of clients that receive fewer than ``least`` samples in a draw.

    If the clients' sizes were independent, a draw would succeed with probability (1 - share)^M. This is an upper bound,
    because the sizes have a fixed sum and are therefore negatively associated.

    Parameters
    ----------
    counts : numpy.ndarray
        Number of samples per class, ``(C,)``.
    """
    clients = settings.num_clients
    draws = max(1, _SIMULATED // clients)
    rng = np.random.default_rng(0)  # fixed seed: the estimate does not affect the partition
    sizes = np.zeros((draws, clients), np.int64)
    for count in counts[counts > 0]:
        shares = rng.standard_gamma(settings.dirichlet_alpha, (draws, clients))
        if settings.dirichlet_balanced:
            shares[sizes > counts.sum() / clients] = 0
        total = shares.sum(axis=1, keepdims=True)
        ends = (shares.cumsum(axis=1) / np.where(total > 0, total, 1) * count).astype(np.int64)
        ends[:, -1] = count
        sizes += np.diff(ends, axis=1, prepend=0)
    return float((sizes < least).mean())


def iid(dataset: Dataset, settings: DataSettings, rng: np.random.Generator) -> Parts:
    """Divide all samples at random into parts of (nearly) equal size."""
    return np.array_split(rng.permutation(len(dataset)), settings.num_clients)


def classes(dataset: Dataset, settings: DataSettings, rng: np.random.Generator) -> Parts:
    """Give each client S classes, and divide each class evenly among its clients."""
    options = {"num_classes_per_partition": settings.classes_per_client, "class_assignment_mode": "first-deterministic"}
    try:
        return _divide(PathologicalPartitioner, options, dataset, settings.num_clients, rng)
    except ValueError as error:
        raise SettingsError(
            f"classes-per-client = {settings.classes_per_client} with num-clients = {settings.num_clients} does not "
            f"suit {dataset.name}: {error}"
        ) from error


def pathological(dataset: Dataset, settings: DataSettings, rng: np.random.Generator) -> Parts:
    """Give each client S classes in uneven shares, as PFLlib does.

    Each class in turn goes to the first M S / C clients that have fewer than S classes, so consecutive clients have the
    same classes. Each client of a class receives a random 10 to 100 % of an even share, except the last client, which
    receives the remainder. If M S is less than C, the last C - M S classes are not used.
    """
    clients, per_client, num_classes = settings.num_clients, settings.classes_per_client, dataset.task.num_classes
    open_slots = np.full(clients, per_client)
    parts: list[Parts] = [[] for _ in range(clients)]
    for label in range(min(num_classes, clients * per_client)):
        samples = rng.permutation(np.flatnonzero(dataset.y == label))
        class_clients = np.flatnonzero(open_slots)[: -(-clients * per_client // num_classes)]
        if not 0 < len(class_clients) <= len(samples):
            raise SettingsError(
                f"classes-per-client = {per_client} with num-clients = {clients} divides the {len(samples)} samples "
                f"of class {dataset.task.class_names[label]} in {dataset.name} among {len(class_clients)} clients; "
                "each class needs at least one client, and each client needs a sample; choose num-clients and "
                f"classes-per-client so that their product is a multiple of the {num_classes} classes"
            )
        even_share = len(samples) / len(class_clients)
        sizes = rng.integers(max(1, int(even_share / 10)), max(2, int(even_share)), len(class_clients) - 1)
        for client, part in zip(class_clients, np.split(samples, np.cumsum(sizes)), strict=True):
            parts[client].append(part)
        open_slots[class_clients] -= 1
    return [np.concatenate(samples) for samples in parts]


def shards(dataset: Dataset, settings: DataSettings, rng: np.random.Generator) -> Parts:
    """Sort samples by label, cut them into equal shards, and give each client random shards (FedDRM, section 5).

    Samples after the last complete shard are not used.
    """
    number = settings.num_clients * settings.shards_per_client
    if number > len(dataset):
        raise SettingsError(
            f"shards-per-client = {settings.shards_per_client} with num-clients = {settings.num_clients} makes "
            f"{number} shards; {dataset.name} has {len(dataset)} samples, and each shard needs at least one"
        )
    options = {"num_shards_per_partition": settings.shards_per_client}
    return _divide(ShardPartitioner, options, dataset, settings.num_clients, rng, ordered=True)


def natural(dataset: Dataset, settings: DataSettings, _: np.random.Generator) -> Parts:
    """Give each client one of the M largest groups, in group order. Ties in size go to the lower group number."""
    assert dataset.groups is not None
    groups, sizes = np.unique(dataset.groups, return_counts=True)
    chosen = groups[np.argsort(-sizes, kind="stable")[: settings.num_clients]]
    return [np.flatnonzero(dataset.groups == group) for group in np.sort(chosen)]


ASSIGN: dict[str, Callable[[Dataset, DataSettings, np.random.Generator], Parts]] = {
    "dirichlet": dirichlet,
    "iid": iid,
    "classes": classes,
    "pathological": pathological,
    "shards": shards,
    "natural": natural,
}


class _Labels(datasets.Dataset):  # type: ignore[misc]
    """The labels of a data set for a partitioner, which receives them as one array."""

    def __getitem__(self, key: Any) -> Any:
        values = super().__getitem__(key)
        return values[:] if isinstance(key, str) else values

    def select(self, indices: Any) -> Any:
        """Return the row numbers, because building a table would take most of a draw's time."""
        return np.asarray(indices, np.int64)

    def sort(self, _: str) -> Any:
        """Return the labels unchanged, because :func:`_divide` already sorts them for a partitioner that sorts."""
        return self


def _divide(
    kind: Callable[..., Partitioner],
    options: dict[str, Any],
    dataset: Dataset,
    clients: int,
    rng: np.random.Generator,
    *,
    shuffled: bool = True,
    ordered: bool = False,
) -> Parts:
    """Divide samples by label with a partitioner, and return their indices per client.

    With ``shuffled``, the samples are shuffled first. With ``ordered``, they are then sorted by label.
    """
    seed = int(rng.integers(2**32))
    order = rng.permutation(len(dataset)) if shuffled else np.arange(len(dataset))
    if ordered:
        order = order[np.argsort(dataset.y[order], kind="stable")]
    memory = datasets.table.InMemoryTable.from_pydict({"label": dataset.y[order]})
    partitioner = kind(clients, partition_by="label", shuffle=False, seed=seed, **options)
    partitioner.dataset = _Labels(memory).with_format("numpy")
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):  # hides progress bars
        warnings.simplefilter("ignore")
        return [order[partitioner.load_partition(client)] for client in range(clients)]
