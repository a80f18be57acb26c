"""Partitions: the clients' samples, the split into train and test, and refused settings."""

import dataclasses
import json
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from PIL import Image

from posy.data import assign
from posy.data.dataset import make_dataset
from posy.data.datasets import load_dataset
from posy.data.errors import DataError
from posy.data.partitions import partition
from posy.data.settings import DataSettings
from posy.settings import SettingsError


def dataset(per_class, num_classes, groups=None):
    """Return a data set with ``per_class`` samples of each class in random order."""
    y = np.random.default_rng(0).permutation(np.repeat(np.arange(num_classes), per_class))
    x = np.arange(len(y), dtype=np.float32)[:, None]
    names = tuple(str(c) for c in range(num_classes))
    return make_dataset("made", "features", x, y.astype(np.int64), names, groups=groups)


def settings(**changes):
    return DataSettings(**changes)


def samples_of(part):
    return np.concatenate([*part.train, *part.test])


KINDS = {
    "dirichlet": settings(num_clients=6, dirichlet_alpha=0.5),
    "iid": settings(num_clients=7, partition="iid"),
    "classes": settings(num_clients=6, partition="classes", classes_per_client=2),
    "pathological": settings(num_clients=10, partition="pathological", classes_per_client=2),
    "shards": settings(num_clients=5, partition="shards", shards_per_client=4),
    "natural": settings(num_clients=4, partition="natural"),
    "equal classes": settings(num_clients=6, partition="classes", classes_per_client=2, samples_per_client=21),
    "equal iid": settings(num_clients=6, partition="iid", samples_per_client=21),
}


@pytest.mark.parametrize("kind", KINDS)
def test_invariants_of_every_partition(kind):
    data = dataset(60, 5, groups=np.arange(300) % 4)
    part = partition(data, KINDS[kind], seed=1)
    assert len(part.train) == len(part.test) == KINDS[kind].num_clients
    everything = samples_of(part)
    assert len(np.unique(everything)) == len(everything)  # no sample occurs twice
    assert everything.min() >= 0
    assert everything.max() < len(data)
    for train, test in zip(part.train, part.test, strict=True):
        assert len(train) >= 1
        assert len(test) >= 1
        assert train.dtype == test.dtype == np.int64
        assert (np.diff(train) > 0).all()
        assert abs(len(test) - 0.25 * (len(train) + len(test))) <= 0.5
    if "equal" not in kind:
        assert len(everything) == len(data)
    counts = part.counts(data.y, 5)
    assert counts.shape == (KINDS[kind].num_clients, 5)
    assert counts.sum() == len(everything)
    first = np.concatenate([part.train[0], part.test[0]])
    assert counts[0].tolist() == [(data.y[first] == label).sum() for label in range(5)]


@pytest.mark.parametrize("kind", KINDS)
def test_the_seed_determines_the_partition(kind):
    data = dataset(60, 5, groups=np.arange(300) % 4)
    first, again, second = (partition(data, KINDS[kind], seed) for seed in (1, 1, 2))
    for a, b in zip(first.train + first.test, again.train + again.test, strict=True):
        assert np.array_equal(a, b)
    assert any(not np.array_equal(a, b) for a, b in zip(first.train, second.train, strict=True))


@hypothesis_settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 9), min_size=2, max_size=5),
    clients=st.integers(1, 12),
    fraction=st.floats(0.01, 0.9),
    seed=st.integers(0, 99),
)
def test_small_iid_partitions_contain_each_sample_once(sizes, clients, fraction, seed):
    data = dataset(1, len(sizes))
    y = np.repeat(np.arange(len(sizes)), sizes)
    data = dataclasses.replace(data, x=np.zeros((len(y), 1), np.float32), y=y)
    s = settings(num_clients=clients, partition="iid", test_fraction=fraction)
    if clients > len(y):
        with pytest.raises(SettingsError, match=f"num-clients = {clients}: made has {len(y)} samples"):
            partition(data, s, seed)
        return
    part = partition(data, s, seed)
    assert sorted(samples_of(part).tolist()) == list(range(len(y)))
    for train, test in zip(part.train, part.test, strict=True):
        total = len(train) + len(test)
        assert len(train) >= 1
        assert len(test) == (0 if total == 1 else min(max(round(total * fraction), 1), total - 1))


def test_dirichlet_concentration():
    data = dataset(500, 4)
    even = partition(data, settings(num_clients=4, dirichlet_alpha=1e5), 0).counts(data.y, 4)
    assert abs(even - 125).max() <= 3
    skewed = partition(data, settings(num_clients=4, dirichlet_alpha=0.05), 0).counts(data.y, 4)
    assert (skewed.max(0) > 400).sum() >= 2
    assert skewed.sum(1).min() >= 10


def test_balanced_dirichlet_skips_clients_that_have_their_share():
    """A client may exceed its M-th part with one class, and then gets no sample of the following classes."""
    data, sizes = dataset(600, 10), {}
    for balanced in (False, True):
        drawn = settings(num_clients=20, dirichlet_alpha=0.1, dirichlet_balanced=balanced)
        parts = [partition(data, drawn, seed).counts(data.y, 10) for seed in range(10)]
        sizes[balanced] = np.mean([counts.sum(1).max() for counts in parts]) / len(data.y)
        before = [counts.cumsum(1) - counts for counts in parts]
        # The last client gets the samples of a class that rounding leaves.
        more = [counts[samples > len(data.y) / 20].max() for counts, samples in zip(parts, before, strict=True)]
        assert bool(max(more) <= 1) is balanced
    assert sizes[True] < 0.13 < sizes[False]


@pytest.mark.parametrize(
    ("balanced", "expected"),
    [
        (False, [[24, 4, 2, 2], [24, 4, 2, 2], [16, 8, 4, 4], [16, 12, 2, 2], [8, 8, 4, 12]]),
        # An M-th part is 40: client 0 has 48 after the second class, and client 1 after the fourth. Of the third class
        # the others have 2/4, 1/4, 1/4, of the fourth 6/8, 1/8, 1/8, and of the fifth clients 2 and 3 have 1/4 and 3/4.
        (True, [[24, 4, 2, 2], [24, 4, 2, 2], [0, 16, 8, 8], [0, 24, 4, 4], [0, 0, 8, 24]]),
    ],
)
def test_dirichlet_shares_by_hand(monkeypatch, balanced, expected):
    """Five classes of 32 samples on four clients, with fixed shares instead of random shares."""
    shares = [
        [24 / 32, 4 / 32, 2 / 32, 2 / 32],
        [24 / 32, 4 / 32, 2 / 32, 2 / 32],
        [16 / 32, 8 / 32, 4 / 32, 4 / 32],
        [16 / 32, 12 / 32, 2 / 32, 2 / 32],
        [8 / 32, 8 / 32, 4 / 32, 12 / 32],
    ]

    class FixedShares(assign.DirichletPartitioner):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            drawn = iter(shares)
            self._rng = SimpleNamespace(dirichlet=lambda alpha: np.array(next(drawn)))

    monkeypatch.setattr(assign, "DirichletPartitioner", FixedShares)
    data = dataset(32, 5)
    counts = partition(data, settings(num_clients=4, dirichlet_balanced=balanced), 0).counts(data.y, 5)
    assert counts.T.tolist() == expected


def test_balanced_dirichlet_with_a_tiny_alpha_contains_each_sample_once():
    for seed in range(20):
        part = partition(dataset(40, 4), settings(num_clients=4, dirichlet_alpha=0.005, dirichlet_balanced=True), seed)
        assert sorted(samples_of(part).tolist()) == list(range(160))


def test_an_impossible_dirichlet_draw_is_an_error(monkeypatch):
    monkeypatch.setattr("posy.data.assign._DRAWS", 50)
    with pytest.raises(SettingsError, match=r"dirichlet-alpha = 0\.001 with num-clients = 10"):
        partition(dataset(10, 2), settings(num_clients=10, dirichlet_alpha=0.001), 0)


def test_dirichlet_lowers_the_client_minimum_for_small_data():
    part = partition(dataset(20, 2), settings(num_clients=10, dirichlet_alpha=5.0), 0)
    assert min(len(t) + len(v) for t, v in zip(part.train, part.test, strict=True)) >= 2


def test_clients_have_exactly_their_classes_and_share_them_evenly():
    data = dataset(60, 5)
    counts = partition(data, KINDS["classes"], 0).counts(data.y, 5)
    assert ((counts > 0).sum(1) == 2).all()
    assert counts.sum(0).tolist() == [60] * 5
    for column in counts.T:  # the clients that have a class share it evenly
        sizes = column[column > 0]
        assert sizes.max() - sizes.min() <= 1


def test_pathological_clients_share_their_classes_unevenly():
    """10 clients with 2 of 5 classes: classes 0 and 1 go to clients 0 to 3, and so on. An even share is 25 of 100."""
    data = dataset(100, 5)
    counts = partition(data, KINDS["pathological"], 0).counts(data.y, 5)
    holders = [np.flatnonzero(column).tolist() for column in counts.T]
    assert holders == [[0, 1, 2, 3], [0, 1, 2, 3], [4, 5, 6, 7], [4, 5, 6, 7], [8, 9]]
    assert counts.sum(0).tolist() == [100] * 5
    drawn = [counts[client, label] for label, clients in enumerate(holders) for client in clients[:-1]]
    even = [100 / len(clients) for clients in holders for _ in clients[:-1]]
    shares = np.array(drawn) / even
    assert shares.min() >= 0.08 and shares.max() < 1  # the smallest share is 2 of 25
    assert shares.std() > 0.1
    # The last client gets the remaining samples.
    assert all(counts[clients[-1], label] > 100 / len(clients) for label, clients in enumerate(holders))


def test_a_class_without_clients_is_an_error():
    with pytest.raises(SettingsError, match="60 samples of class 4 in made among 0 clients"):
        partition(dataset(60, 5), settings(num_clients=6, partition="pathological", classes_per_client=2), 0)


def test_clients_have_disjoint_classes_if_there_are_enough():
    """CIFAR-100 with two classes on each of ten clients (FedFew, Table 1): 80 classes remain."""
    data = dataset(600, 12)
    counts = partition(data, settings(num_clients=3, partition="pathological", classes_per_client=2), 0).counts(
        data.y, 12
    )
    expected = np.zeros((3, 12), int)
    expected[[0, 0, 1, 1, 2, 2], range(6)] = 600
    assert counts.tolist() == expected.tolist()


def test_every_client_can_have_all_classes():
    data = dataset(60, 5)
    counts = partition(data, settings(num_clients=6, partition="classes", classes_per_client=5), 0).counts(data.y, 5)
    assert (counts == 10).all()


def test_equal_classes_as_in_ppfe():
    """100 clients, S = 2 of 10 classes, 150 training samples and 50 test samples."""
    data = dataset(2000, 10)
    s = settings(num_clients=100, partition="classes", classes_per_client=2, samples_per_client=150)
    part = partition(data, s, 0)
    assert {len(train) for train in part.train} == {150}
    assert {len(test) for test in part.test} == {50}
    everything = samples_of(part)
    assert len(np.unique(everything)) == len(everything) == 20_000
    for train, test in zip(part.train, part.test, strict=True):
        assert sorted(np.bincount(data.y[train], minlength=10).tolist()) == [0] * 8 + [75, 75]
        assert sorted(np.bincount(data.y[test], minlength=10).tolist()) == [0] * 8 + [25, 25]
        assert set(data.y[test]) == set(data.y[train])
    counts = part.counts(data.y, 10)
    assert ((counts > 0).sum(0) == 20).all()  # every class on the same number of clients
    assert len({tuple(row > 0) for row in counts}) > 10  # in many combinations


def test_equal_classes_check_the_available_samples():
    """CIFAR-100 with 5 classes a client: 5 clients a class, 107 each of 600."""
    s = settings(num_clients=10, partition="classes", classes_per_client=5, samples_per_client=40)
    # 40 and 13 of 5 classes: 8 + 3 or 8 + 2 a class and client, at most 5 * 11 = 55
    part = partition(dataset(55, 10), s, 0)
    assert {len(train) for train in part.train} == {40}
    assert {len(test) for test in part.test} == {13}
    with pytest.raises(SettingsError, match="samples-per-client = 40"):
        partition(dataset(45, 10), s, 0)
    with pytest.raises(SettingsError, match=r"samples-per-client = 4 .*classes-per-client = 5"):
        partition(dataset(45, 10), dataclasses.replace(s, samples_per_client=4), 0)


def test_equal_iid_clients_have_equal_sizes():
    data = dataset(60, 5)
    s = settings(num_clients=10, partition="iid", samples_per_client=20, test_fraction=0.2)
    part = partition(data, s, 0)
    assert {len(train) for train in part.train} == {20}
    assert {len(test) for test in part.test} == {5}
    with pytest.raises(SettingsError, match="needs 375 samples"):
        partition(data, dataclasses.replace(s, num_clients=15), 0)


def test_shards_have_equal_sizes_and_one_class_each():
    """As in FedDRM, 8 clients have 5 shards each. Here, 10 classes of 60 samples give 40 shards of 15."""
    data = dataset(60, 10)
    counts = partition(data, settings(num_clients=8, partition="shards", shards_per_client=5), 3).counts(data.y, 10)
    assert (counts.sum(1) == 75).all()
    assert (counts % 15 == 0).all()
    assert ((counts > 0).sum(1) <= 5).all()
    assert counts.sum(0).tolist() == [60] * 10


def test_samples_within_shards_are_drawn_at_random():
    data = dataset(60, 2)
    parts = [partition(data, settings(num_clients=4, partition="shards", shards_per_client=1), seed) for seed in (1, 2)]
    blocks = [{tuple(np.sort(np.concatenate(p))) for p in zip(q.train, q.test, strict=True)} for q in parts]
    assert not blocks[0] & blocks[1]


def test_natural_partition_takes_the_largest_groups():
    groups = np.repeat([7, 2, 9, 4], [10, 40, 20, 30])
    data = dataset(25, 4, groups=groups)
    part = partition(data, settings(num_clients=3, partition="natural"), 0)
    client_groups = [set(groups[np.concatenate(pair)]) for pair in zip(part.train, part.test, strict=True)]
    assert client_groups == [{2}, {4}, {9}]
    assert [len(t) + len(v) for t, v in zip(part.train, part.test, strict=True)] == [40, 30, 20]
    with pytest.raises(SettingsError, match="num-clients = 5"):
        partition(data, settings(num_clients=5, partition="natural"), 0)
    with pytest.raises(SettingsError, match=r"'natural' needs data with groups.*group-column"):
        partition(dataset(25, 4), settings(num_clients=3, partition="natural"), 0)


@pytest.mark.parametrize(
    ("form", "num_clients", "names"),
    [
        *((form, 3, ("group 2", "group 7", "group 10")) for form in ("csv", "parquet", "npz", "npy", "png")),
        ("csv", 2, ("group 7", "group 10")),  # the largest groups, in the order of their ids
    ],
)
@pytest.mark.parametrize("kind", [int, str])
def test_clients_are_numbered_by_the_ids_of_their_groups(kind, form, num_clients, names, tmp_path):
    ids, path = np.repeat([2, 10, 7], [4, 8, 6]).astype(kind), tmp_path / f"a.{form}"
    labels, extra = np.arange(18) % 2, {"group_column": "group"} if form == "png" else {}
    frame = pd.DataFrame({"x": np.arange(18.0), "group": ids, "label": labels + 9})
    if form == "npz":
        np.savez(path, x_train=frame[["x"]], y_train=frame["label"], groups_train=ids)
    elif form == "npy":
        path.mkdir()
        for name, array in {"x": frame[["x"]].to_numpy(), "y": labels + 9, "groups": ids}.items():
            np.save(path / f"{name}.npy", array)
    elif form == "png":
        for number, label in enumerate(labels + 9):
            (path / str(label)).mkdir(parents=True, exist_ok=True)
            Image.new("L", (4, 4)).save(path / str(label) / f"{number}.png")
        rows = [f"{label}/{number}.png,{ids[number]}" for number, label in enumerate(labels + 9)]
        (path / "metadata.csv").write_text("\n".join(["file_name,group", *rows]), encoding="utf-8")
    else:
        frame.to_csv(path, index=False) if form == "csv" else frame.to_parquet(path)
    s = settings(dataset=str(path), num_clients=num_clients, partition="natural", **extra)
    data = load_dataset(s, tmp_path, 0)
    assert data.task.class_names == ("9", "10") and partition(data, s, 0).names == names


def test_patients_and_groups_of_decimals_are_named_in_the_error(tmp_path):
    frame = pd.DataFrame({"x": np.arange(4.0), "ward": [1.5, 2, 10, 3], "label": [0, 1, 0, 1]})
    frame.to_parquet(tmp_path / "a.parquet")
    for key, role in (("group_column", "group"), ("split_column", "patient")):
        with pytest.raises(DataError, match=f"column ward: {role} 1.5 at index 0; whole numbers and strings"):
            load_dataset(settings(dataset=str(tmp_path / "a.parquet"), **{key: "ward"}), tmp_path, 0)


def test_train_samples_caps_training_only():
    data = dataset(60, 5)
    free = partition(data, settings(num_clients=4, partition="iid"), 0)
    capped = partition(data, settings(num_clients=4, partition="iid", train_samples=50), 0)
    for a, b, c, d in zip(free.train, capped.train, free.test, capped.test, strict=True):
        assert len(a) == 56
        assert len(b) == 50
        assert set(b) < set(a)
        assert np.array_equal(c, d)


# Partition files


def from_file(tmp_path, content, clients=2, data=None, **changes):
    path = tmp_path / "partition.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    s = settings(num_clients=clients, partition="file", partition_file=str(path), **changes)
    return partition(data or dataset(5, 2), s, 0)


def test_lists_in_a_partition_file_are_split(tmp_path):
    part = from_file(tmp_path, [[0, 1, 2, 3], [4, 9]])
    assert [sorted(np.concatenate(p).tolist()) for p in zip(part.train, part.test, strict=True)] == [
        [0, 1, 2, 3],
        [4, 9],
    ]
    assert [len(test) for test in part.test] == [1, 1]


def test_train_and_test_lists_in_a_partition_file_are_used_directly(tmp_path):
    part = from_file(tmp_path, {"train": [[3, 1], [2]], "test": [[0], []]})
    assert [t.tolist() for t in part.train] == [[1, 3], [2]]
    assert [t.tolist() for t in part.test] == [[0], []]


def test_a_warning_counts_samples_in_one_clients_training_and_anothers_test(tmp_path, warnings):
    from_file(tmp_path, {"train": [[3, 1, 5], [2, 1]], "test": [[0, 6], [6]]})
    assert not warnings.records
    part = from_file(tmp_path, {"train": [[3, 1, 5], [2]], "test": [[2], [3, 1]]})
    assert [t.tolist() for t in part.test] == [[2], [1, 3]]
    assert "partition.json: 3 samples" in warnings.text


@pytest.mark.parametrize(
    ("content", "error", "message"),
    [
        ("{", DataError, "not readable JSON"),
        pytest.param("[" * 100_000, DataError, "not readable JSON", id="deep"),
        ({"train": [[0], [1]]}, DataError, "allowed: a list"),
        ([0, 1], DataError, "client 0: 0 is not a list"),
        ([[0], [10]], DataError, "client 1: 10 at position 0; .*0 to 9"),
        ([[0], [-1]], DataError, "client 1: -1"),
        ([[0], [1.0]], DataError, "client 1: 1.0"),
        ([[0], [True]], DataError, "client 1: True"),
        ([[0, 0], [1]], DataError, "client 0 lists sample 0 twice"),
        ({"train": [[0], [1]], "test": [[2], [1]]}, DataError, "client 1 lists sample 1 twice"),
        ({"train": [[], [1]], "test": [[2], [3]]}, DataError, "client 0 has no training sample"),
        ([[0], []], DataError, "client 1 has no training sample"),
        ([[0]], SettingsError, "num-clients = 2: .* lists 1 clients"),
        ({"train": [[0], [1]], "test": [[2]]}, SettingsError, "lists 1 clients"),
    ],
)
def test_invalid_partition_files_are_refused(tmp_path, content, error, message):
    with pytest.raises(error, match=message):
        from_file(tmp_path, content)


def test_a_partition_file_must_exist(tmp_path):
    for name in ("", str(tmp_path / "none.json")):
        with pytest.raises(SettingsError, match="partition-file"):
            partition(dataset(5, 2), settings(partition="file", partition_file=name), 0)


# Data that comes partitioned


def test_supplied_partitions_are_used_and_others_refused():
    pairs = ((np.array([4, 0]), np.array([1])), (np.array([2]), np.array([3])))
    data = dataclasses.replace(dataset(5, 2), given=pairs)
    for kind in ("dirichlet", "given"):
        part = partition(data, settings(num_clients=2, partition=kind), 0)
        assert [t.tolist() for t in part.train] == [[0, 4], [2]]
        assert [t.tolist() for t in part.test] == [[1], [3]]
    capped = partition(data, settings(num_clients=2, train_samples=1), 0)
    assert [len(t) for t in capped.train] == [1, 1]
    with pytest.raises(SettingsError, match="partition = 'iid'"):
        partition(data, settings(num_clients=2, partition="iid"), 0)
    with pytest.raises(SettingsError, match="num-clients = 10"):
        partition(data, settings(), 0)
    with pytest.raises(SettingsError, match="partition = 'given' needs partitioned data"):
        partition(dataset(5, 2), settings(partition="given"), 0)


# Settings that do not fit the data


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_clients": 11}, "num-clients = 11: made has 10 samples"),
        ({"partition": "classes", "classes_per_client": 3}, "classes-per-client = 3: made has 2 classes; .* 1 to 2"),
        ({"partition": "classes", "num_clients": 6}, "classes-per-client = 2 with num-clients = 6 .* made"),
        ({"partition": "shards", "num_clients": 6}, "shards-per-client = 2 with num-clients = 6 .*12"),
        ({"num_clients": 2, "samples_per_client": 3}, "samples-per-client = 3 .*'classes' or 'iid'"),
        ({"num_clients": 2, "shift": "high"}, "shift = 'high' needs RGB images"),
        (
            {"num_clients": 2, "augment": "crop"},
            "augment = 'crop' needs images.* 'features'",
        ),
    ],
)
def test_settings_that_do_not_fit_the_data_are_refused(changes, message):
    with pytest.raises(SettingsError, match=message):
        partition(dataset(5, 2), settings(**changes), 0)


def test_more_clients_than_shifts_are_refused_before_the_partition():
    data = make_dataset("rgb", "image", np.zeros((40, 2, 2, 3), np.uint8), np.arange(40) % 2, ("a", "b"))
    with pytest.raises(SettingsError, match="num-clients = 9"):
        partition(data, settings(num_clients=9, partition="iid", shift="mid"), 0)
