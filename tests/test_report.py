"""The report page: it is complete and self-contained, and it shows the numbers of the runs."""

import itertools
import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from posy.commands.cli import main
from posy.report.charts import COLOURS, Series, bars, heat_map, lines
from posy.report.groups import compared, grouped
from posy.report.page import page
from posy.report.recorded import Recorded, point_of
from posy.server_app.app import run
from posy.server_app.in_process import InProcessGrid

VOID = {"meta", "img", "br"}


class Page(HTMLParser):
    """Checks that every opened tag is closed, and collects the references, words and drawings of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.references: list[str] = []
        self.words: list[str] = []
        self.drawings: list[str] = []
        self.ids: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)
        for name, value in attrs:
            if name in ("src", "href", "srcset", "data", "action"):
                self.references.append(value or "")
            if name == "id":
                self.ids.append(value or "")
            if name == "aria-label":
                self.drawings.append(value or "")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


@pytest.fixture
def recorded(make_config: Callable[..., dict[str, Any]]) -> Callable[..., Path]:
    """Return a function that runs three rounds and returns the directory of the run."""

    common = make_config("fedavg", save_models=False)

    def make(method: str, seed: int = 1, grid: InProcessGrid | None = None, **settings: Any) -> Path:
        changes = {name.replace("_", "-"): value for name, value in settings.items()}
        name = "-".join(map(str, (method, seed, *settings.values()))).replace("/", "_")
        config = {**common, **changes, "method": method, "seed": seed, "run-name": name}
        return run(grid, config).directory.path

    return make


@pytest.mark.usefixtures("pictures")
def test_a_page_is_self_contained_and_shows_the_numbers_of_its_runs(recorded: Callable[..., Path]) -> None:
    paths = [recorded("fedfew"), recorded("fedfew", 2), recorded("local"), recorded("local", 2)]
    text = page(paths)
    parsed = Page(text)
    for target in parsed.references:
        assert target.removeprefix("#") in parsed.ids or target.startswith("data:image/png;base64,")
    assert not re.search(r"https?:|@import|url\(|<script", text)
    assert len(parsed.ids) == len(set(parsed.ids))
    words = {word.strip() for word in parsed.words}
    for path in paths:
        assert path.name in words
        for point in ("served", "local"):
            last = Recorded.read(path).summary[point]["last"] or {}  # Local serves no model
            for statistic in {"mean", "std", "min", "tenth", "max", "weighted"} & last.keys():
                assert f"{100 * last[statistic]:.2f} %" in words
    assert {"Comparison", "Costs", "Clients"} <= words
    assert any("Every reply was used" in word for word in words)
    assert "Accuracy of client 3" not in parsed.drawings  # client 3 has no test samples
    assert {"Accuracy of client 0", "Samples of each class on client 0"} <= set(parsed.drawings)
    assert any(drawing.startswith("Effective clients") for drawing in parsed.drawings)
    assert any(target.startswith("data:") for target in parsed.references)  # the picture of FedFew
    assert len(text) < 500_000


def test_dropped_replies_are_listed_with_their_reasons(
    recorded: Callable[..., Path], failing: Callable[..., Callable[[int], InProcessGrid]]
) -> None:
    path = recorded("fedavg", grid=failing(("train", 1, 2), ("train", 2, 2), ("train", 3, 0))(4))
    dropped = Recorded.read(path).summary["dropped"]
    words = [word.strip() for word in Page(page([path])).words]
    assert set(dropped) <= set(words) and sum(dropped.values()) == 3
    at = words.index("client 2")
    assert words[at + 1] == "1 to 2"
    assert not any("Every reply" in word for word in words)


def test_run_names_stay_short(recorded: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "nets.py").write_text(
        "from torch import nn\n\n\ndef net(task):\n    size = 1\n    for n in task.input_shape:\n        size *= n\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(size, task.num_classes))\n",
        encoding="utf-8",
    )
    plain = recorded("fedavg")
    custom = recorded("fedavg", model=f"{tmp_path / 'nets.py'}:net")
    names = [group.series.name for group in grouped([Recorded.read(path) for path in (plain, custom)])]
    assert names == ["fedavg, model=auto", "fedavg, model=nets.py:net"]
    other = recorded("fedavg", lr=0.2, batch_size=7, momentum=0.5, weight_decay=0.01, local_epochs=3)
    names = [group.series.name for group in grouped([Recorded.read(path) for path in (plain, other)])]
    assert names == [f"fedavg, {plain.name}", f"fedavg, {other.name}"]


def test_runs_that_differ_only_in_seed_form_a_group(recorded: Callable[..., Path]) -> None:
    paths = [recorded("fedprox", 1), recorded("fedprox", 2), recorded("fedprox", 1, fedprox_mu=0.5), recorded("fedavg")]
    groups = grouped([Recorded.read(path) for path in paths])
    assert [group.series.name for group in groups] == ["fedprox, fedprox-mu=0.001", "fedprox, fedprox-mu=0.5", "fedavg"]
    assert [len(group.runs) for group in groups] == [2, 1, 1]
    first, second = (run.curve("served_accuracy") for run in groups[0].runs)
    assert [point[1] for point in groups[0].curve("served_accuracy")] == pytest.approx(
        [(a[1] + b[1]) / 2 for a, b in zip(first, second, strict=True)]
    )
    twice = grouped([Recorded.read(paths[0]), Recorded.read(paths[0])])
    assert len(twice) == 2  # two runs with the same seed are not a group over seeds


def test_a_diverged_run_ranks_last(recorded: Callable[..., Path]) -> None:
    paths = {(name, seed): recorded(name, seed) for name in ("local", "fedavg", "fedprox") for seed in (1, 2, 3)}

    def mean_ranks() -> dict[str, float]:
        _, text = compared(grouped([Recorded.read(path) for path in paths.values()]))
        assert "Mean ranks over 3 blocks" in text
        return {name: float(rank) for name, rank in re.findall(r"(local|fedavg|fedprox) (\d\.\d\d)", text)}

    before = mean_ranks()
    best = min(before, key=lambda name: before[name])
    file = paths[best, 1] / "summary.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "status": "diverged"}))
    assert mean_ranks()[best] > before[best]


def test_the_text_of_a_run_is_escaped(recorded: Callable[..., Path], tmp_path: Path) -> None:
    path = recorded("fedavg")
    moved = path.rename(path.with_name("<b>&amp;"))
    text = page([moved])
    assert "<b>&amp;<" not in text and "&lt;b&gt;&amp;amp;" in text
    Page(text)


def test_a_directory_without_a_run_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path), "-o", str(tmp_path / "page.html")]) == 2
    assert f"{tmp_path} is not the directory of a run" in capsys.readouterr().err
    assert not (tmp_path / "page.html").exists()


def test_the_command_writes_the_page(
    recorded: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = recorded("fedavg")
    twice = [str(path), f"{path.parent}/../{path.parent.name}/{path.name}"]
    assert main(["report", *twice, "-o", str(tmp_path / "page.html")]) == 0
    assert f"\n{tmp_path / 'page.html'}: 1 run, " in capsys.readouterr().out
    Page((tmp_path / "page.html").read_text(encoding="utf-8"))


def texts(drawing: str) -> list[tuple[float, float, str]]:
    """Return position and content of each text in a drawing."""
    matches = re.findall(r'<text x="([\d.]+)" y="([\d.]+)"[^>]*>([^<]*)', drawing)
    return [(float(x), float(y), text) for x, y, text in matches]


@pytest.mark.parametrize("values", [[0.0], [1.0, 1.0], [0.0, 1e-9], [-5.0, 3e7], [0.123, 0.124]])
def test_a_chart_contains_its_values_and_ticks(values: list[float]) -> None:
    drawing = lines({Series("run", 0): [(n, value, 0.0) for n, value in enumerate(values)]}, "values")
    ticks = [y for x, y, _ in texts(drawing) if x < 46]
    assert 2 <= len(ticks) <= 8
    markers = [float(y) for y in re.findall(r'<use href="#\w+" x="[\d.]+" y="([\d.]+)"', drawing)]
    assert len(markers) == len(values)
    assert min(ticks) - 5 <= min(markers) <= max(markers) <= max(ticks)


def test_percentages_stay_between_0_and_100() -> None:
    ticks = [text for x, _, text in texts(lines({Series("run", 0): [(1, 1.0, 0.2)]}, "a", percent=True)) if x < 46]
    assert ticks[-1] == "100 %"


def test_lines_are_distinguishable_without_colours() -> None:
    series = [Series(f"run {index}", index) for index in range(28)]
    assert [curve.letter for curve in series[-3:]] == ["Z", "AA", "AB"]
    looks = {re.sub(r"var\(--\w+\)|key-\d", "", curve.key()) for curve in series[:4]}
    assert len(looks) == 4
    drawing = lines({curve: [(1, 0.5, 0.0), (2, 0.5, 0.0)] for curve in series[:4]}, "accuracy", percent=True)
    heights = {text: y for _, y, text in texts(drawing) if text.endswith("50.0 %")}
    assert [text[0] for text in sorted(heights, key=lambda text: heights[text])] == ["A", "B", "C", "D"]
    assert min(b - a for a, b in itertools.pairwise(sorted(heights.values()))) >= 11


@pytest.mark.parametrize(
    "drawing",
    [
        lines({Series("run", index): [(n, n * 0.1, 0.05) for n in range(20)] for index in range(8)}, "a < b & c"),
        heat_map([[1.0, 0.0], [0.2, 0.5]], ["1", "2"], ["<b>", "c"], "a < b & c"),
        bars([3, 0], ["<b>", "c"], "a < b & c"),
    ],
)
def test_a_drawing_has_a_description_and_uses_the_pages_colours(drawing: str) -> None:
    parsed = Page(drawing)
    assert parsed.drawings == ["a < b & c"] and 'role="img"' in drawing
    assert not re.search("|".join(COLOURS) + r"|#[0-9a-f]{6}\b|<style|url\(|https?:", drawing)
    assert "<b>" not in drawing


@pytest.mark.filterwarnings("error")
def test_every_class_name_can_be_drawn() -> None:
    names = ["$a$ $\\frac", "\x01", "猫", "🐈", ""]
    assert "$a$" in Page(bars(range(5), names, "samples")).words
    assert "$a$ $\\fr" in Page(heat_map([[0.0] * 5] * 5, names, names, "map")).words


def test_bars_name_class_and_number_of_samples() -> None:
    assert {"cat: 3", "dog: 0"} <= set(Page(bars([3, 0], ["cat", "dog"], "samples")).words)


def test_older_runs_are_scored_at_their_methods_current_point() -> None:
    assert point_of({"method": "fedproto", "point": "local"}) == "served"
    assert point_of({"method": "fedproto"}) == "served"
    assert point_of({"method": "missing/method.py", "point": "local"}) == "local"
