"""FedMGDA+ (Hu et al., 2022): the clients' losses as many objectives; the server descends along what lowers them all.

Of the mixes of the clients' updates near FedAvg's, it takes the shortest: one that all objectives agree on.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from posy.models.parameters import FloatArray
from posy.settings import Search, setting
from posy.strategies.base import PersonalisedStrategy
from posy.strategies.method_settings import MethodSettings, Refused
from posy.strategies.replies import Update, gram, mean_of, num_examples, stacked
from posy.strategies.simplex import minimise_on_simplex

Float64 = npt.NDArray[np.float64]


class FedMGDASettings(
    MethodSettings,
    noise=Refused("it weighs the clients by the angles between their updates, which noise makes right angles"),
    sums=Refused("it weighs the clients by the angles between their updates"),
    point="served",
):
    """Settings of FedMGDA+."""

    epsilon: float = setting(
        0.1,
        "how far a client's weight may be from n_i / N: 0 is FedAvg's, 1 any",
        minimum=0,
        maximum=1,
        search=Search(0.01, 1.0, log=True),
    )
    server_lr: float = setting(1.0, "global step size eta", above=0, search=Search(0.1, 10.0, log=True))
    normalise: bool = setting(True, "bring all updates to length 1 first")


class FedMGDA(PersonalisedStrategy):
    """w ← w − η Σ_i λ_i g_i / ||g_i|| with g_i = w − w_i and λ of least norm (Algorithm 1, lines 6-8).

    BatchNorm's running statistics are no parameters; they are averaged as FedAvg does.
    """

    def aggregate(self, server_round: int, updates: list[Update]) -> dict[str, Any]:
        """Descend along the shortest mix of the updates."""
        parameters = self.architecture.layout.trainable
        before = parameters.take(self.model)
        changes, n = before - parameters.take(stacked(updates)), num_examples(updates)
        weights, scale = common_descent(changes, n / n.sum(), self.method.epsilon, self.method.normalise)
        step = (weights / scale).astype(np.float32) @ changes
        self.model = parameters.put(mean_of(updates), before - np.float32(self.method.server_lr) * step)
        return {"smallest_weight": float(weights.min()), "largest_weight": float(weights.max())}


def common_descent(changes: FloatArray, centre: Float64, epsilon: float, normalise: bool) -> tuple[Float64, Float64]:
    """Return λ ``(M,)``, which minimises ||Σ_i λ_i g_i / s_i||², and s ``(M,)`` (Algorithm 1, line 6).

    Parameters
    ----------
    changes : numpy.ndarray, float32, (M, d)
        g_i.
    centre : numpy.ndarray, (M,)
        λ_0 = n_i / N, from which each λ_i is at most epsilon away.
    epsilon : float
        0 leaves no choice, 1 every one.
    normalise : bool
        Whether s_i is ||g_i||, or 1.
    """
    products = gram(changes)
    lengths = np.sqrt(np.diag(products))
    scale = np.where(lengths > 0, lengths, 1.0) if normalise else np.ones(len(lengths))
    return minimise_on_simplex(products / np.outer(scale, scale), centre, epsilon), scale
