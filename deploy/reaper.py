"""Kills process groups when the process that started them has exited for any reason.

The process that starts this program writes the id of each group to the program's standard input. It writes the negated
id once the group has exited. When the input ends, for example because the process was killed, the program kills the
remaining groups.
"""

import contextlib
import os
import signal
import sys


def main() -> None:
    """Read groups until the end of the input, then kill the remaining groups."""
    groups: set[int] = set()
    for line in sys.stdin:
        number = int(line)
        if number > 0:
            groups.add(number)
        else:
            groups.discard(-number)
    for group in groups:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    main()
