"""Groups of runs that differ only in their seeds, named after the settings in which the groups differ."""

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from posy.data.settings import DataSettings
from posy.report.charts import Band, Series
from posy.report.comparison import Run, check_metrics, over_clients, ranks, scores_by_block
from posy.report.recorded import Recorded
from posy.settings import settings_of
from posy.strategies.registry import declared, owner

MOST_DIFFERENCES = 4
"""Maximum number of differing settings in a group's name. With more settings, a run's folder names the group."""
NOT_A_SETTING = "not one of its settings"
"""Text shown for a setting that a method does not have."""


@dataclass(frozen=True, eq=False)
class Group:
    """Runs that differ only in their seeds, sorted by seed."""

    series: Series
    runs: tuple[Recorded, ...]

    @property
    def first(self) -> Recorded:
        """The run that represents the group in figures that cannot be averaged."""
        return self.runs[0]

    def curve(self, key: str, of: str = "mean") -> Band:
        """Return a recorded number's mean and standard deviation over the seeds in each round.

        The standard deviation is 0 for a single seed.
        """
        curves = [dict(run.curve(key, of)) for run in self.runs]
        shared = sorted(set.intersection(*map(set, curves)))
        return [(n, *_mean([curve[n] for curve in curves])) for n in shared]


def grouped(runs: Sequence[Recorded]) -> list[Group]:
    """Group runs that differ only in their seeds. If some also share a seed, each run forms its own group."""
    posy_settings = declared()
    defaults = {key: item.default for key, item in posy_settings.items() if item.decides and key != "seed"}
    defaults |= {key: None for run in runs for key in run.settings if key not in posy_settings}  # custom methods
    decisive = {
        run: {k: run.settings.get(k, defaults[k]) for k in defaults if owner(k) in (None, run.method)} for run in runs
    }
    runs_by_settings: dict[tuple[tuple[str, Any], ...], list[Recorded]] = {}
    for run in runs:
        runs_by_settings.setdefault(tuple(decisive[run].items()), []).append(run)
    parts: list[list[Recorded]] = []
    for equal_runs in runs_by_settings.values():
        has_duplicates = max(Counter(run.settings.get("seed") for run in equal_runs).values()) > 1
        parts += (
            [[run] for run in equal_runs]
            if has_duplicates
            else [sorted(equal_runs, key=lambda run: run.settings["seed"])]
        )
    differing = differences([decisive[part[0]] for part in parts])
    names = [part[0].method for part in parts]
    if len(set(names)) < len(names):
        folders = [f"{part[0].method}, {part[0].path.name}" for part in parts]
        use_folders = len(differing) > MOST_DIFFERENCES and len(set(folders)) == len(folders)
        names = folders if use_folders else [_name(part[0], decisive[part[0]], differing) for part in parts]
    names = [f"{n}, {part[0].path.name}" if names.count(n) > 1 else n for n, part in zip(names, parts, strict=True)]
    return [
        Group(Series(name, index), tuple(part)) for index, (name, part) in enumerate(zip(names, parts, strict=True))
    ]


def differences(settings: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return the settings with more than one value, and their values.

    A missing setting does not count as a different value.
    """
    keys = dict.fromkeys(key for mapping in settings for key in mapping)
    values = {key: [mapping.get(key, NOT_A_SETTING) for mapping in settings] for key in keys}
    return {key: column for key, column in values.items() if len({repr(v) for v in column} - {repr(NOT_A_SETTING)}) > 1}


def by_data(groups: Sequence[Group]) -> dict[str, list[Group]]:
    """Return the groups, keyed by the data settings in which they differ."""
    declared_settings = settings_of(DataSettings)
    keys = [key for key, item in declared_settings.items() if item.decides]
    data = [{key: group.first.settings.get(key, declared_settings[key].default) for key in keys} for group in groups]
    differing = differences(data)
    groups_by_data: dict[str, list[Group]] = {}
    for group, group_data in zip(groups, data, strict=True):
        name = ", ".join(str(group_data[key]) if key == "dataset" else f"{key}={group_data[key]}" for key in differing)
        groups_by_data.setdefault(name, []).append(group)
    return groups_by_data


def compared(groups: Sequence[Group]) -> tuple[list[dict[str, Any]], str]:
    """Compare groups client by client, and return the rows of a table and a sentence about the ranks.

    The function skips incomplete runs, and ranks a diverged run last. If there are too few blocks, the sentence is
    empty.

    Raises
    ------
    ImportError
        If the packages for the tests are missing.
    SettingsError
        If the runs have different metrics.
    """
    table_runs = [
        (run, Run(data, group.series.name, run.method, int(run.summary["seed"]), run.summary, run.path))
        for data, same_data in by_data(groups).items()
        for group in same_data
        for run in group.runs
    ]
    completed = [entry for run, entry in table_runs if run.summary["status"] == "completed" and run.clients]
    runs = [entry for entry in completed if entry.comparable]
    diverged = [
        (entry.variant, entry.seed, entry.row) for run, entry in table_runs if run.summary["status"] == "diverged"
    ]
    check_metrics(runs)
    rows: list[dict[str, Any]] = over_clients(runs).to_dict("records") if runs else []
    ranked = ranks(scores_by_block(runs, diverged)) if runs else None
    if ranked is None:
        return rows, ""
    order = ", ".join(f"{name} {rank:.2f}" for name, rank in ranked.mean.items())
    partial_rows = dict.fromkeys(row["method"] for row in rows if not row["ranked"])
    unranked = f" Not ranked, because they cover too few clients: {', '.join(partial_rows)}." if partial_rows else ""
    return rows, (
        f"Mean ranks over {ranked.blocks} blocks (data and seed): {order}. Friedman's test of the hypothesis that all "
        f"are equal: p = {ranked.friedman:.2g}. Not significantly different from the best (Nemenyi, 5 %): "
        f"{', '.join(ranked.ties_with_best())}.{unranked}"
    )


def _name(run: Recorded, settings: Mapping[str, Any], differing: Mapping[str, Any]) -> str:
    """Return a group's name: the method and the differing settings, with paths shortened to their last components."""
    differ = {key: str(settings[key]) for key in differing if key in settings and key != "method"}
    short = {key: value.rpartition("/")[2] if value.startswith("/") else value for key, value in differ.items()}
    data = [short.pop("dataset")] if "dataset" in short else []
    return ", ".join([run.method, *data, *(f"{key}={value}" for key, value in short.items())])


def _mean(values: Sequence[float]) -> tuple[float, float]:
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0
