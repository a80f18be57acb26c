"""Forked worker processes: parcels, answers, and dead workers."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from posy import forked
from posy.forked import Parcel, WorkerDiedError, Workers
from posy.settings import SettingsError

pytestmark = pytest.mark.skipif(not Workers.possible(), reason="processes cannot be forked")


def doubled(parcel: Parcel) -> Parcel:
    """Return the process id and twice the arrays. The head may order an exception, a kill or a delay."""
    if isinstance(parcel.head, Exception):
        raise parcel.head
    if parcel.head == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if isinstance(parcel.head, float):
        time.sleep(parcel.head)
    return Parcel((parcel.head, os.getpid()), [2 * array for array in parcel.arrays])


def one_by_one(work: Callable[[Parcel], Parcel]) -> Callable[[Sequence[Parcel]], list[Parcel]]:
    """Return a function that processes parcels in sequence."""
    return lambda parcels: [work(parcel) for parcel in parcels]


def singles(count: int) -> list[list[int]]:
    """Return groups of one parcel."""
    return [[number] for number in range(count)]


def answers(
    parcels: list[Parcel],
    work: Callable[[Parcel], Parcel] = doubled,
    workers: Workers | None = None,
    groups: Sequence[Sequence[int]] | None = None,
    **more: Any,
) -> dict[int, Parcel | Exception]:
    """Process parcels in two workers, and return the answers. Each parcel has at most one answer."""
    results: dict[int, Parcel | Exception] = {}

    def finish(number: int, answer: Parcel | Exception) -> None:
        assert number not in results
        results[number] = answer

    pool = workers or Workers(2, one_by_one(work))
    pool.run(groups or singles(len(parcels)), parcels.__getitem__, finish, **more)
    if workers is None:
        pool.end()
    return results


def test_parcels_of_a_group_share_common_arrays() -> None:
    def compare_with_first(parcels: Sequence[Parcel]) -> list[Parcel]:
        return [Parcel([array is parcels[0].arrays[i] for i, array in enumerate(p.arrays)], []) for p in parcels]

    shared, workers = np.ones(3), Workers(2, compare_with_first)
    results = answers(
        [Parcel(None, [shared, np.ones(3)]) for _ in range(4)],
        workers=workers,
        groups=[[0, 1], [2, 3]],
        common=[shared],
    )
    workers.end()
    assert [results[number].head for number in range(4)] == [[True, True], [True, False]] * 2


def test_arrays_of_all_kinds_come_back_from_two_processes() -> None:
    shared = np.arange(6, dtype=np.float64).reshape(2, 3)
    parcels = [
        Parcel(0.1, [shared, np.full((3, i), i, np.float32), np.array(i), shared.T, np.zeros((0, 4), np.int64)])
        for i in range(7)
    ]
    results = answers(parcels, common=[shared])
    assert sorted(results) == list(range(7))
    processes = set()
    for number, parcel in enumerate(parcels):
        answer = results[number]
        assert isinstance(answer, Parcel)
        processes.add(answer.head[1])
        for result, array in zip(answer.arrays, parcel.arrays, strict=True):
            assert result.shape == array.shape and result.dtype == (2 * array).dtype
            np.testing.assert_array_equal(result, 2 * array)
    assert len(processes) == 2 and os.getpid() not in processes


def test_larger_parcels_do_not_overwrite_earlier_answers() -> None:
    workers = Workers(2, one_by_one(doubled))
    first = answers([Parcel(None, [np.full(10, i, np.float32)]) for i in range(8)], workers=workers)
    second = answers([Parcel(None, [np.full(10**i, i, np.float32)]) for i in range(7)], workers=workers)
    workers.end()
    for results, size in ((first, lambda i: 10), (second, lambda i: 10**i)):
        for number, answer in results.items():
            assert isinstance(answer, Parcel)
            np.testing.assert_array_equal(answer.arrays[0], np.full(size(number), 2 * number, np.float32))


def test_common_array_is_copied_once(monkeypatch: pytest.MonkeyPatch) -> None:
    put, sizes = forked.Shelf.put, []

    def recording_put(self: forked.Shelf, arrays: Any, begin: int = 0) -> Any:
        sizes.append(sum(array.nbytes for array in arrays))
        return put(self, arrays, begin)

    monkeypatch.setattr(forked.Shelf, "put", recording_put)
    shared = np.ones(1000)
    answers([Parcel(None, [shared]) for _ in range(5)], common=[shared])
    assert sorted(sizes) == [0, 0, 0, 0, 0, 8000]  # the workers put the answers on shelves


class UnportableError(Exception):
    """An exception that cannot be unpickled."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(first + second)


@pytest.mark.parametrize("error", [ValueError("no"), UnportableError("a", "b")])
def test_exceptions_are_returned_as_answers(error: Exception) -> None:
    def fail(parcel: Parcel) -> Parcel:
        if parcel.head == 1:
            raise error
        return parcel

    results = answers([Parcel(i, []) for i in range(3)], fail)
    assert [type(results[i]) for i in (0, 2)] == [Parcel, Parcel]
    assert type(results[1]) is (ValueError if isinstance(error, ValueError) else RuntimeError)
    assert "no" in str(results[1]) or "UnportableError('ab')" in str(results[1])


def test_parcel_that_cannot_be_prepared_returns_the_exception() -> None:
    workers, results = Workers(2, one_by_one(doubled)), {}

    def prepare(number: int) -> Parcel:
        if number == 2:
            raise KeyError("missing")
        return Parcel(None, [np.array([object()])] if number == 3 else [])

    workers.run(singles(5), prepare, results.__setitem__)
    workers.end()
    assert [type(results[i]) for i in range(5)] == [Parcel, Parcel, KeyError, TypeError, Parcel]


def test_dead_worker_loses_one_parcel_and_is_replaced() -> None:
    workers = Workers(2, one_by_one(doubled))
    parcels = [Parcel("die" if i in (0, 4) else None, [np.array(i)]) for i in range(12)]
    results = answers(parcels, workers=workers)
    assert sorted(results) == list(range(12))
    died = [number for number, answer in results.items() if isinstance(answer, WorkerDiedError)]
    assert sorted(died) == [0, 4]
    assert "by signal 9" in str(results[0])
    assert all(int(results[i].arrays[0]) == 2 * i for i in range(12) if i not in died)  # type: ignore[union-attr]
    assert len(answers(parcels[1:4], workers=workers)) == 3
    workers.end()


def test_parcels_of_a_group_are_processed_together() -> None:
    def summed(parcels: Sequence[Parcel]) -> list[Parcel | Exception]:
        total = sum(int(parcel.arrays[0]) for parcel in parcels)
        return [
            ValueError("three") if int(p.arrays[0]) == 3 else Parcel(len(parcels), [np.array(total)]) for p in parcels
        ]

    workers, results = Workers(2, summed), dict[int, Any]()
    parcels = [Parcel(None, [np.array(i)]) for i in range(9)]
    workers.run([[0, 1, 2, 3], [4], [5, 6, 7], [8]], parcels.__getitem__, results.__setitem__)
    workers.end()
    assert isinstance(results.pop(3), ValueError)
    assert {i: (p.head, int(p.arrays[0])) for i, p in results.items()} == {
        0: (4, 6), 1: (4, 6), 2: (4, 6), 4: (1, 4), 5: (3, 18), 6: (3, 18), 7: (3, 18), 8: (1, 8),
    }  # fmt: skip


def test_group_of_a_dead_worker_is_retried_parcel_by_parcel() -> None:
    parcels = [Parcel("die" if i == 5 else None, [np.array(i)]) for i in range(12)]
    results = answers(parcels, groups=[[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]])
    assert [i for i, answer in results.items() if isinstance(answer, WorkerDiedError)] == [5]
    assert all(int(results[i].arrays[0]) == 2 * i for i in range(12) if i != 5)  # type: ignore[union-attr]


def test_no_parcel_starts_after_the_deadline() -> None:
    workers = Workers(2, one_by_one(doubled))
    answers([Parcel(None, [])] * 2, workers=workers)  # forks the workers, which takes time
    begin = time.monotonic()
    # Bundles of several take longer.
    results = answers([Parcel(0.2, []) for _ in range(60)], end=begin + 0.7, workers=workers)
    workers.end()
    assert 2 <= len(results) <= 10
    assert time.monotonic() - begin < 5  # all 60 would take 6 s


def test_exception_in_the_parent_ends_the_workers_and_the_next_run_forks_others() -> None:
    workers = Workers(2, one_by_one(doubled))
    before = set(active_children())

    def finish(number: int, answer: Any) -> None:
        raise KeyboardInterrupt

    begin = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        workers.run(singles(2), lambda number: Parcel(30.0 if number else None, []), finish)
    assert time.monotonic() - begin < 20
    assert set(active_children()) <= before
    assert len(answers([Parcel(None, [])] * 3, workers=workers)) == 3
    workers.end()
    assert set(active_children()) <= before


def test_keyboard_interrupt_of_a_worker_is_raised_in_the_parent() -> None:
    def stop(parcel: Parcel) -> Parcel:
        raise KeyboardInterrupt if parcel.head == 2 else ValueError

    results: dict[int, Any] = {}
    with pytest.raises(KeyboardInterrupt):
        Workers(2, one_by_one(stop)).run(singles(3), lambda number: Parcel(number, []), results.__setitem__)
    assert all(isinstance(answer, ValueError) for answer in results.values()) and 2 not in results


def test_workers_end_with_their_parent() -> None:
    program = """
import os, signal, sys, time
from posy.forked import Parcel, Workers

def work(parcels):
    os.write(1, f"{os.getpid()}\\n".encode())
    time.sleep(parcels[0].head)
    return [Parcel(None, [])]

def finish(number, answer):
    os.kill(os.getpid(), signal.SIGKILL)

Workers(2, work).run([[0], [1]], lambda number: Parcel(2.0 if number else 0.5, []), finish)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL
    numbers = [int(line) for line in done.stdout.split()]
    assert len(numbers) == 2
    end = time.monotonic() + 20
    while any(Path(f"/proc/{number}/exe").exists() for number in numbers) and time.monotonic() < end:
        time.sleep(0.1)
    assert time.monotonic() < end


@pytest.mark.parametrize(("value", "expected"), [("", len(os.sched_getaffinity(0))), ("1", 1), ("12", 12)])
def test_environment_variable_sets_the_number_of_cores(
    monkeypatch: pytest.MonkeyPatch, value: str, expected: int
) -> None:
    monkeypatch.setenv(forked.CORES, value)
    assert forked.cores() == expected


@pytest.mark.parametrize("value", ["0", "-1", "two", "1.5"])
def test_invalid_number_of_cores_is_an_error(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv(forked.CORES, value)
    with pytest.raises(SettingsError, match="whole number of at least 1"):
        forked.cores()
