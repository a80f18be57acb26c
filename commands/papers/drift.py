"""FedDRM's Figure 3: the drift between the clients' gradients of the class loss and of the client loss.

The paper specifies only a classification task with 10 classes, 3 clients, a randomly generated embedding and FedAvg
(Section 2.4). Posy chooses the other parameters: dimension, number of samples, learning rate and number of local
steps. Client i's embeddings are drawn from N(m_i, I), where m_i is drawn from N(0, I / 4). The labels of all clients
are drawn from the same multinomial logistic model (Eq. 1), so the clients differ only by covariate shift.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.special import softmax

Array = npt.NDArray[np.float64]

CLIENTS, CLASSES, DIMENSION, SAMPLES = 3, 10, 32, 500
ROUNDS, STEPS, RATE = 50, 10, 0.1


class Drift(NamedTuple):
    """Gradient drift of a loss in each round, evaluated at the server's model.

    ``drift`` is G in the paper's footnote 1. ``relative_drift`` is G^2 as a share of the clients' mean squared
    gradient, G^2 / sum_i (n_i / N) ||grad l_i||^2: 0 if all gradients are equal, 1 if their mean vanishes.
    """

    drift: Array
    relative_drift: Array


def simulate(seed: int, rounds: int = ROUNDS) -> dict[str, Drift]:
    """Train both heads with FedAvg on fixed embeddings, and return the drift of the losses ``class`` and ``client``."""
    rng = np.random.default_rng(seed)
    truth = rng.normal(size=(CLASSES, DIMENSION))
    means = 0.5 * rng.normal(size=(CLIENTS, 1, DIMENSION))
    x = means + rng.normal(size=(CLIENTS, SAMPLES, DIMENSION))
    gumbel = rng.gumbel(size=(CLIENTS, SAMPLES, CLASSES))
    classes = (x @ truth.T + gumbel).argmax(axis=-1)  # the Gumbel-max trick: a draw from the softmax
    clients = np.repeat(np.arange(CLIENTS)[:, None], SAMPLES, axis=1)
    return {
        "class": _over_rounds(x, classes, CLASSES, rounds),
        "client": _over_rounds(x, clients, CLIENTS, rounds),
    }


def head_gradient(weights: Array, x: Array, y: npt.NDArray[np.int64]) -> Array:
    """Return the gradient ``(K, d)`` of the mean cross-entropy of a linear head ``(K, d)`` on ``x`` ``(n, d)``."""
    residuals = softmax(x @ weights.T, axis=1)
    residuals[np.arange(len(y)), y] -= 1.0
    return residuals.T @ x / len(y)


def squared_drift(gradients: Array, shares: Array) -> tuple[float, float]:
    """Return G^2 of gradients ``(m, ...)`` weighted by ``shares`` ``(m,)``, and their mean squared norm."""
    flat = gradients.reshape(len(gradients), -1)
    mean = shares @ flat
    return float(shares @ ((flat - mean) ** 2).sum(axis=1)), float(shares @ (flat**2).sum(axis=1))


def _over_rounds(x: Array, y: npt.NDArray[np.int64], outputs: int, rounds: int) -> Drift:
    """Train a head with ``outputs`` output units by FedAvg, and return its drift at the start of each round."""
    server = np.zeros((outputs, x.shape[-1]))
    shares = np.full(len(x), 1 / len(x))
    squares = np.empty((rounds, 2))
    for number in range(rounds):
        squares[number] = squared_drift(
            np.stack([head_gradient(server, *samples) for samples in zip(x, y, strict=True)]), shares
        )
        models = []
        for samples in zip(x, y, strict=True):
            model = server
            for _ in range(STEPS):
                model = model - RATE * head_gradient(model, *samples)
            models.append(model)
        server = np.tensordot(shares, np.stack(models), axes=1)
    return Drift(np.sqrt(squares[:, 0]), squares[:, 0] / squares[:, 1])
