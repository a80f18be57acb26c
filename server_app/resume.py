"""Resuming a run that lies in the output directory: its settings stand, and only some may change."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from posy.paths import absolute
from posy.settings import SettingsError
from posy.storage import is_folder_name, plain, read_json
from posy.strategies.registry import current_keys, declared_for, with_experiment
from posy.strategies.settings import RunSettings, Settings
from posy.yaml12 import read_yaml

CONFIG, PROGRESS = "config.yaml", "progress.json"
RAN_ON = ("machine", "versions")
"""What ``config.yaml`` tells of where a run was carried out."""
_CHECKPOINT = re.compile(r"round-(\d+)")


@dataclass(frozen=True)
class StoredRun:
    """A run that has been started before, as the newest of its checkpoints knows it; its id is no other run's."""

    path: Path
    id: str
    settings: Mapping[str, Any]
    resumed_before: list[dict[str, Any]]
    damage: str = ""
    """Why its ``config.yaml`` is not used; empty if it agrees."""
    ran_on: Mapping[str, Any] = field(default_factory=dict)
    """The ``machine`` and ``versions`` that its ``config.yaml`` names, if it is used."""

    @classmethod
    def find(cls, given: Mapping[str, Any], where: str) -> "StoredRun | None":
        """Return the run that is to be resumed, None if a new one is to begin.

        Its ``config.yaml`` is for people: one that is lost or damaged is written anew. Raises :class:`SettingsError` if
        what is given is wrong, there is no such run, it has no checkpoint that can be read, or that file was edited.
        """
        values = with_experiment(given, where)
        name, output_dir = values.get("resume"), absolute(values.get("output-dir", RunSettings.output_dir))
        if not name:
            return None
        path = output_dir / name
        if not is_folder_name(name):
            raise SettingsError(f"resume = {name!r}: it must be the name of a folder in output-dir = {output_dir}")
        if not checkpoint_rounds(path) and not (path / CONFIG).is_file():
            raise SettingsError(f"resume = {name!r}: there is no run in {path}")
        written, damage = _written(path)
        reasons: list[str] = []
        records = [record for _, record in _records(path, reasons)]
        if not records:
            none = "it has no checkpoint (the first follows round 1, or none does with checkpoint-every = 0)"
            why = f"no checkpoint of it can be used ({'; '.join(reasons)})" if reasons else f"{none}. Start it anew"
            raise SettingsError(f"resume = {name!r}: {why}")
        # Where config.yaml is whole, it tells which of several runs this is.
        record = next((record for record in records if record["run"] == written.get("id")), records[0])
        if not damage and written["id"] != record["run"]:
            damage = f"{path / CONFIG} is that of another run"
        if not damage:  # an edited one would be believed by people
            ran, told = record["settings"], written["settings"]
            keys = [key for key in sorted(told.keys() | ran.keys()) if plain(told.get(key)) != plain(ran.get(key))]
            if edited := "; ".join(f"{key} = {told.get(key)!r}, the run has {ran.get(key)!r}" for key in keys):
                raise SettingsError(
                    f"resume = {name!r}: {path / CONFIG} was edited: {edited}. Put it back or delete the file, "
                    "which is written anew; what may change is given on the command line"
                )
        ran_on = {} if damage else {key: written[key] for key in RAN_ON if key in written}
        return cls(path, record["run"], current_keys(record["settings"]), record["resumed"], damage, ran_on)

    def check(self, settings: Settings) -> dict[str, Any]:
        """Return those of a resumed run's settings that differ; raise :class:`SettingsError` if one must not change."""
        wanted = settings.as_config()
        known = declared_for(wanted)
        ran = {key: setting.before for key, setting in known.items()} | dict(self.settings)
        changed = {k: value for k, value in wanted.items() if not known[k].once and value != ran[k]}
        fixed = settings.train.lr_schedule == "cosine" or settings.run.full_last_round
        fixed |= settings.method.follows_number_of_rounds
        goes_by_it = " (but num-server-rounds not where the method, the cosine schedule or full-last-round goes by it)"
        refused = [
            f"{key} = {value!r}, the run has {ran[key]!r}"
            for key, value in sorted(changed.items())
            if not known[key].resumable or (fixed and key == "num-server-rounds")
        ]
        if refused:
            raise SettingsError(
                f"resume = {self.path.name!r}: {'; '.join(refused)}. With other values it would be another run; these "
                f"may change: {', '.join(sorted(key for key, setting in known.items() if setting.resumable))}"
                + (goes_by_it if fixed else "")
            )
        return changed


def checkpoint_rounds(run: Path) -> list[int]:
    """Return the rounds of the checkpoints in a run's directory, in their order."""
    found = (_CHECKPOINT.fullmatch(path.name) for path in (run / "checkpoints").glob("round-*"))
    return sorted(int(name[1]) for name in found if name)


def reached(run: Path) -> tuple[int, int]:
    """Return the round of the newest checkpoint of a run, and how many there are to be; zeros without one."""
    newest = next(_records(run, []), None)
    return (newest[0], newest[1]["settings"]["num-server-rounds"]) if newest else (0, 0)


def read_summary(run: Path) -> dict[str, Any]:
    """Return what the ``summary.json`` of a run holds, nothing if it is lost or damaged."""
    try:
        summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return summary if isinstance(summary, dict) else {}


def _written(path: Path) -> tuple[dict[str, Any], str]:
    """Return what the ``config.yaml`` of a run holds, or why it cannot be used."""
    try:
        record = read_yaml(path / CONFIG)
    except SettingsError as error:
        return {}, str(error)
    if not isinstance(record.get("settings"), dict) or not isinstance(record.get("id"), str):
        return {}, f"{path / CONFIG} holds no settings or no id"
    return record, ""


def _records(run: Path, reasons: list[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield round and record of each checkpoint, the newest first; note why others cannot be used."""
    for number in reversed(checkpoint_rounds(run)):
        file = run / "checkpoints" / f"round-{number}" / PROGRESS
        try:
            record = read_json(file)
            kinds = {"run": str, "settings": dict, "resumed": list}
            yield number, {key: kind(record[key]) for key, kind in kinds.items()}
        except (OSError, ValueError) as error:  # DamagedFileError is a ValueError
            reasons.append(str(error))
        except (LookupError, TypeError) as error:
            reasons.append(f"{file} lacks {error}")
