"""Secure aggregation on the server: SecAgg+ (Bell et al., 2020), in which the server learns only the sum of updates.

A round has five stages:

1. Each client sends its public keys.
2. Each client sends encrypted shares of two secrets to its neighbours.
3. Each client trains, and sends its masked update and scores.
4. Each client signs the list of survivors, which are the clients whose updates have arrived (ConsistencyCheck of
   Bonawitz et al., 2017, Figure 4).
5. Each client checks that enough clients of the whole cohort have signed the same list. For each neighbour on the list,
   it then reveals a share of the neighbour's self-mask. For any other neighbour, it reveals a share of the neighbour's
   private key. The server recovers the secrets from the shares, computes their masks, and subtracts the masks from the
   sum.

The evaluation of a round has the same stages, with different keys, and sums only the scores. Before the first round,
statistics of the sites' data are summed in the same way. The client's side, which does not trust the server, is in
:mod:`posy.client_app.secure_aggregation`.

If the same clients are expected in the next phase, they send its keys and shares with their replies in stages 4 and 5.
The next phase then starts at stage 3. If different clients take part instead, all clients send new keys and shares.
"""

import math
import secrets
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt
from flwr.app import ArrayRecord, RecordDict
from flwr.common.typing import NDArrays

from posy.flower import record_in
from posy.strategies.masking import (
    KEY_BYTES,
    LIMBS,
    NONCE_BYTES,
    SECRET_BYTES,
    TAG_BYTES,
    MaskingError,
    Words,
    check_public,
    combined,
    decoded,
    decoded_numbers,
    digest,
    own_mask,
    pair_mask,
    private_key,
    public_key,
)
from posy.strategies.replies import BadReplyError, check_enrolled, check_size, read_metrics
from posy.strategies.run_settings import RunSettings

KEYS, SHARES, SURVIVORS, UNMASK = "keys", "shares", "survivors", "unmask"
"""The stages of a round besides training or evaluation."""
TRAINING, EVALUATION, STATISTICS = "", "evaluation", "statistics"
"""Suffixes of round names for updates, for scores, and for statistics of the sites' data."""
NEXT = "next-round"
"""Entry in a ``survivors`` or ``unmask`` request: the next round, whose keys or shares are requested early."""
AGAIN = "again"
"""Entry in a request for keys that voids any earlier keys and shares for this round."""
MASKED = "masked"
"""Name of the array with a reply's masked words."""
PER_CLIENT = frozenset(("client", "site", "state-from", "state-keep", "evaluate-personal", "sources", "shares"))
"""Entries of a message's config that differ between the clients of a round; all others must be the same."""
REFUSAL = b"refused"
"""First item in the reply of a client that refuses some neighbours' keys; one item per refused neighbour follows."""
MAX_REFUSAL = 300
"""Maximum number of bytes in the item for a refused neighbour: its index, a space and the reason."""
KEY_TEXTS, SIGNED_TEXTS, MAX_SIGNATURE = 4, 2, 1000
"""Number of items for a client's keys (two keys, a signature, the signer) and for its signature on a list (the
signature, the signer); maximum number of bytes in a signature or signer."""
ROUND_KEY_BYTES = 32
"""Length in bytes of a signer's Ed25519 key that is valid for one round; a site's public key is longer."""
DEFAULT_FRACTION = 0.6
"""The fraction for ``secure-threshold = auto``."""
Answer = list[bytes]
Masked = tuple[Words, Mapping[str, Any]]
"""The masked words in a reply, and its metrics."""
Ask = Callable[[str, Mapping[int, Mapping[str, Any]], Callable[[int, Answer], None]], dict[int, Answer]]
"""Sends a stage's requests, keyed by client, and returns the replies that pass a check, also keyed by client."""


class TooFewError(MaskingError):
    """Too few clients remain to unmask the sum of a round."""


def threshold_of(size: int, fraction: float) -> int:
    """Return how many of ``size`` clients must finish the round: always more than half."""
    return max(2, size // 2 + 1, math.ceil(fraction * size - 1e-9))


def fraction_of(threshold: float | str) -> float:
    """Return the value of ``secure-threshold``; for ``auto``, the default fraction for runs without signed keys."""
    return DEFAULT_FRACTION if isinstance(threshold, str) else threshold


def colluding(size: int) -> int:
    """Return the largest number of clients that is less than a third of ``size``: c = ⌈n/3⌉ - 1."""
    return max(0, -(-size // 3) - 1)


def safe_threshold(size: int, colluders: int) -> int:
    """Return the smallest threshold t at which only one list of survivors can have t signatures: 2t > n + c.

    An honest client signs only one list in a round. A client that colludes with the server may sign every list.

    Parameters
    ----------
    size : int
        Number n of clients.
    colluders : int
        Number c of clients that collude with the server.
    """
    return max(2, (size + colluders) // 2 + 1)


class View(NamedTuple):
    """The clients and thresholds of a round, which must be the same for all of its clients.

    The clients form a ring. The neighbours of a client are the ``reach`` clients on either side of it. If ``reach`` is
    0, all clients are neighbours.
    """

    cohort: tuple[int, ...]
    """The clients in ring order."""
    reach: int
    cohort_threshold: int
    """Number of clients in the cohort that must sign the list of survivors."""
    threshold: int
    """Number of shares that are needed to recover a secret."""

    @classmethod
    def new(cls, clients: Sequence[int], neighbours: int, fraction: float | str, *, signed: bool) -> Self:
        """Return a view whose ring is in random order.

        Parameters
        ----------
        clients : sequence of int
            The clients.
        neighbours : int
            The setting ``secure-neighbours``; an odd number is rounded up.
        fraction : float or str
            The setting ``secure-threshold``.
        signed : bool
            Whether sites sign their keys; with ``auto``, thresholds then withstand a server that colludes with fewer
            than a third of the clients.
        """
        ring, reach = list(clients), -(-neighbours // 2)
        secrets.SystemRandom().shuffle(ring)
        reach = 0 if 2 * reach + 1 >= len(ring) else reach
        thresholds = []
        for size in (len(ring), 2 * reach + 1 if reach else len(ring)):
            least = threshold_of(size, fraction_of(fraction))
            if signed and isinstance(fraction, str):
                least = max(least, safe_threshold(size, colluding(size)))
            thresholds.append(least)
        return cls(tuple(ring), reach, *thresholds)

    @property
    def neighbourhood(self) -> int:
        """Number of neighbours of each client, including the client itself."""
        return 2 * self.reach + 1 if self.reach else len(self.cohort)

    def rosters(self) -> dict[int, list[int]]:
        """Return the sorted neighbours of each client, including the client itself."""
        ring, near = self.cohort, range(-self.reach, self.reach + 1)
        if not self.reach:
            return {client: sorted(ring) for client in ring}
        return {client: sorted(ring[(i + step) % len(ring)] for step in near) for i, client in enumerate(ring)}

    def tolerated(self) -> int:
        """Return the maximum number of clients that can collude with a malicious server without harming other clients.

        The number is -1 if a malicious server alone can do harm. If all clients are neighbours, the number is the
        largest c with 2t > n + c. In a ring, colluding clients and clients that have dropped out could also cut off an
        honest segment from the rest. At each of the segment's two ends, at least t - 1 - r of the next r clients have
        not dropped out. Hence, 2 (t - 1 - r) clients would have to collude.
        """
        bounds = [2 * self.cohort_threshold - len(self.cohort) - 1, self.threshold - 1]
        if self.reach:
            bounds.append(max(0, 2 * (self.threshold - 1 - self.reach) - 1))
        return max(-1, min(bounds))

    def digest(self) -> bytes:
        """Return a digest of the view, which binds keys, shares, masks and signatures to the view."""
        return digest("view", *map(str, (self.reach, self.cohort_threshold, self.threshold, *self.cohort)))

    def entries(self) -> dict[str, Any]:
        """Return the view as config entries, which the clients read."""
        return {
            "cohort": list(self.cohort),
            "reach": self.reach,
            "cohort-threshold": self.cohort_threshold,
            "threshold": self.threshold,
        }

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> Self:
        """Return the view in a request's config."""
        numbers = (int(config[key]) for key in ("reach", "cohort-threshold", "threshold"))
        return cls(tuple(int(client) for client in config["cohort"]), *numbers)


def connected(clients: set[int], rosters: Mapping[int, Sequence[int]]) -> bool:
    """Return whether the given clients and the links to their neighbours form a connected graph.

    If the graph had several components, the server would learn the sum of each.
    """
    reached, frontier = set[int](), sorted(clients)[:1]
    while frontier:
        client = frontier.pop()
        reached.add(client)
        frontier += [other for other in rosters[client] if other in clients and other not in reached]
    return reached == clients


class Prepared(NamedTuple):
    """The keys and shares that the clients of a round have sent before the round begins."""

    name: str
    view: View
    public: dict[int, Answer]
    sealed: dict[int, Answer]


class SecureRound:
    """The server's side of one round.

    Parameters
    ----------
    name : str
        Name of the round, unique in the run.
    run : RunSettings
        The settings.
    weights : Mapping of int to int
        Weight of each client in the cohort, keyed by index; 1 for scores.
    ask : callable
        Sends the messages of a stage, and returns the replies.
    drop : callable
        Records that a client is dropped from the round, with the reason.
    following : str
        Name of the next round if the same clients take part in it, or an empty string.
    prepared : Prepared, optional
        The keys and shares that the clients sent in the previous round.
    """

    def __init__(
        self,
        name: str,
        run: RunSettings,
        weights: Mapping[int, int],
        ask: Ask,
        drop: Callable[[int, str], None],
        *,
        following: str = "",
        prepared: Prepared | None = None,
    ) -> None:
        self.name = name
        self.refusal = ""
        """The reason why the round failed; empty if it has not failed."""
        self.prepared: Prepared | None = None
        """The keys and shares for the next round, if all clients have sent them."""
        self._run, self._weights, self._ask, self._drop = run, weights, ask, drop
        self._following, self._earlier = following, prepared
        self._public: dict[int, Answer] = {}
        self._rosters: dict[int, list[int]] = {}
        self._view = View((), 0, 0, 0)
        self._sharing: set[int] = set()
        self.total = 0

    def opened(self) -> dict[int, dict[str, Any]]:
        """Run the keys and shares stages, and return the config entries for each client's message.

        The result is empty if too few clients remain.
        """
        try:
            return self._opened()
        except TooFewError as error:
            self.refusal = str(error)
            return {}

    def _opened(self) -> dict[int, dict[str, Any]]:
        prepared = self._earlier
        if prepared is not None and prepared.name == self.name and prepared.sealed.keys() == self._weights.keys():
            self._public, self._view, sealed = prepared.public, prepared.view, prepared.sealed
            self._rosters = self._view.rosters()
        else:
            self._public = self._ask(KEYS, {client: {AGAIN: True} for client in self._weights}, _check_keys)
            if len(self._public) < 2:
                count = f"{len(self._public)} of {len(self._weights)}"
                raise TooFewError(f"{count} clients have sent their keys, but 2 are needed")
            self._view = self._view_of(self._public)
            self._rosters = self._view.rosters()
            sealed = self._sealed()
        self._sharing = set(sealed)
        while isolated := {c for c in self._sharing if len(self._near(c, self._sharing)) < self._view.threshold}:
            self._sharing -= isolated
        self._check_cohort(len(self._sharing), "shared their secrets")
        sent = {c: dict(zip(self._others(c, set(self._rosters)), shares, strict=True)) for c, shares in sealed.items()}
        self.total = sum(self._weights[client] for client in self._sharing)
        entries = {}
        for client in sorted(self._sharing):
            sources = self._others(client, self._sharing)
            shares = [sent[source][client] for source in sources]
            entries[client] = {"secure-round": self.name, "weights": self.total, "sources": sources, "shares": shares}
        return entries

    def _view_of(self, public: Mapping[int, Answer]) -> View:
        """Return a new view of the clients that have sent their keys."""
        run, signed = self._run, any(len(texts[-1]) > ROUND_KEY_BYTES for texts in public.values())
        return View.new(sorted(public), run.secure_neighbours, run.secure_threshold, signed=signed)

    def _sealed(self) -> dict[int, Answer]:
        """Return each client's encrypted shares, except for clients whose keys most of their neighbours refuse.

        If a client has refused only neighbours that are now excluded, the server removes them from the client's roster
        and asks again. If a client has refused any other neighbour, the client itself is dropped, because one vote does
        not exclude a neighbour.
        """
        refused: dict[int, dict[int, str]] = {}

        def check(client: int, answer: Answer) -> None:
            if isinstance(answer, list) and answer[:1] == [REFUSAL]:
                refused[client] = _refusals(answer[1:], set(self._others(client, set(self._rosters))))
                return
            _check_sealed(answer, self._rosters[client])

        sealed: dict[int, Answer] = {}
        pending = set(self._rosters)
        while pending := {client for client in pending if len(self._rosters[client]) >= self._view.threshold}:
            refused.clear()
            answers = self._ask(SHARES, {client: self._keys_for(client) for client in sorted(pending)}, check)
            sealed |= {client: answer for client, answer in answers.items() if client not in refused}
            excluded = excluded_by(refused, {c: self._others(c, {*sealed, *refused}) for c in self._rosters})
            for client, reason in sorted(excluded.items()):
                self._drop(client, reason)
                sealed.pop(client, None)
            pending = set(refused) - set(excluded)
            for client in sorted(pending):
                if accepted := sorted(set(refused[client]) - set(excluded)):
                    reason = refused[client][accepted[0]]
                    self._drop(client, f"it refuses the keys of client {accepted[0]}, which others accept: {reason}")
                    pending.discard(client)
                self._rosters[client] = [other for other in self._rosters[client] if other not in excluded]
        return sealed

    def _keys_for(self, client: int) -> dict[str, Any]:
        """Return the request for a client's shares."""
        return _request_for_shares(self._view, self._rosters[client], self._public)

    def unmasked(
        self, masked: Mapping[int, Words], common: bytes, numbers: int
    ) -> tuple[npt.NDArray[np.float64], list[int]] | None:
        """Return the weighted mean change of the parameters ``(d,)``, and the sums of the scores; None on failure.

        Parameters
        ----------
        masked : Mapping
            The clients' masked words.
        common : bytes
            Digest of everything that all clients have received: :func:`common_digest`.
        numbers : int
            Number of integers that follow the parameters.
        """
        try:
            total = self._unmasked(masked, digest(self._view.digest(), common))
            end = len(total) - LIMBS * numbers
            shares = [self._weights[client] / self.total for client in masked]
            return decoded(total[:end], shares, self._run.secure_range), decoded_numbers(total[end:])
        except MaskingError as error:
            self.refusal = f"{error}, so the sum of this round cannot be unmasked"
            return None

    def weight(self, clients: Collection[int]) -> int:
        """Return the total weight of some clients."""
        return sum(self._weights[client] for client in clients)

    def _unmasked(self, masked: Mapping[int, Words], context: bytes) -> Words:
        survivors = set(masked)
        for client in self._sharing:
            if client in survivors or self._near(client, survivors):
                self._check_threshold(client, survivors, "sent their updates")
        if not connected(survivors, self._rosters):
            raise TooFewError("the remaining clients share no secrets with each other")
        self._check_cohort(len(survivors), "sent their updates")
        signed, public = self._signed(sorted(survivors))
        self._check_cohort(len(signed), "signed the list of survivors")
        answers = self._revealed(signed, public)
        shares: dict[int, dict[int, bytes]] = {client: {} for client in self._sharing}
        for sender, answer in answers.items():
            for client, share in zip(self._near(sender, self._sharing), answer, strict=True):
                shares[client][self._rosters[client].index(sender)] = share
        total = np.add.reduce([masked[client] for client in sorted(survivors)], dtype=np.uint32)
        for client in sorted(self._sharing):
            near = self._near(client, survivors)
            if not near:
                continue
            self._check_threshold(client, set(answers), "sent their shares")
            secret = combined(shares[client], self._view.threshold)
            if client in survivors:
                total -= own_mask(secret, context, len(total))
                continue
            private = private_key(secret)
            if public_key(private) != self._public[client][0]:
                raise MaskingError(f"the shares of client {client}'s private key are wrong")
            for other in near:  # subtract the masks that the neighbours have added for this client
                key = self._public[other][0]
                total += pair_mask(private, key, client, other, context, len(total))
        return total

    def _signed(self, survivors: list[int]) -> tuple[dict[int, Answer], dict[int, Answer]]:
        """Return the clients' signatures on the list of survivors, and their keys for the next round."""
        following = {NEXT: self._following} if self._following else {}
        public: dict[int, Answer] = {}

        def check(client: int, answer: Answer) -> None:
            _check_signature(answer[:SIGNED_TEXTS], SIGNED_TEXTS)
            if keys := answer[SIGNED_TEXTS:]:
                _check_keys(client, keys)
                public[client] = keys

        answers = self._ask(SURVIVORS, {c: {"survivors": survivors, **following} for c in survivors}, check)
        return {client: answer[:SIGNED_TEXTS] for client, answer in answers.items()}, public

    def _revealed(self, signed: Mapping[int, Answer], public: Mapping[int, Answer]) -> dict[int, Answer]:
        """Return the shares that the clients reveal, and store their keys and shares for the next round."""
        signers = sorted(signed)
        texts = [text for client in signers for text in signed[client]]
        requests: dict[int, dict[str, Any]] = {c: {"signers": signers, "signatures": texts} for c in signers}
        view, rosters = self._view, dict[int, list[int]]()
        if self._following and public.keys() == self._weights.keys() == signed.keys():
            view = self._view_of(public)
            rosters = view.rosters()
            for client, roster in rosters.items():
                requests[client] |= {NEXT: self._following, **_request_for_shares(view, roster, public)}
        sealed: dict[int, Answer] = {}

        def check(client: int, answer: Answer) -> None:
            count = len(self._near(client, self._sharing))
            _check(answer[:count], count, SECRET_BYTES)
            next_shares = answer[count:]
            if next_shares and next_shares[0] != REFUSAL:
                _check_sealed(next_shares, rosters.get(client, [client]))
                sealed[client] = next_shares

        answers = self._ask(UNMASK, requests, check)
        if rosters and sealed.keys() == rosters.keys():
            self.prepared = Prepared(self._following, view, dict(public), sealed)
        return {client: answer[: len(self._near(client, self._sharing))] for client, answer in answers.items()}

    def _check_threshold(self, client: int, present: set[int], action: str) -> None:
        """Raise :class:`TooFewError` if too few neighbours of a client are present."""
        if (count := len(self._near(client, present))) < self._view.threshold:
            self._raise_too_few(count, len(self._rosters[client]), action, self._view.threshold)

    def _check_cohort(self, count: int, action: str) -> None:
        """Raise :class:`TooFewError` if too few clients of the whole cohort are present."""
        if count < self._view.cohort_threshold:
            self._raise_too_few(count, len(self._weights), action, self._view.cohort_threshold)

    def _raise_too_few(self, count: int, size: int, action: str, needed: int) -> None:
        fraction = self._run.secure_threshold
        raise TooFewError(f"{count} of {size} clients have {action}, but secure-threshold = {fraction} needs {needed}")

    def _near(self, client: int, among: set[int]) -> list[int]:
        return [other for other in self._rosters[client] if other in among]

    def _others(self, client: int, among: set[int]) -> list[int]:
        return [other for other in self._near(client, among) if other != client]


def excluded_by(refused: Mapping[int, Mapping[int, str]], neighbours: Mapping[int, Sequence[int]]) -> dict[int, str]:
    """Return the reason for excluding each client whose keys more than half of its neighbours refuse.

    Parameters
    ----------
    refused : Mapping
        For each client that refuses keys, the reason for each client it refuses.
    neighbours : Mapping
        For each client, the neighbours that have replied.
    """
    excluded = {}
    for client in sorted({client for reasons in refused.values() for client in reasons}):
        refusers = [other for other in neighbours[client] if client in refused.get(other, {})]
        if 2 * len(refusers) > len(neighbours[client]):
            count = f"{len(refusers)} of {len(neighbours[client])} clients refuse its keys"
            excluded[client] = (
                f"{count}: {refused[refusers[0]][client]}; if sites sign their keys, its node config needs "
                "signing-key and trusted-keys, and every site needs its public key"
            )
    return excluded


def masked_shape(shapes: Iterable[tuple[int, ...]], numbers: int) -> tuple[int]:
    """Return the shape of a masked update: words for the parameters, the weight and the scores."""
    return (sum(map(math.prod, shapes)) + 1 + LIMBS * numbers,)


def read_masked(content: RecordDict, size: int, num_train: int | None = None) -> Masked:
    """Return the masked words in a reply, and its metrics.

    Raises :class:`BadReplyError` if the words have the wrong number or type, or if, after training, the number of
    samples is not ``num_train``. A malformed reply may raise any of :data:`~posy.strategies.replies.UNREADABLE`.
    """
    record, metrics = record_in(content, "arrays", ArrayRecord), read_metrics(content)
    check_size(record, {MASKED: (size,)})
    words = record[MASKED].numpy()
    if words.shape != (size,):
        raise BadReplyError(f"masked words of shape {words.shape} instead of {(size,)}")
    if words.dtype != np.uint32:
        raise BadReplyError(f"masked numbers of type {words.dtype} instead of uint32")
    if num_train is not None:
        check_enrolled("num-examples", metrics["num-examples"], num_train)
    return words, metrics


def common_digest(config: Mapping[str, Any], arrays: NDArrays) -> bytes:
    """Return a digest of everything that all clients of a round receive; masks with different digests do not cancel.

    Without the digest, a server could send one client a different model, learning rate or sum of weights. It could then
    recognise this client's update in the sum. The digest also covers entries that Posy does not use.

    Parameters
    ----------
    config : mapping
        The config of a message to a client. The entries in :data:`PER_CLIENT` are ignored.
    arrays : list of numpy.ndarray
        The arrays that all clients receive.
    """
    entries = [
        f"{key} = {type(config[key]).__name__} {config[key]!r}" for key in sorted(config) if key not in PER_CLIENT
    ]
    parts: list[Any] = [str(len(entries)), *entries]
    for array in arrays:
        parts += [f"{array.dtype.str} {array.shape}", array]
    return digest(*parts)


def _request_for_shares(view: View, roster: list[int], public: Mapping[int, Answer]) -> dict[str, Any]:
    """Return the request for a client's shares: the round's view, the client's neighbours and their keys."""
    keys = [key for other in roster for key in public[other]]
    return {**view.entries(), "roster": roster, "public-keys": keys}


def _check_sealed(answer: Any, roster: Sequence[int]) -> None:
    _check(answer, len(roster) - 1, NONCE_BYTES + 2 * SECRET_BYTES + TAG_BYTES)


def _check(answer: Any, count: int, size: int) -> None:
    if not isinstance(answer, list) or [type(text) for text in answer] != [bytes] * count:
        raise BadReplyError(f"the reply is not a list of {count} byte strings")
    if any(len(text) != size for text in answer):
        raise BadReplyError(f"byte strings of lengths {[len(text) for text in answer]} instead of {size}")


def _refusals(texts: Sequence[Any], neighbours: set[int]) -> dict[int, str]:
    """Return the reason for each refused neighbour; raise :class:`BadReplyError` if the reply is malformed."""
    refused = {}
    for text in texts:
        number, _, reason = text.decode(errors="replace").partition(" ") if isinstance(text, bytes) else ("", "", "")
        if not number.isdecimal() or int(number) not in neighbours or len(text) > MAX_REFUSAL:
            raise BadReplyError("a refusal of keys that does not name a neighbour")
        refused[int(number)] = reason
    if not refused:
        raise BadReplyError("a refusal of keys that does not name a neighbour")
    return refused


def _check_keys(client: int, answer: Answer) -> None:
    if not isinstance(answer, list):
        raise BadReplyError("the reply is not a list of byte strings")
    _check(answer[:2], 2, KEY_BYTES)
    for key in answer[:2]:
        check_public(key)
    _check_signature(answer[2:], SIGNED_TEXTS)


def _check_signature(texts: Any, count: int) -> None:
    if not isinstance(texts, list) or [type(text) for text in texts] != [bytes] * count:
        raise BadReplyError("a malformed signature")
    if max(map(len, texts)) > MAX_SIGNATURE:
        raise BadReplyError("a malformed signature")
