"""FedDRM: a density ratio model whose routing head guides each query to the best client.

"Beyond Aggregation: Guiding Clients in Heterogeneous Federated Learning": one body, a class branch with personal
classifiers, and a client branch that tells whose data a sample looks like.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from posy import figures
from posy.models.architecture import Architecture
from posy.models.two_branch import SHARING
from posy.settings import Search, SettingsError, setting
from posy.strategies.base import PersonalisedStrategy
from posy.strategies.method_settings import ALLOWED, MethodSettings


class FedDRMSettings(MethodSettings, noise=ALLOWED, sums=ALLOWED, point="served"):
    """Settings of FedDRM."""

    class_weight: float = setting(
        0.8,
        "lambda: weight of the class loss; 1 - lambda weighs the client loss",
        minimum=0,
        maximum=1,
        search=Search(0.3, 0.98),
    )
    routing: str = setting(
        "density",
        "match a query by density ratio (Eq. 3) or by posterior (Remark 2.4)",
        choices=("density", "posterior"),
    )
    sharing: str = setting("deep", "blocks that the two branches share (Fig. 6)", choices=SHARING)

    def network(self, plain: Architecture, num_clients: int) -> Architecture:
        """Add the client branch; raise :class:`SettingsError` for fewer than two clients to tell apart."""
        if num_clients < 2:
            raise SettingsError(f"num-clients = {num_clients}: feddrm needs at least 2 clients to tell apart")
        return replace(plain, clients=num_clients, sharing=self.sharing)

    def personal(self, network: Architecture) -> tuple[str, ...]:
        """Keep the class classifier."""
        return ("head",)


class FedDRM(PersonalisedStrategy):
    """Average all but the class classifiers with weights n_i / N (Algorithm 1, line 17), and route queries."""

    routed: npt.NDArray[np.int64] | None = None
    routing_accuracy: float | None = None

    def choose(self, client_logits: Tensor) -> Tensor:
        """Return the client ``(n,)`` that each query is sent to, from the outputs ``(n, M)`` of the client branch."""
        sizes = np.array([self.clients[c].num_train for c in sorted(self.clients)], np.float64)
        # A client that has never trained has taught nobody to recognise it.
        untaught = torch.tensor(self.newcomers, dtype=torch.int64, device=client_logits.device)
        return route_queries(client_logits.index_fill(-1, untaught, -torch.inf), sizes, self.method.routing)

    def note_routing(self, owner: npt.NDArray[np.int64], chosen: npt.NDArray[np.int64]) -> None:
        """Keep which client each query came from and was sent to, both ``(n,)``."""
        self.routed = routing_matrix(owner, chosen, self.num_clients)
        self.routing_accuracy = float(np.trace(self.routed) / self.routed.sum())

    def draw(self, folder: Path) -> None:
        """Draw the routing matrix: true client by chosen client."""
        if self.routed is not None:
            panel = figures.Panel(self.routed, xlabel="chosen client", ylabel="true client", label="samples")
            figures.heatmaps([panel], folder / "routing.png", title="Routing of the pooled test samples")

    def extra_summary(self) -> dict[str, Any]:
        """Return the routing accuracy."""
        return {"routing-accuracy": self.routing_accuracy}


def route_queries(client_logits: Tensor, n: npt.NDArray[np.float64], routing: str = "density") -> Tensor:
    """Return the client that each query is sent to.

    Parameters
    ----------
    client_logits : Tensor, (n, M)
        Outputs of the client branch.
    n : numpy.ndarray, (M,)
        Numbers of training samples of the clients.
    routing : str
        ``density``: argmax of logits − log(n_i / N), the density ratio of Eq. 3, in which large clients have
        no advantage. ``posterior``: argmax of the logits (Remark 2.4).
    """
    return routing_logits(client_logits, n, routing).argmax(dim=-1)


def routing_logits(client_logits: Tensor, n: npt.NDArray[np.float64], routing: str) -> Tensor:
    """Return the logits ``(n, M)`` of each client being the right one, by the arguments of :func:`route_queries`."""
    if routing != "density":
        return client_logits
    log_prior = torch.as_tensor(np.log(n / n.sum()), dtype=client_logits.dtype, device=client_logits.device)
    return client_logits - log_prior


def routing_matrix(
    owner: npt.NDArray[np.int64], chosen: npt.NDArray[np.int64], num_clients: int
) -> npt.NDArray[np.int64]:
    """Return how many samples of each client (row) were routed to each client (column)."""
    matrix = np.zeros((num_clients, num_clients), np.int64)
    np.add.at(matrix, (owner, chosen), 1)
    return matrix
