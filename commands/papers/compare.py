"""Compare a paper's table or figure with its runs: the state of each number, and the outcome of each claim."""

import itertools
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from posy.commands.papers.counts import Counts, counted
from posy.commands.papers.item import SCALES, Claim, Item, Printed, archives_of, restore_runs, stored_results
from posy.commands.papers.memory import millions
from posy.commands.papers.record import PARAMETERS, in_percent, measured, partial_coverage
from posy.commands.papers.verdict import (
    HOLDS,
    NOT_TESTED,
    UNDECIDED,
    Number,
    Pair,
    Verdict,
    agrees,
    distances,
    number,
    verdict,
)
from posy.commands.table import Cell, Plan
from posy.settings import Scalar
from posy.strategies.registry import declared

REPRODUCED, DIFFERS, NOT_COMPARABLE, DRAWN, NOT_RUN = STATES = (
    *("reproduced", "differs", "not comparable"),
    *("plotted", "not run"),
)
"""States of a number. ``NOT_COMPARABLE`` means that the rounds, the data or the settings differ from the paper's, and
``DRAWN`` that the paper does not print the number."""
HUNDREDTH = 0.01
"""Tolerance for a number that is not a percentage, such as an entropy or Jain's index."""
COUNTED = 5e-4
"""Relative tolerance for parameter counts, which the papers round."""


@dataclass(frozen=True)
class Entry:
    """A number in a table or figure: the paper's value, Posy's value, and the comparison of the two."""

    variant: str
    measure: str
    row: str
    printed: Printed | None
    ours: Number | None
    scale: str
    state: str
    why: str
    numbers: Mapping[str, Number] = field(default_factory=dict)
    """Posy's values by scale. A figure shows only one of them, ``ours``."""


class Comparison:
    """A table or figure with its runs."""

    def __init__(self, item: Item, overrides: Mapping[str, Scalar] | None = None, folder: Path | None = None) -> None:
        self.item = item
        self.overrides = overrides or {}
        self.decisive = {key: value for key, value in self.overrides.items() if declared()[key].decides}
        """The command-line settings that affect the results."""
        self.plans: dict[str, Plan] = {}
        if item.has_runs or item.counts_classes:
            # A page shows all items. A setting that affects one item may have no effect on others, so do not reject it.
            self.plans = {scale: item.plan(scale, overrides, folder, strict=False) for scale in item.scales}
        archives = archives_of(item.paper, folder)
        for plan in self.plans.values() if item.has_runs else ():
            restore_runs(plan, archives)
        self.counts: dict[tuple[str, str], Counts] = {}
        """The clients' class counts, keyed by variant and scale."""
        if item.counts_classes:
            stored = stored_results(item.paper)
            self.counts = {
                (variant, scale): counts
                for scale, plan in self.plans.items()
                for variant, counts in counted(plan, stored / plan.output.name).items()
            }
        self.finished: dict[str, dict[tuple[str, str], list[Cell]]] = {}
        """Finished runs, keyed by scale (the larger scale last), and then by variant and row.

        Additional seeds, from the runs of other tables, are included only if all rows have them.
        """
        for scale, plan in self.plans.items() if item.has_runs else ():
            runs = self.finished.setdefault(scale, {})
            ended = {cell: summary for cell in plan.cells if (summary := cell.summary("completed", "diverged"))}
            seeds = {*item.seeds(scale), *_shared_seeds(ended)}
            for cell, summary in ended.items():
                if cell.seed in seeds and summary["status"] == "completed":
                    runs.setdefault((cell.variant, cell.row), []).append(cell)
        self.cells: dict[tuple[str, str], tuple[str, list[Cell]]] = {}
        """The runs on the page and their scale, keyed by variant and row.

        A table uses the larger scale of each row, and a figure uses one scale per variant.
        """
        for variant in self.item.variants:
            for scale in self._drawn_at(variant):
                runs = self.finished[scale]
                self.cells |= {
                    variant_row: (scale, cells) for variant_row, cells in runs.items() if variant_row[0] == variant
                }

    def _drawn_at(self, variant: str) -> list[str]:
        """Return the scales at which the page shows the rows of a variant, the larger scale last.

        A table compares each number with the paper's. A figure compares rows with each other, so all its rows use the
        scale at which the most rows have runs. In a tie, the larger scale wins.
        """
        rows = {scale: sum(name == variant for name, _ in runs) for scale, runs in self.finished.items()}
        return list(rows) if self.item.kind == "table" or not rows else [max(reversed(rows), key=rows.__getitem__)]

    def values(
        self, variant: str, row: str, measure: str, scale: str = "", *, same_point: bool = False
    ) -> dict[int, float]:
        """Return a row's values at a scale, by default the scale that the page shows, keyed by seed.

        The values are measured at the row's evaluation point. Some rows replace a default measure of the item with
        another measure. With ``same_point``, all rows use ``measure`` unchanged.
        """
        if self.item.kind == "memory":
            layers = self.item.form["layers"].get(row)
            return {} if layers is None else {0: millions(str(layers), int(variant))}
        if not same_point:
            measure = self._measure_of(row, measure)
        cells = self.finished[scale].get(self._read_off(variant, row), []) if scale else self.runs_of(variant, row)[1]
        by_seed = {cell.seed: measured(cell.path, measure) for cell in cells}
        return {seed: value for seed, value in by_seed.items() if value is not None}

    def _measure_of(self, row: str, measure: str) -> str:
        """Return the measure of a row: its substitute for a default measure, if any, at the row's evaluation point."""
        substitute = self.item.readings.get(row, (row, measure))[1]
        return self.item.of(row, substitute if measure in self.item.measures else measure)

    def runs_of(self, variant: str, row: str) -> tuple[str, list[Cell]]:
        """Return the scale at which the page shows a row, and the finished runs that provide its numbers."""
        return self.cells.get(self._read_off(variant, row), ("", []))

    def _read_off(self, variant: str, row: str) -> tuple[str, str]:
        return variant, self.item.readings.get(row, (row, ""))[0]

    def planned(self, variant: str, row: str) -> list[Cell]:
        """Return the runs of a row at both scales, finished or not."""
        variant_row = self._read_off(variant, row)
        return [c for plan in self.plans.values() for c in plan.cells if (c.variant, c.row) == variant_row]

    def counts_of(self, variant: str) -> Counts | None:
        """Return the clients' class counts, at the scale of the variant's runs if it has any."""
        scales = {scale for (name, _), (scale, _) in self.cells.items() if name == variant}
        counts = [
            self.counts[variant, s] for s in SCALES if (variant, s) in self.counts and (not scales or s in scales)
        ]
        return counts[-1] if counts else None

    @cached_property
    def entries(self) -> list[Entry]:
        """An entry for every row in every column, in the paper's order."""
        if not self.item.rows:
            return [] if self.item.draws_alone else [self._without_rows(variant) for variant in self.item.variants]
        entries = [
            self._entry(variant, measure, row)
            for variant, measure in self.item.columns
            for row in self.item.rows
            # A paper's row may lack a number in a column.
            if (variant, measure, row) in self.item.printed
            or row not in self.item.content.get("printed", {})
            or self.runs_of(variant, row)[1]
        ]
        # A method may lack a number that other methods have, such as the accuracy of a routing head.
        return [
            entry for entry in entries if entry.ours or entry.printed or not self.runs_of(entry.variant, entry.row)[1]
        ]

    @cached_property
    def verdicts(self) -> list[tuple[Claim, Verdict]]:
        """The outcome of each claim."""
        return [(claim, self._verdict(claim)) for claim in self.item.claims]

    def means(self, claim: Claim, scale: str) -> dict[str, dict[str, float]]:
        """Return the means over all seeds of the rows that a claim compares or ranks, by column and row.

        Columns without runs of the claim's higher row are omitted. The claim must have one higher row.
        """
        means: dict[str, dict[str, float]] = {}
        for variant in claim.variants or self.item.variants:
            by_row = {
                row: statistics.fmean(values.values())
                for row in (*claim.higher, *claim.lower, *claim.ranked)
                if (values := self.values(variant, row, claim.measure, scale, same_point=claim.same_point))
            }
            if claim.higher[0] in by_row and len(by_row) > 1:
                means[variant] = by_row
        return means

    def variants_of(self, pair: Pair) -> list[str]:
        """Return the variants that a comparison of two rows uses."""
        if pair.column or " / " not in pair.higher:
            return [pair.column]
        return [_place(name, "")[0] for name in pair[:2]]

    def usual_seeds(self, scale: str) -> int:
        """Return the most frequent number of seeds per number at a scale, or 0 if there are no numbers."""
        frequencies = Counter(
            entry.numbers[scale].seeds
            for entry in self.entries
            if scale in entry.numbers and entry.measure != PARAMETERS
        )
        return max(frequencies, key=lambda seeds: (frequencies[seeds], seeds), default=0)

    @property
    def scales(self) -> list[str]:
        """The scales with runs."""
        return [scale for scale in SCALES if self.finished.get(scale)]

    def _entry(self, variant: str, measure: str, row: str) -> Entry:
        printed = self.item.printed.get((variant, measure, row))
        by_scale = {scale: self.values(variant, row, measure, scale) for scale in self.finished or ("",)}
        numbers = {scale: value for scale, values in by_scale.items() if (value := number(list(values.values())))}
        if not numbers:
            return Entry(variant, measure, row, printed, None, "", NOT_RUN, "")
        ours = number(list(self.values(variant, row, measure).values()))
        scale = self.runs_of(variant, row)[0] if ours else max(numbers, key=[*self.finished].index)
        value = ours or numbers[scale]
        state, why = self._state(variant, measure, row, value, scale) if printed else (DRAWN, "")
        return Entry(variant, measure, row, printed, ours, scale, state, why, numbers)

    def _state(self, variant: str, measure: str, row: str, value: Number, scale: str) -> tuple[str, str]:
        """Compare a number with the paper's. Return its state, and the reason for a difference if it is known."""
        printed, (reason, comparable) = self.item.printed[variant, measure, row], self.item.reason(variant, row)
        if measure == PARAMETERS:
            same = agrees(value, printed.value, None, COUNTED * printed.value)
            return (REPRODUCED, "") if same else (DIFFERS, reason)
        if partial := self._partial(variant, row, measure):
            return NOT_COMPARABLE, f"the number covers only {partial}"
        if scale == "full" and self.decisive:
            return NOT_COMPARABLE, f"the command line sets {', '.join(self.decisive)}"
        if scale != "full" or not comparable:
            return NOT_COMPARABLE, reason
        over_seeds = printed.spread if self.item.content.get("spread") == "seeds" else None
        unit = 1.0 if in_percent(measure) else HUNDREDTH
        return (REPRODUCED, "") if agrees(value, printed.value, over_seeds, unit) else (DIFFERS, reason)

    def _partial(self, variant: str, row: str, measure: str) -> str:
        """Return how many clients a row's number covers if they are too few to represent all clients, else ``""``."""
        partials = (
            partial_coverage(cell.path, self._measure_of(row, measure)) for cell in self.runs_of(variant, row)[1]
        )
        return next(filter(None, partials), "")

    def _without_rows(self, variant: str) -> Entry:
        """Return the entry of an item without rows: a figure of a partition, or an experiment that Posy cannot run."""
        state = NOT_RUN if self.counts_of(variant) is None else DRAWN
        return Entry(variant, "", "", None, None, "", state, "")

    def _verdict(self, claim: Claim) -> Verdict:
        """Return the outcome of a claim at the largest scale with runs that test it, from runs at this scale only.

        Runs at the paper's size decide the claim before reduced runs, even if they have fewer seeds or rows.
        """
        by_scale = [judged for scale in self.finished or ("",) if (judged := self._verdict_at(claim, scale)).tests]
        if not by_scale:
            return Verdict(NOT_TESTED)
        *smaller, largest = by_scale
        return replace(largest, reduced=smaller[0] if smaller else None)

    def _verdict_at(self, claim: Claim, scale: str) -> Verdict:
        """Return the outcome of a claim at a scale.

        A claim cannot hold before all its planned rows have runs. It can fail earlier.
        """
        values = self._paired_values(claim, scale)
        differences: dict[Pair, list[float]] = {}
        for pair, rows in values.items():
            above, below = map(distances, rows) if claim.spread else rows
            differences[pair] = [above[seed] - below[seed] for seed in above]
        deviations = None
        if claim.spread:
            deviations = {
                pair: (statistics.stdev(above.values()), statistics.stdev(below.values()))
                for pair, (above, below) in values.items()
                if len(above) > 1
            }
        judged = verdict(differences, claim.by, claim.within, claim.but, deviations)
        compared = {str(pair) for pair in differences}
        pairs = itertools.starmap(Pair, itertools.product(claim.higher, claim.lower))
        not_run = tuple(
            pair
            for pair in pairs
            if str(pair) not in compared and all(self._is_planned(row, claim, scale) for row in pair[:2])
        )
        word = UNDECIDED if judged.word == HOLDS and not_run else judged.word
        return replace(judged, word=word, scale=scale, not_run=not_run)

    def _is_planned(self, name: str, claim: Claim, scale: str) -> bool:
        """Return whether a row of a claim has planned runs at a scale, in a column in which other rows have runs."""
        if scale not in self.plans:
            return False
        begun = {variant for variant, _ in self.finished[scale]}
        variant_rows = {
            self._read_off(*_place(name, variant))
            for variant in claim.variants or self.item.variants
            if variant in begun or " / " in name
        }
        return any((cell.variant, cell.row) in variant_rows for cell in self.plans[scale].cells)

    def _paired_values(self, claim: Claim, scale: str) -> dict[Pair, tuple[dict[int, float], dict[int, float]]]:
        """Return the values of a claim's higher and lower rows in each column, for the seeds that both rows share."""
        paired: dict[Pair, tuple[dict[int, float], dict[int, float]]] = {}
        for higher, lower in itertools.product(claim.higher, claim.lower):
            # Rows whose names include a variant are compared once, not in every variant.
            for variant in [""] if " / " in higher else claim.variants or self.item.variants:
                above, below = (
                    self.values(*_place(name, variant), claim.measure, scale, same_point=claim.same_point)
                    for name in (higher, lower)
                )
                if shared := sorted(above.keys() & below.keys()):
                    paired[Pair(higher, lower, variant)] = (
                        {seed: above[seed] for seed in shared},
                        {seed: below[seed] for seed in shared},
                    )
        return paired


def _shared_seeds(ended: Iterable[Cell]) -> set[int]:
    """Return the seeds that all rows with ended runs have in common."""
    seeds_of_rows: dict[tuple[str, str], set[int]] = {}
    for cell in ended:
        seeds_of_rows.setdefault((cell.variant, cell.row), set()).add(cell.seed)
    return set.intersection(*seeds_of_rows.values()) if seeds_of_rows else set()


def _place(name: str, variant: str) -> tuple[str, str]:
    """Split a name ``variant / row`` into its variant and row; a name without a slash is a row of ``variant``."""
    named_variant, slash, row = name.partition(" / ")
    return (named_variant, row) if slash else (variant, name)
