"""Secure aggregation on the server: SecAgg+ (Bell et al., 2020), in which the server learns only the sum of updates.

A round has four stages:

1. Each client sends its public keys.
2. Each client sends encrypted shares of two secrets to its neighbours.
3. Each client trains, and sends its update under masks.
4. Each client reveals one share for each neighbour: of its self-mask if the neighbour has sent its update, else of its
   private key. The server computes the masks in the sum from these shares and subtracts them.

The client's side, which does not trust the server, is :mod:`posy.client_app.secure_aggregation`.
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
"""The stages of a round other than the training."""
REFUSAL = b"refused"
"""First text of the answer of a client that refuses some neighbours' keys; one text for each neighbour follows."""
MAX_REFUSAL = 300
"""Most bytes of the text for a refused neighbour: its index, a space and the reason."""
KEY_TEXTS, MAX_SIGNATURE = 4, 1000
"""Number of texts of a client's keys (two keys, a signature, the signer), and most bytes of each of the last two."""
Answer = list[bytes]
Ask = Callable[[str, Mapping[int, Mapping[str, Any]], Callable[[int, Answer], None]], dict[int, Answer]]
"""Sends the requests of a stage, by client, and returns the answers that pass a check, by client."""


class TooFewError(MaskingError):
    """Too few clients remain to unmask the sum of a round."""


def threshold_of(size: int, fraction: float) -> int:
    """Return the number of clients among ``size`` neighbours, the client included, that must finish: above half."""
    return max(2, size // 2 + 1, math.ceil(fraction * size - 1e-9))


def neighbourhoods(clients: Sequence[int], neighbours: int) -> dict[int, list[int]]:
    """Return the sorted neighbours of each client, itself included.

    With ``neighbours`` = 0, or with few clients, all clients are neighbours. Otherwise the clients form a ring in
    random order (Bell et al.), with the same number of neighbours on either side. An odd number is rounded up.
    """
    ring, reach = list(clients), -(-neighbours // 2)
    if not neighbours or 2 * reach + 1 >= len(ring):
        return {client: sorted(ring) for client in ring}
    secrets.SystemRandom().shuffle(ring)
    near = range(-reach, reach + 1)
    return {client: sorted(ring[(index + step) % len(ring)] for step in near) for index, client in enumerate(ring)}


def connected(clients: set[int], rosters: Mapping[int, Sequence[int]]) -> bool:
    """Return whether the graph of some clients and their neighbours is connected.

    In a graph with several components the server would learn the sum of each component.
    """
    reached, frontier = set[int](), sorted(clients)[:1]
    while frontier:
        client = frontier.pop()
        reached.add(client)
        frontier += [other for other in rosters[client] if other in clients and other not in reached]
    return reached == clients


class SecureRound:
    """The server's side of one round.

    Parameters
    ----------
    name : str
        Name of the round, unique in the run.
    run : RunSettings
        The settings.
    weights : Mapping of int to int
        Weight of each client of the cohort, by index.
    ask : callable
        Sends the messages of a stage, and returns the answers.
    drop : callable
        Records that a client is dropped from the round, with the reason.
    """

    def __init__(
        self, name: str, run: RunSettings, weights: Mapping[int, int], ask: Ask, drop: Callable[[int, str], None]
    ) -> None:
        self.name = name
        self.refusal = ""
        """The reason why the round fails; empty unless it fails."""
        self._run, self._weights, self._ask, self._drop = run, weights, ask, drop
        self._public: dict[int, Answer] = {}
        self._rosters: dict[int, list[int]] = {}
        self._sharing: set[int] = set()
        self._context = b""
        self.total = 0

    def opened(self) -> dict[int, dict[str, Any]]:
        """Run the stages of keys and shares; return the config entries of each client's training message.

        The result is empty if too few clients remain.
        """
        try:
            return self._opened()
        except TooFewError as error:
            self.refusal = str(error)
            return {}

    def _opened(self) -> dict[int, dict[str, Any]]:
        self._public = self._ask(KEYS, {client: {} for client in self._weights}, _check_keys)
        if len(self._public) < 2:
            raise TooFewError(f"{len(self._public)} of {len(self._weights)} clients have sent their keys, 2 are needed")
        self._rosters = neighbourhoods(sorted(self._public), self._run.secure_neighbours)
        sealed = self._sealed()
        self._sharing = set(sealed)
        while isolated := {c for c in self._sharing if len(self._near(c, self._sharing)) < self._threshold(c)}:
            self._sharing -= isolated
        if not self._sharing:
            few = "%s of %s clients have shared their secrets, secure-threshold = %g needs %s"
            needed = min(map(self._threshold, self._rosters))
            raise TooFewError(few % (len(sealed), len(self._weights), self._run.secure_threshold, needed))
        sent = {c: dict(zip(self._others(c, set(self._rosters)), shares, strict=True)) for c, shares in sealed.items()}
        self.total = sum(self._weights[client] for client in self._sharing)
        entries = {}
        for client in sorted(self._sharing):
            sources = self._others(client, self._sharing)
            shares = [sent[source][client] for source in sources]
            entries[client] = {"secure-round": self.name, "weights": self.total, "sources": sources, "shares": shares}
        return entries

    def _sealed(self) -> dict[int, Answer]:
        """Return each client's encrypted shares, without the clients whose keys most of their neighbours refuse.

        A client that refuses neighbours receives another request, with a roster without the excluded clients. A client
        that refuses further clients is dropped itself, because one vote does not exclude a client.
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
        """Return the request for a client's shares: its neighbours, their keys and the threshold."""
        roster = self._rosters[client]
        keys = [key for other in roster for key in self._public[other]]
        return {"roster": roster, "public-keys": keys, "threshold": self._threshold(client)}

    def summed(self, updates: Sequence[Update], settings: str, rate: float, references: NDArrays) -> Update | None:
        """Return the weighted mean of masked updates as a single update, or None if the round fails.

        Parameters
        ----------
        updates : sequence of Update
            Masked updates of the clients.
        settings, rate : str, float
            The settings and learning rate in the messages to all clients.
        references : list of numpy.ndarray
            The arrays from which all clients started.
        """
        try:
            self._context = context_of(self.name, self.total, settings, rate, references)
            masked = {update.client: update.arrays[0] for update in updates}
            mean = decoded(self._unmasked(masked), [self._share(c) for c in masked], self._run.secure_range)
        except MaskingError as error:
            self.refusal = f"{error}, so the sum of this round cannot be unmasked"
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
        survivors = set(masked)
        for client in self._sharing:
            if client in survivors or self._near(client, survivors):
                self._check_threshold(client, survivors, "sent their updates")
        if not connected(survivors, self._rosters):
            raise TooFewError("the remaining clients share no secrets with each other")
        requests = {client: {"survivors": self._near(client, survivors)} for client in sorted(survivors)}

        def check(client: int, answer: Answer) -> None:
            _check(answer, len(self._near(client, self._sharing)), SECRET_BYTES)

        answers = self._ask(UNMASK, requests, check)
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
            secret = combined(shares[client], self._threshold(client))
            if client in survivors:
                total -= own_mask(secret, self._context, len(total))
                continue
            private = private_key(secret)
            if public_key(private) != self._public[client][0]:
                raise MaskingError(f"the shares of client {client}'s private key are wrong")
            for other in near:  # subtract the masks that they have added for this client
                key = self._public[other][0]
                total += pair_mask(private, key, client, other, self._context, len(total))
        return total

    def _check_threshold(self, client: int, present: set[int], done: str) -> None:
        """Raise :class:`TooFewError` if too few neighbours of a client are present."""
        roster, needed = self._rosters[client], self._threshold(client)
        if (count := len(self._near(client, present))) < needed:
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
        The refused clients of each refusing client, with the reasons.
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
    """Return the shape of a masked update: one word for each parameter, and one word for the weight."""
    return (sum(map(math.prod, shapes)) + 1,)


def check_masked(update: Update) -> None:
    """Raise :class:`BadReplyError` for a masked update of the wrong type."""
    if update.arrays[0].dtype != np.uint32:
        raise BadReplyError(f"masked numbers of type {update.arrays[0].dtype} instead of uint32")


def context_of(name: str, weights: int, settings: str, rate: float, references: NDArrays) -> bytes:
    """Return the context of all masks of a round; masks of different contexts do not cancel.

    If the server sent one client another model, learning rate or sum of weights, it could otherwise recognise this
    client's update in the sum.
    """
    return digest(name, str(weights), settings, repr(rate), *references)


def _check(answer: Any, count: int, size: int) -> None:
    if not isinstance(answer, list) or [type(text) for text in answer] != [bytes] * count:
        raise BadReplyError(f"an answer without the expected {count} texts")
    if any(len(text) != size for text in answer):
        raise BadReplyError(f"texts of {[len(text) for text in answer]} bytes instead of {size}")


def _refusals(texts: Sequence[Any], neighbours: set[int]) -> dict[int, str]:
    """Return the refused neighbours in an answer with the reasons; raise :class:`BadReplyError` if it is malformed."""
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
        raise BadReplyError("an answer without texts")
    _check(answer[:2], 2, KEY_BYTES)
    for key in answer[:2]:
        check_public(key)
    signature = answer[2:]
    if [type(text) for text in signature] != [bytes] * (KEY_TEXTS - 2) or max(map(len, signature)) > MAX_SIGNATURE:
        raise BadReplyError("keys with a malformed signature")
