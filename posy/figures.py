"""Pictures of a run, as PNG files of 1200 pixels width (more for rows of panels).

Every function takes data and a path, writes one file and returns True; where there is nothing to
draw (no data, or only None and NaN) it writes none and returns False. Figures are made through
matplotlib's objects, never through pyplot, so that nothing global is kept or changed.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import BoundaryNorm, Colormap, ListedColormap, Normalize
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FuncFormatter, MaxNLocator

from posy.metrics import Evaluation

Curve = Sequence[tuple[float, float | None]]
"""Points (x, y) of a line; those whose y is None or NaN are left out."""

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Okabe and Ito's colours, which the colour-blind tell apart (without yellow, too light for lines)."""

_DPI = 150
_WIDTH, _HEIGHT = 8.0, 4.6  # inches
_INK, _FAINT, _MISSING = "#222222", "#d9d9d9", "#eeeeee"
_COUNTS = ListedColormap(colormaps["Blues"](np.linspace(0.15, 1, 256)))  # 1 sample differs from none
_PERCENT = FuncFormatter(lambda value, _: f"{100 * value:.4g} %")


@dataclass(frozen=True)
class Panel:
    """One heat map.

    Attributes
    ----------
    matrix : array (rows, columns)
        Cells that are NaN (or None) stay grey.
    label : str
        Meaning and unit of the values, written at the colour bar.
    low, high : float, optional
        Ends of the colour scale; the range of the data if not given.
    xticks, yticks : sequence of str, optional
        Names of the columns and rows; their numbers if not given.
    categories : sequence of str, optional
        Names of the values 0, 1, …, if they are a choice and not a quantity.
    blank_zeros : bool
        Leave cells of value 0 white, as in a table of counts.
    """

    matrix: npt.ArrayLike
    title: str = ""
    xlabel: str = ""
    ylabel: str = ""
    label: str = ""
    low: float | None = None
    high: float | None = None
    xticks: Sequence[str] | None = None
    yticks: Sequence[str] | None = None
    categories: Sequence[str] | None = None
    blank_zeros: bool = False


def accuracy_over_rounds(
    points: Mapping[str, Sequence[Evaluation]], path: Path, *, title: str = "Accuracy over the rounds"
) -> bool:
    """Draw the clients' mean accuracy by round, with bands mean ± std and min to max.

    Parameters
    ----------
    points : Mapping
        Evaluations of each line: ``{"served model": history.served, "local model": history.local}``.
    """
    return _over_rounds(points, path, title=title, ylabel="accuracy on the client's test split", percent=True)


def loss_over_rounds(
    points: Mapping[str, Sequence[Evaluation]], path: Path, *, title: str = "Loss over the rounds"
) -> bool:
    """Draw the clients' mean loss by round, as :func:`accuracy_over_rounds` does accuracy."""
    return _over_rounds(points, path, title=title, ylabel="cross-entropy", percent=False)


def client_accuracies(
    served: Sequence[float | None] | None,
    local: Sequence[float | None] | None,
    path: Path,
    *,
    title: str = "Accuracy of each client",
) -> bool:
    """Draw each client's accuracy before and after its training, clients in order of accuracy.

    Parameters
    ----------
    served, local : sequence of float, length M
        Accuracy of the served and of the local model by partition; None for a point (or a client)
        that was not evaluated.
    """
    count = max(len(served or ()), len(local or ()))
    before, after = (_numbers(a) if a else np.full(count, np.nan) for a in (served, local))
    ranked = np.where(np.isnan(after), before, after)
    order = np.argsort(ranked, kind="stable")[: np.count_nonzero(np.isfinite(ranked))]
    if not len(order):
        return False
    figure, axes = _figure(title)
    x = np.arange(len(order))
    dot = float(np.clip(400 / len(order), 2.5, 9))
    grey = "#b0b0b0" if len(order) <= 100 else _FAINT
    axes.vlines(x, before[order], after[order], color=grey, linewidth=min(2.0, dot / 4), zorder=1)
    for values, name, colour, marker in (
        (before, "served model", COLOURS[0], "o"),
        (after, "local model", COLOURS[1], "D"),
    ):
        if np.isfinite(values).any():
            mean = float(np.nanmean(values))
            label = f"{name}, mean {100 * mean:.2f} %"
            size = dot if marker == "o" else 0.8 * dot
            axes.plot(x, values[order], marker, color=colour, markersize=size, markeredgewidth=0, label=label)
            axes.axhline(mean, color=colour, linewidth=1, linestyle="--", zorder=0)
    if len(order) <= 40:
        axes.set_xticks(x, [str(i) for i in order], fontsize=9 if len(order) <= 25 else 7)
        axes.set_xlabel("client (partition), by accuracy")
    else:
        axes.set_xlabel(f"{len(order)} clients, by accuracy")
    axes.set_xlim(-0.6, len(order) - 0.4)
    axes.set_ylabel("accuracy")
    axes.yaxis.set_major_formatter(_PERCENT)
    _legend(axes, 2, markerscale=max(1.0, 6 / dot))
    return _save(figure, path)


def partition(
    counts: npt.ArrayLike,
    path: Path,
    *,
    class_names: Sequence[str] | None = None,
    title: str = "Samples of each class on each client",
) -> bool:
    """Draw how many samples of each class each client holds.

    Parameters
    ----------
    counts : integer array (M, C)
        Samples of each client and class.
    """
    return heatmaps([counts_panel(counts, class_names=class_names)], path, title=title)


def counts_panel(counts: npt.ArrayLike, *, title: str = "", class_names: Sequence[str] | None = None) -> Panel:
    """Return the heat map of class counts (M, C): clients to the right, classes downwards."""
    return Panel(
        _matrix(counts).T,
        title=title,
        xlabel="client",
        ylabel="class",
        label="samples",
        low=0,
        yticks=class_names,
        blank_zeros=True,
    )


def heatmap(matrix: npt.ArrayLike, path: Path, **options: Any) -> bool:
    """Draw a matrix; the options are the attributes of :class:`Panel`."""
    title = options.pop("title", "")
    return heatmaps([Panel(matrix, **options)], path, title=title)


def heatmaps(panels: Sequence[Panel], path: Path, *, title: str = "", columns: int = 4, shared: bool = False) -> bool:
    """Draw heat maps side by side, in rows of at most ``columns``.

    Parameters
    ----------
    panels : sequence of Panel
        Small ones have their values written in. Panels without data are left out.
    shared : bool
        Give all panels one colour scale, and one bar for it.
    """
    panels = [panel for panel in panels if np.isfinite(_matrix(panel.matrix)).any()]
    if not panels:
        return False
    down = math.ceil(len(panels) / columns)
    across = math.ceil(len(panels) / down)
    width = max(_WIDTH, 4.0 * across)
    rows, wide = _matrix(panels[0].matrix).shape
    inner = width / across - (1.0 if shared else 1.5)  # width of the cells alone, in inches
    height = inner * float(np.clip(rows / wide, 0.5 if across == 1 else 0.75, 0.8 if across == 1 else 1.0))
    figure = _page(width, (height + 0.8) * down + 0.4)
    figure.suptitle(title, fontsize=13, color=_INK, x=0.01, ha="left")
    grid = figure.subplots(down, across, squeeze=False)
    limits = _limits(panels) if shared else None
    images = [_draw(axes, panel, limits, (height, inner)) for axes, panel in zip(grid.flat, panels, strict=False)]
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    for image, panel in zip(images[:1] if shared else images, panels, strict=False):
        where = list(grid.flat) if shared else image.axes
        bar = figure.colorbar(image, ax=where, fraction=0.05 if shared else 0.08, pad=0.02)
        bar.outline.set_visible(False)
        bar.set_label(panel.label, color=_INK)
        if panel.categories:
            bar.set_ticks(range(len(panel.categories)), labels=list(panel.categories))
            bar.ax.tick_params(length=0)
    return _save(figure, path)


def lines(
    series: Mapping[str, Curve],
    path: Path,
    *,
    title: str = "",
    xlabel: str = "round",
    ylabel: str = "",
    percent: bool = False,
    logx: bool = False,
    logy: bool = False,
) -> bool:
    """Draw one line for each series of points.

    Parameters
    ----------
    series : Mapping
        Points (x, y) by the name of the line.
    percent : bool
        The values are parts of one, to be labelled in percent.
    logx, logy : bool
        Logarithmic axes.
    """
    drawn = {name: array for name, curve in series.items() if len(array := _curve(curve))}
    if not drawn:
        return False
    figure, axes = _figure(title)
    for index, (name, array) in enumerate(drawn.items()):
        axes.plot(array[:, 0], array[:, 1], label=name, **_line_style(index, len(drawn), len(array)))
    if logx:
        axes.set_xscale("log")
    elif all((array[:, 0] == np.rint(array[:, 0])).all() for array in drawn.values()):
        axes.xaxis.set_major_locator(_whole_numbers())
    if logy:
        axes.set_yscale("log")
    if percent:
        axes.yaxis.set_major_formatter(_PERCENT)
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    if 1 < len(drawn) <= 20:
        _legend(axes, min(4, len(drawn)))
    return _save(figure, path)


def scatter(
    x: npt.ArrayLike,
    y: npt.ArrayLike,
    path: Path,
    *,
    title: str = "",
    xlabel: str = "",
    ylabel: str = "",
    identity: bool = True,
) -> bool:
    """Draw y against x with their correlation, and the line y = x (``identity``).

    Parameters
    ----------
    x, y : array of equal shape
        For instance p and p̃ of cwFedAvg, both (M, C).
    """
    a, b = _numbers(x).ravel(), _numbers(y).ravel()
    good = np.isfinite(a) & np.isfinite(b)
    if not good.any():
        return False
    a, b = a[good], b[good]
    figure, axes = _figure(title)
    size, alpha = float(np.clip(4000 / len(a), 4, 36)), float(np.clip(400 / len(a), 0.15, 0.8))
    axes.scatter(a, b, s=size, alpha=alpha, color=COLOURS[0], linewidths=0, zorder=2)
    if identity:
        low, high = min(a.min(), b.min()), max(a.max(), b.max())
        axes.plot([low, high], [low, high], color=_INK, linewidth=1, linestyle="--", label="y = x", zorder=1)
        _legend(axes, 1)
    if len(a) > 2 and a.std() > 0 and b.std() > 0:
        note = f"correlation {np.corrcoef(a, b)[0, 1]:.3f}"
        _note(axes, note)
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    return _save(figure, path)


def similarity_order(counts: npt.ArrayLike) -> npt.NDArray[np.int64]:
    """Return the clients in an order that puts those with similar class distributions side by side.

    Parameters
    ----------
    counts : array (M, C)
        Samples of each client and class.

    Returns
    -------
    int64 array (M,)
        Leaves of the average-linkage clustering of p_i under the total variation distance.
    """
    table = _matrix(counts)
    if len(table) < 3:
        return np.arange(len(table))
    # SciPy's clustering takes half a second to import, and only FedACS's picture needs it.
    from scipy.cluster.hierarchy import leaves_list, linkage  # noqa: PLC0415

    shares = table / np.maximum(table.sum(axis=1, keepdims=True), 1)
    return np.asarray(leaves_list(linkage(shares, "average", "cityblock", optimal_ordering=True)), dtype=np.int64)


def _over_rounds(
    points: Mapping[str, Sequence[Evaluation]], path: Path, *, title: str, ylabel: str, percent: bool
) -> bool:
    drawn = {name: evaluations for name, evaluations in points.items() if evaluations}
    if not drawn:
        return False
    figure, axes = _figure(title)
    for index, (name, evaluations) in enumerate(drawn.items()):
        x = np.array([e.round for e in evaluations], dtype=np.float64)
        mean, std, low, high = (
            np.array([e.over_clients[key] for e in evaluations]) for key in ("mean", "std", "min", "max")
        )
        style = _line_style(index, len(drawn), len(x))
        last = f"{100 * mean[-1]:.2f} %" if percent else f"{mean[-1]:.3g}"
        if len(x) > 1:
            axes.fill_between(
                x, np.maximum(mean - std, low), np.minimum(mean + std, high), color=style["color"], alpha=0.18, lw=0
            )
            for edge in (low, high):
                axes.plot(x, edge, color=style["color"], alpha=0.45, linewidth=0.8, linestyle=":")
        else:
            x += 0.1 * index  # beside each other, as they would hide one another
            axes.vlines(x, low, high, color=style["color"], linewidth=1, linestyle=":")
            axes.vlines(x, mean - std, mean + std, color=style["color"], alpha=0.3, linewidth=8)
        axes.plot(x, mean, label=f"{name}, last {last}", zorder=3, **style)
    axes.set_xlabel("round")
    axes.set_ylabel(ylabel)
    rounds = {e.round for evaluations in drawn.values() for e in evaluations}
    if len(rounds) == 1:
        axes.set_xlim(min(rounds) - 1, max(rounds) + 1)
        axes.set_xticks(sorted(rounds))
    else:
        axes.xaxis.set_major_locator(_whole_numbers())
    if percent:
        axes.yaxis.set_major_formatter(_PERCENT)
    _note(axes, "band: mean ± std, dotted: min and max of the clients")
    _legend(axes, 2)
    return _save(figure, path)


def _draw(axes: Axes, panel: Panel, limits: tuple[float, float] | None, inches: tuple[float, float]) -> AxesImage:
    """Draw one heat map on axes of about so many inches (height, width)."""
    matrix = _matrix(panel.matrix)
    norm: Normalize = Normalize(*(limits or _limits([panel])))
    colours: Colormap = _COUNTS if panel.blank_zeros else colormaps["viridis"]
    if panel.categories:
        names = len(panel.categories)
        colours = ListedColormap([_colour(i, names) for i in range(names)])
        norm = BoundaryNorm(np.arange(names + 1) - 0.5, names)
    colours = colours.with_extremes(bad="white" if panel.blank_zeros else _MISSING)
    hidden = ~np.isfinite(matrix) | (matrix == 0 if panel.blank_zeros else False)
    # Nearest: a cell stays a cell, also where there are more of them than pixels.
    image = axes.imshow(np.ma.array(matrix, mask=hidden), colours, norm, aspect="auto", interpolation="nearest")
    axes.set_title(panel.title, fontsize=11, color=_INK)
    axes.set_xlabel(panel.xlabel)
    axes.set_ylabel(panel.ylabel)
    _name_ticks(axes, panel)
    for side in axes.spines.values():
        side.set_color(_FAINT)
    if matrix.size <= 1000 and not panel.categories:
        _annotate(axes, matrix, hidden, image, inches)
    return image


def _annotate(
    axes: Axes,
    matrix: npt.NDArray[np.float64],
    hidden: npt.NDArray[np.bool_],
    image: AxesImage,
    inches: tuple[float, float],
) -> None:
    """Write the values into the cells, if they can be read there."""
    values = matrix[~hidden]
    if not len(values):
        return
    decimals = 0 if (values == np.rint(values)).all() or np.abs(values).max() >= 100 else 2
    texts = [f"{value:.{decimals}f}" for value in values]
    # A digit is about 0.6 of the font size wide; 72 points are an inch.
    size = 72 * min(inches[1] / matrix.shape[1] / (0.75 * max(map(len, texts))), inches[0] / len(matrix) / 1.4)
    if size < 6:
        return
    light = image.to_rgba(values)[:, :3] @ [0.299, 0.587, 0.114] > 0.5
    for (row, column), text, is_light in zip(np.argwhere(~hidden), texts, light, strict=True):
        ink = "black" if is_light else "white"
        axes.text(column, row, text, ha="center", va="center", color=ink, fontsize=min(size, 10))


def _name_ticks(axes: Axes, panel: Panel) -> None:
    for axis, names in ((axes.xaxis, panel.xticks), (axes.yaxis, panel.yticks)):
        axis.set_tick_params(length=0, labelsize=9)
        if names is None or len(names) > 30:
            axis.set_major_locator(_whole_numbers())
        else:
            axis.set_ticks(range(len(names)), labels=[_shown(name) for name in names])
        if names is not None and len(names) > 30:
            axis.set_major_formatter(FuncFormatter(_namer(names)))
    if panel.xticks is not None and len(panel.xticks) <= 30 and sum(map(len, panel.xticks)) > 40:
        axes.tick_params(axis="x", rotation=45)


def _namer(names: Sequence[str]) -> Callable[[float, int | None], str]:
    return lambda x, _: _shown(names[round(x)]) if 0 <= round(x) < len(names) else ""


def _shown(name: str) -> str:
    return name[:24].replace("$", r"\$")  # a class may be named $a$, which is no formula


def _whole_numbers() -> MaxNLocator:
    return MaxNLocator(nbins=10, integer=True, min_n_ticks=1, steps=[1, 2, 5, 10])


def _limits(panels: Sequence[Panel]) -> tuple[float, float]:
    values = np.concatenate([_matrix(panel.matrix).ravel() for panel in panels])
    low = panels[0].low if panels[0].low is not None else float(np.nanmin(values))
    high = panels[0].high if panels[0].high is not None else float(np.nanmax(values))
    return low, high if high > low else low + 1


def _line_style(index: int, count: int, points: int) -> dict[str, Any]:
    return {
        "color": _colour(index, count),
        "linestyle": "-" if count > len(COLOURS) else ("-", "--", "-.")[index % 3] if count > 3 else "-",
        "linewidth": 1.8 if count <= 20 else 0.8,
        "marker": "osD^vPX"[index % 7] if points <= 40 and count <= 20 else "",
        "markersize": 4.5,
    }


def _colour(index: int, count: int) -> Any:
    if count <= len(COLOURS):
        return COLOURS[index]
    return colormaps["viridis"](0.9 * index / (count - 1))  # its last tenth is too light for a line


def _page(width: float, height: float) -> Figure:
    layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.1)
    return Figure(figsize=(width, height), dpi=_DPI, layout=layout, facecolor="white")


def _figure(title: str) -> tuple[Figure, Axes]:
    figure = _page(_WIDTH, _HEIGHT)
    axes = figure.subplots()
    axes.set_title(title, fontsize=13, color=_INK, loc="left", pad=18)
    axes.grid(True, axis="y", color=_FAINT, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#999999")
    axes.tick_params(color="#999999", labelcolor=_INK)
    return figure, axes


def _note(axes: Axes, text: str) -> None:
    axes.text(1, 1.01, text, transform=axes.transAxes, ha="right", va="bottom", fontsize=8, color="#666666")


def _legend(axes: Axes, columns: int, markerscale: float = 1.0) -> None:
    axes.figure.legend(
        *axes.get_legend_handles_labels(),
        loc="outside lower center",
        ncols=columns,
        frameon=False,
        labelcolor=_INK,
        markerscale=markerscale,
    )


def _save(figure: Figure, path: Path) -> bool:
    figure.savefig(path, format="png")
    return True


def _numbers(values: npt.ArrayLike | Sequence[Any]) -> npt.NDArray[np.float64]:
    """Return values as floats, NaN for None and infinity."""
    array = np.array(values, dtype=np.float64)
    array[~np.isfinite(array)] = np.nan
    return array


def _matrix(values: npt.ArrayLike) -> npt.NDArray[np.float64]:
    array = _numbers(values)
    return array if array.ndim == 2 else array.reshape(-1, 1) if array.size else np.empty((0, 0))


def _curve(curve: Curve) -> npt.NDArray[np.float64]:
    array = _numbers(list(curve)).reshape(-1, 2)
    return array[np.isfinite(array[:, 1])]
