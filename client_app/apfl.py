"""The APFL client trains the global model w and a personal model v, and predicts with a mixture of both."""

import torch
from torch import Tensor

from posy.client_app.base import PersonalClient
from posy.client_app.hooks import Config, Received, Result, Steps
from posy.client_app.training.rules import Mixed
from posy.client_app.training.work import Train, Trained
from posy.strategies.apfl import APFLSettings
from posy.strategies.replies import Update

TOGETHER, SHARE = 0, 1  # values of Train.stream


class APFLClient(PersonalClient):
    """Minimise F_i(w) over w, and F_i(alpha v + (1 - alpha) w) over v (APFL, Algorithm 1)."""

    method: APFLSettings

    def local_round(self, received: Received, config: Config) -> Steps[Result]:
        """Train w and v on the same batches, send w, and store v and the mixture."""
        stored = self.stored.get("own")
        personal = self.initial() if stored is None else stored
        alpha = yield from self.mixing_share(personal, received["model"])
        start = torch.stack([received["model"], personal])
        both: Trained = yield Train(start, rule=Mixed(alpha), stream=TOGETHER)
        shared, personal = both.parameters
        if self.method.adaptive:
            self.stored["alpha"] = torch.tensor(alpha, dtype=torch.float64)
        self.stored["own"] = personal.clone()
        return Update({"model": shared}, both.loss[1]), self.keep_model(self.mixture(personal, shared, alpha))

    def mixing_share(self, personal: Tensor, shared: Tensor) -> Steps[float]:
        """Return alpha. An adaptive alpha first takes a step against its gradient <v - w, grad F_i(mixture)>."""
        stored = self.stored.get("alpha")
        alpha = self.method.alpha if stored is None else float(stored)
        if not self.method.adaptive:
            return alpha
        mixture, parameters = self.mixture(personal, shared, alpha), self.layout.trainable
        stepped: Trained = yield Train(mixture, steps=1, plain=True, stream=SHARE)
        gradient_step = parameters.take(stepped.parameters - mixture)  # the gradient times -lr
        step = torch.dot(parameters.take(personal - shared), gradient_step)
        return min(1.0, max(0.0, alpha + float(step)))

    def mixture(self, personal: Tensor, shared: Tensor, alpha: float) -> Tensor:
        """Return alpha v + (1 - alpha) w ``(d,)``, with the running statistics from ``personal``."""
        parameters = self.layout.trainable
        mixed = torch.lerp(parameters.take(shared), parameters.take(personal), alpha)
        return parameters.put(personal.clone(), mixed)
