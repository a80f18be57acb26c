"""`posy paper`: list the papers, run their tables and figures, and draw their pages."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from posy.commands import archive
from posy.commands.papers.compare import STATES, Comparison
from posy.commands.papers.counts import count
from posy.commands.papers.item import (
    SCALES,
    Item,
    archived_elsewhere,
    archives_of,
    item,
    items,
    local_results,
    missing_results,
    papers,
    restore_runs,
    stored_results,
)
from posy.commands.papers.page import claims, overview, pictures_in, states, write
from posy.commands.papers.verdict import OUTCOMES
from posy.commands.table import Cell, Plan, fill
from posy.data.datasets import load_dataset
from posy.data.errors import DataError
from posy.listing import print_table
from posy.paths import found_at
from posy.settings import Scalar, SettingsError
from posy.strategies.registry import PAPERS, declared, read_settings

PAGES = Path("docs/papers")
"""Folder of the papers' pages, relative to the working directory."""
OWN = Path("results/papers")
"""Folder for runs and pages whose command-line settings affect the results."""
COLUMNS = ("main claims", *OUTCOMES, *(f"numbers {state}" for state in STATES))
"""Columns of the list of papers."""
ITEM = ("name", "content", "numbers", "claims")
"""Columns of the list of tables and figures."""


def list_papers() -> int:
    """Print the state of each paper's tables and figures, and a summary of its claims and numbers."""
    comparisons_of = {paper: [Comparison(comparison) for comparison in items(paper)] for paper in papers()}
    pictures = pictures_in(PAGES if PAGES.is_dir() else PAPERS.parent / PAGES)
    for paper, comparisons in comparisons_of.items():
        print_table(paper, ITEM, [_line(comparison, pictures) for comparison in comparisons])
    print_table("papers", ("paper", *COLUMNS), overview(comparisons_of))
    print("`posy paper PAPER` draws the page of a paper; `posy paper PAPER TABLE` runs a table or figure")
    if missing := missing_results(comparisons_of):
        print(missing)
    return 0


def show_paper(name: str, overrides: Mapping[str, Scalar] | None = None, folder: Path | None = None) -> int:
    """Draw a paper's page from the finished runs, and print the state of its tables and figures.

    The settings ``overrides`` come from the command line. If ``folder`` is not None, use the runs in it.
    """
    comparisons = write(name, folder or PAGES, overrides, folder)
    pictures = pictures_in(folder or PAGES)
    print_table(name, ITEM, [_line(comparison, pictures) for comparison in comparisons])
    print(f"wrote {(folder or PAGES) / name}.md")
    if folder is None and (missing := missing_results([name])):
        print(missing)
    return 0


def _line(comparison: Comparison, pictures: Sequence[str]) -> tuple[str, str, str, str]:
    """Return the line of a table or figure: name, title, state and claims."""
    return comparison.item.name, comparison.item.title, states(comparison, pictures), claims(comparison)


def run_part(
    name: str, part: str, scale: str, overrides: Mapping[str, Scalar], jobs: int, seeds: int | None = None
) -> int:
    """Start the missing runs of one or all of a paper's tables and figures, then draw the paper's page.

    With ``seeds``, use the seeds 0 to ``seeds`` - 1 instead of the file's. Skip and list runs whose data set is
    missing. If ``overrides`` affect the results, the runs and the page go into a separate folder. Return the exit
    status, which is 1 if a run failed.
    """
    if scale not in SCALES:
        raise SettingsError(f"--scale {scale}: it must be {' or '.join(SCALES)}")
    selected = items(name) if part == "all" else [item(name, part)]
    other = [entry.name for entry in selected if scale not in entry.scales]
    if part in other:
        raise SettingsError(f"--scale {scale}: {part} is not in the paper and has only one size; use --scale full")
    if other:
        print(f"skipped, because they have only one size (--scale full): {', '.join(other)}", flush=True)
        selected = [entry for entry in selected if scale in entry.scales]
    folder = OWN / name if any(declared()[key].decides for key in overrides) else None
    failures: dict[str, str] = {}
    absent: dict[str, str] = {}
    for entry in selected:
        if not (entry.has_runs or entry.counts_classes):
            continue
        (folder or local_results(name)).mkdir(parents=True, exist_ok=True)  # else the results would be temporary
        plan = entry.plan(scale, overrides, folder, seeds)
        if entry.has_runs:
            failures |= _run(plan, entry, entry.seeds(scale, seeds), jobs, absent, archives_of(name, folder))
        if entry.counts_classes:
            counted = count(plan, absent, stored_results(name) / plan.output.name)
            failures |= {f"{entry.title}, {variant}": reason for variant, reason in counted.items()}
    show_paper(name, overrides, folder)
    for data, reason in absent.items():
        print(f"not run: {data}: {reason}")
    for run, reason in failures.items():
        print(f"failed: {run}: {reason}")
    return 1 if failures else 0


def _run(
    plan: Plan, entry: Item, seeds: Collection[int], jobs: int, absent: dict[str, str], archives: Sequence[Path]
) -> dict[str, str]:
    """Run the missing cells of a plan for some seeds, and return the reasons for failures, keyed by cell name.

    Restore finished runs from ``archives``. Record in ``absent`` why data sets or word vectors are unreadable, keyed by
    their names.
    """
    restore_runs(plan, archives)
    requested = [cell for cell in plan.cells if cell.seed in seeds]
    possible = {cell for cell in requested if _data_is_there(cell, absent)}
    print(f"{entry.title}: {len(possible)} of {len(requested)} runs are available", flush=True)
    stored, elsewhere = archive.read(plan.output), archived_elsewhere(plan, archives)
    # Runs of other tables stay in those tables' archives. Runs with other seeds or names stay in this archive.
    cells = tuple(
        cell
        for cell in plan.cells
        if (cell in possible and cell.summary() is None)
        or (cell.summary(*archive.ENDED) and (cell.name in stored or cell.name not in elsewhere))
    )
    return fill(replace(plan, cells=cells), jobs=jobs) if cells else {}


def _data_is_there(cell: Cell, absent: dict[str, str]) -> bool:
    """Return whether a run has finished, or its data and word vectors are readable."""
    if cell.summary() is not None:
        return True
    settings = read_settings(cell.config, cell.name)
    data, weights = settings.data, settings.train.weights
    name = Path(weights).name
    if weights and found_at(weights, data.data_dir) is None:
        absent[name] = f"{data.data_dir} contains no {name}"
        return False
    if data.dataset not in absent and (data.dataset, data.data_dir) not in _READ:
        try:
            load_dataset(replace(data, max_samples=0), Path(data.data_dir), 0)
        except DataError as error:
            absent[data.dataset] = str(error)
        else:
            _READ.add((data.dataset, data.data_dir))
    return data.dataset not in absent


_READ: set[tuple[str, str]] = set()
"""Data sets that were readable, with their directories."""
