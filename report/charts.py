"""Charts as inline SVG, 360 units wide, so that their text is readable on a phone.

Colours are classes of the page's style sheet. Series also differ by dashes, markers, and the letter at the end of the
line, so no chart depends on colour alone.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape

Band = Sequence[tuple[float, float, float]]
"""Points (x, y, half the height of the band) of a line, by x."""

COLOURS, DASHES = 7, ("", "6 3", "2 3", "8 3 2 3")
MARKERS = ("circle", "square", "diamond", "triangle")
SMALL, LARGE = (240, 140), (360, 200)
"""Width and height of a chart."""
_WIDTH, _LEFT, _RIGHT, _TOP, _BOTTOM = 360, 46, 62, 8, 20
UNITS = ((1e9, "G"), (1e6, "M"), (1e3, "k"))
"""Powers of ten and their unit prefixes."""
_MAX_MARKED, _LINE = 12, 12
"""Number of points up to which every point has a marker, and the height of a line of text."""


@dataclass(frozen=True)
class Series:
    """The appearance, in all charts, of a run or of runs that differ only in their seed."""

    name: str
    index: int

    @property
    def letter(self) -> str:
        """Its letter: A, B, …, Z, AA, AB and so on."""
        first, second = divmod(self.index, 26)
        return (chr(64 + first) if first else "") + chr(65 + second)

    @property
    def line(self) -> str:
        """SVG attributes of its lines."""
        dashes = DASHES[self.index % len(DASHES)]
        return f'class="line c{self.index % COLOURS}"' + (f' stroke-dasharray="{dashes}"' if dashes else "")

    def marker(self, x: float, y: float) -> str:
        """Return its marker at a point."""
        kind, r, colour = MARKERS[self.index % len(MARKERS)], 3, f'class="dot c{self.index % COLOURS}"'
        if kind == "circle":
            return f'<circle {colour} cx="{x:.1f}" cy="{y:.1f}" r="{r}"/>'
        corners = {
            "square": ((-r, -r), (r, -r), (r, r), (-r, r)),
            "diamond": ((0, -r - 1), (r + 1, 0), (0, r + 1), (-r - 1, 0)),
            "triangle": ((0, -r - 1), (r + 1, r), (-r - 1, r)),
        }[kind]
        points = " ".join(f"{x + dx:.1f},{y + dy:.1f}" for dx, dy in corners)
        return f'<polygon {colour} points="{points}"/>'

    def key(self) -> str:
        """Return its line with a marker, as a legend shows it."""
        line = f'<line {self.line} x1="1" x2="33" y1="7" y2="7"/>'
        return f'<svg class="key" viewBox="0 0 34 14" width="34" height="14">{line}{self.marker(17, 7)}</svg>'


@dataclass(frozen=True)
class Axis:
    """The range of the numbers along an axis."""

    low: float
    high: float
    percent: bool = False
    ticks: list[float] = field(default_factory=list)

    @classmethod
    def of(cls, values: Sequence[float], *, percent: bool = False, integers: bool = False, count: int = 5) -> "Axis":
        """Return an axis with round ticks that contains all values. With ``integers`` all ticks are integers."""
        low, high = min(values), max(values)
        if high - low < 1e-12 * max(abs(low), abs(high), 1e-300):
            room = 0.5 if integers else 0.05 if percent else abs(low) / 2 or 0.5
            low, high = low - room, high + room
        if percent:
            low, high = max(low, 0.0), min(high, 1.0)
        step = 10 ** math.floor(math.log10((high - low) / count))
        step *= next(factor for factor in (1, 2, 5, 10) if (high - low) / (factor * step) <= count)
        step = max(step, 1) if integers else step
        if not integers:  # extend the axis to its outermost ticks
            low, high = step * math.floor(low / step + 1e-9), step * math.ceil(high / step - 1e-9)
        first = math.ceil(low / step - 1e-9)
        ticks = [step * n for n in range(first, first + 2 * count) if step * n <= high + 1e-9 * step]
        return cls(low, high, percent, ticks)

    def position(self, value: float, start: float, end: float) -> float:
        """Return the position of a value on an axis from ``start`` to ``end``."""
        return start + (end - start) * (value - self.low) / (self.high - self.low)

    def text(self, value: float, digits: int = 4) -> str:
        """Return the label of a number at the axis."""
        if self.percent:
            return f"{100 * value:.{digits}g} %"
        unit, name = next(((u, n) for u, n in UNITS if abs(value) >= u), (1.0, ""))
        return f"{value / unit:.{digits}g}{name}"


def lines(
    series: Mapping[Series, Band],
    about: str,
    *,
    percent: bool = False,
    scale: Sequence[float] = (),
    size: tuple[int, int] = LARGE,
) -> str:
    """Return a chart of numbers over the rounds, with bands for spreads, or an empty string if there are no points.

    ``about`` describes the chart in words. The axis also contains the values of ``scale``.
    """
    drawn = {item: band for item, band in series.items() if band}
    if not drawn:
        return ""
    edges = [y + sign * half for band in drawn.values() for _, y, half in band for sign in (-1, 1)]
    x_axis = Axis.of([x for band in drawn.values() for x, _, _ in band], integers=True)
    y_axis = Axis.of([*edges, *scale], percent=percent)
    right, bottom = size[0] - _RIGHT, size[1] - _BOTTOM

    def at(x: float, y: float) -> tuple[float, float]:
        return x_axis.position(x, _LEFT + 4, right), y_axis.position(y, bottom, _TOP)

    parts = [_grid(x_axis, y_axis, right, bottom)]
    ends = []
    for item, band in drawn.items():
        points = [at(x, y) for x, y, _ in band]
        if any(half for _, _, half in band):
            above = [at(x, min(y + half, y_axis.high)) for x, y, half in band]
            below = [at(x, max(y - half, y_axis.low)) for x, y, half in band]
            parts.append(f'<polygon class="band c{item.index % COLOURS}" points="{_points([*above, *below[::-1]])}"/>')
        if len(points) > 1:
            parts.append(f'<polyline {item.line} points="{_points(points)}"/>')
        parts += [item.marker(*point) for point in (points if len(points) <= _MAX_MARKED else points[-1:])]
        ends.append((points[-1][1], f"{item.letter} {y_axis.text(band[-1][1], 3)}", item))
    for y, text, item in _spread(ends, _TOP + 4, bottom):
        parts.append(f'<text class="end c{item.index % COLOURS}" x="{right + 7}" y="{y + 4:.1f}">{text}</text>')
    return _svg(parts, about, *size)


def heat_map(rows: Sequence[Sequence[float]], columns: Sequence[str], names: Sequence[str], about: str) -> str:
    """Return a heat map ``(rows, columns)`` with the value of each cell as shade and number. ``names`` label the rows.

    Small cells have no numbers.
    """
    top = max((value for row in rows for value in row), default=0.0) or 1.0
    margin, width = 46, _WIDTH - 52
    wide, high = width / max(len(columns), 1), max(min(24.0, 260 / max(len(rows), 1)), 3.0)
    roomy = wide >= 22 and high >= 11
    parts = []
    for index, (name, row) in enumerate(zip(names, rows, strict=True)):
        y = index * high
        if high >= 9 or index % math.ceil(12 / high) == 0:
            parts.append(f'<text class="tick" x="{margin - 5}" y="{y + high / 2 + 4:.1f}">{escape(name[:8])}</text>')
        for column, value in enumerate(row):
            x, share = margin + column * wide, value / top
            box = f'x="{x:.1f}" y="{y:.1f}" width="{wide:.1f}" height="{high:.1f}"'
            parts.append(f'<rect class="cell" {box} fill-opacity="{max(share, 0):.2f}"/>')
            if roomy:
                shade = "dark" if share > 0.55 else "light"
                middle = f'x="{x + wide / 2:.1f}" y="{y + high / 2 + 4:.1f}"'
                parts.append(f'<text class="number {shade}" {middle}>{value:.3g}</text>')
    bottom = len(rows) * high
    every = math.ceil(len(columns) * 26 / width)
    for column in range(0, len(columns), every):
        x = margin + (column + 0.5) * wide
        parts.append(
            f'<text class="tick middle" x="{x:.1f}" y="{bottom + 14:.1f}">{escape(columns[column][:6])}</text>'
        )
    return _svg(parts, about, _WIDTH, bottom + 20)


def bars(values: Sequence[float], names: Sequence[str], about: str) -> str:
    """Return small bars that begin at 0, with their names below if there is room."""
    top, wide, high = max(values, default=0) or 1, (SMALL[0] - 2 * 8) / max(len(values), 1), 44
    parts = []
    for index, (value, name) in enumerate(zip(values, names, strict=True)):
        x, height = 8 + index * wide, high * value / top
        box = f'x="{x + 0.08 * wide:.1f}" y="{high - height:.1f}" width="{0.84 * wide:.1f}" height="{height:.1f}"'
        parts.append(f'<rect class="bar" {box}><title>{escape(name)}: {value:g}</title></rect>')
        if len(values) <= 20:
            parts.append(f'<text class="tick middle" x="{x + wide / 2:.1f}" y="{high + 14}">{escape(name[:3])}</text>')
    parts.append(f'<line class="axis" x1="8" x2="{SMALL[0] - 8}" y1="{high}" y2="{high}"/>')
    return _svg(parts, about, SMALL[0], high + 18)


def _grid(x_axis: Axis, y_axis: Axis, right: float, bottom: float) -> str:
    parts = []
    for tick in y_axis.ticks:
        y = y_axis.position(tick, bottom, _TOP)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick" x="{_LEFT - 5}" y="{y + 4:.1f}">{y_axis.text(tick)}</text>')
    for tick in x_axis.ticks:
        x = x_axis.position(tick, _LEFT + 4, right)
        parts.append(f'<text class="tick middle" x="{x:.1f}" y="{bottom + 14}">{x_axis.text(tick)}</text>')
    parts.append(f'<line class="axis" x1="{_LEFT}" x2="{right}" y1="{bottom}" y2="{bottom}"/>')
    parts.append(f'<text class="tick end-of-axis" x="{right + 6}" y="{bottom + 14}">round</text>')
    return "".join(parts)


def _spread(ends: Sequence[tuple[float, str, Series]], top: float, bottom: float) -> list[tuple[float, str, Series]]:
    """Return labels sorted by height, moved so that they do not overlap, as far as there is room."""
    placed: list[tuple[float, str, Series]] = []
    for y, text, item in sorted(ends, key=lambda end: end[0]):
        placed.append((max(y, placed[-1][0] + _LINE) if placed else max(y, top), text, item))
    lowest = bottom
    for index in range(len(placed) - 1, -1, -1):
        y, text, item = placed[index]
        placed[index] = (min(y, lowest), text, item)
        lowest = placed[index][0] - _LINE
    return placed


def _points(points: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)


def _svg(parts: Sequence[str], about: str, width: float, height: float) -> str:
    begin = (
        f'<svg class="chart" viewBox="0 0 {width} {height:.0f}" role="img" aria-label="{escape(about, quote=True)}">'
    )
    return f"{begin}{''.join(parts)}</svg>"
