"""The engine that runs many clients' calls on one machine, as one stacked computation or on separate cores."""

import itertools
import time
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from logging import WARNING
from typing import Any

import torch
from flwr.common.logger import log

from posy.client_app.app import Call, packed, unpacked
from posy.client_app.base import PersonalClient
from posy.client_app.hooks import Steps
from posy.client_app.training.networks import Network
from posy.client_app.training.work import Forward, Train, TrainingInterruptedError
from posy.client_app.workspace import Workspace
from posy.forked import Parcel, Workers

Finish = Callable[[int, Any], None]
"""A callback that receives a call's index and its result, or the exception that ended the call."""


@dataclass
class Running:
    """A client in the middle of its round, and its pending request."""

    client: PersonalClient
    steps: Steps[Any]
    request: Train | Forward


class Engine:
    """Runs the rounds of clients that share a workspace.

    If stacking is faster (see :meth:`Trainer.stacks`), groups of clients advance together, and their requests of the
    same kind run as one computation. Otherwise, each client trains alone. Groups, and clients that train alone, run in
    parallel in forked processes. If forking is not possible, groups run one after another, and clients that train alone
    run on threads, which share Python's global interpreter lock.
    """

    def __init__(self, workspace: Workspace) -> None:
        self.workspace = workspace
        self._group = Group(workspace)
        self._pool: ThreadPoolExecutor | None = None
        self._workers: Workers | None = None
        # Forked processes share the data that is loaded before the fork.
        workspace.client_cache.load_all(workspace.settings.data.num_clients)

    def run(self, calls: Sequence[Call], finish: Finish, end: float = float("inf")) -> None:
        """Run calls, starting with the clients that have the most training samples.

        ``finish`` is called once for each completed call, possibly on another thread. No call begins after ``end``, a
        value of :func:`time.monotonic`.
        """
        trainer = self.workspace.trainer
        trainer.interrupted.clear()  # clears an interrupt from an earlier run
        order = sorted(range(len(calls)), key=lambda i: -calls[i].num_train)
        network = self.workspace.network(self.workspace.architecture)
        stacked = trainer.stacks(network, len(order))
        groups = evenly(order, trainer.together(network, len(order))) if stacked else [[number] for number in order]

        def run_alone(number: int) -> None:
            if time.monotonic() >= end or trainer.interrupted.is_set():
                return
            try:
                client, steps = calls[number].open()
                result = client.jobs.drive(steps)
            except TrainingInterruptedError:
                return
            except Exception as error:  # a client's error becomes its result, as on a real node
                result = error
            finish(number, result)

        is_parallel = self.workspace.workers > 1 and len(groups) > 1
        if is_parallel and Workers.possible() and self.workspace.forks and all(call.travels for call in calls):
            self._in_processes(groups, calls, finish, end)
        elif stacked:
            for group in groups:
                if time.monotonic() < end:
                    self._group.run(group, lambda number: calls[number].open(), finish)
        elif is_parallel:
            self._on_threads(run_alone, order)
        else:
            for number in order:
                run_alone(number)

    def end(self) -> None:
        """Stop the processes and threads."""
        if self._workers is not None:
            self._workers.end()
        if self._pool is not None:
            self._pool.shutdown()

    def _in_processes(self, groups: Sequence[Sequence[int]], calls: Sequence[Call], finish: Finish, end: float) -> None:
        if self._workers is None:
            self._workers = Workers(self.workspace.workers, self._group.answers)

        def take_answer(number: int, answer: Parcel | Exception) -> None:
            finish(number, answer if isinstance(answer, Exception) else calls[number].unpack_answer(answer))

        counts = Counter(id(array) for call in calls for array in call.received.values())
        common = {id(array): array for call in calls for array in call.received.values() if counts[id(array)] > 1}
        self._workers.run(groups, lambda number: calls[number].packed(), take_answer, list(common.values()), end)

    def _on_threads(self, run_call: Callable[[int], None], order: Sequence[int]) -> None:
        self._pool = self._pool or ThreadPoolExecutor(self.workspace.workers, thread_name_prefix="client")
        futures: list[Future[None]] = []
        try:
            for number in order:
                futures.append(self._pool.submit(run_call, number))
            wait(futures, return_when=FIRST_EXCEPTION)
            for future in futures:
                future.result()
        except BaseException:
            self.workspace.trainer.interrupted.set()
            for future in futures:
                future.cancel()
            wait(futures)
            raise


class Group:
    """A runner for clients that advance together. It remembers how many clients fit into memory."""

    def __init__(self, workspace: Workspace) -> None:
        self.workspace = workspace
        self._capacity: dict[Network, int] = {}

    def answers(self, parcels: Sequence[Parcel]) -> list[Parcel | Exception]:
        """Run packed calls in a worker process, and return their packed results or errors."""
        clients: dict[int, PersonalClient] = {}
        answers: dict[int, Parcel | Exception] = {}

        def begin(index: int) -> tuple[PersonalClient, Steps[Any]]:
            clients[index], steps = unpacked(self.workspace, parcels[index])
            return clients[index], steps

        def finish(index: int, result: Any) -> None:
            answers[index] = result if isinstance(result, Exception) else packed(clients[index], result)

        self.run(range(len(parcels)), begin, finish)
        return [answers[index] for index in range(len(parcels))]

    def run(
        self, numbers: Sequence[int], begin: Callable[[int], tuple[PersonalClient, Steps[Any]]], finish: Finish
    ) -> None:
        """Advance clients in lockstep, one request per client at a time."""
        running: dict[int, Running] = {}
        answers: dict[int, Any] = dict.fromkeys(numbers)
        while answers:
            for number, answer in answers.items():
                result: Any
                try:
                    if number not in running:
                        client, steps = begin(number)
                        running[number] = Running(client, steps, next(steps))
                    else:
                        steps = running[number].steps
                        request = steps.throw(answer) if isinstance(answer, Exception) else steps.send(answer)
                        running[number].request = request
                    continue
                except StopIteration as finished:
                    result = finished.value
                except Exception as error:  # a client's error becomes its result, as on a real node
                    result = error
                running.pop(number, None)
                finish(number, result)
            answers = self._answer_requests(running)

    def _answer_requests(self, running: Mapping[int, Running]) -> dict[int, Any]:
        """Run each client's pending request, and run requests of the same kind as one computation if possible."""
        groups: dict[Hashable, list[int]] = {}
        answers: dict[int, Any] = {}
        for number, member in running.items():
            try:
                groups.setdefault(self._kind(member), []).append(number)
            except Exception as error:  # the client's request is invalid
                answers[number] = error
        for numbers in groups.values():
            answers |= zip(numbers, self._answer_group([running[number] for number in numbers]), strict=True)
        return answers

    def _kind(self, running: Running) -> Hashable:
        """Return a key that is equal for requests that can run together."""
        network, request = running.client.jobs.network(running.request), running.request
        stacks = self.workspace.trainer.stacks(network, 2, request if isinstance(request, Train) else None)
        if isinstance(request, Train):
            return network, request.kind if stacks else id(running), running.client.lr
        # For clients that share one model, one pass covers all their samples, even if the network cannot be stacked.
        return network, request.parameters.shape, request.features, None if stacks else id(request.parameters)

    def _answer_group(self, group: Sequence[Running]) -> list[Any]:
        """Run requests of the same kind, split into as many groups as memory requires."""
        trainer, network = self.workspace.trainer, group[0].client.jobs.network(group[0].request)
        if len(group) == 1:
            return [self._answer_alone(group[0])]
        first_request = group[0].request
        shape = (first_request.start if isinstance(first_request, Train) else first_request.parameters).shape
        models = 1 if len(shape) == 1 else shape[0]
        limit = min(self._capacity.get(network, len(group)), max(1, trainer.capacity(network) // models))
        if len(group) > limit:
            pieces = [group[i : i + limit] for i in range(0, len(group), limit)]
            return [answer for piece in pieces for answer in self._answer_group(piece)]
        try:
            if isinstance(first_request, Train):
                jobs = [member.client.jobs.job(member.request) for member in group if isinstance(member.request, Train)]
                return list(trainer.train_together(jobs, network))
            requests = [member.request for member in group if isinstance(member.request, Forward)]
            samples = [
                member.client.jobs.samples(request.split) for member, request in zip(group, requests, strict=True)
            ]
            return trainer.forward_together(requests, network, samples)
        except torch.OutOfMemoryError:
            self._capacity[network] = len(group) // 2
            log(WARNING, "%s clients do not fit into memory at the same time: retrying with half as many", len(group))
        except TrainingInterruptedError:
            raise
        except Exception as error:
            log(WARNING, "%s clients cannot run as one computation (%r): running them one by one", len(group), error)
            return [self._answer_alone(member) for member in group]
        torch.cuda.empty_cache()
        return self._answer_group(group)

    def _answer_alone(self, running: Running) -> Any:
        try:
            return running.client.jobs.answer(running.request)
        except Exception as error:
            return error


def evenly(numbers: Sequence[int], most: int) -> list[Sequence[int]]:
    """Divide a sequence into as few groups as possible, of about the same size and with at most ``most`` elements each.

    If there is more than one group, the number of groups is rounded up to an even number, because machines usually have
    an even number of cores.
    """
    count = -(-len(numbers) // most)
    count += count > 1 and count % 2
    cuts = [len(numbers) * part // count for part in range(count + 1)]
    return [numbers[begin:end] for begin, end in itertools.pairwise(cuts)]
