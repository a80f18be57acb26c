"""Secure aggregation on a client, which masks its update and scores, and reveals shares of secrets only once.

The server relays all keys and shares, and chooses the clients. This module therefore enforces the rules that protect
the client:

- Each round has new keys and secrets, and so does the evaluation of the round.
- The client sends only one reply under a round's masks, and can later only resend it. A round begins only once. The
  server may ask for new keys only before that reply, and the client then deletes the secrets of the earlier keys.
- All clients have the same view of the round: its cohort, the neighbours of each client, and the thresholds. A site
  that signs its keys refuses thresholds that would be unsafe if the server colluded with other clients.
- The client signs only one list of survivors per round. It reveals shares only if enough clients of the whole cohort
  have signed the same list. For each neighbour, it reveals its share of the neighbour's self-mask or of the
  neighbour's private key, never both.
- Masks do not cancel between clients that received different models, settings or weights.

Between the messages of a round, the secrets are kept in memory and never written to a file. They are in the node's
Flower context, but Posy's workers remove them before sending the context to the node
(:class:`posy.deploy.sessions.Sessions`).
"""

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from logging import WARNING
from typing import Any, Self

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from flwr.app import ConfigRecord, Context, Message
from flwr.common.logger import log
from flwr.common.typing import NDArrays

from posy.client_app.signatures import (
    KEYS_OF,
    SURVIVORS_OF,
    RoundSignatures,
    Signatures,
    UnknownSignerError,
    signatures_of,
)
from posy.flower import entries_of, record_in
from posy.strategies.masking import (
    KEY_BYTES,
    MAX_CLIENTS,
    SECRET_BYTES,
    MaskingError,
    Words,
    digest,
    encoded,
    encoded_numbers,
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
from posy.strategies.secure_aggregation import (
    AGAIN,
    EVALUATION,
    KEY_TEXTS,
    KEYS,
    NEXT,
    REFUSAL,
    SHARES,
    SIGNED_TEXTS,
    STATISTICS,
    SURVIVORS,
    TRAINING,
    UNMASK,
    View,
    colluding,
    common_digest,
    connected,
    safe_threshold,
)

SESSIONS = "secure-aggregation-"
"""Prefix of session names in a node's context."""
MIN_CLIENTS = 2
"""Minimum number of clients in a sum to which a client contributes, unless its site's policy requires more."""
REPLIES = {TRAINING: "an update", EVALUATION: "scores", STATISTICS: "statistics"}
"""The content of a masked reply, keyed by purpose."""
_NAME = re.compile(rf"[0-9]{{1,9}}-[0-9]{{1,9}}(-{EVALUATION})?|0-0-{STATISTICS}")


class ProtocolError(RuntimeError):
    """A request would reveal more than the sum, or needs secrets that the client has deleted."""

    shareable = True

    def __init__(self, text: str) -> None:
        super().__init__(f"secure aggregation: {text}")


@dataclass
class Session:
    """A client's state in one round. Its neighbours are the clients that may receive its shares, including itself."""

    name: str
    mask_secret: bytes = b""
    """Secret for the private key of the pairwise masks. The neighbours receive shares of this secret."""
    seal_secret: bytes = b""
    """Secret for the private key that encrypts shares."""
    own_secret: bytes = b""
    """Secret for the client's self-mask. The neighbours also receive shares of this secret."""
    sign_secret: bytes = b""
    """Secret for this round's signing key, if the node config has no ``signing-key``."""
    cohort: list[int] = field(default_factory=list)
    reach: int = 0
    cohort_threshold: int = 0
    threshold: int = 0
    """The view of the round: :class:`~posy.strategies.secure_aggregation.View`."""
    roster: list[int] = field(default_factory=list)
    public: list[bytes] = field(default_factory=list)
    """The neighbours, and two public keys for each: one for masks and one for encryption."""
    sealed: list[bytes] = field(default_factory=list)
    """The encrypted shares for the other neighbours, as sent by the client."""
    own_share: bytes = b""
    """The client's share of its own secrets."""
    peers: list[int] = field(default_factory=list)
    shares: list[bytes] = field(default_factory=list)
    """The neighbours that have sent shares. Each sends two: one of its self-mask and one of its private key."""
    masked: bytes = b""
    """Digest of the masked reply that the client has sent."""
    survivors: list[int] = field(default_factory=list)
    signature: list[bytes] = field(default_factory=list)
    """The list of survivors that the client has signed, and its signature together with the signer's public key."""
    revealed: bool = False
    """Whether the client has revealed ``shares``. Later requests receive the same reply."""
    early: bool = False
    """Whether the server requested the keys in the previous round, so that other clients may already know them."""

    @classmethod
    def new(cls, name: str) -> Self:
        """Return the session of a new round, with new secrets."""
        return cls(name, new_secret(), new_secret(), new_secret(), new_secret(KEY_BYTES))

    @property
    def masks(self) -> X25519PrivateKey:
        """The private key for the pairwise masks."""
        return private_key(self.mask_secret)

    @property
    def seals(self) -> X25519PrivateKey:
        """The private key that encrypts shares."""
        return private_key(self.seal_secret)

    @property
    def view(self) -> View:
        """The view of the round that the client has accepted."""
        return View(tuple(self.cohort), self.reach, self.cohort_threshold, self.threshold)

    def public_of(self, client: int) -> list[bytes]:
        """Return a neighbour's public keys."""
        start = 2 * self.roster.index(client)
        return self.public[start : start + 2]


class Secrets:
    """The sessions of a client, stored in the context of its node.

    Parameters
    ----------
    client : int
        Index of the client.
    context : Context
        Flower's context of the node.
    run : int
        Flower's ID of the run.
    name : str
        Name of a round. Training, evaluation and statistics have separate sessions.
    """

    def __init__(self, client: int, context: Context, run: int, name: str) -> None:
        if not _NAME.fullmatch(name):
            raise ProtocolError(f"{name!r} is not the name of a round")
        self.client, self.name = client, name
        self._site = signatures_of(context.node_config)
        self._records = context.state
        self.purpose = "".join(name.split("-")[2:])
        """:data:`TRAINING`, :data:`EVALUATION` or :data:`STATISTICS`: each has its own session."""
        self._key = f"{SESSIONS}{client}-{self.purpose}" if self.purpose else f"{SESSIONS}{client}"
        self._run = run
        session_clients = {
            key.removeprefix(SESSIONS).partition("-")[0] for key in self._records if key.startswith(SESSIONS)
        }
        if self._site and (other_clients := session_clients - {str(client)}):
            raise ProtocolError(f"this site takes part as client {min(other_clients)}, not as client {client}")

    def load(self) -> Session:
        """Return the session of the round, or raise :class:`ProtocolError` if it is not the client's latest."""
        session = self.latest()
        if session is None or session.name != self.name:
            raise ProtocolError(f"round {self.name} did not begin here, or its secrets have been deleted")
        return session

    def latest(self) -> Session | None:
        """Return the latest session, or None before the first round."""
        record = self._records.config_records.get(self._key)
        return None if record is None else Session(**record)  # type: ignore[arg-type]

    def save(self, session: Session) -> None:
        """Store a session, replacing the earlier one."""
        self._records[self._key] = ConfigRecord(vars(session).copy())

    def signatures(self, session: Session) -> Signatures:
        """Return the key that signs for this client: the site's key or, if the site has none, the round's key."""
        return self._site or RoundSignatures(session.sign_secret)

    @property
    def context(self) -> bytes:
        """The text that binds signed keys to a round."""
        return f"{self._run}/{self.name}".encode()

    def context_of(self, session: Session) -> bytes:
        """Return the text that binds encrypted shares to a round and its view."""
        return self.context + b" " + session.view.digest()

    def keys_text(self, client: int, keys: Sequence[bytes]) -> bytes:
        """Return the text that a client signs first: the round, its index and its public keys."""
        return KEYS_OF + b" ".join((self.context, str(client).encode(), *keys))

    def survivors_text(self, session: Session, client: int) -> bytes:
        """Return the text that a client signs before it reveals shares: the round, its view, and the survivors."""
        survivor_list = ",".join(map(str, session.survivors)).encode()
        return SURVIVORS_OF + b" ".join((self.context_of(session), str(client).encode(), survivor_list))


def answer(message: Message, context: Context, min_clients: int = MIN_CLIENTS) -> list[bytes]:
    """Return a client's reply in any stage of a round except training and evaluation.

    Parameters
    ----------
    message : Message
        The request.
    context : Context
        Flower's context of the node.
    min_clients : int
        Minimum number of clients in a sum that the client joins (``min_clients`` in its site's policy).
    """
    config: Mapping[str, Any] = record_in(message.content, "config", ConfigRecord)

    def secrets_of(name: object) -> Secrets:
        return Secrets(int(config["client"]), context, message.metadata.run_id, str(name))

    client_secrets, stage = secrets_of(config["secure-round"]), config["secure-stage"]
    if stage == KEYS:
        return _keys(client_secrets, again=bool(config.get(AGAIN)))
    if stage == SHARES:
        return _shares(client_secrets, _keys_in(config), View.read(config), min_clients)
    if stage == SURVIVORS:
        texts = _signed(client_secrets, [int(client) for client in config["survivors"]], min_clients)
    elif stage == UNMASK:
        signatures = zip(map(int, config["signers"]), *_columns(config["signatures"], SIGNED_TEXTS), strict=True)
        texts = _unmask(client_secrets, list(signatures), min_clients)
    else:
        raise ProtocolError(f"the stage {stage!r} does not exist")
    if NEXT not in config:
        return texts
    try:  # if this fails, the server asks again in the next round and then receives the error
        next_secrets = secrets_of(config[NEXT])
        if next_secrets.purpose == client_secrets.purpose:
            raise ProtocolError("the secrets for the next round would replace secrets of this round")
        if stage == SURVIVORS:
            return [*texts, *_keys(next_secrets, early=True)]
        return [*texts, *_shares(next_secrets, _keys_in(config), View.read(config), min_clients)]
    except (ProtocolError, MaskingError) as error:
        log(WARNING, "no keys or shares for round %s yet: %s", config[NEXT], error)
        return texts


def smallest_sum(node_config: Mapping[str, Any]) -> int:
    """Return the default minimum number of clients in a sum. It applies if the site's policy sets no minimum.

    A site with trusted keys joins only sums over more than half of the trusted sites.
    """
    site = signatures_of(node_config)
    return MIN_CLIENTS if site is None else max(MIN_CLIENTS, site.trusted // 2 + 1)


def _keys_in(config: Mapping[str, Any]) -> dict[int, list[bytes]]:
    """Return each neighbour's public keys, signature and signer from a request for shares."""
    rows = zip(config["roster"], *_columns(config["public-keys"], KEY_TEXTS), strict=True)
    return {int(client): key_texts for client, *key_texts in rows}


def _columns(texts: Sequence[bytes], count: int) -> list[Sequence[bytes]]:
    """Return the columns of a table that was sent row by row."""
    return [texts[column::count] for column in range(count)]


def _keys(client_secrets: Secrets, *, again: bool = False, early: bool = False) -> list[bytes]:
    """Begin a round unless it has already begun. Return two public keys, their signature and the signer's public key.

    With ``again``, a client that has not yet sent its reply discards the keys and shares that it has sent for this
    round. It also discards keys that it has sent early, because another client could have copied them.
    """
    session, name = client_secrets.latest(), client_secrets.name
    if session is None or _order(session.name) < _order(name):
        is_void = True
    else:
        is_void = again and session.name == name and (bool(session.sealed) or session.early) and not session.masked
    if session is None or is_void:
        session = replace(Session.new(name), early=early)
        client_secrets.save(session)
    if session.name != name or not session.mask_secret:
        raise ProtocolError(f"round {name} is over")
    keys = [public_key(session.masks), public_key(session.seals)]
    return [*keys, *client_secrets.signatures(session).sign(client_secrets.keys_text(client_secrets.client, keys))]


def _shares(
    client_secrets: Secrets, neighbour_keys: dict[int, list[bytes]], view: View, min_clients: int
) -> list[bytes]:
    """Return an encrypted share of the secrets for each other neighbour, or a refusal of some neighbours' keys.

    A refusal contains no shares. The server may repeat the request without the refused neighbours.
    """
    session, client = client_secrets.load(), client_secrets.client
    if not session.mask_secret:
        raise ProtocolError(f"round {session.name} is over")
    if refusals := _refused(client_secrets, session, neighbour_keys):
        return [REFUSAL, *(f"{client} {reason}".encode() for client, reason in refusals.items())]
    public = {client: texts[:2] for client, texts in neighbour_keys.items()}
    keys = [key for pair in public.values() for key in pair]
    if session.sealed:
        if (session.roster, session.public, session.view) != (list(public), keys, view):
            raise ProtocolError("the client has already shared its secrets for different keys or a different cohort")
        return session.sealed
    if public.get(client) != [public_key(session.masks), public_key(session.seals)]:
        raise ProtocolError("these are not this client's keys")
    if len(set(keys)) != len(keys):
        raise ProtocolError("two public keys are the same")
    _check_view(view, client, public, min_clients, colluders=client_secrets.signatures(session).colluders)
    parts = zip(
        public,
        split(session.own_secret, view.threshold, len(public)),
        split(session.mask_secret, view.threshold, len(public)),
        strict=True,
    )
    shares = {other: self_share + mask_share for other, self_share, mask_share in parts}
    session.cohort, session.reach = list(view.cohort), view.reach
    session.cohort_threshold, session.threshold = view.cohort_threshold, view.threshold
    session.roster, session.public = list(public), keys
    session.own_share = shares.pop(client)
    context = client_secrets.context_of(session)
    session.sealed = [
        sealed(share, session.seals, public[other][1], client, other, context) for other, share in shares.items()
    ]
    client_secrets.save(session)
    return session.sealed


def _check_view(view: View, client: int, roster: Collection[int], min_clients: int, *, colluders: bool) -> None:
    """Raise :class:`ProtocolError` if a round with this view could reveal a sum over too few clients."""
    size, neighbourhood = len(view.cohort), view.neighbourhood
    if client not in view.cohort or len(set(view.cohort)) != size or size > MAX_CLIENTS:
        raise ProtocolError("the cohort lacks this client, contains a client twice, or is too large")
    _check_size("the cohort", size, min_clients)
    if view.reach < 0 or neighbourhood > size or not set(roster) <= set(view.rosters()[client]):
        raise ProtocolError("the neighbours do not match the cohort")
    for threshold, count, group_size in (
        (view.threshold, len(roster), neighbourhood),
        (view.cohort_threshold, size, size),
    ):
        if not (2 <= threshold <= count and group_size < 2 * threshold):
            raise ProtocolError(
                f"{threshold} of {count} clients is not a safe threshold; the threshold must be more than half of "
                f"{group_size}"
            )
        colluder_count = colluding(group_size)
        if colluders and threshold < (safe_number := safe_threshold(group_size, colluder_count)):
            raise ProtocolError(
                f"{threshold} of {group_size} clients is not a safe threshold if sites sign their keys: a server "
                f"that colludes with {colluder_count} of them could isolate a client; the threshold must be at "
                f"least {safe_number}; set secure-threshold = auto"
            )
    if colluders and view.tolerated() < min(1, colluding(size)):
        raise ProtocolError(
            f"with {neighbourhood - 1} neighbours, a server that colludes with one client could isolate others; set "
            "secure-neighbours = 0, or 4 or more"
        )


def _check_size(group: str, count: int, min_clients: int) -> None:
    if count < min_clients:
        raise ProtocolError(
            f"{group} has {count} clients; this site joins only sums over at least {min_clients} clients"
        )


def _refused(client_secrets: Secrets, session: Session, neighbour_keys: dict[int, list[bytes]]) -> dict[int, str]:
    """Return the neighbours whose keys this client refuses, each with the reason.

    A site refuses keys that no trusted site has signed. Every client refuses the keys of clients that share a signer.
    """
    signatures, this_client = client_secrets.signatures(session), client_secrets.client
    refusals, signers = {}, {this_client: signatures.verifying_key}
    for client, (*keys, signature, signer) in neighbour_keys.items():
        if client == this_client:
            continue
        try:
            signatures.check(client_secrets.keys_text(client, keys), signature, signer)
            signers[client] = signer
        except UnknownSignerError as error:
            refusals[client] = str(error)
    counts = Counter(signers.values())
    duplicates = [client for client, signer in signers.items() if counts[signer] > 1 and client != this_client]
    return refusals | dict.fromkeys(duplicates, "one site has signed the keys of two clients")


def _signed(client_secrets: Secrets, survivors: list[int], min_clients: int) -> list[bytes]:
    """Return the client's signature on the list of survivors, and the signer's public key."""
    session, client = client_secrets.load(), client_secrets.client
    if session.signature:
        if session.survivors != survivors:
            raise ProtocolError("the client has already signed a different list of survivors")
        return session.signature
    if not session.masked:
        raise ProtocolError("this client has not sent its update")
    survivor_set, view = set(survivors), session.view
    if survivors != sorted(survivor_set) or client not in survivor_set or not survivor_set <= set(view.cohort):
        raise ProtocolError(
            "the list of survivors lacks this client, names clients outside the cohort, or is not sorted"
        )
    _check_size("the list of survivors", len(survivors), min_clients)
    if len(survivors) < view.cohort_threshold:
        raise ProtocolError(
            f"{len(survivors)} clients have sent their updates, but {view.cohort_threshold} of the cohort are needed"
        )
    rosters = view.rosters()
    if (fewest := min(len(survivor_set.intersection(rosters[other])) for other in survivors)) < view.threshold:
        raise ProtocolError(
            f"{fewest} clients have sent their updates, but {view.threshold} of the neighbours are needed"
        )
    if not survivor_set.intersection(rosters[client]) <= set(session.peers):
        raise ProtocolError("a neighbour on the list of survivors has sent this client no shares")
    if not connected(survivor_set, rosters):
        raise ProtocolError("shared secrets do not connect all survivors, so some survivors would form a separate sum")
    session.survivors = survivors
    text = client_secrets.survivors_text(session, client)
    session.signature = client_secrets.signatures(session).sign(text)
    client_secrets.save(session)
    return session.signature


def _unmask(client_secrets: Secrets, signatures: Sequence[tuple[int, bytes, bytes]], min_clients: int) -> list[bytes]:
    """Return one share for each peer.

    It is a share of the peer's self-mask if the peer is on the signed list, otherwise a share of the peer's private
    key.
    """
    session = client_secrets.load()
    if session.revealed:
        return session.shares
    if not session.signature:
        raise ProtocolError("this client has not signed a list of survivors")
    signers = set()
    for client, signature, signer in signatures:
        if client not in session.survivors:
            continue
        try:
            client_secrets.signatures(session).check(client_secrets.survivors_text(session, client), signature, signer)
        except UnknownSignerError:
            continue
        signers.add(signer)
    if (count := len(signers)) < (required := max(session.cohort_threshold, min_clients)):
        raise ProtocolError(
            f"{count} of the {len(session.cohort)} clients of the cohort have signed this client's list of survivors, "
            f"but {required} are needed"
        )
    revealed = [
        shares[:SECRET_BYTES] if peer in session.survivors else shares[SECRET_BYTES:]
        for peer, shares in zip(session.peers, session.shares, strict=True)
    ]
    client_secrets.save(  # deletes all secrets
        Session(session.name, shares=revealed, survivors=session.survivors, signature=session.signature, revealed=True)
    )
    return revealed


class Masking:
    """The masks of one reply, which are added to its update, scores or statistics.

    Parameters
    ----------
    config : dict
        The message's config, from which the constructor removes the entries for secure aggregation.
    message : Message
        The message.
    context : Context
        Flower's context of the node.
    purpose : str
        :data:`TRAINING`, :data:`EVALUATION` or :data:`STATISTICS`.
    """

    def __init__(self, config: dict[str, Any], message: Message, context: Context, *, purpose: str = TRAINING) -> None:
        if "secure-round" not in config:
            raise ProtocolError(f"the server asks for {REPLIES[purpose]} without masks")
        self._config: dict[str, Any] = dict(entries_of(record_in(message.content, "config", ConfigRecord)))
        name = str(config.pop("secure-round"))
        if name.split("-")[2:] != ([purpose] if purpose else []):
            raise ProtocolError(f"round {name} is for a different kind of message")
        self._secrets = Secrets(int(config["client"]), context, message.metadata.run_id, name)
        session = self._secrets.load()
        if _order(name)[1] != int(config["server-round"]):
            raise ProtocolError(f"the name {name} does not belong to round {config['server-round']}")
        sources, shares = [int(client) for client in config.pop("sources")], config.pop("shares")
        self._weights = int(config.pop("weights"))
        self._session = self._joined(session, dict(zip(sources, shares, strict=True)))

    @property
    def threshold(self) -> int:
        """Minimum number of surviving neighbours, including the client itself, at which the client reveals shares."""
        return self._session.threshold

    def mask_reply(
        self,
        arrays: NDArrays,
        references: NDArrays,
        weight: int,
        limit: float,
        common: NDArrays,
        numbers: Sequence[int] = (),
    ) -> Words:
        """Return the masked words ``(d + 1 + 4 n,)`` of an update and n scores.

        Parameters
        ----------
        arrays : list of numpy.ndarray
            The update, which is empty for an evaluation.
        references : list of numpy.ndarray
            The arrays that the client started from, with the same shapes.
        weight : int
            Weight of the client in the mean.
        limit : float
            The setting ``secure-range``.
        common : list of numpy.ndarray
            The arrays that all clients in the round have received.
        numbers : sequence of int
            The scores: :func:`posy.strategies.score_sums.numbers_of`.

        Raises
        ------
        OutOfRangeError
            If the update contains NaN or infinite values, or changes a parameter by more than ``secure-range``.
        ProtocolError
            If the client has already sent a different reply under these masks, because the server could compute the
            difference between the two.
        """
        session, client = self._session, self._secrets.client
        if [array.shape for array in arrays] != [reference.shape for reference in references]:
            raise ProtocolError("the update and the received arrays have different shapes")
        if not 0 < weight <= self._weights:
            raise ProtocolError(f"the weight {weight} is not between 1 and the total weight, {self._weights}")
        update = encoded(changes(arrays, references), weight / self._weights, limit)
        words = np.concatenate([update, encoded_numbers(numbers)])
        context = digest(session.view.digest(), common_digest(self._config, common))
        words += own_mask(session.own_secret, context, len(words))
        for peer in session.peers:
            if peer != client:
                words += pair_mask(session.masks, session.public_of(peer)[0], client, peer, context, len(words))
        masked = digest(words)
        if self._secrets.load().masked not in (b"", masked):
            raise ProtocolError(f"the client has already sent a different reply in round {session.name}")
        self._secrets.save(replace(session, masked=masked))
        return words

    def _joined(self, session: Session, sealed_shares: dict[int, bytes]) -> Session:
        """Return the session with the decrypted shares that the other neighbours have sent."""
        if not session.sealed:
            raise ProtocolError(f"round {session.name} is over")
        client, context = self._secrets.client, self._secrets.context_of(session)
        if (
            client in sealed_shares
            or not sealed_shares.keys() <= set(session.roster)
            or len(sealed_shares) + 1 < session.threshold
        ):
            raise ProtocolError(
                f"the message has shares from {len(sealed_shares)} other clients; it needs shares from at least "
                f"{session.threshold - 1} neighbours, and only from neighbours"
            )
        shares = {client: session.own_share}
        for source, content in sealed_shares.items():
            shares[source] = opened(content, session.seals, session.public_of(source)[1], source, client, context)
            if len(shares[source]) != 2 * SECRET_BYTES:
                raise ProtocolError(f"client {source} has sent shares of the wrong length")
        return replace(session, peers=sorted(shares), shares=[shares[peer] for peer in sorted(shares)])


def _order(name: str) -> tuple[int, ...]:
    """Return the sort key of a round's name: the number of times that the run has been resumed, and the round."""
    return tuple(int(number) for number in name.split("-")[:2])
