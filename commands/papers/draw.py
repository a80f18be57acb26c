"""Draw tables and figures in the style of the originals, with the papers' numbers and Posy's."""

import itertools
import math
import shutil
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from posy import figure_style as style
from posy import figures
from posy.commands.papers import drift, pathways, ridge
from posy.commands.papers.compare import Comparison
from posy.commands.papers.record import curve, in_percent, recorded_numbers
from posy.commands.papers.verdict import number
from posy.commands.table import Cell
from posy.data.datasets import load_dataset
from posy.data.shifts import SHIFTS, apply_shift
from posy.data.task import Task
from posy.models.architecture import architecture_for
from posy.settings import SettingsError
from posy.strategies.methods import paper_name
from posy.yaml12 import read_yaml

SEEDS = (0, 1, 2)
"""Seeds of a simulation."""

Point = tuple[float, float, float]
"""A point of a line: x, y, and half the height of the band."""


def draw(comparison: Comparison, path: Path) -> None:
    """Draw a figure to a file; do nothing for a table."""
    kind = comparison.item.kind
    if kind not in FORMS:
        raise SettingsError(f"kind = {kind!r} in form of {comparison.item.file}: it must be one of {', '.join(FORMS)}")
    FORMS[kind](comparison, comparison.item.form, path)


def _nothing(comparison: Comparison, form: Mapping[str, Any], path: Path) -> None:
    """Draw nothing: a table is text."""


def _colours(comparison: Comparison) -> dict[str, str]:
    """Return the colour of each row's line, by the row's method."""
    return style.colours_of(_methods(comparison))


def _methods(comparison: Comparison) -> dict[str, str]:
    """Return the method of each row."""
    item = comparison.item
    planned = {
        row: [cell for variant in item.variants for cell in comparison.planned(variant, row)] for row in item.rows
    }
    return {row: cells[0].method if cells else "" for row, cells in planned.items()}


def _note(comparison: Comparison, spread: str = "", printed: Iterable[Any] = ()) -> str:
    """Return a note on the size of the runs, the spread over the seeds, and the markers of the paper's numbers."""
    reduced = {variant for (variant, _), (scale, _) in comparison.cells.items() if scale == "small"}
    reduced = reduced if "small" in comparison.item.content else set()
    size = style.REDUCED if reduced else ""
    size += f" ({', '.join(sorted(reduced))})" if reduced and len(comparison.scales) > 1 else ""
    seeds = max(map(comparison.usual_seeds, comparison.scales), default=0)
    interval = ""
    if spread:
        interval = f"{spread}: mean ± standard deviation over {seeds} seeds" if seeds > 1 else "one seed"
    return style.join(size, interval, "hollow marker: the paper's number" if any(printed) else "")


def _rounds(comparison: Comparison, form: Mapping[str, Any], path: Path) -> None:
    """Draw numbers over the rounds or local epochs: one panel per number and variant, one line per row.

    If the figure shows one number, the paper's final values are drawn at the last round.
    """
    keys = form["of"] if isinstance(form["of"], list) else [form["of"]]
    panels: dict[str, dict[str, list[Point]]] = {}
    colours, names = _colours(comparison), form.get("names", {})
    percent = all(key.endswith("accuracy") for key in keys)
    for variant, key in itertools.product(comparison.item.variants, keys):
        title = ", ".join(filter(None, (variant, names.get(key, key.replace("_", " ")) if len(keys) > 1 else "")))
        for row in comparison.item.rows:
            _, cells = comparison.runs_of(variant, row)
            steps = [int(cell.config.get("local-epochs", 1)) if form.get("over") == "epochs" else 1 for cell in cells]
            curves = [dict(curve(cell.path, key)) for cell in cells]
            if not curves or not all(curves):
                continue
            shared = sorted(set.intersection(*(set(values) for values in curves)))
            band = [_point(n * steps[0], [values[n] for values in curves]) for n in shared]
            panels.setdefault(title, {})[_label(form, row)] = band
            printed = comparison.item.printed.get((variant, comparison.item.measures[0], row))
            if printed is not None and len(keys) == 1:
                final = (band[-1][0], printed.value / (100 if percent else 1), math.nan)
                panels[title][f"{row}, paper"] = [final]
    colours |= {f"{row}, paper": colour for row, colour in colours.items()}
    points = {name for lines in panels.values() for name in lines if name.endswith(", paper")}
    over = "local epochs" if form.get("over") == "epochs" else "round"
    figures.small_multiples(
        panels,
        path,
        title=comparison.item.title,
        note=_note(comparison, "band", points),
        xlabel=over,
        ylabel=form.get("label", keys[0] if len(keys) == 1 else ""),
        percent=percent,
        columns=2,
        y_log=bool(form.get("log")),
        separate_y=len(keys) > 1 and not percent,
        points=points,
        colours={_label(form, name): colour for name, colour in colours.items()},
    )


def _label(form: Mapping[str, Any], row: str) -> str:
    """Return the label of a row: its name, after ``form.rows`` if the names are values of a setting."""
    return f"{form['rows']} = {row}" if "rows" in form else row


def _scan(comparison: Comparison, form: Mapping[str, Any], path: Path) -> None:
    """Draw the rows' numbers against one of their settings, averaged over the seeds that all runs of a line share.

    Each line is a variant or, with ``lines: rows``, a row whose setting differs between the variants. The paper's
    numbers are drawn as hollow points, and a row without the setting as a dashed line.
    """
    setting, panels, points = form["setting"], {}, set()
    name = paper_name(comparison.item.paper)
    dashed: dict[str, dict[str, float]] = {}
    colours = _scan_colours(comparison, form)
    for measure in form["measures"]:
        panel = form.get("names", {}).get(measure, measure)
        panel += ", %" if in_percent(measure) and "%" not in panel else ""
        by_line: dict[str, dict[float, dict[int, float]]] = {}
        lines: dict[str, list[Point]] = {}
        for variant, row in itertools.product(comparison.item.variants, comparison.item.rows):
            planned = comparison.planned(variant, row)
            x_value = next((cell.config[setting] for cell in planned if setting in cell.config), None)
            line = row if form.get("lines") == "rows" else variant
            values = comparison.values(variant, row, measure)
            printed = comparison.item.printed.get((variant, measure, row))
            if values and x_value is not None:
                by_line.setdefault(line or name, {})[float(x_value)] = values
            elif values:
                dashed.setdefault(panel, {})[f"{variant}, {row}".removeprefix(", ")] = statistics.fmean(values.values())
            if printed is not None and x_value is not None:
                points.add(label := f"{line}, paper".removeprefix(", "))
                lines.setdefault(label, []).append((float(x_value), printed.value, 0.0))
            elif printed is not None:
                dashed.setdefault(panel, {})[f"{variant}, {row}, paper".removeprefix(", ")] = printed.value
        for line, by_setting in by_line.items():
            common = set.intersection(*(set(values) for values in by_setting.values()))
            for x_value, values in sorted(by_setting.items()):
                shared = [value for seed, value in values.items() if seed in common or not common]
                lines.setdefault(line, []).append(_point(x_value, shared))
        panels[panel] = {name: sorted(line) for name, line in lines.items()}
    figures.small_multiples(
        panels,
        path,
        title=comparison.item.title,
        note=_note(comparison, "band", points),
        xlabel=form.get("xlabel", setting),
        columns=2,
        log=bool(form.get("log")),
        separate_y=True,
        points=points,
        dashed=dashed,
        colours=colours,
    )


def _scan_colours(comparison: Comparison, form: Mapping[str, Any]) -> dict[str, str]:
    """Return the colours of a scan's lines, of the paper's numbers and of rows without the setting."""
    item = comparison.item
    if form.get("lines") == "rows":
        colours = _colours(comparison)
        return colours | {f"{row}, paper": colour for row, colour in colours.items()}
    variants = [variant for variant in item.variants if any(name == variant for name, _ in comparison.cells)]
    colours = dict(zip(variants, style.shades(style.method_colour(item.paper), len(variants) or 1), strict=False))
    colours |= {f"{variant}, paper".removeprefix(", "): colour for variant, colour in colours.items()}
    colours[paper_name(item.paper)] = style.method_colour(item.paper)
    baselines = [f"{variant}, {row}".removeprefix(", ") for variant in item.variants for row in item.rows]
    return {f"{name}{end}": style.SOFT for name in baselines for end in ("", ", paper")} | colours


def _points(comparison: Comparison, form: Mapping[str, Any], path: Path) -> None:
    """Draw a point for each row and variant, with its standard deviation over the seeds, and the paper's numbers."""
    entries = [entry for entry in comparison.entries if entry.measure == comparison.item.measures[0]]
    groups: dict[str, dict[str, tuple[float, float]]] = {}
    for entry in entries:
        if entry.ours is not None:
            groups.setdefault(entry.variant, {})[entry.row] = (entry.ours.mean, entry.ours.std or 0.0)
    marks = {(e.variant, e.row): e.printed.value for e in entries if e.printed is not None and e.variant in groups}
    _draw_dots(comparison, form, groups, path, marks)


def _measures(comparison: Comparison, form: Mapping[str, Any], path: Path) -> None:
    """Draw several numbers of each row as points, one group per number."""
    groups: dict[str, dict[str, tuple[float, float]]] = {}
    for measure in form["measures"]:
        for variant in comparison.item.variants:
            for row in comparison.item.rows:
                value = number(list(comparison.values(variant, row, measure).values()))
                if value is not None:
                    name = " ".join(filter(None, (variant, form.get("names", {}).get(measure, measure))))
                    groups.setdefault(name, {})[row] = (value.mean, value.std or 0.0)
    _draw_dots(comparison, form, groups, path, {})


def _draw_dots(
    comparison: Comparison,
    form: Mapping[str, Any],
    groups: Mapping[str, Mapping[str, tuple[float, float]]],
    path: Path,
    marks: Mapping[tuple[str, str], float],
) -> None:
    figures.dots(
        groups,
        path,
        title=comparison.item.title,
        note=_note(comparison, "point and interval", marks),
        xlabel=form.get("label", "accuracy, %"),
        marks=marks,
        colours=style.rows_of(_methods(comparison)),
    )


def _heads(comparison: Comparison, form: Mapping[str, Any], path: Path) -> None:
    """Draw the norm of each class's output weights on each client for the first seed, one panel per row.

    With ``counts``, the first panel shows the clients' class counts, and the titles show the correlation r between the
    class shares in the counts and in the norms. With ``difference: [A, B]``, a panel after row A shows A minus B.
    """
    panels = []
    for variant in comparison.item.variants:
        counts = comparison.counts_of(variant) if form.get("counts") else None
        if counts is not None:
            title = f"{variant}: samples".removeprefix(": ")
            panels.append(figures.Panel(np.transpose(counts), title, "client", "class", "samples", counts=True))
        norms = _head_norms(comparison, variant)
        for row, matrix in norms.items():
            title = f"{variant}: {row}".removeprefix(": ")
            if counts is not None:
                title += f", r = {np.corrcoef(_shares(counts).ravel(), _shares(matrix).ravel())[0, 1]:.2f}"
            panels.append(figures.Panel(matrix.T, title, "client", "class", "norm of the output row"))
            first, second = form.get("difference", ("", ""))
            if row == first and second in norms:
                names = f"{first} − {second}", "client", "class", "difference of the norms"
                panels.append(figures.Panel((matrix - norms[second]).T, *names, diverging=True))
    figures.heatmaps(panels, path, title=comparison.item.title, note=_note(comparison))


def _shares(counts: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """Return the share of each class in each client's row ``(M, C)``."""
    return np.asarray(counts / counts.sum(axis=1, keepdims=True), np.float64)


def _head_norms(comparison: Comparison, variant: str) -> dict[str, npt.NDArray[np.float64]]:
    """Return the norm of each class's output weights on each client ``(M, C)`` for the first seed, keyed by row."""
    norms = {}
    for row in comparison.item.rows:
        _, cells = comparison.runs_of(variant, row)
        matrix = recorded_numbers(cells[0].path).get("heads") if cells else None
        if matrix:
            norms[row] = np.array(matrix, np.float64)
    return norms


def _clients(comparison: Comparison, form: Mapping[str, Any], path: Path) -> None:
    """Draw the training loss over the rounds, one panel per client and one line per row."""
    panels: dict[str, dict[str, list[Point]]] = {}
    for variant in comparison.item.variants:
        for row in comparison.item.rows:
            _, cells = comparison.runs_of(variant, row)
            curves = recorded_numbers(cells[0].path).get("clients", {}) if cells else {}
            for client, points in sorted(curves.items(), key=lambda pair: int(pair[0])):
                title = f"{variant}: client {client}".removeprefix(": ")
                panels.setdefault(title, {})[row] = [(n, loss, math.nan) for n, loss in points]
    figures.small_multiples(
        panels,
        path,
        title=comparison.item.title,
        note=_note(comparison),
        ylabel="training loss",
        colours=_colours(comparison),
    )


def _samples(comparison: Comparison, form: Mapping[str, Any], path: Path) -> None:
    """Draw an image of the data set, unchanged and with each client's shift."""
    settings = comparison.item.settings_of(comparison.item.variants[0], comparison.overrides)
    data = settings.data
    available = replace(data, max_samples=0, download=False)  # a page uses only local data
    dataset = load_dataset(available, Path(data.data_dir), settings.run.seed)
    image = torch.from_numpy(dataset.x[form.get("index", 0)][None]).permute(0, 3, 1, 2)
    pictures_by_label = {"original": image}
    for client, shift in enumerate(SHIFTS[data.shift][: data.num_clients]):
        bits = f", {shift.bits} bits" if shift.bits < 8 else ""
        label = f"{client}: γ {shift.gamma:g}, h {shift.hue:g}\ns {shift.saturation:g}{bits}"
        pictures_by_label[label] = apply_shift(image, shift)
    pictures = {label: picture[0].permute(1, 2, 0).numpy() for label, picture in pictures_by_label.items()}
    note = "one image with the shift of each client; γ: gamma, h: hue, s: saturation"
    figures.images(pictures, path, title=comparison.item.title, note=note)


def _sharing(comparison: Comparison, form: Mapping[str, Any], path: Path) -> None:
    """Draw the blocks that FedDRM's branches share in each variant, with the number of parameters."""
    panels = {}
    for variant in comparison.item.variants:
        settings = comparison.item.settings_of(variant, comparison.overrides)
        task = Task("image", (3, 32, 32), tuple(map(str, range(10))))  # the task of CIFAR-10
        plain = architecture_for(settings.train.model, task)
        architecture = settings.method.network(plain, settings.data.num_clients)
        network: Any = architecture.build()  # FedDRM's TwoBranch
        names = [*network.model.blocks, "head"]
        panels[f"{variant}\n{architecture.layout.size:,} parameters"] = names, network.shared_blocks
    figures.branches(panels, path, title=comparison.item.title, names=("class", "client"))


def _drift(comparison: Comparison, form: Mapping[str, Any], path: Path) -> None:
    """Draw the gradient drift of FedDRM's two losses over the rounds, on random embeddings."""
    simulations = [drift.simulate(seed) for seed in SEEDS]
    panels: dict[str, dict[str, list[Point]]] = {}
    for measure in ("drift", "relative drift"):
        for task in ("class", "client"):
            runs = [getattr(simulation[task], measure.replace(" ", "_")).tolist() for simulation in simulations]
            points = [_point(n, values) for n, values in enumerate(zip(*runs, strict=True))]
            panels.setdefault(measure, {})[f"{task} branch"] = points
    colours = {"class branch": style.SOFT, "client branch": style.method_colour("feddrm")}
    note = f"band: mean ± standard deviation over {len(SEEDS)} seeds"
    title = comparison.item.title
    figures.small_multiples(panels, path, title=title, note=note, columns=2, separate_y=True, colours=colours)


def _ridge(comparison: Comparison, form: Mapping[str, Any], path: Path) -> None:
    """Draw PPFE's test error on linear regression against K and r_p.

    The bottom row omits FedAvg, whose error is far above the other errors. On the r_p axis, ``random`` is for clients
    that each draw r_p from U(0, 1).
    """
    clients = {float(k): [ridge.simulate(seed, clients=k) for seed in SEEDS] for k in ridge.CLIENTS}
    ratios = {r: [ridge.simulate(seed, ratio=r) for seed in SEEDS] for r in ridge.RATIOS}
    random_ratios = [ridge.simulate(seed, ratio=None) for seed in SEEDS]
    sides = {
        f"a: clients K, r_p = {ridge.USUAL_RATIO:g}": clients,
        f"b: personal share r_p, K = {ridge.USUAL_CLIENTS}": {**ratios, 1.1: [], 1.25: random_ratios},
    }
    names = {"PPFE": "ppfe", "Local": "local", "Local, one penalty": "local_one_penalty", "FedAvg": "fedavg"}
    colours = style.colours_of({name: "ppfe" if name == "PPFE" else "" for name in names})
    panels: dict[str, dict[str, list[Point]]] = {}
    for below in (False, True):
        for about, points in sides.items():
            title = f"{about[0]}: without FedAvg" if below else about
            panels[title] = {
                name: [_point(x, [getattr(run, key) for run in runs]) for x, runs in points.items()]
                for name, key in names.items()
                if not below or name != "FedAvg"
            }
    figures.small_multiples(
        panels,
        path,
        title=comparison.item.title,
        note=f"band: mean ± standard deviation over {len(SEEDS)} seeds; random: each client draws r_p from U(0, 1)",
        xlabel="",
        ylabel="test error (mean squared error)",
        columns=2,
        separate_y=True,
        colours=colours,
        xticks={panel: {1.25: "random"} for panel in panels if panel.startswith("b")},
    )


def _point(x: float, values: Sequence[float]) -> Point:
    """Return a point of a line with its band, or a gap if there are no values."""
    summary = number(values)
    return (float(x), summary.mean, summary.std or 0.0) if summary else (float(x), math.nan, math.nan)


def _pathways(comparison: Comparison, form: Mapping[str, Any], path: Path) -> None:
    """Draw the networks of cwFedAvg's motivational example, with their largest weights in colour."""
    (networks,) = pathways.simulate(pathways.SEEDS[:1])
    panels = {}
    for letter, about in pathways.PANELS.items():
        weights = pathways.weights_of(networks[letter])
        panels[f"({letter}) {about}"] = list(zip(weights, pathways.critical(weights), strict=True))
    figures.networks(panels, path, title=comparison.item.title)


def _partition(comparison: Comparison, form: Mapping[str, Any], path: Path) -> None:
    """Draw the number of training samples per client and class, one panel per variant."""
    counts_by_variant = {variant: comparison.counts_of(variant) for variant in comparison.item.variants}
    panels = [
        figures.Panel(np.transpose(counts), variant, "client", "class", "samples", counts=True)
        for variant, counts in counts_by_variant.items()
        if counts is not None
    ]
    figures.heatmaps(panels, path, title=comparison.item.title)


def _correlation(comparison: Comparison, form: Mapping[str, Any], path: Path) -> None:
    """Draw the class shares read off the clients' output layers against the class shares in their samples."""
    groups = {}
    for variant in comparison.item.variants:
        counts = comparison.counts_of(variant)
        for row, norms in _head_norms(comparison, variant).items() if counts is not None else ():
            assert counts is not None
            groups[f"{variant}: {row}".removeprefix(": ")] = (_shares(counts), _shares(norms))
    names = {"xlabel": "share of the class in the client's samples", "ylabel": "share read off the output layer"}
    shades = [*style.shades(style.SOFT, max(1, len(groups) - 1)), style.method_colour(comparison.item.paper)]
    colours = dict(zip(groups, shades, strict=False))
    note = _note(comparison)
    figures.scatters(groups, path, title=comparison.item.title, note=note, colours=colours, **names)


def _picture(comparison: Comparison, form: Mapping[str, Any], path: Path) -> None:
    """Copy a picture from a row's run with the first seed; ``form`` names the row and the picture."""
    for variant in comparison.item.variants:
        _, cells = comparison.runs_of(variant, form["row"])
        file = _find_picture(cells[0], f"{form['of']}.png") if cells else None
        if file is not None:
            shutil.copyfile(file, path)
            return


def _find_picture(cell: Cell, name: str) -> Path | None:
    """Return the path of a run's picture, falling back to another run with the same settings, or None."""
    results = cell.path.parents[len(cell.place.split(" / ")) + 1]
    for config in [cell.path / "config.yaml", *sorted(results.glob("**/config.yaml"))]:
        file = config.parent / "figures" / name
        if file.is_file() and cell.fits(read_yaml(config)["settings"]):
            return file
    return None


FORMS: Mapping[str, Callable[[Comparison, Mapping[str, Any], Path], None]] = {
    "table": _nothing,
    "rounds": _rounds,
    "scan": _scan,
    "points": _points,
    "heads": _heads,
    "clients": _clients,
    "measures": _measures,
    "samples": _samples,
    "sharing": _sharing,
    "drift": _drift,
    "pathways": _pathways,
    "ridge": _ridge,
    "partition": _partition,
    "correlation": _correlation,
    "picture": _picture,
    "memory": _nothing,
}
"""Functions that draw a table or figure, keyed by the kind of its form."""
