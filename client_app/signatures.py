"""The clients' signatures on their keys for a round, and on the list of survivors.

A site has two entries in its node config. ``signing-key`` is the file that contains the site's private key, for example
the node's key. ``trusted-keys`` is a directory with the public keys (``*.pub``) of all sites, as `posy certificates`
creates them. The server cannot impersonate such a site. A client without these entries signs with a key that it
generates for the round. The protocol is the same, but the signatures then protect the client only if the server follows
the protocol.
"""

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ec import (
    ECDSA,
    SECP256R1,
    SECP384R1,
    SECP521R1,
    EllipticCurvePrivateKey,
    EllipticCurvePublicKey,
)
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
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
from posy.strategies.secure_aggregation import ROUND_KEY_BYTES

KEYS_OF, SURVIVORS_OF = b"posy secure aggregation, keys of ", b"posy secure aggregation, survivors of "
"""Prefixes of signed texts. Each prefix states the purpose of the signature."""
_CURVES = {1 + (curve.key_size + 7) // 8: curve for curve in (SECP256R1(), SECP384R1(), SECP521R1())}
"""The curves, keyed by the number of bytes in a compressed point."""


class UnknownSignerError(ValueError):
    """No trusted site has signed the text."""


class Signatures(Protocol):
    """Signs texts for a client, and checks the signatures of other clients."""

    colluders: bool
    """Whether the client tolerates a server that colludes with other clients."""

    @property
    def verifying_key(self) -> bytes:
        """The public key that verifies the client's signatures."""

    def sign(self, text: bytes) -> list[bytes]:
        """Return a signature and the public key that verifies it."""

    def check(self, text: bytes, signature: bytes, signer: bytes) -> None:
        """Raise :class:`UnknownSignerError` unless ``signer`` has signed a text and the client accepts this signer."""


class SiteSignatures:
    """Signs with a site's key, and accepts the signatures of trusted sites."""

    colluders = True

    def __init__(self, key: Path, trusted: Path) -> None:
        try:
            private = load_ssh_private_key(key.read_bytes(), None)
            public = {path.name: load_ssh_public_key(path.read_bytes()) for path in sorted(trusted.glob("*.pub"))}
        except (OSError, ValueError, TypeError, UnsupportedAlgorithm) as error:
            raise NodeConfigError(f"{SIGNING} or {TRUSTED} in the node config cannot be used: {error}") from error
        wrong_files = [name for name, loaded in public.items() if not isinstance(loaded, EllipticCurvePublicKey)]
        if not isinstance(private, EllipticCurvePrivateKey) or wrong_files or not public:
            raise NodeConfigError(
                f"{SIGNING} = {str(key)!r} must be a private key and {TRUSTED} = {str(trusted)!r} must be a "
                f"directory with public keys (*.pub), as `posy certificates` creates them"
            )
        self._private = private
        keys = [loaded for loaded in public.values() if isinstance(loaded, EllipticCurvePublicKey)]
        self._trusted = {_name(trusted_key): trusted_key for trusted_key in keys}
        self.verifying_key = _name(private.public_key())
        if self.verifying_key not in self._trusted:
            raise NodeConfigError(f"{TRUSTED} = {str(trusted)!r} lacks the public half of {SIGNING} = {str(key)!r}")

    @property
    def trusted(self) -> int:
        """Number of trusted sites, including this site."""
        return len(self._trusted)

    def sign(self, text: bytes) -> list[bytes]:
        """Return a signature and the public key that verifies it."""
        return [self._private.sign(text, ECDSA(SHA256())), self.verifying_key]

    def check(self, text: bytes, signature: bytes, signer: bytes) -> None:
        """Raise :class:`UnknownSignerError` unless a trusted site has signed a text."""
        if signer not in self._trusted:
            raise UnknownSignerError("not signed by a site with a trusted key")
        try:
            self._trusted[signer].verify(signature, text, ECDSA(SHA256()))
        except InvalidSignature as error:
            raise UnknownSignerError("the signature is wrong") from error


class RoundSignatures:
    """Signs with a key generated for one round, and accepts any key, even one from the server.

    Parameters
    ----------
    secret : bytes
        The secret of the round's key, 32 bytes.
    """

    colluders = False

    def __init__(self, secret: bytes) -> None:
        self._private = Ed25519PrivateKey.from_private_bytes(secret)
        self.verifying_key = self._private.public_key().public_bytes_raw()

    def sign(self, text: bytes) -> list[bytes]:
        """Return a signature and the public key that verifies it."""
        return [self._private.sign(text), self.verifying_key]

    def check(self, text: bytes, signature: bytes, signer: bytes) -> None:
        """Raise :class:`UnknownSignerError` unless ``signer`` has signed a text. Any signer is accepted."""
        try:
            if len(signer) == ROUND_KEY_BYTES:
                Ed25519PublicKey.from_public_bytes(signer).verify(signature, text)
            else:
                key = EllipticCurvePublicKey.from_encoded_point(_CURVES[len(signer)], signer)
                key.verify(signature, text, ECDSA(SHA256()))
        except (InvalidSignature, KeyError, ValueError) as error:
            raise UnknownSignerError("the signature is wrong") from error


def signatures_of(node_config: Mapping[str, Any]) -> SiteSignatures | None:
    """Return the signing and trusted keys of a node, or None if its config has neither."""
    key, trusted = (str(node_config.get(name, "")) for name in (SIGNING, TRUSTED))
    if not key and not trusted:
        return None
    if not key or not trusted:
        raise NodeConfigError(f"the node config has only one of {SIGNING} and {TRUSTED}; set both or neither")
    return _read(absolute(key), absolute(trusted), _versions(absolute(key), absolute(trusted)))


@lru_cache(maxsize=8)
def _read(key: Path, trusted: Path, versions: object) -> SiteSignatures:
    """Load the keys from files. The versions of the files are part of the cache key."""
    return SiteSignatures(key, trusted)


def _versions(key: Path, trusted: Path) -> tuple[object, ...]:
    """Return the versions of the key files. A version changes if its file is rewritten or replaced."""
    try:
        stats = [(path, path.stat()) for path in (key, *sorted(trusted.glob("*.pub")))]
    except OSError:
        return (object(),)  # a new version: SiteSignatures then reads the files and reports the error
    return tuple((path, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns) for path, stat in stats)


def _name(public: EllipticCurvePublicKey) -> bytes:
    return public.public_bytes(Encoding.X962, PublicFormat.CompressedPoint)
