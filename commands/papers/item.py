"""A table or figure of a paper as a YAML file tells it: its runs, what the paper prints, and what is claimed."""

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from posy.commands import archive
from posy.commands.papers.record import POINTS, check_measure, collect
from posy.commands.table import Cell, Plan, plan_of
from posy.settings import Scalar, SettingsError, nearest
from posy.strategies.registry import PAPERS, normalised, read_settings, with_experiment
from posy.strategies.settings import Settings
from posy.yaml12 import read_yaml

SCALES = ("small", "full")
"""``full`` is the paper's own size; ``small`` shows on a laptop what the paper shows."""
PARTS: dict[str, type | tuple[type, ...]] = {
    "shows": str,
    "here": str,
    "measure": (str, list),
    "points": dict,
    "printed": dict,
    "spread": str,
    "read": dict,
    "claims": list,
    "reasons": list,
    "form": dict,
    "small": dict,
    "needs": str,
}
"""What the file of a table or figure may hold beside the parts of a table of runs."""
SMALL = ("settings", "seeds", "without", "runs", "variants")
"""What differs at scale ``small``: settings, seeds, rows and variants left out, and, over these settings, those by rows
or by variants."""
ALONE = ("samples", "sharing", "drift", "pathways", "ridge")
"""Forms of pictures that need no runs, and are drawn from their settings."""
SELDOM = 1_000_000
"""``checkpoint-every`` of runs at scale ``full``: only checkpoints that cost little time are written."""
TITLE = "Table 1: accuracy"
"""What a title looks like."""
CLAIM = ("say", "higher", "lower", "in", "measure", "same-point", "by", "within", "but", "spread", "why")
"""What a claim may hold."""
PRINTED = re.compile(r"(-?[\d.]+)(?: ?± ?([\d.]+))?")
"""A number as a paper prints it."""


class Printed(NamedTuple):
    """A number that a paper prints, its ±, and both as they are printed."""

    value: float
    spread: float | None
    text: str


@dataclass(frozen=True)
class Claim:
    """What a paper says about its numbers: some rows are higher than others, or close to them.

    ``variants`` are those that it holds in, all if there are none. The difference is claimed to be larger than ``by``,
    or, where ``within`` is given, smaller than that on either side; ``but`` as many of the lower rows may be above.
    With ``same_point`` all rows are taken at the evaluation point of ``measure``, whatever their own is. With
    ``spread`` it is not the numbers that are higher but their distances from their mean over the seeds. ``why`` is told
    where it is not confirmed.
    """

    say: str
    higher: tuple[str, ...]
    lower: tuple[str, ...]
    variants: tuple[str, ...] = ()
    measure: str = ""
    same_point: bool = False
    by: float = 0.0
    within: float | None = None
    but: int = 0
    spread: bool = False
    why: str = ""


@dataclass(frozen=True)
class Item:
    """A table or figure of a paper."""

    paper: str
    name: str
    file: Path
    content: Mapping[str, Any]

    @cached_property
    def title(self) -> str:
        """Its name in the paper, and what it holds."""
        return str(self.content["title"])

    @cached_property
    def measures(self) -> list[str]:
        """What is measured, as :func:`posy.commands.papers.record.measured` reads it."""
        told = self.content.get("measure", "served last")
        return [check_measure(str(one), str(self.file)) for one in (told if isinstance(told, list) else [told])]

    @cached_property
    def columns(self) -> list[tuple[str, str]]:
        """Its columns: variant and measure."""
        return [(variant, measure) for variant in self.variants for measure in self.measures]

    def of(self, row: str, measure: str) -> str:
        """Return a measure of a row, which may have an evaluation point of its own."""
        point, *rest = measure.split()
        return " ".join([self.content.get("points", {}).get(row, point) if point in POINTS else point, *rest])

    @cached_property
    def rows(self) -> list[str]:
        """Names of its rows: as the paper has them if it prints a number in each, else in the order of the runs."""
        run, printed = ([entry["name"] for entry in self.content.get("runs", [])], [*self.content.get("printed", {})])
        both = [*printed, *run] if set(run) <= set(printed) else [*run, *printed]
        return list(dict.fromkeys([*both, *self.content.get("read", {})]))

    @cached_property
    def readings(self) -> dict[str, tuple[str, str]]:
        """Rows with a measure of their own, or read off the runs of another row: that row, and the measure."""
        run = {entry["name"] for entry in self.content.get("runs", [])}
        found = {}
        for row, told in self.content.get("read", {}).items():
            where = f"read of {row} in {self.file}"
            if not isinstance(told, dict) or not {"measure"} <= told.keys() <= {"of", "measure"}:
                raise SettingsError(f"{where}: it must be `measure: ...`, and `of: ROW` where that is another row's")
            of = told.get("of", row)
            if of not in run:
                raise SettingsError(f"{where}: {of!r} is no row of runs")
            found[row] = (str(of), check_measure(str(told["measure"]), where))
        return found

    @cached_property
    def variants(self) -> list[str]:
        """Names of its columns; one empty name where it has none."""
        return [entry["name"] for entry in self.content.get("variants", [])] or [""]

    @cached_property
    def printed(self) -> dict[tuple[str, str, str], Printed]:
        """What the paper prints, by variant, measure and row."""
        found = {}
        for row, told in self.content.get("printed", {}).items():
            values = told if isinstance(told, list) else [told]
            if len(values) != len(self.columns):
                raise SettingsError(
                    f"printed of {row} in {self.file}: {len(values)} values; there are {len(self.columns)} columns"
                )
            for (variant, measure), value in zip(self.columns, values, strict=True):
                if value is None:
                    continue
                match = PRINTED.fullmatch(str(value))
                if match is None:
                    raise SettingsError(f"{value!r} of {row} in {self.file}: it must be a number, as in 61.36 ± 8.54")
                found[variant, measure, row] = Printed(
                    float(match[1]), float(match[2]) if match[2] else None, str(value)
                )
        return found

    @cached_property
    def claims(self) -> list[Claim]:
        """What the paper says about it."""
        return [self._claim(entry) for entry in self.content.get("claims", [])]

    @property
    def in_paper(self) -> bool:
        """Whether the paper has it; what goes beyond the paper has another name than a table or figure."""
        return self.name.startswith(("table", "figure"))

    @property
    def scales(self) -> tuple[str, ...]:
        """At which scales it can be run: what goes beyond the paper and names no smaller size has its own alone."""
        return SCALES if self.in_paper or "small" in self.content else ("full",)

    @property
    def has_runs(self) -> bool:
        """Whether it needs any runs; a picture of a partition needs none."""
        return "runs" in self.content

    @property
    def draws_alone(self) -> bool:
        """Whether it is a picture that needs no runs."""
        return self.form.get("kind") in ALONE

    @property
    def kind(self) -> str:
        """Name of the form in which it is drawn."""
        return str(self.form.get("kind"))

    @property
    def counts_classes(self) -> bool:
        """Whether it shows the class counts of the clients."""
        return self.kind in ("partition", "correlation") or bool(self.form.get("counts"))

    @property
    def form(self) -> Mapping[str, Any]:
        """How it is drawn."""
        return self.content.get("form", {"kind": "table"})

    def reason(self, variant: str, row: str) -> str:
        """Return why a number differs from the paper's, as far as that is known."""
        for entry in self.content.get("reasons", []):
            if variant in entry.get("variants", [variant]) and row in entry.get("rows", [row]):
                return str(entry["say"])
        return ""

    def settings_of(self, variant: str, given: Mapping[str, Scalar] | None = None) -> Settings:
        """Return the settings of a column of what needs no runs."""
        of_variants = {one["name"]: one.get("settings", {}) for one in self.content.get("variants", [])}
        own = of_variants.get(variant, {})
        chosen = {"seed": 0, **self.content.get("settings", {}), **own, **(given or {})}
        return read_settings(with_experiment(chosen, str(self.file)), str(self.file))

    def seeds(self, scale: str, number: int | None = None) -> list[int]:
        """Return the seeds that it is run with at a scale: its own, or, of a ``number`` of them, the first ones."""
        small = self.content.get("small", {}) if scale == "small" else {}
        return list(range(number)) if number else small.get("seeds", self.content.get("seeds", [0, 1, 2]))

    def plan(
        self,
        scale: str,
        given: Mapping[str, Scalar] | None = None,
        folder: Path | None = None,
        seeds: int | None = None,
    ) -> Plan:
        """Return its runs at a scale, with further settings; results go into a folder, or :func:`results_of` the paper.

        They are those of its own seeds, of a number of ``seeds``, and of those that anything of the paper has run with.
        """
        small = self.content.get("small", {}) if scale == "small" else {}
        table = {key: value for key, value in self.content.items() if key not in PARTS}
        table.setdefault("runs", [{"name": "data"}])  # never run: its settings tell which data is drawn
        output = (folder or results_of(self.paper)) / f"{self.name}-{scale}"
        table["seeds"] = list(dict.fromkeys([*self.seeds(scale), *self.seeds(scale, seeds), *_seeds_in(output.parent)]))
        left_out = small.get("without", [])
        for part in ("runs", "variants"):
            if part in table:
                table[part] = [entry for entry in table[part] if entry["name"] not in left_out]
        common = dict(small.get("settings", {}))
        for part in ("runs", "variants"):
            changed = small.get(part, {})
            # What some of the rows or variants have otherwise stands in each of them.
            mentioned = dict.fromkeys(itertools.chain(*changed.values()))
            theirs = {key: common.pop(key) for key in mentioned if key in common}
            if changed and part in table:
                table[part] = [_with(entry, theirs | changed.get(entry["name"], {})) for entry in table[part]]
        # A setting of a method that only some rows run is theirs alone: those of a table are cut down to each row's.
        over = {**common, **({"checkpoint-every": SELDOM} if scale == "full" else {}), **(given or {})}
        return replace(plan_of(table, self.file, over, str(output)), collect=collect)

    def _claim(self, entry: Mapping[str, Any]) -> Claim:
        keys = entry.keys() if isinstance(entry, dict) else set()
        if not {"say", "higher", "lower"} <= keys <= set(CLAIM):
            raise SettingsError(f"{entry!r} in claims of {self.file}: a claim holds {', '.join(CLAIM)}")
        higher, lower = (entry[key] if isinstance(entry[key], list) else [entry[key]] for key in ("higher", "lower"))
        variants = tuple(entry.get("in", []))
        for name in [*higher, *lower]:
            variant, slash, row = name.partition(" / ")
            if (row if slash else name) not in self.rows or (slash and variant not in self.variants):
                raise SettingsError(f"{name!r} in claims of {self.file}: there is no such row")
        if unknown := set(variants) - set(self.variants):
            raise SettingsError(f"in = {', '.join(sorted(unknown))} in claims of {self.file}: there is no such variant")
        measure = check_measure(entry.get("measure", self.measures[0]), f"claims of {self.file}")
        return Claim(
            entry["say"],
            tuple(higher),
            tuple(lower),
            variants,
            measure,
            same_point=bool(entry.get("same-point")),
            by=float(entry.get("by", 0)),
            within=entry.get("within"),
            but=int(entry.get("but", 0)),
            spread=bool(entry.get("spread")),
            why=str(entry.get("why", "")),
        )


def papers() -> list[str]:
    """Return the names of the papers."""
    return sorted(folder.name for folder in PAPERS.iterdir() if folder.is_dir())


def items(paper: str) -> list[Item]:
    """Return the tables and figures of a paper, tables first, in the order of their numbers."""
    if paper not in papers():
        near = nearest(paper, papers())
        hint = f"did you mean {near}?" if near else f"there are {', '.join(papers())}"
        raise SettingsError(f"there is no paper {paper!r}; {hint}")
    return [read_item(file) for file in sorted((PAPERS / paper).glob("*.yaml"), key=_number)]


def item(paper: str, name: str) -> Item:
    """Return a table or figure by its name."""
    found = {one.name: one for one in items(paper)}
    if name not in found:
        raise SettingsError(f"{paper} has no {name!r}; there are {', '.join(found)}")
    return found[name]


def read_item(file: Path) -> Item:
    """Read the file of a table or figure; what is wrong in it raises :class:`SettingsError`."""
    content = read_yaml(file)
    for key, kind in PARTS.items():
        if key in content and not isinstance(content[key], kind):
            names = " or a ".join(one.__name__ for one in (kind if isinstance(kind, tuple) else (kind,)))
            raise SettingsError(f"{key} = {content[key]!r} in {file}: it must be a {names}")
    if not re.fullmatch(r"[^:]+: .+", str(content.get("title"))):
        raise SettingsError(
            f"title = {content.get('title')!r} in {file}: it must be a name and what that is, as in {TITLE}"
        )
    if unknown := content.get("small", {}).keys() - set(SMALL):
        raise SettingsError(f"{', '.join(sorted(unknown))} in small of {file}: it may hold {', '.join(SMALL)}")
    return Item(file.parent.name, file.stem, file, content)


def take_up(plan: Plan) -> None:
    """Write the files of the runs that are in a plan's archive, or, of what it lacks, in that of another table."""
    lacking = archive.restore(plan.output, plan.cells)
    for cell, line in _matching(lacking, _archives(plan.output.parent)):
        archive.write(cell.path, line)


def results_of(paper: str) -> Path:
    """Return the folder of a paper's runs: of the working directory, or else of the checkout that Posy runs from."""
    here, checkout = Path("papers") / paper / "results", PAPERS / paper / "results"
    return checkout if checkout.is_dir() and not here.is_dir() else here


def missing_results(names: Iterable[str]) -> str:
    """Return where the archives of some papers' runs were looked for, if there is none of them; else an empty text."""
    if any(_archives(results_of(name)) for name in names):
        return ""
    places = dict.fromkeys(map(str, (Path("papers").absolute(), PAPERS)))
    return (
        f"no results of earlier runs: there is no */results/*/{archive.FILE} in {' or '.join(places)}; change to a "
        "checkout of Posy, which holds them, or run a table with `posy paper PAPER TABLE`"
    )


def held_elsewhere(plan: Plan) -> set[str]:
    """Return the names of the cells whose runs are in the archive of another table."""
    others = [folder for folder in _archives(plan.output.parent) if folder != plan.output]
    return {cell.name for cell, _ in _matching(plan.cells, others)}


def _archives(results: Path) -> list[Path]:
    """Return the folders of a paper's tables that have an archive."""
    return sorted(file.parent for file in results.glob(f"*/{archive.FILE}"))


def _matching(cells: Iterable[Cell], folders: Iterable[Path]) -> Iterator[tuple[Cell, dict[str, Any]]]:
    """Yield the cells that have run with the same settings for some table, under whatever name, with the line of it."""
    wanted: dict[frozenset[tuple[str, Scalar]], list[Cell]] = {}
    earlier: dict[str, dict[str, Scalar]] = {}
    for cell in cells:
        wanted.setdefault(frozenset((key, value) for key, (value, _) in cell.decisive.items()), []).append(cell)
        earlier[cell.method] = {key: before for key, (_, before) in cell.decisive.items()}
    for folder in folders if wanted else ():
        for line in _lines(folder):
            ran = line["config"]["settings"]
            if ran["method"] not in earlier:
                continue
            known, ran = earlier[ran["method"]], normalised(ran)
            for cell in wanted.pop(frozenset((key, ran.get(key, known[key])) for key in known), []):
                yield cell, line


def _seeds_in(results: Path) -> list[int]:
    """Return the seeds that stand in the archives of a folder's tables."""
    return sorted({line["config"]["settings"]["seed"] for folder in _archives(results) for line in _lines(folder)})


def _lines(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of an archive, which are read again when it has changed."""
    stamp = (folder / archive.FILE).stat()
    return _lines_at(folder, stamp.st_mtime_ns, stamp.st_size)


@lru_cache(maxsize=64)
def _lines_at(folder: Path, changed: int, size: int) -> list[dict[str, Any]]:
    return list(archive.read(folder).values())


def _with(entry: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row with further settings."""
    return {**entry, "settings": {**entry.get("settings", {}), **settings}}


def _number(file: Path) -> tuple[str, str, int, str]:
    """Return what files are sorted by: table2 comes before table10, and figure1 after both."""
    match = re.fullmatch(r"([a-z]+)-?([a-z]*)(\d*)(.*)", file.stem)
    kind, appendix, number, rest = match.groups() if match else (file.stem, "", "", "")
    return ("a" if kind == "table" else kind, appendix, int(number or 0), rest)
