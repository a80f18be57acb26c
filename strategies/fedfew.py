"""FedFew: K server models for M clients, trained by smooth Tchebycheff set scalarisation (STCH-Set).

"Few-for-Many Personalized Federated Learning", arXiv:2603.11992. Every client trains all K models and reports a loss
for each. The server weights the updates by these losses. Each client uses the model with the lowest training loss.
"""

from collections.abc import Mapping
from logging import WARNING
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
from flwr.common.logger import log

from posy.models.architecture import Architecture
from posy.models.parameters import FloatArray
from posy.settings import Search, setting
from posy.strategies.arrays import model, numbers, reply
from posy.strategies.base import PersonalisedStrategy
from posy.strategies.card import MethodCard, Paper, Program
from posy.strategies.replies import Update, sample_counts
from posy.strategies.settings import MethodSettings

if TYPE_CHECKING:
    from posy.strategies.settings import Settings

Float64 = npt.NDArray[np.float64]
IDLE_ROUNDS = 10
"""Number of rounds after which Posy warns about a model that has not had the lowest loss on any client."""
SMALLEST = 1e-30
"""Lower bound on the smoothing parameter, at which weights are one-hot; below it, scaled losses might overflow."""

SINGLE_REPLIES = "it weights a client's updates by the client's losses, so the server needs individual replies"


class FedFewSettings(
    MethodSettings, robust="its server weights updates by the losses that the clients report", point="served"
):
    """Settings of FedFew."""

    sent = ("models",)
    returned = reply(
        models=model(change_of="models", is_change=True, noise=True, sums=SINGLE_REPLIES),
        losses=numbers(
            "models",
            noise="its clients send the K training losses, which determine the weights of updates, without noise",
            sums=SINGLE_REPLIES,
        ),
    )

    models: int = setting(
        3,
        "K: number of server models",
        minimum=1,
        maximum=1000,
        source="Appendix B.1; the authors' option --num_server_models defaults to 5",
    )
    mu: float = setting(
        0.01,
        "smoothing parameter of STCH-Set",
        above=0,
        search=Search(0.001, 1.0, log=True),
        source="Appendix B.1; the authors' option --smooth_mu",
    )
    server_lr: float = setting(
        1.0,
        "server step size eta_s",
        above=0,
        search=Search(0.5, 5.0, log=True),
        source="the authors' serverfedfews.py adds the weighted differences with factor 1",
    )
    full_steps: bool = setting(
        True,
        "divide each model's step by the sum of its weights, so all K models take full steps; false: as in the paper",
        earlier=False,
        source="choice: with the paper's steps most clients end up with the same model (docs/benchmarks/choices.md)",
    )
    weigh_losses: bool = setting(
        True, "multiply each client's losses by n_i / N before computing weights", source="footnote 2 of Section 4.1"
    )
    initialisation: str = setting(
        "distinct",
        "initial models from K independent seeds or one seed; with `same` and shared batches, the K models stay equal",
        choices=("distinct", "same"),
        source="choice: Algorithm 1 takes K initial models Θ(0); the authors' program copies one",
    )
    batches: str = setting(
        "shared",
        "order of a client's samples: the same for all K models, or a different order for each",
        choices=("shared", "own"),
        source="choice: cheaper, and distinct initial models diverge anyway; the authors' program shuffles for each "
        "model",
    )
    personal_head: bool = setting(
        False,
        "keep the classifier heads on the clients, and aggregate only the body",
        source="the authors' option --use_rep_mode, off by default",
    )
    personal_statistics: bool = setting(
        False,
        "keep BatchNorm's running statistics on the clients",
        source="choice: averaged, as in FedAvg; the authors' program aggregates parameters only",
    )

    card = MethodCard(
        paper=Paper(
            "Guo et al.",
            2026,
            "Few-for-Many Personalized Federated Learning",
            "arXiv",
            "https://arxiv.org/abs/2603.11992",
        ),
        equations=(
            "θ_ik ← θ_k − η ∇L_i(θ_k) for E local epochs, for each of the K models (Algorithm 1, lines 3–11)",
            "L_ik ← (n_i / Σ_j n_j) L_ik (footnote 2)",
            "w_ik = exp(−L_ik / μ) / S_i with S_i = Σ_k exp(−L_ik / μ) (Eq. 12)",
            "α_i = S_i⁻¹ / Σ_j S_j⁻¹ (Eq. 11)",
            "θ_k ← θ_k + η_s Σ_i α_i w_ik Δ_ik; Δ_ik = θ_ik − θ_k replaces −η g_ik (Eq. 13; Algorithm 1, line 15)",
            "g = μ log Σ_i S_i⁻¹, the objective, which Posy records in every round (Eq. 9)",
            "k_i = argmin_k L_i(θ_k) over the training samples (Algorithm 1, lines 19–24)",
        ),
        sent={"models (K, d)": "the K models θ_k"},
        returned={
            "models (K, d)": "Δ_ik, the trained models minus the models that the client received",
            "losses (K,)": "L_ik, mean training loss of each model over the last local epoch",
        },
        reveals="K updates and K training losses, and thus which models suit the client",
        server_state={
            "models": "the K models (K, d)",
            "losses": "last training losses of each client, for figures (M, K)",
            "weights": "last inner weights w_ik of each client, for figures (M, K)",
            "objectives": "round and objective g, for figures (R, 2)",
        },
        client_state={"personal": "heads or BatchNorm statistics of the K models, if they are personal (K, d_p)"},
        scored="The served model k_i, because Algorithm 1 selects it after the last broadcast (lines 19–24). The "
        "authors' program scores the selected model after local training instead. Compare the program's results "
        "with the column `local`.",
        deviations=(
            "`fedfew-full-steps=true` divides the step of each model by Σ_i α_i w_ik. In the paper these sums add up "
            "to 1 over all models, so the K models share one step. As a result, most clients end up with the same "
            "model. On 3,000 images of CIFAR-10 with Dir(0.1), one model reaches a served accuracy of 22.4 %. Three "
            "models reach 23.4 % with the paper's steps and 34.0 % with full steps (docs/benchmarks/choices.md). "
            "`fedfew-full-steps=false` selects the paper's steps.",
            "Each model is initialised with its own seed. The authors' program copies one model K times and shuffles "
            "the samples for each model: `fedfew-initialisation=same fedfew-batches=own`, which the settings of the "
            "paper's experiments select.",
            "The server scales the steps of the parameters by `fedfew-server-lr`, but not the steps of BatchNorm's "
            "running statistics, because an extrapolated variance can be negative. The authors' program keeps the "
            "statistics on the clients (`fedfew-personal-statistics=true`).",
            "With partial participation the weights cover the clients of the round, as in the authors' program.",
            "The local model is the model with the lowest mean loss during the last local epoch. The authors' program "
            "evaluates the K trained models again.",
        ),
        program=Program(
            "pgg3/FedFew",
            "1b29dec70b66d89b956d90e0da024897f698897a",
            "PFLlib/system/flcore/servers/serverfedfews.py, FedFewS.train",
            3e-7,
        ),
    )

    def refusals(self) -> Mapping[str, str]:
        """Reject ``client-weights``, because the losses determine the weights."""
        return {"client-weights": "the clients' losses determine the weights, see fedfew-weigh-losses"}

    def notices(self, settings: "Settings", network: Architecture) -> tuple[str, ...]:
        """Warn if all K models would stay equal, or if the network has no statistics to keep on the clients."""
        warnings = []
        if self.models > 1 and self.initialisation == "same" and self.batches == "shared":
            warnings.append(
                "fedfew-initialisation = 'same' with fedfew-batches = 'shared': all models stay equal, so "
                f"fedfew-models = {self.models} has the same effect as 1; set fedfew-batches = 'own'"
            )
        if self.personal_statistics and all(entry.trainable for entry in network.layout.entries):
            warnings.append(
                f"fedfew-personal-statistics = true has no effect: model = {network.model!r} has no running statistics"
            )
        return tuple(warnings)

    def personal(self, network: Architecture) -> tuple[str, ...]:
        """Keep the K models' heads and BatchNorm's running statistics on the client, if they are personal."""
        statistics = [entry.name for entry in network.layout.entries if not entry.trainable]
        return (*(["head"] if self.personal_head else []), *(statistics if self.personal_statistics else []))


class STCHWeights(NamedTuple):
    """The inner weights w ``(M, K)``, the outer weights α ``(M,)`` and the objective g of one round."""

    inner: Float64
    outer: Float64
    objective: float


class FedFew(PersonalisedStrategy):
    """Send K models, and move each by Σ_i α_i w_ik Δ_ik (Eq. 13 and Algorithm 1, lines 12-16) or by full steps.

    The state holds the K models, the clients' last losses and inner weights ``(M, K)``, and each round's number and
    objective ``(R, 2)``.
    """

    state = ("models", "losses", "weights", "objectives")
    method: FedFewSettings

    def initialise(self) -> None:
        """Start from K independent initialisations, or from one."""
        distinct = self.method.initialisation == "distinct"
        statistics = self.architecture.layout.select(lambda entry: not entry.trainable)
        self.statistics = self.shared.take(statistics.put(np.zeros(self.size, bool), np.ones(self.size, bool)))
        """Mask of the shared entries that are BatchNorm's running statistics ``(d,)``."""
        starts = [self.shared.take(self.initial(k if distinct else 0)) for k in range(self.method.models)]
        self.models: FloatArray = np.stack(starts)
        self.losses = np.full((self.num_clients, self.method.models), np.nan)
        self.weights = np.full_like(self.losses, np.nan)
        self.objectives = np.empty((0, 2))
        self.idle = np.zeros(self.method.models, np.int64)
        """Number of rounds, within this process, since each model last had the lowest loss on any client ``(K,)``."""

    def mean_weights(self, updates: list[Update]) -> Float64:
        """Return equal weights, because :meth:`aggregate` limits the outer weights itself."""
        return np.ones(len(updates))

    def aggregate(self, server_round: int, updates: list[Update]) -> dict[str, Any]:
        """Weight the updates, and move the K models."""
        losses = np.stack([update.arrays["losses"] for update in updates]).astype(np.float64)
        n = sample_counts(updates)
        weights = stch_weights(weighted_losses(losses, n) if self.method.weigh_losses else losses, self.method.mu)
        if (largest := self.influence.largest_share(len(updates))) < 1:
            self.influence.note("down_weighted", [update.client for update in updates], weights.outer > largest)
            weights = weights._replace(outer=np.minimum(weights.outer, largest))
        deltas = [update.arrays["models"] for update in updates]
        full = self.method.full_steps
        models = server_step(self.models, deltas, weights, self.method.server_lr, full)
        if self.method.server_lr != 1 and self.statistics.any():  # an extrapolated variance can be negative
            models[:, self.statistics] = server_step(self.models, deltas, weights, 1.0, full)[:, self.statistics]
        self.models = models
        clients = [update.client for update in updates]
        self.losses[clients] = losses
        self.weights[clients] = weights.inner
        self.objectives = np.vstack([self.objectives, [server_round, weights.objective]])
        latest = self.losses[~np.isnan(self.losses).any(axis=1)]  # for absent clients, the losses of their last round
        in_use = np.bincount(latest.argmin(axis=1), minlength=len(models)) > 0
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
        """Warn about models that no client has used for ten rounds, because fewer models would give the same result."""
        self.idle = np.where(in_use, 0, self.idle + 1)
        if (self.idle == IDLE_ROUNDS).any():
            log(
                WARNING,
                "round %s: %s of %s models have not had the lowest loss on any client for %s rounds; a smaller "
                "fedfew-models would give the same result (docs/benchmarks/choices.md)",
                self.record.number,
                int((self.idle >= IDLE_ROUNDS).sum()),
                len(in_use),
                IDLE_ROUNDS,
            )


def weighted_losses(losses: Float64, n: Float64) -> Float64:
    """Return (n_i / Σ_j n_j) L_ik (the paper's footnote 2).

    Parameters
    ----------
    losses : numpy.ndarray, (M, K)
        L_ik, mean training loss of client i with model k.
    n : numpy.ndarray, (M,)
        Number of training samples of each client.
    """
    return (n / n.sum())[:, None] * losses


def stch_weights(losses: Float64, mu: float) -> STCHWeights:
    """Return the STCH-Set weights (Eqs. 9, 11 and 12), computed in log space.

    Parameters
    ----------
    losses : numpy.ndarray, (M, K)
        L_ik.
    mu : float
        Smoothing parameter: near 0, the inner weights become one-hot; as it grows, all weights become uniform.
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
    """Return θ_k + η_s Σ_i α_i w_ik Δ_ik (Eq. 13 with Δ instead of −η∇L).

    The products α_i w_ik sum to 1 over all i and k. The K models therefore share one step, and the model with the
    largest weights learns fastest. ``full`` divides each model's products by their sum, which is not in the paper.

    Parameters
    ----------
    models : numpy.ndarray, float32, (K, d)
        θ.
    deltas : list of M numpy.ndarray, float32, (K, d)
        Δ_i, summed in this order without being stacked.
    """
    result = models.copy()
    products = weights.outer[:, None] * weights.inner
    if full:  # a model whose products are all 0 does not move
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
