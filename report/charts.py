"""Charts as inline SVG. They are at most 360 units wide, so that their text is readable on a phone.

Colours are variables of the page's style sheet. Series also differ in their dashes, their markers, and the letter at
the end of the line, so no chart depends on colour alone.
"""

import io
import math
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from xml.etree import ElementTree

import numpy as np
from markupsafe import Markup
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, to_rgba
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

Band = Sequence[tuple[float, float, float]]
"""Points of a line, sorted by x: x, y, and half the height of the band."""

INK, SOFT, RULE, PAPER = "#1c1c1c", "#5b5b5b", "#dcdcdc", "#ffffff"
COLOURS = ("#0072b2", "#c04a00", "#007a58", "#a8447c", "#966500", "#2a7fb0", INK)
VARIABLES = {colour: f"var(--c{index})" for index, colour in enumerate(COLOURS)}
VARIABLES |= {INK: "var(--ink)", SOFT: "var(--soft)", RULE: "var(--rule)", PAPER: "var(--paper)"}
"""Variables of the style sheet, keyed by colour. The style sheet also defines their values for dark mode."""
DASHES, MARKERS = ("-", (0, (3, 1.5)), (0, (1, 1.5)), (0, (4, 1.5, 1, 1.5))), "osD^"
SMALL, LARGE = (240, 140), (360, 200)
"""Width and height of small charts and of large charts."""
UNITS = ((1e9, "G"), (1e6, "M"), (1e3, "k"))
"""Powers of ten and their unit prefixes."""
_MAX_MARKED, _LINE = 12, 12
"""Maximum number of points in a series with a marker at each point, and the height of a line of text."""
_STYLE: Any = {
    "svg.fonttype": "none",
    "font.size": 11,
    "text.color": INK,
    "text.parse_math": False,
    "axes.edgecolor": SOFT,
    "axes.axisbelow": True,
    "axes.spines.left": False,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "grid.color": RULE,
    "grid.linewidth": 1,
    "lines.linewidth": 2,
    "lines.markersize": 6,
    "lines.markeredgewidth": 0,
    "lines.solid_capstyle": "butt",
    "xtick.labelcolor": SOFT,
    "ytick.labelcolor": SOFT,
    "xtick.bottom": False,
    "ytick.left": False,
}
_FADE = LinearSegmentedColormap.from_list("fade", [to_rgba(COLOURS[0], 0), to_rgba(COLOURS[0], 1)])
"""Colours of a heat map, from transparent to opaque."""
_TEXT = ("fill", "font-weight", "text-anchor")
"""Text properties that the SVG must contain, because the style sheet does not set them."""
_DECIMALS = re.compile(r"\d+\.\d{2,}")


@dataclass(frozen=True)
class Series:
    """The appearance, in all charts, of a run or of a group of runs that differ only in their seeds."""

    name: str
    index: int

    @property
    def letter(self) -> str:
        """Letter of the series: A, B, …, Z, AA, AB and so on."""
        first, second = divmod(self.index, 26)
        return (chr(64 + first) if first else "") + chr(65 + second)

    @property
    def style(self) -> dict[str, Any]:
        """Style of the series for matplotlib: colour, dashes and marker."""
        dashes, marker = DASHES[self.index % len(DASHES)], MARKERS[self.index % len(MARKERS)]
        return {"color": COLOURS[self.index % len(COLOURS)], "linestyle": dashes, "marker": marker, "clip_on": False}

    @rc_context(_STYLE)
    def key(self) -> Markup:
        """Return the legend key, a line with a marker, as an SVG symbol with the id ``key-INDEX``."""
        axes = _axes((34, 14))
        axes.set(xlim=(0, 34), ylim=(0, 14))
        axes.set_axis_off()
        axes.plot([1, 17, 33], [7, 7, 7], markevery=[1], **self.style)
        return _markup(axes, self.name, "symbol", {"id": f"key-{self.index}"})


@rc_context(_STYLE)
def lines(
    series: Mapping[Series, Band],
    about: str,
    *,
    percent: bool = False,
    scale: Sequence[float] = (),
    size: tuple[int, int] = LARGE,
) -> Markup:
    """Return a chart of numbers over the rounds, with bands for spreads, or an empty string if there are no points.

    ``about`` describes the chart in words, and must be unique on a page. The y-axis also covers the values in
    ``scale``.
    """
    points = {item: np.array(band, np.float64).T for item, band in series.items() if band}
    if not points:
        return Markup("")
    axes = _axes(size, (46, 62, 8, 20))
    rounds = np.concatenate([x for x, _, _ in points.values()])
    values = np.concatenate([[*scale], *(y + sign * half for _, y, half in points.values() for sign in (-1, 1))])
    start, end = (rounds.min(), rounds.max()) if np.ptp(rounds) else (rounds[0] - 0.5, rounds[0] + 0.5)
    margin = 4 * (end - start) / size[0]  # between the y-axis and the first point
    axes.set_xlim(start - margin, end)
    axes.set_xticks([tick for tick in _ticks(start, end, integer=True) if start <= tick <= end])
    ticks = _ticks(*_widened(values.min(), values.max(), percent))
    low, high = axes.set_ylim(ticks[0], ticks[-1])
    axes.set_yticks(ticks)
    axes.grid(axis="y", clip_on=False)
    axes.xaxis.set_major_formatter(_number)
    axes.yaxis.set_major_formatter(partial(_number, percent=percent))
    for item, (x, y, half) in points.items():
        if half.any():
            band = np.clip((y - half, y + half), low, high)
            axes.fill_between(x, *band, color=item.style["color"], alpha=0.16, linewidth=0, clip_on=False)
        axes.plot(x, y, markevery=1 if len(x) <= _MAX_MARKED else [-1], **item.style)
    ends = sorted([(float(y[-1]), item) for item, (_, y, _) in points.items()], key=lambda end: (end[0], -end[1].index))
    height = axes.bbox.height
    for top, (y, item) in zip(_spread([height * (y - low) / (high - low) for y, _ in ends], height), ends, strict=True):
        text = f"{item.letter} {_number(y, percent=percent, precision='#.3g')}"
        style = {"color": item.style["color"], "weight": "bold", "va": "center"}
        axes.annotate(text, (1, 0), (7, top), xycoords="axes fraction", textcoords="offset points", **style)
    axes.annotate("round", (1, 0), (16, -15.5), xycoords="axes fraction", textcoords="offset points", color=SOFT)
    return _markup(axes, about)


@rc_context(_STYLE)
def heat_map(rows: Sequence[Sequence[float]], columns: Sequence[str], names: Sequence[str], about: str) -> Markup:
    """Return a heat map that shows each cell's value as a shade and a number. ``names`` contains the row labels.

    Small cells have no numbers.
    """
    values = np.array(rows, np.float64)
    top = max(values.max(initial=0.0), 0.0) or 1.0
    wide, high = 308 / max(len(columns), 1), max(min(24.0, 260 / max(len(rows), 1)), 3.0)
    axes = _axes((LARGE[0], round(len(rows) * high + 24)), (46, 6, 4, 20))
    axes.spines[:].set_visible(False)
    axes.pcolormesh(values, cmap=_FADE, vmin=0, vmax=top, clip_on=False)
    axes.hlines(range(len(rows) + 1), 0, len(columns), RULE, linewidth=1, clip_on=False)
    axes.vlines(range(len(columns) + 1), 0, len(rows), RULE, linewidth=1, clip_on=False)
    axes.invert_yaxis()
    down = range(0, len(names), 1 if high >= 9 else math.ceil(12 / high))
    across = range(0, len(columns), math.ceil(26 / wide))
    axes.set_yticks([index + 0.5 for index in down], [_label(names[index], 8) for index in down])
    axes.set_xticks([index + 0.5 for index in across], [_label(columns[index], 6) for index in across])
    for (row, column), value in np.ndenumerate(values) if wide >= 22 and high >= 11 else ():
        ink = PAPER if value > 0.55 * top else INK
        axes.text(column + 0.5, row + 0.5, f"{value:.3g}", ha="center", va="center_baseline", color=ink)
    return _markup(axes, about)


@rc_context(_STYLE)
def bars(values: Sequence[float], names: Sequence[str], about: str) -> Markup:
    """Return a small bar chart that starts at 0, with the bars' names below them if there is room."""
    axes = _axes((SMALL[0], 62), (8, 8, 0, 18))
    rectangles = axes.bar(range(len(values)), values, 0.84, color=COLOURS[0], clip_on=False)
    for bar, value, name in zip(rectangles, values, names, strict=True):
        bar.set_gid(_label(f"{name}: {value:g}"))
    axes.set(xlim=(-0.5, len(values) - 0.5), ylim=(0, max(values, default=0) or 1), xticks=[], yticks=[])
    if len(names) <= 20:
        axes.set_xticks(range(len(names)), [_label(name, 3) for name in names])
    return _markup(axes, about)


def _axes(size: tuple[int, int], margins: tuple[int, int, int, int] = (0, 0, 0, 0)) -> Axes:
    """Return the axes of a new figure. Its size and margins (left, right, top, bottom) are in the page's units."""
    (width, height), (west, east, top, bottom) = size, margins
    figure = Figure(figsize=(width / 72, height / 72), dpi=72)
    figure.patch.set_visible(False)
    axes = figure.add_axes((west / width, bottom / height, 1 - (west + east) / width, 1 - (top + bottom) / height))
    axes.patch.set_visible(False)
    return axes


def _widened(low: float, high: float, percent: bool) -> tuple[float, float]:
    """Widen the range of an axis so that it is not empty; keep the range of percentages between 0 and 1."""
    if high - low <= 1e-12 * max(abs(low), abs(high)):
        room = abs(low) / 20 or 0.05
        low, high = low - room, high + room
    return (max(low, 0.0), min(high, 1.0)) if percent else (low, high)


def _ticks(low: float, high: float, *, integer: bool = False) -> list[float]:
    """Return ticks at round numbers, from at most ``low`` to at least ``high``."""
    locator = MaxNLocator(5, steps=[1, 2, 5, 10], integer=integer, min_n_ticks=1)
    return [float(tick) for tick in locator.tick_values(low, high)]


def _number(value: float, _: float | None = None, *, percent: bool = False, precision: str = ".4g") -> str:
    """Format a number as an axis label or a line label."""
    unit, name = (0.01, " %") if percent else next(((u, n) for u, n in UNITS if abs(value) >= u), (1.0, ""))
    return f"{value / unit:{precision}}".rstrip(".") + name


def _label(name: str, length: int | None = None) -> str:
    """Return the first characters of a name, without characters that XML does not allow."""
    return "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in name[:length])


def _spread(heights: Sequence[float], highest: float) -> list[float]:
    """Adjust the ascending heights of labels so that, if there is room, the labels do not overlap."""
    placed: list[float] = []
    for height in heights:
        placed.append(max(height, placed[-1] + _LINE) if placed else height)
    for index in reversed(range(len(placed))):
        placed[index] = min(placed[index], highest)
        highest = placed[index] - _LINE
    return placed


def _markup(axes: Axes, about: str, tag: str = "svg", root_attributes: Mapping[str, str] | None = None) -> Markup:
    """Return a figure as inline SVG in the page's colours, without matplotlib's style sheet and group ids.

    If a group's id was set explicitly, it becomes the group's title, which browsers show as a tooltip.
    """
    assert isinstance(axes.figure, Figure)
    file, titles = io.BytesIO(), {child.get_gid() for child in axes.get_children()} - {None}
    with rc_context({"svg.hashsalt": about}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # a font may lack a glyph here, but the browser has other fonts
        axes.figure.savefig(file, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    root = ElementTree.fromstring(file.getvalue())
    root.remove(root[0])  # this element is a style sheet, which would apply to the whole page
    for element in list(root.iter()):
        element.tag = element.tag.rpartition("}")[2]
        element.text, element.tail = (element.text or "").strip(), None
        attributes = {name.rpartition("}")[2]: value for name, value in element.attrib.items()}
        if element.tag == "g" and (title := attributes.pop("id", None)) in titles:
            element.insert(0, ElementTree.Element("title"))
            element[0].text = title
        style = dict(part.split(": ", 1) for part in attributes.pop("style", "").split("; ") if part)
        if element.tag == "text":
            style = {key: style[key] for key in _TEXT if key in style}
            attributes = {key: attributes[key] for key in "xy"}
        for key in attributes.keys() & {"d", "x", "y"}:
            attributes[key] = _DECIMALS.sub(lambda number: f"{float(number[0]):.1f}", " ".join(attributes[key].split()))
        if style:
            attributes["style"] = "; ".join(f"{key}: {VARIABLES.get(value, value)}" for key, value in style.items())
        element.attrib = attributes
    root.tag, size = tag, root.attrib["viewBox"]
    root.attrib = {"viewBox": size, **(root_attributes or {"class": "chart", "role": "img", "aria-label": about})}
    return Markup(ElementTree.tostring(root, encoding="unicode"))
