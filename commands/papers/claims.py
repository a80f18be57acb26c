"""The main claims of a paper, with the outcomes of the claims in its tables and figures that decide them."""

import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from posy.commands.papers.compare import Comparison
from posy.commands.papers.item import MAIN_CLAIMS, Claim, Item, items
from posy.commands.papers.record import in_percent
from posy.commands.papers.requirements import dataset_title, datasets, reduced_parts, reductions, share_of_rounds
from posy.commands.papers.tables import markdown_table, without_negative_zero
from posy.commands.papers.verdict import FAILS, HOLDS, NOT_TESTED, OUTCOMES, UNDECIDED, Number, PairTest, Verdict
from posy.settings import SettingsError
from posy.strategies.registry import PAPERS
from posy.words import capitalised, counted, joined
from posy.yaml12 import read_yaml

KEYS = ("say", "in", "claim")
"""Keys of a main claim: its text, the file of a table or figure without ``.yaml``, and the text of a claim there."""
ALSO, NOTE = "also", "note"
"""Optional keys of a main claim: further claims, with the same keys, whose outcomes the box shows, too, and a note. The
box omits the note of a further claim that holds."""
BOX = ("main claim", "verdict", "evidence", "runs")
"""Columns of the verdict box."""
LINE = "<br>"
"""Line break in a cell of the verdict box."""
REDUCED = "(reduced)"
"""Mark of an outcome from reduced runs."""
BEYOND = "(Posy's experiment)"
"""Mark of an outcome from an experiment that is not in the paper."""
SPACE = "\u00a0"
"""Space without a line break."""
TOO_FEW = "too few seeds"
MOST_ABOVE = 3
"""Maximum number of rows above a claim's row that the verdict box lists. A paper's section lists all of them."""
PLURALS = {HOLDS: "hold", FAILS: "do not hold"}


@dataclass(frozen=True)
class MainClaim:
    """A main claim of a paper, the claim in one of its tables and figures that decides it, and further claims."""

    say: str
    item: Item
    claim: Claim
    also: tuple["MainClaim", ...] = ()
    note: str = ""


def main_claims(paper: str) -> list[MainClaim]:
    """Return the main claims of a paper, the most important first; none if the paper has no file of main claims.

    Raises
    ------
    SettingsError
        If a main claim refers to a table, figure or claim that does not exist.
    """
    file = PAPERS / paper / MAIN_CLAIMS
    if not file.is_file():
        return []
    by_name = {item.name: item for item in items(paper)}

    def read(entry: Any, keys: Collection[str]) -> MainClaim:
        if not isinstance(entry, dict) or not set(KEYS) <= set(entry) <= {*keys}:
            raise SettingsError(f"{entry!r} in {file}: a main claim has the keys {', '.join(KEYS)}")
        item = by_name.get(entry["in"])
        claim = next((claim for claim in item.claims if claim.say == entry["claim"]), None) if item else None
        if item is None or claim is None:
            raise SettingsError(f"{entry['say']!r} in {file}: {entry['in']} has no claim {entry['claim']!r}")
        also = tuple(read(other, (*KEYS, NOTE)) for other in entry.get(ALSO, []))
        return MainClaim(entry["say"], item, claim, also, entry.get(NOTE, ""))

    return [read(entry, (*KEYS, ALSO, NOTE)) for entry in read_yaml(file).get("claims", [])]


def main_verdicts(paper: str, comparisons: Sequence[Comparison]) -> list[tuple[MainClaim, Verdict]]:
    """Return the outcome of each main claim of a paper."""
    return [(main, _verdict_of(main, comparisons)) for main in main_claims(paper)]


def _verdict_of(main: MainClaim, comparisons: Sequence[Comparison]) -> Verdict:
    """Return the outcome of a main claim."""
    comparison = _comparison_of(main, comparisons)
    return next(verdict for claim, verdict in comparison.verdicts if claim == main.claim)


def _comparison_of(main: MainClaim, comparisons: Sequence[Comparison]) -> Comparison:
    """Return the table or figure that decides a main claim."""
    return next(comparison for comparison in comparisons if comparison.item.name == main.item.name)


def verdict_box(
    verdicts: Sequence[tuple[MainClaim, Verdict]], comparisons: Sequence[Comparison], links: Mapping[str, str]
) -> str:
    """Return the verdict box of a paper in Markdown; ``links`` contains the link to each table and figure."""
    lines: list[Sequence[str]] = [BOX, ["---"] * len(BOX)]
    common = common_reductions(verdicts, comparisons)
    for main, verdict in verdicts:
        comparison, link = _comparison_of(main, comparisons), links[main.item.name]
        word = outcome(verdict).replace(verdict.word, f"**{verdict.word}**", 1)
        shown = evidence(comparison, main.claim, verdict, brief=True)
        runs = [f"{link}: {coverage(comparison, main.claim, verdict)}" if verdict.tests else link]
        if verdict.word == NOT_TESTED:
            runs = [f"{link}, needs {' and '.join(map(dataset_title, datasets(comparison, main.claim)))}"]
        elif is_reduced(verdict):
            sizes = reductions(comparison, main.claim, common)
            runs += [f"{'also ' if common else ''}reduced: {sizes}"] if sizes else []
        else:
            runs.append("full size")
        if verdict.reduced:
            word += f"{LINE}reduced runs: {verdict.reduced.word}"
            parts = evidence(comparison, main.claim, verdict.reduced, brief=True)
            shown += [f"reduced runs: {'; '.join(parts[: 2 if len(parts) > 2 else 1])}"]
        shown += _further(main, verdict, comparisons, links)
        shown += [main.note] if main.note else []
        lines.append([main.say, word, LINE.join(shown), LINE.join(runs)])
    return markdown_table(lines)


def _further(
    main: MainClaim, verdict: Verdict, comparisons: Sequence[Comparison], links: Mapping[str, str]
) -> list[str]:
    """Return a line for each table or figure with further claims: their outcomes and the deciding differences."""
    groups: dict[str, list[str]] = {}
    for other in main.also:
        comparison, judged = _comparison_of(other, comparisons), _verdict_of(other, comparisons)
        if is_reduced(verdict) and judged.reduced:  # compare outcomes of the same size
            judged = judged.reduced
        word = outcome(judged)
        if is_reduced(judged) == is_reduced(verdict):
            word = word.removesuffix(f" {REDUCED}")
        if judged.deciding is not None:
            mean = replace(judged.deciding.summary, std=None)
            word += f", {_difference(comparison.item, other.claim, mean).partition(' ')[0]}"
        if other.note and judged.word != HOLDS:
            word += f", {other.note}"
        groups.setdefault(other.item.name, []).append(f"{other.say}: {word}")
    heads = {item.name: f" {BEYOND}" * (not item.in_paper) for item in (other.item for other in main.also)}
    return [
        capitalised("; ".join(texts)) if name == main.item.name else f"{links[name]}{heads[name]}: {'; '.join(texts)}"
        for name, texts in groups.items()
    ]


def common_reductions(verdicts: Sequence[tuple[MainClaim, Verdict]], comparisons: Sequence[Comparison]) -> list[str]:
    """Return the reductions that all main claims with outcomes from reduced runs share."""
    parts = [
        sizes
        for main, verdict in verdicts
        if is_reduced(verdict)
        for sizes in reduced_parts(_comparison_of(main, comparisons), main.claim).values()
    ]
    return [part for part in parts[0] if all(part in sizes for sizes in parts)] if parts else []


def first_verdict(verdicts: Sequence[tuple[MainClaim, Verdict]], comparisons: Sequence[Comparison]) -> str:
    """Return the outcome of the first main claim as text, with the rank of the claim's row or the deciding test."""
    (main, verdict), comparison = verdicts[0], _comparison_of(verdicts[0][0], comparisons)
    if verdict.word == NOT_TESTED:
        return f"**Main claim: {NOT_TESTED}.**"
    size = "in reduced runs" if is_reduced(verdict) else "at the paper's size"
    seeds, share = _seeds(verdict), share_of_rounds(comparison, main.claim) if is_reduced(verdict) else ""
    runs = f"{share.replace(' ', SPACE)} of the paper's rounds, {seeds}" if share else seeds
    ranks = _ranks(comparison, main.claim, verdict)
    row = comparison.item.label(main.claim.higher[0])
    if len(set(ranks.values())) == 1:
        rank, of = next(iter(ranks.values()))
        columns = "the tested column" if len(ranks) == 1 else f"{_all(len(ranks))} tested columns"
        columns = columns if [*ranks] != [""] else "the test"
        text = f"{row} ranks {_ordinal(rank)} of {of} methods in {columns}"
    elif ranks:
        rank_texts = [
            f"{_ordinal(rank)} of {of} in {comparison.item.label(name)}" for name, (rank, of) in ranks.items()
        ]
        text = f"{row} ranks {joined(rank_texts)}"
    else:
        text = evidence(comparison, main.claim, verdict, brief=True)[0]
    return f"**Main claim: {verdict.word} {size}.** {text} ({runs})."


def read_box(page: str) -> list[list[str]]:
    """Return the rows of the verdict box on a paper's page, without the header."""
    _, _, after = page.partition(markdown_table([BOX]))
    rows = after.partition("\n\n")[0].splitlines()[2:]
    return [row.strip("| ").split(" | ") for row in rows]


def counts_in(rows: Iterable[Sequence[str]]) -> str:
    """Return sentences with the number of main claims with each outcome, from the rows of a verdict box."""
    verdicts = [row[1].partition(LINE)[0] for row in rows]
    return summary((verdict.split("**")[1], REDUCED in verdict) for verdict in verdicts)


def summary(outcomes: Iterable[tuple[str, bool]]) -> str:
    """Return sentences with the number of claims with each outcome.

    Each outcome has a word and whether it comes from reduced runs. An example is ``1 holds at the paper's size. In
    reduced runs, 3 hold and 1 is undecided``.
    """
    counts = Counter(outcomes)
    at_size, reduced = (
        [_number_of(word, counts[word, of]) for word in OUTCOMES[:-1] if counts[word, of]] for of in (False, True)
    )
    sentences = [f"{joined(at_size)} at the paper's size"] if at_size else []
    sentences += [f"In reduced runs, {joined(reduced)}"] if reduced else []
    sentences += [_number_of(NOT_TESTED, counts[NOT_TESTED, False])] if counts[NOT_TESTED, False] else []
    return ". ".join(sentences)


def _number_of(word: str, number: int) -> str:
    """Return a number of claims with their outcome, such as ``3 hold`` or ``1 is undecided``."""
    if word in PLURALS:
        return f"{number} {PLURALS[word] if number > 1 else word}"
    return f"{number} {'are' if number > 1 else 'is'} {word}"


def outcome(verdict: Verdict) -> str:
    """Return the outcome of a claim, with a mark if it comes from reduced runs."""
    too_few = ""
    if verdict.too_few and verdict.too_few == verdict.counts[UNDECIDED]:
        too_few = f": {TOO_FEW}" + " for a test of spread" * verdict.is_spread
    word = verdict.word + too_few * (verdict.word == UNDECIDED)
    return f"{word} {REDUCED}" if is_reduced(verdict) else word


def is_reduced(verdict: Verdict) -> bool:
    """Return whether the outcome of a claim comes from reduced runs."""
    return verdict.scale == "small" and verdict.word != NOT_TESTED


def count_outcomes(verdicts: Iterable[Verdict]) -> str:
    """Return the number of claims with each outcome, such as ``3 hold (reduced), 1 undecided``."""
    counts = Counter((verdict.word, is_reduced(verdict)) for verdict in verdicts)
    return ", ".join(
        f"{number} {PLURALS.get(word, word) if number > 1 else word}" + f" {REDUCED}" * reduced
        for word in OUTCOMES
        for reduced in (False, True)
        if (number := counts[word, reduced])
    )


def describe(comparison: Comparison, claim: Claim, verdict: Verdict) -> str:
    """Return a claim and its outcome as text."""
    if verdict.deciding is None:
        return f"**{outcome(verdict)}**: {claim.say}"
    explanation = f" {capitalised(claim.why)}." if claim.why and verdict.word != HOLDS else ""
    details = [*evidence(comparison, claim, verdict), coverage(comparison, claim, verdict)]
    if verdict.reduced:
        reduced = "; ".join(evidence(comparison, claim, verdict.reduced))
        details.append(f"reduced runs: {verdict.reduced.word}, {reduced}")
    beyond = "" if comparison.item.in_paper else f" {BEYOND}"
    return f"**{outcome(verdict)}**{beyond}: {claim.say} ({'; '.join(details)}).{explanation}"


def evidence(comparison: Comparison, claim: Claim, verdict: Verdict, *, brief: bool = False) -> list[str]:
    """Return what decides a claim, as parts of text; empty without runs.

    The parts are the rank of the claim's row, the numbers of comparisons with each outcome, the rows that are above the
    claim's row, and the deciding comparison with the result of its test. With ``brief``, omit the numbers of
    comparisons in each column and a list of more than ``MOST_ABOVE`` rows or of different rows in different columns.
    """
    test = verdict.deciding
    if test is None:
        return []
    item, difference = comparison.item, _deciding(comparison.item, claim, verdict)
    ranks = {} if verdict.word == HOLDS else _ranks(comparison, claim, verdict)
    parts = [_rank_text(item, ranks)] if ranks else []
    if len(verdict.tests) == 1:
        parts.append(f"{difference}, {_result(claim, test)}")
    elif verdict.too_few == len(verdict.tests):
        parts.append(f"{_too_few(claim)} in {_all(len(verdict.tests))} comparisons")
        if claim.spread:
            pairs = [test.deviations for test in verdict.tests if test.deviations]
            smaller = sum(below < above for above, below in pairs)
            name = joined([item.label(row) for row in claim.lower])
            parts.append(f"{name} has the smaller standard deviation in {smaller} of {len(pairs)}")
        parts.append(f"lowest difference: {difference}")
    else:
        parts.append(count_comparisons(verdict) + _exceptions(item, verdict))
        if not brief and _disagree(verdict) and len(verdict.counts) > 1:
            by_column = {column: [t for t in verdict.tests if t.pair.column == column] for column in verdict.columns}
            texts = {column: _counts(tests) for column, tests in by_column.items()}
            listed = "; ".join(f"{item.label(column)}: {text}" for column, text in texts.items())
            parts += [listed] if len(set(texts.values())) > 1 else []
        above = _above(comparison, claim, verdict)
        is_short = ";" not in above and all(rank <= MOST_ABOVE + 1 for rank, _ in ranks.values())
        if above and (is_short or not brief):
            parts.append(f"higher mean than {item.label(claim.higher[0])}{above}")
        tested = "tested " if verdict.too_few else ""
        which = f"{'largest' if claim.within is not None else 'lowest'} {tested}difference"
        which = "least significant" if verdict.word == HOLDS else which
        parts.append(f"{which}: {difference}, {_result(claim, test)}")
    if verdict.not_run:
        lower = dict.fromkeys(item.label(pair.lower) for pair in verdict.not_run)
        parts.append(f"not run: {', '.join(lower)}")
    return parts


def _means(comparison: Comparison, claim: Claim, verdict: Verdict) -> dict[str, dict[str, float]]:
    """Return the means of the rows in each tested column, if a claim compares one row with several rows."""
    if len(claim.higher) > 1 or len(claim.lower) == 1 or claim.within is not None or claim.spread:
        return {}
    return {} if " / " in claim.higher[0] else comparison.means(claim, verdict.scale)


def _ranks(comparison: Comparison, claim: Claim, verdict: Verdict) -> dict[str, tuple[int, int]]:
    """Return the rank by mean of a claim's row in each column, with the number of ranked rows."""
    return {
        column: (1 + sum(mean > means[claim.higher[0]] for mean in means.values()), len(means))
        for column, means in _means(comparison, claim, verdict).items()
    }


def _rank_text(item: Item, ranks: Mapping[str, tuple[int, int]]) -> str:
    """Return ranks as text, such as ``rank 6 of 9 in both columns``."""
    if len(set(ranks.values())) > 1:
        return "rank " + "; ".join(f"{rank} of {of} in {item.label(column)}" for column, (rank, of) in ranks.items())
    rank, of = next(iter(ranks.values()))
    return f"rank {rank} of {of}" + (f" in {_all(len(ranks))} columns" if len(ranks) > 1 else "")


def _ordinal(number: int) -> str:
    """Return a number as an ordinal, such as ``1st`` or ``12th``."""
    suffix = "th" if 10 < number % 100 < 14 else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{suffix}"


def _deciding(item: Item, claim: Claim, verdict: Verdict) -> str:
    """Return the deciding comparison of a claim, such as ``FedFew − IFCA, AG News: +1.25 ± 0.30 points``."""
    assert verdict.deciding is not None
    pair, deviations = verdict.deciding.pair, verdict.deciding.deviations
    column = f", {item.label(pair.column)}" if len(verdict.columns) > 1 else ""
    if deviations is not None:
        unit, digits = _unit(claim, ""), 2 if in_percent(claim.measure) else 3
        above, below = (f"{deviation:.{digits}f}" for deviation in deviations)
        rows = f"{above} ({item.label(pair.higher)}) and {below}{unit} ({item.label(pair.lower)})"
        return f"standard deviations of {rows}{column}"
    difference = _difference(item, claim, verdict.deciding.summary)
    return f"{item.label(pair.higher)} − {item.label(pair.lower)}{column}: {difference}"


def count_comparisons(verdict: Verdict) -> str:
    """Return the number of comparisons with each outcome, such as ``holds in 5, undecided in 3 of 8 comparisons``."""
    number = len(verdict.tests)
    against = ""
    if verdict.against > verdict.counts[FAILS]:
        against = f" ({verdict.against} significant against it before Holm)"
    too_few = f" ({verdict.too_few} with {TOO_FEW})" if verdict.too_few else ""
    if len(verdict.counts) == 1:
        return f"{verdict.word} in {_all(number)} comparisons{too_few}{against}"
    return f"{_counts(verdict.tests)} of {number} comparisons{too_few}{against}"


def _all(number: int) -> str:
    """Return ``both`` or, for example, ``all 3``."""
    return "both" if number == 2 else f"all {number}"


def _exceptions(item: Item, verdict: Verdict) -> str:
    """Return the rows that a claim allows to be above its row, as text."""
    rows = dict.fromkeys(item.label(test.pair.lower) for test in verdict.excepted)
    return f", without the best other method ({', '.join(rows)})" if rows else ""


def coverage(comparison: Comparison, claim: Claim, verdict: Verdict) -> str:
    """Return the data sets, columns and seeds of the runs that decide a claim.

    An example is ``CIFAR-10 and AG News; 2 of the claim's 9 columns, 3 seeds``.
    """
    tests = (*verdict.tests, *verdict.excepted)
    variants = [name for test in tests for name in comparison.variants_of(test.pair)]
    titles = dict.fromkeys(map(dataset_title, datasets(comparison, claim, variants, verdict.scale)))
    seeds = _seeds(verdict)
    total, columns = len(claim.variants or comparison.item.variants), ""
    if total > 1 and "" not in verdict.columns:
        columns = f"{_all(total)} columns, " if len(verdict.columns) == total else ""
        columns = columns or f"{len(verdict.columns)} of the claim's {total} columns, "
    return f"{joined([*titles])}; {columns}{seeds}" if titles else f"{columns}{seeds}"


def _seeds(verdict: Verdict) -> str:
    """Return the number of seeds of the comparisons, such as ``1 to 3 seeds``."""
    seeds = [test.summary.seeds for test in (*verdict.tests, *verdict.excepted)]
    return counted(max(seeds), "seed") if min(seeds) == max(seeds) else f"{min(seeds)} to {max(seeds)} seeds"


def _counts(tests: Sequence[PairTest]) -> str:
    """Return the number of comparisons with each outcome, such as ``holds in 5, undecided in 3``."""
    counts = Counter(test.word for test in tests)
    return ", ".join(f"{word} in {counts[word]}" for word in OUTCOMES if counts[word])


def _disagree(verdict: Verdict) -> bool:
    """Return whether the difference of two rows has opposite signs in two columns."""
    signs: dict[str, set[bool]] = {}
    for test in verdict.tests:
        signs.setdefault(str(test.pair), set()).add(test.summary.mean > 0)
    return any(len(of_pair) > 1 for of_pair in signs.values())


def _above(comparison: Comparison, claim: Claim, verdict: Verdict) -> str:
    """Return the rows with a higher mean than a claim's row, by column, such as ``in both columns: A; in x: B, C``.

    The means are over all seeds, as in the table.
    """
    item, by_column = comparison.item, _means(comparison, claim, verdict)
    columns_of: dict[str, list[str]] = {}
    for column, means in by_column.items():
        for row, mean in means.items():
            if mean > means[claim.higher[0]]:
                columns_of.setdefault(row, []).append(column)
    groups: dict[tuple[str, ...], list[str]] = {}
    for row, columns in columns_of.items():
        groups.setdefault(tuple(columns), []).append(item.label(row))
    if not groups:
        return ""
    texts = []
    for of_rows, rows in sorted(groups.items(), key=lambda group: -len(group[0])):
        where = joined([*map(item.label, of_rows)])
        where = f"{_all(len(of_rows))} columns" if len(of_rows) == len(by_column) else where
        texts.append(f" in {where}: {', '.join(rows)}" if len(by_column) > 1 else f": {', '.join(rows)}")
    return ";".join(texts)


def _too_few(claim: Claim) -> str:
    """Return that a claim has too few seeds for its test."""
    return f"{TOO_FEW} for a test" + " of spread" * claim.spread


def _result(claim: Claim, test: PairTest) -> str:
    """Return the result of a test, such as ``p = 0.010``, with the name of the test unless it is a paired t-test."""
    if test.p_value is None:
        return _too_few(claim)
    if test.summary.std == 0:
        return "the same in all runs"
    p_value = ("p < 0.001" if test.p_value < 0.001 else f"p = {test.p_value:.3f}").replace(" ", SPACE)
    if test.adjusted:
        p_value = f"Holm-adjusted {p_value}"
    if claim.spread:
        return f"paired t-test on absolute deviations from the mean: {p_value}"
    if claim.within is not None:
        unit = _unit(claim, f"{claim.within:g}")
        return f"equivalence test within ±{claim.within:g}{unit}: {p_value}"
    if claim.by < 0:
        return f"non-inferiority test within {-claim.by:g}{_unit(claim, f'{-claim.by:g}')}: {p_value}"
    return p_value


def _unit(claim: Claim, number: str) -> str:
    """Return the unit of a difference, with a leading space."""
    unit = "point" if in_percent(claim.measure) else "byte" if claim.measure.startswith("bytes") else ""
    return f" {unit}{'' if number == '1' else 's'}" if unit else ""


def _difference(item: Item, claim: Claim, number: Number) -> str:
    """Return the difference that decides a claim as text, such as ``+1.25 ± 0.30 points``."""
    mean, digits = number.mean, 0 if claim.measure.startswith("bytes") else 2 if in_percent(claim.measure) else 3
    if (size := max(abs(mean), number.std or 0.0)) and size < 1:
        digits = max(digits, -math.floor(math.log10(size)))
    std = "" if number.std is None else f" ± {number.std:.{digits}f}"
    unit = _unit(claim, "") or f" ({item.measure_label(claim.measure)})"
    return f"{without_negative_zero(f'{mean:+.{digits}f}')}{std}{unit}"


def anchor(title: str) -> str:
    """Return GitHub's anchor for a heading."""
    return re.sub(r"[^\w-]", "", title.lower().replace(" ", "-"))
