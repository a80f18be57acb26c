"""A paper's page: its tables and figures, each number's state, and the claims."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from textwrap import fill

from posy.commands.papers.compare import DIFFERS, DRAWN, NOT_RUN, REPRODUCED, Comparison, Entry, typed
from posy.commands.papers.draw import draw, table
from posy.commands.papers.item import Claim, items
from posy.commands.papers.record import in_percent
from posy.commands.papers.verdict import OUTCOMES, Verdict
from posy.commands.table import machines
from posy.data.errors import DataError
from posy.server_app.progress import duration
from posy.settings import Scalar
from posy.strategies.registry import PAPERS

LEGEND = (
    "Under each heading stands what the paper shows. Tables give the paper's number → ours, as mean ± standard "
    "deviation over the seeds. ✓ means the same: within one point, or within two points if that is at most two "
    "standard deviations (0.01 and 0.02 for numbers that are not percentages). ≈ means the same, but at scale small; "
    "≠ means not the same. *Drawn* means that the paper prints no number to compare with.",
    "*Served* is the model that a client holds after the server's message; *local* is that model after the client's "
    "own training; *own* is whichever of the two the method is made for. *Last* is the last round, *average* the mean "
    "over the last rounds, and *upper-bound* the round that is best on the test samples, which papers often report. "
    "The mean is over the clients; *weighted* weighs them by their training samples. *System* accuracy is measured on "
    "all clients' test samples, when a query names no client. [docs/runs.md](../runs.md#what-a-run-leaves) has more.",
    "A claim says that one row is higher than another. It is judged by their differences, paired by seed and column. "
    "A t-test at 5 % confirms or refutes it; otherwise it is within the noise, or, with fewer than three pairs, there "
    "are too few runs. A claim that a row is above several others is confirmed if the row is above each of them, and "
    "refuted if any is above it (Holm's correction); the brackets give the difference that decided. A claim about "
    "spreads compares the distances from the mean over the seeds (Levene's test); a claim that two rows are close "
    "takes two one-sided t-tests. Runs at different scales are never compared; (small) marks the smaller scale.",
)
"""How to read a page."""


def page(paper: str, comparisons: Sequence[Comparison], pictures: Sequence[str]) -> str:
    """Return the page of a paper as Markdown; ``pictures`` are the names of the figures that lie beside it."""
    about = (PAPERS / paper / "README.md").read_text(encoding="utf-8").strip()
    parts = [f"<!-- Written by `posy paper {paper}`. -->", about, *map(_filled, LEGEND)]
    told = [one.item.title.partition(":")[0] for one in comparisons]
    lines = [["", "state of its numbers", "claims"], ["---", "---", "---"]]
    for one, title in zip(comparisons, told, strict=True):
        lines.append([f"[{title}](#{_anchor(title)})", states(one, pictures), claims(one)])
    parts.append("\n".join("| " + " | ".join(line) + " |" for line in lines))
    if seconds := _at_scale_small(comparisons):
        parts.append(
            _filled(f"All runs at scale small: {duration(seconds)} one after the other, half of that on two cores.")
        )
    for one, title in zip(comparisons, told, strict=True):
        parts += [f"## {title}", *_section(paper, one, pictures)]
    return "\n\n".join(filter(None, parts)) + "\n"


def states(comparison: Comparison, pictures: Sequence[str]) -> str:
    """Return how many of its numbers are in which state; of a picture without runs, whether it is drawn."""
    if comparison.item.draws_alone:
        return DRAWN if _picture(comparison.item.paper, comparison) in pictures else NOT_RUN
    return told_of(entry.state for entry in comparison.entries)


def claims(comparison: Comparison) -> str:
    """Return how many of its claims came out how."""
    return told_of(_outcome(verdict) for _, verdict in comparison.verdicts)


def verdicts(paper: str, folder: Path | None = None) -> list[str]:
    """Return what came of each claim of a paper itself, by the runs in a folder, what is confirmed first."""
    own = [Comparison(one, folder=folder) for one in items(paper) if one.in_paper]
    found = sorted((verdict for one in own for _, verdict in one.verdicts), key=lambda each: OUTCOMES.index(each.word))
    return [_outcome(verdict) for verdict in found]


def told_of(words: Iterable[str]) -> str:
    """Return how often there is each word: of a number's state, or of a claim."""
    return ", ".join(f"{number} {word}" for word, number in Counter(words).items())


def write(
    paper: str, folder: Path, given: Mapping[str, Scalar] | None = None, runs: Path | None = None
) -> list[Comparison]:
    """Write the page of a paper and its figures into a folder, from the runs that there are; return what it shows.

    These are the ones that ``posy paper`` made, or those with settings that were ``given``, in the folder ``runs``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    comparisons = [Comparison(one, given, runs) for one in items(paper)]
    for one in comparisons:
        if one.cells or one.counts or one.item.draws_alone:
            with suppress(DataError):  # the page tells what is needed
                draw(one, folder / _picture(paper, one))
    (folder / f"{paper}.md").write_text(page(paper, comparisons, pictures_in(folder)), encoding="utf-8")
    return comparisons


def pictures_in(folder: Path) -> list[str]:
    """Return the names of the figures in a folder."""
    return sorted(file.name for file in folder.glob("*.png"))


def overview(papers: Mapping[str, Sequence[Comparison]]) -> list[list[str]]:
    """Return a row for each paper: claims, how many came out how, and its numbers' states."""
    rows = []
    for paper, all_of_it in papers.items():
        comparisons = [one for one in all_of_it if one.item.in_paper]
        words = Counter(verdict.word for one in comparisons for _, verdict in one.verdicts)
        found = Counter(entry.state for one in comparisons for entry in one.entries)
        row = [paper, str(words.total())]
        row += [str(words[word]) for word in OUTCOMES]
        row += [str(found[state]) for state in (REPRODUCED, DIFFERS, DRAWN, NOT_RUN)]
        rows.append(row)
    return rows


def _section(paper: str, one: Comparison, pictures: Sequence[str]) -> list[str]:
    item = one.item
    about = item.title.partition(": ")[2].strip()
    stop = "" if about.endswith("?") else "."
    parts = [_filled(f"{about[0].upper()}{about[1:]}{stop} {item.content.get('shows', '')}")]
    if item.content.get("runs"):
        scales = one.scales or item.scales[:1]
        given = "".join(f" {key}={typed(value)}" for key, value in one.decisive.items())
        command = " and ".join(
            f"`posy paper {paper} {item.name} --scale {scale}{_more_seeds(one, scale)}{given}`" for scale in scales
        )
        ran = f"; {duration(one.seconds)} of runs" if one.cells else ""
        parts.append(_filled(f"{command}{ran}. Measured: {'; '.join(item.measures)}{_points(one)}{_seeds(one)}."))
        for scale in one.scales:
            if told := one.changed(scale):
                parts.append(_filled(f"Scale {scale}, in brackets the paper's: {told}."))
    if item.kind == "partition":
        parts.append(f"`posy paper {paper} {item.name}`, which runs nothing.")
    if item.rows and (item.printed or one.entries):
        parts.append(table(one))
    if (name := _picture(paper, one)) in pictures:
        parts.append(f"![{item.title.partition(':')[0]}]({name})")
    elif item.draws_alone:
        parts.append(_filled(f"{NOT_RUN}: {one.needed()}."))
    if one.verdicts:
        parts.append("\n".join(f"- {_told(claim, verdict)}" for claim, verdict in one.verdicts))
    parts += map(_filled, _notes(one))
    reasons: dict[str, list[Entry]] = {}
    for entry in one.entries:
        if entry.state in (DIFFERS, NOT_RUN):
            reasons.setdefault(f"{entry.state}: {entry.why or 'open'}", []).append(entry)
    parts += [_filled(f"{_places(entries, one)}: {why}.") for why, entries in reasons.items()]
    if one.cells:
        results = {cell: cell.summary() or {} for _, cells in one.cells.values() for cell in cells}
        parts += [_filled(f"Machine: {line}.") for line in machines(results)]
    return parts


def _notes(one: Comparison) -> list[str]:
    """Return what is told of the runs beside their numbers: which have diverged, and what is seen here."""
    diverged = [f"Diverged, and left out: {'; '.join(one.diverged)}."] if one.diverged else []
    here = [f"Here: {one.item.content['here']}"] if "here" in one.item.content else []
    return diverged + here


def _more_seeds(one: Comparison, scale: str) -> str:
    """Return the option that asks for the seeds at a scale, where they are more than the item's own."""
    seeds = {cell.seed for own, cells in one.cells.values() if own == scale for cell in cells}
    return f" --seeds {max(seeds) + 1}" if seeds - {*one.item.seeds(scale)} else ""


def _filled(text: str) -> str:
    """Return a text in lines that no name of a file is broken by."""
    return fill(text, 120, break_on_hyphens=False, break_long_words=False)


def _places(entries: Sequence[Entry], one: Comparison) -> str:
    """Return where some entries stand: rows with their column, and a whole column by its name alone."""
    if len(entries) == len(one.entries):
        return "All numbers"
    sizes, own = (Counter(entry.variant for entry in some) for some in (one.entries, entries))
    names = (
        entry.variant if sizes[entry.variant] == own[entry.variant] else f"{entry.variant} / {entry.row}"
        for entry in entries
    )
    return "; ".join(dict.fromkeys(name.removeprefix(" / ") for name in names))


def _points(one: Comparison) -> str:
    """Return the rows that have an evaluation point or a measure of their own."""
    points: dict[str, list[str]] = {}
    for row, point in one.item.content.get("points", {}).items():
        points.setdefault(point, []).append(row)
    for row, (_, measure) in one.item.readings.items():
        if [measure] != one.item.measures:
            points.setdefault(measure, []).append(row)
    return "".join(f"; {point} of {', '.join(rows)}" for point, rows in points.items())


def _seeds(one: Comparison) -> str:
    """Return over how many seeds most numbers are."""
    seeds = one.usual_seeds
    return f"; over {seeds} seed{'s' * (seeds > 1)}" if seeds else ""


def _at_scale_small(comparisons: Sequence[Comparison]) -> float:
    """Return the seconds of all runs at scale small, each once, with the items' own seeds."""
    ran = {
        frozenset(cell.decisive.items()): cell.summary() or {}
        for one in comparisons
        for cells in one.finished.get("small", {}).values()
        for cell in cells
        if cell.seed in one.item.seeds("small")
    }
    return float(sum(summary["seconds"] for summary in ran.values()))


def _told(claim: Claim, verdict: Verdict) -> str:
    """Return a claim and what came of it, with the scale in words."""
    if verdict.difference is None:
        return f"{claim.say}: **{verdict.word}**"
    digits = 2 if in_percent(claim.measure) else 3
    if size := max(abs(verdict.difference), verdict.std or 0.0):
        digits = max(digits, -math.floor(math.log10(size)))
    std = "" if verdict.std is None else f" ± {verdict.std:.{digits}f}"
    told = [f"{verdict.difference:+.{digits}f}{std}", f"{verdict.pairs} pair{'s' * (verdict.pairs > 1)}"]
    if verdict.of:
        told = [f"{verdict.of}: {told[0]}", told[1], f"as claimed in {verdict.confirmed} of {verdict.compared}"]
    why = f": {claim.why}" if claim.why and verdict.word not in ("confirmed", "not run") else ""
    scale = " at scale small" if verdict.scale == "small" else ""
    return f"{claim.say}: **{verdict.word}**{scale} ({', '.join(told)}){why}"


def _outcome(verdict: Verdict) -> str:
    """Return what came of a claim, with a mark if it was judged at scale small."""
    return f"{verdict.word} (small)" if verdict.scale == "small" and verdict.difference is not None else verdict.word


def _picture(paper: str, one: Comparison) -> str:
    return f"{paper}-{one.item.name}.png"


def _anchor(title: str) -> str:
    """Return the anchor that GitHub gives a heading."""
    return "".join(c for c in title.lower().replace(" ", "-") if c.isalnum() or c in "-_")
