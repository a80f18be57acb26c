"""Write the numbers of a table or figure in Markdown, in columns for the paper, reduced runs and full-size runs."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from posy.commands.papers.compare import DIFFERS, NOT_COMPARABLE, REPRODUCED, Comparison, Entry
from posy.commands.papers.record import PARAMETERS, in_percent
from posy.commands.papers.verdict import Number
from posy.words import counted

PAPER = "paper"
"""Name of the columns with the paper's numbers, in addition to the names of the scales."""
WIDE = 8
"""Maximum number of columns of a table with several measures and variants."""
MARKS = {REPRODUCED: " ✓", DIFFERS: " ≠"}


class _Column(NamedTuple):
    """A column: its variant, measure and source, which is ``PAPER`` or a scale."""

    variant: str
    measure: str
    source: str


Entries = Mapping[tuple[str, str, str], Entry]
"""Entries with numbers, keyed by variant, measure and row."""


def table(comparison: Comparison) -> str:
    """Return a Markdown table of the finished runs, with separate columns for the paper and for each scale.

    A header states what ± means in its column. If all columns have the same source, the first header states it for
    them. Rows and columns without finished runs are omitted. A wide table with several measures becomes one table for
    each variant.
    """
    entries = {(entry.variant, entry.measure, entry.row): entry for entry in comparison.entries if entry.numbers}
    columns = list(_columns(comparison, entries))
    variants = dict.fromkeys(column.variant for column in columns)
    if len(columns) <= WIDE or len(comparison.item.measures) == 1 or len(variants) == 1:
        return _table(comparison, columns, entries, [_name(comparison, column) for column in columns])
    parts = []
    for variant in variants:
        of_variant = [column for column in columns if column.variant == variant]
        names = [comparison.item.measure_label(column.measure) for column in of_variant]
        parts += [f"**{comparison.item.label(variant)}**", _table(comparison, of_variant, entries, names)]
    return "\n\n".join(parts)


def _table(comparison: Comparison, columns: Sequence[_Column], entries: Entries, names: Sequence[str]) -> str:
    """Return a Markdown table with some columns and their names."""
    shown = {(column.variant, column.measure) for column in columns}
    rows = [row for row in comparison.item.rows if any(key[2] == row and key[:2] in shown for key in entries)]
    sources = [_source(comparison, column, entries) for column in columns]
    header = ["", *(f"{name}<br>{source}" for name, source in zip(names, sources, strict=True))]
    return markdown_table(
        [
            header if len(set(sources)) > 1 else [sources[0], *names],
            ["---", *["---:"] * len(columns)],
            *(
                [comparison.item.label(row), *(_cell(comparison, column, row, entries) for column in columns)]
                for row in rows
            ),
        ]
    )


def markdown_table(lines: Sequence[Sequence[str]]) -> str:
    """Return lines of cells as a Markdown table; the second line must contain the dashes."""
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _columns(comparison: Comparison, entries: Entries) -> Iterator[_Column]:
    """Yield the columns with numbers of finished runs, each after the column with the paper's numbers."""
    for variant, measure in comparison.item.columns:
        numbers = [entry.numbers for key, entry in entries.items() if key[:2] == (variant, measure)]
        if not numbers:
            continue
        if any(key[:2] == (variant, measure) for key in comparison.item.printed):
            yield _Column(variant, measure, PAPER)
        for scale in comparison.finished or ("",):
            if any(scale in values for values in numbers):
                yield _Column(variant, measure, scale)


def _name(comparison: Comparison, column: _Column) -> str:
    """Return the name of a column: the variant, and the measure if there are several."""
    item = comparison.item
    measure = item.measure_label(column.measure) if len(item.measures) > 1 else ""
    return ", ".join(filter(None, (item.label(column.variant), measure))) or item.measure_label(column.measure)


def _source(comparison: Comparison, column: _Column, entries: Entries) -> str:
    """Return the source of a column's numbers, whether they are comparable with the paper's, and what ± means."""
    item, (_, measure, source) = comparison.item, column
    if source == PAPER:
        has_spread = any(value.spread is not None for key, value in item.printed.items() if key[:2] == column[:2])
        return PAPER + (f", ± over {item.content['spread']}" if has_spread else "")
    label = "reduced" if source == "small" else "full size" if source and item.in_paper else "Posy"
    if _states(column, entries) == {NOT_COMPARABLE}:
        label += ", not comparable"
    if measure == PARAMETERS:
        return label
    seeds = comparison.usual_seeds(source)
    return f"{label}, {f'± over {seeds} seeds' if seeds > 1 else '1 seed'}"


def _cell(comparison: Comparison, column: _Column, row: str, entries: Entries) -> str:
    """Return the number of a row in a column as text, with its number of seeds if that differs from the header's."""
    variant, measure, source = column
    if source == PAPER:
        printed = comparison.item.printed.get((variant, measure, row))
        return printed.text if printed else ""
    entry = entries.get((variant, measure, row))
    if entry is None or source not in entry.numbers:
        return ""
    value = entry.numbers[source]
    text = text_of(value, 2 if in_percent(measure) else 3)
    if measure != PARAMETERS and value.seeds != comparison.usual_seeds(source):
        text += f" ({counted(value.seeds, 'seed')})"
    if source == "small":
        return text
    if entry.state == NOT_COMPARABLE and _states(column, entries) != {NOT_COMPARABLE}:
        return f"{text} (not comparable)"
    return text + MARKS.get(entry.state, "")


def _states(column: _Column, entries: Entries) -> set[str]:
    """Return the states of a column's numbers that have a number in the paper."""
    states = {
        entry.state
        for key, entry in entries.items()
        if key[:2] == column[:2] and column.source in entry.numbers and entry.printed
    }
    return {NOT_COMPARABLE} if states and column.source == "small" else states


def text_of(value: Number, digits: int) -> str:
    """Return a number as text, with its standard deviation if it has one."""
    mean = without_negative_zero(f"{value.mean:.{digits}f}")
    return mean + (f" ± {value.std:.{digits}f}" if value.std is not None else "")


def without_negative_zero(number: str) -> str:
    """Return a formatted number without its sign if all its digits are 0."""
    return number.lstrip("+-") if not number.strip("+-0.") else number
