"""Custom loss functions, which are loaded and checked on a small batch before a run begins."""

from functools import lru_cache

import torch
from torch import Tensor
from torch.func import vmap

from posy.client_app.training.work import Criterion
from posy.extensions import format_error, is_custom, load
from posy.settings import SettingsError

_SAMPLES, _CLASSES = 4, 3


@lru_cache(maxsize=16)
def criterion_of(loss: str) -> Criterion | None:
    """Return the checked function that the setting ``loss`` names, or None for cross-entropy.

    Raises
    ------
    SettingsError
        If the function is missing, raises an error, or does not return a differentiable loss for each sample.
    """
    if not is_custom(loss):
        return None
    setting, criterion = f"loss = {loss!r}", load(loss, "loss")
    if not callable(criterion):
        raise SettingsError(f"{setting}: it must be a function, not {type(criterion).__name__}")
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(_SAMPLES, _CLASSES, generator=generator, requires_grad=True)
    labels = torch.arange(_SAMPLES) % _CLASSES
    try:
        losses = criterion(logits, labels)
        result = f"shape {tuple(losses.shape)}" if isinstance(losses, Tensor) else type(losses).__name__
        if not isinstance(losses, Tensor) or losses.shape != labels.shape:
            raise SettingsError(
                f"{setting}: for logits of shape {tuple(logits.shape)} and labels of shape {tuple(labels.shape)} it "
                f"must return the loss of each sample, of shape {tuple(labels.shape)}, not {result}"
            )
        if problem := _problem(criterion, logits, labels, losses):
            raise SettingsError(f"{setting}: {problem}")
    except SettingsError:
        raise
    except Exception as error:  # custom code may raise anything
        raise SettingsError(f"{setting}: it has raised {format_error(error)}") from error
    return criterion


def _problem(criterion: Criterion, logits: Tensor, labels: Tensor, losses: Tensor) -> str:
    """Return why training cannot minimise a function, or an empty string if it can.

    Parameters
    ----------
    logits, labels, losses : torch.Tensor
        Finite logits ``(B, C)``, labels ``(B,)``, and the losses ``(B,)`` that the function returns for them.
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
