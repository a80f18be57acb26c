"""Checks and comparisons of the files of a run with any status."""

import csv
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from posy.storage import load_arrays

Config = dict[str, Any]


def read(folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]], list[dict[str, str]]]:
    """Return the summary, the rounds and the clients' rows. A NaN or infinity in JSON is an error."""

    def refuse(word: str) -> Any:
        raise AssertionError(word)

    summary = json.loads((folder / "summary.json").read_text(), parse_constant=refuse)
    rounds = [json.loads(line, parse_constant=refuse) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    with (folder / "clients.csv").open(newline="") as file:
        return summary, rounds, list(csv.DictReader(file))


def check_numbers(folder: Path) -> None:
    """Check that JSON has no NaN, accuracies are counts divided by n_test, and means match the clients' rows."""

    summary, rounds, rows = read(folder)
    for row in rows:
        for column in ("served", "local"):
            if text := row[f"{column}_accuracy"]:
                right = float(text) * int(row["n_test"])
                assert 0 <= float(text) <= 1 and right == pytest.approx(round(right), abs=1e-3)
                assert 0 <= float(row[f"{column}_loss"]) < math.inf
    for number, recorded in enumerate(rounds, start=1):
        for column in ("served_accuracy", "local_accuracy", "served_loss", "local_loss", "train_loss"):
            client_rows = [r for r in rows if int(r["round"]) == number and r[column] != ""]
            values, n = [float(r[column]) for r in client_rows], [int(r["n_train"]) for r in client_rows]
            assert (recorded[column] is None) == (not values)
            if values:
                assert recorded[column]["clients"] == len(values)
                assert recorded[column]["mean"] == pytest.approx(np.mean(values), rel=1e-9)
                assert recorded[column]["weighted"] == pytest.approx(np.average(values, weights=n), rel=1e-9)
    for point in ("served", "local"):
        evaluated = [r for r in rounds if r[f"{point}_accuracy"]]
        last = summary[point]["last"]
        assert (last is None) == (not evaluated)
        if last:
            assert last["round"] == evaluated[-1]["round"]
            assert last["mean"] == evaluated[-1][f"{point}_accuracy"]["mean"]
            most = max(r[f"{point}_accuracy"]["clients"] for r in evaluated)
            comparable = [r[f"{point}_accuracy"] for r in evaluated]
            comparable = [spread for spread in comparable if spread["clients"] >= 0.9 * most]
            assert summary[point]["upper-bound"]["mean"] == max(spread["mean"] for spread in comparable)
    assert summary["system-accuracy"] is None or 0 <= summary["system-accuracy"] <= 1


def rounds_of(path: Path) -> list[Config]:
    """Return the rows of the rounds without their times."""
    rows = [json.loads(line) for line in (path / "rounds.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if key != "seconds"} for row in rows]


def clients_of(path: Path) -> list[Config]:
    """Return the clients' rows."""
    with (path / "clients.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def summary_of(path: Path) -> Config:
    """Return the summary without its time and memory."""
    summary = json.loads((path / "summary.json").read_text())
    return {key: value for key, value in summary.items() if key not in ("seconds", "peak-memory")}


def models_of(path: Path) -> dict[str, dict[str, Any]]:
    """Return the models by file."""
    return {file.name: load_arrays(file) for file in sorted((path / "models").glob("*.safetensors"))}


def assert_same_results(path: Path, reference: Path) -> None:
    """Compare all results of two runs bit for bit."""
    assert rounds_of(path) == rounds_of(reference)
    assert (path / "clients.csv").read_bytes() == (reference / "clients.csv").read_bytes()
    assert summary_of(path) == summary_of(reference)
    models, reference_models = models_of(path), models_of(reference)
    assert models.keys() == reference_models.keys()
    for name, arrays in models.items():
        assert arrays.keys() == reference_models[name].keys()
        for key, array in arrays.items():
            np.testing.assert_array_equal(array, reference_models[name][key], err_msg=f"{name}, {key}")
