"""Secure aggregation on a client: it hands in its update under masks, and tells shares of secrets once.

The server relays all keys and shares and says who takes part. What protects the client is checked here:

- keys and secrets are those of one round, and later rounds begin with others;
- no round is begun twice, and nothing is masked under the same masks but what was handed in before;
- of each neighbour either the share of its own mask or that of its private key is told, never both, and only while more
  than half of the neighbours, as many as the server has said before, have handed in;
- the masks of clients that were told different models, settings or weights do not cancel.

Between the messages of a round the secrets are in the node's Flower context: in the memory of the SuperNode, no file.
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
    """The server asks for what would reveal more than the sum, or what this client cannot know any more."""


@dataclass
class Session:
    """What a client knows of the round that it is in: neighbours are those that may share secrets, itself included."""

    name: str
    mask_secret: bytes = b""
    """What the private key of the masks with each other client is made from: its shares go to the neighbours."""
    seal_secret: bytes = b""
    """What the private key is made from with which shares are sealed."""
    own_secret: bytes = b""
    """What the client's own mask is made from: its shares go to the neighbours too."""
    roster: list[int] = field(default_factory=list)
    public: list[bytes] = field(default_factory=list)
    """The neighbours, and of each the public key for masks and that for sealing."""
    threshold: int = 0
    sealed: list[bytes] = field(default_factory=list)
    """The shares for the others, as they were sent."""
    kept: bytes = b""
    """The client's own share of its secrets."""
    peers: list[int] = field(default_factory=list)
    held: list[bytes] = field(default_factory=list)
    """The neighbours that have shared their secrets, and of each two shares: of its own mask, and of its key."""
    masked: bytes = b""
    """Digest of what was handed in."""
    survivors: list[int] = field(default_factory=list)
    """Whose masks the shares were told for: what is told after that is the same again."""

    @classmethod
    def new(cls, name: str) -> Self:
        """Return the beginning of a round."""
        return cls(name, new_secret(), new_secret(), new_secret())

    @property
    def masks(self) -> X25519PrivateKey:
        """The private key of the masks with other clients."""
        return private_key(self.mask_secret)

    @property
    def seals(self) -> X25519PrivateKey:
        """The private key with which shares are sealed."""
        return private_key(self.seal_secret)

    def public_of(self, client: int) -> list[bytes]:
        """Return the public keys of a neighbour."""
        place = 2 * self.roster.index(client)
        return self.public[place : place + 2]


class Secrets:
    """The sessions of a client, kept in the context of its node."""

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
            raise ProtocolError(f"secure aggregation: round {name} was not begun here, or its secrets are gone")
        return session

    def latest(self) -> Session | None:
        """Return the latest session, if there has been one."""
        record = self._records.config_records.get(self._key)
        return None if record is None else Session(**record)  # type: ignore[arg-type]

    def save(self, session: Session) -> None:
        """Keep a session in the place of all before."""
        self._records[self._key] = ConfigRecord(vars(session).copy())

    def context_of(self, session: Session) -> bytes:
        """Return what ties sealed shares, and signed keys, to a round."""
        return f"{self._run}/{session.name}".encode()

    def signed(self, session: Session, client: int, keys: Sequence[bytes]) -> bytes:
        """Return what a client signs of its keys."""
        return b" ".join((self.context_of(session), str(client).encode(), *keys))


def answer(message: Message, context: Context) -> list[bytes]:
    """Return what a client answers to a stage of a round other than its training."""
    config: Mapping[str, Any] = record_in(message.content, "config", ConfigRecord)
    held = Secrets(int(config["client"]), context, message.metadata.run_id)
    name = str(config["secure-round"])
    stage = config["secure-stage"]
    if stage == KEYS:
        return _keys(held, name)
    if stage == SHARES:
        texts = config["public-keys"]
        told = zip(config["roster"], *(texts[place::KEY_TEXTS] for place in range(KEY_TEXTS)), strict=True)
        return _shares(held, held.load(name), {int(c): own for c, *own in told}, int(config["threshold"]))
    if stage == UNMASK:
        return _unmask(held, held.load(name), [int(client) for client in config["survivors"]])
    raise ProtocolError(f"secure aggregation: there is no stage {stage!r}")


def _keys(held: Secrets, name: str) -> list[bytes]:
    """Begin a round, unless it was begun before: public keys for masks and for sealing, signature and signer."""
    session = held.latest()
    if session is None or _order(session.name) < _order(name):
        session = Session.new(name)
        held.save(session)
    if session.name != name or not session.mask_secret:
        raise ProtocolError(f"secure aggregation: round {name} is over")
    keys = [public_key(session.masks), public_key(session.seals)]
    return [*keys, *(held.signatures.sign(held.signed(session, held.client, keys)) if held.signatures else UNSIGNED)]


def _shares(held: Secrets, session: Session, told: dict[int, list[bytes]], threshold: int) -> list[bytes]:
    """Share the secrets out to the neighbours: sealed shares in the order of the others, or a refusal of some keys.

    A refusal shares nothing: the server may ask again without the neighbours that it names.
    """
    if refused := _refused(held, session, told):
        return [REFUSAL, *(f"{client} {reason}".encode() for client, reason in refused.items())]
    public = {client: texts[:2] for client, texts in told.items()}
    keys = [key for pair in public.values() for key in pair]
    if session.sealed:
        if (session.roster, session.public, session.threshold) != (list(public), keys, threshold):
            raise ProtocolError("secure aggregation: the secrets were shared out to other keys before")
        return session.sealed
    if not session.mask_secret or public.get(held.client) != [public_key(session.masks), public_key(session.seals)]:
        raise ProtocolError("secure aggregation: these are not this client's keys")
    if len(set(keys)) != len(keys):
        raise ProtocolError("secure aggregation: two public keys are the same")
    if not (2 <= threshold <= len(public) < 2 * threshold):
        raise ProtocolError(f"secure aggregation: {threshold} of {len(public)} clients are no safe threshold")
    parts = zip(
        public,
        split(session.own_secret, threshold, len(public)),
        split(session.mask_secret, threshold, len(public)),
        strict=True,
    )
    shares = {client: own + mask for client, own, mask in parts}
    session.roster, session.public, session.threshold = list(public), keys, threshold
    session.kept = shares.pop(held.client)
    context = held.context_of(session)
    session.sealed = [
        sealed(share, session.seals, public[other][1], held.client, other, context) for other, share in shares.items()
    ]
    held.save(session)
    return session.sealed


def _refused(held: Secrets, session: Session, told: dict[int, list[bytes]]) -> dict[int, str]:
    """Return the neighbours whose keys no trusted site has signed, with the reasons; none where this site signs none.

    Nor may one site have signed the keys of two clients.
    """
    if held.signatures is None:
        return {}
    refused, signers = {}, {held.client: held.signatures.own}
    for client, (*keys, signature, signer) in told.items():
        if client == held.client:
            continue
        try:
            held.signatures.check(held.signed(session, client, keys), signature, signer)
            signers[client] = signer
        except UnknownSignerError as error:
            refused[client] = str(error)
    counts = Counter(signers.values())
    double = [client for client, signer in signers.items() if counts[signer] > 1 and client != held.client]
    return refused | dict.fromkeys(double, "one site has signed the keys of two clients")


def _unmask(held: Secrets, session: Session, survivors: list[int]) -> list[bytes]:
    """Tell of each peer the share of its own mask if it has handed in, else that of its private key."""
    if session.survivors:
        if session.survivors != survivors:
            raise ProtocolError("secure aggregation: shares were told for other clients before")
        return session.held
    if not session.masked:
        raise ProtocolError("secure aggregation: this client has not handed in its update")
    if not {held.client} <= set(survivors) <= set(session.peers) or len(set(survivors)) < session.threshold:
        raise ProtocolError(
            f"secure aggregation: {len(survivors)} clients have handed in, {session.threshold} neighbours are needed"
        )
    told = [
        shares[:SECRET_BYTES] if peer in survivors else shares[SECRET_BYTES:]
        for peer, shares in zip(session.peers, session.held, strict=True)
    ]
    held.save(Session(session.name, survivors=survivors, held=told))  # all secrets are gone
    return told


class Masking:
    """The masks of one training: made from its message before it, and put on afterwards."""

    def __init__(self, config: dict[str, Any], message: Message, context: Context) -> None:
        """Take what belongs to it out of a message's config."""
        if "secure-round" not in config:
            raise ProtocolError("secure aggregation: the server asks for an update without masks")
        self._held = Secrets(int(config["client"]), context, message.metadata.run_id)
        session = self._held.load(str(config.pop("secure-round")))
        sources, shares = [int(client) for client in config.pop("sources")], config.pop("shares")
        self._weights = int(config.pop("weights"))
        told: Mapping[str, Any] = record_in(message.content, "config", ConfigRecord)
        self._settings, self._rate = str(told["settings"]), float(told["lr"])
        self._session = self._joined(session, dict(zip(sources, shares, strict=True)))

    def put_on(self, arrays: NDArrays, references: NDArrays, weight: int, limit: float) -> Words:
        """Return an update under its masks; the weight is the client's in the mean, the limit ``secure-range``.

        Raises
        ------
        ArithmeticError
            If it holds what is no number, or changes a parameter by more than ``secure-range``.
        ProtocolError
            If another update was handed in under these masks before: both together would tell their difference.
        """
        session, client = self._session, self._held.client
        references = references[: len(arrays)]
        if [array.shape for array in arrays] != [reference.shape for reference in references]:
            raise ProtocolError("secure aggregation: the update has other shapes than what it is a change of")
        if not 0 < weight <= self._weights:
            raise ProtocolError(f"secure aggregation: a weight of {weight} in a sum of {self._weights}")
        words = encoded(changes(arrays, references), weight / self._weights, limit)
        context = context_of(session.name, self._weights, self._settings, self._rate, references)
        words += own_mask(session.own_secret, context, len(words))
        for peer in session.peers:
            if peer != client:
                words += pair_mask(session.masks, session.public_of(peer)[0], client, peer, context, len(words))
        handed_in = digest(words)
        if self._held.load(session.name).masked not in (b"", handed_in):
            raise ProtocolError("secure aggregation: another update was handed in for this round before")
        self._held.save(replace(session, masked=handed_in))
        return words

    def _joined(self, session: Session, sent: dict[int, bytes]) -> Session:
        """Return the session with the shares that the others have sent, opened."""
        if not session.sealed:
            raise ProtocolError(f"secure aggregation: round {session.name} is over")
        client, context = self._held.client, self._held.context_of(session)
        if client in sent or not sent.keys() <= set(session.roster) or len(sent) + 1 < session.threshold:
            raise ProtocolError(f"secure aggregation: shares of {len(sent)} others, who are not the neighbours needed")
        held = {client: session.kept}
        for source, content in sent.items():
            held[source] = opened(content, session.seals, session.public_of(source)[1], source, client, context)
            if len(held[source]) != 2 * SECRET_BYTES:
                raise ProtocolError(f"secure aggregation: what client {source} has sent are no shares")
        return replace(session, peers=sorted(held), held=[held[peer] for peer in sorted(held)])


def _order(name: str) -> tuple[int, ...]:
    """Return by what the names of rounds are in order: how often the run was resumed, and the round."""
    return tuple(int(number) for number in name.split("-"))
