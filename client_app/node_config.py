"""The keys of a node's config, and the checks of the config before the node joins a run."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from posy.settings import NodeConfigError, nearest
from posy.strategies.registry import defaults

SIGNING, TRUSTED, AUDIT = "signing-key", "trusted-keys", "audit"
NODE_WORDS = (
    "data", "policy", "name", "state-dir", "models", "skip-unreadable", "partition-id", "num-partitions",
    SIGNING, TRUSTED, AUDIT,
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
            raise NodeConfigError(f"{word} = {value!r} in the node config: it must be a whole number >= {least}")
    for word, value in config.items():
        if NODE_NAME in str(value):
            raise NodeConfigError(
                f"{word} = {value!r} in the node config: {NODE_NAME} is the name of a node's key, but "
                "`posy supernode` has no --key for this node; write a name instead"
            )


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
