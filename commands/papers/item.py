"""The YAML file of a paper's table or figure: its runs, the printed numbers, and the paper's claims."""

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from posy.commands import archive
from posy.commands.papers.record import POINTS, check_measure, collect, measure_title
from posy.commands.table import Cell, Plan, plan_of
from posy.settings import Scalar, SettingsError, nearest
from posy.strategies.registry import PAPERS, normalised, read_settings, with_experiment
from posy.strategies.settings import Settings
from posy.yaml12 import read_yaml

SCALES = ("small", "full")
"""``full`` is the paper's size, and ``small`` is a reduced run for a laptop."""
PARTS: dict[str, type | tuple[type, ...]] = {
    "shows": str,
    "here": str,
    "names": dict,
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
"""Keys of a file that describes a table or figure, in addition to the keys of a table of runs."""
SMALL = ("settings", "seeds", "without", "runs", "variants")
"""Changes at the small scale: settings, seeds, omitted rows and variants (``without``), and additional settings for
rows or variants, which override the common settings."""
ALONE = ("samples", "sharing", "drift", "pathways", "ridge")
"""Forms of figures that need no runs. Posy draws them from their settings."""
SELDOM = 1_000_000
"""``checkpoint-every`` for runs at the full scale. This interval exceeds the number of rounds of these runs. Posy
therefore writes intermediate checkpoints only if they take a small share of the run's time."""
TITLE = "Table 1: accuracy"
"""Example of a title."""
MAIN_CLAIMS = "claims.yaml"
"""File with the paper's main claims, in the folder of its tables and figures."""
CLAIM = ("say", "higher", "lower", "in", "measure", "same-point", "by", "within", "but", "spread", "ranked", "why")
"""Keys of a claim."""
PRINTED = re.compile(r"(-?[\d.]+)(?: ?± ?([\d.]+))?")
"""Format of a printed number."""


class Printed(NamedTuple):
    """A printed number: its value, the number after ± (or None), and the paper's text."""

    value: float
    spread: float | None
    text: str


@dataclass(frozen=True)
class Claim:
    """A paper's statement about its numbers: some rows are higher than others, or close to them.

    The claim covers ``variants``, or all variants if it names none. It states a difference of more than ``by``, or, if
    ``within`` is set, an absolute difference of less than ``within``. Up to ``but`` of the lower rows may be higher.
    With ``same_point``, all rows use the evaluation point of ``measure`` instead of their method's point. With
    ``spread``, the claim compares the distances of the numbers from their mean over the seeds. The rank of the higher
    row also counts the rows ``ranked``, which the claim does not test. ``why`` explains why the runs do not confirm the
    claim.
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
    ranked: tuple[str, ...] = ()
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
        """Name in the paper and description, such as ``Table 1: accuracy``."""
        return str(self.content["title"])

    @cached_property
    def measures(self) -> list[str]:
        """Measures of the item, in the format of :func:`posy.commands.papers.record.measured`."""
        names = self.content.get("measure", "served last")
        return [check_measure(str(name), str(self.file)) for name in (names if isinstance(names, list) else [names])]

    @cached_property
    def columns(self) -> list[tuple[str, str]]:
        """Columns of the item, as pairs of variant and measure."""
        return [(variant, measure) for variant in self.variants for measure in self.measures]

    def of(self, row: str, measure: str) -> str:
        """Return a measure, at the row's evaluation point if the item sets one for this row."""
        point, *words = measure.split()
        return " ".join([self.content.get("points", {}).get(row, point) if point in POINTS else point, *words])

    @cached_property
    def rows(self) -> list[str]:
        """Names of the rows, in the paper's order if the paper prints all of them, else in the order of ``runs``."""
        run, printed = ([entry["name"] for entry in self.content.get("runs", [])], [*self.content.get("printed", {})])
        both = [*printed, *run] if set(run) <= set(printed) else [*run, *printed]
        return list(dict.fromkeys([*both, *self.content.get("read", {})]))

    @cached_property
    def readings(self) -> dict[str, tuple[str, str]]:
        """Source row and measure of each row that has its own measure or uses another row's runs."""
        run = {entry["name"] for entry in self.content.get("runs", [])}
        readings = {}
        for row, entry in self.content.get("read", {}).items():
            where = f"read of {row} in {self.file}"
            if not isinstance(entry, dict) or not {"measure"} <= entry.keys() <= {"of", "measure"}:
                raise SettingsError(f"{where}: it must be `measure: ...`, with `of: ROW` to use another row's runs")
            of = entry.get("of", row)
            if of not in run:
                raise SettingsError(f"{where}: {of!r} is not a row with runs; choose one of {', '.join(sorted(run))}")
            readings[row] = (str(of), check_measure(str(entry["measure"]), where))
        return readings

    @cached_property
    def variants(self) -> list[str]:
        """Names of the variants, or a single empty name."""
        return [entry["name"] for entry in self.content.get("variants", [])] or [""]

    @cached_property
    def printed(self) -> dict[tuple[str, str, str], Printed]:
        """The printed numbers, by variant, measure and row."""
        printed = {}
        for row, entry in self.content.get("printed", {}).items():
            values = entry if isinstance(entry, list) else [entry]
            if len(values) != len(self.columns):
                raise SettingsError(
                    f"{self.file}: printed values of {row}: {len(values)} for {len(self.columns)} columns"
                )
            for (variant, measure), value in zip(self.columns, values, strict=True):
                if value is None:
                    continue
                match = PRINTED.fullmatch(str(value))
                if match is None:
                    raise SettingsError(f"{value!r} of {row} in {self.file}: it must be a number such as 61.36 ± 8.54")
                if match[2] and "spread" not in self.content:
                    raise SettingsError(
                        f"{self.file}: {value} of {row} has a spread; name its repetitions in `spread:`, such as seeds"
                    )
                printed[variant, measure, row] = Printed(
                    float(match[1]), float(match[2]) if match[2] else None, str(value)
                )
        return printed

    @cached_property
    def claims(self) -> list[Claim]:
        """The paper's claims about the item."""
        return [_claim(self, entry) for entry in self.content.get("claims", [])]

    @property
    def names(self) -> Mapping[str, str]:
        """The paper's names of rows, variants and measures whose own names are keys of settings or ambiguous."""
        return {**self.form.get("names", {}), **self.content.get("names", {})}

    def label(self, name: str) -> str:
        """Return the display name of a row or variant, or of a row and its variant (``VARIANT / ROW``)."""
        variant, slash, row = name.partition(" / ")
        if slash:
            return f"{self.label(variant)} / {self.label(row)}"
        prefix = f"{self.form['rows']} = " if "rows" in self.form and name in self.rows else ""
        return self.names.get(name, f"{prefix}{name}")

    def measure_label(self, measure: str) -> str:
        """Return the display name of a measure."""
        return self.names.get(measure, self.names.get(measure.removeprefix("round "), measure_title(measure)))

    @property
    def in_paper(self) -> bool:
        """Whether the item is in the paper. Names of additional experiments start with other words."""
        return self.name.startswith(("table", "figure"))

    @property
    def scales(self) -> tuple[str, ...]:
        """Scales of the item. An additional experiment without ``small`` has only the scale ``full``."""
        return SCALES if self.in_paper or "small" in self.content else ("full",)

    @property
    def has_runs(self) -> bool:
        """Whether the item needs runs. A figure of a partition needs no runs."""
        return "runs" in self.content

    @property
    def draws_alone(self) -> bool:
        """Whether the item is a figure that Posy draws from the settings alone, without any runs."""
        return self.form.get("kind") in ALONE

    @property
    def kind(self) -> str:
        """Kind of table or figure that Posy draws for the item."""
        return str(self.form.get("kind"))

    @property
    def counts_classes(self) -> bool:
        """Whether the item shows the class counts of the clients."""
        return self.kind in ("partition", "correlation") or bool(self.form.get("counts"))

    @property
    def form(self) -> Mapping[str, Any]:
        """Form in which Posy draws the item, with the options of the form."""
        return self.content.get("form", {"kind": "table"})

    def reason(self, variant: str, row: str) -> tuple[str, bool]:
        """Return the known reason why a number differs from the paper's (or ""), and whether the two are comparable.

        They are not comparable (``comparable: false``) if the rounds, the data or the settings differ from the paper's.
        """
        for entry in self.content.get("reasons", []):
            if variant in entry.get("variants", [variant]) and row in entry.get("rows", [row]):
                return str(entry["say"]), bool(entry.get("comparable", True))
        return "", True

    def settings_of(self, variant: str, overrides: Mapping[str, Scalar] | None = None) -> Settings:
        """Return a variant's settings, for a figure that needs no runs."""
        of_variants = {entry["name"]: entry.get("settings", {}) for entry in self.content.get("variants", [])}
        changes = of_variants.get(variant, {})
        config = {"seed": 0, **self.content.get("settings", {}), **changes, **(overrides or {})}
        return read_settings(with_experiment(config, str(self.file)), str(self.file))

    def seeds(self, scale: str, number: int | None = None) -> list[int]:
        """Return the seeds at a scale: the seeds of the file, or 0 to ``number`` - 1."""
        small = self.content.get("small", {}) if scale == "small" else {}
        return list(range(number)) if number else small.get("seeds", self.content.get("seeds", [0, 1, 2]))

    def plan(
        self,
        scale: str,
        overrides: Mapping[str, Scalar] | None = None,
        folder: Path | None = None,
        seeds: int | None = None,
        strict: bool = True,
    ) -> Plan:
        """Return the item's runs at a scale, with ``folder`` (by default :func:`results_of`) for their results.

        The plan contains the file's seeds, 0 to ``seeds`` - 1, and all seeds in the paper's archives. ``overrides``
        replace settings of the file. If ``strict`` is false, Posy accepts overrides that have no effect.
        """
        small = self.content.get("small", {}) if scale == "small" else {}
        table = {key: value for key, value in self.content.items() if key not in PARTS}
        table.setdefault("runs", [{"name": "data"}])  # never run: its settings name the data to draw
        output = (folder or results_of(self.paper)) / f"{self.name}-{scale}"
        stored_seeds = _seeds_in(archives_of(self.paper, folder))
        table["seeds"] = list(dict.fromkeys([*self.seeds(scale), *self.seeds(scale, seeds), *stored_seeds]))
        omitted = small.get("without", [])
        for part in ("runs", "variants"):
            if part in table:
                table[part] = [entry for entry in table[part] if entry["name"] not in omitted]
        common = dict(small.get("settings", {}))
        for part in ("runs", "variants"):
            changed = small.get(part, {})
            # If some rows or variants change a common setting, move it into all rows or variants.
            mentioned = dict.fromkeys(itertools.chain(*changed.values()))
            shared = {key: common.pop(key) for key in mentioned if key in common}
            if changed and part in table:
                table[part] = [_with(entry, shared | changed.get(entry["name"], {})) for entry in table[part]]
        # plan_of removes the settings of other methods from each row.
        reduced = common | ({"checkpoint-every": SELDOM} if scale == "full" else {})
        return replace(plan_of(table, self.file, overrides or {}, str(output), reduced, strict), collect=collect)


def papers() -> list[str]:
    """Return the names of the papers."""
    names = sorted(folder.name for folder in PAPERS.glob("*/") if any(folder.glob("*.yaml")))
    if not names:
        raise SettingsError(
            f"{PAPERS} contains no papers (*/table1.yaml); install Posy from its repository (pip install ./posy), "
            "whose package contains them"
        )
    return names


def items(paper: str) -> list[Item]:
    """Return the tables and figures of a paper, tables first, each in numerical order."""
    if paper not in papers():
        similar = nearest(paper, papers())
        hint = f"did you mean {similar}?" if similar else f"choose from {', '.join(papers())}"
        raise SettingsError(f"Posy does not reproduce a paper named {paper!r}; {hint}")
    files = (file for file in (PAPERS / paper).glob("*.yaml") if file.name != MAIN_CLAIMS)
    return [read_item(file) for file in sorted(files, key=_number)]


def item(paper: str, name: str) -> Item:
    """Return a table or figure by its name."""
    by_name = {entry.name: entry for entry in items(paper)}
    if name not in by_name:
        raise SettingsError(f"{paper} has no {name!r}; choose from {', '.join(by_name)}")
    return by_name[name]


def read_item(file: Path) -> Item:
    """Read the file of a table or figure; raise :class:`SettingsError` if the file is invalid."""
    content = read_yaml(file)
    for key, kind in PARTS.items():
        if key in content and not isinstance(content[key], kind):
            names = " or a ".join(type_.__name__ for type_ in (kind if isinstance(kind, tuple) else (kind,)))
            raise SettingsError(f"{key} = {content[key]!r} in {file}: it must be a {names}")
    if not re.fullmatch(r"[^:]+: .+", str(content.get("title"))):
        raise SettingsError(
            f"title = {content.get('title')!r} in {file}: it must be a name and a description, such as {TITLE}"
        )
    if unknown := content.get("small", {}).keys() - set(SMALL):
        raise SettingsError(
            f"{', '.join(sorted(unknown))} in small of {file}: unknown keys; choose from {', '.join(SMALL)}"
        )
    return Item(file.parent.name, file.stem, file, content)


def _claim(subject: Item, entry: Mapping[str, Any]) -> Claim:
    """Return a claim about an item; raise :class:`SettingsError` if the claim's entry is invalid."""
    keys = entry.keys() if isinstance(entry, dict) else set()
    if not {"say", "higher", "lower"} <= keys <= set(CLAIM):
        raise SettingsError(f"{entry!r} in claims of {subject.file}: a claim has the keys {', '.join(CLAIM)}")
    higher, lower = (entry[key] if isinstance(entry[key], list) else [entry[key]] for key in ("higher", "lower"))
    variants = tuple(entry.get("in", []))
    ranked = tuple(entry.get("ranked", []))
    for name in [*higher, *lower, *ranked]:
        variant, slash, row = name.partition(" / ")
        if (row if slash else name) not in subject.rows or (slash and variant not in subject.variants):
            raise SettingsError(
                f"{name!r} in claims of {subject.file}: use the name of one of its rows, or VARIANT / ROW"
            )
    if unknown := set(variants) - set(subject.variants):
        raise SettingsError(
            f"in = {', '.join(sorted(unknown))} in claims of {subject.file}: use the name of one of its variants"
        )
    measure = check_measure(entry.get("measure", subject.measures[0]), f"claims of {subject.file}")
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
        ranked=ranked,
        why=str(entry.get("why", "")),
    )


def restore_runs(plan: Plan, archives: Sequence[Path]) -> None:
    """Restore a plan's runs from the archive in its folder, or, if they are missing there, from other archives."""
    missing_cells = archive.restore(plan.output, plan.cells)
    for cell, line in _matching(missing_cells, archives):
        archive.write(cell.path, line)


def results_of(paper: str) -> Path:
    """Return the folder of a paper's runs in the working directory, or a temporary folder if that does not exist."""
    local = local_results(paper)
    return local if local.is_dir() else Path(_temporary_directory(Path.cwd()).name) / paper / "results"


def local_results(paper: str) -> Path:
    """Return the folder in the working directory in which Posy stores the runs of a paper."""
    return Path("papers") / paper / "results"


def stored_results(paper: str) -> Path:
    """Return the folder with the archives that Posy contains for a paper."""
    return PAPERS / paper / "results"


def missing_results(names: Iterable[str]) -> str:
    """Return a message that lists the searched folders if the papers have no archive of runs, else an empty string."""
    if any(_archives(_default_folders(name)) for name in names):
        return ""
    folders = dict.fromkeys(map(str, (Path("papers").absolute(), PAPERS)))
    return (
        f"no results of earlier runs: {' and '.join(folders)} contain no */results/*/{archive.FILE}; install Posy from "
        "its repository, whose package contains them, or run a table with `posy paper PAPER TABLE`"
    )


def archives_of(paper: str, folder: Path | None = None) -> list[Path]:
    """Return the folders of a paper's tables that have an archive.

    They are in ``folder``. By default, they are in the working directory and in Posy's own ``papers``.
    """
    return _archives([folder] if folder else _default_folders(paper))


def archived_elsewhere(plan: Plan, archives: Sequence[Path]) -> set[str]:
    """Return the names of the cells that have a run in the archive of another folder."""
    others = [path for path in archives if path.resolve() != plan.output.resolve()]
    return {cell.name for cell, _ in _matching(plan.cells, others)}


@cache
def _temporary_directory(working_directory: Path) -> TemporaryDirectory[str]:
    """Return a folder for restored runs, one per working directory, which Posy deletes at the end of the process."""
    return TemporaryDirectory(prefix="posy-papers-")


def _default_folders(paper: str) -> list[Path]:
    """Return the results folders of a paper in the working directory and in Posy, without duplicates."""
    local, stored = local_results(paper), stored_results(paper)
    return [local] if local.resolve() == stored.resolve() else [local, stored]


def _archives(folders: Iterable[Path]) -> list[Path]:
    """Return the folders of the tables that have an archive, in results folders."""
    return [file.parent for folder in folders for file in sorted(folder.glob(f"*/{archive.FILE}"))]


def _matching(cells: Iterable[Cell], folders: Iterable[Path]) -> Iterator[tuple[Cell, dict[str, Any]]]:
    """Yield each cell with the archived line of a run that has the same settings, whatever the run's name."""
    cells_by_settings: dict[frozenset[tuple[str, Scalar]], list[Cell]] = {}
    defaults: dict[str, dict[str, Scalar]] = {}
    for cell in cells:
        cells_by_settings.setdefault(frozenset((key, value) for key, (value, _) in cell.decisive.items()), []).append(
            cell
        )
        defaults[cell.method] = {key: before for key, (_, before) in cell.decisive.items()}
    for folder in folders if cells_by_settings else ():
        for line in _lines(folder):
            run_settings = line["config"]["settings"]
            if run_settings["method"] not in defaults:
                continue
            method_defaults, run_settings = defaults[run_settings["method"]], normalised(run_settings)
            for cell in cells_by_settings.pop(
                frozenset((key, run_settings.get(key, method_defaults[key])) for key in method_defaults), []
            ):
                yield cell, line


def _seeds_in(archives: Iterable[Path]) -> list[int]:
    """Return the seeds in the archives of some folders."""
    return sorted({line["config"]["settings"]["seed"] for folder in archives for line in _lines(folder)})


def _lines(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of an archive; re-read the file only if it has changed."""
    stamp = (folder / archive.FILE).stat()
    return _lines_at(folder, stamp.st_mtime_ns, stamp.st_size)


@lru_cache(maxsize=64)
def _lines_at(folder: Path, changed: int, size: int) -> list[dict[str, Any]]:
    return list(archive.read(folder).values())


def _with(entry: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row or variant with additional settings."""
    return {**entry, "settings": {**entry.get("settings", {}), **settings}}


def _number(file: Path) -> tuple[str, str, int, str]:
    """Return the sort key of a file: table2 comes before table10, and figure1 after both."""
    match = re.fullmatch(r"([a-z]+)-?([a-z]*)(\d*)(.*)", file.stem)
    kind, appendix, number, suffix = match.groups() if match else (file.stem, "", "", "")
    return ("a" if kind == "table" else kind, appendix, int(number or 0), suffix)
