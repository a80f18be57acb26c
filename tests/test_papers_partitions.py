"""Posy can draw the partitions of the papers' tables and figures, also for data sets that are not installed."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from posy.commands.papers.item import Item, items, papers
from posy.data.dataset import Dataset, make_dataset
from posy.data.datasets import _subset, load_dataset
from posy.data.errors import DataError
from posy.data.partitions import partition
from posy.data.settings import DataSettings
from posy.data.shifts import check_shift
from posy.settings import SettingsError, as_config
from posy.strategies.registry import read_settings

SIZES = {
    "mnist": (10, 7000, 1),
    "fmnist": (10, 7000, 1),
    "cifar10": (10, 6000, 3),
    "cifar20": (20, 3000, 3),
    "cifar100": (100, 600, 3),
    "emnist-letters": (26, 5600, 1),
    "tiny-imagenet": (200, 550, 3),
    "kvasir": (8, 500, 3),
    "agnews": (4, 31_900, 0),
}
"""Number of classes, samples per class (a mean for MNIST) and channels (0 for texts)."""
CENTRES = (12_413, 3954, 3363, 2259, 819, 439)
"""Numbers of images at FedISIC's centres, as FLamby lists them."""
SMALLEST_CLIENTS = ("cwfedavg", "figure4", "full", "CIFAR-10, alpha 0.01")
"""A cell in which few draws give each of 20 clients any samples. One training and one test sample are enough."""
CHANGES = ("shift", "augment", "transforms", "image_size", "text_length", "vocabulary", "train_samples")
"""Settings that change samples after the partition. No table leaves a client fewer than 50 training samples."""
UNCHANGED = {name: getattr(DataSettings, name) for name in CHANGES}
KEYS = as_config(DataSettings()).keys()


@cache
def synthetic(name: str) -> Dataset:
    """Return synthetic samples with the classes, groups and size of a published data set."""
    rng, groups = np.random.default_rng(0), None
    if name == "digits":
        return load_dataset(DataSettings(dataset=name), Path("nowhere"), 0)
    if name in SIZES:
        classes, of_each, channels = SIZES[name]
        y = rng.permutation(np.repeat(np.arange(classes), of_each))
    else:
        classes, channels, sizes = {
            # LEAF: 3,550 writers, of 227 characters on average with a standard deviation of 89.
            "femnist": (62, 1, np.maximum(10, rng.normal(227, 89, 3550)).astype(int)),
            "fedisic": (8, 3, np.array(CENTRES)),
            # The largest user with eight or more test samples has 549 tweets. The other sizes are invented.
            "sent140": (2, 0, np.geomspace(549, 31, 1000).astype(int)),
        }[name]
        groups = np.repeat(np.arange(len(sizes)), sizes)
        y = rng.integers(0, classes, len(groups))
    x = np.zeros((len(y), 1, 1, channels), np.uint8) if channels else np.ones((len(y), 1), np.int64)
    names, vocabulary = tuple(map(str, range(classes))), 0 if channels else 10
    return make_dataset(name, "image" if channels else "text", x, y, names, vocabulary, groups=groups)


def data_settings(paper_item: Item) -> dict[tuple[str, ...], DataSettings]:
    """Return the data settings that a table or figure uses with one seed, by paper, name, scale, column and row."""
    small = paper_item.content.get("small", {})
    content = {**paper_item.content, "seeds": [0], **({"small": {**small, "seeds": [0]}} if small else {})}
    by_cell: dict[tuple[str, ...], DataSettings] = {}
    configs = set()
    for scale in paper_item.scales:
        for cell in replace(paper_item, content=content).plan(scale, folder=Path("nowhere")).cells:
            config = frozenset((key, value) for key, value in cell.config.items() if key in KEYS)
            if config not in configs:
                configs.add(config)
                name = (paper_item.paper, paper_item.name, scale, cell.variant, cell.row)
                by_cell[name] = read_settings(cell.config).data
    return by_cell


@cache
def fewest(data: DataSettings) -> tuple[int, int] | str:
    """Return the smallest training and test set of a client, or the reason why the partition fails."""
    try:
        part = partition(_subset(synthetic(data.dataset), data, 0), data, 0)
    except (SettingsError, DataError) as error:
        return str(error)
    assert len(part.train) == len(part.test) == data.num_clients
    return min(map(len, part.train)), min(map(len, part.test))


@pytest.mark.slow
@pytest.mark.parametrize("paper", papers())
def test_every_client_of_the_papers_has_training_and_test_samples(paper: str) -> None:
    cells: dict[DataSettings, list[tuple[str, ...]]] = {}
    for paper_item in items(paper):
        for cell, data in data_settings(paper_item).items() if paper_item.has_runs or paper_item.counts_classes else ():
            check_shift(data.shift, data.num_clients, 3)
            assert data.train_samples == 0 or data.train_samples >= 50
            cells.setdefault(replace(data, **UNCHANGED), []).append(cell)
    assert cells
    failures = {}
    for data, data_cells in cells.items():
        smallest = fewest(data)
        least = 1 if SMALLEST_CLIENTS in [cell[:4] for cell in data_cells] else 2
        if isinstance(smallest, str) or smallest[0] < least or smallest[1] < 1:
            failures[data_cells[0]] = smallest
    assert failures == {}
