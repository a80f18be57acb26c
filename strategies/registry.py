"""From what a person has set to the settings of a run, in one pass over all sources."""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

from posy.data.published import DATASETS
from posy.data.settings import SITES, DataSettings, located
from posy.extensions import is_own, word_of
from posy.extensions import located as located_own
from posy.models.catalogue import MODELS
from posy.paths import absolute, is_file
from posy.settings import (
    Scalar,
    Setting,
    SettingsError,
    build,
    check_conditions,
    check_keys,
    checked,
    nearest,
    settings_of,
    shown,
)
from posy.strategies.methods import METHODS, check_method, settings_class
from posy.strategies.settings import RunSettings, Settings, TrainSettings, identified
from posy.yaml12 import parse, read_yaml

PAPERS = Path(__file__).resolve().parent.parent / "papers"
"""A folder for each paper: its tables and figures, and in ``settings/`` experiments, which are files of settings."""

RENAMED: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "ifca-mean": ("client-weights", {"weighted": "samples", "uniform": "uniform"}),
}
"""Settings of earlier versions: the present key, and the present value for each value."""


def read_settings(
    given: Mapping[str, Any], where: str = "the run config", stored: Mapping[str, Any] | None = None
) -> Settings:
    """Return the settings of a run: defaults, over them an experiment file or a stored run, over these what is given.

    They are checked, and their paths absolute.

    Parameters
    ----------
    given, where : Mapping, str
        What a person has set for this very run, by key, and where, for the message of an error; no defaults.
    stored : Mapping, optional
        The settings of the run that is resumed; what this version does not know of them is left out.

    Raises
    ------
    SettingsError
        For an unknown key or method, a wrong type, a value out of range, another method's setting, a setting without
        an effect, or settings that contradict each other.
    """
    values = with_experiment(given, where)
    if stored is not None:
        stored = current_keys(stored)
        known = declared_for(stored)
        older = {key: known[key].earlier for key in known.keys() - stored.keys() if known[key].earlier is not None}
        kept = pertinent(older, _method(stored)) | {k: v for k, v in stored.items() if k in known and not known[k].once}
        values = checked(kept, known, "the stored run") | values
    if "experiment" in given:
        values["experiment"] = given["experiment"]
    for key, setting in declared([]).items():
        path = str(values.get(key, setting.default))
        if setting.place and (path or setting.default) and path != setting.path_or:
            values[key] = str(absolute(path))
        if setting.or_own and is_own(own := str(values.get(key, setting.default))):
            values[key] = located_own(own)
    settings = _built(values)
    check_own(given, settings.run.method, where)
    check_effect(given, settings.as_config(), where)
    return replace(settings, data=located(settings.data), train=identified(settings.train, settings.data.data_dir))


def with_experiment(given: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return what is given, checked, over the values of the experiment file that it names.

    A run may override the file's method, partition or optimiser. Of the file it then leaves out the settings of other
    methods, and the settings that the override leaves without an effect. A setting without an effect in the file alone
    is an error, except in the ``config.yaml`` of a run, which an earlier version may have written.

    Raises
    ------
    SettingsError
        If there is no such file, or something in it or in ``given`` is wrong.
    """
    values = _checked(given, where)
    name = str(values.pop("experiment", ""))
    if not name:
        return values
    path = experiment_path(name)
    content = read_yaml(path)
    from_file = _checked(read_experiment(path), str(path))
    if "experiment" in from_file:
        raise SettingsError(f"experiment in {path}: an experiment file cannot name another one")
    both = pertinent(from_file, _method({**from_file, **values})) | values
    idle = without_effect(both).keys() - values.keys()
    if not _is_record(content):
        check_effect(idle, from_file, str(path))
    return {key: value for key, value in both.items() if key not in idle}


def parse_words(words: Sequence[str], where: str) -> dict[str, Scalar]:
    """Read ``key=value`` words; the type of a value is that of its setting.

    Raises :class:`SettingsError` for a word that is not of that form, and a key that is unknown or given twice.
    """
    texts: dict[str, str] = {}
    for word in words:
        key, equals, text = word.partition("=")
        if not equals or not key:
            setting = setting_of(word)
            hint = f"; did you mean {setting}={word}?" if setting else ""
            raise SettingsError(f"{word!r} on {where}: settings are given as key=value{hint}")
        if key in texts:
            raise SettingsError(f"{key} is given twice on {where}")
        texts[key] = text
    known = _known(texts)
    check_keys(texts, known, where)
    return {key: _typed(text, known[key].kind) for key, text in texts.items()}


def _typed(text: str, kind: type) -> Scalar:
    """Return a YAML scalar in the type of its setting; the text itself where it is not of that type.

    So ``on`` is a text where a text is wanted, and ``010`` is ten, as in files of settings.
    """
    if kind is str and text[:1] not in ("'", '"'):
        return text
    try:
        value: Any = parse(text)
        value = float(value) if kind is float and type(value) is int else value
    except (ValueError, OverflowError):
        return text
    return cast("Scalar", value) if type(value) is kind else text


@lru_cache(maxsize=8)
def from_json(text: str) -> Settings:
    """Return settings that :meth:`Settings.to_json` has written; the other methods are not imported for them."""
    config = json.loads(text)
    return _built(checked(config, declared([_method(config)]), "the server's message"))


def groups(methods: Iterable[str]) -> dict[str, Mapping[str, Setting]]:
    """Return the declared settings by group: ``run``, ``data`` and ``train``, then those of some methods."""
    common = {"run": settings_of(RunSettings), "data": settings_of(DataSettings), "train": settings_of(TrainSettings)}
    return common | {method: settings_of(settings_class(method), word_of(method)) for method in methods}


def declared(methods: Iterable[str] | None = None) -> dict[str, Setting]:
    """Return the declared settings by key: those that all methods share, and those of some methods (None: of all)."""
    wanted = tuple(METHODS if methods is None else methods)
    known = dict(_declared(tuple(method for method in wanted if not is_own(method))))
    for method in filter(is_own, wanted):
        own = groups([method])[method]
        if taken := next((key for key in own if key in known), None):
            raise SettingsError(f"method = {shown(method)}: there is a setting {taken} already; give it another name")
        known |= own
        try:
            check_conditions(own, known)
        except ValueError as error:
            raise SettingsError(f"method = {shown(method)}: {error}; correct `needs` in its settings") from None
    return known


@lru_cache(maxsize=64)
def _declared(methods: tuple[str, ...]) -> dict[str, Setting]:
    """Return the settings that all methods share and those of some methods of Posy's, which do not change."""
    return {key: setting for group in groups(methods).values() for key, setting in group.items()}


def declared_for(config: Mapping[str, Any]) -> dict[str, Setting]:
    """Return the declared settings by key: all of Posy's, and those of people's own method, if a config names one."""
    return declared([*METHODS, *_own_method(config)])


def defaults() -> dict[str, Scalar]:
    """Return every key with its default, those of all methods included."""
    return {key: setting.default for key, setting in declared().items()}


@lru_cache(maxsize=4096)
def owner(key: str) -> str | None:
    """Return the method of Posy's that a setting belongs to, if it does to one."""
    candidates = (method for method in METHODS if key.startswith(f"{method}-"))
    return next((method for method in candidates if key in settings_of(settings_class(method), method)), None)


def pertinent(config: Mapping[str, Any], method: str) -> dict[str, Any]:
    """Return settings without those of other methods."""
    foreign = {key for own in _own_method(config) if own != method for key in groups([own])[own]}
    return {key: value for key, value in config.items() if owner(key) in (None, method) and key not in foreign}


def check_own(given: Iterable[str], method: str, where: str) -> None:
    """Raise :class:`SettingsError` if keys given for this very run are another method's: they would do nothing."""
    for key in given:
        if owner(key) not in (None, method):
            raise SettingsError(f"{key} in {where} is a setting of {owner(key)}; the run's method is {method}")


def unmet_conditions(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the settings, set or not, that have no effect in a run, by key, with the reason.

    They are the settings of the run's method, and the settings that all methods share, whose condition
    (``Setting.needs``) is false.

    Parameters
    ----------
    config : mapping
        Settings by key; a missing key counts as its default.
    """
    known = declared([_method(config)])
    defaults = {key: setting.default for key, setting in known.items()}
    values = {**defaults, **config}
    values["partition"] = located(build(DataSettings, values)).partition
    unmet: dict[str, str] = {}
    for _ in known:  # a setting without an effect counts as its default in the conditions of others
        current = values | {key: defaults[key] for key in unmet}
        before, unmet = unmet, {key: text for key, setting in known.items() if (text := setting.unmet(current))}
        if unmet.keys() == before.keys():
            break
    return {key: f"it needs {known[key].needs}, but {text}" for key, text in unmet.items()}


def without_effect(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the settings of a run that differ from their defaults and have no effect, by key, with the reason.

    A setting at its default is accepted, because files and tables repeat defaults.
    """
    known = declared([_method(config)])
    unmet = unmet_conditions(config)
    return {key: unmet[key] for key in config if key in unmet and config[key] != known[key].default}


def effective(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a run without those that have no effect."""
    idle = without_effect(config)
    return {key: value for key, value in config.items() if key not in idle}


def normalised(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with their current keys, and with the default in place of each value that has no effect."""
    config = current_keys(config)
    known = declared([_method(config)])
    return {**config, **{key: known[key].default for key in without_effect(config)}}


def check_effect(keys: Iterable[str], config: Mapping[str, Any], where: str) -> None:
    """Raise :class:`SettingsError` if one of some keys has no effect in a run with the settings ``config``."""
    idle = without_effect(config)
    for key in keys:
        if key in idle:
            raise SettingsError(no_effect(key, config[key], where, idle[key]))


def no_effect(key: str, value: Any, where: str, why: str) -> str:
    """Return the message about a setting without an effect."""
    return f"{key} = {shown(value)} in {where} has no effect: {why}; change that, or leave {key} out"


def experiment_path(name: str) -> Path:
    """Return the YAML file of an experiment, a path or a name in ``papers/*/settings/``.

    One that is neither raises :class:`SettingsError`.
    """
    known = {path.stem: path for path in sorted(PAPERS.glob("*/settings/*.yaml"))}
    typed = absolute(name)
    if is_file(typed):
        return typed
    if (stem := name.removesuffix(".yaml")) in known:
        return known[stem]
    if os.path.isdir(typed):  # noqa: PTH112 - false for what no name can be, which Path takes ill
        record = f"{name.rstrip('/')}/config.yaml"
        likely = f"{record}, which repeats that run" if is_file(absolute(record)) else f"dataset={name}"
        raise SettingsError(f"experiment = {shown(name)}: it is a directory; did you mean {likely}?")
    if setting := setting_of(name):
        raise SettingsError(f"experiment = {name!r}: there is no such file; did you mean {setting}={name}?")
    word = Path(name).stem
    if "/" in name and word not in known:  # a path, and no word that resembles one
        raise SettingsError(f"experiment = {shown(name)}: there is no such file; looked for {typed}")
    near = nearest(word, known) or nearest(word, (*METHODS, *DATASETS), 0.75)
    near = nearest(word, (near, *METHODS, *DATASETS))  # a word in the place of a file
    near = f"{setting}={near}" if (setting := setting_of(near)) else near
    hint = f"did you mean {near}?" if near else f"papers/ holds only {', '.join(known)}"
    raise SettingsError(f"experiment = {shown(name)}: there is no such file; {hint}")


def setting_of(word: str) -> str:
    """Return the setting that a word alone is a value of: a method, a data set, a model; else an empty text."""
    for key, names in (("method", METHODS), ("dataset", (*DATASETS, SITES)), ("model", MODELS)):
        if word in names:
            return key
    return ""


def read_experiment(path: Path) -> dict[str, Any]:
    """Read a YAML file of flat settings; of the ``config.yaml`` of a run, what makes another run like it."""
    content = read_yaml(path)
    if _is_record(content):
        if not isinstance(content["settings"], dict):
            raise SettingsError(f"settings in {path}: it must hold `key: value` lines")
        known = settings_of(RunSettings)
        settings = current_keys(content["settings"])
        return {key: value for key, value in settings.items() if key not in known or not known[key].once}
    return content


def current_keys(stored: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a stored run with the keys of this version; see :data:`RENAMED`."""
    current = dict(stored)
    for earlier, (key, values) in RENAMED.items():
        if earlier in current and key not in current:
            current[key] = values[current[earlier]]
        current.pop(earlier, None)
    return current


def _is_record(content: Mapping[str, Any]) -> bool:
    """Return whether the content of a file is the ``config.yaml`` of a run."""
    return {"settings", "versions"} <= content.keys()


def _method(config: Mapping[str, Any]) -> str:
    return str(config.get("method", RunSettings.method))


def _own_method(config: Mapping[str, Any]) -> list[str]:
    """Return the method of people's own that settings name, or the experiment file that they name does, if any."""
    method = config.get("method")
    if method is None and (name := config.get("experiment")):
        method = read_experiment(experiment_path(str(name))).get("method")
    return [method] if isinstance(method, str) and is_own(method) else []


def _known(config: Mapping[str, Any]) -> dict[str, Setting]:
    """Return the declared settings, without importing the methods as long as all keys are shared by them."""
    common = declared([])
    return common if config.keys() <= common.keys() else declared_for(config)


def _checked(config: Mapping[str, Any], where: str) -> dict[str, Scalar]:
    values = checked(config, _known(config), where)
    check_method(_method(values), where)
    return values


def _built(values: Mapping[str, Scalar]) -> Settings:
    method = _method(values)
    own = build(settings_class(method), values, word_of(method))
    return Settings(build(RunSettings, values), build(DataSettings, values), build(TrainSettings, values), own)
