"""Step directions other than the gradient at the parameters.

Forward passes update BatchNorm's running statistics, except at displaced parameters (:func:`displaced`).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from posy.client_app.training.batches import Batch
from posy.client_app.training.work import Models

Gradients = tuple[Tensor, Sequence[Tensor]]


@dataclass(frozen=True)
class SharpnessAware:
    """The gradient at the worst point near the parameters, w + ρ g / ||g|| (SAM, Foret et al., 2021, Eqs. 2, 3).

    Clipping, weight decay and the optimiser then apply to this gradient, at w.
    """

    regularises: ClassVar[bool] = False
    radius: float

    def gradients(self, models: Models, batch: Batch) -> Gradients:
        """Return the losses at the current parameters and the gradient at the perturbed parameters."""
        losses, uphill = models.gradients(batch)
        with displaced(models, models.resized(uphill, self.radius, enlarge=True)):
            return losses, models.gradients(batch)[1]


@dataclass(frozen=True)
class MetaGradient:
    """The gradient of the loss after one step of adaptation (Per-FedAvg, Fallah et al., 2020, Eqs. 5, 7 and Section 5).

    Each mini-batch is divided into a part for the adaptation, a part for the loss after adaptation, and a third part
    for the product with the Hessian. Without ``hessian``, the product is omitted (FO). With ``hessian``, the product is
    the difference of the gradients at two points, displaced by ± ``hessian`` times the outer gradient, divided by
    2 ``hessian`` (HF). Clipping, weight decay and the optimiser act on the meta-gradient. The adaptation is a plain
    gradient step.
    """

    regularises: ClassVar[bool] = False
    rate: float
    hessian: float = 0.0

    def gradients(self, models: Models, batch: Batch) -> Gradients:
        """Return the losses after adaptation and the meta-gradient."""
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

    θ results from a few steps that reduce f(θ) + λ/2 ||θ − w||² on the mini-batch. The paper does not say where these
    steps start. As in the authors' program, the steps start at the previous mini-batch's θ or, on the first mini-batch,
    at w.

    Weight decay is part of f, and clipping applies to the gradient of f, so this rule applies both in place of the
    optimiser. All forward passes are at θ, so the running statistics belong to θ, and w shares them.
    """

    regularises: ClassVar[bool] = True
    strength: float
    steps: int
    rate: float
    decay: float = 0.0
    max_norm: float = 0.0

    def gradients(self, models: Models, batch: Batch) -> Gradients:
        """Return the losses before the last step, and the gradient of the envelope. ``models.auxiliary`` holds θ."""
        parameters = models.parameters
        with torch.no_grad():
            w = [parameter.clone() for parameter in parameters]
            if models.auxiliary:
                torch._foreach_copy_(parameters, models.auxiliary)
        for _ in range(self.steps):
            losses, gradients = models.gradients(batch)
            with torch.no_grad():
                theta, active_w = leading(parameters, gradients), leading(w, gradients)
                slope = models.resized(gradients, self.max_norm) if self.max_norm else list(gradients)
                if self.decay:
                    slope = list(torch._foreach_add(slope, theta, alpha=self.decay))
                distance = torch._foreach_sub(theta, active_w)
                direction = torch._foreach_add(slope, distance, alpha=self.strength)
                torch._foreach_sub_(theta, direction, alpha=self.rate)
        with torch.no_grad():
            envelope = torch._foreach_sub(active_w, theta)
            torch._foreach_mul_(envelope, self.strength)
            if models.auxiliary:  # in place: a captured step reads θ from the same memory
                torch._foreach_copy_(models.auxiliary, parameters)
            else:
                models.auxiliary = [parameter.clone() for parameter in parameters]
            torch._foreach_copy_(parameters, w)
        return losses, list(envelope)


@dataclass(frozen=True)
class Mixed:
    """The gradients of f(w) and, with respect to v, of f(α v + (1 − α) w) (APFL, Deng et al., 2020, Eq. 5).

    The second model has the parameters v and the running statistics of the mixture, because the mixture makes the
    predictions.
    """

    regularises: ClassVar[bool] = False
    share: float

    def gradients(self, models: Models, batch: Batch) -> Gradients:
        """Return the gradients and losses of w and of the mixture."""
        shared, personal = (models.of_model(models.parameters, number) for number in (0, 1))
        with torch.no_grad():
            original = [tensor.clone() for tensor in personal]
            torch._foreach_lerp_(personal, shared, 1 - self.share)
        losses, gradients = models.gradients(batch)
        with torch.no_grad():
            torch._foreach_copy_(personal, original)
            torch._foreach_mul_(models.of_model(gradients, 1), self.share)
        return losses, gradients


@dataclass(frozen=True)
class FisherTrace:
    """A measurement that takes no step and reports the gradient's squared norm as its loss (FedAS, Yang et al., 2024).

    The mean over mini-batches is the trace of the empirical Fisher information, with one gradient per mini-batch. The
    running statistics do not change either.
    """

    regularises: ClassVar[bool] = False

    def gradients(self, models: Models, batch: Batch) -> Gradients:
        """Return the squared gradient norms, and zero gradients."""
        with frozen_statistics(models):
            _, gradients = models.gradients(batch)
        return models.norms(gradients).square(), [torch.zeros_like(gradient) for gradient in gradients]


@contextmanager
def displaced(models: Models, by: Sequence[Tensor], scale: float = 1.0) -> Iterator[None]:
    """Displace the parameters within a context. Forward passes in the context do not change the running statistics."""
    parameters = leading(models.parameters, by)
    with torch.no_grad():
        original = [parameter.clone() for parameter in parameters]
        torch._foreach_add_(parameters, list(by), alpha=scale)
    try:
        with frozen_statistics(models):
            yield
    finally:
        with torch.no_grad():
            torch._foreach_copy_(parameters, original)


@contextmanager
def frozen_statistics(models: Models) -> Iterator[None]:
    """Restore BatchNorm's running statistics at the end of a context."""
    original = [tensor.clone() for tensor in models.statistics]
    try:
        yield
    finally:
        if original:
            with torch.no_grad():
                torch._foreach_copy_(models.statistics, original)


def leading(tensors: list[Tensor], like: Sequence[Tensor]) -> list[Tensor]:
    """Return the leading rows of stacked tensors, as many as in ``like``: one per client that is still training."""
    if not tensors or tensors[0].shape == like[0].shape:
        return tensors
    return [tensor[: len(like[0])] for tensor in tensors]


def divided(batch: Batch, parts: int) -> list[Batch]:
    """Divide mini-batches ``(B, ...)`` or ``(A, B, ...)`` into parts, and assign the samples to the parts round-robin.

    A part that would be empty is a copy of the first part. Each sample keeps its weight in the loss. In stacked
    mini-batches, whose rows are padded with samples of weight 0, the weights are rescaled so that the mean over a
    part's row remains the mean over its samples. Stacked mini-batches always have weights.
    """
    axis = 0 if batch.weight is None else batch.weight.dim() - 1
    index = torch.arange(batch.y.shape[axis], device=batch.y.device)
    pieces: list[Batch] = []
    for number in range(parts):
        chosen = index[number::parts]
        if not len(chosen):
            pieces.append(pieces[0])
            continue
        piece = Batch(*(None if t is None else t.index_select(axis, chosen) for t in batch))  # type: ignore[arg-type]
        if number and axis and piece.weight is not None:
            empty = (piece.weight == 0).all(dim=axis)
            pairs = zip(pieces[0], piece, strict=True)
            piece = Batch(*(t if t is None or f is None else _where(empty, f, t) for f, t in pairs))  # type: ignore[arg-type]
        pieces.append(piece)
    if not axis:
        return pieces
    assert batch.weight is not None
    fraction = (batch.weight > 0).to(batch.weight).mean(dim=axis, keepdim=True)
    return [_rescaled(piece, fraction) for piece in pieces]


def _where(empty: Tensor, first: Tensor, part: Tensor) -> Tensor:
    """Return a part ``(A, B, ...)``, with the first part's samples for clients whose part is ``empty`` ``(A,)``."""
    return torch.where(empty.view(-1, *[1] * (part.dim() - 1)), first[:, : part.shape[1]], part)


def _rescaled(piece: Batch, fraction: Tensor) -> Batch:
    """Return a part with rescaled weights. ``fraction`` ``(A, 1)`` is the share of the full row that is not padding."""
    assert piece.weight is not None
    part_fraction = (piece.weight > 0).to(piece.weight).mean(dim=1, keepdim=True)
    return piece._replace(
        weight=piece.weight * (fraction / part_fraction.clamp_min(torch.finfo(part_fraction.dtype).tiny))
    )
