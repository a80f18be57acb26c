"""Checks the signatures of apps, both in a node and in the worker that runs the app."""

import base64
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import load_ssh_public_key

from posy.deploy.tasks import Bundle
from posy.settings import SettingsError
from posy.yaml12 import read_yaml

OPTION = "--trusted-entities"
RULE = "trusted-entities"
"""Name of the rule in the audit log."""


class UntrustedAppError(PermissionError):
    """No trusted entity has signed a run's app."""

    rule = RULE


def read_entities(path: Path) -> dict[str, str]:
    """Return the public keys of the trusted entities in a YAML file, keyed by key id.

    Raises
    ------
    SettingsError
        If the file cannot be read, is empty, or contains a value that is not an Ed25519 key in OpenSSH format.
        With an empty file, Flower's node would run every app.
    """
    entities = read_yaml(path)
    if not entities:
        raise SettingsError(
            f"{path} ({OPTION}) does not name an entity; add a line `key id: ssh-ed25519 AAAA…` for each entity"
        )
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


def signers(bundle: Bundle, entities: Mapping[str, str]) -> list[str]:
    """Return the ids of the trusted keys that have signed an app."""
    return [name for name, key in entities.items() if _has_signed(bundle, name, key)]


def check_signatures(bundle: Bundle, entities: Mapping[str, str]) -> list[str]:
    """Check an app's hash and signatures, and return the ids of the trusted keys that have signed it.

    Raises
    ------
    UntrustedAppError
        If no trusted entity has signed the app, or the app's hash is wrong.
    """
    if hashlib.sha256(bundle.content).hexdigest() != bundle.hash:
        raise UntrustedAppError(f"the app of this run does not match its hash; {OPTION} rejects it")
    if not bundle.verifications.get("valid_license") or not (names := signers(bundle, entities)):
        raise UntrustedAppError(f"none of this node's trusted entities ({OPTION}) has signed the app of this run")
    return names


def _has_signed(bundle: Bundle, name: str, key: str) -> bool:
    """Return whether a key has signed an app: the time of signing (eight bytes), followed by the app's SHA-256."""
    try:
        verification = json.loads(bundle.verifications[name])
        signature = str(verification["signature"])
        signed = int(verification["signed_at"]).to_bytes(8) + hashlib.sha256(bundle.content).digest()
        public = load_ssh_public_key(key.encode())
        assert isinstance(public, Ed25519PublicKey)
        public.verify(base64.urlsafe_b64decode(signature + "=" * (-len(signature) % 4)), signed)
    except (InvalidSignature, ValueError, LookupError, TypeError, OverflowError, AttributeError):
        return False
    return True
