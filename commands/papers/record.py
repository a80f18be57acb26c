"""What is kept of a run for a paper's tables and figures, and the numbers that are read from it."""

import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from posy.commands.archive import KEPT
from posy.report.comparison import FULL, last_round
from posy.report.recorded import point_of
from posy.server_app.progress import coverage, members_of
from posy.server_app.resume import read_summary
from posy.settings import SettingsError
from posy.storage import load_arrays

MOST_CLIENTS = 40
"""Clients up to which each one's curve is kept."""
SPREADS = ("mean", "std", "min", "max", "tenth", "weighted", "jain")
"""What a summary holds over the clients."""
POINTS = ("served", "local", "own")
"""Evaluation points; ``own`` is the one at which the run's method is meant to be used."""
WHICH = ("last", "best", "upper-bound", "average")
SYSTEM_AVERAGE = "system average"
POOLED = ("system", "routing", SYSTEM_AVERAGE)
"""Accuracies on the pooled test samples; the last is the mean over the last rounds (``average-rounds``)."""
PARAMETERS = "parameters"
"""What is measured where no run is needed: the parameters that a server holds, in millions."""
TOTALS = ("rounds", "seconds", "bytes-up", "bytes-down", "samples", "peak-memory")


def collect(path: Path) -> None:
    """Keep of a finished run, beside its summary: its rounds, its clients' curves, and the lengths of their heads.

    ``rounds`` holds a list over the rounds by name of a number; of a measure over the clients its mean. ``clients``
    holds each client's losses on its training samples by round: of the model that it is served where that was measured
    (``evaluate-training``), else in training. ``heads`` ``(M, C)`` holds the L2 norm of each row of the output layer
    of the clients' own models, where they have been stored.
    """
    rows = [json.loads(line) for line in (path / "rounds.jsonl").read_text(encoding="utf-8").splitlines()]
    rounds: dict[str, list[Any]] = {}
    for index, row in enumerate(rows):
        for key, value in row.items():
            number = value.get("mean") if isinstance(value, dict) else value
            if isinstance(number, int | float):
                rounds.setdefault(key, [None] * len(rows))[index] = number
    kept: dict[str, Any] = {"rounds": rounds}
    with (path / "clients.csv").open(encoding="utf-8", newline="") as file:
        losses: dict[str, list[list[float]]] = {}
        reader = csv.DictReader(file)
        measure = next(name for name in ("served_training_loss", "train_loss") if name in (reader.fieldnames or ()))
        for row in reader:
            if row[measure]:
                losses.setdefault(row["partition"], []).append([int(row["round"]), float(row[measure])])
    if len(losses) <= MOST_CLIENTS:
        kept["clients"] = losses
    files = sorted((path / "models").glob("client-*.safetensors"), key=lambda file: int(file.stem.partition("-")[2]))
    heads = [arrays["head.weight"] for arrays in map(load_arrays, files) if "head.weight" in arrays]
    if heads and len(heads) <= MOST_CLIENTS:
        kept["heads"] = [np.linalg.norm(head, axis=1).tolist() for head in heads]
    (path / KEPT).write_text(json.dumps(_rounded(kept)), encoding="utf-8")


def kept(path: Path) -> dict[str, Any]:
    """Return what was kept of a run; nothing of one that was kept before there was anything."""
    file = path / KEPT
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}


def measured(path: Path, measure: str) -> float | None:
    """Return a number of a finished run, accuracies in %; None where it was not measured.

    ``measure`` is an evaluation point, a round (``last``, ``best``, ``upper-bound``, or ``average`` over the last ones)
    and, if need be, what is taken over the clients, the mean by default: ``served last``, ``local best min``; or
    ``system`` or ``routing``, the accuracies on the pooled test samples, of the first also ``system average``; or
    ``round`` and a number of the rounds, of which the last value is taken: ``round outer_cv``; or a number of the
    summary: ``bytes-up``.
    """
    summary = read_summary(path)
    words = measure.split()
    if words[0] == "round" and len(words) == 2:
        values = [value for value in kept(path).get("rounds", {}).get(words[1], []) if value is not None]
        return values[-1] * (100 if in_percent(measure) else 1) if values else None
    if measure in TOTALS:
        return None if summary.get(measure) is None else float(summary[measure])
    if measure == SYSTEM_AVERAGE:
        found = (summary.get("system-accuracy-average") or {}).get("mean")
    elif measure in POOLED:
        found = summary.get(f"{measure}-accuracy")
    else:
        found = _over_clients(summary, words).get((words[2:] or ["mean"])[0])
    return None if found is None else float(found) * (100 if in_percent(measure) else 1)


def partial_coverage(path: Path, measure: str) -> str:
    """Return how many clients a number of a finished run covers, if these are too few to speak for all clients.

    For example ``3 of 30 clients``, where only the cohort of the last round has local models.
    """
    summary, words = read_summary(path), measure.split()
    if measure in (*POOLED, *TOTALS, SYSTEM_AVERAGE, PARAMETERS) or words[0] not in POINTS:
        return ""
    members = members_of(summary)
    number = round(_over_clients(summary, words).get("clients", members))
    return f"{coverage(number, members)} clients" if number < FULL * members else ""


def _over_clients(summary: Mapping[str, Any], words: Sequence[str]) -> Mapping[str, Any]:
    """Return the spread over the clients that a measure names by its evaluation point and its round."""
    point = point_of(summary) if words[0] == "own" else words[0]
    return last_round(summary, point) if words[1] == "last" else summary[point].get(words[1]) or {}


def check_measure(measure: str, where: str) -> str:
    """Return a measure; one that is none raises :class:`SettingsError`."""
    words = measure.split()
    over_clients = len(words) in (2, 3) and words[0] in POINTS and words[1] in WHICH and {*words[2:]} <= {*SPREADS}
    if measure in (*POOLED, *TOTALS, PARAMETERS) or over_clients or (len(words) == 2 and words[0] == "round"):
        return measure
    raise SettingsError(f"measure = {measure!r} in {where}: there is no such number of a run")


def in_percent(measure: str) -> bool:
    """Tell whether a measure is an accuracy."""
    words = measure.split()
    of_a_round = words[0] == "round" and words[-1].endswith("accuracy")
    return measure in POOLED or of_a_round or (words[0] in POINTS and words[-1] != "jain")


def curve(path: Path, key: str) -> list[tuple[int, float]]:
    """Return a number of each round of a run in which it was measured, with the round."""
    values = kept(path).get("rounds", {})
    numbers = values.get("round", [])
    return [(n, value) for n, value in zip(numbers, values.get(key, []), strict=False) if value is not None]


def _rounded(value: Any) -> Any:
    """Return floats with six digits, in whatever holds them."""
    if isinstance(value, Mapping):
        return {key: _rounded(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_rounded(inner) for inner in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value
