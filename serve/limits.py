"""Limit who may call the service, how often, how much, and how many requests it answers at once."""

import hmac
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from posy.serve.meters import Meters
from posy.serve.tensors import OverloadedError, RequestError

MOST_CALLERS = 10_000
"""Maximum number of callers whose rate is remembered."""
RECEIVE_SECONDS = 30.0
"""Time to send a request, in addition to its size divided by :data:`SLOWEST`."""
SLOWEST = 100_000
"""Bytes per second that a caller must send after :data:`RECEIVE_SECONDS`."""


class NotAuthorisedError(Exception):
    """A request without a valid token."""


class ForbiddenError(Exception):
    """A request from a web page."""


class TooLargeError(RequestError):
    """A request with more bytes than the service accepts."""


class TooSlowError(RequestError):
    """A request that did not arrive in time."""


@dataclass(frozen=True)
class Limits:
    """The limits of a service."""

    max_bytes: int = 64 << 20
    """Maximum size of a request in bytes."""
    rate: float = 0.0
    """Maximum number of requests per second from one caller; 0: no limit."""
    concurrency: int = 1024
    """Maximum number of requests that the service answers at once."""

    @property
    def max_pending_bytes(self) -> int:
        """The maximum size of all requests in progress, in bytes."""
        return 16 * self.max_bytes

    @property
    def receive_seconds(self) -> float:
        """The time to send the largest request, in seconds."""
        return RECEIVE_SECONDS + self.max_bytes / SLOWEST


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
        self.limits = limits
        self._tokens = [token.encode() for token in tokens]
        self._active = self._pending = 0
        meters.watch_active(lambda: self._active)
        self._allowances: OrderedDict[str, tuple[float, float]] = OrderedDict()  # requests and time, keyed by caller

    def check_origin(self, origin: str) -> None:
        """Raise :class:`ForbiddenError` for a request from a web page, unless callers need a token.

        A page from another machine can make this machine's browser call the service, but does not know the tokens.
        """
        if origin and not self._tokens:
            raise ForbiddenError("the service answers requests from web pages only if it has tokens")

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
    def admitted(self) -> Iterator[None]:
        """Admit a request while the context lasts, or raise :class:`OverloadedError`."""
        if self._active >= self.limits.concurrency:
            raise OverloadedError(f"the service is answering {self._active} requests; try again later")
        self._active += 1
        try:
            yield
        finally:
            self._active -= 1

    @contextmanager
    def receiving(self) -> Iterator[Callable[[int], None]]:
        """Yield a function that counts the bytes of a request, which count until the context ends.

        The function raises :class:`TooLargeError` if the request is too large, and :class:`OverloadedError` if all
        requests in progress are too large.
        """
        size = 0

        def count(received: int) -> None:
            nonlocal size
            size += received
            self._pending += received
            if size > self.limits.max_bytes:
                raise TooLargeError(f"the request has more than {self.limits.max_bytes} bytes")
            if self._pending > self.limits.max_pending_bytes:
                raise OverloadedError("the requests in progress need too much memory; try again later")

        try:
            yield count
        finally:
            self._pending -= size

    def check_rate(self, caller: str) -> None:
        """Count a request of an address, or raise :class:`OverloadedError` if it sends too many per second.

        The allowance of an address grows by ``rate`` per second, up to the allowance of one second.
        """
        if not self.limits.rate:
            return
        time_now, most = time.monotonic(), max(1.0, self.limits.rate)
        allowance, then = self._allowances.pop(caller, (most, time_now))
        allowance = min(most, allowance + (time_now - then) * self.limits.rate)
        self._allowances[caller] = (allowance - 1 if allowance >= 1 else allowance, time_now)
        if len(self._allowances) > MOST_CALLERS:
            self._allowances.popitem(last=False)
        if allowance < 1:
            raise OverloadedError(f"more than {self.limits.rate:g} requests per second; try again later")
