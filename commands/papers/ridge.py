"""PPFE's Figure 3: test error of PPFE, local training and FedAvg on linear regression (Section 6.1).

A linear model has no layers to personalise one by one. Here a model is a shared part plus a personal deviation. The
ridge penalty on the deviation is the complexity parameter alpha_t, which decreases from stage to stage: stage 1 is
FedAvg, and the last stage is nearly local training. Each stage fits y itself on reweighted samples, so the members'
mean, weighted by beta, replaces the sum in Eq. 8.

The paper states only the four stages, K, and, for Figure 3b, n. Posy chooses the dimension, the covariances, all
variances, r_p and n of Figure 3a, the grid of penalties, and alpha_t. The true weights are known, so Posy computes
expected errors without test samples.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

CLIENTS, RATIOS = (20, 50, 100, 200), (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
"""Values of K in Figure 3a and of r_p in Figure 3b."""
USUAL_CLIENTS, USUAL_RATIO = 100, 0.5
"""K of Figure 3b and r_p of Figure 3a."""
DIMENSION, SAMPLES, VALIDATION, NOISE = 40, 200, 0.2, 0.25
"""d, n, the share of n for validation, and the variance of the noise.

The components of the shared and personal weights have variance 1 / d, so that a client's signal has a variance of
about 1 if r_p is 0 or 1."""
PENALTIES = tuple(10.0**power for power in range(-2, 4))
COMPLEXITIES = (1.0, 0.1, 0.01)
"""alpha_t of stages 2 to 4; stage 1 has no personal part."""


class Federation(NamedTuple):
    """Clients' samples ``x`` ``(K, n, d)`` and ``y`` ``(K, n)``, true weights ``(K, d)``, covariances ``(K, d, d)``."""

    x: Array
    y: Array
    truth: Array
    covariances: Array
    noise: float
    """Variance of the noise."""


class Errors(NamedTuple):
    """Expected squared error on a new sample, averaged over the clients."""

    ppfe: float
    local: float
    fedavg: float
    local_one_penalty: float
    """Local training with the same penalty for all clients."""


def simulate(
    seed: int, clients: int = USUAL_CLIENTS, ratio: float | None = USUAL_RATIO, noise: float = NOISE
) -> Errors:
    """Return the error of each method with the penalty that has the lowest error on the validation samples.

    If ``ratio`` is None, each client draws its own ratio from U(0, 1). In local training, each client chooses its own
    penalty. PPFE and FedAvg each use one penalty for all clients, the one with the lowest mean error. Training never
    uses the validation samples.
    """
    federation = draw_federation(seed, clients, ratio, noise)
    num_validation = round(VALIDATION * SAMPLES)
    validation_x, x = np.split(federation.x, [num_validation], axis=1)
    validation_y, y = np.split(federation.y, [num_validation], axis=1)

    def chosen(candidates: Sequence[Array]) -> Array:
        return min(candidates, key=lambda weights: float(squares(validation_x, validation_y, weights).mean()))

    gram, moment = moments(x, y)
    local_weights = np.stack([ridge(gram, moment, penalty) for penalty in PENALTIES])
    validation_errors = np.stack(
        [squares(validation_x, validation_y, weights).mean(axis=1) for weights in local_weights]
    )
    local = local_weights[validation_errors.argmin(axis=0), np.arange(clients)]
    fedavg = chosen([average(weights) for weights in local_weights])
    ppfe = chosen([ensemble(x, y, fedavg, [alpha * penalty for alpha in COMPLEXITIES]) for penalty in PENALTIES])
    return Errors(
        *(expected_error(federation, weights) for weights in (ppfe, local, fedavg, chosen(list(local_weights))))
    )


def draw_federation(seed: int, clients: int, ratio: float | None, noise: float = NOISE) -> Federation:
    """Draw clients by Eqs. 15 and 16.

    The covariances are drawn from a Wishart distribution with 2 d degrees of freedom, whose mean is the identity
    matrix. For the same seed, the inputs and the shared and personal weights are the same for every ``ratio``.
    """
    rng = np.random.default_rng(seed)
    shared = rng.normal(size=DIMENSION) / np.sqrt(DIMENSION)
    personal = rng.normal(size=(clients, DIMENSION)) / np.sqrt(DIMENSION)
    ratios = rng.uniform(size=(clients, 1))
    if ratio is not None:
        ratios = np.full((clients, 1), ratio)
    truth = (1 - ratios) * shared + ratios * personal
    factors = rng.normal(size=(clients, DIMENSION, 2 * DIMENSION)) / np.sqrt(2 * DIMENSION)
    covariances = factors @ factors.swapaxes(1, 2)
    x = rng.normal(size=(clients, SAMPLES, DIMENSION)) @ np.linalg.cholesky(covariances).swapaxes(1, 2)
    y = np.einsum("knd,kd->kn", x, truth) + np.sqrt(noise) * rng.normal(size=(clients, SAMPLES))
    return Federation(x, y, truth, covariances, noise)


def expected_error(federation: Federation, weights: Array) -> float:
    """Return the clients' mean squared error with ``weights`` ``(K, d)`` on infinitely many new samples."""
    deviation = weights - federation.truth
    return float(federation.noise + np.einsum("kd,kde,ke->k", deviation, federation.covariances, deviation).mean())


def squares(x: Array, y: Array, weights: Array) -> Array:
    """Return the squared errors ``(K, n)`` of ``weights`` ``(K, d)``."""
    return (y - (x @ weights[:, :, None])[:, :, 0]) ** 2


def moments(x: Array, y: Array, importance: Array | None = None) -> tuple[Array, Array]:
    """Return ``G_k = sum_i omega_i x_i x_i' / n`` ``(K, d, d)`` and ``b_k = sum_i omega_i x_i y_i / n`` ``(K, d)``."""
    weighted = (x if importance is None else x * importance[:, :, None]).swapaxes(1, 2) / x.shape[1]
    return weighted @ x, (weighted @ y[:, :, None])[:, :, 0]


def ridge(gram: Array, moment: Array, penalty: float) -> Array:
    """Return each client's weights ``(K, d)``, which minimise the mean squared error plus ``penalty ||w||^2``.

    Without a penalty, return the least-squares solution of minimum norm.
    """
    return np.einsum("kde,ke->kd", _inverse(gram, penalty), moment)


def average(weights: Array) -> Array:
    """Return FedAvg's model for each client ``(K, d)``: the mean of all clients' weights."""
    return np.broadcast_to(weights.mean(axis=0), weights.shape)


def personalise(gram: Array, moment: Array, penalty: float) -> Array:
    """Return the clients' weights ``(K, d)`` that minimise Eq. 6.

    ``penalty`` is the coefficient of the weights' deviation from the shared weights, which are the mean of the clients'
    weights. Rounds of exact local training and averaging converge to these shared weights.
    """
    inverse = _inverse(gram, penalty)
    solutions, shrinkage = np.einsum("kde,ke->kd", inverse, moment), inverse @ gram
    # Given the shared weights s, a client's weights are s + (G + penalty I)^-1 (b - G s).
    # Their mean over the clients is s.
    shared = np.linalg.lstsq(shrinkage.sum(axis=0), solutions.sum(axis=0), rcond=None)[0]
    return shared + solutions - shrinkage @ shared


def reweight(losses: Array, importance: Array) -> tuple[Array, Array]:
    """Return beta ``(K,)`` and new sample weights ``(K, n)``: Algorithm 1, Reweight, with losses in [0, 1].

    This is :func:`posy.client_app.ppfe.reweight` for all clients at once, except that epsilon is clipped to (0, 1/2),
    so that each beta is finite and positive.
    """
    error = np.clip((importance * losses).sum(axis=1) / importance.sum(axis=1), 1e-6, 0.5 - 1e-6)
    beta = 0.5 * np.log((1 - error) / error)
    new = importance * np.exp(beta[:, None] * losses)
    return beta, new * (new.shape[1] / new.sum(axis=1, keepdims=True))


def ensemble(x: Array, y: Array, fedavg: Array, penalties: Sequence[float]) -> Array:
    """Return PPFE's ensemble ``(K, d)``, with ``fedavg`` ``(K, d)`` as stage 1 and one later stage per penalty.

    The maximum of the loss in Algorithm 1 is a client's largest y^2, the same number for all stages. Larger squared
    errors are capped at this maximum, so beta measures the accuracy of all stages on the same scale. The coefficient of
    a stage depends on the error of the ensemble including this stage (line 21). To compute this error, the stage is
    assigned the coefficient that corresponds to its own error, as in Posy's PPFE.
    """
    bound = (y**2).max(axis=1, keepdims=True)

    def losses(weights: Array) -> Array:
        return np.minimum(squares(x, y, weights) / bound, 1.0)

    importance = np.ones_like(y)
    members, betas = [fedavg], []
    beta, importance = reweight(losses(fedavg), importance)
    betas.append(beta)
    for penalty in penalties:
        gram, moment = moments(x, y, importance)
        members.append(personalise(gram, moment, penalty))
        single_beta, _ = reweight(losses(members[-1]), importance)
        beta, importance = reweight(losses(_combined(members, [*betas, single_beta])), importance)
        betas.append(beta)
    return _combined(members, betas)


def _combined(members: Sequence[Array], betas: Sequence[Array]) -> Array:
    """Return the mean ``(K, d)`` of members ``(K, d)``, weighted by the clients' betas ``(K,)``."""
    shares = np.stack(betas) / np.sum(betas, axis=0)
    return np.einsum("tk,tkd->kd", shares, np.stack(members))


def _inverse(gram: Array, penalty: float) -> Array:
    """Return ``(G_k + penalty I)^-1`` ``(K, d, d)``, or, without a penalty, the pseudoinverse, which always exists."""
    if penalty == 0:
        return np.asarray(np.linalg.pinv(gram, hermitian=True), np.float64)
    return np.asarray(np.linalg.inv(gram + penalty * np.eye(gram.shape[-1])), np.float64)
