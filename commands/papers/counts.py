"""Class counts of the clients: the one part of a table or figure that is read off the data, without any run."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from posy.commands.table import Cell, Plan
from posy.data.datasets import load_dataset
from posy.data.errors import DataError
from posy.data.partitions import partition
from posy.settings import SettingsError, as_config
from posy.strategies.registry import declared, normalised, read_settings

FILE = "counts.json"
"""File beside the archive of a table or figure: for each variant, the settings of its data, and the class counts."""

Counts = npt.NDArray[np.int64]
"""Training samples of each class on each client ``(M, C)``."""


def first_cells(plan: Plan) -> dict[str, Cell]:
    """Return the first run of each variant."""
    found: dict[str, Cell] = {}
    for cell in plan.cells:
        found.setdefault(cell.variant, cell)
    return found


def count(plan: Plan, absent: dict[str, str]) -> dict[str, str]:
    """Count the classes of the partitions that have not been counted; return which could not be made, and why.

    Why data sets could not be read is noted in ``absent``.
    """
    kept, failures = _read(plan.output), {}
    for variant, cell in first_cells(plan).items():
        told = _told(cell)
        if _is_of(kept.get(variant, {}), told):
            continue
        settings = read_settings(cell.config, cell.name)
        try:
            dataset = load_dataset(settings.data, Path(settings.data.data_dir), cell.seed)
            counts = partition(dataset, settings.data, cell.seed).train_counts(dataset.y, dataset.task.num_classes)
        except DataError as error:
            absent[settings.data.dataset] = str(error)
        except SettingsError as error:
            failures[variant] = str(error)
        else:
            kept[variant] = {"data": told, "counts": counts.tolist()}
    if kept:
        plan.output.mkdir(parents=True, exist_ok=True)
        (plan.output / FILE).write_text(json.dumps(kept), encoding="utf-8")
    return failures


def counted(plan: Plan) -> dict[str, Counts]:
    """Return the class counts that have been found, by variant."""
    kept, cells = _read(plan.output), first_cells(plan)
    return {
        variant: np.array(kept[variant]["counts"], np.int64)
        for variant, cell in cells.items()
        if _is_of(kept.get(variant, {}), _told(cell))
    }


def _told(cell: Cell) -> dict[str, Any]:
    """Return the settings that decide a partition."""
    known = declared()
    data = as_config(read_settings(cell.config, cell.name).data)
    return {"seed": cell.seed, **{key: value for key, value in data.items() if known[key].decides}}


def _is_of(kept: Mapping[str, Any], told: Mapping[str, Any]) -> bool:
    """Tell whether counts are those of these settings; of what was no setting yet, what it was then."""
    known = declared()
    before = {key: known[key].before for key in told if key in known}
    return "data" in kept and normalised({**before, **kept["data"]}) == told


def _read(folder: Path) -> dict[str, Mapping[str, Any]]:
    file = folder / FILE
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
