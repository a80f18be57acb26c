"""Count the samples per client and class, for tables and figures. Counting needs the data but no runs."""

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
"""File next to the archive of a table or figure, with the data settings and the class counts of each variant."""

Counts = npt.NDArray[np.int64]
"""Number of training samples per client and class ``(M, C)``."""


def first_cells(plan: Plan) -> dict[str, Cell]:
    """Return the first run of each variant."""
    cells: dict[str, Cell] = {}
    for cell in plan.cells:
        cells.setdefault(cell.variant, cell)
    return cells


def count(plan: Plan, absent: dict[str, str], also: Path | None = None) -> dict[str, str]:
    """Count and store the samples per client and class of each variant without stored counts.

    Stored counts are in the plan's folder or in the folder ``also``. Record in ``absent`` why data sets are unreadable,
    keyed by data set. Return the reason for each failure, keyed by variant.
    """
    stored, failures = _read(also) | _read(plan.output), {}
    counted_before = dict(stored)
    for variant, cell in first_cells(plan).items():
        expected = _data_settings(cell)
        if _matches(stored.get(variant, {}), expected):
            continue
        settings = read_settings(cell.config, cell.name)
        try:
            dataset = load_dataset(settings.data, Path(settings.data.data_dir), settings.split_seed)
            counts = partition(dataset, settings.data, settings.split_seed).train_counts(
                dataset.y, dataset.task.num_classes
            )
        except DataError as error:
            absent[settings.data.dataset] = str(error)
        except SettingsError as error:
            failures[variant] = str(error)
        else:
            stored[variant] = {"data": expected, "counts": counts.tolist()}
    if stored != counted_before:
        plan.output.mkdir(parents=True, exist_ok=True)
        (plan.output / FILE).write_text(json.dumps(stored), encoding="utf-8")
    return failures


def counted(plan: Plan, also: Path | None = None) -> dict[str, Counts]:
    """Return the class counts by variant that are stored in the plan's folder or in the folder ``also``."""
    stored, cells = _read(also) | _read(plan.output), first_cells(plan)
    return {
        variant: np.array(stored[variant]["counts"], np.int64)
        for variant, cell in cells.items()
        if _matches(stored.get(variant, {}), _data_settings(cell))
    }


def _data_settings(cell: Cell) -> dict[str, Any]:
    """Return the settings that determine a partition."""
    declarations = declared()
    data = as_config(read_settings(cell.config, cell.name).data)
    return {"seed": cell.seed, **{key: value for key, value in data.items() if declarations[key].decides}}


def _matches(stored: Mapping[str, Any], expected: Mapping[str, Any]) -> bool:
    """Return whether stored counts belong to the expected settings.

    If the stored settings lack a setting, this function assumes its value from before the setting existed.
    """
    declarations = declared()
    earlier_values = {key: declarations[key].before for key in expected if key in declarations}
    return "data" in stored and normalised({**earlier_values, **stored["data"]}) == expected


def _read(folder: Path | None) -> dict[str, Mapping[str, Any]]:
    if folder is None or not (folder / FILE).exists():
        return {}
    content: dict[str, Mapping[str, Any]] = json.loads((folder / FILE).read_text(encoding="utf-8"))
    return content
