"""Limit who may call the service, how often, and how many requests it answers at once."""

import hmac
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from posy.serve.meters import Meters
from posy.serve.tensors import OverloadedError

MOST_CALLERS = 10_000
"""Maximum number of callers whose rate is remembered."""


class NotAuthorisedError(Exception):
    """A request without a valid token."""


@dataclass(frozen=True)
class Limits:
    """The limits of a service."""

    max_bytes: int = 64 << 20
    """Maximum size of a request in bytes."""
    rate: float = 0.0
    """Maximum number of requests per second from one caller; 0: no limit."""
    concurrency: int = 1024
    """Maximum number of requests that the service answers at once."""


class Gate:
    """Admits requests.

    Parameters
    ----------
    limits : Limits
        The limits.
    tokens : sequence of str
        The valid tokens; empty if callers need no token.
    meters : Meters
        Shows the number of requests in progress.
    """

    def __init__(self, limits: Limits, tokens: Sequence[str], meters: Meters) -> None:
        self.limits, self._meters = limits, meters
        self._tokens = [token.encode() for token in tokens]
        self._active = 0
        self._allowances: OrderedDict[str, tuple[float, float]] = OrderedDict()  # requests and time, keyed by caller

    @property
    def needs_token(self) -> bool:
        """Whether callers need a token."""
        return bool(self._tokens)

    def check_token(self, authorization: str) -> None:
        """Raise :class:`NotAuthorisedError` unless the header ``Authorization`` contains a valid token."""
        if not self._tokens:
            return
        scheme, _, token = authorization.partition(" ")
        offered = token.strip().encode() if scheme.lower() == "bearer" else b""
        # Compare with all tokens, so that the time does not depend on the position of the match.
        matches = [hmac.compare_digest(offered, valid) for valid in self._tokens]
        if not any(matches):
            raise NotAuthorisedError("the request needs the header `Authorization: Bearer TOKEN` with a valid token")

    @contextmanager
    def admitted(self, caller: str) -> Iterator[None]:
        """Admit a request while the context lasts, or raise :class:`OverloadedError`."""
        if self._active >= self.limits.concurrency:
            raise OverloadedError(f"the service is answering {self._active} requests; try again later")
        if self.limits.rate:
            self._spend(caller)
        self._active += 1
        self._meters.set_active(self._active)
        try:
            yield
        finally:
            self._active -= 1
            self._meters.set_active(self._active)

    def _spend(self, caller: str) -> None:
        """Count a request of a caller, whose allowance grows by ``rate`` per second up to one second's worth."""
        time_now, most = time.monotonic(), max(1.0, self.limits.rate)
        allowance, then = self._allowances.pop(caller, (most, time_now))
        allowance = min(most, allowance + (time_now - then) * self.limits.rate)
        self._allowances[caller] = (allowance - 1 if allowance >= 1 else allowance, time_now)
        if len(self._allowances) > MOST_CALLERS:
            self._allowances.popitem(last=False)
        if allowance < 1:
            raise OverloadedError(f"more than {self.limits.rate:g} requests per second; try again later")
