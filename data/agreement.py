"""Determine the task of a run over sites from the settings and from the sites' descriptions of their data.

The server has no samples. It asks each site to describe its data and writes the agreed task into the run's settings
(:func:`agreed`). Afterwards, the settings alone determine the task (:func:`task_of`).
"""

import json
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from posy.data.augment import check_augment
from posy.data.columns import names_in
from posy.data.encoding import (
    CATEGORY,
    NO_ENCODER,
    NUMBER,
    Encoder,
    Moments,
    TableFacts,
    encoder_in,
    encoder_notes,
    make_encoder,
    merged,
    scale_of,
)
from posy.data.errors import DataError, shared_notes
from posy.data.labels import label_name, listed, nearly_equal, sorted_names
from posy.data.pooled import Pooled
from posy.data.settings import DataSettings
from posy.data.task import STANDARDISED, TASK_KINDS, Task
from posy.data.transforms import shape_text
from posy.data.values import deviation
from posy.metrics import CLASSES, VALUES
from posy.settings import SettingsError, as_config

MODES = {1: "L", 3: "RGB"}
"""Pillow's image modes, keyed by the number of channels."""
_MAX_SIZE = 1 << 28  # maximum number of values in one sample
_MAX_NAME = 300
UNLIKE_MEAN, UNLIKE_SPREAD = 2.0, 10.0
"""Limits above which the server warns about a feature: the distance between a site's mean and the other sites' mean, in
standard deviations, and the ratio of the standard deviations."""
MIN_SHOWN = 10
"""Minimum number of training samples at a site for a warning to quote its statistics. Statistics of fewer samples could
reveal a person's value."""
MAX_UNLIKE = 20
"""Maximum number of features that the server warns about."""


@dataclass(frozen=True)
class Description:
    """A site's description of its data. The server derives the common task from the descriptions of all sites.

    ``kind`` and ``columns`` are as in :class:`posy.data.dataset.Content`. ``mean`` and ``squares``, float64 ``(F,)``,
    are empty if the samples are neither features nor time series, or if the settings specify the mean and the standard
    deviation. ``value_mean`` and ``value_squares``, float64 ``(C,)``, are empty unless the task is a regression whose
    mean or standard deviation is unset.
    """

    kind: str
    shape: tuple[int, ...]  # of one sample, as in the setting input-shape
    fixed: bool  # False for image files and texts, which Posy can resize or truncate
    classes: tuple[str, ...]  # names of the classes, labels or values; empty if the settings name them
    count: int  # number of training samples from which mean and squares are computed
    mean: np.ndarray  # of each feature
    squares: np.ndarray  # sum of each feature's squared deviations from its mean
    columns: tuple[str, ...] = ()
    table: TableFacts | None = None  # if the run needs an encoder; mean and squares then cover the values, not all rows
    warnings: tuple[str, ...] = ()  # notes on the data; not read by from_answer
    skipped: int = 0  # number of unreadable files; not read by from_answer
    value_mean: np.ndarray = field(default_factory=partial(np.empty, 0))  # of each value, in the order of the classes
    value_squares: np.ndarray = field(
        default_factory=partial(np.empty, 0)
    )  # sum of each value's squared deviations from its mean

    def as_answer(self) -> dict[str, Any]:
        """Return the description as the values of a Flower ConfigRecord."""
        values = {name: list(value) if isinstance(value, tuple) else value for name, value in vars(self).items()}
        arrays = {name: value.tolist() for name, value in values.items() if isinstance(value, np.ndarray)}
        table = {"table": self.table.to_json() if self.table else ""}
        return values | arrays | table | site_notices(self.warnings, self.skipped)

    @classmethod
    def from_answer(cls, answer: Mapping[str, Any]) -> "Description":
        """Return the description in a site's reply.

        Raises
        ------
        DataError
            If a value is implausible.
        KeyError, TypeError, ValueError
            If the reply does not have the format that :meth:`as_answer` returns.
        """
        kind, shape = answer["kind"], tuple(int(size) for size in answer["shape"])
        mean, squares = (np.array(answer[key], np.float64) for key in ("mean", "squares"))
        values = [np.array(answer.get(key, ()), np.float64) for key in ("value_mean", "value_squares")]
        count, classes = int(answer["count"]), tuple(dict.fromkeys(label_name(str(c)) for c in answer["classes"]))
        columns = tuple(str(name) for name in answer.get("columns", ()))
        table = TableFacts.from_json(str(answer["table"])) if answer.get("table") else None
        sensible = (
            kind in TASK_KINDS
            and _suits(shape, kind)
            and count > 0
            and mean.shape == squares.shape
            and mean.shape in ((0,), shape[-1:])
            and values[0].shape == values[1].shape
            and values[0].ndim == 1
            and all(0 < len(name) <= _MAX_NAME for name in classes)
            and len(columns) in (0, shape[0])
            and len(set(columns)) == len(columns)
            and all(len(name) <= _MAX_NAME for name in columns)
            and (table is None or (len(columns) == len(table.kinds) and max(table.present) <= count))
            and all(np.isfinite(array).all() for array in (mean, squares, *values))
            and all((array >= 0).all() for array in (squares, values[1]))
        )
        if not sensible:
            raise DataError("the description of its data is implausible")
        return cls(kind, shape, bool(answer["fixed"]), classes, count, mean, squares, columns, table, (), 0, *values)


def site_notices(warnings: Sequence[str], skipped: int) -> dict[str, Any]:
    """Return up to 20 shareable warnings of up to 300 characters each, and the number of unreadable files."""
    return {"warnings": [warning[:_MAX_NAME] for warning in shared_notes(warnings)[:20]], "skipped": skipped}


# -- the settings ----------------------------------------------------------------------------------------


def open_settings(settings: DataSettings, kind: str) -> list[str]:
    """Return the keys of the unset task settings for this kind of sample. The sites must agree on their values."""
    if settings.encoder not in ("", NO_ENCODER) and not (settings.feature_mean and settings.feature_std):
        raise SettingsError("encoder: it needs feature-mean and feature-std; set all three, or none of them")
    keys = ["sample-kind", "input-shape", "classes"]
    keys += ["feature-mean", "feature-std"] if TASK_KINDS.get(kind) in STANDARDISED else []
    keys += ["target-mean", "target-std"] if settings.target == VALUES else []
    values = as_config(settings)
    return [key for key in keys if values[key] in ("", "auto")] + ["encoder"] * open_encoder(settings, kind)


def is_complete(settings: DataSettings) -> bool:
    """Return whether the settings alone determine the task, so that no site has to describe its data."""
    return not open_settings(settings, settings.sample_kind)


def open_encoder(settings: DataSettings, kind: str) -> bool:
    """Return whether the sites must agree on an encoder, because the run encodes tables and the encoder is unset."""
    return kind == "features" and not settings.encoder and (settings.missing == "impute" or bool(settings.categories))


def open_statistics(settings: DataSettings, kind: str) -> bool:
    """Return whether the sites must provide statistics of the features, because a setting for them is unset."""
    is_open = not (settings.feature_mean and settings.feature_std)
    return TASK_KINDS.get(kind) in STANDARDISED and (is_open or open_encoder(settings, kind))


def open_values(settings: DataSettings) -> bool:
    """Return whether the sites must provide statistics of the values, because a setting for them is unset."""
    return settings.target == VALUES and not (settings.target_mean and settings.target_std)


def task_of(settings: DataSettings) -> Task:
    """Return the task defined by complete settings, or raise :class:`SettingsError` for invalid values."""
    kind, classes = TASK_KINDS[settings.sample_kind], names_in("classes", settings.classes)
    least = 2 if settings.target == CLASSES else 1
    if len(classes) < least:
        number = "two" if least == 2 else "one"
        raise SettingsError(f"classes = {settings.classes!r}: expected {number} or more names, without duplicates")
    shape = shape_in(settings, settings.sample_kind)
    if kind in STANDARDISED:
        statistics_in(settings, shape[-1])
    if kind == "features":
        columns_in(settings, shape[0])
    check_augment(settings.augment, settings.transforms, kind, shape, "the sites")
    values = value_statistics_in(settings, len(classes)) if settings.target == VALUES else ()
    scale = (tuple(array.tolist()) for array in values)
    return Task(kind, shape, classes, settings.vocabulary if kind == "text" else 0, settings.target, *scale)


def shape_in(settings: DataSettings, kind: str) -> tuple[int, ...]:
    """Return the shape in ``input-shape``, or raise :class:`SettingsError` if it does not suit this kind of sample."""
    try:
        shape = tuple(int(size) for size in settings.input_shape.split("x"))
    except ValueError:
        shape = ()
    if not _suits(shape, kind):
        forms = {"image": "channels x height x width, as in 3x64x64", "series": "steps x channels, as in 48x6"}
        form = forms.get(TASK_KINDS[kind], "one whole number")
        raise SettingsError(f"input-shape = {settings.input_shape!r}: for sample-kind = {kind!r} it must be {form}")
    if kind == "image" and shape[0] not in MODES:
        raise SettingsError(
            f"input-shape = {settings.input_shape!r}: images need 1 or 3 channels, in the first dimension"
        )
    return shape


def statistics_in(settings: DataSettings, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Return ``feature-mean`` and ``feature-std`` as float64 ``(F,)`` each, or raise :class:`SettingsError`."""
    return _pair_in({"feature-mean": settings.feature_mean, "feature-std": settings.feature_std}, width)


def value_statistics_in(settings: DataSettings, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Return ``target-mean`` and ``target-std`` as float64 ``(C,)`` each, or raise :class:`SettingsError`."""
    return _pair_in({"target-mean": settings.target_mean, "target-std": settings.target_std}, width)


def _pair_in(texts: Mapping[str, str], width: int) -> tuple[np.ndarray, np.ndarray]:
    """Return a mean and a standard deviation, float64 ``(width,)`` each, from the values of two settings."""
    pair = []
    for key, text in texts.items():
        try:
            values = np.array([float(word) for word in text.split(",")])
        except ValueError:
            values = np.empty(0)
        usable = np.isfinite(values).all() and (key.endswith("-mean") or (values > 0).all())
        if len(values) not in (1, width) or not usable:
            bound = " above 0" if key.endswith("-std") else ""
            raise SettingsError(
                f"{key} = {text!r:.60}: it must be one number{bound}, or {width} numbers separated by commas"
            )
        pair.append(np.broadcast_to(values, (width,)).copy())
    return pair[0], pair[1]


def columns_in(settings: DataSettings, width: int) -> tuple[str, ...]:
    """Return the names in ``feature-names`` (none if unset), or raise :class:`SettingsError` if they are invalid.

    ``width`` is the number of features. With an encoder, the names are those of the columns before the encoding.
    """
    names = names_in("feature-names", settings.feature_names) if settings.feature_names else ()
    if encoder := encoder_in(settings.encoder):
        if names not in ((), encoder.inputs) or len(encoder.names) != width:
            raise SettingsError(
                f"encoder: it encodes {', '.join(encoder.inputs)[:200]} as {len(encoder.names)} features, which "
                "contradicts feature-names or input-shape; set encoder to the value in the settings of an earlier run"
            )
        return encoder.inputs
    if len(names) not in (0, width):
        raise SettingsError(f"feature-names = {settings.feature_names!r:.200}: expected {width} different names")
    return names


def _listed(names: Sequence[str]) -> str:
    """Join names in the format that :func:`names_in` parses."""
    plain = all(name and "," not in name and name == name.strip() and not name.startswith("[") for name in names)
    return ",".join(names) if plain else json.dumps(list(names), ensure_ascii=False)


def difference(columns: Sequence[str], names: Sequence[str]) -> str:
    """Describe the missing and the unknown columns, or return an empty string if there are none."""
    missing = [name for name in names if name not in set(columns)]
    unknown = [name for name in columns if name not in set(names)]
    lists = {"missing": missing, "unknown": unknown}
    return "; ".join(f"{word}: {', '.join(part[:5])}{' …' * (len(part) > 5)}" for word, part in lists.items() if part)


def _suits(shape: tuple[int, ...], kind: str) -> bool:
    axes = {"image": 3, "series": 2}.get(TASK_KINDS[kind], 1)
    return len(shape) == axes and min(shape) > 0 and math.prod(shape) <= _MAX_SIZE


# -- the agreed task -------------------------------------------------------------------------------------


def agreed(
    settings: DataSettings,
    descriptions: Sequence[Description],
    names: Sequence[str],
    pool: Callable[[DataSettings, list[str]], Pooled] | None = None,
) -> tuple[DataSettings, list[str]]:
    """Return the settings with the agreed task filled in, and one-sentence warnings that name the affected sites.

    Values that are already set take precedence. Otherwise, the run uses the kind, the shape and the columns that most
    sites have, the sorted classes of these sites, and the mean and the standard deviation of each feature over their
    training samples.

    Parameters
    ----------
    settings : DataSettings
        The run's data settings.
    descriptions, names : sequence
        The description and the name of each site.
    pool : callable, optional
        Function that returns the classes and the statistics over all sites. Its arguments are the settings with kind,
        shape and columns, and the names of the sites that fit them. By default, the descriptions provide the classes
        and the statistics.

    Raises
    ------
    SettingsError
        If the user must decide: two kinds, shapes or sets of columns are equally common, a site's images would lose
        their colours, or a class occurs at only one of several sites. The error is also raised if no site fits the
        settings, or if the sites have only one class in total.
    """
    sites = _Sites(list(zip(names, descriptions, strict=True)))
    kind, shape = _agreed_form(sites, settings)
    columns = sites.columns(_named_columns(settings, sites.entries[0][1].shape[0])) if kind == "features" else ()
    result = _with_categories(sites, replace(settings, sample_kind=kind, input_shape=shape), columns)
    pooled = None
    if pool and (not settings.classes or open_statistics(result, kind) or open_values(settings)):
        if open_values(settings) and not settings.classes:
            raise SettingsError(
                "secure-aggregation = true with task = 'regression': the sites can sum their statistics only if the "
                "setting classes lists the values; set classes, or target-mean and target-std"
            )
        pooled = pool(result, [name for name, _ in sites.entries])
    all_classes = set(pooled.classes) if pooled else {name for _, d in sites.entries for name in d.classes}
    if not settings.classes:
        sites.warn_of_twins(all_classes)
        check_common(pooled.classes, pooled.sites) if pooled else sites.check_classes(all_classes)
    result = replace(result, classes=settings.classes or _listed(sorted_names(all_classes)))
    result = _with_scales(sites, result, columns, pooled)
    task_of(result)
    return result, sites.warnings


def _named_columns(settings: DataSettings, width: int) -> tuple[str, ...]:
    """Return the names in the encoder or in ``feature-names`` (none if both are unset) for tables with this width."""
    encoder = encoder_in(settings.encoder)
    return encoder.inputs if encoder else columns_in(settings, width)


def _with_categories(sites: "_Sites", settings: DataSettings, columns: tuple[str, ...]) -> DataSettings:
    """Return the settings with the names of all columns and of the columns that contain categories.

    Raises
    ------
    SettingsError
        If a column contains numbers at one site, and categories at another.
    """
    result = replace(settings, feature_names=_listed(columns))
    if settings.sample_kind != "features" or settings.encoder:
        return result
    tables = [(name, _in_order(d, columns)) for name, d in sites.entries if d.columns]
    categorical = []
    for number, column in enumerate(columns):
        kinds = {name: d.table.kinds[number] if d.table else NUMBER for name, d in tables}
        with_names, with_numbers = ([name for name, k in kinds.items() if k == kind] for kind in (CATEGORY, NUMBER))
        if with_names and with_numbers:
            raise SettingsError(
                f"column {column} contains numbers at {_shown(with_numbers)}, and categories at {_shown(with_names)}; "
                f"correct it, or set categories={column!r}"
            )
        categorical += [column] * bool(with_names)
    if categorical or settings.missing == "impute":
        return replace(result, categories=_listed(categorical)) if tables else replace(result, encoder=NO_ENCODER)
    return result


def _with_scales(
    sites: "_Sites", settings: DataSettings, columns: tuple[str, ...], pooled: Pooled | None
) -> DataSettings:
    """Return the settings with the encoder, if the run needs one, and with the statistics of features and values.

    Without ``pooled``, the descriptions provide the statistics, and the function warns about features that differ
    between sites.
    """
    needs_encoder = open_encoder(settings, settings.sample_kind)
    measured = [(name, _in_order(d, columns)) for name, d in sites.entries if d.mean.size]
    described = [d for _, d in measured]
    if pooled:
        features, values = pooled.divided(statistics_count(settings))
        joint, value_moments = [features] if features.mean.size else [], [values] if values.mean.size else []
    else:
        sites.warnings += (_unlike_columns if needs_encoder else unlike_features)(measured, columns)
        value_moments = _value_moments(settings, [d for _, d in sites.entries])
    if needs_encoder:
        facts, total = (features.facts, features.total) if pooled else _facts_of(described)
        settings = with_encoder(settings, columns, facts, total)
        sites.warnings += encoder_notes(Encoder.from_json(settings.encoder))
    else:
        settings = with_statistics(settings, joint if pooled else described)
    return with_value_statistics(settings, value_moments)


def _facts_of(descriptions: Sequence[Description]) -> tuple[list[TableFacts], Moments]:
    """Return the facts about the sites' tables, and the statistics of their columns over all sites."""
    facts = [d.table or TableFacts.of_numbers(len(d.mean), d.count) for d in descriptions]
    parts = [
        Moments(d.count, np.array(each.present), d.mean, d.squares) for d, each in zip(descriptions, facts, strict=True)
    ]
    return facts, merged(parts)


def with_encoder(
    settings: DataSettings, columns: Sequence[str], facts: Sequence[TableFacts], total: Moments
) -> DataSettings:
    """Return the settings with an encoder, and with the mean and the standard deviation of each encoded feature.

    Parameters
    ----------
    settings : DataSettings
        The settings, with the agreed categorical columns.
    columns : sequence of str
        The names of the columns.
    facts : sequence of TableFacts
        Facts about the tables, in the order of the columns.
    total : Moments
        Statistics of the columns over all tables.
    """
    encoder = make_encoder(columns, facts, total, imputes=settings.missing == "impute")
    mean, std = (",".join(map(repr, values.tolist())) for values in scale_of(encoder, total))
    return replace(
        settings,
        encoder=encoder.to_json(),
        input_shape=str(len(encoder.names)),
        feature_mean=settings.feature_mean or mean,
        feature_std=settings.feature_std or std,
    )


def _unlike_columns(sites: Sequence[tuple[str, Description]], columns: Sequence[str]) -> list[str]:
    """Return the warnings of :func:`unlike_features` for the numeric columns, comparing sites with enough values."""
    warnings = []
    for number, column in enumerate(columns):
        measured = []
        for name, d in sites:
            kind, count = (d.table.kinds[number], d.table.present[number]) if d.table else (NUMBER, d.count)
            if kind == NUMBER:
                part = replace(d, count=count, mean=d.mean[[number]], squares=d.squares[[number]])
                measured.append((name, part))
        warnings += unlike_features(measured, [column])
    return warnings[:MAX_UNLIKE]


def _agreed_form(sites: "_Sites", settings: DataSettings) -> tuple[str, str]:
    """Return the kind and the shape of the run's samples, and remove sites whose samples differ.

    Raise :class:`SettingsError` if no site remains, or in case of a tie.
    """
    encoder = encoder_in(settings.encoder)
    kind, shape = settings.sample_kind, str(len(encoder.inputs)) if encoder else settings.input_shape
    if kind == "auto":
        kind = sites.most("sample-kind", "have different kinds of samples", lambda d: d.kind)
    sites.keep(lambda d: d.kind == kind, lambda d: f"its samples are of kind {d.kind}, but the run uses {kind}")
    tables = kind == "features" and all(d.columns for _, d in sites.entries)
    names = names_in("feature-names", settings.feature_names) if settings.feature_names else ()
    names = encoder.inputs if encoder else names
    names = names or (sites.most_columns() if tables and not shape else ())
    shape = shape or (str(len(names)) if names else sites.shape())
    names = names or next((d.columns for _, d in sites.entries if d.columns and shape_text(d.shape) == shape), ())
    sites.keep(
        lambda d: not d.fixed or shape_text(d.shape) == shape,
        lambda d: (
            f"its columns differ from the run's ({difference(d.columns, names)})"
            if names and d.columns
            else f"its samples have the shape {shape_text(d.shape)}, but the run uses {shape}"
        ),
    )
    if not sites.entries:
        raise SettingsError(f"sample-kind = {kind!r} with input-shape = {shape!r}: no site has such samples")
    for site_shape in sorted({d.shape for _, d in sites.entries if TASK_KINDS[kind] == "image"}):
        if (text := shape_text(site_shape)) != shape:
            resized = _shown(name for name, d in sites.entries if d.shape == site_shape)
            sites.warnings.append(f"{resized}: images of shape {text} are resized to {shape}, the run's shape")
    return kind, str(len(encoder.names)) if encoder else shape


def with_statistics(settings: DataSettings, descriptions: Sequence[Description] | Sequence[Pooled]) -> DataSettings:
    """Return the settings with the mean and standard deviation of each feature over all samples, unless already set.

    The standard deviation of a constant feature is set to 1.
    """
    if not descriptions:
        return settings
    mean, std = _joint_scale(descriptions)
    return replace(settings, feature_mean=settings.feature_mean or mean, feature_std=settings.feature_std or std)


def with_value_statistics(settings: DataSettings, moments: Sequence[Pooled]) -> DataSettings:
    """Return the settings with the mean and standard deviation of each value, as :func:`with_statistics` does."""
    if not moments:
        return settings
    mean, std = _joint_scale(moments)
    return replace(settings, target_mean=settings.target_mean or mean, target_std=settings.target_std or std)


def statistics_count(settings: DataSettings) -> int:
    """Return the number of features in a masked sum of statistics, or 0 if the settings specify the scale."""
    kind = settings.sample_kind
    return shape_in(settings, kind)[-1] if open_statistics(settings, kind) else 0


def _value_moments(settings: DataSettings, descriptions: Sequence[Description]) -> list[Pooled]:
    """Return the moments of the values, in the run's order, for each site that describes all values."""
    names, pools = names_in("classes", settings.classes), []
    for d in descriptions:
        site_names = d.classes or names  # a site that receives the names describes its values in the order of the names
        if len(site_names) == len(d.value_mean) > 0 and set(site_names) == set(names):
            order = [site_names.index(name) for name in names]
            pools.append(Pooled(1, {}, d.count, d.value_mean[order], d.value_squares[order]))
    return pools


def _joint_scale(descriptions: Sequence[Description] | Sequence[Pooled]) -> tuple[str, str]:
    """Return the mean and the standard deviation over the samples of several sites, as strings for settings."""
    total = merged([Moments(d.count, np.full(d.mean.shape, d.count), d.mean, d.squares) for d in descriptions])
    scale = total.mean, deviation(total.mean, total.squares / total.rows)
    mean_text, std_text = (",".join(map(repr, values.tolist())) for values in scale)
    return mean_text, std_text


def unlike_features(sites: Sequence[tuple[str, Description]], columns: Sequence[str] = ()) -> list[str]:
    """Return a warning for each feature whose values differ between sites, for example because of different units.

    The function compares each site's mean with the mean of the other sites, in units of the other sites' standard
    deviation. It also compares each site's standard deviation with the geometric mean of the other sites' standard
    deviations. All sites have the same weight, so a large site with a different unit cannot hide the difference. With
    only two sites, a warning does not say which one is wrong.

    Parameters
    ----------
    sites : sequence of (str, Description)
        Names and descriptions of the sites. ``mean`` and ``squares`` ``(F,)`` list the features in the same order.
    columns : sequence of str
        Names of the features; if empty, warnings number the features from 0.
    """
    if len(sites) < 2:
        return []
    means = np.stack([d.mean for _, d in sites])
    variances = np.stack([d.squares / d.count for _, d in sites])
    logs = np.log(np.sqrt(variances), out=np.zeros_like(variances), where=variances > 0)
    # With only two sites, either could have the wrong unit.
    compare = _pair_differences if len(sites) == 2 else _outliers
    warnings = compare(sites, means, variances, logs)
    return [
        f"feature {columns[feature] if columns else feature}: {'; '.join(texts[:3])}{'; …' * (len(texts) > 3)}. Check "
        "the units and the missing-value codes."
        for feature, texts in sorted(warnings.items())
    ][:MAX_UNLIKE]


def _outliers(
    sites: Sequence[tuple[str, Description]], means: np.ndarray, variances: np.ndarray, logs: np.ndarray
) -> dict[int, list[str]]:
    """Describe the outliers among three or more sites for each feature. The arguments are as in _pair_differences."""
    warnings: dict[int, list[str]] = {}
    for site, (name, described) in enumerate(sites):
        other_sites = np.arange(len(sites)) != site
        centre = means[other_sites].mean(0)
        spread = np.sqrt(variances[other_sites].mean(0) + means[other_sites].var(0))
        reference = np.where(spread > 0, spread, np.sqrt(variances[site]))
        distance = np.abs(means[site] - centre)
        for feature in np.flatnonzero(distance > UNLIKE_MEAN * reference):
            text = f"{name}'s mean is far from the other sites' mean"
            if described.count >= MIN_SHOWN and reference[feature]:
                deviations = f"{distance[feature] / reference[feature]:.2g} standard deviations"
                text = f"{name}'s mean {means[site, feature]:.3g} is {deviations} from the other sites' mean"
            warnings.setdefault(int(feature), []).append(text)
        varied = (variances > 0) & other_sites[:, None]
        ratio = np.exp(logs[site] - logs.sum(0, where=varied) / np.maximum(varied.sum(0), 1))
        ratio[(variances[site] == 0) | ~varied.any(0)] = 1.0
        for feature in np.flatnonzero((ratio > UNLIKE_SPREAD) | (ratio < 1 / UNLIKE_SPREAD)):
            if distance[feature] <= UNLIKE_MEAN * reference[feature]:
                text = f"{name}'s standard deviation is {ratio[feature]:.2g} times the other sites'"
                warnings.setdefault(int(feature), []).append(text)
    return warnings


def _pair_differences(
    sites: Sequence[tuple[str, Description]], means: np.ndarray, variances: np.ndarray, logs: np.ndarray
) -> dict[int, list[str]]:
    """Describe each feature that differs between two sites, without blaming either of them.

    Parameters
    ----------
    sites : sequence of (str, Description)
        Names and descriptions of the sites.
    means, variances, logs : numpy.ndarray
        Means, variances and log standard deviations at the sites, ``(S, F)``. The logarithm of 0 is set to 0.
    """
    both = f"{sites[0][0]} and {sites[1][0]}"
    shows_numbers = min(described.count for _, described in sites) >= MIN_SHOWN
    distance = np.abs(means[0] - means[1])
    spreads = np.sqrt(variances)
    references = np.stack([np.where(spreads[1 - site] > 0, spreads[1 - site], spreads[site]) for site in (0, 1)])
    varied = (variances > 0).all(axis=0)
    ratio = np.where(varied, np.exp(np.abs(logs[0] - logs[1])), 1.0)
    texts: dict[int, list[str]] = {}
    for feature in range(means.shape[1]):
        if (distance[feature] > UNLIKE_MEAN * references[:, feature]).any():
            text = f"the means of {both} are far apart"
            if shows_numbers:
                text = f"the means of {both} differ: {means[0, feature]:.3g} and {means[1, feature]:.3g}"
        elif ratio[feature] > UNLIKE_SPREAD:
            text = f"the standard deviations of {both} differ by a factor of {ratio[feature]:.2g}"
        else:
            continue
        texts[feature] = [text]
    return texts


class _Sites:
    """The remaining sites with their names, and the warnings about all sites."""

    def __init__(self, entries: list[tuple[str, Description]]) -> None:
        self.entries, self.warnings = entries, list[str]()

    def keep(self, fits: Callable[[Description], bool], why_not: Callable[[Description], str]) -> None:
        """Remove the sites that do not fit, and add a warning for each."""
        self.warnings += [f"{name}: {why_not(d)}; the site cannot take part" for name, d in self.entries if not fits(d)]
        self.entries = [(name, d) for name, d in self.entries if fits(d)]

    def most(self, key: str, problem: str, value_of: Callable[[Description], str]) -> str:
        """Return the most common value among the sites, or raise :class:`SettingsError` in case of a tie."""
        counts = Counter(value_of(d) for _, d in self.entries).most_common()
        if len(counts) > 1 and counts[0][1] == counts[1][1]:
            values = [
                f"{v} ({_shown(name for name, d in self.entries if value_of(d) == v)})" for v in sorted(dict(counts))
            ]
            raise SettingsError(f"the sites {problem}, and there is no majority: {'; '.join(values)}; set {key}")
        return counts[0][0] if counts else ""

    def shape(self) -> str:
        """Return the most common shape among the sites with a fixed shape, or among all sites if no shape is fixed."""
        deciding = _Sites([entry for entry in self.entries if entry[1].fixed] or self.entries)
        shape = deciding.most("input-shape", "have samples of different shapes", lambda d: shape_text(d.shape))
        channels = int(shape.split("x")[0]) if shape else 0
        coloured = [name for name, d in self.entries if not d.fixed and len(d.shape) == 3 and d.shape[0] > channels]
        if coloured:
            raise SettingsError(
                f"the images of most sites are grey, {shape}; {_shown(coloured)} would lose its colours: set "
                f"input-shape (3x{shape.partition('x')[2]} keeps the colours)"
            )
        return shape

    def having(self, label: str) -> str:
        """Return the names of the sites that have a label, in parentheses, or an empty string if there are none."""
        names = [name for name, d in self.entries if label in d.classes]
        return f" ({_shown(names)})" if names else ""

    def warn_of_twins(self, classes: Collection[str]) -> None:
        """Add a warning for classes with nearly equal names."""
        for twins in nearly_equal(classes):
            names = [listed([twin]) + self.having(twin) for twin in twins]
            self.warnings.append(
                f"classes with nearly equal names are separate classes: {', '.join(names)}; if they are the same "
                "class, rename it at one of the sites"
            )

    def check_classes(self, classes: Iterable[str]) -> None:
        """Raise :class:`SettingsError` if a label occurs at only one site, because it may be a synonym of another."""
        lone_labels: dict[str, list[str]] = {}
        for label in sorted_names(set(classes)):
            sites = [name for name, d in self.entries if label in d.classes]
            if len(sites) == 1 and len(self.entries) > 1:
                lone_labels.setdefault(sites[0], []).append(label)
        if lone_labels:
            texts = [
                f"{listed(labels[:5])}{' …' * (len(labels) > 5)} at {site}"
                for site, labels in list(lone_labels.items())[:5]
            ]
            raise _alone("; ".join(texts) + "; …" * (len(lone_labels) > 5), classes)

    def most_columns(self) -> tuple[str, ...]:
        """Return the most common columns in their most common order, or no columns if no site names its columns.

        Raise :class:`SettingsError` in case of a tie.
        """
        named = [(name, d) for name, d in self.entries if d.columns]
        if not named:
            return ()
        orders = Counter(d.columns for _, d in named)
        sets = Counter(frozenset(d.columns) for _, d in named).most_common()
        if len(sets) > 1 and sets[0][1] == sets[1][1]:
            (first, a), (second, b) = (next((n, d) for n, d in named if set(d.columns) == s) for s, _ in sets[:2])
            raise SettingsError(
                f"the columns of {second} differ from the columns of {first} ({difference(b.columns, a.columns)}), and "
                "neither has a majority of the sites: rename columns, or set feature-names"
            )
        return next(order for order, _ in orders.most_common() if set(order) == sets[0][0])

    def columns(self, columns: tuple[str, ...]) -> tuple[str, ...]:
        """Return the run's column names in order, and remove the sites with other columns."""
        columns = columns or self.most_columns()
        self.keep(
            lambda d: not d.columns or set(d.columns) == set(columns),
            lambda d: f"its columns differ from the run's ({difference(d.columns, columns)})",
        )
        if swapped := [name for name, d in self.entries if d.columns not in ((), columns)]:
            self.warnings.append(
                f"{_shown(swapped)}: columns are in a different order; Posy puts them into the run's order"
            )
        if columns and (nameless := [name for name, d in self.entries if not d.columns]):
            shown = ", ".join(columns[:5]) + " …" * (len(columns) > 5)
            self.warnings.append(
                f"{_shown(nameless)}: data without column names; Posy assumes the columns {shown} in this order"
            )
        return columns


def check_common(classes: Mapping[str, int], sites: int) -> None:
    """Raise :class:`SettingsError` if a class occurs at only one of several sites.

    ``classes`` counts the sites per class.
    """
    lone_labels = sorted_names({label for label, count in classes.items() if count == 1})
    if lone_labels and sites > 1:
        raise _alone(listed(lone_labels[:5]) + " …" * (len(lone_labels) > 5), classes)


def _alone(labels: str, classes: Iterable[str]) -> SettingsError:
    """Return the error for labels that only one site has."""
    return SettingsError(
        f"classes that only one site has: {labels}. Sites may have different names for the same class, and classes is "
        "not set: "
        f"rename the class at the site, or confirm all classes with classes={_listed(sorted_names(set(classes)))!r}"
    )


def _shown(sites: Iterable[str]) -> str:
    """Return the names of up to five sites and the number of remaining sites, for a message."""
    names = list(sites)
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _in_order(description: Description, columns: tuple[str, ...]) -> Description:
    """Return a description with its features in the run's order."""
    if not description.columns:
        return description
    order = [description.columns.index(name) for name in columns]
    mean, squares = (part[order] if part.size else part for part in (description.mean, description.squares))
    table = description.table.in_order(order) if description.table else None
    return replace(description, mean=mean, squares=squares, columns=columns, table=table)
