"""The data settings: which samples a run uses, and how they are assigned to clients."""

import difflib
from dataclasses import dataclass, replace
from pathlib import Path

from posy.data.files import is_pfllib
from posy.data.published import DATASETS, FLAMBY, Published
from posy.data.task import CLASSIFICATION, MULTI_LABEL, REGRESSION, TARGETS
from posy.metrics import CLASSES
from posy.paths import absolute, exists, expanded
from posy.settings import SettingsError, setting

SITES = "sites"
"""The value of `dataset` for a run whose nodes hold their own data."""
CENTRAL_SET = "central"
"""The value of `test-set` that keeps a supplied test set at the server."""
BY_CLASS = ("dirichlet", "classes", "pathological", "shards")
"""Partitions that assign samples by their classes."""
WITHOUT_TEST_SET = " | ".join(name for name, published in DATASETS.items() if not published.has_test_set)
"""The published data sets that never come with a test set, in the format of a setting's condition."""


@dataclass(frozen=True)
class DataSettings:
    """Settings for the samples and their assignment to clients, some of which require or exclude ``dataset=sites``."""

    dataset: str = setting(
        "digits",
        "a name (" + ", ".join(DATASETS) + "), a path (.npz, .csv, .parquet, a folder of images or .npy files, a "
        "folder from `datasets.save_to_disk`, a PFLlib directory), `hf:owner/name` on the Hugging Face Hub, a custom "
        f"function (`file:function`), or `{SITES}`: each node reads the data named in its node config",
        custom_kind="a function that returns the data",
        synonyms=("data",),
    )
    protocol: str = setting(
        "",
        "heart-disease: preparation of the tables; `flamby`: ten columns, complete rows, FLamby's test split, and "
        "scaling = client (Fed-Heart-Disease); empty: all columns and rows, with missing = impute",
        choices=("", FLAMBY),
        needs="dataset = heart-disease",
    )
    task: str = setting(
        "auto",
        "target of the predictions; `classification`: one of several classes; `multi-label`: any subset of K labels, "
        "each 0 or 1; `regression`: K values; `auto`: the task of the published data set, else classification",
        choices=("auto", CLASSIFICATION, MULTI_LABEL, REGRESSION),
    )
    data_dir: str = setting(
        "datasets", "directory that holds the data sets", place=True, resumable=True, affects_results=False
    )
    download: bool = setting(
        True,
        "let torchvision and `hf:` download missing data sets",
        resumable=True,
        affects_results=False,
    )
    label_column: str = setting(
        "",
        "tables: name of the column that contains the classes, or a rule such as `num > 0` for the classes 1 and 0; "
        "with `task` multi-label or regression, a comma-separated or JSON list of one or more columns; empty: `label`, "
        "else the last column",
        synonyms=("target-column",),
        samples="table",
    )
    input_columns: str = setting(
        "",
        "tables: comma-separated or JSON list of the columns that contain the samples: one column of images or texts, "
        "or the feature columns; empty: `text`, else the only image column, else all other columns",
        synonyms=("feature-columns", "text-column", "image-column"),
        samples="table",
    )
    group_column: str = setting(
        "",
        "tables, and `metadata.csv` in folders of images: name of the column that contains the natural groups; empty: "
        "`group`, if a table has one",
        samples="table",
    )
    categories: str = setting(
        "",
        "tables: categorical columns whose values are numbers, as a comma-separated or JSON list; string columns are "
        "always categorical",
        needs='protocol = ""',
        synonyms=("categorical-columns", "categorical"),
        samples="features",
    )
    missing: str = setting(
        "auto",
        "tables: treatment of missing values in input columns (`?`, empty, `NA`); `impute`: the mean over all training "
        "samples, with an indicator column; for categories, a separate category; `auto`: refuse, except in the raw "
        "tables of heart-disease",
        choices=("auto", "refuse", "impute"),
        needs='protocol = ""',
        samples="features",
    )
    min_category_rows: int = setting(
        10,
        "tables: minimum number of training samples for a one-hot column, which represents a category or the missing "
        "values of a column; sites use `min-rows` of their policy",
        minimum=1,
        needs='dataset != sites and protocol = ""',
        samples="features",
    )
    separator: str = setting(
        "auto",
        "tables: separator of the columns in a .csv file; `auto`: the separator that the header row contains",
        choices=("auto", "comma", "semicolon", "tab", "bar"),
        synonyms=("delimiter", "sep"),
        samples="table",
    )
    decimal: str = setting(
        "auto",
        "tables: decimal mark in a .csv file; `auto`: a point, or a comma if all numbers of a column fit and the "
        "separator is not a comma",
        choices=("auto", "point", "comma"),
        samples="table",
    )
    partition: str = setting(
        "dirichlet",
        "assignment of samples to clients; `natural`: each client receives one of the M largest groups; `given`: the "
        "partition of a PFLlib directory; without classes, the default is `iid`",
        choices=("dirichlet", "iid", "classes", "pathological", "shards", "natural", "file", "given"),
        needs="dataset != sites",
    )
    num_clients: int = setting(
        10, "number of clients M", minimum=1, maximum=1_000_000, synonyms=("clients", "n-clients")
    )
    dirichlet_alpha: float = setting(
        0.5,
        "concentration of the Dirichlet partition",
        needs="partition = dirichlet and dataset != sites",
        above=0,
        synonyms=("alpha",),
    )
    dirichlet_balanced: bool = setting(
        False,
        "`dirichlet`: a client that already has 1/M of all samples receives no samples of later classes",
        needs="partition = dirichlet and dataset != sites",
    )
    classes_per_client: int = setting(
        2,
        "number of classes S per client in the partitions `classes` and `pathological`",
        needs="partition = classes | pathological and dataset != sites",
        minimum=1,
    )
    samples_per_client: int = setting(
        0,
        "`classes` and `iid`: number of training samples per client, not counting its test samples; 0: use all samples",
        needs="partition = classes | iid and dataset != sites",
        minimum=0,
    )
    shards_per_client: int = setting(
        2,
        "number of shards per client in the partition `shards`, which sorts samples by label before cutting shards",
        needs="partition = shards and dataset != sites",
        minimum=1,
    )
    partition_file: str = setting(
        "",
        "JSON file for the partition `file`: a list of sample indices for each client",
        needs="partition = file and dataset != sites",
        place=True,
    )
    max_samples: int = setting(
        0,
        "number of samples to draw at random from the data set; 0: all",
        minimum=0,
        needs="dataset != sites",
    )
    train_samples: int = setting(
        0,
        "maximum number of training samples per client (FedACS: 50); 0: no limit",
        minimum=0,
        needs="dataset != sites",
    )
    test_set: str = setting(
        "supplied",
        "use of a test set that comes with the data (`x_test`, a folder or split `test`): `supplied` keeps it for "
        "tests and divides each class among the clients in proportion to their training samples of that class; "
        "`pooled` merges the test set with the training samples before they are assigned; `central` keeps it whole at "
        "the server, and each client sets some of its training samples aside",
        choices=("supplied", "pooled", CENTRAL_SET),
        needs=f"dataset != sites | {WITHOUT_TEST_SET}",
        earlier="pooled",
    )
    central_test_data: str = setting(
        "",
        "central test set: a file or folder at the server, in any format that the clients' data may have; the server "
        "scores its models on this data; if the file comes with a test set, only this test set is used",
        place=True,
        resumable=True,
        synonyms=("test-data", "global-test-data", "central-test-set", "server-test-data"),
    )
    split_column: str = setting(
        "",
        "name of a column that identifies the patient, or another unit with several rows: all rows of a patient at a "
        "client are in the same split, and the column is not a feature; `.npz`: arrays such as `patients_train`; "
        "folders of images: a column of `metadata.csv`; sites use the name in their policy",
        needs="partition = natural | file",
        synonyms=("patient-column", "split-groups", "subject-column"),
        samples="table",
    )
    stratify: bool = setting(
        True,
        "keep each client's class proportions in its test and validation splits; a class with a single sample is used "
        "for training; sites use the rule in their policy",
        needs="dataset != sites and partition != given or dataset != sites and validation-fraction > 0",
        earlier=False,
        synonyms=("stratified",),
    )
    folds: int = setting(
        0,
        "number of folds of cross-validation: each client's samples are divided into folds, and each fold is the test "
        "split of one training run; at sites, the policy must allow them; 0: one test split",
        needs="partition != given",
        minimum=0,
        maximum=1000,
        synonyms=("cross-validation", "cv", "k-fold", "kfold", "n-splits"),
    )
    fold: int = setting(
        0,
        "number of the fold that is the test split; 0: a run trains once for each fold",
        needs="folds > 0",
        minimum=0,
        limit="folds",
    )
    split_seed: int = setting(
        -1,
        "seed for the subset of `max-samples`, the partition, the splits and the folds: runs with equal values have "
        "the same samples in each split, whatever their seed; -1: the seed of the run",
        needs="dataset != sites",
        minimum=-1,
        maximum=2**31 - 1,
        synonyms=("data-seed", "partition-seed"),
    )
    test_fraction: float = setting(
        0.25,
        "fraction of each client's samples held out for testing, unless a test set is supplied; sites use the fraction "
        "in their policy",
        needs="partition != given and dataset != sites and folds = 0",
        above=0,
        maximum=0.9,
    )
    validation_fraction: float = setting(
        0.0,
        "fraction of each client's training samples held out for validation, which selects the best round",
        minimum=0,
        maximum=0.9,
        synonyms=("val-fraction", "val-split", "validation-split"),
    )
    scaling: str = setting(
        "auto",
        "training samples whose mean and standard deviation standardise features: the samples of all clients "
        "(`federation`), or of each `client`; `auto`: federation, or as in the protocol",
        choices=("auto", "federation", "client"),
        needs="dataset != sites",
        samples="features",
    )
    shift: str = setting(
        "none",
        "FedDRM's covariate shift, which alters each client's images differently",
        choices=("none", "low", "mid", "high", "grid"),
        needs="dataset != sites",
        samples="image",
    )
    augment: str = setting(
        "none",
        "augmentation of images; `crop`: crop training images to 90-100 % of their area; `resized-crop`: also to other "
        "aspect ratios, and crop test images once (FedDRM's program); `crop-flip`: pad by 4 black pixels, crop to the "
        "original size, and mirror half of the images (FedRep's program); `flip`: mirror half of the images",
        choices=("none", "crop", "resized-crop", "crop-flip", "flip"),
        samples="image",
    )
    transforms: str = setting(
        "",
        "torchvision.transforms.v2 transforms for training images, applied after `augment`, as in `RandomRotation(15), "
        "ColorJitter(brightness=0.2)`; they process one image at a time, which is slower",
        samples="image",
    )
    image_size: int = setting(
        0,
        "height and width to which image files are resized; 0: the images' own size, or 64 if their sizes differ",
        minimum=0,
        maximum=4096,
        needs="dataset != sites",
        samples="image",
    )
    text_length: int = setting(
        0,
        "number of words used from each text; 0: the data set's default",
        minimum=0,
        maximum=10_000,
        needs="dataset != sites",
        samples="text",
    )
    sample_kind: str = setting(
        "auto",
        "kind of the samples; `image`: whole-number pixels; `series`: time series (N, T, F) of T steps and F channels; "
        "`tokens`: word indices; `auto`: derived from the shape and the values or, with sites, the most common kind "
        "among them",
        choices=("auto", "image", "image-float", "features", "series", "text", "tokens"),
    )
    input_shape: str = setting(
        "",
        "sites: shape of a sample, as in 3x64x64 (channels, height, width), 48x6 (time steps, channels), 20 "
        "or 200; empty: the most common shape",
        needs="dataset = sites",
    )
    classes: str = setting(
        "",
        "sites: comma-separated or JSON list of the names of the classes, labels or values; empty: the names at all "
        "sites, sorted",
        needs="dataset = sites",
    )
    vocabulary: int = setting(
        20_000,
        "number of most frequent words that have their own token; sites: size of the vocabulary that words are hashed "
        "into",
        minimum=3,
        maximum=10_000_000,
        samples="text",
    )
    feature_mean: str = setting(
        "",
        "sites: mean that is subtracted from each feature, one number for all features or one per feature; empty: the "
        "mean over all sites",
        needs="dataset = sites",
    )
    feature_std: str = setting(
        "",
        "sites: divisor for the features, one number for all of them or one per feature; empty: the standard "
        "deviation over all sites",
        needs="dataset = sites",
    )
    target_mean: str = setting(
        "",
        "sites, regression: mean subtracted from each value, as in feature-mean; empty: the mean over all sites",
        needs="dataset = sites and task = regression",
    )
    target_std: str = setting(
        "",
        "sites, regression: divisor for each value, as in feature-std; empty: the standard deviation over all sites",
        needs="dataset = sites and task = regression",
    )
    feature_names: str = setting(
        "",
        "sites: comma-separated or JSON list of the feature names in order; empty: the sites' column names",
        needs="dataset = sites",
    )
    encoder: str = setting(
        "",
        "sites: encoding of the tables' columns as JSON, in the format that Posy stores with a run; `none`: no "
        "encoding; empty: the sites agree on an encoding if their tables have categories, or if `missing = impute`",
        needs="dataset = sites",
    )
    share_class_counts: bool = setting(
        False, "sites: send each site's number of samples per class to the server", needs="dataset = sites"
    )

    def __post_init__(self) -> None:
        """Check that there are at least two folds, and that a central test set is unique and has a scale."""
        if self.folds == 1:
            raise SettingsError("folds = 1: set at least 2 folds, or 0 for one test split")
        texts = [f"central-test-data = {self.central_test_data!r}"] if self.central_test_data else []
        texts += [f"test-set = {CENTRAL_SET!r}"] if self.test_set == CENTRAL_SET else []
        if len(texts) > 1:
            raise SettingsError(f"{' and '.join(texts)}: a run has one central test set; remove one of the settings")
        if texts and self.scaling == "client":
            raise SettingsError(
                f"{texts[0]} cannot be combined with scaling = 'client': a central sample belongs to no client, so no "
                "scale applies to it; set scaling = 'federation'"
            )

    @property
    def target(self) -> str:
        """The target in :mod:`posy.metrics`: from the setting ``task``, else from the data set, else classes."""
        if self.task in TARGETS:
            return TARGETS[self.task]
        return DATASETS[self.dataset].target if self.dataset in DATASETS else CLASSES


def path_of(name: str, data_dir: str | Path) -> Path:
    """Return the path of a data set, looked up first in ``data_dir``, then in the run's working directory.

    Raise :class:`SettingsError` if neither path exists.
    """
    candidates = dict.fromkeys(absolute(str(folder)) / expanded(name) for folder in (data_dir, "."))
    existing = next((path for path in candidates if name and exists(path)), None)
    if existing is None:
        near = difflib.get_close_matches(name, DATASETS, n=2)
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        raise SettingsError(
            f"dataset = {name!r} is neither a name nor a path; {hint}names: {', '.join(DATASETS)}; "
            f"paths looked for: {', '.join(map(str, candidates))}"
        )
    return existing


def located(settings: DataSettings) -> DataSettings:
    """Return the settings with the data set's absolute path, and with the settings that come with the data, if any.

    The name of a published data set stays unchanged. So does a path that does not exist on this machine, because it may
    exist on the nodes.
    """
    if settings.target != CLASSES and settings.partition == DataSettings.partition:
        settings = replace(settings, partition="iid")
    if published := DATASETS.get(settings.dataset):
        return _with_clients(settings, published)
    if settings.dataset == SITES:
        return settings
    try:
        path = path_of(settings.dataset, settings.data_dir)
    except SettingsError:
        return settings
    partitioned = is_pfllib(path) and settings.partition in (DataSettings.partition, "natural")
    return replace(settings, dataset=str(path), partition="given" if partitioned else settings.partition)


def check_subset(settings: DataSettings) -> None:
    """Reject ``max-samples`` with a partition that names its samples, after :func:`located` has set the partition."""
    size = settings.max_samples
    if size and settings.partition in ("given", "file"):
        raise SettingsError(
            f"max-samples = {size} cannot be combined with a partition that names its samples (a PFLlib directory, or "
            "partition = 'file'); set max-samples = 0"
        )


def _with_clients(settings: DataSettings, published: Published) -> DataSettings:
    """Return the settings for a published data set, which may define the clients and the categorical columns."""
    if not published.clients:
        return settings
    is_flamby, is_default = settings.protocol == FLAMBY, settings.partition in (DataSettings.partition, "natural")
    if is_default and settings.num_clients == DataSettings.num_clients:
        settings = replace(settings, num_clients=published.clients)
    if is_default:
        settings = replace(settings, partition="given" if is_flamby else "natural")
    if is_flamby:
        return replace(settings, scaling="client" if settings.scaling == "auto" else settings.scaling)
    missing = "impute" if settings.missing == "auto" else settings.missing
    return replace(settings, categories=settings.categories or published.categories, missing=missing)
