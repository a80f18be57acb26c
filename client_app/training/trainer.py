"""Local training and inference, written once for every method.

A method asks for work by yielding :class:`Train` and :class:`Forward` requests from a generator (see
:mod:`posy.client_app.base`); :class:`Trainer` carries them out. An objective is a function of (network,
batch, context), so the same code trains one model, or K models over a stacked axis: one after the
other with resident modules, or as one computation under :func:`torch.func.vmap`. Several clients are
one more axis.
"""

from collections.abc import Callable, Sequence
from threading import Event
from typing import Any

import torch
from torch import Tensor

from posy.client_app.training.batches import Samples, Schedule, Share, batches, plan_epochs
from posy.client_app.training.networks import LoopedModels, Models, Network, StackedModels, _rows
from posy.client_app.training.sgd import SGD
from posy.client_app.training.work import Forward, Job, Trained, TrainingDivergedError, TrainingInterruptedError
from posy.strategies.settings import TrainSettings

EVALUATION_BATCH = 512
STACK_BYTES = 2 << 30
"""Memory of a CPU that stacked models may take."""
SMALL = 30_000
"""Parameters up to which a network without convolutions is stacked on a CPU."""


class Trainer:
    """Carries out :class:`Train` and :class:`Forward` on a device."""

    def __init__(self, settings: TrainSettings, device: torch.device) -> None:
        self.settings = settings
        self.device = device
        if device.type == "cuda":
            torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = settings.precision == "tf32"
        self.interrupted = Event()
        """Set from another thread to end all training at the next step."""

    def stacks(self, network: Network, models: int) -> bool:
        """Tell whether so many models are trained as one stacked computation.

        The setting ``stack`` decides. `auto` stacks on a GPU; on a CPU it stacks small networks without
        convolutions, whose time goes into calls rather than arithmetic.
        """
        if models < 2 or network.has_buffers or self.settings.stack == "loop":
            return False
        if self.settings.stack == "vmap" or self.device.type == "cuda":
            return True
        return not network.convolves and network.layout.size <= SMALL

    def capacity(self, network: Network) -> int:
        """Return how many models of a network may be trained at once, by the memory that there is for them.

        An estimate: parameters, gradients, momentum, anchor and result, and as much again for activations.
        """
        free = STACK_BYTES
        if self.device.type == "cuda":  # what PyTorch holds from earlier rounds, but does not use, is free to it
            held = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
            free = torch.cuda.mem_get_info(self.device)[0] + held
        return max(1, int(0.8 * free) // (10 * 4 * network.layout.size))

    def train(self, job: Job, network: Network) -> Trained:
        """Run one client's local SGD (momentum starts at zero).

        Raises
        ------
        TrainingDivergedError
            If the loss or a parameter is no longer finite.
        """
        (result,) = self.train_together([job], network)
        if isinstance(result, TrainingDivergedError):
            raise result
        return result

    def train_together(self, jobs: Sequence[Job], network: Network) -> list[Trained | TrainingDivergedError]:
        """Run the local SGD of several clients, every one with the steps that it would take alone.

        Parameters
        ----------
        jobs : sequence of Job
            All of one :func:`kind`; more than one are a stacked computation.
        network : Network
            The network that they train.

        Raises
        ------
        ValueError
            If a client has no batch to train on.
        TrainingInterruptedError
            If :attr:`interrupted` is set meanwhile.
        """
        smallest = network.smallest_batch
        for job in jobs:
            if len(job.samples.y) < smallest:
                raise ValueError(
                    f"no mini-batch to train on: {len(job.samples.y)} samples, and BatchNorm needs two in a batch"
                )
        single = jobs[0].work.start.dim() == 1
        if len(jobs) > 1 or self.stacks(network, 1 if single else len(jobs[0].work.start)):
            schedule = Schedule(
                [self._share(job, smallest) for job in jobs], self.settings.batch_size, smallest, self.device
            )
            places = schedule.order
            jobs = [jobs[i] for i in places]
            models: Models = StackedModels(network, [job.work for job in jobs])
            loss = self._run(models, jobs, schedule) / schedule.seen
        else:
            places = [0]
            models = LoopedModels(network, jobs[0].work)
            loss = self._run_alone(models, jobs[0], smallest)
        finite = (torch.isfinite(loss) & torch.isfinite(models.flat.sum(dim=-1))).all(dim=1).tolist()
        results: list[Trained | TrainingDivergedError] = [TrainingDivergedError()] * len(jobs)
        for row, place in enumerate(places):
            if finite[row]:
                parameters = models.flat[row].clone()
                results[place] = Trained(
                    parameters[0] if single else parameters, loss[row, 0] if single else loss[row].clone()
                )
            else:
                results[place] = TrainingDivergedError(
                    f"training diverged: the loss of the last epoch is {loss[row].tolist()}; "
                    f"a smaller lr than {jobs[row].lr:g} may help"
                )
        return results

    def _autocast(self) -> torch.autocast:
        # Without its cache, which a step has no use for: one that is not cleared holds weights of earlier steps.
        enabled = self.settings.precision == "bfloat16"
        return torch.autocast(self.device.type, torch.bfloat16, enabled=enabled, cache_enabled=False)

    def _run(self, models: Models, jobs: Sequence[Job], schedule: Schedule) -> Tensor:
        """Train and return the summed losses ``(P, K)`` of the last epoch."""
        optimiser = SGD(self.settings, models, jobs)
        total = torch.zeros(models.flat.shape[:2], device=self.device)
        for batch, counted in schedule:
            with self._autocast():
                losses, gradients = models.gradients(batch)
            optimiser.step(gradients)
            total[: len(losses)] += losses * counted
            self._check_interrupted()
        return total

    def _run_alone(self, models: Models, job: Job, smallest: int) -> Tensor:
        """Train one client's models and return the mean losses ``(1, K)`` of the last epoch."""
        optimiser = SGD(self.settings, models, [job])
        share = self._share(job, smallest)
        total = torch.zeros(models.flat.shape[:2], device=self.device)
        seen = 0
        for steps in share.epochs:
            total.zero_()
            seen = 0
            for batch in batches(
                job.samples, share.weight, self.settings.batch_size, steps, job.generator, smallest, share.odds,
                job.augment,
            ):  # fmt: skip
                with self._autocast():
                    losses, gradients = models.gradients(batch)
                optimiser.step(gradients)
                total += losses * len(batch.y)
                seen += len(batch.y)
                self._check_interrupted()
        return total / seen

    def _share(self, job: Job, smallest: int) -> Share:
        work, count, size = job.work, len(job.samples.y), self.settings.batch_size
        steps = work.steps if work.steps is not None else (0 if work.epochs is not None else self.settings.local_steps)
        epochs = work.epochs if work.epochs is not None else self.settings.local_epochs
        plan = plan_epochs(epochs, steps, count, size, smallest)
        weight, odds = (None, work.sample_weight) if work.resample else (work.sample_weight, None)
        return Share(job.samples, weight, plan, job.generator, job.augment, odds)

    def _check_interrupted(self) -> None:
        if self.interrupted.is_set():
            raise TrainingInterruptedError("local training was told to stop")

    def forward(self, work: Forward, network: Network, samples: Samples) -> Any:
        """Return the outputs of the model or models in evaluation mode."""
        return self.forward_together([work], network, [samples])[0]

    @torch.no_grad()
    def forward_together(self, works: Sequence[Forward], network: Network, samples: Sequence[Samples]) -> list[Any]:
        """Return the outputs for several clients.

        Where all have the same parameters, their samples are one sequence; else the models, of one shape,
        are one stacked computation.
        """
        first = works[0].parameters
        with self._autocast():
            if all(work.parameters is first for work in works):
                inputs = samples[0].x if len(samples) == 1 else torch.cat([each.x for each in samples])
                outputs = self._forward_alone(works[0], network, inputs)
                results = _cut(outputs, [len(each.y) for each in samples])
            else:
                results = self._forward_stacked(works, network, samples)
        return [_map(torch.Tensor.float, result) for result in results]

    def _forward_alone(self, work: Forward, network: Network, inputs: Tensor) -> Any:
        single = work.parameters.dim() == 1
        parameters = work.parameters.unsqueeze(0) if single else work.parameters
        network.stack(len(parameters)).copy_(parameters)
        outputs = []
        for net in network.nets[: len(parameters)]:
            net.module.eval()
            outputs.append(_join([net(x) for x in torch.split(inputs, EVALUATION_BATCH)], 0))
        return outputs[0] if single else _map(torch.stack, outputs)

    def _forward_stacked(self, works: Sequence[Forward], network: Network, samples: Sequence[Samples]) -> list[Any]:
        single = works[0].parameters.dim() == 1
        order = sorted(range(len(works)), key=lambda i: -len(samples[i].y))
        counts = torch.tensor([len(samples[i].y) for i in order])
        flat = _rows([works[i].parameters for i in order], 1 if single else len(works[0].parameters))
        inputs = torch.cat([samples[i].x for i in order])
        starts = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)[:-1]])
        module = network.template.eval()

        def outputs(row: Tensor, x: Tensor) -> Any:
            return torch.func.functional_call(module, network.layout.views(row), (x,))

        compute = torch.func.vmap(torch.func.vmap(outputs, in_dims=(0, None)), in_dims=(0, 0))
        width = max(1, EVALUATION_BATCH // len(works))
        pieces: list[list[Any]] = [[] for _ in works]
        for begin in range(0, int(counts[0]), width):
            active = int((counts > begin).sum())
            columns = torch.arange(begin, min(begin + width, int(counts[0])))
            index = starts[:active, None] + torch.minimum(columns[None, :], counts[:active, None] - 1)
            result = compute(flat[:active], inputs[index.to(inputs.device)])
            for place in range(active):
                held = min(int(counts[place]) - begin, width)
                pieces[order[place]].append(_map(lambda t, p=place, h=held: t[p, :, :h], result))
        joined = [_join(piece, 1) if piece else None for piece in pieces]
        # A client without samples has outputs of no rows, like those of the others.
        like = next(piece for piece in joined if piece is not None)
        full = [_map(lambda t: t[:, :0], like) if piece is None else piece for piece in joined]
        return [_map(lambda t: t[0], piece) for piece in full] if single else full


def _map(function: Callable[..., Any], output: Any) -> Any:
    """Apply a function to an output, to each tensor of one that is a tuple, or across a list of them."""
    if isinstance(output, list):
        if isinstance(output[0], tuple):
            return tuple(function(list(column)) for column in zip(*output, strict=True))
        return function(output)
    return tuple(map(function, output)) if isinstance(output, tuple) else function(output)


def _join(pieces: list[Any], dim: int) -> Any:
    """Concatenate the outputs of several batches."""
    return _map(lambda tensors: torch.cat(tensors, dim=dim), pieces)


def _cut(output: Any, lengths: list[int]) -> list[Any]:
    """Cut outputs along the samples, which are the last axis but one."""
    if len(lengths) == 1:
        return [output]
    if isinstance(output, tuple):
        return list(zip(*(tensor.split(lengths, dim=-2) for tensor in output), strict=True))
    return list(output.split(lengths, dim=-2))
