"""SCAFFOLD's client: control variates correct its steps, and it stores its own variate."""

import numpy as np
import torch
from flwr.common.typing import NDArrays
from torch import Tensor

from posy.client_app.base import Config, PersonalClient, Result, Steps
from posy.client_app.training.work import Train, Trained
from posy.strategies.replies import Update


class SCAFFOLDClient(PersonalClient):
    """Step along the gradient + c − c_i. Then c_i⁺ = c_i − c + (x − y) / (K lr) (SCAFFOLD, Eqs. 3, 4)."""

    def local_round(self, received: list[Tensor], config: Config) -> Steps[Result]:
        """Train, and send the model with the change of the control variate."""
        start, common = received
        stored = self.recall("control")
        variate = torch.zeros_like(common) if stored is None else stored
        work = Train(start, offset=common - variate)
        trained: Trained = yield work
        steps = gradients_in_distance(self.steps_of(work), self.settings.train.momentum)
        change = (start - trained.parameters) / (steps * self.lr) - common
        # Running statistics have no gradient to correct.
        parameters = self.layout.trainable
        change = parameters.put(torch.zeros_like(change), parameters.take(change))
        self.keep("control", variate + change)
        return Update([trained.parameters, change], trained.loss), self.plain(trained.parameters)

    def unchanged(self, parameters: NDArrays) -> NDArrays:
        """Return the received model, and no change of the control variate."""
        return [parameters[0], np.zeros_like(parameters[1])]


def gradients_in_distance(steps: int, momentum: float) -> float:
    """Return Σ_{k=1..K} (1 − β^k) / (1 − β): how many gradients (x − y) / lr contains after K steps; K without β.

    The momentum v_k = β v_{k−1} + g_k adds the gradient of step k to the distance 1 + β + … + β^{K−k} times. Divided by
    this sum, the distance is a mean of the gradients, which a constant such as c − c_i enters once.
    """
    return sum((1 - momentum**k) / (1 - momentum) for k in range(1, steps + 1))
