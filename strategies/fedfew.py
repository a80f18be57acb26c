"""FedFew: K server models for M clients by smooth Tchebycheff set scalarisation (STCH-Set).

"Few-for-Many Personalized Federated Learning", arXiv:2603.11992.
"""

from logging import WARNING
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from flwr.common.logger import log
from flwr.common.typing import NDArrays

from posy import figures
from posy.models.architecture import Architecture
from posy.models.parameters import FloatArray
from posy.settings import Search, setting
from posy.strategies.base import PersonalisedStrategy
from posy.strategies.method_settings import ALLOWED, MethodSettings, Refused
from posy.strategies.replies import Update, sample_counts

Float64 = npt.NDArray[np.float64]
IDLE_ROUNDS = 10
"""Rounds after which a model that is nobody's best is worth a warning."""
SMALLEST = 1e-30
"""The smallest smoothing parameter: below it weights are one-hot, as at 0, and losses divided by it might overflow."""


class FedFewSettings(
    MethodSettings,
    noise=ALLOWED,
    sums=Refused("it weighs each client's updates by its losses of this round, which the sum would have to await"),
    point="served",
):
    """Settings of FedFew."""

    models: int = setting(3, "number K of server models", minimum=1, maximum=1000)
    mu: float = setting(0.01, "smoothing parameter of STCH-Set", above=0, search=Search(0.001, 1.0, log=True))
    server_lr: float = setting(1.0, "server step size eta_s", above=0, search=Search(0.5, 5.0, log=True))
    full_steps: bool = setting(
        True,
        "divide each model's step by the sum of its weights, so that all K move as far; false: as in the paper",
        earlier=False,
    )
    weigh_losses: bool = setting(True, "multiply each client's losses by n_i / N before weighting (footnote 2)")
    initialisation: str = setting(
        "distinct",
        "K independent seeds, or one; `same` with shared batches stays one model",
        choices=("distinct", "same"),
    )
    batches: str = setting(
        "shared",
        "order of a client's samples: one for all K models, or one of its own for each",
        choices=("shared", "own"),
    )
    personal_head: bool = setting(False, "keep the classifier heads on the clients; only the body is aggregated")

    personal_statistics: bool = setting(False, "keep BatchNorm's running statistics on the clients")

    def personal(self, network: Architecture) -> tuple[str, ...]:
        """Keep the heads of the K models, and BatchNorm's running statistics, if they are personal."""
        statistics = [entry.name for entry in network.layout.entries if not entry.trainable]
        return (*(["head"] if self.personal_head else []), *(statistics if self.personal_statistics else []))

    def reference(self, network: Architecture, sent: NDArrays, reply: NDArrays) -> NDArrays:
        """Return zeros: the updates Δ_i ``(K, d)`` are changes already; the losses ``(K,)`` get no noise."""
        return [np.zeros_like(reply[0])]


class STCHWeights(NamedTuple):
    """Weights of one round: inner w ``(M, K)``, outer α ``(M,)``, objective g."""

    inner: Float64
    outer: Float64
    objective: float


class FedFew(PersonalisedStrategy):
    """Send K models, move each by Σ_i α_i w_ik Δ_ik (Eq. 13 and Algorithm 1, lines 12-16), or by full steps.

    The state holds the K models, the clients' last losses and inner weights ``(M, K)``, and each round's number and
    objective ``(R, 2)``.
    """

    state = ("models", "losses", "weights", "objectives")

    def initialise(self) -> None:
        """Start from K independent initialisations, or from one."""
        distinct = self.method.initialisation == "distinct"
        statistics = self.architecture.layout.select(lambda entry: not entry.trainable)
        self.statistics = self.shared.take(statistics.put(np.zeros(self.size, bool), np.ones(self.size, bool)))
        """Which of the shared entries are BatchNorm's running statistics ``(d,)``."""
        starts = [self.shared.take(self.initial(k if distinct else 0)) for k in range(self.method.models)]
        self.models: FloatArray = np.stack(starts)
        self.losses = np.full((self.num_clients, self.method.models), np.nan)
        self.weights = np.full_like(self.losses, np.nan)
        self.objectives = np.empty((0, 2))
        self.idle = np.zeros(self.method.models, np.int64)
        """For how many rounds each model has been nobody's best, since this process began."""

    def serve(self, client: int) -> NDArrays:
        """Send all K models ``(K, d)``."""
        return [self.models]

    def expected_shapes(self, client: int) -> list[tuple[int, ...]]:
        """Expect the updates Δ_i ``(K, d)`` and the losses L_i ``(K,)``."""
        return [self.models.shape, (len(self.models),)]

    def aggregate(self, server_round: int, updates: list[Update]) -> dict[str, Any]:
        """Weigh the updates and move the K models."""
        losses = np.stack([update.arrays[1] for update in updates]).astype(np.float64)
        n = sample_counts(updates)
        weights = stch_weights(weighted_losses(losses, n) if self.method.weigh_losses else losses, self.method.mu)
        deltas = [update.arrays[0] for update in updates]
        full = self.method.full_steps
        models = server_step(self.models, deltas, weights, self.method.server_lr, full)
        if self.method.server_lr != 1 and self.statistics.any():  # a variance that overshoots is none
            models[:, self.statistics] = server_step(self.models, deltas, weights, 1.0, full)[:, self.statistics]
        self.models = models
        clients = [update.client for update in updates]
        self.losses[clients] = losses
        self.weights[clients] = weights.inner
        self.objectives = np.vstack([self.objectives, [server_round, weights.objective]])
        known = self.losses[~np.isnan(self.losses).any(axis=1)]  # of clients that sat out, those of their last round
        in_use = np.bincount(known.argmin(axis=1), minlength=len(models)) > 0
        self._note_idle(in_use)
        return {
            "objective": weights.objective,
            "inner_entropy": float(entropy(weights.inner).mean()),
            "inner_max": float(weights.inner.max(axis=1).mean()),
            "outer_cv": float(weights.outer.std() / weights.outer.mean()),
            "effective_clients": float(1 / np.square(weights.outer).sum()),
            "models_in_use": int(in_use.sum()),
            "clients_of_model": np.bincount(losses.argmin(axis=1), minlength=len(self.models)).tolist(),
        }

    def _note_idle(self, in_use: npt.NDArray[np.bool_]) -> None:
        """Say it when a model has been nobody's best for long: fewer models would serve the same."""
        self.idle = np.where(in_use, 0, self.idle + 1)
        if (self.idle == IDLE_ROUNDS).any():
            log(
                WARNING,
                "round %s: %s of %s models have had no client with its lowest loss for %s rounds; fewer fedfew-models "
                "would serve the same (docs/results.md)",
                self.record.number,
                int((self.idle >= IDLE_ROUNDS).sum()),
                len(in_use),
                IDLE_ROUNDS,
            )

    def draw(self, folder: Path) -> None:
        """Draw the objective, and which models serve which clients."""
        objectives = [(number, objective) for number, objective in self.objectives.tolist()]
        figures.lines({"g": objectives}, folder / "objective.png", title="STCH-Set objective", ylabel="g")
        figures.heatmaps(
            [
                figures.Panel(self.losses, title="training loss", xlabel="server model", ylabel="client"),
                figures.Panel(self.weights, title="inner weight w_ik", xlabel="server model", ylabel="client"),
            ],
            folder / "models.png",
            title="Clients and server models in their last round",
        )


def weighted_losses(losses: Float64, n: Float64) -> Float64:
    """Return (n_i / Σ_j n_j) L_ik (the paper's footnote 2).

    Parameters
    ----------
    losses : numpy.ndarray, (M, K)
        L_ik, mean training loss of client i with model k.
    n : numpy.ndarray, (M,)
        Numbers of training samples.
    """
    return (n / n.sum())[:, None] * losses


def stch_weights(losses: Float64, mu: float) -> STCHWeights:
    """Return the STCH-Set weights (Eqs. 9, 11 and 12), computed in log space.

    Parameters
    ----------
    losses : numpy.ndarray, (M, K)
        L_ik.
    mu : float
        Smoothing; towards 0 the inner weights become one-hot, towards infinity all weights uniform.
    """
    mu = max(mu, SMALLEST)
    scaled = -np.asarray(losses, np.float64) / mu
    log_s = logsumexp(scaled, axis=1)
    inner = np.exp(scaled - log_s[:, None])
    log_outer = -log_s - logsumexp(-log_s, axis=0)
    return STCHWeights(inner, np.exp(log_outer), float(mu * logsumexp(-log_s, axis=0)))


def server_step(
    models: FloatArray, deltas: list[Any], weights: STCHWeights, server_lr: float, full: bool = False
) -> FloatArray:
    """Return θ_k + η_s Σ_i α_i w_ik Δ_ik (Eq. 13 with Δ in the place of −η∇L).

    All products α_i w_ik sum to 1, so that K models share one step, and the one with most weight learns fastest. With
    ``full`` the products of each model sum to 1, which is not in the paper.

    Parameters
    ----------
    models : numpy.ndarray, float32, (K, d)
        θ.
    deltas : list of M numpy.ndarray, float32, (K, d)
        Δ_i, summed in this order without being stacked.
    """
    result = models.copy()
    products = weights.outer[:, None] * weights.inner
    if full:  # a model whose products are all 0 stays where it is
        products /= np.maximum(products.sum(axis=0), np.finfo(np.float64).tiny)
    for product, delta in zip((server_lr * products).astype(np.float32), deltas, strict=True):
        for k in range(len(models)):
            result[k] += product[k] * delta[k]
    return result


def entropy(rows: Float64) -> Float64:
    """Return −Σ_k w_ik log w_ik ``(M,)``, with 0 log 0 = 0."""
    return -(rows * np.log(rows, out=np.zeros_like(rows), where=rows > 0)).sum(axis=1)


def logsumexp(values: Float64, axis: int) -> Float64:
    """Return log Σ exp along an axis without overflow."""
    top = values.max(axis=axis, keepdims=True)
    total: Float64 = np.log(np.exp(values - top).sum(axis=axis, keepdims=True)) + top
    return total.squeeze(axis)
