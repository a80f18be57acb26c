"""Work for processes forked from this one: arrays travel in memory that both share, the rest through a pipe.

As with PyTorch's DataLoader, the processes are forked when they are first needed, and so begin with all that is loaded
here. Unlike threads they do not wait for each other in Python.
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
"""Bytes at whose multiples arrays begin."""
AHEAD = 2
"""Bundles of parcels that a process has at hand: while it works on one, the next is there."""
TOGETHER, TOGETHER_BYTES = 8, 8 << 20
"""Most parcels in a bundle, and the bytes after which there is no further one: to wake a process costs time, too."""


CORES = "POSY_CORES"
"""Environment variable: the number of cores that a process may use, where that is not all that there are."""


def cores() -> int:
    """Return the number of cores that this process may use; a number that is none raises :class:`SettingsError`."""
    if told := os.environ.get(CORES, ""):
        if not told.isascii() or not told.isdigit() or not int(told):
            raise SettingsError(f"the environment variable {CORES} = {told!r}: it must be a whole number from 1 on")
        return int(told)
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
            _shareable(array)
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
Work = Callable[[Sequence[Parcel]], Sequence[Parcel | Exception]]
"""Answers parcels that are worked on together, in their order."""


@dataclass(eq=False)
class Worker:
    """A process with its end of the pipe, its shelves, and the bundles that it has at hand.

    A bundle is groups of the numbers of its parcels, and the number of its shelf. ``done`` counts the finished groups
    of the first one, in memory that both processes share.
    """

    process: BaseProcess
    connection: Connection
    shelves: Sequence[Shelf]
    done: mmap
    at_hand: deque[tuple[list[list[int]], int]] = field(default_factory=deque)

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

    If one dies, the parcel that it worked on is answered with :class:`WorkerDiedError`, and another takes its place;
    where it worked on several together, each of them is tried once more by itself.
    """

    def __init__(self, count: int, work: Work) -> None:
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
        groups: Sequence[Sequence[int]],
        prepare: Callable[[int], Parcel],
        finish: Finish,
        common: Sequence[Array] = (),
        end: float = float("inf"),
    ) -> None:
        """Have groups of parcels worked on, each of which ``prepare`` makes when it is its turn, in their order.

        ``finish`` is called with each answer, or with the :class:`Exception` that ``prepare`` or the work has raised;
        what else the work raises, such as :class:`KeyboardInterrupt`, is raised here. The arrays ``common``
        are in several parcels and are copied once. After the monotonic time ``end`` no further group is begun.
        """
        shelved = dict(zip(map(id, common), self._common.put(common), strict=True))
        waiting = deque(map(list, groups))

        def bundle() -> list[dict[int, Parcel]]:
            """Return some groups that travel together: few if they are large, and fewer towards the end."""
            taken: list[dict[int, Parcel]] = []
            most, size = min(TOGETHER, 1 + len(waiting) // (4 * self._count)), 0
            while waiting and sum(map(len, taken)) < most and size < TOGETHER_BYTES:
                group = waiting.popleft()
                parcels: dict[int, Parcel] = {}
                for number in group if time.monotonic() < end else ():
                    try:
                        parcel = prepare(number)
                        size += sum(map(_shareable, parcel.arrays))
                        parcels[number] = parcel
                    except Exception as error:  # that is the parcel's answer
                        finish(number, error)
                if parcels:
                    taken.append(parcels)
            return taken

        def fill() -> None:
            """Give each process a bundle, and one to go on with while there are more than enough."""
            for most in range(1, AHEAD + 1):
                for worker in self._workers:
                    while len(worker.at_hand) < most and len(waiting) > (len(self._workers) if most > 1 else 0):
                        if taken := bundle():
                            self._hand(worker, taken, shelved, end)

        if not self._workers:
            gc.freeze()  # neither this process nor its children look through all that is there by now again and again
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
                    answers = self._taken(busy[connection], waiting)
                    fill()  # before the answers are seen to, which may take its time
                    for number, answer in answers.items():
                        finish(number, answer)
        except BaseException:
            _end_all(self._workers)
            raise

    def _forked(self) -> Worker:
        context = multiprocessing.get_context("fork")
        ours, theirs = context.Pipe()
        shelves = [Shelf() for _ in range(AHEAD)]
        others = [ours, *(worker.connection for worker in self._workers)]
        done = mmap(-1, 1)
        arguments = theirs, shelves, done, others
        process = context.Process(target=self._serve, args=arguments, name="posy-client", daemon=True)
        process.start()
        theirs.close()
        return Worker(process, ours, shelves, done)

    def _serve(
        self, connection: Connection, shelves: Sequence[Shelf], done: mmap, others: Sequence[Connection]
    ) -> None:
        """Be one of the processes: answer parcels until the one that it was forked from is gone."""
        for number in ENDING:  # a Ctrl-C goes to all processes of a terminal; this one's end is told by its parent
            signal.signal(number, signal.SIG_IGN if number == signal.SIGINT else signal.SIG_DFL)
        for other in others:
            other.close()
        while True:
            try:
                number, bundle, until = connection.recv()
            except EOFError:
                return
            shelf, answers, done[0] = shelves[number], list[Any](), 0
            common = cache(self._common.view)  # one object, by which those who work know that they have it in common
            whole = [parcel for group in bundle for parcel in group]
            end = max((place.end for _, places in whole for shared, place in places if not shared), default=0)
            for group in bundle:
                if time.monotonic() >= until:  # the clock is one for all processes
                    answers += [None] * len(group)
                    continue
                found: Sequence[Any]
                try:
                    found = self._work(
                        [
                            Parcel(head, [(common if shared else shelf.view)(place) for shared, place in places])
                            for head, places in group
                        ]
                    )
                except BaseException as error:  # whatever the work raises is the answer
                    found = [error] * len(group)
                for answer in found:
                    try:
                        if isinstance(answer, BaseException):
                            raise answer
                        own = shelf.put(answer.arrays, end)
                        end = max((place.end for place in own), default=end)
                        answers.append((answer.head, own))
                    except BaseException as error:
                        answers.append(_portable(error))
                done[0] += 1
            connection.send(answers)

    def _hand(
        self, worker: Worker, groups: Sequence[Mapping[int, Parcel]], shelved: Mapping[int, Place], until: float
    ) -> None:
        """Give a process a bundle of groups, of which it begins none after a time."""
        shelf, end, bundle = worker.free_shelf(), 0, []
        for group in groups:
            bundle.append(list[Any]())
            for parcel in group.values():
                own = worker.shelves[shelf].put([array for array in parcel.arrays if id(array) not in shelved], end)
                end = max((place.end for place in own), default=end)
                rest = iter(own)
                places = [(True, shelved[id(a)]) if id(a) in shelved else (False, next(rest)) for a in parcel.arrays]
                bundle[-1].append((parcel.head, places))
        with suppress(OSError):  # it has died, which is seen later
            worker.connection.send((shelf, bundle, until))
        worker.at_hand.append(([list(group) for group in groups], shelf))

    def _taken(self, worker: Worker, waiting: deque[list[int]]) -> dict[int, Parcel | Exception]:
        """Take the answers to a process's first bundle, by number."""
        groups, shelf = worker.at_hand[0]
        try:
            answers = worker.connection.recv()
        except (EOFError, OSError):
            self._workers.remove(worker)
            fatal = groups[min(worker.done[0], len(groups) - 1)]
            code = worker.end()
            how = f"by signal {-code}" if code < 0 else f"with status {code}"
            # Those before it in the bundle were done, but their answers are gone.
            lost = [group for bundle, _ in worker.at_hand for group in bundle if group is not fatal]
            if len(fatal) > 1:  # which of them it was is found out
                lost = [[number] for number in fatal] + lost
            waiting.extendleft(reversed(lost))
            return {fatal[0]: WorkerDiedError(f"its process died {how}")} if len(fatal) == 1 else {}
        worker.at_hand.popleft()
        found: dict[int, Parcel | Exception] = {}
        for number, answer in zip((number for group in groups for number in group), answers, strict=True):
            if isinstance(answer, Exception):
                found[number] = answer
            elif isinstance(answer, BaseException):
                raise answer
            elif answer is not None:  # it was not begun in time
                head, places = answer
                found[number] = Parcel(head, [worker.shelves[shelf].view(place).copy() for place in places])
        return found


def own_memory(process: int) -> int:
    """Return the bytes of memory that a process shares with no other, or 0 where the system does not tell."""
    try:
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Private_"))


def _shareable(array: Array) -> int:
    """Return the bytes of an array, or raise :class:`TypeError` if it holds more than bytes."""
    if array.dtype.hasobject:
        raise TypeError(f"an array of {array.dtype} cannot be shared")
    return array.nbytes


def _portable(error: BaseException) -> BaseException:
    """Return an exception that another process can read, with its traceback as a note."""
    with_traceback(error)
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return with_traceback(RuntimeError(repr(error)))
    return error


def _end_all(workers: list[Worker], common: Shelf | None = None) -> None:
    gc.unfreeze()
    while workers:
        workers.pop().end()
    if common is not None:
        common.close()
