"""Lines over the rounds, or over another number."""

import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from posy import figure_style as style
from posy.metrics import Metric
from posy.spread import Evaluation
from posy.words import capitalised

Curve = Sequence[tuple[float, float | None]]
"""Points (x, y) of a line. Points whose y is None or NaN are skipped."""

Band = Sequence[tuple[float, float, float]]
"""Points of a line: x, y, and half the height of the band."""

MOST_LABELLED = 9
"""Maximum number of lines with a label at their end. With more lines, a figure has a legend."""


def over_rounds(
    points: Sequence[Sequence[Evaluation]],
    path: Path,
    metric: Metric | None = None,
    colours: Mapping[str, str] | None = None,
) -> None:
    """Plot a metric's mean over the clients against the round, with bands for mean ± std and for min to max.

    ``points`` contains the evaluations of the served models and of the local models, and ``metric`` is None for the
    loss. ``colours`` has the keys ``served`` and ``local``. With secure aggregation, the figure shows only the value
    for all samples, without bands.
    """
    pooled = any("samples" in evaluation.over_clients for evaluations in points for evaluation in evaluations)
    title = metric.title if metric else "loss"
    rounds = sorted({evaluation.round for evaluations in points for evaluation in evaluations})
    if not rounds:
        return
    colours = colours or dict(zip(("served", "local"), style.PALETTE, strict=False))
    note = "line: mean over the clients, band: mean ± standard deviation, dotted: minimum and maximum"
    if pooled:
        note = "over all samples; the scores of individual clients are not available"
    with style.single(path, f"{capitalised(title)} over the rounds", note) as axes:
        ends = []
        for index, (name, evaluations) in enumerate(zip(("served", "local"), points, strict=True)):
            if not evaluations:
                continue
            x = np.array([e.round for e in evaluations], dtype=np.float64)
            keys = ("mean", "std", "min", "max")
            values = {key: style.numbers([e.over_clients[key] for e in evaluations]) for key in keys}  # type: ignore[literal-required]
            if len(x) == 1:
                x += 0.1 * index  # side by side, because the markers would otherwise overlap
            if not pooled:
                _spread(axes, x, values, colours[name])
            last = values["mean"][-1]
            ends.append((x[-1], last, f"{name} {metric.format(last) if metric else f'{last:.3g}'}", colours[name]))
            axes.plot(x, values["mean"], zorder=3, **style.line_style(index, colours[name], len(x)))
        samples = "all test samples" if pooled else "the client's test split"
        axes.set(xlabel="round", ylabel=f"{title} on {samples}")
        if len(rounds) == 1:
            axes.set_xlim(rounds[0] - 1, rounds[0] + 1)
            axes.set_xticks(rounds)
        else:
            axes.xaxis.set_major_locator(style.whole_numbers())
        if metric and metric.in_percent:
            axes.yaxis.set_major_formatter(style.PERCENT)
        style.label_ends(axes, ends)


def lines(series: Mapping[str, Curve], path: Path, *, xlabel: str = "round", **options: Any) -> None:
    """Draw one line for each named series of points. See :func:`small_multiples` for the options."""
    arrays = {name: style.numbers(list(curve)).reshape(-1, 2) for name, curve in series.items()}
    bands = {name: [(x, y, math.nan) for x, y in array if np.isfinite(y)] for name, array in arrays.items()}
    panel = {name: band for name, band in bands.items() if band}
    small_multiples({"": panel} if panel else {}, path, xlabel=xlabel, columns=1, **options)


def small_multiples(
    panels: Mapping[str, Mapping[str, Band]],
    path: Path,
    *,
    title: str = "",
    note: str = "",
    xlabel: str = "round",
    ylabel: str = "",
    percent: bool = False,
    columns: int = 4,
    log: bool = False,
    y_log: bool = False,
    separate_y: bool = False,
    points: Collection[str] = (),
    dashed: Mapping[str, Mapping[str, float]] | None = None,
    colours: Mapping[str, str] | None = None,
    xticks: Mapping[str, Mapping[float, str]] | None = None,
) -> None:
    """Draw a small panel for each group of lines, with bands around the lines.

    The panels share one y-axis, unless ``separate_y`` is true. They share one x-axis, unless the lines of one panel are
    more than four times as long as the lines of another. A few lines in wide panels are labelled at their ends, and
    other lines in a legend.

    Parameters
    ----------
    percent : bool
        Whether to show values 0..1 as percentages.
    columns : int
        Maximum number of panels in a row.
    log, y_log : bool
        Whether the x-axes, and the y-axes, are logarithmic.
    points : collection of str
        Series that are drawn as hollow markers without a line, such as a paper's numbers.
    dashed : mapping, optional
        Horizontal lines, keyed by panel and name.
    colours : mapping, optional
        Colours of the series, keyed by name. The default is the palette.
    xticks : mapping, optional
        Names of positions on the x-axis, keyed by panel and position.
    """
    drawn = {name: lines for name, lines in panels.items() if any(len(band) for band in lines.values())}
    if not drawn:
        return
    across = 3 if columns == 2 and len(drawn) == 3 else min(columns, len(drawn))
    down = math.ceil(len(drawn) / across)
    levels = {panel: (dashed or {}).get(panel, {}) for panel in drawn}
    names = dict.fromkeys(name for groups in (drawn, levels) for group in groups.values() for name in group)
    styles = _styles([*names], points, colours or {})
    labelled = len(names) - len(points) <= MOST_LABELLED and columns <= 2
    height = {1: 3.8, 2: 2.9, 3: 2.4}.get(across, 1.7) * down + (0.0 if labelled else 0.3)
    with style.canvas(path, height, title, note) as figure:
        lasts = [max(point[0] for band in lines.values() for point in band) for lines in drawn.values()]
        grid = figure.subplots(down, across, squeeze=False, sharex=max(lasts) <= 4 * min(lasts), sharey=not separate_y)
        for axes in grid.flat[len(drawn) :]:
            axes.set_visible(False)
        for axes, (name, lines) in zip(grid.flat, drawn.items(), strict=False):
            axes.set_title(name, parse_math=False, fontsize=style.TEXT if across <= 2 else style.SMALL)
            _draw_lines(axes, lines, levels[name], styles, points)
            _number_axes(axes, lines, log=log, y_log=y_log, most=8 if across <= 2 else 4)
            _name_positions(axes, lines, (xticks or {}).get(name, {}))
            if percent:
                axes.yaxis.set_major_formatter(style.PERCENT)
        for column in range(across):
            bottom = [axes for axes in grid[:, column] if axes.get_visible()][-1]
            bottom.set_xlabel(xlabel)
            bottom.tick_params(labelbottom=True)
        figure.supylabel(ylabel, fontsize=style.TEXT)
        if labelled and len(names) - len(points) > 1:
            for axes, (name, lines) in zip(grid.flat, drawn.items(), strict=False):
                ends = _ends(axes, lines, levels[name], styles, points)
                style.label_ends(axes, ends, width=22 if across <= 2 else 12)
        elif not labelled:
            handles = [Line2D([], [], **styles[name]) for name in names]
            figure.legend(handles, [*names], loc="outside lower center", ncols=min(4, len(names)))


def _spread(axes: Axes, x: npt.NDArray[Any], values: Mapping[str, npt.NDArray[Any]], colour: str) -> None:
    """Draw the standard deviation over the clients, and the range from the lowest to the highest score."""
    mean, std, low, high = (values[key] for key in ("mean", "std", "min", "max"))
    if len(x) == 1:
        axes.vlines(x, low, high, color=colour, linewidth=1, linestyle=":")
        axes.vlines(x, mean - std, mean + std, color=colour, alpha=0.3, linewidth=8)
        return
    axes.fill_between(x, np.maximum(mean - std, low), np.minimum(mean + std, high), color=colour, alpha=0.18, lw=0)
    for edge in (low, high):
        axes.plot(x, edge, color=colour, alpha=0.5, linewidth=0.8, linestyle=":")


def _styles(names: Sequence[str], points: Collection[str], colours: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Return the style of each series. More series than colours differ in their lightness only."""
    palette = style.PALETTE if len(names) <= len(style.PALETTE) else style.shades(style.SOFT, len(names))
    styles = {}
    for index, name in enumerate(names):
        styles[name] = style.line_style(index, colours.get(name, palette[index]), 0 if len(names) > 20 else 40)
        if len(names) > len(style.PALETTE):
            styles[name] |= {"linestyle": "-", "linewidth": 0.8}
        if name in points:
            styles[name] |= {"marker": "D", "markersize": 6, "linestyle": "", "markeredgewidth": 1.5}
            styles[name] |= {"markerfacecolor": "white", "markeredgecolor": styles[name]["color"], "zorder": 4}
            styles[name]["clip_on"] = False  # the paper's number may be at the edge of the panel
    return styles


def _draw_lines(
    axes: Axes,
    lines: Mapping[str, Band],
    levels: Mapping[str, float],
    styles: Mapping[str, Mapping[str, Any]],
    points: Collection[str],
) -> None:
    """Draw lines with their bands, series of separate points, and horizontal dashed lines."""
    for label, band in lines.items():
        x, y, half = style.numbers(band).reshape(-1, 3).T
        markers = {} if len(x) <= 12 or label in points else {"marker": ""}
        axes.plot(x, y, label=label, **{**styles[label], **markers})
        if np.isfinite(half).any():
            axes.fill_between(x, y - half, y + half, color=styles[label]["color"], alpha=0.16, linewidth=0)
    for label, level in levels.items():
        axes.axhline(level, label=label, color=styles[label]["color"], linewidth=1.4, linestyle="--")


def _number_axes(axes: Axes, lines: Mapping[str, Band], *, log: bool, y_log: bool, most: int) -> None:
    """Choose the scales and the ticks of a panel's axes."""
    axes.margins(x=0.02)
    xs, ys = ([point[index] for band in lines.values() for point in band] for index in (0, 1))
    if log:
        axes.set_xscale("log")
    style.number_ticks(axes.xaxis, xs, log=log, most=most)
    if y_log:
        axes.set_yscale("log")
        style.number_ticks(axes.yaxis, [], log=True)
    elif style.is_whole(ys):
        axes.yaxis.set_major_locator(style.whole_numbers(6))


def _name_positions(axes: Axes, lines: Mapping[str, Band], names: Mapping[float, str]) -> None:
    """Name positions on the x-axis. The points at all other positions get their numbers."""
    if names:
        xs = sorted({x for band in lines.values() for x, y, _ in band if math.isfinite(y)})
        axes.set_xticks(xs, [names.get(x, f"{x:g}") for x in xs])


def _ends(
    axes: Axes,
    lines: Mapping[str, Band],
    levels: Mapping[str, float],
    styles: Mapping[str, Mapping[str, Any]],
    points: Collection[str],
) -> list[tuple[float, float, str, str]]:
    """Return the labels of lines at their last points, and of horizontal lines at the right edge."""
    ends = []
    for name, band in lines.items():
        finite = [point for point in band if math.isfinite(point[1])]
        if finite and name not in points:
            ends.append((finite[-1][0], finite[-1][1], name, styles[name]["color"]))
    last, right = max((end[0] for end in ends), default=0.0), axes.get_xlim()[1]
    levelled = [(right, level, name, styles[name]["color"]) for name, level in levels.items()]
    return [(right if x == last else x, y, name, colour) for x, y, name, colour in ends] + levelled
