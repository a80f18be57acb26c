"""The FedUV client: FedAvg with regularisers on the probabilities and the features of each mini-batch."""

import math

import torch
from torch import Tensor

from posy.client_app.base import PersonalClient
from posy.client_app.training.batches import Batch
from posy.client_app.training.work import Context, Net, Train
from posy.strategies.feduv import FedUVSettings

SMALLEST = 1e-12
"""Constant added to a variance, because the gradient of the square root is infinite at 0."""


class FedUVClient(PersonalClient):
    """Minimise cross-entropy + α L_V + β L_U over the mini-batches."""

    method: FedUVSettings

    def work(self, start: Tensor) -> Train:
        """Return the request for local training with the regularisers."""
        if not self.method.variance and not self.method.uniformity:
            return Train(start)
        strengths = {"variance": self.method.variance, "uniformity": self.method.uniformity}
        return Train(start, regularised, {k: torch.tensor(v, device=self.device) for k, v in strengths.items()})


def regularised(net: Net, batch: Batch, context: Context) -> Tensor:
    """Return cross-entropy + α L_V + β L_U. Padding rows, which have weight 0, do not affect the regularisers."""
    features, logits = net.features(batch.x)
    present = torch.ones(len(logits), device=logits.device) if batch.weight is None else (batch.weight != 0).float()
    loss = net.loss(logits, batch) + context["variance"] * too_little_variance(logits, present)
    return loss + context["uniformity"] * closeness(features, present)


def too_little_variance(logits: Tensor, present: Tensor) -> Tensor:
    """Return L_V, the mean over classes of max(0, γ − std(p_c)), where std is the standard deviation over the batch.

    γ = 1/√C is the standard deviation of p_c over a batch of the C one-hot vectors.

    Parameters
    ----------
    logits : torch.Tensor, (B, C)
        Outputs of the classifier.
    present : torch.Tensor, (B,)
        1 for a sample, 0 for padding.
    """
    probabilities, mask, count = logits.softmax(dim=-1), present[:, None], present.sum()
    centred = (probabilities - (probabilities * mask).sum(dim=0) / count) * mask
    deviation = (centred.square().sum(dim=0) / (count - 1).clamp_min(1) + SMALLEST).sqrt()
    return (1 / math.sqrt(logits.shape[1]) - deviation).relu().mean()


def closeness(features: Tensor, present: Tensor) -> Tensor:
    """Return L_U, the mean over pairs of exp(−||z_i − z_j||² / σ). Evenly spread features minimise L_U.

    σ is the median of the non-zero squared distances, as in the authors' program. The scale of the features therefore
    makes no difference, so they do not need normalisation.

    Parameters
    ----------
    features : torch.Tensor, (B, D)
        The inputs of the head.
    present : torch.Tensor, (B,)
        1 for a sample, 0 for padding.
    """
    i, j = torch.triu_indices(len(features), len(features), 1, device=features.device)
    if not len(i):
        return features.new_zeros(())
    # If a matrix product computed the distances, rounding would make the distance between equal features positive.
    distances = torch.cdist(features, features, compute_mode="donot_use_mm_for_euclid_dist")[i, j].square()
    pairs = present[i] * present[j]
    counted = (pairs > 0) & (distances > 0)
    ordered = torch.where(counted, distances, torch.inf).sort().values  # all infinite if no pair is counted
    median = ordered.gather(0, ((counted.sum() - 1) // 2).clamp_min(0).unsqueeze(0))
    return (pairs * torch.exp(-distances / median)).sum() / pairs.sum().clamp_min(1)
