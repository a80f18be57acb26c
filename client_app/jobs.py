"""A client's training jobs: their samples, random streams, weights and optimisers."""

import weakref
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from posy.client_app.hooks import ClientHooks, Steps
from posy.client_app.predictors import standardised
from posy.client_app.training.batches import DropoutNumbers, Samples, Share
from posy.client_app.training.networks import Network
from posy.client_app.training.work import Forward, Job, Moments, Split, Train, Trained
from posy.randomness import torch_generator
from posy.strategies.privacy import sampling_of

R = TypeVar("R")


class Jobs:
    """Runs a client's requests on the client's samples, using the client's random streams for the round.

    Parameters
    ----------
    client : ClientHooks
        The client that makes the requests.
    """

    def __init__(self, client: ClientHooks) -> None:
        # A strong reference would create a cycle, keeping the client's state in memory until garbage collection.
        self._client = weakref.ref(client)
        self.workspace = client.workspace
        self.settings = client.settings
        self.processed = 0
        """Number of samples that this call has trained on. With K models, each sample counts K times."""
        self.samples_private = False
        """Whether training uses DP-SGD. Only training that affects the reply needs DP-SGD."""
        self.moments: dict[str, Moments] | None = None
        """The states of the round's optimisers, keyed by name, if ``optimizer-state = kept``."""

    @property
    def client(self) -> ClientHooks:
        """The client whose requests this object executes."""
        client = self._client()
        assert client is not None
        return client

    def drive(self, steps: Steps[R]) -> R:
        """Run a method's requests in order and return its result. An error in a request is raised inside the method."""
        try:
            request = next(steps)
            while True:
                try:
                    answer = self.answer(request)
                except Exception as error:
                    request = steps.throw(error)
                else:
                    request = steps.send(answer)
        except StopIteration as finished:
            return finished.value

    def answer(self, request: Train | Forward) -> Trained | Any:
        """Run one request and return its result."""
        network, trainer = self.network(request), self.workspace.trainer
        if isinstance(request, Forward):
            return trainer.forward(request, network, self.samples(request.split))
        return trainer.train(self.job(request), network)

    def samples(self, split: Split) -> Samples:
        """Return the samples of a split, with targets in the form that a network predicts."""
        data = self.client.data
        return Samples(getattr(data, f"x_{split}"), standardised(getattr(data, f"y_{split}"), self.workspace.task))

    @cached_property
    def class_weight(self) -> Tensor | None:
        """Class weight of each training sample ``(n,)``, scaled to mean 1, or None with ``class-weights = none``."""
        return self.class_weights("train")

    def class_weights(self, split: Split) -> Tensor | None:
        """Return the class weight of each sample of a split ``(n,)``, scaled to mean 1.

        The weight of a class is inversely proportional to its number of training samples. The result is None with
        ``class-weights = none``.
        """
        if self.settings.train.class_weights == "none":
            return None
        data = self.client.data
        counts = torch.bincount(data.y_train, minlength=data.num_classes).clamp_min(1)
        weight = 1 / counts[self.samples(split).y]
        return weight / weight.mean()

    def network(self, request: Train | Forward) -> Network:
        """Return this thread's network for a request."""
        return self._default_network if request.network is None else self.workspace.network(request.network)

    @cached_property
    def _default_network(self) -> Network:
        return self.workspace.network(self.client.architecture)

    def job(self, work: Train) -> Job:
        """Return the job for a training request, including the client's samples and random streams for this round."""
        job = self._job(work)
        for number, model_job in enumerate(job.models or (job,)):
            if self.moments is not None and model_job.moments is not None:
                self.moments[f"optimiser-{work.stream}-{number}"] = model_job.moments
        if not work.measures:
            self.processed += self.share(job).total * (1 if work.start.dim() == 1 else len(work.start))
        return job

    def share(self, job: Job) -> Share:
        """Return the batches, weights and steps of a job."""
        return self.workspace.trainer.share(job, self.network(job.work).smallest_batch)

    def _job(self, work: Train) -> Job:
        if work.own_batches and work.start.dim() > 1:
            models = tuple(self._job_of(work.of_model(number), number) for number in range(len(work.start)))
            return models[0]._replace(work=work, models=models)
        return self._job_of(work)

    def _job_of(self, work: Train, model: int = 0) -> Job:
        """Return the job for one of several models. Model 0 uses the same random streams as a single model."""

        def stream(purpose: str) -> torch.Generator:
            key = (self.client.round, self.client.client, work.stream, model)
            order_key = self.workspace.order_key
            return torch_generator(self.settings.run.seed, purpose, *(key if model else key[:-1]), *order_key)

        augment = self.workspace.augment(lambda: stream("augment"))
        width = self.network(work).dropout_width
        dropout = DropoutNumbers(width, stream("dropout")) if width else None
        rate = self.client.lr if work.lr is None else work.lr
        samples, batches = self.samples("train"), stream("batches")
        if work.measures:
            return Job(work, samples, batches, rate, settings=self.settings.train)
        moments = self._moments_of(work, model)
        sampling = sampling_of(self.settings, len(samples.y)) if self.samples_private else None
        job = Job(work, samples, batches, rate, augment, dropout, self.class_weight, settings=self.settings.train)
        return job._replace(moments=moments, sampling=sampling)

    def _moments_of(self, work: Train, model: int = 0) -> Moments | None:
        """Return the optimiser state that training continues from, or None if no state is kept between rounds."""
        if self.moments is None or work.plain:
            return None
        name = f"optimiser-{work.stream}-{model}"
        means, squares, steps = (self.client.stored.get(f"{name}-{part}") for part in ("means", "squares", "steps"))
        if means is None or steps is None or means.shape != work.start.shape:  # first round, or a different network
            return Moments()
        return Moments(int(steps), means, squares)

    def keep_moments(self) -> None:
        """Store the states of the round's optimisers in the client's state."""
        for name, moments in (self.moments or {}).items():
            for part, tensor in (("means", moments.means), ("squares", moments.squares)):
                if tensor is not None:
                    self.client.stored[f"{name}-{part}"] = tensor
            if moments.means is not None:
                self.client.state[f"{name}-steps"] = np.array(moments.steps, np.int64)
