"""Signatures of the sites on their keys of a round, so that the server cannot pose as a site.

A site sets two keys in its node config. ``signing-key`` is its private key, for example its node's key.
``trusted-keys`` is a directory with the public keys (``*.pub``) of all sites, as `posy certificates` creates them.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ec import ECDSA, EllipticCurvePrivateKey, EllipticCurvePublicKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_ssh_private_key,
    load_ssh_public_key,
)

from posy.client_app.node_config import SIGNING, TRUSTED
from posy.paths import absolute
from posy.settings import NodeConfigError

_PURPOSE = b"posy secure aggregation, keys of "


class UnknownSignerError(ValueError):
    """No trusted site has signed the keys."""


class Signatures:
    """Signs texts for a site, and checks the signatures of other sites."""

    def __init__(self, key: Path, trusted: Path) -> None:
        try:
            private = load_ssh_private_key(key.read_bytes(), None)
            public = {path.name: load_ssh_public_key(path.read_bytes()) for path in sorted(trusted.glob("*.pub"))}
        except (OSError, ValueError, TypeError, UnsupportedAlgorithm) as error:
            raise NodeConfigError(f"{SIGNING} or {TRUSTED} in the node config cannot be used: {error}") from error
        wrong = [name for name, loaded in public.items() if not isinstance(loaded, EllipticCurvePublicKey)]
        if not isinstance(private, EllipticCurvePrivateKey) or wrong or not public:
            raise NodeConfigError(
                f"{SIGNING} = {str(key)!r} must be a private key and {TRUSTED} = {str(trusted)!r} a directory with "
                "public ones (*.pub), as `posy certificates` makes them"
            )
        self._private = private
        keys = [loaded for loaded in public.values() if isinstance(loaded, EllipticCurvePublicKey)]
        self._trusted = {_name(trusted_key): trusted_key for trusted_key in keys}
        self.own = _name(private.public_key())
        if self.own not in self._trusted:
            raise NodeConfigError(f"{TRUSTED} = {str(trusted)!r} lacks the public half of {SIGNING} = {str(key)!r}")

    def sign(self, text: bytes) -> list[bytes]:
        """Return a signature and the public key that verifies it."""
        return [self._private.sign(_PURPOSE + text, ECDSA(SHA256())), self.own]

    def check(self, text: bytes, signature: bytes, signer: bytes) -> None:
        """Raise :class:`UnknownSignerError` unless a trusted site has signed a text."""
        if signer not in self._trusted:
            raise UnknownSignerError("not signed by a site whose key is trusted here")
        try:
            self._trusted[signer].verify(signature, _PURPOSE + text, ECDSA(SHA256()))
        except InvalidSignature as error:
            raise UnknownSignerError("the signature is wrong") from error


def signatures_of(node_config: Mapping[str, Any]) -> Signatures | None:
    """Return the signing and trusted keys of a node, or None if its config has neither."""
    key, trusted = (str(node_config.get(name, "")) for name in (SIGNING, TRUSTED))
    if not key and not trusted:
        return None
    if not key or not trusted:
        raise NodeConfigError(f"the node config has only one of {SIGNING} and {TRUSTED}; set both or neither")
    return Signatures(absolute(key), absolute(trusted))


def _name(public: EllipticCurvePublicKey) -> bytes:
    return public.public_bytes(Encoding.X962, PublicFormat.CompressedPoint)
