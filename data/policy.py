"""The policy of a site: one file on its node that limits how runs may use the site's data.

Only the node reads the file (``policy`` in its node config). A node with data but without a policy uses the defaults.
:mod:`posy.client_app.policy` checks a run against the policy before the node processes a message.
"""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from posy.data.columns import names_in
from posy.metrics import METRICS
from posy.settings import NodeConfigError, SettingsError, build, checked, setting, settings_of
from posy.yaml12 import read_yaml

ALL = "all"
"""Value of ``metrics`` that allows all metrics."""


@dataclass(frozen=True)
class Policy:
    """The rules of a site. An error names the violated rule by its key in the file."""

    columns: str = setting(
        "", "comma-separated or JSON list of the columns that a run may use as inputs; empty: all columns"
    )
    label: str = setting(
        "",
        "column that a run may use as label, or the only label rule, such as `num > 0`; empty: `label`, else the last "
        "column",
    )
    min_rows: int = setting(
        10, "minimum number of rows behind any statistic, label, gradient or score that leaves the site", minimum=2
    )
    test_fraction: float = setting(
        0.25,
        "fraction of the rows that the site holds out for testing; the site draws them once for each version of its "
        "data, and no run setting can select rows",
        above=0,
        maximum=0.5,
    )
    stratify: bool = setting(
        True,
        "keep the site's class proportions in its test and validation splits; a class with a single row is used for "
        "training",
    )
    split_column: str = setting(
        "",
        "column that identifies the patient, or another unit with several rows: its rows are in the same split, and no "
        "run may use the column; `.npz`: an array; folders of images: a column of `metadata.csv`",
    )
    folds: int = setting(
        0,
        "the only number of folds that a run may use for cross-validation. The runs of the folds train on different "
        "rows, so the difference between two runs depends on fewer rows; 0: each row has exactly one split",
        minimum=0,
        maximum=20,
    )
    validation_fraction: float = setting(
        0.2,
        "the only fraction of the training rows, other than 0, that a run may use for validation",
        above=0,
        maximum=0.5,
    )
    methods: str = setting("", "comma-separated list of the methods that a run may use; empty: all methods of Posy")
    code: str = setting(
        "installed",
        "code that the node runs; `installed`: the version of Posy on this node; `signed`: also an app that "
        "the node's trusted entities have signed (`posy supernode --trusted-entities`); `any`: the app of every run",
        choices=("installed", "signed", "any"),
    )
    weights: str = setting(
        "", "directory of the initial-weight files that a run may use; empty: a run may not name a file", place=True
    )
    max_local_epochs: int = setting(100, "maximum number of passes over the data in a round", minimum=1)
    max_rounds: int = setting(1000, "maximum number of rounds in a run", minimum=1)
    max_parameters: int = setting(100_000_000, "maximum number of parameters in a model", minimum=1)
    max_runs_per_day: int = setting(50, "maximum number of runs that begin on one day (UTC)", minimum=1)
    max_answers_per_day: int = setting(
        0,
        "maximum number of queries on one day (UTC) that the site's model answers for a service of the server (`posy "
        "serve --superlink`); with enough answers, the server can reconstruct the layers that the site keeps; 0: none",
        minimum=0,
    )
    min_clients: int = setting(
        0,
        "minimum number of clients in a round; 0: two, or with trusted-keys, more than half of the trusted sites",
        minimum=0,
    )
    secure_aggregation: str = setting(
        "optional",
        "`required`: the node sends only masked updates and scores",
        choices=("optional", "required"),
    )
    scores: str = setting(
        "rounded",
        "accuracy and loss in replies; `rounded`: to two decimal places and at most three significant digits, "
        "capped at 1000; "
        "`withheld`: only in masked sums",
        choices=("exact", "rounded", "withheld"),
    )
    metrics: str = setting(
        "accuracy",
        "comma-separated list of the metrics that a run may request in addition to the loss, such as `accuracy,auroc`, "
        "or `all`, which includes metrics that reveal the share of each class at the site; for regression, `accuracy` "
        "allows rmse and mae",
    )
    share_settings: bool = setting(
        True,
        "send the node config's `local-epochs`, `local-steps`, `batch-size` and `lr` to the server, which records "
        "them; false: the server learns only that the site has its own values, or which of the keys the run does not "
        "allow",
    )
    epsilon: float = setting(
        0.0,
        "the site's privacy budget per row over all runs; a run needs `dp=local`, `dp=sample`, or "
        "`dp=central` with secure-aggregation; 0: runs without noise are allowed",
        minimum=0,
    )
    delta: float = setting(1e-5, "delta of the privacy budget", needs="epsilon > 0", above=0, maximum=0.1)

    def __post_init__(self) -> None:
        """Check that there are at least two folds, and that the metrics exist."""
        if self.folds == 1:
            raise SettingsError("folds = 1: set at least 2 folds, or 0")
        if unknown := [name for name in self._listed_metrics if name not in METRICS]:
            names = ", ".join(METRICS)
            raise SettingsError(
                f"metrics = {self.metrics!r}: {unknown[0]!r} is not a metric; set {ALL}, or a list of these: {names}"
            )

    @cached_property
    def allowed_methods(self) -> tuple[str, ...]:
        """The names of the allowed methods; empty if all methods of Posy are allowed."""
        return names_in("methods", self.methods) if self.methods else ()

    @cached_property
    def allowed_metrics(self) -> frozenset[str]:
        """The names of the metrics that may leave the site."""
        names = frozenset(self._listed_metrics)
        return names | {"rmse", "mae"} if "accuracy" in names else names

    @property
    def _listed_metrics(self) -> tuple[str, ...]:
        return tuple(METRICS) if self.metrics == ALL else names_in("metrics", self.metrics)

    @cached_property
    def allowed_columns(self) -> tuple[str, ...]:
        """The names of the columns that may be inputs; empty if all columns may be."""
        return names_in("columns", self.columns) if self.columns else ()


def read_policy(path: Path) -> Policy:
    """Return the policy in a YAML file.

    Raises
    ------
    NodeConfigError
        If the file cannot be read, or contains an unknown rule or a value outside its range.
    """
    try:
        return build(Policy, checked(read_yaml(path), settings_of(Policy), str(path)))
    except SettingsError as error:
        raise NodeConfigError(str(error)) from error
