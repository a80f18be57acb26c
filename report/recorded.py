"""Stored runs, read from their directories."""

import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from posy.metrics import Metric
from posy.server_app.progress import metric_in
from posy.server_app.resume import CONFIG, read_summary
from posy.settings import SettingsError
from posy.strategies.methods import METHODS, REFERENCES, settings_class
from posy.strategies.replies import LIMITED
from posy.yaml12 import read_yaml

Points = list[tuple[int, float]]
"""Rounds and their values, without the rounds that have no value."""


@dataclass(frozen=True, eq=False)
class Recorded:
    """The files of a run that may still be in progress."""

    path: Path
    config: Mapping[str, Any]
    """``config.yaml``."""
    summary: Mapping[str, Any]
    """``summary.json``."""

    @classmethod
    def read(cls, path: Path) -> "Recorded":
        """Read the directory of a run; raise :class:`SettingsError` if the directory contains no run."""
        summary = read_summary(path)
        if not summary:
            raise SettingsError(f"{path} is not the directory of a run, because it has no readable summary.json")
        config = read_yaml(path / CONFIG)
        if not isinstance(config.get("settings"), dict):
            raise SettingsError(f"{path / CONFIG} has no settings")
        return cls(path, config, summary)

    @property
    def settings(self) -> Mapping[str, Any]:
        """All settings of the run."""
        settings: Mapping[str, Any] = self.config["settings"]
        return settings

    @property
    def method(self) -> str:
        """Method of the run."""
        return str(self.summary["method"])

    @property
    def point(self) -> str:
        """The evaluation point at which the run's method is scored."""
        return point_of(self.summary)

    @property
    def metric(self) -> Metric:
        """The metric of the run."""
        return metric_in(self.summary)

    def client_name(self, client: int) -> str:
        """Return the name of a client's site or group, or the client's number, as in ``client 3``."""
        names = self.summary.get("sites") or []
        return (names[client] if 0 <= client < len(names) else None) or f"client {client}"

    @cached_property
    def rounds(self) -> list[dict[str, Any]]:
        """Finished rounds of the run, as in ``rounds.jsonl``; empty if the file is missing."""
        file = self.path / "rounds.jsonl"
        return parsed_rounds(file.read_text(encoding="utf-8")) if file.is_file() else []

    @cached_property
    def clients(self) -> list[dict[str, str]]:
        """A row for each client and round, as in ``clients.csv``; empty if the file is missing."""
        file = self.path / "clients.csv"
        return _csv(file) if file.is_file() else []

    @cached_property
    def partition(self) -> tuple[list[str], list[list[int]]] | None:
        """Names of the classes ``(C,)`` and number of samples per client and class ``(M, C)``, if recorded."""
        file = self.path / "partition.csv"
        if not file.is_file():
            return None
        with file.open(encoding="utf-8", newline="") as opened:
            header, *rows = csv.reader(opened)
        return header[1:], [[int(cell) for cell in row[1:]] for row in rows]

    def curve(self, key: str, of: str = "mean") -> Points:
        """Return the value of ``key`` in each round. ``of`` selects a statistic over the clients."""
        points = []
        for row in self.rounds:
            value = row.get(key)
            number = value.get(of) if isinstance(value, Mapping) else value
            if isinstance(number, int | float):
                points.append((int(row["round"]), float(number)))
        return points

    def client_curves(self, column: str) -> dict[int, Points]:
        """Return a column of ``clients.csv`` over the rounds, keyed by client."""
        curves: dict[int, Points] = {}
        for row in self.clients:
            if row.get(column):
                curves.setdefault(int(row["partition"]), []).append((int(row["round"]), float(row[column])))
        return dict(sorted(curves.items()))

    def vectors(self) -> dict[str, list[tuple[int, Sequence[float]]]]:
        """Return the method's list-valued quantities, keyed by name, as (round, list) pairs."""
        quantities: dict[str, list[tuple[int, Sequence[float]]]] = {}
        for row in self.rounds:
            for key, value in row.items():
                if isinstance(value, list) and value and key not in LISTS and all(map(_is_number, value)):
                    quantities.setdefault(key, []).append((int(row["round"]), value))
        return quantities


def point_of(summary: Mapping[str, Any]) -> str:
    """Return the evaluation point at which a run's method is scored.

    The current code defines the point of Posy's own methods. Runs record the scores at both points, so reports can
    score older and newer runs by the same model. The point of a custom method is the recorded point, because the
    method's file may be missing.
    """
    method = str(summary["method"])
    recorded = None if method in (*METHODS, *REFERENCES) else summary.get("point")
    return str(recorded or settings_class(method).point)


LISTS = ("missing", "dropped", *LIMITED)
"""Keys of the lists in a round's record that are not quantities of the method."""


def parsed_rounds(text: str) -> list[dict[str, Any]]:
    """Return the rounds in the text of ``rounds.jsonl``, without an unfinished last line."""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def client_rows(path: Path, server_round: int) -> list[dict[str, str]]:
    """Return the rows of a round in a run's ``clients.csv``."""
    return [row for row in _csv(path / "clients.csv") if int(row["round"]) == server_round]


def _csv(file: Path) -> list[dict[str, str]]:
    with file.open(encoding="utf-8", newline="") as opened:
        return list(csv.DictReader(opened))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
