"""CUDA graphs: a training step is captured once and replayed, so that Python does not launch its kernels each time.

A step of a small network is a hundred kernels or more, which run for a few microseconds each. It takes longer to launch
them one by one than to run them.
"""

from collections.abc import Callable, Hashable, Iterable
from contextlib import suppress
from logging import WARNING
from typing import Any, NamedTuple

import torch
from flwr.common.logger import log
from torch import Tensor

WARM_UP = 2
"""Steps before the first capture of a kind with so many clients: they load the kernels and choose algorithms."""
FEWEST = 4
"""Replays that make a capture pay: it takes about as long as two steps."""


class Captured(NamedTuple):
    """A step as a graph, and where the step's number is: each replay carries out the next one."""

    graph: torch.cuda.CUDAGraph
    number: Tensor


class Graphs:
    """Carries out steps on a GPU, as CUDA graphs where they are many.

    A step is a function of its number, which may be a tensor ``(1,)`` on the device, and of how many clients take it.
    After the first one it must read and write the same memory each time, and it must never wait for the device: one
    that does is not captured.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        self._pool: Any = None
        self._last: Captured | None = None  # the memory of all graphs is there as long as one of them
        self._refused: set[Hashable] = set()
        self._known: set[tuple[Hashable, int]] = set()  # kinds of so many clients that have been captured

    def carry_out(
        self,
        kind: Hashable,
        runs: Iterable[tuple[int, int, int]],
        step: Callable[[int | Tensor, int], None],
        go_on: Callable[[], None],
    ) -> None:
        """Carry out all steps of a training of some kind; after each, ``go_on`` may raise to end them.

        ``runs`` tells which steps the same clients take: the first, the one after the last, and how many clients.
        """
        kept: list[Captured | None] = []
        try:
            for begin, end, clients in runs:
                # The first step of a training makes what is there from then on.
                ahead = WARM_UP if (kind, clients) not in self._known else int(not kept)
                captured = min(begin + ahead, end)
                for number in range(begin, captured):
                    step(number, clients)
                    go_on()
                found = None
                if end - captured >= FEWEST and kind not in self._refused:
                    found = self._captured(kind, step, captured, clients)
                    if found is not None:
                        self._known.add((kind, clients))
                kept.append(found)
                for number in range(captured, end):
                    step(number, clients) if found is None else found.graph.replay()
                    go_on()
        finally:
            torch.cuda.current_stream(self._device).synchronize()  # no graph may go before it has run

    def _captured(
        self, kind: Hashable, step: Callable[[int | Tensor, int], None], number: int, clients: int
    ) -> Captured | None:
        """Return the graph of a step, or None if it cannot be captured; nothing is carried out yet."""
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            self._pool = torch.cuda.graph_pool_handle()
        graph, here = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self._device)
        place = torch.tensor([number], device=self._device)
        self._stream.wait_stream(here)
        try:
            with torch.cuda.stream(self._stream):
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    step(place, clients)
                    place.add_(1)
                except BaseException:
                    with suppress(RuntimeError):  # says once more that the capture has failed
                        graph.capture_end()
                    raise
                graph.capture_end()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            self._refused.add(kind)
            self._stream = self._pool = self._last = None  # a failed capture leaves them unusable
            log(WARNING, "a step cannot be captured as a CUDA graph (%s): its kernels are launched one by one", error)
            return None
        here.wait_stream(self._stream)
        self._last = Captured(graph, place)
        return self._last
