"""Secure aggregation on a client: it sends its update under masks, and reveals shares of secrets once.

The server relays all keys and shares and chooses the clients. This module checks everything that protects the client:

- Keys and secrets belong to one round. Each round has new ones.
- A round begins once. Under the masks of a round the client sends one update, and only repeats it afterwards.
- For each neighbour the client reveals the share of its self-mask or the share of its private key, never both. It
  reveals them only if enough neighbours have sent their updates: the threshold that the server named before, which is
  more than half of them.
- The masks of clients that received different models, settings or weights do not cancel.

Between the messages of a round the secrets are in the node's Flower context, in the SuperNode's memory and in no file.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from flwr.app import ConfigRecord, Context, Message
from flwr.common.typing import NDArrays

from posy.client_app.signatures import UnknownSignerError, signatures_of
from posy.flower import record_in
from posy.strategies.masking import (
    SECRET_BYTES,
    Words,
    digest,
    encoded,
    new_secret,
    opened,
    own_mask,
    pair_mask,
    private_key,
    public_key,
    sealed,
    split,
)
from posy.strategies.replies import changes
from posy.strategies.secure_aggregation import KEY_TEXTS, KEYS, REFUSAL, SHARES, UNMASK, context_of

UNSIGNED = (b"", b"")


class ProtocolError(RuntimeError):
    """A request that would reveal more than the sum, or that needs secrets which the client has deleted."""


@dataclass
class Session:
    """State of a client in one round. Its neighbours, itself included, are the clients that may receive shares."""

    name: str
    mask_secret: bytes = b""
    """Secret of the private key for the masks with other clients; the neighbours receive its shares."""
    seal_secret: bytes = b""
    """Secret of the private key that encrypts shares."""
    own_secret: bytes = b""
    """Secret of the client's self-mask; the neighbours receive its shares too."""
    roster: list[int] = field(default_factory=list)
    public: list[bytes] = field(default_factory=list)
    """The neighbours, and two public keys of each: for masks and for encryption."""
    threshold: int = 0
    sealed: list[bytes] = field(default_factory=list)
    """The encrypted shares for the other neighbours, as they were sent."""
    own_share: bytes = b""
    """The client's share of its secrets."""
    peers: list[int] = field(default_factory=list)
    shares: list[bytes] = field(default_factory=list)
    """The neighbours that have sent shares, and two shares of each: of its self-mask, and of its private key."""
    masked: bytes = b""
    """Digest of the masked update that the client has sent."""
    survivors: list[int] = field(default_factory=list)
    """The neighbours whose self-masks the client has revealed; later requests receive the same answer."""

    @classmethod
    def new(cls, name: str) -> Self:
        """Return the session of a new round, with new secrets."""
        return cls(name, new_secret(), new_secret(), new_secret())

    @property
    def masks(self) -> X25519PrivateKey:
        """The private key for the masks with other clients."""
        return private_key(self.mask_secret)

    @property
    def seals(self) -> X25519PrivateKey:
        """The private key that encrypts shares."""
        return private_key(self.seal_secret)

    def public_of(self, client: int) -> list[bytes]:
        """Return the public keys of a neighbour."""
        start = 2 * self.roster.index(client)
        return self.public[start : start + 2]


class Secrets:
    """The sessions of a client, stored in the context of its node."""

    def __init__(self, client: int, context: Context, run: int) -> None:
        self.client = client
        self.signatures = signatures_of(context.node_config)
        self._records = context.state
        self._key = f"secure-aggregation-{client}"
        self._run = run

    def load(self, name: str) -> Session:
        """Return the session of a round; :class:`ProtocolError` if it is not the client's latest."""
        session = self.latest()
        if session is None or session.name != name:
            raise ProtocolError(f"secure aggregation: round {name} was not begun here, or its secrets are deleted")
        return session

    def latest(self) -> Session | None:
        """Return the latest session, or None before the first round."""
        record = self._records.config_records.get(self._key)
        return None if record is None else Session(**record)  # type: ignore[arg-type]

    def save(self, session: Session) -> None:
        """Store a session; it replaces all earlier ones."""
        self._records[self._key] = ConfigRecord(vars(session).copy())

    def context_of(self, session: Session) -> bytes:
        """Return the text that binds encrypted shares and signed keys to a round."""
        return f"{self._run}/{session.name}".encode()

    def signed(self, session: Session, client: int, keys: Sequence[bytes]) -> bytes:
        """Return the text that a client signs: the round, its index and its public keys."""
        return b" ".join((self.context_of(session), str(client).encode(), *keys))


def answer(message: Message, context: Context) -> list[bytes]:
    """Return a client's answer in a stage of a round other than its training."""
    config: Mapping[str, Any] = record_in(message.content, "config", ConfigRecord)
    client_secrets = Secrets(int(config["client"]), context, message.metadata.run_id)
    name = str(config["secure-round"])
    stage = config["secure-stage"]
    if stage == KEYS:
        return _keys(client_secrets, name)
    if stage == SHARES:
        texts = config["public-keys"]
        rows = zip(config["roster"], *(texts[column::KEY_TEXTS] for column in range(KEY_TEXTS)), strict=True)
        keys = {int(client): key_texts for client, *key_texts in rows}
        return _shares(client_secrets, client_secrets.load(name), keys, int(config["threshold"]))
    if stage == UNMASK:
        return _unmask(client_secrets, client_secrets.load(name), [int(client) for client in config["survivors"]])
    raise ProtocolError(f"secure aggregation: the stage {stage!r} does not exist")


def _keys(client_secrets: Secrets, name: str) -> list[bytes]:
    """Begin a round, unless it has begun; return two public keys, their signature and the signer's public key."""
    session = client_secrets.latest()
    if session is None or _order(session.name) < _order(name):
        session = Session.new(name)
        client_secrets.save(session)
    if session.name != name or not session.mask_secret:
        raise ProtocolError(f"secure aggregation: round {name} is over")
    keys = [public_key(session.masks), public_key(session.seals)]
    signatures = client_secrets.signatures
    signed = signatures.sign(client_secrets.signed(session, client_secrets.client, keys)) if signatures else UNSIGNED
    return [*keys, *signed]


def _shares(
    client_secrets: Secrets, session: Session, neighbour_keys: dict[int, list[bytes]], threshold: int
) -> list[bytes]:
    """Return an encrypted share of the secrets for each other neighbour, or a refusal of some neighbours' keys.

    A refusal contains no shares. The server may repeat the request without the neighbours in the refusal.
    """
    if refused := _refused(client_secrets, session, neighbour_keys):
        return [REFUSAL, *(f"{client} {reason}".encode() for client, reason in refused.items())]
    public = {client: texts[:2] for client, texts in neighbour_keys.items()}
    keys = [key for pair in public.values() for key in pair]
    if session.sealed:
        if (session.roster, session.public, session.threshold) != (list(public), keys, threshold):
            raise ProtocolError("secure aggregation: the client has shared its secrets with other keys before")
        return session.sealed
    if not session.mask_secret or public.get(client_secrets.client) != [
        public_key(session.masks),
        public_key(session.seals),
    ]:
        raise ProtocolError("secure aggregation: these are not this client's keys")
    if len(set(keys)) != len(keys):
        raise ProtocolError("secure aggregation: two public keys are the same")
    if not (2 <= threshold <= len(public) < 2 * threshold):
        raise ProtocolError(
            f"secure aggregation: {threshold} of {len(public)} clients is not a safe threshold; it must be above half"
        )
    parts = zip(
        public,
        split(session.own_secret, threshold, len(public)),
        split(session.mask_secret, threshold, len(public)),
        strict=True,
    )
    shares = {client: self_share + mask_share for client, self_share, mask_share in parts}
    session.roster, session.public, session.threshold = list(public), keys, threshold
    client = client_secrets.client
    session.own_share = shares.pop(client)
    context = client_secrets.context_of(session)
    session.sealed = [
        sealed(share, session.seals, public[other][1], client, other, context) for other, share in shares.items()
    ]
    client_secrets.save(session)
    return session.sealed


def _refused(client_secrets: Secrets, session: Session, neighbour_keys: dict[int, list[bytes]]) -> dict[int, str]:
    """Return the neighbours whose keys this site refuses, with the reasons; none if the site has no signing key.

    The site refuses keys that no trusted site has signed, and the keys of two clients with one signer.
    """
    signatures = client_secrets.signatures
    if signatures is None:
        return {}
    refused, signers = {}, {client_secrets.client: signatures.own}
    for client, (*keys, signature, signer) in neighbour_keys.items():
        if client == client_secrets.client:
            continue
        try:
            signatures.check(client_secrets.signed(session, client, keys), signature, signer)
            signers[client] = signer
        except UnknownSignerError as error:
            refused[client] = str(error)
    counts = Counter(signers.values())
    double = [client for client, signer in signers.items() if counts[signer] > 1 and client != client_secrets.client]
    return refused | dict.fromkeys(double, "one site has signed the keys of two clients")


def _unmask(client_secrets: Secrets, session: Session, survivors: list[int]) -> list[bytes]:
    """Return the share of the self-mask of each peer that has sent its update, and of the private key of each other."""
    if session.survivors:
        if session.survivors != survivors:
            raise ProtocolError("secure aggregation: the client has revealed shares for other clients before")
        return session.shares
    if not session.masked:
        raise ProtocolError("secure aggregation: this client has not sent its update")
    client = client_secrets.client
    if not {client} <= set(survivors) <= set(session.peers) or len(set(survivors)) < session.threshold:
        raise ProtocolError(
            f"secure aggregation: {len(survivors)} clients have sent their updates, {session.threshold} of the "
            "neighbours are needed"
        )
    revealed = [
        shares[:SECRET_BYTES] if peer in survivors else shares[SECRET_BYTES:]
        for peer, shares in zip(session.peers, session.shares, strict=True)
    ]
    client_secrets.save(Session(session.name, survivors=survivors, shares=revealed))  # deletes all secrets
    return revealed


class Masking:
    """The masks of one training: created from its message, and added to the update after the training."""

    def __init__(self, config: dict[str, Any], message: Message, context: Context) -> None:
        """Remove the entries of secure aggregation from a message's config, and open the shares in them."""
        if "secure-round" not in config:
            raise ProtocolError("secure aggregation: the server asks for an update without masks")
        self._secrets = Secrets(int(config["client"]), context, message.metadata.run_id)
        session = self._secrets.load(str(config.pop("secure-round")))
        sources, shares = [int(client) for client in config.pop("sources")], config.pop("shares")
        self._weights = int(config.pop("weights"))
        record: Mapping[str, Any] = record_in(message.content, "config", ConfigRecord)
        self._settings, self._rate = str(record["settings"]), float(record["lr"])
        self._session = self._joined(session, dict(zip(sources, shares, strict=True)))

    @property
    def threshold(self) -> int:
        """Number of neighbours, the client included, below which it reveals no shares."""
        return self._session.threshold

    def put_on(self, arrays: NDArrays, references: NDArrays, weight: int, limit: float) -> Words:
        """Return the masked words ``(d + 1,)`` of an update.

        Parameters
        ----------
        arrays : list of numpy.ndarray
            The update.
        references : list of numpy.ndarray
            The arrays that the client started from, in the same shapes.
        weight : int
            Weight of the client in the mean.
        limit : float
            The setting ``secure-range``.

        Raises
        ------
        ArithmeticError
            If the update contains NaN or infinite numbers, or changes a parameter by more than ``secure-range``.
        ProtocolError
            If the client has sent another update under these masks: the server could compute their difference.
        """
        session, client = self._session, self._secrets.client
        references = references[: len(arrays)]
        if [array.shape for array in arrays] != [reference.shape for reference in references]:
            raise ProtocolError("secure aggregation: the update and the received arrays have different shapes")
        if not 0 < weight <= self._weights:
            raise ProtocolError(f"secure aggregation: a weight of {weight} in a sum of {self._weights}")
        words = encoded(changes(arrays, references), weight / self._weights, limit)
        context = context_of(session.name, self._weights, self._settings, self._rate, references)
        words += own_mask(session.own_secret, context, len(words))
        for peer in session.peers:
            if peer != client:
                words += pair_mask(session.masks, session.public_of(peer)[0], client, peer, context, len(words))
        masked = digest(words)
        if self._secrets.load(session.name).masked not in (b"", masked):
            raise ProtocolError("secure aggregation: the client has sent another update in this round before")
        self._secrets.save(replace(session, masked=masked))
        return words

    def _joined(self, session: Session, sent: dict[int, bytes]) -> Session:
        """Return the session with the decrypted shares of the other neighbours."""
        if not session.sealed:
            raise ProtocolError(f"secure aggregation: round {session.name} is over")
        client, context = self._secrets.client, self._secrets.context_of(session)
        if client in sent or not sent.keys() <= set(session.roster) or len(sent) + 1 < session.threshold:
            raise ProtocolError(
                f"secure aggregation: the message has shares of {len(sent)} other clients; it needs shares of at least "
                f"{session.threshold - 1} neighbours, and of neighbours only"
            )
        shares = {client: session.own_share}
        for source, content in sent.items():
            shares[source] = opened(content, session.seals, session.public_of(source)[1], source, client, context)
            if len(shares[source]) != 2 * SECRET_BYTES:
                raise ProtocolError(f"secure aggregation: client {source} has sent shares of the wrong length")
        return replace(session, peers=sorted(shares), shares=[shares[peer] for peer in sorted(shares)])


def _order(name: str) -> tuple[int, ...]:
    """Return the sort key of a round's name: the number of times that the run was resumed, and the round."""
    return tuple(int(number) for number in name.split("-"))
