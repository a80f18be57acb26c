"""The process that starts apps: ``python -m posy.deploy.superexec`` takes the arguments of ``flower-superexec``.

It is Flower's own process with two changes. Flower passes the token of a task on the command line of the app, which
every user of the machine can read; here the app reads the token from a file without a name. If a request is refused
because its signature is too old, Posy signs it again: Flower would end this process, and with it the running apps.
"""

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import entry_points
from logging import WARNING
from types import SimpleNamespace
from typing import Any

from flwr.common.logger import log

TOKEN, TOKEN_FILE = "--token", "--token-file"


def main() -> None:
    """Run the process."""
    try:
        apply_patches()
    except (ImportError, AttributeError) as missing:
        log(WARNING, "posy: Flower's internals have changed (%s): task tokens are visible to local users", missing)
    [command] = entry_points(group="console_scripts", name="flower-superexec")
    sys.argv[0] = command.name
    command.load()()


def apply_patches() -> None:
    """Apply the changes to Flower's modules."""
    from flwr.supercore.superexec import run_superexec  # noqa: PLC0415 - Flower may lack this name
    from flwr.supercore.superexec.executor import subprocess_executor  # noqa: PLC0415

    from posy.deploy.secret import SigningInterceptor  # noqa: PLC0415

    changed = SimpleNamespace(**{**vars(subprocess), "Popen": start_with_hidden_token})
    changes: tuple[tuple[Any, str, Any], ...] = (
        (run_superexec, "SuperExecAuthHttpInterceptor", SigningInterceptor),
        (subprocess_executor, "subprocess", changed),
    )
    for module, name, _ in changes:
        getattr(module, name)
    for module, name, value in changes:
        setattr(module, name, value)


def start_with_hidden_token(command: Sequence[str], **options: Any) -> "subprocess.Popen[bytes]":
    """Start a command whose ``--token`` is replaced by a file without a name, which only the command can open."""
    if TOKEN not in command:
        return subprocess.Popen(command, **options)
    at = command.index(TOKEN)
    with tempfile.TemporaryFile() as file:
        file.write(command[at + 1].encode())
        file.flush()
        file.seek(0)
        hidden = [*command[:at], TOKEN_FILE, f"/dev/fd/{file.fileno()}", *command[at + 2 :]]
        return subprocess.Popen(hidden, pass_fds=[file.fileno()], **options)


if __name__ == "__main__":
    main()
