"""Work for processes forked from this one: arrays travel in memory that both share, the rest through a pipe.

As with PyTorch's DataLoader, the processes are forked when they are first needed, and so begin with all that is loaded
here. Unlike threads they do not wait for each other in Python.
"""

import multiprocessing
import os
import pickle
import signal
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from mmap import mmap
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from posy.signals import ENDING

Array = npt.NDArray[Any]

ALIGNMENT = 64
"""Bytes at whose multiples arrays begin."""
AHEAD = 2
"""Parcels that a process has at hand: while it works on one, the next is there."""


CORES = "POSY_CORES"
"""Environment variable: the number of cores that a process may use, where that is not all that there are."""


def cores() -> int:
    """Return the number of cores that this process may use."""
    if told := os.environ.get(CORES, ""):
        return max(1, int(told))
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class WorkerDiedError(RuntimeError):
    """The process that worked on a parcel has died."""


class Parcel(NamedTuple):
    """Arrays, and what goes with them: anything that can be pickled."""

    head: Any
    arrays: Sequence[Array]


class Place(NamedTuple):
    """Where an array lies on a shelf."""

    begin: int
    shape: tuple[int, ...]
    dtype: str
    nbytes: int

    @property
    def end(self) -> int:
        """The first byte behind the array."""
        return self.begin + self.nbytes


class Shelf:
    """Memory shared with the processes that are forked later; it grows with what is put there."""

    def __init__(self) -> None:
        self._file = os.memfd_create("posy")
        self._memory: mmap | None = None

    def put(self, arrays: Sequence[Array], begin: int = 0) -> list[Place]:
        """Copy arrays to the bytes from ``begin`` on."""
        places = []
        for array in arrays:
            if array.dtype.hasobject:
                raise TypeError(f"an array of {array.dtype} cannot be shared")
            begin = -(-begin // ALIGNMENT) * ALIGNMENT
            places.append(Place(begin, array.shape, array.dtype.str, array.nbytes))
            begin = places[-1].end
        if begin > os.fstat(self._file).st_size:
            os.ftruncate(self._file, 2 * begin)
        for place, array in zip(places, arrays, strict=True):
            np.copyto(self.view(place), array)
        return places

    def view(self, place: Place) -> Array:
        """Return an array as it lies there, without copying it."""
        if not place.nbytes:
            return np.empty(place.shape, place.dtype)
        if self._memory is None or place.end > len(self._memory):
            self._memory = mmap(self._file, os.fstat(self._file).st_size)
        return np.ndarray(place.shape, place.dtype, self._memory, place.begin)

    def close(self) -> None:
        """Give the memory back as soon as nobody has an array of it."""
        self._memory = None
        os.close(self._file)


Finish = Callable[[int, Parcel | Exception], None]
"""Takes a parcel's number and its answer."""


@dataclass(eq=False)
class Worker:
    """A process with its end of the pipe, its shelves, and the parcels that it has at hand: a number and a shelf."""

    process: BaseProcess
    connection: Connection
    shelves: Sequence[Shelf]
    at_hand: deque[tuple[int, int]] = field(default_factory=deque)

    def free_shelf(self) -> int:
        """Return the number of a shelf on which no parcel lies."""
        taken = {shelf for _, shelf in self.at_hand}
        return next(shelf for shelf in range(AHEAD) if shelf not in taken)

    def end(self) -> int:
        """Kill the process, if it has not ended, give back what belongs to it, and return how it ended."""
        self.process.kill()
        self.process.join()
        self.connection.close()
        for shelf in self.shelves:
            shelf.close()
        return self.process.exitcode or 0


class Workers:
    """Processes that do work of one kind, forked when they are first needed.

    If one dies, the parcel that it worked on is answered with :class:`WorkerDiedError`, and another takes its place.
    """

    def __init__(self, count: int, work: Callable[[Parcel], Parcel]) -> None:
        self._count = count
        self._work = work
        self._common = Shelf()
        self._workers: list[Worker] = []
        self.end = weakref.finalize(self, _end_all, self._workers, self._common)
        """Ends them all; without this they end with this process."""

    @staticmethod
    def possible() -> bool:
        """Tell whether this process can have any."""
        return hasattr(os, "memfd_create") and not multiprocessing.current_process().daemon

    def run(
        self,
        numbers: Sequence[int],
        prepare: Callable[[int], Parcel],
        finish: Finish,
        common: Sequence[Array] = (),
        end: float = float("inf"),
    ) -> None:
        """Have parcels worked on, each of which ``prepare`` makes when it is its turn, in the order of their numbers.

        ``finish`` is called with each answer, or with the :class:`Exception` that ``prepare`` or the work has raised;
        what else the work raises, such as :class:`KeyboardInterrupt`, is raised here. The arrays ``common``
        are in several parcels and are copied once. After the monotonic time ``end`` no further parcel is begun.
        """
        shelved = dict(zip(map(id, common), self._common.put(common), strict=True))
        waiting = deque(numbers)

        def fill() -> None:
            """Give each process a parcel, and one to go on with while there are more than enough."""
            for most in range(1, AHEAD + 1):
                for worker in self._workers:
                    while len(worker.at_hand) < most and len(waiting) > (len(self._workers) if most > 1 else 0):
                        number = waiting.popleft()
                        if time.monotonic() >= end:
                            continue
                        try:
                            self._hand(worker, number, prepare(number), shelved)
                        except Exception as error:  # that is the parcel's answer
                            finish(number, error)

        try:
            while True:
                while len(self._workers) < min(self._count, len(waiting)):
                    self._workers.append(self._forked())
                fill()
                busy = {worker.connection: worker for worker in self._workers if worker.at_hand}
                if not busy:
                    return
                for connection in wait(list(busy)):
                    assert isinstance(connection, Connection)
                    number, answer = self._taken(busy[connection], waiting)
                    fill()  # before the answer is seen to, which may take its time
                    finish(number, answer)
        except BaseException:
            _end_all(self._workers)
            raise

    def _forked(self) -> Worker:
        context = multiprocessing.get_context("fork")
        ours, theirs = context.Pipe()
        shelves = [Shelf() for _ in range(AHEAD)]
        others = [ours, *(worker.connection for worker in self._workers)]
        process = context.Process(target=self._serve, args=(theirs, shelves, others), name="posy-client", daemon=True)
        process.start()
        theirs.close()
        return Worker(process, ours, shelves)

    def _serve(self, connection: Connection, shelves: Sequence[Shelf], others: Sequence[Connection]) -> None:
        """Be one of the processes: answer parcels until the one that it was forked from is gone."""
        for number in ENDING:  # a Ctrl-C goes to all processes of a terminal; this one's end is told by its parent
            signal.signal(number, signal.SIG_IGN if number == signal.SIGINT else signal.SIG_DFL)
        for other in others:
            other.close()
        while True:
            try:
                number, head, places = connection.recv()
            except EOFError:
                return
            shelf = shelves[number]
            answer: Any
            try:
                arrays = [(self._common if common else shelf).view(place) for common, place in places]
                done = self._work(Parcel(head, arrays))
                begin = max((place.end for common, place in places if not common), default=0)
                answer = (done.head, shelf.put(done.arrays, begin))
            except BaseException as error:  # whatever the work raises is its answer
                answer = _portable(error)
            connection.send(answer)

    def _hand(self, worker: Worker, number: int, parcel: Parcel, shelved: dict[int, Place]) -> None:
        """Give a process a parcel."""
        shelf = worker.free_shelf()
        own = iter(worker.shelves[shelf].put([array for array in parcel.arrays if id(array) not in shelved]))
        places = [(True, shelved[id(a)]) if id(a) in shelved else (False, next(own)) for a in parcel.arrays]
        with suppress(OSError):  # it has died, which is seen later
            worker.connection.send((shelf, parcel.head, places))
        worker.at_hand.append((number, shelf))

    def _taken(self, worker: Worker, waiting: deque[int]) -> tuple[int, Parcel | Exception]:
        """Take the answer to a process's first parcel, with that parcel's number."""
        number, shelf = worker.at_hand[0]
        try:
            answer = worker.connection.recv()
        except (EOFError, OSError):
            self._workers.remove(worker)
            code = worker.end()
            how = f"by signal {-code}" if code < 0 else f"with status {code}"
            waiting.extendleft(number for number, _ in reversed(list(worker.at_hand)[1:]))
            return number, WorkerDiedError(f"its process died {how}")
        worker.at_hand.popleft()
        if isinstance(answer, Exception):
            return number, answer
        if isinstance(answer, BaseException):
            raise answer
        head, places = answer
        return number, Parcel(head, [worker.shelves[shelf].view(place).copy() for place in places])


def own_memory(process: int) -> int:
    """Return the bytes of memory that a process shares with no other, or 0 where the system does not tell."""
    try:
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Private_"))


def _portable(error: BaseException) -> BaseException:
    """Return an exception as another process can have it."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(repr(error))
    return error


def _end_all(workers: list[Worker], common: Shelf | None = None) -> None:
    while workers:
        workers.pop().end()
    if common is not None:
        common.close()
