"""The secret that a process must know to take tasks from a SuperLink or a stock node.

Every user of a machine can reach its loopback addresses. Without a secret, such a user could take a task, and thus read
the node config and the message, including the model. Flower uses the secret to verify the signature of each request.
"""

import os
import secrets
from pathlib import Path

OPTION = "--superexec-auth-secret-file"
"""Option of Flower's commands that specifies the file with the secret."""
SECRET_BYTES = 32


def new_secret() -> bytes:
    """Return a new secret from the operating system's random source."""
    return secrets.token_bytes(SECRET_BYTES)


def write_secret(path: Path) -> Path:
    """Write a new secret to a file that only this user may read, in a directory that only this user may enter.

    The function returns the path.
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
    """Return a path from which a process can read the secret once, and a descriptor that the process must inherit.

    The secret is never written to disk.
    """
    reading, writing = os.pipe()
    try:
        os.write(writing, secret)
    finally:
        os.close(writing)
    return f"/dev/fd/{reading}", reading
