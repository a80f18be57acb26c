"""Settings of local training that differ between clients: the setting ``client-settings``, and a node's own values.

A node's values are set in its node config. The run accepts values within the bounds of the setting ``client-bounds``.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from posy.paths import absolute
from posy.settings import Scalar, SettingsError, as_config, build, quoted, settings_of
from posy.strategies.run_settings import TrainSettings
from posy.yaml12 import parse, read_yaml

if TYPE_CHECKING:
    from posy.models.architecture import Architecture
    from posy.strategies.settings import Settings

KEYS = ("local-epochs", "local-steps", "batch-size", "lr")
"""The settings that can differ between clients."""
MOST_SOURCES = 5
"""Maximum number of clients that a warning names."""
NOT_SHARED = "not shared"
"""The report of a node that has its own settings, but whose policy does not allow the server to see them."""
NodeSettings = tuple[tuple[str, int | float], ...]
"""The settings of local training in a node config, as sorted pairs of key and value."""


def inlined(text: str) -> str:
    """Return the content of the file that the setting ``client-settings`` names, as one line of JSON.

    Parameters
    ----------
    text : str
        The path of a YAML or JSON file that maps clients to settings, or the JSON itself.

    Raises
    ------
    SettingsError
        If the file cannot be read, or contains an unknown setting or a value that is not allowed.
    """
    if not text:
        return ""
    content = text if text.lstrip().startswith("{") else json.dumps(read_yaml(absolute(text), (str, int)))
    return json.dumps(checked_entries(content), sort_keys=True, ensure_ascii=False)


def checked_entries(text: str) -> dict[str, dict[str, Scalar]]:
    """Return the settings of each client in the JSON of ``client-settings``.

    Raises
    ------
    SettingsError
        If the text is not a JSON object, or contains an unknown setting or a value that is not allowed.
    """
    try:
        content: Any = json.loads(text or "{}")
        if not isinstance(content, dict):
            raise ValueError("it is not an object")
    except (ValueError, RecursionError) as error:
        raise SettingsError(f"client-settings: not a JSON object ({error})") from error
    declarations = {key: settings_of(TrainSettings)[key] for key in KEYS}
    checked: dict[str, dict[str, Scalar]] = {}
    for client, entries in content.items():
        where = f"client-settings, client {client}"
        if not isinstance(entries, Mapping):
            raise SettingsError(f"client-settings: client {client} has {quoted(entries)}; allowed: `key: value` lines")
        if unknown := [key for key in entries if key not in KEYS]:
            raise SettingsError(f"{unknown[0]} in {where}: only {', '.join(KEYS)} can differ between clients")
        if entries.get("local-epochs") and entries.get("local-steps"):
            raise SettingsError(f"local-epochs in {where} has no effect with local-steps; remove one of the two")
        checked[str(client)] = {key: declarations[key].checked(key, value, where) for key, value in entries.items()}
    return checked


def train_settings(
    train: TrainSettings, client: int, name: str = "", node_settings: NodeSettings = ()
) -> TrainSettings:
    """Return a client's training settings.

    The settings of the client's node override an entry for the client's name in ``client-settings``, which overrides an
    entry for its number. An override of ``local-epochs`` alone also sets ``local-steps`` to 0.
    """
    return _train_settings(train, client, name, node_settings) if train.client_settings or node_settings else train


def all_train_settings(train: TrainSettings, node_settings: NodeSettings = ()) -> list[TrainSettings]:
    """Return all training settings that could apply to a node's client.

    These are the run's settings and each client's settings from ``client-settings``. The node's settings override both.
    """
    entries = json.loads(train.client_settings or "{}").values()
    return [
        build(TrainSettings, {**as_config(train), **layered(entry, dict(node_settings))}) for entry in ({}, *entries)
    ]


def layered(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """Merge settings; a later layer overrides earlier ones, and its ``local-epochs`` also sets ``local-steps`` to 0."""
    merged: dict[str, Any] = {}
    for layer in layers:
        merged |= {"local-steps": 0, **layer} if "local-epochs" in layer else layer
    return merged


@lru_cache(maxsize=4096)
def _train_settings(train: TrainSettings, client: int, name: str, node_settings: NodeSettings) -> TrainSettings:
    content = json.loads(train.client_settings or "{}")
    by_name = content.get(name, {}) if name else {}
    return build(
        TrainSettings, {**as_config(train), **layered(content.get(str(client), {}), by_name, dict(node_settings))}
    )


def method_notices(
    settings: "Settings", network: "Architecture", chosen: Mapping[str, NodeSettings] | None = None
) -> list[str]:
    """Return the method's warnings about the run's settings, and about the settings of single clients.

    Parameters
    ----------
    settings : Settings
        The settings of the run.
    network : Architecture
        The network that clients train.
    chosen : mapping of str to tuple, optional
        The settings of nodes, keyed by their source, such as ``node config of site-a``.
    """
    shared = list(settings.method.notices(settings, network))
    entries: dict[str, Mapping[str, Any]] = {
        f"client-settings, client {client}": entry
        for client, entry in json.loads(settings.train.client_settings or "{}").items()
    }
    entries |= {source: dict(node_settings) for source, node_settings in (chosen or {}).items()}
    sources: dict[str, list[str]] = {}
    for source, entry in entries.items():
        train = build(TrainSettings, {**as_config(settings.train), **layered(entry)})
        for notice in settings.method.notices(replace(settings, train=train), network):
            if notice not in shared:
                sources.setdefault(notice, []).append(source)
    return shared + [f"{'; '.join(shortened(where))}: {notice}" for notice, where in sources.items()]


def shortened(sources: Sequence[str]) -> list[str]:
    """Return the first sources, and the number of further ones."""
    further = len(sources) - MOST_SOURCES
    return [*sources[:MOST_SOURCES], *([f"{further} more"] if further > 0 else [])]


def check_clients(train: TrainSettings, num_clients: int, names: Sequence[str] | None = ()) -> None:
    """Raise :class:`SettingsError` if ``client-settings`` names a client that the run does not have.

    ``names`` is None if the clients' names are not known yet. The function then checks only the numbers.
    """
    names_and_numbers = {*map(str, range(num_clients)), *(names or ())}
    for client in json.loads(train.client_settings or "{}"):
        if client not in names_and_numbers and (names is not None or client.isdecimal()):
            hint = f" or {', '.join(names[:5])}{', …' * (len(names) > 5)}" if names else ""
            raise SettingsError(f"client-settings: client {client} does not exist; use 0 to {num_clients - 1}{hint}")
        # A numbered group has a name such as `group 10`, and client 1 may be group 10.
        numbered = [name for name in names or () if name.rpartition(" ")[2] == client]
        if client.isdecimal() and names and numbered and numbered[0] != (name := names[int(client)]):
            raise SettingsError(
                f"client-settings: client {client} is {name}, and client {names.index(numbered[0])} is {numbered[0]}; "
                f"write {name} or {numbered[0]}"
            )


# -- the settings of a node -------------------------------------------------------------------------------


class Bounds(NamedTuple):
    """The smallest and the largest value of a setting that a node may choose."""

    least: float
    most: float

    def __str__(self) -> str:
        return f"{self.least}..{self.most}"


@lru_cache(maxsize=64)
def bounds_of(text: str) -> Mapping[str, Bounds]:
    """Return the bounds in the setting ``client-bounds``, keyed by setting.

    Parameters
    ----------
    text : str
        Bounds such as ``local-epochs: 1..5, lr: 0.001..0.1``, or an empty string.

    Raises
    ------
    SettingsError
        If the text is malformed, repeats a setting or names one that is not in :data:`KEYS`, or if a bound is not an
        allowed value of its setting.
    """
    bounds: dict[str, Bounds] = {}
    for entry in text.split(",") if text.strip() else ():
        key, colon, interval = (part.strip() for part in entry.partition(":"))
        least, dots, most = interval.partition("..")
        if not (colon and dots):
            example = "local-epochs: 1..5, batch-size: 8..64"
            raise SettingsError(
                f"client-bounds = {quoted(text)}: {quoted(entry.strip())} is not `key: minimum..maximum`, as in "
                f"`{example}`"
            )
        if key not in KEYS or key in bounds:
            reason = "it is repeated" if key in bounds else f"nodes can choose only {', '.join(KEYS)}"
            raise SettingsError(f"client-bounds = {quoted(text)}: {quoted(key)}: {reason}")
        bounds[key] = Bounds(*(number(key, limit.strip(), "client-bounds") for limit in (least, most)))
        if bounds[key].least > bounds[key].most:
            raise SettingsError(
                f"client-bounds = {quoted(text)}: {key}: {bounds[key]}: the first bound exceeds the second; swap them"
            )
    return bounds


def number(key: str, text: str, where: str) -> int | float:
    """Return a value of a setting in :data:`KEYS`, given as text.

    If the setting does not allow the value, raise a :class:`SettingsError` that names ``where``, the value's source.
    """
    value: Any = text
    with suppress(ValueError):
        value = parse(text)
    checked_value: int | float = settings_of(TrainSettings)[key].checked(key, value, where)
    return checked_value


def check_allowed(node_settings: NodeSettings, client_bounds: str, *, shares_values: bool = True) -> None:
    """Raise :class:`SettingsError` unless a run allows the settings of a node.

    Parameters
    ----------
    node_settings : tuple
        The settings in the node config.
    client_bounds : str
        The run's setting ``client-bounds``.
    shares_values : bool
        Whether the error, which the server receives, may quote the node's value.
    """
    bounds = bounds_of(client_bounds)
    for key, value in node_settings:
        subject = f"{key} = {value} in the node config" if shares_values else f"{key} in the node config"
        if key not in bounds:
            allowed = f"lets nodes choose only {', '.join(bounds)}" if bounds else "does not let nodes choose settings"
            raise SettingsError(
                f"{subject}: this run {allowed} (client-bounds = {quoted(client_bounds)}); remove {key} from the node "
                "config, or add it to client-bounds"
            )
        if not bounds[key].least <= value <= bounds[key].most:
            raise SettingsError(
                f"{subject}: this run allows {bounds[key].least} to {bounds[key].most} (client-bounds); choose a value "
                f"in these bounds, or remove {key} from the node config"
            )


def report_of(node_settings: NodeSettings, *, shares_values: bool = True) -> str:
    """Return a node's report of its settings for the server, as JSON or :data:`NOT_SHARED`; empty without settings."""
    if not node_settings:
        return ""
    return json.dumps(dict(node_settings)) if shares_values else NOT_SHARED


def read_report(report: Any, client_bounds: str) -> str:
    """Return a node's report as text for the run's record, such as ``batch-size=16 local-epochs=2``.

    Raises
    ------
    SettingsError
        If the report is malformed, or the run does not allow the settings.
    """
    if report == "" or (report == NOT_SHARED and client_bounds):
        return str(report)
    try:
        content: Any = json.loads(report)
        pairs = sorted((key, number(key, str(value), "its report")) for key, value in content.items())
    except (TypeError, ValueError, LookupError, AttributeError, RecursionError) as error:
        raise SettingsError(f"its report of the settings in its node config is malformed: {error}") from error
    check_allowed(tuple(pairs), client_bounds)
    return " ".join(f"{key}={value}" for key, value in pairs)


def settings_in(report: str) -> NodeSettings:
    """Return the settings in the result of :func:`read_report`; empty if the node does not share them."""
    if report in ("", NOT_SHARED):
        return ()
    pairs = (pair.split("=") for pair in report.split())
    return tuple((key, number(key, value, "its report")) for key, value in pairs)
