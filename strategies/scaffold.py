"""SCAFFOLD (Karimireddy et al., 2020): control variates correct client drift.

Client i steps along its gradient + c − c_i (Eq. 3). The client's variate c_i estimates this client's gradient, and the
server's variate c estimates the mean gradient of all clients.

The server stores c, but not the clients' c_i. Three rules keep c equal to the mean of the members' c_i:

* A failed round changes neither c nor any c_i: clients start from their earlier states.
* A member that the server has never reached has c_i = 0. The member enters the mean in the first round
  in which it receives a message.
* If a client has lost its state, the server cannot subtract the client's c_i, so all variates restart at 0.
"""

from collections.abc import Mapping
from logging import WARNING
from typing import Any

import numpy as np
import numpy.typing as npt
from flwr.common.logger import log

from posy.models.parameters import FloatArray
from posy.settings import Search, setting
from posy.strategies.arrays import gradient, model, reply
from posy.strategies.base import PersonalisedStrategy
from posy.strategies.card import MethodCard, Paper, Program
from posy.strategies.replies import Update, num_examples, stacked, weighted_mean
from posy.strategies.settings import MethodSettings


class SCAFFOLDSettings(
    MethodSettings,
    robust="its server also averages control variates, which the rule would not cover",
    point="served",
):
    """Settings of SCAFFOLD."""

    sent = ("model", "control")
    returned = reply(
        model=model(noise=True, sums=True),
        control=gradient(
            change_of="control",
            noise="its server adds up the changes of all control variates, and would add up the noise of all rounds",
            sums=True,
        ),
    )

    server_lr: float = setting(
        1.0,
        "eta_g: the server's step size along the mean change of the model",
        source="Karimireddy et al. (2020), Section 7.1: a global step size of 1",
        above=0,
        search=Search(0.3, 1.5, log=True),
    )

    card = MethodCard(
        paper=Paper(
            "Karimireddy et al.",
            2020,
            "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning",
            "ICML",
            "https://proceedings.mlr.press/v119/karimireddy20a.html",
        ),
        equations=(
            "y_i ← y_i − η (g_i(y_i) + c − c_i) (Eq. 3)",
            "c_i⁺ = c_i − c + (x − y_i) / (K η) (Eq. 4, option II)",
            "x ← x + η_g mean_i (y_i − x),  c ← c + |S| / N · mean_i (c_i⁺ − c_i) (Eq. 5)",
        ),
        sent={"model (d,)": "the server's model x", "control (d,)": "the server's control variate c"},
        returned={"model (d,)": "the trained model y_i", "control (d,)": "the change c_i⁺ − c_i"},
        reveals="the client's model, and the change of its mean gradient",
        server_state={
            "model": "the server's model x (d,)",
            "control": "the server's control variate c (d,)",
            "weights": "each member's weight in c, 0 before the server first reaches it (M,)",
        },
        client_state={"control": "the client's control variate c_i (d,)"},
        scored="The served model, because the paper reports the test accuracy of x.",
        deviations=(
            "Both means weight clients by n_i, because the objective does. The paper weights clients equally "
            "(`client-weights=uniform`).",
            "With `momentum` β, K in Eq. 4 becomes Σ_{k=1..K} (1 − β^k) / (1 − β), so that c_i⁺ remains a mean of "
            "gradients. The paper uses plain SGD. With K unchanged, training diverges for β > 0.5.",
            "BatchNorm's running statistics have no control variate. `scaffold-server-lr` does not apply to them.",
            "All variates restart at 0 when a client has lost its state. The paper does not consider lost states.",
        ),
        program=Program(
            "TsingZ0/PFLlib",
            "d832e76f6a23b833038949ec1e4fdefe63a4d350",
            "system/flcore: clientSCAFFOLD.train, SCAFFOLD.aggregate_parameters",
            1e-6,
            by_authors=False,
        ),
    )

    def refusals(self) -> Mapping[str, str]:
        """Reject optimisers other than SGD with fresh momentum, and limits that would change a client's variate."""
        reason = "c is the mean of the clients' variates only if the server adds their changes with constant weights"
        return {
            "max-norm-ratio": f"{reason}; max-update-norm drops large updates",
            "max-client-weight": f"{reason}; client-weights = uniform gives all clients the same weight",
            "optimizer": "its control variates divide a distance by the rate and the number of steps, which is valid "
            "for SGD only",
            "optimizer-state": "a stored momentum holds gradients of earlier rounds, which would enter the variates",
        }


class SCAFFOLD(PersonalisedStrategy):
    """Send the model x and the control variate c, and average the changes of both (Eq. 5)."""

    state = ("model", "control", "weights")
    method: SCAFFOLDSettings

    def initialise(self) -> None:
        """Start from the initial model, and from c = 0."""
        super().initialise()
        self.control: FloatArray = np.zeros_like(self.model)
        self.weights: npt.NDArray[np.int64] = np.zeros(self.num_clients, np.int64)

    def aggregate(self, server_round: int, updates: list[Update]) -> dict[str, Any]:
        """Move x by the models' mean change, and c by the mean change of the replying clients' variates."""
        n = num_examples(updates)
        self.model = moved(self.model, weighted_mean(stacked(updates), n), self.method.server_lr)
        before = self.weights.sum()
        self.weights = self.weights.copy()
        for client in self.members:
            if client in self.clients:
                self.weights[client] = self.exchange.weight(client)
        change = weighted_mean(stacked(updates, "control"), n)
        self.control = mean_variate(self.control, before, change, n.sum(), self.weights.sum())
        return {"control_norm": float(np.linalg.norm(self.control))}

    def lost(self, clients: list[int]) -> None:
        """Restart c and every c_i at 0: c still contains the variates of the clients that have lost their states."""
        log(WARNING, "scaffold: a client has lost its control variate, so all variates restart at 0")
        self.control = np.zeros_like(self.control)
        self.restart_clients()


def moved(model: FloatArray, mean: FloatArray, rate: float) -> FloatArray:
    """Return x + η (y − x); for η = 1, exactly y.

    Parameters
    ----------
    model, mean : numpy.ndarray, float32, (d,)
        The server's model x, and the mean y of the trained models.
    rate : float
        η, the server's rate.
    """
    return mean if rate == 1 else (model + np.float32(rate) * (mean - model)).astype(np.float32)


def mean_variate(control: FloatArray, before: float, change: FloatArray, replied: float, total: float) -> FloatArray:
    """Return the mean c of the members' variates after the replying clients have changed theirs (Eq. 5).

    Parameters
    ----------
    control : numpy.ndarray, float32, (d,)
        c, the mean over members whose total weight is ``before``.
    before : float
        Total weight of the members that c covers: 0 in the first round, and below ``total`` if the server has since
        reached more members.
    change : numpy.ndarray, float32, (d,)
        Mean of c_i⁺ − c_i over the clients that replied.
    replied : float
        Total weight of the clients that replied.
    total : float
        Total weight of all members that the server has reached so far. All other members have c_i = 0.
    """
    return (np.float32(before / total) * control + np.float32(replied / total) * change).astype(np.float32)
