"""What the papers' tables and figures ask for can be shared out, also of data sets that are not here."""

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
"""Classes, samples of each (of MNIST on average) and channels; a text has none."""
CENTRES = (12_413, 3954, 3363, 2259, 819, 439)
"""Images of FedISIC's centres, as FLamby tells them."""
ONE_FOR_TRAINING = ("cwfedavg", "figure4", "full", "CIFAR-10, alpha 0.01")
"""Where hardly a draw gives each of 20 clients any of ten classes: two samples are enough, one of them for the test."""
CHANGES = ("shift", "augment", "transforms", "image_size", "text_length", "vocabulary", "train_samples")
"""What is done to samples once they are shared out; no table leaves clients fewer than 50 for training."""
AS_THEY_ARE = {name: getattr(DataSettings, name) for name in CHANGES}
KEYS = as_config(DataSettings()).keys()


@cache
def made_up(name: str) -> Dataset:
    """Return made-up samples with the classes and groups of a data set, as many as were published."""
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
            # Of the users with eight test samples or more the first has 549 tweets; how they go on is made up.
            "sent140": (2, 0, np.geomspace(549, 31, 1000).astype(int)),
        }[name]
        groups = np.repeat(np.arange(len(sizes)), sizes)
        y = rng.integers(0, classes, len(groups))
    x = np.zeros((len(y), 1, 1, channels), np.uint8) if channels else np.ones((len(y), 1), np.int64)
    names, vocabulary = tuple(map(str, range(classes))), 0 if channels else 10
    return make_dataset(name, "image" if channels else "text", x, y, names, vocabulary, groups=groups)


def asked_for(one: Item) -> dict[tuple[str, ...], DataSettings]:
    """Return the settings of the data that a table or figure runs on or counts, by scale and column, for one seed."""
    small = one.content.get("small", {})
    content = {**one.content, "seeds": [0], **({"small": {**small, "seeds": [0]}} if small else {})}
    found: dict[tuple[str, ...], DataSettings] = {}
    seen = set()
    for scale in one.scales:
        for cell in replace(one, content=content).plan(scale, folder=Path("nowhere")).cells:
            given = frozenset((key, value) for key, value in cell.config.items() if key in KEYS)
            if given not in seen:
                seen.add(given)
                found[one.paper, one.name, scale, cell.variant, cell.row] = read_settings(cell.config).data
    return found


@cache
def fewest(data: DataSettings) -> tuple[int, int] | str:
    """Return the fewest samples for training and for the test that a client has, or why there is no partition."""
    try:
        part = partition(_subset(made_up(data.dataset), data, 0), data, 0)
    except (SettingsError, DataError) as error:
        return str(error)
    assert len(part.train) == len(part.test) == data.num_clients
    return min(map(len, part.train)), min(map(len, part.test))


@pytest.mark.parametrize("paper", papers())
def test_every_client_of_the_papers_has_training_and_test_samples(paper: str) -> None:
    places: dict[DataSettings, list[tuple[str, ...]]] = {}
    for one in items(paper):
        for place, data in asked_for(one).items() if one.has_runs or one.counts_classes else ():
            check_shift(data.shift, data.num_clients, 3)
            assert data.train_samples == 0 or data.train_samples >= 50
            places.setdefault(replace(data, **AS_THEY_ARE), []).append(place)
    assert places
    wrong = {}
    for data, of_these in places.items():
        found = fewest(data)
        least = 1 if ONE_FOR_TRAINING in [place[:4] for place in of_these] else 2
        if isinstance(found, str) or found[0] < least or found[1] < 1:
            wrong[of_these[0]] = found
    assert wrong == {}
