"""Answer waiting requests together, because a model needs little more time for many samples than for one."""

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from typing import NamedTuple

from posy.serve.tensors import Array, OverloadedError, UnavailableError

IDLE_STEPS = 5
"""Steps of the event loop without a new request, after which a batch starts."""
Outputs = dict[str, Array]
Predict = Callable[[Sequence[Mapping[str, Array]]], list[Outputs | Exception]]


class _Waiting(NamedTuple):
    inputs: Mapping[str, Array]
    samples: int
    answer: "asyncio.Future[Outputs]"


class Batcher:
    """The queue of one model.

    While the model is busy, requests wait. When it is free, it takes all waiting requests up to ``max_samples``. A
    single caller therefore never waits for others, and the batches grow with the load.

    A batch starts when the event loop has read the requests that have arrived. With small models, reading takes longer
    than the model, and batches of the first requests alone would cost more time than they save.

    Parameters
    ----------
    predict : callable
        Answers several requests, and returns the outputs or the exception for each.
    executor : concurrent.futures.Executor
        Runs ``predict``.
    max_samples : int
        Maximum number of samples in a batch. A larger request is a separate batch.
    max_waiting : int
        Maximum number of requests in the queue.
    """

    def __init__(self, predict: Predict, executor: Executor, max_samples: int = 256, max_waiting: int = 2048) -> None:
        self._predict, self._executor = predict, executor
        self._max_samples, self._max_waiting = max_samples, max_waiting
        self._queue: deque[_Waiting] = deque()
        self._worker: asyncio.Task[None] | None = None
        self._closed = False

    def submit(self, inputs: Mapping[str, Array]) -> "asyncio.Future[Outputs]":
        """Add a request to the queue, and return its future answer.

        Raises
        ------
        UnavailableError
            If the model is being unloaded.
        OverloadedError
            If the queue is full.
        """
        if self._closed:
            raise UnavailableError("the model is being unloaded")
        if len(self._queue) >= self._max_waiting:
            raise OverloadedError(f"{self._max_waiting} requests wait for this model; try again later")
        answer: asyncio.Future[Outputs] = asyncio.get_running_loop().create_future()
        samples = max((len(array) for array in inputs.values() if array.ndim), default=1)
        self._queue.append(_Waiting(inputs, samples, answer))
        if self._worker is None:
            self._worker = asyncio.ensure_future(self._work())
        return answer

    @property
    def waiting(self) -> int:
        """The number of requests in the queue."""
        return len(self._queue)

    async def close(self) -> None:
        """Refuse further requests, and answer the requests in the queue."""
        self._closed = True
        while self._worker is not None:
            await asyncio.wait([self._worker])

    async def _work(self) -> None:
        """Answer requests until the queue is empty."""
        try:
            while self._queue:
                await self._gather()
                if batch := self._next_batch():
                    _deliver(batch, await self._answers([waiting.inputs for waiting in batch]))
        finally:
            self._worker = None

    async def _gather(self) -> None:
        """Read the requests that have arrived, so that the batch contains them."""
        waiting, idle = 0, 0
        while idle < IDLE_STEPS and len(self._queue) < self._max_samples:
            idle = idle + 1 if len(self._queue) == waiting else 0
            waiting = len(self._queue)
            await asyncio.sleep(0)

    async def _answers(self, batch: Sequence[Mapping[str, Array]]) -> list[Outputs | Exception]:
        """Return the answers to a batch. If one request makes the model fail, answer each request alone."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._executor, self._predict, batch)
        except Exception as error:
            if len(batch) == 1:
                return [error]
            return [answer for inputs in batch for answer in await self._answers([inputs])]

    def _next_batch(self) -> list[_Waiting]:
        """Remove the next requests from the queue, except for cancelled ones."""
        batch: list[_Waiting] = []
        samples = 0
        while self._queue and (not batch or samples + self._queue[0].samples <= self._max_samples):
            waiting = self._queue.popleft()
            if not waiting.answer.done():
                batch.append(waiting)
                samples += waiting.samples
        return batch


def _deliver(batch: Sequence[_Waiting], answers: Sequence[Outputs | Exception]) -> None:
    """Set the answers of a batch."""
    for waiting, answer in zip(batch, answers, strict=True):
        if waiting.answer.done():
            continue
        if isinstance(answer, Exception):
            waiting.answer.set_exception(answer)
        else:
            waiting.answer.set_result(answer)
