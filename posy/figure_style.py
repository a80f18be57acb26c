"""The style of all figures: sizes, fonts, and one colour for each method."""

import textwrap
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

INK, SOFT, AXIS, FAINT, MISSING = "#222222", "#595959", "#999999", "#d9d9d9", "#eeeeee"
METHOD_COLOURS = {
    "fedfew": "#0072B2",
    "cwfedavg": "#D55E00",
    "fedacs": "#009E73",
    "feddrm": "#B5629B",
    "ppfe": "#E69F00",
}
"""The colour of each main method in every figure. All other methods are grey."""
BASELINE = "#6E6E6E"
"""The colour of a single baseline."""
PALETTE = (*METHOD_COLOURS.values(), "#56B4E9", "#000000", "#8C8C8C")
"""The colour-blind-safe palette of Okabe and Ito, with grey instead of yellow, which is too light for lines, and with
a darker purple."""
MARKERS, DASHES = "osD^vPX*", ("-", (0, (5, 2)), (0, (1.5, 1.5)), (0, (6, 2, 1.5, 2)))
WIDTH = 8.0
"""Width of a figure in inches, which are 1200 pixels."""
TITLE, TEXT, SMALL = 12.5, 10.0, 8.5
"""Font sizes in points."""
REDUCED = "reduced run"
"""Note on figures whose runs are smaller than the paper's."""
MOST_TICKS = 8
"""Maximum number of values that are all labelled on an axis."""
PERCENT = FuncFormatter(lambda value, _: f"{100 * value:.4g} %")
_STYLE: Any = {
    "figure.dpi": 150,
    "figure.facecolor": "white",
    "figure.constrained_layout.use": True,
    "figure.constrained_layout.w_pad": 0.1,
    "figure.constrained_layout.h_pad": 0.08,
    "font.size": TEXT,
    "text.color": INK,
    "axes.titlesize": TEXT,
    "axes.titlelocation": "left",
    "axes.titlepad": 5,
    "axes.labelcolor": INK,
    "axes.labelsize": TEXT,
    "axes.edgecolor": AXIS,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": FAINT,
    "grid.linewidth": 0.7,
    "xtick.color": AXIS,
    "ytick.color": AXIS,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "xtick.labelsize": SMALL,
    "ytick.labelsize": SMALL,
    "legend.frameon": False,
    "legend.fontsize": SMALL,
}
_LINE = 1.3
"""Height of a line of text, in font sizes."""


def colours_of(methods: Mapping[str, str]) -> dict[str, str]:
    """Return the colour of each series, given the method of each series, in the order of the series.

    A main method has its own colour, and all other methods are grey. Several series of one method, or several grey
    series, become darker from the first to the last.
    """
    groups: dict[str, list[str]] = {}
    for name, method in methods.items():
        groups.setdefault(METHOD_COLOURS.get(method, ""), []).append(name)
    colours: dict[str, str] = {}
    for colour, names in groups.items():
        colours |= dict(zip(names, shades(colour or BASELINE, len(names)), strict=True))
    return {name: colours[name] for name in methods}


def method_colour(method: str) -> str:
    """Return the colour of a method whose figure highlights it: its own colour, or the first colour of the palette."""
    return METHOD_COLOURS.get(method, PALETTE[0])


def point_colours(method: str, point: str) -> dict[str, str]:
    """Return the colours of a run's served and local models: the model that scores the method has its colour."""
    return {name: method_colour(method) if name == point else BASELINE for name in ("served", "local")}


def shades(colour: str, number: int) -> list[str]:
    """Return shades of a colour, from light to dark, or the colour itself for one shade."""
    if number == 1:
        return [colour]
    return [mixed(colour, shift) for shift in np.linspace(0.45, -0.45, number)]


def text_colour(colour: str) -> str:
    """Return the lightest shade of a colour in which text has a contrast of 4.5 to white, as WCAG 2 requires."""
    shade = colour
    for shift in np.linspace(0, -1, 51):
        shade = mixed(colour, float(shift))
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in to_rgb(shade)]
        if np.dot([0.2126, 0.7152, 0.0722], linear) <= 1.05 / 4.5 - 0.05:
            break
    return shade


def line_style(index: int, colour: str, points: int) -> dict[str, Any]:
    """Return the style of line ``index``, with markers if it has few points. Only grey lines are dashed."""
    red, green, blue = to_rgb(colour)
    return {
        "color": colour,
        "linestyle": DASHES[index % len(DASHES)] if red == green == blue else "-",
        "linewidth": 1.8,
        "marker": MARKERS[index % len(MARKERS)] if points <= 40 else "",
        "markersize": 4.5,
        "markeredgewidth": 0,
    }


@contextmanager
def canvas(path: Path, height: float, title: str = "", note: str = "") -> Iterator[Figure]:
    """Yield a figure with a title and a note below the title, then write it to the path.

    The height in inches excludes the title and the note.
    """
    notes, titles = textwrap.wrap(note, 115), textwrap.wrap(title, 72)
    lines = [(text, TITLE, INK) for text in titles] + [(text, SMALL, SOFT) for text in notes]
    head = sum(_LINE * size for _, size, _ in lines) / 72 + 0.14 * bool(lines)
    with rc_context(_STYLE):
        figure = Figure(figsize=(WIDTH, height + head))
        engine = figure.get_layout_engine()
        assert isinstance(engine, ConstrainedLayoutEngine)
        engine.set(rect=(0, 0, 1, height / (height + head)))
        top = height + head - 0.1
        for text, size, colour in lines:
            figure.text(0.015, top / (height + head), text, fontsize=size, color=colour, va="top", parse_math=False)
            top -= _LINE * size / 72
        yield figure
        figure.savefig(path, format="png")


@contextmanager
def single(path: Path, title: str = "", note: str = "", height: float = 4.0) -> Iterator[Axes]:
    """Yield the only axes of a figure with a title and a note, then write the figure to the path."""
    with canvas(path, height, title, note) as figure:
        yield figure.subplots()


def label_ends(axes: Axes, ends: Sequence[tuple[float, float, str, str]], width: int = 22) -> None:
    """Label lines at their ends ``(x, y, text, colour)``, so that labels at the same x do not overlap.

    Labels are wrapped at ``width`` characters. Call this function after the y-limits are final.
    """
    height = axes.get_window_extent().height / axes.get_figure(root=True).dpi * 72  # type: ignore[union-attr]
    (low, high), is_log = axes.get_ylim(), axes.get_yscale() == "log"
    scale = np.log10 if is_log else np.asarray
    for x in dict.fromkeys(end[0] for end in ends):
        group = sorted((end for end in ends if end[0] == x), key=lambda end: end[1])
        heights = [height * float((scale(y) - scale(low)) / (scale(high) - scale(low))) for _, y, _, _ in group]
        texts = [textwrap.fill(text, width) for _, _, text, _ in group]
        needed = [_LINE * SMALL * (text.count("\n") + 1) for text in texts]
        for (_, y, _, colour), text, top, before in zip(group, texts, spread(heights, needed), heights, strict=True):
            axes.annotate(
                text, (x, y), (6, top - before), textcoords="offset points", fontsize=SMALL, va="center",
                color=text_colour(colour), annotation_clip=False, parse_math=False,
            )  # fmt: skip


def name_rows(axes: Axes, names: Sequence[str], colours: Mapping[str, str], bold: Collection[str] = ()) -> None:
    """Write the names of rows from top to bottom, main methods in their colours if the figure has other rows too."""
    main = {name for name in names if colours.get(name) in METHOD_COLOURS.values()}
    axes.set_yticks(range(len(names)), labels=list(names), parse_math=False)
    for label, name in zip(axes.get_yticklabels(), names, strict=True):
        label.set_color(text_colour(colours[name]) if name in main and len(main) < len(names) else INK)
        label.set_fontweight("bold" if name in bold else "normal")


def spread(heights: Sequence[float], needed: Sequence[float]) -> list[float]:
    """Move ascending centres of labels apart, by as little as their ``needed`` heights require."""
    groups: list[tuple[list[int], float]] = []  # labels that touch each other, and their common offset
    below = np.concatenate([[0.0], np.cumsum((np.asarray(needed[1:]) + np.asarray(needed[:-1])) / 2)])
    offsets = np.asarray(heights) - below[: len(heights)]
    for index, offset in enumerate(offsets):
        members, mean = [index], float(offset)
        while groups and groups[-1][1] > mean:
            members = groups.pop()[0] + members
            mean = float(offsets[members].mean())
        groups.append((members, mean))
    return [mean + float(below[index]) for members, mean in groups for index in members]


def whole_numbers(most: int = 10) -> MaxNLocator:
    """Return a locator that places ticks only at whole numbers."""
    return MaxNLocator(nbins=most, integer=True, min_n_ticks=1, steps=[1, 2, 5, 10])


def number_ticks(axis: Axis, values: Sequence[float], *, log: bool = False, most: int = 10) -> None:
    """Label an axis: each value if there are few and they are far enough apart, else whole numbers for counts.

    On a logarithmic axis, the labels are plain numbers.
    """
    ticks = sorted(set(values))
    gaps = np.diff(np.log(ticks) if log and ticks and ticks[0] > 0 else ticks)
    if log:
        low, high = axis.get_view_interval()
        axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high > 10 * low else (1, 1.5, 2, 3, 4, 5, 6, 8)))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_formatter(NullFormatter())
    if 1 < len(ticks) <= min(MOST_TICKS, most) and gaps.min() > 0.09 * gaps.sum():
        axis.set_ticks(ticks, labels=[f"{tick:g}" for tick in ticks])
        axis.set_ticks([], minor=True)
    elif not log and is_whole(values):
        axis.set_major_locator(whole_numbers(most))


def is_whole(values: npt.ArrayLike) -> bool:
    """Return whether all finite values are whole numbers, such as counts."""
    array = numbers(values)
    finite = array[np.isfinite(array)]
    return bool((finite == np.rint(finite)).all())


def numbers(values: npt.ArrayLike | Sequence[Any]) -> npt.NDArray[np.float64]:
    """Return values as floats, with NaN for None and infinity."""
    array = np.array(values, dtype=np.float64)
    array[~np.isfinite(array)] = np.nan
    return array


def rows_of(methods: Mapping[str, str]) -> dict[str, str]:
    """Return the colour of each row of a figure whose rows have names: its method's colour, or grey."""
    return {name: METHOD_COLOURS.get(method, BASELINE) for name, method in methods.items()}


def join(*notes: str) -> str:
    """Return the notes that are not empty as one line."""
    return " · ".join(filter(None, notes))


def mixed(colour: str, shift: float) -> str:
    """Return a colour mixed with white (``shift`` > 0) or with black (``shift`` < 0)."""
    target = 1.0 if shift > 0 else 0.0
    red, green, blue = ((1 - abs(shift)) * part + abs(shift) * target for part in to_rgb(colour))
    return to_hex((red, green, blue))
