"""The sizes of finished runs, and the requirements of missing runs: the command, the data and the time."""

import itertools
import statistics
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from posy.commands.papers.compare import Comparison, Entry
from posy.commands.papers.counts import first_cells
from posy.commands.papers.item import Claim
from posy.commands.table import Cell
from posy.data.published import describe
from posy.data.settings import DataSettings
from posy.strategies.registry import declared

WANTED = {name: files for name, _, files, _ in describe()}
"""Files that each data set requires in ``data-dir``."""
SIZES = {"num-server-rounds": "rounds", "num-clients": "clients", "max-samples": "samples"}
"""Settings that determine the size of a run, with the names of the things that they count."""
TITLES = {
    "agnews": "AG News",
    "cifar10": "CIFAR-10",
    "cifar100": "CIFAR-100",
    "cifar20": "CIFAR-20",
    "emnist-letters": "EMNIST",
    "fedisic": "FedISIC",
    "femnist": "FEMNIST",
    "fmnist": "Fashion-MNIST",
    "kvasir": "Kvasir",
    "mnist": "MNIST",
    "sent140": "Sent140",
    "tiny-imagenet": "Tiny ImageNet",
}
"""Usual names of the data sets."""
TRAINING = {"lr": "learning rate", "batch-size": "batch size", "local-epochs": "local epochs"}
"""Settings of local training that reduced runs may change, with their names."""
REPLACED = ("model", "dataset")
"""Settings that reduced runs may replace with a smaller network or a data set that downloads automatically."""


def reductions(comparison: Comparison, claim: Claim | None = None, without: Collection[str] = ()) -> str:
    """Return the size of the finished reduced runs and of the paper's, as ``10 instead of 1000 rounds, 2000 samples``.

    If the sizes differ, return the size of each variant or row, such as ``15 instead of 50 rounds (MNIST); ...``. With
    ``claim``, only consider the variants that the claim covers. Omit the parts in ``without``.
    """
    sizes = {
        variant_row: ", ".join(part for part in parts if part not in without)
        for variant_row, parts in reduced_parts(comparison, claim).items()
    }
    if len(set(sizes.values())) <= 1:
        return next(iter(sizes.values()), "")
    groups: dict[str, list[str]] = {}
    variants_run = {variant for variant, _ in sizes}
    by_variant = all(len({sizes[key] for key in sizes if key[0] == variant}) == 1 for variant in variants_run)
    for (variant, row), size in sizes.items():
        names = groups.setdefault(size, [])
        name = comparison.item.label(variant if by_variant else row)
        names += [name] * (name not in names)
    return "; ".join(f"{size} ({', '.join(names)})" for size, names in groups.items() if size)


def reduced_parts(comparison: Comparison, claim: Claim | None = None) -> dict[tuple[str, str], list[str]]:
    """Return how the finished reduced runs of each variant and row differ in size from the paper's.

    An example is ``["10 instead of 1000 rounds", "2000 samples"]``. Some methods have their own number of samples or
    rounds, so this function compares the runs of the same variant and row. With ``claim``, it only considers the
    variants that the claim covers.
    """
    pairs = _reduced_and_full(comparison, claim)
    return {variant_row: _size(reduced, full) for variant_row, (reduced, full) in pairs.items()}


def share_of_rounds(comparison: Comparison, claim: Claim) -> str:
    """Return the share of the paper's rounds in the finished reduced runs that a claim covers, such as ``1 %``."""
    key = "num-server-rounds"
    shares = [
        round(100 * rounds / papers)
        for reduced, full in _reduced_and_full(comparison, claim).values()
        for rounds, papers in itertools.product(_values(reduced, key), _values(full, key))
    ]
    return f"{_span(shares)} %" if shares else ""


def _reduced_and_full(
    comparison: Comparison, claim: Claim | None
) -> dict[tuple[str, str], tuple[list[Cell], list[Cell]]]:
    """Return the finished reduced runs and the planned full-size runs of each variant and row."""
    variants = (claim and claim.variants) or comparison.item.variants
    finished = comparison.finished.get("small", {}).items()
    reduced = [cell for (variant, _), cells in finished if variant in variants for cell in cells]
    if not reduced:
        return {}
    plan = comparison.item.plan("full") if comparison.decisive else comparison.plans["full"]
    variant_rows = dict.fromkeys((cell.variant, cell.row) for cell in reduced)
    return {variant_row: (_at(reduced, variant_row), _at(plan.cells, variant_row)) for variant_row in variant_rows}


def _at(cells: Sequence[Cell], variant_row: tuple[str, str]) -> list[Cell]:
    """Return the runs of a variant and row."""
    return [cell for cell in cells if (cell.variant, cell.row) == variant_row]


def _size(reduced: Sequence[Cell], full: Sequence[Cell]) -> list[str]:
    """Return how reduced runs differ from the paper's: rounds, clients, samples, network, data and local training."""
    sizes = []
    for key, name in SIZES.items():
        counts, papers = _values(reduced, key), _values(full, key)
        if counts != papers:
            instead = "" if papers == {0} else f" instead of {_span(papers)}"  # 0 samples are all samples
            sizes.append(f"{_span(counts)}{instead} {name}")
    for key in REPLACED:
        names, papers = _values(reduced, key), _values(full, key)
        if names != papers:
            sizes.append(f"{' or '.join(sorted(names))} instead of {' or '.join(sorted(papers))}")
    for key, name in TRAINING.items():
        values, papers = _values(reduced, key), _values(full, key)
        if values != papers:
            sizes.append(f"{name} {_span(values)} instead of {_span(papers)}")
    return sizes


def datasets(comparison: Comparison, claim: Claim, variants: Collection[str] = (), scale: str = "") -> list[str]:
    """Return the data sets in the planned runs of some variants, by default of all variants that a claim covers.

    With ``scale``, only consider the runs at this scale.
    """
    variants = variants or claim.variants or comparison.item.variants
    plans = [plan for name, plan in comparison.plans.items() if scale in ("", name)]
    cells = [cell for plan in plans for cell in plan.cells if cell.variant in variants]
    return list(dict.fromkeys(map(_dataset, cells)))


def dataset_title(name: str) -> str:
    """Return the usual name of a data set."""
    return TITLES.get(name, name)


def needs(comparison: Comparison, entry: Entry) -> str:
    """Return the command that starts the missing runs of an entry, and the data that the command requires."""
    item = comparison.item
    if not entry.row:  # the item has no rows: a figure of a partition, or an experiment that Posy cannot run
        counted = [cell for plan in comparison.plans.values() if (cell := first_cells(plan).get(entry.variant))]
        return _command(comparison, "", _dataset(counted[0])) if counted else str(item.content.get("needs", ""))
    planned = comparison.planned(entry.variant, entry.row)
    if not planned:
        return str(item.content.get("needs", f"Posy does not implement {entry.row}"))
    weights = Path(str(planned[0].config.get("weights", ""))).name
    return _command(comparison, f" --scale {_scale(comparison, planned[0])}", _dataset(planned[0]), weights)


def needed_to_draw(comparison: Comparison) -> str:
    """Return the command for a figure without runs, and the data that the command requires."""
    item = comparison.item
    return _command(comparison, "", item.settings_of(item.variants[0]).data.dataset)


def missing_runs(comparison: Comparison, entries: Sequence[Entry]) -> tuple[int, float | None]:
    """Return the number of missing runs of entries, and the mean time of such a run in seconds.

    The runs have the smallest scale of the first entry. The time is None if no run at this scale has finished.
    """
    cells = [cell for entry in entries for cell in comparison.planned(entry.variant, entry.row)]
    if not cells or not comparison.item.has_runs:
        return 0, None
    scale = _scale(comparison, cells[0])
    seeds = comparison.item.seeds(scale)
    missing = {cell for cell in cells if cell.seed in seeds and _scale(comparison, cell) == scale}
    seconds = [(cell.summary() or {})["seconds"] for run in comparison.finished[scale].values() for cell in run]
    return len(missing), statistics.fmean(seconds) if seconds else None


def _command(comparison: Comparison, options: str, dataset: str, weights: str = "") -> str:
    """Return the command that starts the missing runs, and the data and word vectors that they need."""
    command = f"`posy paper {comparison.item.paper} {comparison.item.name}{options}`"
    available = any(_dataset(cell) == dataset for _, cells in comparison.cells.values() for cell in cells)
    if available and not weights:
        return f"the data is available: run {command}"
    if dataset not in WANTED:
        return f"run {command}"
    return f"{command} needs {dataset} in data-dir ({WANTED[dataset]})" + (
        f" and {weights} in the same folder" if weights else ""
    )


def _scale(comparison: Comparison, cell: Cell) -> str:
    """Return the scale of a planned run."""
    return next(scale for scale, plan in comparison.plans.items() if cell in plan.cells)


def _values(cells: Sequence[Cell], key: str) -> set[Any]:
    """Return the distinct values of a setting in some runs."""
    return {cell.config.get(key, declared()[key].default) for cell in cells}


def _span(values: Collection[float]) -> str:
    """Return a number, or a range such as ``15 to 60``."""
    return " to ".join(str(value) for value in dict.fromkeys((min(values), max(values))))


def _dataset(cell: Cell) -> str:
    return str(cell.config.get("dataset", DataSettings.dataset))
