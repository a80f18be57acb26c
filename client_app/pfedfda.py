"""The pFedFDA client trains the body under the global discriminant, and predicts with a local discriminant."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from posy.client_app.base import PersonalClient
from posy.client_app.hooks import Config, Received, Result, Steps
from posy.client_app.predictors import Predictor
from posy.client_app.training.batches import Batch
from posy.client_app.training.work import Context, Forward, Net, Train, Trained
from posy.strategies.pfedfda import AUTO, PFedFDASettings
from posy.strategies.replies import Update

RARE = 1e-4
"""Constant added to the share of each class, so that a class without samples is improbable rather than impossible."""
SHARES = 11
"""Number of candidate values of β, from 0 to 1."""

Gaussians = tuple[Tensor, Tensor]
"""Class means μ ``(C, D)`` and the covariance Σ ``(D, D)`` that all classes share."""


class PFedFDAClient(PersonalClient):
    """Train the body (Algorithm 1), and interpolate between the local and the global Gaussians by cross-validation."""

    method: PFedFDASettings

    def local_round(self, received: Received, config: Config) -> Steps[Result]:
        """Train under the global discriminant. Send the body, and Gaussians fitted to its features."""
        body, overall = received["model"], (received["means"].double(), received["covariance"].double())
        work = Train(self.with_head(body, overall), rates={"head": 0.0})
        collected = CollectedFeatures()
        if self.method.features == "training":
            work.objective = collected
        trained: Trained = yield work
        body = self.shared.take(trained.parameters)
        if self.method.features == "training":
            features, labels = torch.cat(collected.features).double(), torch.cat(collected.labels)
        else:
            features, labels = yield from self.training_features(trained.parameters)
        means, covariance = self.fitted(features, labels, overall)
        predictor = self.plain(self.with_head(body, (means, covariance)))
        arrays = {"model": body, "means": means.float(), "covariance": covariance.float()}
        return Update(arrays, trained.loss), predictor

    def served_model(self, received: Received, config: Config) -> Steps[Predictor]:
        """Return the served body with a head that is fitted to the body's features."""
        body, overall = received["model"], (received["means"].double(), received["covariance"].double())
        features, labels = yield from self.training_features(self.with_head(body, overall))
        return self.plain(self.with_head(body, self.fitted(features, labels, overall)))

    def training_features(self, model: Tensor) -> Steps[tuple[Tensor, Tensor]]:
        """Return a model's features ``(n, D)`` for the training samples, and the samples' labels ``(n,)``."""
        features, _ = yield Forward(model, "train", features=True)
        return features.double(), self.data.y_train

    def fitted(self, features: Tensor, labels: Tensor, overall: Gaussians) -> Gaussians:
        """Return an interpolation between the global Gaussians and Gaussians fitted to the features.

        Parameters
        ----------
        features : torch.Tensor, (n, D)
            Features of the training samples.
        labels : torch.Tensor, (n,)
            Classes of the samples.
        overall : tuple of torch.Tensor
            The global Gaussians.
        """
        count, ridge = self.method.folds, self.method.ridge
        beta: object = self.method.beta  # a number or AUTO
        if beta == AUTO:
            fold = folds_of(labels, count)
            parts = [
                (gaussians(features[train], labels[train], overall[0], ridge, count), features[test], labels[test])
                for train, test in (((fold != k) & (fold >= 0), fold == k) for k in range(count))
            ]
            shares = best_shares(parts, overall, self.log_prior(), two=self.method.betas == "two")
        else:
            shares = (float(self.method.beta), float(self.method.beta))
        local = gaussians(features, labels, overall[0], ridge, count)
        return torch.lerp(overall[0], local[0], shares[0]), torch.lerp(overall[1], local[1], shares[1])

    def with_head(self, body: Tensor, parameters: Gaussians) -> Tensor:
        """Return a model ``(d,)`` with the given body, and with the Gaussian discriminant as its head."""
        weight, bias = discriminant(*parameters, self.log_prior())
        model = self.shared.put(torch.empty(self.layout.size, device=self.device), body)
        return self.personal.put(model, torch.cat([weight.flatten(), bias]).float())

    def log_prior(self) -> Tensor:
        """Return the logarithm of each class's share of the samples ``(C,)``."""
        shares = self.data.class_distribution().double() + RARE
        return (shares / shares.sum()).log()


class CollectedFeatures:
    """The default objective, which also collects the features and labels of every mini-batch.

    Each client has its own instance. Requests with different objectives are never stacked, so an instance collects the
    mini-batches of a single client.
    """

    def __init__(self) -> None:
        self.features: list[Tensor] = []
        self.labels: list[Tensor] = []

    def __call__(self, net: Net, batch: Batch, context: Context) -> Tensor:
        """Return the mean loss of a mini-batch."""
        features, logits = net.features(batch.x)
        self.features.append(features.detach())
        self.labels.append(batch.y)
        return net.loss(logits, batch)


def gaussians(features: Tensor, labels: Tensor, means: Tensor, ridge: float, few: int) -> Gaussians:
    """Return the class means ``(C, D)``, and the covariance ``(D, D)`` about these means.

    As in the authors' program, a class with few samples uses its global mean. The ridge keeps an estimate from few
    samples well conditioned.

    Parameters
    ----------
    features : torch.Tensor, (n, D)
        Inputs of the head.
    labels : torch.Tensor, (n,)
        Classes of the samples.
    means : torch.Tensor, (C, D)
        The global means.
    ridge : float
        Number added to the diagonal of the covariance.
    few : int
        Maximum number of samples at which a class uses its global mean.
    """
    members = F.one_hot(labels, len(means)).to(features.dtype)
    counts = members.sum(dim=0)[:, None]
    local = torch.where(counts > few, members.T @ features / counts.clamp_min(1), means)
    centred = features - local[labels]
    covariance = centred.T @ centred / max(len(labels) - 1, 1)
    return local, covariance + ridge * torch.eye(features.shape[1], dtype=features.dtype, device=features.device)


def discriminant(means: Tensor, covariance: Tensor, log_prior: Tensor) -> tuple[Tensor, Tensor]:
    """Return the weights Σ⁻¹ μ_c and biases −½ μ_cᵀ Σ⁻¹ μ_c + log π_c of the Gaussians' linear discriminant.

    Parameters
    ----------
    means : torch.Tensor, (..., C, D)
        Class means μ.
    covariance : torch.Tensor, (..., D, D)
        Covariance Σ, of which only the symmetric part is used.
    log_prior : torch.Tensor, (C,)
        Logarithms of the class priors π.

    Returns
    -------
    tuple of torch.Tensor, (..., C, D) and (..., C)
    """
    weight = torch.linalg.solve((covariance + covariance.mT) / 2, means.mT).mT
    return weight, log_prior - (weight * means).sum(dim=-1) / 2


def folds_of(labels: Tensor, count: int) -> Tensor:
    """Return each sample's fold ``(n,)``. The samples of a class are assigned to the folds in turn.

    Samples of a class with fewer than ``count`` samples belong to no fold and receive −1.
    """
    order = labels.argsort(stable=True)
    counts = labels.bincount()
    ranks = torch.empty_like(labels)
    starts = counts.cumsum(0) - counts
    ranks[order] = torch.arange(len(labels), device=labels.device) - starts[labels[order]]
    return torch.where(counts[labels] >= count, ranks % count, -1)


def best_shares(
    parts: Sequence[tuple[Gaussians, Tensor, Tensor]], overall: Gaussians, log_prior: Tensor, *, two: bool = False
) -> tuple[float, float]:
    """Return the β of the means and the β of the covariance with the lowest cross-entropy on held-out folds.

    The candidates are :data:`SHARES` values for a common β or, with ``two``, all pairs of these values. A search over
    fixed values cannot get stuck in a local minimum. Without held-out samples, both values of β are 0.

    Parameters
    ----------
    parts : sequence
        For each fold, the Gaussians fitted to the other folds, the fold's features ``(n, D)`` and its labels ``(n,)``.
    overall : tuple of torch.Tensor
        The global means ``(C, D)`` and covariance ``(D, D)``.
    log_prior : torch.Tensor, (C,)
        Logarithms of the class priors π.
    two : bool
        Whether means and covariance may have different β.
    """
    values = torch.linspace(0, 1, SHARES, dtype=log_prior.dtype, device=log_prior.device)
    losses = torch.zeros(SHARES, SHARES, dtype=values.dtype, device=values.device)  # indexed by β of Σ, then by β of μ
    for local, features, labels in parts:
        means = torch.lerp(overall[0], local[0], values[:, None, None])
        for number, share in enumerate(values):
            chosen = slice(None) if two else slice(number, number + 1)
            weight, bias = discriminant(means[chosen], torch.lerp(overall[1], local[1], share), log_prior)
            outputs = features @ weight.mT + bias[:, None]
            targets = labels.expand(len(outputs), -1)
            losses[number, chosen] += F.cross_entropy(outputs.mT, targets, reduction="none").sum(dim=1)
    if two:
        best = int(losses.argmin())
        return float(values[best % SHARES]), float(values[best // SHARES])
    share = float(values[losses.diagonal().argmin()])
    return share, share
