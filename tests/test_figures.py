"""Figures of small, large and empty input, drawn without global state."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib
import numpy as np
import numpy.typing as npt
import pytest
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.image import imread

from posy import figure_style as style
from posy import figures
from posy.figures import Interval, Panel
from posy.metrics import METRICS
from posy.spread import Evaluation, spread

RNG = np.random.default_rng(0)
NAN = float("nan")
ACCURACY = METRICS["accuracy"]


def history(rounds: int, clients: int) -> list[Evaluation]:
    spreads = (spread(RNG.uniform(size=clients).tolist(), [1] * clients) for _ in range(rounds))
    return [Evaluation(number, values) for number, values in enumerate(spreads, start=1) if values is not None]


def points(rounds: int, clients: int) -> list[list[Evaluation]]:
    return [history(rounds, clients)] * 2


def values(count: int) -> list[float | None]:
    return [*RNG.uniform(size=count - 1).tolist(), None]


def counts(clients: int, classes: int) -> npt.NDArray[np.int64]:
    return RNG.integers(0, 500, (clients, classes)) * (RNG.random((clients, classes)) < 0.5)


QUICK = (
    *("accuracy, 1 round", "2 clients", "partition, names", "heat map with holes", "lines with gaps", "scatter"),
    *("dots", "ranking", "gains of 3 clients"),
)
"""Figures that CI draws, one of each kind."""
DRAWN: dict[str, Callable[[Path], None]] = {
    "accuracy, 1 round": lambda path: figures.over_rounds(points(1, 2), path, ACCURACY),
    "accuracy, 2000 rounds": lambda path: figures.over_rounds(points(2000, 5), path, ACCURACY),
    "accuracy, one point only": lambda path: figures.over_rounds([history(3, 2), []], path, ACCURACY),
    "loss": lambda path: figures.over_rounds(points(10, 500), path),
    "2 clients": lambda path: figures.client_scores([0.5, 0.6], [0.7, 0.6], path, ACCURACY),
    "500 clients, one unknown": lambda path: figures.client_scores(values(500), values(500), path, ACCURACY),
    "clients, served only": lambda path: figures.client_scores(values(20), [None] * 20, path, ACCURACY),
    "clients, local only": lambda path: figures.client_scores([None] * 20, values(20), path, ACCURACY),
    "scatters": lambda path: figures.scatters({"a": ([[0, 1]], [[1, 0]]), "b": ([1, 2, 3], [1, None, 2])}, path),
    "partition 2 x 2": lambda path: figures.partition([[3, 0], [0, 1]], path),
    "partition 500 x 200": lambda path: figures.partition(counts(500, 200), path),
    "partition 1 x 1": lambda path: figures.partition([[3]], path),
    "partition, empty clients": lambda path: figures.partition([[0] * 3, [1, 2, 3], [0] * 3], path),
    "partition, names": lambda path: figures.partition([[1, 2]], path, class_names=["$a$ $\\frac", "a" * 80]),
    "partition, many names": lambda path: figures.partition(
        counts(20, 100), path, class_names=[f"class {i}" for i in range(100)]
    ),
    "heat map with holes": lambda path: figures.heatmaps([Panel([[1, NAN], [NAN, 2]], label="l")], path, title="t"),
    "heat map of a constant": lambda path: figures.heatmaps([Panel(np.ones((3, 3)))], path),
    "heat map, names below": lambda path: figures.heatmaps(
        [Panel(RNG.random((10, 20)), xticks=[f"stage {stage}" for stage in range(1, 21)])], path
    ),
    "heat maps side by side": lambda path: figures.heatmaps([Panel(counts(20, 10)) for _ in range(3)], path),
    "heat maps over rounds": lambda path: figures.heatmaps(
        [Panel(RNG.random((100, 100)), f"round {r}") for r in range(7)] + [Panel([[NAN]])], path
    ),
    "one line of one point": lambda path: figures.lines({"a": [(1, 2.0)]}, path),
    "lines with gaps": lambda path: figures.lines({"a": [(1, 2.0), (20, None), (30, NAN), (400, 1.0)], "b": []}, path),
    "small multiples": lambda path: figures.small_multiples(
        {f"panel {i}": {"a": [(1, 2.0, 0.1), (2, 3.0, 0.2)], "b": [(1, 1.0, NAN)]} for i in range(5)},
        path,
        percent=True,
    ),
    "500 lines": lambda path: figures.lines(
        {str(i): [(r, r * i / 500) for r in range(20)] for i in range(500)}, path, percent=True
    ),
    "scatter": lambda path: figures.scatter(RNG.random((500, 100)), RNG.random((500, 100)), path),
    "dots": lambda path: figures.dots(
        {f"group {g}": {"FedFew": (0.5, 0.1), "a long name of a baseline": (0.4, 0.0)} for g in range(4)},
        path,
        marks={("group 1", "FedFew"): 0.7},
        title="a title with many words that does not fit into one line of the figure, whatever its font is",
    ),
    "ranking": lambda path: figures.ranking(
        {f"method {m}": Interval(m, m - 2, m + 3) for m in range(40)}, path, band=(0, 9), bold=["method 3"]
    ),
    "gains of 3 clients": lambda path: figures.gains(
        {"a": ([0.1, 0.9, 0.5], RNG.normal(size=(30, 3))), "b": ([0.3, 0.2, 0.1], np.full((30, 3), NAN))},
        [f"method {m}" for m in range(30)],
        path,
        columns=["x", "y", "z"],
    ),
    "gains of 300 clients": lambda path: figures.gains(
        {"a": (RNG.random(300), RNG.normal(size=(37, 300)))}, [f"method {m}" for m in range(37)], path
    ),
    "scatter of one point": lambda path: figures.scatter([0.5], [0.5], path),
}

EMPTY: dict[str, Callable[[Path], None]] = {
    "accuracy": lambda path: figures.over_rounds([[], []], path, ACCURACY),
    "clients": lambda path: figures.client_scores([None, NAN], [None, None], path, ACCURACY),
    "no clients": lambda path: figures.client_scores([], [], path, ACCURACY),
    "scatters": lambda path: figures.scatters({}, path),
    "partition": lambda path: figures.partition(np.empty((0, 10)), path),
    "heat map": lambda path: figures.heatmaps([Panel(np.array([[None, NAN]]))], path),
    "heat map without cells": lambda path: figures.heatmaps([Panel([[]])], path),
    "heat maps": lambda path: figures.heatmaps([], path),
    "lines": lambda path: figures.lines({"a": [], "b": [(1, None)]}, path),
    "small multiples": lambda path: figures.small_multiples({"a": {"b": []}}, path),
    "dots": lambda path: figures.dots({}, path),
    "ranking": lambda path: figures.ranking({}, path, band=(1, 2)),
    "gains": lambda path: figures.gains({}, ["a"], path),
    "scatter": lambda path: figures.scatter([NAN], [1.0], path),
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "draw",
    [d if name in QUICK else pytest.param(d, marks=pytest.mark.slow) for name, d in DRAWN.items()],
    ids=DRAWN.keys(),
)
def test_figure_is_written(draw: Callable[[Path], None], tmp_path: Path) -> None:
    path = tmp_path / "figure.png"
    draw(path)
    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    pixels = imread(path)
    height, width = pixels.shape[:2]
    assert 1200 <= width <= 2400
    assert 400 <= height <= 2400
    middle = pixels[height // 5 : -height // 4, width // 8 : -width // 8, :3].reshape(-1, 3)
    assert len(np.unique(middle, axis=0)) > 1, "nothing is drawn inside the axes"
    for edge in (pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]):
        assert (edge[:, :3] == 1).all(), "something is cut off at the edge"


@pytest.mark.parametrize("draw", EMPTY.values(), ids=EMPTY.keys())
def test_empty_figure_writes_no_file(draw: Callable[[Path], None], tmp_path: Path) -> None:
    draw(tmp_path / "figure.png")
    assert not list(tmp_path.iterdir())


def test_heat_map_places_each_value(tmp_path: Path) -> None:
    path = tmp_path / "figure.png"
    figures.heatmaps([Panel([[0, 1], [1, 0]])], path)
    pixels = imread(path)[..., :3]
    dark, light = (matplotlib.colormaps["viridis"](x)[:3] for x in (0.0, 1.0))
    pixel_counts = [
        [np.isclose(quarter, colour, atol=0.01).all(axis=-1).sum() for colour in (dark, light)]
        for half in np.array_split(pixels[:, :1000], 2)
        for quarter in np.array_split(half, 2, axis=1)
    ]
    assert [int(dark_count < light_count) for dark_count, light_count in pixel_counts] == [0, 1, 1, 0]


def test_figures_use_neither_pyplot_nor_global_state(tmp_path: Path) -> None:
    before = dict(matplotlib.rcParams)
    figures.over_rounds(points(3, 3), tmp_path / "figure.png")
    assert dict(matplotlib.rcParams) == before
    pyplot = sys.modules.get("matplotlib.pyplot")
    assert pyplot is None or not pyplot.get_fignums()


def test_similarity_order_groups_similar_clients() -> None:
    groups = np.array([0, 1, 2, 0, 1, 2, 0, 1, 2])
    table = np.array([[90, 5, 5], [5, 90, 5], [5, 5, 90]])[groups] * np.arange(1, 10)[:, None]
    order = figures.similarity_order(table)
    assert sorted(order) == list(range(9))
    assert np.count_nonzero(np.diff(groups[order])) == 2  # three contiguous groups


@pytest.mark.parametrize("clients", [0, 1, 2, 3, 500])
def test_similarity_order_is_a_permutation(clients: int) -> None:
    table = counts(clients, 10)
    table[: clients // 2] = 0
    assert sorted(figures.similarity_order(table)) == list(range(clients))


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """Collect the figures instead of writing them."""
    figures: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: figures.append(figure))
    return figures


@pytest.mark.parametrize(("rounds", "shared"), [((30, 120), True), ((30, 620), False)])
def test_panels_of_very_different_lengths_have_separate_axes(
    rounds: tuple[int, int], shared: bool, drawn: list[Figure], tmp_path: Path
) -> None:
    figures.small_multiples({str(n): {"a": [(1, 0.5, 0.0), (n, 0.6, 0.0)]} for n in rounds}, tmp_path / "figure.png")
    (figure,) = drawn
    first, second = (axes.get_xlim() for axes in figure.axes if axes.get_visible())
    assert (first == second) == shared and second[1] > rounds[1]


def test_points_are_hollow_and_constants_are_dashed_lines(drawn: list[Figure], tmp_path: Path) -> None:
    lines = {"FedFew": [(1, 0.5, 0.1), (2, 0.6, 0.1)], "paper": [(1, 0.7, 0.0), (2, 0.8, 0.0)]}
    figures.small_multiples(
        {"a": lines, "b": lines},
        tmp_path / "figure.png",
        points={"paper"},
        dashed={"a": {"FedAvg": 0.3}},
        y_log=True,
        columns=2,
    )
    (figure,) = drawn
    first, second = (axes for axes in figure.axes if axes.get_visible())
    styles = {line.get_label(): (line.get_linestyle(), [*line.get_ydata()]) for line in first.lines}
    assert styles == {"FedFew": ("-", [0.5, 0.6]), "paper": ("None", [0.7, 0.8]), "FedAvg": ("--", [0.3, 0.3])}
    assert [line.get_label() for line in second.lines] == ["FedFew", "paper"]
    assert first.lines[1].get_markerfacecolor() == "white" != first.lines[0].get_markerfacecolor()
    assert first.get_yscale() == "log" and first.get_xscale() == "linear"
    assert [text.get_text() for text in first.texts] == ["FedAvg", "FedFew"] and not figure.legends
    assert [*first.get_xticks()] == [1, 2]


def test_dots_show_intervals_and_the_papers_numbers(drawn: list[Figure], tmp_path: Path) -> None:
    groups = {"one": {"a": (0.5, 0.1), "b": (0.4, 0.0)}, "two": {"b": (0.2, 0.1)}}
    figures.dots(groups, tmp_path / "figure.png", marks={("two", "b"): 0.9}, colours={"a": "#0072B2"})
    left, right = drawn[0].axes
    assert [(*line.get_xdata(), *line.get_ydata()) for line in left.lines] == [(0.5, 0), (0.4, 1)]
    assert [(*line.get_xdata(), *line.get_ydata()) for line in right.lines] == [(0.2, 1), (0.9, 1)]
    assert right.lines[1].get_markerfacecolor() == "white"
    ((start, end),) = (segments.get_segments()[0][:, 0] for segments in left.collections)  # b has no interval
    assert (start, end) == pytest.approx((0.4, 0.6))
    assert [label.get_text() for label in left.get_yticklabels()] == ["a", "b"]


def test_panels_of_one_quantity_share_a_scale_and_differences_are_centred(drawn: list[Figure], tmp_path: Path) -> None:
    panels = [
        Panel([[0, 1]], label="norm"),
        Panel([[2, 8]], label="norm"),
        Panel([[-1, 3]], label="difference", diverging=True),
    ]
    figures.heatmaps(panels, tmp_path / "figure.png")
    images = [image for axes in drawn[0].axes for image in axes.images]
    assert [image.get_clim() for image in images] == [(0, 8), (0, 8), (-3, 3)]
    assert sum(axes.get_label() == "<colorbar>" for axes in drawn[0].axes) == 2


def test_gains_are_sorted_by_the_local_score(drawn: list[Figure], tmp_path: Path) -> None:
    figures.gains({"a": ([0.9, 0.1, 0.5], [[1, 2, 3], [-8, 0, NAN]])}, ["x", "y"], tmp_path / "figure.png")
    (image,) = (image for axes in drawn[0].axes for image in axes.images)
    assert image.get_array()[0].tolist() == [2, 3, 1]
    low, high = image.get_clim()
    assert -low == high < 8


@pytest.mark.parametrize("rows", [1, 3, 12])
@pytest.mark.parametrize("columns", [(), ("a", "b", "c")])
def test_the_colour_bar_of_gains_is_below_the_label(
    rows: int, columns: Sequence[str], drawn: list[Figure], tmp_path: Path
) -> None:
    gains = [[1.0, -2.0, 3.0]] * rows
    names = [f"method {row}" for row in range(rows)]
    figures.gains({"x": ([0.9, 0.1, 0.5], gains)}, names, tmp_path / "figure.png", columns=columns, unit=", points")
    drawn[0].draw_without_rendering()  # places the axes
    _, cells, bar = drawn[0].axes
    label, end = cells.xaxis.label.get_window_extent(), bar.get_window_extent()
    assert end.y1 < label.y0
    assert end.width > 0.8 * cells.get_window_extent().width and end.height > 5  # pixels


def test_each_main_method_has_one_colour_and_baselines_are_grey() -> None:
    names = {"FedAvg": "fedavg", "cwFedAvg": "cwfedavg", "Ditto": "ditto", "K = 1": "fedfew", "K = 3": "fedfew"}
    colours = style.colours_of(names)
    assert colours["cwFedAvg"] == style.METHOD_COLOURS["cwfedavg"]
    greys = {colours["FedAvg"], colours["Ditto"]}
    assert len(greys) == 2 and all(len({*to_rgb(grey)}) == 1 for grey in greys)
    assert colours["K = 1"] != colours["K = 3"]
    assert style.rows_of(names)["K = 1"] == style.rows_of(names)["K = 3"] == style.METHOD_COLOURS["fedfew"]


@pytest.mark.parametrize("colour", [*style.PALETTE, "#ffffff"])
def test_text_is_readable_on_white(colour: str) -> None:
    rgb = np.array(to_rgb(style.text_colour(colour)))
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    assert 1.05 / (np.dot([0.2126, 0.7152, 0.0722], linear) + 0.05) >= 4.5  # the contrast that WCAG 2 requires


def test_labels_move_apart_only_if_they_overlap() -> None:
    assert style.spread([0, 50, 100], [10, 10, 10]) == [0, 50, 100]
    assert style.spread([10, 12, 100], [10, 10, 10]) == pytest.approx([6, 16, 100])
    assert style.spread([0, 0, 0, 1], [4, 4, 8, 4]) == pytest.approx([-7.25, -3.25, 2.75, 8.75])
    assert style.spread([], []) == []
