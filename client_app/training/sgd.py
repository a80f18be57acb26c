"""SGD over lists of tensors."""

from collections.abc import Sequence

import torch
from torch import Tensor

from posy.client_app.training.networks import Models
from posy.client_app.training.work import Job
from posy.strategies.settings import TrainSettings


class SGD:
    """SGD with clipping, momentum and weight decay over lists of tensors, with a factor on the rate of each.

    One fused call a step and group: the stock optimiser costs more than a small model's backward pass.
    Of stacked models the first A take a step where the gradients are those of A clients.
    """

    def __init__(self, settings: TrainSettings, models: Models, jobs: Sequence[Job]) -> None:
        work = jobs[0].work
        self.momentum = settings.momentum
        self.weight_decay = settings.weight_decay
        self.max_grad_norm = settings.max_grad_norm
        self._clipped = models.clipped
        groups: dict[float, list[int]] = {}
        for index, rate in enumerate(models.rates):
            groups.setdefault(jobs[0].lr * rate, []).append(index)
        self.groups = list(groups.items())
        self.parameters = models.parameters
        self.buffers: list[Tensor] = []
        self.strength = 0.0
        if work.pull is not None and work.pull.strength:
            self.strength = work.pull.strength
            self.anchors = models.parts([job.work.pull.anchor for job in jobs if job.work.pull is not None])
        self.masks: list[Tensor] = []
        if work.mask is not None:
            self.masks = models.parts([job.work.mask for job in jobs if job.work.mask is not None])

    @torch.no_grad()
    def step(self, grads: Sequence[Tensor]) -> None:
        """Update the parameters in place."""
        gradients = self._clipped(grads, self.max_grad_norm) if self.max_grad_norm else list(grads)
        parameters = _first(self.parameters, gradients)
        if self.weight_decay:
            gradients = list(torch._foreach_add(gradients, parameters, alpha=self.weight_decay))
        if self.strength:
            distance = torch._foreach_sub(parameters, _first(self.anchors, gradients))
            gradients = list(torch._foreach_add(gradients, distance, alpha=self.strength))
        if self.masks:
            gradients = list(torch._foreach_mul(gradients, _first(self.masks, gradients)))
        if self.momentum:
            if self.buffers:
                buffers = _first(self.buffers, gradients)
                torch._foreach_mul_(buffers, self.momentum)
                torch._foreach_add_(buffers, gradients)
                gradients = buffers
            else:
                self.buffers = gradients = [g.clone() for g in gradients]
        for rate, members in self.groups:
            if len(self.groups) == 1:
                torch._foreach_add_(parameters, gradients, alpha=-rate)
            else:
                torch._foreach_add_([parameters[i] for i in members], [gradients[i] for i in members], alpha=-rate)


def _first(tensors: list[Tensor], like: Sequence[Tensor]) -> list[Tensor]:
    """Return the leading part of tensors, as long as the gradients that they go with."""
    if not tensors or tensors[0].shape == like[0].shape:
        return tensors
    return [tensor[: len(like[0])] for tensor in tensors]
