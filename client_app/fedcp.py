"""The FedCP client trains all layers except the global head, and keeps its features near the served body's features."""

import torch
from torch import Tensor

from posy.client_app.base import PersonalClient
from posy.client_app.hooks import Config, Received, Result, Steps
from posy.client_app.training.batches import Batch
from posy.client_app.training.work import Context, Forward, Net, Train, Trained
from posy.strategies.fedcp import FedCPSettings

WIDTHS = (10.0, 15.0, 20.0, 50.0)
"""Squared widths of the Gaussian kernels, from the authors' program (clientcp.py, MMD)."""


class FedCPClient(PersonalClient):
    """Minimise cross-entropy + λ times the discrepancy between the trained and the served body's features (FedCP).

    The features of the served body are constant during a round. They are computed in evaluation mode, without
    augmentation.
    """

    method: FedCPSettings

    def local_round(self, received: Received, config: Config) -> Steps[Result]:
        """Train with a fixed global head. Send the mean of both heads in place of the global head."""
        start = self.assembled(received)
        work = Train(start, rates={"global-head": 0.0})
        if self.method.strength:
            features, _ = yield Forward(start, "train", features=True)
            work.objective, work.notes = near_the_served_body, features
            work.context = {"lambda": torch.tensor(self.method.strength, device=self.device)}
        trained: Trained = yield work
        heads = [self.layout.part((layer,)) for layer in ("head", "global-head")]
        update = trained.parameters.clone()
        heads[1].put(update, sum(part.take(trained.parameters) for part in heads) / 2)
        reply, _ = self.share(Trained(update, trained.loss))
        return reply, self.plain(trained.parameters)


def near_the_served_body(net: Net, batch: Batch, context: Context) -> Tensor:
    """Return cross-entropy + λ times the discrepancy between the features and ``batch.notes`` ``(B, D)``."""
    assert batch.notes is not None
    features, logits = net.features(batch.x)
    return net.loss(logits, batch) + context["lambda"] * discrepancy(features, batch.notes, batch.weight)


def discrepancy(x: Tensor, y: Tensor, weight: Tensor | None = None) -> Tensor:
    """Return the squared maximum mean discrepancy between two samples ``(B, D)``, summed over the kernels.

    The optional weights ``(B,)`` of the rows have a mean of 1 and apply to both samples.
    """

    def kernels(a: Tensor, b: Tensor) -> Tensor:
        squared = a.square().sum(1)[:, None] + b.square().sum(1)[None, :] - 2 * a @ b.T
        return torch.stack([torch.exp(-0.5 * squared / width) for width in WIDTHS]).sum(0)

    with torch.autocast(x.device.type, enabled=False):  # differences of large numbers need full precision
        x, y = x.float(), y.float()
        pairs = kernels(x, x) + kernels(y, y) - 2 * kernels(x, y)
    return (pairs if weight is None else pairs * weight[:, None] * weight[None, :]).mean()
