"""The main claims of a paper, with the outcomes of the claims in its tables and figures that decide them."""

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from posy.commands.papers.compare import Comparison
from posy.commands.papers.item import MAIN_CLAIMS, Claim, Item, items
from posy.commands.papers.record import in_percent
from posy.commands.papers.requirements import datasets, reductions
from posy.commands.papers.tables import markdown_table
from posy.commands.papers.verdict import FAILS, HOLDS, NOT_TESTED, OUTCOMES, Verdict
from posy.settings import SettingsError
from posy.strategies.registry import PAPERS
from posy.words import capitalised, counted
from posy.yaml12 import read_yaml

KEYS = ("say", "in", "claim")
"""Keys of a main claim: its text, the file of a table or figure without ``.yaml``, and the text of a claim there."""
BOX = ("main claim", "verdict", "evidence", "runs")
"""Columns of the verdict box."""
REDUCED = "(reduced)"
"""Mark of an outcome from reduced runs."""
PLURALS = {HOLDS: "hold", FAILS: "do not hold"}


@dataclass(frozen=True)
class MainClaim:
    """A main claim of a paper, and the claim in one of its tables and figures that decides it."""

    say: str
    item: Item
    claim: Claim


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
    claims = []
    for entry in read_yaml(file).get("claims", []):
        if not isinstance(entry, dict) or set(entry) != set(KEYS):
            raise SettingsError(f"{entry!r} in {file}: a main claim has the keys {', '.join(KEYS)}")
        item = by_name.get(entry["in"])
        claim = next((claim for claim in item.claims if claim.say == entry["claim"]), None) if item else None
        if item is None or claim is None:
            raise SettingsError(f"{entry['say']!r} in {file}: {entry['in']} has no claim {entry['claim']!r}")
        claims.append(MainClaim(entry["say"], item, claim))
    return claims


def main_verdicts(paper: str, comparisons: Sequence[Comparison]) -> list[tuple[MainClaim, Verdict]]:
    """Return the outcome of each main claim of a paper."""
    outcomes = {
        (comparison.item.name, claim.say): verdict
        for comparison in comparisons
        for claim, verdict in comparison.verdicts
    }
    return [(main, outcomes[main.item.name, main.claim.say]) for main in main_claims(paper)]


def verdict_box(
    verdicts: Sequence[tuple[MainClaim, Verdict]], comparisons: Sequence[Comparison], links: Mapping[str, str]
) -> str:
    """Return the verdict box of a paper in Markdown; ``links`` contains the link to each table and figure."""
    by_name = {comparison.item.name: comparison for comparison in comparisons}
    lines: list[Sequence[str]] = [BOX, ["---"] * len(BOX)]
    for main, verdict in verdicts:
        comparison, size, link = by_name[main.item.name], "full size", links[main.item.name]
        if verdict.word == NOT_TESTED:
            size = f"needs {' and '.join(datasets(comparison, main.claim))}"
        elif verdict.scale == "small":
            size = f"reduced: {reductions(comparison, main.claim)}"
        word = outcome(verdict).replace(verdict.word, f"**{verdict.word}**")
        lines.append([main.say, word, evidence(main.claim, verdict), f"{link}, {size}"])
    return markdown_table(lines)


def read_box(page: str) -> list[list[str]]:
    """Return the rows of the verdict box on a paper's page, without the header."""
    _, _, after = page.partition(markdown_table([BOX]))
    rows = after.partition("\n\n")[0].splitlines()[2:]
    return [row.strip("| ").split(" | ") for row in rows]


def counts_in(rows: Iterable[Sequence[str]]) -> str:
    """Return the number of main claims with each outcome, from the rows of a verdict box."""
    return count_outcomes(row[1].replace("*", "") for row in rows)


def outcome(verdict: Verdict) -> str:
    """Return the outcome of a claim, with a mark if it comes from reduced runs."""
    return f"{verdict.word} {REDUCED}" if is_reduced(verdict) else verdict.word


def is_reduced(verdict: Verdict) -> bool:
    """Return whether the outcome of a claim comes from reduced runs."""
    return verdict.scale == "small" and verdict.word != NOT_TESTED


def count_outcomes(outcomes: Iterable[str]) -> str:
    """Return the number of claims with each outcome, such as ``3 hold (reduced), 1 undecided``."""
    counts = Counter(outcomes)
    order = [text for word in OUTCOMES for text in (word, f"{word} {REDUCED}") if text in counts]

    def words(text: str) -> str:
        word = text.removesuffix(f" {REDUCED}")
        return text.replace(word, PLURALS.get(word, word)) if counts[text] > 1 else text

    return ", ".join(f"{counts[text]} {words(text)}" for text in order)


def describe(claim: Claim, verdict: Verdict) -> str:
    """Return a claim and its outcome as text."""
    if verdict.difference is None:
        return f"**{outcome(verdict)}**: {claim.say}"
    explanation = f" {capitalised(claim.why)}." if claim.why and verdict.word != HOLDS else ""
    return f"**{outcome(verdict)}**: {claim.say} ({evidence(claim, verdict)}).{explanation}"


def evidence(claim: Claim, verdict: Verdict) -> str:
    """Return what decides a claim: the difference, the seeds and the result of the test; empty if untested.

    An example is ``FedFew − IFCA: +1.25 ± 0.30 points, 3 seeds in 2 columns, p = 0.010``. If a claim does not hold in
    all comparisons of two rows, the text also states in how many of them it holds.
    """
    if verdict.difference is None:
        return ""
    p_value = verdict.p_value
    seeds = counted(verdict.seeds, "seed")
    if verdict.columns > 1:
        seeds += f" in {verdict.columns} columns"
        if verdict.pairs != verdict.seeds * verdict.columns:
            seeds += f" ({verdict.pairs} pairs)"
    if p_value is None:
        test = "too few for a test"
    elif verdict.std == 0:
        test = "the same in all runs"
    else:
        test = "p < 0.001" if p_value < 0.001 else f"p = {p_value:.3f}"
    holding = f"the weakest of {verdict.compared} comparisons, {verdict.holding} of which hold"
    some_fail = verdict.holding < verdict.compared > 1
    return ", ".join([_difference(claim, verdict.difference, verdict), seeds, test, *([holding] if some_fail else [])])


def _difference(claim: Claim, mean: float, verdict: Verdict) -> str:
    """Return the difference that decides a claim as text, such as ``FedFew − IFCA: +1.25 ± 0.30 points``."""
    digits = 0 if claim.measure.startswith("bytes") else 2 if in_percent(claim.measure) else 3
    if (size := max(abs(mean), verdict.std or 0.0)) and size < 1:
        digits = max(digits, -math.floor(math.log10(size)))
    std = "" if verdict.std is None else f" ± {verdict.std:.{digits}f}"
    unit = " points" if in_percent(claim.measure) else " bytes" if claim.measure.startswith("bytes") else ""
    return f"{verdict.of}: {mean:+.{digits}f}{std}{unit}"


def anchor(title: str) -> str:
    """Return GitHub's anchor for a heading."""
    return re.sub(r"[^\w-]", "", title.lower().replace(" ", "-"))
