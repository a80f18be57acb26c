"""Compare a paper's table or figure with its runs: the state of each number, and the outcome of each claim."""

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from posy.commands.papers.counts import Counts, counted, first_cells
from posy.commands.papers.item import SCALES, Claim, Item, Printed, restore_runs
from posy.commands.papers.memory import millions
from posy.commands.papers.record import PARAMETERS, in_percent, measured, partial_coverage
from posy.commands.papers.verdict import Number, Verdict, agrees, distances, number, verdict
from posy.commands.table import Cell, Plan
from posy.data.published import describe
from posy.data.settings import DataSettings
from posy.settings import Scalar
from posy.strategies.registry import declared

WANTED = {name: files for name, _, files, _ in describe()}
"""Files that each data set requires in ``data-dir``."""
REPRODUCED, DIFFERS, NOT_RUN, DRAWN = "reproduced", "differs", "not run", "plotted"
"""States of a number. ``DRAWN`` means that the paper does not print the number."""
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
    agrees_reduced: bool = False
    """Whether the result of a reduced run agrees with the paper's result."""


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
        for plan in self.plans.values() if item.has_runs else ():
            restore_runs(plan)
        self.counts: dict[tuple[str, str], Counts] = {}
        """The clients' class counts, keyed by variant and scale."""
        if item.counts_classes:
            self.counts = {(v, scale): c for scale, plan in self.plans.items() for v, c in counted(plan).items()}
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

    @cached_property
    def usual_seeds(self) -> int:
        """The most frequent number of seeds per entry of this item, or 0 if the item has no numbers."""
        frequencies = Counter(entry.ours.seeds for entry in self.entries if entry.ours and entry.measure != PARAMETERS)
        return max(frequencies, key=lambda seeds: (frequencies[seeds], seeds), default=0)

    @property
    def scales(self) -> list[str]:
        """The scales with runs."""
        return [scale for scale in SCALES if any(drawn == scale for drawn, _ in self.cells.values())]

    def needed(self) -> str:
        """Return the command for a figure without runs, and the data that the command requires."""
        return self._command("", self.item.settings_of(self.item.variants[0]).data.dataset)

    def _entry(self, variant: str, measure: str, row: str) -> Entry:
        printed = self.item.printed.get((variant, measure, row))
        cell = (variant, measure, row)
        scale, _ = self.runs_of(variant, row)
        ours = number(list(self.values(variant, row, measure).values()))
        if ours is None:
            return Entry(*cell, printed, None, scale, NOT_RUN, self._needs(variant, row))
        if printed is None:
            return Entry(*cell, None, ours, scale, DRAWN, "")
        if partial := self._partial(variant, row, measure):
            return Entry(*cell, printed, ours, scale, DIFFERS, f"the number covers only {partial}")
        if measure == PARAMETERS:
            same = agrees(ours, printed.value, None, COUNTED * printed.value)
            reason = "" if same else self.item.reason(variant, row)
            return Entry(*cell, printed, ours, "full", REPRODUCED if same else DIFFERS, reason)
        over_seeds = printed.spread if self.item.content.get("spread") == "seeds" else None
        unit = 1.0 if in_percent(measure) else HUNDREDTH
        same_value = agrees(ours, printed.value, over_seeds, unit)
        if same_value and scale == "full":
            return Entry(*cell, printed, ours, scale, REPRODUCED, "")
        reason = ("" if same_value else self.item.reason(variant, row)) or (
            "" if scale == "full" else "the runs are at the small scale"
        )
        return Entry(*cell, printed, ours, scale, DIFFERS, reason, same_value)

    def _partial(self, variant: str, row: str, measure: str) -> str:
        """Return how many clients a row's number covers if they are too few to represent all clients, else ``""``."""
        partials = (
            partial_coverage(cell.path, self._measure_of(row, measure)) for cell in self.runs_of(variant, row)[1]
        )
        return next(filter(None, partials), "")

    def _without_rows(self, variant: str) -> Entry:
        """Return the entry of an item without rows: a figure of a partition, or an experiment that Posy cannot run."""
        if self.counts_of(variant) is not None:
            return Entry(variant, "", "", None, None, "", DRAWN, "")
        cells = [cell for plan in self.plans.values() if (cell := first_cells(plan).get(variant))]
        if not cells:
            return Entry(variant, "", "", None, None, "", NOT_RUN, str(self.item.content.get("needs", "")))
        return Entry(variant, "", "", None, None, "", NOT_RUN, self._command("", _dataset(cells[0])))

    def _needs(self, variant: str, row: str) -> str:
        """Return the command that starts a row's missing runs, and the data that the command requires."""
        planned = self.planned(variant, row)
        if not planned:
            return str(self.item.content.get("needs", f"Posy does not implement {row}"))
        scale = next(scale for scale, plan in self.plans.items() if planned[0] in plan.cells)
        weights = Path(str(planned[0].config.get("weights", ""))).name
        return self._command(f" --scale {scale}", _dataset(planned[0]), weights)

    def _command(self, options: str, dataset: str, weights: str = "") -> str:
        """Return the command that starts the missing runs, and the data and word vectors that they need."""
        command = f"`posy paper {self.item.paper} {self.item.name}{options}`"
        available = any(_dataset(cell) == dataset for _, cells in self.cells.values() for cell in cells)
        if available and not weights:
            return f"the data is available: run {command}"
        if dataset not in WANTED:
            return f"run {command}"
        return f"{command} needs {dataset} in data-dir ({WANTED[dataset]})" + (
            f" and {weights} in the same folder" if weights else ""
        )

    def _verdict(self, claim: Claim) -> Verdict:
        """Return the outcome of a claim, from runs at the same scale.

        Choose the scale with the most comparable pairs of rows. If several scales tie, prefer the scale with the most
        variants, then the larger scale.
        """
        by_scale = {scale: self._differences(claim, scale) for scale in self.finished or ("",)}
        scale = max(
            reversed(by_scale),
            key=lambda scale_name: (len({rows for rows, _ in by_scale[scale_name]}), len(by_scale[scale_name])),
        )
        differences: dict[str, list[float]] = {}
        for (rows, _), values in by_scale[scale].items():
            differences.setdefault(rows, []).extend(values)
        return replace(verdict(differences, claim.by, claim.within, claim.but), scale=scale)

    def _differences(self, claim: Claim, scale: str) -> dict[tuple[str, str], list[float]]:
        """Return the differences between a claim's higher and lower rows, keyed by pair of rows and variant.

        Each list holds one difference per seed that both rows share.
        """
        differences: dict[tuple[str, str], list[float]] = {}
        for higher, lower in itertools.product(claim.higher, claim.lower):
            pair = " over ".join(name for name, rows in ((higher, claim.higher), (lower, claim.lower)) if len(rows) > 1)
            # Rows whose names include a variant are compared once, not in every variant.
            for variant in [""] if " / " in higher else claim.variants or self.item.variants:
                above, below = (
                    self.values(*_place(name, variant), claim.measure, scale, same_point=claim.same_point)
                    for name in (higher, lower)
                )
                if claim.spread:
                    above, below = distances(above), distances(below)
                if shared := sorted(above.keys() & below.keys()):
                    differences[pair, variant] = [above[seed] - below[seed] for seed in shared]
        return differences


def _shared_seeds(ended: Iterable[Cell]) -> set[int]:
    """Return the seeds that all rows with ended runs have in common."""
    seeds_of_rows: dict[tuple[str, str], set[int]] = {}
    for cell in ended:
        seeds_of_rows.setdefault((cell.variant, cell.row), set()).add(cell.seed)
    return set.intersection(*seeds_of_rows.values()) if seeds_of_rows else set()


def _dataset(cell: Cell) -> str:
    return str(cell.config.get("dataset", DataSettings.dataset))


def _place(name: str, variant: str) -> tuple[str, str]:
    """Split a name ``variant / row`` into its variant and row; a name without a slash is a row of ``variant``."""
    named_variant, slash, row = name.partition(" / ")
    return (named_variant, row) if slash else (variant, name)
