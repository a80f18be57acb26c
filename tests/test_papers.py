"""`posy paper`: files of tables and figures, verdicts on numbers and claims, and the page of a paper."""

import json
import re
import shutil
import subprocess
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from posy import figures
from posy.commands import archive
from posy.commands.cli import main
from posy.commands.papers import claims as claims_module
from posy.commands.papers import item as item_module
from posy.commands.papers import page as page_module
from posy.commands.papers.claims import (
    count_comparisons,
    count_outcomes,
    counts_in,
    coverage,
    describe,
    evidence,
    main_claims,
    outcome,
    read_box,
)
from posy.commands.papers.compare import Comparison
from posy.commands.papers.counts import FILE, count, counted
from posy.commands.papers.draw import FORMS
from posy.commands.papers.drift import head_gradient, simulate, squared_drift
from posy.commands.papers.item import SELDOM, Claim, item, items, papers
from posy.commands.papers.memory import stored_parameters
from posy.commands.papers.page import changed, page
from posy.commands.papers.record import in_percent, measured, partial_coverage, recorded_numbers
from posy.commands.papers.requirements import reductions
from posy.commands.papers.tables import without_negative_zero
from posy.commands.papers.verdict import (
    MIN_SEEDS,
    MIN_SPREAD_SEEDS,
    Number,
    Pair,
    PairTest,
    Verdict,
    agrees,
    distances,
    number,
    verdict,
)
from posy.commands.table import read_plan
from posy.settings import SettingsError
from posy.strategies.registry import parse_words
from posy.yaml12 import dump, read_yaml

ROOT = Path(__file__).parent.parent
EVERY = [(paper, paper_item.name) for paper in papers() for paper_item in items(paper)]
TABLE: dict[str, Any] = {
    "title": "Table 1: accuracy",
    "measure": "local last",
    "spread": "seeds",
    "settings": {"dataset": "digits", "num-clients": 4, "num-server-rounds": 4, "partition": "iid", "lr": 0.05},
    "variants": [{"name": "a", "settings": {"local-epochs": 1}}, {"name": "b", "settings": {"local-epochs": 2}}],
    "runs": [{"name": "FedAvg", "settings": {"method": "fedavg"}}, {"name": "Local", "settings": {"method": "local"}}],
    "seeds": [0, 1],
    "printed": {"FedAvg": ["50.0 ± 1.5", 60], "Local": [40, None], "Other": [45, 46]},
    "claims": [
        {"say": "two epochs are better than one", "higher": "b / FedAvg", "lower": "a / FedAvg"},
        {"say": "FedAvg is better", "higher": "FedAvg", "lower": "Local", "in": ["a"]},
        {"say": "it spreads less", "higher": ["b / FedAvg", "a / Local"], "lower": "a / FedAvg", "spread": True},
        {"say": "no difference", "higher": "b / FedAvg", "lower": "a / FedAvg", "within": 0, "why": "two passes"},
        {"say": "no large one", "higher": "b / FedAvg", "lower": "a / FedAvg", "within": 100, "why": "never shown"},
    ],
    "reasons": [{"rows": ["Local"], "say": "another network"}],
    "small": {
        "settings": {"num-server-rounds": 2, "max-samples": 300},
        "without": ["Local"],
        "variants": {"b": {"local-epochs": 3}},
    },
}


SMALL = "reduced, not comparable, ± over 2 seeds"
"""Source of the numbers of reduced runs with two seeds, in the header of a table with the paper's numbers."""


@pytest.fixture
def paper_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of a made-up paper, in a fresh working directory."""
    folder = tmp_path / "papers" / "mine"
    folder.mkdir(parents=True)
    (folder / "README.md").write_text("# Mine\n\nA paper.\n", encoding="utf-8")
    for module in (item_module, page_module, claims_module):
        monkeypatch.setattr(module, "PAPERS", tmp_path / "papers")
    monkeypatch.chdir(tmp_path)
    return folder


def written(folder: Path, name: str = "table1", **changes: Any) -> Path:
    path = folder / f"{name}.yaml"
    content = {key: value for key, value in {**TABLE, **changes}.items() if value is not None}
    path.write_text(dump(content), encoding="utf-8")
    return path


# -- numbers and claims ----------------------------------------------------------------------------------


def test_a_number_has_mean_and_deviation_over_seeds() -> None:
    assert number([1.0, 2.0, 3.0]) == Number(2.0, 1.0, 3)
    assert number([5.0]) == Number(5.0, None, 1)
    assert number([]) is None


@pytest.mark.parametrize(
    ("ours", "printed", "spread", "same"),
    [
        (Number(60.0, 0.45, 3), 61.5, 0.6, True),  # the difference of 1.5 is twice sqrt(0.2025 + 0.36)
        (Number(60.0, 0.45, 3), 61.6, 0.6, False),
        (Number(60.0, 3.0, 3), 62.0, 4.0, True),  # the limit is two points, however wide the spreads
        (Number(60.0, 3.0, 3), 62.1, 4.0, False),
        (Number(60.0, None, 1), 61.0, None, True),
        (Number(60.0, None, 1), 61.1, None, False),
        (Number(60.0, 0.0, 3), 60.9, 0.0, True),
    ],
)
def test_numbers_agree_within_two_standard_deviations_and_two_points(
    ours: Number, printed: float, spread: float | None, same: bool
) -> None:
    assert agrees(ours, printed, spread, 1.0) is same


def test_entropies_agree_within_a_hundredth() -> None:
    assert agrees(Number(1.09, None, 1), 1.099, None, 0.01)
    assert not agrees(Number(0.3, None, 1), 1.099, None, 0.01)
    assert not agrees(Number(1.07, 0.5, 2), 1.099, None, 0.01)


def test_distances_from_the_mean_over_the_seeds_by_hand() -> None:
    assert distances({0: 1.0, 1: 2.0, 2: 6.0}) == {0: 2.0, 1: 1.0, 2: 3.0}
    assert distances({0: 5.0}) == distances({}) == {}


def test_a_claim_about_spreads_needs_five_seeds() -> None:
    """A paired t-test on absolute deviations of three seeds cannot reach 5 %."""
    text = " ".join((ROOT / "docs/papers/reading.md").read_text(encoding="utf-8").split())
    assert MIN_SPREAD_SEEDS == 5 and "with at least five seeds" in text
    pair, deviations = Pair("b", "A"), {Pair("b", "A"): (3.0, 1.0)}
    few = verdict({pair: [2.0, 2.01, 2.02, 2.03]}, deviations=deviations)
    assert (few.word, few.too_few, outcome(few)) == ("undecided", 1, "undecided: too few seeds for a test of spread")
    enough = verdict({pair: [2.0, 2.01, 2.02, 2.03, 2.04]}, deviations=deviations)
    assert enough.word == "holds" and enough.tests[0].deviations == (3.0, 1.0)
    rng = np.random.default_rng(0)
    for values in rng.normal(size=(200, 3)) * rng.exponential(size=(200, 1)):
        above, below = distances(dict(enumerate(values))), distances(dict(enumerate(rng.normal(size=3))))
        assert stats.ttest_rel(list(above.values()), list(below.values())).pvalue > 0.05


def judge(
    rows: Mapping[str, Sequence[float]], by: float = 0.0, within: float | None = None, but: int = 0, column: str = ""
) -> Verdict:
    """Judge differences of a row minus other rows, keyed by the other rows, in one column."""
    return verdict({Pair("A", row, column): values for row, values in rows.items()}, by, within, but)


def decided(judged: Verdict) -> tuple[str, str, str]:
    """Return the outcome of a claim, and the lower row and column of the deciding comparison."""
    assert judged.deciding is not None
    return judged.word, judged.deciding.pair.lower, judged.deciding.pair.column


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("differences", "by", "word"),
    [
        ([], 0.0, "not tested"),
        ([1.0, 2.0, 3.0], 0.0, "undecided"),  # t = 2 / (1 / sqrt 3) = 3.46 < 4.30
        ([2.0, 2.5, 3.0], 0.0, "holds"),  # t = 2.5 / (0.5 / sqrt 3) = 8.66
        ([2.0, 2.5, 3.0], 5.0, "does not hold"),
        ([-2.0, -2.5, -3.0], 0.0, "does not hold"),
        ([1.0, 1.0, 1.0], 0.0, "holds"),
        ([0.3, 0.1 + 0.2, 0.3], 0.0, "holds"),  # equal except for rounding, about which a t-test warns
        ([0.0, 0.0, 0.0], 0.0, "undecided"),
    ],
)
def test_a_t_test_judges_a_claim(differences: list[float], by: float, word: str) -> None:
    judged = judge({"b": differences}, by)
    assert judged.word == word
    assert [test.summary.seeds for test in judged.tests] == [3] * bool(differences)


@pytest.mark.parametrize("differences", [[3.0], [1.0, 1.0], [1.0, 1.001]])
def test_too_few_seeds_are_not_tested(differences: list[float]) -> None:
    """Two seeds in several columns are still two independent runs of each row."""
    assert len(differences) < MIN_SEEDS == 3
    assert "needs at least three runs" in (ROOT / "docs/papers/reading.md").read_text(encoding="utf-8")
    judged = verdict({Pair("A", "b", column): differences for column in ("x", "y", "z")})
    assert (judged.word, judged.too_few, outcome(judged)) == ("undecided", 3, "undecided: too few seeds")
    assert all(test.p_value is None for test in judged.tests)
    tested = verdict({Pair("A", "b", "x"): differences, Pair("A", "c", "x"): [2.0, 2.5, 3.0]})
    assert (tested.word, tested.too_few, tested.counts) == ("undecided", 1, {"undecided": 1, "holds": 1})
    undecided = judge({"b": differences, "c": [1.0, 2.0, 3.0]})
    assert decided(undecided)[1] == "c" and outcome(undecided) == "undecided"  # a tested comparison decides


def test_claims_of_equivalence_are_tested() -> None:
    # The means are 0.1, 0.1, 1 and 1. The t statistic of the nearer bound is 0.1 / 0.015 = 6.9, 0.1 / 0.15 = 0.7,
    # 0.8 / 0.058 = 13.9 and 0.8 / 0.58 = 1.4. A mean below 0.2 needs at least 2.92, and a mean above it 4.30.
    assert judge({"": [0.075, 0.1, 0.125]}, within=0.2).word == "holds"
    assert judge({"": [-0.15, 0.1, 0.35]}, within=0.2).word == "undecided"
    assert judge({"": [-0.9, -1.0, -1.1]}, within=0.2).word == "does not hold"
    assert judge({"": [0.0, 1.0, 2.0]}, within=0.2).word == "undecided"
    assert judge({"": [0.1]}, within=0.2).word == "undecided"
    assert judge({"": [0.25, 0.25, 0.25]}, within=0.25).word == "undecided"
    far = judge({"a": [0.1] * 3, "b": [-0.3] * 3}, within=0.2)
    assert decided(far)[:2] == ("does not hold", "b")
    assert far.counts == {"holds": 1, "does not hold": 1}


def test_a_claim_against_several_rows_needs_each_of_them() -> None:
    above = {"a": [10.0, 11.0, 12.0], "b": [2.0, 2.5, 3.0]}
    judged = judge(above)
    assert decided(judged)[:2] == ("holds", "b") and judged.counts == {"holds": 2}
    judged = judge(above | {"c": [-2.0, -2.1, -2.2]})  # t = -36
    assert decided(judged)[:2] == ("does not hold", "c") and judged.counts == {"holds": 2, "does not hold": 1}
    assert decided(judge(above | {"c": [1.0, 2.0, 3.0]}))[:2] == ("undecided", "c")
    assert judge(above | {"c": []}) == judge(above)


def test_each_column_is_tested_separately() -> None:
    """Opposite outcomes in two columns do not cancel out, and the seeds of two columns are not pooled."""
    up, down = [2.0, 2.01, 2.02], [-2.0, -2.01, -2.02]
    judged = verdict({Pair("A", "b", "x"): up, Pair("A", "b", "y"): down})
    assert decided(judged) == ("does not hold", "b", "y")
    assert judged.counts == {"holds": 1, "does not hold": 1} and judged.columns == ["x", "y"]
    weak = [1.0, 2.0, 3.0]  # p = 0.074 in each column, and 0.003 for all six differences
    assert verdict({Pair("A", "b", column): weak for column in "xy"}).word == "undecided"


def test_a_claim_can_allow_one_exception_in_each_column() -> None:
    rows = {"a": [10.0, 11.0, 12.0], "b": [-2.0, -2.5, -3.0], "c": [2.0, 2.5, 3.0], "d": []}
    judged = judge(rows, but=1)
    assert decided(judged)[:2] == ("holds", "c") and judged.counts == {"holds": 2}
    assert [test.pair.lower for test in judged.excepted] == ["b"]
    assert decided(judge(rows, but=2))[1] == "a"
    assert judge(rows | {"c": [-1.0, -1.01, -1.02]}, but=1).word == "does not hold"
    assert judge({"b": rows["b"]}, but=1).word == "not tested"
    other = {Pair("A", "a", "y"): rows["b"], Pair("A", "b", "y"): rows["a"]}
    judged = verdict({Pair("A", row, "x"): values for row, values in rows.items()} | other, but=1)
    assert [test.pair[1:] for test in judged.excepted] == [("b", "x"), ("a", "y")]
    assert judged.word == "holds"


def test_claims_are_corrected_for_multiple_comparisons() -> None:
    once = {"a": [-2.0, -2.5, -3.0]}  # t = -8.66 with two degrees of freedom: p = 0.013
    (test,) = judge(once).tests
    assert (test.word, test.adjusted) == ("does not hold", False)
    several = {name: [10.0, 11.0, 12.0] for name in "bcd"}
    judged = judge(once | several)  # Holm's correction: 4 * 0.013 is above 0.05
    assert judged.word == "undecided" and judged.deciding is not None and judged.deciding.adjusted
    assert judged.deciding.p_value == pytest.approx(4 * (test.p_value or 0))
    assert judge(once | {"b": [-1.0]}).word == "does not hold"  # Posy does not test a single seed
    worse = {"e": [-2.0, -2.01, -2.02]}
    assert judge(once | worse).word == "does not hold"


# -- FedDRM's gradient drift -----------------------------------------------------------------------------


def test_head_gradient_by_hand() -> None:
    # Both classes have probability 1/2, so the residuals are (-1/2, 1/2) and (1/2, -1/2).
    gradient = head_gradient(np.zeros((2, 1)), np.array([[1.0], [3.0]]), np.array([0, 1]))
    assert gradient.tolist() == [[0.5], [-0.5]]


def test_gradient_drift_by_hand() -> None:
    # The mean gradient is (1/4, 3/4): G^2 = 1/4 * (9 + 9) / 16 + 3/4 * (1 + 1) / 16 = 3/8.
    assert squared_drift(np.eye(2), np.array([0.25, 0.75])) == (0.375, 1.0)
    assert squared_drift(np.ones((3, 2)), np.full(3, 1 / 3))[0] == pytest.approx(0)


def test_the_client_loss_drifts_more_than_the_class_loss() -> None:
    drifts = simulate(0, rounds=5)
    assert (drifts["client"].drift > drifts["class"].drift).all()
    assert (drifts["client"].relative_drift > drifts["class"].relative_drift).all()
    assert (drifts["client"].relative_drift <= 1).all()
    assert drifts["class"].drift.tolist() == simulate(0, rounds=5)["class"].drift.tolist()
    assert drifts["class"].drift[0] != simulate(1, rounds=1)["class"].drift[0]


# -- files -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"printed": {"FedAvg": [1]}}, "printed values of FedAvg: 1 for 2 columns"),
        ({"printed": {"FedAvg": ["much", 1]}}, "'much' of FedAvg"),
        ({"claims": [{"say": "x", "higher": "FedAvg"}]}, "claim has the keys say, higher"),
        ({"claims": [{"say": "x", "higher": "FedAvg", "lower": "FedProx"}]}, "'FedProx' in claims"),
        ({"claims": [{"say": "x", "higher": "FedAvg", "lower": "Local", "in": ["c"]}]}, "in = c in claims"),
        ({"small": {"rounds": 2}}, "rounds in small"),
        ({"form": "table"}, "form = 'table'"),
        ({"title": "accuracy"}, "title = 'accuracy' in .*name and a description"),
        ({"measure": "served lowest"}, "'served lowest' in .*not a measure"),
    ],
)
def test_invalid_paper_files_are_refused(paper_dir: Path, changes: dict[str, Any], message: str) -> None:
    written(paper_dir, **changes)
    with pytest.raises(SettingsError, match=message):
        _read_all("mine")


def _read_all(paper: str) -> None:
    """Read all files of a paper."""
    for paper_item in items(paper):
        assert all(in_percent(measure) for measure in paper_item.measures)
        assert paper_item.printed is not None
        assert paper_item.claims is not None
        comparison = Comparison(paper_item)
        assert comparison.entries is not None


def test_unknown_names_are_refused_with_suggestions(paper_dir: Path) -> None:
    written(paper_dir)
    with pytest.raises(SettingsError, match="did you mean mine"):
        items("mime")
    with pytest.raises(SettingsError, match=r"no 'table2'.* table1"):
        item("mine", "table2")


def test_tables_come_before_figures_in_the_order_of_their_numbers(paper_dir: Path) -> None:
    for name in ("figure2", "table10", "table2", "table-b6", "figure10"):
        written(paper_dir, name)
    assert [paper_item.name for paper_item in items("mine")] == ["table2", "table10", "table-b6", "figure2", "figure10"]


def test_scale_small_changes_settings_and_omits_rows(paper_dir: Path) -> None:
    written(paper_dir)
    table = item("mine", "table1")
    small, full = table.plan("small"), table.plan("full")
    assert [{cell.config["checkpoint-every"] for cell in plan.cells} for plan in (small, full)] == [{0}, {SELDOM}]
    assert {cell.row for cell in small.cells} == {"FedAvg"}
    assert {cell.config["num-server-rounds"] for cell in small.cells} == {2}
    assert {cell.row for cell in full.cells} == {"FedAvg", "Local"}
    assert {cell.config["num-server-rounds"] for cell in full.cells} == {4}
    assert small.output != full.output


def test_at_scale_small_a_variants_settings_take_precedence(paper_dir: Path) -> None:
    variants = {"b": {"max-samples": 500}}
    written(paper_dir, small={"settings": {"num-server-rounds": 2, "max-samples": 300}, "variants": variants})
    plan = item("mine", "table1").plan("small")
    assert {(cell.variant, cell.config["max-samples"]) for cell in plan.cells} == {("a", 300), ("b", 500)}
    assert {cell.config["num-server-rounds"] for cell in plan.cells} == {2}
    overridden = item("mine", "table1").plan("small", {"max-samples": 400})
    assert {cell.config["max-samples"] for cell in overridden.cells} == {400}


# -- from runs to a page ---------------------------------------------------------------------------------


def test_extra_experiments_run_only_at_full_scale(paper_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changes: dict[str, Any] = dict.fromkeys(("printed", "claims", "reasons", "small", "variants"))
    written(paper_dir, "long-run", title="Long run: more rounds", **changes, seeds=[0])
    assert main(["paper", "mine", "all", "--scale", "small"]) == 0
    assert "(--scale full): long-run\n" in capsys.readouterr().out
    assert not Path("papers/mine/results").exists()
    assert main(["paper", "mine", "long-run", "--scale", "small"]) == 2
    error = capsys.readouterr().err
    assert "long-run" in error and "use --scale full" in error
    assert main(["paper", "mine", "long-run", "--scale", "full"]) == 0
    assert "2 of 2 runs are available" in capsys.readouterr().out
    assert "Command: `posy paper mine long-run --scale full`. Metrics" in Path("docs/papers/mine.md").read_text(
        encoding="utf-8"
    )


def test_extra_seeds_are_run_and_archived(paper_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written(paper_dir)

    def run(*options: str) -> tuple[str, set[int], str]:
        assert main(["paper", "mine", "table1", "-j", "1", *options]) == 0
        comparison = Comparison(item("mine", "table1"))
        values_a, values_b = (comparison.values(variant, "FedAvg", "local last") for variant in ("a", "b"))
        lines = archive.read(Path("papers/mine/results/table1-small")).values()
        assert {line["config"]["settings"]["seed"] for line in lines} == {*values_a} == {*values_b}
        return capsys.readouterr().out, {*values_a}, Path("docs/papers/mine.md").read_text(encoding="utf-8")

    printed, seeds, text = run("--seeds", "1")
    assert "2 of 2 runs are available" in printed and seeds == {0}
    assert (
        "Command: `posy paper mine table1 --scale small`." in text
        and ", too few seeds for a test; digits; 1 seed)" in text
    )
    printed, seeds, text = run("--seeds", "3")
    assert "6 of 6 runs are available" in printed and printed.count("/ seed") == 4 and seeds == {0, 1, 2}
    assert (
        "Command: `posy paper mine table1 --scale small --seeds 3`." in text
        and "; 3 seeds)" in text
        and ", p\u00a0=\u00a00." in text
    )
    comparison = Comparison(item("mine", "table1"))
    (spread,) = [verdict for claim, verdict in comparison.verdicts if claim.spread]
    deviations = [
        np.mean(np.abs(values - np.mean(values)))
        for variant in "ba"
        if (values := [*comparison.values(variant, "FedAvg", "local last").values()])
    ]
    assert spread.deciding is not None and spread.deciding.deviations is not None
    assert spread.deciding.summary.mean == pytest.approx(deviations[0] - deviations[1])
    assert spread.deciding.summary.seeds == 3
    stds = [np.std([*comparison.values(variant, "FedAvg", "local last").values()], ddof=1) for variant in "ba"]
    assert spread.deciding.deviations == pytest.approx(stds)
    assert (
        f"(standard deviations of {stds[0]:.2f} (b / FedAvg) and {stds[1]:.2f} points (a / FedAvg), "
        "too few seeds for a test of spread; digits; 3 seeds)" in text
    )
    printed, seeds, again = run()  # the table's seeds, which have already run
    assert "4 of 4 runs are available" in printed and "/ seed" not in printed and seeds == {0, 1, 2}
    assert again == text
    for path in Path("papers/mine/results/table1-small").iterdir():
        if path.is_dir():
            shutil.rmtree(path)
    assert run()[1:] == (seeds, text)  # from the archive, as in a clone


@pytest.mark.parametrize("words", [[], ["mine"]])
def test_seeds_without_a_table_are_an_error(
    words: list[str], paper_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["paper", *words, "--seeds", "5"]) == 2
    assert "--seeds 5 requires the name of a table" in capsys.readouterr().err
    assert not Path("docs").exists()


def test_archived_runs_survive_a_renamed_column(paper_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changes: dict[str, Any] = dict.fromkeys(("printed", "claims", "reasons", "small"))
    settings = {"local-epochs": 3}
    written(
        paper_dir, **changes, seeds=[0], variants=[{"name": "a", "settings": {}}, {"name": "b", "settings": settings}]
    )
    assert main(["paper", "mine", "table1", "--scale", "full", "-j", "1"]) == 0
    before = archive.read(Path("papers/mine/results/table1-full"))
    written(
        paper_dir, **changes, seeds=[0], variants=[{"name": "b", "settings": {}}, {"name": "c", "settings": settings}]
    )
    capsys.readouterr()
    assert main(["paper", "mine", "table1", "--scale", "full", "-j", "1"]) == 0
    assert "/ seed" not in capsys.readouterr().out  # nothing was run again
    after = archive.read(Path("papers/mine/results/table1-full"))
    names = {"a": "b", "b": "c"}
    for name, line in before.items():
        assert after[names[name[0]] + name[1:]]["summary"] == line["summary"]
    assert len(after) == len(before)


def test_a_table_is_run_judged_and_shown_on_its_page(paper_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written(paper_dir)
    # The figure reuses the runs of the table.
    written(
        paper_dir,
        "figure1",
        title="Figure 1: rounds",
        printed=None,
        claims=None,
        form={"kind": "rounds", "of": "train_loss"},
    )
    assert main(["paper", "mine", "table1", "--scale", "small", "-j", "2"]) == 0
    printed = capsys.readouterr().out
    assert "4 of 4 runs are available" in printed
    results = Path("papers/mine/results")
    assert (results / "table1-small/cells.jsonl.gz").is_file()

    assert main(["paper", "mine", "all", "-j", "1"]) == 0
    printed = capsys.readouterr().out
    assert "[" not in printed  # nothing was run again
    assert not (results / "figure1-small/cells.jsonl.gz").exists()  # it reuses the table's runs
    text = Path("docs/papers/mine.md").read_text(encoding="utf-8")
    assert Path("docs/papers/mine-figure1.png").is_file()
    comparison = Comparison(item("mine", "table1"))
    states = {(entry.variant, entry.row): entry.state for entry in comparison.entries}
    assert states == {
        ("a", "FedAvg"): "not comparable",
        ("b", "FedAvg"): "not comparable",
        ("a", "Local"): "not run",
        ("a", "Other"): "not run",
        ("b", "Other"): "not run",
    }
    values = comparison.values("a", "FedAvg", "local last")
    summaries = [json.loads((results / f"table1-small/a/FedAvg/seed-{s}/summary.json").read_text()) for s in (0, 1)]
    assert values == {s: 100 * summaries[s]["local"]["last"]["mean"] for s in (0, 1)}
    ours = number(list(values.values()))
    assert ours is not None
    other = comparison.values("b", "FedAvg", "local last")
    theirs = number(list(other.values()))
    assert theirs is not None
    columns = [f"{name}<br>{source}" for name in "ab" for source in ("paper, ± over seeds", SMALL)]
    columns[2] = "b<br>paper"  # without a spread
    assert f"| {' | '.join(['', *columns])} |" in text
    cells = ["50.0 ± 1.5", f"{ours.mean:.2f} ± {ours.std:.2f}", "60", f"{theirs.mean:.2f} ± {theirs.std:.2f}"]
    assert f"| FedAvg | {' | '.join(cells)} |" in text
    assert "| Local |" not in text and "| Other |" not in text  # a row without finished runs
    needed = "run `posy paper mine table1 --scale full`. 2 runs. No run of this size has been timed."
    assert f"\n- a / Local: the data is available: {needed}\n" in text
    assert "\n- a / Other; b / Other: Posy does not implement Other.\n" in text
    assert "num-server-rounds 2 (paper: 4)" in text and "Reduced: 2 instead of 4 rounds, 300 samples" in text
    assert "b: local-epochs 3" in " ".join(text.split())
    assert [c.config["local-epochs"] for c in item("mine", "table1").plan("small").cells] == [1, 1, 3, 3]
    (epochs, epochs_verdict), (unknown, unknown_verdict), (_, spread), *_ = comparison.verdicts
    assert f"- **{outcome(epochs_verdict)}**: {epochs.say} (b / FedAvg − a / FedAvg: " in text
    assert f"- Claims that need these runs: {unknown.say}.\n" in text
    assert epochs_verdict.deciding is not None
    summary = epochs_verdict.deciding.summary
    difference = f"{summary.mean:+.2f} ± {summary.std:.2f} points, too few seeds for a test; digits; 2 seeds"
    assert f": no difference (b / FedAvg − a / FedAvg: {difference}). Two passes.\n" in text
    assert summary.mean == pytest.approx(sum(other[s] - values[s] for s in (0, 1)) / 2)
    assert epochs.higher == ("b / FedAvg",)
    assert unknown_verdict.word == "not tested"
    assert outcome(spread) == "undecided: too few seeds for a test of spread (reduced)"


def test_only_runs_with_the_papers_size_and_settings_are_compared_with_its_numbers(paper_dir: Path) -> None:
    rows = TABLE["runs"][:1]
    common: dict[str, Any] = {"claims": None, "runs": rows, "seeds": [0]}
    written(paper_dir, **common, reasons=None, printed={"FedAvg": [0, 0]})
    for scale in ("small", "full"):
        assert main(["paper", "mine", "table1", "--scale", scale, "-j", "1"]) == 0
    comparison = Comparison(item("mine", "table1"))
    small, full = (comparison.values("a", "FedAvg", "local last", scale)[0] for scale in ("small", "full"))
    assert "≠" in Path("docs/papers/mine.md").read_text(encoding="utf-8")
    changes = {
        "printed": {"FedAvg": [f"{full:.2f} ± 1", 0]},
        "reasons": [{"variants": ["b"], "comparable": False, "say": "half"}],
    }
    written(paper_dir, **common, **changes)
    assert main(["paper", "mine"]) == 0
    states = {entry.variant: (entry.state, entry.why) for entry in Comparison(item("mine", "table1")).entries}
    assert states == {"a": ("reproduced", ""), "b": ("not comparable", "half")}
    text = Path("docs/papers/mine.md").read_text(encoding="utf-8")
    assert f"| FedAvg | {full:.2f} ± 1 | {small:.2f} | {full:.2f} ✓ | 0 | " in text and "≠" not in text
    header = next(line for line in text.splitlines() if "<br>" in line).split(" | ")[1:]
    assert header[2:] == [
        "a<br>full size, 1 seed",
        "b<br>paper",
        "b<br>reduced, not comparable, 1 seed",
        "b<br>full size, not comparable, 1 seed |",
    ]
    assert "- Not comparable: b. Half.\n" in text
    overridden = Comparison(item("mine", "table1"), {"lr": 0.01}, Path("papers/mine/results"))
    assert not any(entry.numbers for entry in overridden.entries)  # these runs have another learning rate


def test_a_spread_needs_a_meaning(paper_dir: Path) -> None:
    written(paper_dir, spread=None)
    with pytest.raises(SettingsError, match=r"50\.0 ± 1\.5 of FedAvg has a spread; name its repetitions in `spread:`"):
        _ = item("mine", "table1").printed


def test_main_claims_come_first_with_their_verdicts(paper_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    also = {"say": "The same", "in": "table1", "claim": "two epochs are better than one"}
    claims: list[dict[str, Any]] = [
        {"say": "More passes help", "in": "table1", "claim": "two epochs are better than one"},
        {"say": "Passes hardly matter", "in": "table1", "claim": "no large one", "also": [also], "note": "A note."},
        {"say": "Federation helps", "in": "table1", "claim": "FedAvg is better"},
    ]
    (paper_dir / "claims.yaml").write_text(dump({"claims": claims}), encoding="utf-8")
    written(paper_dir)
    assert main(["paper", "mine", "table1", "-j", "1", "--seeds", "3"]) == 0
    text = Path("docs/papers/mine.md").read_text(encoding="utf-8")
    rows = read_box(text)
    judged = {claim.say: verdict for claim, verdict in Comparison(item("mine", "table1")).verdicts}
    more, little = (judged[claim["claim"]].deciding for claim in claims[:2])
    assert more is not None and more.p_value is not None and little is not None and little.p_value is not None
    word = judged["two epochs are better than one"].word
    difference = f"b / FedAvg − a / FedAvg: {more.summary.mean:+.2f} ± {more.summary.std:.2f} points, "
    p_value = f"p = {little.p_value:.3f}" if little.p_value > 0.001 else "p < 0.001"
    within = f"equivalence test within ±100 points: {p_value}".replace(p_value, p_value.replace(" ", "\u00a0"))
    other = f"The same: {judged['two epochs are better than one'].word}, {more.summary.mean:+.2f}"
    runs = "[Table 1](#table-1): digits; 3 seeds<br>also reduced: local epochs 3 instead of 2 (b)"
    assert "\n\nClaims marked *(reduced)*: 2 instead of 4 rounds, 300 samples.\n\n" in text
    assert rows == [
        [
            "More passes help",
            f"**{word}** (reduced)",
            f"{difference}p = {more.p_value:.3f}".replace("p = ", "p\u00a0=\u00a0"),
            runs,
        ],
        [
            "Passes hardly matter",
            "**holds** (reduced)",
            f"{difference}{within}<br>{other.removesuffix(', ')}<br>A note.",
            runs,
        ],
        ["Federation helps", "**not tested**", "", "[Table 1](#table-1), needs digits"],
    ]
    assert little.p_value < 0.05 and "never shown" not in text  # the page omits the reason of a claim that holds
    first = (
        f"**Main claim: {word} in reduced runs.** {difference}p = {more.p_value:.3f} (50\u00a0% of the paper's rounds, "
    )
    summary_text = f"{first}3 seeds). **3 main claims.** {counts_in(rows)}."
    assert " ".join(text.split("\n\n")[3].split()) == " ".join(summary_text.split())
    capsys.readouterr()
    assert main(["paper"]) == 0
    (summary,) = [line.split() for line in capsys.readouterr().out.splitlines() if line.split()[:2] == ["mine", "3"]]
    assert summary[2:6] == ["1", "0", "1", "1"]  # holds, does not hold, undecided, not tested


@pytest.mark.parametrize("paper", papers())
def test_verdict_boxes_are_short(paper: str) -> None:
    for claim, _, shown, _ in read_box((ROOT / f"docs/papers/{paper}.md").read_text(encoding="utf-8")):
        words = re.sub(r"\]\([^)]*\)|<br>", " ", shown).split()
        words = [word for word in words if re.search(r"\w", word)]
        assert len(words) <= 60, f"{claim}: {len(words)} words"


def test_verdicts_are_counted_in_words() -> None:
    cells = [
        "**holds** (reduced)",
        "**undecided**: too few seeds<br>reduced runs: holds",
        "**does not hold** (reduced)",
    ]
    cells += ["**does not hold** (reduced)", "**holds** (reduced)", "**holds**", "**not tested**"]
    assert counts_in([["", cell] for cell in cells]) == (
        "1 holds and 1 is undecided at the paper's size. In reduced runs, 2 hold and 2 do not hold. 1 is not tested"
    )
    assert counts_in([["", "**undecided** (reduced)"]] * 3) == "In reduced runs, 3 are undecided"
    verdicts = [Verdict("holds", scale="small")] * 2 + [Verdict("undecided", scale="full"), Verdict("not tested")]
    assert count_outcomes(verdicts) == "2 hold (reduced), 1 undecided, 1 not tested"


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"say": "x", "in": "table1"}, "a main claim has the keys say, in, claim"),
        ({"say": "x", "in": "table9", "claim": "no large one"}, "table9 has no claim 'no large one'"),
        ({"say": "x", "in": "table1", "claim": "something else"}, "table1 has no claim 'something else'"),
    ],
)
def test_main_claims_need_an_existing_claim(paper_dir: Path, entry: dict[str, str], message: str) -> None:
    written(paper_dir)
    (paper_dir / "claims.yaml").write_text(dump({"claims": [entry]}), encoding="utf-8")
    with pytest.raises(SettingsError, match=message):
        main_claims("mine")


def test_pages_show_the_display_names_of_variants(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert "CIFAR-10, 500 clients: " in changed(Comparison(item("fedacs", "figure1-insufficient")), "small")


def test_changed_settings_ignore_methods_without_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert "ppfe-stage-rounds 9,15,12,12 (paper: 30,50,40,40)" in changed(Comparison(item("ppfe", "table2")), "small")


@pytest.mark.parametrize(
    ("difference", "std", "measure", "expected"),
    [
        (0.25, 0.1, "local last", "+0.25 ± 0.10 points"),
        (-0.0004, 0.0001, "local last", "-0.0004 ± 0.0001 points"),
        (3e-5, 1e-5, "round inner_entropy", "+0.00003 ± 0.00001 (inner entropy)"),
        (0.03, 0.01, "local last jain", "+0.030 ± 0.010 (local last, Jain's index)"),
        (-0.00008, 0.05, "local last", "0.00 ± 0.05 points"),
        (0.0, 0.0, "local last", "0.00 ± 0.00 points"),
        (1.0, 2.0, "bytes-up", "+1 ± 2 bytes"),
    ],
)
def test_small_differences_keep_their_first_digit(
    paper_dir: Path, difference: float, std: float | None, measure: str, expected: str
) -> None:
    written(paper_dir)
    claim = Claim("so", ("FedAvg",), ("Local",), ("a",), measure=measure)
    test = PairTest(Pair("FedAvg", "Local", "a"), "holds", 0.01, Number(difference, std, 3))
    text = describe(Comparison(item("mine", "table1")), claim, Verdict("holds", (test,), test, scale="full"))
    result = "the same in all runs" if std == 0 else "p\u00a0=\u00a00.010"
    assert text == f"**holds**: so (FedAvg − Local: {expected}, {result}; digits; 3 seeds)."


def compared(mean: float, lower: str, column: str, word: str = "undecided") -> PairTest:
    """Return a test of FedAvg minus another row."""
    return PairTest(Pair("FedAvg", lower, column), word, 0.5, Number(mean, 1.0, 3))


def test_evidence_counts_comparisons_and_names_the_rows_above(paper_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(paper_dir, names={"a": "first setting"}, small={"settings": {"max-samples": 300}, "variants": {}})
    comparison = Comparison(item("mine", "table1"))
    claim = Claim("so", ("FedAvg",), ("Local", "Other"), measure="local last")
    # The means are over all seeds. The tests use only the seeds that two rows share.
    means = {"a": {"FedAvg": 5.0, "Local": 4.0, "Other": 6.0}, "b": {"FedAvg": 5.0, "Local": 7.0, "Other": 6.0}}
    monkeypatch.setattr(comparison, "means", lambda claim, scale: means)
    tests = (
        compared(1.0, "Local", "a", "holds"),
        compared(-2.0, "Local", "b"),
        compared(-1.0, "Other", "a"),
        compared(-1.5, "Other", "b"),
    )
    parts = evidence(comparison, claim, Verdict("undecided", tests, tests[1], scale="full"))
    assert parts == [
        "rank 2 of 3 in first setting; 3 of 3 in b",
        "holds in 1, undecided in 3 of 4 comparisons",
        "first setting: holds in 1, undecided in 1; b: undecided in 2",
        "higher mean than FedAvg in both columns: Other; in b: Local",
        "lowest difference: FedAvg − Local, b: -2.00 ± 1.00 points, p\u00a0=\u00a00.500",
    ]
    brief = evidence(comparison, claim, Verdict("undecided", tests, tests[1], scale="full"), brief=True)
    assert brief == [*parts[:2], parts[-1]]
    alike = tuple(replace(test, word="undecided") for test in tests[:2])
    means["a"], means["b"] = {"FedAvg": 5.0, "Local": 4.0}, {"FedAvg": 3.0, "Local": 2.0}
    assert evidence(comparison, claim, Verdict("undecided", alike, alike[1], scale="full"))[:2] == [
        *("rank 1 of 2 in both columns", "undecided in both comparisons"),
    ]
    corrected = (replace(alike[0], adjusted=True), alike[1])
    assert count_comparisons(Verdict("undecided", corrected, corrected[0])) == (
        "undecided in both comparisons (1 significant against it before Holm)"
    )
    first = Verdict("holds", tests[:1], tests[0], tests[2:3], scale="full", not_run=(Pair("FedAvg", "Third"),))
    assert evidence(comparison, claim, first)[-1] == "not run: Third"
    assert coverage(comparison, claim, first) == "digits; 1 of the claim's 2 columns, 3 seeds"
    spread = Claim("so", ("FedAvg",), ("Local",), measure="local last", spread=True)
    adjusted = replace(tests[1], adjusted=True)
    (text,) = evidence(comparison, spread, Verdict("undecided", (adjusted,), adjusted, scale="full"))
    assert text.endswith(
        "points, paired t-test on absolute deviations from the mean: Holm-adjusted p\u00a0=\u00a00.500"
    )
    close = replace(spread, spread=False, by=-3.0)
    (text,) = evidence(comparison, close, Verdict("undecided", tests[1:2], tests[1], scale="full"))
    assert text.endswith("points, non-inferiority test within 3 points: p\u00a0=\u00a00.500")


def test_a_claim_cannot_hold_before_all_its_rows_have_runs(paper_dir: Path) -> None:
    runs = [*TABLE["runs"], {"name": "Ditto", "settings": {"method": "ditto"}}]
    claim = {"say": "so", "higher": "FedAvg", "lower": ["Local", "Ditto"], "by": -1000}  # it holds for any numbers
    common: dict[str, Any] = {"variants": None, "printed": None, "reasons": None, "claims": [claim], "small": None}
    written(paper_dir, **{**common, "claims": None}, seeds=[0, 1, 2])
    assert main(["paper", "mine", "table1", "--scale", "full", "-j", "1"]) == 0
    written(paper_dir, **common, runs=runs, seeds=[0, 1, 2])
    ((_, judged),) = Comparison(item("mine", "table1")).verdicts
    assert (judged.word, judged.counts) == ("undecided", {"holds": 1})
    assert [pair.lower for pair in judged.not_run] == ["Ditto"]


def test_reductions_name_the_variants_or_rows_with_their_own_size(paper_dir: Path) -> None:
    for changed_part, names in (("variants", "ab"), ("runs", ("FedAvg", "Local"))):
        small = {"settings": {"num-server-rounds": 2}, changed_part: {names[1]: {"num-server-rounds": 1}}}
        written(paper_dir, printed=None, reasons=None, claims=None, small=small, seeds=[0])
        assert main(["paper", "mine", "table1", "-j", "1"]) == 0
        assert reductions(Comparison(item("mine", "table1"))) == (
            f"2 instead of 4 rounds ({names[0]}); 1 instead of 4 rounds ({names[1]})"
        )


def test_wide_tables_have_a_part_for_each_variant_and_display_names(paper_dir: Path) -> None:
    measures = ["served last", "served last min", "served last max", "local last", "round train_loss"]
    common: dict[str, Any] = {"printed": None, "reasons": None, "claims": None, "seeds": [0]}
    common["small"] = {"settings": {"num-server-rounds": 1, "max-samples": 300}}
    names = {"a": "first setting", "local last": "after training", "Local": "on its own"}
    written(paper_dir, **common, measure=measures, names=names)
    assert main(["paper", "mine", "table1", "-j", "1"]) == 0
    text = Path("docs/papers/mine.md").read_text(encoding="utf-8")
    columns = ["served last", "served last, lowest client", "served last, highest client", "after training"]
    header = f"| {' | '.join(['reduced, 1 seed', *columns, 'train loss'])} |\n"
    assert text.count(header) == 2 and f"**first setting**\n\n{header}" in text and f"**b**\n\n{header}" in text
    assert text.count("| on its own | ") == 2
    assert "after training (`local last`); train loss (`round train_loss`)" in " ".join(text.split())


def test_rounded_zeros_have_no_sign() -> None:
    assert [without_negative_zero(text) for text in ("-0.000", "+0.00", "-0.001", "+1", "0")] == [
        *("0.000", "0.00", "-0.001", "+1", "0"),
    ]


def test_comparisons_never_mix_scales(paper_dir: Path) -> None:
    written(paper_dir, claims=[TABLE["claims"][1]], small={"settings": {"num-server-rounds": 2, "max-samples": 300}})
    # Another table runs only FedAvg at full scale.
    other = {"title": "Table 2: one row", "variants": TABLE["variants"][:1], "runs": TABLE["runs"][:1]}
    written(paper_dir, "table2", **other, printed=None, claims=None)
    assert main(["paper", "mine", "table1", "--scale", "small", "-j", "1"]) == 0
    assert main(["paper", "mine", "table2", "--scale", "full", "-j", "1"]) == 0
    comparison = Comparison(item("mine", "table1"))
    assert comparison.runs_of("a", "FedAvg")[0] == "full"
    assert comparison.runs_of("a", "Local")[0] == "small"
    fedavg, local = (comparison.values("a", row, "local last", "small") for row in ("FedAvg", "Local"))
    assert comparison.values("a", "FedAvg", "local last") != fedavg
    ((_, judged),) = comparison.verdicts
    assert judged.deciding is not None and (judged.scale, judged.deciding.summary.seeds) == ("small", 2)
    assert judged.deciding.summary.mean == pytest.approx(sum(fedavg[seed] - local[seed] for seed in (0, 1)) / 2)
    text = Path("docs/papers/mine.md").read_text(encoding="utf-8")
    lines = text.partition("## Table 2")[0].splitlines()
    (header,) = [line.split(" | ") for line in lines if "<br>" in line]
    rows = [dict(zip(header, line.split(" | "), strict=True)) for line in lines if line.startswith("| FedAvg |")]
    for scale, source in (("small", SMALL), ("full", "full size, ± over 2 seeds")):
        mean = number(list(comparison.values("a", "FedAvg", "local last", scale).values()))
        assert mean is not None and rows[0][f"a<br>{source}"].startswith(f"{mean.mean:.2f} ± {mean.std:.2f}")
    assert "`posy paper mine table1 --scale small` and `posy paper mine table1 --scale full`." in text
    # A picture shows all rows of a variant at one scale, at which most of the rows have run.
    small = {"settings": {"num-server-rounds": 2, "max-samples": 300}}
    written(paper_dir, "figure1", form={"kind": "points", "label": "accuracy"}, printed=None, claims=None, small=small)
    picture = Comparison(item("mine", "figure1"))
    assert [picture.runs_of("a", row)[0] for row in ("FedAvg", "Local")] == ["small", "small"]
    # Runs at full scale decide a claim before reduced runs, even over fewer seeds.
    other = {"title": "Table 3: the other row", "variants": TABLE["variants"][:1], "runs": TABLE["runs"][1:]}
    written(paper_dir, "table3", **other, seeds=[0], printed=None, claims=None, small=None)
    assert main(["paper", "mine", "table3", "--scale", "full", "-j", "1"]) == 0
    ((_, judged),) = Comparison(item("mine", "table1")).verdicts
    assert judged.deciding is not None and (judged.scale, judged.deciding.summary.seeds) == ("full", 1)
    assert judged.reduced is not None and judged.reduced.scale == "small"
    text = Path("docs/papers/mine.md").read_text(encoding="utf-8")
    assert "- **undecided: too few seeds**: FedAvg is better (" in text and "; reduced runs: undecided, " in text


def test_runs_with_other_settings_have_a_separate_folder(paper_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written(paper_dir, variants=None, printed={"FedAvg": 50}, claims=None, reasons=None)
    assert main(["paper", "mine", "table1", "-j", "1", "num-server-rounds=1"]) == 0
    assert not Path("docs").exists()
    folder = Path("results/papers/mine")
    cell = folder / "table1-small/FedAvg/seed-0"
    assert measured(cell, "rounds") == 1
    assert len(recorded_numbers(cell)["rounds"]["train_loss"]) == 1
    text = (folder / "mine.md").read_text(encoding="utf-8")
    assert "<br>reduced, not comparable, ± over 2 seeds |" in text and "num-server-rounds 1 (paper: 4)" in text
    assert "How to read this page: docs/papers/reading.md in Posy's repository" in text


def test_runs_without_data_are_skipped(paper_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written(paper_dir, settings={**TABLE["settings"], "dataset": "kvasir"})
    assert main(["paper", "mine", "table1", "data-dir=nowhere"]) == 0
    assert "not run: kvasir: " in capsys.readouterr().out
    text = " ".join(Path("docs/papers/mine.md").read_text(encoding="utf-8").split())
    assert "needs kvasir in data-dir (kvasir/<class>/*.jpg, or kvasir.npz)" in text


def test_averages_use_the_last_rounds_and_each_methods_point(paper_dir: Path) -> None:
    written(
        paper_dir,
        settings={**TABLE["settings"], "average-rounds": 2, "system-accuracy": "on"},
        measure=["own average weighted", "routing"],  # only FedDRM has the measure `routing`
        variants=None,
        runs=[{"name": name, "settings": {"method": name}} for name in ("fedavg", "ditto")],
        printed=None,
        claims=None,
        reasons=None,
        seeds=[0],
        small={"settings": {"num-server-rounds": 3, "max-samples": 300}},
    )
    assert [entry.state for entry in Comparison(item("mine", "table1")).entries] == ["not run"] * 4
    assert main(["paper", "mine", "table1", "-j", "1"]) == 0
    states = [(entry.row, entry.measure, entry.state) for entry in Comparison(item("mine", "table1")).entries]
    assert states == [(name, "own average weighted", "plotted") for name in ("fedavg", "ditto")]
    for name, point in (("fedavg", "served"), ("ditto", "local")):
        cell = Path(f"papers/mine/results/table1-small/{name}/seed-0")
        summary = json.loads((cell / "summary.json").read_text())
        average = summary[point]["average"]
        assert average["evaluations"] == 2
        assert measured(cell, "own average weighted") == measured(cell, f"{point} average weighted")
        assert measured(cell, "own average weighted") == 100 * average["weighted"]
        assert measured(cell, "own last") == 100 * summary[point]["last"]["mean"]
        assert measured(cell, "system average") == 100 * summary["system-accuracy-average"]["mean"]
    assert in_percent("own average weighted")
    assert in_percent("system average")


def test_recorded_results_load_in_any_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    entries = Comparison(item("cwfedavg", "table1")).entries
    assert {entry.row for entry in entries if entry.state != "not run"} == {entry.row for entry in entries} != set()
    assert not list(tmp_path.iterdir())  # reading leaves no files


def test_results_come_from_the_working_directory_and_from_posy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], paper_dir: Path
) -> None:
    written(paper_dir, small={"settings": {"num-server-rounds": 2, "max-samples": 300}})
    assert main(["paper", "mine", "table1", "-j", "1", "--seeds", "1"]) == 0
    figure = {
        "title": "Figure 2: classes",
        "runs": None,
        "printed": None,
        "claims": None,
        "form": {"kind": "partition"},
    }
    written(paper_dir, "figure2", **figure)
    assert main(["paper", "mine", "figure2"]) == 0
    here = [(entry.numbers, entry.state) for entry in Comparison(item("mine", "table1")).entries]
    for file in Path("papers/mine/results").glob("table1-small/*/"):
        shutil.rmtree(file)
    stored = sorted(tmp_path.rglob("*"))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)  # as with an installed package
    assert [(entry.numbers, entry.state) for entry in Comparison(item("mine", "table1")).entries] == here
    assert Comparison(item("mine", "figure2")).counts_of("a") is not None
    assert sorted(tmp_path.rglob("*")) == sorted([*stored, elsewhere])  # reading writes no files
    # A new run is stored here, and the page also shows the earlier runs.
    assert main(["paper", "mine", "table1", "-j", "1", "--seeds", "2"]) == 0
    assert {
        seed
        for (_, _), cells in Comparison(item("mine", "table1")).finished["small"].items()
        for seed in (c.seed for c in cells)
    } == {0, 1}
    lines = archive.read(Path("papers/mine/results/table1-small")).values()
    assert {line["config"]["settings"]["seed"] for line in lines} == {1}
    assert item_module.missing_results(["mine"]) == ""


def test_missing_papers_and_results_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(item_module, "PAPERS", tmp_path / "posy" / "papers")
    missing = item_module.missing_results(["mine"])
    assert str(tmp_path / "papers") in missing and str(tmp_path / "posy/papers") in missing
    with pytest.raises(SettingsError, match=r"posy/papers contains no papers .*; install Posy from its repository"):
        papers()


@pytest.mark.parametrize(("clients", "note"), [(3, "3 of 30 clients"), (26, "26 of 30 clients"), (27, ""), (30, "")])
def test_a_number_over_a_cohort_has_its_client_count(clients: int, note: str, tmp_path: Path) -> None:
    """Such a number is not comparable with the paper's number, which is a mean over all clients."""
    last = {"round": 5, "mean": 0.9, "clients": clients}
    summary = {"rounds": 5, "num-clients": 30, "method": "local", "served": {"last": {**last, "clients": 30}}}
    (tmp_path / "summary.json").write_text(json.dumps({**summary, "local": {"last": last}}))
    assert partial_coverage(tmp_path, "local last") == partial_coverage(tmp_path, "own last min") == note
    assert not any(partial_coverage(tmp_path, name) for name in ("served last", "system", "bytes-up", "round loss"))


def test_scans_by_row_and_bars_by_measure_are_drawn(paper_dir: Path) -> None:
    scan = {"kind": "scan", "setting": "local-epochs", "lines": "rows", "measures": ["local last"]}
    bars = {"kind": "measures", "measures": ["local last", "local last min"], "names": {"local last": "mean"}}
    small = {"settings": {"num-server-rounds": 1, "max-samples": 300}, "seeds": [0]}
    for name, form in (("figure1", scan), ("figure2", bars)):
        written(paper_dir, name, printed=None, claims=None, reasons=None, form=form, small=small)
    assert main(["paper", "mine", "all", "-j", "1"]) == 0
    for name in ("figure1", "figure2"):
        assert Path(f"docs/papers/mine-{name}.png").is_file()


def test_a_figure_without_runs_is_drawn_if_its_data_exists(paper_dir: Path) -> None:
    settings = {"dataset": "cifar10", "shift": "high", "num-clients": 3}
    alone = {"runs": None, "variants": None, "seeds": None, "printed": None, "claims": None, "reasons": None}
    alone |= {"small": None, "measure": None, "spread": None}
    written(paper_dir, "figure7", **alone, title="Figure 7: shifts", settings=settings, form={"kind": "samples"})
    page_of_mine, picture = Path("docs/papers/mine.md"), Path("docs/papers/mine-figure7.png")
    command = ["paper", "mine", "figure7", "download=false", "data-dir=here"]
    assert main(command) == 0
    text = " ".join(page_of_mine.read_text(encoding="utf-8").split())
    assert "### Figure 7" in text and "- `posy paper mine figure7` needs cifar10 in data-dir" in text
    assert not picture.exists()
    Path("here").mkdir()
    images = np.random.default_rng(0).integers(0, 256, (20, 32, 32, 3), np.uint8)
    np.savez("here/cifar10.npz", x_train=images, y_train=np.arange(20) % 10)
    assert main(command) == 0
    assert picture.is_file()
    text = page_of_mine.read_text(encoding="utf-8")
    assert "Tables and figures: [Figure 7](#figure-7)." in text and "![Figure 7](mine-figure7.png)" in text
    assert "Not run" not in text
    # The picture stays on the page if the page is drawn again without the data.
    assert main(["paper", "mine"]) == 0
    assert "![Figure 7](mine-figure7.png)" in page_of_mine.read_text(encoding="utf-8")


def test_figures_that_posy_cannot_draw_state_their_needs(paper_dir: Path) -> None:
    (paper_dir / "figure3.yaml").write_text(
        dump({"title": "Figure 3: synthetic data", "shows": "Less.", "needs": "a regression task"}), encoding="utf-8"
    )
    assert main(["paper", "mine"]) == 0
    text = Path("docs/papers/mine.md").read_text(encoding="utf-8")
    assert "Not run: [Figure 3](#figure-3)." in text and "<details><summary>Figure 3</summary>" in text
    assert "\n- All numbers: a regression task.\n" in text


@pytest.mark.slow
def test_a_table_on_cifar100_runs_on_synthetic_data(paper_dir: Path) -> None:
    content = read_yaml(ROOT / "papers/ppfe/table3.yaml")
    wanted = [index for index, variant in enumerate(content["variants"]) if variant["name"].startswith("CIFAR-100")]
    content["variants"] = [content["variants"][index] for index in wanted]
    content["printed"] = {row: [values[index] for index in wanted] for row, values in content["printed"].items()}
    content |= {"seeds": [0], "small": {}, "reasons": []}
    written(paper_dir, "table3", **{**dict.fromkeys(TABLE), **content})
    Path("here").mkdir()
    rng = np.random.default_rng(0)
    labels = np.repeat(np.arange(100), 8)
    images = rng.integers(0, 256, (len(labels), 32, 32, 3), np.uint8)
    np.savez("here/cifar100.npz", x_train=images, y_train=labels)
    short = ["num-clients=20", "fraction-train=0.5", "samples-per-client=20", "model=mlp", "local-epochs=1"]
    short += ["num-server-rounds=3", "ppfe-stages=3", "ppfe-stage-rounds=1,1,1", "data-dir=here"]
    assert main(["paper", "mine", "table3", "--scale", "full", "-j", "1", *short]) == 0
    text = Path("results/papers/mine/mine.md").read_text(encoding="utf-8")
    assert text.count("full size, not comparable, 1 seed") == 2
    assert "not run" not in text.lower()


# -- papers in the repository ----------------------------------------------------------------------------


@pytest.mark.parametrize(("paper", "name"), EVERY)
def test_every_table_and_figure_loads(paper: str, name: str) -> None:
    paper_item = item(paper, name)
    assert paper_item.title.partition(": ")[2]
    assert paper_item.printed is not None
    assert paper_item.claims is not None
    assert paper_item.kind in FORMS
    assert paper_item.readings.keys() <= set(paper_item.rows)
    if paper_item.has_runs or paper_item.counts_classes:
        for scale in ("small", "full"):
            assert paper_item.plan(scale).cells
    file = ROOT / "papers" / paper / f"{name}.yaml"
    assert file.read_text(encoding="utf-8").startswith("# ")


def test_the_package_contains_the_papers_and_their_results() -> None:
    """An installed package has no checkout, so `posy paper` reads these files from the package."""
    content = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    patterns = content["package-data"]["posy"]
    packaged = {path.resolve() for pattern in patterns for path in (ROOT / "posy").glob(pattern)}
    tracked = subprocess.run(["git", "ls-files", "papers"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert {(ROOT / name).resolve() for name in tracked.stdout.splitlines()} == packaged


@pytest.mark.parametrize("paper", papers())
def test_every_paper_has_two_to_five_main_claims(paper: str) -> None:
    claims = main_claims(paper)
    assert 2 <= len(claims) <= 5
    assert all(main.item.in_paper for main in claims)


@pytest.mark.slow
@pytest.mark.parametrize("paper", papers())
def test_pages_are_up_to_date_with_the_runs(paper: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`docs/generate.py --check` compares the README and the index with the pages."""
    file = ROOT / "docs/papers" / f"{paper}.md"
    monkeypatch.chdir(ROOT)
    comparisons = [Comparison(paper_item) for paper_item in items(paper)]
    assert page(paper, comparisons, file.parent) == file.read_text(encoding="utf-8"), (
        f"docs/papers/{paper}.md is stale: run posy paper {paper}"
    )


# -- forms without numbers of runs -----------------------------------------------------------------------


def test_a_row_can_reuse_the_runs_of_another(paper_dir: Path) -> None:
    read = {"Global": {"of": "FedAvg", "measure": "served last"}, "Local": {"measure": "local upper-bound"}}
    written(paper_dir, variants=None, printed={"FedAvg": 50, "Global": 40}, claims=None, reasons=None, read=read)
    assert main(["paper", "mine", "table1", "-j", "1"]) == 0
    comparison = Comparison(item("mine", "table1"))
    summary = json.loads(Path("papers/mine/results/table1-small/FedAvg/seed-0/summary.json").read_text())
    assert comparison.values("", "FedAvg", "local last")[0] == 100 * summary["local"]["last"]["mean"]
    assert comparison.values("", "Global", "local last")[0] == 100 * summary["served"]["last"]["mean"]
    assert comparison.values("", "Global", "rounds")[0] == 2
    states = {entry.row: entry.state for entry in comparison.entries}
    # The reduced runs skip Local.
    assert states == {"FedAvg": "not comparable", "Global": "not comparable", "Local": "not run"}
    text = " ".join(Path("docs/papers/mine.md").read_text(encoding="utf-8").split())
    assert "Metrics: local last; served last (Global); local upper-bound (Local)." in text


def test_rows_follow_the_papers_order_if_all_have_numbers(paper_dir: Path) -> None:
    runs = [{"name": name, "settings": {}} for name in ("1", "2", "3")]
    read = {"Global": {"of": "2", "measure": "served last"}}
    written(paper_dir, variants=None, runs=runs, printed={"3": 1, "Global": 2, "1": 3, "2": 4}, claims=None, read=read)
    assert item("mine", "table1").rows == ["3", "Global", "1", "2"]
    written(paper_dir, variants=None, runs=runs, printed={"3": 1, "Other": 2}, claims=None, read=read)
    assert item("mine", "table1").rows == ["1", "2", "3", "Other", "Global"]


def test_a_claim_can_use_one_point_for_all_rows(paper_dir: Path) -> None:
    claim = {"say": "own points", "higher": "a / FedAvg", "lower": "a / Local"}
    written(
        paper_dir, printed=None, reasons=None, points={"FedAvg": "served"},
        claims=[claim, {**claim, "same-point": True}],
        small={"settings": {"num-server-rounds": 2, "max-samples": 300}},
    )  # fmt: skip
    assert main(["paper", "mine", "table1", "-j", "1"]) == 0
    folder = Path("papers/mine/results/table1-small/a")

    def accuracy(row: str, point: str) -> float:
        last = [json.loads((folder / row / f"seed-{s}/summary.json").read_text())[point]["last"] for s in (0, 1)]
        return 50 * sum(evaluation["mean"] for evaluation in last)

    verdicts = Comparison(item("mine", "table1")).verdicts
    row_points, same_point = (judged.tests[0].summary.mean for _, judged in verdicts)
    assert row_points == pytest.approx(accuracy("FedAvg", "served") - accuracy("Local", "local"))
    assert same_point == pytest.approx(accuracy("FedAvg", "local") - accuracy("Local", "local"))
    assert row_points != same_point


def test_pages_state_the_seeds_and_lines_use_common_seeds(paper_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = {str(n): {"local-epochs": n} for n in (1, 2)}
    rows = [{"name": name, "settings": {"method": "fedavg", **row_settings}} for name, row_settings in names.items()]
    rows.append({"name": "Local", "settings": {"method": "local"}})
    form = {"kind": "scan", "setting": "local-epochs", "measures": ["local last"]}
    small = {"settings": {"num-server-rounds": 1, "max-samples": 300}}
    common: dict[str, Any] = {"variants": None, "claims": None, "reasons": None, "small": small}
    written(paper_dir, "figure1", **common, runs=rows, printed={"1": 50, "Local": 40}, form=form)
    assert main(["paper", "mine", "figure1", "-j", "1", "--seeds", "1"]) == 0
    written(
        paper_dir, "table2", **common, runs=rows[:1], printed={"1": 50}, seeds=[0, 1, 2]
    )  # this row has two more seeds
    drawn: list[dict[str, Any]] = []
    monkeypatch.setattr(figures, "small_multiples", lambda panels, _, **how: drawn.append({"panels": panels, **how}))
    assert main(["paper", "mine", "table2", "-j", "1"]) == 0
    text = Path("docs/papers/mine.md").read_text(encoding="utf-8")
    # Seed 1 is one of the seeds of the figure, and seed 2 is not.
    assert text.count("(2 seeds)") == 1 and "(3 seeds)" not in text
    assert "table1" not in text and text.count("comparable, 1 seed |") == text.count("± over 3 seeds |") == 1
    assert "posy paper mine figure1 --scale small`" in text
    comparison = Comparison(item("mine", "figure1"))
    values = {row: comparison.values("", row, "local last") for row in ("1", "2", "Local")}
    assert {row: set(by_seed) for row, by_seed in values.items()} == {"1": {0, 1}, "2": {0}, "Local": {0}}
    (picture,) = drawn
    first, second = picture["panels"]["local last, %"]["mine"]
    assert (first[1], second[1]) == (values["1"][0], values["2"][0])
    assert picture["panels"]["local last, %"]["paper"] == [(1.0, 50.0, 0.0)] and picture["points"] == {"paper"}
    assert picture["dashed"] == {"local last, %": {"Local": values["Local"][0], "Local, paper": 40.0}}


def test_all_tables_and_figures_are_listed_with_their_state(
    paper_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written(paper_dir, printed=None)
    written(paper_dir, "figure1", title="Figure 1: nothing", **dict.fromkeys(("runs", "printed", "claims", "small")))
    assert main(["paper"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["table1", "Table", "1:", "accuracy", "4", "not", "run", "5", "not", "tested"] in lines
    assert any(line[:4] == ["figure1", "Figure", "1:", "nothing"] for line in lines)
    assert any(line[:2] == ["mine", "0"] for line in lines)  # main claims


@pytest.mark.parametrize(
    ("read", "message"),
    [
        ({"Global": {"of": "FedAvg"}}, "read of Global .*`measure"),
        ({"Global": {"of": "FedProx", "measure": "served last"}}, "'FedProx' is not a row"),
        ({"Global": {"of": "FedAvg", "measure": "served"}}, "'served' .*not a measure"),
    ],
)
def test_invalid_read_entries_are_refused(paper_dir: Path, read: dict[str, Any], message: str) -> None:
    written(paper_dir, read=read)
    with pytest.raises(SettingsError, match=message):
        _ = item("mine", "table1").readings


def test_a_partition_is_drawn_without_runs(paper_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = {"dataset": "digits", "num-clients": 4, "partition": "iid"}
    content = {"title": "Figure 2: partition", "settings": settings, "seeds": [0], "form": {"kind": "partition"}}
    variants = [{"name": "here"}, {"name": "elsewhere", "settings": {"dataset": "kvasir"}}]
    (paper_dir / "figure2.yaml").write_text(dump({**content, "variants": variants}), encoding="utf-8")
    before = Comparison(item("mine", "figure2"))
    assert {entry.variant: entry.state for entry in before.entries} == {"here": "not run", "elsewhere": "not run"}
    assert main(["paper", "mine", "figure2", "data-dir=nowhere", "download=false"]) == 0
    assert "not run: kvasir" in capsys.readouterr().out
    comparison = Comparison(item("mine", "figure2"))
    assert {entry.variant: entry.state for entry in comparison.entries} == {"here": "plotted", "elsewhere": "not run"}
    counts = comparison.counts_of("here")
    assert counts is not None
    assert counts.shape == (4, 10)
    assert 0.7 * 1797 < counts.sum() < 0.8 * 1797  # the training samples: three quarters of the digits
    assert Path("docs/papers/mine-figure2.png").is_file()
    text = Path("docs/papers/mine.md").read_text(encoding="utf-8")
    assert "![Figure 2](mine-figure2.png)" in text and "\n- elsewhere: `posy paper mine figure2` needs kvasir" in text
    (paper_dir / "figure2.yaml").write_text(
        dump({**content, "settings": {**settings, "num-clients": 5}}), encoding="utf-8"
    )
    assert Comparison(item("mine", "figure2")).counts_of("") is None  # counts of other settings do not apply


@pytest.mark.slow
def test_heads_correlation_and_a_runs_figure_are_drawn(paper_dir: Path, pictures: None) -> None:
    settings = {**TABLE["settings"], "method": "cwfedavg", "partition": "pathological", "num-clients": 5}
    runs = [{"name": "with", "settings": {}}, {"name": "without", "settings": {"cwfedavg-wdr": False}}]
    changes = {"settings": settings, "runs": runs, "variants": None, "printed": None, "claims": None, "seeds": [0]}
    changes |= {"reasons": None, "small": {"settings": {"num-server-rounds": 1}}}
    written(paper_dir, "figure1", **changes, form={"kind": "heads", "counts": True, "difference": ["without", "with"]})
    written(paper_dir, "figure2", **changes, form={"kind": "correlation"}, measure="round distribution_distance")
    written(paper_dir, "figure3", **changes, form={"kind": "picture", "of": "norms", "row": "with"})
    assert main(["paper", "mine", "all", "-j", "1"]) == 0
    comparison = Comparison(item("mine", "figure2"))
    with_wdr, without = (comparison.values("", row, comparison.item.measures[0])[0] for row in ("with", "without"))
    assert 0 < with_wdr < without
    counts, cell = comparison.counts_of(""), Comparison(item("mine", "figure1")).cells["", "with"][1][0]
    norms = np.array(recorded_numbers(cell.path)["heads"])
    assert counts is not None
    distances = np.linalg.norm(
        counts / counts.sum(axis=1, keepdims=True) - norms / norms.sum(axis=1, keepdims=True), axis=1
    )
    assert with_wdr == pytest.approx(distances.mean(), rel=1e-4)
    for name in ("figure1", "figure2", "figure3"):
        assert Path(f"docs/papers/mine-{name}.png").is_file()
    picture = Path("papers/mine/results/figure1-small/with/seed-0/figures/norms.png")
    assert Path("docs/papers/mine-figure3.png").read_bytes() == picture.read_bytes()  # it reuses the first figure's run


def test_counts_older_than_a_setting_match_its_default(tmp_path: Path) -> None:
    content = {key: TABLE[key] for key in ("title", "settings", "variants", "runs", "seeds")}
    (tmp_path / "a.yaml").write_text(dump({**content, "output": str(tmp_path / "out")}), encoding="utf-8")
    plan = read_plan(tmp_path / "a.yaml")
    assert count(plan, {}) == {} and counted(plan).keys() == {"a", "b"}
    file = tmp_path / "out" / FILE
    stored_counts = json.loads(file.read_text(encoding="utf-8"))
    del stored_counts["a"]["data"]["transforms"]
    stored_counts["b"]["data"]["transforms"] = "RandomInvert"
    file.write_text(json.dumps(stored_counts), encoding="utf-8")
    counts = counted(plan)
    assert counts.keys() == {"a"} and sorted(counts["a"].sum(1).tolist()) == [337, 337, 337, 338]


def test_parameters_are_counted_without_runs(paper_dir: Path) -> None:
    content = {
        "title": "Table 2: memory",
        "measure": "parameters",
        "variants": [{"name": "10"}],
        "printed": {"FedAvg": [11.18], "All": [111.81], "Output": [11.3]},
        "form": {"kind": "memory", "layers": {"FedAvg": "none", "All": "all", "Output": "output"}},
        "reasons": [{"rows": ["Output"], "say": "counted otherwise"}],
    }
    (paper_dir / "table2.yaml").write_text(dump(content), encoding="utf-8")
    entries = {entry.row: entry for entry in Comparison(item("mine", "table2")).entries}
    # torchvision's ResNet-18 with ten classes has 11,181,642 parameters, its output layer 512 * 10 + 10.
    assert [entry.ours.mean for entry in entries.values() if entry.ours] == pytest.approx(
        [11.181642, 111.81642, 11.181642 + 9 * 0.00513]
    )
    assert [entry.state for entry in entries.values()] == ["reproduced", "reproduced", "differs"]
    assert entries["Output"].why == "counted otherwise"


def test_the_counted_parameters_match_cwfedavgs_server(make_strategy: Callable[..., Any]) -> None:
    for layers in ("output", "all"):
        strategy = make_strategy("cwfedavg", cwfedavg_layers=layers)
        classwise = strategy.class_models.shape[1]
        state = strategy.model.size + strategy.class_models.size
        assert stored_parameters(strategy.size, classwise, strategy.num_classes) == state


def test_a_figure_without_runs_states_the_reason(paper_dir: Path) -> None:
    content = {"title": "Figure 1: idea", "needs": "nothing is measured"}
    (paper_dir / "figure1.yaml").write_text(dump(content), encoding="utf-8")
    (entry,) = Comparison(item("mine", "figure1")).entries
    assert entry.state == "not run"
    assert main(["paper", "mine", "all"]) == 0
    text = Path("docs/papers/mine.md").read_text(encoding="utf-8")
    assert "\n- All numbers: nothing is measured.\n" in text
    assert ".png" not in text


@pytest.mark.slow
def test_a_figure_runs_on_an_npz_data_set(paper_dir: Path) -> None:
    """Run Figure 6 of cwFedAvg on made-up images instead of CIFAR-100 (see test_papers_standins)."""
    shutil.copy(ROOT / "papers/cwfedavg/figure6.yaml", paper_dir)
    rng = np.random.default_rng(0)
    y = np.repeat(np.arange(100), 8)
    x = rng.integers(0, 256, (len(y), 32, 32, 3), dtype=np.uint8)
    np.savez("cifar100.npz", x_train=x, y_train=y)
    words = ["data-dir=.", "max-samples=0", "num-clients=5", "model=linear", "num-server-rounds=1", "evaluate-every=1"]
    assert main(["paper", "mine", "figure6", "-j", "1", *words]) == 0
    folder = Path("results/papers/mine")
    assert (folder / "mine-figure6.png").is_file()
    text = (folder / "mine.md").read_text(encoding="utf-8")
    assert "![Figure 6]" in text and text.count("<summary>Numbers</summary>") == 1


@pytest.mark.slow
def test_sent140_runs_with_word_vectors_from_a_file(paper_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Run Table 3 of PPFE on made-up tweets in the published layout, with word vectors in GloVe's format."""
    shutil.copy(ROOT / "papers/ppfe/table3.yaml", paper_dir)
    words = {"0": "bad", "4": "good"}
    rows = [f'"{p}","1","d","q","user{n % 3}","{words[p]} day"' for n in range(108) for p in ("04"[n // 3 % 2],)]
    Path("sent140.csv").write_text("\n".join(rows), encoding="latin-1")
    options = [
        "data-dir=.",
        "download=false",
        "num-clients=3",
        "num-server-rounds=4",
        "local-epochs=1",
        "text-length=3",
        "batch-size=9",
    ]
    command = ["paper", "mine", "table3", "--scale", "full", "-j", "1", *options, "ppfe-stage-rounds=1,1,1,1"]
    assert main(command) == 0
    printed = capsys.readouterr().out
    assert "0 of 36 runs are available" in printed
    assert "not run: glove.6B.300d.txt: " in printed and " contains no glove.6B.300d.txt" in printed
    page_of = Path("results/papers/mine/mine.md")
    assert (
        "(sent140/training.1600000.processed.noemoticon.csv, or sent140.csv) and glove.6B.300d.txt in the same folder"
        in " ".join(page_of.read_text(encoding="utf-8").split())
    )
    lines = [f"{word} " + " ".join([value] * 300) for word, value in (("good", "0.1"), ("bad", "-0.1"))]
    Path("glove.6B.300d.txt").write_text("\n".join(lines), encoding="utf-8")
    assert main(command) == 0
    assert "6 of 36 runs are available" in capsys.readouterr().out
    chosen = parse_words([*options, "ppfe-stage-rounds=1,1,1,1"], "a test")
    comparison = Comparison(item("mine", "table3"), chosen, Path("results/papers/mine"))
    entries = [entry for entry in comparison.entries if entry.variant == "Sent140"]
    assert [entry.row for entry in entries] == ["With MR", "Without MR"]
    assert all(entry.ours is not None and entry.ours.seeds == 3 for entry in entries)
