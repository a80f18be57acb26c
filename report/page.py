"""Write a report on runs as a self-contained HTML file that works offline."""

import base64
import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from PIL import Image

from posy.metrics import METRICS, Metric, column_of
from posy.report import charts
from posy.report.charts import SMALL, Series
from posy.report.comparison import SAME_CLIENTS
from posy.report.groups import Group, by_data, compared, differences, grouped
from posy.report.recorded import Points, Recorded
from posy.server_app.progress import ABSENT, LIMITED_WORDS, POOLED, coverage, duration, members_of, size
from posy.settings import SettingsError
from posy.strategies.columns import POINTS
from posy.strategies.registry import declared
from posy.words import capitalised

MOST_CLIENTS, FIRST_CLIENTS = 60, 12
"""Maximum number of clients with a chart on a page, and number of charts that are visible at first."""
TENTH = 11
"""Smallest number of clients for which the lowest tenth contains more than one client."""
MOST_ROWS = 40
"""Maximum number of rows of a heat map."""
RECORDED = ("train_loss", "round", "cohort", "bytes_up", "bytes_down", "sent_again", "late_replies", "dp_delta")
"""Numbers that every run records for each round. All other numbers are specific to the method."""
DRAWN_HERE = (*METRICS, "loss", "clients", "partition")
"""Pictures of a run that the page replaces with its own charts."""
WHICH = {"last": "last", "best": "best, on validation", "upper-bound": "upper bound", "average": "mean of the last"}
SPREAD = {"min": "worst client", "tenth": "worst tenth", "max": "best client", "weighted": "weighted by samples"}
COLOURS = 160
"""Number of colours in an embedded picture. A few colours are enough for charts, and make the file much smaller."""
AT = {"served": "served model", "local": "local model"}


_TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).parent / "templates"), autoescape=True, undefined=StrictUndefined
)
_PARTS: Any = _TEMPLATES.get_template("parts.html").module
"""Macros that return parts of the page as HTML. They escape all text."""


def page(paths: Iterable[Path]) -> str:
    """Return an HTML report on the runs in the directories ``paths``.

    Raises :class:`SettingsError` if a directory contains no run.
    """
    groups = grouped([Recorded.read(path) for path in dict.fromkeys(path.resolve() for path in paths)])
    sections = {
        "Runs": _runs(groups),
        "Settings that differ": _settings(groups),
        "Over the rounds": _curves(groups),
        "Scores": _scores(groups),
        "Central test set": _central(groups),
        "Comparison": _comparison(groups),
        "Clients": _clients(groups),
        "Quantities of the methods": _quantities(groups),
        "Privacy": _privacy(groups),
        "Dropped and limited replies": _dropped(groups),
        "Costs": _costs(groups),
    }
    title = ", ".join(group.series.name for group in groups[:4]) + (", …" if len(groups) > 4 else "")
    non_empty = {name: content for name, content in sections.items() if content}
    keys = [group.series.key() for group in groups]
    return _TEMPLATES.get_template("page.html").render(title=title, sections=non_empty, keys=keys)


def _runs(groups: Sequence[Group]) -> Markup:
    rows = []
    for group, run in _each(groups):
        summary, machine = run.summary, run.config.get("machine", {})
        device = machine.get("gpu") or machine.get("cpu") or ""
        rounds = f"{summary['rounds']} of {run.settings['num-server-rounds']}"
        facts = (run.method, summary["dataset"], summary["num-clients"], rounds, summary["seed"], summary["status"])
        rows.append([_PARTS.key(group.series, named=True), run.path.name, *map(str, facts), device])
    columns = ["", "folder", "method", "data set", "clients", "rounds", "seed", "status", "machine"]
    declared_settings = declared()
    changed = {
        key: group.first.settings.get(key)
        for group in groups[:1]
        for key, item in declared_settings.items()
        if item.decides and group.first.settings.get(key, item.default) != item.default
    }
    common = {k: v for k, v in changed.items() if all(group.first.settings.get(k) == v for group in groups)}
    common = {key: value for key, value in common.items() if key not in ("method", "seed", "dataset", "num-clients")}
    text = ", ".join(f"{key}={value}" for key, value in common.items())
    note = _PARTS.soft(f"Settings that all runs share and that differ from the defaults: {text}." if text else "")
    return _PARTS.table(columns, rows, numbers=("clients", "rounds", "seed")) + note


def _settings(groups: Sequence[Group]) -> Markup:
    declared_settings = declared()
    decisive = {
        k
        for g in groups
        for k in g.first.settings
        if k != "seed" and (k not in declared_settings or declared_settings[k].decides)
    }
    differing = differences([{k: v for k, v in g.first.settings.items() if k in decisive} for g in groups])
    rows = [[key, *(str(value) for value in values)] for key, values in differing.items()]
    columns = ["setting", *(_PARTS.key(group.series) for group in groups)]
    return _PARTS.table(columns, rows) if rows else Markup("")


def _curves(groups: Sequence[Group]) -> Markup:
    figures = []
    for point in POINTS:
        for metric, scored in _by_metric(groups).items():
            worst = "max" if metric.lower_is_better else "min"
            for of, words in (("mean", _mean_of(scored)), ("tenth", "worst tenth"), (worst, "worst client")):
                if of == "tenth" and not any(run.summary["num-clients"] >= TENTH for _, run in _each(scored)):
                    continue
                curves = {group.series: group.curve(column_of(point, metric.name), of) for group in scored}
                title = f"{capitalised(metric.title)}, {AT[point]}"
                figures.append(_figure(title, words, curves, percent=metric.in_percent))
    for key in ("train_loss", "served_loss", "local_loss"):
        curves = {group.series: group.curve(key) for group in groups}
        title = "Training loss" if key == "train_loss" else f"Loss, {AT[key[:-5]]}"
        figures.append(_figure(title, _mean_of(groups), curves))
    curves = {group.series: group.curve("system_accuracy") for group in groups}
    figures.append(_figure("System accuracy", "pooled test samples", curves, percent=True))
    for metric, scored in _by_metric(groups).items():
        curves = {group.series: group.curve("central", metric.name) for group in scored}
        title = f"{capitalised(metric.title)} on the central test set"
        figures.append(_figure(title, "served model", curves, percent=metric.in_percent))
    has_several_seeds = any(len(group.runs) > 1 for group in groups)
    note = "Lines show means over the seeds, and bands show their standard deviations." if has_several_seeds else ""
    return _PARTS.legend(groups) + _PARTS.soft(note) + _PARTS.charts(figures)


def _by_metric(groups: Sequence[Group]) -> dict[Metric, list[Group]]:
    """Return the groups, keyed by the metric of their runs."""
    by_metric: dict[Metric, list[Group]] = {}
    for group in groups:
        by_metric.setdefault(group.first.metric, []).append(group)
    return by_metric


def _is_pooled(run: Recorded) -> bool:
    """Return whether the scores of a run are over all samples, because it used secure aggregation."""
    return bool(run.summary.get("client-scores"))


def _mean_of(groups: Sequence[Group]) -> str:
    """Return which samples or clients the mean in the runs' records covers."""
    pooled = [_is_pooled(run) for _, run in _each(groups)]
    if all(pooled):
        return POOLED
    return "mean over the clients" + (f"; with secure aggregation, {POOLED}" if any(pooled) else "")


def _scores(groups: Sequence[Group]) -> Markup:
    rows = [
        [_PARTS.key(group.series), run.path.name, run.metric.title, point, *row]
        for group, run in _each(groups)
        for point in POINTS
        for row in _spreads(run, point)
    ]
    if not rows:
        return Markup("")
    pooled = [_is_pooled(run) for _, run in _each(groups)]
    columns = ["", "folder", "metric", "model", POOLED, "mean", "std", *SPREAD.values()]
    columns += ["Jain's index", "clients", "when"]
    if not any(pooled):
        columns, *rows = [[*row[:4], *row[5:]] for row in (columns, *rows)]
    note = _PARTS.scores_note(ABSENT if any(pooled) else "", POOLED)
    return note + _PARTS.table(columns, rows, numbers=columns[4:-1])


def _spreads(run: Recorded, point: str) -> list[list[str]]:
    """Return table rows with a run's scores at an evaluation point: a row per round, and one for a mean over rounds."""
    rows: dict[str, list[str]] = {}
    text, columns = run.metric.format, list(SPREAD)
    if run.metric.lower_is_better:
        columns = ["max" if of == "min" else "min" if of == "max" else of for of in columns]
    names: dict[str, list[str]] = {}
    for which, words in WHICH.items():
        if not (figures := run.summary[point].get(which)):
            continue
        at = f"round {figures['round']}" if "round" in figures else f"{figures['evaluations']} evaluations"
        names.setdefault(at, []).append(words)
        covered = coverage(round(figures["clients"]), members_of(run.summary)) if "clients" in figures else ""
        if "samples" in figures:  # with secure aggregation
            cells = [text(figures["mean"]), *[ABSENT] * (3 + len(SPREAD))]
        else:
            jain = "" if figures["jain"] is None else f"{figures['jain']:.4f}"
            cells = ["", *(text(figures[of]) for of in ("mean", "std", *columns)), jain]
        rows.setdefault(at, [*cells, covered])
    return [[*row, f"{at}: {', '.join(names[at])}"] for at, row in rows.items()]


def _central(groups: Sequence[Group]) -> Markup:
    """Return a table with the metric of each run on its central test set."""
    rows = []
    for group, run in _each(groups):
        for point in POINTS:
            scores = run.summary.get("central", {}).get(point, {})
            if not (spread := scores.get("metrics", {}).get(run.metric.name)):
                continue
            ends = scores.get("intervals", {}).get(run.metric.name)
            interval = f"{run.metric.number(ends[0])} to {run.metric.format(ends[1])}" if ends else ""
            figures = [run.metric.format(spread[of]) for of in ("mean", "std", "min", "max")]
            counts = [str(scores["models"]), str(run.summary["central"]["samples"])]
            facts = (run.path.name, run.metric.title, point, *figures, interval, *counts)
            rows.append([_PARTS.key(group.series), *facts])
    columns = ["", "folder", "metric", "model", "mean", "std", "min", "max", "95 % interval", "models", "samples"]
    return _PARTS.table(columns, rows, numbers=columns[4:]) if rows else Markup("")


def _comparison(groups: Sequence[Group]) -> Markup:
    if len(groups) < 2 and all(len(group.runs) < 2 for group in groups):
        return Markup("")
    try:
        rows, sentence = compared(groups)
    except SettingsError as error:
        return _PARTS.paragraph(f"Not available: {error}.")
    except ImportError as error:
        return _PARTS.paragraph(f"The tests need additional packages ({error}). Run pip install 'posy[compare]'.")
    if not rows and any(_is_pooled(run) for _, run in _each(groups)):
        return _PARTS.paragraph(
            "Not available: with secure aggregation the server does not know the scores of individual clients."
        )
    by_name = {group.series.name: group for group in groups}
    lines = []
    for row in rows:
        group = by_name[row["method"]]
        seeds = len(group.runs)
        metric = group.first.metric
        column = column_of(row["point"], metric.name)
        spread = Group(group.series, group.runs).curve(column)[-1:] if seeds > 1 else []
        covered = f", {coverage(row['clients'], row['members'])} clients" if row["clients"] < row["members"] else ""
        over_seeds = f" ± {metric.format(spread[0][2])}" if spread else ""
        best = "≈" if row["alike"] else ""
        gains = [metric.number(row[f"gain-{o}"], "+") if row[f"losing-{o}"] else "" for o in ("local", "fedavg")]
        losing = [row[f"losing-{other}"] for other in ("local", "fedavg")]
        cells = [
            metric.format(row["mean"]) + over_seeds + covered,
            best,
            *(metric.format(row[key]) for key in ("worst", "tenth", "std")),
        ]
        paired = [gains[0], losing[0], gains[1], losing[1]]
        lines.append([_PARTS.key(group.series), row["variant"], row["point"], str(seeds), *cells, *paired])
    columns = ["", "data", "model", "seeds", "mean ± std over the seeds", "best", "worst client", "worst tenth"]
    columns += ["std of the clients", "over Local", "clients that lose", "over FedAvg", "clients that lose"]
    column_numbers = [
        n for n, name in enumerate(columns) if name in ("", "model", "seeds") or any(line[n] for line in lines)
    ]
    note = (
        "The scores are from the last round of the completed runs. The column “model” names the model that is "
        "scored. ≈ marks the best row, and all rows that are not significantly different from it (Wilcoxon's "
        "signed-rank test over the clients of all seeds at 5 %, adjusted for the number of rows by Holm). Rows are "
        "summarised over the clients that all rows cover. A row that covers fewer clients than took part "
        "shows its number of clients. A row that covers fewer than nine tenths as many clients as the row with the "
        "most clients is not ranked."
    )
    if any(row["same"] for row in rows):
        note += f" {SAME_CLIENTS.replace('`', '')}"
    selected_lines = [[line[n] for n in column_numbers] for line in lines]
    table = _PARTS.table([columns[n] for n in column_numbers], selected_lines, numbers=columns[3:])
    return _PARTS.soft(note) + table + _PARTS.paragraph(sentence)


def _clients(groups: Sequence[Group]) -> Markup:
    parts = Markup("")
    for data, same_data in by_data(groups).items():
        seed = same_data[0].first.summary["seed"]
        runs = {g.series: run for g in same_data for run in g.runs if run.summary["seed"] == seed}
        metric = same_data[0].first.metric
        runs = {series: run for series, run in runs.items() if run.metric == metric}
        curves = {series: run.client_curves(column_of(run.point, metric.name)) for series, run in runs.items()}
        last: dict[int, list[float]] = {}
        for by_client in curves.values():
            for client, curve in by_client.items():
                last.setdefault(client, []).append(curve[-1][1])
        sign = -1 if metric.lower_is_better else 1
        clients = sorted(last, key=lambda client: (sign * sum(last[client]) / len(last[client]), client))
        if not clients:
            continue
        mix = next((run.partition for run in runs.values() if run.partition), None)
        named = next((run for run in runs.values() if run.summary.get("sites")), same_data[0].first)
        figures = [
            _client(client, named.client_name(client), data, curves, mix, metric) for client in clients[:MOST_CLIENTS]
        ]
        points = ", ".join(f"{series.letter} {run.point}" for series, run in runs.items())
        note = f"The scores are for seed {seed}. Scored models: {points}. "
        note += f"The client with the worst {metric.title} comes first."
        note += " Bars show the number of samples of each class." if mix else ""
        note += f" Only {MOST_CLIENTS} of {len(clients)} clients are shown." if len(clients) > MOST_CLIENTS else ""
        parts += _PARTS.clients(data, note, same_data, figures[:FIRST_CLIENTS], figures[FIRST_CLIENTS:])
    return parts


def _client(
    client: int,
    name: str,
    data: str,
    curves: Mapping[Series, Mapping[int, Points]],
    mix: tuple[list[str], list[list[int]]] | None,
    metric: Metric,
) -> Markup:
    """Return charts of a client's score over the rounds and of its number of samples per class."""
    among = f", {data}" if data else ""
    lines = {series: [(n, y, 0.0) for n, y in by_client.get(client, [])] for series, by_client in curves.items()}
    title, scale = f"{capitalised(metric.title)} of {name}{among}", (0.0, 1.0) if metric.in_percent else ()
    content = charts.lines(lines, title, percent=metric.in_percent, scale=scale, size=SMALL)
    samples = ""
    if mix is not None and client < len(mix[1]):
        counts = mix[1][client]
        samples = f"{sum(counts)} samples"
        content += charts.bars(counts, mix[0], f"Samples of each class on {name}{among}")
    return _framed(f"Client {client}" if name == f"client {client}" else name, samples, content)


def _quantities(groups: Sequence[Group]) -> Markup:
    names = {}
    for _, run in _each(groups):
        for row in run.rounds:
            numbers = (key for key, v in row.items() if isinstance(v, int | float) and key not in RECORDED)
            names.update(dict.fromkeys(key for key in numbers if key != "system_accuracy"))
    figures = []
    for key in names:
        curves = {group.series: group.curve(key) for group in groups}
        methods = ", ".join(sorted({group.first.method for group in groups if curves[group.series]}))
        figures.append(_figure(_words(key), methods, curves))
    for group in groups:
        figures += [_vector(group, key, numbers) for key, numbers in group.first.vectors().items()]
        numbered = all(row["chosen"].replace(".", "").isdecimal() for row in group.first.clients if row.get("chosen"))
        chosen = group.first.client_curves("chosen") if numbered else {}
        if 0 < len(chosen) <= MOST_ROWS:
            rounds = sorted({n for points in chosen.values() for n, _ in points})
            rows = [[dict(points).get(n, 0.0) for n in rounds] for points in chosen.values()]
            names_of = [group.first.client_name(c).replace("client", "cl.") for c in chosen]
            chart = charts.heat_map(rows, [*map(str, rounds)], names_of, f"Choice for each client, {_of(group)}")
            figures.append(_framed("Method's choice for each client, by round", _of(group), chart))
    pictures = [
        _picture(group, file)
        for group in groups
        for file in sorted((group.first.path / "figures").glob("*.png"))
        if file.stem not in (*DRAWN_HERE, *names)
    ]
    drawn = _PARTS.legend(groups) + _PARTS.charts(figures) if any(figures) else Markup("")
    return drawn + _PARTS.pictures(pictures)


def _vector(group: Group, key: str, values_by_round: Sequence[tuple[int, Sequence[float]]]) -> Markup:
    """Return a heat map of a method's list of numbers by round."""
    length = max(len(values) for _, values in values_by_round)
    if length > MOST_ROWS:
        return Markup("")
    rows = [[values[i] if i < len(values) else 0.0 for _, values in values_by_round] for i in range(length)]
    columns = [str(n) for n, _ in values_by_round]
    chart = charts.heat_map(rows, columns, [f"no. {i}" for i in range(length)], f"{_words(key)} by round, {_of(group)}")
    return _framed(f"{_words(key)}, by round", _of(group), chart)


def _picture(group: Group, file: Path) -> Markup:
    """Return a run's picture as HTML with embedded data and a reduced number of colours."""
    small = io.BytesIO()
    with Image.open(file) as image:
        image.convert("RGB").quantize(COLOURS).save(small, "PNG", optimize=True)
    title, data = _words(file.stem), base64.b64encode(small.getvalue()).decode()
    return _framed(title, _of(group), _PARTS.picture(f"{title}, {_of(group)}", data))


def _dropped(groups: Sequence[Group]) -> Markup:
    rows = []
    for group, run in _each(groups):
        reasons: dict[tuple[str, str], list[int]] = {}
        for row in run.rounds:
            for entry in row.get("dropped", []):
                reasons.setdefault((run.client_name(entry["client"]), entry["reason"]), []).append(row["round"])
            for key, words in LIMITED_WORDS.items():
                for client in row.get(key.replace("-", "_"), []):
                    reasons.setdefault((run.client_name(client), words), []).append(row["round"])
            for client in row.get("missing", []):
                reason = "not evaluated, because its node was missing or its reply was dropped"
                reasons.setdefault((run.client_name(client), reason), []).append(row["round"])
        for who, reason in sorted(reasons, key=lambda key: reasons[key]):
            rows.append([_PARTS.key(group.series), run.path.name, who, _ranges(reasons[who, reason]), reason])
        for entry in run.summary.get("left-out", []):
            who = f"the node of {entry['site']}" if entry["site"] else "a node"
            rows.append([_PARTS.key(group.series), run.path.name, who, f"{entry['times']} times", entry["reason"]])
        for key, words in (("sent-again", "messages sent again"), ("late-replies", "late replies")):
            if run.summary.get(key):
                rows.append([_PARTS.key(group.series), run.path.name, "all", f"{run.summary[key]} times", words])
    if not rows:
        return _PARTS.paragraph("Every reply was used, and no client was missing.")
    return _PARTS.table(["", "folder", "who", "rounds", "what"], rows, texts=("what",))


def _privacy(groups: Sequence[Group]) -> Markup:
    rows = []
    for group, run in _each(groups):
        if privacy := run.summary.get("privacy"):
            numbers = (f"{privacy[key]:.4g}" for key in ("epsilon", "delta", "planned-epsilon", "clip"))
            uncovered = ", ".join(privacy["not-covered"])
            rows.append(
                [_PARTS.key(group.series), run.path.name, privacy["mode"], *numbers, privacy["protects"], uncovered]
            )
    columns = ["", "folder", "mode", "ε", "δ", "planned ε", "clipping norm", "hides", "does not cover"]
    return _PARTS.table(columns, rows, numbers=columns[3:7], texts=columns[7:]) if rows else Markup("")


def _costs(groups: Sequence[Group]) -> Markup:
    rows = []
    phases = list(dict.fromkeys(phase for _, run in _each(groups) for row in run.rounds for phase in row["seconds"]))
    for group, run in _each(groups):
        summary = run.summary
        phase_seconds = [[row["seconds"].get(phase, 0.0) for row in run.rounds] for phase in phases]
        cells = [duration(summary["seconds"]), *(f"{sum(s) / len(s):.2f} s" if s else "" for s in phase_seconds)]
        cells += [size(summary["bytes-up"]), size(summary["bytes-down"]), f"{summary['samples']:,}"]
        cells += [size(summary[key]) if key in summary else "" for key in ("peak-memory", "peak-gpu-memory")]
        rows.append([_PARTS.key(group.series), run.path.name, *cells])
    columns = [
        "",
        "folder",
        "time",
        *(f"{phase}, a round" for phase in phases),
        "bytes up",
        "bytes down",
        "samples trained",
    ]
    columns += ["memory", "GPU memory"]
    column_numbers = [n for n, name in enumerate(columns) if name != "GPU memory" or any(row[n] for row in rows)]
    titles = [columns[n] for n in column_numbers]
    return _PARTS.table(titles, [[row[n] for n in column_numbers] for row in rows], numbers=titles[2:])


def _each(groups: Sequence[Group]) -> list[tuple[Group, Recorded]]:
    return [(group, run) for group in groups for run in group.runs]


def _of(group: Group) -> str:
    seeds = f", seed {group.first.summary['seed']}" if len(group.runs) > 1 else ""
    return f"{group.series.letter} {group.series.name}{seeds}"


def _figure(title: str, about: str, curves: Mapping[Series, charts.Band], *, percent: bool = False) -> Markup:
    return _framed(title, about, charts.lines(curves, f"{title}, {about}, by round", percent=percent))


def _framed(title: str, about: str, content: Markup) -> Markup:
    return _PARTS.figure(title, about, content) if content else Markup("")


def _words(key: str) -> str:
    return capitalised(key.replace("_", " ").replace("-", " "))


def _ranges(rounds: Sequence[int]) -> str:
    """Return rounds in words, such as ``1, 3 to 5``."""
    spans: list[list[int]] = []
    for number in sorted(rounds):
        if spans and number <= spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join(f"{a}" if a == b else f"{a} to {b}" for a, b in spans)
