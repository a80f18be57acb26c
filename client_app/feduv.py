"""FedUV's client: FedAvg's, with regularisers on the probabilities and on the features of each mini-batch."""

import math

import torch
from torch import Tensor

from posy.client_app.base import PersonalClient
from posy.client_app.training.batches import Batch
from posy.client_app.training.work import Context, Net, Train

SMALLEST = 1e-12
"""Is added to a variance: a deviation of 0 has no gradient."""


class FedUVClient(PersonalClient):
    """Minimise cross-entropy + mu L_V + lambda L_U over the mini-batches."""

    def work(self, start: Tensor) -> Train:
        """Return local training with the regularisers."""
        if not self.method.variance and not self.method.uniformity:
            return Train(start)
        strengths = {"mu": self.method.variance, "lambda": self.method.uniformity}
        return Train(start, regularised, {k: torch.tensor(v, device=self.device) for k, v in strengths.items()})


def regularised(net: Net, batch: Batch, context: Context) -> Tensor:
    """Return cross-entropy + mu L_V + lambda L_U; what fills up a batch is in neither."""
    features, logits = net.features(batch.x)
    there = torch.ones(len(logits), device=logits.device) if batch.weight is None else (batch.weight != 0).float()
    loss = net.loss(logits, batch)
    return loss + context["mu"] * too_little_variance(logits, there) + context["lambda"] * closeness(features, there)


def too_little_variance(logits: Tensor, there: Tensor) -> Tensor:
    """Return L_V: by how much each class's probability varies less over the batch than with evenly mixed classes.

    It is the mean over the classes of max(0, γ − the standard deviation of p_c). γ = 1/√C is that of the C one-hot
    vectors.

    Parameters
    ----------
    logits : torch.Tensor, (B, C)
        Outputs of the classifier.
    there : torch.Tensor, (B,)
        1 for a sample, 0 for what fills up the batch.
    """
    probabilities, present, count = logits.softmax(dim=-1), there[:, None], there.sum()
    centred = (probabilities - (probabilities * present).sum(dim=0) / count) * present
    deviation = (centred.square().sum(dim=0) / (count - 1).clamp_min(1) + SMALLEST).sqrt()
    return (1 / math.sqrt(logits.shape[1]) - deviation).relu().mean()


def closeness(features: Tensor, there: Tensor) -> Tensor:
    """Return L_U, which is least for evenly spread features: the mean of exp(−||z_i − z_j||² / σ) over all pairs.

    σ is the median of the squared distances that are not 0, as in the authors' program, which so needs no features of
    length 1: their scale makes no difference.

    Parameters
    ----------
    features : torch.Tensor, (B, D)
        What the head sees.
    there : torch.Tensor, (B,)
        1 for a sample, 0 for what fills up the batch.
    """
    i, j = torch.triu_indices(len(features), len(features), 1, device=features.device)
    if not len(i):
        return features.new_zeros(())
    # Not from a matrix product: in its rounding equal features would differ.
    distances = torch.cdist(features, features, compute_mode="donot_use_mm_for_euclid_dist")[i, j].square()
    pairs = there[i] * there[j]
    known = (pairs > 0) & (distances > 0)
    ordered = torch.where(known, distances, torch.inf).sort().values  # without any they are infinite, and all alike
    median = ordered.gather(0, ((known.sum() - 1) // 2).clamp_min(0).unsqueeze(0))
    return (pairs * torch.exp(-distances / median)).sum() / pairs.sum().clamp_min(1)
