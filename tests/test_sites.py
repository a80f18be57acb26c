"""Sites with local data: the task that they agree on, the data that they refuse, and complete runs."""

import json
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from nodes import POLICY, NodeGrid, class_folders, pfllib, table

import posy
from posy.client_app.site import skips
from posy.client_app.workspace import Workspace
from posy.data.agreement import Description, is_complete, site_notices, task_of, unlike_features, with_statistics
from posy.data.agreement import agreed as agree_with_warnings
from posy.data.dataset import Dataset
from posy.data.datasets import load_dataset
from posy.data.errors import DataError, Note, shared_notes
from posy.data.partitions import Partition
from posy.data.policy import Policy
from posy.data.settings import DataSettings
from posy.data.sites import describe_site, fingerprint, load_site, read_site
from posy.data.text import hashed
from posy.server_app.app import run
from posy.server_app.recorder import Recorder
from posy.settings import SettingsError
from posy.storage import load_arrays
from posy.strategies.server_state import state_of

Config = dict[str, Any]
IMAGES = DataSettings(dataset="sites", sample_kind="image", input_shape="1x4x4", classes="a,b,c")
FEATURES = DataSettings(
    dataset="sites",
    sample_kind="features",
    input_shape="3",
    classes="0,1,2",
    feature_mean="1.0,2.0,3.0",
    feature_std="2.0",
)
TEXTS = DataSettings(dataset="sites", sample_kind="text", input_shape="4", classes="no,yes", vocabulary=50)


def write_npz(path: Path, x: Any, y: Any, **more: Any) -> Path:
    np.savez(path, x_train=np.asarray(x), y_train=np.asarray(y), **more)
    return path


def grey(n: int, side: int = 4) -> np.ndarray:
    return np.arange(n * side * side, dtype=np.uint8).reshape(n, side, side)


# -- training data of a site -----------------------------------------------------------------------------


def load(path: Path, settings: DataSettings, policy: Policy = POLICY) -> tuple[Dataset, Partition]:
    return load_site(read_site(path, settings, policy), settings, policy)


def test_folders_and_npz_give_the_same_samples(tmp_path: Path) -> None:
    x, names = grey(8), list("aabbbcca")
    folder, _ = load(class_folders(tmp_path / "site", x, names), IMAGES)
    file, _ = load(write_npz(tmp_path / "site.npz", x, names), IMAGES)
    assert folder.task == file.task == task_of(IMAGES)
    assert folder.task.class_names == ("a", "b", "c")
    assert folder.mean.tolist() == folder.std.tolist() == [0.5]
    assert file.y.tolist() == [0, 0, 1, 1, 1, 2, 2, 0]
    assert {(a.tobytes(), b) for a, b in zip(folder.x, folder.y.tolist(), strict=True)} == {
        (a.tobytes(), b) for a, b in zip(file.x, file.y.tolist(), strict=True)
    }


def test_image_files_are_resized_to_the_runs_shape(tmp_path: Path) -> None:
    folder = class_folders(tmp_path, grey(4, side=10), "abab")
    dataset, _ = load(folder, replace(IMAGES, input_shape="3x6x6"))
    assert dataset.x.shape == (4, 6, 6, 3)


def test_sites_may_lack_classes(tmp_path: Path) -> None:
    single, part = load(write_npz(tmp_path / "one.npz", grey(8), ["c"] * 8), IMAGES)
    assert single.y.tolist() == [2] * 8
    assert single.task.num_classes == 3
    assert part.counts(single.y, 3).tolist() == [[0, 0, 8]]
    folder, _ = load(class_folders(tmp_path / "site", grey(3), "bbb"), IMAGES)
    assert folder.y.tolist() == [1] * 3


def test_a_sites_test_rows_depend_only_on_its_data_and_policy(tmp_path: Path) -> None:
    path = write_npz(tmp_path / "site.npz", grey(8), list("abababab"))
    _, first = load(path, IMAGES)
    assert [len(first.train[0]), len(first.test[0])] == [6, 2]
    assert sorted([*first.train[0], *first.test[0]]) == list(range(8))
    assert load(path, replace(IMAGES, test_fraction=0.9, test_set="pooled"))[1].test[0].tolist() == [*first.test[0]]
    _, half = load(path, IMAGES, replace(POLICY, test_fraction=0.5))
    assert [len(half.train[0]), len(half.test[0])] == [4, 4]
    other_paths = [
        write_npz(tmp_path / f"{step}.npz", grey(8) + np.uint8(step), list("abababab")) for step in range(1, 6)
    ]
    assert any(load(other, IMAGES)[1].test[0].tolist() != first.test[0].tolist() for other in other_paths)


def test_splits_below_min_rows_are_empty(tmp_path: Path) -> None:
    path, strict = write_npz(tmp_path / "site.npz", grey(40), list("ab") * 20), replace(POLICY, min_rows=9)
    settings = replace(IMAGES, validation_fraction=0.2)
    dataset, part = load(path, settings, strict)
    # The validation rows stay in training.
    assert [len(rows[0]) for rows in (part.train, part.test, part.validation)] == [30, 10, 0]
    (note,) = [note for note in dataset.notes if "min-rows" in note]
    assert "fewer than 9 validation rows (min-rows)" in note
    with pytest.raises(DataError, match=r"30 rows for training.*min-rows = 31") as caught:
        load(path, replace(IMAGES, validation_fraction=0.2), replace(POLICY, min_rows=31))
    assert caught.value.code == "too-few-rows"


def test_a_supplied_test_set_is_used(tmp_path: Path) -> None:
    x = grey(7)
    _, part = load(
        write_npz(tmp_path / "s.npz", x[:5], list("abcab"), x_test=x[5:], y_test=np.array(list("ca"))), IMAGES
    )
    assert part.train[0].tolist() == [0, 1, 2, 3, 4]
    assert part.test[0].tolist() == [5, 6]
    class_folders(tmp_path / "site" / "train", x[:5], "abcab")
    class_folders(tmp_path / "site" / "test", x[5:], "ca")
    folder, part = load(tmp_path / "site", IMAGES)
    test_images = {folder.x[i].tobytes() for i in part.test[0]}
    assert test_images == {x[5].tobytes(), x[6].tobytes()}
    (tmp_path / "site" / "test").rename(tmp_path / "site" / "val")
    folder, part = load(tmp_path / "site", IMAGES)
    assert {folder.x[i].tobytes() for i in part.test[0]} == test_images
    features = np.arange(21, dtype=np.float32).reshape(7, 3)
    data, part = load(pfllib(tmp_path / "p", features, np.arange(7) % 3, 2), FEATURES)
    assert data.x[part.test[0]].tolist() == features[5:].tolist()


def test_features_are_scaled_by_the_runs_statistics(tmp_path: Path) -> None:
    x, y = np.arange(12, dtype=np.float32).reshape(4, 3), [0, 1, 2, 1]
    for path in (write_npz(tmp_path / "s.npz", x, y), table(tmp_path / "s.csv", x, y), pfllib(tmp_path / "p", x, y, 1)):
        dataset, _ = load(path, FEATURES)
        assert dataset.mean.tolist() == [1.0, 2.0, 3.0]
        assert dataset.std.tolist() == [2.0, 2.0, 2.0]
        assert dataset.x.tolist() == x.tolist()


def test_words_are_hashed_alike_at_all_sites(tmp_path: Path) -> None:
    (tmp_path / "s.csv").write_text("text,label\nThe cat sat on mats,yes\nthe DOG,no\n!!,no\n")
    dataset, _ = load(tmp_path / "s.csv", TEXTS)
    assert dataset.task.vocabulary == 50
    assert dataset.y.tolist() == [1, 0, 0]
    rows = dataset.x.tolist()
    assert rows[0][0] == rows[1][0]  # "the"
    assert rows[2] == [1, 0, 0, 0]
    assert rows[1][2:] == [0, 0]
    assert all(2 <= token < 50 for token in rows[0])
    assert rows[0] == hashed(["the cat sat on"], 4, 50)[0].tolist()
    assert hashed(["123456789"], 1, 50).tolist() == [[2 + 0xCBF43926 % 48]]  # the check value of CRC-32


# -- data that a site refuses ----------------------------------------------------------------------------


def broken_cases() -> dict[str, tuple[Callable[[Path], Path], DataSettings, str]]:
    nan = np.arange(12, dtype=np.float64).reshape(4, 3)
    nan[2, 1] = np.nan
    inf = grey(4).astype(np.float32)
    inf[1, 0, 3] = np.inf

    def truncated(root: Path) -> Path:
        path = write_npz(
            root / "s.npz", np.random.default_rng(0).integers(0, 255, (40, 4, 4), np.uint8), ["a", "b"] * 20
        )
        os.truncate(path, path.stat().st_size // 2)
        return path

    def damaged(root: Path) -> Path:
        path = write_npz(root / "s.npz", grey(40), ["a", "b"] * 20)
        content = bytearray(path.read_bytes())
        content[400] ^= 0xFF
        path.write_bytes(content)
        return path

    def empty_class(root: Path) -> Path:
        class_folders(root, grey(2), "ab")
        (root / "c").mkdir()
        return root

    def torn_image(root: Path) -> Path:
        class_folders(root, grey(2), "ab")
        (root / "a" / "torn.png").write_bytes((root / "a" / "0.png").read_bytes()[:40])
        return root

    def only_test(root: Path) -> Path:
        pfllib(root, np.ones((3, 3), np.float32), np.arange(3), 3)
        return root

    def words(text: str) -> Callable[[Path], Path]:
        def write(root: Path) -> Path:
            (root / "s.csv").write_text(text)
            return root / "s.csv"

        return write

    def plain(root: Path) -> Path:
        (root / "s.txt").write_text("hello")
        return root / "s.txt"

    float_images = replace(IMAGES, sample_kind="image-float")
    return {
        "NaN in features": (
            lambda r: write_npz(r / "s.npz", nan, [0, 1, 2, 0]),
            FEATURES,
            r"s\.npz: nan at index \(2, 1\)",
        ),
        "NaN in a table": (lambda r: table(r / "s.csv", nan, [0, 1, 2, 0]), FEATURES, "row 4, column f1: 'nan'"),
        "infinite pixel": (
            lambda r: write_npz(r / "s.npz", inf, list("abca")),
            float_images,
            r"inf at index \(1, 0, 3, 0\)",
        ),
        "empty folder": (lambda r: r, IMAGES, "0 class folders"),
        "empty class": (empty_class, IMAGES, "c: no images"),
        "torn image": (torn_image, IMAGES, r"torn\.png: not an image"),
        "no samples": (lambda r: write_npz(r / "s.npz", grey(0), np.zeros(0, int)), IMAGES, r"s\.npz: no samples"),
        "unknown class": (
            lambda r: write_npz(r / "s.npz", grey(3), list("abz")),
            IMAGES,
            "label 'z' of sample 2 .* a, b, c",
        ),
        "unknown folder": (lambda r: class_folders(r, grey(2), ["a", "new"]), IMAGES, "label 'new' of sample 1"),
        "label out of range": (
            lambda r: write_npz(r / "s.npz", np.ones((3, 3)), [0, 3, 1]),
            FEATURES,
            "label '3' of sample",
        ),
        "label below": (
            lambda r: write_npz(r / "s.npz", np.ones((3, 3)), [0, -1, 1]),
            FEATURES,
            "label '-1' of sample 1",
        ),
        "label of half": (
            lambda r: write_npz(r / "s.npz", np.ones((2, 3)), [0, 0.5]),
            FEATURES,
            "label 0.5 at index 1",
        ),
        "missing label": (words("f0,f1,f2,label\n1,2,3,\n"), FEATURES, "row 2, column label: the label is missing"),
        "other shape": (lambda r: write_npz(r / "s.npz", grey(3, 5), list("abc")), IMAGES, "shape 1x5x5; .* is 1x4x4"),
        "other width": (lambda r: table(r / "s.csv", np.ones((2, 4)), [0, 1]), FEATURES, "shape 4; .* is 3"),
        "other kind": (
            lambda r: write_npz(r / "s.npz", np.ones((3, 3)), list("abc")),
            IMAGES,
            "features samples; .* image",
        ),
        "float pixels": (lambda r: write_npz(r / "s.npz", inf[2:], list("ab")), IMAGES, "image-float samples"),
        "truncated": (truncated, IMAGES, r"s\.npz: not a complete \.npz file"),
        "damaged": (damaged, IMAGES, r"s\.npz: not a complete \.npz file"),
        "missing file": (lambda r: r / "missing.npz", IMAGES, r"missing\.npz: this file or directory does not exist"),
        "relative path": (lambda r: Path("site.npz"), IMAGES, "'site.npz' in the node config: .* absolute"),
        "another format": (plain, IMAGES, r"s\.txt: allowed:"),
        "unequal lengths": (lambda r: write_npz(r / "s.npz", grey(3), list("ab")), IMAGES, "unequal length"),
        "Python objects": (
            lambda r: write_npz(r / "s.npz", np.array([{}, {}], object), list("ab")),
            IMAGES,
            "only plain numbers",
        ),
        "nothing to train on": (only_test, FEATURES, "all samples belong to the test set"),
        "token beyond the vocabulary": (
            lambda r: pfllib(r, np.array([[1, 2, 50, 0]] * 4), np.zeros(4, int), 1),
            replace(TEXTS, sample_kind="tokens", classes="0,1"),
            "token 50; .* allows 0 to 49",
        ),
    }


@pytest.mark.parametrize("case", broken_cases())
def test_unusable_data_is_rejected_with_file_and_reason(case: str, tmp_path: Path) -> None:
    make, settings, message = broken_cases()[case]
    path = make(tmp_path)
    with pytest.raises(DataError, match=message) as caught:
        load(path, settings)
    if case != "relative path":
        assert str(tmp_path) in str(caught.value)


# -- the task that sites agree on ------------------------------------------------------------------------

OPEN = DataSettings(dataset="sites")


def describe(kind: str, shape: tuple[int, ...], *classes: str, fixed: bool = True, count: int = 5) -> Description:
    return Description(kind, shape, fixed, classes, count, np.empty(0), np.empty(0))


def agree(settings: DataSettings, descriptions: list[Description]) -> DataSettings:
    return agree_with_warnings(settings, descriptions, [f"site-{i}" for i in range(len(descriptions))])[0]


def test_classes_are_the_sorted_union_of_all_sites() -> None:
    classes_of_sites = [("10", "2"), ("2", "0"), ("10", "0")]
    numbers = agree(OPEN, [describe("image", (1, 8, 8), *classes) for classes in classes_of_sites])
    assert numbers.classes == "0,2,10"
    texts = agree(
        OPEN, [describe("image", (1, 8, 8), "dog", "a, b", "cat"), describe("image", (1, 8, 8), "dog", "a, b", "cat")]
    )
    assert task_of(texts).class_names == ("a, b", "cat", "dog")
    assert agree(replace(OPEN, classes="x,y"), [describe("image", (1, 8, 8))]).classes == "x,y"
    assert is_complete(numbers)
    assert task_of(numbers).input_shape == (1, 8, 8)


def test_the_shape_is_the_most_common_fixed_shape() -> None:
    folders = [describe("image", (3, 64, 64), "a", "b", "c", fixed=False)] * 3
    assert agree(OPEN, [*folders, describe("image", (3, 32, 32), "b")]).input_shape == "3x32x32"
    assert agree(OPEN, [*folders, describe("features", (4,), "b")]).input_shape == "3x64x64"
    assert agree(replace(OPEN, classes="a,b"), folders).input_shape == "3x64x64"
    mixed = [
        describe("image", (1, 8, 8), "a", "b"),
        describe("image", (1, 9, 9), "q", "r"),
        describe("image", (1, 9, 9), "r", "q"),
    ]
    # Without the other site's classes.
    assert (agree(OPEN, mixed).input_shape, agree(OPEN, mixed).classes) == ("1x9x9", "q,r")
    assert agree(replace(OPEN, input_shape="1x8x8"), mixed).classes == "a,b"


@pytest.mark.parametrize(
    ("settings", "descriptions", "message"),
    [
        (OPEN, [describe("image", (1, 8, 8), "a")], "classes = 'a': expected two"),
        (
            replace(OPEN, sample_kind="text"),
            [describe("image", (1, 8, 8), "a", "b")],
            "sample-kind = 'text' .* no site",
        ),
        (replace(OPEN, input_shape="3x3x3"), [describe("image", (1, 8, 8), "a", "b")], "'3x3x3': no site"),
        (replace(OPEN, classes="a,,b"), [describe("image", (1, 8, 8))], "classes = 'a,,b'"),
        (replace(OPEN, classes="a,a"), [describe("image", (1, 8, 8))], "without duplicates"),
        (replace(OPEN, classes="[1"), [describe("image", (1, 8, 8))], "not a JSON list"),
        (replace(IMAGES, input_shape="8x8"), [describe("image", (1, 8, 8))], "input-shape = '8x8'"),
        (replace(IMAGES, input_shape="2x8x8"), [describe("image", (2, 8, 8))], "1 or 3 channels"),
        (replace(FEATURES, augment="crop"), [describe("features", (3,))], "augment = 'crop' needs images"),
        (replace(FEATURES, feature_std="0"), [describe("features", (3,))], "feature-std = '0': .* above 0"),
        (replace(FEATURES, feature_mean="1,2"), [describe("features", (3,))], "feature-mean = '1,2': .* 3 numbers"),
    ],
)
def test_impossible_tasks_are_rejected(settings: DataSettings, descriptions: list[Description], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        agree(settings, descriptions)


GREY, RGB = (1, 48, 40), (3, 48, 40)


def columns(*names: str) -> Description:
    zeros = np.zeros(len(names))
    return replace(describe("features", (len(names),), "a", "b"), mean=zeros, squares=zeros + 1, columns=names)


@pytest.mark.parametrize(
    ("descriptions", "message"),
    [
        (
            [describe("image", GREY, "a", "b", fixed=False), describe("image", RGB, "a", "b", fixed=False)],
            "no majority: 1x48x40 .site-0.; 3x48x40 .site-1.; set input-shape",
        ),
        (
            [describe("image", GREY, "a", "b", fixed=False)] * 2 + [describe("image", RGB, "a", "b", fixed=False)],
            "site-2 would lose .* set input-shape .3x48x40",
        ),
        ([describe("image", (1, 8, 8), "a"), describe("features", (4,), "b")], "different kinds .* set sample-kind"),
        (
            [columns("age", "dose"), columns("age", "Dose")],
            "columns of site-1 differ .* site-0 .*set feature",
        ),
    ],
)
def test_ambiguous_tasks_must_be_set_by_the_user(descriptions: list[Description], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        agree(OPEN, descriptions)


@pytest.mark.parametrize(
    ("descriptions", "patterns"),
    [
        (
            [describe("image", RGB, "a", "b", fixed=False)] * 2 + [describe("image", GREY, "a", "b", fixed=False)],
            ["site-2: images of shape 1x48x40 .* 3x48x40"],
        ),
        (
            [describe("image", (1, 8, 8), "a", "b")] * 2
            + [describe("image", (1, 9, 9), "a", "b"), describe("features", (4,), "a")],
            [
                "site-3: .* kind features, .* image; the site cannot take part",
                "site-2: .* shape 1x9x9, .* 1x8x8; the site cannot take part",
            ],
        ),
        (
            [describe("image", GREY, "Cat", "dog")] * 2 + [describe("image", GREY, "cat", "dog")] * 2,
            [r"classes .*: 'Cat' \(site-0, site-1\), 'cat' \(site-2, site-3\); .* rename"],
        ),
        (
            [columns("age", "dose")] * 2 + [columns("dose", "age"), columns("age", "weight")],
            [
                r"site-3: .*columns .*\(missing: dose; unknown: weight\); the site cannot take part",
                "site-2: columns are in a different order",
            ],
        ),
        ([describe("image", GREY, "a", "b")] * 2, []),
    ],
)
def test_sites_that_nearly_agree_get_warnings(descriptions: list[Description], patterns: list[str]) -> None:
    names = [f"site-{i}" for i in range(len(descriptions))]
    for warning, pattern in zip(agree_with_warnings(OPEN, descriptions, names)[1], patterns, strict=True):
        assert re.match(pattern, warning), warning


def test_pooled_statistics_cover_all_training_samples(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    parts = [1e4 + rng.normal(i, 1 + i, (10 * i + 7, 3)).astype(np.float32) for i in range(3)]
    for part in parts:
        part[:, 2] = 5.0
    settings = replace(OPEN, sample_kind="features")
    descriptions, trained = [], []
    for number, part in enumerate(parts):
        path = write_npz(tmp_path / f"{number}.npz", part, np.arange(len(part)) % 2)
        descriptions.append(
            Description.from_answer(describe_site(read_site(path, settings, POLICY), settings, POLICY).as_answer())
        )
        task = agree(settings, descriptions)
        trained.append(part[load(path, task)[1].train[0]])
    pooled = np.concatenate(trained).astype(np.float64)
    task = with_statistics(settings, descriptions)
    mean, std = (np.array([float(word) for word in text.split(",")]) for text in (task.feature_mean, task.feature_std))
    np.testing.assert_allclose(mean, pooled.mean(0), rtol=1e-12)
    np.testing.assert_allclose(std[:2], pooled.std(0)[:2], rtol=1e-9)
    assert std[2] == 1.0
    dataset, _ = load(tmp_path / "0.npz", agree(settings, descriptions))
    np.testing.assert_array_equal(dataset.mean, mean)


def test_sites_do_not_report_what_the_settings_define(tmp_path: Path) -> None:
    path = write_npz(tmp_path / "s.npz", np.ones((16, 3)), [0, 1, 2, 1] * 4)
    content = read_site(path, OPEN, POLICY)
    reduced = describe_site(content, replace(OPEN, classes="0,1,2", feature_mean="0", feature_std="1"), POLICY)
    assert (reduced.classes, reduced.mean.size, reduced.squares.size) == ((), 0, 0)
    complete = describe_site(content, OPEN, POLICY)
    assert (complete.classes, complete.count, complete.mean.tolist()) == (("0", "1", "2"), 12, [1.0, 1.0, 1.0])


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "sound"},
        {"shape": [8, 8]},
        {"shape": [1, 0, 8]},
        {"shape": [10**6, 10**6, 10**6]},
        {"count": 0},
        {"mean": [1.0]},
        {"kind": "features", "shape": [1], "mean": [float("nan")], "squares": [1.0]},
        {"kind": "features", "shape": [1], "mean": [0.0], "squares": [-1.0]},
        {"kind": "features", "shape": [2], "columns": ["a"]},
        {"kind": "features", "shape": [2], "columns": ["a", "a"]},
        {"kind": "features", "shape": [1], "columns": ["a" * 1000]},
        {"classes": ["a", " "]},
    ],
)
def test_invalid_descriptions_are_rejected(change: dict[str, Any]) -> None:
    valid = describe("image", (1, 8, 8), "a").as_answer()
    assert Description.from_answer(valid).shape == (1, 8, 8)
    with pytest.raises(DataError, match="is implausible"):
        Description.from_answer(valid | change)


def hospital(root: Path, name: str, labels: list[Any], seed: int, **columns: Any) -> Config:
    """Write a table of patients. ``columns`` replace age and cholesterol in mg/dl, or add to them."""
    rng = np.random.default_rng(seed)
    values = {"age": rng.normal(55, 9, 60).round(), "chol": rng.normal(240, 50, 60).round()} | columns
    lines = [[*row, labels[i % len(labels)]] for i, row in enumerate(zip(*values.values(), strict=True))]
    text = "\n".join([",".join([*values, "num"]), *(",".join(map(str, line)) for line in lines)])
    (root / f"{name}.csv").write_text(text + "\n", encoding="utf-8")
    return {"data": str(root / f"{name}.csv"), "name": name}


@pytest.fixture
def hospitals(tmp_path: Path) -> list[Config]:
    return [hospital(tmp_path, name, [0, 1], seed) for seed, name in enumerate(("cleveland", "hungary", "va"))]


def describe_hospitals(configs: list[Config]) -> list[Description]:
    return [describe_site(read_site(Path(site["data"]), OPEN, POLICY), OPEN, POLICY) for site in configs]


def test_sites_with_different_class_names_are_rejected(config: Config, tmp_path: Path) -> None:
    sites = [
        hospital(tmp_path, "cleveland", [0, 1, 2], 0),
        hospital(tmp_path, "hungary", [0, 1], 1),
        hospital(tmp_path, "va", ["no", "yes"], 2),
    ]
    settings = config | {"method": "fedavg", "model": "linear"}
    expected = "classes .*: '2' at cleveland; 'no' and 'yes' at va.*classes='0,1,2,no,yes'"
    with pytest.raises(SettingsError, match=expected):
        run(NodeGrid(*sites), settings)
    rare = [*sites[:2], hospital(tmp_path, "va", [0, 1], 2)]
    with pytest.raises(SettingsError, match=r"classes .*: '2' at cleveland"):
        run(NodeGrid(*rare), settings)
    done = run(NodeGrid(*rare), settings | {"classes": "0,1,2"})  # the class is rare, not another name
    assert done.summary["status"] == "completed" and done.strategy.clients.keys() == {0, 1, 2}


def test_a_single_site_may_have_any_classes(tmp_path: Path) -> None:
    (description,) = describe_hospitals([hospital(tmp_path, "va", ["no", "yes"], 2)])
    assert agree(OPEN, [description]).classes == "no,yes"


@pytest.mark.parametrize(
    ("column", "values", "expected"),
    [
        (
            "chol",
            lambda rng: (rng.normal(240, 50, 60) / 38.67).round(1),
            r"feature chol: va's mean [56]\.\d+ is \S+ standard dev",
        ),
        (
            "age",
            lambda rng: 1970 - rng.normal(0, 9, 60).round(),
            "feature age: va's mean 1.97e.03 is .* the other sites' mean",
        ),
        ("chol", lambda rng: np.zeros(60), "feature chol: va's mean 0 is .* standard deviations from"),
        (
            "chol",
            lambda rng: 240 + rng.normal(0, 1, 60).round(1),
            r"feature chol: va's standard deviation is 0\.0\d+ ",
        ),
    ],
    ids=["mmol/l", "year of birth", "0 for missing", "centred"],
)
def test_a_feature_in_other_units_gives_a_warning(
    column: str,
    values: Callable[[np.random.Generator], np.ndarray],
    expected: str,
    hospitals: list[Config],
    config: Config,
    tmp_path: Path,
    warnings: pytest.LogCaptureFixture,
) -> None:
    odd = hospital(tmp_path, "va", [0, 1], 2, **{column: values(np.random.default_rng(5))})
    run(NodeGrid(*hospitals[:2], odd), config | {"method": "fedavg", "model": "linear"})
    messages = [record.getMessage() for record in warnings.records]
    feature_messages = [message for message in dict.fromkeys(messages) if message.startswith("feature ")]
    assert len(feature_messages) == 1 and re.match(expected, feature_messages[0])
    assert "cleveland" not in feature_messages[0] and "hungary" not in feature_messages[0]


def test_similar_sites_give_no_warning(hospitals: list[Config]) -> None:
    names = [site["name"] for site in hospitals]
    assert agree_with_warnings(OPEN, describe_hospitals(hospitals), names)[1] == []


def test_warnings_about_features_unlike_the_other_sites() -> None:
    def site(count: int, mean: float, std: float) -> Description:
        return replace(
            describe("features", (1,), "a", "b", count=count), mean=np.array([mean]), squares=np.array([count * std**2])
        )

    # The other two have mean 10 and variance (4 + 4) / 2 + 0, so 18 is (18 - 10) / 2 = 4 deviations away.
    three = [("a", site(50, 10, 2)), ("b", site(5000, 10, 2)), ("c", site(20_000, 18, 2))]
    (text,) = unlike_features(three, ("dose",))
    assert text.startswith("feature dose: c's mean 18 is 4 standard deviations from")
    (text,) = unlike_features([*three[:2], ("c", site(9, 18, 2))])
    assert text.startswith("feature 0: c's mean is far from")
    assert not re.search(r"\d", text.removeprefix("feature 0"))  # a small site reveals no numbers
    assert unlike_features([*three[:2], ("c", site(50, 13.9, 2))]) == []  # 1.95
    (text,) = unlike_features([*three[:2], ("c", site(50, 10, 30))])  # 30 / 2
    assert text.startswith("feature 0: c's standard deviation is 15 times ") and "Check the units" in text
    assert unlike_features(three[:1]) == unlike_features([("a", site(5, 7, 0)), ("b", site(5, 7, 0))]) == []


def test_a_warning_about_two_sites_names_both() -> None:
    def site(count: int, mean: float, std: float) -> Description:
        return replace(
            describe("features", (1,), "a", "b", count=count), mean=np.array([mean]), squares=np.array([count * std**2])
        )

    # 11 deviations of a, 1.1 of b.
    (text,) = unlike_features([("a", site(50, 10, 2)), ("b", site(500, 32, 20))], ("dose",))
    assert text.startswith("feature dose: the means of a and b differ: 10 and 32. ") and "Check the units" in text
    (text,) = unlike_features([("a", site(9, 10, 2)), ("b", site(500, 32, 20))])
    assert text.startswith("feature 0: the means of a and b ") and "Check the units" in text
    assert not re.search(r"\d", text.removeprefix("feature 0"))  # a small site reveals no numbers
    (text,) = unlike_features([("a", site(50, 10, 2)), ("b", site(50, 10, 30))])  # 30 / 2
    assert text.startswith("feature 0: the standard deviations of a and b ") and "a factor of 15. " in text
    assert unlike_features([("a", site(50, 10, 2)), ("b", site(50, 13.9, 3))]) == []  # 1.95


def test_a_site_far_from_the_runs_mean_reports_it(tmp_path: Path) -> None:
    settings = replace(OPEN, sample_kind="features", input_shape="2", classes="0,1", feature_names="age,chol")
    settings = replace(settings, feature_mean="55,240", feature_std="9,50")
    other = hospital(tmp_path, "va", [0, 1], 2, chol=np.full(60, 6.0))
    notes = load(Path(other["data"]), settings)[0].notes
    (note,) = [note for note in notes if "mean" in note]
    assert note.startswith("feature chol: ") and "4.7 standard deviations" in note
    (text,) = [text for text in shared_notes(notes) if "mean" in text]
    assert text.startswith("feature chol: ") and "far from" in text and not re.search(r"\d", text)
    assert not [
        note for note in load(Path(hospital(tmp_path, "a", [0, 1], 0)["data"]), settings)[0].notes if "mean" in note
    ]


def test_an_extra_column_is_reported_by_name(hospitals: list[Config], config: Config, tmp_path: Path) -> None:
    odd = hospital(tmp_path, "va", [0, 1], 2, weight=np.arange(60))
    done = run(NodeGrid(*hospitals[:2], odd), config | {"method": "fedavg", "model": "linear", "min-clients": 2})
    assert any("its columns differ" in reason for _, reason in done.federation.excluded)
    assert done.strategy.clients.keys() == {0, 1}
    names = [site["name"] for site in (hospitals[0], odd)]
    with pytest.raises(SettingsError, match=r"columns of va differ .* cleveland .unknown: weight."):
        agree_with_warnings(OPEN, describe_hospitals([hospitals[0], odd]), names)
    (text,) = agree_with_warnings(replace(OPEN, input_shape="2"), describe_hospitals([hospitals[0], odd]), names)[1]
    assert text.startswith("va: ") and "(unknown: weight); the site cannot take part" in text


# -- complete runs ---------------------------------------------------------------------------------------


@pytest.fixture
def sites(tmp_path: Path) -> list[Config]:
    """Return the node configs of three sites with digits: an .npz, folders of nine classes, folders of one class."""
    digits = load_dataset(DataSettings(), Path(), 0)
    x, y = digits.x[..., 0], digits.y
    below_nine, nine = np.flatnonzero(y[200:400] < 9) + 200, np.flatnonzero(y[400:700] == 9) + 400
    write_npz(tmp_path / "a.npz", x[:120], y[:120], x_test=x[120:160], y_test=y[120:160])
    class_folders(tmp_path / "b", x[below_nine], y[below_nine])
    class_folders(tmp_path / "c" / "train", x[nine[:-3]], y[nine[:-3]])
    class_folders(tmp_path / "c" / "test", x[nine[-3:]], y[nine[-3:]])
    return [
        {"data": str(tmp_path / "b"), "name": "site-b", "models": str(tmp_path / "models-b")},
        {"data": str(tmp_path / "c"), "name": "site-c"},
        {"data": str(tmp_path / "a.npz"), "name": "site-a"},
    ]


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return {
        "dataset": "sites",
        "num-clients": 3,
        "num-server-rounds": 2,
        "method": "feddrm",
        "model": "mlp",
        "device": "cpu",
        "stack": "loop",
        "local-epochs": 1,
        "output-dir": str(tmp_path / "runs"),
        "run-name": "one",
        "join-timeout": 2.0,
    }


def rows_of(recorder: Recorder) -> list[list[str]]:
    lines = (recorder.directory.path / "clients.csv").read_text().splitlines()
    return [line.split(",") for line in lines[1:]]


@pytest.mark.parametrize("method", ["feddrm", "fedfew", "cwfedavg", "fedacs"])
def test_a_run_over_three_sites(
    method: str, sites: list[Config], config: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done = run(NodeGrid(*sites), config | {"method": method, "system-accuracy": "on"})
    summary = json.loads((done.directory.path / "summary.json").read_text())
    assert summary["sites"] == ["site-a", "site-b", "site-c"]
    assert summary["system-accuracy"] is None
    assert (summary["status"], summary["dropped"]) == ("completed", {})
    assert "left-out" not in summary
    assert {tuple(row[1:4]) for row in rows_of(done)} == {("0", "120", "40"), ("1", "136", "45"), ("2", "28", "3")}
    data = done.settings.data
    assert (data.sample_kind, data.input_shape, data.classes) == ("image", "1x8x8", "0,1,2,3,4,5,6,7,8,9")
    output = capsys.readouterr().out
    assert re.search(r"^ *site-b +1 +136 +45 +image, shape 1x8x8 +9$", output.partition("round 1/2")[0], re.MULTILINE)
    assert [row[-1] for row in rows_of(done)] == ["site-a", "site-b", "site-c"] * 2
    assert [path.name for path in done.directory.models.iterdir()] == ["server.safetensors"]
    (node_file,) = (tmp_path / "models-b").glob(f"{done.directory.path.name}-*/client-1.safetensors")
    stored = load_arrays(node_file)
    assert any(array.shape == (10,) for array in stored.values())
    model = posy.load(node_file.parent).predictor("site-b")  # by name, from its node's files only
    site = Workspace(done.settings, str(tmp_path / "b"))
    test = site.partition.test[0]
    labels = [prediction.label for prediction in model.predict_all(site.dataset.x[test])]
    accuracy = np.mean(
        [site.task.class_names[y] == label for y, label in zip(site.dataset.y[test], labels, strict=True)]
    )
    last = done.record().clients.set_index(["round", "site"]).loc[(2, "site-b")]
    assert accuracy == pytest.approx(last[f"{model.point}_accuracy"])
    with pytest.raises(SettingsError, match="stay on the clients' nodes"):
        done.record().predictor(0)


def test_class_counts_are_shared_only_on_request(sites: list[Config], config: Config, pictures: None) -> None:
    done = run(NodeGrid(*sites), config | {"method": "fedavg", "share-class-counts": True})
    counts = done.strategy.class_counts
    assert counts is not None
    assert counts.sum(1).tolist() == [160, 181, 31]
    assert counts[1, 9] == 0 and counts[1, :9].all()
    assert counts[2].tolist() == [0] * 9 + [31]
    assert (done.directory.path / "figures" / "partition.png").exists()
    done = run(NodeGrid(*sites), config | {"method": "fedavg"})
    assert not (done.directory.path / "figures" / "partition.png").exists()  # the server knows no class counts


def test_the_order_of_answers_does_not_change_the_run(sites: list[Config], config: Config) -> None:
    runs = [run(NodeGrid(*order), config | {"run-name": str(i)}) for i, order in enumerate([sites, sites[::-1]])]
    states = [state_of(done.strategy)["model"].tobytes() for done in runs]
    assert states[0] == states[1]
    assert rows_of(runs[0]) == rows_of(runs[1])


@pytest.mark.parametrize(
    ("min_clients", "completes"), [(0, False), (2, True), (3, False)], ids=["all needed", "two needed", "three needed"]
)
def test_a_site_with_bad_data_is_excluded(
    min_clients: int,
    completes: bool,
    sites: list[Config],
    config: Config,
    tmp_path: Path,
    warnings: pytest.LogCaptureFixture,
) -> None:
    (tmp_path / "c" / "train" / "9" / "0.png").write_bytes(b"\x89PNG, truncated")
    # Without site-c, only site-a has a nine.
    settings = config | {"min-clients": min_clients, "method": "fedavg", "classes": "0,1,2,3,4,5,6,7,8,9"}
    reason = "unreadable-images, count below 2"
    if not completes:
        with pytest.raises(SettingsError, match="nodes host 2 of these clients") as caught:
            run(NodeGrid(*sites), settings)
        assert reason in str(caught.value) and str(tmp_path) not in str(caught.value)
        return
    done = run(NodeGrid(*sites), settings)
    summary = json.loads((done.directory.path / "summary.json").read_text())
    assert summary["sites"] == ["site-a", "site-b", None]
    (left_out,) = summary["left-out"]
    assert (left_out["site"], left_out["times"]) == (None, 1)  # the site could not report its name
    assert reason in left_out["reason"]
    assert len({id(record) for record in warnings.records if reason in record.getMessage()}) == 1
    assert str(tmp_path / "c" / "train" / "9" / "0.png") in warnings.text  # the log of the node, which is this process
    assert {row[1] for row in rows_of(done)} == {"0", "1"}


def test_a_site_with_other_classes_is_excluded(sites: list[Config], config: Config, tmp_path: Path) -> None:
    settings = config | {"classes": "0,1,2,3,4,5,6,7,8", "min-clients": 1, "method": "fedavg"}
    done = run(NodeGrid(*sites), settings)
    reasons = " ".join(reason for _, reason in done.federation.excluded)
    assert done.strategy.clients.keys() == {0}  # only site-b has no nine
    assert sum(done.federation.excluded.values()) == 2  # site-a and site-c
    assert "(other-classes)" in reasons
    assert str(tmp_path) not in reasons and "'9'" not in reasons


def test_a_node_without_data_is_rejected(sites: list[Config], config: Config) -> None:
    with pytest.raises(SettingsError, match="needs data, as in --node-config"):
        run(NodeGrid(*sites[:2], {"partition-id": 2, "num-partitions": 3}), config)


def test_a_run_over_three_feature_formats(config: Config, tmp_path: Path) -> None:
    digits = load_dataset(DataSettings(), Path(), 0)
    x, y = digits.x.reshape(len(digits), -1).astype(np.float32), digits.y
    write_npz(tmp_path / "a.npz", x[:100], y[:100])
    table(tmp_path / "b.csv", x[100:200], y[100:200])
    pfllib(tmp_path / "c", x[200:300], y[200:300], 20)
    grid = NodeGrid(
        *({"data": str(tmp_path / name), "partition-id": i} for i, name in enumerate(("a.npz", "b.csv", "c")))
    )
    done = run(grid, config | {"method": "fedavg", "num-server-rounds": 4, "local-epochs": 5})
    trained = np.concatenate(
        [
            x[start : start + 100][load(tmp_path / name, done.settings.data)[1].train[0]]
            for start, name in ((0, "a.npz"), (100, "b.csv"), (200, "c"))
        ]
    )
    mean = np.array([float(word) for word in done.settings.data.feature_mean.split(",")])
    np.testing.assert_allclose(mean, trained.mean(0, np.float64), rtol=1e-6)
    served = json.loads((done.directory.path / "summary.json").read_text())["served"]["last"]["mean"]
    assert served > 0.5


def test_a_run_over_texts_of_two_sites(config: Config, tmp_path: Path) -> None:
    for name, words in (("a", ("good film", "bad film")), ("b", ("a good book", "bad story"))):
        lines = [f"{words[i % 2]},{'yes' if i % 2 == 0 else 'no'}" for i in range(40)]
        (tmp_path / f"{name}.csv").write_text("\n".join(["text,label", *lines]))
    grid = NodeGrid(*({"data": str(tmp_path / f"{name}.csv"), "name": name} for name in "ab"))
    more = {"num-clients": 2, "method": "fedavg", "model": "auto", "num-server-rounds": 5, "lr": 0.5, "local-epochs": 5}
    done = run(grid, config | more)
    assert (done.settings.data.input_shape, done.settings.data.classes) == ("200", "no,yes")
    assert json.loads((done.directory.path / "summary.json").read_text())["served"]["last"]["mean"] == 1.0


def test_changed_data_is_detected_during_a_run(sites: list[Config], config: Config, tmp_path: Path) -> None:
    grid = NodeGrid(*sites)

    class ChangingGrid(NodeGrid):
        def answer(self, message: Any) -> Any:
            if message.content.config_records["config"].get("server-round") == 2:
                digits = load_dataset(DataSettings(), Path(), 0)
                write_npz(tmp_path / "a.npz", digits.x[:90, ..., 0], digits.y[:90])
            return super().answer(message)

    grid.__class__ = ChangingGrid
    done = run(grid, config | {"method": "fedavg", "save-models": False})
    assert (
        sum(times for reason, times in done.totals.dropped.items() if "data has changed during the run" in reason) > 0
    )
    assert {row[1] for row in rows_of(done) if row[0] == "2" and row[2]} == {"1", "2"}


@pytest.mark.parametrize("form", ["image", "features", "text"])
def test_any_change_of_samples_changes_the_fingerprint(form: str, tmp_path: Path) -> None:
    settings = FEATURES
    x, y = np.arange(24, dtype=np.float64).reshape(8, 3), [0, 1, 2, 0, 0, 1, 2, 1]
    if form == "image":
        settings, x, y = IMAGES, grey(8).copy(), ["abc"[v] for v in y]

    def fingerprint_of(x: np.ndarray, y: list[Any], policy: Policy = POLICY) -> str:
        if form == "text":
            path = tmp_path / "s.csv"
            path.write_text(
                "text,label\n" + "".join(f"w{a[0]},{['no', 'yes', 'yes'][b]}\n" for a, b in zip(x, y, strict=True))
            )
            return fingerprint(*load(path, TEXTS, policy))
        return fingerprint(*load(write_npz(tmp_path / "s.npz", x, y), settings, policy))

    first = fingerprint_of(x, y)
    assert len(first) == 16
    assert int(first, 16) >= 0
    assert fingerprint_of(x, y) == first
    other = x.copy()
    other[3].flat[0] += 1
    assert fingerprint_of(other, y) != first
    assert fingerprint_of(x, [*y[1:], y[0]]) != first
    assert fingerprint_of(x[:7], y[:7]) != first
    assert fingerprint_of(x, y, replace(POLICY, test_fraction=0.5)) != first
    assert fingerprint_of(x[::-1], y[::-1]) != first


def test_changed_features_are_detected_during_a_run(config: Config, tmp_path: Path) -> None:
    x, y = np.random.default_rng(0).normal(size=(40, 3)), np.arange(40) % 2
    for name in "ab":
        write_npz(tmp_path / f"{name}.npz", x, y)

    class ChangingGrid(NodeGrid):
        def answer(self, message: Any) -> Any:
            if message.content.config_records["config"].get("server-round") == 2:
                write_npz(tmp_path / "a.npz", x[::-1] * 2, y)  # the same labels
            return super().answer(message)

    grid = ChangingGrid(*({"data": str(tmp_path / f"{name}.npz"), "name": name} for name in "ab"))
    done = run(grid, config | {"num-clients": 2, "method": "fedavg"})
    assert any("data has changed during the run" in reason for reason in done.totals.dropped)


def test_a_node_reports_warnings_about_its_data(
    config: Config, tmp_path: Path, warnings: pytest.LogCaptureFixture
) -> None:
    for name in "ab":
        class_folders(tmp_path / name, grey(16), ["Cat", "cat", "dog", "dog"] * 4)
    (tmp_path / "b" / "dog" / "torn.png").write_bytes(b"\x89PNG, truncated")
    answers: list[dict[str, Any]] = []

    class RecordingGrid(NodeGrid):
        def answer(self, message: Any) -> Any:
            reply = super().answer(message)
            if message.metadata.message_type == "query" and not reply.has_error():
                answers.append(dict(reply.content.config_records["config"]))
            return reply

    nodes = [{"data": str(tmp_path / "a"), "name": "a"}, {"data": str(tmp_path / "b"), "name": "b"}]
    nodes[1]["skip-unreadable"] = True
    run(RecordingGrid(*nodes), config | {"num-clients": 2, "method": "fedavg"})
    by_site = {str(answer["name"]): answer for answer in answers if "num-train" in answer}
    [similar] = by_site["a"]["warnings"]
    assert "nearly equal" in similar
    unreadable, *remaining = by_site["b"]["warnings"]
    assert "1 of 17 image files" in unreadable and remaining == [similar]
    assert (by_site["a"]["skipped"], by_site["b"]["skipped"]) == (0, 1)
    assert all(len(answer["fingerprint"]) == 16 for answer in by_site.values())
    described = [answer for answer in answers if "kind" in answer]
    assert {len(answer["warnings"]) for answer in described} == {1, 2}
    assert "'Cat' (a, b), 'cat' (a, b)" in warnings.text


def test_skip_unreadable_must_be_true_or_false(tmp_path: Path) -> None:
    assert skips({}) is False
    assert skips({"skip-unreadable": True}) is skips({"skip-unreadable": "true"}) is True
    with pytest.raises(DataError, match=r"skip-unreadable = 'perhaps' .* true or false"):
        skips({"skip-unreadable": "perhaps"})


def test_site_notices_are_truncated() -> None:
    reported = site_notices([Note("x" * 1000)] * 50 + ["a note without a shared text"], 3)
    assert [len(warning) for warning in reported["warnings"]] == [300] * 20
    assert reported["skipped"] == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shift": "low"}, "shift = 'low' .* needs dataset != sites"),
        ({"max-samples": 9}, "max-samples = 9"),
        ({"samples-per-client": 9}, "samples-per-client = 9"),
    ],
)
def test_settings_for_benchmark_data_are_rejected(change: Config, message: str, config: Config) -> None:
    with pytest.raises(SettingsError, match=message):
        run(NodeGrid(), config | change)


def test_a_simulation_has_no_sites(config: Config) -> None:
    with pytest.raises(SettingsError, match="no nodes with data"):
        run(None, config)
