"""Run tasks in forked processes. Arrays go through shared memory, all other data through a pipe.

Like PyTorch's DataLoader, Posy forks the processes when it first needs them, so they start with all loaded modules and
data. Unlike threads, they do not share Python's global lock.
"""

import gc
import multiprocessing
import os
import pickle
import signal
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from mmap import mmap
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from posy.mistakes import with_traceback
from posy.settings import SettingsError
from posy.signals import ENDING

Array = npt.NDArray[Any]

ALIGNMENT = 64
"""Alignment of arrays in bytes."""
BUNDLES_PER_WORKER = 2
"""Number of bundles assigned to a process at a time: the process works on the first while the second waits."""
MAX_BUNDLE_PARCELS, MAX_BUNDLE_BYTES = 8, 8 << 20
"""Limits on the parcels and bytes in a bundle. Posy sends parcels in bundles to wake a process less often."""


CORES = "POSY_CORES"
"""Environment variable for the number of cores that a process may use. By default, it uses all available cores."""


def cores() -> int:
    """Return the number of cores that this process may use. Raise :class:`SettingsError` if the variable is invalid."""
    if value := os.environ.get(CORES, ""):
        if not value.isascii() or not value.isdigit() or not int(value):
            variable = f"the environment variable {CORES} = {value!r}"
            raise SettingsError(f"{variable}: it must be a whole number of at least 1")
        return int(value)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class WorkerDiedError(RuntimeError):
    """The process that worked on a parcel died."""


class Parcel(NamedTuple):
    """A list of arrays, and a picklable object (the head) that contains all other data."""

    head: Any
    arrays: Sequence[Array]


class Place(NamedTuple):
    """The position of an array on a shelf."""

    begin: int
    shape: tuple[int, ...]
    dtype: str
    nbytes: int

    @property
    def end(self) -> int:
        """The first byte after the array."""
        return self.begin + self.nbytes


class Shelf:
    """Memory that this process shares with its later forks. It grows as arrays are stored."""

    def __init__(self) -> None:
        self._file = os.memfd_create("posy")
        self._memory: mmap | None = None

    def put(self, arrays: Sequence[Array], begin: int = 0) -> list[Place]:
        """Copy arrays to the shelf, starting at byte ``begin``, and return their positions."""
        locations = []
        for array in arrays:
            _checked_bytes(array)
            begin = -(-begin // ALIGNMENT) * ALIGNMENT
            locations.append(Place(begin, array.shape, array.dtype.str, array.nbytes))
            begin = locations[-1].end
        if begin > os.fstat(self._file).st_size:
            os.ftruncate(self._file, 2 * begin)
        for location, array in zip(locations, arrays, strict=True):
            np.copyto(self.view(location), array)
        return locations

    def view(self, location: Place) -> Array:
        """Return an array on the shelf without copying it."""
        if not location.nbytes:
            return np.empty(location.shape, location.dtype)
        if self._memory is None or location.end > len(self._memory):
            self._memory = mmap(self._file, os.fstat(self._file).st_size)
        return np.ndarray(location.shape, location.dtype, self._memory, location.begin)

    def close(self) -> None:
        """Release the memory once no array refers to it."""
        self._memory = None
        os.close(self._file)


Finish = Callable[[int, Parcel | Exception], None]
"""Type of a function that receives a parcel's number and result."""
Work = Callable[[Sequence[Parcel]], Sequence[Parcel | Exception]]
"""Type of a function that processes a group of parcels and returns their results in the same order."""


@dataclass(eq=False)
class Worker:
    """A worker process, with the parent's end of its pipe, its shelves, and its current bundles.

    A bundle consists of groups of parcel numbers, and the number of its shelf. ``done`` is a counter, in memory that
    both processes share, of the finished groups of the first bundle.
    """

    process: BaseProcess
    connection: Connection
    shelves: Sequence[Shelf]
    done: mmap
    bundles: deque[tuple[list[list[int]], int]] = field(default_factory=deque)

    def free_shelf(self) -> int:
        """Return the number of a shelf without parcels."""
        used = {shelf for _, shelf in self.bundles}
        return next(shelf for shelf in range(BUNDLES_PER_WORKER) if shelf not in used)

    def end(self) -> int:
        """Kill the process if it is still running, release its pipe and shelves, and return its exit code."""
        self.process.kill()
        self.process.join()
        self.connection.close()
        for shelf in self.shelves:
            shelf.close()
        return self.process.exitcode or 0


@dataclass
class _Job:
    """One call to :meth:`Workers.run`: its remaining groups, its functions, and its shared arrays, keyed by ``id``."""

    waiting: deque[list[int]]
    prepare: Callable[[int], Parcel]
    finish: Finish
    shelved: Mapping[int, Place]
    end: float

    def next_bundle(self, num_workers: int) -> list[dict[int, Parcel]]:
        """Return the groups for one bundle: fewer if they are large, and fewer towards the end of the job."""
        bundle: list[dict[int, Parcel]] = []
        most, size = min(MAX_BUNDLE_PARCELS, 1 + len(self.waiting) // (4 * num_workers)), 0
        while self.waiting and sum(map(len, bundle)) < most and size < MAX_BUNDLE_BYTES:
            group = self.waiting.popleft()
            parcels: dict[int, Parcel] = {}
            for number in group if time.monotonic() < self.end else ():
                try:
                    parcel = self.prepare(number)
                    size += sum(map(_checked_bytes, parcel.arrays))
                    parcels[number] = parcel
                except Exception as error:  # the exception is the parcel's result
                    self.finish(number, error)
            if parcels:
                bundle.append(parcels)
        return bundle


class Workers:
    """Worker processes for one kind of task. Posy forks them when it first needs them.

    If a worker dies, the result of its current parcel is :class:`WorkerDiedError`, and a new worker replaces it. If the
    worker was processing a group of several parcels, Posy retries each of them alone.
    """

    def __init__(self, count: int, work: Work) -> None:
        self._count = count
        self._work = work
        self._common = Shelf()
        self._workers: list[Worker] = []
        self.end = weakref.finalize(self, _end_all, self._workers, self._common)
        """A function that stops all workers. If it is not called, the workers exit when this process does."""

    @staticmethod
    def possible() -> bool:
        """Return whether this process can fork workers."""
        return hasattr(os, "memfd_create") and not multiprocessing.current_process().daemon

    def run(
        self,
        groups: Sequence[Sequence[int]],
        prepare: Callable[[int], Parcel],
        finish: Finish,
        common: Sequence[Array] = (),
        end: float = float("inf"),
    ) -> None:
        """Process groups of parcels in order. ``prepare`` builds each parcel just before Posy sends it.

        ``finish`` receives each result, or the :class:`Exception` that ``prepare`` or the task raised. Other exceptions
        raised by the task, such as :class:`KeyboardInterrupt`, propagate to the caller. The arrays in ``common`` belong
        to several parcels and are copied only once. No group starts after the monotonic time ``end``.
        """
        shelved = dict(zip(map(id, common), self._common.put(common), strict=True))
        job = _Job(deque(map(list, groups)), prepare, finish, shelved, end)
        if not self._workers:
            gc.freeze()  # so that garbage collection skips the existing objects, here and in the workers
        try:
            while True:
                while len(self._workers) < min(self._count, len(job.waiting)):
                    self._workers.append(self._fork())
                self._fill(job)
                busy = {worker.connection: worker for worker in self._workers if worker.bundles}
                if not busy:
                    return
                for connection in wait(list(busy)):
                    assert isinstance(connection, Connection)
                    answers = self._receive(busy[connection], job.waiting)
                    self._fill(job)  # before processing the results, which may take a while
                    for number, answer in answers.items():
                        finish(number, answer)
        except BaseException:
            _end_all(self._workers)
            raise

    def _fill(self, job: "_Job") -> None:
        """Send each worker a bundle, and more bundles while enough groups remain for all workers."""
        for most in range(1, BUNDLES_PER_WORKER + 1):
            for worker in self._workers:
                while len(worker.bundles) < most and len(job.waiting) > (len(self._workers) if most > 1 else 0):
                    if groups := job.next_bundle(self._count):
                        self._send(worker, groups, job)

    def _fork(self) -> Worker:
        context = multiprocessing.get_context("fork")
        parent_end, worker_end = context.Pipe()
        shelves = [Shelf() for _ in range(BUNDLES_PER_WORKER)]
        unused = [parent_end, *(worker.connection for worker in self._workers)]
        done = mmap(-1, 1)
        arguments = worker_end, shelves, done, unused
        process = context.Process(target=self._serve, args=arguments, name="posy-client", daemon=True)
        process.start()
        worker_end.close()
        return Worker(process, parent_end, shelves, done)

    def _serve(
        self, connection: Connection, shelves: Sequence[Shelf], done: mmap, unused: Sequence[Connection]
    ) -> None:
        """Run in a worker process: process parcels until the parent process exits."""
        for number in ENDING:  # Ctrl-C reaches the workers too, but the parent stops them
            signal.signal(number, signal.SIG_IGN if number == signal.SIGINT else signal.SIG_DFL)
        for unused_connection in unused:
            unused_connection.close()
        while True:
            try:
                number, bundle, until = connection.recv()
            except EOFError:
                return
            shelf, answers, done[0] = shelves[number], list[Any](), 0
            common = cache(self._common.view)  # the same object each time, so that the task recognises shared arrays
            parcels = [parcel for group in bundle for parcel in group]
            unshared = [location for _, locations in parcels for shared, location in locations if not shared]
            end = max((location.end for location in unshared), default=0)
            for group in bundle:
                if time.monotonic() >= until:  # all processes share this clock
                    answers += [None] * len(group)
                    continue
                group_answers: Sequence[Any]
                try:
                    group_answers = self._work(
                        [
                            Parcel(head, [(common if shared else shelf.view)(at) for shared, at in locations])
                            for head, locations in group
                        ]
                    )
                except BaseException as error:  # any exception is the result for the whole group
                    group_answers = [error] * len(group)
                for answer in group_answers:
                    try:
                        if isinstance(answer, BaseException):
                            raise answer
                        locations = shelf.put(answer.arrays, end)
                        end = max((location.end for location in locations), default=end)
                        answers.append((answer.head, locations))
                    except BaseException as error:
                        answers.append(_portable(error))
                done[0] += 1
            connection.send(answers)

    def _send(self, worker: Worker, groups: Sequence[Mapping[int, Parcel]], job: "_Job") -> None:
        """Send a bundle of groups to a worker. The worker does not start another group once the job has ended."""
        shelf, end, bundle, shelved = worker.free_shelf(), 0, [], job.shelved
        for group in groups:
            bundle.append(list[Any]())
            for parcel in group.values():
                stored = worker.shelves[shelf].put([array for array in parcel.arrays if id(array) not in shelved], end)
                end = max((location.end for location in stored), default=end)
                unshared = iter(stored)
                locations = [
                    (True, shelved[id(array)]) if id(array) in shelved else (False, next(unshared))
                    for array in parcel.arrays
                ]
                bundle[-1].append((parcel.head, locations))
        with suppress(OSError):  # the worker has died, which _receive detects
            worker.connection.send((shelf, bundle, job.end))
        worker.bundles.append(([list(group) for group in groups], shelf))

    def _receive(self, worker: Worker, waiting: deque[list[int]]) -> dict[int, Parcel | Exception]:
        """Receive the results for a worker's first bundle, and return them keyed by parcel number."""
        groups, shelf = worker.bundles[0]
        try:
            answers = worker.connection.recv()
        except (EOFError, OSError):
            self._workers.remove(worker)
            fatal = groups[min(worker.done[0], len(groups) - 1)]
            code = worker.end()
            cause = f"by signal {-code}" if code < 0 else f"with status {code}"
            # The groups before the fatal one were finished, but their results are lost.
            lost = [group for bundle, _ in worker.bundles for group in bundle if group is not fatal]
            if len(fatal) > 1:  # retry each parcel alone, to identify the fatal one
                lost = [[number] for number in fatal] + lost
            waiting.extendleft(reversed(lost))
            return {fatal[0]: WorkerDiedError(f"its process died {cause}")} if len(fatal) == 1 else {}
        worker.bundles.popleft()
        answers_by_number: dict[int, Parcel | Exception] = {}
        for number, answer in zip((number for group in groups for number in group), answers, strict=True):
            if isinstance(answer, Exception):
                answers_by_number[number] = answer
            elif isinstance(answer, BaseException):
                raise answer
            elif answer is not None:  # None: the worker did not start the group in time
                head, locations = answer
                copies = [worker.shelves[shelf].view(location).copy() for location in locations]
                answers_by_number[number] = Parcel(head, copies)
        return answers_by_number


def private_memory(process: int) -> int:
    """Return the private memory of a process in bytes, or 0 if the system does not report it."""
    try:
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Private_"))


def _checked_bytes(array: Array) -> int:
    """Return the size of an array in bytes. Raise :class:`TypeError` if it contains Python objects."""
    if array.dtype.hasobject:
        raise TypeError(f"an array of {array.dtype} cannot be shared")
    return array.nbytes


def _portable(error: BaseException) -> BaseException:
    """Return an exception that another process can unpickle, with its traceback as a note."""
    with_traceback(error)
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        portable = RuntimeError(repr(error))
        portable.__notes__ = error.__notes__
        return portable
    return error


def _end_all(workers: list[Worker], common: Shelf | None = None) -> None:
    gc.unfreeze()
    while workers:
        workers.pop().end()
    if common is not None:
        common.close()
