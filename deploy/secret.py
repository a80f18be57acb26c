"""The secret that a process must know to take the tasks of a SuperLink or a node.

Every user of a machine can reach its loopback addresses. Without a secret, such a user could take a task and so read
the message, the node config and the model in it. Flower 1.39 compares signatures of the requests with the secret.
"""

import os
import secrets
import time
from pathlib import Path

import httpx
from flwr.supercore.constant import (
    SUPEREXEC_AUTH_BODY_SHA256_HEADER,
    SUPEREXEC_AUTH_NONCE_HEADER,
    SUPEREXEC_AUTH_SIGNATURE_HEADER,
    SUPEREXEC_AUTH_TIMESTAMP_HEADER,
)
from flwr.supercore.interceptors import SuperExecAuthHttpInterceptor
from flwr.supercore.protobuf.client import ProtobufCall, ProtobufRequestContext

OPTION = "--superexec-auth-secret-file"
"""Option of Flower's commands that names the file of the secret."""
SECRET_BYTES = 32
PROTECTED = tuple(f"/flwr.proto.Runtime/{call}" for call in ("AcquireTask", "PullPendingTasks", "ClaimTask"))
"""The calls that Flower refuses without a signature; the other calls need the token of a task."""
HEADERS = (
    SUPEREXEC_AUTH_TIMESTAMP_HEADER,
    SUPEREXEC_AUTH_NONCE_HEADER,
    SUPEREXEC_AUTH_BODY_SHA256_HEADER,
    SUPEREXEC_AUTH_SIGNATURE_HEADER,
)
RETRY_PAUSES = (0.1, 1.0, 5.0)
"""Seconds before a refused request is signed again: a suspended process sends a signature that is too old."""


class SigningInterceptor(SuperExecAuthHttpInterceptor):
    """Sign requests with the secret, and sign a refused request again."""

    def __init__(self, *, master_secret: bytes, protected_methods: object = PROTECTED) -> None:
        super().__init__(master_secret=master_secret, protected_methods=PROTECTED)

    def intercept(self, context: ProtobufRequestContext, call_next: ProtobufCall) -> httpx.Response:
        """Return the response to a signed request."""
        response = super().intercept(context, call_next)
        for seconds in RETRY_PAUSES:
            if context.rpc_method not in PROTECTED or response.status_code != httpx.codes.UNAUTHORIZED:
                break
            time.sleep(seconds)
            for name in HEADERS:
                del context.request.headers[name]
            response = super().intercept(context, call_next)
        return response


def new_secret() -> bytes:
    """Return a new secret from the operating system's randomness."""
    return secrets.token_bytes(SECRET_BYTES)


def write_secret(path: Path) -> Path:
    """Write a new secret to a file that only this user may read, in a directory that only this user may enter.

    Return the path.
    """
    path.parent.mkdir(mode=0o700, exist_ok=True)
    path.parent.chmod(0o700)
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.write(descriptor, new_secret())
    finally:
        os.close(descriptor)
    return path


def pipe_of(secret: bytes) -> tuple[str, int]:
    """Return a path from which a process can read the secret once, and the descriptor that the process must inherit.

    The secret is never on a disk.
    """
    reading, writing = os.pipe()
    try:
        os.write(writing, secret)
    finally:
        os.close(writing)
    return f"/dev/fd/{reading}", reading
