"""The keys of a node's config, and the checks of the config before the node joins a run."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from posy.settings import NodeConfigError, SettingsError, nearest
from posy.strategies.client_settings import KEYS, NodeSettings, number
from posy.strategies.registry import defaults

SIGNING, TRUSTED, AUDIT = "signing-key", "trusted-keys", "audit"
NODE_WORDS = (
    "data", "policy", "name", "state-dir", "models", "skip-unreadable", "partition-id", "num-partitions",
    SIGNING, TRUSTED, AUDIT, *KEYS,
)  # fmt: skip
"""The keys that a node reads from its config."""
AUDIT_NAME = "audit.jsonl"
"""Default name of the audit log in a node's ``state-dir``. The key ``audit`` can name another file."""
NODE_NAME = "{name}"
"""The placeholder for the name of a node's key."""
LEAST = {"partition-id": 0, "num-partitions": 1}
"""The minimum values of the numeric keys."""


def check_node_config(config: Mapping[str, Any]) -> None:
    """Check the keys of a node's config, and the values that do not depend on a run.

    Parameters
    ----------
    config : Mapping
        Values, keyed by name: strings from the command line, or values that Flower has parsed.

    Raises
    ------
    NodeConfigError
        If the config has a key that nodes do not read, or a value that is not allowed.
    """
    check_words(config)
    for word, least in LEAST.items():
        value = str(config.get(word, least))
        if not re.fullmatch(r"[0-9]+", value) or int(value) < least:
            allowed = f"a whole number of at least {least}"
            raise NodeConfigError(f"{word} = {value!r} in the node config: it must be {allowed}")
    for word, value in config.items():
        if NODE_NAME in str(value):
            raise NodeConfigError(
                f"{word} = {value!r} in the node config: {NODE_NAME} is the name of a node's key, but "
                "`posy supernode` has no --key for this node; write a name instead"
            )
    node_settings(config)


def node_settings(config: Mapping[str, Any]) -> NodeSettings:
    """Return the settings of local training in a node config.

    Raises
    ------
    NodeConfigError
        If a value is not allowed, or ``local-steps`` makes ``local-epochs`` ineffective.
    """
    try:
        chosen = {key: number(key, str(config[key]), "the node config") for key in sorted(KEYS) if key in config}
    except SettingsError as error:
        raise NodeConfigError(str(error)) from error
    if chosen.get("local-steps") and "local-epochs" in chosen:
        raise NodeConfigError(
            f"local-epochs = {chosen['local-epochs']} in the node config has no effect with local-steps = "
            f"{chosen['local-steps']}; remove one of the two keys"
        )
    return tuple(chosen.items())


def check_words(words: Iterable[str]) -> None:
    """Raise :class:`NodeConfigError` for the first key that a node does not read, and suggest a similar key."""
    for word in words:
        if word in NODE_WORDS:
            continue
        if suggestion := nearest(word, NODE_WORDS):
            hint = f"did you mean {suggestion}?"
        elif word.replace("_", "-") in defaults():
            hint = "it is a setting for `posy run`"
        else:
            hint = f"a node reads {', '.join(NODE_WORDS)}"
        raise NodeConfigError(f"{word} in the node config: a node does not read this key; {hint}")
