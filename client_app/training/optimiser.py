"""SGD, Adam and AdamW over the parameters of many models."""

from collections.abc import Sequence

import torch
from torch import Tensor

from posy.client_app.training.networks import Models
from posy.client_app.training.rules import leading
from posy.client_app.training.work import Job
from posy.strategies.run_settings import TrainSettings


class Optimiser:
    """SGD with momentum, Adam or AdamW for lists of tensors, including clipping, decay and per-tensor learning rates.

    A step clips the gradient of the loss, adds the weight decay, the gradient of the proximal term
    (:class:`~posy.client_app.training.work.Pull`) and the offset, and applies the mask. The sum enters momentum or
    Adam's moments, so weight decay and the proximal term are part of the objective. Only AdamW decays the weights
    separately.

    ``plain`` training is SGD without momentum, decay or clipping, because the method prescribes the exact steps. A rule
    that ``regularises`` applies decay and clipping itself.

    Each step makes one fused call for all tensors with the same learning rate, because PyTorch's own optimisers take
    longer than a small model's backward pass. The gradients of A clients update the models of the first A stacked
    clients. A job with moments continues from these moments.
    """

    def __init__(self, settings: TrainSettings, models: Models, jobs: Sequence[Job]) -> None:
        work = jobs[0].work
        skips_regularisation = work.plain or (work.rule is not None and work.rule.regularises)
        self._norm = 0.0 if skips_regularisation else settings.max_grad_norm
        self._decay = 0.0 if skips_regularisation else settings.weight_decay
        self._momentum = 0.0 if work.plain else settings.momentum
        self._adaptive = not work.plain and settings.optimizer != "sgd"
        self._decoupled = settings.optimizer == "adamw"
        self._betas = settings.adam_beta1, settings.adam_beta2
        self._epsilon = settings.adam_epsilon
        self._bounds = work.bounds
        self._resized = models.resized
        self._groups: dict[float, list[int]] = {}
        for index, rate in enumerate(models.rates):
            self._groups.setdefault(jobs[0].lr * rate, []).append(index)
        self.parameters = models.parameters
        pulls = [job.work.pull for job in jobs if job.work.pull is not None]
        masks = [job.work.mask for job in jobs if job.work.mask is not None]
        offsets = [job.work.offset for job in jobs if job.work.offset is not None]
        self._strength = pulls[0].strength if pulls else 0.0
        self._anchors = models.parts([pull.anchor for pull in pulls]) if self._strength else []
        self._masks = models.parts(masks) if masks else []
        self._offsets = models.parts(offsets) if offsets else []
        stored_moments = [job.moments for job in jobs if job.moments is not None]
        counts = [moments.steps for moments in stored_moments]
        self._earlier = torch.tensor(counts, dtype=torch.float64) if len(set(counts)) > 1 else max(counts, default=0)
        self._steps = 0
        self._buffers = _copied(models, [moments.means for moments in stored_moments])
        self._squares = _copied(models, [moments.squares for moments in stored_moments])
        if self._masks and self._buffers:  # the moments may come from a round with a different mask
            torch._foreach_mul_(self._buffers, self._masks)

    @property
    def is_repeatable(self) -> bool:
        """Whether all steps after the first are the same computation. Adam's steps depend on the step number."""
        return not self._adaptive

    @torch.no_grad()
    def step(self, grads: Sequence[Tensor]) -> None:
        """Update the parameters in place."""
        gradients = self._resized(grads, self._norm) if self._norm else list(grads)
        parameters = leading(self.parameters, gradients)
        if self._decay and not (self._adaptive and self._decoupled):
            gradients = list(torch._foreach_add(gradients, parameters, alpha=self._decay))
        if self._anchors:
            distance = torch._foreach_sub(parameters, leading(self._anchors, gradients))
            gradients = list(torch._foreach_add(gradients, distance, alpha=self._strength))
        if self._offsets:
            gradients = list(torch._foreach_add(gradients, leading(self._offsets, gradients)))
        if self._masks:
            gradients = list(torch._foreach_mul(gradients, leading(self._masks, gradients)))
        if self._adaptive:
            gradients = self._adapted(gradients, parameters)
        elif self._momentum:
            if self._buffers:
                buffers = leading(self._buffers, gradients)
                torch._foreach_mul_(buffers, self._momentum)
                torch._foreach_add_(buffers, gradients)
                gradients = buffers
            else:
                self._buffers = gradients = [g.clone() for g in gradients]
        for rate, members in self._groups.items():
            if len(self._groups) == 1:
                torch._foreach_add_(parameters, gradients, alpha=-rate)
            else:
                torch._foreach_add_([parameters[i] for i in members], [gradients[i] for i in members], alpha=-rate)
        if self._bounds:
            torch._foreach_clamp_min_(parameters, self._bounds[0])
            torch._foreach_clamp_max_(parameters, self._bounds[1])

    def moments(self, models: Models, single: bool) -> list[tuple[Tensor | None, Tensor | None]]:
        """Return the means and squares for each client's model ``(d,)``, or for its K models ``(K, d)``."""
        stacks = [models.joined(tensors) if tensors else None for tensors in (self._buffers, self._squares)]
        rows = [None if stack is None else stack[:, 0] if single else stack for stack in stacks]
        means, squares = ([None] * len(models.flat) if row is None else list(row) for row in rows)
        return list(zip(means, squares, strict=True))

    def _adapted(self, gradients: list[Tensor], parameters: list[Tensor]) -> list[Tensor]:
        """Return Adam's direction (Kingma & Ba, 2015, Algorithm 1), or AdamW's with decoupled weight decay."""
        if not self._buffers:
            self._buffers, self._squares = ([torch.zeros_like(g) for g in gradients] for _ in range(2))
        self._steps += 1
        steps = self._earlier + self._steps
        first, second = self._betas
        means, squares = leading(self._buffers, gradients), leading(self._squares, gradients)
        torch._foreach_lerp_(means, gradients, 1 - first)
        torch._foreach_mul_(squares, second)
        torch._foreach_addcmul_(squares, gradients, gradients, value=1 - second)
        divisors = list(torch._foreach_sqrt(squares))
        _divide(divisors, (1 - second**steps) ** 0.5)
        torch._foreach_add_(divisors, self._epsilon)
        directions = list(torch._foreach_div(means, divisors))
        _divide(directions, 1 - first**steps)
        if self._decoupled and self._decay:  # a masked parameter does not decay
            masks = leading(self._masks, gradients)
            decaying = torch._foreach_mul(parameters, masks) if masks else parameters
            torch._foreach_add_(directions, decaying, alpha=self._decay)
        return directions


def _divide(tensors: list[Tensor], divisor: Tensor | float) -> None:
    """Divide tensors in place by one number, or the rows of each client by the client's own number."""
    if isinstance(divisor, float):
        torch._foreach_div_(tensors, divisor)
        return
    divisors = divisor[: len(tensors[0])].to(tensors[0])
    torch._foreach_div_(tensors, [divisors.view(-1, *[1] * (tensor.dim() - 1)) for tensor in tensors])


def _copied(models: Models, rows: Sequence[Tensor | None]) -> list[Tensor]:
    """Return writable copies of the clients' rows, with zeros for missing rows, or an empty list if all are missing."""
    known_rows = [row for row in rows if row is not None]
    if not known_rows:
        return []
    all_rows = [torch.zeros_like(known_rows[0]) if row is None else row for row in rows]
    return [tensor.clone() for tensor in models.parts(all_rows)]
