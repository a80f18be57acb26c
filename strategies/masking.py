"""The arithmetic of secure aggregation: fixed-point numbers modulo 2^32, masks, keys, and shares of secrets.

Every primitive comes from `cryptography` (X25519, HKDF, AES, ChaCha20-Poly1305) or PyCryptodome (Shamir's secret
sharing over GF(2^128)). This module does not use Flower's `flwr.common.secure_aggregation`. Flower draws masks from
NumPy's Mersenne Twister with 32-bit seeds, which is not cryptographically secure. Its masks never contain the
largest value below the modulus. Flower also rounds with NumPy's global generator, and it splits text-encoded keys into
shares.
"""

import hashlib
import secrets
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
from Crypto.Protocol.SecretSharing import Shamir
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

Words = npt.NDArray[np.uint32]
"""Numbers modulo 2^32."""
SECRET_BYTES, KEY_BYTES, NONCE_BYTES, TAG_BYTES = 16, 32, 12, 16
"""Lengths in bytes of a secret, a key, and the nonce and tag of a ciphertext."""
LIMBS, LIMB_BITS = 4, 16
"""Number of limbs in an integer below 2^64, and bits in each limb. Each 16-bit limb is sent as a 32-bit word, so that
sums over 65,536 clients do not overflow."""
MAX_CLIENTS = 2 ** (32 - LIMB_BITS)
"""Maximum number of clients in a round."""
ONE = 2**30
"""The word that encodes the maximum change of a parameter, ``secure-range``. Sums over clients stay within ±2^30."""


class MaskingError(ValueError):
    """An unusable message from another party."""


class OutOfRangeError(ArithmeticError):
    """An update or score that cannot be encoded as words of a masked sum."""


# -- numbers ----------------------------------------------------------------------------------------------


def encoded(changed: Sequence[npt.NDArray[np.float64]], share: float, limit: float) -> Words:
    """Encode a client's update as words for the masked sum, followed by a word for the client's share of the weights.

    A change Δ becomes round(Δ · share · 2^30 / limit). The shares of all clients sum to at most 1, so the sum stays
    within the modulus. Rounding to the nearest integer is deterministic, so runs are reproducible. It changes the sum
    over M clients by at most M/2.

    Raises
    ------
    OutOfRangeError
        If a change is NaN, infinite or beyond the limit. Clipping would hide the problem.
    """
    flat = np.concatenate([np.zeros(0), *(change.ravel() for change in changed)])
    if not np.isfinite(flat).all():
        raise OutOfRangeError("NaN or Inf in the update")
    if flat.size and np.abs(flat).max() > limit:
        raise OutOfRangeError(f"a parameter has changed by more than secure-range = {limit:g}")
    return np.append(np.rint(flat * (share * ONE / limit)), _share_word(share)).astype(np.int64).astype(np.uint32)


def decoded(total: Words, shares: Sequence[float], limit: float) -> npt.NDArray[np.float64]:
    """Decode the sum of the clients' words into their weighted mean change, given their shares of the weights.

    Raises
    ------
    MaskingError
        If the masks do not cancel, so that the last word is not the sum of the shares, or if a mean exceeds the limit
        because a client has sent a larger change.
    """
    if int(total[-1]) != sum(map(_share_word, shares)) % 2**32:
        raise MaskingError("the masks do not cancel")
    changed = total[:-1].view(np.int32).astype(np.float64)
    largest = sum(map(_share_word, shares)) + len(shares)  # rounding adds less than 1 per client
    if changed.size and np.abs(changed).max() > largest:
        raise MaskingError(f"a client has changed a parameter by more than secure-range = {limit:g}")
    return changed * (limit / ONE / sum(shares))


def encoded_numbers(numbers: Sequence[int]) -> Words:
    """Encode n non-negative integers as words ``(4 n,)``, which can be summed over clients exactly.

    Raises
    ------
    OutOfRangeError
        If a number is negative or at least 2^64.
    """
    if not all(0 <= number < 1 << (LIMBS * LIMB_BITS) for number in numbers):
        raise OutOfRangeError("a score is too large to encode; the model has diverged")
    limbs = [number >> (LIMB_BITS * limb) & (2**LIMB_BITS - 1) for number in numbers for limb in range(LIMBS)]
    return np.array(limbs, np.uint32)


def decoded_numbers(total: Words) -> list[int]:
    """Decode the clients' summed words from :func:`encoded_numbers` into the sums of the integers."""
    rows = total.reshape(-1, LIMBS).tolist()
    return [sum(word << (LIMB_BITS * limb) for limb, word in enumerate(row)) for row in rows]


def error_bound(shares: Sequence[float], limit: float) -> float:
    """Return the maximum rounding error of a parameter in the clients' weighted mean."""
    return len(shares) / 2 * limit / ONE / sum(shares)


def digest(*parts: str | bytes | npt.NDArray[np.generic]) -> bytes:
    """Return a SHA-256 digest of strings, bytes and arrays."""
    hasher = hashlib.sha256()
    for part in parts:
        encoded_part = part.encode() if isinstance(part, str) else part
        content = encoded_part if isinstance(encoded_part, bytes) else np.ascontiguousarray(encoded_part).tobytes()
        hasher.update(len(content).to_bytes(8, "little") + content)
    return hasher.digest()


def _share_word(share: float) -> int:
    return round(share * ONE)


# -- masks ------------------------------------------------------------------------------------------------


def stream(key: bytes, count: int) -> Words:
    """Return a key's mask: ``count`` pseudorandom words from the AES-256-CTR keystream.

    Each key is used for only one mask, so the counter can always start at 0.
    """
    encryptor = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()
    return np.frombuffer(encryptor.update(bytes(4 * count)), "<u4").astype(np.uint32, copy=False)


def own_mask(secret: bytes, context: bytes, count: int) -> Words:
    """Return the mask derived from a client's own secret."""
    return stream(_derived(secret, b"own mask", context), count)


def pair_mask(private: X25519PrivateKey, public: bytes, client: int, other: int, context: bytes, count: int) -> Words:
    """Return the mask that ``client`` adds; ``other`` adds the negative, so that the two cancel in the sum.

    The mask depends on both clients' indices and public keys. X25519 accepts several encodings of the same key. Without
    the public keys in the derivation, a client could send another client's key as its own. A third client's masks for
    the two could then cancel.
    """
    ends = sorted([(client, public_key(private)), (other, public)])
    parties = b"".join(index.to_bytes(4, "little") + key for index, key in ends)
    mask = stream(_agreed(private, public, b"pair mask", parties + context), count)
    return mask if client < other else np.negative(mask)


# -- keys -------------------------------------------------------------------------------------------------


def new_secret(size: int = SECRET_BYTES) -> bytes:
    """Return a secret of ``size`` bytes from the operating system's random source."""
    return secrets.token_bytes(size)


def private_key(secret: bytes) -> X25519PrivateKey:
    """Derive a private key from a secret."""
    return X25519PrivateKey.from_private_bytes(_derived(secret, b"private key", b""))


def public_key(private: X25519PrivateKey) -> bytes:
    """Return the public key that belongs to a private key."""
    return private.public_key().public_bytes_raw()


def check_public(public: bytes) -> None:
    """Raise :class:`MaskingError` for a public key that cannot be used for key agreement."""
    _agreed(X25519PrivateKey.generate(), public, b"nothing", b"")


def sealed(plain: bytes, private: X25519PrivateKey, public: bytes, source: int, target: int, context: bytes) -> bytes:
    """Encrypt a message from one client to another, so that the server cannot read, change or redirect it."""
    nonce = secrets.token_bytes(NONCE_BYTES)
    key = _agreed(private, public, b"share", _direction(source, target) + context)
    return nonce + ChaCha20Poly1305(key).encrypt(nonce, plain, None)


def opened(content: bytes, private: X25519PrivateKey, public: bytes, source: int, target: int, context: bytes) -> bytes:
    """Decrypt a message from :func:`sealed`; raise :class:`MaskingError` if it is not authentic."""
    key = _agreed(private, public, b"share", _direction(source, target) + context)
    try:
        return ChaCha20Poly1305(key).decrypt(content[:NONCE_BYTES], content[NONCE_BYTES:], None)
    except (InvalidTag, ValueError) as error:
        raise MaskingError(f"the message from client {source} to client {target} cannot be decrypted") from error


def _direction(source: int, target: int) -> bytes:
    return source.to_bytes(8, "little") + target.to_bytes(8, "little")


def _agreed(private: X25519PrivateKey, public: bytes, purpose: bytes, context: bytes) -> bytes:
    try:
        shared = private.exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError as error:
        raise MaskingError("a public key is not valid for key agreement") from error
    return _derived(shared, purpose, context)


def _derived(secret: bytes, purpose: bytes, context: bytes) -> bytes:
    info = b"posy secure aggregation, " + purpose + b": " + context
    return HKDF(algorithm=hashes.SHA256(), length=KEY_BYTES, salt=None, info=info).derive(secret)


# -- shares of a secret -----------------------------------------------------------------------------------


def split(secret: bytes, threshold: int, count: int) -> list[bytes]:
    """Split a secret into ``count`` shares; fewer than ``threshold`` shares reveal nothing about the secret."""
    return [share for _, share in Shamir.split(threshold, count, secret, ssss=False)]


def combined(shares: Mapping[int, bytes], threshold: int) -> bytes:
    """Recover a secret from at least ``threshold`` shares, keyed by position in the list from :func:`split`."""
    if len(shares) < threshold or any(len(share) != SECRET_BYTES for share in shares.values()):
        raise MaskingError(f"{len(shares)} shares of a secret are available, but {threshold} are needed")
    return Shamir.combine([(index + 1, share) for index, share in sorted(shares.items())[:threshold]], ssss=False)
