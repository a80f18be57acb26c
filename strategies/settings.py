"""The settings of a run: its method and rounds, the data, the training, and the method's own."""

import json
import math
from dataclasses import dataclass, replace
from typing import Any

from posy.data.settings import DataSettings
from posy.extensions import word_of
from posy.models.catalogue import MODELS, PRETRAINED
from posy.paths import found_at, sha256_of
from posy.settings import Scalar, Search, SettingsError, as_config, setting, settings_of

AUTO, OFF = "auto", "off"
"""The words in place of numbers: Posy finds one by itself, or there is none."""


@dataclass(frozen=True)
class TrainSettings:
    """The local training of one client."""

    model: str = setting(
        "auto",
        "network; `auto` picks one that suits the data; one's own is a function that takes the task and returns a "
        "torch.nn.Module, or torchvision:NAME",
        choices=("auto", *MODELS),
        or_own="a network",
        synonyms=("arch", "architecture", "net", "network"),
    )
    weights: str = setting(
        "",
        "safetensors file that the network starts from, by the names of its tensors; a head of other classes starts "
        "afresh; a .txt of word vectors (GloVe) is for the embedding alone; `torchvision`: torchvision's own; empty: "
        "random weights. Where the path leads to no file, one of its name in data-dir is taken",
        place=True,
        path_or=PRETRAINED,
        synonyms=("pretrained", "checkpoint"),
    )
    weights_sha256: str = setting(
        "",
        "SHA-256 of that file, which a run computes when it begins; Posy refuses nodes with another file",
        needs='weights != "" | torchvision',
    )
    frozen: str = setting(
        "", "layers that are neither trained nor sent, with commas between them", synonyms=("freeze",)
    )
    linear_init: str = setting(
        "default",
        "initial weights of linear layers: PyTorch's, or Kaiming's normal distribution with biases of 0 (FedDRM)",
        choices=("default", "kaiming"),
    )
    local_epochs: int = setting(
        2,
        "passes over the client's training data a round",
        needs="local-steps = 0",
        minimum=1,
        synonyms=("epochs", "num-epochs"),
    )
    local_steps: int = setting(0, "SGD steps a round instead of epochs; 0: use local-epochs", minimum=0)
    batch_size: int = setting(10, "samples in a mini-batch", minimum=1, synonyms=("batch",))
    lr: float = setting(
        0.05, "learning rate", above=0, synonyms=("learning-rate",), search=Search(0.005, 0.5, log=True)
    )
    lr_schedule: str = setting(
        "constant",
        "learning rate over the rounds; it is multiplied by lr-decay every round, or every lr-step rounds",
        choices=("constant", "cosine", "exponential", "step"),
    )
    lr_decay: float = setting(
        0.99,
        "factor of the exponential and the step schedule",
        needs="lr-schedule = exponential | step",
        above=0,
        maximum=1,
    )
    lr_step: int = setting(10, "rounds between two steps of the step schedule", needs="lr-schedule = step", minimum=1)
    loss: str = setting(
        "cross-entropy",
        "what local training minimises for each sample; one's own is a function that takes logits (B, C) and labels "
        "(B,) and returns losses (B,)",
        choices=("cross-entropy",),
        or_own="a loss",
        synonyms=("criterion", "objective"),
    )
    class_weights: str = setting(
        "none",
        "what a sample counts in the loss: `balanced` lets all classes of a client count alike",
        choices=("none", "balanced"),
        synonyms=("class-weight",),
    )
    optimizer: str = setting(
        "sgd",
        "what makes steps of gradients; where a method prescribes plain steps, they stay",
        choices=("sgd", "adam", "adamw"),
        synonyms=("optimiser", "opt"),
    )
    optimizer_state: str = setting(
        "fresh",
        "momentum, and Adam's moments: `fresh` in each training, or `kept` by the client from its last round",
        choices=("fresh", "kept"),
        synonyms=("optimiser-state",),
    )
    momentum: float = setting(0.0, "momentum of SGD", needs="optimizer = sgd", minimum=0, maximum=0.9999)
    weight_decay: float = setting(
        0.0, "L2 weight decay; AdamW's is apart from its moments", minimum=0, synonyms=("l2", "wd")
    )
    adam_beta1: float = setting(
        0.9, "decay of Adam's mean of gradients", needs="optimizer = adam | adamw", minimum=0, maximum=0.9999
    )
    adam_beta2: float = setting(
        0.999,
        "decay of Adam's mean of squared gradients",
        needs="optimizer = adam | adamw",
        minimum=0,
        maximum=0.999999,
    )
    adam_epsilon: float = setting(
        1e-8, "number that Adam adds to the root of that mean", needs="optimizer = adam | adamw", above=0
    )
    max_grad_norm: float = setting(
        0.0, "L2 norm that the gradient of a mini-batch's loss is clipped to, for each model; 0: off", minimum=0
    )
    device: str = setting(
        "auto", "`auto`, `cpu`, `cuda` or `cuda:N`", resumable=True, affects_results=False, synonyms=("gpu",)
    )
    threads: int = setting(
        1, "PyTorch threads of a client process on the CPU; 0: leave as it is", minimum=0, maximum=1024, resumable=True
    )
    stack: str = setting(
        "auto",
        "train several models (FedFew's K; in one process also those of several clients) one after the other or as "
        "one stacked computation (vmap); `auto`: vmap on a GPU, and on a CPU for small networks without convolutions",
        choices=("auto", "loop", "vmap"),
        resumable=True,
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
    dp_epsilon: float = setting(1.0, "epsilon of one reply's Gaussian noise", needs="dp-clip > 0", above=0)
    dp_delta: float = setting(1e-5, "delta of one reply's Gaussian noise", needs="dp-clip > 0", above=0, maximum=0.5)
    dp_sensitivity: float = setting(
        0.0, "L2 sensitivity that the noise is for; 0: twice dp-clip", needs="dp-clip > 0", minimum=0
    )

    def __post_init__(self) -> None:
        """Check the settings that depend on each other."""
        if self.optimizer_state == "kept" and self.optimizer == "sgd" and not self.momentum:
            raise SettingsError(
                "optimizer-state = 'kept' does not go with optimizer = 'sgd' and momentum = 0, which leaves nothing to "
                "keep; set a momentum, or optimizer-state = 'fresh'"
            )


def identified(train: TrainSettings, folder: str) -> TrainSettings:
    """Return the settings with the SHA-256 of the file of weights, where one is named that is there, or in a folder."""
    named = train.weights not in ("", PRETRAINED)
    digest = train.weights_sha256 if named else ""
    if named and not digest and (path := found_at(train.weights, folder)):
        digest = sha256_of(path)
    return replace(train, weights_sha256=digest)


@dataclass(frozen=True)
class RunSettings:
    """The run: method, rounds, participation, evaluation, what it leaves."""

    method: str = setting(
        "fedfew",
        "which method to run; one's own is the name that its classes in a file begin with, as in mine:FedMine",
        or_own="a method",
        synonyms=("algo", "algorithm", "strategy"),
    )
    experiment: str = setting(
        "",
        "YAML file of settings (a name in papers/*/settings/ or a path); those given beside it count more",
        once=True,
    )
    num_server_rounds: int = setting(
        15, "communication rounds", minimum=1, resumable=True, synonyms=("n-rounds", "num-rounds", "rounds")
    )
    fraction_train: float = setting(
        1.0,
        "fraction of the clients sampled in each round",
        above=0,
        maximum=1,
        synonyms=("client-fraction", "fraction", "fraction-fit", "join-ratio", "participation"),
    )
    full_last_round: bool = setting(
        False, "all clients train in the last round, whatever fraction-train is", needs="fraction-train < 1"
    )
    holdout_clients: float = setting(
        0.0,
        "fraction of the clients that never train for the others; at the end each is served as a newcomer, and trains "
        "once for itself",
        minimum=0,
        maximum=0.9,
        synonyms=("held-out-clients", "new-clients", "unseen-clients"),
    )
    client_weights: str = setting(
        "samples",
        "weights of the clients in the server's means of models: their numbers of training samples, or 1 each. Sums "
        "over samples (class prototypes, FedFew's n_i / N of the losses) always count samples",
        choices=("samples", "uniform"),
        source="McMahan et al., 2017, Algorithm 1: n_i / n",
        synonyms=("client-weighting", "weighted-average"),
    )
    min_train_replies: int = setting(1, "good replies that a round needs to change the server's state", minimum=1)
    max_update_norm: float = setting(
        0.0, "L2 norm of a client's update beyond which its reply is dropped; 0: no limit", minimum=0
    )
    secure_aggregation: bool = setting(
        False,
        "the server sees the sum of the clients' updates only (SecAgg+), where the method needs no more",
        synonyms=("secagg", "secaggplus", "secagg+"),
    )
    secure_threshold: float = setting(
        0.6,
        "secure aggregation: fraction of a client and its neighbours that must stay to the end of a round",
        needs="secure-aggregation = true",
        above=0.5,
        maximum=1,
    )
    secure_neighbours: int = setting(
        0,
        "secure aggregation: number of clients that each client shares secrets with; 0: all others",
        needs="secure-aggregation = true",
        minimum=0,
    )
    secure_range: float = setting(
        16.0,
        "secure aggregation: the most that a parameter may change in a round, which sets the rounding",
        needs="secure-aggregation = true",
        minimum=1e-9,
    )
    grace: float | str = setting(
        OFF,
        "seconds that the other clients have left in a training round once min-train-replies have answered",
        number_or=OFF,
        minimum=0,
        maximum=1e8,
        resumable=True,
        synonyms=("grace-period",),
    )
    round_timeout: float | str = setting(
        AUTO,
        "seconds to wait for the replies of a round; `auto`: found from the times that replies have taken so far, and "
        "no limit in one process",
        number_or=AUTO,
        above=0,
        maximum=1e8,
        resumable=True,
        synonyms=("timeout",),
        affects_results=False,
    )
    evaluate_every: int = setting(1, "rounds between evaluations (the last round is always one)", minimum=1)
    evaluate_training: bool = setting(
        False, "measure models on the training samples too: a third of an epoch of training"
    )
    average_rounds: int = setting(
        0,
        "last rounds over whose evaluations the summary also has the mean; system accuracy, where it is asked for, is "
        "then found in each of them; 0: none",
        minimum=0,
        resumable=True,
    )
    system_accuracy: str = setting(
        "auto",
        "accuracy on the pooled test sets: FedDRM's routing, else a majority vote; `auto`: FedDRM only",
        choices=("auto", "on", "off"),
    )
    seed: int = setting(42, "seed of everything random", minimum=0, maximum=2**31 - 1, synonyms=("random-seed",))
    output_dir: str = setting(
        "runs", "directory that holds the runs", place=True, resumable=True, affects_results=False, synonyms=("output",)
    )
    run_name: str = setting(
        "", "folder of this run; empty: method, data set, seed and time", affects_results=False, synonyms=("name",)
    )
    save_models: bool = setting(True, "write the server's state and the personal models as safetensors", resumable=True)
    min_clients: int = setting(
        0,
        "clients that must be there for the first round; 0: all num-clients",
        minimum=0,
        resumable=True,
        synonyms=("min-available-clients",),
    )
    join_timeout: float = setting(
        300.0, "seconds to wait for the clients before the first round", above=0, maximum=1e8, resumable=True
    )
    checkpoint_every: int = setting(
        10,
        "rounds between checkpoints (the last round is always one); 0: none",
        minimum=0,
        resumable=True,
        affects_results=False,
    )
    track: str = setting(
        OFF,
        "tool that the record of the run goes to as well",
        choices=(OFF, "tensorboard", "mlflow", "wandb"),
        or_own="a tracker",
        resumable=True,
        affects_results=False,
        synonyms=("logger", "tracker", "report-to"),
    )
    resume: str = setting("", "name of a run in output-dir to continue from its last checkpoint", once=True)
    state_memory: int = setting(
        4096,
        "MiB that the clients' states may take in an in-process run, the rest goes to disk; 0: all",
        minimum=0,
        resumable=True,
        affects_results=False,
    )

    @property
    def timeout(self) -> float:
        """Seconds to wait for the replies of a round; infinite if nobody has set them."""
        return math.inf if self.round_timeout == AUTO else float(self.round_timeout)

    def __post_init__(self) -> None:
        """Check the settings that depend on each other."""
        if self.holdout_clients and self.secure_aggregation:
            raise SettingsError(
                f"holdout-clients = {self.holdout_clients:g} does not go with secure-aggregation = true: a newcomer's "
                "training is a round of its own, whose update nobody may see; set one of them to its default"
            )
        if self.system_accuracy == "on" and not self.save_models:
            raise SettingsError("system-accuracy = 'on' needs save-models = true: the stored models answer the queries")


@dataclass(frozen=True)
class Settings:
    """All settings of a run."""

    run: RunSettings
    data: DataSettings
    train: TrainSettings
    method: Any

    def __post_init__(self) -> None:
        """Check the settings that depend on those of another group."""
        shared = {**settings_of(RunSettings), **settings_of(DataSettings), **settings_of(TrainSettings)}
        config = {**as_config(self.run), **as_config(self.data), **as_config(self.train)}
        for key, reason in self.method.refusals().items():
            if config[key] != (default := shared[key].default):
                raise SettingsError(
                    f"{key} = {config[key]!r} with method = {self.run.method!r}: {reason}; set it to {default!r}"
                )
        if self.run.min_clients > self.data.num_clients:
            raise SettingsError(
                f"min-clients = {self.run.min_clients}: it must be 0 to num-clients = {self.data.num_clients}"
            )

    def as_config(self) -> dict[str, Scalar]:
        """Return the settings as flat keys, the method's own under its name."""
        own = as_config(self.method, word_of(self.run.method))
        return {**as_config(self.run), **as_config(self.data), **as_config(self.train), **own}

    def to_json(self) -> str:
        """Return the settings as one line of JSON, as they travel to the clients."""
        return json.dumps(self.as_config())
