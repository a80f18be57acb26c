"""Write the page of a paper: its tables and figures, the state of each number, and the outcomes of the claims."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from textwrap import fill

from posy.commands.papers.compare import DIFFERS, DRAWN, NOT_RUN, REPRODUCED, Comparison, Entry
from posy.commands.papers.draw import draw, table
from posy.commands.papers.item import Claim, items
from posy.commands.papers.record import in_percent
from posy.commands.papers.verdict import OUTCOMES, Verdict
from posy.commands.table import machines
from posy.data.errors import DataError
from posy.server_app.progress import duration
from posy.settings import Scalar
from posy.strategies.registry import PAPERS, declared
from posy.words import capitalised

LEGEND = (
    "The first lines under each heading describe the paper's table or figure. In each table cell, an arrow separates "
    "the paper's number from Posy's number, which is a mean ± standard deviation over the seeds. ✓ marks numbers that "
    "agree to within one percentage point, or to within two if the difference is at most two standard deviations. For "
    "numbers that are not percentages, these limits are 0.01 and 0.02. ≈ marks numbers that agree in runs at the small "
    "scale, and ≠ marks numbers that differ. *Plotted* means that the paper does not print the number. The full scale "
    "matches the paper's experiments, and the small scale is a reduced run.",
    "*Served* is the model that a client receives from the server. *Local* is the same model after local training. "
    "*Own* is the method's evaluation point, which is either served or local. *Last* is the last round, and *average* "
    "is the mean over the last rounds. *Upper-bound* is the round with the best result on the test samples, which "
    "papers often report. Results are means over the clients, and *weighted* means are weighted by the clients' "
    "numbers of training samples. *System* accuracy is the accuracy on the pooled test samples of all clients, treated "
    "as inputs of unknown origin. See [Runs](../how-to/runs.md#what-a-run-leaves) for details.",
    "Most claims state that one row scores higher than another. To confirm or refute such a claim, Posy uses a paired "
    "t-test at the 5 % level, with one pair of results for each seed and column. Otherwise the claim is within the "
    "noise, or has too few runs if there are fewer than three pairs. If a claim compares one row with several rows, "
    "Posy tests each pair of rows with Holm's correction. It confirms the claim if the row scores higher than all "
    "others, and refutes the claim if any other row scores higher. The brackets contain the mean difference that "
    "decides the outcome. For a claim about spreads, Posy compares the distances from the mean over the seeds "
    "(Levene's test). For a claim that two rows are close, Posy uses two one-sided t-tests. Posy compares only runs at "
    "the same scale. In the table below, (small) denotes the small scale.",
)
"""Explanations at the start of each page."""
UNKNOWN = "the reason is unknown"
"""Text for a number that differs from the paper's for no known reason."""


def page(paper: str, comparisons: Sequence[Comparison], pictures: Sequence[str]) -> str:
    """Return the page of a paper as Markdown; ``pictures`` are the names of the figures in its folder."""
    about = (PAPERS / paper / "README.md").read_text(encoding="utf-8").strip()
    parts = [f"<!-- Written by `posy paper {paper}`. -->", about, *map(_filled, LEGEND)]
    titles = [comparison.item.title.partition(":")[0] for comparison in comparisons]
    lines = [["", "numbers", "claims"], ["---", "---", "---"]]
    for comparison, title in zip(comparisons, titles, strict=True):
        lines.append([f"[{title}](#{_anchor(title)})", states(comparison, pictures), claims(comparison)])
    parts.append("\n".join("| " + " | ".join(line) + " |" for line in lines))
    if seconds := _at_scale_small(comparisons):
        parts.append(
            _filled(f"The runs at the small scale take {duration(seconds)} sequentially, or half as long on two cores.")
        )
    for comparison, title in zip(comparisons, titles, strict=True):
        parts += [f"## {title}", *_section(paper, comparison, pictures)]
    return "\n\n".join(filter(None, parts)) + "\n"


def states(comparison: Comparison, pictures: Sequence[str]) -> str:
    """Return how many of a comparison's numbers are in each state, or the state of a figure that needs no runs."""
    if comparison.item.draws_alone:
        return DRAWN if _picture(comparison.item.paper, comparison) in pictures else NOT_RUN
    counts = Counter(entry.state for entry in comparison.entries)
    return ", ".join(
        f"{number} {'differ' if state == DIFFERS and number > 1 else state}" for state, number in counts.items()
    )


def claims(comparison: Comparison) -> str:
    """Return how many of a comparison's claims have each outcome."""
    return count_words(_outcome(verdict) for _, verdict in comparison.verdicts)


def changed(comparison: Comparison, scale: str) -> str:
    """Return the settings of a scale that differ from the paper's, as ``key value (paper's value)``.

    The additional settings of each row or variant follow, separated by semicolons.
    """
    small = comparison.item.content.get("small", {}) if scale == "small" else {}
    plan = comparison.item.plan("full") if comparison.decisive else comparison.plans["full"]
    full = [cell.config for cell in plan.cells]
    changes = []
    for key, value in {**small.get("settings", {}), **comparison.decisive}.items():
        papers = dict.fromkeys(_shown(key, config.get(key, declared()[key].default)) for config in full)
        papers.pop("", None)  # the value of methods without this setting
        if list(papers) != [_shown(key, value)]:
            changes.append(f"{key} {_shown(key, value)} ({' or '.join(papers)})")
    parts = [", ".join(changes)] if changes else []
    for name, settings in {**small.get("runs", {}), **small.get("variants", {})}.items():
        additional = [
            f"{key} {_shown(key, value)}" for key, value in settings.items() if key not in comparison.decisive
        ]
        parts += [f"{name}: {', '.join(additional)}"] if additional else []
    return "; ".join(parts)


def verdicts(paper: str, folder: Path | None = None) -> list[str]:
    """Return the outcome of each claim in a paper, from the runs in a folder, with confirmed claims first."""
    comparisons = [Comparison(item, folder=folder) for item in items(paper) if item.in_paper]
    every_verdict = (verdict for comparison in comparisons for _, verdict in comparison.verdicts)
    return [_outcome(verdict) for verdict in sorted(every_verdict, key=lambda verdict: OUTCOMES.index(verdict.word))]


def count_words(words: Iterable[str]) -> str:
    """Return the number of occurrences of each word as text, such as ``3 reproduced, 1 differs``."""
    return ", ".join(f"{number} {word}" for word, number in Counter(words).items())


def write(
    paper: str, folder: Path, overrides: Mapping[str, Scalar] | None = None, runs: Path | None = None
) -> list[Comparison]:
    """Write the page of a paper and its figures into a folder, and return the comparisons that the page shows.

    The page uses the finished runs of ``posy paper``, or the runs in the folder ``runs`` with the settings
    ``overrides``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    comparisons = [Comparison(item, overrides, runs) for item in items(paper)]
    for comparison in comparisons:
        if comparison.cells or comparison.counts or comparison.item.draws_alone:
            with suppress(DataError):  # the page names the missing data
                draw(comparison, folder / _picture(paper, comparison))
    (folder / f"{paper}.md").write_text(page(paper, comparisons, pictures_in(folder)), encoding="utf-8")
    return comparisons


def pictures_in(folder: Path) -> list[str]:
    """Return the names of the figures in a folder."""
    return sorted(file.name for file in folder.glob("*.png"))


def overview(papers: Mapping[str, Sequence[Comparison]]) -> list[list[str]]:
    """Return a row per paper: its number of claims, in total and per outcome, and its number of values per state."""
    rows = []
    for paper, all_comparisons in papers.items():
        comparisons = [comparison for comparison in all_comparisons if comparison.item.in_paper]
        words = Counter(verdict.word for comparison in comparisons for _, verdict in comparison.verdicts)
        states_of_numbers = Counter(entry.state for comparison in comparisons for entry in comparison.entries)
        row = [paper, str(words.total())]
        row += [str(words[word]) for word in OUTCOMES]
        row += [str(states_of_numbers[state]) for state in (REPRODUCED, DIFFERS, DRAWN, NOT_RUN)]
        rows.append(row)
    return rows


def _section(paper: str, comparison: Comparison, pictures: Sequence[str]) -> list[str]:
    item = comparison.item
    about = item.title.partition(": ")[2].strip()
    stop = "" if about.endswith("?") else "."
    parts = [_filled(f"{capitalised(about)}{stop} {item.content.get('shows', '')}")]
    if item.content.get("runs"):
        scales = comparison.scales or item.scales[:1]
        overrides = "".join(f" {key}={_typed(value)}" for key, value in comparison.decisive.items())
        command = " and ".join(
            f"`posy paper {paper} {item.name} --scale {scale}{_more_seeds(comparison, scale)}{overrides}`"
            for scale in scales
        )
        run_time = f" ({duration(_seconds(comparison))} of run time)" if comparison.cells else ""
        measures = f"{'; '.join(item.measures)}{_points(comparison)}"
        parts.append(_filled(f"Command: {command}{run_time}. Metrics: {measures}.{_seeds(comparison)}"))
        for scale in comparison.scales:
            if changes := changed(comparison, scale):
                parts.append(_filled(f"Settings at the {scale} scale, with the paper's values in brackets: {changes}."))
    if item.kind == "partition":
        parts.append(f"Command: `posy paper {paper} {item.name}`, which does not need any runs.")
    if item.rows and (item.printed or comparison.entries):
        parts.append(table(comparison))
    if (name := _picture(paper, comparison)) in pictures:
        parts.append(f"![{item.title.partition(':')[0]}]({name})")
    elif item.draws_alone:
        parts.append(_filled(f"{capitalised(NOT_RUN)}: {comparison.needed()}."))
    if comparison.verdicts:
        parts.append("\n".join(f"- {_describe(claim, verdict)}" for claim, verdict in comparison.verdicts))
    parts += map(_filled, _notes(comparison))
    parts += map(_filled, _reasons(comparison))
    if comparison.cells:
        results = {cell: cell.summary() or {} for _, cells in comparison.cells.values() for cell in cells}
        parts += [_filled(f"Machine: {line}.") for line in machines(results)]
    return parts


def _notes(comparison: Comparison) -> list[str]:
    """Return a note on diverged runs, and the observations in the item's file."""
    cells = [cell for plan in comparison.plans.values() for cell in plan.cells] if comparison.item.has_runs else []
    names = dict.fromkeys(cell.name for cell in cells if cell.summary("diverged") is not None)
    diverged = [f"Diverged and excluded: {'; '.join(names)}."] if names else []
    observations = [str(comparison.item.content["here"])] if "here" in comparison.item.content else []
    return diverged + observations


def _reasons(comparison: Comparison) -> list[str]:
    """Explain why numbers differ from the paper's or are missing: one paragraph per reason, with the positions."""
    reasons: dict[tuple[str, str], list[Entry]] = {}
    for entry in comparison.entries:
        if entry.state in (DIFFERS, NOT_RUN):
            reasons.setdefault((entry.state, entry.why or UNKNOWN), []).append(entry)
    labels = {DIFFERS: "Different from the paper", NOT_RUN: "Not run"}
    return [
        f"{labels[state]}: {_positions(entries, comparison)}. {capitalised(reason)}."
        for (state, reason), entries in reasons.items()
    ]


def _seconds(comparison: Comparison) -> float:
    """Return the sum of the wall-clock times of the runs, in seconds."""
    summaries = (cell.summary() or {} for _, cells in comparison.cells.values() for cell in cells)
    return float(sum(summary["seconds"] for summary in summaries))


def _more_seeds(comparison: Comparison, scale: str) -> str:
    """Return the option ``--seeds`` if runs at a scale have seeds that the item does not list, else an empty string."""
    seeds = {cell.seed for drawn_at, cells in comparison.cells.values() if drawn_at == scale for cell in cells}
    return f" --seeds {max(seeds) + 1}" if seeds - {*comparison.item.seeds(scale)} else ""


def _filled(text: str) -> str:
    """Wrap text at 120 characters without breaking file names."""
    return fill(text, 120, break_on_hyphens=False, break_long_words=False)


def _positions(entries: Sequence[Entry], comparison: Comparison) -> str:
    """Return the positions of entries: rows with their column, or only the column if all its entries are included."""
    if len(entries) == len(comparison.entries):
        return "all numbers"
    sizes, listed = (Counter(entry.variant for entry in group) for group in (comparison.entries, entries))
    names = (
        entry.variant if sizes[entry.variant] == listed[entry.variant] else f"{entry.variant} / {entry.row}"
        for entry in entries
    )
    return "; ".join(dict.fromkeys(name.removeprefix(" / ") for name in names))


def _points(comparison: Comparison) -> str:
    """Return text that lists the rows with a different evaluation point or measure."""
    points: dict[str, list[str]] = {}
    for row, point in comparison.item.content.get("points", {}).items():
        points.setdefault(point, []).append(row)
    for row, (_, measure) in comparison.item.readings.items():
        if [measure] != comparison.item.measures:
            points.setdefault(measure, []).append(row)
    return "".join(f"; {point} ({'; '.join(rows)})" for point, rows in points.items())


def _seeds(comparison: Comparison) -> str:
    """Return a sentence with the most frequent number of seeds, or an empty string if there are no numbers."""
    seeds = comparison.usual_seeds
    return f" Number of seeds: {seeds}, unless stated otherwise in the table." if seeds else ""


def _at_scale_small(comparisons: Sequence[Comparison]) -> float:
    """Return the total time, in seconds, of the distinct runs at the small scale whose seeds the files list."""
    summaries = {
        frozenset(cell.decisive.items()): cell.summary() or {}
        for comparison in comparisons
        for cells in comparison.finished.get("small", {}).values()
        for cell in cells
        if cell.seed in comparison.item.seeds("small")
    }
    return float(sum(summary["seconds"] for summary in summaries.values()))


def _describe(claim: Claim, verdict: Verdict) -> str:
    """Return a claim and its outcome as text."""
    if verdict.difference is None:
        return f"{claim.say}: **{verdict.word}**"
    digits = 2 if in_percent(claim.measure) else 3
    if size := max(abs(verdict.difference), verdict.std or 0.0):
        digits = max(digits, -math.floor(math.log10(size)))
    std = "" if verdict.std is None else f" ± {verdict.std:.{digits}f}"
    details = [f"{verdict.difference:+.{digits}f}{std}", f"{verdict.pairs} pair{'s' * (verdict.pairs > 1)}"]
    if verdict.of:
        agreeing = f"claim confirmed in {verdict.confirmed} of {verdict.compared} comparisons"
        details = [f"{verdict.of}: {details[0]}", details[1], agreeing]
    explanation = f". {capitalised(claim.why)}." if claim.why and verdict.word not in ("confirmed", "not run") else ""
    scale = " at the small scale" if verdict.scale == "small" else ""
    return f"{claim.say}: **{verdict.word}**{scale} ({', '.join(details)}){explanation}"


def _outcome(verdict: Verdict) -> str:
    """Return the outcome of a claim, with a mark if its runs are at the small scale."""
    return f"{verdict.word} (small)" if verdict.scale == "small" and verdict.difference is not None else verdict.word


def _shown(key: str, value: Scalar) -> str:
    """Format a setting's value for display."""
    return "all" if key == "max-samples" and value == 0 else _typed(value)


def _typed(value: Scalar) -> str:
    """Format a setting's value as on the command line."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _picture(paper: str, comparison: Comparison) -> str:
    return f"{paper}-{comparison.item.name}.png"


def _anchor(title: str) -> str:
    """Return GitHub's anchor for a heading."""
    return "".join(c for c in title.lower().replace(" ", "-") if c.isalnum() or c in "-_")
