"""Before it trains, the FedFomo client moves its model towards models with a lower validation loss."""

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from posy.client_app.base import PersonalClient
from posy.client_app.hooks import Config, Received, Result, Steps
from posy.client_app.predictors import Predictor
from posy.client_app.training.work import Split, Trained
from posy.data.splits import split
from posy.randomness import numpy_generator
from posy.strategies.fedfomo import FedFomoSettings
from posy.strategies.replies import Update


class FedFomoClient(PersonalClient):
    """Train from theta + sum_n w_n (theta_n - theta), with weights w_n >= 0 that sum to 1 (FedFomo, Eqs. 3-5).

    theta is the starting point of the client's last training, and the first theta_n is its result.
    """

    method: FedFomoSettings

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        fraction, count = self.method.validation, len(self.data.y_train)
        if len(self.data.y_validation) or not fraction or count < 2:
            return
        generator = numpy_generator(
            self.settings.run.seed, "fedfomo-validation", self.client, *self.workspace.order_key
        )
        pairs = split([np.arange(count)], fraction, generator)
        if len(pairs[0][1]) < self.workspace.trainer.min_batch:  # losses on a few rows of a site could reveal a row
            return
        train, validation = (torch.from_numpy(np.sort(rows)).to(self.device) for rows in pairs[0])
        x, y = self.data.x_train, self.data.y_train
        self.data = replace(
            self.data, x_train=x[train], y_train=y[train], x_validation=x[validation], y_validation=y[validation]
        )

    def local_round(self, received: Received, config: Config) -> Steps[Result]:
        """Move towards the better models, and train. Send the trained model and the weights of Eq. 3."""
        start, weights = yield from self.moved(received["models"])
        trained: Trained = yield self.work(start)
        self.stored["start"] = start
        return Update({"model": trained.parameters, "weights": weights}, trained.loss), self.keep_model(
            trained.parameters
        )

    def served_model(self, received: Received, config: Config) -> Steps[Predictor]:
        """Return the client's model, moved towards the better models."""
        start, _ = yield from self.moved(received["models"])
        return self.plain(start)

    def moved(self, received: Tensor) -> Steps[tuple[Tensor, Tensor]]:
        """Return the next starting point for training ``(d,)``, and the weights ``(1 + k,)`` of the k + 1 candidates.

        Parameters
        ----------
        received : torch.Tensor, (k, d)
            Models of other clients.
        """
        previous, initial = self.stored.get("start"), self.initial()
        start = initial if previous is None else previous
        candidates = torch.cat([self.kept_model(initial).unsqueeze(0), received])
        part: Split = "validation" if len(self.data.y_validation) else "train"
        losses = yield from self.losses(torch.cat([start.unsqueeze(0), candidates]), part)
        order = 1.0 if self.method.distance == "l1" else 2.0
        weights = first_order_weights(losses, self.layout.trainable.take(candidates - start).norm(order, dim=1))
        return start + normalised(weights) @ (candidates - start), weights


def first_order_weights(losses: Tensor, distances: Tensor) -> Tensor:
    """Return (L - L_n) / ||theta_n - theta|| ``(k,)`` for the losses L, L_1, ..., L_k ``(1 + k,)``.

    A diverged model, or a model equal to theta, has weight 0.
    """
    weights = (losses[0] - losses[1:]) / distances
    return torch.where(weights.isfinite(), weights, 0.0)


def normalised(weights: Tensor) -> Tensor:
    """Return the positive weights divided by their sum, or zeros if no weight is positive."""
    positive = weights.clamp_min(0)
    return positive / positive.sum().clamp_min(torch.finfo(weights.dtype).tiny)
