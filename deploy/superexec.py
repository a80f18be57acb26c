"""The process that starts apps: ``python -m posy.deploy.superexec`` takes the arguments of ``flower-superexec``.

The process is Flower's own, with two changes. Flower passes a task's token on the app's command line, which every user
of the machine can read. Here, the app reads the token from an unnamed file. If the SuperLink refused a request because
its signature was too old, for example after this process was suspended, Flower would terminate the process and the
running apps. Here, the refusal looks like a failed connection, after which Flower signs the request again.
"""

import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from importlib.metadata import entry_points
from typing import Any

import httpx

from posy.flower import add_times_to_log

TOKEN, TOKEN_FILE = "--token", "--token-file"
MOST_REFUSALS = 3
"""Maximum number of consecutive refused requests that Flower signs again."""

Sending = Callable[..., httpx.Response]


def main() -> None:
    """Run the process."""
    add_times_to_log()
    vars(subprocess)["Popen"] = HidingPopen
    httpx.Client.send = signed_again(httpx.Client.send)  # type: ignore[method-assign]
    [command] = entry_points(group="console_scripts", name="flower-superexec")
    sys.argv[0] = command.name
    command.load()()


class HidingPopen(subprocess.Popen):  # type: ignore[type-arg]
    """A process whose option ``--token`` is replaced by an unnamed file, which only this process can open."""

    def __init__(self, args: Sequence[str], **options: Any) -> None:
        if TOKEN not in args:
            super().__init__(args, **options)
            return
        position = args.index(TOKEN)
        with tempfile.TemporaryFile() as file:
            file.write(args[position + 1].encode())
            file.flush()
            file.seek(0)
            hidden = [*args[:position], TOKEN_FILE, f"/dev/fd/{file.fileno()}", *args[position + 2 :]]
            super().__init__(hidden, pass_fds=[file.fileno()], **options)


def signed_again(send: Sending) -> Sending:
    """Wrap an HTTP client's ``send`` so that a refused signature raises an error, which makes Flower sign again."""
    refusals = 0

    def checked(client: httpx.Client, request: httpx.Request, **options: Any) -> httpx.Response:
        nonlocal refusals
        response = send(client, request, **options)
        if response.status_code != httpx.codes.UNAUTHORIZED:
            refusals = 0
        elif refusals < MOST_REFUSALS:
            refusals += 1
            raise httpx.ReadError("the signature of the request was refused", request=request)
        return response

    return checked


if __name__ == "__main__":
    main()
