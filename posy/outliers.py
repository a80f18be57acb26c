"""Detect samples that are far from all training samples, by their distance in an embedding of a network.

The distance is the Mahalanobis distance to the closest mean of a group of training samples (Lee et al., 2018, "A Simple
Unified Framework for Detecting Out-of-Distribution Samples and Adversarial Attacks"). All groups share one covariance,
which is shrunk by the rule of Ledoit and Wolf (2004). Distances are divided by their root mean square over the training
samples, so that distances in several embeddings are comparable.
"""

import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Embeddings = npt.NDArray[np.floating]
Groups = npt.NDArray[np.integer]

LEAST_SHRINKAGE = 1e-4
"""Minimum weight of the identity in a covariance, so that it is invertible even if an embedding is constant."""


class Reference(NamedTuple):
    """The groups of training samples from which distances are measured."""

    whitening: Floats
    """Matrix ``(D, D)``: the distance between embeddings u and v is ||(u - v) whitening||."""
    means: Floats
    """The mean embedding of each group ``(G, D)``, multiplied by the whitening matrix."""


def fit_reference(parts: Iterable[tuple[Embeddings, Groups]]) -> Reference:
    """Return the groups of training samples, and a covariance of the samples around the means of their groups.

    Parameters
    ----------
    parts : iterable of (numpy.ndarray, numpy.ndarray)
        Embeddings ``(n, D)`` and the group of each sample ``(n,)``. Equal numbers in two parts are different groups.
        The function reads each part once, so it needs the memory of one part.
    """
    means: list[Floats] = []
    scatter, fourth, count = np.zeros((0, 0)), 0.0, 0
    for embeddings, groups in parts:
        if not len(embeddings):
            continue
        centres, residuals = _centred(embeddings.astype(np.float64), groups)
        means.append(centres)
        scatter = residuals.T @ residuals + (scatter if scatter.size else 0.0)
        fourth += float(((residuals**2).sum(axis=1) ** 2).sum())
        count += len(residuals)
    if not count:
        raise ValueError("there are no training samples")
    if not np.isfinite(fourth):
        raise ValueError("the embedding of a training sample is not finite")
    covariance = scatter / count
    whitening = _whitening(shrunk(covariance, fourth / count, count))
    if scale := math.sqrt(np.trace(whitening.T @ covariance @ whitening)):
        whitening /= scale
    return Reference(whitening, np.concatenate(means) @ whitening)


def shrunk(covariance: Floats, fourth: float, count: int) -> Floats:
    """Return a covariance ``(D, D)`` that is shrunk towards a multiple of the identity (Ledoit and Wolf, 2004).

    Parameters
    ----------
    covariance : numpy.ndarray, (D, D)
        The mean of r rᵀ over the residuals r.
    fourth : float
        The mean of ||r||⁴.
    count : int
        Number of residuals.
    """
    size = len(covariance)
    scale = float(np.trace(covariance)) / size
    if not scale:  # every group has a single sample, or equal samples: distances are then Euclidean
        return np.eye(size)
    squares = float((covariance**2).sum())
    spread = squares - size * scale**2  # ||covariance - scale I||²
    error = (fourth - squares) / count
    weight = min(max(error / spread, LEAST_SHRINKAGE), 1.0) if spread > 0 else 1.0
    return (1 - weight) * covariance + weight * scale * np.eye(size)


def distances(reference: Reference, embeddings: Embeddings) -> Floats:
    """Return the distance ``(n,)`` of each embedding ``(n, D)`` to the closest group.

    The distance is infinite for an embedding that is not finite.
    """
    z = embeddings.astype(np.float64) @ reference.whitening
    # ||z||² is the same for all groups. The distance is computed from the difference, which rounds less.
    closest = ((reference.means**2).sum(axis=1) - 2 * z @ reference.means.T).argmin(axis=1)
    lengths = np.linalg.norm(z - reference.means[closest], axis=1)
    return np.where(np.isfinite(lengths), lengths, np.inf)


def conformal_threshold(scores: Floats, alpha: float) -> float | None:
    """Return a threshold that a further score exceeds with a probability of at most ``alpha``, or None.

    The bound holds on average over calibration samples, if these and the further sample are exchangeable (split
    conformal prediction). The result is None if there are too few scores: fewer than 1 / alpha - 1.

    Parameters
    ----------
    scores : numpy.ndarray, (n,)
        Scores of calibration samples, which were not used to fit the score.
    alpha : float
        Maximum probability of a false alarm.
    """
    exceeding = math.floor(round(alpha * (len(scores) + 1), 9))  # 0.29 * 100 is 28.999…
    return float(np.sort(scores)[-exceeding]) if exceeding else None


def _centred(z: Floats, groups: Groups) -> tuple[Floats, Floats]:
    """Return the mean of each group ``(G, D)``, and each sample's difference to the mean of its group ``(n, D)``."""
    _, index, counts = np.unique(groups, return_inverse=True, return_counts=True)
    sums = np.zeros((len(counts), z.shape[1]))
    np.add.at(sums, index, z)
    centres = sums / counts[:, None]
    return centres, z - centres[index]


def _whitening(covariance: Floats) -> Floats:
    """Return a matrix W ``(D, D)`` with W Wᵀ equal to the inverse of a covariance."""
    values, vectors = np.linalg.eigh(covariance)
    return vectors / np.sqrt(values)
