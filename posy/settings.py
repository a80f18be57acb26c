"""Settings of a run: flat kebab-case keys, read once into frozen dataclasses.

The fields below are the only place where a key, its default, its range and its meaning are written.
``[tool.flwr.app.config]`` in ``pyproject.toml`` repeats the defaults (Flower admits only keys that
stand there); ``posy settings`` prints that table, and a test compares the two.
"""

import dataclasses
import difflib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

Scalar = bool | int | float | str
T = TypeVar("T")
LARGEST = float.fromhex("0x1.fffffep127")
"""Numbers are those of float32, in which models are trained."""
LONGEST = 120
"""Characters of a value that a message repeats."""


class RunError(RuntimeError):
    """A run has failed: its message is one line for people."""


class NothingTrainedError(RunError):
    """A run has ended without one accepted reply."""


class DivergedError(RunError):
    """A run has come to its end, but its training has left the range of useful numbers."""


class SettingsError(ValueError):
    """A setting is unknown, of the wrong type, or outside its range."""


@dataclass(frozen=True)
class Rule:
    """What a setting may be, and what it means."""

    help: str
    choices: tuple[str, ...] = ()
    minimum: float = -math.inf
    above: float = -math.inf
    maximum: float = math.inf

    def describe(self, kind: type) -> str:
        """Return the allowed values in words."""
        if self.choices:
            return "one of " + ", ".join(self.choices)
        noun = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}[kind]
        bounds = []
        if self.minimum > -math.inf:
            bounds.append(f">= {self.minimum}")
        if self.above > -math.inf:
            bounds.append(f"> {self.above}")
        if self.maximum < math.inf:
            bounds.append(f"<= {self.maximum}")
        return noun + (" " + " and ".join(bounds) if bounds else "")

    def admits(self, value: Any) -> bool:
        """Tell whether a value of the right type lies in the range."""
        if self.choices:
            return value in self.choices
        if isinstance(value, str):
            return "\0" not in value  # no path or name can hold it
        return abs(value) <= LARGEST and self.minimum <= value <= self.maximum and value > self.above


MOST = 1_000_000_000
"""The largest whole number of a setting that names no other."""


def setting(
    default: Any,
    help: str,  # noqa: A002 - the word argparse and click use for it
    *,
    choices: Iterable[str] = (),
    minimum: float = -math.inf,
    above: float = -math.inf,
    maximum: float = math.inf,
) -> Any:
    """Declare a field of a settings dataclass with its default, its meaning and its range.

    A whole number is at most a thousand million, unless less is said: what comes after may reckon in 32 bits.
    """
    if type(default) is int and maximum == math.inf:
        maximum = MOST
    rule = Rule(help, tuple(choices), minimum, above, maximum)
    return field(default=default, metadata={"rule": rule})


PARTITIONS = ("dirichlet", "iid", "classes", "shards", "natural", "file", "given")
DATASETS = (
    "digits",
    "mnist",
    "fmnist",
    "cifar10",
    "cifar100",
    "cifar20",
    "emnist-letters",
    "femnist",
    "tiny-imagenet",
    "agnews",
    "sent140",
    "kvasir",
    "fedisic",
)
SITES = "sites"
"""The `dataset` of a run whose nodes hold their own data."""
SITES_NEED_NODES = (
    "a simulation has no nodes that hold data; start a SuperLink and a SuperNode at each site, and say where the "
    "SuperLink is with --superlink"
)

SAMPLE_KINDS = ("auto", "image", "image-float", "features", "text", "tokens")
MODELS = (
    "auto",
    "linear",
    "mlp",
    "cnn",
    "cnn-3fc",
    "resnet18-gn",
    "resnet18-bn",
    "lenet-gn",
    "fasttext",
    "textcnn",
)


@dataclass(frozen=True)
class DataSettings:
    """Which data, and how it is spread over the clients."""

    dataset: str = setting(
        "digits",
        "a name (" + ", ".join(DATASETS) + "), a path (.npz, .csv, an image folder, a PFLlib directory), or "
        f"`{SITES}`: each node reads its own, named in its node config",
    )
    data_dir: str = setting("datasets", "directory that holds the data sets")
    download: bool = setting(True, "let torchvision download what is missing, where it can")
    partition: str = setting(
        "dirichlet",
        "how samples are assigned to clients; `natural`: a group each, the largest M; `given`: that of a PFLlib set",
        choices=PARTITIONS,
    )
    num_clients: int = setting(10, "number of clients M", minimum=1, maximum=1_000_000)
    dirichlet_alpha: float = setting(0.5, "concentration of the Dirichlet partition", above=0)
    classes_per_client: int = setting(2, "S of the pathological partition `classes`", minimum=1)
    samples_per_client: int = setting(
        0, "`classes` and `iid`: give each client so many training samples, test samples on top; 0: all", minimum=0
    )
    shards_per_client: int = setting(2, "label-homogeneous shards per client of the partition `shards`", minimum=1)
    partition_file: str = setting("", "JSON file of the partition `file`: lists of sample indices, one a client")
    max_samples: int = setting(0, "use a random subset of so many samples of the data set; 0: all", minimum=0)
    train_samples: int = setting(0, "cap on the training samples of each client (FedACS: 50); 0: none", minimum=0)
    test_fraction: float = setting(0.25, "part of each client's samples kept for its test", above=0, maximum=0.9)
    shift: str = setting(
        "none",
        "FedDRM's covariate shift of client i's images",
        choices=("none", "low", "mid", "high", "grid"),
    )
    augment: str = setting("none", "training augmentation of images", choices=("none", "crop"))
    sample_kind: str = setting(
        "auto",
        "sites: what a sample is; image: whole-number pixels, tokens: numbers of words; `auto`: what most sites hold",
        choices=SAMPLE_KINDS,
    )
    input_shape: str = setting(
        "", "sites: shape of a sample, as in 3x64x64 (channels, height, width), 20 or 200; empty: what most sites hold"
    )
    classes: str = setting(
        "", "sites: names of the classes with commas between, or a JSON list; empty: all that the sites know, sorted"
    )
    vocabulary: int = setting(
        20_000, "sites: numbers that the words of a text are hashed to", minimum=3, maximum=10_000_000
    )
    feature_mean: str = setting(
        "", "sites: what is subtracted from features, one number for all or one for each; empty: pooled over the sites"
    )
    feature_std: str = setting(
        "", "sites: what features are divided by, one number for all or one for each; empty: pooled over the sites"
    )
    feature_names: str = setting(
        "",
        "sites: names of the features in their order, with commas between, or a JSON list; empty: what .csv files say",
    )
    share_class_counts: bool = setting(False, "sites: tell the server how many samples of each class a site has")


@dataclass(frozen=True)
class TrainSettings:
    """The local training of one client."""

    model: str = setting("auto", "network; `auto` picks one that suits the data", choices=MODELS)
    local_epochs: int = setting(2, "passes over the client's training data a round", minimum=1)
    local_steps: int = setting(0, "SGD steps a round instead of epochs; 0: use local-epochs", minimum=0)
    batch_size: int = setting(10, "samples in a mini-batch", minimum=1)
    lr: float = setting(0.05, "learning rate", above=0)
    lr_schedule: str = setting("constant", "learning rate over the rounds", choices=("constant", "cosine"))
    momentum: float = setting(0.0, "SGD momentum, fresh each round", minimum=0, maximum=0.9999)
    weight_decay: float = setting(0.0, "L2 weight decay", minimum=0)
    max_grad_norm: float = setting(
        0.0, "L2 norm that the gradient of a mini-batch's loss is clipped to, for each model; 0: off", minimum=0
    )
    device: str = setting("auto", "`auto`, `cpu`, `cuda` or `cuda:N`")
    threads: int = setting(
        1, "PyTorch threads of a client process on the CPU; 0: leave as it is", minimum=0, maximum=1024
    )
    stack: str = setting(
        "auto",
        "train several models (FedFew's K; in the in-process engine also clients) one after the other or as one "
        "stacked computation (vmap); `auto`: vmap on a GPU, and on a CPU for small networks without convolutions",
        choices=("auto", "loop", "vmap"),
    )
    precision: str = setting(
        "float32",
        "arithmetic of matrix products and convolutions: `tf32` on GPUs that have it, `bfloat16` under autocast; "
        "parameters and messages stay float32",
        choices=("float32", "tf32", "bfloat16"),
    )
    dp_clip: float = setting(
        0.0, "local differential privacy: L2 norm that a client's update is clipped to; 0: off", minimum=0
    )
    dp_epsilon: float = setting(1.0, "epsilon of one reply's Gaussian noise", above=0)
    dp_delta: float = setting(1e-5, "delta of one reply's Gaussian noise", above=0, maximum=0.5)
    dp_sensitivity: float = setting(0.0, "L2 sensitivity that the noise is for; 0: twice dp-clip", minimum=0)


@dataclass(frozen=True)
class RunSettings:
    """The run: method, rounds, participation, evaluation, what it leaves."""

    method: str = setting("fedfew", "which method to run")
    engine: str = setting("ray", "what delivers the messages", choices=("ray", "in-process"))
    experiment: str = setting("", "YAML file of settings (a name in experiments/ or a path), under the keys given")
    num_server_rounds: int = setting(15, "communication rounds", minimum=1)
    fraction_train: float = setting(1.0, "part of the clients sampled in each round", above=0, maximum=1)
    min_train_replies: int = setting(1, "good replies that a round needs to change the server's state", minimum=1)
    max_update_norm: float = setting(
        0.0, "L2 norm of a client's update beyond which its reply is dropped; 0: no limit", minimum=0
    )
    round_timeout: float = setting(3600.0, "seconds to wait for the replies of a round", above=0, maximum=1e8)
    evaluate_every: int = setting(1, "rounds between evaluations (the last round is always one)", minimum=1)
    system_accuracy: str = setting(
        "auto",
        "accuracy on the pooled test sets: FedDRM's routing, else a majority vote; `auto`: FedDRM only",
        choices=("auto", "on", "off"),
    )
    seed: int = setting(42, "seed of everything random", minimum=0, maximum=2**31 - 1)
    output_dir: str = setting("runs", "directory that holds the runs")
    run_name: str = setting("", "folder of this run; empty: method, data set, seed and time")
    save_models: bool = setting(True, "write the server's state and the personal models as safetensors")
    min_clients: int = setting(0, "clients that must be there for the first round; 0: all num-clients", minimum=0)
    join_timeout: float = setting(300.0, "seconds to wait for the clients before the first round", above=0, maximum=1e8)
    secure_aggregation: bool = setting(False, "SecAgg+: the server sees sums only (not possible on Flower 1.39)")
    checkpoint_every: int = setting(10, "rounds between checkpoints (the last round is always one); 0: none", minimum=0)
    resume: str = setting("", "name of a run in output-dir to go on with, from its last checkpoint")
    resume_keys: str = setting(
        "", "keys given beside resume although they have their default value; `posy run` fills it in"
    )
    state_memory: int = setting(
        4096, "MiB that the clients' states may take in an in-process run, the rest goes to disk; 0: all", minimum=0
    )


def key_of(name: str, prefix: str = "") -> str:
    """Return the kebab-case key of a field: ``mu`` of ``fedfew`` is ``fedfew-mu``."""
    return "-".join(filter(None, (prefix, name.replace("_", "-"))))


def fields_of(cls: type, prefix: str = "") -> dict[str, dataclasses.Field[Any]]:
    """Return the fields of a settings dataclass by key."""
    return {key_of(f.name, prefix): f for f in dataclasses.fields(cls)}


def default_of(declared: dataclasses.Field[Any]) -> Scalar:
    """Return the default of a field."""
    default: Any = declared.default
    assert isinstance(default, Scalar)
    return default


def read(cls: type[T], config: Mapping[str, Any], prefix: str = "", where: str = "the run config") -> T:
    """Build one settings dataclass from a flat mapping.

    Parameters
    ----------
    cls : type
        A frozen dataclass whose fields were declared with :func:`setting`.
    config : Mapping
        Flat settings; keys of other dataclasses are left alone, missing keys take their defaults.
    prefix : str
        Prefix of the keys: the name of a method, or empty.
    where : str
        Where the values come from, for the message of an error.

    Raises
    ------
    SettingsError
        If a value has the wrong type or lies outside its range.
    """
    values = {}
    for key, declared in fields_of(cls, prefix).items():
        if key in config:
            values[declared.name] = checked(key, config[key], declared, where)
    return cls(**values)


def checked(key: str, value: Any, declared: dataclasses.Field[Any], where: str) -> Any:
    """Return a value in the type of its field, or raise :class:`SettingsError`."""
    rule: Rule = declared.metadata["rule"]
    kind: type = type(declared.default)
    if kind is float and type(value) is int and abs(value) <= LARGEST:
        value = float(value)
    if type(value) is not kind or not rule.admits(value):  # exactly: a bool is an int to Python
        allowed = rule.describe(kind)
        if type(value) in (int, float) and rule.maximum == math.inf and value > LARGEST:
            allowed += f", at most {LARGEST:.4g}"
        near = nearest(value, rule.choices) if isinstance(value, str) else ""
        hint = f"; did you mean {near}?" if near else ""
        raise SettingsError(f"{key} = {shown(value)} in {where}: it must be {allowed} ({rule.help}){hint}")
    return value


def shown(value: Any) -> str:
    """Return a value as a message repeats it: on one line, and not all of what is very long."""
    try:
        text = repr(value)
    except ValueError:  # Python writes whole numbers of at most 4,300 digits
        return "a number of thousands of digits"
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}… ({len(text)} characters)"


SYNONYMS = {
    "algo": "method",
    "algorithm": "method",
    "alpha": "dirichlet-alpha",
    "arch": "model",
    "architecture": "model",
    "batch": "batch-size",
    "client-fraction": "fraction-train",
    "clients": "num-clients",
    "data": "dataset",
    "epochs": "local-epochs",
    "fraction": "fraction-train",
    "fraction-fit": "fraction-train",
    "gpu": "device",
    "join-ratio": "fraction-train",
    "l2": "weight-decay",
    "learning-rate": "lr",
    "min-available-clients": "min-clients",
    "n-clients": "num-clients",
    "n-rounds": "num-server-rounds",
    "name": "run-name",
    "net": "model",
    "network": "model",
    "num-epochs": "local-epochs",
    "num-rounds": "num-server-rounds",
    "output": "output-dir",
    "participation": "fraction-train",
    "random-seed": "seed",
    "rounds": "num-server-rounds",
    "strategy": "method",
    "timeout": "round-timeout",
    "wd": "weight-decay",
}
"""Words that people type for a setting, as other tools call it."""


def nearest(word: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Return the known word that is meant, or an empty text; ``cutoff`` (0..1) says how alike they must be."""
    near = difflib.get_close_matches(word.lower().replace("_", "-"), list(known), 1, cutoff)
    return near[0] if near else ""


def meant(key: str, known: Iterable[str]) -> str:
    """Return the setting that is meant by a key that is none, several with `or` between them, or an empty text."""
    known = list(known)
    word = key.lower().replace("_", "-")
    if word in known:
        return word
    if SYNONYMS.get(word) in known:
        return SYNONYMS[word]
    parts = [name for name in known if name.endswith(f"-{word}")]  # as in mu, models
    return " or ".join(parts[:3]) or nearest(word, known)


def check_keys(config: Mapping[str, Any], known: Iterable[str], where: str) -> None:
    """Raise :class:`SettingsError` for keys that are not settings, naming what is meant."""
    known = list(known)
    for key in config:
        if key not in known:
            name = meant(key, known)
            hint = f"did you mean {name}?" if name else "`posy settings` lists all keys"
            raise SettingsError(f"{key if key.isprintable() else shown(key)} in {where} is not a setting; {hint}")


def as_config(settings: Any, prefix: str = "") -> dict[str, Scalar]:
    """Return a settings dataclass as a flat mapping of kebab-case keys."""
    return {key_of(f.name, prefix): getattr(settings, f.name) for f in dataclasses.fields(settings)}


@dataclass(frozen=True)
class Settings:
    """All settings of a run."""

    run: RunSettings
    data: DataSettings
    train: TrainSettings
    method: Any

    def as_config(self) -> dict[str, Scalar]:
        """Return the settings as flat keys, the method's own under its name."""
        groups = (as_config(self.run), as_config(self.data), as_config(self.train))
        merged = {key: value for group in groups for key, value in group.items()}
        return {**merged, **as_config(self.method, self.run.method)}

    def to_json(self) -> str:
        """Return the settings as one line of JSON, as they travel to the clients."""
        return json.dumps(self.as_config())
