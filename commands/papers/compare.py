"""A paper's table or figure beside what was run: each number's state, and what came of each claim."""

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from posy.commands.papers.counts import Counts, counted, first_cells
from posy.commands.papers.item import SCALES, Claim, Item, Printed, take_up
from posy.commands.papers.memory import millions
from posy.commands.papers.record import PARAMETERS, in_percent, measured, partial_coverage
from posy.commands.papers.verdict import Number, Verdict, agrees, distances, number, verdict
from posy.commands.table import Cell, Plan
from posy.data.published import describe
from posy.data.settings import DataSettings
from posy.settings import Scalar
from posy.strategies.registry import declared

WANTED = {name: what for name, _, what, _ in describe()}
"""What to put where, by data set."""
REPRODUCED, DIFFERS, NOT_RUN, DRAWN = "reproduced", "differs", "not run", "drawn"
"""States of a row in a column; the last is that of one for which the paper prints no number."""
HUNDREDTH = 0.01
"""By how much a number may differ that is no percentage, as an entropy or Jain's index: as much as a point of one."""
COUNTED = 5e-4
"""By which part of it a number of parameters may differ from the paper's: its rounding."""


@dataclass(frozen=True)
class Entry:
    """A number of a table or figure: the paper's, ours, and what is to be said of the two."""

    variant: str
    measure: str
    row: str
    printed: Printed | None
    ours: Number | None
    scale: str
    state: str
    why: str
    alike: bool = False
    """Whether the number is the paper's, though that of another setting."""


class Comparison:
    """A table or figure beside its runs."""

    def __init__(self, item: Item, given: Mapping[str, Scalar] | None = None, folder: Path | None = None) -> None:
        self.item = item
        self.given = given or {}
        self.decisive = {key: value for key, value in self.given.items() if declared()[key].decides}
        """Those of the given settings that decide what comes out."""
        self.plans: dict[str, Plan] = {}
        if item.has_runs or item.counts_classes:
            self.plans = {scale: item.plan(scale, given, folder) for scale in item.scales}
        for plan in self.plans.values() if item.has_runs else ():
            take_up(plan)
        self.counts: dict[tuple[str, str], Counts] = {}
        """Class counts of the clients by variant and scale."""
        if item.counts_classes:
            self.counts = {(v, scale): c for scale, plan in self.plans.items() for v, c in counted(plan).items()}
        self.finished: dict[str, dict[tuple[str, str], list[Cell]]] = {}
        """Finished runs by scale, the larger one last, then by variant and row.

        Of seeds beyond its own, which another table has run, there are those that all rows have.
        """
        for scale, plan in self.plans.items() if item.has_runs else ():
            found = self.finished.setdefault(scale, {})
            ended = {cell: summary for cell in plan.cells if (summary := cell.summary("completed", "diverged"))}
            seeds = {*item.seeds(scale), *_shared_seeds(ended)}
            for cell, summary in ended.items():
                if cell.seed in seeds and summary["status"] == "completed":
                    found.setdefault((cell.variant, cell.row), []).append(cell)
        self.cells: dict[tuple[str, str], tuple[str, list[Cell]]] = {}
        """Those that are drawn, with their scale: of each row the larger; in a picture one for a variant."""
        for variant in self.item.variants:
            for scale in self._drawn_at(variant):
                found = self.finished[scale]
                self.cells |= {place: (scale, cells) for place, cells in found.items() if place[0] == variant}

    def _drawn_at(self, variant: str) -> list[str]:
        """Return at which scales the rows of a variant are drawn, the larger one last.

        In a table each number stands beside the paper's; in a picture rows stand beside each other, and are all at the
        scale at which most of them ran, the larger of two that are alike.
        """
        rows = {scale: sum(of == variant for of, _ in found) for scale, found in self.finished.items()}
        return list(rows) if self.item.kind == "table" or not rows else [max(reversed(rows), key=rows.__getitem__)]

    def values(
        self, variant: str, row: str, measure: str, scale: str = "", *, same_point: bool = False
    ) -> dict[int, float]:
        """Return a number of a row by seed, at a scale or the one that is drawn.

        It is that at the row's own evaluation point, and what the item measures by default is, in some rows, another
        number; with ``same_point`` it is the measure as it is, of whatever row.
        """
        if self.item.kind == "memory":
            layers = self.item.form["layers"].get(row)
            return {} if layers is None else {0: millions(str(layers), int(variant))}
        if not same_point:
            measure = self._measure_of(row, measure)
        cells = self.finished[scale].get(self._read_off(variant, row), []) if scale else self.runs_of(variant, row)[1]
        found = {cell.seed: measured(cell.path, measure) for cell in cells}
        return {seed: value for seed, value in found.items() if value is not None}

    def _measure_of(self, row: str, measure: str) -> str:
        """Return the measure of a row: at its own evaluation point, or another number for a default measure."""
        own = self.item.readings.get(row, (row, measure))[1]
        return self.item.of(row, own if measure in self.item.measures else measure)

    def runs_of(self, variant: str, row: str) -> tuple[str, list[Cell]]:
        """Return the finished runs that a row is read off, and their scale."""
        return self.cells.get(self._read_off(variant, row), ("", []))

    def _read_off(self, variant: str, row: str) -> tuple[str, str]:
        return variant, self.item.readings.get(row, (row, ""))[0]

    def planned(self, variant: str, row: str) -> list[Cell]:
        """Return the runs of a row at either scale, whether they are there or not."""
        place = self._read_off(variant, row)
        return [c for plan in self.plans.values() for c in plan.cells if (c.variant, c.row) == place]

    def counts_of(self, variant: str) -> Counts | None:
        """Return the class counts of the clients, at the scale of the variant's runs if it has any."""
        ran = {scale for (of, _), (scale, _) in self.cells.items() if of == variant}
        found = [self.counts[variant, s] for s in SCALES if (variant, s) in self.counts and (not ran or s in ran)]
        return found[-1] if found else None

    @cached_property
    def entries(self) -> list[Entry]:
        """Every row in every column, in the order of the paper."""
        if not self.item.rows:
            return [] if self.item.draws_alone else [self._without_rows(variant) for variant in self.item.variants]
        found = [
            self._entry(variant, measure, row)
            for variant, measure in self.item.columns
            for row in self.item.rows
            # A paper may have a row and print no number in one of its columns.
            if (variant, measure, row) in self.item.printed
            or row not in self.item.content.get("printed", {})
            or self.runs_of(variant, row)[1]
        ]
        # What a method does not have, as a routing head, its runs do not tell.
        return [one for one in found if one.ours or one.printed or not self.runs_of(one.variant, one.row)[1]]

    @cached_property
    def verdicts(self) -> list[tuple[Claim, Verdict]]:
        """What came of each claim."""
        return [(claim, self._verdict(claim)) for claim in self.item.claims]

    @cached_property
    def usual_seeds(self) -> int:
        """Return over how many seeds most of its numbers are; 0 where there is none."""
        found = Counter(entry.ours.seeds for entry in self.entries if entry.ours and entry.measure != PARAMETERS)
        return max(found, key=lambda seeds: (found[seeds], seeds), default=0)

    @cached_property
    def seconds(self) -> float:
        """Wall-clock time of its runs, one after the other."""
        return sum(cell.summary()["seconds"] for _, cells in self.cells.values() for cell in cells)  # type: ignore[index]

    @cached_property
    def diverged(self) -> list[str]:
        """Runs that have diverged, by variant, row and seed; they count in no number."""
        ran = [cell for plan in self.plans.values() for cell in plan.cells] if self.item.has_runs else []
        return list(dict.fromkeys(cell.name for cell in ran if cell.summary("diverged") is not None))

    @property
    def scales(self) -> list[str]:
        """At which scales there are runs."""
        return [scale for scale in SCALES if any(own == scale for own, _ in self.cells.values())]

    def needed(self) -> str:
        """Return what a picture that needs no runs needs instead."""
        return self._command("", self.item.settings_of(self.item.variants[0]).data.dataset)

    def changed(self, scale: str) -> str:
        """Return in which settings a scale differs from the paper's, as ``key value (paper's)``."""
        small = self.item.content.get("small", {}) if scale == "small" else {}
        full = [cell.config for cell in (self.item.plan("full") if self.decisive else self.plans["full"]).cells]
        told = []
        for key, value in {**small.get("settings", {}), **self.decisive}.items():
            own = dict.fromkeys(shown(key, config.get(key, declared()[key].default)) for config in full)
            own.pop("", None)  # of a method that has no such setting
            if list(own) != [shown(key, value)]:
                told.append(f"{key} {shown(key, value)} ({' or '.join(own)})")
        for name, settings in {**small.get("runs", {}), **small.get("variants", {})}.items():
            theirs = [f"{key} {shown(key, value)}" for key, value in settings.items() if key not in self.decisive]
            told += [f"{name}: {', '.join(theirs)}"] if theirs else []
        return ", ".join(told)

    def _entry(self, variant: str, measure: str, row: str) -> Entry:
        printed = self.item.printed.get((variant, measure, row))
        place = (variant, measure, row)
        scale, _ = self.runs_of(variant, row)
        ours = number(list(self.values(variant, row, measure).values()))
        if ours is None:
            return Entry(*place, printed, None, scale, NOT_RUN, self._needs(variant, row))
        if printed is None:
            return Entry(*place, None, ours, scale, DRAWN, "")
        if partial := self._partial(variant, row, measure):
            return Entry(*place, printed, ours, scale, DIFFERS, f"measured over {partial} only")
        if measure == PARAMETERS:
            same = agrees(ours, printed.value, None, COUNTED * printed.value)
            why = "" if same else self.item.reason(variant, row)
            return Entry(*place, printed, ours, "full", REPRODUCED if same else DIFFERS, why)
        over_seeds = printed.spread if self.item.content.get("spread") == "seeds" else None
        unit = 1.0 if in_percent(measure) else HUNDREDTH
        alike = agrees(ours, printed.value, over_seeds, unit)
        if alike and scale == "full":
            return Entry(*place, printed, ours, scale, REPRODUCED, "")
        why = ("" if alike else self.item.reason(variant, row)) or ("" if scale == "full" else "run at scale small")
        return Entry(*place, printed, ours, scale, DIFFERS, why, alike)

    def _partial(self, variant: str, row: str, measure: str) -> str:
        """Return how many clients a row's number covers, if these are too few to speak for all clients."""
        found = (partial_coverage(cell.path, self._measure_of(row, measure)) for cell in self.runs_of(variant, row)[1])
        return next(filter(None, found), "")

    def _without_rows(self, variant: str) -> Entry:
        """Return the state of what has no rows: a picture of a partition, or what Posy cannot run."""
        if self.counts_of(variant) is not None:
            return Entry(variant, "", "", None, None, "", DRAWN, "")
        cells = [cell for plan in self.plans.values() if (cell := first_cells(plan).get(variant))]
        if not cells:
            return Entry(variant, "", "", None, None, "", NOT_RUN, str(self.item.content.get("needs", "")))
        return Entry(variant, "", "", None, None, "", NOT_RUN, self._command("", _dataset(cells[0])))

    def _needs(self, variant: str, row: str) -> str:
        """Return what a row that was not run needs."""
        planned = self.planned(variant, row)
        if not planned:
            return str(self.item.content.get("needs", f"Posy has no {row}"))
        scale = next(scale for scale, plan in self.plans.items() if planned[0] in plan.cells)
        weights = Path(str(planned[0].config.get("weights", ""))).name
        return self._command(f" --scale {scale}", _dataset(planned[0])) + (f" and {weights} there" if weights else "")

    def _command(self, options: str, dataset: str) -> str:
        """Return the command that makes what is missing, and the data that it needs."""
        command = f"`posy paper {self.item.paper} {self.item.name}{options}`"
        if any(_dataset(cell) == dataset for _, cells in self.cells.values() for cell in cells):
            return f"{command}, and the time that its runs take; the data is there"
        return f"{command}, with {dataset} in data-dir ({WANTED[dataset]})" if dataset in WANTED else command

    def _verdict(self, claim: Claim) -> Verdict:
        """Judge a claim at the scale at which most of its rows can be compared, then in most columns, then the larger.

        A run at one scale is never compared with one at the other.
        """
        found = {scale: self._differences(claim, scale) for scale in self.finished or ("",)}
        scale = max(reversed(found), key=lambda one: (len({of for of, _ in found[one]}), len(found[one])))
        differences: dict[str, list[float]] = {}
        for (of, _), own in found[scale].items():
            differences.setdefault(of, []).extend(own)
        return replace(verdict(differences, claim.by, claim.within, claim.but), scale=scale)

    def _differences(self, claim: Claim, scale: str) -> dict[tuple[str, str], list[float]]:
        """Return by how much each claimed row is higher than each it is above, by the two rows and the variant.

        There is one for each seed that both have run with.
        """
        found: dict[tuple[str, str], list[float]] = {}
        for higher, lower in itertools.product(claim.higher, claim.lower):
            of = " over ".join(name for name, rows in ((higher, claim.higher), (lower, claim.lower)) if len(rows) > 1)
            # Rows that name their variants are the same in all.
            for variant in [""] if " / " in higher else claim.variants or self.item.variants:
                above, below = (
                    self.values(*_place(name, variant), claim.measure, scale, same_point=claim.same_point)
                    for name in (higher, lower)
                )
                if claim.spread:
                    above, below = distances(above), distances(below)
                if shared := sorted(above.keys() & below.keys()):
                    found[of, variant] = [above[seed] - below[seed] for seed in shared]
        return found


def shown(key: str, value: Scalar) -> str:
    """Return a setting's value as one reads it."""
    return "all" if key == "max-samples" and value == 0 else typed(value)


def typed(value: Scalar) -> str:
    """Return a setting's value as it is typed."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _shared_seeds(ended: Iterable[Cell]) -> set[int]:
    """Return the seeds with which all rows have run that have run at all, by the runs that have ended."""
    ran: dict[tuple[str, str], set[int]] = {}
    for cell in ended:
        ran.setdefault((cell.variant, cell.row), set()).add(cell.seed)
    return set.intersection(*ran.values()) if ran else set()


def _dataset(cell: Cell) -> str:
    return str(cell.config.get("dataset", DataSettings.dataset))


def _place(name: str, variant: str) -> tuple[str, str]:
    """Return variant and row of ``variant / row``, or of a row in a given variant."""
    own, slash, row = name.partition(" / ")
    return (own, row) if slash else (variant, name)
