"""pFedMe (Dinh et al., 2020): personal models near a global one, which follows their Moreau envelopes.

The learning rate of the run is the paper's eta. Clients count by their samples, not all alike as in the paper.
``served`` reports the global model w, ``local`` the personal one.
"""

from typing import Any

from posy.models.parameters import FloatArray
from posy.settings import Search, setting
from posy.strategies.base import PersonalisedStrategy
from posy.strategies.method_settings import ALLOWED, MethodSettings
from posy.strategies.replies import Update, mean_of


class PFedMeSettings(MethodSettings, noise=ALLOWED, sums=ALLOWED):
    """Settings of pFedMe."""

    strength: float = setting(
        15.0, "lambda: strength of the pull of the personal model", above=0, search=Search(1.0, 50.0, log=True)
    )
    steps: int = setting(5, "K: steps that find the personal model, for each mini-batch", minimum=1)
    personal_lr: float = setting(0.09, "learning rate of these steps", above=0, search=Search(0.005, 0.2, log=True))
    beta: float = setting(1.0, "beta: how far the server goes from its model to the clients' mean", above=0)


class PFedMe(PersonalisedStrategy):
    """Go from the model to the clients' mean, or beyond it (Algorithm 1)."""

    def aggregate(self, server_round: int, updates: list[Update]) -> dict[str, Any]:
        """Change the model; BatchNorm's running statistics, which may not be negative, are the clients' mean."""
        mean, parameters = mean_of(updates), self.architecture.layout.trainable
        moved = relaxed(parameters.take(self.model), parameters.take(mean), self.method.beta)
        self.model = parameters.put(mean, moved)
        return {}


def relaxed(before: FloatArray, mean: FloatArray, beta: float) -> FloatArray:
    """Return (1 - β) w + β Σ_i (n_i / n) w_i ``(d,)``.

    Parameters
    ----------
    before, mean : numpy.ndarray, float32, (d,)
        The server's model w, and the mean of the clients'.
    """
    return (1 - beta) * before + beta * mean
