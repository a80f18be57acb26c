"""What a step descends along, where it is not the gradient at the parameters."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from posy.client_app.training.batches import Batch
from posy.client_app.training.work import Models

Gradients = tuple[Tensor, Sequence[Tensor]]


@dataclass(frozen=True)
class SharpnessAware:
    """The gradient at the worst point near the parameters, w + ρ g / ||g|| (SAM, Foret et al., 2021, Eqs. 2, 3)."""

    radius: float

    def gradients(self, models: Models, batch: Batch) -> Gradients:
        """Climb, and return the gradient there with the losses at the parameters."""
        losses, uphill = models.gradients(batch)
        with displaced(models, models.resized(uphill, self.radius, enlarge=True)):
            return losses, models.gradients(batch)[1]


@dataclass(frozen=True)
class MetaGradient:
    """The gradient of the loss after one step of adaptation (Per-FedAvg, Fallah et al., 2020, Eqs. 5, 7 and Section 5).

    Each mini-batch is divided: one part to adapt on, one for the loss after it, and, for the product with the Hessian,
    a third. Without ``hessian`` the product is left out (FO); with it, it is the difference of two gradients over
    2 ``hessian`` times their distance (HF).
    """

    rate: float
    hessian: float = 0.0

    def gradients(self, models: Models, batch: Batch) -> Gradients:
        """Return the gradient and the losses after adaptation."""
        parts = divided(batch, 3 if self.hessian else 2)
        _, adapting = models.gradients(parts[0])
        with displaced(models, adapting, -self.rate):
            losses, outer = models.gradients(parts[1])
        if not self.hessian:
            return losses, outer
        ends = []
        for sign in (1, -1):
            with displaced(models, outer, sign * self.hessian):
                ends.append(list(models.gradients(parts[2])[1]))
        product = torch._foreach_div(torch._foreach_sub(*ends), 2 * self.hessian)
        return losses, list(torch._foreach_sub(list(outer), product, alpha=self.rate))


@dataclass(frozen=True)
class MoreauEnvelope:
    """The gradient λ (w − θ) of the Moreau envelope (pFedMe, T. Dinh et al., 2020, Eqs. 3, 5 and 8).

    θ is what some steps on the mini-batch come to in minimising f(θ) + λ/2 ||θ − w||². Where they begin is open in the
    paper; in the authors' program it is the θ of the mini-batch before, and w at first.
    """

    strength: float
    steps: int
    rate: float

    def gradients(self, models: Models, batch: Batch) -> Gradients:
        """Return the gradient, and the losses before the last of the steps; θ is kept beside the models."""
        parameters = models.parameters
        with torch.no_grad():
            w = [parameter.clone() for parameter in parameters]
            if models.beside:
                torch._foreach_copy_(parameters, models.beside)
        for _ in range(self.steps):
            losses, gradients = models.gradients(batch)
            with torch.no_grad():
                theta, near = leading(parameters, gradients), leading(w, gradients)
                away = torch._foreach_sub(theta, near)
                pulled = torch._foreach_add(list(gradients), away, alpha=self.strength)
                torch._foreach_sub_(theta, pulled, alpha=self.rate)
        with torch.no_grad():
            found = torch._foreach_sub(near, theta)
            torch._foreach_mul_(found, self.strength)
            if models.beside:  # in place: a captured step finds θ where it was
                torch._foreach_copy_(models.beside, parameters)
            else:
                models.beside = [parameter.clone() for parameter in parameters]
            torch._foreach_copy_(parameters, w)
        return losses, list(found)


@dataclass(frozen=True)
class Mixed:
    """Of two models w and v, the gradients of f(w) and of f(α v + (1 − α) w) by v (APFL, Deng et al., 2020, Eq. 5)."""

    share: float

    def gradients(self, models: Models, batch: Batch) -> Gradients:
        """Return the gradients and losses of w and of the mixture."""
        shared, own = (models.of_model(models.parameters, number) for number in (0, 1))
        with torch.no_grad():
            before = [tensor.clone() for tensor in own]
            torch._foreach_lerp_(own, shared, 1 - self.share)
        losses, gradients = models.gradients(batch)
        with torch.no_grad():
            torch._foreach_copy_(own, before)
            torch._foreach_mul_(models.of_model(gradients, 1), self.share)
        return losses, gradients


@dataclass(frozen=True)
class FisherTrace:
    """No step at all: the loss is the squared norm of the gradient (FedAS, Yang et al., 2024).

    Its mean over mini-batches is the trace of the empirical Fisher information, of mini-batches.
    """

    def gradients(self, models: Models, batch: Batch) -> Gradients:
        """Return gradients of zero and the squared norms."""
        _, gradients = models.gradients(batch)
        return models.norms(gradients).square(), [torch.zeros_like(gradient) for gradient in gradients]


@contextmanager
def displaced(models: Models, by: Sequence[Tensor], scale: float = 1.0) -> Iterator[None]:
    """Move the parameters for a while."""
    parameters = leading(models.parameters, by)
    with torch.no_grad():
        before = [parameter.clone() for parameter in parameters]
        torch._foreach_add_(parameters, list(by), alpha=scale)
    try:
        yield
    finally:
        with torch.no_grad():
            torch._foreach_copy_(parameters, before)


def leading(tensors: list[Tensor], like: Sequence[Tensor]) -> list[Tensor]:
    """Return the part of stacked tensors that belongs to the clients of which others are: those still training."""
    if not tensors or tensors[0].shape == like[0].shape:
        return tensors
    return [tensor[: len(like[0])] for tensor in tensors]


def divided(batch: Batch, parts: int) -> list[Batch]:
    """Divide mini-batches ``(B, ...)`` or ``(A, B, ...)`` into parts, sample by sample in turn.

    A part that would have no sample is the first one.
    """
    axis = batch.y.dim() - 1
    index = torch.arange(batch.y.shape[axis], device=batch.y.device)
    found: list[Batch] = []
    for number in range(parts):
        if not len(own := index[number::parts]):
            found.append(found[0])
            continue
        part = [None if tensor is None else tensor.index_select(axis, own) for tensor in batch]
        if (weight := part[2]) is not None:
            if number and axis:  # what fills up the batch of a client is no sample
                empty = weight.sum(dim=axis) == 0
                part = [
                    t if t is None or f is None else _where(empty, f, t) for f, t in zip(found[0], part, strict=True)
                ]
            assert part[2] is not None
            part[2] = part[2] / part[2].mean(dim=axis, keepdim=True).clamp_min(torch.finfo(weight.dtype).tiny)
        found.append(Batch(*part))  # type: ignore[arg-type]
    return found


def _where(empty: Tensor, first: Tensor, part: Tensor) -> Tensor:
    """Return a part ``(A, B, ...)`` with the first one's samples for some clients ``(A,)``."""
    return torch.where(empty.view(-1, *[1] * (part.dim() - 1)), first[:, : part.shape[1]], part)
