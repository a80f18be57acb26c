"""SCAFFOLD (Karimireddy et al., 2020): control variates correct the drift of the clients.

Clients step along their gradient + c − c_i (Eq. 3); c_i estimates the gradient of client i, and c that of all. Both
are those of option II (Eq. 4), from the distance that a client has come: with `momentum` that is farther than the
gradients reach, so c_i is as much larger than they are, and with `weight-decay` it holds the decay too.

The paper's means count all clients alike. Here both are weighted by n_i, as the objective is: c stays Σ_i n_i c_i / N,
with N the samples of all clients that can be reached.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from flwr.common.typing import NDArrays

from posy.models.architecture import Architecture
from posy.models.parameters import FloatArray
from posy.settings import Search, setting
from posy.strategies.base import PersonalisedStrategy
from posy.strategies.method_settings import ALLOWED, MethodSettings, Refused
from posy.strategies.replies import Update, num_examples, stacked, weighted_mean


class SCAFFOLDSettings(
    MethodSettings,
    noise=Refused("its server adds up the changes of all control variates, and would add up the noise of all rounds"),
    sums=ALLOWED,
    point="served",
):
    """Settings of SCAFFOLD."""

    server_lr: float = setting(
        1.0, "eta_g: the server's step along the mean change of the model", above=0, search=Search(0.3, 1.5, log=True)
    )

    def refusals(self) -> Mapping[str, str]:
        """Refuse optimisers other than SGD."""
        return {"optimizer": "the control variates are distances divided by the rate and the steps, as SGD makes them"}

    def reference(self, network: Architecture, sent: NDArrays, reply: NDArrays) -> NDArrays:
        """Return the model that was sent; the second array is a change already."""
        return [sent[0], np.zeros_like(sent[1])]


class SCAFFOLD(PersonalisedStrategy):
    """Send the model x and the control variate c; average both changes (Eq. 5)."""

    state = ("model", "control")

    def initialise(self) -> None:
        """Start from the initial model, and from c = 0."""
        super().initialise()
        self.control: FloatArray = np.zeros_like(self.model)

    def serve(self, client: int) -> NDArrays:
        """Send x and c, both ``(d,)``."""
        return [self.model, self.control]

    def aggregate(self, server_round: int, updates: list[Update]) -> dict[str, Any]:
        """Move x along the models' mean change, and c along that of the variates, by the share of all samples here."""
        n = num_examples(updates)
        total = max(n.sum(), sum(map(self.weight, self.clients)))
        self.model = moved(self.model, weighted_mean(stacked(updates), n), self.method.server_lr)
        self.control = self.control + np.float32(n.sum() / total) * weighted_mean(stacked(updates, 1), n)
        return {"control_norm": float(np.linalg.norm(self.control))}


def moved(model: FloatArray, mean: FloatArray, rate: float) -> FloatArray:
    """Return x + η (y − x), the mean y itself at η = 1."""
    return mean if rate == 1 else (model + np.float32(rate) * (mean - model)).astype(np.float32)
