"""Read the settings of a run from all sources: command line, experiment file, stored run and defaults."""

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

from posy.data.published import DATASETS
from posy.data.settings import BY_CLASS, SITES, DataSettings, check_subset, located
from posy.data.task import TITLES
from posy.extensions import code_digest, is_custom, key_prefix
from posy.extensions import located as located_own
from posy.metrics import CLASSES
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
    parse_limit,
    quoted,
    set_in,
    settings_of,
    with_sources,
)
from posy.strategies.client_settings import bounds_of, inlined
from posy.strategies.methods import METHODS, check_method, settings_class
from posy.strategies.run_settings import AUTO, RunSettings, TrainSettings, identified
from posy.strategies.settings import Settings
from posy.yaml12 import parse, read_yaml

PAPERS = Path(__file__).resolve().parent.parent / "papers"
"""Directory with one folder per paper, for its tables, figures and experiments (files in ``settings/``)."""

RENAMED: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "ifca-mean": ("client-weights", {"weighted": "samples", "uniform": "uniform"}),
}
"""Earlier keys of renamed settings, mapped to the current key and a mapping from earlier to current values."""
REMOVED = ("dp-sensitivity",)
"""Settings of earlier versions that no longer exist, but that stored runs may contain."""

STORED = "the stored run"
"""Source of a resumed run's or a stored model's settings, as named in error messages."""
SAMPLES = {"image": "images", "text": "texts", "table": "tables", "features": "features"}
"""Plural of each kind of sample in :attr:`Setting.samples`, for messages."""


@dataclass(frozen=True)
class Merged:
    """The user's settings, merged with the settings in the experiment file that they name."""

    values: dict[str, Any]
    sources: dict[str, str]
    """The source of each setting in ``values``, for error messages."""
    notice: str
    """A warning about settings in the file that lose their effect because the user overrides others; may be empty."""


def read_settings(
    user_settings: Mapping[str, Any],
    where: str = "the run config",
    stored: Mapping[str, Any] | None = None,
    sources: Mapping[str, str] | None = None,
) -> Settings:
    """Return the checked settings of a run, with absolute paths.

    The values in ``user_settings`` override an experiment file or a stored run, which overrides the defaults.

    Parameters
    ----------
    user_settings : mapping
        The user's settings for this run by key, without defaults.
    where : str
        The source of ``user_settings``, for error messages.
    stored : mapping, optional
        The settings of a resumed run or a stored model. Keys that this version does not know are ignored.
    sources : mapping, optional
        The sources of settings in ``user_settings`` that do not come from ``where``.

    Raises
    ------
    SettingsError
        If a key or method is unknown, a value has the wrong type or is out of range or above its limit, a setting
        belongs to another method or has no effect, or settings contradict each other.
    """
    with named_sources(user_settings, where, stored, sources):
        return _read(user_settings, where, stored)


@contextmanager
def named_sources(
    user_settings: Mapping[str, Any],
    where: str,
    stored: Mapping[str, Any] | None = None,
    sources: Mapping[str, str] | None = None,
) -> Iterator[None]:
    """Add the source of each setting to the message of a :class:`SettingsError`; see :func:`read_settings`."""
    try:
        yield
    except SettingsError as error:
        try:
            merged = merge_experiment(user_settings, where)
        except SettingsError:  # this error already names the source of the wrong setting
            raise error from None
        values = {**(stored or {}), **merged.values}
        for key, setting in declared([]).items():
            if setting.place and key in values:  # messages quote some paths as typed, and others as absolute paths
                path = str(absolute(str(values[key])))
                values[key] = path if f"{key} = {quoted(path)}" in str(error) else values[key]
        origins = dict.fromkeys(stored or (), STORED) | merged.sources | dict(sources or {})
        error.args = (with_sources(str(error), values, origins),)
        raise


def _read(user_settings: Mapping[str, Any], where: str, stored: Mapping[str, Any] | None) -> Settings:
    """Return the checked settings of a run; see :func:`read_settings`."""
    values = with_experiment(user_settings, where)
    if stored is not None:
        stored = current_keys(stored)
        declarations = declared_for(stored)
        missing = declarations.keys() - stored.keys()
        earlier_values = {key: declarations[key].earlier for key in missing if declarations[key].earlier is not None}
        stored_values = {
            key: value for key, value in stored.items() if key in declarations and not declarations[key].once
        }
        values = (
            checked(relevant_settings(earlier_values, _method(stored)) | stored_values, declarations, STORED) | values
        )
    if "experiment" in user_settings:
        values["experiment"] = user_settings["experiment"]
    for key, setting in declared([]).items():
        path = str(values.get(key, setting.default))
        if setting.place and (path or setting.default) and path != setting.path_or:
            values[key] = str(absolute(path))
        if setting.custom_kind and is_custom(custom := str(values.get(key, setting.default))):
            values[key] = located_own(custom)
    values["client-settings"] = inlined(str(values.get("client-settings", "")))
    bounds_of(str(values.get("client-bounds", "")))  # raises an error for malformed bounds
    settings = _built(values)
    if settings.data.target != CLASSES and values.get("partition") in BY_CLASS:
        raise SettingsError(
            f"partition = {quoted(values['partition'])} assigns samples by class, but task = "
            f"{TITLES[settings.data.target]!r} has no classes; set partition = 'iid', 'natural' or 'file'"
        )
    check_own(user_settings, settings.run.method, where)
    check_effect(user_settings, settings.as_config(), where)
    check_limits(user_settings, settings.as_config(), where)
    data = located(settings.data)
    check_subset(data)
    return replace(settings, data=data, train=identified(settings.train, settings.data.data_dir))


def code_digests(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the digest of each file of custom code on which a run's results depend, keyed by setting."""
    keys = [key for key, setting in declared([]).items() if setting.custom_kind and setting.decides]
    custom = {key: text for key in keys if is_custom(text := str(settings.get(key, "")))}
    digests = {key: code_digest(text) for key, text in custom.items()}
    return {key: digest for key, digest in digests.items() if digest}


def with_experiment(user_settings: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the values of :func:`merge_experiment`."""
    return merge_experiment(user_settings, where).values


def merge_experiment(user_settings: Mapping[str, Any], where: str) -> Merged:
    """Return the checked ``user_settings``, merged over the settings in the experiment file that they name.

    A run may override the file's method, data set, partition or optimiser. Posy then ignores settings in the file that
    belong to other methods or lose their effect, and caps values at their limits. A setting that has no effect or
    exceeds its limit even without the override raises an error. The ``config.yaml`` of a run is exempt, because an
    earlier version may have written it.

    Raises
    ------
    SettingsError
        If the file does not exist, or if the file or ``user_settings`` has an invalid setting.
    """
    values = _checked(user_settings, where)
    name = str(values.pop("experiment", ""))
    sources = dict.fromkeys(values, where)
    if not name:
        return Merged(values, sources, "")
    path = experiment_path(name)
    content = read_yaml(path)
    from_file = _checked(read_experiment(path), str(path))
    if "experiment" in from_file:
        raise SettingsError(f"experiment in {path}: an experiment file cannot name another one")
    combined = relevant_settings(from_file, _method({**from_file, **values})) | values
    unused = {key: why for key, why in without_effect(combined).items() if key not in values}
    unused_in_file = without_effect(from_file)
    if not _is_record(content):
        check_effect(unused, from_file, str(path))
        check_limits(from_file, from_file, str(path))
    overridden = {key: why for key, why in unused.items() if key not in unused_in_file}
    if "model" not in values and not _unsuitable_model(from_file) and (why := _unsuitable_model(combined)):
        overridden["model"] = why
    grouped: dict[str, list[str]] = {}
    for key in sorted(overridden):
        grouped.setdefault(overridden[key], []).append(f"{key} = {quoted(from_file[key])}")
    listed = "; ".join(f"{', '.join(texts)} ({why})" for why, texts in grouped.items())
    notice = f"Posy ignores settings {set_in(str(path))}, because settings {set_in(where)} override the file: {listed}"
    merged = {key: value for key, value in combined.items() if key not in unused.keys() | overridden.keys()}
    merged = lowered(merged, values)
    return Merged(merged, dict.fromkeys(merged, str(path)) | sources, notice if listed else "")


def _unsuitable_model(config: Mapping[str, Any]) -> str:
    """Return why a config's built-in network does not suit its published data set, or an empty string."""
    config = {"dataset": DataSettings.dataset, **config}
    model, data = str(config.get("model", "")), DATASETS.get(str(config["dataset"]))
    if data is None or model not in MODELS or data.kind in MODELS[model].kinds:
        return ""
    kinds = " or ".join(SAMPLES.get(kind, kind) for kind in MODELS[model].kinds)
    return f"it needs {kinds}, but {_samples_of(config)}"


def _samples_of(config: Mapping[str, Any]) -> str:
    """Return a clause about the kind of samples in a config's published data set."""
    return f"dataset = {quoted(config['dataset'])} has {SAMPLES[DATASETS[str(config['dataset'])].kind]}"


def parse_words(words: Sequence[str], where: str) -> dict[str, Scalar]:
    """Parse ``key=value`` words into settings, and convert each value to its setting's type.

    Raises :class:`SettingsError` for a malformed word, and for an unknown or repeated key.
    """
    texts: dict[str, str] = {}
    for word in words:
        key, equals, text = word.partition("=")
        if not equals or not key:
            setting = setting_of(word)
            hint = f"; did you mean {setting}={word}?" if setting else ""
            raise SettingsError(f"{word!r} {set_in(where)}: settings are given as key=value{hint}")
        if key in texts:
            raise SettingsError(f"{key} is given twice {set_in(where)}; give it once")
        texts[key] = text
    declarations = _declarations(texts)
    check_keys(texts, declarations, where)
    return {key: _typed(text, declarations[key].kind) for key, text in texts.items()}


def _typed(text: str, kind: type) -> Scalar:
    """Parse a YAML scalar as its setting's type; return the text unchanged if it has a different type.

    For example, ``on`` stays a string if the setting is a string, and ``010`` is ten, as in settings files.
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
    """Return the settings in a string from :meth:`Settings.to_json`, importing only the run's method."""
    config = json.loads(text)
    return _built(checked(config, declared([_method(config)]), "the server's message"))


def groups(methods: Iterable[str]) -> dict[str, Mapping[str, Setting]]:
    """Return the declared settings by group: ``run``, ``data``, ``train``, and one for each method."""
    common = {"run": settings_of(RunSettings), "data": settings_of(DataSettings), "train": settings_of(TrainSettings)}
    return common | {method: settings_of(settings_class(method), key_prefix(method)) for method in methods}


def declared(methods: Iterable[str] | None = None) -> dict[str, Setting]:
    """Return the declared settings by key: the shared settings, and the settings of some methods (None: all)."""
    names = tuple(METHODS if methods is None else methods)
    declarations = dict(_declared(tuple(method for method in names if not is_custom(method))))
    for method in filter(is_custom, names):
        custom = groups([method])[method]
        if duplicate := next((key for key in custom if key in declarations), None):
            raise SettingsError(
                f"method = {quoted(method)}: its setting {duplicate} already exists in Posy; give the setting another "
                "name"
            )
        declarations |= custom
        try:
            check_conditions(custom, declarations)
        except ValueError as error:
            raise SettingsError(f"method = {quoted(method)}: {error}; correct `needs` in its settings") from None
    return declarations


@lru_cache(maxsize=64)
def _declared(methods: tuple[str, ...]) -> dict[str, Setting]:
    """Return the shared settings and the settings of some of Posy's methods, by key."""
    return {key: setting for group in groups(methods).values() for key, setting in group.items()}


def declared_for(config: Mapping[str, Any]) -> dict[str, Setting]:
    """Return all of Posy's declared settings and the settings of a config's custom method, by key."""
    return declared([*METHODS, *_own_method(config)])


def defaults() -> dict[str, Scalar]:
    """Return every key with its default, for all of Posy's methods."""
    return {key: setting.default for key, setting in declared().items()}


@lru_cache(maxsize=4096)
def owner(key: str) -> str | None:
    """Return the Posy method that declares a setting, or None."""
    candidates = (method for method in METHODS if key.startswith(f"{method}-"))
    return next((method for method in candidates if key in settings_of(settings_class(method), method)), None)


def relevant_settings(config: Mapping[str, Any], method: str) -> dict[str, Any]:
    """Return a config without the settings of methods other than ``method``."""
    foreign = {key for custom in _own_method(config) if custom != method for key in groups([custom])[custom]}
    return {key: value for key, value in config.items() if owner(key) in (None, method) and key not in foreign}


def check_own(user_keys: Iterable[str], method: str, where: str) -> None:
    """Raise :class:`SettingsError` if one of the user's keys belongs to another method, and so has no effect."""
    for key in user_keys:
        if owner(key) not in (None, method):
            raise SettingsError(
                f"{key} {set_in(where)} is a setting of {owner(key)}; the run's method is {method}; remove {key}, or "
                "change method"
            )


def unmet_conditions(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the reason for each setting that has no effect in a run, keyed by setting.

    The function checks the shared settings and the settings of the run's method, whether or not ``config`` sets them. A
    setting has no effect if its condition (``Setting.needs``) is false, or if the published data set lacks the kind of
    samples that the setting needs (``Setting.samples``).

    Parameters
    ----------
    config : mapping
        Settings by key; a missing setting has its default value.
    """
    method = _method(config)
    declarations = declared([method])
    values = {**{key: setting.default for key, setting in declarations.items()}, **config}
    values["partition"] = located(build(DataSettings, values)).partition
    if is_custom(method) or not all(isinstance(value, Scalar) for value in values.values()):
        reasons = _unmet(declarations, values)
    else:
        reasons = dict(_unmet_of_method(method, tuple((k, type(value), value) for k, value in values.items())))
    if values["dataset"] in DATASETS:
        kind = DATASETS[values["dataset"]].kind
        for key, setting in declarations.items():
            if setting.samples not in ("", kind):
                reasons.setdefault(key, f"it needs {SAMPLES[setting.samples]}, but {_samples_of(values)}")
    return reasons


@lru_cache(maxsize=1024)
def _unmet_of_method(method: str, assignments: tuple[tuple[str, type, Scalar], ...]) -> dict[str, str]:
    """Return the result of :func:`_unmet` for one of Posy's methods.

    The result is cached because a table reads the settings of each run many times. The types are part of the cache key
    because 1 equals True.
    """
    return _unmet(declared([method]), {key: value for key, _, value in assignments})


def _unmet(declarations: Mapping[str, Setting], values: Mapping[str, Any]) -> dict[str, str]:
    """Return the reason for each setting whose condition is false, keyed by setting."""
    unmet: dict[str, str] = {}
    conditional = {key: setting for key, setting in declarations.items() if setting.needs}
    for _ in declarations:  # conditions use the default of a setting that has no effect
        current = {**values, **{key: declarations[key].default for key in unmet}}
        before, unmet = unmet, {key: text for key, setting in conditional.items() if (text := setting.unmet(current))}
        if unmet.keys() == before.keys():
            break
    return {key: f"it needs {declarations[key].needs}, but {text}" for key, text in unmet.items()}


def without_effect(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the reason for each non-default setting that has no effect in a run, keyed by setting.

    A setting at its default is accepted, because files and tables may set defaults explicitly.
    """
    declarations = declared([_method(config)])
    unmet = unmet_conditions(config)
    return {key: unmet[key] for key in config if key in unmet and config[key] != declarations[key].default}


def effective(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a run that have an effect."""
    unused = without_effect(config)
    return {key: value for key, value in config.items() if key not in unused}


def normalised(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a stored run's settings under their current keys.

    A value that has no effect becomes the default, and a value above its limit becomes the limit. A missing setting
    receives :attr:`Setting.earlier`, which keeps the behaviour from before the setting existed. If this value would
    have no effect, the setting receives its default.
    """
    config = current_keys(config)
    declarations = declared([_method(config)])
    before = {key: setting.earlier for key, setting in declarations.items() if setting.earlier is not None}
    unused = without_effect({**before, **config})
    return lowered({**config, **{key: declarations[key].default for key in unused}})


def check_effect(keys: Iterable[str], config: Mapping[str, Any], where: str) -> None:
    """Raise :class:`SettingsError` if one of the keys has no effect in a run with the settings ``config``."""
    unused = without_effect(config)
    for key in keys:
        if key in unused:
            raise SettingsError(no_effect(key, config[key], where, unused[key]))


def no_effect(key: str, value: Any, where: str, why: str) -> str:
    """Return the error message for a setting that has no effect."""
    return f"{key} = {quoted(value)} {set_in(where)} has no effect: {why}; change the condition, or remove {key}"


def above_limit(config: Mapping[str, Any]) -> dict[str, int]:
    """Return the limits that a run's settings exceed, keyed by setting. Other settings impose these limits.

    A setting at its default is accepted, because files and tables may set defaults explicitly.
    """
    declarations = declared([_method(config)])
    values = {**{key: setting.default for key, setting in declarations.items()}, **config}
    return {
        key: int(largest)
        for key, setting in declarations.items()
        if setting.limit and values[key] != setting.default and values[key] > (largest := setting.largest(values))
    }


def check_limits(keys: Iterable[str], config: Mapping[str, Any], where: str) -> None:
    """Raise :class:`SettingsError` if the value of one of the keys is above its limit in a run with ``config``."""
    limits = above_limit(config)
    for key in keys:
        if key in limits:
            limit = declared([_method(config)])[key].limit
            raise SettingsError(
                f"{key} = {quoted(config[key])} {set_in(where)}: it can be at most {limit}, which is {limits[key]}; "
                f"lower {key}, or raise {parse_limit(limit)[0]}"
            )


def lowered(config: Mapping[str, Any], user_keys: Iterable[str] = ()) -> dict[str, Any]:
    """Return settings with each value above its limit lowered to the limit, except for ``user_keys``."""
    return {**config, **{key: limit for key, limit in above_limit(config).items() if key not in user_keys}}


def experiment_path(name: str) -> Path:
    """Return the path of an experiment's YAML file, given a path or a name in ``papers/*/settings/``.

    Raises :class:`SettingsError` if the file does not exist.
    """
    experiments = {path.stem: path for path in sorted(PAPERS.glob("*/settings/*.yaml"))}
    typed = absolute(name)
    if is_file(typed):
        return typed
    if (stem := name.removesuffix(".yaml")) in experiments:
        return experiments[stem]
    if os.path.isdir(typed):  # noqa: PTH112 - false for impossible names, for which Path raises an error
        record = f"{name.rstrip('/')}/config.yaml"
        suggestion = f"{record}, which repeats that run" if is_file(absolute(record)) else f"dataset={name}"
        raise SettingsError(f"experiment = {quoted(name)}: it is a directory; did you mean {suggestion}?")
    if setting := setting_of(name):
        raise SettingsError(f"experiment = {name!r}: this file does not exist; did you mean {setting}={name}?")
    word = Path(name).stem
    if "/" in name and word not in experiments:  # a path, not a misspelt word
        raise SettingsError(f"experiment = {quoted(name)}: this file does not exist; Posy looked for {typed}")
    near = nearest(word, experiments) or nearest(word, (*METHODS, *DATASETS), 0.75)
    near = nearest(word, (near, *METHODS, *DATASETS))  # a method or data set instead of a file
    near = f"{setting}={near}" if (setting := setting_of(near)) else near
    hint = f"did you mean {near}?" if near else f"papers/ has only {', '.join(experiments)}"
    raise SettingsError(f"experiment = {quoted(name)}: this file does not exist; {hint}")


def setting_of(word: str) -> str:
    """Return which of ``method``, ``dataset`` and ``model`` accepts a word as its value, or an empty string."""
    for key, names in (("method", METHODS), ("dataset", (*DATASETS, SITES)), ("model", MODELS)):
        if word in names:
            return key
    return ""


def read_experiment(path: Path) -> dict[str, Any]:
    """Return the settings in a YAML file; for the ``config.yaml`` of a run, the settings that repeat the run."""
    content = read_yaml(path)
    if _is_record(content):
        if not isinstance(content["settings"], dict):
            raise SettingsError(f"settings in {path}: it must hold `key: value` lines")
        run_settings = settings_of(RunSettings)
        stored = current_keys(content["settings"])
        common = {**run_settings, **settings_of(DataSettings), **settings_of(TrainSettings)}
        earlier = {key: setting.earlier for key, setting in common.items() if setting.earlier is not None}
        settings = {**earlier, **stored}
        return {key: value for key, value in settings.items() if key not in run_settings or not run_settings[key].once}
    return content


def current_keys(stored: Mapping[str, Any]) -> dict[str, Any]:
    """Return a stored run's settings under the keys of this version; see :data:`RENAMED` and :data:`REMOVED`."""
    current = dict(stored)
    for old_key, (key, values) in RENAMED.items():
        if old_key in current and key not in current:
            current[key] = values[current[old_key]]
        current.pop(old_key, None)
    if current.get("loss") == "cross-entropy":  # the default of earlier versions
        current["loss"] = AUTO
    return {key: value for key, value in current.items() if key not in REMOVED}


def _is_record(content: Mapping[str, Any]) -> bool:
    """Return whether the content of a file is the ``config.yaml`` of a run."""
    return {"settings", "versions"} <= content.keys()


def _method(config: Mapping[str, Any]) -> str:
    return str(config.get("method", RunSettings.method))


def _own_method(config: Mapping[str, Any]) -> list[str]:
    """Return the custom method of settings, as a list of at most one name.

    The method may be in the settings, in their experiment file, or in the record of the run that they resume.
    """
    method = config.get("method")
    if method is None and (name := config.get("experiment")):
        method = read_experiment(experiment_path(str(name))).get("method")
    if method is None and (name := config.get("resume")):
        record = absolute(str(config.get("output-dir", RunSettings.output_dir))) / str(name) / "config.yaml"
        with suppress(SettingsError):  # the file is missing or damaged; its checkpoints contain the settings, too
            settings = read_yaml(record).get("settings")
            method = settings.get("method") if isinstance(settings, Mapping) else None
    return [method] if isinstance(method, str) and is_custom(method) else []


def _declarations(config: Mapping[str, Any]) -> dict[str, Setting]:
    """Return the declared settings, without importing the methods if all keys are shared settings."""
    common = declared([])
    return common if config.keys() <= common.keys() else declared_for(config)


def _checked(config: Mapping[str, Any], where: str) -> dict[str, Scalar]:
    values = checked(config, _declarations(config), where)
    check_method(_method(values), where)
    return values


def _built(values: Mapping[str, Scalar]) -> Settings:
    method = _method(values)
    method_settings = build(settings_class(method), values, key_prefix(method))
    shared = build(RunSettings, values), build(DataSettings, values), build(TrainSettings, values)
    return Settings(*shared, method_settings)
