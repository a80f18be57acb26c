"""Points with intervals: the scores of clients and methods, and mean ranks."""

import math
import textwrap
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes

from posy import figure_style as style
from posy.metrics import Metric
from posy.words import capitalised


class Interval(NamedTuple):
    """A point with an interval around it."""

    mean: float
    low: float
    high: float


def client_scores(
    served: Sequence[float | None],
    local: Sequence[float | None],
    path: Path,
    metric: Metric,
    colours: Mapping[str, str] | None = None,
) -> None:
    """Draw each client's score before and after its training, with clients sorted by score.

    ``served`` and ``local`` ``(M,)`` contain None for models without a score. ``colours`` has the keys ``served`` and
    ``local``.
    """
    before, after = style.numbers(served), style.numbers(local)
    ranked = np.where(np.isnan(after), before, after)
    order = np.argsort(ranked, kind="stable")[: np.count_nonzero(np.isfinite(ranked))]
    if not len(order):
        return
    colours = colours or dict(zip(("served", "local"), style.PALETTE, strict=False))
    hollow = "local" if colours["local"] == style.BASELINE else "served"
    x = np.arange(len(order))
    dot = float(np.clip(400 / len(order), 2.5, 8))
    note = "dashed: mean over the clients"
    with style.single(path, f"{capitalised(metric.title)} of each client", note) as axes:
        axes.vlines(x, before[order], after[order], color=style.FAINT, linewidth=min(2.0, dot / 4), zorder=1)
        ends = []
        for values, name, marker in ((before, "served", "o"), (after, "local", "D")):
            if np.isfinite(values).any():
                mean, colour = float(np.nanmean(values)), colours[name]
                face = "white" if name == hollow and dot > 4 else colour  # distinguishes points at the same place
                axes.plot(x, values[order], marker, color=colour, markersize=dot * 0.8, markerfacecolor=face)
                axes.axhline(mean, color=colour, linewidth=1, linestyle="--", zorder=0)
                ends.append((len(order) - 0.4, mean, f"{name}, mean {metric.format(mean)}", colour))
        is_small = len(order) <= 40
        if is_small:
            axes.set_xticks(x, [str(i) for i in order], fontsize=style.SMALL if len(order) <= 30 else 7)
        clients = "client" if is_small else f"{len(order)} clients"
        axes.set(xlabel=f"{clients}, sorted by {metric.title}", ylabel=metric.title)
        axes.set_xlim(-0.6, len(order) - 0.4)
        if metric.in_percent:
            axes.yaxis.set_major_formatter(style.PERCENT)
        style.label_ends(axes, ends)


def dots(
    groups: Mapping[str, Mapping[str, tuple[float, float]]],
    path: Path,
    *,
    title: str = "",
    note: str = "",
    xlabel: str = "",
    marks: Mapping[tuple[str, str], float] | None = None,
    colours: Mapping[str, str] | None = None,
) -> None:
    """Draw a panel for each group, with a point and its interval for each name.

    Parameters
    ----------
    groups : mapping
        Mean and half the length of the interval of each name in each group. A length of 0 draws no interval.
    marks : mapping, optional
        Values for hollow markers, such as a paper's numbers, keyed by group and name.
    colours : mapping, optional
        Colours of the names. The default is one colour for all.
    """
    if not groups:
        return
    marks = marks or {}
    names = list(dict.fromkeys(name for group in groups.values() for name in group))
    across = min(3, len(groups))
    down = math.ceil(len(groups) / across)
    with style.canvas(path, (0.26 * len(names) + 0.75) * down, title, note) as figure:
        grid = figure.subplots(down, across, squeeze=False, sharey=True, sharex=True)
        for axes in grid.flat[len(groups) :]:
            axes.set_visible(False)
        for axes, (title_of_group, group) in zip(grid.flat, groups.items(), strict=False):
            axes.set_title(textwrap.fill(title_of_group, 30 if across > 1 else 90), fontsize=style.SMALL + 0.5)
            for y, name in enumerate(names):
                colour = (colours or {}).get(name, style.PALETTE[0])
                if name in group:
                    mean, half = group[name]
                    _interval(axes, y, Interval(mean, mean - half, mean + half), colour)
                if (title_of_group, name) in marks:
                    axes.plot(
                        marks[title_of_group, name], y, "D", color=colour, markerfacecolor="white", markeredgewidth=1.5
                    )
            axes.tick_params(labelbottom=True)
        style.name_rows(grid[0, 0], names, colours or {})
        grid[0, 0].set_ylim(len(names) - 0.4, -0.6)
        figure.supxlabel(xlabel, fontsize=style.TEXT)


def ranking(
    intervals: Mapping[str, Interval],
    path: Path,
    *,
    band: tuple[float, float],
    bold: Collection[str] = (),
    colours: Mapping[str, str] | None = None,
    title: str = "",
    note: str = "",
    xlabel: str = "",
) -> None:
    """Draw a point with an interval for each name, from top to bottom, with a shaded band and names in bold type."""
    if not intervals:
        return
    with style.single(path, title, note, height=0.2 * len(intervals) + 0.7) as axes:
        axes.axvspan(*band, color=style.MISSING, zorder=0)
        for y, (name, interval) in enumerate(intervals.items()):
            _interval(axes, y, interval, (colours or {}).get(name, style.AXIS))
        style.name_rows(axes, [*intervals], colours or {}, bold)
        axes.set_ylim(len(intervals) - 0.4, -0.6)
        axes.margins(x=0.02)
        axes.set_xlabel(xlabel)


def scatters(
    groups: Mapping[str, tuple[npt.ArrayLike, npt.ArrayLike]],
    path: Path,
    *,
    title: str = "",
    note: str = "",
    xlabel: str = "",
    ylabel: str = "",
    colours: Mapping[str, str] | None = None,
) -> None:
    """Draw y against x (arrays of equal shape) for each group, with the group's correlation and the line y = x."""
    arrays = {name: np.stack([style.numbers(x).ravel(), style.numbers(y).ravel()]) for name, (x, y) in groups.items()}
    finite = {name: array[:, np.isfinite(array).all(axis=0)] for name, array in arrays.items()}
    drawn = {name: array for name, array in finite.items() if array.size}
    if not drawn:
        return
    with style.single(path, title, note, height=4.4) as axes:
        for index, (name, (x, y)) in enumerate(drawn.items()):
            is_defined = len(x) > 2 and x.std() > 0 and y.std() > 0
            correlation = f"r = {np.corrcoef(x, y)[0, 1]:.3f}" if is_defined else ""
            size, alpha = float(np.clip(4000 / len(x), 6, 36)), float(np.clip(400 / len(x), 0.2, 0.8))
            colour = (colours or {}).get(name, style.PALETTE[index % len(style.PALETTE)])
            marker = style.MARKERS[index % len(style.MARKERS)]
            label = ", ".join(filter(None, (name, correlation))) or None
            axes.scatter(x, y, s=size, alpha=alpha, color=colour, marker=marker, linewidths=0, label=label, zorder=2)
        ends = [float(extreme(array)) for extreme, array in ((np.min, _all(drawn)), (np.max, _all(drawn)))]
        axes.plot(ends, ends, color=style.INK, linewidth=1, linestyle="--", label="y = x", zorder=1)
        axes.set(xlabel=xlabel, ylabel=ylabel)
        legend = axes.figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=3)
        for handle in legend.legend_handles:
            if handle is not None:
                handle.set_alpha(1)


def scatter(
    x: npt.ArrayLike,
    y: npt.ArrayLike,
    path: Path,
    *,
    title: str = "",
    xlabel: str = "",
    ylabel: str = "",
    colour: str = style.PALETTE[0],
) -> None:
    """Draw y against x (arrays of equal shape), with the correlation and the line y = x."""
    scatters({"": (x, y)}, path, title=title, xlabel=xlabel, ylabel=ylabel, colours={"": colour})


def _all(arrays: Mapping[str, npt.NDArray[np.float64]]) -> npt.NDArray[np.float64]:
    return np.concatenate([array.ravel() for array in arrays.values()])


def _interval(axes: Axes, y: int, interval: Interval, colour: str) -> None:
    """Draw a point with its interval in a row of a panel."""
    if interval.high > interval.low:
        axes.hlines(y, interval.low, interval.high, color=colour, linewidth=2, alpha=0.55)
    axes.plot(interval.mean, y, "o", color=colour, markersize=6, markeredgewidth=0, zorder=3)
