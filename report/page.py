"""Writes a report on runs as a self-contained HTML file, which works offline."""

import base64
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from PIL import Image

from posy.report import charts
from posy.report.charts import SMALL, Series
from posy.report.groups import Group, by_data, compared, differences, grouped
from posy.report.recorded import Recorded
from posy.report.style import STYLE
from posy.server_app.progress import ABSENT, LIMITED_WORDS, coverage, duration, members_of, size
from posy.server_app.results import MEASURES, POINTS
from posy.strategies.registry import declared

MOST_CLIENTS, FIRST_CLIENTS = 60, 12
"""Most clients with a chart on a page, and number of charts that are initially visible."""
TENTH = 11
"""Fewest clients whose lowest tenth has more than one client."""
MOST_ROWS = 40
"""Most rows of a heat map."""
RECORDED = (*MEASURES, "round", "cohort", "bytes_up", "bytes_down", "sent_again", "late_replies", "dp_delta")
"""Numbers that every run records for a round. All other numbers are quantities of the method."""
DRAWN_HERE = ("accuracy", "loss", "clients", "partition")
"""Pictures of a run that the page draws itself."""
WHICH = {"last": "last", "best": "best, on validation", "upper-bound": "upper bound", "average": "mean of the last"}
SPREAD = {"min": "worst client", "tenth": "lowest tenth", "max": "best client", "weighted": "weighted by samples"}
COLOURS = 160
"""Colours of a picture on the page: enough for charts, with a much smaller file."""
AT = {"served": "served model", "local": "local model"}


class Html(str):
    """Text that is already HTML. Other text is escaped."""

    __slots__ = ()


def page(paths: Iterable[Path]) -> str:
    """Return the report on runs in directories, or raise :class:`SettingsError` for a directory without a run."""
    groups = grouped([Recorded.read(path) for path in dict.fromkeys(path.resolve() for path in paths)])
    sections = {
        "Runs": _runs(groups),
        "Settings that differ": _settings(groups),
        "Over the rounds": _curves(groups),
        "Accuracy": _accuracy(groups),
        "Comparison": _comparison(groups),
        "Clients": _clients(groups),
        "Quantities of the methods": _quantities(groups),
        "Privacy": _privacy(groups),
        "Dropped and limited replies": _dropped(groups),
        "Costs": _costs(groups),
    }
    written = {title: content for title, content in sections.items() if content}
    title = ", ".join(group.series.name for group in groups[:4]) + (", …" if len(groups) > 4 else "")
    links = "".join(f'<a href="#s{number}">{name}</a>' for number, name in enumerate(written))
    parts = [
        f'<section id="s{n}"><h2>{name}</h2>{content}</section>' for n, (name, content) in enumerate(written.items())
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en-GB"><head><meta charset="utf-8"/>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>\n"
        f"<body><h1>{escape(title)}</h1><nav>{links}</nav>\n" + "\n".join(parts) + "\n</body></html>\n"
    )


def _runs(groups: Sequence[Group]) -> str:
    rows = []
    for group, run in _each(groups):
        summary, machine = run.summary, run.config.get("machine", {})
        device = machine.get("gpu") or machine.get("cpu") or ""
        rounds = f"{summary['rounds']} of {run.settings['num-server-rounds']}"
        facts = (run.method, summary["dataset"], summary["num-clients"], rounds, summary["seed"], summary["status"])
        rows.append([_key(group.series, named=True), run.path.name, *map(str, facts), device])
    columns = ["", "folder", "method", "data set", "clients", "rounds", "seed", "status", "machine"]
    declared_settings = declared()
    usual = {
        key: group.first.settings.get(key)
        for group in groups[:1]
        for key, item in declared_settings.items()
        if item.decides and group.first.settings.get(key, item.default) != item.default
    }
    shared = {k: v for k, v in usual.items() if all(group.first.settings.get(k) == v for group in groups)}
    shared = {key: value for key, value in shared.items() if key not in ("method", "seed", "dataset", "num-clients")}
    text = ", ".join(f"{key}={value}" for key, value in shared.items())
    note = f"<p class='soft'>Shared settings that are not the defaults: {escape(text)}.</p>" if text else ""
    return _table(columns, rows, numbers=("clients", "rounds", "seed")) + note


def _settings(groups: Sequence[Group]) -> str:
    declared_settings = declared()
    decisive = {
        k
        for g in groups
        for k in g.first.settings
        if k != "seed" and (k not in declared_settings or declared_settings[k].decides)
    }
    differing = differences([{k: v for k, v in g.first.settings.items() if k in decisive} for g in groups])
    rows = [[key, *(str(value) for value in values)] for key, values in differing.items()]
    return _table(["setting", *(_key(group.series) for group in groups)], rows) if rows else ""


def _curves(groups: Sequence[Group]) -> str:
    figures = []
    for point in POINTS:
        for of, words in (("mean", "mean over the clients"), ("tenth", "lowest tenth"), ("min", "worst client")):
            if of == "tenth" and not any(run.summary["num-clients"] >= TENTH for _, run in _each(groups)):
                continue
            curves = {group.series: group.curve(f"{point}_accuracy", of) for group in groups}
            figures.append(_figure(f"Accuracy, {AT[point]}", words, curves, percent=True))
    for key in ("train_loss", "served_loss", "local_loss"):
        curves = {group.series: group.curve(key) for group in groups}
        figures.append(_figure("Training loss" if key == "train_loss" else f"Loss, {AT[key[:-5]]}", "mean", curves))
    curves = {group.series: group.curve("system_accuracy") for group in groups}
    figures.append(_figure("System accuracy", "pooled test samples", curves, percent=True))
    several = any(len(group.runs) > 1 for group in groups)
    note = "<p class='soft'>Lines are means over the seeds, bands their standard deviation.</p>" if several else ""
    return _legend(groups) + note + _charts(figures)


def _accuracy(groups: Sequence[Group]) -> str:
    rows = []
    for group, run in _each(groups):
        for point in POINTS:
            names_by_time: dict[str, list[str]] = {}
            for which, words in WHICH.items():
                if figures := run.summary[point].get(which):
                    at = f"round {figures['round']}" if "round" in figures else f"{figures['evaluations']} evaluations"
                    names_by_time.setdefault(at, []).append(words)
                    jain = "" if figures["jain"] is None else f"{figures['jain']:.4f}"
                    pooled = "samples" in figures
                    covered = (
                        coverage(round(figures["clients"]), members_of(run.summary)) if "clients" in figures else ""
                    )
                    spread = (
                        [ABSENT] * (1 + len(SPREAD)) if pooled else [_percent(figures[of]) for of in ("std", *SPREAD)]
                    )
                    cells = [_percent(figures["mean"]), *spread, ABSENT if pooled else jain, covered]
                    if len(names_by_time[at]) == 1:
                        rows.append([_key(group.series), run.path.name, point, *cells, at])
            for row in rows[len(rows) - len(names_by_time) :]:
                row[-1] = f"{row[-1]}: {', '.join(names_by_time[row[-1]])}"
    columns = ["", "folder", "model", "mean", "std", *SPREAD.values(), "Jain's index", "clients", "when"]
    note = (
        "<p class='soft'>Over the clients, each on its test samples. <em>Served</em> is the client's model right after "
        "the server's message, <em>local</em> the model after its training. The upper bound is the best round on test "
        "data; do not report it.</p>"
    )
    if any(run.summary.get("client-scores") for _, run in _each(groups)):
        note += (
            f"<p class='soft'>{ABSENT}: with secure aggregation the server knows only sums, and the mean is over all "
            "test samples.</p>"
        )
    return note + _table(columns, rows, numbers=columns[3:-1]) if rows else ""


def _comparison(groups: Sequence[Group]) -> str:
    if len(groups) < 2 and all(len(group.runs) < 2 for group in groups):
        return ""
    try:
        rows, sentence = compared(groups)
    except ImportError as error:
        return f"<p>The tests need further packages ({escape(str(error))}): pip install 'posy[compare]'</p>"
    if not rows and any(run.summary.get("client-scores") for _, run in _each(groups)):
        return "<p>Not available: with secure aggregation the server does not know the scores of single clients.</p>"
    by_name = {group.series.name: group for group in groups}
    lines = []
    for row in rows:
        group = by_name[row["method"]]
        seeds = len(group.runs)
        spread = Group(group.series, group.runs).curve(f"{row['point']}_accuracy")[-1:] if seeds > 1 else []
        covered = f", {coverage(row['clients'], row['members'])} clients" if row["clients"] < row["members"] else ""
        over_seeds = f" ± {_percent(spread[0][2])}" if spread else ""
        best = "≈" if row["alike"] else ""
        gains = [f"{100 * row[f'gain-{o}']:+.2f}" if row[f"losing-{o}"] else "" for o in ("local", "fedavg")]
        lose = [row[f"losing-{other}"] for other in ("local", "fedavg")]
        cells = [
            _percent(row["mean"]) + over_seeds + covered,
            best,
            *(_percent(row[key]) for key in ("worst", "tenth", "std")),
        ]
        paired = [gains[0], lose[0], gains[1], lose[1]]
        lines.append([_key(group.series), row["variant"], row["point"], str(seeds), *cells, *paired])
    columns = ["", "data", "model", "seeds", "mean ± std of the seeds", "best", "worst client", "lowest tenth"]
    columns += ["std of the clients", "over Local", "clients that lose", "over FedAvg", "clients that lose"]
    used = [n for n, name in enumerate(columns) if name in ("", "model", "seeds") or any(line[n] for line in lines)]
    note = (
        "<p class='soft'>Last round of the completed runs, for the model that each method is scored by. ≈: the best, "
        "and all that are not significantly different from it (Wilcoxon's signed-rank test over the clients of all "
        "seeds at 5 %, adjusted for the number of rows by Holm). Rows are summarised over the clients "
        "that all of them cover. A row names the number of its clients if it covers fewer than took part. A row with "
        "fewer than nine tenths of the clients of the fullest row is not ranked.</p>"
    )
    chosen = [[line[n] for n in used] for line in lines]
    return note + _table([columns[n] for n in used], chosen, numbers=columns[3:]) + f"<p>{escape(sentence)}</p>"


def _clients(groups: Sequence[Group]) -> str:
    parts = []
    for data, same_data in by_data(groups).items():
        seed = same_data[0].first.summary["seed"]
        runs = {g.series: run for g in same_data for run in g.runs if run.summary["seed"] == seed}
        curves = {series: run.client_curves(f"{run.point}_accuracy") for series, run in runs.items()}
        clients = sorted({client for by_client in curves.values() for client in by_client})
        if not clients:
            continue
        last = {
            c: sum(by_client[c][-1][1] for by_client in curves.values() if c in by_client)
            / sum(c in f for f in curves.values())
            for c in clients
        }
        mix = next((run.partition for run in runs.values() if run.partition), None)
        named = next((run for run in runs.values() if run.summary.get("sites")), same_data[0].first)
        figures = []
        for client in sorted(clients, key=lambda client: last[client])[:MOST_CLIENTS]:
            lines = {
                series: [(n, y, 0.0) for n, y in by_client.get(client, [])] for series, by_client in curves.items()
            }
            name = named.client_name(client)
            chart = charts.lines(lines, f"Accuracy of {name}", percent=True, scale=(0, 1), size=SMALL)
            samples, bars = "", ""
            if mix is not None and client < len(mix[1]):
                counts = mix[1][client]
                samples = f"{sum(counts)} samples"
                bars = charts.bars(counts, mix[0], f"Samples of each class on {name}")
            caption = f"Client {client}" if name == f"client {client}" else name
            figures.append(_framed(caption, samples, chart + bars))
        points = ", ".join(f"{series.letter} {run.point}" for series, run in runs.items())
        note = f"Seed {seed}, for the model that each run is scored by ({points}); the lowest accuracy first."
        note += " Bars: samples of each class." if mix else ""
        note += f" {MOST_CLIENTS} of {len(clients)} clients." if len(clients) > MOST_CLIENTS else ""
        parts.append(f"<h3>{escape(data)}</h3>" if data else "")
        parts.append(
            f"<p class='soft'>{escape(note)}</p>{_legend(same_data)}{_charts(figures[:FIRST_CLIENTS], small=True)}"
        )
        if hidden := figures[FIRST_CLIENTS:]:
            parts.append(
                f"<details><summary>{len(hidden)} more clients</summary>{_charts(hidden, small=True)}</details>"
            )
    return "".join(parts)


def _quantities(groups: Sequence[Group]) -> str:
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
            chart = charts.heat_map(rows, [*map(str, rounds)], names_of, "Choice of each client")
            figures.append(_framed("Chosen for each client, by round", _of(group), chart))
    pictures = [
        _picture(group, file)
        for group in groups
        for file in sorted((group.first.path / "figures").glob("*.png"))
        if file.stem not in (*DRAWN_HERE, *names)
    ]
    shown = f"<div class='pictures'>{''.join(pictures)}</div>" if pictures else ""
    return (_legend(groups) + _charts(figures) if any(figures) else "") + shown


def _vector(group: Group, key: str, values_by_round: Sequence[tuple[int, Sequence[float]]]) -> str:
    """Return a heat map of a method's list of numbers by round."""
    length = max(len(values) for _, values in values_by_round)
    if length > MOST_ROWS:
        return ""
    rows = [[values[i] if i < len(values) else 0.0 for _, values in values_by_round] for i in range(length)]
    columns = [str(n) for n, _ in values_by_round]
    chart = charts.heat_map(rows, columns, [f"no. {i}" for i in range(length)], f"{_words(key)} by round")
    return _framed(f"{_words(key)}, by round", _of(group), chart)


def _picture(group: Group, file: Path) -> str:
    """Return a picture of a run as HTML with embedded data, in few colours."""
    small = io.BytesIO()
    with Image.open(file) as image:
        image.convert("RGB").quantize(COLOURS).save(small, "PNG", optimize=True)
    data = base64.b64encode(small.getvalue()).decode()
    name = f"{_words(file.stem)}, {_of(group)}"
    image_tag = f'<img alt="{escape(name, quote=True)}" src="data:image/png;base64,{data}"/>'
    return _framed(_words(file.stem), _of(group), f"<div class='scroll'>{image_tag}</div>")


def _dropped(groups: Sequence[Group]) -> str:
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
                reason = "not evaluated: no node, or its reply was dropped"
                reasons.setdefault((run.client_name(client), reason), []).append(row["round"])
        for who, reason in sorted(reasons, key=lambda key: reasons[key]):
            rows.append([_key(group.series), run.path.name, who, _ranges(reasons[who, reason]), reason])
        for entry in run.summary.get("left-out", []):
            who = f"the node of {entry['site']}" if entry["site"] else "a node"
            rows.append([_key(group.series), run.path.name, who, f"{entry['times']} times", entry["reason"]])
        for key, words in (("sent-again", "messages sent again"), ("late-replies", "late replies")):
            if run.summary.get(key):
                rows.append([_key(group.series), run.path.name, "all", f"{run.summary[key]} times", words])
    if not rows:
        return "<p>None: every reply was used, and no client was missing.</p>"
    return _table(["", "folder", "who", "rounds", "what"], rows, texts=("what",))


def _privacy(groups: Sequence[Group]) -> str:
    rows = []
    for group, run in _each(groups):
        if privacy := run.summary.get("privacy"):
            numbers = (f"{privacy[key]:.4g}" for key in ("epsilon", "delta", "planned-epsilon", "clip"))
            uncovered = ", ".join(privacy["not-covered"])
            rows.append([_key(group.series), run.path.name, privacy["mode"], *numbers, privacy["protects"], uncovered])
    columns = ["", "folder", "mode", "ε", "δ", "planned ε", "clipping norm", "hides", "does not cover"]
    return _table(columns, rows, numbers=columns[3:7], texts=columns[7:]) if rows else ""


def _costs(groups: Sequence[Group]) -> str:
    rows = []
    phases = list(dict.fromkeys(phase for _, run in _each(groups) for row in run.rounds for phase in row["seconds"]))
    for group, run in _each(groups):
        summary = run.summary
        each = [[row["seconds"].get(phase, 0.0) for row in run.rounds] for phase in phases]
        cells = [duration(summary["seconds"]), *(f"{sum(s) / len(s):.2f} s" if s else "" for s in each)]
        cells += [size(summary["bytes-up"]), size(summary["bytes-down"]), f"{summary['samples']:,}"]
        cells += [size(summary[key]) if key in summary else "" for key in ("peak-memory", "peak-gpu-memory")]
        rows.append([_key(group.series), run.path.name, *cells])
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
    used = [n for n, name in enumerate(columns) if name != "GPU memory" or any(row[n] for row in rows)]
    shown = [columns[n] for n in used]
    return _table(shown, [[row[n] for n in used] for row in rows], numbers=shown[2:])


def _each(groups: Sequence[Group]) -> list[tuple[Group, Recorded]]:
    return [(group, run) for group in groups for run in group.runs]


def _of(group: Group) -> str:
    seeds = f", seed {group.first.summary['seed']}" if len(group.runs) > 1 else ""
    return f"{group.series.letter} {group.series.name}{seeds}"


def _key(series: Series, *, named: bool = False) -> Html:
    return Html(f"{series.key()}<b>{series.letter}</b>{f' {escape(series.name)}' * named}")


def _legend(groups: Sequence[Group]) -> str:
    return f"<ul class='legend'>{''.join(f'<li>{_key(group.series, named=True)}</li>' for group in groups)}</ul>"


def _figure(title: str, about: str, curves: Mapping[Series, charts.Band], *, percent: bool = False) -> str:
    return _framed(title, about, charts.lines(curves, f"{title}, {about}, over the rounds", percent=percent))


def _framed(title: str, about: str, chart: str) -> str:
    if not chart:
        return ""
    return f"<figure><figcaption>{escape(title)} <span>{escape(about)}</span></figcaption>{chart}</figure>"


def _charts(figures: Sequence[str], *, small: bool = False) -> str:
    return f'<div class="charts{" small" * small}">{"".join(figures)}</div>' if any(figures) else ""


def _table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[str] = (), texts: Sequence[str] = ()
) -> str:
    """Return a table. Columns in ``numbers`` are right-aligned, and columns in ``texts`` wrap their lines."""
    classes = [' class="n"' * (column in numbers) + ' class="long"' * (column in texts) for column in columns]

    def line(cells: Sequence[str], tag: str) -> str:
        written = [cell if isinstance(cell, Html) else escape(cell) for cell in cells]
        return "".join(f"<{tag}{c}>{text}</{tag}>" for c, text in zip(classes, written, strict=True))

    body = "".join(f"<tr>{line(row, 'td')}</tr>" for row in rows)
    head = f"<thead><tr>{line(columns, 'th')}</tr></thead>"
    return f'<div class="scroll"><table>{head}<tbody>{body}</tbody></table></div>'


def _percent(value: Any) -> str:
    return "" if value is None or math.isnan(value) else f"{100 * value:.2f} %"


def _words(key: str) -> str:
    text = key.replace("_", " ").replace("-", " ")
    return text[:1].upper() + text[1:]


def _ranges(rounds: Sequence[int]) -> str:
    """Return rounds in words: ``1, 3 to 5``."""
    spans: list[list[int]] = []
    for number in sorted(rounds):
        if spans and number <= spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join(f"{a}" if a == b else f"{a} to {b}" for a, b in spans)
