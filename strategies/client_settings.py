"""Settings of local training that differ between clients."""

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from posy.paths import absolute
from posy.settings import Scalar, SettingsError, as_config, build, quoted, settings_of
from posy.strategies.run_settings import TrainSettings
from posy.yaml12 import read_yaml

KEYS = ("local-epochs", "local-steps", "batch-size", "lr")
"""The settings that can differ between clients."""


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
        place = f"client-settings, client {client}"
        if not isinstance(entries, Mapping):
            raise SettingsError(f"client-settings: client {client} has {quoted(entries)}; allowed: `key: value` lines")
        if unknown := [key for key in entries if key not in KEYS]:
            raise SettingsError(f"{unknown[0]} in {place}: only {', '.join(KEYS)} can differ between clients")
        checked[str(client)] = {key: declarations[key].checked(key, value, place) for key, value in entries.items()}
    return checked


def train_settings(train: TrainSettings, client: int, name: str = "") -> TrainSettings:
    """Return a client's training settings; an entry for the client's name overrides an entry for its number."""
    return _train_settings(train, client, name) if train.client_settings else train


def all_train_settings(train: TrainSettings) -> list[TrainSettings]:
    """Return the run's settings of local training, and the settings of each client in ``client-settings``."""
    return [train, *(train_settings(train, -1, client) for client in json.loads(train.client_settings or "{}"))]


@lru_cache(maxsize=4096)
def _train_settings(train: TrainSettings, client: int, name: str) -> TrainSettings:
    content = json.loads(train.client_settings)
    entry = {**content.get(str(client), {}), **(content.get(name, {}) if name else {})}
    if "local-epochs" in entry and "local-steps" not in entry:
        entry["local-steps"] = 0
    return build(TrainSettings, {**as_config(train), **entry})


def check_clients(train: TrainSettings, num_clients: int, names: Sequence[str] = ()) -> None:
    """Raise :class:`SettingsError` if ``client-settings`` names a client that the run does not have."""
    names_and_numbers = {*map(str, range(num_clients)), *names}
    for client in json.loads(train.client_settings or "{}"):
        if client not in names_and_numbers:
            hint = f" or {', '.join(names[:5])}{', …' * (len(names) > 5)}" if names else ""
            raise SettingsError(f"client-settings: client {client} does not exist; use 0 to {num_clients - 1}{hint}")
