"""Resume a run from its directory. Only some settings of the run may change."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from posy.paths import absolute
from posy.settings import SettingsError
from posy.storage import is_folder_name, plain, read_json
from posy.strategies.registry import code_digests, current_keys, declared_for, with_experiment
from posy.strategies.run_settings import OFF, RunSettings
from posy.strategies.settings import Settings
from posy.yaml12 import read_yaml

CONFIG, PROGRESS = "config.yaml", "progress.json"
WITHOUT_MODEL = "without-final-model"
"""Key in ``summary.json`` that lists the clients of a completed run whose final models have not been delivered."""
RAN_ON = ("machine", "versions")
"""Keys in ``config.yaml`` that describe the machine and software of a run."""
CODE = "code"
"""Key in ``config.yaml`` with the digests of the run's custom code, if it has any."""
_CHECKPOINT = re.compile(r"round-(\d+)")


@dataclass(frozen=True)
class StoredRun:
    """A stored run with a unique id, as described by its newest checkpoint."""

    path: Path
    id: str
    settings: Mapping[str, Any]
    resumed_before: list[dict[str, Any]]
    damage: str = ""
    """Why its ``config.yaml`` cannot be used, or an empty string if the file matches the run."""
    ran_on: Mapping[str, Any] = field(default_factory=dict)
    """The ``machine``, the ``versions`` and the ``code`` in its ``config.yaml``, if the file matches the run."""

    @classmethod
    def find(cls, user_settings: Mapping[str, Any], where: str) -> "StoredRun | None":
        """Return the run that the settings resume, or None for a new run.

        The run's settings come from its checkpoint. Posy rewrites its ``config.yaml`` if the file is lost or damaged.

        Raises
        ------
        SettingsError
            If the settings are invalid, the run does not exist or has no readable checkpoint, or the file was edited.
        """
        values = with_experiment(user_settings, where)
        name, output_dir = values.get("resume"), absolute(values.get("output-dir", RunSettings.output_dir))
        if not name:
            return None
        path = output_dir / name
        if not is_folder_name(name):
            raise SettingsError(f"resume = {name!r}: it must be the name of a folder in output-dir = {output_dir}")
        if not checkpoint_rounds(path) and not (path / CONFIG).is_file():
            raise SettingsError(f"resume = {name!r}: {path} does not contain a run; name a folder in output-dir")
        config, damage = _written(path)
        reasons: list[str] = []
        records = [record for _, record in _records(path, reasons)]
        if not records:
            no_checkpoint = (
                "it has no checkpoint (Posy writes the first after round 1, and none if checkpoint-every = 0)"
            )
            reason = (
                f"no checkpoint of the run can be used ({'; '.join(reasons)})"
                if reasons
                else f"{no_checkpoint}. Start a new run"
            )
            raise SettingsError(f"resume = {name!r}: {reason}")
        # If the checkpoints belong to several runs, the id in config.yaml selects one of them.
        record = next((record for record in records if record["run"] == config.get("id")), records[0])
        if not damage and config["id"] != record["run"]:
            damage = f"{path / CONFIG} belongs to another run"
        if not damage:  # reject an edited config.yaml: it no longer describes the run
            run_settings, file_settings = record["settings"], config["settings"]
            keys = [
                key
                for key in sorted(file_settings.keys() | run_settings.keys())
                if plain(file_settings.get(key)) != plain(run_settings.get(key))
            ]
            if edited := "; ".join(
                f"{key} = {file_settings.get(key)!r}, but the run has {run_settings.get(key)!r}" for key in keys
            ):
                raise SettingsError(
                    f"resume = {name!r}: {path / CONFIG} was edited: {edited}. Restore it, or delete "
                    "the file so that Posy rewrites it; change settings on the command line"
                )
        ran_on = {} if damage else {key: config[key] for key in (*RAN_ON, CODE) if key in config}
        return cls(path, record["run"], current_keys(record["settings"]), record["resumed"], damage, ran_on)

    def check(self, settings: Settings) -> dict[str, Any]:
        """Return the settings that have changed, or raise :class:`SettingsError` if one of them may not change."""
        changed, refusals = refused_changes(self.settings, settings)
        if refusals:
            declared = declared_for(settings.as_config())
            rounds_note = (
                " (not num-server-rounds, because the method, the schedule, full-last-round or the noise depends on it)"
            )
            raise SettingsError(
                f"resume = {self.path.name!r}: {'; '.join(refusals)}. It would be a different run; only these settings "
                f"may change: {', '.join(sorted(key for key, setting in declared.items() if setting.resumable))}"
                + (rounds_note if depends_on_length(settings) else "")
            )
        return changed

    def code_note(self, settings: Settings) -> str:
        """Return a warning that custom code has changed since the run started; empty if it has not changed."""
        config = settings.as_config()
        digests = code_digests(config)
        stored_digests = self.ran_on.get(CODE, digests)
        changed = [f"{key} = {config[key]!r}" for key in sorted(digests) if digests[key] != stored_digests.get(key)]
        if not changed:
            return ""
        return f"resume = {self.path.name!r}: the code of {', '.join(changed)} has changed since the run started"


def refused_changes(run_settings: Mapping[str, Any], settings: Settings) -> tuple[dict[str, Any], list[str]]:
    """Return the settings that differ from a stored run's settings, and a text for each one that may not change."""
    new_settings = settings.as_config()
    declared = declared_for(new_settings)
    run_settings = {key: setting.before for key, setting in declared.items()} | dict(run_settings)
    changed = {k: value for k, value in new_settings.items() if not declared[k].once and value != run_settings[k]}
    refusals = [
        f"{key} = {value!r}, but the run has {run_settings[key]!r}"
        for key, value in sorted(changed.items())
        if not declared[key].resumable or (depends_on_length(settings) and key == "num-server-rounds")
    ]
    return changed, refusals


def depends_on_length(settings: Settings) -> bool:
    """Return whether results of the run's rounds depend on the total number of rounds."""
    depends = settings.train.lr_schedule == "cosine" or settings.run.full_last_round
    return depends or settings.method.follows_number_of_rounds or settings.train.dp != OFF


def checkpoint_rounds(run: Path) -> list[int]:
    """Return the rounds for which a run's directory has checkpoints, in ascending order."""
    matches = (_CHECKPOINT.fullmatch(path.name) for path in (run / "checkpoints").glob("round-*"))
    return sorted(int(match[1]) for match in matches if match)


def reached(run: Path) -> tuple[int, int]:
    """Return the round of a run's newest checkpoint and the run's number of rounds, or zeros if none exists."""
    newest = next(_records(run, []), None)
    return (newest[0], newest[1]["settings"]["num-server-rounds"]) if newest else (0, 0)


def read_summary(run: Path) -> dict[str, Any]:
    """Return the content of a run's ``summary.json``, or an empty dictionary if the file is lost or damaged."""
    try:
        summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return summary if isinstance(summary, dict) else {}


def _written(path: Path) -> tuple[dict[str, Any], str]:
    """Return the content of a run's ``config.yaml`` and an empty string, or an empty dictionary and the problem."""
    try:
        record = read_yaml(path / CONFIG)
    except SettingsError as error:
        return {}, str(error)
    if not isinstance(record.get("settings"), dict) or not isinstance(record.get("id"), str):
        return {}, f"{path / CONFIG} has no settings or no id"
    return record, ""


def _records(run: Path, reasons: list[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the round and record of each usable checkpoint, newest first; add the others' problems to ``reasons``."""
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
