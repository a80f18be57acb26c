"""FedMGDA+ (Hu et al., 2022): each client's loss is an objective, and the server steps in a common descent direction.

The server moves along the shortest mixture of the clients' updates whose weights are close to FedAvg's.
"""

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from posy.models.parameters import FloatArray
from posy.settings import Search, setting
from posy.strategies.arrays import model, reply
from posy.strategies.base import PersonalisedStrategy
from posy.strategies.card import MethodCard, Paper, Program
from posy.strategies.replies import Update, gram, num_examples, stacked
from posy.strategies.settings import MethodSettings
from posy.strategies.simplex import minimise_on_simplex

if TYPE_CHECKING:
    from posy.models.architecture import Architecture
    from posy.strategies.settings import Settings

Float64 = npt.NDArray[np.float64]
STAIR = 100
"""Number of rounds between decreases of eta (Section 6.1)."""


class FedMGDASettings(MethodSettings, robust="its server weights updates by the angles between them", point="served"):
    """Settings of FedMGDA+."""

    returned = reply(
        model=model(
            noise="it weights the clients by the angles between their updates, and noise makes updates orthogonal",
            sums="it weights the clients by the angles between their updates",
        )
    )

    card = MethodCard(
        paper=Paper(
            "Hu et al.",
            2022,
            "Federated Learning Meets Multi-Objective Optimization",
            "IEEE Transactions on Network Science and Engineering",
            "https://arxiv.org/abs/2006.11489",
        ),
        equations=(
            "g_i = (w − w_i) / ||w − w_i|| (Algorithm 1, line 5)",
            "λ minimises ||Σ_i λ_i g_i||² over the simplex with |λ_i − λ_i⁰| ≤ ε (Algorithm 1, line 6)",
            "w ← w − η_t Σ_i λ_i g_i (Algorithm 1, line 9)",
            "η_t = η · decay^(100 ⌊t / 100⌋ / T) in round t of T (Section 6.1)",
        ),
        sent={"model (d,)": "the server's model w"},
        returned={"model (d,)": "the trained model w_i"},
        reveals="the client's model, and thus which updates conflict",
        server_state={"model": "the server's model w (d,)"},
        client_state={},
        scored="The served model, because the paper scores the server's model on each client's test samples.",
        deviations=(
            "λ⁰ is n_i / N by default, or uniform with `client-weights=uniform`.",
            "An update of length 0 is not normalised.",
            "Lengths and inner products exclude BatchNorm's running statistics, which are averaged as in FedAvg.",
        ),
        program=Program(
            "WwZzz/easyFL",
            "ea07f1d082efacca2eff27ee401a7ab4ec604825",
            "flgo/algorithm/fedmgda.py: Server.aggregate",
            1e-6,
            by_authors=False,
        ),
    )
    epsilon: float = setting(
        0.1,
        "maximum distance of a client's weight from n_i / N; 0 gives FedAvg's weights, 1 allows any weights",
        source="easyFL's default; the paper tunes it",
        minimum=0,
        maximum=1,
        search=Search(0.01, 1.0, log=True),
    )
    server_lr: float = setting(
        1.0,
        "global step size eta",
        source="easyFL's default, one of the four values that the paper tries (Table 5)",
        above=0,
        search=Search(0.1, 10.0, log=True),
    )
    decay: float = setting(
        1.0,
        "factor by which eta is multiplied over the whole run, in steps every 100 rounds; 1: constant eta",
        source="choice: 1 is one of the values that the paper tries (Table 5)",
        needs="num-server-rounds > 99",
        above=0,
        maximum=1,
    )
    normalise: bool = setting(
        True, "divide each update by its length before mixing", source="Algorithm 1, line 5: the `+` in FedMGDA+"
    )

    @property
    def follows_number_of_rounds(self) -> bool:
        """Whether eta depends on the number of rounds."""
        return self.decay < 1

    def notices(self, settings: "Settings", network: "Architecture") -> tuple[str, ...]:
        """Warn if the settings reduce the method to FedAvg."""
        if self.epsilon or self.normalise or self.server_lr != 1 or self.decay != 1:
            return ()
        return (
            "with fedmgda-epsilon = 0, fedmgda-normalise = false and constant steps of 1, the run is equivalent to "
            "FedAvg",
        )


class FedMGDA(PersonalisedStrategy):
    """Step by −η_t Σ_i λ_i g_i / ||g_i||, with g_i = w − w_i and λ minimising the norm (Algorithm 1, lines 5-9)."""

    method: FedMGDASettings

    def aggregate(self, server_round: int, updates: list[Update]) -> dict[str, Any]:
        """Descend along the shortest mixture of the updates."""
        parameters = self.architecture.layout.trainable
        before = parameters.take(self.model)
        changes, n = before - parameters.take(stacked(updates)), num_examples(updates)
        weights, scale = common_descent(changes, n / n.sum(), self.method.epsilon, self.method.normalise)
        step = (weights / scale).astype(np.float32) @ changes
        rate = step_size(self.method.server_lr, self.method.decay, server_round, self.settings.run.num_server_rounds)
        self.model = parameters.put(self.model.copy(), before - np.float32(rate) * step)
        return {"smallest_weight": float(weights.min()), "largest_weight": float(weights.max())}


def step_size(eta: float, decay: float, server_round: int, rounds: int) -> float:
    """Return η_t = η · decay^(100 ⌊t / 100⌋ / T) for round t of T, counted from 1."""
    return eta * float(decay ** (STAIR * (server_round // STAIR) / rounds))


def common_descent(changes: FloatArray, centre: Float64, epsilon: float, normalise: bool) -> tuple[Float64, Float64]:
    """Return the weights λ ``(M,)`` that minimise ||Σ_i λ_i g_i / s_i||², and s ``(M,)`` (Algorithm 1, line 6).

    Parameters
    ----------
    changes : numpy.ndarray, float32, (M, d)
        Updates g_i.
    centre : numpy.ndarray, (M,)
        λ⁰, normally n_i / N.
    epsilon : float
        Maximum of |λ_i − λ_i⁰|.
    normalise : bool
        Whether s_i is ||g_i|| instead of 1.
    """
    products = gram(changes)
    lengths = np.sqrt(np.diag(products))
    scale = np.where(lengths > 0, lengths, 1.0) if normalise else np.ones(len(lengths))
    return minimise_on_simplex(products / np.outer(scale, scale), centre, epsilon), scale
