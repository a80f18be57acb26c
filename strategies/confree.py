"""ConFREE (Zheng et al., 2025): the clients' updates of a shared body are rid of what conflicts, layer by layer.

Heads are personal, and clients train as FedRep's do. The paper's text was not at hand: this follows the authors'
description and program. The program projects without dividing by the squared length, which is no projection onto a
normal plane, as they describe it; here it is divided. Their alpha is told in neither; 0.5 is usual for the second step,
which is that of CAGrad (Liu et al., 2021).
"""

import math
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.optimize import minimize

from posy.randomness import numpy_generator
from posy.settings import Search, setting
from posy.strategies.base import PersonalisedStrategy
from posy.strategies.fedrep import FedRepSettings
from posy.strategies.method_settings import Refused
from posy.strategies.replies import Update, gram, mean_of, stacked

Float64 = npt.NDArray[np.float64]
SMALLEST = 1e-6
"""Is added to a length, beside one of 1, that is divided by."""


class ConFREESettings(
    FedRepSettings,
    noise=Refused("it projects updates that conflict by their angles, which noise makes right angles"),
    sums=Refused("it compares the clients' updates with each other"),
):
    """Settings of ConFREE."""

    alpha: float = setting(
        0.5,
        "radius of the ball around the guidance vector, in its lengths",
        minimum=0,
        maximum=1,
        search=Search(0.1, 0.9),
    )


class ConFREE(PersonalisedStrategy):
    """Add to each tensor of the body the conflict-free mix of the clients' updates, all of which count alike.

    BatchNorm's running statistics are no parameters; they are averaged as FedAvg does.
    """

    def aggregate(self, server_round: int, updates: list[Update]) -> dict[str, Any]:
        """Mix the updates of each tensor."""
        changes, model = stacked(updates) - self.model, mean_of(updates)
        generator = numpy_generator(self.settings.run.seed, "projections", server_round)
        places = self.shared.take(np.arange(self.size))
        conflicts = []
        for entry in self.architecture.layout.entries:
            start = int(np.searchsorted(places, entry.start))
            if not entry.trainable or start == len(places) or places[start] != entry.start:
                continue
            own = slice(start, start + entry.stop - entry.start)
            products = gram(changes[:, own])
            weights = best_for_the_worst(products, guidance(products, generator), self.method.alpha)
            model[own] = self.model[own] + weights.astype(np.float32) @ changes[:, own]
            conflicts.append(float((products < 0).mean()))
        self.model = model
        return {"conflicts": float(np.mean(conflicts))}


def guidance(products: Float64, generator: np.random.Generator) -> Float64:
    """Return the mix of the updates that is the mean of what is left of each, rid of conflicts with the others.

    Where an update has a negative inner product with another it is projected onto that one's normal plane, for each
    other one in turn, in a random order.

    Parameters
    ----------
    products : numpy.ndarray, (M, M)
        Inner products of the updates.
    generator : numpy.random.Generator
        Draws the orders.

    Returns
    -------
    numpy.ndarray, (M,)
        How much of each update there is in the guidance vector.
    """
    count, lengths = len(products), np.diag(products)
    left, rows = np.eye(count), np.arange(count)  # row i: the mix that is left of update i
    others = np.array([np.delete(rows, i) for i in rows], np.int64).reshape(count, count - 1)
    for other in generator.permuted(others, axis=1).T:
        against = np.minimum(np.einsum("ij,ji->i", left, products[:, other]), 0.0)
        left[rows, other] -= np.divide(against, lengths[other], out=np.zeros(count), where=lengths[other] > 0)
    return left.mean(axis=0)


def best_for_the_worst(products: Float64, guide: Float64, alpha: float) -> Float64:
    """Return the mix within α ||g|| of the guidance vector g that serves best the client that it serves worst.

    max_d min_i <Δ_i, d> over ||d − g|| ≤ α ||g|| is solved by d = g + α ||g|| Δ_w / ||Δ_w||, where w, on the simplex,
    minimises <Δ_w, g> + α ||g|| ||Δ_w|| and Δ_w = Σ_i w_i Δ_i. As in the program d is divided by 1 + α².

    Parameters
    ----------
    products : numpy.ndarray, (M, M)
        Inner products of the updates.
    guide : numpy.ndarray, (M,)
        How much of each update there is in g.
    alpha : float
        0 leaves g as it is.

    Returns
    -------
    numpy.ndarray, (M,)
    """
    length = norm_of_mix(products, guide)
    if not alpha * length:
        return guide / (1 + alpha**2)
    scaled = products / length**2

    def objective(w: Float64) -> tuple[float, Float64]:
        mixed, norm = scaled @ w, norm_of_mix(scaled, w) + SMALLEST
        return float(mixed @ guide + alpha * norm), scaled @ guide + alpha * mixed / norm

    count = len(products)
    found: Float64 = minimize(
        objective,
        np.full(count, 1 / count),
        jac=True,
        method="SLSQP",
        bounds=[(0, 1)] * count,
        constraints={"type": "eq", "fun": lambda w: w.sum() - 1, "jac": lambda w: np.ones(count)},
        options={"ftol": 1e-10, "maxiter": 200},
    ).x
    return (guide + alpha * found / (norm_of_mix(scaled, found) + SMALLEST)) / (1 + alpha**2)


def norm_of_mix(products: Float64, weights: Float64) -> float:
    """Return the length of a mix ``(M,)`` of vectors, by their inner products ``(M, M)``."""
    return math.sqrt(max(float(weights @ products @ weights), 0.0))
