"""CUDA graphs: a training step is captured once and replayed, so that Python does not launch each kernel again.

A step of a small network launches a hundred kernels or more, each of which runs for a few microseconds. Launching them
one by one takes longer than running them.
"""

from collections.abc import Callable, Hashable, Iterable
from contextlib import suppress
from logging import WARNING
from typing import Any, NamedTuple

import torch
from flwr.common.logger import log
from torch import Tensor

WARM_UP = 2
"""Number of warm-up steps before the first capture for each combination of step kind and number of clients. CUDA loads
and selects kernels during these steps."""
FEWEST = 4
"""Minimum number of replays that justifies a capture, which takes about as long as two steps."""


class Captured(NamedTuple):
    """A step captured as a graph, and the step number on the device. Each replay runs the next step."""

    graph: torch.cuda.CUDAGraph
    number: Tensor


class Graphs:
    """Runs steps on a GPU, as CUDA graphs if enough identical steps follow one another.

    A step is a function of the step number, which may be a tensor ``(1,)`` on the device, and the number of clients.
    From its second call on, it must read and write the same memory each time. A step that waits for the device cannot
    be captured.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        self._pool: Any = None
        self._last: Captured | None = None  # keeps the memory of all graphs allocated
        self._refused: set[Hashable] = set()
        self._captures: set[tuple[Hashable, int]] = set()  # (kind, number of clients)

    def replay(
        self,
        kind: Hashable,
        runs: Iterable[tuple[int, int, int]],
        step: Callable[[int | Tensor, int], None],
        check_interrupted: Callable[[], None],
    ) -> None:
        """Run all training steps of one kind. ``check_interrupted`` is called after each step and may raise an error.

        ``runs`` yields ``(begin, end, clients)`` for each range of consecutive steps with the same number of clients.
        """
        captures: list[Captured | None] = []
        try:
            for begin, end, clients in runs:
                # The very first step allocates the memory that later steps use.
                warm_up = WARM_UP if (kind, clients) not in self._captures else int(not captures)
                first = min(begin + warm_up, end)
                for number in range(begin, first):
                    step(number, clients)
                    check_interrupted()
                capture = None
                if end - first >= FEWEST and kind not in self._refused:
                    capture = self._capture(kind, step, first, clients)
                    if capture is not None:
                        self._captures.add((kind, clients))
                captures.append(capture)
                for number in range(first, end):
                    step(number, clients) if capture is None else capture.graph.replay()
                    check_interrupted()
        finally:
            torch.cuda.current_stream(self._device).synchronize()  # a graph cannot be freed before it has run

    def _capture(
        self, kind: Hashable, step: Callable[[int | Tensor, int], None], number: int, clients: int
    ) -> Captured | None:
        """Return the graph of a step without running it, or None if the step cannot be captured."""
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            self._pool = torch.cuda.graph_pool_handle()
        graph, current_stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self._device)
        step_number = torch.tensor([number], device=self._device)
        self._stream.wait_stream(current_stream)
        try:
            with torch.cuda.stream(self._stream):
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    step(step_number, clients)
                    step_number.add_(1)
                except BaseException:
                    with suppress(RuntimeError):  # capture_end() raises an error for the same failure
                        graph.capture_end()
                    raise
                graph.capture_end()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            self._refused.add(kind)
            self._stream = self._pool = self._last = None  # unusable after a failed capture
            log(WARNING, "a step cannot be captured as a CUDA graph (%s): its kernels are launched one by one", error)
            return None
        current_stream.wait_stream(self._stream)
        self._last = Captured(graph, step_number)
        return self._last
