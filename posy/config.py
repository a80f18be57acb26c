"""From the run config to the settings of a run, and back."""

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from posy.methods import METHODS, settings_class
from posy.settings import (
    DataSettings,
    RunSettings,
    Scalar,
    SettingsError,
    TrainSettings,
    as_config,
    check_keys,
    default_of,
    fields_of,
    read,
)
from posy.yaml12 import read_yaml

NOT_REPEATED = ("experiment", "resume", "resume-keys")
"""Settings of a run that its repetition does not take over: what they brought stands in the others."""
EXPERIMENTS = Path(__file__).resolve().parent.parent / "experiments"


@dataclass(frozen=True)
class Settings:
    """All settings of a run."""

    run: RunSettings
    data: DataSettings
    train: TrainSettings
    method: Any

    def as_config(self) -> dict[str, Scalar]:
        """Return the settings as flat keys, the method's own under its name."""
        groups = (as_config(self.run), as_config(self.data), as_config(self.train))
        merged = {key: value for group in groups for key, value in group.items()}
        return {**merged, **as_config(self.method, self.run.method)}

    def to_json(self) -> str:
        """Return the settings as one line of JSON, as they travel to the clients."""
        return json.dumps(self.as_config())


def defaults() -> dict[str, Scalar]:
    """Return every key with its default, those of all methods included."""
    config: dict[str, Scalar] = {}
    for cls, prefix in _groups():
        config |= {key: default_of(declared) for key, declared in fields_of(cls, prefix).items()}
    return config


def resolve(config: Mapping[str, Any], where: str = "the run config") -> Settings:
    """Read and check all settings of a run.

    Values of an ``experiment`` file stand under those of ``config`` that differ from their defaults:
    Flower hands over all keys and does not say which of them a person has set.

    Raises
    ------
    SettingsError
        For an unknown key or method, a wrong type, or a value out of range.
    """
    known = defaults()
    check_keys(config, known, where)
    merged: dict[str, Any] = dict(config)
    experiment = config.get("experiment", "")
    if experiment:
        path = experiment_path(str(experiment))
        from_file = read_experiment(path)
        check_keys(from_file, known, str(path))
        own = {key: value for key, value in config.items() if value != known[key]}
        read_all({**known, **from_file}, str(path))
        merged = {**known, **from_file, **own}
    return read_all(merged, where)


def read_all(config: Mapping[str, Any], where: str) -> Settings:
    """Read every group of settings, the other methods' too, so that no wrong value goes unseen."""
    run = read(RunSettings, config, where=where)
    chosen: Any = None
    for method in METHODS:
        settings = read(settings_class(method), config, method, where)
        if method == run.method:
            chosen = settings
    if chosen is None:
        raise SettingsError(f"method = {run.method!r} in {where}: it must be one of {', '.join(METHODS)}")
    return Settings(run, read(DataSettings, config, where=where), read(TrainSettings, config, where=where), chosen)


@lru_cache(maxsize=8)
def from_json(text: str) -> Settings:
    """Read settings that :meth:`Settings.to_json` has written."""
    return read_all(json.loads(text), "the server's message")


def experiment_path(name: str) -> Path:
    """Return the YAML file of an experiment: a path, or a name in ``experiments/``.

    Raises
    ------
    SettingsError
        If there is no such file.
    """
    candidates = (Path(name).expanduser(), EXPERIMENTS / f"{name}.yaml", EXPERIMENTS / name)
    for path in candidates:
        with suppress(OSError):  # too long for a name, or in a folder that may not be looked into
            if path.is_file():
                return path
    names = ", ".join(sorted(p.stem for p in EXPERIMENTS.glob("*.yaml")))
    raise SettingsError(f"experiment = {name!r}: no such file, and experiments/ holds only {names}")


def read_experiment(path: Path) -> dict[str, Any]:
    """Read a YAML file of flat settings; of the ``config.yaml`` of a run, what makes another run like it."""
    content = read_yaml(path)
    if {"settings", "versions"} <= content.keys():
        if not isinstance(content["settings"], dict):
            raise SettingsError(f"settings in {path}: it must hold `key: value` lines")
        return {key: value for key, value in content["settings"].items() if key not in NOT_REPEATED}
    return content


def _groups() -> list[tuple[type, str]]:
    own = [(settings_class(method), method) for method in METHODS]
    return [(RunSettings, ""), (DataSettings, ""), (TrainSettings, ""), *own]
