"""Map errors to the statuses of HTTP and gRPC."""

from logging import ERROR
from typing import NamedTuple

import grpc
from flwr.common.logger import log

from posy.serve.limits import ForbiddenError, NotAuthorisedError, TooLargeError, TooSlowError
from posy.serve.tensors import OverloadedError, RequestError, UnavailableError, UnknownModelError

Code = grpc.StatusCode
MAX_TEXT = 500
"""Maximum number of characters in the text of an error, because gRPC sends it in a header of limited size."""


class Status(NamedTuple):
    """The status of a failed request."""

    http: int
    grpc: grpc.StatusCode
    text: str

    @property
    def name(self) -> str:
        """The name of the status, for metrics."""
        return self.grpc.name.lower()


_STATUSES: dict[type[Exception], tuple[int, grpc.StatusCode]] = {
    NotAuthorisedError: (401, Code.UNAUTHENTICATED),
    ForbiddenError: (403, Code.PERMISSION_DENIED),
    UnknownModelError: (404, Code.NOT_FOUND),
    TooLargeError: (413, Code.RESOURCE_EXHAUSTED),
    TooSlowError: (408, Code.DEADLINE_EXCEEDED),
    RequestError: (400, Code.INVALID_ARGUMENT),
    OverloadedError: (429, Code.RESOURCE_EXHAUSTED),
    UnavailableError: (503, Code.UNAVAILABLE),
}
"""The statuses of HTTP and gRPC for each error. An error's own class comes before its base class."""


def status_of(error: Exception) -> Status:
    """Return the status for an error. The text of an unexpected error appears only in the log."""
    for kind, (http, code) in _STATUSES.items():
        if isinstance(error, kind):
            return Status(http, code, f"{error!s:.{MAX_TEXT}}")
    log(ERROR, "a request has failed: %s", error, exc_info=error)
    return Status(500, Code.INTERNAL, "the service has failed to answer; its log contains the reason")
