"""Secure aggregation on the server: SecAgg+ (Bell et al., 2020), which shows it the sum of the clients' updates only.

A round has four messages. Each client tells its public keys; shares two secrets out to its neighbours, encrypted;
trains, and hands in its update under masks; and tells shares of secrets, of each neighbour one: of the own mask of one
that has handed in, of the private key of one that has not. With them the masks in the sum can be told and taken away.
The client's side, which must not rely on any of this, is :mod:`posy.client_app.secure_aggregation`.
"""

import math
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from flwr.common.typing import NDArrays

from posy.strategies.masking import (
    KEY_BYTES,
    NONCE_BYTES,
    SECRET_BYTES,
    TAG_BYTES,
    MaskingError,
    Words,
    check_public,
    combined,
    decoded,
    digest,
    own_mask,
    pair_mask,
    private_key,
    public_key,
)
from posy.strategies.replies import BadReplyError, Update
from posy.strategies.settings import RunSettings

KEYS, SHARES, UNMASK = "keys", "shares", "unmask"
"""The stages of a round, besides the training."""
REFUSAL = b"refused"
"""First text of the answer of a client that does not trust the keys of some neighbours; a text for each follows."""
MAX_REFUSAL = 300
"""Most bytes of the text for a neighbour: its index, a space and the reason."""
KEY_TEXTS, MAX_SIGNATURE = 4, 1000
"""Texts that a client's keys consist of: two keys, a signature, who signed; and the most bytes of the last two."""
Answer = list[bytes]
Ask = Callable[[str, Mapping[int, Mapping[str, Any]], Callable[[int, Answer], None]], dict[int, Answer]]
"""Asks clients for a stage, by index with what they are told, and returns the answers that stand a check."""


class TooFewError(MaskingError):
    """So few clients are left that nothing of a round may be unmasked."""


def threshold_of(size: int, fraction: float) -> int:
    """Return how many of a client and its neighbours, together ``size``, must stay to the end: more than half."""
    return max(2, size // 2 + 1, math.ceil(fraction * size - 1e-9))


def neighbourhoods(clients: Sequence[int], neighbours: int) -> dict[int, list[int]]:
    """Return each client with its neighbours, sorted: all clients, or (Bell et al.) a ring in random order.

    In a ring each client has as many neighbours to either side; an odd number is rounded up.
    """
    ring, reach = list(clients), -(-neighbours // 2)
    if not neighbours or 2 * reach + 1 >= len(ring):
        return {client: sorted(ring) for client in ring}
    secrets.SystemRandom().shuffle(ring)
    near = range(-reach, reach + 1)
    return {client: sorted(ring[(place + step) % len(ring)] for step in near) for place, client in enumerate(ring)}


def connected(clients: set[int], rosters: Mapping[int, Sequence[int]]) -> bool:
    """Tell whether some clients hang together: where they fall apart, the sum of each part would be seen."""
    reached, ahead = set[int](), sorted(clients)[:1]
    while ahead:
        client = ahead.pop()
        reached.add(client)
        ahead += [other for other in rosters[client] if other in clients and other not in reached]
    return reached == clients


class SecureRound:
    """The server's side of one round.

    Parameters
    ----------
    name : str
        Name of the round, no two of a run have the same.
    run : RunSettings
        The settings.
    weights : Mapping of int to int
        What each client of the cohort counts, by index.
    ask : callable
        Sends the messages of a stage.
    drop : callable
        Records that a client is left out of the round, with the reason.
    """

    def __init__(
        self, name: str, run: RunSettings, weights: Mapping[int, int], ask: Ask, drop: Callable[[int, str], None]
    ) -> None:
        self.name = name
        self.refusal = ""
        """Why the round has no result; empty as long as nothing is wrong."""
        self._run, self._weights, self._ask, self._drop = run, weights, ask, drop
        self._public: dict[int, Answer] = {}
        self._rosters: dict[int, list[int]] = {}
        self._sharing: set[int] = set()
        self._context = b""
        self.total = 0

    def opened(self) -> dict[int, dict[str, Any]]:
        """Let the clients exchange keys and shares; return what each is told with its training, none if too few."""
        try:
            return self._opened()
        except TooFewError as error:
            self.refusal = str(error)
            return {}

    def _opened(self) -> dict[int, dict[str, Any]]:
        self._public = self._ask(KEYS, {client: {} for client in self._weights}, _check_keys)
        if len(self._public) < 2:
            raise TooFewError(f"{len(self._public)} of {len(self._weights)} clients have told their keys, 2 are needed")
        self._rosters = neighbourhoods(sorted(self._public), self._run.secure_neighbours)
        sealed = self._sealed()
        self._sharing = set(sealed)
        while alone := {c for c in self._sharing if len(self._near(c, self._sharing)) < self._threshold(c)}:
            self._sharing -= alone
        if not self._sharing:
            few = "%s of %s clients have shared their secrets, secure-threshold = %g needs %s"
            needed = min(map(self._threshold, self._rosters))
            raise TooFewError(few % (len(sealed), len(self._weights), self._run.secure_threshold, needed))
        sent = {c: dict(zip(self._others(c, set(self._rosters)), shares, strict=True)) for c, shares in sealed.items()}
        self.total = sum(self._weights[client] for client in self._sharing)
        told = {}
        for client in sorted(self._sharing):
            sources = self._others(client, self._sharing)
            shares = [sent[source][client] for source in sources]
            told[client] = {"secure-round": self.name, "weights": self.total, "sources": sources, "shares": shares}
        return told

    def _sealed(self) -> dict[int, Answer]:
        """Return the sealed shares of each client's secrets, without the clients whose keys most neighbours refuse.

        A client that refuses neighbours is asked again with a roster without those that most of their neighbours
        refuse. A client that refuses others is left out itself: one vote excludes nobody.
        """
        refused: dict[int, dict[int, str]] = {}

        def check(client: int, answer: Answer) -> None:
            if isinstance(answer, list) and answer[:1] == [REFUSAL]:
                refused[client] = _refusals(answer[1:], set(self._others(client, set(self._rosters))))
                return
            _check(answer, len(self._rosters[client]) - 1, NONCE_BYTES + 2 * SECRET_BYTES + TAG_BYTES)

        sealed: dict[int, Answer] = {}
        asking = set(self._rosters)
        while asking := {client for client in asking if len(self._rosters[client]) > 1}:
            refused.clear()
            answers = self._ask(SHARES, {client: self._keys_for(client) for client in sorted(asking)}, check)
            sealed |= {client: answer for client, answer in answers.items() if client not in refused}
            excluded = excluded_by(refused, {c: self._others(c, {*sealed, *refused}) for c in self._rosters})
            for client, reason in sorted(excluded.items()):
                self._drop(client, reason)
                sealed.pop(client, None)
            asking = set(refused) - set(excluded)
            for client in sorted(asking):
                if accepted := sorted(set(refused[client]) - set(excluded)):
                    reason = refused[client][accepted[0]]
                    self._drop(client, f"it refuses the keys of client {accepted[0]}, which others accept: {reason}")
                    asking.discard(client)
                self._rosters[client] = [other for other in self._rosters[client] if other not in excluded]
        return sealed

    def _keys_for(self, client: int) -> dict[str, Any]:
        """Return what a client is told of its neighbours' keys."""
        roster = self._rosters[client]
        keys = [key for other in roster for key in self._public[other]]
        return {"roster": roster, "public-keys": keys, "threshold": self._threshold(client)}

    def summed(self, updates: Sequence[Update], settings: str, rate: float, references: NDArrays) -> Update | None:
        """Return the weighted mean of some masked updates as the update of one client; None for a refusal.

        All clients were sent the same settings, learning rate, and arrays that their updates are changes of.
        """
        try:
            self._context = context_of(self.name, self.total, settings, rate, references)
            masked = {update.client: update.arrays[0] for update in updates}
            mean = decoded(self._unmasked(masked), [self._share(c) for c in masked], self._run.secure_range)
        except MaskingError as error:
            self.refusal = f"{error}, so the sum of this round is not told"
            return None
        ends = np.cumsum([reference.size for reference in references])[:-1]
        arrays = [
            (reference + change.reshape(reference.shape)).astype(np.float32)
            for reference, change in zip(references, np.split(mean, ends), strict=True)
        ]
        loss = float(np.mean([float(update.loss) for update in updates]))
        weight = sum(self._weights[client] for client in masked)
        return Update(arrays, loss, num_examples=sum(update.num_examples for update in updates), weight=weight)

    def _unmasked(self, masked: Mapping[int, Words]) -> Words:
        """Return the sum of masked updates without the masks."""
        there = set(masked)
        for client in self._sharing:
            if client in there or self._near(client, there):
                self._suffices(client, there, "handed in")
        if not connected(there, self._rosters):
            raise TooFewError("the clients that are left share no secrets with each other")
        asked = {client: {"survivors": self._near(client, there)} for client in sorted(there)}

        def check(client: int, answer: Answer) -> None:
            _check(answer, len(self._near(client, self._sharing)), SECRET_BYTES)

        answers = self._ask(UNMASK, asked, check)
        shares: dict[int, dict[int, bytes]] = {client: {} for client in self._sharing}
        for teller, answer in answers.items():
            for client, share in zip(self._near(teller, self._sharing), answer, strict=True):
                shares[client][self._rosters[client].index(teller)] = share
        total = np.add.reduce([masked[client] for client in sorted(there)], dtype=np.uint32)
        for client in sorted(self._sharing):
            near = self._near(client, there)
            if not near:
                continue
            self._suffices(client, set(answers), "told their shares")
            secret = combined(shares[client], self._threshold(client))
            if client in there:
                total -= own_mask(secret, self._context, len(total))
                continue
            private = private_key(secret)
            if public_key(private) != self._public[client][0]:
                raise MaskingError(f"shares of client {client}'s key are wrong")
            for other in near:  # what they have added for it
                key = self._public[other][0]
                total += pair_mask(private, key, client, other, self._context, len(total))
        return total

    def _suffices(self, client: int, there: set[int], done: str) -> None:
        roster, needed = self._rosters[client], self._threshold(client)
        if (count := len(self._near(client, there))) < needed:
            few = "%s of %s clients have %s, secure-threshold = %g needs %s"
            raise TooFewError(few % (count, len(roster), done, self._run.secure_threshold, needed))

    def _near(self, client: int, among: set[int]) -> list[int]:
        return [other for other in self._rosters[client] if other in among]

    def _others(self, client: int, among: set[int]) -> list[int]:
        return [other for other in self._near(client, among) if other != client]

    def _threshold(self, client: int) -> int:
        return threshold_of(len(self._rosters[client]), self._run.secure_threshold)

    def _share(self, client: int) -> float:
        return self._weights[client] / self.total


def excluded_by(refused: Mapping[int, Mapping[int, str]], neighbours: Mapping[int, Sequence[int]]) -> dict[int, str]:
    """Return the clients whose keys more than half of their neighbours refuse, each with the reason.

    Parameters
    ----------
    refused : Mapping
        For each refusing client, the clients that it refuses with its reasons.
    neighbours : Mapping
        The neighbours of each client that have answered.
    """
    excluded = {}
    for client in sorted({client for reasons in refused.values() for client in reasons}):
        by = [other for other in neighbours[client] if client in refused.get(other, {})]
        if 2 * len(by) > len(neighbours[client]):
            count = f"{len(by)} of {len(neighbours[client])} clients refuse its keys"
            excluded[client] = (
                f"{count}: {refused[by[0]][client]}; where sites sign their keys, its node config needs signing-key "
                "and trusted-keys, and every site its public key"
            )
    return excluded


def masked_shape(shapes: Sequence[tuple[int, ...]]) -> tuple[int]:
    """Return the shape of a masked update: a word for each parameter, and one for the weight."""
    return (sum(map(math.prod, shapes)) + 1,)


def check_masked(update: Update, num_train: int) -> None:
    """Raise :class:`BadReplyError` for a masked update that cannot be one of a client with so many samples."""
    if update.arrays[0].dtype != np.uint32:
        raise BadReplyError(f"masked numbers of type {update.arrays[0].dtype} instead of uint32")
    if update.num_examples != num_train:
        raise BadReplyError(f"num-examples = {update.num_examples}, it has joined with {num_train}")


def context_of(name: str, weights: int, settings: str, rate: float, references: NDArrays) -> bytes:
    """Return what enters every mask: the masks of clients that were told otherwise do not cancel.

    Were one client sent another model, learning rate or sum of the weights than the others, its update could be told
    from the sum.
    """
    return digest(name, str(weights), settings, repr(rate), *references)


def _check(answer: Any, count: int, size: int) -> None:
    if not isinstance(answer, list) or [type(text) for text in answer] != [bytes] * count:
        raise BadReplyError(f"an answer that does not hold {count} texts")
    if any(len(text) != size for text in answer):
        raise BadReplyError(f"texts of {[len(text) for text in answer]} bytes instead of {size}")


def _refusals(texts: Sequence[Any], others: set[int]) -> dict[int, str]:
    """Return the neighbours that an answer refuses, with the reasons; :class:`BadReplyError` if it is malformed."""
    refused = {}
    for text in texts:
        number, _, reason = text.decode(errors="replace").partition(" ") if isinstance(text, bytes) else ("", "", "")
        if not number.isdecimal() or int(number) not in others or len(text) > MAX_REFUSAL:
            raise BadReplyError("a refusal of keys that names no neighbour")
        refused[int(number)] = reason
    if not refused:
        raise BadReplyError("a refusal of keys that names no neighbour")
    return refused


def _check_keys(client: int, answer: Answer) -> None:
    if not isinstance(answer, list):
        raise BadReplyError("an answer without texts")
    _check(answer[:2], 2, KEY_BYTES)
    for key in answer[:2]:
        check_public(key)
    signature = answer[2:]
    if [type(text) for text in signature] != [bytes] * (KEY_TEXTS - 2) or max(map(len, signature)) > MAX_SIGNATURE:
        raise BadReplyError("keys with what is no signature")
