"""Start runs in processes forked from a server that has already imported the modules that all runs need.

Otherwise, these imports would take most of the time of a short run.
"""

import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing import forkserver
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from posy.forked import CORES

CONTEXT = multiprocessing.get_context("forkserver")
IMPORTED = ["posy.server_app.app", "sklearn.datasets", "flwr_datasets.partitioner"]
"""Modules that the fork server imports once."""
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
"""Environment variables that limit numerical libraries to one thread. The libraries read them on import."""


class WarmProcess:
    """A process that calls a function, writes the output to ``log``, and uses the result as its exit status.

    The process uses at most ``cores`` cores. The function must be at the top level of a module, and its arguments
    must be picklable.
    """

    def __init__(self, target: Callable[..., int], *arguments: Any, log: Path, cores: int) -> None:
        self._process: ForkServerProcess = CONTEXT.Process(target=_call, args=(target, arguments, str(log), cores))
        with _environment(ONE_THREAD):
            CONTEXT.set_forkserver_preload(IMPORTED)
            forkserver.ensure_running()
            self._process.start()

    def poll(self) -> int | None:
        """Return the exit status, negative if a signal killed the process, or None if the process is still running."""
        return self._process.exitcode

    def terminate(self) -> None:
        """Terminate the process."""
        self._process.terminate()

    def wait(self) -> int:
        """Wait for the process to exit, and return its exit status."""
        self._process.join()
        return self._process.exitcode or 0


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables within a context."""
    old_values = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in old_values.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _call(target: Callable[..., int], arguments: tuple[Any, ...], log: str, cores: int) -> None:
    """Call a function in this process, write its output to ``log``, and exit with its result as the exit status."""
    os.environ[CORES] = str(cores)
    with open(os.devnull) as null_device, open(log, "w", encoding="utf-8") as file:  # noqa: PTH123
        os.dup2(null_device.fileno(), 0)
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    status = target(*arguments)
    sys.stdout.flush()
    sys.stderr.flush()
    sys.exit(status)
