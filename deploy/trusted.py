"""Apps that a node runs only with a signature: the check of Flower's node, repeated by the worker that runs the app."""

import hashlib
from collections.abc import Mapping
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import load_ssh_public_key
from flwr.supercore.fab import Fab

from posy.settings import SettingsError
from posy.yaml12 import read_yaml

OPTION = "--trusted-entities"
RULE = "trusted-entities"
"""Name of the rule in the audit log."""


class UntrustedAppError(PermissionError):
    """No trusted entity has signed the app of a run."""

    rule = RULE


def read_entities(path: Path) -> dict[str, str]:
    """Return the public keys of the trusted entities in a YAML file, by the id of each key.

    Raises
    ------
    SettingsError
        If the file cannot be read, names no entity, or contains another text than an Ed25519 key of OpenSSH. With an
        empty file, Flower's node would run every app.
    """
    entities = read_yaml(path)
    if not entities:
        raise SettingsError(f"{path} ({OPTION}) names no entity; add a line `key id: ssh-ed25519 AAAA…` for each")
    for name, text in entities.items():
        try:
            key = load_ssh_public_key(str(text).encode())
        except (ValueError, UnsupportedAlgorithm):
            key = None
        if not isinstance(key, Ed25519PublicKey):
            raise SettingsError(
                f"{path} ({OPTION}): {name} must be a public key as `ssh-keygen -t ed25519` writes it, such as "
                "`ssh-ed25519 AAAA…`"
            )
    return {name: str(text) for name, text in entities.items()}


def signers(fab: Fab, entities: Mapping[str, str]) -> list[str]:
    """Return the ids of the trusted keys that have signed an app, with the function of Flower's node."""
    from flwr.supernode.start_client_internal import _verify_fab  # noqa: PLC0415 - a second to import

    names = []
    for name, key in entities.items():
        try:
            if name in fab.verifications and _verify_fab(_with_one_signature(fab, name), {name: key}):
                names.append(name)
        except (ValueError, LookupError, TypeError, OverflowError, AttributeError):  # not what Flower writes
            continue
    return names


def check_signatures(fab: Fab, entities: Mapping[str, str]) -> list[str]:
    """Return the ids of the trusted keys that have signed an app.

    Raises
    ------
    UntrustedAppError
        If none has signed it, or its hash is wrong.
    """
    if hashlib.sha256(fab.content).hexdigest() != fab.hash_str:
        raise UntrustedAppError(f"the app of this run is not the one that its hash names; {OPTION} refuses it")
    if not fab.verifications.get("valid_license") or not (names := signers(fab, entities)):
        raise UntrustedAppError(f"no trusted entity of this node ({OPTION}) has signed the app of this run")
    return names


def _with_one_signature(fab: Fab, name: str) -> Fab:
    """Return an app with a single signature: a malformed signature of another key would raise an error."""
    return Fab(fab.hash_str, fab.content, {name: fab.verifications[name]})
