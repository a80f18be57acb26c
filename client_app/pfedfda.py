"""pFedFDA's client: it trains the body under the global discriminant, and predicts with one of its own."""

import torch
import torch.nn.functional as F
from torch import Tensor

from posy.client_app.base import Config, PersonalClient, Predictor, Result, Steps
from posy.client_app.training.work import Forward, Train, Trained
from posy.strategies.replies import Update

RARE = 1e-4
"""Is added to the share of each class: one that a client has never seen is improbable, not impossible."""
FEW = 2
"""Samples of a class up to which its global mean is used."""
SHARES = 11
"""Values of beta that are tried, from 0 to 1."""


class PFedFDAClient(PersonalClient):
    """Train the body (Algorithm 1), and interpolate between the local and the global Gaussians by cross-validation."""

    def local_round(self, received: list[Tensor], config: Config) -> Steps[Result]:
        """Train under the global discriminant; send the body, and the Gaussians that fit its features."""
        body, means, covariance = self.method.parts(self.architecture, received[0])
        start = self.with_head(body, means.double(), covariance.double())
        trained: Trained = yield Train(start, rates={"head": 0.0})
        body = self.shared.take(trained.parameters)
        means, covariance = yield from self.fitted(trained.parameters, means, covariance)
        sent = torch.cat([body, means.flatten().float(), covariance.flatten().float()])
        return Update([sent], trained.loss), self.plain(self.with_head(body, means, covariance))

    def served_model(self, received: list[Tensor], config: Config) -> Steps[Predictor]:
        """Fit the head to the served body's features."""
        body, means, covariance = self.method.parts(self.architecture, received[0])
        whole = self.with_head(body, means.double(), covariance.double())
        means, covariance = yield from self.fitted(whole, means, covariance)
        return self.plain(self.with_head(body, means, covariance))

    def fitted(self, whole: Tensor, means: Tensor, covariance: Tensor) -> Steps[tuple[Tensor, Tensor]]:
        """Return the Gaussians between those of a model's features and the global ones."""
        features, _ = yield Forward(whole, "train", features=True)
        features, labels, count = features.double(), self.data.y_train, self.method.folds
        overall = means.double(), covariance.double()
        fold = folds_of(labels, count)
        parts = [
            (gaussians(features[train], labels[train], overall[0], self.method.ridge), features[test], labels[test])
            for train, test in (((fold != k) & (fold >= 0), fold == k) for k in range(count))
        ]
        share = best_share(parts, overall, self.log_prior())
        own = gaussians(features, labels, overall[0], self.method.ridge)
        return torch.lerp(overall[0], own[0], share), torch.lerp(overall[1], own[1], share)

    def with_head(self, body: Tensor, means: Tensor, covariance: Tensor) -> Tensor:
        """Return the whole model ``(d,)``: a body with the discriminant as its head."""
        weight, bias = discriminant(means, covariance, self.log_prior())
        whole = self.shared.put(torch.empty(self.layout.size, device=self.device), body)
        return self.personal.put(whole, torch.cat([weight.flatten(), bias]).float())

    def log_prior(self) -> Tensor:
        """Return the logarithms of the classes' shares ``(C,)``."""
        shares = self.class_distribution().double() + RARE
        return (shares / shares.sum()).log()


def gaussians(features: Tensor, labels: Tensor, means: Tensor, ridge: float) -> tuple[Tensor, Tensor]:
    """Return the classes' means ``(C, D)`` and the covariance about them ``(D, D)``.

    As in the authors' program a class with few samples has its global mean, and the ridge (there 1) is added to the
    diagonal, which keeps the estimate from few samples well conditioned.

    Parameters
    ----------
    features : torch.Tensor, (n, D)
        What the head sees of the samples.
    labels : torch.Tensor, (n,)
        Their classes.
    means : torch.Tensor, (C, D)
        The global means.
    ridge : float
        What is added to the diagonal of the covariance.
    """
    members = F.one_hot(labels, len(means)).to(features.dtype)
    counts = members.sum(dim=0)[:, None]
    own = torch.where(counts > FEW, members.T @ features / counts.clamp_min(1), means)
    centred = features - own[labels]
    covariance = centred.T @ centred / max(len(labels) - 1, 1)
    return own, covariance + ridge * torch.eye(features.shape[1], dtype=features.dtype, device=features.device)


def discriminant(means: Tensor, covariance: Tensor, log_prior: Tensor) -> tuple[Tensor, Tensor]:
    """Return the weights Σ⁻¹ μ_c and biases −½ μ_cᵀ Σ⁻¹ μ_c + log π_c of the Gaussians' linear discriminant.

    Parameters
    ----------
    means : torch.Tensor, (..., C, D)
        μ.
    covariance : torch.Tensor, (..., D, D)
        Σ; its symmetric part counts.
    log_prior : torch.Tensor, (C,)
        log π.

    Returns
    -------
    tuple of torch.Tensor, (..., C, D) and (..., C)
    """
    weight = torch.linalg.solve((covariance + covariance.mT) / 2, means.mT).mT
    return weight, log_prior - (weight * means).sum(dim=-1) / 2


def folds_of(labels: Tensor, count: int) -> Tensor:
    """Return the part ``(n,)`` of each sample, the classes dealt out in turn; −1 where a class has fewer than parts."""
    order = labels.argsort(stable=True)
    counts = labels.bincount()
    places = torch.empty_like(labels)
    starts = counts.cumsum(0) - counts
    places[order] = torch.arange(len(labels), device=labels.device) - starts[labels[order]]
    return torch.where(counts[labels] >= count, places % count, -1)


def best_share(
    parts: list[tuple[tuple[Tensor, Tensor], Tensor, Tensor]], overall: tuple[Tensor, Tensor], log_prior: Tensor
) -> float:
    """Return the β at which the discriminant fits data best that its local Gaussians have not seen.

    The authors' program descends on β; here some values are tried, which ends in no local minimum. Means and covariance
    have one β, which the paper finds enough as a rule. Without any data it is 0.

    Parameters
    ----------
    parts : list
        Of each part the Gaussians of all others, its features ``(n, D)`` and its labels ``(n,)``.
    overall : tuple of torch.Tensor
        The global means ``(C, D)`` and covariance ``(D, D)``.
    log_prior : torch.Tensor, (C,)
        log π.
    """
    shares = torch.linspace(0, 1, SHARES, dtype=log_prior.dtype, device=log_prior.device)[:, None, None]
    losses = torch.zeros_like(shares[:, 0, 0])
    for own, features, labels in parts:
        mixed = [here + shares * (there - here) for here, there in zip(overall, own, strict=True)]
        weight, bias = discriminant(mixed[0], mixed[1], log_prior)
        outputs = features @ weight.mT + bias[:, None]
        losses += F.cross_entropy(outputs.mT, labels.expand(SHARES, -1), reduction="none").sum(dim=1)
    return float(shares[losses.argmin(), 0, 0])
