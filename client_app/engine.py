"""Carries out the calls of many clients on one machine: as one stacked computation, or each on a core of its own."""

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
from posy.client_app.base import PersonalClient, Steps
from posy.client_app.training.networks import Network
from posy.client_app.training.work import Forward, Train, TrainingInterruptedError
from posy.client_app.workspace import Workspace
from posy.forked import Parcel, Workers

Finish = Callable[[int, Any], None]
"""Takes a call's place and its result, or the exception that ended it."""


@dataclass
class Running:
    """A client in the middle of its round, and what it waits for."""

    client: PersonalClient
    steps: Steps[Any]
    request: Train | Forward


class Engine:
    """Carries out clients' rounds with the resources of one process.

    Where stacking pays (see :meth:`Trainer.stacks`), groups of clients advance together: what they ask for at the same
    time and is of one kind is one computation. Elsewhere each client trains by itself. Several groups, or clients, are
    at work at a time, in processes forked from this one; where that cannot be, groups come one after the other, and
    clients that train by themselves go on threads, which wait for each other in Python.
    """

    def __init__(self, workspace: Workspace) -> None:
        self.workspace = workspace
        self._group = Group(workspace)
        self._pool: ThreadPoolExecutor | None = None
        self._workers: Workers | None = None
        workspace.load_clients()  # what is there before processes are forked is in memory once

    def run(self, calls: Sequence[Call], finish: Finish, end: float = float("inf")) -> None:
        """Carry out some calls, the largest clients' first.

        ``finish`` is called once for each, with its place and result, perhaps on another thread. After the monotonic
        time ``end`` none is begun.
        """
        trainer = self.workspace.trainer
        trainer.interrupted.clear()  # an interrupt ends only the run in which it comes
        order = sorted(range(len(calls)), key=lambda i: -calls[i].num_train)
        plain = self.workspace.network(self.workspace.architecture)
        stacked = trainer.stacks(plain, len(order))
        groups = evenly(order, trainer.together(plain, len(order))) if stacked else [[number] for number in order]

        def alone(number: int) -> None:
            if time.monotonic() >= end or trainer.interrupted.is_set():
                return
            try:
                client, steps = calls[number].open()
                result = client.drive(steps)
            except TrainingInterruptedError:
                return
            except Exception as error:  # whatever a client raises is its answer, as on a real node
                result = error
            finish(number, result)

        several = self.workspace.workers > 1 and len(groups) > 1
        if several and Workers.possible() and self.workspace.forks and all(call.travels for call in calls):
            self._in_processes(groups, calls, finish, end)
        elif stacked:
            for group in groups:
                if time.monotonic() < end:
                    self._group.run(group, lambda number: calls[number].open(), finish)
        elif several:
            self._on_threads(alone, order)
        else:
            for number in order:
                alone(number)

    def end(self) -> None:
        """End the processes and threads."""
        if self._workers is not None:
            self._workers.end()
        if self._pool is not None:
            self._pool.shutdown()

    def _in_processes(self, groups: Sequence[Sequence[int]], calls: Sequence[Call], finish: Finish, end: float) -> None:
        if self._workers is None:
            self._workers = Workers(self.workspace.workers, self._group.answers)

        def take(number: int, answer: Parcel | Exception) -> None:
            finish(number, answer if isinstance(answer, Exception) else calls[number].take_up(answer))

        held = Counter(id(array) for call in calls for array in call.received)
        common = {id(array): array for call in calls for array in call.received if held[id(array)] > 1}
        self._workers.run(groups, lambda number: calls[number].packed(), take, list(common.values()), end)

    def _on_threads(self, work: Callable[[int], None], order: Sequence[int]) -> None:
        self._pool = self._pool or ThreadPoolExecutor(self.workspace.workers, thread_name_prefix="client")
        futures: list[Future[None]] = []
        try:
            for number in order:
                futures.append(self._pool.submit(work, number))
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
    """Clients that advance together, and what was found out about the memory that they take."""

    def __init__(self, workspace: Workspace) -> None:
        self.workspace = workspace
        self._capacity: dict[Network, int] = {}

    def answers(self, parcels: Sequence[Parcel]) -> list[Parcel | Exception]:
        """Return what packed calls come to, in another process than the one that has packed them."""
        clients: dict[int, PersonalClient] = {}
        found: dict[int, Parcel | Exception] = {}

        def begin(place: int) -> tuple[PersonalClient, Steps[Any]]:
            clients[place], steps = unpacked(self.workspace, parcels[place])
            return clients[place], steps

        def finish(place: int, result: Any) -> None:
            found[place] = result if isinstance(result, Exception) else packed(clients[place], result)

        self.run(range(len(parcels)), begin, finish)
        return [found[place] for place in range(len(parcels))]

    def run(
        self, numbers: Sequence[int], begin: Callable[[int], tuple[PersonalClient, Steps[Any]]], finish: Finish
    ) -> None:
        """Advance clients in step: one request of each at a time."""
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
                except Exception as error:  # whatever a client raises is its answer, as on a real node
                    result = error
                running.pop(number, None)
                finish(number, result)
            answers = self._answers(running)

    def _answers(self, running: Mapping[int, Running]) -> dict[int, Any]:
        """Answer one request of each client; those of one kind together."""
        groups: dict[Hashable, list[int]] = {}
        answers: dict[int, Any] = {}
        for number, one in running.items():
            try:
                groups.setdefault(self._kind(one), []).append(number)
            except Exception as error:  # the client has asked for what is no request
                answers[number] = error
        for numbers in groups.values():
            answers |= zip(numbers, self._together([running[number] for number in numbers]), strict=True)
        return answers

    def _kind(self, one: Running) -> Hashable:
        """Return what is equal in requests that are carried out together."""
        network, request = one.client.network(one.request), one.request
        stacks = self.workspace.trainer.stacks(network, 2, request if isinstance(request, Train) else None)
        if isinstance(request, Train):
            return network, request.kind if stacks else id(one), one.client.lr
        # One model for all is one pass over all samples, whatever the network.
        return network, request.parameters.shape, request.features, None if stacks else id(request.parameters)

    def _together(self, group: Sequence[Running]) -> list[Any]:
        """Answer requests of one kind, in as many pieces as memory asks for."""
        trainer, network = self.workspace.trainer, group[0].client.network(group[0].request)
        if len(group) == 1:
            return [self._one(group[0])]
        first = group[0].request
        shape = (first.start if isinstance(first, Train) else first.parameters).shape
        models = 1 if len(shape) == 1 else shape[0]
        at_once = min(self._capacity.get(network, len(group)), max(1, trainer.capacity(network) // models))
        if len(group) > at_once:
            pieces = [group[i : i + at_once] for i in range(0, len(group), at_once)]
            return [answer for piece in pieces for answer in self._together(piece)]
        try:
            if isinstance(first, Train):
                jobs = [one.client.job(one.request) for one in group if isinstance(one.request, Train)]
                return list(trainer.train_together(jobs, network))
            works = [one.request for one in group if isinstance(one.request, Forward)]
            samples = [one.client.samples(work.split) for one, work in zip(group, works, strict=True)]
            return trainer.forward_together(works, network, samples)
        except torch.OutOfMemoryError:
            self._capacity[network] = len(group) // 2
            log(WARNING, "%s clients at once do not fit into memory: going on with half as many", len(group))
        except TrainingInterruptedError:
            raise
        except Exception as error:
            log(WARNING, "%s clients cannot be trained as one computation (%r): one after the other", len(group), error)
            return [self._one(one) for one in group]
        torch.cuda.empty_cache()
        return self._together(group)

    def _one(self, one: Running) -> Any:
        try:
            return one.client.carry_out(one.request)
        except Exception as error:
            return error


def evenly(numbers: Sequence[int], most: int) -> list[Sequence[int]]:
    """Cut numbers into as few groups of at most ``most`` as there can be, and of about one size.

    Several groups are an even number, as cores are.
    """
    count = -(-len(numbers) // most)
    count += count > 1 and count % 2
    cuts = [len(numbers) * part // count for part in range(count + 1)]
    return [numbers[begin:end] for begin, end in itertools.pairwise(cuts)]
