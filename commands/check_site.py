"""`posy check-site`: load and check a site's data before a run, as the node would."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from rich.console import Console
from rich.text import Text

from posy.client_app.node_config import node_settings
from posy.client_app.policy import policy_of, violations
from posy.client_app.site import skips
from posy.data.agreement import (
    Description,
    is_complete,
    open_settings,
    task_of,
    with_encoder,
    with_statistics,
    with_value_statistics,
)
from posy.data.dataset import Dataset
from posy.data.encoding import Moments
from posy.data.errors import DataError
from posy.data.partitions import Partition
from posy.data.policy import Policy
from posy.data.pooled import Pooled
from posy.data.settings import SITES, DataSettings
from posy.data.sites import check_suits, describe_site, load_site, read_site
from posy.data.task import STANDARDISED
from posy.data.values import channel_moments
from posy.listing import laid_out
from posy.metrics import CLASSES, LABELS, VALUES
from posy.paths import expanded
from posy.scores import Ints
from posy.settings import NodeConfigError, as_config
from posy.strategies.client_settings import NodeSettings, check_allowed, train_settings
from posy.strategies.run_settings import TrainSettings
from posy.words import counted

DEFAULT_TRAINING = TrainSettings()
FAR = 10.0
"""Number of standard deviations from the mean beyond which Posy reports a feature's values as unusual."""
DISTINCT, APART = 10, 3.0
"""Minimum number of distinct values other than 0, and minimum number of their standard deviations between 0 and their
mean, at which Posy reports that 0 may be a code for a missing value."""
SHOWN = 20
"""Maximum number of lines that Posy prints for a list."""


@dataclass(frozen=True)
class Report:
    """Facts and warnings about a site's data."""

    facts: dict[str, str]
    """Facts, keyed by name. Posy does not print facts that are empty strings."""
    classes: dict[str, tuple[int, int]]
    """Numbers of training samples and test samples at the site, keyed by class."""
    features: list[tuple[str, str, str, str]]
    """Unusual features: name or number of the column, smallest value, largest value, and reason."""
    statistics: list[tuple[str, str, str]]
    """Name or number, mean and standard deviation of each feature over the training samples."""
    warnings: tuple[str, ...]
    unreadable: tuple[str, ...]
    """Unreadable files, each with the reason."""


def check_site(
    node_config: Mapping[str, Any], settings: DataSettings, training: TrainSettings = DEFAULT_TRAINING
) -> Report:
    """Load a site's data as its node does, and return a report on the data.

    The node config contains ``data``, and optionally ``policy``, ``name``, ``skip-unreadable`` and settings of local
    training. The site's data determines the values of empty settings. Without ``client-bounds`` in ``training``, the
    settings in the node config are checked only against the policy.

    Raises
    ------
    DataError
        If the data is unusable, or does not fit the task.
    SettingsError
        If the settings do not define a task, or the run or the policy does not allow the settings in the node config.
    """
    if not node_config.get("data"):
        raise DataError("data=PATH is missing; set the path of the site's data, as in the node config")
    path = expanded(str(node_config["data"]))
    policy = policy_of(node_config) or Policy()
    chosen = node_settings(node_config)
    check_chosen(chosen, training, policy)
    content = read_site(path, settings, policy, skips(node_config))
    description = describe_site(content, settings, policy)
    check_suits(content, settings)
    names = content.distinct[1] if content.target == CLASSES else content.class_names
    site_settings = _completed(settings, description, names)
    dataset, part = load_site(content, site_settings, policy)
    x = dataset.x if content.kind == "features" else content.x
    run_classes = task_of(settings).class_names if is_complete(settings) else ()
    classes = _counts(dataset, part)
    has_classes = settings.target == CLASSES
    missing_classes = [name for name in run_classes if has_classes and name not in classes]
    train, test, validation = (len(rows[0]) for rows in (part.train, part.test, part.validation))
    facts = {
        "site": str(node_config.get("name", "")) or "(the name that its key is registered under)",
        "data": str(path),
        "kind": content.kind,
        "shape": site_settings.input_shape,
        "samples": f"{train + test + validation}: {train} for training, {test} for testing"
        + (f", {validation} for validation" if validation else ""),
        "values": f"{x.min().item():.6g} to {x.max().item():.6g}" if isinstance(x, np.ndarray) else "",
        "missing classes": ", ".join(missing_classes[:SHOWN]) + _rest(missing_classes),
        "local training": _local_training(chosen, training, str(node_config.get("name", ""))),
        "agreed on in a run": ", ".join(open_settings(settings, content.kind)),
    }
    features = _unusual_features(dataset) if content.kind in STANDARDISED else []
    statistics = _statistics(dataset, part) if content.kind in STANDARDISED else []
    return Report(facts, classes, features, statistics, dataset.notes, content.unreadable)


def check_chosen(chosen: NodeSettings, train: TrainSettings, policy: Policy) -> None:
    """Raise :class:`SettingsError` if a run, or the site's policy, does not allow the settings in a node config."""
    if train.client_bounds:
        check_allowed(chosen, train.client_bounds)
    for rule, reason in violations(policy, {"dataset": SITES, **as_config(train)}, chosen):
        if any(f"{key} = {value};" in reason for key, value in chosen):
            raise NodeConfigError(f"the node config violates the policy of the site, rule {rule}: {reason}")


def show(report: Report, console: Console | None = None) -> None:
    """Print a report as tables."""
    console = console or Console(width=max(100, Console().width))
    console.print(laid_out(None, ("", ""), [(name, text) for name, text in report.facts.items() if text]))
    rows = [(name, str(a), str(b)) for name, (a, b) in report.classes.items()]
    if rows:
        console.print(laid_out(f"{len(rows)} classes", ("class", "training", "test"), rows))
    if report.features:
        console.print(laid_out("unusual features", ("feature", "from", "to", "why"), report.features))
    if report.statistics:
        title = "statistics of the training samples; compare them with other sites to detect different units"
        console.print(laid_out(title, ("feature", "mean", "standard deviation"), report.statistics[:SHOWN]))
        if remainder := _rest(report.statistics):
            console.print(Text(f"  {remainder.strip()}"))
    unreadable = f"{counted(len(report.unreadable), 'unreadable file')}, skipped"
    for title, lines in (("warnings", report.warnings), (unreadable, report.unreadable)):
        if lines:
            console.print(Text(title, style="bold"))
            for line in lines[:SHOWN]:
                console.print(Text(f"  {line}"), soft_wrap=True)
            if remainder := _rest(lines):
                console.print(Text(f"  {remainder.strip()}"))
            console.print()
    console.print(Text("This site can take part."))


def _completed(settings: DataSettings, description: Description, labels: tuple[str, ...]) -> DataSettings:
    """Fill in the empty settings as in a run with only this site, and return all settings."""
    # A run needs at least two classes, but one site may have samples of only one class.
    is_single = len(labels) < 2 and settings.target == CLASSES
    names = [*labels, "another class"] if is_single else labels
    complete = replace(
        settings,
        sample_kind=description.kind,
        input_shape=settings.input_shape or "x".join(map(str, description.shape)),
        classes=settings.classes or json.dumps(list(names)),
    )
    mean, squares, count = description.value_mean, description.value_squares, description.count
    complete = with_value_statistics(complete, [Pooled(1, {}, count, mean, squares)] if mean.size else [])
    if description.table:
        total = Moments(count, np.array(description.table.present), description.mean, description.squares)
        return with_encoder(complete, description.columns, [description.table], total)
    return with_statistics(complete, [description] if description.mean.size else [])


def _local_training(chosen: NodeSettings, train: TrainSettings, name: str) -> str:
    """Return the settings of a site's local training, if they may differ from the run's; otherwise an empty string."""
    if not (chosen or train.client_settings):
        return ""
    values = as_config(train_settings(train, -1, name, chosen))
    length = "local-steps" if values["local-steps"] else "local-epochs"
    text = ", ".join(f"{key} = {values[key]}" for key in (length, "batch-size", "lr"))
    if not chosen:
        return text
    need = "" if train.client_bounds else "; the run must allow them in client-bounds"
    return f"{text} ({', '.join(key for key, _ in chosen)}: from the node config{need})"


def _counts(dataset: Dataset, part: Partition) -> dict[str, tuple[int, int]]:
    names, target = dataset.task.class_names, dataset.task.target
    if target == VALUES:
        return {}
    if target == LABELS:
        train, test = (dataset.y[rows[0]].sum(axis=0) for rows in (part.train, part.test))
        return {name: (int(a), int(b)) for name, a, b in zip(names, train, test, strict=True)}
    train, test = (np.bincount(dataset.y[rows[0]], minlength=len(names)) for rows in (part.train, part.test))
    return {name: (int(a), int(b)) for name, a, b in zip(names, train.tolist(), test.tolist(), strict=True) if a or b}


def _unusual_features(dataset: Dataset) -> list[tuple[str, str, str, str]]:
    """Return the features that are constant, have a value far from the mean, or have suspicious zeros.

    A value is far if it is more than ``FAR`` standard deviations from the mean.
    """
    axes, zeros = tuple(range(dataset.x.ndim - 1)), _suspicious_zeros(dataset)
    low, high = dataset.x.min(axes), dataset.x.max(axes)
    reach = np.maximum(np.abs(low - dataset.mean), np.abs(high - dataset.mean)) / dataset.std
    lines = []
    names = dataset.columns or tuple(map(str, range(len(low))))
    for feature in np.flatnonzero((low == high) | (reach > FAR) | (zeros > 0))[:SHOWN]:
        reasons = ["constant"] if low[feature] == high[feature] else []
        if reach[feature] > FAR:
            reasons.append(f"has a value {reach[feature]:.3g} standard deviations from the mean")
        if zeros[feature]:
            reasons.append(
                f"{zeros[feature]} zeros may be a code for missing values: if so, export ? or an empty cell instead"
            )
        lines.append((names[feature], f"{low[feature].item():.6g}", f"{high[feature].item():.6g}", "; ".join(reasons)))
    return lines


def _suspicious_zeros(dataset: Dataset) -> Ints:
    """Return the number of zeros of each feature if 0 may be a code for a missing value, else 0, ``(F,)``.

    This is the case if a feature is always 0, or if 0 is far from the feature's other values.
    """
    x = np.asarray(dataset.x, np.float64).reshape(-1, dataset.x.shape[-1])
    counts = np.count_nonzero(x == 0, axis=0)
    for feature in np.flatnonzero(counts):
        nonzero = x[x[:, feature] != 0, feature]
        is_far = len(np.unique(nonzero)) >= DISTINCT and abs(nonzero.mean()) > APART * nonzero.std()
        if (len(nonzero) and not is_far) or (dataset.encoder and not dataset.encoder.is_number[feature]):
            counts[feature] = 0
    return counts


def _statistics(dataset: Dataset, part: Partition) -> list[tuple[str, str, str]]:
    mean, squares = channel_moments(dataset.x, part.train[0])
    names = dataset.columns or tuple(map(str, range(len(mean))))
    std = np.sqrt(squares / len(part.train[0]))
    return [(n, f"{m:.4g}", f"{s:.3g}") for n, m, s in zip(names, mean.tolist(), std.tolist(), strict=True)]


def _rest(lines: Sequence[Any]) -> str:
    return f" and {len(lines) - SHOWN} more" if len(lines) > SHOWN else ""
