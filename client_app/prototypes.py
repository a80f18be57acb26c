"""Class prototypes on a client: the mean features of each class, and a loss that pulls features towards them."""

import torch.nn.functional as F
from torch import Tensor

from posy.client_app.training.batches import Batch
from posy.client_app.training.work import Context, Net, mean_over


def class_means(features: Tensor, labels: Tensor, num_classes: int) -> tuple[Tensor, Tensor]:
    """Return the class means ``(C, D)`` of features ``(n, D)``, and the number of samples per class ``(C,)``.

    The mean of a class without samples is zero. Means are computed in double precision, so that all devices give the
    same result.
    """
    members = F.one_hot(labels, num_classes).double()
    counts = members.sum(0)
    means = members.T @ features.double() / counts.clamp_min(1)[:, None]
    return means.float(), counts.float()


def distance_to_prototypes(features: Tensor, batch: Batch, context: Context) -> Tensor:
    """Return the mean of (f − c)² over the samples of a batch and their D features.

    c is the row of ``context["prototypes"]`` ``(C, D)`` for a sample's class. A class with 0 in ``context["known"]``
    ``(C,)`` has no prototype. Its samples have a distance of 0.
    """
    squares = (features - context["prototypes"][batch.y]).square().mean(dim=-1)
    return mean_over(squares * context["known"][batch.y], batch)


def towards_prototypes(net: Net, batch: Batch, context: Context) -> Tensor:
    """Return cross-entropy + λ times the distance to the prototypes."""
    features, logits = net.features(batch.x)
    return net.loss(logits, batch) + context["lambda"] * distance_to_prototypes(features, batch, context)
