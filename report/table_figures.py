"""The figures of a table of runs: the mean ranks of its rows, and each client's gain over local training."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from posy import figure_style as style
from posy import figures
from posy.report.comparison import ALPHA, Ranks, Run
from posy.strategies.methods import paper_name

Client = tuple[int, int]
"""A seed and a client. The seed of a site with its own data is 0, because all seeds have the same sites."""
BASELINE = "local"
"""The method that the gains refer to."""


def draw_ranks(ranked: Ranks, file: Path, title: str, methods: Mapping[str, str]) -> None:
    """Draw the mean rank of each row. ``methods`` maps the rows to their methods."""
    names, colours = _names(methods), style.rows_of(methods)
    best, ties = float(ranked.mean.iloc[0]), ranked.ties_with_best()
    end = best + ranked.critical_difference if ranked.friedman < ALPHA else float(len(ranked.mean))
    figures.ranking(
        {names.get(row, row): figures.Interval(mean, *ranked.interval(row)) for row, mean in ranked.mean.items()},
        file,
        band=(best, min(end, float(len(ranked.mean)))),
        bold=[names.get(row, row) for row in ties],
        colours={names[row]: colour for row, colour in colours.items()},
        title=title,
        note=(
            f"{ranked.blocks} blocks (data sets × seeds). Interval: 95 % of the mean rank (Student's t). Shaded, bold: "
            "not significantly different from the best (Nemenyi, 5 %)"
        ),
        xlabel="mean rank (1 is best)",
    )


def draw_gains(runs: Sequence[Run], file: Path, title: str) -> None:
    """Draw each client's gain over local training for each row and variant, if the table has a row of local training.

    Each row is scored at its method's evaluation point, in the last round.
    """
    gains = {
        variant: result for variant in dict.fromkeys(r.variant for r in runs) if (result := gains_of(runs, variant))
    }
    if not gains:
        return
    metric, methods = runs[0].metric, {run.row: run.method for run in runs if run.method != BASELINE}
    means = {row: _mean([rows[row] for _, rows in gains.values() if row in rows]) for row in methods}
    rows = sorted(methods, key=lambda row: -means[row])
    factor = 100 if metric.in_percent else 1
    panels = {}
    for variant, (local, of_rows) in gains.items():
        matrix = [[of_rows.get(row, {}).get(client, np.nan) for client in local] for row in rows]
        panels[variant] = factor * np.array([*local.values()]), factor * np.array(matrix)
    names, sites = _names(methods), runs[0].summary.get("sites") or []
    figures.gains(
        panels,
        [names[row] for row in rows],
        file,
        columns=sites if all(sites) else (),
        score=metric.title + (", %" if metric.in_percent else ""),
        unit=" in percentage points" if metric.in_percent else "",
        colours={names[row]: colour for row, colour in style.rows_of(methods).items()},
        title=title,
        note=(
            "each client's gain over local training in the last round; methods sorted by their mean gain"
            + ("" if all(sites) and sites else "; clients of all seeds, sorted by their score under local training")
        ),
    )


def gains_of(runs: Sequence[Run], variant: str) -> tuple[dict[Client, float], dict[str, dict[Client, float]]] | None:
    """Return the clients' scores under local training, and their gains by row, in one variant of a table.

    A gain is positive if the row is better, also for metrics of which lower values are better. The scores and gains of
    a client are means over the folds, and for a site, also over the seeds. The result is None if the variant has no
    row of local training.
    """
    of_variant = [run for run in runs if run.variant == variant]
    baseline = {run.repeat: run.scores(run.point) for run in of_variant if run.method == BASELINE}
    if not baseline:
        return None
    of_sites = bool(of_variant[0].summary.get("sites"))
    sign = -1 if of_variant[0].metric.lower_is_better else 1
    local: dict[Client, list[float]] = {}
    gains: dict[str, dict[Client, list[float]]] = {}
    for (seed, _), scores in baseline.items():
        for client, score in scores.items():
            local.setdefault((0 if of_sites else seed, client), []).append(score)
    for run in of_variant:
        if run.method != BASELINE and run.repeat in baseline:
            scores, reference = run.scores(run.point), baseline[run.repeat]
            for client in scores.keys() & reference.keys():
                key = (0 if of_sites else run.seed, client)
                gains.setdefault(run.row, {}).setdefault(key, []).append(sign * (scores[client] - reference[client]))
    averaged = {
        row: {key: statistics.fmean(each) for key, each in row_gains.items()} for row, row_gains in gains.items()
    }
    return {key: statistics.fmean(scores) for key, scores in sorted(local.items())}, averaged


def _mean(gains: Sequence[Mapping[Client, float]]) -> float:
    """Return the mean gain over all clients, or minus infinity without gains."""
    values = [gain for of_clients in gains for gain in of_clients.values()]
    return statistics.fmean(values) if values else -np.inf


def _names(methods: Mapping[str, str]) -> dict[str, str]:
    """Return the names of rows in a figure: the papers' names for rows that are named after their method's setting."""
    return {row: paper_name(method) if row == method else row for row, method in methods.items()}
