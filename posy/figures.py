"""Draw figures as PNG files that are 1200 pixels wide (wider for rows of panels).

Every function takes data and a path and writes one file, unless the data is empty or contains only None and NaN. The
functions use matplotlib's object-oriented interface instead of pyplot, so they do not keep any global state.
"""

import math
import textwrap
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib import colormaps, rc_context
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap, Normalize
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator

from posy.metrics import Metric
from posy.spread import Evaluation
from posy.words import capitalised

Curve = Sequence[tuple[float, float | None]]
"""Points (x, y) of a line. Points whose y is None or NaN are skipped."""

Band = Sequence[tuple[float, float, float]]
"""Points of a line: x, y, and half the height of the band."""

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""The colour-blind-safe palette of Okabe and Ito, without yellow, which is too light for lines."""

_WIDTH, _HEIGHT = 8.0, 4.6  # inches
_INK, _AXIS, _FAINT, _MISSING = "#222222", "#999999", "#d9d9d9", "#eeeeee"
_STYLE: Any = {
    "figure.dpi": 150,
    "figure.facecolor": "white",
    "figure.titlesize": 13,
    "figure.constrained_layout.use": True,
    "figure.constrained_layout.w_pad": 0.12,
    "figure.constrained_layout.h_pad": 0.1,
    "text.color": _INK,
    "axes.titlesize": 13,
    "axes.titlelocation": "left",
    "axes.titlepad": 18,
    "axes.labelcolor": _INK,
    "axes.edgecolor": _AXIS,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": _FAINT,
    "legend.frameon": False,
}
_COUNTS = ListedColormap(colormaps["Blues"](np.linspace(0.15, 1, 256)))  # makes even a single sample visible
MOST_TICKS = 8
"""Maximum number of values that are labelled on a logarithmic axis; with more, matplotlib chooses the labels."""
_PERCENT = FuncFormatter(lambda value, _: f"{100 * value:.4g} %")


@dataclass(frozen=True)
class Panel:
    """One heat map."""

    matrix: npt.ArrayLike
    """Values of the cells ``(rows, columns)``. Cells with NaN or None are grey."""
    title: str = ""
    xlabel: str = ""
    ylabel: str = ""
    label: str = ""
    """Label of the colour bar, with the meaning and unit of the values."""
    xticks: Sequence[str] = ()
    yticks: Sequence[str] = ()
    """Names of the columns and rows. If empty, the figure shows their indices."""
    counts: bool = False
    """Whether the values are counts. The colour scale of counts starts at 0, and cells with 0 are white."""


def over_rounds(points: Sequence[Sequence[Evaluation]], path: Path, metric: Metric | None = None) -> None:
    """Plot a metric's mean over the clients against the round, with bands for mean ± std and for min to max.

    ``points`` contains the evaluations of the served models and of the local models, and ``metric`` is None for the
    loss. With secure aggregation, the figure shows only the mean over all samples, without bands.
    """
    pooled = any("samples" in evaluation.over_clients for evaluations in points for evaluation in evaluations)
    title = metric.title if metric else "loss"
    rounds = sorted({evaluation.round for evaluations in points for evaluation in evaluations})
    if not rounds:
        return
    with _axes(path, f"{capitalised(title)} over the rounds") as axes:
        for index, (name, evaluations) in enumerate(zip(("served model", "local model"), points, strict=True)):
            if not evaluations:
                continue
            x = np.array([e.round for e in evaluations], dtype=np.float64)
            mean, std, low, high = (
                np.array([e.over_clients[key] for e in evaluations], np.float64)
                for key in ("mean", "std", "min", "max")
            )
            colour = COLOURS[index]
            if pooled:
                pass
            elif len(x) > 1:
                band = np.maximum(mean - std, low), np.minimum(mean + std, high)
                axes.fill_between(x, *band, color=colour, alpha=0.18, lw=0)
                for edge in (low, high):
                    axes.plot(x, edge, color=colour, alpha=0.45, linewidth=0.8, linestyle=":")
            else:
                x += 0.1 * index  # side by side, because the markers would otherwise overlap
                axes.vlines(x, low, high, color=colour, linewidth=1, linestyle=":")
                axes.vlines(x, mean - std, mean + std, color=colour, alpha=0.3, linewidth=8)
            last = metric.format(mean[-1]) if metric else f"{mean[-1]:.3g}"
            axes.plot(x, mean, label=f"{name}, last {last}", zorder=3, **_line_style(index, 2, len(x)))
        axes.set(xlabel="round", ylabel=f"{title} on the client's test split")
        if len(rounds) == 1:
            axes.set_xlim(rounds[0] - 1, rounds[0] + 1)
            axes.set_xticks(rounds)
        else:
            axes.xaxis.set_major_locator(_whole_numbers())
        if metric and metric.in_percent:
            axes.yaxis.set_major_formatter(_PERCENT)
        note = "mean over all samples; the scores of individual clients are not available"
        _note(axes, note if pooled else "band: mean ± std, dotted: min and max of the clients")
        _legend(axes, 2)


def client_scores(served: Sequence[float | None], local: Sequence[float | None], path: Path, metric: Metric) -> None:
    """Draw each client's score before and after its training, with clients sorted by score.

    ``served`` and ``local`` ``(M,)`` contain None for models without a score.
    """
    before, after = _numbers(served), _numbers(local)
    ranked = np.where(np.isnan(after), before, after)
    order = np.argsort(ranked, kind="stable")[: np.count_nonzero(np.isfinite(ranked))]
    if not len(order):
        return
    x = np.arange(len(order))
    dot = float(np.clip(400 / len(order), 2.5, 9))
    with _axes(path, f"{capitalised(metric.title)} of each client") as axes:
        grey = "#b0b0b0" if len(order) <= 100 else _FAINT
        axes.vlines(x, before[order], after[order], color=grey, linewidth=min(2.0, dot / 4), zorder=1)
        for values, name, colour, marker, size in (
            (before, "served model", COLOURS[0], "o", dot),
            (after, "local model", COLOURS[1], "D", 0.8 * dot),
        ):
            if np.isfinite(values).any():
                mean = float(np.nanmean(values))
                label = f"{name}, mean {metric.format(mean)}"
                axes.plot(x, values[order], marker, color=colour, markersize=size, markeredgewidth=0, label=label)
                axes.axhline(mean, color=colour, linewidth=1, linestyle="--", zorder=0)
        is_small = len(order) <= 40
        if is_small:
            axes.set_xticks(x, [str(i) for i in order], fontsize=9 if len(order) <= 25 else 7)
        clients = "client" if is_small else f"{len(order)} clients"
        axes.set(xlabel=f"{clients}, by {metric.title}", ylabel=metric.title)
        axes.set_xlim(-0.6, len(order) - 0.4)
        if metric.in_percent:
            axes.yaxis.set_major_formatter(_PERCENT)
        _legend(axes, 2, markerscale=max(1.0, 6 / dot))


def partition(counts: npt.ArrayLike, path: Path, *, class_names: Sequence[str] = ()) -> None:
    """Plot the number of samples per client and class, ``counts`` ``(M, C)``."""
    panel = Panel(np.transpose(counts), "", "client", "class", "samples", yticks=class_names, counts=True)
    heatmaps([panel], path, title="Samples of each class on each client")


def routing(matrix: npt.NDArray[Any], path: Path) -> None:
    """Draw the number of pooled test samples ``(M, M)`` for each pair of true and chosen clients."""
    panel = Panel(matrix, xlabel="chosen client", ylabel="true client", label="samples")
    heatmaps([panel], path, title="Routing of the pooled test samples")


def heatmaps(panels: Sequence[Panel], path: Path, *, title: str = "") -> None:
    """Draw heat maps side by side, at most four per row. Small maps show their values. Empty maps are skipped."""
    panels = [panel for panel in panels if np.isfinite(_numbers(panel.matrix)).any()]
    if not panels:
        return
    down = math.ceil(len(panels) / 4)
    across = math.ceil(len(panels) / down)
    width = max(_WIDTH, 4.0 * across)
    rows, columns = np.shape(panels[0].matrix)
    map_width = width / across - 1.5  # width of the cells in inches
    height = map_width * float(np.clip(rows / columns, *((0.5, 0.8) if across == 1 else (0.75, 1.0))))
    with _figure(path, width, (height + 0.8) * down + 0.4) as figure:
        figure.suptitle(title, x=0.01, ha="left")
        grid = figure.subplots(down, across, squeeze=False)
        for axes, panel in zip(grid.flat, panels, strict=False):
            bar = figure.colorbar(
                _draw(axes, panel, height, map_width), ax=axes, fraction=0.08, pad=0.02, label=panel.label
            )
            bar.outline.set_visible(False)
        for axes in grid.flat[len(panels) :]:
            axes.set_visible(False)


def lines(
    series: Mapping[str, Curve],
    path: Path,
    *,
    title: str = "",
    xlabel: str = "round",
    ylabel: str = "",
    percent: bool = False,
) -> None:
    """Draw one line for each named series of points. With ``percent``, values 0..1 appear as percentages."""
    arrays = {name: _numbers(list(curve)).reshape(-1, 2) for name, curve in series.items()}
    drawn = {name: finite for name, array in arrays.items() if len(finite := array[np.isfinite(array[:, 1])])}
    if not drawn:
        return
    with _axes(path, title) as axes:
        for index, (name, array) in enumerate(drawn.items()):
            axes.plot(array[:, 0], array[:, 1], label=name, **_line_style(index, len(drawn), len(array)))
        if all((array[:, 0] == np.rint(array[:, 0])).all() for array in drawn.values()):
            axes.xaxis.set_major_locator(_whole_numbers())
        if percent:
            axes.yaxis.set_major_formatter(_PERCENT)
        axes.set(xlabel=xlabel, ylabel=ylabel)
        if 1 < len(drawn) <= 20:
            _legend(axes, min(4, len(drawn)))


def small_multiples(
    panels: Mapping[str, Mapping[str, Band]],
    path: Path,
    *,
    title: str = "",
    xlabel: str = "round",
    ylabel: str = "",
    percent: bool = False,
    columns: int = 4,
    log: bool = False,
    y_log: bool = False,
    apart: bool = False,
    points: Collection[str] = (),
    dashed: Mapping[str, Mapping[str, float]] | None = None,
) -> None:
    """Draw a small panel for each group of lines, with bands around the lines.

    The panels share one y-axis, unless ``apart`` is true. They share one x-axis, unless the lines of one panel are more
    than four times as long as the lines of another. ``log`` makes the x-axes logarithmic, and ``y_log`` the y-axes.
    Series named in ``points`` are drawn as separate points. ``dashed`` contains horizontal lines, keyed by panel and
    name.
    """
    drawn = {name: lines for name, lines in panels.items() if any(len(band) for band in lines.values())}
    if not drawn:
        return
    across = min(columns, len(drawn))
    down = math.ceil(len(drawn) / across)
    panel_height = 1.75 if columns > 2 else 3.0
    levels = {panel: (dashed or {}).get(panel, {}) for panel in drawn}
    names = dict.fromkeys(name for line_groups in (drawn, levels) for lines in line_groups.values() for name in lines)
    styles = {name: _line_style(index, len(names), 100) for index, name in enumerate(names)}
    with _figure(path, _WIDTH, panel_height * down + 0.9) as figure:
        figure.suptitle(title, x=0.01, ha="left")
        ends = [max(point[0] for band in lines.values() for point in band) for lines in drawn.values()]
        grid = figure.subplots(down, across, squeeze=False, sharex=max(ends) <= 4 * min(ends), sharey=not apart)
        for axes in grid.flat[len(drawn) :]:
            axes.set_visible(False)
        for axes, (name, lines) in zip(grid.flat, drawn.items(), strict=False):
            axes.set_title(name, fontsize=10, pad=4)
            axes.tick_params(color=_AXIS, labelsize=9)
            if log:
                axes.set_xscale("log")
                _plain_ticks(axes, [point[0] for band in lines.values() for point in band])
            else:
                axes.xaxis.set_major_locator(MaxNLocator(nbins=4, integer=True))
            if y_log:
                axes.set_yscale("log")
            if percent:
                axes.yaxis.set_major_formatter(_PERCENT)
            _draw_bands(axes, lines, styles, points)
            for label, level in levels[name].items():
                axes.axhline(level, label=label, **styles[label] | {"linewidth": 1.6, "linestyle": "--", "marker": ""})
        for axes in grid[-1]:  # the legend would cover a figure-wide label
            axes.set_xlabel(xlabel, fontsize=10)
        figure.supylabel(ylabel, fontsize=10)
        handles = {
            label: line for axes in grid.flat for line, label in zip(*axes.get_legend_handles_labels(), strict=True)
        }
        figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=min(4, len(handles)))


def bars(
    groups: Mapping[str, Mapping[str, tuple[float, float]]],
    path: Path,
    *,
    title: str = "",
    ylabel: str = "",
    marks: Mapping[tuple[str, str], float] | None = None,
) -> None:
    """Draw a bar with an error bar for each name in each group, and ``marks``, which are keyed by (group, name)."""
    if not groups:
        return
    names = list(dict.fromkeys(name for group in groups.values() for name in group))
    width = 0.8 / len(names)
    with _axes(path, title) as axes:
        for index, name in enumerate(names):
            style = _line_style(index, len(names), 100)
            positions = [position for position, group in enumerate(groups.values()) if name in group]
            values = [group[name] for group in groups.values() if name in group]
            x = np.array(positions) + (index - (len(names) - 1) / 2) * width
            heights, errors = np.array(values).T
            axes.bar(x, heights, width * 0.92, yerr=errors, label=name, color=style["color"], ecolor=_INK)
            for at, group in zip(x, (list(groups)[position] for position in positions), strict=True):
                if marks and (group, name) in marks:
                    axes.plot(at, marks[group, name], marker="_", markersize=10, color=_INK, markeredgewidth=1.6)
        axes.set_xticks(range(len(groups)), labels=list(groups))
        axes.set(ylabel=ylabel)
        if marks:
            _note(axes, "—: the paper's number")
        if list(groups) == [""]:  # label each bar instead of drawing a legend
            centres = (np.arange(len(names)) - (len(names) - 1) / 2) * width
            axes.set_xticks(centres, labels=[textwrap.fill(name, 16) for name in names])
        else:
            _legend(axes, min(5, len(names)))


def named_points(
    points: Mapping[str, tuple[float, float]], path: Path, *, title: str = "", xlabel: str = "", ylabel: str = ""
) -> None:
    """Draw points (x, y) with their names next to them."""
    if not points:
        return
    with _axes(path, title) as axes:
        for index, (name, (x, y)) in enumerate(points.items()):
            axes.plot(x, y, "o", color=COLOURS[index % len(COLOURS)])
            axes.annotate(name, (x, y), (5, 4), textcoords="offset points", fontsize=9)
        axes.margins(0.15)
        axes.set(xlabel=xlabel, ylabel=ylabel)


def scatter(
    x: npt.ArrayLike, y: npt.ArrayLike, path: Path, *, title: str = "", xlabel: str = "", ylabel: str = ""
) -> None:
    """Draw y against x (arrays of equal shape), with their correlation and the line y = x."""
    a, b = _numbers(x).ravel(), _numbers(y).ravel()
    finite = np.isfinite(a) & np.isfinite(b)
    if not finite.any():
        return
    a, b = a[finite], b[finite]
    with _axes(path, title) as axes:
        size, alpha = float(np.clip(4000 / len(a), 4, 36)), float(np.clip(400 / len(a), 0.15, 0.8))
        axes.scatter(a, b, s=size, alpha=alpha, color=COLOURS[0], linewidths=0, zorder=2)
        ends = [min(a.min(), b.min()), max(a.max(), b.max())]
        axes.plot(ends, ends, color=_INK, linewidth=1, linestyle="--", label="y = x", zorder=1)
        if len(a) > 2 and a.std() > 0 and b.std() > 0:
            _note(axes, f"correlation {np.corrcoef(a, b)[0, 1]:.3f}")
        axes.set(xlabel=xlabel, ylabel=ylabel)
        _legend(axes, 1)


def images(pictures: Mapping[str, npt.ArrayLike], path: Path, *, title: str = "", columns: int = 9) -> None:
    """Draw images ``(H, W, 3)`` with their names above them."""
    if not pictures:
        return
    with _figure(path, _WIDTH, 1.25 * math.ceil(len(pictures) / columns) + 0.4) as figure:
        for axes, (name, picture) in zip(_bare(figure, title, len(pictures), columns), pictures.items(), strict=True):
            axes.imshow(np.asarray(picture))
            axes.set_title(name, fontsize=6.5, pad=2)


def branches(
    networks: Mapping[str, tuple[Sequence[str], int]], path: Path, *, title: str = "", names: tuple[str, str]
) -> None:
    """Draw a panel for each two-branch network, with the names of its shared and separate blocks."""
    with _figure(path, _WIDTH, 3.6) as figure:
        figure.suptitle(title, x=0.01, ha="left")
        grid = figure.subplots(1, len(networks), squeeze=False, sharey=True)
        for axes, (panel_title, (blocks, shared)) in zip(grid.flat, networks.items(), strict=True):
            axes.set_title(panel_title, fontsize=9)
            axes.set_axis_off()
            for height, block in enumerate(blocks):
                boxes = [(0.0, 2.0, _AXIS)]
                if height >= shared:
                    boxes = [(0.0, 0.95, COLOURS[0]), (1.05, 0.95, COLOURS[1])]
                for start, width, colour in boxes:
                    axes.barh(height, width, 0.8, start, color=colour, alpha=0.5)
                    axes.text(start + width / 2, height, block, ha="center", va="center", fontsize=9)
            for centre, name in zip((0.475, 1.525), names, strict=True):
                axes.text(centre, len(blocks) - 0.35, name, ha="center", fontsize=9)


def networks(
    panels: Mapping[str, Sequence[tuple[npt.ArrayLike, npt.ArrayLike]]],
    path: Path,
    *,
    title: str = "",
    columns: int = 4,
) -> None:
    """Draw a panel for each small network, with one line per weight; the width shows the weight's magnitude.

    Each layer is a pair of its weights ``(out, in)`` and a mask of the same shape. Weights in the mask are green if
    positive, otherwise red. All other weights are grey. The outputs are numbered.
    """
    if not panels:
        return
    with _figure(path, _WIDTH, 1.9 * math.ceil(len(panels) / columns) + 0.8) as figure:
        for axes, (name, layers) in zip(_bare(figure, title, len(panels), columns), panels.items(), strict=True):
            axes.set_title(name, fontsize=9, pad=6)
            _draw_network(axes, [(_numbers(weights), np.asarray(marked, bool)) for weights, marked in layers])
        kinds = {"positive": COLOURS[2], "negative": COLOURS[1], "smaller weights": _FAINT}
        handles = [Line2D([], [], color=colour, linewidth=2.5) for colour in kinds.values()]
        figure.legend(handles, list(kinds), loc="outside lower center", ncols=len(kinds))


def scatters(
    groups: Mapping[str, tuple[npt.ArrayLike, npt.ArrayLike]],
    path: Path,
    *,
    title: str = "",
    xlabel: str = "",
    ylabel: str = "",
) -> None:
    """Draw y against x for each group, with the group's correlation and the line y = x."""
    if not groups:
        return
    with _axes(path, title) as axes:
        ends = [math.inf, -math.inf]
        for index, (name, (x, y)) in enumerate(groups.items()):
            a, b = _numbers(x).ravel(), _numbers(y).ravel()
            finite = np.isfinite(a) & np.isfinite(b)
            a, b = a[finite], b[finite]
            is_defined = len(a) > 2 and a.std() > 0 and b.std() > 0
            label = f"{name}, correlation {np.corrcoef(a, b)[0, 1]:.3f}" if is_defined else name
            colour, marker = COLOURS[index % len(COLOURS)], "^osDvPX"[index % 7]
            axes.scatter(a, b, s=16, alpha=0.5, color=colour, marker=marker, linewidths=0, label=label, zorder=2)
            ends = [min(ends[0], *a, *b), max(ends[1], *a, *b)]
        axes.plot(ends, ends, color=_INK, linewidth=1, linestyle="--", label="y = x", zorder=1)
        axes.set(xlabel=xlabel, ylabel=ylabel)
        _legend(axes, 2)


def similarity_order(counts: npt.ArrayLike) -> npt.NDArray[np.int64]:
    """Return the clients ``(M,)`` in an order that puts clients with similar class counts ``(M, C)`` side by side.

    This is the leaf order of average-linkage clustering of the class shares under the total variation distance.
    """
    table = _numbers(counts)
    if len(table) < 3:
        return np.arange(len(table))
    # SciPy's clustering takes half a second to import, and only the figure of FedACS needs it.
    from scipy.cluster.hierarchy import leaves_list, linkage  # noqa: PLC0415

    shares = table / np.maximum(table.sum(axis=1, keepdims=True), 1)
    return np.asarray(leaves_list(linkage(shares, "average", "cityblock", optimal_ordering=True)), dtype=np.int64)


def _draw_bands(
    axes: Axes, lines: Mapping[str, Band], styles: Mapping[str, Mapping[str, Any]], points: Collection[str]
) -> None:
    """Draw lines with their bands. Lines named in ``points`` are drawn as separate points."""
    for label, band in lines.items():
        x, y, half = _numbers(band).reshape(-1, 3).T
        marker_style = {"marker": "o", "markersize": 3.5} if len(x) <= 12 else {}
        marker_style = {"marker": "D", "markersize": 5, "linestyle": ""} if label in points else marker_style
        axes.plot(x, y, label=label, **{**styles[label], "linewidth": 1.6, **marker_style})
        axes.fill_between(x, y - half, y + half, color=styles[label]["color"], alpha=0.2, linewidth=0)


def _plain_ticks(axes: Axes, xs: Sequence[float]) -> None:
    """Label a few values on a logarithmic x-axis as plain numbers; matplotlib's labels would overlap."""
    values = sorted(set(xs))
    if 1 < len(values) <= MOST_TICKS:
        axes.set_xticks(values, [f"{value:g}" for value in values])
        axes.set_xticks([], minor=True)


def _draw(axes: Axes, panel: Panel, height: float, width: float) -> AxesImage:
    """Draw one heat map, with cells in an area of about ``height`` by ``width`` inches."""
    matrix = _numbers(panel.matrix)
    hidden = np.isnan(matrix) | (panel.counts & (matrix == 0))
    low, high = 0.0 if panel.counts else float(np.nanmin(matrix)), float(np.nanmax(matrix))
    blank, colours = ("white", _COUNTS) if panel.counts else (_MISSING, colormaps["viridis"])
    norm = Normalize(low, high if high > low else low + 1)
    # Nearest: do not blend cells, even if there are more cells than pixels.
    image = axes.imshow(
        np.ma.array(matrix, mask=hidden), colours.with_extremes(bad=blank), norm, aspect="auto", interpolation="nearest"
    )
    axes.set_title(panel.title, loc="center", fontsize=11, pad=6)
    axes.set(xlabel=panel.xlabel, ylabel=panel.ylabel)
    axes.grid(visible=False)
    axes.spines[:].set(visible=True, color=_FAINT)
    axes.tick_params(length=0, labelsize=9)
    for axis, names in ((axes.xaxis, panel.xticks), (axes.yaxis, panel.yticks)):
        texts = [
            name[:24].replace("$", r"\$") for name in names
        ]  # Matplotlib would typeset a class named $a$ as a formula
        if 0 < len(texts) <= 30:
            axis.set_ticks(range(len(texts)), labels=texts)
            continue
        axis.set_major_locator(_whole_numbers())
        if texts:
            tick_names = dict(enumerate(texts))
            axis.set_major_formatter(FuncFormatter(lambda x, _, tick_names=tick_names: tick_names.get(round(x), "")))
    if len(panel.xticks) <= 30 and sum(map(len, panel.xticks)) > 40:
        axes.tick_params(axis="x", rotation=45)
    values = matrix[~hidden]
    if matrix.size <= 1000 and len(values):
        decimals = 0 if (values == np.rint(values)).all() or np.abs(values).max() >= 100 else 2
        texts = [f"{value:.{decimals}f}" for value in values]
        # A digit is about 0.6 times as wide as the font size. An inch has 72 points.
        size = 72 * min(width / matrix.shape[1] / (0.75 * max(map(len, texts))), height / len(matrix) / 1.4)
        light = image.to_rgba(values)[:, :3] @ [0.299, 0.587, 0.114] > 0.5
        for (row, column), text, is_light in zip(np.argwhere(~hidden), texts, light, strict=True):
            if size >= 6:  # smaller text is illegible
                ink = "black" if is_light else "white"
                axes.text(column, row, text, ha="center", va="center", color=ink, fontsize=min(size, 10))
    return image


def _bare(figure: Figure, title: str, number: int, columns: int) -> list[Axes]:
    """Return ``number`` panels with their axes hidden, in rows of at most ``columns`` columns."""
    figure.suptitle(title, x=0.01, ha="left")
    across = min(columns, number)
    grid = figure.subplots(math.ceil(number / across), across, squeeze=False)
    for axes in grid.flat:
        axes.set_axis_off()
    return list(grid.flat[:number])


def _draw_network(axes: Axes, layers: Sequence[tuple[npt.NDArray[np.float64], npt.NDArray[np.bool_]]]) -> None:
    """Draw one network from left to right, with the nodes of a layer in a centred column."""
    sizes = [layers[0][0].shape[1], *(len(weights) for weights, _ in layers)]
    heights = [(size - 1) / 2 - np.arange(size) for size in sizes]  # the first node is at the top
    largest = max(float(np.abs(weights).max()) for weights, _ in layers)
    for layer, (weights, marked) in enumerate(layers):
        for (target, source), weight in np.ndenumerate(weights):
            colour = (COLOURS[2] if weight > 0 else COLOURS[1]) if marked[target, source] else _FAINT
            width = 0.4 + (4.0 * abs(weight) / largest if largest > 0 else 0.0)
            ends = heights[layer][source], heights[layer + 1][target]
            axes.plot(
                (layer, layer + 1), ends, color=colour, linewidth=width, zorder=2 if marked[target, source] else 1
            )
    for layer, ys in enumerate(heights):
        axes.scatter([layer] * len(ys), ys, s=110, facecolor="white", edgecolor=_INK, linewidths=0.8, zorder=3)
    for number, height in enumerate(heights[-1]):
        axes.text(len(layers), height, str(number), ha="center", va="center", fontsize=8, zorder=4)
    axes.margins(0.12)


def _whole_numbers() -> MaxNLocator:
    return MaxNLocator(nbins=10, integer=True, min_n_ticks=1, steps=[1, 2, 5, 10])


def _line_style(index: int, count: int, points: int) -> dict[str, Any]:
    """Return the style of line ``index`` out of ``count``. The last tenth of viridis is too light for lines."""
    return {
        "color": COLOURS[index] if count <= len(COLOURS) else colormaps["viridis"](0.9 * index / (count - 1)),
        "linestyle": ("-", "--", "-.")[index % 3] if 3 < count <= len(COLOURS) else "-",
        "linewidth": 1.8 if count <= 20 else 0.8,
        "marker": "osD^vPX"[index % 7] if points <= 40 and count <= 20 else "",
        "markersize": 4.5,
    }


@contextmanager
def _figure(path: Path, width: float, height: float) -> Iterator[Figure]:
    """Yield a figure of the given size in inches, then write it to the path."""
    with rc_context(_STYLE):
        figure = Figure(figsize=(width, height))
        yield figure
        figure.savefig(path, format="png")


@contextmanager
def _axes(path: Path, title: str) -> Iterator[Axes]:
    """Yield the only axes of a figure."""
    with _figure(path, _WIDTH, _HEIGHT) as figure:
        axes = figure.subplots()
        axes.set_title(title)
        axes.tick_params(color=_AXIS)
        yield axes


def _note(axes: Axes, text: str) -> None:
    axes.text(1, 1.01, text, transform=axes.transAxes, ha="right", va="bottom", fontsize=8, color="#666666")


def _legend(axes: Axes, columns: int, markerscale: float = 1.0) -> None:
    handles = axes.get_legend_handles_labels()
    axes.figure.legend(*handles, loc="outside lower center", ncols=columns, markerscale=markerscale)


def _numbers(values: npt.ArrayLike | Sequence[Any]) -> npt.NDArray[np.float64]:
    """Return values as floats, with NaN for None and infinity."""
    array = np.array(values, dtype=np.float64)
    array[~np.isfinite(array)] = np.nan
    return array
