"""Record and read the numbers of a run for a paper's tables and figures."""

import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from posy.commands.archive import RECORD_FILE
from posy.report.comparison import FULL, last_round
from posy.report.recorded import point_of
from posy.server_app.progress import coverage, members_of
from posy.server_app.resume import read_summary
from posy.settings import SettingsError
from posy.storage import load_arrays

MOST_CLIENTS = 40
"""Maximum number of clients for which a run records individual curves."""
SPREADS = ("mean", "std", "min", "max", "tenth", "weighted", "jain")
"""Statistics over the clients in a summary."""
SPREAD_TITLES = {
    "min": "lowest client",
    "max": "highest client",
    "std": "standard deviation over the clients",
    "jain": "Jain's index",
}
"""Display names of some statistics over the clients."""
POINTS = ("served", "local", "own")
"""Evaluation points; ``own`` is the evaluation point of the run's method."""
WHICH = ("last", "best", "upper-bound", "average")
SYSTEM_AVERAGE = "system average"
POOLED = ("system", "routing", SYSTEM_AVERAGE)
"""Accuracies on the pooled test samples. ``SYSTEM_AVERAGE`` is the mean over the last rounds (``average-rounds``)."""
PARAMETERS = "parameters"
"""A measure that needs no run: the number of parameters on the server, in millions."""
TOTALS = ("rounds", "seconds", "bytes-up", "bytes-down", "samples", "peak-memory")


def collect(path: Path) -> None:
    """Record a finished run's rounds, the clients' loss curves, and the norms of their heads, next to the summary.

    ``rounds`` maps the name of a number to its values by round. For a statistic over the clients, the value is the
    mean. ``clients`` contains each client's loss on its training samples by round: the loss of the served model with
    ``evaluate-training``, else the loss during training. ``heads`` ``(M, C)`` contains the L2 norm of each row of the
    output layer in the clients' stored models, if these models exist.
    """
    rows = [json.loads(line) for line in (path / "rounds.jsonl").read_text(encoding="utf-8").splitlines()]
    rounds: dict[str, list[Any]] = {}
    for index, row in enumerate(rows):
        for key, value in row.items():
            number = value.get("mean") if isinstance(value, dict) else value
            if isinstance(number, int | float):
                rounds.setdefault(key, [None] * len(rows))[index] = number
    recorded: dict[str, Any] = {"rounds": rounds}
    with (path / "clients.csv").open(encoding="utf-8", newline="") as file:
        losses: dict[str, list[list[float]]] = {}
        reader = csv.DictReader(file)
        measure = next(name for name in ("served_training_loss", "train_loss") if name in (reader.fieldnames or ()))
        for row in reader:
            if row[measure]:
                losses.setdefault(row["partition"], []).append([int(row["round"]), float(row[measure])])
    if len(losses) <= MOST_CLIENTS:
        recorded["clients"] = losses
    files = sorted((path / "models").glob("client-*.safetensors"), key=lambda file: int(file.stem.partition("-")[2]))
    heads = [arrays["head.weight"] for arrays in map(load_arrays, files) if "head.weight" in arrays]
    if heads and len(heads) <= MOST_CLIENTS:
        recorded["heads"] = [np.linalg.norm(head, axis=1).tolist() for head in heads]
    (path / RECORD_FILE).write_text(json.dumps(_rounded(recorded)), encoding="utf-8")


def recorded_numbers(path: Path) -> dict[str, Any]:
    """Return the recorded numbers of a run, or an empty mapping for an old run without a record."""
    file = path / RECORD_FILE
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}


def measured(path: Path, measure: str) -> float | None:
    """Return a number of a finished run (accuracies in %), or None if it is missing.

    ``measure`` has one of these forms:

    - an evaluation point, a round (``last``, ``best``, ``upper-bound``, or ``average`` over the last rounds), and
      optionally a statistic over the clients, by default the mean: ``served last``, ``local best min``
    - an accuracy on the pooled test samples: ``system``, ``routing`` or ``system average``
    - ``round`` and a name in ``rounds.jsonl``, for the last value: ``round outer_cv``
    - a total in the summary: ``bytes-up``
    """
    summary = read_summary(path)
    words = measure.split()
    if words[0] == "round" and len(words) == 2:
        values = [value for value in recorded_numbers(path).get("rounds", {}).get(words[1], []) if value is not None]
        return values[-1] * (100 if in_percent(measure) else 1) if values else None
    if measure in TOTALS:
        return None if summary.get(measure) is None else float(summary[measure])
    if measure == SYSTEM_AVERAGE:
        number = (summary.get("system-accuracy-average") or {}).get("mean")
    elif measure in POOLED:
        number = summary.get(f"{measure}-accuracy")
    else:
        number = _over_clients(summary, words).get((words[2:] or ["mean"])[0])
    return None if number is None else float(number) * (100 if in_percent(measure) else 1)


def partial_coverage(path: Path, measure: str) -> str:
    """Return how many clients a number covers if they are too few to represent all clients, else an empty string.

    For example, return ``3 of 30 clients`` if only the cohort of the last round has local models.
    """
    summary, words = read_summary(path), measure.split()
    if measure in (*POOLED, *TOTALS, SYSTEM_AVERAGE, PARAMETERS) or words[0] not in POINTS:
        return ""
    members = members_of(summary)
    number = round(_over_clients(summary, words).get("clients", members))
    return f"{coverage(number, members)} clients" if number < FULL * members else ""


def _over_clients(summary: Mapping[str, Any], words: Sequence[str]) -> Mapping[str, Any]:
    """Return the statistics over the clients for a measure's evaluation point and round."""
    point = point_of(summary) if words[0] == "own" else words[0]
    return last_round(summary, point) if words[1] == "last" else summary[point].get(words[1]) or {}


def check_measure(measure: str, where: str) -> str:
    """Return a valid measure unchanged; raise :class:`SettingsError` for an invalid measure."""
    words = measure.split()
    over_clients = len(words) in (2, 3) and words[0] in POINTS and words[1] in WHICH and {*words[2:]} <= {*SPREADS}
    if measure in (*POOLED, *TOTALS, PARAMETERS) or over_clients or (len(words) == 2 and words[0] == "round"):
        return measure
    raise SettingsError(f"measure = {measure!r} in {where} is not a measure of a run; use, for example, `served last`")


def measure_title(measure: str) -> str:
    """Return the display name of a measure, such as ``served last, lowest client`` or ``inner entropy``."""
    *words, last = measure.split()
    if words[:1] == ["round"]:
        return last.replace("_", " ")
    return f"{' '.join(words)}, {SPREAD_TITLES[last]}" if last in SPREAD_TITLES else measure


def in_percent(measure: str) -> bool:
    """Return whether a measure is an accuracy, which Posy reports as a percentage."""
    words = measure.split()
    is_round_accuracy = words[0] == "round" and words[-1].endswith("accuracy")
    return measure in POOLED or is_round_accuracy or (words[0] in POINTS and words[-1] != "jain")


def curve(path: Path, key: str) -> list[tuple[int, float]]:
    """Return a number over the rounds as (round, value) pairs, omitting missing values."""
    values = recorded_numbers(path).get("rounds", {})
    numbers = values.get("round", [])
    return [(n, value) for n, value in zip(numbers, values.get(key, []), strict=False) if value is not None]


def _rounded(value: Any) -> Any:
    """Return a nested value with all floats rounded to six significant digits."""
    if isinstance(value, Mapping):
        return {key: _rounded(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_rounded(inner) for inner in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value
