"""Per-sample losses for each target, and custom loss functions, which are checked on a small batch before a run."""

from functools import lru_cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import vmap

from posy.client_app.training.work import Criterion
from posy.extensions import format_error, is_custom, load
from posy.metrics import CLASSES, LABELS
from posy.settings import SettingsError
from posy.strategies.run_settings import LOSSES

_SAMPLES, _CLASSES = 4, 3


def binary_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Return each sample's mean binary cross-entropy ``(B,)`` over C labels, from logits and labels ``(B, C)``."""
    return F.binary_cross_entropy_with_logits(logits, labels.to(logits.dtype), reduction="none").mean(dim=-1)


def squared_error(outputs: Tensor, values: Tensor) -> Tensor:
    """Return each sample's mean squared error ``(B,)`` over C values, from outputs and values ``(B, C)``."""
    return (outputs - values).square().mean(dim=-1)  # F.mse_loss fails under nested vmap


def absolute_error(outputs: Tensor, values: Tensor) -> Tensor:
    """Return each sample's mean absolute error ``(B,)`` over C values, from outputs and values ``(B, C)``."""
    return (outputs - values).abs().mean(dim=-1)


def huber(outputs: Tensor, values: Tensor, delta: float) -> Tensor:
    """Return each sample's mean Huber loss ``(B,)`` over C values: quadratic up to an error of ``delta``, then linear.

    References
    ----------
    P. J. Huber: Robust Estimation of a Location Parameter, 1964.
    """
    error = (outputs - values).abs()
    return torch.where(error <= delta, error.square() / 2, delta * (error - delta / 2)).mean(dim=-1)


@lru_cache(maxsize=16)
def criterion_of(loss: str, target: str = CLASSES, delta: float = 1.0) -> Criterion | None:
    """Return the per-sample loss selected by the setting ``loss``, or None for cross-entropy.

    Parameters
    ----------
    loss : str
        The setting.
    target : str
        The target of the task (see :mod:`posy.metrics`).
    delta : float
        The setting ``huber-delta``.

    Raises
    ------
    SettingsError
        If a custom function is missing, raises an error, or does not return a differentiable loss for each sample.
    """
    if not is_custom(loss):
        criteria: dict[str, Criterion] = {
            "bce": binary_cross_entropy,
            "mse": squared_error,
            "mae": absolute_error,
            "huber": partial(huber, delta=delta),
        }
        return criteria.get(LOSSES[target][0] if loss == "auto" else loss)
    setting, criterion = f"loss = {loss!r}", load(loss, "loss")
    if not callable(criterion):
        raise SettingsError(f"{setting}: it must be a function, not {type(criterion).__name__}")
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(_SAMPLES, _CLASSES, generator=generator, requires_grad=True)
    labels = torch.arange(_SAMPLES) % _CLASSES
    if target != CLASSES:  # labels or values (B, C)
        labels = labels[:, None] == torch.arange(_CLASSES)
        labels = labels.long() if target == LABELS else labels.float()
    try:
        losses = criterion(logits, labels)
        result = f"shape {tuple(losses.shape)}" if isinstance(losses, Tensor) else type(losses).__name__
        if not isinstance(losses, Tensor) or losses.shape != (_SAMPLES,):
            raise SettingsError(
                f"{setting}: for logits of shape {tuple(logits.shape)} and labels of shape {tuple(labels.shape)} it "
                f"must return the loss of each sample, of shape {(_SAMPLES,)}, not {result}"
            )
        if problem := _problem(criterion, logits, labels, losses):
            raise SettingsError(f"{setting}: {problem}")
    except SettingsError:
        raise
    except Exception as error:  # custom code may raise anything
        raise SettingsError(f"{setting}: it raised {format_error(error)}") from error
    return criterion


def _problem(criterion: Criterion, logits: Tensor, labels: Tensor, losses: Tensor) -> str:
    """Return why training cannot minimise a function, or an empty string if it can.

    Parameters
    ----------
    logits, labels, losses : torch.Tensor
        Finite logits ``(B, C)``, labels, and the losses ``(B,)`` that the function returns for them.
    """
    if not bool(losses.isfinite().all()):
        return f"it returns {losses.tolist()} for finite logits; it must return finite losses"
    gradient = torch.autograd.grad(losses.sum(), logits)[0] if losses.requires_grad else torch.zeros(1)
    if not bool(gradient.isfinite().all()):
        return "its gradient is not finite"
    if not bool(gradient.any()):
        return "its gradient is 0; it must depend on the logits through PyTorch operations"
    if not torch.equal(criterion(logits, labels), losses):
        return "a second call returns different losses; it must depend only on the logits and labels"
    stacked = vmap(criterion)(logits.detach()[None], labels[None])[0]
    if not torch.allclose(stacked, losses.detach()):
        return "batched calls (torch.func.vmap) return different losses from single calls"
    return ""
