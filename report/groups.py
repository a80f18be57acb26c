"""Runs that differ in their seed only, put together, and named by what sets them apart from others."""

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from posy.data.settings import DataSettings
from posy.report.charts import Band, Series
from posy.report.comparison import Run, over_clients, ranks, scores_by_block
from posy.report.recorded import Recorded
from posy.settings import settings_of
from posy.strategies.registry import declared, owner

MOST_DIFFERENCES = 4
"""Settings that name a run beside others; one that differs in more of them has the name of its folder."""
NOT_A_SETTING = "not one of its settings"
"""What stands for a setting of another method."""


@dataclass(frozen=True, eq=False)
class Group:
    """Runs that differ in their seed only, in the order of their seeds."""

    series: Series
    runs: tuple[Recorded, ...]

    @property
    def first(self) -> Recorded:
        """The run that stands for all where they cannot be averaged."""
        return self.runs[0]

    def curve(self, key: str, of: str = "mean") -> Band:
        """Return the mean of a number over the seeds by round, with its standard deviation (0 of one seed)."""
        curves = [dict(run.curve(key, of)) for run in self.runs]
        shared = sorted(set.intersection(*map(set, curves)))
        return [(n, *_mean([curve[n] for curve in curves])) for n in shared]


def grouped(runs: Sequence[Recorded]) -> list[Group]:
    """Return groups of runs in the order of the runs; runs of equal settings and seed are groups of their own."""
    ours = declared()
    known = {key: item.default for key, item in ours.items() if item.decides and key != "seed"}
    known |= {key: None for run in runs for key in run.settings if key not in ours}  # those of people's own methods
    decisive = {
        run: {k: run.settings.get(k, known[k]) for k in known if owner(k) in (None, run.method)} for run in runs
    }
    alike: dict[tuple[tuple[str, Any], ...], list[Recorded]] = {}
    for run in runs:
        alike.setdefault(tuple(decisive[run].items()), []).append(run)
    parts: list[list[Recorded]] = []
    for found in alike.values():
        several = max(Counter(run.settings.get("seed") for run in found).values()) > 1
        parts += [[run] for run in found] if several else [sorted(found, key=lambda run: run.settings["seed"])]
    differing = differences([decisive[part[0]] for part in parts])
    names = [part[0].method for part in parts]
    if len(set(names)) < len(names):
        folders = [f"{part[0].method}, {part[0].path.name}" for part in parts]
        many = len(differing) > MOST_DIFFERENCES and len(set(folders)) == len(folders)
        names = folders if many else [_name(part[0], decisive[part[0]], differing) for part in parts]
    names = [f"{n}, {part[0].path.name}" if names.count(n) > 1 else n for n, part in zip(names, parts, strict=True)]
    return [
        Group(Series(name, index), tuple(part)) for index, (name, part) in enumerate(zip(names, parts, strict=True))
    ]


def differences(settings: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return the settings that differ, with the value of each; those that some do not have differ among the others."""
    keys = dict.fromkeys(key for one in settings for key in one)
    values = {key: [one.get(key, NOT_A_SETTING) for one in settings] for key in keys}
    return {key: found for key, found in values.items() if len({repr(v) for v in found} - {repr(NOT_A_SETTING)}) > 1}


def by_data(groups: Sequence[Group]) -> dict[str, list[Group]]:
    """Return the groups by the data that their clients hold, which is named by the settings in which it differs."""
    known = settings_of(DataSettings)
    keys = [key for key, item in known.items() if item.decides]
    data = [{key: group.first.settings.get(key, known[key].default) for key in keys} for group in groups]
    differing = differences(data)
    found: dict[str, list[Group]] = {}
    for group, own in zip(groups, data, strict=True):
        name = ", ".join(str(own[key]) if key == "dataset" else f"{key}={own[key]}" for key in differing)
        found.setdefault(name, []).append(group)
    return found


def compared(groups: Sequence[Group]) -> tuple[list[dict[str, Any]], str]:
    """Compare groups client by client, as a table does: its rows, and a sentence on ranks, if there are enough.

    Runs that have not completed are left out; one that has diverged ranks last. It is an :class:`ImportError` without
    the packages for the tests.
    """
    ended = [
        (run, Run(data, group.series.name, run.method, int(run.summary["seed"]), run.summary, run.path))
        for data, own in by_data(groups).items()
        for group in own
        for run in group.runs
    ]
    runs = [told for run, told in ended if run.summary["status"] == "completed" and run.clients]
    diverged = [(told.variant, told.seed, told.row) for run, told in ended if run.summary["status"] == "diverged"]
    rows: list[dict[str, Any]] = over_clients(runs).to_dict("records") if runs else []
    ranked = ranks(scores_by_block(runs, diverged)) if runs else None
    if ranked is None:
        return rows, ""
    order = ", ".join(f"{name} {rank:.2f}" for name, rank in ranked.mean.items())
    partial = dict.fromkeys(row["method"] for row in rows if not row["ranked"])
    unranked = f" Not ranked, because they cover fewer clients: {', '.join(partial)}." if partial else ""
    return rows, (
        f"Mean rank over {ranked.blocks} blocks (data and seed): {order}. Friedman's test of all being equal: "
        f"p = {ranked.friedman:.2g}. Not significantly different from the best (Nemenyi, 5 %): "
        f"{', '.join(ranked.ties_with_best())}.{unranked}"
    )


def _name(run: Recorded, own: Mapping[str, Any], differing: Mapping[str, Any]) -> str:
    """Return the method and the settings that differ; of paths the last part."""
    differ = {key: str(own[key]) for key in differing if key in own and key != "method"}
    short = {key: value.rpartition("/")[2] if value.startswith("/") else value for key, value in differ.items()}
    data = [short.pop("dataset")] if "dataset" in short else []
    return ", ".join([run.method, *data, *(f"{key}={value}" for key, value in short.items())])


def _mean(values: Sequence[float]) -> tuple[float, float]:
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0
