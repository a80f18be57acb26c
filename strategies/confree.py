"""ConFREE (Zheng et al., 2025): the server removes conflicts between the clients' updates of a shared body.

Heads are personal, and clients train as in FedRep. The equations are taken from the authors' poster. Their
program follows different rules, which ``confree-rule=program`` selects.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from posy.randomness import numpy_generator
from posy.settings import Search, setting
from posy.strategies.arrays import model, reply
from posy.strategies.base import PersonalisedStrategy
from posy.strategies.card import MethodCard, Paper, Program
from posy.strategies.fedrep import FedRepSettings
from posy.strategies.replies import Update, gram, stacked

Float64 = npt.NDArray[np.float64]
SMALLEST = 1e-6
"""Number added to a length of about 1 to avoid a division by zero."""


class ConFREESettings(FedRepSettings, robust="its server weights updates by the angles between them", point="served"):
    """Settings of ConFREE."""

    returned = reply(
        model=model(
            noise="it detects conflicts by the angles between updates, and noise makes updates orthogonal",
            sums="it compares the clients' updates with each other",
        )
    )

    card = MethodCard(
        paper=Paper(
            "Zheng et al.",
            2025,
            "ConFREE: Conflict-free Client Update Aggregation for Personalized Federated Learning",
            "AAAI",
            "https://github.com/StuZheng/ConFREE",
        ),
        equations=(
            "g = mean over i of (Δ_i − Σ_{j≠i, <Δ_i, Δ_j> < 0} <Δ_i, Δ_j> / ||Δ_j||² Δ_j) (Eq. 3)",
            "w* = argmin over the simplex of <Δ_w, g> + c ||g|| ||Δ_w||, Δ_w = Σ_i w_i Δ_i (Eq. 5)",
            "d* = g + c ||g|| Δ_{w*} / ||Δ_{w*}|| (Eq. 4)",
            "θ ← θ + d* (Algorithm 1, line 14)",
        ),
        sent={"model (d,)": "the shared body θ"},
        returned={"model (d,)": "the trained body θ + Δ_i"},
        reveals="the body, and thus which updates conflict; the head stays on the client",
        server_state={"model": "the shared body θ (d,)"},
        client_state={"personal": "the client's head"},
        scored="The served model, because the authors' program is built on PFLlib, whose FedRep scores the received "
        "body with the client's head before training.",
        deviations=(
            "Clients train as in FedRep, one of the eight methods that the authors combine with ConFREE.",
            "The authors' program differs from the poster. It treats each tensor separately (`confree-parts=tensors`). "
            "It also projects in a random order without division by the squared length, and divides the step by 1 + c² "
            "(`confree-rule=program`).",
            "The authors do not state their value of c.",
            "BatchNorm's running statistics are not projected, but averaged as in FedAvg.",
        ),
        program=Program(
            "StuZheng/ConFREE",
            "81ac152fac199a411abc6c99c35670c345ae60b3",
            "ConFREE.py: ParameterAggregator.aggregate_parameters_wise",
            1e-6,
        ),
    )
    head_epochs: int = setting(
        1,
        "epochs for the head, which trains before the body; with `local-steps`, both train for `local-steps` steps",
        source="`--plocal_epochs 1` of PFLlib, on which the authors' program is built",
        needs="local-steps = 0",
        minimum=1,
        search=Search(1, 10),
    )
    alpha: float = setting(
        0.5,
        "radius c of the ball around the guidance vector, relative to the vector's length",
        source="choice: the default of CAGrad (Liu et al., 2021), which takes the same step; the authors give no value",
        minimum=0,
        maximum=1,
        search=Search(0.1, 0.9),
    )
    rule: str = setting(
        "paper",
        "how updates are mixed: by Eqs. 3 and 5 and line 14 of Algorithm 1, or by the rules of the authors' program",
        source="the authors' poster, Eq. 3 and Algorithm 1",
        choices=("paper", "program"),
    )
    parts: str = setting(
        "body",
        "unit of the projections: the whole body as one vector, or each of its tensors",
        source="the authors' poster, Algorithm 1; their program treats each tensor separately",
        choices=("body", "tensors"),
    )

    def refusals(self) -> Mapping[str, str]:
        """Reject ``client-weights``, because the poster's mixture gives all clients the same weight."""
        reason = "its mixture of the updates gives all clients the same weight"
        return {"client-weights": reason, "max-client-weight": reason}


class ConFREE(PersonalisedStrategy):
    """Add the conflict-free mixture of the clients' updates to the body; all clients have the same weight."""

    method: ConFREESettings

    def aggregate(self, server_round: int, updates: list[Update]) -> dict[str, Any]:
        """Mix the updates of each part."""
        changes, model = stacked(updates) - self.model, self.model.copy()
        generator = numpy_generator(self.settings.run.seed, "projections", server_round)
        conflicts = []
        for part in self._parts():
            products = np.sum([gram(changes[:, tensor]) for tensor in part], axis=0)
            weights = self._weights(products, generator).astype(np.float32)
            for tensor in part:
                model[tensor] = self.model[tensor] + weights @ changes[:, tensor]
            conflicts.append(float((products < 0).mean()))
        self.model = model
        return {"conflicts": float(np.mean(conflicts))}

    def _parts(self) -> list[list[slice]]:
        """Return the slices of the shared body's trainable tensors, in a single list or in one list per tensor."""
        indices = self.shared.take(np.arange(self.size))
        tensors = []
        for entry in self.architecture.layout.entries:
            start = int(np.searchsorted(indices, entry.start))
            if entry.trainable and start < len(indices) and indices[start] == entry.start:
                tensors.append(slice(start, start + entry.stop - entry.start))
        return [tensors] if self.method.parts == "body" else [[tensor] for tensor in tensors]

    def _weights(self, products: Float64, generator: np.random.Generator) -> Float64:
        """Return the weight of each update in the server's step ``(M,)``."""
        c = self.method.alpha
        if self.method.rule == "paper":
            return best_for_the_worst(products, guidance(products), c)
        return best_for_the_worst(products, sequential_guidance(products, generator), c) / (1 + c**2)


def guidance(products: Float64) -> Float64:
    """Return the guidance vector g as a mixture of the updates (Eq. 3).

    From each update, the function subtracts its projections onto all updates with which it has a negative inner
    product. g is the mean of the results.

    Parameters
    ----------
    products : numpy.ndarray, (M, M)
        Inner products of the updates.

    Returns
    -------
    numpy.ndarray, (M,)
        Weight of each update in g.
    """
    lengths = np.diag(products)
    against = np.divide(np.minimum(products, 0.0), lengths, out=np.zeros_like(products), where=lengths > 0)
    return (np.eye(len(products)) - against).mean(axis=0)


def sequential_guidance(products: Float64, generator: np.random.Generator) -> Float64:
    """Return the guidance vector of the authors' program as a mixture of the updates.

    Starting from each update r, the function goes through the other updates Δ in a random order. If <r, Δ> is
    negative, it subtracts <r, Δ> Δ from r, without division by ||Δ||². The guidance
    vector is the mean of the results.

    Parameters
    ----------
    products : numpy.ndarray, (M, M)
        Inner products of the updates.
    generator : numpy.random.Generator
        Source of the random orders.

    Returns
    -------
    numpy.ndarray, (M,)
        Weight of each update in the guidance vector.
    """
    count = len(products)
    remainders, rows = np.eye(count), np.arange(count)  # row i: the mixture that replaces update i
    orders = np.empty((count, count - 1), np.int64)
    for i in rows:
        orders[i] = np.where(rows == i, rows[-1], rows)[:-1]
        generator.shuffle(orders[i])
    for other in orders.T:
        against = np.minimum(np.einsum("ij,ji->i", remainders, products[:, other]), 0.0)
        remainders[rows, other] -= against
    return remainders.mean(axis=0)


def best_for_the_worst(products: Float64, guide: Float64, c: float) -> Float64:
    """Return the mixture d, within c ||g|| of the guidance vector g, that maximises the smallest gain over the clients.

    The solution of max_d min_i <Δ_i, d> over ||d − g|| ≤ c ||g|| is d = g + c ||g|| Δ_w / ||Δ_w|| (Eq. 4). The weights
    w minimise <Δ_w, g> + c ||g|| ||Δ_w|| over the simplex, with Δ_w = Σ_i w_i Δ_i (Eq. 5).

    Parameters
    ----------
    products : numpy.ndarray, (M, M)
        Inner products of the updates.
    guide : numpy.ndarray, (M,)
        Weight of each update in g.
    c : float
        Radius; 0 gives g itself.

    Returns
    -------
    numpy.ndarray, (M,)
        Weight of each update in d.
    """
    from scipy.optimize import minimize  # noqa: PLC0415 - the settings do not need SciPy

    length = norm_of_mix(products, guide)
    if not c * length:
        return guide
    scaled = products / length**2

    def objective(w: Float64) -> tuple[float, Float64]:
        mixed, norm = scaled @ w, norm_of_mix(scaled, w) + SMALLEST
        return float(mixed @ guide + c * norm), scaled @ guide + c * mixed / norm

    count = len(products)
    worst: Float64 = minimize(
        objective,
        np.full(count, 1 / count),
        jac=True,
        method="SLSQP",
        bounds=[(0, 1)] * count,
        constraints={"type": "eq", "fun": lambda w: w.sum() - 1, "jac": lambda w: np.ones(count)},
        options={"ftol": 1e-10, "maxiter": 200},
    ).x
    return guide + c * worst / (norm_of_mix(scaled, worst) + SMALLEST)


def norm_of_mix(products: Float64, weights: Float64) -> float:
    """Return the length of a mixture of vectors, from its weights ``(M,)`` and their inner products ``(M, M)``."""
    return math.sqrt(max(float(weights @ products @ weights), 0.0))
