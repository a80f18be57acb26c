"""`posy paper`: list the papers, run their tables and figures, draw their pages."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from posy.commands import archive
from posy.commands.papers.compare import Comparison
from posy.commands.papers.counts import count
from posy.commands.papers.item import SCALES, held_elsewhere, item, items, missing_results, papers, take_up
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
"""Where the pages of the papers go, below the working directory."""
OWN = Path("results/papers")
"""Where runs and pages go of somebody who has changed what decides the results."""
COLUMNS = (
    *("claims", *OUTCOMES),
    *("numbers reproduced", "differ", "drawn", "not run"),
)
"""What is told of a paper."""
ITEM = ("name", "what it is", "numbers", "claims")
"""What is told of a table or figure."""


def list_papers() -> int:
    """Print each paper's tables and figures with their state, and what came of its claims and numbers."""
    found = {paper: [Comparison(one) for one in items(paper)] for paper in papers()}
    pictures = pictures_in(PAGES if PAGES.is_dir() else PAPERS.parent / PAGES)
    for paper, comparisons in found.items():
        print_table(paper, ITEM, [_line(one, pictures) for one in comparisons])
    print_table("papers", ("paper", *COLUMNS), overview(found))
    print("posy paper PAPER draws its page; posy paper PAPER TABLE runs a table or figure of it")
    if missing := missing_results(found):
        print(missing)
    return 0


def show_paper(name: str, given: Mapping[str, Scalar] | None = None, folder: Path | None = None) -> int:
    """Draw a paper's page from the runs that there are, and print the state of its tables and figures.

    With settings that were ``given``, it is that of the runs in a ``folder``, if there is one.
    """
    comparisons = write(name, folder or PAGES, given, folder)
    pictures = pictures_in(folder or PAGES)
    print_table(name, ITEM, [_line(one, pictures) for one in comparisons])
    print(f"written to {(folder or PAGES) / name}.md")
    if folder is None and (missing := missing_results([name])):
        print(missing)
    return 0


def _line(one: Comparison, pictures: Sequence[str]) -> tuple[str, str, str, str]:
    """Return what is told of a table or figure in a line."""
    return one.item.name, one.item.title, states(one, pictures), claims(one)


def run_part(name: str, part: str, scale: str, given: Mapping[str, Scalar], jobs: int, seeds: int | None = None) -> int:
    """Run a table or figure of a paper, or all of them, as far as its runs are not there; then draw the paper's page.

    With a number of ``seeds`` it is run with the first ones in place of its own. Runs whose data set is not there are
    left out, and said to be. With settings that decide the results, runs and page go to a place of their own. The exit
    status is 1 if a run has failed.
    """
    if scale not in SCALES:
        raise SettingsError(f"--scale {scale}: it must be {' or '.join(SCALES)}")
    wanted = items(name) if part == "all" else [item(name, part)]
    other = [one.name for one in wanted if scale not in one.scales]
    if part in other:
        raise SettingsError(f"--scale {scale}: {part} goes beyond the paper and has one size: --scale full")
    if other:
        print(f"left out, for they have one size (--scale full): {', '.join(other)}", flush=True)
        wanted = [one for one in wanted if scale in one.scales]
    folder = OWN / name if any(declared()[key].decides for key in given) else None
    failures: dict[str, str] = {}
    absent: dict[str, str] = {}
    for one in wanted:
        if not (one.has_runs or one.counts_classes):
            continue
        plan = one.plan(scale, given, folder, seeds)
        if one.has_runs:
            failures |= _run(plan, one.title, one.seeds(scale, seeds), jobs, absent)
        if one.counts_classes:
            made = count(plan, absent)
            failures |= {f"{one.title}, {variant}": reason for variant, reason in made.items()}
    show_paper(name, given, folder)
    for what, reason in absent.items():
        print(f"not run: {what}: {reason}")
    for what, reason in failures.items():
        print(f"failed: {what}: {reason}")
    return 1 if failures else 0


def _run(plan: Plan, title: str, seeds: Collection[int], jobs: int, absent: dict[str, str]) -> dict[str, str]:
    """Run what a table or figure lacks with some seeds; note in ``absent`` why runs are left out, by data set."""
    take_up(plan)
    wanted = [cell for cell in plan.cells if cell.seed in seeds]
    possible = {cell for cell in wanted if _data_is_there(cell, absent)}
    print(f"{title}: {len(possible)} of {len(wanted)} runs can be had here", flush=True)
    own, elsewhere = archive.read(plan.output), held_elsewhere(plan)
    # What another table has run stays in the archive of that one; what was run with other seeds, or under another name,
    # stays in this one.
    cells = tuple(
        cell
        for cell in plan.cells
        if (cell in possible and cell.summary() is None)
        or (cell.summary(*archive.ENDED) and (cell.name in own or cell.name not in elsewhere))
    )
    return fill(replace(plan, cells=cells), jobs=jobs) if cells else {}


def _data_is_there(cell: Cell, absent: dict[str, str]) -> bool:
    """Tell whether a run has finished, or its data can be read, and its word vectors are there."""
    if cell.summary() is not None:
        return True
    settings = read_settings(cell.config, cell.name)
    data, weights = settings.data, settings.train.weights
    name = Path(weights).name
    if weights and found_at(weights, data.data_dir) is None:
        absent[name] = f"there is no {name} in {data.data_dir}"
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
"""Data sets that can be read, with the directory that holds them."""
