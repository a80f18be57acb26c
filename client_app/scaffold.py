"""The SCAFFOLD client corrects its steps with control variates, and stores its own control variate."""

import torch

from posy.client_app.base import PersonalClient
from posy.client_app.hooks import Config, Received, Result, Steps
from posy.client_app.training.work import Train, Trained
from posy.strategies.replies import Update


class SCAFFOLDClient(PersonalClient):
    """Step along the gradient + c − c_i, then set c_i⁺ = c_i − c + (x − y) / (K lr) (SCAFFOLD, Eqs. 3, 4)."""

    def local_round(self, received: Received, config: Config) -> Steps[Result]:
        """Train, and send the model with the change in the control variate."""
        start, common = received["model"], received["control"]
        stored = self.stored.get("control")
        variate = torch.zeros_like(common) if stored is None else stored
        work = Train(start, offset=common - variate)
        trained: Trained = yield work
        steps = gradients_in_distance(trained.steps, self.settings.train.momentum)
        change = (start - trained.parameters) / (steps * self.lr) - common
        self.stored["control"] = variate + change
        return Update({"model": trained.parameters, "control": change}, trained.loss), self.plain(trained.parameters)


def gradients_in_distance(steps: int, momentum: float) -> float:
    """Return Σ_{k=1..K} (1 − β^k) / (1 − β), the number of gradients in (x − y) / lr after K steps (K if β = 0).

    With momentum v_k = β v_{k−1} + g_k, the gradient g_k enters the distance with weight 1 + β + … + β^{K−k}. Dividing
    the distance by the returned sum therefore gives a weighted mean of the gradients, in which a constant such as
    c − c_i has weight 1.
    """
    return sum((1 - momentum**k) / (1 - momentum) for k in range(1, steps + 1))
