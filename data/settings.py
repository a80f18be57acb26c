"""The settings of the data: which samples, and how they are spread over the clients."""

import difflib
from dataclasses import dataclass, replace
from pathlib import Path

from posy.data.pfllib import is_pfllib
from posy.data.published import DATASETS
from posy.paths import absolute, exists, expanded
from posy.settings import SettingsError, setting

SITES = "sites"
"""The `dataset` of a run whose nodes hold their own data."""


@dataclass(frozen=True)
class DataSettings:
    """Which data, and how it is spread over the clients; some settings are for sites, and some are not."""

    dataset: str = setting(
        "digits",
        "a name (" + ", ".join(DATASETS) + "), a path (.npz, .csv, .parquet, a folder of images, of .npy files, of "
        "`datasets.save_to_disk`, a PFLlib directory), `hf:owner/name` of the Hugging Face Hub, a function of "
        f"one's own, or `{SITES}`: each node reads its own, named in its node config",
        or_own="a function that returns the data",
        synonyms=("data",),
    )
    data_dir: str = setting(
        "datasets", "directory that holds the data sets", place=True, resumable=True, affects_results=False
    )
    download: bool = setting(
        True,
        "let torchvision, and `hf:`, download what is missing, where they can",
        resumable=True,
        affects_results=False,
    )
    label_column: str = setting(
        "", "tables: name of the column with the classes; empty: `label`, else the last", synonyms=("target-column",)
    )
    input_columns: str = setting(
        "",
        "tables: names of the columns with the samples, one of images or texts or those of the features, with commas "
        "between, or a JSON list; empty: `text`, the only one of images, or all others",
        synonyms=("feature-columns", "text-column", "image-column"),
    )
    group_column: str = setting(
        "", "tables: name of the column with the natural groups; empty: `group`, if it is there"
    )
    partition: str = setting(
        "dirichlet",
        "how samples are assigned to clients; `natural`: a group each, the largest M; `given`: that of a PFLlib set",
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
        "`dirichlet`: a client with its M-th part of all samples gets none of the classes that follow",
        needs="partition = dirichlet and dataset != sites",
    )
    classes_per_client: int = setting(
        2,
        "S of the partitions `classes` and `pathological`",
        needs="partition = classes | pathological and dataset != sites",
        minimum=1,
    )
    samples_per_client: int = setting(
        0,
        "`classes` and `iid`: training samples of each client, with test samples on top; 0: all",
        needs="partition = classes | iid and dataset != sites",
        minimum=0,
    )
    shards_per_client: int = setting(
        2,
        "label-homogeneous shards per client of the partition `shards`",
        needs="partition = shards and dataset != sites",
        minimum=1,
    )
    partition_file: str = setting(
        "",
        "JSON file of the partition `file`: a list of sample indices for each client",
        needs="partition = file and dataset != sites",
        place=True,
    )
    max_samples: int = setting(
        0,
        "size of a random subset of the data set that is used in its place; 0: all",
        minimum=0,
        needs="dataset != sites",
    )
    train_samples: int = setting(0, "cap on the training samples of each client (FedACS: 50); 0: none", minimum=0)
    test_set: str = setting(
        "supplied",
        "a test set that comes with the data (`x_test`, a folder or split `test`): `supplied` keeps it for tests and "
        "divides it among the clients, each class in proportion to their training samples; `pooled` joins it with the "
        "training samples before they are assigned",
        choices=("supplied", "pooled"),
        earlier="pooled",
    )
    test_fraction: float = setting(
        0.25,
        "fraction of each client's samples kept for its test, where no test set is supplied",
        needs="partition != given",
        above=0,
        maximum=0.9,
    )
    validation_fraction: float = setting(
        0.0,
        "fraction of each client's training samples on which it does not train: the best round is chosen on them",
        minimum=0,
        maximum=0.9,
        synonyms=("val-fraction", "val-split", "validation-split"),
    )
    shift: str = setting(
        "none",
        "FedDRM's covariate shift of client i's images",
        choices=("none", "low", "mid", "high", "grid"),
        needs="dataset != sites",
    )
    augment: str = setting(
        "none",
        "augmentation of images; `crop`: training images to 90-100 % of their area; `resized-crop`: to other aspect "
        "ratios too, and test images once (FedDRM's program); `crop-flip`: with 4 black pixels around, to the size "
        "that they were, and half of them mirrored (FedRep's program); `flip`: half of them mirrored",
        choices=("none", "crop", "resized-crop", "crop-flip", "flip"),
    )
    transforms: str = setting(
        "",
        "transforms of torchvision.transforms.v2 on training images, after `augment`, as in `RandomRotation(15), "
        "ColorJitter(brightness=0.2)`; they take one image after the other, which is slower",
    )
    image_size: int = setting(
        0,
        "height and width that image files are resized to; 0: their own, or 64 where they differ",
        minimum=0,
        maximum=4096,
        needs="dataset != sites",
    )
    text_length: int = setting(
        0,
        "words of a text that are used; 0: as many as the data set has",
        minimum=0,
        maximum=10_000,
        needs="dataset != sites",
    )
    sample_kind: str = setting(
        "auto",
        "sites: what a sample is; image: whole-number pixels, tokens: numbers of words; `auto`: what most sites hold",
        choices=("auto", "image", "image-float", "features", "text", "tokens"),
        needs="dataset = sites",
    )
    input_shape: str = setting(
        "",
        "sites: shape of a sample, as in 3x64x64 (channels, height, width), 20 or 200; empty: what most sites hold",
        needs="dataset = sites",
    )
    classes: str = setting(
        "",
        "sites: names of the classes with commas between, or a JSON list; empty: all that the sites know, sorted",
        needs="dataset = sites",
    )
    vocabulary: int = setting(
        20_000,
        "most frequent words of the texts, which get a number each; sites: numbers that words are hashed to",
        minimum=3,
        maximum=10_000_000,
    )
    feature_mean: str = setting(
        "",
        "sites: what is subtracted from features, one number for all or one for each; empty: pooled over the sites",
        needs="dataset = sites",
    )
    feature_std: str = setting(
        "",
        "sites: what features are divided by, one number for all or one for each; empty: pooled over the sites",
        needs="dataset = sites",
    )
    feature_names: str = setting(
        "",
        "sites: names of the features in their order, with commas between, or a JSON list; empty: what .csv files say",
        needs="dataset = sites",
    )
    share_class_counts: bool = setting(
        False, "sites: tell the server how many samples of each class a site has", needs="dataset = sites"
    )


def path_of(name: str, data_dir: str | Path) -> Path:
    """Return the path of a data set, looked for in ``data_dir`` first, then where the run was started."""
    places = dict.fromkeys(absolute(str(folder)) / expanded(name) for folder in (data_dir, "."))
    found = next((place for place in places if name and exists(place)), None)
    if found is None:
        near = difflib.get_close_matches(name, DATASETS, n=2)
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        raise SettingsError(
            f"dataset = {name!r} is neither a name nor a path; {hint}names: {', '.join(DATASETS)}; "
            f"paths looked for: {', '.join(map(str, places))}"
        )
    return found


def located(settings: DataSettings) -> DataSettings:
    """Return the settings with the path of the data set, if it is one, and with the partition that it brings along.

    One that leads nowhere is left as it is: it may be one of the nodes.
    """
    if settings.dataset in (*DATASETS, SITES):
        return settings
    try:
        path = path_of(settings.dataset, settings.data_dir)
    except SettingsError:
        return settings
    given = is_pfllib(path) and settings.partition in (DataSettings.partition, "natural")
    return replace(settings, dataset=str(path), partition="given" if given else settings.partition)
