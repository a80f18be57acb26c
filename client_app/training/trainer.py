"""Local training and inference, written once for every method.

An objective is a function of (network, batch, context), so the same code trains one model, or K models over a
stacked axis: one after the other with resident modules, or as one computation under :func:`torch.func.vmap`.
Several clients are one more axis.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from threading import Event
from typing import Any

import torch
from torch import Tensor

from posy.client_app.training.batches import Batch, Samples, Schedule, Share, plan_passes
from posy.client_app.training.graphs import Graphs
from posy.client_app.training.networks import LoopedModels, Models, Network, StackedModels, by_tensor, rows_of
from posy.client_app.training.optimiser import Optimiser
from posy.client_app.training.work import Forward, Job, Train, Trained, TrainingDivergedError, TrainingInterruptedError
from posy.sharing import is_shared
from posy.strategies.settings import TrainSettings

EVALUATION_BATCH = 512
STACK_BYTES = 2 << 30
"""Memory of a CPU that stacked models may take."""
STACK, STACK_PARAMETERS = 16, 1 << 20
"""Clients that are stacked on a CPU: so many, or as many as have so many parameters in all, if that is more.

Beyond 16 a step costs a client hardly less. But a process finds its caches cold each time it takes up a group, which
is most of what small models cost: they come in larger groups, whose parameters still fit into the cache.
"""
SMALL, SMALL_PERCEPTRON = 30_000, 200_000
"""Parameters up to which a network without convolutions is stacked on a CPU, and a perceptron without autograd."""


class Trainer:
    """Carries out :class:`Train` and :class:`Forward` on a device."""

    def __init__(self, settings: TrainSettings, device: torch.device) -> None:
        self.settings = settings
        self.device = device
        if device.type == "cuda":
            torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = settings.precision == "tf32"
        self._graphs = Graphs(device) if device.type == "cuda" else None
        self.interrupted = Event()
        """Set from another thread to end all training at the next step."""

    def stacks(self, network: Network, models: int, work: Train | None = None) -> bool:
        """Tell whether so many models are trained as one stacked computation, in a training that may be known.

        The setting ``stack`` decides. `auto` stacks on a GPU; on a CPU it stacks small networks without
        convolutions, whose time goes into calls rather than arithmetic.
        """
        if models < 2 or network.has_buffers or self.settings.stack == "loop":
            return False
        if self.settings.stack == "vmap" or self.device.type == "cuda":
            return True
        closed = network.linear_layers if work is None else network.is_closed(work)
        return not network.convolves and network.size <= (SMALL_PERCEPTRON if closed else SMALL)

    def together(self, network: Network, clients: int) -> int:
        """Return how many of some clients advance together: on a CPU no more than it takes to make stacking pay.

        There more than two clients make two groups or more, for as many cores; how many cores there are must not decide
        it, as stacks of other sizes round otherwise.
        """
        most = self.capacity(network)
        if self.device.type == "cuda":
            return most
        return min(most, max(STACK, STACK_PARAMETERS // network.size), max(2, -(-clients // 2)))

    def capacity(self, network: Network) -> int:
        """Return how many models of a network may be trained at once, by the memory that there is for them.

        An estimate: parameters, gradients, momentum, anchor and result, and as much again for activations.
        """
        free = STACK_BYTES
        if self.device.type == "cuda":  # what PyTorch holds from earlier rounds, but does not use, is free to it
            held = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
            free = torch.cuda.mem_get_info(self.device)[0] + held
        return max(1, int(0.8 * free) // (10 * 4 * network.size))

    def train(self, job: Job, network: Network) -> Trained:
        """Run one client's local SGD, or raise :class:`TrainingDivergedError` if it leaves the finite numbers."""
        (result,) = self.train_together([job], network)
        if isinstance(result, TrainingDivergedError):
            raise result
        return result

    def train_together(self, jobs: Sequence[Job], network: Network) -> list[Trained | TrainingDivergedError]:
        """Run the local SGD of several clients, every one with the steps that it would take alone.

        All jobs are of one :attr:`Train.kind` and one learning rate; more than one are a stacked computation.

        Raises
        ------
        ValueError
            If a client has no batch to train on, or no random numbers for a network with dropout.
        TrainingInterruptedError
            If :attr:`interrupted` is set meanwhile.
        """
        for job in jobs:
            if job.samples.y.shape[0] < network.smallest_batch:
                raise ValueError(
                    f"no mini-batch to train on: {job.samples.y.shape[0]} samples, and BatchNorm needs two in a batch"
                )
            if network.dropout_width and job.dropout is None:
                raise ValueError(
                    "a network with dropout needs random numbers that tell what is dropped: there are none"
                )
        if jobs[0].models:
            return self._train_apart(jobs, network)
        single = jobs[0].work.start.dim() == 1
        shares = [self.share(job, network.smallest_batch) for job in jobs]
        models: Models
        schedule: Share | Schedule
        if len(jobs) > 1 or self.stacks(network, 1 if single else len(jobs[0].work.start), jobs[0].work):
            schedule = Schedule(shares)
            places = schedule.order
            models = StackedModels(network, [jobs[place].work for place in places])
        else:
            schedule, places = shares[0], [0]
            models = LoopedModels(network, jobs[0].work)
        ordered = [jobs[place] for place in places]
        optimiser = Optimiser(self.settings, models, ordered)
        loss = self._run(network, models, ordered, schedule, optimiser) / schedule.seen
        flat = models.flat.clone() if isinstance(models, LoopedModels) else models.flat  # which joins them anew
        finite = (torch.isfinite(loss) & torch.isfinite(flat.sum(dim=-1))).all(dim=1).tolist()
        results: list[Any] = [None] * len(jobs)
        kept = [flat, loss]
        if models.beside:
            with torch.no_grad():
                kept.append(flat + models.joined(torch._foreach_sub(models.beside, models.parameters)))
        own = [(t[:, 0] if single else t).unbind() for t in kept]
        for row, (place, *trained) in enumerate(zip(places, *own, strict=True)):
            results[place] = Trained(*trained)
            if not finite[row]:
                results[place] = TrainingDivergedError(
                    f"training diverged: the loss of the last epoch is {loss[row].tolist()}; "
                    f"a smaller lr than {jobs[place].lr:g} may help"
                )
        if jobs[0].moments is not None:
            rows = zip(ordered, places, optimiser.moments(models, single), finite, strict=True)
            for job, place, later, good in rows:
                if good and job.moments is not None:
                    job.moments.follow(shares[place].steps, *later)
        return results

    def _train_apart(self, jobs: Sequence[Job], network: Network) -> list[Trained | TrainingDivergedError]:
        """Train K models of each client over batches of their own: as many trainings of one model."""
        count = len(jobs[0].models)
        singles = [single for job in jobs for single in job.models]
        stacked = len(jobs) > 1 or self.stacks(network, count, jobs[0].work)
        groups = [singles] if stacked else [[single] for single in singles]
        results = [result for group in groups for result in self.train_together(group, network)]
        joined: list[Trained | TrainingDivergedError] = []
        for begin in range(0, len(results), count):
            of_client = results[begin : begin + count]
            errors = [result for result in of_client if isinstance(result, TrainingDivergedError)]
            trained = [result for result in of_client if isinstance(result, Trained)]
            if errors:
                joined.append(errors[0])
                continue
            parameters = torch.stack([result.parameters for result in trained])
            joined.append(Trained(parameters, torch.stack([result.loss for result in trained])))
        return joined

    def _autocast(self) -> AbstractContextManager[Any]:
        if self.settings.precision != "bfloat16":
            return nullcontext()
        # Without its cache, which a step has no use for: one that is not cleared holds weights of earlier steps.
        return torch.autocast(self.device.type, torch.bfloat16, cache_enabled=False)

    def _run(
        self, network: Network, models: Models, jobs: Sequence[Job], schedule: Share | Schedule, optimiser: Optimiser
    ) -> Tensor:
        """Train and return the summed losses ``(P, K)`` of the last epoch."""
        total = torch.zeros(len(jobs), models.count, device=self.device)
        work = jobs[0].work

        def step(batch: Batch, counted: Tensor | int | None) -> None:
            with self._autocast():
                losses, gradients = work.rule.gradients(models, batch) if work.rule else models.gradients(batch)
            optimiser.step(gradients)
            if counted is not None:
                rows = total[: len(losses)]
                rows.addcmul_(losses, counted) if isinstance(counted, Tensor) else rows.add_(losses, alpha=counted)

        def go_on() -> None:
            if self.interrupted.is_set():
                raise TrainingInterruptedError("local training was told to stop")

        if self._graphs is not None and isinstance(schedule, Schedule) and optimiser.is_repeatable:
            kind = (work.kind, network)
            self._graphs.carry_out(kind, schedule.runs(), lambda *place: step(*schedule.at(*place)), go_on)
            return total
        for batch, counted in schedule:
            step(batch, counted)
            go_on()
        return total

    def share(self, job: Job, smallest: int = 1) -> Share:
        """Return a job's passes over its samples, as many as the job or the settings ask for."""
        work, size = job.work, self.settings.batch_size
        steps = work.steps if work.steps is not None else (0 if work.epochs is not None else self.settings.local_steps)
        epochs = work.epochs if work.epochs is not None else self.settings.local_epochs
        passes = plan_passes(epochs, steps, job.samples.y.shape[0], size, smallest)
        weight = work.sample_weight
        if job.class_weight is not None:
            weight = job.class_weight if weight is None else weight * job.class_weight
        weight, odds = (None, weight) if work.resample else (weight, None)
        sources = (job.augment, work.notes, job.dropout)
        return Share(job.samples, passes, job.generator, size, smallest, weight, odds, *sources)

    def forward(self, work: Forward, network: Network, samples: Samples) -> Any:
        """Return the outputs of the model or models in evaluation mode."""
        return self.forward_together([work], network, [samples])[0]

    @torch.no_grad()
    def forward_together(self, works: Sequence[Forward], network: Network, samples: Sequence[Samples]) -> list[Any]:
        """Return the outputs for several clients.

        Where all have the same parameters, their samples are one sequence; else the models, of one shape,
        are one stacked computation.
        """
        with self._autocast():
            if is_shared([work.parameters for work in works]):  # requests of one kind: all with features, or none
                inputs = samples[0].x if len(samples) == 1 else torch.cat([each.x for each in samples])
                lengths = [len(each.y) for each in samples]
                outputs = self._forward_alone(works[0], network, inputs)
                results = [list(own) for own in zip(*(torch.split(t, lengths, dim=-2) for t in outputs), strict=True)]
            else:
                results = self._forward_stacked(works, network, samples)
        return [result[0].float() if len(result) == 1 else tuple(t.float() for t in result) for result in results]

    def _forward_alone(self, work: Forward, network: Network, inputs: Tensor) -> list[Tensor]:
        single = work.parameters.dim() == 1
        parameters = work.parameters.unsqueeze(0) if single else work.parameters
        network.stack(len(parameters)).copy_(parameters)
        outputs = []
        options = (True,) if work.features else ()
        for module in network.modules[: len(parameters)]:
            module.eval()
            pieces = [_tuple(module(x, *options)) for x in torch.split(inputs, EVALUATION_BATCH)]
            outputs.append([torch.cat(column) for column in zip(*pieces, strict=True)])
        return outputs[0] if single else [torch.stack(column) for column in zip(*outputs, strict=True)]

    def _forward_stacked(
        self, works: Sequence[Forward], network: Network, samples: Sequence[Samples]
    ) -> list[list[Tensor]]:
        single = works[0].parameters.dim() == 1
        order = sorted(range(len(works)), key=lambda i: -len(samples[i].y))
        counts = torch.tensor([len(samples[i].y) for i in order])
        rows = rows_of([works[i].parameters for i in order])
        tensors = by_tensor(network.layout, rows)
        inputs = torch.cat([samples[i].x for i in order])
        starts = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)[:-1]])
        module = network.template.eval()
        options = (True,) if works[0].features else ()

        def outputs(tensors: dict[str, Tensor], x: Tensor) -> Any:
            return torch.func.functional_call(module, tensors, (x, *options))

        compute = torch.func.vmap(torch.func.vmap(outputs, in_dims=(0, None)), in_dims=(0, 0))
        width = max(1, EVALUATION_BATCH // len(works))
        pieces: list[list[list[Tensor]]] = [[] for _ in works]
        for begin in range(0, int(counts[0]), width):
            active = int((counts > begin).sum())
            columns = torch.arange(begin, min(begin + width, int(counts[0])))
            index = starts[:active, None] + torch.minimum(columns[None, :], counts[:active, None] - 1)
            own = {name: tensor[:active] for name, tensor in tensors.items()}
            result = _tuple(compute(own, inputs[index.to(inputs.device)]))
            for place in range(active):
                held = min(int(counts[place]) - begin, width)
                pieces[order[place]].append([t[place, :, :held] for t in result])
        # A client without samples has outputs of no rows, like those of the others.
        nothing = [t[:, :0] for t in pieces[order[0]][0]]
        joined = [[torch.cat(column, dim=1) for column in zip(*(own or [nothing]), strict=True)] for own in pieces]
        return [[t[0] for t in own] for own in joined] if single else joined


def _tuple(output: Any) -> tuple[Tensor, ...]:
    """Return the outputs of a network, of which most have one."""
    return output if isinstance(output, tuple) else (output,)
