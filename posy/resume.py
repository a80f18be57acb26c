"""Going on with a run that lies in the output directory: its settings stand, and only some may change."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from posy.config import Settings, defaults, read_all, read_yaml
from posy.methods import strategy_class
from posy.settings import SettingsError, check_keys
from posy.storage import is_folder_name

MAY_CHANGE = {
    "num-server-rounds",
    "round-timeout",
    "engine",
    "device",
    "threads",
    "stack",
    "min-clients",
    "join-timeout",
    "data-dir",
    "output-dir",
    "download",
    "save-models",
    "checkpoint-every",
    "state-memory",
}
"""Settings that a resumed run may have other values of: where and how it is carried out, and how far it goes."""

OWN = {"resume", "resume-keys"}


@dataclass(frozen=True)
class StoredRun:
    """A run that has been started before.

    Attributes
    ----------
    path : Path
        Its directory.
    settings : Mapping
        All settings that it ran with, by key.
    record : Mapping
        What else its ``config.yaml`` holds.
    """

    path: Path
    settings: Mapping[str, Any]
    record: Mapping[str, Any]

    @classmethod
    def find(cls, output_dir: Path, name: str) -> "StoredRun":
        """Return the run of a name.

        Raises
        ------
        SettingsError
            If there is none.
        """
        path = output_dir / name
        if not is_folder_name(name):
            raise SettingsError(f"resume = {name!r}: it must be the name of a folder in output-dir = {output_dir}")
        if not (path / "config.yaml").is_file():
            raise SettingsError(f"resume = {name!r}: there is no run in {path}")
        record = read_yaml(path / "config.yaml", yaml.SafeLoader)
        if not isinstance(record.get("settings"), dict) or not isinstance(record.get("id"), str):
            raise SettingsError(f"resume = {name!r}: {path}/config.yaml is not that of a run with checkpoints")
        return cls(path, record["settings"], record)

    def resumed(self, given: Mapping[str, Any], where: str) -> Settings:
        """Return the run's settings with those that are given over them; :meth:`check` tells whether they may be."""
        known = defaults()
        stored = {key: value for key, value in self.settings.items() if key in known and key not in OWN}
        return read_all({**known, **stored, **given, "resume": self.path.name}, where)

    def check(self, settings: Settings) -> dict[str, Any]:
        """Return those of a resumed run's settings that differ from the stored ones.

        Raises
        ------
        SettingsError
            If one of them must not change.
        """
        known = defaults()
        changed = {
            key: value
            for key, value in settings.as_config().items()
            if key not in OWN and value != self.settings.get(key, known[key])
        }
        refused = changed.keys() - MAY_CHANGE
        fixed = settings.train.lr_schedule != "constant" or strategy_class(settings.run.method).follows_number_of_rounds
        if "num-server-rounds" in changed and fixed:
            refused.add("num-server-rounds")
        if refused:
            ran = {key: self.settings.get(key, known[key]) for key in sorted(refused)}
            own = "; ".join(f"{key} = {changed[key]!r}, the run has {value!r}" for key, value in ran.items())
            raise SettingsError(
                f"resume = {self.path.name!r}: {own}. With other values it would be another run; these may change: "
                f"{', '.join(sorted(MAY_CHANGE))}"
                + (" (but num-server-rounds not where the method or lr-schedule goes by it)" if fixed else "")
            )
        return changed


def given_keys(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the settings that a person has set beside ``resume``.

    Flower hands over all keys: those are taken for set that differ from their defaults or stand in ``resume-keys``.
    """
    known = defaults()
    check_keys(config, known, where)
    named = str(config.get("resume-keys", "")).split()
    check_keys(dict.fromkeys(named), known, f"resume-keys of {where}")
    return {key: value for key, value in config.items() if key not in OWN and (value != known[key] or key in named)}
