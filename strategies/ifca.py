"""IFCA (Ghosh et al., 2020): K cluster models; each client trains the one that fits it best."""

from typing import Any

import numpy as np
from flwr.common.typing import NDArrays

from posy.models.architecture import Architecture
from posy.models.parameters import FloatArray
from posy.settings import Search, setting
from posy.strategies.base import PersonalisedStrategy
from posy.strategies.method_settings import MethodSettings, Refused
from posy.strategies.replies import BadReplyError, Update, mean_of


class IFCASettings(
    MethodSettings,
    noise=Refused("each client names its cluster beside its model, and a name cannot be noised"),
    sums=Refused("its server averages each cluster by itself, so it must see which model is whose"),
    point="served",
):
    """Settings of IFCA."""

    clusters: int = setting(2, "number K of cluster models", minimum=1, maximum=1000, search=Search(2, 5))

    def reference(self, network: Architecture, sent: NDArrays, reply: NDArrays) -> NDArrays:
        """Return the model of the client's cluster."""
        return [sent[0][int(reply[1])]]


class IFCA(PersonalisedStrategy):
    """Send K models; average each over the clients that chose it (Algorithm 1, model averaging)."""

    state = ("models",)

    def initialise(self) -> None:
        """Start from K independent initialisations."""
        self.models: FloatArray = np.stack([self.initial(k) for k in range(self.method.clusters)])

    def serve(self, client: int) -> NDArrays:
        """Send all K models ``(K, d)``."""
        return [self.models]

    def expected_shapes(self, client: int) -> list[tuple[int, ...]]:
        """Expect one model ``(d,)`` and the number of the cluster ``()``."""
        return [(self.size,), ()]

    def check(self, arrays: NDArrays) -> None:
        """Refuse a cluster that does not exist."""
        if int(arrays[1]) not in range(len(self.models)):
            raise BadReplyError(f"cluster {arrays[1]} of {len(self.models)}")

    def aggregate(self, server_round: int, updates: list[Update]) -> dict[str, Any]:
        """Average every cluster's model over its clients; a cluster that nobody chose stays as it is."""
        clusters: dict[int, list[Update]] = {k: [] for k in range(len(self.models))}
        for update in updates:
            clusters[int(update.arrays[1])].append(update)
        self.models = np.stack([mean_of(own) if own else self.models[k] for k, own in clusters.items()])
        return {"cluster_sizes": [len(own) for own in clusters.values()]}
