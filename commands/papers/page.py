"""Write the page of a paper: the verdicts on its main claims, then its tables and figures."""

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from textwrap import fill
from typing import Any

from posy.commands.papers.claims import (
    anchor,
    common_reductions,
    count_outcomes,
    describe,
    first_verdict,
    is_reduced,
    main_verdicts,
    summary,
    verdict_box,
)
from posy.commands.papers.compare import DIFFERS, DRAWN, NOT_COMPARABLE, NOT_RUN, STATES, Comparison, Entry
from posy.commands.papers.draw import draw
from posy.commands.papers.item import items
from posy.commands.papers.requirements import missing_runs, needed_to_draw, needs, reductions
from posy.commands.papers.tables import markdown_table, table
from posy.commands.papers.verdict import MIN_SEEDS, MIN_SPREAD_SEEDS, NOT_TESTED, OUTCOMES
from posy.commands.table import Cell, machines
from posy.data.errors import DataError
from posy.server_app.progress import duration
from posy.settings import Scalar
from posy.strategies.registry import PAPERS, declared
from posy.words import capitalised, counted

UNKNOWN = "the reason is unknown"
"""Text for a number that differs from the paper's for no known reason."""
RULES = ("reading.md", "How to read this page")
INDEX = ("index.md", "All papers")
SETTINGS = "[all settings](#settings-that-differ-from-the-paper)"
"""Link to the section with the settings of reduced runs."""
SCALE_NAMES = {"small": "reduced", "full": "full size"}


def page(paper: str, comparisons: Sequence[Comparison], folder: Path) -> str:
    """Return the page of a paper as Markdown; ``folder`` contains the figures and the pages that this page links."""
    title, lead, *notes = (PAPERS / paper / "README.md").read_text(encoding="utf-8").strip().split("\n\n")
    pictures = pictures_in(folder)
    links = {c.item.name: f"[{_name(c)}](#{anchor(_name(c))})" for c in comparisons}
    done = [comparison for comparison in comparisons if _has_results(comparison, pictures)]
    parts = [f"<!-- Written by `posy paper {paper}`. -->", title, lead]
    parts += _verdicts(paper, comparisons, links, folder)
    parts += _contents(comparisons, done, links)
    parts += ["## Notes", *notes] if notes else []
    for comparison in done:
        parts += [f"## {_name(comparison)}", *_section(comparison, pictures)]
    parts += _not_run([comparison for comparison in comparisons if comparison not in done], pictures)
    parts += _settings(done, links)
    parts += _machines(done, links)
    return "\n\n".join(filter(None, parts)) + "\n"


def states(comparison: Comparison, pictures: Sequence[str]) -> str:
    """Return how many of a comparison's numbers are in each state, or the state of a figure that needs no runs."""
    if comparison.item.draws_alone:
        return DRAWN if _picture(comparison) in pictures else NOT_RUN
    counts = Counter(entry.state for entry in comparison.entries)
    return ", ".join(
        f"{number} {'differ' if state == DIFFERS and number > 1 else state}" for state, number in counts.items()
    )


def claims(comparison: Comparison) -> str:
    """Return how many of a comparison's claims have each outcome."""
    return count_outcomes(verdict for _, verdict in comparison.verdicts)


def changed(comparison: Comparison, scale: str) -> str:
    """Return the settings of a scale that differ from the paper's, as ``key value (paper: value)``.

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
            changes.append(f"{key} {_shown(key, value)} (paper: {' or '.join(papers)})")
    parts = [", ".join(changes)] if changes else []
    for name, settings in {**small.get("runs", {}), **small.get("variants", {})}.items():
        additional = [
            f"{key} {_shown(key, value)}" for key, value in settings.items() if key not in comparison.decisive
        ]
        parts += [f"{comparison.item.label(name)}: {', '.join(additional)}"] if additional else []
    return "; ".join(parts)


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
                draw(comparison, folder / _picture(comparison))
    (folder / f"{paper}.md").write_text(page(paper, comparisons, folder), encoding="utf-8")
    return comparisons


def pictures_in(folder: Path) -> list[str]:
    """Return the names of the figures in a folder."""
    return sorted(file.name for file in folder.glob("*.png"))


def overview(papers: Mapping[str, Sequence[Comparison]]) -> list[list[str]]:
    """Return a row per paper: its numbers of main claims, in total and per outcome, and of values per state."""
    rows = []
    for paper, all_comparisons in papers.items():
        words = Counter(verdict.word for _, verdict in main_verdicts(paper, all_comparisons))
        in_paper = [comparison for comparison in all_comparisons if comparison.item.in_paper]
        states_of_numbers = Counter(entry.state for comparison in in_paper for entry in comparison.entries)
        counts = [words.total(), *(words[word] for word in OUTCOMES), *(states_of_numbers[state] for state in STATES)]
        rows.append([paper, *map(str, counts)])
    return rows


def _verdicts(paper: str, comparisons: Sequence[Comparison], links: Mapping[str, str], folder: Path) -> list[str]:
    """Return the verdict box with its summary, and links to the other pages."""
    pages = [
        f"[{text}]({file})" if (folder / file).is_file() else f"{text}: docs/papers/{file} in Posy's repository"
        for file, text in (RULES, INDEX)
    ]
    verdicts = main_verdicts(paper, comparisons)
    if not verdicts:
        return [" · ".join(pages)]
    box = verdict_box(verdicts, comparisons, links)
    notes = [
        "*undecided*: not every comparison is significant in the claim's favour, and none is significant against it "
        f"(Holm), or fewer than {MIN_SEEDS} seeds ({MIN_SPREAD_SEEDS} for a test of spread). ± is the standard "
        "deviation over the seeds, and p is from a paired t-test unless the table names another test. Ranks are by "
        "mean."
    ]
    if any(map(is_reduced, (verdict for _, verdict in verdicts))):
        notes.insert(
            0,
            "*(reduced)*: from smaller runs than the paper's, with fewer rounds, samples or clients, a simpler network "
            "or other settings of local training. They do not decide the claim at the paper's size.",
        )
    numbers = summary((verdict.word, is_reduced(verdict)) for _, verdict in verdicts)
    common = common_reductions(verdicts, comparisons)
    return [
        _filled(f"{first_verdict(verdicts, comparisons)} **{counted(len(verdicts), 'main claim')}.** {numbers}."),
        _filled(f"Claims marked *(reduced)*: {', '.join(common)}.") if common else "",
        f'<div class="verdicts">\n\n{box}\n\n</div>',
        _filled(f"{' '.join(notes)} {' · '.join(pages)}"),
    ]


def _contents(comparisons: Sequence[Comparison], done: Sequence[Comparison], links: Mapping[str, str]) -> list[str]:
    """Return links to the tables and figures: in the paper, beyond the paper, and without runs."""
    groups = {
        "Tables and figures": [c for c in done if c.item.in_paper],
        "Beyond the paper": [c for c in done if not c.item.in_paper],
        "Not run": [c for c in comparisons if c not in done],
    }
    listed = (f"{name}: {' · '.join(links[c.item.name] for c in group)}." for name, group in groups.items() if group)
    return ["\\\n".join(listed)]


def _section(comparison: Comparison, pictures: Sequence[str]) -> list[str]:
    """Return the parts of a section: the description, the claims, the numbers, the commands, and the missing runs."""
    item = comparison.item
    parts = [_description(comparison)]
    tested = [(claim, verdict) for claim, verdict in comparison.verdicts if verdict.word != NOT_TESTED]
    parts.append("\n".join(f"- {describe(comparison, claim, verdict)}" for claim, verdict in tested))
    numbers = table(comparison) if any(entry.numbers for entry in comparison.entries) else ""
    if (picture := _picture(comparison)) in pictures:
        parts.append(f"![{_name(comparison)}]({picture})")
        numbers = _folded("Numbers", numbers) if numbers else ""
    parts.append(numbers)
    if item.has_runs:
        parts.append(_filled(_how(comparison)))
    elif item.kind == "partition":
        parts.append(f"Command: `posy paper {item.paper} {item.name}`, which does not need any runs.")
    parts += map(_filled, _notes(comparison))
    parts.append("\n".join(_reasons(comparison)))
    if missing := [*_missing(comparison, pictures), *_untested(comparison)]:
        number = sum(entry.state == NOT_RUN for entry in comparison.entries)
        parts.append(_folded(f"Not run: {counted(number, 'number')}", "\n".join(missing)))
    return parts


def _untested(comparison: Comparison) -> list[str]:
    """Return a list item with the claims that no runs test, or an empty list."""
    untested = [claim.say for claim, verdict in comparison.verdicts if verdict.word == NOT_TESTED]
    return [f"- Claims that need these runs: {'; '.join(untested)}."] if untested else []


def _description(comparison: Comparison) -> str:
    """Return the description of a table or figure, and the observations in the paper."""
    about = comparison.item.title.partition(": ")[2].strip()
    stop = "" if about.endswith("?") else "."
    return _filled(f"{capitalised(about)}{stop} {comparison.item.content.get('shows', '')}")


def _how(comparison: Comparison) -> str:
    """Return the commands, the metrics and the size of the finished runs."""
    item = comparison.item
    overrides = "".join(f" {key}={_typed(value)}" for key, value in comparison.decisive.items())
    command = " and ".join(
        f"`posy paper {item.paper} {item.name} --scale {scale}{_more_seeds(comparison, scale)}{overrides}`"
        for scale in comparison.scales
    )
    size = f" Reduced: {reduced} ({SETTINGS})." if (reduced := reductions(comparison)) else ""
    measures = map(_metric, item.measures, map(item.measure_label, item.measures))
    return f"Command: {command}. Metrics: {'; '.join(measures)}{_points(comparison)}.{size}"


def _metric(measure: str, label: str) -> str:
    """Return the display name of a measure, with the measure itself if that differs."""
    return measure if label == measure else f"{label} (`{measure}`)"


def _not_run(comparisons: Sequence[Comparison], pictures: Sequence[str]) -> list[str]:
    """Return the folded section of the tables and figures without any results."""
    if not comparisons:
        return []
    parts = []
    for comparison in comparisons:
        lines = [*_missing(comparison, pictures), *_untested(comparison)]
        parts += [f"### {_name(comparison)}", _description(comparison), "\n".join(lines)]
    names = ", ".join(_name(comparison) for comparison in comparisons)
    return ["## Not run", _folded(names, "\n\n".join(parts))]


def _missing(comparison: Comparison, pictures: Sequence[str]) -> list[str]:
    """Return a list item for each requirement of missing runs: the positions, the command, the data and the time."""
    if comparison.item.draws_alone:
        return [] if _picture(comparison) in pictures else [f"- {capitalised(needed_to_draw(comparison))}."]
    groups: dict[str, list[Entry]] = {}
    for entry in comparison.entries:
        if entry.state == NOT_RUN:
            groups.setdefault(needs(comparison, entry), []).append(entry)
    return [
        f"- {_positions(entries, comparison)}: {needed}.{_time(comparison, entries)}"
        for needed, entries in groups.items()
    ]


def _time(comparison: Comparison, entries: Sequence[Entry]) -> str:
    """Return the number of missing runs, with their time if runs of the same scale have finished."""
    number, seconds = missing_runs(comparison, entries)
    if not number:
        return ""
    runs = counted(number, "run")
    if seconds is None:
        return f" {runs}. No run of this size has been timed."
    return f" {runs}, about {duration(number * seconds)} in total."


def _settings(comparisons: Sequence[Comparison], links: Mapping[str, str]) -> list[str]:
    """Return the section with the settings that differ from the paper's: one list item per distinct set of settings."""
    groups: dict[str, list[str]] = {}
    for comparison in comparisons:
        for scale in comparison.scales:
            if changes := changed(comparison, scale):
                groups.setdefault(changes, []).append(links[comparison.item.name])
    lines = [_filled(f"- {', '.join(names)}: {changes}.", "  ") for changes, names in groups.items()]
    return ["## Settings that differ from the paper", "\n".join(lines)] if lines else []


def _machines(comparisons: Sequence[Comparison], links: Mapping[str, str]) -> list[str]:
    """Return the section with the number of runs, the run time and the machines of each table and figure."""
    every_run: dict[Cell, dict[str, Any]] = {}
    groups: list[tuple[str, str, dict[Cell, dict[str, Any]]]] = []
    for comparison in comparisons:
        for scale in comparison.scales:
            cells = [cell for cells in comparison.finished[scale].values() for cell in cells]
            results = {cell: cell.summary() or {} for cell in cells}
            size = "" if scale == "full" and not comparison.item.in_paper else SCALE_NAMES[scale]
            groups.append((links[comparison.item.name], size, results))
            every_run |= results
    if not groups:
        return []
    lines = machines(every_run)  # each ends with the date of the last run
    letters = {line.rpartition("; ")[0]: chr(ord("A") + number) for number, line in enumerate(lines)}
    rows = [["", "size", "runs", "run time", "machines"], ["---", "---", "---:", "---:", "---"]]
    for link, size, results in groups:
        used = sorted(letters[line.rpartition("; ")[0]] for line in machines(results))
        seconds = sum(float(summary["seconds"]) for summary in results.values())
        rows.append([link, size, str(len(results)), duration(seconds), ", ".join(used)])
    listed = "\n".join(
        f"- {letter}: {machine}; last run {line.rpartition('; ')[2]}."
        for (machine, letter), line in zip(letters.items(), lines, strict=True)
    )
    about = "Run times add up the runs, one after the other. Tables with the same runs each count them."
    return ["## Machines and run times", about, markdown_table(rows), listed]


def _has_results(comparison: Comparison, pictures: Sequence[str]) -> bool:
    """Return whether a page can show numbers or a picture of a table or figure."""
    return _picture(comparison) in pictures or any(entry.numbers for entry in comparison.entries)


def _notes(comparison: Comparison) -> list[str]:
    """Return a note on diverged runs, and the observations in the item's file."""
    cells = [cell for plan in comparison.plans.values() for cell in plan.cells] if comparison.item.has_runs else []
    label = comparison.item.label
    names = dict.fromkeys(
        cell.name.replace(cell.variant, label(cell.variant), 1)
        for cell in cells
        if cell.summary("diverged") is not None
    )
    diverged = [f"Diverged and excluded: {'; '.join(names)}."] if names else []
    observations = [str(comparison.item.content["here"])] if "here" in comparison.item.content else []
    return diverged + observations


def _reasons(comparison: Comparison) -> list[str]:
    """Explain why numbers are not comparable with the paper's or differ: one list item per reason.

    The headers of the tables mark reduced runs as not comparable, so these runs need no item without a reason.
    """
    labels = {NOT_COMPARABLE: "Not comparable", DIFFERS: "Different from the paper"}
    groups: dict[tuple[str, str], list[Entry]] = {}
    for entry in comparison.entries:
        if entry.state == DIFFERS or (entry.state == NOT_COMPARABLE and entry.why):
            groups.setdefault((entry.state, entry.why or UNKNOWN), []).append(entry)
    return [
        _filled(f"- {labels[state]}: {_positions(entries, comparison)}. {capitalised(reason)}.", "  ")
        for (state, reason), entries in groups.items()
    ]


def _more_seeds(comparison: Comparison, scale: str) -> str:
    """Return the option ``--seeds`` if runs at a scale have seeds that the item does not list, else an empty string."""
    seeds = {cell.seed for cells in comparison.finished[scale].values() for cell in cells}
    return f" --seeds {max(seeds) + 1}" if seeds - {*comparison.item.seeds(scale)} else ""


def _folded(summary: str, text: str) -> str:
    """Return text that GitHub shows only after a click on its summary."""
    return f"<details><summary>{summary}</summary>\n\n{text}\n\n</details>"


def _filled(text: str, indent: str = "") -> str:
    """Wrap text at 120 characters without breaking file names, with an indent of all lines but the first."""
    return fill(text, 120, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False)


def _positions(entries: Sequence[Entry], comparison: Comparison) -> str:
    """Return the positions of entries: rows with their column, or only the column if all its entries are included."""
    if len(entries) == len(comparison.entries):
        return "All numbers"
    sizes, listed = (Counter(entry.variant for entry in group) for group in (comparison.entries, entries))
    names = (
        entry.variant if sizes[entry.variant] == listed[entry.variant] else f"{entry.variant} / {entry.row}"
        for entry in entries
    )
    return "; ".join(dict.fromkeys(comparison.item.label(name).removeprefix(" / ") for name in names))


def _points(comparison: Comparison) -> str:
    """Return text that lists the rows with a different evaluation point or measure."""
    points: dict[str, list[str]] = {}
    for row, point in comparison.item.content.get("points", {}).items():
        points.setdefault(point, []).append(row)
    for row, (_, measure) in comparison.item.readings.items():
        if [measure] != comparison.item.measures:
            points.setdefault(measure, []).append(row)
    label = comparison.item.label
    return "".join(f"; {point} ({'; '.join(map(label, rows))})" for point, rows in points.items())


def _shown(key: str, value: Scalar) -> str:
    """Format a setting's value for display."""
    return "all" if key == "max-samples" and value == 0 else _typed(value)


def _typed(value: Scalar) -> str:
    """Format a setting's value as on the command line."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _name(comparison: Comparison) -> str:
    """Return the name of a table or figure, such as ``Table 1``."""
    return comparison.item.title.partition(":")[0]


def _picture(comparison: Comparison) -> str:
    return f"{comparison.item.paper}-{comparison.item.name}.png"
