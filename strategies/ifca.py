"""IFCA (Ghosh et al., 2020): each client trains the cluster model with the lowest loss on its data."""

from typing import TYPE_CHECKING, Any

import numpy as np

from posy.models.parameters import FloatArray
from posy.randomness import model_seed
from posy.settings import Search, setting
from posy.strategies.arrays import Arrays, model, numbers, reply
from posy.strategies.base import PersonalisedStrategy
from posy.strategies.card import MethodCard, Paper, Program
from posy.strategies.replies import BadReplyError, Update, mean_of
from posy.strategies.settings import MethodSettings

if TYPE_CHECKING:
    from posy.models.architecture import Architecture
    from posy.strategies.settings import Settings

SINGLE_REPLIES = "its server averages each cluster separately, so it must know which client sent each model"


class IFCASettings(
    MethodSettings,
    robust="it averages each cluster separately, and an attacker can choose a cluster with few clients",
    point="served",
):
    """Settings of IFCA."""

    sent = ("models",)
    returned = reply(
        model=model(change_of="models", shape=("parameters",), noise=True, sums=SINGLE_REPLIES),
        cluster=numbers(
            noise="each client sends the number of its cluster, which does not tolerate noise", sums=SINGLE_REPLIES
        ),
    )

    card = MethodCard(
        paper=Paper(
            "Ghosh et al.",
            2020,
            "An Efficient Framework for Clustered Federated Learning",
            "NeurIPS",
            "https://arxiv.org/abs/2006.04088",
        ),
        equations=(
            "j_i = argmin_j F_i(θ_j) over the K models (Algorithm 1, cluster estimate)",
            "θ̃_i = local updates from θ_{j_i} (Algorithm 1, model averaging)",
            "θ_j ← mean of θ̃_i over the clients with j_i = j; a cluster without clients keeps its model",
        ),
        sent={"models (K, d)": "the cluster models θ_1 … θ_K"},
        returned={
            "model (d,)": "the trained model of the chosen cluster",
            "cluster ()": "the number j_i of this cluster",
        },
        reveals="a model and the number of its cluster, and thus which clients are similar",
        server_state={"models": "the cluster models (K, d)"},
        client_state={},
        scored="The served model, because the authors' programs score, for each client, the cluster model with the "
        "lowest loss.",
        deviations=(
            "Clients are weighted by number of samples, whereas the paper weights them equally "
            "(`client-weights=uniform`).",
            "The K models start from independent random weights. The authors' program for CIFAR-10 draws them again "
            "until enough clients choose each model.",
            "Algorithm 1 also has gradient averaging, which divides by the number of all clients. Posy implements only "
            "model averaging.",
        ),
        program=Program(
            "pgg3/FedFew",
            "1b29dec70b66d89b956d90e0da024897f698897a",
            "PFLlib/system/flcore/servers/serverifca.py: IFCA; PFLlib/system/flcore/clients/clientifca.py: clientIFCA",
            1e-6,
            by_authors=False,
        ),
    )
    clusters: int = setting(
        2,
        "number K of cluster models",
        source="cwFedAvg's Table 5, CIFAR-10",
        minimum=1,
        maximum=1000,
        search=Search(2, 5),
    )

    def reference(self, network: "Architecture", sent: Arrays, reply: Arrays) -> Arrays:
        """Return the starting values, with the model of the client's cluster as ``model``."""
        return {**super().reference(network, sent, reply), "model": sent["models"][int(reply["cluster"])]}

    def notices(self, settings: "Settings", network: "Architecture") -> tuple[str, ...]:
        """Warn if all cluster models are equal at the start, because then all clients stay in cluster 0."""
        if self.clusters == 1:
            return ("with ifca-clusters = 1, all clients share one model, so the run is equivalent to FedAvg",)
        first, second = (network.initial(model_seed(settings.run.seed, number)) for number in (0, 1))
        if not np.array_equal(first, second):
            return ()
        return (
            "`weights` initialises all cluster models identically, so all clients stay in cluster 0, and the run is "
            "equivalent to FedAvg",
        )


class IFCA(PersonalisedStrategy):
    """Send K models; average each over the clients that chose it (Algorithm 1, model averaging)."""

    state = ("models",)
    method: IFCASettings

    def initialise(self) -> None:
        """Start from K independent initialisations."""
        self.models: FloatArray = np.stack([self.initial(k) for k in range(self.method.clusters)])

    def check(self, client: int, arrays: Arrays) -> None:
        """Reject a cluster that does not exist."""
        if int(arrays["cluster"]) not in range(len(self.models)):
            raise BadReplyError(f"cluster {arrays['cluster']} of {len(self.models)}")

    def aggregate(self, server_round: int, updates: list[Update]) -> dict[str, Any]:
        """Average every cluster's model over its clients; a cluster without clients keeps its model."""
        clusters: dict[int, list[Update]] = {k: [] for k in range(len(self.models))}
        for update in updates:
            clusters[int(update.arrays["cluster"])].append(update)
        self.models = np.stack([mean_of(part) if part else self.models[k] for k, part in clusters.items()])
        return {"cluster_sizes": [len(part) for part in clusters.values()]}
