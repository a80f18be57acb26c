"""Pictures of images and networks."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from posy import figure_style as style

_POSITIVE, _NEGATIVE = style.PALETTE[0], style.PALETTE[1]


def images(pictures: Mapping[str, npt.ArrayLike], path: Path, *, title: str = "", note: str = "") -> None:
    """Draw images ``(H, W, 3)`` with their names above them, at most six in a row."""
    if not pictures:
        return
    down = math.ceil(len(pictures) / 6)
    lines = max(name.count("\n") for name in pictures)
    with style.canvas(path, 1.75 * down, title, note) as figure:
        panels = _bare(figure, len(pictures), math.ceil(len(pictures) / down))
        for axes, (name, picture) in zip(panels, pictures.items(), strict=True):
            axes.imshow(np.asarray(picture))
            axes.set_title(name + "\n" * (lines - name.count("\n")), fontsize=style.SMALL - 0.5, pad=3)


def branches(
    networks: Mapping[str, tuple[Sequence[str], int]], path: Path, *, title: str = "", names: tuple[str, str]
) -> None:
    """Draw a panel for each two-branch network, with the names of its shared and separate blocks."""
    colours = (style.AXIS, style.PALETTE[5], style.method_colour("feddrm"))
    with style.canvas(path, 3.4, title) as figure:
        grid = figure.subplots(1, len(networks), squeeze=False, sharey=True)
        for axes, (panel_title, (blocks, shared)) in zip(grid.flat, networks.items(), strict=True):
            axes.set_title(panel_title, fontsize=style.SMALL)
            axes.set_axis_off()
            for height, block in enumerate(blocks):
                boxes = [(0.0, 2.0, colours[0])]
                if height >= shared:
                    boxes = [(0.0, 0.95, colours[1]), (1.05, 0.95, colours[2])]
                for start, width, colour in boxes:
                    axes.barh(height, width, 0.8, start, color=colour, alpha=0.5)
                    axes.text(start + width / 2, height, block, ha="center", va="center", fontsize=style.SMALL)
            for centre, name in zip((0.475, 1.525), names, strict=True):
                axes.text(centre, len(blocks) - 0.45, name, ha="center", fontsize=style.SMALL)
            axes.set_ylim(top=len(blocks))
        kinds = zip(("shared", f"only the {names[0]} branch", f"only the {names[1]} branch"), colours, strict=True)
        handles = [Line2D([], [], color=colour, linewidth=7, alpha=0.5, label=kind) for kind, colour in kinds]
        figure.legend(handles=handles, loc="outside lower center", ncols=3)


def networks(
    panels: Mapping[str, Sequence[tuple[npt.ArrayLike, npt.ArrayLike]]],
    path: Path,
    *,
    title: str = "",
    columns: int = 4,
) -> None:
    """Draw a panel for each small network, with one line per weight; the width shows the weight's magnitude.

    Each layer is a pair of its weights ``(out, in)`` and a mask of the same shape. Weights in the mask are blue if
    positive, otherwise red. All other weights are grey. The outputs are numbered.
    """
    if not panels:
        return
    with style.canvas(path, 1.8 * math.ceil(len(panels) / columns) + 0.3, title) as figure:
        for axes, (name, layers) in zip(_bare(figure, len(panels), columns), panels.items(), strict=True):
            axes.set_title(name, fontsize=style.SMALL)
            _draw_network(axes, [(style.numbers(weights), np.asarray(marked, bool)) for weights, marked in layers])
        kinds = {"large, positive": _POSITIVE, "large, negative": _NEGATIVE, "smaller weights": style.FAINT}
        handles = [Line2D([], [], color=colour, linewidth=2.5) for colour in kinds.values()]
        figure.legend(handles, list(kinds), loc="outside lower center", ncols=len(kinds))


def _bare(figure: Figure, number: int, columns: int) -> list[Axes]:
    """Return ``number`` panels with their axes hidden, in rows of at most ``columns`` columns."""
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
            colour = (_POSITIVE if weight > 0 else _NEGATIVE) if marked[target, source] else style.FAINT
            width = 0.4 + (4.0 * abs(weight) / largest if largest > 0 else 0.0)
            ends = heights[layer][source], heights[layer + 1][target]
            order = 2 if marked[target, source] else 1
            axes.plot((layer, layer + 1), ends, color=colour, linewidth=width, zorder=order)
    for layer, ys in enumerate(heights):
        axes.scatter([layer] * len(ys), ys, s=110, facecolor="white", edgecolor=style.INK, linewidths=0.8, zorder=3)
    for number, height in enumerate(heights[-1]):
        text = axes.text(len(layers), height, str(number), ha="center", va="center", fontsize=style.SMALL)
        text.set_zorder(4)
    axes.margins(0.12)
