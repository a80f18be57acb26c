"""The shared settings of a run and of local training."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from posy.metrics import CLASSES, DEFAULTS, LABELS, METRICS, VALUES, Metric, metrics_for
from posy.models.catalogue import MODELS, PRETRAINED
from posy.paths import found_at, sha256_of
from posy.settings import Search, SettingsError, setting

AUTO, OFF = "auto", "off"
"""Values that may replace a number: Posy chooses the number, or the feature is off."""
LOCAL, CENTRAL, SAMPLE = "local", "central", "sample"
"""Modes of differential privacy; see :mod:`posy.strategies.privacy`."""
ALL_METRICS = "all-metrics"
"""Key of a message's config that asks for all metrics of the task on the test split."""
LAST_ROUND = "last-round"
"""Key of a message's config that marks the models of this round as the run's final models."""
CALIBRATES = "calibrates"
"""Key that a node adds to a message's config, so that its client calibrates the distance to its samples."""
DELIVERY = "delivery"
"""Key of a message's config that asks a client to store its final model, and to reply without scores."""
MODEL_ROUND, EMBEDDINGS, SIZES = "model-round", "embeddings", "sizes"
"""Key of a message's config that asks a client's stored model of a round for answers to queries, the name of the array
``(n, D)`` in the message, and the key of the sizes of its parts: the inputs of the client's own layers, and the
embeddings in which distances to the client's samples are measured."""
PROBABILITIES, DISTANCES = "probabilities", "distances"
"""Names of the arrays in the reply: class probabilities ``(n, C)`` and, if calibrated, relative distances ``(n,)``."""
UNIFORM = "uniform"
"""The value of ``client-weights`` that gives all clients the same weight."""
WITHHELD = "withheld"
"""The value of ``dp-scores`` that keeps clients from sending scores."""


LOSSES = {CLASSES: ("cross-entropy",), LABELS: ("bce",), VALUES: ("mse", "mae", "huber")}
"""The values of ``loss`` for each target; ``auto`` selects the first."""


@dataclass(frozen=True)
class TrainSettings:
    """Settings of a client's local training."""

    model: str = setting(
        "auto",
        "network; `auto` chooses one for the data; a custom network is torchvision:NAME, or a function that takes the "
        "task and returns a torch.nn.Module",
        choices=("auto", *MODELS),
        custom_kind="a network",
        synonyms=("arch", "architecture", "net", "network"),
    )
    weights: str = setting(
        "",
        "safetensors file with initial weights, keyed by the names of the network's tensors; a head with a different "
        "number of classes starts from random weights; a .txt file of word vectors (GloVe) initialises the embedding "
        "only; `torchvision`: torchvision's pretrained weights; empty: random weights. If the path does not exist, "
        "Posy searches data-dir for the file name",
        place=True,
        path_or=PRETRAINED,
        synonyms=("pretrained", "checkpoint"),
    )
    weights_sha256: str = setting(
        "",
        "SHA-256 of the weights file, computed when a run starts; Posy refuses nodes with a different file",
        needs='weights != "" | torchvision',
    )
    frozen: str = setting("", "layers that are neither trained nor sent, separated by commas", synonyms=("freeze",))
    linear_init: str = setting(
        "default",
        "initial weights of linear layers: PyTorch's default, or Kaiming-normal with biases of 0 (FedDRM)",
        choices=("default", "kaiming"),
    )
    local_epochs: int = setting(
        2,
        "passes over the client's training data in a round",
        needs="local-steps = 0",
        minimum=1,
        synonyms=("epochs", "num-epochs"),
    )
    local_steps: int = setting(0, "number of SGD steps in a round, instead of epochs; 0: use local-epochs", minimum=0)
    batch_size: int = setting(10, "samples in a mini-batch", minimum=1, synonyms=("batch",))
    lr: float = setting(
        0.05, "learning rate", above=0, synonyms=("learning-rate",), search=Search(0.005, 0.5, log=True)
    )
    client_settings: str = setting(
        "",
        "YAML or JSON file that maps clients (numbers, or names of natural groups or sites) to their own "
        "`local-epochs`, `local-steps`, `batch-size` and `lr`, or this mapping as JSON; a client's lr follows "
        "lr-schedule",
        synonyms=("per-client-settings",),
    )
    client_bounds: str = setting(
        "",
        "settings that nodes may choose in their node config, with the smallest and the largest allowed value, as in "
        "`local-epochs: 1..5, batch-size: 8..64, lr: 0.001..0.1`; also `local-steps`; empty: nodes choose nothing",
        synonyms=("node-bounds", "site-bounds"),
    )
    lr_schedule: str = setting(
        "constant",
        "schedule of the learning rate over the rounds; `exponential` and `step` multiply lr by lr-decay every round, "
        "or every lr-step rounds",
        choices=("constant", "cosine", "exponential", "step"),
    )
    lr_decay: float = setting(
        0.99,
        "factor of the exponential and step schedules",
        needs="lr-schedule = exponential | step",
        above=0,
        maximum=1,
    )
    lr_step: int = setting(10, "rounds between two steps of the step schedule", needs="lr-schedule = step", minimum=1)
    loss: str = setting(
        AUTO,
        "per-sample loss that local training minimises; classes: `cross-entropy`; labels: `bce`; values, in standard "
        "deviations: `mse`, `mae` or `huber`; `auto`: the first of the task's losses; a custom loss is a function that "
        "takes outputs (B, C) and targets, (B,) classes or (B, C) labels or values, and returns losses (B,)",
        choices=(AUTO, *(loss for losses in LOSSES.values() for loss in losses)),
        custom_kind="a loss",
        synonyms=("criterion", "objective"),
    )
    huber_delta: float = setting(
        1.0,
        "error, in standard deviations, at which the Huber loss becomes linear",
        needs="loss = huber",
        above=0,
        source="PyTorch's default",
    )
    class_weights: str = setting(
        "none",
        "weight of a sample in the loss; with `balanced` all classes of a client have the same total weight",
        choices=("none", "balanced"),
        synonyms=("class-weight",),
    )
    optimizer: str = setting(
        "sgd",
        "optimiser for local training; steps that a method defines as plain SGD stay plain",
        choices=("sgd", "adam", "adamw"),
        synonyms=("optimiser", "opt"),
    )
    optimizer_state: str = setting(
        "fresh",
        "state of the optimiser (momentum, Adam's moments): `fresh` in each round, or `kept` from the client's last "
        "round",
        choices=("fresh", "kept"),
        synonyms=("optimiser-state",),
    )
    momentum: float = setting(0.0, "momentum of SGD", needs="optimizer = sgd", minimum=0, maximum=0.9999)
    weight_decay: float = setting(
        0.0, "L2 weight decay; decoupled from the moments in AdamW", minimum=0, synonyms=("l2", "wd")
    )
    adam_beta1: float = setting(
        0.9, "decay rate of Adam's mean of gradients", needs="optimizer = adam | adamw", minimum=0, maximum=0.9999
    )
    adam_beta2: float = setting(
        0.999,
        "decay rate of Adam's mean of squared gradients",
        needs="optimizer = adam | adamw",
        minimum=0,
        maximum=0.999999,
    )
    adam_epsilon: float = setting(
        1e-8,
        "number that Adam adds to the square root of the mean squared gradient",
        needs="optimizer = adam | adamw",
        above=0,
    )
    max_grad_norm: float = setting(
        0.0, "L2 norm to which each model's mini-batch gradient is clipped; 0: off", minimum=0
    )
    device: str = setting(
        "auto", "`auto`, `cpu`, `cuda` or `cuda:N`", resumable=True, affects_results=False, synonyms=("gpu",)
    )
    threads: int = setting(
        1,
        "number of PyTorch threads per client process on the CPU; 0: unchanged",
        minimum=0,
        maximum=1024,
        resumable=True,
    )
    stack: str = setting(
        "auto",
        "train several models (FedFew's K, or models of several clients in one process) in turn (`loop`), or as one "
        "stacked computation (`vmap`); `auto`: vmap on a GPU, and on a CPU for small networks without convolutions",
        choices=("auto", "loop", "vmap"),
        resumable=True,
    )
    precision: str = setting(
        "float32",
        "arithmetic of matrix products and convolutions: `tf32` on GPUs that support it, `bfloat16` with autocast; "
        "parameters and messages stay float32",
        choices=("float32", "tf32", "bfloat16"),
    )
    dp: str = setting(
        OFF,
        "differential privacy; `local`: each client clips its update and adds noise, which hides the client's data; "
        "`central`: the clients clip, and the server adds noise to the sum (with secure-aggregation the clients do), "
        "which hides each client from all but the server; `sample`: DP-SGD, which hides each sample",
        choices=(OFF, LOCAL, CENTRAL, SAMPLE),
        synonyms=("differential-privacy", "privacy"),
    )
    dp_clip: float = setting(
        0.0,
        "L2 norm to which each client's update (with dp = sample, each sample's gradient) is clipped; must be above 0",
        needs="dp != off",
        minimum=0,
    )
    dp_epsilon: float = setting(
        1.0,
        "epsilon of the whole run, for the client that trains in the most rounds",
        needs="dp != off",
        above=0,
        maximum=1e6,
    )
    dp_delta: float = setting(
        1e-5,
        "delta of the whole run; choose it below 1 / the number of clients, or with dp = sample below 1 / the number "
        "of samples",
        needs="dp != off",
        above=0,
        maximum=0.5,
    )
    dp_clip_quantile: float = setting(
        0.0,
        "fraction of updates that adaptive clipping aims to leave unchanged; dp-clip is then the initial clipping "
        "norm; 0: the norm is fixed",
        source="Andrew et al., 2021: 0.5",
        needs="dp = central and secure-aggregation = false",
        minimum=0,
        maximum=0.99,
    )
    dp_scores: str = setting(
        WITHHELD,
        "training loss and scores in a run with noise; `withheld`: clients do not send them; `exact`: clients send "
        "them, and the epsilon of the run does not cover them",
        choices=(WITHHELD, "exact"),
        needs="dp != off",
    )

    @property
    def withholds_scores(self) -> bool:
        """Whether clients send neither their training loss nor their scores."""
        return self.dp != OFF and self.dp_scores == WITHHELD

    def __post_init__(self) -> None:
        """Check the settings that depend on each other."""
        if self.optimizer_state == "kept" and self.optimizer == "sgd" and not self.momentum:
            raise SettingsError(
                "optimizer-state = 'kept' cannot be combined with optimizer = 'sgd' and momentum = 0, because this "
                "optimiser has no state; set a momentum, or optimizer-state = 'fresh'"
            )


def identified(train: TrainSettings, folder: str) -> TrainSettings:
    """Return the settings with the SHA-256 of the weights file, if the file exists at its path or in ``folder``."""
    names_file = train.weights not in ("", PRETRAINED)
    digest = train.weights_sha256 if names_file else ""
    if names_file and not digest and (path := found_at(train.weights, folder)):
        digest = sha256_of(path)
    return replace(train, weights_sha256=digest)


@dataclass(frozen=True)
class RunSettings:
    """Settings of the run: method, rounds, participation, evaluation and output."""

    method: str = setting(
        "fedfew",
        "method of the run; a custom method is given as its file and the prefix of its classes, such as mine:FedMine",
        custom_kind="a method",
        synonyms=("algo", "algorithm", "strategy"),
    )
    experiment: str = setting(
        "",
        "YAML file of settings (a name in papers/*/settings/ or a path); other settings of the run override it",
        once=True,
    )
    num_server_rounds: int = setting(
        15, "communication rounds", minimum=1, resumable=True, synonyms=("n-rounds", "num-rounds", "rounds")
    )
    fraction_train: float = setting(
        1.0,
        "fraction of the clients sampled in each round, rounded up to whole clients",
        above=0,
        maximum=1,
        synonyms=("client-fraction", "fraction", "fraction-fit", "join-ratio", "participation"),
    )
    full_last_round: bool = setting(
        False, "all clients train in the last round, regardless of fraction-train", needs="fraction-train < 1"
    )
    holdout_clients: float = setting(
        0.0,
        "fraction of clients that join as newcomers after the last round; each receives the served model, and trains "
        "once without aggregation",
        minimum=0,
        maximum=0.9,
        synonyms=("held-out-clients", "new-clients", "unseen-clients"),
    )
    client_weights: str = setting(
        "samples",
        "weight of each client when the server averages models; `samples`: its number of training samples; `uniform`: "
        "1. Sums over samples (class prototypes, FedFew's n_i / N for the losses) always use the number of samples",
        needs="robust = mean | multi-krum | geometric-median or method = feddrm",
        choices=("samples", UNIFORM),
        source="McMahan et al., 2017, Algorithm 1: n_i / n",
        synonyms=("client-weighting", "weighted-average"),
    )
    min_train_replies: int = setting(
        1,
        "minimum number of valid replies; with fewer, the round fails and the server's state does not change",
        minimum=1,
    )
    max_update_norm: float = setting(
        0.0, "maximum L2 norm of a client's update; a larger update is dropped; 0: no limit", minimum=0
    )
    max_norm_ratio: float | str = setting(
        AUTO,
        "maximum L2 norm of a client's update, as a multiple of the round's median norm; a larger update is scaled "
        "down to this norm; 0: no limit; `auto`: 3 with dataset=sites, else 0",
        needs="secure-aggregation = false",
        number_or=AUTO,
        minimum=0,
        synonyms=("norm-bound", "clip-updates"),
    )
    max_client_weight: float | str = setting(
        AUTO,
        "maximum share of a client in the server's means and sums; a larger weight is lowered to this share; 1: no "
        "limit; `auto`: with dataset=sites, 3 divided by the number of replies, but at most 0.5; else 1",
        needs="secure-aggregation = false and robust = mean | multi-krum | geometric-median",
        number_or=AUTO,
        above=0,
        maximum=1,
    )
    robust: str = setting(
        "mean",
        "the server's rule for combining the clients' models; `mean`, `geometric-median` and `multi-krum` use "
        "client-weights, and the other rules treat all clients equally",
        choices=("mean", "median", "trimmed-mean", "krum", "multi-krum", "geometric-median"),
        synonyms=("aggregation", "aggregator", "defence", "defense"),
    )
    trim_fraction: float = setting(
        0.2,
        "trimmed mean: fraction of the clients' values that is removed at each end, for each parameter",
        needs="robust = trimmed-mean",
        minimum=0,
        maximum=0.49,
        synonyms=("beta",),
    )
    max_attackers: int = setting(
        1,
        "Krum: number f of clients in a round that may send arbitrary models; a round needs 2 f + 3 replies",
        needs="robust = krum | multi-krum",
        minimum=0,
        synonyms=("num-malicious-nodes",),
    )
    krum_clients: int = setting(
        0,
        "Multi-Krum: number of clients whose models are averaged; 0: the number of replies minus max-attackers",
        needs="robust = multi-krum",
        minimum=0,
        synonyms=("num-nodes-to-select",),
    )
    secure_aggregation: bool = setting(
        False,
        "the server learns only sums of the clients' updates and scores (SecAgg+); the method must need only the sum",
        synonyms=("secagg", "secaggplus", "secagg+"),
    )
    secure_threshold: float | str = setting(
        AUTO,
        "secure aggregation: fraction of the clients, and of each client's neighbours, that must finish the round; "
        "`auto`: 0.6, or more if the sites sign their keys",
        needs="secure-aggregation = true",
        number_or=AUTO,
        above=0.5,
        maximum=1,
    )
    secure_neighbours: int = setting(
        0,
        "secure aggregation: number of clients with which each client shares secrets; 0: all other clients",
        needs="secure-aggregation = true",
        minimum=0,
        limit="num-clients - 1",
    )
    secure_range: float = setting(
        16.0,
        "secure aggregation: maximum change of a parameter in a round; it determines the rounding error",
        needs="secure-aggregation = true",
        minimum=1e-9,
    )
    grace: float | str = setting(
        OFF,
        "seconds that training waits for the other clients once min-train-replies clients have replied",
        number_or=OFF,
        minimum=0,
        maximum=1e8,
        resumable=True,
        synonyms=("grace-period",),
    )
    round_timeout: float | str = setting(
        AUTO,
        "seconds to wait for the replies of a round; `auto`: estimated from earlier replies; no limit in one process "
        "or in a simulation",
        number_or=AUTO,
        above=0,
        maximum=1e8,
        resumable=True,
        synonyms=("timeout",),
        affects_results=False,
    )
    evaluate_every: int = setting(1, "rounds between evaluations; the last round is always evaluated", minimum=1)
    evaluate_training: bool = setting(
        False, "score models on the training samples too, at the cost of a third of an epoch"
    )
    metric: str = setting(
        AUTO,
        "metric by which rounds, clients and methods are compared; `auto`: accuracy for classes, average-precision for "
        "labels, rmse for values",
        choices=(AUTO, *METRICS),
        synonyms=("monitor", "score"),
    )
    all_metrics: str = setting(
        AUTO,
        "evaluations that report all metrics of the task on the test splits: the `last` one, `every` one or `none`; "
        "other evaluations report only the metric and the loss; with `none`, so do the summary, the scores over all "
        "samples and the central test set; masked sums contain more only if the metric needs it; `auto`: `none` with "
        "dataset=sites (but `last` for the central test set), else `last`",
        choices=(AUTO, "last", "every", "none"),
    )
    positive_class: str = setting(
        "", "two classes: name of the class that counts as positive; empty: the second class", synonyms=("pos-label",)
    )
    threshold: float = setting(
        0.5, "minimum probability for predicting the positive class or a label", minimum=0, maximum=1
    )
    fixed_sensitivity: float = setting(0.9, "minimum sensitivity for specificity-at-sensitivity", above=0, maximum=1)
    save_predictions: bool = setting(
        False,
        "store each client's predictions for its test samples after the last round, with the indices of the samples",
        resumable=True,
        affects_results=False,
    )
    patience: int = setting(
        0,
        "early stopping: number of evaluations without a better value of `metric` on the validation splits, after "
        "which one last round follows; early stopping uses the model (`served` or `local`) by which the method is "
        "scored; 0: off",
        needs="validation-fraction > 0",
        minimum=0,
        synonyms=("early-stopping", "early-stopping-rounds"),
    )
    average_rounds: int = setting(
        0,
        "number of final rounds over which the summary also averages the scores; system accuracy, if enabled, is "
        "computed in each of these rounds; 0: none",
        minimum=0,
        limit="num-server-rounds",
        resumable=True,
    )
    system_accuracy: str = setting(
        "auto",
        "accuracy on the pooled test sets, by FedDRM's routing or a majority vote; `auto`: FedDRM only",
        choices=("auto", "on", "off"),
    )
    seed: int = setting(42, "seed for all random numbers", minimum=0, maximum=2**31 - 1, synonyms=("random-seed",))
    output_dir: str = setting(
        "runs", "directory that holds the runs", place=True, resumable=True, affects_results=False, synonyms=("output",)
    )
    run_name: str = setting(
        "",
        "name of the run's folder; empty: method, data set, seed and time",
        needs='part-of = ""',
        affects_results=False,
        synonyms=("name",),
    )
    part_of: str = setting(
        "",
        "sites: name of a cross-validation, a folder in output-dir; this run writes its results into the folder "
        "`fold-K` of it, and updates the summary of all finished folds; an interrupted fold resumes",
        needs="fold > 0 and dataset = sites",
        affects_results=False,
        synonyms=("cross-validation-name", "cv-name"),
    )
    save_models: bool = setting(True, "write the server's state and the personal models as safetensors", resumable=True)
    min_clients: int = setting(
        0,
        "number of connected clients at which the first round starts; 0: num-clients",
        minimum=0,
        resumable=True,
        synonyms=("min-available-clients",),
    )
    join_timeout: float = setting(
        300.0, "seconds to wait for the clients before the first round", above=0, maximum=1e8, resumable=True
    )
    checkpoint_every: int = setting(
        10,
        "number of rounds between checkpoints; Posy also writes one after the last round; 0: no checkpoints",
        minimum=0,
        resumable=True,
        affects_results=False,
    )
    track: str = setting(
        OFF,
        "tracking tool that also receives the run's record",
        choices=(OFF, "tensorboard", "mlflow", "wandb"),
        custom_kind="a tracker",
        resumable=True,
        affects_results=False,
        synonyms=("logger", "tracker", "report-to"),
    )
    resume: str = setting("", "name of a run in output-dir to resume from its last checkpoint", once=True)
    queries_from: str = setting(
        "",
        "socket of a service on the SuperLink's machine, which `posy serve --superlink` sets: the nodes answer the "
        "service's queries with the models of the run that `resume` names, and do not train",
        place=True,
        once=True,
        affects_results=False,
    )
    state_memory: int = setting(
        4096,
        "MiB of memory for the clients' states in an in-process run; states beyond this limit go to disk; 0: all "
        "states go to disk",
        minimum=0,
        resumable=True,
        affects_results=False,
    )

    @property
    def timeout(self) -> float:
        """Seconds to wait for the replies of a round; infinite with ``auto``."""
        return math.inf if self.round_timeout == AUTO else float(self.round_timeout)

    def __post_init__(self) -> None:
        """Check the settings that depend on each other."""
        if self.holdout_clients and self.secure_aggregation:
            raise SettingsError(
                f"holdout-clients = {self.holdout_clients:g} cannot be combined with secure-aggregation = true: a "
                "newcomer trains alone, and the sum would reveal its update; set one of the two settings to its default"
            )
        if self.system_accuracy == "on" and self.secure_aggregation:
            raise SettingsError(
                "system-accuracy = 'on' cannot be combined with secure-aggregation = true: system accuracy needs the "
                "models and test samples of individual clients; set system-accuracy = 'off'"
            )
        if self.robust != "mean" and self.secure_aggregation:
            raise SettingsError(
                f"robust = {self.robust!r} cannot be combined with secure-aggregation = true: the server sees only the "
                "sum of the updates, and the rule compares individual updates; set one of the two settings to its "
                "default"
            )
        if self.system_accuracy == "on" and not self.save_models:
            raise SettingsError("system-accuracy = 'on' needs save-models = true: the stored models answer the queries")


def name_of(config: Mapping[str, Any]) -> str:
    """Return the name of a run in its settings, such as ``heart/fold-2`` for a fold; empty if Posy chooses the name."""
    if config.get("part-of"):
        return f"{config['part-of']}/fold-{config.get('fold')}"
    return str(config.get("run-name") or "")


def metric_of(run: RunSettings, target: str, size: int) -> Metric:
    """Return the metric by which a run compares rounds, clients and methods.

    Parameters
    ----------
    run : RunSettings
        The settings of the run.
    target : str
        The target of the task (see :mod:`posy.metrics`).
    size : int
        Number of classes, labels or values C.

    Raises
    ------
    SettingsError
        If the metric does not apply to the task.
    """
    metric = METRICS[DEFAULTS[target] if run.metric == AUTO else run.metric]
    if not metric.suits(target, size):
        names = ", ".join(suitable.name for suitable in metrics_for(target, size))
        raise SettingsError(
            f"metric = {run.metric!r} does not apply to a task with {size} {target}; choose one of {names}"
        )
    return metric


def positive_class(run: RunSettings, names: Sequence[str]) -> int:
    """Return the index of the positive class among two classes, by default 1.

    Raise :class:`SettingsError` if the named class is not one of two classes.
    """
    if not run.positive_class:
        return 1
    if run.positive_class not in names or len(names) != 2:
        reason = f"the classes are {' and '.join(names)}" if len(names) == 2 else f"the task has {len(names)} classes"
        raise SettingsError(f"positive-class = {run.positive_class!r}: {reason}; name one of two classes")
    return list(names).index(run.positive_class)
