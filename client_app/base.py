"""The base class of all clients: FedAvg, with hooks that a method can override.

A method's round is a generator. It yields :class:`~posy.client_app.training.work.Train` and
:class:`~posy.client_app.training.work.Forward` requests and receives their results, so the code reads like the paper's
algorithm. The training loop, evaluation, state and reply are implemented once, outside the methods. A hook that makes
no requests is a plain function.
"""

from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from flwr.client import NumPyClient
from flwr.common.typing import NDArrays
from torch import Tensor

from posy.client_app.hooks import ClientHooks, Steps
from posy.client_app.jobs import Jobs
from posy.client_app.local_run import LocalRun
from posy.client_app.predictors import Predictor
from posy.client_app.training.work import Forward, Split


class PersonalClient(ClientHooks, NumPyClient):
    """The NumPyClient of one client.

    Methods override the hooks of :class:`~posy.client_app.hooks.ClientHooks`, which also defines the constructor.
    """

    @cached_property
    def jobs(self) -> Jobs:
        """The runner for this client's requests."""
        return Jobs(self)

    def best_of(self, models: Tensor) -> Steps[Predictor]:
        """Return the model with the lowest training loss among K models ``(K, d)``."""
        best = int((yield from self.losses(models)).argmin())
        return self.plain(models[best], str(best))

    def losses(self, models: Tensor, split: Split = "train") -> Steps[Tensor]:
        """Return the loss ``(K,)`` of each of K models ``(K, d)`` on a split. A diverged model has an infinite loss.

        This is the loss that training minimises, including the run's class weights.
        """
        logits, labels = (yield Forward(models, split, self.architecture)), self.jobs.samples(split).y
        k, n, _ = logits.shape
        criterion = self.workspace.criterion or (lambda logits, y: F.cross_entropy(logits, y, reduction="none"))
        losses = criterion(logits.flatten(0, 1), labels.repeat(k, *[1] * (labels.dim() - 1))).view(k, n)
        weight = self.jobs.class_weights(split)
        losses = (losses if weight is None else losses * weight).mean(1)
        return losses.nan_to_num(nan=torch.inf, posinf=torch.inf)

    # -- NumPyClient ---------------------------------------------------------------------------------

    def fit(self, parameters: NDArrays, config: dict[str, Any]) -> tuple[NDArrays, int, dict[str, Any]]:
        """Train, and return the reply's arrays in the order that the method declares."""
        received = dict(zip(self.method.sent, parameters, strict=True))
        arrays, num_examples, metrics = self.jobs.drive(LocalRun(self.jobs, received, config).train())
        return list(arrays.values()), num_examples, metrics

    def evaluate(self, parameters: NDArrays, config: dict[str, Any]) -> tuple[float, int, dict[str, Any]]:
        """Score the served model and, with ``evaluate-personal``, the local model on the client's test split."""
        received = dict(zip(self.method.sent, parameters, strict=True))
        loss, num_examples, metrics = self.jobs.drive(LocalRun(self.jobs, received, config).evaluate())
        assert isinstance(loss, float)
        return loss, num_examples, metrics
