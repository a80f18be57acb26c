"""Local training and inference, implemented once for all methods.

An objective is a function of (network, batch, context), so the same code trains one model or K models. K models are
trained one after the other in copies of a module, or as one stacked computation under :func:`torch.func.vmap`. Training
several clients together adds another axis.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from threading import Event
from typing import Any

import torch
from torch import Tensor

from posy.client_app.training import private
from posy.client_app.training.batches import Batch, Samples, Schedule, Share, full_batches, plan_passes
from posy.client_app.training.graphs import Graphs
from posy.client_app.training.networks import LoopedModels, Models, Network, StackedModels, by_tensor, rows_of
from posy.client_app.training.optimiser import Optimiser
from posy.client_app.training.work import (
    Forward,
    Job,
    TooFewSamplesError,
    Train,
    Trained,
    TrainingDivergedError,
    TrainingInterruptedError,
    advice_on_divergence,
)
from posy.sharing import is_shared
from posy.strategies.privacy import Sampling
from posy.strategies.run_settings import SAMPLE, TrainSettings

EVALUATION_BATCH = 512
TF32_CAPABILITY = (8, 0)
"""Minimum compute capability of GPUs that support TF32 arithmetic."""
STACK_BYTES = 2 << 30
"""Maximum memory for stacked models on a CPU, in bytes."""
STACK, STACK_PARAMETERS = 16, 1 << 20
"""Size of a group of stacked clients on a CPU: 16, or more if their models have at most 2²⁰ parameters in total.

Beyond 16 clients, the cost per client and step hardly decreases. Each new group starts with cold caches, and cache
misses dominate the cost of small models. Small models are therefore stacked in larger groups, as long as their
parameters fit into the cache.
"""
SMALL, SMALL_PERCEPTRON = 30_000, 200_000
"""Maximum number of parameters at which a network without convolutions is stacked on a CPU. The second limit applies if
the gradients have a closed form."""


class Trainer:
    """Runs :class:`Train` and :class:`Forward` requests on a device.

    ``min_batch`` is the minimum number of samples in a mini-batch. If a client's last mini-batch would be smaller, this
    client's batch size is increased.
    """

    def __init__(self, settings: TrainSettings, device: torch.device, min_batch: int = 1) -> None:
        self.settings = settings
        self.device = device
        self.min_batch = min_batch
        if device.type == "cuda":
            torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = settings.precision == "tf32"
        self._graphs = Graphs(device) if device.type == "cuda" else None
        self.interrupted = Event()
        """Set by another thread to stop all training at the next step."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes on settings that have no effect on the device."""
        if self.settings.precision != "tf32":
            return ()
        if self.device.type == "cuda" and torch.cuda.get_device_capability(self.device) >= TF32_CAPABILITY:
            return ()
        return (
            f"precision = 'tf32' has no effect on the device {self.device}, which computes in float32; set "
            "precision = 'float32', or choose a GPU of the Ampere generation or later",
        )

    def stacks(self, network: Network, models: int, work: Train | None = None) -> bool:
        """Return whether models are trained as one stacked computation.

        The setting ``stack`` determines the result. `auto` stacks models on a GPU. On a CPU, it stacks only small
        networks without convolutions, because these spend more time on call overhead than on arithmetic.

        Parameters
        ----------
        network : Network
            The network that all models share.
        models : int
            Number of models.
        work : Train, optional
            The request, whose gradients may have a closed form. None means the default objective.
        """
        if models < 2 or network.has_buffers or self.settings.stack == "loop":
            return False
        if self.settings.dp == SAMPLE and (work is None or not work.measures):  # DP-SGD's batches vary in size
            return False
        if self.settings.stack == "vmap" or self.device.type == "cuda":
            return True
        is_closed_form = network.linear_layers if work is None else network.is_closed(work)
        return not network.convolves and network.size <= (SMALL_PERCEPTRON if is_closed_form else SMALL)

    def together(self, network: Network, clients: int) -> int:
        """Return the number of clients in a stack. On a CPU, larger stacks would not be faster.

        On a CPU, more than two clients form at least two stacks, so that two cores can work in parallel. The stack size
        must not depend on the number of cores, because stacks of different sizes round differently.
        """
        limit = self.capacity(network)
        if self.device.type == "cuda":
            return limit
        return min(limit, max(STACK, STACK_PARAMETERS // network.size), max(2, -(-clients // 2)))

    def capacity(self, network: Network) -> int:
        """Return how many models of a network fit into memory at the same time.

        The estimate covers parameters, gradients, momentum, anchor and result, and the same amount of memory for
        activations.
        """
        free_bytes = STACK_BYTES
        if self.device.type == "cuda":  # PyTorch can reuse memory that it has reserved but not allocated
            reusable_bytes = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
            free_bytes = torch.cuda.mem_get_info(self.device)[0] + reusable_bytes
        return max(1, int(0.8 * free_bytes) // (10 * 4 * network.size))

    def train(self, job: Job, network: Network) -> Trained:
        """Run one client's local SGD, or raise :class:`TrainingDivergedError` if its result is not finite."""
        (result,) = self.train_together([job], network)
        if isinstance(result, TrainingDivergedError):
            raise result
        return result

    def train_together(self, jobs: Sequence[Job], network: Network) -> list[Trained | TrainingDivergedError]:
        """Run local SGD for several clients, with the same steps as if each client trained alone.

        All jobs must have the same :attr:`Train.kind` and learning rate. Two or more jobs run as one stacked
        computation.

        Raises
        ------
        ValueError
            If a client has too few samples for a batch, or if its network has dropout but its job lacks random numbers.
        TrainingInterruptedError
            If :attr:`interrupted` is set during training.
        """
        for job in jobs:
            _check_job(job, network)
        if jobs[0].sampling is not None:
            return [self._train_privately(job, job.sampling, network) for job in jobs if job.sampling is not None]
        if jobs[0].models:
            return self._train_separately(jobs, network)
        is_single = jobs[0].work.start.dim() == 1
        shares = [self.share(job, network.smallest_batch) for job in jobs]
        models: Models
        schedule: Share | Schedule
        if len(jobs) > 1 or self.stacks(network, 1 if is_single else len(jobs[0].work.start), jobs[0].work):
            schedule = Schedule(shares)
            order = schedule.order
            models = StackedModels(network, [jobs[index].work for index in order])
        else:
            schedule, order = shares[0], [0]
            models = LoopedModels(network, jobs[0].work)
        ordered = [jobs[index] for index in order]
        optimiser = Optimiser(self.settings, models, ordered)
        loss = self._run(network, models, ordered, schedule, optimiser) / schedule.last_pass_count
        flat = models.flat.clone() if isinstance(models, LoopedModels) else models.flat  # already a new tensor
        finite_rows = (torch.isfinite(loss) & torch.isfinite(flat.sum(dim=-1))).all(dim=1).tolist()
        results: list[Any] = [None] * len(jobs)
        outcome = [flat, loss]
        if models.auxiliary:
            with torch.no_grad():
                outcome.append(flat + models.joined(torch._foreach_sub(models.auxiliary, models.parameters)))
        values_by_job = [(t[:, 0] if is_single else t).unbind() for t in outcome]
        for row, (index, *trained) in enumerate(zip(order, *values_by_job, strict=True)):
            results[index] = Trained(*trained)._replace(steps=shares[index].steps)
            if not finite_rows[row]:
                # The message omits the loss, so it is the same for all clients, and the server logs it once per round.
                results[index] = TrainingDivergedError(
                    "training diverged: the model or its loss is NaN or infinite; "
                    f"{advice_on_divergence(self.settings, jobs[index].lr)}"
                )
        if jobs[0].moments is not None:
            rows = zip(ordered, order, optimiser.moments(models, is_single), finite_rows, strict=True)
            for job, index, means, is_finite in rows:
                if is_finite and job.moments is not None:
                    job.moments.follow(shares[index].steps, *means)
        return results

    def _train_separately(self, jobs: Sequence[Job], network: Network) -> list[Trained | TrainingDivergedError]:
        """Train each client's K models on separate batches, as K jobs with one model each."""
        count = len(jobs[0].models)
        singles = [single for job in jobs for single in job.models]
        stacked = len(jobs) > 1 or self.stacks(network, count, jobs[0].work)
        groups = [singles] if stacked else [[single] for single in singles]
        results = [result for group in groups for result in self.train_together(group, network)]
        joined: list[Trained | TrainingDivergedError] = []
        for begin in range(0, len(results), count):
            client_results = results[begin : begin + count]
            errors = [result for result in client_results if isinstance(result, TrainingDivergedError)]
            trained = [result for result in client_results if isinstance(result, Trained)]
            if errors:
                joined.append(errors[0])
                continue
            parameters = torch.stack([result.parameters for result in trained])
            loss = torch.stack([result.loss for result in trained])
            joined.append(Trained(parameters, loss, steps=trained[0].steps))
        return joined

    def _train_privately(self, job: Job, sampling: Sampling, network: Network) -> Trained:
        """Run one client's DP-SGD. See :mod:`posy.client_app.training.private`.

        Non-finite values are not an error here, because the error would reveal them.
        """
        private.check_job(job)
        models = LoopedModels(network, job.work)
        optimiser = Optimiser(self.settings, models, [job])

        def step(gradients: list[Tensor]) -> None:
            optimiser.step(gradients)
            if self.interrupted.is_set():
                raise TrainingInterruptedError("local training was interrupted")

        loss = private.steps(job, sampling, network, models.parameters, step)
        if job.moments is not None:
            ((means, squares),) = optimiser.moments(models, single=True)
            job.moments.follow(sampling.steps, means, squares)
        return Trained(models.flat[0, 0].clone(), loss, steps=sampling.steps)

    def _autocast(self) -> AbstractContextManager[Any]:
        if self.settings.precision != "bfloat16":
            return nullcontext()
        # Autocast's cache would not speed up a step, but would keep the weights of earlier steps in memory.
        return torch.autocast(self.device.type, torch.bfloat16, cache_enabled=False)

    def _run(
        self, network: Network, models: Models, jobs: Sequence[Job], schedule: Share | Schedule, optimiser: Optimiser
    ) -> Tensor:
        """Run all training steps, and return the sums ``(P, K)`` of the losses in the last epoch."""
        total = torch.zeros(len(jobs), models.count, device=self.device)
        work = jobs[0].work

        def step(batch: Batch, loss_weight: Tensor | int | None) -> None:
            with self._autocast():
                losses, gradients = work.rule.gradients(models, batch) if work.rule else models.gradients(batch)
            optimiser.step(gradients)
            if loss_weight is not None:
                rows = total[: len(losses)]
                rows.addcmul_(losses, loss_weight) if isinstance(loss_weight, Tensor) else rows.add_(
                    losses, alpha=loss_weight
                )

        def check_interrupted() -> None:
            if self.interrupted.is_set():
                raise TrainingInterruptedError("local training was interrupted")

        if self._graphs is not None and isinstance(schedule, Schedule) and optimiser.is_repeatable:
            kind = (work.kind, network)
            self._graphs.replay(kind, schedule.runs(), lambda *index: step(*schedule.at(*index)), check_interrupted)
            return total
        for batch, loss_weight in schedule:
            step(batch, loss_weight)
            check_interrupted()
        return total

    def share(self, job: Job, smallest: int = 1) -> Share:
        """Return a job's batches. The job's own epochs or steps take precedence over the settings."""
        work, settings = job.work, job.settings or self.settings
        size = full_batches(settings.batch_size, job.samples.y.shape[0], self.min_batch)
        steps = work.steps if work.steps is not None else (0 if work.epochs is not None else settings.local_steps)
        epochs = work.epochs if work.epochs is not None else settings.local_epochs
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

        If all clients have the same parameters, one model processes all samples. Otherwise, the models, which have the
        same shape, run as one stacked computation.
        """
        with self._autocast():
            if is_shared([work.parameters for work in works]):  # all requests have the same ``features``
                inputs = samples[0].x if len(samples) == 1 else torch.cat([each.x for each in samples])
                lengths = [len(each.y) for each in samples]
                outputs = self._forward_alone(works[0], network, inputs)
                pieces = (torch.split(t, lengths, dim=-2) for t in outputs)
                results = [list(of_client) for of_client in zip(*pieces, strict=True)]
            else:
                results = self._forward_stacked(works, network, samples)
        return [result[0].float() if len(result) == 1 else tuple(t.float() for t in result) for result in results]

    def _forward_alone(self, work: Forward, network: Network, inputs: Tensor) -> list[Tensor]:
        is_single = work.parameters.dim() == 1
        parameters = work.parameters.unsqueeze(0) if is_single else work.parameters
        network.stack(len(parameters)).copy_(parameters)
        outputs = []
        options = (True,) if work.features else ()
        for module in network.modules[: len(parameters)]:
            module.eval()
            pieces = [_tuple(module(x, *options)) for x in torch.split(inputs, EVALUATION_BATCH)]
            outputs.append([torch.cat(column) for column in zip(*pieces, strict=True)])
        return outputs[0] if is_single else [torch.stack(column) for column in zip(*outputs, strict=True)]

    def _forward_stacked(
        self, works: Sequence[Forward], network: Network, samples: Sequence[Samples]
    ) -> list[list[Tensor]]:
        is_single = works[0].parameters.dim() == 1
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
            active_tensors = {name: tensor[:active] for name, tensor in tensors.items()}
            result = _tuple(compute(active_tensors, inputs[index.to(inputs.device)]))
            for row in range(active):
                valid = min(int(counts[row]) - begin, width)
                pieces[order[row]].append([t[row, :, :valid] for t in result])
        # The outputs of a client without samples have no rows.
        empty = [t[:, :0] for t in pieces[order[0]][0]]
        joined = [[torch.cat(column, dim=1) for column in zip(*(client or [empty]), strict=True)] for client in pieces]
        return [[t[0] for t in client] for client in joined] if is_single else joined


def _tuple(output: Any) -> tuple[Tensor, ...]:
    """Return the outputs of a network as a tuple."""
    return output if isinstance(output, tuple) else (output,)


def _check_job(job: Job, network: Network) -> None:
    """Check that a client has enough samples for a batch, and random numbers if its network has dropout.

    Raises
    ------
    TooFewSamplesError, ValueError
        If the client has too few samples, or if the job lacks random numbers.
    """
    if job.samples.y.shape[0] < network.smallest_batch:
        raise TooFewSamplesError(
            f"no mini-batch to train on: the client has {job.samples.y.shape[0]} samples, and BatchNorm needs "
            "two in a batch; give each client more samples"
        )
    if network.dropout_width and job.dropout is None and not job.work.measures:
        raise ValueError("the network has dropout, but the job has no random numbers for it (Job.dropout)")
