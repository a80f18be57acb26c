"""From the run config to the settings of a run, and back."""

import json
import os
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from posy.paths import expanded, is_file
from posy.settings import (
    DATASETS,
    MODELS,
    SITES,
    DataSettings,
    RunSettings,
    Scalar,
    Settings,
    SettingsError,
    TrainSettings,
    check_keys,
    default_of,
    fields_of,
    nearest,
    read,
    shown,
)
from posy.strategies.methods import METHODS, check_method, settings_class
from posy.yaml12 import read_yaml

NOT_REPEATED = ("experiment", "resume", "resume-keys")
"""Settings of a run that its repetition does not take over: what they brought stands in the others."""
EXPERIMENTS = Path(__file__).resolve().parent.parent / "experiments"


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
        For an unknown key or method, a wrong type, a value out of range, or another method's setting.
    """
    known = defaults()
    check_keys(config, known, where)
    own = {key: value for key, value in config.items() if value != known[key]}
    merged: dict[str, Any] = dict(config)
    experiment = config.get("experiment", "")
    if experiment and isinstance(experiment, str):
        path = experiment_path(experiment)
        from_file = read_experiment(path)
        check_keys(from_file, known, str(path))
        read_all({**known, **from_file}, str(path))
        merged = {**known, **from_file, **own}
    settings = read_all(merged, where)
    check_own(own, settings.run.method, where)
    return settings


def check_own(given: Iterable[str], method: str, where: str) -> None:
    """Raise :class:`SettingsError` for settings of another method than the run's: they would do nothing.

    Parameters
    ----------
    given : iterable of str
        Keys that a person has set for this very run; a file that is made for several may hold others.
    method : str
        The run's method.
    where : str
        Where they were set.
    """
    owners = _owners()
    for key in given:
        if owners.get(key, method) != method:
            raise SettingsError(f"{key} in {where} is a setting of {owners[key]}; the run's method is {method}")


def pertinent(config: Mapping[str, Any], method: str) -> dict[str, Any]:
    """Return settings without those of other methods."""
    owners = _owners()
    return {key: value for key, value in config.items() if owners.get(key, method) == method}


def owner(key: str) -> str | None:
    """Return the method that a setting belongs to, if it does to one."""
    return _owners().get(key)


@lru_cache(maxsize=1)
def _owners() -> dict[str, str]:
    return {key: method for method in METHODS for key in fields_of(settings_class(method), method)}


def read_all(config: Mapping[str, Any], where: str) -> Settings:
    """Read every group of settings, the other methods' too, so that no wrong value goes unseen."""
    run = read(RunSettings, config, where=where)
    chosen: Any = None
    for method in METHODS:
        settings = read(settings_class(method), config, method, where)
        if method == run.method:
            chosen = settings
    check_method(run.method, where)
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
    candidates = (expanded(name), EXPERIMENTS / f"{name}.yaml", EXPERIMENTS / name)
    for path in candidates:
        if is_file(path):
            return path
    if os.path.isdir(candidates[0]):  # noqa: PTH112 - false for what no name can be, which Path takes ill
        raise SettingsError(f"experiment = {shown(name)}: it is a directory; did you mean dataset={name}?")
    if setting := setting_of(name):
        raise SettingsError(f"experiment = {name!r}: there is no such file; did you mean {setting}={name}?")
    names = sorted(p.stem for p in EXPERIMENTS.glob("*.yaml"))
    word = Path(name).stem
    alone = nearest(word, (*METHODS, *DATASETS), 0.75)  # a word in the place of a file
    near = nearest(word, names) or (f"{setting_of(alone)}={alone}" if alone else "")
    hint = f"did you mean {near}?" if near else f"experiments/ holds only {', '.join(names)}"
    raise SettingsError(f"experiment = {shown(name)}: there is no such file; {hint}")


def setting_of(word: str) -> str:
    """Return the setting that a word alone is a value of: a method, a data set, a model; else an empty text."""
    for key, names in (("method", METHODS), ("dataset", (*DATASETS, SITES)), ("model", MODELS[1:])):
        if word in names:
            return key
    return ""


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
