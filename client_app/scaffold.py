"""SCAFFOLD's client: its steps are corrected by the control variates, and it keeps its own."""

import torch
from torch import Tensor

from posy.client_app.base import Config, PersonalClient, Result, Steps
from posy.client_app.training.work import Train, Trained
from posy.strategies.replies import Update


class SCAFFOLDClient(PersonalClient):
    """Step along the gradient + c − c_i; then c_i⁺ = c_i − c + (x − y) / (K lr) (SCAFFOLD, Eqs. 3, 4)."""

    def local_round(self, received: list[Tensor], config: Config) -> Steps[Result]:
        """Train, and send the model with the change of the control variate."""
        start, common = received
        kept = self.recall("control")
        own = torch.zeros_like(common) if kept is None else kept
        work = Train(start, offset=common - own)
        trained: Trained = yield work
        change = (start - trained.parameters) / (self.steps_of(work) * self.lr) - common
        # Running statistics have no gradient to correct.
        parameters = self.layout.trainable
        change = parameters.put(torch.zeros_like(change), parameters.take(change))
        self.keep("control", own + change)
        return Update([trained.parameters, change], trained.loss), self.plain(trained.parameters)
