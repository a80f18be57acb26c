"""Heat maps: samples of the classes, weights, routed queries, and gains."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.colors import Colormap, ListedColormap, Normalize
from matplotlib.image import AxesImage
from matplotlib.ticker import FuncFormatter

from posy import figure_style as style

_COUNTS = ListedColormap(colormaps["Blues"](np.linspace(0.15, 1, 256)))  # makes even a single sample visible
_MOST_NAMED = 30
"""Maximum number of rows or columns that are all named."""
_CLIPPED = 97.5
"""Percentile of the absolute gains at which the colour scale of gains ends."""


@dataclass(frozen=True)
class Panel:
    """One heat map."""

    matrix: npt.ArrayLike
    """Values of the cells ``(rows, columns)``. Cells with NaN or None are grey."""
    title: str = ""
    xlabel: str = ""
    ylabel: str = ""
    label: str = ""
    """Label of the colour bar, with the meaning and unit of the values. Panels with one label share a colour scale."""
    xticks: Sequence[str] = ()
    yticks: Sequence[str] = ()
    """Names of the columns and rows. If empty, the figure shows their indices."""
    counts: bool = False
    """Whether the values are counts. The colour scale of counts starts at 0, and cells with 0 are white."""
    diverging: bool = False
    """Whether the values are differences. Their colour scale has its centre at 0."""

    @property
    def values(self) -> npt.NDArray[np.float64]:
        """Values of the cells, with NaN for unknown values."""
        return style.numbers(self.matrix)

    @property
    def colours(self) -> Colormap:
        """Colour map of the panel."""
        name = "RdBu" if self.diverging else "viridis"
        return (_COUNTS if self.counts else colormaps[name]).with_extremes(
            bad="white" if self.counts else style.MISSING
        )


def partition(counts: npt.ArrayLike, path: Path, *, class_names: Sequence[str] = ()) -> None:
    """Plot the number of samples per client and class, ``counts`` ``(M, C)``."""
    panel = Panel(np.transpose(counts), "", "client", "class", "samples", yticks=class_names, counts=True)
    heatmaps([panel], path, title="Samples of each class on each client")


def routing(matrix: npt.NDArray[Any], path: Path) -> None:
    """Draw the number of pooled test samples ``(M, M)`` for each pair of true and chosen clients."""
    panel = Panel(matrix, xlabel="chosen client", ylabel="true client", label="samples", counts=True)
    heatmaps([panel], path, title="Routing of the pooled test samples")


def heatmaps(panels: Sequence[Panel], path: Path, *, title: str = "", note: str = "") -> None:
    """Draw heat maps side by side, at most three per row. Small maps show their values. Empty maps are skipped.

    Panels with the same label share their colour scale, and also the colour bar if all panels have this label.
    """
    panels = [panel for panel in panels if np.isfinite(panel.values).any()]
    if not panels:
        return
    is_shared = len({(panel.label, panel.counts, panel.diverging) for panel in panels}) == 1 and bool(panels[0].label)
    across = {1: 1, 2: 2, 4: 2}.get(len(panels), 3 if is_shared else 2)
    down = math.ceil(len(panels) / across)
    rows, columns = np.shape(panels[0].matrix)
    width = style.WIDTH / across - (0.7 if is_shared and across > 1 else 1.4)  # width of the cells in inches
    height = width * float(np.clip(rows / columns, 0.5, 0.8 if across == 1 else 1.0))
    if not is_shared and len({panel.label for panel in panels}) < len(panels):
        note = style.join(note, "one colour scale for each quantity")
    with style.canvas(path, (height + 0.65) * down, title, note) as figure:
        grid = figure.subplots(down, across, squeeze=False)
        for axes in grid.flat[len(panels) :]:
            axes.set_visible(False)
        drawn = [axes for axes in grid.flat if axes.get_visible()]
        images = [
            _draw(axes, panel, _norm([p for p in panels if panel.label and p.label == panel.label] or [panel]))
            for axes, panel in zip(drawn, panels, strict=True)
        ]
        for axes, image in zip(drawn, images, strict=True):
            _write_values(axes, image, height, width)
        by_label = {panel.label or str(index): index for index, panel in enumerate(panels)}  # the last panel of a label
        bars = [(images[index], drawn if is_shared else drawn[index], panels[index]) for index in by_label.values()]
        for image, of_bar, panel in bars:
            bar = figure.colorbar(image, ax=of_bar, fraction=0.08, pad=0.02, aspect=25)
            bar.set_label(panel.label, fontsize=style.SMALL)
            bar.outline.set_visible(False)
            bar.ax.tick_params(length=0)
            if panel.counts:
                bar.ax.yaxis.set_major_locator(style.whole_numbers(6))


def gains(
    panels: Mapping[str, tuple[npt.ArrayLike, npt.ArrayLike]],
    rows: Sequence[str],
    path: Path,
    *,
    columns: Sequence[str] = (),
    score: str = "",
    unit: str = "",
    colours: Mapping[str, str] | None = None,
    title: str = "",
    note: str = "",
) -> None:
    """Draw each client's gain over local training, and, above the gains, the clients' scores under local training.

    Parameters
    ----------
    panels : mapping of str to (array_like, array_like)
        For each panel, the scores under local training ``(clients,)`` and the gains ``(rows, clients)``.
    rows : sequence of str
        Names of the methods.
    columns : sequence of str
        Names of the clients. If empty, the clients of each panel are sorted by their score.
    score, unit : str
        Name of the scores, and unit of the gains.
    """
    if not panels:
        return
    values = np.concatenate([style.numbers(matrix).ravel() for _, matrix in panels.values()])
    limit = float(np.nanpercentile(np.abs(values), _CLIPPED)) or 1.0
    norm = Normalize(-limit, limit)
    rows_height, bar_height = 0.17 * len(rows) + 0.1, 0.08
    height = rows_height + 2.1
    with style.canvas(path, height, title, note) as figure:
        # The colour bar has its own row, because a bar next to a low heat map would overlap its label.
        ratios = (0.9, rows_height, bar_height)
        grid = figure.subplots(
            3, len(panels), squeeze=False, sharey="row", height_ratios=ratios, gridspec_kw={"hspace": 0.02}
        )
        bar_axes = figure.add_subplot(grid[2, 0].get_gridspec()[2, :])
        for axes in grid[2]:
            axes.remove()
        for (top, axes), (name, (local, matrix)) in zip(grid[:2].T, panels.items(), strict=True):
            scores = style.numbers(local)
            order = np.arange(len(scores)) if columns else np.argsort(scores, kind="stable")
            top.plot(scores[order], "o", color=style.SOFT, markersize=3, markeredgewidth=0)
            top.set_title(name)
            top.set(xticks=[], xlim=(-0.5, len(scores) - 0.5))
            clients = "client" if columns else f"{len(scores)} clients, weakest first"
            panel = Panel(style.numbers(matrix)[:, order], "", clients, xticks=columns, diverging=True)
            image = _draw(axes, panel, norm)
            if columns:
                _write_values(axes, image, rows_height, (style.WIDTH - 1.8) / len(panels))
            else:
                axes.set_xticks([])
        grid[0, 0].set_ylabel(f"local\n{score}", fontsize=style.SMALL)
        style.name_rows(grid[1, 0], rows, colours or {})
        label = f"gain over local training{unit}"
        bar = figure.colorbar(
            image, cax=bar_axes, orientation="horizontal", extend="both", extendfrac=0.02, label=label
        )
        bar.outline.set_visible(False)


def similarity_order(counts: npt.ArrayLike) -> npt.NDArray[np.int64]:
    """Return the clients ``(M,)`` in an order that puts clients with similar class counts ``(M, C)`` side by side.

    This is the leaf order of average-linkage clustering of the class shares under the total variation distance.
    """
    table = style.numbers(counts)
    if len(table) < 3:
        return np.arange(len(table))
    # SciPy's clustering takes half a second to import, and only the figure of FedACS needs it.
    from scipy.cluster.hierarchy import leaves_list, linkage  # noqa: PLC0415

    shares = table / np.maximum(table.sum(axis=1, keepdims=True), 1)
    return np.asarray(leaves_list(linkage(shares, "average", "cityblock", optimal_ordering=True)), dtype=np.int64)


def _norm(panels: Sequence[Panel]) -> Normalize:
    """Return the common colour scale of panels."""
    values = np.concatenate([panel.values.ravel() for panel in panels])
    low, high = float(np.nanmin(values)), float(np.nanmax(values))
    if panels[0].diverging:
        limit = max(abs(low), abs(high)) or 1.0
        return Normalize(-limit, limit)
    low = 0.0 if panels[0].counts else low
    return Normalize(low, high if high > low else low + 1)


def _draw(axes: Axes, panel: Panel, norm: Normalize) -> AxesImage:
    """Draw the cells of one heat map, with its labels."""
    matrix = panel.values
    hidden = np.isnan(matrix) | (panel.counts & (matrix == 0))
    # Nearest: do not blend cells, even if there are more cells than pixels.
    image = axes.imshow(np.ma.array(matrix, mask=hidden), panel.colours, norm, aspect="auto", interpolation="nearest")
    axes.set_title(panel.title, parse_math=False)
    axes.set(xlabel=panel.xlabel, ylabel=panel.ylabel)
    axes.grid(visible=False)
    axes.spines[:].set(visible=True, color=style.FAINT)
    axes.tick_params(length=0)
    for axis, names in ((axes.xaxis, panel.xticks), (axes.yaxis, panel.yticks)):
        _name(axis, [name[:24] for name in names])
    if len(panel.xticks) <= _MOST_NAMED and sum(map(len, panel.xticks)) > 40:
        axes.tick_params(axis="x", rotation=45)
    return image


def _name(axis: Axis, texts: Sequence[str]) -> None:
    """Name the rows or columns, or only some of many."""
    if 0 < len(texts) <= _MOST_NAMED:
        axis.set_ticks(range(len(texts)), labels=texts, parse_math=False)
        return
    axis.set_major_locator(style.whole_numbers())
    if texts:
        # Matplotlib would typeset a class named $a$ as a formula.
        escaped = {index: text.replace("$", r"\$") for index, text in enumerate(texts)}
        axis.set_major_formatter(FuncFormatter(lambda x, _: escaped.get(round(x), "")))


def _write_values(axes: Axes, image: AxesImage, height: float, width: float) -> None:
    """Write the values into the cells of a heat map of ``height`` by ``width`` inches, if the text is legible."""
    array = image.get_array()
    assert isinstance(array, np.ma.MaskedArray)
    values, cells = array.compressed(), np.argwhere(~np.ma.getmaskarray(array))
    if array.size > 1000 or not len(values):
        return
    decimals = 0 if style.is_whole(values) else int(np.clip(2 - np.floor(np.log10(np.abs(values).max())), 0, 2))
    texts = [f"{value:.{decimals}f}" for value in values]
    # A digit is about 0.6 times as wide as the font size. An inch has 72 points.
    size = 72 * min(width / array.shape[1] / (0.75 * max(map(len, texts))), height / len(array) / 1.4)
    light = image.to_rgba(values)[:, :3] @ [0.299, 0.587, 0.114] > 0.5
    for (row, column), text, is_light in zip(cells, texts, light, strict=True):
        if size >= 7:  # smaller text is illegible
            ink = "black" if is_light else "white"
            axes.text(column, row, text, ha="center", va="center", color=ink, fontsize=min(size, style.TEXT))
