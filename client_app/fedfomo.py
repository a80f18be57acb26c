"""FedFomo's client: it moves its own model towards those of others that fit its data better, and trains it."""

import torch
from torch import Tensor

from posy.client_app.base import Config, PersonalClient, Predictor, Result, Steps
from posy.client_app.training.work import Split, Trained
from posy.strategies.replies import Update


class FedFomoClient(PersonalClient):
    """Go on with theta_i + sum_n w_n (theta_n - theta_i), w_n >= 0 with sum 1 (FedFomo, Eqs. 3-5)."""

    def local_round(self, received: list[Tensor], config: Config) -> Steps[Result]:
        """Move towards the models received, and train; send the model and the weights as they are in Eq. 3."""
        start, weights = yield from self.moved(received[0])
        trained: Trained = yield self.work(start)
        return Update([trained.parameters, weights], trained.loss), self.keep_model(trained.parameters)

    def served_model(self, received: list[Tensor], config: Config) -> Steps[Predictor]:
        """Move towards the models received."""
        start, _ = yield from self.moved(received[0])
        return self.plain(start)

    def moved(self, others: Tensor) -> Steps[tuple[Tensor, Tensor]]:
        """Return the client's model, moved towards others ``(k, d)``, and their weights ``(k,)``."""
        own = self.kept_model(self.initial())
        if not len(others):
            return own, others.new_zeros(0)
        split: Split = "validation" if len(self.data.y_validation) else "train"
        losses = yield from self.losses(torch.cat([own.unsqueeze(0), others]), split)
        weights = first_order_weights(losses, self.layout.trainable.take(others - own).norm(dim=1))
        return own + normalised(weights) @ (others - own), weights


def first_order_weights(losses: Tensor, distances: Tensor) -> Tensor:
    """Return (L_own - L_n) / ||theta_n - theta_own|| ``(k,)`` of losses ``(1 + k,)``, the first of them the own one.

    A model that is the same, or has diverged, has weight 0.
    """
    weights = (losses[0] - losses[1:]) / distances
    return torch.where(weights.isfinite(), weights, 0.0)


def normalised(weights: Tensor) -> Tensor:
    """Return the positive weights over their sum; where none is positive, zeros."""
    positive = weights.clamp_min(0)
    return positive / positive.sum().clamp_min(torch.finfo(weights.dtype).tiny)
