"""What training minimises for each sample, where that is a function of people's own."""

from functools import lru_cache

import torch
from torch import Tensor
from torch.func import vmap

from posy.client_app.training.work import Criterion
from posy.extensions import is_own, load, said
from posy.settings import SettingsError

_SAMPLES, _CLASSES = 4, 3


@lru_cache(maxsize=16)
def criterion_of(loss: str) -> Criterion | None:
    """Return the function that the setting ``loss`` names, once it has been tried; None for the cross-entropy.

    Raises
    ------
    SettingsError
        If there is no such function, or what it returns is no loss of each sample that can be differentiated.
    """
    if not is_own(loss):
        return None
    what, criterion = f"loss = {loss!r}", load(loss, "loss")
    if not callable(criterion):
        raise SettingsError(f"{what}: it is no function, but {type(criterion).__name__}")
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(_SAMPLES, _CLASSES, generator=generator, requires_grad=True)
    labels = torch.arange(_SAMPLES) % _CLASSES
    try:
        found = criterion(logits, labels)
        told = f"shape {tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
        if not isinstance(found, Tensor) or found.shape != labels.shape:
            raise SettingsError(
                f"{what}: for logits of shape {tuple(logits.shape)} and labels of shape {tuple(labels.shape)} it must "
                f"return the loss of each sample, of shape {tuple(labels.shape)}, not {told}"
            )
        gradient = torch.autograd.grad(found.sum(), logits)[0] if found.requires_grad else torch.zeros(1)
        stacked = vmap(criterion)(logits.detach()[None], labels[None])[0]
    except SettingsError:
        raise
    except Exception as error:  # whatever the code of somebody else may raise
        raise SettingsError(f"{what}: it has raised {said(error)}") from error
    if not (bool(gradient.isfinite().all()) and bool(gradient.any())):
        raise SettingsError(f"{what}: it does not depend on the logits, or its gradient is not finite")
    if not torch.allclose(stacked, found.detach()):
        raise SettingsError(
            f"{what}: several calls at once (torch.func.vmap) give other values than one after the other"
        )
    return criterion
