"""SGD, Adam and AdamW over the parameters of many models."""

from collections.abc import Sequence

import torch
from torch import Tensor

from posy.client_app.training.networks import Models
from posy.client_app.training.rules import leading
from posy.client_app.training.work import Job
from posy.strategies.settings import TrainSettings


class Optimiser:
    """SGD with momentum, Adam or AdamW over lists of tensors, with clipping, decay, and a factor on the rate of each.

    A training that is ``plain`` is SGD without momentum, decay and clipping: its method prescribes the steps.

    One fused call a step and group: the stock optimiser costs more than a small model's backward pass.
    Of stacked models the first A take a step where the gradients are those of A clients. Jobs with moments go on with
    these.
    """

    def __init__(self, settings: TrainSettings, models: Models, jobs: Sequence[Job]) -> None:
        work = jobs[0].work
        self._norm = 0.0 if work.plain else settings.max_grad_norm
        self._decay = 0.0 if work.plain else settings.weight_decay
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
        kept = [job.moments for job in jobs if job.moments is not None]
        earlier = [moments.steps for moments in kept]
        self._earlier = torch.tensor(earlier, dtype=torch.float64) if len(set(earlier)) > 1 else max(earlier, default=0)
        self._steps = 0
        self._buffers = _copied(models, [moments.means for moments in kept])
        self._squares = _copied(models, [moments.squares for moments in kept])

    @property
    def is_repeatable(self) -> bool:
        """Whether every step does the same to the same memory, after the first: Adam's depend on their number."""
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
        """Return the means and squares of each of the P clients' models, of a single one or of K."""
        found = [models.joined(tensors) if tensors else None for tensors in (self._buffers, self._squares)]
        own = [None if rows is None else rows[:, 0] if single else rows for rows in found]
        means, squares = ([None] * len(models.flat) if rows is None else list(rows) for rows in own)
        return list(zip(means, squares, strict=True))

    def _adapted(self, gradients: list[Tensor], parameters: list[Tensor]) -> list[Tensor]:
        """Return the direction of Adam (Kingma & Ba, 2015, Algorithm 1), in AdamW with the decay beside it."""
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
        if self._decoupled and self._decay:  # what is masked does not decay either
            masks = leading(self._masks, gradients)
            decaying = torch._foreach_mul(parameters, masks) if masks else parameters
            torch._foreach_add_(directions, decaying, alpha=self._decay)
        return directions


def _divide(tensors: list[Tensor], divisor: Tensor | float) -> None:
    """Divide in place by a number, or by one for each of the clients that come first in the tensors."""
    if isinstance(divisor, float):
        torch._foreach_div_(tensors, divisor)
        return
    own = divisor[: len(tensors[0])].to(tensors[0])
    torch._foreach_div_(tensors, [own.view(-1, *[1] * (tensor.dim() - 1)) for tensor in tensors])


def _copied(models: Models, rows: Sequence[Tensor | None]) -> list[Tensor]:
    """Return the tensors of some rows, one a client, to be written to; none if no client has any yet."""
    present = [row for row in rows if row is not None]
    if not present:
        return []
    whole = [torch.zeros_like(present[0]) if row is None else row for row in rows]
    return [tensor.clone() for tensor in models.parts(whole)]
