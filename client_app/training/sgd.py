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
        self.settings = settings
        self._clipped = models.clipped
        self._groups: dict[float, list[int]] = {}
        for index, rate in enumerate(models.rates):
            self._groups.setdefault(jobs[0].lr * rate, []).append(index)
        self.parameters = models.parameters
        self._buffers: list[Tensor] = []
        pulls = [job.work.pull for job in jobs if job.work.pull is not None]
        masks = [job.work.mask for job in jobs if job.work.mask is not None]
        self._strength = pulls[0].strength if pulls else 0.0
        self._anchors = models.parts([pull.anchor for pull in pulls]) if self._strength else []
        self._masks = models.parts(masks) if masks else []

    @torch.no_grad()
    def step(self, grads: Sequence[Tensor]) -> None:
        """Update the parameters in place."""
        settings = self.settings
        gradients = self._clipped(grads, settings.max_grad_norm) if settings.max_grad_norm else list(grads)
        parameters = _first(self.parameters, gradients)
        if settings.weight_decay:
            gradients = list(torch._foreach_add(gradients, parameters, alpha=settings.weight_decay))
        if self._anchors:
            distance = torch._foreach_sub(parameters, _first(self._anchors, gradients))
            gradients = list(torch._foreach_add(gradients, distance, alpha=self._strength))
        if self._masks:
            gradients = list(torch._foreach_mul(gradients, _first(self._masks, gradients)))
        if settings.momentum:
            if self._buffers:
                buffers = _first(self._buffers, gradients)
                torch._foreach_mul_(buffers, settings.momentum)
                torch._foreach_add_(buffers, gradients)
                gradients = buffers
            else:
                self._buffers = gradients = [g.clone() for g in gradients]
        for rate, members in self._groups.items():
            if len(self._groups) == 1:
                torch._foreach_add_(parameters, gradients, alpha=-rate)
            else:
                torch._foreach_add_([parameters[i] for i in members], [gradients[i] for i in members], alpha=-rate)


def _first(tensors: list[Tensor], like: Sequence[Tensor]) -> list[Tensor]:
    """Return the leading part of tensors, as long as the gradients that they go with."""
    if not tensors or tensors[0].shape == like[0].shape:
        return tensors
    return [tensor[: len(like[0])] for tensor in tensors]
