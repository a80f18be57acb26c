"""Readers for the files of published data sets."""

import itertools
import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from logging import getLogger
from pathlib import Path

import numpy as np
from filelock import FileLock

from posy.data.columns import Columns
from posy.data.dataset import Content, Dataset
from posy.data.errors import DataError
from posy.data.files import read_json
from posy.data.labels import LabelRule, as_labels, known_labels, numbered_groups
from posy.data.published import CIFAR20, CIFAR100_NAMES, DATASETS, DIGITS, FLAMBY, KVASIR
from posy.data.readers.cells import column_notes, number_in, parse_columns
from posy.data.readers.image import DEFAULT_SIDE, image_files, read_images
from posy.data.readers.own import as_dataset, read_npz
from posy.data.readers.tables import rows_of
from posy.data.settings import DataSettings
from posy.data.targets import as_targets
from posy.data.text import MAX_LENGTH
from posy.data.values import as_features, as_float32, check_lengths
from posy.metrics import VALUES

TO_SUPERCLASS = np.array(
    [next(index for index, names in enumerate(CIFAR20.values()) if name in names.split()) for name in CIFAR100_NAMES]
)
_UNREADABLE = (RuntimeError, OSError, ValueError, TypeError, LookupError, AssertionError)  # raised by torchvision
_MIN_TEST = 8  # PPFE, appendix A.2: users with fewer test samples are removed


def load_published(name: str, data_dir: Path, settings: DataSettings) -> Dataset:
    """Load a data set in :data:`posy.data.published.DATASETS` from the data directory, or download it if allowed."""
    source = DATASETS[name]
    content = _from_npz(name, data_dir) if source.classes else None
    if content is None:
        content = globals()[source.reader](name, data_dir, settings)
    content = replace(content, class_names=content.class_names or source.classes)
    return as_dataset(content, name, settings.text_length or source.words or MAX_LENGTH)


def _from_npz(name: str, data_dir: Path) -> Content | None:
    """Read ``<data-dir>/<name>.npz`` if it exists."""
    path = data_dir / f"{name}.npz"
    if not os.path.lexists(path):  # a broken link is an error, not an absent file
        return None
    content, shape = read_npz(path), DATASETS[name].shape
    if not content.kind.startswith("image"):
        raise DataError(f"{path}: samples of kind {content.kind}; the samples of {name} are images")
    if shape is not None and content.x.shape[1:] != shape:
        raise DataError(f"{path}: images of shape {content.x.shape[1:]}; {name} has {shape} (height, width, channels)")
    return content


def read_digits(name: str, data_dir: Path, settings: DataSettings) -> Content:
    """Return scikit-learn's digits, with grey values scaled from 0..16 to 0..255."""
    from sklearn.datasets import load_digits  # noqa: PLC0415 - only this data set needs it

    bunch = load_digits()
    x = np.rint(bunch.images[..., None] * (255 / 16)).astype(np.uint8)
    return Content(data_dir, "image", x, bunch.target.astype(np.int64), class_names=DIGITS)


def read_diabetes(name: str, data_dir: Path, settings: DataSettings) -> Content:
    """Return scikit-learn's diabetes data, with the features in their original units."""
    from sklearn.datasets import load_diabetes  # noqa: PLC0415 - only this data set needs it

    bunch = load_diabetes(scaled=False)
    y, names = as_targets(bunch.target, VALUES, name, ("progression",))
    columns = tuple(bunch.feature_names)
    x, _ = as_features(bunch.data, name)
    return Content(data_dir / name, "features", x, y, class_names=names, columns=columns, target=VALUES)


HOSPITALS = {"cleveland": "Cleveland", "hungarian": "Hungary", "switzerland": "Switzerland", "va": "Long Beach"}
"""The hospitals of `heart-disease`, by the names of their files."""
_LABEL = LabelRule("num", ">", 0)
_DROPPED = ("slope", "ca", "thal", "num")
_CATEGORIES = {"cp": ("2", "3", "4"), "restecg": ("1", "2")}
"""Categorical columns, with all categories except the first."""
_POSITIVE = ("trestbps", "chol")
"""Columns in which the tables write 0 for a missing value: blood pressure and cholesterol."""
_CLASSES = ("no disease", "disease")


def read_heart_disease(name: str, data_dir: Path, settings: DataSettings) -> Content:
    """Read the tables of four hospitals: all rows and 13 columns, or the data of FLamby's Fed-Heart-Disease.

    A row's class is ``disease`` if ``num > 0``. With ``protocol = flamby``, :func:`_as_in_flamby` prepares the content.
    """
    folder = Path(__file__).resolve().parent.parent / "heart_disease"
    tables = []
    for file in HOSPITALS:
        header, *rows = map(json.loads, (folder / f"{file}.jsonl").read_text(encoding="utf-8").splitlines())
        tables.append([dict(zip(header, row, strict=True)) for row in rows])
    if settings.protocol == FLAMBY:
        return _as_in_flamby(folder, tables)
    table = [row for rows in tables for row in rows]
    names = [name for name in table[0] if name != _LABEL.column]
    cells = {name: [row[name] for row in table] for name in names}
    for column in _POSITIVE:
        cells[column] = ["?" if number_in(cell) == 0 else cell for cell in cells[column]]
    parsed = parse_columns(cells, Columns.of(settings).categories, comma=False)
    if parsed is None:
        raise DataError(f"{folder}: the tables of the hospitals are damaged; install Posy again")
    x, categories = parsed
    y = _LABEL(np.array([float(row[_LABEL.column]) for row in table]))
    groups = np.repeat(np.arange(len(HOSPITALS)), [len(rows) for rows in tables])
    notes = tuple(column_notes(x, categories, names))
    return Content(
        folder, "features", x, y, groups, class_names=_CLASSES, columns=tuple(names),
        group_names=tuple(HOSPITALS.values()), categories=categories, read_notes=notes,
    )  # fmt: skip


def _as_in_flamby(folder: Path, tables: Sequence[Sequence[Mapping[str, str]]]) -> Content:
    """Return the tables of the hospitals as FLamby's Fed-Heart-Disease prepares them.

    Rows with a missing value in the first ten columns are dropped, ``cp`` and ``restecg`` are one-hot encoded without
    their first category, and a third of each hospital's rows are test samples.

    References
    ----------
    J. Ogier du Terrail et al.: FLamby: Datasets and Benchmarks for Cross-Silo Federated Learning in Realistic
    Healthcare Settings, NeurIPS 2022, Appendix H.
    """
    from sklearn.model_selection import train_test_split  # noqa: PLC0415 - only this data set needs it

    parts: list[np.ndarray] = []
    labels: list[np.ndarray] = []
    given: list[tuple[np.ndarray, np.ndarray]] = []
    columns: tuple[str, ...] = ()
    for rows in tables:
        used = [title for title in rows[0] if title not in _DROPPED]
        table = [row for row in rows if "?" not in [row[title] for title in used]]
        y = _LABEL(np.array([float(row[_LABEL.column]) for row in table]))
        encoded = {title: np.array([float(row[title]) for row in table]) for title in used}
        for title, categories in _CATEGORIES.items():
            values = encoded.pop(title)
            encoded |= {f"{title}={category}": (values == float(category)).astype(float) for category in categories}
        columns = tuple(encoded)
        counts = np.unique(y, return_counts=True)[1]
        start = sum(map(len, labels))
        is_stratified = len(counts) > 1 and counts.min() > 2
        train, test = train_test_split(
            np.arange(len(y)), test_size=0.34, random_state=43, stratify=y if is_stratified else None
        )
        given.append((np.sort(start + train), np.sort(start + test)))
        parts.append(np.column_stack(list(encoded.values())))
        labels.append(y)
    groups = np.repeat(np.arange(len(HOSPITALS)), [len(y) for y in labels])
    return Content(
        folder, "features", np.concatenate(parts), np.concatenate(labels), groups, given=tuple(given),
        class_names=_CLASSES, columns=columns, group_names=tuple(HOSPITALS.values()),
    )  # fmt: skip


def read_torchvision(
    name: str, data_dir: Path, settings: DataSettings, also: Sequence[Path] = (), **options: str
) -> Content:
    """Read a data set with a class from ``torchvision.datasets``.

    For CIFAR, the class checks the files' MD5 sums before unpickling. The error for missing data also lists the
    alternative files in ``also``.
    """
    from torchvision import datasets  # noqa: PLC0415 - takes seconds to import

    source = DATASETS[name]
    assert source.torchvision is not None
    reader, folder = source.torchvision
    path = data_dir / folder

    def read(fetch: bool) -> Content:
        xs, ys = [], []
        for train in (True, False):
            split = getattr(datasets, reader)(str(data_dir), train=train, download=fetch, **options)
            xs.append(np.asarray(split.data))
            ys.append(as_labels(np.asarray(split.targets), str(path)))
            check_lengths(f"{path}: {'train' if train else 'test'}", images=len(xs[-1]), labels=len(ys[-1]))
        x = np.concatenate(xs)
        is_test = np.arange(len(x)) >= len(xs[0])
        return Content(path, "image", x.reshape(*x.shape[:3], -1), np.concatenate(ys), is_test=is_test)

    has_files = path.is_dir() and any(path.iterdir())
    try:
        return read(False)
    except DataError:
        raise
    except _UNREADABLE as error:
        problem: Exception = error
    if settings.download:
        getLogger("flwr").info("Downloading %s to %s", reader, data_dir.absolute())
        try:
            data_dir.mkdir(parents=True, exist_ok=True)
            with FileLock(data_dir / f".{reader}.lock"):  # clients in other processes may also start a download
                return read(True)
        except _UNREADABLE as error:
            problem = error
    if has_files:
        raise DataError(
            f"{path.absolute()}: cannot be read ({problem}); put the published files there in torchvision's layout"
        ) from problem
    remedy = (
        "put an .npz with x_train, y_train, x_test, y_test there, or the published files in torchvision's "
        f"layout{'' if settings.download else ', or set download = true'} ({problem})"
    )
    raise _missing(name, data_dir, [*also, path], remedy) from problem


def read_cifar20(name: str, data_dir: Path, settings: DataSettings) -> Content:
    """Read CIFAR-100 with its superclasses as labels."""
    fine = _from_npz("cifar100", data_dir)
    if fine is None:
        fine = read_torchvision(name, data_dir, settings, also=[data_dir / "cifar100.npz"])
    return replace(fine, labels=TO_SUPERCLASS[known_labels(fine.labels, len(TO_SUPERCLASS), str(fine.path))])


def read_emnist(name: str, data_dir: Path, settings: DataSettings) -> Content:
    """Read EMNIST's letters, whose files contain transposed images and number the letters from 1."""
    raw = read_torchvision(name, data_dir, settings, split="letters")
    return replace(raw, x=np.ascontiguousarray(raw.x.swapaxes(1, 2)), labels=raw.labels - 1)


def read_femnist(name: str, data_dir: Path, settings: DataSettings) -> Content:
    """Read FEMNIST from LEAF's JSON files, with writers as groups."""
    folders = [data_dir / root / split for root in ("femnist", "femnist/data") for split in ("train", "test")]
    files = {folder: sorted(folder.glob("*.json")) for folder in folders}
    if len({folder.name for folder, paths in files.items() if paths}) < 2:
        absent = [folder / "*.json" for folder, paths in files.items() if not paths]
        remedy = "put the train and test .json files of LEAF's preprocessing there"
        raise _missing(name, data_dir, absent, remedy)
    images, labels, writers, is_test = [], [], [], []
    for path in itertools.chain(*files.values()):
        for user, x, y in _leaf_users(path):
            where = f"{path}: user {user}"
            check_lengths(where, x=len(x), y=len(y))
            try:
                pixels, classes = np.array(x, np.float64), np.array(y)
            except (TypeError, ValueError) as error:
                raise DataError(f"{where}: not 784 numbers and one label per sample ({error})") from error
            if pixels.shape != (len(y), 784) or classes.shape != (len(y),):
                raise DataError(
                    f"{where}: x of shape {pixels.shape}, y of shape {classes.shape}; expected 784 pixels and one "
                    "label per sample"
                )
            pixels = as_float32(pixels, where)
            if pixels.min() < 0 or pixels.max() > 1:
                raise DataError(f"{where}: pixels from {pixels.min()} to {pixels.max()}; allowed: 0 to 1")
            images.append(np.rint(pixels * 255).astype(np.uint8).reshape(-1, 28, 28, 1))
            labels.append(known_labels(classes, len(DATASETS[name].classes), where))
            writers += [user] * len(y)
            is_test += [path.parent.name == "test"] * len(y)
    check_lengths(str(data_dir / "femnist"), samples=len(writers))
    groups, group_names = numbered_groups(np.array(writers), "writer")
    pixels, classes = np.concatenate(images), np.concatenate(labels)
    return Content(data_dir / "femnist", "image", pixels, classes, groups, np.array(is_test), group_names=group_names)


def _leaf_users(path: Path) -> list[tuple[str, list[list[float]], list[int]]]:
    content = read_json(path)
    try:
        users = [(user, content["user_data"][user]["x"], content["user_data"][user]["y"]) for user in content["users"]]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f'{path}: not a LEAF file with "users" and "user_data" ({error!r})') from error
    for user, x, y in users:
        if not isinstance(x, list) or not isinstance(y, list):
            kinds = ", ".join(f"{name} is of type {type(part).__name__}" for name, part in (("x", x), ("y", y)))
            raise DataError(f"{path}: user {user}: {kinds}; expected two lists")
    return [entry for entry in users if entry[1] or entry[2]]


def read_tiny_imagenet(name: str, data_dir: Path, settings: DataSettings) -> Content:
    """Read Tiny ImageNet's folders: ``train/<wnid>/images``, and ``val`` with ``val_annotations.txt``."""
    paths = [f"{root}/train" for root in ("tiny-imagenet-200", "tiny-imagenet")]
    train = _first(name, data_dir, paths, "unpack tiny-imagenet-200.zip there")
    wnids = sorted(folder.name for folder in train.iterdir() if folder.is_dir())
    files = [(path, wnid) for wnid in wnids for path in image_files(train / wnid / "images")]
    num_train = len(files)
    paths = [f"{train.parent.name}/val/val_annotations.txt"]
    annotations = _first(name, data_dir, paths, "put the archive's validation images there")
    for number, fields in rows_of(annotations, delimiter="\t"):
        if len(fields) < 2 or fields[1] not in wnids:
            raise DataError(
                f"{annotations}: row {number}: {fields!r:.80}; expected an image and one of the folders' wnids"
            )
        files.append((annotations.parent / "images" / fields[0], fields[1]))
    x = read_images([path for path, _ in files], _square(settings), "RGB")
    y = np.searchsorted(wnids, [wnid for _, wnid in files])
    return Content(train.parent, "image", x, y, is_test=np.arange(len(y)) >= num_train, class_names=tuple(wnids))


def read_kvasir(name: str, data_dir: Path, settings: DataSettings) -> Content:
    """Read Kvasir's class folders, cropping images to a centred square and resizing them."""
    folders = ["kvasir", "kvasir-dataset-v2", "kvasir-dataset"]
    root = _first(name, data_dir, folders, "unpack the Kvasir data set there: one folder of images for each class")
    if absent := [root / folder for folder in KVASIR if not (root / folder).is_dir()]:
        raise _missing(name, data_dir, absent, "put the folders of all 8 classes there")
    files = [(path, label) for label, folder in enumerate(KVASIR) for path in image_files(root / folder)]
    x = read_images([path for path, _ in files], _square(settings))
    return Content(root, "image", x, np.array([label for _, label in files]))


def read_fedisic(name: str, data_dir: Path, settings: DataSettings) -> Content:
    """Read Fed-ISIC2019 as FLamby prepares it: the images and its ``train_test_split``.

    The group of each image is its medical centre. The function crops images to a centred square and resizes them.
    """
    remedy = "put FLamby's train_test_split and one of its image folders there"
    tables = [f"fedisic/{table}" for table in ("train_test_split", "train_test_split.csv", "train_test_folds.csv")]
    folders = ["fedisic/ISIC_2019_Training_Input_preprocessed", "fedisic/ISIC_2019_Training_Input"]
    table, folder = _first(name, data_dir, tables, remedy), _first(name, data_dir, folders, remedy)
    rows = rows_of(table)
    _, header = next(rows, (0, []))
    files, labels, centres, is_test = [], [], [], []
    for number, fields in rows:
        row = dict(zip(header, fields, strict=False))
        try:
            labels.append(int(row["target"]))
            centres.append(int(row["center"]))
            files.append(folder / f"{row['image']}.jpg")
            is_test.append(row.get("fold", "train") == "test")
        except (KeyError, ValueError) as error:
            raise DataError(f"{table}: row {number}: expected image, target and center ({error})") from error
    check_lengths(str(table), rows=len(files))
    y = known_labels(np.array(labels), len(DATASETS[name].classes), str(table))
    groups, names = numbered_groups(np.array(centres, np.int64), "centre")
    x = read_images(files, _square(settings), "RGB")
    return Content(table, "image", x, y, groups, np.array(is_test), group_names=names)


def read_agnews(name: str, data_dir: Path, settings: DataSettings) -> Content:
    """Read AG News, whose rows contain a class from 1 to 4, a title and a description."""
    remedy = "put a .csv file there with the rows: class 1-4, title, description"
    paths = ["agnews/train.csv", "agnews/test.csv", "agnews.csv"]
    files = [_first(name, data_dir, paths, remedy)]
    if files[0].name != "agnews.csv":
        files = [_first(name, data_dir, [relative], remedy) for relative in paths[:2]]
    labels, texts, is_test = [], [], []
    for path in files:
        for number, row in rows_of(path):
            if number == 1 and row[0].strip().lower() in ("class index", "class", "label"):
                continue  # some mirrors add a header
            if len(row) != 3 or row[0] not in ("1", "2", "3", "4"):
                raise DataError(f"{path}: row {number}: {row!r:.80}; expected class 1 to 4, title, description")
            labels.append(int(row[0]) - 1)
            texts.append(f"{row[1]} {row[2]}")
            is_test.append(path.name == "test.csv")
    check_lengths(str(files[0]), rows=len(labels))
    names = ("World", "Sports", "Business", "Sci/Tech")
    return Content(files[0], "text", texts, np.array(labels), is_test=np.array(is_test), class_names=names)


def read_sent140(name: str, data_dir: Path, settings: DataSettings) -> Content:
    """Read Sentiment140, whose rows contain a polarity of 0 or 4, id, date, query, user and text.

    Users are the groups. Users with fewer than 8 samples in their test split are skipped (PPFE, appendix A.2).
    """
    published = "training.1600000.processed.noemoticon.csv"
    paths = [f"sent140/{published}", published, "sent140.csv"]
    path = _first(name, data_dir, paths, "unpack trainingandtestdata.zip there")
    rows = []
    for number, row in rows_of(path, "latin-1"):
        if len(row) != 6 or row[0] not in ("0", "4"):
            raise DataError(f"{path}: row {number}: {row!r:.80}; expected polarity 0 or 4, id, date, query, user, text")
        rows.append((row[4], row[0] == "4", row[5]))
    tweets = Counter(user for user, _, _ in rows)
    rows = [row for row in rows if round(tweets[row[0]] * settings.test_fraction) >= _MIN_TEST]
    if not rows:
        fraction = settings.test_fraction
        raise DataError(
            f"{path}: no user has {_MIN_TEST} test samples at test-fraction = {fraction}; raise test-fraction"
        )
    users, labels, texts = zip(*rows, strict=True)
    groups, group_names = numbered_groups(np.array(users), "user")
    y, names = np.array(labels, np.int64), ("negative", "positive")
    return Content(path, "text", texts, y, groups, class_names=names, group_names=group_names)


def _square(settings: DataSettings) -> tuple[int, int]:
    """Return the width and height to which image files are resized."""
    return (settings.image_size or DEFAULT_SIDE,) * 2


def _first(name: str, data_dir: Path, names: Sequence[str], remedy: str) -> Path:
    """Return the first of several paths that exists in the data directory, or raise :class:`DataError`."""
    paths = [data_dir / relative for relative in names]
    existing = next((path for path in paths if path.exists()), None)
    if existing is None:
        raise _missing(name, data_dir, paths, remedy)
    return existing


def _missing(name: str, data_dir: Path, looked_for: Sequence[Path], remedy: str) -> DataError:
    """Return the error for missing data, with the searched paths and a remedy."""
    npz = [data_dir / f"{name}.npz"] if DATASETS[name].classes else []
    paths = "\n".join(f"  {path.absolute()}" for path in (*npz, *looked_for))
    return DataError(f"the data of {name} was not found; looked for\n{paths}\n{remedy}")
