"""Runs in processes forked from one that has imported what every run needs, which takes most of a short run's time."""

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
"""Modules that are imported once."""
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
"""Environment that libraries read when they are loaded."""


class WarmProcess:
    """A process that does some work, which returns the exit status, on so many cores, and prints into a file.

    The work is a function of a module and what it is called with, both of which can be pickled.
    """

    def __init__(self, work: Callable[..., int], *given: Any, log: Path, cores: int) -> None:
        self._process: ForkServerProcess = CONTEXT.Process(target=_carry_out, args=(work, given, str(log), cores))
        with _environment(ONE_THREAD):
            CONTEXT.set_forkserver_preload(IMPORTED)
            forkserver.ensure_running()
            self._process.start()

    def poll(self) -> int | None:
        """Return its exit status, that of a signal negative; None if it goes on."""
        return self._process.exitcode

    def terminate(self) -> None:
        """Have it end."""
        self._process.terminate()

    def wait(self) -> int:
        """Wait until it has ended."""
        self._process.join()
        return self._process.exitcode or 0


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for a while."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _carry_out(work: Callable[..., int], given: tuple[Any, ...], log: str, cores: int) -> None:
    """Do some work in this process, and end it."""
    os.environ[CORES] = str(cores)
    with open(os.devnull) as nothing, open(log, "w", encoding="utf-8") as file:  # noqa: PTH123
        os.dup2(nothing.fileno(), 0)
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    status = work(*given)
    sys.stdout.flush()
    sys.stderr.flush()
    sys.exit(status)
